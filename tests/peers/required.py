"""Libraries that only some environments have."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest


def required(name: str) -> Any:
    """The module; without it the test is skipped, or fails if RESHARD_MUST_IMPORT is set."""
    if os.environ.get("RESHARD_MUST_IMPORT"):
        return importlib.import_module(name)
    return pytest.importorskip(name, reason=f"{name} is not installed")
