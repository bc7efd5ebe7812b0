"""The exceptions of this package.

Every class derives from `ReshardError` and, if one fits, from a builtin exception. A message names the operation, the
file and the key, what was expected and what was found; `hint` says what to do.
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
        hint: what to do, or None. Clauses are separated by "; ". A function argument is written as `name=` or
            `name=value` in backticks, so that `adapt_hint` can replace it by an option of the command line. Keys of
            layout files and configurations are not written like this.

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
    """Unpickle an error; the keyword arguments are restored as attributes."""
    error = cls.__new__(cls, message)
    Exception.__init__(error, message)
    error.__dict__.update(attributes)
    return error


def adapt_hint(hint: str | None, word: Callable[[str, str], str | None]) -> str | None:
    """Replace the arguments in a hint by those of a caller with other argument names.

    Args:
        hint: as `ReshardError.hint`.
        word: called as `word(name, value)` for each argument, where `value` may be empty. Returns its text for the
            caller, or None if the caller has no such argument: then the clause is removed.

    Returns:
        The hint; None if no clause is left.

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
        ...     raise ClaimedError("`run` is claimed", hint="end it; `commit=Commit(takeover=True)` takes the root")
        Traceback (most recent call last):
        reshard.errors.ClaimedError: `run` is claimed
        hint: end it
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
    """Invalid arguments: a wrong type or value, contradicting options, a missing rank."""


class CheckpointNotFoundError(ReshardError, FileNotFoundError):
    """There is no checkpoint at a path, or a file of a checkpoint is missing."""


class ConfigError(ReshardError, ValueError):
    """A training configuration has an unknown key, a value of the wrong type, or contradicting values."""


class EmptyRootError(CheckpointNotFoundError):
    """The checkpoint root is missing or empty: a run that resumes from it starts fresh."""


class DamagedFileError(ReshardError, ValueError):
    """A file violates its format or contradicts other files of the checkpoint: incomplete, changed or malicious."""


class UnsupportedError(ReshardError, ValueError):
    """A file or request is valid, but this version does not support it."""


class LayoutError(ReshardError, ValueError):
    """A layout is inconsistent, or does not fit the mesh or the tensors."""


class CoverageError(ReshardError, ValueError):
    """The stored shards do not cover a requested region, or overlap without being replicas."""


class KeyNotFoundError(ReshardError, KeyError):
    """There is no tensor with this key."""


class MismatchError(ReshardError, ValueError):
    """Shapes, dtypes or other values that must be equal differ."""


class NamesError(ReshardError, ValueError):
    """A name map is inconsistent, or does not fit the tensors."""


class StorageError(ReshardError, OSError):
    """The operating system failed a read or a write.

    Attributes:
        errno: the error number of the operating system, or None.
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
    """Another process writes into the checkpoint root, or has taken the claim from this process."""


class DestinationExistsError(ReshardError, FileExistsError):
    """The destination exists and would be replaced."""


class GroupError(ReshardError, TimeoutError):
    """Communication between ranks failed: a rank did not answer in time, or the connection is lost.

    Attributes:
        ranks: the ranks that did not answer, as far as known.
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
