"""Strategies as layouts and layouts as strategies: one can stand where the other can, and the way back is exact."""

from __future__ import annotations

import math
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.threads import in_threads
from tests.layout.strategy_oracle import COUNTERS, cut_out, cuts, oracle

import reshard
from reshard.cli import main
from reshard.errors import ArgumentError, CheckpointNotFoundError, DamagedFileError, LayoutError, UnsupportedError
from reshard.layout import ModelLayout, Strategy, as_layout, read_strategy, region_of, write_strategy
from reshard.layout.strategy_file import LayoutItem, write_strategy_file
from reshard.layout.strategy_folder import stage_file
from reshard.layout.strategy_writer import write_stage_files

DATA = Path(__file__).parents[1] / "data" / "mindspore"
SAMPLES = DATA / "strategy"
FULL = SAMPLES / "expected_full.safetensors"
STRATEGIES = [
    SAMPLES / "dst_strategy",
    SAMPLES / "merged" / "dst_merged_strategy.ckpt",
    SAMPLES / "src_strategy",
    SAMPLES / "src_strategy_json",
    SAMPLES / "merged" / "src_merged_strategy.json",
]


def slices_of(path: Path, rank: int) -> dict[str, np.ndarray]:
    folder = SAMPLES / ("expected_dst_slices" if "dst" in path.name else "src_rank_slices") / f"rank_{rank}"
    (file,) = folder.iterdir()
    return {key: array for key, array in reshard.load_file(file).items() if key not in COUNTERS}


