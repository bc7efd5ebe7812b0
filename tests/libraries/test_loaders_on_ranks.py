"""Trainer and accelerate on several ranks: a resumed run reads what the uninterrupted run reads, or is refused."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.peers.required import long

pytestmark = pytest.mark.slow
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ran:
    """What a run has read on each rank: `read [samples] sum loss`; and the weights after its steps."""

    codes: list[int]
    reads: list[list[str]]
    weights: list[str]
    refused: list[str]

    def samples(self) -> list[list[int]]:
        """The samples of each step, of all ranks."""
        rows = [[ast.literal_eval(line[5 : line.index("]") + 1]) for line in lines] for lines in self.reads]
        return [sorted(one for batch in batches for one in batch) for batches in zip(*rows, strict=True)]


def ran(folder: Path, cases: list[dict[str, Any]]) -> list[Ran]:
    """Run cases one after the other, in forks of one process: the imports take longer than the runs."""
    roots = [str(folder / case["root"]) for case in cases]
    cases = [{**cases[n], "out": str(folder / f"{n}.txt"), "root": root} for n, root in enumerate(roots)]
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-m", "tests.libraries.loaders_on_ranks", str(folder / "cases.json")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=_ROOT, env=env, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    found = []
    for case, line in zip(cases, [one for one in done.stdout.splitlines() if one.startswith("[")], strict=True):
        outputs = [Path(f"{case['out']}.{rank}").read_text() for rank in range(case["ranks"])]
        codes = json.loads(line)
        assert set(codes) <= {0, 3, 75}, (case, codes, outputs)
        lines = [one.splitlines() for one in outputs]
        found.append(
            Ran(
                codes,
                [[one for one in of_rank if one.startswith("read ")] for of_rank in lines],
                [one for one in lines[0] if one.startswith("step ")],
                [one for of_rank in lines for one in of_rank if one.startswith("refused ")],
            )
        )
    return found


CASES: list[dict[str, Any]] = [
    {"library": "transformers", "kind": "stream"},  # the main process dispatches it
    {"library": "transformers", "kind": "shuffle"},
    {"library": "accelerate", "kind": "stream", "config": {"dispatch_batches": False}},
    {"library": "accelerate", "kind": "weighted", "config": {"dispatch_batches": True, "split_batches": True}},
]


def test_a_resumed_run_on_two_ranks_is_the_uninterrupted_one_and_the_one_without_this_package(tmp_path: Path) -> None:
    cases = []
    for number, case in enumerate(CASES):
        common = case | {"ranks": 2, "steps": 10}
        one, two = {"root": f"whole{number}"}, {"root": f"cut{number}"}
        cases += [common | one | {"callback": False}, common | one, common | two | {"stop": 3}, common | two]
    found = ran(tmp_path, cases)
    for number, case in enumerate(CASES):
        without, whole, cut, rest = found[4 * number : 4 * number + 4]
        assert without == whole, case
        assert (cut.codes, rest.codes) == ([75, 75], [0, 0]), (case, rest.refused)
        assert [len(one) for one in rest.reads] == [7, 7]
        assert rest.reads == [one[3:] for one in whole.reads], case
        assert rest.weights[-7:] == whole.weights[3:], case


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"library": "accelerate", "kind": "shuffle", "config": {"split_batches": True}}, ""),
    ({"library": "accelerate", "kind": "shuffle"}, ""),
    ({"library": "transformers", "kind": "shuffle"}, ""),
    ({"library": "accelerate", "kind": "shuffle", "config": {"dispatch_batches": True}}, "dispatches it"),
    ({"library": "accelerate", "kind": "weighted"}, "drew the order of `WeightedRandomSampler` itself"),
    ({"library": "accelerate", "kind": "stream", "config": {"dispatch_batches": False}}, "read the stream `Stream`"),
]


@long
def test_within_an_epoch_other_ranks_read_the_same_samples_or_refuse(tmp_path: Path) -> None:
    cases = []
    for number, (case, _) in enumerate(OTHERS):
        for before, now in ((2, 1), (1, 2), (2, 3)):
            is_split = case.get("config", {}).get("split_batches", False)
            first, then = (
                case | {"ranks": ranks, "size": 6 if is_split else 6 // ranks, "steps": 3} for ranks in (before, now)
            )
            root = {"root": f"{number}-{before}-{now}"}
            cases += [first | {"root": f"whole{number}-{before}-{now}"}, first | root | {"stop": 1}, then | root]
    found = ran(tmp_path, cases)
    for place in range(0, len(cases), 3):
        whole, _, rest = found[place : place + 3]
        case, why = OTHERS[place // 9]
        if why:
            assert rest.refused, case
            assert why in rest.refused[0]
        else:
            assert rest.samples() == whole.samples()[1:], (case, cases[place + 2]["ranks"])
