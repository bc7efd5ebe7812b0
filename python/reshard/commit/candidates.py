"""The order in which the iterations of a root are tried, and those that are never tried.

The tracker names the last save that ended, so its iteration is tried first. Folders above the tracker are not tried,
with one exception. A crash between the publication of a folder and the change of the tracker leaves a folder above the
tracker that was never tracked and whose manifest records the current tracker. Its save was complete except for the
tracker, so it is tried first. Every other folder above the tracker remained when a user resumed from an older iteration
on purpose.

The order is computed from facts that the caller gathered. The caller opens a candidate to find whether it is complete.
This module reads no files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from reshard.errors import ArgumentError

Policy: TypeAlias = Literal["tracker", "tracker_only", "highest"]


@dataclass(frozen=True)
class Folder:
    """Facts of an iteration folder before it is opened.

    Attributes:
        iteration: the number in its name.
        name: its name.
        is_tracked: whether it holds the marker of an iteration that the tracker has named.
        generation: the generation in its manifest; of two saves, the one with the higher generation began later. None:
            no valid manifest.
        previous_tracker: the iteration that the tracker named when its save began, from its manifest; None: there was
        no tracker, or the manifest is invalid. passed_over: iterations that the run which saved it had skipped when it
        resumed, from its manifest.
    """

    iteration: int
    name: str
    is_tracked: bool = False
    generation: int | None = None
    previous_tracker: int | None = None
    passed_over: tuple[int, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """A checkpoint of a root and the reason for its place in the order, or why it is not a candidate.

    Attributes:
        iteration: the number in its name; None: its name has none.
        name: its name in the root, mostly that of its folder.
        reason: a phrase such as "named by the tracker".
        fault: why it is incomplete, as far as names show.
    """

    iteration: int | None
    name: str
    reason: str
    fault: str | None = None


@dataclass(frozen=True)
class Order:
    """The order in which the checkpoints of a root are tried.

    Attributes:
        candidates: in the order in which they are tried; those with a fault are skipped.
        refused: those that are never tried, newest first.
        tracker: the iteration that the tracker names; None without a tracker, or with an invalid one.
        warnings: problems of the root itself, as sentences.
    """

    candidates: tuple[Candidate, ...]
    refused: tuple[Candidate, ...] = ()
    tracker: int | None = None
    warnings: tuple[str, ...] = ()


def order(
    folders: tuple[Folder, ...],
    tracker: int | None,
    tracker_fault: str | None = None,
    *,
    policy: Policy = "tracker",
    exact: int | None = None,
) -> Order:
    """Put the iteration folders of a root in the order in which they are tried.

    Args:
        folders: all iteration folders, one per iteration, in any order.
        tracker: the iteration in the tracker; None if there is none.
        tracker_fault: why a tracker that exists cannot be read.
        policy: "tracker": the order above, then by descending iteration. "tracker_only": only the tracker's iteration.
            "highest": by descending iteration, without regard to the tracker.
        exact: only this iteration, without regard to the tracker and even if a run has skipped it.

    Returns:
        The order. If it has no candidates, the reasons are in `refused` and `warnings`.

    Raises:
        ArgumentError: an unknown policy, or `exact` with a policy other than "tracker".

    Example:
        >>> crashed = Folder(300, "iteration_00000300", generation=1, previous_tracker=200)
        >>> named = Folder(200, "iteration_00000200", is_tracked=True, generation=1, previous_tracker=100)
        >>> [(one.iteration, one.reason) for one in order((named, crashed), 200).candidates]
        [(300, 'published after the tracker named 200, which a crash kept from moving'), (200, 'named by the tracker')]
    """
    if policy not in ("tracker", "tracker_only", "highest"):
        raise ArgumentError(f"policy is {policy!r}; expected 'tracker', 'tracker_only' or 'highest'")
    if exact is not None and policy != "tracker":
        raise ArgumentError(f"`exact` and policy {policy!r} exclude each other")
    down = sorted(folders, key=lambda folder: -folder.iteration)
    warnings = []
    if tracker_fault is not None:
        tracker = None
        warnings.append(f"the tracker is invalid: {tracker_fault}")
    elif tracker is not None and all(folder.iteration != tracker for folder in folders):
        warnings.append(f"the tracker is invalid: it names iteration {tracker}, which has no folder")
        tracker = None
    if exact is not None and all(folder.iteration != exact for folder in folders):
        warnings.append(f"there is no folder of iteration {exact}, which was asked for")
    behind = left_behind(folders, tracker)
    first: list[tuple[Folder, str]] = []  # above the tracker
    then: list[Candidate] = []
    refused: list[Candidate] = []
    for folder in down:
        iteration = folder.iteration
        refusal = reason = None
        if exact is not None:
            refusal = None if iteration == exact else f"iteration {exact} was asked for"
            reason = "asked for"
        elif iteration in behind:
            by = behind[iteration]
            refusal = f"skipped by the run that saved iteration {by}"
        elif policy == "highest":
            reason = "the highest number that is left"
        elif iteration == tracker:
            reason = "named by the tracker"
        elif policy == "tracker_only":
            refusal = "not named by the tracker, and nothing else is wanted"
        elif tracker is None:
            reason = f"the highest number that is left; there is no {'valid ' if warnings else ''}tracker"
        elif iteration < tracker:
            reason = f"next below the tracker's {tracker}"
        elif (refusal := _fault_above(folder, tracker)) is None:
            first.append((folder, f"published after the tracker named {tracker}, which a crash kept from moving"))
            continue
        if refusal is not None:
            refused.append(Candidate(iteration, folder.name, refusal))
        else:
            assert reason is not None
            then.append(Candidate(iteration, folder.name, reason))
    # If several saves crashed this way, the save of the latest run is used: that run could have resumed from the
    # others.
    first.sort(key=lambda one: (one[0].generation or 0, one[0].iteration), reverse=True)
    candidates = [Candidate(folder.iteration, folder.name, reason) for folder, reason in first] + then
    return Order(tuple(candidates), tuple(refused), tracker, tuple(warnings))


def _fault_above(folder: Folder, tracker: int) -> str | None:
    """Why a folder above the tracker is not tried; None if a crash left it untracked."""
    if folder.is_tracked:
        return f"the tracker named it before, and was moved back to {tracker}"
    if folder.generation is None:
        return f"above the tracker's {tracker} and without a valid manifest: nothing proves that its save ended"
    if folder.previous_tracker != tracker:
        was = (
            "there was no tracker"
            if folder.previous_tracker is None
            else f"the tracker named {folder.previous_tracker}"
        )
        return f"above the tracker's {tracker}, and {was} when it was saved: it belongs to another line of saves"
    return None


def left_behind(folders: tuple[Folder, ...], tracker: int | None) -> dict[int, int]:
    """Iterations that a later run skipped, each with the iteration whose manifest records it.

    If a later run saved an iteration of the same number again, it has a higher generation and is not skipped. A skipped
    iteration is a candidate again if the tracker named it after the record was made: the tracker names it now, or named
    it when a later run saved.
    """
    generations = {folder.iteration: folder.generation for folder in folders}
    named = {(folder.previous_tracker, folder.generation) for folder in folders}
    found: dict[int, int] = {}
    for folder in sorted(folders, key=lambda one: one.generation or 0):
        if folder.generation is None:
            continue
        for iteration in folder.passed_over:
            generation = generations.get(iteration)
            is_older = generation is None or generation < folder.generation
            was_named = any(
                one == iteration and later is not None and later > folder.generation for one, later in named
            )
            is_wanted_back = folder.is_tracked and (iteration == tracker or was_named)
            if iteration != folder.iteration and is_older and not is_wanted_back:
                found[iteration] = folder.iteration
    return found
