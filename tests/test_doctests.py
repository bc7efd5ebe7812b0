"""Every example in a public docstring runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from typing import TYPE_CHECKING

import pytest

import reshard

if TYPE_CHECKING:
    from pathlib import Path

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(reshard.__path__, "reshard.")
    if not module.name.endswith(("._core", ".__main__"))
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0, f"{results.failed} of {results.attempted} examples of {name} fail"


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    tests = [test for name in MODULES for test in finder.find(importlib.import_module(name))]
    assert sum(len(test.examples) for test in tests) > 40
