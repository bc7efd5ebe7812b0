"""Name maps: what the tensors of one naming are in another, renamed, fused, split, stacked, transposed or tied.

`file` says what may stand in one, `resolve` lets it meet keys and shapes, `part_map` converts tiles. Nothing
here opens a checkpoint or moves a byte.
"""

from reshard.names.model import ConfigLike, NameMap, NamesLike, as_names, config_beside
from reshard.names.resolve import ResolvedTensor, Source

__all__ = ["ConfigLike", "NameMap", "NamesLike", "ResolvedTensor", "Source", "as_names", "config_beside"]
