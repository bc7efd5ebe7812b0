"""State that differs between ranks: kept for each of them, or refused. Real ranks under FSDP2, TP and DDP."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._dynamo  # what DTensor imports when it is first used: here once, instead of in every rank
from tests.helpers.cases import slow
from tests.helpers.ranks import Job
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import reshard
from reshard.errors import MismatchError
from reshard.torch import Checkpointer
from reshard.torch.restore import Report, apply
from reshard.torch.state import describe

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.ranks.group import TorchGroup

BLOCK = 4


def local_part(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


class EightBit(torch.optim.Optimizer):
    """Momentum in 8 bits: codes and a scale for each block of what this rank holds, as plain tensors."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            gradient, state = local_part(parameter.grad).flatten(), self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["absmax"] = torch.zeros(-(-gradient.numel() // BLOCK))
                state["codes"] = torch.zeros(gradient.numel(), dtype=torch.int8)
                state["scale"] = torch.zeros(1)
                state["seen"] = 0.0
            scales = state["absmax"].repeat_interleave(BLOCK)[: gradient.numel()]
            momentum = 0.9 * state["codes"].float() / 127 * scales + gradient
            blocks = nn.functional.pad(momentum, (0, -momentum.numel() % BLOCK)).reshape(-1, BLOCK)
            state["step"] += 1
            state["absmax"].copy_(blocks.abs().amax(1) if len(blocks) else state["absmax"])
            scales = state["absmax"].repeat_interleave(BLOCK)[: gradient.numel()].clamp(min=1e-30)
            state["codes"].copy_((momentum / scales * 127).round())
            state["scale"].copy_(gradient.abs().sum())
            state["seen"] += float(gradient.sum())
            part = local_part(parameter)
            part.sub_(self.param_groups[0]["lr"] * momentum.reshape(part.shape))


def built(kind: str, world_size: int, optimizer: Any = EightBit) -> tuple[nn.Module, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(10)
    if "TP" in kind:
        norm = nn.BatchNorm1d(10 // (world_size if kind == "TP" else 1), affine=False, track_running_stats=False)
    model: nn.Module = nn.Sequential(nn.Linear(6, 10), norm, nn.Tanh(), nn.Linear(10, 5))
    if kind.startswith("FSDP2"):
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",)))
    elif kind == "TP":
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
        plan: Any = {"0": ColwiseParallel(use_local_output=True), "3": RowwiseParallel()}
        parallelize_module(model, mesh, plan, src_data_rank=None)
    elif kind == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "DDP without broadcast":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer releases of torch have another name for it
            model = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    return model, optimizer(model.parameters())


def train(model: nn.Module, optimizer: Any, made: Checkpointer, rank: int, steps: range, *, blocking: bool) -> None:
    """Each rank has its own batch, unless the model is tensor parallel."""
    is_same = any(isinstance(module, nn.BatchNorm1d) and module.running_mean is None for module in model.modules())
    for step in steps:
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + (0 if is_same else rank)))
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = model(batch).square().sum()
            loss.backward()
        optimizer.step()
        made.step(step, loss=loss)
        if step == 2:
            made.save(blocking=blocking)


