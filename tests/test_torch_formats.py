"""Files of `torch.save` and folders of `torch.distributed.checkpoint` that real programs wrote, and hostile ones.

The expected tensors and values were taken from the live objects before they were saved.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

import reshard
from reshard import _core
from reshard.errors import CheckpointNotFoundError, DamagedFileError, ReshardError

DATA = Path(__file__).parent / "data" / "torch"
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
    with pytest.raises(CheckpointNotFoundError, match="none of the 2 steps"):
        reshard.open(root)
