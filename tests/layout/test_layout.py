"""The layout file: what is accepted, what is refused and how, and that it prints as it was meant."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard.errors import ArgumentError, CheckpointNotFoundError, LayoutError, ReshardError, StorageError
from reshard.layout import Block, LayoutRule, ModelLayout, OptimizerRule, Partition, PlaceRule, as_layout
from reshard.layout.patterns import IndexedPattern, Matcher, Pattern, glob_of, natural_order
from reshard.values.words import show

if TYPE_CHECKING:
    from pathlib import Path

# The example of the documentation, every field of it.
EXAMPLE = """
mesh: {pp: 2, dp: 2, tp: 4}            # axis: size
ranks: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 14]
rules:
  - match: "*.down_proj.weight"
    cut: [null, tp]
  - match: "*.qkv_proj.weight"
    cut: [tp]
    blocks: {0: [4096, {size: 1024, cut: null}, 1024]}
  - match: "lm_head.weight"
    cut: [[dp, tp]]
    uneven: ceil
  - match: "embed.weight"
    cut: [tp]
    sizes: {0: [9000, 7000, 8000, 8000]}
  - match: "*.norm.weight"
    flat: [dp]
  - match: ["*.bias"]
    flat: {axes: [dp], join: biases, align: 2}
  - match: "*.c_attn.weight"
    stored: [1, 0]
  - match: "*"
optimizer: {add: {0: [dp]}}
place:
  - {match: "model.layers.{i}.*", axis: pp, sizes: [8, 7]}
  - {match: "model.embed_tokens.*", axis: pp, at: 0}
  - {match: ["model.norm.*", "lm_head.*"], axis: pp, at: -1}
  - {match: "*.experts.{i}.*", axis: [dp, tp]}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "layout.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def mapping(**fields: Any) -> dict[str, Any]:
    """A layout over pp 2, dp 2, tp 4 with one rule or other fields."""
    return {"mesh": {"pp": 2, "dp": 2, "tp": 4}, "rules": [{"match": "*"}], **fields}


def rule(**fields: Any) -> dict[str, Any]:
    return mapping(rules=[{"match": "*", **fields}])


# -- what is read


def test_the_example_is_read_field_by_field(tmp_path: Path) -> None:
    layout = ModelLayout.from_yaml(write(tmp_path, EXAMPLE))
    assert list(layout.mesh.items()) == [("pp", 2), ("dp", 2), ("tp", 4)]
    assert layout.ranks == (*range(14), 15, 14)
    assert layout.rules == (
        LayoutRule(("*.down_proj.weight",), Partition(cut=((), ("tp",)))),
        LayoutRule(
            ("*.qkv_proj.weight",),
            Partition(cut=(("tp",),), blocks=((0, (Block(4096), Block(1024, is_cut=False), Block(1024))),)),
        ),
        LayoutRule(("lm_head.weight",), Partition(cut=(("dp", "tp"),), uneven="ceil")),
        LayoutRule(("embed.weight",), Partition(cut=(("tp",),), sizes=((0, (9000, 7000, 8000, 8000)),))),
        LayoutRule(("*.norm.weight",), Partition(flat=("dp",))),
        LayoutRule(("*.bias",), Partition(flat=("dp",)), join="biases", align=2),
        LayoutRule(("*.c_attn.weight",), Partition(stored=(1, 0))),
        LayoutRule(("*",)),
    )
    assert layout.optimizer == OptimizerRule(add={0: ("dp",)})
    assert layout.place == (
        PlaceRule(("model.layers.{i}.*",), ("pp",), sizes=(8, 7)),
        PlaceRule(("model.embed_tokens.*",), ("pp",), at=0),
        PlaceRule(("model.norm.*", "lm_head.*"), ("pp",), at=1),
        PlaceRule(("*.experts.{i}.*",), ("dp", "tp")),
    )


def test_the_example_is_printed_as_it_was_written(tmp_path: Path) -> None:
    text = str(ModelLayout.from_yaml(write(tmp_path, EXAMPLE)))
    written = [line.split("  #")[0].rstrip() for line in EXAMPLE.strip().splitlines()]
    assert text.splitlines() == [line.replace('["*.bias"]', '"*.bias"') for line in written]


def test_json_is_yaml_and_its_dims_are_text(tmp_path: Path) -> None:
    text = '{"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"], "sizes": {"0": [3, 4]}}]}'
    assert ModelLayout.from_yaml(write(tmp_path, text)).rules[0].partition.sizes == ((0, (3, 4)),)


