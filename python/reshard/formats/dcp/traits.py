"""The traits of a folder of `torch.distributed.checkpoint`."""

from __future__ import annotations

from reshard.values.traits import Traits

TRAITS = Traits("dcp", has_sums=True, counters="value `step`, `global_step` or `iteration`")
