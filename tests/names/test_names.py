"""Name maps: what is refused and with which words, what a map makes of keys, and conversions that use one."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file
from tests.helpers.memory import peak_mib

import reshard
from reshard import NameMap, _core
from reshard.cli import main
from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    DamagedFileError,
    LayoutError,
    MismatchError,
    NamesError,
    ReshardError,
)
from reshard.layout import Partition, TensorLayout
from reshard.names import as_names, file
from reshard.names.templates import Template, Templates

# -- maps that say nothing sensible: YAML, and what is wrong with it

NINE = ".".join(f"{{i{n}}}" for n in range(9))
BAD_MAPS = {
    "": "is empty",
    "[]": "expected a mapping with `rules`",
    "rules": "expected a mapping",
    "{}": "`rules` is missing",
    "rules: 3": "rules: expected a list, found `3`",
    "rules: []\nrule: []": r"unknown field `rule`.*\n.*did you mean `rules`",
    "rules: []\nother: drop": "other: expected `keep` or `refuse`, found `drop`",
    "rules: []\nother: true": "other: expected `keep` or `refuse`, found true",
    "rules: [3]": r"rules\[0\]: expected a mapping",
    "rules: [{from: a}]": r"rules\[0\]: `to` is missing",
    "rules: [{from: a, to: b, dim: 0}]": "unknown field `dim`",
    "rules: [{from: a, to: 3}]": r"rules\[0\].to: expected a name, found `3`",
    "rules: [{from: a, to: null}]": "expected a name, found null",
    'rules: [{from: a, to: ""}]': "expected a name of printable characters",
    'rules: [{from: a, to: "b\\e[2J"}]': r"printable characters, found `b\\x1b\[2J`",
    f"rules: [{{from: a, to: {'b' * 1025}}}]": "at most 1024 characters",
    'rules: [{from: "a.{i", to: b}]': "a brace that is not part of a `{variable}`",
    'rules: [{from: "a.{}", to: b}]': "a brace that is no",
    'rules: [{from: "a.{i}}", to: "b.{i}"}]': "a brace that is no",
    'rules: [{from: "a.{1}", to: "b.{1}"}]': "a brace that is no",
    'rules: [{from: "a.{i}{j}", to: "b.{i}.{j}"}]': "two adjacent indices are ambiguous",
    'rules: [{from: "a.{i}.{i}", to: "b.{i}"}]': "expected different indices",
    f'rules: [{{from: "{NINE}", to: b}}]': "at most 8",
    'rules: [{from: "a.{i}", to: b}]': "only the parts have the index `{i}`.*\n.*lay: {i: 0}",
    'rules: [{from: a, to: "b.{i}"}]': "only the parts have the index `{i}`",
    'rules: [{from: "a.{i}", to: "b.{j}"}]': "the index `{j}` is missing on the side of the parts",
    'rules: [{from: ["a.{i}", b], to: "c.{i}", join: 0}]': "`b` and `a.{i}` have different indices",
    "rules: [{from: [a, b], to: [c, d], join: 0}]": "are both lists",
    "rules: [{from: [a, a], to: b, join: 0}]": "a name is repeated",
    "rules: [{from: [], to: b, join: 0}]": "expected 1 to 4096 names",
    "rules: [{from: [a, b], to: c}]": "`join` is missing",
    "rules: [{from: a, to: c, join: 0}]": "`join` needs several parts",
    "rules: [{from: [a, b], to: c, join: -1}]": "join: expected an integer of at least 0, found `-1`",
    "rules: [{from: [a, b], to: c, join: x}]": "join: expected an integer",
    "rules: [{from: [a, b], to: c, join: 0, turns: 2}]": "turns: expected a list",
    "rules: [{from: [a, b], to: c, join: 0, turns: [1]}]": "1 turns for 2 parts",
    "rules: [{from: [a, b], to: c, join: 0, turns: [1, n]}]": "`n` is not a size of the map; the map has no `sizes`",
    "sizes: {m: 1}\nrules: [{from: [a, b], to: c, join: 0, turns: [1, n]}]": "`n` is not a size.*`sizes` has m",
    'rules: [{from: [a, b], to: c, join: 0, turns: [1, "2 +"]}]': "`2 \\+` is not a size",
    'rules: [{from: [a, b], to: c, join: 0, turns: [1, "(2)"]}]': "is not a size",
    'rules: [{from: [a, b], to: c, join: 0, turns: [1, "-2"]}]': "is not a size",
    "rules: [{from: [a, b], to: c, join: 0, turns: [1, true]}]": "expected a size, found true",
    "rules: [{from: [a, b], to: c, join: 0, turns: [1, 1.5]}]": "`1.5` is not a size",
    f'rules: [{{from: [a, b], to: c, join: 0, turns: [1, "{"2 * " * 16}2"]}}]': "more than 16 terms",
    f'rules: [{{from: [a, b], to: c, join: 0, turns: [1, "{"2 * " * 400}2"]}}]': "is not a size",
    "rules: [{from: a, to: b, transpose: [0, 2]}]": "expected each dim once",
    "rules: [{from: a, to: b, transpose: [1, 1]}]": "expected each dim once",
    "rules: [{from: a, to: b, transpose: []}]": "expected each dim once",
    "rules: [{from: a, to: b, transpose: 1}]": "transpose: expected a list",
    'rules: [{from: "a.{e}", to: b, lay: {f: 0}}]': "`f` is not an index that only the parts have",
    'rules: [{from: "a.{e}", to: "b.{e}", lay: {e: 0}}]': "`e` is not an index that only the parts have",
    'rules: [{from: "a.{e}", to: b, lay: {e: 0}, stack: {e: 0}}]': "`lay` and `stack` both name `e`",
    'rules: [{from: "a.{e}", to: b, lay: [e]}]': "expected indices and dims",
    'rules: [{from: "a.{e}", to: b, lay: {e: x}}]': "lay.e: expected an integer",
    'rules: [{from: "a.{e}", to: b, stack: {e: 16}}]': "expected dims below 16",
    'rules: [{from: "a.{e}.{f}", to: b, lay: {e: 0, f: 0}}]': "two indices have the same dim",
    'rules: [{from: ["a.{e}", "b.{e}"], to: c, join: 0, stack: {e: 0}}]': "dim 0 is used by `stack`",
    "rules: [{from: a, tied: a}]": "`a` is tied to itself",
    "rules: [{from: a, to: b, tied: c}]": "`tied` with either `from` or `to`",
    "rules: [{tied: c}]": "`tied` with either `from` or `to`",
    "rules: [{from: a, tied: b, join: 0}]": "unknown field `join`",
    'rules: [{from: "a.{i}", tied: b}]': "have different indices",
    "rules: [{from: [a], tied: b}]": "expected a name, found a list",
    "sizes: 3\nrules: []": "expected names and sizes",
    "sizes: {3: 1}\nrules: []": "expected the name of a size, found `3`",
    "sizes: {a-b: 1}\nrules: []": "expected the name of a size",
    "sizes: {a: []}\nrules: []": "expected at least one",
    "sizes: {a: {b: 1}}\nrules: []": "expected a size, found a mapping",
    'sizes: {a: "b ** 2"}\nrules: []': "is not a size",
    "rules: &r [*r]": "has no anchor before it",
    "rules: !!python/object:os.system []": "tags are not accepted",
    "rules: []\nrules: []": "is repeated",
}


@pytest.mark.parametrize(("text", "message"), BAD_MAPS.items(), ids=range(len(BAD_MAPS)))
def test_bad_map(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "names.yaml"
    path.write_text(text)
    with pytest.raises(NamesError, match=message) as raised:
        NameMap.from_yaml(path)
    assert str(path) in str(raised.value)
    assert raised.value.path == str(path)


def test_a_file_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "names.yaml"
    path.write_text("other: keep\nrules:\n  - {from: a, to: b}\n  - {from: [a, b], to: c}\n")
    with pytest.raises(NamesError, match=rf"{path}, line 4: rules\[1\]: `join` is missing"):
        NameMap.from_yaml(path)
    with pytest.raises(CheckpointNotFoundError, match="there is no name map file"):
        NameMap.from_yaml(tmp_path / "none.yaml")


def test_the_map_that_the_module_shows_is_one(tmp_path: Path) -> None:
    shown = (file.__doc__ or "").partition("::\n\n")[2].partition("\n\nDims")[0]
    (tmp_path / "names.yaml").write_text(textwrap.dedent(shown))
    names = NameMap.from_yaml(tmp_path / "names.yaml")
    assert len(names.rules) == 8
    assert NameMap.from_mapping(names.to_mapping()) == names


# -- maps that do not fit the tensors

Q_K = {"q": (4, 8), "k": (4, 8)}
EXPERTS = {"rules": [{"from": "e.{e}.w", "to": "experts", "lay": {"e": 0}}]}
STACKED = {"rules": [{"from": "e.{e}.w", "to": "experts", "stack": {"e": 1}}], "sizes": {"e": 2}}


def joined(**more: Any) -> dict[str, Any]:
    sizes = more.pop("sizes", {})
    return {"sizes": sizes, "rules": [{"from": ["q", "k"], "to": "qk", "join": 0, **more}]}


@pytest.mark.parametrize(
    ("mapping", "shapes", "message"),
    [
        (joined(), {"q": (4, 8)}, "`k` is missing: `qk` is fused from it and `q`"),
        (joined(), {"q": (4, 8), "k": (2, 8)}, r"have \[4, 2\] elements along dim 0: `turns` is missing"),
        (joined(), {"q": (4, 8), "k": (4, 6)}, r"`k` of shape \(4, 6\) and `q` of shape \(4, 8\) cannot be fused"),
        (joined(), {"q": (4, 8), "k": (4,)}, "cannot be fused into `qk`"),
        (joined(), {"q": (), "k": ()}, "uses dim 0, and the whole has 0 dims"),
        (joined(join=2), Q_K, "uses dim 2, and the whole has 2 dims"),
        (joined(turns=[2, 1]), Q_K, r"not the same multiple of \[2, 1\]"),
        (joined(turns=[3, 3]), Q_K, r"not the same multiple of \[3, 3\]"),
        (joined(turns=[0, 1]), Q_K, "`0` is 0, expected at least 1"),
        (joined(turns=["n", 1], sizes={"n": "heads"}), Q_K, "needs the size `n`, which is not known"),
        (joined(turns=["n / 3", 1], sizes={"n": 4}), Q_K, "`n / 3`: 4 is not divisible by 3"),
        (joined(turns=["n / 0", 1], sizes={"n": 4}), Q_K, "4 is not divisible by 0"),
        (joined(turns=["n * n", 1], sizes={"n": 1 << 50}), Q_K, "is too large"),
        (joined(transpose=[0]), Q_K, r"`q` of shape \(4, 8\) cannot be transposed by \[0\]"),
        (joined(), {"qk": (4,), **Q_K}, "`qk` and `q` would both be named `qk`"),
        (joined(), {"a": (4,)}, r"no rule .* matches any of the 1 keys, such as `a`\n.*the map of this model"),
        (joined(), {"qk": (4,)}, r"no rule .* matches any.*\n.*`:reverse`"),
        (joined() | {"other": "refuse"}, {"a": (1,), "b": (1,), **Q_K}, "no rule .* matches `a` and 1 more"),
        (EXPERTS, {"e.0.w": (2,), "e.2.w": (2,)}, r"`e.1.w` is missing: `experts` is fused from it and `e.0.w`"),
        (EXPERTS, {"e.1.w": (2,)}, "`e.0.w` is missing"),
        (EXPERTS, {f"e.{10**17}.w": (2,)}, "`e.0.w` is missing"),
        (EXPERTS, {"e.0.w": (2,), "e.1.w": (3,)}, r"`e.1.w` has shape \(3,\) and `e.0.w` \(2,\)"),
        (STACKED, {"e.0.w": (2,)}, "`e.1.w` is missing"),
        (STACKED, {f"e.{n}.w": (2,) for n in range(3)}, "`e.2.w` is an extra part of `experts`: .* e = 2"),
        (STACKED, {f"e.{n}.w": () for n in range(2)}, "uses dim 1, and the whole has 1 dim"),
        ({"rules": [{"from": "a", "tied": "b"}]}, {"a": (2,)}, "`a` is tied to `b`, which is missing"),
        ({"rules": [{"from": "a", "tied": "b"}]}, {"a": (2,), "b": (3,)}, r"\(2,\) is tied to `b` of shape \(3,\)"),
        ({"rules": [{"from": "a", "to": "c"}, {"to": "b", "tied": "c"}]}, {"a": (2,), "b": (2,)}, "both be named `b`"),
    ],
)
def test_map_that_does_not_fit(mapping: dict[str, Any], shapes: dict[str, Any], message: str) -> None:
    with pytest.raises(NamesError, match=message):
        NameMap.from_mapping(mapping).resolve(shapes)


@pytest.mark.parametrize(
    ("mapping", "shape", "message"),
    [
        (joined(), (5, 8), "`qk`: the 5 elements along dim 0 are not divisible into 2 parts"),
        (joined(turns=[2, 1]), (8, 8), r"are not divisible into turns of \[2, 1\]"),
        (joined(join=1), (8,), "uses dim 1, and the whole has 1 dim"),
        (joined(transpose=[1, 0]), (8,), r"`qk` of shape \(8,\) cannot be transposed by \[1, 0\]"),
        (EXPERTS, (6,), r"`experts` is split by `{e}`, and the number of its values is not known"),
        (EXPERTS | {"sizes": {"e": 4}}, (6,), "are not divisible into 4 of `{e}`"),
        (EXPERTS | {"sizes": {"e": 0}}, (6,), "are not divisible into 0 of `{e}`"),
        (EXPERTS | {"sizes": {"e": 1 << 40}}, (1 << 40,), "into more than 500000 parts: 1099511627776 with"),
        (STACKED, (6, 3), "has 3 elements along dim 1, and the name map has e = 2"),
    ],
)
def test_whole_that_cannot_be_taken_apart(mapping: dict[str, Any], shape: Any, message: str) -> None:
    key = mapping["rules"][0]["to"]
    with pytest.raises(NamesError, match=message):
        NameMap.from_mapping(mapping).reversed().resolve({key: shape})


# -- what a map makes of keys


def made(mapping: dict[str, Any], *keys: str, optimizer: tuple[str, ...] = ()) -> list[str]:
    found = NameMap.from_mapping(mapping).resolve(dict.fromkeys((*keys, *optimizer), (4, 8)), optimizer_keys=optimizer)
    return [one.key for one in found]


def test_keys_and_their_order() -> None:
    rules = [{"from": "h.{i}.w", "to": "l.{i}.w"}, {"from": ["q", "k"], "to": "qk", "join": 0}]
    assert made({"rules": rules}, "k", "h.10.w", "h.01.w", "other", "q", "h.2.w") == [
        *("l.10.w", "h.01.w", "other"),  # a number with a leading zero is no number that would come back
        *("qk", "l.2.w"),
    ]


def test_the_first_rule_decides() -> None:
    rules = [{"from": "h.3.w", "to": "last.w"}, {"from": "h.{i}.w", "to": "l.{i}.w"}, {"from": "h.4.w", "to": "never"}]
    assert made({"rules": rules}, "h.3.w", "h.4.w") == ["last.w", "l.4.w"]


def test_state_follows_its_tensor_and_nothing_else_does() -> None:
    mapping = {"rules": [{"from": "h.w", "to": "l.w"}]}
    assert made(mapping, "h.w", "adam.m.h.w", "other.w") == ["l.w", "adam.m.l.w", "other.w"]
    # Without the tensor itself only what is known as state is taken for it.
    assert made(mapping, "draft.x", optimizer=("m.h.w",)) == ["draft.x", "m.l.w"]
    assert made({"rules": [*mapping["rules"], {"from": "x", "to": "y"}]}, "x", "draft.h.w") == ["y", "draft.h.w"]


def test_other_refuse_lets_the_optimizers_counters_be() -> None:
    mapping = {"other": "refuse", "rules": [{"from": "h.w", "to": "l.w"}]}
    assert made(mapping, "h.w", optimizer=("global_step",)) == ["l.w", "global_step"]


def test_names_are_exchanged() -> None:
    assert made({"rules": [{"from": "a", "to": "b"}, {"from": "b", "to": "a"}]}, "a", "b") == ["b", "a"]


def test_a_template_gives_back_what_it_matches() -> None:
    template = Template.compile("a{i}.b+.{j}")
    assert template.match("a12.b+.0") == {"i": 12, "j": 0}
    for name in ("a012.b+.0", "a1.bb.0", "a-1.b+.0", "xa1.b+.0", "a1.b+.0\n", "a\u0661.b+.0"):
        assert template.match(name) is None
    found = Templates([(Template.compile("w2.{i}.{j}"), "two"), (Template.compile("w{i}.{j}.3"), "one")])
    assert [getattr(found.find(name), "value", None) for name in ("w2.1.3", "w3.1.3", "w3.1.4")] == ["two", "one", None]


@pytest.mark.slow(disk=False)
def test_many_tensors_in_many_files_are_renamed_in_seconds() -> None:
    """2,000 tensors, cut over 64 files."""
    parts = [f"{part}_proj.weight" for part in ("q", "k", "v", "o", "gate", "up", "down", "more")]
    keys = [f"model.layers.{i}.{part}" for i in range(250) for part in parts]
    mesh = _core.Mesh([("tp", 64)])
    layout = _core.Layout(mesh, TensorLayout((128, 64), Partition((("tp",),))))
    source = _core.Index()
    files = [source.add_file(f"/not/opened/{rank}.safetensors") for rank in range(64)]
    for key in keys:
        source.add_layout(key, "BF16", layout, files)
    layer = "model.layers.{i}."
    rules = [
        {"from": [f"{layer}{p}_proj.weight" for p in "qkv"], "to": "l.{i}.qkv", "join": 0, "turns": [8, 8, 8]},
        {"from": [f"{layer}{p}_proj.weight" for p in ("gate", "up")], "to": "l.{i}.fc1", "join": 0, "turns": [1, 1]},
        {"from": f"{layer}down_proj.weight", "to": "l.{i}.fc2", "transpose": [1, 0]},
    ]
    started = time.process_time()
    target = _core.Index()
    for rank in range(64):
        target.add_file(source.file_path(rank))
    for one in NameMap.from_mapping({"rules": rules}).resolve(dict.fromkeys(keys, (128, 64))):
        stored = one.stored(source.stored)
        target.add_tiles(one.key, "BF16", one.shape, stored, overlapping=True, factors=one.factors)
    seconds = time.process_time() - started
    assert len(target) == 250 * 5
    target.check_coverage()
    assert seconds < 10, "of processor; one on an idle machine"


# -- what `names` takes


def test_what_names_takes(tmp_path: Path) -> None:
    mapping = {"sizes": {"e": "num_experts"}, "rules": [{"from": "a", "to": "b"}]}
    path = tmp_path / "names.yaml"
    path.write_text(str(NameMap.from_mapping(mapping)))
    (tmp_path / "config.json").write_text('{"num_experts": 8, "text": null}')
    known = NameMap.from_mapping(mapping).with_config({"num_experts": 8})
    for value in (NameMap.from_mapping(mapping), mapping, path, str(path)):
        assert as_names(value, tmp_path) == as_names(value, {"num_experts": 8}) == known
    assert as_names(f"{path}:reverse", tmp_path) == known.reversed()
    # A config that says nothing of it leaves the size as it is.
    for useless in ({}, {"num_experts": None}):
        assert as_names(mapping, useless) == NameMap.from_mapping(mapping)
    for wrong in (3, None, [mapping]):
        with pytest.raises(ArgumentError, match="expected a NameMap, a path, a preset or a mapping"):
            as_names(wrong)  # type: ignore[arg-type]
    with pytest.raises(CheckpointNotFoundError, match="there is no config"):
        as_names(mapping, tmp_path / "none")
    for text, message in (
        ("[]", "expected a JSON object"),
        ('{"a": 1, "a": 2}', "is repeated"),
        ("{", "not valid JSON"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises((ArgumentError, DamagedFileError), match=message):
            as_names(mapping, tmp_path)
    assert as_names(known, tmp_path) == known  # which needs none


# -- opening and converting

CONFIG = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2}
LAYER = "model.layers.0."


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    tensors = {
        f"{LAYER}self_attn.{part}_proj.weight": rng.integers(0, 99, (n, 8))
        for part, n in zip("qkv", (8, 4, 4), strict=True)
    }
    tensors["model.norm.weight"] = rng.integers(0, 99, 8)
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def run(*args: object) -> Any:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def test_convert_there_and_back_on_the_command_line(hf: Path, tmp_path: Path) -> None:
    layout = tmp_path / "tp2.yaml"
    layout.write_text('mesh: {tp: 2}\nrules: [{match: "*linear_qkv*", cut: [tp]}, {match: "*"}]')
    result = run("convert", hf, tmp_path / "ms", "--names", "mindspore", "--layout", layout, "--no-sync")
    assert result.exit_code == 0, result.output
    with reshard.open(tmp_path / "ms") as opened:
        assert sorted(opened) == ["decoder.final_layernorm.weight", "decoder.layers.0.self_attention.linear_qkv.weight"]
    back = tmp_path / "back"
    result = run("convert", tmp_path / "ms", back, "--names", "llama-mindspore:reverse", "--config", hf, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["n_tensors"] == 4
    expected, found = reshard.load_file(hf), reshard.load_file(back)
    assert sorted(found) == sorted(expected)
    assert all((found[key] == expected[key]).all() for key in expected)
    for args, message in (
        (("--names", "mindspor"), "did you mean 'mindspore'"),
        (("--names", "llama-mindspore", "--config", tmp_path / "none"), "there is no config"),
        (("--config", hf), "--config has a meaning only with --names"),
        (("--names", tmp_path / "none.yaml"), "there is no name map file"),
    ):
        result = run("convert", hf, tmp_path / "x", *args)
        assert result.exit_code == 1
        assert message in result.stderr
        assert not (tmp_path / "x").exists()


def test_names_follow_drop_and_rename_and_come_before_the_layout(hf: Path, tmp_path: Path) -> None:
    names = {"other": "refuse", "rules": [{"from": ["q", "k"], "to": "qk", "join": 0, "turns": [2, 1]}]}
    prefix = f"{LAYER}self_attn."
    reshard.convert(
        hf,
        tmp_path / "out.safetensors",
        select={
            "drop": [f"{prefix}v_", "model.norm"],
            "rename": {f"{prefix}q_proj.weight": "q", f"{prefix}k_proj.weight": "k"},
        },
        names=names,
    )
    assert list(reshard.load_file(tmp_path / "out.safetensors")) == ["qk"]


def test_a_copy_with_other_values_is_not_left_out(tmp_path: Path) -> None:
    w, part = np.arange(8, dtype=np.float32), np.array([-0.0, np.nan], np.float32)
    tensors = {"embed.w": w, "head.w": w.copy(), "adam_m.embed.w": part, "adam_m.head.w": part.copy()}
    names = {"rules": [{"from": "head.w", "tied": "embed.w"}, {"from": "embed.w", "to": "new.w"}]}
    path = tmp_path / "m.safetensors"
    reshard.save_file(tensors, path)
    reshard.convert(path, tmp_path / "equal", names=names, part="all")
    assert sorted(reshard.load_file(tmp_path / "equal")) == ["adam_m.new.w", "new.w"]
    for key, at in (("head.w", 7), ("adam_m.head.w", 0)):
        changed = {**tensors, key: tensors[key].copy()}
        changed[key][at] += 1
        reshard.save_file(changed, path)
        with pytest.raises(NamesError, match=f"`{key}` is tied to .* but differs from it"):
            reshard.convert(
                path,
                tmp_path / "different",
                names={"rules": [{"from": "x.head.w", "tied": "x.embed.w"}]},
                select={"rename": {"": "x."}},
                part="all",
                overwrite=True,
            )
        assert not (tmp_path / "different").exists()


@pytest.mark.parametrize("to", ["checkpoint1", "checkpoint2", "mindspore", "safetensors"])
def test_there_and_back_through_every_format(to: Any, hf: Path, tmp_path: Path) -> None:
    layout = {"mesh": {"tp": 2}, "rules": [{"match": "*linear_qkv*", "cut": ["tp"]}, {"match": "*"}]}
    given: dict[str, Any] = {} if to == "mindspore" else {"layout": layout}
    reshard.convert(hf, tmp_path / to, names="mindspore", to=to, **given)
    names = NameMap.preset("mindspore", hf).reversed()
    expected = reshard.load_file(hf)
    with reshard.open(tmp_path / to, names=names) as back:
        assert {key: array.tolist() for key, array in back.load().items()} == {
            k: a.tolist() for k, a in expected.items()
        }
        with pytest.raises(LayoutError, match="are renamed, so the recorded layout does not apply"):
            reshard.ModelLayout.like(back)


def test_only_what_is_written_must_fit(tmp_path: Path) -> None:
    """State of another shape than its tensor, as some optimizers have it, cannot be fused."""
    folder = tmp_path / "iteration_00000001"
    folder.mkdir()
    w = np.arange(8.0).reshape(4, 2)
    save_file({"q": w, "k": w + 8}, folder / "model-0000000-0000001.safetensors")
    save_file({"m.q": w[0], "m.k": w[1, :1]}, folder / "opt-0000000-0000001.safetensors")
    names = joined(turns=[1, 1])
    reshard.convert(folder, tmp_path / "hf", names=names)
    assert reshard.load_file(tmp_path / "hf")["qk"][:2].tolist() == [[0, 1], [8, 9]]
    with pytest.raises(NamesError, match=r"`m.q` and the other parts have \[2, 1\] elements along dim 0"):
        reshard.convert(folder, tmp_path / "all", names=names, to="checkpoint2")
    assert not (tmp_path / "all").exists()


def test_parts_of_two_dtypes_are_refused(tmp_path: Path) -> None:
    save_file({"q": np.zeros((2, 2), np.float32), "k": np.zeros((2, 2), np.float16)}, tmp_path / "m.safetensors")
    with pytest.raises(MismatchError, match="`qk` would consist of `q`, F32, and `k`, F16"):
        reshard.open(tmp_path / "m.safetensors", names=joined())


def test_a_renamed_checkpoint_is_proven_like_its_source(tmp_path: Path) -> None:
    source = {"q": np.arange(8.0), "k": np.arange(8.0) + 8}
    reshard.save(tmp_path / "root", 1, source, commit={"durable": False})
    with reshard.open(tmp_path / "root", names=joined()) as renamed:
        assert renamed.verified
        assert renamed.iteration == 1
        file = Path(renamed.path) / renamed.files()[0].name
        assert renamed.read("qk").tolist() == list(range(16))
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.chmod(0o640)
        file.write_bytes(content)
    with reshard.open(tmp_path / "root", names=joined()) as renamed, pytest.raises(DamagedFileError):
        renamed.read("qk")


def test_the_renamed_and_its_source_are_closed_by_themselves(hf: Path) -> None:
    with reshard.open(hf) as opened:
        with opened.renamed("megatron") as renamed:
            key = "decoder.final_layernorm.weight"
            norm = renamed.read(key)
        assert opened.read("model.norm.weight").tolist() == norm.tolist()
        with pytest.raises(ReshardError):
            renamed.read(key)


CONVERT = """
import sys, reshard
source, target = sys.argv[1:]
names = {"rules": [
    {"from": "layers.{i}.weight", "to": "all.weight", "lay": {"i": 0}},
]}
turns = {"rules": [{"from": ["layers.%d.weight" % (2 * n + k) for k in (0, 1)], "to": "fused.%d" % n, "join": 0,
                    "turns": [64, 64]} for n in range(int(sys.argv[2][-4:]) // 48)]}
reshard.convert(source, target, names=turns if "turns" in target else names, memory="32MiB",
                commit={"durable": False}, progress=look, threads=2)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RssAnon is Linux")
@pytest.mark.parametrize("what", ["one tensor of all", "turns"])
def test_convert_with_names_takes_its_budget_and_a_constant(what: str, tmp_path: Path) -> None:
    from tests.helpers.memory import sparse_model

    peaks = []
    for n_mib in (96, 288):
        source = sparse_model(tmp_path / f"{n_mib}.safetensors", n_mib)
        target = tmp_path / f"{what}-{n_mib:04}"
        peaks.append(peak_mib(CONVERT, source, target))
        assert sum(file.stat().st_size for file in target.rglob("*.safetensors")) >= n_mib << 20
        subprocess.run(["rm", "-r", target], check=True)  # pytest keeps its folders for a while
    assert peaks[1] <= 32 + 64
    assert peaks[1] <= peaks[0] + 8


def hugging_face_model(folder: Path, config: dict[str, Any], vocabulary: int) -> Path:
    """A dense model under Hugging Face names, in a file that takes no space: all zeros, never written."""
    hidden, ffn, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = (config[name] * dim for name in ("num_attention_heads", "num_key_value_heads"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for i in range(config["num_hidden_layers"]):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        shapes |= {
            **{f"{attention}.{part}_proj.weight": (kv_heads, hidden) for part in "kv"},
            f"{attention}.q_proj.weight": (heads, hidden),
            f"{attention}.o_proj.weight": (hidden, heads),
            **{f"{mlp}.{part}_proj.weight": (ffn, hidden) for part in ("gate", "up")},
            f"{mlp}.down_proj.weight": (hidden, ffn),
            f"model.layers.{i}.input_layernorm.weight": (hidden,),
        }
    end, header = 0, {}
    for key, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


QWEN3_32B = {
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def test_tiles_are_as_many_as_parts_and_not_as_rows(tmp_path: Path) -> None:
    """3.3 million rows take turns in a model of the shapes of Qwen3-32B."""
    source = hugging_face_model(tmp_path / "hf", QWEN3_32B, 151936)
    with reshard.open(source) as opened, opened.renamed("mindspore") as renamed:
        shards = {key: renamed[key].shards for key in renamed}
        assert sum(map(len, shards.values())) == len(list(opened))
        fc1 = "decoder.layers.63.mlp.linear_fc1.weight"
        boxes = [(shard.offset, shard.shape) for shard in shards[fc1]]
        assert boxes == [((0, 0), (2 * 25600 - 1, 5120)), ((1, 0), (2 * 25600 - 1, 5120))]
        started = time.process_time()
        with opened.renamed("mindspore") as again:
            assert again[fc1].shape == (2 * 25600, 5120)
        assert time.process_time() - started < 3, "a fraction of a second on an idle machine"


CONVERT_BY_ROWS = """
import sys, reshard
source, target, names, config = sys.argv[1:]
layout = {"mesh": {"tp": 3}, "rules": [{"match": "*linear_fc1*", "cut": ["tp"], "uneven": "ceil"}, {"match": "*"}]}
reshard.convert(source, target, names=names, config=config, layout=None if "reverse" in names else layout,
                memory="64MiB", commit={"durable": False}, threads=2, progress=look)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RssAnon is Linux")
def test_rows_that_take_turns_are_converted_within_the_budget(tmp_path: Path) -> None:
    """1.2 million rows, there (cut over ranks) and back."""
    config = QWEN3_32B | {"hidden_size": 32, "intermediate_size": 300_000, "num_hidden_layers": 2, "head_dim": 1}
    hf = hugging_face_model(tmp_path / "hf", config, 100)
    ms, back = tmp_path / "ms", tmp_path / "back"
    there = peak_mib(CONVERT_BY_ROWS, hf, ms, "mindspore", hf)
    and_back = peak_mib(CONVERT_BY_ROWS, ms, back, "qwen3-mindspore:reverse", hf)
    assert max(there, and_back) <= 64 + 64, f"{there:.0f} and {and_back:.0f} MiB, interpreter included"
    with reshard.open(hf) as first, reshard.open(back) as last:
        assert {key: last[key].shape for key in last} == {key: first[key].shape for key in first}


# -- what is counted before it is made


def test_parts_are_counted_in_all_tensors_before_one_is_made() -> None:
    names = NameMap.from_mapping(
        {"sizes": {"e": 200_000}, "rules": [{"from": "{i}.w", "to": "{i}.{e}.w", "lay": {"e": 0}}]}
    )
    started = time.process_time()
    for n_tensors in (3, 2000):
        with pytest.raises(NamesError, match=r"into more than 500000 parts: 600000 with the 200000 of `2\.w`") as error:
            names.resolve({f"{i}.w": (200_000,) for i in range(n_tensors)})
        assert error.value.key == "2.w"
    assert time.process_time() - started < 2


@pytest.mark.slow
def test_copies_count_as_parts_do() -> None:
    ties = [{"to": f"{{i}}.copy{n}", "tied": "{i}.w"} for n in range(5000)]
    names = NameMap.from_mapping({"rules": [{"from": "{i}.v", "to": "{i}.w"}, *ties]})
    with pytest.raises(NamesError, match="more than 500000 tensors"):
        names.resolve({f"{i}.v": (1,) for i in range(1000)})


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([{"from": f"a{n}", "to": f"b{n}"} for n in range(10_001)], "expected at most 10000 rules, found 10001"),
        (
            [{"from": [f"a{n}.{m}" for m in range(4000)], "to": f"b{n}", "join": 0} for n in range(13)],
            "expected at most 50000 names in all rules, found 52013",
        ),
    ],
)
def test_rules_are_counted_before_one_is_read(rules: list[Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Template, "compile", lambda text: pytest.fail(f"{text} was compiled"))
    with pytest.raises(NamesError, match=words):
        NameMap.from_mapping({"rules": rules})


@pytest.mark.parametrize("value", [-4, "4", 4.0, True, [4]])
def test_a_number_of_the_config_that_is_none_is_told(value: object) -> None:
    names = NameMap.from_mapping({"sizes": {"a": ["kv * 2", "heads"]}, "rules": []})
    with pytest.raises(NamesError, match=r"the size `a` .* `kv` of the config is not a non-negative integer") as error:
        names.with_config({"kv": value, "heads": 8})
    assert error.value.hint is not None
    assert "`sizes`" in error.value.hint
    # What the config has not, or leaves open, is no fault of it.
    assert names.with_config({"kv": None, "heads": 8}).sizes["a"].choices[0].value({}) == 8
    assert names.with_config({}).needs_config


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize(
    "rule",
    [
        {"from": ["q", "k"], "to": "qk", "join": 0},
        {"from": "h.{i}.w", "to": "w", "stack": {"i": 0}},
        {"from": "q", "to": "t", "transpose": [1, 0]},
    ],
)
def test_one_number_of_an_optimizer_is_that_of_all_parts(rule: Any, shape: tuple[int, ...], tmp_path: Path) -> None:
    parts = ["h.0.w", "h.1.w"] if rule["to"] == "w" else ["q", "k"]
    weights = {name: np.arange(6, dtype=np.float32).reshape(2, 3) + n for n, name in enumerate(parts)}
    state = {f"m.{name}": array * 2 for name, array in weights.items()}
    state |= {f"step.{name}": np.full(shape, 7, np.float32) for name in parts}
    reshard.save(tmp_path / "run", 1, weights, state)
    names = NameMap.from_mapping({"rules": [rule]})
    reshard.convert(tmp_path / "run", tmp_path / "new", to="checkpoint2", names=names)
    whole = rule["to"]
    with reshard.open(tmp_path / "new") as found:
        assert found.read(f"step.{whole}").tolist() == np.full(shape, 7).tolist()
        assert np.array_equal(found.read(f"m.{whole}"), found.read(whole) * 2)
    reshard.convert(tmp_path / "new", tmp_path / "back", to="checkpoint2", names=names.reversed())
    with reshard.open(tmp_path / "back") as found:
        assert sorted(found) == sorted([*weights, *state])
        for name, array in {**weights, **state}.items():
            assert np.array_equal(found.read(name), array), name
            assert found.shape(name) == array.shape
    if whole == "t":
        return
    state[f"step.{parts[1]}"] = np.full(shape, 8, np.float32)
    reshard.save(tmp_path / "other", 1, weights, state)
    with pytest.raises(
        NamesError, match=f"`step.{parts[1]}` differs from `step.{parts[0]}`, and the name map makes one"
    ):
        reshard.convert(tmp_path / "other", tmp_path / "no", to="checkpoint2", names=names)
    reshard.convert(tmp_path / "other", tmp_path / "weights", to="checkpoint2", names=names, part="model")
