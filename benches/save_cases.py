"""What `saves.py` times: durable saves, saves in the background, verified loads. Results are checked.

Each case returns seconds; a case with several processes returns its start and its end.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import time
from typing import TYPE_CHECKING, Any, Literal

import ml_dtypes
import numpy as np
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import reshard
from benches import fresh, model
from benches.machine import LIBRARIES
from benches.sources import whole_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from benches.fresh import Member
    from benches.sources import Sources

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


# Saves. All end when the files are on the disk.


def save(member: Member, sources: Sources, *, first: bool = False) -> tuple[float, float]:
    """`reshard.save` by some processes, each its rows: durable, with checksums, published.

    Args:
        member: of the processes.
        sources: the model.
        first: the save is the first of the process, and includes its imports.
    """
    with reshard.open(sources.path) as checkpoint:
        own = checkpoint.load(layout("rows", member.n), member.rank)
    with _group(member, sources):
        if not first:
            reshard.save(sources.small.target, 1, dict(list(own.items())[-1:]), layout=layout("rows", member.n))
        member.meet()
        started = time.perf_counter()
        report = reshard.save(sources.target, 1, own, layout=layout("rows", member.n))
        ended = time.perf_counter()
        assert report.durable, report
        member.meet()
    if member.rank == 0:
        check_saved(sources.path, sources.target, 1)
    return started, ended


def save_safetensors(member: Member, sources: Sources) -> tuple[float, float]:
    """`save_file` by some processes, each its rows to a file, which is synced."""
    own = {key: tensor.contiguous() for key, tensor in _rows(sources.path, member).items()}
    sources.target.mkdir(exist_ok=True)
    file = sources.target / f"rank-{member.rank}.safetensors"
    member.meet()
    started = time.perf_counter()
    safetensors.torch.save_file(own, file)
    _sync(file)
    _sync(sources.target)
    ended = time.perf_counter()
    for key, tensor in own.items():
        model.assert_equal(key, tensor.view(torch.uint16).numpy(), model.read(file)[key])
    return started, ended


def save_dcp(member: Member, sources: Sources, writer: Literal["torch", "reshard"]) -> tuple[float, float]:
    """`dcp.save` by some processes, each its rows as DTensors; torch's writer syncs its files."""
    with _group(member, sources):
        state: dict[str, Any] = dict(_rows(sources.path, member))
        if member.n > 1:
            mesh = init_device_mesh("cpu", (member.n,))
            state = {
                key: DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False) if tensor.ndim > 1 else tensor
                for key, tensor in state.items()
            }
        few = dict(list(state.items())[-1:])
        dcp.save(few, storage_writer=_dcp_writer(sources.small.target, writer), no_dist=member.n == 1)
        made = _dcp_writer(sources.target, writer)
        member.meet()
        started = time.perf_counter()
        dcp.save(state, storage_writer=made, no_dist=member.n == 1)
        ended = time.perf_counter()
        member.meet()
    if member.rank == 0:
        _check_dcp(sources, writer)
    return started, ended


def _dcp_writer(target: Path, writer: Literal["torch", "reshard"]) -> dcp.StorageWriter:
    if writer == "torch":
        return dcp.FileSystemWriter(target, sync_files=True)
    from reshard.torch.dcp import Writer  # noqa: PLC0415

    return Writer(target)


def _check_dcp(sources: Sources, writer: Literal["torch", "reshard"]) -> None:
    if writer == "reshard":
        with reshard.open(sources.target) as checkpoint:
            found = checkpoint.load()
    else:
        expected = model.read(sources.path)
        state = {key: torch.zeros(array.shape, dtype=torch.bfloat16) for key, array in expected.items()}
        dcp.load(state, storage_reader=dcp.FileSystemReader(sources.target), no_dist=True)
        found = {key: tensor.view(torch.uint16).numpy() for key, tensor in state.items()}
    model.check_whole(sources.path, found)


def save_orbax(member: Member, sources: Sources) -> tuple[float, float]:
    """`PyTreeCheckpointer.save` of numpy arrays; it syncs its files."""
    LIBRARIES["Orbax"].require()
    import orbax.checkpoint  # noqa: PLC0415

    arrays = {key: array.copy().view(ml_dtypes.bfloat16) for key, array in model.read(sources.path).items()}
    checkpointer = orbax.checkpoint.PyTreeCheckpointer()
    checkpointer.save(sources.small.target, dict(list(arrays.items())[-1:]))
    member.meet()
    started = time.perf_counter()
    checkpointer.save(sources.target, arrays)
    ended = time.perf_counter()
    found = checkpointer.restore(sources.target)
    model.check_whole(sources.path, {key: np.asarray(array) for key, array in found.items()})
    return started, ended


def write_raw(member: Member, sources: Sources, how: Literal["direct", "buffered"]) -> tuple[float, float]:
    """Write as many bytes as a process saves from memory to a file, and sync the file and its folder."""
    n_bytes = sources.path.stat().st_size // member.n // _BLOCK_BYTES * _BLOCK_BYTES
    memory = fresh.anonymous(n_bytes, touch=True)
    memory[...] = np.fromfile(sources.path, np.uint8, n_bytes, offset=member.rank * n_bytes)
    sources.target.mkdir(exist_ok=True)
    file = sources.target / f"raw-{member.rank}"
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
    _sync(sources.target)
    ended = time.perf_counter()
    assert np.array_equal(memory, np.fromfile(file, np.uint8)), "the file is not what was written"
    return started, ended


