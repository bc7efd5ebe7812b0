"""Restores loaded arrays into the tensors, optimizers and objects of a run: the inverse of `describe`.

Everything is compared before the first tensor is changed. Missing values are never invented: a tensor on device `meta`
must get its values from the checkpoint.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from reshard import dtypes
from reshard.errors import MismatchError, ReshardError
from reshard.formats.state import digest_of
from reshard.formats.weight_sets import advice
from reshard.options import Settings, Strict
from reshard.torch.dicts import DictState
from reshard.torch.modules import CONSTANTS, FROZEN, unloaded
from reshard.torch.objects import entries_of, placements_of, put_back
from reshard.torch.optimizers import (
    ORDERS,
    OptimizerRecord,
    StateUpdate,
    first_state,
    plain,
    saved_groups,
    set_options,
    set_shared,
    shared_entries,
    state_tensors,
)
from reshard.torch.schedulers import KINDS, kind_of
from reshard.torch.settings import (
    STARTED,
    Difference,
    Started,
    chosen_options,
    comparable_state,
    group_differences,
    merged,
    scheduler_differences,
    set_rates,
    state_of,
)
from reshard.torch.tensors import as_tensor, from_tensor, overwrite
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    import numpy as np

    from reshard.options import StrictLike
    from reshard.torch.modules import OwnEntries
    from reshard.torch.objects import Entry
    from reshard.torch.optimizers import NamedOptimizer
    from reshard.torch.state import Described


_PARTS = ("aliases", "modules", "objects", "optimizer", KINDS, STARTED, CONSTANTS, FROZEN, ORDERS)
# What optimizers of torch keep for a parameter: of its shape, and as numbers. Other entries are those of the program.
_MOMENTS = ("exp_avg", "exp_avg_sq")
_NEEDED = {"Adadelta": ("square_avg", "acc_delta"), "Adagrad": ("sum",), "Adam": _MOMENTS, "AdamW": _MOMENTS,
           "Adamax": ("exp_avg", "exp_inf"), "ASGD": ("ax",), "Muon": (), "NAdam": _MOMENTS, "RAdam": _MOMENTS,
           "RMSprop": ("square_avg",), "Rprop": ("prev", "step_size"), "SGD": (), "SparseAdam": _MOMENTS}  # fmt: skip
_OF_THE_SHAPE = {
    *(slot for slots in _NEEDED.values() for slot in slots),
    "max_exp_avg_sq",
    "momentum_buffer",
    "grad_avg",
}
_NUMBERS = {"step", "eta", "mu", "mu_product"}


class Beside(NamedTuple):
    """State of a parameter or module that is no tensor of its own.

    Attributes:
        what: such as `OPTIONS`, in the words of the user.
        name: of the parameter or module; empty: of the whole model.
    """

    what: str
    name: str


OPTIONS = "the options of the optimizer for"
OF_MODULES = "the state beside the tensors of"
SHARED = "the state of the optimizer that belongs to no parameter:"


def named(items: Iterable[str | Beside], most: int = 8) -> str:
    """Keys and other state for a message, each kind of state once.

    Args:
        items: what is named.
        most: maximum number of names of each kind.

    Example:
        >>> named(["a.weight", Beside(OPTIONS, "a.weight"), Beside(OPTIONS, "b.weight"), Beside(OF_MODULES, "")])
        '`a.weight`, the options of the optimizer for `a.weight`, `b.weight`, the state beside the tensors of the model'
    """
    of_kinds: dict[str, list[str]] = {}
    for one in items:
        what, name = ("", one) if isinstance(one, str) else one
        of_kinds.setdefault(what, []).append(show(name) if name else "the model")
    return ", ".join(f"{what} {listed(names, most)}".lstrip() for what, names in of_kinds.items())


@dataclass(frozen=True)
class Report:
    """The differences between a checkpoint and a trainer.

    Attributes:
        missing: state that the run has on this rank and the checkpoint lacks: keys of tensors, options of parameters
            that were in no parameter group, state of modules, names of objects, and keys of dicts.
        unexpected: state that the checkpoint has for this rank and the run lacks.
        shared: buffers, and state of modules, that differed between the ranks that saved them. With another number of
            ranks all ranks get the value of the first one.
        changed: what was saved with another optimizer or in other groups, and tensors of dicts that keep their values,
            as sentences.
    """

    missing: tuple[str | Beside, ...] = ()
    unexpected: tuple[str, ...] = ()
    shared: tuple[str | Beside, ...] = ()
    changed: tuple[str, ...] = ()


def apply(
    described: Described,
    loaded: Mapping[str, np.ndarray],
    extra: Mapping[str, Any] | None = None,
    *,
    rank_local: Mapping[str, Any] | None = None,
    strict: StrictLike = True,
    cast: bool = False,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    unexpected: Collection[str] = (),
    only: Literal["model", "tensors"] | None = None,
    kept: Collection[str] = (),
    new_state: Collection[str] = (),
    init: Callable[[str, torch.Tensor], torch.Tensor | None] | None = None,
    device: torch.device | str | None = None,
    object_name: Callable[[str], str] = "objects.{}".format,
    settings: Settings = Settings(),  # noqa: B008  frozen
) -> Report:
    """Restore loaded state into the described trainer.

    Args:
        described: the result of `describe`; the trainer must not have changed since.
        loaded: arrays of the model and the optimizer, this rank's shards under `described.layout`. Arrays that were
            loaded into `described.out()` are not copied again. Other arrays may become memory of tensors of the
            trainer, so do not change them afterwards.
        extra: the saved value of `described.extra`; None: only tensors are restored.
        rank_local: the rank-local state of this rank: `checkpoint.extra(rank).get("rank_local")`. It is used only if
            rank and world size are the same, and for a parameter only if the rank holds the same region of it.
        strict: what happens to state that is missing, unexpected or of another optimizer, see `Strict`; shapes must be
            equal here. A parameter whose rank-local state cannot be used is missing its optimizer state.
        cast: convert floating-point arrays to the dtype of the tensor. By default a different dtype is an error.
        shapes: global shapes of arrays of objects, where they are parts of tensors that the objects do not have yet.
        unexpected: keys of the checkpoint that the trainer does not have, which were not loaded.
        only: "model": only its tensors are restored; "tensors": those and the state of the optimizer, but not the
            options of its groups and no objects.
        kept: keys of parameters that keep their values, and whose optimizer state stays as it is.
        new_state: keys of parameters whose optimizer state stays as it is.
        init: called as `init(name, buffer)` for each non-persistent buffer on device `meta`, which no checkpoint
            holds. It fills the buffer, or returns another one.
        device: the device on which tensors on device `meta` get memory; None: the default device, and for a DTensor
            the device of its mesh.
        object_name: name of an object in the report and in errors.
        settings: whose constants of schedulers and options of groups are used. With "saved", those in
            `described.live.started` are replaced by the saved ones, which are then in effect.

    Returns:
        The differences that `strict` accepts, and the shared state.

    Raises:
        MismatchError: a shape or dtype differs; state is missing or unexpected; rank-local state cannot be used; a
            tensor would stay on device `meta`. Nothing is changed then, except by loading into `out()`. Also if an
            object raises an exception when it loads its state; then the tensors are restored.

    Example:
        >>> import numpy as np
        >>> from torch import nn
        >>> from reshard.torch.state import describe
        >>> model = nn.Linear(2, 1, bias=False)
        >>> apply(describe(model), {"weight": np.float32([[3, 4]])})
        Report(missing=(), unexpected=(), shared=(), changed=())
        >>> model.weight.tolist()
        [[3.0, 4.0]]
    """
    policy = Strict.of(strict)
    parts = {name: _part(extra or {}, name) for name in _PARTS}
    parts["aliases"] = {name: str(key) for name, key in parts["aliases"].items()}
    own = _RankLocal.of(described, rank_local)
    restore = _Restore(
        described,
        {**loaded, **own.copies(loaded)},
        parts,
        own,
        policy,
        frozenset(kept),
        frozenset(new_state),
        cast=cast,
        object_name=object_name,
        entries=entries_of(extra),
        shapes=shapes or {},
        unexpected=list(unexpected),
        settings=settings,
    )
    restore.match_model()
    restore.match_transient(has_init=init is not None)
    if only == "model":
        restore.unexpected += [key for key in restore.loaded if not restore.is_used(key)]
    else:
        restore.match_optimizers(has_groups=only is None)
    if only is None:
        restore.match_others(has_extra=extra is not None)
        restore.match_constants()
        restore.match_frozen()
    else:
        restore.match_initial_modules()
    trained = restore.compare_trained()
    restore.compare_settings()
    report = Report(
        tuple(restore.missing), tuple(restore.unexpected), tuple(restore.shared), tuple(dict.fromkeys(restore.changed))
    )
    if policy.missing == "error":
        own.refuse(restore.unfit)
    _refuse(described, loaded, report, trained, policy)
    restore.apply(init, device)
    return report


def load_into(name: str, load: Callable[[Any], object], state: Any) -> None:
    """Call the method of an object that loads its state.

    Args:
        name: the name of the object in errors.
        load: the method.
        state: the saved state.

    Raises:
        MismatchError: the method raised an exception.

    Example:
        >>> load_into("scheduler", {"last": 1}.update, {"last": 5})
    """
    try:
        load(state)
    except ReshardError:
        raise
    except Exception as error:
        owner = getattr(load, "__self__", None)
        what = show(name) if owner is None else f"{show(name)}, a {type(owner).__name__},"
        raise MismatchError(
            f"{what} does not load its saved state: {type(error).__name__}: {' '.join(str(error).split())}",
            key=name,
            hint="its class or its settings are others than those of the run that saved",
        ) from error


def parameter_like(described: Described, entry: Entry, shape: tuple[int, ...]) -> str | None:
    """The parameter whose placements a saved DTensor gets, if the object does not have the tensor yet.

    State of a new optimizer, or an average before its first update, is such a tensor. It is the parameter whose name
    ends the path, else one that has the same shape and is placed as the tensor was, else one of the same shape.

    Args:
        described: the trainer on this rank.
        entry: the saved tensor.
        shape: its global shape.

    Returns:
        The key of the parameter; None: the tensor stays plain, or no parameter is like it.
    """
    if entry.placements is None:
        return None
    live = described.live.named.tensors
    alike = [
        key
        for key, tensor in live.items()
        if hasattr(tensor, "device_mesh") and described.shapes.get(key) == shape and key in described.model
    ]
    last = str(entry.path[-1]) if entry.path else ""
    named = [key for key in alike if last == key or last.endswith(f".{key}") or f".{key}" in f".{entry.key}"]
    placed = [key for key in alike if placements_of(live[key]) == entry.placements]
    if not entry.placements and not entry.key.startswith("extra.optimizer."):
        # A run without DTensors saved it. What it is now is known only if it has the name of a parameter, or is state
        # of an optimizer.
        return next(iter(named), None)
    return next(iter([*named, *placed, *alike]), None)


@dataclass(frozen=True, eq=False)
class _RankLocal:
    """The rank-local state of a checkpoint, and whether this rank can use it.

    Attributes:
        described: the trainer on this rank.
        saved_by: the rank that saved it, and the world size at that time; None: there is no rank-local state.
        state: `parts`, `parameters` and `modules`, as in `Described.saving`.
        arrays: rank-local state tensors of each parameter, by slot.
        differing: arrays by key that differ from those of other ranks.
    """

    described: Described
    saved_by: tuple[int, int] | None
    state: Mapping[str, Mapping[str, Any]]
    arrays: Mapping[str, dict[str, np.ndarray]]
    differing: Mapping[str, Any]

    @classmethod
    def of(cls, described: Described, value: Mapping[str, Any] | None) -> _RankLocal:
        """Parse the value from the checkpoint.

        Raises:
            MismatchError: the value is invalid.
        """
        empty: dict[str, dict[str, Any]] = {name: {} for name in ("parts", "tensors", "parameters", "modules")}
        if value is None:
            return cls(described, None, empty, {}, {})
        arrays: dict[str, dict[str, np.ndarray]] = {}
        try:
            saved_by = (int(value["rank"]), int(value["world_size"]))
            state = {name: dict((value["state"] or empty)[name]) for name in empty}
            for key, one in state["tensors"].items():
                slot, _, name = key.partition(".")
                arrays.setdefault(name, {})[slot] = from_tensor(one)[0] if isinstance(one, torch.Tensor) else one
            return cls(described, saved_by, state, arrays, dict(value["differing"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise MismatchError(f"`rank_local` is not valid rank-local state: {error!r}") from None

    @property
    def is_ours(self) -> bool:
        """Whether the same rank saved it, with the same world size."""
        return self.saved_by == (self.described.rank, self.described.world_size)

    def fits(self, name: str, known: str, *, is_of_part: bool) -> bool:
        """Whether the rank-local state of a parameter belongs to the region that this rank holds now.

        Args:
            name: name of the parameter.
            known: its name in the checkpoint.
            is_of_part: whether the state belongs to a region of the parameter; else it is a copy.
        """
        part = [list(one) for one in self.state["parts"].get(known, ())]
        is_same = name in self.described.model and part == self.described.part_of(name)
        return self.is_ours and (is_same or not is_of_part)

    def copies(self, loaded: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The arrays of this rank that replace loaded ones."""
        return {key: one for key, one in self.differing.items() if key in loaded} if self.is_ours else {}

    def refuse(self, unfit: list[str]) -> None:
        """Raise MismatchError if `unfit` lists any state."""
        if not unfit:
            return
        saved = "" if self.saved_by is None else f", saved by {self.saved_by[1]} ranks"
        now = f"rank {self.described.rank} of {self.described.world_size}"
        raise MismatchError(
            f"{listed(map(show, unfit))} cannot be resharded: it is rank-local state{saved}; "
            f"this is {now}{', which holds another region' if self.is_ours else ''}",
            key=unfit[0],
            hint="resume with the same number of ranks and the same sharding; or `strict=False` starts these "
            "parameters with new optimizer state",
        )


