"""Rules with `trim`: the padding that one side of a name map has along a dim, such as that of a vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import reshard
from reshard import NameMap
from reshard.errors import NamesError
from reshard.torch import Checkpointer

if TYPE_CHECKING:
    from pathlib import Path

RULE = {"from": "embed", "to": "words", "trim": 0, "from_size": "vocab"}
CONFIG = {
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
PADDED = 16


def named(rule: dict[str, Any], vocab: object = 10) -> NameMap:
    return NameMap.from_mapping({"sizes": {"vocab": vocab}, "rules": [rule]})


def rows(n: int = PADDED) -> np.ndarray:
    return np.arange(n * 4, dtype=np.float32).reshape(n, 4)


def megatron() -> dict[str, np.ndarray]:
    """The vocabulary of a model with padded rows, and a norm."""
    return {
        "embedding.word_embeddings.weight": rows(),
        "output_layer.weight": -rows(),
        "decoder.final_layernorm.weight": np.ones(4, np.float32),
    }


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_elements_after_the_size_are_left_out_of_any_shards(dim: int, ranks: int, tmp_path: Path) -> None:
    whole = np.ascontiguousarray(rows() if dim == 0 else rows().T)
    reshard.save_file({"words": whole}, tmp_path / "one.safetensors")
    cut = ["tp"] if dim == 0 else [None, "tp"]
    layout = {"mesh": {"tp": ranks}, "rules": [{"match": "*", "cut": cut}]}
    reshard.convert(tmp_path / "one.safetensors", tmp_path / "cut", to="checkpoint2", layout=layout, iteration=1)
    expected = whole[:10] if dim == 0 else whole[:, :10]
    names = named({**RULE, "trim": dim}).reversed()
    with reshard.open(tmp_path / "cut", names=names) as found:
        assert found.shape("embed") == expected.shape
        assert np.array_equal(found.read("embed"), expected)
    done = reshard.convert(tmp_path / "cut", tmp_path / "out", to="huggingface", names=names)
    assert np.array_equal(reshard.load_file(tmp_path / "out")["embed"], expected)
    of = "6 of 6 rows" if dim == 0 else "6 of 6 along dim 1"
    said = f"`words` has shape {whole.shape}, and `embed` {expected.shape}: the rest is left out as padding"
    assert list(done.warnings) == [f"{said}, of which {of} are not zero"]


def test_a_side_without_a_size_has_what_the_other_has(tmp_path: Path) -> None:
    reshard.save_file({"embed": rows(10)}, tmp_path / "h.safetensors")
    done = reshard.convert(tmp_path / "h.safetensors", tmp_path / "there", names=named(RULE))
    assert not done.warnings
    assert np.array_equal(reshard.load_file(tmp_path / "there")["words"], rows(10))
    reshard.convert(tmp_path / "there", tmp_path / "back", names=named(RULE).reversed())
    assert np.array_equal(reshard.load_file(tmp_path / "back")["embed"], rows(10))


def test_a_size_that_is_not_known_leaves_all_elements() -> None:
    (made,) = named(RULE, "vocab_size").reversed().resolve({"words": (PADDED, 4)})
    assert made.shape == (PADDED, 4)
    (made,) = named(RULE, "vocab_size").with_config(CONFIG).reversed().resolve({"words": (PADDED, 4)})
    assert made.shape == (10, 4)


def test_no_elements_are_added() -> None:
    with pytest.raises(
        NamesError, match=r"`words` has 8 elements along dim 0, and the name map trims it to 10"
    ) as found:
        named(RULE).reversed().resolve({"words": (8, 4)})
    assert "`trim` adds no elements, and `pad` does" in str(found.value)
    with pytest.raises(NamesError, match=r"trims dim 2, and `words` has shape \(16, 4\)"):
        named({**RULE, "trim": 2}).reversed().resolve({"words": (PADDED, 4)})


def test_state_follows_its_parameter_or_is_refused() -> None:
    names = named(RULE).reversed()
    shapes: dict[str, tuple[int, ...]] = {
        "words": (PADDED, 4),
        "m.words": (PADDED, 4),
        "step.words": (1,),
        "n.words": (),
    }
    made = {one.key: one.shape for one in names.resolve(shapes, optimizer_keys={"m.words", "step.words", "n.words"})}
    assert made == {"embed": (10, 4), "m.embed": (10, 4), "step.embed": (1,), "n.embed": ()}
    # Factored state: which of its elements belong to the rows is not known.
    with pytest.raises(
        NamesError, match=r"`col.words` has shape \(4,\), and its parameter \(16, 4\), which is trimmed"
    ):
        names.resolve({"words": (PADDED, 4), "col.words": (4,)}, optimizer_keys={"col.words"})
    exact = named(RULE, PADDED).reversed().resolve({"words": (PADDED, 4), "c.words": (4,)}, optimizer_keys={"c.words"})
    assert [one.shape for one in exact] == [(PADDED, 4), (4,)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"from_size": None}, "are given together"),
        ({"trim": None}, "are given together"),
        ({"from_size": "rows"}, "`rows` is not a size of the map; `sizes` has vocab"),
        ({"trim": -1}, "-1"),
        ({"transpose": [1, 0]}, "`trim` needs one tensor on each side"),
        ({"from": ["a", "b"], "join": 0}, "`trim` needs one tensor on each side"),
        ({"from": "embed.{i}", "stack": {"i": 0}}, "`trim` needs one tensor on each side"),
    ],
)
def test_rules_that_do_not_say_it_are_refused(change: dict[str, Any], message: str) -> None:
    rule = {name: value for name, value in {**RULE, **change}.items() if value is not None}
    with pytest.raises(NamesError) as found:
        named(rule)
    assert message in str(found.value)


@pytest.mark.parametrize(
    "sizes", [{"from_size": "vocab"}, {"to_size": 12}, {"from_size": "vocab", "to_size": "vocab / 2"}]
)
def test_maps_are_printed_and_reversed(sizes: dict[str, Any]) -> None:
    names = named({"from": "embed", "to": "words", "trim": 0, **sizes})
    assert names.reversed().reversed() == names
    assert NameMap.from_mapping(names.to_mapping()) == names
    assert "trim: 0" in str(names.reversed())
    assert NameMap.from_mapping(names.reversed().to_mapping()) == names.reversed()


@pytest.mark.parametrize("preset", ["llama-megatron", "qwen3-megatron", "llama-megatron_dist", "mixtral-megatron"])
def test_presets_of_megatron_take_the_rows_of_the_config(preset: str, tmp_path: Path) -> None:
    reshard.save_file(megatron(), tmp_path / "m.safetensors")
    config = CONFIG | {"model_type": preset.partition("-")[0], "num_local_experts": 2}
    names = NameMap.preset(preset, config).reversed()
    done = reshard.convert(tmp_path / "m.safetensors", tmp_path / "hf", to="huggingface", names=names)
    found = reshard.load_file(tmp_path / "hf")
    assert np.array_equal(found["model.embed_tokens.weight"], rows()[:10])
    assert np.array_equal(found["lm_head.weight"], -rows()[:10])
    assert np.array_equal(found["model.norm.weight"], np.ones(4))
    assert len(done.warnings) == 2
    # Another model: the configuration has more rows than there are.
    more = NameMap.preset(preset, config | {"vocab_size": 20}).reversed()
    with pytest.raises(NamesError, match="has 16 elements along dim 0, and the name map trims it to 20"):
        reshard.convert(tmp_path / "m.safetensors", tmp_path / "more", to="huggingface", names=more)
    assert not (tmp_path / "more").exists()


def test_presets_of_mindspore_do_not_trim() -> None:
    assert "trim" not in str(NameMap.preset("llama-mindspore", CONFIG))


def test_a_run_starts_from_padded_weights(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(10, 4)})
            self.model["norm"] = torch.nn.LayerNorm(4, bias=False)
            self.lm_head = torch.nn.Linear(4, 10, bias=False)

    reshard.save_file(megatron(), tmp_path / "m.safetensors")
    model = Model()
    start = reshard.options.InitFrom(
        tmp_path / "m.safetensors", names=NameMap.preset("llama-megatron", CONFIG).reversed()
    )
    with Checkpointer(tmp_path / "run", save_every=None, signals=()) as checkpointer:
        decision = checkpointer.resume(model=model, init_from=start)
    assert sum("left out as padding, of which 6 of 6 rows are not zero" in line for line in decision.warnings) == 2
    assert np.array_equal(model.lm_head.weight.detach().numpy(), -rows()[:10])
    assert np.array_equal(model.state_dict()["model.embed_tokens.weight"].numpy(), rows()[:10])

    # 17 rows are not what Megatron pads 10 to.
    reshard.save_file({name: rows(17) for name in list(megatron())[:2]}, tmp_path / "more.safetensors")
    start = reshard.options.InitFrom(tmp_path / "more.safetensors", names=start.names)
    before = model.lm_head.weight.detach().clone()
    with pytest.raises(NamesError, match="the sizes of the name map do not pad 10 to 17"):
        Checkpointer(tmp_path / "run", save_every=None, signals=()).resume(model=model, init_from=start, strict=False)
    assert torch.equal(model.lm_head.weight, before)
