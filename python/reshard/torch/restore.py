"""Loaded arrays back into live tensors, optimizers and objects: the inverse of `describe`.

Everything is looked at and compared before the first live tensor is changed. What a checkpoint does not hold is never
made up: a tensor that has no content yet must get one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from reshard import dtypes
from reshard.errors import MismatchError
from reshard.torch.optimizers import OptimizerRecord, StateUpdate, saved_options, set_options
from reshard.torch.tensors import as_tensor, from_tensor
from reshard.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import numpy as np

    from reshard.torch.optimizers import NamedOptimizer
    from reshard.torch.state import Described

__all__ = ["Report", "apply"]


@dataclass(frozen=True)
class Report:
    """What did not fit together.

    Attributes:
        missing: what the trainer has on this rank and the checkpoint does not: keys of tensors, `options.<key>` of a
            parameter that was in no group of the optimizer, `modules.<name>`, `objects.<name>`.
        unexpected: what the checkpoint has for this rank and the trainer does not.
        shared: buffers, and `modules.<name>`, that differed between the ranks that saved them, of which other ranks
            now all get the first one's.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()


def apply(
    described: Described,
    loaded: Mapping[str, np.ndarray],
    extra: Mapping[str, Any] | None = None,
    *,
    rank_local: Mapping[str, Any] | None = None,
    strict: bool = True,
    cast: bool = False,
    init: Callable[[str, torch.Tensor], torch.Tensor | None] | None = None,
    device: torch.device | str | None = None,
    object_name: Callable[[str], str] = "objects.{}".format,
) -> Report:
    """Put what was loaded into the live objects that were described.

    Args:
        described: what `describe` found, before anything was changed since.
        loaded: this rank's arrays under `described.layout`, of the model and of the optimizer. Those that were loaded
            into `described.out()` are not copied again. Others may become tensors of the trainer: they are not to be
            changed afterwards.
        extra: what `described.extra` was when the checkpoint was saved; None: only tensors are restored.
        rank_local: what this rank kept for itself: `checkpoint.extra(rank).get("rank_local")`. It fits this rank of as
            many ranks alone, and state of a parameter only where the rank holds the same part of it.
        strict: what is missing or unexpected is an error. Else the state of parameters begins anew of which ranks kept
            something for themselves that does not fit.
        cast: convert floating-point arrays to the dtype of the live tensor, instead of refusing them.
        init: called as `init(name, buffer)` for each buffer that no checkpoint holds (`persistent=False`) and that has
            no content, being on the device `meta`: it fills the buffer, or returns another one.
        device: where tensors get their content that are on the device `meta`; None: the default device, of a DTensor
            that of its mesh.
        object_name: what an object with state is called in the report and in errors.

    Returns:
        What did not fit together, if `strict` is False.

    Raises:
        MismatchError: a shape or dtype differs; something is missing or unexpected; ranks kept something for themselves
            that does not fit; a tensor on the device `meta` would be left without content. Nothing was changed then,
            except by loading into `out()`.

    Example:
        >>> import numpy as np
        >>> from torch import nn
        >>> from reshard.torch.state import describe
        >>> model = nn.Linear(2, 1, bias=False)
        >>> apply(describe(model), {"weight": np.float32([[3, 4]])})
        Report(missing=(), unexpected=(), shared=())
        >>> model.weight.tolist()
        [[3.0, 4.0]]
    """
    parts = {name: _part(extra or {}, name) for name in ("aliases", "modules", "objects", "optimizer")}
    parts["aliases"] = {name: str(key) for name, key in parts["aliases"].items()}
    own = _RankLocal.of(described, rank_local)
    restore = _Restore(described, {**loaded, **own.copies(loaded)}, parts, own, cast=cast, object_name=object_name)
    restore.match_model()
    restore.match_transient(has_init=init is not None)
    restore.match_optimizers()
    restore.match_others(has_extra=extra is not None)
    report = Report(tuple(restore.missing), tuple(restore.unexpected), tuple(restore.shared))
    if strict:
        own.refuse(restore.unfit)
        _refuse(report)
    restore.carry_out(init, device)
    return report