@dataclass(eq=False)
class _Restore:
    """All changes, collected before the first one is made."""

    described: Described
    loaded: Mapping[str, np.ndarray]
    extra: Mapping[str, Mapping[str, Any]]
    own: _RankLocal
    policy: Strict
    kept: frozenset[str]
    new_state: frozenset[str]
    cast: bool
    object_name: Callable[[str], str]
    entries: Mapping[str, Sequence[Entry]]
    shapes: Mapping[str, tuple[int, ...]]
    missing: list[str | Beside] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    settings: Settings = field(default_factory=Settings)
    shared: list[str | Beside] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    untrained: list[str] = field(default_factory=list)  # parameters that the run that saved did not train
    frozen: dict[str, list[str]] = field(default_factory=dict)  # parameters that are not trained now: keys of state
    unfit: list[str] = field(default_factory=list)  # rank-local state that this rank cannot use
    fills: list[tuple[str, torch.Tensor, torch.Tensor]] = field(default_factory=list)  # key, live, loaded
    stored: dict[str, str] = field(default_factory=dict)  # the name in the checkpoint of each of these keys
    thawed: dict[str, bool] = field(default_factory=dict)  # keys of parameters, and whether a gradient is computed
    updates: list[StateUpdate] = field(default_factory=list)
    entries_shared: list[tuple[NamedOptimizer, Mapping[Any, Any]]] = field(default_factory=list)
    calls: list[tuple[str, Callable[[Any], object], Any]] = field(default_factory=list)  # name, call, state
    options: list[tuple[dict[str, Any], Mapping[str, Any]]] = field(default_factory=list)  # of groups
    own_values: dict[str, Any] = field(default_factory=dict)  # entries of `state_dict()` that are no tensors
    record: OptimizerRecord | None = None
    differences: list[Difference] = field(default_factory=list)  # of settings
    rescheduled: list[Any] = field(default_factory=list)  # schedulers whose rates are set anew
    in_effect: Started = field(default_factory=Started)
    _used: set[str] = field(default_factory=set)
    _of_objects: set[str] = field(default_factory=set)

    # -- compare

    def match_model(self) -> None:
        others: dict[str, list[str]] = {}
        for alias, key in self.described.aliases.items():
            others.setdefault(key, []).append(alias)
        saved_aliases = self.extra["aliases"]
        empty: list[str] = []
        for key, local in self.described.model.items():
            # A tensor that is tied now may have been saved under another first name, or not tied.
            names = [key, *others.get(key, ()), *([saved_aliases[key]] if key in saved_aliases else [])]
            found = next((name for name in names if name in self.loaded), None)
            if key in self.kept:
                empty += [key] if local.is_meta else []
            elif found is None:
                self.missing.append(key)
                empty += [key] if local.is_meta else []
            else:
                self.fills.append((key, local, self._checked(key, local, self.loaded[found])))
                self.stored[key] = found
                for other in names:
                    if other in self.loaded:
                        self._check_one(key, found, other)
            self._used.update(names[: len(names) - (key in saved_aliases)])
        buffers = self.described.live.named.buffers
        for key in () if self.own.is_ours else self.own.differing:
            name = self.described.aliases.get(key, key)
            if name in self.described.model:
                (self.shared if name in buffers else self.unfit).append(key)
        if empty:
            raise MismatchError(
                f"the checkpoint lacks {listed(map(show, empty))}, which are on device `meta` and need their values "
                "from it"
                if not self.kept
                else f"{listed(map(show, empty))} on device `meta` get no values: they have no initial ones to keep",
                key=empty[0],
            )

    def match_transient(self, *, has_init: bool) -> None:
        named = self.described.live.named
        empty = [key for key, (module, name) in named.transient.items() if getattr(module, name).is_meta]
        if empty and not has_init:
            raise MismatchError(
                f"{listed(map(show, empty))} on device `meta`: non-persistent buffers, which no checkpoint holds",
                key=empty[0],
                hint="pass `init`; it is called as `init(name, buffer)` to fill each of them",
            )

    def match_optimizers(self, *, has_groups: bool) -> None:
        optimizers = self.described.live.optimizers
        if self.extra["optimizer"] and optimizers:
            self.record = OptimizerRecord.from_value(self.extra["optimizer"])
            if has_groups:
                self._match_groups(optimizers, self.record)
            self._match_shared(optimizers, self.record)
        given = self._state_arrays(optimizers)
        kinds = {
            name: group["class"] for group in (self.record or OptimizerRecord()).groups for name in group["params"]
        }
        untrained = set(self.untrained)
        found: list[tuple[StateUpdate, str, str]] = []
        slots: dict[int, set[str]] = {}  # of torch, that the parameters of a group have
        for live in optimizers:
            for name, (parameter, group) in live.owned().items():
                known = name if self.record is None else self._known_name(name)
                if name in self.kept or name in self.new_state or name in untrained:
                    continue
                if kinds.get(known, live.kind) != live.kind:
                    if self.policy.other_optimizer == "skip":
                        self.changed.append(
                            f"{show(name)} was saved with optimizer {kinds[known]}, and now has {live.kind}: it starts "
                            "with new optimizer state"
                        )
                        continue
                    raise MismatchError(
                        f"{show(name)} was saved with optimizer {kinds[known]}, and now has {live.kind}",
                        key=name,
                        hint='`strict={"other_optimizer": "skip"}` starts it with new state',
                    )
                found.append((StateUpdate(live, parameter, group), name, known))
                slots.setdefault(id(group), set()).update(self._slots_of_torch(known))
        for update, name, known in found:
            arrays = given.get(name, {})
            parts, copies = self._rank_local_slots(known, arrays)
            kept = [f"{slot}.{known}" for slot in sorted(parts | copies)]
            if kept and not self.own.fits(name, known, is_of_part=bool(parts)):
                self.unfit += kept
                self.missing += kept
                continue
            if not self._is_other_state(update, name, arrays, self._slots_of_torch(known), slots[id(update.group)]):
                self._match_state(update, name, known, arrays | self.own.arrays.get(known, {}))

    def _match_shared(self, optimizers: Iterable[NamedOptimizer], record: OptimizerRecord) -> None:
        """Find the state of optimizers that belongs to no parameter."""
        for number, live in enumerate(optimizers):
            kind, saved = record.shared.get(number, (live.kind, {}))
            if kind == live.kind:  # else its parameters were saved with another class, which is an error there
                self.missing += [Beside(SHARED, str(key)) for key in shared_entries(live).keys() - saved.keys()]
                self.entries_shared.append((live, saved))

    def _slots_of_torch(self, known: str) -> set[str]:
        """The saved slots of a parameter that have names of those of torch's optimizers."""
        if self.record is None:
            return set()
        numbers = [slot for slot, one in self.record.state.get(known, {}).items() if isinstance(one, int | float)]
        saved = (*self.record.slots.get(known, ()), *self.record.local.get(known, ()), *numbers)
        return {slot.partition(":")[0] for slot in saved} & (_OF_THE_SHAPE | _NUMBERS)

    def _is_other_state(
        self, update: StateUpdate, name: str, arrays: Mapping[str, np.ndarray], saved: set[str], of_group: set[str]
    ) -> bool:
        """Compare state with what an optimizer of torch makes; its next step would fail, or compute with wrong values.

        Only its own slots are compared: a program may add others. Subclasses are not compared.

        Args:
            update: the parameter and its optimizer.
            name: its name.
            arrays: the loaded state.
            saved: the saved slots of torch.
            of_group: those of all parameters of the group.

        Returns:
            Whether it differs, and the parameter starts with new state.

        Raises:
            MismatchError: it differs, and `strict` does not accept new state.
        """
        kind = type(update.live.local)
        if not kind.__module__.startswith("torch.optim") or kind.__name__ not in _NEEDED:
            return False
        parameter: Any = update.parameter
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        key, wrong = name, ""
        lacks = ({*_NEEDED[kind.__name__]} | of_group) - saved if saved else set()
        if lacks:
            wrong = (
                f"the state of {show(name)} has {listed(map(show, sorted(saved)))}, and lacks "
                f"{listed(map(show, sorted(lacks)))}, which {kind.__name__} keeps for the parameters of its group"
            )
        for slot, array in arrays.items():
            dtype, shape = dtypes.name_of(array.dtype), tuple(array.shape)
            is_float = "F" in dtype or (dtype.startswith("C") and local.is_complex())
            if slot in _NUMBERS and array.size != 1:
                key, wrong = f"{slot}.{name}", f"of {kind.__name__} it is one number"
            elif slot in _OF_THE_SHAPE and not (
                is_float and (shape == tuple(local.shape) or array.size == local.numel() == 1)
            ):
                key = f"{slot}.{name}"
                wrong = f"of {kind.__name__} it is floating-point of the shape of its parameter, {tuple(local.shape)}"
            else:
                continue
            wrong = f"{show(key)} is {dtype} of shape {shape}; {wrong}"
            break
        if wrong and self.policy.missing == self.policy.other_optimizer == "error":
            raise MismatchError(
                wrong,
                key=key,
                hint="the state is of another optimizer or model, or incomplete: use another checkpoint; or "
                "`strict=False` starts the parameter with new optimizer state",
            )
        if wrong:
            self.changed.append(f"{wrong}: {show(name)} starts with new optimizer state")
        return bool(wrong)

    def _match_groups(self, optimizers: Iterable[NamedOptimizer], record: OptimizerRecord) -> None:
        """Find the parameters that were in no parameter group."""
        known = {name for group in record.groups for name in group["params"]}
        names = [name for live in optimizers for name in live.names.values() if self._known_name(name) not in known]
        # Files of other programs may have groups without parameters of this model. Then nothing is known.
        is_known = not known.isdisjoint({*self.described.model, *self.described.aliases})
        new = set(self.missing) if is_known else set(names)
        self.missing += [] if is_known else [Beside(OPTIONS, name) for name in names]
        self.untrained += [name for name in names if name not in new | self.kept]

    def compare_trained(self) -> list[str]:
        """Decide for parameters that were trained, or are trained now, but not both.

        Returns:
            What is refused, as parts of a sentence.
        """
        parts: list[str] = []
        if self.policy.other_optimizer == "skip":
            self.changed += [
                f"{show(name)} has no saved optimizer state: it was not trained, and starts with new state"
                for name in self.untrained
            ]
            self.changed += [
                f"{show(name)} was trained, and is not now: its optimizer state is not loaded" for name in self.frozen
            ]
            return parts
        if self.policy.missing == "keep":
            self.missing += [Beside(OPTIONS, name) for name in self.untrained]
        elif self.untrained:
            has, was = ("has", "it was") if len(self.untrained) == 1 else ("have", "they were")
            parts.append(f"{listed(map(show, self.untrained))} {has} no saved optimizer state: {was} not trained")
        if self.policy.unexpected == "skip":
            self.unexpected += [key for keys in self.frozen.values() for key in keys]
        elif self.frozen:
            was, now = ("was", "is") if len(self.frozen) == 1 else ("were", "are")
            parts.append(f"{listed(map(show, self.frozen))} {was} trained, and {now} not now")
        return parts

    def _rank_local_slots(self, known: str, arrays: Mapping[str, np.ndarray]) -> tuple[set[str], set[str]]:
        """The slots of a parameter with rank-local state: of regions, and of copies that differ between ranks."""
        parts = {*self.record.local.get(known, ())} if self.record is not None else set()
        parts |= {str(slot) for slot in self.own.state["parameters"].get(known, ()) if not str(slot).endswith(":")}
        return parts, {slot for slot in arrays if f"{slot}.{known}" in self.own.differing}

    def _match_state(self, update: StateUpdate, name: str, known: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Compare the state of the parameter `name`, which is named `known` in the checkpoint."""
        state = update.live.local.state.get(update.parameter, {})
        inner, kinds = state_tensors(state, name)
        present = set(inner)
        keep: dict[str, Any] | None = None
        made: dict[str, torch.Tensor] = {}
        recorded: dict[str, str] = {}
        expected = present or set(arrays)
        if self.record is not None and known in self.record.slots:
            expected = set(self.record.slots[known]) | self.own.arrays.get(known, {}).keys()
            keep = self.own.state["parameters"].get(known, self.record.state.get(known, {}))
            recorded = {slot[:-1]: kind for slot, kind in keep.items() if slot.endswith(":")}
            keep = {slot: one for slot, one in keep.items() if not slot.endswith(":")}
        made_of_others = {slot.partition(":")[0] for slot in arrays if ":" in slot}
        if made_of_others:
            saved_kinds = {slot: recorded.get(slot, "an unrecorded class") for slot in sorted(made_of_others)}
            if made_of_others - kinds.keys():
                first = first_state(update.live, update.parameter, update.group, name)
                made = {slot: first[slot] for slot in made_of_others - kinds.keys() if slot in first}
                made_inner, made_kinds = state_tensors(made, name)
                inner, kinds = inner | made_inner, kinds | made_kinds
            other = self._other_kind(name, saved_kinds, kinds, inner, arrays)
            if other is not None:
                self.changed.append(f"{other}: {show(name)} starts with new optimizer state")
                return
        self.missing += [f"{slot}.{name}" for slot in sorted(expected - arrays.keys())]
        self.unexpected += [f"{slot}.{name}" for slot in sorted(arrays.keys() - expected)]
        fill: dict[str, torch.Tensor] = {}
        for slot in sorted(expected & arrays.keys()):
            key = f"{slot}.{name}"
            local = self.described.optimizer.get(key, self.described.local.get(key))
            if slot not in present and slot in inner:
                fill[slot] = self._checked(key, inner[slot], arrays[slot])
            elif slot in present and local is not None:
                fill[slot] = self._checked(f"{slot}.{name}", local, arrays[slot])
            else:
                fill[slot] = self._state_dtype(_tensor(arrays[slot]), known, update.parameter)
        used = {slot.partition(":")[0] for slot in expected} | (keep or {}).keys()
        drop = () if keep is None else tuple(slot for slot in state if slot not in used)
        plain = () if self.record is None else self.record.plain.get(known, ())
        self.updates.append(replace(update, fill=fill, keep=keep, drop=drop, plain=plain, made=made))

    def _other_kind(
        self,
        name: str,
        saved: Mapping[str, str],
        now: Mapping[str, str],
        inner: Mapping[str, torch.Tensor],
        arrays: Mapping[str, np.ndarray],
    ) -> str | None:
        """Compare state that is made of several tensors with that of the run; a difference is an error by default.

        Returns:
            What differs.
        """
        for slot, was in saved.items():
            is_now = now.get(slot, "a plain tensor")
            shapes, saved_shapes = (
                {key: tuple(one.shape) for key, one in tensors.items() if key.startswith(f"{slot}:")}
                for tensors in (inner, arrays)
            )
            if was == is_now and shapes == saved_shapes:
                continue
            key = f"{slot}.{name}"
            message = (
                f"{show(key)} was saved as {_with_shapes(was, saved_shapes)}, and is {_with_shapes(is_now, shapes)}"
            )
            if self.policy.missing == "error":
                raise MismatchError(
                    f"{message}: it cannot be resharded or converted",
                    key=key,
                    hint="resume with the same options of the optimizer, the same number of ranks and the same "
                    "sharding; or `strict=False` starts the parameter with new optimizer state",
                )
            return message
        return None

    def match_initial_modules(self) -> None:
        """State of modules besides tensors, for a start from other weights: what the checkpoint has of it."""
        named, modules = self.described.live.named, self.extra["modules"]

        def is_taken(key: str, module: str) -> bool:
            return key in modules and not any(f"{one}.".startswith(f"{module}." * bool(module)) for one in self.kept)

        self._check_wrapped({key: one for key, one in named.wrapped.items() if is_taken(key, key)})
        self.own_values = {key: modules[key] for key in named.own_values if is_taken(key, key.rpartition(".")[0])}
        for name, module in named.extra_state.items():
            if is_taken(name, name):
                self.calls.append((name or "model", module.set_extra_state, modules[name]))

    def _check_wrapped(self, wrapped: Mapping[str, str]) -> None:
        """Check that tensors that are made of others have the classes and options of the saved ones."""
        for key, now in wrapped.items():
            saved = self.extra["modules"].get(key)
            if saved != now:
                raise MismatchError(
                    f"{show(key)} was saved as {saved}, and is now {now}",
                    key=key,
                    hint="quantise the model with the same configuration",
                )

    def match_others(self, *, has_extra: bool) -> None:
        if not has_extra:
            return
        live = self.described.live
        kept, modules, objects = self.own.state["modules"], self.extra["modules"], self.extra["objects"]
        if self.own.is_ours:
            modules = {**modules, **kept}
        else:
            of_modules = live.named.extra_state.keys() | live.named.own_values.keys()
            self.shared += [Beside(OF_MODULES, name) for name in kept if name in of_modules]
        self.missing += [Beside(OF_MODULES, key) for key in live.named.wrapped if key not in modules]
        self._check_wrapped({key: now for key, now in live.named.wrapped.items() if key in modules})
        for key in live.named.own_values:
            if key in modules:
                self.own_values[key] = modules[key]
            else:
                self.missing.append(Beside(OF_MODULES, key))
        for name, module in live.named.extra_state.items():
            if name in modules:
                self.calls.append((name or "model", module.set_extra_state, modules[name]))
            else:
                self.missing.append(Beside(OF_MODULES, name))
        for name, one in live.objects.items():
            if name in objects:
                if not self._is_same_kind(name):
                    continue
                state = self._fitted(name, one, self._with_settings(name, one, objects[name]))
                self.calls.append((self.object_name(name), one.load_state_dict, state))
            else:
                self.missing.append(self.object_name(name))
        self.unexpected += [self.object_name(name) for name in objects if name not in live.objects]
        if self.record is not None:
            saved, changed = saved_groups(
                live.optimizers, self.record, self._known_name, skip=self.policy.other_optimizer == "skip"
            )
            self.changed += changed
            self._match_settings(saved)

    def match_constants(self) -> None:
        """Report options of modules that differ, such as the rate of a dropout."""
        names_of: dict[tuple[str, str], list[str]] = {}
        saved = self.extra[CONSTANTS]
        for name, now in self.described.live.named.constants.items():
            was = saved.get(name, now)
            # Sizes are compared as shapes.
            if was != now and (self.policy.shape == "error" or was.split("(")[0] != now.split("(")[0]):
                names_of.setdefault((str(was), now), []).append(name)
        for (was, now), names in names_of.items():
            them, verb = (
                listed([show(name) for name in names], 4),
                ("was", "is") if len(names) == 1 else ("were", "are"),
            )
            self.changed.append(
                f"{them} of the model {verb[0]} {was}, and {verb[1]} {now} in the program, which is used"
            )

    def match_frozen(self) -> None:
        """Compare for which parameters gradients are computed, in a run that trains.

        What the training has changed since it began is restored. Where it began otherwise, the program has changed it.
        Parameters whose optimizer state says so are left to `compare_trained`.
        """
        live, saved = self.described.live, {kind: _names(names) for kind, names in self.extra[FROZEN].items()}
        trains = bool(live.optimizers) or any(name.partition(".")[0] == "optimizer" for name in live.objects)
        if not saved or not trains:
            return
        differing: dict[bool, list[str]] = {}
        told = {*self.untrained, *self.frozen}
        for key, name in self.stored.items():
            if key in live.named.buffers or not isinstance(live.named.tensors[key], torch.nn.Parameter):
                continue
            is_frozen, was = key in live.named.frozen, next((kind for kind in saved if name in saved[kind]), "")
            if (was in {"always", "now"}) == is_frozen:
                continue
            if (was in {"always", "started"}) == is_frozen:
                self.thawed[key] = is_frozen
            elif told.isdisjoint((key, name)):
                differing.setdefault(is_frozen, []).append(show(key))
        for is_frozen, names in differing.items():
            was, now = ("was trained", "frozen") if is_frozen else ("was frozen", "trained")
            plural = was if len(names) == 1 else was.replace("was", "were")
            verb = "is" if len(names) == 1 else "are"
            self.changed.append(
                f"{listed(names)} {plural} when the checkpoint was saved, and {verb} {now} in the program "
                f"(`requires_grad={not is_frozen}`), which is used"
            )

    @property
    def _of_program(self) -> list[str]:
        """The fields of `Settings` that are "program"."""
        return [name for name in ("scheduler", "optimizer") if getattr(self.settings, name) == "program"]

    def _with_settings(self, name: str, one: Any, saved: Any) -> Any:
        """The saved state of a scheduler, with the constants of the program where these are used."""
        started = self.described.live.started or Started()
        is_record = name in self.extra[STARTED] and name in started.schedulers
        if not is_record and kind_of(one) is None:
            return saved
        now = started.schedulers[name] if is_record else state_of(one)
        was = self.extra[STARTED][name] if is_record else comparable_state(one, saved)
        self.differences += scheduler_differences(one, was, now, self.object_name(name), is_record=is_record)
        if is_record and self.settings.scheduler != "program":
            self.in_effect.schedulers[name] = was
        return merged(one, saved, was, now, self._of_program)

    def _match_settings(self, saved: Sequence[tuple[dict[str, Any], Mapping[str, Any]]]) -> None:
        """Choose the options of the parameter groups."""
        live, fields = self.described.live, self._of_program
        record_of = {id(group): one for group, one in saved}
        schedulers = [one for name, one in live.objects.items() if kind_of(one) is not None]
        started = live.started or Started.of([one.optimizer for one in live.optimizers], {})
        found, differing = group_differences(live.optimizers, started, record_of, schedulers)
        self.differences += found
        for number, optimizer in enumerate(live.optimizers):
            self.in_effect.options.append([])
            for index, group in enumerate(optimizer.optimizer.param_groups):
                now, one = started.group(number, index), record_of.get(id(group))
                effect = dict(now)
                if one is not None:
                    other = differing.get(id(group), {})
                    self.options.append((group, chosen_options(group, one, now, other, fields)))
                    was = one.get(STARTED, {})
                    effect |= {key: was[key] for key, owner in other.items() if key in was and owner not in fields}
                self.in_effect.options[-1].append(effect)
        if fields and len(schedulers) == 1 and any(one.field in fields for one in self.differences):
            self.rescheduled += schedulers

    def compare_settings(self) -> None:
        """Refuse settings that differ, or say so."""
        refused = [one.told("error") for one in self.differences if getattr(self.settings, one.field) == "error"]
        if refused:
            names = {one.field for one in self.differences if getattr(self.settings, one.field) == "error"}
            given = ", ".join(f'{name}="saved"' for name in sorted(names))
            raise MismatchError(
                "; ".join(refused),
                hint=f'give the program the saved values; or `settings=Settings({given})` uses them, and "program" '
                "uses those of the program",
            )
        self.changed += [one.told(getattr(self.settings, one.field)) for one in self.differences]

    def _is_same_kind(self, name: str) -> bool:
        """Whether a scheduler or an optimizer has the class of the saved one, and the latter the same parameters.

        Checkpoints without the record are accepted.
        """
        both = [(self.extra[part].get(name), self.described.extra.get(part, {}).get(name)) for part in (KINDS, ORDERS)]
        part = next((one for one in both if None not in one and one[0] != one[1]), None)
        if part is None:
            return True
        saved, now = part
        message = f"{show(self.object_name(name))} was saved as {saved}, and is now {now}"
        if part is both[1]:
            pairs = itertools.zip_longest(_flat(saved), _flat(now), fillvalue="none")
            where = next((f": {show(new)} instead of {show(old)}" for old, new in pairs if old != new), " groups")
            message = f"{show(self.object_name(name))} numbers its parameters, which have another order or other{where}"
        if self.policy.other_optimizer == "skip" or self.policy.missing == "keep":
            self.changed.append(f"{message}: its saved state is not loaded")
            return False
        raise MismatchError(
            message,
            key=self.object_name(name),
            hint='give the saved one; `strict={"other_optimizer": "skip"}` starts this one with new state',
        )

    def _fitted(self, name: str, one: Any, saved: Any) -> Any:
        """The saved state of an object with its tensors, compared with the object as far as its class is known."""
        state = self._object_state(name, saved)
        if isinstance(one, torch.nn.Module) and type(one).load_state_dict is torch.nn.Module.load_state_dict:
            self._check_parameters(one, self.object_name(name), state)
        if not isinstance(one, DictState):
            return state
        fitted = one.fitted(state, self.object_name(name), self.policy, cast=self.cast)
        self.missing += fitted.missing
        self.changed += fitted.notes
        return fitted.value

    def _check_parameters(self, module: torch.nn.Module, name: str, state: Any) -> None:
        """Check the shapes of parameters. `load_state_dict` would raise only after the model was restored."""
        for key, parameter in module.named_parameters(remove_duplicate=False):
            saved = state.get(key) if isinstance(state, dict) else None
            if torch.nn.parameter.is_lazy(parameter) or not isinstance(saved, torch.Tensor):
                continue
            if saved.shape != parameter.shape:
                raise MismatchError(
                    f"{show(key)} of {show(name)} has shape {tuple(saved.shape)} in the checkpoint, and "
                    f"{tuple(parameter.shape)} in the run",
                    key=key,
                    hint="pass a module of the same sizes as the run that saved",
                )

    def _object_state(self, name: str, state: Any) -> Any:
        """The saved state of an object with its tensors. They are placed as those that the object has now."""
        tensors = {}
        for entry in self.entries.get(name, ()):
            if entry.key in self.kept:
                value: Any = self.described.live.object_tensors[entry.key]
            elif entry.key in self.loaded:
                value = self._object_tensor(entry)
            else:
                raise MismatchError(
                    f"the checkpoint lacks {show(entry.key)}, a tensor of {show(self.object_name(name))}", key=entry.key
                )
            tensors[entry.path] = value
        return put_back(state, tensors.items()) if tensors else state

    def _object_tensor(self, entry: Entry) -> Any:
        described = self.described
        local = _tensor(self.loaded[entry.key])
        live: Any = described.live.object_tensors.get(entry.key)
        shape = described.shapes.get(entry.key)
        if live is None:
            # Read as the part of a parameter, see `loading`.
            name = parameter_like(described, entry, tuple(self.shapes.get(entry.key, ())))
            if name is None:
                return local
            live, shape = described.live.named.tensors[name], described.shapes[name]
        if not hasattr(live, "device_mesh"):
            return local.to(live.device)
        from torch.distributed.tensor import DTensor  # noqa: PLC0415  slow, and already imported if there is a DTensor

        assert shape is not None
        local = local.reshape(live.to_local().shape).to(live.to_local().device)
        return DTensor.from_local(
            local, live.device_mesh, live.placements, run_check=False, shape=live.shape, stride=live.stride()
        )

    # -- names and dtypes

    def _known_name(self, name: str) -> str:
        """The name of a parameter in the checkpoint: of a tied one possibly another of its names."""
        assert self.record is not None
        if name in self.record.slots:
            return name
        also = [alias for alias, key in self.described.aliases.items() if key == name]
        also += [self.extra["aliases"].get(name, name)]
        return next((other for other in also if other in self.record.slots), name)

    def is_used(self, key: str) -> bool:
        """Whether a loaded array is of the model, or of an object."""
        if not self._of_objects:
            self._of_objects.update(entry.key for of_name in self.entries.values() for entry in of_name)
        return key in self._used or key in self._of_objects

    def _state_arrays(self, optimizers: Iterable[NamedOptimizer]) -> dict[str, dict[str, np.ndarray]]:
        """The arrays of the optimizers' state: `{name: {slot: array}}`. All other arrays are unexpected."""
        name_of: dict[str, str] = {name: name for live in optimizers for name in live.names.values()}
        name_of |= {alias: name_of[key] for alias, key in self.described.aliases.items() if key in name_of}
        found: dict[str, dict[str, np.ndarray]] = {}
        first: dict[tuple[str, str], str] = {}  # the key that a slot was taken from
        for key, array in self.loaded.items():
            if self.is_used(key):
                continue
            slot, _, name = key.partition(".")  # no slot has a dot in it
            if name in name_of:
                arrays = found.setdefault(name_of[name], {})
                if slot in arrays:
                    self._check_one(f"{slot}.{name_of[name]}", first[name_of[name], slot], key)
                    continue
                arrays[slot], first[name_of[name], slot] = array, key
            elif self._is_frozen(slot, name):
                self.frozen.setdefault(name, []).append(key)
            else:
                self.unexpected.append(key)
        return found

    def _check_one(self, name: str, first: str, other: str) -> None:
        """Check that two tensors of the checkpoint that are one in the run are equal."""
        if first == other:
            return
        one, two = self.loaded[first], self.loaded[other]
        if one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes():
            return
        message = f"{show(first)} and {show(other)} differ in the checkpoint, and are one tensor in the run"
        if self.policy.unexpected == "skip":
            self.changed.append(f"{message}: it gets the values of {show(first)}")
            return
        raise MismatchError(
            message,
            key=other,
            hint=f"do not tie them in the model, or drop one of them; `strict=False` takes {show(first)}"
            if first != name
            else "do not tie them in the model; `strict=False` takes the first one",
        )

    def _is_frozen(self, slot: str, name: str) -> bool:
        """Whether a slot is state of a parameter of the model that no optimizer has now."""
        is_slot = self.record is not None and slot in self.record.slots.get(name, ())
        return is_slot and self.described.aliases.get(name, name) in self.described.model

    def _checked(self, key: str, local: torch.Tensor, array: np.ndarray) -> torch.Tensor:
        """The array as a tensor that can be copied into the local one."""
        wanted = dtypes.parse_dtype(local.dtype)
        stored = wanted if wanted == "F4" and array.dtype == dtypes.numpy_dtype("U8") else dtypes.name_of(array.dtype)
        if tuple(array.shape) != tuple(local.shape):
            raise MismatchError(
                f"{show(key)}: the loaded array has shape {tuple(array.shape)}, and this rank's shard of the tensor "
                f"has shape {tuple(local.shape)}",
                key=key,
                hint="the model differs from the saved one, or `loaded` has another layout",
            )
        tensor = _tensor(array, stored)
        if stored != wanted and not (self.cast and tensor.is_floating_point() and local.is_floating_point()):
            raise MismatchError(
                f"{show(key)} is {stored} in the checkpoint and {wanted} in the run",
                key=key,
                hint="`cast=True` converts floating-point tensors" if not self.cast else None,
            )
        return tensor

    def _state_dtype(self, tensor: torch.Tensor, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """New state keeps its saved dtype. If its parameter is cast, state with the dtype of the parameter is too."""
        saved = self.loaded.get(name)
        same = saved is not None and dtypes.name_of(saved.dtype) == dtypes.parse_dtype(tensor.dtype)
        # Step counters stay exact.
        is_cast = self.cast and same and tensor.ndim > 0 and tensor.is_floating_point()
        return tensor.to(parameter.dtype) if is_cast else tensor

    # -- change

    def apply(
        self, init: Callable[[str, torch.Tensor], torch.Tensor | None] | None, device: torch.device | str | None
    ) -> None:
        named = self.described.live.named
        with torch.no_grad():
            for key, local, tensor in self.fills:
                if local.is_meta:
                    _materialize(named.tensors[key], tensor.to(local.dtype), device)
                elif not _copy(local, tensor):
                    _give_memory(named.tensors[key], tensor)
            filled: dict[int, torch.Tensor] = {}
            for key, (module, name) in named.transient.items():
                buffer = getattr(module, name)
                if buffer.is_meta and init is not None:
                    if id(buffer) not in filled:
                        fresh = torch.empty_like(buffer, device=device or torch.get_default_device())
                        given = init(key, fresh)
                        filled[id(buffer)] = fresh if given is None else given
                    setattr(module, name, filled[id(buffer)])
            for update in self.updates:
                update.apply(_copy_distributed)
            for live, entries in self.entries_shared:
                set_shared(live, entries)
        restored = {**{key: tensor for key, _, tensor in self.fills}, **self.own_values}
        for own in named.own:
            _load_own_entries(own, {name: restored[key] for name, key in own.key_of.items() if key in restored})
        for name, call, value in self.calls:
            load_into(name, call, value)
        # Last, because creating a scheduler changes the learning rate.
        for group, options in self.options:
            set_options(group, options)
        for one in self.rescheduled:
            set_rates(one)
        for key, is_trained in self.thawed.items():
            named.tensors[key].requires_grad_(is_trained)
        started = self.described.live.started
        if started is not None:
            started.schedulers |= self.in_effect.schedulers
            started.options = self.in_effect.options or started.options


def _with_shapes(kind: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """A class, and the shapes of the tensors inside."""
    names = ", ".join(f"{key.partition(':')[2]} {shape}" for key, shape in sorted(shapes.items()))
    return f"{kind} of {names}" if names else kind


def _load_own_entries(own: OwnEntries, saved: Mapping[str, Any]) -> None:
    """Let a model load the entries that its modules added to `state_dict()`, with its other entries as they are.

    A module may have no code that loads them. So what the model then gives is compared with what was saved.
    """
    if not saved:
        return
    given = own.root.state_dict()
    placed = {name: _like(given.get(name), value) for name, value in saved.items()}
    given.update(placed)
    _, error = unloaded(own.root, given)
    reason = error or "the modules of the model do not load it"
    found = own.root.state_dict()
    wrong = [name for name, value in placed.items() if not _is_same(found.get(name), value)]
    if wrong:
        names = listed([show(own.key_of[name]) for name in wrong])
        raise MismatchError(
            f"{names} of the checkpoint cannot be restored: {reason}",
            key=own.key_of[wrong[0]],
            hint=f"`state_dict()` of {type(own.root).__name__} has entries that its `load_state_dict()` does not "
            "restore: make the model with the same values, such as from the same base weights, or load them in "
            "`_load_from_state_dict`",
        )


def _like(live: Any, value: Any) -> Any:
    """A saved value on the device and with the dtype of the live one; with its placements, if it is distributed."""
    if not isinstance(value, torch.Tensor) or not isinstance(live, torch.Tensor):
        return value
    if hasattr(live, "device_mesh"):
        return live  # its own part was copied into it
    return value.to(live.device, live.dtype)


def _is_same(found: Any, saved: Any) -> bool:
    if not isinstance(saved, torch.Tensor):
        return not isinstance(found, torch.Tensor) and digest_of(plain(found)) == digest_of(plain(saved))
    if not isinstance(found, torch.Tensor) or found.dtype != saved.dtype or found.shape != saved.shape:
        return False
    both = [one.to_local() if hasattr(one, "to_local") else one for one in (found, saved)]
    first, second = (one.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for one in both)
    return torch.equal(first, second)


def _part(extra: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A part of the extra state, which must be a mapping."""
    value = extra.get(name, {})
    if type(value) is not dict or not all(isinstance(key, str) for key in value):
        raise MismatchError(f"`extra` has {show(name)} of type {type(value).__name__}, expected a mapping of names")
    return value


def _flat(groups: Any) -> list[str]:
    return [str(name) for group in groups for name in group] if isinstance(groups, list) else []


def _names(value: Any) -> set[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise MismatchError(f"`extra` has {show(FROZEN)} with a value of type {type(value).__name__}, expected names")
    return set(value)


def _tensor(array: np.ndarray, dtype: str | None = None) -> torch.Tensor:
    return as_tensor(array if array.flags.writeable else array.copy(), dtype)


def _copy(live: torch.Tensor, loaded: torch.Tensor) -> bool:
    """Copy into a tensor of the trainer, unless the array was loaded into its memory; see `overwrite`."""
    is_same = live.data_ptr() == loaded.data_ptr() and live.stride() == loaded.stride()
    return is_same or overwrite(live, loaded)


def _copy_distributed(live: Any, loaded: torch.Tensor) -> None:
    local = live.to_local() if hasattr(live, "to_local") else live
    if not _copy(local, loaded.reshape(local.shape)):
        _give_memory(local, loaded.reshape(local.shape))


def _give_memory(live: torch.Tensor, loaded: torch.Tensor) -> None:
    """Give an expanded tensor that does not hold the loaded values memory of its own."""
    live.data = loaded.to(live.device, live.dtype, copy=True)


def _materialize(live: Any, local: torch.Tensor, device: torch.device | str | None) -> None:
    """Give a tensor on device `meta` memory with the values of `local`. It stays the same Python object."""
    new: Any
    if hasattr(live, "device_mesh"):
        from torch.distributed.tensor import DTensor  # noqa: PLC0415  slow, and already imported if there is a DTensor

        mesh = live.device_mesh
        local = local.to(device or mesh.device_type)
        new = DTensor.from_local(local, mesh, live.placements, run_check=False, shape=live.shape, stride=live.stride())
    else:
        new = local.to(device or torch.get_default_device())
    if isinstance(live, torch.nn.Parameter):
        new = torch.nn.Parameter(new, requires_grad=live.requires_grad)
    new.__dict__.update(live.__dict__)  # trainers set attributes on parameters
    torch.utils.swap_tensors(live, new)  # type: ignore[no-untyped-call]


def _refuse(
    described: Described, loaded: Collection[str], report: Report, trained: Sequence[str], policy: Strict
) -> None:
    parts: list[str] = []
    missing = report.missing if policy.missing == "error" else ()
    unexpected = report.unexpected if policy.unexpected == "error" else ()
    if missing:
        parts.append(f"the checkpoint lacks {named(missing)}")
    if unexpected:
        parts.append(f"the run does not have {listed(map(show, unexpected))}")
    if not parts and not trained:
        return
    skip = '`strict={"other_optimizer": "skip"}` starts newly trained parameters with new state, and skips other state'
    fits = described.model.keys() - set(report.missing)
    slots = {key.partition(".")[0] for key in described.optimizer}
    weights = [key for key in (*report.unexpected, *loaded) if key.partition(".")[0] not in slots or key in fits]
    raise MismatchError(
        ", and ".join([*parts, *trained]),
        key=next((one if isinstance(one, str) else one.name for one in (*missing, *unexpected)), None),
        hint=advice(weights, described.model, len(fits)) if parts else skip,
    )
