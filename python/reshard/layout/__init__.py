"""Layouts of whole models: the layout file, its sources, and its application to the tensors of a checkpoint.

In reading order: `partition` (how a tensor is divided), `file` (the layout file), `resolve` (which rule and place each
key gets), `bind` (the same as geometry), `invert` (global shapes from local ones). Layouts come from `like` (another
checkpoint), `tp_plan` (transformers' plans), `presets` (Hugging Face families) and strategy files of MindSpore:
`strategy_file` (records), `strategy` (their meaning), `strategy_folder` (which files belong together),
`strategy_layout` and `strategy_writer` (conversion to a layout, and back). `patterns` is used by all; the YAML is read
by `reshard.strict_yaml` and `reshard.fields`. Nothing here reads tensors.
"""

from __future__ import annotations

from reshard.layout.bind import BoundLayout
from reshard.layout.file import LayoutRule, OptimizerRule, PlaceRule
from reshard.layout.model import ModelLayout, as_layout, write_strategy
from reshard.layout.partition import Block, Partition, TensorLayout
from reshard.layout.resolve import Join
from reshard.layout.strategy import DeviceCut, Strategy, box_of
from reshard.layout.strategy_file import is_strategy
from reshard.layout.strategy_folder import merge_strategies, read_stages, read_strategy

__all__ = [
    "Block",
    "BoundLayout",
    "DeviceCut",
    "Join",
    "LayoutRule",
    "ModelLayout",
    "OptimizerRule",
    "Partition",
    "PlaceRule",
    "Strategy",
    "TensorLayout",
    "as_layout",
    "box_of",
    "is_strategy",
    "merge_strategies",
    "read_stages",
    "read_strategy",
    "write_strategy",
]
