"""How the arrays of tensor-parallel ranks make up a tensor: the files of the older folders do not record it.

Column-parallel layers divide dim 0, row-parallel layers dim 1 of their weight; everything else is whole on every rank.
A gated `linear_fc1` has the gate rows of each rank before its up rows. These rules are a layout with the axis `tp`; the
rules of a given layout are tried first.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard import _core
from reshard.errors import LayoutError
from reshard.layout.model import ModelLayout
from reshard.layout.partition import Partition, TensorLayout
from reshard.layout.patterns import Matcher
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Sequence

_AXIS = "tp"
_COLUMN = (
    r"re:(?:.*\.)?(?:linear_qkv|linear_q|linear_kv|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|word_embeddings|"
    r"output_layer|query_key_value|dense_h_to_4h)\.(?:weight|bias)"
)
_FC1 = r"re:(?:.*\.)?linear_fc1\.(?:weight|bias)[0-9]*"
_ROW = r"re:(?:.*\.)?(?:linear_proj|linear_fc2|dense_4h_to_h|self_attention\.dense)\.weight[0-9]*"


class MergeRules:
    """The rules for a number of tensor-parallel ranks.

    Example:
        >>> rules = MergeRules(2, is_gated=False, given=None)
        >>> rules.layout("decoder.layers.0.mlp.linear_fc2.weight", (8, 5)).shape
        (8, 10)
    """

    def __init__(self, n_ranks: int, *, is_gated: bool, given: ModelLayout | None) -> None:
        """Make the rules.

        Args:
            n_ranks: the number of tensor-parallel ranks.
            is_gated: whether `linear_fc1` has gate and up rows.
            given: a layout whose rules are tried first, or None. It is not bound, because the global shape of a tensor
                follows from its rule and the part of a rank.

        Raises:
            LayoutError: the given layout has another mesh.
        """
        if given is not None and dict(given.mesh) != {_AXIS: n_ranks}:
            raise LayoutError(
                f"the layout has the mesh {dict(given.mesh)}, the checkpoint has {n_ranks} tensor-parallel ranks",
                hint=f"the mesh of a layout for such a checkpoint is {{{_AXIS}: {n_ranks}}}",
            )
        fc1 = {"match": _FC1, "cut": [_AXIS], **({"blocks": {0: 2}} if is_gated else {}), "optional": True}
        rules = [
            fc1,
            {"match": _COLUMN, "cut": [_AXIS], "optional": True},
            {"match": _ROW, "cut": [None, _AXIS], "optional": True},
            {"match": "*"},  # those of all other keys; it stays the last rule
        ]
        own = ModelLayout.from_mapping({"mesh": {_AXIS: n_ranks}, "rules": rules})
        self._rules = (*(() if given is None else given.rules), *own.rules)
        self._matcher = Matcher([rule.match for rule in self._rules[:-1]])
        self._mesh = _core.Mesh([(_AXIS, n_ranks)])
        self._n_ranks = n_ranks
        self._layouts: dict[tuple[int, tuple[int, ...]], _core.Layout] = {}

    def layout(self, key: str, local: Sequence[int]) -> _core.Layout:
        """The layout of a tensor over the tensor-parallel ranks, from the shape of the array of one rank.

        Raises:
            LayoutError: the rule of a given layout does not fit the array.
        """
        found = self._matcher.find(key)
        at = len(self._rules) - 1 if found is None else found[0], tuple(local)
        if at not in self._layouts:
            self._layouts[at] = self._layout(key, tuple(local), self._rules[at[0]].partition)
        return self._layouts[at]

    def _layout(self, key: str, local: tuple[int, ...], partition: Partition) -> _core.Layout:
        if not local:
            partition = Partition()
        shape = tuple(extent * (self._n_ranks if partition.axes_of(dim) else 1) for dim, extent in enumerate(local))
        if len(partition.cut) > len(local):
            if any(partition.cut[len(local) :]):
                raise LayoutError(f"the rule of {show(key)} divides more dims than its {len(local)}", key=key)
            partition = replace(partition, cut=partition.cut[: len(local)])
        layout = _core.Layout(self._mesh, TensorLayout(shape, partition))
        if layout.local_shape(0) != local or math.prod(shape) < math.prod(local):
            raise LayoutError(
                f"with its rule a rank holds {layout.local_shape(0)} of {show(key)}, the files hold {local}", key=key
            )
        return layout
