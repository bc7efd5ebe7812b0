"""The position in the training data: the batches of an epoch that were taken, in a loader that can be begun again.

`watch` makes a loader count its batches, and begin a pass again after a resume (`reshard.torch.passes`). A pass begins
when Lightning creates its iterator, as without this module, or with its first batch if it goes on after a resume. A
loader whose class cannot be changed is put into a `WatchedLoader`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.torch.passes import Passes, Proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NAME = "_reshard_position"


class Position:
    """The position in the current epoch of one loader on one rank.

    Args:
        loader: the loader.
        begin: begins a pass over it.
        before_batch: called before each batch is taken.
        may_begin: whether a pass may begin; if not, it has no batches.
    """

    def __init__(
        self,
        loader: Any,
        begin: Callable[[], Iterator[Any]],
        before_batch: Callable[[], None],
        may_begin: Callable[[], bool],
    ) -> None:
        self.begin, self.before_batch, self.may_begin = begin, before_batch, may_begin
        self.passes = Passes(loader, begin)
        self._is_over = False

    def state(self, n_ahead: int, *, is_end: bool) -> dict[str, Any]:
        """The position as a value of `extra`.

        Args:
            n_ahead: number of batches that were taken and not yet trained, if all loaders had one.
            is_end: whether the epoch is over: the next iterator begins a new one.
        """
        n_ahead = 0 if self._is_over else n_ahead  # the other loaders go on
        return self.passes.state(None if is_end else self.passes.n_loaded - n_ahead)

    def resume(self, state: dict[str, Any]) -> None:
        """Begin the next iterator at a saved position.

        Raises:
            MismatchError: the position cannot be found again.
        """
        self.passes.load(state)

    def batches(self) -> Iterator[Any]:
        """Iterate over the batches of an epoch, or over those that are left of it."""
        if not self.may_begin():
            return iter(())
        self._is_over = False
        # If Lightning creates the iterator that goes on, it hides why this cannot begin.
        return self._taken(None if self.passes.is_resumed else self.passes.batches())

    def _taken(self, iterator: Iterator[Any] | None) -> Iterator[Any]:
        while True:
            self.before_batch()
            if iterator is None:
                iterator = self.passes.batches()
            try:
                batch = next(iterator)
            except StopIteration:
                self._is_over = True
                return
            yield batch


class WatchedLoader(Proxy):
    """A loader whose class cannot be changed."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)


def watch(loader: Any, before_batch: Callable[[], None], may_begin: Callable[[], bool]) -> Any:
    """Make a loader count its batches.

    Args:
        loader: the loader. One that is watched with the same functions keeps its position.
        before_batch: called before each batch is taken.
        may_begin: whether a pass may begin; if not, it has no batches.

    Returns:
        The loader. It stays the same object if its class can be changed.
    """
    known = position_of(loader)
    if known is not None:
        if known.before_batch is not before_batch:
            setattr(loader, _NAME, Position(loader, known.begin, before_batch, may_begin))
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
        return watch(WatchedLoader(loader), before_batch, may_begin)
    setattr(loader, _NAME, Position(loader, lambda: kind.__iter__(loader), before_batch, may_begin))
    return loader


def position_of(loader: Any) -> Position | None:
    """The position of a loader; None: it is not watched."""
    return getattr(loader, "__dict__", {}).get(_NAME)


def begun_again(combined: Any) -> list[bool]:
    """Which of several loaders have begun again within this epoch, because others have more batches.

    Args:
        combined: the `CombinedLoader` of Lightning.
    """
    return list(getattr(combined._iterator, "_consumed", ()))  # noqa: SLF001


def set_begun_again(combined: Any, saved: list[bool]) -> None:
    """Set it in a pass that goes on: the epoch is over when all loaders have been read to their ends.

    Args:
        combined: the `CombinedLoader`, of which no batch was taken.
        saved: the value of `begun_again`.
    """
    if len(saved) == len(begun_again(combined)):
        combined._iterator._consumed = list(saved)  # noqa: SLF001
