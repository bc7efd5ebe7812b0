"""What a Checkpointer and a look at a checkpoint leave as they were: signal handlers, the root, later saves."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reshard
from reshard.errors import ArgumentError, ReshardError

torch = pytest.importorskip("torch")

from reshard.torch import Checkpointer  # noqa: E402

TERM = signal.SIGTERM


@pytest.mark.parametrize("wrong", [99, -1, 0, signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_signal_that_cannot_be_handled_is_an_error_and_changes_no_handler(
    tmp_path: Path, wrong: int, before: Any
) -> None:
    kept = signal.signal(TERM, before)
    try:
        with pytest.raises(ArgumentError, match="cannot be handled"):
            Checkpointer(tmp_path, signals=(TERM, signal.SIGUSR1, TERM, wrong))
        assert signal.getsignal(TERM) == before
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    finally:
        signal.signal(TERM, kept)


@pytest.mark.slow(disk=False)
def test_a_dropped_checkpointer_gives_its_handlers_back(tmp_path: Path) -> None:
    before = signal.getsignal(TERM)
    checkpointer = Checkpointer(tmp_path / "a")
    assert signal.getsignal(TERM) != before
    del checkpointer
    gc.collect()
    assert signal.getsignal(TERM) == before


@pytest.mark.slow(disk=False)
def test_a_checkpointer_dropped_after_a_run_gives_its_handlers_back(tmp_path: Path) -> None:
    before = signal.getsignal(TERM)
    model = torch.nn.Linear(2, 2)
    checkpointer = Checkpointer(tmp_path / "a", save_every=1)
    checkpointer.resume(model=model)
    checkpointer.step(1)
    checkpointer.wait()
    del checkpointer
    gc.collect()
    assert signal.getsignal(TERM) == before


@pytest.mark.parametrize("when", ["before", "after", "during"])
def test_saves_stay_in_the_root_when_the_working_folder_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "vocab.txt").write_text("a")
    (tmp_path / "files" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 2)
    with Checkpointer("run", save_every=1, signals=(), hf_every=1, model_files="files") as checkpointer:
        if when == "before":
            os.chdir("sub")
        checkpointer.resume(model=model)
        if when == "after":
            os.chdir("sub")
        checkpointer.step(1)
        if when == "during":
            os.chdir("sub")
        checkpointer.step(2)
    assert sorted(one.name for one in (tmp_path / "run").glob("iter*")) == ["iteration_00000001", "iteration_00000002"]
    assert len(list((tmp_path / "run_hf").rglob("vocab.txt"))) == 2
    assert list((tmp_path / "sub").iterdir()) == []


def test_a_save_in_the_background_goes_into_its_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    pending = reshard.save("run", 1, {"w": np.zeros(1 << 16)}, blocking=False)
    os.chdir("sub")
    pending.result(60)
    assert (tmp_path / "run" / "iteration_00000001").is_dir()


def three(root: Path) -> None:
    for number in (100, 200, 300):
        reshard.save(root, number, {"w": np.full(4, float(number))}, commit={"durable": False})


@pytest.mark.parametrize("by_folder", [False, True])
def test_one_iteration_that_is_read_changes_no_save(tmp_path: Path, *, by_folder: bool) -> None:
    three(tmp_path)
    if by_folder:
        reshard.load(tmp_path / "iteration_00000100")
    else:
        reshard.load(tmp_path, iteration=100)
    with pytest.raises(ReshardError, match="150"):
        reshard.save(tmp_path, 150, {"w": np.zeros(4)}, commit={"durable": False})
    report = reshard.save(tmp_path, 400, {"w": np.zeros(4)}, commit={"durable": False})
    file = next(Path(report.path).glob("*.safetensors"))
    file.chmod(0o600)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert reshard.load(tmp_path).iteration == 300


CHANGES = """
import os, signal
def test_handler(): signal.signal(signal.SIGUSR2, signal.SIG_IGN)
def test_variable(): os.environ["LEFT_BY_A_TEST"] = "1"
def test_folder(tmp_path): os.chdir(tmp_path)
def test_umask(): os.umask(0o055)
def test_monkeypatch(monkeypatch, tmp_path): monkeypatch.chdir(tmp_path); monkeypatch.setenv("A_OF_A_TEST", "1")
"""


@pytest.mark.slow
def test_a_test_that_leaves_the_process_changed_fails(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((Path(__file__).parents[1] / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(CHANGES)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},  # conftest.py imports its helpers
        capture_output=True,
        text=True,
        check=False,
    )
    assert "5 passed, 4 errors" in done.stdout
    for word in ("handler of signal", "LEFT_BY_A_TEST", "working folder", "umask is 55"):
        assert word in done.stdout
