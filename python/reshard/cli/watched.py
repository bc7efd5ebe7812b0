"""The state of a run, for `reshard watch`: from its log of events if there is one, and from the files of its root.

Each look reads what was added to the log, lists the root, and opens the newest complete iteration if it has changed.
Without a log, events are made of the differences between two looks.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import reshard
from reshard.cli.output import collected_warnings
from reshard.commit import claims, event_log, filesystem, roots, save_log, staging, trash
from reshard.errors import CheckpointNotFoundError, ReshardError, StorageError, UnsupportedError
from reshard.formats import health
from reshard.formats.base import RankRoot
from reshard.opening import root_of
from reshard.storage.location import locate
from reshard.values.events import Event

if TYPE_CHECKING:
    from collections.abc import Hashable

_MAX_EVENTS = 1000
_MAX_LOOKS = 3  # at folders that are removed meanwhile
_MAX_NAMES = 64
_MAX_SAVES = 8  # from which the interval between saves follows
_ENDS = ("published", "failed")


@dataclass(frozen=True)
class Newest:
    """The newest complete checkpoint.

    Attributes:
        iteration: its number; None: the format has none.
        name: its folder, or its first file.
        n_bytes: bytes of its files.
        saved_at: when it was saved.
        seconds: how long the save took; None: not known.
        stall_seconds: how long the training waited; None: not known.
        skipped: names of newer checkpoints that are not complete or damaged.
        unhealthy: if it was saved as unhealthy, since when, and why.
    """

    iteration: int | None
    name: str
    n_bytes: int
    saved_at: dt.datetime
    seconds: float | None = None
    stall_seconds: float | None = None
    skipped: tuple[str, ...] = ()
    unhealthy: str | None = None


@dataclass(frozen=True)
class InFlight:
    """A save that has begun and has not ended.

    Attributes:
        iteration: its number.
        begun_at: when it began.
        stage: "begun", "copied", "writing" or "written".
        n_bytes: bytes that rank 0 has written; None: not known.
        total_bytes: bytes that rank 0 will write; None: not known.
        is_alive: whether the process that saves is running; None: not known.
    """

    iteration: int
    begun_at: dt.datetime
    stage: str
    n_bytes: int | None = None
    total_bytes: int | None = None
    is_alive: bool | None = None


@dataclass(frozen=True)
class RunState:
    """What is known of a run.

    Attributes:
        root: the checkpoint root.
        exists: whether it exists.
        source: "events.jsonl" or "files".
        newest: the newest complete checkpoint; None: there is none.
        in_flight: the save in progress; None: there is none.
        interval_seconds: seconds from one save to the next, a mean of the last ones; None: not known.
        events: the last events, oldest first.
        n_bad: lines of the log that are no events.
        problem: why the root could not be read; None: it was.
    """

    root: str
    exists: bool
    source: str
    newest: Newest | None
    in_flight: InFlight | None
    interval_seconds: float | None
    events: tuple[Event, ...]
    n_bad: int
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the state."""
        fields = asdict(replace(self, events=()))
        for part, name in (("newest", "saved_at"), ("in_flight", "begun_at")):
            if fields[part] is not None:
                fields[part][name] = fields[part][name].isoformat(timespec="milliseconds")
        return {**fields, "events": [event.to_json() for event in self.events]}


