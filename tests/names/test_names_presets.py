"""Presets of names against what the other systems do with a small model of each family, written out in numpy.

Names on the right are those of mindformers (`weight_converters`, `reverse_mcore_*_weight_to_hf.py`) and of
Megatron-Bridge (`*_bridge.py`), as published.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

import reshard
from reshard.errors import ArgumentError, NamesError
from reshard.names.presets import FAMILIES, GGUF, NAMINGS, families_of

if TYPE_CHECKING:
    from pathlib import Path

Arrays = dict[str, NDArray[Any]]

HIDDEN, FFN, EXPERT_FFN, VOCABULARY = 8, 6, 3, 11
HEADS, KV_HEADS, HEAD_DIM, EXPERTS, LAYERS = 6, 2, 4, 3, 2

CONFIGS: dict[str, dict[str, object]] = {
    family: {
        "model_type": family,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
    }
    for family in FAMILIES
}
CONFIGS["mixtral"]["num_local_experts"] = EXPERTS
CONFIGS["qwen3_moe"]["num_experts"] = EXPERTS
CONFIGS["deepseek_v3"] |= {"n_routed_experts": EXPERTS, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}


def random(*shape: int) -> NDArray[Any]:
    random.count += 1  # type: ignore[attr-defined]
    return np.random.default_rng(random.count).integers(0, 1 << 30, shape)  # type: ignore[attr-defined]


random.count = 0  # type: ignore[attr-defined]


class Model:
    """A small model under Hugging Face names, and under those of another naming as it is put together."""

    def __init__(self, family: str, naming: str) -> None:
        self.family, self.is_mindspore = family, naming == "mindspore"
        self.hf: Arrays = {}
        self.mcore: Arrays = {}
        self.both("model.embed_tokens.weight", "embedding.word_embeddings.weight", VOCABULARY, HIDDEN)
        self.both("model.norm.weight", "decoder.final_layernorm.weight", HIDDEN)
        self.both("lm_head.weight", "output_layer.weight", VOCABULARY, HIDDEN)
        for i in range(LAYERS):
            self.layer(f"model.layers.{i}", f"decoder.layers.{i}", is_dense=self.is_dense(i))
        if family == "deepseek_v3":
            hf, mtp = f"model.layers.{LAYERS}", "mtp.layers.0"
            self.both(f"{hf}.enorm.weight", f"{mtp}.enorm.weight", HIDDEN)
            self.both(f"{hf}.hnorm.weight", f"{mtp}.hnorm.weight", HIDDEN)
            self.both(f"{hf}.eh_proj.weight", f"{mtp}.eh_proj.weight", HIDDEN, 2 * HIDDEN)
            self.both(f"{hf}.shared_head.norm.weight", f"{mtp}.final_layernorm.weight", HIDDEN)
            self.hf[f"{hf}.embed_tokens.weight"] = self.hf["model.embed_tokens.weight"]
            self.hf[f"{hf}.shared_head.head.weight"] = self.hf["lm_head.weight"]
            self.layer(hf, f"{mtp}.transformer_layer", is_dense=False)

    def is_dense(self, i: int) -> bool:
        return self.family not in ("mixtral", "qwen3_moe") and not (self.family == "deepseek_v3" and i > 0)

    def both(self, hf: str, mcore: str, *shape: int) -> None:
        self.hf[hf] = self.mcore[mcore] = random(*shape)

    def layer(self, hf: str, mcore: str, *, is_dense: bool) -> None:
        norm_in, norm_out = "input_layernorm.weight", "pre_mlp_layernorm.weight"
        if not self.is_mindspore:  # layers of Transformer Engine
            if self.family != "deepseek_v3":
                norm_in = "self_attention.linear_qkv.layer_norm_weight"
            if is_dense:
                norm_out = "mlp.linear_fc1.layer_norm_weight"
        self.both(f"{hf}.input_layernorm.weight", f"{mcore}.{norm_in}", HIDDEN)
        self.both(f"{hf}.post_attention_layernorm.weight", f"{mcore}.{norm_out}", HIDDEN)
        if self.family == "deepseek_v3":
            self.latent_attention(f"{hf}.self_attn", f"{mcore}.self_attention")
        else:
            self.attention(f"{hf}.self_attn", f"{mcore}.self_attention")
        if is_dense:
            self.dense(f"{hf}.mlp", f"{mcore}.mlp", FFN)
        else:
            self.experts(hf, f"{mcore}.mlp")

    def attention(self, hf: str, mcore: str) -> None:
        q, k, v = (random(n * HEAD_DIM, HIDDEN) for n in (HEADS, KV_HEADS, KV_HEADS))
        self.hf |= {f"{hf}.q_proj.weight": q, f"{hf}.k_proj.weight": k, f"{hf}.v_proj.weight": v}
        # mindformers: reshape to (groups, heads of the group, ...) and concatenate; so does Megatron-Bridge.
        groups: list[NDArray[Any]] = [part.reshape(KV_HEADS, -1, HIDDEN) for part in (q, k, v)]
        self.mcore[f"{mcore}.linear_qkv.weight"] = np.concatenate(groups, axis=1).reshape(-1, HIDDEN)
        if self.family == "qwen2":
            biases = [random(n * HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS)]
            self.hf |= {f"{hf}.{n}_proj.bias": bias for n, bias in zip("qkv", biases, strict=True)}
            groups = [bias.reshape(KV_HEADS, -1) for bias in biases]
            self.mcore[f"{mcore}.linear_qkv.bias"] = np.concatenate(groups, axis=1).reshape(-1)
        if self.family.startswith("qwen3"):
            self.both(f"{hf}.q_norm.weight", f"{mcore}.q_layernorm.weight", HEAD_DIM)
            self.both(f"{hf}.k_norm.weight", f"{mcore}.k_layernorm.weight", HEAD_DIM)
        self.both(f"{hf}.o_proj.weight", f"{mcore}.linear_proj.weight", HIDDEN, HEADS * HEAD_DIM)

    def latent_attention(self, hf: str, mcore: str) -> None:
        for ours, theirs, shape in (
            ("q_a_proj", "linear_q_down_proj", (5, HIDDEN)),
            ("q_b_proj", "linear_q_up_proj", (HEADS * HEAD_DIM, 5)),
            ("kv_a_proj_with_mqa", "linear_kv_down_proj", (7, HIDDEN)),
            ("kv_b_proj", "linear_kv_up_proj", (HEADS * 2 * HEAD_DIM, 5)),
            ("o_proj", "linear_proj", (HIDDEN, HEADS * HEAD_DIM)),
        ):
            self.both(f"{hf}.{ours}.weight", f"{mcore}.{theirs}.weight", *shape)
        for part in ("q", "kv"):
            name = f"{part}_layernorm.weight" if self.is_mindspore else f"linear_{part}_up_proj.layer_norm_weight"
            self.both(f"{hf}.{part}_a_layernorm.weight", f"{mcore}.{name}", 5)

    def dense(self, hf: str, mcore: str, ffn: int) -> None:
        gate, up = random(ffn, HIDDEN), random(ffn, HIDDEN)
        self.hf |= {f"{hf}.gate_proj.weight": gate, f"{hf}.up_proj.weight": up}
        if self.is_mindspore:
            # reverse_mcore_qwen3_weight_to_hf.py: fc1[::2] is the gate, fc1[1::2] is up.
            fused = np.empty((2 * ffn, HIDDEN), gate.dtype)
            fused[::2], fused[1::2] = gate, up
        else:
            fused = np.concatenate([gate, up])
        self.mcore[f"{mcore}.linear_fc1.weight"] = fused
        self.both(f"{hf}.down_proj.weight", f"{mcore}.linear_fc2.weight", HIDDEN, ffn)

    def experts(self, hf: str, mcore: str) -> None:
        module = f"{hf}.block_sparse_moe" if self.family == "mixtral" else f"{hf}.mlp"
        names = ("w1", "w3", "w2") if self.family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        self.both(f"{module}.gate.weight", f"{mcore}.router.weight", EXPERTS, HIDDEN)
        if self.family == "deepseek_v3":
            self.both(f"{module}.gate.e_score_correction_bias", f"{mcore}.router.expert_bias", EXPERTS)
            self.dense(f"{hf}.mlp.shared_experts", f"{mcore}.shared_experts", EXPERT_FFN)
        gates, ups, downs = [], [], []
        for e in range(EXPERTS):
            gates.append(random(EXPERT_FFN, HIDDEN))
            ups.append(random(EXPERT_FFN, HIDDEN))
            downs.append(random(HIDDEN, EXPERT_FFN))
            for name, array in zip(names, (gates[e], ups[e], downs[e]), strict=True):
                self.hf[f"{module}.experts.{e}.{name}.weight"] = array
            if not self.is_mindspore:
                self.mcore[f"{mcore}.experts.linear_fc1.weight{e}"] = np.concatenate([gates[e], ups[e]])
                self.mcore[f"{mcore}.experts.linear_fc2.weight{e}"] = downs[e]
        if self.is_mindspore:
            # ExpertsConvertOp: [experts * hidden, 2 * ffn] and [experts * ffn, hidden].
            first = np.concatenate([np.stack(gates).transpose(0, 2, 1), np.stack(ups).transpose(0, 2, 1)], axis=2)
            self.mcore[f"{mcore}.experts.weight1"] = first.reshape(EXPERTS * HIDDEN, -1)
            self.mcore[f"{mcore}.experts.weight2"] = (
                np.stack(downs).transpose(0, 2, 1).reshape(EXPERTS * EXPERT_FFN, -1)
            )


def saved(arrays: Arrays, folder: Path) -> Path:
    folder.mkdir()
    save_file({key: np.ascontiguousarray(array) for key, array in arrays.items()}, folder / "model.safetensors")
    return folder


def check_equal(found: Arrays, expected: Arrays) -> None:
    assert sorted(found) == sorted(expected)
    assert [key for key, array in expected.items() if found[key].tolist() != array.tolist()] == []


STACKED = "megatron_dist"
PRESETS = [
    (family, naming)
    for naming in NAMINGS
    if naming != GGUF  # tests/formats/gguf/test_gguf.py
    for family in families_of(naming)
]


def stacked(arrays: Arrays) -> Arrays:
    """The layers of a model in one tensor each."""
    layers: dict[str, dict[int, np.ndarray]] = {}
    for key, array in arrays.items():
        head, found, tail = key.partition("decoder.layers.")
        number, _, name = tail.partition(".")
        layers.setdefault(f"{head}{found}{name}" if found else key, {})[int(number) if found else -1] = array
    return {
        key: of_key[-1] if -1 in of_key else np.stack([of_key[i] for i in sorted(of_key)])
        for key, of_key in layers.items()
    }


@pytest.mark.parametrize(("family", "naming"), PRESETS)
def test_preset(family: str, naming: str, tmp_path: Path) -> None:
    model = Model(family, naming.removesuffix("_dist"))
    if naming == STACKED:
        model.mcore = stacked(model.mcore)
    hf = saved(model.hf, tmp_path / "hf")
    (hf / "config.json").write_text(json.dumps(CONFIGS[family]))
    with reshard.open(hf, names=naming) as renamed:  # family and sizes from the config beside the weights
        check_equal(renamed.load(), model.mcore)
    mcore = saved(model.mcore, tmp_path / "mcore")
    with reshard.open(mcore) as opened, opened.renamed(f"{family}-{naming}:reverse", config=hf) as back:
        check_equal(back.load(), model.hf)


@pytest.mark.parametrize(("family", "naming"), PRESETS)
def test_preset_prints_as_a_file(family: str, naming: str, tmp_path: Path) -> None:
    names = reshard.NameMap.preset(f"{family}-{naming}", CONFIGS[family])
    (tmp_path / "names.yaml").write_text(str(names))
    assert reshard.NameMap.from_yaml(tmp_path / "names.yaml") == names


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_megatron_is_read_under_the_names_of_layers_without_transformer_engine(family: str, tmp_path: Path) -> None:
    model = Model(family, "megatron")

    def plain(key: str) -> str:
        key = key.replace("transformer_layer", "mtp_model_layer")
        key = key.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
        key = key.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
        for part in ("q", "kv"):
            key = key.replace(f"linear_{part}_up_proj.layer_norm_weight", f"{part}_layernorm.weight")
        head, found, tail = key.partition("mlp.experts.linear_fc")
        return f"{head}mlp.experts.local_experts.{tail[8:]}.linear_fc{tail[0]}.weight" if found else key

    folder = saved({plain(key): array for key, array in model.mcore.items()}, tmp_path / "mcore")
    with reshard.open(folder) as opened, opened.renamed("megatron:reverse", config=CONFIGS[family]) as back:
        check_equal(back.load(), model.hf)


def test_mindspore_layouts_of_weights_are_taken_from_the_config(tmp_path: Path) -> None:
    config = CONFIGS["qwen3"] | {
        "use_contiguous_weight_layout_attention": True,
        "use_interleaved_weight_layout_mlp": False,
    }
    model = Model("qwen3", "mindspore")
    with (
        reshard.open(saved(model.hf, tmp_path / "hf")) as opened,
        opened.renamed("mindspore", config=config) as renamed,
    ):
        prefix = "model.layers.1.self_attn"
        qkv = [model.hf[f"{prefix}.{part}_proj.weight"] for part in "qkv"]
        found = renamed.read("decoder.layers.1.self_attention.linear_qkv.weight")
        assert found.tolist() == np.concatenate(qkv).tolist()
        fc1 = [model.hf[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up")]
        assert renamed.read("decoder.layers.1.mlp.linear_fc1.weight").tolist() == np.concatenate(fc1).tolist()


def test_tied_embeddings_stay_one_tensor(tmp_path: Path) -> None:
    model = Model("qwen2", "mindspore")
    del model.hf["lm_head.weight"], model.mcore["output_layer.weight"]
    hf = saved(model.hf, tmp_path / "hf")
    with reshard.open(hf) as opened, opened.renamed("mindspore", config=CONFIGS["qwen2"]) as renamed:
        check_equal(renamed.load(), model.mcore)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("mindspore", None, "needs the model's config.json for the model family"),
        ("megatron_dist", None, "family: llama-megatron_dist, mistral-[^,]*, qwen2-[^,]*, qwen3-megatron_dist$"),
        ("mindspore", {"model_type": "gpt5"}, "no preset for the model_type `gpt5`"),
        ("mindspore", {}, "no preset for the model_type `None`"),
        ("qwen3-mindspor", None, "neither a file nor a preset.*\n.*did you mean 'qwen3-mindspore'"),
        ("deepseek_v3-megatron", None, "needs a config.json with `num_hidden_layers`"),
        ("deepseek_v3-megatron", {"num_hidden_layers": -1}, "`num_hidden_layers`, an integer"),
        ("deepseek_v3-megatron", {"num_hidden_layers": 1, "num_nextn_predict_layers": 10**9}, "at most 64"),
        ("deepseek_v3-megatron", {"num_hidden_layers": 1, "first_k_dense_replace": "3"}, "`first_k_dense_replace`"),
        ("llama-megatron", {"num_attention_heads": 6, "hidden_size": 8}, "`head_dim`.*8 is not divisible by 6"),
    ],
)
def test_preset_that_cannot_be(name: str, config: dict[str, object] | None, message: str) -> None:
    with pytest.raises((ArgumentError, NamesError), match=message):
        reshard.NameMap.preset(name, config)


def test_what_a_preset_does_not_know_is_refused(tmp_path: Path) -> None:
    hf = Model("llama", "megatron").hf | {"model.layers.0.self_attn.q_proj.weight_scale_inv": random(1, 1)}
    with reshard.open(saved(hf, tmp_path / "hf")) as opened:
        with pytest.raises(NamesError, match=r"no rule of the name map matches .*weight_scale_inv"):
            opened.renamed("megatron", config=CONFIGS["llama"])
        with pytest.raises(NamesError, match=r"no rule .* matches any.*\n.*`:reverse`"):
            opened.renamed("megatron:reverse", config=CONFIGS["llama"])
    del hf["model.layers.0.self_attn.q_proj.weight_scale_inv"]
    needed = r"needs the size `heads`, which is not known\n.*config.json"
    with reshard.open(saved(hf, tmp_path / "plain")) as opened, pytest.raises(NamesError, match=needed):
        opened.renamed("llama-megatron")
