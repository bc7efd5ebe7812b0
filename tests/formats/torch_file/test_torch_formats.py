"""Files of `torch.save` and folders of `torch.distributed.checkpoint` that real programs wrote, and hostile ones.

The expected tensors and values were taken from the live objects before they were saved.
"""

from __future__ import annotations

import enum
import json
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter, OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save

import reshard
from reshard import _core
from reshard.cli import main
from reshard.errors import (
    CheckpointNotFoundError,
    CoverageError,
    DamagedFileError,
    EmptyRootError,
    MismatchError,
    ReshardError,
    UnsupportedError,
)
from reshard.formats import run_state

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = Path(__file__).parents[2] / "data" / "torch"
HOSTILE = DATA / "hostile"
PT_FILES = sorted(path.name for path in (DATA / "pt_files").iterdir() if not path.name.startswith("expected"))
FOLDERS = {
    "dcp_fsdp2/checkpoint/step-10": "dcp_fsdp2/expected/step-10",
    "dcp_fsdp2/checkpoint/step-3": "dcp_fsdp2/expected/step-3",
    "dcp_2d/checkpoint": "dcp_2d",
    "dcp_hsdp/checkpoint": "dcp_hsdp",
    "dcp_plain/checkpoint": "dcp_plain",
    "dcp_threads/checkpoint_items": "dcp_threads",
    "dcp_threads/checkpoint_threads": "dcp_threads",
    "dcp_zstd/checkpoint": "dcp_zstd",
    "dcp_hf/sharded_only": "dcp_hf",
    "dcp_hf/sharded_mapped": "dcp_hf",
    "dcp_hf/consolidated/sharded": "dcp_hf",
    "dcp_safetensors_items/checkpoint": "dcp_safetensors_items",
    "hf_bin/single": "hf_bin",
    "hf_bin/sharded": "hf_bin",
    "hf_bin/old": "hf_bin",
}