class Watch:
    """Looks at a root again and again.

    Args:
        root: the checkpoint root, which need not exist yet.
    """

    def __init__(self, root: str) -> None:
        self._root = locate(root)
        self._reader = event_log.EventReader(root)
        self._has_log = False
        self._events: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self._published: deque[Event] = deque(maxlen=_MAX_SAVES)
        self._in_flight: InFlight | None = None
        self._newest: tuple[Hashable, Newest | None] = (None, None)
        self._seen_saves: dict[tuple[int, str], None] = {}
        self._seen_iterations: set[int] = set()

    def look(self) -> tuple[RunState, list[Event]]:
        """The state now, and the events since the last call.

        An error of the system is the `problem` of the state.
        """
        exists, problem, new = self._root.is_folder(), None, list[Event]()

        def look_at_log() -> None:
            new.extend(self._new_events())
            for event in new:
                self._add(event)

        for look in (look_at_log, self._look_at_folders) if exists else ():
            try:
                look()
            except (ReshardError, OSError) as error:
                problem = problem or (error.message if isinstance(error, ReshardError) else str(error))
        state = RunState(
            root=str(self._root),
            exists=exists,
            source=event_log.EVENT_FILE if self._has_log else "files",
            newest=self._with_times(self._newest[1]),
            in_flight=self._in_flight,
            interval_seconds=self._interval(),
            events=tuple(self._events),
            n_bad=self._reader.n_bad,
            problem=problem,
        )
        return state, new

    def _new_events(self) -> list[Event]:
        found = self._reader.new()
        if found or event_log.exists(self._root):
            # Saves from before the log was asked for are in the log of saves.
            before = [] if self._has_log else self._from_saves()
            self._has_log = True
            logged = {event.iteration for event in found if event.kind == "published"}
            is_old = [not found or (one.time < found[0].time and one.iteration not in logged) for one in before]
            return [*itertools.compress(before, is_old), *found]
        return self._from_files()

    def _add(self, event: Event) -> None:
        if event.kind != "writing":
            self._events.append(event)
        if event.kind == "published":
            self._published.append(event)
        if event.rank == 0:
            self._in_flight = _after(self._in_flight, event)

    # -- from files

    def _from_saves(self) -> list[Event]:
        """The saves that were added to the log of saves, as events."""
        events = []
        for save in save_log.read(self._root):
            key = (save.iteration, save.attempt)
            if key in self._seen_saves:
                continue
            self._seen_saves[key] = None
            fields = {"n_bytes": save.n_bytes, "seconds": save.wall_s, "stall_seconds": save.stall_s}
            events.append(Event("published", save.iteration, dt.datetime.fromisoformat(save.saved_at), 0, fields))
        return events

    def _from_files(self) -> list[Event]:
        """Events by the differences from the last call: saves that were published, and iterations that are gone."""
        now = dt.datetime.now(dt.UTC)
        events = self._from_saves()
        there = {iteration for iteration, _ in roots.list_iterations(self._root)}
        events += [Event("pruned", iteration, now) for iteration in sorted(self._seen_iterations - there)]
        self._seen_iterations = there
        return events

    def _look_at_folders(self) -> None:
        """Look at the folders; a few times, where one is published or removed after it was listed."""
        for left in reversed(range(_MAX_LOOKS)):
            try:
                self._look_at_staging()
                self._look_at_newest()
            except CheckpointNotFoundError:
                if not left:
                    raise
            else:
                return

    def _look_at_staging(self) -> None:
        """The save in progress by its folder: whether its process is running, and without a log that it is there."""
        staged = {
            name: parsed
            for name in filesystem.names(self._root / trash.STAGING_FOLDER)
            if (parsed := staging.StagedName.parse(name)) is not None
        }
        newest = max(staged.values(), key=lambda one: (one.generation, one.iteration), default=None)
        if newest is None:
            if not self._has_log:
                self._in_flight = None
            elif self._in_flight is not None:
                self._in_flight = replace(self._in_flight, is_alive=None)
            return
        is_alive = claims.is_alive(self._root, newest.generation)
        if self._in_flight is None or (not self._has_log and self._in_flight.iteration != newest.iteration):
            folder = self._root / trash.STAGING_FOLDER / str(newest)
            begun_at = dt.datetime.fromtimestamp(folder.stat().modified_ns / 1e9, dt.UTC)
            if self._has_log:
                return  # the log knows that it has ended: the folder is about to go
            self._in_flight = InFlight(newest.iteration, begun_at, "begun")
        if self._in_flight.iteration == newest.iteration:
            self._in_flight = replace(self._in_flight, is_alive=is_alive)

    # -- the newest complete checkpoint

    def _look_at_newest(self) -> None:
        place, names, by_rank, tracker = self._root, list[str](), False, None
        with root_of(self._root) or contextlib.nullcontext() as root:
            if root is not None:
                by_rank, tracker, there = isinstance(root, RankRoot), root.order.tracker, root.order.candidates
                names = [one.name for one in there[:_MAX_NAMES]]
                place = root.place(there[0]) if there else place
        state = place.stat()
        key: Hashable = (tracker, tuple(names), state.identity, state.modified_ns)
        if key == self._newest[0]:
            return
        try:
            with collected_warnings(print_on_error=False), reshard.open(self._root) as checkpoint:
                files, manifest = checkpoint.files(), checkpoint.manifest
                place = self._root / files[0].name if by_rank else locate(checkpoint.path)
                at = place.stat(follow_links=True).modified_ns
                when = dt.datetime.fromtimestamp(at / 1e9, dt.UTC)
                if manifest is not None:
                    when = _time_of(manifest.saved_at) or when
                name = names[0] if by_rank else place.name
                n_bytes = sum(file.n_bytes for file in files) if manifest is None else manifest.n_bytes
                skipped = tuple(one for one, _ in checkpoint.skipped)
                is_unhealthy = manifest is not None and manifest.ckpt_status == 1
                known = health.unhealthy(self._root, checkpoint.iteration) if is_unhealthy else None
                unhealthy = None if known is None else str(known)
                newest = Newest(checkpoint.iteration, name, n_bytes, when, skipped=skipped, unhealthy=unhealthy)
        except (StorageError, UnsupportedError):
            raise  # it may be complete
        except ReshardError:
            newest = None
        self._newest = (key, newest)

    def _with_times(self, newest: Newest | None) -> Newest | None:
        if newest is None:
            return None
        save = next((one for one in reversed(self._published) if one.iteration == newest.iteration), None)
        if save is None:
            return newest
        seconds, stall = save.fields.get("seconds"), save.fields.get("stall_seconds")
        return replace(newest, seconds=_number(seconds), stall_seconds=_number(stall))

    def _interval(self) -> float | None:
        times = sorted(event.time for event in self._published)
        return (times[-1] - times[0]).total_seconds() / (len(times) - 1) if len(times) > 1 else None


def _after(in_flight: InFlight | None, event: Event) -> InFlight | None:
    """The save in progress after an event of rank 0."""
    if event.kind == "begun" and event.iteration is not None:
        return InFlight(event.iteration, event.time, "begun", total_bytes=_count(event.fields.get("n_bytes")))
    if event.kind == "resumed":
        return None  # what had begun before was interrupted
    if in_flight is None or event.iteration != in_flight.iteration:
        return in_flight
    if event.kind in _ENDS:
        return None
    if event.kind == "copied" and in_flight.stage == "begun":
        return replace(in_flight, stage="copied")
    if event.kind == "writing":
        total = _count(event.fields.get("total_bytes"))
        return replace(in_flight, stage="writing", n_bytes=_count(event.fields.get("n_bytes")), total_bytes=total)
    if event.kind == "written":
        n_bytes = _count(event.fields.get("n_bytes"))
        return replace(in_flight, stage="written", n_bytes=n_bytes, total_bytes=n_bytes)
    return in_flight


def _time_of(text: str) -> dt.datetime | None:
    try:
        when = dt.datetime.fromisoformat(text)
    except ValueError:
        return None
    return when if when.tzinfo is not None else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
