"""The usual layouts of Hugging Face model families, as layout mappings.

Each family is a table of key names: which Linear weights are divided by their output (column), by their input (row),
by key-value heads, or by the vocabulary. Other tensors (norms, routers, biases of row layers) are whole. The only file
that is read is a `config.json`.

GPT-2's Linear layers are stored transposed ([in, out], `Conv1D`). Its preset divides the dims in their stored order, so
that arrays have the shapes that its modules expect; it does not use `stored`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from reshard.errors import ArgumentError, CheckpointNotFoundError, DamagedFileError, LayoutError, StorageError
from reshard.storage.inputs import read_input
from reshard.storage.location import locate
from reshard.values.words import nearest, show

_MAX_LISTED_LAYERS = 10_000
_MAX_CONFIG_BYTES = 16 << 20


@dataclass(frozen=True)
class _Family:
    """Names of one family; all without `.weight`."""

    column: tuple[str, ...] = ("*.q_proj", "*.gate_proj", "*.up_proj")
    kv: tuple[str, ...] = ("*.k_proj", "*.v_proj")
    row: tuple[str, ...] = ("*.o_proj", "*.down_proj")
    vocabulary: tuple[str, ...] = ("*embed_tokens", "lm_head")
    layers: tuple[str, ...] = ("model.layers.{i}.*",)
    first: tuple[str, ...] = ("model.embed_tokens.*",)
    last: tuple[str, ...] = ("model.norm.*", "lm_head.*")
    biases: bool = False
    scales: bool = False  # fp8 weights have `weight_scale_inv`, one number a block of 128 x 128
    experts: bool = False
    tied: bool = False  # whether lm_head is the embedding when no config says so
    fused: Literal["phi3", "gpt2"] | None = None


_DEEPSEEK = _Family(
    column=("*.q_proj", "*.q_b_proj", "*.kv_b_proj", "*.gate_proj", "*.up_proj"),
    kv=(),
    vocabulary=("*embed_tokens", "*.shared_head.head", "lm_head"),
    scales=True,
    experts=True,
)
_MOE = _Family(biases=True, experts=True)

FAMILIES: Mapping[str, _Family] = {
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "gemma": _Family(tied=True),
    "gemma2": _Family(tied=True),
    "gemma3_text": _Family(tied=True),
    "gpt2": _Family(
        column=(),
        kv=(),
        row=(),
        vocabulary=("*wte", "lm_head"),
        layers=("transformer.h.{i}.*", "h.{i}.*"),
        first=("transformer.wpe.*", "wpe.*", "transformer.wte.*", "wte.*"),
        last=("transformer.ln_f.*", "ln_f.*", "lm_head.*"),
        tied=True,
        fused="gpt2",
    ),
    "llama": _Family(biases=True),
    "mistral": _Family(),
    "mixtral": _Family(column=("*.q_proj", "*.w1", "*.w3"), row=("*.o_proj", "*.w2"), experts=True),
    "phi3": _Family(column=(), kv=(), fused="phi3"),
    "qwen2": _Family(biases=True),
    "qwen2_moe": _MOE,
    "qwen3": _Family(biases=True),
    "qwen3_moe": _MOE,
}
"""The families by the `model_type` of their config."""


def mapping_of_preset(
    name_or_config: str | os.PathLike[str] | Mapping[str, object], *, tp: int, pp: int, ep: int, dp: int
) -> dict[str, object]:
    """The layout mapping of a family; see `ModelLayout.preset`."""
    for axis, size in (("tp", tp), ("pp", pp), ("ep", ep), ("dp", dp)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ArgumentError(f"{axis} must be an integer of at least 1, found {size!r}")
    name, config = _family_and_config(name_or_config)
    family = FAMILIES[name]
    if ep > 1 and not family.experts:
        raise ArgumentError(f"the family {name} has no experts to divide over ep={ep}")
    kv_parts = _kv_parts(name, family, config, tp)
    # Where there are fewer key-value heads than ranks, one head serves several neighbours: two axes instead of one.
    split = kv_parts != tp and family.kv
    tp_axes = {"tp_kv": kv_parts, "tp_rep": tp // kv_parts} if split else {"tp": tp}
    outer = {axis: size for axis, size in (("pp", pp), ("dp", dp), ("ep", ep)) if size > 1}
    mapping: dict[str, object] = {
        "mesh": {**outer, **tp_axes},
        "rules": _rules(family, config, list(tp_axes), kv_is_cut=kv_parts == tp),
    }
    if place := _places(family, config, pp, ep):
        mapping["place"] = place
    return mapping


# ------------------------------------------------------------------------------------------------------------- config


class _Config:
    """A config.json, or nothing: numbers are asked for by name."""

    def __init__(self, values: Mapping[str, object], source: str) -> None:
        self.values = values
        self.source = source

    def number(self, name: str) -> int | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 40:
            raise LayoutError(f"{self.source}: `{name}` is no usable number: {show(repr(value))}", path=self.source)
        return value

    def needed(self, name: str, why: str) -> int:
        if (value := self.number(name)) is None:
            raise ArgumentError(f"{self.source}: `{name}` is needed: {why}", hint="give the path of its config.json")
        return value

    def head_dim(self, why: str) -> int:
        if (head_dim := self.number("head_dim")) is not None:
            return head_dim
        return self.needed("hidden_size", why) // max(1, self.needed("num_attention_heads", why))


def _family_and_config(name_or_config: str | os.PathLike[str] | Mapping[str, object]) -> tuple[str, _Config]:
    if isinstance(name_or_config, str) and name_or_config in FAMILIES:
        return name_or_config, _Config({}, f"preset {name_or_config}")
    if isinstance(name_or_config, Mapping):
        values: object = name_or_config
        source = "config"
    else:
        source = os.fspath(name_or_config)
        values = _read_json(source)
    if not isinstance(values, Mapping):
        raise LayoutError(f"{source}: a config is a JSON object", path=source)
    name = values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ArgumentError(
            f"{source}: no preset for the model_type {show(str(name))}",
            hint=f"known are {known}; `from_tp_plan` takes transformers' plan, a layout file says anything",
        )
    return name, _Config(values, source)


def _read_json(path: str) -> object:
    file = locate(path)
    is_in_folder = file.is_folder()
    if is_in_folder:
        file /= "config.json"
    try:
        # A pipe that a user passes is read, but one in a folder would block: it may have no writer.
        if is_in_folder:
            data = file.read_small(_MAX_CONFIG_BYTES, follow_links=True)
        else:
            data = read_input(file, _MAX_CONFIG_BYTES + 1)
    except CheckpointNotFoundError:
        near = nearest(path, FAMILIES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise CheckpointNotFoundError(
            f"{show(path)} is neither a model family nor a config.json nor a folder with one",
            path=path,
            hint=f"{hint}families are {', '.join(FAMILIES)}",
        ) from None
    except DamagedFileError:
        raise
    except ValueError as error:  # a null character in the path
        raise StorageError(f"reading {show(str(file))}: {error}", path=str(file)) from None
    if len(data) > _MAX_CONFIG_BYTES:
        raise LayoutError(f"{file}: larger than {_MAX_CONFIG_BYTES >> 20} MiB", path=str(file))
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"{file}: not JSON: {error}", path=str(file)) from None
    return value


def _kv_parts(name: str, family: _Family, config: _Config, tp: int) -> int:
    """How many different shares of the key-value heads there are on `tp` ranks: `tp`, or a divisor of it.

    Raises:
        LayoutError: heads do not divide.
    """
    n_heads = config.number("n_head" if family.fused == "gpt2" else "num_attention_heads")
    if n_heads is not None and n_heads % tp:
        raise LayoutError(f"{config.source}: {n_heads} attention heads do not divide over tp={tp}")
    kv_heads = config.number("num_key_value_heads")
    if not kv_heads or kv_heads % tp == 0 or not (family.kv or family.fused == "phi3"):
        return tp
    if family.fused == "phi3":
        return 1  # blocks are cut by all axes or by none
    if tp % kv_heads:
        raise LayoutError(
            f"{config.source}: {kv_heads} key-value heads of {name} neither divide over tp={tp} nor repeat on it",
            hint="choose tp so that one is a multiple of the other",
        )
    return kv_heads


# -------------------------------------------------------------------------------------------------------------- rules


def _rules(family: _Family, config: _Config, tp_axes: list[str], *, kv_is_cut: bool) -> list[dict[str, object]]:
    tp: object = tp_axes[0] if len(tp_axes) == 1 else tp_axes
    suffixes = ["weight", *(["bias"] if family.biases else []), *(["weight_scale_inv"] if family.scales else [])]
    columns = family.column if len(tp_axes) > 1 else family.column + family.kv
    rules: list[dict[str, object]] = [
        # A vocabulary need not divide; torch's chunks are the same as an even cut where it does.
        {"match": [f"{name}.weight" for name in family.vocabulary], "cut": [tp], "uneven": "ceil"},
    ]
    if columns:
        rules.append({"match": [f"{name}.{suffix}" for name in columns for suffix in suffixes], "cut": [tp]})
    if columns != family.column + family.kv:
        rules.append({"match": [f"{name}.{s}" for name in family.kv for s in suffixes], "cut": [tp_axes[0]]})
    if family.row:
        row_suffixes = [suffix for suffix in suffixes if suffix != "bias"]
        rules.append({"match": [f"{name}.{s}" for name in family.row for s in row_suffixes], "cut": [None, tp]})
    if family.fused == "phi3":
        rules += _phi3_rules(config, tp, kv_is_cut=kv_is_cut)
    elif family.fused == "gpt2":
        rules += _gpt2_rules(tp)
    # A family has members without biases, or without a head of their own.
    return [*({**rule, "optional": True} for rule in rules), {"match": "*"}]


def _phi3_rules(config: _Config, tp: object, *, kv_is_cut: bool) -> list[dict[str, object]]:
    """`qkv_proj` is query, key and value heads one after the other, `gate_up_proj` gate and up."""
    why = "it says how large the fused blocks of `qkv_proj` are"
    head_dim = config.head_dim(why)
    n_heads = config.needed("num_attention_heads", why)
    kv_heads = config.number("num_key_value_heads")
    kv_size = (n_heads if kv_heads is None else kv_heads) * head_dim
    # Where key-value heads do not divide, every rank holds them all.
    kv: object = kv_size if kv_is_cut else {"size": kv_size, "cut": None}
    return [
        {"match": "*.qkv_proj.weight", "cut": [tp], "blocks": {0: [n_heads * head_dim, kv, kv]}},
        {"match": "*.gate_up_proj.weight", "cut": [tp], "blocks": {0: 2}},
    ]


def _gpt2_rules(tp: object) -> list[dict[str, object]]:
    """`c_attn` is query, key and value, each of the width of the model."""
    return [
        {"match": "*.c_attn.weight", "cut": [None, tp], "blocks": {1: 3}},
        {"match": "*.c_attn.bias", "cut": [tp], "blocks": {0: 3}},
        {"match": "*.c_fc.weight", "cut": [None, tp]},
        {"match": ["*.c_fc.bias", "*.c_proj.weight"], "cut": [tp]},
    ]


# -------------------------------------------------------------------------------------------------------------- place


def _places(family: _Family, config: _Config, pp: int, ep: int) -> list[dict[str, object]]:
    places: list[dict[str, object]] = []
    if pp > 1:
        places += _stages(family, config, pp)
    if ep > 1:
        places.append({"match": "*.experts.{i}.*", "axis": "ep"})
    return places


def _stages(family: _Family, config: _Config, pp: int) -> list[dict[str, object]]:
    n_layers = config.number("n_layer" if family.fused == "gpt2" else "num_hidden_layers")
    n_extra = config.number("num_nextn_predict_layers") or 0 if family is _DEEPSEEK else 0
    last = list(family.last)
    if n_layers is None or not n_extra:
        by_layer: dict[str, object] = {"match": list(family.layers), "axis": "pp"}
        if n_layers is not None and n_layers % pp:
            by_layer["sizes"] = _layers_of_stages(n_layers, pp)
        of_layers = [by_layer]
    else:
        # DeepSeek stores its multi-token prediction layers behind the last layer, or not at all; they go with the head.
        last += [f"model.layers.{n}.*" for n in range(n_layers, n_layers + min(n_extra, 64))]
        of_layers = _listed_layers(n_layers, pp)
    tied = config.values.get("tie_word_embeddings", family.tied)
    # A tied embedding is the last stage's head too: every stage holds it, since no entry can name two of them.
    first = [name for name in family.first if not (tied and ("embed" in name or "wte" in name))]
    entries: list[dict[str, object]] = [
        *of_layers,
        {"match": first, "axis": "pp", "at": 0, "optional": True},
        {"match": last, "axis": "pp", "at": -1, "optional": True},
    ]
    return [entry for entry in entries if entry["match"]]


def _layers_of_stages(n_layers: int, pp: int) -> list[int]:
    """How many layers each stage has: the first ones have one more than the others."""
    return [n_layers // pp + (stage < n_layers % pp) for stage in range(pp)]


def _listed_layers(n_layers: int, pp: int) -> list[dict[str, object]]:
    """The layers of each stage, one by one: `{i}` would take in the layers behind the last."""
    if n_layers > _MAX_LISTED_LAYERS:
        raise ArgumentError(f"the config says {n_layers} layers, more than {_MAX_LISTED_LAYERS}")
    entries: list[dict[str, object]] = []
    first = 0
    for stage, n_of_stage in enumerate(_layers_of_stages(n_layers, pp)):
        layers = [f"model.layers.{n}.*" for n in range(first, first + n_of_stage)]
        entries.append({"match": layers, "axis": "pp", "at": stage})
        first += n_of_stage
    return entries
