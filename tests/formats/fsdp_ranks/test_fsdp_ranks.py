"""The files that FSDP ranks save with `torch.save`: shards of a device mesh, decoded without executing anything."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import os
import re
import shutil
import zipfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.helpers.command_line import run
from tests.helpers.mesh_files import as_rank, distributed, save_fsdp2, save_ranks
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Partial, _StridedShard

import reshard
import reshard.torch
from reshard import _core
from reshard.errors import (
    CheckpointNotFoundError,
    CoverageError,
    DamagedFileError,
    MismatchError,
    ReshardError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = ((7, 5), (1, 3), (5,))


def tensors() -> dict[str, torch.Tensor]:
    made = {f"w{n}": torch.arange(float(np.prod(shape))).reshape(shape) + n for n, shape in enumerate(SHAPES)}
    return {**made, "half": torch.arange(10).bfloat16(), "empty": torch.zeros(0, 3)}


def assert_all(path: Any, expected: dict[str, torch.Tensor]) -> None:
    with reshard.open(path) as checkpoint:
        assert set(checkpoint.keys("model")) == set(expected)
        for key, tensor in expected.items():
            assert torch.equal(reshard.torch.as_tensor(checkpoint.read(key)), tensor), key


@pytest.mark.parametrize("sizes", [(1,), (3,), (2, 2)])
def test_every_placement_of_a_mesh(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """All combinations of shards and copies, with dims that the mesh does not divide, and ranks without an element."""
    kinds: list[Any] = [Replicate(), Shard(0), Shard(1)]
    expected: dict[str, torch.Tensor] = {}

    def make(mesh: Any) -> dict[str, Any]:
        state: dict[str, Any] = {"plain": torch.arange(3)}
        for name, tensor in tensors().items():
            for n, placements in enumerate(itertools.product(kinds, repeat=len(sizes))):
                if all(one.is_replicate() or one.dim < tensor.ndim for one in placements):
                    state[f"{name}.{n}"] = distributed(tensor, mesh, placements)
                    expected[f"{name}.{n}"] = tensor
        return state

    save_ranks(tmp_path / "ranks", sizes, make)
    assert_all(tmp_path / "ranks", {**expected, "plain": torch.arange(3)})
    assert_all(str(tmp_path / "ranks" / "*.pt"), {**expected, "plain": torch.arange(3)})


def test_parameters_and_a_part_of_the_mesh(tmp_path: Path) -> None:
    def make(mesh: Any) -> dict[str, Any]:
        inner = distributed(torch.arange(14.0).reshape(7, 2), mesh["b"], [Shard(0)])
        return {
            "model": {"w": torch.nn.Parameter(distributed(torch.ones(5, 3), mesh, [Shard(0), Shard(1)])), "v": inner}
        }

    save_ranks(tmp_path / "ranks", (2, 2), make)
    expected = {"model.w": torch.ones(5, 3), "model.v": torch.arange(14.0).reshape(7, 2)}
    assert_all(tmp_path / "ranks", expected)


def test_strided_shards_are_those_of_torch(tmp_path: Path) -> None:
    """As FSDP on top of tensor parallelism: the dim is first divided by the axis to the right."""
    whole = torch.arange(30.0).reshape(10, 3)

    def make(mesh: Any) -> dict[str, Any]:
        from torch.distributed.tensor import DTensor

        fsdp, tp = mesh.get_coordinate()
        local = whole.chunk(2)[tp].chunk(2)[fsdp].clone()
        placements = [_StridedShard(0, split_factor=2), Shard(0)]
        return {"w": DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=(3, 1))}

    save_ranks(tmp_path / "ranks", (2, 2), make)
    assert_all(tmp_path / "ranks", {"w": whole})


def test_placements_that_no_file_holds(tmp_path: Path) -> None:
    from torch.distributed.tensor import DTensor

    for n, placements in enumerate(([Partial()], [_StridedShard(0, split_factor=3)])):

        def make(mesh: Any, placements: Any = placements) -> dict[str, Any]:
            local = torch.ones(4) if n == 0 else torch.ones(2)  # noqa: B023
            return {
                "w": DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size([4]), stride=(1,))
            }

        save_ranks(tmp_path / str(n), (2,), make)
        with pytest.raises(UnsupportedError, match=r"placement") as caught:
            reshard.open(tmp_path / str(n))
        assert caught.value.key == "w"


class Model(torch.nn.Module):
    """Layers whose sizes four ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(11, 6)
        self.fc = torch.nn.Linear(6, 5)
        self.norm = torch.nn.LayerNorm(5)


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize(("world_size", "replicas"), [(4, 1), (4, 2), (3, 1)])
def test_a_run_of_fsdp2(tmp_path: Path, world_size: int, replicas: int, caplog: pytest.LogCaptureFixture) -> None:
    actor = tmp_path / "global_step_7" / "actor"
    expected = save_fsdp2(actor, world_size, Model, replicas=replicas)
    (actor / "huggingface").mkdir()
    (actor / "huggingface" / "tokenizer.json").write_text("{}")
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world_size}))
    assert_all(actor, expected["model"])
    with reshard.open(actor) as checkpoint:
        assert (checkpoint.format, checkpoint.iteration, checkpoint.ranks()) == (
            "fsdp-ranks",
            7,
            list(range(world_size)),
        )
        for number, state in expected["optimizer"]["state"].items():
            for slot in ("exp_avg", "exp_avg_sq", "step"):
                found = checkpoint.read(f"optimizer.state.{number}.{slot}")
                assert np.array_equal(found, state[slot].numpy()), (number, slot)
        extra = checkpoint.extra(rank=1)
        assert (extra["rng.cpu"] == torch.get_rng_state().numpy()).shape == torch.get_rng_state().numpy().shape
        assert extra["lr_scheduler.last_epoch"] == 0
        assert extra["optimizer.param_groups"][0]["lr"] == 0.1
        layout = {"mesh": {"tp": 2}, "rules": [{"match": "fc.weight", "cut": [None, "tp"]}, {"match": "*"}]}
        assert (checkpoint.load(layout, rank=1)["fc.weight"] == expected["model"]["fc.weight"][:, 3:].numpy()).all()
    result = run("convert", actor, tmp_path / "hf")
    assert result.exit_code == 0, result.output
    with reshard.open(tmp_path / "hf") as checkpoint:
        assert set(checkpoint.keys()) == set(expected["model"])
        assert all((checkpoint.read(key) == tensor.numpy()).all() for key, tensor in expected["model"].items())
    assert (tmp_path / "hf" / "tokenizer.json").is_file()
    assert "fsdp-ranks, iteration 7" in run("inspect", actor).output
    assert run("verify", actor).exit_code == 0
    reshard.convert(actor, tmp_path / "dcp", to="dcp")
    with reshard.open(tmp_path / "dcp") as checkpoint:
        assert "optimizer.state.0.exp_avg" in checkpoint
    assert f"did you mean `{actor}`?" in run("inspect", tmp_path / "global_step_7").stderr


