"""What `formats.py` times: conversions from formats of PyTorch by reshard and their own tools; loads. All checked."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

import reshard
import reshard.verbs.convert
from benches import fresh, model

if TYPE_CHECKING:
    from collections.abc import Callable

    from benches.sources import Sources

RANK = 1
Origin = Literal["dcp", "zero3", "root"]

_SAMPLE_SECONDS = 0.002
# Programs of a new process, with the paths of a source and of what is made of it.
_PROGRAMS = {
    "reshard": "from reshard.verbs.convert import convert\nconvert(SOURCE, TARGET, to='huggingface')",
    "torch": "from benches.format_cases import dcp_by_torch\ndcp_by_torch(SOURCE, TARGET)",
    "DeepSpeed": "from benches.format_cases import zero3_by_deepspeed\nzero3_by_deepspeed(SOURCE, TARGET)",
}


def convert(sources: Sources, origin: Origin, library: str, *, durable: bool) -> float:
    """Seconds of a conversion to Hugging Face."""

    def ours(source: Path, target: Path) -> None:
        reshard.verbs.convert.convert(source, target, to="huggingface", commit={"durable": durable})

    ways: dict[str, Callable[[Path, Path], None]] = {
        "reshard": ours,
        "torch": dcp_by_torch,
        "DeepSpeed": zero3_by_deepspeed,
    }
    small = sources.small
    ways[library](small.at(origin), small.target)  # imports what is imported late
    shutil.rmtree(small.target)
    fresh.prepare(sources.files(origin), 2 * sources.path.stat().st_size)
    started = time.perf_counter()
    ways[library](sources.at(origin), sources.target)
    seconds = time.perf_counter() - started
    _check(sources, origin)
    return seconds


def dcp_by_torch(source: Path, target: Path) -> None:
    """torch's converter, and how `save_pretrained` of transformers writes a state dict."""
    import huggingface_hub  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: PLC0415

    target = Path(target)
    target.mkdir()
    whole = target / "pytorch_model.bin"
    dcp_to_torch_save(source, whole)
    state = torch.load(whole, mmap=True, weights_only=True)
    huggingface_hub.save_torch_state_dict(state, target, max_shard_size="50GB")
    whole.unlink()


def zero3_by_deepspeed(source: Path, target: Path) -> None:
    """`zero_to_fp32.py` of DeepSpeed to one safetensors file; it reads tensors lazily."""
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict  # noqa: PLC0415

    options = {"max_shard_size": "50GB", "safe_serialization": True}
    convert_zero_checkpoint_to_fp32_state_dict(str(source), str(target), **options)


def peak_bytes(sources: Sources, origin: Origin, library: str) -> float:
    """The peak of `RssAnon`, sampled every 2 ms: without the page cache, which maps of files count."""
    fresh.prepare(sources.files(origin), 0)
    program = f"SOURCE, TARGET = {str(sources.at(origin))!r}, {str(sources.target)!r}\n{_PROGRAMS[library]}"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    status, peak = Path(f"/proc/{process.pid}/status"), 0
    while process.poll() is None:
        lines = status.read_text().splitlines()
        peak = max([peak, *(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))])
        time.sleep(_SAMPLE_SECONDS)
    assert process.stderr is not None
    errors = process.stderr.read().decode()
    if process.returncode:
        raise RuntimeError((errors.strip().splitlines() or ["no message"])[-1])
    _check(sources, origin)
    return float(peak)


def _check(sources: Sources, origin: Origin) -> None:
    """Compare the files with the model; the weights of ZeRO-3 are fp32 with the bits of the model as upper half."""
    expected = model.read(sources.path)
    found: dict[str, np.ndarray] = {}
    for file in sources.target.glob("*.safetensors"):
        found |= model.read(file, "F32" if origin == "zero3" else "BF16")
    assert set(found) == set(expected), "the tensors are not those of the model"
    for key, array in expected.items():
        model.assert_equal(key, array.astype(np.uint32) << 16 if origin == "zero3" else array, found[key])


def load(sources: Sources, origin: Origin, verify: Literal["structure", "touched"]) -> float:
    """Seconds from the path to the slices of a rank, by a map."""

    def run(at: Sources) -> dict[str, np.ndarray]:
        with reshard.open(at.at(origin), method="map") as checkpoint:
            return checkpoint.load(model.LAYOUT, RANK, verify=verify)

    run(sources.small)
    fresh.prepare(sources.files(origin), 2 * model.own_bytes(sources.path, RANK))
    started = time.perf_counter()
    found = run(sources)
    seconds = time.perf_counter() - started
    model.check_rank(sources.path, found, RANK)
    return seconds
