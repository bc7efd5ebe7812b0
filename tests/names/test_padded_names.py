"""Rules with `pad`: elements that one side of a name map has at the end of a dim, which are zeros."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard
from reshard import NameMap
from reshard.errors import CoverageError, NamesError

if TYPE_CHECKING:
    from pathlib import Path

RULE = {"from": "embed", "to": "words", "pad": 0, "from_size": "vocab", "to_size": 16}


def named(rule: dict[str, Any] | None = None, **sizes: object) -> NameMap:
    return NameMap.from_mapping({"sizes": {"vocab": 10, **sizes}, "rules": [rule or RULE]})


def rows(n: int = 10) -> np.ndarray:
    return np.arange(1, 1 + n * 4, dtype=np.float32).reshape(n, 4)


def padded(array: np.ndarray, n: int, dim: int = 0) -> np.ndarray:
    """The oracle."""
    return np.pad(array, [(0, n - array.shape[dim] if one == dim else 0) for one in range(array.ndim)])


def cut(dim: int, n: int, name: str) -> dict[str, Any]:
    partition = [None] * dim + ["tp"]
    return {"mesh": {"tp": n}, "rules": [{"match": name, "cut": partition}, {"match": "*"}]}


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float64"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_padding_is_zero_and_is_left_out_again(dim: int, ranks: int, dtype: str | None, tmp_path: Path) -> None:
    whole = np.ascontiguousarray(rows() if dim == 0 else rows().T)
    reshard.save_file({"embed": whole}, tmp_path / "one.safetensors")
    names = named({**RULE, "pad": dim})
    done = reshard.convert(
        tmp_path / "one.safetensors", tmp_path / "there", names=names, layout=cut(dim, ranks, "words"), dtype=dtype
    )
    assert any("the rest is padding, all zeros" in one for one in done.warnings)
    assert reshard.verify(tmp_path / "there").ok
    expected = padded(whole, 16, dim)
    with reshard.open(tmp_path / "there") as there:
        found = there.load(dtype="float32")["words"]
        assert np.array_equal(found, expected)
        for rank in there.ranks():
            at = 16 // ranks * rank
            part = there.stored(rank)["words"]
            assert np.array_equal(
                part.astype(np.float32), expected.take(range(at, at + 16 // ranks), axis=dim).astype(np.float32)
            )
    reshard.convert(tmp_path / "there", tmp_path / "back.safetensors", names=names.reversed(), dtype="float32")
    assert np.array_equal(reshard.load_file(tmp_path / "back.safetensors")["embed"], whole)


N_EXAMPLES = int(os.environ.get("RESHARD_PAD_EXAMPLES", "15"))


@settings(max_examples=N_EXAMPLES)
@given(data=st.data())
def test_any_shape_layout_and_dtype_equals_numpy(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("pad")
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3), label="shape")
    dim = data.draw(st.integers(0, len(shape) - 1), label="dim")
    parts = data.draw(st.integers(1, 4), label="parts")
    ranks = data.draw(st.integers(1, 4), label="ranks")
    dtype = data.draw(st.sampled_from(["float32", "float16", "int64", "uint8"]), label="dtype")
    n = -(-(shape[dim] + data.draw(st.integers(0, 9), label="more")) // parts) * parts
    array = np.random.default_rng(0).integers(1, 100, shape).astype(dtype)
    # The source is in files of ranks that divide another dim, the padding may be all of a rank.
    other = data.draw(st.integers(0, len(shape) - 1), label="other")
    ranks = next(one for one in range(ranks, 0, -1) if shape[other] % one == 0)
    reshard.save_file({"w": array, "m.w": array}, folder / "w.safetensors")
    reshard.convert(folder / "w.safetensors", folder / "s", layout=cut(other, ranks, "*w"))
    names = NameMap.from_mapping(
        {"rules": [{"from": "w", "to": "v", "pad": dim, "from_size": shape[dim], "to_size": n}]}
    )
    expected = padded(array, n, dim)
    with reshard.open(folder / "s", names=names) as view:
        assert np.array_equal(view.read("v"), expected)
        layout = {"mesh": {"tp": parts}, "rules": [{"match": "v", "cut": [*[None] * dim, "tp"]}, {"match": "*"}]}
        for rank in range(parts):
            own = view.load(layout, rank=rank)["v"]
            assert np.array_equal(own, np.split(expected, parts, dim)[rank])
        flat = {"mesh": {"dp": parts}, "rules": [{"match": "v", "flat": ["dp"]}, {"match": "*"}]}
        joined = np.concatenate([view.load(flat, rank=rank)["v"] for rank in range(parts)])
        assert np.array_equal(joined[: expected.size], expected.reshape(-1))
        assert not joined[expected.size :].any()
    # Then transposed by another map, and back.
    turned = NameMap.from_mapping({"rules": [{"from": "v", "to": "t", "transpose": list(reversed(range(len(shape))))}]})
    with reshard.open(folder / "s", names=names) as view, view.renamed(turned) as twice:
        assert np.array_equal(twice.read("t"), expected.T)
        with twice.renamed(turned.reversed()) as again, again.renamed(names.reversed()) as back:
            assert np.array_equal(back.read("w"), array)


def test_padding_of_optimizer_state_is_zero_and_scalars_are_kept() -> None:
    shapes: dict[str, tuple[int, ...]] = {"embed": (10, 4), "m.embed": (10, 4), "step.embed": (1,)}
    found = {one.key: one.shape for one in named().resolve(shapes, optimizer_keys={"m.embed", "step.embed"})}
    assert found == {"words": (16, 4), "m.words": (16, 4), "step.words": (1,)}
    with pytest.raises(NamesError, match="which is padded to 16 elements along dim 0"):
        named().resolve({"embed": (10, 4), "c.embed": (4,)}, optimizer_keys={"c.embed"})


def test_only_what_the_map_declares_is_zero(tmp_path: Path) -> None:
    reshard.save_file({"embed": rows()}, tmp_path / "one.safetensors")
    reshard.convert(tmp_path / "one.safetensors", tmp_path / "two", layout=cut(0, 2, "embed"))
    with reshard.open(tmp_path / "two", names=named()) as view:
        index = view.data.index
        index.check_coverage()
        kept = [one for one in index.stored("words") if one.tiles[0].offset != (5, 0)]
        index.add_tiles("hole", "F32", (16, 4), kept)
        with pytest.raises(CoverageError, match=r"leave offset \(5, 0\) shape \(5, 4\) uncovered"):
            index.check_coverage()


@pytest.mark.parametrize(
    ("n", "message"),
    [
        (9, "`embed` has 9 elements along dim 0, and the name map pads it to 16 from 10"),
        (17, "`embed` has 17 elements along dim 0, and the name map pads it to 16"),
    ],
)
def test_tensors_of_another_model_are_refused(n: int, message: str) -> None:
    with pytest.raises(NamesError) as error:
        named().resolve({"embed": (n, 4)})
    assert message in str(error.value)
    with pytest.raises(NamesError, match="`words` has 9 elements along dim 0, and the name map trims it to 10"):
        named().reversed().resolve({"words": (9, 4)})


@pytest.mark.parametrize(("have", "multiple", "n"), [(10, 8, 16), (16, 8, 16), (10, 10, 10), (10, "vocab", 10)])
def test_sizes_are_rounded_up_to_a_multiple(have: int, multiple: object, n: int) -> None:
    names = named({"from": "embed", "to": "words", "pad": 0, "from_size": "vocab", "to_multiple": multiple})
    assert [one.shape for one in names.resolve({"embed": (have, 4)})] == [(n, 4)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trim": 0}, "`trim` and `pad` are both given"),
        ({"to_size": None}, "`pad` needs `to_size` or `to_multiple`"),
        ({"pad_side": "from", "from_size": None}, "`pad` needs `from_size` or `from_multiple`"),
        ({"pad_side": "both"}, "expected `from` or `to`"),
        ({"pad": None, "trim": 0, "pad_side": "to"}, "`pad_side` is given without `pad`"),
        ({"pad": None, "trim": 0, "to_multiple": 8}, "`from_multiple` and `to_multiple` need `pad`"),
        ({"transpose": [1, 0]}, "`pad` needs one tensor on each side"),
    ],
)
def test_rules_that_do_not_say_it_are_refused(change: dict[str, Any], message: str) -> None:
    rule = {name: value for name, value in {**RULE, **change}.items() if value is not None}
    with pytest.raises(NamesError) as error:
        named(rule)
    assert message in str(error.value)


def test_maps_are_printed_and_reversed() -> None:
    names = named({**RULE, "to_multiple": 8})
    for one in (names, names.reversed()):
        assert one.reversed().reversed() == one
        assert NameMap.from_mapping(one.to_mapping()) == one
    assert "pad: 0, from_size: vocab, to_size: 16, to_multiple: 8" in str(names)
    assert "pad: 0, pad_side: from, from_size: 16, to_size: vocab, from_multiple: 8" in str(names.reversed())


CONFIG = {"model_type": "llama", "vocab_size": 10, "hidden_size": 4, "num_attention_heads": 2, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("fields", "tp", "n"),
    [
        ({}, 2, 256),
        ({}, None, 10),
        ({"make_vocab_size_divisible_by": 3}, 2, 12),
        ({"padded_vocab_size": 14}, 2, 14),
        ({"padded_vocab_size": 14}, None, 14),
        ({"make_vocab_size_divisible_by": 1}, 5, 10),
        ({"make_vocab_size_divisible_by": 4, "tensor_model_parallel_size": 4}, None, 16),
    ],
)
@pytest.mark.parametrize("preset", ["llama-megatron", "llama-megatron_dist"])
def test_presets_of_megatron_pad_for_the_ranks(
    preset: str, fields: dict[str, int], tp: int | None, n: int, tmp_path: Path
) -> None:
    reshard.save_file({"model.embed_tokens.weight": rows(), "lm_head.weight": -rows()}, tmp_path / "hf.safetensors")
    config = CONFIG | fields
    layout = None
    if tp is not None:
        match = ["embedding.word_embeddings.weight", "output_layer.weight"]
        layout = {"mesh": {"dp": 2, "tp": tp}, "rules": [{"match": match, "cut": ["tp"]}, {"match": "*"}]}
    reshard.convert(tmp_path / "hf.safetensors", tmp_path / "m", names=preset, config=config, layout=layout)
    with reshard.open(tmp_path / "m") as found:
        assert np.array_equal(found.read("embedding.word_embeddings.weight"), padded(rows(), n))
        assert np.array_equal(found.read("output_layer.weight"), padded(-rows(), n))
    reshard.convert(
        tmp_path / "m", tmp_path / "back", to="huggingface", names=f"{preset}:reverse", config=config, part="model"
    )
    back = reshard.load_file(tmp_path / "back")
    assert np.array_equal(back["model.embed_tokens.weight"], rows())
    assert np.array_equal(back["lm_head.weight"], -rows())
