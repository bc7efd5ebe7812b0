"""A run that starts from something else, once; and what happens where a checkpoint and a run differ."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from click.testing import CliRunner
from tests.helpers.ranks import Job
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import reshard
from reshard.cli import main
from reshard.errors import ArgumentError, CheckpointNotFoundError, ConfigError, MismatchError, ReshardError
from reshard.options import InitFrom, Strict
from reshard.torch import Checkpointer

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.ranks.group import TorchGroup
    from reshard.resume import ResumeDecision


class Model(nn.Module):
    """An embedding, a layer and a head with a bias."""

    def __init__(self, rows: int = 6, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(rows, 4)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, rows)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layer(self.embed(ids)))
        return out


def train(model: nn.Module, optimizer: Any, n_steps: int = 1) -> None:
    for n in range(n_steps):
        optimizer.zero_grad()
        model(torch.tensor([0, 1, 2, 3 + n])).square().sum().backward()
        optimizer.step()


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), foreach=False, **options)


def saved(root: Path, rows: int = 6, *, steps: int = 2) -> tuple[Model, torch.optim.Optimizer]:
    """A run of some steps, saved."""
    model = Model(rows, seed=1)
    optimizer = adam(model)
    with Checkpointer(root, signals=()) as made:
        made.resume(model=model, optimizer=optimizer)
        train(model, optimizer, steps)
        made.step(steps)
        made.save(blocking=True)
    return model, optimizer


def resumed(root: Path, model: nn.Module, optimizer: Any = None, **options: Any) -> ResumeDecision:
    return Checkpointer(root, signals=()).resume(model=model, optimizer=optimizer, **options)


@pytest.fixture
def cli() -> Any:
    def call(*words: object) -> tuple[int, str, str]:
        result = CliRunner().invoke(main, [str(word) for word in words])
        return result.exit_code, result.stdout, result.stderr

    return call


def same(one: nn.Module, other: nn.Module) -> bool:
    states = one.state_dict(), other.state_dict()
    return states[0].keys() == states[1].keys() and all(
        torch.equal(states[0][key], states[1][key]) for key in states[0]
    )


def test_the_first_start_loads_the_weights_and_a_restart_goes_on_with_the_run(tmp_path: Path) -> None:
    pretrained, _ = saved(tmp_path / "pretrained")
    model = Model()
    optimizer = adam(model)
    with Checkpointer(tmp_path / "run", signals=()) as made:
        decision = made.resume(model=model, optimizer=optimizer, init_from=tmp_path / "pretrained")
        assert same(model, pretrained)
        assert not optimizer.state
        assert (decision.initial_step, decision.fresh, decision.restored) == (0, False, ("weights",))
        assert decision.init_from == str(tmp_path / "pretrained")
        assert any("holds no checkpoint: the run starts from" in reason for reason in decision.reasons)
        assert any("the run starts from the weights of" in reason for reason in decision.reasons)
        train(model, optimizer)
        made.step(1)
        made.save(blocking=True)
    again = Model()
    state = adam(again)
    decision = resumed(tmp_path / "run", again, state, init_from=tmp_path / "pretrained")
    assert same(again, model)
    assert not same(again, pretrained)
    assert (decision.initial_step, decision.init_from, len(state.state)) == (1, None, 5)
    assert "goes on from its own newest checkpoint" in decision.reasons[0]
    # A crash before the first save starts from the weights again.
    assert resumed(tmp_path / "crashed", Model(), init_from=tmp_path / "pretrained").init_from is not None


def test_after_a_crash_all_state_comes_from_the_run_itself(tmp_path: Path) -> None:
    pretrained, _ = saved(tmp_path / "pretrained")
    weights = InitFrom(tmp_path / "pretrained", fresh_optimizer=False)
    for n_done in (0, 3):
        model = Model(seed=5)
        optimizer = adam(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        progress = {"n": 0}
        objects: dict[str, Any] = {"scheduler": scheduler, "extra": {"progress": progress}}
        with Checkpointer(tmp_path / "run", signals=()) as made:
            decision = made.resume(model=model, optimizer=optimizer, init_from=weights, **objects)
            assert (decision.initial_step, progress["n"], scheduler.last_epoch) == (n_done, n_done, n_done)
            assert same(model, pretrained) is (not n_done)
            if not n_done:
                assert any("the weights and the state of the optimizer of" in reason for reason in decision.reasons)
                train(model, optimizer, 3)
                for _ in range(3):
                    scheduler.step()
                progress["n"] = 3
                made.step(3, save=True)


def test_an_iteration_of_the_same_root_is_not_loaded_again(tmp_path: Path) -> None:
    saved(tmp_path / "run")
    decision = resumed(tmp_path / "run", (model := Model()), adam(model), init_from=tmp_path / "run/iteration_00000002")
    assert (decision.initial_step, decision.init_from) == (2, None)


def test_names_include_and_exclude_choose_tensors_by_the_names_of_the_model(tmp_path: Path) -> None:
    source = Model(seed=3)
    names = {"embed": "wte", "layer": "mlp", "head": "lm_head"}
    renamed = {f"{names[key.split('.')[0]]}.{key.split('.')[1]}": value for key, value in source.state_dict().items()}
    reshard.torch.save_file(renamed, tmp_path / "w.safetensors")
    rules = [{"from": theirs, "to": ours} for ours, theirs in zip(source.state_dict(), renamed, strict=True)]
    model, initial = Model(seed=5), Model(seed=5)
    init = InitFrom(tmp_path / "w.safetensors", names={"rules": rules}, exclude=["head.*"])
    decision = resumed(tmp_path / "run", model, adam(model), init_from=init)
    assert torch.equal(model.embed.weight, source.embed.weight)
    assert torch.equal(model.layer.bias, source.layer.bias)
    assert torch.equal(model.head.weight, initial.head.weight)
    assert any("`head.bias`, `head.weight` keep their initial values" in line for line in decision.warnings)
    model = Model(seed=5)
    mapping = {"path": str(tmp_path / "w.safetensors"), "names": {"rules": rules}, "include": ["embed.*"]}
    resumed(tmp_path / "other", model, init_from=mapping)
    assert torch.equal(model.embed.weight, source.embed.weight)
    assert torch.equal(model.layer.weight, initial.layer.weight)
    for word in ("include", "exclude"):
        with pytest.raises(ArgumentError, match=f"`{word}` of `init_from` has `haed"):
            resumed(tmp_path / "x", Model(), init_from={**mapping, "include": ["*"], word: ["haed.*"]})
        with pytest.raises(ArgumentError, match="`include` or `exclude` of `init_from`: `re:\\(` does not compile"):
            resumed(tmp_path / "x", Model(), init_from={**mapping, word: ["re:("]})
    with pytest.raises(ArgumentError, match="`exclude` is a field of `InitFrom`"):
        resumed(tmp_path / "x", Model(), init_from="w", exclude=["head.*"])
    with pytest.raises(CheckpointNotFoundError, match="init_from names it"):
        resumed(tmp_path / "x", Model(), init_from=tmp_path / "absent")
    with pytest.raises(ArgumentError, match="`init_from` has no `path`"):
        resumed(tmp_path / "x", Model(), init_from={"include": ["*"]})


def test_a_tied_weight_is_loaded_under_its_other_name_alone(tmp_path: Path) -> None:
    embed, first, second = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False), nn.Linear(3, 5, bias=False)
    first.weight = embed.weight
    with Checkpointer(tmp_path / "tied", signals=()) as made:
        made.resume(model=nn.ModuleDict({"embed": embed, "head": first}))
        made.step(1, save=True)
    resumed(tmp_path / "tied", nn.ModuleDict({"head": second}), strict=False)
    assert torch.equal(second.weight, embed.weight)


def test_a_name_map_that_does_not_exist_is_no_damage_of_the_checkpoint(tmp_path: Path) -> None:
    reshard.torch.save_file(Model().state_dict(), tmp_path / "w.safetensors")
    init = InitFrom(tmp_path / "w.safetensors", names=tmp_path / "absent.yaml")
    with pytest.raises(ArgumentError, match=r"^there is no name map file `.*absent\.yaml`\nhint: `names` of"):
        resumed(tmp_path / "run", Model(), init_from=init)


def test_the_state_of_the_optimizer_comes_along_on_request(tmp_path: Path) -> None:
    _, before = saved(tmp_path / "pretrained")
    model = Model()
    optimizer = adam(model, lr=0.5)
    init = InitFrom(tmp_path / "pretrained", fresh_optimizer=False)
    decision = resumed(tmp_path / "run", model, optimizer, init_from=init)
    assert decision.restored == ("weights", "optimizer")
    assert decision.initial_step == 0
    assert optimizer.param_groups[0]["lr"] == 0.5
    for one, other in zip(before.state.values(), optimizer.state.values(), strict=True):
        assert all(torch.equal(one[slot], other[slot]) for slot in one)
    reshard.torch.save_file(model.state_dict(), tmp_path / "w.safetensors")
    init = InitFrom(tmp_path / "w.safetensors", fresh_optimizer=False)
    with pytest.raises(MismatchError, match="holds no optimizer state, and"):
        resumed(tmp_path / "x", model, adam(model), init_from=init)


def test_state_of_an_optimizer_in_files_that_are_not_read_is_named(tmp_path: Path) -> None:
    model = Model()
    folder = tmp_path / "checkpoint-4"
    folder.mkdir()
    reshard.torch.save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(adam(model).state_dict(), folder / "optimizer.pt")
    for path in (folder, folder / "model.safetensors"):
        init = InitFrom(path, fresh_optimizer=False)
        with pytest.raises(
            MismatchError, match=r"no optimizer state that is read .*`optimizer\.pt`, which lies beside"
        ):
            resumed(tmp_path / "x", model, adam(model), init_from=init)
    (folder / "optimizer.pt").rename(folder / "optimizer_0.bin")
    with pytest.raises(MismatchError, match=r"`optimizer_0\.bin`"):
        resumed(tmp_path / "x", model, adam(model), init_from=InitFrom(folder, fresh_optimizer=False))
    resumed(tmp_path / "x", model, adam(model), init_from=InitFrom(folder))


def of_loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The file of a training loop, as the tutorials of torch write it."""
    return {"epoch": 1, "model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}


def of_lightning(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "global_step": 2,
        "state_dict": {f"model.{key}": value for key, value in model.state_dict().items()},
        "optimizer_states": [optimizer.state_dict()],
        "callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(1.0)}},
    }


def with_average(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    average = {key: torch.zeros_like(value) for key, value in model.state_dict().items()}
    return {"model": model.state_dict(), "ema": average, "optim_state_dict": optimizer.state_dict()}


@pytest.mark.parametrize("made", [of_loop, of_lightning])
def test_a_file_of_torch_with_more_than_the_model_is_one_to_start_from(tmp_path: Path, made: Any) -> None:
    before, state = saved(tmp_path / "pretrained")
    torch.save(made(before, state), tmp_path / "file.pt")
    model = Model()
    optimizer = adam(model)
    decision = resumed(tmp_path / "run", model, optimizer, init_from=tmp_path / "file.pt")
    assert same(model, before)
    assert not optimizer.state
    left = {of_loop: None, of_lightning: "`callbacks.ModelCheckpoint.best_model_score`"}
    assert [line.split(", ")[0] for line in decision.warnings] == (
        [f"the checkpoint also has {left[made]}"] if left[made] else []
    )
    init = InitFrom(tmp_path / "file.pt", fresh_optimizer=False)
    resumed(tmp_path / "other", (model := Model()), (optimizer := adam(model)), init_from=init)
    assert same(model, before)
    for one, other in zip(state.state.values(), optimizer.state.values(), strict=True):
        assert all(torch.equal(one[slot], other[slot]) for slot in one)


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("other", ["ema", "a"])
@pytest.mark.parametrize("of_model", ["model", "state_dict", "model_state_dict", "z"])
def test_an_average_beside_the_model_is_refused_whatever_the_entries_are_called(
    tmp_path: Path, of_model: str, other: str
) -> None:
    before, state = saved(tmp_path / "pretrained")
    file = with_average(before, state)
    torch.save({of_model: file["model"], other: file["ema"], "optim": file["optim_state_dict"]}, tmp_path / "file.pt")
    with pytest.raises(MismatchError, match=f"several sets of weights fit the model: `{of_model}` and `{other}`"):
        resumed(tmp_path / "run", Model(), init_from=tmp_path / "file.pt")
    init = InitFrom(tmp_path / "file.pt", entry=of_model, fresh_optimizer=False)
    resumed(tmp_path / "other", (model := Model()), (optimizer := adam(model)), init_from=init)
    assert same(model, before)
    for one, kept in zip(state.state.values(), optimizer.state.values(), strict=True):
        assert all(torch.equal(one[slot], kept[slot]) for slot in one)
    resumed(tmp_path / "average", (model := Model()), init_from=InitFrom(tmp_path / "file.pt", entry=other))
    assert not any(map(torch.count_nonzero, model.state_dict().values()))


def test_tensors_beside_the_model_are_refused_in_its_own_state_dict(tmp_path: Path) -> None:
    source = Model(seed=1)
    state = {f"model.{key}": value for key, value in source.state_dict().items()}
    for file in (state, {"state_dict": state, "best": torch.tensor(1.0)}):
        torch.save(file, tmp_path / "file.pt")
        resumed(tmp_path / "run", (model := Model()), init_from=tmp_path / "file.pt")
        assert same(model, source)
        state["loss.weight"] = torch.ones(2)
        torch.save(file, tmp_path / "file.pt")
        with pytest.raises(MismatchError, match=r"the run does not have `.*loss\.weight`"):
            resumed(tmp_path / "run", Model(), init_from=tmp_path / "file.pt")
        del state["loss.weight"]


def test_unknown_names_of_optimizer_state_are_not_loaded(tmp_path: Path) -> None:
    before, state = saved(tmp_path / "pretrained")
    torch.save({"model": before.state_dict(), "opt": state.state_dict()}, tmp_path / "file.pt")
    resumed(tmp_path / "run", (model := Model()), adam(model), init_from=tmp_path / "file.pt")
    assert same(model, before)
    with pytest.raises(MismatchError, match="holds no optimizer state") as caught:
        resumed(tmp_path / "x", model, adam(model), init_from=InitFrom(tmp_path / "file.pt", fresh_optimizer=False))
    assert "fresh_optimizer=True" in str(caught.value)


def test_a_key_that_looks_like_optimizer_state_does_not_become_some(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=False)
    tensors = {"weight": torch.ones(2, 2), "model.weight": torch.zeros(2, 2)}
    reshard.torch.save_file(tensors, tmp_path / "w.safetensors")
    optimizer = adam(model)
    decision = resumed(tmp_path / "run", model, optimizer, init_from=tmp_path / "w.safetensors", strict=False)
    assert not optimizer.state
    assert any("the run does not have `model.weight`" in line for line in decision.warnings)


def test_the_configuration_and_explain_say_the_same(tmp_path: Path, cli: Any) -> None:
    pretrained, _ = saved(tmp_path / "pretrained")
    yaml = tmp_path / "train.yaml"
    section = {"init_from": {"path": str(tmp_path / "pretrained"), "exclude": ["head.*"]}}
    yaml.write_text(json.dumps({"output_dir": str(tmp_path / "out"), "reshard": section}))
    code, out, _ = cli("explain", "--config", yaml, "--json")
    found = json.loads(out)
    assert (code, found["outcome"], found["init_from"]) == (0, "weights", str(tmp_path / "pretrained"))
    assert found["options"]["exclude"] == ["head.*"]
    model = Model()
    with Checkpointer.from_config(yaml, signals=()) as made:
        assert made.resume(model=model).init_from == str(tmp_path / "pretrained")
        assert torch.equal(model.embed.weight, pretrained.embed.weight)
        made.save(3, blocking=True)
    code, out, _ = cli("explain", "--config", yaml)
    assert code == 0
    assert "the training would resume from" in out
    assert "the run goes on from its own newest checkpoint" in out
    code, out, _ = cli("explain", tmp_path / "new", "--init-from", tmp_path / "pretrained", "--exclude", "head.*")
    assert code == 0
    assert "the training would load the weights of" in out
    assert "holds no checkpoint: the run starts from" in out
    with pytest.raises(ConfigError, match="contradicts"):
        Checkpointer.from_config({"load_checkpoint": "a", "output_dir": "b", "reshard": section})
    with pytest.raises(ConfigError, match=r"the configuration loads .*a,"):
        Checkpointer.from_config({"load_checkpoint": "a", "output_dir": "b"}, signals=()).resume(
            model=model, init_from="c"
        )


def test_explain_refuses_a_name_map_that_the_run_refuses(tmp_path: Path, cli: Any) -> None:
    reshard.save_file({"w": torch.zeros(2)}, tmp_path / "w.safetensors")
    (tmp_path / "m.yaml").write_text(json.dumps({"rules": [{"from": "other.{i}", "to": "x.{i}"}], "other": "refuse"}))
    for names in ("missing.yaml", tmp_path / "m.yaml"):
        code, out, _ = cli(
            "explain", tmp_path / "run", "--init-from", tmp_path / "w.safetensors", "--names", names, "--json"
        )
        init = InitFrom(str(tmp_path / "w.safetensors"), names=str(names))
        with pytest.raises(ReshardError) as caught:
            resumed(tmp_path / "run", Model(), init_from=init)
        assert code == 1
        assert json.loads(out)["message"] in caught.value.message


# ------------------------------------------------------------------------------------------------- the policy `strict`


def test_a_larger_vocabulary_keeps_the_old_rows(tmp_path: Path) -> None:
    old, before = saved(tmp_path / "run", 6)
    model, initial = Model(9, seed=7), Model(9, seed=7)
    optimizer = adam(model)
    with pytest.raises(
        MismatchError, match=r"`embed.weight` has shape \(6, 4\) in the checkpoint, and \(9, 4\) in the"
    ):
        resumed(tmp_path / "run", model, optimizer, strict=False)
    assert same(model, initial)
    decision = resumed(tmp_path / "run", model, optimizer, strict={"shape": "grow"})
    assert torch.equal(model.embed.weight[:6], old.embed.weight)
    assert torch.equal(model.embed.weight[6:], initial.embed.weight[6:])
    assert torch.equal(model.head.bias[:6], old.head.bias)
    assert torch.equal(model.head.bias[6:], initial.head.bias[6:])
    assert torch.equal(model.layer.weight, old.layer.weight)
    state, was = optimizer.state[model.embed.weight], before.state[old.embed.weight]
    for slot in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(state[slot][:6], was[slot])
        assert not state[slot][6:].any()
    assert state["step"] == was["step"]
    for name in ("embed.weight", "head.weight", "head.bias"):
        assert sum(f"`{name}` has shape" in line and "rows 6 to 8 keep" in line for line in decision.warnings) == 1
    train(model, optimizer)


def test_a_shape_that_cannot_grow_stays_an_error_and_can_be_skipped(tmp_path: Path) -> None:
    old, _ = saved(tmp_path / "run", 6)
    model, initial = Model(5, seed=7), Model(5, seed=7)
    shrinks = r"`embed\.weight` has shape \(6, 4\) in the checkpoint, and shrinks to \(5, 4\) in the run"
    with pytest.raises(MismatchError, match=rf'{shrinks}: `"grow"` is for more rows'):
        resumed(tmp_path / "run", model, strict=Strict(shape="grow"))
    with pytest.raises(MismatchError, match=f"{shrinks}\\n") as caught:
        resumed(tmp_path / "run", model)
    assert "grow" not in str(caught.value)
    with pytest.raises(MismatchError, match=f"{shrinks}\\n"):
        resumed(tmp_path / "new", model, init_from=InitFrom(str(tmp_path / "run")))
    wide: Any = nn.ModuleDict({"embed": nn.Embedding(5, 7), "layer": Model().layer, "head": Model().head})
    with pytest.raises(MismatchError, match=r"and \(5, 7\) in the run, and only the first dim of a tensor can grow"):
        resumed(tmp_path / "run", wide, strict=Strict(shape="grow"))
    optimizer = adam(model)
    decision = resumed(tmp_path / "run", model, optimizer, strict=Strict(shape="skip"))
    assert torch.equal(model.embed.weight, initial.embed.weight)
    assert torch.equal(model.layer.weight, old.layer.weight)
    assert optimizer.state.keys() == {model.layer.weight, model.layer.bias}
    assert sum("it keeps its initial values" in line for line in decision.warnings) == 3
    assert re.search(f"{shrinks}: it keeps its initial values", "\n".join(decision.warnings))


@pytest.mark.slow(disk=False)
def test_a_smaller_vocabulary_keeps_the_first_rows(tmp_path: Path) -> None:
    old, before = saved(tmp_path / "run", 9)
    hint = r'`strict=\{"shape": "trim"\}` leaves out the last rows'
    for strict in (True, False, Strict(shape="grow")):
        for more in ({}, {"init_from": InitFrom(str(tmp_path / "run"))}):
            model, initial = Model(6, seed=7), Model(6, seed=7)
            with pytest.raises(MismatchError, match=hint):
                resumed(tmp_path / ("new" if more else "run"), model, strict=strict, **more)
            assert same(model, initial)
    init = InitFrom(str(tmp_path / "run"), fresh_optimizer=False)
    for root, more in (("run", {}), ("new", {"init_from": init})):
        model = Model(6, seed=7)
        optimizer = adam(model)
        decision = resumed(tmp_path / root, model, optimizer, strict=Strict(shape="trim"), **more)
        for name, parameter in model.named_parameters():
            was = dict(old.named_parameters())[name]
            assert torch.equal(parameter, was[: len(parameter)]), name
            for slot in ("exp_avg", "exp_avg_sq"):
                state, of_old = optimizer.state[parameter][slot], before.state[was][slot]
                assert torch.equal(state, of_old[: len(parameter)]), (name, slot)
            assert optimizer.state[parameter]["step"] == before.state[was]["step"]
        for name in ("embed.weight", "head.weight", "head.bias"):
            assert (
                sum(f"`{name}` has shape" in line and "rows 6 to 8 are left" in line for line in decision.warnings) == 1
            )
        train(model, optimizer)
    with pytest.raises(MismatchError, match='`"trim"` is for fewer rows'):
        resumed(tmp_path / "run", Model(11), strict=Strict(shape="trim"))
    wide: Any = nn.ModuleDict({"embed": nn.Embedding(6, 7), "layer": Model().layer, "head": Model().head})
    with pytest.raises(
        MismatchError, match=r"and \(6, 7\) in the run, and only the first dim of a tensor can be trimmed"
    ):
        resumed(tmp_path / "run", wide, strict=Strict(shape="trim"))


def test_each_difference_has_its_own_policy(tmp_path: Path) -> None:
    saved(tmp_path / "run")
    more: Any = nn.ModuleDict({**dict(Model().named_children()), "new": nn.Linear(2, 2)})
    value = more["new"].weight.detach().clone()
    with pytest.raises(MismatchError, match=r"the checkpoint lacks `new\.weight`"):
        resumed(tmp_path / "run", more, strict={"unexpected": "skip"})
    decision = resumed(tmp_path / "run", more, strict={"missing": "keep"})
    assert torch.equal(more["new"].weight, value)
    assert any("the checkpoint lacks `new.weight`, `new.bias`" in line for line in decision.warnings)
    less = nn.ModuleDict({"layer": Model().layer})
    with pytest.raises(MismatchError, match=r"the run does not have `embed\.weight`"):
        resumed(tmp_path / "run", less, strict={"missing": "keep"})
    decision = resumed(tmp_path / "run", less, adam(less), strict={"unexpected": "skip"})
    for key in ("embed.weight", "head.bias", "exp_avg.head.bias"):
        assert any(f"`{key}`" in line for line in decision.warnings)
    with pytest.raises(ArgumentError, match="`shape` is 'stretch', expected"):
        resumed(tmp_path / "run", less, strict={"shape": "stretch"})


def test_another_optimizer_and_other_groups_are_skipped_by_name(tmp_path: Path) -> None:
    old, _ = saved(tmp_path / "run")
    model = Model()
    other = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    with pytest.raises(MismatchError, match="was saved with optimizer AdamW, and now has SGD"):
        resumed(tmp_path / "run", model, other, strict=False)
    decision = resumed(tmp_path / "run", model, other, strict={"other_optimizer": "skip"})
    assert same(model, old)
    assert (other.param_groups[0]["lr"], len(other.state)) == (0.25, 0)
    assert "betas" not in other.param_groups[0]
    assert sum("and now has SGD" in line for line in decision.warnings) == 5
    model = Model()
    groups = [{"params": model.layer.parameters(), "lr": 0.1}, {"params": [*model.embed.parameters()], "lr": 0.2}]
    with Checkpointer(tmp_path / "groups", signals=()) as made:
        made.resume(model=model, optimizer=torch.optim.AdamW(groups))
        made.save(1, blocking=True)
    one = torch.optim.AdamW([*model.layer.parameters(), *model.embed.parameters()], lr=0.7)
    with pytest.raises(MismatchError, match="are in one group of the optimizer"):
        resumed(tmp_path / "groups", model, one)
    decision = resumed(tmp_path / "groups", model, one, strict={"other_optimizer": "skip"})
    assert one.param_groups[0]["lr"] == 0.7
    assert any("the group keeps the options of the run" in line for line in decision.warnings)


def trained(root: Path, *parts: str, **options: Any) -> Any:
    """Resume a run that trains these parts of the model, make a step, save; the restored counters and the warnings."""
    model = Model(seed=3)
    for name, part in model.named_children():
        part.requires_grad_(name in parts)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], foreach=False)
    with Checkpointer(root, signals=()) as made:
        decision = made.resume(model=model, optimizer=optimizer, **options)
        n_steps = {n: int(optimizer.state[one].get("step", 0)) for n, one in model.named_parameters()}
        train(model, optimizer)
        made.save(decision.initial_step + 1, blocking=True)
    return n_steps, decision.warnings


