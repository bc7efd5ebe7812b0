"""The files of a Hugging Face model that are not weights: configuration, tokenizer, templates, code, the model card.

They are copied from one folder into the folder where weights are written. They are selected by name. Of their contents,
only the dtype in `config.json` is read, and the subfolders that `modules.json` of sentence-transformers lists: layers
behind the model, which are copied with their weights.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard import dtypes
from reshard.conversion.buckets import left_in
from reshard.documents.strict_json import read_json
from reshard.errors import ArgumentError, DestinationExistsError, ReshardError
from reshard.quantised.config import CONFIG_FILE, ENTRIES, MODELOPT_FILE, without_entries
from reshard.storage.changes import copy_file, has_same_content, make_folders
from reshard.values.words import hub_hint, listed, show

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from reshard.storage.location import Location
    from reshard.storage.store import Entry

_MAX_FILES = 1000
_MAX_FILE_BYTES = 512 << 20
_MAX_ENTRIES = 10_000  # of one folder
_MAX_DEPTH = 3
_MAX_CONFIG_BYTES = 16 << 20
# Weights of any framework, and state of trainers. Not `.model`, which is the suffix of sentencepiece tokenizers.
_WEIGHTS = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|onnx|onnx_data|gguf|ggml|ot|pdparams|tflite|mlmodel|pb|distcp)"
    r"|.*\.(safetensors|bin|h5|msgpack)\.index(\..+)?\.json"
    r"|latest(_universal)?|zero_to_(fp32|torch)\.py"  # of DeepSpeed: a folder with `latest` would be one of its runs
)
_FLOATING = ("F64", "F32", "F16", "BF16")  # the others are those of quantized weights


@dataclass
class ModelFiles:
    """The files to copy, and warnings about files that are not copied.

    Attributes:
        files: the path of each file, by its path relative to the folder.
        edited: new content of files among them, by the same path.
        warnings: files that are not copied although they may be needed, and why.
    """

    files: dict[str, Location] = field(default_factory=dict)
    edited: dict[str, bytes] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def check_free(self, target: Location) -> None:
        """Leave out files that `target` already has, and refuse files that it has with other content.

        Raises:
            DestinationExistsError: a file or folder of the same name has other content.
        """
        left = frozenset[str]() if target.is_local else left_in(target)  # they are removed
        for top in {name.partition("/")[0] for name in self.files if name not in left}:
            of_top = {name: path for name, path in self.files.items() if name.partition("/")[0] == top}
            if not (target / top).exists():
                continue
            for name, path in of_top.items():
                if not self._is_same(name, path, target / name):
                    raise DestinationExistsError(
                        f"{target / name} differs from {path}, which would be copied with the weights",
                        path=str(target / name),
                        hint=f"remove it; or keep all such files of {target}: give that folder as "
                        "`files=Files(model_files=...)`",
                    )
                del self.files[name]

    def _is_same(self, name: str, path: Location, target: Location) -> bool:
        if name not in self.edited:
            return has_same_content(path, target)
        return target.is_file() and target.read_small(_MAX_CONFIG_BYTES) == self.edited[name]

    def set_quantisation(self, entry: Mapping[str, Any] | None) -> None:
        """Change what says how the weights are quantised.

        Args:
            entry: `quantization_config`; None: they are not quantised.

        Raises:
            DamagedFileError: config.json is invalid.
        """
        self.files.pop(MODELOPT_FILE, None)
        if CONFIG_FILE not in self.files:
            return
        config = read_json(self.files[CONFIG_FILE], _MAX_CONFIG_BYTES)
        changed = without_entries(config)
        if entry is not None and isinstance(changed, dict):
            changed = {**changed, ENTRIES[0]: entry}
        if changed != config:
            self.edited[CONFIG_FILE] = (json.dumps(changed, ensure_ascii=False, indent=2) + "\n").encode()

    def copy(self, folder: Location, *, file_mode: int, folder_mode: int, durable: bool) -> None:
        """Copy the files into a folder.

        Args:
            folder: the destination.
            file_mode: permission bits of files, before the umask.
            folder_mode: permission bits of folders, before the umask.
            durable: sync each file.

        Raises:
            StorageError: the system failed.
        """
        for name, path in self.files.items():
            target = folder / name
            if "/" in name:
                make_folders(target.parent, folder_mode)
            if name in self.edited:
                target.replace(self.edited[name], file_mode, durable=durable)
            else:
                copy_file(path, target, file_mode, durable=durable)


def find_model_files(folder: Location, checkpoints: Collection[str] = ()) -> ModelFiles:
    """Find the files of a model folder that are not weights.

    Regular files are selected, and symbolic links to regular files in the folder itself or in the store of a download
    cache. Hidden entries are left out, and so are subfolders that hold weights.

    Args:
        folder: the folder.
        checkpoints: names of files that identify checkpoints, which are left out, too.

    Raises:
        ArgumentError: it is not a folder.
        StorageError: the system failed to list it.
    """
    if not folder.is_folder():
        message = f"{show(str(folder))} is not a folder with the files of a model"
        raise ArgumentError(message, path=str(folder), hint=hub_hint(str(folder)))
    found = ModelFiles()
    _collect(folder, "", found, _Rules(_allowed(folder), checkpoints, _modules(folder)))
    return found


def _modules(folder: Location) -> frozenset[str]:
    """The subfolders of layers behind a model that `modules.json` of sentence-transformers lists."""
    try:
        listed_there = read_json(folder / "modules.json", _MAX_CONFIG_BYTES, follow_links=True)
    except ReshardError:
        return frozenset()
    modules = listed_there if isinstance(listed_there, list) else []
    paths = [one["path"] for one in modules if isinstance(one, dict) and isinstance(one.get("path"), str)]
    # Without a model in the folder itself, its weights are in one of the subfolders, and are those that are converted.
    return frozenset(path for path in paths if path) if "" in paths else frozenset()


def dtype_warning(folder: Location, written: Mapping[str, int], *, is_cast: bool) -> str | None:
    """A warning if `config.json` says another dtype than the weights that are written beside it have.

    transformers loads weights in the dtype of its config.json. In a model of several dtypes it writes that of the first
    tensor, so each of them that loses nothing is accepted, unless the weights are cast.

    Args:
        folder: the folder with `config.json`.
        written: the number of elements of each dtype that is written.
        is_cast: whether the caller chose the dtype.
    """
    try:
        config = read_json(folder / "config.json", _MAX_CONFIG_BYTES)
    except ReshardError:
        return None
    floating = {dtype: n for dtype, n in written.items() if dtype in _FLOATING}
    if not isinstance(config, dict) or not floating:
        return None
    most = max(floating, key=lambda dtype: floating[dtype])
    nested = {name: part for name, part in config.items() if name.endswith("_config") and isinstance(part, dict)}
    found = []
    for prefix, part in [("", config), *((f"{name}.", part) for name, part in nested.items())]:
        for name in ("dtype", "torch_dtype"):
            value = part.get(name)
            with contextlib.suppress(ReshardError):
                dtype = dtypes.parse_dtype(value) if isinstance(value, str) else most
                is_one = dtype in floating and not is_cast and dtypes.bits(dtype) >= dtypes.bits(most)
                if dtype in _FLOATING and dtype != most and not is_one:
                    found.append(f"`{prefix}{name}` {show(str(value))}")
    if not found:
        return None
    return f"config.json has {listed(found)}, and the weights are {' and '.join(sorted(floating))}: edit it to match"


def _allowed(folder: Location) -> list[Location]:
    """Folders to which links may lead."""
    real = folder.resolved()
    is_in_cache = real.parent.name == "snapshots"
    return [real, *([real.parent.parent / "blobs"] if is_in_cache else [])]


class _Rules(NamedTuple):
    """Folders to which links may lead, names that are left out, and subfolders that are copied with their weights."""

    allowed: list[Location]
    checkpoints: Collection[str]
    modules: Collection[str]


def _collect(folder: Location, prefix: str, found: ModelFiles, rules: _Rules) -> None:
    entries = _entries(folder, found)
    is_module = prefix.removesuffix("/") in rules.modules
    if prefix and not is_module and (weights := [entry.name for entry in entries if _WEIGHTS.fullmatch(entry.name)]):
        found.warnings.append(f"{folder} holds weights, such as {show(weights[0])}, and is not copied")
        return
    for entry in entries:
        name, path = prefix + entry.name, folder / entry.name
        is_left = entry.name in rules.checkpoints or _WEIGHTS.fullmatch(entry.name) is not None
        if entry.name.startswith(".") or (is_left and not is_module):
            continue
        if entry.kind == "folder":
            if prefix.count("/") + 1 < _MAX_DEPTH:
                _collect(path, f"{name}/", found, rules)
            elif _entries(path, found):
                found.warnings.append(
                    f"{show(str(path))} is more than {_MAX_DEPTH - 1} folders deep, and is not copied"
                )
            continue
        why = _refusal(path, rules.allowed, is_link=entry.kind == "link")
        if why is None and len(found.files) >= _MAX_FILES:
            why = f"there are more than {_MAX_FILES} files"
        if why is None:
            found.files[name] = path.resolved()
            if is_left:
                found.warnings.append(f"{show(str(path))} belongs to a layer behind the model, and is copied as it is")
        else:
            found.warnings.append(f"{show(str(path))} is not copied: {why}")


def _entries(folder: Location, found: ModelFiles) -> list[Entry]:
    entries = folder.entries()
    if len(entries) > _MAX_ENTRIES:
        found.warnings.append(f"{folder} has more than {_MAX_ENTRIES} entries, and is not copied")
        return []
    return entries


def _refusal(path: Location, allowed: list[Location], *, is_link: bool) -> str | None:
    """Why a file is not copied; None if it is."""
    try:
        found = path.stat(follow_links=True)
    except ReshardError:
        return "it is a broken symbolic link"
    if is_link and not any(folder in allowed for folder in path.resolved().parents):
        return "it is a symbolic link to a file outside of the folder"
    if found.kind != "file":
        return "it is not a regular file"
    if found.n_bytes > _MAX_FILE_BYTES:
        return f"it has {found.n_bytes} bytes, more than {_MAX_FILE_BYTES}"
    return None
