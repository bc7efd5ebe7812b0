"""The counters of a training run that MindSpore stores beside the weights: tensors of one element.

The rank files of Checkpoint 1.0 and `hyper_param.safetensors` of full weights hold them, under the names that
`common.json` uses in Checkpoint 2.0. Neither format records which tensors belong to the optimizer. They are recognised
by the prefixes that optimizers put before the name of a parameter.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from reshard.errors import ArgumentError, DamagedFileError, UnsupportedError
from reshard.values.counters import COUNTERS, OF_NO_PARAMETER
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reshard.documents.common_info import CommonInfo

NAMES = COUNTERS
"""Names of the counters."""

# Prefixes of optimizer state: `adam_m.<parameter>`.
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
    """Whether a tensor is optimizer state or a counter, by its name. All other tensors belong to the model.

    Example:
        >>> [is_state(key) for key in ("adam_m.embed.weight", "global_step", "embed.weight")]
        [True, True, False]
    """
    slot, dot, _ = key.partition(".")
    return slot in _SLOTS if dot else key in OF_NO_PARAMETER


def holds_optimizer(keys: Iterable[str]) -> bool:
    """Whether some of these are optimizer state other than counters, by their names.

    Example:
        >>> holds_optimizer(["global_step", "embed.weight"]), holds_optimizer(["adam_m.embed.weight"])
        (False, True)
    """
    return any(is_state(key) and key not in NAMES for key in keys)


def is_counter(key: str) -> bool:
    """Whether a tensor is a counter, or optimizer state that belongs to no parameter.

    Example:
        >>> is_counter("global_step"), is_counter("adam_m.embed.weight")
        (True, False)
    """
    return key in OF_NO_PARAMETER


def parameter_of(key: str) -> tuple[str, str] | None:
    """The slot and the parameter of a tensor that is optimizer state of a parameter; else None.

    Example:
        >>> parameter_of("adam_m.embed.weight")
        ('adam_m', 'embed.weight')
    """
    slot, dot, parameter = key.partition(".")
    return (slot, parameter) if dot and slot in _SLOTS else None


def check_shape(name: str, shape: tuple[int, ...], source: str) -> None:
    """Refuse a counter that does not have exactly one element. The shapes `()` and `(1,)` both occur.

    Args:
        name: name of the counter.
        shape: its shape, in elements.
        source: the file, for messages.

    Raises:
        DamagedFileError: it has several elements, or none.
    """
    if math.prod(shape) != 1:
        raise DamagedFileError(
            f"{show(source)}: the counter `{name}` has shape {shape}, expected one element", path=source, key=name
        )


def common_of(arrays: Mapping[str, np.ndarray], source: str) -> CommonInfo:
    """The counters from tensors of one element. Other names are ignored.

    Args:
        arrays: the tensors by name.
        source: the file, for messages.

    Raises:
        DamagedFileError: a counter has several elements, or an invalid value.

    Example:
        >>> common_of({"step_num": np.array(40), "loss_scale": np.array([2.0], np.float32)}, "x").loss_scale
        2.0
    """
    for name in NAMES:
        if name in arrays:
            check_shape(name, arrays[name].shape, source)
    try:
        return _info(arrays)
    except ArgumentError as error:
        raise DamagedFileError(f"{show(source)}: {error.message}", path=source) from None


def _info(arrays: Mapping[str, np.ndarray]) -> CommonInfo:
    from reshard.documents.common_info import CommonInfo  # noqa: PLC0415  slow to import

    values: dict[str, int | float] = {}
    for name in NAMES:
        array = arrays.get(name)
        if array is None:
            continue
        value = array.reshape(()).item()
        # A counter may be stored as a float.
        values[name] = int(value) if name != "loss_scale" and isinstance(value, float) and value.is_integer() else value
    return CommonInfo(**values)  # type: ignore[arg-type]  # each value is checked there


def check_names(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse to write tensors that have the name of a counter, and are none: they could not be read again.

    Args:
        shapes: the shape of each tensor by name, in elements.

    Raises:
        UnsupportedError: one has several elements, or none.
    """
    for name in NAMES:
        if math.prod(shapes.get(name, ())) != 1:
            raise UnsupportedError(
                f"{show(name)} has the shape {shapes[name]}, but is the name of a counter, which has one element",
                key=name,
                hint="rename the tensor",
            )


def check_values(counters: Mapping[str, np.ndarray]) -> None:
    """Refuse to write counters that could not be read again.

    Args:
        counters: tensors of one element by name; other names are ignored.

    Raises:
        UnsupportedError: one has a value that a counter cannot have.
    """
    try:
        _info(counters)
    except ArgumentError as error:
        raise UnsupportedError(
            f"the tensor has the name of a counter: {error.message}",
            key=error.key,
            hint="rename the tensor, or leave it out; `convert` has `select=` for both",
        ) from None


def arrays_of(common: CommonInfo) -> dict[str, np.ndarray]:
    """The counters that are not None, in the dtypes and shapes that MindSpore Transformers writes.

    Example:
        >>> import reshard
        >>> arrays_of(reshard.CommonInfo(step_num=7, global_step=7))
        {'step_num': array(7), 'global_step': array([7], dtype=int32)}
    """
    arrays: dict[str, np.ndarray] = {}
    for name in NAMES:
        value = getattr(common, name)
        if value is None:
            continue
        if name == "loss_scale":
            arrays[name] = np.array(value, np.float32)
        elif name == "global_step" and value < 1 << 31:
            arrays[name] = np.array([value], np.int32)
        else:
            arrays[name] = np.array(value, np.int64)
    return arrays
