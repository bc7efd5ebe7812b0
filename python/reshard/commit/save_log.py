"""`saves.jsonl` in a checkpoint root, a file of this package: one JSON line for every save, the latest last.

    {"iteration": 500, "saved_at": "2025-03-01T12:00:00+00:00", "wall_s": 3.2, "stall_s": 0.4, "n_bytes": 123,
     "metrics": {"loss": 2.17, "grad_norm": "nan"}, "epoch": 7, "attempt": "<32 hex digits>", "ckpt_status": 0,
     "digest": "<32 hex digits>"}

The log is informative. The manifest of an iteration holds its metrics and decides whether it is complete. The order of
the lines tells which copies are of saves that the run has left; without them, numbers do. A rollback repeats the line
of the iteration that it goes back to. Lines that a crash truncated and invalid lines are skipped and counted. Metrics
are encoded by `formats.metrics`.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import io
import json
import logging
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reshard.commit import metrics
from reshard.documents.strict_json import parse_json
from reshard.errors import ArgumentError, CheckpointNotFoundError, DamagedFileError
from reshard.values.events import is_count
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.storage.location import Location

SAVE_LOG_FILE = "saves.jsonl"

_MAX_LINE_BYTES = 64 << 10
_MAX_READ_BYTES = 16 << 20  # the newest 50,000 saves or more
_MAX_BAD_LINES = 10_000  # a file with more invalid lines is not a log
_HEX = re.compile("[0-9a-f]{32}")

_log = logging.getLogger("reshard")


@dataclass(frozen=True)
class SaveRecord:
    """One save, which is one line of the log. Raises `ArgumentError` for invalid values.

    Attributes:
        iteration: of the checkpoint.
        saved_at: when it was published, ISO 8601 with a time zone.
        wall_s: seconds from the call until it was published.
        stall_s: seconds for which the call blocked the trainer.
        n_bytes: bytes of all its files.
        metrics: numbers by name, also scalars of numpy or torch; nan and infinities are allowed.
        generation: generation of the writer's claim; `epoch` in the file.
        attempt: 32 hex digits.
        ckpt_status: the health that was recorded, or None.
        digest: of the manifest; None: not recorded.

    Example:
        >>> SaveRecord(500, "2025-03-01T12:00:00+00:00", 3.2, 0.4, 123, {"loss": 2.17}, attempt="0" * 32).metrics
        {'loss': 2.17}
    """

    iteration: int
    saved_at: str
    wall_s: float
    stall_s: float
    n_bytes: int
    metrics: Mapping[str, int | float] = field(default_factory=dict)
    generation: int = 0
    attempt: str = "0" * 32
    ckpt_status: int | None = None
    digest: str | None = None

    def __post_init__(self) -> None:
        for name in ("iteration", "n_bytes", "generation"):
            _check(is_count(getattr(self, name)), f"`{name}` is not an integer from 0 to 2**63 - 1")
        for name in ("wall_s", "stall_s"):
            _check(
                metrics.is_number(getattr(self, name)) and 0 <= getattr(self, name) < math.inf,
                f"`{name}` is no duration",
            )
        _check(isinstance(self.saved_at, str) and _is_time(self.saved_at), "`saved_at` is no ISO 8601 time with a zone")
        for name, value in (("attempt", self.attempt), ("digest", self.digest or "0" * 32)):
            _check(isinstance(value, str) and bool(_HEX.fullmatch(value)), f"`{name}` is not 32 hex digits")
        _check(self.ckpt_status is None or is_count(self.ckpt_status), "`ckpt_status` is no status")
        try:
            object.__setattr__(self, "metrics", metrics.checked(self.metrics))
        except ArgumentError as error:
            raise ArgumentError(f"a record of a save: {error.message}") from None


def append(root: Location, record: SaveRecord, *, durable: bool = True, mode: int = 0o666) -> None:
    """Append a line to the log of a checkpoint root; creates the log if it does not exist.

    If a crash left a truncated last line, a newline is added to it first.

    Args:
        root: the folder.
        record: the save.
        durable: whether the line is on disk when this returns.
        mode: permission bits of a new log, less the umask.

    Raises:
        ArgumentError: the line would have more than 64 KiB.
        DamagedFileError: the log is a symbolic link or not a regular file.
        StorageError: the system failed to write; the log may end in a truncated line.

    Example:
        >>> from reshard.storage.location import locate
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     for loss in (2.5, 2.25):
        ...         append(locate(root), SaveRecord(500, "2025-03-01T12:00:00+00:00", 3.2, 0.4, 123, {"loss": loss}))
        ...     [(record.iteration, record.metrics) for record in read(locate(root))]
        [(500, {'loss': 2.25})]
    """
    fields = dataclasses.asdict(record) | {"metrics": metrics.to_json(record.metrics)}
    line = json.dumps({_key(name): value for name, value in fields.items()}, allow_nan=False).encode() + b"\n"
    if len(line) > _MAX_LINE_BYTES:
        raise ArgumentError(
            f"the metrics of iteration {record.iteration} make a line of {len(line)} bytes, "
            f"a line of the log has at most {_MAX_LINE_BYTES}"
        )
    (root / SAVE_LOG_FILE).append_line(line, mode, durable=durable)


def read(root: Location) -> list[SaveRecord]:
    """The saves in the log of a checkpoint root, the latest last.

    Of several lines about an iteration, the last one is returned. Of a log of more than 16 MiB only the end is read.
    Lines in another form are skipped; a warning logs how many.

    Returns:
        The records; none if there is no log.

    Raises:
        DamagedFileError: the log is a symbolic link, not a regular file, or has more than 10,000 lines in another form.
        StorageError: the system failed to read it.
    """
    records: dict[int, SaveRecord] = {}
    for record in read_all(root):
        records.pop(record.iteration, None)
        records[record.iteration] = record
    return list(records.values())


def read_all(root: Location) -> list[SaveRecord]:
    """As `read`, with all saves of an iteration that was saved more than once.

    Raises:
        DamagedFileError, StorageError: as `read`.
    """
    path = root / SAVE_LOG_FILE
    try:
        data = path.read_tail(_MAX_READ_BYTES + 1)
    except CheckpointNotFoundError:
        return []
    lines = io.BytesIO(data)
    if len(data) > _MAX_READ_BYTES:
        lines.readline()  # the end of one
    records: list[SaveRecord] = []
    n_bad = 0
    for line in lines:
        if line == b"\n":
            continue
        record = _parse(line, str(path))
        if record is not None:
            records.append(record)
            continue
        n_bad += 1
        if n_bad > _MAX_BAD_LINES:
            raise DamagedFileError(
                f"{show(str(path))} is not a log of saves: more than {_MAX_BAD_LINES} lines have another form",
                path=str(path),
                hint="move it away; the next save begins a new one, and no checkpoint depends on it",
            )
    if n_bad:
        _log.warning("%s: %d lines are torn or in another form, and are skipped", show(str(path)), n_bad)
    return records


def _key(name: str) -> str:
    """The key in the file of a field of `SaveRecord`."""
    return "epoch" if name == "generation" else name


def _parse(line: bytes, name: str) -> SaveRecord | None:
    """The record of a line; None if the line is not a record."""
    if len(line) > _MAX_LINE_BYTES:
        return None
    try:
        content = parse_json(line, name)
        if not isinstance(content, dict) or not isinstance(content.get("metrics"), dict):
            return None
        content.setdefault("digest", None)  # lines of earlier builds have none
        known: dict[str, Any] = {f.name: content[_key(f.name)] for f in dataclasses.fields(SaveRecord)}
        return SaveRecord(**known | {"metrics": metrics.from_json(content["metrics"])})
    except (DamagedFileError, ArgumentError, KeyError):
        return None


def _check(holds: bool, message: str) -> None:  # noqa: FBT001
    if not holds:
        raise ArgumentError(f"a record of a save: {message}")


def _is_time(text: str) -> bool:
    try:
        return len(text) <= 40 and dt.datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False
