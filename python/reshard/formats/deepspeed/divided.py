"""The weights of a save that has a file for each expert of a layer, or for each layer of a pipeline.

A weight of a pipeline is named `<layer>.<name>`, as in the module of DeepSpeed. What the module shares between layers
is in the file of each of them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from reshard.formats.deepspeed.states import StateFile, damaged, read_file
from reshard.values.words import counted, listed, show

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.formats.deepspeed.module import Tensors
    from reshard.formats.deepspeed.names import DividedFiles
    from reshard.storage.location import Location

_MODULE = "module."
_EXPERT = re.compile(r"\.deepspeed_experts\.([0-9]+)\.")
_TIED = "tied_modules."


def add_weights(folder: Location, files: DividedFiles, model: list[StateFile], tensors: Tensors) -> None:
    """Add the weights of all files.

    Args:
        folder: the folder.
        files: their names.
        model: the files with the state of the run.
        tensors: to which they are added.

    Raises:
        DamagedFileError: a file is missing, is of another save, or holds a tensor of another one.
        StorageError: the system failed to read one.
    """
    for other in model[1:]:
        if other.content.get("global_steps") != model[0].content.get("global_steps"):
            raise damaged(other.file, f"it is of another step than {show(model[0].file.name)}")
    owner: dict[str, str] = {}
    for file in model:
        for path in file.tensors:
            if path.startswith(_MODULE):
                _add(tensors, owner, file, path, path.removeprefix(_MODULE))
    for (_, expert), name in sorted(files.experts.items()):
        file = read_file(folder / name, 0)
        for path in file.tensors:
            found = _EXPERT.search(path)
            if found is None or int(found[1]) != expert:
                raise damaged(file.file, f"{show(path)} is no tensor of expert {expert}", key=path)
            _add(tensors, owner, file, path, path)
    for layer, name in sorted(files.layers.items()):
        file = read_file(folder / name, 0)
        for path in file.tensors:
            _add(tensors, owner, file, path, f"{layer}.{path}")
    if files.experts:
        _check_experts(folder, files.experts, model[0].content.get("num_experts"))
    else:
        _check_layers(folder, model, owner)


def _add(tensors: Tensors, owner: dict[str, str], file: StateFile, path: str, key: str) -> None:
    first = owner.setdefault(key, file.file.name)
    if first != file.file.name:
        raise damaged(file.file, f"{show(key)} is in {show(first)}, too", key=key)
    tensors.add_whole(key, file.file, path, file.tensors[path])


def _check_experts(folder: Location, experts: Mapping[tuple[int, int], str], counts: Any) -> None:
    """Compare the files with the recorded number of experts of each layer."""
    recorded = counts if isinstance(counts, list) else [counts] if isinstance(counts, int) else []
    layers = sorted({layer for layer, _ in experts})
    has_layers = any(name.startswith("layer_") for name in experts.values())
    if has_layers and recorded and len(recorded) != len(layers):
        raise damaged(
            folder, f"it has files of {counted(len(layers), 'layer')} with experts, and {len(recorded)} were saved"
        )
    for layer in layers:
        found = {expert for one, expert in experts if one == layer}
        n = recorded[layer] if layer < len(recorded) and isinstance(recorded[layer], int) else max(found) + 1
        missing = next((expert for expert in range(n) if expert not in found), None)
        if missing is not None or len(found) > n:
            of_layer = f" of layer {layer}" if has_layers else ""
            what = f"the file of expert {missing}" if missing is not None else f"no file of expert {max(found)}"
            raise damaged(
                folder,
                f"{counted(n, 'expert')}{of_layer} were saved: expected {what}",
                "the save was not finished, or not all files were copied",
            )


def _check_layers(folder: Location, model: list[StateFile], owner: Mapping[str, str]) -> None:
    """Compare the weights with the parameters of each stage, as far as they are recorded."""
    missing = []
    for file in model:
        recorded = file.content.get("param_shapes") or []
        for group in recorded if isinstance(recorded, list) else [recorded]:
            names = group if isinstance(group, dict) else {}
            missing += [name for name in names if name not in owner and not str(name).startswith(_TIED)]
    if missing:
        raise damaged(
            folder,
            f"its stages have {listed(map(show, missing), 3)}, and no file of a layer holds them",
            "the save was not finished, or not all files were copied",
            str(missing[0]),
        )
