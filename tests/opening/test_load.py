"""`reshard.load`: what a run goes on from, in one process, in worlds of threads and of real processes.

The trees are made by hand (`sealed`); what is expected of a rank is a slice that numpy takes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.helpers import sealed
from tests.helpers.sealed import FILES, TP2
from tests.helpers.threads import in_threads

import reshard
from reshard.commit import manifest as manifests
from reshard.commit.session import PassedOver, session_of
from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    ConfigError,
    DamagedFileError,
    KeyNotFoundError,
    LayoutError,
    MismatchError,
    ReshardError,
    StorageError,
    UnsupportedError,
)
from reshard.resume import RunFacts
from reshard.storage.location import locate
from reshard.verbs.load import LoadRequest, load_with

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.ranks.group import Group
    from reshard.resume import ResumeDecision
    from reshard.storage.location import Location

SAMPLES = Path(__file__).parents[1] / "data" / "mindspore"
TP4 = {"mesh": {"tp": 4}, "rules": [{"match": ["w", "adam_m.w"], "cut": ["tp"]}, {"match": "*"}]}


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "root"
    sealed.make(root, 5)
    sealed.make(root, 10, previous_tracker=5)
    yield root
    session_of(locate(root)).resumed = None


def damage(root: Path, name: str, iteration: int = 10, at: int = -1) -> None:
    """Flip a bit; by default of the last byte, which only reading finds."""
    path = root / f"iteration_{iteration:08d}" / name
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    return set(found) == set(expected) and all(found[key].tobytes() == expected[key].tobytes() for key in expected)


# -- one process


def test_the_newest_is_loaded(root: Path) -> None:
    got = reshard.load(root)
    assert got.iteration == 10
    assert same(got.state, sealed.arrays_of(10))
    assert got.common is not None
    assert got.common.global_step == 10
    decision = got.decision
    assert (decision.iteration, decision.fresh, decision.is_verified, decision.initial_step) == (10, False, True, 10)
    assert "optimizer" in decision.restored
    assert got.extra == {}
    assert session_of(locate(root)).resumed is None


@pytest.mark.parametrize("verify", ["touched", "full"])
def test_damage_found_while_loading_takes_the_older_one(verify: Any, root: Path) -> None:
    damage(root, FILES["opt", 1])
    got = reshard.load(root, verify=verify)
    assert got.iteration == 5
    assert same(got.state, sealed.arrays_of(5))
    first, second = got.decision.verdicts
    assert (first.iteration, first.taken, second.iteration, second.taken) == (10, False, 5, True)
    assert FILES["opt", 1] in first.reason
    assert any("iteration_00000010 is skipped" in warning for warning in got.decision.warnings)
    assert session_of(locate(root)).resumed == PassedOver(5, (10,))
    with pytest.raises(DamagedFileError):  # it is left as it is
        reshard.open(root / "iteration_00000010").load()


@pytest.mark.parametrize("fault", ["missing", "altered"])
def test_a_skipped_checkpoint_is_logged_once(fault: str, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    if fault == "missing":
        (root / "iteration_00000010" / FILES["opt", 1]).unlink()
    else:
        damage(root, FILES["opt", 1])
    with caplog.at_level(logging.WARNING, "reshard"):
        reshard.load(root)
    (line,) = (line for line in caplog.messages if "is skipped" in line)
    assert line.startswith("load: iteration_00000010 is skipped: ")
    assert FILES["opt", 1] in line
    assert "`out`" not in line


def test_full_finds_what_is_not_wanted(root: Path) -> None:
    damage(root, FILES["opt", 1])
    assert reshard.load(root, part="model").iteration == 10
    assert reshard.load(root, part="model", verify="full").iteration == 5
    assert not same(reshard.load(root, verify="structure").state, sealed.arrays_of(10))


def test_when_every_one_is_damaged_each_is_named(root: Path) -> None:
    damage(root, FILES["model", 1])
    damage(root, "common.json", 5)
    sealed.make(root, 20, tracked=False, previous_tracker=5)
    with pytest.raises(DamagedFileError) as caught:
        reshard.load(root)
    lines = str(caught.value).splitlines()
    for name, fault in (("10", FILES["model", 1]), ("05", "common.json"), ("20", "another line of saves")):
        assert fault in next(line for line in lines if f"iteration_000000{name}" in line)
    fresh = reshard.load(root, allow_fresh=True)
    assert (fresh.decision.fresh, fresh.state) == (True, {})


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOTCONN, errno.ECONNRESET, errno.EKEYEXPIRED])
@pytest.mark.parametrize("name", ["manifest.json", "common.json", "latest_checkpointed_iteration.txt"])
def test_a_lost_connection_is_no_damage(name: str, number: int, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an older iteration, nor one that the tracker no longer names, nor a fresh start."""
    reshard.rollback(root, 5)
    real, lost = os.open, str(root / name if name.startswith("latest") else root / "iteration_00000005" / name)

    def opened(path: Any, *args: Any, **options: Any) -> int:
        if str(path) == lost or (options.get("dir_fd") is not None and lost.endswith(f"5/{path}")):
            raise OSError(number, os.strerror(number))
        return real(path, *args, **options)

    assert reshard.load(root).iteration == 5
    monkeypatch.setattr(os, "open", opened)
    for allow_fresh in (False, True):
        with pytest.raises(StorageError, match=os.strerror(number)) as caught:
            reshard.load(root, allow_fresh=allow_fresh)
        assert caught.value.errno == number
    with pytest.raises(StorageError):
        reshard.open(root)