@pytest.mark.slow(disk=False)
def test_layers_are_frozen_and_unfrozen_between_two_runs(tmp_path: Path) -> None:
    skip = {"other_optimizer": "skip"}
    trained(tmp_path / "one", "head", "layer")
    with pytest.raises(MismatchError) as caught:
        trained(tmp_path / "one", "head", "embed")
    assert str(caught.value).startswith(
        "`embed.weight` has no saved optimizer state: it was not trained, and `layer.weight`, `layer.bias` were "
        'trained, and are not now\nhint: `strict={"other_optimizer": "skip"}`'
    )
    for strict in ({"missing": "keep"}, {"unexpected": "skip"}):
        with pytest.raises(MismatchError, match=r"not trained|are not now"):
            trained(tmp_path / "one", "head", "embed", strict=strict)
    n_steps, warnings = trained(tmp_path / "one", "head", "embed", strict=skip)
    assert {name for name, n in n_steps.items() if n} == {"head.weight", "head.bias"}
    said = [line for line in warnings if "trained" in line]
    assert said == [
        "`embed.weight` has no saved optimizer state: it was not trained, and starts with new state",
        "`layer.weight` was trained, and is not now: its optimizer state is not loaded",
        "`layer.bias` was trained, and is not now: its optimizer state is not loaded",
    ]
    # The next run has the same layers.
    n_steps, warnings = trained(tmp_path / "one", "head", "embed")
    assert [n_steps[name] for name in ("embed.weight", "head.bias", "layer.bias")] == [1, 2, 0]
    assert not any("trained" in line for line in warnings)
    n_steps, warnings = trained(tmp_path / "one", "embed", "layer", strict=False)
    assert [n_steps[name] for name in ("embed.weight", "layer.weight")] == [2, 0]
    assert any("the options of the optimizer for `layer.weight`" in line for line in warnings)
    assert any("`exp_avg.head.bias`" in line for line in warnings)


