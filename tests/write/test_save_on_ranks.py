"""`reshard.save` on ranks, in worlds of threads under random layouts: what was given is what is found."""

from __future__ import annotations

import enum
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import original_reader
from tests.helpers.arrays import as_bytes
from tests.helpers.oracle import local_arrays, mesh_ranks
from tests.helpers.original_reader import KNOWN
from tests.helpers.strategies import KINDS, Array, Checkpoint, cases, checkpoints, kinds, layouts
from tests.helpers.threads import in_threads
from tests.helpers.told import is_without_gaps, states_of, told_shapes
from tests.write.saves import TP2, no_claim_outlives_a_test

import reshard
from reshard.commit import protocol
from reshard.errors import (
    ArgumentError,
    CoverageError,
    LayoutError,
    MismatchError,
    ReshardError,
)
from reshard.formats.checkpoint2.planning import plan_iteration
from reshard.formats.replicas import RankLocal
from reshard.write.rank_facts import LastMade

__all__ = ["no_claim_outlives_a_test"]  # a fixture

pytestmark = pytest.mark.disk

ZEROS = np.zeros(2)
WHOLE2 = {"mesh": {"tp": 2}, "rules": [{"match": "*"}]}

# -- ranks


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([], ["b.w", "a.w", "m.b.w", "m.a.w"]),
        (["m.a.w"], ["b.w", "a.w", "m.a.w"]),
        (["m.b.w", "m.a.w"], ["b.w", "a.w", "m.b.w", "m.a.w"]),
    ],
)
def test_joined_state_is_of_all_parameters_or_of_those_that_are_told(
    told: list[str], expected: list[str], tmp_path: Path
) -> None:
    """With padding the arrays alone would not tell: those of one parameter and of two are of one length."""
    layout = {"mesh": {"dp": 1}, "rules": [{"match": "*", "flat": {"axes": ["dp"], "join": "all", "align": 4}}]}
    model = {"all": np.arange(8, dtype=np.float32)}
    state = {"m.all": np.arange(8 if len(expected) == 4 else 4, dtype=np.float32) + 10}
    shapes = dict.fromkeys(["b.w", "a.w", *told], (4,))
    reshard.save(tmp_path, 1, model, state, layout=layout, shapes=shapes, commit={"durable": False})
    with reshard.open(tmp_path) as opened:
        assert sorted(opened.keys("all")) == sorted(expected)
        assert opened.read("a.w").tolist() == [0, 1, 2, 3]
        assert opened.read("b.w").tolist() == [4, 5, 6, 7]
        assert opened.read("m.a.w").tolist() == [10, 11, 12, 13]


def test_each_slot_has_the_state_of_its_own_parameters(tmp_path: Path) -> None:
    """What is told of one slot is no parameter of another one, though the rule's pattern matches it too."""
    layout = {"mesh": {"dp": 1}, "rules": [{"match": "*", "flat": {"axes": ["dp"], "join": "all"}}]}
    state = {"m.all": np.ones(2, np.float32), "v.all": np.full(6, 2, np.float32)}
    shapes = {"a": (4,), "b": (2,), "m.b": (2,)}
    reshard.save(
        tmp_path, 1, {"all": np.zeros(6, np.float32)}, state, layout=layout, shapes=shapes, commit={"durable": False}
    )
    with reshard.open(tmp_path) as opened:
        assert {key: opened.read(key).tolist() for key in opened.keys("optimizer")} == {
            "m.b": [1, 1],
            "v.a": [2] * 4,
            "v.b": [2] * 2,
        }


