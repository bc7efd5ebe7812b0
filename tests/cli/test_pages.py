"""The HTML pages: what they hold, that nothing in a checkpoint becomes markup, that their size is bounded."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner

import reshard
from reshard import _core
from reshard.checkpoint import Checkpoint
from reshard.cli import main
from reshard.cli.contents import Contents, Iteration, StoredAs, TensorRow
from reshard.cli.pages.html import page
from reshard.cli.pages.inspect_data import inspect_data
from reshard.cli.pages.plan_data import plan_data
from reshard.commit.save_log import SaveRecord
from reshard.commit.save_log import append as append_save
from reshard.formats.base import CheckpointData
from reshard.layout import ModelLayout
from reshard.storage.location import locate
from reshard.values.traits import Traits
from reshard.verbs.forecast import forecast

if TYPE_CHECKING:
    from pathlib import Path

SAVED_AT = "2026-03-01T12:00:00+00:00"
HOSTILE = [
    "</script><img src=x onerror=\"document.title='EXECUTED'\">",
    "<!--<script>document.title='EXECUTED'</script>",
    "a'b\"c&lt;d`${document.title='EXECUTED'}",
    "__proto__.constructor.toString",
    "bidi\u202egnirts\u2066\u2028end",
]
LAYOUT = {"mesh": {"tp": 4}, "rules": [{"match": "*.w", "cut": ["tp"]}, {"match": "*"}]}


def run(*args: object) -> str:
    done = CliRunner().invoke(main, [str(arg) for arg in args])
    assert done.exit_code == 0, done.output
    return done.output


def data_of(text: str) -> dict[str, Any]:
    """The data in a page. The pattern ends at the first end of a script element, as a browser does."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL | re.IGNORECASE)
    assert found is not None
    value = json.loads(found[1])
    assert isinstance(value, dict)
    return value


def a_run(root: Path) -> Path:
    """A root with a complete, a damaged and a deleted iteration."""
    tensors = {"layers.0.w": np.zeros((8, 4), np.float32), "layers.0.b": np.zeros(8, np.float16)}
    for iteration in (1, 2, 3):
        reshard.save(root, iteration, tensors, {"adam_m.layers.0.w": tensors["layers.0.w"]},
                     layout=None, metrics={"loss": 4.0 - iteration})  # fmt: skip
    shutil.rmtree(root / "iteration_00000001")
    next((root / "iteration_00000002").glob("*.safetensors")).write_bytes(b"")
    run("pin", root, 3)
    return root


