"""Passes over a data loader, which a resumed run begins again and continues where they were cut.

When a pass begins, `Passes` keeps what its order follows from: the random streams of the program, and the generators
and numbers in the attributes of samplers, dataset and collator. To continue a pass these are set again, the loader
begins again, and the batches that were read are left out: by their indices if only the sampler matters, else by
reading them again (streams, workers, and datasets that have changed since the pass began). Checksums of the indices and
of parts of the batches, which are saved, prove that they are the same ones; otherwise the run is refused.

What is read again must not depend on what the program draws in between. So streams that the main process reads, and
samplers that draw while they are read, get private random streams after the first batch or index of a pass. Everything
else draws as without this module.

This module knows no checkpoints. The integrations of other libraries say how many batches were trained.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from reshard.errors import MismatchError
from reshard.formats.state import digest_of
from reshard.ranks.group import log_of_all
from reshard.torch import rng
from reshard.torch.orders import (
    checksum,
    draws_at_once,
    generators_and_numbers,
    is_number,
    numbers_of,
    samplers_in,
    set_value,
)
from reshard.torch.rng import HostStreams

if TYPE_CHECKING:
    from collections.abc import Callable

_N_LOGGED = 4096  # batches whose checksums are kept: more than loaders and libraries read ahead
_N_STREAMS = 4  # batches before which the random streams are kept
_SEEDS = ("seed", "initial_seed", "epoch")  # numbers that are set again even if the program began with others
_N_SAMPLED = 1024  # elements of a tensor that a checksum depends on


class Passes:
    """The passes over one loader on one rank, counted and begun again.

    Args:
        loader: a DataLoader, or another object that can be iterated.
        begin: begins a pass; by default `iter(loader)`.
        is_private: the main process draws from private streams after the first batch, and batches are read again.
        drops: whether batches that were read are left out here; else the caller leaves them out.
        order: the sampler that the order follows from; by default that of the loader. Samplers around it divide its
            batches over ranks, and are others on another number of ranks.
        data: in the same way the dataset, without one around it that divides its samples over ranks.
        seeded: the generator of a `RandomSampler` that had none. It begins each pass with a number of the stream of
            torch, as the sampler itself does it without a generator.

    Attributes:
        n_loaded: number of batches of this pass that were returned, or left out.
    """

    def __init__(
        self,
        loader: Any,
        begin: Callable[[], Iterator[Any]] | None = None,
        *,
        is_private: bool = False,
        drops: bool = True,
        order: Any = None,
        data: Any = None,
        seeded: torch.Generator | None = None,
    ) -> None:
        self.loader = loader
        self._begin_loader = begin or (lambda: iter(loader))
        is_torch = isinstance(loader, DataLoader)
        kind = getattr(type(loader), "_reshard_kind", type(loader))  # of a loader whose class was replaced
        is_plain = is_torch and getattr(kind, "__iter__", None) in _known_loops()
        self.dataset = getattr(loader, "dataset", None) if data is None else data
        self.is_stream = not is_plain or isinstance(self.dataset, IterableDataset)
        self.n_workers = int(loader.num_workers) if is_torch else 0
        self._is_private = not is_plain or (not self.n_workers and (is_private or self.is_stream))
        self._field = ""
        sampler = None
        if is_torch and not self.is_stream:
            self._field = "sampler" if loader.batch_sampler is None else "batch_sampler"
            sampler = getattr(loader, self._field)
        self._indices = None if sampler is None else Indices(self, sampler)
        self.samplers = [] if sampler is None else samplers_in(sampler if order is None else order)
        self.readers = readers_of(loader, self.dataset)
        self.initial = [numbers_of(one) for one in self._parts()]
        self.is_lazy = not draws_at_once(self.samplers)  # the sampler draws while it is read
        seed = torch.initial_seed() % (1 << 32)
        self._streams = HostStreams(
            random.Random(seed).getstate(),  # noqa: S311
            np.random.RandomState(seed).get_state(legacy=False),
            torch.Generator().manual_seed(seed).get_state(),
        )
        is_persistent = self.n_workers > 0 and loader.persistent_workers
        self._draws = _shared_flag() if is_persistent else None
        self._is_inside = False
        self._seeded = seeded
        self._drops = drops
        self._expected: dict[str, Any] | None = None  # the position of a pass that is read again
        self._resumed: dict[str, Any] | None = None
        self._n_skipped = 0  # by their indices
        self._n_first = 0  # batches that the next pass leaves out
        self._sources: dict[str, Any] = {}
        self._found: dict[str, Any] | None = None  # the sources of this pass, if it is found again
        self._begun: str | None = None  # the random streams after this pass has begun
        self._is_reused = False
        self._starts_workers = False
        self.n_passes = 0  # that were begun
        self.n_loaded = 0
        self.n_drawn = 0  # indices
        self.index_log: deque[tuple[int, int]] = deque(maxlen=_N_LOGGED)
        self._content_log: deque[tuple[int, int]] = deque(maxlen=_N_LOGGED)
        self._before: deque[tuple[int, HostStreams]] = deque(maxlen=_N_STREAMS)

    # -------------------------------------------------------------------------------------------------------- iterating

    def batches(self) -> Iterator[Any]:
        """Begin a pass now, and iterate over its batches, or over those that are left of it.

        Raises:
            MismatchError: the batches that were read are other ones when the pass begins again.
        """
        resumed, self._resumed = self._resumed, None
        self._found = None if resumed is None else resumed["sources"]
        ahead: list[Any] = []
        if self._starts_workers:
            # Persistent workers draw a seed when they start, and not when a later pass begins.
            self._starts_workers = False
            with _kept_streams():
                now = self._now()
                self._begin()
                self._set_parts(now)
                self.n_passes -= 1
        n_first, self._n_first = self._n_first, 0
        if n_first:
            iterator = self._begin_after(n_first)
        elif resumed is None:
            iterator = self._begin()
        else:
            with _kept_streams():
                iterator = self._again(resumed)
                if resumed["before"] is not None:
                    HostStreams.parse(resumed["before"]).set()
                    ahead = self._ahead(iterator)
                elif self._is_private and resumed["begun"] and not self.n_loaded:
                    ahead = self._ahead(iterator)  # from the streams that are set now
        return self._batches(iterator, ahead)

    def _ahead(self, iterator: Iterator[Any]) -> list[Any]:
        batch = self._next(iterator)
        return [] if batch is _END else [batch]

    def _batches(self, iterator: Iterator[Any], ahead: list[Any]) -> Iterator[Any]:
        while True:
            batch = ahead.pop() if ahead else self._next(iterator)
            if batch is _END:
                return
            yield batch

    def _begin(self) -> Iterator[Any]:
        self._is_reused = has_workers(self.loader)
        self.n_passes += 1
        streams, private = HostStreams.now().to_value(), self._streams.to_value()
        self._sources = {"streams": streams, "order": None, "private": private, **self._now()}
        self._begun = None
        self.n_loaded = self.n_drawn = 0
        for log in (self.index_log, self._content_log):
            log.clear()
            log.append((0, 0))
        self._before.clear()
        parts: dict[str, Any] = {} if self._indices is None else {self._field: self._indices}
        if self._draws is not None:
            parts["worker_init_fn"] = Started(self.loader.worker_init_fn)
            parts["collate_fn"] = Collated(self.loader.collate_fn, self._draws)
        attributes = vars(self.loader) if parts else {}
        before = {name: attributes[name] for name in parts}
        attributes |= parts  # a loader does not let its samplers be set
        try:
            return self._begin_loader()
        finally:
            attributes |= before
            self._begun = digest_of(HostStreams.now().to_value())

    def _next(self, iterator: Iterator[Any]) -> Any:
        if self._is_private:
            # The first batch draws as without this module: many streams draw only when a pass begins.
            if not self.n_loaded and self._indices is None:
                self.begin_order()
            with self.private_streams() if self.n_loaded else contextlib.nullcontext():
                batch = next(iterator, _END)
        else:
            if not self.n_workers:
                self._before.append((self.n_loaded, HostStreams.now()))
            batch = next(iterator, _END)
        if batch is not _END:
            self.n_loaded += 1
        expected = self._expected
        if batch is not _END and self._reads_again():
            self._content_log.append((self.n_loaded, content_checksum(batch, self._content_log[-1][1])))
        if expected is not None and (batch is _END or self.n_loaded == expected["n"]):
            self._expected = None
            self._check(expected, self.n_loaded)
        return batch

    def _reads_again(self) -> bool:
        return self._is_private or self.n_workers > 0

    @contextlib.contextmanager
    def private_streams(self) -> Iterator[None]:
        """Draw from the private streams of this loader."""
        if self._is_inside:
            yield
            return
        outside = HostStreams.now()
        self._streams.set()
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False
            self._streams = HostStreams.now()
            outside.set()

    def begin_order(self) -> None:
        """Before the first indices or batch of a pass: keep the streams, or set those of the pass that is found again.

        The generator of a sampler that had none is seeded here.
        """
        if self._found is not None:
            self._sources["order"] = self._found["order"]
            if self._found["order"] is not None:
                HostStreams.parse(self._found["order"]).set()
            return
        if self._begun is not None:  # else the loader draws indices while it begins
            now = HostStreams.now().to_value()
            self._sources["order"] = None if digest_of(now) == self._begun else now
        if self._seeded is None:
            return
        self._seeded.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        for part, values in zip(self.samplers, self._sources["samplers"], strict=True):
            if getattr(part, "generator", None) is self._seeded:
                values.update(generators_and_numbers(part))

    def is_skipped(self, number: int) -> bool:
        """Whether the batch of an index is left out by its index."""
        return number < self._n_skipped

    @property
    def has_begun(self) -> bool:
        """Whether a pass has begun since this object was made or a position was loaded."""
        return bool(self._sources)

    @property
    def is_resumed(self) -> bool:
        """Whether the next pass goes on at a saved position within an epoch."""
        return self._resumed is not None

    # ------------------------------------------------------------------------------------------------------ saved state

    def state(self, n_read: int | None) -> dict[str, Any]:
        """The position in this pass.

        Args:
            n_read: number of batches that were trained; None: the pass is over, or none has begun.
        """
        common = {
            "n_workers": self.n_workers,
            "is_stream": self.is_stream,
            "seeded": self._seeded is not None,
            "initial": self.initial,
            "n_passes": self.n_passes - (n_read is not None),  # before
            "draws": self._draws is not None and bool(self._draws[0]),
            "reused": has_workers(self.loader) if n_read is None else self._is_reused,
        }
        if n_read is None or not self._sources:  # not begun: the main process loads the batches of all
            sources = {"streams": None, "private": self._streams.to_value(), **self._now()}
            return common | {"n": None, "sources": sources}
        logs = {
            name: dict(log).get(n_read) for name, log in (("indices", self.index_log), ("content", self._content_log))
        }
        before = dict(self._before).get(n_read) if self.n_loaded > n_read else None
        return (
            common
            | logs
            | {
                "n": n_read,
                "sources": self._sources,
                "reads": self._reads_again() or self._have_readers_changed(),
                "begun": self.n_loaded > 0,
                "before": None if before is None else before.to_value(),
            }
        )

    def load(self, state: Mapping[str, Any], *, n_read: int | None = None) -> None:
        """Let the next pass begin at a saved position.

        Args:
            state: a value of `state`.
            n_read: another number of batches, for batches of another size: only indices are left out, unchecked.

        Raises:
            MismatchError: the position cannot be found again.
        """
        name = type(self.dataset if self.dataset is not None else self.loader).__name__
        if state["is_stream"] != self.is_stream:
            kinds = {True: "a stream", False: "a dataset with a length"}
            raise MismatchError(
                f"the data was {kinds[state['is_stream']]} when the position was saved, and is {kinds[self.is_stream]}"
            )
        is_within = state["n"] is not None
        if is_within and "order" not in state["sources"]:
            raise MismatchError(
                f"the position in `{name}` is within an epoch, and of an earlier build, which read it in another way",
                hint="resume from an iteration at the end of an epoch, or with the build that saved it",
            )
        if is_within and state["n"] < 0:
            raise MismatchError(
                f"`{name}` had begun again ahead of the training when the position was saved: it is not known",
                hint="use loaders with a length",
            )
        if self.n_workers != state["n_workers"] and self.is_stream:
            raise MismatchError(
                f"the loader had {state['n_workers']} workers, and has {self.n_workers}: the stream `{name}` is read "
                "by each of them",
                hint=f"use `num_workers={state['n_workers']}`",
            )
        if is_within and n_read is not None and self.is_stream:
            raise MismatchError(
                f"the batches or ranks are other ones than those of the saved position, and `{name}` is a stream",
                hint="use the saved batch size and number of ranks within an epoch",
            )
        if self.n_workers and not getattr(self.loader, "in_order", True):
            raise MismatchError(
                "the loader has `in_order=False`: the order of its batches depends on the speed of its workers",
                hint="leave `in_order` out",
            )
        if state["reused"] and (self.is_stream or state["draws"] or self._has_generators()):
            what = "a stream" if self.is_stream else "a dataset that draws random numbers"
            raise MismatchError(
                f"`{name}` is {what}, in persistent workers whose state of the epochs before is not saved",
                hint="use `persistent_workers=False`",
            )
        if self.is_stream and state["n_passes"] and any(hasattr(type(one), "__next__") for one in self._held()):
            raise MismatchError(
                f"the stream `{name}` holds an iterator, which goes on from epoch to epoch: its position after "
                "the first epoch is not known",
                hint="make a new iterator in `__iter__`",
            )
        if not state.get("seeded", False):
            self._seeded = None  # its generator goes on from pass to pass
        self._streams = HostStreams.parse(state["sources"]["private"])
        self._set_parts(state["sources"], state["initial"])
        self._resumed, self.n_passes, self._sources = None, state["n_passes"], {}
        if is_within:
            self._resumed = {"before": None, **state}
            if n_read is not None:
                others = {"n": n_read, "reads": False, "before": None, "indices": None, "content": None}
                self._resumed |= others
        self._starts_workers = bool(state["reused"]) and getattr(self.loader, "persistent_workers", False)

    def skip(self, n_read: int) -> None:
        """Let the next pass begin as it does without a saved position, and leave out its first batches.

        Args:
            n_read: how many.
        """
        self._n_first = n_read

    def _begin_after(self, n_read: int) -> Iterator[Any]:
        """Begin a pass, and leave out its first batches: by their indices, if there are any."""
        self._n_skipped = n_read if self._drops and self._indices is not None else 0
        try:
            iterator = self._begin()
            if self._n_skipped and self._indices is not None:
                self._indices.skip()
                self.n_loaded = min(self.n_drawn, n_read)
        finally:
            self._n_skipped = 0
        while self._drops and self.n_loaded < n_read and self._next(iterator) is not _END:
            pass
        return iterator

    def _again(self, saved: dict[str, Any]) -> Iterator[Any]:
        """Begin a saved pass again, and leave out what was read."""
        n_read, sources = saved["n"], saved["sources"]
        HostStreams.parse(sources["streams"]).set()
        self._streams = HostStreams.parse(sources["private"])
        self._set_parts(sources, saved["initial"])
        reads = saved["reads"]
        self._n_skipped = 0 if reads or not self._drops else n_read
        try:
            iterator = self._begin()
            n_found = 0
            if not self._drops:
                self._expected = saved if n_read else None
                return iterator
            if reads:
                if n_read:
                    message = "%d batches that were trained are read again and left out"
                    log_of_all(None, message, n_read, level=logging.INFO)
                while n_found < n_read and self._next(iterator) is not _END:
                    n_found += 1
            elif self._indices is not None:
                self._indices.skip()  # without workers nothing is drawn before the first batch is taken
                n_found = self.n_loaded = min(self.n_drawn, n_read)
        finally:
            self._n_skipped = 0
        self._check(saved, n_found)
        return iterator

    def _check(self, saved: dict[str, Any], n_found: int) -> None:
        """Check that the batches that were read are the saved ones."""
        n_read = saved["n"]
        indices, content = (dict(log).get(n_read) for log in (self.index_log, self._content_log))
        differs = n_found < n_read or any(
            saved[name] is not None and saved[name] != now for name, now in (("indices", indices), ("content", content))
        )
        if differs:
            what = self.dataset if self.is_stream and self.dataset is not None else self.loader
            if not self.is_stream and indices != saved["indices"]:
                what = self.samplers[-1] if self.samplers else what
            raise MismatchError(
                f"the first {n_read} batches of the epoch, which were trained, are other ones when "
                f"`{type(what).__name__}` begins again{self._difference(saved['initial'])}: the rest is not known",
                hint="use the same dataset, samplers and options within an epoch; what draws random numbers draws from "
                "the global streams, or from a generator in its attributes",
            )

    def _difference(self, initial: list[dict[str, Any]]) -> str:
        found = [
            f"`{type(part).__name__}.{name}` was {before[name]!r} and is {now!r}"
            for part, before, own in zip(self._parts(), initial, self.initial, strict=False)
            for name, now in own.items()
            if name in before and before[name] != now
        ]
        return f" ({'; '.join(found)})" if found else ""

    def _parts(self) -> list[Any]:
        return [*self.samplers, *self.readers]

    def _now(self) -> dict[str, Any]:
        """The generators and numbers of the samplers, and of what reads."""
        of = generators_and_numbers
        return {
            "samplers": [of(one) for one in self.samplers],
            "readers": [of(one) for one in self.readers],
        }

    def _set_parts(self, sources: Mapping[str, Any], initial: list[dict[str, Any]] | None = None) -> None:
        """Set generators, seeds, and the numbers that have changed since that run began."""
        saved = [*sources["samplers"], *sources["readers"]]
        kinds = len(saved) == len(self._parts())
        if not kinds:
            raise MismatchError(
                "the samplers and datasets are other ones than those of the saved position",
                hint="use the same dataset and samplers",
            )
        for place, (part, values) in enumerate(zip(self._parts(), saved, strict=True)):
            first = initial[place] if initial is not None else {}
            own = numbers_of(part)
            for name, value in values.items():
                is_seed = name in _SEEDS and place < len(self.samplers)
                if is_number(value) and name in first and value == first[name] and not is_seed:
                    continue
                if name != "epoch" and is_seed and own.get(name) not in {None, value}:
                    log_of_all(
                        None, "the sampler goes on with %s %s of the checkpoint, not with %s", name, value, own[name]
                    )
                set_value(part, name, value)

    def _have_readers_changed(self) -> bool:
        return digest_of(self._now()["readers"]) != digest_of(self._sources["readers"])

    def _has_generators(self) -> bool:
        numbers = [numbers_of(one) for one in self.readers]
        return any(set(generators_and_numbers(one)) - set(own) for one, own in zip(self.readers, numbers, strict=True))

    def _held(self) -> Iterator[Any]:
        for one in self.readers:
            yield one
            yield from getattr(one, "__dict__", {}).values()


class Indices(Sampler[Any]):
    """The sampler of a loader while a pass begins. Its attributes are those of the inner one."""

    def __init__(self, owner: Passes, inner: Any) -> None:
        self._owner, self._inner = owner, inner
        self._pass: _Drawn | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        self._pass = _Drawn(self._owner, self._inner)
        return self._pass

    def skip(self) -> None:
        """Leave out the batches that were trained, now."""
        if self._pass is not None:
            self._pass.skip()


class _Drawn(Iterator[Any]):
    """The items of a sampler in one pass."""

    def __init__(self, owner: Passes, inner: Any) -> None:
        self._owner, self._is_first = owner, True
        self._inner = iter(inner)

    def __next__(self) -> Any:
        self.skip()
        return self._next()

    def skip(self) -> None:
        with contextlib.suppress(StopIteration):
            while self._owner.is_skipped(self._owner.n_drawn):
                self._next()

    def _next(self) -> Any:
        owner = self._owner
        if self._is_first:
            self._is_first = False
            owner.begin_order()
            item = next(self._inner)  # as without this module
        else:
            with owner.private_streams() if owner.is_lazy else contextlib.nullcontext():
                item = next(self._inner)
        owner.n_drawn += 1
        owner.index_log.append(
            (owner.n_drawn, checksum(item if isinstance(item, list) else [item], owner.index_log[-1][1]))
        )
        return item


_last: list[str] = []  # in a worker: the random streams after the last batch


def _streams_digest() -> str:
    return digest_of(HostStreams.now().to_value())


class Started:
    """The `worker_init_fn` of persistent workers, which keeps the random streams that they begin with."""

    def __init__(self, inner: Callable[[int], None] | None) -> None:
        self._inner = inner

    def __call__(self, number: int) -> None:
        """Start a worker."""
        if self._inner is not None:
            self._inner(number)
        _last[:] = [_streams_digest()]


class Collated:
    """The collator of persistent workers, which reports whether reading a batch draws random numbers."""

    def __init__(self, inner: Callable[[Any], Any], draws: torch.Tensor) -> None:
        self._inner, self._draws = inner, draws

    def __call__(self, rows: Any) -> Any:
        """Collate a batch."""
        batch = self._inner(rows)
        if not self._draws[0] and _last != [_streams_digest()]:
            self._draws[0] = 1
        return batch


class Proxy:
    """An object in place of a loader: its length and its other attributes are those of the loader.

    Attributes:
        inner: the loader.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not yet created
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)


