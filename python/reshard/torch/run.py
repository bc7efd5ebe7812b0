"""One training run as a checkpointer knows it: what is trained, and where it stands. Says nothing of files."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import torch

from reshard.errors import ArgumentError
from reshard.formats.state import PerRank
from reshard.torch.checks import count

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.torch.emergency import Rendezvous
    from reshard.write.save import PendingSave, SaveReport

__all__ = ["Run", "interval", "number_of", "seconds_of"]

_HOURS = r"(?:([0-9.]+)\s*(?:h|hours?))?"
_MINUTES = r"(?:([0-9.]+)\s*min(?:utes?)?)?"
_SECONDS = r"(?:([0-9.]+)\s*(?:s|sec|seconds?))?"
_DURATION = re.compile(rf"\s*{_HOURS}\s*{_MINUTES}\s*{_SECONDS}\s*")


class Run:
    """What is trained, and where it stands; changed by the checkpointer alone.

    Attributes:
        model, optimizer, sampler: as they were given.
        objects: whatever else has state, of which rank 0's is kept, by name.
        per_rank: whatever else has state that every rank keeps for itself.
        last: the last complete step.
        saved: the last step that was saved, or that was resumed from.
        saved_at: when that was.
        above: the newest iteration of the root, if the steps of this run begin below it; else 0.
        loss, metrics, healthy: of the last complete step.
        pending: the save in the background.
        record: the environment, once it was asked for.
        rendezvous: how the ranks come to save at the same step; None: they cannot leave word for each other.
        n_failures: saves that have failed in a row.
        n_updates: steps that optimizers have made since the last complete step, while they are watched.
        is_updating: whether one is in the midst of its step.
    """

    def __init__(self, model: Any, optimizer: Any, scheduler: Any, sampler: Any, extra: Mapping[str, Any]) -> None:
        self.model, self.optimizer, self.sampler = model, optimizer, sampler
        self.per_rank: dict[str, Any] = {name: one.value for name, one in extra.items() if isinstance(one, PerRank)}
        self.objects: dict[str, Any] = {name: one for name, one in extra.items() if name not in self.per_rank}
        self.has_scheduler = scheduler is not None
        if scheduler is not None:
            if "scheduler" in extra:
                raise ArgumentError("`extra` has an object named `scheduler`, and there is one as `scheduler`")
            self.objects["scheduler"] = scheduler
        for name, one in {**self.objects, **self.per_rank, **({} if sampler is None else {"sampler": sampler})}.items():
            if not callable(getattr(one, "state_dict", None)) or not callable(getattr(one, "load_state_dict", None)):
                given = "sampler" if one is sampler else object_name(name)
                raise ArgumentError(
                    f"`{given}` is of type {type(one).__name__}, without `state_dict` and `load_state_dict`",
                    hint="put plain values into an object that has both",
                )
        self.last = self.saved = 0
        self.saved_at = time.monotonic()
        self.above = 0
        self.loss: float | None = None
        self.metrics: dict[str, float] = {}
        self.healthy: bool | None = None
        self.pending: PendingSave[SaveReport] | None = None
        self.record: dict[str, Any] | None = None
        self.rendezvous: Rendezvous | None = None
        self.n_failures = 0
        self.n_updates = 0
        self.is_updating = False
        self._hooks: list[Any] = []

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those of torch's among what was given as `optimizer`."""
        given = self.optimizer if isinstance(self.optimizer, list | tuple) else [self.optimizer]
        return [one for one in given if isinstance(one, torch.optim.Optimizer)]

    def watch(self) -> None:
        """Know when an optimizer is in the midst of its step."""

        def before(*_: Any) -> None:
            self.is_updating = True

        def after(*_: Any) -> None:
            self.is_updating = False
            self.n_updates += 1

        for one in self.optimizers():
            self._hooks += [one.register_step_pre_hook(before), one.register_step_post_hook(after)]

    def unwatch(self) -> None:
        """Leave the optimizers alone."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def object_name(name: str) -> str:
    """How an object with state was given to `resume`.

    Example:
        >>> object_name("scheduler"), object_name("ema")
        ('scheduler', "extra['ema']")
    """
    return name if name == "scheduler" else f"extra[{name!r}]"


def interval(save_every: int | str | None) -> tuple[int | None, float | None]:
    """`(steps, seconds)` from one save to the next, one of which is None.

    Raises:
        ArgumentError: it is neither steps nor a time.

    Example:
        >>> interval(500), interval("30min")
        ((500, None), (None, 1800.0))
    """
    if isinstance(save_every, str):
        return None, seconds_of(save_every)
    return (None if save_every is None else count("save_every", save_every, 1)), None


def seconds_of(text: str) -> float:
    """A time in words as seconds.

    Raises:
        ArgumentError: it is none.

    Example:
        >>> seconds_of("30min"), seconds_of("1h30min"), seconds_of("90 s")
        (1800.0, 5400.0, 90.0)
    """
    match = _DURATION.fullmatch(text)
    try:
        parts = [float(part or 0) for part in match.groups()] if match else []
    except ValueError:
        parts = []
    total = sum(part * unit for part, unit in zip(parts, (3600, 60, 1), strict=False))
    if not total > 0:
        raise ArgumentError(f'{text!r} is no time; "30min", "1h30min" and "90s" are')
    return total


def number_of(value: Any) -> float:
    """A loss or a metric as a number: of a tensor its one element, of all ranks' if it is distributed.

    Example:
        >>> number_of(torch.tensor([2.5], requires_grad=True))
        2.5
    """
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
    return float(value)
