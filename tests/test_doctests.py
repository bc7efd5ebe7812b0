"""Every example in a public docstring runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import reshard

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(reshard.__path__, "reshard.")
    if not module.name.endswith(("._core", ".__main__"))
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0, f"{results.failed} of {results.attempted} examples of {name} fail"


def test_there_are_examples() -> None:
    assert sum(doctest.testmod(importlib.import_module(name)).attempted for name in MODULES) > 40
