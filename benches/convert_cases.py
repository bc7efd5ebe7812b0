"""What `convert.py` times: merging, splitting and resharding files, by reshard and others, and plain copies.

Results are checked. A case begins when its sources are in the page cache, and ends when the last file is complete;
if durable, when it is on the disk.
"""

from __future__ import annotations

import concurrent.futures
import mmap
import os
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

import reshard.verbs.convert
from benches import fresh, model
from benches.table import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benches.sources import Form, Sources

Task = Literal["merge", "split", "tp4 to tp2"]
FORMS: dict[Task, Form] = {"merge": "tree", "split": "hf", "tp4 to tp2": "tree"}
N_THREADS = len(os.sched_getaffinity(0))

_PIECE_BYTES = 4 << 20
_IN_FLIGHT = 8
_MINDSPORE = """
import sys, time, mindspore
started = time.perf_counter()
mindspore.unified_safetensors(*sys.argv[1:4], merge_with_redundancy=True, max_process_num=int(sys.argv[4]))
print("SECONDS", time.perf_counter() - started)
"""


def reshard_(sources: Sources, task: Task, *, durable: bool) -> float:
    """By `convert`."""
    layout = {"merge": None, "split": model.LAYOUT, "tp4 to tp2": model.layout(2)}[task]

    def run(at: Sources = sources) -> None:
        source, options = at.at(FORMS[task]), {} if layout is None else {"layout": layout}
        reshard.verbs.convert.convert(source, at.target, commit={"durable": durable}, **options)

    run(sources.small)  # imports what is imported late
    remove(sources.small.target)
    return _time(sources, FORMS[task], run, _CHECKS[task])


def safetensors_(sources: Sources, task: Task) -> float:
    """By `load_file` and `save_file`, as a script does it: `torch.cat` merges, `chunk` splits."""
    sources.target.mkdir()

    def merged() -> dict[str, torch.Tensor]:
        parts = [safetensors.torch.load_file(path) for path in sources.shards("tree")]
        found: dict[str, torch.Tensor] = {}
        for key in dict.fromkeys(key for part in parts for key in part):
            dim = model.cut_dim(key)
            own = [part[key] for part in parts if key in part]
            found[key] = own[0] if dim is None else torch.cat(own, dim)
        return found

    def split(tensors: dict[str, torch.Tensor], n: int) -> None:
        for rank in range(n):
            own = {
                key: tensor[model.own_slice(key, tuple(tensor.shape), rank, n)].contiguous()
                for key, tensor in tensors.items()
                if rank == 0 or model.cut_dim(key) is not None
            }
            safetensors.torch.save_file(own, sources.target / f"rank-{rank}.safetensors")

    def run() -> None:
        if task == "merge":
            safetensors.torch.save_file(merged(), sources.target / "model.safetensors")
        elif task == "split":
            split(safetensors.torch.load_file(sources.path), model.N_RANKS)
        else:
            split(merged(), 2)

    return _time(sources, FORMS[task], run, _CHECKS[task])


def numpy_(sources: Sources, task: Task) -> float:
    """From `np.memmap` by `os.pwrite`, tensor by tensor, on as many threads as processors."""
    sources.target.mkdir()

    def write(path: Path, pieces: dict[str, Callable[[], np.ndarray]], shapes: dict[str, tuple[int, ...]]) -> list[Any]:
        header, offsets = model.header(shapes)
        path.write_bytes(header)
        return [(path, offsets[key], piece) for key, piece in pieces.items()]

    def put(job: tuple[Path, int, Callable[[], np.ndarray]]) -> None:
        path, at, piece = job
        content = memoryview(piece()).cast("B")
        descriptor = os.open(path, os.O_WRONLY)
        done = 0
        while done < len(content):
            done += os.pwrite(descriptor, content[done:], at + done)
        os.close(descriptor)

    def run() -> None:
        if task == "merge":
            parts = [model.read(path) for path in sources.shards("tree")]
            whole: dict[str, Callable[[], np.ndarray]] = {}
            shapes = {}
            for key in dict.fromkeys(key for part in parts for key in part):
                own, dim = [part[key] for part in parts if key in part], model.cut_dim(key)
                shape = list(own[0].shape)
                if dim is not None:
                    shape[dim] *= len(own)
                shapes[key] = tuple(shape)
                whole[key] = lambda own=own, dim=dim: own[0] if dim is None else np.concatenate(own, dim)
            jobs = write(sources.target / "model.safetensors", whole, shapes)
        else:
            jobs = []
            for rank in range(model.N_RANKS):
                own = {
                    key: array[model.own_slice(key, array.shape, rank)]
                    for key, array in model.read(sources.path).items()
                    if rank == 0 or model.cut_dim(key) is not None
                }
                pieces = {key: lambda array=array: np.ascontiguousarray(array) for key, array in own.items()}
                path = sources.target / f"rank-{rank}.safetensors"
                jobs += write(path, pieces, {key: array.shape for key, array in own.items()})
        with concurrent.futures.ThreadPoolExecutor(N_THREADS) as pool:
            list(pool.map(put, jobs))

    return _time(sources, FORMS[task], run, _CHECKS[task])


