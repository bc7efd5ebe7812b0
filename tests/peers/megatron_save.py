"""Save a small GPT of Megatron-Core on the CPU, as `torch_dist` and as folders of ranks.

It is started on every rank as `python megatron_save.py <folder> <size>`. Every rank writes what it holds of each
parameter and of its optimizer state, and how the library divided it, into `truth_<rank>.pt`.
"""

# mypy: ignore-errors
from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

TENSOR_TYPE = torch.Tensor.type


def on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A factory of tensors that puts on the CPU what is asked for on a GPU."""
    return lambda *args, **more: make(
        *args, **{**more, **({"device": "cpu"} if "cuda" in str(more.get("device")) else {})}
    )


def without_gpu() -> None:
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    for name in ("set_device", "synchronize", "empty_cache", "set_rng_state", "Stream", "current_stream"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.is_available = lambda: False
    torch.cuda.get_rng_state = lambda *_, **__: torch.zeros(16, dtype=torch.uint8)
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    torch.Tensor.type = lambda self, *args: (
        TENSOR_TYPE(self, *args) if args else TENSOR_TYPE(self).replace("torch.", "torch.cuda.")
    )


def fill(text: str, like: torch.Tensor) -> torch.Tensor:
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))


def main(folder: Path, size: dict[str, int]) -> None:
    without_gpu()
    dist.init_process_group("gloo")
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    tp, pp, vocab = size["tp"], size["pp"], size["vocab"]
    mpu.initialize_model_parallel(tp, pp, create_gloo_process_groups=True)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=12,
        num_attention_heads=2,
        ffn_hidden_size=20,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=vocab,
        max_sequence_length=16,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    ).bfloat16()
    buffers = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
        ),
        [DistributedDataParallel(config, buffers, model)],
    )
    [own] = optimizer.chained_optimizers
    own._init_optimizer_states_with_dummy_values()

    t, p = mpu.get_tensor_model_parallel_rank(), mpu.get_pipeline_model_parallel_rank()
    truth = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if "layers" in parts:
            parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
        key = ".".join(parts)
        dim = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
        seed = key if dim is None else f"{key}@{t}"
        parameter.data.copy_(fill(seed, parameter).to(parameter.dtype))
        truth[key] = {"dim": dim, "t": t, "weight": parameter.data.clone()}
        states = own._get_main_param_and_optimizer_states(parameter)
        for slot in ("param", "exp_avg", "exp_avg_sq"):
            truth[key][slot] = fill(seed + slot, parameter).abs()
            states[slot].data.copy_(truth[key][slot].view(states[slot].shape))
    torch.save(truth, folder / f"truth_{dist.get_rank()}.pt")

    args = argparse.Namespace(
        num_layers=4,
        hidden_size=12,
        ffn_hidden_size=20,
        padded_vocab_size=vocab,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        untie_embeddings_and_output_weights=True,
        consumed_train_samples=640,
        global_batch_size=64,
    )
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 10}
    rank = folder / "old/iter_0000010" / f"mp_rank_{t:02d}_{p:03d}"
    rank.mkdir(parents=True)
    state = {**common, "model": model.state_dict_for_save_checkpoint(), "optimizer": optimizer.state_dict()}
    torch.save(state, rank / "model_optim_rng.pt")
    optimizer.save_parameter_state(str(rank / "distrib_optim.pt"))

    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
    groups = {**metadata, "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    sharded = {**common, "model": model.sharded_state_dict(metadata=groups)}
    sharded["optimizer"] = optimizer.sharded_state_dict({"model": sharded["model"]}, metadata=groups)
    target = folder / "new/iter_0000010"
    target.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(sharded, str(target), content_metadata=metadata)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":  # writers are processes that import this file
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
