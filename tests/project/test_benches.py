"""`python -m benches`: rounds, targets, tables, the picture; a wrong byte is found. CI runs every case once."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from benches import model, picture
from benches.report import finish, join
from benches.table import Case, Result, Table, Target, Unavailable, judge, run_interleaved, table_lines, target_lines
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from pathlib import Path

GB = 10**9


def result(name: str, *seconds: float, kind: str = "peer", n_bytes: int = GB, **more: object) -> Result:
    return Result("loads", name, kind, n_bytes, list(seconds), **more)


def case(name: str, costs: list[float], error: Exception | None = None) -> Case:
    def run() -> float:
        if error:
            raise error
        return costs.pop(0)

    return Case(name, GB, run)


def test_a_case_that_fails_does_not_stop_the_others() -> None:
    cases = [
        case("good", [3.0, 1.0]),
        case("wrong", [], AssertionError("w differs in rows 0 to 8\nmore")),
        case("missing", [], Unavailable("orbax is not installed")),
    ]
    good, wrong, missing = run_interleaved(Table("t", cases), n_rounds=2, wait_seconds=0)
    assert good.costs == [3.0, 1.0]
    assert (wrong.costs, wrong.failed, wrong.reason) == ([], True, "FAILED: AssertionError: w differs in rows 0 to 8")
    assert (missing.costs, missing.failed, missing.reason) == ([], False, "orbax is not installed")


def judged(target: Target, *results: Result) -> tuple[object, ...]:
    (line,) = judge(Table("loads", [], (target,)), list(results))
    return line["against"], line["found"], line["found_of_medians"], line["held"]


def test_a_target_compares_the_best_runs_with_the_fastest_yardstick() -> None:
    ours, slow, fast = result("ours", 0.5, 2.0, 4.0), result("slow", 8.0), result("fast", 0.4, 1.0, 1.0)
    names = ("slow", "fast", "missing")
    missing = result("missing", reason="not installed")
    assert judged(Target("ours", names, 0.8), ours, slow, fast, missing) == ("fast", 0.8, 0.5, True)
    assert judged(Target("ours", names, 0.81), ours, slow, fast, missing) == ("fast", 0.8, 0.5, False)


def test_other_numbers_of_bytes_are_compared_by_rate() -> None:
    half = result("ours", 1.0, n_bytes=GB // 2)
    assert judged(Target("ours", ("whole",), 0.6), half, result("whole", 1.0)) == ("whole", 0.5, 0.5, False)


def test_a_limit_of_a_cost_is_a_target() -> None:
    ours = result("ours", 0.05, 0.1, 0.2, n_bytes=0)
    assert judged(Target("ours", at_most=0.1), ours) == (None, 2.0, 1.0, True)


@pytest.mark.parametrize("absent", ["ours", "peer"])
def test_what_was_not_measured_is_neither_held_nor_missed(absent: str) -> None:
    results = [result(name, *([] if name == absent else [1.0])) for name in ("ours", "peer")]
    target = Target("ours", ("peer",))
    assert judged(target, *results) == (None, None, None, None)
    line = target_lines(judge(Table("loads", [], (target,)), results))[-1]
    assert line == "| loads: ours / peer | 1.00 | - | - | not measured |"


def test_tables_name_every_case() -> None:
    lines = table_lines(
        [
            result("ours", 0.5, 1.0, 0.25, kind="reshard"),
            result("copy", 0.1, kind="limit"),
            result("disk", 5e8, n_bytes=0, unit="bytes"),
            result("Orbax", reason="orbax-checkpoint is not installed"),
        ]
    )
    assert lines[3:] == [
        "| ours | 1.00 | 2.00 | 4.00 | 0.5000 s (0.2500 s to 1.0000 s) |",
        "| limit: copy | 1.00 | 10.00 | 10.00 | 0.1000 s (0.1000 s to 0.1000 s) |",
        "| disk | - | - | - | 0.500 GB (0.500 GB to 0.500 GB) |",
        "| Orbax | - | - | - | orbax-checkpoint is not installed |",
    ]


def test_the_picture_has_a_bar_for_each_rate_and_a_line_at_the_fastest_limit() -> None:
    results = [
        result("ours <2>", 1.0, kind="reshard"),
        result("slow", 4.0),
        result("gone", reason="not installed"),
        result("copy", 0.5, kind="limit"),
        result("cp", 2.0, kind="limit"),
    ]
    root = ET.fromstring(picture.draw(results, "a & b"))
    name = "{http://www.w3.org/2000/svg}"
    bars = [one for one in root.iter(f"{name}rect") if one.get("x")]
    ours, slow, copy, cp = (float(one.get("width", "")) for one in bars)
    assert (slow / ours, copy / ours, cp / ours) == pytest.approx((0.25, 2, 0.5), abs=0.01)
    (line,) = root.iter(f"{name}line")
    assert float(line.get("x1", "")) == pytest.approx(float(bars[2].get("x", "")) + copy, abs=0.2)
    texts = [one.text for one in root.iter(f"{name}text")]
    assert {"a & b", "ours <2>", "gone", "not installed", "1.00 GB/s"} <= set(texts)


def test_reports_are_joined_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def report(name: str, load: str, reason: str) -> dict[str, object]:
        found = Result(name, "ours", "reshard", GB, [1.0], failed=bool(reason), reason=reason)
        return {
            "machine": {"date": "now", "processor": "P", "load": load},
            "results": [dataclasses.asdict(found)],
            "targets": [],
        }

    reports = [report("loads", "0.1", ""), report("saves", "0.2", "FAILED: wrong")]
    assert finish(join(reports[:1]), None, tmp_path / "p.svg") == 0
    assert finish(join(reports), tmp_path / "all.json", tmp_path / "p.svg") == 1
    out, err = capsys.readouterr()
    assert "load: 0.1; 0.2" in out
    assert "processor: P\n" in out
    assert err == "saves: ours: FAILED: wrong\n"
    assert [one["table"] for one in json.loads((tmp_path / "all.json").read_text())["results"]] == ["loads", "saves"]
    assert (tmp_path / "p.svg").read_text().count('font-weight="600" font-size="12"') == 2


def test_a_wrong_byte_is_found(tmp_path: Path) -> None:
    key, shape = next(iter(model.shapes(0).items()))
    path = tmp_path / "model.safetensors"
    model.write(path, 0)
    found = {key: model.read(path)[key].copy()}
    model.check_whole(path, found)
    found[key][-1, -1] ^= 1
    with pytest.raises(AssertionError, match=r"k_proj.weight differs in rows 0 to"):
        model.check_whole(path, found)
    with pytest.raises(AssertionError, match="the tensors are not those"):
        model.check_whole(path, {})
    assert found[key].shape == shape


def test_the_header_that_peers_write_is_valid(tmp_path: Path) -> None:
    shapes = {"a": (2, 3), "b": (5,)}
    header, offsets = model.header(shapes)
    content = np.arange(11, dtype=np.uint16)
    (tmp_path / "ours").write_bytes(header + content.tobytes())
    found = model.read(tmp_path / "ours")
    assert {key: (array.shape, array.ravel().tolist()) for key, array in found.items()} == {
        "a": ((2, 3), [0, 1, 2, 3, 4, 5]),
        "b": ((5,), [6, 7, 8, 9, 10]),
    }
    assert offsets == {"a": len(header), "b": len(header) + 12}
    save_file({"a": content}, tmp_path / "other")  # U16: not a model that is measured
    with pytest.raises(AssertionError, match="U16"):
        model.read(tmp_path / "other")
