"""`dcp.save` by `reshard.torch.dcp.Writer` against torch's `FileSystemWriter`, which syncs its files too.

    python benches/dcp_plugin.py [--gigabytes 1] [--rounds 5] [--folder DIR] [--ranks 1 2]

Every figure is one save in new processes, the two writers in turn; the median of the rounds is printed. Each process
saves a small state first, so that imports are not measured. The ranks hold equal parts (DTensor, `Shard(0)`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from reshard.torch.dcp import Reader, Writer

WRITERS = ("reshard", "torch")


def save_once(kind: str, folder: str, n_bytes: int) -> None:
    """One rank: print the seconds of a save."""
    warnings.simplefilter("ignore")
    n_ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (n_ranks,))

    def state_of(n_bytes: int, value: float) -> dict[str, object]:
        n_rows = max(n_bytes // 64 // 4096, n_ranks)
        parts = {f"layers.{i}.w": torch.full((n_rows // n_ranks, 1024), value + i + rank) for i in range(64)}
        return {"model": {k: DTensor.from_local(v, mesh, [Shard(0)], run_check=False) for k, v in parts.items()}}

    def writer(name: str) -> dcp.StorageWriter:
        path = f"{folder}/{name}"
        return Writer(path) if kind == "reshard" else dcp.FileSystemWriter(path, sync_files=True)

    dcp.save(state_of(1 << 20, 0.0), storage_writer=writer("warm"))
    state = state_of(n_bytes, 1.0)
    dist.barrier()
    start = time.perf_counter()
    dcp.save(state, storage_writer=writer("step-1"))
    seconds = time.perf_counter() - start
    target = state_of(n_bytes, 0.0)
    reader = Reader(f"{folder}/step-1") if kind == "reshard" else dcp.FileSystemReader(f"{folder}/step-1")
    dist.barrier()
    start = time.perf_counter()
    dcp.load(target, storage_reader=reader)
    loading = time.perf_counter() - start
    assert all(torch.equal(one.to_local(), target["model"][k].to_local()) for k, one in state["model"].items())  # type: ignore[attr-defined,index]
    if rank == 0:
        print(seconds, loading)
    dist.destroy_process_group()


def run(kind: str, folder: Path, n_bytes: int, n_ranks: int) -> tuple[float, float]:
    """A save in new processes; the seconds of the save and of the load after it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    common = {"WORLD_SIZE": str(n_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = [sys.executable, __file__, "--one", kind, str(folder), str(n_bytes)]
    os.sync()
    ranks = [
        subprocess.Popen(words, env={**os.environ, **common, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(n_ranks)
    ]
    said = [rank.communicate()[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks)
    saving, loading = map(float, said[0].split())
    shutil.rmtree(folder)
    return saving, loading


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("bench_dcp"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--one", nargs=3)
    args = parser.parse_args()
    if args.one:
        save_once(args.one[0], args.one[1], int(args.one[2]))
        return
    n_bytes = int(args.gigabytes * 1e9)
    for n_ranks in args.ranks:
        seconds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in WRITERS}
        for _ in range(args.rounds):
            for kind in WRITERS:
                seconds[kind].append(run(kind, args.folder, n_bytes, n_ranks))
        medians = {
            kind: [statistics.median(one) for one in zip(*of_kind, strict=True)] for kind, of_kind in seconds.items()
        }
        load = os.getloadavg()
        print(
            f"{n_ranks} ranks, {n_bytes / 1e9:g} GB, {args.rounds} rounds, load {load[0]:.1f}, {os.cpu_count()} cores"
        )
        for i, what in enumerate(("save", "load")):
            ours, theirs = medians["reshard"][i], medians["torch"][i]
            print(f"  {what}: reshard {ours:.2f} s, torch {theirs:.2f} s: {theirs / ours:.2f} x")
        for kind in WRITERS:
            print(f"  {kind}: {', '.join(f'{save:.2f}/{load:.2f}' for save, load in seconds[kind])}")


if __name__ == "__main__":
    main()
