"""The position of a loader that accelerate has prepared: its epoch, and the batches of it that the loop has received.

`follow` puts a `FollowedLoader` between the prepared loader and the loader of torch inside it. It counts batches, and
in the first loop after a resume it skips those that are complete, without loading them. `LoaderPosition` is the state
that is saved. This module knows no checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.data_loader import DataLoaderDispatcher, SeedableRandomSampler, skip_first_batches
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from reshard.errors import ArgumentError, MismatchError, UnsupportedError
from reshard.torch import rng

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
)


def follow(loader: Any) -> LoaderPosition:
    """The position of a prepared loader, whose loops are counted from now on.

    A random order gets a generator of its own, as accelerate itself does it with several processes: it must not depend
    on the number of processes or on the random numbers of the model.

    Raises:
        ArgumentError: the loader was not prepared by accelerate.
        UnsupportedError: the main process loads the batches of all processes, or the dataset keeps the position itself.
    """
    if type(loader) is DataLoaderDispatcher:  # its `__class__` says DataLoader
        raise UnsupportedError(
            "the main process loads the data and dispatches it, so that other processes do not know the position",
            hint="`Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))`",
        )
    if not hasattr(loader, "base_dataloader") or not hasattr(loader, "iteration"):
        raise ArgumentError(f"a {type(loader).__name__} is not a loader that accelerate has prepared")
    if type(loader.base_dataloader) is not FollowedLoader:
        sampler = _sampler(loader)
        if isinstance(sampler, RandomSampler) and sampler.generator is None:
            sampler.generator = torch.Generator()
            sampler.generator.manual_seed(torch.random.initial_seed())
        inner = loader.base_dataloader
        if hasattr(inner, "load_state_dict"):
            # Its position would be a second one, and a new StatefulDataLoader has drawn an order already.
            if isinstance(inner.dataset, IterableDataset):
                raise UnsupportedError(
                    "a StatefulDataLoader over an iterable dataset: its position is the state of the dataset",
                    hint='give `resume` the prepared loader itself: `extra={"data": reshard.per_rank(loader)}`',
                )
            inner = DataLoader(
                inner.dataset, batch_sampler=inner.batch_sampler, **{name: getattr(inner, name) for name in _OPTIONS}
            )
        loader.base_dataloader = FollowedLoader(inner, sampler)
    return LoaderPosition(loader)


def _sampler(loader: Any) -> Any:
    """The sampler of a loader, also below samplers that divide batches over processes."""
    sampler = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    return getattr(sampler, "sampler", None)


class FollowedLoader:
    """The loader of torch inside a prepared loader. It counts batches, and skips those before a position.

    Attributes:
        inner: the loader of torch. Other attributes are those of `inner`.
        sampler_of_all: the sampler of the order, before it is divided over processes.
        n_loaded: number of batches of this epoch that were loaded or skipped.
        n_skipped: number of batches that the next loop skips.
        order: what the order of this epoch follows from.
    """

    def __init__(self, inner: Any, sampler: Any) -> None:
        self.inner, self.sampler_of_all = inner, sampler
        self.n_loaded = self.n_skipped = 0
        self.order: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not yet created
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # accelerate, too, makes its loaders say that they are those of torch
        return self.inner.__class__

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        self.n_loaded, self.n_skipped = self.n_skipped, 0
        if not self.n_loaded:
            self.order = self.capture_order()
            for batch in self.inner:
                self.n_loaded += 1
                yield batch
            return
        # The order is drawn as at the start of the epoch, and then the random state is that of the last step again.
        now = rng.capture()
        torch.default_generator.set_state(_as_state(self.order["torch"]))
        self.restore_order()
        for batch in skip_first_batches(self.inner, self.n_loaded):
            if now:
                rng.restore(now, iteration=0)
                now = {}
            self.n_loaded += 1
            yield batch

    def capture_order(self) -> dict[str, Any]:
        """What the order of the next loop follows from: states of generators, and the seed of the sampler."""
        generator = getattr(self.sampler_of_all, "generator", None)
        return {
            "torch": torch.default_generator.get_state().numpy().copy(),
            "own": None if generator is None else generator.get_state().numpy().copy(),
            "seed": getattr(self.sampler_of_all, "initial_seed", None),
        }

    def restore_order(self) -> None:
        """Restore the generator and the seed of the sampler."""
        generator = getattr(self.sampler_of_all, "generator", None)
        if generator is not None and self.order["own"] is not None:
            generator.set_state(_as_state(self.order["own"]))
        if isinstance(self.sampler_of_all, SeedableRandomSampler) and self.order["seed"] is not None:
            self.sampler_of_all.initial_seed = int(self.order["seed"])


class LoaderPosition:
    """The position of a prepared loader, after the batches that its loop has received."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._followed: FollowedLoader = loader.base_dataloader

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order of the epoch follows from."""
        loader, followed = self._loader, self._followed
        epoch, batches = loader.iteration, followed.n_skipped
        if any(one is loader for one in loader.gradient_state.dataloader_references):  # within a loop
            if loader.end_of_dataloader:
                epoch, batches = epoch + 1, 0
            else:
                batches = max(followed.n_loaded - 1, 0)  # the prepared loader is one batch ahead of the loop
        return {
            "epoch": epoch,
            "batches": batches,
            "batch_size": self._batch_size(),
            "n_samples": len(loader.dataset) if hasattr(loader.dataset, "__len__") else None,
            "order": followed.order if batches else followed.capture_order(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position: the next loop continues there.

        Raises:
            MismatchError: the value is not such a position; or within an epoch the dataset has changed, or the position
                is not between two batches of another size.
        """
        try:
            epoch, batches, batch_size = int(state["epoch"]), int(state["batches"]), int(state["batch_size"])
            n_samples, order = state["n_samples"], {name: state["order"][name] for name in ("torch", "own", "seed")}
        except (KeyError, TypeError, ValueError) as error:
            raise MismatchError(f"not the position of a loader of accelerate: {error!r}") from None
        here = self.state_dict()
        if batches and n_samples != here["n_samples"]:
            raise MismatchError(
                f"the checkpoint is within an epoch of {n_samples} samples, and the dataset has {here['n_samples']}",
                hint="use the saved dataset",
            )
        n_read, size = batches * batch_size, self._batch_size()
        if n_read % size:
            raise MismatchError(
                f"{n_read} samples of the epoch are read, which is not a multiple of the {size} samples of a batch",
                hint=f"use batches of {batch_size} samples over all processes, or a divisor of it",
            )
        self._loader.set_epoch(epoch)
        self._followed.n_skipped, self._followed.order = n_read // size, order
        self._followed.restore_order()

    def _batch_size(self) -> int:
        loader = self._loader
        return int(loader.total_batch_size if loader.batch_sampler is not None else loader.batch_size)


def _as_state(saved: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(saved, np.uint8))
