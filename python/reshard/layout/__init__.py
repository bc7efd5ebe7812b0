"""Layouts of whole models: the layout file, its sources, and its application to the tensors of a checkpoint.

In reading order: `partition` (how a tensor is divided), `file` (the layout file), `resolve` (which rule and place each
key gets), `bind` (the same as geometry), `invert` (global shapes from local ones). Layouts come from `like` (another
checkpoint), `tp_plan` (transformers' plans), `presets` (Hugging Face families) and strategy files of MindSpore:
`strategy_file` (records), `strategy` (their meaning), `strategy_folder` (which files belong together),
`strategy_layout` and `strategy_writer` (conversion to a layout, and back). `patterns` is used by all; the YAML is read
by `reshard.documents.strict_yaml` and `reshard.documents.fields`. Nothing here reads tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.lazy import exports

if TYPE_CHECKING:
    from reshard.layout.bind import BoundLayout as BoundLayout
    from reshard.layout.file import LayoutRule as LayoutRule
    from reshard.layout.file import OptimizerRule as OptimizerRule
    from reshard.layout.file import PlaceRule as PlaceRule
    from reshard.layout.model import ModelLayout as ModelLayout
    from reshard.layout.model import as_layout as as_layout
    from reshard.layout.model import write_strategy as write_strategy
    from reshard.layout.partition import Block as Block
    from reshard.layout.partition import Partition as Partition
    from reshard.layout.partition import TensorLayout as TensorLayout
    from reshard.layout.resolve import Join as Join
    from reshard.layout.strategy import DeviceCut as DeviceCut
    from reshard.layout.strategy import Strategy as Strategy
    from reshard.layout.strategy import region_of as region_of
    from reshard.layout.strategy_file import is_strategy as is_strategy
    from reshard.layout.strategy_folder import merge_strategies as merge_strategies
    from reshard.layout.strategy_folder import read_stages as read_stages
    from reshard.layout.strategy_folder import read_strategy as read_strategy

# Importing all of them takes 30 ms, and most uses need one or none.
_NAMES = {
    "reshard.layout.bind": ("BoundLayout",),
    "reshard.layout.file": ("LayoutRule", "OptimizerRule", "PlaceRule"),
    "reshard.layout.model": ("ModelLayout", "as_layout", "write_strategy"),
    "reshard.layout.partition": ("Block", "Partition", "TensorLayout"),
    "reshard.layout.resolve": ("Join",),
    "reshard.layout.strategy": ("DeviceCut", "Strategy", "region_of"),
    "reshard.layout.strategy_file": ("is_strategy",),
    "reshard.layout.strategy_folder": ("merge_strategies", "read_stages", "read_strategy"),
}

__all__, __getattr__ = exports(__name__, _NAMES)