@dataclass(frozen=True, eq=False)
class _RankLocal:
    """What a rank kept for itself, and whether it fits here.

    Attributes:
        described: what is live on this rank.
        saved_by: the rank that kept it, and how many ranks there were; None: nobody kept anything.
        state: `parts`, `parameters` and `modules`, as `Described.saving` has them.
        arrays: tensors of the state of each parameter, by slot.
        differing: copies that differ from those of other ranks, by key.
    """

    described: Described
    saved_by: tuple[int, int] | None
    state: Mapping[str, Mapping[str, Any]]
    arrays: Mapping[str, dict[str, np.ndarray]]
    differing: Mapping[str, Any]

    @classmethod
    def of(cls, described: Described, value: Mapping[str, Any] | None) -> _RankLocal:
        """What was read.

        Raises:
            MismatchError: it is something else.
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
            raise MismatchError(f"`rank_local` is not what a rank kept for itself: {error!r}") from error

    @property
    def is_ours(self) -> bool:
        """Whether this rank kept it, in a world of as many ranks."""
        return self.saved_by == (self.described.rank, self.described.world_size)

    def fits(self, name: str, known: str, *, is_of_part: bool) -> bool:
        """Whether what this rank kept of the state of a parameter was made for the part that it holds now.

        Args:
            name: of the parameter.
            known: its name in the checkpoint.
            is_of_part: whether the state belongs to a part of the parameter; else it is a copy.
        """
        part = [list(one) for one in self.state["parts"].get(known, ())]
        is_same = name in self.described.model and part == self.described.part_of(name)
        return self.is_ours and (is_same or not is_of_part)

    def copies(self, loaded: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """This rank's own copies of what was loaded."""
        return {key: one for key, one in self.differing.items() if key in loaded} if self.is_ours else {}

    def refuse(self, unfit: list[str]) -> None:
        """Raise MismatchError if there is any state that does not fit."""
        if not unfit:
            return
        before = "Each rank that saved" if self.saved_by is None else f"Each of the {self.saved_by[1]} ranks that saved"
        now = f"rank {self.described.rank} of {self.described.world_size}"
        raise MismatchError(
            f"{listed(map(show, unfit))} cannot be resharded. {before} kept its own, for the part that it held; "
            f"this is {now}{', with another part' if self.is_ours else ''}",
            key=unfit[0],
            hint="resume on as many ranks, sharded as they were; or `strict=False` lets the state of these parameters "
            "begin anew",
        )


