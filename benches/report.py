"""What is done with results: printed, written as JSON, drawn. Reports of several runs are joined."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from benches import picture
from benches.table import Result, table_lines, target_lines

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Report = dict[str, Any]
"""`machine`: facts by name; `results`, `targets`: fields of `Result`, lines of `judge`."""


def join(reports: Sequence[Report]) -> Report:
    """One report of several; facts that differ are all named."""
    names = dict.fromkeys(name for report in reports for name in report["machine"])
    machine = {name: "; ".join(dict.fromkeys(report["machine"].get(name, "?") for report in reports)) for name in names}
    return {"machine": machine} | {
        name: [one for report in reports for one in report[name]] for name in ("results", "targets")
    }


def finish(report: Report, json_file: Path | None, picture_file: Path | None) -> int:
    """Print a report, and write the files that were asked for.

    Args:
        report: of one run or joined.
        json_file: for the report itself.
        picture_file: for the speeds as bars.

    Returns:
        1 if a case failed: it had a wrong result, or a library raised an error.
    """
    results, machine = [Result(**one) for one in report["results"]], report["machine"]
    print("\n".join(f"{name}: {value}" for name, value in machine.items()))
    print("\n".join([*table_lines(results), *target_lines(report["targets"])]))
    if json_file:
        json_file.write_text(json.dumps(report, indent=1))
    if picture_file:
        heading = f"{machine['processor']}; {machine['date'].split(';')[0]}"
        picture_file.write_text(picture.draw(results, heading))
    failed = [result for result in results if result.failed]
    for result in failed:
        print(f"{result.table}: {result.name}: {result.reason}", file=sys.stderr)
    return 1 if failed else 0