def test_a_run_without_ranks_goes_on_from_them(tmp_path: Path) -> None:
    actor = tmp_path / "global_step_7" / "actor"
    expected = save_fsdp2(actor, 2, Model)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    config = {"load_checkpoint": str(actor), "resume_training": True}
    with reshard.torch.Checkpointer.from_config(config, root=tmp_path / "run", signals=()) as checkpointer:
        decision = checkpointer.resume(model=model, optimizer=optimizer, scheduler=scheduler)
    assert decision.initial_step == 7
    assert all(torch.equal(tensor, expected["model"][key]) for key, tensor in model.state_dict().items())
    found, saved = optimizer.state_dict(), expected["optimizer"]
    assert found["param_groups"][0]["lr"] == saved["param_groups"][0]["lr"]
    for number, state in saved["state"].items():
        assert all(torch.equal(found["state"][number][slot], value) for slot, value in state.items())


def test_missing_files_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_fsdp2(tmp_path / "a", 4, Model)
    (tmp_path / "a" / "optim_world_size_4_rank_2.pt").unlink()
    with caplog.at_level(logging.WARNING, "reshard"), reshard.open(tmp_path / "a") as checkpoint:
        assert checkpoint.keys("optimizer") == []
    assert "the optimizer is not read: missing: `optim_world_size_4_rank_2.pt`" in caplog.text
    for rank in (1, 3):
        (tmp_path / "a" / f"model_world_size_4_rank_{rank}.pt").unlink()
    with pytest.raises(CheckpointNotFoundError, match="holds 2 of 4 files") as caught:
        reshard.open(tmp_path / "a")
    assert "missing: `model_world_size_4_rank_1.pt`, `model_world_size_4_rank_3.pt`" in str(caught.value)
    rest = [tmp_path / "a" / f"model_world_size_4_rank_{rank}.pt" for rank in (0, 2)]
    with pytest.raises(CoverageError, match=re.escape("the files of the ranks 0, 1 hold")):
        reshard.open(rest)
    with pytest.raises(UnsupportedError, match="no rank the whole model"):
        reshard.open(rest[0])


