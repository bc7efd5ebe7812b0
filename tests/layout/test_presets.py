"""Presets and tensor-parallel plans: what each tensor of a small model of the family is cut into.

The keys and shapes are those of the models that transformers 4.57 makes of the configs below.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reshard.errors import ArgumentError, CheckpointNotFoundError, DamagedFileError, LayoutError, StorageError
from reshard.layout import ModelLayout
from reshard.layout.presets import FAMILIES
from reshard.layout.resolve import resolve

if TYPE_CHECKING:
    from pathlib import Path

Shapes = dict[str, tuple[int, ...]]

CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 101,
}
CONFIGS: dict[str, dict[str, Any]] = {
    **{name: {**CONFIG, "model_type": name} for name in FAMILIES},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 8, "vocab_size": 101},
}

# The dims that are cut by two ranks; {i} stands for each of 3 layers, {e} for each of 4 experts.
EMBED = {"model.embed_tokens.weight": ((101, 64), 0)}
HEAD = {"model.norm.weight": ((64,), None), "lm_head.weight": ((101, 64), 0)}
L = "model.layers.{i}."
ATTENTION = {
    L + "self_attn.q_proj.weight": ((64, 64), 0),
    L + "self_attn.k_proj.weight": ((32, 64), 0),
    L + "self_attn.v_proj.weight": ((32, 64), 0),
    L + "self_attn.o_proj.weight": ((64, 64), 1),
    L + "input_layernorm.weight": ((64,), None),
    L + "post_attention_layernorm.weight": ((64,), None),
}
QKV_BIAS = {f"{L}self_attn.{name}_proj.bias": ((size,), 0) for name, size in (("q", 64), ("k", 32), ("v", 32))}
QK_NORM = {L + "self_attn.q_norm.weight": ((8,), None), L + "self_attn.k_norm.weight": ((8,), None)}


def mlp(at: str, width: int = 96) -> dict[str, Any]:
    return {
        f"{L}{at}.gate_proj.weight": ((width, 64), 0),
        f"{L}{at}.up_proj.weight": ((width, 64), 0),
        f"{L}{at}.down_proj.weight": ((64, width), 1),
    }


LLAMA = EMBED | ATTENTION | mlp("mlp") | HEAD
GEMMA = EMBED | ATTENTION | mlp("mlp") | {"model.norm.weight": ((64,), None)}
ROUTED = {L + "mlp.gate.weight": ((4, 64), None)} | mlp("mlp.experts.{e}", 32)
DEEPSEEK = (
    EMBED
    | {
        L + "self_attn.q_a_proj.weight": ((24, 64), None),
        L + "self_attn.q_a_layernorm.weight": ((24,), None),
        L + "self_attn.q_b_proj.weight": ((128, 24), 0),
        L + "self_attn.kv_a_proj_with_mqa.weight": ((24, 64), None),
        L + "self_attn.kv_a_layernorm.weight": ((16,), None),
        L + "self_attn.kv_b_proj.weight": ((128, 16), 0),
        L + "self_attn.o_proj.weight": ((64, 64), 1),
    }
    | ROUTED
    | mlp("mlp.shared_experts", 32)
    | HEAD
)
H = "transformer.h.{i}."

MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA
    | QKV_BIAS
    | {L + "self_attn.o_proj.bias": ((64,), None), L + "mlp.down_proj.bias": ((64,), None)}
    | {L + "mlp.gate_proj.bias": ((96,), 0), L + "mlp.up_proj.bias": ((96,), 0)},
    "mistral": LLAMA,
    "qwen2": LLAMA | QKV_BIAS,
    "qwen3": LLAMA | QK_NORM,
    "gemma": GEMMA,
    "gemma2": GEMMA | {L + "pre_feedforward_layernorm.weight": ((64,), None)},
    "gemma3_text": GEMMA | QK_NORM,
    "mixtral": EMBED
    | ATTENTION
    | {
        L + "block_sparse_moe.gate.weight": ((4, 64), None),
        L + "block_sparse_moe.experts.{e}.w1.weight": ((96, 64), 0),
        L + "block_sparse_moe.experts.{e}.w2.weight": ((64, 96), 1),
        L + "block_sparse_moe.experts.{e}.w3.weight": ((96, 64), 0),
    }
    | HEAD,
    "qwen2_moe": EMBED
    | ATTENTION
    | QKV_BIAS
    | ROUTED
    | mlp("mlp.shared_expert", 64)
    | {L + "mlp.shared_expert_gate.weight": ((1, 64), None)}
    | HEAD,
    "qwen3_moe": EMBED | ATTENTION | QK_NORM | ROUTED | HEAD,
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK
    | {
        L + "mlp.gate.e_score_correction_bias": ((4,), None),
        L + "self_attn.q_b_proj.weight_scale_inv": ((2, 1), 0),
        L + "self_attn.o_proj.weight_scale_inv": ((1, 2), 1),
    },
    "phi3": EMBED
    | {
        L + "self_attn.o_proj.weight": ((64, 64), 1),
        L + "self_attn.qkv_proj.weight": ((128, 64), 0),
        L + "mlp.gate_up_proj.weight": ((192, 64), 0),
        L + "mlp.down_proj.weight": ((64, 96), 1),
    }
    | HEAD,
    "gpt2": {
        "transformer.wte.weight": ((101, 64), 0),
        "transformer.wpe.weight": ((32, 64), None),
        H + "ln_1.weight": ((64,), None),
        H + "attn.c_attn.weight": ((64, 192), 1),
        H + "attn.c_attn.bias": ((192,), 0),
        H + "attn.c_proj.weight": ((64, 64), 0),
        H + "attn.c_proj.bias": ((64,), None),
        H + "mlp.c_fc.weight": ((64, 256), 1),
        H + "mlp.c_fc.bias": ((256,), 0),
        H + "mlp.c_proj.weight": ((256, 64), 0),
        H + "mlp.c_proj.bias": ((64,), None),
        "transformer.ln_f.weight": ((64,), None),
    },
}


def keys_of(template: str) -> list[str]:
    layers = [template.replace("{i}", str(i)) for i in range(3)] if "{i}" in template else [template]
    return [key.replace("{e}", str(e)) for key in layers for e in range(4 if "{e}" in template else 1)]


def tensors_of(name: str) -> Shapes:
    return {key: shape for template, (shape, _) in MODELS[name].items() for key in keys_of(template)}


def rows(layout: Any, rank: int, shape: tuple[int, ...], dim: int) -> list[int]:
    """Which elements of a dim a rank holds, in the order in which it holds them."""
    local = np.full(layout.local_shape(rank), -1)
    indices = np.indices(shape)[dim] if shape else np.zeros(())
    for offset, extent, local_offset, strides in layout.tiles(rank):
        wanted = indices[tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))]
        where = local_offset + sum(n * s for n, s in zip(np.indices(extent), strides, strict=True))
        local.reshape(-1)[where] = wanted
    assert (local >= 0).all()
    return list(np.moveaxis(local, dim, 0).reshape(local.shape[dim], -1)[:, 0])


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_each_tensor_is_cut_over_two_ranks_where_the_family_says(name: str) -> None:
    bound = ModelLayout.preset(CONFIGS[name], tp=2).bind(tensors_of(name), strict=True)
    for template, (shape, dim) in MODELS[name].items():
        for key in keys_of(template):
            for rank in range(2):
                local = bound.layouts[key].local_shape(rank)
                if dim is None:
                    assert local == shape, key
                    continue
                half = [-(-shape[dim] // 2), shape[dim] // 2][rank]
                assert local == (*shape[:dim], half, *shape[dim + 1 :]), key


@pytest.mark.parametrize(
    ("name", "key", "dim", "blocks"),
    [
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight", 0, [64, 32, 32]),
        ("phi3", "model.layers.0.mlp.gate_up_proj.weight", 0, [96, 96]),
        ("gpt2", "transformer.h.0.attn.c_attn.weight", 1, [64, 64, 64]),
        ("gpt2", "transformer.h.0.attn.c_attn.bias", 0, [64, 64, 64]),
    ],
)
def test_fused_dims_are_cut_block_by_block(name: str, key: str, dim: int, blocks: list[int]) -> None:
    tensors = tensors_of(name)
    bound = ModelLayout.preset(CONFIGS[name], tp=4).bind(tensors)
    parts = [np.array_split(part, 4) for part in np.split(np.arange(sum(blocks)), np.cumsum(blocks)[:-1])]
    for rank in range(4):
        wanted = np.concatenate([part[rank] for part in parts])
        assert rows(bound.layouts[key], rank, tensors[key], dim) == list(wanted)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_layers_are_divided_over_stages_and_ends_stand_at_the_ends(name: str) -> None:
    layout = ModelLayout.preset(CONFIGS[name], tp=2, pp=2, dp=3)
    assert list(layout.mesh.items()) == [("pp", 2), ("dp", 3), ("tp", 2)]
    resolved = resolve(layout, tensors_of(name))
    assert resolved.warnings == []
    stage = {key: [at for _, at in spec.place] for key, spec in resolved.layouts.items()}
    for key, found in stage.items():
        parts = key.split(".")
        layer = next((int(part) for part in parts if part.isdigit()), None)
        if layer is not None:
            assert found == [[0], [0], [1]][layer], key  # 3 layers: 2 and 1
        elif "embed_tokens" in key or "wte" in key:
            assert found == ([] if name.startswith("gemma") or name == "gpt2" else [0])  # tied: the last needs it too
        elif "wpe" in key:
            assert found == [0]
        else:
            assert found == [1], key


def test_experts_are_divided() -> None:
    layout = ModelLayout.preset(CONFIGS["mixtral"], tp=2, ep=2)
    assert list(layout.mesh.items()) == [("ep", 2), ("tp", 2)]
    specs = resolve(layout, tensors_of("mixtral")).layouts
    for e in range(4):
        spec = specs[f"model.layers.1.block_sparse_moe.experts.{e}.w2.weight"]
        assert spec.place == ((("ep",), e // 2),)
        assert spec.partition.cut == ((), ("tp",))
    assert specs["model.layers.1.block_sparse_moe.gate.weight"].place == ()
    shared = resolve(ModelLayout.preset("deepseek_v3", ep=2), tensors_of("deepseek_v3")).layouts
    assert shared["model.layers.1.mlp.shared_experts.up_proj.weight"].place == ()
    with pytest.raises(ArgumentError, match="the family llama has no experts to divide over ep=2"):
        ModelLayout.preset("llama", ep=2)


OPTIONAL = {"optional": True}  # not each member of a family has it


def test_a_name_is_enough_where_nothing_is_fused() -> None:
    assert ModelLayout.preset("llama", tp=4, pp=2).to_mapping() == {
        "mesh": {"pp": 2, "tp": 4},
        "rules": [
            {"match": ["*embed_tokens.weight", "lm_head.weight"], "cut": ["tp"], "uneven": "ceil", **OPTIONAL},
            {
                "match": [
                    f"*.{name}_proj.{suffix}" for name in ("q", "gate", "up", "k", "v") for suffix in ("weight", "bias")
                ],
                "cut": ["tp"],
                **OPTIONAL,
            },
            {"match": ["*.o_proj.weight", "*.down_proj.weight"], "cut": [None, "tp"], **OPTIONAL},
            {"match": "*"},
        ],
        "place": [
            {"match": "model.layers.{i}.*", "axis": "pp"},
            {"match": "model.embed_tokens.*", "axis": "pp", "at": 0, **OPTIONAL},
            {"match": ["model.norm.*", "lm_head.*"], "axis": "pp", "at": -1, **OPTIONAL},
        ],
    }
    with pytest.raises(ArgumentError, match="`hidden_size` is needed: it says how large the fused blocks"):
        ModelLayout.preset("phi3")


def test_fewer_key_value_heads_than_ranks_are_repeated_on_neighbours() -> None:
    layout = ModelLayout.preset({**CONFIGS["llama"], "num_key_value_heads": 2}, tp=8)
    assert list(layout.mesh.items()) == [("tp_kv", 2), ("tp_rep", 4)]
    tensors: Shapes = {
        "model.layers.0.self_attn.k_proj.weight": (16, 64),
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
    }
    bound = layout.bind(tensors)
    k, q = (bound.layouts[key] for key in tensors)
    for rank in range(8):
        head = rank // 4  # 8 query heads in two groups of 4, each with one key head
        assert rows(k, rank, (16, 64), 0) == list(range(8 * head, 8 * head + 8))
        assert rows(q, rank, (64, 64), 0) == list(range(8 * rank, 8 * rank + 8))


def test_fused_key_value_heads_that_do_not_divide_are_whole() -> None:
    tensors: Shapes = {"model.layers.0.self_attn.qkv_proj.weight": (112, 64)}
    bound = ModelLayout.preset({**CONFIGS["phi3"], "num_key_value_heads": 3}, tp=4).bind(tensors)
    (layout,) = bound.layouts.values()
    assert rows(layout, 1, (112, 64), 0) == [*range(16, 32), *range(64, 112)]


@pytest.mark.parametrize(
    ("change", "tp", "message"),
    [
        ({"num_key_value_heads": 3}, 2, "config: 3 key-value heads of llama neither divide over tp=2 nor repeat on it"),
        ({"num_attention_heads": 6}, 4, "config: 6 attention heads do not divide over tp=4"),
        ({"num_attention_heads": "8"}, 4, "config: `num_attention_heads` is no usable number: `'8'`"),
        ({"num_attention_heads": -8}, 4, "`num_attention_heads` is no usable number"),
    ],
)
def test_heads_that_do_not_divide_are_refused(change: dict[str, Any], tp: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        ModelLayout.preset({**CONFIGS["llama"], **change}, tp=tp)


@pytest.mark.parametrize("stored", [True, False])
def test_prediction_layers_behind_the_last_go_with_the_head(*, stored: bool) -> None:
    config = {**CONFIGS["deepseek_v3"], "num_nextn_predict_layers": 1}
    tensors = tensors_of("deepseek_v3")
    if stored:
        tensors["model.layers.3.eh_proj.weight"] = (64, 128)
        tensors["model.layers.3.shared_head.head.weight"] = (101, 64)
    resolved = resolve(ModelLayout.preset(config, tp=2, pp=3), tensors)
    assert resolved.warnings == []
    specs = resolved.layouts
    assert [specs[f"model.layers.{i}.self_attn.o_proj.weight"].place for i in range(3)] == [
        ((("pp",), i),) for i in range(3)
    ]
    if stored:
        assert specs["model.layers.3.eh_proj.weight"].place == ((("pp",), 2),)
        assert specs["model.layers.3.shared_head.head.weight"].partition.cut == (("tp",),)


def test_a_config_can_be_a_file_or_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["qwen3"]))
    wanted = ModelLayout.preset(CONFIGS["qwen3"], tp=2, pp=2)
    assert ModelLayout.preset(path, tp=2, pp=2) == ModelLayout.preset(str(tmp_path), tp=2, pp=2) == wanted


def test_a_pipe_in_a_folder_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(DamagedFileError, match="not a regular file"):
        ModelLayout.preset(str(tmp_path), tp=2)


def test_a_tied_head_is_what_the_config_says() -> None:
    layout = ModelLayout.preset({**CONFIGS["qwen3"], "tie_word_embeddings": True}, pp=2)
    assert resolve(layout, tensors_of("qwen3")).layouts["model.embed_tokens.weight"].place == ()
    layout = ModelLayout.preset({**CONFIGS["gemma"], "tie_word_embeddings": False}, pp=2)
    assert resolve(layout, tensors_of("gemma")).layouts["model.embed_tokens.weight"].place == ((("pp",), 0),)


def test_unusable_configs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError) as caught:
        ModelLayout.preset("lama")
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("did you mean 'llama'? ")
    with pytest.raises(ArgumentError, match="no preset for the model_type `bert`"):
        ModelLayout.preset({"model_type": "bert"})
    with pytest.raises(ArgumentError, match="no preset for the model_type `None`"):
        ModelLayout.preset({})
    with pytest.raises(StorageError):
        ModelLayout.preset("nul\0")
    path = tmp_path / "config.json"
    for text in ("{", "[" * 100_000, "\xff"):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(LayoutError, match="not JSON"):
            ModelLayout.preset(path)
    path.write_text("[]")
    with pytest.raises(LayoutError, match="a config is a JSON object"):
        ModelLayout.preset(path)
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(LayoutError, match="larger than 16 MiB"):
        ModelLayout.preset(path)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"tp": 0}, "must be an integer of at least 1"),
        ({"pp": -1}, "must be an integer of at least 1"),
        ({"dp": True}, "`dp` is True, expected a whole number"),
        ({"ep": 1.0}, "`ep` is 1.0, expected a whole number"),
    ],
)
def test_sizes_of_axes_are_positive_integers(sizes: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        ModelLayout.preset("llama", **sizes)


# -- plans

COLUMN = ("colwise", "colwise_rep", "colwise_gather_output", "local_colwise")
ROW = ("rowwise", "rowwise_rep", "rowwise_split_input", "local_rowwise")
WHOLE = (
    *("all_reduce", "ep_dispatch_experts", "ep_router", "gather", "local", "local_params", "mla_kv_a_proj"),
    *("moe_identity_expert", "moe_tp_experts", "replicate", "replicated_with_grad_allreduce", "sequence_parallel"),
)
# Style, key, shape, the dim that four ranks cut (None: whole), how many equal blocks it has.
STYLES: list[tuple[str, str, tuple[int, ...], int | None, int]] = [
    *((style, "m.weight", (16, 32), 0, 1) for style in COLUMN),
    *((style, "m.bias", (16,), 0, 1) for style in COLUMN),
    *((style, "m.weight", (16, 32), 1, 1) for style in ROW),
    *((style, "m.bias", (16,), None, 1) for style in ROW),
    ("packed_colwise", "m.weight", (16, 32), 0, 2),
    ("packed_colwise", "m.bias", (16,), 0, 2),
    ("packed_rowwise", "m.weight", (16, 32), 1, 2),
    ("packed_rowwise", "m.bias", (16,), None, 1),
    ("local_packed_rowwise", "m.weight", (16, 32), 1, 2),
    ("embedding_rowwise", "m.weight", (16, 32), 0, 1),
    ("embedding_colwise", "m.weight", (16, 32), 1, 1),
    *((style, "m.weight", (16, 32), None, 1) for style in WHOLE),
    # Parameters: of stacked experts the dims count from the end, attention sinks are as a bias.
    ("colwise", "m", (16,), 0, 1),
    ("grouped_gemm", "mlp.experts.down_proj", (8, 16, 32), 0, 1),
    ("grouped_gemm", "mlp.experts.down_proj_bias", (8, 16), 0, 1),
    ("colwise", "mlp.experts.down_proj", (8, 16, 32), 1, 1),
    ("rowwise", "mlp.experts.down_proj", (8, 16, 32), 2, 1),
    ("packed_colwise", "mlp.experts.gate_up_proj", (8, 16, 32), 1, 2),
    ("packed_rowwise", "mlp.experts.gate_up_proj", (8, 16, 32), 2, 2),
]  # fmt: skip


@pytest.mark.parametrize(("style", "key", "shape", "dim", "n_blocks"), STYLES)
def test_a_style_of_a_plan(style: str, key: str, shape: tuple[int, ...], dim: int | None, n_blocks: int) -> None:
    name = "layers.*." + key.removesuffix(".weight").removesuffix(".bias")
    for prefix in ("", "model."):
        full = f"{prefix}layers.3.{key}"
        bound = ModelLayout.from_tp_plan({name: style}, tp=4).bind({full: shape})
        for rank in range(4):
            assert bound.layouts[full].holders() == [0, 1, 2, 3]
            if dim is None:
                assert bound.layouts[full].local_shape(rank) == shape
                continue
            parts = [np.split(block, 4)[rank] for block in np.split(np.arange(shape[dim]), n_blocks)]
            assert rows(bound.layouts[full], rank, shape, dim) == list(np.concatenate(parts))


def test_a_plan_cuts_as_torch_chunks() -> None:
    bound = ModelLayout.from_tp_plan({"lm_head": "colwise_rep"}, tp=4).bind({"lm_head.weight": (10, 2)})
    assert [bound.layouts["lm_head.weight"].local_shape(rank)[0] for rank in range(4)] == [3, 3, 3, 1]


def test_the_exact_name_decides_in_a_plan_whatever_the_order() -> None:
    plan = {"layers.*.gate": "colwise", "layers.*.moe.gate": "replicate", "layers.*.moe.x.gate": "rowwise"}
    found = resolve(
        ModelLayout.from_tp_plan(plan, tp=4),
        {f"layers.0.{name}.weight": (8, 8) for name in ("gate", "moe.gate", "moe.x.gate")},
    ).layouts
    assert [spec.partition.cut for spec in found.values()] == [(("tp",),), (), ((), ("tp",))]


def test_an_unknown_style_is_refused() -> None:
    with pytest.raises(LayoutError) as caught:
        ModelLayout.from_tp_plan({"layers.*.q_proj": "columnwise"}, tp=4)
    assert caught.value.message == "the plan gives `layers.*.q_proj` the unknown style `columnwise`"
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("did you mean `colwise`? known are all_reduce, colwise,")
    with pytest.raises(ArgumentError, match="tp must be an integer of at least 1, found 0"):
        ModelLayout.from_tp_plan({}, tp=0)


def test_the_plan_of_llama() -> None:
    plan = {
        f"layers.*.{name}": style
        for style, names in {
            "colwise": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"],
            "rowwise": ["self_attn.o_proj", "mlp.down_proj"],
        }.items()
        for name in names
    }
    planned = resolve(ModelLayout.from_tp_plan({**plan, "lm_head": "colwise_rep"}, tp=2), tensors_of("mistral"))
    preset = resolve(ModelLayout.preset("mistral", tp=2), tensors_of("mistral"))
    differing = [
        key for key, spec in planned.layouts.items() if spec.partition.cut != preset.layouts[key].partition.cut
    ]
    assert differing == ["model.embed_tokens.weight"]  # the plan leaves it whole
    assert planned.warnings == []
