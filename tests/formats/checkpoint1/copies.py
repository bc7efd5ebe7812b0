"""Copies of the samples of Checkpoint 1.0, and what is done to them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import reshard
from reshard.formats.checkpoint1.names import list_weight_files, parse_file_name
from reshard.storage.location import locate

if TYPE_CHECKING:
    from reshard.ranks.group import Group

SAMPLES = Path(__file__).parents[2] / "data" / "mindspore"
RANKS = range(4)


def copy(sample: str, to: Path, run: str = "output") -> Path:
    """A copy of a sample's tree, its files as old as their names say."""
    root = to / "checkpoint"
    shutil.copytree(SAMPLES / sample / run / "checkpoint", root)
    for folder in root.iterdir():
        for name in list_weight_files(locate(folder)):
            file = parse_file_name(name)
            assert file is not None
            age(folder / name, file.epoch)
    return root


def age(path: Path, minutes: int) -> None:
    os.utime(path, (1_700_000_000 + 60 * minutes, 1_700_000_000 + 60 * minutes))


def file(root: Path, rank: int, suffix: str) -> Path:
    """A rank's file of a save."""
    (found,) = [one for one in (root / f"rank_{rank}").iterdir() if one.stem.endswith(suffix) and one.suffix != ".json"]
    return found


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def load(root: Path | None, group: Group, **what: Any) -> reshard.Loaded:
    """One rank of several; none waits long for another."""
    return reshard.load(root, group=group, timeout=20, **what)


def put(path: Path, text: str) -> None:
    path.write_text(text)
