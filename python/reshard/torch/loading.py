"""A checkpoint's arrays for this rank, read into the memory of live tensors where possible.

The caller describes the live tensors (`state.describe`), and passes the arrays to `restore.apply`. An array whose live
tensor is contiguous and on the host is read into the memory of that tensor; others get memory of their own. Tensors
that the run does not have are not read. The choice of the checkpoint and the meaning of the arrays are not known here.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from reshard import _core, dtypes
from reshard.errors import ArgumentError, MismatchError, UnsupportedError
from reshard.formats import counter_tensors
from reshard.formats.left_out import LeftOut
from reshard.formats.outputs import as_array, fill
from reshard.formats.run_state import Live, is_number, is_optimizer, is_whole_optimizer, model_of, translated
from reshard.formats.weight_sets import Known, advice, chosen, without_wrappers
from reshard.layout import TensorLayout
from reshard.layout.bind import bound_of
from reshard.layout.patterns import Matcher
from reshard.layout.resolve import Resolved
from reshard.options import Strict
from reshard.torch.objects import TENSORS, Entry, object_tensors
from reshard.torch.optimizers import OptimizerRecord
from reshard.torch.restore import parameter_like
from reshard.torch.tensors import as_tensor, from_tensor, torch_dtype
from reshard.values.argument_types import Part, VerifyMode
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import numpy as np

    from reshard.checkpoint import Checkpoint
    from reshard.formats.run_state import Values
    from reshard.layout import BoundLayout
    from reshard.options import InitFrom
    from reshard.torch.state import Described

MOST_NAMES = 1000
"""Names of tensors in one warning of a decision."""


@dataclass(frozen=True)
class Read:
    """The result of `read_for`.

    Attributes:
        arrays: this rank's parts, by key.
        extra: the state beside the tensors, by name, with the rank-local values of this rank.
        others: `sampler` and `per rank` of the state of each rank that saved, if their number is another one; of
            the first rank only, unless those of all are asked for.
        has_optimizer: whether the checkpoint has optimizer state.
        world_size: number of ranks that saved it; None: not known.
        unexpected: keys of the checkpoint that no rank of the run has, which were not read.
        kept: keys of parameters that keep their initial values on purpose, and whose optimizer state is new.
        new_state: keys of parameters whose optimizer state is new, although they are loaded.
        shapes: global shapes of tensors of objects that are read as parts of a parameter.
        notes: what differs, and what a checkpoint of another program holds and is left out, as sentences.
        restored: how much of the model is loaded, as a sentence; empty if the run has no model.
        holds_streams: whether this package wrote it, which saves the random streams of a run.
        path: the checkpoint.
        left_out: the record of the tensors that the checkpoint leaves out. They are in `kept`, and not compared.
    """

    arrays: dict[str, np.ndarray]
    extra: dict[str, Any]
    others: list[dict[str, Any]]
    has_optimizer: bool
    world_size: int | None
    unexpected: tuple[str, ...] = ()
    kept: frozenset[str] = frozenset()
    new_state: frozenset[str] = frozenset()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    restored: str = ""
    holds_streams: bool = True
    path: str = ""
    left_out: LeftOut | None = None


def read_for(
    described: Described,
    checkpoint: Checkpoint,
    rank: int,
    *,
    part: Part = "all",
    with_optimizer: bool = True,
    strict: Strict = Strict(),  # noqa: B008  frozen
    cast: bool = False,
    init: InitFrom | None = None,
    of_each_rank: bool = False,
    verify: VerifyMode = "touched",
    threads: int | None = None,
    leaves_out: bool = False,
) -> Read:
    """Read the parts of a checkpoint that a rank holds.

    Args:
        described: the live tensors of this rank.
        checkpoint: the checkpoint.
        rank: the rank of this process.
        part: "model", "optimizer" or "all".
        with_optimizer: whether state of the optimizer is read.
        strict: what happens to tensors of other shapes.
        cast: the tensors that grow may have another floating-point dtype.
        init: which tensors are taken; None: all.
        of_each_rank: whether the run has objects whose state is made of that of all ranks that saved.
        verify: as in `Checkpoint.load`.
        threads: number of threads of the copy; None: chosen by the core.
        leaves_out: whether the caller compares the tensors that the checkpoint leaves out.

    Raises:
        UnsupportedError: the checkpoint leaves tensors out, and the caller does not compare them.
        LayoutError: the tensors of the checkpoint cannot be partitioned as the live ones are.
        MismatchError: a tensor has another shape than the live one.
        ArgumentError: a pattern of `init` matches no tensor.
        CoverageError, DamagedFileError, StorageError: while reading. Live tensors may have changed by then.

    Example:
        >>> import reshard, torch
        >>> from reshard.torch.state import describe
        >>> _ = reshard.save("some", 7, {"weight": torch.tensor([[5.0]])})
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> with reshard.open("some") as checkpoint:
        ...     sorted(read_for(describe(model), checkpoint, rank=0).arrays)
        ['weight']
        >>> model.weight.item()
        5.0
    """
    wanted = _RankRequest(described, checkpoint, with_optimizer, strict, cast, part, leaves_out)
    values = None if checkpoint.data.is_renamed else checkpoint.data.run_values(rank)
    if values is not None:
        return _read_of_torch(wanted, values, rank, part=part, init=init, verify=verify, threads=threads)
    names = _with_wrappers(described, checkpoint)
    if not names:
        return _read_plain(
            wanted, rank, part=part, init=init, of_each_rank=of_each_rank, verify=verify, threads=threads
        )
    with checkpoint.view(((names.get(key, key), key) for key in checkpoint), is_renamed=True) as view:
        wanted.checkpoint = view
        return _read_plain(
            wanted, rank, part=part, init=init, of_each_rank=of_each_rank, verify=verify, threads=threads
        )


def _with_wrappers(described: Described, checkpoint: Checkpoint) -> dict[str, str]:
    """Names of the run, by stored names that differ from them only in parts that wrappers add."""
    known = Known({*described.names, *described.all_aliases})
    names = without_wrappers(checkpoint, known, set(checkpoint.keys("optimizer")), str(checkpoint.path))
    return {key: name for key, name in names.items() if key != name}


def _read_plain(
    wanted: _RankRequest,
    rank: int,
    *,
    part: Part,
    init: InitFrom | None,
    of_each_rank: bool,
    verify: VerifyMode,
    threads: int | None,
) -> Read:
    """As `read_for`, of a checkpoint under the names of this package."""
    checkpoint, described = wanted.checkpoint, wanted.described
    # Formats without a file of counters keep them as tensors; they come as `checkpoint.common`.
    counters = (
        set(counter_tensors.NAMES) - described.model.keys() if checkpoint.data.traits.counters_as_tensors else set()
    )
    keys = [key for key in checkpoint.keys(part) if key not in counters]
    extra = checkpoint.extra(rank=rank)
    left_out = LeftOut.of(extra, str(checkpoint.path))
    if left_out is not None:
        if not wanted.leaves_out:
            raise left_out.refusal(str(checkpoint.path), "this")
        names = {key if key in described.names else described.all_aliases.get(key, "") for key in left_out.tensors}
        wanted.left_out = names & described.names
        wanted.kept.update(wanted.left_out)
        wanted.notes.append(f"the checkpoint leaves out {left_out.to_text()}: they are those of the program")
    wanted.of_objects = object_tensors(extra)
    # Some formats know the tensors of the optimizer by their names only; the record of a run knows all of them.
    wanted.of_optimizer = {key for key in checkpoint.keys("optimizer") if key not in counters} | _recorded(extra)
    wanted.sort(keys, _saved_aliases(extra), _Taken.of(init), with_objects=init is None and part == "all")
    if init is not None:
        wanted.check_quantised()
    has_optimizer = any(key in wanted.of_optimizer and key not in wanted.of_objects for key in checkpoint)
    return Read(
        _arrays(wanted, rank, verify, threads),
        extra,
        _of_ranks(checkpoint, described.world_size, of_each_rank=of_each_rank),
        has_optimizer,
        checkpoint.data.world_size(),
        tuple(wanted.unexpected),
        frozenset(wanted.kept),
        frozenset(wanted.new_state),
        {key: tuple(checkpoint.data.index.shape(key)) for key in wanted.alike},
        tuple(wanted.notes),
        wanted.restored(),
        # Another program saves no random streams that this package could restore.
        bool(extra) or checkpoint.data.manifest is not None,
        str(checkpoint.path),
        left_out,
    )


def _of_ranks(checkpoint: Checkpoint, world_size: int, *, of_each_rank: bool) -> list[dict[str, Any]]:
    """The rank-local state of objects on the ranks that saved, if their number is another one."""
    n_saved = checkpoint.data.world_size()
    if n_saved in {None, world_size}:
        return []
    states = (checkpoint.extra(rank=rank) for rank in range((n_saved or 0) if of_each_rank else 1))
    return [{name: state[name] for name in ("sampler", "per rank") if name in state} for state in states]


def _arrays(wanted: _RankRequest, rank: int, verify: VerifyMode, threads: int | None) -> dict[str, np.ndarray]:
    """Read what is wanted, into the memory of live tensors where that is possible."""
    plan = wanted.checkpoint.plan(wanted.request(rank), verify=verify, keys=wanted.keys)
    live = wanted.described.out()
    direct: list[int] = []
    other: list[int] = []
    planned = plan.arrays
    for number, (name, dtype, shape, _) in enumerate(planned):
        is_alike = (
            name in live
            and live[name].dtype == dtypes.numpy_dtype(dtype)
            and live[name].shape == dtypes.array_shape(dtype, shape)
        )
        (direct if is_alike else other).append(number)
    arrays: dict[str, np.ndarray] = {}
    if direct:
        names = [planned[number][0] for number in direct]
        fill(plan.only(direct), [live[name] for name in names], threads)
        arrays |= {name: live[name] for name in names}
    if other:
        for number, place in zip(other, plan.only(other).load(threads=threads), strict=True):
            name, dtype, shape, _ = planned[number]
            arrays[name] = as_array(*place, dtype, shape)
    return arrays | wanted.grown(arrays)


def _read_of_torch(
    wanted: _RankRequest,
    values: Values,
    rank: int,
    *,
    part: Part,
    init: InitFrom | None,
    verify: VerifyMode,
    threads: int | None,
) -> Read:
    """As `read_for`, of a checkpoint that names the state of a run as torch does."""
    checkpoint, described = wanted.checkpoint, wanted.described
    values, options = _with_tensor_options(values, checkpoint, described)
    live = _live(described, with_optimizers=part == "all", with_objects=init is None and part == "all")
    shapes = {key: tuple(checkpoint.data.index.shape(key)) for key in checkpoint if key not in options}
    entry = None if init is None else init.entry
    model = model_of(shapes, live, entry=entry, path=str(checkpoint.path))
    state = translated(shapes, values, live, model)
    _check_plain(checkpoint, values, state.trainer if part == "all" else {})
    if init is None and part == "all":
        _check_numbered(checkpoint, state.trainer["objects"], described.live.objects)
    # A run that starts from a model does not need what lies beside it, such as averaged weights or metrics.
    outside = {*state.outside, *(key for key, name in state.keys.items() if name in state.places)}
    outside = outside.intersection(checkpoint.keys(part)) if init is not None or part == "model" else set()
    keys = [key for key in checkpoint.keys(part) if key not in outside]
    checkpoint.data.check(keys)
    tensors = {state.keys[key]: key for key in keys if key in state.keys}
    if outside:
        names = listed(map(show, sorted(outside)), MOST_NAMES)
        wanted.notes.append(f"the checkpoint also has {names}, outside of the state dict of the model: not loaded")
    _check_distinct(checkpoint, {key: state.keys[key] for key in keys if key in state.keys})
    of_optimizer = checkpoint.keys("optimizer")
    wanted.of_optimizer = {state.keys[key] for key in of_optimizer if key in state.keys} - state.places.keys()
    wanted.of_objects = {name: (owner, Entry(name, path)) for name, (owner, path) in state.places.items()}
    with checkpoint.view(tensors, is_renamed=True) as view:
        wanted.checkpoint = view
        wanted.sort(list(tensors), {}, _Taken.of(init), with_objects=init is None and part == "all")
        if init is not None:
            wanted.check_quantised()
        arrays = _arrays(wanted, rank, verify, threads)
    trainer = (
        state.trainer if part == "all" else {name: one for name, one in state.trainer.items() if name != "optimizer"}
    )
    places: dict[str, list[Any]] = {}
    for owner, place in wanted.of_objects.values() if part == "all" else ():
        places.setdefault(owner, []).append(place.to_value())
    return Read(
        arrays,
        {"trainer": {**trainer, TENSORS: places}},
        [],
        bool(wanted.of_optimizer),
        checkpoint.data.world_size(),
        tuple(wanted.unexpected),
        frozenset(wanted.kept),
        frozenset(wanted.new_state),
        notes=(*wanted.notes, *state.notes),
        restored=wanted.restored(),
        holds_streams=False,
        path=str(checkpoint.path),
    )


def _live(described: Described, *, with_optimizers: bool, with_objects: bool) -> Live:
    """The names of the run, for `translated`."""
    live = described.live
    groups = [
        (one.kind, [[one.names[id(p)] for p in group["params"]] for group in one.optimizer.param_groups])
        for one in live.optimizers
    ]
    key_of = {**{name: name for name in described.names}, **described.all_aliases}
    shapes = {name: described.shapes.get(key) for name, key in key_of.items()}
    states = described.extra.get("objects", {})
    objects = [name for name in live.objects if with_optimizers or not is_whole_optimizer(name)]
    return Live(shapes, groups if with_optimizers else (), objects, live.named.extra_state, states, with_objects)


def _with_tensor_options(values: Values, checkpoint: Checkpoint, described: Described) -> tuple[Values, set[str]]:
    """Add the options of parameter groups that are tensors of one element, such as `lr` of a compiled optimizer.

    Returns:
        The values with them, and the keys of these tensors.
    """
    by_name, keys, sequences = dict(values.by_name), set(), set()

    def is_group(name: str) -> bool:
        return is_number(name) or name in described.model or name in described.aliases

    for key in checkpoint:
        head, is_option, rest = f".{key}".partition(".param_groups.")
        if not is_option or (head and not is_optimizer(key)) or math.prod(checkpoint.shape(key)) != 1:
            continue
        name, _, last = key.rpartition(".")
        parent = rest.rpartition(".")[0]
        if not is_group(parent):
            # An element of a sequence, such as `betas`.
            if not is_number(last) or not is_group(parent.rpartition(".")[0]):
                continue
            before = f"{name}.{int(last) - 1}"
            if int(last) > 0 and before not in by_name and before not in checkpoint:
                continue
            sequences.add(name)
        keys.add(key)
        by_name[key] = as_tensor(checkpoint.read(key)).clone()
    for name in sequences:
        elements = itertools.takewhile(by_name.__contains__, (f"{name}.{n}" for n in itertools.count()))
        by_name[name] = tuple(map(by_name.pop, elements))
    return replace(values, by_name=by_name), keys


def _check_plain(checkpoint: Checkpoint, values: Values, trainer: Mapping[str, Any]) -> None:
    """Refuse state with an object that is not rebuilt: the run would fail when it uses it."""
    for path, value in _opaque([([name], value) for name, value in trainer.items()]):
        stored = ([name] for name, one in values.by_name.items() if any(v is value for _, v in _opaque([([], one)])))
        key = ".".join(next(stored, path))
        hint = "save it as a number, or start from the weights alone with `init_from=`"
        what = f"a {show(value.name)}"
        if value.name.startswith("torch._utils._rebuild"):
            what = "a tensor inside a value that is stored as one object"
            hint = (
                "resume from the file that `python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER "
                "FILE.pt` makes of it, or " + hint
            )
        raise UnsupportedError(
            f"{checkpoint.path}: {show(key)} holds {what}, which is not read", path=str(checkpoint.path), hint=hint
        )


def _check_numbered(checkpoint: Checkpoint, saved: Mapping[str, Any], objects: Mapping[str, Any]) -> None:
    """Refuse state by the names of parameters for an optimizer that loads it by their numbers: it would ignore it."""
    for name in filter(is_whole_optimizer, objects):
        one = objects[name]
        if name not in saved or not _is_numbered(one.state_dict()) or _is_numbered(saved[name]):
            continue
        raise UnsupportedError(
            f"{checkpoint.path}: the state of the optimizer is there, and cannot be loaded: it is stored by the names "
            f"of the parameters, and {type(one).__name__} of the run has a `load_state_dict` of its own, for their "
            "numbers",
            path=str(checkpoint.path),
            key=name,
            hint="go on with the program that saved it, or start from the weights alone with `init_from=`",
        )


def _is_numbered(state: object) -> bool:
    """Whether the state of an optimizer has its parameters by numbers, as that of torch."""
    groups = state.get("param_groups") if isinstance(state, dict) else None
    if not isinstance(state, dict) or not isinstance(groups, list) or not isinstance(state.get("state", {}), dict):
        return False
    numbers = [one for group in groups if isinstance(group, dict) for one in group.get("params", [])]
    return all(type(one) is int for one in (*numbers, *state.get("state", {})))


def _opaque(names: list[tuple[list[str], Any]]) -> Iterator[tuple[list[str], _core.Opaque]]:
    """The objects that are not rebuilt among values by their paths, and inside them."""
    seen = set()
    while names:
        path, value = names.pop()
        if isinstance(value, _core.Opaque):
            yield path, value
        inner = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
        )
        if id(value) not in seen:
            names += [([*path, str(key)], one) for key, one in inner]
        seen.add(id(value))


def _check_distinct(checkpoint: Checkpoint, names: Mapping[str, str]) -> None:
    """Refuse two tensors that would get one name."""
    first: dict[str, str] = {}
    for key, name in names.items():
        if first.setdefault(name, key) != key:
            raise MismatchError(
                f"{checkpoint.path}: {show(first[name])} and {show(key)} are both the state {show(name)} of the run",
                path=str(checkpoint.path),
                key=key,
            )


def _saved_aliases(extra: Mapping[str, Any]) -> dict[str, str]:
    """Other names of tied tensors when they were saved, and the key of each."""
    trainer = extra.get("trainer")
    aliases = trainer.get("aliases") if isinstance(trainer, dict) else None
    return {str(name): str(key) for name, key in aliases.items()} if isinstance(aliases, dict) else {}


def _recorded(extra: Mapping[str, Any]) -> set[str]:
    """Keys of the state tensors of optimizers, in the saved record."""
    trainer = extra.get("trainer")
    value = trainer.get("optimizer") if isinstance(trainer, dict) else None
    if not value:
        return set()
    record = OptimizerRecord.from_value(value)
    return {f"{slot}.{name}" for of_kind in (record.slots, record.local) for name in of_kind for slot in of_kind[name]}


def _can_grow(saved: tuple[int, ...], now: tuple[int, ...] | None) -> bool:
    """Whether a tensor has more rows than the saved one, and is alike otherwise."""
    return now is not None and len(saved) == len(now) > 0 and saved[1:] == now[1:] and saved[0] < now[0]


def _can_trim(saved: tuple[int, ...], now: tuple[int, ...] | None) -> bool:
    """Whether a tensor has fewer rows than the saved one, and is alike otherwise."""
    return now is not None and _can_grow(now, saved)


def _is_smaller(saved: tuple[int, ...], now: tuple[int, ...]) -> bool:
    """Whether a tensor has fewer elements than the saved one in some dims, and as many in the others."""
    return (
        len(saved) == len(now) and saved != now and all(n <= of_saved for n, of_saved in zip(now, saved, strict=True))
    )


@dataclass(frozen=True)
class _Taken:
    """Which parameters `InitFrom` takes."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    matchers: tuple[Matcher, Matcher] | None = None

    @classmethod
    def of(cls, init: InitFrom | None) -> _Taken:
        if init is None or not (init.include or init.exclude):
            return cls()
        include, exclude = tuple(init.include), tuple(init.exclude)
        try:
            return cls(include, exclude, (Matcher([[one] for one in include]), Matcher([[one] for one in exclude])))
        except ValueError as error:
            raise ArgumentError(f"`include` or `exclude` of `init_from`: {error}") from None

    def __call__(self, name: str) -> bool:
        if self.matchers is None:
            return True
        included, excluded = self.matchers
        return (not self.include or included.find(name) is not None) and excluded.find(name) is None

    def check(self, saved: Iterable[str], live: Iterable[str]) -> None:
        """Check that every pattern matches a tensor. Raises ArgumentError."""
        if self.matchers is None:
            return
        saved = list(saved)
        names = {"include": saved, "exclude": [*saved, *live]}
        for word, patterns, matcher in zip(names, (self.include, self.exclude), self.matchers, strict=True):
            unused = matcher.unused(names[word])
            if unused:
                raise ArgumentError(
                    f"`{word}` of `init_from` has {show(patterns[unused[0]])}, which matches no tensor",
                    hint="a pattern is a glob over the whole name, as the model has it, such as `lm_head.*`",
                )


