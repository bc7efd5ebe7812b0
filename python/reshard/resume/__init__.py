"""The resume decision: which checkpoint a restarted run loads, and with which counters. Pure functions of facts.

In reading order: `facts` (inputs and result of a decision), `decision` (the entry point), `choose` (which checkpoint is
taken), `restore` (the counters that follow), `counters` (arithmetic of steps, epochs and samples). Nothing here reads
the disk, the clock or the environment.
"""

from __future__ import annotations

from reshard.commit.candidates import Candidate, Folder, Order, order
from reshard.resume.choose import evaluate
from reshard.resume.counters import BatchSchedule, EpochStep, Scaling
from reshard.resume.decision import decide
from reshard.resume.facts import (
    CandidateFacts,
    Complete,
    Damaged,
    RankFolderFacts,
    Refused,
    ResumeDecision,
    ResumeFacts,
    RunFacts,
    Unreadable,
    Verdict,
)

__all__ = [
    "BatchSchedule",
    "Candidate",
    "CandidateFacts",
    "Complete",
    "Damaged",
    "EpochStep",
    "Folder",
    "Order",
    "RankFolderFacts",
    "Refused",
    "ResumeDecision",
    "ResumeFacts",
    "RunFacts",
    "Scaling",
    "Unreadable",
    "Verdict",
    "decide",
    "evaluate",
    "order",
]
