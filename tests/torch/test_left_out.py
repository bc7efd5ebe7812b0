"""Frozen parameters that saves leave out: digests, saves, resumes, and what refuses such a checkpoint."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tests.helpers.ranks import Job
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import reshard
from reshard.cli import main
from reshard.errors import ArgumentError, DamagedFileError, MismatchError, UnsupportedError
from reshard.formats.left_out import LeftOut
from reshard.torch import Checkpointer
from reshard.torch.left_out import digest_of

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.ranks.group import TorchGroup

_MASK = (1 << 64) - 1


def oracle(values: np.ndarray) -> int:
    """The digest as its definition says, element by element."""
    total = 0
    for i, element in enumerate(values.reshape(-1)):
        x = (int.from_bytes(element.tobytes(), "little") + (i + 1) * 0x9E3779B97F4A7C15) & _MASK
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = ((x ^ (x >> shift)) * factor) & _MASK
        total += x ^ (x >> 31)
    return total & _MASK


@pytest.mark.parametrize("seed", range(40))
def test_a_digest_is_the_sum_of_those_of_the_regions_of_any_layout(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(1, 6, rng.integers(0, 4)))
    dtype = rng.choice(["u1", "i2", "f4", "f8", "?", "i8", "c8"])
    raw = rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), dtype=np.uint8)
    array = (raw % 2 if dtype == "?" else raw).view(dtype).reshape(shape)
    tensor = torch.from_numpy(array)
    regions = [((0,) * len(shape), shape)]
    for _ in range(3):  # divide one region after the other
        offset, extents = regions.pop(int(rng.integers(len(regions))))
        if not extents:
            regions.append((offset, extents))
            break
        dim = int(rng.integers(len(extents)))
        n = int(rng.integers(0, extents[dim] + 1))
        first, second = list(extents), list(extents)
        first[dim], second[dim] = n, extents[dim] - n
        after = list(offset)
        after[dim] += n
        regions += [(offset, tuple(first)), (tuple(after), tuple(second))]
    parts = [tensor[tuple(slice(a, a + n) for a, n in zip(o, e, strict=True))] for o, e in regions]
    before = array.copy()
    total = sum(digest_of(part, shape, offset) for part, (offset, _) in zip(parts, regions, strict=True))
    assert total % 2**64 == digest_of(tensor, shape, (0,) * len(shape)) == oracle(array)
    assert array.tobytes() == before.tobytes()


def test_a_digest_of_many_blocks() -> None:
    tensor = torch.arange(600_000, dtype=torch.int32).reshape(600, 1000)
    whole = digest_of(tensor, (600, 1000), (0, 0))
    halves = [digest_of(tensor[:, :300], (600, 1000), (0, 0)), digest_of(tensor[:, 300:], (600, 1000), (0, 300))]
    assert sum(halves) % 2**64 == whole
    x = np.arange(600_000, dtype=np.uint64) + np.arange(1, 600_001, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    assert whole == int((x ^ (x >> np.uint64(31))).sum(dtype=np.uint64))


def test_a_digest_of_complex_numbers_and_of_small_floats() -> None:
    both = torch.tensor([1 + 2j, -3.5 + 0j], dtype=torch.complex128)
    assert digest_of(both, (2,), (0,)) == oracle(np.array([1, 2, -3.5, 0]))
    assert digest_of(both[1:], (2,), (1,)) + digest_of(both[:1], (2,), (0,)) & _MASK == digest_of(both, (2,), (0,))
    small = torch.tensor([0.5, -1.0]).to(torch.bfloat16)
    assert digest_of(small, (2,), (0,)) == oracle(small.view(torch.int16).numpy())
    tiny = torch.tensor([0.5, -1.0]).to(torch.float8_e4m3fn)
    assert digest_of(tiny, (2,), (0,)) == oracle(tiny.view(torch.uint8).numpy())


class Towers(nn.Module):
    """A frozen tower and a head that is trained."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tower: Any = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)).requires_grad_(False)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.tower(x))
        return out


