"""The example: interrupted and resumed it is the run that was never interrupted, on the same ranks to the last bit."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file as stock_load_file
from tests.helpers.training import Run, whole_run

import reshard
from reshard.examples.train_gpt import GPT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("n_ranks", "options"),
    [
        *((1, ""), (2, ""), (2, "--fsdp"), (2, "--tp 2"), (4, ""), (4, "--fsdp")),
        (4, "--dp 2 --tp 2 --fsdp --global-batch-size 24 --seed 3"),
    ],
    ids=lambda value: str(value).replace(" ", "") or "ddp",
)
def test_interrupted_is_never_interrupted(tmp_path: Path, n_ranks: int, options: str) -> None:
    folder, saved = tmp_path / "torn", 0
    lines: dict[int, Any] = {}
    for mode in ("", "--async-save"):
        with Run(folder, n_ranks, f"{options} --save-every 2 {mode}", steps=10_000) as run:
            run.until(saved + 4)
            run.kill()  # perhaps some steps later
        assert min(run.lines) == saved + 1
        saved = reshard.open(folder / "run").iteration or 0
        assert saved >= 2
        lines |= run.lines
    last = whole_run(folder, n_ranks, f"{options} --save-every 2 --async-save", steps=saved + 3)
    assert min(last.lines) == saved + 1
    lines |= last.lines
    expected = whole_run(tmp_path / "whole", n_ranks, f"{options} --save-every 1000000", steps=max(lines))
    assert lines == expected.lines
    n_samples = 24 if "size 24" in options else 12
    assert all(len(set(line["samples"])) == n_samples for line in expected.lines.values())


def test_any_number_of_ranks_goes_on(tmp_path: Path) -> None:
    """Cut anew at each start: the same samples, and the same losses but for the order of sums."""
    history = [(4, "--tp 2 --fsdp", 3), (2, "--tp 2", 5), (3, "--fsdp", 7), (4, "--tp 2", 9), (3, "--tp 3", 11)]
    lines: dict[int, Any] = {}
    for n_ranks, options, stop in history:
        run = whole_run(tmp_path / "torn", n_ranks, f"{options} --save-every 100 --dropout 0", steps=stop)
        assert min(run.lines) == len(lines) + 1
        lines |= run.lines
    expected = whole_run(tmp_path / "whole", 1, "--save-every 100 --dropout 0", steps=11).lines
    assert [line["world_size"] for line in lines.values()] == [4, 4, 4, 2, 2, 3, 3, 4, 4, 3, 3]
    for step, line in expected.items():
        assert line["samples"] == lines[step]["samples"]
        assert float.fromhex(line["loss"]) == pytest.approx(float.fromhex(lines[step]["loss"]), rel=1e-5)
    # And in the end one file of weights, which the model loads.
    reshard.convert(tmp_path / "torn" / "run", tmp_path / "hf")
    merged = stock_load_file(tmp_path / "hf" / "model.safetensors")
    model = GPT(0.0)
    missing, unexpected = model.load_state_dict(merged, strict=False)
    assert (missing, unexpected) == (["head.weight"], [])  # tied: stored once
    assert all(torch.equal(tensor, merged[name]) for name, tensor in model.named_parameters())
    with reshard.open(tmp_path / "torn" / "run") as checkpoint:
        assert {name: tensor.numpy().tobytes() for name, tensor in merged.items()} == {
            name: checkpoint.read(name).tobytes() for name in checkpoint.keys("model")
        }


@contextlib.contextmanager
def launched(folder: Path, n_ranks: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    words = ["--nproc-per-node", str(n_ranks), "--standalone", *options, "--out", str(folder / "run")]
    with (folder / "stderr").open("ab") as stderr:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words],
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
    try:
        yield launcher
    finally:
        launcher.kill()
        launcher.wait()


def log_of(folder: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    except (FileNotFoundError, json.JSONDecodeError):
        return []


def wait_for(condition: Callable[[], bool]) -> None:
    """Other people's processes: there is nothing to wait for but what they leave."""
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_launcher_is_killed_and_started_anew(tmp_path: Path) -> None:
    """As a user does it: torchrun, kill -9 of the launcher, which takes its ranks along, torchrun on fewer ranks."""
    example, log = "reshard.examples.train_gpt", str(tmp_path / "log.jsonl")
    options = ["--log", log, "--steps", "100000", "--save-every", "2", "--fsdp", "--async-save"]
    with launched(tmp_path, 2, "-m", "--", example, *options) as launcher:
        wait_for(lambda: len(log_of(tmp_path)) >= 5)
        ranks = [int(pid) for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]
        assert len(ranks) >= 2
    wait_for(lambda: not any(is_alive(pid) for pid in ranks))
    before = log_of(tmp_path)
    last = before[-1]["step"] + 3
    with launched(tmp_path, 1, "-m", example, "--log-file", log, "--steps", str(last)) as launcher:
        assert launcher.wait(120) == 0, (tmp_path / "stderr").read_text()
    after = log_of(tmp_path)[len(before) :]
    assert 1 < after[0]["step"] <= len(before) + 1
    assert after[-1]["step"] == last
    for old, new in zip(before[after[0]["step"] - 1 :], after, strict=False):
        assert old["samples"] == new["samples"]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
