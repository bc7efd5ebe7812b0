"""The order in which a data loader of torch reads samples, and how it is found again.

An `Order` replaces the sampler of a loader. In each pass over the samples it remembers what the order follows from:
generators and numbers in the attributes of the samplers, and the global random streams. A sampler that draws from the
global streams gets private ones, so that its numbers do not depend on what the program draws in between.

To continue within a pass, these states are restored, the sampler begins the pass again, and the items that were read
are drawn and left out. A checksum of these items, which is saved, proves that they are the same ones: a sampler whose
order depends on something else is refused.

`Split` computes the rest of an epoch for another number of ranks. This module knows no checkpoints and no processes.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import sys
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler, Sampler

from reshard.errors import ArgumentError, MismatchError
from reshard.torch.rng import HostStreams
from reshard.torch.sampler import ElasticBatches, ElasticSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_CHUNK = 4096  # items that are drawn at a time, to be left out
_KNOWN = {"torch", "torchdata", "accelerate", "transformers", "lightning", "pytorch_lightning", "lightning_fabric"}
_PLAIN = (bool, int, float, str, type(None))


class Order(Sampler[Any]):
    """The sampler of a loader, in an order that can be found again. Its attributes are those of the inner sampler.

    Args:
        inner: the sampler of the loader that gives its indices: the batch sampler, or without batches the sampler.
        ahead: how many batches the loader draws at most before it returns the first of them.
        seed: of the private stream of torch, for samplers without a generator.
        is_stream: the loader reads a stream: its indices have no meaning.
    """

    def __init__(self, inner: Any, *, ahead: int, seed: int, is_stream: bool) -> None:
        self.inner, self.ahead, self.is_stream = inner, ahead, is_stream
        self.items, self.is_batched = inner, False
        if isinstance(inner, BatchSampler) and type(inner).__iter__ in _batching():
            self.items, self.is_batched = inner.sampler, True
        self.parts = [] if is_stream else samplers_in(self.items)
        self.initial = [numbers_of(part) for part in self.parts]
        self.n_passes = 0  # that were begun
        self.current: Pass | None = None
        self.calls: dict[int, Callable[[], None]] = {}  # when a loop draws the indices after so many batches
        self._resumed: tuple[Pass, list[dict[str, Any]]] | None = None
        stream = torch.Generator().manual_seed(seed).get_state()
        now = HostStreams.now()
        self._streams = HostStreams(now.python, now.numpy, stream)
        self.draws_at_once = draws_at_once(self.parts)

    def __getattr__(self, name: str) -> Any:
        if name in {"inner", "state_dict", "load_state_dict"} or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Loop:
        return Loop(self)

    @property
    def size(self) -> int | None:
        """Number of items of a batch; None: an item of the sampler is a batch, or an index without batches."""
        return int(self.inner.batch_size) if self.is_batched else None

    @property
    def drop_last(self) -> bool:
        """Whether a last batch that is smaller is left out."""
        return bool(self.is_batched and self.inner.drop_last)

    @property
    def kinds(self) -> list[str]:
        """The classes of the samplers, for comparison and for messages."""
        return [type(part).__name__ for part in self.parts]

    def begin(self) -> Pass:
        """Begin a pass, or continue the one that was restored.

        Raises:
            MismatchError: the program has changed a sampler since the pass was restored.
        """
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            sources = self.sources()
            with self.private_streams():
                iterator = iter(self.items)
            self.current = Pass(self, iterator, sources, size=self.size, drop_last=self.drop_last)
            self.n_passes += 1
            return self.current
        self.current, numbers = resumed
        for part, before in zip(self.parts, numbers, strict=True):
            for name, now in numbers_of(part).items():
                if now != before.get(name):
                    raise MismatchError(
                        f"`{type(part).__name__}.{name}` was changed to {now!r} after `resume`, which continues within "
                        f"a loop in which it was {before.get(name)!r}",
                        hint="begin the loop over epochs at the `initial_epoch` of the resume decision",
                    )
        return self.current

    def sources(self) -> dict[str, Any]:
        """What the order of the next pass follows from."""
        return {"streams": self._streams.to_value(), "samplers": [generators_and_numbers(p) for p in self.parts]}

    def set_sources(self, saved: Mapping[str, Any], initial: list[dict[str, Any]]) -> None:
        """Set the random states of the samplers, and the numbers that have changed since the run began.

        Args:
            saved: a value of `sources`.
            initial: the numbers when that run began.
        """
        self._streams = HostStreams.parse(saved["streams"])
        for part, values, first in zip(self.parts, saved["samplers"], initial, strict=True):
            for name, value in values.items():
                if is_number(value) and name in first and value == first[name]:
                    continue
                set_value(part, name, value)

    def restore(
        self, saved: Mapping[str, Any], initial: list[dict[str, Any]], n_items: int, crc: int, rest: Rest | None
    ) -> str | None:
        """Find a pass again, and continue it after the items that were read.

        Args:
            saved: its `sources`.
            initial: the numbers of the samplers when that run began.
            n_items: how many items were read.
            crc: their checksum.
            rest: the pass is the rest of an epoch for another number of ranks.

        Returns:
            What is different, if the items that were read are other ones.
        """
        self.set_sources(saved, initial)
        sources = self.sources()
        with self.private_streams():
            iterator = iter(self.items if rest is None else rest.items(self.items))
            made = Pass(self, iterator, sources, size=self.size, drop_last=self.drop_last, rest=rest)
            is_equal = made.skip(n_items) and made.crc == crc
        self._resumed = (made, [numbers_of(part) for part in self.parts])
        self.n_passes += 1
        return None if is_equal else self._difference(initial)

    def forget(self) -> None:
        """Do not continue the restored pass: the next loop begins a new one."""
        self._resumed = None

    def _difference(self, initial: list[dict[str, Any]]) -> str:
        """Why the items are other ones, as far as the numbers of the samplers show it."""
        changed = [
            f"`{type(part).__name__}.{name}` was {first[name]!r} and is {now!r}"
            for part, first, own in zip(self.parts, initial, self.initial, strict=True)
            for name, now in own.items()
            if name in first and first[name] != now
        ]
        return "; ".join(changed)

    @contextlib.contextmanager
    def private_streams(self) -> Iterator[None]:
        """Give the samplers private random streams: what they draw does not move those of the program."""
        outside = HostStreams.now()
        self._streams.set()
        try:
            yield
        finally:
            self._streams = HostStreams.now()
            outside.set()


class Loop(Iterator[Any]):
    """One loop over the indices. It begins its pass with the first index, which a loader draws when it is complete.

    `StatefulDataLoader` calls its methods `state_dict` and `load_state_dict`; `FollowedLoader` saves the position.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self.run: Pass | None = None
        self._n_drawn = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        order = self._order
        call = order.calls.pop(self._n_drawn, None)
        if call is not None:
            call()
        self._n_drawn += 1
        if order.is_stream:
            size = order.size
            return None if size is None else [None] * size
        if self.run is None:
            self.run = order.begin()
        return self.run.batch()

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Does nothing."""


@dataclass(eq=False)
class Pass:
    """One pass over the samples of a loader.

    Attributes:
        order: the order it belongs to.
        iterator: the items that are left.
        sources: what its order follows from.
        size, drop_last: as those of the order, when it began.
        rest: it is the rest of an epoch for another number of ranks.
        n_items: number of items in the batches that were drawn.
        crc: checksum of these items.
        n_drawn: number of batches that were drawn, without those that were left out.
        split: how the sampler divided its order over ranks when the pass began, if it does.
    """

    order: Order
    iterator: Iterator[Any]
    sources: dict[str, Any]
    size: int | None
    drop_last: bool
    rest: Rest | None = None
    n_items: int = 0
    crc: int = 0
    n_drawn: int = 0
    split: Split | None = field(init=False)
    _log: deque[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self._log = deque([(0, 0)], maxlen=self.order.ahead + 2)
        self.split = Split.of(self.order.items)

    def batch(self) -> Any:
        """The next indices."""
        is_quiet = self.n_drawn > 0 and self.order.draws_at_once
        with contextlib.nullcontext() if is_quiet else self.order.private_streams():
            items = list(itertools.islice(self.iterator, self.size or 1))
        if not items or (self.drop_last and len(items) < (self.size or 1)):
            raise StopIteration
        self.n_drawn += 1
        self._count(items)
        self._log.append((self.n_items, self.crc))
        return items if self.size is not None else items[0]

    def skip(self, n_items: int) -> bool:
        """Leave items out. Returns whether there were so many."""
        while self.n_items < n_items:
            items = list(itertools.islice(self.iterator, min(_CHUNK, n_items - self.n_items)))
            if not items:
                return False
            self._count(items)
        self._log[-1] = (self.n_items, self.crc)
        return True

    def position(self, n_batches: int) -> tuple[int, int]:
        """Number and checksum of the items in the first batches that were drawn.

        Args:
            n_batches: how many the loader has returned, without those that were left out.
        """
        return self._log[n_batches - self.n_drawn - 1]

    def left(self, n_items: int) -> int | None:
        """How many batches are left after so many items; None: that is not known."""
        try:
            n_all = len(self.order.items) if self.rest is None else self.rest.n_items(self.order.items)
        except TypeError:
            return None
        whole, some = divmod(max(n_all - n_items, 0), self.size or 1)
        return whole + (some > 0 and not self.drop_last)

    def _count(self, items: list[Any]) -> None:
        self.n_items += len(items)
        self.crc = checksum(items, self.crc)


@dataclass(frozen=True)
class Split:
    """How a `DistributedSampler` divides its order: whatever follows from these numbers is equal on all ranks.

    Attributes:
        n_samples: number of samples of the dataset.
        seed, shuffle, epoch: what the order follows from.
        drop_last: whether the samples that do not divide by the ranks are left out, instead of repeating some.
        world_size, rank: the part that is read.
    """

    n_samples: int
    seed: int
    shuffle: bool
    epoch: int
    drop_last: bool
    world_size: int
    rank: int

    @classmethod
    def of(cls, sampler: object) -> Split | None:
        """Of a `DistributedSampler`; None: the samples are divided in another way, or not at all."""
        if not isinstance(sampler, DistributedSampler) or type(sampler).__iter__ not in _dividing():
            return None
        return cls(
            len(sampler.dataset),  # type: ignore[arg-type]
            sampler.seed,
            sampler.shuffle,
            sampler.epoch,
            sampler.drop_last,
            sampler.num_replicas,
            sampler.rank,
        )

    def to_value(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Rest:
    """The rest of an epoch that a `DistributedSampler` divides: the samples of its order from a position on.

    The parts of the ranks have the same number of batches. Their sizes may differ by one sample: samples are repeated
    only where a rank would have one batch less.

    Attributes:
        start: how many samples of the order were read by all ranks.
        size: number of samples of a batch on each rank; None: samples are read one by one.
        drop_last: whether a last batch that is smaller is left out.
    """

    start: int
    size: int | None
    drop_last: bool

    def items(self, sampler: Any) -> list[int]:
        """The samples of a rank.

        Args:
            sampler: its sampler.

        Example:
            >>> parts = [DistributedSampler(range(10), 3, rank, shuffle=False) for rank in range(3)]
            >>> [Rest(2, 4, False).items(part) for part in parts]
            [[2, 5, 8], [3, 6, 9], [4, 7]]
        """
        split = Split.of(sampler)
        assert split is not None
        return self.part(whole(sampler), split)

    def part(self, order: list[int], split: Split) -> list[int]:
        """The samples of a rank, from the order of all samples."""
        rest, world_size = order[self.start :], split.world_size
        n_each, n_more = divmod(len(rest), world_size)
        end = self._n_divided(n_each, n_more, split)
        rest = [*rest[:end], *itertools.islice(itertools.cycle(order), max(0, end - len(rest)))]
        return rest[split.rank :: world_size]

    def n_items(self, sampler: Any) -> int:
        """Number of samples of a rank."""
        split = Split.of(sampler)
        assert split is not None
        return len(range(split.rank, self.n_divided(split), split.world_size))

    def n_divided(self, split: Split) -> int:
        """How many samples all ranks read, repeated ones included."""
        return self._n_divided(*divmod(max(split.n_samples - self.start, 0), split.world_size), split)

    def to_value(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    def _n_divided(self, n_each: int, n_more: int, split: Split) -> int:
        least, most = n_each * split.world_size, (n_each + 1) * split.world_size
        size = self.size or 1
        if not n_more:
            return least
        if self.start == 0:  # as the sampler itself
            return least if split.drop_last else most
        if split.drop_last or (self.drop_last and (n_each + 1) % size == 0):
            return least
        return most if not self.drop_last and n_each % size == 0 else least + n_more


def whole(sampler: Any) -> list[int]:
    """The order of a `DistributedSampler` over all ranks.

    Example:
        >>> whole(DistributedSampler(range(4), 2, 1, shuffle=False))
        [0, 1, 2, 3]
    """
    alone = copy.copy(sampler)
    alone.num_replicas, alone.rank = 1, 0
    alone.num_samples = alone.total_size = len(sampler.dataset)
    return list(DistributedSampler.__iter__(alone))


def checksum(items: list[Any], crc: int = 0) -> int:
    """A checksum of indices, continued from one of the indices before them.

    Example:
        >>> checksum([3, 4], checksum([1, 2])) == checksum([1, 2, 3, 4])
        True
    """
    plain = (one.tolist() if isinstance(one, np.ndarray | np.generic | torch.Tensor) else one for one in items)
    return zlib.crc32("".join(f"{one!r}," for one in plain).encode(errors="surrogatepass"), crc)


def samplers_in(sampler: Any) -> list[Any]:
    """A sampler and the samplers in its attributes, each once.

    Example:
        >>> inner = torch.utils.data.SequentialSampler(range(4))
        >>> samplers_in(BatchSampler(inner, 2, False))[1] is inner
        True
    """
    found: list[Any] = []
    waiting = [sampler]
    while waiting:
        one = waiting.pop(0)
        if any(one is known for known in found):
            continue
        found.append(one)
        for name, value in sorted(_attributes(one).items()):
            if isinstance(value, Sampler) or name in {"sampler", "batch_sampler"}:
                waiting.append(value)
            elif isinstance(value, list | tuple):
                waiting += [inside for inside in value if isinstance(inside, Sampler)]
    return found


def is_elastic(parts: Iterable[Any]) -> bool:
    """Whether an `ElasticSampler` is among samplers."""
    return any(isinstance(part, ElasticSampler | ElasticBatches) for part in parts)


def generators_of(parts: Iterable[Any]) -> list[torch.Generator]:
    """The generators of torch in the attributes of samplers."""
    values = (value for part in parts for value in _attributes(part).values())
    return [value for value in values if isinstance(value, torch.Generator)]


def draws_at_once(parts: Iterable[Any]) -> bool:
    """Whether samplers draw from global streams only when a pass begins, as those of torch do."""
    return all(
        type(part).__module__.split(".")[0] in _KNOWN
        and all(value is not torch.default_generator for value in _attributes(part).values())
        for part in parts
    )


def _attributes(one: Any) -> dict[str, Any]:
    return dict(getattr(one, "__dict__", {}))


def numbers_of(part: Any) -> dict[str, Any]:
    """The attributes of a sampler that are plain values."""
    return {name: value for name, value in _attributes(part).items() if type(value) in _PLAIN}


def generators_and_numbers(part: Any) -> dict[str, Any]:
    """The numbers of an object, and the states of its generators."""
    return numbers_of(part) | _generators(part)


def _generators(part: Any) -> dict[str, Any]:
    """The states of the generators of a sampler, except the global one."""
    return {
        name: state
        for name, value in _attributes(part).items()
        if value is not torch.default_generator and (state := _state_of(value)) is not None
    }


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    if isinstance(generator, random.Random):
        return generator.getstate()
    return None


def is_number(value: object) -> bool:
    """Whether a value is kept as a number of a sampler: not the state of a generator."""
    return type(value) in _PLAIN


def set_value(part: Any, name: str, value: Any) -> None:
    """Set a number or the state of a generator of a sampler.

    Args:
        part: the sampler, or another object.
        name: the attribute.
        value: the number, or the state.

    Raises:
        ArgumentError: the attribute does not take the value.
    """
    now = _attributes(part).get(name)
    try:
        if isinstance(now, torch.Generator):
            now.set_state(torch.from_numpy(np.array(value, np.uint8)))
        elif isinstance(now, np.random.Generator):
            now.bit_generator.state = value
        elif isinstance(now, np.random.RandomState):
            now.set_state(value)
        elif isinstance(now, random.Random):
            now.setstate(value)
        elif name == "epoch" and callable(getattr(part, "set_epoch", None)):
            part.set_epoch(value)
        elif now is None and isinstance(value, np.ndarray) and value.dtype == np.uint8:  # made at the first use
            setattr(part, name, torch.Generator().set_state(torch.from_numpy(value.copy())))
        elif type(value) in _PLAIN:
            setattr(part, name, value)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ArgumentError(f"the state of `{type(part).__name__}.{name}` cannot be set: {error}") from error


def _torchdata(name: str) -> Any:
    """A class of torchdata, if the program has imported it."""
    return getattr(sys.modules.get("torchdata.stateful_dataloader.sampler"), name, None)


def _batching() -> list[Any]:
    """The methods that make batches of items, and do nothing else."""
    known = (BatchSampler, _torchdata("BatchSampler"))
    return [one.__iter__ for one in known if one is not None]


def _dividing() -> list[Any]:
    """The methods that divide an order over ranks as `DistributedSampler` does."""
    known = (DistributedSampler, _torchdata("StatefulDistributedSampler"))
    return [one.__iter__ for one in known if one is not None]
