"""The order in which the saves of a Checkpoint 1.0 tree are tried, and the saves that are never tried.

A save consists of one file per rank. Each rank's `meta.json` names its last save, so the oldest save that any of them
names is the newest save that every rank has completed. It is tried first, then the saves before it, then those of
earlier runs in the same folder. Newer saves are incomplete on some rank. Without a valid `meta.json`, or if the
configuration requests it, the modification times of the files decide.

A save that some rank does not have keeps its position in the order, with a fault. Damage inside of files is found when
they are opened. This module does not access the disk or the clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.commit.candidates import Candidate
from reshard.formats.checkpoint1.names import FileName, Meta, parse_file_name
from reshard.formats.rank_saves import SaveOrder
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from reshard.formats.checkpoint1.names import Extension

_MAX_NAMED = 4  # ranks that a message lists before it only counts them


@dataclass(frozen=True)
class RankFolder:
    """The content of one rank's folder, without opening weight files.

    Attributes:
        files: `(name, time)` of the weight files; modification times in nanoseconds.
        meta: content of meta.json; None: it is missing or invalid.
        meta_fault: why an existing meta.json is invalid.
    """

    files: tuple[tuple[str, int], ...]
    meta: Meta | None = None
    meta_fault: str | None = None


def name_of_rank(save: str, rank: int) -> str:
    """The name of a rank's file in a save.

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
        ranks: the content of every rank folder, by rank.
        by_time: sort by modification time, and ignore meta.json.
        extension: only files with this extension.
        named: only this save, by the name of any rank's file, with or without extension.

    Returns:
        The order. If it has no candidate, `refused` and `warnings` give the reasons.

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
    refused: list[Candidate] = []
    left: list[_SaveFiles] = []
    for save in saves:
        if extension is not None and not save.name.endswith(f".{extension}"):
            refused.append(Candidate(None, save.name, f"not a `.{extension}` file, which load_ckpt_format requires"))
        else:
            left.append(save)
    if named is not None:
        wanted = _matching_names(named, extension)
        reason = "named by resume_training"
        chosen = [save for save in left if save.name in wanted]
        refused += [Candidate(None, save.name, f"{show(named)} is requested") for save in left if save not in chosen]
        if not chosen:
            warnings.append(f"no rank has a file of the requested save {show(named)}")
        ordered = [(save, reason) for save in sorted(chosen, key=_by_name, reverse=True)]
    elif by_time or not metas:
        ordered = _by_time(left, is_requested=by_time, warnings=warnings)
    else:
        ordered = _by_meta(left, metas, n_ranks, refused)
    candidates = tuple(Candidate(None, save.name, reason, _fault(save, n_ranks)) for save, reason in ordered)
    return SaveOrder(candidates, tuple(refused), warnings=tuple(warnings), n_ranks=n_ranks)


# -- the saves


@dataclass(frozen=True)
class _SaveFiles:
    """The files of a save.

    Attributes:
        name: the name of rank 0's file.
        file: the parsed name; None: it has another form.
        ranks: the ranks that have a file of it.
        time: latest modification time of its files, in nanoseconds.
    """

    name: str
    file: FileName | None
    ranks: frozenset[int]
    time: int


def _saves(ranks: Mapping[int, RankFolder], warnings: list[str]) -> list[_SaveFiles]:
    """The saves, newest by name first. Files in the folder of another rank are ignored."""
    found: dict[str, dict[int, int]] = {}
    misplaced: list[str] = []
    for rank, folder in sorted(ranks.items()):
        for name, time in folder.files:
            parsed = parse_file_name(name)
            if parsed is not None and parsed.rank != rank:
                misplaced.append(f"rank_{rank}/{name}")
                continue
            found.setdefault(name if parsed is None else parsed.of_rank(0).name, {})[rank] = time
    if misplaced:
        warnings.append(f"files in the folder of another rank are ignored: {listed(map(show, misplaced), 1)}")
    saves = [
        _SaveFiles(name, parse_file_name(name), frozenset(times), max(times.values())) for name, times in found.items()
    ]
    return sorted(saves, key=_by_name, reverse=True)


