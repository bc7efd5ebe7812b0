"""Names of the folders and files of torchtune.

```text
epoch_<E>/                        model-00001-of-0000N.safetensors or .bin, config.json; or a folder of DCP
recipe_state/recipe_state.pt      the optimizer, the epoch and the seed

hf_model_<number>_<E>.pt          of versions before 0.6: the weights of an epoch, under names of Hugging Face,
meta_model_<E>.pt                 of the original code of Llama,
torchtune_model_<E>.pt            or of torchtune
recipe_state.pt, adapter_<E>.pt   beside them
```

Source: `torchtune/training/checkpointing/_checkpointer.py` and `_utils.py` of torchtune 0.6.1, and `_checkpointer.py`
of torchtune 0.3.1 at https://github.com/pytorch/torchtune.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reshard.values.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Iterable

TRAITS = Traits("torchtune", is_pretrained=True)

STATE_FOLDER = "recipe_state"
STATE_FILE = "recipe_state.pt"

_EPOCH = re.compile(r"epoch_(0|[1-9][0-9]{0,8})")
_FILE = re.compile(r"(?:hf_model_([0-9]{4,9})|(meta|torchtune)_model)_(0|[1-9][0-9]{0,8})\.(?:pt|bin|safetensors)")


def epochs(names: Iterable[str]) -> list[tuple[int, str]]:
    """The folders of epochs among some names, the newest first.

    Example:
        >>> epochs(["epoch_2", "epoch_10", "epoch_1.tmp"])
        [(10, 'epoch_10'), (2, 'epoch_2')]
    """
    found = ((int(match[1]), name) for name in names if (match := _EPOCH.fullmatch(name)) is not None)
    return sorted(found, reverse=True)


def old_files(names: Iterable[str]) -> dict[int, dict[str, dict[int, str]]]:
    """The files of older versions among some names: by epoch, then by kind, then by number.

    Example:
        >>> old_files(["hf_model_0001_0.pt", "hf_model_0002_0.pt", "meta_model_1.pt"])
        {0: {'hf': {1: 'hf_model_0001_0.pt', 2: 'hf_model_0002_0.pt'}}, 1: {'meta': {1: 'meta_model_1.pt'}}}
    """
    found: dict[int, dict[str, dict[int, str]]] = {}
    for name in names:
        if (match := _FILE.fullmatch(name)) is not None:
            number = 1 if match[1] is None else int(match[1])
            found.setdefault(int(match[3]), {}).setdefault(match[2] or "hf", {})[number] = name
    return found
