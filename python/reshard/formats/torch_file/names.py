"""Files of `torch.save`: how they are recognised, and the folder of such files that Hugging Face used earlier.

A file is a zip archive with a pickle and one member for each storage, or, from torch before 1.6, pickles followed by
the storages. A folder holds `pytorch_model.bin`, or several files and `pytorch_model.bin.index.json`, which names the
file of each tensor.

Source: `torch/serialization.py` of torch 2.15; `transformers/modeling_utils.py` of transformers 4.
"""

from __future__ import annotations

import re

from reshard.formats.base import Traits

TRAITS = Traits("torch", is_pretrained=True, counters="optimizer state with a number of steps")


SINGLE_FILE = "pytorch_model.bin"
INDEX_FILE = "pytorch_model.bin.index.json"

SUFFIXES = (".bin", ".pt", ".pth")
"""Suffixes of a single file that is written."""

HEAD_BYTES = 14
"""So many bytes from the start of a file tell what it is."""

_OF_RANK = re.compile(r"_world_size_([0-9]{1,9})_rank_[0-9]{1,9}\.")
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


def is_of_one_rank(name: str) -> bool:
    """Whether a file is called as one of several that the ranks of a run wrote, each with its part of the state.

    Example:
        >>> is_of_one_rank("model_world_size_2_rank_0.pt"), is_of_one_rank("model_world_size_1_rank_0.pt")
        (True, False)
    """
    found = _OF_RANK.search(name)
    return found is not None and int(found[1]) > 1


def file_name(number: int, count: int) -> str:
    """The name of a file of a folder; without numbers if there is only one.

    Args:
        number: number of the file, from 1.
        count: number of files.

    Example:
        >>> file_name(2, 12), file_name(1, 1)
        ('pytorch_model-00002-of-00012.bin', 'pytorch_model.bin')
    """
    return SINGLE_FILE if count == 1 else f"pytorch_model-{number:05d}-of-{count:05d}.bin"
