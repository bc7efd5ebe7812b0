"""What of a layout takes no effect: braces that a shell would expand, and rules and places that match no key."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard.errors import LayoutError
from reshard.layout import ModelLayout
from reshard.layout.file import LayoutFile
from reshard.layout.patterns import expand_braces, glob_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

LLAMA = [
    "model.embed_tokens.weight",
    "model.norm.weight",
    *(
        f"model.layers.{n}.{name}.weight"
        for n in range(4)
        for name in (
            *(f"self_attn.{part}_proj" for part in "qkvo"),
            *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
            "input_layernorm",
        )
    ),
]


def arrays(keys: list[str]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {key: rng.random(8 if "norm" in key else (8, 8), np.float32) for key in keys}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    reshard.save_file(arrays(LLAMA), tmp_path / "source.safetensors")
    return tmp_path / "source.safetensors"


# -- braces


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    "text",
    [
        "*.{q,k,v}_proj.weight", "a{b{c,d},e}f", "{a,b}{c,d}", "{0..11}", "h.{08..11}.w", "{5..1..2}", "{-1..1}",
        "{i}", "layers.{i}.{a,b}", "{", "}", "{}", "{a", "a,b}", "{a,b", "{a}", "{{a,b}", "{a,b}}", "{a,{b},c}",
        "{a,,b}x", "{..}", "{1..}", "{1..x}", "{a{1..3},b}", "a,b",
    ],
)  # fmt: skip
def test_braces_stand_for_what_a_shell_makes_of_them(text: str) -> None:
    done = subprocess.run(
        ["bash", "-fc", f"printf '%s\\n' {text}"], capture_output=True, text=True, check=True, timeout=10
    )
    assert expand_braces(text) == done.stdout.splitlines()


def test_a_regular_expression_keeps_its_braces() -> None:
    assert expand_braces("re:a{1,3}") == ["re:a{1,3}"]


@pytest.mark.parametrize(
    "text",
    [
        "{0..100000}", "{0,1,2,3,4,5,6,7,8,9}" * 5, "{0..999999999}", "{a,b}" * 700, "{0..9}" * 600,
        "{" * 20 + "a,b" + ",c}" * 20, "{1..1000}" + "y" * 4000, "{{1,2}..3}",
    ],
)  # fmt: skip
def test_braces_that_stand_for_too_much_are_refused(text: str) -> None:
    with pytest.raises(LayoutError, match=r"stands for|nested|at most 4096"):
        LayoutFile.from_mapping({"mesh": {"tp": 2}, "rules": [{"match": text}]})


@pytest.mark.parametrize("text", ["{1..1}" * 600, "{" * 2048 + "}" * 2048, "{a," * 1300, ",}" * 2000, "{,}{" * 1000])
def test_odd_braces_cost_little(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert len(expand_braces(text)) <= 1024


def test_braces_of_all_rules_together_are_bounded() -> None:
    rules = [{"match": "{0..999}"}] * 100
    with pytest.raises(LayoutError, match="more than 65536 patterns"):
        LayoutFile.from_mapping({"mesh": {"tp": 2}, "rules": rules})


@given(st.text("ab*?{},.{}01{}", min_size=1, max_size=20))
def test_what_is_read_and_printed_is_read_again_as_the_same(text: str) -> None:
    try:
        layout = LayoutFile.from_mapping({"mesh": {"tp": 2}, "rules": [{"match": text}]})
    except LayoutError:
        return
    assert LayoutFile.from_mapping(layout.to_mapping()) == layout


@given(st.text("ab{},.*?0", min_size=1, max_size=12))
def test_a_key_with_braces_has_a_pattern_of_its_own(key: str) -> None:
    layout = ModelLayout.from_mapping({"mesh": {"tp": 2}, "rules": [{"match": glob_of(key)}]})
    assert not layout.bind({key: (2,)}).unused


def test_braces_cut_what_they_say(source: Path, tmp_path: Path) -> None:
    layout = {
        "mesh": {"pp": 2, "tp": 2},
        "rules": [{"match": "*.{{q,k,v}_proj,{gate,up}_proj}.weight", "cut": ["tp"]}, {"match": "*"}],
        "place": [{"match": "model.layers.{i}.{self_attn,mlp}.*", "axis": "pp"}],
    }
    reshard.convert(source, tmp_path / "out", layout=layout)
    with reshard.open(tmp_path / "out") as opened:
        cut = {key for key in opened if len(opened[key].shards) == 2}
        own = opened.load(layout, rank=3)
    assert cut == {key for key in LLAMA if any(f"{part}_proj" in key for part in ("q", "k", "v", "gate", "up"))}
    assert {key for key in own if "self_attn" in key} == {
        key for key in LLAMA if "self_attn" in key and key[13] in "23"
    }


# -- what matches nothing

TYPO: dict[str, Any] = {
    "mesh": {"pp": 2, "tp": 2},
    "rules": [{"match": "*.qproj.weight", "cut": ["tp"]}, {"match": "*"}],
    "place": [{"match": "model.layer.{i}.*", "axis": "pp"}],
}


@pytest.mark.parametrize("to", ["checkpoint2", "checkpoint1", "safetensors"])
@pytest.mark.parametrize(
    ("left_out", "told"),
    [
        ("place", (r"rules\[0\], `\*.qproj.weight`", "q_proj")),
        ("rules", (r"place\[0\], `model.layer.{i}", "model.layers.")),
    ],
)
def test_nothing_is_written_by_a_layout_that_matches_nothing(
    source: Path, tmp_path: Path, to: Any, left_out: str, told: tuple[str, str]
) -> None:
    named, near = told
    layout = {**TYPO, left_out: [{"match": "*"}] if left_out == "rules" else []}
    with pytest.raises(LayoutError, match=rf"{named}.*matches no key.*would not be sharded") as caught:
        reshard.convert(source, tmp_path / "out", to=to, layout=layout)
    assert caught.value.hint is not None
    assert near in caught.value.hint
    assert "optional: true" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["source.safetensors"]


def test_nothing_is_saved_by_a_layout_that_matches_nothing(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"rules\[0\], `\*.qproj.weight`.*matches no key"):
        reshard.save(tmp_path / "run", 1, arrays(LLAMA[:4]), layout={**TYPO, "mesh": {"pp": 1, "tp": 1}})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("pattern", ["*", "**", "re:.*", "re:.+"])
def test_nothing_is_written_by_a_layout_with_a_rule_behind_one_that_takes_every_key(
    pattern: str, source: Path, tmp_path: Path
) -> None:
    rules = [{"match": ["a.bias", pattern]}, {"match": "*.{q,k}_proj.weight", "cut": ["tp"]}]
    layout = {"mesh": {"tp": 4}, "rules": rules}
    named = rf"rules\[1\].*comes after rules\[0\], `{re.escape(pattern)}`, which takes every key"
    with pytest.raises(LayoutError, match=named) as caught:
        reshard.convert(source, tmp_path / "out", layout=layout)
    assert caught.value.hint is not None
    assert f"put `{pattern}` last" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_a_load_warns_and_goes_on(source: Path) -> None:
    with reshard.open(source) as opened:
        bound = opened.bind(TYPO)
        assert len(bound.unused) == len(bound.warnings) == 2
        assert opened.load(TYPO, rank=0)[LLAMA[0]].shape == (8, 8)
    with pytest.raises(LayoutError, match="matches no key"):
        ModelLayout.from_mapping(TYPO).bind({"a": (2,)}, strict=True)


def test_nearest_keys_are_sought_for_the_hint_that_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search takes 45 ms for a model of 1000 tensors, and a layout can have thousands of entries for other ones."""
    sought: list[str] = []

    def nearest(text: str, candidates: Iterable[str], **_: object) -> list[str]:
        sought.append(text)
        return list(candidates)[:1]

    monkeypatch.setattr("reshard.layout.resolve.nearest", nearest)
    rules = [*({"match": f"h.{n}.w"} for n in range(20)), {"match": "*"}]
    place = [{"match": f"h.{n}.{{i}}.*", "axis": "tp"} for n in range(20)]
    bound = ModelLayout.from_mapping({"mesh": {"tp": 2}, "rules": rules, "place": place}).bind({"a.w": (2,)})
    assert len(bound.unused) == 40
    assert sought == []
    with pytest.raises(LayoutError, match=r"h\.0\.w.*, and 39 more") as caught:
        bound.refuse_unused()
    assert caught.value.hint is not None
    assert "the nearest keys are `a.w`" in caught.value.hint
    assert len(sought) == 1


