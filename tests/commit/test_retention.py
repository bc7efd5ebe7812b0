"""What is kept and why, and that deleting touches nothing else."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import os
import random
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers import retained
from tests.helpers.small_saves import (
    all_held,
    debris,
    fail_with,
    folders,
    fork,
    found,
    in_child,
    kill_self,
    save,
    stopped_at,
    tracker,
    write_files,
)

from reshard import _core, opening
from reshard.commit import claims, filesystem, protocol, retention, save_log
from reshard.commit import manifest as manifests
from reshard.commit.retention import Debris, Facts, Incomplete, Unverified, Verified
from reshard.commit.roots import write_tracker
from reshard.commit.save_log import SaveRecord
from reshard.errors import ArgumentError, CheckpointNotFoundError, DamagedFileError
from reshard.options import Retention
from reshard.storage.local import LocalStore
from reshard.storage.location import locate
from reshard.storage.store import Abilities

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.storage.store import Lock


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "root"
    protocol.release()


def fill(root: Path, *iterations: int) -> None:
    for iteration in iterations:
        save(root, iteration, durable=False)


def iterations(root: Path) -> list[int]:
    return sorted(folders(root))


# -- the plan


def facts(*numbers: int, **changes: Any) -> list[Facts]:
    """Complete and verified ones; `bad=[...]` and so on make some of them something else."""
    return [
        Facts(
            n,
            f"iteration_{n:08d}",
            Debris()
            if n in changes.get("debris", ())
            else Incomplete("torn")
            if n in changes.get("bad", ())
            else Unverified(has_manifest=False)
            if n in changes.get("unverified", ())
            else Verified(),
            is_pinned=n in changes.get("pinned", ()),
            is_passed_over=n in changes.get("passed_over", ()),
            is_unhealthy=n in changes.get("unhealthy", ()),
        )
        for n in numbers
    ]


@pytest.mark.parametrize(
    ("given", "how", "gone"),
    [
        # the newest k complete ones, and what the tracker names
        (facts(), {"tracker": None, "keep": 1}, []),
        (facts(1), {"tracker": 1, "keep": 1}, []),
        (facts(1, 2, 3, 4), {"tracker": 4, "keep": 2}, [1, 2]),
        (facts(4, 2, 3, 1), {"tracker": 4, "keep": 2}, [1, 2]),
        (facts(1, 2, 3, 4), {"tracker": 4, "keep": 9}, []),
        (facts(1, 2, 3, 4), {"tracker": None, "keep": 1}, [1, 2, 3]),
        # incomplete ones do not count, and are not removed
        (facts(1, 2, 3, 4, bad=[3, 4]), {"tracker": 2, "keep": 2}, []),
        (facts(1, 2, 3, 4, 5, bad=[2, 4]), {"tracker": 5, "keep": 2}, [1]),
        (facts(1, 2, bad=[1, 2]), {"tracker": None, "keep": 1}, []),
        (facts(1, 2, 3, bad=[3]), {"tracker": 3, "keep": 1}, [1]),
        # pins; every Nth; the best
        (facts(1, 2, 3, 4, pinned=[1]), {"tracker": 4, "keep": 1}, [2, 3]),
        (facts(0, 5, 10, 15, 20, 25), {"tracker": 25, "keep": 1, "keep_every": 10}, [5, 15]),
        (facts(1, 2, 3, 4), {"tracker": 4, "keep": 1, "best": [2]}, [1, 3]),
        # above the tracker: left by a roll-back; it neither counts nor goes
        (facts(1, 2, 3, 4, 5), {"tracker": 3, "keep": 2}, [1]),
        (facts(1, 2, 3), {"tracker": 1, "keep": 1}, []),
        # refused at a roll-back: it does not count
        (facts(1, 2, 3, 4, passed_over=[3]), {"tracker": 4, "keep": 2}, [1, 3]),
        (facts(1, 2, 3, passed_over=[3]), {"tracker": 3, "keep": 1}, [1]),
        # never the last verified one
        (facts(1, 2, 3, 4, unverified=[2, 3, 4]), {"tracker": 4, "keep": 2}, [2]),
        (facts(1, 2, 3, 4, unverified=[3, 4]), {"tracker": 4, "keep": 2}, [1]),
        (facts(1, 2, 3, 4, unverified=[1, 2, 3, 4]), {"tracker": 4, "keep": 2}, [1, 2]),
        (facts(1, 2, 3, unverified=[2, 3], pinned=[1]), {"tracker": 3, "keep": 1}, [2]),
        # never the last one that was not saved as unhealthy
        (facts(1, 2, 3, 4, 5, unhealthy=[3, 4, 5]), {"tracker": 5, "keep": 2}, [1, 3]),
        (facts(1, 2, 3, 4, 5, unhealthy=[3, 4, 5], bad=[2]), {"tracker": 5, "keep": 2}, [3]),
        (facts(1, 2, 3, 4, 5, unhealthy=[3, 4, 5], pinned=[1], passed_over=[2]), {"tracker": 5, "keep": 2}, [2, 3]),
        (facts(1, 2, 3, unhealthy=[1, 2, 3]), {"tracker": 3, "keep": 1}, [1, 2]),
        (facts(1, 2, 3, unhealthy=[2]), {"tracker": 3, "keep": 1}, [1, 2]),
        # what is left of one that was being removed
        (facts(1, 2, 3, bad=[1], debris=[1]), {"tracker": 3, "keep": 3}, [1]),
    ],
)  # fmt: skip
def test_plan(given: list[Facts], how: dict[str, Any], gone: list[int]) -> None:
    wanted = Retention(**{name: how[name] for name in ("keep", "keep_every") if name in how})
    removed, kept = retention.plan(given, wanted, tracker=how["tracker"], best=how.get("best", ()))
    assert [one.iteration for one in removed] == gone
    assert sorted([*gone, *kept]) == sorted(one.iteration for one in given)


@pytest.mark.parametrize("seed", range(200))
def test_whatever_is_kept_the_last_healthy_one_stays(seed: int) -> None:
    chance = random.Random(seed)
    numbers = list(range(1, chance.randint(2, 12)))

    def some() -> list[int]:
        return [n for n in numbers if chance.random() < 0.3]

    bad, unhealthy, passed_over = some(), some() + numbers[chance.randint(0, len(numbers)) :], some()
    given = facts(*numbers, bad=bad, unhealthy=unhealthy, passed_over=passed_over, pinned=some(), unverified=some())
    tracker = chance.choice([None, *numbers])
    wanted = Retention(keep=chance.randint(1, 4), keep_every=chance.choice([None, 2, 5]))
    removed, _ = retention.plan(given, wanted, tracker=tracker, best=some())
    healthy = [n for n in numbers if n not in {*bad, *unhealthy, *passed_over} and (tracker is None or n <= tracker)]
    assert not healthy or healthy[-1] not in [one.iteration for one in removed]


def test_a_plan_says_why() -> None:
    given = facts(1, 2, 3, 4, 5, 6, 10, 11, 12, bad=[2], pinned=[1], unverified=[11])
    assert retention.plan(given, Retention(keep=2, keep_every=5), tracker=11, best=[4])[1] == {
        1: "pinned",
        2: "not complete: torn",
        4: "one of the best",
        5: "every 5",
        10: "one of the newest 2",
        11: "the tracker names it",
        12: "above the tracker",
    }
    assert retention.plan(facts(1, 2, unverified=[2]), Retention(keep=1), tracker=2)[1][1] == "the last verified one"


@pytest.mark.parametrize(
    "how", [{"keep": 0}, {"keep": -1}, {"keep": 1.5}, {"keep": True}, {"keep": None}, {"keep": 1, "keep_every": 0}]
)
def test_what_is_no_number(how: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="is a number of iterations from 1 on"):
        Retention(**how)


# -- the directory


def test_apply(root: Path) -> None:
    fill(root, 100, 200, 300, 400)
    expected = sum(entry.stat().st_size for n in (100, 200) for entry in folders(root)[n].iterdir())
    dry = retained.apply(locate(root), Retention(keep=2), dry_run=True)
    assert (dry.iterations, dry.n_bytes) == ((100, 200), expected)
    assert all_held(root) == {(100, 0), (200, 0), (300, 0), (400, 0)}
    done = retained.apply(locate(root), Retention(keep=2))
    assert (done.iterations, done.n_bytes, done.warnings) == ((100, 200), expected, ())
    assert done.kept == dry.kept == {300: "one of the newest 2", 400: "the tracker names it"}
    assert all_held(root) == {(300, 0), (400, 0)}
    assert not debris(root)
    assert retained.apply(locate(root), Retention(keep=2)).iterations == ()


def test_there_is_nothing_to_remember_from_before_a_restart(root: Path) -> None:
    """The list of the original lies in memory, and is empty after a restart."""
    for iteration in (100, 200, 300):
        in_child(partial(save, root, iteration))
    in_child(lambda: list(retained.apply(locate(root), Retention(keep=1)).iterations))
    assert all_held(root) == {(300, 0)}


def test_a_folder_that_is_gone_already_is_no_error(root: Path) -> None:
    """The original raises if the oldest folder was removed by hand."""
    fill(root, 100, 200, 300)
    shutil.rmtree(root / "iteration_00000100")
    assert retained.apply(locate(root), Retention(keep=1)).iterations == (200,)


def test_what_is_damaged_neither_counts_nor_goes(root: Path) -> None:
    fill(root, 100, 200, 300, 400)
    os.truncate(root / "iteration_00000300" / "common.json", 3)
    (root / "iteration_00000400" / "manifest.json").write_bytes(b"")
    done = retained.apply(locate(root), Retention(keep=1))
    assert done.iterations == (100,)
    assert iterations(root) == [200, 300, 400]
    assert "has 3 bytes, expected" in done.kept[300]
    assert "does not end in a digest" in done.kept[400]


def test_the_last_verified_one_stays(root: Path) -> None:
    fill(root, 100, 200)
    for iteration in (300, 400):  # as the original writes them
        shutil.copytree(root / "iteration_00000200", root / f"iteration_{iteration:08d}")
        for name in ("manifest.json", "checksums.bin", ".tracked"):
            (root / f"iteration_{iteration:08d}" / name).unlink()
    write_tracker(locate(root), 400)
    done = retained.apply(locate(root), Retention(keep=1), original_fault=lambda _: None)
    assert done.iterations == (100, 300)
    assert done.kept == {200: "the last verified one", 400: "the tracker names it"}


def original(root: Path, iteration: int, n_files: int = 2) -> Path:
    """An iteration as the original writes it, one device and no metadata.json."""
    folder = root / f"iteration_{iteration:08d}"
    folder.mkdir(parents=True)
    header = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}   '
    for index in range(n_files):
        content = len(header).to_bytes(8, "little") + header + b"x"
        (folder / f"model-{index:07d}-{n_files:07d}.safetensors").write_bytes(content)
    (folder / "common.json").write_text("{}")
    return folder


def test_iterations_of_the_original_count_if_their_files_are_there(root: Path) -> None:
    for iteration in (100, 200, 300, 400, 500):
        original(root, iteration)
    write_tracker(locate(root), 500)
    (root / "iteration_00000400" / "model-0000001-0000002.safetensors").unlink()
    done = retained.apply(locate(root), Retention(keep=2))
    assert done.iterations == (100, 200)
    assert "1 of 2 model files" in done.kept[400]


def test_with_metadata_the_files_that_it_names_must_be_there(root: Path) -> None:
    from reshard.formats.checkpoint2.metadata import write_metadata
    from reshard.formats.checkpoint2.shards import Records, TensorRecord, assign, shards_of
    from reshard.layout import Partition, TensorLayout

    mesh = _core.Mesh([("tp", 2)])
    records = [TensorRecord("w", "U8", "model", TensorLayout((2,), Partition((("tp",),))))]
    for iteration in (100, 200, 300):
        folder = original(root, iteration)
        plan = assign(shards_of(records, mesh), mesh.ranks, dedup=True)
        write_metadata(locate(folder / "metadata.json"), Records.of(records), mesh, plan)
    (root / "iteration_00000200" / "model-0000001-0000002.safetensors").unlink()
    write_tracker(locate(root), 300)
    done = retained.apply(locate(root), Retention(keep=1))
    assert done.iterations == (100,)
    assert "there is no file `model-0000001-0000002.safetensors`" in done.kept[200]


def test_shard_files_of_ours_without_a_manifest_are_not_complete(root: Path) -> None:
    fill(root, 100, 200, 300)
    (root / "iteration_00000200" / "manifest.json").unlink()
    done = retained.apply(locate(root), Retention(keep=1))
    assert done.iterations == (100,)
    assert done.kept[200] == "not complete: it holds shard files of this package, and no manifest"


def test_only_iterations_are_touched(root: Path, tmp_path: Path) -> None:
    fill(root, 100, 200, 300)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "manifest.json").write_text("mine")
    (root / "iteration_00000050").symlink_to("../outside")
    (root / "iteration_00000100" / "deep").mkdir()
    (root / "iteration_00000100" / "deep" / "link").symlink_to(tmp_path / "outside")
    for name in ("iteration_7x", "notes", ".hidden", "iteration_0000200"):
        (root / name).mkdir()
        (root / name / "file").write_text("mine")
    (root / "iteration_00000060").write_text("mine")
    assert retained.apply(locate(root), Retention(keep=1)).iterations == (100, 200)
    assert (tmp_path / "outside" / "manifest.json").read_text() == "mine"
    assert (root / "iteration_00000050").is_symlink()
    for name in ("iteration_7x", "notes", ".hidden", "iteration_0000200"):
        assert (root / name / "file").read_text() == "mine"
    assert (root / "iteration_00000060").read_text() == "mine"


def test_after_a_roll_back_what_was_refused_does_not_count(root: Path) -> None:
    fill(root, 100, 200, 300)
    protocol.release()
    save(root, 150, rollback=True, passed_over=(200, 300))
    assert retained.apply(locate(root), Retention(keep=1)).iterations == (100,)
    assert iterations(root) == [150, 200, 300]
    save(root, 200, 1)  # made anew: from here on it counts
    save(root, 350)
    assert retained.apply(locate(root), Retention(keep=2), dry_run=True).iterations == (300,)
    assert retained.apply(locate(root), Retention(keep=2)).kept == {
        150: "it records that a run skipped iteration 300, which is still there",
        200: "one of the newest 2",
        350: "the tracker names it",
    }
    assert retained.apply(locate(root), Retention(keep=2)).iterations == (150,)


def test_what_a_run_left_does_not_come_back_when_the_saves_after_it_are_removed(root: Path) -> None:
    fill(root, 20, 40, 120, 130)
    protocol.release()
    save(root, 60, rollback=True, passed_over=(120, 130))
    for iteration in (80, 100, 120, 140):
        save(root, iteration)
        retained.apply(locate(root), Retention(keep=2))
        order = opening.iterations(root)
        assert order is not None
        assert 130 not in [one.iteration for one in order.candidates]
    retained.apply(locate(root), Retention(keep=2))
    assert iterations(root) == [120, 140]


def test_pins(root: Path) -> None:
    fill(root, 100, 200, 300)
    protocol.pin(locate(root), 100)
    protocol.pin(locate(root), 100)
    assert retained.apply(locate(root), Retention(keep=1)).kept[100] == "pinned"
    assert held_iterations(root) == {100, 300}
    protocol.unpin(locate(root), 100)
    protocol.unpin(locate(root), 100)
    assert retained.apply(locate(root), Retention(keep=1)).iterations == (100,)
    for act in (protocol.pin, protocol.unpin):
        with pytest.raises(CheckpointNotFoundError, match="there is no iteration 100 in"):
            act(locate(root), 100)
        with pytest.raises(CheckpointNotFoundError, match="there is no folder"):
            act(locate(root / "absent"), 100)
    assert not (root / "absent").exists()


def held_iterations(root: Path) -> set[int]:
    return {iteration for iteration, _ in all_held(root)}


def test_a_root_that_is_not_there(root: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        retained.apply(locate(root), Retention(keep=1))
    assert not root.exists()


# -- the best


def log(root: Path, iteration: int, **metrics: float) -> None:
    save_log.append(locate(root), SaveRecord(iteration, "2026-01-31T12:00:00+00:00", 1.0, 0.1, 100, metrics))


def test_the_best_by_a_metric(root: Path) -> None:
    fill(root, 100, 200, 300, 400, 500)
    for iteration, loss in ((100, 2.0), (200, 1.0), (200, 3.0), (300, 2.5), (400, float("nan")), (900, 0.1)):
        log(root, iteration, loss=loss)
    assert retained.apply(locate(root), Retention(keep=1, best=("loss", 1)), dry_run=True).iterations == (200, 300, 400)
    assert retained.apply(locate(root), Retention(keep=1, best=("loss", 2)), dry_run=True).iterations == (200, 400)
    # The highest ones.
    assert retained.apply(locate(root), Retention(keep=1, best=("-loss", 1))).iterations == (100, 300, 400)
    assert held_iterations(root) == {200, 500}


def test_of_equals_the_newer_is_the_better(root: Path) -> None:
    fill(root, 100, 200, 300, 400)
    for iteration in (100, 200, 300):
        log(root, iteration, loss=1.0)
    assert retained.apply(locate(root), Retention(keep=1, best=("loss", 2))).iterations == (100,)


@pytest.mark.parametrize("line", [None, "", "{", '{"metrics": {"accuracy": 1}}'])
def test_without_the_metric_nothing_goes(
    line: str | None, root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(root, 100, 200)
    if line is not None:
        (root / "saves.jsonl").write_text(line)
    rules = Retention(keep=1, best=("loss", 1))
    with caplog.at_level("INFO", "reshard"):
        done = retained.apply(locate(root), rules)
    assert (done.iterations, done.warnings) == ((), ())  # the first evaluation of the run may be still to come
    (told,) = [one for one in caplog.records if "nothing is removed yet" in one.getMessage()]
    assert (told.levelname, "holds no metric `loss`" in told.getMessage()) == ("INFO", True)
    with pytest.raises(DamagedFileError, match="holds no metric `loss`"):
        retention.remove(locate(root), rules, original_fault=lambda folder: None)
    monkeypatch.setattr(retention, "_MANY", 0)  # then no save will have it
    done = retained.apply(locate(root), rules)
    assert done.iterations == ()
    assert "nothing is removed: the log of saves" in done.warnings[0]
    assert held_iterations(root) == {100, 200}


def test_a_metric_that_no_save_has_is_named_beside_those_that_they_have(root: Path) -> None:
    fill(root, 100, 200)
    log(root, 100, accuracy=1.0, val_loss=2.0)
    with pytest.raises(DamagedFileError, match=r"no manifest holds it; they hold `accuracy`, `val_loss`"):
        retention.remove(locate(root), Retention(keep=1, best=("loss", 1)), original_fault=lambda folder: None)


def test_a_number_of_best_ones_that_is_none() -> None:
    with pytest.raises(
        ArgumentError, match="`best` is \\('loss', 0\\), expected the name of a metric and a number from 1"
    ):
        Retention(keep=1, best=("loss", 0))


def test_the_manifest_goes_first_and_for_good(root: Path) -> None:
    fill(root, 100, 200)
    with stopped_at(1000, lambda: None) as seen:
        retained.apply(locate(root), Retention(keep=1))
    kinds = [line.split(" ")[0] for line in seen]
    first = kinds.index("unlink")
    assert kinds.index("rename") < first
    assert seen[first].endswith("manifest.json")
    assert kinds[first + 1] == "fsync"
    assert kinds[first + 2] == "unlink"


def test_no_file_is_open_in_a_folder_that_is_removed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(root, 100, 200)
    opened = []

    def look(step: str) -> None:
        if step.startswith("remove 100."):
            links = [os.path.realpath(name) for name in Path("/proc/self/fd").iterdir()]
            opened.append([link for link in links if "/.trash/100." in link and "manifest" in link])

    monkeypatch.setattr(filesystem, "_step", look)
    assert retained.remove(locate(root), Retention(keep=1)).iterations == (100,)
    assert opened == [[]]


# -- others at the same time


def test_what_is_being_read_is_passed_over(root: Path) -> None:
    fill(root, 100, 200, 300)
    reading, go = os.pipe()
    ready, tell = os.pipe()

    def read() -> list[bool]:
        lock = manifests.read_lock(locate(root / "iteration_00000100"))
        os.write(tell, b"x")
        os.read(reading, 1)
        whole = (100, 0) in all_held(root)
        lock.close()
        return [whole]

    child = fork(read)
    os.read(ready, 1)
    done = retained.apply(locate(root), Retention(keep=1))
    os.write(go, b"x")
    assert child.result() == [True]
    assert done.iterations == (200,)
    assert done.kept[100] == "it is being read"
    assert done.warnings == ("iteration 100 is being read: it is removed another time",)
    assert retained.apply(locate(root), Retention(keep=1)).iterations == (100,)
    for handle in (reading, go, ready, tell):
        os.close(handle)


def test_a_reader_that_comes_late_is_told(root: Path) -> None:
    fill(root, 100, 200)
    folder = root / "iteration_00000100"
    retained.apply(locate(root), Retention(keep=1))
    with pytest.raises(CheckpointNotFoundError):
        manifests.read_lock(locate(folder))


def test_no_lock_is_left(root: Path) -> None:
    fill(root, 100, 200)
    retained.apply(locate(root), Retention(keep=1))
    with (root / "iteration_00000200" / "manifest.json").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    gc.collect()  # files of objects of other tests are not closed in between
    before = len(list(Path("/proc/self/fd").iterdir()))
    retained.apply(locate(root), Retention(keep=1))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_tracker_is_read_under_the_lock(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may go back to an older iteration while this one waits."""
    fill(root, 100, 200, 300)
    real = LocalStore.lock

    def lock(*args: Any, **more: Any) -> Lock:
        write_tracker(locate(root), 100)
        return real(*args, **more)

    monkeypatch.setattr(LocalStore, "lock", lock)
    assert retained.apply(locate(root), Retention(keep=1)).iterations == ()
    assert found(root) == (100, 0)


