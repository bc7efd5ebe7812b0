"""Entries that modules add to `state_dict()`: they are saved under its names, and restored by `load_state_dict()`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.helpers.cases import slow
from tests.helpers.module_entries import Counted, Hooked, Overridden, inside, random_tree
from tests.helpers.ranks import Job
from tests.peers.required import required
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import reshard
from reshard.errors import MismatchError, UnsupportedError
from reshard.formats.state import digest_of
from reshard.torch import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Callable


class Whole(nn.Module):
    """Overrides `state_dict` itself, and `load_state_dict` without its argument `strict`."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.scale = torch.full((2,), value)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state["scale"] = self.scale.clone()
        return state

    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        state = dict(state)
        self.scale = state.pop("scale")
        return super().load_state_dict(state)


class Forgets(Whole):
    """Has no code that loads what it saves."""

    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        return nn.Module.load_state_dict(self, {name: one for name, one in state.items() if name != "scale"})


def values(model: nn.Module) -> dict[str, Any]:
    return {name: one.clone() if isinstance(one, torch.Tensor) else one for name, one in model.state_dict().items()}


def check(
    root: Path, make: Callable[[float], nn.Module], given: Callable[[nn.Module], Any] = lambda model: model
) -> None:
    """A run of `make(1)` is saved, and resumed into `make(2)`: all entries come back, under their names."""
    first, second = make(1.0), make(2.0)
    expected = values(first)
    with Checkpointer(root, signals=()) as checkpointer:
        checkpointer.resume(model=given(first))
        checkpointer.save(1, blocking=True)
    with reshard.open(root) as saved:
        plain = {name for name, one in expected.items() if not isinstance(one, torch.Tensor)}
        assert {name.removeprefix("net.") for name in saved.keys("model")} == expected.keys() - plain
    with Checkpointer(root, signals=()) as checkpointer:
        assert checkpointer.resume(model=given(second)).initial_step == 1
    found = values(second)
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert torch.equal(found[name], one) if isinstance(one, torch.Tensor) else found[name] == one, name


class Values(nn.Linear):
    """Adds values that are not equal to themselves, or have no single truth value."""

    def __init__(self, value: float) -> None:
        super().__init__(2, 2)
        self.kept: Any = {"worst": float("nan"), "bins": np.full(3, value), "means": [torch.full((2,), value)]}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # noqa: FBT001
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({f"{prefix}{name}": one for name, one in self.kept.items()})

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.kept = {name: state.pop(f"{prefix}{name}") for name in self.kept}
        super()._load_from_state_dict(state, prefix, *args)


def test_entries_that_hold_arrays_and_nan_come_back(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, signals=()) as checkpointer:
        checkpointer.resume(model=Values(1.0))
        checkpointer.save(1, blocking=True)
    second = Values(2.0)
    with Checkpointer(tmp_path, signals=()) as checkpointer:
        assert checkpointer.resume(model=second).initial_step == 1
    assert digest_of(second.kept) == digest_of(Values(1.0).kept)


@pytest.mark.parametrize("kind", [Overridden, Hooked, Whole])
def test_entries_come_back(kind: Callable[[float], nn.Module], tmp_path: Path) -> None:
    check(tmp_path / "run", kind)


@pytest.mark.parametrize("kind", [Overridden, Hooked, Whole])
def test_entries_of_one_of_several_models(kind: Callable[[float], nn.Module], tmp_path: Path) -> None:
    check(tmp_path / "run", kind, lambda model: {"net": model})


def test_entries_of_a_compiled_model(tmp_path: Path) -> None:
    check(tmp_path / "run", Overridden, torch.compile)


@pytest.mark.parametrize("kind", [Overridden, Hooked, Whole, Counted])
def test_entries_in_a_start_from_other_weights(kind: Callable[[float], nn.Module], tmp_path: Path) -> None:
    first, second, kept = kind(1.0), kind(2.0), kind(3.0)
    with Checkpointer(tmp_path / "first", signals=()) as checkpointer:
        checkpointer.resume(model={"net": first})
        checkpointer.save(1, blocking=True)
    start: dict[str, Any] = {"path": tmp_path / "first"}
    Checkpointer(tmp_path / "new", save_every=None, signals=()).resume(model={"net": second}, init_from=start)
    found, expected = values(second), values(first)
    for name, one in expected.items():
        assert torch.equal(found[name], one) if isinstance(one, torch.Tensor) else found[name] == one, name
    other = {"net": kept, "more": nn.Linear(2, 2)}
    with Checkpointer(tmp_path / "second", signals=()) as checkpointer:
        checkpointer.resume(model={"net": kind(4.0), "more": nn.Linear(2, 2)})
        checkpointer.save(1, blocking=True)
    before = values(kept)
    start = {"path": tmp_path / "second", "exclude": ["net.*"]}
    Checkpointer(tmp_path / "part", save_every=None, signals=()).resume(model=other, init_from=start)
    found = values(kept)
    for name, one in before.items():
        assert torch.equal(found[name], one) if isinstance(one, torch.Tensor) else found[name] == one, name


