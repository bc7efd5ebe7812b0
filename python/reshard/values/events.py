"""Events of a run: what happened to which iteration, for functions that are given as `on_event=`, and for the log.

`save`, `load`, `prune`, `rollback` and `Checkpointer` call the functions. Nothing here writes a file:
`formats.event_log.EventLog` is a function that appends events to `events.jsonl`. docs/watching.md lists the kinds of
events and their fields.
"""

from __future__ import annotations

import datetime as dt
import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from reshard.errors import ArgumentError, ReshardError
from reshard.values.words import show

if TYPE_CHECKING:
    from reshard import _core

Value: TypeAlias = str | int | float | bool | None
OnEvent: TypeAlias = Callable[["Event"], object] | Sequence[Callable[["Event"], object]]

_MAX_FIELDS = 32
_MAX_TEXT = 4096
_MAX_INTEGER = 1 << 63
_PROGRESS_SECONDS = 1.0  # between two events `writing`
_NAME = re.compile("[a-z][a-z0-9_]{0,31}")

_MAX_WARNED = 1024

# What an operator looks for in the log of a run: these events of rank 0 are logged at the level INFO.
_LOGGED = frozenset(("published", "pruned", "resumed", "rolled_back", "mirrored"))

_log = logging.getLogger("reshard")
_warned: set[tuple[str, str]] = set()  # functions and classes of exceptions that were logged


@dataclass(frozen=True)
class Event:
    """Something that happened in a run. Raises `ArgumentError` for invalid values.

    Attributes:
        kind: "begun", "copied", "writing", "written", "published", "failed", "pruned", "skipped", "resumed",
            "rolled_back", "mirrored" or "not_mirrored"; later versions may have more.
        iteration: the iteration; None: the event is about none.
        time: when it happened, with a time zone.
        rank: the rank that reports it.
        fields: further facts by name, such as `n_bytes`, `seconds` and `reason`: text, numbers, booleans or None.

    Example:
        >>> when = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)
        >>> event = Event("pruned", 400, when, 0, {"n_bytes": 1024, "reason": "not among the newest 5"})
        >>> print(event)
        iteration 400 pruned: n_bytes=1024, reason="not among the newest 5"
        >>> Event.from_json(event.to_json()) == event
        True
    """

    kind: str
    iteration: int | None
    time: dt.datetime
    rank: int = 0
    fields: Mapping[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(isinstance(self.kind, str) and _NAME.fullmatch(self.kind) is not None, "`kind` is not a kind")
        _check(self.iteration is None or is_count(self.iteration), "`iteration` is not an integer from 0 to 2**63 - 1")
        _check(isinstance(self.time, dt.datetime) and self.time.tzinfo is not None, "`time` is no time with a zone")
        _check(is_count(self.rank), "`rank` is not an integer from 0 to 2**63 - 1")
        _check(isinstance(self.fields, Mapping) and len(self.fields) <= _MAX_FIELDS, "`fields` is not a small mapping")
        for name, value in self.fields.items():
            _check(
                isinstance(name, str) and _NAME.fullmatch(name) is not None, f"a field has the name {show(str(name))}"
            )
            _check(_is_value(value), f"the field `{name}` is not a short text, a finite number, a boolean or None")

    def __str__(self) -> str:
        what = self.kind.replace("_", " ")
        text = what if self.iteration is None else f"iteration {self.iteration} {what}"
        facts = (
            f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}"
            for name, value in self.fields.items()
            if value is not None and value != ""
        )
        return f"{text}: {joined}" if (joined := ", ".join(facts)) else text

    def to_json(self) -> dict[str, object]:
        """The JSON object of the event; `time` is in ISO 8601 with milliseconds."""
        return {
            "kind": self.kind,
            "iteration": self.iteration,
            "time": self.time.isoformat(timespec="milliseconds"),
            "rank": self.rank,
            "fields": dict(self.fields),
        }

    @classmethod
    def from_json(cls, value: object) -> Event:
        """The event of a JSON object. Keys that are not known are ignored.

        Raises:
            ArgumentError: it is not the object of an event.
        """
        if not isinstance(value, Mapping) or not isinstance(value.get("time"), str) or len(value["time"]) > 40:
            raise ArgumentError(
                "an event: expected an object with the keys `kind`, `iteration`, `time`, `rank`, `fields`"
            )
        try:
            when = dt.datetime.fromisoformat(value["time"])
            return cls(value["kind"], value["iteration"], when, value["rank"], value["fields"])
        except (KeyError, ValueError) as error:
            if isinstance(error, ReshardError):
                raise
            raise ArgumentError(f"an event: {type(error).__name__}: {show(str(error))}") from None


