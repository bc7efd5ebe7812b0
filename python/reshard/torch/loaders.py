"""The position in a `StatefulDataLoader` of torchdata, as state of a run: exact, or refused.

Of a dataset with a length the position is saved as the items of the sampler that the returned batches had, see
`orders`. It does not depend on workers, and not on the size of the batches. The state of torchdata is saved where the
dataset is a stream or has state.

Each rank saves its own state. On another number of ranks the rest of an epoch is computed for a `DistributedSampler`.
Elsewhere it is refused, unless the user gives a function that makes new states (`reshard.PerRank`).
"""

from __future__ import annotations

import logging
import sys
import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from reshard.errors import MismatchError
from reshard.formats.state import digest_of
from reshard.torch.orders import Loop, Order, Rest, Split, checksum, generators_of, is_elastic, samplers_in, whole
from reshard.torch.rng import HostStreams
from reshard.torch.sampler import check_not_read
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_log = logging.getLogger("reshard")

_KIND = "reshard.StatefulDataLoader/1"
_MAX_SEED = 1 << 63
_FUNCTION = "`sampler=PerRank(loader, reshape=f)` with a function `f(states, rank, world_size)` that returns the state"


def followed(loader: Any, name: str) -> Any:
    """A loader as an object whose state is its exact position; other objects are returned as they are.

    A loader of torch without a generator gets one, for the seeds of its workers: else each iterator that begins draws
    from the stream of the process. A resumed run begins one more of them than an uninterrupted run, and all later
    random numbers would differ. A generator of a loader that also shuffles the samples stays that of the shuffling.

    Args:
        loader: a sampler or an object with state.
        name: its name in the run. It distinguishes the private random streams of several loaders.

    Raises:
        ArgumentError: an iterator over the loader is in use.
    """
    if not isinstance(loader, DataLoader):
        return loader
    inner = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    inner = inner.inner if isinstance(inner, Order) else inner
    parts = samplers_in(inner)
    base = getattr(sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", None)
    is_known = base is not None and isinstance(loader, base) and type(loader).state_dict is base.state_dict
    has_own_state = any(
        hasattr(type(part), "state_dict") and not type(part).__module__.startswith("torchdata.") for part in parts
    )
    _give_generator(loader, parts, gives_samplers=not is_known)
    return FollowedLoader(loader, name) if is_known and not has_own_state else loader


def _give_generator(loader: Any, parts: Sequence[Any], *, gives_samplers: bool) -> None:
    own = generators_of(parts)
    is_shared = hasattr(loader, "state_dict") and any(one is loader.generator for one in own)
    if loader.generator is not None and not is_shared:
        return
    loader.generator = torch.Generator()
    loader.generator.manual_seed(torch.initial_seed() % _MAX_SEED)
    for part in parts if gives_samplers else ():
        if getattr(part, "generator", loader) is None:
            part.generator = loader.generator


class FollowedLoader:
    """The position in a `StatefulDataLoader`. Its sampler becomes an `Order`; the loader is used as before."""

    def __init__(self, loader: Any, name: str) -> None:
        check_not_read([loader])
        self.loader = loader
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        field = "sampler" if loader.batch_sampler is None else "batch_sampler"
        inner = getattr(loader, field)
        if isinstance(inner, Order):  # of an earlier Checkpointer
            self.order = inner
        else:
            seed = torch.initial_seed() + (0 if name == "sampler" else zlib.crc32(name.encode()))
            ahead = loader.num_workers * (loader.prefetch_factor or 0)
            self.order = Order(inner, ahead=ahead, seed=seed % _MAX_SEED, is_stream=self._is_stream)
            vars(loader)[field] = self.order  # a loader does not let its samplers be set
        loader.load_state_dict({})  # a loop that was left, and its workers, have the old sampler
        self._loaded: dict[str, Any] | None = None
        self._n_before = 0  # batches that torchdata counts as returned and the order does not

    @property
    def n_passes(self) -> int | None:
        """How many loops over the samples are complete; None: of a stream."""
        return None if self._is_stream else self.order.n_passes - (not self._state()["is_end"])

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches that the loader has returned."""
        return self._state()

    def _state(self) -> dict[str, Any]:
        loader = self.loader
        iterator = vars(loader).get("_iterator")
        is_new = iterator is None or vars(loader).get("_initial_iter_for_state_dict")
        if is_new and self._loaded is not None:
            return self._loaded
        common = {
            "kind": _KIND,
            "generator": loader.generator.get_state().numpy(),
            "n_workers": loader.num_workers,
            "batch_size": loader.batch_size,
        }
        if self._is_stream:
            return common | {"loader": loader.state_dict()}
        loop = None if is_new else getattr(iterator, "_sampler_iter", None)
        made = loop.run if isinstance(loop, Loop) else None
        order = self.order
        state = common | {
            "samplers": order.kinds,
            "initial": order.initial,
            "n_passes": order.n_passes,
            "n_items": 0,
            "checksum": 0,
            "is_end": made is None,
            "left": None,
            "order": order.sources(),
            "split": None,
            "rest": None,
            "loader": loader.state_dict() if hasattr(loader.dataset, "state_dict") and not is_new else None,
        }
        if made is None:
            return state
        n_items, crc = made.position(iterator._num_yielded - self._n_before)  # noqa: SLF001
        rest, split = made.rest, made.split
        return state | {
            "n_items": n_items,
            "checksum": crc,
            "is_end": bool(iterator._finished),  # noqa: SLF001
            "left": made.left(n_items),
            "order": made.sources,
            "split": None if split is None else split.to_value(),
            "rest": None if rest is None else rest.to_value(),
        }

    def check(self, state: Any) -> None:
        """Check that a value is the state of such a loader.

        Raises:
            MismatchError: it is not.
        """
        if not isinstance(state, dict) or state.get("kind") != _KIND:
            kind = state.get("kind", "another one") if isinstance(state, dict) else type(state).__name__
            raise MismatchError(
                f"the saved position in the data is not that of a StatefulDataLoader: {show(str(kind))}",
                hint="pass the sampler or the loader that the run was saved with",
            )
        if ("order" in state) is self._is_stream:
            kinds = ("a stream", "a dataset with a length")
            before, now = kinds if "order" not in state else kinds[::-1]
            raise MismatchError(f"the data was {before} when the position was saved, and is {now}")
        if not self._is_stream and state["samplers"] != self.order.kinds:
            raise MismatchError(
                f"the samples were given by {_named(state['samplers'])}, and are now given by "
                f"{_named(self.order.kinds)}, whose order is another one",
                hint="use the same samplers",
            )
        if state["loader"] is not None and state["n_workers"] != self.loader.num_workers:
            raise MismatchError(
                f"the loader had {state['n_workers']} workers, and has {self.loader.num_workers}: "
                f"{'a stream' if self._is_stream else 'a dataset with state'} is at another position in each of them",
                hint=f"use `num_workers={state['n_workers']}`",
            )

    def fitted(self, own: Any, states: Sequence[Any], *, is_same: bool) -> tuple[dict[str, Any], list[str]]:
        """The state of this rank, from those of the ranks that saved. Changes nothing.

        Args:
            own: the state that this rank saved, if there is one.
            states: the states of all ranks; with the same number of ranks, only of this one.
            is_same: whether there are as many ranks as saved.

        Returns:
            The state, and messages about what is different.

        Raises:
            MismatchError: the states do not say which samples are left for this rank.
        """
        for state in states:
            self.check(state)
        split = None if self._is_stream else Split.of(self.order.items)
        if is_same and (self._is_stream or _is_same_part(own["split"], split)):
            was, now = own.get("batch_size"), self.loader.batch_size
            if was is None or now is None or was == now:
                return own, []
            if own["rest"] is not None:  # parts that differ by a sample have as many batches of that size alone
                raise MismatchError(
                    f"the rest of the epoch was divided over {split.world_size if split else 0} ranks for batches of "
                    f"{own['rest']['size']} samples, and the loader has batches of {now}: a rank would have one more",
                    hint=f"use batches of {own['rest']['size']} samples until the epoch ends",
                )
            return own, [f"the loader has batches of {now} samples, and had {was}: it goes on at the same sample"]
        n_ranks = f"{len(states)} rank{'' if len(states) == 1 else 's'} saved the position in the data"
        if self._is_stream or any(state["loader"] is not None for state in states):
            what = "a stream" if self._is_stream else "a dataset with state"
            raise MismatchError(
                f"{n_ranks}, which is {what} on each of them, and there are others now",
                hint=f"use the same number of ranks, or {_FUNCTION} of a rank",
            )
        is_over = all(state["is_end"] or state["left"] == 0 for state in states)
        first = states[0]
        if split is None or any(state["split"] is None and not state["is_end"] for state in states):
            same = {digest_of([state["order"]["samplers"], state["checksum"], state["n_items"]]) for state in states}
            if is_over and len(same) == 1:
                return first, []
            raise MismatchError(
                f"{n_ranks}, within an epoch, and there are others now: {_named(first['samplers'])} does not say how "
                "the samples are divided",
                hint=f"use the same number of ranks, a `DistributedSampler`, an `ElasticSampler`, or {_FUNCTION} of a "
                "rank",
            )
        if all(state["is_end"] for state in states):
            return first | {"n_items": 0, "checksum": 0, "split": None, "rest": None}, []
        start = self._start(states, split)
        n_left = max(split.n_samples - start, 0)
        rest = Rest(start, self.order.size, self.order.drop_last)
        n_read = rest.n_divided(split)
        message = (
            f"the rest of the epoch, {n_left} of {split.n_samples} samples, is divided over {split.world_size} ranks"
        )
        if n_read != n_left:
            message += f"; {n_read - n_left} are read twice" if n_read > n_left else f"; {n_left - n_read} are dropped"
        state = first | {"n_items": 0, "checksum": 0, "left": None, "rest": rest.to_value()}
        return state, [message] if n_left else []

    def _start(self, states: Sequence[Any], split: Split) -> int:
        """How many samples of the order of an epoch all ranks have read."""
        before = [Split(**state["split"]) for state in states]
        first = before[0]
        for name in ("n_samples", "seed", "shuffle"):
            was, now = getattr(first, name), getattr(split, name)
            if was != now:
                raise MismatchError(
                    f"`{name}` of the `DistributedSampler` was {was}, and is {now}: the order is another one",
                    hint="use the same dataset and the same options of the sampler within an epoch",
                )
        counted = {state["n_items"] for state in states}
        is_over = all(state["left"] == 0 for state in states)
        rests = [digest_of(state["rest"]) for state in states]
        same = {(one.epoch, one.world_size, rest) for one, rest in zip(before, rests, strict=True)}
        if len(same) > 1 or (len(counted) > 1 and not is_over):
            raise MismatchError("the ranks that saved are at different positions of the epoch")
        if len(states) > 1 and {one.rank for one in before} != set(range(first.world_size)):
            raise MismatchError(f"the ranks that saved had not all parts of the `DistributedSampler`: {len(states)}")
        order = whole(self.order.items) if not split.shuffle else _order_of(self.order.items, first.epoch)
        rest = Rest(**states[0]["rest"]) if states[0]["rest"] else None
        for one, state in zip(before, states, strict=True):
            part = (rest or Rest(0, None, drop_last=False)).part(order, one)[: state["n_items"]]
            if checksum(part) != state["checksum"]:
                raise MismatchError(
                    f"the samples that rank {one.rank} of {one.world_size} had read are not those of the order now",
                    hint="use the same dataset and the same options of the sampler within an epoch",
                )
        if is_over:
            return split.n_samples
        n_read: int = counted.pop() * first.world_size
        return min((0 if rest is None else rest.start) + n_read, split.n_samples)

    def reshaped(
        self, function: Callable[[list[Any], int, int], Any], states: Sequence[Any], rank: int, world_size: int
    ) -> Any:
        """The state that a function of the user makes. Of a stream it gets and returns the state of torchdata.

        Args:
            function: called as `function(states, rank, world_size)`.
            states: the states of the ranks that saved.
            rank: this rank.
            world_size: number of ranks.

        Raises:
            MismatchError: a state is not that of such a loader.
        """
        if not self._is_stream:
            return function([*states], rank, world_size)
        for state in states:
            self.check(state)
        return {**states[0], "loader": function([state["loader"] for state in states], rank, world_size)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position of this rank.

        Raises:
            MismatchError: the order of the samples cannot be found again.
        """
        self.check(state)
        loader, order = self.loader, self.order
        loader.load_state_dict({} if state["loader"] is None else state["loader"])
        generator = torch.from_numpy(state["generator"].copy())
        loader.generator.set_state(generator)
        # The iterator that begins draws a number that the uninterrupted run had drawn before.
        is_within = self._is_stream or not state["is_end"]
        order.calls = {0: lambda: loader.generator.set_state(generator)} if is_within else {}
        self._loaded = dict(state)
        self._n_before = 0
        if self._is_stream:
            self._watch_forwarding(state["loader"])
            return
        order.n_passes = state["n_passes"] - 1
        if state["n_items"] == 0 and state["is_end"]:
            order.set_sources(state["order"], state["initial"])
            order.n_passes = state["n_passes"]
            order.forget()
            return
        rest = None if state["rest"] is None else Rest(**state["rest"])
        if rest is not None:
            order.items.set_epoch(state["split"]["epoch"])
        difference = order.restore(state["order"], state["initial"], state["n_items"], state["checksum"], rest)
        if difference is not None:
            raise MismatchError(
                f"the first {state['n_items']} samples of the loop, which were read, are other ones when "
                f"{_named(order.kinds)} begins again{f' ({difference})' if difference else ''}: the rest is not known",
                hint="use the same dataset and samplers within an epoch; a sampler of your own draws from global "
                "random streams, or from generators in its attributes, or has `state_dict` and `load_state_dict`",
            )
        if state["is_end"]:
            order.forget()
        if state["loader"] is not None:
            self._n_before = _n_yielded(state["loader"])

    def _watch_forwarding(self, state: Any) -> None:
        """Refuse a stream without state that draws from global random streams while torchdata reads it again."""
        fetched = state.get("fetcher_state")
        if fetched is None or fetched["dataset_iter_state"] is not None or state["dataset_state"] is not None:
            return
        n_read, is_finished = state["_num_yielded"], state["_iterator_finished"]
        calls, before = self.order.calls, list[HostStreams]()
        first = calls[0]

        def begin() -> None:
            first()
            before.append(HostStreams.now())
            calls[0 if is_finished else n_read] = end

        def end() -> None:
            if digest_of(before[0].to_value()) != digest_of(HostStreams.now().to_value()):
                raise MismatchError(
                    f"the {n_read} batches of the stream that were read are read again, and draw from the random "
                    f"streams of the program: `{type(self.loader.dataset).__name__}` has no state",
                    hint="give the dataset `state_dict` and `load_state_dict`, or a random generator, or workers",
                )

        if n_read:
            calls[0] = begin


def _order_of(sampler: Any, epoch: int) -> list[int]:
    """The order of a `DistributedSampler` in an epoch."""
    now = sampler.epoch
    sampler.set_epoch(epoch)
    try:
        return whole(sampler)
    finally:
        sampler.set_epoch(now)


def fits_any(one: Any) -> bool:
    """Whether a state that is equal on all ranks may be that of another number of ranks: not what is of each rank."""
    if isinstance(one, DataLoader):
        return is_elastic(samplers_in(one.batch_sampler if one.batch_sampler is not None else one.sampler))
    return not isinstance(one, DistributedSampler)


def state_for(  # noqa: PLR0917
    one: Any, name: str, own: Any, states: Sequence[Any], rank: int, world_size: int, reshape: Any = None
) -> tuple[Any, list[str]]:
    """The state of a sampler or a loader on a rank, from those of the ranks that saved. Changes nothing.

    Args:
        one: the object.
        name: its name in messages.
        own: the state that this rank saved, if there is one.
        states: of all ranks, if their number was another one; else empty.
        rank: this rank.
        world_size: number of ranks.
        reshape: the function of the user that makes it.

    Returns:
        The state, and messages about what is different.

    Raises:
        MismatchError: the states do not say it.
    """
    if states and reshape is not None:
        make = one.reshaped if isinstance(one, FollowedLoader) else _called
        return make(reshape, states, rank, world_size), [f"{name}: `reshape` made the state from {len(states)} ranks"]
    if isinstance(one, FollowedLoader):
        return one.fitted(own, states or [own], is_same=not states)
    if not states or (fits_any(one) and (isinstance(one, DataLoader) or len({digest_of(s) for s in states}) == 1)):
        return own, []
    raise MismatchError(
        f"{name} is of type {type(one).__name__}, with a position of each rank: {len(states)} ranks saved it, "
        f"{world_size} ranks load it",
        hint=f"use the same number of ranks, or {_FUNCTION} of a rank",
    )


def _called(function: Callable[[list[Any], int, int], Any], states: Sequence[Any], rank: int, world_size: int) -> Any:
    return function([*states], rank, world_size)


def _is_same_part(saved: Any, now: Split | None) -> bool:
    if saved is None or now is None:
        return True
    return (saved["world_size"], saved["rank"]) == (now.world_size, now.rank)


def _n_yielded(state: Mapping[str, Any]) -> int:
    """How many batches a state of torchdata counts as returned."""
    if "_num_yielded" in state:
        return int(state["_num_yielded"])
    return int(state["_snapshot"]["_snapshot_step"] + state["_steps_since_snapshot"])


def _named(kinds: Sequence[str]) -> str:
    return listed([f"`{kind}`" for kind in kinds]) or "no sampler"
