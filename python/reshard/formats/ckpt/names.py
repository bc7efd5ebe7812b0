"""Detects a `.ckpt` weight file of MindSpore, as opposed to other files with this suffix and to safetensors files.

It is one protobuf message `Checkpoint { repeated Value }` without a magic number: a sequence of 0x0A, a length and a
value. The core parses this framing without reading the contents. This module reads the first and the last bytes only.

A tensor of more than 512 MiB is stored in several values of the same tag. Text values (`str`) may be between the
tensors: they are listed and not read. The writer can add a CRC-32 of the whole file. It is compared once, when tensors
are read for the first time, unless `verify="structure"`. A dims list of `[0]` with an element is a scalar of an older
writer.
"""

from __future__ import annotations

SUFFIX = ".ckpt"
HEAD_BYTES = 9
"""Number of bytes at the start of a file that `is_head` needs."""

TAIL_BYTES = 17
"""Number of bytes at the end of a file that `has_crc` needs."""

_CRC_MARK = b"crc_num"  # and ten bytes
_VALUE = b"\x0a"  # field 1 of the message; its length follows


def is_head(head: bytes) -> bool:
    r"""Whether these are the first bytes of a `.ckpt` file of weights, whatever its name.

    Strategy files have the same suffix and another first byte. An empty file and a file of zeros do not match.

    Example:
        >>> is_head(b"\n\x1a\n\x05w"), is_head(b"\x08\x01")
        (True, False)
    """
    # The length of a safetensors header can end in the same byte.
    return head.startswith(_VALUE) and not is_safetensors_head(head)


def has_crc(tail: bytes) -> bool:
    """Whether these last bytes of a `.ckpt` file are a CRC of the rest.

    Example:
        >>> has_crc(b"crc_num" + bytes(10)), has_crc(bytes(17))
        (True, False)
    """
    return len(tail) == TAIL_BYTES and tail.startswith(_CRC_MARK)


def is_safetensors_head(head: bytes) -> bool:
    """Whether these are the first bytes of a safetensors file: a length below 4 GiB, and the start of a header."""
    return head[4:9] == b"\0\0\0\0{"
