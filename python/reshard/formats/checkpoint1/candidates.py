"""Which save of a Checkpoint 1.0 tree is tried first, which next, and which never: the order of candidates.

A save is one file of every rank. The idea of the format: each rank's `meta.json` names what it saved last, so the
oldest that any of them names is the last save that every rank had ended. It comes first, then those before it, then
those of earlier runs in the same folder. What is newer was not ended everywhere. Without any `meta.json` that is of
use, or if the configuration says so, the times of the files decide.

A save that not every rank has is no candidate for any, however good the files of the others: it keeps its place in
the order with the fault that says so. Whether files are whole is found out by opening them. No disk, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.formats.checkpoint1.names import FileName, Meta, parse_file_name
from reshard.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from reshard.formats.checkpoint1.names import Extension

__all__ = ["RankFolder", "Save", "SaveOrder", "name_of_rank", "order_saves"]

_MAX_NAMED = 4  # ranks that a message lists before it only counts


@dataclass(frozen=True)
class RankFolder:
    """What is known of one rank's folder before a file in it is opened.

    Attributes:
        files: `(name, time)` of the weight files: nanoseconds at which each was last written.
        meta: what its meta.json says; None: there is none, or it is of no use.
        meta_fault: why a meta.json that is there is of no use.
    """

    files: tuple[tuple[str, int], ...]
    meta: Meta | None = None
    meta_fault: str | None = None


@dataclass(frozen=True)
class Save:
    """One save, and why it stands where it does, or why it is no candidate.

    Attributes:
        name: what tells it from others: the name of rank 0's file.
        reason: half a sentence: "named by every meta.json".
        fault: why it is not whole, as far as names tell: ranks that lack it.
    """

    name: str
    reason: str
    fault: str | None = None


@dataclass(frozen=True)
class SaveOrder:
    """In which order the saves of a tree are tried.

    Attributes:
        candidates: best first; those with a fault are passed over.
        refused: those that are never tried, newest first.
        n_ranks: ranks that a save is made of.
        warnings: what is wrong with the tree itself, in sentences.
    """

    candidates: tuple[Save, ...]
    refused: tuple[Save, ...]
    n_ranks: int
    warnings: tuple[str, ...] = ()


def name_of_rank(save: str, rank: int) -> str:
    """The name of a rank's file of a save.

    Example:
        >>> name_of_rank("llama_rank_0_1-20_2.ckpt", 3), name_of_rank("net.safetensors", 3)
        ('llama_rank_3_1-20_2.ckpt', 'net.safetensors')
    """
    parsed = parse_file_name(save)
    return save if parsed is None else parsed.of_rank(rank).name


def order_saves(
    ranks: Mapping[int, RankFolder],
    *,
    by_time: bool = False,
    extension: Extension | None = None,
    named: str | None = None,
) -> SaveOrder:
    """Put the saves of a tree in the order in which they are tried.

    Args:
        ranks: every rank folder, by rank.
        by_time: whatever meta.json says, the newest file comes first.
        extension: only files of this one.
        named: only the save of this name: any rank's, with or without its extension.

    Returns:
        The order. It may hold no candidate at all: then the reasons are in `refused` and `warnings`.

    Example:
        >>> meta = Meta(20, 2, "x_rank_0-20_2.ckpt")
        >>> zero = RankFolder((("x_rank_0-15_2.ckpt", 1), ("x_rank_0-20_2.ckpt", 2)), meta)
        >>> one = RankFolder((("x_rank_1-15_2.ckpt", 1),))
        >>> for save in order_saves({0: zero, 1: one}).candidates:
        ...     print(save.name, save.fault)
        x_rank_0-20_2.ckpt rank 1 has no file of it
        x_rank_0-15_2.ckpt None
    """
    warnings: list[str] = []
    saves = _saves(ranks, warnings)
    n_ranks = max(ranks, default=-1) + 1
    if len(ranks) < n_ranks:
        warnings.append(f"there is no folder of {_ranks(ranks, n_ranks)}")
    metas = _metas(ranks, warnings)
    refused: list[Save] = []
    left: list[_Save] = []
    for save in saves:
        if extension is not None and not save.name.endswith(f".{extension}"):
            refused.append(Save(save.name, f"no `.{extension}` file, and load_ckpt_format asks for these"))
        else:
            left.append(save)
    if named is not None:
        wanted = _names_meant(named, extension)
        reason = "named by resume_training"
        chosen = [save for save in left if save.name in wanted]
        refused += [Save(save.name, f"{show(named)} was asked for") for save in left if save not in chosen]
        if not chosen:
            warnings.append(f"no rank has a file of the save {show(named)}, which was asked for")
        told = [(save, reason) for save in sorted(chosen, key=_by_name, reverse=True)]
    elif by_time or not metas:
        told = _in_time(left, by_time=by_time, warnings=warnings)
    else:
        told = _by_meta(left, metas, n_ranks, refused)
    candidates = tuple(Save(save.name, reason, _fault(save, n_ranks)) for save, reason in told)
    return SaveOrder(candidates, tuple(refused), n_ranks, tuple(warnings))


# -- the saves


@dataclass(frozen=True)
class _Save:
    """A save as its files tell.

    Attributes:
        name: as in `Save`.
        file: what the name says; None: it is named otherwise.
        ranks: those that have a file of it.
        time: at which the last of them was written, in nanoseconds.
    """

    name: str
    file: FileName | None
    ranks: frozenset[int]
    time: int


def _saves(ranks: Mapping[int, RankFolder], warnings: list[str]) -> list[_Save]:
    """The saves, newest by name first; a file that lies in another rank's folder belongs to none."""
    found: dict[str, dict[int, int]] = {}
    strange: list[str] = []
    for rank, folder in sorted(ranks.items()):
        for name, time in folder.files:
            parsed = parse_file_name(name)
            if parsed is not None and parsed.rank != rank:
                strange.append(f"rank_{rank}/{name}")
                continue
            found.setdefault(name if parsed is None else parsed.of_rank(0).name, {})[rank] = time
    if strange:
        warnings.append(f"files in the folder of another rank are ignored: {listed(map(show, strange), 1)}")
    saves = [_Save(name, parse_file_name(name), frozenset(times), max(times.values())) for name, times in found.items()]
    return sorted(saves, key=_by_name, reverse=True)


