"""Which stored tensors are those of the model: several sets that fit, names of wrappers, and nothing that fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.helpers.command_line import run
from torch import nn

import reshard
import reshard.torch
from reshard.errors import ArgumentError, MismatchError
from reshard.formats.run_state import Live, Values, translated
from reshard.options import InitFrom
from reshard.torch import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from reshard.resume import ResumeDecision


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def same(model: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


def started(root: Path, model: nn.Module, init: Any, **options: Any) -> ResumeDecision:
    return Checkpointer(root, save_every=None, signals=()).resume(model=model, init_from=init, **options)


def write(path: Path, kind: str, state: Mapping[str, Any]) -> Path:
    """Nested state as a file or folder of a format."""
    flat = {f"{entry}.{key}": one for entry, of_entry in state.items() for key, one in of_entry.items()}
    if kind == "pt":
        torch.save(dict(state), path)
    elif kind == "dcp":
        dcp.save(dict(state), checkpoint_id=path, no_dist=True)  # type: ignore[attr-defined]
    elif kind == "safetensors":
        path = path.with_suffix(".safetensors")
        reshard.torch.save_file(flat, path)
    else:
        reshard.save(path, 3, flat)
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["pt", "dcp", "safetensors", "own"])
def test_an_entry_chooses_one_of_several_sets(tmp_path: Path, kind: str) -> None:
    first, second = net(1), net(2)
    state = {"student": first.state_dict(), "teacher": second.state_dict()}
    path = write(tmp_path / "file", kind, state)
    with pytest.raises(MismatchError) as caught:
        started(tmp_path / "run", net(), path)
    if kind in ("pt", "dcp"):
        assert "several sets of weights fit the model" in str(caught.value)
    for name in ("student", "teacher"):
        assert name in str(caught.value)
        started(tmp_path / "run", (model := net()), InitFrom(path, entry=name))
        assert same(model, {"student": first, "teacher": second}[name])
    with pytest.raises(ArgumentError, match="assistant") as unknown:
        started(tmp_path / "run", net(), InitFrom(path, entry="assistant"))
    assert "`student`" in str(unknown.value)


def test_an_average_without_buffers_is_a_set_as_well(tmp_path: Path) -> None:
    source = net(1)
    for trained, average in (("a", "b"), ("b", "a"), ("longer", "ema")):
        state = {trained: source.state_dict(), average: dict(net(2).named_parameters())}
        torch.save(state, tmp_path / "file.pt")
        with pytest.raises(MismatchError, match=f"`{trained}` and `{average}`"):
            started(tmp_path / "run", net(), tmp_path / "file.pt")
        with pytest.raises(MismatchError, match=f"`{trained}` and `{average}`"):
            started(tmp_path / "run", net(), tmp_path / "file.pt", strict=False)


def test_sets_inside_of_an_entry(tmp_path: Path) -> None:
    source = net(1)
    state = {
        f"{of}.{key}": one
        for of, model in (("net", source), ("ema", net(2)))
        for key, one in model.state_dict().items()
    }
    torch.save({"state_dict": state}, tmp_path / "file.pt")
    with pytest.raises(MismatchError, match=r"`state_dict.net` and `state_dict.ema`"):
        started(tmp_path / "run", net(), tmp_path / "file.pt")
    started(tmp_path / "run", (model := net()), InitFrom(tmp_path / "file.pt", entry="state_dict.net"), strict=False)
    assert same(model, source)


def test_a_set_of_other_shapes_does_not_fit(tmp_path: Path) -> None:
    source = net(1)
    torch.save(
        {"small": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict(), "net": source.state_dict()},
        tmp_path / "x.pt",
    )
    started(tmp_path / "run", (model := net()), tmp_path / "x.pt")
    assert same(model, source)


def test_weights_and_optimizer_state_come_from_one_set(tmp_path: Path) -> None:
    def trained(seed: int) -> dict[str, Any]:
        model = net(seed)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    state = {"generator": trained(1), "discriminator": trained(2)}
    torch.save(state, tmp_path / "gan.pt")
    for name, one in state.items():
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        init = InitFrom(tmp_path / "gan.pt", entry=name, fresh_optimizer=False)
        started(tmp_path / "run", model, init, optimizer=optimizer)
        assert torch.equal(model.state_dict()["0.weight"], one["model"]["0.weight"])
        assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], one["optimizer"]["state"][0]["exp_avg"])


WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")


@pytest.mark.slow(disk=False)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["pt", "dcp", "safetensors", "own"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_of_wrappers_mean_nothing_wherever_they_stand(tmp_path: Path, kind: str, wrapper: str) -> None:
    source = net(1)
    path = write(tmp_path / "outer", kind, {wrapper: source.state_dict()})
    started(tmp_path / "run", (model := net()), path)
    assert same(model, source)
    inside = {f"{key[0]}.{wrapper}{key[1:]}": one for key, one in source.state_dict().items()}
    path = write(tmp_path / "inner", kind, {"_orig_mod": inside})
    started(tmp_path / "run", (model := net()), path)
    assert same(model, source)


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_two_names_that_differ_in_a_wrapper_alone_are_refused(tmp_path: Path, kind: str) -> None:
    state = net(1).state_dict()
    path = write(tmp_path / "file", kind, {"_orig_mod": {**state, "module.0.weight": state["0.weight"]}})
    with pytest.raises(MismatchError, match=r"`_orig_mod.0.weight` and `_orig_mod.module.0.weight`"):
        started(tmp_path / "run", net(), path)


def test_a_model_may_have_parts_named_as_wrappers(tmp_path: Path) -> None:
    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.ModuleDict({"module": nn.Linear(2, 2), "head": nn.ModuleDict({"module": nn.Linear(2, 3)})})

    source = model(1)
    reshard.torch.save_file(source.state_dict(), tmp_path / "w.safetensors")
    torch.save({"model": source.state_dict()}, tmp_path / "w.pt")
    for name in ("w.safetensors", "w.pt"):
        started(tmp_path / "run", (found := model(2)), tmp_path / name)
        assert same(found, source)


def test_optimizer_state_of_a_wrapped_model(tmp_path: Path) -> None:
    source = net(1)
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1, momentum=0.9)
    source(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    names = [name for name, _ in source.named_parameters()]
    momentum = [optimizer.state[one]["momentum_buffer"] for one in source.parameters()]
    tensors = {f"module.{key}": one for key, one in source.state_dict().items()}

    torch.save(
        {
            "model": tensors,
            "optimizer": {
                "state": {f"module.{n}": {"momentum_buffer": one} for n, one in zip(names, momentum, strict=True)},
                "param_groups": [{"lr": 0.1, "momentum": 0.9, "params": [f"module.{n}" for n in names]}],
            },
        },
        tmp_path / "x.pt",
    )
    model = net()
    again = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    started(tmp_path / "run", model, InitFrom(tmp_path / "x.pt", fresh_optimizer=False), optimizer=again)
    assert same(model, source)
    found = [again.state[one]["momentum_buffer"] for one in model.parameters()]
    assert all(map(torch.equal, found, momentum))


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_nothing_that_fits_is_no_success(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "file", kind, {"detector": {f"a_{key}": one for key, one in net().state_dict().items()}})
    for init in (path, InitFrom(path, include=["*.weight"])):
        with pytest.raises(MismatchError, match="no tensor of the model is loaded"):
            started(tmp_path / "run", net(), init, strict=False)


def test_nothing_that_fits_is_no_resume(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run", signals=()) as made:
        made.resume(model={"gen": nn.Linear(3, 3)})
        made.save(5, blocking=True)
    with pytest.raises(MismatchError, match="no tensor of the model is loaded"):
        Checkpointer(tmp_path / "run", signals=()).resume(model=net(), strict=False)
    with pytest.raises(MismatchError, match="all keep their initial values"):
        Checkpointer(tmp_path / "run", signals=()).resume(
            model={"gen": nn.Linear(2, 2)}, strict={"missing": "keep", "shape": "skip"}
        )


def test_reasons_say_how_much_is_loaded(tmp_path: Path) -> None:
    source = net(1)
    torch.save({"model": source.state_dict()}, tmp_path / "all.pt")
    assert (
        "all 9 tensors of the model are loaded, 100 % of its elements"
        in started(tmp_path / "a", net(), tmp_path / "all.pt").reasons
    )
    reshard.torch.save_file(source[0].state_dict(prefix="0."), tmp_path / "some.safetensors")
    decision = started(tmp_path / "b", net(), tmp_path / "some.safetensors", strict=False)
    assert decision.reasons[-1].startswith("2 of 9 tensors of the model are loaded, ")


@pytest.mark.parametrize(
    ("stored", "live", "change"),
    [
        ("model.", "", {"model.": ""}),
        ("", "model.", {"": "model."}),
        ("_orig_mod.net.", "", {"net.": ""}),
        ("a.backbone.", "encoder.", {"a.backbone.": "encoder."}),
    ],
)
def test_the_hint_is_a_change_that_is_accepted(tmp_path: Path, stored: str, live: str, change: dict[str, str]) -> None:
    source = net(1)
    path = tmp_path / "w.safetensors"
    reshard.torch.save_file(source.state_dict(prefix=stored), path)
    model = net()
    parts: Any = model if not live else {live.rstrip("."): model}
    with pytest.raises(MismatchError) as caught:
        started(tmp_path / "run", parts, path)
    assert f"all 9 tensors of the model fit after `names={{'rename': {change}}}`" in str(caught.value)
    started(tmp_path / "run", parts, InitFrom(path, names={"rename": change}))
    assert same(model, source)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["pt", "dcp"])
@pytest.mark.parametrize(
    ("entries", "start"),
    [
        (("model",), "model."),
        (("state_dict",), "state_dict."),
        (("app", "model"), "app.model."),
        (("module",), "module."),
    ],
)
def test_a_conversion_tells_of_the_prefix_in_every_format(
    tmp_path: Path, kind: str, entries: tuple[str, ...], start: str
) -> None:
    state: dict[str, Any] = dict(net(1).state_dict())
    for entry in reversed(entries):
        state = {entry: state}
    if kind == "pt":
        torch.save(state, tmp_path / "file")
    else:
        dcp.save(state, checkpoint_id=tmp_path / "file", no_dist=True)  # type: ignore[attr-defined]
    report = reshard.convert(tmp_path / "file", tmp_path / "out", to="huggingface")
    assert report.warnings[0].startswith(f"names begin with `{start}`, ")
    report = reshard.convert(tmp_path / "file", tmp_path / "bare", to="huggingface", select={"rename": {start: ""}})
    assert not any("names begin" in warning for warning in report.warnings)
    assert sorted(reshard.open(tmp_path / "bare")) == sorted(net().state_dict())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["pt", "dcp", "safetensors", "own"])
def test_a_conversion_takes_one_of_several_sets(tmp_path: Path, kind: str) -> None:
    first, second = net(1), net(2)
    path = write(tmp_path / "file", kind, {"student": first.state_dict(), "teacher": second.state_dict()})
    if kind in ("pt", "dcp"):
        for to in ("huggingface", "safetensors", "torch"):
            with pytest.raises(MismatchError, match="several sets of weights: `student`, `teacher`") as caught:
                reshard.convert(path, tmp_path / "out", to=to)
            assert "`select=Select(entry='student')`" in str(caught.value)
            assert not (tmp_path / "out").exists()
    reshard.convert(path, tmp_path / "one", to="huggingface", select={"entry": "teacher"})
    model = net()
    model.load_state_dict(reshard.torch.load_file(tmp_path / "one" / "model.safetensors"))
    assert same(model, second)
    select = {"entry": "student", "rename": {"0.": "first."}, "drop": "2."}
    reshard.convert(path, tmp_path / "some.safetensors", select=select)
    assert {name.partition(".")[0] for name in reshard.open(tmp_path / "some.safetensors")} == {"first", "1"}
    with pytest.raises(ArgumentError, match="no tensor has the entry `ema`"):
        reshard.convert(path, tmp_path / "none", select={"entry": "ema"})
    with pytest.raises(ArgumentError, match="takes weights alone"):
        reshard.convert(path, tmp_path / "none", select={"entry": "teacher"}, part="all")


def test_the_command_line_names_the_sets_and_takes_one(tmp_path: Path) -> None:
    state = {"net": nn.Linear(2, 2).state_dict(), "ema": nn.Linear(2, 2).state_dict(), "epoch": 3}
    torch.save(state, tmp_path / "x.pt")
    result = run("convert", tmp_path / "x.pt", tmp_path / "out")
    assert result.exit_code == 1
    assert "holds several sets of weights: `net`, `ema`" in result.stderr
    assert "hint: --entry net" in result.stderr
    assert "--part all takes all" in result.stderr
    assert run("convert", tmp_path / "x.pt", tmp_path / "out", "--entry", "ema").exit_code == 0
    with reshard.open(tmp_path / "out") as checkpoint:
        assert checkpoint.read("weight").tolist() == state["ema"]["weight"].tolist()  # type: ignore[index]
    reshard.convert(tmp_path / "x.pt", tmp_path / "all", part="all")
    assert len(reshard.open(tmp_path / "all")) == 4
    reshard.convert(tmp_path / "x.pt", tmp_path / "net", select={"drop": "ema."})
    assert len(reshard.open(tmp_path / "net")) == 2


@pytest.mark.parametrize(
    "state",
    [
        {"Dense_0": {"kernel": torch.ones(2), "bias": torch.ones(1)}, "Dense_1": {"kernel": torch.ones(2)}},
        {"layers": [{"w": torch.ones(2)}, {"w": torch.ones(2)}]},
        {"encoder": nn.Linear(2, 3).state_dict(), "decoder": nn.Linear(3, 2).state_dict()},
        {"model": nn.Linear(2, 2).state_dict(), "best": torch.ones(1)},
    ],
)
def test_parts_of_one_model_are_no_several_sets(tmp_path: Path, state: dict[str, Any]) -> None:
    torch.save(state, tmp_path / "x.pt")
    reshard.convert(tmp_path / "x.pt", tmp_path / "out")


def test_two_names_of_the_state_of_one_object_are_refused() -> None:
    values = Values({"lr_scheduler.last_epoch": 3, "scheduler.last_epoch": 4})
    with pytest.raises(MismatchError, match="`lr_scheduler` and `scheduler` of the checkpoint both are state of `sch"):
        translated(["w"], values, Live(["w"], [], ["scheduler"]))
    values = Values({"lr_scheduler.last_epoch": 3, "lr_scheduler.gamma": 4})
    found = translated(["w"], values, Live(["w"], [], ["scheduler"])).trainer["objects"]
    assert found == {"scheduler": {"last_epoch": 3, "gamma": 4}}


def test_the_keys_of_a_large_state_are_not_looked_at_for_each_value() -> None:
    class State(dict[int, object]):
        n_seen = 0

        def __iter__(self) -> Iterator[int]:
            for key in super().__iter__():
                State.n_seen += 1
                yield key

    n = 200
    values = Values({f"optimizer.state.{number}.step": number for number in range(n)})
    state = State({number: {"step": 0} for number in range(n)})
    live = Live(["w"], [], ["optimizer"], (), {"optimizer": {"state": state}})
    found = translated(["w"], values, live).trainer["objects"]
    assert found == {"optimizer": {"state": {number: {"step": number} for number in range(n)}}}
    assert State.n_seen < 10 * n


@pytest.mark.parametrize(
    "values",
    [
        {"scheduler": 5, "scheduler.x": 3},
        {"scheduler.b": 2, "scheduler": {"a": 1}},
        {"scheduler.x.y": 2, "scheduler.x": None},
        {"scheduler.x": [1], "scheduler.x.y.z": 2},
    ],
    ids=str,
)
def test_a_value_inside_of_another_one_is_refused(values: dict[str, object]) -> None:
    one, other = values
    message = f"`{one}` and `{other}` of the checkpoint are state of `scheduler` of the run, and one of them is inside"
    with pytest.raises(MismatchError, match=message):
        translated(["w"], Values(values), Live(["w"], [], ["scheduler"]))


@pytest.mark.filterwarnings("ignore")
def test_counters_of_steps_that_differ_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"model": net().state_dict(), "step": 400, "global_step": 100, "epoch": 2}
    dcp.save(state, checkpoint_id=tmp_path / "several", no_dist=True)  # type: ignore[attr-defined]
    with reshard.open(tmp_path / "several") as checkpoint:
        common = checkpoint.data.read_common()
        assert common is not None
        assert common.global_step == 100
    told = "several ways: `global_step` is 100, `step` is 400; `global_step` is taken"
    assert told in caplog.text
    caplog.clear()
    dcp.save({**state, "step": 100}, checkpoint_id=tmp_path / "one", no_dist=True)  # type: ignore[attr-defined]
    with reshard.open(tmp_path / "one") as checkpoint:
        checkpoint.data.read_common()
    assert "several ways" not in caplog.text
