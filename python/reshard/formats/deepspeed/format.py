"""How a run of DeepSpeed, one of its saves and a universal folder are recognised. `reader` opens them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.formats.base import Format, Match
from reshard.formats.deepspeed import names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.formats.base import CheckpointData, OpenOptions
    from reshard.storage.location import Location


class DeepSpeed(Format):
    """A checkpoint of DeepSpeed."""

    traits = names.TRAITS

    def detect(self, path: Location) -> Match:
        """By the names of files of a save; of a root, by `latest` or by folders of saves."""
        if not path.is_folder():
            return Match.NO
        return Match.YES if _is_save(path, path.names()) or self.is_root(path) else Match.NO

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """The tensors of a save. Of a root, the save that `latest` names, else the newest complete one."""
        from reshard.formats.deepspeed import reader  # noqa: PLC0415  slow to import

        return (reader.open_root if self.is_root(path) else reader.open_folder)(path, options.method)

    def is_root(self, path: Location) -> bool:
        """Whether it holds folders of saves, and is none itself."""
        present = path.names()
        if _is_save(path, present):
            return False
        tags = [tag for name in (names.LATEST, names.LATEST_UNIVERSAL) if (tag := names.tag_of(path, name, present))]
        saves = (tag for tag in (*tags, *(name for name in present if names.step_of(name) is not None)))
        return any(_is_save_folder(path / tag) for tag in saves) or any(names.step_of(tag) is not None for tag in tags)


DEEPSPEED = DeepSpeed()


def _is_save(folder: Location, present: Sequence[str]) -> bool:
    return any(map(names.is_state_file, present)) or (names.ZERO_FOLDER in present and names.is_universal(folder))


def _is_save_folder(folder: Location) -> bool:
    return folder.is_folder() and _is_save(folder, folder.names())
