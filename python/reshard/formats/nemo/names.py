"""Names of the files of NeMo.

```text
<folder>/weights/, context/          NeMo 2: weights/ is a folder of Megatron-Core
<name>.nemo                          NeMo 1: a tar archive, also packed by gzip, with
    model_config.yaml
    model_weights.ckpt                   a file of `torch.save`: the weights of a model without model parallelism
    <ranks>/model_weights.ckpt           those of a model-parallel rank
    model_weights/                       or a folder of Megatron-Core
```

Source: `nemo/core/connectors/save_restore_connector.py` and `nemo/collections/nlp/parts/nlp_overrides.py` of
https://github.com/NVIDIA/NeMo, `nemo/lightning/ckpt_utils.py` of NeMo 2.
"""

from __future__ import annotations

from reshard.values.traits import Traits

TRAITS = Traits("nemo", is_pretrained=True)

SUFFIX = ".nemo"
CONFIG_FILE = "model_config.yaml"
WEIGHTS_FILE = "model_weights.ckpt"
WEIGHTS_FOLDERS = ("weights", "model_weights")
"""Folders of Megatron-Core: of NeMo 2, and of an unpacked archive of NeMo 1."""
