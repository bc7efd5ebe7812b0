"""Copies the saves of a run into a bucket, in a thread of its coordinator, oldest first.

What is due follows from both roots whenever it is looked at: a process that was killed leaves nothing to remember. A
copy that fails is told, and tried again with the next save. `commit.copies` makes one copy.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING

from reshard import opening
from reshard.commit import log, process_end, protocol, retention, roots
from reshard.commit import manifest as manifests
from reshard.commit.candidates import Order
from reshard.commit.copies import copy_iteration, is_of_the_save
from reshard.commit.session import find_session, session_of
from reshard.errors import ReshardError, UnsupportedError
from reshard.options import Retention
from reshard.storage.location import locate
from reshard.storage.remote import RemoteStore
from reshard.values.words import counted, listed, show

if TYPE_CHECKING:
    from reshard.options import Mirror
    from reshard.storage.location import Location
    from reshard.values.events import Observers

_log = logging.getLogger("reshard")

_TELL_SECONDS = 10.0  # between two lines about the progress of a wait
_STOP_SECONDS = 15.0  # for a copy to end that is given up


class _StoppedError(Exception):
    """The copy is given up."""


def copies_root(root: Location, mirror: Mirror) -> Location:
    """The root of the copies.

    Args:
        root: where the run saves.
        mirror: the options.

    Raises:
        UnsupportedError: it is not in a bucket, or the root is.

    Example:
        >>> from reshard.options import Mirror
        >>> copies_root(locate("/run"), Mirror("/other"))
        Traceback (most recent call last):
        reshard.errors.UnsupportedError: `mirror` is `/other`, which is not in a bucket
        hint: give a folder of a bucket (s3://, gs://, az://)
    """
    found = locate(mirror.url)
    if not isinstance(found.store, RemoteStore) or found.store.is_read_only:
        raise UnsupportedError(
            f"`mirror` is {show(mirror.url)}, which is not in a bucket",
            hint="give a folder of a bucket (s3://, gs://, az://)",
        )
    if not root.is_local:
        raise UnsupportedError(
            f"`mirror` copies saves of a disk into a bucket, and {show(str(root))} is not on a disk of this host",
            path=str(root),
            hint="leave `mirror` out, or save into a folder",
        )
    return found


class Copier:
    """Copies the saves of one root.

    Args:
        root: where the run saves, on this host.
        mirror: the options.
        save_every: steps from one save to the next, if they are due by steps.
        observers: called with events `mirrored` and `not_mirrored`.
        takeover: claim the bucket even if another process that writes there seems to be alive.
    """

    def __init__(
        self, root: Location, mirror: Mirror, *, save_every: int | None, observers: Observers, takeover: bool = False
    ) -> None:
        self.root = root
        self.copies = copies_root(root, mirror)
        self._mirror = mirror
        self._save_every = save_every
        self._observers = observers
        self._takeover = takeover
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._told: set[int] = set()  # saves of this process that are due
        self._given_up: set[int] = set()
        self._said: set[str] = set()
        self._left: tuple[int, ...] = ()
        self._pid = os.getpid()
        self._n_saves = 0
        self._n_bytes = 0
        self._is_wanted = self._is_closing = self._is_stopped = False

    def start(self) -> None:
        """Claim the root of the copies, and begin to copy what an earlier process has left.

        Raises:
            ClaimedError: another process writes there, or another object of this one.
            ReshardError: the bucket cannot be written.
        """
        if self._thread is not None:
            return
        protocol.claim_root(self.copies, takeover=self._takeover)
        session_of(self.copies).own(self)
        self._begin()

    def _begin(self) -> None:
        process_end.call_at_end(_close_all, process_end.SAVES)
        _running.add(self)
        # A daemon thread: `_close_all` waits for it at the end of the process.
        self._thread = threading.Thread(target=self._run, name="reshard-copies", daemon=True)
        self._thread.start()

    def saved(self, iteration: int) -> None:
        """Say that a save was published. Returns at once."""
        self._n_saves += 1
        with self._changed:
            self._given_up.discard(iteration)  # that was another save
            if self._is_due(iteration) or (self._save_every is None and self._n_saves % self._mirror.every == 0):
                self._told.add(iteration)
            self._is_wanted = True
            self._changed.notify_all()
        if self._thread is None or not self._thread.is_alive():
            self._begin()

    def close(self, seconds: float | None = None) -> tuple[int, ...]:
        """Wait until everything that is due is copied, and say what is not.

        Args:
            seconds: how long; None: as the options say.

        Returns:
            The iterations that are not copied.
        """
        thread = self._thread
        if thread is None or os.getpid() != self._pid:
            return ()
        deadline = time.monotonic() + (self._mirror.wait_s if seconds is None else seconds)
        with self._changed:
            self._is_closing = self._is_wanted = True
            self._changed.notify_all()
        while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            thread.join(min(left, _TELL_SECONDS))
            if thread.is_alive():
                _log.info("waiting for copies into %s: %.1f GB are sent", self.copies, self._n_bytes / 1e9)
        if thread.is_alive():
            self._is_stopped = True
            thread.join(_STOP_SECONDS)
        self._thread = None
        _running.discard(self)
        session = find_session(self.copies)
        if session is not None:
            session.leave(self)
        not_copied = tuple(sorted({*self._left, *self._told}))
        if not_copied:
            _log.warning(
                "%s of %s not copied to %s: %s; the next run with this `mirror` copies what is left",
                counted(len(not_copied), "save"),
                self.root,
                self.copies,
                listed(map(str, not_copied)),
            )
        return not_copied

    # -- in the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_wanted, is_last = False, self._is_closing
            self._copy_due()
            with self._changed:
                if is_last or self._is_stopped:
                    return
                self._changed.wait_for(lambda: self._is_wanted)

    def _copy_due(self) -> None:
        """Copy what is due, oldest first, until nothing is left or the bucket fails."""
        passed: set[int] = set()  # saves that cannot be read now: newer ones do not wait for them
        while not self._is_stopped:
            try:
                due = self._due()
            except Exception as error:  # noqa: BLE001  the thread goes on
                self._tell_failure(None, error, is_final=False)
                return
            self._left = tuple(iteration for iteration, _, _ in due)
            iteration, name, is_back = next((one for one in due if one[0] not in passed), (None, "", False))
            if iteration is None:
                return
            with self._changed:
                was_told = iteration in self._told
                self._told.discard(iteration)
            try:
                self._copy(self.root / name, rollback=is_back)
            except Exception as error:  # noqa: BLE001  the thread goes on
                with self._changed:
                    is_final = is_of_the_save(error, self.root) and iteration not in self._told  # saved again meanwhile
                    if is_final:
                        self._given_up.add(iteration)
                    elif was_told:
                        self._told.add(iteration)
                if isinstance(error, _StoppedError):
                    return
                self._tell_failure(iteration, error, is_final=is_final)
                is_local = str(getattr(error, "path", "")).startswith(f"{self.root}/")
                if not (is_final or is_local or isinstance(error, UnsupportedError)):
                    return
                passed.add(iteration)

    def _due(self) -> list[tuple[int, str, bool]]:
        """Iteration and folder of what is to be copied, ascending, and whether the tracker of the copies moves down."""
        with self._changed:
            told = set(self._told)  # before the root is listed: a save that comes later is not missed
        head = log.head_of(self.copies)
        digests = {} if head is None else {one.iteration: one.digest for one in head.live}
        newest = -1 if head is None or head.tracker is None else head.tracker
        roots.list_iterations(self.root)  # refuses a folder that is not there, as on a disk that was unmounted
        order = opening.iterations(self.root) or Order(())
        # One whose replacement was interrupted lies in the trash until the next save.
        there = {
            one.iteration: one.name for one in order.candidates if one.iteration is not None and "/" not in one.name
        }
        for iteration in sorted(told - there.keys()):
            self._told.discard(iteration)
            self._tell_failure(iteration, "retention has removed it before", is_final=True)
        due = []
        for iteration, name in sorted(there.items()):
            is_told = iteration in told
            if order.tracker is None or iteration > order.tracker or iteration in self._given_up:
                continue
            # What an earlier process has saved is copied if it is newer than all copies: they can be of another host.
            if not is_told and (iteration <= newest or not self._is_due(iteration)):
                continue
            if iteration in digests and manifests.read_digest(self.root / name) == digests[iteration]:
                self._told.discard(iteration)
                continue
            due.append((iteration, name, iteration < newest))
        return due

    def _is_due(self, iteration: int) -> bool:
        every = self._mirror.every
        return every == 1 or (self._save_every is not None and iteration % (every * self._save_every) == 0)

    def _copy(self, folder: Location, *, rollback: bool) -> None:
        started = time.monotonic()
        manifest = copy_iteration(folder, self.copies, rollback=rollback, advance=self._advance)
        self._observers(
            "mirrored",
            manifest.iteration,
            n_bytes=manifest.n_bytes,
            seconds=time.monotonic() - started,
            path=str(self.copies / folder.name),
        )
        if self._mirror.keep is None:
            return
        removed = retention.remove(
            self.copies,
            Retention(keep=self._mirror.keep),
            original_fault=lambda _: "it has no manifest",
            progress=lambda *_: self._advance(0),
        )
        for line in removed.warnings:
            if line not in self._said:
                _log.warning("%s: %s", self.copies, line)
                self._said.add(line)

    def _advance(self, n_bytes: int) -> None:
        self._n_bytes += n_bytes
        if self._is_stopped:
            raise _StoppedError

    def _tell_failure(self, iteration: int | None, reason: object, *, is_final: bool) -> None:
        what = "the saves are" if iteration is None else f"iteration {iteration} is"
        text = reason.message if isinstance(reason, ReshardError) else str(reason)
        after = "it is not tried again" if is_final else "it is tried again with the next save"
        _log.warning("%s not copied to %s: %s (%s)", what, self.copies, text, after)
        self._observers("not_mirrored", iteration, reason=text, is_final=is_final)


_running: set[Copier] = set()


def _close_all() -> None:
    """Wait for the copies at the end of the process."""
    for one in list(_running):
        one.close()


# A fork has no thread of its parent.
os.register_at_fork(after_in_child=_running.clear)
