"""A root of iterations: the names of its folders, and the tracker, which names the iteration that a restart uses.

    <root>/latest_checkpointed_iteration.txt     the tracker
    <root>/iteration_<at least 8 digits>/

These are the names of MindSpore Transformers' Checkpoint 2.0. This package writes 8 digits and reads any width. This
module opens no file of an iteration, and does not check whether one is complete.
"""

from __future__ import annotations

import re
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from reshard.commit import filesystem, log, trash
from reshard.commit.candidates import Folder
from reshard.commit.log_records import LOG_FOLDER, generation_of
from reshard.errors import ArgumentError, CheckpointNotFoundError, ReshardError, StorageError
from reshard.storage.location import is_fault_of_file
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.commit.log_records import Record
    from reshard.storage.location import Location
    from reshard.storage.store import Entry

TRACKER_FILE = "latest_checkpointed_iteration.txt"
PINNED_FILE = ".pinned"

# At most 18 significant digits, so that the number fits 64 bits.
_ITERATION_FOLDER = re.compile(r"iteration_0*([0-9]{1,18})(?:\.[0-9]{1,12}\.[0-9a-f]{32})?")
_LIKE_AN_ITERATION = re.compile(r"iteration[ _-]?0*([0-9]{1,18})", re.IGNORECASE)
_MAX_TRACKER_BYTES = 32
_TRACKER = re.compile(rb"0*([0-9]{1,18})\n?")
_MAX_NAMED = 3  # number of names that a message lists


def _head(root: Location) -> Record | None:
    """The newest record of a root that is a log; None: it is none."""
    store = root.objects
    return None if store is None else store.remembered(str(root / LOG_FOLDER), partial(log.head_of, root))


def _may_be_log(entries: Sequence[Entry] | None) -> bool:
    """Whether a root with these entries can be a log; None: they are not known."""
    # By name alone: an object can have the name of the folder, too, and then it is what a list tells.
    return entries is None or LOG_FOLDER in map(attrgetter("name"), entries)


# -- names


def iteration_folder_name(iteration: int) -> str:
    """The folder name of an iteration; numbers of more than 8 digits are not truncated.

    Raises:
        ArgumentError: it is not an integer from 0 to 10**18 - 1.

    Example:
        >>> iteration_folder_name(5), iteration_folder_name(123456789)
        ('iteration_00000005', 'iteration_123456789')
    """
    if isinstance(iteration, bool) or not isinstance(iteration, int) or not 0 <= iteration < 10**18:
        raise ArgumentError(f"an iteration is an integer from 0 to 10**18 - 1, not {iteration!r}")
    return f"iteration_{iteration:08d}"


def parse_iteration_folder(name: str) -> int | None:
    """The iteration in a folder's name, of any number of digits; None if the name is not that of an iteration.

    It may be the name of an attempt in a log, see `log_records`.

    Example:
        >>> parse_iteration_folder("iteration_0000005"), parse_iteration_folder("iteration_5.old")
        (5, None)
    """
    match = _ITERATION_FOLDER.fullmatch(name)
    return int(match[1]) if match else None


# -- the tracker


def read_tracker(root: Location) -> tuple[int | None, str | None]:
    """The iteration that the tracker names, or the reason why there is none.

    A tracker is a regular file of ASCII digits and at most one newline, 32 bytes at most. Other content is invalid, and
    the reason is returned. If there is no file, there is no reason.

    Returns:
        `(iteration, None)`, `(None, reason)` or, without a file, `(None, None)`.

    Raises:
        StorageError: the file cannot be read, for example because a network file system has lost its connection. It
            may name an older iteration than the newest.
    """
    head = _head(root)
    if head is not None:
        return head.tracker, None
    path = root / TRACKER_FILE
    try:
        data = path.read_small(_MAX_TRACKER_BYTES)
    except CheckpointNotFoundError:
        return None, None
    except ReshardError as error:
        if isinstance(error, StorageError) and not is_fault_of_file(error):
            raise
        return None, error.message
    match = _TRACKER.fullmatch(data)
    if match is None:
        return None, f"{show(str(path))} holds {data!r}, expected decimal digits and at most one newline"
    return int(match[1]), None