def _by_name(save: _Save) -> tuple[bool, bool, int, int, int, bool, str]:
    """From older to newer as names tell: runs, epochs and steps only grow. Weights alone are the last resort."""
    file = save.file
    if file is None:
        return (False, False, 0, 0, 0, False, save.name)
    number = file.run or 0
    return (True, file.kind == "full", number, file.epoch, file.step, file.extension == "safetensors", save.name)


def _fault(save: _Save, n_ranks: int) -> str | None:
    n_missing = n_ranks - len(save.ranks)
    return f"{_ranks(save.ranks, n_ranks)} {'have' if n_missing > 1 else 'has'} no file of it" if n_missing else None


def _ranks(there: Collection[int], n_ranks: int) -> str:
    """The ranks that are missing, in words."""
    n_missing = n_ranks - len(there)
    # The largest rank comes out of a folder's name: only as many are looked at as are named.
    absent = (rank for rank in range(n_ranks) if rank not in there)
    return f"rank{'s' if n_missing > 1 else ''} {listed(absent, _MAX_NAMED, n_items=n_missing)}"


def _names_meant(named: str, extension: Extension | None) -> set[str]:
    """The saves that a name can mean: of any rank, with or without an extension."""
    names = [named, f"{named}.{extension}"] if extension else [named, f"{named}.safetensors", f"{named}.ckpt"]
    return {name_of_rank(name, 0) for name in names}


# -- by meta.json


