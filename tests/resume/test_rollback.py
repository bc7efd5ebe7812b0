"""From damage to the next save: what is passed over, what is taken, and that the run that went back goes on there.

Saves and loads are the real ones here; what is expected is what was given to the save. The first part re-creates, one
by one, what goes wrong in the original and in other systems of this kind.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from tests.helpers import small_saves

import reshard
from reshard import _core
from reshard.cli import main
from reshard.commit import claims, protocol
from reshard.commit import manifest as manifests
from reshard.commit.session import forget_all, session_of
from reshard.errors import CheckpointNotFoundError, ClaimedError, DamagedFileError, ReshardError, StorageError
from reshard.storage.location import locate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TRACKER = "latest_checkpointed_iteration.txt"


def arrays_of(iteration: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(iteration)
    return {"w": rng.random((6, 4), np.float32), "b": rng.random(4)}


def save(root: Path, iteration: int, **options: Any) -> None:
    model = arrays_of(iteration)
    optimizer = {f"adam_m.{key}": array + 1 for key, array in model.items()}
    reshard.save(
        root, iteration, model, optimizer, extra={"seen": iteration}, **{"commit": {"durable": False}} | options
    )


def assert_is(got: reshard.Loaded, iteration: int) -> None:
    model = arrays_of(iteration)
    expected = model | {f"adam_m.{key}": array + 1 for key, array in model.items()}
    assert got.iteration == iteration
    assert got.extra == {"seen": iteration}
    assert {key: array.tobytes() for key, array in got.state.items()} == {k: a.tobytes() for k, a in expected.items()}


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Iterations 100, 200 and 300."""
    root = tmp_path / "root"
    for iteration in (100, 200, 300):
        save(root, iteration)
    yield root
    protocol.release()
    forget_all()


def folder_of(root: Path, iteration: int) -> Path:
    return root / f"iteration_{iteration:08d}"


def shard_of(root: Path, iteration: int, part: str = "model") -> Path:
    return folder_of(root, iteration) / f"{part}-0000000-0000001.safetensors"


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# -- what goes wrong elsewhere


def cut(path: Path, n_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:n_bytes])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def tail_of_zeros(path: Path) -> None:
    """As a write that was cut off by a loss of power, its length durable and its data not."""
    data = path.read_bytes()
    path.write_bytes(data[:-64] + bytes(64))


