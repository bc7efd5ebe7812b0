"""A load in the background."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from reshard.values.pending import Pending

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class PendingLoad(Pending[T]):
    """A load in the background, a `concurrent.futures.Future`. What `load_async` returns.

    Example:
        >>> import numpy as np, reshard
        >>> _ = reshard.save("pending", 5, {"w": np.zeros(4)})
        >>> pending = reshard.load_async("pending")
        >>> pending.result(timeout=60).iteration, pending.done()
        (5, True)
    """

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__("the load", work)
        self.start()
