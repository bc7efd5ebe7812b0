"""Tables of cases, how they are measured in rounds, and how results are compared with targets and printed.

The cases are in other modules.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

Kind = Literal["reshard", "peer", "limit"]

_ATTEMPTS = 4
# Factors from a unit to the one that is printed, with digits after the point.
_PRINTED = {"s": (1, "s", 4), "bytes": (1e-9, "GB", 3)}


class Unavailable(Exception):  # noqa: N818  it is no error: the case is listed with this reason
    """This machine or environment cannot run a case."""


@dataclass(frozen=True)
class Case:
    """One line of a table: a name, and how to run it once for its cost.

    Attributes:
        name: unique in its table.
        n_bytes: bytes that were requested; 0 if a rate has no meaning.
        run: runs the case once, checks its result, and returns the cost.
        kind: whose code it is; `limit`: what the machine allows.
        unit: of the cost: `s`, or `bytes`.
    """

    name: str
    n_bytes: int
    run: Callable[[], float]
    kind: Kind = "reshard"
    unit: Literal["s", "bytes"] = "s"


@dataclass(frozen=True)
class Target:
    """How fast a case must be: a factor of the speed of the fastest of some others, or a limit of its cost."""

    case: str
    yardsticks: tuple[str, ...] = ()
    factor: float = 1.0
    at_most: float | None = None


@dataclass(frozen=True)
class Table:
    """Cases that are measured interleaved, and what is required of them."""

    name: str
    cases: list[Case]
    targets: tuple[Target, ...] = ()


@dataclass(frozen=True)
class Result:
    """The costs of a case, one for each round.

    A run is disturbed if other processes were running when it began or ended. Without costs, `reason` says why.
    """

    table: str
    name: str
    kind: Kind
    n_bytes: int
    costs: list[float]
    unit: Literal["s", "bytes"] = "s"
    n_disturbed: int = 0
    reason: str = ""
    failed: bool = False

    def speed(self, *, best: bool) -> float:
        """Bytes a second, or with 0 bytes runs a second: of the best run, or of the median."""
        cost = min(self.costs) if best else statistics.median(self.costs)
        return (self.n_bytes or 1) / max(cost, 1e-9)


def run_interleaved(table: Table, n_rounds: int, wait_seconds: float) -> list[Result]:
    """Run every case once per round, in random order, so that a disturbance of the machine affects all cases.

    A case that fails is reported with its error and not run again.

    Args:
        table: the cases.
        n_rounds: how often each runs.
        wait_seconds: how long to wait for other processes before each run; 0: no wait, no repetition.
    """
    costs: dict[str, list[float]] = {case.name: [] for case in table.cases}
    n_disturbed = dict.fromkeys(costs, 0)
    stopped: dict[str, Exception] = {}
    order = random.Random(0)
    for number in range(n_rounds):
        for case in order.sample(table.cases, len(table.cases)):
            if case.name in stopped:
                continue
            say(f"{table.name}, round {number + 1} of {n_rounds}: {case.name}")
            try:
                for _ in range(_ATTEMPTS if wait_seconds else 1):
                    was_quiet = is_quiet(wait_seconds)
                    found = case.run()
                    if was_quiet and is_quiet(0):
                        break
                else:
                    n_disturbed[case.name] += 1
            except Exception as error:  # noqa: BLE001  of any library; the other cases still run
                stopped[case.name] = error
                costs[case.name] = []
                n_disturbed[case.name] = 0
            else:
                costs[case.name].append(found)
    return [
        Result(
            table.name,
            case.name,
            case.kind,
            case.n_bytes,
            costs[case.name],
            unit=case.unit,
            n_disturbed=n_disturbed[case.name],
            reason=_reason(stopped.get(case.name)),
            failed=case.name in stopped and not isinstance(stopped[case.name], Unavailable),
        )
        for case in table.cases
    ]


def _reason(error: Exception | None) -> str:
    if error is None:
        return ""
    first = (str(error).splitlines() or [""])[0]
    return first if isinstance(error, Unavailable) else f"FAILED: {type(error).__name__}: {first}"


def is_quiet(wait_seconds: float) -> bool:
    """Whether no other process runs for a tenth of a second, within the time to wait."""
    deadline = time.monotonic() + wait_seconds
    while True:
        n_running = 0
        for _ in range(10):
            n_running += int(Path("/proc/loadavg").read_text().split()[3].split("/")[0]) - 1  # this one runs, too
            time.sleep(0.01)
        if n_running <= 2:
            return True
        if time.monotonic() >= deadline:
            return False


def judge(table: Table, results: list[Result]) -> list[dict[str, Any]]:
    """Compare the results of a table with its targets, best run against best run.

    `found` is the ratio of speeds, so that more is better; a limit of a cost counts as a yardstick with that cost.
    It is None if the case or all its yardsticks have no result.
    """
    by_name = {result.name: result for result in results}
    judged = []
    for target in table.targets:
        case = by_name[target.case]
        measured = [by_name[name] for name in target.yardsticks if by_name[name].costs]
        line: dict[str, Any] = {"table": table.name, "case": target.case, "wanted": target.factor, "unit": case.unit}
        line |= {"yardsticks": list(target.yardsticks), "at_most": target.at_most, "against": None}
        line |= {"found": None, "found_of_medians": None, "held": None}
        if case.costs and target.at_most is not None:
            line["found"] = target.at_most / min(case.costs)
            line["found_of_medians"] = target.at_most / statistics.median(case.costs)
        elif case.costs and measured:
            fastest = max(measured, key=lambda result: result.speed(best=True))
            line["against"] = fastest.name
            line["found"] = case.speed(best=True) / fastest.speed(best=True)
            line["found_of_medians"] = case.speed(best=False) / max(one.speed(best=False) for one in measured)
        if line["found"] is not None:
            line["held"] = line["found"] >= target.factor
        judged.append(line)
    return judged


def table_lines(results: list[Result]) -> list[str]:
    """The tables as Markdown."""
    lines = []
    for table in dict.fromkeys(result.table for result in results):
        lines += ["", f"| {table} | GB | GB/s: median | best | median (least to most) |", "|---|---:|---:|---:|---:|"]
        for result in (r for r in results if r.table == table):
            name = f"limit: {result.name}" if result.kind == "limit" else result.name
            if not result.costs:
                lines.append(f"| {name} | - | - | - | {result.reason.replace('|', '/')} |")
                continue
            size = f"{result.n_bytes / 1e9:.2f}" if result.n_bytes else "-"
            rates = [
                f"{result.speed(best=best) / 1e9:.2f}" if result.n_bytes and result.unit == "s" else "-"
                for best in (False, True)
            ]
            least, most = printed(min(result.costs), result.unit), printed(max(result.costs), result.unit)
            spread = f"{printed(statistics.median(result.costs), result.unit)} ({least} to {most})"
            lines.append(f"| {name} | {size} | {rates[0]} | {rates[1]} | {spread} |")
    return lines


def target_lines(judged: list[dict[str, Any]]) -> list[str]:
    """The targets as a Markdown table."""
    if not judged:
        return []
    lines = ["", "| target | wanted | found: best / best | medians | |", "|---|---:|---:|---:|---|"]
    for target in judged:
        limit = target["at_most"]
        against = printed(limit, target["unit"]) if limit is not None else target["against"]
        against = against or " or ".join(target["yardsticks"])
        found, medians = (
            "-" if target[name] is None else f"{target[name]:.2f}" for name in ("found", "found_of_medians")
        )
        verdict = {True: "held", False: "MISSED", None: "not measured"}[target["held"]]
        name = f"{target['table']}: {target['case']} / {against}"
        lines.append(f"| {name} | {target['wanted']:.2f} | {found} | {medians} | {verdict} |")
    return lines


def printed(cost: float, unit: str) -> str:
    """A cost with its unit."""
    factor, name, digits = _PRINTED[unit]
    return f"{cost * factor:.{digits}f} {name}"


def say(text: str) -> None:
    """Show progress at a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