def check_equal(own: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    assert own.keys() == expected.keys()
    for key, array in expected.items():
        assert (own[key].dtype, own[key].shape) == (array.dtype, array.shape)
        assert own[key].tobytes() == array.tobytes()


# ------------------------------------------------------------------------------------- a strategy where a layout can be


@pytest.mark.parametrize("path", STRATEGIES, ids=lambda path: path.name)
def test_a_rank_loads_what_the_original_gives_it(path: Path) -> None:
    with reshard.open(FULL) as opened:
        for rank in range(8):
            check_equal(opened.load(path, rank=rank), slices_of(path, rank))
            # Printed, it is a layout file that says the same.
            printed = ModelLayout.from_mapping(as_layout(path).to_mapping())
            check_equal(opened.load(printed, rank=rank), slices_of(path, rank))


@pytest.mark.parametrize("path", STRATEGIES, ids=lambda path: path.name)
def test_convert_splits_by_a_strategy(path: Path, tmp_path: Path) -> None:
    reshard.convert(FULL, tmp_path / "ranks", layout=path, to="safetensors")
    for rank in range(8):
        check_equal(reshard.load_file(tmp_path / "ranks" / f"rank_{rank}.safetensors"), slices_of(path, rank))
    reshard.convert(FULL, tmp_path / "root", layout=path)
    with reshard.open(tmp_path / "root") as opened:
        check_equal(opened.load(), reshard.load_file(FULL))
        layout = ModelLayout.like(opened)
        for rank in range(8):
            check_equal(opened.load(layout, rank=rank), slices_of(path, rank))


@pytest.mark.parametrize("path", STRATEGIES[:3:2], ids=lambda path: path.name)
def test_ranks_save_by_a_strategy(path: Path, tmp_path: Path) -> None:
    def work(group: Any) -> Any:
        return reshard.save(
            tmp_path, 3, slices_of(path, group.rank), layout=path, group=group, commit={"durable": False}, timeout=30
        )

    assert not [result for result in in_threads(8, work) if isinstance(result, Exception)]
    with reshard.open(tmp_path) as opened:
        check_equal(opened.load(), reshard.load_file(FULL))


def test_uneven_rows_are_sizes(tmp_path: Path) -> None:
    item = LayoutItem((2, 3), ((0, -1),), (5, 0, 2), (0, 5, 5))
    write_strategy_file(tmp_path / "s.ckpt", stage_file(0, {"table": item}))
    whole = np.arange(14.0).reshape(7, 2)
    layout = ModelLayout.from_strategy(tmp_path / "s.ckpt")
    assert layout.to_mapping()["rules"] == [
        {"match": "table", "cut": ["axis1"], "sizes": {0: [5, 0, 2]}},
        {"match": "*"},
    ]
    reshard.save_file({"table": whole}, tmp_path / "m.safetensors")
    with reshard.open(tmp_path / "m.safetensors") as opened:
        parts = [opened.load(tmp_path / "s.ckpt", rank=rank)["table"] for rank in range(6)]
    assert [len(part) for part in parts] == [5, 0, 2, 5, 0, 2]
    assert np.array_equal(np.concatenate(parts[3:]), whole)

    def work(group: Any) -> Any:
        model = {"table": parts[group.rank]}
        return reshard.save(
            tmp_path / "run", 1, model, layout=tmp_path / "s.ckpt", group=group, commit={"durable": False}, timeout=30
        )

    assert not [result for result in in_threads(6, work) if isinstance(result, Exception)]
    with reshard.open(tmp_path / "run") as opened:
        assert np.array_equal(opened.read("table"), whole)


def test_the_shape_settles_a_lone_list(tmp_path: Path) -> None:
    strategy = Strategy({0: {"w": LayoutItem((2, 2), ((0, 1),))}})
    layout = ModelLayout.from_strategy(strategy)
    for shape in ((8,), (4, 6)):
        bound = layout.bind({"w": shape})
        for rank in range(4):
            ((offset, local, _, _),) = bound.layouts["w"].tiles(rank)
            assert region_of(strategy, "w", rank, local) == (shape, offset)
    # What is kept beside the arrays is right for them, too.
    write_strategy_file(tmp_path / "s.ckpt", stage_file(0, {"w": LayoutItem((2, 2), ((0, 1),))}))
    reshard.save_file({"w": np.arange(8.0)}, tmp_path / "m.safetensors")
    reshard.convert(tmp_path / "m.safetensors", tmp_path / "out", layout=tmp_path / "s.ckpt", to="safetensors")
    with reshard.open(tmp_path / "out") as opened:
        assert ModelLayout.like(opened).to_mapping()["rules"] == [
            {"match": "w", "cut": [["axis1", "axis0"]]},
            {"match": "*"},
        ]
        assert np.array_equal(opened.read("w"), np.arange(8.0))
        parts = [opened.load(tmp_path / "s.ckpt", rank=rank) for rank in range(4)]

    def work(group: Any) -> Any:
        path = tmp_path / "s.ckpt"
        return reshard.save(
            tmp_path / "run", 1, parts[group.rank], layout=path, group=group, commit={"durable": False}, timeout=30
        )

    assert not [result for result in in_threads(4, work) if isinstance(result, Exception)]
    with reshard.open(tmp_path / "run") as opened:
        assert np.array_equal(opened.read("w"), np.arange(8.0))


@pytest.mark.parametrize(
    ("item", "shape"),
    [
        # The shape, as the Python writer tells it.
        (LayoutItem((2, 2), ((1, 0),), (4,)), (4,)),
        (LayoutItem((2, 2, 2), ((1, 0),), (8,), opt_weight_shard_size=2, opt_weight_shard_step=4), (8,)),
        # The rows of all parts.
        (LayoutItem((2, 2, 2), ((2, 1, 0),), (1, 2, 0, 1, 3, 1, 1, 1), tuple(range(8))), (10,)),
    ],
)
def test_a_lone_list_that_only_one_dim_fits_is_that_of_one_dim(
    item: LayoutItem, shape: tuple[int, ...], tmp_path: Path
) -> None:
    write_strategy_file(tmp_path / "s.ckpt", stage_file(0, {"b": item}))
    whole = np.arange(shape[0])
    reshard.save_file({"b": whole}, tmp_path / "m.safetensors")
    printed = ModelLayout.from_mapping(as_layout(tmp_path / "s.ckpt").to_mapping())
    with reshard.open(tmp_path / "m.safetensors") as opened:
        for rank in range(math.prod(item.dev_matrix)):
            part = opened.load(tmp_path / "s.ckpt", rank=rank)["b"]
            region = region_of(Strategy({0: {"b": item}}), "b", rank, part.shape)
            assert region is not None
            assert region[0] == shape
            assert np.array_equal(part, cut_out(whole, region[1], part.shape))
            assert np.array_equal(opened.load(printed, rank=rank)["b"], part)


def test_what_only_shapes_can_tell_is_said_when_a_strategy_is_shown(tmp_path: Path) -> None:
    items = {
        "b": LayoutItem((2, 2), ((1, 0),)),
        "w": LayoutItem((2, 2), ((1, 0),), (8, 4)),
        "v": LayoutItem((2, 2), ((1,), (0,))),
        "n": LayoutItem((2, 2), ((1, -1),)),
    }
    write_strategy_file(tmp_path / "s.ckpt", stage_file(0, items))
    shown = CliRunner().invoke(main, ["strategy", "show", "--layout", str(tmp_path / "s.ckpt")])
    assert shown.exit_code == 0
    assert [line for line in shown.stdout.splitlines() if "not certain" in line] == [
        '# not certain without its shape: "b"'
    ]
    assert "the number of dims of these tensors: `b`." in shown.stderr
    (tmp_path / "printed.yaml").write_text(shown.stdout)
    printed = as_layout(tmp_path / "printed.yaml")
    assert printed.bind({"b": (4, 4)}).layouts["b"].local_shape(0) == (2, 2)
    with pytest.raises(LayoutError, match="`b` has 1 dim"):  # not silently another cut
        printed.bind({"b": (4,)})
    certain = CliRunner().invoke(main, ["strategy", "show", "--layout", str(SAMPLES / "dst_strategy")])
    assert "not certain" not in certain.stdout
    assert certain.stderr == ""


def test_stages_that_agree_once_the_shape_is_known_are_no_contradiction() -> None:
    strategy = Strategy({0: {"b": LayoutItem((2, 2), ((1, 0),))}, 1: {"b": LayoutItem((2, 2), ((1, 0),), (4,))}})
    assert ModelLayout.from_strategy(strategy).bind({"b": (4,)}).layouts["b"].local_shape(5) == (1,)
    with pytest.raises(UnsupportedError, match="split shape"):
        ModelLayout.from_strategy(strategy).bind({"b": (4, 4)})


def test_a_strategy_with_a_byte_order_mark_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    write_strategy_file(path, stage_file(0, {"w": LayoutItem((2,), ((0,),))}))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    for read in (as_layout, read_strategy):
        with pytest.raises(DamagedFileError, match="byte order mark"):
            read(path)


def test_what_is_not_listed_is_whole_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    layout = ModelLayout.from_strategy(Strategy({0: {"l.0.w": LayoutItem((2,), ((0, -1),))}}, source="told once"))
    shapes = {"l.0.w": (4, 4), "l.1.w": (4, 4), "l.0.*": (4,), "step": (), "global_step": (1,)}
    bound = layout.bind(shapes)
    expected = "`told once` does not list `l.1.w`, `l.0.*`: whole on every rank"
    assert bound.warnings == [expected]
    layout.bind(shapes)
    assert [record.getMessage() for record in caplog.records] == [f"layout: {expected}"]
    assert bound.layouts["l.1.w"].local_shape(1) == (4, 4)
    assert bound.layouts["l.0.w"].local_shape(1) == (2, 4)
    with pytest.raises(LayoutError, match="does not list"):
        layout.bind(shapes, strict=True)
    layout.bind({"l.0.w": (4, 4), "global_step": (1,)}, strict=True)


def test_tensors_of_several_stages() -> None:
    item = LayoutItem((2,), ((0, -1),))
    tied = Strategy({stage: {f"l.{stage}.w": item} | ({"tied": item} if stage != 1 else {}) for stage in range(3)})
    bound = ModelLayout.from_strategy(tied).bind({"l.0.w": (4, 4), "tied": (4, 4)})
    assert bound.layouts["l.0.w"].holders() == [0, 1]
    assert bound.layouts["tied"].holders() == [0, 1, 2, 3, 4, 5]
    assert bound.warnings == ["`strategy` puts `tied` on some stages; in a layout, one or all: here it is all"]
    everywhere = Strategy({stage: {"tied": item} for stage in range(3)})
    assert ModelLayout.from_strategy(everywhere).bind({"tied": (4, 4)}).warnings == []
    with pytest.raises(LayoutError, match="stages 0 and 1 cut `tied` differently"):
        ModelLayout.from_strategy(Strategy({0: {"tied": item}, 1: {"tied": LayoutItem((2,), ((-1, 0),))}}))


def test_matrices_without_a_common_mesh() -> None:
    strategy = Strategy({0: {"a": LayoutItem((2, 3), ((0,),)), "b": LayoutItem((3, 2), ((0,),))}})
    assert region_of(strategy, "b", 1, (2,)) == ((4,), (2,))
    with pytest.raises(LayoutError, match=r"^`strategy`: the device matrices .* cannot be refined to one mesh"):
        ModelLayout.from_strategy(strategy)


def test_which_paths_are_strategies(tmp_path: Path) -> None:
    (tmp_path / "layout.json").write_text('{"mesh": {"tp": 2}, "rules": [{"match": "*"}]}')
    assert as_layout(tmp_path / "layout.json").strategy is None
    with pytest.raises(CheckpointNotFoundError, match="none"):
        as_layout(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFoundError, match="holds no strategy files"):
        as_layout(tmp_path / "empty")
    torn = tmp_path / "ckpt_strategy_rank_0.ckpt"
    torn.write_bytes((SAMPLES / "merged" / "src_merged_strategy.ckpt").read_bytes()[:-1])
    with pytest.raises(DamagedFileError, match="not a strategy file in protobuf"):
        as_layout(torn)


@pytest.mark.slow
@settings(max_examples=100)
@given(st.lists(cuts(sizes=(2, 4)), min_size=1, max_size=3), st.integers(1, 3))
def test_a_bound_strategy_gives_every_rank_what_the_rules_say(found: list[Any], n_stages: int) -> None:
    # The matrices of a stage have one product: powers of two, made equal by an outermost axis.
    devices = max(math.prod(item.dev_matrix) for item, _ in found)
    stages: dict[int, dict[str, LayoutItem]] = {stage: {} for stage in range(n_stages)}
    shapes = {}
    for n, (item, shape) in enumerate(found):
        matrix = (devices // math.prod(item.dev_matrix), *item.dev_matrix)
        # With more holders, `all` would be more parts than the shape was made for.
        share = item.opt_weight_shard_size
        if share == -1:
            used = {v for axes in item.tensor_map for v in axes}
            share = math.prod(size for v, size in enumerate(reversed(item.dev_matrix)) if v not in used)
        free = [a for a, size in enumerate(matrix) if size > 1 and len(matrix) - 1 - a not in sum(item.tensor_map, ())]
        step = math.prod(matrix[free[-1] + 1 :]) if share and free else 0
        stages[n % n_stages][f"w{n}"] = LayoutItem(
            matrix, item.tensor_map, opt_weight_shard_size=share, opt_weight_shard_step=step
        )
        shapes[f"w{n}"] = shape
    strategy = Strategy(stages)
    bound = ModelLayout.from_strategy(strategy).bind(shapes)
    for n, (key, shape) in enumerate(shapes.items()):
        stage = n % n_stages
        assert bound.layouts[key].holders() == list(range(stage * devices, (stage + 1) * devices))
        whole = np.arange(math.prod(shape)).reshape(shape)
        for position, expected in enumerate(oracle(stages[stage][key], shape)):
            ((offset, local, _, _),) = bound.layouts[key].tiles(stage * devices + position)
            assert np.array_equal(cut_out(whole, offset, local), expected)


# ----------------------------------------------------------------------------------------- a layout for the original


def check_same(layout: ModelLayout, strategy: Strategy, shapes: dict[str, tuple[int, ...]]) -> None:
    """Every rank has under the strategy what it has under the layout."""
    bound = layout.bind(shapes)
    for key, shape in shapes.items():
        made = bound.layouts[key]
        for rank in range(strategy.world_size):
            region = region_of(strategy, key, rank, made.local_shape(rank) if made.holds(rank) else (1,) * len(shape))
            if not made.holds(rank):
                assert region is None
                continue
            tiles = made.tiles(rank)
            if tiles:
                assert region == (shape, tiles[0][0])


AXES = ("dp", "cp", "tp")


@st.composite
def layouts(draw: Any) -> tuple[ModelLayout, dict[str, tuple[int, ...]]]:
    names = ["pp", *draw(st.permutations(AXES))]
    sizes = {name: draw(st.sampled_from([1, 2, 2, 3])) for name in names}
    rules, shapes = [], {}
    for n in range(draw(st.integers(1, 4))):
        ndim = draw(st.integers(0, 3))
        axes = list(draw(st.permutations(AXES)))
        bounds = sorted(draw(st.lists(st.integers(0, 3), min_size=ndim, max_size=ndim)))
        cut = [axes[a:b] for a, b in zip([0, *bounds], bounds, strict=False)]
        parts = [math.prod(sizes[axis] for axis in axes_of_dim) for axes_of_dim in cut]
        shape = [k * draw(st.integers(1, 2)) for k in parts]
        key = f"layers.{n}.w-{n}"
        rule: dict[str, Any] = {"match": key, "cut": cut}
        uneven = draw(st.sampled_from(["", "", "ceil", "sizes"])) if ndim else ""
        if uneven == "ceil":
            rule["uneven"] = "ceil"
            shape[0] = draw(st.integers(1, 12))
        elif uneven and parts[0] > 1:
            listed = draw(st.lists(st.integers(0, 3), min_size=parts[0], max_size=parts[0]))
            rule["sizes"] = {0: listed}
            shape[0] = sum(listed)
        rules.append(rule)
        shapes[key] = tuple(shape)
    at = {key: draw(st.integers(0, sizes["pp"] - 1)) for key in shapes if draw(st.booleans())}
    place = [{"match": key, "axis": "pp", "at": stage} for key, stage in at.items()]
    return ModelLayout.from_mapping({"mesh": sizes, "rules": rules, "place": place}), shapes


def test_layouts_go_there_and_back(tmp_path_factory: pytest.TempPathFactory) -> None:
    said = refused = 0
    folder = tmp_path_factory.mktemp("strategy")

    @settings(max_examples=120)
    @given(layouts())
    def check(drawn: tuple[ModelLayout, dict[str, tuple[int, ...]]]) -> None:
        nonlocal said, refused
        layout, shapes = drawn
        while any(shapes.values()):
            try:
                strategy = layout.to_strategy(shapes)
            except UnsupportedError as error:
                unsaid = error.key
            else:
                said += len(shapes)
                check_same(layout, strategy, shapes)
                assert written_and_read(strategy, folder / f"{said}").stages == strategy.stages
                return
            assert unsaid is not None
            assert len(shapes[unsaid]) == 1, "of more dims all cuts can be said"
            shapes = {key: shape for key, shape in shapes.items() if key != unsaid}
            refused += 1

    check()
    assert said > 150
    assert refused < said / 10


def written_and_read(strategy: Strategy, folder: Path) -> Strategy:
    nested = any(len(item.tensor_map) > 1 for items in strategy.stages.values() for item in items.values())
    first_of_each = range(0, strategy.world_size, strategy.devices_per_stage)
    write_stage_files(strategy, folder, ranks=first_of_each, suffix=".ckpt" if nested else ".json", durable=False)
    return read_strategy(folder)


@pytest.mark.parametrize(
    ("mesh", "cut", "shape", "expected"),
    [
        ({"dp": 2, "tp": 4}, ["tp"], (8, 6), LayoutItem((2, 4), ((0, -1),))),
        ({"dp": 2, "tp": 4}, [None, "dp"], (8, 6), LayoutItem((2, 4), ((-1, 1),))),
        ({"dp": 2, "tp": 4}, [], (8, 6), LayoutItem((2, 4), ((-1, -1),))),
        # Neighbours that cut one dim are one axis.
        ({"dp": 2, "tp": 4}, [["dp", "tp"]], (8,), LayoutItem((8,), ((0,),))),
        ({"a": 2, "dp": 2, "tp": 2}, [["dp", "tp"], "a"], (8, 6), LayoutItem((2, 4), ((0, 1),))),
        # ZeRO: what the holders of a slice share further.
        (
            {"dp": 2, "tp": 4},
            [["tp", "dp"]],
            (8, 6),
            LayoutItem((2, 4), ((0, -1),), opt_weight_shard_step=4, opt_weight_shard_size=2),
        ),
        (
            {"dp": 2, "tp": 4},
            [["tp", "dp"]],
            (8,),
            LayoutItem((2, 4), ((0,),), opt_weight_shard_step=4, opt_weight_shard_size=2),
        ),
        # Where the original's tools would err on that, and elsewhere, a list of axes a dim.
        ({"a": 2, "b": 2, "c": 2}, [["c", "a"], "b"], (8, 6), LayoutItem((2, 2, 2), ((0, 2), (1,)))),
        ({"a": 2, "b": 2, "c": 2}, [None, ["c", "a"]], (8, 8), LayoutItem((2, 2, 2), ((-1,), (0, 2)))),
        ({"dp": 2, "tp": 1}, ["tp", "dp"], (8, 6), LayoutItem((2,), ((-1, 0),))),
    ],
)
def test_the_words_of_a_cut(mesh: dict[str, int], cut: list[Any], shape: tuple[int, ...], expected: LayoutItem) -> None:
    layout = ModelLayout.from_mapping({"mesh": mesh, "rules": [{"match": "*", "cut": cut}]})
    strategy = layout.to_strategy({"w": shape})
    assert strategy.stages == {0: {"w": expected}}
    check_same(layout, strategy, {"w": shape})


@pytest.mark.parametrize(
    ("mapping", "shape", "reason"),
    [
        ({"mesh": {"tp": 2}, "rules": [{"match": "*", "flat": ["tp"]}]}, (4, 4), "flattened and cut 1-D"),
        (
            {"mesh": {"tp": 2}, "rules": [{"match": "*", "flat": {"axes": ["tp"], "join": "j"}}]},
            (4, 4),
            "it is joined with others into one array",
        ),
        ({"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"], "blocks": {0: 2}}]}, (4, 4), "consists of blocks"),
        ({"mesh": {"tp": 2}, "rules": [{"match": "*", "stored": [1, 0]}]}, (4, 4), "stored in another order"),
        (
            {"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": [None, "tp"], "uneven": "ceil"}]},
            (4, 5),
            "dim 1 is cut into parts of different sizes",
        ),
        (
            {"mesh": {"a": 2, "b": 2}, "rules": [{"match": "*", "cut": ["a", "b"], "uneven": "ceil"}]},
            (5, 7),
            "dim 1 is cut into parts of different sizes",
        ),
        ({"mesh": {"a": 2, "b": 1}, "rules": [{"match": "*", "flat": ["b"]}]}, (4, 3), "it is flattened"),
        (
            {"mesh": {"a": 2, "b": 2, "c": 2}, "rules": [{"match": "*", "cut": [["b", "c", "a"]]}], "place": []},
            (8,),
            None,
        ),
        (
            {"mesh": {"a": 2, "b": 2, "c": 2}, "rules": [{"match": "*", "cut": [["c", "b", "a"]]}]},
            (8,),
            "its one dim is cut by the axes c, b, a",
        ),
        (
            {
                "mesh": {"dp": 2, "pp": 2},
                "rules": [{"match": "*"}],
                "place": [{"match": "w", "axis": "pp", "at": 0}],
            },
            (4, 4),
            "placed on axis `pp`, and the ranks of one place are not neighbours",
        ),
        (
            {
                "mesh": {"pp": 2, "tp": 2},
                "rules": [{"match": "w", "cut": ["pp"]}, {"match": "*"}],
                "place": [{"match": "other", "axis": "pp", "at": 0}],
            },
            (4, 4),
            "axis `pp` cuts it, which places other tensors",
        ),
    ],
)
def test_what_a_strategy_cannot_say(mapping: dict[str, Any], shape: tuple[int, ...], reason: str | None) -> None:
    layout = ModelLayout.from_mapping(mapping)
    tensors = {"w": shape, "other": (2,)} if "other" in str(mapping) else {"w": shape}
    if reason is None:
        check_same(layout, layout.to_strategy(tensors), tensors)
        return
    with pytest.raises(UnsupportedError, match=re.escape(reason)) as caught:
        layout.to_strategy(tensors)
    assert caught.value.key == "w"


