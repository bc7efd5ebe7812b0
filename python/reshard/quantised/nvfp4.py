"""The two forms of NVFP4, of compressed-tensors and of modelopt: the same bytes under other names.

The global scale of one form is the reciprocal of that of the other: compressed-tensors computes `2688 / amax`, and
modelopt `amax / 2688`, in float32, where 2688 is 6 x 448. The largest magnitude `amax` of a weight of 16 bits is found
again from either, so that both are what their library computes, and a conversion back gives the same bytes. Where no
such value is found, the reciprocal in float32 is taken if it gives the same bytes back, and else it is refused.

Source: `generate_gparam` in `compressed_tensors/quantization/utils/helpers.py` of
https://github.com/vllm-project/compressed-tensors; `get_weights_scaling_factor_2_from_quantizer` in
`modelopt/torch/quantization/qtensor/nvfp4_tensor.py` of https://github.com/NVIDIA/Model-Optimizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from reshard.errors import MismatchError, UnsupportedError
from reshard.quantised.kinds import KINDS
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from reshard import _core
    from reshard.quantised.config import Said
    from reshard.quantised.kinds import Quantised

COMPRESSED, MODELOPT = "nvfp4", "nvfp4-modelopt"
FORMS = (COMPRESSED, MODELOPT)
"""The two forms, by their kinds."""

_MOST = np.float32(6 * 448)
_NARROW = (ml_dtypes.bfloat16, np.float16)
_NAMES = {
    "weight": {COMPRESSED: "weight_packed", MODELOPT: "weight"},
    "scale": {COMPRESSED: "weight_scale", MODELOPT: "weight_scale"},
    "global": {COMPRESSED: "weight_global_scale", MODELOPT: "weight_scale_2"},
    "input": {COMPRESSED: "input_global_scale", MODELOPT: "input_scale"},
}
_ROLES = {"input_scale": "input", "input_global_scale": "input"}
_SHAPES: Mapping[str, tuple[int, ...]] = {COMPRESSED: (1,), MODELOPT: ()}
_IGNORED = ("ignore", "exclude_modules", "modules_to_not_convert")
_WEIGHTS = {"num_bits": 4, "type": "float", "group_size": 16}


def reciprocal(value: np.float32, form: str) -> np.float32 | None:
    """The scale of the other form; None: none gives the same bytes back.

    Args:
        value: a global scale.
        form: its form, one of `FORMS`.

    Example:
        >>> reciprocal(np.float32(896), "nvfp4"), reciprocal(np.float32(3 / 2688), "nvfp4-modelopt")
        (np.float32(0.0011160715), np.float32(896.0))
    """
    back = MODELOPT if form == COMPRESSED else COMPRESSED
    other = _other(value, form)
    return other if other is not None and _other(other, back) == value else None


def _other(value: np.float32, form: str) -> np.float32 | None:
    with np.errstate(all="ignore"):
        if not (np.isfinite(value) and value > 0):
            return None
        found = np.float32(1) / value
        for narrow in _NARROW:
            amax = (_MOST / value if form == COMPRESSED else value * _MOST).astype(narrow).astype(np.float32)
            if amax > 0 and np.isfinite(amax):
                both = {COMPRESSED: np.float32(_MOST / amax), MODELOPT: np.float32(amax / _MOST)}
                if both[form] == value:
                    found = both[MODELOPT if form == COMPRESSED else COMPRESSED]
                    break
        return found if found > 0 and np.isfinite(found) else None


class Renamed:
    """A quantised weight in the other form.

    Attributes:
        moved: the new name of each part whose bytes stay.
        scales: the new name, the shape and the value of each scale that changes, by its old name.
    """

    def __init__(self) -> None:
        self.moved: dict[str, str] = {}
        self.scales: dict[str, tuple[str, tuple[int, ...], float]] = {}


def in_form(
    weights: Iterable[Quantised], form: str, index: _core.Index, read: Callable[[str], np.ndarray[Any, Any]]
) -> Renamed:
    """The parts of quantised weights in a form.

    Args:
        weights: all quantised weights of a model. Those of the form stay.
        form: "nvfp4" for that of compressed-tensors, or "nvfp4-modelopt".
        index: the index with the parts.
        read: reads one of them.

    Raises:
        UnsupportedError: a weight is of another kind, or a scale has no reciprocal.
        MismatchError: a part would have the name of another tensor.
    """
    made = Renamed()
    for one in weights:
        if one.kind == form:
            continue
        if one.kind not in FORMS:
            raise UnsupportedError(
                f"{show(one.name)} is quantised otherwise ({KINDS[one.kind].title}): a model in which other weights "
                "are NVFP4 is not converted to the other form",
                key=one.name,
                hint='`dtype="bfloat16"` makes ordinary tensors of all',
            )
        if one.values["block"] != _WEIGHTS["group_size"]:
            raise UnsupportedError(
                f"{show(one.name)} has blocks of {one.values['block']} values, which only modelopt writes", key=one.name
            )
        module = one.name.removesuffix(".weight")
        for role, key in one.parts.items():
            what = _ROLES.get(role, role)
            new = f"{module}.{_NAMES[what][form]}" if what in _NAMES and module != one.name else None
            if new is None:
                raise UnsupportedError(
                    f"{show(key)}, the {role} of {show(one.name)}, has no name in the form {show(form)}", key=key
                )
            if what in ("weight", "scale"):
                made.moved[key] = new
                continue
            value = np.asarray(read(key), np.float32).reshape(-1)
            other = reciprocal(value[0], one.kind) if value.size == 1 else None
            if other is None:
                raise UnsupportedError(
                    f"{show(key)}, the {role} scale of {show(one.name)}, is {value.tolist()[:4]}: no float32 value is "
                    "the reciprocal of which it is the reciprocal",
                    key=key,
                    hint='`dtype="bfloat16"` makes ordinary tensors',
                )
            made.scales[key] = (new, _SHAPES[form], float(other))
    old = {*made.moved, *made.scales}
    for key, new in (*made.moved.items(), *((key, scale[0]) for key, scale in made.scales.items())):
        if new != key and new in index and new not in old:
            raise MismatchError(f"{show(key)} would have the name of another tensor, {show(new)}", key=key)
    return made


def entry(of: Said, form: str, *, has_input: bool) -> dict[str, Any]:
    """`quantization_config` of a model in a form.

    Args:
        of: what the files of the source say.
        form: the form.
        has_input: whether there are scales of activations.

    Raises:
        UnsupportedError: they say more than the form of all weights, which has no other name here.
    """
    values = of.values
    for name in ("kv_cache_scheme", "kv_cache_quant_algo"):
        if values.get(name):
            raise UnsupportedError(
                f"{show(str(of.path))} has {show(name)}, which is not converted to another form", path=of.path
            )
    if form == MODELOPT and not has_input:
        raise UnsupportedError(
            f"{show(str(of.path))}: modelopt has scales of activations for NVFP4, and this model has none",
            path=of.path,
        )
    ignored = [module for name in _IGNORED if isinstance(values.get(name), list) for module in values[name]]
    if form == MODELOPT:
        group: dict[str, Any] = {"input_activations": {**_WEIGHTS, "dynamic": False}}
        group |= {"weights": {**_WEIGHTS, "dynamic": False}, "targets": ["Linear"]}
        return {
            "config_groups": {"group_0": group},
            "ignore": ignored,
            "quant_algo": "NVFP4",
            "quant_method": "modelopt",
        }
    scheme = {**_WEIGHTS, "strategy": "tensor_group", "symmetric": True}
    group = {
        "format": "nvfp4-pack-quantized",
        "input_activations": {**scheme, "dynamic": "local"} if has_input else None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {**scheme, "dynamic": False},
    }
    return {
        "config_groups": {"group_0": group},
        "format": "nvfp4-pack-quantized",
        "ignore": ignored,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