BUGS: dict[str, tuple[Callable[[Path], object], int]] = {
    "a crash leaves the tracker empty": (lambda root: (root / TRACKER).write_text(""), 300),
    "a crash leaves the tracker full of zeros": (lambda root: (root / TRACKER).write_bytes(bytes(3)), 300),
    "the tracker names a folder that is being written again": (lambda root: shutil.rmtree(folder_of(root, 300)), 200),
    "the tracker was never written": (lambda root: (root / TRACKER).unlink(), 300),
    "metadata is there before the shards are": (lambda root: shard_of(root, 300).unlink(), 200),
    "a shard of no bytes counts as there": (lambda root: cut(shard_of(root, 300), 0), 200),
    "a torn shard counts as there": (lambda root: cut(shard_of(root, 300), 100), 200),
    "a shard whose data was never written": (lambda root: zero(shard_of(root, 300)), 200),
    "a shard whose last page was never written": (lambda root: tail_of_zeros(shard_of(root, 300)), 200),
    "an old version of a shard": (lambda root: shutil.copy(shard_of(root, 200), shard_of(root, 300)), 200),
    "a commit record that was never written": (lambda root: (folder_of(root, 300) / "manifest.json").unlink(), 200),
    "a torn commit record": (lambda root: cut(folder_of(root, 300) / "manifest.json", 500), 200),
    "counters that were never written": (lambda root: zero(folder_of(root, 300) / "common.json"), 200),
    "a temporary file beside the shards": (
        lambda root: shutil.copy(shard_of(root, 100), folder_of(root, 300) / "tmp.safetensors"),
        300,
    ),
    "7 digits, as the documents have it": (
        lambda root: folder_of(root, 300).rename(root / "iteration_0000300"),
        300,
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_what_goes_wrong_elsewhere(bug: str, root: Path) -> None:
    """Never a wrong array, never a start from nothing; and the next save works."""
    do, expected = BUGS[bug]
    do(root)
    assert_is(reshard.load(root), expected)
    save(root, expected + 50)
    assert_is(reshard.load(root), expected + 50)


def test_what_never_is_a_silent_start_from_nothing(root: Path) -> None:
    for iteration in (100, 200, 300):
        flip(shard_of(root, iteration))
    with pytest.raises(DamagedFileError) as caught:
        reshard.load(root)
    assert all(folder_of(root, iteration).name in str(caught.value) for iteration in (100, 200, 300))
    shutil.rmtree(root)
    assert reshard.load(root).decision.fresh


# -- every bit, every file, by the whole path


@pytest.mark.slow
def test_random_bits_anywhere(root: Path) -> None:
    """A bit in any file of the newest iteration: it or the one before is loaded, whichever is whole."""
    rng = np.random.default_rng(3)
    folder = folder_of(root, 300)
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    counts: Counter[int | None] = Counter()
    for _ in range(150):
        path = paths[rng.integers(len(paths))]
        at = int(rng.integers(path.stat().st_size))
        data = path.read_bytes()
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << int(rng.integers(8))]) + data[at + 1 :])
        got = reshard.load(root, verify="full")
        assert_is(got, got.iteration or 0)
        counts[got.iteration] += 1
        path.write_bytes(data)
    assert set(counts) == {200}  # nothing in these files is without meaning
    assert_is(reshard.load(root), 300)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiles.json", "extra-0000000.json", "extra-0000000.arrays"])