@pytest.mark.parametrize("is_ascii", [False, True])
def test_json_has_any_character(tmp_path: Path, *, is_ascii: bool) -> None:
    """Most writers of JSON escape a character above U+FFFF as two."""
    for match in ("\U0001f600.*", "a\\\U0001f600", "re:\\\\\U0001f600", '/\u00e9\t"', "\U0001f600\U0010ffff"):
        value = {"mesh": {"\U0001f600": 2}, "rules": [{"match": match}]}
        path = write(tmp_path, json.dumps(value, ensure_ascii=is_ascii))
        assert ModelLayout.from_yaml(path).to_mapping() == value
    for half in ("\\ud83d", "\\ude00\\ud83d", "\\ud83d\\\\ude00"):
        with pytest.raises(LayoutError, match="escape"):
            ModelLayout.from_yaml(write(tmp_path, '{"mesh": {"tp": 2}, "rules": [{"match": "' + half + '"}]}'))


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ({"cut": [["tp"], None, []]}, {"cut": ["tp"]}),
        ({"cut": [None, None]}, {}),
        ({"match": ["*"]}, {"match": "*"}),
        ({"flat": {"axes": ["dp"]}}, {"flat": ["dp"]}),
        ({"flat": {"axes": ["dp"], "join": "j", "align": 1}}, {"flat": {"axes": ["dp"], "join": "j"}}),
        ({"uneven": "refuse"}, {}),
        ({"cut": ("tp",), "sizes": {0: np.array([1, 2, 3, 4]).tolist()}}, {"cut": ["tp"], "sizes": {0: [1, 2, 3, 4]}}),
        ({"cut": ["tp"], "sizes": {0: [np.int64(1), 2, 3, 4]}}, {"cut": ["tp"], "sizes": {0: [1, 2, 3, 4]}}),
        ({"blocks": {0: [{"size": 3}]}}, {"blocks": {0: [3]}}),
        ({"cut": ["tp"], "blocks": {0: 2}}, {"cut": ["tp"], "blocks": {0: 2}}),
    ],
)
def test_spellings_that_mean_the_same(value: dict[str, Any], meant: dict[str, Any]) -> None:
    assert ModelLayout.from_mapping(rule(**value)).to_mapping()["rules"] == [{"match": "*", **meant}]


@pytest.mark.parametrize(("at", "coordinate"), [(0, 0), (7, 7), (-1, 7), (-8, 0)])
def test_at_counts_from_either_end_of_the_folded_axes(at: int, coordinate: int) -> None:
    layout = ModelLayout.from_mapping(mapping(place=[{"match": "*", "axis": ["dp", "tp"], "at": at}]))
    assert layout.place[0].at == coordinate


