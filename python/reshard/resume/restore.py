"""Computes the counters of a resume decision: completed steps, skipped data, and warnings.

Three cases: nothing is loaded, only the weights are loaded, or the training continues.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reshard.errors import ArgumentError
from reshard.resume.counters import (
    Arithmetic,
    BatchSchedule,
    EpochStep,
    Scaling,
    epoch_step,
    initial_epoch,
    saved_steps,
    scale_steps,
)
from reshard.resume.facts import CandidateFacts, Restored, ResumeDecision, ResumeFacts, RunFacts, Verdict

if TYPE_CHECKING:
    from reshard.config import Config
    from reshard.documents.common_info import CommonInfo


NO_OPTIMIZER = "the checkpoint holds no optimizer state: an optimizer would start with new state"


def start_fresh(
    config: Config, facts: ResumeFacts, verdicts: tuple[Verdict, ...], reasons: list[str], warnings: list[str]
) -> ResumeDecision:
    """The decision for a run whose steps count from 0.

    Args:
        config: the training configuration.
        facts: facts of the checkpoints and the run.
        verdicts: the verdicts on the candidates.
        reasons: reasons so far; reasons for the counters are added.
        warnings: warnings so far.
    """
    run, batches = facts.run, _Batches.of(config, facts.run)
    return ResumeDecision(
        fresh=True,
        next_sink=_next_sink(config, run, 0),
        next_step=_next_step(run, 0),
        data_skip_steps=_data_skip(config, 0, reasons),
        global_batch_size=batches.size_at(0),
        total_steps=config.total_steps,
        verdicts=verdicts,
        reasons=tuple(reasons),
        warnings=tuple(warnings),
    )


def with_checkpoint(decision: ResumeDecision, candidate: CandidateFacts, run: RunFacts) -> ResumeDecision:
    """The decision with the checkpoint to load.

    Args:
        decision: the decision without a checkpoint.
        candidate: the chosen candidate.
        run: facts of the new run.
    """
    reasons, is_resharded = decision.reasons, None
    if candidate.world_size is not None and run.world_size is not None:
        is_resharded = candidate.world_size != run.world_size
    if is_resharded:
        reasons += (f"saved by {candidate.world_size} ranks, loaded by {run.world_size}: the tensors are resharded",)
    return replace(
        decision,
        path=candidate.path,
        iteration=candidate.iteration,
        is_verified=candidate.is_verified,
        is_resharded=is_resharded,
        reasons=reasons,
    )


def continue_run(
    config: Config,
    run: RunFacts,
    candidate: CandidateFacts,
    verdicts: tuple[Verdict, ...],
    warnings: list[str],
    *,
    compatible: bool,
) -> ResumeDecision:
    """The decision for a run that continues the steps of a candidate.

    Args:
        config: the training configuration.
        run: facts of the new run.
        candidate: the chosen candidate.
        verdicts: the verdicts on the candidates.
        warnings: warnings so far; others are added.
        compatible: compute the counters as MindSpore Transformers does.
    """
    common, reasons = candidate.common, list[str]()
    saved = None if common is None else saved_steps(common, candidate.iteration)
    assert common is not None  # checked by `evaluate`
    assert saved is not None
    steps, is_eager = saved
    if is_eager and steps != common.step_num:
        reasons.append(f"global_step {steps} is used; step_num {common.step_num} is the length of the whole run")
    if common.step_num is None and common.global_step is None:
        reasons.append(f"common.json has no step: {steps}, the number in the folder name, is used")
    arithmetic: Arithmetic = "exact"
    if compatible:
        arithmetic = "float32" if config.legacy_format or candidate.is_legacy else "double"
    batches = _Batches.of(config, run, common, arithmetic)
    of_samples = batches.scale(steps)
    scaling = of_samples if run.scale_steps else None
    initial = steps if scaling is None else scaling.steps
    if run.scale_steps:
        batches.explain(steps, scaling, reasons, warnings)
    elif of_samples is not None:
        warnings.append(f"global_batch_size {batches.saved} -> {batches.new}: steps continue from {steps}, not scaled")
    consumed = batches.consumed_at(steps) if common.consumed_samples is None else common.consumed_samples
    skip = _data_skip(config, steps if of_samples is None else of_samples.steps, reasons)
    # In eager mode, in which the batch size may grow, data is skipped in micro-steps.
    micro = _micro_skip(config, run, consumed) if is_eager or batches.schedule is not None else None
    restored: list[Restored] = ["weights", "counters"]
    if candidate.has_optimizer is not False:
        restored.insert(1, "optimizer")
    elif run.has_optimizer is None:
        warnings.append(NO_OPTIMIZER)
    restored += ["loss scale"] if common.loss_scale is not None else []
    restored += ["data position"] if skip or micro else []
    global_step = steps if common.global_step is None else common.global_step
    scaled_global_step = batches.scale(global_step) if run.scale_steps else None
    _warn(config, run, initial, scaling, warnings)
    if run.dataset_changed and skip and config.data_skip_steps is None:
        warnings.append(
            f"the first {skip} steps of the new dataset are skipped, the number of steps made on the old dataset: "
            '`data="new"` of `resume`, or `ignore_data_skip` or `data_skip_steps` of a configuration, changes this'
        )
    return ResumeDecision(
        restored=tuple(restored),
        initial_step=initial,
        global_step=global_step if scaled_global_step is None else scaled_global_step.steps,
        initial_epoch=_initial_epoch(config, run, common, initial, batches),
        next_sink=_next_sink(config, run, initial),
        next_step=_next_step(run, initial),
        consumed_samples=consumed,
        data_skip_steps=skip,
        skip_micro_steps=micro,
        global_batch_size=batches.size_at(consumed),
        loss_scale=common.loss_scale,
        total_steps=config.total_steps,
        scaling=scaling,
        compatible=compatible,
        verdicts=verdicts,
        reasons=tuple(reasons),
        warnings=tuple(warnings),
    )


@dataclass(frozen=True)
class _Batches:
    """The batch sizes of the saved run and of the new run, and how steps are scaled between them. None: not known."""

    saved: int | None
    new: int | None
    schedule: BatchSchedule | None
    arithmetic: Arithmetic

    @classmethod
    def of(
        cls, config: Config, run: RunFacts, common: CommonInfo | None = None, arithmetic: Arithmetic = "exact"
    ) -> _Batches:
        new = config.global_batch_size if run.global_batch_size is None else run.global_batch_size
        saved = None if common is None else common.global_batch_size
        for size in (saved, new, run.base_units):
            if size is not None and size < 1:
                raise ArgumentError(f"a batch size of {size} samples: expected at least 1")
        schedule = None
        if config.rampup is not None:
            if new is None:
                raise ArgumentError("rampup_batch_size needs `global_batch_size`, the last batch size")
            schedule = BatchSchedule(*config.rampup, new, run.base_units or 1)
        return cls(saved, new, schedule, arithmetic)

    def scale(self, steps: int) -> Scaling | None:
        """Steps at the new batch size; None if they do not change."""
        if self.schedule is not None or self.saved is None or self.new is None:
            return None
        if self.saved == self.new and self.arithmetic != "float32":  # float32 can change steps even then
            return None
        return scale_steps(steps, self.saved, self.new, self.arithmetic)

    def consumed_at(self, steps: int) -> int | None:
        """Consumed samples after a number of steps of the saved run."""
        if self.schedule is not None:
            return self.schedule.consumed_at(steps, compatible=self.arithmetic != "exact")
        size = self.saved or self.new
        return None if size is None else steps * size

    def size_at(self, consumed: int | None) -> int | None:
        """The batch size of the next step."""
        if self.schedule is None:
            return self.new or self.saved
        return None if consumed is None else self.schedule.size_at(consumed, compatible=self.arithmetic != "exact")

    def explain(self, steps: int, scaling: Scaling | None, reasons: list[str], warnings: list[str]) -> None:
        """Add reasons and warnings about the scaling of steps, or why they are not scaled."""
        if self.schedule is not None:
            reasons.append("the batch size grows with the consumed samples: steps are not scaled")
        elif self.new is None and self.saved is not None:
            reasons.append(f"steps are counted in the batch size of the checkpoint, {self.saved} samples")
        elif self.saved is None and self.new is not None:
            reasons.append("the checkpoint records no global batch size: steps are not scaled")
        if scaling is None:
            return
        sizes = f"{self.saved} -> {self.new}"
        reasons.append(f"global_batch_size {sizes}: {steps} steps x {scaling.factor} = {scaling.exact}")
        if scaling.steps != int(scaling.exact):
            warnings.append(
                f"compatible arithmetic computes {scaling.steps} steps, the correct result is {int(scaling.exact)}"
            )
        elif scaling.lost_samples:
            reasons.append(f"rounded down to {scaling.steps} steps: {scaling.lost_samples} samples are seen again")


def _initial_epoch(config: Config, run: RunFacts, common: CommonInfo, initial: int, batches: _Batches) -> int:
    if common.epoch_num is None:
        return 0 if run.steps_per_epoch is None or config.sink_mode else initial // run.steps_per_epoch
    if not config.sink_mode or batches.scale(0) is None:
        return initial_epoch(common.epoch_num, initial, run.steps_per_epoch, sink_mode=config.sink_mode)
    sizes = {"saved_batch": batches.saved or 1, "new_batch": batches.new or 1}
    return initial_epoch(
        common.epoch_num, initial, run.steps_per_epoch, sink_mode=True, **sizes, arithmetic=batches.arithmetic
    )


def _next_sink(config: Config, run: RunFacts, initial: int) -> EpochStep | None:
    if not config.sink_mode or config.sink_size is None or run.steps_per_epoch is None:
        return None
    return epoch_step(initial + config.sink_size, run.steps_per_epoch)


def _next_step(run: RunFacts, initial: int) -> EpochStep | None:
    return None if run.steps_per_epoch is None else epoch_step(initial + 1, run.steps_per_epoch)


def _data_skip(config: Config, initial: int, reasons: list[str]) -> int:
    """Steps of data to skip: 0 with ignore_data_skip, else data_skip_steps, else the completed steps."""
    if config.ignore_data_skip:
        reasons.append("ignore_data_skip: the data is read from the start")
        return 0
    if config.data_skip_steps is not None:
        reasons.append(f"data_skip_steps: {config.data_skip_steps} steps of data are skipped")
        return config.data_skip_steps
    return initial


def _micro_skip(config: Config, run: RunFacts, consumed: int | None) -> int | None:
    if run.base_units is None or consumed is None or config.data_skip_steps is not None:
        return None
    return 0 if config.ignore_data_skip else consumed // run.base_units


def _warn(config: Config, run: RunFacts, initial: int, scaling: Scaling | None, warnings: list[str]) -> None:
    """Add warnings about settings of the new run that do not fit the step at which it continues."""
    total, per_epoch = config.total_steps, run.steps_per_epoch
    if total is not None and initial >= total:
        warnings.append(f"the learning-rate schedule of total_steps {total} has ended at step {initial}")
    elif total is not None and scaling is not None and scaling.factor != 1:
        warnings.append(f"total_steps {total} is not scaled, but the steps are")
    elif total is None and run.dataset_changed:
        warnings.append("the dataset changed and total_steps is not set: the learning-rate schedule changes with it")
    if config.epochs is not None and per_epoch is not None and initial >= config.epochs * per_epoch:
        warnings.append(
            f"step {initial} is past {config.epochs} epochs of {per_epoch} steps: no step is left; increase epochs"
        )
