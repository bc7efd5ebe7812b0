"""The position of a loader that accelerate has prepared: its epoch, and the batches of it that the loop has received.

`follow` puts a `FollowedLoader` between the prepared loader and the loader of torch inside it. It counts batches, and
after a resume it begins the pass again (`reshard.torch.passes`). `LoaderPosition` is the state that is saved. This
module knows no checkpoints.

A prepared loader fetches one batch more than the loop has received, to know whether that was the last one. A
`DataLoaderDispatcher` fetches on the main process the batches of all processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    IterableDatasetShard,
    SeedableRandomSampler,
)
from accelerate.state import PartialState
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from reshard.errors import ArgumentError, MismatchError
from reshard.torch.passes import LoaderProxy, Passes
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_KIND = "reshard.accelerate/2"
# Options of a StatefulDataLoader that its plain replacement gets.
_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


def follow(loader: Any, *, gives_generator: bool = True) -> LoaderPosition:
    """The position of a prepared loader, whose loops are counted from now on.

    A random order gets a generator, as accelerate itself gives it one with several processes, so that it is found again
    on another number of processes. The order is that of a loader without it.

    Args:
        loader: the prepared loader.
        gives_generator: give a random order without a generator one.

    Raises:
        ArgumentError: the loader was not prepared by accelerate.
    """
    if not is_prepared(loader):
        raise ArgumentError(f"a {type(loader).__name__} is not a loader that accelerate has prepared")
    if type(loader.base_dataloader) is not FollowedLoader:
        sampler = _sampler(loader)
        seeded = None
        is_random = isinstance(sampler, RandomSampler) and type(sampler).__iter__ is RandomSampler.__iter__
        if gives_generator and is_random and sampler.generator is None:
            seeded = sampler.generator = torch.Generator()
        inner = loader.base_dataloader
        if hasattr(inner, "load_state_dict"):
            # Its position would be a second one, and a new StatefulDataLoader has drawn an order already.
            inner = _plain(inner)
        loader.base_dataloader = FollowedLoader(inner, loader, seeded)
    return LoaderPosition(loader)


def is_prepared(loader: Any) -> bool:
    """Whether accelerate has prepared a loader."""
    return hasattr(loader, "base_dataloader") and hasattr(loader, "iteration")


def is_dispatching(loader: Any) -> bool:
    """Whether the main process loads the batches of all processes."""
    return type(loader) is DataLoaderDispatcher  # its `__class__` says DataLoader


def _plain(loader: Any) -> DataLoader[Any]:
    """A loader of torch in place of a StatefulDataLoader."""
    options = {name: getattr(loader, name) for name in _OPTIONS if hasattr(loader, name)}
    if isinstance(loader.dataset, IterableDataset):
        options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif loader.batch_sampler is None:
        options |= {"batch_size": None, "sampler": loader.sampler}
    else:
        options["batch_sampler"] = loader.batch_sampler
    return DataLoader(loader.dataset, **options)


def _batch_sampler(loader: Any) -> Any:
    """What gives the batches of a loader."""
    return loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler


def _sampler(loader: Any) -> Any:
    """The sampler of a loader, also below samplers that divide batches over processes."""
    sampler = _batch_sampler(loader)
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    return getattr(sampler, "sampler", None)


class FollowedLoader(LoaderProxy):
    """The loader of torch inside a prepared loader, in passes that can be begun again.

    Attributes:
        inner: the loader of torch.
        passes: its passes.
        n_fetched: how many times a `DataLoaderDispatcher` has fetched the batches of all processes in this pass.
    """

    def __init__(self, inner: Any, prepared: Any, seeded: torch.Generator | None = None) -> None:
        super().__init__(inner)
        order = _batch_sampler(inner)
        while isinstance(order, BatchSamplerShard):
            order = order.batch_sampler
        data = inner.dataset
        while _is_shard(data):
            data = data.dataset
        is_private = is_dispatching(prepared)
        self.passes = Passes(inner, is_private=is_private, drops=not is_private, order=order, data=data, seeded=seeded)
        self.n_fetched = 0
        self._prepared = prepared
        self._n_skipped = 0
        if is_dispatching(prepared):
            fetch = prepared._fetch_batches  # noqa: SLF001

            def counted(iterator: Any) -> Any:
                self.n_fetched += 1
                return fetch(iterator)

            prepared._fetch_batches = counted  # noqa: SLF001

    def __iter__(self) -> Iterator[Any]:
        self.n_fetched = 0
        if not is_dispatching(self._prepared):
            return self.passes.batches()
        # The prepared loader itself leaves out the batches that were trained: it completes the last batch of an epoch
        # with samples of the first one.
        self._prepared.skip_batches, self._n_skipped = self._n_skipped, 0
        return self.passes.batches()

    def load(self, state: Mapping[str, Any], n_batches: int, *, is_same: bool) -> None:
        """Let the next pass begin at a saved position.

        Args:
            state: of the passes.
            n_batches: number of batches of the prepared loader that are left out.
            is_same: whether they are batches as those of the saved position.
        """
        if not is_same and is_dispatching(self._prepared) and n_batches:
            raise MismatchError(
                "the main process loads the data and dispatches it, and the batches or the number of processes are "
                "other ones than those of the saved position",
                hint="use the saved batch size and number of processes within an epoch",
            )
        self.passes.load(state, n_read=None if is_same else n_batches)
        self._n_skipped = n_batches if is_dispatching(self._prepared) else 0

    def skip(self, n_batches: int) -> None:
        """Leave out the first batches of the prepared loader in the next pass."""
        if is_dispatching(self._prepared):
            self._n_skipped = n_batches
        else:
            self.passes.skip(n_batches)

    def state(self, n_batches: int | None) -> dict[str, Any]:
        """The state of the passes, after so many batches of the prepared loader; None: between two passes."""
        if n_batches is None or not is_dispatching(self._prepared):
            return self.passes.state(n_batches)
        prepared = self._prepared
        is_one = prepared.split_batches or prepared.submesh_tp is not None
        n_each = 1 if is_one else prepared.state.num_processes
        return self.passes.state(n_batches * n_each if prepared.state.process_index == 0 else 0)


class LoaderPosition:
    """The position of a prepared loader, after the batches that its loop has received."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._followed: FollowedLoader = loader.base_dataloader
        self.state_of_pass, self.load_pass = self._followed.state, self._followed.load
        self.skip = self._followed.skip
        self._loaded: dict[str, Any] | None = None  # of a resumed run, until its first loop begins

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order of the epoch follows from."""
        loader, followed = self._loader, self._followed
        epoch: int = loader.iteration
        batches: int | None = None
        if any(one is loader for one in loader.gradient_state.dataloader_references):  # within a loop
            if loader.end_of_dataloader:
                epoch += 1
            else:  # the prepared loader is one batch ahead of the loop
                batches = max((followed.n_fetched if is_dispatching(loader) else followed.passes.n_loaded) - 1, 0)
            self._loaded = None
        elif self._loaded is not None and not followed.passes.has_begun:
            return self._loaded
        return self.state_at(epoch, batches)

    def state_at(self, epoch: int, batches: int | None) -> dict[str, Any]:
        """The position after so many batches of an epoch; None: before its first one."""
        loader = self._loader
        state = PartialState()
        return {
            "kind": _KIND,
            "epoch": epoch,
            "batches": batches or 0,
            "batch_size": self.batch_size(),
            "n_samples": _length(loader.dataset),
            "world": [state.process_index, state.num_processes],
            "pass": self._followed.state(batches),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position: the next loop continues there.

        Raises:
            MismatchError: the value is not such a position; or within an epoch the dataset has changed, or the position
                is not between two batches of another size.
        """
        if state.get("kind") != _KIND:
            raise MismatchError(
                f"not the position of a loader of accelerate: {show(str(state.get('kind')))}, expected {_KIND}",
                hint="a checkpoint of an earlier build, or of a run without accelerate: `resume(data='new')` begins at "
                "epoch 0",
            )
        self.load_at(state, int(state["epoch"]), int(state["batches"]))
        self._loaded = dict(state)

    def load_at(self, state: Mapping[str, Any], epoch: int, batches: int) -> None:
        """Go to a saved position.

        Args:
            state: a value of `state_at`.
            epoch: number of complete epochs.
            batches: number of batches of the epoch, of the size that was saved.

        Raises:
            MismatchError: as `load_state_dict`.
        """
        n_samples, here = state["n_samples"], _length(self._loader.dataset)
        if batches and n_samples != here:
            raise MismatchError(
                f"the checkpoint is within an epoch of {n_samples} samples, and the dataset has {here}",
                hint="use the saved dataset",
            )
        size, before, members = self.batch_size(), state["batch_size"], PartialState()
        is_same = size == before and state["world"] == [members.process_index, members.num_processes]
        if not is_same and batches:
            if size is None or before is None:
                raise MismatchError(
                    "the checkpoint is within an epoch, whose batches have no size, and the number of processes is "
                    "another one",
                    hint="use the saved number of processes",
                )
            if batches * before % size:
                raise MismatchError(
                    f"{batches * before} samples of the epoch are read, which is not a multiple of the {size} samples "
                    "of a batch",
                    hint=f"use batches of {before} samples over all processes, or a divisor of it",
                )
            self.check_order(state["world"][1])
            batches = batches * before // size
        self._loader.set_epoch(epoch)
        self._followed.load(state["pass"], batches, is_same=is_same)

    def check_order(self, n_processes: int) -> None:
        """Check that the order is the same on another number of processes than saved the position.

        Raises:
            MismatchError: each process has drawn it itself.
        """
        sampler, now = _sampler(self._loader), PartialState().num_processes
        if now != n_processes and self._followed.passes.is_stream:
            raise MismatchError(
                f"{n_processes} processes read the stream `{type(self._followed.passes.dataset).__name__}`, and there "
                f"are {now} now: it has no order that can be divided again",
                hint="use the same number of processes within an epoch",
            )
        if now != n_processes and not _is_common(sampler):
            kind = type(_batch_sampler(self._loader) if sampler is None else sampler).__name__
            raise MismatchError(
                f"each of {n_processes} processes drew the order of `{kind}` itself, and there are {now} now",
                hint="use the same number of processes within an epoch, or `use_seedable_sampler=True` and a shuffle",
            )

    def batch_size(self) -> int | None:
        """Number of samples of a batch over all processes; None: the batches have no size."""
        loader = self._loader
        inner = _batch_sampler(loader)
        size = loader.batch_size if loader.batch_size is not None else getattr(inner, "batch_size", None)
        if size is None:
            return None
        is_divided = is_dispatching(loader) or _is_shard(loader.dataset) or hasattr(inner, "num_processes")
        is_split = getattr(loader, "split_batches", False) or getattr(inner, "split_batches", False)
        return int(size) * (PartialState().num_processes if is_divided and not is_split else 1)


def _is_shard(dataset: Any) -> bool:
    return isinstance(dataset, IterableDatasetShard)


def _is_common(sampler: Any) -> bool:
    """Whether the order of a sampler is the same on all processes."""
    if isinstance(sampler, SequentialSampler | SeedableRandomSampler):
        return True
    return isinstance(sampler, RandomSampler) and sampler.generator is not None


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return None