# -- what is refused

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rules": []}, "layout: `mesh` is missing"),
    ({"mesh": {"tp": 2}}, "layout: `rules` is missing"),
    (mapping(rule=[]), "rule: unknown field `rule`; accepted are `mesh`, `rules`, `ranks`, `optimizer` and `place`"),
    (mapping(mesh={}), "mesh: expected axes and their sizes"),
    (mapping(mesh=["tp"]), "mesh: expected axes and their sizes, as in {dp: 2, tp: 4}, found a list"),
    (mapping(mesh={"tp": 0}), "mesh.tp: expected an integer of at least 1, found `0`"),
    (mapping(mesh={"tp": True}), "mesh.tp: expected an integer of at least 1, found true"),
    (mapping(mesh={"tp": 2.0}), "mesh.tp: expected an integer of at least 1, found `2.0`"),
    (mapping(mesh={"": 2}), "expected a name"),
    (mapping(mesh={3: 2}), "expected a name"),
    (mapping(mesh={"a": 1 << 20, "b": 1 << 20}), "has 1099511627776 ranks, more than 1048576"),
    (mapping(ranks=[0, 1]), "ranks: expected one rank for each of the 16 points of the mesh, found 2"),
    (mapping(ranks=[*range(15), 3]), "ranks: rank 3 stands here twice"),
    (mapping(ranks=[*range(15), -1]), "ranks[15]: expected an integer of at least 0, found `-1`"),
    (mapping(ranks="0-15"), "ranks: expected a list, found `0-15`"),
    (mapping(rules={"match": "*"}), "rules: expected a list, found a mapping"),
    (mapping(rules=["*"]), "rules[0]: expected a mapping with `match`, `cut`,"),
    (mapping(rules=[{"cut": ["tp"]}]), "rules[0]: `match` is missing"),
    (rule(cuts=["tp"]), "rules[0].cuts: unknown field `cuts`"),
    (rule(match=[]), "rules[0].match: expected at least one pattern"),
    (rule(match=""), "rules[0].match: a pattern cannot be empty"),
    (rule(match=["a", 3]), "rules[0].match[1]: expected a pattern, found `3`"),
    (rule(match="re:a(b"), "rules[0].match: `re:a(b` does not compile: unclosed group"),
    (rule(match="re:" + "(" * 3000 + ")" * 1000), "does not compile"),
    (rule(match="a" * 5000), "a pattern has at most 4096 characters, this one 5000"),
    (rule(cut="tp"), "rules[0].cut: expected a list, found `tp`"),
    (rule(cut=None), "rules[0].cut: expected a list, found null"),
    (rule(cut=[0]), "rules[0].cut[0]: expected null, an axis or a list of axes, found `0`"),
    (rule(cut=[None, "tq"]), "rules[0].cut[1]: unknown axis `tq`; the axes are pp, dp, tp"),
    (rule(cut=[["dp", None]]), "rules[0].cut[0][1]: expected the name of an axis, found null"),
    (rule(cut=["tp", "tp"]), "rules[0]: axis `tp` is used twice in one tensor"),
    (rule(cut=[["tp", "tp"]]), "rules[0]: axis `tp` is used twice in one tensor"),
    (rule(cut=["tp"], flat=["tp"]), "rules[0]: axis `tp` is used twice in one tensor"),
    (rule(uneven="floor"), "rules[0].uneven: expected `refuse` or `ceil`, found `floor`"),
    (rule(uneven=True), "rules[0].uneven: expected `refuse` or `ceil`, found true"),
    (rule(cut=["tp"], sizes={0: [1, 2]}), "rules[0].sizes[0]: 2 sizes for dim 0, but tp (4) cut it into 4"),
    (rule(sizes={0: [1, 2]}), "rules[0].sizes[0]: 2 sizes for dim 0, but `cut` does not cut it"),
    (rule(cut=["tp"], sizes={0: [1, 2, 3, -4]}), "rules[0].sizes[0][3]: expected an integer of at least 0"),
    (rule(cut=["tp"], sizes={-1: [1, 2, 3, 4]}), "rules[0].sizes: expected a dim, counted from 0, found `-1`"),
    (rule(cut=["tp"], sizes={"0": [1] * 4, 0: [1] * 4}), "rules[0].sizes: dim 0 is repeated"),
    (rule(cut=["tp"], sizes=[1, 2, 3, 4]), "rules[0].sizes: expected dims and their values"),
    (rule(cut=["tp"], sizes={0: [1] * 4}, blocks={0: [4]}), "rules[0]: `sizes` and `blocks` cannot stand together"),
    (rule(blocks={0: []}), "rules[0].blocks[0]: expected at least one block"),
    (rule(blocks={0: 0}), "rules[0].blocks[0]: expected an integer of at least 1"),
    (rule(blocks={0: [{"cut": None}]}), "rules[0].blocks[0][0]: `size` is missing"),
    (rule(blocks={0: [{"size": 3, "cut": "tp"}]}), "rules[0].blocks[0][0].cut: can only be null"),
    (rule(flat="dp"), "rules[0].flat: expected a list, found `dp`"),
    (rule(flat=[]), "rules[0].flat: expected at least one axis"),
    (rule(flat={"join": "j"}), "rules[0].flat: `axes` is missing"),
    (rule(flat={"axes": ["dp"], "align": 2}), "rules[0].flat.align: has a meaning only with `join`"),
    (rule(flat={"axes": ["dp"], "join": "j", "align": 0}), "rules[0].flat.align: expected an integer of at least 1"),
    (rule(flat={"axes": ["dp"], "join": ""}), "rules[0].flat.join: expected a name"),
    (rule(flat={"axes": ["dp"], "join": "a\nb"}), "rules[0].flat.join: expected a name"),
    (
        mapping(rules=[{"match": m, "flat": {"axes": ["dp"], "join": "j"}} for m in "ab"]),
        "rules[1].flat: join `j` is the name of an earlier rule's join too",
    ),
    (rule(stored=[0, 0]), "rules[0].stored: expected each dim once, as in [1, 0], found a list"),
    (rule(stored=[1, 2]), "rules[0].stored: expected each dim once"),
    (rule(stored=[]), "rules[0].stored: expected each dim once"),
    (rule(stored=[1, 0], cut=[None, None, "tp"]), "rules[0].stored: names 2 dims, but `cut` 3"),
    (mapping(optimizer={}), "optimizer: expected one of `add`, `flat` and `follow`, found none"),
    (mapping(optimizer={"add": {0: ["dp"]}, "flat": ["dp"]}), "optimizer: expected one of"),
    (mapping(optimizer={"adds": {}}), "optimizer.adds: unknown field `adds`"),
    (mapping(optimizer={"add": {}}), "optimizer.add: expected dims and their axes"),
    (mapping(optimizer={"add": {0: "dp"}}), "optimizer.add[0]: expected a list, found `dp`"),
    (mapping(optimizer={"add": {0: ["dp"], 1: ["dp"]}}), "optimizer.add: axis `dp` is used twice in one tensor"),
    (mapping(optimizer={"flat": ["xp"]}), "optimizer.flat[0]: unknown axis `xp`"),
    (mapping(optimizer={"follow": 1}), "optimizer.follow: expected true or false, found `1`"),
    (mapping(place=[{"match": "a.{i}.*"}]), "place[0]: `axis` is missing"),
    (mapping(place=[{"match": "a.*", "axis": "pp"}]), "place[0].match: `a.*` must hold `{i}`"),
    (mapping(place=[{"match": "a.{i}.{i}", "axis": "pp"}]), "place[0].match: `a.{i}.{i}` must hold `{i}` exactly once"),
    (mapping(place=[{"match": "a.{i}", "axis": "pp", "at": 0}]), "place[0].match: `a.{i}` holds `{i}`, and `at` gives"),
    (mapping(place=[{"match": "a", "axis": [], "at": 0}]), "place[0].axis: expected at least one axis"),
    (mapping(place=[{"match": "a", "axis": ["pp", "pp"], "at": 0}]), "place[0].axis: axis `pp` is used twice here"),
    (mapping(place=[{"match": "a", "axis": "pp", "at": 2}]), "place[0].at: 2 is outside pp (2): expected -2 to 1"),
    (mapping(place=[{"match": "a", "axis": "pp", "at": -3}]), "place[0].at: expected an integer of at least -2"),
    (mapping(place=[{"match": "a", "axis": "pp", "at": "last"}]), "place[0].at: expected an integer"),
    (mapping(place=[{"match": "a.{i}", "axis": "pp", "sizes": [1]}]), "expected 2 sizes for pp (2), found 1"),
    (mapping(place=[{"match": "a.{i}", "axis": "pp", "to": [0, 2]}]), "place[0].to[1]: 2 is outside pp (2)"),
    (mapping(place=[{"match": "a.{i}", "axis": "pp", "to": [0, -1]}]), "place[0].to[1]: expected an integer"),
    (
        mapping(place=[{"match": "a.{i}", "axis": "pp", "to": [0, 1], "sizes": [1, 1]}]),
        "place[0]: sizes and to cannot stand together",
    ),
]