# ------------------------------------------------------------------------------------------------------------- ranks


def whole(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [6, 7, 1])
def test_a_vocabulary_grows_under_fsdp(tmp_path: Path, rows: int) -> None:
    """The old rows lie on one rank, on both, or end within a shard."""
    model = Model(rows, seed=1)
    optimizer = adam(model)
    with Checkpointer(tmp_path, signals=()) as made:
        made.resume(model=model, optimizer=optimizer)
        optimizer.zero_grad()
        model(torch.tensor([0, 0])).square().sum().backward()
        optimizer.step()
        made.save(1, blocking=True)
    initial = Model(11, seed=7).state_dict()

    def work(group: TorchGroup) -> list[str]:
        del group
        mesh = init_device_mesh("cpu", (2,))
        larger: Any = fully_shard(Model(11, seed=7), mesh=mesh)
        state = adam(larger)
        decision = Checkpointer(tmp_path, save_every=None, signals=()).resume(
            model=larger, optimizer=state, strict={"shape": "grow"}
        )
        for key, parameter in larger.named_parameters():
            now, was = whole(parameter), dict(model.named_parameters())[key]
            assert torch.equal(now[: len(was)], was), key
            assert torch.equal(now[len(was) :], initial[key][len(was) :]), key
            for slot, value in optimizer.state[was].items():
                found = whole(state.state[parameter][slot])
                if value.ndim:
                    assert torch.equal(found[: len(was)], value), (key, slot)
                    assert not found[len(was) :].any(), (key, slot)
                else:
                    assert found == value
        larger(torch.tensor([0, 10])).square().sum().backward()
        state.step()
        return [line for line in decision.warnings if "keep their initial values" in line]

    with Job(2, work) as job:
        notes = job.values()
    assert len(notes[0]) == 3
    assert notes[0] == notes[1]