def raw(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Everything that this rank has, and of which type."""
    found = {name: buffer.tolist() for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        found[name] = local_part(parameter).tolist()
        for slot, value in optimizer.state.get(parameter, {}).items():
            plain = local_part(value).tolist() if isinstance(value, torch.Tensor) else value
            found[f"{slot}.{name}"] = [type(value).__name__, plain]
    return found


def checkpointer(root: Path, **options: Any) -> Checkpointer:
    given: dict[str, Any] = {"signals": (), "commit": {"durable": False}, "timeout": 40.0, **options}
    return Checkpointer(root, **given)


def run(root: Path, kind: str, last: int, *, n_ranks: int = 2, strict: bool = True, **options: Any) -> Any:
    """Resume and train to a step; of each rank `[what it has when it resumes, in the end, warnings]` or an error."""
    optimizer = options.pop("optimizer", EightBit)

    def work(group: TorchGroup) -> Any:
        model, own = built(kind, group.world_size, optimizer)
        with checkpointer(root, **options) as made:
            decision = made.resume(model=model, optimizer=own, strict=strict)
            first = raw(model, own)
            blocking = not options.get("async_save", True)
            train(model, own, made, group.rank, range(decision.initial_step + 1, last + 1), blocking=blocking)
        return [first, raw(model, own), [line for line in decision.warnings if "no sampler was given" not in line]]

    with Job(n_ranks, work) as job:
        return job.outcomes()


MODES: list[dict[str, Any]] = [{"async_save": False}, {}, {"overlap": True}, {"format": "checkpoint1"}]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mode"), [*(("TP", mode) for mode in MODES), *(("FSDP2", m) for m in MODES[:3])])
def test_plain_state_of_sharded_parameters_goes_on_bit_for_bit(kind: str, mode: dict[str, Any], tmp_path: Path) -> None:
    whole = [one["value"][1] for one in run(tmp_path, kind, 4, **mode)]
    assert whole[0]["codes.0.weight"] != whole[1]["codes.0.weight"]
    assert whole[0]["scale.0.weight"] != whole[1]["scale.0.weight"]
    assert whole[0]["seen.0.weight"] != whole[1]["seen.0.weight"]
    back = [one["value"] for one in run(tmp_path, kind, 4, **mode)]
    assert not [line for one in back for line in one[2] if "has no checksums" not in line]  # Checkpoint 1.0 has none
    assert [one[1] for one in back] == whole
    assert {back[0][0][f"{slot}.0.weight"][0] for slot in ("step", "codes", "absmax", "scale")} == {"Tensor"}


class Noting(torch.optim.AdamW):
    """Notes of each step, beside tensors that are sharded as their parameters and tensors of this rank alone."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("notes", []).append(float(local_part(parameter).detach().sum()))
            state["codes"] = local_part(parameter).detach().flatten().to(torch.int8)
        return loss


@pytest.mark.slow
def test_tensors_beside_a_list_in_the_state_of_a_sharded_parameter_stay_tensors(tmp_path: Path) -> None:
    whole = [one["value"][1] for one in run(tmp_path, "FSDP2", 4, optimizer=Noting)]
    assert whole[0]["notes.0.weight"] != whole[1]["notes.0.weight"]
    with reshard.open(tmp_path) as opened:
        assert opened.shape("exp_avg.0.weight") == (10, 6)
    back = [one["value"] for one in run(tmp_path, "FSDP2", 4, optimizer=Noting)]
    assert [one[1] for one in back] == whole
    assert back[0][0]["exp_avg.0.weight"][0] == "DTensor"


@pytest.mark.slow
def test_plain_state_of_sharded_parameters_is_refused_under_another_layout(tmp_path: Path) -> None:
    saved = run(tmp_path, "TP", 2)
    assert all("value" in one for one in saved), saved
    for kind, n_ranks, place in (("TP", 1, "rank 0 of 1"), ("TP", 5, "rank 4 of 5"), ("whole", 1, "rank 0 of 1")):
        for one in run(tmp_path, kind, 2, n_ranks=n_ranks):
            assert one["error"] == "MismatchError", one
            assert "`absmax.0.weight`, `codes.0.weight`, `scale.0.weight`, `seen.0.weight`" in one["text"]
            assert "cannot be resharded: it is rank-local state, saved by 2 ranks" in one["text"]
            assert place in one["text"]
            assert "resume with the same number of ranks" in one["hint"]
    # As many ranks, of which each holds another part.
    for one in run(tmp_path, "FSDP2 of TP", 2):
        assert "`codes.3.weight`" in one["text"]
        assert "which holds another region" in one["text"]


@pytest.mark.slow
def test_plain_state_that_does_not_fit_begins_anew_where_that_is_asked_for(tmp_path: Path) -> None:
    saved = run(tmp_path, "TP", 2)[0]["value"][1]
    [one] = run(tmp_path, "TP", 3, n_ranks=1, strict=False)
    first, last, told = one["value"]
    assert sorted(key for key in first if key.startswith(("codes", "step"))) == ["codes.3.bias", "step.3.bias"]
    assert len(first["0.weight"]) == 2 * len(saved["0.weight"])
    assert (last["step.0.weight"][1], last["step.3.bias"][1]) == (1, 3)  # that bias is whole on every rank
    assert any("the checkpoint lacks `absmax.0.weight`" in line for line in told)


@pytest.mark.slow(disk=False)
def test_state_of_a_part_so_small_that_it_is_one_number(tmp_path: Path) -> None:
    """Ranks agree which state each keeps, although that of one looks like a counter."""

    def work(group: TorchGroup) -> Any:
        torch.set_num_threads(1)
        model = nn.Linear(1, 3, bias=False)
        nn.init.ones_(model.weight)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = EightBit(model.parameters())
        with checkpointer(tmp_path) as made:
            start = made.resume(model=model, optimizer=optimizer).initial_step
            if start == 0:
                model(torch.ones(2, 1) + group.rank).square().sum().backward()
                optimizer.step()
                made.step(1)
                made.save(blocking=True)
        described = describe(model, optimizer)
        return [raw(model, optimizer), sorted(described.local), sorted(described.optimizer)]

    with Job(2, work) as job:
        saved = job.values()
    assert [len(value[0]["codes.weight"][1]) for value in saved] == [2, 1]
    assert [value[1] for value in saved] == [["codes.weight"]] * 2
    assert [value[2] for value in saved] == [["absmax.weight", "scale.weight", "step.weight"]] * 2
    with Job(2, work) as job:
        assert job.values() == saved


@pytest.mark.slow
def test_equal_counters_are_replicas_under_any_layout(tmp_path: Path) -> None:
    def adam(parameters: Any) -> Any:
        return torch.optim.AdamW(parameters, lr=0.01)

    saved = run(tmp_path, "TP", 2, optimizer=adam)
    assert all("value" in one for one in saved), saved
    with reshard.open(tmp_path) as opened:
        assert opened.read("step.0.weight") == 2
        assert "rank_local" not in opened.extra(1)
    for n_ranks in (1, 5):
        for one in run(tmp_path, "TP", 2, n_ranks=n_ranks, optimizer=adam):
            assert one["value"][0]["step.0.weight"] == ["Tensor", 2]


MEAN = "running_mean"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["FSDP2", "DDP without broadcast"])
def test_buffers_that_differ_are_kept_for_each_rank(kind: str, tmp_path: Path) -> None:
    def sgd(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=0.01)

    whole = [one["value"][1] for one in run(tmp_path, kind, 4, optimizer=sgd)]
    name = next(key for key in whole[0] if key.endswith(MEAN))
    assert whole[0][name] != whole[1][name]
    back = [one["value"] for one in run(tmp_path, kind, 4, optimizer=sgd)]
    assert [one[1] for one in back] == whole
    assert [one[2] for one in back] == [[], []]
    [one] = run(tmp_path, "whole", 2, n_ranks=1, optimizer=sgd)
    first, _, told = one["value"]
    assert first[f"1.{MEAN}"] == back[0][0][name]
    assert any(
        f"`1.{MEAN}`" in line
        and "differed between the 2 ranks that saved: all ranks get the values of the first one" in line
        for line in told
    )


