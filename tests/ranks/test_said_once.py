"""A message that is the same on all ranks is logged once, by rank 0, and one that a single rank has by that rank."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.helpers.ranks import Job
from torch import nn

import reshard
from reshard.errors import KeyNotFoundError, StorageError
from reshard.options import SaveOptions
from reshard.ranks.collective import Collective
from reshard.ranks.group import session
from reshard.ranks.said_once import held_back, release
from reshard.torch import Checkpointer, ElasticSampler
from reshard.torch.exports import _export
from reshard.write.collective_save import SaveReport

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reshard.ranks.group import TorchGroup
    from reshard.storage.location import Location


class Heard(logging.Handler):
    """The messages of a process from INFO on."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def heard(work: Callable[[], object]) -> list[str]:
    """What this process logs while it does the work."""
    logger, handler = logging.getLogger("reshard"), Heard()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with contextlib.suppress(SystemExit, StorageError):
        work()
    logger.removeHandler(handler)
    return handler.lines


def published(folder: Path) -> Path:
    """A folder that is read with warnings: a single file beside an index."""
    folder.mkdir()
    weights = {"weight": torch.zeros(1, 1), "bias": torch.zeros(1)}
    reshard.torch.save_file(weights, folder / "model.safetensors")
    reshard.torch.save_file(weights, folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def trained(root: Path, **options: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Checkpointer(root, save_every=2, signals=()) as made:
        first = made.resume(model=model, optimizer=optimizer, **options).initial_step
        for step in range(1, 4):
            made.step(first + step)


def looped(root: Path, group: TorchGroup, *, fails: bool) -> None:
    """Read too many samples for a step, and get a signal."""
    sampler = ElasticSampler(960, 0, True, 4, group.rank, group.world_size)
    read = iter(sampler)
    with Checkpointer(root, save_every=50, signals=(signal.SIGUSR1,)) as made:
        made.resume(model=nn.Linear(1, 1), sampler=sampler)
        together = Collective(session(group, "steps"), 20.0)
        for step in range(1, 20):
            together.share(step, int)  # as the gradients of a training
            for _ in range(4):
                next(read)
            if step == 8 and group.rank == 0:
                if fails:
                    shutil.rmtree(root)
                    root.write_text("no folder")
                os.kill(os.getpid(), signal.SIGUSR1)
            made.step(step)


@pytest.mark.slow(disk=False)
def test_what_all_ranks_have_is_said_by_the_first(tmp_path: Path) -> None:
    source = published(tmp_path / "source")
    config = {"load_checkpoint": str(source), "resume_training": False}
    words = {
        "load": "as transformers does",
        "convert": "has no effect",
        "init": "as transformers does",
        "resume": "resumed",
        "not exported": "adapter is not written",
        "not saved": " is not saved: ",
        "signal": " is saved; the process ends",
    }

    def work(group: TorchGroup) -> dict[str, list[str]]:
        report = SaveReport("x", 7, 1, 1, 1.0, 0.0, durable=True, digest="")

        def fail(_: Location) -> None:
            raise StorageError("no room")

        cases: dict[str, Callable[[], object]] = {
            "load": lambda: reshard.load(config=config),
            "convert": lambda: reshard.convert(source, tmp_path / "out", select={"drop": ["none"]}, group=group),
            "init": lambda: trained(tmp_path / "init", init_from=source),
            "resume": lambda: trained(tmp_path / "init"),
            "not exported": lambda: _export(
                tmp_path, fail, "adapter is", report, SaveOptions(), group=group, timeout=20
            ),
            "not saved": lambda: looped(tmp_path / "not saved", group, fails=True),
            "signal": lambda: looped(tmp_path / "signal", group, fails=False),
        }
        return {name: heard(case) for name, case in cases.items()}

    with Job(2, work) as job:
        first, second = job.values()
    for name, word in words.items():
        assert any(word in line for line in first[name]), (name, first[name])
        assert len(first[name]) == len(set(first[name])), (name, first[name])
        assert second[name] == [], (name, second[name])
    assert any("the loop reads more than 2 samples" in line for line in first["signal"])


def test_what_one_rank_has_is_said_by_that_rank(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("reshard")
    with caplog.at_level(logging.INFO, "reshard"):
        with held_back() as held:
            for text in ("of all", "of rank 1", "of all"):
                logger.warning(text)
            logger.error("an error is said at once")
        assert caplog.messages == ["an error is said at once"]
        release(held, [["of all"], ["of rank 0"]])
    assert caplog.messages == ["an error is said at once", "of rank 1"]
    assert held == []


def test_what_is_held_back_is_said_if_a_load_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = published(tmp_path / "source")
    config = {"load_checkpoint": str(source), "resume_training": False}
    with pytest.raises(KeyNotFoundError):
        reshard.load(config=config, keys=["other"])
    assert any("as transformers does" in line for line in caplog.messages)
