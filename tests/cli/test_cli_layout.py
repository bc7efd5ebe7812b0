"""`reshard layout` and `reshard names`: what they print is what `convert` does, and every fault is shown at once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import yaml
from tests.helpers.command_line import run

import reshard
from reshard.errors import LayoutError, NamesError
from reshard.layout.presets import FAMILIES
from reshard.names.presets import FAMILIES as NAME_FAMILIES
from reshard.verbs.check_layout import check_layout
from reshard.verbs.forecast import forecast

if TYPE_CHECKING:
    from pathlib import Path

HEADS = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 8}


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    """A llama of four layers with its config."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (64, 8), "model.norm": (8,), "lm_head": (64, 8)}
    for i in range(4):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{one}_proj": (8, 8) for one in "qo"}
        shapes |= {f"{layer}.self_attn.{one}_proj": (4, 8) for one in "kv"}
        shapes |= {f"{layer}.mlp.{one}_proj": (16, 8) for one in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (8, 16)}
        shapes |= {f"{layer}.{one}_layernorm": (8,) for one in ("input", "post_attention")}
    folder = tmp_path / "hf"
    folder.mkdir()
    reshard.save_file(
        {f"{key}.weight": np.zeros(one, np.float32) for key, one in shapes.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps({**HEADS, "num_hidden_layers": 4}))
    return folder


# -- layout preset


def test_a_preset_is_printed_as_the_file_that_it_is(tmp_path: Path, hf: Path) -> None:
    for family in ("llama", hf):
        result = run("layout", "preset", family, "--tp", 2, "--pp", 2)
        assert result.exit_code == 0, result.output
        (tmp_path / "l.yaml").write_text(result.stdout)
        expected = reshard.ModelLayout.preset(str(family), tp=2, pp=2)
        assert reshard.ModelLayout.from_yaml(tmp_path / "l.yaml").to_mapping() == expected.to_mapping()
        as_json = json.loads(run("layout", "preset", family, "--tp", 2, "--pp", 2, "--json").stdout)
        assert reshard.ModelLayout.from_mapping(as_json).to_mapping() == expected.to_mapping()
        assert run("layout", "check", tmp_path / "l.yaml", hf).exit_code == 0


def test_families_are_named(tmp_path: Path) -> None:
    assert run("layout", "preset", "--list").stdout.split() == list(FAMILIES)
    assert json.loads(run("layout", "preset", "--list", "--json").stdout) == {"families": list(FAMILIES)}
    for args in ((), ("llama", "--list")):
        assert run("layout", "preset", *args).exit_code == 2
    assert "llama, mistral" in run("layout", "preset").stderr
    result = run("layout", "preset", tmp_path / "nothing")
    assert (result.exit_code, "neither a model family" in result.stderr) == (1, True)
    result = run("layout", "preset", "llama", "--ep", 2)
    assert (result.exit_code, "no experts" in result.stderr) == (1, True)


# -- layout check

RULES: list[dict[str, Any]] = [{"match": "*.{q,k,v}_proj.weight", "cut": ["tp"]}, {"match": "*"}]
FAULTY: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a key has no rule": ({"mesh": {"tp": 2}, "rules": RULES[:1]}, ["lm_head.weight", "model.norm.weight"]),
    "dims do not divide": (
        {"mesh": {"tp": 3}, "rules": [{"match": "*norm.weight", "cut": ["tp"]}, {"match": "*"}]},
        ["model.norm.weight", "model.layers.{0-3}.input_layernorm.weight"],
    ),
    "a tensor has too few dims": (
        {"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": [None, "tp"]}]},
        ["model.norm.weight", "model.layers.0.input_layernorm.weight"],
    ),
    "a rule matches nothing": ({"mesh": {"tp": 2}, "rules": [{"match": "*.gone", "cut": ["tp"]}, *RULES]}, ["*.gone"]),
    "a rule after *": ({"mesh": {"tp": 2}, "rules": [RULES[1], RULES[0]]}, ["comes after"]),
    "layers do not divide": (
        {"mesh": {"pp": 3}, "rules": RULES[1:], "place": [{"match": "model.layers.{i}.*", "axis": "pp"}]},
        ["4 are not a multiple"],
    ),
}
FITTING: list[dict[str, Any]] = [
    {"mesh": {"tp": 2}, "rules": RULES},
    {"mesh": {"tp": 2}, "rules": [{"match": "*.gone", "cut": ["tp"], "optional": True}, *RULES]},
    {"mesh": {"pp": 2}, "rules": RULES[1:], "place": [{"match": "model.layers.{i}.*", "axis": "pp"}]},
]


