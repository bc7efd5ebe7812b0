"""`decide`, the resume decision: a pure function from a configuration and facts to a decision.

First it chooses a candidate: candidates come in the order in which they are tried, and the first complete and usable
one is taken; each gets a verdict. Then it computes the counters from the common info of the candidate and the batch
size of the new run. If no candidate can be taken it raises an error that lists all of them: a run never starts from
nothing because of damage. Others gather the facts; nothing here reads the disk, the clock or the environment.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.config import split_iteration
from reshard.errors import CheckpointNotFoundError, UnsupportedError
from reshard.resume.choose import evaluate, name_of, no_usable_candidate
from reshard.resume.facts import Refused
from reshard.resume.restore import continue_run, start_fresh, with_checkpoint
from reshard.values.words import hub_hint, show

if TYPE_CHECKING:
    from reshard.config import Config
    from reshard.resume.facts import Restored, ResumeDecision, ResumeFacts


def decide(
    config: Config, facts: ResumeFacts, *, compatible: bool = False, allow_fresh: bool = False
) -> ResumeDecision:
    """Decide which checkpoint a run resumes from, and with which counters.

    Args:
        config: the training configuration.
        facts: the checkpoints that were found, and facts of the run.
        compatible: compute the counters as MindSpore Transformers does, including its rounding errors.
        allow_fresh: if there are checkpoints and none can be taken, start from nothing, with a warning.

    Returns:
        The decision. It depends only on the arguments, so all ranks get the same one.

    Raises:
        CheckpointNotFoundError: the run must load a checkpoint, and there is none.
        DamagedFileError: there are checkpoints, and none can be taken; the message lists each with its fault.
        StorageError: a checkpoint could not be read.
        UnsupportedError: the run resumes from a Hugging Face folder, or `resume_training` names a file of Checkpoint
            1.0 and the root is of Checkpoint 2.0.
        ArgumentError: a number of the run is out of range.

    Example:
        >>> from reshard.config import Config
        >>> from reshard.documents.common_info import CommonInfo
        >>> from reshard.resume import CandidateFacts, Damaged, ResumeFacts, RunFacts
        >>> common = CommonInfo(step_num=400, global_step=400, epoch_num=1, global_batch_size=64)
        >>> candidates = (
        ...     CandidateFacts(
        ...         "ckpt/iteration_00000500", 500, "named by the tracker", state=Damaged("a file is missing")
        ...     ),
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
        warnings.append(f"configuration keys without effect: {', '.join(config.without_effect)}")
    if not config.load_path:
        return start_fresh(config, facts, (), ["load_checkpoint is empty: nothing is loaded"], warnings)
    if facts.kind in ("absent", "empty"):
        state = "does not exist" if facts.kind == "absent" else "holds no checkpoint yet"
        if config.resume and split_iteration(config.load_path)[1] is None:
            return start_fresh(config, facts, (), [f"{facts.path} {state}: the training starts from nothing"], warnings)
        why = "and it has to be loaded" if config.init_from is None else "and init_from names it"
        is_iteration = split_iteration(config.load_path)[1] is not None
        hint = hub_hint(facts.path) if facts.kind == "absent" and not is_iteration else None
        raise CheckpointNotFoundError(f"{facts.path} {state}, {why}", path=facts.path, hint=hint)
    verdicts = evaluate(config, facts)
    taken = next((n for n, verdict in enumerate(verdicts) if verdict.taken), None)
    if taken is None:
        if allow_fresh and facts.kind in ("root", "rank_folders"):
            warnings.append("no checkpoint can be used: the training starts from nothing, as `allow_fresh` says")
            return start_fresh(config, facts, verdicts, [], warnings)
        raise no_usable_candidate(config, facts, verdicts)
    candidate = facts.candidates[taken]
    warnings += [
        f"{name_of(verdict)} is skipped: {verdict.reason}"
        for verdict, one in zip(verdicts[:taken], facts.candidates[:taken], strict=True)
        if not isinstance(one.state, Refused)
    ]
    if candidate.common is not None and candidate.common.ckpt_status == 1:
        why = "" if candidate.unhealthy is None else f": {candidate.unhealthy}"
        warnings.append(
            f"{name_of(verdicts[taken])} was saved as unhealthy{why}; `healthy_only=True` takes the newest one "
            "that was saved as healthy"
        )
    if not candidate.is_verified:
        warnings.append(f"{name_of(verdicts[taken])} has no checksums: only its structure is checked")
    if not config.resume:
        restored: tuple[Restored, ...] = ("weights",)
        reasons = ["resume_training is off: only the weights are loaded, and steps count from 0"]
        if config.init_from is not None:
            restored = ("weights",) if config.init_from.fresh_optimizer else ("weights", "optimizer")
            what = "the weights" if config.init_from.fresh_optimizer else "the weights and the state of the optimizer"
            reasons = [f"the run starts from {what} of {candidate.path}, and steps count from 0"]
        start = start_fresh(config, facts, verdicts, reasons, warnings)
        start = replace(start, fresh=False, restored=restored, init_from=config.load_path if config.init_from else None)
        return with_checkpoint(start, candidate, facts.run)
    decision = continue_run(config, facts.run, candidate, verdicts, warnings, compatible=compatible)
    return with_checkpoint(decision, candidate, facts.run)


def _check_named(name: str, facts: ResumeFacts, warnings: list[str]) -> None:
    """Check a file that `resume_training` names: it must be in the rank folders of a Checkpoint 1.0 tree."""
    if facts.kind == "root":
        raise UnsupportedError(
            f"resume_training names the file {show(name)}, as for Checkpoint 1.0, and {facts.path} is a Checkpoint 2.0",
            hint="set `resume_training: true`; to choose an iteration set load_checkpoint: .../iteration_<number>",
        )
    if facts.kind in ("absent", "empty"):
        raise CheckpointNotFoundError(
            f"resume_training names the file {show(name)}, and {facts.path} "
            f"{'does not exist' if facts.kind == 'absent' else 'holds no checkpoint'}",
            path=facts.path,
        )
    if facts.kind != "rank_folders":
        warnings.append(f"resume_training names {show(name)}, but load_checkpoint names a checkpoint, which is used")
