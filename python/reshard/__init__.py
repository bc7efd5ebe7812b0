"""Checkpoint shard I/O, resharding and resume for large-model training.

Open anything and load any rank's shards under any layout::

    checkpoint = reshard.open("output/checkpoint")
    own = checkpoint.load("layout.yaml", rank=3)
    reshard.convert("output/checkpoint", "hf/")

Importing this package imports no framework; what a name needs is imported when the name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard._core import __version__ as __version__
from reshard.errors import ReshardError as ReshardError
from reshard.lazy import exports

if TYPE_CHECKING:
    from reshard.checkpoint import Checkpoint as Checkpoint
    from reshard.checkpoint import StoredShard as StoredShard
    from reshard.checkpoint import TensorInfo as TensorInfo
    from reshard.commit.event_log import EventLog as EventLog
    from reshard.documents.common_info import CommonInfo as CommonInfo
    from reshard.formats.state import PerRank as PerRank
    from reshard.formats.state import per_rank as per_rank
    from reshard.interop import load_file as load_file
    from reshard.interop import safe_open as safe_open
    from reshard.interop import save_file as save_file
    from reshard.layout import ModelLayout as ModelLayout
    from reshard.names import NameMap as NameMap
    from reshard.opening import open as open  # noqa: A004
    from reshard.options import Checkpoint1Options as Checkpoint1Options
    from reshard.options import Commit as Commit
    from reshard.options import Environment as Environment
    from reshard.options import Exports as Exports
    from reshard.options import Files as Files
    from reshard.options import InitFrom as InitFrom
    from reshard.options import Interrupts as Interrupts
    from reshard.options import Mirror as Mirror
    from reshard.options import Ranks as Ranks
    from reshard.options import Reading as Reading
    from reshard.options import Retention as Retention
    from reshard.options import Select as Select
    from reshard.options import Settings as Settings
    from reshard.options import Strict as Strict
    from reshard.options import Verify as Verify
    from reshard.storage.location import locate as locate
    from reshard.storage.remote import BucketOptions as BucketOptions
    from reshard.values.events import Event as Event
    from reshard.verbs.convert import ConvertReport as ConvertReport
    from reshard.verbs.convert import convert as convert
    from reshard.verbs.convert_files import ConvertFilesReport as ConvertFilesReport
    from reshard.verbs.convert_files import convert_files as convert_files
    from reshard.verbs.diff import DiffReport as DiffReport
    from reshard.verbs.diff import TensorDifference as TensorDifference
    from reshard.verbs.diff import diff as diff
    from reshard.verbs.health import HealthFinding as HealthFinding
    from reshard.verbs.load import Loaded as Loaded
    from reshard.verbs.load import load as load
    from reshard.verbs.load import load_async as load_async
    from reshard.verbs.pending_load import PendingLoad as PendingLoad
    from reshard.verbs.prune import Removed as Removed
    from reshard.verbs.prune import pin as pin
    from reshard.verbs.prune import prune as prune
    from reshard.verbs.prune import unpin as unpin
    from reshard.verbs.rollback import Rollback as Rollback
    from reshard.verbs.rollback import rollback as rollback
    from reshard.verbs.save import PendingSave as PendingSave
    from reshard.verbs.save import SaveReport as SaveReport
    from reshard.verbs.save import Shard as Shard
    from reshard.verbs.save import save as save
    from reshard.verbs.verify import VerifyReport as VerifyReport
    from reshard.verbs.verify import verify as verify

_NAMES = {
    "reshard.checkpoint": ("Checkpoint", "StoredShard", "TensorInfo"),
    "reshard.values.events": ("Event",),
    "reshard.documents.common_info": ("CommonInfo",),
    "reshard.commit.event_log": ("EventLog",),
    "reshard.formats.state": ("PerRank", "per_rank"),
    "reshard.interop": ("load_file", "safe_open", "save_file"),
    "reshard.layout": ("ModelLayout",),
    "reshard.names": ("NameMap",),
    "reshard.opening": ("open",),
    "reshard.options": (
        "Checkpoint1Options",
        "Commit",
        "Environment",
        "Exports",
        "Files",
        "InitFrom",
        "Interrupts",
        "Mirror",
        "Ranks",
        "Reading",
        "Retention",
        "Select",
        "Settings",
        "Strict",
        "Verify",
    ),
    "reshard.storage.location": ("locate",),
    "reshard.storage.remote": ("BucketOptions",),
    "reshard.verbs.convert": ("ConvertReport", "convert"),
    "reshard.verbs.convert_files": ("ConvertFilesReport", "convert_files"),
    "reshard.verbs.diff": ("DiffReport", "TensorDifference", "diff"),
    "reshard.verbs.load": ("Loaded", "load", "load_async"),
    "reshard.verbs.pending_load": ("PendingLoad",),
    "reshard.verbs.prune": ("Removed", "pin", "prune", "unpin"),
    "reshard.verbs.rollback": ("Rollback", "rollback"),
    "reshard.verbs.health": ("HealthFinding",),
    "reshard.verbs.verify": ("VerifyReport", "verify"),
    "reshard.verbs.save": ("PendingSave", "SaveReport", "Shard", "save"),
}

_exported, __getattr__ = exports(__name__, _NAMES)
__all__ = [*_exported, "ReshardError", "__version__"]  # noqa: PLE0604  names, found above


def __dir__() -> list[str]:
    return sorted(__all__)
