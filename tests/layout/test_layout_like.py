"""The layout of a stored checkpoint: what comes out, bound again, gives each rank the slices that it stores."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reshard
from reshard._core import DeviceLayout
from reshard.errors import LayoutError
from reshard.formats.base import CheckpointData
from reshard.layout import ModelLayout

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Stored = tuple[tuple[int, ...], "list[int] | None", list[Any], list[str], list[int]]
"""Shape, device matrix (None: a null layout), tensor map as metadata.json has it, aliases, ranks."""


@dataclass
class Fake:
    """What `like` asks of a checkpoint."""

    tensors: dict[str, Stored]
    layout: Mapping[str, object] | None = None
    optimizer: set[str] = field(default_factory=set)
    is_shared: bool = False

    def keys(self, part: Literal["all", "optimizer"] = "all", /) -> list[str]:
        return [key for key in self.tensors if part == "all" or key in self.optimizer]

    def _info(self, key: str) -> tuple[str, tuple[int, ...]]:
        return "F32", self.tensors[key][0]

    def _device_layouts(self) -> dict[str, Any]:
        found = {
            key: None if matrix is None else DeviceLayout(matrix, [as_list(axes) for axes in tensor_map], alias, ranks)
            for key, (_, matrix, tensor_map, alias, ranks) in self.tensors.items()
        }
        one_of = {repr(layout): layout for layout in found.values()}
        return {key: one_of[repr(layout)] for key, layout in found.items()} if self.is_shared else found

    def _layout_mapping(self) -> Mapping[str, object] | None:
        return self.layout


def as_list(axes: int | list[int]) -> list[int]:
    return [axis for axis in ([axes] if isinstance(axes, int) else axes) if axis >= 0]


def stored_slice(tensor: Stored, rank: int) -> tuple[slice, ...]:
    """The slice of a rank after the rules of the format: coordinates in the matrix, axes counted from the last."""
    shape, matrix, tensor_map, _, ranks = tensor
    assert matrix is not None
    coordinates = np.unravel_index(ranks.index(rank), matrix)
    slices = []
    for extent, axes in zip(shape, tensor_map, strict=True):
        index, parts = 0, 1
        for axis in as_list(axes):
            size = matrix[len(matrix) - 1 - axis]
            index = index * size + int(coordinates[len(matrix) - 1 - axis])
            parts *= size
        size = extent // parts
        slices.append(slice(index * size, (index + 1) * size))
    return tuple(slices)


def check(checkpoint: Fake) -> ModelLayout:
    """Every rank of the layout holds what it stores, and nothing of other stages."""
    layout = ModelLayout.like(checkpoint)
    shapes = {key: stored[0] for key, stored in checkpoint.tensors.items()}
    bound = layout.bind(shapes, optimizer_keys=checkpoint.optimizer, strict=True)
    for key, stored in checkpoint.tensors.items():
        if stored[1] is None:
            continue
        assert bound.layouts[key].holders() == stored[4], key
        for rank in stored[4]:
            (tile,) = bound.layouts[key].tiles(rank)
            offset, shape, local_offset, _ = tile
            assert tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True)) == stored_slice(stored, rank), key
            assert local_offset == 0
    return layout


AB = ["a", "b"]
STAGE0, STAGE1 = [0, 1, 2, 3], [4, 5, 6, 7]


def test_a_checkpoint_of_two_stages_and_its_state() -> None:
    tensors: dict[str, Stored] = {
        "embed.w": ((16, 8), [2, 2], [0, -1], AB, STAGE0),
        "layers.0.norm.w": ((8,), [2, 2], [-1], AB, STAGE0),
        "layers.0.proj.w": ((8, 4), [2, 2], [-1, 0], AB, STAGE0),
        "layers.1.norm.w": ((8,), [2, 2], [-1], AB, STAGE1),
        "layers.1.proj.w": ((8, 4), [2, 2], [-1, 0], AB, STAGE1),
        "layers.1.bias": ((4,), None, [], [], []),
        "norm.w": ((8,), [2, 2], [-1], AB, STAGE1),
        "adam_m.layers.0.proj.w": ((8, 4), [2, 2], [-1, 0], AB, STAGE0),
        "adam_m.layers.1.proj.w": ((8, 4), [2, 2], [-1, 0], AB, STAGE1),
    }
    layout = check(Fake(tensors, optimizer={key for key in tensors if key.startswith("adam")}))
    assert layout.to_mapping() == {
        "mesh": {"pp": 2, "a": 2, "b": 2},
        "rules": [
            {"match": "embed.w", "cut": ["b"]},
            {"match": "layers.*.proj.w", "cut": [None, "b"]},
            {"match": "*"},
        ],
        "place": [
            {"match": "layers.{i}.*", "axis": "pp"},
            {"match": "embed.w", "axis": "pp", "at": 0},
            {"match": "norm.w", "axis": "pp", "at": -1},
        ],
    }


def test_state_that_is_cut_further_by_one_axis_is_said_by_add() -> None:
    tensors: dict[str, Stored] = {
        "w": ((8, 4), [2, 2], [0, -1], AB, STAGE0),
        "v": ((8, 4), [2, 2], [-1, 0], AB, STAGE0),
        "m.w": ((8, 4), [2, 2], [[0, 1], -1], AB, STAGE0),
        "m.v": ((8, 4), [2, 2], [1, 0], AB, STAGE0),
    }
    layout = check(Fake(tensors, optimizer={"m.w", "m.v"}))
    assert layout.optimizer.add == {0: ("a",)}
    assert [rule.match for rule in layout.rules] == [("w",), ("v",)]


def test_state_that_is_cut_in_no_one_way_does_not_follow() -> None:
    tensors: dict[str, Stored] = {
        "l.0.w": ((8, 4), [2, 2], [0, -1], AB, STAGE0),
        "l.0.v": ((8, 4), [2, 2], [-1, 0], AB, STAGE0),
        "m.l.0.w": ((8, 4), [2, 2], [0, -1], AB, STAGE0),
        "m.l.0.v": ((8, 4), [2, 2], [1, 0], AB, STAGE0),
        "factored.l.0.v": ((8,), [2, 2], [1], AB, STAGE0),
    }
    layout = check(Fake(tensors, optimizer={key for key in tensors if not key.startswith("l.")}))
    assert layout.to_mapping() == {
        "mesh": {"a": 2, "b": 2},
        "rules": [
            {"match": "*l.*.w", "cut": ["b"]},
            {"match": "l.*.v", "cut": [None, "b"]},
            {"match": "m.l.*.v", "cut": ["a", "b"]},
            {"match": "factored.l.*.v", "cut": ["a"]},
        ],
        "optimizer": {"follow": False},
    }


def test_a_tensor_on_all_stages_is_placed_on_none() -> None:
    tensors: dict[str, Stored] = {
        "layers.0.w": ((8, 4), [2, 2], [0, -1], AB, STAGE0),
        "layers.1.w": ((8, 4), [2, 2], [0, -1], AB, STAGE1),
        "layers.0.tied": ((8, 4), [2, 2, 2], [0, 1], ["pp", *AB], STAGE0 + STAGE1),
        "scale": ((4,), [8], [-1], ["all"], STAGE0 + STAGE1),
    }
    layout = check(Fake(tensors))
    assert layout.mesh == {"pp": 2, "a": 2, "b": 2}
    assert "tied" not in str(layout.to_mapping()["place"])


def test_a_tensor_on_some_stages_is_on_all_and_told(caplog: pytest.LogCaptureFixture) -> None:
    stages = [[0, 1], [2, 3], [4, 5]]
    tensors: dict[str, Stored] = {f"l.{n}.w": ((4,), [2], [0], ["x"], ranks) for n, ranks in enumerate(stages)}
    tensors["tied"] = ((4,), [2, 2], [0], ["pp", "x"], [0, 1, 4, 5])
    layout = ModelLayout.like(Fake(tensors))
    assert layout.bind({key: stored[0] for key, stored in tensors.items()}).layouts["tied"].holders() == list(range(6))
    assert "on all: `tied`" in caplog.text


def test_a_tensor_that_is_divided_over_the_stages_is_refused() -> None:
    tensors: dict[str, Stored] = {
        "layers.0.w": ((8, 4), [2, 2], [0, -1], AB, STAGE0),
        "layers.1.w": ((8, 4), [2, 2], [0, -1], AB, STAGE1),
        "tied": ((8, 4), [4, 2], [1, -1], AB, STAGE0 + STAGE1),
    }
    with pytest.raises(LayoutError, match="tensors lie on different groups of ranks"):
        ModelLayout.like(Fake(tensors))


def test_different_matrices_are_refined_to_one_mesh() -> None:
    ranks = list(range(8))
    tensors: dict[str, Stored] = {
        "a": ((8, 8), [2, 4], [1, 0], ["dp", "tp"], ranks),
        "b": ((8, 8), [4, 2], [1, 0], ["a", "b"], ranks),
        "c": ((8, 8), [8], [-1, 0], ["a"], ranks),
        "d": ((8, 8), [1, 2, 2, 1, 2], [[1, 2], 0], ["one", "dp", "b", "two", "z"], ranks),
    }
    layout = check(Fake(tensors))
    # The outer axis is `dp` wherever it stands alone; the others have two names, or a name that stands for two axes.
    assert layout.mesh == {"dp": 2, "axis0": 2, "axis1": 2}
    assert list(layout.mesh) == ["dp", "axis0", "axis1"]


def test_matrices_without_a_common_mesh_are_refused() -> None:
    ranks = list(range(6))
    tensors: dict[str, Stored] = {
        "a": ((6,), [2, 3], [0], AB, ranks),
        "b": ((6,), [3, 2], [0], AB, ranks),
    }
    with pytest.raises(LayoutError, match=r"\[2, 3\], \[3, 2\] cannot be refined to one mesh: 3 is no multiple of 2"):
        ModelLayout.like(Fake(tensors))


@pytest.mark.parametrize("ranks", [[0, 1, 2, 4], [1, 0, 3, 2], [4, 5]])
def test_stages_that_are_no_stages_are_refused(ranks: list[int]) -> None:
    tensors: dict[str, Stored] = {
        "a": ((4,), [2, 2], [0], AB, STAGE0),
        "b": ((4,), [2, len(ranks) // 2], [0], AB, ranks),
    }
    with pytest.raises(LayoutError, match="tensors lie on different groups of ranks"):
        ModelLayout.like(Fake(tensors))


@pytest.mark.parametrize(
    ("matrix", "tensor_map", "message"),
    [
        ([2, 3], [0], r"device matrix \[2, 3\] and its axes do not fit its 4 ranks"),
        ([2, 2], [2], "names an axis outside"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(matrix: list[int], tensor_map: list[int], message: str) -> None:
    with pytest.raises(LayoutError, match=message) as caught:
        ModelLayout.like(Fake({"w": ((4,), matrix, tensor_map, AB, STAGE0)}))
    assert caught.value.key == "w"


def test_a_checkpoint_without_device_layouts_is_replicated() -> None:
    assert ModelLayout.like(Fake({"w": ((4,), None, [], [], [])})) == ModelLayout.replicated()
    assert ModelLayout.like(Fake({})) == ModelLayout.replicated()


def test_a_stored_layout_is_used_as_it_is() -> None:
    mapping = {"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"], "sizes": {"0": [3, 1]}}]}
    checkpoint = Fake({"w": ((4,), [2, 2], [0], AB, STAGE0)}, layout=mapping)
    assert ModelLayout.like(checkpoint).to_mapping()["rules"] == [{"match": "*", "cut": ["tp"], "sizes": {0: [3, 1]}}]


def test_ranks_that_do_not_begin_at_zero_are_written() -> None:
    assert check(Fake({"w": ((4,), [2], [0], ["x"], [5, 9])})).to_mapping() == {
        "mesh": {"x": 2},
        "ranks": [5, 9],
        "rules": [{"match": "w", "cut": ["x"]}],
    }
    assert check(Fake({"w": ((4,), [1], [0], ["x"], [3])})).to_mapping()["ranks"] == [3]


def test_keys_that_look_like_patterns_are_kept_apart() -> None:
    tensors: dict[str, Stored] = {
        "a*": ((4,), [2], [0], ["x"], [0, 1]),
        "ab": ((4,), [2], [-1], ["x"], [0, 1]),
        "re:a": ((4,), [2], [0], ["x"], [0, 1]),
        "l.?.1": ((4,), [2], [0], ["x"], [0, 1]),
        "l.0.1": ((4,), [2], [-1], ["x"], [0, 1]),
        "{i}.2": ((4,), [2], [0], ["x"], [2, 3]),
    }
    check(Fake(tensors))


@pytest.mark.parametrize(
    ("stages", "entry"),
    [
        ([0, 0, 1, 1], {}),
        ([0, 1, 1, 1], {"sizes": [1, 3]}),
        ([0, 1, 0, 1], {"to": [0, 1, 0, 1]}),
        ([1, 1, 0, 0], {"to": [1, 1, 0, 0]}),
    ],
)
def test_stages_by_layer(stages: list[int], entry: dict[str, Any]) -> None:
    ranks = [[0, 1], [2, 3]]
    tensors: dict[str, Stored] = {
        f"layers.{n}.{name}": ((4,), [2], [0], ["pp"], ranks[stage])
        for n, stage in enumerate(stages)
        for name in ("1.w", "2.w")
    }
    # The name of the axis within a stage is taken: the stages get another.
    assert check(Fake(tensors)).to_mapping() == {
        "mesh": {"stage": 2, "pp": 2},
        "rules": [{"match": "layers.*.*.w", "cut": ["pp"]}],
        "place": [{"match": "layers.{i}.*", "axis": "stage", **entry}],
    }


def test_a_layer_of_which_nothing_is_known_has_no_stage() -> None:
    tensors: dict[str, Stored] = {
        "l.0.w": ((4,), [2], [0], ["x"], [0, 1]),
        "l.1.w": ((4,), None, [], [], []),
        "l.2.w": ((4,), [2], [0], ["x"], [2, 3]),
        "l.3.w": ((4,), [2], [0], ["x"], [2, 3]),
    }
    # `l.1.w` is whole on every rank, so no pattern for the others may match it.
    assert check(Fake(tensors)).to_mapping() == {
        "mesh": {"pp": 2, "x": 2},
        "rules": [{"match": ["l.0.w", "l.2.w", "l.3.w"], "cut": ["x"]}, {"match": "*"}],
        "place": [
            {"match": "l.0.w", "axis": "pp", "at": 0},
            {"match": ["l.2.w", "l.3.w"], "axis": "pp", "at": -1},
        ],
    }


@st.composite
def checkpoints(draw: st.DrawFn) -> Fake:
    """Layers of tensors on stages of up to 8 ranks, each kind of tensor with a device matrix of its own."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3]), min_size=1, max_size=3))
    size = int(np.prod(factors))
    n_stages = draw(st.integers(1, 3))
    stages = [list(range(stage * size, (stage + 1) * size)) for stage in range(n_stages)]
    n_layers = draw(st.integers(1, 4))

    def device_layout() -> tuple[tuple[int, ...], list[int], list[Any], list[str]]:
        matrix = list(factors)
        while len(matrix) > 1 and draw(st.booleans()):  # fold two neighbours
            at = draw(st.integers(0, len(matrix) - 2))
            matrix[at : at + 2] = [matrix[at] * matrix[at + 1]]
        axes = list(draw(st.permutations(range(len(matrix)))))
        shape = tuple(size * draw(st.integers(1, 2)) for _ in range(draw(st.integers(0, 2))))
        tensor_map: list[Any] = []
        for _ in shape:
            taken = [axes.pop() for _ in range(draw(st.integers(0, len(axes))))]
            tensor_map.append(taken if len(taken) > 1 else taken[0] if taken else -1)
        alias = draw(st.sampled_from([["a", "b", "c"], ["dp", "ep", "tp"], ["pp", "tp", "a"]]))[: len(matrix)]
        return shape, matrix, tensor_map, alias

    by_layer = {n: draw(st.integers(0, n_stages - 1)) for n in range(n_layers)}
    tensors: dict[str, Stored] = {}
    optimizer: set[str] = set()
    for name in draw(
        st.lists(st.sampled_from(["w", "b", "1", "e.0", "e.1", "*"]), min_size=1, max_size=4, unique=True)
    ):
        kind = device_layout()
        for n in range(n_layers):
            own = device_layout() if draw(st.integers(0, 5)) == 0 else kind
            tensors[f"l.{n}.{name}"] = (*own, stages[by_layer[n]])
        if draw(st.booleans()):
            state = device_layout() if draw(st.booleans()) else kind
            for n in range(n_layers):
                tensors[f"m.l.{n}.{name}"] = (*state, stages[by_layer[n]])
                optimizer.add(f"m.l.{n}.{name}")
    tensors["head"] = (*device_layout(), stages[draw(st.integers(0, n_stages - 1))])
    if n_stages > 1:
        shape, matrix, tensor_map, alias = device_layout()
        every = [rank for stage in stages for rank in stage]
        tensors["l.0.tied"] = (shape, [n_stages, *matrix], tensor_map, ["all", *alias], every)
    return Fake(tensors, optimizer=optimizer)


