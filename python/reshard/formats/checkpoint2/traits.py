"""The traits of iteration folders, and of folders that only `tiles.json` describes."""

from __future__ import annotations

from reshard.values.traits import Traits

CHECKPOINT2 = Traits("checkpoint2", expects_manifest=True, has_metadata=True, counters="common.json")
TILED = Traits("safetensors")