class Observers(NamedTuple):
    """The functions of `on_event=` on one rank. Calling it makes an event and calls them with it.

    An exception of a function is logged as a warning, once for each function and class of exception, and has no other
    effect: what is observed succeeds or fails by itself.

    Attributes:
        functions: the functions.
        rank: the rank of the events.

    Example:
        >>> seen = []
        >>> Observers.of(seen.append, rank=3)("published", 400, n_bytes=1024)
        >>> seen[0].kind, seen[0].iteration, seen[0].rank, seen[0].fields["n_bytes"]
        ('published', 400, 3, 1024)
    """

    functions: tuple[Callable[[Event], object], ...] = ()
    rank: int = 0

    @classmethod
    def of(cls, on_event: OnEvent | None, rank: int = 0) -> Observers:
        """The functions of an argument: one function, several, or None.

        Args:
            on_event: the argument.
            rank: this rank.
        """
        if on_event is None:
            return cls((), rank)
        return cls((on_event,) if callable(on_event) else tuple(on_event), rank)

    def __call__(self, kind: str, iteration: int | None, **fields: object) -> None:
        """Call the functions with an event of now.

        Args:
            kind: of the event.
            iteration: of the event.
            fields: its fields. Long texts are shortened.
        """
        is_logged = self.rank == 0 and kind in _LOGGED and _log.isEnabledFor(logging.INFO)
        if not self.functions and not is_logged:
            return
        now = dt.datetime.now(dt.UTC)
        now = now.replace(microsecond=now.microsecond // 1000 * 1000)
        event = Event(kind, iteration, now, self.rank, {name: _value(value) for name, value in fields.items()})
        if is_logged:
            _log.info("%s", event)
        for function in self.functions:
            try:
                function(event)
            except Exception as error:  # noqa: BLE001  of the user's code, which must not fail a save
                _warn_once(_name_of(function), type(error).__name__, show(str(error)[:_MAX_TEXT]))

    def first(self, kind: str, iteration: int | None, **fields: object) -> None:
        """As a call, on rank 0; on other ranks nothing. For events of the whole run.

        Args:
            kind: of the event.
            iteration: of the event.
            fields: its fields.
        """
        if self.rank == 0:
            self(kind, iteration, **fields)

    def progress(self, iteration: int, progress: _core.Progress | None) -> Progress:
        """A function for `progress=` that also makes an event `writing`, at most one a second.

        Args:
            iteration: of the events.
            progress: called as well.
        """
        return Progress(self, iteration, progress)


class Progress:
    """Passes progress on, and makes events of it.

    Attributes:
        n_bytes: bytes that are done.
    """

    def __init__(self, observers: Observers, iteration: int, progress: _core.Progress | None) -> None:
        self.n_bytes = 0
        self._observers, self._iteration, self._progress = observers, iteration, progress
        self._last = time.monotonic()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Emits an event if the last one is a second old, and calls the function for progress."""
        self.n_bytes = done_bytes
        now = time.monotonic()
        if now - self._last >= _PROGRESS_SECONDS:
            self._last = now
            self._observers("writing", self._iteration, n_bytes=done_bytes, total_bytes=total_bytes)
        if self._progress is not None:
            self._progress(done_bytes, total_bytes)


def _warn_once(name: str, error: str, message: str) -> None:
    if (name, error) not in _warned and len(_warned) < _MAX_WARNED:
        _warned.add((name, error))
        _log.warning("`on_event`: %s failed: %s: %s (logged once; what it observes goes on)", name, error, message)


def _name_of(function: Callable[[Event], object]) -> str:
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{getattr(named, '__qualname__', '')}"


def _value(value: object) -> Value:
    if isinstance(value, bool | None):
        return value
    if isinstance(value, int):
        return value if -_MAX_INTEGER <= value < _MAX_INTEGER else str(value)
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    text = str(value)
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."


def is_count(value: object) -> bool:
    """Whether a value is an integer from 0 to 2**63 - 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_INTEGER


def _is_value(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= _MAX_TEXT
    if isinstance(value, float):
        return math.isfinite(value)
    return (
        value is None or isinstance(value, bool) or (isinstance(value, int) and -_MAX_INTEGER <= value < _MAX_INTEGER)
    )


def _check(holds: bool, message: str) -> None:  # noqa: FBT001
    if not holds:
        raise ArgumentError(f"an event: {message}")
