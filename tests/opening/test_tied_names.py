"""Tied tensors, which `reshard.torch.save_file` stores once: each of their names is a key for every reader."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

import reshard
import reshard.torch
from reshard.errors import DamagedFileError
from reshard.formats import aliases
from reshard.formats.aliases import ALIASES

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ["embed.weight", "head.weight", "norm.weight", "other.weight"]


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    w = torch.arange(24.0).reshape(6, 4)
    reshard.torch.save_file(
        {"embed.weight": w, "head.weight": w, "other.weight": w, "norm.weight": torch.ones(4)},
        tmp_path / "tied.safetensors",
    )
    with safetensors.safe_open(tmp_path / "tied.safetensors", "np") as stored:
        assert sorted(stored.keys()) == ["embed.weight", "norm.weight"]
    return tmp_path / "tied.safetensors"


def test_every_reader_of_this_package_has_all_names(tied: Path) -> None:
    expected = np.arange(24, dtype=np.float32).reshape(6, 4)
    for found in (reshard.load_file(tied), reshard.load_file(tied, "pt"), reshard.torch.load_file(tied)):
        assert sorted(found) == NAMES
        assert all(np.array_equal(np.asarray(found[name]), expected) for name in NAMES if name != "norm.weight")
    with reshard.safe_open(tied, "np") as opened:
        assert opened.keys() == NAMES
        assert sorted(opened.offset_keys()) == NAMES
        assert np.array_equal(opened.get_slice("head.weight")[1:3], expected[1:3])
    with reshard.open(tied) as checkpoint:
        assert sorted(checkpoint) == NAMES
        assert checkpoint.aliases == {"head.weight": "embed.weight", "other.weight": "embed.weight"}
        assert checkpoint["head.weight"].shape == (6, 4)
        own = checkpoint.load({"mesh": {"tp": 2}, "rules": [{"match": "*.weight", "cut": ["tp"]}]}, rank=1)
        assert np.array_equal(own["head.weight"], expected[3:])


@pytest.mark.parametrize("framework", ["np", "pt"])
def test_tied_names_are_loaded_tied(tied: Path, framework: Any) -> None:
    found = reshard.load_file(tied, framework)
    found["embed.weight"][0, 0] = 7
    assert found["head.weight"][0, 0] == 7


TP2 = {"mesh": {"tp": 2}, "rules": [{"match": "*.weight", "cut": ["tp"]}]}


@pytest.mark.parametrize(
    "options",
    [
        {"to": "huggingface"},
        {"to": "huggingface", "files": {"max_shard_size": 100}},
        {"to": "safetensors"},
        {"to": "safetensors", "layout": TP2},
        {"to": "checkpoint2", "layout": TP2},
        {"to": "checkpoint1", "layout": TP2},
        {"to": "mindspore"},
        {"select": {"rename": {"head.": "lm_head."}}},
    ],
    ids=str,
)
def test_a_conversion_keeps_all_names(tied: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    reshard.convert(tied, tmp_path / "out", **options)
    with reshard.open(tied) as a, reshard.open(tmp_path / "out") as b:
        renamed = {name: name.replace("head", "lm_head") if "select" in options else name for name in NAMES}
        assert sorted(b) == sorted(renamed.values())
        assert all(np.array_equal(a.read(name), b.read(renamed[name])) for name in NAMES)


def test_other_readers_find_all_names_after_a_conversion(tied: Path, tmp_path: Path) -> None:
    reshard.convert(tied, tmp_path / "out.safetensors")
    assert sorted(safetensors.numpy.load_file(tmp_path / "out.safetensors")) == NAMES


def test_a_folder_of_hugging_face_has_them_too(tied: Path, tmp_path: Path) -> None:
    (tmp_path / "single").mkdir()
    (tmp_path / "single" / "model.safetensors").write_bytes(tied.read_bytes())
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "model-00001-of-00001.safetensors").write_bytes(tied.read_bytes())
    weight_map = dict.fromkeys(("embed.weight", "norm.weight"), "model-00001-of-00001.safetensors")
    (tmp_path / "index" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name in ("single", "index"):
        assert sorted(reshard.load_file(tmp_path / name)) == NAMES
        assert reshard.diff(tied, tmp_path / name).differences == ()


def test_a_file_without_the_other_names_differs(tied: Path, tmp_path: Path) -> None:
    reshard.torch.save_file(
        {"embed.weight": torch.arange(24.0).reshape(6, 4), "norm.weight": torch.ones(4)}, tmp_path / "one.safetensors"
    )
    found = {one.key: one.kind for one in reshard.diff(tied, tmp_path / "one.safetensors").differences}
    assert found == {"head.weight": "only in a", "other.weight": "only in a"}


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3"])
def test_packed_dtypes_have_further_names(tmp_path: Path, dtype: str) -> None:
    data = np.arange(12, dtype=np.uint8)
    reshard._core.write_arrays(
        str(tmp_path / "a.safetensors"), [("w", dtype, (16 if dtype == "F6_E2M3" else 24,), data)],
        metadata={ALIASES: '{"v": "w"}'},
    )  # fmt: skip
    with reshard.open(tmp_path / "a.safetensors") as opened:
        assert np.array_equal(opened.read("v"), data)


HOSTILE = {
    "a cycle": '{"a": "b", "b": "a"}',
    "itself": '{"a": "a"}',
    "a chain": '{"a": "w", "b": "a"}',
    "an unknown target": '{"a": "nothing"}',
    "a name that is stored": '{"v": "w"}',
    "a stored name for itself": '{"w": "w"}',
    "twice": '{"a": "w", "a": "v"}',
    "the header's own name": '{"__metadata__": "w"}',
    "a list": '["w"]',
    "a number": '{"a": 3}',
    "no JSON": "{",
    "deep": "[" * 100_000,
    "many": json.dumps({f"a{n}": "w" for n in range(70_000)}),
    "long": json.dumps({"a" * (5 << 20): "w"}),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_names_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"w": np.ones(2), "v": np.ones(1)}, path, {ALIASES: text})
    for read in (reshard.open, reshard.load_file, reshard.torch.load_file):
        with pytest.raises(DamagedFileError, match=r"reshard\.aliases"):
            read(path)
    with pytest.raises(DamagedFileError):
        reshard.convert(path, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.safetensors"]


def test_more_names_than_a_reader_takes_are_stored_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aliases, "_MAX_ALIASES", 2)
    w = torch.ones(2)
    reshard.torch.save_file(dict.fromkeys("abcd", w), tmp_path / "x.safetensors")
    assert sorted(safetensors.torch.load_file(tmp_path / "x.safetensors")) == list("abcd")
