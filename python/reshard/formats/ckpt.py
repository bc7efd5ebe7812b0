"""A `.ckpt` weight file of MindSpore: how it is told from files of the same suffix, and from safetensors.

It is one protobuf message `Checkpoint { repeated Value }` without a magic number: a sequence of 0x0A, a length and a
value. The core walks over that framing and leaves the contents alone; nothing here reads more than the first bytes.

A tensor of more than 512 MiB lies in several values of the same tag. Text (`str`) may stand between the tensors: it is
named and not read. A writer that was asked to adds a CRC-32 of the whole file: whoever reads tensors compares it
once, the first time, unless `verify="structure"`. An extent list of `[0]` with an element behind it is a scalar, as
older writers wrote it.
"""

from __future__ import annotations

import errno
import os
import stat

from reshard.errors import CheckpointNotFoundError, DamagedFileError, StorageError
from reshard.small_files import show

__all__ = ["SUFFIX", "is_ckpt", "is_head", "is_safetensors_head", "read_head"]

SUFFIX = ".ckpt"

_VALUE = b"\x0a"  # field 1 of the message, of a length that follows
_HEAD_BYTES = 9


def is_ckpt(path: str | os.PathLike[str], *, follow_links: bool = False) -> bool:
    """Whether a file begins as a `.ckpt` of weights does, whatever its name.

    Strategy files have the same suffix and begin otherwise. An empty file and one of zeros are none.

    Raises:
        CheckpointNotFoundError: there is no such file.
        DamagedFileError: it is no regular file.
        StorageError: it cannot be read.

    Example:
        >>> is_ckpt("strategy/ckpt_strategy_rank_0.ckpt")  # doctest: +SKIP
        False
    """
    return is_head(read_head(path, follow_links=follow_links))


def is_head(head: bytes) -> bool:
    """Whether these first bytes are those of a `.ckpt`."""
    # A header of safetensors may have a length that ends in the same byte.
    return head.startswith(_VALUE) and not is_safetensors_head(head)


def is_safetensors_head(head: bytes) -> bool:
    """Whether these first bytes are those of a safetensors file: a length below 4 GiB, the start of a header."""
    return head[4:9] == b"\0\0\0\0{"


def read_head(path: str | os.PathLike[str], *, follow_links: bool = False) -> bytes:
    """The first bytes of a file, as far as it has them. Raises as `is_ckpt` does."""
    path = os.fspath(path)
    # Without O_NONBLOCK the open of a pipe waits for a writer for ever.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow_links else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags)
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"there is no file {show(path)}", path=path) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DamagedFileError(f"{show(path)} is a symbolic link, expected a regular file", path=path) from None
        raise StorageError(f"opening {show(path)}: {error.strerror}", path=path, errno=error.errno) from None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise DamagedFileError(f"{show(path)} is not a regular file", path=path)
        return os.pread(handle, _HEAD_BYTES, 0)
    except OSError as error:
        raise StorageError(f"reading {show(path)}: {error.strerror}", path=path, errno=error.errno) from None
    finally:
        os.close(handle)
