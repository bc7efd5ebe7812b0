"""Converts `.ckpt` files to safetensors files one by one: a single file, or a tree of rank folders.

Each rank keeps its tensors: nothing is merged or resharded, so no strategy is needed. The core streams the bytes, and
each file is published atomically. All sources are opened and all names are checked before the first file is written. At
the end, each rank folder gets a `meta.json` that names the new file if the old one named the source. So a run can
resume from a converted Checkpoint 1.0 tree.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard import _core
from reshard.commit import writer_mark
from reshard.commit.publication import made_folder
from reshard.documents.strict_yaml import read_yaml
from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    DestinationExistsError,
)
from reshard.formats.rank_file import CKPT_SUFFIX, OpenedRankFile, add_rank_file
from reshard.formats.registry import note_renamed
from reshard.storage.location import Location, locate, locate_output
from reshard.values.argument_types import Progress, Size
from reshard.values.arguments import checked, parse_size
from reshard.values.words import check_text, listed, show
from reshard.write.contents import JointProgress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.storage.store import Entry

FlatNameMap = Mapping[str, str] | str | os.PathLike[str]

_SUFFIX = ".safetensors"
_RANK_FOLDER = "rank"  # prefix of the names of subfolders that are searched
_MAX_NAMED = 3  # names that a message lists before it only counts them


@dataclass(frozen=True)
class ConvertedFile:
    """One file that was written.

    Attributes:
        source: the `.ckpt` file.
        path: the safetensors file.
        n_tensors: number of tensors in it.
        n_bytes: size of the safetensors file.
        strings: names of text values of the source, which are left out.
    """

    source: str
    path: str
    n_tensors: int
    n_bytes: int
    strings: tuple[str, ...]


@dataclass(frozen=True)
class ConvertFilesReport:
    """The result of `convert_files`.

    Attributes:
        files: the files, sorted by name.
        seconds: duration.
        warnings: problems that are not errors.
    """

    files: tuple[ConvertedFile, ...]
    seconds: float
    warnings: tuple[str, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.n_bytes for file in self.files)


@dataclass(frozen=True)
class _Planned:
    source: Location
    target: Location
    # (name in the source, name in the file)
    names: tuple[tuple[str, str], ...]
    strings: tuple[str, ...]
    n_bytes: int


@checked
def convert_files(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str] | None = None,
    *,
    name_map: FlatNameMap | None = None,
    name_regex: str | None = None,
    memory: Size = "256MiB",
    threads: int | None = None,
    durable: bool = True,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ConvertFilesReport:
    """Convert each `.ckpt` file to a safetensors file.

    Args:
        src: a `.ckpt` file, or a folder: its `.ckpt` files and those in its subfolders whose names begin with `rank`.
        dst: the folder for the files, with the subfolders and `meta.json` files of `src`; for a single file also a path
            that ends in `.safetensors`. None: each file is written beside its source, and `meta.json` is not changed.
        name_map: new names of tensors by old names: a mapping, or a YAML or JSON file with one. Other tensors keep
            their names.
        name_regex: convert only those files of a folder whose names contain a match of this regular expression.
        memory: size of the buffers, such as "256MiB" or a number of bytes. Other memory use does not grow with the
            files.
        threads: number of threads that copy.
        durable: sync each file before it is published.
        overwrite: replace existing files.
        progress: called as `progress(done_bytes, total_bytes)`.

    Returns:
        The written files. A warning lists text values, which safetensors cannot store.

    Raises:
        CheckpointNotFoundError: there is no such file, or no `.ckpt` file in the folder.
        DestinationExistsError: a file exists, and `overwrite` is False. Nothing was written.
        ArgumentError: the name map or the expression is invalid, two tensors of a file would have the same name, or a
            destination is its source.
        DamagedFileError, UnsupportedError: a source cannot be read. Nothing was written, except for a wrong CRC: then
            the files before it were written.
        StorageError: reading or writing failed. The files before it were written.

    Example:
        >>> from pathlib import Path
        >>> import reshard
        >>> record = "0a 12 0a 01 77 12 0d 08 02 12 05 55 49 6e 74 38 1a 02 00 01"  # the tensor `w` of two UInt8
        >>> _ = Path("w.ckpt").write_bytes(bytes.fromhex(record))
        >>> _ = reshard.convert_files("w.ckpt", name_map={"w": "model.w"})
        >>> reshard.load_file("w.safetensors")
        {'model.w': array([0, 1], dtype=uint8)}
    """
    started = time.monotonic()
    renamed = _read_names(name_map)
    source = locate(src)
    pairs = _pairs(source, None if dst is None else locate_output(dst), name_regex)
    for path, target in pairs:
        if path.resolved() == target.resolved():
            raise ArgumentError(
                f"{show(str(path))} is a safetensors file already",
                path=str(path),
                hint="name a .ckpt file or a folder of .ckpt files; `reshard convert` converts other formats",
            )
    planned = [_plan(path, target, renamed) for path, target in pairs]
    if not overwrite:
        _check_free(planned)
    for path in {file.target.parent for file in planned}:
        if path.found() not in (None, "folder"):
            raise DestinationExistsError(f"{show(str(path))} is not a folder", path=str(path))
    buffers = _core.Buffers(parse_size(memory))
    joint = JointProgress(progress, sum(file.n_bytes for file in planned))
    written = [
        _write(file, buffers, threads, joint.of_file(file.n_bytes), durable=durable)  # sorted by name
        for file in planned
    ]
    if source.is_folder() and dst is not None:
        for file in planned:
            note_renamed(file.source, file.target, durable=durable)
    return ConvertFilesReport(tuple(written), time.monotonic() - started, tuple(_warnings(planned, renamed)))


# -- sources and destinations


def _pairs(source: Location, target: Location | None, name_regex: str | None) -> list[tuple[Location, Location]]:
    """Each source file and its destination."""
    if source.found() != "folder":
        if name_regex is not None:
            raise ArgumentError(f"`name_regex` selects files of a folder, but {show(str(source))} is not a folder")
        name = source.name.removesuffix(source.suffix) + _SUFFIX
        if target is None:
            return [(source, source.with_name(name))]
        is_file_name = target.suffix == _SUFFIX and not target.is_folder()
        return [(source, target if is_file_name else target / name)]
    pattern = _compiled(name_regex)
    found = [
        path
        for path in _ckpt_files(source)
        if pattern is None or pattern.matches(os.fsencode(path.name).decode(errors="replace"))
    ]
    if not found:
        among = "" if name_regex is None else f" whose name matches {show(name_regex)}"
        raise CheckpointNotFoundError(
            f"{show(str(source))} and its folders {_RANK_FOLDER}* hold no {CKPT_SUFFIX} file{among}", path=str(source)
        )
    to = source if target is None else target
    return [(path, to / f"{path.relative_to(source).removesuffix(path.suffix)}{_SUFFIX}") for path in found]


def _compiled(name_regex: str | None) -> _core.Expression | None:
    if name_regex is None:
        return None
    check_text(name_regex, "`name_regex`")
    try:
        return _core.Expression(name_regex, whole=False)
    except ArgumentError as error:
        message = f"`name_regex` is not a regular expression: {error.message}"
        raise ArgumentError(message, hint=error.hint) from None


def _ckpt_files(folder: Location) -> list[Location]:
    """The `.ckpt` files of a folder and of its rank folders, sorted by name. Links are not followed."""
    entries = folder.entries()
    found = _of_folder(folder, entries)
    for entry in entries:
        if entry.kind == "folder" and entry.name.startswith(_RANK_FOLDER):
            found += _of_folder(folder / entry.name, (folder / entry.name).entries())
    return sorted(found, key=lambda path: _order(path.relative_to(folder).split("/")))


def _of_folder(folder: Location, entries: list[Entry]) -> list[Location]:
    files = [folder / entry.name for entry in entries if entry.name.endswith(CKPT_SUFFIX) and entry.kind != "folder"]
    return [file for file in files if not file.is_folder()]


def _order(parts: list[str]) -> tuple[object, ...]:
    """Sort key: files of the folder itself first; rank_10 after rank_2."""
    return len(parts), [(len(part), part) for part in parts]


def _check_free(planned: Sequence[_Planned]) -> None:
    existing = [file.target for file in planned if file.target.exists()]
    if existing:
        raise DestinationExistsError(
            f"{listed((show(str(path)) for path in existing), 1)} exists",
            path=str(existing[0]),
            hint="choose another destination, or pass `overwrite=True` to replace existing files",
        )


# -- names


def _read_names(name_map: FlatNameMap | None) -> dict[str, str]:
    if name_map is None:
        return {}
    names: object = name_map
    if isinstance(name_map, str | os.PathLike):
        names, _ = read_yaml(name_map, what="name map", error_class=ArgumentError)
    if not isinstance(names, Mapping):
        raise ArgumentError(f"a name map is a mapping of old names to new names, not {type(names).__name__}")
    for old, new in names.items():
        check_text(old, "name in a name map")
        check_text(new, f"new name of {show(old)}")
        if not new:
            raise ArgumentError(f"the new name of {show(old)} is empty")
    return dict(names)


def _plan(source: Location, target: Location, renamed: Mapping[str, str]) -> _Planned:
    index = _core.Index()
    try:
        opened = add_rank_file(index, source, follow_links=True)
        names = tuple((key, renamed.get(key, key)) for key in opened.tensors)
        _check_unique(source, names)
        return _Planned(source, target, names, opened.strings, _requested(index, opened, names).n_bytes)
    finally:
        index.close()


def _check_unique(source: Location, names: Sequence[tuple[str, str]]) -> None:
    old_of: dict[str, str] = {}
    for old, new in names:
        other = old_of.setdefault(new, old)
        if other != old:
            raise ArgumentError(
                f"{show(other)} and {show(old)} of {show(str(source))} would both be named {show(new)}",
                path=str(source),
                key=old,
                hint="choose another name for one of them in `name_map=`",
            )


def _warnings(planned: Sequence[_Planned], renamed: Mapping[str, str]) -> list[str]:
    warnings = []
    for file in planned:
        if file.strings:
            names = listed(map(show, file.strings), _MAX_NAMED)
            warnings.append(f"{file.source}: text values are left out: {names}")
    unused = renamed.keys() - {old for file in planned for old, _ in file.names}
    if unused:
        names = listed(map(show, sorted(unused)), _MAX_NAMED)
        warnings.append(f"the name map has names that are in no file: {names}")
    return warnings


# -- bytes


def _requested(index: _core.Index, opened: OpenedRankFile, names: Sequence[tuple[str, str]]) -> _core.Plan:
    for old, _ in names:
        index.add_whole(old, opened.file)
    return index.plan(index.whole_request([new for _, new in names], [old for old, _ in names]))


def _write(
    file: _Planned, buffers: _core.Buffers, threads: int | None, progress: Progress | None, *, durable: bool
) -> ConvertedFile:
    index = _core.Index()
    try:
        opened = add_rank_file(index, file.source, follow_links=True)
        with made_folder(file.target.parent, mode=0o777, durable=durable):
            written = _requested(index, opened, file.names).write(
                str(file.target),
                metadata={"format": "ms", **writer_mark.MARK},
                buffers=buffers,
                threads=threads,
                durable=durable,
                mode=0o666,
                progress=progress,
            )
    finally:
        index.close()
    return ConvertedFile(str(file.source), str(file.target), len(file.names), written.n_bytes, file.strings)