@pytest.mark.parametrize("case", FAULTY)
def test_every_fault_is_shown_and_convert_refuses_it(case: str, hf: Path, tmp_path: Path) -> None:
    layout, texts = FAULTY[case]
    (tmp_path / "l.yaml").write_text(yaml.safe_dump(layout))
    result = run("layout", "check", tmp_path / "l.yaml", hf)
    assert result.exit_code == 1, result.output
    assert "does not fit" in result.stdout
    for text in texts:
        assert text in result.stdout, text
    found = json.loads(run("layout", "check", tmp_path / "l.yaml", hf, "--json").stdout)
    assert (found["ok"], len(found["faults"]) >= len(texts), found["rank_bytes"]) == (False, True, {})
    with pytest.raises(LayoutError) as refused:
        reshard.convert(hf, tmp_path / "out", layout=layout)
    assert found["faults"][0]["message"] in refused.value.message


@pytest.mark.parametrize("layout", FITTING, ids=range(len(FITTING)))
def test_a_layout_that_fits_is_converted_and_its_bytes_are_those_of_the_ranks(
    layout: dict[str, Any], hf: Path, tmp_path: Path
) -> None:
    (tmp_path / "l.yaml").write_text(yaml.safe_dump(layout))
    result = run("layout", "check", tmp_path / "l.yaml", hf, "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["ok"], found["faults"]) == (0, True, [])
    assert sum(rule["n_tensors"] for rule in found["rules"]) == found["n_tensors"] == 39
    assert sum(rule["n_bytes"] for rule in found["rules"]) == found["n_bytes"]
    with reshard.open(hf) as checkpoint:
        for rank, n_bytes in found["rank_bytes"].items():
            local = checkpoint.load(layout, rank=int(rank))
            assert sum(array.nbytes for array in local.values()) == n_bytes
        assert {str(rank): n for rank, n in forecast(checkpoint, layout).rank_bytes.items()} == found["rank_bytes"]
    reshard.convert(hf, tmp_path / "out", layout=layout)
    assert "fits" in run("layout", "check", tmp_path / "l.yaml", hf).stdout


def test_state_of_the_optimizer_follows_and_a_key_without_a_rule_hides_no_other(tmp_path: Path) -> None:
    w = np.zeros((8, 2))
    reshard.save(tmp_path / "run", 1, {"a.w": w, "b.v": w}, optimizer={"exp_avg.a.w": w, "exp_avg.b.v": w})
    layout: dict[str, Any] = {"mesh": {"tp": 2}, "rules": [{"match": "a.*", "cut": ["tp"]}]}
    with reshard.open(tmp_path / "run") as checkpoint:
        found = check_layout(checkpoint, layout)
        assert [fault.key for fault in found.faults] == ["b.v"]
        layout["rules"].append({"match": "b.v"})
        found = check_layout(checkpoint, layout)
    assert found.ok
    assert [rule.keys for rule in found.rules] == [("a.w",), ("b.v",)]
    assert found.rank_bytes == {0: 2 * (64 + 128), 1: 2 * (64 + 128)}


def test_the_number_of_faults_is_limited(tmp_path: Path) -> None:
    reshard.save_file({f"t{n}": np.zeros(3) for n in range(200)}, tmp_path / "m.safetensors")
    (tmp_path / "l.yaml").write_text('mesh: {tp: 2}\nrules: [{match: "t*", cut: [tp]}]')
    result = run("layout", "check", tmp_path / "l.yaml", tmp_path / "m.safetensors")
    assert "at least 50 faults" in result.stdout
    assert "and 30 more faults; --json lists them" in result.stdout
    (tmp_path / "l.yaml").write_text('mesh: {tp: 2}\nrules: [{match: "u*", cut: [tp]}]')
    assert ": 200 faults" in run("layout", "check", tmp_path / "l.yaml", tmp_path / "m.safetensors").stdout
    result = run("layout", "check", tmp_path / "none.yaml", tmp_path / "m.safetensors")
    assert (result.exit_code, "error:" in result.stderr) == (1, True)


# -- names


def test_names_show_what_convert_makes(hf: Path, tmp_path: Path) -> None:
    found = json.loads(run("names", "show", "llama-mindspore", hf, "--json").stdout)
    reshard.convert(hf, tmp_path / "out", names="llama-mindspore")
    with reshard.open(tmp_path / "out") as made:
        assert {key: list(made[key].shape) for key in made} == {
            key: one["shape"] for key, one in found["tensors"].items()
        }
    assert (found["unmatched"], found["left_out"], found["ok"]) == ([], [], True)
    qkv = found["tensors"]["decoder.layers.2.self_attention.linear_qkv.weight"]
    assert (qkv["change"], len(qkv["sources"])) == ("joined", 3)
    text = run("names", "show", "llama-mindspore", hf).stdout
    for part in ("model.layers.{0-3}.self_attn.q_proj.weight", "decoder.layers.{0-3}.self_attention.linear_qkv.weight",
                 "joined from 3", "27 tensors have a rule"):  # fmt: skip
        assert part in text
    back = run("names", "show", "llama-mindspore:reverse", tmp_path / "out", "--config", hf)
    assert (back.exit_code, "part of the old one" in back.stdout) == (0, True)


def test_tensors_without_a_rule_are_listed_and_refused_where_the_map_says_so(tmp_path: Path, hf: Path) -> None:
    more = {f"model.layers.{i}.extra\u202e": np.zeros(2) for i in range(3)}
    reshard.save_file({**reshard.load_file(hf / "model.safetensors"), **more}, hf / "model.safetensors")
    result = run("names", "show", "llama-mindspore", hf)
    assert result.exit_code == 1
    assert "no rule matches: 3\n  model.layers.{0-2}.extra\\u202e\n" in result.stdout
    with pytest.raises(NamesError):
        reshard.convert(hf, tmp_path / "out", names="llama-mindspore")
    found = json.loads(run("names", "show", "llama-mindspore", hf, "--json").stdout)
    assert (found["ok"], found["unmatched"]) == (False, sorted(more))
    (tmp_path / "n.yaml").write_text('rules: [{from: "lm_head.weight", to: "head"}]')
    result = run("names", "show", tmp_path / "n.yaml", hf)
    assert (result.exit_code, "no rule matches: 41" in result.stdout) == (0, True)


def test_a_map_is_printed_as_a_file(tmp_path: Path, hf: Path) -> None:
    result = run("names", "show", "llama-mindspore", "--config", hf)
    assert result.exit_code == 0
    (tmp_path / "names.yaml").write_text(result.stdout)
    expected = reshard.NameMap.preset("llama-mindspore", hf)
    assert reshard.NameMap.from_yaml(tmp_path / "names.yaml").to_mapping() == expected.to_mapping()
    assert json.loads(run("names", "show", "llama-mindspore", "--config", hf, "--json").stdout) == expected.to_mapping()
    assert json.loads(run("names", "show", "--list", "--json").stdout)["families"] == list(NAME_FAMILIES)
    lines = dict(line.split(maxsplit=1) for line in run("names", "show", "--list").stdout.splitlines()[1:])
    assert "qwen3_moe" in lines["megatron"]
    assert lines["megatron_dist"] == "llama, mistral, qwen2, qwen3"
    assert run("names", "show").exit_code == 2
    assert run("names", "show", "llama-mindspore", "--list").exit_code == 2
    result = run("names", "show", "lama-mindspore", hf)
    assert (result.exit_code, "llama-mindspore" in result.stderr) == (1, True)


def test_copies_that_the_map_leaves_out_are_named(tmp_path: Path) -> None:
    w = np.zeros((2, 2))
    reshard.save_file({"a": w, "b": w}, tmp_path / "m.safetensors")
    (tmp_path / "n.yaml").write_text("rules: [{from: a, to: c}, {from: b, tied: a}]")
    result = run("names", "show", tmp_path / "n.yaml", tmp_path / "m.safetensors")
    assert (result.exit_code, "left out, as copies of others: 1\n  b\n" in result.stdout) == (0, True), result.output


def test_a_misspelled_family_gets_the_family_as_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "l.yaml").write_text("")  # similar, too
    assert "hint: did you mean 'llama'?" in run("layout", "preset", "lama").stderr
