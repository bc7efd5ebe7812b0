"""Every example in a public docstring runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.peers.required import required

import reshard

if TYPE_CHECKING:
    from pathlib import Path

# They import libraries that only other environments have; `tests/peers` and `tests/ray` run them.
OF_PEERS = ("reshard.examples.train_ray", "reshard.examples.train_torchtitan", "reshard.torch.dcp.torchtitan")
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(reshard.__path__, "reshard.")
    if not module.name.endswith(("._core", ".__main__", *OF_PEERS))
)


# Their examples read `output/checkpoint`, which is also open as `checkpoint`, `ranks` and `full`.
READ_A_CHECKPOINT = {"reshard.commit.folder_facts", "reshard.formats.checkpoint2.root"}


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Checkpoint 2.0 and a Checkpoint 1.0 without strategy, of four ranks each, and their layout."""
    folder = tmp_path_factory.mktemp("saved")
    layout = folder / "layout.yaml"
    layout.write_text("mesh: {tp: 4}\nrules:\n  - {match: '*', cut: [tp]}\n")
    w = np.arange(32, dtype=np.float32).reshape(8, 4)
    reshard.save(folder / "full", 400, {"w": w}, optimizer={"exp_avg.w": w}, extra={"epoch": 3})
    reshard.convert(folder / "full", folder / "output" / "checkpoint", layout=layout)
    reshard.convert(
        folder / "full", folder / "ranks", to="checkpoint1", layout=layout, files={"prefix": "llama"}, iteration=20
    )
    shutil.rmtree(folder / "ranks" / "strategy")
    return folder


@pytest.mark.parametrize("name", MODULES)
def test_examples_of(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    if name.startswith("reshard.mindspore") or name.endswith(".train_mindspore"):
        required("mindspore")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    if name in READ_A_CHECKPOINT:
        shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
        names["checkpoint"] = reshard.open("output/checkpoint")
    results = doctest.testmod(importlib.import_module(name), extraglobs=names)
    assert results.failed == 0, f"{results.failed} of {results.attempted} examples of {name} fail"


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    own = [name for name in MODULES if "mindspore" not in name]
    tests = [test for name in own for test in finder.find(importlib.import_module(name))]
    assert sum(len(test.examples) for test in tests) > 40
