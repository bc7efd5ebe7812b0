"""`Select(pad=..., trim=...)`, and what conversions say of rows that they add or leave out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner

import reshard
from reshard import NameMap, Select
from reshard.cli import main
from reshard.errors import ArgumentError, MismatchError, NamesError

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("model.embed_tokens.weight", "lm_head.weight")


def rows(n: int = 10, start: int = 1) -> np.ndarray:
    return np.arange(start, start + n * 4, dtype=np.float32).reshape(n, 4)


def padded(array: np.ndarray, n: int) -> np.ndarray:
    """The oracle."""
    return np.concatenate([array, np.zeros((n - len(array), 4), array.dtype)])


def tensors() -> dict[str, np.ndarray]:
    weights = {NAMES[0]: rows(), NAMES[1]: rows(start=100), "model.norm.weight": np.ones(4, np.float32)}
    return weights | {f"adam_m.{name}": array * 2 for name, array in weights.items()}


def save(root: Path, state: dict[str, np.ndarray]) -> None:
    weights = {name: array for name, array in state.items() if not name.startswith("adam_m.")}
    reshard.save(root, 3, weights, {name: array for name, array in state.items() if name not in weights})


def equal(path: Path, expected: dict[str, np.ndarray], part: Any = "all") -> None:
    with reshard.open(path) as found:
        assert sorted(found.keys(part)) == sorted(expected)
        for name, array in expected.items():
            assert np.array_equal(found.read(name), array), name


@pytest.mark.parametrize("ranks", [None, 4, 8])
def test_rows_are_added_with_their_optimizer_state_and_left_out_again(ranks: int | None, tmp_path: Path) -> None:
    save(tmp_path / "run", tensors())
    layout = None
    if ranks is not None:
        layout = {"mesh": {"tp": ranks}, "rules": [{"match": ["*_tokens.weight", "*head.weight"], "cut": ["tp"]}]}
        layout["rules"].append({"match": "*"})  # type: ignore[attr-defined]
    config = {"vocab_size": 10, "padded_vocab_size": 16}
    select = Select(pad={"model.embed": 16, "lm_head.": "padded_vocab_size"})
    done = reshard.convert(
        tmp_path / "run", tmp_path / "more", to="checkpoint2", select=select, config=config, layout=layout
    )
    large = {name: array if array.ndim == 1 else padded(array, 16) for name, array in tensors().items()}
    equal(tmp_path / "more", large)
    assert reshard.verify(tmp_path / "more").ok
    said = "`lm_head.weight` has shape (10, 4), and gets (16, 4): the rest is padding, all zeros"
    assert (said in done.warnings, len(done.warnings)) == (True, 4)
    back = Select(trim={"model.embed": "vocab_size", "lm_head.": 10})
    done = reshard.convert(tmp_path / "more", tmp_path / "back", to="checkpoint2", select=back, config=config)
    equal(tmp_path / "back", tensors())
    said = "`adam_m.lm_head.weight` has shape (16, 4), and gets (10, 4): the rest is left out, all zeros"
    assert (said in done.warnings, len(done.warnings)) == (True, 4)
    alone = tmp_path / "alone"
    reshard.convert(tmp_path / "more", alone, to="checkpoint2", select={"trim": {"lm_head.": 10}}, part="optimizer")
    expected = {name: array for name, array in large.items() if name.startswith("adam_m.")}
    equal(alone, expected | {"adam_m.lm_head.weight": tensors()["adam_m.lm_head.weight"]})


def test_names_before_and_after_rename_and_name_maps(tmp_path: Path) -> None:
    reshard.save_file({name: array for name, array in tensors().items() if name in NAMES}, tmp_path / "w.safetensors")
    names = {"rules": [{"from": "head.weight", "to": "t", "transpose": [1, 0]}]}
    for text in ("lm_head.", "head."):
        select = Select(drop="model.", rename={"lm_head.": "head."}, pad={text: 12})
        out = tmp_path / f"{text}safetensors"
        done = reshard.convert(tmp_path / "w.safetensors", out, select=select, names=names)
        equal(out, {"t": padded(tensors()["lm_head.weight"], 12).T})
        assert len(done.warnings) == 1


def test_what_is_asked_for_is_left_out_whatever_it_holds_and_told(tmp_path: Path) -> None:
    trained = padded(rows(), 16)
    trained[12] = 5
    reshard.save_file({"lm_head.weight": trained}, tmp_path / "w.safetensors")
    select = Select(trim={"lm_head.": 10})
    done = reshard.convert(tmp_path / "w.safetensors", tmp_path / "t.safetensors", select=select)
    equal(tmp_path / "t.safetensors", {"lm_head.weight": rows()})
    assert list(done.warnings) == [
        "`lm_head.weight` has shape (16, 4), and gets (10, 4): the rest is left out, of which 1 of 6 rows is not zero"
    ]
    same = reshard.convert(tmp_path / "t.safetensors", tmp_path / "s.safetensors", select=select)
    assert list(same.warnings) == []


@pytest.mark.parametrize(
    ("select", "config", "message"),
    [
        ({"trim": {"lm_head.": "vocab_size"}}, None, "`trim` of `lm_head.` is `vocab_size`, and there is no config"),
        ({"trim": {"lm_head.": "vocab"}}, {"vocab": "x"}, "config.json has no number `vocab`"),
        ({"trim": {"lm_head.": "vocab size"}}, {}, "`trim` of `lm_head.`: `vocab size` is not a size"),
        ({"trim": {"lm_head.": 0}}, None, "`trim` of `lm_head.` is 0, expected at least one row"),
        ({"trim": {"lm_head.": 11}}, None, "has 10 rows, and `trim` gives it 11: `trim` adds no rows, and `pad` does"),
        ({"pad": {"lm_head.": 9}}, None, "has 10 rows, and `pad` gives it 9: `pad` leaves no rows out"),
        ({"pad": {"lm_": 12}, "trim": {"lm_head.": 8}}, None, "`pad` and `trim` are both given for `lm_head.weight`"),
        ({"pad": {"head": 12}}, None, "`pad` has `head`, and no name of a weight begins with this text"),
        ({"pad": {"*head": 12}}, None, "hint: it is not a pattern"),
        ({"pad": {"lm_head.": True}}, None, "expected a number of rows, or a field of config.json"),
        ({"pad": {"": 12}}, None, "expected names of tensors or beginnings of names"),
        ({"pad": 12}, None, "expected a mapping of names to sizes"),
        ({}, {"vocab": 1}, "`config` has a meaning only with `names`, or with `pad` or `trim` of `Select`"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(select: Any, config: Any, message: str, tmp_path: Path) -> None:
    reshard.save_file({"lm_head.weight": rows()}, tmp_path / "w.safetensors")
    with pytest.raises(ArgumentError) as error:
        reshard.convert(tmp_path / "w.safetensors", tmp_path / "out.safetensors", select=select, config=config)
    assert message in str(error.value)
    assert not (tmp_path / "out.safetensors").exists()


def test_the_command_pads_and_trims(tmp_path: Path) -> None:
    reshard.save_file({"a=b.weight": rows(), "c.weight": rows()}, tmp_path / "w.safetensors")
    (tmp_path / "config.json").write_text('{"vocab_size": 10}')
    arguments = ["convert", str(tmp_path / "w.safetensors"), str(tmp_path / "m.safetensors")]
    done = CliRunner().invoke(main, [*arguments, "--pad", "a=b.=16", "--pad", "c.=12"])
    assert done.exit_code == 0, done.output
    equal(tmp_path / "m.safetensors", {"a=b.weight": padded(rows(), 16), "c.weight": padded(rows(), 12)})
    arguments = ["convert", str(tmp_path / "m.safetensors"), str(tmp_path / "s.safetensors")]
    assert CliRunner().invoke(main, [*arguments, "--trim", "a=b.=vocab_size", "--trim", "c.=10"]).exit_code == 0
    equal(tmp_path / "s.safetensors", {"a=b.weight": rows(), "c.weight": rows()})
    for option, message in (("c.", "is not PREFIX=ROWS"), ("=3", "is not PREFIX=ROWS"), ("c.=", "is not PREFIX=ROWS")):
        found = CliRunner().invoke(main, [*arguments, "--trim", option])
        assert (found.exit_code, message in found.stderr) == (2, True)
    twice = CliRunner().invoke(main, [*arguments, "--trim", "c.=3", "--trim", "c.=4"])
    assert "'c.' has two sizes" in twice.stderr


# --------------------------------------------------------------------------------------------------------- name maps

CONFIG = {"model_type": "llama", "vocab_size": 10, "hidden_size": 4, "num_attention_heads": 2, "num_hidden_layers": 1}
MEGATRON = ("embedding.word_embeddings.weight", "output_layer.weight")


@pytest.mark.parametrize(
    ("n", "fields", "is_padding"),
    [
        (16, {}, True),  # of a power of two
        (128, {}, True),
        (384, {}, True),  # 128 * 3 ranks
        (12, {}, True),
        (11, {}, False),
        (11, {"padded_vocab_size": 11}, True),
        (16, {"padded_vocab_size": 12}, False),
        (18, {"make_vocab_size_divisible_by": 9}, True),
        (18, {}, False),
        (18, {"make_vocab_size_divisible_by": 6, "tensor_model_parallel_size": 3}, True),
        (16, {"make_vocab_size_divisible_by": 6, "tensor_model_parallel_size": 3}, False),
    ],
)
def test_presets_leave_out_what_padding_explains_or_zeros(
    n: int,
    fields: dict[str, int],
    is_padding: bool,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    """Megatron trains the rows of the padding, too. Rows that its padding does not explain may be trained tokens."""
    config = CONFIG | fields
    for values, source in ((rows(n), "trained"), (padded(rows(), n), "zeros")):
        reshard.save_file(dict.fromkeys(MEGATRON, values), tmp_path / f"{source}.safetensors")
    names = NameMap.preset("llama-megatron", config).reversed()
    out = tmp_path / "out.safetensors"
    done = reshard.convert(tmp_path / "zeros.safetensors", out, names=names)
    equal(out, dict.fromkeys(NAMES, rows()))
    assert all(line.endswith("the rest is left out as padding, all zeros") for line in done.warnings)
    if is_padding:
        done = reshard.convert(tmp_path / "trained.safetensors", tmp_path / "again.safetensors", names=names)
        equal(tmp_path / "again.safetensors", dict.fromkeys(NAMES, rows()))
        more = n - 10
        of = f"{more} of {more} {'row is' if more == 1 else 'rows are'} not zero"
        assert [line.endswith(of) for line in done.warnings] == [True, True], done.warnings
        return
    with pytest.raises(NamesError) as error:
        reshard.convert(tmp_path / "trained.safetensors", tmp_path / "no.safetensors", names=names)
    assert f"the sizes of the name map do not pad 10 to {n}" in str(error.value)
    asked = f"select=Select(trim={dict.fromkeys(MEGATRON, 10)!r})"
    assert asked in str(error.value)
    select = Select(trim=dict.fromkeys(MEGATRON, 10))
    reshard.convert(tmp_path / "trained.safetensors", tmp_path / "asked.safetensors", names=names, select=select)
    equal(tmp_path / "asked.safetensors", dict.fromkeys(NAMES, rows()))


def test_optimizer_state_of_rows_that_are_left_out_is_compared_too(tmp_path: Path) -> None:
    state = {**dict.fromkeys(MEGATRON, padded(rows(), 11)), f"adam_m.{MEGATRON[0]}": rows(11)}
    save(tmp_path / "run", state)
    names = NameMap.preset("llama-megatron", CONFIG).reversed()
    with pytest.raises(NamesError, match=r"`adam_m\.embedding\.word_embeddings\.weight` has .* 1 of 1 row is not zero"):
        reshard.convert(tmp_path / "run", tmp_path / "out", to="checkpoint2", names=names)
    reshard.convert(tmp_path / "run", tmp_path / "out", to="checkpoint2", names=names, part="model")


# ---------------------------------------------------------------------------------------------------------- libraries


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_model_of_transformers_goes_to_megatron_and_back(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=100, num_key_value_heads=2, **sizes))
    model.save_pretrained(tmp_path / "hf")
    vocabulary = {"match": list(MEGATRON), "cut": ["tp"]}
    layout = {"mesh": {"tp": 2}, "rules": [vocabulary, {"match": "*"}]}
    for preset, to in (("llama-megatron", "checkpoint2"), ("llama-megatron_dist", "megatron")):
        config = json.loads((tmp_path / "hf" / "config.json").read_text())
        more: dict[str, Any] = {"layout": layout} if to == "checkpoint2" else {}
        config |= {} if more else {"tensor_model_parallel_size": 2}
        reshard.convert(tmp_path / "hf", tmp_path / to, to=to, names=preset, config=config, iteration=1, **more)  # type: ignore[arg-type]
        with reshard.open(tmp_path / to) as found:
            assert [found.shape(name) for name in MEGATRON] == [(256, 16)] * 2
        back = tmp_path / f"{to} back"
        names = f"{preset}:reverse"
        reshard.convert(
            tmp_path / to, back, names=names, files={"model_files": tmp_path / "hf"}, part="model", to="huggingface"
        )
        assert reshard.verify(back, loads_in="transformers").ok
        again = transformers.LlamaForCausalLM.from_pretrained(back).state_dict()
        assert all(torch.equal(again[name], one) for name, one in model.state_dict().items())
    # Without a map, the check of what is published says what to do.
    pad = Select(pad=dict.fromkeys(NAMES, 128))
    reshard.convert(tmp_path / "hf", tmp_path / "pad.safetensors", select=pad)
    given: Any = {"to": "huggingface", "files": {"model_files": tmp_path / "hf"}}
    with pytest.raises(MismatchError) as error:
        reshard.convert(tmp_path / "pad.safetensors", tmp_path / "no", **given)
    select = Select(trim=dict.fromkeys(sorted(NAMES), 100))
    assert f"`select={select!r}` leaves out the rest" in str(error.value)
    reshard.convert(tmp_path / "pad.safetensors", tmp_path / "yes", select=select, **given)
    assert reshard.load_file(tmp_path / "yes")["lm_head.weight"].shape == (100, 16)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_run_with_its_optimizer_goes_to_megatron_and_back(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from reshard.torch import Checkpointer

    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 12}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=97, num_key_value_heads=4, **sizes))
    optimizer = torch.optim.AdamW(model.to(torch.bfloat16).parameters(), foreach=False)
    with Checkpointer(tmp_path / "run", signals=()) as checkpointer:
        checkpointer.resume(model=model, optimizer=optimizer)
        tokens = torch.arange(16).reshape(2, 8)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        checkpointer.save(1, blocking=True)
    config = model.config.to_dict() | {"make_vocab_size_divisible_by": 16}
    layout = {"mesh": {"tp": 3}, "rules": [{"match": list(MEGATRON), "cut": ["tp"]}, {"match": "*"}]}
    for preset in ("llama-megatron", "llama-megatron_dist"):
        there, back = tmp_path / preset, tmp_path / f"{preset} back"
        reshard.convert(tmp_path / "run", there, to="checkpoint2", names=preset, config=config, layout=layout)
        with reshard.open(there) as found:
            assert found.shape(f"exp_avg.{MEGATRON[0]}") == (144, 24)
        reshard.convert(there, back, to="checkpoint2", names=f"{preset}:reverse", config=config)
        with reshard.open(tmp_path / "run") as run, reshard.open(back) as again:
            assert sorted(run) == sorted(again)
            assert all(run.read(key).tobytes() == again.read(key).tobytes() for key in run)
