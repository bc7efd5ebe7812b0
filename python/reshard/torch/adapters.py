"""Adapters of peft: which tensors of a live model they are, and their folders, which `PeftModel.from_pretrained` loads.

peft is asked for the names: its own function selects and renames tensors on the device `meta`, which are told apart by
identity. An adapter is written from a checkpoint, so the folder is that of a save, whatever the model does meanwhile.
"""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from reshard.documents.strict_json import read_json
from reshard.errors import MismatchError, UnsupportedError
from reshard.options import Commit, Select
from reshard.storage.changes import make_folders
from reshard.storage.location import locate
from reshard.torch.modules import named
from reshard.values.words import show
from reshard.verbs.convert import convert

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from torch import nn

    from reshard.storage.location import Location

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"

_DEFAULT = "default"  # the adapter that peft writes into the folder itself, others into folders of their names
_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Adapter:
    """An adapter of a model.

    Attributes:
        name: its name in the model.
        names: the published name of each of its tensors, by key.
        config: the content of adapter_config.json.
    """

    name: str
    names: Mapping[str, str]
    config: Mapping[str, Any]


def adapters_of(model: object) -> list[Adapter]:
    """The adapters of a model of peft; empty for other models.

    Args:
        model: the model, also wrapped in DDP or `torch.compile`.

    Raises:
        UnsupportedError: peft publishes other tensors than those of the model, as for prompts that it computes.

    Example:
        >>> adapters_of(torch.nn.Linear(2, 2))
        []
    """
    inner = unwrapped(model)
    library: Any = sys.modules.get("peft")
    if library is None or not isinstance(inner, library.PeftModel):
        return []
    return [_adapter(inner, name, config) for name, config in inner.peft_config.items()]


def unwrapped(model: Any) -> Any:
    """The model without DDP and `torch.compile`."""
    while True:
        if (compiled := getattr(model, "_orig_mod", None)) is not None:
            model = compiled
        elif isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            model = model.module
        else:
            return model


def _adapter(model: Any, name: str, config: Any) -> Adapter:
    library: Any = sys.modules["peft"]
    live = _state(model)
    key_of: dict[int, str] = {}
    for key, tensor in live.items():  # the keys of a checkpoint, then further names
        key_of.setdefault(id(tensor), key)
    try:
        # Whether the embeddings belong to it is a question about a hub, which a training does not ask.
        published = library.get_peft_model_state_dict(
            model, state_dict=dict(live), adapter_name=name, save_embedding_layers=_has_embeddings(model, config)
        )
    except Exception as error:
        raise UnsupportedError(
            f"peft does not name the tensors of the adapter {show(name)} without their values: "
            f"{type(error).__name__}: {show(str(error))}",
            hint="write the adapter with `save_pretrained` of the model",
        ) from error
    names: dict[str, str] = {}
    for target, tensor in published.items():
        known = key_of.get(id(tensor))
        if known is None or known in names:
            raise UnsupportedError(
                f"peft publishes {show(target)} of the adapter {show(name)}, which is no tensor of the model"
                if known is None
                else f"peft publishes {show(known)} twice, as {show(names[known])} and {show(target)}",
                key=target,
                hint="write the adapter with `save_pretrained` of the model",
            )
        names[known] = target
    return Adapter(name, names, _config(model, config))


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    """A tensor on the device `meta` for each key, also for the further names of tied tensors."""
    found = named(model)
    live = {key: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for key, tensor in found.tensors.items()}
    return live | {alias: live[key] for alias, key in found.aliases.items() if key in live}


def _has_embeddings(model: Any, config: Any) -> bool:
    """Whether the adapter trains an embedding, as `save_embedding_layers="auto"` of peft sees it without a hub."""
    constants: Any = sys.modules["peft"].utils.other
    targets = getattr(config, "target_modules", None)
    names = getattr(constants, "EMBEDDING_LAYER_NAMES", ())
    del model
    return not isinstance(targets, str) and any(one in (targets or ()) for one in names)


def _config(model: Any, config: Any) -> dict[str, Any]:
    """As `save_pretrained` of peft writes it."""
    changed = copy.deepcopy(config)
    changed.inference_mode = True
    if changed.base_model_name_or_path is None:
        base = model.base_model if config.is_prompt_learning else model.base_model.model
        changed.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    value: dict[str, Any] = changed.to_dict()
    if changed.task_type is None:
        kind = type(model.get_base_model())
        value["auto_mapping"] = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    return json.loads(json.dumps(value, default=lambda one: sorted(one) if isinstance(one, set) else str(one)))  # type: ignore[no-any-return]


def write_names(folder: Location, adapters: Sequence[Adapter]) -> None:
    """Write what `write_adapters` needs into a file, for an export after the training.

    Args:
        folder: an existing folder.
        adapters: the adapters.
    """
    value = [{"name": one.name, "names": dict(one.names), "config": dict(one.config)} for one in adapters]
    (folder / _NAMES_FILE).replace(json.dumps(value, indent=2, sort_keys=True), durable=False)


_NAMES_FILE = "adapters.json"


def read_names(folder: Location) -> list[Adapter]:
    """The adapters that `write_names` has written into a folder; empty if it has not.

    Raises:
        MismatchError: the file is not as it writes it.
    """
    path = folder / _NAMES_FILE
    if not path.is_file():
        return []
    value: Any = read_json(path, _MAX_BYTES)
    try:
        return [
            Adapter(str(one["name"]), {str(a): str(b) for a, b in one["names"].items()}, dict(one["config"]))
            for one in value
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise MismatchError(f"{show(str(path))} lists no adapters: {error!r}", path=str(path)) from None


def write_adapters(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    adapters: Sequence[Adapter],
    *,
    commit: Commit | None = None,
) -> int:
    """Write the adapters of a checkpoint, each into its folder. What an earlier export wrote is replaced.

    Args:
        source: the checkpoint.
        out: the folder of the adapter "default"; others are in folders of their names in it.
        adapters: the adapters.
        commit: `durable` and `private` are used.

    Returns:
        The number of tensors.

    Raises:
        ReshardError: as `reshard.convert`; MismatchError if the checkpoint lacks a tensor of an adapter.
    """
    n_tensors = 0
    chosen = commit or Commit()
    for one in adapters:
        folder = locate(out) if one.name == _DEFAULT else locate(out) / one.name
        if folder.is_local:
            make_folders(folder)
        text = json.dumps(dict(one.config), indent=2, sort_keys=True)
        (folder / CONFIG_FILE).replace(text, durable=chosen.durable)
        done = convert(
            source,
            str(folder / WEIGHTS_FILE),
            to="safetensors",
            part="model",
            select=Select(only=sorted(one.names), rename=dict(one.names)),
            overwrite=True,
            commit=Commit(durable=chosen.durable, private=chosen.private),
        )
        if done.n_tensors != len(one.names):
            raise MismatchError(
                f"{show(str(source))}: {done.n_tensors} tensors belong to the adapter {show(one.name)}, expected "
                f"{len(one.names)}",
                path=str(folder),
            )
        n_tensors += done.n_tensors
    return n_tensors
