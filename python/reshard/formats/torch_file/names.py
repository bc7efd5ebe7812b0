"""Files of `torch.save`, and the folder of such files that Hugging Face used earlier.

A folder holds `pytorch_model.bin`, or several files and `pytorch_model.bin.index.json`, which names the
file of each tensor.

Source: `transformers/modeling_utils.py` of transformers 4.
"""

from __future__ import annotations

from reshard.values.traits import Traits

TRAITS = Traits("torch", is_pretrained=True, counters="optimizer state with a number of steps")


SINGLE_FILE = "pytorch_model.bin"
INDEX_FILE = "pytorch_model.bin.index.json"

SUFFIXES = (".bin", ".pt", ".pth")
"""Suffixes of a single file that is written."""


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
