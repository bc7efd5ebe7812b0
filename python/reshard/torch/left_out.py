"""Frozen parameters that saves leave out (`leave_out_frozen`): which they are, their digests, and the comparison.

A parameter is left out if no gradient is computed for it, no optimizer has state of it, and no adapter of peft has it.
Its values must come from the program or from `init_from`: values that only a checkpoint has are saved.
`formats.left_out` defines the digest and the record.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from reshard import dtypes, opening
from reshard.errors import MismatchError, UnsupportedError
from reshard.formats.left_out import LeftOut, LeftOutTensor
from reshard.options import Strict
from reshard.ranks.collective import Collective
from reshard.ranks.group import session
from reshard.torch.adapters import adapters_of
from reshard.torch.loading import MOST_NAMES, read_for
from reshard.torch.modules import named
from reshard.torch.published import under_names
from reshard.torch.restore import apply
from reshard.torch.tensors import plain_tensor
from reshard.values.words import listed, show
from reshard.verbs.start import initial

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from reshard.options import InitFrom
    from reshard.ranks.group import Group
    from reshard.torch.modules import Named
    from reshard.torch.state import Described

_BLOCK = (
    1 << 15
)  # elements at once: they stay in the cache, and torch starts no threads, which cost more than they gain
_BLOCK_OF_DEVICE = 1 << 24
_STEP = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_N_SAMPLED = 1024
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(local: torch.Tensor, shape: Sequence[int], offset: Sequence[int]) -> int:
    """The digest of a region of a tensor; the sum of those of all regions is that of the tensor.

    It is computed on the device of the tensor.

    Args:
        local: the region, a plain tensor.
        shape: global shape of the tensor, in elements.
        offset: global offset of the region, in elements.

    Example:
        >>> w = torch.arange(6.0).reshape(2, 3)
        >>> whole = digest_of(w, (2, 3), (0, 0))
        >>> (digest_of(w[:, :1], (2, 3), (0, 0)) + digest_of(w[:, 1:], (2, 3), (0, 1))) % 2**64 == whole
        True
    """
    local = local.detach()
    if local.dtype == torch.complex128:
        local = torch.view_as_real(local)
        shape, offset = (*shape, 2), (*offset, 0)
    if not local.numel():
        return 0
    extents, start, length = _runs(tuple(local.shape), tuple(shape), tuple(offset))
    bits = local.contiguous().view(_INTEGERS[local.element_size()]).reshape(-1, length)
    mask = (1 << 8 * local.element_size()) - 1
    # The global index of the first element of each run of consecutive elements.
    first = torch.full((1,), start + 1, dtype=torch.int64, device=bits.device)
    for n, stride in extents:
        first = (first[:, None] + torch.arange(n, device=bits.device) * stride).reshape(-1)
    first.mul_(_signed(_STEP))
    n_most = _BLOCK if bits.device.type == "cpu" else _BLOCK_OF_DEVICE
    n_columns = min(length, n_most)
    n_rows = max(1, n_most // length)
    column = torch.arange(n_columns, device=bits.device).mul_(_signed(_STEP))
    total = 0
    for left in range(0, length, n_columns):
        for top in range(0, len(bits), n_rows):
            x = bits[top : top + n_rows, left : left + n_columns].to(torch.int64, copy=True)
            if local.element_size() < 8:
                x &= mask
            x += column[: x.shape[1]]
            x += first[top : top + n_rows, None] + _signed(left * _STEP % (1 << 64))
            for shift, factor in _MIX:
                x ^= _shifted(x, shift)
                x *= _signed(factor)
            x ^= _shifted(x, _LAST_SHIFT)
            total += int(x.sum())  # wraps, as all sums of integers of torch
    return total % (1 << 64)


def _runs(
    local: tuple[int, ...], shape: tuple[int, ...], offset: tuple[int, ...]
) -> tuple[list[tuple[int, int]], int, int]:
    """The runs of consecutive global indexes in a region: `(number, stride)` of outer dims, first index, length."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner = len(shape)
    while inner > 1 and local[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    extents = list(zip(local[:outer], strides[:outer], strict=True))
    return extents, sum(a * b for a, b in zip(offset, strides, strict=True)), math.prod(local[outer:])


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shifted(x: torch.Tensor, shift: int) -> torch.Tensor:
    """A logical shift to the right: that of torch keeps the sign."""
    return (x >> shift).bitwise_and_((1 << 64 - shift) - 1)


class Trained(Protocol):
    """The trained objects, such as a `Run`."""

    @property
    def model(self) -> Any:
        """The model."""

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Its optimizers."""


@dataclass(frozen=True, eq=False)
class Part:
    """The part of a tensor that this rank holds: the local tensor, the global shape and the global offset."""

    local: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]


@dataclass(frozen=True)
class _Region:
    """A region of a tensor on one rank: dtype, global shape, offset, shape in elements; and its digest."""

    dtype: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    digest: str


def local_parts(described: Described, names: Iterable[str]) -> dict[str, Part]:
    """This rank's parts of tensors of the model, of those that it has."""
    return {
        key: Part(described.model[key], tuple(described.shapes[key]), tuple(described.offsets[key]))
        for key in names
        if key in described.model
    }


def digests(parts: Mapping[str, Part], group: Group, timeout: float) -> dict[str, LeftOutTensor]:
    """The digests of whole tensors from this rank's parts of them, all ranks collectively.

    The digest is "" if ranks hold different copies of a part, or if a part is on device `meta`.

    Args:
        parts: the parts, by key.
        group: the ranks.
        timeout: seconds that ranks wait for each other.

    Raises:
        GroupError: a rank did not answer in time.

    Example:
        >>> from reshard.ranks.group import SingleProcess
        >>> digests({"w": Part(torch.zeros(1), (1,), (0,))}, SingleProcess(), 1.0)["w"].digest
        'e220a8397b1dcdaf'
    """
    every = Collective(session(group, "digests"), timeout).each(
        lambda: {key: _region(parts[key]) for key in sorted(parts)}, dict[str, _Region]
    )
    keys = sorted({key for of_rank in every for key in of_rank})
    return {key: _joined([of_rank[key] for of_rank in every if key in of_rank]) for key in keys}


def _region(part: Part) -> _Region:
    local = part.local
    digest = "" if local.is_meta else f"{digest_of(local, part.shape, part.offset):016x}"
    return _Region(dtypes.parse_dtype(local.dtype), part.shape, part.offset, tuple(local.shape), digest)


def _joined(regions: list[_Region]) -> LeftOutTensor:
    first = regions[0]
    of_place: dict[tuple[tuple[int, ...], tuple[int, ...]], set[str]] = {}
    for one in regions:
        of_place.setdefault((one.offset, one.shape), set()).add(one.digest)
    n_elements = sum(math.prod(shape) for _, shape in of_place)
    is_one = all(len(found) == 1 and "" not in found for found in of_place.values())
    is_alike = all((one.dtype, one.whole) == (first.dtype, first.whole) for one in regions)
    total = ""
    if is_one and is_alike and n_elements == math.prod(first.whole):
        total = f"{sum(int(next(iter(found)), 16) for found in of_place.values()) % (1 << 64):016x}"
    return LeftOutTensor(first.dtype, first.whole, total)


@dataclass(eq=False)
class Frozen:
    """The parameters that the saves of a run leave out.

    Attributes:
        tensors: their records, by key; the same on all ranks. Parameters that are trained later, or change, are
            removed.
        source: what `init_from` named; None: the program made them.
        parts: this rank's parts; the local tensors are placeholders on device `meta`.
        is_compared: whether they were compared after the first step.
    """

    tensors: dict[str, LeftOutTensor] = field(default_factory=dict)
    source: str | None = None
    parts: dict[str, Part] = field(default_factory=dict)
    is_compared: bool = False

    def __post_init__(self) -> None:
        self._note()

    def _note(self) -> None:
        """Note the state of the parts, without the tensors, whose memory may be freed."""
        self._seen = {key: _state(one.local) for key, one in self.parts.items()}
        self.parts = {key: replace(one, local=one.local.to("meta")) for key, one in self.parts.items()}

    def record(self) -> LeftOut | None:
        """What a save records."""
        return LeftOut(dict(self.tensors), self.source) if self.tensors else None

    def update(self, run: Trained, group: Group, timeout: float) -> list[str]:
        """Remove parameters that are trained by now or have changed, all ranks collectively. Returns warnings.

        The first call compares the digests of all, later ones those of tensors that were changed in place or moved, or
        whose sample differs.

        Args:
            run: the trained objects.
            group: the ranks.
            timeout: seconds that ranks wait for each other.
        """

        def own() -> list[list[str]]:
            found = named(run.model)
            held = candidates(run, found)
            here = [key for key in self.tensors if key in self.parts]
            trained = [key for key in here if key not in held]
            moved = []
            for key in here:
                if key in held:
                    local = _local(found.tensors[key], key)
                    part = self.parts[key]
                    if local.numel() == part.local.numel() == 0:
                        local = local.reshape(part.local.shape)
                    if local.shape != part.local.shape or local.dtype != part.local.dtype:
                        trained.append(key)
                        continue
                    self.parts[key] = replace(part, local=local)
                    if not self.is_compared or self._seen[key] != _state(local):
                        moved.append(key)
            return [trained, moved]

        every = Collective(session(group, "left out"), timeout).each(own, list[list[str]])
        trained, moved = ({key for of_rank in every for key in of_rank[which]} for which in (0, 1))
        now: dict[str, LeftOutTensor] = {}
        if moved - trained:
            now = digests({key: one for key, one in self.parts.items() if key in moved - trained}, group, timeout)
        changed = sorted(key for key, one in now.items() if one != self.tensors[key])
        for key in (*trained, *changed):
            self.tensors.pop(key, None)
            self.parts.pop(key, None)
        self._note()
        self.is_compared = True
        notes = []
        if trained:
            notes.append(f"{listed(map(show, sorted(trained)), MOST_NAMES)}: trained by now, and saved from now on")
        if changed:
            notes.append(
                f"{listed(map(show, changed), MOST_NAMES)}: not trained by an optimizer, but changed since the run "
                "began, and saved from now on"
            )
        return notes


def _local(tensor: Any, key: str) -> torch.Tensor:
    with torch.no_grad():
        return plain_tensor(tensor.to_local() if hasattr(tensor, "device_mesh") else tensor, key).detach()


def _state(local: torch.Tensor) -> tuple[int, int, int]:
    """What differs if a tensor has moved or changed. torch does not count changes through `.data`: hence the sample."""
    return local.data_ptr(), local._version, _sample(local)  # noqa: SLF001  there is no public way


def _sample(local: torch.Tensor) -> int:
    """A checksum of elements that are spread over a tensor."""
    if local.is_meta or not local.numel():
        return 0
    local = local.resolve_conj().resolve_neg()
    local = torch.view_as_real(local) if local.dtype == torch.complex128 else local
    bits = local.view(_INTEGERS[local.element_size()])
    n = min(bits.numel(), _N_SAMPLED)
    places = torch.arange(n, device=bits.device) * bits.numel() // n
    sampled = bits.reshape(1) if bits.ndim == 0 else bits[torch.unravel_index(places, bits.shape)]
    return zlib.crc32(sampled.cpu().numpy().tobytes())


def candidates(run: Trained, found: Named) -> set[str]:
    """Keys of this rank's parameters that can be left out.

    Args:
        run: the trained objects.
        found: the tensors of its model.
    """
    key_of = {id(tensor): key for key, tensor in found.tensors.items()}
    with_state = {key_of.get(id(one)) for each in run.optimizers() for one, state in each.state.items() if state}
    adapters = adapter_keys(run.model) if found.frozen else set()
    return {key for key in found.frozen - with_state - adapters if _is_of_bytes(found.tensors[key])}


def _is_of_bytes(local: torch.Tensor) -> bool:
    return local.layout == torch.strided and dtypes.bits(dtypes.parse_dtype(local.dtype)) % 8 == 0


def adapter_keys(model: object) -> set[str]:
    """Keys of the tensors of adapters of peft, also of those that are not trained now."""
    try:
        return {key for one in adapters_of(model) for key in one.names}
    except UnsupportedError:  # `hf_every` refuses such a model
        return set()


def common_candidates(run: Trained, described: Described, group: Group, timeout: float) -> set[str]:
    """Keys of parameters that every rank that has them can leave out, all ranks collectively.

    Args:
        run: the trained objects.
        described: the live tensors of its model.
        group: the ranks.
        timeout: seconds that ranks wait for each other.
    """

    def own() -> list[list[str]]:
        held = candidates(run, described.live.named) & described.model.keys()
        return [sorted(held), sorted(described.model.keys() - held)]

    every = Collective(session(group, "frozen"), timeout).each(own, list[list[str]])
    refused = {key for of_rank in every for key in of_rank[1]}
    return {key for of_rank in every for key in of_rank[0]} - refused


def differences(found: LeftOut, now: Mapping[str, LeftOutTensor], described: Described) -> dict[str, str]:
    """What differs between tensors of the run and the record of a checkpoint, by key of the run.

    Args:
        found: the record.
        now: the records of the tensors of the run.
        described: the run.
    """
    differing: dict[str, str] = {}
    for name, key in live_names(described, found.tensors).items():
        saved, live = found.tensors[key], now[name]
        if (saved.dtype, saved.shape) != (live.dtype, live.shape):
            differing[name] = f"is {live.dtype} of shape {live.shape}, and was {saved.dtype} of shape {saved.shape}"
        elif saved.digest != live.digest:
            differing[name] = (
                f"has digest {live.digest or '(none: ranks differ, or no values)'}, and had {saved.digest}"
            )
    return differing


def live_names(described: Described, keys: Iterable[str]) -> dict[str, str]:
    """Keys of the run for keys of a checkpoint, as far as the run has them."""
    names: dict[str, str] = {}
    for key in keys:
        name = key if key in described.names else described.all_aliases.get(key)
        if name is not None:
            names.setdefault(name, key)
    return names


def refuse(found: LeftOut, differing: Mapping[str, str], path: str) -> None:
    """Refuse a checkpoint that leaves out tensors of which the run has other values.

    Args:
        found: the record of the checkpoint.
        differing: what differs, by key of the run.
        path: the checkpoint.

    Raises:
        MismatchError: there are any.
    """
    if not differing:
        return
    first = min(differing)
    source = "" if found.source is None else f" (loaded from {show(found.source)} then)"
    raise MismatchError(
        f"{show(path)} leaves out {listed(map(show, sorted(differing)))}{source}, and the run has other values: "
        f"{show(first)} {differing[first]}",
        path=path,
        key=first,
        hint="make the model as the run that saved made it: from the same base weights, with the same quantisation and "
        "the same versions of transformers and bitsandbytes, on the same kind of device; or give `init_from`, the "
        "source of these tensors",
    )


def load_base(start: InitFrom, names: Collection[str], described: Described, run: Trained, *, cast: bool) -> None:
    """Load tensors that a checkpoint leaves out from what `init_from` names, on this rank. Others keep their values.

    Args:
        start: what `init_from` names.
        names: keys of the tensors.
        described: the live tensors.
        run: the trained objects.
        cast: as in `Checkpointer.resume`.

    Raises:
        ReshardError: as `read_for`.
    """
    with opening.open(start.path, format=start.format) as checkpoint:
        taken = under_names(start, checkpoint, run.model) or start
        with initial(checkpoint, taken) as opened:
            include = sorted(name for name in names if name in opened)
            if not include:
                return
            only = replace(taken, names=None, entry=None, include=include, exclude=())
            base = read_for(
                described,
                opened,
                described.rank,
                part="model",
                with_optimizer=False,
                strict=Strict.of(False),
                cast=cast,
                init=only,
            )
    apply(described, base.arrays, strict=False, cast=cast, only="model", kept=base.kept)


def compare(
    found: LeftOut,
    described: Described,
    run: Trained,
    *,
    start: InitFrom | None,
    group: Group,
    timeout: float,
    path: str,
    cast: bool,
    known: Mapping[str, LeftOutTensor],
) -> tuple[dict[str, LeftOutTensor], str | None]:
    """Compare the tensors of the run with those that a checkpoint leaves out, all ranks collectively.

    If some differ and there is an `init_from`, these are loaded from it first.

    Args:
        found: the record of the checkpoint.
        described: the live tensors.
        run: the trained objects.
        start: the `init_from` of the run.
        group: the ranks.
        timeout: seconds that ranks wait for each other.
        path: the checkpoint.
        cast: as in `Checkpointer.resume`.
        known: records of live tensors that were computed before.

    Returns:
        The records of these tensors, by key of the run, and where they come from.

    Raises:
        MismatchError: a tensor of the run has other values. No tensor of the checkpoint has been restored then.
    """
    names = live_names(described, found.tensors)
    now = {name: known[name] for name in names if name in known}
    now |= digests(local_parts(described, [name for name in names if name not in now]), group, timeout)
    differing, source = differences(found, now, described), found.source
    if differing and start is not None:
        chosen = set(differing)
        Collective(session(group, "base"), timeout).each(lambda: load_base(start, chosen, described, run, cast=cast))
        now |= digests(local_parts(described, chosen), group, timeout)
        differing, source = differences(found, now, described), str(start.path)
    refuse(found, differing, path)
    return now, source


def frozen_at_start(
    run: Trained,
    described: Described,
    group: Group,
    timeout: float,
    *,
    before: Mapping[str, LeftOutTensor],
    compared: Mapping[str, LeftOutTensor],
    is_loaded: bool,
    source: str | None,
    of_init: bool,
) -> tuple[Frozen, list[str]]:
    """The parameters that the saves of a run leave out, all ranks collectively.

    Args:
        run: the trained objects, restored.
        described: the live tensors, as they were described before.
        group: the ranks.
        timeout: seconds that ranks wait for each other.
        before: records of the frozen parameters before anything was loaded.
        compared: records of those that the checkpoint leaves out.
        is_loaded: whether something was loaded.
        source: where they come from; None: the program.
        of_init: whether what `init_from` names was loaded, and not a checkpoint of the run.

    Returns:
        The parameters, and messages.
    """
    names = common_candidates(run, described, group, timeout)
    live = named(run.model).tensors
    parts = {
        key: Part(_local(live[key], key).reshape(described.model[key].shape), one.shape, one.offset)
        for key, one in local_parts(described, names).items()
    }
    now = {key: one for key, one in (compared if is_loaded else before).items() if key in names}
    now |= digests({key: one for key, one in parts.items() if key not in now}, group, timeout)
    loaded = [] if of_init or not is_loaded else [key for key in names - compared.keys() if now[key] != before.get(key)]
    tensors = {key: now[key] for key in sorted(names - set(loaded)) if now[key].digest}
    notes = []
    if loaded:
        notes.append(
            f"{listed(map(show, sorted(loaded)), MOST_NAMES)}: frozen, but with values that only the checkpoint has. "
            "They are saved; `leave_out_frozen` leaves out what the program or `init_from` gives"
        )
    return Frozen(tensors, source, {key: one for key, one in parts.items() if key in tensors}), notes
