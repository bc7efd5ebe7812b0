"""A Hugging Face folder is compared with the model of its config.json before it gets its name."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from tests.peers.required import required

import reshard
from reshard.cli import main
from reshard.errors import ArgumentError, CheckpointNotFoundError, MismatchError, UnsupportedError
from reshard.storage.location import locate
from reshard.torch import load_file, save_file
from reshard.verbs.loads_in import _diffusers_files

if TYPE_CHECKING:
    from pathlib import Path

transformers = required("transformers")

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def make(kind: str) -> Any:
    values: dict[str, Any] = {"vocab_size": 30, **SIZES}
    if kind in ("Mixtral", "Qwen3Moe"):
        values |= {"num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 8, "num_key_value_heads": 2}
    if kind == "tied":
        kind, values = "Llama", values | {"tie_word_embeddings": True}
    name = {"Bert": "BertForMaskedLM", "ViT": "ViTForImageClassification"}.get(kind, f"{kind}ForCausalLM")
    return getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**values))


@pytest.mark.parametrize("kind", ["Llama", "tied", "Mixtral", "Qwen3Moe", "GPTNeoX", "Bert", "ViT", "Gemma3", "Phi3"])
@pytest.mark.slow
def test_folders_of_the_library_pass_and_other_names_do_not(kind: str, tmp_path: Path) -> None:
    if kind == "Gemma3":
        config = transformers.Gemma3TextConfig(vocab_size=30, head_dim=8, num_key_value_heads=1, **SIZES)
        model: Any = transformers.Gemma3ForCausalLM(config)
    elif kind == "Phi3":
        model = transformers.Phi3ForCausalLM(transformers.Phi3Config(vocab_size=30, pad_token_id=0, **SIZES))
    else:
        model = make(kind)
    model.save_pretrained(tmp_path / "hf")
    reshard.convert(tmp_path / "hf", tmp_path / "again")
    again = type(model).from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    first = min(weights)
    for damage in ("missing", "named", "longer"):
        changed = dict(weights)
        tensor = changed.pop(first)
        if damage == "named":
            changed["another.name"] = tensor
        if damage == "longer":
            changed[first] = torch.cat([tensor, tensor[:1]])
        save_file(changed, tmp_path / "changed.safetensors")
        given: Any = {"to": "huggingface", "files": {"model_files": tmp_path / "hf"}}
        with pytest.raises(MismatchError, match=rf"does not load what is published: .*`{first}` has shape"):
            reshard.convert(tmp_path / "changed.safetensors", tmp_path / damage, **given)
        assert not (tmp_path / damage).exists()
        given["files"] |= {"check_names": False}
        reshard.convert(tmp_path / "changed.safetensors", tmp_path / damage, **given)


@pytest.mark.slow
@pytest.mark.parametrize("entry", [("model",), ("state_dict",), ("app", "model"), ("module",)])
def test_an_entry_before_the_names_is_removed_where_the_model_has_none(entry: tuple[str, ...], tmp_path: Path) -> None:
    model = make("Llama")
    model.save_pretrained(tmp_path / "base")
    state: Any = dict(model.state_dict())
    for name in reversed(entry):
        state = {name: state}
    torch.save(state, tmp_path / "x.pt")
    dcp.save(state, checkpoint_id=tmp_path / "x_dcp", no_dist=True)  # type: ignore[attr-defined]
    for source in ("x.pt", "x_dcp"):
        done = reshard.convert(
            tmp_path / source, tmp_path / f"of {source}", to="huggingface", files={"model_files": tmp_path / "base"}
        )
        start = ".".join(entry) + "."
        assert done.warnings[0].startswith(f"names begin with `{start}`, which is removed"), done.warnings
        again = type(model).from_pretrained(tmp_path / f"of {source}").state_dict()
        assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.slow
def test_a_padded_vocabulary_is_refused_and_the_command_says_what_to_do(tmp_path: Path) -> None:
    model = make("Llama")
    model.save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(config | {"vocab_size": 28}))
    arguments = ["convert", str(tmp_path / "hf"), str(tmp_path / "out"), "--model-files", str(tmp_path / "small")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code != 0
    assert "config.json says `vocab_size` 28, and the checkpoint has 30 rows" in str(result.exception) + result.stderr
    result = CliRunner().invoke(main, [*arguments, "--no-check"])
    assert result.exit_code == 0, result.output


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_the_library_loads_under_other_names_is_published(tmp_path: Path) -> None:
    """Names without the prefix of the model, old names, and tensors that the library ignores."""
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=30, n_embd=16, n_layer=1, n_head=2))
    bert, llama = make("Bert"), make("Llama")

    def old(name: str) -> str:
        return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    cases: list[tuple[Any, Any, dict[str, torch.Tensor]]] = [
        (gpt, lambda name: name.removeprefix("transformer."), {}),
        (bert, old, {"bert.embeddings.position_ids": torch.zeros(1, 4)}),
        (llama, str, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}),
        (llama, str, {"model.layers.2.eh_proj.weight": torch.zeros(4, 4)}),
    ]
    for number, (model, rename, more) in enumerate(cases):
        folder = tmp_path / str(number)
        model.save_pretrained(folder)
        weights = load_file(folder / "model.safetensors")
        save_file({rename(name): tensor for name, tensor in weights.items()} | more, folder / "model.safetensors")
        said = type(model).from_pretrained(folder, output_loading_info=True)[1]
        assert {*said["missing_keys"], *said["mismatched_keys"]} == set()
        warnings = reshard.convert(folder, tmp_path / f"{number} again").warnings
        assert [line for line in warnings if "does not load" not in line] == []
        assert len(load_file(tmp_path / f"{number} again" / "model.safetensors")) == len(weights) + len(more)


@pytest.mark.slow
def test_one_expert_less_and_a_tensor_left_out_on_purpose(tmp_path: Path) -> None:
    make("Mixtral").save_pretrained(tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    del weights[next(name for name in weights if "experts.2." in name)]
    save_file(weights, tmp_path / "less.safetensors")
    given: Any = {"to": "huggingface", "files": {"model_files": tmp_path / "hf"}}
    with pytest.raises(MismatchError, match=r"experts\.2\.\S+` has shape none"):
        reshard.convert(tmp_path / "less.safetensors", tmp_path / "out", **given)
    reshard.convert(tmp_path / "hf", tmp_path / "out", select={"drop": "lm_head."})
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def verified(folder: Path, library: str, *more: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(main, ["verify", str(folder), "--loads-in", library, "--json", *more])
    return result.exit_code, json.loads(result.stdout)


def changed(source: Path, out: Path, file: str, change: Any) -> Path:
    """A copy of a folder with other weights."""
    shutil.copytree(source, out)
    save_file(change(load_file(source / file)), out / file)
    return out


def test_verify_finds_what_transformers_does_not_load(tmp_path: Path) -> None:
    make("Llama").save_pretrained(tmp_path / "hf")
    code, report = verified(tmp_path / "hf", "transformers")
    assert (code, report["loads_in"]["models"], report["loads_in"]["n_tensors"]) == (0, {".": "LlamaForCausalLM"}, 21)
    damages: dict[str, tuple[Any, int, str]] = {
        "padded": (
            lambda w: {key: torch.cat([one, one[:2]]) if len(one) == 30 else one for key, one in w.items()},
            2,
            "`vocab_size` 30, and the checkpoint has 32 rows",
        ),
        "prefix": (lambda w: {f"model.{key}": one for key, one in w.items()}, 21, "--rename model.="),
        "less": (lambda w: {key: one for key, one in w.items() if "layers.1." not in key}, 9, ""),
    }
    for name, (change, n_wrong, hint) in damages.items():
        folder = changed(tmp_path / "hf", tmp_path / name, "model.safetensors", change)
        code, report = verified(folder, "transformers")
        assert (code, report["ok"], len(report["loads_in"]["differences"])) == (1, False, n_wrong), name
        text = CliRunner().invoke(main, ["verify", str(folder), "--loads-in", "transformers"]).stdout
        assert hint.removeprefix("--rename model.=") in text, text
    assert report["loads_in"]["differences"][0] == {
        "key": "model.layers.1.input_layernorm.weight",
        "found": None,
        "expected": [16],
    }
    more = changed(tmp_path / "hf", tmp_path / "more", "model.safetensors", lambda w: {**w, "x.w": torch.zeros(2)})
    report_of_more = reshard.verify(more, loads_in="transformers")
    assert report_of_more.ok
    assert report_of_more.loads_in is not None
    assert "does not load `x.w`" in report_of_more.loads_in.warnings[0]


def test_verify_says_why_it_cannot_ask_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    for config, message in (
        ({"architectures": ["None"]}, "has no `None`"),
        ({}, "does not name one class"),
        ({"architectures": ["LlamaForCausalLM"], "quantization_config": {}}, "`quantization_config`"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UnsupportedError, match=message):
            reshard.verify(tmp_path, loads_in="transformers")
    with pytest.raises(CheckpointNotFoundError, match=r"holds no adapter_config\.json, which peft loads"):
        reshard.verify(tmp_path, loads_in="peft")
    with pytest.raises(ArgumentError, match="`base` belongs to"):
        reshard.verify(tmp_path, loads_in="transformers", base=tmp_path)
    for library in ("transformers", "peft", "diffusers"):
        monkeypatch.setitem(sys.modules, library, None)
        code, report = verified(tmp_path, library)
        assert (code, report["error"]) == (1, "UnsupportedError")
        assert f"pip install {library}" in report["hint"]


@pytest.mark.filterwarnings("ignore")
def test_verify_finds_what_peft_does_not_load(tmp_path: Path) -> None:
    peft = required("peft")
    make("Llama").save_pretrained(tmp_path / "base")
    file = "adapter_model.safetensors"
    lora: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    for name, config in (
        ("lora", peft.LoraConfig(**lora)),
        ("whole", peft.LoraConfig(**lora, modules_to_save=["lm_head"], use_dora=True)),
        ("prompt", peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")),
    ):
        model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
        peft.get_peft_model(model, config).save_pretrained(str(tmp_path / name))
        assert verified(tmp_path / name, "peft")[0] == 0, name
    head, first = "base_model.model.lm_head.weight", "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    damages: dict[str, tuple[str, Any, int]] = {
        "another start": ("lora", lambda w: {key.replace("base_model.", ""): one for key, one in w.items()}, 8),
        "another rank": ("lora", lambda w: {**w, first: w[first][:1]}, 1),
        "another target": ("lora", lambda w: {**w, first.replace("q_proj", "k_proj"): w[first]}, 1),
        "no head": ("whole", lambda w: {key: one for key, one in w.items() if key != head}, 1),
        "rows": ("prompt", lambda w: {key: one[:1] for key, one in w.items()}, 1),
    }
    for name, (source, change, n_wrong) in damages.items():
        folder = changed(tmp_path / source, tmp_path / name, file, change)
        code, report = verified(folder, "peft")
        assert (code, len(report["loads_in"]["differences"])) == (1, n_wrong), name
    # The names of the live model are loaded, too.
    live = changed(
        tmp_path / "lora",
        tmp_path / "live",
        file,
        lambda w: {key.replace(".weight", ".default.weight"): one for key, one in w.items()},
    )
    assert verified(live, "peft")[0] == 0
    (tmp_path / "base").rename(tmp_path / "moved")
    code, report = verified(tmp_path / "lora", "peft")
    assert (code, report["error"], report["hint"][-13:]) == (1, "UnsupportedError", "--base FOLDER")
    assert verified(tmp_path / "lora", "peft", "--base", str(tmp_path / "moved"))[0] == 0


def test_diffusers_loads_a_single_file_and_else_those_of_the_index(tmp_path: Path) -> None:
    folder, name = locate(tmp_path), "diffusion_pytorch_model.safetensors"
    with pytest.raises(CheckpointNotFoundError, match=f"holds no {name}, which diffusers loads"):
        _diffusers_files(folder)
    (tmp_path / f"{name}.index.json").write_text(
        json.dumps({"weight_map": {"b": "2.safetensors", "a": "1.safetensors"}})
    )
    for number in (1, 2):
        (tmp_path / f"{number}.safetensors").write_bytes(b"")
    assert [file.name for file in _diffusers_files(folder)] == ["1.safetensors", "2.safetensors"]
    (tmp_path / name).write_bytes(b"")
    assert [file.name for file in _diffusers_files(folder)] == [name]


@pytest.mark.slow(disk=False)
@pytest.mark.filterwarnings("ignore")
def test_verify_finds_what_diffusers_does_not_load(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(4, 8),
        norm_num_groups=2,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    diffusers.DDPMPipeline(model, diffusers.DDPMScheduler()).save_pretrained(tmp_path / "pipeline")
    model.save_pretrained(tmp_path / "files", max_shard_size="10KB")
    code, report = verified(tmp_path / "pipeline", "diffusers")
    assert (code, report["loads_in"]["models"]) == (0, {"unet": "UNet2DModel"})
    assert verified(tmp_path / "pipeline" / "unet", "diffusers")[0] == 0
    assert verified(tmp_path / "files", "diffusers")[0] == 0
    file = "unet/diffusion_pytorch_model.safetensors"
    less = changed(tmp_path / "pipeline", tmp_path / "less", file, lambda w: dict(sorted(w.items())[1:]))
    code, report = verified(less, "diffusers")
    assert code == 1
    assert [one["key"] for one in report["loads_in"]["differences"]] == ["unet/conv_in.bias"]
