"""Which samples a rank reads, in an order that outlives the ranks: `ElasticSampler`.

The idea: there is one global order of the samples, which depends on the seed, the epoch and the length of the dataset
and on nothing else, and one position in it. A step takes the next `global_batch_size` samples of it; rank r of W takes
the r-th of W equal runs of these. So any number of ranks, which may change at every restart, goes on in the same
order, and so does another batch size, which just takes more or fewer from there on: every sample once an epoch.

The position is that of completed steps: `step` moves it, and nothing else does, however far workers fetched ahead.
What the rules of a tail and of other data are is messages at the class and at `load_state_dict`. This module reads no
data and talks to no other rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Generic, Self, TypeVar

import numpy as np
from torch.utils.data import Sampler

from reshard.errors import ArgumentError, MismatchError
from reshard.torch.checks import MAX_SEED, count, shown
from reshard.torch.permutation import MAX_LEN, Permutation

__all__ = ["ElasticBatches", "ElasticSampler"]

_KIND = "reshard.ElasticSampler/1"  # of the state and of the order that it stands in: another order is another number
_BLOCK = 1 << 14  # indices that are computed at a time, give or take a step

Item = TypeVar("Item", int, list[int])


class ElasticSampler(Sampler[int]):
    """The indices of one rank, for `DataLoader(..., sampler=)`; its state fits any number of ranks.

    Tell it of every step that is done (a `Checkpointer` that was given the sampler does so):

        sampler = ElasticSampler(len(dataset), seed, True, 512, dp_rank, dp_size)
        loader = DataLoader(dataset, batch_size=sampler.local_batch_size, sampler=sampler, num_workers=4,
                            generator=torch.Generator())
        while sampler.epoch < 3:
            for batch in loader:
                train(batch)
                sampler.step()

    Iterating starts after the last completed step and runs to the end of the epoch; a loop that was left goes on where
    its steps ended. `step` enters the next epoch, which has an order of its own, as soon as the last batch is done.
    `batch_size` of the loader may be any divisor of `local_batch_size` (gradient accumulation). The generator spares
    the random state of torch the draw that every new loop over a loader makes, which a resumed run makes once more.

    The tail: what is left of an epoch when no whole batch fits is dropped (other samples in each epoch, if shuffled),
    or with `drop_last=False` filled up to a whole batch with the first samples of the same epoch, which are then seen
    twice in it.

    With `StatefulDataLoader` use `sampler=` or `batch_sampler=sampler.batches()`. Its own state need not be saved. If
    it is loaded all the same, its position counts, for the sampler too: take it where steps are complete.

    Args:
        dataset_len: samples in the dataset, 1 to 2^62.
        seed: of the order, 0 to 2^63 - 1.
        shuffle: whether each epoch has a random order, or all have that of the dataset.
        global_batch_size: samples a step over all ranks; a multiple of `world_size`.
        rank: which part of each batch: the rank along the axes that divide the data, not those of a model.
        world_size: how many such parts there are.
        drop_last: the rule of the tail.

    Raises:
        ArgumentError: the batch does not divide over the ranks, an epoch has no batch, or a number is out of range.

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

    def __init__(  # noqa: PLR0917 - the order of `DistributedSampler`'s, whose place it takes
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
                f"a global batch of {global_batch_size} samples does not divide over {world_size} ranks",
                hint=f"take a multiple of {world_size}, or another number of ranks",
            )
        if drop_last and dataset_len < global_batch_size:
            raise ArgumentError(
                f"{dataset_len} samples make no batch of {global_batch_size}, and a part of one is dropped",
                hint="take a smaller batch, or `drop_last=False`",
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

    @property
    def epoch(self) -> int:
        """Passes over the data that are complete; it sets the order of the one in progress."""
        return self._state.epoch

    @property
    def consumed(self) -> int:
        """Samples of the epoch in progress that completed steps took."""
        return self._state.consumed

    @property
    def total(self) -> int:
        """Samples that completed steps took since training began, whatever the dataset was."""
        return self._state.total

    @property
    def seed(self) -> int:
        """The seed of the order; that of the state, once one is loaded."""
        return self._state.seed

    @property
    def shuffle(self) -> bool:
        """Whether each epoch has a random order."""
        return self._state.shuffle

    @property
    def local_batch_size(self) -> int:
        """Samples of a step that are this rank's."""
        return self.global_batch_size // self.world_size

    @property
    def steps_per_epoch(self) -> int:
        """Steps in a whole epoch."""
        whole, rest = divmod(self.dataset_len, self.global_batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __len__(self) -> int:
        """Indices of this rank in a whole epoch; the one in progress may have fewer left."""
        return self.steps_per_epoch * self.local_batch_size

    def __iter__(self) -> Iterator[int]:
        return _Indices(self)

    def batches(self, batch_size: int | None = None) -> ElasticBatches:
        """The same indices as lists, for `DataLoader(..., batch_sampler=)`.

        Args:
            batch_size: indices a list; a divisor of `local_batch_size`, which is the default.

        Raises:
            ArgumentError: it is no divisor.

        Example:
            >>> list(ElasticSampler(8, 0, False, 4, 1, 2).batches())
            [[2, 3], [6, 7]]
        """
        return ElasticBatches(self, self.local_batch_size if batch_size is None else batch_size)

    def step(self, n_steps: int = 1) -> None:
        """Steps are complete: their samples count as consumed.

        Raises:
            ArgumentError: a negative number of steps.

        Example:
            >>> sampler = ElasticSampler(10, 0, True, 4, 0, 1)
            >>> sampler.step(3)
            >>> sampler.epoch, sampler.consumed, sampler.total
            (1, 4, 12)
        """
        self._state = self._state_after(self._state, count("n_steps", n_steps, 0))

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of a later epoch; nothing, if it is the one in progress: `DistributedSampler`'s habit.

        Raises:
            ArgumentError: the epoch is over already: it would be seen again.

        Example:
            >>> sampler = ElasticSampler(10, 0, True, 4, 0, 1)
            >>> sampler.step()
            >>> sampler.set_epoch(0)
            >>> sampler.consumed
            4
        """
        if count("epoch", epoch, 0) < self.epoch:
            raise ArgumentError(
                f"epoch {epoch} is over: the sampler is in epoch {self.epoch}",
                hint="begin the loop at the epoch of the sampler: `range(sampler.epoch, n_epochs)`",
            )
        if epoch > self.epoch:
            self._state = replace(self._state, epoch=int(epoch), consumed=0, epoch_len=self.dataset_len)

    def state_dict(self) -> dict[str, Any]:
        """Where the completed steps ended: the same on every rank, plain numbers and text.

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
        """Go on from a state, whatever number of ranks and batch size it comes from; its seed is taken over.

        If the dataset has the length of the state, it is taken for the same one, and the order goes on. If it has
        another length, the data is new, and training goes on with it as the incremental scenario has it: epochs and
        samples count on, and the new data is read

        - from its beginning, if the state stands at the beginning of an epoch: that is where datasets are replaced;
        - from its beginning, if `ignore_data_skip` says so, which also tells that data of the same length is new;
        - after so many steps of the present batch size as `data_skip_steps` says, counted over as many epochs as
          they fill; the samples that count as consumed in all stay those of the state;
        - with `grown`, from the next epoch on: the data was appended to, and the rest of the epoch in progress is
          read in its old order. Every sample is then seen once in it.

        In the midst of an epoch one of these must be said: skipping as many steps as were made on other data, as
        MindSpore Transformers does, would leave out samples that nobody has seen.

        Args:
            state: of `state_dict`.
            ignore_data_skip: read the data from its beginning. Counts more than `data_skip_steps`, as it does there.
            data_skip_steps: steps to skip from the beginning; 0 is the beginning itself.
            grown: the dataset is that of the state with samples appended.

        Returns:
            What was done, in sentences; nothing, if the order just goes on.

        Raises:
            ArgumentError: this is no state of an `ElasticSampler`.
            MismatchError: the length of the dataset differs in mid-epoch and nothing is said, it has not grown, or
                the state is shuffled and the sampler is not, or the other way round. The sampler is as it was.
        """
        saved = _State.parse(state)
        if saved.shuffle != self.shuffle:
            raise MismatchError(
                f"the state is that of a sampler with shuffle={saved.shuffle}, this one has shuffle={self.shuffle}"
            )
        sizes = f"the dataset has {self.dataset_len} samples, that of the state {saved.dataset_len}"
        is_new = saved.dataset_len != self.dataset_len
        first_epoch = saved.epoch if is_new or ignore_data_skip else saved.first_epoch
        restarted = replace(saved, dataset_len=self.dataset_len, epoch_len=self.dataset_len, first_epoch=first_epoch)
        messages: list[str] = []
        if ignore_data_skip:
            state_now = replace(restarted, consumed=0)
            messages.append("ignore_data_skip: the data is read from its beginning")
        elif data_skip_steps is not None:
            epochs, steps = divmod(count("data_skip_steps", data_skip_steps, 0), self.steps_per_epoch)
            state_now = replace(restarted, epoch=first_epoch + epochs, consumed=steps * self.global_batch_size)
            messages.append(f"data_skip_steps: {data_skip_steps} steps of data are skipped, as given")
        elif not is_new:
            state_now = saved
        elif saved.consumed == 0:
            state_now = restarted
            messages.append(f"{sizes}: it is read from its beginning")
        elif grown and saved.dataset_len < self.dataset_len:
            state_now = replace(saved, dataset_len=self.dataset_len)
            messages.append(f"{sizes}: epoch {saved.epoch} ends with the {saved.epoch_len} that it began with")
        else:
            raise MismatchError(
                f"{sizes}, {saved.consumed} of which are consumed",
                hint="say what the data is: ignore_data_skip (new data, from its beginning), data_skip_steps (new "
                "data, so many steps of it are done), or grown=True (samples were appended)",
            )
        # Where the batch is larger now, what is left of the epoch may be less than one.
        self._state = self._state_after(state_now, 0)
        if self.epoch != state_now.epoch:
            left = state_now.epoch_len - state_now.consumed
            messages.append(
                f"the last {left} samples of epoch {state_now.epoch} make no batch of {self.global_batch_size}: dropped"
            )
        return messages

    def _steps_left(self, state: _State) -> int:
        whole, rest = divmod(state.epoch_len - state.consumed, self.global_batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def _state_after(self, state: _State, n_steps: int) -> _State:
        """The state after so many more steps; never one at the end of an epoch."""
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


class ElasticBatches(Sampler[list[int]]):
    """The indices of an `ElasticSampler` as lists, and its position; made by `ElasticSampler.batches`."""

    def __init__(self, sampler: ElasticSampler, batch_size: int) -> None:
        if sampler.local_batch_size % count("batch_size", batch_size, 1):
            raise ArgumentError(
                f"lists of {batch_size} indices do not divide the {sampler.local_batch_size} that a rank has in a step"
            )
        self.sampler = sampler
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.sampler) // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return _Lists(self.sampler, self.batch_size)


class _ReadAhead(Iterator[Item], Generic[Item]):
    """What a rank reads from the sampler's position to the end of the epoch, read ahead of the sampler.

    It has a state of its own for `StatefulDataLoader`, which asks for it when a batch is sent to a worker and keeps
    it until that batch comes out: so it is the state that the sampler has once all that came out is trained on. The
    sampler's own, which is asked for at the same time, is older by what was under way; loading this one sets it right.
    """

    def __init__(self, sampler: ElasticSampler, size: int) -> None:
        self._sampler = sampler
        self._size = size
        self._begin()

    def _begin(self, within: int = 0) -> None:
        sampler = self._sampler
        self._start = state = sampler._state  # noqa: SLF001 - one thing in two classes
        self._order = Permutation(state.epoch_len, state.seed, state.epoch) if state.shuffle else None
        self._n_steps = sampler._steps_left(state)  # noqa: SLF001
        self._n_computed = 0
        self._block: list[int] = []
        self._at = 0
        if within:
            self._next_block()
            self._at = within

    def __iter__(self) -> Self:
        return self

    def _next_block(self) -> None:
        """Compute the indices of the next steps, whole ones."""
        sampler, local = self._sampler, self._sampler.local_batch_size
        n_steps = min(max(1, _BLOCK // local), self._n_steps - self._n_computed)
        if n_steps == 0:
            raise StopIteration
        first = self._start.consumed + self._n_computed * sampler.global_batch_size + sampler.rank * local
        positions = first + sampler.global_batch_size * np.arange(n_steps)[:, None] + np.arange(local)
        positions %= self._start.epoch_len  # a tail that is filled up
        indices = positions if self._order is None else self._order.at(positions)
        self._block, self._at = indices.reshape(-1).tolist(), 0
        self._n_computed += n_steps

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state after the whole steps that were read, and what was read of the next, in indices."""
        local = self._sampler.local_batch_size
        steps, within = divmod(self._n_computed * local - len(self._block) + self._at, local)
        state = self._sampler._state_after(self._start, steps)  # noqa: SLF001
        return {"sampler": asdict(state), "within": within, "local_batch_size": local}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, and take the sampler along."""
        if not isinstance(state, Mapping) or set(state) != {"sampler", "within", "local_batch_size"}:
            raise ArgumentError(f"this is no state of a loop over an ElasticSampler: {shown(state)}")
        local = count("local_batch_size", state["local_batch_size"], 1)
        within = count("within", state["within"], 0, local - 1)
        if within and (local != self._sampler.local_batch_size or within % self._size):
            raise MismatchError(
                f"the state was taken after {within} of the {local} samples that a rank has in a step, "
                f"and now a rank has {self._sampler.local_batch_size} in lists of {self._size}",
                hint="save where steps are complete",
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
    """What is saved: the position, and what the order follows from.

    `dataset_len` is that of the run; `epoch_len` that of the epoch in progress, shorter if the dataset grew during it;
    `first_epoch` the one in which the present data was restarted.
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
                f"this is no state of an ElasticSampler: {shown(state)}",
                hint=f'expected the entries {", ".join(sorted(names))}, and "{_KIND}" as kind',
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
