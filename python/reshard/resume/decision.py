"""What a restarted run resumes from: one pure function from a configuration and facts to a decision.

First a candidate is chosen: candidates are given in the order in which they are tried, and the first that is whole
and fits is taken; each gets a verdict. Then the counters follow from its common info and the new run's batch size.
What cannot be resumed is an error that lists every candidate with its fault: a run never starts from nothing because
of damage. Gathering the facts is for others; nothing here looks at a disk, a clock or the environment.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.config import split_iteration
from reshard.errors import CheckpointNotFoundError, UnsupportedError
from reshard.resume.choose import evaluate, name_of, no_usable_candidate
from reshard.resume.restore import continue_run, start_fresh, with_checkpoint
from reshard.words import show

if TYPE_CHECKING:
    from reshard.config import Config
    from reshard.resume.facts import ResumeDecision, ResumeFacts

__all__ = ["decide"]


def decide(
    config: Config, facts: ResumeFacts, *, compatible: bool = False, allow_fresh: bool = False
) -> ResumeDecision:
    """Decide what a run resumes from, and with which counters.

    Args:
        config: what the run asks for.
        facts: what there is.
        compatible: compute the counters as MindSpore Transformers does, rounding errors included.
        allow_fresh: start from nothing where there are checkpoints and none can be taken, with a warning.

    Returns:
        The decision; the same for the same arguments, on every rank.

    Raises:
        CheckpointNotFoundError: weights are to be loaded and there is nothing.
        DamagedFileError: there are checkpoints, and none can be taken; each is listed with its fault.
        UnsupportedError: a Hugging Face folder is to be resumed from, or `resume_training` names a file of Checkpoint
            1.0 where a Checkpoint 2.0 root is.
        ArgumentError: the numbers of the run cannot be meant.

    Example:
        >>> from reshard.config import Config
        >>> from reshard.formats.checkpoint2.common import CommonInfo
        >>> from reshard.resume import CandidateFacts, ResumeFacts, RunFacts
        >>> common = CommonInfo(step_num=400, global_step=400, epoch_num=1, global_batch_size=64)
        >>> candidates = (
        ...     CandidateFacts("ckpt/iteration_00000500", 500, "named by the tracker", fault="a file is missing"),
        ...     CandidateFacts("ckpt/iteration_00000400", 400, "next below 500", common=common),
        ... )
        >>> facts = ResumeFacts("ckpt", "root", candidates, RunFacts(global_batch_size=128))
        >>> decision = decide(Config(load_path="ckpt", resume=True), facts)
        >>> decision.iteration, decision.initial_step, decision.data_skip_steps, decision.verdicts[0].reason
        (400, 200, 200, 'a file is missing')
    """
    warnings = list(facts.warnings)
    if config.resume_file is not None:
        _check_named(config.resume_file, facts, warnings)
    if config.without_effect:
        warnings.append(f"without effect here: {', '.join(config.without_effect)}")
    if not config.load_path:
        return start_fresh(config, facts, (), ["load_checkpoint is empty: nothing is loaded"], warnings)
    if facts.kind in ("absent", "empty"):
        state = "does not exist" if facts.kind == "absent" else "holds no checkpoint yet"
        if config.resume and split_iteration(config.load_path)[1] is None:
            return start_fresh(config, facts, (), [f"{facts.path} {state}: the training starts from nothing"], warnings)
        raise CheckpointNotFoundError(
            f"{facts.path} {state}, and load_checkpoint asks for what is in it", path=facts.path
        )
    verdicts = evaluate(config, facts)
    taken = next((n for n, verdict in enumerate(verdicts) if verdict.taken), None)
    if taken is None:
        if allow_fresh and facts.kind in ("root", "rank_folders"):
            warnings.append("no checkpoint can be taken: the training starts from nothing, as `allow_fresh` says")
            return start_fresh(config, facts, verdicts, [], warnings)
        raise no_usable_candidate(config, facts, verdicts)
    candidate = facts.candidates[taken]
    warnings += [
        f"{name_of(verdict)} passed over: {verdict.reason}"
        for verdict, one in zip(verdicts[:taken], facts.candidates[:taken], strict=True)
        if one.refusal is None
    ]
    if not candidate.is_verified:
        warnings.append(f"{name_of(verdicts[taken])} has no sums: its structure was checked, its content cannot be")
    if not config.resume:
        reasons = ["resume_training is off: the weights alone are loaded, and steps count from 0"]
        start = replace(start_fresh(config, facts, verdicts, reasons, warnings), fresh=False, restored=("weights",))
        return with_checkpoint(start, candidate, facts.run)
    decision = continue_run(config, facts.run, candidate, verdicts, warnings, compatible=compatible)
    return with_checkpoint(decision, candidate, facts.run)


def _check_named(name: str, facts: ResumeFacts, warnings: list[str]) -> None:
    """A file that `resume_training` names is one of each rank's folder; elsewhere it names nothing."""
    if facts.kind == "root":
        raise UnsupportedError(
            f"resume_training names the file {show(name)}, a matter of Checkpoint 1.0, and {facts.path} is of 2.0",
            hint="say `resume_training: true`; an older iteration is chosen by load_checkpoint: .../iteration_<number>",
        )
    if facts.kind in ("absent", "empty"):
        raise CheckpointNotFoundError(
            f"resume_training names the file {show(name)}, and {facts.path} "
            f"{'does not exist' if facts.kind == 'absent' else 'holds no checkpoint'}",
            path=facts.path,
        )
    if facts.kind != "rank_folders":
        warnings.append(f"resume_training names {show(name)}, and load_checkpoint one checkpoint: that is taken")
