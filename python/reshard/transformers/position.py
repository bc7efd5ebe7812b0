"""The position of a training in its data: complete epochs, and complete batches of the current epoch.

A batch is a batch of all ranks, before gradient accumulation. With another batch size the position is converted to the
same sample. This module knows neither Trainer nor how data is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reshard.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_SAVED = ("epochs", "batches", "batch_size", "n_samples", "seed", "sampling", "plan")


@dataclass
class DataPosition:
    """The position in the data, and what it depends on. It is saved as the state of the sampler.

    Attributes:
        epochs, batches: complete epochs, and complete batches of the epoch after them.
        batch_size: number of samples of a batch over all ranks.
        n_samples: number of samples of the dataset; None: not known.
        seed: the seed of the order of the samples.
        sampling: how Trainer samples: "random", "sequential" or another name.
        plan: the number of epochs and the last step of the run, and the arguments of Trainer that they follow from.
        loader: the position of this rank in its loader, and how many ranks there were.
        position: makes `loader`, from the complete batches of the epoch; None: between two epochs.
    """

    epochs: int = 0
    batches: int = 0
    batch_size: int = 1
    n_samples: int | None = None
    seed: int = 0
    sampling: str = "random"
    plan: dict[str, Any] | None = None
    loader: dict[str, Any] | None = None
    position: Callable[[int | None], dict[str, Any]] | None = field(default=None, repr=False)
    _saved: DataPosition | None = None

    def state_dict(self) -> dict[str, Any]:
        """The position, as numbers and text."""
        loader = None if self.position is None else self.position(self.batches or None)
        return {name: getattr(self, name) for name in _SAVED} | {"loader": loader}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep a saved position for `resume`.

        Raises:
            MismatchError: the value is not such a position.
        """
        try:
            self._saved = DataPosition(**state)
        except TypeError as error:
            raise MismatchError(
                f"the checkpoint has another position in the data than Trainer: {error}",
                hint="the root holds checkpoints of another training; use another root",
            ) from error

    @property
    def saved(self) -> DataPosition | None:
        """The saved position, that of another run."""
        return self._saved

    def planned(self, arguments: Mapping[str, Any]) -> tuple[int, int] | None:
        """The number of epochs and the last step of the saved run; None: here they follow from something else.

        Args:
            arguments: the arguments of Trainer that they follow from.
        """
        saved = self._saved
        if saved is None or saved.plan is None or saved.plan["arguments"] != dict(arguments):
            return None
        if (saved.batch_size, saved.n_samples) != (self.batch_size, self.n_samples):
            return None
        return saved.plan["epochs"], saved.plan["last"]

    def resume(self, accumulated: int, *, ignore_data_skip: bool) -> list[str]:
        """Go to the saved position.

        Args:
            accumulated: number of batches of a step.
            ignore_data_skip: start at the beginning of the epoch.

        Returns:
            Messages about differences.

        Raises:
            MismatchError: within an epoch the order of the samples is another one.

        Example:
            >>> now = DataPosition(batch_size=4)
            >>> now.load_state_dict(DataPosition(epochs=1, batches=3, batch_size=8).state_dict())
            >>> now.resume(1, ignore_data_skip=False)
            []
            >>> now.epochs, now.batches
            (1, 6)
        """
        saved = self._saved
        if saved is None:
            return []
        self.epochs, self.batches = saved.epochs, 0
        differences = [
            f"`{name}` is {now}, and was {before}"
            for name in ("n_samples", "seed", "sampling")
            if (now := getattr(self, name)) != (before := getattr(saved, name))
        ]
        if ignore_data_skip:
            return [f"`ignore_data_skip`: epoch {saved.epochs} starts again"] if saved.batches else []
        if not saved.batches:
            return [f"the data has changed: {one}" for one in differences]
        if differences:
            raise MismatchError(
                f"the checkpoint is within epoch {saved.epochs}, and the order of the samples is another one: "
                f"{'; '.join(differences)}",
                hint="use the saved dataset and seed, or `TrainingArguments(ignore_data_skip=True)`, which starts the "
                'epoch again, or `ReshardCallback(data="new")` for another dataset',
            )
        n_read = saved.batches * saved.batch_size
        whole = n_read // (self.batch_size * accumulated)
        self.batches = whole * accumulated
        again = n_read - self.batches * self.batch_size
        if not again:
            return []
        size = self.batch_size * accumulated
        note = f"{n_read} samples of the epoch are read, not a multiple of {size}: the last {again} are read again"
        return [note]
