"""The strategy files of a Checkpoint 1.0 root, without which its tensors cannot be put together.

They are where MindSpore Transformers looks for them: in `strategy` beside a root that is called `checkpoint`. Beside
any other root there may be more roots, so they are in the root. A root has one strategy: a later save must have the
same partitions, or an older save would be read with the partitions of a newer one.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from reshard.commit import filesystem
from reshard.commit.folder_protocol import make_root
from reshard.errors import (
    CheckpointNotFoundError,
    DamagedFileError,
    LayoutError,
    MismatchError,
    ReshardError,
    StorageError,
    UnsupportedError,
)
from reshard.formats.checkpoint1.names import STRATEGY_FOLDER
from reshard.layout.bind import BoundLayout
from reshard.layout.strategy_file import is_strategy
from reshard.layout.strategy_folder import read_strategy
from reshard.layout.strategy_writer import strategy_of, write_stage_files
from reshard.storage.changes import remove_folder
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reshard.layout import ModelLayout
    from reshard.layout.strategy import DeviceCut, Strategy
    from reshard.storage.location import Location

Shapes: TypeAlias = dict[str, tuple[tuple[int, ...], bool]]
"""Of each tensor the global shape, and whether it belongs to the optimizer."""

_ROOT = "checkpoint"  # the name of a root in MindSpore Transformers
_DEBRIS = re.compile(rf"\.{STRATEGY_FOLDER}\.[0-9a-f]{{16}}\.tmp(\.old\.tmp)?")
_MAX_NAMED = 3
_log = logging.getLogger("reshard")


def strategy_folder(root: Location) -> Location:
    """The folder of the strategy of a root.

    Example:
        >>> from reshard.storage.location import locate
        >>> str(strategy_folder(locate("output/checkpoint"))), str(strategy_folder(locate("runs/7")))
        ('output/strategy', 'runs/7/strategy')
    """
    return root.parent / STRATEGY_FOLDER if root.name == _ROOT else root / STRATEGY_FOLDER


def make(layout: BoundLayout | ModelLayout, shapes: Shapes, root: Location) -> Strategies:
    """The strategy of what is saved into a root.

    Args:
        layout: how the tensors are partitioned. Rules are bound here, because a rank of another host gets shapes alone.
        shapes: the tensors.
        root: the checkpoint root.

    Raises:
        UnsupportedError: a strategy cannot express the partition of a tensor; the message names it and the reason.
    """
    tensors = {key: shape for key, (shape, _) in shapes.items()}
    states = [key for key, (_, is_state) in shapes.items() if is_state]
    if isinstance(layout, BoundLayout):
        strategy = strategy_of(layout.only(tensors))
    else:
        strategy = layout.to_strategy(tensors, optimizer_keys=states)
    return Strategies(strategy_folder(root), strategy, tensors)


@dataclass(eq=False)
class Strategies:
    """The partitions of all tensors that are saved, and the folder of the strategy files.

    Attributes:
        folder: where.
        strategy: how.
        tensors: the global shapes.
    """

    folder: Location
    strategy: Strategy
    tensors: Mapping[str, tuple[int, ...]]
    _written: tuple[object, int] | None = None  # the folder, when it last had the same content

    @property
    def devices_per_stage(self) -> int:
        """Ranks of a pipeline stage."""
        return self.strategy.devices_per_stage

    def check_same(self, *, is_used: bool) -> None:
        """Refuse tensors with other partitions than those in the root.

        Args:
            is_used: whether the root holds saves.

        Raises:
            MismatchError: a tensor has another partition there.
        """
        there = None if self._is_known() else self._there()
        if not is_used or there is None:
            return
        is_same = self._is_as(there)
        differing = [key for key in self.tensors if not is_same(key)]
        if differing:
            named = listed(map(show, differing), _MAX_NAMED)
            raise MismatchError(
                f"{show(str(self.folder))} says that what was saved before is cut otherwise: {named}",
                path=str(self.folder),
                key=differing[0],
                hint='save into another root: in Checkpoint 1.0 a root has one strategy; with `format="checkpoint2"` '
                "every iteration has its own",
            )

    def write(self, mode: int, folder_mode: int, *, durable: bool) -> None:
        """Write a file for each rank, unless the folder has the same content.

        Args:
            mode: permission bits of the files, less the umask.
            folder_mode: permission bits of the folder, less the umask.
            durable: sync the files and the folder.

        Raises:
            StorageError: the system failed; what was there is as it was, or already the new.
        """
        if self._is_known():
            return
        there = self._there()
        is_there = there is not None and set(self.strategy.keys()) <= set(there.keys())
        if there is None or not is_there or not all(map(self._is_as(there), self.tensors)):
            filesystem.announce(f"write {STRATEGY_FOLDER}")
            self._replace(mode, folder_mode, durable=durable)
        self._written = self._state()

    def files(self) -> list[tuple[str, int]]:
        """Names and sizes of what is written."""
        paths = [self.folder / name for name in filesystem.names(self.folder)]
        return [(path.name, path.stat().n_bytes) for path in paths if is_strategy(path)]

    def _is_known(self) -> bool:
        """Whether the folder is the very one that was written, or found to say the same."""
        return self._written is not None and self._written == self._state()

    def _state(self) -> tuple[object, int] | None:
        try:
            found = self.folder.stat(follow_links=True)
        except ReshardError:
            return None
        return found.identity, found.modified_ns

    def _replace(self, mode: int, folder_mode: int, *, durable: bool) -> None:
        """A new folder under a hidden name takes the place of the old one: files of two strategies never mix."""
        make_root(self.folder.parent, folder_mode, durable=durable)
        for name in filesystem.names(self.folder.parent):
            if _DEBRIS.fullmatch(name):  # of a writer that was killed
                remove_folder(self.folder.with_name(name))
        new = self.folder.with_name(f".{STRATEGY_FOLDER}.{os.urandom(8).hex()}.tmp")
        try:
            filesystem.make_folder(new, folder_mode, durable=False)
            write_stage_files(self.strategy, new, mode=mode, durable=durable)
            if self.folder.exists():
                self._exchange(new)
            else:
                filesystem.rename(new, self.folder)
            if durable:
                filesystem.sync(self.folder.parent)
        finally:
            remove_folder(new)  # the old one by now, unless something failed

    def _exchange(self, new: Location) -> None:
        try:
            filesystem.exchange(new, self.folder)
        except StorageError:
            # Not every file system can. Ending between the two leaves none for a moment; the next save writes it.
            old = new.with_name(f"{new.name}.old.tmp")
            filesystem.rename(self.folder, old)
            filesystem.rename(new, self.folder)
            filesystem.rename(old, new)

    def _there(self) -> Strategy | None:
        """The strategy in the folder; None if it holds none."""
        try:
            return read_strategy(self.folder)
        except CheckpointNotFoundError:
            return None
        except (DamagedFileError, LayoutError) as error:
            _log.warning("%s is written again: %s", self.folder, error.message)
            return None

    def _is_as(self, there: Strategy) -> Callable[[str], bool]:
        """A function: does a tensor have the same partition there? One that is not listed there was not saved."""
        known: dict[tuple[DeviceCut | None, DeviceCut | None], bool] = {}

        def is_same(key: str) -> bool:
            if there.world_size != self.strategy.world_size or there.n_stages != self.strategy.n_stages:
                return False
            if not there.stages_of(key):
                return True
            shape = self.tensors[key]
            for stage in range(self.strategy.n_stages):
                rank = stage * self.devices_per_stage
                try:
                    here = self.strategy.cut_of(key, rank, len(shape), shape)
                    other = there.cut_of(key, rank, len(shape), shape)
                except (MismatchError, UnsupportedError):
                    return False
                if (here, other) not in known:
                    known[here, other] = _is_same(here, other, self.devices_per_stage)
                if not known[here, other]:
                    return False
            return True

        return is_same


def _is_same(a: DeviceCut | None, b: DeviceCut | None, n_devices: int) -> bool:
    if a is None or b is None:
        return a is b
    return (a.parts(), a.sizes) == (b.parts(), b.sizes) and all(
        a.part_of(position) == b.part_of(position) for position in range(n_devices)
    )