def _metas(ranks: Mapping[int, RankFolder], warnings: list[str]) -> dict[int, FileName]:
    """What the meta.json of each rank names, of those that are of use."""
    metas: dict[int, FileName] = {}
    faults: dict[int, str] = {}
    for rank, folder in sorted(ranks.items()):
        parsed = None if folder.meta is None else parse_file_name(folder.meta.last_ckpt_file)
        if parsed is not None and parsed.rank == rank:
            metas[rank] = parsed
        elif parsed is not None:
            faults[rank] = f"names a file of rank {parsed.rank}"
        else:
            faults[rank] = folder.meta_fault or "is missing"
    if all(folder.meta is None and folder.meta_fault is None for folder in ranks.values()):
        return metas  # weights alone, and trees of another origin, never have one: there is none to miss
    by_fault: dict[str, list[int]] = {}
    for rank, fault in faults.items():
        by_fault.setdefault(fault, []).append(rank)
    for fault, of in by_fault.items():
        named = listed((f"rank_{rank}" for rank in of), _MAX_NAMED)
        warnings.append(f"meta.json of {named} is passed over: {fault}")
    return metas


def _by_meta(
    saves: list[_Save], metas: Mapping[int, FileName], n_ranks: int, refused: list[Save]
) -> list[tuple[_Save, str]]:
    """The oldest save that a meta.json names, those before it, those of earlier runs."""
    base_rank = min(metas, key=lambda rank: (metas[rank].epoch, metas[rank].step, metas[rank].run or 0, rank))
    base = metas[base_rank]
    is_of_all = len(metas) == n_ranks and len({meta.of_rank(0) for meta in metas.values()}) == 1
    who = "every meta.json" if is_of_all else f"rank_{base_rank}/meta.json"
    told: list[tuple[_Save, str]] = []
    for save in saves:
        file = save.file
        if file is None or file.prefix != base.prefix or file.kind != base.kind:
            refused.append(Save(save.name, f"not of the saves `{base.prefix}` that {who} names"))
            continue
        is_newer = (file.epoch, file.step) > (base.epoch, base.step)
        run, base_run = file.run or 0, base.run or 0
        if run > base_run:
            refused.append(Save(save.name, f"of a later run than {base.suffix}, which {who} names: it was not ended"))
        elif is_newer and run < base_run:
            refused.append(Save(save.name, f"left behind by a later run, of which {who} names {base.suffix}"))
        elif is_newer:
            refused.append(Save(save.name, f"newer than {base.suffix}, which {who} names: not every rank had ended it"))
        elif run < base_run:
            told.append((save, f"of an earlier run, not beyond {base.suffix}, which {who} names"))
        elif (file.epoch, file.step) == (base.epoch, base.step):
            told.append((save, f"named by {who}" if is_of_all else f"named by {who}, the oldest of those named"))
        else:
            told.append((save, f"before {base.suffix}, which {who} names"))
    return told


# -- by time


def _in_time(saves: list[_Save], *, by_time: bool, warnings: list[str]) -> list[tuple[_Save, str]]:
    """From the newest file to the oldest; of equal times the names tell. Weights alone are the last resort here too."""
    full = [save for save in saves if save.file is None or save.file.kind == "full"]
    rest = [save for save in saves if save not in full]
    newest_first = [
        save
        for some in (full, rest)
        for save in sorted(some, key=lambda save: (save.time, _by_name(save)), reverse=True)
    ]
    for prefix in dict.fromkeys(save.file.prefix for save in full if save.file is not None):
        names = [_by_name(save) for save in newest_first if save.file is not None and save.file.prefix == prefix]
        if names != sorted(names, reverse=True):
            warnings.append("the times of the files contradict their names: were they copied? The times count")
            break
    why = "as resume_by_last_timestamp_ckpt asks" if by_time else "since no meta.json is of use"
    reasons = [f"the newest by time, {why}", *("next by time" for _ in newest_first)]
    return list(zip(newest_first, reasons, strict=False))