def test_values_of_the_ranks_are_compared(tmp_path: Path) -> None:
    save_fsdp2(tmp_path / "a", 2, Model)

    def change(kind: str, how: Callable[[Any], None]) -> None:
        path = tmp_path / "a" / f"{kind}_world_size_2_rank_1.pt"
        value = torch.load(path, weights_only=False)
        how(value)
        torch.save(value, path)

    change("extra_state", lambda value: value["lr_scheduler"].update(last_epoch=9))
    with reshard.open(tmp_path / "a") as checkpoint:
        epochs = [checkpoint.data.run_values(rank) for rank in range(2)]
        assert [one.by_name["lr_scheduler.last_epoch"] for one in epochs if one is not None] == [0, 9]
        with pytest.raises(MismatchError, match=r"different values of `lr_scheduler`: .* on rank 0, .* on rank 1"):
            checkpoint.data.run_values(2)
    result = run("convert", tmp_path / "a", tmp_path / "dcp", "--to", "dcp")
    assert "values of single ranks are written for rank 0 only" in result.output
    with as_rank(1, 2):
        change("optim", lambda value: value["param_groups"][0].update(lr=0.25))
    with (
        reshard.open(tmp_path / "a") as checkpoint,
        pytest.raises(MismatchError, match=r"different values of `optimizer\.param_groups`"),
    ):
        checkpoint.extra(0)


def test_files_of_several_runs(tmp_path: Path) -> None:
    save_ranks(tmp_path / "a", (2,), lambda mesh: {"w": distributed(torch.ones(4), mesh, [Shard(0)])})
    save_ranks(tmp_path / "b", (2,), lambda mesh: {"w": distributed(torch.ones(6), mesh, [Shard(0)])})
    save_ranks(tmp_path / "c", (2,), lambda mesh: {"w": distributed(torch.ones(6) * 2, mesh, [Replicate()])})
    save_ranks(tmp_path / "d", (2,), lambda mesh: {"w": distributed(torch.ones(6), mesh, [Replicate()])})
    name = "model_world_size_2_rank_1.pt"
    shutil.copy(tmp_path / "b" / name, tmp_path / "a" / name)
    with pytest.raises(DamagedFileError, match=r"F32 and shape \(6,\), and a DTensor of F32 and shape \(4,\)"):
        reshard.open(tmp_path / "a")
    shutil.copy(tmp_path / "c" / name, tmp_path / "d" / name)
    with reshard.open(tmp_path / "d") as checkpoint, pytest.raises(MismatchError, match="rank 1 differ"):
        checkpoint.read("w")
    shutil.copy(tmp_path / "b" / name, tmp_path / "b" / "model_world_size_3_rank_1.pt")
    with pytest.raises(DamagedFileError, match="runs with 2, 3 ranks"):
        reshard.open(tmp_path / "b")


def test_copies_are_compared_under_other_names_too(tmp_path: Path) -> None:
    def make(mesh: Any) -> dict[str, Any]:
        value = 1 + mesh.get_coordinate()[0]
        return {
            "w": distributed(torch.ones(4), mesh, [Replicate(), Shard(0)]),
            "v": distributed(torch.full((4,), float(value)), mesh, [Replicate(), Shard(0)]),
        }

    save_ranks(tmp_path / "a", (2, 2), make)
    with reshard.open(tmp_path / "a") as checkpoint:
        assert (checkpoint.read("w") == 1).all()
        with pytest.raises(MismatchError, match=r"`v` is read as one value.* on rank 2 differ from those on rank 0"):
            checkpoint.read("v")
    with pytest.raises(MismatchError, match="`v` is read as one value"):
        reshard.convert(tmp_path / "a", tmp_path / "b", select={"rename": {"v": "u"}})
    swapped = {"rules": [{"from": "v", "to": "w"}, {"from": "w", "to": "v"}]}
    with reshard.open(tmp_path / "a") as checkpoint, checkpoint.renamed(swapped) as renamed:
        assert (renamed.read("v") == 1).all()
        with pytest.raises(MismatchError, match="`v` is read as one value"):
            renamed.read("w")


def test_files_of_many_ranks_are_held_in_columns(tmp_path: Path) -> None:
    """A tensor is listed once for all ranks whose parts are equal, and tensors that lie alike share their files."""
    save_ranks(
        tmp_path / "a",
        (6,),
        lambda mesh: {name: distributed(torch.arange(16.0), mesh, [Shard(0)]) for name in ("v", "w")},
    )
    index = _core.Index()
    read = []
    for rank in range(6):
        path = str(tmp_path / "a" / f"model_world_size_6_rank_{rank}.pt")
        read.append((path, index.add_torch_file(path), rank))
    tensors = _core.read_torch_ranks(read, n_ranks=6)
    found = [(Path(one.path).name[-4:-3], one.key, one.local) for one in tensors.tensors()]
    assert found == [(rank, key, (n,)) for key in "vw" for rank, n in (("0", 3), ("5", 1))]
    assert [one.local for one in tensors.tensors(1)] == [(3,), (3,)]
    assert tensors.has_values() == [False] * 6
    assert tensors.add_to(index, ["w", "v"], "") == []
    assert tensors.first_different(index, ["w"]) is None
    assert [(one.offset, one.shape, one.files) for one in index.shards("v")] == [
        ((3 * rank,), (3 if rank < 5 else 1,), [rank]) for rank in range(6)
    ]
    with pytest.raises(KeyError):
        tensors.first_different(index, ["u"])


