"""Name maps: convert the tensors of one naming to another. They rename, fuse, split, stack, transpose and tie tensors.

`file` defines the file format, `resolve` applies a map to keys and shapes, `part_map` converts tiles. Nothing
here opens a checkpoint or copies data.
"""

from reshard.names.model import ConfigLike, NameMap, NamesLike, as_names, config_beside
from reshard.names.resolve import ResolvedTensor, SourceTensor, unnamed

__all__ = [
    "ConfigLike",
    "NameMap",
    "NamesLike",
    "ResolvedTensor",
    "SourceTensor",
    "as_names",
    "config_beside",
    "unnamed",
]
