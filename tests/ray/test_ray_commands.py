"""Every command that has `--on ray`, on shared folders and in a bucket: its result is that of one process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reshard

pytest.importorskip("ray", reason="pip install 'reshard[ray]'")

from tests.helpers.ray_cluster import RayCluster, running

from reshard.storage import remote
from reshard.storage.location import locate
from reshard.storage.remote import RemoteStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers.s3 import S3Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not remote.is_available(), reason="the core was compiled without the feature `remote`"),
]

LAYOUT = {"mesh": {"tp": 2}, "rules": [{"match": "w*", "cut": ["tp"]}, {"match": "*"}]}
# Runs commands with one connection to the cluster: each connection starts workers, which takes seconds.
RUN = """
import json, sys, ray
from click.testing import CliRunner
from reshard.cli import main
ray.init(address=sys.argv[1], log_to_driver=False, logging_level=40)
for words in json.loads(sys.stdin.read()):
    done = CliRunner().invoke(main, words)
    print("done", json.dumps([done.exit_code, done.stdout, done.stderr]), flush=True)
"""


@pytest.fixture(scope="module")
def cluster(s3_server: S3Server) -> Iterator[RayCluster]:
    """Its hosts have the variables of the bucket."""
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("AWS_")]:
                patch.delenv(name)
            for name, value in s3_server.environment.items():
                patch.setenv(name, value)
            cluster = stack.enter_context(running(3))
        yield cluster


@pytest.fixture(params=["folder", "bucket"])
def places(s3: S3Server, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[str, str]:
    """A place with `model`, a folder of files of a model, `other`, the same but for one tensor, `ranks` and `run`."""
    rng = np.random.default_rng(3)
    tensors = {f"w{i}": rng.standard_normal((1024, 1024)).astype(np.float32) for i in range(12)}
    full, made = tmp_path / "full.safetensors", tmp_path / "made"
    reshard.save_file(tensors | {"b": np.arange(3)}, full)
    reshard.convert(full, made / "model", to="huggingface", max_shard_size="8MB")
    reshard.convert(full, made / "run", layout=LAYOUT, iteration=4)
    reshard.convert(full, made / "ranks", to="checkpoint1", layout=LAYOUT, iteration=4, files={"prefix": "llama"})
    tensors["w5"][17:600:5] += 0.5
    reshard.save_file(tensors | {"b": np.arange(4)}, full)
    reshard.convert(full, made / "other", to="huggingface", max_shard_size="8MB")
    (tmp_path / "layout.json").write_text(json.dumps(LAYOUT))
    return request.param, str(made) if request.param == "folder" else s3.upload(made, tmp_path.name)


def run_all(cluster: RayCluster, commands: list[list[str]]) -> list[tuple[int, Any, str]]:
    """The exit code, the report, and what else was printed, of each command."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, cluster.address],
        input=json.dumps([[*words, "--json"] for words in commands]),
        env=cluster.environment, capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("done ") for line in done.stdout.splitlines() if line.startswith("done ")]
    answers = [json.loads(line) for line in lines]
    return [(code, json.loads(out) if out.strip() else None, errors) for code, out, errors in answers]


def content(folder: str) -> dict[str, bytes]:
    """Names and bytes below a folder, without what tells when it was written."""
    kept = [name for name in names_below(folder) if name.endswith((".safetensors", ".index.json", "_map.json"))]
    return {name: b"".join((locate(folder) / name).pieces()) for name in kept}


def names_below(folder: str) -> list[str]:
    place = locate(folder)
    if isinstance(place.store, RemoteStore):
        return sorted(name for name, _ in place.store.below(place.path))
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


def test_each_command_reads_as_one_process(cluster: RayCluster, places: tuple[str, str]) -> None:
    kind, place = places
    commands = [
        ["verify", f"{place}/run"],
        ["verify", f"{place}/run/iteration_00000004"],
        ["diff", f"{place}/model", f"{place}/run", "--part", "model"],
        ["diff", f"{place}/model", f"{place}/other"],
        ["inspect", f"{place}/model", "--stats"],
        ["inspect", f"{place}/run", "--stats"],
    ]
    answers = run_all(cluster, [[*words, *on] for words in commands for on in ([], ["--on", "ray"])])
    for words, alone, on_ray in zip(commands, answers[::2], answers[1::2], strict=True):
        for _, report, _ in (alone, on_ray):
            assert report is not None, (words, alone, on_ray)
            report.pop("seconds", None)
        fetched = [report.pop("remote", {"fetched_bytes": 0})["fetched_bytes"] for _, report, _ in (alone, on_ray)]
        # Each share opens the checkpoint, and reads the chunks at its ends.
        assert fetched[0] <= fetched[1] <= 1.5 * fetched[0] + (8 << 20), words
        assert (fetched[0] > 8 << 20) == (kind == "bucket"), words
        assert alone[0] == (1 if words[2:] == [f"{place}/other"] else 0), (words, alone)
        assert on_ray[:2] == alone[:2], words


def test_each_command_writes_as_one_process(cluster: RayCluster, places: tuple[str, str], tmp_path: Path) -> None:
    kind, place = places
    layout = str(tmp_path / "layout.json")
    commands = {
        "model": ["convert", f"{place}/run", "--to", "huggingface", "--max-shard-size", "8MB"],
        "merged": ["merge", f"{place}/ranks", "--max-shard-size", "8MB"],
        "again": ["merge", f"{place}/run", "--to", "huggingface", "--max-shard-size", "8MB"],
        "ranks": ["split", f"{place}/model", "--layout", layout],
        "resharded": ["split", f"{place}/run", "--layout", layout, "--to", "safetensors"],
    }
    calls = [
        [words[0], words[1], f"{place}/{where}/{name}", *words[2:], *on]
        for name, words in commands.items()
        for where, on in (("alone", []), ("on-ray", ["--on", "ray"]))
    ]
    answers = run_all(cluster, calls)
    for (name, words), alone, on_ray in zip(commands.items(), answers[::2], answers[1::2], strict=True):
        assert alone[0] == on_ray[0] == 0, (words, alone, on_ray)
        assert len({one["share"] for one in on_ray[1]["shares"]}) == 3, words
        expected = content(f"{place}/alone/{name}")
        assert len(expected) > 1
        assert content(f"{place}/on-ray/{name}") == expected, words
        left = set(names_below(f"{place}/on-ray/{name}")) - set(names_below(f"{place}/alone/{name}"))
        assert all(one.endswith("published.json") for one in left) if kind == "bucket" else not left, (words, left)


def test_an_iteration_of_a_root_is_that_of_one_process(
    cluster: RayCluster, places: tuple[str, str], tmp_path: Path
) -> None:
    _, place = places
    options = ["--layout", str(tmp_path / "layout.json"), "--iteration", "3"]
    calls = [["convert", f"{place}/model", f"{place}/{name}", *options] for name in ("one-run", "ray-run")]
    (_, one, _), (code, report, _) = run_all(cluster, [calls[0], [*calls[1], "--on", "ray"]])
    assert code == 0, report
    assert (report["n_files"], report["n_bytes"]) == (one["n_files"], one["n_bytes"])
    assert len({run["share"] for run in report["shares"]}) == 3
    found = []
    for name in ("one-run", "ray-run"):
        with reshard.open(f"{place}/{name}") as opened:
            files = content(str(opened.path))
        found.append({name: data for name, data in files.items() if name != "manifest.json"})
    assert found[0] == found[1]
    assert reshard.verify(f"{place}/ray-run").ok
