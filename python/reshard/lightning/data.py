"""The position in the training data: the batches of an epoch that were taken, in a loader that can be begun again.

`watch` makes a loader count its batches, and begin a pass again after a resume (`reshard.torch.passes`). The iterator
of the first epoch begins when Lightning creates it, as without this module, and those of later ones when their first
batch is taken. A loader whose class cannot be changed is put into a `WatchedLoader`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.torch.passes import Passes, Proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    Around = Callable[[], AbstractContextManager[None]]

_NAME = "_reshard_position"


class Position:
    """The position in the current epoch of one loader on one rank."""

    def __init__(self, loader: Any, begin: Callable[[], Iterator[Any]], around: Around) -> None:
        self.begin, self._around = begin, around
        self.passes = Passes(loader, begin)
        self._is_first = True  # no pass has begun, and no position was loaded

    def state(self, n_ahead: int, *, is_end: bool) -> dict[str, Any]:
        """The position as a value of `extra`.

        Args:
            n_ahead: number of batches that were taken and not yet trained.
            is_end: whether the epoch is over: the next iterator begins a new one.
        """
        return self.passes.state(None if is_end else self.passes.n_loaded - n_ahead)

    def resume(self, state: dict[str, Any]) -> None:
        """Begin the next iterator at a saved position.

        Raises:
            MismatchError: the position cannot be found again.
        """
        self.passes.load(state)
        self._is_first = False

    def batches(self) -> Iterator[Any]:
        """Iterate over the batches of an epoch, or over those that are left of it."""
        begun = self.passes.batches() if self._is_first else None
        self._is_first = False
        return self._taken(begun)

    def _taken(self, iterator: Iterator[Any] | None) -> Iterator[Any]:
        while True:
            with self._around():
                if iterator is None:
                    iterator = self.passes.batches()
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch


class WatchedLoader(Proxy):
    """A loader whose class cannot be changed."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)


def watch(loader: Any, around: Around) -> Any:
    """Make a loader count its batches.

    Args:
        loader: the loader.
        around: a context in which each batch is taken.

    Returns:
        The loader. It stays the same object if its class can be changed.
    """
    known = position_of(loader)
    if known is not None:
        setattr(loader, _NAME, Position(loader, known.begin, around))
        return loader
    kind = type(loader)
    names: dict[str, Any] = {"__iter__": lambda self: getattr(self, _NAME).batches(), "_reshard_kind": kind}
    if not hasattr(kind, "state_dict"):  # with both methods Lightning does not warn that the loader is not resumable
        names |= {"state_dict": lambda _self: {}, "load_state_dict": lambda _self, _state: None}
    try:
        loader.__class__ = type(kind.__name__, (kind,), names | {"__module__": kind.__module__})
    except (TypeError, AttributeError):
        if isinstance(loader, WatchedLoader):
            raise
        return watch(WatchedLoader(loader), around)
    setattr(loader, _NAME, Position(loader, lambda: kind.__iter__(loader), around))
    return loader


def position_of(loader: Any) -> Position | None:
    """The position of a loader; None: it is not watched."""
    return getattr(loader, "__dict__", {}).get(_NAME)
