"""Name maps of model families: from Hugging Face names to those of MindSpore Transformers, of Megatron-core or of GGUF.

Sources:

- Hugging Face: the modelling files of transformers (`models/llama`, `qwen2`, `qwen3`, `qwen3_moe`, `mixtral`,
  `deepseek_v3`) and the published checkpoints, which have one tensor an expert.
- MindSpore Transformers: `weight_converters` of `mindformers/models/qwen3/utils.py` and `qwen3_moe/utils.py` over
  `mindformers/checkpoint/converter/convert_op.py`, `toolkit/weight_convert/*/reverse_mcore_*_weight_to_hf.py`, and the
  parameters of `mindformers/parallel_core/training_graph`. Query, key and value heads of a group are
  adjacent; gate and up rows alternate in dense and shared MLPs (`use_interleaved_weight_layout_mlp`, on by default);
  experts are concatenated, transposed, gate before up. With `use_contiguous_weight_layout_attention`, query, key and
  value are concatenated. Both settings are read from the config if it has them.
- Megatron-core: `param_mapping.py` and the bridges of Megatron-Bridge (`models/llama`, `qwen`, `mixtral`, `deepseek`).
  Norms that Transformer Engine fuses into the next linear layer are written in this form. In reverse, the names without
  Transformer Engine are accepted too, and both names of the tensor of an expert. `megatron_dist` has the names of
  `torch_dist`, where one tensor holds all layers; only for families whose layers are all dense.

- GGUF: `gguf/constants.py` and `gguf/tensor_mapping.py` of the package `gguf`, and `LlamaModel.permute` of
  `convert_hf_to_gguf.py`: where llama.cpp rotates neighbouring elements (the architecture `llama`, which llama, mistral
  and mixtral have), the two halves of each head alternate. Experts of a layer are one tensor.

qwen2 is llama with biases, mistral is llama. The converter of MindSpore Transformers lays out the biases of grouped
heads as if every head had its own key; here biases have the layout of their weights. In Hugging Face names the
multi-token prediction layers of DeepSeek follow the last layer, and hold copies of the embedding and the head, which
the other namings do not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from reshard.errors import ArgumentError
from reshard.names.config_fields import config_fields
from reshard.values.words import nearest, show

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_MTP_LAYERS = 64
_MAX_DENSE_LAYERS = 4096


@dataclass(frozen=True)
class _Family:
    """The structure of the layers of a model family, in Hugging Face names.

    Attributes:
        mla: whether attention is multi-head latent attention.
        qk_norm: whether queries and keys have a norm.
        moe: the module of the experts, or None if all layers are dense.
        expert: names of the gate, up and down weights of an expert.
        n_experts: the field of the config with the number of experts.
        always_moe: whether no layer is dense.
        is_mcore: whether there are presets for MindSpore Transformers and Megatron-core.
        is_fused: whether queries, keys and values are one tensor, and gates and ups.
        gguf: whether there is one for GGUF; "halves": the halves of the heads of queries and keys alternate there.
    """

    mla: bool = False
    qk_norm: bool = False
    moe: str | None = None
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    n_experts: str = "num_experts"
    always_moe: bool = False
    is_mcore: bool = True
    is_fused: bool = False
    gguf: Literal["", "plain", "halves"] = "plain"


FAMILIES: Mapping[str, _Family] = {
    "deepseek_v3": _Family(mla=True, moe="mlp", n_experts="n_routed_experts", gguf=""),
    "llama": _Family(gguf="halves"),
    "mistral": _Family(gguf="halves"),
    "mixtral": _Family(
        moe="block_sparse_moe",
        expert=("w1", "w3", "w2"),
        n_experts="num_local_experts",
        always_moe=True,
        gguf="halves",
    ),
    "olmoe": _Family(qk_norm=True, moe="mlp", always_moe=True, is_mcore=False),
    "phi3": _Family(is_fused=True, is_mcore=False),
    "qwen2": _Family(),
    "qwen3": _Family(qk_norm=True),
    "qwen3_moe": _Family(qk_norm=True, moe="mlp", always_moe=True),
}
"""The model families, by the `model_type` of their config."""

GGUF = "gguf"
NAMINGS = ("mindspore", "megatron", "megatron_dist", GGUF)


def families_of(naming: str) -> list[str]:
    """The families that have a preset with a naming: stacked layers cannot have experts."""
    if naming == GGUF:
        return [name for name, family in FAMILIES.items() if family.gguf]
    return [
        name for name, family in FAMILIES.items() if family.is_mcore and (naming != "megatron_dist" or not family.moe)
    ]


def is_preset(text: str) -> bool:
    """Whether the text is the name of a preset."""
    family, _, naming = text.rpartition("-")
    return naming in NAMINGS and (not family or family in FAMILIES)


def unknown(text: str) -> ArgumentError:
    """The error for a text that is neither a file nor a preset."""
    known = [*NAMINGS, *(f"{family}-{naming}" for naming in NAMINGS for family in families_of(naming))]
    near = nearest(text, known, n=1)
    return ArgumentError(
        f"{show(text)} is neither a file nor a preset of names",
        hint=f"did you mean {near[0]!r}?"
        if near
        else f"presets are <family>-<naming> with families {', '.join(FAMILIES)} and namings {', '.join(NAMINGS)}",
    )


def mapping_of_preset(text: str, config: Mapping[str, object] | None) -> dict[str, object]:
    """The name map of a preset; see `NameMap.preset`."""
    if not is_preset(text):
        raise unknown(text)
    name, _, naming = text.rpartition("-")
    if not name:
        if config is None:
            raise ArgumentError(
                f"the preset {text!r} needs the model's config.json for the model family",
                hint="give the file as `config=`; or name the family: "
                + ", ".join(f"{family}-{naming}" for family in families_of(naming)),
            )
        found = config.get("model_type")
        if found not in FAMILIES:
            raise ArgumentError(
                f"no preset for the model_type {show(str(found))}", hint=f"known are {', '.join(FAMILIES)}"
            )
        name = str(found)
    if naming == GGUF:
        return _of_gguf(name, FAMILIES[name])
    if not FAMILIES[name].is_mcore:
        raise ArgumentError(f"there is no preset {naming} for {name}", hint=f"there is {name}-{GGUF}")
    return _RuleBuilder(name, FAMILIES[name], naming, config or {}).mapping()


class _RuleBuilder:
    """Builds the rules of one family and one naming."""

    def __init__(self, name: str, family: _Family, naming: str, config: Mapping[str, object]) -> None:
        self.name = name
        self.family = family
        self.is_mindspore = naming == "mindspore"
        self.is_stacked = naming == "megatron_dist"
        self.config = config
        self.rules: list[dict[str, object]] = []

    def mapping(self) -> dict[str, object]:
        if self.is_stacked and self.family.moe:
            raise ArgumentError(
                f"there is no preset for the stacked layers of {self.name}, which has experts",
                hint="write a name map with `stack`: see docs/reference/names.md",
            )
        # Megatron pads the vocabulary, so that ranks have equal parts of it.
        padded: dict[str, object] = {}
        if not self.is_mindspore:
            sizes = {"from_size": "vocab", "to_size": "padded_vocab", "to_multiple": "vocab_multiple * tp"}
            padded = {"pad": 0, **sizes}
        self.rename("model.embed_tokens.weight", "embedding.word_embeddings.weight", **padded)
        self.rename("model.norm.weight", "decoder.final_layernorm.weight")
        self.rename("lm_head.weight", "output_layer.weight", **padded)
        if self.family.mla:
            self.prediction_layers()
            for i in range(self.number("first_k_dense_replace", _MAX_DENSE_LAYERS)):
                if not self.is_mindspore:
                    self.rename(
                        f"model.layers.{i}.post_attention_layernorm.weight",
                        f"decoder.layers.{i}.mlp.linear_fc1.layer_norm_weight",
                    )
        self.layer("model.layers.{i}", "decoder.layers.{i}")
        if self.is_stacked:
            self.rules = [_stacked(rule) for rule in self.rules]
        return {"sizes": self.sizes(), "other": "refuse", "rules": self.rules}

    def sizes(self) -> dict[str, object]:
        sizes: dict[str, object] = {}
        if not self.is_mindspore:
            # The names of the arguments of Megatron-LM, and its default. A conversion with a layout knows `tp`.
            sizes = {
                "vocab": "vocab_size",
                "padded_vocab": "padded_vocab_size",
                "vocab_multiple": ["make_vocab_size_divisible_by", 128],
                "tp": "tensor_model_parallel_size",
            }
        if not self.family.mla:
            sizes["heads"] = "num_attention_heads"
            sizes["kv_heads"] = ["num_key_value_heads", "num_query_groups", "num_attention_heads"]
            sizes["head_dim"] = ["head_dim", "kv_channels", "hidden_size / num_attention_heads"]
        if self.family.moe and self.is_mindspore:
            sizes["e"] = [self.family.n_experts, "num_moe_experts"]
        if self.is_stacked:
            sizes["i"] = ["num_hidden_layers", "num_layers"]
        return sizes

    def number(self, field: str, maximum: int) -> int:
        """A number of the config that determines the rules."""
        value = config_fields(self.config, [field]).get(field)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= maximum:
            raise ArgumentError(
                f"the preset for {self.name} needs a config.json with `{field}`, an integer of at most {maximum}",
                hint="pass the model's config.json",
            )
        return value

    # -- rules

    def rename(self, *names: str, **more: object) -> None:
        """Rename the first name to the second; in reverse, any of the other names to the first."""
        for name in names[1:]:
            self.rules.append({"from": names[0], "to": name, **more})

    def fuse(self, parts: list[str], whole: str, **more: object) -> None:
        self.rules.append({"from": parts, "to": whole, "join": 0, **more})

    def layer(self, hf: str, mcore: str) -> None:
        """Everything in one decoder layer."""
        if self.family.mla:
            self.latent_attention(f"{hf}.self_attn", f"{mcore}.self_attention")
        else:
            self.attention(f"{hf}.self_attn", f"{mcore}.self_attention")
        self.norms(hf, mcore)
        # Most families have dense layers, some of them only a few.
        if not self.family.always_moe:
            self.dense(f"{hf}.mlp", f"{mcore}.mlp")
        if self.family.moe:
            self.experts(f"{hf}.{self.family.moe}", f"{mcore}.mlp")
        if self.family.mla:
            self.dense(f"{hf}.mlp.shared_experts", f"{mcore}.mlp.shared_experts")

    def norms(self, hf: str, mcore: str) -> None:
        plain = f"{mcore}.input_layernorm.weight", f"{mcore}.pre_mlp_layernorm.weight"
        of_qkv = f"{mcore}.self_attention.linear_qkv.layer_norm_weight"
        of_fc1 = f"{mcore}.mlp.linear_fc1.layer_norm_weight"
        if self.is_mindspore:
            before, after = [plain[0]], [plain[1]]
        else:
            before = [plain[0]] if self.family.mla else [of_qkv, plain[0]]
            after = [plain[1], of_fc1] if self.family.moe else [of_fc1, plain[1]]
        self.rename(f"{hf}.input_layernorm.weight", *before)
        self.rename(f"{hf}.post_attention_layernorm.weight", *after)

    def attention(self, hf: str, mcore: str) -> None:
        group = ["heads / kv_heads * head_dim", "head_dim", "head_dim"]
        if self.is_mindspore and self.config.get("use_contiguous_weight_layout_attention") is True:
            group = ["heads * head_dim", "kv_heads * head_dim", "kv_heads * head_dim"]
        for kind in ("weight", "bias"):
            parts = [f"{hf}.{part}_proj.{kind}" for part in "qkv"]
            self.fuse(parts, f"{mcore}.linear_qkv.{kind}", turns=group)
            self.rename(f"{hf}.o_proj.{kind}", f"{mcore}.linear_proj.{kind}")
        if self.family.qk_norm:
            for part in "qk":
                self.rename(f"{hf}.{part}_norm.weight", f"{mcore}.{part}_layernorm.weight")

    def latent_attention(self, hf: str, mcore: str) -> None:
        self.rename(f"{hf}.q_proj.weight", f"{mcore}.linear_q_proj.weight")
        self.rename(f"{hf}.q_a_proj.weight", f"{mcore}.linear_q_down_proj.weight")
        self.rename(f"{hf}.q_b_proj.weight", f"{mcore}.linear_q_up_proj.weight")
        self.rename(f"{hf}.kv_a_proj_with_mqa.weight", f"{mcore}.linear_kv_down_proj.weight")
        self.rename(f"{hf}.kv_b_proj.weight", f"{mcore}.linear_kv_up_proj.weight")
        self.rename(f"{hf}.o_proj.weight", f"{mcore}.linear_proj.weight")
        for part in ("q", "kv"):
            fused = [] if self.is_mindspore else [f"{mcore}.linear_{part}_up_proj.layer_norm_weight"]
            self.rename(f"{hf}.{part}_a_layernorm.weight", *fused, f"{mcore}.{part}_layernorm.weight")

    def dense(self, hf: str, mcore: str) -> None:
        alternate = self.is_mindspore and self.config.get("use_interleaved_weight_layout_mlp") is not False
        for kind in ("weight", "bias"):
            turns = {"turns": [1, 1]} if alternate else {}
            self.fuse([f"{hf}.gate_proj.{kind}", f"{hf}.up_proj.{kind}"], f"{mcore}.linear_fc1.{kind}", **turns)
            self.rename(f"{hf}.down_proj.{kind}", f"{mcore}.linear_fc2.{kind}")

    def experts(self, hf: str, mcore: str) -> None:
        self.rename(f"{hf}.gate.weight", f"{mcore}.router.weight")
        if self.family.mla:
            self.rename(f"{hf}.gate.e_score_correction_bias", f"{mcore}.router.expert_bias")
        gate, up, down = (f"{hf}.experts.{{e}}.{name}.weight" for name in self.family.expert)
        if self.is_mindspore:
            options: dict[str, object] = {"transpose": [1, 0], "lay": {"e": 0}}
            self.rules.append({"from": [gate, up], "to": f"{mcore}.experts.weight1", "join": 1, **options})
            self.rename(down, f"{mcore}.experts.weight2", **options)
            return
        for fc1, fc2 in (
            ("linear_fc1.weight{e}", "linear_fc2.weight{e}"),
            ("local_experts.{e}.linear_fc1.weight", "local_experts.{e}.linear_fc2.weight"),
        ):
            self.fuse([gate, up], f"{mcore}.experts.{fc1}")
            self.rename(down, f"{mcore}.experts.{fc2}")

    def prediction_layers(self) -> None:
        """Multi-token prediction layers, which follow the last layer in Hugging Face names."""
        n_layers = self.number("num_hidden_layers", 1 << 20)
        n_extra = (
            self.number("num_nextn_predict_layers", _MAX_MTP_LAYERS)
            if config_fields(self.config, ["num_nextn_predict_layers"])
            else 0
        )
        for n in range(n_extra):
            hf, mtp = f"model.layers.{n_layers + n}", f"mtp.layers.{n}"
            for name in ("enorm", "hnorm", "eh_proj"):
                self.rename(f"{hf}.{name}.weight", f"{mtp}.{name}.weight")
            self.rename(f"{hf}.shared_head.norm.weight", f"{mtp}.final_layernorm.weight")
            self.rules.append({"from": f"{hf}.embed_tokens.weight", "tied": "model.embed_tokens.weight"})
            self.rules.append({"from": f"{hf}.shared_head.head.weight", "tied": "lm_head.weight"})
            self.layer(hf, f"{mtp}.transformer_layer")
            if not self.is_mindspore:
                self.layer(hf, f"{mtp}.mtp_model_layer")  # the name in later releases


def _stacked(rule: dict[str, object]) -> dict[str, object]:
    """The rule for a tensor that holds all layers, with the layer as its first dim."""
    if "{i}" not in str(rule["to"]):
        return rule
    join = {"join": 1} if "join" in rule else {}
    return {**rule, "to": str(rule["to"]).replace(".{i}.", "."), **join, "stack": {"i": 0}}


def _of_gguf(name: str, family: _Family) -> dict[str, object]:
    """The name map to GGUF."""
    if not family.gguf:
        raise ArgumentError(
            f"there is no preset {GGUF} for {name}", hint=f"families of it are {', '.join(families_of(GGUF))}"
        )
    hf, blk = "model.layers.{i}", "blk.{i}"
    rules: list[dict[str, object]] = [
        {"from": "model.embed_tokens.weight", "to": "token_embd.weight"},
        {"from": "model.norm.weight", "to": "output_norm.weight"},
        {"from": "lm_head.weight", "to": "output.weight"},
        {"from": f"{hf}.input_layernorm.weight", "to": f"{blk}.attn_norm.weight"},
        {"from": f"{hf}.post_attention_layernorm.weight", "to": f"{blk}.ffn_norm.weight"},
    ]
    if family.is_fused:
        rules += [
            {"from": f"{hf}.self_attn.qkv_proj.weight", "to": f"{blk}.attn_qkv.weight"},
            {"from": f"{hf}.self_attn.o_proj.weight", "to": f"{blk}.attn_output.weight"},
            {"from": f"{hf}.mlp.gate_up_proj.weight", "to": f"{blk}.ffn_up.weight"},
            {"from": f"{hf}.mlp.down_proj.weight", "to": f"{blk}.ffn_down.weight"},
        ]
    for kind in () if family.is_fused else ("weight", "bias"):
        for part in "qkv":
            halves = {"swap": [2, "head_dim / 2"]} if family.gguf == "halves" and part != "v" else {}
            rule = {"from": f"{hf}.self_attn.{part}_proj.{kind}", "to": f"{blk}.attn_{part}.{kind}"}
            rules.append({**rule, **halves})
        rules.append({"from": f"{hf}.self_attn.o_proj.{kind}", "to": f"{blk}.attn_output.{kind}"})
        if not family.always_moe:
            rules += [
                {"from": f"{hf}.mlp.{part}_proj.{kind}", "to": f"{blk}.ffn_{part}.{kind}"}
                for part in ("gate", "up", "down")
            ]
    if family.qk_norm:
        rules += [
            {"from": f"{hf}.self_attn.{part}_norm.weight", "to": f"{blk}.attn_{part}_norm.weight"} for part in "qk"
        ]
    if family.moe:
        experts = f"{hf}.{family.moe}"
        rules.append({"from": f"{experts}.gate.weight", "to": f"{blk}.ffn_gate_inp.weight"})
        rules += [
            {"from": f"{experts}.experts.{{e}}.{own}.weight", "to": f"{blk}.ffn_{part}_exps.weight", "stack": {"e": 0}}
            for own, part in zip(family.expert, ("gate", "up", "down"), strict=True)
        ]
    sizes = {"head_dim": ["head_dim", "hidden_size / num_attention_heads"]} if family.gguf == "halves" else {}
    return {"sizes": sizes, "other": "refuse", "rules": rules}