class LoaderProxy(Proxy):
    """A proxy that also says that it is of the class of the loader, as the loaders of accelerate do."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self.inner.__class__


class _End:
    """No more batches."""


_END = _End()


def _known_loops() -> list[Any]:
    """The methods that begin a pass and do nothing else."""
    stateful = getattr(sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", None)
    return [one.__iter__ for one in (DataLoader, stateful) if one is not None]


def readers_of(loader: Any, dataset: Any) -> list[Any]:
    """The objects that read: the dataset and the datasets in it, the collator and what is in it, other loaders."""
    found: list[Any] = []
    waiting = [loader if not isinstance(loader, DataLoader) else None, dataset]
    waiting.append(getattr(loader, "collate_fn", None))
    while waiting:
        one = waiting.pop(0)
        if one is None or isinstance(one, type) or not hasattr(one, "__dict__") or any(one is known for known in found):
            continue
        found.append(one)
        for name, value in sorted(vars(one).items()):
            if isinstance(value, Dataset) or name in {"dataset", "data_collator", "collate_fn"}:
                waiting.append(value)
            elif isinstance(value, list | tuple) and value and isinstance(value[0], Dataset):
                waiting += value
    return found


def _shared_flag() -> torch.Tensor:
    """A number that workers can set."""
    flag = torch.zeros(1, dtype=torch.uint8)
    flag.share_memory_()  # type: ignore[no-untyped-call]
    return flag


def has_workers(loader: Any) -> bool:
    """Whether persistent workers of an earlier pass are running."""
    return bool(getattr(loader, "persistent_workers", False) and getattr(loader, "_iterator", None) is not None)


def content_checksum(value: Any, crc: int = 0) -> int:
    """A checksum of a part of a batch, continued from one of the batches before it. Tensors on a GPU are left out.

    Example:
        >>> content_checksum({"x": torch.ones(2)}) == content_checksum({"x": torch.ones(2)})
        True
        >>> content_checksum({"x": torch.ones(2)}) == content_checksum({"x": torch.zeros(2)})
        False
    """
    if isinstance(value, torch.Tensor):
        crc = zlib.crc32(f"{value.dtype}{tuple(value.shape)}".encode(), crc)
        if value.device.type != "cpu" or value.layout != torch.strided or not value.numel():
            return crc
        flat = value.detach().reshape(-1)
        flat = flat[:: max(1, flat.numel() // _N_SAMPLED)].contiguous()
        return zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), crc)
    if isinstance(value, np.ndarray) and value.dtype != object:
        crc = zlib.crc32(f"{value.dtype}{value.shape}".encode(), crc)
        numbers = value.reshape(-1)
        return zlib.crc32(numbers[:: max(1, numbers.size // _N_SAMPLED)].tobytes(), crc)
    if isinstance(value, Mapping):
        for name in value:
            crc = content_checksum(value[name], zlib.crc32(str(name).encode(errors="surrogatepass"), crc))
        return crc
    if isinstance(value, list | tuple):
        for one in value:
            crc = content_checksum(one, crc)
        return crc
    plain = repr(value) if isinstance(value, str | bytes | int | float | bool | type(None)) else type(value).__name__
    return zlib.crc32(plain.encode(errors="surrogatepass"), crc)


@contextlib.contextmanager
def _kept_streams() -> Iterator[None]:
    """Run a block, and go back to the random streams of the program before it."""
    before = rng.capture()
    try:
        yield
    finally:
        rng.restore(before, iteration=0)