@pytest.mark.slow
def test_buffers_that_ddp_broadcasts_are_those_of_the_first_rank(tmp_path: Path) -> None:
    def sgd(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=0.01)

    whole = [one["value"][1] for one in run(tmp_path, "DDP", 4, optimizer=sgd)]
    assert whole[0][f"module.1.{MEAN}"] != whole[1][f"module.1.{MEAN}"]
    assert "rank_local" not in reshard.open(tmp_path).extra(1)
    back = [one["value"] for one in run(tmp_path, "DDP", 4, optimizer=sgd)]
    assert [one[1] for one in back] == whole
    assert back[0][0] == back[1][0]


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("mode", [MODES[0], *slow([*MODES[1:], {"files": {"dedup": False}}])], ids=str)
def test_plain_parameters_that_have_drifted_apart_are_refused(mode: dict[str, Any], tmp_path: Path) -> None:
    def work(group: TorchGroup) -> Any:
        model = nn.Linear(2, 2)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        made = checkpointer(tmp_path / "root", **mode)
        made.resume(model=model, optimizer=optimizer)
        model(torch.full((1, 2), float(group.rank + 1))).sum().backward()
        optimizer.step()
        made.step(1, loss=float(group.rank))
        told = []
        try:
            made.save()
            made.close()
        except MismatchError as error:
            told = [error.key, str(error)]
        with checkpointer(tmp_path / "kept", verify={"may_differ": ["*weight"]}, **mode) as made:
            made.resume(model=model, optimizer=optimizer)
            made.step(1, loss=float(group.rank))
            made.save(blocking=True)
        own = raw(model, optimizer)
        torch.nn.init.zeros_(model.weight)
        with checkpointer(tmp_path / "kept", verify={"may_differ": ["*weight"]}, **mode) as made:
            made.resume(model=model, optimizer=optimizer)
        assert raw(model, optimizer) == own
        return told

    with Job(2, work) as job:
        for key, text in job.values():
            assert key == "weight"
            assert "`weight`: the copies on the ranks that hold it differ: crc32c" in text
            assert "on rank 0; crc32c" in text
            assert "may_differ" in text
    assert not list((tmp_path / "root").glob("iteration_*"))

    def alone(group: TorchGroup) -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        checkpointer(tmp_path / "kept", **mode).resume(model=model, optimizer=optimizer)

    if mode.get("format") != "checkpoint1":
        with Job(1, alone) as job:
            [one] = job.outcomes()
            assert one is not None
            assert "`weight`, `momentum_buffer.weight` cannot be resharded" in one["text"]