def test_every_bit_and_length_of_what_only_this_package_writes(name: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for iteration in (1, 2):
        extra = {"a": np.arange(2) + iteration, "b": (iteration, "x")}
        model = {"w": np.full(3, iteration).astype(ml_dtypes.float8_e5m2)}  # metadata.json has no name for these
        reshard.save(root, iteration, model, extra=extra, commit={"durable": False})
    path = folder_of(root, 2) / name
    data = path.read_bytes()

    def is_found() -> bool:
        try:
            with reshard.open(path.parent) as opened:
                opened.extra()
        except DamagedFileError:
            return True
        return False

    def is_passed_over() -> bool:
        got = reshard.load(root)
        assert got.state["w"].tolist() == [got.iteration] * 3
        assert (got.extra["a"][0], got.extra["b"]) == (got.iteration, (got.iteration, "x"))
        return got.iteration == 1

    assert not is_found()
    assert not is_passed_over()
    for place in range(len(data)):  # one bit of each byte
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        assert is_found(), place
        assert place % 101 or is_passed_over(), place
    for length in (*range(len(data)), len(data) + 1):
        path.write_bytes((data + b"\0")[:length])
        assert is_found(), length
        assert length % 29 or is_passed_over(), length


# -- the run goes on from where it went back to


def test_the_first_save_after_a_roll_back_records_what_was_passed_over(root: Path) -> None:
    flip(shard_of(root, 300))
    flip(shard_of(root, 200, "opt"))
    assert_is(reshard.load(root), 100)
    save(root, 150)  # below the tracker, which names 300
    assert manifests.read(locate(folder_of(root, 150))).passed_over == (200, 300)
    assert (root / TRACKER).read_text() == "150"
    flip(shard_of(root, 300))  # whole again, and no candidate all the same
    assert_is(reshard.load(root), 150)
    flip(shard_of(root, 150))
    assert_is(reshard.load(root), 100)
    flip(shard_of(root, 150))
    assert_is(reshard.load(root), 150)
    save(root, 160)
    assert manifests.read(locate(folder_of(root, 160))).passed_over == ()
    with pytest.raises(ReshardError):
        save(root, 155)  # nobody went back this time


def test_a_save_below_the_tracker_needs_a_roll_back(root: Path) -> None:
    assert_is(reshard.load(root), 300)
    with pytest.raises(ReshardError):
        save(root, 250)
    assert_is(reshard.load(root, iteration=200), 200)
    with pytest.raises(ReshardError):
        save(root, 250)
    save(root, 250, commit={"rollback": True})
    assert_is(reshard.load(root), 250)
    assert_is(reshard.load(root, iteration=300), 300)  # still there for who asks for it


def test_the_damaged_one_is_left_as_it_is(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    flip(shard_of(root, 300))
    before = {path.name: path.read_bytes() for path in folder_of(root, 300).iterdir()}
    with caplog.at_level(logging.WARNING):
        assert_is(reshard.load(root), 200)
    assert any("iteration_00000300 is skipped" in message for message in caplog.messages)
    assert {path.name: path.read_bytes() for path in folder_of(root, 300).iterdir()} == before


# -- by hand


def test_prune_pin_and_inspect(root: Path) -> None:
    def run(*args: object, code: int = 0) -> str:
        result = CliRunner().invoke(main, [str(arg) for arg in args])
        assert result.exit_code == code, result.output
        return result.stdout

    assert "pinned" in run("pin", root, 100)
    assert "iteration_00000100  complete (pinned)" in run("inspect", root)
    told = run("prune", root, "--keep", 1, "--dry-run")
    assert [line.split(maxsplit=1) for line in told.splitlines()[:3]] == [
        ["300", "kept: the tracker names it"],
        ["200", "would be removed"],
        ["100", "kept: pinned"],
    ]
    assert folder_of(root, 200).exists()
    assert json.loads(run("prune", root, "--keep", 1, "--json"))["iterations"] == [200]
    assert not folder_of(root, 200).exists()
    run("unpin", root, 100)
    with reshard.open(folder_of(root, 100)):
        run("prune", root, "--keep", 1)
        assert folder_of(root, 100).exists()
    run("prune", root, "--keep", 1)
    assert not folder_of(root, 100).exists()
    assert_is(reshard.load(root), 300)
    run("pin", root, 7, code=1)
    run("prune", root, "--keep", 0, code=2)
    run("prune", root / "nothing", "--keep", 1, code=1)


def test_inspect_shows_the_log_of_saves_and_the_manifest(tmp_path: Path) -> None:
    for iteration, loss in ((1, 2.5), (2, float("nan"))):
        save(tmp_path / "root", iteration, metrics={"loss": loss})
    out = CliRunner().invoke(main, ["inspect", str(tmp_path / "root")]).stdout
    rows = [line.split() for line in out.splitlines() if line.endswith((" 2.5", " nan"))]
    assert [(row[1], row[-1]) for row in rows] == [("2", "nan"), ("1", "2.5")]
    assert "manifest   saved" in out
    assert "by 1 rank" in out


def test_prune_of_the_originals_checkpoints_opens_them(tmp_path: Path) -> None:
    """Without a manifest one counts as complete only if it is: here the newest but one is torn."""
    sample = Path(__file__).parents[1] / "data" / "mindspore" / "ckpt2" / "checkpoint"
    shutil.copytree(sample, tmp_path / "root")
    root = tmp_path / "root"
    shutil.copytree(root / "iteration_00000005", root / "iteration_00000007")
    cut(next((root / "iteration_00000007").glob("*-model-0000003-*")), 50)
    removed = reshard.prune(root, keep=2)
    assert removed.iterations == ()
    assert "not complete" in removed.kept[7]
    assert reshard.prune(root, keep=1).iterations == (5,)


def test_a_folder_of_another_format_is_no_iteration(tmp_path: Path) -> None:
    """A published model with such a name: a run does not resume from it, so nothing is removed for it."""
    root = tmp_path / "run"
    for iteration in (100, 200):
        save(root, iteration)
    published = root / "iteration_00000150"
    published.mkdir()
    reshard.save_file({"w": np.zeros(2, np.float32)}, published / "model.safetensors")
    (published / "config.json").write_text("{}")
    removed = reshard.prune(root, keep=2, dry_run=True)
    assert removed.iterations == ()
    assert "not complete" in removed.kept[150]
    with pytest.raises(ReshardError):
        reshard.rollback(root, 150, verify=False)


# -- rolled back by hand


def continued(root: Path) -> int:
    """The iteration that a restart takes."""
    got = reshard.load(root, {"mesh": {"tp": 1}, "rules": [{"match": "*"}]})
    assert got.iteration is not None
    assert_is(got, got.iteration)
    return got.iteration


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_rollback_is_what_a_restart_takes_and_newer_iterations_stay(root: Path) -> None:
    before = contents(folder_of(root, 300))
    assert reshard.rollback(root, 200) == reshard.Rollback(200, 300, (300,), verified=True)
    assert (root / TRACKER).read_text() == "200"
    assert contents(folder_of(root, 300)) == before
    assert continued(root) == 200
    save(root, 250)
    assert continued(root) == 250
    assert manifests.read(locate(folder_of(root, 250))).passed_over == (300,)
    save(root, 300)  # of the new line: another checkpoint, and the newest
    assert continued(root) == 300


def test_a_rollback_for_which_nothing_is_to_be_changed(root: Path) -> None:
    before = contents(root)
    assert reshard.rollback(root, 100, dry_run=True) == reshard.Rollback(100, 300, (200, 300), verified=True)
    after = {name: data for name, data in contents(root).items() if not name.endswith(".verified.json")}
    assert after == before
    assert reshard.rollback(root, 300) == reshard.Rollback(300, 300, (), verified=True)
    assert continued(root) == 300


def test_a_rollback_to_what_is_missing_or_damaged_is_refused(root: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"no iteration 250 .*\nhint: it holds 300, 200, 100"):
        reshard.rollback(root, 250)
    with pytest.raises(CheckpointNotFoundError, match="there is no folder"):
        reshard.rollback(root / "typo", 200)
    with pytest.raises(CheckpointNotFoundError, match=r"hint: .*give the folder that holds"):
        reshard.rollback(folder_of(root, 200), 200)
    assert sorted(path.name for path in folder_of(root, 200).iterdir() if path.is_dir()) == []
    flip(shard_of(root, 200))
    for dry_run in (False, True):
        with pytest.raises(DamagedFileError, match=r"iteration_00000200` is damaged: .*model-0000000"):
            reshard.rollback(root, 200, dry_run=dry_run)
    assert reshard.rollback(root, 200, verify=False, dry_run=True).verified is False
    cut(shard_of(root, 200), 100)
    with pytest.raises(DamagedFileError):
        reshard.rollback(root, 200, verify=False)
    assert (root / TRACKER).read_text() == "300"
    assert continued(root) == 300


def test_a_rollback_beside_a_running_writer_is_refused(root: Path) -> None:
    protocol.release(locate(root))
    reading, writing = os.pipe()

    def hold() -> None:
        claims.hold(locate(root))
        os.write(writing, b".")
        signal.pause()

    child = small_saves.fork(hold)
    try:
        os.read(reading, 1)
        with pytest.raises(ClaimedError, match="is claimed by process"):
            reshard.rollback(root, 200)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.result()
    assert (root / TRACKER).read_text() == "300"
    assert reshard.rollback(root, 200).iteration == 200
    assert claims.held(locate(root)) is None


def test_a_rollback_skips_a_newer_iteration_that_the_tracker_never_named(root: Path) -> None:
    protocol.release(locate(root))
    (root / TRACKER).write_text("200")  # the save of 300 was interrupted before its last step
    (folder_of(root, 300) / ".tracked").unlink()
    assert continued(root) == 300
    assert reshard.rollback(root, 200).previous == 300
    assert continued(root) == 200


def test_a_rollback_keeps_a_save_that_was_complete_and_not_published(root: Path) -> None:
    protocol.release(locate(root))
    manifest = manifests.read(locate(folder_of(root, 300)))
    (root / ".staging").mkdir(exist_ok=True)
    (folder_of(root, 300) / ".tracked").unlink()
    folder_of(root, 300).rename(root / ".staging" / f"300.{manifest.generation}.{manifest.attempt}")
    (root / TRACKER).write_text("200")
    assert reshard.rollback(root, 100).newer == (200, 300)
    assert continued(root) == 100
    assert reshard.verify(root).ok


def test_what_a_rollback_brings_back_is_a_candidate_again(root: Path) -> None:
    reshard.rollback(root, 200)
    assert continued(root) == 200
    save(root, 250)  # records that 300 was passed over
    reshard.rollback(root, 300)
    assert continued(root) == 300
    protocol.release(locate(root))
    save(root, 400)
    assert reshard.prune(root, 3, dry_run=True).iterations == (100, 200)
    cut(shard_of(root, 400), 10)
    assert continued(root) == 300


@pytest.mark.slow
@pytest.mark.parametrize("target", [100, 300])
def test_a_rollback_that_is_killed_leaves_the_one_or_the_other(target: int, root: Path, tmp_path: Path) -> None:
    protocol.release(locate(root))
    if target == 300:
        reshard.rollback(root, 200)
    before = reshard.open(root).iteration
    number, was_killed = 0, True
    while was_killed:
        copy = tmp_path / str(number)
        shutil.copytree(root, copy)
        was_killed = small_saves.killed_at(number, functools.partial(reshard.rollback, copy, target))
        assert continued(copy) in ({before, target} if was_killed else {target})
        session_of(locate(copy)).resumed = None
        assert {iteration for iteration in (100, 200, 300) if folder_of(copy, iteration).is_dir()} == {100, 200, 300}
        reshard.rollback(copy, target)
        assert continued(copy) == target
        number += 1
    assert number > 5


def test_rollback_on_the_command_line(root: Path) -> None:
    got = CliRunner().invoke(main, ["rollback", str(root), "200", "--dry-run", "--json"])
    assert got.exit_code == 0
    assert json.loads(got.stdout) == {
        "root": str(root),
        "dry_run": True,
        "iteration": 200,
        "previous": 300,
        "newer": [300],
        "verified": True,
        "warnings": [],
    }
    assert (root / TRACKER).read_text() == "300"
    got = CliRunner().invoke(main, ["rollback", str(root), "200"])
    assert "the next restart resumes from iteration 200 (the tracker named 300; every byte verified)" in got.stdout
    assert "not used: 300" in got.stdout
    assert "iteration_00000200  selected" in CliRunner().invoke(main, ["explain", str(root)]).stdout
    got = CliRunner().invoke(main, ["rollback", str(root), "201"])
    assert (got.exit_code, "hint: it holds 300, 200, 100" in got.stderr) == (1, True)


def test_an_unreadable_iteration_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "run"
    for iteration in (100, 200):
        reshard.save(root, iteration, {"w": np.arange(8)})

    def denied(path: str, *_: object, **__: object) -> None:
        raise StorageError(f"cannot open {path}: Permission denied", path=path, errno=errno.EACCES)

    with monkeypatch.context() as patched:
        patched.setattr(_core, "scrub", denied)
        with pytest.raises(StorageError, match=r"iteration_00000100` could not be read: cannot open") as caught:
            reshard.rollback(root, 100)
    assert "give this user read permission" in (caught.value.hint or "")
    assert reshard.rollback(root, 100).verified
