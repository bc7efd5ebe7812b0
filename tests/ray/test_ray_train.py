"""Trainings by the workers of Ray Train, of which one is killed. They are skipped where Ray Train is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import reshard
from reshard.torch import ElasticSampler

pytest.importorskip("ray", reason="pip install 'reshard[ray]' 'ray[train]'")
pytest.importorskip("pyarrow", reason="pip install 'ray[train]'")

from tests.helpers.ray_cluster import RayCluster, running

from reshard.errors import UnsupportedError
from reshard.ray.train import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with running(2) as cluster:
        yield cluster


def trained(cluster: RayCluster, folder: Path, *options: object) -> str:
    """The newest checkpoint of a run of the example, as Ray knows it."""
    command = [sys.executable, "-m", "reshard.examples.train_ray", str(folder), *map(str, options)]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1].split()[0]


def logged(folder: Path) -> list[tuple[int, str, list[int], int]]:
    """The lines of its log: step, loss, samples, workers."""
    lines = (folder / "run.log").read_text().splitlines()
    parts = [(*line.split(" ", 2)[:2], *line.split(" ", 2)[2].rsplit(" ", 1)) for line in lines]
    return [(int(step), loss, json.loads(samples), int(workers)) for step, loss, samples, workers in parts]


def order(n_steps: int) -> list[list[int]]:
    """The samples of each step of a run that nothing interrupts."""
    sampler = ElasticSampler(96, 1, True, 12, 0, 1)
    found: list[int] = []
    while len(found) < 12 * n_steps:
        epoch = list(sampler)
        found += epoch
        sampler.step(len(epoch) // 12)
    return [sorted(found[12 * step :][:12]) for step in range(n_steps)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_killed_worker_changes_nothing(cluster: RayCluster, tmp_path: Path, *, asynchronous: bool) -> None:
    """Steps that are made twice are the same to the last bit; then other workers go on where these ended."""
    options = ["--keep", 2, *(["--async-save"] if asynchronous else [])]
    newest = trained(cluster, tmp_path, "--steps", 20, "--kill-at", 15, *options)
    lines, root = logged(tmp_path), tmp_path / "run" / "checkpoints"
    assert newest == str(root / "iteration_00000020")
    resumed = next(n for n in range(1, len(lines)) if lines[n][0] <= lines[n - 1][0])
    assert [line[0] for line in lines[:resumed]] == list(range(1, 15))
    assert lines[resumed][0] in ([11] if not asynchronous else [6, 11])  # what was published when the worker died
    assert [line[0] for line in lines[resumed:]] == list(range(lines[resumed][0], 21))
    assert len({line[0]: line for line in lines}) == len(set(map(str, lines))) == 20
    assert [line[2] for line in lines[resumed:]] == order(20)[lines[resumed][0] - 1 :]
    assert sorted(path.name for path in root.glob("iteration_*")) == ["iteration_00000015", "iteration_00000020"]
    assert reshard.verify(newest).ok
    if asynchronous:
        return

    newest = trained(cluster, tmp_path, "--steps", 25, "--workers", 1, *options)
    more = logged(tmp_path)[len(lines) :]
    assert [line[0] for line in more] == list(range(21, 26))
    assert [line[2] for line in more] == order(25)[20:]
    assert {line[3] for line in more} == {1}
    assert newest == str(root / "iteration_00000025")
    known = json.loads((tmp_path / "run" / "checkpoint_manager_snapshot.json").read_text())["checkpoint_results"]
    assert [one["checkpoint_dir_name"] for one in known] == [f"checkpoints/iteration_000000{n}" for n in (20, 25)]
    with reshard.open(newest) as found:
        steps = {float(found.read(key)) for key in found.keys("optimizer") if key.startswith("step.")}
    assert steps == {25.0}


SAVED_TWICE = """
import sys

import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from reshard.errors import ReshardError
from reshard.ray.train import Checkpointer


def train(config):
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        Checkpointer(format="checkpoint1")
    except ReshardError as error:
        assert error.message.startswith("`format` is"), error
    else:
        raise AssertionError
    with Checkpointer(save_every=2, async_save=config["async_save"]) as checkpointer:
        start = checkpointer.resume(model=model, optimizer=optimizer, allow_fresh=True)
        if not start.fresh:
            checkpointer.save()
        for step in range(start.initial_step + 1, 6):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            checkpointer.step(step, save=step == 5)
            if step % 2 == 0:
                checkpointer.save()
            if step == 3 and start.fresh:
                checkpointer.wait()
                raise RuntimeError("for once")
        checkpointer.save(blocking=True)


