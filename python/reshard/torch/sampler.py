"""`ElasticSampler`: the samples that a rank reads, in an order that does not depend on the number of ranks.

There is one global order of the samples, which depends only on the seed, the epoch and the length of the dataset, and
one position in it. A step takes the next `global_batch_size` samples; rank r of W takes the r-th of W equal contiguous
parts of these. So the number of ranks and the batch size may change at every restart, and every sample is still read
once per epoch.

The position counts completed steps. Only `step` moves it, not the prefetching of workers. The class describes the end
of an epoch, and `load_state_dict` describes changed datasets. This module reads no data and does not communicate.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from reshard.errors import ArgumentError, MismatchError
from reshard.ranks.group import log_of_all
from reshard.torch.checks import MAX_SEED, count, shown
from reshard.torch.permutation import MAX_LEN, Permutation

_KIND = "reshard.ElasticSampler/1"  # version of the state and of the order; a different order needs a new number
_N_PACES = 8  # steps in each of which a loop reads too many samples before a warning; workers begin within fewer
_N_HELD = 3  # references to an iterator that only its loader holds: of the loader, a local name and an argument
_BLOCK = 1 << 14  # indices that are computed at a time, rounded to whole steps

Item = TypeVar("Item", int, list[int])


class ElasticSampler(Sampler[int]):
    """The sample indices of one rank, for `DataLoader(..., sampler=)`. Its state fits any number of ranks.

    Call `step` after every training step (a `Checkpointer` with this sampler does so)::

        sampler = ElasticSampler(len(dataset), seed, True, 512, dp_rank, dp_size)
        loader = DataLoader(dataset, batch_size=sampler.local_batch_size, sampler=sampler, num_workers=4,
                            generator=torch.Generator())
        while sampler.epoch < 3:
            for batch in loader:
                train(batch)
                sampler.step()

    Iteration starts after the last completed step and ends with the epoch. A loop that was interrupted continues after
    its last completed step. `step` enters the next epoch, which has another order, as soon as the last batch is
    complete. `batch_size` of the loader may be any divisor of `local_batch_size` (gradient accumulation). If a loop
    reads an epoch to its end, but more or fewer steps were completed, the next loop logs a warning.

    Every new loop over a DataLoader without a generator draws one number from the random stream of torch. If a
    `Checkpointer` resumed within an epoch, the first loop over the sampler takes this draw back, because the
    uninterrupted run did not make it there. Pass a generator, as above, if the program ends loops within an epoch or
    uses `persistent_workers`, or draws random numbers between `resume` and the loop.

    The rest of an epoch that is smaller than a batch is dropped (different samples in each epoch, if shuffled). With
    `drop_last=False` it is filled up to a whole batch with the first samples of the same epoch, which are then read
    twice in this epoch.

    With `StatefulDataLoader` use `sampler=` or `batch_sampler=sampler.batches()`. The state of the loader need not be
    saved. If it is loaded, its position replaces that of the sampler, so take it when all steps are complete.

    Args:
        dataset_len: number of samples in the dataset, 1 to 2^62.
        seed: the seed of the order, 0 to 2^63 - 1.
        shuffle: whether each epoch has a random order; if False, all have that of the dataset.
        global_batch_size: number of samples of a step over all ranks; a multiple of `world_size`.
        rank: this rank among the data-parallel ranks.
        world_size: number of data-parallel ranks.
        drop_last: whether the rest of an epoch that is smaller than a batch is dropped.

    Raises:
        ArgumentError: the batch size is not a multiple of the world size, an epoch has no batch, or a number is out of
            range.

    Example:
        >>> two = [ElasticSampler(10, 7, True, 4, rank, 2) for rank in range(2)]
        >>> for sampler in two:
        ...     sampler.step()
        >>> one = ElasticSampler(10, 7, True, 4, 0, 1)
        >>> one.load_state_dict(two[1].state_dict())
        []
        >>> list(one) == list(two[0]) + list(two[1])
        True
    """

    def __init__(  # noqa: PLR0917 - positional arguments as in `DistributedSampler`
        self,
        dataset_len: int,
        seed: int,
        shuffle: bool,  # noqa: FBT001
        global_batch_size: int,
        rank: int,
        world_size: int,
        *,
        drop_last: bool = True,
    ) -> None:
        self.dataset_len = count("dataset_len", dataset_len, 1, MAX_LEN)
        self.world_size = count("world_size", world_size, 1)
        self.rank = count("rank", rank, 0, world_size - 1)
        self.global_batch_size = count("global_batch_size", global_batch_size, 1)
        self.drop_last = drop_last
        if global_batch_size % world_size:
            raise ArgumentError(
                f"the global batch size {global_batch_size} is not a multiple of {world_size} ranks",
                hint=f"use a multiple of {world_size}, or another number of ranks",
            )
        if drop_last and dataset_len < global_batch_size:
            raise ArgumentError(
                f"a dataset of {dataset_len} samples is smaller than one batch of {global_batch_size}",
                hint="use a smaller batch, or `drop_last=False`",
            )
        self._state = _State(
            kind=_KIND,
            epoch=0,
            consumed=0,
            total=0,
            seed=count("seed", seed, 0, MAX_SEED),
            shuffle=bool(shuffle),
            dataset_len=self.dataset_len,
            epoch_len=self.dataset_len,
            first_epoch=0,
        )
        self._stream: torch.Tensor | None = None  # to which the draw of the next loader is taken back
        self._read: tuple[int, int] | None = None  # of the last loop to the end: `total` at its start, number of steps
        self._has_warned = False
        self._reader: weakref.ref[_ReadAhead[Any]] | None = None  # of the current loop
        self._ahead: list[int] = []  # after its last steps, how many samples more were read than completed

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None, "_ahead": []}  # a loop is not pickled

    def __repr__(self) -> str:
        state = self._state
        return (
            f"<reshard.torch.ElasticSampler rank {self.rank} of {self.world_size}, epoch {state.epoch}, "
            f"{state.consumed} of {state.epoch_len} samples, {self.global_batch_size} a step>"
        )

    @property
    def epoch(self) -> int:
        """Index of the current epoch: the number of complete passes over the data."""
        return self._state.epoch

    @property
    def consumed(self) -> int:
        """Number of samples of the current epoch in completed steps, over all ranks."""
        return self._state.consumed

    @property
    def total(self) -> int:
        """Number of samples in completed steps since training began, over all ranks and datasets."""
        return self._state.total

    @property
    def seed(self) -> int:
        """The seed of the order. Loading a state replaces it."""
        return self._state.seed

    @property
    def shuffle(self) -> bool:
        """Whether each epoch has a random order."""
        return self._state.shuffle

    @property
    def local_batch_size(self) -> int:
        """Number of samples of a step on this rank."""
        return self.global_batch_size // self.world_size

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in a full epoch."""
        whole, rest = divmod(self.dataset_len, self.global_batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __len__(self) -> int:
        """Number of indices of this rank in a full epoch; the current epoch may have fewer left."""
        return self.steps_per_epoch * self.local_batch_size

    def __iter__(self) -> Iterator[int]:
        return _Indices(self)

    def batches(self, batch_size: int | None = None) -> ElasticBatches:
        """The same indices in batches, for `DataLoader(..., batch_sampler=)`.

        Args:
            batch_size: number of indices per batch, a divisor of `local_batch_size`; by default `local_batch_size`.

        Raises:
            ArgumentError: `batch_size` is not a divisor of `local_batch_size`.

        Example:
            >>> list(ElasticSampler(8, 0, False, 4, 1, 2).batches())
            [[2, 3], [6, 7]]
        """
        return ElasticBatches(self, self.local_batch_size if batch_size is None else batch_size)

    def step(self, n_steps: int = 1) -> None:
        """Mark steps as complete: their samples count as consumed.

        Raises:
            ArgumentError: a negative number of steps.

        Example:
            >>> sampler = ElasticSampler(10, 0, True, 4, 0, 1)
            >>> sampler.step(3)
            >>> sampler.epoch, sampler.consumed, sampler.total
            (1, 4, 12)
        """
        self._state = self._state_after(self._state, count("n_steps", n_steps, 0))
        self._stream = None
        self._check_pace()

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of a later epoch, as with `DistributedSampler`. Has no effect for the current epoch.

        Raises:
            ArgumentError: the epoch is complete.

        Example:
            >>> sampler = ElasticSampler(10, 0, True, 4, 0, 1)
            >>> sampler.step()
            >>> sampler.set_epoch(0)
            >>> sampler.consumed
            4
        """
        if count("epoch", epoch, 0) < self.epoch:
            raise ArgumentError(
                f"epoch {epoch} is complete: the sampler is in epoch {self.epoch}",
                hint="start the loop at the epoch of the sampler: `range(sampler.epoch, n_epochs)`",
            )
        if epoch > self.epoch:
            self._state = replace(self._state, epoch=int(epoch), consumed=0, epoch_len=self.dataset_len)

    def state_dict(self) -> dict[str, Any]:
        """The position after the completed steps, as numbers and text: the same on every rank.

        Example:
            >>> ElasticSampler(10, 3, True, 4, 0, 1).state_dict()["consumed"]
            0
        """
        return asdict(self._state)

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        *,
        ignore_data_skip: bool = False,
        data_skip_steps: int | None = None,
        grown: bool = False,
    ) -> list[str]:
        """Continue from a saved state, of any number of ranks and any batch size.

        The saved seed is used, and a message reports that the seed of the sampler is another one.

        A dataset of the same length is assumed to be the same, and the saved order continues. A dataset of another
        length is new data: the counts of epochs and samples continue, and the new data is read

        - from the start, if the state is at the start of an epoch;
        - from the start, with `ignore_data_skip`, also for new data of the same length;
        - after `data_skip_steps` steps of the current batch size, which may span several epochs; the total count of
          consumed samples stays that of the state;
        - with `grown`, from the next epoch on: samples were appended to the dataset, and the rest of the current epoch
          is read in its old order, so that every sample is read once in it.

        Within an epoch one of these options is required. MindSpore Transformers skips as many steps as were made on
        the old data, and so leaves out samples of the new data.

        Args:
            state: a value of `state_dict`.
            ignore_data_skip: read the data from the start. Overrides `data_skip_steps`, as in MindSpore Transformers.
            data_skip_steps: number of steps to skip from the start of the data.
            grown: the dataset is the saved one with samples appended.

        Returns:
            Messages about changes; empty if the saved order continues.

        Raises:
            ArgumentError: `state` is not a state of an `ElasticSampler`.
            MismatchError: the length of the dataset differs within an epoch and no option is given; `grown` is given
                and the dataset is not longer; or `shuffle` differs. The sampler is unchanged then.
        """
        saved = _State.parse(state)
        if saved.shuffle != self.shuffle:
            raise MismatchError(
                f"the state was saved with shuffle={saved.shuffle}, this sampler has shuffle={self.shuffle}"
            )
        sizes = f"the dataset has {self.dataset_len} samples, the saved one had {saved.dataset_len}"
        is_new = saved.dataset_len != self.dataset_len
        first_epoch = saved.epoch if is_new or ignore_data_skip else saved.first_epoch
        restarted = replace(saved, dataset_len=self.dataset_len, epoch_len=self.dataset_len, first_epoch=first_epoch)
        messages: list[str] = []
        if ignore_data_skip:
            state_now = replace(restarted, consumed=0)
            messages.append("ignore_data_skip: the data is read from the start")
        elif data_skip_steps is not None:
            epochs, steps = divmod(count("data_skip_steps", data_skip_steps, 0), self.steps_per_epoch)
            state_now = replace(restarted, epoch=first_epoch + epochs, consumed=steps * self.global_batch_size)
            messages.append(f"data_skip_steps: {data_skip_steps} steps of data are skipped")
        elif not is_new:
            state_now = saved
        elif saved.consumed == 0:
            state_now = restarted
            messages.append(f"{sizes}: it is read from the start")
        elif grown and saved.dataset_len < self.dataset_len:
            state_now = replace(saved, dataset_len=self.dataset_len)
            messages.append(f"{sizes}: epoch {saved.epoch} ends after the {saved.epoch_len} samples of its start")
        else:
            raise MismatchError(
                f"{sizes}, {saved.consumed} of which are consumed",
                hint='`resume(data="new")` reads new data from its start; `resume(grown=True)` is for more samples; '
                "`ElasticSampler.load_state_dict` also takes `ignore_data_skip` and `data_skip_steps`",
            )
        if saved.shuffle and saved.seed != self.seed:
            messages.append(
                f"seed {self.seed} of the sampler is not used: the order of the saved seed {saved.seed} continues"
            )
        self._read = None
        # With a larger batch the rest of the epoch may be less than one batch.
        self._state = self._state_after(state_now, 0)
        if self.epoch != state_now.epoch:
            left = state_now.epoch_len - state_now.consumed
            messages.append(
                f"the last {left} samples of epoch {state_now.epoch} are dropped: fewer than a batch of "
                f"{self.global_batch_size}"
            )
        return messages

    def _take_back_draw(self) -> None:
        """Set the random stream of torch to its state before the draw of a loader, if that was the only draw."""
        before, self._stream = self._stream, None
        if before is None:
            return
        after = torch.Generator()
        after.set_state(before)
        torch.empty((), dtype=torch.int64).random_(generator=after)  # as a DataLoader draws the seed of its workers
        if torch.equal(torch.get_rng_state(), after.get_state()):
            torch.set_rng_state(before)

    def _check_read(self) -> None:
        """Warn once if the last loop to the end of the epoch read samples of more or fewer steps than were completed.

        Only the start of the next loop shows this: workers of a loader read ahead, and the last steps come after the
        last index.
        """
        read, self._read = self._read, None
        if read is None:
            return
        total, n_steps = read
        n_made, local = (self.total - total) // self.global_batch_size, self.local_batch_size
        if n_made in {0, n_steps} or self._has_warned:
            return
        self._has_warned = True
        effect = "are read again, if the loop was not left early" if n_made < n_steps else "are left out"
        log_of_all(
            self.rank,
            f"the last loop over the sampler read {n_steps * local} samples of this rank, and {n_made} steps of {local}"
            f" samples were completed: samples {effect}; pass the loader `batch_size=sampler.local_batch_size`, or a "
            "divisor of it, and complete a step after so many samples",
        )

    def _check_pace(self) -> None:
        """Warn once if the current loop reads more or fewer samples for a step than a step has.

        Fewer were read than are complete, or the lead grows by the same number in each of several steps. Loaders that
        read ahead have a lead that stays: so many samples as their workers hold.
        """
        reader = None if self._reader is None else self._reader()
        if reader is None or self._has_warned or reader.epoch != self.epoch:
            self._ahead = []
            return
        local = self.local_batch_size
        n_done = (self.total - reader.first_sample) // self.global_batch_size * local
        self._ahead = [*self._ahead[-_N_PACES:], reader.n_read - n_done]
        changes = {after - before for before, after in itertools.pairwise(self._ahead)}
        is_fast = len(self._ahead) > _N_PACES and len(changes) == 1 and min(changes) > 0
        is_slow = len(self._ahead) > 1 and max(self._ahead[-2:]) < 0
        if not is_fast and not is_slow:
            return
        self._has_warned = True
        effect = "samples are left out after a resume" if is_slow else "samples are read again after a resume"
        log_of_all(
            self.rank,
            f"the loop reads {'fewer' if is_slow else 'more'} than {local} samples of this rank for a step, which the "
            f"global batch size of {self.global_batch_size} says: {effect}; give the sampler "
            "`global_batch_size=` loader batch x accumulated batches x ranks, and complete a step after so many "
            "samples",
        )

    def _steps_left(self, state: _State) -> int:
        whole, rest = divmod(state.epoch_len - state.consumed, self.global_batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def _state_after(self, state: _State, n_steps: int) -> _State:
        """The state after `n_steps` more steps; at the end of an epoch, the start of the next one."""
        total = state.total + n_steps * self.global_batch_size
        left = self._steps_left(state)
        if n_steps < left:
            return replace(state, consumed=state.consumed + n_steps * self.global_batch_size, total=total)
        epochs, steps = divmod(n_steps - left, self.steps_per_epoch)
        return replace(
            state,
            epoch=state.epoch + 1 + epochs,
            consumed=steps * self.global_batch_size,
            total=total,
            epoch_len=self.dataset_len,
        )


def check_not_read(loaders: Iterable[object]) -> None:
    """Check that no iterator over a sampler or loader is in use: a position that is set now would not reach it.

    Args:
        loaders: samplers and loaders; other objects are left out.

    Raises:
        ArgumentError: an iterator is in use.
    """
    for one in loaders:
        if _is_in_use(one):
            raise ArgumentError(
                f"an iterator over the {type(one).__name__} was made before `resume`: it would repeat samples",
                hint="call `iter(loader)`, or begin the loop, after `resume`",
            )


def _is_in_use(one: object) -> bool:
    """Whether there is an iterator over a sampler, or somebody but the loader itself holds one over a loader."""
    if isinstance(one, ElasticSampler):
        reader = None if one._reader is None else one._reader()  # noqa: SLF001 - same module
        return reader is not None and reader.is_within
    held = vars(one).get("_iterator") if issubclass(type(one), DataLoader) else None
    return held is not None and sys.getrefcount(held) > _N_HELD


def keep_stream(sampler: ElasticSampler) -> None:
    """Keep the current state of the random stream of torch over the draw of the next loader of a resumed sampler.

    A loader without a generator draws a number when a loop over it begins. At the start of an epoch the uninterrupted
    run drew it, too, and it is kept. Within an epoch the uninterrupted run was in the loop, and the draw is taken back
    when the loader reads the first index, which it does after the draw.
    """
    sampler._stream = torch.get_rng_state() if sampler.consumed else None  # noqa: SLF001 - same module


class ElasticBatches(Sampler[list[int]]):
    """The indices of an `ElasticSampler` in batches; created by `ElasticSampler.batches`."""

    def __init__(self, sampler: ElasticSampler, batch_size: int) -> None:
        if sampler.local_batch_size % count("batch_size", batch_size, 1):
            raise ArgumentError(
                f"batch_size {batch_size} is not a divisor of the {sampler.local_batch_size} samples of a rank per step"
            )
        self.sampler = sampler
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.sampler) // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return _Lists(self.sampler, self.batch_size)


class _ReadAhead(Iterator[Item], Generic[Item]):
    """Iterates over the indices of a rank from the position of the sampler to the end of the epoch.

    It has a state for `StatefulDataLoader`, which takes the state when a batch is sent to a worker and returns it
    together with that batch. So this is the state of the sampler once all returned batches are trained on. The state of
    the sampler itself, taken at the same time, lags behind; loading this state corrects it.
    """

    def __init__(self, sampler: ElasticSampler, size: int) -> None:
        self._sampler = sampler
        self._size = size
        self._begin()

    def _begin(self, within: int = 0) -> None:
        sampler = self._sampler
        self._start = state = sampler._state  # noqa: SLF001 - same module
        self._order = Permutation(state.epoch_len, state.seed, state.epoch) if state.shuffle else None
        self._n_steps = sampler._steps_left(state)  # noqa: SLF001
        self._n_computed = 0
        self._block: list[int] = []
        self._at = 0
        if within:
            self._next_block()
            self._at = within

    @property
    def epoch(self) -> int:
        """The epoch whose indices these are."""
        return self._start.epoch

    @property
    def first_sample(self) -> int:
        """How many samples were completed in all when the loop began, over all ranks."""
        return self._start.total

    @property
    def n_read(self) -> int:
        """How many indices of this rank were read."""
        return self._n_computed * self._sampler.local_batch_size - len(self._block) + self._at

    def __iter__(self) -> Self:
        return self

    @property
    def is_within(self) -> bool:
        """Whether it has read indices, and has not come to the end."""
        return self._n_computed > 0 and (self._at < len(self._block) or self._n_computed < self._n_steps)

    def _next_block(self) -> None:
        """Compute the indices of the next whole steps."""
        sampler, local = self._sampler, self._sampler.local_batch_size
        sampler._take_back_draw()  # noqa: SLF001
        if self._n_computed == 0:
            sampler._check_read()  # noqa: SLF001
            sampler._reader, sampler._ahead = weakref.ref(self), []  # noqa: SLF001
        n_steps = min(max(1, _BLOCK // local), self._n_steps - self._n_computed)
        if n_steps == 0:
            sampler._read = (self._start.total, self._n_steps)  # noqa: SLF001
            raise StopIteration
        first = self._start.consumed + self._n_computed * sampler.global_batch_size + sampler.rank * local
        positions = first + sampler.global_batch_size * np.arange(n_steps)[:, None] + np.arange(local)
        positions %= self._start.epoch_len  # `drop_last=False` fills the last batch from the start of the epoch
        indices = positions if self._order is None else self._order.at(positions)
        self._block, self._at = indices.reshape(-1).tolist(), 0
        self._n_computed += n_steps

    def state_dict(self) -> dict[str, Any]:
        """The state of the sampler after the whole steps that were read, and the number of indices read after them."""
        local = self._sampler.local_batch_size
        steps, within = divmod(self.n_read, local)
        state = self._sampler._state_after(self._start, steps)  # noqa: SLF001
        return {"sampler": asdict(state), "within": within, "local_batch_size": local}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, and set the sampler to it."""
        if not isinstance(state, Mapping) or set(state) != {"sampler", "within", "local_batch_size"}:
            raise ArgumentError(f"not the state of an iterator over an ElasticSampler: {shown(state)}")
        local = count("local_batch_size", state["local_batch_size"], 1)
        within = count("within", state["within"], 0, local - 1)
        if within and (local != self._sampler.local_batch_size or within % self._size):
            raise MismatchError(
                f"the state was taken within a step, after {within} of {local} samples of a rank; now a rank has "
                f"{self._sampler.local_batch_size} samples in a step, in batches of {self._size}",
                hint="save when all steps are complete",
            )
        self._sampler.load_state_dict(state["sampler"])
        self._begin(within)


class _Indices(_ReadAhead[int]):
    def __init__(self, sampler: ElasticSampler) -> None:
        super().__init__(sampler, 1)

    def __next__(self) -> int:
        if self._at == len(self._block):
            self._next_block()
        self._at += 1
        return self._block[self._at - 1]


class _Lists(_ReadAhead[list[int]]):
    def __next__(self) -> list[int]:
        if self._at == len(self._block):
            self._next_block()
        self._at += self._size
        return self._block[self._at - self._size : self._at]


@dataclass(frozen=True)
class _State:
    """The saved state: the position, and the values that determine the order.

    `dataset_len` is the length of the dataset. `epoch_len` is that of the current epoch, which is shorter if the
    dataset grew during it. `first_epoch` is the first epoch with the current dataset.
    """

    kind: str
    epoch: int
    consumed: int
    total: int
    seed: int
    shuffle: bool
    dataset_len: int
    epoch_len: int
    first_epoch: int

    @classmethod
    def parse(cls, state: Mapping[str, Any]) -> _State:
        names = {field.name for field in fields(cls)}
        if not isinstance(state, Mapping) or set(state) != names or state["kind"] != _KIND:
            raise ArgumentError(
                f"not the state of an ElasticSampler: {shown(state)}",
                hint=f'expected the entries {", ".join(sorted(names))}, with kind "{_KIND}"',
            )
        if not isinstance(state["shuffle"], bool):
            raise ArgumentError(f"state of a sampler: shuffle is {shown(state['shuffle'])}, expected a boolean")
        dataset_len = count("dataset_len", state["dataset_len"], 1, MAX_LEN)
        epoch_len = count("epoch_len", state["epoch_len"], 1, dataset_len)
        epoch = count("epoch", state["epoch"], 0)
        return cls(
            kind=_KIND,
            epoch=epoch,
            consumed=count("consumed", state["consumed"], 0, epoch_len - 1),
            total=count("total", state["total"], 0),
            seed=count("seed", state["seed"], 0, MAX_SEED),
            shuffle=state["shuffle"],
            dataset_len=dataset_len,
            epoch_len=epoch_len,
            first_epoch=count("first_epoch", state["first_epoch"], 0, epoch),
        )
