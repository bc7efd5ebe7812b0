"""Commit of an iteration to a checkpoint root: after a crash, the old or the new iteration is complete.

    begin     claim the root once a process, recover what a crash left, check the request, give a folder for the files
              (every rank writes and syncs its files in it)
    seal      check that every file is there, write checksums.bin, then manifest.json, last
    publish   unless another process has claimed the root: from now on a restart finds the iteration
    abandon   leave nothing of an attempt that will not be published

How that is done is a `CommitProtocol`; `protocol_of` says which one a root has. `folder_protocol` does it in a file
system, by renames; `log_protocol` in an object store, by a log of records. The functions of this module call the
protocol of their root.

Only the coordinator calls them; the other ranks know only the folder. Nothing here chooses the content of files, nor
the old iterations that are kept (`retention`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from reshard.commit import claims, folder_protocol, log_protocol
from reshard.commit.attempts import Attempt, Content, Retired
from reshard.storage.location import locate_root
from reshard.values.arguments import checked

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from reshard.commit.attempts import FileRecord
    from reshard.commit.manifest import Manifest, PlainEntry
    from reshard.commit.session import Claim
    from reshard.errors import ReshardError
    from reshard.storage.location import Location


class CommitProtocol(Protocol):
    """How a root is changed, so that it is whole after a crash at any time. A module with these functions is one.

    Roots are absolute. The functions of the same names in this module say what each has to do.
    """

    def claim_root(self, root: Location, *, takeover: bool, durable: bool, folder_mode: int) -> Claim:
        """See `protocol.claim_root`."""

    def begin(
        self,
        root: Location,
        iteration: int,
        *,
        planned_bytes: int,
        durable: bool,
        overwrite: bool,
        rollback: bool,
        takeover: bool,
        folder_mode: int,
    ) -> Attempt:
        """See `protocol.begin`."""

    def seal(self, attempt: Attempt, content: Content) -> Manifest:
        """See `protocol.seal`."""

    def publish(self, attempt: Attempt, manifest: Manifest, log_save: Callable[[], Sequence[Location]]) -> list[str]:
        """See `protocol.publish`."""

    def abandon(self, attempt: Attempt) -> None:
        """See `protocol.abandon`."""

    def release(self, root: Location) -> None:
        """See `protocol.release`."""

    def recover(
        self, root: Location, *, roll_forward: bool = True, durable: bool = True, takeover: bool = False
    ) -> list[str]:
        """See `protocol.recover`."""

    def retire(
        self, root: Location, choose: Callable[[], Sequence[tuple[int, str]] | None], *, durable: bool
    ) -> Retired | None:
        """See `protocol.retire`."""

    def clean(self, root: Location) -> None:
        """See `protocol.clean`."""

    def pin(self, root: Location, iteration: int) -> None:
        """See `protocol.pin`."""

    def unpin(self, root: Location, iteration: int) -> None:
        """See `protocol.unpin`."""

    def go_back(self, root: Location, check: Callable[[], int]) -> None:
        """See `protocol.go_back`."""

    def obstacle(self, root: Location) -> ReshardError | None:
        """See `protocol.obstacle`."""


_FOLDERS: CommitProtocol = folder_protocol
_LOG: CommitProtocol = log_protocol


def protocol_of(root: Location) -> CommitProtocol:
    """The protocol of a root: that of its store."""
    return _FOLDERS if root.objects is None else _LOG


# -- an attempt


def begin(
    root: Location,
    iteration: int,
    *,
    planned_bytes: int = 0,
    durable: bool = True,
    overwrite: bool = True,
    rollback: bool = False,
    takeover: bool = False,
    folder_mode: int = 0o777,
) -> Attempt:
    """Begin to save an iteration: claim and recover the root, and create an empty staging folder.

    Args:
        root: the checkpoint root; it is created if it is missing.
        iteration: the iteration that is saved.
        planned_bytes: bytes that will be written; the free space must be 5 % larger.
        durable: sync everything, so that it survives a power failure.
        overwrite: whether an existing iteration is replaced.
        rollback: whether the tracker may move down to this iteration.
        takeover: replace the claim of another process, even if it is alive.
        folder_mode: permission bits of created folders, less the umask.

    Raises:
        ArgumentError: the iteration is not an integer from 0 to 10**18 - 1, or below the tracker's without `rollback`.
        ClaimedError: another process writes into the root, or has taken it over.
        DestinationExistsError: the iteration exists without `overwrite`, or the root is not a folder.
        StorageError: there is not enough space, a folder of the root is on another file system, or the system failed.

    Example:
        >>> from reshard.storage.location import locate
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     attempt = begin(locate(root), 400)
        ...     (attempt.staging / "common.json").replace("{}")
        ...     warnings = publish(attempt, seal(attempt, {}, world_size=1))
        ...     release()
        ...     attempt.folder.name, attempt.folder.names()
        ('iteration_00000400', ['.tracked', 'checksums.bin', 'common.json', 'manifest.json'])
    """
    place = root.absolute()
    return protocol_of(place).begin(
        place,
        iteration,
        planned_bytes=planned_bytes,
        durable=durable,
        overwrite=overwrite,
        rollback=rollback,
        takeover=takeover,
        folder_mode=folder_mode,
    )


def seal(
    attempt: Attempt,
    shards: Mapping[str, tuple[FileRecord, int]],
    *,
    world_size: int,
    unsynced: Sequence[str] = (),
    known: Mapping[str, PlainEntry | None] | None = None,
    passed_over: Sequence[int] = (),
    ckpt_status: int | None = None,
    metrics: Mapping[str, int | float] | None = None,
    file_mode: int = 0o666,
) -> Manifest:
    """Check the staging folder and write the commit record into it, as the last file.

    Args:
        attempt: what `begin` returned.
        shards: by file name, the writer's record of each shard file, and the writer's rank.
        world_size: number of ranks that the checkpoint is written for.
        unsynced: names of files in the folder that this process wrote and did not sync. They are synced before the
            manifest gets its name.
        known: size and digest of other files, by name, as their writer computed them; those of the rest are read.
        passed_over: iterations that the run skipped when it resumed below them.
        ckpt_status: the status that the health monitor reports, or None.
        metrics: numbers by name that are stored with the iteration.
        file_mode: permission bits of the created files, less the umask.

    Returns:
        The manifest. It lists all other files in the folder with their digests.

    Raises:
        DamagedFileError: a shard file is missing or does not have the reported size, or the folder has an unexpected
            shard file or an entry that is not a file.
        ClaimedError: another process has taken the root over.
        StorageError: the system failed; call `abandon`.
    """
    content = Content(
        shards=shards,
        world_size=world_size,
        unsynced=unsynced,
        known=known or {},
        passed_over=tuple(passed_over),
        ckpt_status=ckpt_status,
        metrics=metrics or {},
        file_mode=file_mode,
    )
    return protocol_of(attempt.root).seal(attempt, content)


def publish(attempt: Attempt, manifest: Manifest, log: Callable[[], Sequence[Location]] = tuple) -> list[str]:
    """Make a sealed iteration the one that a restart finds.

    When this returns, a restart finds the iteration; with `durable` it survives a power failure.

    Args:
        attempt: what `begin` returned.
        manifest: what `seal` returned.
        log: called when the tracker names the iteration. Returns files of the root that it has changed; they are synced
            together with the name of the tracker.

    Returns:
        Warnings: problems that do not make the save fail.

    Raises:
        ClaimedError: another process has taken the root over; nothing is published.
        DestinationExistsError: the iteration was created meanwhile and may not be replaced; nothing is published.
        DamagedFileError: the staging folder no longer holds this manifest; nothing is published.
        StorageError: the system failed. The iteration is complete, which the message says, or does not exist.
    """
    return protocol_of(attempt.root).publish(attempt, manifest, log)


def abandon(attempt: Attempt) -> None:
    """Remove the files of an attempt that will not be published. Never raises; what remains is removed another time."""
    protocol_of(attempt.root).abandon(attempt)


def release(root: Location | None = None) -> None:
    """Release the claim on a root, or all claims of this process. Happens at its exit too. Never raises.

    Args:
        root: the checkpoint root, whose empty folders are removed too; None: all roots.
    """
    if root is None:
        claims.release()
    else:
        place = root.absolute()
        protocol_of(place).release(place)


# -- a root


def claim_root(root: Location, *, takeover: bool = False, durable: bool = True, folder_mode: int = 0o777) -> Claim:
    """Create a root if it is missing, and claim it for this process.

    Args:
        root: the checkpoint root.
        takeover: replace the claim of another process, even if it is alive.
        durable: sync what is made.
        folder_mode: permission bits of created folders, less the umask.

    Raises:
        ClaimedError: another process writes into the root, or has taken it over.
        DestinationExistsError: the root is no folder.
        StorageError: it cannot be written to.

    Example:
        >>> from reshard.storage.location import locate
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     claim = claim_root(locate(folder) / "new/root")
        ...     release()
        ...     claim.generation
        1
    """
    place = root.absolute()
    return protocol_of(place).claim_root(place, takeover=takeover, durable=durable, folder_mode=folder_mode)


def obstacle(root: Location) -> ReshardError | None:
    """The error with which a save would fail, found without changing files; None: no error was found.

    Args:
        root: the checkpoint root; it may be missing.

    Example:
        >>> from reshard.storage.location import locate
        >>> obstacle(locate("a/new/root")) is None
        True
    """
    place = root.absolute()
    return protocol_of(place).obstacle(place)


def recover(root: Location, *, roll_forward: bool = True, durable: bool = True, takeover: bool = False) -> list[str]:
    """Recover a root before anything is read from it. Afterwards this process holds a claim on the root.

    A checkpoint that was sealed but not published, and is newer than the tracker's, is published. For a checkpoint that
    was published but not tracked, the tracker is updated. A checkpoint that was moved to the trash for a new one that
    was never published is moved back. All other staging folders of dead processes are moved to the trash.

    `begin` does the same, but publishes only iterations below the one that is being saved: a run that resumed below a
    staged iteration saves that iteration again.

    Args:
        root: the checkpoint root. One that does not exist needs no recovery.
        roll_forward: whether unpublished checkpoints are published; otherwise they are moved to the trash.
        durable: sync every change.
        takeover: replace the claim of another process, even if it is alive.

    Returns:
        Descriptions of the actions, one per change.

    Raises:
        ClaimedError: another process writes into the root.
        StorageError: the system failed; the next call continues.

    Example:
        >>> from reshard.storage.location import locate
        >>> recover(locate("there/is/no/such/root"))
        []
    """
    place = root.absolute()
    return protocol_of(place).recover(place, roll_forward=roll_forward, durable=durable, takeover=takeover)


# -- iterations


def retire(
    root: Location, choose: Callable[[], Sequence[tuple[int, str]] | None], *, durable: bool = True
) -> Retired | None:
    """Remove iterations. One that is being read stays.

    Args:
        root: the checkpoint root.
        choose: returns number and name of those to remove, in this order; None: none now, and `retire` is called again.
            It looks at the root, and is called while no other process changes it, or again if one did.
        durable: sync every change.

    Returns:
        What was removed, and why the others stay; None if `choose` returned that. What the system refuses is a warning.

    Raises:
        StorageError: the root cannot be listed or locked. Nothing is removed.

    Example:
        >>> import numpy as np, reshard
        >>> from reshard.storage.location import locate
        >>> for number in (1, 2):
        ...     _ = reshard.save("retired", number, {"w": np.zeros(4)})
        >>> removed = retire(locate("retired"), lambda: [(1, "iteration_00000001")])
        >>> None if removed is None else list(removed.sizes)
        [1]
    """
    place = root.absolute()
    return protocol_of(place).retire(place, choose, durable=durable)


@checked
def pin(root: str | os.PathLike[str], iteration: int) -> None:
    """Keep an iteration whatever the retention; a second call has no effect.

    Raises:
        CheckpointNotFoundError: there is no such iteration.
        StorageError: the system failed.
    """
    place = locate_root(root)
    protocol_of(place).pin(place, iteration)


@checked
def unpin(root: str | os.PathLike[str], iteration: int) -> None:
    """Undo `pin`: retention may remove the iteration again.

    Raises:
        CheckpointNotFoundError: there is no such iteration.
        StorageError: the system failed.
    """
    place = locate_root(root)
    protocol_of(place).unpin(place, iteration)


def clean(root: Location) -> None:
    """Remove files of iterations that were retired before, and that were read then; warnings are logged.

    Example:
        >>> from reshard.storage.location import locate
        >>> clean(locate("there/is/no/such/root"))
    """
    place = root.absolute()
    protocol_of(place).clean(place)


def go_back(root: Location, check: Callable[[], int]) -> None:
    """Make the tracker name an iteration, which may be an older one. Those above it stay, and a restart skips them.

    Args:
        root: the checkpoint root, which this process claims for it.
        check: returns the iteration. It is called while no other process changes the root, and raises an error if the
            iteration cannot be used.

    Raises:
        ClaimedError: another process writes into the root.
        CheckpointNotFoundError: there is no such iteration.
        StorageError: the system failed. The tracker names the old iteration or the new one.

    Example:
        >>> import numpy as np, reshard
        >>> from reshard.storage.location import locate
        >>> for number in (1, 2):
        ...     _ = reshard.save("gone_back", number, {"w": np.zeros(4)})
        >>> go_back(locate("gone_back"), lambda: 1)
        >>> reshard.open("gone_back").iteration
        1
    """
    place = root.absolute()
    protocol_of(place).go_back(place, check)