n_to_keep, again = int(sys.argv[2]), sys.argv[3:] == ["again"]
result = TorchTrainer(
    train,
    train_loop_config={"async_save": n_to_keep > 1},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(
        name="run",
        storage_path=sys.argv[1],
        failure_config=FailureConfig(max_failures=0 if again else 1),
        checkpoint_config=CheckpointConfig(num_to_keep=n_to_keep),
    ),
).fit()
print(result.checkpoint.path)
"""


@pytest.mark.parametrize("n_to_keep", [1, 2])
def test_an_iteration_that_is_saved_again_is_reported_once(cluster: RayCluster, tmp_path: Path, n_to_keep: int) -> None:
    """Ray would count it twice, and remove the folder for one of the two. With two kept, saves are in the background.

    The last iteration that Ray knows is then damaged: nothing starts anew beside it.
    """
    script, root = tmp_path / "train.py", tmp_path / "run" / "checkpoints"
    script.write_text(SAVED_TWICE)
    command = [sys.executable, str(script), str(tmp_path), str(n_to_keep)]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *more], env=cluster.environment, capture_output=True, text=True, check=False, timeout=600
        )

    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    kept = ["iteration_00000004", "iteration_00000005"][-n_to_keep:]
    known = json.loads((tmp_path / "run" / "checkpoint_manager_snapshot.json").read_text())["checkpoint_results"]
    assert [one["checkpoint_dir_name"] for one in known] == [f"checkpoints/{name}" for name in kept]
    assert sorted(path.name for path in root.glob("iteration_*")) == kept
    assert done.stdout.splitlines()[-1] == str(root / kept[-1])
    assert reshard.verify(root / kept[-1]).ok
    if n_to_keep > 1:
        return
    for path in (root / kept[-1]).glob("*.safetensors"):
        path.write_bytes(b"")
    again = run("again")
    assert again.returncode != 0
    assert "the training would start anew, and Ray knows 1 checkpoints of this run" in again.stdout + again.stderr
    assert sorted(path.name for path in root.glob("iteration_*")) == kept


NOT_MET = """
import sys
from pathlib import Path

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchTrainer

from reshard.errors import GroupError
from reshard.ray.train import Checkpointer
from reshard.torch.emergency import Rendezvous


def train(config):
    rank, poll = get_context().get_world_rank(), Rendezvous.poll
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def late(self, step, timeout):
        if (step, rank, start.fresh) == (3, 1, True):
            raise GroupError("rank 0 did not answer")
        return poll(self, step, timeout)

    Rendezvous.poll = late
    try:
        with Checkpointer(save_every=2) as checkpointer:
            start = checkpointer.resume(model=model, optimizer=optimizer, allow_fresh=True)
            with Path(config["log"]).open("a") as log:
                print(rank, "begins after", start.initial_step, file=log)
            for step in range(start.initial_step + 1, 7):
                checkpointer.step(step)
    finally:
        Rendezvous.poll = poll


result = TorchTrainer(
    train,
    train_loop_config={"log": sys.argv[1] + "/log"},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="run", storage_path=sys.argv[1], failure_config=FailureConfig(max_failures=1)),
).fit()
print(result.checkpoint.path)
"""


def test_ranks_that_do_not_meet_begin_again(cluster: RayCluster, tmp_path: Path) -> None:
    """A rank that reports alone would wait for ever: the others may not know that it waits."""
    script = tmp_path / "train.py"
    script.write_text(NOT_MET)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env=cluster.environment, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    begun = sorted((tmp_path / "log").read_text().splitlines())
    assert [line[:1] for line in begun] == ["0", "0", "1", "1"]
    assert begun[0] == "0 begins after 0"
    assert begun[1] in ("0 begins after 2", "0 begins after 4")  # rank 0 may save again before Ray ends it
    assert done.stdout.splitlines()[-1] == str(tmp_path / "run" / "checkpoints" / "iteration_00000006")
    assert reshard.verify(tmp_path / "run" / "checkpoints").ok


def test_what_ray_decides_is_refused(tmp_path: Path) -> None:
    script = (
        "from reshard.ray.train import Checkpointer\nfrom reshard.errors import ReshardError\n"
        "for options in ({'keep': 3}, {'retention': {'keep': 3}}, {'root': 'x'}, {'commit': {'rollback': True}}, {}):\n"
        "    try:\n        Checkpointer(**options)\n"
        "    except ReshardError as error:\n        print(type(error).__name__, error.message)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    *refused, outside = done.stdout.splitlines()
    assert refused == [
        "ArgumentError `keep` is given, and Ray removes the checkpoints of a run",
        "ArgumentError `retention` is given, and Ray removes the checkpoints of a run",
        "ArgumentError `root` is given, and the saves of a run lie in its storage",
        "ArgumentError `rollback` removes iterations, and Ray removes the checkpoints of a run",
    ]
    assert outside.startswith("ArgumentError this is not the training function of a run of Ray Train: ")
    assert list(tmp_path.iterdir()) == []


def test_a_bucket_as_storage_is_refused(tmp_path: Path) -> None:
    """The contexts are those that Ray makes for a worker; there is no cluster, and no bucket is asked."""
    script = """
from pyarrow.fs import S3FileSystem
from ray.train import RunConfig
from ray.train.v2._internal.execution import context, storage, train_fn_utils
from reshard.errors import ReshardError
from reshard.ray.train import Checkpointer
bucket = S3FileSystem(anonymous=True, region="us-east-1", endpoint_override="127.0.0.1:9", scheme="http")
run = RunConfig(name="run", storage_path="bucket/runs", storage_filesystem=bucket)
of_run = context.TrainRunContext(run, None, None, None, None)
kept = storage.StorageContext("bucket/runs", "run", bucket, read_only=True)
place = context.DistributedContext(0, 1, 0, 1, 0)
context.set_train_context(context.TrainContext(of_run, place, None, kept, None, None, None))
train_fn_utils.set_train_fn_utils(train_fn_utils.DistributedTrainFnUtils())
try:
    print("made", Checkpointer(save_every=1))
except ReshardError as error:
    print(type(error).__name__, error.message)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("UnsupportedError the storage of the run is a file system of the kind `s3`")


def test_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="Ray Train decides that"):
        Checkpointer.from_config({"output_dir": str(tmp_path), "load_checkpoint": "x"})
