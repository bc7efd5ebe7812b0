"""Runs that go on from what torch.distributed.checkpoint or `torch.save` saved, bit for bit; roots of torchtitan."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from tests.helpers.blocks import Blocks, batch, sharded, whole
from tests.helpers.ranks import Job
from tests.peers.required import long
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh

import reshard
from reshard.cli import main
from reshard.errors import DamagedFileError, MismatchError, UnsupportedError
from reshard.options import InitFrom
from reshard.torch import Checkpointer

if TYPE_CHECKING:
    from reshard.ranks.group import TorchGroup
    from reshard.resume import ResumeDecision

TITAN = Path(__file__).parents[2] / "data/torch/dcp_fsdp2/checkpoint"


class Training:
    """A small model with two groups of parameters, a scheduler and a tied tensor."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8))
        self.model[3].weight = self.model[2].weight
        first = list(self.model[0].parameters())
        ids = {id(one) for one in first}
        rest = [one for one in self.model.parameters() if id(one) not in ids]
        self.optimizer = torch.optim.AdamW([{"params": first, "lr": 0.01}, {"params": rest, "weight_decay": 0.3}])
        first_part = torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=0.5, total_iters=2)
        then = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.9)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.scheduler = torch.optim.lr_scheduler.SequentialLR(self.optimizer, [first_part, then], milestones=[2])

    def step(self, number: int) -> float:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
        loss = self.model(x).square().sum()
        loss.backward()
        self.optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of its own SequentialLR
            self.scheduler.step()
        self.optimizer.zero_grad()
        return float(loss.item())

    def resume(self, source: Path, root: Path, **options: Any) -> tuple[Checkpointer, ResumeDecision]:
        config = {"load_checkpoint": str(source), "resume_training": True}
        checkpointer = Checkpointer.from_config(config, root=root, signals=(), save_every=1)
        parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return checkpointer, checkpointer.resume(**parts | options)

    def goes_on_as(self, other: Training, source: Path, root: Path) -> ResumeDecision:
        """Whether this one, started from a checkpoint of `other`, makes its next three steps."""
        checkpointer, decision = self.resume(source, root)
        assert decision.initial_step == 5
        assert self.optimizer.state_dict()["param_groups"] == other.optimizer.state_dict()["param_groups"]
        with checkpointer:
            for number in range(6, 9):
                assert self.step(number) == other.step(number)
                checkpointer.step(number)
        assert all(torch.equal(a, b) for a, b in zip(states(self), states(other), strict=True))
        assert reshard.open(root).iteration == 8  # in the format of this package
        return decision


def states(training: Training) -> list[torch.Tensor]:
    moments = moments_of(training.optimizer)
    return [*training.model.state_dict().values(), *moments]


