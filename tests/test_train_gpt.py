"""The example: interrupted and resumed it is the run that was never interrupted, on the same ranks to the last bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.training import Run, whole_run

if TYPE_CHECKING:
    from pathlib import Path


STEPS = 9


@pytest.mark.parametrize(
    ("n_ranks", "options"),
    [(1, ""), (2, ""), (2, "--fsdp"), (2, "--tp 2"), (4, ""), (4, "--fsdp"), (4, "--tp 2 --fsdp")],
    ids=lambda value: str(value).replace(" ", "") or "ddp",
)
def test_interrupted_is_never_interrupted(tmp_path: Path, n_ranks: int, options: str) -> None:
    expected = whole_run(tmp_path / "whole", n_ranks, f"{options} --save-every 100", steps=STEPS)
    folder = tmp_path / "torn"
    lines: dict[int, Any] = {}
    for stop, mode in ((3, ""), (6, "--async-save")):
        with Run(folder, n_ranks, f"{options} --save-every 2 {mode}", steps=STEPS) as run:
            run.until(stop)
            run.kill()
        assert not lines or min(run.lines) == 3
        lines |= run.lines
    last = whole_run(folder, n_ranks, f"{options} --save-every 2 --async-save", steps=STEPS)
    assert min(last.lines) > 1
    assert lines | last.lines == expected.lines


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
