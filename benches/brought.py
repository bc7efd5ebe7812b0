"""Conversions of files that people bring to Hugging Face, beside what they run today: time, and the peak of memory.

    python benches/brought.py [--dir DIR] [--size-gb 3] [--rounds 2]

Each makes a model of this size in bf16: of shards of two FSDP ranks in fp32, of block-scaled FP8, and of a GGUF file
of Q4_K. Every run is a process of its own, with its imports outside of the clock. The last tensor is compared with that
of the other program, bit for bit. README.md describes the cases.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROWS, COLUMNS = 4096, 8192
SAMPLE_SECONDS = 0.002

# Programs of a new process: `SOURCE` and `TARGET` are paths. What is before the mark is outside of the clock.
OURS = """
from reshard.verbs.convert import convert
#
convert(SOURCE, TARGET, to="huggingface", dtype="bfloat16")
"""
THEIRS = {
    # As the merger of verl: every rank is loaded, and the shards of a tensor are joined in bf16.
    "fsdp": """
import torch, torch.distributed.tensor, pathlib
from safetensors.torch import save_file
#
ranks = [torch.load(path, weights_only=False, mmap=True) for path in sorted(pathlib.Path(SOURCE).glob("*.pt"))]
state = {key: torch.cat([one[key]._local_tensor.bfloat16() for one in ranks]) for key in ranks[0]}
pathlib.Path(TARGET).mkdir()
save_file(state, TARGET + "/model.safetensors")
""",
    # As `fp8_cast_bf16.py` of DeepSeek, with the function of transformers for processors.
    "fp8": """
import torch, pathlib
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
#
state, of = {}, Fp8Dequantize(None)
with safe_open(SOURCE + "/model.safetensors", "pt") as file:
    for key in file.keys():
        if key.endswith(".weight"):
            weight, scale = file.get_tensor(key), file.get_tensor(key + "_scale_inv")
            state[key] = of._dequantize_one(weight, scale, torch.bfloat16)
pathlib.Path(TARGET).mkdir()
save_file(state, TARGET + "/model.safetensors")
""",
    "gguf": """
import gguf, torch, pathlib
from safetensors.torch import save_file
#
state = {}
for tensor in gguf.GGUFReader(SOURCE).tensors:
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    state[tensor.name] = torch.from_numpy(values).bfloat16()
pathlib.Path(TARGET).mkdir()
save_file(state, TARGET + "/model.safetensors")
""",
}
_TITLES = {"fsdp": "FSDP ranks (fp32)", "fp8": "block FP8", "gguf": "GGUF Q4_K"}
_OTHERS = {"fsdp": "torch.load, cat", "fp8": "transformers", "gguf": "gguf"}


def make(kind: str, folder: Path, n: int) -> Path:
    """Write a source with so many tensors."""
    rng = np.random.default_rng(0)
    names = [f"model.layers.{i}.weight" for i in range(n)]
    if kind == "fsdp":
        return _ranks(folder / "ranks", names)
    if kind == "fp8":
        import ml_dtypes  # noqa: PLC0415

        import reshard  # noqa: PLC0415

        arrays = {}
        for name in names:
            codes = rng.integers(0, 120, (ROWS, COLUMNS), np.uint8)
            arrays[name] = codes.view(ml_dtypes.float8_e4m3fn)
            arrays[f"{name}_scale_inv"] = rng.uniform(0.01, 1, (ROWS // 128, COLUMNS // 128)).astype(np.float32)
        (folder / "fp8").mkdir()
        reshard.save_file(arrays, folder / "fp8" / "model.safetensors")
        return folder / "fp8"
    import gguf  # noqa: PLC0415

    writer = gguf.GGUFWriter(str(folder / "m.gguf"), "other")
    for name in names:
        blocks = rng.integers(0, 256, (ROWS, COLUMNS // 256, 144), np.uint8)
        blocks[..., 1] = blocks[..., 3] = 0x2C  # numbers near 0.06
        writer.add_tensor(name, blocks.reshape(ROWS, -1), raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "m.gguf"


def _ranks(folder: Path, names: list[str]) -> Path:
    """The files of two ranks, written by torch in one process with its fake process group."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.tensor import DTensor, Shard  # noqa: PLC0415
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    folder.mkdir()
    for rank in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(rank)
        state = {
            name: DTensor.from_local(torch.randn(ROWS // 2, COLUMNS), mesh, [Shard(0)], run_check=False)
            for name in names
        }
        torch.save(state, folder / f"model_world_size_2_rank_{rank}.pt")
        dist.destroy_process_group()
    return folder


def run(program: str, source: Path, target: Path) -> tuple[float, float]:
    """Seconds of a program, and the peak of its private memory in bytes, in a new process."""
    before, _, timed = program.partition("\n#\n")
    code = (
        f"import time\nSOURCE, TARGET = {str(source)!r}, {str(target)!r}\n{before}\nstarted = time.perf_counter()\n"
        f"{timed}\nprint('SECONDS', time.perf_counter() - started)"
    )
    shutil.rmtree(target, ignore_errors=True)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    status, peak = Path(f"/proc/{process.pid}/status"), 0
    while process.poll() is None:
        lines = status.read_text().splitlines()
        peak = max([peak, *(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))])
        time.sleep(SAMPLE_SECONDS)
    out, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(errors)
    return float(out.rpartition("SECONDS")[2]), float(peak)


def last_tensor(folder: Path) -> tuple[str, bytes]:
    """Name and bytes of the last tensor of a model."""
    import reshard  # noqa: PLC0415

    with reshard.open(folder) as checkpoint:
        key = max(checkpoint)
        return key, checkpoint.read(key).tobytes()


def main() -> None:
    """Parse the arguments, measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--dir", type=Path, help="where to put the files, 3 x the size")
    parser.add_argument("--size-gb", type=float, default=3, help="size of the model in bf16, in 10^9 bytes")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("kind", nargs="*", help=f"default: all. {', '.join(THEIRS)}")
    given = parser.parse_args()
    n = max(1, round(given.size_gb * 1e9 / (2 * ROWS * COLUMNS)))
    n_bytes = n * 2 * ROWS * COLUMNS
    print("| source | program | seconds, best and median | GB/s | peak of private memory |\n|---|---|--:|--:|--:|")
    for kind in given.kind or THEIRS:
        with tempfile.TemporaryDirectory(dir=given.dir) as folder:
            path = Path(folder)
            source = make(kind, path, n)
            programs = {"reshard": OURS, _OTHERS[kind]: THEIRS[kind]}
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
            written = {}
            for _ in range(given.rounds):
                for name, program in programs.items():
                    found[name].append(run(program, source, path / "out"))
                    written[name] = last_tensor(path / "out")
            assert len(set(written.values())) == 1, json.dumps([one[0] for one in written.values()])
            for name, runs in found.items():
                seconds = [one for one, _ in runs]
                print(
                    f"| {_TITLES[kind]} | {name} | {min(seconds):.2f}, {statistics.median(seconds):.2f} | "
                    f"{n_bytes / min(seconds) / 1e9:.2f} | {max(peak for _, peak in runs) / 1e6:,.0f} MB |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
