"""The plan of a save in Checkpoint 1.0: names, epoch and step, who keeps which tensor, and what is removed afterwards.

A name is never used twice. The names of all files of one save differ in the rank alone; if a name were used again, a
crash could leave new files of some ranks beside old ones of others. So a run that finds files of its prefix takes the
next number `_<k>`, as MindSpore Transformers does, and so does a run that would write a name again.

All functions are pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reshard.errors import ArgumentError
from reshard.formats.checkpoint1.names import FileName, parse_file_name
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.formats.checkpoint1.names import FileKind

DEFAULT_PREFIX = "CKP"


@dataclass(frozen=True)
class Naming:
    """What the names of the files of a save have in common.

    Attributes:
        prefix: the text before `_rank_`.
        run: number of the run in this root; None: the first.
        epoch: the loop's epoch, of sinks in sink mode.
        step: the step in it.

    Example:
        >>> Naming("llama", 1, 20, 2).file(3, "network").name
        'llama_rank_3_1-network-20_2.safetensors'
    """

    prefix: str
    run: int | None
    epoch: int
    step: int

    def file(self, rank: int, kind: FileKind = "full") -> FileName:
        """The file of a rank."""
        return FileName(self.prefix, rank, self.run, kind, self.epoch, self.step, "safetensors")


@dataclass(frozen=True)
class FolderView:
    """What a rank found in its own folders before a save.

    Attributes:
        has_folder: whether its `rank_<r>` is there.
        has_meta: whether a save of it was completed: there is a `meta.json`.
        has_more: whether there is a folder of a rank that this world does not have.
        runs: numbers of the runs that left files of the prefix; 0: the first, which writes none.
        taken: those of them that have a file of this epoch and step.
    """

    has_folder: bool = False
    has_meta: bool = False
    has_more: bool = False
    runs: tuple[int, ...] = ()
    taken: tuple[int, ...] = ()


@dataclass(frozen=True)
class ShardAssignment:
    """Who keeps what in the de-duplicated variant.

    Attributes:
        groups: ranks that hold the same bytes of some arrays, and the names of these, in order.
    """

    groups: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...] = field(default=())

    def left_out(self, rank: int) -> set[str]:
        """The arrays of a rank that another one keeps.

        Example:
            >>> ShardAssignment((((0, 2), ("a", "b", "c")),)).left_out(0)
            {'b'}
        """
        found: set[str] = set()
        for ranks, names in self.groups:
            if rank in ranks:
                at = ranks.index(rank)
                found.update(name for number, name in enumerate(names) if number % len(ranks) != at)
        return found


def check_prefix(prefix: str | None) -> str:
    """The prefix of the names of files; `CKP` if none is given.

    Raises:
        ArgumentError: it cannot be part of such a name, or MindSpore Transformers finds a rank's number in it.

    Example:
        >>> check_prefix(None), check_prefix("llama2_7b")
        ('CKP', 'llama2_7b')
    """
    if prefix is None:
        return DEFAULT_PREFIX
    example = None
    if isinstance(prefix, str) and 0 < len(prefix.encode(errors="replace")) <= 150:
        example = parse_file_name(FileName(prefix, 0, None, "full", 1, 1, "safetensors").name)
    if example is None or example.prefix != prefix:
        raise ArgumentError(f"`prefix` is {prefix!r}, which cannot begin the name of a file", hint='try "llama"')
    if "rank" in prefix:
        raise ArgumentError(
            f"`prefix` is {show(prefix)}: MindSpore Transformers refuses one with `rank` in it, since it looks for the "
            "rank's number there",
            hint="leave that word out",
        )
    return prefix


def position(
    iteration: int, *, sink_size: int | None = None, steps_per_epoch: int | None = None, epoch: int | None = None
) -> tuple[int, int]:
    """Epoch and step that a save is named by.

    In sink mode the loop counts sinks, so a sink is an epoch there, and its size the steps of one. Where neither is
    known, the step is the iteration itself, so that later saves have higher names all the same.

    Args:
        iteration: steps that were made.
        sink_size: steps of a sink, where the loop runs in sinks.
        steps_per_epoch: steps of an epoch.
        epoch: the epoch that the loop is in, where neither of these is known; default 1.

    Raises:
        ArgumentError: a size is not an integer of at least 1.

    Example:
        >>> position(40, sink_size=2), position(45, steps_per_epoch=20), position(45)
        ((20, 2), (3, 5), (1, 45))
    """
    for name, value in (("sink_size", sink_size), ("steps_per_epoch", steps_per_epoch)):
        if value is not None and (type(value) is not int or value < 1):
            raise ArgumentError(f"`{name}` is {value!r}, expected an integer of at least 1")
    size = steps_per_epoch if sink_size is None else sink_size
    if size is None:
        return (1 if epoch is None else epoch), iteration
    return (iteration - 1) // size + 1, (iteration - 1) % size + 1


def view_of(
    files: Iterable[FileName], prefix: str, at: tuple[int, int], *, has_folder: bool, has_meta: bool, has_more: bool
) -> FolderView:
    """What a rank reports of the files in its folders.

    Args:
        files: of all kinds.
        prefix: of the save to be.
        at: its epoch and step.
        has_folder: as in `FolderView`.
        has_meta: as there.
        has_more: as there.
    """
    own = [file for file in files if file.prefix == prefix]
    runs = {file.run or 0 for file in own}
    taken = {file.run or 0 for file in own if (file.epoch, file.step) == at}
    return FolderView(has_folder, has_meta, has_more, tuple(sorted(runs)), tuple(sorted(taken)))


def run_number(views: Sequence[FolderView], current: int | None) -> int:
    """The number of the run that a save belongs to; 0 is the first.

    Args:
        views: what the ranks found.
        current: the number that this run has already; None: it has not saved yet.

    Example:
        >>> run_number([FolderView()], None), run_number([FolderView(runs=(0, 1)), FolderView(runs=(0,))], None)
        (0, 2)
        >>> run_number([FolderView(runs=(0,))], 0), run_number([FolderView(runs=(0,), taken=(0,))], 0)
        (0, 1)
    """
    if current is not None and not any(current in view.taken for view in views):
        return current
    return max((run for view in views for run in view.runs), default=-1) + 1


def check_world(views: Sequence[FolderView], root: str, *, is_shared: bool) -> None:
    """Refuse to save into a root that holds saves of another number of ranks.

    MindSpore Transformers counts the folders of ranks: with too many or too few it would resume nothing or the wrong
    save.

    Args:
        views: what the ranks found.
        root: for the message.
        is_shared: whether all ranks see one root. If not, the folders of one may be gone with its disk.

    Raises:
        ArgumentError: there are such saves.
    """
    n_ranks = len(views)
    if any(view.has_more for view in views):
        found = "more"
    elif is_shared and any(view.has_meta for view in views) and not all(view.has_folder for view in views):
        found = "fewer"
    else:
        return
    raise ArgumentError(
        f"{show(root)} holds checkpoints of {found} than the {n_ranks} ranks that save now; in Checkpoint 1.0 a root "
        "belongs to one number of ranks",
        path=root,
        hint='save into another root, or with `format="checkpoint2"`',
    )


def assign(holders: Mapping[str, Sequence[tuple[int, ...]]], stage_of: Sequence[int]) -> ShardAssignment:
    """Who keeps what, if every shard is kept once: each group of ranks takes turns, in the order of names.

    Args:
        holders: by array, the groups of ranks whose copies hold the same bytes; only of those that the strategy lists.
            MindSpore Transformers does not read others from other ranks: every rank keeps them.
        stage_of: the pipeline stage of each rank: what two stages hold is kept by both, since MindSpore
            Transformers looks for a copy only in the stage.

    Example:
        >>> assign({"norm": [(0, 1, 2, 3)], "w": [(0, 2), (1, 3)], "a": [(0, 2), (1, 3)]}, [0, 0, 0, 0]).groups
        (((0, 1, 2, 3), ('norm',)), ((0, 2), ('a', 'w')), ((1, 3), ('a', 'w')))
    """
    groups: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(holders):
        for ranks in holders[name]:
            by_stage: dict[int, list[int]] = {}
            for rank in ranks:
                by_stage.setdefault(stage_of[rank], []).append(rank)
            for of_stage in by_stage.values():
                if len(of_stage) > 1:
                    groups.setdefault(tuple(of_stage), []).append(name)
    return ShardAssignment(tuple((ranks, tuple(names)) for ranks, names in sorted(groups.items())))


def outdated(files: Iterable[FileName], naming: Naming, keep: int | None) -> list[tuple[int, int]]:
    """Epochs and steps of this run that are not kept once the save is complete; the oldest first.

    Files of earlier runs do not count, as in MindSpore Transformers.

    Args:
        files: those of one rank, before the save.
        naming: of the save.
        keep: how many are kept, this one included; None: all.

    Raises:
        ArgumentError: `keep` is not an integer of at least 1.

    Example:
        >>> files = [Naming("llama", None, epoch, 2).file(0) for epoch in (5, 10, 15)]
        >>> outdated(files, Naming("llama", None, 20, 2), 3)
        [(5, 2)]
    """
    if keep is None:
        return []
    if type(keep) is not int or keep < 1:
        raise ArgumentError(f"`keep` is {keep!r}, expected an integer of at least 1")
    found = sorted(
        {
            (file.epoch, file.step)
            for file in files
            if file.kind == "full" and (file.prefix, file.run) == (naming.prefix, naming.run)
        }
        - {(naming.epoch, naming.step)}
    )
    return found[: max(0, len(found) + 1 - keep)]
