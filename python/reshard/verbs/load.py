"""Resuming: all ranks load the newest checkpoint that proves whole while it is loaded, or none starts.

Rank 0 looks at the root and decides; the others are told which manifest, by its digest, and open the very same. Of a
Checkpoint 1.0 tree, which has no manifest and need not lie on a shared disk, every rank looks at its own folder, and
what all have whole is taken. Each loads its part, comparing what it touches. Damage on any rank passes the iteration
over on all of them, and the next older one is taken; why is told in the decision. What is nobody's damage, a layout
that does not fit or memory that runs out, is raised on all ranks. The damaged checkpoint is left as it is.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from reshard import opening
from reshard.arguments import check as check_arguments
from reshard.arguments import check_given
from reshard.checkpoint import Checkpoint
from reshard.collective import Collective, capture
from reshard.config import Config, as_config, split_iteration
from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    ConfigError,
    CoverageError,
    DamagedFileError,
    MismatchError,
    ReshardError,
    StorageError,
)
from reshard.formats import manifest as manifests
from reshard.formats import proofs, registry
from reshard.formats.checkpoint1.reader import open_rank_files, strategy_for
from reshard.formats.checkpoint2 import names as checkpoint2
from reshard.formats.checkpoint2.names import CommonInfo
from reshard.formats.scrub import scrub_plain
from reshard.group import resolve, session
from reshard.layout import ModelLayout
from reshard.opening.gather import gather
from reshard.opening.gather_ranks import SavesRoot, gather_saves, is_deduplicated, open_own, path_of, saves_root
from reshard.resume import CandidateFacts, Facts, ResumeDecision, RunFacts, decide
from reshard.storage import protocol
from reshard.storage.location import Location, locate
from reshard.verbs.pending_load import PendingLoad
from reshard.words import show
from reshard.write import pending_rollback

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    import numpy as np

    from reshard import _core
    from reshard.checkpoint import LayoutLike, Part, Verify
    from reshard.config import ConfigLike
    from reshard.formats.base import StrategyLike

__all__ = ["Loaded", "load", "load_async", "load_with"]

_log = logging.getLogger("reshard")

_SIGHT_SECONDS = 30.0  # for which a file system may show another rank something older
_FIRST_SLEEP_S, _LAST_SLEEP_S = 0.01, 1.0

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Loaded:
    """What a run goes on from.

    Attributes:
        iteration: the iteration that was loaded, or None.
        state: `{key: array}`, what `Checkpoint.load` returns; empty if the run starts fresh.
        common: the content of common.json, or None.
        extra: the state that was saved beside the tensors, by name, with this rank's own values.
        decision: which checkpoint was taken and which were passed over, and the counters that follow.
    """

    iteration: int | None
    state: dict[str, np.ndarray]
    common: CommonInfo | None
    extra: dict[str, Any]
    decision: ResumeDecision


def load(
    root: str | os.PathLike[str] | None = None,
    layout: LayoutLike | None = None,
    rank: int | None = None,
    *,
    strategy: StrategyLike | None = None,
    group: object = None,
    verify: Verify = "touched",
    config: ConfigLike | None = None,
    run: RunFacts | None = None,
    iteration: int | None = None,
    compatible: bool = False,
    allow_fresh: bool = False,
    part: Part | None = None,
    keys: Collection[str] | None = None,
    out: Mapping[str, np.ndarray] | None = None,
    dtype: object = None,
    copy: bool = True,
    method: _core.ReadMethod = "auto",
    threads: int | None = None,
    progress: _core.Progress | None = None,
    timeout: float = 1800.0,
) -> Loaded:
    """Load what a run goes on from: the last complete checkpoint of a root that proves whole while it is loaded.

    All ranks of the group call this, with the same options but for what each wants loaded, and all load the same
    iteration. If it is not the newest, the first save afterwards records which ones were passed over.

    Args:
        root: a checkpoint root. One of its iteration folders names its iteration: damage is then an error. None: what
            the configuration loads.
        layout: a `ModelLayout`, a layout file, its mapping, or a strategy file or folder. None: whole tensors, but of
            a Hugging Face folder what the `parallel_config` of the configuration cuts, as its `pretrained_model_dir`
            says what the model is.
        rank: the rank in the layout whose arrays are wanted; None: this process's rank in the group.
        strategy: how the ranks of a Checkpoint 1.0 tree cut its tensors: a strategy file or a folder of them. None: the
            folder `strategy` in the tree or beside it. With neither strategy nor layout a rank gets what its own file
            holds, and needs to see no other.
        group: a process group of torch, or any object with `rank`, `world_size`, `barrier`, `gather`, `broadcast`.
            None: torch's default group if there is one, else this process alone.
        verify: "touched" compares every 256 KiB that is read with its sum, "full" first all files, shared out over the
            ranks; "structure" only sizes and headers.
        config: a configuration in the original's words: a `Config`, a YAML file or a mapping. None: resume from `root`.
        run: what is known of the run that starts, such as its batch size.
        iteration: load this one and no other.
        compatible: compute the counters as MindSpore Transformers does, rounding errors included.
        allow_fresh: start from nothing if there are checkpoints and none is whole.
        part: "model", "optimizer" or "all"; default "all", or "model" if the configuration does not resume.
        keys: only these tensors.
        out: arrays that are filled instead of new ones, as in `Checkpoint.load`.
        dtype: cast the floating-point tensors to this dtype.
        copy: False gives copy-on-write views where possible, as in `Checkpoint.load`.
        method: "map" maps the files, "read" reads them piece by piece, "auto" decides by the file system.
        threads: threads of the copy.
        progress: called as `progress(done_bytes, total_bytes)` with this rank's bytes; anew for each attempt.
        timeout: seconds that a rank waits for the others; the time to load is part of it.

    Returns:
        What was loaded. An empty or absent root is a fresh start: `decision.fresh`, and no state.

    Raises:
        DamagedFileError: there are checkpoints and none is whole; each is named with its fault.
        CheckpointNotFoundError: what is there is no checkpoint.
        ArgumentError, LayoutError, MismatchError, KeyNotFoundError, UnsupportedError: what is wanted of the checkpoint
            cannot be had.
        GroupError: a rank did not answer in time.
        StorageError: the system failed otherwise than by damage, such as for want of memory or permission.

    Example:
        >>> import numpy as np, reshard
        >>> _ = reshard.save("run", 100, {"w": np.arange(6.0).reshape(2, 3)})
        >>> got = reshard.load("run")
        >>> got.iteration, got.state["w"].shape, got.decision.fresh
        (100, (2, 3), False)
    """
    check_given(timeout=timeout)
    check_arguments(root=root)
    members = resolve(group)
    # In a world of one a layout of several ranks is somebody else's: which of them is meant has to be said.
    own = members.rank if rank is None and members.world_size > 1 else rank

    def check() -> None:
        check_arguments(
            layout=layout,
            rank=rank,
            strategy=strategy,
            config=config,
            run=run,
            iteration=iteration,
            compatible=compatible,
            allow_fresh=allow_fresh,
            part=part,
            keys=keys,
            out=out,
            copy=copy,
            threads=threads,
            progress=progress,
        )
        check_given(verify=verify, method=method)
        if members.world_size > 1:
            resolve(group, rank)

    def read(checkpoint: Checkpoint, decision: ResumeDecision) -> Loaded:
        cut = layout
        if cut is None and config is not None and checkpoint.data.traits.is_pretrained:
            cut = _layout_of(as_config(config), rank, members.world_size)
        state = checkpoint.load(
            cut,
            None if cut is None else own,
            part=part or ("model" if decision.restored == ("weights",) else "all"),
            keys=keys,
            out=out,
            dtype=dtype,
            copy=copy,
            verify="touched" if verify == "full" else verify,
            threads=threads,
            progress=progress,
        )
        return Loaded(checkpoint.iteration, state, checkpoint.common, checkpoint.extra(rank=own or 0), decision)

    decision, loaded = load_with(
        read,
        root,
        strategy=strategy,
        own_file=own if layout is None and strategy is None else None,
        group=members,
        check=check,
        scrub=isinstance(verify, str) and verify == "full",
        config=config,
        run=run,
        iteration=iteration,
        compatible=compatible,
        allow_fresh=allow_fresh,
        method=method,
        threads=threads,
        timeout=timeout,
    )
    return Loaded(None, {}, None, {}, decision) if loaded is None else loaded


def _nothing() -> None:
    """What there is to check where nothing can be wrong."""


def load_with(
    read: Callable[[Checkpoint, ResumeDecision], T],
    root: str | os.PathLike[str] | None = None,
    *,
    strategy: StrategyLike | None = None,
    own_file: int | None = None,
    group: object = None,
    check: Callable[[], None] = _nothing,
    scrub: bool = False,
    config: ConfigLike | None = None,
    run: RunFacts | None = None,
    iteration: int | None = None,
    compatible: bool = False,
    allow_fresh: bool = False,
    method: _core.ReadMethod = "auto",
    threads: int | None = None,
    timeout: float = 1800.0,
) -> tuple[ResumeDecision, T | None]:
    """What `load` is made of: `read` takes what it wants of the checkpoint that is chosen, or of the next best.

    Args:
        read: called with the open checkpoint and the decision, for one after the other until no rank finds damage. What
            it returned of a damaged one is thrown away.
        root: as in `load`, and so are the other arguments.
        strategy: see `load`.
        own_file: of a Checkpoint 1.0 tree this rank's own file alone is opened, as it is; None: all files, as one.
        group: all its ranks call this.
        check: called first; what it raises is raised on all ranks.
        scrub: compare all files with their sums first, shared out over the ranks.
        config: see `load`.
        run: see `load`.
        iteration: see `load`.
        compatible: see `load`.
        allow_fresh: see `load`.
        method: see `load`.
        threads: see `load`.
        timeout: see `load`.

    Returns:
        The decision, and what `read` returned; None for a fresh start.

    Raises:
        ReshardError: as `load`, and what `read` raises on any rank.

    Example:
        >>> import numpy as np, reshard
        >>> _ = reshard.save("with", 100, {"w": np.arange(6.0)})
        >>> decision, keys = load_with(lambda checkpoint, _: checkpoint.keys(), "with")
        >>> decision.iteration, keys
        (100, ['w'])
    """
    members = resolve(group)
    ranks = Collective(session(members, "load"), timeout)

    def prepare() -> _Terms:
        check()
        known = run or RunFacts()
        if known.world_size is None:
            known = replace(known, world_size=members.world_size)
        asked, cut, own = _asked(root, config, iteration), strategy, own_file
        if asked.auto_trans:
            cut, own = strategy or asked.strategy or None, None
        return _Terms(asked, known, compatible, allow_fresh, method, cut, own)

    states: dict[str, str] = {}  # of folders, before their contents were read

    def read_from(checkpoint: Checkpoint, decision: ResumeDecision) -> T:
        with checkpoint:
            if scrub:
                if checkpoint.manifest is not None and members.rank == 0:
                    with contextlib.suppress(StorageError):  # then it is not recorded
                        states[str(decision.path)] = proofs.state_of(checkpoint.data.path, checkpoint.manifest)
                checkpoint.scrub((members.rank, members.world_size), threads=threads)
            return read(checkpoint, decision)

    terms, faults = capture(prepare), dict[str, str]()
    while True:
        decision, open_it = _choose(ranks, terms, faults)
        if decision.path is None:
            return decision, None
        loaded = capture(lambda: read_from(open_it(), decision))  # noqa: B023  done before the next round
        damage = _damage_of(loaded) if isinstance(loaded, ReshardError) else None
        told = ranks.share(damage or (loaded if isinstance(loaded, BaseException) else None))
        found = [(number, reason) for number, reason in enumerate(told) if reason is not None]
        if not found:
            assert not isinstance(loaded, BaseException)
            if decision.path in states:
                _record(locate(decision.path), states[decision.path])
            _note(locate(decision.path))
            return decision, loaded
        del loaded  # its memory is needed for the next
        number, reason = found[0]
        faults[decision.path] = reason if members.world_size == 1 else f"rank {number}: {reason}"
        _log.warning("%s passed over: %s", decision.path, faults[decision.path])


def _asked(root: str | os.PathLike[str] | None, config: ConfigLike | None, iteration: int | None) -> Config:
    """What is to be loaded, in the words of a configuration."""
    asked = Config(resume=True) if config is None else as_config(config)
    if not asked.load_path and not asked.resume and asked.model_path and _is_pretrained(asked.model_path):
        asked = replace(asked, load_path=asked.model_path)
    if root is not None:
        asked = replace(asked, load_path=os.fspath(root))
    elif config is None:
        raise ArgumentError("`load` needs `root`, or a `config` that says what is loaded")
    if iteration is None:
        return asked
    folder, number = split_iteration(asked.load_path)
    if number is not None:
        raise ArgumentError(f"`iteration` is {iteration}, and {asked.load_path} names one already")
    return replace(asked, load_path=str(locate(folder) / checkpoint2.iteration_folder_name(iteration)))


def _is_pretrained(path: str) -> bool:
    """Whether there is a model to start from, such as a Hugging Face folder."""
    location = locate(path)
    return location.found() is not None and registry.detect(location).traits.is_pretrained


def _layout_of(config: Config, rank: int | None, world_size: int) -> ModelLayout | None:
    """How the run of a configuration cuts a Hugging Face model: as its family is cut, over the mesh that is told."""
    if not (config.use_parallel and config.model_path):
        return None
    n_ranks = math.prod(config.mesh.values())
    if rank is None and n_ranks != world_size:
        raise ConfigError(
            f"parallel_config divides the model over {n_ranks} ranks, and this is one of {world_size}",
            hint="start as many, or give `layout=` and `rank=`",
        )
    return ModelLayout.preset(config.model_path, **config.mesh)


# -- together


@dataclass(frozen=True)
class _Terms:
    """What is chosen by."""

    config: Config
    run: RunFacts
    compatible: bool
    allow_fresh: bool
    method: _core.ReadMethod
    strategy: StrategyLike | None
    own_file: int | None


def _choose(
    ranks: Collective, terms: _Terms | BaseException, faults: Mapping[str, str]
) -> tuple[ResumeDecision, Callable[[], Checkpoint]]:
    """The same decision on all ranks, and how this one opens what it names.

    Args:
        ranks: all of them call this.
        terms: what is asked for, or why this rank cannot say.
        faults: folders that have proven damaged while they were loaded, with the reason.
    """
    opened: dict[str, Checkpoint] = {}

    def look(terms: _Terms) -> list[Any]:
        tree = saves_root(terms.config, ranks.world_size)
        if tree is not None:
            return [None, asdict(tree)]
        facts = gather(terms.config, terms.run, method=terms.method, faults=faults, opened=opened)
        path = _decide(terms, facts).path
        chosen = None if path is None else opening.chosen(opened[path])
        return [asdict(facts), None if chosen is None else chosen.to_value()]

    outcome: object = terms if isinstance(terms, BaseException) else None
    if ranks.rank == 0 and not isinstance(terms, BaseException):
        outcome = capture(lambda: look(terms))
    value, chosen = ranks.share(outcome)[0]
    assert isinstance(terms, _Terms)
    if value is None:
        # A host may have its ranks' folders under a path of its own.
        tree = capture(lambda: saves_root(terms.config, ranks.world_size) or SavesRoot(**chosen))
        ranks.share(tree if isinstance(tree, BaseException) else None)
        assert isinstance(tree, SavesRoot)
        return _choose_save(ranks, terms, tree, faults)
    decision = _decide(terms, _facts(value))
    path = str(decision.path)
    if path in opened:
        return decision, lambda: opened[path]
    if chosen is None:
        return decision, lambda: opening.open(path, method=terms.method)
    return decision, lambda: _open_same(
        opening.Chosen.from_value(chosen), terms.method, min(_SIGHT_SECONDS, ranks.timeout / 2)
    )


def _choose_save(
    ranks: Collective, terms: _Terms, tree: SavesRoot, faults: Mapping[str, str]
) -> tuple[ResumeDecision, Callable[[], Checkpoint]]:
    """As `_choose`, of the saves of rank folders: all ranks look, and each may see its own folder alone."""
    facts = gather_saves(terms.config, terms.run, tree, ranks=ranks, method=terms.method, faults=faults)
    decision = _decide(terms, facts)
    n_ranks = next((one.world_size or 0 for one in facts.candidates if one.path == decision.path), 0)
    return decision, lambda: _open_save(terms, tree.path, locate(str(decision.path)).name, n_ranks, ranks.world_size)


def _open_save(terms: _Terms, root: str, save: str, n_ranks: int, world_size: int) -> Checkpoint:
    """The files of a save as one checkpoint, or one rank's own file alone."""
    own = terms.own_file
    if own is None:
        files = {rank: path_of(root, save, rank) for rank in range(n_ranks)}
        return Checkpoint(
            open_rank_files(locate(root), files, strategy_for(locate(root), terms.strategy), terms.method)
        )
    if not own < n_ranks or world_size not in (1, n_ranks):
        raise MismatchError(
            f"{show(root)} was saved by {n_ranks} ranks, and this is rank {own} of {world_size}: its own file is not "
            "what it needs",
            path=root,
            hint="give `layout=`, what this run holds, and `strategy=`, how the saved one was cut",
        )
    checkpoint = open_own(path_of(root, save, own), terms.method)
    if is_deduplicated(checkpoint, default=terms.config.dedup):
        checkpoint.close()
        raise MismatchError(
            f"{show(root)} was saved without replicas: the own file of rank {own} lacks what other ranks wrote for it",
            path=root,
            hint="give `strategy=`, how it was cut, and as `layout=` the same or what this run holds",
        )
    return checkpoint