@pytest.mark.parametrize(("value", "message"), REFUSED)
def test_refused(value: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        ModelLayout.from_mapping(value)
    assert message in caught.value.message


@pytest.mark.parametrize("value", [[], "tp", 3, None])
def test_a_layout_is_a_mapping(value: Any) -> None:
    with pytest.raises(LayoutError, match="expected a mapping with `mesh`, `rules`"):
        ModelLayout.from_mapping(value)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (mapping(rulse=[]), "did you mean `rules`?"),
        (rule(cuts=["tp"]), "did you mean `cut`?"),
        (rule(cut=["tpp"]), "did you mean `tp`?"),
    ],
)
def test_a_misspelling_gets_a_hint(value: dict[str, Any], hint: str) -> None:
    with pytest.raises(LayoutError) as caught:
        ModelLayout.from_mapping(value)
    assert caught.value.hint == hint


def test_an_error_names_file_line_and_field(tmp_path: Path) -> None:
    path = write(
        tmp_path, 'mesh: {tp: 2}\nrules:\n  - match: "a"\n    cut: [tp]\n  - match: "b"\n    cut: [null, tq]\n'
    )
    with pytest.raises(LayoutError) as caught:
        ModelLayout.from_yaml(path)
    assert caught.value.message == f"{path}, line 6: rules[1].cut[1]: unknown axis `tq`; the axes are tp"
    assert caught.value.path == str(path)


# -- hostile YAML

BOMB = "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)

