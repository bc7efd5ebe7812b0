"""What is on disk, as the facts of a decision: the kind of a path, and what each candidate holds.

Candidates are opened as `open` does, best first, until one is taken; nothing is decided here, and no tensor is read.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.config import split_iteration
from reshard.errors import CheckpointNotFoundError, EmptyRootError, ReshardError
from reshard.formats import checkpoint2, huggingface
from reshard.layout import ModelLayout
from reshard.opening import open as open_path
from reshard.opening.folder import open_folder
from reshard.opening.root import is_damage, order_of, reason_of
from reshard.resume import CandidateFacts, Facts, RunFacts, weigh

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.checkpoint import Checkpoint
    from reshard.config import Config
    from reshard.resume import Candidate, Order

__all__ = ["gather"]


def gather(config: Config, run: RunFacts | None = None, *, passed_over: Mapping[str, str] | None = None) -> Facts:
    """Look at what a configuration wants to load.

    A path that ends in `iteration_<number>` and is not there itself is looked for by its number, whatever the digits
    of the folder's name.

    Args:
        config: what is to be loaded, and what is asked of it.
        run: the run that is about to start.
        passed_over: folders of the root that have proven damaged already, while they were loaded, with the reason.

    Raises:
        StorageError: something cannot be looked at; that is nobody's fault, and no reason to pass a checkpoint over.
        UnsupportedError: a later release wrote the candidate whose turn it is.

    Example:
        >>> from reshard.config import Config
        >>> gather(Config(load_path="not/there", resume=True)).kind
        'absent'
    """
    path = Path(config.load_path)
    facts = Facts(config.load_path, "absent", run=run or RunFacts())
    if not config.load_path:
        return facts
    root, iteration = split_iteration(config.load_path)
    if not path.exists() and iteration is not None and Path(root).is_dir() and checkpoint2.is_root(root):
        return _of_root(config, replace(facts, path=root), order_of(root, exact=iteration), passed_over or {})
    if not path.exists():
        # A link that leads nowhere was meant to lead somewhere: a disk that is not mounted is no reason to start fresh.
        return replace(facts, kind="other") if path.is_symlink() else facts
    if path.is_dir() and huggingface.detect(path):
        return replace(facts, kind="huggingface", candidates=(_opened(path, None),))
    if path.is_dir() and checkpoint2.is_root(path):
        return _of_root(config, facts, order_of(path), passed_over or {})
    try:
        open_path(path).close()
    except EmptyRootError:
        return replace(facts, kind="empty")
    except CheckpointNotFoundError:
        return replace(facts, kind="other")
    except ReshardError:
        pass  # told below, as the fault of what is there
    return replace(facts, kind="single", candidates=(_opened(path, iteration),))


def _of_root(config: Config, facts: Facts, order: Order, passed_over: Mapping[str, str]) -> Facts:
    facts = replace(facts, kind="root", warnings=order.warnings)
    found: list[CandidateFacts] = []
    for n, one in enumerate(order.candidates):
        if one.name in passed_over:
            found.append(replace(_unopened(facts, one), fault=passed_over[one.name]))
            continue
        found.append(_opened(Path(facts.path) / one.name, one.iteration, one.reason))
        if any(verdict.taken for verdict in weigh(config, replace(facts, candidates=tuple(found)))):
            found += [_unopened(facts, older) for older in order.candidates[n + 1 :]]
            break
    found += [replace(_unopened(facts, one), refusal=one.reason) for one in order.refused]
    return replace(facts, candidates=tuple(found))


def _unopened(facts: Facts, one: Candidate) -> CandidateFacts:
    return CandidateFacts(str(Path(facts.path) / one.name), one.iteration, one.reason)


def _opened(path: Path, iteration: int | None, why: str = "given by itself") -> CandidateFacts:
    """What a candidate holds, or its fault."""
    try:
        with open_path(path) if iteration is None else open_folder(path, "auto", iteration) as checkpoint:
            return CandidateFacts(
                str(path),
                checkpoint.iteration if iteration is None else iteration,
                why,
                is_verified=checkpoint.manifest is not None,
                common=checkpoint.common,
                has_optimizer=bool(checkpoint.keys("optimizer")),
                world_size=_world_size(checkpoint),
            )
    except ReshardError as error:
        if not is_damage(error):
            raise
        return CandidateFacts(str(path), iteration, why, fault=reason_of(error))


def _world_size(checkpoint: Checkpoint) -> int | None:
    """How many ranks saved it: as the manifest says, else as many as the mesh of its layout has, if it is one."""
    if checkpoint.manifest is not None:
        return checkpoint.manifest.world_size
    try:
        return math.prod(ModelLayout.like(checkpoint).mesh.values())
    except ReshardError:
        return None
