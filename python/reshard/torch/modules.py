"""The tensors of modules by key, with the names used in a checkpoint.

A key is the path of a parameter or buffer through the modules, without wrappers such as DDP, `torch.compile` and
activation checkpointing. The key of a tied tensor is its first name; its other names are aliases. This module does not
know how tensors are distributed over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from reshard.errors import ArgumentError, UnsupportedError
from reshard.words import show

if TYPE_CHECKING:
    from collections.abc import Iterator

# Attribute names under which wrappers keep the wrapped module, and which nothing else uses.
_TRANSPARENT = {"_orig_mod", "_checkpoint_wrapped_module"}


@dataclass(frozen=True, eq=False)
class Named:
    """The tensors of a model, or of several parts of one.

    Attributes:
        tensors: parameters and persistent buffers by key, each once; the tensors of the model, not copies.
        buffers: keys of the buffers.
        received: keys of the buffers that DDP overwrites with those of another rank before the next forward pass
            (`broadcast_buffers`).
        aliases: other names of tensors, and the key of each.
        transient: `(module, name in the module)` of each non-persistent buffer; no checkpoint holds these.
        extra_state: modules that override `get_extra_state`, by name.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)
    transient: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)
    extra_state: dict[str, nn.Module] = field(default_factory=dict)


def named(model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]) -> Named:
    """The tensors of a model by key.

    Args:
        model: a module, or several modules whose names differ, such as the pipeline chunks of one rank; or a mapping:
            the names of each module begin with its key.

    Raises:
        ArgumentError: two different tensors have the same name.
        UnsupportedError: a module is wrapped in FSDP1 (`FullyShardedDataParallel`), or a parameter is not initialised
            yet.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
        >>> model[1].weight = model[0].weight
        >>> found = named(model)
        >>> list(found.tensors), found.aliases
        (['0.weight', '1.bias'], {'1.weight': '0.weight'})
    """
    found = Named()
    key_of: dict[int, str] = {}
    received: set[int] = set()
    if isinstance(model, Mapping) and model:
        roots: list[tuple[str, Any]] = [(f"{name}.", one) for name, one in model.items()]
    else:
        roots = [("", one) for one in (model if isinstance(model, Sequence) else [model])]
    for start, root in roots:
        if not isinstance(root, nn.Module):
            is_state = isinstance(root, torch.Tensor)
            raise ArgumentError(
                f"`model` {'has' if start else 'is'} a {type(root).__name__}, expected a torch.nn.Module or several",
                hint="pass the model itself, not its `state_dict()`" if is_state else None,
            )
        for prefix, module in _walk(root, start):
            _refuse_first_fsdp(module, prefix)
            received |= _received(module)
            if _is_a(module, "FSDPModule", "torch.distributed.fsdp"):
                module.reshard()  # type: ignore[operator]  # as `state_dict()` does: registers the sharded parameters
            for name, tensor in _own(module):
                key = prefix + name
                if name in module._non_persistent_buffers_set:  # noqa: SLF001  there is no other way to know
                    found.transient[key] = (module, name)
                    continue
                if nn.parameter.is_lazy(tensor):
                    raise UnsupportedError(
                        f"{show(key)} is not initialised yet", key=key, hint="run a batch through the model first"
                    )
                first = key_of.setdefault(id(tensor), key)
                if first != key:
                    found.aliases[key] = first
                elif key in found.tensors and found.tensors[key] is not tensor:
                    raise ArgumentError(
                        f"two tensors of the model are named {show(key)}",
                        key=key,
                        hint="in each part use the names of the whole model",
                    )
                found.tensors[first] = tensor
                if name in module._buffers:  # noqa: SLF001
                    found.buffers.add(first)
                    if id(tensor) in received:
                        found.received.add(first)
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                found.extra_state[prefix.removesuffix(".")] = module
    return found


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Every module under each of its names, with its prefix."""
    yield prefix, module
    is_replicated = isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)
    for name, child in module._modules.items():  # noqa: SLF001  `named_children` skips repeated modules
        if child is not None:
            is_transparent = name in _TRANSPARENT or (is_replicated and name == "module")
            yield from _walk(child, prefix if is_transparent else f"{prefix}{name}.")


def _received(module: nn.Module) -> set[int]:
    """`id` of the buffers that this rank receives from the first rank of the DDP group before each forward pass."""
    if not isinstance(module, nn.parallel.DistributedDataParallel) or not module.will_sync_module_buffers():  # type: ignore[no-untyped-call]
        return set()
    is_first = torch.distributed.get_rank(module.process_group) == 0
    return set() if is_first else {id(buffer) for buffer in module.modules_buffers}


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for of_module in (module._parameters, module._buffers):  # noqa: SLF001  both may hold None
        for name, tensor in of_module.items():
            if tensor is not None:
                yield name, tensor


def _is_a(module: nn.Module, name: str, package: str) -> bool:
    """Whether the module is an instance of a class, by name: importing the class would be slow."""
    return any(kind.__name__ == name and kind.__module__.startswith(package) for kind in type(module).__mro__)


def _refuse_first_fsdp(module: nn.Module, prefix: str) -> None:
    if _is_a(module, "FullyShardedDataParallel", "torch.distributed.fsdp"):
        raise UnsupportedError(
            f"{show(prefix.removesuffix('.') or 'the model')} is wrapped in FullyShardedDataParallel (FSDP1), whose "
            "flat parameters have no names",
            hint="use `torch.distributed.fsdp.fully_shard` (FSDP2); or save and load with `reshard.save` and "
            "`reshard.load` and a layout with `flat`",
        )
