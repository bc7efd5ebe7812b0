"""Names of folders and files in a Checkpoint 1.0 tree of MindSpore Transformers, and `meta.json`.

    <root>/rank_<r>/<prefix>_rank_<r>[_<k>]-<epoch>_<step>.{safetensors|ckpt}    k: the run, absent for the first
    <root>/rank_<r>/meta.json                                                    the last save of this rank
    <root>_network/rank_<r>/...-network-<epoch>_<step>.*                         the weights only
    <root>_trainable/rank_<r>/...-trainable_params-<epoch>_<step>.*              the trained weights only

The files of one save differ only in the rank. Trees of other origin, whose rank folders hold a file of any name, are
recognised by their folders. This module opens no weight file. `resume` decides which save a restart uses.
"""

from __future__ import annotations

import errno
import json
import os
import re
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

from reshard.documents.strict_json import read_json
from reshard.errors import ArgumentError, CheckpointNotFoundError, DamagedFileError, StorageError
from reshard.storage.names import component_fault
from reshard.values.counters import AS_TENSORS
from reshard.values.traits import Traits
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reshard.storage.location import Location

TRAITS = Traits("checkpoint1", counters_as_tensors=True, expects_manifest=True, rank_folders=True, counters=AS_TENSORS)


META_FILE = "meta.json"
STRATEGY_FOLDER = "strategy"
"""Name of the folder of a run's strategy files: beside its root, as in MindSpore Transformers, or in it."""

Extension = Literal["safetensors", "ckpt"]
FileKind = Literal["full", "network", "trainable"]

EXTENSIONS: tuple[Extension, ...] = ("safetensors", "ckpt")

_TAGS: dict[FileKind, str] = {"full": "", "network": "-network", "trainable": "-trainable_params"}
_KINDS: dict[str, FileKind] = {tag: kind for kind, tag in _TAGS.items()}
# No leading zeros, so that parsing and formatting a name gives the same name; 18 digits fit into 64 bits.
_INT = "(0|[1-9][0-9]{0,17})"
_RANK_FOLDER = re.compile("rank_" + _INT)
_FILE = re.compile(
    rf"(.+)_rank_{_INT}(?:_([1-9][0-9]{{0,17}}))?(-network|-trainable_params|)-{_INT}_{_INT}\.(safetensors|ckpt)"
)
_SUFFIX = re.compile(r"[-_]?(?:[0-9]{1,18}-)?(?:[0-9]{1,18}_)?[0-9]{1,18}")
_EPOCH = re.compile(r"-[0-9]+_$")
_LAST_NUMBERS = re.compile(r"([0-9]{1,18})_([0-9]{1,18})$")
_MAX_META_BYTES = 1 << 16
_MAX_NAMED = 3  # names that a message lists before it only counts them


# -- names


class FileName(NamedTuple):
    """The parsed name of a rank's file.

    Attributes:
        prefix: the text before `_rank_`.
        rank: the rank that wrote the file.
        run: number of the run in this root; None: the first run, which writes no number.
        kind: "full": weights and optimizer; "network": weights; "trainable": the trained weights.
        epoch: epoch of the training loop; in sink mode an epoch is one sink.
        step: the step in it.
        extension: "safetensors" or "ckpt".

    Example:
        >>> name = FileName("llama", 3, 1, "full", 20, 2, "safetensors")
        >>> name.name, name.suffix, name.of_rank(0).name
        ('llama_rank_3_1-20_2.safetensors', '1-20_2', 'llama_rank_0_1-20_2.safetensors')
    """

    prefix: str
    rank: int
    run: int | None
    kind: FileKind
    epoch: int
    step: int
    extension: Extension

    @property
    def name(self) -> str:
        """The name of the file."""
        run = "" if self.run is None else f"_{self.run}"
        return f"{self.prefix}_rank_{self.rank}{run}{_TAGS[self.kind]}-{self.epoch}_{self.step}.{self.extension}"

    @property
    def suffix(self) -> str:
        """The part that identifies a save among those with the same prefix: "20_2", or "1-20_2" for a later run."""
        return f"{'' if self.run is None else f'{self.run}-'}{self.epoch}_{self.step}"

    def of_rank(self, rank: int) -> FileName:
        """The name of another rank's file in the same save."""
        return self._replace(rank=rank)


def parse_file_name(name: str) -> FileName | None:
    """Parse the name of a rank's file, from the right, since a prefix may contain dashes. None if it does not match.

    Example:
        >>> parse_file_name("my-run_rank_1-network-20_2.ckpt")
        FileName(prefix='my-run', rank=1, run=None, kind='network', epoch=20, step=2, extension='ckpt')
    """
    match = _FILE.fullmatch(name)
    if match is None or name.startswith(".") or component_fault(name) is not None:
        return None
    return FileName(
        match[1],
        int(match[2]),
        None if match[3] is None else int(match[3]),
        _KINDS[match[4]],
        int(match[5]),
        int(match[6]),
        cast("Extension", match[7]),
    )


