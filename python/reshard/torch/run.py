"""The state of one training run: the trained objects, and the position of the run. Knows no files."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from reshard.errors import ArgumentError
from reshard.formats.state import PerRank
from reshard.resume.parts import object_name
from reshard.torch.checks import count
from reshard.torch.dicts import DictState
from reshard.torch.loaders import FollowedLoader, followed
from reshard.torch.metrics import MetricState, is_metric
from reshard.torch.optimizers import split_optimizers, unwrapped
from reshard.torch.sampler import ElasticSampler
from reshard.torch.settings import Started

if TYPE_CHECKING:
    from reshard.torch.emergency import Rendezvous
    from reshard.verbs.save import PendingSave, SaveReport

NOT_SAVED = -1

_HOURS = r"(?:([0-9.]+)\s*(?:h|hours?))?"
_MINUTES = r"(?:([0-9.]+)\s*min(?:utes?)?)?"
_SECONDS = r"(?:([0-9.]+)\s*(?:s|sec|seconds?))?"
_DURATION = re.compile(rf"\s*{_HOURS}\s*{_MINUTES}\s*{_SECONDS}\s*")


class Run:
    """The trained objects and the position of a run. Only the checkpointer changes it.

    Attributes:
        model: as passed to `resume`.
        sampler: as passed to `resume`, or a `FollowedLoader`.
        reshapes: functions of the user that make rank-local state for another number of ranks, by name of the object;
            of the sampler with name `sampler`.
        optimizer: the optimizers whose state is saved by parameter; None: there are none.
        whole_optimizers: names in `objects` of other optimizers, such as wrappers: their `state_dict` is saved whole.
        objects: other objects with state, by name; the state of rank 0 is saved.
        per_rank: other objects with rank-local state, by name.
        started: the settings before the first step.
        last: the last complete step.
        saved: the last step that was saved or resumed from; `NOT_SAVED` if its save in the background failed.
        saved_at: time of that save, of `time.monotonic`.
        above: the newest iteration of the root, if the steps of this run start below it; else 0.
        loss, metrics, healthy: of the last complete step.
        pending: the save in the background.
        record: the record of the environment, once it is needed.
        rendezvous: agrees on the step of a save; None: the group has no store for notices.
        n_failures: number of consecutive failed saves.
        n_updates: number of optimizer steps since the last complete step, while optimizers are watched.
        is_updating: whether an optimizer step is in progress.
    """

    def __init__(self, model: Any, optimizer: Any, scheduler: Any, sampler: Any, extra: Mapping[str, Any]) -> None:
        if not isinstance(extra, Mapping):
            raise ArgumentError(
                f"`extra` is of type {type(extra).__name__}, expected a dict of objects by name",
                hint='give each object a name: `extra={"ema": ema}`',
            )
        self.reshapes = {
            name: one.reshape
            for name, one in {**extra, "sampler": sampler}.items()
            if isinstance(one, PerRank) and one.reshape is not None
        }
        self.model = model
        self.sampler = followed(sampler.value if isinstance(sampler, PerRank) else sampler, "sampler")
        self.optimizer, whole = split_optimizers(optimizer)
        self.whole_optimizers = frozenset(whole)
        self.per_rank: dict[str, Any] = {}
        self.objects: dict[str, Any] = {}
        for name, given in extra.items():
            one = followed(given.value if isinstance(given, PerRank) else given, name)
            # A loader has a position of each rank.
            is_local = isinstance(given, PerRank) or isinstance(one, FollowedLoader)
            (self.per_rank if is_local else self.objects)[name] = _with_state(one)
        for name in whole:
            if name in extra:
                raise ArgumentError(f"`extra` has an object named `{name}`, and so is `optimizer` saved")
        self.objects |= whole
        schedulers = _by_name("scheduler", scheduler)
        self.has_scheduler = bool(schedulers)
        for name in schedulers:
            if name in extra:
                raise ArgumentError(f"`extra` has an object named `{name}`, and so is `scheduler` saved")
        self.objects |= schedulers
        data = {} if self.sampler is None else {"sampler": self.sampler}
        for name, one in {**self.objects, **self.per_rank, **data}.items():
            if not callable(getattr(one, "state_dict", None)) or not callable(getattr(one, "load_state_dict", None)):
                called = "sampler" if one is self.sampler else object_name(name)
                raise ArgumentError(
                    f"`{called}` is of type {type(one).__name__}, without `state_dict` and `load_state_dict`",
                    hint="give its class both methods, or pass a dict of the values in `extra`",
                )
        self.started = Started.of(self.optimizers(), self.objects)
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

    @property
    def has_state_of_each_rank(self) -> bool:
        """Whether an object is restored on other ranks from its states on all ranks that saved."""
        has_local_sampler = self.sampler is not None and not isinstance(self.sampler, ElasticSampler)
        return bool(self.per_rank) or has_local_sampler

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The torch optimizers among the `optimizer` argument."""
        given = self.optimizer if isinstance(self.optimizer, list | tuple) else [self.optimizer]
        return [one for one in map(unwrapped, given) if isinstance(one, torch.optim.Optimizer)]

    def watch(self) -> None:
        """Register hooks that track the steps of the optimizers."""

        def before(*_: Any) -> None:
            self.is_updating = True

        def after(*_: Any) -> None:
            self.is_updating = False
            self.n_updates += 1

        for one in self.optimizers():
            self._hooks += [one.register_step_pre_hook(before), one.register_step_post_hook(after)]

    def unwatch(self) -> None:
        """Remove the hooks of `watch`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _with_state(one: Any) -> Any:
    if is_metric(one):
        return MetricState(one)
    return DictState(one) if isinstance(one, dict) and not hasattr(one, "state_dict") else one


def _by_name(name: str, given: Any) -> dict[str, Any]:
    """The objects in an argument that is one object, a list of several, or a dict of several by name."""
    if isinstance(given, Mapping) and not hasattr(given, "state_dict"):
        return {f"{name}.{key}": one for key, one in given.items()}
    if not isinstance(given, list | tuple):
        return {} if given is None else {name: given}
    return {name if len(given) == 1 else f"{name}.{number}": one for number, one in enumerate(given)}


def interval(save_every: int | str | None) -> tuple[int | None, float | None]:
    """The interval between saves: `(steps, None)`, `(None, seconds)`, or `(None, None)` without one.

    Raises:
        ArgumentError: the value is neither a number of steps nor a duration.

    Example:
        >>> interval(500), interval("30min")
        ((500, None), (None, 1800.0))
    """
    if isinstance(save_every, str):
        return None, seconds_of(save_every)
    return (None if save_every is None else count("save_every", save_every, 1)), None


def seconds_of(text: str) -> float:
    """Parse a duration into seconds.

    Raises:
        ArgumentError: the text is not a duration.

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
        raise ArgumentError(f'{text!r} is not a duration, expected text such as "30min", "1h30min" or "90s"')
    return total


def number_of(value: Any, name: str) -> float:
    """A loss or a metric as a float: the single element of a tensor; a DTensor is reduced to its full value.

    Raises:
        ArgumentError: it is not a number; the error has the given name.

    Example:
        >>> number_of(torch.tensor([2.5], requires_grad=True), "loss")
        2.5
    """
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        given = f"has shape {tuple(value.shape)}" if hasattr(value, "shape") else f"is of type {type(value).__name__}"
        raise ArgumentError(f"`{name}` {given}, expected a number or a tensor of one element") from None
