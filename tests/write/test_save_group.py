"""`reshard.save` by real ranks over torch's store: they save together; one that fails, dies or is late harms nobody."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.helpers import original_reader
from tests.helpers.oracle import local_arrays
from tests.helpers.ranks import Job, Signal, no_longer_patient, only_missing

import reshard
from reshard.commit import manifest, protocol
from reshard.errors import GroupError
from reshard.storage.location import locate

if TYPE_CHECKING:
    from pathlib import Path

LAYOUT: dict[str, Any] = {
    "mesh": {"pp": 2, "tp": 2},
    "rules": [{"match": "*.w", "cut": ["tp"]}, {"match": "*.f", "flat": ["tp"]}, {"match": "*"}],
    "place": [{"match": "layers.{i}.*", "axis": "pp"}],
}
TP2 = {"mesh": {"tp": 2}, "rules": LAYOUT["rules"]}
MODEL = {
    "layers.0.w": np.arange(48.0).reshape(8, 6),
    "layers.1.w": np.arange(48.0).reshape(8, 6) + 100,
    "layers.1.f": np.arange(5, dtype=np.int32),
    "norm.b": np.arange(3, dtype=np.float32),
}
STATE = {"exp_avg.layers.0.w": MODEL["layers.0.w"] * 2, "global_step": np.array(17)}
SHAPES = {"layers.1.f": (5,)}


def save(group: Any, root: Path, iteration: int, layout: dict[str, Any] = LAYOUT, **options: Any) -> reshard.SaveReport:
    own = local_arrays(layout, MODEL | STATE, group.rank, list(STATE))
    model = {key: array for key, array in own.items() if key in MODEL}
    state = {key: array for key, array in own.items() if key in STATE}
    given: dict[str, Any] = {"timeout": 30, "commit": {"durable": False}} | options
    report: reshard.SaveReport = reshard.save(root, iteration, model, state, layout=layout, shapes=SHAPES, **given)
    return report


def check(root: Path, iteration: int) -> None:
    with reshard.open(root) as opened:
        assert opened.iteration == iteration
        arrays = opened.load()
        assert set(arrays) == set(MODEL | STATE)
        for key, array in (MODEL | STATE).items():
            assert arrays[key].dtype == array.dtype
            assert np.array_equal(arrays[key], array), key
    manifest.check_sizes(
        locate(root / f"iteration_{iteration:08d}"), manifest.read(locate(root / f"iteration_{iteration:08d}"))
    )
    tree = original_reader.read_tree(root)
    assert set(tree) == set(MODEL | STATE) - {"layers.1.f"}
    assert all(np.array_equal(tree[key], array) for key, array in (MODEL | STATE).items() if key in tree)


def staged(root: Path) -> list[str]:
    return [entry.name for entry in (root / ".staging").iterdir()]


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_save_together(tmp_path: Path, world_size: int) -> None:
    layout = LAYOUT if world_size == 4 else TP2

    def work(group: Any) -> list[Any]:
        extra = {"loop": {"epoch": 3}, "seed": reshard.per_rank({"rank": group.rank, "rng": np.arange(group.rank)})}
        reports = [
            save(
                group,
                tmp_path,
                10,
                layout,
                extra=extra,
                commit={"durable": True},
                verify={"after_save": True, "check_replicas": True},
            ),
            save(group, tmp_path, 20, layout, files={"dedup": False, "prefix": "x"}),
            save(group, tmp_path, 20, layout),  # once more
        ]
        return [[report.digest, report.n_files, report.n_bytes] for report in reports]

    with Job(world_size, work) as job:
        values = job.values()
    assert all(value == values[0] for value in values)
    assert [one[0] for one in values[0]][2] == manifest.read(locate(tmp_path / "iteration_00000020")).digest
    check(tmp_path, 20)
    original_reader.audit(tmp_path / "iteration_00000020", dedup=True)
    first = tmp_path / "iteration_00000010"
    assert {entry.name for entry in first.glob("extra-*.json")} == {f"extra-{r:07d}.json" for r in range(world_size)}
    assert staged(tmp_path) == []
    assert manifest.read(locate(first)).world_size == world_size


@pytest.mark.slow(disk=False)
def test_a_rank_that_raises_is_told_on_all_and_the_next_save_works(tmp_path: Path) -> None:
    def work(group: Any) -> list[str]:
        told = []
        options: dict[str, Any] = {"extra": {"x": object()}} if group.rank == 0 else {}
        for bad in (
            options,
            {"common": {"odd": 1}} if group.rank == 3 else {},
            {"files": {"prefix": "/"}} if group.rank else {},
        ):
            try:
                save(group, tmp_path, 5, **bad)
            except reshard.ReshardError as error:
                told.append(f"{type(error).__name__} {error}")
        save(group, tmp_path, 6)
        return told

    with Job(4, work) as job:
        for told in job.values():
            assert "rank 0: " in told[0]
            assert told[1].startswith("ArgumentError rank 3: `common` has `odd`")
            assert len(told) == 3
    check(tmp_path, 6)


def test_a_rank_that_fails_while_it_writes(tmp_path: Path) -> None:
    def work(group: Any) -> str:
        save(group, tmp_path, 1)
        if group.rank == 2:
            # Where its file is to appear, there is a folder.
            def occupy(done: int, total: int) -> None:
                raise OSError(28, "No space left on device")

            options: dict[str, Any] = {"progress": occupy}
        else:
            options = {}
        try:
            save(group, tmp_path, 2, **options)
        except reshard.ReshardError as error:
            return str(error)
        return "nothing"

    with Job(4, work) as job:
        assert all("rank 2: " in told and "No space left" in told for told in job.values())
    assert staged(tmp_path) == []
    check(tmp_path, 1)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_killed(tmp_path: Path, victim: int) -> None:
    writing, killed = Signal(), Signal()

    def work(group: Any) -> Any:
        save(group, tmp_path, 1)

        def stop(done: int, total: int) -> None:
            writing.set()
            signal.pause()

        def go_on(done: int, total: int) -> None:
            killed.wait()
            no_longer_patient()

        started = time.monotonic()
        try:
            save(group, tmp_path, 2, timeout=120, progress=stop if group.rank == victim else go_on)
        except GroupError:
            return time.monotonic() - started
        return None

    with Job(4, work) as job:
        writing.wait()
        job.kill(victim)
        killed.set()
        outcomes = job.outcomes()
    assert outcomes[victim] is None
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome is not None
            assert outcome["value"] < 60
    check(tmp_path, 1)
    assert len(staged(tmp_path)) == (victim == 0)  # the coordinator's death leaves it to the next one

    def again(group: Any) -> Any:
        return save(group, tmp_path, 2).iteration

    with Job(4, again) as job:
        assert job.values() == [2] * 4
    assert staged(tmp_path) == []
    check(tmp_path, 2)


@pytest.mark.slow
def test_a_rank_that_is_late_costs_the_attempt_alone(tmp_path: Path) -> None:
    given_up = Signal()

    def work(group: Any) -> list[str]:
        told = []
        if group.rank == 1:
            given_up.wait()
        try:
            with only_missing(1):
                save(group, tmp_path, 1, timeout=0.5 if group.rank == 1 else 30)  # nobody is there any more
        except GroupError as error:
            told.append(str(error))
        given_up.set()
        save(group, tmp_path, 2)
        return told

    with Job(4, work) as job:
        values = job.values()
    assert all(len(told) == 1 for told in values), values
    assert "rank 1 of 4" in values[0][0]
    assert not (tmp_path / "iteration_00000001").exists()
    check(tmp_path, 2)


def test_two_jobs_in_one_root(tmp_path: Path) -> None:
    reshard.save(tmp_path, 1, {"w": np.zeros(2)})

    def work(group: Any) -> str:
        try:
            save(group, tmp_path, 2, TP2)
        except reshard.ReshardError as error:
            return type(error).__name__
        return "saved"

    try:
        with Job(2, work) as job:
            refused = job.values()
    finally:
        protocol.release()
    assert refused == ["ClaimedError"] * 2