def test_flattened_state_of_fsdp1_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_ranks(tmp_path / "a", (2,), lambda mesh: {"w": distributed(torch.ones(4), mesh, [Shard(0)])})
    for rank in range(2):
        state = {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.full((2,), float(rank))}},
            "param_groups": [],
        }
        torch.save(state, tmp_path / "a" / f"optim_world_size_2_rank_{rank}.pt")
    with caplog.at_level(logging.WARNING, "reshard"), reshard.open(tmp_path / "a") as checkpoint:
        assert "optimizer.state.0.exp_avg" not in checkpoint
        assert checkpoint.read("optimizer.state.0.step") == 3
        assert (checkpoint.read("w") == 1).all()
    assert "each rank flattened its own" in caplog.text
    assert run("inspect", tmp_path / "a").exit_code == 0
    reshard.convert(tmp_path / "a", tmp_path / "hf")


def rewrite(path: Path, data: bytes, change: Callable[[bytes], bytes]) -> None:
    """Write a file with another description of its tensors, and a right checksum of it."""
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, change(content) if name.endswith("/data.pkl") else content)


def replaced(content: bytes, old: bytes, new: bytes) -> bytes:
    return content.replace(old, new, 1)


def test_hostile_descriptions(tmp_path: Path) -> None:
    """Each is an error of the package, or whole tensors of the right shape."""
    save_ranks(tmp_path / "a", (2,), lambda mesh: {"w": distributed(torch.ones(5, 2), mesh, [Shard(0)])})
    path = tmp_path / "a" / "model_world_size_2_rank_1.pt"
    data = path.read_bytes()
    changes = [
        (b"_local_tensor", b"_locals_tensor"),
        (b"_spec", b"_spac"),
        (b"placements", b"placement_"),
        (b"placement_types\nShard", b"placement_types\nPartial"),
        (b"placement_types\nShard", b"placement_types\nOther"),
        (b"torch.distributed.tensor\nDTensor", b"torch.distributed.tensor\nATensor"),
        (b"torch.distributed.tensor\nDTensor", b"os\nsystem"),
        (b"device_mesh\nDeviceMesh", b"os\nsystem"),
        (b"_mesh_layout\n_FlatLayout", b"builtins\neval"),
        (b"K\x05K\x02\x86", b"K\x06K\x02\x86"),
        (b"K\x05K\x02\x86", b"K\x05K\x03\x86"),
        (b"K\x05K\x02\x86", b"K\x05\x85"),
        (b"K\x05K\x02\x86", b"J\xff\xff\xff\x7fK\x02\x86"),
        (b"K\x05K\x02\x86", b"J\xff\xff\xff\xffK\x02\x86"),
        (b"torch\nfloat32", b"torch\nfloat64"),
        (b"torch\nfloat32", b"torch\nfloat4"),
        (b"_coordinate_on_dim", b"_coordinate_of_dim"),
        (b"shard_order", b"shards_order"),
    ]
    for old, new in changes:
        assert data.count(old), old
        length = new if b"\n" in old or old[:1] == b"K" else new[: len(old)].ljust(len(old), b"_")
        rewrite(path, data, partial(replaced, old=old, new=length))
        with contextlib.suppress(ReshardError), reshard.open(tmp_path / "a") as checkpoint:
            assert checkpoint.read("w").shape == (5, 2), old
    generator = np.random.default_rng(0)
    for _ in range(int(os.environ.get("RESHARD_FUZZ", "60"))):
        at, value = generator.random(), int(generator.integers(256))

        def change(content: bytes, at: float = at, value: int = value) -> bytes:
            place = int(at * len(content))
            return content[:place] + bytes([value]) + content[place + 1 :]

        rewrite(path, data, change)
        with contextlib.suppress(ReshardError), reshard.open(tmp_path / "a") as checkpoint:
            assert all(checkpoint.read(key).size <= 10 for key in checkpoint)


def test_samples_of_fsdp1() -> None:
    """What torch has saved in two processes."""
    folder = Path(__file__).parents[2] / "data" / "torch" / "fsdp1_ranks"
    with reshard.open(folder / "sharded") as checkpoint:
        assert {key: checkpoint.shape(key) for key in checkpoint} == {
            "0.weight": (5, 3),
            "0.bias": (5,),
            "1.weight": (2, 5),
            "1.bias": (2,),
        }
        assert all(np.isfinite(checkpoint.read(key)).all() for key in checkpoint)
    with pytest.raises(UnsupportedError, match="_flat_param` holds the parameters of a module"):
        reshard.open(folder / "local")
