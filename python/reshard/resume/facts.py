"""Inputs and result of the resume decision: facts of the checkpoints on disk, facts of the new run, the decision.

Plain values. Other modules gather the facts, so that the decision reads neither the disk nor the group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from reshard.documents.common_info import CommonInfo

if TYPE_CHECKING:
    from reshard.documents.common_info import CommonInfo
    from reshard.resume.counters import EpochStep, Scaling

Kind: TypeAlias = Literal["absent", "empty", "root", "rank_folders", "single", "pretrained", "other"]
Outcome: TypeAlias = Literal["taken", "skipped", "unreadable", "not needed", "not reached"]
Restored: TypeAlias = Literal["weights", "optimizer", "counters", "loss scale", "data position"]


@dataclass(frozen=True)
class Complete:
    """The state of a candidate from which a run could resume."""

    kind: Literal["complete"] = "complete"


@dataclass(frozen=True)
class Damaged:
    """The state of a candidate that is not complete."""

    reason: str
    kind: Literal["damaged"] = "damaged"


@dataclass(frozen=True)
class Refused:
    """The state of what is no candidate, complete or not."""

    reason: str
    kind: Literal["refused"] = "refused"


@dataclass(frozen=True)
class Unreadable:
    """The state of a candidate that could not be read, as without permission: a restart stops there with an error."""

    reason: str
    kind: Literal["unreadable"] = "unreadable"


State: TypeAlias = Complete | Damaged | Refused | Unreadable


@dataclass(frozen=True)
class CandidateFacts:
    """Facts of one checkpoint from which a run could resume.

    Attributes:
        path: its folder; for rank folders the file of rank 0.
        iteration: the number in the folder name, for rank folders the completed steps; None: not known.
        why: the reason for its position in the order, such as "named by the tracker".
        state: whether it is complete, or why not.
        is_verified: whether it has checksums, which are compared when it is loaded; False: only its structure is
            checked.
        common: its counters; None: it has none.
        has_optimizer: whether it holds optimizer state; None: not known.
        world_size: number of ranks that saved it; None: not known.
        is_legacy: whether it is a Checkpoint 1.0, for which MindSpore Transformers computes counters in another way.
        counters: what holds the counters in its format, such as "common.json"; None: they are not read from it.
        rank_faults: `(rank, fault)` of each of its files that is not complete.
        unhealthy: of one that was saved as unhealthy, since when, and why; None: not known.
    """

    path: str
    iteration: int | None = None
    why: str = "given"
    state: State = Complete()
    is_verified: bool = False
    common: CommonInfo | None = None
    has_optimizer: bool | None = None
    world_size: int | None = None
    is_legacy: bool = False
    counters: str | None = None
    rank_faults: tuple[tuple[int, str], ...] = ()
    unhealthy: str | None = None


@dataclass(frozen=True)
class RankFolderFacts:
    """Facts of one rank's folder in a Checkpoint 1.0 tree.

    Attributes:
        rank: the rank of the folder.
        meta: the file that its meta.json names; None: it names none.
        meta_fault: why an existing meta.json is invalid.
        files: names of its weight files.
        faults: `(name, fault)` of the files that were read and are not complete.
        labels: a short form of some names, as they are shown beside those of other ranks.
    """

    rank: int
    meta: str | None = None
    meta_fault: str | None = None
    files: tuple[str, ...] = ()
    faults: tuple[tuple[str, str], ...] = ()
    labels: dict[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class RunFacts:
    """Facts of the new run. None: not specified.

    Attributes:
        global_batch_size: samples per step over all ranks; of a growing batch size the last one.
        world_size: number of ranks.
        steps_per_epoch: steps in an epoch of its dataset, at its batch size.
        dataset_changed: whether its dataset differs from that of the checkpoint.
        base_units: samples of a micro-step over all ranks.
        has_optimizer: whether it has an optimizer to restore.
        scale_steps: whether the step count is scaled when the global batch size changes, as MindSpore Transformers
            does. If False, the step count stays, and only the number of skipped data steps is scaled.
    """

    global_batch_size: int | None = None
    world_size: int | None = None
    steps_per_epoch: int | None = None
    dataset_changed: bool | None = None
    base_units: int | None = None
    has_optimizer: bool | None = None
    scale_steps: bool = True


@dataclass(frozen=True)
class ResumeFacts:
    """All inputs of a decision except the configuration.

    Attributes:
        path: the path to load.
        kind: the kind of the path. "root" is a root of Checkpoint 2.0, "rank_folders" a root of Checkpoint 1.0 or any
            other folder of rank folders. "pretrained" holds only weights. "single" is one checkpoint. "empty" holds
            nothing except files of an interrupted first save. "other" holds something that is not a checkpoint.
        candidates: the candidates, best first, then those that are refused.
        run: facts of the new run.
        warnings: warnings about the root itself.
        there: for "other" what lies at the path.
        ranks: for "rank_folders" the facts of each rank's folder, as far as known. The decision does not use them.
    """

    path: str
    kind: Kind
    candidates: tuple[CandidateFacts, ...] = ()
    run: RunFacts = RunFacts()
    warnings: tuple[str, ...] = ()
    ranks: tuple[RankFolderFacts, ...] = ()
    there: str | None = None


@dataclass(frozen=True)
class Verdict:
    """The verdict on a candidate.

    Attributes:
        path: as in `CandidateFacts`.
        iteration: its iteration; None: it has none.
        taken: whether this candidate is loaded.
        reason: why, or why not.
        outcome: "taken"; "skipped": it cannot be used; "unreadable": a restart stops here with an error; "not needed",
            "not reached": it stands after the one that is taken, or after an unreadable one.
    """

    path: str
    iteration: int | None
    taken: bool
    reason: str
    outcome: Outcome


@dataclass(frozen=True)
class ResumeDecision:
    """The checkpoint from which a run resumes, and its counters.

    Attributes:
        path: the folder that is loaded, for rank folders the file of rank 0; None: nothing is loaded.
        iteration: its iteration; None: it has none, or nothing is loaded.
        fresh: whether the run starts from nothing.
        init_from: the path of `InitFrom`, if the run starts from it; None: it continues a run, or starts from nothing.
        is_verified: whether the checkpoint has checksums.
        restored: the parts that are restored: "weights", "optimizer", "counters", "loss scale", "data position"; of a
            run of a `Checkpointer` also "random streams", and its other objects by the names that `resume` has.
        initial_step: number of completed steps. The next step is this plus 1, and iterations count on from it.
        global_step: number of optimizer steps.
        initial_epoch: epochs that the training loop counts as complete: sinks in sink mode, else passes over the data.
        next_sink: epoch and step, in the current dataset, of the last step of the next sink, which is the first step
            that a log in sink mode shows; None: the sizes are not known.
        next_step: epoch and step, in the current dataset, of the next step; None: its size is not known.
        consumed_samples: samples that training has consumed; None: not known.
        data_skip_steps: steps of data to skip before the first step; 0: the data is read from the start.
        skip_micro_steps: the same in micro-steps, for a growing batch size; None: not used.
        global_batch_size: samples of the next step over all ranks; None: not known.
        loss_scale: the loss scale; None: not recorded.
        total_steps: steps of the learning-rate schedule; None: those of the dataset.
        scaling: how the steps were scaled; None: the batch size is the same, or not known.
        is_resharded: whether another number of ranks saved it; None: not known.
        compatible: whether counters are computed as in MindSpore Transformers, including rounding errors.
        verdicts: the verdict on every candidate, best first.
        reasons: the reasons for the other values, as sentences.
        warnings: warnings, as sentences.
    """

    path: str | None = None
    iteration: int | None = None
    fresh: bool = False
    init_from: str | None = None
    is_verified: bool = False
    restored: tuple[str, ...] = ()
    initial_step: int = 0
    global_step: int = 0
    initial_epoch: int = 0
    next_sink: EpochStep | None = None
    next_step: EpochStep | None = None
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
