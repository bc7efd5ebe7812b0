"""Each `.ckpt` file as a safetensors file of its own, singly or a whole tree of rank folders, mirrored.

What a rank held, the same rank holds afterwards: nothing is merged or cut, so no strategy is needed. The bytes are
streamed by the core; every file appears whole or not at all. All sources are opened and all names checked before the
first file is written. Once all are there, a rank folder gets a `meta.json` that names the new file where the old one
named the source: from a Checkpoint 1.0 tree one that a run can resume from.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reshard import _core
from reshard.arguments import checked, parse_size
from reshard.conversion.destinations import WRITER_KEY
from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    DamagedFileError,
    DestinationExistsError,
)
from reshard.formats.checkpoint1 import names as checkpoint1
from reshard.formats.ckpt import names as ckpt
from reshard.formats.rank_file import RankFile, add_rank_file
from reshard.storage.location import Location, locate
from reshard.storage.publication import made_folder
from reshard.strict_yaml import read_yaml
from reshard.words import check_text, listed, show
from reshard.write.iteration import JointProgress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.storage.store import Entry

__all__ = ["ConvertFilesReport", "ConvertedFile", "convert_files"]

NameMap = Mapping[str, str] | str | os.PathLike[str]

_SUFFIX = ".safetensors"
_RANK_FOLDER = "rank"  # names of sub-folders that are entered begin so
_MAX_NAMED = 3  # names that a message lists before it only counts


@dataclass(frozen=True)
class ConvertedFile:
    """One file that was written.

    Attributes:
        source: the `.ckpt` file.
        path: the safetensors file.
        n_tensors: tensors in it.
        n_bytes: its size.
        strings: values of the source that are text: they are in no safetensors file.
    """

    source: str
    path: str
    n_tensors: int
    n_bytes: int
    strings: tuple[str, ...]


@dataclass(frozen=True)
class ConvertFilesReport:
    """What was written.

    Attributes:
        files: the files, in the order of their names.
        seconds: how long it took.
        warnings: what deserves a look.
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
    name_map: NameMap | None = None,
    name_regex: str | None = None,
    memory: str | int = "256MiB",
    threads: int | None = None,
    durable: bool = True,
    overwrite: bool = False,
    progress: _core.Progress | None = None,
) -> ConvertFilesReport:
    """Write each `.ckpt` file again as a safetensors file.

    Args:
        src: a `.ckpt` file; or a folder: its `.ckpt` files and those in its sub-folders whose names begin with `rank`.
        dst: the folder that gets the files, sub-folders and their `meta.json` as in `src`; of a single file also a name
            that ends in `.safetensors`. None: each file beside its source, and `meta.json` as it was.
        name_map: new names of tensors by their old ones, a mapping or a YAML or JSON file of one; others keep theirs.
        name_regex: of a folder only files in whose names this regular expression is found.
        memory: budget of the copy; what is used beyond it does not grow with the files.
        threads: threads of the copy.
        durable: sync each file before it takes its name.
        overwrite: replace files that are there.
        progress: called as `progress(done_bytes, total_bytes)`.

    Returns:
        What was written. Text values cannot be kept; each is named in a warning.

    Raises:
        CheckpointNotFoundError: there is no such file, or no `.ckpt` file in the folder.
        DestinationExistsError: a file is there, and `overwrite` was not given. Nothing was written.
        ArgumentError: the name map gives two tensors of a file one name, or is none; the expression is none.
        DamagedFileError, UnsupportedError: a source cannot be read. Unless it is its CRC that is wrong, nothing was
            written; else the files before it in order were.
        StorageError: reading or writing failed; the files before it in order were written.

    Example:
        >>> reshard.convert_files("output/checkpoint", "safetensors/", name_map={"w": "model.w"})  # doctest: +SKIP
    """
    started = time.monotonic()
    renamed = _read_names(name_map)
    source = locate(src)
    pairs = _pairs(source, None if dst is None else locate(dst), name_regex)
    planned = [_plan(path, target, renamed) for path, target in pairs]
    if not overwrite:
        _check_free(planned)
    for path in {file.target.parent for file in planned}:
        if path.found() not in (None, "folder"):
            raise DestinationExistsError(f"{show(str(path))} is no folder", path=str(path))
    buffers = _core.Buffers(parse_size(memory))
    joint = JointProgress(progress, sum(file.n_bytes for file in planned))
    written = [
        _write(file, buffers, threads, joint.of_file(file.n_bytes), durable=durable)  # in the order of their names
        for file in planned
    ]
    if source.is_folder() and dst is not None:
        _write_metas(planned, durable=durable)
    return ConvertFilesReport(tuple(written), time.monotonic() - started, tuple(_warnings(planned, renamed)))


