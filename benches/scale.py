"""Checkpoints of many ranks, many tensors and large files: opening, the coordinator of a save, many files, memory.

    python benches/scale.py [--dir DIR] [--rounds 3] [--ranks 256 1024] [--quick]

Every case is a process of its own; imports and a first use of each function are outside the clock. The loaded bytes are
compared outside the clock, too. README.md describes the cases.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import mmap
import multiprocessing
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import reshard
from reshard import opening
from reshard.checkpoint import Checkpoint
from reshard.commit import protocol
from reshard.commit.filesystem import MANIFEST_FILE
from reshard.commit.manifest import CHECKSUMS_FILE, CHUNK_BYTES
from reshard.commit.writer_mark import SPELT
from reshard.formats.checkpoint2 import save as save_of_checkpoint2
from reshard.formats.checkpoint2.iteration import Kept, write_descriptions
from reshard.formats.checkpoint2.names import METADATA_FILE, METADATA_TABLE_FILE
from reshard.formats.checkpoint2.planning import plan_iteration
from reshard.layout import ModelLayout
from reshard.ranks import messages, recurring
from reshard.ranks.collective import Collective
from reshard.ranks.group import SingleProcess
from reshard.storage.location import locate
from reshard.write.arrays import Fact, Facts
from reshard.write.rank_facts import RankFacts, plan_key
from reshard.write.replicas import Replicas
from reshard.write.shard_files import WrittenFile

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.formats.checkpoint2.iteration import IterationPlan

Figures = dict[str, float]

LARGE_TENSORS = 8  # beside a hole
HOLE_TENSOR_BYTES = 100_000_000
ROW = 16  # elements of a tensor that a rank holds
STATES = ("fp32", "exp_avg", "exp_avg_sq")
TP8 = {"mesh": {"tp": 8}, "rules": [{"match": "*", "cut": ["tp"]}]}
TP8_OF_LAYERS = {"mesh": {"tp": 8}, "rules": [{"match": "*", "cut": [None, "tp"]}]}


def key(number: int) -> str:
    """A name as long as those of models."""
    return f"model.layers.{number // 8}.block{number % 8}.weight"


def layout_of(n_ranks: int) -> dict[str, Any]:
    """Every tensor is divided among all ranks."""
    return {"mesh": {"tp": n_ranks}, "rules": [{"match": "*", "cut": ["tp"]}]}


def tensor(number: int, n_ranks: int, n_layers: int = 1) -> np.ndarray:
    """The content of a tensor; of several layers each rank has a row of each."""
    rows = np.arange(n_layers * n_ranks * ROW, dtype=np.float32).reshape(n_layers, n_ranks, ROW) + number
    return rows if n_layers > 1 else rows[0]


def provide(n_bytes: int) -> None:
    """Make the host provide memory, which is free afterwards; see `fresh.prepare`."""
    with mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for page in range(0, n_bytes, mmap.PAGESIZE):
            memory[page] = 1


def memory_mib(field: str) -> float:
    """A figure of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def write_tree(root: Path, n_ranks: int, n_tensors: int) -> None:
    """A tree of a file a rank."""
    source = root.with_suffix(".safetensors")
    reshard.save_file({key(i): tensor(i, n_ranks) for i in range(n_tensors)}, source)
    reshard.convert(source, root, layout=layout_of(n_ranks), commit={"durable": False})
    source.unlink()


def make_as_of_others(root: Path) -> None:
    """Leave of a tree what MindSpore Transformers writes: no manifest, no table, no mark in the shard files."""
    folder = next(root.glob("iteration_*"))
    for name in (MANIFEST_FILE, CHECKSUMS_FILE, METADATA_TABLE_FILE):
        (folder / name).unlink(missing_ok=True)
    for path in folder.glob("*.safetensors"):
        with path.open("r+b") as file:
            start = file.read(4096).index(SPELT)
            file.seek(start)
            file.write(SPELT.swapcase())


