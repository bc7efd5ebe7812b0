"""What `saves.py` times: saves, the stall of a background save, verified loads.

Each case checks its result and returns seconds; a case with several processes returns its start and its end.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import time
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

import load_cases
import fresh
import model
import reshard

if TYPE_CHECKING:
    from pathlib import Path

    from fresh import Member

N_PARTS, PART = 4, 1  # a sharded load takes one part of four, not the first or the last
Cut = Literal["whole", "rows", "columns"]
Verify = Literal["touched", "structure"]

_WRITE_BYTES = 4 << 20
_BLOCK_BYTES = 4096
_IN_FLIGHT = 8


def layout(cut: Cut, n: int) -> dict[str, Any]:
    """All matrices are sharded in one dim over n ranks; tensors of one dim are whole."""
    dims: dict[Cut, list[str | None]] = {"whole": [], "rows": ["tp"], "columns": [None, "tp"]}
    return {"mesh": {"tp": n}, "rules": [{"match": "*norm*"}, {"match": "*", "cut": dims[cut]}]}


def own_slice(shape: tuple[int, ...], cut: Cut) -> tuple[slice, ...]:
    """What `PART` holds of a tensor, as an index."""
    if cut == "whole" or len(shape) == 1:
        return (slice(None),) * len(shape)
    n = shape[cut == "columns"] // N_PARTS
    own = slice(PART * n, (PART + 1) * n)
    return (own, slice(None)) if cut == "rows" else (slice(None), own)


def own_bytes(path: Path, cut: Cut) -> int:
    """Bytes of what `PART` holds."""
    return sum(array[own_slice(array.shape, cut)].nbytes for array in model.read(path).values())


# Saves.


def save(member: Member, path: Path, root: Path) -> tuple[float, float]:
    """Save the model by some processes, each its rows: durable, with checksums, published."""
    with reshard.open(path) as checkpoint:
        own = checkpoint.load(layout("rows", member.n), member.rank)
    with _group(member, root.with_suffix(".store")):
        member.meet()
        started = time.perf_counter()
        report = reshard.save(root, 1, own, layout=layout("rows", member.n))
        ended = time.perf_counter()
        assert report.durable, report
        member.meet()
    if member.rank == 0:
        check_saved(path, root, 1)
    return started, ended


def write_raw(member: Member, path: Path, target: Path, how: Literal["direct", "buffered"]) -> tuple[float, float]:
    """Write as many bytes as a process saves from memory to a file, and sync the file and its folder."""
    n_bytes = path.stat().st_size // member.n // _BLOCK_BYTES * _BLOCK_BYTES
    memory = fresh.anonymous(n_bytes, touch=True)
    memory[...] = np.fromfile(path, np.uint8, n_bytes, offset=member.rank * n_bytes)
    target.mkdir(exist_ok=True)
    file = target / f"raw-{member.rank}"
    member.meet()
    started = time.perf_counter()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    descriptor = os.open(file, flags | os.O_DIRECT if how == "direct" else flags, 0o640)
    if how == "direct":
        os.posix_fallocate(descriptor, 0, n_bytes)
        with concurrent.futures.ThreadPoolExecutor(_IN_FLIGHT) as pool:
            pieces = range(0, n_bytes, _WRITE_BYTES)
            list(pool.map(lambda at: os.pwrite(descriptor, memory[at : at + _WRITE_BYTES], at), pieces))
    else:
        for at in range(0, n_bytes, _WRITE_BYTES):
            os.write(descriptor, memory[at : at + _WRITE_BYTES])
    os.fsync(descriptor)
    os.close(descriptor)
    folder = os.open(target, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    ended = time.perf_counter()
    assert np.array_equal(memory, np.fromfile(file, np.uint8)), "the file is not what was written"
    return started, ended


def stall(path: Path, root: Path) -> float:
    """How long a background save blocks its caller, if the memory for its copy exists from an earlier one."""
    with reshard.open(path) as checkpoint:
        state = checkpoint.load()
    reshard.save(root, 1, state, blocking=False).result()
    started = time.perf_counter()
    pending = reshard.save(root, 2, state, blocking=False)
    seconds = time.perf_counter() - started
    for array in state.values():
        array.view(np.uint16)[...] = 0  # must not change what is saved
    pending.result()
    check_saved(path, root, 2)
    return seconds


def check_saved(path: Path, root: Path, iteration: int) -> None:
    """Compare the shard files of an iteration with the model, byte for byte; rows are in the order of the files."""
    parts = [model.read(file) for file in load_cases.shard_files(root / f"iteration_{iteration:08d}")]
    for key, expected in model.read(path).items():
        start = 0
        for part in (part[key] for part in parts if key in part):
            model.assert_equal(key, expected[start : start + len(part)], part)
            start += len(part)
        assert start == len(expected), f"{key} has {start} rows, expected {len(expected)}"


@contextlib.contextmanager
def _group(member: Member, store: Path) -> Any:
    """The default process group, if there is more than one process."""
    if member.n == 1:
        yield
        return
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=member.rank, world_size=member.n)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


# Loads.


def publish(path: Path, root: Path) -> None:
    """The model as one iteration with a manifest, its shard file in the page cache in large folios."""
    with reshard.open(path) as checkpoint:
        reshard.save(root, 1, checkpoint.load())
    for file in load_cases.shard_files(root):
        copy = file.with_suffix(".copy")
        with file.open("rb") as source, copy.open("wb") as target:
            while piece := source.read(_WRITE_BYTES):
                target.write(piece)
            os.fsync(target)
        copy.replace(file)


def load(path: Path, root: Path, cut: Cut, verify: Verify, into: Literal["fresh", "given"]) -> float:
    """Load a part of the model, from the root to the last array."""
    files = load_cases.shard_files(root)
    given = None
    if into == "given":
        with reshard.open(root) as checkpoint:
            given = checkpoint.load(layout(cut, N_PARTS), PART)
        for array in given.values():
            array.view(np.uint16)[...] = 1
    else:
        with reshard.open(root) as checkpoint:  # starts the threads
            checkpoint.load(keys=["model.layers.0.self_attn.k_proj.weight"])
    fresh.prepare(files, 0 if given else 2 * own_bytes(path, cut))
    started = time.perf_counter()
    with reshard.open(root) as checkpoint:
        found = checkpoint.load(layout(cut, N_PARTS), PART, verify=verify, out=given)
    seconds = time.perf_counter() - started
    expected = model.read(path)
    assert set(found) == set(expected)
    for key, array in expected.items():
        model.assert_equal(key, array[own_slice(array.shape, cut)], found[key])
    return seconds
