"""How the root of a run of Megatron-Core, and a folder of one iteration, are recognised. `reader` opens them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.commit.candidates import Candidate, Order
from reshard.formats.base import Format, Match, OpenOptions, Root
from reshard.formats.megatron import names
from reshard.formats.newest import open_newest

if TYPE_CHECKING:
    from reshard.formats.base import CheckpointData
    from reshard.storage.location import Location


class Megatron(Format):
    """A folder of one iteration of Megatron-Core, or the root of a run."""

    traits = names.TRAITS

    def detect(self, path: Location) -> Match:
        """By the names of files and folders, and the first bytes of `metadata.json`."""
        if not path.is_folder():
            return Match.NO
        listed = path.names()
        return Match.YES if names.is_iteration(path, listed) or names.iterations(path, listed) else Match.NO

    def root(self, path: Location, options: OpenOptions, *, exact: int | None = None) -> _Iterations | None:
        """The folders of iterations in a folder that is none itself."""
        listed = () if exact is not None else path.names()
        is_root = not names.is_iteration(path, listed) and bool(names.iterations(path, listed))
        return _Iterations(path, options) if is_root else None

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """One iteration; of a root, the newest that can be opened."""
        from reshard.formats.megatron import reader  # noqa: PLC0415  slow to import

        root = self.root(path, options)
        return reader.open_iteration(path, options) if root is None else open_newest(root)


class _Iterations(Root):
    """The folders of iterations, the newest first."""

    def __init__(self, path: Location, options: OpenOptions) -> None:
        super().__init__(path, options)
        found = enumerate(names.iterations(path, path.names()))
        self.order = Order(
            tuple(
                Candidate(names.iteration_of(name), name, "an older iteration" if n else "the newest iteration")
                for n, name in found
            )
        )

    def check(self) -> None:
        """A fault of the layout is no reason to skip an iteration."""
        from reshard.formats.given_layout import given_layout  # noqa: PLC0415  slow to import
        from reshard.formats.megatron import rank_folders  # noqa: PLC0415

        given_layout(self.options, rank_folders.HINT)

    def open(self, one: Candidate) -> CheckpointData:
        """The data of an iteration. That the tracker names another one is logged."""
        from reshard.formats.megatron import reader  # noqa: PLC0415  slow to import

        data = reader.open_iteration(self.place(one), self.options)
        reader.compare_tracker(self.path, one.name)
        return data


MEGATRON = Megatron()
