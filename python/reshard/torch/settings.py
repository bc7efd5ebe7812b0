"""What the program chooses and training does not move: constants of schedulers, options of parameter groups.

A state dict does not say which of its values training moves. Therefore the values before the first step are recorded in
every save, and compared with those of the program that resumes: both are values that no step has moved. A checkpoint
without the record has the current values only; of these, the constructor arguments of schedulers are compared, and the
options that no scheduler moves.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from reshard.torch.optimizers import plain
from reshard.torch.schedulers import CHILDREN, children, unwrapped
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from reshard.torch.optimizers import NamedOptimizer

STARTED = "started"
"""The name of the record in the saved state of a trainer, and in each saved parameter group."""

_FUNCTIONS = "lr_lambdas"
_RATES = ("max_lr", "initial_lr", "lr", "min_lr")  # of these, the first that differs implies the others
_OF_SCHEDULER = {"max_lr", "min_lr", "max_momentum", "base_momentum"}  # options that schedulers put into groups
_MOMENTA = {"momentum", "betas"}
_NOT_OPTIONS = ("params", "param_names")


@dataclass(frozen=True)
class Difference:
    """A setting that differs: its name, what it belongs to, both values, and whose settings it is one of."""

    word: str
    of: str
    saved: Any
    now: Any
    field: str
    is_kept: bool = False

    def told(self, policy: str) -> str:
        """The difference as a sentence, with the value that is used."""
        whose = "program's" if policy == "program" or self.is_kept else "saved"
        text = f"{show(self.word)} of {self.of} is {self.saved!r:.80} in the checkpoint, and {self.now!r:.80} in the"
        return f"{text} program" + ("" if policy == "error" else f": the {whose} value is used")


@dataclass
class Started:
    """The settings of a run before its first step.

    Attributes:
        options: options of the parameter groups, of each optimizer.
        schedulers: states of the schedulers, by name; only values that can be compared.
        frozen: keys of the parameters for which no gradient is computed; None: not known.
    """

    options: list[list[dict[str, Any]]] = field(default_factory=list)
    schedulers: dict[str, dict[str, Any]] = field(default_factory=dict)
    frozen: frozenset[str] | None = None

    @classmethod
    def of(cls, optimizers: Iterable[Any], objects: Mapping[str, Any]) -> Started:
        """The settings as they are now; nothing, if an optimizer or a scheduler has made a step.

        Args:
            optimizers: optimizers of torch.
            objects: objects of the run by name; those named `scheduler` are looked at.

        Example:
            >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
            >>> started = Started.of([optimizer], {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5)})
            >>> started.options[0][0]["lr"], started.schedulers["scheduler"]["step_size"]
            (0.1, 5)
        """
        optimizers = list(optimizers)
        named = {name: one for name, one in objects.items() if name.partition(".")[0] == "scheduler"}
        n_steps = [getattr(unwrapped(one), "last_epoch", 0) for one in named.values()]
        if any(one.state for one in optimizers) or any(isinstance(n, int | float) and n > 0 for n in n_steps):
            return cls()
        options = [[_options(group) for group in one.param_groups] for one in optimizers]
        return cls(options, {name: state_of(one) for name, one in named.items()})

    def group(self, optimizer: int, index: int) -> dict[str, Any]:
        """The options of a group; nothing is known of one that was added later."""
        groups = self.options[optimizer] if optimizer < len(self.options) else []
        return groups[index] if index < len(groups) else {}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: found
        for name, value in group.items()
        if name not in _NOT_OPTIONS and (found := _value(value)) is not None
    }


def state_of(one: Any) -> dict[str, Any]:
    """The values in the state of a scheduler that can be compared, with those that its functions hold."""
    one = unwrapped(one)
    state = one.state_dict()
    if not isinstance(state, dict):
        return {}
    found = {str(key): value for key, given in state.items() if (value := _value(given)) is not None}
    functions = getattr(one, _FUNCTIONS, None)
    if isinstance(functions, list):
        found[_FUNCTIONS] = [_held(function) for function in functions]
    if children(one):
        found[CHILDREN] = [state_of(child) for child in children(one)]
    return found


def scheduler_differences(
    one: Any, was: Mapping[str, Any], now: Mapping[str, Any], name: str, *, is_record: bool
) -> Iterator[Difference]:
    """The constants of a scheduler that differ.

    Args:
        one: the scheduler of the run.
        was: its state in the run that saved, as of `state_of`; before the first step if it `is_record`.
        now: as of `state_of`, before its state is restored.
        name: its name in messages.
        is_record: whether no step has moved the values of `was`.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
        >>> one = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        >>> now = state_of(one)
        >>> [found] = scheduler_differences(one, {**now, "step_size": 3}, now, "scheduler", is_record=True)
        >>> found.told("saved")
        '`step_size` of `scheduler` is 3 in the checkpoint, and 5 in the program: the saved value is used'
    """
    one = unwrapped(one)
    words = constants(one)
    of = show(name)
    keys = [key for key in now if key in was and key not in (_FUNCTIONS, CHILDREN) and was[key] != now[key]]
    told = {words[key]: key for key in keys if key in words}
    if is_record and not told:
        told = {key: key for key in keys if not key.startswith("_") and key != "base_lrs"}
    for word in sorted(told):
        yield Difference(word, of, was[told[word]], now[told[word]], "scheduler")
    both = zip(was.get(_FUNCTIONS, ()), now.get(_FUNCTIONS, ()), strict=False)
    seen = set()
    for before, after in both if is_record else ():
        for word in sorted(after.keys() & before.keys()):
            if before[word] != after[word] and word not in seen:
                seen.add(word)
                yield Difference(word, of, before[word], after[word], "scheduler", is_kept=True)
    inner = was.get(CHILDREN), now.get(CHILDREN)
    if inner[0] is not None and inner[1] is not None and len(inner[0]) == len(inner[1]):
        for number, child in enumerate(children(one)):
            yield from scheduler_differences(
                child, inner[0][number], inner[1][number], f"{name}[{number}]", is_record=is_record
            )


def merged(one: Any, saved: Any, was: Mapping[str, Any], now: Mapping[str, Any], fields: Sequence[str]) -> Any:
    """The saved state of a scheduler with the constants of the program.

    Args:
        one: the scheduler of the run, before its state is restored.
        saved: the saved state.
        was: as in `scheduler_differences`.
        now: as in `scheduler_differences`.
        fields: the fields of `Settings` that are "program".
    """
    one = unwrapped(one)
    if not isinstance(saved, dict) or not fields:
        return saved
    words, live, made = constants(one), one.state_dict(), dict(saved)
    for key in now:
        if key in (_FUNCTIONS, CHILDREN) or key not in was or key not in saved or was[key] == now[key]:
            continue
        owner = "optimizer" if key == "base_lrs" and key not in words else "scheduler"
        if owner in fields and _value(saved[key]) == was[key]:  # else training has moved it
            made[key] = live[key]
    states, outer, inner = saved.get(CHILDREN), was.get(CHILDREN) or [], now.get(CHILDREN) or []
    if isinstance(states, list | tuple) and len(states) == len(outer) == len(inner):
        parts = zip(children(one), states, outer, inner, strict=True)
        made[CHILDREN] = [merged(child, state, before, after, fields) for child, state, before, after in parts]
    return made


def group_differences(
    live: Sequence[NamedOptimizer],
    started: Started,
    saved: Mapping[int, Mapping[str, Any]],
    schedulers: Iterable[Any],
) -> tuple[list[Difference], dict[int, dict[str, str]]]:
    """The options of parameter groups that differ.

    Args:
        live: the optimizers of the run.
        started: the settings of the run.
        saved: the saved group of each group of the run, by the `id` of the latter.
        schedulers: the schedulers of the run.

    Returns:
        The differences, one for all groups with the same, and of each group, by `id`, the options that differ with the
        field of `Settings` that decides.
    """
    kinds = [type(unwrapped(one)).__name__ for one in schedulers]
    groups_of: dict[tuple[str, str, str, str, str], tuple[list[int], Any, Any]] = {}
    found: dict[int, dict[str, str]] = {}
    names = ["optimizer"] if len(live) == 1 else [f"optimizer.{number}" for number in range(len(live))]
    for number, (name, optimizer) in enumerate(zip(names, live, strict=True)):
        for index, group in enumerate(optimizer.optimizer.param_groups):
            record = saved.get(id(group))
            now = started.group(number, index)
            if record is None or not now:
                continue
            was = record.get(STARTED) or _unmoved(record["options"], has_scheduler=bool(kinds))
            other = [key for key in now if key in was and not _same(was[key], now[key])]
            is_cycle = "max_lr" in now
            owner = {
                key: "scheduler" if key in _OF_SCHEDULER or (is_cycle and key in _RATES) else "optimizer"
                for key in other
            }
            found[id(group)] = owner
            rates = [key for key in _RATES if key in other]
            told = [key for key in other if key not in _RATES] + ([] if "CyclicLR" in kinds else rates[:1])
            for key in sorted(told):
                word = "lr" if key == "initial_lr" else key
                entry = (name, word, repr(was[key]), repr(now[key]), owner[key])
                groups_of.setdefault(entry, ([], was[key], now[key]))[0].append(index)
    n_groups = {name: len(one.optimizer.param_groups) for name, one in zip(names, live, strict=True)}
    differences = []
    for (name, word, _, _, policy), (indexes, before, after) in groups_of.items():
        of = show(name)
        if len(indexes) < n_groups[name]:
            listed = ", ".join(map(str, indexes))
            of = f"group{'s' if len(indexes) > 1 else ''} {listed:.80} of {of}"
        differences.append(Difference(word, of, before, after, policy))
    return differences, found


def chosen_options(
    group: Mapping[str, Any], record: Mapping[str, Any], now: Mapping[str, Any], differing: Mapping[str, str],
    fields: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """The saved options of a group without those that stay the program's.

    Args:
        group: the group of the run.
        record: the saved group.
        now: the options of the run before the first step.
        differing: the options that differ, with the field of `Settings` that decides.
        fields: the fields of `Settings` that are "program".
    """
    options = dict(record["options"])
    was = record.get(STARTED) or record["options"]
    for key, owner in differing.items():
        if owner in fields and key in options and _same(_value(options[key]), was.get(key)):
            del options[key]
    base = next((key for key in ("initial_lr", "lr") if differing.get(key) == "optimizer"), None)
    if base and "optimizer" in fields and "lr" in options and was[base]:
        lr, factor = options["lr"], now[base] / was[base]
        if isinstance(lr, int | float | torch.Tensor) and "lr" in group:
            options["lr"] = lr * factor
    return options


def set_rates(one: Any) -> None:
    """Set the learning rates that a scheduler has at its step, if they follow from the step alone."""
    one = unwrapped(one)
    rates: list[Any] | None = None
    if isinstance(one, torch.optim.lr_scheduler.LambdaLR):
        rates = [base * function(one.last_epoch) for function, base in zip(one.lr_lambdas, one.base_lrs, strict=True)]
    elif callable(getattr(one, "_get_closed_form_lr", None)):
        rates = list(one._get_closed_form_lr())  # noqa: SLF001  there is no public way
    for group, rate in zip(one.optimizer.param_groups, rates, strict=True) if rates is not None else ():
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(float(rate))
        else:
            group["lr"] = rate
    if rates is not None:
        one._last_lr = [group["lr"] for group in one.optimizer.param_groups]  # noqa: SLF001  as its `step` does


def constants(one: Any) -> dict[str, str]:
    """The constructor arguments of a scheduler that its state has, by the key there.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
        >>> constants(torch.optim.lr_scheduler.StepLR(optimizer, 5))["step_size"]
        'step_size'
    """
    words: dict[str, str] = {}
    for base in type(one).__mro__:
        if "__init__" in vars(base) and base is not object:
            for word in list(inspect.signature(base.__init__).parameters)[1:]:  # type: ignore[misc]
                if word not in {"last_epoch", "optimizer", "args", "kwargs"}:
                    words |= {key: word for key in (word, f"_{word}", f"{word}s") if key != CHILDREN}
    return words


def comparable_state(one: Any, saved: Any) -> dict[str, Any]:
    """The constants in the saved state of a scheduler, where the state before the first step was not recorded."""
    one = unwrapped(one)
    if not isinstance(saved, dict):
        return {}
    words = constants(one)
    found = {key: value for key, given in saved.items() if key in words and (value := _value(given)) is not None}
    states = saved.get(CHILDREN)
    if isinstance(states, list | tuple) and len(states) == len(children(one)):
        found[CHILDREN] = [comparable_state(child, state) for child, state in zip(children(one), states, strict=True)]
    return found


def _unmoved(options: Mapping[str, Any], *, has_scheduler: bool) -> dict[str, Any]:
    """The options of a group that no scheduler moves."""
    moved = {"lr"} if has_scheduler else set[str]()
    if options.keys() & _OF_SCHEDULER:
        moved |= _MOMENTA
    return {name: value for name, value in _options(options).items() if name not in moved}


def _held(function: Any) -> dict[str, Any]:
    """What a function is: its name, a digest of its code, arguments of `functools.partial`, and variables around it."""
    found: dict[str, Any] = {}
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    code = getattr(inner, "__code__", None)
    if code is not None:
        # Another version of Python compiles the same function to other code.
        found |= {
            "the name": code.co_name,
            f"the code (of Python {sys.version_info[0]}.{sys.version_info[1]})": _code(code),
        }
    while isinstance(function, functools.partial):
        found |= {str(word): value for word, value in function.keywords.items()}
        found |= {f"argument {number}": value for number, value in enumerate(function.args)}
        function = function.func
    cells = getattr(function, "__closure__", None) or ()
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, cells, strict=False):
        try:
            found.setdefault(name, cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    return {name: value for name, given in found.items() if (value := _value(given)) is not None}


def _code(code: Any) -> str:
    """A digest of what a function does, without the place where it is defined."""
    inner = [_code(one) if hasattr(one, "co_code") else repr(one) for one in code.co_consts if not isinstance(one, str)]
    return hashlib.sha256(repr((code.co_code, code.co_names, inner)).encode()).hexdigest()[:8]


def _same(one: Any, other: Any) -> bool:
    return bool(one == other) or (one != one and other != other)  # noqa: PLR0124  nan


def _value(value: Any) -> Any:
    """A constant as a value that can be compared and saved; None: it is no plain value."""
    if isinstance(value, dict):
        named = {str(key): _value(one) for key, one in value.items()}
        return None if None in named.values() else named
    if isinstance(value, list | tuple):
        found = [_value(one) for one in value]
        return None if None in found else found  # functions, such as those of LambdaLR
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.numel() <= 16 and not hasattr(value, "device_mesh") else None
    return plain(value) if isinstance(value, bool | int | float | str) else None
