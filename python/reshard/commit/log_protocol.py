"""The protocol of a commit in an object store: a log of records, each of which one writer can create.

    begin     claim the root once a process (a record), give a folder that nobody else has
    seal      every file is there: checksums.bin, then manifest.json. It counts for nothing yet
    publish   create the record `commit`: the one request that decides. An older iteration of the number is retired
    retire    create the record `retire`, look at the leases, then remove files

A crash at any time leaves the old state or the new one, and files that no record names: the next claim removes them,
as what was begun under an older claim can never be published. `log_records` has the rules, `log` the requests,
`log_claims` and `leases` who writes and who reads.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reshard.commit import claims, leases, log, log_claims, log_records, proofs, roots
from reshard.commit.attempts import (
    Attempt,
    Retired,
    check_above_tracker,
    check_sealed,
    check_sound,
    claim_of,
    forget_failed,
    mark_failed,
    n_bytes_of,
    seal_files,
)
from reshard.commit.filesystem import MANIFEST_FILE
from reshard.commit.log_records import LOG_FOLDER, Live, SupersededError
from reshard.commit.session import session_of
from reshard.errors import (
    CheckpointNotFoundError,
    DestinationExistsError,
    ReshardError,
    StorageError,
)
from reshard.storage.store import Entry
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reshard.commit.attempts import Content
    from reshard.commit.log_records import Record
    from reshard.commit.manifest import Manifest
    from reshard.commit.session import Claim
    from reshard.storage.location import Location

_MAX_ROUNDS = 20  # in a root that others change meanwhile

_log = logging.getLogger("reshard")


@dataclass
class _Unknown:
    """Attempts of this process that may have been published: their files are not removed.

    Attributes:
        ids: their ids.
    """

    ids: set[str] = field(default_factory=set)


def claim_root(root: Location, *, takeover: bool, durable: bool, folder_mode: int) -> Claim:
    """See `protocol.claim_root`: there are no folders to make."""
    return claims.hold(root, takeover=takeover, durable=durable, folder_mode=folder_mode)


def begin(
    root: Location,
    iteration: int,
    *,
    planned_bytes: int,  # noqa: ARG001  no limit is known
    durable: bool,
    overwrite: bool,
    rollback: bool,
    takeover: bool,
    folder_mode: int,
) -> Attempt:
    """See `protocol.begin`."""
    folder_name = roots.iteration_folder_name(iteration)
    claim = claim_root(root, takeover=takeover, durable=durable, folder_mode=folder_mode)
    head = _head_of(claim)
    if not rollback:
        check_above_tracker(root, iteration, head.tracker)
    if head.by_iteration(iteration) is not None and not overwrite:
        raise DestinationExistsError(
            f"iteration {iteration} of {show(str(root))} exists",
            path=str(root),
            hint="give `overwrite=True` to replace it",
        )
    attempt_id = os.urandom(16).hex()
    folder = root / log_records.attempt_name(folder_name, claim.generation, attempt_id)
    return Attempt(
        root=root,
        iteration=iteration,
        generation=claim.generation,
        id=attempt_id,
        staging=folder,
        folder=folder,
        previous_tracker=head.tracker,
        durable=durable,
        replaces=overwrite,
        session=session_of(root),
        entries=(Entry(LOG_FOLDER, "folder"),),
    )


def seal(attempt: Attempt, content: Content) -> Manifest:
    """See `protocol.seal`."""
    check_sound(attempt)
    return seal_files(attempt, content, _head_of(claim_of(attempt)).tracker)


def publish(attempt: Attempt, manifest: Manifest, log_save: Callable[[], Sequence[Location]]) -> list[str]:
    """See `protocol.publish`."""
    check_sound(attempt)
    claim, root = claim_of(attempt), attempt.root
    warnings: list[str] = []
    check_sealed(attempt, manifest)
    one = Live(attempt.iteration, attempt.folder.name, manifest.digest, passed_over=manifest.passed_over)

    def change(new: Record) -> Record | None:
        old = new.by_iteration(attempt.iteration)
        warnings.clear()
        if old is not None and old.name != one.name:
            if not attempt.replaces:
                raise DestinationExistsError(
                    f"iteration {attempt.iteration} of {show(str(root))} was made while it was being saved",
                    path=str(root),
                    hint="give `overwrite=True` to replace it",
                )
            if old.is_pinned:
                warnings.append(
                    f"iteration {attempt.iteration} was pinned, and this save has replaced its content; it stays pinned"
                )
        return log_records.committed(new, one, claim.generation, begun_at=attempt.previous_tracker)

    attempt.session.of(_Unknown).ids.add(attempt.id)
    try:
        head = log.append(root, log.head_of(root), "commit", change)
    except SupersededError:
        attempt.session.of(_Unknown).ids.discard(attempt.id)
        raise log_claims.superseded(root, claim.generation, log.head_of(root)) from None
    except log.UnknownOutcomeError as error:
        mark_failed(attempt)
        raise StorageError(
            f"it is not known whether iteration {attempt.iteration} was published in {show(str(root))}: "
            f"{error.message}",
            path=str(root),
            errno=error.errno,
            hint=error.hint,
        ) from error
    except BaseException as error:
        if isinstance(error, ReshardError):  # nothing was appended; of another error that is not known
            attempt.session.of(_Unknown).ids.discard(attempt.id)
        mark_failed(attempt)
        raise
    if head.tracker is not None and head.tracker > attempt.iteration:
        warnings.append(f"the tracker names the newer iteration {head.tracker} already and stays there")
    log_save()
    if head.retired:
        warnings += _remove_retired(root, head)
    return warnings


def abandon(attempt: Attempt) -> None:
    """See `protocol.abandon`. Files of a save that may have been published stay: the next claim knows about it."""
    forget_failed(attempt)
    if attempt.id in attempt.session.of(_Unknown).ids:
        return
    store = attempt.root.objects
    assert store is not None
    try:
        with store.cleaning_up(str(attempt.folder)):
            log.remove_below(attempt.root, attempt.folder.name, MANIFEST_FILE)
    except (ReshardError, OSError) as error:
        _log.warning("%s is left over, and removed by a later run: %s", attempt.folder, error)


def release(root: Location) -> None:
    """See `protocol.release`."""
    claims.release(root)


def recover(root: Location, *, roll_forward: bool = True, durable: bool = True, takeover: bool = False) -> list[str]:  # noqa: ARG001
    """See `protocol.recover`: a claim removes what was not published, and nothing is half published."""
    if log.head_of(root) is not None:
        claims.hold(root, takeover=takeover, durable=durable)
    return []


def obstacle(root: Location) -> ReshardError | None:
    """See `protocol.obstacle`."""
    return claims.living_claim(root)


def _head_of(claim: Claim) -> Record:
    """The newest record, under a claim that is in force. Raises ClaimedError, StorageError."""
    return log_claims.head_under(claim.root, claim.generation)


# -- removing


def retire(
    root: Location,
    choose: Callable[[], Sequence[tuple[int, str]] | None],
    *,
    durable: bool,  # noqa: ARG001
) -> Retired | None:
    """See `protocol.retire`. Files go once nobody has a lease on them, now or after a later save."""
    done = Retired()
    for _ in range(_MAX_ROUNDS):
        head = log.head_of(root)
        if head is None:
            raise _no_log(root)
        chosen = choose()
        if chosen is None:
            return None
        names = {name: iteration for iteration, name in chosen if head.by_name(name) is not None}
        if not names:
            break
        made = log_records.retired(log.next_record(head, "retire"), names)
        gone = [one for one in names if made.by_name(one) is None]
        done.sizes = {names[one]: n_bytes_of(root / one) for one in gone}
        # It was chosen by what `head` says: if there is another record meanwhile, it is chosen again.
        if not gone or log.create(root, made):
            head = made if gone else head
            break
        done.sizes = {}
    else:
        raise StorageError(f"{show(str(root))} changed each time it was looked at; try again", path=str(root))
    if head.retired:
        done.warnings += _remove_retired(root, head)
    return done


def clean(root: Location) -> None:
    """See `protocol.clean`."""
    head = log.head_of(root)
    if head is not None and head.retired:
        for line in _remove_retired(root, head):
            _log.warning("%s", line)


def _remove_retired(root: Location, head: Record) -> list[str]:
    """Remove the files of retired folders that nobody reads. Returns warnings: nothing is raised."""
    try:
        now = log.now_ns(root)
        waiting = [one.name for one in head.retired if now - _retired_ns(root, one.since) >= leases.GRACE_SECONDS * 1e9]
        free = leases.unread(root, waiting, now)
        for name in sorted(free):
            log.remove_below(root, name, MANIFEST_FILE)
            proofs.file_of(root / name).remove_file()
        if free:
            log.append(root, head, "removed", lambda new: log_records.removed(new, free))
    except (ReshardError, OSError) as error:
        return [f"retired files are left in {show(str(root))}, and removed another time: {error}"]
    return []


def _retired_ns(root: Location, n: int) -> int:
    path = root / LOG_FOLDER / log_records.record_name(n)
    found = path.store.touched_ns(path.path)
    if found is None:
        raise StorageError(f"{show(str(path))} was removed; records of a log are never removed", path=str(path))
    return found


# -- marks


def pin(root: Location, iteration: int) -> None:
    """See `protocol.pin`."""
    _pin(root, iteration, is_pinned=True)


def unpin(root: Location, iteration: int) -> None:
    """See `protocol.unpin`."""
    _pin(root, iteration, is_pinned=False)


def _pin(root: Location, iteration: int, *, is_pinned: bool) -> None:
    head = log.head_of(root)
    if head is None:
        raise _no_log(root)
    try:
        log.append(
            root,
            head,
            "pin" if is_pinned else "unpin",
            lambda new: log_records.pinned(new, iteration, is_pinned=is_pinned),
        )
    except KeyError:
        roots.folder_of(root, iteration)  # raises
        raise


def go_back(root: Location, check: Callable[[], int]) -> None:
    """See `protocol.go_back`."""
    claim = claims.hold(root)
    for _ in range(_MAX_ROUNDS):
        head, iteration = _head_of(claim), check()
        try:
            made = log_records.gone_back(log.next_record(head, "rollback"), iteration, claim.generation)
        except KeyError:
            roots.folder_of(root, iteration)  # raises
            raise
        if log.create(root, made):
            return
    raise StorageError(f"{show(str(root))} changed each time it was looked at; try again", path=str(root))


def _no_log(root: Location) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"there is no log of saves in {show(str(root))}",
        path=str(root),
        hint="give the folder into which a run saves. One that was copied from a disk is only read here",
    )
