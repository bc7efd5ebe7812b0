"""`python -m benches`: measures reshard, other libraries and the limits of the machine, interleaved, and prints tables.

Every result is compared with the model byte for byte, outside of the clock. The exit status is 1 if a case failed: a
wrong byte, or an error of a library. A missed target does not change it. README.md describes the groups.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benches import convert, first_use, formats, loads, resume, saves, training
from benches.convert_cases import mindspore_version
from benches.machine import describe
from benches.report import finish, join
from benches.sources import Sources
from benches.table import Result, judge, run_interleaved, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from benches.report import Report
    from benches.table import Table

GROUPS: dict[str, Callable[[Sources], list[Table]]] = {
    "first-use": first_use.first_use,
    "slices": loads.slices,
    "slices-given": loads.slices_given,
    "whole": loads.whole,
    "whole-given": loads.whole_given,
    "verified": saves.verified,
    "cold": loads.cold,
    "merge": convert.merge,
    "split": convert.split,
    "tp4-to-tp2": convert.tp4_to_tp2,
    "formats-dcp": formats.dcp_to_huggingface,
    "formats-zero3": formats.zero3_to_huggingface,
    "formats-load": formats.dcp_rank,
    "formats-save": formats.dcp_save,
    "saves": saves.saves,
    "small-saves": saves.small_saves,
    "background": saves.background,
    "resume": resume.resume,
    "training": training.training,
}
"""What can be measured: a function that writes its sources to their folder and returns tables."""


def main(arguments: list[str] | None = None) -> int:
    """Parse the arguments of the command line, measure or read reports, and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benches", description=__doc__.partition("\n\n")[0])
    parser.add_argument("group", nargs="*", choices=[*GROUPS, []], help=f"default: all. {', '.join(GROUPS)}")
    parser.add_argument("--size-gb", type=float, default=1, help="size of the model in 10^9 bytes (default: 1)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each case (default: 5)")
    parser.add_argument("--dir", type=Path, help="where to put the model and what is made of it, 5 x its size")
    parser.add_argument(
        "--wait",
        type=float,
        default=0,
        help="seconds to wait before each run for other processes to become idle; a run that they disturb is repeated, "
        "3 times at most (default: 0, no wait and no repetition)",
    )
    parser.add_argument(
        "--mindspore",
        default=sys.executable,
        metavar="PYTHON",
        help="an interpreter that has MindSpore (default: this)",
    )
    parser.add_argument("--quick", action="store_true", help="0.13 GB and 1 round: only tests the cases")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the cost of every run to a file")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the speeds as bars, SVG")
    parser.add_argument(
        "--show", type=Path, nargs="+", metavar="FILE", help="measure nothing: print and draw what --json wrote"
    )
    given = parser.parse_args(arguments)
    reports = [json.loads(path.read_text()) for path in given.show] if given.show else [_measure(given)]
    return finish(join(reports), given.json, given.picture)


def _measure(given: argparse.Namespace) -> Report:
    """Run the groups, one after the other: each has a folder of its own, which is removed."""
    size_gb, n_rounds = (0.13, 1) if given.quick else (given.size_gb, given.rounds)
    if given.dir is not None:
        given.dir.mkdir(parents=True, exist_ok=True)
    machine = describe(given.dir or Path(tempfile.gettempdir()), mindspore_version(given.mindspore))
    results: list[Result] = []
    judged: list[dict[str, Any]] = []
    for group in given.group or GROUPS:
        with tempfile.TemporaryDirectory(prefix="reshard-bench-", dir=given.dir) as folder:
            say(f"{group}: writing a model of {size_gb:g} GB")
            for table in GROUPS[group](Sources(Path(folder) / "work", size_gb, given.mindspore)):
                found = run_interleaved(table, n_rounds, given.wait)
                results += found
                judged += judge(table, found)
                n_disturbed, n_runs = sum(one.n_disturbed for one in results), sum(len(one.costs) for one in results)
                machine["conditions"] = f"{size_gb:g} GB, {n_rounds} rounds, {n_disturbed} of {n_runs} runs disturbed"
                report = {
                    "machine": machine,
                    "results": [dataclasses.asdict(one) for one in results],
                    "targets": judged,
                }
                if given.json:
                    given.json.write_text(json.dumps(report))  # what was measured is kept if a later table is stopped
    return report


if __name__ == "__main__":
    sys.exit(main())
