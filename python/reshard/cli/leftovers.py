"""Files and folders in a checkpoint root, or in the opened iteration, that are not part of a checkpoint.

Folders of unfinished saves, iterations that are being removed, copies under other names, files of other programs. A
restart neither reads nor changes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.commit import (
    claims,
    event_log,
    filesystem,
    leases,
    log,
    log_claims,
    log_records,
    publication,
    roots,
    save_log,
    staging,
    trash,
)
from reshard.commit import manifest as manifests
from reshard.errors import ReshardError

if TYPE_CHECKING:
    from reshard.checkpoint import Checkpoint
    from reshard.storage.location import Location

_MAX_FILES = 100_000  # at most so many file sizes are added
_OURS = frozenset(
    (
        roots.TRACKER_FILE,
        save_log.SAVE_LOG_FILE,
        event_log.EVENT_FILE,
        event_log.OLD_EVENT_FILE,
        claims.LOCK_FILE,
        claims.WRITERS_FOLDER,
        log.CLOCK_FILE,
        log_records.LOG_FOLDER,
        log_claims.WRITERS_FOLDER,
        leases.READERS_FOLDER,
        trash.STAGING_FOLDER,
        trash.TRASH_FOLDER,
        "strategy",  # of runs that MindSpore Transformers or a save in Checkpoint 1.0 made
    )
)
_OURS_IN_ITERATION = frozenset(
    (filesystem.MANIFEST_FILE, manifests.TRACKED_FILE, roots.PINNED_FILE, filesystem.UNFINISHED_FILE)
)


@dataclass(frozen=True)
class Leftover:
    """A file or folder that is not part of a checkpoint.

    Attributes:
        name: path relative to the root.
        what: description.
        n_bytes: its size in bytes; for a folder the total size of the files directly in it.
    """

    name: str
    what: str
    n_bytes: int


def leftovers_in_root(root: Location) -> list[Leftover]:
    """Entries of a root that are neither iterations nor files of reshard. Raises StorageError if listing it fails."""
    iterations = {name for _, name in roots.list_iterations(root)}
    found = [_staged(root, name) for name in filesystem.names(root / trash.STAGING_FOLDER)]
    for name in filesystem.names(root / trash.TRASH_FOLDER):
        path = root / trash.TRASH_FOLDER / name
        if f"{trash.TRASH_FOLDER}/{name}" not in iterations:
            what = "a removed iteration, which the next save deletes"
            found.append(Leftover(f"{trash.TRASH_FOLDER}/{name}", what, _n_bytes(path)))
    repeated = dict(roots.resolve_candidates(root).ignored) | _attempts(root)
    for name in filesystem.names(root):
        if name in iterations or name in _OURS or (name.startswith(".") and name not in repeated):
            continue
        what = repeated.get(name) or f"{_kind(root / name)}, not part of a checkpoint"
        found.append(Leftover(name, what, _n_bytes(root / name)))
    return found


def _attempts(root: Location) -> dict[str, str]:
    """The folders of attempts in a log that are not published, with what they are."""
    head = log.head_of(root)
    if head is None:
        return {}
    retired = {one.name for one in head.retired}
    names = [one.name for one in root.entries() if log_records.generation_of(one.name) is not None]
    return {
        name: "a removed iteration, which a later save deletes"
        if name in retired
        else f"a save of iteration {log_records.iteration_of(name)} in progress or interrupted"
        for name in names
        if head.by_name(name) is None
    }


def leftovers_in_iteration(checkpoint: Checkpoint) -> list[Leftover]:
    """Files in the folder of a checkpoint that its manifest does not list; none without a manifest."""
    manifest = checkpoint.manifest
    folder = checkpoint.data.path
    if manifest is None or not folder.is_folder():
        return []
    listed = {*manifest.shards, *manifest.files, *_OURS_IN_ITERATION}
    return [
        Leftover(
            f"{folder.name}/{name}",
            f"{_kind(folder / name)}, not in the manifest",
            _n_bytes(folder / name),
        )
        for name in filesystem.names(folder)
        if name not in listed
    ]


def _staged(root: Location, name: str) -> Leftover:
    path = root / trash.STAGING_FOLDER / name
    parsed = staging.StagedName.parse(name)
    what = f"{_kind(path)}, not part of a checkpoint"
    if name.startswith(publication.SHARED_PREFIX):
        what = "shares of an unfinished conversion, or of a published one, which the next save removes"
    if parsed is not None:
        is_alive = claims.is_alive(root, parsed.generation)
        state = {
            True: "in progress",
            False: "that was interrupted: the next save publishes it if it is complete, and removes it otherwise",
            None: "in progress or interrupted: another host writes into the root",
        }[is_alive]
        what = f"a save of iteration {parsed.iteration} {state}"
    return Leftover(f"{trash.STAGING_FOLDER}/{name}", what, _n_bytes(path))


def _kind(path: Location) -> str:
    kind = path.kind()
    return "symbolic link" if kind == "link" else "folder" if kind == "folder" else "file"


def _n_bytes(path: Location) -> int:
    try:
        found = path.stat()
        if found.kind != "folder":
            return found.n_bytes
        files = [entry.name for entry in path.entries()[:_MAX_FILES] if entry.kind == "file"]
        return sum((path / name).stat().n_bytes for name in files)
    except ReshardError:
        return 0
