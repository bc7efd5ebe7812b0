"""A `.ckpt` weight file of MindSpore: how it is told from files of the same suffix, and from safetensors.

It is one protobuf message `Checkpoint { repeated Value }` without a magic number: a sequence of 0x0A, a length and a
value. The core walks over that framing and leaves the contents alone; nothing here reads more than the first bytes
and the last.

A tensor of more than 512 MiB lies in several values of the same tag. Text (`str`) may stand between the tensors: it is
named and not read. A writer that was asked to adds a CRC-32 of the whole file: whoever reads tensors compares it
once, the first time, unless `verify="structure"`. An extent list of `[0]` with an element behind it is a scalar, as
older writers wrote it.
"""

from __future__ import annotations

__all__ = ["HEAD_BYTES", "SUFFIX", "TAIL_BYTES", "has_crc", "is_head", "is_safetensors_head"]

SUFFIX = ".ckpt"
HEAD_BYTES = 9
"""So many bytes from the start of a file tell what it is."""

TAIL_BYTES = 17
"""So many bytes at the end of a file tell whether it has a sum of itself."""

_SUM_MARK = b"crc_num"  # and ten bytes
_VALUE = b"\x0a"  # field 1 of the message, of a length that follows


def is_head(head: bytes) -> bool:
    r"""Whether these first bytes are those of a `.ckpt` of weights, whatever the name of the file.

    Strategy files have the same suffix and begin otherwise. An empty file and one of zeros are none.

    Example:
        >>> is_head(b"\n\x1a\n\x05w"), is_head(b"\x08\x01")
        (True, False)
    """
    # A header of safetensors may have a length that ends in the same byte.
    return head.startswith(_VALUE) and not is_safetensors_head(head)


def has_crc(tail: bytes) -> bool:
    """Whether these last bytes of a `.ckpt` are a CRC of the rest.

    Example:
        >>> has_crc(b"crc_num" + bytes(10)), has_crc(bytes(17))
        (True, False)
    """
    return len(tail) == TAIL_BYTES and tail.startswith(_SUM_MARK)


def is_safetensors_head(head: bytes) -> bool:
    """Whether these first bytes are those of a safetensors file: a length below 4 GiB, the start of a header."""
    return head[4:9] == b"\0\0\0\0{"
