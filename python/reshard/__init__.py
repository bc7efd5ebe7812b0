"""Checkpoint shard I/O, resharding and resume for large-model training.

Open anything and load any rank's shards under any layout::

    checkpoint = reshard.open("output/checkpoint")
    own = checkpoint.load("layout.yaml", rank=3)
    reshard.convert("output/checkpoint", "hf/")

Importing this package imports no framework; what a name needs is imported when the name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from reshard._core import __version__
from reshard.errors import ReshardError

if TYPE_CHECKING:
    from reshard.checkpoint import Checkpoint, StoredShard, TensorInfo
    from reshard.events import Event
    from reshard.formats.checkpoint2.names import CommonInfo
    from reshard.formats.event_log import EventLog
    from reshard.formats.state import per_rank
    from reshard.interop import load_file, safe_open, save_file
    from reshard.layout import ModelLayout
    from reshard.names import NameMap
    from reshard.opening import open  # noqa: A004
    from reshard.options import (
        Checkpoint1Options,
        Commit,
        Files,
        InitFrom,
        Interrupts,
        Reading,
        Retention,
        Select,
        Strict,
        Verify,
    )
    from reshard.verbs.convert import ConvertReport, convert
    from reshard.verbs.convert_files import ConvertFilesReport, convert_files
    from reshard.verbs.diff import DiffReport, TensorDifference, diff
    from reshard.verbs.load import Loaded, load, load_async
    from reshard.verbs.pending_load import PendingLoad
    from reshard.verbs.prune import Removed, pin, prune, unpin
    from reshard.verbs.rollback import Rollback, rollback
    from reshard.verbs.verify import VerifyReport, verify
    from reshard.write.save import PendingSave, SaveReport, Shard, save

__all__ = [
    "Checkpoint",
    "Checkpoint1Options",
    "Commit",
    "CommonInfo",
    "ConvertFilesReport",
    "ConvertReport",
    "DiffReport",
    "Event",
    "EventLog",
    "Files",
    "InitFrom",
    "Interrupts",
    "Loaded",
    "ModelLayout",
    "NameMap",
    "PendingLoad",
    "PendingSave",
    "Reading",
    "Removed",
    "ReshardError",
    "Retention",
    "Rollback",
    "SaveReport",
    "Select",
    "Shard",
    "StoredShard",
    "Strict",
    "TensorDifference",
    "TensorInfo",
    "Verify",
    "VerifyReport",
    "__version__",
    "convert",
    "convert_files",
    "diff",
    "load",
    "load_async",
    "load_file",
    "open",
    "per_rank",
    "pin",
    "prune",
    "rollback",
    "safe_open",
    "save",
    "save_file",
    "unpin",
    "verify",
]

_HOMES = {
    "Checkpoint": "reshard.checkpoint",
    "Checkpoint1Options": "reshard.options",
    "Commit": "reshard.options",
    "CommonInfo": "reshard.formats.checkpoint2.names",
    "ConvertFilesReport": "reshard.verbs.convert_files",
    "ConvertReport": "reshard.verbs.convert",
    "DiffReport": "reshard.verbs.diff",
    "Event": "reshard.events",
    "EventLog": "reshard.formats.event_log",
    "Files": "reshard.options",
    "InitFrom": "reshard.options",
    "Interrupts": "reshard.options",
    "Loaded": "reshard.verbs.load",
    "ModelLayout": "reshard.layout",
    "NameMap": "reshard.names",
    "PendingLoad": "reshard.verbs.pending_load",
    "PendingSave": "reshard.write.save",
    "Reading": "reshard.options",
    "Removed": "reshard.verbs.prune",
    "Retention": "reshard.options",
    "Strict": "reshard.options",
    "Rollback": "reshard.verbs.rollback",
    "SaveReport": "reshard.write.save",
    "Select": "reshard.options",
    "Shard": "reshard.write.save",
    "StoredShard": "reshard.checkpoint",
    "TensorDifference": "reshard.verbs.diff",
    "TensorInfo": "reshard.checkpoint",
    "Verify": "reshard.options",
    "VerifyReport": "reshard.verbs.verify",
    "convert": "reshard.verbs.convert",
    "convert_files": "reshard.verbs.convert_files",
    "diff": "reshard.verbs.diff",
    "load": "reshard.verbs.load",
    "load_async": "reshard.verbs.load",
    "load_file": "reshard.interop",
    "open": "reshard.opening",
    "per_rank": "reshard.formats.state",
    "pin": "reshard.verbs.prune",
    "prune": "reshard.verbs.prune",
    "rollback": "reshard.verbs.rollback",
    "safe_open": "reshard.interop",
    "save": "reshard.write.save",
    "save_file": "reshard.interop",
    "unpin": "reshard.verbs.prune",
    "verify": "reshard.verbs.verify",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'reshard' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
