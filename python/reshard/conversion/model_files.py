"""The files of a Hugging Face model that are no weights: configuration, tokenizer, templates, code, the model card.

They are found in one folder, and copied into another one beside the weights that are written there. Knows names of
files, and of `config.json` the dtype; nothing else of what is in them.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reshard import dtypes
from reshard.errors import ArgumentError, DestinationExistsError, ReshardError
from reshard.formats.full_weights import names as full_weights
from reshard.formats.tiled import names as tiles
from reshard.storage.changes import copy_file, has_same_content, make_folders
from reshard.strict_json import read_json
from reshard.words import show

if TYPE_CHECKING:
    from reshard.storage.location import Location
    from reshard.storage.store import Entry

__all__ = ["ModelFiles", "find_model_files", "told_dtype"]

_MAX_FILES = 1000
_MAX_FILE_BYTES = 512 << 20
_MAX_ENTRIES = 10_000  # of one folder
_MAX_DEPTH = 3
_MAX_CONFIG_BYTES = 16 << 20
# Weights of any framework, and state of trainers. `.model` is none of them: sentencepiece has its tokenizers so.
_WEIGHTS = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|onnx|onnx_data|gguf|ggml|ot|pdparams|tflite|mlmodel|pb|distcp)"
    r"|.*\.(safetensors|bin|h5|msgpack)\.index(\..+)?\.json"
)
_OTHER = (tiles.TILES_FILE, full_weights.MAP_FILE)


@dataclass
class ModelFiles:
    """What is copied, and what is not.

    Attributes:
        files: where each file lies, by its path relative to the folder.
        warnings: what is left behind though it may be wanted, and why.
    """

    files: dict[str, Location] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def check_free(self, target: Location) -> None:
        """Leave out what `target` has already, and refuse what it has otherwise.

        Raises:
            DestinationExistsError: a file, or a folder, of the same name has other content.
        """
        for top in {name.partition("/")[0] for name in self.files}:
            of_top = {name: path for name, path in self.files.items() if name.partition("/")[0] == top}
            if not (target / top).exists():
                continue
            for name, path in of_top.items():
                if not has_same_content(path, target / name):
                    raise DestinationExistsError(
                        f"{target / name} is not the file that belongs to the weights that would be written beside it, "
                        f"{path}",
                        path=str(target / name),
                        hint=f"remove it; or keep all such files of {target}: give that folder as `model_files=`",
                    )
                del self.files[name]

    def copy(self, folder: Location, *, file_mode: int, folder_mode: int, durable: bool) -> None:
        """Copy the files into a folder.

        Raises:
            StorageError: the system failed.
        """
        for name, path in self.files.items():
            target = folder / name
            if "/" in name:
                make_folders(target.parent, folder_mode)
            copy_file(path, target, file_mode, durable=durable)


def find_model_files(folder: Location) -> ModelFiles:
    """The files of a model folder that are no weights.

    Only regular files are taken, and links to such that lie in the folder itself or, of a download cache, in its store.
    Hidden entries are not, nor folders that hold weights of their own.

    Raises:
        ArgumentError: it is not a folder.
        StorageError: it cannot be listed.
    """
    if not folder.is_folder():
        raise ArgumentError(f"{show(str(folder))} is not a folder with the files of a model", path=str(folder))
    found = ModelFiles()
    _look(folder, "", found, _allowed(folder))
    return found


def told_dtype(folder: Location, dtype: str) -> str | None:
    """A warning if `config.json` names another dtype than that to which the weights are cast."""
    try:
        config = read_json(folder / "config.json", _MAX_CONFIG_BYTES)
    except ReshardError:
        return None
    for name in ("dtype", "torch_dtype"):
        told = config.get(name) if isinstance(config, dict) else None
        if isinstance(told, str):
            with contextlib.suppress(ReshardError):
                if dtypes.parse_dtype(told) != dtype:
                    return f"config.json has `{name}` {show(told)}, and the weights are {dtype}: edit it to match"
    return None


def _allowed(folder: Location) -> list[Location]:
    """Where links may lead."""
    real = folder.resolved()
    is_in_cache = real.parent.name == "snapshots"
    return [real, *([real.parent.parent / "blobs"] if is_in_cache else [])]


def _look(folder: Location, prefix: str, found: ModelFiles, allowed: list[Location]) -> None:
    entries = _entries(folder, found)
    if prefix and (weights := [entry.name for entry in entries if _WEIGHTS.fullmatch(entry.name)]):
        found.warnings.append(f"{folder} holds weights of its own, such as {show(weights[0])}, and is not copied")
        return
    for entry in entries:
        name, path = prefix + entry.name, folder / entry.name
        if entry.name.startswith(".") or entry.name in _OTHER or _WEIGHTS.fullmatch(entry.name):
            continue
        if entry.kind == "folder":
            if prefix.count("/") + 1 < _MAX_DEPTH:
                _look(path, f"{name}/", found, allowed)
            continue
        why = _refusal(path, allowed, is_link=entry.kind == "link")
        if why is None and len(found.files) >= _MAX_FILES:
            why = f"there are more than {_MAX_FILES} files"
        if why is None:
            found.files[name] = path.resolved()
        else:
            found.warnings.append(f"{show(str(path))} is not copied: {why}")


def _entries(folder: Location, found: ModelFiles) -> list[Entry]:
    entries = folder.entries()
    if len(entries) > _MAX_ENTRIES:
        found.warnings.append(f"{folder} has more than {_MAX_ENTRIES} entries: none of them is copied")
        return []
    return entries


def _refusal(path: Location, allowed: list[Location], *, is_link: bool) -> str | None:
    """Why a file is not copied; None if it is."""
    try:
        found = path.stat(follow_links=True)
    except ReshardError:
        return "it is a link that leads nowhere"
    if is_link and not any(folder in allowed for folder in path.resolved().parents):
        return "it is a link out of the folder"
    if found.kind != "file":
        return "it is not a regular file"
    if found.n_bytes > _MAX_FILE_BYTES:
        return f"it has {found.n_bytes} bytes, more than {_MAX_FILE_BYTES}"
    return None
