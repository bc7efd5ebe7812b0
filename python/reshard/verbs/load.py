"""Resuming: all ranks load the newest checkpoint in which no rank finds damage, or all raise an error.

Rank 0 reads the root and decides. The others receive the digest of the manifest and open the same checkpoint. A
Checkpoint 1.0 tree has no manifest and need not be on a shared disk: every rank reads its own folder, and the newest
save that is complete on all ranks is selected. Each rank loads its shards and compares the bytes that it reads with
checksums. Damage on any rank makes all of them skip the iteration and select the next older one; the decision names the
reason. Other errors, such as a layout that does not match or too little memory, are raised on all ranks. The damaged
checkpoint is not changed.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from reshard import opening
from reshard.checkpoint import Checkpoint
from reshard.commit import manifest as manifests
from reshard.commit import proofs, protocol, roots
from reshard.commit.scrub import scrub_plain
from reshard.commit.session import PassedOver, find_session, session_of
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
from reshard.formats import registry
from reshard.formats.base import OpenOptions
from reshard.formats.left_out import LeftOut
from reshard.formats.rank_saves import SavesRoot
from reshard.layout import ModelLayout, as_layout
from reshard.opening.gather import format_of, gather_both
from reshard.opening.gather_ranks import gather_saves, saves_root
from reshard.options import Reading, Verify, explains_moved
from reshard.ranks.collective import Collective, capture
from reshard.ranks.group import log_of_all, resolve, session
from reshard.ranks.said_once import held_back, release
from reshard.resume import ResumeDecision, ResumeFacts, RunFacts, decide
from reshard.storage.location import Location, locate
from reshard.values.argument_types import GroupLike, Part, Progress, ReadMethod, Seconds
from reshard.values.arguments import check as check_arguments
from reshard.values.events import Observers, OnEvent
from reshard.values.fetched import fetched_so_far
from reshard.values.words import show
from reshard.verbs.pending_load import PendingLoad

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    import numpy as np

    from reshard.checkpoint import LayoutLike
    from reshard.config import ConfigLike
    from reshard.documents.common_info import CommonInfo
    from reshard.formats.base import StrategyLike
    from reshard.options import VerifyLike

_log = logging.getLogger("reshard")

_VISIBLE_SECONDS = 30.0  # seconds for which a network file system may show older content to another rank
_FIRST_SLEEP_S, _LAST_SLEEP_S = 0.01, 1.0

_MAX_REPLACED = 3  # times that an iteration which is saved again meanwhile is read

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Loaded:
    """The state that a run resumes from.

    Attributes:
        iteration: the iteration that was loaded, or None.
        state: `{key: array}`, as returned by `Checkpoint.load`; empty if the run starts fresh.
        common: the content of common.json, or None.
        extra: the state that was saved beside the tensors, by name, with this rank's rank-local values.
        decision: which checkpoint was selected and which were skipped, and the counters that follow.
    """

    iteration: int | None
    state: dict[str, np.ndarray]
    common: CommonInfo | None
    extra: dict[str, Any]
    decision: ResumeDecision


@explains_moved
def load(
    root: str | os.PathLike[str] | None = None,
    layout: LayoutLike | None = None,
    rank: int | None = None,
    *,
    config: ConfigLike | None = None,
    iteration: int | None = None,
    strategy: StrategyLike | None = None,
    part: Part | None = None,
    keys: Collection[str] | None = None,
    dtype: object = None,
    verify: VerifyLike = "touched",
    reading: Reading | Mapping[str, object] | None = None,
    run: RunFacts | None = None,
    compatible: bool = False,
    allow_fresh: bool = False,
    group: GroupLike = None,
    timeout: Seconds = 1800.0,
    threads: int | None = None,
    progress: Progress | None = None,
    on_event: OnEvent | None = None,
) -> Loaded:
    """Load the state that a run resumes from: the newest complete checkpoint of a root in which no damage is found.

    All ranks of the group call this with the same options, except for those that say which tensors are loaded, and all
    load the same iteration. If newer ones are skipped, the first save afterwards records them. One iteration that is
    asked for, by `iteration` or by its folder, is only read: later saves and restarts do not depend on it. A run that
    goes on from it saves with `commit={"rollback": True}`.

    Args:
        root: a checkpoint root. One of its iteration folders selects its iteration: damage is then an error. None: the
            checkpoint of the configuration.
        layout: a `ModelLayout`, a layout file, its mapping, or a strategy file or folder. None: whole tensors; for a
            Hugging Face folder, the shards that follow from the `parallel_config` of the configuration, as its
            `pretrained_model_dir` defines the model.
        rank: the rank in the layout whose arrays are wanted; None: this process's rank in the group.
        config: a configuration with MindSpore configuration keys: a `Config`, a YAML file or a mapping. None: resume
            from `root`.
        iteration: load only this iteration.
        strategy: how the tensors of a Checkpoint 1.0 tree are sharded: a strategy file or a folder of them. None: the
            folder `strategy` in the tree or beside it. Without strategy and layout, a rank gets the arrays of its own
            file and needs no access to other files.
        part: "model", "optimizer" or "all"; default "all", or "model" if the configuration does not resume.
        keys: only these tensors.
        dtype: cast the floating-point tensors to this dtype.
        verify: what is compared with its checksums: "touched", "full" or "structure", or a `Verify` or a mapping of its
            fields, of which `on_load` is used.
        reading: how files are read and where arrays are put: a `Reading` or a mapping of its fields.
        run: facts of the run that starts, such as its batch size.
        compatible: compute the counters as MindSpore Transformers does, rounding errors included.
        allow_fresh: start without a checkpoint if no checkpoint is complete.
        group: a process group of torch, or any object with `rank`, `world_size`, `barrier`, `gather`, `broadcast`.
            None: torch's default group if there is one, else this process alone.
        timeout: seconds that a rank waits for the others; the time to load is part of it.
        threads: threads of the copy.
        progress: called as `progress(done_bytes, total_bytes)` with this rank's bytes; restarts at 0 for each attempt.
        on_event: a function, or a list of functions, called on rank 0 with an `Event` for each checkpoint that is
            skipped, and for the one that is loaded. An error of it is logged once and does not fail the load.

    Returns:
        The loaded state. An empty or missing root is a fresh start: `decision.fresh` is True, and `state` is empty.

    Raises:
        DamagedFileError: no checkpoint is complete; the message names each with its fault.
        CheckpointNotFoundError: the path is not a checkpoint.
        ArgumentError, LayoutError, MismatchError, KeyNotFoundError, UnsupportedError: an option is not accepted, or the
            checkpoint does not hold the requested tensors.
        GroupError: a rank did not answer in time.
        StorageError: an error of the system other than damage, such as missing memory or permission.

    Example:
        >>> import numpy as np, reshard
        >>> _ = reshard.save("run", 100, {"w": np.arange(6.0).reshape(2, 3)})
        >>> got = reshard.load("run")
        >>> got.iteration, got.state["w"].shape, got.decision.fresh
        (100, (2, 3), False)
    """
    check_arguments(load, root=root, timeout=timeout, on_event=on_event)
    started = time.monotonic()
    members = resolve(group)
    observers = Observers.of(on_event, members.rank)
    # With a layout of several ranks, a single process must give the rank.
    own = members.rank if rank is None and members.world_size > 1 else rank
    # An error of one rank's options is sent as a value, because the other ranks are waiting.
    options = capture(lambda: (Reading.of(reading), Verify.of(verify)))
    known, compared = options if isinstance(options, tuple) else (Reading(), Verify())
    # Read before a checkpoint is: a missing layout file is no fault of a checkpoint. It is bound to the tensors of each
    # checkpoint that is tried.
    own_layout = capture(lambda: None if layout is None else as_layout(layout))

    def check() -> None:
        for one in (options, own_layout):
            if isinstance(one, BaseException):
                raise one
        check_arguments(
            load,
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
            threads=threads,
            progress=progress,
        )
        if members.world_size > 1:
            resolve(group, rank)

    def read(checkpoint: Checkpoint, decision: ResumeDecision) -> Loaded:
        left_out = LeftOut.of_checkpoint(checkpoint) if keys is None and part != "optimizer" else None
        if left_out is not None:
            raise left_out.refusal(str(checkpoint.path), "`load`")
        wanted_layout = None if isinstance(own_layout, BaseException) else own_layout
        if wanted_layout is None and config is not None and checkpoint.data.traits.is_pretrained:
            wanted_layout = _layout_of(as_config(config), rank, members.world_size)
        state = checkpoint.load(
            wanted_layout,
            None if wanted_layout is None else own,
            part=part or ("model" if decision.restored == ("weights",) else "all"),
            keys=keys,
            out=known.out,
            dtype=dtype,
            copy=known.copy,
            verify="touched" if compared.on_load == "full" else compared.on_load,
            threads=threads,
            progress=progress,
        )
        common = checkpoint.common or checkpoint.data.read_common()
        return Loaded(checkpoint.iteration, state, common, checkpoint.extra(rank=own or 0), decision)

    wanted = LoadRequest(
        root=root,
        config=config,
        iteration=iteration,
        strategy=strategy,
        own_file=own if layout is None and strategy is None else None,
        run=run,
        compatible=compatible,
        allow_fresh=allow_fresh,
        method=known.method,
    )
    decision, loaded = load_with(
        read,
        wanted,
        group=members,
        check=check,
        scrub=compared.on_load == "full",
        threads=threads,
        timeout=timeout,
        observers=observers,
    )
    resumed(observers, decision, started)
    return Loaded(None, {}, None, {}, decision) if loaded is None else loaded


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """Which checkpoint is loaded, and facts of the run; see the arguments of `load`.

    Attributes:
        root: a checkpoint root, or one of its iteration folders; None: the checkpoint of the configuration.
        config: a configuration; None: resume from `root`.
        iteration: load this one and no other; None: the newest complete one.
        strategy: how the tensors of a Checkpoint 1.0 tree are sharded; None: the strategy files in or beside it.
        own_file: of a Checkpoint 1.0 tree only the file of this rank is opened, as it is; None: all files, as one
            checkpoint.
        run: facts of the run that starts.
        compatible: compute the counters as MindSpore Transformers does.
        allow_fresh: start without a checkpoint if no checkpoint is complete.
        method: how files are read, see `Reading`.
        copies: a second root, into which the saves of the first are copied: the newest of both is taken.
    """

    root: str | os.PathLike[str] | None = None
    config: ConfigLike | None = None
    iteration: int | None = None
    strategy: StrategyLike | None = None
    own_file: int | None = None
    run: RunFacts | None = None
    compatible: bool = False
    allow_fresh: bool = False
    method: ReadMethod = "auto"
    copies: str | None = None


def resumed(observers: Observers, decision: ResumeDecision, started: float) -> None:
    """Make the event of a run that has resumed, on rank 0.

    Args:
        observers: called with the event.
        decision: what was loaded.
        started: when the load began, on the monotonic clock.
    """
    observers.first(
        "resumed",
        decision.iteration,
        fresh=decision.fresh,
        initial_step=decision.initial_step,
        path=decision.path,
        restored=", ".join(decision.restored),
        seconds=time.monotonic() - started,
    )


def _nothing() -> None:
    """A check that does nothing."""


def load_with(
    read: Callable[[Checkpoint, ResumeDecision], T],
    wanted: LoadRequest,
    *,
    group: object = None,
    check: Callable[[], None] = _nothing,
    scrub: bool = False,
    threads: int | None = None,
    timeout: float = 1800.0,
    observers: Observers | None = None,
) -> tuple[ResumeDecision, T | None]:
    """Choose a checkpoint as `load` does and read it with `read`; if it is damaged, the next one.

    Args:
        read: called with the open checkpoint and the decision, for one after the other until no rank finds damage. Its
            result for a damaged checkpoint is discarded.
        wanted: which checkpoint is loaded.
        group: all its ranks call this.
        check: called first; its error is raised on all ranks.
        scrub: compare all files with their checksums first, distributed over the ranks.
        threads: threads of the comparison.
        timeout: seconds that a rank waits for the others; the time to load is part of it.
        observers: called with an event `skipped` for each checkpoint that is skipped.

    Returns:
        The decision, and the result of `read`; None for a fresh start.

    Raises:
        ReshardError: as `load`, and errors of `read` on any rank.

    Example:
        >>> import numpy as np, reshard
        >>> _ = reshard.save("with", 100, {"w": np.arange(6.0)})
        >>> decision, keys = load_with(lambda checkpoint, _: checkpoint.keys(), LoadRequest(root="with"))
        >>> decision.iteration, keys
        (100, ['w'])
    """
    members = resolve(group)
    ranks = Collective(session(members, "load"), timeout)

    def prepare() -> _Terms:
        check()
        known = wanted.run or RunFacts()
        if known.world_size is None:
            known = replace(known, world_size=members.world_size)
        asked, cut, own = _asked(wanted.root, wanted.config, wanted.iteration), wanted.strategy, wanted.own_file
        if asked.auto_trans:
            cut, own = wanted.strategy or asked.strategy or None, None
        return _Terms(asked, known, wanted.compatible, wanted.allow_fresh, wanted.method, cut, own, wanted.copies)

    states: dict[str, str] = {}  # of folders, before their contents were read
    is_replaced = False  # whether the folder was saved again while it was read

    def read_from(checkpoint: Checkpoint, decision: ResumeDecision) -> T:
        nonlocal is_replaced
        with checkpoint:
            try:
                if scrub:
                    if checkpoint.manifest is not None and members.rank == 0:
                        with contextlib.suppress(StorageError):  # then the result is not recorded
                            states[str(decision.path)] = proofs.state_of(checkpoint.data.path, checkpoint.manifest)
                    checkpoint.scrub((members.rank, members.world_size), threads=threads)
                result = read(checkpoint, decision)
                checkpoint.check_unchanged()
            except ReshardError:
                lock = checkpoint.data.lock
                with contextlib.suppress(StorageError):  # an error of the question would hide the first one
                    is_replaced = lock is not None and not lock.is_current()
                raise
            return result

    terms, faults = capture(prepare), dict[str, str]()
    n_replaced, before = 0, fetched_so_far()
    while True:
        is_replaced = False
        with contextlib.ExitStack() as stack:
            with held_back() as held:
                stack.callback(release, held)  # of all ranks, if one fails
                decision, open_it = _choose(ranks, terms, faults)
                if decision.path is None:
                    _report(observers, decision, members.rank)
                    return decision, None
                loaded = capture(lambda: read_from(open_it(), decision))  # noqa: B023  done before the next round
            damage = _damage_of(loaded) if isinstance(loaded, ReshardError) else None
            is_again = damage is not None and is_replaced and n_replaced < _MAX_REPLACED
            messages = [one.getMessage() for one in held]
            outcome: _Outcome | BaseException = _Outcome(damage, messages, is_replaced=is_again)
            if damage is None and isinstance(loaded, BaseException):
                outcome = loaded
            of_ranks = ranks.share(outcome, _Outcome)
            release(held, [one.messages for one in of_ranks[: members.rank]])
        found = [(number, one.damage) for number, one in enumerate(of_ranks) if one.damage is not None]
        if not found:
            assert not isinstance(loaded, BaseException)
            if decision.path in states:
                _record(locate(decision.path), states[decision.path])
            if not _is_look(wanted):
                _note(locate(decision.path))
            if (fetched := fetched_so_far() - before).n_requests:
                _log.info(
                    "%s: %d bytes were fetched by %d requests, for arrays of %d bytes",
                    decision.path,
                    fetched.fetched_bytes,
                    fetched.n_requests,
                    fetched.wanted_bytes,
                )
            _report(observers, decision, members.rank)
            return decision, loaded
        del loaded  # its memory is needed for the next
        number, reason = found[0]
        if any(one.is_replaced for one in of_ranks):
            n_replaced += 1
            continue
        faults[decision.path] = reason if members.world_size == 1 else f"rank {number}: {reason}"
        log_of_all(members.rank, "%s is skipped: %s", decision.path, faults[str(decision.path)], level=logging.INFO)


def _report(observers: Observers | None, decision: ResumeDecision, rank: int) -> None:
    """Log the warnings of a decision, and make an event for each checkpoint that was skipped."""
    for line in decision.warnings:
        log_of_all(rank, "load: %s", line)
    for verdict in itertools.takewhile(lambda one: not one.taken, decision.verdicts):
        if observers is not None:
            observers.first("skipped", verdict.iteration, path=verdict.path, reason=verdict.reason)


def _asked(root: str | os.PathLike[str] | None, config: ConfigLike | None, iteration: int | None) -> Config:
    """The arguments as a configuration."""
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
    return replace(asked, load_path=str(locate(folder) / roots.iteration_folder_name(iteration)))


def _is_pretrained(path: str) -> bool:
    """Whether a path holds pretrained weights, such as a Hugging Face folder."""
    location = locate(path)
    return location.found() is not None and registry.detect(location).traits.is_pretrained


def _layout_of(config: Config, rank: int | None, world_size: int) -> ModelLayout | None:
    """How the run of a configuration shards a Hugging Face model: by the preset of its family."""
    if not (config.use_parallel and config.model_path):
        return None
    n_ranks = math.prod(config.mesh.values())
    if rank is None and n_ranks != world_size:
        raise ConfigError(
            f"parallel_config divides the model over {n_ranks} ranks, and this is one of {world_size}",
            hint="start as many, or give `layout=` and `rank=`",
        )
    return ModelLayout.preset(config.model_path, **config.mesh)


# -- collectively


@dataclass(frozen=True)
class _Outcome:
    """What a rank reports of a checkpoint that it has read.

    Attributes:
        damage: what is damaged; None: nothing.
        messages: what was logged meanwhile.
        is_replaced: whether it was saved again while it was read, and is read again for that.
    """

    damage: str | None
    messages: list[str]
    is_replaced: bool


@dataclass(frozen=True)
class _Terms:
    """`LoadRequest`, resolved on this rank."""

    config: Config
    run: RunFacts
    compatible: bool
    allow_fresh: bool
    method: ReadMethod
    strategy: StrategyLike | None
    own_file: int | None
    copies: str | None


@dataclass(frozen=True)
class _Choice:
    """The result of rank 0: a tree of which every rank reads its own folder, or the facts and the opened checkpoint."""

    tree: SavesRoot | None
    facts: ResumeFacts | None = None
    chosen: opening.Chosen | None = None


def _choose(
    ranks: Collective, terms: _Terms | BaseException, faults: Mapping[str, str]
) -> tuple[ResumeDecision, Callable[[], Checkpoint]]:
    """The same decision on all ranks, and a function that opens the selected checkpoint on this rank.

    Args:
        ranks: all of them call this.
        terms: the arguments, or the error of this rank.
        faults: folders in which damage was found while they were loaded, with the reason.
    """
    opened: dict[str, Checkpoint] = {}

    if isinstance(terms, BaseException):
        ranks.fail(terms)

    def look(_: list[None]) -> _Choice:
        with contextlib.ExitStack() as stack:
            for one in {locate(path).store for path in (terms.config.load_path, terms.copies) if path}:
                stack.enter_context(one.remembering())
            tree = saves_root(terms.config, ranks.world_size)
            if tree is not None:
                return _Choice(tree)
            facts = gather_both(
                terms.config, terms.copies, terms.run, method=terms.method, faults=faults, opened=opened
            )
        path = _decide(terms, facts).path
        is_sent = path is not None and ranks.world_size > 1
        return _Choice(None, facts, opening.chosen(opened[str(path)]) if is_sent else None)

    choice = ranks.combine(None, look, None, _Choice)
    if choice.facts is None:
        # The path of the rank folders may differ between hosts.
        tree = capture(lambda: saves_root(terms.config, ranks.world_size) or choice.tree)
        ranks.share(tree if isinstance(tree, BaseException) else None, None)
        assert isinstance(tree, SavesRoot)
        return _choose_save(ranks, terms, tree, faults)
    decision = _decide(terms, choice.facts)
    path = str(decision.path)
    if path in opened:
        return decision, lambda: opened[path]
    chosen = choice.chosen
    if chosen is None:
        name = None if choice.facts.kind == "root" else format_of(terms.config, locate(path))
        return decision, lambda: opening.open(path, method=terms.method, format=name)
    return decision, lambda: _open_same(chosen, terms.method, min(_VISIBLE_SECONDS, ranks.timeout / 2))


def _choose_save(
    ranks: Collective, terms: _Terms, tree: SavesRoot, faults: Mapping[str, str]
) -> tuple[ResumeDecision, Callable[[], Checkpoint]]:
    """As `_choose`, for saves in rank folders: each rank reads the folders that exist on its host."""
    facts = gather_saves(terms.config, terms.run, tree, ranks=ranks, method=terms.method, faults=faults)
    decision = _decide(terms, facts)
    n_ranks = next((one.world_size or 0 for one in facts.candidates if one.path == decision.path), 0)
    return decision, lambda: _open_save(terms, tree, locate(str(decision.path)).name, n_ranks, ranks.world_size)


def _open_save(terms: _Terms, tree: SavesRoot, save: str, n_ranks: int, world_size: int) -> Checkpoint:
    """The files of a save as one checkpoint, or one rank's own file alone."""
    own, root, saves = terms.own_file, tree.path, registry.rank_saves(tree)
    if own is None:
        return Checkpoint(saves.open(save, n_ranks, OpenOptions(terms.method, terms.strategy)))
    if not own < n_ranks or world_size not in (1, n_ranks):
        raise MismatchError(
            f"{show(root)} was saved by {n_ranks} ranks, and this is rank {own} of {world_size}: its own file is not "
            "what it needs",
            path=root,
            hint="give `layout=`, the layout of this run, and `strategy=`, that of the saved one",
        )
    checkpoint = Checkpoint(saves.open_own(save, own, terms.method))
    is_deduplicated = checkpoint.data.is_deduplicated()
    if terms.config.dedup if is_deduplicated is None else is_deduplicated:
        checkpoint.close()
        raise MismatchError(
            f"{show(root)} was saved without replicas: the own file of rank {own} lacks what other ranks wrote for it",
            path=root,
            hint="give `strategy=`, that of the saved run, and as `layout=` the same or the layout of this run",
        )
    return checkpoint


