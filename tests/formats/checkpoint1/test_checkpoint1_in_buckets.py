"""Runs of Checkpoint 1.0 that lie in a bucket: read as on a disk, and not written there; and links to a bucket."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner
from tests.servers.s3 import BUCKET

import reshard
from reshard.cli import main
from reshard.errors import CheckpointNotFoundError, UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers.s3 import S3Server

_numbers = itertools.count()
LAYOUT = {"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp", None]}]}


def arrays(iteration: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(iteration)
    return {f"w{i}": rng.standard_normal((8, 16)).astype(np.float32) for i in range(3)}


@pytest.fixture(params=["one rank", "two ranks"])
def run(request: pytest.FixtureRequest, s3: S3Server, tmp_path: Path) -> tuple[Path, str]:
    """A run on the disk, and its copy in the bucket."""
    if request.param == "one rank":
        for iteration in (1, 2):
            reshard.save(tmp_path / "run", iteration, arrays(iteration), format="checkpoint1")
    else:
        reshard.save_file(arrays(2), tmp_path / "w.safetensors", {"format": "pt"})
        reshard.convert(tmp_path / "w.safetensors", tmp_path / "run", to="checkpoint1", layout=LAYOUT)
    return tmp_path / "run", s3.upload(tmp_path / "run", f"checkpoint1-{os.getpid()}-{next(_numbers)}/run")


def told(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(word) for word in words])
    return result.exit_code, result.output


@pytest.mark.slow(disk=False)
def test_every_command_that_reads_does(run: tuple[Path, str], tmp_path: Path) -> None:
    folder, url = run
    with reshard.open(url) as opened:
        found = opened.load()
        assert all(np.array_equal(found[key], array) for key, array in arrays(2).items())
    for verb in ("verify", "explain"):
        code, text = told(verb, folder)
        assert told(verb, url) == (code, text.replace(str(folder), url))
    code, text = told("inspect", url)
    assert code == 0
    assert f"checkpoint1, iteration 2: {url}" in text or f"checkpoint1: {url}" in text
    code, text = told("diff", url, folder)
    assert code == 0
    assert ", 0 differ" in text
    code, text = told("convert", url, tmp_path / "model", "--to", "huggingface", "--part", "model")
    assert code == 0, text
    found = reshard.load_file(tmp_path / "model/model.safetensors")
    assert all(np.array_equal(found[key], array) for key, array in arrays(2).items())


def test_what_is_refused_says_what_to_do(s3: S3Server, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/checkpoint1-{os.getpid()}-{next(_numbers)}/run"
    with pytest.raises(UnsupportedError, match="published by renames, which a bucket does not have") as refused:
        reshard.save(url, 1, arrays(1), format="checkpoint1")
    assert "leave `format` out" in str(refused.value.hint)
    link: Any = tmp_path / "latest"
    link.symlink_to(url)
    with pytest.raises(
        CheckpointNotFoundError, match=f"a symbolic link to the URL `{url}`, which only text names: pass"
    ):
        reshard.open(link)