def _by_name(save: _SaveFiles) -> tuple[bool, bool, int, int, int, bool, str]:
    """Sort key by name, oldest first: runs, epochs and steps only increase. Files with weights only come first."""
    file = save.file
    if file is None:
        return (False, False, 0, 0, 0, False, save.name)
    number = file.run or 0
    return (True, file.kind == "full", number, file.epoch, file.step, file.extension == "safetensors", save.name)


def _fault(save: _SaveFiles, n_ranks: int) -> str | None:
    n_missing = n_ranks - len(save.ranks)
    return f"{_ranks(save.ranks, n_ranks)} {'have' if n_missing > 1 else 'has'} no file of it" if n_missing else None


def _ranks(there: Collection[int], n_ranks: int) -> str:
    """The ranks that are missing, for messages."""
    n_missing = n_ranks - len(there)
    # The largest rank comes from the name of a folder and can be huge: only the listed ranks are enumerated.
    absent = (rank for rank in range(n_ranks) if rank not in there)
    return f"rank{'s' if n_missing > 1 else ''} {listed(absent, _MAX_NAMED, n_items=n_missing)}"


def _matching_names(named: str, extension: Extension | None) -> set[str]:
    """The saves that a name can refer to: the file of any rank, with or without an extension."""
    names = [named, f"{named}.{extension}"] if extension else [named, f"{named}.safetensors", f"{named}.ckpt"]
    return {name_of_rank(name, 0) for name in names}


# -- by meta.json


def _metas(ranks: Mapping[int, RankFolder], warnings: list[str]) -> dict[int, FileName]:
    """The file that each valid meta.json names, by rank."""
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
        return metas  # files with weights only, and trees of other origin, never have a meta.json
    by_fault: dict[str, list[int]] = {}
    for rank, fault in faults.items():
        by_fault.setdefault(fault, []).append(rank)
    for fault, of in by_fault.items():
        named = listed((f"rank_{rank}" for rank in of), _MAX_NAMED)
        warnings.append(f"meta.json of {named} is skipped: {fault}")
    return metas


def _by_meta(
    saves: list[_SaveFiles], metas: Mapping[int, FileName], n_ranks: int, refused: list[Candidate]
) -> list[tuple[_SaveFiles, str]]:
    """The oldest save that a meta.json names, the saves before it, and those of earlier runs."""
    base_rank = min(metas, key=lambda rank: (metas[rank].epoch, metas[rank].step, metas[rank].run or 0, rank))
    base = metas[base_rank]
    is_of_all = len(metas) == n_ranks and len({meta.of_rank(0) for meta in metas.values()}) == 1
    who = "every meta.json" if is_of_all else f"rank_{base_rank}/meta.json"
    ordered: list[tuple[_SaveFiles, str]] = []
    for save in saves:
        file = save.file
        if file is None or file.prefix != base.prefix or file.kind != base.kind:
            refused.append(Candidate(None, save.name, f"not one of the saves `{base.prefix}` that {who} names"))
            continue
        is_newer = (file.epoch, file.step) > (base.epoch, base.step)
        run, base_run = file.run or 0, base.run or 0
        if run > base_run:
            refused.append(
                Candidate(None, save.name, f"of a later run than {base.suffix}, which {who} names: incomplete")
            )
        elif is_newer and run < base_run:
            refused.append(Candidate(None, save.name, f"abandoned by a later run, of which {who} names {base.suffix}"))
        elif is_newer:
            refused.append(
                Candidate(None, save.name, f"newer than {base.suffix}, which {who} names: incomplete on some rank")
            )
        elif run < base_run:
            ordered.append((save, f"of an earlier run, up to {base.suffix}, which {who} names"))
        elif (file.epoch, file.step) == (base.epoch, base.step):
            ordered.append((save, f"named by {who}" if is_of_all else f"named by {who}, the oldest save that is named"))
        else:
            ordered.append((save, f"before {base.suffix}, which {who} names"))
    return ordered


# -- by time


def _by_time(saves: list[_SaveFiles], *, is_requested: bool, warnings: list[str]) -> list[tuple[_SaveFiles, str]]:
    """Newest file first; at equal times sorted by name. Files with weights only come last."""
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
            warnings.append("the times of the files contradict their names, as after a copy; the times are used")
            break
    why = "as resume_by_last_timestamp_ckpt requests" if is_requested else "since there is no valid meta.json"
    reasons = [f"the newest by time, {why}", *("next by time" for _ in newest_first)]
    return list(zip(newest_first, reasons, strict=False))