def test_what_is_optional_may_match_nothing(source: Path, tmp_path: Path) -> None:
    layout = {
        "mesh": {"pp": 2, "tp": 2},
        "rules": [
            {"match": "*.bias", "cut": ["tp"], "optional": True},
            {"match": "*.q_proj.weight", "cut": ["tp"]},
            {"match": "*"},
        ],
        "place": [{"match": "lm_head.*", "axis": "pp", "at": -1, "optional": True}],
    }
    assert reshard.convert(source, tmp_path / "out", layout=layout).warnings == ()
    assert LayoutFile.from_mapping(layout).to_mapping() == layout
    with pytest.raises(LayoutError, match=r"optional.*expected true or false"):
        LayoutFile.from_mapping({"mesh": {"tp": 2}, "rules": [{"match": "*", "optional": "yes"}]})


def test_a_rule_for_state_that_follows_its_parameter_says_so(tmp_path: Path) -> None:
    reshard.save(tmp_path / "run", 1, {"w": np.ones((4, 4))}, {"adam_m.w": np.ones((4, 4))})
    layout = {"mesh": {"tp": 2}, "rules": [{"match": "adam_m.*", "cut": ["tp"]}, {"match": "*"}]}
    with pytest.raises(LayoutError, match="matches no key") as caught:
        reshard.convert(tmp_path / "run", tmp_path / "out", layout=layout)
    assert "`adam_m.w`" in str(caught.value.hint)
    assert "follow: false" in str(caught.value.hint)


@pytest.mark.parametrize(
    "layout",
    [
        ModelLayout.preset("llama", tp=2, pp=2),  # of a model without biases and lm_head
        ModelLayout.preset("qwen2_moe", tp=2),  # without experts
        ModelLayout.from_tp_plan({"layers.*.mlp.down_proj": "rowwise", "layers.*.mlp.experts": "rowwise"}, tp=2),
    ],
)
def test_presets_serve_members_that_lack_something(source: Path, tmp_path: Path, layout: ModelLayout) -> None:
    assert reshard.convert(source, tmp_path / "out", layout=layout).warnings == ()


@pytest.mark.parametrize(
    "layout",
    [
        ModelLayout.preset("llama", tp=2),
        ModelLayout.from_tp_plan({"layers.*.mlp.down_proj": "rowwise"}, tp=2),
    ],
)
def test_a_preset_of_other_names_is_refused(tmp_path: Path, layout: ModelLayout) -> None:
    reshard.save_file(arrays(["decoder.linear_qkv.weight", "decoder.fc1.weight"]), tmp_path / "a.safetensors")
    with pytest.raises(LayoutError, match="none of the rules that cut"):
        reshard.convert(tmp_path / "a.safetensors", tmp_path / "out", layout=layout)