def write_dcp(root: Path, n_ranks: int, n_tensors: int, n_layers: int = 1) -> Figures:
    """What `torch.distributed.checkpoint` writes: `.metadata` is pickled by torch's own classes. A file a rank.

    Of several layers, each file has a part of each, as those of Megatron-Core.
    """
    import torch  # noqa: PLC0415
    from torch.distributed.checkpoint import metadata  # noqa: PLC0415
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: PLC0415

    root.mkdir()
    ones, layers = (1,) * (1 if n_layers == 1 else 2), [() if n_layers == 1 else (one,) for one in range(n_layers)]
    made = io.BytesIO()
    marked = torch.full((*ones, ROW), 7.0)
    torch.save(marked, made)
    item = bytearray(made.getvalue())  # of each tensor, with other content and checksum
    content = marked.numpy().tobytes()
    at = item.index(content)
    sums = [found.start() for found in re.finditer(re.escape(zlib.crc32(content).to_bytes(4, "little")), item)]
    tensors: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for i in range(n_tensors):
        chunks = [
            metadata.ChunkStorageMetadata(torch.Size((*layer, rank, 0)), torch.Size((*ones, ROW)))
            for layer in layers
            for rank in range(n_ranks)
        ]
        shape = torch.Size(tensor(i, n_ranks, n_layers).shape)
        properties = metadata.TensorProperties(dtype=torch.float32)
        tensors[key(i)] = metadata.TensorStorageMetadata(properties, shape, chunks)
    for rank in range(n_ranks):
        name = f"__{rank}_0.distcp"
        with (root / name).open("wb") as out:
            for i, layer in itertools.product(range(n_tensors), range(n_layers)):
                # Each rank sends its own names and offsets: equal ones are not the same objects.
                number = layer * n_ranks + rank
                index = metadata.MetadataIndex(key(i), torch.Size((*layers[layer], rank, 0)), number)
                places[index] = _StorageInfo(name, out.tell(), len(item))
                content = (np.arange(number * ROW, (number + 1) * ROW, dtype=np.float32) + i).tobytes()
                item[at : at + len(content)] = content
                for start in sums:
                    item[start : start + 4] = zlib.crc32(content).to_bytes(4, "little")
                out.write(item)
    described = metadata.Metadata(tensors, {name: (name,) for name in tensors}, places, metadata.StorageMeta())
    with (root / ".metadata").open("wb") as out:
        pickle.dump(described, out)
    return {"bytes of .metadata": float((root / ".metadata").stat().st_size)}


def state_of(number: int, slot: str, n_ranks: int) -> np.ndarray:
    """The content of a tensor of an optimizer."""
    return tensor(number, n_ranks) + np.float32(STATES.index(slot) / len(STATES))


