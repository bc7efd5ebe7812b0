"""The state of modules by key, with the names used in a checkpoint.

A key is the path of a parameter or buffer through the modules, without wrappers such as DDP, `torch.compile` and
activation checkpointing. The key of a tied tensor is its first name; its other names are aliases.

A module can add entries of its own to its `state_dict()`, by overriding a method or by a hook: the scales of quantized
weights, the state of a metric. Their tensors have the names that `state_dict()` gives them, and are restored by
`load_state_dict()` of the model. Modules without such code are not asked: parameters and buffers are all they have.

This module does not know how tensors are distributed over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from reshard.errors import ArgumentError, UnsupportedError
from reshard.torch.tensors import inner_tensors, is_wrapper
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Iterator

CONSTANTS = "constants"
"""The name of the options of modules in the saved state of a trainer."""

FROZEN = "frozen"
"""The name of the frozen parameters there: those that were so `always`, only when it `started`, or only `now`."""

# Attribute names under which wrappers keep the wrapped module, and which nothing else uses.
_TRANSPARENT = {"_orig_mod", "_checkpoint_wrapped_module"}


@dataclass(frozen=True, eq=False)
class OwnEntries:
    """Entries that modules of a model add to its `state_dict()`.

    Attributes:
        root: the model without wrappers.
        key_of: the key of each entry, by its name in `state_dict()`.
    """

    root: nn.Module
    key_of: dict[str, str]


@dataclass(frozen=True, eq=False)
class Named:
    """The tensors of a model, or of several parts of one.

    Attributes:
        tensors: parameters and persistent buffers by key, each once; the tensors of the model, not copies.
        buffers: keys of the buffers.
        frozen: keys of the parameters for which no gradient is computed, and of the tensors that such a one is made of.
        received: keys of the buffers that DDP overwrites with those of another rank before the next forward pass
            (`broadcast_buffers`).
        aliases: other names of tensors, and the key of each.
        transient: `(module, name in the module)` of each non-persistent buffer; no checkpoint holds these.
        extra_state: modules that override `get_extra_state`, by name.
        wrappers: parameters and buffers that are made of other tensors, by `id`, and the key of each. The inner tensors
            are in `tensors`.
        wrapped: what each of those besides is that has several inner tensors, as text by key: `<key>.<name>` are their
            keys.
        constants: class and options of each module that has none inside, as it prints itself, by name; and which
            adapters each layer of peft uses.
        own: the entries that modules add to `state_dict()`. Their tensors are also in `tensors` and `buffers`.
        own_values: those of these entries that are no tensors, by key.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    frozen: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)
    transient: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)
    extra_state: dict[str, nn.Module] = field(default_factory=dict)
    wrappers: dict[int, str] = field(default_factory=dict)
    wrapped: dict[str, str] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)
    own: list[OwnEntries] = field(default_factory=list)
    own_values: dict[str, Any] = field(default_factory=dict)


