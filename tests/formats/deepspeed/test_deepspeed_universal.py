"""Universal folders of DeepSpeed that `convert` writes. `tests/peers` loads them with DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import reshard
from reshard.errors import ArgumentError, DestinationExistsError, UnsupportedError

DATA = Path(__file__).parents[2] / "data" / "torch"
MODEL = {"a.w": np.arange(6, dtype=np.float32).reshape(2, 3), "a.b": np.ones(3, ml_dtypes.bfloat16), "n": np.array(7)}
STATE = {
    f"{slot}.{name}": MODEL[name].astype(np.float32) + i
    for name in ("a.w", "a.b")
    for i, slot in enumerate(("adam_m", "adam_v"))
}


def write(folder: Path, state: dict[str, Any] = STATE, **options: Any) -> Path:
    """A universal folder of these tensors."""
    reshard.save(folder / "source", 4, MODEL, state)
    return Path(reshard.convert(folder / "source", folder / "out", to="deepspeed-universal", **options).path)


def test_the_files_are_those_that_deepspeed_reads(tmp_path: Path) -> None:
    folder = write(tmp_path)
    assert folder.name == (tmp_path / "out" / "latest_universal").read_text() == "global_step4_universal"
    found = {path.relative_to(folder / "zero").as_posix() for path in (folder / "zero").rglob("*.pt")}
    slots = ("fp32", "exp_avg", "exp_avg_sq", "step")
    assert found == {
        "optimizer_state.pt",
        "n/fp32.pt",
        *(f"{name}/{slot}.pt" for name in ("a.w", "a.b") for slot in slots),
    }
    for name in ("a.w", "a.b"):
        for i, slot in enumerate(("exp_avg", "exp_avg_sq")):
            one = torch.load(folder / "zero" / name / f"{slot}.pt", weights_only=True)
            assert list(one) == ["param"]
            assert one["param"].numpy().tobytes() == (MODEL[name].astype(np.float32) + i).tobytes()
        weight = torch.load(folder / "zero" / name / "fp32.pt", weights_only=True)["param"]
        assert weight.dtype == torch.float32
        assert (weight.numpy() == MODEL[name].astype(np.float32)).all()
        step = torch.load(folder / "zero" / name / "step.pt", weights_only=True)
        assert (step.dtype, step.shape, step.item()) == (torch.float32, (), 4)
    options = torch.load(folder / "zero" / "optimizer_state.pt", weights_only=True)
    assert options["optimizer_state_dict"]["state"][0]["step"].item() == 4
    # The engine pairs its groups with these, and loads nothing of a group without partner.
    assert len(options["param_groups"]) > 100
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        states = torch.load(folder / name, weights_only=True)
        assert (states["global_steps"], states["mp_world_size"]) == (4, 1)


def test_it_opens_with_the_same_tensors(tmp_path: Path) -> None:
    write(tmp_path)
    with reshard.open(tmp_path / "out") as found:
        assert set(found.keys("model")) == {"a.w.fp32", "a.b.fp32", "n.fp32"}
        assert (found.iteration, found.extra()["optimizer_step"]) == (4, 4)
        for key, value in STATE.items():
            slot, _, name = key.partition(".")
            other = {"adam_m": "exp_avg", "adam_v": "exp_avg_sq"}[slot]
            assert found.read(f"{name}.{other}").tobytes() == value.tobytes()
        assert found.read("n.fp32") == 7
    assert reshard.verify(tmp_path / "out").ok


@pytest.mark.parametrize("sample", ["ds_zero1_bf16", "ds_zero3_bf16", "ds_zero2_fp32", "ds_zero1_optim_bf16"])
def test_saves_of_deepspeed_keep_fp32_weights_and_groups(sample: str, tmp_path: Path) -> None:
    report = reshard.convert(DATA / sample / "checkpoint", tmp_path / "out", to="deepspeed-universal")
    with reshard.open(DATA / sample / "checkpoint") as source, reshard.open(tmp_path / "out") as found:
        n_checked = 0
        for key in source:
            if key.endswith((".fp32", ".exp_avg", ".exp_avg_sq")):
                assert found.read(key).tobytes() == source.read(key).tobytes(), key
                n_checked += 1
        assert n_checked >= 21
        right = source.extra()["optimizer"]["param_groups"]
        assert found.extra()["optimizer_step"] == source.extra()["optimizer_step"]
        assert found.extra()["note"] == "client state"
    options = torch.load(Path(report.path, "zero", "optimizer_state.pt"), weights_only=True)
    groups = options["param_groups"][: len(right)]
    assert [group["weight_decay"] for group in groups] == [group["weight_decay"] for group in right]
    # Stage 3 gives the options of one group to all: those in which they differ are left to the run.
    assert ("weight_decay" in options["optimizer_state_dict"]["param_groups"][0]) == (len(right) == 1)


def test_shares_and_overwriting(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(DestinationExistsError):
        write(tmp_path)
    folder = write(tmp_path, overwrite=True, part="model")
    assert {path.name for path in (folder / "zero").glob("*/*.pt")} == {"fp32.pt"}
    for share in ((0, 2), (1, 2)):
        report = reshard.convert(tmp_path / "source", tmp_path / "shared", to="deepspeed-universal", share=share)
    assert report.pending == ()
    with reshard.open(tmp_path / "shared") as found:
        assert found.read("a.w.exp_avg").tobytes() == STATE["adam_m.a.w"].tobytes()
    torch.save({}, folder / "mp_rank_00_model_states.pt")
    with pytest.raises(DestinationExistsError, match="not written by an earlier conversion"):
        write(tmp_path, overwrite=True)


def test_counters_without_state_are_left_out(tmp_path: Path) -> None:
    reshard.save(tmp_path / "run", 3, {"w": np.ones(2, np.float32)}, format="checkpoint1")
    report = reshard.convert(tmp_path / "run", tmp_path / "universal", to="deepspeed-universal")
    assert "`epoch_num`" in report.warnings[0]
    with reshard.open(tmp_path / "universal") as found:
        assert list(found.keys()) == ["w.fp32"]


@pytest.mark.parametrize("name", ["global_step", "step_num", "epoch_num", "loss_scale"])
def test_a_tensor_of_several_elements_is_no_counter(name: str, tmp_path: Path) -> None:
    tensors: dict[str, Any] = {name: np.ones(3, np.float32), "w": np.ones(2, np.float32), "n": np.arange(2)}
    reshard.save_file(tensors, tmp_path / "a.safetensors")
    report = reshard.convert(tmp_path / "a.safetensors", tmp_path / "universal", to="deepspeed-universal")
    assert (report.n_tensors, report.warnings) == (3, ())
    with reshard.open(tmp_path / "universal") as found:
        assert {key: (found[key].dtype, found.read(key).tolist()) for key in found.keys()} == {  # noqa: SIM118
            f"{name}.fp32": ("F32", [1, 1, 1]), "w.fp32": ("F32", [1, 1]), "n.fp32": ("I64", [0, 1]),
        }  # fmt: skip


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ({"adam_m.w": np.zeros(2, np.float32)}, {}, "step of the optimizer is not stored"),
        ({"adam_m.w": np.zeros(3, np.float32)}, {"iteration": 1}, "has the shape"),
        ({"adam_m.other": np.zeros(2, np.float32)}, {"iteration": 1}, "belongs to a weight"),
        ({"n" * 256: np.zeros(2, np.float32)}, {}, "cannot be the name of a folder: it has 256 bytes"),
        ({"x/y": np.zeros(2, np.float32)}, {}, "name of a folder: it has a path"),
        ({"x": np.zeros(2)}, {}, "is F64"),
        (
            {f"{slot}.{name}": np.float32(i) for i, name in enumerate("wv") for slot in ("step",)}
            | {"adam_m.w": np.zeros(2, np.float32), "v": np.float32(1)},
            {},
            "one step for all",
        ),
    ],
)
def test_what_deepspeed_would_load_wrongly_is_refused(
    tensors: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    reshard.save_file({"w": np.zeros(2, np.float32), **tensors}, tmp_path / "m.safetensors")
    with pytest.raises(UnsupportedError, match=message):
        reshard.convert(tmp_path / "m.safetensors", tmp_path / "out", to="deepspeed-universal", **options)
    assert not (tmp_path / "out").exists()


def test_options_without_meaning_are_refused(tmp_path: Path) -> None:
    for options in ({"dtype": "bfloat16"}, {"files": {"max_shard_size": "1MB"}}, {"files": {"dedup": False}}):
        with pytest.raises(ArgumentError):
            write(tmp_path / str(len(str(options))), **options)


def test_values_that_could_not_be_read_again_are_left_out(tmp_path: Path) -> None:
    extra = {
        "a.b": 1,
        "a": {"b": 2},
        "keys": {1: 1, "1": 2},
        "floats": {0.5: 1},
        "kept": {"x": [1, {2: 3}]},
    }
    reshard.save(tmp_path / "run", 3, {"w": np.ones(2, np.float32)}, extra=extra)
    report = reshard.convert(tmp_path / "run", tmp_path / "out", to="deepspeed-universal")
    left_out = [warning.partition(" is not written")[0] for warning in report.warnings]
    assert sorted(left_out) == ["`a`", "`floats`", "`keys`"]
    with reshard.open(tmp_path / "out") as checkpoint:
        assert checkpoint.extra()["a.b"] == 1
        assert checkpoint.extra()["kept"] == {"x": [1, {2: 3}]}