def write_zero(root: Path, n_ranks: int, n_tensors: int, stage: int) -> Figures:
    """A save of ZeRO as DeepSpeed 0.19 writes it: fp32 weights and two states of Adam, divided between the ranks."""
    import torch  # noqa: PLC0415

    root.mkdir()
    shapes = {key(i): torch.Size((n_ranks, ROW)) for i in range(n_tensors)}
    model = {
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [shapes],
        "frozen_param_shapes": None,
        "shared_params": {},
        "frozen_param_fragments": None,
        "lr_scheduler": {"last_epoch": 4},
        "global_steps": 4,
        "skipped_steps": 0,
        "dp_world_size": n_ranks,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
    }
    for rank in range(n_ranks if stage == 3 else 1):
        weights: dict[str, Any] = {}
        for i, name in enumerate(shapes):
            whole = torch.from_numpy(state_of(i, STATES[0], n_ranks)).bfloat16()
            weights[name] = torch.empty(0, dtype=torch.bfloat16) if stage == 3 else whole
        name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
        torch.save({"module": weights, **model}, root / f"{name}_model_states.pt")
    lines = {slot: np.stack([state_of(i, slot, n_ranks) for i in range(n_tensors)]) for slot in STATES}
    for rank in range(n_ranks):
        held = {}
        for slot, line in lines.items():
            own = line[:, rank] if stage == 3 else line.reshape(n_ranks, -1)[rank]
            held[slot] = torch.from_numpy(own.reshape(-1).copy())
        weight = held.pop(STATES[0])
        options = [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0]}]
        inner = {"state": {0: {"step": torch.tensor(4.0), **held}}, "param_groups": options}
        zero: dict[str, Any] = {"zero_stage": stage, "partition_count": n_ranks if stage == 3 else [n_ranks]}
        names = ("fp32_flat_groups", "optimizer_state_dict")
        if stage != 3:
            names = ("single_partition_of_fp32_groups", "base_optimizer_state")
            zero["param_alignment_paddings"] = [[0] * n_tensors]
        zero |= dict(zip(names, ([weight], inner), strict=True))
        content = {"optimizer_state_dict": zero, "ds_config": {}, "ds_version": "0.19.8"}
        torch.save(content, root / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return {"MB": sum(path.stat().st_size for path in root.iterdir()) / 1e6}


def write_fsdp(root: Path, n_ranks: int, n_tensors: int, n_replicas: int) -> Figures:
    """The file of each rank with DTensors, as verl saves those of FSDP2, which torch makes; replicas are copies."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: PLC0415
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    root.mkdir()
    n_parts = n_ranks // n_replicas
    sizes = (n_replicas, n_parts) if n_replicas > 1 else (n_parts,)
    placements = [Replicate(), Shard(0)][-len(sizes) :]
    for rank in range(n_ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=n_ranks)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("ddp", "fsdp")[-len(sizes) :])
        state = {}
        for i in range(n_tensors):
            whole = tensor(i, n_parts)
            local = torch.from_numpy(whole[rank % n_parts][None].copy())
            state[key(i)] = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=torch.Size(whole.shape), stride=(ROW, 1)
            )
        torch.save(state, root / f"model_world_size_{n_ranks}_rank_{rank}.pt")
        dist.destroy_process_group()
    return {"MB": sum(path.stat().st_size for path in root.iterdir()) / 1e6}


def open_and_load_zero(root: Path, n_ranks: int, n_tensors: int) -> Figures:
    """Open a save of ZeRO, and load the slices of weights and states of one rank of eight."""
    figures, found = _open_and_load(root, TP8)
    for i, slot in itertools.product(range(n_tensors), STATES):
        assert np.array_equal(found[f"{key(i)}.{slot}"], state_of(i, slot, n_ranks)[n_ranks // 8 : n_ranks // 4])
    return figures


def open_and_load(root: Path, n_ranks: int, n_tensors: int, n_layers: int = 1) -> Figures:
    """Open a tree, and load the slices of one rank of eight."""
    figures, found = _open_and_load(root, TP8 if n_layers == 1 else TP8_OF_LAYERS)
    for i in range(n_tensors):
        assert np.array_equal(found[key(i)], tensor(i, n_ranks, n_layers)[..., n_ranks // 8 : n_ranks // 4, :])
    return figures


def _open_and_load(root: Path, layout: dict[str, Any]) -> tuple[Figures, dict[str, np.ndarray]]:
    warm = root.parent / "warm"
    if not warm.exists():
        reshard.save(warm, 1, {"w": np.zeros(8, np.float32)})
    with reshard.open(warm) as checkpoint:
        checkpoint.load(TP8, 1)
    before, start, used = memory_mib("VmHWM"), time.perf_counter(), time.process_time()
    with reshard.open(root) as checkpoint:
        opened = time.perf_counter()
        found = checkpoint.load(layout, 1)
    end, used = time.perf_counter(), time.process_time() - used
    peak = memory_mib("VmHWM") - before
    seconds = {"open": opened - start, "load": end - opened, "total": end - start, "of the processor": used}
    return {**seconds, "peak MiB": peak}, found


def write_large(root: Path, n_ranks: int, file_bytes: int) -> None:
    """An iteration of a large file a rank: small tensors, and one that consists of a hole."""
    layout = ModelLayout.from_mapping(layout_of(n_ranks))
    hole_bytes = file_bytes - LARGE_TENSORS * ROW * 4
    arrays = [Fact(key(i), "model", "F32", (1, ROW)) for i in range(LARGE_TENSORS)]
    arrays.append(Fact("hole", "model", "U8", (1, hole_bytes)))
    reports = [RankFacts("host", {}, Facts.of(arrays))] * n_ranks
    plan = plan_iteration(reports, layout, prefix=None, dedup=True, strict=False)
    attempt = protocol.begin(locate(root), 1, durable=False)
    header: dict[str, Any] = {}
    at = 0
    for name, _, dtype, shape, *_ in arrays:
        n_bytes = ROW * 4 if dtype == "F32" else hole_bytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + n_bytes]}
        at += n_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    table = len(text).to_bytes(8, "little") + text
    tensors = [tensor(i, n_ranks) for i in range(LARGE_TENSORS)]
    n_bytes = len(table) + file_bytes
    n_chunks = -(-n_bytes // CHUNK_BYTES)
    empty = bytes(CHUNK_BYTES)
    last = reshard._core.crc32c(empty[: n_bytes - (n_chunks - 1) * CHUNK_BYTES])
    rest = np.full(n_chunks - 1, reshard._core.crc32c(empty), "<u4")
    rest[-1] = last
    records = {}
    for file in plan.files:
        content = table + b"".join(one[file.rank].tobytes() for one in tensors)
        with (Path(str(attempt.staging)) / file.name).open("wb") as out:
            out.write(content)
            out.truncate(n_bytes)
        first = reshard._core.crc32c(content + empty[: CHUNK_BYTES - len(content)])
        checksums = first.to_bytes(4, "little") + rest.tobytes()
        written = WrittenFile(n_bytes, len(table), reshard._core.crc32c(table), checksums)
        records[file.name] = (written, file.rank)
    write_descriptions(plan, attempt.staging, mode=0o644)
    protocol.publish(attempt, protocol.seal(attempt, records, world_size=n_ranks))
    protocol.release(locate(root))


def load_of_large(root: Path, n_ranks: int, n_parts: int, is_first: int) -> Figures:
    """Open and load what one of `n_parts` ranks needs of the small tensors, alone or after rank 0 has chosen."""
    warm = root.parent / "warm"
    if not warm.exists():
        reshard.save(warm, 1, {"w": np.zeros(8, np.float32)})
    with reshard.open(warm) as checkpoint:
        checkpoint.load(TP8, 1)
    known = None
    if not is_first:
        with reshard.open(root) as checkpoint:
            # What rank 0 sends, in a process of its own, so that its memory is not counted.
            known = opening.chosen(checkpoint)
    figures: Figures = fresh(_load_of_large, root, n_ranks, n_parts, known)
    return figures


def _load_of_large(root: Path, n_ranks: int, n_parts: int, known: opening.Chosen | None) -> Figures:
    names = [key(i) for i in range(LARGE_TENSORS)]
    before, read, start = memory_mib("VmHWM"), bytes_read(), time.perf_counter()
    with reshard.open(root) if known is None else Checkpoint(opening.open_chosen(known)) as checkpoint:
        opened, read_open = time.perf_counter(), bytes_read()
        found = checkpoint.load(layout_of(n_parts), 1, keys=names)
    end = time.perf_counter()
    size = n_ranks // n_parts
    for i, name in enumerate(names):
        assert np.array_equal(found[name], tensor(i, n_ranks)[size : 2 * size])
    peak = memory_mib("VmHWM") - before
    read_all = bytes_read() - read
    return {"open": opened - start, "total": end - start, "peak MiB": peak,
            "read by open MB": (read_open - read) / 1e6, "read MB": read_all / 1e6}  # fmt: skip


def bytes_read() -> int:
    """Bytes that this process has read by system calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


def coordinate(root: Path, n_ranks: int, n_tensors: int) -> Figures:
    """What rank 0 does in a save by many ranks beyond bytes: decode the reports, plan, answer, describe."""
    own = RankFacts("host", {}, Facts.of(Fact(key(i), "model", "F32", (1, ROW)) for i in range(n_tensors)))
    text = json.dumps(messages.encode(own))
    layout = ModelLayout.from_mapping(layout_of(n_ranks))
    ranks = Collective(_Many(n_ranks), 1.0)
    folder = root.parent / "described"
    folder.mkdir()
    seconds: Figures = {}
    start = time.perf_counter()

    def lap(name: str) -> None:
        seconds[name] = time.perf_counter() - start - sum(seconds.values())

    reports = ranks.decoded(RankFacts, [json.loads(text)] * n_ranks)  # a group parses equal reports once
    lap("reports")
    plan_key(reports)
    lap("key of the plan")
    plan: IterationPlan = plan_iteration(reports, layout, prefix=None, dedup=True, strict=False)
    lap("plan")
    json.dumps(messages.encode(plan.files))
    lap("answer")
    write_descriptions(plan, locate(folder), mode=0o644)
    lap("metadata.json and its table")
    return {"total": sum(seconds.values()), **seconds}


def pipeline(n_ranks: int, n_tensors: int) -> tuple[list[RankFacts], ModelLayout]:
    """The 16 stages of a pipeline, each of which holds so many tensors, divided in eight; eight ranks are on a host."""
    shape = {"mesh": {"pp": 16, "dp": n_ranks // 128, "tp": 8}}
    rules = [{"match": "*", "cut": ["tp"]}]
    place = [{"match": f"stage{i}.*", "axis": "pp", "at": i} for i in range(16)]
    stages = [
        Facts.of(Fact(f"stage{stage}.{key(i)}", "model", "F32", (1, ROW)) for i in range(n_tensors))
        for stage in range(16)
    ]
    reports = [RankFacts(f"host{rank // 8}", {}, stages[rank * 16 // n_ranks]) for rank in range(n_ranks)]
    return reports, ModelLayout.from_mapping(shape | {"rules": rules, "place": place})


def files_of_saves(root: Path, n_ranks: int, n_tensors: int, is_divided_by_all: int) -> Figures:
    """What rank 0 writes beside its shards in three saves of a pipeline, and its seconds of the processor.

    Or of tensors that all ranks divide. A shard file has 256 MiB, a hole.
    """
    if is_divided_by_all:
        own = RankFacts("host", {}, Facts.of(Fact(key(i), "model", "F32", (1, ROW)) for i in range(n_tensors)))
        reports, layout = [own] * n_ranks, ModelLayout.from_mapping(layout_of(n_ranks))
    else:
        reports, layout = pipeline(n_ranks, n_tensors)
    plan = plan_iteration(reports, layout, prefix=None, dedup=True, strict=False)
    kept, figures = Kept(), Figures()
    n_bytes = 256 << 20
    for number, name in enumerate(("first", "second", "third"), 1):
        attempt = protocol.begin(locate(root), number, durable=False)
        records = {}
        for file in plan.files:
            with (Path(str(attempt.staging)) / file.name).open("wb") as out:
                out.truncate(n_bytes)
            checksums = os.urandom(n_bytes // CHUNK_BYTES * 4)
            records[file.name] = WrittenFile(n_bytes, 4096, 0, checksums), file.rank
        start = time.process_time()
        described = write_descriptions(plan, attempt.staging, mode=0o644, kept=kept)
        written = time.process_time()
        manifest = protocol.seal(attempt, records, world_size=n_ranks, known=described)
        figures |= {f"{name}: described s": written - start, f"{name}: sealed s": time.process_time() - written}
        protocol.publish(attempt, manifest)
    sizes = {path.name: path.stat().st_size for path in Path(str(attempt.folder)).iterdir()}
    for file_name in (METADATA_FILE, METADATA_TABLE_FILE, CHECKSUMS_FILE, MANIFEST_FILE):
        figures[f"MB of {file_name}"] = sizes.get(file_name, 0) / 1e6  # a small one has no table
    protocol.release(locate(root))
    shutil.rmtree(root)
    return figures


def reports_of_saves(root: Path, n_ranks: int, n_tensors: int) -> Figures:  # noqa: ARG001
    """What rank 0 sends and gets when ranks of a pipeline report what they hold, in three saves, and its seconds."""
    reports, layout = pipeline(n_ranks, n_tensors)
    orders = None

    def plan(found: list[RankFacts]) -> Any:
        nonlocal orders
        made_of = plan_key(found)
        if orders is None or orders[0] != made_of:
            made = plan_iteration(found, layout, prefix=None, dedup=True, strict=False)
            orders = made_of, save_of_checkpoint2._Orders(made.files, Replicas.of(made.holders, found))
        return orders[1]

    figures: Figures = {}
    for name in ("first", "second", "third"):
        group, start = _Simulated(reports), time.process_time()
        recurring.combine(Collective(group, 1.0), reports[0], plan, RankFacts, save_of_checkpoint2._Orders)
        figures[f"{name} s"] = time.process_time() - start - group.seconds
        figures |= {f"{name} MB in": group.n_in / 1e6, f"{name} MB out": group.n_out / 1e6}
    return figures


class _Simulated(SingleProcess):
    """Rank 0, and what the others would send: as `recurring` makes it of their reports."""

    def __init__(self, reports: list[RankFacts]) -> None:
        self.world_size, self._reports = len(reports), reports
        self._asked: dict[str, int] = {}
        self.n_in = self.n_out = 0
        self.seconds = 0.0  # of the other ranks

    def gather(self, value: Any, *, root: int = 0, timeout: float) -> list[Any]:  # noqa: ARG002
        start = time.process_time()
        texts = [json.dumps(value)]
        for rank, report in enumerate(self._reports[1:], 1):
            parts: messages.Parts = {}
            own = messages.encode(report, parts)
            if self._asked:
                sent: Any = {digest: parts[digest]() for digest, asked in self._asked.items() if asked == rank}
            else:
                sent = value["value"] | {"value": own, "parts": list(parts)}
            texts.append(json.dumps({"value": sent}))
        self.n_in += sum(map(len, texts))
        self.seconds += time.process_time() - start
        return [json.loads(text) for text in texts]

    def broadcast(self, value: Any, *, root: int = 0, timeout: float) -> Any:  # noqa: ARG002
        text = json.dumps(value)
        self.n_out += len(text)
        told = json.loads(text)
        self._asked = told["value"]["asked"]
        return told


class _Many(SingleProcess):
    """Rank 0 of many."""

    def __init__(self, n_ranks: int) -> None:
        super().__init__()
        self.world_size = n_ranks


def small_tensors(root: Path, n_ranks: int, n_tensors: int) -> Figures:  # noqa: ARG001
    """Save, load and convert tensors of 4 KiB: microseconds a tensor, each after what its bytes alone take."""
    warm = root.parent / "warm"
    reshard.save(warm, 1, {"w": np.zeros(8, np.float32)})
    with reshard.open(warm) as checkpoint:
        checkpoint.load()
    reshard.convert(warm, warm.with_suffix(".hf"), to="huggingface")
    data = np.random.default_rng(0).integers(0, 255, n_tensors * 4096, np.uint8).reshape(n_tensors, 4096)
    arrays = {key(i): data[i].view(np.float32) for i in range(n_tensors)}
    found: Figures = {}

    def case(name: str, function: Callable[[], Any]) -> Any:
        os.sync()  # else the disk would still write what the cases before have left to it
        provide(4 * data.nbytes)  # else the case that follows a freed array would find faster memory
        start = time.perf_counter()
        result = function()
        found[name] = (time.perf_counter() - start) / n_tensors * 1e6
        return result

    case("write of the bytes", lambda: data.tofile(root.with_suffix(".raw")))
    case("save", lambda: reshard.save(root, 1, arrays, commit={"durable": False}))
    with reshard.open(root) as checkpoint:
        case("copy of the bytes to new memory", data.copy)
        loaded = case("load", checkpoint.load)
    assert all(loaded[name].tobytes() == array.tobytes() for name, array in arrays.items())
    target = root.with_suffix(".hf")
    case("copy of the file", lambda: shutil.copyfile(root.with_suffix(".raw"), root.with_suffix(".copy")))
    case("convert", lambda: reshard.convert(root, target, to="huggingface", commit={"durable": False}))
    return found


def rank_files(root: Path, n_ranks: int, n_tensors: int) -> Figures:
    """Divide a model into a file a rank, and copy the files: microseconds a file.

    Nothing is removed before: ext4 does not reuse inodes for some minutes, and searches past them.
    """
    source = root.with_suffix(".safetensors")
    reshard.save_file({key(i): tensor(i, n_ranks) for i in range(n_tensors)}, source)
    start = time.perf_counter()
    reshard.convert(source, root, layout=layout_of(n_ranks), commit={"durable": False})
    converted = time.perf_counter()
    folder = next(root.glob("iteration_*"))
    subprocess.run(["cp", "-r", folder, root.with_suffix(".copy")], check=True)
    copied = time.perf_counter()
    with reshard.open(root) as checkpoint:
        assert all(np.array_equal(checkpoint.read(key(i)), tensor(i, n_ranks)) for i in range(n_tensors))
    taken = {"convert": converted - start, "cp": copied - converted}
    return {name: seconds / n_ranks * 1e6 for name, seconds in taken.items()}


def write_torch(root: Path, n_ranks: int, n_tensors: int) -> Figures:
    """A file of `torch.save`."""
    import torch  # noqa: PLC0415

    torch.save({key(i): torch.from_numpy(tensor(i, n_ranks)) for i in range(n_tensors)}, root.with_suffix(".pt"))
    return {"MB": root.with_suffix(".pt").stat().st_size / 1e6}


def inspect_and_diff(root: Path) -> Figures:
    """Seconds of the processor, and the peak of memory, of the commands `inspect` and `diff`, of a tree and itself."""
    figures: Figures = {}
    for command in (["inspect", str(root)], ["diff", str(root), str(root)]):
        with subprocess.Popen([sys.executable, "-m", "reshard", *command], stdout=subprocess.DEVNULL) as process:
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        figures[f"{command[0]} s"] = used.ru_utime + used.ru_stime
        figures[f"{command[0]} MiB"] = used.ru_maxrss / 1024
    return figures


def convert_hole(root: Path, n_ranks: int, file_bytes: int) -> Figures:
    """Divide a file that consists of a hole among ranks, whose files hold the zeros; the peak of private memory."""
    source = root.with_suffix(".safetensors")
    size = min(file_bytes, HOLE_TENSOR_BYTES)
    starts = range(0, file_bytes - size + 1, size)
    header = {
        key(i): {"dtype": "U8", "shape": [n_ranks, size // n_ranks], "data_offsets": [at, at + size]}
        for i, at in enumerate(starts)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with source.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + len(starts) * size)
    ended, peaks = threading.Event(), [0.0]

    def watch() -> None:
        while not ended.wait(0.002):
            peaks.append(memory_mib("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    reshard.convert(source, root, layout=layout_of(n_ranks), commit={"durable": False})
    taken = time.perf_counter() - start
    ended.set()
    watcher.join()
    shutil.rmtree(root)
    return {"convert": taken, "peak MiB": max(peaks)}


def _answer(function: Callable[..., Figures], arguments: tuple[Any, ...], pipe: Any) -> None:
    pipe.send(function(*arguments))


def fresh(function: Callable[..., Figures], *arguments: Any) -> Figures:
    """Run a function in a forked process."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(function, arguments, sender))
    process.start()
    sender.close()
    try:
        found: Figures = receiver.recv()
    except EOFError:
        sys.exit("a case failed")
    process.join()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="folder for the files")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="*", default=[256, 1024], help="none: without these cases")
    parser.add_argument("--tensors", type=int, default=1024)
    parser.add_argument("--many", type=int, default=200_000, help="tensors that are listed and compared; 0: none")
    parser.add_argument("--small", type=int, default=100_000, help="tensors of 4 KiB")
    parser.add_argument("--files", type=int, default=16_384, help="files of ranks, of 8 tensors each")
    parser.add_argument("--file-gb", type=float, default=10, help="of files that consist of a hole")
    parser.add_argument(
        "--hole-gb", type=float, nargs="*", default=[1, 4], help="of files that are converted; none: without this case"
    )
    parser.add_argument("--quick", action="store_true", help="a test of the script, not a measurement")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.ranks, options.tensors, options.small, options.files = 1, [8, 128], 16, 100, 16
        options.file_gb, options.hole_gb, options.many = 0.002, [0.01], 50
    if options.dir is not None:
        options.dir.mkdir(parents=True, exist_ok=True)
    print("| case | rounds | figures: least; median |\n|---|---:|---|")

    def report(name: str, function: Callable[..., Figures], at: Path | None, *sizes: int) -> None:
        rounds = [fresh(function, at or new(number), *sizes) for number in range(options.rounds)]
        found = {field: [one[field] for one in rounds] for field in rounds[0]}
        text = ", ".join(f"{field} {min(of):.3g}; {statistics.median(of):.3g}" for field, of in found.items())
        print(f"| {name} | {options.rounds} | {text} |", flush=True)

    with tempfile.TemporaryDirectory(dir=options.dir) as made:
        folder = Path(made)

        def new(number: int) -> Path:
            path = folder / f"{time.monotonic_ns()}-{number}"
            path.mkdir()
            return path / "files"

        # First: this process grows, and those that are forked from it share its memory.
        for gb in options.hole_gb:
            report(f"convert a hole of {gb:g} GB to 2 ranks (s)", convert_hole, None, 2, int(gb * 1e9))
        for n_ranks in options.ranks:
            sizes, root = (n_ranks, options.tensors), folder / f"ranks{n_ranks}"
            write_tree(root, *sizes)
            shape = f"{n_ranks} ranks x {options.tensors} tensors"
            report(f"open and load a rank of TP8, {shape} (s)", open_and_load, root, *sizes)
            report(f"coordinator of a save, {shape} (s)", coordinate, None, *sizes)
            if n_ranks % 128 == 0:
                report(f"reports of three saves, {shape} of each rank", reports_of_saves, None, *sizes)
                report(f"files of three saves, {shape} of each rank", files_of_saves, None, *sizes, 0)
            report(f"files of three saves, {shape}", files_of_saves, None, *sizes, 1)
            make_as_of_others(root)
            report(f"the same tree without manifest, {shape} (s)", open_and_load, root, *sizes)
            for n_layers in (1, 8):
                of_torch, n_tensors = folder / f"dcp{n_ranks}_{n_layers}", max(1, options.tensors // 2 // n_layers)
                fresh(write_dcp, of_torch, n_ranks, n_tensors, n_layers)
                shape = f"{n_ranks} ranks x {n_tensors} tensors, {n_layers} parts of each"
                name = f"a folder of torch.distributed.checkpoint, {shape} (s)"
                report(name, open_and_load, of_torch, n_ranks, n_tensors, n_layers)
            for stage in (2, 3):
                of_zero = folder / f"zero{n_ranks}_{stage}"
                fresh(write_zero, of_zero, n_ranks, options.tensors, stage)
                shape = f"{n_ranks} ranks x {options.tensors} tensors, two states of each"
                report(f"ZeRO-{stage}, {shape} (s)", open_and_load_zero, of_zero, n_ranks, options.tensors)
                shutil.rmtree(of_zero)
            for n_replicas in (1, n_ranks // 32 or 1):
                of_fsdp, n_parts = folder / f"fsdp{n_ranks}_{n_replicas}", n_ranks // n_replicas
                fresh(write_fsdp, of_fsdp, n_ranks, options.tensors, n_replicas)
                shape = f"{n_ranks} ranks x {options.tensors} tensors, {n_replicas} copies"
                report(f"files of FSDP, {shape} (s)", open_and_load, of_fsdp, n_parts, options.tensors)
                shutil.rmtree(of_fsdp)
            large = folder / f"large{n_ranks}"
            write_large(large, n_ranks, int(options.file_gb * 1e9))
            for n_parts, is_first in ((8, 1), (n_ranks, 1), (8, 0), (n_ranks, 0)):
                shape = f"{n_ranks // n_parts} of {n_ranks} files of {options.file_gb:g} GB"
                name = f"open and load from {shape}{'' if is_first else ', after rank 0'} (s)"
                report(name, load_of_large, large, n_ranks, n_parts, is_first)
        if options.many:
            of_torch, of_dcp, of_ranks = (folder / name for name in ("many.pt", "many_dcp", "many_ranks"))
            fresh(write_torch, of_torch, 1, options.many)
            fresh(write_dcp, of_dcp, 1, options.many)
            write_tree(of_ranks, 16, options.many)
            make_as_of_others(of_ranks)
            for root in (of_torch, of_dcp, of_ranks):
                report(f"inspect and diff, {options.many} tensors, {root.name}", inspect_and_diff, root)
        report(f"{options.files} files of 8 tensors out of one (us each)", rank_files, None, options.files, 8)
        report(f"{options.small} tensors of 4 KiB (us each)", small_tensors, None, 1, options.small)


if __name__ == "__main__":
    main()
