"""Which checkpoint is taken: the first in the order that is whole and that the run can take. Each gets a verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.errors import CheckpointNotFoundError, DamagedFileError, ReshardError, StorageError, UnsupportedError
from reshard.resume.counters import saved_steps
from reshard.resume.facts import CandidateFacts, ResumeFacts, Verdict

if TYPE_CHECKING:
    from reshard.config import Config

__all__ = ["NOT_NEEDED", "NOT_REACHED", "UNREADABLE", "evaluate", "is_settled", "name_of", "no_usable_candidate"]

# Of a candidate that a restart would stop at, and of those that come after it.
UNREADABLE = "could not be read"
NOT_REACHED = "not reached: an earlier one could not be read"
# Of candidates after the one that is taken; nobody need have looked into them.
NOT_NEEDED = "not needed: a better one is taken"


def evaluate(config: Config, facts: ResumeFacts) -> tuple[Verdict, ...]:
    """A verdict on every candidate: the first that is whole and fits is taken, unless one before it is unreadable.

    Example:
        >>> from reshard.config import Config
        >>> from reshard.resume import CandidateFacts, ResumeFacts
        >>> facts = ResumeFacts("ckpt", "root", (CandidateFacts("ckpt/iteration_00000005", 5, fault="torn"),))
        >>> evaluate(Config(load_path="ckpt"), facts)
        (Verdict(path='ckpt/iteration_00000005', iteration=5, taken=False, reason='torn'),)
    """
    verdicts: list[Verdict] = []
    rest: str | None = None  # what is said of all that follow the first that is whole and fits
    is_stopped = False
    for candidate in facts.candidates:
        against = candidate.refusal or candidate.fault
        if against is None and rest is None and candidate.unreadable is not None:
            against, is_stopped = f"{UNREADABLE}: {candidate.unreadable}", True
        if against is None:
            against = rest or _why_unusable(config, facts, candidate)
        is_taken = against is None and not is_stopped
        if against is None:
            rest = NOT_NEEDED if is_taken else NOT_REACHED
            against = None if is_taken else NOT_REACHED
        verdicts.append(Verdict(candidate.path, candidate.iteration, is_taken, against or candidate.why))
    return tuple(verdicts)


def is_settled(verdicts: tuple[Verdict, ...]) -> bool:
    """Whether nothing that follows can change the choice.

    Example:
        >>> is_settled((Verdict("ckpt/iteration_00000005", 5, taken=False, reason="torn"),))
        False
    """
    return any(verdict.taken or verdict.reason == NOT_REACHED for verdict in verdicts)


def _why_unusable(config: Config, facts: ResumeFacts, candidate: CandidateFacts) -> str | None:
    """Why a whole checkpoint is none that this run can take."""
    if not config.resume:
        return None
    if facts.kind == "pretrained":
        return "a Hugging Face folder holds weights alone, no counters and no optimizer"
    if candidate.common is None:
        return "it has no common.json: its counters are lost"
    if saved_steps(candidate.common, candidate.iteration) is None:
        where = "its files hold" if candidate.is_legacy else "its common.json has"
        return f"{where} neither step_num nor global_step"
    if candidate.has_optimizer is False and facts.run.has_optimizer:
        return "it holds no optimizer state"
    status = candidate.common.ckpt_status
    # What is named is meant, as the original has it for its 1.0.
    if config.healthy_only and status != 0 and not (candidate.is_legacy and config.resume_file is not None):
        found = "its health was not recorded" if status is None else "the health monitor found it unhealthy"
        return f"{found}, and only healthy ones are asked for"
    return None


def no_usable_candidate(config: Config, facts: ResumeFacts, verdicts: tuple[Verdict, ...]) -> ReshardError:
    """The error that lists every candidate; its class says whether something is damaged, unfit or just not there."""
    if not verdicts:
        return CheckpointNotFoundError(
            f"{facts.path} is there and holds no checkpoint",
            path=facts.path,
            hint="a checkpoint root is the folder that holds the iteration_<number> folders, in Checkpoint 1.0 the "
            "rank_<number> folders; to begin a run choose an empty or a new folder",
        )
    hint = "nothing starts from step 0 by itself: repair one, name another folder, or begin in an empty one"
    error_class: type[ReshardError] = DamagedFileError
    if any(verdict.reason.startswith(UNREADABLE) for verdict in verdicts):
        error_class = StorageError
        hint = "run this as the user who trains, or let this user read the files: what may not be read is not damaged"
    elif all(candidate.refusal for candidate in facts.candidates):
        error_class = CheckpointNotFoundError
    elif not any(candidate.fault for candidate in facts.candidates):
        error_class = UnsupportedError
        if facts.kind == "pretrained":
            hint = (
                "its weights alone can be loaded, by a configuration: `resume_training: false`; a run that starts from "
                "them saves into another folder"
            )
    listed = "\n".join(f"  {name_of(verdict)}: {verdict.reason}" for verdict in verdicts)
    asked = "resumed from" if config.resume else "loaded"
    return error_class(f"no checkpoint in {facts.path} can be {asked}:\n{listed}", path=facts.path, hint=hint)


def name_of(verdict: Verdict) -> str:
    """The name of a candidate's folder, without those above it."""
    return verdict.path.rstrip("/").rpartition("/")[2]
