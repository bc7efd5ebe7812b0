"""Models of many architectures, with random weights: published as the library publishes them, and read back.

A sample of the slow ones runs; with `RESHARD_ARCHITECTURES=all` all of them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.peers.required import required

import reshard
from reshard.errors import MismatchError
from reshard.torch import Checkpointer, load_file

if TYPE_CHECKING:
    from pathlib import Path

transformers = required("transformers")

VOCABULARY = 40
SMALL: dict[str, int] = {
    "vocab_size": 40,
    "text_vocab_size": 40,
    "encoder_hidden_size": 16,
    "image_text_hidden_size": 16,
    "hidden_size": 16,
    "d_model": 16,
    "n_embd": 16,
    "dim": 16,
    "embed_dim": 16,
    "embedding_size": 16,
    "intermediate_size": 24,
    "ffn_dim": 24,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "d_ff": 24,
    "hidden_dim": 24,
    "n_inner": 24,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_decoder_layers": 2,
    "num_encoder_layers": 2,
    "depth": 2,
    "num_attention_heads": 2,
    "n_head": 2,
    "n_heads": 2,
    "num_heads": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "d_kv": 8,
    "max_position_embeddings": 32,
    "n_positions": 32,
    "max_source_positions": 16,
    "max_target_positions": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "image_size": 16,
    "patch_size": 4,
    "projection_dim": 8,
    "type_vocab_size": 2,
}
"""Values of the fields of any configuration that has them."""

CHANGES: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {"layer_types": ["full_attention", "full_attention"]},
    "Qwen3ForCausalLM": {"layer_types": ["full_attention", "full_attention"]},
    "Gemma2ForCausalLM": {"layer_types": ["full_attention", "full_attention"]},
    "Gemma3ForCausalLM": {"layer_types": ["full_attention", "full_attention"]},
    "OPTForCausalLM": {"word_embed_proj_dim": 16},
    "Qwen2MoeForCausalLM": {"layer_types": ["full_attention", "full_attention"]},
    "DeepseekV3ForCausalLM": {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 2,
    },
    "GptOssForCausalLM": {"layer_types": ["full_attention", "full_attention"]},
    "JambaForCausalLM": {"mamba_d_state": 4, "mamba_dt_rank": 4},
    "MambaForCausalLM": {"state_size": 4, "time_step_rank": 2},
    "Mamba2ForCausalLM": {"state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1},
    "FalconMambaForCausalLM": {"state_size": 4, "time_step_rank": 2},
    "ModernBertForMaskedLM": {"layer_types": ["full_attention", "full_attention"]},
    "ConvNextForImageClassification": {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]},
}
FAST: tuple[str, ...] = (
    "MixtralForCausalLM",
    "GPTNeoXForCausalLM",
    "T5ForConditionalGeneration",
    "ViTForImageClassification",
)
FAST += ("LlavaForConditionalGeneration", "PaliGemmaForConditionalGeneration")
SLOW: tuple[str, ...] = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Phi3ForCausalLM",
    "GPT2LMHeadModel",
    "OPTForCausalLM",
    "BloomForCausalLM",
    "FalconForCausalLM",
    "CohereForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV3ForCausalLM",
    "OlmoeForCausalLM",
    "GptOssForCausalLM",
    "PhimoeForCausalLM",
    "JambaForCausalLM",
    "MambaForCausalLM",
    "Mamba2ForCausalLM",
    "FalconMambaForCausalLM",
    "BertForMaskedLM",
    "RobertaForMaskedLM",
    "DebertaV2ForMaskedLM",
    "AlbertForMaskedLM",
    "DistilBertForMaskedLM",
    "ElectraForMaskedLM",
    "ModernBertForMaskedLM",
    "BartForConditionalGeneration",
    "SwitchTransformersForConditionalGeneration",
    "ConvNextForImageClassification",
    "CLIPModel",
    "SiglipModel",
    "BlipForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "MllamaForConditionalGeneration",
    "Wav2Vec2ForCTC",
    "WhisperForConditionalGeneration",
    "HubertForCTC",
    "SpeechT5ForTextToSpeech",
)


def is_computed(config: Any, name: str) -> bool:
    """Whether an attribute follows from others, and cannot be set."""
    return isinstance(found := getattr(type(config), name, None), property) and found.fset is None


def shrink(config: Any, changes: dict[str, Any]) -> Any:
    """The configuration of a small model, from one with the default values."""
    for name, value in {**SMALL, **changes}.items():
        if name in changes or (type(getattr(config, name, None)) in (int, float) and not is_computed(config, name)):
            setattr(config, name, value)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id"):
        value = getattr(config, name, None)
        if isinstance(value, list) or (isinstance(value, int) and value >= VOCABULARY):
            setattr(config, name, 1)
    kinds = getattr(config, "layer_types", None)
    if isinstance(kinds, list) and not is_computed(config, "layer_types"):
        config.layer_types = kinds[: config.num_hidden_layers]
    for name in getattr(config, "sub_configs", {}):
        if getattr(config, name, None) is not None:
            shrink(getattr(config, name), {})
    return config


def make(name: str, seed: int) -> Any:
    kind = getattr(transformers, name)
    model = kind(shrink(kind.config_class(), CHANGES.get(name, {})))
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # no tensor has the values of its initialisation
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random))
    return model


def stored(folder: Path) -> dict[str, Any]:
    arrays = load_file(folder / "model.safetensors")
    return {name: (tensor.dtype, tensor.shape, tensor.tolist()) for name, tensor in arrays.items()}


def check_equal(a: Any, b: Any) -> None:
    one, other = a.state_dict(), b.state_dict()
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


SAMPLE = SLOW if os.environ.get("RESHARD_ARCHITECTURES") == "all" else SLOW[::6]


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SAMPLE)])
@pytest.mark.filterwarnings("ignore")
def test_what_is_published_is_what_the_library_writes(name: str, tmp_path: Path) -> None:
    model = make(name, 1)
    model.save_pretrained(tmp_path / "hub")
    with Checkpointer(tmp_path / "run", save_every=1, hf_every=1, signals=()) as checkpointer:
        checkpointer.resume(model=model)
        report = checkpointer.save(1, blocking=True)
    assert isinstance(report, reshard.SaveReport)
    assert [line for line in report.warnings if "volatile" not in line] == []
    folder = tmp_path / "run_hf" / "iteration_00000001"
    assert stored(folder) == stored(tmp_path / "hub")
    assert {file.name for file in folder.iterdir()} == {file.name for file in (tmp_path / "hub").iterdir()}
    check_equal(type(model).from_pretrained(folder), model)
    reshard.convert(tmp_path / "run", tmp_path / "converted", files={"model_files": tmp_path / "hub"}, to="huggingface")
    assert stored(tmp_path / "converted") == stored(tmp_path / "hub")
    other = make(name, 2)
    with Checkpointer(tmp_path / "second", save_every=1, signals=()) as checkpointer:
        checkpointer.resume(model=other, init_from=str(tmp_path / "hub"))
    check_equal(other, model)


@pytest.mark.filterwarnings("ignore")
def test_tables_that_the_library_does_not_save_are_not_published(tmp_path: Path) -> None:
    model = make("MarianMTModel", 1)
    model.save_pretrained(tmp_path / "hub")
    reshard.torch.save_file(model.state_dict(), tmp_path / "live.safetensors")
    assert "model.encoder.embed_positions.weight" in load_file(tmp_path / "live.safetensors")
    given: Any = {"to": "huggingface", "files": {"model_files": tmp_path / "hub"}}
    reshard.convert(tmp_path / "live.safetensors", tmp_path / "out", **given)
    assert "model.encoder.embed_positions.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    # A start from the folder keeps those of the live model.
    other = make("MarianMTModel", 2)
    tables = {key: other.state_dict()[key].clone() for key in other._keys_to_ignore_on_save}
    with Checkpointer(tmp_path / "second", save_every=1, signals=()) as checkpointer:
        checkpointer.resume(model=other, init_from=str(tmp_path / "out"))
    assert other.lm_head.weight is other.model.shared.weight
    assert all(torch.equal(other.state_dict()[key], table) for key, table in tables.items())
    model.load_state_dict(tables, strict=False)
    check_equal(other, model)
    with torch.device("meta"):
        empty = type(model)(model.config)
    with pytest.raises(MismatchError, match=r"lacks `model\.encoder\.embed_positions\.weight`"):
        Checkpointer(tmp_path / "third", signals=()).resume(model=empty, init_from=str(tmp_path / "out"), device="cpu")
