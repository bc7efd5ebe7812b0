"""Retention of roots of Checkpoint 2.0, as its saves call it."""

from __future__ import annotations

import functools

from reshard.commit import retention
from reshard.formats.checkpoint2.save import original_fault

apply = functools.partial(retention.apply, original_fault=original_fault)
remove = functools.partial(retention.remove, original_fault=original_fault)
