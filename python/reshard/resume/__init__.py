"""What a restarted run goes on from: pure decisions, facts in and a decision out. No disk, no clock, no environment.

In reading order: `resolve` (in which order checkpoints are tried; of Checkpoint 1.0 `checkpoint1`), `facts` (what goes
into a decision and what comes out), `decision` (the one function), `choose` (which checkpoint is taken), `restore`
(what follows from it), `counters` (the arithmetic of steps, epochs and samples).
"""

from __future__ import annotations

from reshard.formats.checkpoint2.candidates import Candidate, Folder, Order, order
from reshard.resume.choose import evaluate
from reshard.resume.counters import BatchSchedule, EpochStep, Scaling
from reshard.resume.decision import decide
from reshard.resume.facts import CandidateFacts, RankFolderFacts, ResumeDecision, ResumeFacts, RunFacts, Verdict

__all__ = [
    "BatchSchedule",
    "Candidate",
    "CandidateFacts",
    "EpochStep",
    "Folder",
    "Order",
    "RankFolderFacts",
    "ResumeDecision",
    "ResumeFacts",
    "RunFacts",
    "Scaling",
    "Verdict",
    "decide",
    "evaluate",
    "order",
]
