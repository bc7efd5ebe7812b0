"""One strategy file as the original writes it: protobuf (`ckpt_strategy_rank_<r>.ckpt`) or JSON, record by record.

A strategy file says of one pipeline stage, or merged of several, how each parameter is cut over the stage's devices.
The records here mirror the file. What they mean for the slice of a rank is told in `strategy`, which files make up one
strategy in `strategy_folder`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LayoutItem"]


@dataclass(frozen=True)
class LayoutItem:
    """How one parameter is cut: one `parallel_layout_item`, with the names of the file.

    Attributes:
        dev_matrix: sizes of the device axes of the stage, outermost first.
        tensor_map: lists of device axes, counted from the innermost (0); -1: none. One list: one entry a dim. Several:
            one list a dim, the most significant axis first.
        param_split_shape: rows of each part of a table that is cut unevenly, or the whole shape (the Python writer), or
            nothing.
        indices_offset: what the rows' indices begin with; empty where `param_split_shape` is no list of rows.
        field: more than 0: a table that is divided by field groups.
        opt_weight_shard_step: distance of the ranks that share a slice further.
        opt_weight_shard_size: in how many parts the ranks that hold the same slice cut it further along dim 0; 0: they
            do not, -1: as many as they are.
    """

    dev_matrix: tuple[int, ...]
    tensor_map: tuple[tuple[int, ...], ...]
    param_split_shape: tuple[int, ...] = ()
    indices_offset: tuple[int, ...] = ()
    field: int = 0
    opt_weight_shard_step: int = 0
    opt_weight_shard_size: int = 0
