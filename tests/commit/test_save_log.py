"""The log of saves: what is written is read, and what is torn or foreign harms nothing else."""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard.commit import filesystem
from reshard.commit.save_log import SAVE_LOG_FILE, SaveRecord, append, read
from reshard.errors import ArgumentError, DamagedFileError, StorageError
from reshard.storage.location import locate

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from reshard.storage.location import Location

TIME = "2025-03-01T12:00:00+00:00"


def record(iteration: int = 500, **changes: Any) -> SaveRecord:
    return SaveRecord(iteration, TIME, 3.25, 0.5, 1 << 40, **changes)


def line(**changes: Any) -> dict[str, Any]:
    """A line by the description of the format."""
    return {
        "iteration": 500,
        "saved_at": TIME,
        "wall_s": 3.25,
        "stall_s": 0.5,
        "n_bytes": 1 << 40,
        "metrics": {"loss": 2.5, "norm": "nan"},
        "epoch": 7,
        "attempt": "0123456789abcdef" * 2,
        "ckpt_status": None,
        "digest": None,
    } | changes


def test_a_line_is_what_the_format_says(tmp_path: Path) -> None:
    metrics = {"loss": 2.5, "norm": math.nan}
    append(locate(tmp_path), record(metrics=metrics, generation=7, attempt="0123456789abcdef" * 2))
    data = (tmp_path / SAVE_LOG_FILE).read_bytes()
    assert data.endswith(b"}\n")
    assert json.loads(data) == line()
    assert (tmp_path / SAVE_LOG_FILE).stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@given(
    st.dictionaries(
        st.text(max_size=20).filter(lambda t: t.isprintable()), st.floats() | st.integers(-(2**63), 2**63 - 1)
    )
)
def test_metrics_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, metrics: dict[str, float]) -> None:
    root = tmp_path_factory.mktemp("root")
    append(locate(root), record(metrics=metrics), durable=False)
    (got,) = read(locate(root))
    assert repr(dict(got.metrics)) == repr(metrics)  # tells nan, -0.0 and 1 from 1.0 as equality does not


def test_metrics_of_numpy_are_numbers(tmp_path: Path) -> None:
    append(locate(tmp_path), record(metrics={"a": np.float32(0.5), "b": np.int64(3), "c": np.array(2.5)}))
    assert read(locate(tmp_path))[0].metrics == {"a": 0.5, "b": 3, "c": 2.5}


def test_no_log_is_no_saves(tmp_path: Path) -> None:
    assert read(locate(tmp_path)) == []
    (tmp_path / SAVE_LOG_FILE).touch()
    assert read(locate(tmp_path)) == []


def test_the_last_line_of_an_iteration_counts(tmp_path: Path) -> None:
    for iteration, loss in ((1, 3.0), (2, 2.0), (3, 1.0), (2, 1.5)):
        append(locate(tmp_path), record(iteration, metrics={"loss": loss}))
    assert [(entry.iteration, entry.metrics["loss"]) for entry in read(locate(tmp_path))] == [
        (1, 3.0),
        (3, 1.0),
        (2, 1.5),
    ]


def test_a_line_torn_at_any_byte_harms_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / SAVE_LOG_FILE
    append(locate(tmp_path), record(1))
    whole = path.read_bytes()
    append(locate(tmp_path), record(2))
    both = path.read_bytes()
    for n_bytes in range(len(whole), len(both) + 1):
        path.write_bytes(both[:n_bytes])
        survivors = [1, 2] if n_bytes >= len(both) - 1 else [1]  # only the newline is missing
        assert [entry.iteration for entry in read(locate(tmp_path))] == survivors
        append(locate(tmp_path), record(3), durable=False)
        assert [entry.iteration for entry in read(locate(tmp_path))] == [*survivors, 3]
    assert caplog.messages[0].endswith("1 lines are torn or in another form, and are skipped")


LINES: list[tuple[str, object]] = [
    ("no object", []),
    ("iteration missing", {name: value for name, value in line().items() if name != "iteration"}),
    ("iteration true", line(iteration=True)),
    ("iteration negative", line(iteration=-1)),
    ("iteration a float", line(iteration=5.0)),
    ("iteration text", line(iteration="5")),
    ("saved_at a number", line(saved_at=5)),
    ("saved_at no time", line(saved_at="today")),
    ("saved_at without a zone", line(saved_at="2025-03-01T12:00:00")),
    ("wall_s negative", line(wall_s=-1)),
    ("wall_s text", line(wall_s="nan")),
    ("stall_s null", line(stall_s=None)),
    ("metrics a list", line(metrics=[])),
    ("metrics text", line(metrics={"loss": "low"})),
    ("metrics true", line(metrics={"loss": True})),
    ("a metric that drives a terminal", line(metrics={"\x1b[2J": 1})),
    ("metrics deep", line(metrics={"loss": {"a": 1}})),
    ("attempt short", line(attempt="ab")),
    ("attempt a path", line(attempt="../" * 10 + "ab")),
    ("epoch null", line(epoch=None)),
    ("ckpt_status text", line(ckpt_status="good")),
]


