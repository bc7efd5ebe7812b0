"""Strategy files: those of the original are read and written bit for bit, hostile ones are refused with a reason."""

from __future__ import annotations

import json
import os
import random
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    DamagedFileError,
    DestinationExistsError,
    LayoutError,
    ReshardError,
    StorageError,
    UnsupportedError,
)
from reshard.layout import is_strategy, merge_strategies, read_stages, read_strategy, strategy_file
from reshard.layout.strategy import Strategy
from reshard.layout.strategy_file import (
    LayoutItem,
    OperatorItem,
    StrategyFile,
    parse_strategy,
    read_strategy_file,
    write_strategy_file,
)
from reshard.layout.strategy_folder import stage_file
from reshard.layout.strategy_writer import write_stage_files

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = Path(__file__).parents[1] / "data" / "mindspore"
SAMPLES = DATA / "strategy"
FILES = [
    *sorted(SAMPLES.glob("*_strategy/*.ckpt")),
    *sorted(SAMPLES.glob("merged/*.ckpt")),
    *sorted((DATA / "strategy_py").glob("*/*.ckpt")),
]
W = LayoutItem((2, 2), ((0, -1),))


# ---------------------------------------------------------------------------------------------- files of the original


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(DATA)))
def test_files_of_the_original_are_read(path: Path, tmp_path: Path) -> None:
    assert is_strategy(path)
    content = read_strategy_file(path)
    again = tmp_path / "again.ckpt"
    write_strategy_file(again, content)
    assert read_strategy_file(again) == content
    # The Python writer leaves out `indices_offset`, where the other one writes an empty list.
    if "strategy_py" not in path.parts:
        assert again.read_bytes() == path.read_bytes()


def test_the_json_variant_says_the_same() -> None:
    as_json = read_stages(SAMPLES / "src_strategy_json")
    protobuf = read_stages(SAMPLES / "src_strategy")
    assert {n: stage.layouts for n, stage in as_json.items()} == {n: stage.layouts for n, stage in protobuf.items()}
    merged = SAMPLES / "merged" / "src_merged_strategy.json"
    assert read_strategy(merged).stages == read_strategy(merged.with_suffix(".ckpt")).stages


def test_what_is_read_is_what_the_file_says() -> None:
    strategy = read_strategy(SAMPLES / "merged" / "src_merged_strategy.ckpt")
    told = json.loads((SAMPLES / "merged" / "src_merged_strategy.json").read_text())["parallel_layout_item"]
    assert strategy.world_size == 8
    assert len(told) == len(strategy.keys()) == 10
    for name, item in told.items():
        stage, key = name.split("-", 1)
        found = strategy.stages[int(stage)][key]
        assert list(found.dev_matrix) == item["dev_matrix"]
        assert [list(axes) for axes in found.tensor_map] == [item["tensor_map"]]
        assert found.opt_weight_shard_step == item["opt_weight_shard_step"]
        assert found.opt_weight_shard_size == item["opt_weight_shard_size"]


@pytest.mark.parametrize(
    "tree", [SAMPLES / "src_strategy", SAMPLES / "dst_strategy", DATA / "strategy_py/src_strategy"]
)
def test_a_folder_says_what_the_original_merged_of_it(tree: Path, tmp_path: Path) -> None:
    (merged,) = {
        path for path in FILES if path.parent.name == "merged" and path.name[:3] in (tree.name[:3], "mer")
    } & set(tree.parent.glob("merged/*.ckpt"))
    assert read_strategy(tree).stages == read_strategy(merged).stages
    ours = tmp_path / "merged.ckpt"
    assert merge_strategies(tree, ours).stages == read_strategy(merged).stages
    ours_content, content = read_strategy_file(ours), read_strategy_file(merged)
    # The original takes the stages in the order of the folder.
    assert dict(ours_content.layouts) == dict(content.layouts)
    assert set(ours_content.operators) == set(content.operators)
    if tree.name == "src_strategy" and "strategy_py" not in tree.parts:
        assert ours.read_bytes() == merged.read_bytes()