def test_retention_needs_no_claim(root: Path) -> None:
    """`prune` beside a run that is saving."""
    fill(root, 100, 200, 300)
    attempt = protocol.begin(locate(root), 400)
    told = write_files(attempt.staging, 400, 0)
    assert in_child(lambda: list(retained.apply(locate(root), Retention(keep=1)).iterations)) == [100, 200]
    protocol.publish(attempt, protocol.seal(attempt, told, world_size=2))
    assert all_held(root) == {(300, 0), (400, 0)}


# -- errors


@pytest.mark.slow(disk=False)
def test_an_error_at_any_change_is_a_warning(root: Path) -> None:
    fill(root, 100, 200, 300)
    protocol.release()
    for place in range(100):
        base = root.with_name(f"root{place}")
        shutil.copytree(root, base)
        with stopped_at(place, fail_with(errno.EIO)) as seen:
            done = retained.apply(locate(base), Retention(keep=1))
        failed = len(seen) > place
        assert bool(done.warnings) is failed
        assert found(base) == (300, 0)
        for iteration in done.iterations:
            assert iteration not in folders(base)
        assert not retained.apply(locate(base), Retention(keep=1)).warnings
        assert held_iterations(base) == {300}
        save(base, 400, durable=False)
        assert not debris(base)
        protocol.release()
        if not failed:
            break
    assert place > 8


def test_a_lock_that_is_not_free_is_a_warning(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(root, 100, 200)
    monkeypatch.setattr(claims, "_LOCK_SECONDS", 0.05)
    with claims.locked(locate(root)):
        done = retained.apply(locate(root), Retention(keep=1))
    assert done.iterations == ()
    assert "retention stopped" in done.warnings[0]
    assert tracker(root) == 200
    assert json.loads((root / "iteration_00000100" / "manifest.json").read_bytes())["iteration"] == 100


def test_an_iteration_whose_replacement_was_interrupted_is_kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStore, "abilities", lambda *_: Abilities(renames_folders=True, exchanges=False))
    in_child(lambda: fill(root, 1, 2, 3))

    def between_two_renames() -> None:
        filesystem._step = lambda name: kill_self() if name.startswith("rename 3.") else None
        save(root, 3, 1)

    assert in_child(between_two_renames) is None
    removed = retained.remove(locate(root), Retention(keep=1))
    assert removed.iterations == (1,)
    assert "its replacement was interrupted" in removed.kept[3]
    assert found(root) == (3, 0)
