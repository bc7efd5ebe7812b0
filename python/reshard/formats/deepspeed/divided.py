"""The weights of a save that has a file for each expert of a layer, or for each layer of a pipeline.

A weight of a pipeline is named `<layer>.<name>`, as in the module of DeepSpeed. What the module shares between layers
is in the file of each of them.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from reshard import _core
from reshard.formats.deepspeed.states import StateFile, as_shape, damaged, read_file
from reshard.formats.outputs import load_all
from reshard.values.indexing import row_major
from reshard.values.words import counted, listed, show

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import TypeAlias

    from reshard.formats.deepspeed.module import Tensors
    from reshard.formats.deepspeed.names import DividedFiles
    from reshard.storage.location import Location

    Shape: TypeAlias = tuple[int, ...]

_log = logging.getLogger("reshard")
_MODULE = "module."
_EXPERT = re.compile(r"\.deepspeed_experts\.([0-9]+)\.")
_TIED = "tied_modules."
_STATE = "optimizer.state."
_N_COMPARED = 64  # elements of the state of a parameter
_OF_THE_SHAPE = ("exp_avg", "momentum_buffer", "square_avg", "sum")  # state of the shape of the parameter
_NOT_COPIED = "the save was not finished, or not all files were copied"


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
    _check_stages(folder, files.model, model[0])
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
        _check_layers(folder, model, owner, tensors)


def _check_stages(folder: Location, names: Mapping[int, str], first: StateFile) -> None:
    """Compare the files of the stages with their recorded number."""
    n_stages = first.content.get("mp_world_size")
    missing = next((n for n in range(n_stages) if n not in names), None) if type(n_stages) is int else None
    if missing is not None:
        name = f"mp_rank_{missing:02d}_model_states.pt"
        raise damaged(
            folder, f"{show(first.file.name)} is one of {n_stages} files, and {show(name)} is missing", _NOT_COPIED
        )


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
            what = f"no file of expert {max(found)}"
            if missing is not None:
                of_name = re.sub(r"expert_[0-9]+", f"expert_{missing}", experts[layer, max(found)])
                what = f"the file of expert {missing}, {show(of_name)}"
            raise damaged(
                folder,
                f"{counted(n, 'expert')}{of_layer} were saved: expected {what}",
                _NOT_COPIED,
            )


def _check_layers(folder: Location, model: list[StateFile], owner: Mapping[str, str], tensors: Tensors) -> None:
    """Compare the weights with the parameters of each stage: with their names, which ZeRO records, else with shapes."""
    missing: list[str] = []
    shapes: dict[str, Shape] = {}
    of_stages: list[list[tuple[Shape, bytes]]] = []
    for file in model:
        recorded = file.content.get("param_shapes") or []
        groups = recorded if isinstance(recorded, list) else [recorded]
        for group in (*groups, file.content.get("frozen_param_shapes")):
            found = group.items() if isinstance(group, dict) else ()
            shapes |= {str(name): as_shape(shape, file.file) for name, shape in found}
        of_stages.append(_in_state(file))
    missing = [name for name in shapes if name not in owner and not name.startswith(_TIED)]
    others = [key for key in owner if key not in shapes]
    held = {(key.partition(".")[2], tensors.index.shape(key)) for key in others}
    for name, shape in shapes.items():
        if name.startswith(_TIED) and (name.removeprefix(_TIED).partition(".")[2], shape) not in held:
            missing.append(name)
    if missing:
        raise damaged(
            folder,
            f"its stages have {listed(map(show, missing), 3)}, and no file of a layer holds them"
            f"{_expected(missing, owner)}",
            _NOT_COPIED,
            missing[0],
        )
    lacking = Counter(shape for of_stage in of_stages for shape, _ in of_stage)
    lacking -= Counter(tensors.index.shape(key) for key in owner)
    surely, perhaps = _shared(of_stages)
    unclear = lacking - surely
    is_missing = not unclear <= perhaps
    shapes_of = listed(map(str, lacking if is_missing else unclear), 3)
    message = (
        f"the optimizers of its stages have state of the shapes {shapes_of}, and no file of a layer holds such "
        "parameters"
    )
    if is_missing:
        raise damaged(folder, message, _NOT_COPIED)
    if unclear:
        _log.warning("%s: %s: they may be of modules that stages share, or %s", folder, message, _NOT_COPIED)


def _expected(names: Iterable[str], owner: Mapping[str, str]) -> str:
    """The names of the files that hold these parameters, by those of the files of other layers."""
    known = next((file for file in owner.values() if file.startswith("layer_")), None)
    layers = dict.fromkeys(int(number) for name in names if (number := name.partition(".")[0]).isdecimal())
    files = [re.sub("layer_[0-9]+", f"layer_{layer:02d}", known) for layer in layers if known is not None]
    missing = [show(file) for file in files if file not in owner.values()]
    return f": expected {listed(missing, 3)}" if missing else ""


def _in_state(file: StateFile) -> list[tuple[Shape, bytes]]:
    """The parameters that the optimizer of a stage has state of, without ZeRO: shapes, and some bytes of the state."""
    index = _core.Index()
    found: dict[str, tuple[Shape, bytes]] = {}
    for path, (dtype, shape) in file.tensors.items():
        number, _, slot = path.removeprefix(_STATE).partition(".")
        if path.startswith(_STATE) and slot in _OF_THE_SHAPE and number not in found:
            tile = _core.Tile((0,) * len(shape), shape, 0, row_major(shape))
            of_file = index.add_torch_file(str(file.file), follow_links=False)
            index.add_tiles(path, dtype, shape, [_core.StoredArray(of_file, path, shape, [tile])])
            part = (*(min(1, n) for n in shape[:-1]), *(min(_N_COMPARED, n) for n in shape[-1:]))
            request = _core.Request()
            request.add_region(path, path, (0,) * len(shape), part)
            found[number] = shape, load_all(index.plan(request, verify=False))[path].tobytes()
    return list(found.values())


def _shared(of_stages: Sequence[Sequence[tuple[Shape, bytes]]]) -> tuple[Counter[Shape], Counter[Shape]]:
    """The further copies of parameters that stages share, which no file of a layer needs to hold.

    Their state is equal, except that of a bias, which DeepSpeed does not keep equal. Stages can list them anywhere.

    Returns:
        Those that are shared for certain, and those that may be: with state of zeros, and a bias that does not come
        after its weight in each stage.
    """
    surely: Counter[Shape] = Counter()
    perhaps: Counter[Shape] = Counter()
    after: dict[tuple[Shape, bytes], list[tuple[Shape, bytes]]] = {}
    for of_stage in of_stages:
        following = dict(itertools.zip_longest(of_stage, of_stage[1:], fillvalue=((), b"")))
        for one, follower in following.items():
            after.setdefault(one, []).append(follower)
    for (shape, content), followers in after.items():
        n_copies = len(followers) - 1
        (surely if any(content) else perhaps)[shape] += n_copies
        if len(shape) < 2 or not any(content) or (len(set(followers)) == 1 and any(followers[0][1])):
            continue
        is_next = all(follower == shape[:1] for follower, _ in followers)
        (surely if is_next else perhaps)[shape[:1]] += n_copies
    return surely, perhaps
