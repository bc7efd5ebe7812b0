"""The position in the training data: how many batches of an epoch were taken, and the random state before the first.

`watch` makes a data loader count its batches. The iterator of an epoch begins when its first batch is taken. To resume,
it begins in the random state of that time, so a shuffling sampler draws the same order, and the batches that were
trained are taken and dropped. A loader with a state of its own (`StatefulDataLoader`) is set to that state instead.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from reshard.torch import rng

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = logging.getLogger("reshard")

_NAME = "_reshard_position"


class Position:
    """The position in the current epoch of one data loader on one rank.

    Attributes:
        n_taken: number of batches that were taken from the iterator.
    """

    def __init__(self, before_batch: Callable[[], None]) -> None:
        self._before_batch = before_batch
        self._resume: dict[str, Any] | None = None
        self._first: dict[str, Any] = {}  # the random state before the first batch
        self._own: list[Any] = []  # the states of the generators of the loader at that time
        self._last: dict[str, Any] = {}  # and before the newest batch, of loaders without a length
        self._is_reused = False  # whether the epoch uses persistent workers of an earlier one
        self._start_workers = False
        self.n_taken = 0

    def state(self, loader: Any, n_ahead: int, *, is_end: bool) -> dict[str, Any]:
        """The position as a value of `extra`.

        Args:
            loader: the data loader.
            n_ahead: number of batches that were taken and not yet trained.
            is_end: whether the epoch is over: the next iterator begins a new one.
        """
        state: dict[str, Any] = {"seed": _seed_of(loader), "own": self._own}
        if is_end:
            state["own"] = _own(loader)
            return state | {"reused": _has_workers(loader)}
        state["reused"] = self._is_reused
        state |= {"n": self.n_taken - n_ahead, "first": self._first}
        if n_ahead:
            state["last"] = self._last
        elif callable(getattr(loader, "state_dict", None)) and not getattr(loader.state_dict, "is_empty", False):
            state["loader"] = loader.state_dict()
        return state

    def resume(self, loader: Any, state: dict[str, Any]) -> None:
        """Begin the next iterator at a saved position.

        Args:
            loader: the data loader.
            state: the saved position.
        """
        seed = _seed_of(loader)
        if seed is not None and state["seed"] not in (None, seed):
            _log.warning("the sampler goes on with seed %d of the checkpoint, not with %d", state["seed"], seed)
            loader.sampler.seed = state["seed"]
        self._resume = state if "first" in state else None
        for generator, saved in zip(rng.own_generators(loader), state.get("own", ()), strict=False):
            generator.set_state(torch.from_numpy(np.array(saved, np.uint8)))
        self._start_workers = bool(state.get("reused"))

    def batches(self, loader: Any, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Iterate over the batches of an epoch, or over those that are left of it."""
        is_sized = _is_sized(loader)
        resume, self._resume = self._resume, None
        ahead: list[Any] = []
        if self._start_workers:
            # Persistent workers draw a seed when they start: without it the sampler draws as in the saved epoch.
            self._start_workers = False
            with _random_state(rng.capture()):
                begin()
        self._is_reused = _has_workers(loader)
        self._own = _own(loader)
        if resume is None:
            self.n_taken, self._first = 0, rng.capture()
            iterator = begin()
        else:
            self.n_taken, self._first = resume["n"], resume["first"]
            with _random_state(resume["first"]):
                if "loader" in resume:
                    loader.load_state_dict(resume["loader"])
                    iterator = begin()
                else:
                    iterator = begin()
                    for _ in range(resume["n"]):
                        next(iterator)
            if "last" in resume:
                with _random_state(resume["last"]):
                    ahead = [one for one in [next(iterator, None)] if one is not None]
        while True:
            self._before_batch()
            if not is_sized:
                self._last = resume["last"] if ahead and resume else rng.capture()
            try:
                batch = ahead.pop() if ahead else next(iterator)
            except StopIteration:
                return
            self.n_taken += 1
            yield batch


def watch(loader: Any, before_batch: Callable[[], None]) -> bool:
    """Make a data loader count its batches; it stays the same object.

    Args:
        loader: the data loader.
        before_batch: called before each batch is taken.

    Returns:
        Whether that is possible; not for lists and other objects whose class cannot be changed.
    """
    kind = type(loader)
    if position_of(loader) is None:
        names: dict[str, Any] = {
            "__iter__": lambda self: getattr(self, _NAME).batches(self, lambda: kind.__iter__(self))
        }
        if not hasattr(
            kind, "state_dict"
        ):  # with both methods Lightning does not warn that the loader is not resumable
            names |= {"state_dict": _empty_state, "load_state_dict": lambda _self, _state: None}
        try:
            loader.__class__ = type(kind.__name__, (kind,), names | {"__module__": kind.__module__})
        except TypeError:
            return False
    setattr(loader, _NAME, Position(before_batch))
    return True


def position_of(loader: Any) -> Position | None:
    """The position of a data loader; None: it is not watched."""
    return getattr(loader, "__dict__", {}).get(_NAME)


def _empty_state(_self: Any) -> dict[str, Any]:
    return {}


_empty_state.is_empty = True  # type: ignore[attr-defined]


def _seed_of(loader: Any) -> int | None:
    """The seed of a `DistributedSampler`. Lightning takes it from `seed_everything`."""
    seed = getattr(getattr(loader, "sampler", None), "seed", None)
    return seed if type(seed) is int else None


def _own(loader: Any) -> list[Any]:
    """The states of the generators of a loader: its order may be drawn from them."""
    return [generator.get_state().numpy().copy() for generator in rng.own_generators(loader)]


def _has_workers(loader: Any) -> bool:
    """Whether persistent workers of an earlier epoch are running."""
    return getattr(loader, "persistent_workers", False) and getattr(loader, "_iterator", None) is not None


def _is_sized(loader: Any) -> bool:
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True


@contextlib.contextmanager
def _random_state(state: dict[str, Any]) -> Iterator[None]:
    """Run a block in a random state, and go back to the one before."""
    before = rng.capture()
    _set(state)
    try:
        yield
    finally:
        _set(before)


def _set(state: dict[str, Any]) -> None:
    rng.restore(state, iteration=0)
