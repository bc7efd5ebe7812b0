"""Checkpoint 1.0 by real ranks over torch's store: saved, killed, resumed, resharded, and by a trainer."""

from __future__ import annotations

import contextlib
import shutil
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.helpers import original_reader1 as original
from tests.helpers.cases import slow
from tests.helpers.oracle import local_arrays
from tests.helpers.original_reader import read_shard_file
from tests.helpers.ranks import Job, Signal, no_longer_patient
from tests.helpers.small_training import Trainer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import reshard
from reshard.commit import folder_protocol, protocol
from reshard.commit.session import forget_all
from reshard.errors import ArgumentError, GroupError, ReshardError
from reshard.storage.location import locate
from reshard.torch import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LAYOUT: dict[str, Any] = {
    "mesh": {"pp": 2, "dp": 1, "tp": 2},
    "rules": [{"match": "*.w", "cut": ["tp"]}, {"match": "*"}],
    "place": [{"match": "layers.{i}.*", "axis": "pp"}],
}
MODEL = {
    "layers.0.w": np.arange(48.0).reshape(8, 6),
    "layers.1.w": np.arange(48.0).reshape(8, 6) + 100,
    "norm.b": np.arange(3, dtype=np.float32),
}
STATE = {"adam_m.layers.0.w": MODEL["layers.0.w"] * 2, "global_step": np.array([17], np.int32)}


@pytest.fixture(autouse=True)
def _a_run_of_its_own() -> Iterator[None]:
    yield
    protocol.release()
    forget_all()


def save(group: Any, root: Path, iteration: int, **options: Any) -> Any:
    own = {
        key: array + iteration if key.endswith(".w") else array
        for key, array in local_arrays(LAYOUT, MODEL | STATE, group.rank, list(STATE)).items()
    }
    given: dict[str, Any] = {
        "timeout": 30,
        "commit": {"durable": False},
        "format": {"name": "checkpoint1", "sink_size": 5},
        **options,
    }
    model = {key: array for key, array in own.items() if key in MODEL}
    return reshard.save(root, iteration, model, {k: own[k] for k in own if k in STATE}, layout=LAYOUT, **given)


def check(root: Path, iteration: int, suffix: str) -> None:
    """By the original's rules, by ours, and by ours on other ranks."""
    files = original.resume(root)
    assert [path.name for path in files.values()] == [f"CKP_rank_{rank}{suffix}.safetensors" for rank in range(4)]
    assert {int(read_shard_file(path)["step_num"]) for path in files.values()} == {iteration}
    whole = {key: array + iteration if key.endswith(".w") else array for key, array in (MODEL | STATE).items()}
    got = reshard.load(root)
    assert got.iteration == got.decision.initial_step == iteration
    assert set(got.state) - {"epoch_num", "step_num"} == set(whole)
    tp4 = {"mesh": {"tp": 4}, "rules": LAYOUT["rules"]}
    for rank in range(4):
        own = reshard.load(root, tp4, rank=rank).state
        for key, array in local_arrays(tp4, whole, rank, list(STATE)).items():
            assert np.array_equal(own[key], array), key


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("options", [{}, *slow([{"files": {"dedup": False}}, {"blocking": False}])], ids=str)
def test_ranks_save_and_resume(tmp_path: Path, options: dict[str, Any]) -> None:
    root = tmp_path / "checkpoint"

    def work(group: Any) -> list[Any]:
        reports = []
        for iteration in (5, 10, 15):
            one = save(group, root, iteration, keep=2, extra={"own": reshard.per_rank(group.rank)}, **options)
            reports.append(one if options.get("blocking", True) else one.result(30))
        got = reshard.load(root, LAYOUT)
        is_same = np.array_equal(got.state[f"layers.{group.rank // 2}.w"], _own(group.rank, 15))
        return [[one.digest, one.suffix] for one in reports] + [got.iteration, got.extra["own"], is_same]

    with Job(4, work) as job:
        values = job.values()
    assert [value[:4] for value in values] == [values[0][:4]] * 4
    assert [one[1] for one in values[0][:3]] == ["1_5", "2_5", "3_5"]
    assert [value[4:] for value in values] == [[rank, True] for rank in range(4)]
    check(root, 15, "-3_5")
    assert sorted(path.name for path in (root / "rank_3").glob("*.safetensors")) == [
        f"CKP_rank_3-{n}_5.safetensors" for n in (2, 3)
    ]

    def again(group: Any) -> Any:
        return save(group, root, 20, keep=2).suffix

    with Job(4, again) as job:
        assert job.values() == ["1-4_5"] * 4
    check(root, 20, "_1-4_5")