@pytest.mark.parametrize("content", [pytest.param(row[1], id=row[0]) for row in LINES])
def test_a_foreign_line_is_passed_over(content: object, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [json.dumps(entry) for entry in (line(iteration=1), content, line(iteration=2, later="field"))]
    (tmp_path / SAVE_LOG_FILE).write_text("\n".join(lines) + "\n")
    assert [entry.iteration for entry in read(locate(tmp_path))] == [1, 2]
    assert "1 lines are torn" in caplog.text


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xfe",
        b"[" * 50_000,
        b'{"iteration":1,"iteration":1}',
        b"NaN",
        b'"' + b"x" * (64 << 10) + b'"',
        b"\0" * 4096,
    ],
    ids=["no text", "deep", "twice", "NaN", "long", "zeros"],
)
def test_a_line_that_is_no_json(data: bytes, tmp_path: Path) -> None:
    (tmp_path / SAVE_LOG_FILE).write_bytes(data + b"\n" + json.dumps(line()).encode())
    (got,) = read(locate(tmp_path))
    assert math.isnan(got.metrics["norm"])


def test_only_the_end_of_a_huge_log_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / SAVE_LOG_FILE
    append(locate(tmp_path), record(1))
    with path.open("r+b") as file:
        file.truncate(40 << 20)  # a hole: zeros, which are no line
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + json.dumps(line(iteration=2)).encode() + b"\n")
    assert [entry.iteration for entry in read(locate(tmp_path))] == [2]
    assert caplog.text == ""  # the line of which the end was read first is not taken for a torn one


def test_something_else_altogether(tmp_path: Path) -> None:
    (tmp_path / SAVE_LOG_FILE).write_bytes(b"x\n" * 20_000)
    with pytest.raises(DamagedFileError, match="is not a log of saves"):
        read(locate(tmp_path))


@pytest.mark.parametrize("kind", ["link", "dangling", "folder", "pipe"])
def test_what_is_no_file_is_refused(kind: str, tmp_path: Path) -> None:
    path, other = tmp_path / SAVE_LOG_FILE, tmp_path / "other"
    if kind == "link":
        other.write_text(json.dumps(line()))
    if kind in ("link", "dangling"):
        path.symlink_to(other)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    for do in (lambda: read(locate(tmp_path)), lambda: append(locate(tmp_path), record())):
        with pytest.raises((DamagedFileError, StorageError)) as caught:
            do()
        assert str(path) in str(caught.value)
    assert not other.exists() or other.read_text() == json.dumps(line())


def test_what_cannot_be_recorded() -> None:
    faults: list[dict[str, Any]] = [
        {"metrics": {"n": np.arange(2)}},
        {"metrics": {"n": True}},
        {"metrics": {"\ud800": 1}},
    ]
    for changes in (
        *faults,
        {"metrics": {"loss": "2"}},
        {"metrics": {"n": 1 << 64}},
        {"attempt": "x"},
        {"digest": "x"},
        {"generation": -1},
    ):
        with pytest.raises(ArgumentError, match="a record of a save"):
            record(**changes)
    with pytest.raises(ArgumentError, match="`saved_at` is no ISO"):
        SaveRecord(1, "now", 0, 0, 0)


def test_a_line_too_long(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="at most 65536"):
        append(locate(tmp_path), record(metrics={f"metric {i}": 1.0 for i in range(5000)}))
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="opening"):
        append(locate(tmp_path / "absent"), record())
    assert read(locate(tmp_path / "absent")) == []


@pytest.mark.parametrize("durable", [True, False])
def test_the_line_of_a_save_is_synced_with_the_name_of_the_tracker(
    durable: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []

    def sync(files: Sequence[Location], folders: Sequence[Location]) -> None:
        synced.append(([file.name for file in files], {folder.name for folder in folders}))

    monkeypatch.setattr(filesystem, "sync_together", sync)
    reshard.save(tmp_path, 1, {"w": np.zeros(4)}, commit={"durable": durable})
    last = ([".tracked", SAVE_LOG_FILE], {"iteration_00000001", tmp_path.name})
    assert synced[-1:] == ([last] if durable else [])
    assert [record.iteration for record in read(locate(tmp_path))] == [1]
    assert (tmp_path / SAVE_LOG_FILE).read_bytes().count(b"\n") == 1
