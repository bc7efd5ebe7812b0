"""The map from tensors to files that Hugging Face and MindSpore store beside whole weights.

Both are JSON `{"metadata": {...}, "weight_map": {name: file}}`. This module reads an untrusted map, adds what
transformers loads beside it, and detects whether this package wrote it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import time
from typing import TYPE_CHECKING

from reshard import _core, dtypes
from reshard.commit import writer_mark
from reshard.documents.strict_json import read_json
from reshard.errors import CheckpointNotFoundError, DamagedFileError, MismatchError, ReshardError, UnsupportedError
from reshard.formats.base import UNCHANGED_HINT
from reshard.formats.outputs import load_all
from reshard.storage.location import Location, locate
from reshard.storage.names import component_fault, is_too_long
from reshard.storage.store import kind_words
from reshard.values.words import listed, show

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

_log = logging.getLogger("reshard")

_MAX_BYTES = 128 << 20
_MAX_CONFIG_BYTES = 16 << 20
_COMPARED_BYTES = 64 << 20  # that are in memory at once, of each of two copies
_MAX_TENSORS = 1_000_000
_MAX_VALUES = 2 * _MAX_TENSORS  # with the metadata, and names that hold commas or brackets
_MAX_NAME_BYTES = 1024
_SETTLED_NS = 1_000_000_000  # after which a save has begun its next file
_LEFT_NS = 60_000_000_000  # after which an unfinished file was left by a program that ended
_UNFINISHED = re.compile(r"\.tmp[0-9A-Za-z]{6}")  # of `safetensors`
# Words of metadata of differences between checkpoints.
_DIFFERENCE = frozenset({"delta", "deltas", "diff", "xor"})
_OF_KIND = frozenset({"codec", "compression", "encoding", "format", "kind", "mode", "type"})
_OF_BASE = frozenset(
    {"base", "checkpoint", "commit", "digest", "hash", "iteration", "revision", "sha", "step", "version"}
)
_NOTHING = (None, False, 0, "", "0", "false", "no", "none", "null")
_HALVES = ("indices", "indexes", "idx", "values", "vals")
_HALF = re.compile(rf"(.+)[._/:]({'|'.join(_HALVES)})")
_MAX_NAMED = 3  # names that a message lists before it only counts them


def read(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read a map and check that its files exist.

    Symbolic links are followed, since the files of a download cache are links. A map without the wrapper `weight_map`
    is accepted too.

    Returns:
        The file name of each tensor.

    Raises:
        CheckpointNotFoundError: there is no map, or one of its files is missing.
        DamagedFileError: the map is invalid, a name in it is refused, or names no regular file.
        StorageError: the system failed to read it.
    """
    path = locate(path)
    content = read_json(path, _MAX_BYTES, max_values=_MAX_VALUES, follow_links=True)
    weight_map = content.get("weight_map", content) if isinstance(content, dict) else None
    if weight_map is not content and isinstance(content, dict):
        refuse_differences(path, content.get("metadata"))
    if not isinstance(weight_map, dict):
        raise _damaged(path, "it has no object `weight_map`")
    if not weight_map:
        raise _damaged(path, "`weight_map` is empty")
    if len(weight_map) > _MAX_TENSORS:
        raise _damaged(path, f"`weight_map` has {len(weight_map)} tensors; at most {_MAX_TENSORS} are allowed")
    for key, name in weight_map.items():
        if not 1 <= len(key.encode()) <= _MAX_NAME_BYTES:
            length = f"a tensor's name must have 1 to {_MAX_NAME_BYTES} bytes, not {len(key.encode())}"
            raise _refused(path, length, is_long=bool(key))
        if not isinstance(name, str):
            raise _damaged(path, f"the file of {show(key)} is not text")
    files = list(dict.fromkeys(weight_map.values()))
    for name in files:
        fault = component_fault(name)
        if fault is not None:
            raise _refused(path, f"the file name {show(name)} is refused: {fault}", is_long=is_too_long(name))
    missing = []
    for name in files:
        kind = (path.parent / name).found()
        if kind is None:
            missing.append(name)
        elif kind != "file":
            raise DamagedFileError(
                f"{show(str(path))} lists {show(name)}, which is {kind_words(kind)}, expected a file",
                path=str(path.parent / name),
            )
    if missing:
        raise CheckpointNotFoundError(
            f"{show(str(path))} lists missing files: {listed(map(show, missing), _MAX_NAMED)}",
            path=str(path),
            hint="the download or copy of the model is incomplete",
        )
    return weight_map


def add_tensors(index: _core.Index, folder: Location, weight_map: Mapping[str, str], add: Callable[[str], int]) -> None:
    """Add the tensors of a weight map, and their files, to an index.

    Args:
        index: of the checkpoint.
        folder: the folder of the files.
        weight_map: the file of each tensor, as `read` returns it.
        add: adds a file to the index, and returns its number.
    """
    numbers = {name: add(str(folder / name)) for name in dict.fromkeys(weight_map.values())}
    index.add_wholes([(key, numbers[name]) for key, name in weight_map.items()])