def named(model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]) -> Named:
    """The tensors of a model by key.

    Args:
        model: a module, or several modules whose names differ, such as the pipeline chunks of one rank; or a mapping:
            the names of each module begin with its key.

    Raises:
        ArgumentError: two different tensors have the same name.
        UnsupportedError: a module is wrapped in FSDP1 (`FullyShardedDataParallel`), a parameter is not initialised
            yet, or adapters of peft are merged into a weight.

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
    for start, root in _roots(model):
        if not isinstance(root, nn.Module):
            is_state = isinstance(root, torch.Tensor)
            raise ArgumentError(
                f"`model` {'has' if start else 'is'} a {type(root).__name__}, expected a torch.nn.Module or several",
                hint="pass the model itself, not its `state_dict()`" if is_state else None,
            )
        adds_entries = False
        for prefix, module in _walk(root, start):
            adds_entries = adds_entries or _adds_entries(module)
            if not module._modules:  # noqa: SLF001
                found.constants[prefix.removesuffix(".")] = _printed(module)
            elif _is_a(module, "BaseTunerLayer", "peft"):
                found.constants[prefix.removesuffix(".")] = _adapters(module, prefix)
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
                is_frozen = name in module._parameters and not tensor.requires_grad  # noqa: SLF001
                if is_wrapper(tensor):
                    before = set(found.tensors)
                    _add_wrapper(found, tensor, first, key, is_buffer=name in module._buffers)  # noqa: SLF001
                    found.frozen.update(found.tensors.keys() - before if is_frozen else ())
                    continue
                if first != key:
                    found.aliases[key] = first
                elif key in found.tensors and found.tensors[key] is not tensor:
                    raise ArgumentError(
                        f"two tensors of the model are named {show(key)}",
                        key=key,
                        hint="in each part use the names of the whole model",
                    )
                found.tensors[first] = tensor
                if is_frozen:
                    found.frozen.add(first)
                if name in module._buffers:  # noqa: SLF001
                    found.buffers.add(first)
                    if id(tensor) in received:
                        found.received.add(first)
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                found.extra_state[prefix.removesuffix(".")] = module
        if adds_entries:
            _add_own_entries(found, root, start)
    return found


def frozen_names(model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]) -> frozenset[str]:
    """The keys of parameters for which no gradient is computed, also of a model that is not initialised yet.

    Example:
        >>> sorted(frozen_names(nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))))
        ['0.bias', '0.weight']
    """
    key_of: dict[int, str] = {}
    found: set[str] = set()
    for start, root in _roots(model):
        for prefix, module in _walk(root, start):
            for name, parameter in module._parameters.items():  # noqa: SLF001  `named_parameters` skips repeated ones
                if parameter is not None and not parameter.requires_grad:
                    found.add(key_of.setdefault(id(parameter), prefix + name))
    return frozenset(found)


def unloaded(root: nn.Module, state: Mapping[str, Any]) -> tuple[frozenset[str], str | None]:
    """Load entries of a `state_dict()` into a model, and ask which of them it does not load.

    Args:
        root: the model without wrappers.
        state: some or all of its entries.

    Returns:
        The names of the entries that the model reports as unexpected; and the error, if it raised one.

    Example:
        >>> unloaded(nn.Linear(2, 1, bias=False), {"weight": torch.ones(1, 2), "scale": torch.ones(1)})
        (frozenset({'scale'}), None)
    """
    load: Any = root.load_state_dict
    try:
        try:
            result = load(dict(state), strict=False)
        except TypeError:  # an overridden method without this argument
            result = load(dict(state))
    except Exception as error:  # noqa: BLE001  of code of the user's, whatever its class
        return frozenset(), f"{type(error).__name__}: {' '.join(str(error).split())}"
    return frozenset(getattr(result, "unexpected_keys", ())), None


def _add_wrapper(found: Named, tensor: torch.Tensor, first: str, key: str, *, is_buffer: bool) -> None:
    """Add the inner tensors of a tensor that is made of others.

    Raises:
        ArgumentError: another tensor has the key of one of them.
        UnsupportedError: its class does not follow the protocol for that, or it is on device `meta`.
    """
    parts, text = inner_tensors(tensor, first)
    found.wrappers[id(tensor)] = first
    if text:
        found.wrapped[first] = text
    for name, inner in parts.items():
        if inner.is_meta:
            raise UnsupportedError(
                f"{show(first)}, a {type(tensor).__name__}, is on device `meta`",
                key=first,
                hint="create the model on another device",
            )
        inner_key, of_first = (f"{start}.{name}" if name else start for start in (key, first))
        if key != first:
            found.aliases[inner_key] = of_first
        elif of_first in found.tensors:
            raise ArgumentError(f"two tensors of the model are named {show(of_first)}", key=of_first)
        else:
            found.tensors[of_first] = inner
            if is_buffer:
                found.buffers.add(of_first)


def _adds_entries(module: nn.Module) -> bool:
    """Whether code other than that of torch's base class makes entries of `state_dict()`."""
    kind, base = type(module), nn.Module
    return bool(
        kind._save_to_state_dict is not base._save_to_state_dict  # noqa: SLF001  what a module overrides to add some
        or kind.state_dict is not base.state_dict
        or module._state_dict_hooks  # noqa: SLF001
        or module._state_dict_pre_hooks  # noqa: SLF001
    )