def write_tracker(
    root: Location,
    iteration: int,
    *,
    durable: bool = True,
    unsynced: Sequence[Location] = (),
) -> None:
    """Make the tracker name an iteration, after its folder is durable.

    Args:
        root: the checkpoint root.
        iteration: the iteration that it names.
        durable: sync the tracker's content before it gets its name, which becomes durable with the root.
        unsynced: folders whose names are not durable yet; with `durable` they are synced at the same time.

    Raises:
        ArgumentError: the iteration is not an integer from 0 to 10**18 - 1.
        StorageError: the system failed; the tracker is unchanged.
    """
    iteration_folder_name(iteration)  # raises an error for a number that no folder name can hold
    place, data = root / TRACKER_FILE, str(iteration).encode()
    if durable:
        filesystem.replace_after(place, data, folders=unsynced)
    else:
        filesystem.replace_file(place, data, durable=False)


# -- which iterations there are


class Candidates(NamedTuple):
    """The iterations of a root, in the order in which they are tried.

    Attributes:
        tracker: the iteration that the tracker names; None without a tracker, or with an invalid one.
        tracker_reason: why a tracker that exists is invalid; else None.
        folders: `(iteration, folder name)`: the tracker's iteration, then the others by descending number.
        ignored: `(name, reason)` of folders that repeat the number of another one, and of links.
    """

    tracker: int | None
    tracker_reason: str | None
    folders: tuple[tuple[int, str], ...]
    ignored: tuple[tuple[str, str], ...] = ()


def is_root(path: Location) -> bool:
    """Whether a folder is the root of a tree: it holds a log, a tracker, valid or not, or an iteration folder."""
    return _head(path) is not None or (path / TRACKER_FILE).exists() or bool(scan(path)[0])


def holds_saves(path: Location) -> bool:
    """Whether a path is a root with an iteration that this package has completed."""
    if not path.is_folder():
        return False
    tracker, _ = read_tracker(path)
    if tracker is not None and (path / iteration_folder_name(tracker) / filesystem.MANIFEST_FILE).exists():
        return True  # as in most cases, without listing the root
    return any((path / name / filesystem.MANIFEST_FILE).exists() for _, name in reversed(list_iterations(path)))


def list_iterations(root: Location) -> list[tuple[int, str]]:
    """`(iteration, folder name)` of the iteration folders of a root, by ascending number.

    Hidden names, symbolic links and files are skipped. If several folders have the same number, the one with 8 digits
    is used, since MindSpore Transformers finds only that one by its tracker; if there is none, the folder with the
    shortest name.

    An old iteration whose replacement was interrupted between two renames (`trash.set_aside`) has no such folder. Its
    "folder name" is its path in the root, below `.trash`.

    Raises:
        CheckpointNotFoundError: there is no such folder.
        StorageError: it cannot be listed.
    """
    return scan(root)[0]


def known_facts(root: Location, entries: Sequence[Entry] | None = None) -> dict[str, Folder] | None:
    """The facts of the iterations of a root that is a log, by folder; None: it is none, and each manifest has them.

    Args:
        root: the checkpoint root.
        entries: what it holds; None: that is not known.

    Raises:
        DamagedFileError, StorageError: the log cannot be read.
    """
    head = _head(root) if _may_be_log(entries) else None
    if head is None:
        return None
    # What is published there, the tracker has named.
    return {
        one.name: Folder(one.iteration, one.name, True, one.generation, one.previous_tracker, one.passed_over)
        for one in head.live
    }


def is_pinned(folder: Location) -> bool:
    """Whether an iteration is kept whatever the retention. Raises StorageError."""
    head = None if generation_of(folder.name) is None else _head(folder.parent)
    one = None if head is None else head.by_name(folder.name)
    return (folder / PINNED_FILE).exists() if one is None else one.is_pinned


def published(folder: Location) -> Location:
    """The folder of an iteration that is named as on a disk: in a log, an attempt has it. Any other path is returned.

    Raises:
        DamagedFileError: the log is damaged.
    """
    if folder.objects is None or "." in folder.name or (number := parse_iteration_folder(folder.name)) is None:
        return folder
    try:
        head = _head(folder.parent)
    except StorageError:  # this process may only read the iteration
        return folder
    one = None if head is None else head.by_iteration(number)
    return folder if one is None else folder.parent / one.name


def folder_of(root: Location, iteration: int) -> Location:
    """The folder of an iteration.

    Raises:
        CheckpointNotFoundError: there is no such iteration, or no such root.
        StorageError: the root cannot be listed.
    """
    name = dict(list_iterations(root)).get(iteration)
    if name is None:
        message = f"there is no iteration {iteration} in {show(str(root))}"
        raise CheckpointNotFoundError(message, path=str(root), hint=missing_hint(root))
    return root / name