def add_unlisted(
    index: _core.Index,
    folder: Location,
    listing: str,
    *,
    add: Callable[[_core.Index, str], int],
    named: Collection[str] = (),
) -> None:
    """Add the tensors of the listed files that a map does not name: transformers loads them, too.

    Args:
        index: of the checkpoint, with the tensors of the map.
        folder: the folder of the files.
        listing: the name of the map.
        add: adds a file to an index, and returns its number.
        named: files of which a warning says that they are not read.

    Raises:
        DamagedFileError: two files hold one tensor with different content.
    """
    files = {locate(index.file_path(file)).name: file for file in range(index.n_files)}
    added = []
    for name, file in files.items():
        for key in index.not_taken(file):
            if key not in index:
                index.add_whole(key, file)
                added.append(key)
                continue
            first = index.holders(key)[0]
            if not is_equal([index.file_path(one) for one in (first, file)], key, add):
                raise DamagedFileError(
                    f"{show(str(folder))}: {show(locate(index.file_path(first)).name)} and {show(name)} both hold "
                    f"{show(key)}, with different content",
                    path=str(folder / name),
                    key=key,
                    hint="one of them is of another save: remove the file that is not of this model, or convert the "
                    "right file alone",
                )
    if added:
        _log.warning(
            "%s does not name %s: read from the files that hold them, as transformers does",
            folder / listing,
            listed(map(show, added), _MAX_NAMED),
        )
    start, _, rest = listing.partition(".")
    suffix = "." + rest.partition(".")[0]
    others = [
        name
        for name in folder.names()
        if name.endswith(suffix)
        and name not in (*files, *named)
        and (suffix == ".safetensors" or name.startswith(start))
    ]
    if others:
        _log.warning(
            "%s holds weights that %s does not list, which are not read: %s",
            folder,
            listing,
            listed(map(show, others), _MAX_NAMED),
        )