@pytest.mark.parametrize("make", ["absent", "empty", "left by a first save"])
def test_an_empty_root_is_a_fresh_start(make: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    if make != "absent":
        root.mkdir()
    if make == "left by a first save":
        (root / ".staging").mkdir()
    got = reshard.load(root, TP2)
    assert (got.iteration, got.state, got.common, got.extra, got.decision.fresh) == (None, {}, None, {}, True)


@pytest.mark.parametrize("name", ["latest_checkpointed_iteration.txt", "notes.txt"])
def test_anything_else_is_no_fresh_start(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("10")
    with pytest.raises(ReshardError):
        reshard.load(tmp_path)


def test_an_iteration_by_its_number(root: Path) -> None:
    folder = root / "iteration_00000005"
    for got in (reshard.load(root, iteration=5), reshard.load(root / "iteration_5"), reshard.load(folder)):
        assert got.iteration == 5
        assert same(got.state, sealed.arrays_of(5))
        assert session_of(locate(root)).resumed is None
    assert reshard.load(root).iteration == 10
    assert session_of(locate(root)).resumed is None
    damage(root, FILES["opt", 0], 5)
    with pytest.raises(DamagedFileError, match=FILES["opt", 0]):
        reshard.load(root, iteration=5)
    with pytest.raises(DamagedFileError, match=FILES["opt", 0]):
        reshard.load(folder)
    with pytest.raises(CheckpointNotFoundError, match="hint: choose an iteration that exists"):
        reshard.load(root, iteration=7)
    with pytest.raises(ArgumentError):
        reshard.load(root / "iteration_5", iteration=5)


def test_what_is_wrong_with_the_call_is_not_rolled_back_from(root: Path) -> None:
    wrong: list[tuple[type[ReshardError], dict[str, Any]]] = [
        (LayoutError, {"layout": {"mesh": {"tp": 3}, "rules": [{"match": "*", "cut": ["tp"]}]}, "rank": 0}),
        (ArgumentError, {"layout": TP2}),
        (KeyNotFoundError, {"keys": ["x"]}),
        (MismatchError, {"keys": ["w"], "reading": {"out": {"w": np.zeros(3, np.float32)}}}),
        (ArgumentError, {"verify": "sometimes"}),
    ]
    for error, options in wrong:
        with pytest.raises(error):
            reshard.load(root, **options)
    with pytest.raises(ArgumentError, match="root"):
        reshard.load()


def test_every_option_of_a_load_is_handed_on(root: Path) -> None:
    truth = sealed.arrays_of(10)
    assert same(reshard.load(root, TP2, rank=1, keys=["w"]).state, {"w": truth["w"][2:]})
    out = {"w": np.zeros((4, 2), np.float32)}
    assert reshard.load(root, keys=["w"], reading={"out": out}).state["w"] is out["w"]
    assert same(out, {"w": truth["w"]})
    assert list(reshard.load(root, part="optimizer").state) == ["adam_m.w"]
    assert reshard.load(root, dtype="float16", keys=["w"]).state["w"].dtype == np.float16
    told: list[tuple[int, int]] = []
    views = reshard.load(
        root, reading={"copy": False, "method": "map"}, progress=lambda *done: told.append(done), threads=1
    )
    assert same(views.state, truth)  # and outlives the checkpoint
    reshard.load(root, progress=lambda *done: told.append(done))
    assert told[-1] == (sum(array.nbytes for array in truth.values()),) * 2


def test_arrays_that_were_given_hold_the_older_one_after_a_roll_back(root: Path) -> None:
    damage(root, FILES["model", 1])
    out = {key: np.zeros_like(array) for key, array in sealed.arrays_of(5).items()}
    assert reshard.load(root, reading={"out": out}).iteration == 5
    assert same(out, sealed.arrays_of(5))


def test_by_a_configuration(root: Path, tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(f"load_checkpoint: {root}\nresume_training: True\n")
    got = reshard.load(config=tmp_path / "train.yaml", run=RunFacts(global_batch_size=8))
    assert (got.iteration, got.decision.global_batch_size) == (10, 8)
    weights = reshard.load(root, config={"resume_training": False})
    assert (set(weights.state), weights.decision.initial_step) == ({"w", "b"}, 0)
    other = reshard.load(root / "iteration_5", config=tmp_path / "train.yaml")
    assert other.iteration == 5
    nothing = reshard.load(config={"load_checkpoint": ""})
    assert (nothing.decision.fresh, nothing.state) == (True, {})


def test_only_healthy_ones(root: Path) -> None:
    for iteration, status in ((5, 0), (10, 1)):
        folder = root / f"iteration_{iteration:08d}"
        (folder / "common.json").write_text(json.dumps({"step_num": iteration, "ckpt_status": status}))
        sealed.seal(folder, iteration, ckpt_status=status)
    config = {"resume_training": True, "use_checkpoint_health_monitor": True}
    assert reshard.load(root, config=config).iteration == 5
    assert reshard.load(root).iteration == 10


def test_checkpoints_of_the_original_are_loaded_unverified() -> None:
    got = reshard.load(SAMPLES / "ckpt2" / "checkpoint", verify="full")
    assert (got.iteration, got.decision.is_verified) == (10, False)
    with reshard.open(SAMPLES / "ckpt2" / "checkpoint") as opened:
        assert same(got.state, opened.load())


def test_weights_of_others(tmp_path: Path) -> None:
    save_file({"w": np.ones(3)}, tmp_path / "model.safetensors")
    assert reshard.load(tmp_path, config={"resume_training": False}).state["w"].sum() == 3
    with pytest.raises(UnsupportedError, match="weights"):
        reshard.load(tmp_path)


def test_in_the_background(root: Path) -> None:
    pending = reshard.load_async(root, TP2, 1)
    got = pending.result(timeout=60)
    assert same(got.state, {key: array if key == "b" else array[2:] for key, array in sealed.arrays_of(10).items()})
    assert pending.done()
    assert pending.result() is got
    failing = reshard.load_async(root, iteration=7)
    for _ in range(2):
        with pytest.raises(ReshardError):
            failing.result(60)
    may_end = threading.Event()
    slow = reshard.load_async(root, progress=lambda *_: may_end.wait(60))
    with pytest.raises(TimeoutError):
        slow.result(timeout=0.01)
    assert not slow.done()
    slow._pid += 1
    with pytest.raises(ArgumentError, match="forked"):
        slow.done()
    slow._pid -= 1
    may_end.set()
    assert slow.result(60).iteration == 10


def test_state_beside_the_tensors(root: Path) -> None:
    from reshard.formats import state

    folder = root / "iteration_00000010"
    for rank, value in ((0, {"step": 3, "rng": np.arange(4)}), (1, {"rng": np.arange(4) + 10})):
        text, arrays = state.dump(value)
        (folder / state.file_name(rank)).write_text(text)
        save_file(dict(arrays), folder / state.arrays_file_name(rank))
    sealed.seal(folder, 10)
    for rank, expected in ((0, np.arange(4)), (1, np.arange(4) + 10)):
        extra = reshard.load(root, TP2, rank).extra
        assert (extra["step"], extra["rng"].tolist()) == (3, expected.tolist())
    with reshard.open(root) as opened:
        assert opened.extra(rank=7) == {"step": 3}  # a rank that was not there has nothing of its own
    assert reshard.load(root, iteration=5).extra == {}
    for name in (state.file_name(0), state.arrays_file_name(0)):
        damage(root, name)
        assert reshard.load(root).iteration == 5
        damage(root, name)
        assert reshard.load(root).iteration == 10
    damage(root, state.arrays_file_name(1))
    assert reshard.load(root).iteration == 10
    assert reshard.load(root, verify="full").iteration == 5


# -- several ranks


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_rank_gets_its_part(world_size: int, root: Path) -> None:
    layout = {2: TP2, 4: TP4}[world_size]
    loaded = in_threads(world_size, lambda group: reshard.load(root, layout, group=group, timeout=60))
    for rank, got in enumerate(loaded):
        rows = slice(rank * 4 // world_size, (rank + 1) * 4 // world_size)
        expected = {key: array if key == "b" else array[rows] for key, array in sealed.arrays_of(10).items()}
        assert same(got.state, expected)
        assert got.decision == loaded[0].decision
        assert got.decision.is_resharded is (world_size != 2)


def test_a_rank_that_the_group_does_not_give_is_refused(root: Path) -> None:
    outcomes = in_threads(2, lambda group: reshard.load(root, TP2, rank=0, group=group, timeout=60))
    assert all(isinstance(one, ReshardError) for one in outcomes)
    assert "`rank` is 0, but this process is rank 1 of 2" in str(outcomes[1])


@pytest.mark.parametrize("rank", [0, 1])
def test_damage_on_one_rank_takes_the_older_one_on_all(rank: int, root: Path) -> None:
    """The bit lies in a file that only this rank reads."""
    damage(root, FILES["opt", rank])
    loaded = in_threads(2, lambda group: reshard.load(root, TP2, group=group, timeout=60))
    assert [got.iteration for got in loaded] == [5, 5]
    assert loaded[0].decision == loaded[1].decision
    reason = loaded[0].decision.verdicts[0].reason
    assert reason.startswith(f"rank {rank}: ")
    assert FILES["opt", rank] in reason
    for number, got in enumerate(loaded):
        assert got.state["w"].tobytes() == sealed.arrays_of(5)["w"][2 * number : 2 * number + 2].tobytes()


def test_a_full_scrub_is_shared_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from reshard.commit import scrub

    seen: list[tuple[str, str]] = []
    scrub_file = scrub.scrub_file

    def spy(folder: Location, manifest: Any, name: str, *args: Any, **options: Any) -> Any:
        seen.append((threading.current_thread().name, name))
        return scrub_file(folder, manifest, name, *args, **options)

    monkeypatch.setattr(scrub, "scrub_file", spy)
    in_threads(2, lambda group: reshard.load(root, TP2, group=group, verify="full", timeout=60))
    assert sorted(name for _, name in seen) == sorted(FILES.values())  # each once
    assert len({thread for thread, _ in seen}) == 2
    damage(root, FILES["model", 0])
    damage(root, FILES["model", 0], 5, at=10)
    errors = in_threads(2, lambda group: reshard.load(root, TP2, group=group, verify="full", timeout=60))
    assert all(isinstance(error, DamagedFileError) for error in errors)


def test_what_fails_on_one_rank_is_raised_on_all(root: Path) -> None:
    def work(group: Group) -> reshard.Loaded:
        keys = ["w"] if group.rank == 0 else ["no such tensor"]
        return reshard.load(root, TP2, group=group, keys=keys, timeout=60)

    for error in in_threads(2, work):
        assert isinstance(error, KeyNotFoundError)
        assert "rank 1" in str(error)
    for error in in_threads(2, lambda group: reshard.load(root / "iteration_7", TP2, group=group, timeout=60)):
        assert isinstance(error, ReshardError)
    for got in in_threads(2, lambda group: reshard.load(root / "new", TP2, group=group, timeout=60)):
        assert isinstance(got, CheckpointNotFoundError | reshard.Loaded)


def test_what_one_rank_cannot_mean_is_told_to_all_at_once(root: Path) -> None:
    for error in in_threads(2, lambda group: reshard.load(root, TP2, 0, group=group, timeout=60)):
        assert isinstance(error, ArgumentError)
        assert "rank 1" in str(error)

    def work(group: Group) -> reshard.Loaded:
        config = {"load_chekpoint": ""} if group.rank else {}
        return reshard.load(root, TP2, group=group, config=config, timeout=60)

    for error in in_threads(2, work):
        assert isinstance(error, ConfigError)


def test_other_ranks_look_only_at_what_they_use(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rank 0 asks for the sizes of all files, and only it checks the headers of all."""
    seen = []
    real = manifests.check_sizes

    def spy(*args: Any) -> None:
        seen.append(threading.current_thread().name)
        real(*args)

    monkeypatch.setattr(manifests, "check_sizes", spy)
    in_threads(4, lambda group: reshard.load(root, TP4, group=group, timeout=60))
    assert len(seen) == 1


def test_a_rank_that_sees_another_checkpoint_waits_and_then_fails(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It never loads what rank 0 has not chosen. Here the folder is replaced once rank 0 has opened it."""
    from reshard.opening.gather import gather_both as real
    from reshard.verbs import load as module

    monkeypatch.setattr(module, "_VISIBLE_SECONDS", 0.05)

    def late(*args: Any, **options: Any) -> Any:
        facts = real(*args, **options)
        sealed.seal(root / "iteration_00000010", 10, generation=2)
        return facts

    monkeypatch.setattr(module, "gather_both", late)
    for error in in_threads(2, lambda group: reshard.load(root, TP2, group=group, timeout=60)):
        assert isinstance(error, MismatchError)
        assert "does not see" in str(error)


def test_a_folder_that_is_seen_late_is_waited_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from reshard import opening

    real = opening.open_chosen
    n_looks = 0

    def blind(chosen: Any, **options: Any) -> Any:
        nonlocal n_looks
        n_looks += 1
        if n_looks == 1:  # as a network file system that remembers what was not there
            raise CheckpointNotFoundError("not yet", path=chosen.folder)
        return real(chosen, **options)

    monkeypatch.setattr(opening, "open_chosen", blind)
    assert [got.iteration for got in in_threads(2, lambda g: reshard.load(root, TP2, group=g, timeout=60))] == [10, 10]
    assert n_looks == 2


@pytest.mark.slow(disk=False)
def test_real_processes_agree(root: Path) -> None:
    pytest.importorskip("torch")
    from tests.helpers.ranks import Job

    def work(group: Group) -> Any:
        got = reshard.load(root, TP4, timeout=60)
        digest = hashlib.sha256(b"".join(got.state[key].tobytes() for key in sorted(got.state))).hexdigest()
        return [got.iteration, digest, got.decision.verdicts[0].reason]

    for iteration in (10, 5):
        with Job(4, work) as job:
            values = job.values()
        assert {value[0] for value in values} == {iteration}
        for rank, (_, digest, reason) in enumerate(values):
            arrays = sealed.arrays_of(iteration)
            own = {key: array if key == "b" else array[rank : rank + 1] for key, array in arrays.items()}
            assert digest == hashlib.sha256(b"".join(own[key].tobytes() for key in sorted(own))).hexdigest()
            assert reason == values[0][2]
        damage(root, FILES["opt", 1])


def test_a_lock_that_cannot_be_asked_hides_no_damage(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(checkpoint: reshard.Checkpoint, decision: ResumeDecision) -> int:
        if decision.iteration == 5:
            return 5

        def refuse(_: object) -> bool:
            monkeypatch.undo()
            raise StorageError("stale file handle", path=str(root))

        monkeypatch.setattr(type(checkpoint.data.lock), "is_current", refuse)
        raise DamagedFileError("a byte is wrong")

    decision, found = load_with(read, LoadRequest(root=root))
    assert (found, decision.verdicts[0].reason) == (5, "a byte is wrong")


@pytest.mark.slow(disk=False)
def test_a_dead_rank_is_an_error_in_time(root: Path) -> None:
    pytest.importorskip("torch")
    from tests.helpers.ranks import Job

    def work(group: Group) -> Any:
        if group.rank == 1:
            os._exit(1)
        return reshard.load(root, TP2, timeout=1.0).iteration

    with Job(2, work) as job:
        first, second = job.outcomes()
    assert second is None
    assert first is not None
    assert first["error"] == "GroupError"


def test_a_missing_layout_file_is_no_fault_of_a_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for iteration in (1, 2):
        reshard.save(root, iteration, {"w": np.zeros(4)}, commit={"durable": False})
    with pytest.raises(CheckpointNotFoundError, match=r"^there is no layout file `.*nope\.yaml`") as caught:
        reshard.load(root, tmp_path / "nope.yaml")
    assert "damaged" not in str(caught.value)


def test_an_unknown_key_names_the_path_and_similar_keys(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    reshard.save_file({"layers.0.weight": np.zeros(4)}, path)
    with reshard.open(path) as checkpoint:
        for call in (checkpoint.read, checkpoint.__getitem__, lambda key: checkpoint.load(keys=[key])):
            with pytest.raises(KeyNotFoundError) as caught:
                call("layer.0.weight")
            assert caught.value.message == f"there is no tensor `layer.0.weight` in {path}"
            assert (caught.value.key, caught.value.hint) == ("layer.0.weight", "did you mean `layers.0.weight`?")
