"""How a folder of `transformers.Trainer` or accelerate with an optimizer is recognised. `reader` opens it.

The formats of its weights come first: without `format="trainer-run"`, such a folder is opened as a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.formats.base import Format, Match
from reshard.formats.trainer_run import names

if TYPE_CHECKING:
    from reshard.formats.base import CheckpointData, OpenOptions
    from reshard.storage.location import Location


class TrainerRun(Format):
    """A folder of `transformers.Trainer` with the state of the run."""

    traits = names.TRAITS

    def detect(self, path: Location) -> Match:
        """By the files with the state of the trainer and of the optimizer."""
        return Match.YES if path.is_folder() and names.files(path.names()) else Match.NO

    def has_own_weights(self, path: Location) -> bool:
        """Whether a folder is a run whose weights are not those of a model beside it."""
        of_run = names.files(path.names()) if path.is_folder() else None
        return of_run is not None and (of_run.is_deepspeed or of_run.model is not None)

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """The weights, the state of the optimizer, and the values beside them."""
        from reshard.formats.trainer_run import reader  # noqa: PLC0415  slow to import

        return reader.open_folder(path, options)


TRAINER_RUN = TrainerRun()
