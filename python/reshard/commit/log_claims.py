"""Claims of a root that is a log. The claim is a record, and its number is the generation of what is saved under it.

Nothing that an older generation began can be published any more, whatever its process believes: the record that it
would create is taken. Whether the holder of a claim has ended is therefore only a matter of courtesy: a process of
this host is looked up; that of another host is watched for `_WATCH_SECONDS`, while it writes `writers/<generation>`
every `BEAT_SECONDS`. Clocks are not compared.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from typing import TYPE_CHECKING

from reshard.commit import filesystem, log, log_records, owners
from reshard.commit.filesystem import MANIFEST_FILE
from reshard.commit.log_records import LOG_FOLDER, generation_of, iteration_of
from reshard.errors import ClaimedError, DestinationExistsError, ReshardError, UnsupportedError
from reshard.storage.store import HeldFile
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Hashable

    from reshard.commit.log_records import Record
    from reshard.commit.session import Claim
    from reshard.storage.location import Location

WRITERS_FOLDER = "writers"
BEAT_SECONDS = 30.0
_WATCH_SECONDS = 90.0
_LOOK_SECONDS = 1.0

_log = logging.getLogger("reshard")


class HeldHeartbeat(HeldFile):
    """The object that the holder of a claim writes again and again. Only the log says whether the claim is in force."""

    def __init__(self, path: Location) -> None:
        self._path = path
        self._content = json.dumps(owners.me()).encode()

    def beat(self) -> None:
        """See `HeldFile.beat`."""
        self._path.store.replace(self._path.path, self._content, durable=True)

    def write(self, data: bytes) -> None:
        """See `HeldFile.write`."""
        self._path.store.replace(self._path.path, data, durable=True)

    def is_current(self) -> bool:
        """See `HeldFile.is_current`: nobody else writes it."""
        return True

    def close(self) -> None:
        """See `HeldFile.close`."""


def make(root: Location, *, takeover: bool) -> tuple[int, HeldFile]:
    """Claim a root, and remove what older claims have left. Returns the generation, and the heartbeat.

    Args:
        root: the checkpoint root; it need not exist.
        takeover: replace the claim of another process, even if it is alive.

    Raises:
        ClaimedError: another process has a claim and is alive.
        DestinationExistsError: there is something else at the root.
        UnsupportedError: the store lets several writers create one object.
        StorageError: the store failed.
    """
    head = log.head_of(root)
    if head is None:
        _check_new(root)
        log.probe(root)
    while True:
        if head is not None and head.generation and not takeover:
            _check_dead(root, head)
        made = log_records.claimed(log.next_record(head, "claim"), owners.me())
        if log.create(root, made):
            break
        head = log.head_of(root)
    heartbeat = HeldHeartbeat(_file(root, made.generation))
    heartbeat.beat()
    _sweep(root, made)
    return made.generation, heartbeat


def check(claim: Claim) -> None:
    """Check that no other process has claimed the root since.

    Raises:
        ClaimedError: another process has.
        StorageError: the store failed.
    """
    head_under(claim.root, claim.generation)


def head_under(root: Location, generation: int) -> Record:
    """The newest record of a root, under a claim that is in force. Raises as `check`.

    Args:
        root: the checkpoint root.
        generation: the number of the claim.
    """
    head = log.head_of(root)
    if head is None or head.generation != generation:
        raise superseded(root, generation, head)
    return head


def check_attempt(folder: Location) -> None:
    """Check, in any process, that an attempt can still be published, and is not. Raises as `check`.

    Args:
        folder: that of the attempt, in its root.
    """
    head = head_under(folder.parent, generation_of(folder.name) or 0)
    if head.by_name(folder.name) is not None:
        raise ClaimedError(f"{show(str(folder))} was published while this process wrote into it", path=str(folder))


def superseded(root: Location, generation: int, head: Record | None) -> ClaimedError:
    """The error of a process whose claim is no longer in force.

    Args:
        root: the checkpoint root.
        generation: the number of its claim.
        head: the newest record.
    """
    if head is None:
        return ClaimedError(
            f"the log of {show(str(root))} was removed, which holds claim {generation} of this process",
            path=str(root),
            hint="start the program again, and do not remove `log/` from a root: lifecycle rules must not, either",
        )
    return ClaimedError(
        f"{show(str(root))} was taken over by {owners.describe(dict(head.owner))}, which made claim {head.generation}; "
        f"ours is {generation}",
        path=str(root),
        hint="two jobs write into one root; stop one, or give them different roots",
    )


def is_alive(root: Location, generation: int) -> bool | None:
    """As `claims.is_alive`, for the claim of a log."""
    head = log.head_of(root)
    if head is None or head.generation != generation:
        return False
    is_dead = owners.is_dead(_owner(root, head), False)
    return None if is_dead is None else not is_dead


def living_claim(root: Location) -> ClaimedError | None:
    """The error for a root that a living process of this host has claimed; None: there is no such process."""
    head = log.head_of(root)
    if head is None or not head.generation:
        return None
    owner = _owner(root, head)
    return owners.claimed(root, owner) if owners.is_dead(owner, False) is False else None


def _check_new(root: Location) -> None:
    """Refuse a folder that holds iterations or something else without a log."""
    store = root.objects
    assert store is not None
    bucket = str(root).partition("://")[2].partition("/")[0]
    if bucket.endswith("--x-s3"):
        raise UnsupportedError(
            f"{show(bucket)} is a bucket of S3 Express One Zone, whose lists are not sorted: the newest save would not "
            "be found",
            path=str(root),
            hint="use a general purpose bucket",
        )
    if root.kind() == "file":
        raise DestinationExistsError(
            f"{show(str(root))} is an object; a checkpoint root is a folder", path=str(root), hint="choose another root"
        )
    found = {name.partition("/")[0] for name, _ in store.below(str(root), max_keys=1000)}
    if MANIFEST_FILE in found:
        raise DestinationExistsError(
            f"{show(str(root))} is a checkpoint itself, and a checkpoint root holds iterations",
            path=str(root),
            hint=f"name the root, such as {show(str(root.parent))}, or another folder",
        )
    copied = sorted(name for name in found if name.startswith("iteration_") and iteration_of(name) is None)
    if copied:
        raise DestinationExistsError(
            f"{show(str(root))} holds {show(copied[0])}, which was copied from a disk, and no `{LOG_FOLDER}/`: saves "
            "into a bucket need a root that they have begun",
            path=str(root),
            hint="save into another folder of the bucket, and begin with `init_from` or `load` from this one",
        )


def _check_dead(root: Location, head: Record) -> None:
    """Refuse a claim whose holder is alive. Raises ClaimedError."""
    is_dead = owners.is_dead(_owner(root, head), False)
    if is_dead is None:
        is_dead = _watch(root, head)
    if not is_dead:
        raise owners.claimed(root, dict(head.owner))


def _watch(root: Location, head: Record) -> bool:
    """Watch the heartbeat of a claim of another host. Returns whether it stood still for the whole time."""
    _log.warning(
        "%s was claimed by %s: waiting %g s to see whether it is alive",
        root,
        owners.describe(dict(head.owner)),
        _WATCH_SECONDS,
    )
    first, deadline, is_last = _beat(root, head.generation), time.monotonic() + _WATCH_SECONDS, False
    while not is_last:
        time.sleep(min(_LOOK_SECONDS, _WATCH_SECONDS / 10))
        is_last = time.monotonic() >= deadline  # one look after it: this process may have been suspended since the last
        if _beat(root, head.generation) != first:
            owner = owners.read_owner(_file(root, head.generation))
            return owner is not None and owner.get("released") is True
    return True


def _beat(root: Location, generation: int) -> Hashable:
    with contextlib.suppress(FileNotFoundError):
        found = _file(root, generation).stat()
        return (found.identity, found.modified_ns)
    return None


def _owner(root: Location, head: Record) -> dict[str, object]:
    """The holder of the claim in force, or that it was released."""
    return owners.read_owner(_file(root, head.generation)) or dict(head.owner)


def _file(root: Location, generation: int) -> Location:
    return root / WRITERS_FOLDER / str(generation)


def _sweep(root: Location, head: Record) -> None:
    """Remove the files of attempts that can no longer be published, and the heartbeats of older claims."""
    known = {one.name for one in head.live} | {one.name for one in head.retired}
    try:
        for entry in root.entries():
            if entry.kind == "folder" and _is_older(entry.name, head) and entry.name not in known:
                log.remove_below(root, entry.name, MANIFEST_FILE)
                _log.warning("%s: the unfinished save %s is removed", root, entry.name)
        store = root.objects
        assert store is not None
        old = [
            name
            for name, _ in store.below(str(root / WRITERS_FOLDER))
            if name.isdecimal() and int(name) < head.generation
        ]
        paths = [str(root / WRITERS_FOLDER / name) for name in old]
        if head.n > 1:  # a probe comes before the first record
            paths += [str(root / log.PROBE_FOLDER / name) for name, _ in store.below(str(root / log.PROBE_FOLDER))]
        if paths:
            filesystem.announce("remove what older claims have left")
            store.remove_files(paths)
        if head.n > 1:
            store.end_uploads(str(root), lambda name: _is_older(name.partition("/")[0], head))
    except ReshardError as error:
        _log.warning("%s: what older saves have left is removed another time: %s", root, error.message)


def _is_older(name: str, head: Record) -> bool:
    """Whether a folder is that of an attempt of an older claim."""
    generation = generation_of(name)
    return generation is not None and generation < head.generation
