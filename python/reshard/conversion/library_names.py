"""The names under which transformers publishes the tensors of a live model, as a name map.

transformers may fuse, rename or transpose the tensors of a published folder when it loads them. Its own function for
the opposite direction is called once, with tensors on the device `meta`; where each result lies in the live tensors
gives the rules of the map. A conversion that moves more than whole regions is refused. Imports torch: import it late.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reshard.errors import NamesError, ReshardError, UnsupportedError
from reshard.names import NameMap
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_CONCATENATE = "aten::cat"
_COPIES = ("aten::clone", "aten::_to_copy", "aten::contiguous")
_HINT = "write the folder with `save_pretrained` of the model"


def published_names(model: object) -> NameMap | None:
    """The map from the published names of a model of transformers to those of its state dict.

    Returns:
        The map; None: the model is none of transformers, or both names are the same.

    Raises:
        UnsupportedError: transformers changes a tensor in a way that a name map does not express.

    Example:
        >>> published_names(torch.nn.Linear(2, 2)) is None
        True
    """
    inner = unwrapped(model)
    library: Any = sys.modules.get("transformers.core_model_loading")
    models: Any = sys.modules.get("transformers.modeling_utils")
    revert = getattr(library, "revert_weight_conversion", None)
    if revert is None or not isinstance(inner, models.PreTrainedModel):
        return None
    live = {
        name: torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
        for name, tensor in inner.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    }
    return _map_of(live, lambda tensors: revert(inner, tensors), type(inner).__name__)


def unwrapped(model: object) -> Any:
    """The model without DDP and `torch.compile`."""
    inner: Any = model
    while True:
        if (compiled := getattr(inner, "_orig_mod", None)) is not None:
            inner = compiled
        elif type(inner).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = inner.module
        else:
            return inner


class _Traced(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps copies as views, and records which operation made each new storage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, tuple[str, Any]] = {}
        self.kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        name = func._schema.name  # noqa: SLF001
        if name in _COPIES and not (kwargs or {}).get("dtype"):
            return torch.ops.aten.alias.default(args[0])
        if func._schema.is_mutable:  # noqa: SLF001
            raise NotImplementedError(name)
        try:
            out = func(*args, **(kwargs or {}))
        except RuntimeError:  # a view of what would be a copy
            first = torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
            out = func(first, *args[1:], **(kwargs or {}))
        known = {_storage(one) for one in _tensors((args, kwargs or {}))}
        for tensor in _tensors(out):
            if _storage(tensor) not in known:
                self.made[_storage(tensor)] = (name, args)
                self.kept.append((tensor, args))
        return out


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [one for item in value for one in _tensors(item)] if isinstance(value, list | tuple) else []


@dataclass(frozen=True)
class _Region:
    """A part of a live tensor: the corner, the lengths, and the dim of the live tensor of each of its dims."""

    key: str
    corner: tuple[int, ...]
    lengths: tuple[int, ...]
    dims: tuple[int, ...]

    @property
    def dropped(self) -> tuple[int, ...]:
        return tuple(dim for dim in range(len(self.corner)) if dim not in self.dims)

    @property
    def order(self) -> list[int]:
        """The dims of the part in the order of the whole, as `transpose` of a rule."""
        return sorted(range(len(self.dims)), key=self.dims.__getitem__)


def _map_of(live: Mapping[str, torch.Tensor], revert: Callable[[dict[str, Any]], Any], kind: str) -> NameMap | None:
    """The map from the names that `revert` makes to those of the live tensors."""
    trace = _Traced()
    try:
        with torch.no_grad(), trace:
            published: dict[str, torch.Tensor] = dict(revert(dict(live)))
    except Exception as error:
        raise UnsupportedError(
            f"the published names of {kind} are not known: transformers cannot convert its tensors without their "
            f"values ({type(error).__name__}: {show(str(error))})",
            hint=_HINT,
        ) from error
    keys = {_storage(tensor): key for key, tensor in live.items()}
    regions: dict[str, list[tuple[str, _Region]]] = defaultdict(list)
    rules: list[dict[str, object]] = []
    used: set[str] = set()
    for name, tensor in published.items():
        origin = keys.get(_storage(tensor))
        if origin is not None:
            regions[origin].append((name, _region(name, origin, live[origin], tensor)))
            used.add(origin)
            continue
        operation, args = trace.made.get(_storage(tensor), ("an unknown operation", ()))
        parts = args[0] if operation == _CONCATENATE else []
        origins = [keys.get(_storage(part)) for part in parts]
        if not parts or None in origins or not tensor.is_contiguous():
            raise _refused(name, operation)
        found = [_region(name, str(key), live[str(key)], part) for key, part in zip(origins, parts, strict=True)]
        if any(one.lengths != tuple(live[one.key].shape) or one.dropped for one in found):
            raise _refused(name, operation)
        used.update(one.key for one in found)
        dim = (args[1] if len(args) > 1 else 0) % tensor.ndim
        rules.append(_joined(name, found, dim, parts))
    for key, of_key in regions.items():
        rule = _rule(key, tuple(live[key].shape), of_key)
        if rule is not None:
            rules.append(rule)
    if missing := sorted(live.keys() - used):
        raise UnsupportedError(f"{show(missing[0])} of {kind} is not in a folder that is published", hint=_HINT)
    if not rules:
        return None
    names = NameMap.from_mapping({"rules": rules})
    _check(names, live, published, kind)
    return names


def _region(name: str, key: str, whole: torch.Tensor, part: torch.Tensor) -> _Region:
    """Where a view lies in a live tensor."""
    if part.dtype != whole.dtype:
        raise _refused(name, f"a change of the dtype of {show(key)}")
    rest = part.storage_offset()
    corner = []
    for stride in whole.stride():
        corner.append(rest // stride if stride else 0)
        rest -= corner[-1] * stride
    free = list(range(whole.ndim))
    dims: dict[int, int] = {}
    # Dims with one element have any stride: they take the dims that are left, those of one element first.
    for n in sorted(range(part.ndim), key=lambda n: part.shape[n] == 1):
        size, stride = part.shape[n], part.stride(n)
        fits = [d for d in free if whole.shape[d] >= corner[d] + size and (size == 1 or whole.stride(d) == stride)]
        fits.sort(key=lambda d: (whole.shape[d] == 1) != (size == 1))
        if not fits:
            raise _refused(name, f"a change of the shape of {show(key)}")
        dims[n] = fits[0]
        free.remove(fits[0])
    order = tuple(dims[n] for n in range(part.ndim))
    lengths = [1] * whole.ndim
    for n, dim in dims.items():
        lengths[dim] = part.shape[n]
    return _Region(key, tuple(map(int, corner)), tuple(lengths), order)


def _rule(key: str, shape: tuple[int, ...], parts: list[tuple[str, _Region]]) -> dict[str, object] | None:
    """The rule of a live tensor that is published as these parts."""
    first = parts[0][1]
    if any(one.dims != first.dims for _, one in parts) or len(first.dropped) > 1:
        raise _refused(parts[0][0], f"a split of {show(key)}")
    more: dict[str, object] = {}
    if first.order != sorted(first.order):
        more["transpose"] = first.order
    stacked = first.dropped[0] if first.dropped else None
    by_value: dict[int, list[tuple[str, _Region]]] = defaultdict(list)
    for name, one in parts:
        by_value[0 if stacked is None else one.corner[stacked]].append((name, one))
    moved = sorted({d for _, one in by_value[0] for d in range(len(shape)) if one.lengths[d] != shape[d]} - {stacked})
    if len(moved) > 1 or (not moved and len(by_value[0]) > 1):
        raise _refused(parts[0][0], f"a split of {show(key)}")
    if moved:
        for of_value in by_value.values():
            of_value.sort(key=lambda item: item[1].corner[moved[0]])
        corners = {tuple(one.corner[moved[0]] for _, one in of_value) for of_value in by_value.values()}
        sizes = [one.lengths[moved[0]] for _, one in by_value[0]]
        ends = [one.corner[moved[0]] + one.lengths[moved[0]] for _, one in by_value[0]]
        if len(corners) > 1 or [0, *ends] != [one.corner[moved[0]] for _, one in by_value[0]] + [shape[moved[0]]]:
            raise _refused(parts[0][0], f"a split of {show(key)}")
        more["join"] = moved[0]
        if len(set(sizes)) > 1:
            more["turns"] = sizes
    names = [name for name, _ in by_value[0]]
    if stacked is not None:
        if sorted(by_value) != list(range(shape[stacked])) or len({len(one) for one in by_value.values()}) > 1:
            raise _refused(parts[0][0], f"a split of {show(key)}")
        columns = [[by_value[e][n][0] for e in range(shape[stacked])] for n in range(len(names))]
        names = [_template(column, key) for column in columns]
        more["stack"] = {"e": stacked}
    if names == [key] and not more:
        return None
    return {"from": names if len(names) > 1 or more.keys() - {"transpose"} else names[0], "to": key, **more}


def _joined(whole: str, parts: list[_Region], dim: int, tensors: Sequence[torch.Tensor]) -> dict[str, object]:
    """The rule of a published tensor that is made of whole live ones."""
    order = list(parts[0].dims)
    if any(list(one.dims) != order for one in parts):
        raise _refused(whole, _CONCATENATE)
    rule: dict[str, object] = {"from": whole, "to": [one.key for one in parts], "join": dim}
    if order != sorted(order):
        rule["transpose"] = order
    sizes = [int(tensor.shape[dim]) for tensor in tensors]
    if len(set(sizes)) > 1:
        rule["turns"] = sizes
    return rule


def _template(names: list[str], key: str) -> str:
    """The name with the index `{e}` at the place where the names of the values count from 0."""
    words = [name.split(".") for name in names]
    for place in reversed(range(len(words[0]))):
        made = [".".join([*one[:place], "{e}", *one[place + 1 :]]) for one in words]
        if len(set(made)) == 1 and all(one[place] == str(n) for n, one in enumerate(words)):
            return made[0]
    raise _refused(names[0], f"a split of {show(key)} into names that do not count from 0")


def _check(names: NameMap, live: Mapping[str, torch.Tensor], published: Mapping[str, torch.Tensor], kind: str) -> None:
    """Check that the map leads from the published tensors to the live ones, and back."""
    for one, before, after in ((names, published, live), (names.reversed(), live, published)):
        expected = {key: tuple(tensor.shape) for key, tensor in after.items()}
        try:
            found = _shapes(one, {key: tuple(tensor.shape) for key, tensor in before.items()})
        except ReshardError as error:
            raise UnsupportedError(f"the published names of {kind}: {error.message}", hint=_HINT) from error
        wrong = sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
        if wrong:
            key = wrong[0]
            raise NamesError(
                f"the published names of {kind} do not fit: {show(key)} has shape {found.get(key)}, expected "
                f"{expected.get(key)}",
                key=key,
                hint=_HINT,
            )


def _refused(name: str, operation: str) -> UnsupportedError:
    return UnsupportedError(
        f"{show(name)} is published by {operation}, which a name map does not express", key=name, hint=_HINT
    )


def _shapes(names: NameMap, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {made.key: tuple(made.shape) for made in names.resolve(shapes)}
