"""What `loads.py` times: loads by reshard and by other libraries, and plain copies. Results are checked.

Every load is timed from the path to the last array, including opening and closing, as in a restart. It first loads one
small tensor in the same format, which starts threads and imports what a library imports late.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import itertools
import mmap
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ml_dtypes
import numpy as np
import safetensors
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import reshard
from benches import fresh, model
from benches.machine import LIBRARIES
from benches.sources import Sources, as_shard

if TYPE_CHECKING:
    from collections.abc import Callable

    from benches.sources import Form

RANK = 1  # not the first or the last: its slices begin and end inside the tensors
N_THREADS = len(os.sched_getaffinity(0))
Cut = Literal["slices", "whole"]
Into = Literal["fresh", "huge", "4 KiB"]
"""Fresh memory; or memory that the caller has touched, in huge pages or in pages of 4 KiB."""

_BAND_BYTES = 8 << 20


def reshard_(
    sources: Sources, cut: Cut, into: Into, method: Literal["auto", "read"] = "auto", **options: bool
) -> float:
    """By `Checkpoint.load`, into fresh memory or `out`."""

    def load(at: Sources, given: dict[str, np.ndarray] | None) -> dict[str, Any]:
        with reshard.open(at.path, method=method) as checkpoint:
            if cut == "whole":
                return checkpoint.load(out=_as(given, ml_dtypes.bfloat16))
            return checkpoint.load(model.LAYOUT, _rank, out=_as(given, ml_dtypes.bfloat16))

    return _time_load(sources, "hf", cut, into, load, **options)


def views(sources: Sources) -> float:
    """Whole tensors as views of the file; no byte is read."""

    def load(at: Sources, _: object) -> dict[str, Any]:
        with reshard.open(at.path) as checkpoint:
            return checkpoint.load(copy=False)

    return _time_load(sources, "hf", "whole", "fresh", load)


def safetensors_(sources: Sources, cut: Cut, into: Into, **options: bool) -> float:
    """By `safe_open`. A slice or tensor is a view of the map; a clone or a copy reads it."""

    def load(at: Sources, given: dict[str, np.ndarray] | None) -> dict[str, Any]:
        to = _as_tensors(given)
        with safetensors.safe_open(at.path, "pt") as file:
            found = {}
            for key in file.keys():  # noqa: SIM118  it is no mapping
                if cut == "whole":
                    part = file.get_tensor(key)
                else:
                    lazy = file.get_slice(key)
                    part = lazy[model.own_slice(key, tuple(lazy.get_shape()), _rank)]
                if to is None:
                    found[key] = part.clone(memory_format=torch.contiguous_format)
                else:
                    found[key] = to[key].copy_(part)
            return found

    return _time_load(sources, "hf", cut, into, load, **options)


def numpy_(sources: Sources, cut: Cut, into: Into, **options: bool) -> float:
    """By `np.copyto` from `np.memmap`, on as many threads as processors, in bands of rows."""

    def load(at: Sources, given: dict[str, np.ndarray] | None) -> dict[str, Any]:
        found, jobs = {}, []
        for key, array in model.read(at.path).items():
            part = array if cut == "whole" else array[model.own_slice(key, array.shape, _rank)]
            found[key] = np.empty(part.shape, np.uint16) if given is None else given[key]
            rows = max(1, _BAND_BYTES * len(part) // max(1, part.nbytes))
            jobs += [(found[key][i : i + rows], part[i : i + rows]) for i in range(0, len(part), rows)]
        with concurrent.futures.ThreadPoolExecutor(N_THREADS) as pool:
            list(pool.map(lambda job: np.copyto(*job), jobs))
        return found

    return _time_load(sources, "hf", cut, into, load, **options)


def dcp_(sources: Sources, cut: Cut, into: Into, reader: Literal["torch", "hf", "reshard"]) -> float:
    """By `dcp.load` into a state of tensors; slices are DTensors of rank 1 of 4, in one process.

    Args:
        sources: the model.
        cut: what is loaded.
        into: fresh memory is created before the clock starts, and not touched.
        reader: `torch` reads its own format, the others read the model's file.
    """
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=model.N_RANKS)
    mesh = init_device_mesh("cpu", (model.N_RANKS,))

    def state(memory: dict[str, torch.Tensor]) -> dict[str, Any]:
        if cut == "whole":
            return dict(memory)
        return {key: as_shard(key, tensor, mesh) for key, tensor in memory.items()}

    def load(at: Sources, given: dict[str, np.ndarray] | None) -> dict[str, Any]:
        memory = _as_tensors(given if given is not None else untouched[at.size_gb])
        assert memory is not None
        wanted = state(memory)
        dcp.load(wanted, storage_reader=_dcp_reader(at, reader), no_dist=True)
        return memory

    untouched = {
        at.size_gb: {key: np.empty(a.shape, np.uint16) for key, a in _expected(at, cut).items()}
        for at in (sources, sources.small)
    }
    return _time_load(sources, "dcp" if reader == "torch" else "hf", cut, into, load)


def _dcp_reader(at: Sources, reader: Literal["torch", "hf", "reshard"]) -> dcp.StorageReader:
    if reader == "torch":
        return dcp.FileSystemReader(at.at("dcp"))
    if reader == "hf":
        return HuggingFaceStorageReader(str(at.at("hf")))
    from reshard.torch.dcp import Reader  # noqa: PLC0415

    return Reader(at.at("hf"))


def fastsafetensors(sources: Sources) -> float:
    """By `SafeTensorsFileLoader` into the memory of this machine, without its direct path to GPUs."""
    LIBRARIES["fastsafetensors"].require()
    from fastsafetensors import SafeTensorsFileLoader  # noqa: PLC0415

    def load(at: Sources, _: object) -> dict[str, Any]:
        loader = SafeTensorsFileLoader(None, "cpu", nogds=True, max_threads=N_THREADS)
        loader.add_filenames({0: [str(at.path)]})
        buffer = loader.copy_files_to_device()
        found = {key: buffer.get_tensor(key) for key in loader.get_keys()}
        buffer.close()  # the tensors keep the memory
        loader.close()
        return found

    return _time_load(sources, "hf", "whole", "fresh", load)


def run_ai(sources: Sources) -> float:
    """By `SafetensorsStreamer`; what it yields is memory of its buffer, and is cloned."""
    LIBRARIES["Run:ai model streamer"].require()
    from runai_model_streamer import SafetensorsStreamer  # noqa: PLC0415

    def load(at: Sources, _: object) -> dict[str, Any]:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(at.path))
            return {key: tensor.clone() for key, tensor in streamer.get_tensors()}

    return _time_load(sources, "hf", "whole", "fresh", load)


def orbax(sources: Sources) -> float:
    """By `PyTreeCheckpointer.restore` of its own format, as numpy arrays."""
    LIBRARIES["Orbax"].require()
    import orbax.checkpoint  # noqa: PLC0415

    def load(at: Sources, _: object) -> dict[str, Any]:
        return orbax.checkpoint.PyTreeCheckpointer().restore(at.at("orbax"))

    return _time_load(sources, "orbax", "whole", "fresh", load)


def copy_plain(path: Path, n_bytes: int, into: Into) -> float:
    """Copy bytes from the start of a new map of the file into memory, with as many threads as processors."""
    fresh.prepare([path], 2 * n_bytes if into == "fresh" else 0)
    memory = fresh.anonymous(n_bytes, touch=into != "fresh", pages="4 KiB" if into == "4 KiB" else "huge")
    started = time.perf_counter()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        mapped.madvise(mmap.MADV_HUGEPAGE)
        source = np.frombuffer(mapped, np.uint8)
        _copy_in_threads(memory, source)
        del source
    seconds = time.perf_counter() - started
    assert np.array_equal(memory, np.fromfile(path, np.uint8, n_bytes))
    return seconds


def copy_memory(path: Path, n_bytes: int) -> float:
    """Copy memory to memory, both touched before, with as many threads as processors: an upper bound."""
    content = np.fromfile(path, np.uint8, n_bytes)
    source, memory = fresh.anonymous(n_bytes, touch=True), fresh.anonymous(n_bytes, touch=True)
    source[...] = content
    started = time.perf_counter()
    _copy_in_threads(memory, source)
    seconds = time.perf_counter() - started
    assert np.array_equal(memory, content)
    return seconds


def _copy_in_threads(memory: np.ndarray, source: np.ndarray) -> None:
    memcpy = ctypes.CDLL(None).memcpy  # a foreign call: it releases the GIL
    memcpy.argtypes, memcpy.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], ctypes.c_void_p
    to, start = memory.ctypes.data, source.ctypes.data
    bands = itertools.count()

    def copy_bands() -> None:
        # A band is one huge page: two threads in one page would both allocate it.
        while (at := next(bands) * fresh.HUGE_PAGE_BYTES) < len(memory):
            memcpy(to + at, start + at, min(fresh.HUGE_PAGE_BYTES, len(memory) - at))

    threads = [threading.Thread(target=copy_bands) for _ in range(N_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# Loads from a disk: the file is dropped from the page cache first.


def cold(sources: Sources, cut: Cut, library: Literal["reshard", "safetensors", "numpy"]) -> float:
    """A load into fresh memory of a file that is not in the page cache."""
    return _LOADS[library](sources, cut, "fresh", is_cold=True)


def cold_bytes(sources: Sources, cut: Cut, library: Literal["reshard", "safetensors", "numpy"]) -> float:
    """Bytes that such a load reads from the disk."""
    cold(sources, cut, library)
    return float(_n_read)


def cold_of_all(
    member: fresh.Member, sources: Sources, library: Literal["reshard", "safetensors", "numpy"]
) -> tuple[float, float]:
    """The slices of one rank into fresh memory, while the other ranks load theirs from the same file."""
    global _rank, _member
    _rank, _member = member.rank, member
    _LOADS[library](sources, "slices", "fresh", is_cold=True)
    return _times


def pages(sources: Sources, cut: Cut) -> float:
    """Bytes of the pages of the file that hold the header and what is loaded, computed."""
    at = sources.path.stat().st_size - sources.n_bytes()  # the tensors follow the header without gaps
    is_needed = np.zeros(sources.path.stat().st_size + mmap.PAGESIZE, np.bool_)
    is_needed[:at] = True
    for key, array in model.read(sources.path).items():
        of_tensor = is_needed[at : at + array.nbytes].reshape(*array.shape, 2)
        of_tensor[model.own_slice(key, array.shape, RANK) if cut == "slices" else ...] = True
        at += array.nbytes
    n_pages = len(is_needed) // mmap.PAGESIZE
    by_page = is_needed[: n_pages * mmap.PAGESIZE].reshape(n_pages, mmap.PAGESIZE)
    return float(by_page.any(axis=1).sum() * mmap.PAGESIZE)


def read_cold(sources: Sources) -> float:
    """Read the file from start to end past the page cache (`O_DIRECT`), in calls of 4 MiB."""
    fresh.drop([sources.path])
    memory = fresh.anonymous(4 << 20, touch=True)
    descriptor = os.open(sources.path, os.O_RDONLY | os.O_DIRECT)
    started = time.perf_counter()
    while os.readv(descriptor, [memory]):
        pass
    seconds = time.perf_counter() - started
    os.close(descriptor)
    return seconds


_LOADS: dict[str, Callable[..., float]] = {"reshard": reshard_, "safetensors": safetensors_, "numpy": numpy_}
_n_read = 0
_rank = RANK
# One of several processes that load at the same time.
_member: fresh.Member | None = None
_times = (0.0, 0.0)


def _bytes_read() -> int:
    """Bytes that this process has read from disks, page faults included."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


