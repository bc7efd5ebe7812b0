"""The records of the log that a checkpoint root in an object store is, and what may follow each of them.

    <root>/log/<999999999999 - n, 12 digits>.json              record n, which is created once and never changes
    <root>/iteration_00000400.<generation>.<attempt>/...       the files of one attempt; nobody else writes there

The newest record has the first name. Every record holds the whole state: nobody reads two. Record n + 1 is made from
record n, and only one process can create it. A claim is a record, too: the next record of a process that was replaced
has a number that is taken. That is exact, and needs no clock and no lock.

Nothing here reads or writes: each function makes the next record from a record, or refuses to.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

from reshard.documents.strict_json import parse_json
from reshard.errors import DamagedFileError
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

LOG_FOLDER = "log"

Kind: TypeAlias = Literal["claim", "commit", "retire", "removed", "pin", "unpin", "rollback"]

_LAST = 999_999_999_999
_RECORD_FILE = re.compile(r"([0-9]{12})\.json")
_ATTEMPT = re.compile(r"iteration_0*([0-9]{1,18})\.([0-9]{1,12})\.([0-9a-f]{32})")
_STUB = b'{"stub":true}\n'


class Live(NamedTuple):
    """An iteration that is published.

    Attributes:
        iteration: its number.
        name: the folder of its files.
        digest: of its manifest.
        previous_tracker: the iteration that the tracker named before.
        passed_over: iterations that the run which saved it had skipped when it resumed.
        is_pinned: whether it is kept whatever the retention.
    """

    iteration: int
    name: str
    digest: str
    previous_tracker: int | None = None
    passed_over: tuple[int, ...] = ()
    is_pinned: bool = False

    @property
    def generation(self) -> int:
        """The number of the claim under which it was saved."""
        return generation_of(self.name) or 0


class Gone(NamedTuple):
    """A folder that is no longer used, and whose files may still be there.

    Attributes:
        name: the folder.
        since: the record that retired it.
    """

    name: str
    since: int


@dataclass(frozen=True)
class Record:
    """A record of the log: what was done, and the state after it.

    Attributes:
        n: its number, from 1.
        kind: what was done.
        id: 32 hex digits that no other record has.
        at: when, ISO 8601, by the clock of the writer. For people.
        generation: the number of the claim in force; 0: none was ever made.
        owner: who made that claim.
        tracker: the iteration that a restart resumes from; None: there is none.
        live: what is published, by ascending iteration.
        retired: what is to be removed.
    """

    n: int
    kind: Kind
    id: str
    at: str
    generation: int = 0
    owner: Mapping[str, object] = field(default_factory=dict)
    tracker: int | None = None
    live: tuple[Live, ...] = ()
    retired: tuple[Gone, ...] = ()

    def by_name(self, name: str) -> Live | None:
        """The published iteration in a folder."""
        return next((one for one in self.live if one.name == name), None)

    def by_iteration(self, iteration: int) -> Live | None:
        """A published iteration."""
        return next((one for one in self.live if one.iteration == iteration), None)


class SupersededError(Exception):
    """Another process has claimed the root: nothing that the old claim began may be published."""


# -- names


def record_name(n: int) -> str:
    """The file of a record: the newest one is the first by name.

    Example:
        >>> record_name(1), number_of(record_name(1))
        ('999999999998.json', 1)
    """
    return f"{_LAST - n:012d}.json"


def number_of(name: str) -> int | None:
    """The number of a record, of the name of its file."""
    match = _RECORD_FILE.fullmatch(name)
    return _LAST - int(match[1]) if match else None


def attempt_name(folder: str, generation: int, attempt_id: str) -> str:
    """The folder of an attempt.

    Args:
        folder: that of the iteration, as on a disk.
        generation: the number of the claim.
        attempt_id: 32 hex digits.

    Example:
        >>> name = attempt_name("iteration_00000400", 3, "0" * 32)
        >>> iteration_of(name), generation_of(name)
        (400, 3)
    """
    return f"{folder}.{generation}.{attempt_id}"


def iteration_of(name: str) -> int | None:
    """The iteration of the folder of an attempt; None: it is no such folder."""
    match = _ATTEMPT.fullmatch(name)
    return int(match[1]) if match else None


def generation_of(name: str) -> int | None:
    """The generation of the folder of an attempt; None: it is no such folder."""
    match = _ATTEMPT.fullmatch(name)
    return int(match[2]) if match else None


# -- content


def encode(record: Record) -> bytes:
    """The content of the file of a record, with a digest of the rest at its end."""
    content = {
        "version": 1,
        "n": record.n,
        "kind": record.kind,
        "id": record.id,
        "at": record.at,
        "epoch": record.generation,
        "owner": dict(record.owner),
        "tracker": record.tracker,
        "live": [list(one) for one in record.live],
        "retired": [list(one) for one in record.retired],
    }
    body = json.dumps(content, separators=(",", ":")).encode()[:-1]
    return body + b',"digest":"' + _digest(body) + b'"}\n'


def stub() -> bytes:
    """What an old record is replaced with: its number stays taken."""
    return _STUB


def decode(data: bytes, path: str, n: int) -> Record | None:
    """The record in a file; None: it is a stub.

    Args:
        data: the content.
        path: the file, for messages.
        n: the number in its name.

    Raises:
        DamagedFileError: it is no record, or bytes of it are wrong.
    """
    if data == _STUB:
        return None
    try:
        return _parsed(parse_json(data, path), data, n)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedFileError(
            f"{show(path)} is not a record of the log: {error}",
            path=path,
            hint="records are never changed: restore it from a copy of the bucket, or save into another root",
        ) from error


def _parsed(content: Any, data: bytes, n: int) -> Record:
    body, mark, tail = data.rpartition(b',"digest":"')
    if not mark or tail != _digest(body) + b'"}\n':
        raise ValueError("its digest does not match its content")
    if content["version"] != 1:
        raise ValueError(f"it has version {content['version']!r}, this release reads version 1")
    if content["n"] != n:
        raise ValueError(f"it says number {content['n']!r}, its name says {n}")
    if content["kind"] not in get_args(Kind):
        raise ValueError(f"kind {content['kind']!r} is not known")
    live = tuple(
        Live(number, name, digest, tracker, tuple(passed_over), is_pinned)
        for number, name, digest, tracker, passed_over, is_pinned in content["live"]
    )
    for one in live:
        if iteration_of(one.name) != one.iteration:
            raise ValueError(f"{one.name!r} is not a folder of iteration {one.iteration!r}")
    return Record(
        n=n,
        kind=content["kind"],
        id=content["id"],
        at=content["at"],
        generation=content["epoch"],
        owner=content["owner"],
        tracker=content["tracker"],
        live=live,
        retired=tuple(Gone(*one) for one in content["retired"]),
    )


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).hexdigest().encode()


# -- what may follow a record. `n`, `id` and `at` are set by `following`


def following(head: Record | None, kind: Kind, id_: str, at: str) -> Record:
    """The next record, with the state of `head`.

    Args:
        head: the newest record; None: there is none.
        kind: what is done.
        id_: 32 hex digits that no other record has.
        at: when.
    """
    if head is None:
        return Record(1, kind, id_, at)
    return replace(head, n=head.n + 1, kind=kind, id=id_, at=at)


def claimed(new: Record, owner: Mapping[str, object]) -> Record:
    """A claim: its number is the generation of what is saved under it."""
    return replace(new, generation=new.n, owner=owner)


def committed(new: Record, one: Live, generation: int, *, begun_at: int | None) -> Record | None:
    """An iteration is published in place of an older one of its number.

    Args:
        new: the next record.
        one: the iteration; its `previous_tracker` and `is_pinned` are set here.
        generation: of the claim under which it was saved.
        begun_at: the iteration that the tracker named when the save began. The tracker may move down from there only.

    Returns:
        The record; None: it is published already.

    Raises:
        SupersededError: another process has claimed the root.
    """
    if new.by_name(one.name) is not None:
        return None
    if new.generation != generation:
        raise SupersededError
    old = new.by_iteration(one.iteration)
    one = one._replace(previous_tracker=new.tracker, is_pinned=old is not None and old.is_pinned)
    tracker = new.tracker
    if tracker is None or one.iteration >= tracker or tracker == begun_at:
        tracker = one.iteration
    live = sorted((*(other for other in new.live if other is not old), one))
    retired = new.retired if old is None else (*new.retired, Gone(old.name, new.n))
    return replace(new, tracker=tracker, live=tuple(live), retired=retired)


def retired(new: Record, names: Collection[str]) -> Record:
    """Iterations are no longer published. Those that are pinned or named by the tracker stay."""
    gone = [one for one in new.live if one.name in names and not one.is_pinned and one.iteration != new.tracker]
    return replace(
        new,
        live=tuple(one for one in new.live if one not in gone),
        retired=(*new.retired, *(Gone(one.name, new.n) for one in gone)),
    )


def removed(new: Record, names: Collection[str]) -> Record | None:
    """The files of retired folders are gone; None: that is recorded already."""
    left = tuple(one for one in new.retired if one.name not in names)
    return None if left == new.retired else replace(new, retired=left)


def pinned(new: Record, iteration: int, *, is_pinned: bool) -> Record | None:
    """An iteration is pinned or not.

    Args:
        new: the next record.
        iteration: which.
        is_pinned: whether it is pinned from now on.

    Returns:
        The record; None: so it is already.

    Raises:
        KeyError: it is not published.
    """
    one = new.by_iteration(iteration)
    if one is None:
        raise KeyError(iteration)
    if one.is_pinned == is_pinned:
        return None
    live = (other._replace(is_pinned=is_pinned) if other is one else other for other in new.live)
    return replace(new, live=tuple(live))


def went_on_from(earlier: Record, later: Record) -> list[tuple[str, str | None]]:
    """The digest of each save that a record published, and that of the save that it went on from; None: of none.

    Args:
        earlier: the record before it.
        later: the record.

    Example:
        >>> first = claimed(following(None, "claim", "a", "now"), {})
        >>> save = Live(10, attempt_name("iteration_00000010", 1, "0" * 32), "digest")
        >>> second = committed(following(first, "commit", "b", "now"), save, 1, begun_at=None)
        >>> went_on_from(first, second)
        [('digest', None)]
    """
    if later.kind != "commit":
        return []
    tracker = -1 if earlier.tracker is None else earlier.tracker
    found = []
    for one in later.live:
        if earlier.by_name(one.name) is None:
            last = min(one.iteration - 1, tracker)
            below = (other for other in reversed(earlier.live) if other.iteration not in one.passed_over)  # descending
            found.append((one.digest, next((other.digest for other in below if other.iteration <= last), None)))
    return found


def gone_back(new: Record, iteration: int, generation: int) -> Record:
    """The tracker names an iteration, which may be below the one that it named.

    Args:
        new: the next record.
        iteration: which.
        generation: of the claim of the process that goes back.

    Raises:
        SupersededError: another process has claimed the root.
        KeyError: it is not published.
    """
    if new.generation != generation:
        raise SupersededError
    if new.by_iteration(iteration) is None:
        raise KeyError(iteration)
    return replace(new, tracker=iteration)
