"""Running as a user without rights, in trees that this user can reach."""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import reshard

if TYPE_CHECKING:
    from collections.abc import Iterator

_NOBODY = 65534


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Run the block as a user who owns nothing; where the tests do not run as root, as the user who runs them."""
    # What is imported when it is needed may lie where this user cannot read.
    for name in ("rich.console", "rich.progress", "rich.table"):
        importlib.import_module(name)
    for package in ("cli", "verbs", "write", "opening", "formats", "resume", "config", "layout"):
        module = importlib.import_module(f"{reshard.__name__}.{package}")
        for one in pkgutil.iter_modules(module.__path__ if hasattr(module, "__path__") else ()):
            importlib.import_module(f"{module.__name__}.{one.name}")
    if os.geteuid() != 0:
        yield
        return
    groups, group = os.getgroups(), os.getegid()
    os.setgroups([])
    os.setegid(_NOBODY)
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)
        os.setgroups(groups)


@contextlib.contextmanager
def reachable_folder() -> Iterator[Path]:
    """A temporary folder that every user can reach, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="reshard-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def readable(root: Path) -> None:
    """Let everybody read a tree, and nobody but its owner write."""
    for path in (root, *root.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)


def closed(path: Path) -> None:
    """Let nobody but root look at a file or folder."""
    path.chmod(0)


@pytest.fixture
def reachable() -> Iterator[Path]:
    """`reachable_folder` as a fixture."""
    with reachable_folder() as folder:
        yield folder
