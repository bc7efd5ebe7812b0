"""Which iteration of a root is tried first, which next, and which never: the order of candidates.

The idea: the tracker is the word of the last save that ended, so its iteration comes first and nothing above it is
taken, but for one case. A crash between the publication of a folder and the move of the tracker leaves a folder above
the tracker that was never tracked and whose manifest recorded this very tracker: its save had succeeded in all but
the tracker, and it goes before. Whatever else lies above was left behind when somebody went back on purpose.

Only the order is told here, of facts that the caller gathered: whether a candidate is whole is found out by opening
it. No disk, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from reshard.errors import ArgumentError

__all__ = ["Candidate", "Folder", "Order", "Policy", "left_behind", "order"]

Policy: TypeAlias = Literal["tracker", "tracker_only", "highest"]


@dataclass(frozen=True)
class Folder:
    """What is known of an iteration folder before it is opened.

    Attributes:
        iteration: the number in its name.
        name: its name.
        is_tracked: whether it holds the marker that the tracker named it once, durably.
        epoch: the epoch of its manifest, which says which of two saves was begun later; None: no valid manifest.
        previous_tracker: the iteration that the tracker named when its save began, from its manifest; None: there was
            no tracker, or there is no valid manifest.
        passed_over: iterations that the run which saved it had passed over when it resumed, from its manifest.
    """

    iteration: int
    name: str
    is_tracked: bool = False
    epoch: int | None = None
    previous_tracker: int | None = None
    passed_over: tuple[int, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """An iteration folder and why it stands where it does, or why it is no candidate.

    Attributes:
        iteration: the number in its name.
        name: its name.
        reason: half a sentence: "named by the tracker".
    """

    iteration: int
    name: str
    reason: str


@dataclass(frozen=True)
class Order:
    """In which order the folders of a root are tried.

    Attributes:
        candidates: best first.
        refused: those that are never tried, from the highest iteration down.
        tracker: the iteration that the tracker names; None without a tracker, or with one that is of no use.
        warnings: what is wrong with the root itself, in sentences.
    """

    candidates: tuple[Candidate, ...]
    refused: tuple[Candidate, ...]
    tracker: int | None
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
        folders: every iteration folder, one an iteration, in any order.
        tracker: the iteration in the tracker; None if there is none.
        tracker_fault: why a tracker that is there cannot be read.
        policy: "tracker": the rule above, then downwards. "tracker_only": nothing but the tracker's iteration.
            "highest": from the highest down, whatever the tracker says.
        exact: only this iteration, whatever the tracker says and even if it was passed over.

    Returns:
        The order. It may hold no candidate at all: then the reasons are in `refused` and `warnings`.

    Raises:
        ArgumentError: an unknown policy, or `exact` beside another policy than "tracker".

    Example:
        >>> crashed = Folder(300, "iteration_00000300", epoch=1, previous_tracker=200)
        >>> named = Folder(200, "iteration_00000200", is_tracked=True, epoch=1, previous_tracker=100)
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
        warnings.append(f"the tracker is of no use: {tracker_fault}")
    elif tracker is not None and all(folder.iteration != tracker for folder in folders):
        warnings.append(f"the tracker is of no use: it names iteration {tracker}, which has no folder")
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
            refusal = f"passed over by the run that saved iteration {by}"
        elif policy == "highest":
            reason = "next from the highest down"
        elif iteration == tracker:
            reason = "named by the tracker"
        elif policy == "tracker_only":
            refusal = "not named by the tracker, and nothing else is wanted"
        elif tracker is None:
            reason = "next from the highest down, there is no tracker"
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
    # Of several that crashed like that the one of the later run counts: it knew of the others, or could have.
    first.sort(key=lambda one: (one[0].epoch or 0, one[0].iteration), reverse=True)
    candidates = [Candidate(folder.iteration, folder.name, reason) for folder, reason in first] + then
    return Order(tuple(candidates), tuple(refused), tracker, tuple(warnings))


def _fault_above(folder: Folder, tracker: int) -> str | None:
    """Why a folder above the tracker is none that a crash left untracked; None if it is."""
    if folder.is_tracked:
        return f"the tracker named it once and names {tracker} now: it was left behind on purpose"
    if folder.epoch is None:
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
    """Iterations that a later run passed over, each with the iteration that says so.

    What was saved under such a number by that run itself or after it is another checkpoint, told by its epoch. And if
    the tracker moved on to the passed-over iteration after the record's own, somebody wanted it back: the tracker names
    it now, or it did when a later run saved.
    """
    epochs = {folder.iteration: folder.epoch for folder in folders}
    named = {(folder.previous_tracker, folder.epoch) for folder in folders}
    found: dict[int, int] = {}
    for folder in sorted(folders, key=lambda one: one.epoch or 0):
        if folder.epoch is None:
            continue
        for iteration in folder.passed_over:
            epoch = epochs.get(iteration)
            is_older = epoch is None or epoch < folder.epoch
            was_named = any(one == iteration and later is not None and later > folder.epoch for one, later in named)
            is_wanted_back = folder.is_tracked and (iteration == tracker or was_named)
            if iteration != folder.iteration and is_older and not is_wanted_back:
                found[iteration] = folder.iteration
    return found
