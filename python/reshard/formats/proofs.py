"""`.iteration_<number>.verified.json` in a checkpoint root, a file of our own: the last result of verifying it.

    {"version": 1, "state": "<32 hex digits>", "fault": null, "verified_at": "2026-01-31T12:00:00Z"}

The fault is null where every byte was as the manifest says. The state is a digest of the manifest's digest and of the
size and the change time of every file: a folder that was saved again, copied or repaired has another one, and the
record then counts for nothing. So does a record that is torn or has another form. The record is a hint for retention.
It is never used in place of the sums when a checkpoint is read.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.errors import ReshardError, StorageError
from reshard.formats import manifest as manifests
from reshard.formats.manifest import MANIFEST_FILE
from reshard.storage.small_files import read_small_file
from reshard.strict_json import parse_json
from reshard.words import show

if TYPE_CHECKING:
    from reshard.formats.manifest import Manifest

__all__ = ["Proof", "file_of", "read", "state_of", "sweep", "write"]

_MAX_BYTES = 16 << 10
_MAX_FAULT = 1000  # characters
_MODE = 0o644  # another user than the trainer may verify
_NAME = re.compile(r"\.(iteration_[0-9]{1,18})\.verified\.json")


@dataclass(frozen=True)
class Proof:
    """What a comparison of a checkpoint with its manifest found.

    Attributes:
        fault: the first thing that was wrong; None: every byte was as the manifest says.
    """

    fault: str | None


def file_of(folder: str | os.PathLike[str]) -> Path:
    """Where the result of an iteration folder is recorded.

    Example:
        >>> file_of("output/checkpoint/iteration_00000400").as_posix()
        'output/checkpoint/.iteration_00000400.verified.json'
    """
    path = Path(folder)
    return path.with_name(f".{path.name}.verified.json")


def state_of(folder: str | os.PathLike[str], manifest: Manifest) -> str:
    """What changes when a file of a folder changes: a digest of the manifest, of all sizes and of all change times.

    Raises:
        StorageError: a file cannot be looked at.
    """
    path = Path(folder)
    lines = [manifest.digest]
    for name in (MANIFEST_FILE, *manifest.shards, *manifest.files):
        try:
            found = (path / name).lstat()
        except FileNotFoundError:
            lines.append(f"- {name}")
            continue
        except OSError as error:
            raise StorageError(
                f"looking at {show(str(path / name))}: {error.strerror}", path=str(path / name), errno=error.errno
            ) from None
        lines.append(f"{found.st_size} {found.st_ctime_ns} {name}")
    return manifests.digest_of("\n".join(lines).encode())


def read(folder: str | os.PathLike[str], manifest: Manifest) -> Proof | None:
    """The last result for a folder as it is now; None: there is none that counts. Never raises a ReshardError.

    Args:
        folder: the iteration folder.
        manifest: its manifest.
    """
    path = file_of(folder)
    try:
        content = parse_json(read_small_file(path, _MAX_BYTES), str(path))
        if not isinstance(content, dict) or content.get("version") != 1 or "fault" not in content:
            return None
        fault = content["fault"]
        if fault is not None and not (isinstance(fault, str) and fault and len(fault) <= _MAX_FAULT):
            return None
        return Proof(fault) if content.get("state") == state_of(folder, manifest) else None
    except ReshardError:
        return None


def write(folder: str | os.PathLike[str], manifest: Manifest, state: str, fault: str | None) -> None:
    """Record a result, in place of an earlier one, and remove the records of iterations that are gone.

    Args:
        folder: the iteration folder.
        manifest: its manifest.
        state: `state_of` the folder before the comparison began.
        fault: what is wrong; None: nothing.

    Raises:
        StorageError: the folder changed since, or the system failed.
    """
    if state_of(folder, manifest) != state:
        raise StorageError(f"{show(str(folder))} changed while it was verified", path=str(folder))
    now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    told = None if fault is None else fault[:_MAX_FAULT] or "damaged"
    content = json.dumps({"version": 1, "state": state, "fault": told, "verified_at": now})
    path = file_of(folder)
    try:
        # Not by a rename: a torn record counts for nothing, and a crash leaves no temporary file.
        if os.path.lexists(path):
            path.unlink()
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, _MODE)
        try:
            os.write(handle, content.encode())
        finally:
            os.close(handle)
    except OSError as error:
        raise StorageError(f"writing {show(str(path))}: {error.strerror}", path=str(path), errno=error.errno) from None
    sweep(path.parent)


def sweep(root: str | os.PathLike[str]) -> None:
    """Remove the records of iterations that are gone. Never raises."""
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match is not None and not os.path.lexists(Path(root) / match[1]):
                Path(entry.path).unlink(missing_ok=True)