@pytest.mark.parametrize("seed", [*range(5), *slow(range(5, 20))])
def test_random_trees(seed: int, tmp_path: Path) -> None:
    make = random_tree(seed)
    first, second = make(1.0), make(2.0)
    expected = inside(first)
    with Checkpointer(tmp_path, signals=()) as checkpointer:
        checkpointer.resume(model=first)
        checkpointer.save(1, blocking=True)
    with reshard.open(tmp_path) as saved:
        names = {name.replace("_checkpoint_wrapped_module.", "") for name in expected}
        plain = {name for name in names if name.endswith((".name", "_extra_state"))}
        assert set(saved.keys("model")) == names - plain
    assert Checkpointer(tmp_path, save_every=None, signals=()).resume(model=second).initial_step == 1
    found = inside(second)
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        assert torch.equal(found[name], one) if isinstance(one, torch.Tensor) else found[name] == one, name


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp", "tp"])
def test_entries_on_two_ranks(wrapper: str, tmp_path: Path) -> None:
    class Model(nn.ModuleDict):
        def forward(self, x: torch.Tensor) -> Any:
            return self["layer"](x)

    def work(_: Any) -> list[str]:
        def make(value: float) -> Any:
            model = Model({"a": Overridden(value), "b": Hooked(value), "c": Counted(value), "layer": nn.Linear(4, 4)})
            if wrapper == "ddp":
                return nn.parallel.DistributedDataParallel(model)
            if wrapper == "tp":
                mesh = init_device_mesh("cpu", (2,))
                return parallelize_module(model, mesh, {"layer": ColwiseParallel()})
            return fully_shard(model)

        first, second = make(1.0), make(2.0)
        with Checkpointer(tmp_path / "run", signals=()) as checkpointer:
            checkpointer.resume(model={"net": first})
            checkpointer.save(1, blocking=True)
        Checkpointer(tmp_path / "run", save_every=None, signals=()).resume(model={"net": second})
        names = {name.removeprefix("module.") for name, one in values(first).items() if isinstance(one, torch.Tensor)}
        with reshard.open(tmp_path / "run") as saved:
            wrong = sorted(names ^ {name.removeprefix("net.") for name in saved.keys("model")})
        found = values(second)
        for name, one in values(first).items():
            both = [x.to_local() if hasattr(x, "to_local") else x for x in (one, found[name])]
            is_same = torch.equal(*both) if isinstance(one, torch.Tensor) else both[0] == both[1]
            wrong += [] if is_same else [name]
        return wrong

    with Job(2, work) as job:
        assert [one and one.get("value", one) for one in job.outcomes()] == [[], []]


def test_what_the_model_does_not_load_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=r"`scale` of the checkpoint cannot be restored: the modules of the model"):
        check(tmp_path / "run", Forgets)


class Unread(nn.Module):
    """Saves entries that no method loads, of itself and of a frozen weight."""

    def __init__(self, value: float, *, is_frozen: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.layer.requires_grad_(not is_frozen)
        self.names = {"layer.weight.scale": torch.full((2,), value), "layer.weight.kind": f"kind {value}"}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # noqa: FBT001
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: value for name, value in self.names.items()})


class Raises(Whole):
    """Loads nothing."""

    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        raise KeyError("format")


class Watched(nn.Linear):
    """Counts the weights that it loads."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.n_loaded = 0

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.n_loaded += prefix + "weight" in state_dict
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_what_the_model_does_not_load_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """Unless it belongs to a frozen weight. The model gets no weights in order to find out."""
    refused: list[tuple[nn.Module, str]] = [
        (
            nn.ModuleDict({"a": Unread(1.0, is_frozen=False), "b": Overridden(1.0)}),
            r"`a\.layer\.weight\.scale`, `a\..*kind`: ",
        ),
        (Raises(1.0), r"`scale`: `state_dict\(\)` of Raises has what its `load_state_dict\(\)` cannot load \(KeyError"),
    ]
    for model, words in refused:
        with pytest.raises(UnsupportedError, match=words):
            Checkpointer(tmp_path / "refused", save_every=1, signals=()).resume(model=model)
        assert not (tmp_path / "refused").exists()
    Checkpointer(tmp_path / "evaluation", save_every=None, signals=()).resume(model=refused[0][0])
    watched = Watched()
    check(tmp_path / "frozen", lambda _: nn.ModuleDict({"a": Unread(1.0), "b": Hooked(1.0), "c": Overridden(1.0)}))
    with Checkpointer(tmp_path / "watched", save_every=1, signals=()) as checkpointer:
        checkpointer.resume(model=nn.ModuleDict({"a": Hooked(1.0), "b": watched}))
    assert watched.n_loaded == 0


def test_a_checkpoint_without_the_entries_is_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, signals=()) as checkpointer:
        checkpointer.resume(model=nn.ModuleDict({"layer": nn.Linear(2, 2)}))
        checkpointer.save(1, blocking=True)
    with pytest.raises(MismatchError, match="lacks `twice`, the state beside the tensors of `name`"):
        Checkpointer(tmp_path, save_every=None, signals=()).resume(model=Hooked(1.0))


def test_a_persistent_metric(tmp_path: Path) -> None:
    metrics = pytest.importorskip("torchmetrics")

    def make(value: float) -> nn.Module:
        metric = metrics.MeanMetric()
        metric.persistent(mode=True)
        metric.update(torch.tensor(value))
        return nn.ModuleDict({"metric": metric, "layer": nn.Linear(2, 2)})

    check(tmp_path / "run", make)


@pytest.mark.slow
def test_quantized_weights(tmp_path: Path) -> None:
    """In a process of its own: the threads of bitsandbytes must not be in the one from which other tests fork ranks."""
    required("bitsandbytes")
    program = Path(__file__).parent / "quantized.py"
    done = subprocess.run([sys.executable, program, tmp_path], capture_output=True, text=True, check=False)
    alone = ["8 bits restored", "4 bits restored", "4 bits refused"]
    prepared = ["8 bits, prepared, restored", "4 bits, prepared, restored"]
    left_out = [f"{bits} bits without the base {what}" for bits in (4, 8) for what in ("restored", "refused")]
    assert (done.returncode, done.stdout.splitlines()) == (0, alone + prepared + left_out), done.stderr