@dataclass(eq=False)
class _Restore:
    """Everything that is to be done, found out first."""

    described: Described
    loaded: Mapping[str, np.ndarray]
    extra: Mapping[str, Mapping[str, Any]]
    own: _RankLocal
    cast: bool
    object_name: Callable[[str], str]
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)  # what other ranks kept for themselves
    fills: list[tuple[str, torch.Tensor, torch.Tensor]] = field(default_factory=list)  # key, live, loaded
    wanted: list[StateUpdate] = field(default_factory=list)
    calls: list[tuple[Callable[[Any], object], Any]] = field(default_factory=list)
    options: list[tuple[dict[str, Any], Mapping[str, Any]]] = field(default_factory=list)  # of groups
    record: OptimizerRecord | None = None
    _used: set[str] = field(default_factory=set)

    # -- what is to be done

    def match_model(self) -> None:
        others: dict[str, list[str]] = {}
        for alias, key in self.described.aliases.items():
            others.setdefault(key, []).append(alias)
        saved_aliases = self.extra["aliases"]
        empty: list[str] = []
        for key, local in self.described.model.items():
            # What is tied now may have had another first name, or may not have been tied.
            names = [key, *others.get(key, ()), *([saved_aliases[key]] if key in saved_aliases else [])]
            found = next((name for name in names if name in self.loaded), None)
            if found is None:
                self.missing.append(key)
                empty += [key] if local.is_meta else []
            else:
                self.fills.append((key, local, self._checked(key, local, self.loaded[found])))
            self._used.update(names[: len(names) - (key in saved_aliases)])
        buffers = self.described.live.named.buffers
        for key in () if self.own.is_ours else self.own.differing:
            name = self.described.aliases.get(key, key)
            if name in self.described.model:
                (self.shared if name in buffers else self.unfit).append(key)
        if empty:
            raise MismatchError(
                f"the checkpoint lacks {listed(map(show, empty))}, on device `meta`: nothing else can give them a "
                "content",
                key=empty[0],
            )

    def match_transient(self, *, has_init: bool) -> None:
        named = self.described.live.named
        empty = [key for key, (module, name) in named.transient.items() if getattr(module, name).is_meta]
        if empty and not has_init:
            raise MismatchError(
                f"{listed(map(show, empty))} on device `meta`: buffers with `persistent=False`, which no checkpoint "
                "holds",
                key=empty[0],
                hint="pass `init`, which is called as `init(name, buffer)` to fill each of them",
            )

    def match_optimizers(self) -> None:
        optimizers = self.described.live.optimizers
        if self.extra["optimizer"] and optimizers:
            self.record = OptimizerRecord.from_value(self.extra["optimizer"])
        given = self._state_arrays(optimizers)
        kinds = {
            name: group["class"] for group in (self.record or OptimizerRecord()).groups for name in group["params"]
        }
        for live in optimizers:
            for name, (parameter, group) in live.owned().items():
                known = name if self.record is None else self._known_name(name)
                if kinds.get(known, live.kind) != live.kind:
                    raise MismatchError(
                        f"{show(name)} was trained with {kinds[known]}, and is with {live.kind} now",
                        key=name,
                        hint="load the model alone, without the optimizer",
                    )
                arrays = given.get(name, {})
                parts, copies = self._kept_apart(known, arrays)
                kept = [f"{slot}.{known}" for slot in sorted(parts | copies)]
                if kept and not self.own.fits(name, known, is_of_part=bool(parts)):
                    self.unfit += kept
                    self.missing += kept
                    continue
                self._match_state(
                    StateUpdate(live, parameter, group), name, known, arrays | self.own.arrays.get(known, {})
                )

    def _kept_apart(self, known: str, arrays: Mapping[str, np.ndarray]) -> tuple[set[str], set[str]]:
        """The state of a parameter that ranks kept for themselves, by slot: of their parts, and copies that differ."""
        parts = {*self.record.local.get(known, ())} if self.record is not None else set()
        parts |= {str(slot) for slot in self.own.state["parameters"].get(known, ())}
        return parts, {slot for slot in arrays if f"{slot}.{known}" in self.own.differing}

    def _match_state(self, wanted: StateUpdate, name: str, known: str, arrays: Mapping[str, np.ndarray]) -> None:
        """What is to become of the state of the parameter `name`, which the checkpoint calls `known`."""
        state = wanted.live.local.state.get(wanted.parameter, {})
        present = {slot for slot, value in state.items() if isinstance(value, torch.Tensor)}
        keep: dict[str, Any] | None = None
        expected = present or set(arrays)
        if self.record is not None and known in self.record.slots:
            expected = set(self.record.slots[known]) | self.own.arrays.get(known, {}).keys()
            keep = self.own.state["parameters"].get(known, self.record.state.get(known, {}))
        self.missing += [f"{slot}.{name}" for slot in sorted(expected - arrays.keys())]
        self.unexpected += [f"{slot}.{name}" for slot in sorted(arrays.keys() - expected)]
        fill: dict[str, torch.Tensor] = {}
        for slot in sorted(expected & arrays.keys()):
            key = f"{slot}.{name}"
            local = self.described.optimizer.get(key, self.described.local.get(key))
            if slot in present and local is not None:
                fill[slot] = self._checked(f"{slot}.{name}", local, arrays[slot])
            else:
                fill[slot] = self._state_dtype(_tensor(arrays[slot]), known, wanted.parameter)
        drop = () if keep is None else tuple(slot for slot in state if slot not in expected and slot not in keep)
        plain = () if self.record is None else self.record.plain.get(known, ())
        self.wanted.append(replace(wanted, fill=fill, keep=keep, drop=drop, plain=plain))

    def match_others(self, *, has_extra: bool) -> None:
        if not has_extra:
            return
        live = self.described.live
        kept, modules, objects = self.own.state["modules"], self.extra["modules"], self.extra["objects"]
        if self.own.is_ours:
            modules = {**modules, **kept}
        else:
            self.shared += [f"modules.{name}" for name in kept if name in live.named.extra_state]
        for name, module in live.named.extra_state.items():
            if name in modules:
                self.calls.append((module.set_extra_state, modules[name]))
            else:
                self.missing.append(f"modules.{name}")
        for name, one in live.objects.items():
            if name in objects:
                self.calls.append((one.load_state_dict, objects[name]))
            else:
                self.missing.append(self.object_name(name))
        self.unexpected += [self.object_name(name) for name in objects if name not in live.objects]
        if self.record is not None:
            names = {name for group in self.record.groups for name in group["params"]}
            for one_live in live.optimizers:
                own = (self._known_name(name) for name in one_live.names.values())
                self.missing += [f"options.{name}" for name in own if name not in names]
            self.options = saved_options(live.optimizers, self.record, self._known_name)

    # -- how it fits

    def _known_name(self, name: str) -> str:
        """The name that the checkpoint has for a parameter: another first name, if it is tied."""
        assert self.record is not None
        if name in self.record.slots:
            return name
        also = [alias for alias, key in self.described.aliases.items() if key == name]
        also += [self.extra["aliases"].get(name, name)]
        return next((other for other in also if other in self.record.slots), name)

    def _state_arrays(self, optimizers: Iterable[NamedOptimizer]) -> dict[str, dict[str, np.ndarray]]:
        """The arrays of the optimizers' state: `{name: {slot: array}}`; all that is left is unexpected."""
        name_of: dict[str, str] = {name: name for live in optimizers for name in live.names.values()}
        name_of |= {alias: name_of[key] for alias, key in self.described.aliases.items() if key in name_of}
        found: dict[str, dict[str, np.ndarray]] = {}
        for key, array in self.loaded.items():
            if key in self._used:
                continue
            slot, _, name = key.partition(".")  # no slot has a dot in it
            if name in name_of:
                found.setdefault(name_of[name], {})[slot] = array
            else:
                self.unexpected.append(key)
        return found

    def _checked(self, key: str, local: torch.Tensor, array: np.ndarray) -> torch.Tensor:
        """The array as a tensor that can be copied into the live one."""
        wanted = dtypes.parse_dtype(local.dtype)
        stored = wanted if wanted == "F4" and array.dtype == dtypes.numpy_dtype("U8") else dtypes.name_of(array.dtype)
        if tuple(array.shape) != tuple(local.shape):
            raise MismatchError(
                f"{show(key)}: an array of shape {tuple(array.shape)} was loaded, and this rank's part of the live "
                f"tensor is of shape {tuple(local.shape)}",
                key=key,
                hint="the model is not the one that was saved, or `loaded` is of another layout",
            )
        tensor = _tensor(array, stored)
        if stored != wanted and not (self.cast and tensor.is_floating_point() and local.is_floating_point()):
            raise MismatchError(
                f"{show(key)} is {stored} in the checkpoint and {wanted} in the trainer",
                key=key,
                hint="`cast=True` converts floating-point tensors" if not self.cast else None,
            )
        return tensor

    def _state_dtype(self, tensor: torch.Tensor, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """State that is new keeps its dtype; where its parameter is cast, state of the same dtype is cast likewise."""
        saved = self.loaded.get(name)
        same = saved is not None and dtypes.name_of(saved.dtype) == dtypes.parse_dtype(tensor.dtype)
        # Counters of steps are exact.
        is_cast = self.cast and same and tensor.ndim > 0 and tensor.is_floating_point()
        return tensor.to(parameter.dtype) if is_cast else tensor

    # -- doing it

    def carry_out(
        self, init: Callable[[str, torch.Tensor], torch.Tensor | None] | None, device: torch.device | str | None
    ) -> None:
        named = self.described.live.named
        with torch.no_grad():
            for key, local, tensor in self.fills:
                if local.is_meta:
                    _give_content(named.tensors[key], tensor.to(local.dtype), device)
                else:
                    _copy(local, tensor)
            made: dict[int, torch.Tensor] = {}
            for key, (module, name) in named.transient.items():
                buffer = getattr(module, name)
                if buffer.is_meta and init is not None:
                    if id(buffer) not in made:
                        fresh = torch.empty_like(buffer, device=device or torch.get_default_device())
                        given = init(key, fresh)
                        made[id(buffer)] = fresh if given is None else given
                    setattr(module, name, made[id(buffer)])
            for wanted in self.wanted:
                wanted.apply(_copy_distributed)
        for call, value in self.calls:
            call(value)
        # Last: schedulers have set learning rates when they were made.
        for group, options in self.options:
            set_options(group, options)


def _part(extra: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A part of the extra state, as plain as it is written."""
    value = extra.get(name, {})
    if type(value) is not dict or not all(isinstance(key, str) for key in value):
        raise MismatchError(f"`extra` has {show(name)} of type {type(value).__name__}, expected a mapping of names")
    return value


def _tensor(array: np.ndarray, dtype: str | None = None) -> torch.Tensor:
    return as_tensor(array if array.flags.writeable else array.copy(), dtype)


def _copy(live: torch.Tensor, loaded: torch.Tensor) -> None:
    """Fill a live tensor, if the array was not loaded into it."""
    if live.data_ptr() != loaded.data_ptr() or live.stride() != loaded.stride():
        live.detach().copy_(loaded)


def _copy_distributed(live: Any, loaded: torch.Tensor) -> None:
    local = live.to_local() if hasattr(live, "to_local") else live
    _copy(local, loaded.reshape(local.shape))


def _give_content(live: Any, local: torch.Tensor, device: torch.device | str | None) -> None:
    """Give a tensor on the device `meta` this local part; it stays the object that everybody knows."""
    new: Any
    if hasattr(live, "device_mesh"):
        from torch.distributed.tensor import DTensor  # noqa: PLC0415  whoever has one has imported it

        mesh = live.device_mesh
        local = local.to(device or mesh.device_type)
        new = DTensor.from_local(local, mesh, live.placements, run_check=False, shape=live.shape, stride=live.stride())
    else:
        new = local.to(device or torch.get_default_device())
    if isinstance(live, torch.nn.Parameter):
        new = torch.nn.Parameter(new, requires_grad=live.requires_grad)
    new.__dict__.update(live.__dict__)  # trainers mark parameters
    torch.utils.swap_tensors(live, new)  # type: ignore[no-untyped-call]


def _refuse(report: Report) -> None:
    parts = []
    if report.missing:
        parts.append(f"the checkpoint lacks {listed(map(show, report.missing))}")
    if report.unexpected:
        parts.append(f"the trainer has no place for {listed(map(show, report.unexpected))}")
    if parts:
        raise MismatchError(
            ", and ".join(parts),
            key=(*report.missing, *report.unexpected)[0],
            hint="`strict=False` loads what fits",
        )
