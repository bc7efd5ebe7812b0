"""A tensor that is made of other tensors, by `__tensor_flatten__`."""

from __future__ import annotations

from typing import Any, Self

import torch


class Made(torch.Tensor):
    """A tensor of several, `names`, with options; as the classes of torchao are."""

    names: tuple[str, ...]
    options: Any

    def __new__(cls, shape: Any, dtype: torch.dtype, options: Any = None, **inner: torch.Tensor) -> Self:
        del options, inner
        made: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        return made  # type: ignore[no-any-return]

    def __init__(self, shape: Any, dtype: torch.dtype, options: Any = None, **inner: torch.Tensor) -> None:
        del shape, dtype
        self.names, self.options = tuple(inner), options
        for name, tensor in inner.items():
            setattr(self, name, tensor)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.names), self.options

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.is_pinned.default:
            return False
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            one = args[0]
            return cls(one.shape, one.dtype, one.options, **{name: getattr(one, name) for name in one.names})
        raise NotImplementedError(func)


def quantised(value: int, options: Any = (1, 2)) -> Made:
    codes = torch.full((4, 4), value, dtype=torch.int8)
    return Made((4, 4), torch.float32, options, codes=codes, scale=torch.full((4,), float(value)))


def cast(value: float) -> Made:
    """A wrapper around a weight, with a value that is computed from it."""
    scale = torch.tensor(value)
    return Made((4, 4), torch.float32, "float8", weight=torch.full((4, 4), value), _precomputed_scale=scale)
