"""Folders that are published have the names that `save_pretrained` writes, and a run starts from them."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import reshard
from reshard.conversion.library_names import _map_of, published_names
from reshard.errors import MismatchError, UnsupportedError
from reshard.torch import Checkpointer

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")
pytest.importorskip("safetensors.torch")

SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("ForCausalLM", {"num_key_value_heads": 1}),
    "Mixtral": ("ForCausalLM", {"num_key_value_heads": 1, "num_local_experts": 3}),
    "Qwen3Moe": ("ForCausalLM", {"moe_intermediate_size": 8, "num_experts": 4, "num_key_value_heads": 1}),
    "Qwen2Moe": (
        "ForCausalLM",
        {"moe_intermediate_size": 8, "num_experts": 4, "num_key_value_heads": 1, "shared_expert_intermediate_size": 8},
    ),
    "GPTNeoX": ("ForCausalLM", {}),
    "Bert": ("ForMaskedLM", {}),
}


def model_of(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    suffix, more = KINDS[kind]
    config = getattr(transformers, f"{kind}Config")(**SMALL, **more)
    return getattr(transformers, f"{kind}{suffix}")(config)


def stored(path: Path) -> dict[str, tuple[int, ...]]:
    with safetensors.safe_open(path / "model.safetensors", "pt") as file:
        return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118


def equal(a: nn.Module, b: nn.Module) -> bool:
    one, other = a.state_dict(), b.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("kind", KINDS)
def test_folders_of_a_run_are_as_the_library_writes_them(kind: str, tmp_path: Path) -> None:
    model = model_of(kind)
    model.save_pretrained(tmp_path / "hub")
    with Checkpointer(tmp_path / "run", save_every=1, hf_every=1) as checkpointer:
        checkpointer.resume(model=model)
        checkpointer.step(1)
    folder = tmp_path / "run_hf" / "iteration_00000001"
    assert stored(folder) == stored(tmp_path / "hub")
    assert equal(type(model).from_pretrained(folder), model)
    other = model_of(kind, seed=1)
    with Checkpointer(tmp_path / "second", save_every=1) as checkpointer:
        checkpointer.resume(model=other, init_from=str(tmp_path / "hub"))
    assert equal(model, other)


def test_a_conversion_that_is_no_region_is_refused() -> None:
    live = {"a": torch.empty(4, 6, device="meta")}
    with pytest.raises(UnsupportedError, match=r"`b` is published by aten::add"):
        _map_of(live, lambda tensors: {"b": tensors["a"] + 1}, "Some")
    with pytest.raises(UnsupportedError, match="a split of"):
        _map_of(live, lambda tensors: {"b": tensors["a"][:2], "c": tensors["a"][:2]}, "Some")
    with pytest.raises(UnsupportedError, match="not in a folder"):
        _map_of(live, lambda _: {}, "Some")
    with pytest.raises(UnsupportedError, match="a change of the shape"):
        _map_of(live, lambda tensors: {"b": tensors["a"].view(24)}, "Some")


def test_regions_of_tensors_become_rules() -> None:
    live = {name: torch.empty(2, 4, 6, device="meta") for name in "abc"}

    def revert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        up, down = tensors["a"].transpose(1, 2).contiguous().split_with_sizes([1, 5], 1)
        return {"up": up, "down": down, "both": torch.cat([tensors["b"], tensors["c"]], 2)}

    names = _map_of(live, revert, "Some")
    assert names is not None
    shapes = {"up": (2, 1, 4), "down": (2, 5, 4), "both": (2, 4, 12)}
    assert {made.key: made.shape for made in names.resolve(shapes)} == dict.fromkeys("abc", (2, 4, 6))


def test_a_model_of_another_library_keeps_its_names() -> None:
    assert published_names(nn.Linear(2, 2)) is None
    assert published_names({"a": torch.zeros(1)}) is None


def test_a_folder_whose_config_does_not_fit_is_not_published(tmp_path: Path) -> None:
    model = model_of("Mixtral")
    config = transformers.MixtralConfig(**{**SMALL, "vocab_size": 30}, num_key_value_heads=1, num_local_experts=2)
    config.architectures = ["MixtralForCausalLM"]
    config.save_pretrained(tmp_path / "files")
    with Checkpointer(tmp_path / "run", save_every=1, hf_every=1, model_files=tmp_path / "files") as checkpointer:
        checkpointer.resume(model=model)
        report = checkpointer.save(1, blocking=True)
    assert isinstance(report, reshard.SaveReport)
    warnings = " ".join(report.warnings)
    assert "`lm_head.weight` has shape (32, 16), expected (30, 16)" in warnings
    assert "and 5 more" in warnings
    assert not (tmp_path / "run_hf" / "iteration_00000001").exists()


def test_a_conversion_of_live_names_publishes_them(tmp_path: Path) -> None:
    model = model_of("Mixtral")
    model.save_pretrained(tmp_path / "hub")
    reshard.save(tmp_path / "run", 1, model.state_dict())
    reshard.convert(tmp_path / "run", tmp_path / "out", to="huggingface", files={"model_files": tmp_path / "hub"})
    assert stored(tmp_path / "out") == stored(tmp_path / "hub")


def test_one_name_of_tied_weights_is_enough(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config)
    with Checkpointer(tmp_path / "run", save_every=1, hf_every=1) as checkpointer:
        checkpointer.resume(model=model)
        checkpointer.step(1)
    folder = tmp_path / "run_hf" / "iteration_00000001"
    assert "lm_head.weight" not in stored(folder)
    assert equal(type(model).from_pretrained(folder), model)


@pytest.mark.slow
def test_the_final_folder_of_a_trainer_has_published_names(tmp_path: Path) -> None:
    callbacks = pytest.importorskip("reshard.transformers")
    model = model_of("Mixtral")
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_steps=1
    )
    callback = callbacks.ReshardCallback(str(tmp_path / "run"), hf=str(tmp_path / "final"), signals=())
    transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[callback]).train()
    model.save_pretrained(tmp_path / "hub")
    assert stored(tmp_path / "final") == stored(tmp_path / "hub")
    assert equal(type(model).from_pretrained(tmp_path / "final"), model)


def test_parts_of_wrappers_inside_of_names_have_a_name_map(tmp_path: Path) -> None:
    """As activation checkpointing, which a trainer did not remove before it saved."""
    model = model_of("Llama")
    model.save_pretrained(tmp_path / "hub")
    stored_as = {
        key.replace(".mlp.", "._checkpoint_wrapped_module.mlp._checkpoint_wrapped_module."): one
        for key, one in model.state_dict().items()
    }
    model.save_pretrained(tmp_path / "saved")
    safetensors.torch.save_file(stored_as, tmp_path / "saved" / "model.safetensors", {"format": "pt"})
    with pytest.raises(MismatchError, match="does not load what is published") as caught:
        reshard.convert(tmp_path / "saved", tmp_path / "out")
    found = re.search(r"all fit with `names=(.*)`$", str(caught.value.hint))
    assert found is not None, caught.value.hint
    reshard.convert(tmp_path / "saved", tmp_path / "out", names=json.loads(found[1]))
    assert reshard.diff(tmp_path / "out", tmp_path / "hub").equal
