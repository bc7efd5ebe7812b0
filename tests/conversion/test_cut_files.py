"""Files of `torch.save`, which hold a CRC-32 of each tensor, written in ranges by several shares."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import reshard
from reshard import _core
from reshard.conversion import shares
from reshard.errors import ArgumentError, CheckpointNotFoundError
from reshard.formats.torch_file import archive
from reshard.storage import changes

MIB, CHUNK = 1 << 20, 1 << 18


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
    path.write_bytes(b"")
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


def plan_of(path: Path, sizes: list[int]) -> _core.Plan:
    reshard.save_file(arrays(sizes), path)
    index = _core.Index()
    index.add_whole_file(index.add_file(str(path)))
    return index.plan(index.whole_request(index.keys()))


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("border", [CHUNK, 4 * MIB, 4 * MIB + CHUNK])
def test_a_sum_lies_across_the_end_of_a_chunk_a_piece_and_a_part(tmp_path: Path, border: int) -> None:
    path = tmp_path / "parts"
    for n in range(border - 4, border + 1):
        plan = plan_of(tmp_path / "in.safetensors", [n, 5 * MIB, 3])
        composer = archive.Composer()
        for size in (n, 5 * MIB, 3):
            composer.sum_of(composer.array(size))
        container = composer.container()
        whole = plan.write(str(tmp_path / "whole"), container=container)
        for at in ([0, plan.n_bytes], [0, border, plan.n_bytes], [0, CHUNK, border + CHUNK, plan.n_bytes]):
            path.write_bytes(b"")
            parts = [plan.write_part(str(path), *pair, container=container) for pair in pairwise(at)]
            sums = [one for part in parts for one in part.sums]
            checksums = b"".join(part.checksums for part in parts)
            assert _core.write_sums(str(path), container, sums, checksums) == whole.checksums
            assert path.read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.disk
@pytest.mark.skipif(sys.platform != "linux", reason="counts what the system reads")
@pytest.mark.parametrize(("n", "first", "last"), [(48, 0, 16), (48, 16, 32), (112, 0, 64), (112, 16, 80)])
def test_a_part_reads_nothing_behind_its_end(tmp_path: Path, n: int, first: int, last: int) -> None:
    source, path = tmp_path / "in.safetensors", tmp_path / "parts.safetensors"
    reshard.save_file(arrays([n * MIB]), source)
    path.write_bytes(b"")
    index = _core.Index()
    index.add_whole_file(index.add_file(str(source)))
    plan = index.plan(index.whole_request(index.keys()))
    with source.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = bytes_read()
    plan.write_part(str(path), first * MIB, last * MIB)
    n_read = bytes_read() - before
    assert n_read <= (last - first + 1) * MIB, n_read / MIB  # 0 where the folder is in memory
    expected = source.read_bytes()[(first + 2) * MIB : (last - 1) * MIB]
    assert expected in path.read_bytes()


def bytes_read() -> int:
    """What the system has read from disks for this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


@pytest.mark.slow(disk=False)
def test_the_sums_of_many_arrays_take_no_time(tmp_path: Path) -> None:
    n = 20_000
    plan, path = plan_of(tmp_path / "in.safetensors", [3] * n), tmp_path / "parts"
    container = archive.state_dict("model", plan.arrays)
    whole = plan.write(str(tmp_path / "whole"), container=container)
    path.write_bytes(b"")
    part = plan.write_part(str(path), 0, plan.n_bytes, container=container)
    begun = time.process_time()
    assert _core.write_sums(str(path), container, part.sums, part.checksums) == whole.checksums
    assert time.process_time() - begun < 0.5
    assert path.read_bytes() == (tmp_path / "whole").read_bytes()


def test_sums_that_lie_beyond_a_file_or_are_of_no_array_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(20))
    for sums in ([(17, 0)], [(2**64 - 1, 0)], [(4, 1)], [(8, 0), (4, 0)]):
        with pytest.raises(ArgumentError, match="not those of a file with these sums"):
            _core.write_sums(str(tmp_path / "file"), (bytes(12), [4], sums), [_core.PartSum(0, 8, 1)], bytes(4))
        assert (tmp_path / "file").read_bytes() == bytes(20)


def test_parts_are_told_from_those_of_another_container(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "in.safetensors", [MIB, MIB])
    path = tmp_path / "parts"
    with pytest.raises(CheckpointNotFoundError, match=r"cannot open .*parts"):  # nobody has made it
        plan.write_part(str(path), 0, MIB)
    path.touch()

    def identity(start: int, container: _core.Container | None) -> int:
        return plan.write_part(str(path), start, start + MIB, container=container).header_checksum

    one, other = (archive.state_dict(name, plan.arrays) for name in ("model", "mode_"))
    literals, starts, sums = one
    assert identity(0, one) == identity(MIB, one)
    assert len({identity(0, of) for of in (one, other, (literals, starts, sums[:1]))}) == 3
    assert identity(MIB, None) == plan.write(str(tmp_path / "whole")).header_checksum


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("at", [0, 1])
def test_a_process_that_ends_between_the_sums_and_the_name_has_lost_nothing(
    tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, dst = tmp_path / "in.safetensors", tmp_path / "shared" / "folder"
    reshard.save_file(arrays([3 * MIB, 3 * MIB]), source)
    options: dict[str, Any] = {"to": "torch", "max_shard_size": "4MB"}
    reshard.convert(source, dst, share=(0, 3), **options)
    reshard.convert(source, dst, share=(1, 3), **options)
    n_linked = 0

    def link_or_move(*paths: Any) -> None:
        nonlocal n_linked
        if n_linked == at:
            raise KeyboardInterrupt
        n_linked += 1
        changes.link_or_move(*paths)

    with monkeypatch.context() as patched:
        patched.setattr(shares, "link_or_move", link_or_move)
        with pytest.raises(KeyboardInterrupt):
            reshard.convert(source, dst, share=(2, 3), **options)
    assert not dst.exists()
    assert reshard.convert(source, dst, share=(2, 3), **options).pending == ()
    reshard.convert(source, tmp_path / "whole" / "folder", **options)
    names = [path.name for path in (tmp_path / "whole" / "folder").iterdir()]
    assert len(names) > 2
    assert all((dst / name).read_bytes() == (tmp_path / "whole" / "folder" / name).read_bytes() for name in names)
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["folder"]


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