def moments_of(optimizer: Any) -> list[torch.Tensor]:
    """In the order of the parameters: that of the state is the order in which it was made."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [value for parameter in parameters for _, value in sorted(optimizer.state[parameter].items())]


def save(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it saves in one process
        dcp.save(state, checkpoint_id=path)  # type: ignore[attr-defined]


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("how", ["flat", "nested", "app", "torchtitan", "torch.save"])
def test_a_run_goes_on_from_what_torch_saved(how: str, tmp_path: Path) -> None:
    source, other = tmp_path / "theirs", Training()
    for number in range(1, 6):
        other.step(number)
    is_flat = how in ("flat", "torchtitan")
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    model, optimizer = get_state_dict(other.model, other.optimizer, options=options)
    scheduler = other.scheduler.state_dict()
    if how == "flat":
        save({"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 5}, source)
    elif how == "nested":
        save({"model": model, "optim": optimizer, "scheduler": scheduler, "step": torch.tensor(5)}, source)
    elif how == "app":  # without a step: the optimizer counts
        save({"app": {"model": model, "optim": optimizer, "scheduler": scheduler}}, source)
    elif how == "torchtitan":
        beside = {"train_state": {"step": 5, "ntokens_seen": 60}, "dataloader": {"dp_rank_0": b"opaque"}}
        save({**model, "optimizer": optimizer, "lr_scheduler": scheduler, **beside}, source / "step-5")
    else:
        parts = {"model": other.model.state_dict(), "optimizer": other.optimizer.state_dict()}
        torch.save({**parts, "scheduler": scheduler, "step": 5}, source)
    decision = Training().goes_on_as(other, source, tmp_path / "run")
    assert any("dataloader" in warning for warning in decision.warnings) == (how == "torchtitan")
    # The run's own checkpoints come first from then on.
    again = Training()
    checkpointer, decision = again.resume(source, tmp_path / "run")
    checkpointer.close()
    assert (decision.initial_step, Path(str(decision.path)).name) == (8, "iteration_00000008")


def test_state_that_is_not_read_is_refused_before_it_is_used(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(2))
    # torch stores a tuple of tensors as one value.
    betas = (torch.tensor(0.8), torch.tensor(0.9))
    optimizer = torch.optim.Adam([parameter], lr=0.1, betas=betas, foreach=False)
    parameter.grad = torch.ones(2)
    optimizer.step()
    save({"model": {"w": parameter.detach()}, "optimizer": optimizer.state_dict(), "step": 1}, tmp_path / "theirs")
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(2))})
    config = {"load_checkpoint": str(tmp_path / "theirs"), "resume_training": True}
    with (
        Checkpointer.from_config(config, root=tmp_path / "run", signals=()) as checkpointer,
        pytest.raises(
            UnsupportedError, match=r"theirs: `optimizer.param_groups.0.betas` holds a tensor inside"
        ) as caught,
    ):
        checkpointer.resume(model=model, optimizer=torch.optim.Adam(model.parameters(), betas=(0.5, 0.5)))
    assert model["w"].tolist() == [0, 0]
    assert "dcp_to_torch" in str(caught.value.hint)
    # As the hint says.
    dcp_to_torch_save(tmp_path / "theirs", tmp_path / "theirs.pt")
    config["load_checkpoint"] = str(tmp_path / "theirs.pt")
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.5, 0.5))
    with Checkpointer.from_config(config, root=tmp_path / "run2", signals=()) as checkpointer:
        checkpointer.resume(model=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["betas"] == betas
    assert model["w"].tolist() == [w.item() for w in parameter]


@pytest.mark.parametrize("how", ["flat", "nested", "torch.save"])
def test_options_that_are_tensors_are_restored(how: str, tmp_path: Path) -> None:
    other = Training()
    for group, lr in zip(other.optimizer.param_groups, (0.5, 0.25), strict=True):
        group["lr"] = torch.tensor(lr)
    options = StateDictOptions(flatten_optimizer_state_dict=how == "flat")
    model, optimizer = get_state_dict(other.model, other.optimizer, options=options)
    if how == "torch.save":
        torch.save({"model": model, "optimizer": other.optimizer.state_dict(), "step": 5}, tmp_path / "theirs")
    else:
        save({"model": model, "optimizer": optimizer, "step": 5}, tmp_path / "theirs")
    training = Training()
    for group in training.optimizer.param_groups:
        group["lr"] = torch.tensor(0.0)
    checkpointer, _ = training.resume(tmp_path / "theirs", tmp_path / "run", scheduler=None)
    checkpointer.close()
    assert [group["lr"] for group in training.optimizer.param_groups] == [torch.tensor(0.5), torch.tensor(0.25)]


@pytest.mark.parametrize("how", ["flat", "numbered"])
def test_betas_that_are_tensors_are_restored(how: str, tmp_path: Path) -> None:
    other = Training()
    for group, beta in zip(other.optimizer.param_groups, (0.5, 0.25), strict=True):
        group["betas"] = (torch.tensor(beta), torch.tensor(0.75))
    model, optimizer = get_state_dict(
        other.model, other.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    if how == "numbered":
        optimizer = other.optimizer.state_dict()
    torch.save({"model": model, "optimizer": optimizer, "step": 5}, tmp_path / "theirs")
    training = Training()
    betas = training.optimizer.param_groups[0]["betas"] = (torch.tensor(0.0), torch.tensor(0.0))
    checkpointer, _ = training.resume(tmp_path / "theirs", tmp_path / "run", scheduler=None)
    checkpointer.close()
    assert [group["betas"] for group in training.optimizer.param_groups] == [(0.5, 0.75), (0.25, 0.75)]
    assert [beta.item() for beta in betas] == [0.5, 0.75]  # in place: a captured CUDA graph refers to them


def test_a_group_named_by_another_kind_of_digit_is_none(tmp_path: Path) -> None:
    training = Training()
    groups = {"²": {"params": [0]}, "³": {"params": [1]}}
    optimizer = {"param_groups": groups, "state": {"0.weight": {"step": torch.ones(())}}}
    torch.save({"model": training.model.state_dict(), "optimizer": optimizer, "step": 5}, tmp_path / "x")
    with pytest.raises(MismatchError, match="lacks"):
        training.resume(tmp_path / "x", tmp_path / "run", scheduler=None)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    source, other = tmp_path / "theirs", Training()
    other.step(1)
    model, optimizer = get_state_dict(other.model, other.optimizer)
    save({"model": model, "optim": optimizer, "step": 1, "ema": {"decay": 0.5}}, source)
    with pytest.raises(MismatchError, match=r"lacks `scheduler`, and the run does not have `extra..ema"):
        Training().resume(source, tmp_path / "run")
    checkpointer, decision = Training().resume(source, tmp_path / "run", strict=False)
    checkpointer.close()
    assert any("ema" in warning for warning in decision.warnings)
    torch.save({"optimizer": other.optimizer.state_dict(), "model": model, "step": 1}, tmp_path / "file.pt")
    one_group = Training()
    one_group.optimizer = torch.optim.AdamW(one_group.model.parameters())
    with pytest.raises(MismatchError, match=r"in groups of \[2, 5\]; the run has groups of \[7\]"):
        one_group.resume(tmp_path / "file.pt", tmp_path / "other", scheduler=None)


@long
@pytest.mark.slow
def test_fsdp_goes_on_bit_for_bit_and_on_other_ranks(tmp_path: Path) -> None:
    def make() -> tuple[Any, Any]:
        model = Blocks()
        model.norm = nn.Identity()  # of buffers that differ between ranks DCP saves those of one
        model = sharded(model, init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def steps(model: Any, optimizer: Any, rank: int, numbers: range) -> list[float]:
        losses = []
        for number in numbers:
            optimizer.zero_grad()
            loss = model(batch(number, rank)).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.item()))
        return losses

    def content(model: Any, optimizer: Any) -> list[list[float]]:
        return [whole(one).flatten().tolist() for one in (*model.state_dict().values(), *moments_of(optimizer))]

    def first(group: TorchGroup) -> Any:
        model, optimizer = make()
        steps(model, optimizer, group.rank, range(1, 4))
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
        state = {**of_model, "optimizer": of_optimizer, "train_state": {"step": 3}}
        dcp.save(state, checkpoint_id=tmp_path / "titan" / "step-3")  # type: ignore[attr-defined]
        saved = content(model, optimizer)
        return saved, steps(model, optimizer, group.rank, range(4, 7)), content(model, optimizer)

    def second(group: TorchGroup) -> Any:
        model, optimizer = make()
        config = {"load_checkpoint": str(tmp_path / "titan"), "resume_training": True}
        root = tmp_path / f"run of {group.world_size}"
        with Checkpointer.from_config(config, root=root, signals=(), group=group) as checkpointer:
            decision = checkpointer.resume(model=model, optimizer=optimizer)
        assert decision.initial_step == 3
        assert decision.is_resharded == (group.world_size != 4)
        restored = content(model, optimizer)
        return restored, steps(model, optimizer, group.rank, range(4, 7)), content(model, optimizer)

    with Job(4, first) as job:
        known = job.values()
    with Job(4, second) as job:
        assert job.values() == known
    with Job(2, second) as job:
        assert [restored for restored, *_ in job.values()] == [known[0][0]] * 2


def test_a_root_of_steps_is_a_root_of_candidates(tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(TITAN, root)
    loaded = reshard.load(root)
    assert (loaded.iteration, loaded.decision.initial_step, loaded.decision.is_verified) == (10, 10, True)
    assert [one.reason.split(", ")[-1] for one in loaded.decision.verdicts] == [
        "but no `.metadata`: the save was not finished",
        "a lower step",
        "not needed: a better one is selected",
    ]
    assert loaded.common is not None
    assert loaded.common.step_num == 10
    assert loaded.extra["train_state.ntokens_seen"] == 123450
    # A flipped bit is found while the run loads, and the run goes back; `explain` finds it when it is told to read.
    with reshard.open(root) as checkpoint:
        wanted = checkpoint.read("optimizer.state.tok_embeddings.weight.exp_avg")[16:24].tobytes()
    for file in (root / "step-10").glob("*.distcp"):
        data = bytearray(file.read_bytes())
        if (at := data.find(wanted)) > 0:
            data[at + 3] ^= 16
            file.write_bytes(data)
    said = json.loads(CliRunner().invoke(main, ["explain", str(root), "--json"]).stdout)
    assert (said["iteration"], said["has_sums"], said["contents_read"]) == (10, True, False)
    said = json.loads(CliRunner().invoke(main, ["explain", str(root), "--json", "--verify"]).stdout)
    assert (said["iteration"], said["is_verified"]) == (3, True)
    loaded = reshard.load(root)
    assert (loaded.iteration, loaded.decision.initial_step) == (3, 3)
    assert "CRC-32" in loaded.decision.verdicts[1].reason
    (root / "step-3" / ".metadata").unlink()
    with pytest.raises(DamagedFileError, match=r"step-15: .*\n.*step-10: .*CRC-32.*\n.*step-3: ") as caught:
        reshard.load(root)
    assert caught.value.hint is not None


def test_saves_into_such_a_root_come_before_its_steps(tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(TITAN, root)
    reshard.save(root, 20, {"w": torch.zeros(2)})
    assert reshard.open(root).iteration == 20
    assert reshard.load(root).decision.initial_step == 20


class Average:
    """An object with tensors in a list and in a dict."""

    def __init__(self, value: float) -> None:
        self.state: dict[str, Any] = {
            "decay": value,
            "shadow": [torch.full((2,), value), torch.full((3, 1), value)],
            "named": {"w": torch.full((2,), value)},
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Whole(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()


@pytest.mark.parametrize("how", ["dcp", "torch.save"])
def test_objects_and_optimizers_with_a_state_dict_of_their_own(how: str, tmp_path: Path) -> None:
    layer, average = nn.Linear(2, 2), Average(0.5)
    optimizer = Whole(layer.parameters(), lr=0.5, momentum=0.9)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if how == "torch.save":
        average.state["numbered"] = {0: torch.ones(2), 1: torch.ones(2)}
    state = {"model": layer.state_dict(), "optim": optimizer.state_dict(), "ema": average.state, "step": 1}
    (torch.save if how == "torch.save" else save)(state, tmp_path / "theirs")
    other, found = nn.Linear(2, 2), Average(0.0)
    again = Whole(other.parameters(), lr=0.1, momentum=0.9)
    config = {"load_checkpoint": str(tmp_path / "theirs"), "resume_training": True}
    with Checkpointer.from_config(config, root=tmp_path / "run", signals=()) as checkpointer:
        assert checkpointer.resume(model=other, optimizer=again, extra={"ema": found}).initial_step == 1
    assert [tuple(one) for one in found.state.items() if one[0] == "decay"] == [("decay", 0.5)]
    assert type(found.state["shadow"]) is list
    assert all(map(torch.equal, found.state["shadow"], average.state["shadow"]))
    assert torch.equal(found.state["named"]["w"], average.state["named"]["w"])
    assert how == "dcp" or list(found.state["numbered"]) == [0, 1]
    assert again.param_groups[0]["lr"] == 0.5
    assert all(map(torch.equal, moments_of(again), moments_of(optimizer)))
    assert len(moments_of(again)) == 2


def test_state_by_name_for_an_optimizer_that_numbers_its_parameters_is_refused(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model, by_name = get_state_dict(layer, optimizer)
    save({"model": model, "optimizer": by_name, "step": 1}, tmp_path / "theirs")
    config = {"load_checkpoint": str(tmp_path / "theirs"), "resume_training": True}
    with (
        Checkpointer.from_config(config, root=tmp_path / "run", signals=()) as checkpointer,
        pytest.raises(UnsupportedError, match="is there, and cannot be loaded: it is stored by the names") as caught,
    ):
        checkpointer.resume(model=layer, optimizer=Whole(layer.parameters(), momentum=0.9))
    assert "Whole of the run" in str(caught.value)
    assert caught.value.key == "optimizer"


def test_a_start_with_the_state_of_such_an_optimizer_is_refused(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    optimizer = Whole(layer.parameters(), momentum=0.9)
    torch.save({"model": layer.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "theirs")
    start = InitFrom(tmp_path / "theirs", fresh_optimizer=False)
    with (
        Checkpointer(tmp_path / "run", signals=()) as checkpointer,
        pytest.raises(UnsupportedError, match="`optimizer` is a Whole with a `state_dict` of its own"),
    ):
        checkpointer.resume(model=layer, optimizer=optimizer, init_from=start)