def rank_folder_name(rank: int) -> str:
    """The name of a rank's folder.

    Raises:
        ArgumentError: it is not an integer from 0 to 10**18 - 1.

    Example:
        >>> rank_folder_name(3)
        'rank_3'
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < 10**18:
        raise ArgumentError(f"a rank is an integer from 0 to 10**18 - 1, not {rank!r}")
    return f"rank_{rank}"


def parse_rank_folder(name: str) -> int | None:
    """The rank in the name of a folder; None if it does not match.

    Example:
        >>> parse_rank_folder("rank_3"), parse_rank_folder("rank_03")
        (3, None)
    """
    match = _RANK_FOLDER.fullmatch(name)
    return None if match is None else int(match[1])


# -- listing a tree


def rank_folders(root: Location) -> dict[int, Location]:
    """The folders `rank_<r>` of a root, by rank in ascending order; there may be gaps.

    Symbolic links to folders are accepted, since ranks may have been collected from several hosts. Any other entry with
    such a name is an error: if it were skipped, an incomplete tensor could look complete.

    Raises:
        CheckpointNotFoundError: there is no such folder.
        DamagedFileError: an entry `rank_<r>` is not a folder.
        StorageError: it cannot be listed.

    Example:
        >>> from reshard.storage.location import locate
        >>> for rank in range(2):
        ...     os.makedirs(f"checkpoint/rank_{rank}")
        >>> rank_folders(locate("checkpoint"))[1].name
        'rank_1'
    """
    found = rank_entries(root)
    for rank, path in found.items():
        if not path.is_folder():
            what = "a link that does not lead to a folder" if path.kind() == "link" else "not a folder"
            raise DamagedFileError(
                f"{show(str(path))} is {what}, but has the name of the folder of rank {rank}",
                path=str(path),
                hint="copy the rank's folder here, or rename the entry",
            )
    return found


def is_root(path: Location) -> bool:
    """Whether a folder is the root of such a tree: it contains a folder `rank_<r>`.

    Raises:
        CheckpointNotFoundError: there is no such folder.
        StorageError: it cannot be listed.
    """
    return any(entry.is_folder() for entry in rank_entries(path).values())


def rank_entries(root: Location) -> dict[int, Location]:
    """The entries named `rank_<r>`, folders or not, by rank in ascending order. Raises as `is_root`."""
    found = {rank: root / name for name in _names(root) if (rank := parse_rank_folder(name)) is not None}
    return dict(sorted(found.items()))


def list_files(folder: Location, kind: FileKind | None = "full") -> list[FileName]:
    """The weight files of one rank's folder with a name as above, sorted by run, epoch and step.

    Args:
        folder: the folder `rank_<r>`.
        kind: only files of this kind; None: all.

    Raises:
        CheckpointNotFoundError: there is no such folder.
        StorageError: it cannot be listed.

    Example:
        >>> from reshard.storage.location import locate
        >>> import os
        >>> from pathlib import Path
        >>> os.makedirs("run/rank_0")
        >>> for suffix in ("-20_2", "-15_2", "_1-25_2"):
        ...     Path(f"run/rank_0/llama_rank_0{suffix}.ckpt").touch()
        >>> [file.suffix for file in list_files(locate("run/rank_0"))]
        ['15_2', '20_2', '1-25_2']
    """
    found = [
        parsed
        for parsed in map(parse_file_name, list_weight_files(folder))
        if parsed is not None and kind in (None, parsed.kind)
    ]
    return sorted(found, key=lambda one: (one.run or 0, one.epoch, one.step, one.name))


def list_weight_files(folder: Location) -> list[str]:
    """Names of all weight files of one rank's folder, sorted.

    Entries that are not regular files, such as links, are included. They are refused when they are opened.

    Raises:
        CheckpointNotFoundError: there is no such folder.
        StorageError: it cannot be listed.
    """
    return sorted(name for name in _names(folder) if not name.startswith(".") and name.rpartition(".")[2] in EXTENSIONS)


def numbered_files(folders: Mapping[int, Location]) -> dict[int, Location]:
    """The files `<prefix><r>.ckpt` of all ranks, as `transform_checkpoints` of MindSpore names them.

    Returns:
        The file of each rank; empty if not every rank has one, or there are several prefixes.

    Raises:
        StorageError: a folder cannot be listed.

    Example:
        >>> from reshard.storage.location import locate
        >>> import os
        >>> from pathlib import Path
        >>> for rank in range(2):
        ...     os.makedirs(f"transformed/rank_{rank}")
        ...     Path(f"transformed/rank_{rank}/checkpoint_{rank}.ckpt").touch()
        >>> [file.name for file in numbered_files(rank_folders(locate("transformed"))).values()]
        ['checkpoint_0.ckpt', 'checkpoint_1.ckpt']
    """
    forms = []
    for rank, folder in folders.items():
        parts = (name.rpartition(f"{rank}.") for name in list_weight_files(folder))
        # The number of `<prefix>-<epoch>_<step>.ckpt` is the step: on ranks with different steps, of different saves.
        found = {(prefix, suffix) for prefix, _, suffix in parts if suffix in EXTENSIONS}
        forms.append({one for one in found if _EPOCH.search(one[0]) is None})
    common = set.intersection(*forms) if forms else set()
    if len(common) != 1:
        return {}
    ((prefix, suffix),) = common
    return {rank: folder / f"{prefix}{rank}.{suffix}" for rank, folder in folders.items()}


def _names(folder: Location) -> list[str]:
    """Names of the entries of a folder. Raises CheckpointNotFoundError, also if a file has the name; StorageError."""
    try:
        return folder.names()
    except StorageError as error:
        if error.errno != errno.ENOTDIR:
            raise
        raise CheckpointNotFoundError(f"there is no folder {show(str(folder))}", path=str(folder)) from None


# -- meta.json


class Meta(NamedTuple):
    """The last save of a rank, with the field names of the file.

    Attributes:
        last_epoch: the epoch in the file's name.
        last_step: the step in the file's name.
        last_ckpt_file: the file's name.
    """

    last_epoch: int
    last_step: int
    last_ckpt_file: str


def read_meta(folder: Location) -> Meta:
    """Read the `meta.json` of a rank's folder.

    Raises:
        CheckpointNotFoundError: there is no such file.
        DamagedFileError: it is invalid, or epoch, step and the file's name contradict each other.
        StorageError: the system failed to read it.

    Example:
        >>> from reshard.storage.location import locate
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_meta(locate(folder), Meta(20, 2, "llama_rank_1-20_2.safetensors"))
        ...     read_meta(locate(folder))
        Meta(last_epoch=20, last_step=2, last_ckpt_file='llama_rank_1-20_2.safetensors')
    """
    path = folder / META_FILE
    content = read_json(path, _MAX_META_BYTES)

    def damaged(why: str) -> DamagedFileError:
        return DamagedFileError(f"{show(str(path))}: {why}", path=str(path))

    if not isinstance(content, dict):
        raise damaged("expected an object")
    numbers = []
    for key in ("last_epoch", "last_step"):
        value = content.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise damaged(f"`{key}` is not an integer of at least 0")
        numbers.append(value)
    name = content.get("last_ckpt_file")
    parsed = parse_file_name(name) if isinstance(name, str) else None
    if parsed is None:
        raise damaged("`last_ckpt_file` is not the name of a rank's file")
    if [parsed.epoch, parsed.step] != numbers:
        raise damaged(f"`last_ckpt_file` is {show(parsed.name)}, but epoch and step are {numbers[0]} and {numbers[1]}")
    return Meta(numbers[0], numbers[1], parsed.name)


def write_meta(folder: Location, meta: Meta, mode: int = 0o666, *, durable: bool = True) -> None:
    """Write the `meta.json` of a rank's folder atomically. The file that it names must be durable already.

    Args:
        folder: the folder of the rank.
        meta: the content.
        mode: permission bits of the file, before the umask.
        durable: sync it before this returns.

    Raises:
        StorageError: the system failed; the old file is unchanged.
    """
    content = {
        "last_epoch": meta.last_epoch,
        "last_step": meta.last_step,
        "last_ckpt_file": meta.last_ckpt_file,
    }
    (folder / META_FILE).replace(json.dumps(content), mode, durable=durable)


# -- one file of every rank


def choose_by_suffix(
    root: Location, suffix: str | None = None, *, extension: Extension | None = None
) -> dict[int, Location]:
    """Choose one file of each rank folder by the end of its name. No file is opened, and `meta.json` is not read.

    Args:
        root: the folder of the `rank_<r>` folders.
        suffix: "20_2" (epoch and step), "1-20_2" (of a later run) or "2", optionally with a leading dash or underscore.
            It selects the file whose name without extension ends with it, after a dash or an underscore; of several
            runs the first. None: the only file, or the highest epoch and step that every rank has.
        extension: "safetensors" or "ckpt"; None: either.

    Returns:
        The files by rank. Missing ranks are not detected here.

    Raises:
        ArgumentError: the suffix is invalid; it matches several files of a rank; or there are files of both extensions.
        CheckpointNotFoundError: there is no rank folder; or a rank has no such file, or none that all ranks have.
        DamagedFileError: an entry `rank_<r>` is not a folder.
        StorageError: a folder cannot be listed.

    Example:
        >>> from reshard.storage.location import locate
        >>> import os
        >>> from pathlib import Path
        >>> os.makedirs("ranks/rank_0")
        >>> for suffix in ("-20_2", "-15_2"):
        ...     Path(f"ranks/rank_0/llama_rank_0{suffix}.ckpt").touch()
        >>> choose_by_suffix(locate("ranks"), "15_2")[0].name
        'llama_rank_0-15_2.ckpt'
    """
    if suffix is not None and _SUFFIX.fullmatch(suffix) is None:
        raise ArgumentError(f"{show(suffix)} is not a suffix of checkpoint files", hint='write "20_2" or "1-20_2"')
    shown = show(os.fspath(root))
    folders = rank_folders(root)
    if not folders:
        raise CheckpointNotFoundError(f"{shown} holds no folder `rank_<number>`", path=os.fspath(root))
    extensions = EXTENSIONS if extension is None else (extension,)
    names = {
        rank: [
            name for name in list_weight_files(folder) if name.rpartition(".")[2] in extensions and _ends(name, suffix)
        ]
        for rank, folder in folders.items()
    }
    wanted = "no weight file" if suffix is None else f"no weight file that ends in {show(suffix)}"
    missing = [folders[rank].name for rank, found in names.items() if not found]
    if missing:
        there = list_weight_files(root / missing[0]) if suffix is not None else []
        raise CheckpointNotFoundError(
            f"{shown} holds {wanted} in {_some(missing)}",
            path=os.fspath(root),
            hint=f"{missing[0]} holds {_some(there)}" if there else None,
        )
    if len({name.rpartition(".")[2] for found in names.values() for name in found}) > 1:
        raise ArgumentError(
            f"{shown} holds both .safetensors and .ckpt files",
            path=os.fspath(root),
            hint="move the files with one of the extensions to another folder",
        )
    numbers = [{_last_numbers(name) for name in found} for found in names.values()]
    if suffix is None and numbers != [{None}] * len(numbers):
        common = set.intersection(*numbers) - {None}
        if not common:
            raise CheckpointNotFoundError(
                f"there is no epoch and step for which every rank folder of {shown} has a file", path=os.fspath(root)
            )
        best = max(one for one in common if one is not None)
        names = {rank: [name for name in found if _last_numbers(name) == best] for rank, found in names.items()}
    chosen = {rank: _shortest(folders[rank], found, suffix) for rank, found in names.items()}
    parsed = {None if one is None else one.of_rank(0) for one in map(parse_file_name, chosen.values())}
    if len(parsed) > 1 and None not in parsed:
        raise CheckpointNotFoundError(
            f"the rank folders of {shown} hold files of different saves: {_some(chosen.values())}",
            path=os.fspath(root),
        )
    return {rank: folders[rank] / name for rank, name in chosen.items()}


def _ends(name: str, suffix: str | None) -> bool:
    if suffix is None:
        return True
    stem, wanted = name.rpartition(".")[0], suffix.lstrip("-_")
    if not stem.endswith((f"-{wanted}", f"_{wanted}")):
        return False
    # In `x_rank_1-20_2` the number before the dash is the rank, not the run.
    parsed = parse_file_name(name)
    return parsed is None or "-" not in wanted or parsed.suffix == wanted


def _last_numbers(name: str) -> tuple[int, int] | None:
    match = _LAST_NUMBERS.search(name.rpartition(".")[0])
    return None if match is None else (int(match[1]), int(match[2]))


def _shortest(folder: Location, names: list[str], suffix: str | None) -> str:
    # The shorter name belongs to the earlier run. For different epochs, the length depends on their digits.
    is_one_save = len(set(map(_last_numbers, names))) == 1
    shortest = [name for name in names if len(name) == min(map(len, names))] if is_one_save else names
    if len(shortest) > 1:
        wanted = "the suffix" if suffix is None else show(suffix)
        raise ArgumentError(
            f"{show(str(folder))} holds several files that match {wanted}: {_some(shortest)}",
            path=str(folder),
            hint='pass epoch and step, such as "20_2", or "1-20_2" for a later run',
        )
    return shortest[0]


def _some(names: Iterable[str]) -> str:
    return listed(map(show, names), _MAX_NAMED)


def rank_of_folder(folder: Location) -> int | None:
    """The rank in the name of a folder."""
    return parse_rank_folder(named(folder).name)


def named(folder: Location) -> Location:
    """The folder under the name with its rank: the given path, or the target if that is a link."""
    given = folder.absolute()
    return folder.resolved() if parse_rank_folder(given.name) is None else given