def _decide(terms: _Terms, facts: ResumeFacts) -> ResumeDecision:
    return decide(terms.config, facts, compatible=terms.compatible, allow_fresh=terms.allow_fresh)


def _open_same(chosen: opening.Chosen, method: ReadMethod, patience_s: float) -> Checkpoint:
    """Open the checkpoint that rank 0 has chosen. Retries, since a network file system may show it later."""
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
    """The reason if an error reports damage of a checkpoint, else None."""
    is_about_files = isinstance(error, DamagedFileError | CoverageError | CheckpointNotFoundError | StorageError)
    return opening.reason_of(error) if is_about_files and opening.is_damage(error) else None


def _record(path: Location, state: str) -> None:
    """Record that an iteration is verified: its shard files were read, and the other files are checked here."""
    if roots.parse_iteration_folder(path.name) is None:
        return
    try:
        manifest = manifests.read(path)
        if not scrub_plain(path, manifest):
            proofs.write(path, manifest, state, None)
    except ReshardError as error:
        _log.info("that %s was verified is not recorded: %s", path, error.message)


def _is_look(wanted: LoadRequest) -> bool:
    """Whether one iteration of a root is read by its number. It does not change what the next save records."""
    if wanted.root is None:
        return False
    return wanted.iteration is not None or split_iteration(str(locate(wanted.root)))[1] is not None


