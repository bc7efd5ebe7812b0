"""The one tree of exceptions. The class answers "can the caller handle this?"; attributes hold the facts.

Every class derives from `ReshardError` and, where one fits, from the builtin that callers would expect. An error
says what was being done, to which file and key, what was expected and what was found; `hint` says what to do next.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "ArgumentError",
    "CheckpointNotFoundError",
    "ClaimedError",
    "ConfigError",
    "CoverageError",
    "DamagedFileError",
    "DestinationExistsError",
    "EmptyRootError",
    "GroupError",
    "KeyNotFoundError",
    "LayoutError",
    "MismatchError",
    "NamesError",
    "ReshardError",
    "StorageError",
    "UnsupportedError",
    "adapt_hint",
    "hints_without",
]

_ARGUMENT = re.compile(r"`([a-z_]+)=([^`]*)`")


class ReshardError(Exception):
    """Base of all errors of this package.

    Attributes:
        path: the file or folder concerned, or None.
        key: the tensor concerned, or None.
        hint: what to do next, or None. Its clauses are separated by "; ". An argument of a function is written as
            `name=` or `name=value` in backticks, so that a caller with other words can say it in its own, see
            `adapt_hint`; a key of a layout file or a configuration is not.

    Example:
        >>> from reshard.errors import LayoutError
        >>> error = LayoutError("dim 0 of `w` has 10 elements, not a multiple of 4", key="w", hint="use `uneven: ceil`")
        >>> print(error)
        dim 0 of `w` has 10 elements, not a multiple of 4
        hint: use `uneven: ceil`
        >>> error.key
        'w'
    """

    def __init__(
        self, message: str, *, path: str | None = None, key: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.key = key
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, dict(self.__dict__)))


def _rebuild(cls: type[ReshardError], message: str, attributes: dict[str, Any]) -> ReshardError:
    """Make an unpickled error again: the keyword arguments travel as attributes."""
    error = cls.__new__(cls, message)
    Exception.__init__(error, message)
    error.__dict__.update(attributes)
    return error


def adapt_hint(hint: str | None, word: Callable[[str, str], str | None]) -> str | None:
    """A hint for a caller that has other arguments than the function that failed.

    Args:
        hint: as `ReshardError.hint`.
        word: called as `word(name, value)` for each argument in it, where `value` may be empty; gives its name for the
            caller, or None if the caller has no such argument: then the clause is left out.

    Returns:
        The hint; None if nothing is left of it.

    Example:
        >>> options = {"overwrite": "--overwrite"}
        >>> adapt_hint("give `overwrite=True`; `share=(0, 4)` takes a part", lambda name, value: options.get(name))
        'give --overwrite'
    """
    clauses = []
    for clause in (hint or "").split("; "):
        words = [word(match[1], match[2]) for match in _ARGUMENT.finditer(clause)]
        if None not in words:
            known = iter(words)
            clauses.append(_ARGUMENT.sub(lambda _: str(next(known)), clause))  # noqa: B023  used at once
    return "; ".join(clauses) or None


@contextlib.contextmanager
def hints_without(*names: str) -> Iterator[None]:
    """Leave out of the hints of errors the clauses that name these arguments or fields, which the caller does not have.

    Example:
        >>> from reshard.errors import ClaimedError
        >>> with hints_without("takeover"):
        ...     raise ClaimedError("`run` is claimed", hint="end that job; `commit=Commit(takeover=True)` overtakes it")
        Traceback (most recent call last):
        reshard.errors.ClaimedError: `run` is claimed
        hint: end that job
    """

    def is_left_out(name: str, value: str) -> bool:
        return name in names or any(f"({one}=" in value for one in names)

    try:
        yield
    except ReshardError as error:
        error.hint = adapt_hint(
            error.hint, lambda name, value: None if is_left_out(name, value) else f"`{name}={value}`"
        )
        raise


class ArgumentError(ReshardError, ValueError):
    """A call that cannot be meant: options that contradict each other, a missing rank, a wrong type."""


class CheckpointNotFoundError(ReshardError, FileNotFoundError):
    """There is no checkpoint, or not the file that should be there."""


class ConfigError(ReshardError, ValueError):
    """A training configuration holds a word that is not known, of the wrong type, or against another one."""


class EmptyRootError(CheckpointNotFoundError):
    """There is nothing at all where checkpoints would be: a run that resumes from here starts fresh."""


class DamagedFileError(ReshardError, ValueError):
    """A file on disk violates its format: torn, altered, hostile, or not what its neighbours say of it."""


class UnsupportedError(ReshardError, ValueError):
    """A file or request is valid but outside what this version can do; the message says what."""


class LayoutError(ReshardError, ValueError):
    """A layout contradicts itself, the mesh or the tensors."""


class CoverageError(ReshardError, ValueError):
    """The stored shards leave a wanted region uncovered, or overlap without being replicas."""


class KeyNotFoundError(ReshardError, KeyError):
    """No tensor of this name."""


class MismatchError(ReshardError, ValueError):
    """Shape or dtype of two things that must agree differ."""


class NamesError(ReshardError, ValueError):
    """A name map contradicts itself, or does not fit the tensors."""


class StorageError(ReshardError, OSError):
    """The operating system failed a read or a write.

    Attributes:
        errno: the system's error number, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        key: str | None = None,
        hint: str | None = None,
        errno: int | None = None,
    ) -> None:
        super().__init__(message, path=path, key=key, hint=hint)
        self.errno = errno


class ClaimedError(ReshardError, PermissionError):
    """Another process writes into this checkpoint root, or has taken it over from this one."""


class DestinationExistsError(ReshardError, FileExistsError):
    """The destination holds something that would have to be replaced."""


class GroupError(ReshardError, TimeoutError):
    """Ranks that work together lost each other: one did not answer in time, or the way to it is gone.

    Attributes:
        ranks: the ranks that did not answer, as far as they are known.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        key: str | None = None,
        hint: str | None = None,
        ranks: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message, path=path, key=key, hint=hint)
        self.ranks = ranks