def missing_hint(root: Location) -> str:
    """A hint for a folder that lacks an iteration: which ones it holds, or which folder is meant.

    Raises:
        CheckpointNotFoundError: there is no such root.
        StorageError: it cannot be listed.
    """
    found = [str(number) for number, _ in list_iterations(root)]
    if found:
        return f"it holds {listed(reversed(found))}"
    if parse_iteration_folder(root.name) is not None:
        return f"this is one iteration; give the folder that holds it: {show(str(root.parent))}"
    return "give the folder that holds the iteration folders"


def resolve_candidates(root: Location, entries: Sequence[Entry] | None = None) -> Candidates:
    """In which order the iterations of a root are tried.

    The tracker's iteration is first, then all others by descending number. A folder above the tracker may be unfinished
    after a crash. Therefore it is tried after the tracker's iteration, which is complete.

    Args:
        root: the checkpoint root.
        entries: what it holds, if it was listed before; None: it is listed.

    Raises:
        CheckpointNotFoundError: there is no such folder.
        StorageError: it cannot be listed, or as `read_tracker`.
    """
    tracker, reason = read_tracker(root)
    found, ignored = scan(root, entries)
    if tracker is not None and tracker not in dict(found):
        tracker, reason = None, f"it names iteration {tracker}, which has no folder"
    folders = sorted(found, key=lambda one: (one[0] != tracker, -one[0]))
    return Candidates(tracker, reason, tuple(folders), tuple(ignored))


def tracked_iteration(root: Location) -> int | None:
    """The `tracker` of `resolve_candidates`, without listing the root where its folder has 8 digits.

    Raises:
        CheckpointNotFoundError: there is no such folder.
        StorageError: it cannot be listed, or as `read_tracker`.
    """
    tracker, _ = read_tracker(root)
    if tracker is None or root.objects is not None or (root / iteration_folder_name(tracker)).kind() == "folder":
        return tracker
    return resolve_candidates(root).tracker


def scan(root: Location, entries: Sequence[Entry] | None = None) -> tuple[list[tuple[int, str]], list[tuple[str, str]]]:
    """`list_iterations`, and the folders that repeat a number and the links, each with the reason. Raises as it."""
    head = _head(root) if _may_be_log(entries) else None
    if head is not None:
        return [(one.iteration, one.name) for one in head.live], []
    by_number: dict[int, list[str]] = {}
    found, ignored = [], []
    entries = root.entries() if entries is None else entries
    for entry in entries:
        number = None if "." in entry.name else parse_iteration_folder(entry.name)
        if number is not None and entry.kind == "folder":
            by_number.setdefault(number, []).append(entry.name)
        elif number is not None and entry.kind == "link":
            ignored.append((entry.name, "it is a symbolic link, which is not followed: move the folder itself here"))
    for number, names in sorted(by_number.items()):
        if len(names) == 1:
            found.append((number, names[0]))
            continue
        canonical = iteration_folder_name(number)
        chosen = canonical if canonical in names else min(names, key=len)
        found.append((number, chosen))
        reason = (
            f"iteration {number} is read from {chosen}: nothing reads or removes this folder; remove one of the two"
        )
        ignored += [(name, reason) for name in sorted(names) if name != chosen]
    if (trash.TRASH_FOLDER, "folder") in entries:
        missing = [one for one in trash.set_aside(root).items() if one[0] not in by_number]
        found = sorted([*found, *missing])
    return found, ignored


def misnamed(root: Location, entries: Sequence[Entry] | None = None) -> list[str]:
    """Sentences about folders that are not read because their names only resemble that of an iteration.

    Copies and folders that a user has renamed are named like this: `iteration_00000100 (copy)`, `Iteration-100.old`.

    Args:
        root: the checkpoint root.
        entries: what it holds; None: it is listed.

    Raises:
        CheckpointNotFoundError: there is no such folder.
        StorageError: it cannot be listed.
    """
    if _may_be_log(entries) and _head(root) is not None:
        return []
    entries = root.entries() if entries is None else entries
    known = dict(scan(root, entries)[0])
    sentences = []
    for name in sorted([entry.name for entry in entries if entry.kind == "folder"]):
        match = _LIKE_AN_ITERATION.search(name)
        if match is None or name.startswith(".") or parse_iteration_folder(name) is not None:
            continue
        number = int(match[1])
        text = f"{show(name)} is ignored: the folder of an iteration is named `{iteration_folder_name(number)}`"
        has_other = f", and iteration {number} is read from {known[number]}" if number in known else ""
        sentences.append(text + (has_other or "; rename it to use it"))
    n_more = len(sentences) - _MAX_NAMED
    if n_more > 0:
        more = "1 more folder with such a name is" if n_more == 1 else f"{n_more} more folders with such names are"
        sentences[_MAX_NAMED:] = [f"{more} ignored"]
    return sentences