def save_small(sources: Sources, n_bytes: int, library: Literal["reshard", "torch DCP"]) -> float:
    """The second save of a process, of ten tensors."""
    content = np.random.default_rng(0).integers(0, 256, n_bytes // 40 * 40, np.uint8).reshape(10, -1).view(np.float32)
    arrays = {f"layers.{i}.weight": row.copy() for i, row in enumerate(content)}
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    for iteration in (1, 2):
        started = time.perf_counter()
        if library == "reshard":
            report = reshard.save(sources.target, iteration, arrays)
        else:
            folder = sources.target / f"{iteration}"
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder, sync_files=True), no_dist=True)
        seconds = time.perf_counter() - started
    if library == "reshard":
        with reshard.open(report.path) as checkpoint:
            found = checkpoint.load()
    else:
        state = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
        found = {key: tensor.numpy() for key, tensor in state.items()}
    assert found.keys() == arrays.keys()
    assert all(found[key].tobytes() == array.tobytes() for key, array in arrays.items())
    return seconds


def stall(sources: Sources, number: Literal[1, 2]) -> float:
    """How long `reshard.save(blocking=False)` blocks its caller, the first or the second time.

    The memory for the copy exists the second time. The arrays are overwritten when the call returns.
    """
    with reshard.open(sources.path) as checkpoint:
        state = checkpoint.load()
    if number == 2:
        reshard.save(sources.target, 1, state, blocking=False).result()
    fresh.prepare([], 2 * sources.path.stat().st_size if number == 1 else 0)
    started = time.perf_counter()
    pending = reshard.save(sources.target, number, state, blocking=False)
    seconds = time.perf_counter() - started
    for array in state.values():
        array.view(np.uint16)[...] = 0  # must not change what is saved
    pending.result()
    check_saved(sources.path, sources.target, number)
    return seconds


def look(sources: Sources, what: Literal["stall", "save"], *, is_float: bool) -> float:
    """A later save in the background: how long its caller is blocked, or how long the whole takes.

    While floats are written, values that are not finite are looked for. The same bytes as integers have none.
    """
    with reshard.open(sources.path) as checkpoint:
        state = checkpoint.load()
    if not is_float:
        state = {key: array.view(f"i{array.itemsize}") for key, array in state.items()}
    reshard.save(sources.target, 1, state, blocking=False).result()
    started = time.perf_counter()
    pending = reshard.save(sources.target, 2, state, blocking=False)
    blocked = time.perf_counter() - started
    pending.result()
    return blocked if what == "stall" else time.perf_counter() - started


def stall_dcp(member: Member, sources: Sources, number: Literal[1, 2]) -> tuple[float, float]:
    """The same of `dcp.async_save`, whose files are synced; each save stages to memory of its own."""
    store = sources.target.with_suffix(".store")
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=member.rank, world_size=member.n)
    state = whole_tensors(sources.path)
    if number == 2:
        writer = dcp.FileSystemWriter(sources.target.with_suffix(".first"), sync_files=True)
        dcp.async_save(state, storage_writer=writer).result()
    fresh.prepare([], 2 * sources.path.stat().st_size)
    started = time.perf_counter()
    pending = dcp.async_save(state, storage_writer=dcp.FileSystemWriter(sources.target, sync_files=True))
    ended = time.perf_counter()
    for tensor in state.values():
        tensor.zero_()
    pending.result()
    torch.distributed.destroy_process_group()
    _check_dcp(sources, "torch")
    return started, ended


def check_saved(path: Path, root: Path, iteration: int) -> None:
    """Compare the shard files of an iteration with the model, byte for byte; rows are in the order of the files."""
    parts = [model.read(file) for file in sorted((root / f"iteration_{iteration:08d}").rglob("*.safetensors"))]
    for key, expected in model.read(path).items():
        start = 0
        for part in (part[key] for part in parts if key in part):
            model.assert_equal(key, expected[start : start + len(part)], part)
            start += len(part)
        assert start == len(expected), f"{key} has {start} rows, expected {len(expected)}"


def _rows(path: Path, member: Member) -> dict[str, torch.Tensor]:
    """The rows of a process; tensors of one dim are whole."""
    found = {}
    for key, tensor in whole_tensors(path).items():
        found[key] = tensor.chunk(member.n)[member.rank] if tensor.ndim > 1 else tensor
    return found


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


@contextlib.contextmanager
def _group(member: Member, sources: Sources) -> Any:
    """The default process group, if there is more than one process."""
    if member.n == 1:
        yield
        return
    store = sources.target.with_suffix(".store")
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=member.rank, world_size=member.n)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


# Verified loads.


def load(sources: Sources, cut: Cut, verify: Verify, into: Literal["fresh", "given"]) -> float:
    """Load a part of the model, from the root to the last array."""
    root, path = sources.at("root"), sources.path
    given = None
    if into == "given":
        with reshard.open(root) as checkpoint:
            given = checkpoint.load(layout(cut, N_PARTS), PART)
        for array in given.values():
            array.view(np.uint16)[...] = 1
    else:
        with reshard.open(sources.small.at("root")) as checkpoint:  # starts the threads
            checkpoint.load()
    fresh.prepare(sources.files("root"), 0 if given else 2 * own_bytes(path, cut))
    started = time.perf_counter()
    with reshard.open(root) as checkpoint:
        found = checkpoint.load(layout(cut, N_PARTS), PART, verify=verify, out=given)
    seconds = time.perf_counter() - started
    expected = model.read(path)
    assert set(found) == set(expected)
    for key, array in expected.items():
        model.assert_equal(key, array[own_slice(array.shape, cut)], found[key])
    return seconds
