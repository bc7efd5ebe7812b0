"""Loads of files that are not in the page cache: the values are right, and only the pages that are needed are read."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from benches.fresh import drop
from benches.table import Unavailable

import reshard

MIB = 1 << 20
PAGE_BYTES = 4096
N_ROWS, ROW_BYTES = 768, 16 << 10

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/io is a file of Linux"),
    pytest.mark.disk,
]


def n_read() -> int:
    """Bytes that this process has read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


def content() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (N_ROWS, ROW_BYTES), np.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    reshard.save_file({"w": content()}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path


@pytest.mark.parametrize(
    "index",
    [
        pytest.param((slice(None), slice(4096, 8192)), id="two pages of four in each row"),
        pytest.param((slice(None), slice(5000, 5100)), id="one page of four in each row"),
        pytest.param((slice(None), slice(4000, 14000)), id="nearly the complete rows"),
        pytest.param((slice(100, 300), slice(None)), id="rows"),
        pytest.param((slice(10, 450), slice(None)), id="rows of several bands and of complete blocks of 2 MiB"),
        pytest.param((slice(None), slice(None)), id="all"),
        pytest.param((slice(300, 700), slice(8192, 16384)), id="a box"),
    ],
)
def test_a_slice_reads_the_pages_that_it_needs(index: tuple[slice, slice], path: Path) -> None:
    is_needed = np.zeros(path.stat().st_size + -path.stat().st_size % PAGE_BYTES, np.bool_)
    data_start = path.stat().st_size - N_ROWS * ROW_BYTES
    is_needed[:data_start] = True
    is_needed[data_start : data_start + N_ROWS * ROW_BYTES].reshape(N_ROWS, ROW_BYTES)[index] = True
    needed_bytes = int(is_needed.reshape(-1, PAGE_BYTES).any(axis=1).sum()) * PAGE_BYTES
    try:
        drop([path])
    except Unavailable as error:
        pytest.skip(str(error))
    before = n_read()
    with reshard.open(path) as checkpoint:
        found = checkpoint.read("w", index)
    read_bytes = n_read() - before
    np.testing.assert_array_equal(found, content()[index])
    # The header is opened by a read of the system, which reads some pages behind it.
    assert read_bytes <= 1.05 * needed_bytes + (256 << 10), (read_bytes, needed_bytes)


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("others", [True, False])
def test_gaps_that_other_ranks_read_are_read(tmp_path: Path, *, others: bool) -> None:
    # 24 bands of 2 MiB, of which 8 are requested before the first is copied, in two pages of four of each row.
    rows = np.random.default_rng(0).integers(0, 256, (6144, ROW_BYTES), np.uint8)
    path = tmp_path / "model.safetensors"
    reshard.save_file({"w": rows}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    try:
        drop([path])
    except Unavailable as error:
        pytest.skip(str(error))
    if others:  # another rank reads the other columns, and has got to the fourth band
        with path.open("rb", buffering=0) as file:
            data_start = path.stat().st_size - rows.nbytes
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for row in range(1024):
                os.pread(file.fileno(), 8192, data_start + row * ROW_BYTES + 8192)
    before = n_read()
    with reshard.open(path) as checkpoint:
        found = checkpoint.read("w", (slice(None), slice(0, 8192)))
    read_bytes = n_read() - before
    np.testing.assert_array_equal(found, rows[:, :8192])
    if others:  # the gaps of the bands 8 to 23
        assert 70 * MIB <= read_bytes <= 84 * MIB, read_bytes / MIB
    else:
        assert read_bytes <= 51 * MIB, read_bytes / MIB