HOSTILE: dict[str, tuple[str | bytes, str]] = {
    "nothing": ("", "line 1: is empty"),
    "only a comment": ("# layout\n", "line 1: is empty"),
    "not UTF-8": (b"mesh:\n \xff", "line 2: is not UTF-8"),
    "duplicate key": ("mesh: {tp: 2}\nrules: []\nmesh: {tp: 4}\n", "line 3: key `mesh` is repeated"),
    "duplicate axis": ("mesh: {tp: 2, tp: 4}\nrules: []\n", "line 1: mesh: key `tp` is repeated"),
    "tag": ("mesh: !!python/object:os.system {}\n", "line 1: mesh: tags are not accepted"),
    "harmless tag": ("mesh: {tp: !!int 2}\n", "line 1: mesh.tp: tags are not accepted"),
    "non-specific tag": ("mesh: {tp: ! 2}\n", "line 1: mesh.tp: tags are not accepted"),
    "tag of a key": ("!!str mesh: {tp: 2}\n", "line 1: tags are not accepted"),
    "anchor of a key": ("&a mesh: {tp: 2}\n", "line 1: a key cannot have an anchor"),
    "merge key": ("a: &a {tp: 2}\nmesh:\n  <<: *a\n", "line 3: mesh: merge keys (`<<`) are not accepted"),
    "list as a key": ("? [1]\n: 2\n", "line 1: a key must be text or an integer"),
    "null as a key": ("mesh: {~: 2}\n", "line 1: mesh: a key must be text or an integer, found `~`"),
    "alias of nothing": ("mesh: *a\n", "line 1: mesh: alias `*a` has no anchor before it"),
    "alias of itself": ("mesh: &a [*a]\n", "line 1: mesh[0]: alias `*a` has no anchor before it"),
    "bomb": (BOMB, "more than 1000000 values, including those of aliases"),
    "deep": ("mesh: " + "[" * 100_000, "is nested more than 16 deep"),
    "deep mappings": ("mesh:\n" + "".join(" " * n + "a:\n" for n in range(1, 3000)), "is nested more than 16 deep"),
    "two documents": ("mesh: 1\n---\nmesh: 2\n", "line 2: holds more than one document"),
    "unquoted star": ("rules:\n  - match: *.weight\n", "line 2: not YAML while scanning an alias"),
    "tab": ("mesh:\n\ttp: 2\n", "line 2: not YAML"),
    "control character": ('mesh: "\x01"\n', "not YAML"),
    "long integer": (
        "mesh: {tp: 100000000000000000000}\nrules: []\n",
        "mesh.tp: expected an integer of at least 1, found `1000",
    ),
    "octal": ("mesh: {tp: 010}\nrules: []\n", "line 1: mesh.tp: expected an integer of at least 1, found `010`"),
    "sexagesimal": ("mesh: {tp: 1:30}\nrules: []\n", "expected an integer of at least 1, found `1:30`"),
    "float": ("mesh: {tp: 2.0}\nrules: []\n", "expected an integer of at least 1, found `2.0`"),
    "a list": ("- mesh\n", "line 1: expected a mapping with `mesh`, `rules`"),
    "escape sequence": ('"\\e[2J": 1\nmesh: 1\nrules: 1\n', r"unknown field `\x1b[2J`"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_yaml(case: str, tmp_path: Path) -> None:
    text, message = HOSTILE[case]
    path = tmp_path / "layout.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(LayoutError) as caught:
        ModelLayout.from_yaml(path)
    assert message in caught.value.message
    assert caught.value.message.startswith(str(path))
    assert caught.value.path == str(path)


def test_pure_python_yaml_reads_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reshard.documents.strict_yaml._LOADER", yaml.SafeLoader)
    assert str(ModelLayout.from_yaml(write(tmp_path, EXAMPLE))).startswith("mesh: {pp: 2, dp: 2, tp: 4}\n")
    for case, (text, message) in HOSTILE.items():
        path = tmp_path / f"{case}.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(LayoutError) as caught:
            ModelLayout.from_yaml(path)
        assert message in caught.value.message, case


def test_an_unquoted_star_gets_a_hint(tmp_path: Path) -> None:
    with pytest.raises(LayoutError) as caught:
        ModelLayout.from_yaml(write(tmp_path, HOSTILE["unquoted star"][0]))  # type: ignore[arg-type]
    assert caught.value.hint == 'quote a pattern that starts with `*`: "*.weight"'


def test_yes_and_no_are_names(tmp_path: Path) -> None:
    text = 'mesh: {no: 2, on: 2, y: 1}\nrules: [{match: "*", cut: [no, on]}]\n'
    layout = ModelLayout.from_yaml(write(tmp_path, text))
    assert layout.rules[0].partition.cut == (("no",), ("on",))
    assert yaml.safe_load(str(layout)) == {
        "mesh": {"no": 2, "on": 2, "y": 1},
        "rules": [{"match": "*", "cut": ["no", "on"]}],
    }


def test_an_alias_stands_for_its_value(tmp_path: Path) -> None:
    text = 'mesh: {tp: 2}\nrules: [{match: "a", cut: &c [tp]}, {match: "b", cut: *c}]\n'
    assert ModelLayout.from_yaml(write(tmp_path, text)).rules[1].partition.cut == (("tp",),)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="there is no layout file"):
        ModelLayout.from_yaml(tmp_path / "none.yaml")
    with pytest.raises(StorageError, match="directory"):
        ModelLayout.from_yaml(tmp_path)


def test_a_pipe_without_a_writer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reshard.storage.inputs._WRITER_SECONDS", 0.05, raising=False)
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(StorageError, match=r"pipe\.yaml`: a pipe that no process has opened for writing in 0\.05 s"):
        as_layout(tmp_path / "pipe.yaml")


@pytest.mark.parametrize("wait", ["to open", "to write"])
def test_a_pipe_is_read_to_its_end(wait: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, reads = tmp_path / "pipe.yaml", threading.Event()
    os.mkfifo(pipe)
    writer_end: Path | int = pipe
    if wait == "to write":
        writer_end = os.open(pipe, os.O_RDWR)  # opened before the reader does, which this does not wait for
        monkeypatch.setattr("reshard.storage.inputs._WRITER_SECONDS", 0.05)
        set_blocking = os.set_blocking

        def read(*args: Any) -> None:
            set_blocking(*args)
            reads.set()

        monkeypatch.setattr(os, "set_blocking", read)

    def write() -> None:
        if wait == "to open":
            time.sleep(0.05)
        with open(writer_end, "w") as file:  # noqa: PTH123  it may be a descriptor
            assert wait == "to open" or reads.wait(60)
            for part in ("mesh: {tp: 2}\n", "rules: []\n" + "#" * 100_000):
                file.write(part)
                file.flush()
                time.sleep(0.02)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert as_layout(pipe).mesh == {"tp": 2}
    finally:
        writer.join()


def test_output_of_a_program_is_a_layout() -> None:
    with subprocess.Popen(["/bin/sh", "-c", "echo '{mesh: {tp: 2}, rules: []}'"], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert as_layout(f"/dev/fd/{program.stdout.fileno()}").mesh == {"tp": 2}
    with subprocess.Popen(["/bin/true"], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        program.wait()
        with pytest.raises(LayoutError, match="is empty"):
            as_layout(f"/dev/fd/{program.stdout.fileno()}")


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "layout.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(LayoutError, match="larger than 16 MiB"):
        ModelLayout.from_yaml(path)


# -- printing

_axis_names = st.sampled_from(["tp", "dp", "null", "yes", "1", "a b", 'q"', "ü", "x:y", "-", "#"])
_patterns = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).map(
    lambda t: t.replace("re:", "")
)


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    """Mappings that are layouts, with every field somewhere and names that YAML would misread."""
    axes = draw(st.lists(_axis_names, min_size=1, max_size=3, unique=True))
    mesh = {axis: draw(st.integers(1, 3)) for axis in axes}
    patterns = st.lists(_patterns.filter(bool), min_size=1, max_size=3)
    rules: list[dict[str, Any]] = []
    for n in range(draw(st.integers(0, 3))):
        free = draw(st.permutations(axes))
        used = draw(st.integers(0, len(free)))
        fields: dict[str, Any] = {"match": draw(patterns)}
        if used:
            fields["cut"] = draw(st.sampled_from([[list(free[:used])], [None, list(free[:used])]]))
        if used < len(free):
            flat = list(free[used:])
            fields["flat"] = draw(st.sampled_from([flat, {"axes": flat, "join": f"j{n}", "align": 2}]))
        if draw(st.booleans()):
            fields["uneven"] = "ceil"
        blocks = st.one_of(st.integers(1, 4), st.just([3, {"size": 2, "cut": None}]))
        fields.update(
            draw(st.sampled_from([{}, {"stored": [1, 0]}])),
            **draw(st.fixed_dictionaries({}, optional={"blocks": st.fixed_dictionaries({1: blocks})})),
        )
        rules.append(fields)
    layout: dict[str, Any] = {"mesh": mesh, "rules": rules}
    if draw(st.booleans()):
        layout["ranks"] = draw(st.permutations(range(int(np.prod(list(mesh.values()))))))
    axis = axes[0]
    size = mesh[axis]
    layout["place"] = draw(
        st.lists(
            st.sampled_from(
                [
                    {"match": "a.{i}", "axis": axis},
                    {"match": ["a.{i}", "re:b{i}"], "axis": list(axes)},
                    {"match": "a.{i}", "axis": axis, "sizes": [2] * size},
                    {"match": "a.{i}", "axis": axis, "to": [size - 1, 0]},
                    {"match": "a", "axis": axis, "at": -1},
                    {"match": "a", "axis": axis, "at": 0},
                ]
            ),
            max_size=2,
        )
    )
    optimizers = [{"add": {0: [axis]}}, {"flat": list(axes)}, {"follow": False}, {"follow": True}]
    return {**layout, **draw(st.sampled_from([{}, *({"optimizer": value} for value in optimizers)]))}


@pytest.mark.slow(disk=False)
@given(layouts())
def test_printed_and_read_again_it_is_the_same(tmp_path_factory: pytest.TempPathFactory, value: dict[str, Any]) -> None:
    layout = ModelLayout.from_mapping(value)
    assert ModelLayout.from_mapping(layout.to_mapping()) == layout
    path = write(tmp_path_factory.mktemp("layout", numbered=True), str(layout))
    assert ModelLayout.from_yaml(path) == layout
    assert yaml.safe_load(str(layout)) == layout.to_mapping()  # PyYAML's own reader has the same opinion


def test_the_order_of_the_axes_is_part_of_a_layout() -> None:
    a = ModelLayout.from_mapping({"mesh": {"dp": 2, "tp": 2}, "rules": []})
    b = ModelLayout.from_mapping({"mesh": {"tp": 2, "dp": 2}, "rules": []})
    assert a != b
    assert a == ModelLayout.from_mapping(a.to_mapping())
    assert a != "layout"
    assert len({a, b, ModelLayout.from_mapping(a.to_mapping())}) == 2


# -- where it comes from


def test_as_layout_takes_a_layout_a_path_and_a_mapping(tmp_path: Path) -> None:
    value = {"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}]}
    layout = as_layout(value)
    path = write(tmp_path, str(layout))
    assert as_layout(layout) is layout
    assert as_layout(path) == as_layout(str(path)) == layout
    with pytest.raises(ArgumentError, match="found a int"):
        as_layout(3)  # type: ignore[arg-type]


def test_replicated_is_one_rank() -> None:
    layout = ModelLayout.replicated()
    assert list(layout.mesh.values()) == [1]
    assert layout.rules == (LayoutRule(("*",)),)


# -- patterns

MATCHES = [
    ("*.weight", "a.b.weight", True),
    ("*.weight", "weight", False),
    ("*weight", "weight", True),
    ("a.*.w", "a.b.c.w", True),
    ("a.*.w", "a.w", False),
    ("a.?.w", "a...w", True),
    ("a.?.w", "a.bb.w", False),
    ("a[0].w", "a[0].w", True),
    ("a[0].w", "a0.w", False),
    ("a{i}", "a{i}", True),
    ("A", "a", False),
    ("a", "a\n", False),
    ("*", "a\nb", True),
    ("*a*b*", "xxaxxbxx", True),
    ("*a*b*", "xxbxxaxx", False),
    ("a*a", "a", False),
    ("a*a", "aa", True),
    ("*aab", "aaaab", True),
    ("**", "", True),
    ("re:layers\\.[0-9]+\\.w", "layers.12.w", True),
    ("re:layers\\.[0-9]+", "layers.12.w", False),
    ("re:b|c", "abc", False),
]


@pytest.mark.parametrize(("pattern", "key", "matches"), MATCHES)
def test_a_pattern_matches_the_whole_key(pattern: str, key: str, *, matches: bool) -> None:
    assert Pattern.compile(pattern).matches(key) is matches
    assert (Matcher([[pattern]]).find(key) is not None) is matches


def test_many_stars_take_no_time() -> None:
    assert not Pattern.compile("*a" * 200 + "b").matches("a" * 1000)


# Python's `re` takes years for each of these.
@pytest.mark.parametrize("pattern", ["(a*)*b", "(a|aa)+b", "(a|a?)+b", "((a+)+)+b", "(.*,){20}b"])
def test_an_expression_is_searched_in_linear_time(pattern: str) -> None:
    started = time.process_time()
    assert not Pattern.compile(f"re:{pattern}").matches("a" * 1000)
    assert IndexedPattern.compile(f"re:{pattern}{{i}}").indices("a" * 1000) == set()
    layout = ModelLayout.from_mapping({"mesh": {"tp": 1}, "rules": [{"match": f"re:{pattern}"}, {"match": "*"}]})
    layout.bind({"a" * 1000: (1,)})
    assert time.process_time() - started < 1


@pytest.mark.parametrize("pattern", ["(?=a)b", "(?!a)b", "(?<=a)b", "(?<!a)b", r"(a)\1", "(?P<n>a)(?P=n)"])
def test_an_expression_that_needs_backtracking_is_refused_with_a_hint(pattern: str) -> None:
    with pytest.raises(LayoutError, match=r"not supported|unrecognized flag") as caught:
        ModelLayout.from_mapping({"mesh": {"tp": 1}, "rules": [{"match": f"re:{pattern}"}]})
    assert caught.value.hint is not None
    assert "look-around" in caught.value.hint


@pytest.mark.parametrize("pattern", [r"re:\w{1000}", "re:((a{100}){100}){100}", "re:" + "(" * 100 + ")" * 100])
def test_an_expression_that_is_too_large_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"too large|nest"):
        Pattern.compile(pattern)


def test_many_expressions_are_refused() -> None:
    rules = [{"match": f"re:a{{{n}}}"} for n in range(1, 2002)]
    with pytest.raises(LayoutError, match="2001 regular expressions, more than 2000"):
        ModelLayout.from_mapping({"mesh": {"tp": 1}, "rules": rules})
    escaped = [{"match": glob_of(f"a*{n}")} for n in range(10_000)]
    assert len(ModelLayout.from_mapping({"mesh": {"tp": 1}, "rules": escaped}).rules) == 10_000


@pytest.mark.slow
def test_100_000_globs_over_a_model_take_seconds() -> None:
    tensors = {f"model.layers.{i}.experts.{j}.{w}": (8, 8) for i in range(60) for j in range(64) for w in ("w1", "w2")}
    globs = [f"*.layers.{n // 1000}.*.{n % 1000}.w?" for n in range(100_000)]
    rules = [{"match": glob, "cut": ["tp"]} for glob in globs]
    started = time.process_time()
    layout = ModelLayout.from_mapping({"mesh": {"tp": 2}, "rules": [*rules, {"match": "*"}]})
    bound = layout.bind(tensors)
    assert time.process_time() - started < 8  # 4 s on a slow core; one by one they take minutes
    assert {one.partition.cut for one in bound.tensor_layouts.values()} == {(("tp",),)}
    assert len(bound.warnings) == 101


@given(
    st.lists(st.text("ab*?1", min_size=1, max_size=8), min_size=2, max_size=20),
    st.text("ab1", max_size=12),
)
def test_many_globs_match_as_each_by_itself(globs: list[str], key: str) -> None:
    alone = []
    for n, glob in enumerate(globs):
        expression = "".join({"*": ".*", "?": "."}.get(c, re.escape(c)) for c in glob)
        alone += [n] if re.fullmatch(expression, key) else []
    matcher = Matcher([[glob] for glob in globs])
    assert matcher.find_all(key) == alone
    assert matcher.find(key) == ((alone[0], 0) if alone else None)
    assert matcher.unused([key]) == [n for n in range(len(globs)) if n not in alone]


BLOCKS_AND_RANKS: list[tuple[dict[str, Any], str]] = [
    (
        {"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"], "blocks": {0: 4_000_000}}]},
        "4000000 blocks, more than",
    ),
    ({"mesh": {"tp": 16_000_000}, "rules": [{"match": "*"}]}, "has 16000000 ranks, more than"),
    ({"mesh": {f"a{n}": 1 for n in range(1000)}, "rules": [{"match": "*"}]}, "has 1000 axes, more than"),
]


