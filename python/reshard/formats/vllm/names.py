"""Names of the files of the loader `sharded_state` of vLLM.

```text
model-rank-<R>-part-<P>.safetensors     parameters of rank R, under the names of vLLM
config.json, tokenizer                  of the model that vLLM read
```

No file records how many ranks there are, or how a parameter is divided. That follows from the class of each layer: vLLM
joins queries, keys and values, and gates, before it divides them, repeats heads of keys where there are fewer than
ranks, and pads vocabularies. It arranges quantised weights for its kernels (`process_weights_after_loading`) before
they are saved.

Source: `model_executor/model_loader/sharded_state_loader.py`, `model_executor/layers/linear.py` and
`model_executor/layers/quantization/` of https://github.com/vllm-project/vllm/tree/01ed47b4166b26251895a9c298352fcdb2385149.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reshard.values.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Iterable

TRAITS = Traits("vllm", is_pretrained=True, takes_strategy=True)

_FILE = re.compile(r"model-rank-(0|[1-9][0-9]{0,6})-part-(0|[1-9][0-9]{0,6})\.safetensors")


PLAIN = frozenset({"F64", "F32", "BF16", "F16"})
"""The dtypes of weights that are not quantised."""


def rank_files(names: Iterable[str]) -> dict[int, dict[int, str]]:
    """The files among some names, by rank and part.

    Example:
        >>> rank_files(["model-rank-1-part-0.safetensors", "config.json"])
        {1: {0: 'model-rank-1-part-0.safetensors'}}
    """
    found: dict[int, dict[int, str]] = {}
    for name in names:
        if (match := _FILE.fullmatch(name)) is not None:
            found.setdefault(int(match[1]), {})[int(match[2])] = name
    return found


def file_name(rank: int, part: int) -> str:
    """The name of a file.

    Args:
        rank: the tensor-parallel rank.
        part: the number of the file among those of the rank.

    Example:
        >>> file_name(1, 0)
        'model-rank-1-part-0.safetensors'
    """
    return f"model-rank-{rank}-part-{part}.safetensors"
