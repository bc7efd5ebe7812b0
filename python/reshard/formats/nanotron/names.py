"""Names of the files of nanotron, and what the metadata of a file says of its tensor.

```text
checkpoint_metadata.json                  version, sizes of the axes, steps
model/<module>/<module>/model_<name>.safetensors                                             a whole parameter
model/<module>/<module>/model_<name>_pp-rank-<P>-of-<N>_tp-rank-<T>-of-<M>.safetensors       the shard of a rank
optimizer/, lr_scheduler/, random/        files of `torch.save` of each rank
```

A later version repeats the beginning and the end: `model_model_<name>.safetensors_pp-rank-...`, and divides experts:
`..._exp-rank-<E>-of-<N>`. A file holds one tensor, `data`. The metadata of a shard has the shape of the whole tensor,
and pairs of slices: which elements of the shard are which of the whole tensor.

Source: `nanotron/serialize/weights.py`, `utils.py`, `metadata.py` and `parallel/parameters.py` of nanotron 0.4 and of
https://github.com/huggingface/nanotron/tree/03b83fc825418ac4f22d2fcea41514cdba6cedb9.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from reshard.values.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

TRAITS = Traits("nanotron", is_pretrained=True)

METADATA_FILE = "checkpoint_metadata.json"
MODEL_FOLDER = "model"
TENSOR = "data"
FLAGS = frozenset({TENSOR, "_no_weight_decay"})
"""The tensors of a file: that of the parameter, and a setting of its optimizer."""

NEWEST_VERSION = (1, 4)

_NUMBERS = r"-rank-(0|[1-9][0-9]{0,6})-of-([1-9][0-9]{0,6})"
_FILE = re.compile(rf"model_(?P<name>[^/]+?)(?:_pp{_NUMBERS}_tp{_NUMBERS}(?:_exp{_NUMBERS})?)?\.safetensors", re.DOTALL)
_REPEATED = re.compile(r"model_(.+)\.safetensors", re.DOTALL)
_VERSION = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})(?:\.[0-9]{1,4})?")
_SIZE = re.compile(r"([0-9]{1,18})|np\.int(?:32|64)\(([0-9]{1,18})\)", re.ASCII)
_MOST_DIMS = 16
_MOST_PAIRS = 1 << 16


class Place(NamedTuple):
    """Which rank of which mesh holds a shard.

    Attributes:
        rank: its coordinates on the axes pp, tp and ep.
        sizes: the sizes of the axes.
    """

    rank: tuple[int, int, int]
    sizes: tuple[int, int, int]


class StoredRegion(NamedTuple):
    """A part of a shard and the same part of the whole tensor.

    Attributes:
        local: the first element in the shard.
        offset: the first element in the whole tensor.
        shape: the number of elements in each dim.
    """

    local: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def parse_file(name: str) -> tuple[str, Place | None] | None:
    """The parameter in the name of a file and the rank of a shard; None: it is called otherwise.

    Example:
        >>> parse_file("model_weight.safetensors")
        ('weight', None)
        >>> parse_file("model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors")
        ('weight', Place(rank=(0, 1, 0), sizes=(1, 2, 1)))
        >>> parse_file("model_model_weight.safetensors.safetensors")
        ('weight', None)
    """
    found = _FILE.fullmatch(name)
    if found is None:
        return None
    repeated = _REPEATED.fullmatch(found["name"])
    parameter = found["name"] if repeated is None else repeated[1]
    _, *numbers = found.groups()
    if numbers[0] is None:
        return parameter, None
    pp, n_pp, tp, n_tp, ep, n_ep = (1 if n is None else int(n) for n in numbers)
    return parameter, Place((pp, tp, 0 if numbers[4] is None else ep), (n_pp, n_tp, n_ep))


def parse_version(text: object) -> tuple[int, int] | None:
    """The version of a checkpoint; None: it is no version.

    Example:
        >>> parse_version("1.2"), parse_version("new")
        ((1, 2), None)
    """
    found = _VERSION.fullmatch(text) if isinstance(text, str) else None
    return None if found is None else (int(found[1]), int(found[2]))


def parse_shape(text: object) -> tuple[int, ...] | None:
    """The shape in the metadata of a shard; None: it is no shape.

    Example:
        >>> parse_shape("(16, 6)"), parse_shape("(np.int64(16),)"), parse_shape("(16, x)")
        ((16, 6), (16,), None)
    """
    if not isinstance(text, str) or len(text) > 1024 or not (text.startswith("(") and text.endswith(")")):
        return None
    sizes = [part.strip() for part in text[1:-1].split(",")]
    if sizes[-1] == "":
        sizes.pop()
    found = [_SIZE.fullmatch(size) for size in sizes]
    if len(found) > _MOST_DIMS or None in found:
        return None
    return tuple(int(size[1] or size[2]) for size in found if size is not None)


def parse_slices(text: object, local: Sequence[int], shape: Sequence[int]) -> list[StoredRegion] | None:
    """The pairs of slices in the metadata of a shard; None: they are no slices of these shapes.

    Args:
        text: as nanotron writes it: `start,stop,step` of each dim, dims divided by `|`, both sides of a pair by `#`,
            and pairs by `;`.
        local: the shape of the shard.
        shape: the shape of the whole tensor.

    Example:
        >>> parse_slices("None,None,None|None,None,None#4,8,None|None,None,None", (4, 3), (8, 3))
        [StoredRegion(local=(0, 0), offset=(4, 0), shape=(4, 3))]
    """
    if not isinstance(text, str) or text.count(";") >= _MOST_PAIRS:
        return None
    regions = []
    for pair in text.split(";"):
        sides = pair.split("#")
        if len(sides) != 2:
            return None
        first, second = (_side(side, sizes) for side, sizes in zip(sides, (local, shape), strict=True))
        if first is None or second is None or first[1] != second[1]:
            return None
        regions.append(StoredRegion(first[0], second[0], first[1]))
    return regions


def _side(text: str, sizes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The first elements and the extents of the slices of all dims."""
    slices = text.split("|")
    if len(slices) != len(sizes):
        return None
    starts, extents = [], []
    for one, size in zip(slices, sizes, strict=True):
        parts = one.split(",")
        if len(parts) != 3 or parts[2] not in ("None", "1"):
            return None
        bounds = [default if part == "None" else _bound(part) for part, default in zip(parts, (0, size), strict=False)]
        start, stop = bounds
        if start is None or stop is None or not 0 <= start <= stop <= size:
            return None
        starts.append(start)
        extents.append(stop - start)
    return tuple(starts), tuple(extents)


def _bound(text: str) -> int | None:
    found = _SIZE.fullmatch(text)
    return None if found is None else int(found[1] or found[2])