@pytest.mark.parametrize(("value", "message"), BLOCKS_AND_RANKS)
def test_more_than_any_machine_has_is_refused(value: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        ModelLayout.from_mapping(value)


def test_blocks_of_all_dims_and_tensors_are_bounded_together() -> None:
    of_two_dims = {"match": "*", "cut": ["tp"], "blocks": {0: 1000, 1: 1000}}
    with pytest.raises(LayoutError, match="blocks"):
        ModelLayout.from_mapping({"mesh": {"tp": 1}, "rules": [of_two_dims]}).bind({"w": (1000, 1000)})
    of_one = {"match": "*", "cut": ["tp"], "blocks": {0: 60_000}}
    layout = ModelLayout.from_mapping({"mesh": {"tp": 1}, "rules": [of_one]})
    with pytest.raises(LayoutError, match="in total"):
        layout.bind({f"w{n}": (60_000, n) for n in range(1, 100)})


def test_the_first_pattern_decides() -> None:
    groups = [["x", "a.b"], ["a.*"], ["a.b", "a.c"], ["*"]]
    matcher = Matcher(groups)
    assert [matcher.find(key) for key in ("a.b", "a.c", "b", "x")] == [(0, 1), (1, 0), (3, 0), (0, 0)]


INDICES = [
    ("layers.{i}.*", "layers.12.w", {12}),
    ("layers.{i}.*", "layers.x.w", set()),
    ("layers.{i}.*", "layers..w", set()),
    ("layers.{i}.*", "my.layers.1.w", set()),
    ("layers.{i}.*", "layers.007.w", {7}),
    ("*.{i}.*", "m.1.experts.2.w", {1, 2}),
    ("*.{i}.*", "m.1.experts.1.w", {1}),
    ("layers.{i}*", "layers.12", {1, 12}),
    ("{i}", "5", {5}),
    ("w{i}", "w\u0665", set()),  # a digit, but not one of [0-9]
    ("re:layers\\.{i}\\..*", "layers.12.w", {12}),
    ("re:.*\\.{i}\\..*", "m.1.experts.2.w", {1, 2}),
    ("re:layers\\.({i})\\.(w|b)", "layers.61.b", {61}),
    ("re:[a-z]*{i}", "w12", {12}),
    ("re:.*{i}", "w12", {2, 12}),
    ("re:{i}[0-9]", "12", {1}),
]


@pytest.mark.parametrize(("pattern", "key", "indices"), INDICES)
def test_the_index_is_a_whole_group_of_digits(pattern: str, key: str, indices: set[int]) -> None:
    assert IndexedPattern.compile(pattern).indices(key) == indices


@pytest.mark.parametrize("pattern", ["layers.{i}.w", "re:layers\\.{i}\\.w"])
def test_an_index_of_many_digits_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="more than 18 digits"):
        IndexedPattern.compile(pattern).indices(f"layers.{'9' * 500}.w")


