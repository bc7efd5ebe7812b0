"""A small Llama trained by `transformers.Trainer`, killed and resumed at will, without a network.

    torchrun --nproc-per-node 2 -m -- reshard.examples.train_transformers run --steps 30

Start it again with the same folder and it resumes. The log `run.log` gets a line a step: the step and its loss.
"""

import argparse
import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from reshard.storage.location import locate
from reshard.transformers import ReshardCallback


class Lines(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(12) * (index % 7 + 1) + index) % 32
        return {"input_ids": ids, "labels": ids}


class Log(TrainerCallback):
    path = ""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        del args, control, kwargs
        if state.is_world_process_zero and "loss" in logs:
            locate(self.path).append_line(f"{state.global_step} {float(logs['loss']).hex()}\n".encode())


def main() -> None:
    """Train from the newest checkpoint on."""
    parser = argparse.ArgumentParser("reshard.examples.train_transformers", description=__doc__)
    parser.add_argument("root", help="the checkpoint root")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=2, help="samples of a step on each process")
    args = parser.parse_args()
    set_seed(1)
    small: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_attention_heads=2, attention_dropout=0.1, **small))
    options: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    options |= {"max_steps": args.steps, "per_device_train_batch_size": args.batch, "logging_steps": 1}
    arguments = TrainingArguments(f"{args.root}.out", **options)
    Log.path = f"{args.root}.log"
    callback = ReshardCallback(args.root, save_every=3, hf=f"{args.root}.hf")  # <- all that there is to add
    trainer = Trainer(model, arguments, train_dataset=Lines(), callbacks=[callback, Log()])
    trainer.train()


if __name__ == "__main__":
    main()
