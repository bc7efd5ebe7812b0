"""A process that has opened more files than it can map."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

import reshard

if TYPE_CHECKING:
    from pathlib import Path

CODE = """
import sys
from pathlib import Path
import numpy as np
from reshard import _core

opened = []
for _ in range(33_000):
    index = _core.Index()
    index.add_whole("w", index.add_file(sys.argv[1], follow_links=False, method="auto"))
    opened.append(index)
n_maps = Path("/proc/self/maps").read_text().count(sys.argv[1])
assert 32_000 <= n_maps <= 32_768, n_maps
for index in (opened[0], opened[-1]):
    buffer, start = index.plan(index.whole_request(["w"])).load()[0]
    assert np.frombuffer(buffer, np.int64, 5, start).tolist() == [0, 1, 2, 3, 4]
del opened
index = _core.Index()
index.add_whole("w", index.add_file(sys.argv[1], follow_links=False, method="auto"))
assert sys.argv[1] in Path("/proc/self/maps").read_text()
"""


@pytest.mark.slow
def test_files_beyond_half_of_the_maps_of_a_process_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    reshard.save_file({"w": np.arange(5)}, path)
    subprocess.run([sys.executable, "-c", CODE, str(path)], check=True, timeout=300)
