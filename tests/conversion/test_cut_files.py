"""Files of `torch.save`, which hold a CRC-32 of each tensor, written in ranges by several shares."""

from __future__ import annotations

import signal
import subprocess
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import reshard
from reshard import _core
from reshard.errors import DamagedFileError
from reshard.formats.torch_file import archive

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


def arrays(sizes: list[int], seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {f"w{i}": generator.integers(0, 255, size).astype(np.uint8) for i, size in enumerate(sizes)}


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 3 * MIB) | st.integers(0, 300), min_size=1, max_size=12),
    borders=st.lists(st.floats(0, 1), max_size=6),
    direct=st.booleans(),
)
@pytest.mark.slow(disk=False)
def test_parts_of_a_file_with_sums_are_the_file(
    tmp_path: Path, *, sizes: list[int], borders: list[float], direct: bool
) -> None:
    source, path = tmp_path / "in.safetensors", tmp_path / "parts.pt"
    reshard.save_file(arrays([*sizes, 1]), source)
    path.unlink(missing_ok=True)
    index = _core.Index()
    index.add_whole_file(index.add_file(str(source)))
    plan = index.plan(index.whole_request(index.keys()))
    container = archive.state_dict("model", plan.arrays)
    whole = plan.write(str(tmp_path / "whole.pt"), container=container)
    at = sorted({0, plan.n_bytes, *(int(border * plan.n_bytes) for border in borders)})
    pairs = list(pairwise(at))
    parts = {pair[0]: plan.write_part(str(path), *pair, container=container, direct=direct) for pair in reversed(pairs)}
    ordered = [parts[start] for start, _ in pairs]
    expected, found = (tmp_path / "whole.pt").read_bytes(), path.read_bytes()
    assert len(found) == len(expected) == whole.n_bytes
    of_sums = {place + i for place, _ in container[2] for i in range(4)}
    differs = np.flatnonzero(np.frombuffer(found, np.uint8) != np.frombuffer(expected, np.uint8))
    assert set(differs.tolist()) <= of_sums
    checksums = b"".join(part.checksums for part in ordered)
    sums = [one for part in ordered for one in part.sums]
    for _ in range(2):  # once more after a crash
        assert _core.write_sums(str(path), container, sums, checksums) == whole.checksums
        assert path.read_bytes() == expected


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("to", ["one.pt", "folder", "dcp"])
@pytest.mark.parametrize("n", [2, 5])
def test_shares_of_a_file_of_torch_are_the_whole_conversion(tmp_path: Path, to: str, n: int) -> None:
    source = tmp_path / "in.safetensors"
    reshard.save_file(arrays([5 * MIB, 11, 0, 3 * MIB, 700_000]), source)
    options: dict[str, Any] = {"to": "dcp" if to == "dcp" else "torch"}
    reshard.convert(source, tmp_path / "whole" / to, **options)
    dst = tmp_path / "shared" / to
    own = []
    for i in reversed(range(n)):
        assert not dst.exists()
        own.append(reshard.convert(source, dst, share=(i, n), **options))
    assert own[-1].pending == ()
    files = [path for path in (tmp_path / "whole").rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert (tmp_path / "shared" / path.relative_to(tmp_path / "whole")).read_bytes() == path.read_bytes()
    assert [path.name for path in (tmp_path / "shared").iterdir()] == [to]
    sizes = [one.n_bytes for one in own[:-1]]  # the last one reports all
    assert max(sizes) < 1.2 * sum(path.stat().st_size for path in files) / n


KILLED = """
import os, signal, sys, reshard
def stop(done, total):
    if done > total // 4:
        os.kill(os.getpid(), signal.SIGKILL)
reshard.convert(*sys.argv[1:], share=(0, 2), progress=stop)
"""


@pytest.mark.slow(disk=False)
def test_a_share_of_a_file_that_was_killed_publishes_nothing(tmp_path: Path) -> None:
    source, dst = tmp_path / "in.safetensors", tmp_path / "out" / "one.pt"
    reshard.save_file(arrays([9 * MIB]), source)
    assert subprocess.run([sys.executable, "-c", KILLED, source, dst], check=False).returncode == -signal.SIGKILL
    assert reshard.convert(source, dst, share=(1, 2)).pending == (0,)
    assert not dst.exists()
    assert reshard.convert(source, dst, share=(0, 2)).pending == ()
    reshard.convert(source, tmp_path / "whole" / "one.pt")
    assert dst.read_bytes() == (tmp_path / "whole" / "one.pt").read_bytes()


@pytest.mark.slow(disk=False)
def test_a_part_that_another_process_made_anew_is_not_published(tmp_path: Path) -> None:
    source, dst = tmp_path / "in.safetensors", tmp_path / "out" / "one.pt"
    reshard.save_file(arrays([9 * MIB]), source)
    reshard.convert(source, dst, share=(0, 2))
    (part,) = dst.parent.rglob("one.pt")
    part.unlink()
    with pytest.raises(DamagedFileError, match="share 0 of 2"):
        reshard.convert(source, dst, share=(1, 2))
    assert not dst.exists()
