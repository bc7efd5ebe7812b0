"""What goes into a decision, what was found on disk and what is known of the new run, and what comes out of it.

Plain values. Whoever gathers the facts looks at disks and counts ranks, so that deciding need not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from reshard.formats.checkpoint2.common import CommonInfo  # noqa: TC001  messages are decoded by their type hints

if TYPE_CHECKING:
    from reshard.resume.counters import Scaling, View

__all__ = ["CandidateFacts", "Facts", "Kind", "RankView", "Restored", "ResumeDecision", "RunFacts", "Verdict"]

Kind: TypeAlias = Literal["absent", "empty", "root", "rank_folders", "single", "pretrained", "other"]
Restored: TypeAlias = Literal["weights", "optimizer", "counters", "loss scale", "data position"]


@dataclass(frozen=True)
class CandidateFacts:
    """What is known of one checkpoint that could be resumed from.

    Attributes:
        path: its folder; of rank folders rank 0's file.
        iteration: the number in the folder's name, of rank folders the steps made; None: nothing says it.
        why: half a sentence on why it stands where it does in the order: "named by the tracker".
        fault: why it is not whole; None: it is.
        refusal: why it is no candidate at all, whole or not; None: it is one.
        unreadable: why it could not be looked at, for want of permission for example; None: it could. A restart that
            comes to it stops with this as its error.
        is_verified: whether its sums were or will be checked; False: its structure is all there is to go by.
        common: its counters; None: it has none.
        has_optimizer: whether it holds optimizer state; None: not known.
        world_size: ranks that saved it; None: not known.
        is_legacy: whether it is of Checkpoint 1.0, whose counters the original computes otherwise.
        rank_faults: `(rank, fault)` of each file of it that is not whole.
    """

    path: str
    iteration: int | None = None
    why: str = "given"
    fault: str | None = None
    refusal: str | None = None
    unreadable: str | None = None
    is_verified: bool = False
    common: CommonInfo | None = None
    has_optimizer: bool | None = None
    world_size: int | None = None
    is_legacy: bool = False
    rank_faults: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class RankView:
    """What one rank's folder of a Checkpoint 1.0 tree offers.

    Attributes:
        rank: whose it is.
        meta: the file that its meta.json names; None: it names none.
        meta_fault: why a meta.json that is there is of no use.
        files: names of its weight files.
        faults: `(name, fault)` of files that were looked into and are not whole.
    """

    rank: int
    meta: str | None = None
    meta_fault: str | None = None
    files: tuple[str, ...] = ()
    faults: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class RunFacts:
    """What is known of the run that is about to start. None: not told.

    Attributes:
        global_batch_size: samples a step over all ranks; of a growing batch the last size.
        world_size: its ranks.
        steps_per_epoch: steps in an epoch of its dataset, at its batch size.
        dataset_changed: whether its data is other data than that of the checkpoint.
        base_units: samples that a micro-step takes over all ranks.
        has_optimizer: whether it has an optimizer to restore.
        scale_steps: whether steps are scaled when the global batch size changes, as MindSpore Transformers does. If
            not, steps stay as they were counted, and only the data that is skipped follows the samples.
    """

    global_batch_size: int | None = None
    world_size: int | None = None
    steps_per_epoch: int | None = None
    dataset_changed: bool | None = None
    base_units: int | None = None
    has_optimizer: bool | None = None
    scale_steps: bool = True


@dataclass(frozen=True)
class Facts:
    """All that a decision is made of, beside the configuration.

    Attributes:
        path: what is to be loaded, as it was found.
        kind: what is there. "root" is one of Checkpoint 2.0, "rank_folders" one of 1.0 or any other folder of rank
            folders. "pretrained" holds weights alone. "single" is one checkpoint, given by itself; "empty" holds
            nothing but what an interrupted first save leaves; "other" holds something that is no checkpoint.
        candidates: best first, then those that are refused whatever they hold.
        run: the run that is about to start.
        warnings: what is wrong with the root itself.
        ranks: of "rank_folders" what each rank's folder offers, as far as it is known here. Nothing is decided by it.
    """

    path: str
    kind: Kind
    candidates: tuple[CandidateFacts, ...] = ()
    run: RunFacts = RunFacts()
    warnings: tuple[str, ...] = ()
    ranks: tuple[RankView, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What became of a candidate.

    Attributes:
        path: as in `CandidateFacts`.
        iteration: its number; None: it has none.
        taken: whether it is the one.
        reason: why, or why not.
    """

    path: str
    iteration: int | None
    taken: bool
    reason: str


@dataclass(frozen=True)
class ResumeDecision:
    """What a run goes on from.

    Attributes:
        path: the folder that is loaded, of rank folders rank 0's file; None: nothing is.
        iteration: its number; None: it has none, or nothing is loaded.
        fresh: whether the run starts from nothing.
        is_verified: whether sums stand behind what is loaded.
        restored: what is taken over.
        initial_step: steps that count as done; the next one is this plus 1, and the next iteration counts on from it.
        global_step: steps that the optimizer has made.
        initial_epoch: epochs that the training loop counts as done: sinks in sink mode, else passes over the data.
        next_sink: the last step of the next sink, the first that a log in sink mode shows, as a view of the current
            dataset; None: the sizes are not known.
        next_step: the next step as a view of the current dataset; None: its size is not known.
        consumed_samples: samples that training has seen; None: not known.
        data_skip_steps: steps of data to skip before the first; 0: the data is read from its beginning.
        skip_micro_steps: the same in micro-steps, which is how a growing batch skips; None: nobody needs it so.
        global_batch_size: of the next step; None: not known.
        loss_scale: None: not recorded.
        total_steps: steps of the learning-rate curve; None: those of the dataset.
        scaling: how the steps were scaled; None: the batch size is the same, or not known.
        is_resharded: whether another number of ranks saved it; None: not known.
        compatible: whether counters are the original's, rounding and all.
        verdicts: every candidate, best first, and what became of it.
        reasons: how the rest was decided, in sentences.
        warnings: what somebody should look at, in sentences.
    """

    path: str | None = None
    iteration: int | None = None
    fresh: bool = False
    is_verified: bool = False
    restored: tuple[Restored, ...] = ()
    initial_step: int = 0
    global_step: int = 0
    initial_epoch: int = 0
    next_sink: View | None = None
    next_step: View | None = None
    consumed_samples: int | None = 0
    data_skip_steps: int = 0
    skip_micro_steps: int | None = None
    global_batch_size: int | None = None
    loss_scale: float | None = None
    total_steps: int | None = None
    scaling: Scaling | None = None
    is_resharded: bool | None = None
    compatible: bool = False
    verdicts: tuple[Verdict, ...] = ()
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
