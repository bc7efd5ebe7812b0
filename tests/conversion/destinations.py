"""Every kind of destination of a conversion, and what lies in a folder."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

W = np.arange(96, dtype=np.float32).reshape(8, 12)
LAYOUT = {"mesh": {"pp": 2, "tp": 2}, "rules": [{"match": "a", "cut": ["tp"]}, {"match": "*"}]}
# Every kind of destination: its name, and how it is asked for.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "huggingface": ("out", {"files": {"max_shard_size": 300}}),
    "checkpoint2": ("out", {"layout": LAYOUT, "files": {"dedup": False}}),
    "a file a rank": ("out", {"layout": LAYOUT, "to": "safetensors"}),
    "one file": ("out.safetensors", {"to": "safetensors"}),
    "full weights": ("out", {"to": "mindspore", "files": {"max_shard_size": 300}}),
    "rank folders": ("out", {"to": "checkpoint1", "layout": LAYOUT, "files": {"prefix": "run"}}),
}


def snapshot(folder: Path) -> dict[str, Any]:
    """Every entry below a folder: what it is, its permissions, its content. Not the claims of writers, which count."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if ".writers" in path.parts:
            continue
        mode = path.lstat().st_mode
        content = path.readlink() if path.is_symlink() else path.read_bytes() if stat.S_ISREG(mode) else None
        found[str(path.relative_to(folder))] = (mode, content)
    return found
