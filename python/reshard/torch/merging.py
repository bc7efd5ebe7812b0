"""Adapters of peft merged into the weights of a save: a folder as `merge_and_unload().save_pretrained()` writes it.

peft merges a copy of the model on the device `meta`, which gives the names, and which tensor of the checkpoint each
tensor is. Then peft merges the layers with adapters one by one: a copy of one layer, filled from the checkpoint, on the
device of the layer. The live model is only read. All other tensors are copied from the files of the checkpoint.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from reshard import _core
from reshard.commit import writer_mark
from reshard.conversion.destinations import Job
from reshard.conversion.destinations import Options as FileOptions
from reshard.conversion.library_model import not_saved
from reshard.conversion.library_names import published_names
from reshard.conversion.writer import Settings
from reshard.errors import MismatchError, UnsupportedError
from reshard.formats.base import StoredTensor
from reshard.formats.registry import known_files, writer_for
from reshard.layout import ModelLayout
from reshard.options import Commit
from reshard.storage.changes import make_folders, temporary_folder
from reshard.storage.location import locate, locate_destination
from reshard.torch.adapters import unwrapped
from reshard.torch.files import save_file
from reshard.torch.modules import named
from reshard.torch.tensors import as_tensor, overwrite
from reshard.values.words import show
from reshard.verbs.convert import open_source

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from reshard.checkpoint import Checkpoint
    from reshard.names import NameMap

_MEMORY_BYTES = 256 << 20
_INNER = "base_model.model."  # before the names of the base model in a model of peft


@dataclass(frozen=True)
class Merge:
    """How a model of peft is merged.

    Attributes:
        peft_model: the live model.
        model: the merged model, on the device `meta`.
        keys: of each tensor that is no part of a merged layer, the key in a checkpoint, by its name in `model`.
        layers: for each layer that is merged, the names in `model` of its tensors, by their names in the layer.
        aliases: further names of tensors of the live model, and the key of each.
    """

    peft_model: Any
    model: Any
    keys: Mapping[str, str]
    layers: Mapping[str, Mapping[str, str]]
    aliases: Mapping[str, str]


def merge_of(model: object) -> Merge:
    """How the active adapters of a model of peft are merged. No values are read.

    Args:
        model: the model, also wrapped in DDP or `torch.compile`.

    Raises:
        UnsupportedError: it is no model of peft, or peft cannot merge it; the message names the class.
    """
    inner = unwrapped(model)
    library: Any = sys.modules.get("peft")
    if library is None or not isinstance(inner, library.PeftModel):
        raise UnsupportedError(
            f"`merge=True` merges the adapters of a model of peft, and this is a {show(type(inner).__name__)}",
            hint="leave `merge` out",
        )
    if not callable(getattr(inner.base_model, "merge_and_unload", None)) or inner.active_peft_config.is_prompt_learning:
        kind = type(inner.active_peft_config).__name__
        raise UnsupportedError(
            f"`merge=True`: adapters of {show(kind)} cannot be merged into weights",
            hint="leave `merge` out: the adapter is written",
        )
    names = _outermost(inner.base_model.model)
    for name in names:
        _check_plain(inner, name)
    found = named(inner)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            skeleton = _copied(inner, inner, _on_meta(inner))
            before = _tensors(skeleton)
            key_of_tensor: dict[int, str] = {}
            for key in found.tensors:
                if key in before:
                    key_of_tensor.setdefault(id(before[key]), key)
            merged = skeleton.merge_and_unload()
    except Exception as error:
        config = type(inner.active_peft_config).__name__
        raise UnsupportedError(
            f"`merge=True`: peft cannot merge the {show(config)} of the {show(type(inner).__name__)}: "
            f"{type(error).__name__}: {show(str(error))}",
            hint="leave `merge` out: the adapter is written",
        ) from error
    _note_untied(merged)
    return _sources(inner, merged, names, key_of_tensor, found.aliases)


def _note_untied(merged: Any) -> None:
    """Let the config of the merged model say that its embeddings are not tied, as peft does for one with values."""
    config: Any = getattr(merged, "config", None)
    if not getattr(config, "tie_word_embeddings", False) or not hasattr(merged, "get_output_embeddings"):
        return
    first, last = merged.get_input_embeddings(), merged.get_output_embeddings()
    if getattr(first, "weight", None) is not getattr(last, "weight", None) and hasattr(last, "weight"):
        config.tie_word_embeddings = False


def _sources(
    inner: Any, merged: Any, names: list[str], key_of_tensor: Mapping[int, str], aliases: Mapping[str, str]
) -> Merge:
    """Where each tensor of the merged model comes from."""
    of_merged = named(merged)
    tied = dict(getattr(merged, "all_tied_weights_keys", None) or {})
    ignored = set(not_saved(merged))
    groups: dict[str, list[str]] = {key: [key] for key in of_merged.tensors}
    for name, key in of_merged.aliases.items():
        groups[key].append(name)
    keys: dict[str, str] = {}
    layers: dict[str, dict[str, str]] = {name: {} for name in names}
    for first, group in groups.items():
        chosen = next((name for name in group if name not in tied), first)
        if chosen in ignored:
            continue
        owners = [name for name in names if any(one.startswith(f"{name}.") for one in group)]
        if len(owners) > 1:
            raise UnsupportedError(
                f"`merge=True`: the layers {show(owners[0])} and {show(owners[1])} have adapters and share "
                f"{show(chosen)}, which each would change",
                key=chosen,
                hint="leave `merge` out: the adapter is written",
            )
        if owners:
            start = f"{owners[0]}."
            inside = next(one for one in group if one.startswith(start))
            layers[owners[0]][inside.removeprefix(start)] = chosen
            continue
        known = key_of_tensor.get(id(of_merged.tensors[first]))
        if known is None:
            raise UnsupportedError(
                f"`merge=True`: {show(chosen)} of the merged model is no tensor of the model",
                key=chosen,
                hint="leave `merge` out: the adapter is written",
            )
        keys[chosen] = known
    return Merge(inner, merged, keys, layers, aliases)


def write_merged(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    merge: Merge,
    *,
    suffix: str | None = None,
    model_files: str | os.PathLike[str] | None = None,
    commit: Commit | None = None,
    threads: int | None = None,
) -> int:
    """Write the merged weights of a checkpoint as a Hugging Face folder. What an earlier export wrote is replaced.

    The merged layers are held one at a time. They are written into a temporary folder first: beside the destination, or
    of this host if that is in a bucket.

    Args:
        source: the checkpoint.
        out: the folder.
        merge: how the model is merged.
        suffix: of rank folders, which file of each is read.
        model_files: a folder whose files are copied beside the weights, as `Files.model_files`.
        commit: `durable` and `private` are used.
        threads: threads of the copy.

    Returns:
        The number of tensors.

    Raises:
        UnsupportedError: the published names of the model are not known.
        MismatchError: the checkpoint lacks a tensor, or the merged tensors are not those of `merge.model`.
    """
    chosen, target = commit or Commit(), locate_destination(out)
    writer = writer_for("huggingface", target, has_layout=False)
    names = published_names(merge.model)
    inside = str(target.parent) if target.is_local else None
    if inside is not None:
        make_folders(inside)
    with (
        open_source(locate(source), suffix=suffix) as whole,
        temporary_folder(".merging-", inside=inside) as folder,
        whole.view(()) as view,
    ):
        sources = {name: _stored(whole, key) for name, key in merge.keys.items()}
        for number, name in enumerate(merge.layers):
            file = folder / f"{number}.safetensors"
            save_file(_merged_layer(whole, merge, name), file)
            sources |= _of_file(view, str(file))
        tensors = sources if names is None else _under_names(names.reversed(), sources)
        for key, one in sorted(tensors.items()):
            view.data.index.add_tiles(
                key, one.dtype, one.shape, one.stored, overlapping=True, factors=one.factors or None
            )
        options = FileOptions(
            metadata={**writer.metadata, **writer_mark.MARK},
            dtype=None,
            buffers=_core.Buffers(_MEMORY_BYTES),
            threads=threads,
            durable=chosen.durable,
            file_mode=0o600 if chosen.private else 0o666,
            folder_mode=0o700 if chosen.private else 0o777,
            keep_modes=not chosen.private,
            progress=None,
        )
        keys = sorted(tensors)
        settings = Settings(
            layout=view.bind(ModelLayout.replicated()),
            iteration=None,
            prefix=None,
            max_bytes=None,
            dedup=None,
            strict_format=False,
            original_modes=False,
            model_files=None if model_files is None else locate(model_files),
            check_names=True,
            source=locate(source),
            with_state=False,
            with_extra=False,
        )
        job = Job(view, keys, target, options, overwrite=True, known_files=known_files(), is_renamed=True)
        writer.write(job, settings)
    return len(keys)


def _stored(whole: Checkpoint, key: str) -> StoredTensor:
    dtype, shape = whole.data.index.info(key)
    return StoredTensor(dtype, tuple(shape), whole.data.index.stored(key))


def _of_file(view: Checkpoint, path: str) -> dict[str, StoredTensor]:
    """Add a file to the files of a view; returns its tensors."""
    alone = _core.Index()
    alone.add_whole_file(alone.add_file(path))
    number = view.data.index.add_file(path)
    found = {}
    for key in alone.keys():  # noqa: SIM118  not a mapping
        dtype, shape = alone.info(key)
        stored = [_core.StoredArray(number, one.name, one.shape, one.tiles) for one in alone.stored(key)]
        found[key] = StoredTensor(dtype, tuple(shape), stored)
    return found


def _under_names(names: NameMap, sources: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    made = names.resolve({key: one.shape for key, one in sources.items()})
    return {
        one.key: StoredTensor(
            sources[one.sources[0].key].dtype, one.shape, one.stored(lambda key: sources[key].stored), one.factors
        )
        for one in made
    }


def _merged_layer(whole: Checkpoint, merge: Merge, name: str) -> dict[str, torch.Tensor]:
    """The tensors of a layer after its adapters are merged, by their names in the merged model."""
    live = merge.peft_model.get_submodule(_INNER + name)
    memo = _on_meta(merge.peft_model)
    device = next(live.parameters()).device
    for key, tensor in _tensors(live).items():
        stored = f"{_INNER}{name}.{key}"
        stored = merge.aliases.get(stored, stored)
        if stored in whole:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            overwrite(value, as_tensor(whole.read(stored)))
        else:  # a buffer that no checkpoint holds
            value = tensor.detach().clone()
        memo[id(tensor)] = _like(tensor, value)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer: Any = _copied(live, merge.peft_model, memo)
        if hasattr(layer, "unload_and_optionally_merge_module"):
            made = layer.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        else:
            layer.merge(safe_merge=False, adapter_names=None)
            made = layer.get_base_layer()
    right, found = merge.model.get_submodule(name).state_dict(), made.state_dict()
    for key in right.keys() | found.keys():
        one, two = right.get(key), found.get(key)
        if one is None or two is None or (one.shape, one.dtype) != (two.shape, two.dtype):
            raise MismatchError(f"merging {show(name)} gives another {show(key)} than merging the model", key=key)
    return {chosen: found[key] for key, chosen in merge.layers[name].items()}


def _outermost(model: Any) -> list[str]:
    """The names of the layers that peft merges or takes apart, in the order of the model."""
    names: list[str] = []
    for name, module in model.named_modules():
        is_layer = hasattr(module, "unload_and_optionally_merge_module") or hasattr(module, "base_layer")
        if name and is_layer and not (names and name.startswith(f"{names[-1]}.")):
            names.append(name)
    return names


def _check_plain(inner: Any, name: str) -> None:
    """Refuse a layer whose weights peft would round when it merges into them."""
    layer = inner.get_submodule(_INNER + name)
    for key, tensor in layer.named_parameters():
        kind = type(tensor)
        if tensor.is_floating_point() and (kind.__module__ == "torch" or kind.__module__.startswith("torch.")):
            continue
        base: Any = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
        raise UnsupportedError(
            f"`merge=True`: the layer {show(name)} is a {show(type(base).__name__)}, of which {show(key)} is a "
            f"{show(kind.__name__)} of {tensor.dtype}: merging would round its weights again",
            key=f"{_INNER}{name}.{key}",
            hint="leave `merge` out: the adapter is written; merge it into a base model that is not quantized",
        )


def _on_meta(model: Any) -> dict[int, Any]:
    """The `memo` with which `copy.deepcopy` makes a model whose tensors are on the device `meta`."""
    empty = {}
    for tensor in _tensors(model).values():
        empty[id(tensor)] = _like(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
    return empty


def _copied(module: Any, model: Any, memo: dict[int, Any]) -> Any:
    """A copy of a module of the model with the tensors of `memo`. Modules under `fully_shard` have their own class."""
    sharded = [one for one in model.modules() if type(one).__bases__[0].__name__ == "FSDPModule"]
    memo |= {id(one): object.__new__(type(one).__bases__[1]) for one in sharded}
    for one in sharded:
        # The hooks and the state of `fully_shard` cannot be copied.
        value = {name: kept for name, kept in vars(one).items() if not name.startswith("__composable_api")}
        value |= {name: OrderedDict() for name in value if name.endswith("_hooks")}
        memo[id(one)].__dict__ = copy.deepcopy(value, memo)
    return copy.deepcopy(module, memo)


def _like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The value as a parameter, if the tensor is one."""
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(value, requires_grad=tensor.requires_grad)
    return value


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    """All parameters and buffers by name, tied ones under each name."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
