"""Layouts of whole models: the layout file, where it can come from, and what it makes of a checkpoint's tensors.

In reading order: `file` (what may stand in a layout file), `resolve` (which rule and place each key gets), `bind` (the
same as geometry), then where layouts come from: `like` (another checkpoint), `tp_plan` (transformers' plans),
`presets` (Hugging Face families), and strategy files of MindSpore: `strategy_file` (record by record), `strategy` (what
they mean), `strategy_folder` (which make up one), `strategy_layout` and `strategy_writer` (as layouts, and back).
`patterns` serves them all; the YAML is read by `reshard.strict_yaml` and `reshard.fields`. Nothing here reads tensors.
"""

from __future__ import annotations

from reshard.layout.bind import BoundLayout
from reshard.layout.file import Block, Flat, Optimizer, Place, Rule
from reshard.layout.model import ModelLayout, as_layout, write_strategy
from reshard.layout.resolve import Join
from reshard.layout.strategy import DeviceCut, Strategy, box_of
from reshard.layout.strategy_file import is_strategy
from reshard.layout.strategy_folder import merge_strategies, read_stages, read_strategy

__all__ = [
    "Block",
    "BoundLayout",
    "DeviceCut",
    "Flat",
    "Join",
    "ModelLayout",
    "Optimizer",
    "Place",
    "Rule",
    "Strategy",
    "as_layout",
    "box_of",
    "is_strategy",
    "merge_strategies",
    "read_stages",
    "read_strategy",
    "write_strategy",
]
