"""Says what lies at a path that holds no checkpoint: its files, what they look like, and which tool wrote them.

The names and first bytes of a bounded number of entries are read. No checkpoint is opened.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import ReshardError
from reshard.formats import registry, torch_head
from reshard.formats.base import Match
from reshard.opening.near import near
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.storage.location import Location
    from reshard.storage.store import Entry, Kind

_MOST_ENTRIES = 300
_MOST_HEADS = 16  # files whose first bytes are read
_MOST_BELOW = 8  # folders whose content is named
_MOST_LEVELS = 3  # below a folder, in which files are looked for
_MOST_REQUESTS = 20  # to a bucket, to look for them
_MOST_NAMED = 4
_HEAD_BYTES = 262


class There(NamedTuple):
    """What lies at a path.

    Attributes:
        text: what is there, and which tool probably wrote it.
        hint: what to do; None: nothing is known.
    """

    text: str
    hint: str | None


class _Tool(NamedTuple):
    """A tool, how an entry of its folders is called, and how to go on."""

    name: str
    entry: re.Pattern[str]
    hint: str | None = None


_OF_RANKS = "each file holds the shards of one rank, which alone are no model"
_TOOLS = (
    _Tool(
        "verl or another trainer that saves the shards of FSDP ranks",
        re.compile(r"\w+_world_size_\d+_rank_\d+\.pt"),
        f"{_OF_RANKS}. A folder with `model_world_size_<N>_rank_<R>.pt` of all ranks can be opened, or a list of files",
    ),
    _Tool(
        "nanotron",
        re.compile(r"checkpoint_metadata\.json|model_(weight|bias).*\.safetensors"),
        f"{_OF_RANKS}. The folder of a step, with `checkpoint_metadata.json` and `model/`, can be opened",
    ),
    _Tool(
        "Orbax",
        re.compile(r"_CHECKPOINT_METADATA|manifest\.ocdbt|ocdbt\.process_\d+|_METADATA|.*\.orbax-checkpoint-tmp.*"),
        "restore it with Orbax, and save the arrays with `reshard.jax`",
    ),
    _Tool(
        "huggingface_hub",
        re.compile(r"blobs|models--.+"),
        "download the model again with `hf download`: no folder below `snapshots/` has its weights",
    ),
    _Tool(
        "an unfinished download",
        re.compile(r".*\.(incomplete|crdownload|part|partial|aria2)"),
        "go on with the download, or start it again",
    ),
    _Tool("NeMo", re.compile(r"model_config\.yaml|model_weights|.*\.nemo")),
    _Tool("torchtune", re.compile(r"recipe_state\.pt")),
    _Tool("accelerate", re.compile(r"pytorch_model_fsdp_\d+|random_states_\d+\.pkl")),
    _Tool("diffusers", re.compile(r"diffusion_pytorch_model.*|model_index\.json")),
    _Tool(
        "MLX",
        re.compile(r"(\d+_)?adapters\.safetensors"),
        "open `adapters.safetensors`, the newest adapters; files with a number before that name are of earlier steps",
    ),
    _Tool("PEFT", re.compile(r"adapter_model\.\w+|adapter_config\.json")),
    _Tool("TensorRT-LLM", re.compile(r"rank\d+\.safetensors"), f"{_OF_RANKS}. Use the model that it was made of"),
    _Tool("TensorFlow", re.compile(r"saved_model\.pb|.+\.data-\d+-of-\d+|tf_model\.h5|.+\.ckpt-\d+\.index")),
    _Tool("Flax", re.compile(r"flax_model.*\.msgpack")),
    _Tool("transformers or a tool that uses its names", re.compile(r"model\.[\w.-]+-\d+-of-\d+\.safetensors")),
    _Tool("Mistral", re.compile(r"consolidated.*\.safetensors")),
    _Tool("the original code of Llama", re.compile(r"consolidated\.\d+\.pth")),
    _Tool("MLX", re.compile(r"weights(\.\d+)?\.(npz|safetensors)")),
    _Tool("OpenVINO", re.compile(r"openvino_.*\.(xml|bin)"), "use the model that it was made of"),
    _Tool("Core ML", re.compile(r".*\.(mlpackage|mlmodelc?)"), "use the model that it was made of"),
    _Tool("Tensorizer", re.compile(r".*\.tensors")),
    _Tool("PaddlePaddle", re.compile(r".*\.pd(params|opt|model)")),
    _Tool("TensorFlow Lite", re.compile(r".*\.tflite"), "use the model that it was made of"),
    _Tool("TensorRT", re.compile(r".*\.(engine|plan|trt)"), "use the model that it was made of"),
    _Tool(
        "llama.cpp before GGUF", re.compile(r"ggml-.*\.bin"), "convert it with llama.cpp, or use the published model"
    ),
    _Tool("Lightning", re.compile(r"epoch=\d+.*\.ckpt|last\.ckpt|meta\.pt")),
)

_OPTIMIZER = re.compile(r"optim(izer)?(_[\w-]+|-[\w-]+)?(\.(pt|pth|bin|safetensors))?")

_HEADS = (
    (b"GGUF", "a GGUF file, the format of llama.cpp"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes it"),
    (b"\x93NUMPY", "an array of NumPy"),
    (b"version https://git-lfs", "a pointer of Git LFS: the file was not downloaded"),
    *((start, "the text of a page") for start in (b"<!DOCTYPE", b"<!doctype", b"<html", b"<?xml")),
    (b"\x1f\x8b", "packed by gzip"),
    (b"\x28\xb5\x2f\xfd", "packed by zstd"),
)
_SUFFIXES = {
    ".npz": "an archive of NumPy",
    ".keras": "a Keras archive",
    ".zip": "a zip archive",
    ".onnx": "an ONNX model",
    ".msgpack": "a msgpack file, as Flax writes it",
    ".distcp": "a data file of torch.distributed.checkpoint, which its folder describes",
    ".index.json": "an index of weight files, which its folder holds",
}
_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".gguf", ".h5", ".npz", ".msgpack", ".onnx", ".nemo")
_NUMBER = re.compile(r"[0-9]+")
_PART = re.compile(r"(rank|shard|part|consolidated)[._-]?[0-9]+|-[0-9]+-of-[0-9]+|hf_model_[0-9]+_[0-9]+")
_OPEN_ALONE = ("safetensors", "a torch file")


def what_is_there(path: Location) -> There:
    """What lies at a path that holds no checkpoint.

    Args:
        path: an existing file or folder.

    Example:
        >>> import os, numpy as np, reshard
        >>> from reshard.storage.location import locate
        >>> os.mkdir("unet")
        >>> reshard.save_file({"w": np.zeros(2)}, "unet/diffusion_model.safetensors")
        >>> text, hint = what_is_there(locate("unet"))
        >>> text
        'it holds `diffusion_model.safetensors` (safetensors, 80 bytes)'
        >>> hint
        'did you mean `unet/diffusion_model.safetensors`?'
    """
    try:
        return _folder(path) if path.is_folder() else _file(path)
    except ReshardError as error:
        return There(f"it cannot be looked at: {error.message}", None)


def optimizer_files(path: Location) -> list[str]:
    """Names of the files and folders beside weights that other programs call after an optimizer.

    Args:
        path: a checkpoint: a folder or one of its files.

    Example:
        >>> import os
        >>> from reshard.storage.location import locate
        >>> os.makedirs("checkpoint-4/optimizer_0")
        >>> optimizer_files(locate("checkpoint-4"))
        ['optimizer_0']
    """
    folder = path if path.is_folder() else path.parent
    return [name for name in _names(folder) if name != path.name and _OPTIMIZER.fullmatch(name)]


def _file(path: Location) -> There:
    if path.stat(follow_links=True).n_bytes == 0:
        return There("it is empty", "the save or the download was interrupted, or the disk was full")
    what = _look(path)
    tool = _tool_of([path.name])
    text = f"it looks like {what}" if what is not None else "its content has no known format"
    if path.name.endswith(".json") and "index" in path.name.split("."):
        return There(text, f"open its folder {show(str(path.parent))}, or one of the files that it lists")
    return There(text, None if tool is None else tool.hint)


def _folder(folder: Location) -> There:
    all_ = [(one.name, one.kind) for one in folder.entries()]
    all_.sort(key=lambda one: (not one[0].endswith(_WEIGHTS), one[1] not in ("folder", "link"), one[0]))
    entries = [(name, _kind(folder, name, kind)) for name, kind in all_[:_MOST_ENTRIES]]
    entries.sort(key=lambda one: (not one[0].endswith(_WEIGHTS), one[1] != "folder"))
    alone: list[str] = []
    words: list[str] = []
    seen = [name for name, _ in entries]
    n_heads = n_below = 0
    for name, kind in entries:
        if kind == "folder":
            n_below += 1
            if n_below <= _MOST_BELOW:
                below = _names(folder / name)
                seen += below
                weights = [one for one in below if one.endswith(_WEIGHTS)]
                words.append(_words_of_folder(folder / name, name, weights or below))
            continue
        n_heads += 1
        what = _look(folder / name) if n_heads <= _MOST_HEADS else None
        if what in _OPEN_ALONE and name.endswith(_WEIGHTS):
            alone.append(str(folder / name))
        if len(words) < _MOST_NAMED:
            n_bytes = (folder / name).stat(follow_links=kind != "link").n_bytes
            words.append(f"{show(name)} ({'' if what is None else f'{what}, '}{_size(n_bytes)})")
    tool = _tool_of(seen)
    by = "" if tool is None else f", probably written by {tool.name}"
    text = f"it holds {listed(words, _MOST_NAMED, n_items=len(all_))}{by}"
    below_it = near(folder)
    return There(text, _hint(below_it, alone or ([] if below_it else _alone_below(folder)), tool))


def _alone_below(folder: Location) -> list[str]:
    """Files below a folder that can be opened alone, each the only one of weights in its own folder."""
    found: list[str] = []
    folders = [(folder, 0)]
    n_entries = n_requests = 0
    for parent, depth in folders:
        n_requests += 1
        entries = [one for one in _entries(parent) if not one.name.startswith(".")]
        n_entries += min(len(entries), _MOST_ENTRIES)
        weights = [one.name for one in entries if one.name.endswith(_WEIGHTS)]
        if depth and len(weights) == 1:
            n_requests += 1
            if _look(parent / weights[0]) in _OPEN_ALONE:
                found.append(str(parent / weights[0]))
        is_long = not folder.is_local and n_requests >= _MOST_REQUESTS
        if n_entries > _MOST_ENTRIES or len(found) == _MOST_BELOW or is_long:
            break
        if depth < _MOST_LEVELS:
            below = [parent / one.name for one in entries if one.kind == "folder" and one.name not in weights]
            folders += [(one, depth + 1) for one in below[:_MOST_BELOW]]
    return found


def _hint(below: Sequence[str], alone: Sequence[str], tool: _Tool | None) -> str | None:
    if below:
        return f"did you mean {' or '.join(map(show, below))}?"
    if tool is not None and tool.hint is not None:
        return tool.hint
    if len(alone) == 1:
        return f"did you mean {show(alone[0])}?"
    if alone:
        hint = f"each of these files can be opened alone, such as {show(alone[0])}"
        if not _are_parts(alone):
            return hint
        pattern = _NUMBER.sub("*", alone[0].rpartition("/")[2])
        return f"{hint}, but by its name holds a part of the tensors: the pattern {show(pattern)} opens all as one"
    return None


def _are_parts(names: Sequence[str]) -> bool:
    """Whether files are called as the numbered parts of one checkpoint."""
    return len({_NUMBER.sub("", name) for name in names}) == 1 and _PART.search(names[0]) is not None


def _tool_of(names: Sequence[str]) -> _Tool | None:
    return next((tool for tool in _TOOLS if any(tool.entry.fullmatch(name) for name in names)), None)


def _kind(folder: Location, name: str, kind: Kind) -> Kind:
    """The kind of an entry, links followed; of a link to nothing that of the link."""
    return ((folder / name).kind(follow_links=True) or kind) if kind == "link" else kind


def _names(folder: Location) -> list[str]:
    return [one.name for one in _entries(folder)[:_MOST_ENTRIES]]


def _entries(folder: Location) -> list[Entry]:
    try:
        return folder.entries()
    except ReshardError:
        return []


def _words_of_folder(folder: Location, name: str, below: Sequence[str]) -> str:
    found = _format_of(folder)
    if found is not None:
        return f"{show(f'{name}/')} (a checkpoint of the format {found})"
    return f"{show(f'{name}/')} ({f'a folder with {show(below[0])}' if below else 'an empty folder'})"


def _format_of(path: Location) -> str | None:
    """The name of the format that recognises an existing path; None: none does."""
    try:
        found = registry.detect(path)
        return found.traits.name if found.detect(path) is Match.YES else None
    except ReshardError:
        return None


def _look(file: Location) -> str | None:
    """What a file looks like, by its first bytes and its name."""
    try:
        head = file.read_head(_HEAD_BYTES, follow_links=True)
    except ReshardError:
        return None
    by_head = next((what for start, what in _HEADS if head.startswith(start)), None)
    by_suffix = next((what for suffix, what in _SUFFIXES.items() if file.name.endswith(suffix)), None)
    if by_head or by_suffix:
        return by_head or by_suffix
    if head[257:262] == b"ustar":
        return "a tar archive: unpack it"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return "safetensors"
    if torch_head.is_head(head):
        return "a torch file"
    return "a pickle" if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") else None


def _size(n_bytes: int) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if n_bytes < 1024 or unit == "GiB":
            break
        n_bytes = round(n_bytes / 1024)
    return f"{n_bytes} {unit}"
