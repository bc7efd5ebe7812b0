"""Libraries that some tests need and that the `test` extra does not bring."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["long", "required"]

long = pytest.mark.skipif(
    not os.environ.get("RESHARD_MUST_IMPORT"), reason="takes a minute on several processes: set RESHARD_MUST_IMPORT=1"
)


def required(name: str) -> ModuleType:
    """Import a library, or skip the test; with RESHARD_MUST_IMPORT it fails instead."""
    if os.environ.get("RESHARD_MUST_IMPORT"):
        return importlib.import_module(name)
    module: ModuleType = pytest.importorskip(name, reason=f"{name} is not installed")
    return module