def test_json_is_merged_into_json_and_protobuf(tmp_path: Path) -> None:
    for name in ("merged.json", "merged.ckpt"):
        merge_strategies(SAMPLES / "src_strategy_json", tmp_path / name)
        expected = read_strategy(SAMPLES / "merged" / "src_merged_strategy.ckpt")
        assert read_strategy(tmp_path / name).stages == expected.stages
    assert json.loads((tmp_path / "merged.json").read_text())["current_stage"] == 1


def test_weights_are_told_from_strategies(tmp_path: Path) -> None:
    weights = [*DATA.glob("**/iteration_*/*.safetensors"), *DATA.glob("strategy/src_rank_slices/*/*")]
    assert len(weights) > 8
    assert not any(is_strategy(path) for path in weights)
    for n in range(64):  # headers of every length, one of which begins as a strategy does
        path = tmp_path / "w.safetensors"
        save_file({"w" * (n + 1): np.zeros(1, np.float32)}, path)
        assert not is_strategy(path)
    assert any(not n_bytes % 256 - 8 for n_bytes in range(8, 1024, 8))
    (tmp_path / "layout.json").write_text('{"mesh": {"tp": 2}, "rules": [{"match": "current_stage"}]}')
    assert not is_strategy(tmp_path / "layout.json")
    (tmp_path / "empty.ckpt").write_bytes(b"")
    assert not is_strategy(tmp_path / "empty.ckpt")
    assert not is_strategy(tmp_path)
    with pytest.raises(CheckpointNotFoundError):
        is_strategy(tmp_path / "none.ckpt")


def test_names_with_dashes_survive_the_merge(tmp_path: Path) -> None:
    for stage, key in enumerate(("a-b.w", "0-x-y", "c")):
        write_strategy_file(tmp_path / f"ckpt_strategy_rank_{4 * stage}.ckpt", stage_file(stage, {key: W}))
    merged = tmp_path / "out" / "merged.ckpt"
    merged.parent.mkdir()
    merge_strategies(tmp_path, merged)
    strategy = read_strategy(merged)
    assert strategy.keys() == ("a-b.w", "0-x-y", "c")
    assert [strategy.stages_of(key) for key in ("a-b.w", "0-x-y", "c")] == [(0,), (1,), (2,)]


NUMBERED = {"0-a": W, "0-0-a": W}


def numbered(stage: int, *nodes: str) -> StrategyFile:
    return StrategyFile(1, tuple(OperatorItem(node, stage) for node in nodes), NUMBERED)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("s.ckpt", numbered(0, "0-a", "0-0-a"), {0: {"0-a", "0-0-a"}}),
        ("s.ckpt", numbered(0, "a", "0-a"), {0: {"a", "0-a"}}),
        ("s.ckpt", numbered(0, "MatMul-op0"), {0: {"a", "0-a"}}),
        ("ckpt_strategy_rank_0.ckpt", numbered(0, "a", "0-a"), {0: {"a", "0-a"}}),
        ("ckpt_strategy_rank_0.ckpt", numbered(0, "MatMul-op0"), {0: {"0-a", "0-0-a"}}),
        ("s.ckpt", numbered(1, "MatMul-op0"), {1: {"0-a", "0-0-a"}}),
        ("s.ckpt", StrategyFile(1, (OperatorItem("x", 1),), {"1-a": W}), {1: {"1-a"}}),
        (
            "s.ckpt",
            StrategyFile(1, (OperatorItem("x", 0), OperatorItem("y", 1)), NUMBERED),
            {0: {"a", "0-a"}, 1: set()},
        ),
        ("s.ckpt", StrategyFile(1, (), NUMBERED), {0: {"a", "0-a"}}),
    ],
)
def test_what_tells_a_merged_file_from_a_stages(
    name: str, content: StrategyFile, expected: dict[int, set[str]], tmp_path: Path
) -> None:
    write_strategy_file(tmp_path / name, content)
    found = read_stages(tmp_path / name)
    assert {number: set(stage.layouts) for number, stage in found.items()} == expected


