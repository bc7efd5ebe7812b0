"""Layouts of whole models: the layout file, its sources, and its application to the tensors of a checkpoint.

In reading order: `partition` (how a tensor is divided), `file` (the layout file), `resolve` (which rule and place each
key gets), `bind` (the same as geometry), `invert` (global shapes from local ones). Layouts come from `like` (another
checkpoint), `tp_plan` (transformers' plans), `presets` (Hugging Face families) and strategy files of MindSpore:
`strategy_file` (records), `strategy` (their meaning), `strategy_folder` (which files belong together),
`strategy_layout` and `strategy_writer` (conversion to a layout, and back). `patterns` is used by all; the YAML is read
by `reshard.strict_yaml` and `reshard.fields`. Nothing here reads tensors.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

# Importing all of them takes 30 ms, and most uses need one or none.
_HOMES = {
    "Block": "reshard.layout.partition",
    "BoundLayout": "reshard.layout.bind",
    "DeviceCut": "reshard.layout.strategy",
    "Join": "reshard.layout.resolve",
    "LayoutRule": "reshard.layout.file",
    "ModelLayout": "reshard.layout.model",
    "OptimizerRule": "reshard.layout.file",
    "Partition": "reshard.layout.partition",
    "PlaceRule": "reshard.layout.file",
    "Strategy": "reshard.layout.strategy",
    "TensorLayout": "reshard.layout.partition",
    "as_layout": "reshard.layout.model",
    "box_of": "reshard.layout.strategy",
    "is_strategy": "reshard.layout.strategy_file",
    "merge_strategies": "reshard.layout.strategy_folder",
    "read_stages": "reshard.layout.strategy_folder",
    "read_strategy": "reshard.layout.strategy_folder",
    "write_strategy": "reshard.layout.model",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'reshard.layout' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