def _own(rank: int, iteration: int) -> np.ndarray:
    whole = MODEL[f"layers.{rank // 2}.w"] + iteration
    return whole[4 * (rank % 2) : 4 * (rank % 2) + 4]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_killed_while_it_writes(tmp_path: Path, victim: int) -> None:
    writing, killed, root = Signal(), Signal(), tmp_path / "checkpoint"

    def work(group: Any) -> Any:
        save(group, root, 5)

        def stop(done: int, total: int) -> None:
            writing.set()
            signal.pause()

        def go_on(done: int, total: int) -> None:
            killed.wait()
            no_longer_patient()

        try:
            save(group, root, 10, timeout=120, keep=1, progress=stop if group.rank == victim else go_on)
        except GroupError:
            return "given up"
        return None

    with Job(4, work) as job:
        writing.wait()
        job.kill(victim)
        killed.set()
        outcomes = job.outcomes()
    assert [outcome and outcome["value"] for outcome in outcomes] == [
        None if rank == victim else "given up" for rank in range(4)
    ]
    check(root, 5, "-1_5")

    def again(group: Any) -> Any:
        return save(group, root, 10, keep=1).suffix

    with Job(4, again) as job:
        assert job.values() == ["1-2_5"] * 4
    check(root, 10, "_1-2_5")
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.slow(disk=False)
def test_a_rank_that_fails_is_told_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"

    def work(group: Any) -> list[str]:
        save(group, root, 5)

        def fail(done: int, total: int) -> None:
            raise OSError(28, "No space left on device")

        told = []
        bad: list[dict[str, Any]] = [
            {"progress": fail} if group.rank == 2 else {},
            {"format": {"name": "checkpoint1", "sink_size": 3}} if group.rank == 1 else {},
            {"extra": {"x": object()}} if group.rank == 3 else {},
        ]
        for options in bad:
            with contextlib.suppress(TypeError):
                try:
                    save(group, root, 10, **options)
                except ReshardError as error:
                    told.append(str(error))
        return told

    with Job(4, work) as job:
        for told in job.values():
            assert "rank 2: " in told[0]
            assert "No space left" in told[0]
            assert "`sink_size` is 5 on rank 0 and 3 on rank 1" in told[1]
            assert "rank 3: " in told[2]
    check(root, 5, "-1_5")
    assert len(list(tmp_path.rglob("*.safetensors"))) == 4


@pytest.mark.slow
def test_two_jobs_in_one_root(tmp_path: Path) -> None:
    reshard.save(tmp_path, 1, {"w": np.zeros(2)}, format="checkpoint1")

    def work(group: Any) -> str:
        try:
            save(group, tmp_path, 2)
        except ReshardError as error:
            return type(error).__name__
        return "saved"

    with Job(4, work) as job:
        assert job.values() == ["ArgumentError"] * 4  # of another number of ranks
    root = tmp_path / "other"
    folder_protocol.make_root(locate(root), 0o750, durable=False)
    reshard.save(root, 1, {"w": np.zeros(2)})  # claimed, and no rank folder in it
    with Job(4, lambda group: save_or_tell(group, root)) as job:
        assert job.values() == ["DestinationExistsError"] * 4
    shutil.rmtree(root / "iteration_00000001")
    (root / "latest_checkpointed_iteration.txt").unlink()
    with Job(4, lambda group: save_or_tell(group, root)) as job:
        assert job.values() == ["ClaimedError"] * 4


def save_or_tell(group: Any, root: Path) -> str:
    try:
        save(group, root, 2)
    except ReshardError as error:
        return type(error).__name__
    return "saved"


# -- a trainer


CONFIG: dict[str, Any] = {
    "use_legacy_format": True,
    "resume_training": True,
    "callbacks": [
        {
            "type": "CheckpointMonitor",
            "prefix": "llama",
            "save_checkpoint_steps": 3,
            "keep_checkpoint_max": 2,
            "save_network_params": True,
            "save_trainable_params": True,
            "integrated_save": True,
            "async_save": True,
        }
    ],
}