def _add_own_entries(found: Named, root: nn.Module, start: str) -> None:
    """Add the entries of the `state_dict()` of a model that are no parameters, buffers or `get_extra_state`."""
    bare = root
    while (inner := _wrapped(bare)) is not None:
        bare = inner
    walked = {**{key: key for key in found.tensors}, **found.aliases}
    known = walked.keys() | found.transient.keys() | found.wrapped.keys()
    key_of_memory = {_memory(tensor): key for key, tensor in found.tensors.items() if _memory(tensor) is not None}
    own = OwnEntries(bare, {})
    for name, value in bare.state_dict().items():
        key = start + ".".join(part for part in name.split(".") if part not in _TRANSPARENT)
        if key in known or _is_extra_state(found, key):
            continue
        if not isinstance(value, torch.Tensor):
            own.key_of[name] = key
            found.own_values[key] = value
        elif (same := key_of_memory.get(_memory(value))) is not None and _memory(value) is not None:
            found.aliases[key] = same
        elif value.is_meta:
            raise UnsupportedError(
                f"{show(key)}, which {type(bare).__name__} adds to its `state_dict()`, is on device `meta`",
                key=key,
                hint="create the model on another device",
            )
        else:
            own.key_of[name] = key
            found.tensors[key] = value
            if not hasattr(value, "device_mesh"):
                found.buffers.add(key)
    if own.key_of:
        found.own.append(own)


def _roots(model: Any) -> list[tuple[str, Any]]:
    """The modules in a `model` argument, each with what its names begin with."""
    if isinstance(model, Mapping) and model:
        return [(f"{name}.", one) for name, one in model.items()]
    return [("", one) for one in (model if isinstance(model, Sequence) else [model])]


def _wrapped(module: nn.Module) -> nn.Module | None:
    """The module inside a wrapper that has no name in a key."""
    names = _TRANSPARENT | ({"module"} if _is_replicated(module) else set())
    return next((child for name, child in module._modules.items() if name in names), None)  # noqa: SLF001


def _is_extra_state(found: Named, key: str) -> bool:
    module, _, last = key.rpartition(".")
    return last == "_extra_state" and module in found.extra_state


def _memory(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """What is equal for two tensors over the same memory; None if that is not known."""
    is_plain = tensor.layout is torch.strided and not hasattr(tensor, "device_mesh") and not tensor.is_meta
    if not is_plain or not tensor.numel():
        return None
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device)


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Every module under each of its names, with its prefix."""
    yield prefix, module
    is_replicated = _is_replicated(module)
    for name, child in module._modules.items():  # noqa: SLF001  `named_children` skips repeated modules
        if child is not None:
            is_transparent = name in _TRANSPARENT or (is_replicated and name == "module")
            yield from _walk(child, prefix if is_transparent else f"{prefix}{name}.")


def _is_replicated(module: nn.Module) -> bool:
    return isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)


def _printed(module: nn.Module) -> str:
    """Class and options of a module. `fully_shard` replaces the class by one derived from it."""
    kind = next(one for one in type(module).__mro__ if not one.__name__.startswith("FSDP"))
    try:
        options = module.extra_repr()
    except Exception:  # noqa: BLE001  code of the user's, for people
        options = ""
    return f"{kind.__name__}({options})"[:200]


def _adapters(module: Any, prefix: str) -> str:
    """Which adapters of a layer of peft are in use: its parameters do not show it.

    Raises:
        UnsupportedError: adapters are merged into the weight of the layer.
    """
    if module.merged:
        raise UnsupportedError(
            f"adapters are merged into the weight of {show(prefix.removesuffix('.'))}: a run that loads it would add "
            "them again",
            hint="call `unmerge_adapter()` of the model before; to write merged weights, use `merge=True` of an export",
        )
    return (
        f"{type(module).__name__}(active_adapters={module.active_adapters}, disable_adapters={module.disable_adapters})"
    )


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
