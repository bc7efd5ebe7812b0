"""What an object store can do beyond a `Store`: create an object that must not exist, and list objects in order."""

from __future__ import annotations

import abc
import contextlib
from typing import TYPE_CHECKING, TypeVar

from reshard.storage.store import Stat, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from reshard import _core

T = TypeVar("T")


class ObjectStore(Store):
    """A store of objects, without renames, locks and folders. It need not be writable (`is_read_only`)."""

    @abc.abstractmethod
    def put_new(self, path: str, data: bytes) -> tuple[_core.PutNew, Exception | None]:
        """Create an object that must not exist, by one request: of several writers one succeeds.

        Args:
            path: the object.
            data: its content.

        Returns:
            What became of it; with `UNKNOWN` the failure. After `EXISTS` this request has changed nothing.
            After both read the object to learn what it is: an answer may have been lost.

        Raises:
            StorageError: the service refused it; nothing was created.
        """

    @abc.abstractmethod
    def below(self, path: str, *, after: str = "", max_keys: int | None = None) -> list[tuple[str, Stat]]:
        """The objects below a folder, at any depth, sorted by name.

        Args:
            path: the folder; it need not exist.
            after: only names after this one, which are relative to the folder.
            max_keys: at most so many.

        Raises:
            StorageError: the service failed.
        """

    def read_object(self, path: str, max_bytes: int) -> bytes:
        """The content of an object, by one request. Arguments and errors are those of `read_small`."""
        return self.read_small(path, max_bytes)

    def remembered(self, path: str, make: Callable[[], T]) -> T:  # noqa: ARG002
        """What `make` returns for a path; while a block of `remembering` lasts, what it has returned before."""
        return make()

    @abc.abstractmethod
    def remove_files(self, paths: Sequence[str]) -> None:
        """Remove objects, several at once; no error for those that do not exist. Raises StorageError."""

    def cleaning_up(self, path: str) -> AbstractContextManager[None]:  # noqa: ARG002
        """Learn within seconds whether the service answers, and limit the time of all requests of the block.

        Args:
            path: in the store; it need not exist.

        Raises:
            StorageError: the service does not answer.
        """
        return contextlib.nullcontext()

    def end_uploads(self, path: str, is_ended: Callable[[str], bool]) -> None:
        """End uploads in parts below a folder that were not completed. A store without any has nothing to do.

        Args:
            path: the folder.
            is_ended: returns whether to end the uploads of an object, by its name in the folder.

        Raises:
            StorageError: the service failed; a rule of the bucket ends what is left.
        """