def test_how_ranks_are_counted() -> None:
    rules = [{"match": "w", "cut": ["tp"]}]
    turned = {"mesh": {"tp": 2, "dp": 3}, "ranks": [0, 2, 4, 1, 3, 5], "rules": rules}
    layout = ModelLayout.from_mapping(turned)
    strategy = layout.to_strategy({"w": (4,)})
    assert strategy.stages == {0: {"w": LayoutItem((3, 2), ((0,),))}}
    check_same(layout, strategy, {"w": (4,)})
    for ranks in ([0, 1, 2, 4, 3, 5], [1, 2, 3, 4, 5, 6]):
        with pytest.raises(UnsupportedError, match="a strategy numbers ranks"):
            ModelLayout.from_mapping({**turned, "ranks": ranks}).to_strategy({"w": (4,)})
    with pytest.raises(UnsupportedError, match="no tensor has dims"):
        layout.to_strategy({"w": ()})


def test_counters_are_not_listed_and_stages_of_nothing_are() -> None:
    layout = ModelLayout.from_mapping(
        {
            "mesh": {"pp": 3},
            "rules": [{"match": "*"}],
            "place": [{"match": ["w", "s"], "axis": "pp", "at": 1}],
        }
    )
    strategy = layout.to_strategy({"w": (2,), "s": (), "step": ()})
    assert {stage: list(items) for stage, items in strategy.stages.items()} == {0: [], 1: ["w", "s"], 2: []}


