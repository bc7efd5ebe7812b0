"""The mark of this package: its version, under the name `reshard` in the metadata of each file that it writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard import _core
from reshard.errors import ReshardError

if TYPE_CHECKING:
    from reshard.storage.location import Location

KEY = "reshard"
MARK = {KEY: _core.__version__}
"""The entry of the `__metadata__` of a safetensors file."""
SPELT = f'"{KEY}"'.encode()
"""Its name in the text of the header."""


def is_marked(index: _core.Index, file: int) -> bool:
    """Whether this package wrote an opened file, given by its number in the index."""
    return KEY in (index.file_metadata(file) or {})


def is_ours(path: Location) -> bool:
    """Whether this package wrote a safetensors file; False where it cannot be read. Links are not followed."""
    try:
        index = _core.Index()
        return is_marked(index, index.add_file(str(path), follow_links=False))
    except ReshardError:
        return False
