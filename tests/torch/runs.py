"""Runs of the small training."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.helpers.small_training import Trainer

from reshard.torch import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def make(root: Path, **options: Any) -> Checkpointer:
    """A Checkpointer that records no revision of the code: git can take longer than a run waits for it."""
    given: dict[str, Any] = {"signals": (), "commit": {"durable": False}, **options}
    given["environment"] = {"code": "/", **options.get("environment", {})}
    return Checkpointer(root, **given)


@contextmanager
def resumed(root: Path, seed: int = 0, *, trainer: Trainer | None = None, **options: Any) -> Iterator[Any]:
    trainer = trainer or Trainer(seed)
    with make(root, **options) as made:
        yield trainer, made, made.resume(**trainer.parts())