def test_a_configuration_in_the_originals_words(tmp_path: Path) -> None:
    output = tmp_path / "output"
    config = {**CONFIG, "output_dir": str(output), "load_checkpoint": str(output / "checkpoint")}

    def run(seed: int, first: int, last: int) -> list[float]:
        trainer = Trainer(seed)
        trainer.model[0].weight.requires_grad = False
        with Checkpointer.from_config(config, signals=(), commit={"durable": False}) as made:
            decision = made.resume(**trainer.parts())
            assert decision.initial_step == first - 1
            return trainer.run(made, first, last)

    output.mkdir()
    (output / "checkpoint").mkdir()
    losses = run(0, 1, 8)
    protocol.release()
    forget_all()  # as a process that was started again
    again = run(99, 7, 12)
    assert losses[6:] == again[:2]
    names = sorted(path.name for path in (output / "checkpoint" / "rank_0").glob("*.safetensors"))
    # Sixteen steps are an epoch.
    assert names == [f"llama_rank_0{end}.safetensors" for end in ("-1_3", "-1_6", "_1-1_12", "_1-1_9")]
    last = read_shard_file(output / "checkpoint" / "rank_0" / names[2])
    alone = read_shard_file(output / "checkpoint_network" / "rank_0" / "llama_rank_0_1-network-1_12.safetensors")
    trained = read_shard_file(
        output / "checkpoint_trainable" / "rank_0" / "llama_rank_0_1-trainable_params-1_12.safetensors"
    )
    assert last["global_batch_size"] == 4
    assert set(alone) == set(Trainer().model.state_dict())
    assert set(trained) == set(dict(Trainer().model.named_parameters())) - {"0.weight"}
    whole = output / "checkpoint_integrated"
    assert sorted(path.name for path in whole.iterdir()) == ["iteration_00000009", "iteration_00000012"]
    with reshard.open(whole / "iteration_00000012") as opened:
        assert set(opened.keys()) >= set(alone)
        assert all(np.array_equal(opened.read(key), array) for key, array in alone.items())


@pytest.mark.slow(disk=False)
def test_integrated_by_all_ranks(tmp_path: Path) -> None:
    """Sharded by FSDP, saved in either format, and merged by all ranks besides."""

    def work(group: Any) -> list[Any]:
        del group
        torch.manual_seed(3)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        full = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        fully_shard(model, mesh=mesh)
        told = []
        for form in ("checkpoint1", "checkpoint2"):
            root = tmp_path / form
            options: dict[str, Any] = {
                "format": form,
                "exports": {"integrated": True},
                "signals": (),
                "commit": {"durable": False},
            }
            with Checkpointer(root, async_save=False, **options) as made:
                made.resume(model=model)
                told.append(made.save(7, blocking=True).warnings)  # type: ignore[union-attr]
            with reshard.open(f"{root}_integrated/iteration_00000007") as opened:
                told.append([bool((opened.read(key) == tensor.numpy()).all()) for key, tensor in full.items()])
        return told

    with Job(2, work) as job:
        for told in job.values():
            assert [told[1], told[3]] == [[True] * 4] * 2


def test_keep_every_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="`keep_every` and `best` of `Retention` are for"):
        Checkpointer(tmp_path, format="checkpoint1", retention={"keep_every": 100}, signals=())


def test_only_the_strategy_is_written(tmp_path: Path) -> None:
    def work(group: Any) -> Any:
        del group
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = nn.Linear(4, 8)
        fully_shard(model, mesh=mesh)
        config = {"only_save_strategy": True, "output_dir": str(tmp_path)}
        with Checkpointer.from_config(config, signals=(), commit={"durable": False}) as made:
            made.resume(model=model)
            return made.save(1, blocking=True).path  # type: ignore[union-attr]

    with Job(2, work) as job:
        assert job.values() == [str(tmp_path / "strategy")] * 2
    layout = reshard.ModelLayout.from_strategy(tmp_path / "strategy").bind({"weight": (8, 4), "bias": (8,)})
    assert layout.layouts["weight"].local_shape(1) == (4, 4)
    assert not list(tmp_path.rglob("*.safetensors"))
