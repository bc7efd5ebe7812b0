"""Parameters of cells by name, their values as numpy arrays, and the way back.

numpy has no bfloat16 and no 8-bit floats. MindSpore converts tensors of these dtypes only for some releases of numpy,
so they are passed as bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import mindspore
import numpy as np

from reshard import dtypes
from reshard.errors import ArgumentError, UnsupportedError
from reshard.values.words import show

if TYPE_CHECKING:
    from mindspore import Parameter, Tensor

_AS_BYTES = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


def named_parts(network: Any, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of the network, and those of the optimizer that the network does not have.

    Args:
        network: a Cell, or tensors by name.
        optimizer: a Cell, tensors by name, or None.

    Raises:
        ArgumentError: as `named`; or network and optimizer have different tensors of one name.

    Example:
        >>> from mindspore import nn
        >>> network = nn.Dense(2, 1, has_bias=False)
        >>> model, state = named_parts(network, nn.AdamWeightDecay(network.trainable_params()))
        >>> list(model), list(state)
        (['weight'], ['global_step', 'learning_rate', 'adam_m.weight', 'adam_v.weight'])
    """
    model, state = named(network), {} if optimizer is None else named(optimizer)
    for name in model.keys() & state.keys():
        if state[name] is not model[name]:
            raise ArgumentError(
                f"network and optimizer have different tensors named {show(name)}",
                key=name,
                hint="make the optimizer from the parameters of this network",
            )
    return model, {name: one for name, one in state.items() if name not in model}


def named(tree: Any) -> dict[str, Any]:
    """The parameters of a Cell by `Parameter.name`, or the tensors of a mapping.

    Raises:
        ArgumentError: two parameters of a Cell have the same name; an entry is not a tensor; it is neither a Cell nor a
            mapping.

    Example:
        >>> list(named(mindspore.nn.Dense(2, 1)))
        ['weight', 'bias']
    """
    if isinstance(tree, mindspore.nn.Cell):
        found: dict[str, Any] = {}
        for one in tree.get_parameters():
            if one.name in found:
                raise ArgumentError(
                    f"two parameters are named {show(one.name)}", key=one.name, hint="`cell.update_parameters_name()`"
                )
            found[one.name] = one
        return found
    if not isinstance(tree, Mapping):
        raise ArgumentError(f"expected a Cell or tensors by name, not a {type(tree).__name__}")
    for name, one in tree.items():
        if not isinstance(one, mindspore.Tensor | np.ndarray):
            raise ArgumentError(f"{show(str(name))} is of type {type(one).__name__}, expected a tensor", key=str(name))
    return dict(tree)


def as_array(tensor: Any) -> np.ndarray:
    """The value of a tensor of MindSpore as an array; an array is returned as it is.

    Raises:
        UnsupportedError: a safetensors file cannot hold the dtype.

    Example:
        >>> as_array(mindspore.Tensor([1.0, 2.0], mindspore.bfloat16))
        array([1, 2], dtype=bfloat16)
    """
    if isinstance(tensor, np.ndarray):
        return tensor
    dtype = name_of_dtype(tensor)
    if dtype in _AS_BYTES:
        return np.frombuffer(tensor.get_bytes(), dtypes.numpy_dtype(dtype)).reshape(tensor.shape)
    return np.asarray(tensor.asnumpy())


def as_tensor(array: np.ndarray) -> Tensor:
    """A tensor of MindSpore with the value of an array. The memory is copied.

    Raises:
        UnsupportedError: MindSpore has no such dtype.

    Example:
        >>> import ml_dtypes
        >>> as_tensor(np.ones(2, ml_dtypes.bfloat16)).dtype
        mindspore.bfloat16
    """
    return mindspore.Tensor(_value(array))


def as_parameter(array: np.ndarray, name: str) -> Parameter:
    """A new parameter of MindSpore with the value of an array. The memory is copied.

    Raises:
        UnsupportedError: MindSpore has no such dtype.

    Example:
        >>> as_parameter(np.ones(2), "w").name
        'w'
    """
    return mindspore.Parameter(_value(array), name=name)  # a Tensor of an 8-bit float is refused here


def name_of_dtype(tensor: Any) -> str:
    """The name of a tensor's dtype in the safetensors format.

    Raises:
        UnsupportedError: the format has no such dtype.

    Example:
        >>> name_of_dtype(mindspore.Tensor([1, 2], mindspore.float16))
        'F16'
    """
    return dtypes.name_of(tensor.dtype) if isinstance(tensor, np.ndarray) else dtypes.from_mindspore(str(tensor.dtype))


def check_alone(group: object) -> None:
    """Check that a process that is one of several was given a group.

    Raises:
        UnsupportedError: MindSpore runs in several processes, and `group` is None.

    Example:
        >>> check_alone(None)
    """
    n_ranks = mindspore.communication.get_group_size() if mindspore.communication.GlobalComm.INITED else 1
    if group is None and n_ranks > 1:
        raise UnsupportedError(
            f"MindSpore runs in {n_ranks} processes, and nothing connects them for the save or the load",
            hint="give `group=`: an object with `rank`, `world_size`, `barrier`, `gather` and `broadcast`, and "
            "`layout=` if parameters are sharded",
        )


def _value(array: np.ndarray) -> Any:
    """What the constructors of Tensor and Parameter take."""
    dtype = dtypes.name_of(array.dtype)
    if dtype in _AS_BYTES:
        return mindspore.Tensor.convert_bytes_to_tensor(
            array.tobytes(), array.shape, getattr(mindspore, _AS_BYTES[dtype])
        )
    dtypes.to_mindspore(dtype)  # raises for a dtype that MindSpore does not have
    return mindspore.Tensor(array)
