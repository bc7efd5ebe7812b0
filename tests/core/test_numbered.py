"""Keys that differ only in numbers, tensors that are stored alike, and those that an index leaves out."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard import _core
from reshard.cli.output import common_key, number_groups

if TYPE_CHECKING:
    from pathlib import Path

NUMBER = re.compile(r"(?:(?<=\.)|^)[0-9]{1,18}(?=\.|\Z)")
COMPONENTS = st.sampled_from(["0", "1", "01", "12", "w", "w2", "", "x", "9" * 18, "9" * 19, "\0", "²"])
KEYS = st.lists(st.lists(COMPONENTS, min_size=1, max_size=4).map(".".join), max_size=30)


@given(keys=KEYS, data=st.data())
def test_groups_are_those_of_an_expression(keys: list[str], data: st.DataObject) -> None:
    labels = data.draw(st.one_of(st.just([]), st.lists(st.integers(0, 2), min_size=len(keys), max_size=len(keys))))
    # A NUL stands for a number, and a key can hold one: the real text tells them apart.
    groups: dict[object, list[int]] = {}
    for i, key in enumerate(keys):
        parts = tuple(None if NUMBER.fullmatch(part) else part for part in key.split("."))
        groups.setdefault((parts, labels[i] if labels else 0), []).append(i)
    found = number_groups(keys, labels)
    assert [one.first for one in found.groups] == [members[0] for members in groups.values()]
    assert [one.n_keys for one in found.groups] == [len(members) for members in groups.values()]
    assert found.of_keys == [number for i in range(len(keys)) for number, one in enumerate(groups.values()) if i in one]
    for one, members in zip(found.groups, groups.values(), strict=True):
        assert one.text == common_key([keys[i] for i in members])


def test_tensors_that_are_stored_alike(tmp_path: Path) -> None:
    layout = {"mesh": {"tp": 2}, "rules": [{"match": "cut*", "cut": ["tp"]}, {"match": "*"}]}
    arrays = {"cut1": np.zeros((4, 2)), "whole": np.zeros((4, 2)), "cut2": np.ones((4, 2)), "cut3": np.zeros((2, 4))}
    arrays |= {"other": np.ones((4, 2), np.float32), "again": np.ones((4, 2))}
    reshard.save_file(arrays, tmp_path / "all.safetensors")
    reshard.convert(tmp_path / "all.safetensors", tmp_path / "cut", to="checkpoint2", layout=layout)
    with reshard.open(tmp_path / "cut") as checkpoint:
        index = checkpoint.data.index
        of_keys, firsts = index.alike()
        kinds: dict[object, list[str]] = {}
        for key, kind in zip(index.keys(), of_keys, strict=True):
            info = checkpoint[key]
            facts = info.dtype, info.shape, tuple((one.offset, one.shape, len(one.files)) for one in info.shards)
            kinds.setdefault(facts, []).append(key)
            assert index.keys().index(key) >= firsts[kind]
        assert sorted(map(sorted, kinds.values())) == sorted(
            sorted(key for key, kind in zip(index.keys(), of_keys, strict=True) if kind == number)
            for number in range(len(firsts))
        )
        assert len(firsts) == 4
        place_of = dict(zip(index.keys(), index.places(), strict=True))
        assert place_of["cut1"] == place_of["cut2"]
        for key, place in place_of.items():
            for other in (other for other, number in place_of.items() if number == place):
                assert checkpoint[key].shape == checkpoint[other].shape
                assert index.shards(key) == index.shards(other)


def test_places_differ_by_shape_file_cut_and_ranks_of_files(tmp_path: Path) -> None:
    index = _core.Index()
    files = [index.add_file(str(tmp_path / name)) for name in "abcd"]
    layout = {
        "mesh": {"dp": 2, "tp": 2},
        "rules": [{"match": "columns", "cut": [None, "tp"]}, {"match": "*", "cut": ["tp"]}],
    }
    shapes = {"rows": (4, 4), "columns": (4, 4), "wide": (4, 8)}
    rows, columns, wide = reshard.ModelLayout.from_mapping(layout).bind(shapes).layouts.values()
    index.add_layout("rows", "F32", rows, files)
    index.add_layout("more rows", "BF16", rows, list(files))
    index.add_layout("columns", "F32", columns, files)
    index.add_layout("turned", "F32", rows, files[::-1])
    index.add_layout("wide", "F32", wide, files)
    for key in ("range", "other range"):
        index.add_flat(key, "F32", (4,), _core.FlatLines.joined([(files[0], key, 4)]), 0)
    place_of = dict(zip(index.keys(), index.places(), strict=True))
    assert place_of["rows"] == place_of["more rows"]
    assert len(set(place_of.values())) == len(place_of) - 1


def test_what_an_index_leaves_out(tmp_path: Path) -> None:
    for name, keys in (("a", "uvw"), ("b", "wx")):
        reshard.save_file({key: np.zeros(2) for key in keys}, tmp_path / f"{name}.safetensors")
    index = _core.Index()
    a, b = (index.add_file(str(tmp_path / f"{name}.safetensors")) for name in "ab")
    index.add_wholes([("u", a), ("w", a)])
    assert index.not_taken(a) == ["v"]
    assert index.not_taken(b) == ["w", "x"]
    index.add_wholes([("x", b), ("v", a)])
    assert index.not_taken(a) == []
    assert index.not_taken(b) == ["w"]
