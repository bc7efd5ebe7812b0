"""A universal folder: each parameter's fp32 weights and optimizer state in files of their own.

From stage 3 the tensors are flat; then their shapes are in the copies of the model's files.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from reshard import _core
from reshard.errors import UnsupportedError
from reshard.formats.deepspeed import names
from reshard.formats.deepspeed.states import damaged
from reshard.formats.deepspeed.zero import WEIGHT
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.formats.deepspeed.module import Tensors
    from reshard.storage.location import Location

_SUFFIX = ".pt"
_STEP = "step"
_PARAM = "param"


def add_parameters(
    folder: Location,
    trained: Mapping[str, tuple[int, ...]],
    others: Mapping[str, tuple[int, ...]],
    tensors: Tensors,
    *,
    is_divided: bool,
) -> tuple[frozenset[str], Location | None]:
    """Add the tensors of all parameters, as `<name>.<slot>`.

    Args:
        folder: the universal folder.
        trained: shapes of the trained parameters: each must have a file `fp32.pt`.
        others: shapes of other parameters.
        tensors: to which they are added.
        is_divided: whether the shapes are those of one of several model-parallel ranks.

    Returns:
        The slots, and a file with the step of a parameter if there is one.

    Raises:
        DamagedFileError: a file is missing, or its size differs from the recorded shape.
        UnsupportedError: the shape of a flat tensor is not recorded.
    """
    zero = folder / names.ZERO_FOLDER
    found = [name for name in zero.names() if (zero / name).is_folder()]
    if not is_divided:
        for name in trained:
            if not (zero / name / f"{WEIGHT}{_SUFFIX}").is_file():
                raise damaged(zero / name, f"`{WEIGHT}{_SUFFIX}` is missing", "the conversion was not finished", name)
    slots: set[str] = set()
    step = None
    order = {name: number for number, name in enumerate([*trained, *others])}
    for name in sorted(found, key=lambda name: (order.get(name, len(order)), name)):
        files = [one for one in sorted((zero / name).names()) if one.endswith(_SUFFIX)]
        for slot in sorted((one.removesuffix(_SUFFIX) for one in files), key=lambda slot: (slot != WEIGHT, slot)):
            file = zero / name / f"{slot}{_SUFFIX}"
            if slot == _STEP:
                step = step or file
                continue
            slots.add(slot)
            shape = trained.get(name, others.get(name))
            _add(f"{name}.{slot}", file, None if is_divided else shape, tensors, is_divided=is_divided)
    return frozenset(slots), step


def _add(key: str, file: Location, shape: tuple[int, ...] | None, tensors: Tensors, *, is_divided: bool) -> None:
    stored, _ = _core.read_torch_file(str(file), follow_links=False)
    by_path = {path: (dtype, extent) for path, dtype, extent in stored}
    path = _PARAM if _PARAM in by_path else ""
    if path not in by_path:
        raise damaged(file, "it holds no tensor of a parameter", key=key)
    dtype, found = by_path[path]
    if is_divided and len(found) == 1:
        raise UnsupportedError(
            f"{show(str(file))}: whether its {found[0]} elements are the rows of a matrix is not stored for several "
            "model-parallel ranks",
            path=str(file),
            key=key,
        )
    if shape is None or found == shape:
        tensors.add_whole(key, file, path, (dtype, found))
    elif found == (math.prod(shape),):
        lines = _core.FlatLines.joined([(tensors.number(file), path, found[0])])
        tensors.index.add_flat(key, dtype, shape, lines, 0)
    else:
        raise damaged(file, f"it has the shape {found}, recorded is {shape}", "it is of another model", key)