@pytest.mark.slow
def test_what_ranks_save_under_any_layout_is_the_checkpoint() -> None:
    seen: Counter[str] = Counter()

    @cases(80)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        checkpoint: Checkpoint = data.draw(checkpoints())
        mapping = data.draw(layouts(checkpoint, max_ranks=8).filter(is_without_gaps))
        dedup = data.draw(st.booleans())
        as_shards = data.draw(st.booleans())
        seen.update(kinds(mapping))
        told = told_shapes(mapping, checkpoint)
        states = states_of(mapping, checkpoint)
        world_size = len(mesh_ranks(mapping))
        with tempfile.TemporaryDirectory() as name:
            root = Path(name)

            def work(group: Any) -> Any:
                own = local_arrays(mapping, checkpoint.tensors, group.rank, checkpoint.optimizer_keys)
                shapes = dict(told)
                model: dict[str, object] = {}
                optimizer: dict[str, object] = {}
                for key, value in own.items():
                    part = optimizer if key in states else model
                    part[key] = value
                    if as_shards and key in told:
                        part[key] = reshard.Shard(value, shapes.pop(key))
                return reshard.save(
                    root, 3, model, optimizer, layout=mapping, shapes=shapes, files={"dedup": dedup}, group=group,
                    commit={"durable": False}, timeout=20, verify={"check_replicas": True},
                )  # fmt: skip

            reports = in_threads(world_size, work)
            for report in reports:
                if isinstance(report, Exception):
                    raise report
            protocol.release()
            assert len({report.digest for report in reports}) == 1
            with reshard.open(root) as opened:
                assert as_bytes(opened.load()) == as_bytes(checkpoint.tensors)
                assert set(opened.keys("optimizer")) == states & checkpoint.tensors.keys()
                expressible = {k: a for k, a in checkpoint.tensors.items() if k not in opened.tiled_keys()}
            if {str(a.dtype) for a in checkpoint.tensors.values()} <= KNOWN:
                assert as_bytes(original_reader.read_tree(root)) == as_bytes(expressible)
            original_reader.audit(Path(reports[0].path), dedup=dedup)

    check()
    # That every kind can be converted and inverted is seen elsewhere; here worlds are small.
    assert len(KINDS - set(seen)) <= 5


@pytest.mark.slow(disk=False)
def test_boxes_without_a_layout() -> None:
    @cases(40)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
        tensor = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
        world_size = data.draw(st.integers(1, 4))
        cut = sorted(data.draw(st.lists(st.integers(0, rows), min_size=world_size - 1, max_size=world_size - 1)))
        ends = [*cut, rows]
        dedup = data.draw(st.booleans())
        with tempfile.TemporaryDirectory() as name:

            def work(group: Any) -> Any:
                first = ([0, *cut])[group.rank]
                box = tensor[first : ends[group.rank]]
                model = {
                    "cut": reshard.Shard(box, tensor.shape, (first, 0)),
                    "whole": reshard.Shard(tensor, tensor.shape, (0, 0)),
                    "step": np.int64(9),
                }
                if group.rank == world_size - 1:
                    model["mine"] = reshard.Shard(tensor, tensor.shape, (0, 0))
                return reshard.save(
                    name, 1, model, files={"dedup": dedup}, group=group, commit={"durable": False}, timeout=20
                )

            reports = in_threads(world_size, work)
            assert not [report for report in reports if isinstance(report, Exception)], reports
            protocol.release()
            with reshard.open(name) as opened:
                expected = {"cut": tensor, "whole": tensor, "step": np.array(9), "mine": tensor}
                assert as_bytes(opened.load()) == as_bytes(dict(sorted(expected.items()))) or as_bytes(
                    opened.load()
                ) == {key: as_bytes(expected)[key] for key in opened}
                assert set(opened.keys()) == set(expected)
                assert set(opened.tiled_keys()) == ({"cut", "mine"} if world_size > 1 else set())
            read = original_reader.read_tree(Path(name))
            assert all(read[key].tobytes() == expected[key].tobytes() for key in ("whole", "step"))

    check()


def shards(*boxes: tuple[int, int], n: int = 4) -> list[dict[str, object]]:
    return [{"w": reshard.Shard(np.zeros(end - first), (n,), (first,))} for first, end in boxes]