def _time_load(
    sources: Sources,
    form: Form,
    cut: Cut,
    into: Into,
    load: Callable[[Sources, dict[str, np.ndarray] | None], dict[str, Any]],
    *,
    is_cold: bool = False,
) -> float:
    global _n_read, _times  # noqa: PLW0603  a process runs one case
    load(sources.small, None if into == "fresh" else _given(sources.small, cut, into))
    given = None if into == "fresh" else _given(sources, cut, into)
    n_bytes = sum(array.nbytes for array in _expected(sources, cut).values())
    fresh.prepare(sources.files(form), 2 * n_bytes if given is None else 0)
    if is_cold:
        if _member is not None:
            _member.meet()  # each has read the file
        fresh.drop(sources.files(form))
    n_read = _bytes_read()
    if _member is not None:
        _member.meet()
    started = time.perf_counter()
    found = load(sources, given)
    _times = (started, time.perf_counter())
    _n_read = _bytes_read() - n_read
    if _member is not None:
        _member.meet()  # to check a result reads the file
    check(sources, cut, found)
    return _times[1] - _times[0]


def check(sources: Sources, cut: Cut, found: dict[str, Any]) -> None:
    """Compare what was loaded with the model, byte for byte."""
    arrays = {
        key: value.view(torch.uint16).numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        for key, value in found.items()
    }
    expected = _expected(sources, cut)
    assert set(arrays) == set(expected), "the tensors are not those of the model"
    for key, array in expected.items():
        model.assert_equal(key, array, arrays[key])


def _expected(sources: Sources, cut: Cut) -> dict[str, np.ndarray]:
    whole = model.read(sources.path)
    if cut == "whole":
        return whole
    return {key: array[model.own_slice(key, array.shape, _rank)] for key, array in whole.items()}


def _given(sources: Sources, cut: Cut, into: Into) -> dict[str, np.ndarray]:
    """Arrays in memory that was touched before, each at the start of a page."""
    expected = _expected(sources, cut)
    memory = fresh.anonymous(
        sum(_paged(array) for array in expected.values()), touch=True, pages="4 KiB" if into == "4 KiB" else "huge"
    )
    memory[...] = 1
    found, at = {}, 0
    for key, array in expected.items():
        found[key] = memory[at : at + array.nbytes].view(np.uint16).reshape(array.shape)
        at += _paged(array)
    return found


def _paged(array: np.ndarray) -> int:
    return -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _as(given: dict[str, np.ndarray] | None, dtype: Any) -> dict[str, np.ndarray] | None:
    return given and {key: array.view(dtype) for key, array in given.items()}


def _as_tensors(given: dict[str, np.ndarray] | None) -> dict[str, torch.Tensor] | None:
    return given and {key: torch.from_numpy(array).view(torch.bfloat16) for key, array in given.items()}
