"""`.iteration_<number>.verified.json` in a checkpoint root, a file of this package: the last result of verifying it.

    {"version": 1, "state": "<32 hex digits>", "fault": null, "verified_at": "2026-01-31T12:00:00Z"}

The fault is null if every byte matched the manifest. The state is a digest of the manifest's digest and of the size and
the change time of every file. A folder that was saved again, copied or repaired has another state. A record with
another state is ignored, as is a record that is truncated or invalid. The record is a hint for retention. It is never
used in place of the checksums when a checkpoint is read.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.commit import manifest as manifests
from reshard.commit.filesystem import MANIFEST_FILE
from reshard.commit.log_records import generation_of
from reshard.documents.strict_json import parse_json
from reshard.errors import CheckpointNotFoundError, ReshardError, StorageError
from reshard.values.words import show

if TYPE_CHECKING:
    from reshard.commit.manifest import Manifest
    from reshard.storage.location import Location

_MAX_BYTES = 16 << 10
_MAX_FAULT = 1000  # characters
_MODE = 0o644  # a user other than the trainer may verify
_NAME = re.compile(r"\.(iteration_[0-9]{1,18})\.verified\.json")


@dataclass(frozen=True)
class Proof:
    """The result of comparing a checkpoint with its manifest.

    Attributes:
        fault: the first fault; None: every byte matched the manifest.
    """

    fault: str | None


def file_of(folder: Location) -> Location:
    """The path of the record of an iteration folder.

    Example:
        >>> from reshard.storage.location import locate
        >>> str(file_of(locate("output/checkpoint/iteration_00000400")))
        'output/checkpoint/.iteration_00000400.verified.json'
    """
    return folder.with_name(f".{folder.name}.verified.json")


def state_of(folder: Location, manifest: Manifest) -> str:
    """A digest of the manifest, all file sizes and all change times: it changes when a file changes.

    Raises:
        StorageError: the status of a file cannot be read.
    """
    lines = [manifest.digest]
    for name in (MANIFEST_FILE, *manifest.shards, *manifest.files):
        try:
            found = (folder / name).stat()
        except CheckpointNotFoundError:
            lines.append(f"- {name}")
        else:
            lines.append(f"{found.n_bytes} {found.changed_ns} {name}")
    return manifests.digest_of("\n".join(lines).encode())


def read(folder: Location, manifest: Manifest) -> Proof | None:
    """The last result for the current state of a folder; None: there is no valid record. Never raises a ReshardError.

    Args:
        folder: the iteration folder.
        manifest: its manifest.
    """
    path = file_of(folder)
    try:
        content = parse_json(path.read_small(_MAX_BYTES), str(path))
        if not isinstance(content, dict) or content.get("version") != 1 or "fault" not in content:
            return None
        fault = content["fault"]
        if fault is not None and not (isinstance(fault, str) and fault and len(fault) <= _MAX_FAULT):
            return None
        return Proof(fault) if content.get("state") == state_of(folder, manifest) else None
    except ReshardError:
        return None


def write(folder: Location, manifest: Manifest, state: str, fault: str | None) -> None:
    """Record a result, which replaces an earlier one, and remove the records of iterations that no longer exist.

    Args:
        folder: the iteration folder.
        manifest: its manifest.
        state: `state_of` the folder before the comparison began.
        fault: the fault; None: there is none.

    Raises:
        StorageError: the folder changed during the comparison, is a copy in a bucket, or the system failed.
    """
    if state_of(folder, manifest) != state:
        raise StorageError(f"{show(str(folder))} changed while it was verified", path=str(folder))
    now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    reported = None if fault is None else fault[:_MAX_FAULT] or "damaged"
    content = json.dumps({"version": 1, "state": state, "fault": reported, "verified_at": now})
    path = file_of(folder)
    is_there = path.exists()
    is_log = generation_of(folder.name) is not None and path.parent.objects is not None
    if not is_log and path.parent.objects is not None:
        raise StorageError(
            f"{show(str(path))} is not written: no run saves into this root, which was copied into a bucket",
            path=str(path),
        )
    if not is_log and not path.parent.store.is_writable(path.parent.path):
        what = ", the record of an earlier result, cannot be replaced" if is_there else " cannot be written"
        raise StorageError(
            f"{show(str(path))}{what}: this user may not write into {show(str(path.parent))}",
            path=str(path),
            errno=errno.EACCES,
        )
    # Without a rename: a truncated record is ignored, and a crash leaves no temporary file.
    try:
        if is_there:
            path.remove_file()
    except StorageError as error:
        raise StorageError(
            f"{show(str(path))}, the record of an earlier result, cannot be replaced: {error.message}",
            path=str(path),
            errno=error.errno,
        ) from error
    try:
        path.create(content.encode(), _MODE, durable=False)
    except FileExistsError:
        raise StorageError(f"{show(str(path))} was written by another process meanwhile", path=str(path)) from None
    sweep(path.parent)


def sweep(root: Location) -> None:
    """Remove the records of iterations that no longer exist; in a log they go with the iteration. Never raises."""
    if root.objects is not None:
        return
    with contextlib.suppress(ReshardError):
        for name in root.names():
            match = _NAME.fullmatch(name)
            if match is not None and not (root / match[1]).exists():
                (root / name).remove_file()
