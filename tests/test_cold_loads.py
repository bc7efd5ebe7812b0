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
