"""The table of formats and operations in docs/reference/formats.md: each row is made by running the operations."""

from __future__ import annotations

import ast
import struct
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.formats.trainer_run.runs import Training
from tests.helpers.command_line import run
from tests.helpers.mesh_files import distributed, save_ranks
from torch.distributed.tensor import Shard

import reshard
from reshard.formats.checkpoint2.format import TILED
from reshard.formats.registry import FORMATS, detect, writers
from reshard.storage.location import locate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reshard.formats.base import Format

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
HEAD = ["format", "inspect", "convert from", "convert to", "slices", "goes on as", "verify", "tests"]
LAYOUT = {"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}]}


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    return {"a": np.arange(12, dtype=np.float32).reshape(4, 3), "b": np.ones(2, np.float32)}


def one_file(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    reshard.save_file(arrays(), path)
    return path


def converted(folder: Path, name: str, **options: Any) -> Path:
    reshard.convert(one_file(folder / "source.safetensors"), folder / name, **options)
    return folder / name


def ranks(folder: Path) -> Path:
    import torch

    save_ranks(folder / "ranks", (2,), lambda mesh: {"a": distributed(torch.ones(4, 3), mesh, [Shard(0)])})
    return folder / "ranks"


def gguf(folder: Path) -> Path:
    """A file with one tensor of float32."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"a"
    head += struct.pack("<IQQIQ", 2, 3, 4, 0, 0)
    (folder / "m.gguf").write_bytes(head.ljust(-(-len(head) // 32) * 32, b"\0") + arrays()["a"].tobytes())
    return folder / "m.gguf"


def nemo(folder: Path) -> Path:
    """An archive with a file of weights."""
    path = converted(folder, "w.pt")
    with tarfile.open(folder / "m.nemo", "w:") as tar:
        tar.add(path, arcname="./model_weights.ckpt")
    return folder / "m.nemo"


def saved(folder: Path) -> Path:
    reshard.save(folder / "run", 7, arrays())
    return folder / "run"


# A sample, the format that is written, and the tests of its details.
TRAINER_TESTS = "trainer_run trainer_fsdp trainer_deepspeed"

SAMPLES: Mapping[str, tuple[Callable[[Path], Path], str | None, str]] = {
    "huggingface": (lambda p: one_file(p / "m" / "model.safetensors").parent, "huggingface", "huggingface_format"),
    "mindspore": (lambda _: DATA / "mindspore" / "full_ms", "mindspore", "full_weights"),
    "megatron": (lambda _: DATA / "torch" / "mcore_tp2pp2" / "checkpoint", "megatron", "megatron"),
    "dcp": (lambda _: DATA / "torch" / "dcp_fsdp2" / "checkpoint", "dcp", "torch_formats"),
    "deepspeed": (lambda _: DATA / "torch" / "ds_zero1_bf16" / "checkpoint", "deepspeed-universal", "deepspeed"),
    "fsdp-ranks": (ranks, None, "fsdp_ranks"),
    "nanotron": (lambda _: DATA / "torch" / "nanotron_tp2" / "checkpoint", None, "nanotron"),
    "vllm": (lambda p: one_file(p / "v" / "model-rank-0-part-0.safetensors").parent, None, "vllm"),
    "checkpoint2": (saved, "checkpoint2", "checkpoint"),
    "checkpoint1": (lambda p: converted(p, "ranks", to="checkpoint1", layout=LAYOUT), "checkpoint1", "rank_folders"),
    "tiled": (lambda p: converted(p, "tiled", to="safetensors", layout=LAYOUT), "safetensors", "tiles_format"),
    "torch": (lambda p: converted(p, "w.pt"), "torch", "torch_formats"),
    "weight-files": (lambda p: one_file(p / "u" / "diffusion_pytorch_model.safetensors").parent, None, "weight_files"),
    "trainer-run": (lambda p: Training().save_as_trainer(p / "checkpoint-4", 4), None, TRAINER_TESTS),
    "torchtune": (lambda _: DATA / "torch" / "torchtune" / "hf_bin", None, "torchtune"),
    "nemo": (nemo, None, "nemo"),
    "gguf": (gguf, None, "gguf"),
    "ckpt": (lambda _: next((DATA / "mindspore" / "ckpt").glob("*.ckpt")), None, "ckpt"),
    "safetensors": (lambda p: one_file(p / "w.safetensors"), "safetensors", "convert"),
}


# The test in which a run goes on from a checkpoint of a format, with its optimizer.
RUNS: Mapping[str, str] = {
    "dcp": "formats/dcp/test_dcp_resume.py::test_a_run_goes_on_from_what_torch_saved",
    "fsdp-ranks": "formats/fsdp_ranks/test_fsdp_ranks.py::test_a_run_without_ranks_goes_on_from_them",
    "checkpoint2": "torch/test_checkpointer.py::test_resumed_run_is_the_same_run",
    "checkpoint1": "formats/checkpoint1/test_checkpoint1_ranks.py::test_ranks_save_and_resume",
    "torch": "formats/dcp/test_dcp_resume.py::test_a_run_goes_on_from_what_torch_saved",
    "trainer-run": "formats/trainer_run/test_trainer_run.py::test_a_run_goes_on_from_it",
}


def name_of(one: Format) -> str:
    return "tiled" if one is TILED else one.traits.name


def test_every_format_has_a_row() -> None:
    assert sorted(SAMPLES) == sorted(map(name_of, FORMATS))
    assert {writer for _, writer, _ in SAMPLES.values() if writer} == {one.name for one in writers()}


def row_of(name: str, folder: Path) -> list[str]:
    """The row of a format, from what the operations do with a sample."""
    make, writer, tests = SAMPLES[name]
    path = make(folder)
    of = next(one for one in FORMATS if name_of(one) == name)
    chosen: dict[str, Any] = {"format": name} if name == "trainer-run" else {}
    options = [f"--{word}={value}" for word, value in chosen.items()]
    inspected = run("inspect", path, *options)
    assert inspected.exit_code == 0, inspected.output
    report = reshard.convert(path, folder / "out.safetensors", part="model", **chosen)
    assert report.n_tensors > 0
    with reshard.open(path, **chosen) as checkpoint:
        assert checkpoint.format == of.traits.name
        keys = [key for key in checkpoint.keys("model") if checkpoint.shape(key) and checkpoint.shape(key)[0] > 1]
        for key in keys[:3]:
            assert np.array_equal(checkpoint.read(key, slice(1, 2)), checkpoint.read(key)[1:2])
        assert keys
    if writer is not None:
        target = folder / ("again.safetensors" if name == "safetensors" else "again")
        layout: dict[str, Any] = {"layout": LAYOUT} if name in ("tiled", "checkpoint1") else {}
        reshard.convert(one_file(folder / "source.safetensors"), target, to=writer, **layout)  # type: ignore[arg-type]
        assert detect(locate(target)) is of
    verified = run("verify", path, *options)
    assert verified.exit_code == 0, verified.output
    words = "structure" if "unverified" in verified.output else "checksums"
    assert all(any((ROOT / "tests").rglob(f"test_{one}.py")) for one in tests.split())
    taken = goes_on(of, name, path, chosen, folder)
    named = ", ".join(f"`{one}`" for one in tests.split())
    return [f"`{name}`", "yes", "yes", "no" if writer is None else f"`{writer}`", "yes", taken, words, named]


def goes_on(of: Format, name: str, path: Path, chosen: dict[str, Any], folder: Path) -> str:
    """What a run takes over: its weights, which a run starts from here; and as the named test shows, all of it."""
    import torch

    from reshard.torch import Checkpointer, as_tensor

    with reshard.open(path, **chosen) as checkpoint:
        keys = checkpoint.data.weights() or {key: key for key in checkpoint.keys("model")}
        stored = {name: as_tensor(checkpoint.read(key)) for name, key in keys.items()}
    model = torch.nn.Module()
    for key, tensor in stored.items():
        *modules, last = key.split(".")
        owner = model
        for module in modules:
            if module not in dict(owner.named_children()):
                owner.add_module(module, torch.nn.Module())
            owner = owner.get_submodule(module)
        owner.register_buffer(last, torch.zeros_like(tensor))
    with Checkpointer(folder / "run of the row", signals=()) as checkpointer:
        decision = checkpointer.resume(model=model, init_from={"path": path, **chosen})
    assert decision.initial_step == 0
    assert all(torch.equal(tensor, stored[key]) for key, tensor in model.state_dict().items())
    if name not in RUNS:
        return "weights" if of.traits.counters is None else "weights, counters"
    file, _, function = RUNS[name].partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text())
    assert any(isinstance(one, ast.FunctionDef) and one.name == function for one in tree.body), RUNS[name]
    return f"a run: `{function}`"


def rows_of_the_page() -> dict[str, list[str]]:
    text = (ROOT / "docs" / "reference" / "formats.md").read_text()
    lines = text.partition("| " + " | ".join(HEAD) + " |\n")[2].splitlines()[1:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[: lines.index("")]]
    return {row[0].strip("`"): row for row in rows}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_row_is_what_the_operations_do(name: str, tmp_path: Path) -> None:
    assert rows_of_the_page().get(name) == row_of(name, tmp_path)
