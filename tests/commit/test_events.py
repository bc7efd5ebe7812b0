"""Events of saves, loads, retention and rollbacks, and the log of events: what is reported, and that nothing breaks."""

from __future__ import annotations

import datetime as dt
import json
import logging
import math
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.ranks import Job

import reshard
from reshard.commit import event_log, protocol
from reshard.commit.event_log import EVENT_FILE, OLD_EVENT_FILE, EventLog, EventReader
from reshard.errors import ArgumentError, DamagedFileError
from reshard.torch import Checkpointer
from reshard.values import events
from reshard.values.events import Event, Observers

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.ranks.group import TorchGroup

NOW = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)
FAST = {"durable": False}


def kinds(seen: list[Event]) -> list[tuple[str, int | None]]:
    return [(event.kind, event.iteration) for event in seen]


def save(root: Path, iteration: int, **options: Any) -> Any:
    return reshard.save(root, iteration, {"w": np.full((4, 6), iteration, np.float32)}, commit=FAST, **options)


@pytest.fixture(autouse=True)
def forget(_quick_saves: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_warned", set())


# -- who reports what


def test_a_save_reports_its_steps_with_bytes_and_seconds(tmp_path: Path) -> None:
    seen: list[Event] = []
    report = save(tmp_path / "run", 1, on_event=seen.append)
    assert kinds(seen) == [("begun", 1), ("written", 1), ("published", 1)]
    begun, written, published = (dict(event.fields) for event in seen)
    assert begun == {"n_bytes": 96, "n_ranks": 1, "blocking": True}
    assert written["n_bytes"] == 96
    names = ("n_bytes", "n_files", "durable", "path")
    assert {name: published[name] for name in names} == {name: getattr(report, name) for name in names}
    assert math.isclose(float(str(published["seconds"])), report.seconds, abs_tol=1e-5)
    assert [event.time for event in seen] == sorted(event.time for event in seen)


def test_a_save_in_the_background_reports_when_the_arrays_are_copied(tmp_path: Path) -> None:
    seen: list[Event] = []
    pending = save(tmp_path / "run", 1, on_event=seen.append, blocking=False)
    assert kinds(seen)[:2] == [("begun", 1), ("copied", 1)]
    report = pending.result(60)
    assert kinds(seen)[2:] == [("written", 1), ("published", 1)]
    assert math.isclose(float(str(seen[-1].fields["stall_seconds"])), report.stall_seconds, abs_tol=1e-5)
    waited: list[int] = []
    ready = save(tmp_path / "run", 2, on_event=seen.append, blocking=False, ready=lambda: waited.append(len(seen)))
    ready.result(60)
    assert kinds(seen)[4:] == [("begun", 2), ("copied", 2), ("written", 2), ("published", 2)]
    assert waited[0] == 5, "`copied` comes after the first wait"


@pytest.mark.parametrize("blocking", [True, False])
def test_a_save_that_fails_says_so_once(tmp_path: Path, blocking: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    seen: list[Event] = []
    save(tmp_path / "run", 1)
    monkeypatch.setattr(protocol, "publish", lambda *_: (_ for _ in ()).throw(reshard.ReshardError("no luck")))
    with pytest.raises(reshard.ReshardError):
        save(tmp_path / "run", 2, on_event=seen.append, blocking=blocking).result(60)
    assert [kind for kind, _ in kinds(seen)] == ["begun", *(() if blocking else ["copied"]), "written", "failed"]
    assert (seen[-1].fields["error"], seen[-1].fields["reason"]) == ("ReshardError", "no luck")


def test_a_save_that_is_refused_and_a_dry_run(tmp_path: Path) -> None:
    seen: list[Event] = []
    save(tmp_path / "run", 5)
    save(tmp_path / "run", 6, on_event=seen.append, dry_run=True)
    assert not seen
    with pytest.raises(ArgumentError):
        save(tmp_path / "run", 7, on_event=seen.append, layout=3)
    assert kinds(seen) == [("failed", 7)]
    with pytest.raises(ArgumentError, match="on_event"):
        save(tmp_path / "run", 7, on_event=3)
    with pytest.raises(ArgumentError, match="on_event"):
        Checkpointer(tmp_path / "run", on_event=["print"])  # type: ignore[list-item]


def test_retention_rollback_and_prune_report_each_iteration(tmp_path: Path) -> None:
    seen: list[Event] = []
    root = tmp_path / "run"
    for iteration in range(1, 4):
        save(root, iteration, keep=1, on_event=seen.append)
    pruned = [event for event in seen if event.kind == "pruned"]
    assert kinds(pruned) == [("pruned", 1), ("pruned", 2)]
    assert pruned[0].fields["reason"] == "not kept by Retention(keep=1)"
    assert int(str(pruned[0].fields["n_bytes"])) > 96
    save(root, 4)
    save(root, 5)
    seen.clear()
    reshard.rollback(root, 4, on_event=seen.append)
    reshard.prune(root, 1, on_event=seen.append, dry_run=True)
    reshard.prune(root, 1, on_event=seen.append)
    assert kinds(seen) == [("rolled_back", 4), ("pruned", 3)]
    assert dict(seen[0].fields) == {"previous": 5, "newer": "5", "verified": True}


def test_a_load_reports_what_it_skips_and_what_it_takes(tmp_path: Path) -> None:
    seen: list[Event] = []
    root = tmp_path / "run"
    assert reshard.load(root, on_event=seen.append).decision.fresh
    assert (kinds(seen), seen[0].fields["fresh"]) == ([("resumed", None)], True)
    for iteration in (1, 2, 3):
        save(root, iteration)
    (root / "iteration_00000003" / "common.json").write_text("{")
    shard = next((root / "iteration_00000002").glob("model-*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    seen.clear()
    reshard.load(root, on_event=seen.append)
    assert kinds(seen) == [("skipped", 3), ("skipped", 2), ("resumed", 1)]
    assert seen[2].fields["restored"] == ", ".join(reshard.load(root).decision.restored) != ""
    assert "common.json" in str(seen[0].fields["reason"])
    assert "differ from what was written" in str(seen[1].fields["reason"])


def test_checkpoint1_reports_its_saves(tmp_path: Path) -> None:
    seen: list[Event] = []
    for iteration in (1, 2, 3):
        save(tmp_path / "run", iteration, keep=2, format="checkpoint1", on_event=seen.append)
    assert [kind for kind, _ in kinds(seen)] == [*["begun", "written", "published"] * 3, "pruned"]
    assert seen[-1].fields["name"] == "1_1"


def test_a_run_of_two_ranks_reports_its_own_steps_on_each_and_the_rest_on_rank_0(tmp_path: Path) -> None:
    root = tmp_path / "run"

    def work(group: TorchGroup) -> list[list[Any]]:
        seen: list[Event] = []
        options: dict[str, Any] = {"signals": (), "group": group, "on_event": [seen.append, EventLog(root)]}
        with Checkpointer(root, save_every=1, keep=1, **options) as made:
            made.resume(model=torch.nn.Linear(4, 4))
            for step in (1, 2):
                made.step(step)
        return [[event.kind, event.iteration, event.rank] for event in seen]

    with Job(2, work) as job:
        first, second = job.values()
    own = [[kind, iteration, 1] for iteration in (1, 2) for kind in ("begun", "copied", "written")]
    assert second == own
    of_run = [one for one in first if one[0] not in ("begun", "copied", "written")]
    assert of_run == [["resumed", None, 0], ["published", 1, 0], ["published", 2, 0], ["pruned", 1, 0]]
    assert [[event.kind, event.iteration, event.rank] for event in EventReader(root).new()] == first


def test_a_function_that_fails_is_logged_once_and_breaks_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Event] = []

    def fails(event: Event) -> None:
        raise RuntimeError(f"no network at {event.kind}")

    with caplog.at_level(logging.WARNING):
        for iteration in (1, 2):
            report = save(tmp_path / "run", iteration, on_event=[fails, seen.append])
            assert not report.warnings
    assert len(seen) == 6
    lines = [record.getMessage() for record in caplog.records if "on_event" in record.getMessage()]
    assert len(lines) == 1
    assert "fails failed: RuntimeError: `no network at begun`" in lines[0]


def test_progress_is_an_event_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Event] = []
    clock = [0.0]
    monkeypatch.setattr(events, "_PROGRESS_SECONDS", 1.0)
    monkeypatch.setattr("reshard.values.events.time.monotonic", lambda: clock[0])
    passed: list[tuple[int, int]] = []
    progress = Observers.of(seen.append).progress(7, lambda *both: passed.append(both))
    for n in range(25):
        clock[0] = n / 10
        progress(n, 25)
    assert [dict(event.fields) for event in seen] == [{"n_bytes": n, "total_bytes": 25} for n in (10, 20)]
    assert len(passed) == 25


# -- the JSON form


@given(
    st.builds(
        Event,
        st.from_regex("[a-z][a-z0-9_]{0,31}", fullmatch=True),
        st.none() | st.integers(0, 2**63 - 1),
        st.datetimes(timezones=st.just(dt.UTC)).map(
            lambda when: when.replace(microsecond=when.microsecond // 1000 * 1000)
        ),
        st.integers(0, 2**63 - 1),
        st.dictionaries(
            st.from_regex("[a-z][a-z0-9_]{0,31}", fullmatch=True),
            st.none()
            | st.booleans()
            | st.integers(-(2**63), 2**63 - 1)
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(st.characters(exclude_categories=["Cs"]), max_size=50),
            max_size=5,
        ),
    )
)
def test_an_event_survives_json(event: Event) -> None:
    assert Event.from_json(json.loads(json.dumps(event.to_json()))) == event


def line(**changes: Any) -> dict[str, Any]:
    return {"kind": "pruned", "iteration": 1, "time": NOW.isoformat(), "rank": 0, "fields": {"n_bytes": 3}} | changes


BAD_LINES: list[Any] = [
    b"\xff\n", b"{\n", b"[]\n", b"null\n", b"{}\n", b'{"kind": "pruned"}\n', b"[" * 5000 + b"\n",
    *(json.dumps(value).encode() + b"\n" for value in (
        line(kind="a b"), line(kind=3), line(kind="x" * 40), line(iteration=-1), line(iteration=True),
        line(iteration=1 << 63), line(iteration=1.5), line(time="yesterday"), line(time="2026-01-31T12:00:00"),
        line(time=3), line(time="2" * 5000), line(rank=None), line(rank=-1), line(fields=[]),
        line(fields={"n": {"deep": 1}}), line(fields={"n": "x" * 5000}), line(fields={"A b": 1}),
        line(fields={f"n{i}": i for i in range(40)}), line(fields={"n": 1 << 64}),
    )),
    json.dumps(line(fields={"n": math.nan})).encode() + b"\n",
    json.dumps(line(fields={"reason": "x"}, more="y" * (70 << 10))).encode() + b"\n",
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD_LINES, ids=range(len(BAD_LINES)))
def test_an_invalid_line_is_skipped_and_counted(tmp_path: Path, bad: bytes) -> None:
    good = json.dumps(line()).encode() + b"\n"
    (tmp_path / EVENT_FILE).write_bytes(good + bad + good)
    reader = EventReader(tmp_path)
    assert (len(reader.new()), reader.n_bad) == (2, 1)
    # Nothing depends on the log.
    save(tmp_path, 1)
    assert reshard.load(tmp_path).iteration == 1


def test_keys_and_kinds_of_later_versions_are_accepted(tmp_path: Path) -> None:
    (tmp_path / EVENT_FILE).write_text(json.dumps(line(kind="exported", more=[1])) + "\n")
    assert kinds(EventReader(tmp_path).new()) == [("exported", 1)]


# -- the log


def event(n: int, text: str = "") -> Event:
    return Event("pruned", n, NOW, 0, {"reason": text})


def test_a_line_is_what_the_format_says(tmp_path: Path) -> None:
    EventLog(tmp_path)(Event("pruned", 1, NOW, 0, {"n_bytes": 3}))
    text = (tmp_path / EVENT_FILE).read_text()
    expected = {
        "kind": "pruned",
        "iteration": 1,
        "time": "2026-01-31T12:00:00.000+00:00",
        "rank": 0,
        "fields": {"n_bytes": 3},
    }
    assert (text[-1], text.count("\n"), json.loads(text)) == ("\n", 1, expected)
    EventLog(tmp_path)(Event("pruned", 1, NOW, 3))
    assert (tmp_path / EVENT_FILE).read_text() == text, "other ranks do not write"


def test_events_from_before_the_root_exists_are_written_later(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "run")
    log(event(1))
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    log(event(2))
    assert kinds(EventReader(tmp_path / "run").new()) == [("pruned", 1), ("pruned", 2)]


def test_the_log_is_bounded_and_a_reader_misses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "_MAX_FILE_BYTES", 4096)
    log, reader, seen = EventLog(tmp_path), EventReader(tmp_path), list[int | None]()
    for n in range(200):
        log(event(n, "x" * 50))
        if n % 7 == 0:
            seen += [one.iteration for one in reader.new()]
    seen += [one.iteration for one in reader.new()]
    assert seen == list(range(200))
    assert sum((tmp_path / name).stat().st_size for name in (EVENT_FILE, OLD_EVENT_FILE)) < 3 * 4096
    late = [one.iteration for one in EventReader(tmp_path).new()]
    assert late == list(range(200 - len(late), 200))
    assert len(late) > 4096 // 200


def test_a_truncated_line_is_completed_by_the_next_one(tmp_path: Path) -> None:
    log, reader = EventLog(tmp_path), EventReader(tmp_path)
    log(event(1))
    whole = (tmp_path / EVENT_FILE).read_bytes()
    (tmp_path / EVENT_FILE).write_bytes(whole + whole[:20])
    assert kinds(reader.new()) == [("pruned", 1)]
    log(event(2))
    assert (kinds(reader.new()), reader.n_bad) == ([("pruned", 2)], 1)
    (tmp_path / EVENT_FILE).write_bytes(b"")  # another program has truncated it
    assert reader.new() == []
    log(event(3))
    assert kinds(reader.new()) == [("pruned", 3)]


def test_the_log_is_no_link(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "run"
    save(root, 1)
    (tmp_path / "other").write_text("")
    (root / EVENT_FILE).symlink_to(tmp_path / "other")
    with caplog.at_level(logging.WARNING):
        save(root, 2, on_event=EventLog(root))
    assert (tmp_path / "other").read_text() == ""
    assert any("`on_event`" in record.getMessage() for record in caplog.records)
    with pytest.raises(DamagedFileError):
        EventReader(root).new()


@pytest.mark.slow
def test_lines_of_several_processes_are_not_mixed(tmp_path: Path) -> None:
    code = """if True:
        import datetime as dt, sys
        from reshard.commit.event_log import EventLog, Event
        log = EventLog(sys.argv[1])
        for n in range(200):
            log(Event("pruned", int(sys.argv[2]) + n, dt.datetime.now(dt.UTC), 0, {"reason": "y" * 300}))
    """
    made = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(1000 * n)]) for n in range(3)]
    assert [one.wait(60) for one in made] == [0, 0, 0]
    reader = EventReader(tmp_path)
    found = sorted(one.iteration or 0 for one in reader.new())
    assert reader.n_bad == 0
    assert found == [1000 * n + i for n in range(3) for i in range(200)]
