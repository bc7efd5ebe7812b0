"""What is wrong with a run is said when its Checkpointer is made or resumes, before the first step."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.helpers.ranks import Job
from torch import nn

import reshard
from reshard import _core
from reshard.commit import protocol
from reshard.errors import (
    ArgumentError,
    ClaimedError,
    DamagedFileError,
    DestinationExistsError,
    ReshardError,
    StorageError,
    UnsupportedError,
)
from reshard.options import Options
from reshard.storage.location import locate
from reshard.torch import Checkpointer, ElasticSampler, preflight, staging
from reshard.torch.state import describe
from reshard.verbs.load import LoadRequest, load_with
from reshard.write import background

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.ranks.group import TorchGroup


class Holder:
    """Anything with state."""

    def __init__(self, state: Any = 1) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


def resume(root: Path, *, parts: dict[str, Any] | None = None, allow_fresh: bool = False, **options: Any) -> Any:
    given: dict[str, Any] = {"save_every": 1, "signals": (), "commit": {"durable": False}, **options}
    made = Checkpointer(root, **given)
    run = dict(parts or {})
    if "model" not in run:
        run["model"] = nn.Linear(2, 1)
    return made, made.resume(**run, allow_fresh=allow_fresh)


def train(root: Path, last: int, **options: Any) -> Any:
    """A run up to a step, and the decision that it began with."""
    made, decision = resume(root, async_save=False, **options)
    for step in range(decision.initial_step + 1, last + 1):
        made.step(step, loss=1.0)
    made.close()
    return decision


@contextmanager
def other_job(root: Path) -> Iterator[int]:
    """A live process that has claimed a root."""
    program = (
        "import signal, sys; from reshard.commit import protocol; from reshard.storage.location import locate; "
        "protocol.claim_root(locate(sys.argv[1]), durable=False); print('claimed', flush=True); signal.pause()"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(root)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"claimed\n"
        yield process.pid
    finally:
        process.kill()
        process.communicate()


# -- options


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"retention": {"best": "loss"}}, "`best` is 'loss'"),
        ({"retention": {"best": ("loss", 0)}}, "`best`"),
        ({"keep": 0}, "`keep`"),
        ({"keep": "5"}, "`keep`"),
        ({"retention": {"keep": None, "keep_every": 5}}, "`keep`"),
        ({"keep": 5, "retention": {"keep_every": 5}}, "`keep` and `retention` are both given"),
        ({"format": "checkpoint3"}, "`format`"),
        ({"files": {"prefix": "a/b"}}, "a/b"),
        ({"files": {"prefix": "a/b"}, "format": "checkpoint1"}, "a/b"),
        ({"format": "checkpoint1", "retention": {"keep_every": 5}}, "`keep_every`"),
        ({"sink_size": 5}, "`sink_size` is a field of `Checkpoint1Options`"),
        ({"format": {"name": "checkpoint2", "sink_size": 5}}, "`sink_size`"),
        ({"threads": "5"}, "threads"),
        ({"threads": 0}, "threads"),
        ({"timeout": None}, "timeout"),
        ({"verify": "no"}, "`verify`"),
        ({"environment": {"data": 1}}, "`Environment` has no field `data`"),
        ({"environment": {"dataset": 5}}, "`dataset` is of type int"),
        ({"ranks": {"seed": -1}}, "seed is -1"),
        ({"ranks": {"mesh": 5}}, "`mesh` is of type int"),
        ({"links": True}, "`links` is a field of `Exports`"),
        ({"integrated_save": True}, "`integrated_save` is a field of `Exports`"),
        ({"strict_environment": True}, "`strict_environment` is a field of `Environment`"),
    ],
    ids=str,
)
def test_invalid_option_is_refused_when_the_checkpointer_is_made(
    tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ArgumentError, match=named):
        Checkpointer(tmp_path, signals=(), **options)


@pytest.mark.parametrize("format", ["checkpoint2", "checkpoint1"])
def test_dry_run_refuses_what_a_save_would_refuse_and_changes_nothing(tmp_path: Path, format: Any) -> None:  # noqa: A002
    root, good = tmp_path / "root", {"w": np.zeros((2, 3))}
    save: Any = reshard.save
    assert save(root, 5, good, extra={"n": 1}, format=format, dry_run=True) is None
    part = reshard.Shard(np.zeros((1, 3)), (2, 3), (0, 0))
    for wrong in ({"extra": {"f": print}}, {"model": {"w": "text"}}, {"model": {"w": part}}, {"keep": 0}):
        with pytest.raises(ReshardError):
            save(root, 5, **({"model": good} | wrong), format=format, dry_run=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 20 << 20), ({"save_every": 2}, 20 << 20), ({"overlap": True}, 0), ({"async_save": False}, 0)],
    ids=str,
)
def test_memory_of_the_first_save_in_the_background_is_allocated_after_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], expected: int
) -> None:
    pool = _core.SnapshotPool()
    monkeypatch.setattr(background, "snapshot_pool", lambda: pool)
    model = nn.Linear(1024, 1024)
    optimizer = torch.optim.Adam(model.parameters())
    made = Checkpointer(tmp_path, signals=(), commit={"durable": False}, **options)
    made.resume(model=model, optimizer=optimizer, allow_fresh=True)
    assert pool.free_bytes == 0
    model(torch.ones(1024)).sum().backward()
    optimizer.step()
    made.step(1)
    deadline = time.monotonic() + 30
    while pool.free_bytes < expected and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pool.free_bytes == expected  # the files of 4 and 8 MiB have headers, and sizes are rounded up to 4 MiB
    made.save(2)
    made.close()
    assert pool.free_bytes == expected


def test_memory_is_not_reserved_beside_that_of_a_save_that_the_first_step_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = _core.SnapshotPool()
    monkeypatch.setattr(background, "snapshot_pool", lambda: pool)
    released, write = threading.Event(), background.start
    monkeypatch.setattr(
        "reshard.write.collective_save.background.start",
        lambda iteration, work, *rest, **given: write(
            iteration, lambda progress: (released.wait(30), work(progress=progress))[1], *rest, **given
        ),
    )
    made, _ = resume(tmp_path, save_every=100, parts={"model": nn.Linear(1024, 1024)}, allow_fresh=True)
    made.step(1, save=True)
    made.step(2)
    released.set()
    made.close()
    time.sleep(0.2)  # for memory that is still coming
    assert pool.free_bytes == 8 << 20


@pytest.mark.slow
def test_ranks_whose_tensors_lie_on_different_devices_check_the_first_save_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(group: TorchGroup) -> list[int]:
        is_pinned = staging.on_device if group.rank else lambda _: True  # rank 0 as with tensors on a GPU
        monkeypatch.setattr(preflight, "on_device", is_pinned)
        model = nn.Linear(1024, 1024)
        made = Checkpointer(tmp_path, signals=(), save_every=100, timeout=20.0, commit={"durable": False})
        made.resume(model=model, optimizer=torch.optim.SGD(model.parameters(), momentum=0.9), allow_fresh=True)
        begin = time.monotonic()
        made.step(1)
        seconds = time.monotonic() - begin
        pool = background.snapshot_pool()
        while group.rank and not pool.free_bytes and time.monotonic() - begin < 30:
            time.sleep(0.01)
        made.save(2, blocking=True)
        made.close()
        return [int(seconds / 10), pool.free_bytes]  # neither waits for the timeout

    with Job(2, work) as job:
        first, second = job.values()
    assert first == [0, 0]
    assert second[0] == 0
    assert second[1] > 0


def test_state_that_the_first_step_made_and_that_cannot_be_saved_is_told_after_it(tmp_path: Path) -> None:
    class Odd(torch.optim.SGD):
        def step(self, *_: Any) -> None:  # type: ignore[override]
            for one in self.param_groups[0]["params"]:
                self.state[one]["odd"] = object()

    for options, error in (({"save_every": 100}, ArgumentError), ({}, None)):
        model = nn.Linear(2, 2)
        optimizer = Odd(model.parameters(), lr=0.1)
        made = Checkpointer(tmp_path / str(error), signals=(), **options)  # type: ignore[arg-type]
        made.resume(model=model, optimizer=optimizer, allow_fresh=True)
        optimizer.step()
        with pytest.raises(error) if error else nullcontext():
            made.step(1)
        made.step(2)


@pytest.mark.slow(disk=False)
def test_root_of_another_number_of_ranks_is_refused_by_resume(tmp_path: Path) -> None:
    def work(n_before: int, group: TorchGroup) -> str:
        del group
        made = Checkpointer(
            tmp_path,
            format="checkpoint1",
            save_every=1,
            async_save=False,
            files={"dedup": False},
            signals=(),
            commit={"durable": False},
        )
        if n_before:
            with pytest.raises(ReshardError, match="ranks"):
                made.resume(model=nn.Linear(2, 1), allow_fresh=True)
            return "refused"
        made.resume(model=nn.Linear(2, 1))
        made.step(1)
        return "saved"

    with Job(2, lambda group: work(0, group)) as job:
        assert job.values() == ["saved"] * 2
    with Job(3, lambda group: work(2, group)) as job:
        assert job.values() == ["refused"] * 3


# -- the root


def test_root_that_cannot_be_written_to_is_refused_by_resume(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (Path("/proc/reshard"), tmp_path / "file", tmp_path / "file" / "root"):
        with pytest.raises((StorageError, DestinationExistsError)) as caught:
            resume(root)
        assert str(root).startswith(str(caught.value.path))


def test_an_iteration_folder_is_no_root(tmp_path: Path) -> None:
    train(tmp_path, 1)
    folder = tmp_path / "iteration_00000001"
    before = sorted(folder.rglob("*"))
    with pytest.raises(DestinationExistsError, match="is a checkpoint itself") as caught:
        resume(folder)
    assert f"`{tmp_path}`" in str(caught.value.hint)
    with pytest.raises(DestinationExistsError, match="is a checkpoint itself"):
        reshard.save(folder, 2, {"w": np.zeros(2)})
    assert sorted(folder.rglob("*")) == before


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_root_without_permission_is_refused_by_resume(tmp_path: Path) -> None:
    train(tmp_path, 1)
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(StorageError, match="cannot be written to"):
            resume(tmp_path)
    finally:
        tmp_path.chmod(0o755)


def test_root_of_another_live_job_is_refused_by_resume_and_can_be_taken_over(tmp_path: Path) -> None:
    train(tmp_path, 3)
    protocol.release(locate(tmp_path))
    with other_job(tmp_path) as pid:
        with pytest.raises(ClaimedError, match=f"`{pid}`.*alive"):
            resume(tmp_path)
        _, decision = resume(tmp_path, save_every=None)  # an evaluation beside the training
        assert decision.initial_step == 3
        assert any("a save would fail" in line and "alive" in line for line in decision.warnings)
        assert train(tmp_path, 4, commit={"durable": False, "takeover": True}).initial_step == 3
    assert reshard.open(tmp_path).iteration == 4


@pytest.mark.slow(disk=False)
def test_root_of_another_live_job_is_refused_on_all_ranks(tmp_path: Path) -> None:
    def work(group: TorchGroup) -> str:
        del group
        with pytest.raises(ReshardError, match="alive"):
            resume(tmp_path)
        return "refused"

    with other_job(tmp_path), Job(2, work) as job:
        assert job.values() == ["refused"] * 2


def test_root_that_is_only_read_is_not_claimed_and_not_made(tmp_path: Path) -> None:
    _, decision = resume(tmp_path / "new", save_every=None)
    assert decision.fresh
    assert not (tmp_path / "new").exists()


# -- the state


@pytest.mark.parametrize("name", ["extra", "per rank", "scheduler", "sampler"])
def test_state_that_cannot_be_saved_is_refused_by_resume_under_the_name_that_it_was_given(
    tmp_path: Path, name: str
) -> None:
    bad: Any = Holder(lambda: 1)
    parts: dict[str, Any] = {
        "extra": {"extra": {"thing": bad}},
        "per rank": {"extra": {"thing": reshard.per_rank(bad)}},
        "scheduler": {"scheduler": bad},
        "sampler": {"sampler": bad},
    }[name]
    with pytest.raises(ArgumentError, match=r"cannot be saved") as caught:
        resume(tmp_path, parts=parts)
    given = "`extra['thing']`" if name in {"extra", "per rank"} else f"`{name}`"
    assert given in caught.value.message
    assert not list(tmp_path.iterdir())


def test_tensor_that_cannot_be_saved_is_refused_by_resume(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    model.register_buffer("odd", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(UnsupportedError, match="odd"):
        resume(tmp_path, parts={"model": model})


def test_state_of_one_rank_that_cannot_be_saved_is_refused_on_all(tmp_path: Path) -> None:
    def work(group: TorchGroup) -> str:
        own = Holder(lambda: 1) if group.rank == 1 else Holder()
        with pytest.raises(ReshardError, match="cannot be saved"):
            resume(tmp_path, parts={"extra": {"own": reshard.per_rank(own)}}, timeout=20)
        return "refused"

    with Job(2, work) as job:
        assert job.values() == ["refused"] * 2


def test_checks_leave_random_streams_and_the_device_of_the_record_alone(tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected, parts = torch.rand(1), {"model": nn.Linear(2, 1)}
    torch.manual_seed(3)
    made, _ = resume(tmp_path, parts=parts)
    assert torch.equal(torch.rand(1), expected)
    assert made._saver.run.record is None  # made at the first save, when devices are in use


# -- what the run starts from


def of_words(words: dict[str, Any], last: int, **options: Any) -> Any:
    """A run made by a configuration that saves each second step, up to a step; the decision that it began with."""
    callback = {"type": "CheckpointMonitor", "save_checkpoint_steps": 2}
    given: dict[str, Any] = {"signals": (), "commit": {"durable": False}, **options}
    with Checkpointer.from_config({**words, "callbacks": [callback]}, **given) as made:
        sampler = ElasticSampler(64, 0, True, 4, 0, 1)
        decision = made.resume(model=nn.Linear(2, 1), sampler=sampler, strict=False)
        for step in range(decision.initial_step + 1, last + 1):
            made.step(step)
    return decision


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("start", ["weights", "nothing", "another root"])
def test_restart_by_a_configuration_goes_on_from_the_newest_checkpoint_of_the_run(tmp_path: Path, start: str) -> None:
    given = tmp_path / "given"
    reshard.save(given, 3, nn.Linear(2, 1).state_dict())
    words: dict[str, Any] = {"output_dir": str(tmp_path / "out")}
    if start != "nothing":
        words |= {"load_checkpoint": str(given), "resume_training": start == "another root"}
    first = of_words(words, 7)
    assert first.initial_step == (3 if start == "another root" else 0)
    if start != "nothing":
        assert first.reasons[0].endswith(f"holds no checkpoint: the run starts from {given}")
    again = of_words(words, 12)
    assert (again.initial_step, again.iteration) == (6, 6)
    own = f"the run goes on from its own newest checkpoint, in {tmp_path}/out/checkpoint"
    assert again.reasons[0] == own + ("" if start == "nothing" else f"; {given} is not loaded again")
    assert of_words(words, 12).initial_step == 12


def test_start_that_is_further_on_than_the_root_counts(tmp_path: Path) -> None:
    reshard.save(tmp_path / "given", 9, nn.Linear(2, 1).state_dict())
    train(tmp_path / "out", 4)
    words = {"load_checkpoint": str(tmp_path / "given"), "resume_training": True}
    decision = of_words(words, 9, root=tmp_path / "out")
    assert decision.initial_step == 9
    assert "is at step 9" in decision.reasons[0]


def test_rollback_starts_as_the_configuration_says_and_passes_over_what_the_root_holds(tmp_path: Path) -> None:
    root, weights = tmp_path / "out", tmp_path / "given"
    reshard.save(weights, 3, nn.Linear(2, 1).state_dict())
    train(root, 6)
    words = {"load_checkpoint": str(weights)}
    assert of_words(words, 3, root=root, commit={"durable": False, "rollback": True}).initial_step == 0
    assert reshard.open(root).iteration == 2
    assert of_words(words, 4, root=root).initial_step == 2


def test_start_below_what_the_root_holds_is_refused_by_resume(tmp_path: Path) -> None:
    root, given, weights = tmp_path / "out", tmp_path / "given", nn.Linear(2, 1).state_dict()
    reshard.save(root, 8, weights, common={"global_batch_size": 2})  # as many samples as 4 steps of the run
    reshard.save(given, 5, weights, common={"global_batch_size": 4})
    words = {"load_checkpoint": str(given), "resume_training": True}
    with pytest.raises(ArgumentError, match=r"iteration 6 is below 8.*\n.*`commit=Commit\(rollback=True\)`"):
        of_words(words, 9, root=root)
    assert of_words(words, 6, root=root, commit={"durable": False, "rollback": True}).initial_step == 5
    assert reshard.open(root).iteration == 6


def test_damaged_checkpoints_of_the_run_are_an_error_and_with_allow_fresh_it_starts_as_given(tmp_path: Path) -> None:
    root, weights = tmp_path / "out", nn.Linear(2, 1)
    reshard.save(tmp_path / "given", 3, weights.state_dict())
    train(root, 4)
    for path in root.glob("iteration_*/manifest.json"):
        path.write_text("{}")
    words = {"load_checkpoint": str(tmp_path / "given")}
    model = nn.Linear(2, 1)
    made = Checkpointer.from_config(words, root=root, save_every=1, signals=(), commit={"durable": False})
    with pytest.raises(DamagedFileError, match="no checkpoint in"):
        made.resume(model=model)
    decision = made.resume(model=model, allow_fresh=True)
    assert (decision.initial_step, decision.restored) == (0, ("weights",))
    assert torch.equal(model.weight, weights.weight)
    made.step(1)
    made.close()
    assert reshard.open(root).iteration == 1


def test_fresh_start_beside_damaged_checkpoints_can_save(tmp_path: Path) -> None:
    train(tmp_path, 4)
    for path in tmp_path.glob("iteration_*/manifest.json"):
        path.write_text("{}")
    assert train(tmp_path, 2, allow_fresh=True).fresh
    assert train(tmp_path, 3).initial_step == 2


# -- the model


def test_model_on_meta_and_nothing_to_resume_is_refused_with_how_to_initialise(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 1)
    for root in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ArgumentError, match=r"`weight`(.|\n)*to_empty(.|\n)*reset_parameters"):
            resume(root, parts={"model": model})
    assert not list(tmp_path.iterdir())


# -- hints

HAVE_NOT_BUT_ALLOWED = {
    # Never reached by a checkpointer, or beside another way that it has.
    ("checkpoint.py", "dtype"): "`numpy` reads alone",
    ("checkpoint.py", "strategy"): "the hint says first where the files can be put",
    ("checkpoint.py", "rank"): "`Checkpoint.load` alone",
    ("formats/checkpoint1/replicas.py", "keys"): "an argument of `load`, named beside another way",
    ("ranks/group.py", "rank"): "a checkpointer gives no rank",
    ("layout/invert.py", "shapes"): "a checkpointer gives all shapes",
    ("quantised/dequantise.py", "dtype"): "`convert` alone",
    ("torch/loading.py", "dtype"): "the hint names `convert`",
    ("layout/strategy_folder.py", "overwrite"): "`reshard strategy merge` alone",
    ("torch/checkpointer.py", "config"): "an entry of `environment`",
    ("formats/outputs.py", "keys"): "`out=` is given by `load` alone",
    ("formats/outputs.py", "part"): "`out=` is given by `load` alone",
    ("torch/state.py", "objects"): "a checkpointer checks what it is given before",
    ("verbs/load.py", "layout"): "own files and Hugging Face folders by layout: `load` alone",
    ("verbs/load.py", "rank"): "as above",
    ("verbs/load.py", "strategy"): "as above",
    ("formats/checkpoint1/save.py", "layout"): "a checkpointer refuses that before",
    ("formats/checkpoint2/writer.py", "overwrite"): "conversion alone",
    ("formats/checkpoint2/planning.py", "layout"): "a checkpointer gives shards, or a layout",
    ("formats/checkpoint2/planning.py", "shapes"): "a checkpointer gives all shapes",
    ("write/rank_facts.py", "layout"): "a checkpointer gives shards, or a layout",
    ("commit/folder_protocol.py", "overwrite"): "`begin(overwrite=False)` alone",
    ("commit/log_protocol.py", "overwrite"): "as above",
}
NOT_OF_A_CHECKPOINTER = (
    "mindspore/",
    "cli",
    "names",
    "interop.py",
    "verbs/convert",
    "verbs/selection",
    "conversion",
    "quantised",
)


def parameters(*functions: Any) -> set[str]:
    return {name for function in functions for name in inspect.signature(function).parameters}


@pytest.mark.slow(disk=False)
def test_hints_name_arguments_that_a_checkpointer_has() -> None:
    have = parameters(Checkpointer, Checkpointer.resume, Checkpointer.step, Checkpointer.save)
    known = parameters(reshard.save, reshard.load, load_with, LoadRequest, describe, protocol.begin, reshard.open)
    for group in Options.__subclasses__():
        fields = {field.name for field in dataclasses.fields(group)}
        if group.keyword in have:
            have |= fields
        elif group.keyword in known:
            known |= fields
    assert {"rollback", "takeover", "extra"} <= have
    have_not = known - have
    assert {"out", "copy", "method"} <= have_not
    package = Path(reshard.__file__).parent
    found = set()
    for path in sorted(package.rglob("*.py")):
        name = str(path.relative_to(package))
        if name.startswith(NOT_OF_A_CHECKPOINTER) or name.endswith("writer.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (isinstance(node, ast.keyword) and node.arg == "hint") or (
                isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "hint"
            ):
                parts = [one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant)]
                text = "".join(str(one) for one in parts)
                words = re.findall(r"`([a-z_]+)(?:=[^`]*)?`", text) + re.findall(r"`[a-z_]+=[A-Z]\w*\(([a-z_]+)=", text)
                found |= {(name, word) for word in words if word in have_not}
    assert found <= HAVE_NOT_BUT_ALLOWED.keys()


def test_optimizers_with_a_state_of_their_own_are_taken_and_anything_else_is_refused(tmp_path: Path) -> None:
    own = type("Own", (torch.optim.SGD,), {"state_dict": lambda _: {}})([torch.zeros(1)], 0.1)
    for number, other in enumerate((Holder(np.float32(3)), own)):
        _, decision = resume(tmp_path / str(number), parts={"optimizer": other})
        assert decision.fresh
    with pytest.raises(ReshardError, match=r"`Checkpointer.resume\(extra=") as caught:
        resume(tmp_path / "refused", parts={"optimizer": object()})
    assert "objects" not in str(caught.value)
    _, decision = resume(tmp_path / "extra", parts={"extra": {"other": Holder(np.float32(3))}})
    assert decision.fresh


def test_signal_handlers_are_not_kept_by_a_refused_run(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(ArgumentError, match="`keep`"):
        Checkpointer(tmp_path, keep=0)
    assert signal.getsignal(signal.SIGUSR1) is before


def test_objects_that_differ_or_are_not_given_on_all_ranks_are_refused_before_the_first_step(tmp_path: Path) -> None:
    class Stateful:
        def __init__(self, state: int) -> None:
            self.state = state

        def state_dict(self) -> dict[str, int]:
            return {"state": self.state}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.state = state["state"]

    def work(group: TorchGroup) -> list[str]:
        told = []
        for parts in ({"scheduler": Stateful(group.rank)}, {"extra": {"ema": Stateful(0)} if group.rank else {}}):
            with pytest.raises(ReshardError) as caught:
                resume(tmp_path, parts=parts, timeout=20)
            told.append(f"{caught.value.message}\nhint: {caught.value.hint}")
        return told

    with Job(2, work) as job:
        for scheduler, extra in job.values():
            assert "the state of `scheduler` differs between ranks: `state` is 0 on rank 0, 1 on rank 1" in scheduler
            assert "hint: a scheduler is the same on all ranks: reduce the metric" in scheduler
            assert "`extra['ema']` is given only on rank 1" in extra