@dataclass(eq=False)
class _RankRequest:
    """Which tensors of the checkpoint this rank reads, and as which region."""

    described: Described
    checkpoint: Checkpoint
    with_optimizer: bool
    strict: Strict
    cast: bool
    part: Part = "all"
    leaves_out: bool = False
    left_out: set[str] = field(default_factory=set)  # names of the run that the checkpoint leaves out
    loaded: set[str] = field(default_factory=set)  # names of the model, of all ranks
    of_optimizer: set[str] = field(default_factory=set)
    of_objects: Mapping[str, tuple[str, Entry]] = field(default_factory=dict)
    placed: dict[str, str] = field(default_factory=dict)  # keys that lie as a live parameter, and its name
    whole: list[str] = field(default_factory=list)
    alike: dict[str, str] = field(default_factory=dict)  # keys of objects without a live tensor, read as this parameter
    growing: dict[str, str] = field(default_factory=dict)  # keys whose live tensors have more rows; the parameter
    trimmed: dict[str, str] = field(default_factory=dict)  # keys whose live tensors have fewer rows; the parameter
    unexpected: list[str] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)
    new_state: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def sort(self, keys: list[str], aliases: Mapping[str, str], taken: _Taken, *, with_objects: bool) -> None:
        """Decide for every key of the checkpoint."""
        described = self.described
        name_of = {**{name: name for name in described.names}, **described.all_aliases}
        for name in described.names:
            if name in aliases:
                name_of.setdefault(aliases[name], name)
        slots: dict[str, list[str]] = {}
        stored: dict[str, str] = {}  # the key of each parameter of this rank
        taken.check((key for key in keys if key not in self.of_optimizer), described.names)
        for key in keys:
            if key in self.of_objects:
                if with_objects and self.of_objects[key][0] in described.live.objects:
                    self._of_object(key)
                continue
            is_slot = key not in name_of and key in self.of_optimizer
            if is_slot and not self.with_optimizer:
                continue
            name = key.partition(".")[2] if is_slot else key  # no slot has a dot in its name
            if not taken(name_of.get(name, name)):
                continue
            if name not in name_of:
                self.unexpected.append(key)
                continue
            if not is_slot:
                self.loaded.add(name_of[name])
            if name_of[name] not in described.model:
                pass  # another rank has it
            elif is_slot:
                slots.setdefault(name_of[name], []).append(key)
            else:
                stored.setdefault(name_of[name], key)
                self._model(key, name_of[name])
        left = sorted(name for name in described.model if not taken(name))
        if left:
            self.kept.update(left)
            self.notes.append(
                f"{listed(map(show, left), MOST_NAMES)} keep their initial values, as `init_from` does not include them"
            )
        self.loaded -= self.kept
        if self.part != "optimizer":
            self._check_some(keys)
        for name, of_name in slots.items():
            self._slots(name, stored.get(name), of_name)

    def check_quantised(self) -> None:
        """Refuse a start from quantised weights of which the model takes some parts and leaves out others."""
        names = self.described.names - self.kept
        for one in self.checkpoint.quantised().values():
            taken = [key for key in one.parts.values() if key in names]
            left = [key for key in one.parts.values() if key not in names]
            if taken and left:
                raise MismatchError(
                    f"{show(one.name)} of the checkpoint is quantised ({one.kind}): the model would load "
                    f"{show(taken[0])} without {show(left[0])}",
                    path=str(self.checkpoint.path),
                    key=left[0],
                    hint='convert the checkpoint with `dtype="bfloat16"` first, which makes ordinary tensors of it; or '
                    "include all parts",
                )

    def _check_some(self, keys: list[str]) -> None:
        """Refuse a checkpoint of which no tensor is one of the model, whatever `strict` accepts."""
        names = self.described.names
        if not names or self.loaded or names <= self.left_out:
            return
        stored = {key: self._shape(key) for key in keys if key not in self.of_optimizer and key not in self.of_objects}
        path = str(self.checkpoint.path)
        chosen(stored, {name: self.described.shapes.get(name) for name in names}, path=path)  # raises if there are two
        parts = [f"the checkpoint lacks {listed(map(show, sorted(names - self.kept)))}"] if names - self.kept else []
        if self.unexpected:
            parts.append(f"the run does not have {listed(map(show, self.unexpected))}")
        raise MismatchError(
            f"no tensor of the model is loaded: {', and '.join(parts) or 'all keep their initial values'}",
            path=path,
            key=min(names),
            hint=advice(stored, names, 0) if parts else None,
        )

    def restored(self) -> str:
        """How much of the model is loaded."""
        described = self.described
        if not described.names:
            return ""
        sizes = {name: math.prod(described.shapes[name]) for name in described.model}
        n_loaded, n_all = sum(sizes[name] for name in sizes if name in self.loaded), sum(sizes.values())
        percent = math.floor(1000 * n_loaded / n_all) / 10 if n_all else 100.0
        n = len(self.loaded)
        of = f"all {n}" if n == len(described.names) else f"{n} of {len(described.names)}"
        return f"{of} tensors of the model are loaded, {percent:g} % of its elements"

    def _of_object(self, key: str) -> None:
        """Decide for a tensor in the state of an object."""
        described, saved = self.described, self._shape(key)
        now = described.shapes.get(key)
        if now == saved:
            self.placed[key] = key
        elif key in described.optimizer and self.strict.shape == "grow" and _can_grow(saved, now):
            self._grow(key, key, saved)
        elif key in described.optimizer and self.strict.shape == "trim" and _can_trim(saved, now):
            self._trim(key, key, saved)
        elif key in described.optimizer and self.strict.shape == "skip":
            self.notes.append(f"{self._differs(key, saved)}: it keeps its value")
            self.kept.add(key)
        elif hasattr(described.live.object_tensors.get(key), "device_mesh"):
            raise self._misfit(key, saved)
        else:
            # A plain tensor of another shape, or one that the object does not have yet.
            name = None if now is not None else parameter_like(described, self.of_objects[key][1], saved)
            if name is None:
                self.whole.append(key)
            else:
                self.alike[key] = name

    def _model(self, key: str, name: str) -> None:
        saved, now = self._shape(key), self.described.shapes[name]
        if saved == now:
            self.placed[key] = name
            return
        if self.strict.shape == "skip":
            self.kept.add(name)
            self.notes.append(f"{self._differs(name, saved)}: it keeps its initial values")
        elif self.strict.shape == "grow" and _can_grow(saved, now):
            self._grow(key, name, saved)
        elif self.strict.shape == "trim" and _can_trim(saved, now):
            self._trim(key, name, saved)
        else:
            raise self._misfit(name, saved)

    def _grow(self, key: str, name: str, saved: tuple[int, ...]) -> None:
        if self._live(name).is_meta:
            raise MismatchError(
                f"{self._differs(name, saved)}, on the device `meta`: the new rows have no initial values",
                key=name,
                hint="create the model on another device",
            )
        self.growing[key] = name
        last = self.described.shapes[name][0] - 1
        self._note(f"{self._differs(name, saved)}: rows {saved[0]} to {last} keep their initial values")

    def _trim(self, key: str, name: str, saved: tuple[int, ...]) -> None:
        self.trimmed[key] = name
        first, last = self.described.shapes[name][0], saved[0] - 1
        rows = f"row {last} is" if first == last else f"rows {first} to {last} are"
        self._note(f"{self._differs(name, saved)}: {rows} left out")

    def _note(self, what: str) -> None:
        if what not in self.notes:  # a tied tensor may be stored under each of its names
            self.notes.append(what)

    def _differs(self, name: str, saved: tuple[int, ...]) -> str:
        now = self.described.shapes[name]
        in_run = f"shrinks to {now}" if _is_smaller(saved, now) else str(now)
        return f"{show(name)} has shape {saved} in the checkpoint, and {in_run} in the run"

    def _misfit(self, name: str, saved: tuple[int, ...]) -> MismatchError:
        now = self.described.shapes[name]
        can_grow = _can_grow(saved, now)
        more = ""
        if self.strict.shape == "grow":
            is_smaller = _is_smaller(saved, now)
            more = ': `"grow"` is for more rows' if is_smaller else ", and only the first dim of a tensor can grow"
        elif self.strict.shape == "trim":
            more = ': `"trim"` is for fewer rows' if can_grow else ", and only the first dim of a tensor can be trimmed"
        return MismatchError(
            f"{self._differs(name, saved)}{more}",
            key=name,
            path=str(self.checkpoint.path),
            hint='the model differs from the saved one; `strict={"shape": "skip"}` keeps the initial values'
            + (', `strict={"shape": "grow"}` those of the new rows' if can_grow else "")
            + (', `strict={"shape": "trim"}` leaves out the last rows' if _can_trim(saved, now) else ""),
        )

    def _live(self, name: str) -> torch.Tensor:
        return self.described.model[name] if name in self.described.model else self.described.optimizer[name]

    def _slots(self, name: str, key: str | None, slots: list[str]) -> None:
        """Decide for the optimizer state of a parameter, which is stored as `key`."""
        if name in self.kept:
            return
        changed = self.growing if key in self.growing else self.trimmed
        if key not in changed:
            self.placed |= dict.fromkeys(slots, name)
            return
        saved = self._shape(key)
        shapes = {slot: self._shape(slot) for slot in slots}
        if any(shape != saved and math.prod(shape) != 1 for shape in shapes.values()):
            self.new_state.add(name)
            cannot = "cannot grow" if changed is self.growing else "cannot be trimmed"
            self.notes.append(f"the optimizer has state of {show(name)} that {cannot}: it starts with new state")
            return
        for slot, shape in shapes.items():
            if shape == saved:
                changed[slot] = name
            else:
                self.whole.append(slot)

    def _shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.checkpoint.data.index.shape(key))

    @property
    def keys(self) -> list[str]:
        return [*self.placed, *self.whole, *self.alike, *self.growing, *self.trimmed]

    # -- regions

    def request(self, rank: int) -> _core.Request:
        """The request for this rank's region of each tensor."""
        described = self.described
        placed = list(self.placed)
        if described.bound is not None:
            layouts = {key: self._layout(described.bound, key, name) for key, name in self.placed.items()}
            request = bound_of(described.bound.mesh, Resolved(layouts, [], [])).request(rank, placed)
        elif described.reason is None:
            request = self.checkpoint.data.index.whole_request(placed)
        else:
            # There is no layout of all ranks. State of a parameter lies as the parameter; state of another shape than
            # its parameter's is whole.
            request = _core.Request()
            for key in placed:
                self._add(request, key, self.placed[key])
        for key in self.whole:
            shape = self._shape(key)
            request.add_region(key, key, (0,) * len(shape), shape)
        for key, name in self.alike.items():
            self._add(request, key, name)
        for key, name in self.growing.items():
            offset, rows = self._overlap(key, name)
            if rows and math.prod(offset_shape := (rows, *self._local(name)[1:])):
                request.add_region(key, key, offset, offset_shape)
        for key, name in self.trimmed.items():
            if dtypes.is_packed(stored := self.checkpoint[key].dtype):
                raise UnsupportedError(f"{show(key)} is packed ({stored}), and cannot be trimmed", key=key)
            request.add_region(key, key, self.described.offsets[name], self._local(name))
        return request

    def _layout(self, bound: BoundLayout, key: str, name: str) -> TensorLayout:
        """How a tensor lies that is stored as `key` and belongs to `name`: as it does, or as that, or whole."""
        shape = self._shape(key)
        alike = [bound.tensor_layouts[one] for one in (key, name) if one in bound.tensor_layouts]
        return next((one for one in alike if one.shape == shape), TensorLayout(shape, place=alike[-1].place))

    def _add(self, request: _core.Request, key: str, name: str) -> None:
        shape = self._shape(key)
        if shape == self.described.shapes[name]:
            request.add_region(key, key, self.described.offsets[name], self._local(name))
        else:
            request.add_region(key, key, (0,) * len(shape), shape)

    def _local(self, name: str) -> tuple[int, ...]:
        tensor = self._live(name)
        return dtypes.tensor_shape(dtypes.parse_dtype(tensor.dtype), tuple(tensor.shape))

    def _overlap(self, key: str, name: str) -> tuple[tuple[int, ...], int]:
        """The offset of this rank's region, and how many of its rows the checkpoint has."""
        offset = self.described.offsets[name]
        return offset, max(0, min(self._shape(key)[0] - offset[0], self._local(name)[0]))

    def grown(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The regions of growing tensors: the saved rows, then the initial values; zeros in state of the optimizer."""
        whole: dict[str, np.ndarray] = {}
        for key, name in self.growing.items():
            live = self._live(name)
            stored = self.checkpoint[key].dtype
            if dtypes.bits(stored) % 8:
                raise UnsupportedError(f"{show(key)} is packed ({stored}), and cannot grow", key=key)
            tensor = self._initial(key, live, stored)
            if key in arrays:
                loaded = arrays[key]
                tensor[: loaded.shape[0]] = as_tensor(loaded if loaded.flags.writeable else loaded.copy(), stored)
            whole[key] = from_tensor(tensor)[0]
        return whole

    def _initial(self, key: str, live: torch.Tensor, stored: str) -> torch.Tensor:
        dtype = torch_dtype(stored)
        if key in self.of_optimizer and key not in self.of_objects:
            return torch.zeros(tuple(live.shape), dtype=dtype)
        if self.cast and dtype.is_floating_point and live.is_floating_point():
            dtype = live.dtype
        elif dtype != live.dtype:
            raise MismatchError(
                f"{show(key)} is {stored} in the checkpoint and {dtypes.parse_dtype(live.dtype)} in the run",
                key=key,
                hint="`cast=True` converts floating-point tensors",
            )
        return live.detach().cpu().clone().to(dtype)
