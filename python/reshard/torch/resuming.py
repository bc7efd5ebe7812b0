"""What was read of a checkpoint goes back into a run: tensors, objects, the data position, random streams.

Each function does one thing on one rank and returns sentences on what is not as it was, which the decision to resume
then tells. In which order, and that all ranks fare alike, is the checkpointer's business.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from reshard.errors import MismatchError
from reshard.resume import EpochStep
from reshard.torch import rng
from reshard.torch.restore import apply
from reshard.torch.run import object_name
from reshard.torch.sampler import ElasticSampler
from reshard.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from reshard.config import Config
    from reshard.resume import ResumeDecision
    from reshard.torch.loading import Read
    from reshard.torch.run import Run
    from reshard.torch.state import Described

__all__ = [
    "RestoreOptions",
    "check_has_optimizer",
    "check_restored",
    "restore_objects",
    "restore_random",
    "restore_sampler",
    "restore_tensors",
    "with_data_position",
]


@dataclass(frozen=True)
class RestoreOptions:
    """How strictly, as the arguments of `Checkpointer.resume` say it."""

    strict: bool
    cast: bool
    init: Callable[[str, torch.Tensor], torch.Tensor | None] | None
    device: torch.device | str | None
    grown: bool


def check_has_optimizer(run: Run, found: Read, saved: Mapping[str, Any], options: RestoreOptions) -> list[str]:
    """See that a checkpoint that a run goes on from holds an optimizer, if the run has one.

    Raises:
        MismatchError: it does not, and it matters.
    """
    if run.optimizer is None or "optimizer" in saved.get("trainer", {}) or found.has_optimizer:
        return []
    if options.strict:
        raise MismatchError(
            "the checkpoint holds no state of an optimizer, and the run has one",
            hint="`strict=False` lets the optimizer begin anew",
        )
    return ["the checkpoint holds no state of an optimizer: it begins anew"]


def restore_tensors(described: Described, found: Read, saved: Mapping[str, Any], options: RestoreOptions) -> list[str]:
    """Parameters, buffers, optimizers, schedulers and what else has state.

    Raises:
        MismatchError: they do not fit.
    """
    report = apply(
        described,
        found.arrays,
        saved.get("trainer"),
        rank_local=saved.get("rank_local"),
        strict=options.strict,
        cast=options.cast,
        init=options.init,
        device=options.device,
        object_name=object_name,
    )
    messages = []
    if report.missing:
        messages.append(f"the checkpoint lacks {listed(map(show, report.missing))}")
    if report.unexpected:
        messages.append(f"the run has no place for {listed(map(show, report.unexpected))}")
    if report.shared:
        messages.append(
            f"{listed(map(show, report.shared))} differed between the {found.world_size} ranks that saved: all ranks "
            "get the first one's"
        )
    return messages


def restore_objects(
    run: Run, found: Read, saved: Mapping[str, Any], world_size: int, options: RestoreOptions
) -> list[str]:
    """What every rank keeps for itself, which fits the same number of ranks alone.

    Raises:
        MismatchError: it does not fit, and it matters.
    """
    messages = []
    kept = saved.get("per rank", {})
    is_same = found.world_size == world_size
    for name, one in run.per_rank.items():
        if name in kept and is_same:
            one.load_state_dict(kept[name])
        elif saved:
            why = "the checkpoint does not have it"
            if not is_same:
                why = f"{found.world_size} ranks saved it, and {world_size} load it"
            messages.append(f"{show(object_name(name))} is kept for each rank, and {why}")
    messages += [
        f"the run has no place for {show(object_name(str(name)))}" for name in kept if name not in run.per_rank
    ]
    if messages and options.strict:
        raise MismatchError("; ".join(messages), hint="`strict=False` goes on without")
    return messages


def restore_sampler(
    sampler: Any, saved: Mapping[str, Any], decision: ResumeDecision, config: Config, options: RestoreOptions
) -> list[str]:
    """Put the sampler where the data is gone on with.

    Raises:
        MismatchError: the run has no sampler, and the checkpoint has; or its data is not the saved one.
    """
    if sampler is None:
        if "sampler" not in saved:
            if not decision.initial_step:
                return []
            seen = f"what {decision.initial_step} steps have seen"
            return [f"no sampler was given: the data starts over, unless the trainer itself skips {seen}"]
        if options.strict:
            raise MismatchError(
                "the checkpoint has the state of a sampler, and the run has none", hint="`strict=False` goes on without"
            )
        return ["the run has no place for the sampler's state: the data starts over"]
    if "sampler" not in saved:
        if isinstance(sampler, ElasticSampler) and decision.data_skip_steps:
            sampler.step(decision.data_skip_steps)
            return [f"the checkpoint has no sampler: {decision.data_skip_steps} steps of data are skipped"]
        return ["the checkpoint has no sampler: the data starts over"] if decision.initial_step else []
    if not isinstance(sampler, ElasticSampler):
        sampler.load_state_dict(saved["sampler"])
        return []
    return sampler.load_state_dict(
        saved["sampler"],
        ignore_data_skip=config.ignore_data_skip,
        data_skip_steps=config.data_skip_steps,
        grown=options.grown,
    )


def with_data_position(decision: ResumeDecision, sampler: object) -> ResumeDecision:
    """The decision, with the position in the data as the sampler has it: in samples, whatever the batch size was."""
    if sampler is None:
        return replace(decision, restored=tuple(one for one in decision.restored if one != "data position"))
    if not isinstance(sampler, ElasticSampler):
        return decision
    return replace(
        decision,
        initial_epoch=sampler.epoch,
        next_step=EpochStep(sampler.epoch + 1, sampler.consumed // sampler.global_batch_size + 1),
        consumed_samples=sampler.total,
        global_batch_size=sampler.global_batch_size,
    )


def check_restored(check: Callable[[Mapping[str, Any]], bool | None], run: Mapping[str, Any]) -> None:
    """Ask the caller's check whether the run behaves as it did.

    Raises:
        MismatchError: it does not.
    """
    if check({**run["metrics"], "step": run["step"], "loss": run["loss"]}) is False:
        raise MismatchError(
            f"what was restored does not behave as it did when it was saved at step {run['step']}: `check` refuses it",
            hint="see whether code and data are the same",
        )


def restore_random(
    saved: Mapping[str, Any],
    iteration: int,
    *,
    rank: int,
    world_size: int,
    coordinate: Mapping[str, int] | None,
    root_seed: int,
) -> list[str]:
    """Random streams as they were; in another world new ones, under the rule of `rng`."""
    if "rng" in saved:
        report = rng.restore(
            {**saved["rng"], "root_seed": root_seed},
            iteration=iteration,
            rank=rank,
            world_size=world_size,
            coordinate=coordinate,
        )
    else:
        place = {"rank": rank} if coordinate is None else coordinate
        report = rng.derive(root_seed, iteration, place, reason="fewer ranks saved")
    if not report.derived:
        return []
    return [f"random streams {', '.join(report.derived)} are derived anew: {report.reason}"]