@given(
    st.text(max_size=6).map(lambda t: f"re:{t}") | st.text("ab*?.", min_size=1, max_size=6),
    st.text("ab*?.", max_size=6),
)
def test_glob_of_matches_its_key_and_no_other(key: str, other: str) -> None:
    assert Pattern.compile(glob_of(key)).matches(key)
    assert Pattern.compile(glob_of(key)).matches(other) is (key == other)


def test_keys_are_ordered_by_their_numbers() -> None:
    keys = ["b.1", "a.10.w", "a.9.w", "a.b", "a.09.w", "a"]
    assert sorted(keys, key=natural_order) == ["a", "a.09.w", "a.9.w", "a.10.w", "a.b", "b.1"]


def test_what_is_shown_cannot_drive_a_terminal() -> None:
    assert show("a\x1b]0;\u202e\n") == "`a\\x1b]0;\\u202e\\n`"
    assert len(show("x" * 10_000)) < 300


@pytest.mark.parametrize("align", [1 << 61, (1 << 62) - 1, 1 << 62, (1 << 62) + (1 << 10), (1 << 63) - 1])
def test_a_joined_array_that_no_memory_holds_is_refused(tmp_path: Path, align: int) -> None:
    reshard.save_file({"w": np.zeros((64, 8), np.float32)}, tmp_path / "model.safetensors")
    layout = {"mesh": {"a": 2}, "rules": [{"match": "w", "flat": {"axes": ["a"], "join": "j", "align": align}}]}
    with (
        reshard.open(tmp_path / "model.safetensors") as checkpoint,
        pytest.raises(ReshardError, match=r"too (long|many)"),
    ):
        checkpoint.load(layout, rank=0)