class Stateful:
    """Anything with state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


@pytest.mark.slow(disk=False)
def test_objects_and_samplers_that_differ_are_refused(tmp_path: Path) -> None:
    def work(group: TorchGroup) -> Any:
        told = []
        cases: list[tuple[bool, dict[str, Any]]] = [
            (True, {}),
            (False, {"extra": {"ema": Stateful(group.rank)}}),
            (False, {"sampler": Stateful(torch.full((2,), group.rank))}),
            (False, {"extra": {"ema": {"mean": torch.tensor([3.0, group.rank]), "w": torch.ones(2)}}}),
            (True, {"extra": {"ema": reshard.per_rank(Stateful(group.rank))}, "sampler": Stateful(7)}),
        ]
        for number, (same, options) in enumerate(cases):
            torch.manual_seed(0)
            made = checkpointer(tmp_path / str(number))
            made.resume(model=nn.Linear(1, 1), **options)
            made.step(1, loss=group.rank)
            try:
                made.save(blocking=True)
            except MismatchError as error:
                told.append([same, str(error), error.hint])
            else:
                told.append([same])
        return told

    with Job(2, work) as job:
        for plain, of_object, of_sampler, of_tensor, wrapped in job.values():
            assert plain == wrapped == [True]
            assert "the state of `extra['ema']` differs between ranks: `" in of_object[1]
            assert of_sampler == [False]  # saved: a position is that of each rank
            words = "`extra.ema.mean` differs between ranks: `extra.ema.mean[1]` is 0.0 on rank 0, 1.0 on rank 1"
            assert words in of_tensor[1]
            assert all("reshard.per_rank" in one[2] for one in (of_object, of_tensor))


class Scaled(nn.Linear):
    """Keeps a number beside its tensors."""

    n = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"n": self.n}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.n = state["n"]


@pytest.mark.slow
def test_extra_state_of_modules_is_kept_for_each_rank_where_it_differs(tmp_path: Path) -> None:
    def work(group: TorchGroup) -> Any:
        torch.manual_seed(0)
        one, other = Scaled(1, 1), Scaled(1, 1)
        model = nn.ModuleDict({"a": one, "b": other})
        with checkpointer(tmp_path) as made:
            decision = made.resume(model=model)
            if decision.fresh:
                one.n, other.n = 5 + group.rank, 9
                made.step(1)
                made.save(blocking=True)
        return [one.n, other.n, [line for line in decision.warnings if "differed between" in line]]

    for n_ranks, expected in ((2, [[5, 9], [6, 9]]), (2, [[5, 9], [6, 9]]), (3, [[5, 9]] * 3)):
        with Job(n_ranks, work) as job:
            values = job.values()
        assert [value[:2] for value in values] == expected
        if n_ranks == 3:
            assert "the state beside the tensors of `a` differed between the 2 ranks that saved" in values[0][2][0]


@pytest.mark.slow(disk=False)
def test_state_besides_tensors_of_a_whole_parameter_must_be_equal(tmp_path: Path) -> None:
    def work(size: int, group: TorchGroup) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer.state[model.weight] = {"seen": [torch.full((size,), float(group.rank))]}
        try:
            describe(model, optimizer)
        except MismatchError as error:
            return [error.key, str(error)]
        return None

    for size in (3, 40_000):  # the larger one is not sent to other ranks
        with Job(2, functools.partial(work, size)) as job:
            for key, text in job.values():
                assert key == "weight"
                words = (
                    "the state of `weight` in the optimizer differs between ranks: `seen[0][0]` is 0.0 on rank 0, 1.0 "
                )
                assert words in text


@pytest.mark.parametrize("value", [{}, {"rank": 0}, 7, {"rank": "x", "world_size": 1, "state": {}, "differing": {}}])
def test_what_is_no_rank_local_state_is_refused(value: Any) -> None:
    with pytest.raises(MismatchError, match="`rank_local` is not valid rank-local state"):
        apply(describe(nn.Linear(1, 1)), {}, rank_local=value)


@pytest.mark.slow(disk=False)
def test_rank_local_state_is_saved_without_a_checkpointer(tmp_path: Path) -> None:
    """`describe`, `reshard.save`, `reshard.load` and `apply` by themselves."""

    def work(group: TorchGroup) -> Any:
        model, optimizer = built("FSDP2", group.world_size)
        is_saving = not list(tmp_path.iterdir())
        group.barrier(timeout=20)
        if is_saving:
            model(torch.randn(4, 6, generator=torch.Generator().manual_seed(group.rank))).square().sum().backward()
            optimizer.step()
            described = describe(model, optimizer)
            reshard.save(tmp_path, 1, **described.saving(), extra={"trainer": described.extra})
        else:
            described = describe(model, optimizer)
            loaded = reshard.load(tmp_path, described.layout)
            own = loaded.extra["rank_local"]
            assert apply(described, loaded.state, loaded.extra["trainer"], rank_local=own) == Report()
        return raw(model, optimizer)

    with Job(2, work) as job:
        saved = job.values()
    with Job(2, work) as job:
        assert job.values() == saved


@pytest.mark.slow(disk=False)
def test_a_whole_parameter_with_state_on_some_ranks_is_refused() -> None:
    """The state of the other ranks would be lost."""

    def work(group: TorchGroup) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        if group.rank == 1:
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
        described = describe(model, optimizer, compare=False)  # about to be replaced
        assert described.extra["optimizer"]["groups"]
        try:
            describe(model, optimizer)
        except MismatchError as error:
            return [error.key, str(error)]
        return None

    with Job(2, work) as job:
        for key, text in job.values():
            assert key == "weight"
            assert "`weight` has the state `exp_avg` in the optimizer on rank 1, and not on rank 0" in text


def test_empty_groups_of_two_optimizers_of_one_class_get_their_own_options() -> None:
    def made(first: float, second: float) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        groups: list[list[Any]] = [[{"params": [one]}, {"params": []}] for one in (model.weight, model.bias)]
        return model, [torch.optim.SGD(of_one, lr=lr) for of_one, lr in zip(groups, (first, second), strict=True)]

    described = describe(*made(0.25, 0.5))
    model, optimizers = made(0.1, 0.1)
    arrays = {key: one.detach().numpy() for key, one in described.to_save().items()}
    apply(describe(model, optimizers), arrays, described.extra)
    assert [[group["lr"] for group in one.param_groups] for one in optimizers] == [[0.25, 0.25], [0.5, 0.5]]
