"""Layouts of whole models: the layout file, where it can come from, and what it makes of a checkpoint's tensors.

In reading order: `file` (what may stand in a layout file), `resolve` (which rule and place each key gets), `bind` (the
same as geometry), then where layouts come from: `like` (another checkpoint), `tp_plan` (transformers' plans),
`presets` (Hugging Face families). `patterns` serves them all; the YAML is read by `reshard.strict_yaml` and
`reshard.fields`. Nothing here reads tensors.
"""

from __future__ import annotations

from reshard.layout.bind import BoundLayout
from reshard.layout.file import Block, Flat, Optimizer, Place, Rule
from reshard.layout.model import ModelLayout, as_layout
from reshard.layout.resolve import Join

__all__ = ["Block", "BoundLayout", "Flat", "Join", "ModelLayout", "Optimizer", "Place", "Rule", "as_layout"]