def _note(path: Location) -> None:
    """Note which newer iterations were skipped, for the first save after this load."""
    number = roots.parse_iteration_folder(path.name)
    with path.store.remembering():
        if number is not None and roots.is_root(path.parent):
            pass_over(path.parent, number)


def pass_over(root: str | os.PathLike[str], number: int) -> None:
    """Resume from an older iteration of a root on purpose: the first save records which newer ones are skipped.

    Args:
        root: the checkpoint root.
        number: the iteration; -1: all are skipped.

    Example:
        >>> pass_over("no/such/root", 400)
    """
    root = locate(root)
    newer = opening.newer_than(root, number) if root.is_folder() else ()
    if newer:
        session_of(root).resumed = PassedOver(number, newer)
        # Later saves get a new generation, which distinguishes them from the skipped iterations.
        protocol.release(root)
    elif (session := find_session(root)) is not None:
        session.resumed = None


# -- in the background


def _in_background(function: Callable[P, Loaded]) -> Callable[P, PendingLoad[Loaded]]:
    def start(*args: P.args, **kwargs: P.kwargs) -> PendingLoad[Loaded]:
        """Begin to load in the background: as `load`, and `result()` returns its result.

        Example:
            >>> import numpy as np, reshard
            >>> _ = reshard.save("in_background", 100, {"w": np.arange(6.0)})
            >>> reshard.load_async("in_background").result().iteration
            100
        """
        return PendingLoad(lambda: function(*args, **kwargs))

    return start


load_async = _in_background(load)