@pytest.mark.slow
@pytest.mark.parametrize("n_rows", [6, 3, 1])
def test_a_vocabulary_is_trimmed_under_fsdp(tmp_path: Path, n_rows: int) -> None:
    """The last rows lie on both ranks, or one rank has none."""
    model = Model(11, seed=1)
    optimizer = adam(model)
    with Checkpointer(tmp_path, signals=()) as made:
        made.resume(model=model, optimizer=optimizer)
        model(torch.tensor([0, 10])).square().sum().backward()
        optimizer.step()
        made.save(1, blocking=True)

    def work(group: TorchGroup) -> list[str]:
        del group
        smaller: Any = fully_shard(Model(n_rows, seed=7), mesh=init_device_mesh("cpu", (2,)))
        state = adam(smaller)
        decision = Checkpointer(tmp_path, save_every=None, signals=()).resume(
            model=smaller, optimizer=state, strict={"shape": "trim"}
        )
        for key, parameter in smaller.named_parameters():
            now, was = whole(parameter), dict(model.named_parameters())[key]
            assert torch.equal(now, was[: len(now)]), key
            for slot, value in optimizer.state[was].items():
                found = whole(state.state[parameter][slot])
                assert torch.equal(found, value[: len(found)] if value.ndim else value), (key, slot)
        smaller(torch.tensor([0, 0])).square().sum().backward()
        state.step()
        return [line for line in decision.warnings if "left out" in line]

    with Job(2, work) as job:
        notes = job.values()
    assert len(notes[0]) == 3
    assert notes[0] == notes[1]


@pytest.mark.slow
def test_sharded_runs_start_from_weights_and_skip_what_they_do_not_have(tmp_path: Path) -> None:
    source = Model(8, seed=2)
    reshard.torch.save_file({**source.state_dict(), "odd": torch.ones(3, 5)}, tmp_path / "w.safetensors")

    def work(group: TorchGroup) -> list[Any]:
        del group
        mesh = init_device_mesh("cpu", (2,))
        model: Any = fully_shard(Model(8), mesh=mesh)
        found = []
        for _ in range(2):
            with Checkpointer(tmp_path / "run", signals=(), timeout=30) as made:
                init = InitFrom(tmp_path / "w.safetensors", exclude=["head.*"])
                decision = made.resume(model=model, optimizer=adam(model), init_from=init, strict=False)
                found.append([decision.init_from is not None, decision.initial_step])
                if not decision.initial_step:
                    assert torch.equal(whole(model.embed.weight), source.embed.weight)
                    assert not torch.equal(whole(model.head.weight), source.head.weight)
                    assert any("the run does not have `odd`" in line for line in decision.warnings)
                    made.save(4, blocking=True)
        return found

    with Job(2, work) as job:
        assert job.values() == [[[True, 0], [False, 4]]] * 2
