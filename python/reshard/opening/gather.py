"""Gathers the facts of a resume decision from disk: the kind of a path, and the content of each candidate.

Candidates are opened as `open` does, best first, until one is accepted. No tensor is read. `resume` decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from reshard.checkpoint import Checkpoint
from reshard.commit import roots
from reshard.commit.scrub import is_damage, reason_of
from reshard.config import split_iteration
from reshard.errors import (
    CheckpointNotFoundError,
    EmptyRootError,
    ReshardError,
    UnsupportedError,
)
from reshard.formats import counter_tensors, health, registry
from reshard.formats.base import OpenOptions
from reshard.formats.newest import MAX_LOOKS
from reshard.layout import ModelLayout
from reshard.opening import open as open_path
from reshard.opening.gather_ranks import gather_saves, saves_root
from reshard.opening.left_saves import LeftSaves
from reshard.opening.what_is_there import what_is_there
from reshard.resume import CandidateFacts, Damaged, Refused, ResumeFacts, RunFacts, Unreadable, evaluate
from reshard.resume.choose import is_settled
from reshard.storage.location import BROKEN_LINK_HINT, Location, locate
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reshard import _core
    from reshard.commit.candidates import Candidate, Order
    from reshard.config import Config
    from reshard.documents.common_info import CommonInfo
    from reshard.formats.base import CheckpointData, Root
    from reshard.resume.facts import Kind


def gather(
    config: Config,
    run: RunFacts | None = None,
    *,
    method: _core.ReadMethod = "auto",
    faults: Mapping[str, str] | None = None,
    opened: dict[str, Checkpoint] | None = None,
    keep_going: bool = False,
) -> ResumeFacts:
    """Gather the facts about the checkpoints that a configuration can load.

    A path that ends in `iteration_<number>` and does not exist is looked up by the number, with any number of digits in
    the folder's name. In a Checkpoint 1.0 tree it is the save with this number of steps.

    Args:
        config: the configuration.
        run: the run that is about to start.
        method: how files are read, as in `reshard.open`.
        faults: damage that was found while loading: the reason by path.
        opened: filled with the accepted checkpoint by its path, left open; None: it is closed. The saves of a
            Checkpoint 1.0 tree are not opened as one checkpoint: `gather_ranks` handles their files.
        keep_going: a candidate that cannot be read becomes an unreadable candidate instead of an error, and the others
            are still examined; for display only.

    Raises:
        StorageError: a file cannot be read. This is not damage, so the checkpoint is not skipped.
        UnsupportedError: a later release wrote the next candidate, or the path is one checkpoint that is not supported.
        CheckpointNotFoundError: the path is a symbolic link whose target does not exist.

    Example:
        >>> from reshard.config import Config
        >>> gather(Config(load_path="not/there", resume=True)).kind
        'absent'
    """
    path = locate(config.load_path)
    facts = ResumeFacts(config.load_path, "absent", run=run or RunFacts())
    gatherer = _Gatherer(config, facts, method, faults or {}, opened, keep_going)
    if not config.load_path:
        return facts
    tree = saves_root(config, facts.run.world_size or 1)
    if tree is not None:
        return gather_saves(config, facts.run, tree, method=method, faults=faults, keep_going=keep_going)
    root, iteration = split_iteration(config.load_path)
    if path.found() is None and iteration is not None:
        numbered = registry.numbered_root(locate(root), iteration, OpenOptions(method))
        if numbered is not None:
            return gatherer.at_root(numbered)
    if path.found() is None:
        # A broken link can mean that a disk is not mounted: the run must not start fresh.
        if (broken := path.broken_link()) is not None:
            raise CheckpointNotFoundError(
                f"{show(str(path))} holds no checkpoint: {broken}", path=str(path), hint=BROKEN_LINK_HINT
            )
        return replace(facts, kind="other") if path.exists() else facts
    name = format_of(config, path)
    found = registry.detect(path) if name is None else registry.of_name(path, name)
    several = found.root(path, OpenOptions(method)) if path.is_folder() else None
    if several is not None and several.in_turn:
        return gatherer.at_root(several)
    kind: Kind = "pretrained" if found.traits.is_pretrained else "single"
    try:
        return gatherer.at_one(path, kind)
    except EmptyRootError:
        return replace(facts, kind="empty")
    except CheckpointNotFoundError as error:
        if error.path not in (None, str(path)):  # a file of the checkpoint is missing
            candidate = CandidateFacts(str(path), iteration, "named by its path", state=Damaged(reason_of(error)))
            return replace(facts, kind=kind, candidates=(candidate,))
        return replace(facts, kind="other", there=what_is_there(path).text)


_WENT_BACK = "skipped by a run that went back"


def gather_both(
    config: Config,
    copies: str | None,
    run: RunFacts | None = None,
    *,
    method: _core.ReadMethod = "auto",
    faults: Mapping[str, str] | None = None,
    opened: dict[str, Checkpoint] | None = None,
) -> ResumeFacts:
    """As `gather`, of a run whose saves are copied into a second root: the candidates of both, the newest first.

    Of a save that is in both roots, that of the first is tried first. One that either root refuses, because a run went
    back behind it, is refused in both.

    Args:
        config: names the first root.
        copies: the second root; None: there is none.
        run: see `gather`, and so are the other arguments.
        method: see `gather`.
        faults: see `gather`.
        opened: see `gather`.

    Raises:
        StorageError, UnsupportedError, CheckpointNotFoundError: as `gather`.

    Example:
        >>> from reshard.config import Config
        >>> gather_both(Config(load_path="not/there", resume=True), "nor/there").kind
        'absent'
    """
    found = {} if opened is None else opened
    own = gather(config, run, method=method, faults=faults, opened=found)
    if copies is not None and own.kind in ("root", "absent", "empty"):
        taken = next((one.iteration for one in evaluate(config, own) if one.taken), None)
        there = roots.list_iterations(locate(copies)) if locate(copies).is_folder() else []
        if there and (taken is None or there[-1][0] > taken):
            of_copies = replace(config, load_path=copies)
            other = gather(of_copies, run, method=method, faults=faults, opened=found)
            if own.kind == other.kind == "root":
                # `gather` opens copies up to the first that can be used: instead of a refused one it opens the next.
                refused = dict(faults or {})
                left = LeftSaves(own, other)
                while new := _refused_of(both := _merged(own, other, left), other) & found.keys() - refused.keys():
                    refused |= dict.fromkeys(new, _WENT_BACK)
                    other = gather(of_copies, run, method=method, faults=refused, opened=found)
                own = both
            else:
                own = other
    chosen = {one.path for one in evaluate(config, own) if one.taken}
    for path in [path for path in found if opened is None or path not in chosen]:
        found.pop(path).close()
    return own


def _refused_of(both: ResumeFacts, other: ResumeFacts) -> set[str]:
    """The paths of the second root that are refused when both are looked at together."""
    refused = {one.path for one in both.candidates if isinstance(one.state, Refused)}
    return refused & {one.path for one in other.candidates}


def _merged(own: ResumeFacts, other: ResumeFacts, left: LeftSaves) -> ResumeFacts:
    """The candidates of two roots of a run in one order."""
    refused = [one for facts in (own, other) for one in facts.candidates if isinstance(one.state, Refused)]

    def tried(facts: ResumeFacts, *, is_own: bool) -> list[CandidateFacts]:
        found = []
        for one in facts.candidates:
            if isinstance(one.state, Refused):
                continue
            if left.holds(one, is_own=is_own):
                refused.append(replace(one, state=Refused(_WENT_BACK)))
            else:
                found.append(one)
        return found

    first, second = tried(own, is_own=True), tried(other, is_own=False)
    candidates: list[CandidateFacts] = []
    while first and second:
        is_first = (first[0].iteration or 0) >= (second[0].iteration or 0)
        candidates.append((first if is_first else second).pop(0))
    warnings = (*own.warnings, *other.warnings, *left.warnings)
    return replace(own, candidates=(*candidates, *first, *second, *refused), warnings=warnings)


def format_of(config: Config, path: Location) -> str | None:
    """The format in which a path is opened that is no root: what the run asks for; None: the first that matches.

    A folder of `transformers.Trainer` is a model with the state of a run. It is opened as a run where one is resumed.

    Args:
        config: what is to be loaded.
        path: an existing path.

    Raises:
        StorageError: the path cannot be listed.

    Example:
        >>> from reshard.config import Config
        >>> format_of(Config("."), locate(".")) is None
        True
    """
    if config.init_from is not None:
        return config.init_from.format
    run = registry.run_beside_model(path) if config.resume else None
    return None if run is None else run.traits.name


@dataclass(frozen=True)
class _Gatherer:
    """Gathers the facts of one path."""

    config: Config
    facts: ResumeFacts
    method: _core.ReadMethod
    faults: Mapping[str, str]
    opened: dict[str, Checkpoint] | None
    keep_going: bool

    def at_one(self, path: Location, kind: Kind) -> ResumeFacts:
        """The facts of a path that is not a root."""
        found = self._candidate(path, None, "named by its path", kind)
        if found.common is not None:
            kind = "single"
        return replace(self.facts, kind=kind, candidates=(found,))

    def at_root(self, root: Root) -> ResumeFacts:
        """The facts of a root. Candidates are opened in order until one is accepted."""
        before: Order | None = None
        facts = replace(self.facts, path=str(root.path), kind="root")
        for number in range(MAX_LOOKS):
            root = root.again() if number else root  # a save may have ended, and retention deleted iterations
            with root:
                order = root.order
                if order == before:
                    break
                before = order
                warnings = (*order.warnings, *root.ignored())
                found: list[CandidateFacts] = []
                refused = tuple(replace(_unopened(root, one), state=Refused(one.reason)) for one in order.refused)
                for n, one in enumerate(order.candidates):
                    opening = partial(root.open, one)
                    found.append(self._candidate(root.place(one), one.iteration, one.reason, "root", opening))
                    facts = replace(facts, candidates=tuple(found), warnings=warnings)
                    if is_settled(evaluate(self.config, facts)):
                        older = tuple(_unopened(root, one) for one in order.candidates[n + 1 :])
                        return replace(facts, candidates=(*found, *older, *refused))
            facts = replace(facts, candidates=(*found, *refused), warnings=warnings)
        return facts

    def _candidate(
        self,
        path: Location,
        iteration: int | None,
        why: str,
        kind: Kind,
        opening: Callable[[], CheckpointData] | None = None,
    ) -> CandidateFacts:
        """The content of a candidate, or its fault. `opening` opens it; None: `open` does."""
        if str(path) in self.faults:
            number = split_iteration(str(path))[1] if iteration is None else iteration
            return CandidateFacts(str(path), number, why, state=Damaged(self.faults[str(path)]))
        try:
            name = None if kind == "root" else format_of(self.config, path)
            checkpoint = open_path(path, method=self.method, format=name) if opening is None else Checkpoint(opening())
            checkpoint.common = checkpoint.data.read_common()
        except ReshardError as error:
            number = split_iteration(str(path))[1] if iteration is None else iteration
            if not is_damage(error) and self.keep_going:
                return CandidateFacts(str(path), number, why, state=Unreadable(reason_of(error)))
            # A path that is one checkpoint has no older one to fall back to: its own error says what to do.
            stops = CheckpointNotFoundError if self.keep_going else (CheckpointNotFoundError, UnsupportedError)
            if not is_damage(error) or (kind != "root" and isinstance(error, stops)):
                raise
            return CandidateFacts(str(path), number, why, state=Damaged(reason_of(error)))
        common, manifest, unhealthy = checkpoint.common, checkpoint.manifest, None
        if common is not None and manifest is not None and manifest.ckpt_status is not None:
            common = replace(common, ckpt_status=manifest.ckpt_status)  # which covers the values, too
        if common is not None and common.ckpt_status == 1 and manifest is not None and kind == "root":
            found = health.unhealthy(path.parent, manifest.iteration)
            unhealthy = None if found is None else str(found)
        facts = CandidateFacts(
            str(path),
            checkpoint.iteration if iteration is None else iteration,
            why,
            is_verified=checkpoint.verified or checkpoint.data.traits.has_sums,
            common=common,
            unhealthy=unhealthy,
            has_optimizer=bool(checkpoint.keys("optimizer")),
            world_size=_world_size(checkpoint),
            is_legacy=checkpoint.data.traits.counters_as_tensors,
            counters=checkpoint.data.traits.counters,
        )
        if kind == "single" and not path.is_folder() and checkpoint.common is None:
            # The file of one rank of Checkpoint 1.0.
            try:
                checkpoint.common = _counters_of(checkpoint)
            except ReshardError as error:
                if not is_damage(error):
                    raise
                return replace(facts, state=Damaged(reason_of(error)))
            is_legacy = checkpoint.common is not None
            has_optimizer = counter_tensors.holds_optimizer(checkpoint) if is_legacy else facts.has_optimizer
            facts = replace(facts, common=checkpoint.common, is_legacy=is_legacy, has_optimizer=has_optimizer)
        if facts.common is not None and kind == "pretrained":
            kind = "single"
        is_accepted = evaluate(self.config, replace(self.facts, kind=kind, candidates=(facts,)))[0].taken
        if self.opened is not None and is_accepted:
            self.opened[str(path)] = checkpoint
        else:
            checkpoint.close()
        return facts


def _counters_of(checkpoint: Checkpoint) -> CommonInfo | None:
    """The counters that a file stores as tensors; None if it has none.

    Raises:
        DamagedFileError: a counter has an invalid value.
        StorageError: the file cannot be read.
    """
    names = [name for name in counter_tensors.NAMES if name in checkpoint]
    path = str(checkpoint.path)
    for name in names:
        counter_tensors.check_shape(name, checkpoint.shape(name), path)  # before it is read: it can be of any size
    return counter_tensors.common_of(checkpoint.load(keys=names, threads=1), path) if names else None


def _unopened(root: Root, one: Candidate) -> CandidateFacts:
    return CandidateFacts(str(root.place(one)), one.iteration, one.reason)


def _world_size(checkpoint: Checkpoint) -> int | None:
    """The number of ranks that saved it, as it is recorded, else from the mesh of its layout, or None."""
    known = checkpoint.data.world_size()
    if known is not None:
        return known
    try:
        return math.prod(ModelLayout.like(checkpoint).mesh.values())
    except ReshardError:
        return None