def test_the_folder_of_the_original(tmp_path: Path) -> None:
    """Written again from what was read, every rank's file means the same, and for a part of the ranks too."""
    shapes = {key: array.shape for key, array in reshard.load_file(FULL).items()}
    for path in STRATEGIES:
        strategy = read_strategy(path)
        printed = ModelLayout.from_mapping(as_layout(path).to_mapping())
        ours = printed.to_strategy(shapes)
        assert [list(ours.stages[stage]) for stage in ours.stages] == [
            sorted(items, key=list(shapes).index) for items in strategy.stages.values()
        ]
        for rank, (key, shape) in product(range(8), shapes.items()):
            local = slices_of(path, rank)[key].shape if key in slices_of(path, rank) else (1,) * len(shape)
            assert region_of(ours, key, rank, local) == region_of(strategy, key, rank, local)
        assert as_layout(path).to_strategy(shapes) is not None
    written = write_strategy(STRATEGIES[0], shapes, tmp_path / "new" / "strategy")
    assert [file.name for file in written] == [f"ckpt_strategy_rank_{rank}.ckpt" for rank in range(8)]
    assert read_strategy(tmp_path / "new" / "strategy").stages == read_strategy(STRATEGIES[0]).stages
    (one,) = write_strategy(STRATEGIES[0], shapes, tmp_path / "one", ranks=[5], suffix=".json", mode=0o600)
    assert one.name == "ckpt_strategy_rank_5.json"
    assert one.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ArgumentError, match="no rank 8"):
        write_strategy(STRATEGIES[0], shapes, tmp_path / "one", ranks=[8])
    with pytest.raises(ArgumentError, match="`suffix`"):
        write_strategy(STRATEGIES[0], shapes, tmp_path / "one", suffix=".pb")


