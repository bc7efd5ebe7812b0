"""How a run of DeepSpeed, one of its saves and a universal folder are recognised. `reader` opens them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.commit.candidates import Candidate, Order
from reshard.errors import DamagedFileError
from reshard.formats.base import Format, Match, OpenOptions, Root
from reshard.formats.deepspeed import names
from reshard.formats.newest import open_newest
from reshard.formats.trainer_run import names as trainer_run_names
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.formats.base import CheckpointData
    from reshard.storage.location import Location


_NAMED_BY = "named by "


class DeepSpeed(Format):
    """A checkpoint of DeepSpeed."""

    traits = names.TRAITS

    def detect(self, path: Location) -> Match:
        """By the names of files of a save; of a root, by `latest` or by folders of saves.

        In a folder of Trainer they are a part of its run, and the formats of the run are tried first.
        """
        if not path.is_folder():
            return Match.NO
        present = path.names()
        if _is_save(path, present):
            return Match.YES
        if self.root(path, OpenOptions()) is None:
            return Match.NO
        return Match.FALLBACK if trainer_run_names.holds_deepspeed(present) else Match.YES

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """The tensors of a save. Of a root, the save that `latest` names, else the newest complete one."""
        from reshard.formats.deepspeed import reader  # noqa: PLC0415  slow to import

        root = self.root(path, options)
        return reader.open_folder(path, options.method) if root is None else open_newest(root)

    def root(self, path: Location, options: OpenOptions, *, exact: int | None = None) -> _Tags | None:
        """The folders of saves in a folder that is none itself."""
        present = () if exact is not None else path.names()
        if _is_save(path, present):
            return None
        tags = [tag for name in (names.LATEST, names.LATEST_UNIVERSAL) if (tag := names.tag_of(path, name, present))]
        saves = (tag for tag in (*tags, *(name for name in present if names.step_of(name) is not None)))
        is_named = any(names.step_of(tag) is not None for tag in tags)
        return _Tags(path, options) if is_named or any(_is_save_folder(path / tag) for tag in saves) else None


class _Tags(Root):
    """The folders of saves: the one that `latest` names, then those of default tags, the newest first."""

    def __init__(self, path: Location, options: OpenOptions) -> None:
        super().__init__(path, options)
        present = path.names()
        steps = sorted(((step, name) for name in present if (step := names.step_of(name)) is not None), reverse=True)
        found = [name for _, name in steps if (path / name).is_folder()]
        latest, universal = (names.tag_of(path, name, present) for name in (names.LATEST, names.LATEST_UNIVERSAL))
        why = {latest: _NAMED_BY + names.LATEST} if latest else {}
        for n, name in enumerate(found):
            why.setdefault(name, "a lower step" if n else "the highest step")
        if universal:
            why.setdefault(universal, _NAMED_BY + names.LATEST_UNIVERSAL)
        self.order = Order(tuple(Candidate(names.step_of(tag), tag, reason) for tag, reason in why.items()))

    def open(self, one: Candidate) -> CheckpointData:
        """The data of a save."""
        from reshard.formats.deepspeed import reader  # noqa: PLC0415  slow to import

        if not self.place(one).is_folder():
            file = one.reason.removeprefix(_NAMED_BY)
            raise DamagedFileError(f"{show(file)} names it, but there is no such folder")
        return reader.open_folder(self.place(one), self.options.method)


DEEPSPEED = DeepSpeed()


def _is_save(folder: Location, present: Sequence[str]) -> bool:
    return any(map(names.is_state_file, present)) or (names.ZERO_FOLDER in present and names.is_universal(folder))


def _is_save_folder(folder: Location) -> bool:
    return folder.is_folder() and _is_save(folder, folder.names())