def dcp_merge(sources: Sources) -> float:
    """By `consolidate_safetensors_files`, from files that `HuggingFaceStorageWriter` has written."""
    sources.target.mkdir()
    keys = dict.fromkeys(model.read(sources.path), 1)

    def run() -> None:
        consolidate_safetensors_files(str(sources.at("dcp_tree")), str(sources.target), keys, num_threads=N_THREADS)

    return _time(sources, "dcp_tree", run, _check_merged)


def mindspore_merge(sources: Sources) -> float:
    """By `unified_safetensors`, from rank folders with a strategy, in an interpreter that has MindSpore."""
    if mindspore_version(sources.mindspore) is None:
        raise Unavailable("mindspore is not installed (--mindspore names another interpreter)")
    folder = sources.at("rank_folders")
    strategy = folder / "strategy" / "ckpt_strategy_rank_0.ckpt"
    fresh.prepare(sources.files("rank_folders"), 2 * sources.path.stat().st_size)
    done = subprocess.run(
        [sources.mindspore, "-c", _MINDSPORE, folder, strategy, sources.target, str(N_THREADS)],
        check=True,
        capture_output=True,
        text=True,
    )
    _check_merged(sources)
    return float(next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("SECONDS")))


def mindspore_version(python: str) -> str | None:
    """The version of MindSpore in the environment of an interpreter, which does not import it."""
    code = "import importlib.metadata as m; print(m.version('mindspore'))"
    done = subprocess.run([python, "-c", code], check=False, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def cp(sources: Sources, task: Task, *, durable: bool) -> float:
    """Copy the source with cp, without reflinks; durable: its file system is synced."""

    def run() -> None:
        subprocess.run(["cp", "-r", "--reflink=never", sources.at(FORMS[task]), sources.target], check=True)
        if durable:
            subprocess.run(["sync", "-f", sources.target], check=True)

    return _time(sources, FORMS[task], run, lambda sources: _check_copy(sources, task))


def copy_parallel(sources: Sources, task: Task, how: Literal["buffered", "direct"]) -> float:
    """Read each file from the page cache and write it, in pieces of 4 MiB, several in flight.

    Args:
        sources: the model.
        task: whose source is copied.
        how: `buffered` writes to the page cache; `direct` past it, and then the files are synced.
    """
    sources.target.mkdir()
    memories = [fresh.anonymous(_PIECE_BYTES, touch=True) for _ in range(_IN_FLIGHT)]

    def copy(job: tuple[int, int, int]) -> None:
        source, target, at = job
        memory = memories.pop()
        n = os.preadv(source, [memory], at)
        if how == "direct":
            n = -(-n // mmap.PAGESIZE) * mmap.PAGESIZE
        os.pwrite(target, memory[:n], at)
        memories.append(memory)

    def run() -> None:
        jobs, opened, sizes = [], [], {}
        for path in sources.shards(FORMS[task]):
            source = os.open(path, os.O_RDONLY)
            direct = os.O_DIRECT if how == "direct" else 0
            target = os.open(sources.target / path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | direct, 0o640)
            n = sizes[target] = os.fstat(source).st_size
            if how == "direct":
                os.posix_fallocate(target, 0, n)
            opened += [source, target]
            jobs += [(source, target, at) for at in range(0, n, _PIECE_BYTES)]
        with concurrent.futures.ThreadPoolExecutor(_IN_FLIGHT if how == "direct" else N_THREADS) as pool:
            list(pool.map(copy, jobs))
        for target, n in sizes.items():
            if how == "direct":
                os.ftruncate(target, n)
                os.fsync(target)
        for descriptor in opened:
            os.close(descriptor)

    return _time(sources, FORMS[task], run, lambda sources: _check_copy(sources, task))


def remove(target: Path) -> None:
    """Delete what a case wrote, and sync the file system."""
    if not target.exists():
        return
    shutil.rmtree(target)
    subprocess.run(["sync", "-f", target.parent], check=True)


def _time(sources: Sources, form: Form, run: Callable[[], None], check: Callable[[Sources], None]) -> float:
    fresh.prepare(sources.files(form), 2 * sources.path.stat().st_size)
    started = time.perf_counter()
    run()
    seconds = time.perf_counter() - started
    check(sources)
    return seconds


def _check_merged(sources: Sources) -> None:
    (file,) = sources.target.rglob("*.safetensors")
    model.check_whole(sources.path, model.read(file))


def _check_split(sources: Sources) -> None:
    model.check_split(sources.path, sorted(sources.target.rglob("*.safetensors")))


def _check_tp2(sources: Sources) -> None:
    model.check_split(sources.path, sorted(sources.target.rglob("*.safetensors")), 2)


def _check_copy(sources: Sources, task: Task) -> None:
    copies = {path.name: path for path in sources.target.rglob("*") if path.is_file()}
    for path in sources.shards(FORMS[task]):
        assert np.array_equal(np.memmap(path, np.uint8, "r"), np.memmap(copies[path.name], np.uint8, "r")), path


_CHECKS: dict[Task, Callable[[Sources], None]] = {
    "merge": _check_merged,
    "split": _check_split,
    "tp4 to tp2": _check_tp2,
}
