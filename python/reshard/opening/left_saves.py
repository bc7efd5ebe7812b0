"""The saves that a run has left: it went on from an older one. Their copies in a second root are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.commit import log, roots, save_log
from reshard.commit import manifest as manifests
from reshard.commit.candidates import left_behind
from reshard.commit.folder_facts import folders_of
from reshard.commit.scrub import is_damage
from reshard.errors import DamagedFileError, ReshardError, StorageError
from reshard.resume import CandidateFacts, Refused, ResumeFacts
from reshard.storage.location import Location, locate

if TYPE_CHECKING:
    from reshard.commit.save_log import SaveRecord


class LeftSaves:
    """Which saves a run of this host went back behind.

    A save is known by the attempt and the digest of its manifest, which its copies have, too. The log of saves of the
    run has its saves in the order in which they were made, though they may be removed by now. A save of iteration k
    leaves all that were made before it from k on; a rollback to k repeats its line, and so leaves those above. Those
    that a later save recorded as skipped are left, too, and those that either root refuses. The others, up to the
    tracker, are the line of the run. A save of another host counts as the save that it went on from, which the log of
    the copies says.

    A line of the log can be missing. A copy that is not known to be left, nor on the line itself, is left by its number
    if a save of the run recorded the number as skipped, or if it is above the tracker and not above a folder that is.
    Only that it went on from a save of the line that was made since proves the opposite. This can refuse a copy that
    is of the line.

    Args:
        own: the candidates of the run.
        other: those of the second root.

    Attributes:
        warnings: what could not be looked at, as sentences.
    """

    def __init__(self, own: ResumeFacts, other: ResumeFacts) -> None:
        self.warnings: list[str] = []
        root = locate(own.path)
        self._tracker, folders = roots.read_tracker(root)[0], folders_of(root)
        self._skipped: dict[int, int] = {}  # the last generation that recorded a number
        for folder in folders:
            for number in folder.passed_over:
                self._skipped[number] = max(self._skipped.get(number, 0), folder.generation or 0)
        above = [one.iteration or 0 for one in own.candidates if isinstance(one.state, Refused)]
        self._last = max(above, default=0)
        behind = left_behind(folders, self._tracker)
        generations = {folder.iteration: folder.generation or 0 for folder in folders}
        gone: set[str] = set()
        line: list[SaveRecord] = []
        for save in self._lines(root):
            while line and line[-1].iteration >= save.iteration:
                gone |= _names(line.pop())
            line.append(save)
        self._line: dict[str, int] = {}  # the generation of a save
        for save in line:
            number = save.iteration
            if number in behind and save.generation < generations[behind[number]]:
                gone |= _names(save)
            elif self._tracker is None or number <= self._tracker:  # a tracker can be older: a power cut took the newer
                self._line |= dict.fromkeys(_names(save), save.generation)
        self._refused: set[str] = set()
        self._known: dict[str, frozenset[str]] = {}  # by the path of a candidate, and by its digest
        self._parents: dict[str, str | None] = {}
        self._further = log.parents(locate(other.path))
        refused = [one for facts in (own, other) for one in facts.candidates if isinstance(one.state, Refused)]
        self._is_needed = bool(gone or self._skipped or refused)
        if not self._is_needed:
            return
        for one in refused:
            self._refused |= self._names_of(one)
        for one in own.candidates:
            if not isinstance(one.state, Refused):  # the run may have gone forward again
                self._line |= dict.fromkeys(self._names_of(one), generations.get(one.iteration or 0, 0))
        for one in other.candidates:
            self._names_of(one)
        self._gone = (gone - self._line.keys()) | self._refused

    def holds(self, one: CandidateFacts, *, is_own: bool) -> bool:
        """Whether a candidate is one of them, or one of another host that went on from one of them."""
        if not self._is_needed:
            return False
        names = self._names_of(one)
        if is_own:
            return not names.isdisjoint(self._refused)
        if not names.isdisjoint(self._line.keys() - self._gone):
            return False
        went_on_from = -1  # the generation of the save of the line
        while names:
            if not names.isdisjoint(self._gone):
                return True
            if not names.isdisjoint(self._line):
                went_on_from = max(self._line[name] for name in names & self._line.keys())
                break
            names = self._parent(names)
        number = one.iteration or 0
        if number in self._skipped:
            return went_on_from < self._skipped[number]
        return self._tracker is not None and self._tracker < number <= self._last

    def _lines(self, root: Location) -> list[SaveRecord]:
        """The saves in the log of the run."""
        try:
            return save_log.read_all(root)
        except DamagedFileError as error:
            self.warnings.append(f"copies are told apart by their numbers: {error.message}")
            return []

    def _names_of(self, one: CandidateFacts) -> frozenset[str]:
        """The attempt and the digest of a candidate; none if they cannot be told.

        Raises:
            StorageError: the system or the service failed.
        """
        if one.path not in self._known:
            try:
                head = manifests.read_head(roots.published(locate(one.path)))
            except ReshardError as error:
                if isinstance(error, StorageError) and not is_damage(error):
                    raise
                self._known[one.path] = frozenset()
            else:
                self._known[one.path] = self._known[head.digest] = frozenset((head.attempt, head.digest))
        return self._known[one.path]

    def _parent(self, names: frozenset[str]) -> frozenset[str]:
        """The save that one of the second root went on from; none if that is not known."""
        while names.isdisjoint(self._parents):
            try:
                found = next(self._further, None)
            except DamagedFileError as error:
                self.warnings.append(f"copies of older saves are told apart by their numbers: {error.message}")
                found = None
            if found is None:
                return frozenset()
            self._parents.setdefault(*found)
        digest = next(self._parents[name] for name in names if name in self._parents)
        return frozenset() if digest is None else self._known.get(digest, frozenset((digest,)))


def _names(one: SaveRecord) -> set[str]:
    """The attempt and the digest of a save, without those that are not recorded."""
    return {one.attempt, one.digest or one.attempt} - {"0" * 32}
