"""Gathers the facts of a resume decision from saves whose ranks have folders of their own.

The processes check the candidates in order, each its own files, until one is complete on all ranks. The format says how
they are found and checked (`formats.rank_saves`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.commit import roots
from reshard.commit.scrub import is_damage, reason_of
from reshard.config import split_iteration
from reshard.errors import ReshardError
from reshard.formats import registry
from reshard.ranks.collective import ALONE
from reshard.resume import (
    CandidateFacts,
    Complete,
    Damaged,
    RankFolderFacts,
    Refused,
    ResumeFacts,
    RunFacts,
    Unreadable,
    evaluate,
)
from reshard.resume.choose import is_settled
from reshard.storage.location import locate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard import _core
    from reshard.commit.candidates import Candidate
    from reshard.config import Config
    from reshard.formats.rank_saves import CheckedSave, RankSaves, SavesRoot
    from reshard.ranks.collective import Collective


def saves_root(config: Config, world_size: int = 1) -> SavesRoot | None:
    """The rank folders that a configuration loads; None: it loads something else.

    Args:
        config: the configuration. With several ranks, the path of a file in a rank's folder selects the file of each
            rank in the same save.
        world_size: number of processes that load.

    Raises:
        StorageError: the system failed to list a folder.
    """
    if not config.load_path:
        return None
    path = locate(config.load_path)
    if path.is_folder():
        found = registry.saves_at(path, registry.detect(path))
    else:
        root, iteration = split_iteration(config.load_path)
        place, found = locate(root), None
        if iteration is not None and place.is_folder() and not roots.is_root(place):
            found = registry.saves_at(place, iteration=iteration)
        if found is None:
            return registry.saves_at(path) if world_size > 1 else None
    return None if found is None else replace(found, named=config.resume_file)


def gather_saves(
    config: Config,
    run: RunFacts,
    tree: SavesRoot,
    *,
    ranks: Collective = ALONE,
    method: _core.ReadMethod = "auto",
    faults: Mapping[str, str] | None = None,
    keep_going: bool = False,
) -> ResumeFacts:
    """Gather the facts of saves in rank folders. They are checked in order until one is complete.

    Args:
        config: the configuration.
        run: the run that is about to start.
        tree: the folder, and the requested save in it.
        ranks: the processes; all call this function.
        method: how files are read, as in `reshard.open`.
        faults: damage that was found while loading: the reason by the path of rank 0's file.
        keep_going: as in `opening.gather.gather`; for one process only.

    Returns:
        The facts, equal on all processes, except for `ranks`, which only process 0 has.

    Raises:
        StorageError: a file cannot be read. This is not damage, so the save is not skipped.
    """
    exact, saves = tree.iteration, registry.rank_saves(tree)
    known = saves.find(
        ranks, by_time=config.by_timestamp, extension=config.load_format, healthy_only=config.healthy_only
    )
    order = known.order
    facts = ResumeFacts(tree.path, "rank_folders", run=run, warnings=order.warnings)
    refused = tuple(
        CandidateFacts(str(saves.place(one.name, 0)), why=one.reason, state=Refused(one.reason))
        for one in order.refused
    )
    found: list[CandidateFacts] = []
    for n, save in enumerate(order.candidates):
        one = _candidate(saves, save, order.n_ranks, (faults or {}).get(str(saves.place(save.name, 0))))
        if isinstance(one.state, Complete):
            try:
                one = _checked(one, saves.check(save.name, ranks, method), known.statuses.get(save.name))
            except ReshardError as error:
                if not keep_going or is_damage(error):
                    raise
                one = replace(one, state=Unreadable(reason_of(error)))
            if exact is not None and isinstance(one.state, Complete) and one.iteration != exact:
                one = replace(one, state=Refused(f"iteration {exact} is requested"))
        found.append(one)
        facts = replace(facts, candidates=tuple(found))
        if is_settled(evaluate(config, facts)):
            found += [_candidate(saves, other, order.n_ranks, None) for other in order.candidates[n + 1 :]]
            break
    return replace(facts, candidates=(*found, *refused), ranks=_folders(saves, found))


def _candidate(saves: RankSaves, save: Candidate, n_ranks: int, fault: str | None) -> CandidateFacts:
    """The facts of a save before its files are opened."""
    fault = fault or save.fault
    return CandidateFacts(
        str(saves.place(save.name, 0)),
        why=save.reason,
        state=Complete() if fault is None else Damaged(fault),
        world_size=n_ranks,
        is_legacy=True,
        counters=saves.traits.counters,
    )


def _checked(candidate: CandidateFacts, checked: CheckedSave, status: int | None) -> CandidateFacts:
    """A candidate with what all processes found of it."""
    if checked.faults:
        rank, fault = checked.faults[0]
        more = f", and {len(checked.faults) - 1} more ranks' files" if len(checked.faults) > 1 else ""
        return replace(candidate, state=Damaged(f"rank {rank}: {fault}{more}"), rank_faults=checked.faults)
    common = checked.common
    if common is not None:
        common = replace(common, unknown=(), ckpt_status=common.ckpt_status if status is None else status)
    return replace(
        candidate,
        iteration=None if common is None else common.step_num,
        common=common,
        has_optimizer=checked.has_optimizer,
    )


def _folders(saves: RankSaves, found: list[CandidateFacts]) -> tuple[RankFolderFacts, ...]:
    """The content of each rank's folder, with the faults of its files."""
    faults: dict[int, list[tuple[str, str]]] = {}
    for candidate in found:
        for rank, fault in candidate.rank_faults:
            name = saves.place(locate(candidate.path).name, rank).name
            faults.setdefault(rank, []).append((name, fault))
    labels = saves.labels()
    return tuple(
        RankFolderFacts(
            *view,
            faults=tuple(faults.get(view.rank, ())),
            labels={name: labels[name] for name in (*view.files, view.meta or "") if name in labels},
        )
        for view in saves.folders
    )