def _decide(terms: _Terms, facts: Facts) -> ResumeDecision:
    return decide(terms.config, facts, compatible=terms.compatible, allow_fresh=terms.allow_fresh)


def _facts(value: dict[str, Any]) -> Facts:
    """Facts that came as JSON."""
    candidates = []
    for one in value["candidates"]:
        common = one["common"]
        if common is not None:
            common = CommonInfo(**{**common, "unknown": tuple(common["unknown"])})
        candidates.append(CandidateFacts(**{**one, "common": common, "rank_faults": ()}))
    run, warnings = RunFacts(**value["run"]), tuple(value["warnings"])
    return Facts(**{**value, "candidates": tuple(candidates), "run": run, "warnings": warnings, "ranks": ()})


def _open_same(chosen: opening.Chosen, method: _core.ReadMethod, patience_s: float) -> Checkpoint:
    """Open what rank 0 has chosen, once this host sees the same: a network file system may show it later."""
    deadline, sleep_s = time.monotonic() + patience_s, _FIRST_SLEEP_S
    while True:
        try:
            return Checkpoint(opening.open_chosen(chosen, method=method))
        except (CheckpointNotFoundError, MismatchError) as error:
            if time.monotonic() > deadline:
                raise MismatchError(
                    f"this rank does not see the checkpoint that rank 0 has chosen: {error.message}",
                    path=chosen.folder,
                    hint="is the checkpoint root on a file system that all hosts share?",
                ) from None
        time.sleep(sleep_s)
        sleep_s = min(2 * sleep_s, _LAST_SLEEP_S)


