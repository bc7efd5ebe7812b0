"""What was verified is remembered, and retention removes nothing before one that stays was: neither more nor less."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner
from tests.helpers import retained
from tests.helpers.unprivileged import closed, nobody, reachable, readable

import reshard
from reshard.cli import main
from reshard.commit import manifest as manifests
from reshard.commit import proofs, protocol
from reshard.commit.session import forget_all
from reshard.errors import DamagedFileError, StorageError
from reshard.formats.checkpoint1 import save_rank as rank_side
from reshard.storage.location import Location, locate
from reshard.write import shard_files

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["reachable"]


@pytest.fixture(autouse=True)
def _claims() -> Iterator[None]:
    yield
    protocol.release()
    forget_all()


def save(root: Path, *iterations: int, **options: Any) -> None:
    for iteration in iterations:
        weights = {"w": np.arange(100_000.0) + iteration}
        reshard.save(root, iteration, weights, **{"commit": {"durable": False}, **options})


def folder_of(root: Path, iteration: int) -> Path:
    return root / f"iteration_{iteration:08d}"


def there(root: Path) -> list[int]:
    return sorted(int(path.name[10:]) for path in root.glob("iteration_*"))


def recorded(root: Path) -> dict[int, bool]:
    """By iteration what is recorded of it: whether it is whole."""
    found = {}
    for iteration in there(root):
        proof = proofs.read(locate(folder_of(root, iteration)), manifests.read(locate(folder_of(root, iteration))))
        if proof is not None:
            found[iteration] = proof.fault is None
    return found


def damage(root: Path, iteration: int) -> None:
    (path,) = folder_of(root, iteration).glob("model-*")
    with path.open("r+b") as file:
        file.seek(500_000)
        file.write(b"\xff" * 8)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    save(root, 10, 15, 20)
    return root


def run(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


# -- what is kept


def test_what_verify_found_whole_stays_when_the_newest_is_damaged(root: Path) -> None:
    damage(root, 20)
    assert not reshard.verify(root).ok
    assert recorded(root) == {10: True, 15: True, 20: False}
    removed = reshard.prune(root, keep=1)
    assert removed.iterations == (10,)
    assert there(root) == [15, 20]
    assert "found damaged when it was verified" in removed.kept[20]
    assert reshard.load(root).iteration == 15


def test_what_was_never_verified_is_before_anything_goes(root: Path) -> None:
    damage(root, 20)
    removed = reshard.prune(root, keep=1)
    assert removed.iterations == (10,)
    assert "iteration_00000020: found damaged when it was verified" in removed.warnings[0]
    assert recorded(root) == {15: True, 20: False}


def test_where_all_are_damaged_nothing_goes(root: Path) -> None:
    for iteration in (10, 15, 20):
        damage(root, iteration)
    assert reshard.prune(root, keep=1).iterations == ()
    assert there(root) == [10, 15, 20]


def test_what_is_verified_is_not_read_again(root: Path) -> None:
    told: list[int] = []
    assert reshard.prune(root, keep=2, progress=lambda done, _: told.append(done)).iterations == (10,)
    assert told
    told.clear()
    assert reshard.prune(root, keep=1, progress=lambda done, _: told.append(done)).iterations == (15,)
    assert not told


def test_a_dry_run_reads_no_contents_and_says_what_would_be_verified(root: Path) -> None:
    damage(root, 20)
    dry = reshard.prune(root, keep=1, dry_run=True)
    assert dry.iterations == (10, 15)
    assert dry.warnings == ("iteration 20 would be verified first; if it is damaged, less is removed",)
    assert recorded(root) == {}


def test_an_old_pinned_one_that_was_verified_does_not_stand_for_the_newest(root: Path) -> None:
    reshard.pin(locate(root), 10)
    reshard.verify(folder_of(root, 10))
    save(root, 25)
    damage(root, 25)
    assert reshard.prune(root, keep=1).iterations == (15,)
    assert there(root) == [10, 20, 25]


def test_what_a_run_passed_over_goes_only_once_what_was_saved_since_is_verified(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    damage(tmp_path, 20)
    assert reshard.load(tmp_path).iteration == 10
    for iteration in (15, 25):
        save(tmp_path, iteration, keep=5)
    assert there(tmp_path) == [10, 15, 25]
    assert recorded(tmp_path)[25]


def test_where_nothing_is_to_be_removed_nothing_is_needed(reachable: Path) -> None:
    save(reachable / "root", 10, 15)
    readable(reachable / "root")
    with nobody():
        assert run("prune", reachable / "root", "--keep", 2)[0] == 0


# -- what counts


def test_a_record_is_not_that_of_another_save_under_the_same_number(root: Path) -> None:
    reshard.verify(root)
    save(root, 20)
    damage(root, 20)
    assert recorded(root) == {10: True, 15: True}
    assert reshard.prune(root, keep=1).iterations == (10,)


def test_a_record_is_not_that_of_a_copy(root: Path, tmp_path: Path) -> None:
    reshard.verify(root)
    shutil.copytree(root, tmp_path / "copy")
    assert recorded(tmp_path / "copy") == {}


def test_a_record_of_damage_ends_with_a_repair(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "copy")
    damage(root, 20)
    reshard.verify(root)
    (good,) = folder_of(tmp_path / "copy", 20).glob("model-*")
    shutil.copy2(good, folder_of(root, 20) / good.name)
    assert recorded(root) == {10: True, 15: True}
    assert reshard.prune(root, keep=1).iterations == (10, 15)


def test_a_change_while_it_is_verified_is_not_recorded(root: Path) -> None:
    changed: list[int] = []

    def change(done: int, _: int) -> None:
        if not changed:
            changed.append(done)
            path = folder_of(root, 20) / "common.json"
            before = path.stat().st_ctime_ns
            while path.stat().st_ctime_ns == before:  # some clocks of files have steps of milliseconds
                os.utime(path)

    (report,) = reshard.verify(folder_of(root, 20), progress=change).checkpoints
    assert report.state == "whole"
    assert "changed while it was verified" in str(report.not_recorded)
    assert recorded(root) == {}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"version": 1}', b"x" * 100_000, b"[" * 10_000, b'{"version":1,"state":"\xff","fault":null}'],
)
def test_a_record_of_another_form_counts_for_nothing(content: bytes, root: Path) -> None:
    reshard.verify(root)
    path = proofs.file_of(locate(folder_of(root, 20))).local
    good = json.loads(path.read_text())
    for bad in (content, json.dumps({**good, "state": "0" * 32}).encode(), json.dumps({**good, "fault": 1}).encode()):
        path.write_bytes(bad)
        assert recorded(root) == {10: True, 15: True}
    path.unlink()
    path.symlink_to(root / "elsewhere")
    assert recorded(root) == {10: True, 15: True}
    assert reshard.verify(root).ok
    assert recorded(root) == {10: True, 15: True, 20: True}
    assert not (root / "elsewhere").exists()


def test_a_record_goes_with_its_iteration(root: Path) -> None:
    reshard.verify(root)
    reshard.prune(root, keep=1)
    assert [path.name for path in root.glob(".*.json")] == [".iteration_00000020.verified.json"]


def test_a_full_load_counts_as_verified(root: Path) -> None:
    reshard.load(root)
    assert recorded(root) == {}
    reshard.load(root, verify="full")
    assert recorded(root) == {20: True}


# -- saves


def test_one_save_in_keep_is_read_back(tmp_path: Path) -> None:
    seen, kept = [], []
    for iteration in range(1, 12):
        save(tmp_path, iteration, keep=3)
        seen.append(recorded(tmp_path))
        kept.append(there(tmp_path))
    assert kept == [list(range(max(1, n - 2), n + 1)) for n in range(1, 12)]
    assert [sorted(one) for one in seen] == [[], [], [], [4], [4], [4], [7], [7], [7], [10], [10]]


def test_verify_after_save_is_remembered(tmp_path: Path) -> None:
    save(tmp_path, 1, verify={"after_save": True})
    save(tmp_path, 2, 3)
    assert recorded(tmp_path) == {1: True}


def test_a_save_removes_nothing_while_what_stays_may_be_damaged(root: Path) -> None:
    """Here by an earlier release, which did not read back: what is kept is unknown, and the rest stays."""

    removed = retained.apply(locate(root), reshard.Retention(keep=1), verify=False)
    assert removed.iterations == ()
    assert "nothing that would stay has been verified" in removed.warnings[0]
    damage(root, 20)
    reshard.verify(root)
    save(root, 25, keep=2)
    assert there(root) == [15, 20, 25]
    assert reshard.load(root, iteration=15).iteration == 15


def test_saves_of_checkpoint_1_are_read_back_before_older_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, read = shard_files.read_back, list[str]()

    def spy(path: str, *more: Any) -> None:
        read.append(Path(path).name.rpartition("_")[2].partition(".")[0])
        real(path, *more)

    monkeypatch.setattr(rank_side, "read_back", spy)
    for step in range(1, 8):
        save(tmp_path / "legacy", step, format="checkpoint1", keep=2)
    assert read == ["3", "5", "7"]
    assert len(list((tmp_path / "legacy" / "rank_0").glob("CKP*"))) == 2


# -- the best


def test_the_best_is_known_without_its_line_in_the_log(tmp_path: Path) -> None:
    for iteration, loss in ((1, 0.5), (2, 2.0), (3, 3.0), (4, 4.0)):
        save(tmp_path, iteration, metrics={"loss": loss})
    log = tmp_path / "saves.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[1:]))
    assert reshard.prune(tmp_path, retention={"keep": 1, "best": ("loss", 1)}).iterations == (2, 3)
    assert there(tmp_path) == [1, 4]
    log.unlink()
    assert reshard.prune(tmp_path, retention={"keep": 1, "best": ("loss", 1)}).kept[1] == "one of the best"


def test_the_best_is_known_though_its_metrics_are_too_long_for_the_log(tmp_path: Path) -> None:
    many = {f"metric {n} {'x' * 100}": float(n) for n in range(1000)}
    save(tmp_path, 1, metrics={"loss": 0.5, **many})
    save(tmp_path, 2, metrics={"loss": 2.0})
    save(tmp_path, 3, metrics={"loss": 3.0}, retention={"keep": 1, "best": ("loss", 1)})
    assert there(tmp_path) == [1, 3]
    assert manifests.read(locate(folder_of(tmp_path, 1))).metrics["metric 999 " + "x" * 100] == 999.0


def test_what_the_manifest_says_goes_before_the_log(tmp_path: Path) -> None:
    """A line of an earlier save under the same number, whose save was published and then killed, is not meant."""
    save(tmp_path, 1, metrics={"loss": 9.0})
    before = (tmp_path / "saves.jsonl").read_text()
    save(tmp_path, 1, metrics={"loss": 1.0})
    (tmp_path / "saves.jsonl").write_text(before)
    save(tmp_path, 2, metrics={"loss": 2.0})
    save(tmp_path, 3)
    assert reshard.prune(tmp_path, retention={"keep": 1, "best": ("loss", 1)}).iterations == (2,)


def test_manifests_without_metrics_fall_back_on_the_log(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    assert b'"version":1,' in (folder_of(tmp_path, 1) / "manifest.json").read_bytes()
    lines = (tmp_path / "saves.jsonl").read_text().splitlines()
    told = [json.dumps({**json.loads(line), "metrics": {"loss": n}}) for n, line in enumerate(lines, 1)]
    (tmp_path / "saves.jsonl").write_text("\n".join(told) + "\n")
    assert reshard.prune(tmp_path, retention={"keep": 1, "best": ("loss", 1)}).iterations == (2,)


# -- answers


def test_the_damaged_one_is_not_called_verified(root: Path) -> None:
    damage(root, 20)
    code, out, _ = run("verify", root, "--json")
    told = json.loads(out)
    assert (code, told["ok"]) == (1, False)
    assert [(one["iteration"], one["verified"], one["state"]) for one in told["checkpoints"]] == [
        (20, False, "damaged"),
        (15, True, "whole"),
        (10, True, "whole"),
    ]


def test_explain_says_that_contents_were_not_read(root: Path) -> None:
    damage(root, 20)
    code, out, _ = run("explain", root)
    assert code == 0
    assert re.search("contents +not compared yet. The run compares the data with its checksums while it loads", out)
    told = json.loads(run("explain", root, "--json")[1])
    assert (told["iteration"], told["is_verified"], told["has_sums"]) == (20, False, True)
    assert (told["contents"], told["contents_read"]) == ("not read", False)


def test_explain_verify_gives_the_answer_of_the_restart(root: Path) -> None:
    damage(root, 20)
    code, out, _ = run("explain", root, "--verify")
    assert code == 0
    rows = [line.split(maxsplit=2) for line in out.splitlines()[2:5]]
    assert [row[:2] for row in rows] == [
        ["iteration_00000020", "skipped"],
        ["iteration_00000015", "selected"],
        ["iteration_00000010", "not"],
    ]
    assert "bytes 262144 to 524288 were altered" in rows[0][2]
    assert "read and compared with the checksums: no difference" in out
    told = json.loads(run("explain", root, "--verify", "--json")[1])
    assert (told["is_verified"], told["contents_read"]) == (True, True)
    assert told["iteration"] == reshard.load(root).iteration == 15
    damage(root, 15)
    damage(root, 10)
    code, out, err = run("explain", root, "--verify")
    assert code == 1
    assert out.count("skipped") == 3
    assert "no checkpoint in" in err
    with pytest.raises(DamagedFileError):
        reshard.load(root)


def test_explain_verify_of_weights_alone_reads_no_optimizer_state(tmp_path: Path) -> None:
    root = tmp_path / "root"
    save(root, 10, 20, optimizer={"adam_m.w": np.ones(100_000)})
    (path,) = folder_of(root, 20).glob("opt-*")
    with path.open("r+b") as file:
        file.seek(500_000)
        file.write(b"\xff" * 8)
    (tmp_path / "weights.yaml").write_text(f"load_checkpoint: {root}\n")
    told = json.loads(run("explain", "--config", tmp_path / "weights.yaml", "--verify", "--json")[1])
    assert (told["iteration"], told["contents_read"]) == (20, True)
    assert reshard.load(config=tmp_path / "weights.yaml").iteration == 20
    assert json.loads(run("explain", root, "--verify", "--json")[1])["iteration"] == 10
    assert reshard.load(root).iteration == 10


# -- permission


@pytest.fixture
def foreign(reachable: Path) -> Path:
    """A root of another user, of which everything but the newest iteration may be read."""
    root = reachable / "root"
    save(root, 10, 15, 20)
    readable(root)
    closed(folder_of(root, 20))
    return root


def test_inspect_calls_what_may_not_be_read_neither_complete_nor_damaged(foreign: Path) -> None:
    readable(foreign)
    closed(folder_of(foreign, 15))
    with nobody():
        page = run("inspect", foreign)[1]
        told = json.loads(run("inspect", foreign, "--json")[1])
    assert "iteration_00000015  unreadable: " in page
    assert "damaged" not in page
    assert [one["complete"] for one in told["iterations"]] == [True, None, True]
    assert "Permission denied" in told["iterations"][1]["reason"]


def test_verify_calls_what_may_not_be_read_neither_whole_nor_damaged(foreign: Path) -> None:
    with nobody():
        code, out, err = run("verify", foreign, "--json")
        told = json.loads(out)
        page = run("verify", foreign)[1]
        report = reshard.verify(foreign)
    assert code == 1
    assert [(one["state"], one["verified"]) for one in told["checkpoints"]] == [
        ("unreadable", False),
        ("whole", True),
        ("whole", True),
    ]
    (fault,) = told["checkpoints"][0]["faults"]
    assert "Permission denied" in fault["message"]
    assert fault["is_damage"] is False
    assert not report.ok
    assert "iteration_00000020: could not be read: not known whether it is complete or damaged" in page
    assert "iteration_00000015: complete" in page
    assert err == ""


def test_one_file_that_may_not_be_read_is_no_damage(reachable: Path) -> None:
    save(reachable / "root", 10)
    readable(reachable / "root")
    (path,) = folder_of(reachable / "root", 10).glob("model-*")
    closed(path)
    with nobody():
        (only,) = reshard.verify(reachable / "root").checkpoints
    assert (only.state, [fault.file for fault in only.faults]) == ("unreadable", [path.name])
    assert only.n_files == 3


def test_verify_of_a_root_that_may_not_be_written_says_that_nothing_is_recorded(foreign: Path) -> None:
    with nobody():
        code, out, err = run("verify", folder_of(foreign, 15))
    assert code == 0
    assert "iteration_00000015: complete" in out
    assert "warning: the result is not recorded for `reshard prune`" in err
    assert "this user may not write into" in err
    assert recorded(foreign) == {}


def test_explain_tells_the_rest_where_one_may_not_be_read(foreign: Path) -> None:
    with nobody():
        code, out, err = run("explain", foreign)
        told = json.loads(run("explain", foreign, "--json")[1])
        with pytest.raises(StorageError):
            reshard.load(foreign)  # and so would a restart of this user end
    assert code == 1
    rows = [line.split(maxsplit=2) for line in out.splitlines()[2:5]]
    assert [row[:2] for row in rows] == [
        ["iteration_00000020", "unreadable"],
        ["iteration_00000015", "not"],
        ["iteration_00000010", "not"],
    ]
    assert "Permission denied" in rows[0][2]
    assert rows[1][2] == "reached  an earlier one could not be read"
    assert "hint: run this as the user of the training" in err
    assert (told["outcome"], told["error"]) == ("refused", "StorageError")
    assert [one["taken"] for one in told["verdicts"]] == [False, False, False]


def test_what_may_not_be_read_neither_counts_nor_goes(foreign: Path) -> None:
    foreign.chmod(0o777)
    for path in foreign.rglob("*"):
        if path.is_dir() and path.name != "iteration_00000020":
            path.chmod(0o777)
    (foreign / ".lock").chmod(0o666)
    with nobody():
        removed = reshard.prune(foreign, keep=1)
    assert removed.iterations == (10,)
    assert "could not be looked at: " in removed.kept[20]


def test_prune_without_permission_is_refused(foreign: Path) -> None:
    folder_of(foreign, 20).chmod(0o755)
    with nobody():
        code, out, err = run("prune", foreign, "--keep", 1)
        as_json = run("prune", foreign, "--keep", 1, "--json")
        with pytest.raises(StorageError, match="Permission denied"):
            reshard.prune(foreign, keep=1)
        dry = run("prune", foreign, "--keep", 1, "--dry-run")
    assert (code, out) == (1, "")
    assert err.count("Permission denied") == 1
    assert (as_json[0], json.loads(as_json[1])["error"]) == (1, "StorageError")
    assert there(foreign) == [10, 15, 20]
    assert dry[0] == 0
    assert "2 iterations" in dry[1]


def test_prune_tells_of_each_that_the_system_would_not_remove(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from reshard.commit import trash

    def refuse(_: Path, folder: Path, *__: object, **___: object) -> bool:
        raise StorageError(f"renaming {folder}: Operation not permitted", path=str(folder))

    monkeypatch.setattr(trash, "take_out", refuse)
    code, out, err = run("prune", root, "--keep", 1)
    assert code == 1
    assert out.splitlines()[-1] == "nothing was removed"
    assert err.count("iteration 10 could not be removed") == 1
    told = json.loads(run("prune", root, "--keep", 1, "--json")[1])
    assert told["failed"] == [10, 15]


@pytest.mark.parametrize("recorded_before", [0, 1])
def test_verify_without_rights_does_not_try_to_remove(
    recorded_before: int, foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(foreign, 15)
    Path(proofs.file_of(locate(folder))).unlink(missing_ok=True)
    if recorded_before:
        reshard.verify(folder)
    removed: list[str] = []
    monkeypatch.setattr(Location, "remove_file", lambda self: removed.append(str(self)))
    with nobody():
        code, out, err = run("verify", folder)
    assert code == 0
    assert "iteration_00000015: complete" in out
    what = ", the record of an earlier result, cannot be replaced" if recorded_before else " cannot be written"
    assert f"{what}: this user may not write into" in err.replace("\n", " ")
    assert "remov" not in err
    assert not removed
