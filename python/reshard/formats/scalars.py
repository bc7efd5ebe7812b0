"""The counters of a training run as MindSpore keeps them beside the weights: tensors of one element.

A file of a rank in Checkpoint 1.0 and `hyper_param.safetensors` of full weights hold them under the names that
`common.json` gives them in 2.0. Neither format has a word for which tensors are the optimizer's; what its optimizers
put before a parameter's name tells.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from reshard.errors import ArgumentError, DamagedFileError
from reshard.formats.checkpoint2.common import CommonInfo
from reshard.layout.resolve import COUNTERS, OF_NO_PARAMETER
from reshard.words import show

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "NAMES",
    "OF_NO_PARAMETER",
    "arrays_of",
    "check_shape",
    "common_of",
    "is_counter",
    "is_state",
    "parameter_of",
]

NAMES = COUNTERS
"""Those that are counters."""

# What optimizers name their state of a parameter by: `adam_m.<parameter>`.
_SLOTS = frozenset(
    (
        *("adam_m", "adam_v", "muon_m", "moment1", "moment2", "moments", "vhat"),
        *("exp_avg", "exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_insta_row", "exp_avg_insta_col"),
        *("accum", "accu_grads", "mean_square", "mean_gradient"),
        # torch's
        *("step", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "exp_inf", "mu_product"),
    )
)


def is_state(key: str) -> bool:
    """Whether a tensor is state of an optimizer or a counter, by its name; everything else is the model's.

    Example:
        >>> [is_state(key) for key in ("adam_m.embed.weight", "global_step", "embed.weight")]
        [True, True, False]
    """
    slot, dot, _ = key.partition(".")
    return slot in _SLOTS if dot else key in OF_NO_PARAMETER


def is_counter(key: str) -> bool:
    """Whether a tensor is a counter, or state of the optimizer that belongs to no parameter.

    Example:
        >>> is_counter("global_step"), is_counter("adam_m.embed.weight")
        (True, False)
    """
    return key in OF_NO_PARAMETER


def parameter_of(key: str) -> tuple[str, str] | None:
    """The slot and the parameter of a tensor that is an optimizer's state of one; else None.

    Example:
        >>> parameter_of("adam_m.embed.weight")
        ('adam_m', 'embed.weight')
    """
    slot, dot, parameter = key.partition(".")
    return (slot, parameter) if dot and slot in _SLOTS else None


def check_shape(name: str, shape: tuple[int, ...], source: str) -> None:
    """Refuse a counter of several elements, in the file `source`.

    Raises:
        DamagedFileError: it has several, or none; the shapes `()` and `(1,)` are both met.
    """
    if math.prod(shape) != 1:
        raise DamagedFileError(
            f"{show(source)}: the counter `{name}` has shape {shape}, expected one element", path=source, key=name
        )


def common_of(arrays: Mapping[str, np.ndarray], source: str) -> CommonInfo:
    """The counters that tensors of one element tell; names that are no counters are passed over.

    Args:
        arrays: them, by name.
        source: what messages call the file.

    Raises:
        DamagedFileError: a counter has several elements, or is no such number.

    Example:
        >>> common_of({"step_num": np.array(40), "loss_scale": np.array([2.0], np.float32)}, "x").loss_scale
        2.0
    """
    values: dict[str, int | float] = {}
    for name in NAMES:
        array = arrays.get(name)
        if array is None:
            continue
        check_shape(name, array.shape, source)
        value = array.reshape(()).item()
        # A whole number is one, whatever it is stored as.
        values[name] = int(value) if name != "loss_scale" and isinstance(value, float) and value.is_integer() else value
    try:
        return CommonInfo(**values)  # type: ignore[arg-type]  # each value is checked there
    except ArgumentError as error:
        raise DamagedFileError(f"{show(source)}: {error.message}", path=source) from None


def arrays_of(common: CommonInfo) -> dict[str, np.ndarray]:
    """The counters that are known, as the original writes them into each rank's file.

    Example:
        >>> arrays_of(CommonInfo(step_num=7, global_step=7))
        {'step_num': array(7), 'global_step': array([7], dtype=int32)}
    """
    made: dict[str, np.ndarray] = {}
    for name in NAMES:
        value = getattr(common, name)
        if value is None:
            continue
        if name == "loss_scale":
            made[name] = np.array(value, np.float32)
        elif name == "global_step" and value < 1 << 31:
            made[name] = np.array([value], np.int32)
        else:
            made[name] = np.array(value, np.int64)
    return made