@pytest.mark.parametrize(
    ("models", "options", "error", "words"),
    [
        (shards((0, 2), (3, 4)), {}, CoverageError, "the regions that the ranks hold: the stored shards of `w` leave"),
        (shards((0, 2), (3, 4)), {}, CoverageError, "hint: each element is in one region, or in equal ones: check"),
        (shards((0, 3), (2, 4)), {}, CoverageError, "the regions that the ranks hold: `w`: stored regions"),
        ([{"w": np.zeros(2)}] * 2, {}, ArgumentError, "plain array"),
        ([{"b": ZEROS}, {"b": np.zeros(2, np.float32)}], {"layout": TP2}, MismatchError, "F64 on rank 0 and F32"),
        ([{"b": np.zeros((2, 3))}, {"b": np.zeros((2, 4))}], {"layout": TP2}, LayoutError, "on rank 0 and 4 on rank 1"),
        ([{"a.w": ZEROS, "b": ZEROS}, {"a.w": ZEROS}], {"layout": TP2}, MismatchError, "rank 1 gave no `b`"),
        ([{"a.w": np.zeros(2)}] * 2, {"layout": TP2, "shapes": {"q": (2,)}}, ArgumentError, "q"),
        ([{"a.w": np.zeros(2)}] * 2, {"layout": TP2, "shapes": {"a.w": (5,)}}, LayoutError, "a.w"),
        ([{"a.w": np.zeros(2)}] * 3, {"layout": TP2}, LayoutError, "one of 2 ranks"),
        ([{"b": ZEROS}, {"b": ZEROS + 1}], {"layout": WHOLE2}, MismatchError, "crc32c 42709aea on rank 0; crc32c"),
        ([{"a.w": reshard.Shard(np.zeros(2), (4,), (0,))}] * 2, {"layout": TP2}, ArgumentError, "says where it lies"),
    ],
)  # fmt: skip
def test_ranks_that_disagree(
    models: list[dict[str, object]], options: dict[str, Any], error: type[ReshardError], words: str, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    found = in_threads(
        len(models), lambda group: reshard.save(root, 1, models[group.rank], group=group, timeout=20, **options)
    )
    for one in found:
        assert isinstance(one, error), one
        assert words in str(one)
    assert not root.exists()


def test_options_that_differ_between_ranks(tmp_path: Path) -> None:
    root = tmp_path / "root"
    found = in_threads(
        2,
        lambda group: reshard.save(
            root, 1, {"b": np.zeros(2)}, group=group, layout=TP2, files={"dedup": group.rank == 0}, timeout=60
        ),
    )
    assert all("`dedup` is True on rank 0 and False on rank 1" in str(one) for one in found)


def save_copies(root: Path, group: Any, **options: Any) -> Any:
    """A tensor of which each rank has a copy of its own; `same` is equal."""
    arrays = {"b": np.full(2, 1.0 + group.rank), "same": np.zeros(3)}
    saved = reshard.save(root, 1, arrays, group=group, layout=WHOLE2, timeout=60, **options)
    return saved if options.get("blocking", True) else saved.result(30)


@pytest.mark.parametrize(
    "options", [{"blocking": False}, {"files": {"dedup": False}}, {"format": "checkpoint1"}], ids=str
)
def test_replicas_that_differ_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    found = in_threads(2, lambda group: save_copies(tmp_path / "root", group, **options))
    for one in found:
        assert isinstance(one, MismatchError), one
        assert "`b`: the copies on the ranks that hold it differ: crc32c " in str(one)
        assert " on rank 0; crc32c " in str(one)
        assert one.key == "b"
    assert not list((tmp_path / "root").rglob("*.safetensors"))
    (tmp_path / "other").mkdir()
    for report in in_threads(
        2, lambda group: save_copies(tmp_path / "other", group, verify={"check_replicas": False}, **options)
    ):
        assert isinstance(report, reshard.SaveReport), report


def test_one_pattern_is_not_taken_for_a_list_of_its_characters(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"`may_differ` is 'bias', expected a list of patterns, such as"):
        reshard.save(tmp_path, 1, {"bias": np.zeros(2)}, layout=WHOLE2, verify={"may_differ": "bias"})


@pytest.mark.parametrize("options", [{}, {"blocking": False}, {"format": "checkpoint1"}], ids=str)
def test_copies_that_may_differ_are_kept_for_each_rank(tmp_path: Path, options: dict[str, Any]) -> None:
    found = in_threads(2, lambda group: save_copies(tmp_path, group, verify={"may_differ": ["b*", "same"]}, **options))
    assert all(isinstance(report, reshard.SaveReport) for report in found), found
    with reshard.open(tmp_path) as opened:
        assert opened.read("b").tolist() in ([1, 1], [2, 2])
        for rank in range(2):
            kept = opened.extra(rank)["rank_local"]
            assert {name: array.tolist() for name, array in kept["differing"].items()} == {"b": [1.0 + rank] * 2}
            assert (kept["rank"], kept["world_size"]) == (rank, 2)


def test_equal_copies_leave_no_trace(tmp_path: Path) -> None:
    def work(group: Any) -> Any:
        return reshard.save(
            tmp_path,
            1,
            {"b": np.ones(2)},
            group=group,
            layout=WHOLE2,
            timeout=60,
            verify={"may_differ": ["*"]},
            extra={"n": 3},
        )

    assert all(isinstance(report, reshard.SaveReport) for report in in_threads(2, work))
    assert reshard.open(tmp_path).extra(1) == {"n": 3}


def test_arrays_that_are_being_filled_are_summed_when_they_are_ready(tmp_path: Path) -> None:
    def work(group: Any) -> Any:
        array = np.zeros(4)

        def ready() -> None:
            array[:] = group.rank if group.rank < 2 else 7

        pending = reshard.save(
            tmp_path, 1, {"b": array}, group=group, layout=WHOLE2, timeout=60, ready=ready, blocking=False,
            rank_local=RankLocal({"codes": array}),
        )  # fmt: skip
        return pending.result(30)

    for one in in_threads(2, work):
        assert isinstance(one, MismatchError), one
    protocol.release()
    root = tmp_path / "one"
    array = np.zeros(4)
    options: dict[str, Any] = {"ready": lambda: array.fill(5), "blocking": False}
    reshard.save(root, 1, {"b": array}, rank_local=RankLocal({"codes": array}), **options).result(30)
    assert reshard.open(root).extra()["rank_local"]["state"]["codes"].tolist() == [5] * 4


@pytest.mark.parametrize(
    ("extras", "words"),
    [
        ([{"n": {"a": 1}}, {"n": {"a": 2}}], "`n` in `extra` differs between ranks: `n.a` is 1 on rank 0, 2 on rank 1"),
        ([{"n": np.zeros(3)}, {"n": np.arange(3.0)}], "between ranks: `n[1]` is 0.0 on rank 0, 1.0 on rank 1"),
        ([{}, {"n": 1}], "`extra` has `n` on rank 1 and not on rank 0"),
        ([{"rank_local": 1}, {}], "`rank_local`, a name that is taken"),
        ([{"n": 1}, {}], None),
        ([{"n": {"a": 1, "b": float("nan")}}, {"n": {"b": float("nan"), "a": 1}}], None),
        ([{"n": reshard.per_rank(1)}, {"n": reshard.per_rank(2)}], None),
    ],
)
def test_extra_that_differs_between_ranks(tmp_path: Path, extras: list[dict[str, Any]], words: str | None) -> None:
    found = in_threads(
        2,
        lambda group: reshard.save(
            tmp_path, 1, {"b": np.ones(2)}, group=group, layout=WHOLE2, timeout=60, extra=extras[group.rank]
        ),
    )
    for one in found:
        if words is None:
            assert isinstance(one, reshard.SaveReport), one
        else:
            assert isinstance(one, MismatchError | ArgumentError), one
            assert words in str(one)


def test_ranks_that_write_nothing(tmp_path: Path) -> None:
    reports = in_threads(
        4,
        lambda group: reshard.save(
            tmp_path, 1, {"global_step": np.int32(8)}, group=group, timeout=60,
            layout={"mesh": {"dp": 4}, "rules": [{"match": "*"}]},
        ),
    )  # fmt: skip
    assert [report.n_files for report in reports] == [1] * 4
    assert original_reader.read_tree(tmp_path)["global_step"] == 8


BOUND = reshard.ModelLayout.from_mapping(
    {"mesh": {"tp": 2}, "rules": [{"match": "f*", "flat": ["tp"], "optional": True}, {"match": "*", "cut": ["tp"]}]}
)
WHOLE = {"w": np.arange(8.0).reshape(4, 2), "a": np.arange(4.0)}


def saved_bound(root: Path, layout: Any, model: Any) -> list[Any]:
    """Two ranks save under a layout that is bound already: what the call of each returned, or its error."""
    return in_threads(
        2,
        lambda group: reshard.save(
            root, 1, model(group.rank), layout=layout, group=group, commit={"durable": False}, timeout=60
        ),
    )


def test_a_bound_layout_saves_what_its_rules_save(tmp_path: Path) -> None:
    bound = BOUND.bind({"more": (6,), "a": (4,), "w": (4, 2)})  # of more tensors, in another order
    for name, layout in (("rules", BOUND), ("bound", bound)):
        saved_bound(
            tmp_path / name, layout, lambda rank: {key: one[rank * 2 :][: len(one) // 2] for key, one in WHOLE.items()}
        )
    with reshard.open(tmp_path / "rules") as rules, reshard.open(tmp_path / "bound") as found:
        assert as_bytes(found.load()) == as_bytes(rules.load()) == as_bytes(WHOLE)
    names = [sorted((tmp_path / name / "iteration_00000001").iterdir()) for name in ("rules", "bound")]
    assert [one.name for one in names[0]] == [one.name for one in names[1]]
    texts = [(tmp_path / name / "iteration_00000001" / "metadata.json").read_bytes() for name in ("rules", "bound")]
    assert texts[0] == texts[1]


def test_arrays_beside_a_bound_layout_lie_by_its_rules(tmp_path: Path) -> None:
    saved_bound(
        tmp_path, BOUND.bind({"w": (4, 2)}), lambda rank: {"w": WHOLE["w"][rank * 2 :][:2], "new": ZEROS + rank}
    )
    with reshard.open(tmp_path) as found:
        assert as_bytes(found.load()) == as_bytes({"w": WHOLE["w"], "new": np.array([0.0, 0.0, 1.0, 1.0])})


def test_a_shard_of_another_tensor_than_the_bound_one_is_refused(tmp_path: Path) -> None:
    shard = reshard.Shard(np.zeros((2, 2)), (5, 2))
    for one in saved_bound(tmp_path, BOUND.bind({"w": (4, 2)}), lambda _: {"w": shard}):
        assert isinstance(one, MismatchError)
        assert "the global shape of `w` is (5, 2), the layout expects (4, 2)" in str(one)


def test_a_plan_does_not_serve_other_shapes_of_equal_arrays(tmp_path: Path) -> None:
    for shape in ((2, 3), (3, 2)):  # each rank holds 3 of 6 elements of both
        saved_bound(tmp_path / str(shape), BOUND.bind({"f": shape}), lambda rank: {"f": np.arange(3.0) + 3 * rank})
        with reshard.open(tmp_path / str(shape)) as found:
            assert as_bytes(found.load()) == as_bytes({"f": np.arange(6.0).reshape(shape)})


def test_a_plan_serves_until_something_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from reshard.formats.checkpoint2 import save as module

    made: list[int] = []
    real = plan_iteration

    def counted(*args: Any, **options: Any) -> Any:
        made.append(1)
        return real(*args, **options)

    monkeypatch.setattr(module, "plan_iteration", counted)
    monkeypatch.setattr(module, "_plans", LastMade())
    narrow = np.zeros(3, np.int8)
    cases: list[tuple[int, dict[str, Array], dict[str, Any]]] = [
        (1, {"w": ZEROS}, {}),
        (0, {"w": ZEROS + 1}, {"common": {"epoch_num": 2}}),
        (1, {"w": ZEROS, "v": ZEROS}, {}),
        (1, {"w": np.zeros(3), "v": ZEROS}, {}),
        (1, {"w": narrow, "v": ZEROS}, {}),
        (1, {"w": narrow, "v": ZEROS}, {"files": {"prefix": "x"}}),
        (0, {"w": narrow + 1, "v": ZEROS}, {"files": {"prefix": "x"}}),
    ]
    for iteration, (n_made, model, options) in enumerate(cases):
        made.clear()
        reshard.save(tmp_path, iteration, model, commit={"durable": False}, **options)
        assert len(made) == n_made
        with reshard.open(tmp_path) as opened:
            assert as_bytes(opened.load()) == as_bytes(model)


def test_hosts_that_share_nothing_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    monkeypatch.setattr("reshard.verbs.save._host", lambda: threading.current_thread().name)
    model = {"w": np.zeros(2)}
    layout = {"mesh": {"dp": 2}, "rules": [{"match": "*"}]}

    def work(group: Any) -> Any:
        return reshard.save(tmp_path, 1, model, group=group, layout=layout, timeout=60)

    monkeypatch.delenv("SHARED_PATHS", raising=False)
    for error in in_threads(2, work):
        assert isinstance(error, ArgumentError)
        assert error.hint is not None
        assert "SHARED_PATHS" in error.hint
    monkeypatch.setenv("SHARED_PATHS", f"/elsewhere,{tmp_path}")
    assert [report.iteration for report in in_threads(2, work)] == [1, 1]


def test_a_name_of_a_subclass_of_text_is_saved_as_its_text(tmp_path: Path) -> None:
    class Name(str, enum.Enum):  # noqa: UP042  not StrEnum, whose text is its value
        W = "enumerated"

    given = [np.str_("w"), np.str_("w\u00e9"), np.str_("it's"), Name.W]
    for iteration in (1, 2):  # the second save uses the plan of the first
        reshard.save(tmp_path / "root", iteration, {name: np.full(3, i) for i, name in enumerate(given)})
    with reshard.open(tmp_path / "root") as checkpoint:
        assert sorted(checkpoint.keys()) == ["enumerated", "it's", "w", "w\u00e9"]
        for i, name in enumerate(["w", "w\u00e9", "it's", "enumerated"]):
            assert checkpoint.read(name).tolist() == [i] * 3