def is_equal(paths: Sequence[str], key: str, add: Callable[[_core.Index, str], int]) -> bool:
    """Whether two files hold a tensor with the same dtype, shape and bytes.

    Args:
        paths: the two files.
        key: the tensor.
        add: adds a file to an index, and returns its number.
    """
    both = []
    for path in paths:
        alone = _core.Index()
        alone.add_whole(key, add(alone, path))
        both.append(alone)
    if both[0].info(key) != both[1].info(key):
        return False
    dtype, shape = both[0].info(key)
    n_rows = shape[0] if shape else 1
    step = max(1, _COMPARED_BYTES * 8 // max(1, math.prod(shape[1:]) * dtypes.bits(dtype)))
    for row in range(0, n_rows, step):
        offset = (row, *(0 for _ in shape[1:])) if shape else ()
        part = (min(step, n_rows - row), *shape[1:]) if shape else ()
        request = _core.Request()
        request.add_region(key, key, offset, part)
        found = [load_all(one.plan(request, verify=False))[key].tobytes() for one in both]
        if found[0] != found[1]:
            return False
    return True


def weights_of_config(folder: Location) -> str | None:
    """The file of weights that `config.json` of a folder names: transformers loads it, whatever else is there."""
    try:
        config = read_json(folder / "config.json", _MAX_CONFIG_BYTES, follow_links=True)
    except ReshardError:
        return None
    name = config.get("transformers_weights") if isinstance(config, dict) else None
    return name if isinstance(name, str) else None


def check_config(folder: Location, name: str) -> None:
    """Refuse a folder from which transformers loads other weights than those that are read here.

    Args:
        folder: the folder.
        name: the file or the index that is read.

    Raises:
        UnsupportedError: `config.json` names another file.
    """
    named = weights_of_config(folder)
    if named not in (None, name):
        raise UnsupportedError(
            f"{show(str(folder))}: config.json names {show(named)} as `transformers_weights`, which transformers loads "
            f"instead of {show(name)}",
            path=str(folder / "config.json"),
            hint=f"convert {show(named)} alone, with this folder as `files=Files(model_files=...)`; or remove "
            f"`transformers_weights` from config.json to read {show(name)}",
        )


def refuse_differences(path: Location, metadata: object, keys: Sequence[str] = ()) -> None:
    """Refuse weights that are differences from other weights, or replace some of their elements: they are no model.

    Trainings by reinforcement learning write such folders in place of a whole model. Their metadata says from what the
    difference is and how it is encoded, or most of their tensors are pairs of indices and values.

    Args:
        path: the file that has the metadata, or the folder.
        metadata: metadata by name, if it has any.
        keys: names of the tensors.

    Raises:
        UnsupportedError: the weights are differences.

    Example:
        >>> refuse_differences(locate("index.json"), {"total_size": 8, "base_model": "Qwen/Qwen3-0.6B"}, ["w"])
        >>> refuse_differences(locate("index.json"), {"encoding": "xor"})  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        reshard.errors.UnsupportedError: `index.json` describes differences from other weights, and no model: ...
    """
    sign = _sign_in_metadata(metadata) if isinstance(metadata, dict) else None
    if sign is None and keys:
        ends = [key for key in keys if key.endswith(_HALVES)]
        halves = {key: match for key in ends if (match := _HALF.fullmatch(key)) is not None}
        kinds: dict[str, set[str]] = {}
        for match in halves.values():
            kinds.setdefault(match[1], set()).add("values" if match[2].startswith("val") else "indices")
        pairs = [name for name, found in kinds.items() if len(found) == 2]
        if 4 * len(pairs) > len(keys):  # more than half of the tensors
            key = next(key for key, match in halves.items() if match[1] == pairs[0])
            sign = f"its tensors are pairs of indices and values, such as {show(key)}"
    if sign is not None:
        raise UnsupportedError(
            f"{show(str(path))} describes differences from other weights, and no model: {sign}",
            path=str(path),
            hint="apply the differences to the weights that they start from, with the program that wrote them, and use "
            "the result; `reshard inspect` of one of the files shows what it holds",
        )


def _sign_in_metadata(metadata: Mapping[object, object]) -> str | None:
    """The entry of the metadata that says that the weights are differences."""
    words = {
        key: set(re.split(r"[^a-z]+", key.lower()))
        for key in metadata
        # Names of tensors, of which `safetensors` records the tied ones, have dots.
        if isinstance(key, str) and "." not in key and not key.startswith("ss_")
    }
    has_base = any("base" in of_key for of_key in words.values())
    for key, of_key in words.items():
        value = metadata[key]
        if value in _NOTHING or (isinstance(value, str) and value.strip().lower() in _NOTHING):
            continue
        is_encoded = bool(of_key & _DIFFERENCE) or (has_base and "sparse" in of_key)
        is_named = isinstance(value, str) and bool(set(re.split(r"[^a-z]+", value.lower())) & _DIFFERENCE)
        is_base = "base" in of_key and of_key <= _OF_BASE
        if is_encoded or (is_named and bool(of_key & _OF_KIND)) or is_base:
            return f"its metadata has {show(key)}: {show(str(value))}"
    return None


def check_saved(listing: Location, files: Iterable[Location]) -> None:
    """Refuse files of which some were just saved and others will be, as far as this can be seen.

    A save writes file after file, and the map last. What was read between two of its files is a mixture, although no
    file changed while it was read. The map of such a folder is newer than some files and older than others. This can
    be true of a copy or a download, too: if its last file was written less than a second ago, the function waits for
    the rest of the second, after which a save has begun its next file. While `safetensors` writes a file, it has
    another name.

    Args:
        listing: the map.
        files: the files that it lists.

    Raises:
        MismatchError: another program is writing into the folder.
        StorageError: a file cannot be examined.
    """
    try:
        times = [file.stat(follow_links=True).modified_ns for file in files]
        is_mixed = bool(times) and min(times) < listing.stat(follow_links=True).modified_ns < max(times)
        if is_mixed and 0 <= (age_ns := time.time_ns() - max(times)) < _SETTLED_NS:
            time.sleep((_SETTLED_NS - age_ns) / 1e9)
        for name in listing.parent.names():
            if _UNFINISHED.fullmatch(name) is None:
                continue
            with contextlib.suppress(CheckpointNotFoundError):  # it is complete
                age_ns = time.time_ns() - (listing.parent / name).stat().modified_ns
                if age_ns < _LEFT_NS:
                    raise MismatchError(
                        f"{show(str(listing.parent))} changed while it was read: another program is writing "
                        f"{show(name)} there. What was read may be a mixture of two saves",
                        path=str(listing.parent / name),
                        hint=UNCHANGED_HINT,
                    )
    except CheckpointNotFoundError:
        return  # what is missing is found by the comparison of the files


def writer(path: str | os.PathLike[str]) -> str | None:
    """The version of this package that wrote a map; None if another writer wrote it, or it cannot be read."""
    try:
        content = read_json(path, _MAX_BYTES, max_values=_MAX_VALUES)
    except ReshardError:
        return None
    metadata = content.get("metadata") if isinstance(content, dict) else None
    version = metadata.get(writer_mark.KEY) if isinstance(metadata, dict) else None
    return version if isinstance(version, str) else None


def is_ours(path: Location) -> bool:
    """Whether this package wrote a map."""
    return writer(path) is not None


def _refused(path: Location, fault: str, *, is_long: bool) -> ReshardError:
    """The error for a name; one that is only too long is no damage."""
    refused = _damaged(path, fault)
    return UnsupportedError(refused.message, path=refused.path) if is_long else refused


def _damaged(path: Location, fault: str) -> DamagedFileError:
    return DamagedFileError(f"{show(str(path))}: {fault}", path=str(path))
