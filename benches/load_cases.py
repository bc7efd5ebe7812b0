"""What is timed: loads, conversions, and their yardsticks. Each case checks its result and returns seconds.

Every load is timed from the path to the last array, including opening and closing, as in a restart. It first loads one
small tensor, which starts its threads.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import shutil
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import safetensors
import torch

import fresh
import model
import reshard
import reshard.interop
import reshard.layout
import reshard.verbs.convert

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

RANK = 1  # not the first or the last: its slices begin and end inside the tensors
Method = Literal["map", "read"]
_WARM_UP = ["model.layers.0.self_attn.k_proj.weight"]


def load_rank(path: Path, method: Method) -> float:
    """A rank's slices into fresh memory."""

    def load(keys: Collection[str] | None) -> dict[str, np.ndarray]:
        with reshard.open(path, method=method) as checkpoint:
            return checkpoint.load(model.LAYOUT, RANK, keys=keys)

    return _time_load(path, load, lambda found: model.check_rank(path, found, RANK), 2 * model.own_bytes(path, RANK))


def load_rank_stock(path: Path) -> float:
    """The same with safetensors. A slice is a view of the map; the clone copies it."""

    def load(keys: Collection[str] | None) -> dict[str, torch.Tensor]:
        with safetensors.safe_open(path, "pt") as file:
            found = {}
            for key in keys or file.keys():
                part = file.get_slice(key)
                index = model.own_slice(key, tuple(part.get_shape()), RANK)
                found[key] = part[index].clone(memory_format=torch.contiguous_format)
            return found

    def check(found: dict[str, torch.Tensor]) -> None:
        model.check_rank(path, _as_arrays(found), RANK)

    return _time_load(path, load, check, 2 * model.own_bytes(path, RANK))


def load_whole(path: Path, method: Method) -> float:
    """Whole tensors into fresh memory."""

    def load(keys: Collection[str] | None) -> dict[str, np.ndarray]:
        with reshard.open(path, method=method) as checkpoint:
            return checkpoint.load(keys=keys)

    return _time_load(path, load, lambda found: model.check_whole(path, found), path.stat().st_size)


def load_whole_stock(path: Path) -> float:
    """The same with safetensors; its tensors are views of the map until they are cloned."""

    def load(keys: Collection[str] | None) -> dict[str, torch.Tensor]:
        with safetensors.safe_open(path, "pt") as file:
            return {key: file.get_tensor(key).clone() for key in keys or file.keys()}

    def check(found: dict[str, torch.Tensor]) -> None:
        model.check_whole(path, _as_arrays(found))

    return _time_load(path, load, check, path.stat().st_size)


def load_given(path: Path) -> float:
    """Whole tensors into existing arrays that were touched before."""
    with reshard.open(path) as checkpoint:
        given = checkpoint.load()
    for array in given.values():
        array.view(np.uint16)[...] = 1

    def load(keys: Collection[str] | None) -> dict[str, np.ndarray]:
        out = given if keys is None else {key: given[key] for key in keys}
        with reshard.open(path) as checkpoint:
            return checkpoint.load(keys=keys, out=out)

    return _time_load(path, load, lambda found: model.check_whole(path, found), 0)


def load_views(path: Path) -> float:
    """Whole tensors as views of the file; no byte is read."""

    def load(keys: Collection[str] | None) -> dict[str, np.ndarray]:
        with reshard.open(path) as checkpoint:
            return checkpoint.load(keys=keys, copy=False)

    return _time_load(path, load, lambda found: model.check_whole(path, found), 0)


def copy_plain(path: Path, n_bytes: int, into: Literal["fresh", "warm"]) -> float:
    """Copy bytes from the start of a new map of the file into memory, with as many threads as processors."""
    fresh.prepare([path], 0 if into == "warm" else 2 * n_bytes)
    memory = fresh.anonymous(n_bytes, touch=into == "warm")
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

    threads = [threading.Thread(target=copy_bands) for _ in os.sched_getaffinity(0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def merge(source: Path, target: Path, path: Path, *, durable: bool) -> float:
    """Convert a folder of one file per rank to Hugging Face."""
    fresh.prepare(shard_files(source), 2 * path.stat().st_size)
    started = time.perf_counter()
    reshard.verbs.convert.convert(source, target, commit={"durable": durable})
    seconds = time.perf_counter() - started
    model.check_whole(path, model.read(target / "model.safetensors"))
    return seconds


def split(source: Path, target: Path, path: Path, *, durable: bool) -> float:
    """Convert Hugging Face to a folder of one file per rank."""
    fresh.prepare(shard_files(source), 2 * path.stat().st_size)
    started = time.perf_counter()
    reshard.verbs.convert.convert(source, target, layout=model.LAYOUT, commit={"durable": durable})
    seconds = time.perf_counter() - started
    model.check_split(path, shard_files(target))
    return seconds


def cp(source: Path, target: Path, path: Path, *, durable: bool) -> float:
    """Copy the folder with cp, without reflinks; durable: its file system is synced."""
    fresh.prepare(shard_files(source), 2 * path.stat().st_size)
    started = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", source, target], check=True)
    if durable:
        subprocess.run(["sync", "-f", target], check=True)
    seconds = time.perf_counter() - started
    model.check_whole(path, model.read(target / path.name))
    return seconds


def remove(target: Path) -> None:
    """Delete what a case wrote, and sync the file system."""
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(["sync", "-f", target.parent], check=True)


def shard_files(folder: Path) -> list[Path]:
    """The shard files below a folder, sorted by name."""
    return sorted(folder.rglob("*.safetensors"))


def _time_load(path: Path, load: Callable[[Any], Any], check: Callable[[Any], None], n_fresh_bytes: int) -> float:
    load(_WARM_UP)
    fresh.prepare([path], n_fresh_bytes)
    started = time.perf_counter()
    found = load(None)
    seconds = time.perf_counter() - started
    check(found)
    return seconds


def _as_arrays(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {key: tensor.view(torch.uint16).numpy() for key, tensor in tensors.items()}