def _damage_of(error: ReshardError) -> str | None:
    """Why a checkpoint is no good, if that is what an error says."""
    is_about_files = isinstance(error, DamagedFileError | CoverageError | CheckpointNotFoundError | StorageError)
    return opening.reason_of(error) if is_about_files and opening.is_damage(error) else None


def _record(path: Location, state: str) -> None:
    """Record for retention that all shard files of an iteration were read and are right, if the other files are."""
    if checkpoint2.parse_iteration_folder(path.name) is None:
        return
    try:
        manifest = manifests.read(path)
        if not scrub_plain(path, manifest):
            proofs.write(path, manifest, state, None)
    except ReshardError as error:
        _log.info("that %s was verified is not recorded: %s", path, error.message)


def _note(path: Location) -> None:
    """Remember which newer iterations were passed over: the first save after this load records it."""
    number = checkpoint2.parse_iteration_folder(path.name)
    if number is not None and checkpoint2.is_root(path.parent):
        pass_over(path.parent, number)


def pass_over(root: str | os.PathLike[str], number: int) -> None:
    """Go on from an iteration of a root on purpose: the first save records which newer ones are passed over.

    Args:
        root: the checkpoint root.
        number: the iteration; -1: all are passed over.

    Example:
        >>> pass_over("no/such/root", 400)
    """
    root = locate(root)
    newer = opening.newer_than(root, number) if root.is_folder() else ()
    if newer:
        pending_rollback.record(root, number, newer)
        # What is saved from here on is another line of saves, told from what was passed over by its epoch.
        protocol.release(root)
    else:
        pending_rollback.forget(root)


# -- in the background


def _in_background(function: Callable[P, Loaded]) -> Callable[P, PendingLoad[Loaded]]:
    def start(*args: P.args, **kwargs: P.kwargs) -> PendingLoad[Loaded]:
        """Begin to load in the background: as `load`, and `result()` gives what it returns.

        Example:
            >>> pending = load_async("output/checkpoint", layout)  # doctest: +SKIP
            >>> got = pending.result()  # doctest: +SKIP
        """
        return PendingLoad(lambda: function(*args, **kwargs))

    return start


load_async = _in_background(load)