@pytest.mark.slow
@settings(max_examples=300)
@given(checkpoints())
def test_whatever_is_stored_is_described(checkpoint: Fake) -> None:
    layout = check(checkpoint)
    shared = ModelLayout.like(dataclasses.replace(checkpoint, is_shared=True))
    assert shared.to_mapping() == layout.to_mapping()


def test_the_shards_of_each_tensor_are_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of many ranks has thousands, each with the names of its files."""
    source, rules = tmp_path / "src.safetensors", [{"match": "*", "cut": ["tp"]}]
    reshard.save_file({f"w{i}": np.zeros(8, np.float32) for i in range(20)}, source)
    reshard.convert(source, tmp_path / "tree", layout={"mesh": {"tp": 4}, "rules": rules})
    asked: list[int] = []
    file_name = CheckpointData.file_name

    def counted(data: CheckpointData, file: int) -> str:
        asked.append(file)
        return file_name(data, file)

    monkeypatch.setattr(CheckpointData, "file_name", counted)
    with reshard.open(tmp_path / "tree") as checkpoint:
        assert ModelLayout.like(checkpoint).mesh == {"tp": 4}
        assert asked == []
        for key in checkpoint.keys():  # noqa: SIM118  not a mapping
            assert len(checkpoint[key].shards) == 4
        assert len(asked) == 4


def test_of_one_rank_no_rules_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a search would find, which takes as long as the rest of opening 100,000 tensors."""
    monkeypatch.setattr(reshard.layout.like, "_Writer", None)
    one = Fake({"w": ((4, 2), [1], [0, -1], ["tp"], [0]), "b": ((), None, [], [], [0])})
    assert ModelLayout.like(one).to_mapping() == {"mesh": {"dp": 1}, "rules": [{"match": "*"}]}
    with pytest.raises(TypeError):
        ModelLayout.like(Fake({"w": ((4, 2), [1], [0, -1], ["tp"], [1])}))