def marked(value: object) -> object:
    """A value in the notation of `expected.json`."""
    if isinstance(value, _core.Opaque):
        arguments = value.arguments or ()
        if value.name == "torch.Size":
            return {"__size__": list(arguments[0]) if arguments else []}  # type: ignore[call-overload]
        if value.name == "torch.device":
            return {"__device__": arguments[0]}
        if value.name.startswith("torch.") and value.arguments is None:
            return {"__dtype__": value.name}
        return {"__opaque__": value.name}
    if isinstance(value, bytes):
        return {"__bytes__": value.hex()}
    if isinstance(value, tuple):
        return {"__tuple__": [marked(one) for one in value]}
    if isinstance(value, set):
        return {"__set__": sorted(value)}
    if isinstance(value, complex):
        return {"__complex__": [value.real, value.imag]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": str(value)}
    if isinstance(value, np.ndarray | np.integer):
        return {"__opaque__": f"numpy.{type(value).__name__}"}
    if isinstance(value, list):
        return [marked(one) for one in value]
    if isinstance(value, dict):
        return {key: marked(one) for key, one in value.items()}
    return value


def check_tensors(path: Path, expected: Path, prefix: str = "") -> int:
    with reshard.open(expected) as truth, reshard.open(path) as checkpoint:
        names = [key.removeprefix(prefix) for key in truth if key.startswith(prefix)]
        assert sorted(checkpoint.keys()) == sorted(names)
        for name in names:
            found, right = checkpoint.read(name), truth.read(prefix + name)
            assert (found.dtype, found.shape) == (right.dtype, right.shape), name
            assert found.tobytes() == right.tobytes(), name
        return len(names)


@pytest.mark.parametrize("name", PT_FILES)
def test_a_file_has_the_tensors_and_values_that_were_saved(name: str) -> None:
    folder = DATA / "pt_files"
    assert check_tensors(folder / name, folder / "expected.safetensors", f"{name}::") > 0
    expected = json.loads((folder / "expected.json").read_text())
    wanted = {key.removeprefix(f"{name}::"): value for key, value in expected.items() if key.startswith(f"{name}::")}
    with reshard.open(folder / name) as checkpoint:
        found = {key: marked(value) for key, value in checkpoint.extra().items()}
    if wanted:
        assert found == wanted


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_has_the_tensors_and_values_that_were_saved(name: str) -> None:
    expected = DATA / FOLDERS[name]
    assert check_tensors(DATA / name, expected / "expected.safetensors") > 0
    if name.startswith("dcp"):
        with reshard.open(DATA / name) as checkpoint:
            found = {key: marked(value) for key, value in checkpoint.extra().items()}
        wanted = json.loads((expected / "expected.json").read_text()) if (expected / "expected.json").exists() else {}
        assert found == wanted


def test_slices_layouts_and_conversions(tmp_path: Path) -> None:
    folder = DATA / "dcp_2d/checkpoint"
    with reshard.open(folder) as checkpoint:
        key = next(key for key in checkpoint if len(checkpoint[key].shape) == 2)
        whole = checkpoint.read(key)
        assert (checkpoint.read(key, (slice(1, 3), 1)) == whole[1:3, 1]).all()
        loaded = checkpoint.load({"mesh": {"tp": 2}, "rules": [{"match": "*"}]}, rank=1)
        assert (loaded[key] == whole).all()
    reshard.convert(folder, tmp_path / "all", to="checkpoint2")
    assert check_tensors(tmp_path / "all", DATA / "dcp_2d" / "expected.safetensors") > 30
    reshard.convert(folder, tmp_path / "weights", to="huggingface")  # without the state of the optimizer
    with reshard.open(tmp_path / "weights") as weights, reshard.open(folder) as checkpoint:
        assert set(weights) == set(checkpoint.keys("model"))
        assert all((weights.read(key) == checkpoint.read(key)).all() for key in weights)


@pytest.mark.parametrize("name", json.loads((HOSTILE / "hostile.json").read_text()))
def test_a_hostile_file_is_refused_or_read_right(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a pickle that ran would make a file here
    want = json.loads((HOSTILE / "hostile.json").read_text())[name]["want"]
    good = {"good.pt": "good.pt", "bin": "bin_good", "dcp": "dcp_good"}
    reference = good.get(name.split("_", maxsplit=1)[0] if not name.endswith((".pt", ".pkl")) else "good.pt", "good.pt")
    with reshard.open(HOSTILE / reference) as checkpoint:
        right = {key: checkpoint.read(key) for key in checkpoint}
    found: dict[str, np.ndarray] = {}
    refusal = None
    try:
        with reshard.open(HOSTILE / name) as checkpoint:
            found = {key: checkpoint.read(key) for key in checkpoint}
            checkpoint.extra()
    except ReshardError as error:
        refusal = error.message
    assert want != ("equal" if refusal else "refuse"), refusal
    assert refusal or all((array == right[key]).all() for key, array in found.items())
    assert not list(tmp_path.iterdir())


_READ_ALL = """
import json, resource, sys
from pathlib import Path
import reshard, reshard.verbs.verify
from reshard.errors import ReshardError

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

found = {}
for path in map(Path, json.load(sys.stdin)):
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    before = status("VmRSS")
    try:
        with reshard.open(path) as checkpoint:
            checkpoint.extra()
            for key in checkpoint:
                checkpoint.read(key)
    except ReshardError:
        pass
    found[path.name] = status("VmHWM") - before
print(json.dumps(found))
"""


@pytest.mark.slow(disk=False)
def test_hostile_files_take_little_memory(tmp_path: Path) -> None:
    cases = [str(HOSTILE / name) for name in json.loads((HOSTILE / "hostile.json").read_text())]
    run = [sys.executable, "-c", _READ_ALL]
    done = subprocess.run(run, input=json.dumps(cases), text=True, capture_output=True, check=True, cwd=tmp_path)
    found = json.loads(done.stdout)
    assert len(found) == len(cases) >= 151
    for name, most in found.items():
        files = [HOSTILE / name] if (HOSTILE / name).is_file() else (HOSTILE / name).rglob("*")
        n_bytes = sum(file.lstat().st_size for file in files)
        assert most <= 2 * n_bytes + (64 << 20), (name, most)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", [0, (4 << 20) - 1, 4 << 20, (9 << 20) + 4])
def test_a_flipped_bit_of_a_large_storage_is_found(place: int, tmp_path: Path) -> None:
    """The CRC of a storage of several pieces of 4 MiB is computed in parallel and combined."""
    torch = pytest.importorskip("torch")
    values = torch.arange((9 << 20) // 4 + 2, dtype=torch.int32)  # the last piece is short
    torch.save({"w": values}, tmp_path / "model.pt")
    with reshard.open(tmp_path / "model.pt") as checkpoint:
        assert (checkpoint.read("w") == values.numpy()).all()
    content = bytearray((tmp_path / "model.pt").read_bytes())
    begin = content.index(values[:64].numpy().tobytes())
    content[begin + place] ^= 4
    (tmp_path / "model.pt").write_bytes(content)
    with reshard.open(tmp_path / "model.pt") as checkpoint, pytest.raises(DamagedFileError, match="CRC"):
        checkpoint.read("w")
    with pytest.raises(DamagedFileError, match="CRC"):  # and nothing is published
        reshard.convert(tmp_path / "model.pt", tmp_path / "hf", to="huggingface", commit={"durable": False})
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["model.pt"]


def test_a_flipped_bit_is_found_by_the_crc(tmp_path: Path) -> None:
    for name in ("pt_files/training.pt", "dcp_plain/checkpoint/__0_0.distcp"):
        source = DATA / name
        folder = tmp_path / source.parent.name
        shutil.copytree(source.parent, folder)
        whole = folder if source.suffix == ".distcp" else folder / source.name
        with reshard.open(whole) as checkpoint:
            content = {key: checkpoint.read(key).tobytes() for key in checkpoint}
        data = bytearray((folder / source.name).read_bytes())
        key, place = next(
            (key, at) for key in content if len(content[key]) > 64 and (at := data.find(content[key])) > 0
        )
        data[place + 3] ^= 16
        (folder / source.name).write_bytes(data)
        with reshard.open(whole) as checkpoint, pytest.raises(DamagedFileError, match="CRC-32"):
            checkpoint.read(key)
        with reshard.open(whole) as checkpoint:
            others = [other for other in checkpoint if checkpoint[other].n_bytes and other != key]
            assert sum(checkpoint.read(other).nbytes for other in others[:3]) > 0


def test_a_save_that_was_not_finished_is_refused() -> None:
    with pytest.raises(CheckpointNotFoundError, match="was not finished"):
        reshard.open(DATA / "dcp_fsdp2/checkpoint/step-15")


def test_of_a_root_the_newest_complete_step_is_opened(tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(DATA / "dcp_fsdp2/checkpoint", root)
    (root / "step-99.tmp").mkdir()
    with reshard.open(root) as checkpoint:
        assert (checkpoint.iteration, checkpoint.path.name) == (10, "step-10")
        assert [name for name, _ in checkpoint.skipped] == ["step-15"]
        assert "optimizer.state.gate.exp_avg" in checkpoint.keys("optimizer")
        assert "gate" in checkpoint.keys("model")
    (root / "step-10/.metadata").write_bytes(b"x")
    with reshard.open(root) as checkpoint:
        assert checkpoint.iteration == 3
    shutil.rmtree(root / "step-3")
    with pytest.raises(DamagedFileError, match="no complete checkpoint"):
        reshard.open(root)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (Path.unlink, "`.*/.metadata` lists missing files: `__1_0.distcp`"),
        (lambda file: os.truncate(file, file.stat().st_size - 1), "__1_0.distcp` has .* bytes, expected at least"),
        (lambda file: [act(file) for act in (os.unlink, os.mkfifo)], "__1_0.distcp` is not a regular file"),
    ],
    ids=["missing", "cut", "fifo"],
)
def test_a_step_whose_data_files_are_incomplete_is_skipped(
    harm: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(DATA / "dcp_fsdp2/checkpoint", root)
    harm(root / "step-10/__1_0.distcp")
    with reshard.open(root) as checkpoint:
        assert checkpoint.iteration == 3
        assert re.search(message, dict(checkpoint.skipped)["step-10"])
    with pytest.raises(ReshardError, match=message):
        reshard.open(root / "step-10")


def test_a_description_without_its_data_files_is_no_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(DATA / "dcp_plain/checkpoint/.metadata", tmp_path / "run")
    with pytest.raises(CheckpointNotFoundError, match="lists missing files") as caught:
        reshard.open(tmp_path / "run")
    assert not isinstance(caught.value, EmptyRootError)
    with pytest.raises(DamagedFileError, match="lists missing files"):
        reshard.load(tmp_path / "run", allow_fresh=True)


def test_a_step_is_found_in_its_folder_without_the_root() -> None:
    with reshard.open(DATA / "dcp_fsdp2/checkpoint/step-3") as checkpoint:
        assert checkpoint.iteration == 3


# -- shard files of HuggingFaceStorageWriter

SHARDS = "shard-0000{}-model-0000{}-of-0000{}.safetensors"


@pytest.mark.parametrize(
    ("folder", "missing", "error", "message"),
    [
        ("sharded_only", [(2, 1, 1)], CoverageError, "hint: a file of another rank is missing"),
        ("sharded_mapped", [(3, 2, 2)], CoverageError, "hint: a file of another rank is missing"),
        (
            "sharded_mapped",
            [(4, 1, 2)],
            CheckpointNotFoundError,
            "no file `shard-00004-model-00001-of-00002.safetensors`",
        ),
        ("sharded_mapped", [(n, 2, 2) for n in range(1, 5)], CheckpointNotFoundError, "`...-model-00002-of-00002`"),
        ("sharded_only", [(n, 1, 1) for n in (1, 2, 3)], CoverageError, "not cover|uncovered|missing"),
    ],
)
def test_a_missing_shard_file_is_refused(
    folder: str, missing: list[tuple[int, int, int]], error: type[ReshardError], message: str, tmp_path: Path
) -> None:
    shutil.copytree(DATA / "dcp_hf" / folder, tmp_path / "shards")
    for numbers in missing:
        (tmp_path / "shards" / SHARDS.format(*numbers)).unlink()
    with pytest.raises(error, match=message):
        reshard.open(tmp_path / "shards")


def write_shards(folder: Path, shards: dict[tuple[int, int, int], dict[str, tuple[list[int], np.ndarray]]]) -> None:
    folder.mkdir()
    for numbers, tensors in shards.items():
        info = {name: {"saved_offsets": offset} for name, (offset, _) in tensors.items()}
        reshard.save_file(
            {name: array for name, (_, array) in tensors.items()},
            folder / SHARDS.format(*numbers),
            metadata={"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0"},
        )


def test_shards_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    two, other = np.arange(2.0), np.arange(2)
    cases = {
        "overlap": {(1, 1, 1): {"w": ([0], two)}, (2, 1, 1): {"w": ([1], two)}},
        "the same shard": {(1, 1, 1): {"w": ([0], two)}, (2, 1, 1): {"w": ([0], two)}},
        "in other files": {(1, 1, 1): {"w": ([0], two)}, (2, 1, 1): {"w": ([2], other)}},
        "other dims": {(1, 1, 1): {"w": ([0], two)}, (2, 1, 1): {"w": ([2, 0], two.reshape(1, 2))}},
        "does not say where": {(1, 1, 1): {"w": ([0, 0], two)}},
        "no valid": {(1, 1, 1): {"w": ([-1], two)}},
        "several saves": {(1, 1, 1): {"w": ([0], two)}, (2, 1, 2): {"w": ([2], two)}},
        "no file `shard-00002": {(1, 1, 1): {"w": ([0], two)}, (3, 1, 1): {"w": ([2], two)}},
    }
    for n, (message, shards) in enumerate(cases.items()):
        write_shards(tmp_path / str(n), shards)  # type: ignore[arg-type]
        with pytest.raises(ReshardError, match=message):
            reshard.open(tmp_path / str(n))
    # Ranks that hold other tensors, as stages of a pipeline, need not have the same files.
    stages = {(1, 1, 2): {"a": ([0], two)}, (2, 1, 2): {"a": ([2], two)}}
    stages |= {(rank, 2, 2): {"b": ([2 * rank - 6], two)} for rank in (3, 4)}
    write_shards(tmp_path / "stages", stages)
    with reshard.open(tmp_path / "stages") as checkpoint:
        assert checkpoint.read("b").tolist() == [0, 1, 0, 1]
        assert checkpoint.data.world_size() == 4


def test_safetensors_items_are_compared_with_metadata(tmp_path: Path) -> None:
    shutil.copytree(DATA / "dcp_safetensors_items/checkpoint", tmp_path / "items")
    shutil.copy(tmp_path / "items/__0_0.distcp", tmp_path / "items/__1_0.distcp")
    with pytest.raises(DamagedFileError, match="two files hold the same shard"):
        reshard.open(tmp_path / "items")


# -- ranks without collectives


def test_ranks_without_collectives(tmp_path: Path) -> None:
    folder = DATA / "dcp_no_collectives"
    with reshard.open(folder / "checkpoint") as checkpoint, reshard.open(folder / "expected.safetensors") as truth:
        assert (checkpoint.read("w") == truth.read("w")).all()
        assert checkpoint["w"].shape == truth["w"].shape
        assert [checkpoint.extra(rank)["step"] for rank in range(2)] == [4, 5]
        with pytest.raises(MismatchError, match="ranks 0 and 1 saved different values of `own`"):
            checkpoint.read("own")
    for name, error, message in (
        ("__0.metadata", CheckpointNotFoundError, "no `__0.metadata`"),
        ("__1.metadata", CoverageError, "w"),
    ):
        shutil.copytree(folder / "checkpoint", tmp_path / name)
        (tmp_path / name / name).unlink()
        with pytest.raises(error, match=message):
            reshard.open(tmp_path / name)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_number_and_a_text_as_keys_do_not_replace_each_other(tmp_path: Path, *, zipped: bool) -> None:
    torch = pytest.importorskip("torch")
    for number, text in ((1, "1"), ((1, 2), ("1", "2"))):
        state = {"w": {number: torch.zeros(2), text: torch.ones(2)}}
        torch.save(state, tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
        with pytest.raises(UnsupportedError, match="two values have the path"):
            reshard.open(tmp_path / "w.pt")


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(3, dtype=torch.complex64).conj(), torch._neg_view(torch.ones(2))],
    ids=["conjugate", "negative"],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_values_that_torch_negates_or_conjugates_are_refused(
    tmp_path: Path, tensor: torch.Tensor, *, zipped: bool
) -> None:
    torch.save({"w": tensor}, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(UnsupportedError, match=r"(?s)conjugates or negates.*resolve_conj"):
        reshard.open(tmp_path / "x.pt")
    save({"w": tensor}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with reshard.open(tmp_path / "dcp") as checkpoint, pytest.raises(UnsupportedError, match="conjugates or negates"):
        checkpoint.read("w")


class _OfPython2(OrderedDict[str, object]):
    """An `OrderedDict` as Python 2 pickles it."""

    def __reduce__(self) -> Any:
        return OrderedDict, ([[key, value] for key, value in self.items()],), {"_metadata": OrderedDict()}


@pytest.mark.parametrize("zipped", [True, False])
def test_dicts_that_get_their_keys_by_a_call_keep_them(tmp_path: Path, *, zipped: bool) -> None:
    content = _OfPython2(w=torch.ones(2), milestones=Counter([30, 80, 80]))
    torch.save(content, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    with reshard.open(tmp_path / "x.pt") as checkpoint:
        assert checkpoint.read("w").tolist() == [1, 1]
        assert checkpoint.extra() == {"milestones.30": 1, "milestones.80": 2}


@pytest.mark.parametrize(
    "content",
    [
        {"w": torch.ones(2), "m": torch.nn.ParameterDict({"a": torch.ones(1)})},
        {"w": torch.ones(2), "m": torch.nn.ParameterList([torch.ones(1)])},
    ],
    ids=["dict", "list"],
)
def test_tensors_inside_other_objects_are_told_of(
    content: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save(content, tmp_path / "x.pt")
    with reshard.open(tmp_path / "x.pt") as checkpoint:
        assert list(checkpoint) == ["w"]
    assert "tensors inside objects of classes are not read: `m` (torch." in caplog.text
    caplog.clear()
    torch.save({"w": torch.ones(2), "size": torch.Size([1])}, tmp_path / "x.pt")
    reshard.open(tmp_path / "x.pt").close()
    assert not caplog.text


class _Made:
    """An object that is made by a call with these arguments."""

    def __init__(self, *given: object) -> None:
        self.given = given

    def __reduce__(self) -> Any:
        return _Made, self.given


def test_what_objects_share_is_searched_for_tensors_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the time to open a file grows with the square of its size."""
    n_searched = 0
    is_tensor = run_state.is_tensor

    def counted(value: object) -> bool:
        nonlocal n_searched
        n_searched += 1
        return is_tensor(value)

    monkeypatch.setattr(run_state, "is_tensor", counted)
    shared = tuple(_Made(n) for n in range(100))
    others = {}
    for n in range(100):
        others[f"m{n}"] = _Made()
        others[f"m{n}"].given = shared  # the same tuple, which `pickle` writes once
    cycle: list[object] = [_Made(torch.ones(1))]
    cycle.append(cycle)
    torch.save({"w": torch.ones(2), **others, "last": _Made(cycle), "again": _Made(1, cycle)}, tmp_path / "x.pt")
    reshard.open(tmp_path / "x.pt").close()
    assert 200 <= n_searched <= 210
    assert "are not read: `last` (tests.formats.torch_file.test_torch_formats._Made), `again` (" in caplog.text
    assert "m0" not in caplog.text


def test_a_conversion_leaves_out_the_optimizer_and_warns_of_the_entry_of_the_model(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "epoch": 1}
    torch.save(state, tmp_path / "x.pt")
    report = reshard.convert(tmp_path / "x.pt", tmp_path / "a")
    assert reshard.open(tmp_path / "a").keys() == ["model_state_dict.weight", "model_state_dict.bias"]
    (warning,) = report.warnings
    assert warning.startswith("names begin with `model_state_dict.`")
    assert "`--rename model_state_dict.=`" in warning
    torch.save({**state, "best": torch.ones(1)}, tmp_path / "x.pt")
    assert "tensors outside of `model_state_dict` are written, too: `best`." in "".join(
        reshard.convert(tmp_path / "x.pt", tmp_path / "b").warnings
    )
    select = {"rename": {"model_state_dict.": ""}, "drop": "best"}
    report = reshard.convert(tmp_path / "x.pt", tmp_path / "c", select=select)
    assert (reshard.open(tmp_path / "c").keys(), report.warnings) == (["weight", "bias"], ())
    # Names that were chosen are not compared with the entries of the file.
    select = {"rename": {"best": "model_state_dict.best"}}
    report = reshard.convert(tmp_path / "x.pt", tmp_path / "chosen", select=select)
    assert ("model_state_dict.best" in reshard.open(tmp_path / "chosen"), report.warnings) == (True, ())
    torch.save({f"model.{key}": value for key, value in model.state_dict().items()}, tmp_path / "x.pt")
    assert reshard.convert(tmp_path / "x.pt", tmp_path / "d").warnings == ()


def test_inspect_warns_of_tensors_that_are_not_read(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "x.pt")
    result = CliRunner().invoke(main, ["inspect", str(tmp_path / "x.pt")])
    assert (result.exit_code, "there are no tensors" in result.stdout) == (0, True), result.output
    assert "warning: " in result.stderr
    assert "are not read: `` (torch.nn.modules.linear.Linear). Save their `state_dict()`" in result.stderr
    result = CliRunner().invoke(main, ["inspect", str(tmp_path / "x.pt"), "--json"])
    assert result.stderr == ""
    assert "are not read" in json.loads(result.stdout)["warnings"][0]


def test_a_control_character_in_a_name_is_refused_with_the_name(tmp_path: Path) -> None:
    torch.save({"a": {"b\nc": torch.zeros(1)}}, tmp_path / "x.pt")
    with pytest.raises(DamagedFileError, match=r"x\.pt: tensor `a\.b\\u\{a\}c`: the name contains a control"):
        reshard.open(tmp_path / "x.pt")


def test_complex128_is_refused_by_name(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"z": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "z.pt")
    with pytest.raises(UnsupportedError, match="ComplexDoubleStorage"):
        reshard.open(tmp_path / "z.pt")


class Kind(enum.Enum):
    FIRST = 1


def test_members_of_enums_are_read_as_python_3_11_2_pickles_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11.0 to 3.11.3 pickles a member as `getattr(class, name)`; `.metadata` of DCP holds such members."""
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda self, _protocol: (getattr, (type(self), self.name)))
    torch.save({"w": torch.ones(2), "kind": Kind.FIRST}, tmp_path / "w.pt")
    save({"w": torch.arange(6)}, checkpoint_id=tmp_path / "dcp")
    assert b"getattr" in (tmp_path / "dcp" / ".metadata").read_bytes()
    with reshard.open(tmp_path / "w.pt") as file, reshard.open(tmp_path / "dcp") as folder:
        assert str(file.extra()["kind"]) == f"<opaque {__name__}.Kind>"
        assert folder.read("w").tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "arguments", ["()", "(Kind,)", "(Kind, 'mro', 1)", "(Kind, '__init__')", "(Kind, 'a.b')", "('x', 'y')"]
)
def test_other_uses_of_getattr_are_refused(arguments: str, tmp_path: Path) -> None:
    class Call:
        def __reduce__(self) -> tuple[object, ...]:
            return getattr, eval(arguments)

    torch.save({"w": torch.ones(2), "call": Call()}, tmp_path / "w.pt")
    with pytest.raises(UnsupportedError, match="which no checkpoint needs"):
        reshard.open(tmp_path / "w.pt")


def test_records_that_share_attributes_without_end_are_refused(tmp_path: Path) -> None:
    n = 20_000
    attributes = b"}q\0(" + b"".join(b"J" + i.to_bytes(4, "little") + b"N" for i in range(n)) + b"u"
    one = b"ccollections\nOrderedDict\n)\x81h\0b"
    (tmp_path / ".metadata").write_bytes(b"\x80\x02(" + attributes + one * n + b"t.")
    (tmp_path / "__0_0.distcp").touch()
    with pytest.raises(UnsupportedError, match="share attributes more often than any writer does"):
        reshard.open(tmp_path)  # without the limit it would look at 4 * 10^8 names


def test_a_list_of_chunks_that_many_tensors_share_is_refused(tmp_path: Path) -> None:
    at, extent = torch.Size((0,)), torch.Size((1,))
    chunks = [ChunkStorageMetadata(at, extent)] * 1000
    described = TensorStorageMetadata(TensorProperties(torch.float32), extent, chunks)
    names = [f"w{i}" for i in range(1000)]
    places = {MetadataIndex(name, at): _StorageInfo("__0_0.distcp", 0, 4) for name in names}
    metadata = Metadata({name: replace(described) for name in names}, {}, places)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    (tmp_path / "__0_0.distcp").touch()
    with pytest.raises(UnsupportedError, match="shared by more tensors than any writer does"):
        reshard.open(tmp_path)


def test_long_texts_that_many_entries_share_are_refused(tmp_path: Path) -> None:
    text = "x" * 5000
    torch.save({"w": {(text, i): i for i in range(9)}}, tmp_path / "w.pt")
    with pytest.raises(UnsupportedError, match="a key of a dict has more than 4096 bytes"):
        reshard.open(tmp_path / "w.pt")
    (tmp_path / "__0_0.distcp").touch()
    for places, what in (
        ({MetadataIndex(text): _StorageInfo("__0_0.distcp", 0, 4)}, "the name of a tensor"),
        ({MetadataIndex("w"): _StorageInfo(text, 0, 4)}, "the path of a file"),
    ):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({}, {}, places)))
        with pytest.raises(UnsupportedError, match=f"{what} has 5000 bytes, at most 4096 are read"):
            reshard.open(tmp_path)
    place = _StorageInfo("__0_0.distcp", 0, 4, [text])
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({}, {}, {MetadataIndex("w"): place})))
    with pytest.raises(UnsupportedError, match="a transform has 5000 bytes, at most 256 are read"):
        reshard.open(tmp_path)


def test_a_shared_dict_that_sets_a_key_often_is_walked_a_bounded_number_of_times(tmp_path: Path) -> None:
    """The same key again and again makes one value, so that the number of values does not limit the time."""
    n = 20_000
    same = b"}q\0(" + b"K\1K\1" * n + b"u"
    value = b"\x80\x02](" + same + b"h\0" * n + b"e."
    heads = [pickle.dumps(head, 2) for head in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    (tmp_path / "w.pt").write_bytes(b"".join([*heads, value, pickle.dumps([], 2)]))
    with pytest.raises(UnsupportedError, match="unfold into more than"):
        reshard.open(tmp_path / "w.pt")


@pytest.mark.parametrize("kind", ["set", "frozenset"])
def test_a_key_that_shares_its_parts_is_refused(kind: str, tmp_path: Path) -> None:
    """The hash of a tuple visits shared tuples again each time: here 2^45 parts."""
    key = b"K\1" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(45))
    with zipfile.ZipFile(tmp_path / "w.pt", "w") as archive:
        content = b"\x80\x02}X\1\0\0\0ac__builtin__\n" + kind.encode() + b"\n](" + key + b"e\x85Rs."
        archive.writestr("w/data.pkl", content)
        archive.writestr("w/version", "3\n")
    with pytest.raises(UnsupportedError, match="nested too deep, or too many"):
        reshard.open(tmp_path / "w.pt")


@pytest.mark.parametrize("is_grid", [True, False])
def test_chunks_in_a_grid_and_others(tmp_path: Path, is_grid: bool) -> None:  # noqa: FBT001
    """Rows and columns of unequal sizes, each in a file of its own; and a box across the grid."""
    whole = torch.arange(60.0).reshape(6, 10)
    boxes = [((0, 0), (4, 3)), ((0, 3), (4, 7)), ((4, 0), (2, 3)), ((4, 3), (2, 7))]
    if not is_grid:
        boxes = [((0, 0), (6, 3)), ((0, 3), (4, 7)), ((4, 3), (2, 7))]
    folder, chunks, places = tmp_path / "step-5", [], {}
    folder.mkdir()
    for n, (offset, shape) in enumerate(boxes):
        at, extent = torch.Size(offset), torch.Size(shape)
        part = whole[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))]
        torch.save(part.t().contiguous().t() if n else part.contiguous(), folder / f"__{n}_0.distcp")  # strides differ
        chunks.append(ChunkStorageMetadata(at, extent))
        n_bytes = (folder / f"__{n}_0.distcp").stat().st_size
        places[MetadataIndex("w", at, n)] = _StorageInfo(f"__{n}_0.distcp", 0, n_bytes)
    described = TensorStorageMetadata(TensorProperties(torch.float32), whole.shape, chunks)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({"w": described}, {}, places)))
    with reshard.open(folder) as checkpoint:
        assert checkpoint.read("w").tolist() == whole.tolist()
        assert checkpoint.read("w", np.s_[3:6, 2:9]).tolist() == whole[3:6, 2:9].tolist()
        assert sorted((one.offset, one.shape) for one in checkpoint["w"].shards) == sorted(boxes)
        layout = {"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": [None, "tp"]}]}
        assert checkpoint.load(layout, rank=1)["w"].tolist() == whole[:, 5:].tolist()
    missing = Metadata({"w": replace(described, chunks=chunks[:-1])}, {}, places)
    (folder / ".metadata").write_bytes(pickle.dumps(missing))
    with pytest.raises(CoverageError, match="uncovered"):
        reshard.open(folder)
