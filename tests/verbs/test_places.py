"""Work that other processes do, `on=`, with a place that does it in this process: what two of them would do wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reshard
import reshard.ray
from reshard.commit import protocol
from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    ClaimedError,
    DestinationExistsError,
    GroupError,
    MismatchError,
    UnsupportedError,
)
from reshard.ray.cluster import _one_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass
class Here:
    """A place in this process."""

    before: Callable[[], object] = bool
    cpus: int = 1

    def n_shares(self, n_bytes: int) -> int:
        return 3

    def run(self, work: Callable[[int], tuple[int, Any]], n_shares: int, done: Callable[[Any], object]) -> list[Any]:
        self.before()
        return [work(share)[1] for share in range(n_shares)]


def model(path: Path, seed: int = 0) -> Path:
    arrays = {f"w{i}": np.random.default_rng(seed + i).standard_normal((512, 256)).astype(np.float32) for i in range(8)}
    reshard.save_file(arrays, path)
    return path


def test_of_two_equal_conversions_one_writes(tmp_path: Path) -> None:
    source = model(tmp_path / "src.safetensors")

    def again() -> None:
        with pytest.raises(DestinationExistsError, match="another process does this conversion"):
            reshard.convert(source, tmp_path / "new" / "dst", on=Here())

    reshard.convert(source, tmp_path / "new" / "dst", on=Here(again))
    assert reshard.diff(source, tmp_path / "new" / "dst").equal
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["dst"]


def test_what_a_killed_driver_has_left_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = model(tmp_path / "src.safetensors")
    left = tmp_path / f".dst.share-{'0' * 32}.staging"  # of a cluster with more hosts, and so of other shares
    left.mkdir()
    reshard.convert(source, tmp_path / "dst", on=Here())
    assert [record.getMessage().partition(" has shares")[0] for record in caplog.records] == [f"`{left}`"]


@pytest.mark.parametrize("how", [{}, {"layout": {"mesh": {"tp": 1}, "rules": [{"match": "*"}]}, "iteration": 1}])
def test_a_failure_leaves_no_folder(tmp_path: Path, how: dict[str, Any]) -> None:
    source = model(tmp_path / "src.safetensors")

    def fail() -> None:
        folders = [path for path in (tmp_path / "new").rglob("*") if path.is_dir()]
        max(folders, key=lambda path: len(path.parts)).joinpath("part").write_text("half")
        raise GroupError("the cluster is gone")

    with pytest.raises(GroupError):
        reshard.convert(source, tmp_path / "new" / "deep" / "dst", on=Here(fail), **how)
    assert not (tmp_path / "new").exists()


def test_a_root_of_another_job_is_refused_before_the_shares_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, begun = model(tmp_path / "src.safetensors"), list[int]()
    layout = {"mesh": {"tp": 1}, "rules": [{"match": "*"}]}

    def claimed(*_: object, **__: object) -> None:
        raise ClaimedError("another job writes into this root")

    monkeypatch.setattr(protocol, "begin", claimed)
    with pytest.raises(ClaimedError):
        reshard.convert(source, tmp_path / "root", layout=layout, on=Here(lambda: begun.append(1)))
    assert (begun, (tmp_path / "root").exists()) == ([], False)


def test_a_traceback_of_a_server_is_its_last_line() -> None:
    text = 'Failure from server:\nTraceback (most recent call last):\n  File "a.py", line 3\nOSError: no such process\n'
    assert _one_line(ConnectionError(text)) == "ConnectionError: Failure from server: OSError: no such process"
    assert _one_line(OSError("two\nlines")) == "OSError: two lines"
    assert _one_line(OSError()) == "OSError"


def test_a_comparison_of_other_files_is_refused(tmp_path: Path) -> None:
    a, b = model(tmp_path / "a.safetensors"), model(tmp_path / "b.safetensors")

    def replace() -> None:
        b.unlink()
        model(b, seed=9)

    assert reshard.diff(a, b, on=Here()).equal
    with pytest.raises(MismatchError, match="is not what it is where the comparison began"):
        reshard.diff(a, b, on=Here(replace))


def test_a_host_that_does_not_see_an_iteration_is_an_error(tmp_path: Path) -> None:
    reshard.save(tmp_path / "run", 1, {"w": np.zeros(1000)})
    assert reshard.verify(tmp_path / "run", on=Here()).ok

    def miss() -> None:
        raise CheckpointNotFoundError("on host `other`: there is nothing")

    with pytest.raises(GroupError, match="on host `other`"):
        reshard.verify(tmp_path / "run", on=Here(miss))


def test_what_has_no_manifest_is_verified_here(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="has no manifest"):
        reshard.verify(model(tmp_path / "a.safetensors"), on=Here())


@pytest.mark.parametrize("wrong", [{"retries": -1}, {"retries": "3"}, {"address": ""}, {"address": None}, {"cpus": 0}])
def test_a_wrong_cluster_is_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"`{next(iter(wrong))}` is"):
        reshard.ray.Ray(**wrong)
