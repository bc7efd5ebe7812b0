"""The program whose checkpoints Trainer wrote with FSDP and with DeepSpeed, before anything is loaded."""

import pytest
import torch


class GptTraining:
    """The model, with the parameters of its optimizer in another order, and the scheduler."""

    def __init__(self) -> None:
        transformers = pytest.importorskip("transformers")
        sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
        self.model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=1)
        )
        named = dict(reversed(list(self.model.named_parameters())))
        decayed = [name for name in named if name.endswith("weight") and ".ln_" not in name]
        groups = [
            {"params": [named[name] for name in named if name not in decayed], "weight_decay": 0.0},
            {"params": [named[name] for name in decayed], "weight_decay": 0.1},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 - step / 4)
