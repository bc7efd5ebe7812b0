"""How a file of `torch.save` begins, in whatever format it is a part.

It is a zip archive with a pickle and one member for each storage, or, from torch before 1.6, pickles followed by the
storages.

Source: `torch/serialization.py` of torch 2.15.
"""

from __future__ import annotations

HEAD_BYTES = 14
"""So many bytes from the start of a file tell what it is."""

_ZIP = b"PK\x03\x04"
_LEGACY = bytes.fromhex("6cfc9c46f9206aa85019")  # the magic number, a pickled integer


def is_head(head: bytes) -> bool:
    r"""Whether these first bytes are those of a file of `torch.save`. Every zip archive begins this way.

    Example:
        >>> is_head(b"PK\x03\x04" + bytes(10)), is_head(b"{}")
        (True, False)
    """
    return is_zip(head) or (head[:1] == b"\x80" and head[4:14] == _LEGACY)


def is_zip(head: bytes) -> bool:
    r"""Whether these first bytes are those of a zip archive, which has a CRC-32 of each storage.

    Example:
        >>> is_zip(b"PK\x03\x04" + bytes(10))
        True
    """
    return head.startswith(_ZIP)