# -- what goes where


def _pairs(source: Location, target: Location | None, name_regex: str | None) -> list[tuple[Location, Location]]:
    """Each file and what it becomes."""
    if source.found() != "folder":
        if name_regex is not None:
            raise ArgumentError(f"`name_regex` chooses files of a folder; {show(str(source))} is none")
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
            f"{show(str(source))} and its folders {_RANK_FOLDER}* hold no {ckpt.SUFFIX} file{among}", path=str(source)
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
    """The `.ckpt` files of a folder and of its rank folders, by name; links are not followed."""
    entries = folder.entries()
    found = _of_folder(folder, entries)
    for entry in entries:
        if entry.kind == "folder" and entry.name.startswith(_RANK_FOLDER):
            found += _of_folder(folder / entry.name, (folder / entry.name).entries())
    return sorted(found, key=lambda path: _order(path.relative_to(folder).split("/")))


def _of_folder(folder: Location, entries: list[Entry]) -> list[Location]:
    files = [folder / entry.name for entry in entries if entry.name.endswith(ckpt.SUFFIX) and entry.kind != "folder"]
    return [file for file in files if not file.is_folder()]


def _order(parts: list[str]) -> tuple[object, ...]:
    """Files of the folder itself first; rank_10 after rank_2."""
    return len(parts), [(len(part), part) for part in parts]


def _check_free(planned: Sequence[_Planned]) -> None:
    there = [file.target for file in planned if file.target.exists()]
    if there:
        raise DestinationExistsError(
            f"{listed((show(str(path)) for path in there), 1)} exists",
            path=str(there[0]),
            hint="choose another destination, or give `overwrite=True` to replace what is there",
        )


# -- names


def _read_names(name_map: NameMap | None) -> dict[str, str]:
    if name_map is None:
        return {}
    names: object = name_map
    if isinstance(name_map, str | os.PathLike):
        names, _ = read_yaml(name_map, what="name map", error_class=ArgumentError)
    if not isinstance(names, Mapping):
        raise ArgumentError(f"a name map holds new names by old ones, not {type(names).__name__}")
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
                f"{show(other)} and {show(old)} of {show(str(source))} would both be {show(new)}",
                path=str(source),
                key=old,
                hint="give one of them another name in `name_map=`",
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
        warnings.append(f"the name map names tensors that no file holds: {names}")
    return warnings


# -- bytes


def _requested(index: _core.Index, opened: RankFile, names: Sequence[tuple[str, str]]) -> _core.Plan:
    request = _core.Request()
    for old, new in names:
        index.add_whole(old, opened.file)
        shape = opened.tensors[old].shape
        request.add_region(new, old, (0,) * len(shape), shape)
    return index.plan(request)


def _write_metas(planned: Sequence[_Planned], *, durable: bool) -> None:
    """Each `meta.json` that names a file that was converted, naming what that became."""
    for folder in {file.source.parent for file in planned}:
        # One that is missing or damaged is no more than that afterwards: a resume knows what to do then.
        with contextlib.suppress(CheckpointNotFoundError, DamagedFileError):
            meta = checkpoint1.read_meta(folder)
            for file in planned:
                if file.source == folder / meta.last_ckpt_file:
                    renamed = replace(meta, last_ckpt_file=file.target.name)
                    checkpoint1.write_meta(file.target.parent, renamed, durable=durable)


def _write(
    file: _Planned, buffers: _core.Buffers, threads: int | None, progress: _core.Progress | None, *, durable: bool
) -> ConvertedFile:
    index = _core.Index()
    try:
        opened = add_rank_file(index, file.source, follow_links=True)
        with made_folder(file.target.parent, mode=0o777, durable=durable):
            written = _requested(index, opened, file.names).write(
                str(file.target),
                metadata={"format": "ms", WRITER_KEY: _core.__version__},
                buffers=buffers,
                threads=threads,
                durable=durable,
                mode=0o666,
                progress=progress,
            )
    finally:
        index.close()
    return ConvertedFile(str(file.source), str(file.target), len(file.names), written.n_bytes, file.strings)