# ---------------------------------------------------------------------------------------------------- the command line


def run(*arguments: object) -> Any:
    return CliRunner().invoke(main, ["strategy", *map(str, arguments)])


def test_the_commands(tmp_path: Path) -> None:
    merged = tmp_path / "merged.ckpt"
    result = run("merge", SAMPLES / "src_strategy", merged)
    assert result.exit_code == 0, result.output
    assert "10 tensors, 2 stages of 4 devices" in result.output
    assert merged.read_bytes() == (SAMPLES / "merged" / "src_merged_strategy.ckpt").read_bytes()
    again = run("merge", SAMPLES / "dst_strategy", merged)
    assert again.exit_code == 1
    assert "exists" in again.output
    assert run("merge", SAMPLES / "dst_strategy", merged, "--overwrite", "--json").exit_code == 0
    shown = run("show", merged)
    assert shown.exit_code == 0
    assert re.search(
        r"adam_m\.l0\.qkv\.weight +1 +\[2, 1\] +\[-1, -1\] +dim 0 split further over 2 devices, step 1", shown.output
    )
    one = run("show", SAMPLES / "src_strategy" / "ckpt_strategy_rank_4.ckpt")
    assert "missing   the strategy of stage 0" in one.output
    assert '"opt_weight_shard_size": 2' in run("show", merged, "--json").output
    layout = run("show", merged, "--layout")
    assert ModelLayout.from_strategy(merged).to_yaml() == layout.output
    for harmful in (FULL, DATA, tmp_path / "none"):
        result = run("show", harmful)
        assert result.exit_code == 1
        assert result.output.startswith("error: ")


def test_a_stage_of_a_large_number_is_shown(tmp_path: Path) -> None:
    write_strategy_file(tmp_path / "s.ckpt", stage_file((1 << 32) - 1, {"w": LayoutItem((2,), ((0,),))}))
    result = run("show", tmp_path / "s.ckpt")
    assert result.exit_code == 0
    assert "missing   the strategy of stage 0, 1, 2" in result.output