def test_a_page_shows_iterations_tensors_files_and_regions(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run")
    assert run("inspect", root, "--html", tmp_path / "p.html") == f"wrote {tmp_path / 'p.html'}\n"
    data = data_of((tmp_path / "p.html").read_text())
    points = {one["iteration"]: one for one in data["saves"]["points"]}
    assert {n: one["state"] for n, one in points.items()} == {1: "deleted", 2: "damaged", 3: "complete"}
    assert points[3]["marks"] == ["tracker", "pinned", "selected"]
    assert data["saves"]["metrics"] == ["loss"]
    assert [one["values"] for one in points.values()] == [[3.0], [2.0], [1.0]]
    assert "0 bytes" in points[2]["reason"]
    assert [(row[0], row[9]) for row in data["tensors"]] == [
        ("layers.0.w", 128),
        ("layers.0.b", 16),
        ("adam_m.layers.0.w", 128),
    ]
    assert [mark[5:7] for mark in data["files"]["marks"]] == [[144, 0], [0, 128]]
    assert data["notes"] == []


def test_a_page_replaces_pages_only(tmp_path: Path) -> None:
    root = a_run(tmp_path / "run")
    weights, pipe, target = tmp_path / "model.safetensors", tmp_path / "pipe", tmp_path / "p.html"
    reshard.save_file({"w": np.zeros(4)}, weights)
    before = weights.read_bytes()
    (tmp_path / "link").symlink_to(weights)
    os.mkfifo(pipe)
    for other, what in ((weights, "is not a page"), (tmp_path / "link", "is not a page"), (pipe, "a pipe, a socket")):
        done = CliRunner().invoke(main, ["inspect", str(root), "--html", str(other)])
        assert (done.exit_code, what in done.output, str(other) in done.output) == (1, True, True), done.output
    assert (weights.read_bytes() == before, pipe.is_fifo(), (tmp_path / "link").is_symlink()) == (True, True, True)
    for content in ("", "<!doctype html>\n<title>another</title>", None):
        if content is not None:
            target.write_text(content)
        run("inspect", root, "--html", target)
        assert data_of(target.read_text())


def test_regions_are_drawn_as_the_grid_that_is_stored(tmp_path: Path) -> None:
    source = tmp_path / "m.safetensors"
    reshard.save_file({"w": np.arange(32, dtype=np.int16).reshape(4, 8)}, source)
    layout = {"mesh": {"a": 2, "b": 4}, "rules": [{"match": "w", "cut": ["a", "b"]}]}
    reshard.convert(source, tmp_path / "cut", layout=layout)
    run("inspect", tmp_path / "cut", "--html", tmp_path / "p.html")
    data = data_of((tmp_path / "p.html").read_text())
    down, across, rows, columns, cells = data["drawings"][data["tensors"][0][10]]
    assert (down, across, rows, columns) == (0, 1, ["0:2", "2:4"], ["0:2", "2:4", "4:6", "6:8"])
    names = [mark[0] for mark in data["files"]["marks"]]
    with reshard.open(tmp_path / "cut") as checkpoint:
        for row, column, n, n_files, marks in cells:
            (shard,) = (one for one in checkpoint["w"].shards if one.offset == (row * 2, column * 2))
            assert (n, n_files, [names[mark] for mark in marks]) == (1, 1, list(shard.files))
            assert data["files"]["marks"][marks[0]][7:] == [row * 4 + column] * 2  # the rank


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A root whose tensors and metrics have hostile names."""
    root = tmp_path / "</title><script>document.title='EXECUTED'<"
    path = tmp_path / "m.safetensors"
    reshard.save_file({name: np.zeros(4, np.float32) for name in HOSTILE}, path)
    reshard.convert(path, root, layout={"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}]}, iteration=1)
    metrics = {name: float(n) for n, name in enumerate(HOSTILE) if name.isprintable()}
    append_save(locate(root), SaveRecord(1, SAVED_AT, 1.0, 0.1, 10, metrics | {"loss": float("nan")}))
    return root


def test_text_of_a_checkpoint_is_never_markup(hostile: Path, tmp_path: Path) -> None:
    run("inspect", hostile, "--html", tmp_path / "p.html")
    text = (tmp_path / "p.html").read_text()
    assert "<img" not in text
    assert "<!--" not in text
    assert len(re.findall("</?script", text, re.IGNORECASE)) == 4  # the data and the script of the page
    assert not set(text) & set("\u202e\u2066\u2028")
    keys = [row[0] for row in data_of(text)["tensors"]]
    assert HOSTILE[0] in keys
    assert r"bidi\u202egnirts\u2066\u2028end" in keys
    assert data_of(text)["saves"]["points"][0]["values"][-1] == "nan"


def test_a_page_requests_nothing(tmp_path: Path) -> None:
    for kind in ("inspect", "plan"):
        text = page("t", kind, {})
        assert re.search(r"default-src 'none'; style-src 'sha256-[^ ']+'; script-src 'sha256-[^ ']+'", text)
        assert set(re.findall(r"https?://[^\"' ]*", text)) <= {"http://www.w3.org/2000/svg"}
        assert not re.search(r"\b(src|href|url)\s*[=(]|@import|fetch\(|innerHTML|insertAdjacent|eval\(|XMLHttp", text)


def at_scale(n_tensors: int, n_ranks: int, cut: int) -> Contents:
    """A checkpoint of many ranks that does not exist: `cut` of its tensors are cut over all ranks, others over 8."""
    keys = [f"model.layers.{n // 10}.block.w{n % 10}" for n in range(n_tensors)]
    shapes = dict.fromkeys(keys, (n_ranks, 128))
    rules = [{"match": key, "cut": [["dp", "tp"]]} for key in keys[:cut]]
    layout = ModelLayout.from_mapping(
        {"mesh": {"dp": n_ranks // 8, "tp": 8}, "rules": [*rules,
                                                          {"match": "*", "cut": ["tp"]}]}
    )  # fmt: skip
    bound = layout.bind(shapes)
    index = _core.Index()
    names = [f"model-{rank:07d}-{n_ranks:07d}.safetensors" for rank in range(n_ranks)]
    files = [index.add_file(f"/nowhere/{name}") for name in names]
    for key in keys:
        index.add_layout(key, "BF16", bound.layouts[key], files)
    n_bytes = n_ranks * 256
    alike = {shape: StoredAs("model", "BF16", shape, "dim 0", 8, (1, 1), n_bytes, n_bytes, tiled=False)
             for shape in shapes.values()}  # fmt: skip
    rows = [TensorRow(key, alike[shapes[key]]) for key in keys]
    saves = [SaveRecord(n, SAVED_AT, 1.0, 0.1, 10, {"loss": 1 / n}) for n in range(1, 5001)]
    iterations = [Iteration(n, str(n), tracker=n == 5000, tracked=True, pinned=n == 17, taken=n == 5000,
                            complete=n != 40, verified=True) for n in range(1, 5001)]  # fmt: skip
    return Contents(
        path="/nowhere",
        checkpoint=Checkpoint(CheckpointData(traits=Traits("checkpoint2"), path=locate("/nowhere"), index=index)),
        rows=rows,
        iterations=iterations,
        rank_saves=None,
        tracker_reason=None,
        layout=layout,
        layout_reason=None,
        files=[(name, 1000) for name in names],
        saves=saves,
        parts={},
        leftovers=[],
    )


def test_a_large_checkpoint_is_drawn_with_bounded_marks() -> None:
    facts = at_scale(400, 4096, 2)
    assert len(set(facts.checkpoint.data.index.places())) == 2  # the regions of two tensors are looked at
    data = inspect_data(facts, [])
    assert len(data["files"]["marks"]) <= 1024
    assert sum(mark[1] for mark in data["files"]["marks"]) == 4096
    assert sum(mark[5] for mark in data["files"]["marks"]) == (2 + 398 * 512) * 4096 * 256  # every replica
    assert len(data["saves"]["points"]) <= 600
    assert {17, 40, 5000} <= {one["iteration"] for one in data["saves"]["points"]}
    assert all(len(drawing[4]) <= 1024 for drawing in data["drawings"])
    cells = data["drawings"][data["tensors"][0][10]][4]
    assert sum(cell[2] for cell in cells) == 4096
    assert [re.sub("[0-9]+", "#", note.split(":")[0].split(",")[0]) for note in data["notes"]] == [
        "There are # files",
        "The time line shows # of # saves",
        "The regions of # tensors are drawn together",
    ]
    assert len(page("t", "inspect", data)) < 1_000_000


def test_many_tensors_are_drawn_as_groups() -> None:
    facts = at_scale(3001, 8, 0)
    data = inspect_data(facts, [])
    assert len(data["tensors"]) == 10
    assert data["tensors"][0][0:2] == ["model.layers.*.block.w0", 301]
    assert sum(row[1] for row in data["tensors"]) == 3001
    assert "3001 tensors" in data["notes"][0]


# -- reshard plan


def write_yaml(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


TP2 = "{mesh: {pp: 2, tp: 2}, rules: [{match: '*.w', cut: [tp]}, {match: '*'}]}"


@pytest.mark.slow(disk=False)
def test_a_forecast_is_what_a_conversion_writes_and_a_load_reads(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {f"layers.{n}.w": rng.random((8, 6), np.float32) for n in range(3)} | {"b": np.zeros(5, np.int8)}
    reshard.save_file(tensors, tmp_path / "m.safetensors")
    reshard.convert(tmp_path / "m.safetensors", tmp_path / "src", layout=LAYOUT)
    layout = write_yaml(tmp_path / "tp2.yaml", TP2)
    found = json.loads(run("plan", tmp_path / "src", "--layout", layout, "--dst", tmp_path, "--json"))
    reshard.convert(tmp_path / "src", tmp_path / "dst", layout=layout)
    with reshard.open(tmp_path / "dst") as written, reshard.open(tmp_path / "src") as source:
        assert [one["name"] for one in found["files"]] == [file.name for file in written.files()]
        for one, file in zip(found["files"], written.files(), strict=True):
            arrays = sum(array.nbytes for array in reshard.load_file(written.path / file.name).values())
            assert one["n_bytes"] == arrays < file.n_bytes
        for rank in range(4):
            loaded = sum(array.nbytes for array in source.load(layout, rank=rank).values())
            assert found["rank_bytes"][str(rank)] == loaded == sum(found["transfers"][str(rank)].values())
    assert found["n_bytes"] == 3 * 8 * 6 * 4 + 5
    assert found["needed_bytes"] == found["n_bytes"] * 21 // 20 + 1
    assert found["seconds"] > found["seconds_cached"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "m.safetensors", "src", "tp2.yaml"]


def test_a_forecast_counts_the_padding_of_joined_arrays(tmp_path: Path) -> None:
    """In a file, a joined array starts each key at a multiple of `align`, and small keys are not in every part."""
    reshard.save_file({f"b{n}": np.ones(n, np.float32) for n in (1, 2, 3)}, tmp_path / "m.safetensors")
    for align in (1, 64):
        flat = f"{{axes: [dp], join: biases, align: {align}}}"
        layout = write_yaml(tmp_path / "l.yaml", f"{{mesh: {{dp: 4}}, rules: [{{match: 'b*', flat: {flat}}}]}}")
        arguments = ["plan", str(tmp_path / "m.safetensors"), "--layout", str(layout), "--no-measure", "--json"]
        found = json.loads(CliRunner().invoke(main, arguments).stdout)
        reshard.convert(tmp_path / "m.safetensors", tmp_path / f"dst{align}", layout=layout)
        with reshard.open(tmp_path / f"dst{align}") as converted:
            written = {
                file.name: sum(array.nbytes for array in reshard.load_file(converted.path / file.name).values())
                for file in converted.files()
            }
        assert {file["name"]: file["n_bytes"] for file in found["files"]} == written
        assert found["n_bytes"] == 24
        assert found["written_bytes"] == sum(written.values()) == {1: 32, 64: 1024}[align]
        assert found["needed_bytes"] == -(-sum(written.values()) * 21 // 20)


def test_a_forecast_is_printed_and_drawn(tmp_path: Path) -> None:
    name = HOSTILE[0]
    reshard.save_file({name: np.zeros((8, 4), np.float32)}, tmp_path / "m.safetensors")
    layout = write_yaml(tmp_path / "l.yaml", "{mesh: {'</script>': 2}, rules: [{match: '*', cut: ['</script>']}]}")
    given = ("plan", tmp_path / "m.safetensors", "--layout", layout, "--no-measure", "--dst", tmp_path)
    printed = run(*given)
    assert re.search(r"m\.safetensors +64 B +64 B", printed), printed
    assert "64 B of memory on the largest rank, 1.00 times the mean; 128 B on all ranks" in printed
    assert re.search(r"^ +0-1 +64 B +1$", printed, re.MULTILINE), printed
    run(*given, "--html", tmp_path / "p.html")
    text = (tmp_path / "p.html").read_text()
    data = data_of(text)
    assert data["ranks"] == [["rank 0", 1, 64], ["rank 1", 1, 64]]
    assert data["matrix"] == {"rows": ["m.safetensors"], "columns": ["0", "1"], "cells": [[0, 0, 64], [0, 1, 64]]}
    assert len(re.findall("</?script", text, re.IGNORECASE)) == 4


def test_the_forecast_of_many_ranks_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all ranks are planned; what the others load is computed, to the same numbers."""
    reshard.save_file({f"layers.{n}.w": np.zeros((4096, 2), np.int8) for n in range(3)}, tmp_path / "m.safetensors")
    layout = {"mesh": {"dp": 4, "tp": 512}, "rules": [{"match": "*", "cut": ["tp"]}]}
    with reshard.open(tmp_path / "m.safetensors") as checkpoint:
        whole = forecast(checkpoint, layout)
        monkeypatch.setattr("reshard.verbs.forecast._MAX_PLANNED", 600)
        monkeypatch.setattr("reshard.verbs.forecast._MAX_SHARDS", 1000)
        bounded = forecast(checkpoint, layout)
    assert len(whole.transfers) == 2048
    assert len(bounded.transfers) == 200
    assert bounded.rank_bytes == whole.rank_bytes
    assert bounded.transfers.items() <= whole.transfers.items()
    assert bounded.files is None
    assert whole.files is not None
    assert sum(file.n_bytes for file in whole.files) == whole.n_bytes
    data = plan_data(bounded, src="m", layout="l", facts=[])
    assert len(data["ranks"]) <= 1024
    assert len(data["matrix"]["columns"]) == 50
    assert sum(cell[2] for cell in data["matrix"]["cells"]) == 200 * 48
    assert len(data["notes"]) == 3


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def dom(path: Path, *, width: int = 1200) -> str:
    """The document after its script ran in a window of this width."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--window-size={width},900",
        "--dump-dom",
        path.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    return re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)


@pytest.mark.slow
def test_a_browser_draws_the_page_and_runs_nothing_of_a_checkpoint(hostile: Path, tmp_path: Path) -> None:
    run("inspect", hostile, "--html", tmp_path / "p.html")
    drawn = dom(tmp_path / "p.html")
    assert "<h2>Iterations</h2>" in drawn
    assert "<h2>Tensors</h2>" in drawn
    assert "bytes by file" in drawn
    assert "&lt;/script&gt;&lt;img src=x onerror=" in drawn
    assert "<img" not in drawn
    layout = write_yaml(tmp_path / "l.yaml", "{mesh: {tp: 2}, rules: [{match: '*', cut: [tp]}]}")
    run("plan", hostile, "--layout", layout, "--no-measure", "--html", tmp_path / "plan.html")
    forecast_drawn = dom(tmp_path / "plan.html")
    assert "bytes from source files to ranks" in forecast_drawn
    assert "What is written" in forecast_drawn
    title = re.search("<title>(.*?)</title>", drawn)
    assert title is not None
    assert title[1].startswith("reshard inspect ")


@pytest.mark.slow
def test_drawings_are_made_for_the_width_of_the_window(tmp_path: Path) -> None:
    """So that their text has the same size everywhere."""
    run("inspect", a_run(tmp_path / "run"), "--html", tmp_path / "p.html")
    for width, largest in ((520, 438), (2000, 1158)):
        drawn = dom(tmp_path / "p.html", width=width)
        widths = [int(one) for one in re.findall(r'viewBox="0 0 (\d+) ', drawn)]
        assert largest - 20 <= max(widths) <= largest  # a scroll bar takes some


@pytest.mark.slow
def test_a_browser_draws_a_checkpoint_without_tensors_and_a_loss_that_is_infinite(tmp_path: Path) -> None:
    reshard.save_file({}, tmp_path / "m.safetensors")
    run("inspect", tmp_path / "m.safetensors", "--html", tmp_path / "p.html")
    assert "There are no tensors in this checkpoint." in dom(tmp_path / "p.html")
    for step, loss in ((1, 3.0), (2, math.inf), (3, 2.0)):
        reshard.save(tmp_path / "root", step, {"w": np.zeros(2)}, metrics={"loss": loss})
    run("inspect", tmp_path / "root", "--html", tmp_path / "p.html")
    drawn = dom(tmp_path / "p.html")
    assert ">loss inf</text>" in drawn
    assert drawn.count("<polyline") == 2  # broken at 2
