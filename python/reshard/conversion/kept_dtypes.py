"""Which tensors a cast leaves as they are, and which casts are refused.

Libraries keep some tensors in float32 in a model of another dtype, such as the bias of a router: cast to bfloat16, 256
of its values become a handful. The library that owns the model is asked. Without it, known endings of names are kept,
with a warning. The scales beside packed integers belong to one quantised weight and are never cast apart from it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reshard.conversion.library_model import kept_in_float32
from reshard.errors import UnsupportedError
from reshard.names.model import config_beside
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.storage.location import Location

_NARROW = ("F16", "BF16")
_INTEGERS = ("I8", "U8", "I32", "U32")
_PACKED = re.compile(r"(?:.*weight.*|.*_blocks|codes)")
# Names of tensors that libraries and published models keep in float32.
_KNOWN = re.compile(r"(?:^|\.)(?:e_score_correction_bias|expert_bias|A_log|dt_bias)$")
_MOST = 5  # names in one message


def kept_by_cast(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    dtype: str,
    folder: Location | None,
    *,
    is_dequantised: bool = False,
) -> tuple[list[str], list[str]]:
    """The float32 tensors that stay float32 in a cast.

    Args:
        tensors: dtype and shape of each tensor by its name in the destination.
        dtype: the dtype of the cast.
        folder: the folder of the model's config.json; None: there is none.
        is_dequantised: whether config.json says that the weights are quantised, and they no longer are.

    Returns:
        Their names, and warnings.

    Raises:
        UnsupportedError: there are floating-point tensors beside packed integers, such as the scales of quantised
            weights.

    Example:
        >>> kept, warnings = kept_by_cast({"a.A_log": ("F32", (4,)), "a.w": ("F32", (4, 4))}, "BF16", None)
        >>> kept, warnings[0].partition(",")[0]
        (['a.A_log'], '`a.A_log` stays float32')
    """
    _refuse_scales(tensors, dtype)
    wide = [name for name, (stored, _) in tensors.items() if stored == "F32"]
    if dtype not in _NARROW or not wide:
        return [], []
    found = (
        None
        if folder is None or config_beside(folder) is None
        else kept_in_float32(folder, wide, dtype, is_dequantised=is_dequantised)
    )
    if found is not None:
        return sorted(found), []
    known = sorted(name for name in wide if _KNOWN.search(name))
    if not known:
        return [], []
    names = listed(map(show, known), _MOST)
    stay = "stays" if len(known) == 1 else "stay"
    return known, [f"{names} {stay} float32, as models with such names keep them; `dtype_all=True` casts all"]


def _refuse_scales(tensors: Mapping[str, tuple[str, tuple[int, ...]]], dtype: str) -> None:
    packed: dict[str, str] = {}
    for name, (stored, shape) in tensors.items():
        module, _, last = name.rpartition(".")
        if stored in _INTEGERS and shape and _PACKED.fullmatch(last):
            packed.setdefault(module, name)
    for name, (stored, _) in tensors.items() if packed else ():
        parts = name.split(".")
        owner = next((one for n in range(len(parts)) if (one := packed.get(".".join(parts[:n])))), None)
        if owner is None or stored in _INTEGERS or not stored.startswith(("F", "BF")) or stored == dtype:
            continue
        if parts[-1] != "bias":
            raise UnsupportedError(
                f"{show(name)} ({stored}) lies beside the packed integers {show(owner)} of a quantised weight: a cast "
                f"to {dtype} would change its values alone",
                key=name,
                hint="leave `dtype=` out; or dequantise the model with the library that wrote it first",
            )
