"""Messages between the ranks of a job: `Group`, its form for one process, and its form over torch.distributed.

Ranks exchange small JSON values through the rendezvous *store* of torch.distributed, a key-value server that every job
has, and not through its collectives. So threads do not interfere with other collectives, no device is used, a dead rank
causes a timeout and not a hang, and nothing has to be rebuilt after a failure. MPI, JAX, MindSpore or any other
framework can be used through an object with five members, see `Group`.

One collective operation is a *session*: `session(group, "save 500")` on every rank. A session never receives messages
of an earlier, failed session.

This module does not depend on checkpoints and does not import torch. `torch_group` uses the store.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from reshard import errors
from reshard.errors import ArgumentError, GroupError, ReshardError
from reshard.ranks.launcher import VARIABLES
from reshard.ranks.messages import decode, encode
from reshard.ranks.torch_group import TorchGroup, TorchSession, torch_distributed, torch_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = [
    "Group",
    "SingleProcess",
    "TorchGroup",
    "agree",
    "decide",
    "log_error_of_all",
    "log_of_all",
    "resolve",
    "session",
    "tell",
]

_log = logging.getLogger("reshard")

_MAX_LABEL = 200
_MAX_NAMED = 8
_MAX_MESSAGE = 2000


class Group(Protocol):
    """What ranks need to exchange messages; users can implement it.

    Values are JSON-able: None, bool, int, float, str, lists, and dicts with text as keys. All ranks make the same
    calls in the same order, and a call that does not end within `timeout` seconds raises `GroupError`. An
    implementation may have a method `session(label) -> Group` as well, see the function `session`.
    """

    @property
    def rank(self) -> int:
        """This process, from 0."""

    @property
    def world_size(self) -> int:
        """The number of processes."""

    def barrier(self, *, timeout: float) -> None:
        """Wait until every rank has called this."""

    def gather(self, value: Any, *, root: int = 0, timeout: float) -> list[Any] | None:
        """The values of all ranks in rank order at the root, None elsewhere.

        Args:
            value: this rank's value; JSON can represent it.
            root: the rank that gets the values.
            timeout: seconds to wait for the other ranks.
        """

    def broadcast(self, value: Any, *, root: int = 0, timeout: float) -> Any:
        """The root's value, on every rank.

        Args:
            value: on the root, the value; JSON can represent it. Not used on other ranks.
            root: the rank whose value is sent.
            timeout: seconds to wait for the other ranks.
        """


class SingleProcess:
    """The group of one process that works alone.

    Example:
        >>> group = SingleProcess()
        >>> group.rank, group.world_size, group.gather("a", timeout=1)
        (0, 1, ['a'])
    """

    rank = 0
    world_size = 1

    def barrier(self, *, timeout: float) -> None:
        """Return at once."""

    def gather(self, value: Any, *, root: int = 0, timeout: float) -> list[Any] | None:  # noqa: ARG002
        """The value in a list. As `Group.gather`."""
        return [value]

    def broadcast(self, value: Any, *, root: int = 0, timeout: float) -> Any:  # noqa: ARG002
        """The value. As `Group.broadcast`."""
        return value


def resolve(group: object = None, rank: int | None = None) -> Group:
    """The group for the arguments of a caller.

    Args:
        group: a `Group`, or a process group of torch.distributed. None: torch's default group if torch is imported and
            initialised, else this process alone.
        rank: the rank that the caller gave, or None.

    Raises:
        ArgumentError: it is not a group, or this process is not a member of it; the group's rank differs from `rank`;
            or the launcher's environment has several processes, and no group is given.
        UnsupportedError: the process group has no store (backend `mpi`).

    Example:
        >>> resolve().world_size
        1
    """
    distributed = torch_distributed()
    found: Group
    if group is None:
        if distributed is not None and distributed.is_initialized():
            found = torch_group(distributed.group.WORLD)
        else:
            _refuse_standalone_rank()
            found = SingleProcess()
    elif distributed is not None and isinstance(group, distributed.ProcessGroup):
        found = torch_group(group)
    elif _is_group(group):
        found = group  # type: ignore[assignment]
    elif distributed is not None and _is_non_member(group, distributed.GroupMember.NON_GROUP_MEMBER):
        raise ArgumentError("this process is not a member of the process group that was given as `group`")
    else:
        raise ArgumentError(
            f"`group` is of type {type(group).__name__}, expected a process group of torch.distributed or an object "
            "with `rank`, `world_size`, `barrier`, `gather` and `broadcast`"
        )
    if rank is not None and rank != found.rank:
        raise ArgumentError(
            f"`rank` is {rank}, but this process is rank {found.rank} of {found.world_size}",
            hint="leave `rank=` out: the group knows it",
        )
    return found


def session(group: Group, label: str) -> Group:
    """A separate channel for one collective operation, which receives no messages of other operations.

    Several sessions of one group can be used at the same time, each in its own thread. A label can be used again once
    its session has ended.

    Args:
        group: the group. If it has a method `session`, that method creates the channel. Otherwise each message is
            marked with the label, and a message of another session is an error.
        label: name of the operation, at most 200 characters, the same on all ranks: "save 500".

    Raises:
        ArgumentError: the label is too long.

    Example:
        >>> session(SingleProcess(), "save 500").broadcast({"iteration": 500}, timeout=10)
        {'iteration': 500}
    """
    if not 0 < len(label) <= _MAX_LABEL:
        raise ArgumentError(f"the label of a session has from 1 to {_MAX_LABEL} characters, this one has {len(label)}")
    own = getattr(group, "session", None)
    if own is not None:
        made: Group = own(label)
        return made
    return group if group.world_size == 1 or isinstance(group, TorchSession) else _MarkedGroup(group, label)


def agree(group: Group, outcome: Any, timeout: float) -> list[Any]:
    """Exchange the outcomes of all ranks: the value of every rank, or one error of those that failed, raised on all.

    Args:
        group: all its ranks call this.
        outcome: this rank's value (JSON-able and small, since all ranks receive all values), or its exception.
        timeout: seconds to wait for a rank that has not answered, and again for rank 0's answer.

    Returns:
        The values in rank order.

    Raises:
        GroupError: ranks did not answer in one of the two waits. It is raised at most two seconds after the deadline,
            or six if the store answers slowly.
        ReshardError: ranks failed; the message names the ranks and their errors. If all raised the same class of
            `reshard.errors`, the error has this class. In a world of one the exception itself is raised; an interrupt
            of this process is raised unchanged.

    Example:
        >>> agree(SingleProcess(), {"n_bytes": 7}, timeout=10)
        [{'n_bytes': 7}]
    """
    if group.world_size == 1:
        if isinstance(outcome, BaseException):
            raise outcome
        return [outcome]

    def same_or_all(values: list[Any]) -> dict[str, Any]:
        # Mostly None, so that 16,384 ranks do not receive 16,384 values each.
        is_same = len({json.dumps(value) for value in values}) == 1
        return {"same": values[0]} if is_same else {"all": values}

    answer = decide(group, outcome, same_or_all, timeout)
    return [answer["same"]] * group.world_size if "same" in answer else list(answer["all"])


def decide(group: Group, outcome: Any, choose: Callable[[list[Any]], Any], timeout: float) -> Any:
    """Let rank 0 decide from the outcomes of all ranks, of which there are several. Raises as `agree`.

    Args:
        group: all its ranks call this.
        outcome: this rank's value (JSON-able), or its exception. An interrupt is raised unchanged on this rank.
        choose: called on rank 0 with the values in rank order, unless a rank failed. Its result is JSON-able.
        timeout: seconds to wait for a rank that has not answered.

    Returns:
        What `choose` returned, on every rank.
    """
    # Both steps are in one session: a rank that waits in the second receives the name of a rank missing in the first.
    channel: Group = group.session("agree") if isinstance(group, TorchGroup) else group
    failure = outcome if isinstance(outcome, BaseException) else None
    own = {"value": outcome} if failure is None else {"error": encode(ErrorRecord.of(failure))}
    with _interrupt_stays(failure):
        reports = channel.gather(own, timeout=timeout)
    if reports is None:
        return _told(channel, None, failure, timeout)
    failures = {rank: report["error"] for rank, report in enumerate(reports) if "error" in report}
    verdict = {"failed": encode(failures)}
    if not failures:
        try:
            verdict = {"value": choose([report["value"] for report in reports])}
        except BaseException as error:  # noqa: BLE001  an interrupt, too, must be reported to the other ranks
            verdict, failure = _failed(error), error
    return _told(channel, verdict, failure, timeout)


def tell(group: Group, outcome: Any, timeout: float) -> Any:
    """Rank 0's outcome, on every rank of a group of several. Raises as `agree`.

    Args:
        group: all its ranks call this.
        outcome: on rank 0 its value (JSON-able) or its exception, as for `decide`; not used on other ranks.
        timeout: seconds to wait for rank 0.
    """
    channel: Group = group.session("tell") if isinstance(group, TorchGroup) else group
    if channel.rank > 0:
        return _told(channel, None, None, timeout)
    failure = outcome if isinstance(outcome, BaseException) else None
    return _told(channel, {"value": outcome} if failure is None else _failed(failure), failure, timeout)


def log_of_all(rank: int | None, message: str, *arguments: object, level: int = logging.WARNING) -> None:
    """Log what is the same on all ranks: as a warning on rank 0, and at DEBUG on the others.

    Args:
        rank: this rank; None: that in the default group of torch, if there is one.
        message: as of `logging.Logger.warning`.
        arguments: likewise.
        level: the level on rank 0.
    """
    if rank is None:
        distributed = torch_distributed()
        rank = 0 if distributed is None or not distributed.is_initialized() else distributed.get_rank()
    _log.log(level if rank == 0 else logging.DEBUG, message, *arguments, stacklevel=2)


def log_error_of_all(rank: int, error: BaseException, message: str, *arguments: object) -> None:
    """Log that something failed on all ranks: as `log_of_all` if `error` is the same on all of them.

    Args:
        rank: this rank.
        error: what was raised. Ranks raise one joint error, except where they did not reach each other.
        message: as of `logging.Logger.error`.
        arguments: likewise.
    """
    is_same = isinstance(error, ReshardError) and not isinstance(error, GroupError)
    log_of_all(rank if is_same else 0, message, *arguments, level=logging.ERROR)


def _failed(error: BaseException) -> dict[str, Any]:
    """What rank 0 tells the others of an error of its own."""
    return {"failed": encode({0: ErrorRecord.of(error)})}


def _told(channel: Group, verdict: dict[str, Any] | None, failure: BaseException | None, timeout: float) -> Any:
    """The value of rank 0's verdict, on every rank, or the error of those that failed.

    Args:
        channel: the ranks.
        verdict: on rank 0 what it tells the others.
        failure: the exception of this rank.
        timeout: seconds to wait for rank 0.
    """
    with _interrupt_stays(failure):
        told: dict[str, Any] = channel.broadcast(verdict, timeout=max(timeout, 0.0))
        if "failed" in told:
            raise joint_error(decode(dict[int, ErrorRecord], told["failed"])) from failure
    return told["value"]


@contextlib.contextmanager
def _interrupt_stays(failure: BaseException | None) -> Iterator[None]:
    """Raise the interrupt of this rank unchanged, whatever the ranks have agreed on."""
    try:
        yield
    except Exception:
        if failure is not None and not isinstance(failure, Exception):
            raise failure from None
        raise


class _MarkedGroup:
    """A group of a user. Each message has the session and a number: a message of another session is an error."""

    def __init__(self, group: Group, label: str) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        self._group = group
        self._label = label
        self._n_operations = 0

    def barrier(self, *, timeout: float) -> None:
        self._group.barrier(timeout=timeout)

    def gather(self, value: Any, *, root: int = 0, timeout: float) -> list[Any] | None:
        got = self._group.gather(self._marked(value), root=root, timeout=timeout)
        return None if got is None else [self._unmarked(message) for message in got]

    def broadcast(self, value: Any, *, root: int = 0, timeout: float) -> Any:
        return self._unmarked(self._group.broadcast(self._marked(value), root=root, timeout=timeout))

    def _marked(self, value: Any) -> list[Any]:
        self._n_operations += 1
        return [self._label, self._n_operations, value]

    def _unmarked(self, message: Any) -> Any:
        label, number, value = message
        if (label, number) != (self._label, self._n_operations):
            raise GroupError(
                f"operation {self._n_operations} of session `{self._label}` met operation {number} of `{label}`: "
                "the ranks are not at the same place",
                hint="give the group a method `session(label)` that makes a channel of its own for each session",
            )
        return value


def _is_non_member(group: object, sentinel: object) -> bool:
    # The type first: an array compares elementwise.
    return isinstance(group, type(sentinel)) and group == sentinel


def _is_group(group: object) -> bool:
    return all(isinstance(getattr(group, name, None), int) for name in ("rank", "world_size")) and all(
        callable(getattr(group, name, None)) for name in ("barrier", "gather", "broadcast")
    )


def _refuse_standalone_rank() -> None:
    """Refuse to run as a single process if the launcher started several."""
    for rank, size in VARIABLES:
        text = os.environ.get(size, "")
        # In a Slurm job every process has the size, and those that srun has started have a rank.
        is_meant = size != "SLURM_NTASKS" or rank in os.environ
        if is_meant and text.isascii() and text.isdigit() and int(text[:18]) > 1:
            raise ArgumentError(
                f"the environment says that this is one of {text} processes ({size}), but nothing connects them",
                hint="call torch.distributed.init_process_group first, or pass `group=`; "
                "`group=reshard.ranks.group.SingleProcess()` if this process works alone",
            )


@dataclass(frozen=True)
class ErrorRecord:
    """An exception of a rank.

    Attributes:
        name: its class, if it is one of `reshard.errors`.
        message: its text.
        facts: its other attributes that are texts or integers, such as path and key.
    """

    name: str | None
    message: str
    facts: dict[str, str | int | bool]

    @classmethod
    def of(cls, error: BaseException) -> ErrorRecord:
        if not isinstance(error, ReshardError):
            return cls(None, f"{type(error).__name__}: {error}"[:_MAX_MESSAGE], {})
        facts = {
            name: value[:_MAX_MESSAGE] if isinstance(value, str) else value
            for name, value in [*error.__dict__.items(), ("errno", getattr(error, "errno", None))]
            if name != "message" and isinstance(value, str | int)
        }
        return cls(type(error).__name__, error.message[:_MAX_MESSAGE], facts)

    def as_error(self, message: str) -> ReshardError:
        """An error of the same class and with the same facts, and another text."""
        cls = getattr(errors, self.name) if self.name in errors.__all__ else ReshardError
        error: ReshardError = cls(message)
        for fact, value in self.facts.items():
            setattr(error, fact, value)
        return error


def joint_error(records: Mapping[int, ErrorRecord]) -> ReshardError:
    """One error for the errors of several ranks."""
    named = [f"rank {rank}: {record.message}" for rank, record in list(records.items())[:_MAX_NAMED]]
    if len(records) > _MAX_NAMED:
        named.append(f"and {len(records) - _MAX_NAMED} more ranks")
    classes = {record.name for record in records.values()}
    name = classes.pop() if len(classes) == 1 else None
    first, *others = (record.facts for record in records.values())
    facts = {fact: value for fact, value in first.items() if all(other.get(fact) == value for other in others)}
    text = "\n".join(named)
    return ErrorRecord(name, text, facts).as_error(text)
