"""`reshard.verify`: reports all damage with file, tensors and bytes, and reports complete checkpoints as complete."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file
from tests.helpers import sealed
from tests.helpers.sealed import CHUNK, FILES

import reshard
from reshard.cli import main
from reshard.commit import manifest as manifests
from reshard.errors import CheckpointNotFoundError
from reshard.formats.rank_file import add_rank_file
from reshard.storage.location import locate

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLE = Path(__file__).parents[1] / "data" / "mindspore" / "ckpt2" / "checkpoint"
SHAPE = (400, 500)  # a rank's half: 400,000 bytes in two chunks


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    sealed.make(root, 5)
    sealed.make(root, 10, SHAPE, previous_tracker=5)
    return root


def flip(path: Path, *at: int) -> None:
    data = bytearray(path.read_bytes())
    for place in at:
        data[place] ^= 16
    path.write_bytes(data)


def test_what_is_whole(root: Path) -> None:
    told: list[tuple[int, int]] = []
    report = reshard.verify(root, progress=lambda done, total: told.append((done, total)))
    assert report.ok
    assert [(one.iteration, one.verified, one.faults) for one in report.checkpoints] == [(10, True, ()), (5, True, ())]
    folder = root / "iteration_00000010"
    on_disk = [path for path in folder.iterdir() if path.name not in ("manifest.json", ".tracked")]
    assert report.checkpoints[0].n_files == len(on_disk)
    assert report.checkpoints[0].n_bytes == sum(path.stat().st_size for path in on_disk)
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] > 1_600_000


def test_file_tensors_and_bytes_are_named(root: Path) -> None:
    folder = root / "iteration_00000010"
    entry = manifests.read(locate(folder)).shards[FILES["model", 1]]
    flip(folder / FILES["model", 1], entry.header_bytes + 2, entry.n_bytes - 1)
    flip(folder / FILES["opt", 0], CHUNK + 7)
    flip(folder / FILES["opt", 1], 9)
    flip(folder / "common.json", 3)
    report = reshard.verify(root)
    assert not report.ok
    newest, oldest = report.checkpoints
    assert oldest.faults == ()
    found = {(fault.file, fault.begin, fault.end, fault.tensors) for fault in newest.faults}
    first, second = (0, CHUNK), (CHUNK, entry.n_bytes)
    assert found == {
        ("common.json", None, None, ()),
        (FILES["model", 1], 0, entry.n_bytes, ("b", "w")),  # both chunks, told as one range
        (FILES["opt", 0], second[0], manifests.read(locate(folder)).shards[FILES["opt", 0]].n_bytes, ("adam_m.w",)),
        (FILES["opt", 1], *first, ()),
    }
    messages = {fault.file: fault.message for fault in newest.faults}
    assert "`w`" in messages[FILES["model", 1]]
    assert "header" in messages[FILES["opt", 1]]
    (only,) = reshard.verify(folder / FILES["opt", 0]).checkpoints
    assert [(fault.file, fault.begin) for fault in only.faults] == [(FILES["opt", 0], CHUNK)]
    assert reshard.verify(folder / FILES["model", 0]).ok


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file removed": (lambda folder: (folder / FILES["opt", 1]).unlink(), FILES["opt", 1]),
    "a file cut": (lambda folder: (folder / FILES["opt", 1]).write_bytes(b"x" * 100), FILES["opt", 1]),
    "metadata removed": (lambda folder: (folder / "metadata.json").unlink(), "metadata.json"),
    "sums removed": (lambda folder: (folder / "checksums.bin").unlink(), "checksums.bin"),
    "sums altered": (lambda folder: flip(folder / "checksums.bin", 5), "checksums.bin"),
    "the manifest altered": (lambda folder: flip(folder / "manifest.json", 50), "manifest.json"),
    "the manifest removed": (lambda folder: (folder / "manifest.json").unlink(), "manifest"),
    "everything removed": (empty, "no checkpoint"),
}


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("what", CASES)
def test_other_damage(what: str, root: Path) -> None:
    CASES[what][0](root / "iteration_00000010")
    newest, oldest = reshard.verify(root).checkpoints
    assert oldest.faults == ()
    assert len(newest.faults) == 1
    assert CASES[what][1] in f"{newest.faults[0].file}: {newest.faults[0].message}"


def test_sealed_files_that_are_no_checkpoint_together(root: Path) -> None:
    folder = root / "iteration_00000010"
    (folder / FILES["model", 1]).unlink()
    sealed.seal(folder, 10)
    (fault,) = reshard.verify(folder).checkpoints[0].faults
    assert FILES["model", 1] in fault.message


def test_without_a_manifest() -> None:
    report = reshard.verify(SAMPLE)
    assert report.ok
    assert [(one.iteration, one.verified, one.n_bytes) for one in report.checkpoints] == [(10, False, 0), (5, False, 0)]


def test_a_file_of_its_own(tmp_path: Path) -> None:
    save_file({"w": np.ones(3)}, tmp_path / "w.safetensors")
    assert [one.verified for one in reshard.verify(tmp_path / "w.safetensors").checkpoints] == [False]
    (tmp_path / "w.safetensors").write_bytes(b"torn")
    assert not reshard.verify(tmp_path / "w.safetensors").ok
    with pytest.raises(CheckpointNotFoundError):
        reshard.verify(tmp_path / "nothing")


@pytest.mark.parametrize("key", ["w", "w" * 1025])
@pytest.mark.parametrize("file", ["a.safetensors", "a" * 256])
def test_names_that_are_too_long_are_no_damage(key: str, file: str, tmp_path: Path) -> None:
    save_file({key: np.zeros(4)}, tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {key: file}}))
    for path in (tmp_path, tmp_path / "a.safetensors"):
        (only,) = reshard.verify(path).checkpoints
        is_long = len(key) > 1024 or (path == tmp_path and len(file) > 255)
        assert only.state == ("unreadable" if is_long else "structure")
        assert ("10" in only.faults[0].message or "255" in only.faults[0].message) if is_long else not only.faults
    result = CliRunner().invoke(main, ["verify", str(tmp_path)])
    assert "damaged," not in result.output


def test_paths_that_are_too_long_are_no_damage(root: Path, tmp_path: Path) -> None:
    parent = tmp_path
    while len(str(parent)) < 3700:
        parent /= "d" * 200
    parent.mkdir(parents=True)
    (parent / "run").mkdir()
    shutil.copytree(root / "iteration_00000010", parent / "run/iteration_00000010")
    # The system accepts the paths of the manifest and of names by which formats are detected, and not those of shards.
    shard = FILES["model", 0]
    moved = parent / ("r" * (4096 - len(f"{parent}//iteration_00000010/{shard}")))
    (parent / "run").rename(moved)
    (only,) = reshard.verify(moved / "iteration_00000010").checkpoints
    assert only.state == "unreadable"
    assert {fault.is_damage for fault in only.faults} == {False}
    assert shard in {fault.file for fault in only.faults}


def test_what_is_removed_meanwhile_is_left_out(root: Path) -> None:
    def job(done: int, total: int) -> None:
        if (root / "iteration_00000005").exists():
            reshard.save(root, 15, {"w": np.zeros(4)})
            shutil.rmtree(root / "iteration_00000005")

    assert [one.iteration for one in reshard.verify(root, progress=job).checkpoints] == [10]


def test_what_is_being_compared_is_not_removed(root: Path) -> None:
    kept: list[str] = []

    def job(done: int, total: int) -> None:
        if done > 100_000:
            kept.extend(reshard.prune(root, keep=1).kept.values())

    reshard.save(root, 15, {"w": np.zeros(4)})
    assert [one.iteration for one in reshard.verify(root, progress=job).checkpoints] == [15, 10]
    assert "it is being read" in kept


def test_all_are_removed_before_they_are_compared(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def removed(folder: object) -> Any:
        monkeypatch.undo()
        reshard.save(root, 15, {"w": np.zeros(4)})
        shutil.rmtree(root / "iteration_00000010")
        shutil.rmtree(root / "iteration_00000005")
        return manifests.read_lock(locate(str(folder)))

    monkeypatch.setattr(manifests, "read_lock", removed)
    assert [one.iteration for one in reshard.verify(root).checkpoints] == [15]


def test_rank_files_that_are_removed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        reshard.save(tmp_path, step, {"w": np.zeros(4)}, format="checkpoint1")
    [first] = (tmp_path / "rank_0").glob("*_1.safetensors")

    def removed(*args: Any, **options: Any) -> Any:
        first.unlink(missing_ok=True)
        return add_rank_file(*args, **options)

    monkeypatch.setattr("reshard.formats.checkpoint1.reader.add_rank_file", removed)
    assert [one.iteration for one in reshard.verify(tmp_path).checkpoints] == [2]


def test_the_command(root: Path) -> None:
    whole = CliRunner().invoke(main, ["verify", str(root)])
    assert whole.exit_code == 0
    assert "iteration_00000010: complete, 7 files" in whole.stdout
    flip(root / "iteration_00000005" / FILES["opt", 0], -1)
    damaged = CliRunner().invoke(main, ["verify", str(root)])
    assert damaged.exit_code == 1
    assert "iteration_00000005: damaged, 1 fault\n  opt-0000000-0000002.safetensors: bytes 0 to" in damaged.stdout
    told = json.loads(CliRunner().invoke(main, ["verify", str(root), "--json"]).stdout)
    assert (told["ok"], [len(one["faults"]) for one in told["checkpoints"]]) == (False, [0, 1])
    assert told["checkpoints"][1]["faults"][0]["tensors"] == ["adam_m.w"]
    original = CliRunner().invoke(main, ["verify", str(SAMPLE)])
    assert (original.exit_code, original.stdout.count("unverified")) == (0, 2)


def test_an_iteration_that_is_saved_again_meanwhile(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for iteration in (100, 200, 300):
        reshard.save(root, iteration, {"w": np.full(1000, iteration)})
    reshard.rollback(root, 100)
    saved: list[object] = []

    def job(_done: int, _total: int) -> None:
        if not saved:  # the first bytes of 300 are compared; the manifest of 200 has been read
            saved.append(reshard.save(root, 200, {"w": np.full(1000, 7)}))
            saved.append(reshard.save(root, 300, {"w": np.full(1000, 8)}))

    report = reshard.verify(root, progress=job)
    assert [one.iteration for one in report.checkpoints] == [300, 200, 100]
    assert {one.state for one in report.checkpoints} == {"whole"}
    assert reshard.load(root).iteration == 300