def train(
    root: str | Path, n_steps: int, model: nn.Module | None = None, resume: dict[str, Any] | None = None, **options: Any
) -> tuple[Any, Any]:
    """Train to a step, and save it."""
    model = Towers() if model is None else model
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.1)
    options = {"leave_out_frozen": True, "async_save": False, "signals": (), **options}
    with Checkpointer(root, save_every=1, **options) as checkpointer:
        decision = checkpointer.resume(model=model, optimizer=optimizer, **(resume or {}))
        for step in range(decision.initial_step + 1, n_steps + 1):
            torch.manual_seed(step)
            loss = model(torch.randn(4, 8)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step(step, loss=loss)
    return model, decision


def record_of(path: str | Path) -> LeftOut:
    with reshard.open(path) as checkpoint:
        found = LeftOut.of_checkpoint(checkpoint)
    assert found is not None
    return found


_FROZEN = {f"tower.{n}.{kind}" for n in (0, 1, 2) for kind in ("weight", "bias")}


def test_a_frozen_tower_is_left_out_and_the_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    train(tmp_path / "a", 2)
    with reshard.open(tmp_path / "a") as checkpoint:
        assert not _FROZEN & set(checkpoint)
        assert {"head.weight", "tower.1.running_mean", "exp_avg.head.weight"} <= set(checkpoint)
    record = record_of(tmp_path / "a")
    assert (set(record.tensors), record.source) == (_FROZEN, None)
    assert record.n_bytes == 4 * (8 * 64 + 64 + 2 * 64 + 64 * 8 + 8)
    resumed, decision = train(tmp_path / "a", 4)
    assert decision.initial_step == 2
    assert any("leaves out 6 tensors" in line for line in decision.warnings)
    straight, _ = train(tmp_path / "b", 4, leave_out_frozen=False)
    for key, one in straight.state_dict().items():
        assert torch.equal(one, resumed.state_dict()[key]), key


def test_another_base_is_refused_by_name_before_anything_is_restored(tmp_path: Path) -> None:
    train(tmp_path, 1)
    other = Towers()
    with torch.no_grad():
        other.tower[2].weight[3, 5] += 1e-6
        other.head.bias.fill_(7)
    with pytest.raises(MismatchError, match=r"leaves out `tower.2.weight`, and the run has other values") as error:
        train(tmp_path, 2, other)
    assert "same base weights" in str(error.value.hint)
    assert other.head.weight.grad is None
    with pytest.raises(MismatchError, match=r"tower.0.bias` is F64 of shape \(64,\), and was F32"):
        train(tmp_path, 2, Towers().double(), resume={"cast": True})
    with pytest.raises(MismatchError, match="leaves out"):  # also without the option
        train(tmp_path, 2, other, leave_out_frozen=False)


def test_values_that_are_no_numbers_are_compared_by_bits(tmp_path: Path) -> None:
    def with_nan(bits: int) -> Towers:
        model = Towers()
        model.tower[2].bias.view(torch.int32)[0] = bits
        return model

    train(tmp_path, 1, with_nan(0x7FC00001))
    assert train(tmp_path, 2, with_nan(0x7FC00001))[1].initial_step == 1
    with pytest.raises(MismatchError, match=r"tower.2.bias"):
        train(tmp_path, 3, with_nan(0x7FC00002))


def test_the_base_is_loaded_from_init_from_and_again_where_it_differs(tmp_path: Path) -> None:
    base = tmp_path / "base.safetensors"
    reshard.torch.save_file({f"tower.{key}": one for key, one in Towers(5).tower.state_dict().items()}, base)
    start = {"init_from": str(base), "strict": {"missing": "keep"}}
    model, _ = train(tmp_path / "run", 1, Towers(6), resume=start)
    assert record_of(tmp_path / "run").source == str(base)
    again, decision = train(tmp_path / "run", 2, Towers(7), resume=start)
    assert decision.initial_step == 1
    assert torch.equal(again.tower[0].weight, model.tower[0].weight)
    assert set(record_of(tmp_path / "run").tensors) == _FROZEN
    with pytest.raises(MismatchError, match=r"loaded from `.*base.safetensors` then"):
        train(tmp_path / "run", 3, Towers(8))


def test_values_that_only_a_checkpoint_has_are_saved(tmp_path: Path) -> None:
    train(tmp_path, 1, Towers(1), leave_out_frozen=False)
    _, decision = train(tmp_path, 2, Towers(2))
    assert any("tower.0.weight" in line and "only the checkpoint has" in line for line in decision.warnings)
    with reshard.open(tmp_path) as checkpoint:
        # The norm begins with the same values in every program.
        assert {"tower.0.weight", "tower.2.bias"} <= set(checkpoint)
        assert "tower.1.weight" not in checkpoint
    assert train(tmp_path, 3, Towers(3))[1].initial_step == 2


def test_a_parameter_that_is_trained_later_is_saved_from_then_on(tmp_path: Path, caplog: Any) -> None:
    model = Towers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path, save_every=1, leave_out_frozen=True, async_save=False, signals=()) as checkpointer:
        checkpointer.resume(model=model, optimizer=optimizer)
        for step in range(1, 5):
            if step == 3:
                model.tower[2].requires_grad_(True)
            model(torch.ones(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step(step)
            if step == 3:
                model.tower[2].requires_grad_(False)
    assert "tower.2.weight" in caplog.text
    assert "saved from now on" in caplog.text
    left = {key for key in _FROZEN if not key.startswith("tower.2.")}
    assert set(record_of(tmp_path).tensors) == left
    with reshard.open(tmp_path / "iteration_00000002") as checkpoint:
        assert "tower.2.weight" not in checkpoint
    with reshard.open(tmp_path / "iteration_00000004") as checkpoint:
        assert torch.equal(torch.from_numpy(checkpoint.read("tower.2.weight")), model.tower[2].weight)


@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize("how", ["itself", "data"])
def test_an_average_that_needs_no_gradient_is_saved(tmp_path: Path, first: int, how: str, caplog: Any) -> None:
    class WithTeacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.student = nn.Linear(4, 4)
            self.teacher: Any = nn.Linear(4, 4).requires_grad_(False)

    model = WithTeacher()
    optimizer = torch.optim.SGD(model.student.parameters(), lr=0.1)
    with Checkpointer(tmp_path, save_every=1, leave_out_frozen=True, async_save=False, signals=()) as checkpointer:
        checkpointer.resume(model=model, optimizer=optimizer)
        for step in range(1, 5):
            model.student(torch.ones(4)).square().sum().backward()
            optimizer.step()
            with torch.no_grad():
                for mean, one in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                    if step >= first:
                        (mean.data if how == "data" else mean).lerp_(one, 0.5)
            checkpointer.step(step)
    assert "teacher.weight" in caplog.text
    with reshard.open(tmp_path) as checkpoint:
        assert torch.equal(torch.from_numpy(checkpoint.read("teacher.weight")), model.teacher.weight)


def test_what_needs_all_tensors_refuses_the_checkpoint_by_name(tmp_path: Path) -> None:
    root = tmp_path / "run"
    train(root, 1)
    formats: tuple[Any, ...] = ("huggingface", "checkpoint2", "dcp")
    for to in formats:
        with pytest.raises(
            UnsupportedError, match=r"leaves out `tower.0.bias`, .* and a conversion needs all"
        ) as error:
            reshard.convert(root, tmp_path / to, to=to)
        assert "without leaving out frozen parameters" in str(error.value.hint)
        assert not (tmp_path / to).exists()
    reshard.convert(root, tmp_path / "head.safetensors", select={"only": "head."}, part="model")
    with pytest.raises(UnsupportedError, match=r"leaves out `tower.2.bias`, `tower.2.weight`"):
        reshard.convert(root, tmp_path / "some.safetensors", select={"only": ["head.", "tower.2."]}, part="model")
    with pytest.raises(UnsupportedError, match=r"leaves out .*`load` needs all"):
        reshard.load(root)
    assert set(reshard.load(root, keys=["head.bias"]).state) == {"head.bias"}
    assert "exp_avg.head.bias" in reshard.load(root, part="optimizer").state


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "checkpoint1"}, "needs the format checkpoint2"),
        ({"exports": {"integrated": True}}, "`integrated` writes whole weights"),
        ({"hf_every": 1, "merge": True}, "`merge` writes whole weights"),
        ({"hf_every": 1}, "`hf_every` writes all weights"),
    ],
)
def test_options_that_need_all_tensors_are_refused_before_the_first_step(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        train(tmp_path, 1, **options)


def test_a_model_on_device_meta_is_refused(tmp_path: Path) -> None:
    train(tmp_path, 1)
    with torch.device("meta"):
        model = Towers()
    with pytest.raises(MismatchError, match=r"has digest \(none"):
        train(tmp_path, 2, model)


def sharded(root: Path, n_steps: int, seed: int) -> Any:
    """The work of a rank: train under FSDP2; returns the error, if there is one."""

    def work(group: TorchGroup) -> str:
        model = Towers(seed)
        if group.world_size > 1:
            mesh = init_device_mesh("cpu", (group.world_size,))
            for one in (*model.tower, model.head, model):
                fully_shard(one, mesh=mesh)
        try:
            train(root, n_steps, model)
        except MismatchError as error:
            return str(error)
        return ""

    return work


@pytest.mark.slow
def test_another_number_of_ranks_verifies_the_digests(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with Job(2, sharded(root, 2, 0)) as job:
        assert job.values() == ["", ""]
    with reshard.open(root) as checkpoint:
        assert not _FROZEN & set(checkpoint)
    with Job(1, sharded(root, 3, 0)) as job:
        assert job.values() == [""]
    with Job(1, sharded(root, 4, 1)) as job:
        assert "leaves out" in job.values()[0]
    with Job(2, sharded(root, 4, 0)) as job:
        assert job.values() == ["", ""]
    with Job(2, sharded(root, 5, 9)) as job:
        found = job.values()
    assert found[0] == found[1]
    assert "leaves out `tower.0.bias`, `tower.0.weight`, `tower.2.bias`, `tower.2.weight`" in found[0]


def test_the_commands_say_what_a_save_leaves_out(tmp_path: Path) -> None:
    root = tmp_path / "run"
    train(root, 1)

    def printed(*words: str) -> str:
        done = CliRunner().invoke(main, [*words, str(root)])
        assert done.exit_code == 0, done.output
        return " ".join(done.output.split())

    assert "left out 6 tensors, 4896 bytes, made by the program: tower.0.bias, tower.0.weight," in printed("inspect")
    assert "left out 6 tensors, 4896 bytes, made by the program. The program gives them" in printed("explain")
    assert "left out of the save: 6 tensors, 4896 bytes, made by the program" in printed("verify")
    summary = {"n_tensors": 6, "n_bytes": 4896, "source": None, "keys": sorted(_FROZEN)}
    assert json.loads(printed("inspect", "--json"))["left_out"] == summary
    assert json.loads(printed("explain", "--json"))["left_out"] == summary


def test_a_conversion_is_refused_if_it_is_not_known_what_is_left_out(tmp_path: Path) -> None:
    train(tmp_path / "run", 1)
    iteration = tmp_path / "run" / "iteration_00000001"
    file = iteration / "extra-0000000.json"
    file.write_bytes(file.read_bytes().replace(b"left out", b"left-out"))
    for part in (None, "model", "all"):
        with pytest.raises(DamagedFileError, match="not known whether the save leaves out tensors") as error:
            reshard.convert(iteration, tmp_path / "out", part=part, to="huggingface")
        assert "`select=Select(only=...)` converts the tensors that it names" in str(error.value)
    assert not (tmp_path / "out").exists()
    reshard.convert(iteration, tmp_path / "out", select={"only": "head."}, part="model")
    assert sorted(reshard.load_file(tmp_path / "out")) == ["head.bias", "head.weight"]
    result = CliRunner().invoke(main, ["inspect", str(iteration)])
    assert result.exit_code == 0, result.output