@pytest.mark.parametrize("suffix", [".ckpt", ".json"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_is_written_reads_back_whatever_its_names(suffix: str, stage: int, tmp_path: Path) -> None:
    names = (f"{stage}-a", f"{stage}-{stage}-a", f"{stage}-0-1-a")
    strategy = Strategy({0: {"w": W}, stage: dict.fromkeys(names, W)})
    write_stage_files(strategy, tmp_path, suffix=suffix)
    assert read_strategy(tmp_path).stages == strategy.stages


def test_what_would_be_read_otherwise_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    write_strategy_file(tmp_path / "src" / "s.ckpt", StrategyFile(1, (OperatorItem("x", 0),), {"w": W}))
    with pytest.raises(UnsupportedError, match="it would be read as of other stages or tensors"):
        merge_strategies(tmp_path / "src", tmp_path / "ckpt_strategy_rank_0.ckpt")
    with pytest.raises(UnsupportedError, match="name"):
        write_stage_files(Strategy({0: {"w" * 5000: W}}), tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*.ckpt")] == ["s.ckpt"]


def test_a_merged_file_beside_its_stages_is_as_good(tmp_path: Path) -> None:
    for stage in (0, 1):
        write_strategy_file(tmp_path / f"ckpt_strategy_rank_{4 * stage}.ckpt", stage_file(stage, {f"w{stage}": W}))
    expected = merge_strategies(tmp_path, tmp_path / "merged_ckpt_strategy.ckpt").stages
    assert read_strategy(tmp_path).stages == expected
    write_strategy_file(tmp_path / "ckpt_strategy_rank_4.ckpt", stage_file(1, {"w1": LayoutItem((2, 2), ((1, -1),))}))
    with pytest.raises(DamagedFileError, match="both of stage 1, and disagree on `w1`"):
        read_strategy(tmp_path)


def test_packed_numbers_are_read(tmp_path: Path) -> None:
    packed = field(1, b"w") + field(2, field(1, field(1, varint(2) + varint(2))) + field(2, field(1, b"\0")) + SCALARS)
    strategy = parse_strategy(protobuf(packed), "x")
    assert strategy.layouts["w"] == LayoutItem((2, 2), ((0,),))


def test_unknown_fields_are_skipped() -> None:
    known = protobuf(layout(b"w"))
    assert parse_strategy(known + number(15, 3) + field(16, b"more"), "x") == parse_strategy(known, "x")
    told = json.loads(JSON)
    told["more"] = told["parallel_layout_item"]["w"]["more"] = 1
    assert parse_strategy(json.dumps(told).encode(), "x") == parse_strategy(JSON.encode(), "x")


# -------------------------------------------------------------------------------------------------------- hostile files


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def field(tag: int, content: bytes) -> bytes:
    return varint(tag << 3 | 2) + varint(len(content)) + content


def number(tag: int, value: int) -> bytes:
    return varint(tag << 3) + varint(value)


def dims(tag: int, *values: int) -> bytes:
    return field(tag, b"".join(number(1, value) for value in values))


SCALARS = number(5, 0) + number(6, 0) + number(7, 0)
OPERATOR = field(2, field(1, b"op") + field(2, number(1, 0)))


def layout(name: bytes, matrix: bytes | None = None, tensor_map: bytes | None = None, rest: bytes = SCALARS) -> bytes:
    matrix = dims(1, 2, 2) if matrix is None else matrix
    tensor_map = dims(2, 0, -1) if tensor_map is None else tensor_map
    return field(1, name) + field(2, matrix + tensor_map + rest)


def protobuf(*layouts: bytes, operators: bytes = OPERATOR) -> bytes:
    return number(1, 1) + operators + b"".join(field(3, one) for one in layouts)


GOOD = protobuf(layout(b"w"))

HOSTILE = {
    "empty": (b"", "is no strategy file: it is empty"),
    "zeros": (bytes(64), "it begins with zeros"),
    "weights": (field(1, field(1, b"w") + field(2, dims(1, 2))), "it looks like a file of weights"),
    "text": (b"hello", "is no strategy file: it holds something else"),
    "truncated": (GOOD[:-3], "not a strategy file in protobuf"),
    "cut in a name": (GOOD[:20], "not a strategy file in protobuf"),
    "only its counter": (number(1, 1), "its operators are of no stage"),
    "a tail of an older file": (GOOD + GOOD[-7:], "not a strategy file in protobuf"),
    "an older file behind it": (GOOD + GOOD[2:], "parallel_layout_item[1]: `w` stands here twice"),
    "two counters": (GOOD + number(1, 1), "`current_stage` must occur once, it occurs 2 times"),
    "a counter of 33 bits": (
        number(1, 1 << 32) + GOOD[2:],
        "`current_stage` is 4294967296, expected 0 to 4294967295",
    ),
    "a parameter without a name": (protobuf(field(2, dims(1, 2))), "`param_name` must occur once, it occurs 0 times"),
    "a parameter of two names": (protobuf(field(1, b"v") + layout(b"w")), "`param_name` must occur once, it occurs 2"),
    "an empty name": (protobuf(layout(b"")), "expected a name of 1 to 4096 characters, found 0"),
    "a name of megabytes": (protobuf(layout(b"x" * 5000)), "expected a name of 1 to 4096 characters, found 5000"),
    "a name that is no text": (protobuf(layout(b"\xff\xfe")), "not a strategy file in protobuf"),
    "no layout": (protobuf(field(1, b"w")), "`parallel_layouts` must occur once, it occurs 0 times"),
    "no device matrix": (protobuf(layout(b"w", matrix=b"")), "w.dev_matrix: expected one list, found 0"),
    "two device matrices": (protobuf(layout(b"w", matrix=dims(1, 2) * 2)), "w.dev_matrix: expected one list, found 2"),
    "an empty device matrix": (protobuf(layout(b"w", matrix=dims(1))), "expected sizes of 1 to 1048576 devices"),
    "an axis of no device": (protobuf(layout(b"w", matrix=dims(1, 2, 0))), "expected sizes of 1 to 1048576 devices"),
    "an axis of negative size": (protobuf(layout(b"w", matrix=dims(1, 2, -2))), "`dev_matrix` is -2, expected 0 to"),
    "a world too large": (protobuf(layout(b"w", matrix=dims(1, *[1 << 20] * 40))), "expected sizes of 1 to 1048576"),
    "too many axes": (protobuf(layout(b"w", matrix=dims(1, *[1] * 2000))), "`dev_matrix` has 2000 numbers"),
    "an axis that is not there": (
        protobuf(layout(b"w", tensor_map=dims(2, 2, -1))),
        "expected -1 to 1, an axis of [2, 2]",
    ),
    "an axis below -1": (
        protobuf(layout(b"w", tensor_map=dims(2, -2))),
        "expected -1 to 1, an axis of [2, 2], found -2",
    ),
    "an axis of 64 bits": (protobuf(layout(b"w", tensor_map=dims(2, 1 << 40))), "`tensor_map` is 1099511627776"),
    "an axis used twice": (protobuf(layout(b"w", tensor_map=dims(2, 0, 0))), "w.tensor_map: axis 0 is used twice"),
    "an axis used in two lists": (
        protobuf(layout(b"w", tensor_map=dims(2, 1, 0) + dims(2, 1))),
        "axis 1 is used twice",
    ),
    "too many lists": (protobuf(layout(b"w", tensor_map=dims(2, -1) * 2000)), "`tensor_map` has 2000 lists"),
    "negative rows": (
        protobuf(layout(b"w", rest=dims(3, -1) + SCALARS)),
        "w.param_split_shape: expected no negative number, found [-1]",
    ),
    "two lists of rows": (
        protobuf(layout(b"w", rest=dims(3, 1) * 2 + SCALARS)),
        "param_split_shape: expected one list",
    ),
    "no field": (protobuf(layout(b"w", rest=SCALARS[2:])), "`field` must occur once, it occurs 0 times"),
    "a negative field": (
        protobuf(layout(b"w", rest=number(5, -1) + SCALARS[2:])),
        "w.field: expected at least 0, found -1",
    ),
    "a share of -2": (
        protobuf(layout(b"w", rest=SCALARS[:4] + number(7, -2))),
        "w.opt_weight_shard_size: expected at least -1, found -2",
    ),
    "a share of 33 bits": (
        protobuf(layout(b"w", rest=SCALARS[:4] + number(7, 1 << 31))),
        "opt_weight_shard_size` is",
    ),
    "an operator without a stage": (
        protobuf(layout(b"w"), operators=field(2, field(1, b"op") + field(2, b""))),
        "parallel_strategy_item 0: `stage` must occur once",
    ),
    "operators of two stages": (
        protobuf(layout(b"w"), operators=OPERATOR + field(2, field(1, b"op") + field(2, number(1, 1)))),
        "its operators are of the stages 0, 1, and not every parameter is named `<stage>-<name>`",
    ),
    "a group that does not end": (GOOD + varint(9 << 3 | 3), "not a strategy file in protobuf"),
    "a list where a number stands": (number(1, 1) + field(2, b"\x0a\x7f"), "not a strategy file in protobuf"),
    "nothing but the last stage": (
        protobuf(layout(b"w"), operators=field(2, field(1, b"op") + field(2, number(1, (1 << 32) - 1)))),
        "holds no strategy of stage 0, 1, 2, 3, 4, 5, 6, 7 and 4294967287 more; its last stage is 4294967295",
    ),
    "stages of different worlds": (
        protobuf(
            layout(b"0-w"),
            layout(b"1-w", matrix=dims(1, 8)),
            operators=OPERATOR + field(2, field(1, b"op") + field(2, number(1, 1))),
        ),
        "stages must have one number of devices, found 4 devices (`w` in stage 0), 8 devices (`w` in stage 1)",
    ),
    "one stage of different worlds": (
        protobuf(layout(b"v"), layout(b"w", matrix=dims(1, 8))),
        "found 4 devices (`v` in stage 0), 8 devices (`w` in stage 0)",
    ),
    "no parameter": (protobuf(), "found no parameter at all"),
    "many records": (
        protobuf(layout(b"w"), operators=OPERATOR * (1 << 19)),
        "524289 operators and parameters; at most",
    ),
    "many lists": (
        protobuf(*[layout(b"w", tensor_map=field(2, b"") * 1023)] * 2049),
        f"the file has {1024 * 2049} lists of numbers; at most 2097152 are allowed",
    ),
    "many fields of a record": (protobuf(field(1, b"") * (1 << 21)), "2097154 fields of operators"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_protobufs(name: str, tmp_path: Path) -> None:
    data, message = HOSTILE[name]
    path = tmp_path / "ckpt_strategy_rank_0.ckpt"
    path.write_bytes(data)
    for source in (path, tmp_path):
        with pytest.raises(
            (DamagedFileError, LayoutError, CheckpointNotFoundError), match=re.escape(message)
        ) as caught:
            read_strategy(source)
        assert caught.value.path in (str(path), str(source))
    assert "ckpt_strategy_rank_0.ckpt" in str(caught.value) or str(tmp_path) in str(caught.value)


JSON = json.dumps(
    {
        "current_stage": 1,
        "parallel_strategy_item": {"op": {"stage": 0, "parallel_strategy": [[2, 1], [1, 2]]}},
        "parallel_layout_item": {
            "w": {
                "dev_matrix": [2, 2],
                "tensor_map": [0, -1],
                "param_split_shape": [],
                "indices_offset": [],
                "field": 0,
                "opt_weight_shard_step": 0,
                "opt_weight_shard_size": 0,
            }
        },
    }
)

HOSTILE_JSON = {
    "not JSON": ('"dev_matrix": [2, 2]', '"dev_matrix": [2, 2', "is not valid JSON"),
    "a name twice": ('"field": 0', '"field": 0, "field": 0', "the name `field` is repeated"),
    "not a number": ('"field": 0', '"field": NaN', "NaN is not a JSON number"),
    "a field of text": ('"field": 0', '"field": "0"', "w.field: expected an integer of at least 0, found `0`"),
    "a field of truth": ('"field": 0', '"field": true', "expected an integer of at least 0, found true"),
    "no field": ('"field": 0,', "", "w: `field` is missing"),
    "no device matrix": ('"dev_matrix": [2, 2],', "", "w: `dev_matrix` is missing"),
    "a device matrix of text": (
        '"dev_matrix": [2, 2]',
        '"dev_matrix": "22"',
        "expected a list of integers, found `22`",
    ),
    "an axis of no device": (
        '"dev_matrix": [2, 2]',
        '"dev_matrix": [2, 0]',
        "expected an integer of at least 1, found `0`",
    ),
    "half a device": (
        '"dev_matrix": [2, 2]',
        '"dev_matrix": [2, 2.5]',
        "expected an integer of at least 1, found `2.5`",
    ),
    "nested maps": (
        '"tensor_map": [0, -1]',
        '"tensor_map": [[0, 1]]',
        "expected an integer of at least -1, found a list",
    ),
    "an axis that is not there": (
        '"tensor_map": [0, -1]',
        '"tensor_map": [2, -1]',
        "expected -1 to 1, an axis of [2, 2]",
    ),
    "a list of items": ('"parallel_layout_item": {"w": {', '"parallel_layout_item": [{"w": {', "is not valid JSON"),
    "an item of nothing": (
        '{"stage": 0, "parallel_strategy": [[2, 1], [1, 2]]}',
        "null",
        "op: expected an object, found null",
    ),
    "no operators": ('"parallel_strategy_item": {"op":', '"other": {"op":', "`parallel_strategy_item` is missing"),
    "an operator without a stage": ('"stage": 0, ', "", "parallel_strategy_item.op: `stage` is missing"),
    "a negative stage": ('"stage": 0', '"stage": -1', "op.stage: expected an integer of at least 0, found `-1`"),
    "an empty name": ('"w":', '"":', "expected a name of 1 to 4096 characters, found 0"),
    "a long integer": ('"field": 0', '"field": 99999999999999999999', "does not fit 64 bits"),
    "half a pair": ('"w":', '"\\ud800":', "not valid Unicode"),
    "many values": ('"tensor_map": [0, -1]', f'"tensor_map": [{"0," * (1 << 21)}-1]', "more than 2097152 values"),
    "deep nesting": ('"tensor_map": [0, -1]', f'"tensor_map": {"[" * 40}{"]" * 40}', "nests deeper"),
}


@pytest.mark.parametrize("name", HOSTILE_JSON)
def test_hostile_json(name: str, tmp_path: Path) -> None:
    old, new, message = HOSTILE_JSON[name]
    assert JSON.count(old) == 1
    path = tmp_path / "strategy.json"
    path.write_text(JSON)
    read_strategy(path)
    path.write_text(JSON.replace(old, new))
    with pytest.raises(DamagedFileError, match=re.escape(message)) as caught:
        read_strategy(path)
    assert str(path) in str(caught.value)


def two_stages(folder: Path) -> None:
    for stage in (0, 1):
        for rank in range(4 * stage, 4 * stage + 4):
            write_strategy_file(folder / f"ckpt_strategy_rank_{rank}.ckpt", stage_file(stage, {f"w{stage}": W, "t": W}))


def without_stage_0(folder: Path) -> None:
    for rank in range(4):
        (folder / f"ckpt_strategy_rank_{rank}.ckpt").unlink()


def both_kinds(folder: Path) -> None:
    write_strategy_file(folder / "strategy.json", stage_file(0, {"w0": W}))


def other_cut(folder: Path) -> None:
    write_strategy_file(
        folder / "ckpt_strategy_rank_3.ckpt", stage_file(0, {"w0": LayoutItem((4,), ((0, -1),)), "t": W})
    )


def a_name_less(folder: Path) -> None:
    write_strategy_file(folder / "ckpt_strategy_rank_6.ckpt", stage_file(1, {"w1": W}))


def a_name_more(folder: Path) -> None:
    write_strategy_file(folder / "ckpt_strategy_rank_6.ckpt", stage_file(1, {"w1": W, "t": W, "x": W}))


def weights_among_them(folder: Path) -> None:
    (folder / "model.ckpt").write_bytes(HOSTILE["weights"][0])


def a_torn_one(folder: Path) -> None:
    path = folder / "ckpt_strategy_rank_7.ckpt"
    path.write_bytes(path.read_bytes()[:-2])


def a_link_out(folder: Path) -> None:
    bait = folder.parent / "bait.ckpt"
    (folder / "ckpt_strategy_rank_0.ckpt").rename(bait)
    (folder / "ckpt_strategy_rank_0.ckpt").symlink_to(bait)


def a_pipe(folder: Path) -> None:
    os.mkfifo(folder / "ckpt_strategy_rank_9.ckpt")


def a_folder_of_its_name(folder: Path) -> None:
    (folder / "ckpt_strategy_rank_9.ckpt").mkdir()


def none_left(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


FOLDERS: dict[Callable[[Path], None], tuple[type[ReshardError], str]] = {
    without_stage_0: (CheckpointNotFoundError, "holds no strategy of stage 0; its last stage is 1"),
    both_kinds: (DamagedFileError, "which of the two kinds is the strategy is not known"),
    other_cut: (DamagedFileError, "are both of stage 0, and disagree on `w0`: they cut it otherwise"),
    a_name_less: (DamagedFileError, "disagree on `t`: `.*rank_6.ckpt` does not list it"),
    a_name_more: (DamagedFileError, "disagree on `x`: `.*rank_4.ckpt` does not list it"),
    weights_among_them: (DamagedFileError, "model.ckpt` is no strategy file: it looks like a file of weights"),
    a_torn_one: (DamagedFileError, "rank_7.ckpt`: not a strategy file in protobuf"),
    a_link_out: (DamagedFileError, "is a symbolic link"),
    a_pipe: (DamagedFileError, "is no strategy file|is not a regular file"),
    a_folder_of_its_name: (DamagedFileError, "is no strategy file: it is empty, or a folder"),
    none_left: (CheckpointNotFoundError, "holds no strategy files"),
}


@pytest.mark.parametrize("harm", FOLDERS, ids=lambda harm: harm.__name__)
def test_hostile_folders(harm: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "strategy"
    folder.mkdir()
    two_stages(folder)
    assert read_strategy(folder).world_size == 8
    harm(folder)
    error, message = FOLDERS[harm]
    with pytest.raises(error, match=message):
        read_strategy(folder)


def test_merging_keeps_what_is_there(tmp_path: Path) -> None:
    two_stages(tmp_path)
    target = tmp_path / "out.ckpt"
    target.write_bytes(b"precious")
    with pytest.raises(DestinationExistsError, match="exists"):
        merge_strategies(SAMPLES / "src_strategy", target)
    with pytest.raises(DestinationExistsError, match="is no strategy file: it holds something else"):
        merge_strategies(SAMPLES / "src_strategy", target, overwrite=True)
    assert target.read_bytes() == b"precious"
    target.unlink()
    merge_strategies(SAMPLES / "src_strategy", target)
    merge_strategies(SAMPLES / "dst_strategy", target, overwrite=True)
    assert read_strategy(target).n_stages == 4
    with pytest.raises(ArgumentError, match="is a folder"):
        merge_strategies(SAMPLES / "src_strategy", tmp_path)
    with pytest.raises(StorageError):
        merge_strategies(SAMPLES / "src_strategy", tmp_path / "no" / "folder.ckpt")


def test_json_refuses_what_it_cannot_say(tmp_path: Path) -> None:
    content = stage_file(0, {"w": LayoutItem((2, 2), ((0, 1), (-1,)))})
    with pytest.raises(UnsupportedError, match="cannot express `w`: it gives a dim more than one device axis"):
        write_strategy_file(tmp_path / "s.json", content)
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------------------------------------- properties

NAMES = st.text(min_size=1, max_size=12)
UINT32 = st.integers(0, (1 << 32) - 1)


@st.composite
def items(draw: Any) -> LayoutItem:
    matrix = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    axes = draw(st.permutations(range(len(matrix))))
    flat = [draw(st.sampled_from([-1, axis])) for axis in axes[: draw(st.integers(0, len(axes)))]]
    tensor_map = [flat] if draw(st.booleans()) else [[v] for v in flat]
    rows = st.lists(st.integers(0, (1 << 63) - 1), max_size=4).map(tuple)
    signed = st.integers(0, (1 << 31) - 1)
    share = draw(st.integers(-1, (1 << 31) - 1))
    return LayoutItem(
        tuple(matrix), tuple(map(tuple, tensor_map)), draw(rows), draw(rows), draw(signed), draw(signed), share
    )


CONTENTS = st.builds(
    StrategyFile,
    UINT32,
    st.lists(
        st.builds(
            OperatorItem, NAMES, UINT32, st.lists(st.lists(UINT32, max_size=3).map(tuple), max_size=3).map(tuple)
        ),
        max_size=3,
    ).map(tuple),
    st.dictionaries(NAMES, items(), max_size=4),
)


@pytest.mark.slow(disk=False)
@settings(max_examples=150)
@given(CONTENTS)
def test_what_is_written_is_read(content: StrategyFile) -> None:
    data = strategy_file._to_protobuf(content)
    assert parse_strategy(data, "x") == content


SEEDS = [path.read_bytes() for path in (FILES[0], FILES[-1], SAMPLES / "merged" / "dst_merged_strategy.ckpt")]
SEEDS.append(JSON.encode())


def mutated(seed: int) -> bytes:
    """A good file with one to four changes."""
    rng = random.Random(seed)
    content = bytearray(rng.choice(SEEDS))
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(content))
        how = rng.choice(["set", "insert", "delete", "repeat", "cut"])
        if how == "set":
            content[at : at + 1] = rng.randbytes(1)
        elif how == "insert":
            content[at:at] = rng.randbytes(rng.randint(1, 10))
        elif how == "delete":
            del content[at : at + rng.randint(1, 16)]
        elif how == "repeat":
            content[at:at] = content[at : at + rng.randint(1, 64)]
        else:
            del content[at:]
    return bytes(content)


def test_a_mutated_file_is_read_or_refused() -> None:
    """Whatever stands there: a strategy that survives being written, or an error of ours that names the file."""
    assert {check_parsed(mutated(seed)) for seed in range(3000)} == {True, False}


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    check_parsed(b"\x08\x01\x12" + content)
    check_parsed(GOOD + content)
    check_parsed(content)


def check_parsed(content: bytes) -> bool:
    """Whether it was read."""
    try:
        parsed = parse_strategy(content, "the file")
    except DamagedFileError as error:
        refused = error
    else:
        assert parse_strategy(strategy_file._to_protobuf(parsed), "again") == parsed
        return True
    assert refused.path == "the file"
    assert "the file" in refused.message
    return False


def test_a_safetensors_file_that_begins_as_a_strategy(tmp_path: Path) -> None:
    header = b"{}".ljust(0x120108)
    path = tmp_path / "x.ckpt"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    assert path.read_bytes()[:3] == b"\x08\x01\x12"
    assert not is_strategy(path)
    with pytest.raises(DamagedFileError, match="it is a safetensors file"):
        read_strategy(path)


def test_a_strategy_whose_ninth_byte_is_a_brace(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    write_strategy_file(path, stage_file(0, {"ab{0}": W}))
    assert path.read_bytes()[8:9] == b"{"
    assert is_strategy(path)
    assert read_strategy(path).keys() == ("ab{0}",)
