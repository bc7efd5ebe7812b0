"""Chooses the checkpoint: the first candidate that is complete and that the run can use. Each gets a verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.config import split_iteration
from reshard.errors import CheckpointNotFoundError, DamagedFileError, ReshardError, StorageError, UnsupportedError
from reshard.resume.counters import saved_steps
from reshard.resume.facts import CandidateFacts, Damaged, Outcome, Refused, ResumeFacts, Unreadable, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.config import Config

# Why those after the first usable or unreadable one are not taken. Whether they are complete may be unknown.
_REST: Mapping[Outcome, str] = {
    "not needed": "not needed: a better one is selected",
    "not reached": "not reached: an earlier one could not be read",
}


def evaluate(config: Config, facts: ResumeFacts) -> tuple[Verdict, ...]:
    """A verdict on every candidate: the first complete and usable one is taken, unless one before it is unreadable.

    Example:
        >>> from reshard.config import Config
        >>> from reshard.resume import CandidateFacts, Damaged, ResumeFacts
        >>> facts = ResumeFacts("ckpt", "root", (CandidateFacts("ckpt/iteration_00000005", 5, state=Damaged("torn")),))
        >>> evaluate(Config(load_path="ckpt"), facts)
        (Verdict(path='ckpt/iteration_00000005', iteration=5, taken=False, reason='torn', outcome='skipped'),)
    """
    verdicts: list[Verdict] = []
    first: Outcome = "taken"  # the outcome of the first usable candidate
    rest: Outcome | None = None  # of all candidates after it
    for candidate in facts.candidates:
        outcome: Outcome = "skipped"
        state, reason = candidate.state, None
        if isinstance(state, Damaged | Refused):
            reason = state.reason
        elif rest is not None:
            outcome, reason = rest, _REST[rest]
        elif isinstance(state, Unreadable):
            outcome, first, reason = "unreadable", "not reached", f"could not be read: {state.reason}"
        else:
            reason = _why_unusable(config, facts, candidate)
            if reason is None:
                outcome, rest = first, "not needed" if first == "taken" else "not reached"
                reason = candidate.why if first == "taken" else _REST[first]
        is_taken = outcome == "taken"
        verdicts.append(Verdict(candidate.path, candidate.iteration, is_taken, reason, outcome))
    return tuple(verdicts)


def is_settled(verdicts: tuple[Verdict, ...]) -> bool:
    """Whether further candidates cannot change the choice.

    Example:
        >>> is_settled((Verdict("ckpt/iteration_00000005", 5, taken=False, reason="torn", outcome="skipped"),))
        False
    """
    return any(verdict.outcome in ("taken", "not reached") for verdict in verdicts)


def _why_unusable(config: Config, facts: ResumeFacts, candidate: CandidateFacts) -> str | None:
    """Why this run cannot use a complete checkpoint; None if it can."""
    if not config.resume:
        return None
    if candidate.common is None and candidate.counters is not None:
        return f"it has no {candidate.counters}, so its counters are missing"
    if facts.kind == "pretrained":
        return "it holds only weights, no counters and no optimizer state"
    if candidate.common is None:
        return "the counters of a run are not read from its format"
    if saved_steps(candidate.common, candidate.iteration) is None:
        where = "its files hold" if candidate.is_legacy else "its common.json has"
        return f"{where} neither step_num nor global_step"
    if candidate.has_optimizer is False and facts.run.has_optimizer:
        return "it holds no optimizer state"
    status = candidate.common.ckpt_status
    # A file of Checkpoint 1.0 that is named explicitly is used anyway, as in MindSpore Transformers.
    if config.healthy_only and status != 0 and not (candidate.is_legacy and config.resume_file is not None):
        found = "its health was not recorded" if status is None else "it was saved as unhealthy"
        return f"{found}, and the configuration allows only healthy checkpoints"
    return None


def no_usable_candidate(config: Config, facts: ResumeFacts, verdicts: tuple[Verdict, ...]) -> ReshardError:
    """The error that lists every candidate. Its class tells whether candidates are damaged, unusable or missing.

    Args:
        config: the configuration of the run.
        facts: the facts about the candidates.
        verdicts: why each candidate is refused, in the order in which they were tried.
    """
    if not verdicts:
        return CheckpointNotFoundError(
            f"{facts.path} exists and holds no checkpoint{'' if facts.there is None else f': {facts.there}'}",
            path=facts.path,
            hint="a checkpoint root is the folder that holds the iteration_<number> folders, in Checkpoint 1.0 the "
            "rank_<number> folders; to start a new run choose an empty or a new folder",
        )
    hint = (
        "a run does not silently start from step 0: put back damaged files from a copy, or use another or an empty "
        "folder"
    )
    error_class: type[ReshardError] = DamagedFileError
    if any(verdict.outcome == "unreadable" for verdict in verdicts):
        error_class = StorageError
        hint = "run this as the user of the training, or give this user read permission; the files are not damaged"
    elif all(isinstance(candidate.state, Refused) for candidate in facts.candidates):
        error_class = CheckpointNotFoundError
        if split_iteration(config.load_path)[1] is not None:
            hint = "choose an iteration that exists, or give the root alone to load the newest"
    elif not any(isinstance(candidate.state, Damaged) for candidate in facts.candidates):
        error_class = UnsupportedError
        if all(candidate.common is None for candidate in facts.candidates):
            hint = (
                "to start a run from its weights, use another root and `init_from`, or set `resume_training: false` in "
                "the configuration"
            )
    listed = "\n".join(f"  {name_of(verdict)}: {verdict.reason}" for verdict in verdicts)
    action = "resumed from" if config.resume else "loaded"
    return error_class(f"no checkpoint in {facts.path} can be {action}:\n{listed}", path=facts.path, hint=hint)


def name_of(verdict: Verdict) -> str:
    """The last component of a candidate's path."""
    return verdict.path.rstrip("/").rpartition("/")[2]
