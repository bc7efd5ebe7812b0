"""The sampler: one global order, cut over any ranks, gone on with after anything."""

from __future__ import annotations

import itertools
import json
import pickle
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.helpers.cases import slow
from torch.utils.data import BatchSampler, DataLoader, Dataset

from reshard.errors import ArgumentError, MismatchError
from reshard.torch.permutation import Permutation
from reshard.torch.sampler import ElasticSampler

if TYPE_CHECKING:
    from collections.abc import Iterator


def make(
    dataset_len: int = 20,
    batch: int = 4,
    rank: int = 0,
    world_size: int = 1,
    *,
    seed: int = 7,
    shuffle: bool = True,
    drop_last: bool = True,
) -> ElasticSampler:
    return ElasticSampler(dataset_len, seed, shuffle, batch, rank, world_size, drop_last=drop_last)


def order_of(n: int, epoch: int, *, seed: int = 7, shuffle: bool = True) -> list[int]:
    order: list[int] = Permutation(n, seed, epoch).at(np.arange(n)).tolist() if shuffle else list(range(n))
    return order


def uninterrupted(
    n: int, batch: int, *, seed: int = 7, shuffle: bool = True, drop_last: bool = True
) -> Iterator[list[int]]:
    """The batches of a run on one rank that nothing happens to."""
    for epoch in itertools.count():
        order = order_of(n, epoch, seed=seed, shuffle=shuffle)
        end = n - n % batch if drop_last else -(-n // batch) * batch
        for start in range(0, end, batch):
            yield [order[at % n] for at in range(start, start + batch)]


class Run:
    """What a job does: a sampler a rank, iterators that are ahead of the steps, and the ids of each step."""

    def __init__(self, world_size: int, batch: int, state: dict[str, Any] | None, **options: Any) -> None:
        self.samplers = [make(batch=batch, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
        for sampler in self.samplers:
            if state is not None:
                assert sampler.load_state_dict(state) == []
        self.ahead: list[Iterator[list[int]]] = [iter(()) for _ in self.samplers]
        self.fetched: list[list[list[int]]] = [[] for _ in self.samplers]

    def step(self, prefetch: int) -> list[int]:
        if not self.fetched[0]:
            nexts = [next(ahead, None) for ahead in self.ahead]
            if nexts[0] is None:  # the loop over the loader is over, and the next one begins
                self.ahead = [iter(sampler.batches()) for sampler in self.samplers]
                nexts = [next(ahead) for ahead in self.ahead]
            for fetched, batch in zip(self.fetched, nexts, strict=True):
                assert batch is not None
                fetched.append(batch)
        for fetched, ahead in zip(self.fetched, self.ahead, strict=True):
            fetched.extend(itertools.islice(ahead, max(0, prefetch - len(fetched))))
        ids = [index for fetched in self.fetched for index in fetched.pop(0)]
        for sampler in self.samplers:
            sampler.step()
        return ids

    def state(self) -> dict[str, Any]:
        states = [json.loads(json.dumps(sampler.state_dict())) for sampler in self.samplers]
        assert all(state == states[0] for state in states)
        return states[0]  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(4))
def test_any_history_of_kills_and_resizes_is_the_uninterrupted_run(chunk: int) -> None:
    """250 histories each: what counts in the end is, in order, what one rank would have read."""
    for history in range(chunk * 250, chunk * 250 + 250):
        rng = random.Random(history)
        batch = rng.choice([6, 12, 24])
        worlds = [w for w in range(1, batch + 1) if batch % w == 0]
        options: dict[str, Any] = {
            "dataset_len": rng.randint(batch, 5 * batch + 3),
            "seed": rng.randrange(2**40),
            "shuffle": rng.random() < 0.8,
            "drop_last": rng.random() < 0.5,
        }
        made: list[list[int]] = []  # ids of every step that counts
        saved: tuple[int, dict[str, Any] | None] = (0, None)
        for _ in range(rng.randint(2, 5)):
            run = Run(rng.choice(worlds), batch, saved[1], **options)
            del made[saved[0] :]  # steps after the last save are lost
            for _ in range(rng.randint(0, 9)):
                made.append(run.step(rng.randint(1, 6)))
                if rng.random() < 0.4:
                    saved = len(made), run.state()
        n, *_ = options.pop("dataset_len"), None
        expected = list(itertools.islice(uninterrupted(n, batch, **options), len(made)))
        assert made == expected, history
        assert run.samplers[0].total == len(made) * batch


@pytest.mark.parametrize("history", range(50))
def test_batch_size_may_change_and_each_sample_is_still_seen_once(history: int) -> None:
    rng = random.Random(history)
    n, state, seen = rng.randint(60, 200), None, list[int]()
    while True:
        world_size = rng.choice([1, 2, 3])
        run = Run(world_size, world_size * rng.choice([1, 2, 4]), state, dataset_len=n, drop_last=False)
        while run.samplers[0].epoch == 0 and rng.random() < 0.8:
            seen += run.step(3)
        state = run.state()
        if state["epoch"] == 1:
            break
    assert seen[:n] == order_of(n, 0)
    assert len(seen) - n < 12
    assert seen[n:] == seen[: len(seen) - n]  # the tail is filled up with the first ones


def test_larger_batch_leaves_a_tail_that_is_told() -> None:
    small, large = make(20, 4), make(20, 16)
    small.step(2)
    assert large.load_state_dict(small.state_dict()) == [
        "the last 12 samples of epoch 0 are dropped: fewer than a batch of 16"
    ]
    assert (large.epoch, large.consumed, large.total) == (1, 0, 8)


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_ranks_have_equal_runs_of_each_batch(world_size: int) -> None:
    own = [list(make(20, 6, rank, world_size)) for rank in range(world_size)]
    local = 6 // world_size
    joined = [index for step in range(3) for part in own for index in part[step * local : (step + 1) * local]]
    assert joined == order_of(20, 0)[:18]
    assert {len(part) for part in own} == {len(make(20, 6, 0, world_size))} == {3 * local}


def test_one_by_one_and_in_lists() -> None:
    sampler = make(40, 16, 1, 2)
    flat = list(sampler)
    for size in (1, 2, 4, 8):
        batches = list(sampler.batches(size))
        assert [len(batch) for batch in batches] == [size] * len(sampler.batches(size))
        assert list(itertools.chain(*batches)) == flat
    assert list(BatchSampler(sampler, 4, drop_last=False)) == list(sampler.batches(4))
    assert list(sampler.batches()) == list(sampler.batches(8))
    with pytest.raises(ArgumentError, match="batch_size 3 is not a divisor"):
        sampler.batches(3)


def test_a_loop_that_was_left_goes_on_after_the_completed_steps() -> None:
    sampler = make(20, 4)
    assert list(itertools.islice(sampler, 11)) == order_of(20, 0)[:11]
    assert list(sampler) == order_of(20, 0)  # nothing was completed
    sampler.step(2)
    assert list(sampler) == order_of(20, 0)[8:]
    sampler.step(3)
    assert sampler.epoch == 1
    assert list(sampler) == order_of(20, 1) != order_of(20, 0)


def test_an_iterator_keeps_its_epoch_while_steps_complete() -> None:
    sampler = make(20, 4)
    ahead = iter(sampler)
    first = list(itertools.islice(ahead, 16))
    sampler.step(4)
    assert first + list(ahead) == order_of(20, 0)


@pytest.mark.parametrize("n_steps", [0, 1, 4, 5, 6, 14, 10**12])
@pytest.mark.parametrize("drop_last", [True, False])
def test_many_steps_are_as_one_by_one(n_steps: int, drop_last: bool) -> None:  # noqa: FBT001
    sampler, n_loop = make(22, 4, drop_last=drop_last), min(n_steps, 100)
    sampler.step(n_steps)
    per_epoch = 5 if drop_last else 6
    assert sampler.steps_per_epoch == per_epoch
    assert (sampler.epoch, sampler.consumed) == (n_steps // per_epoch, n_steps % per_epoch * 4)
    assert sampler.total == n_steps * 4
    other = make(22, 4, drop_last=drop_last)
    for _ in range(n_loop):
        other.step()
    if n_loop == n_steps:
        assert other.state_dict() == sampler.state_dict()


def test_tail_is_dropped_or_filled_up() -> None:
    assert list(make(10, 4, shuffle=False)) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert list(make(10, 4, shuffle=False, drop_last=False)) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert list(make(10, 4, 1, 2, shuffle=False, drop_last=False)) == [2, 3, 6, 7, 0, 1]
    assert list(make(3, 8, shuffle=False, drop_last=False)) == [0, 1, 2, 0, 1, 2, 0, 1]


def test_ten_billion_samples() -> None:
    sampler = ElasticSampler(10**10, 0, True, 2048, 3, 16)
    sampler.step(4_000_000)
    found = list(itertools.islice(sampler, 300_000))
    assert len(set(found)) == 300_000
    first = 4_000_000 * 2048 + 3 * 128
    assert found[:128] == Permutation(10**10, 0, 0).at(np.arange(first, first + 128)).tolist()
    assert found[128:256] == Permutation(10**10, 0, 0).at(np.arange(first + 2048, first + 2176)).tolist()
    assert all(type(index) is int for index in found[:10])


def test_a_dataset_of_one_sample_goes_on() -> None:
    sampler = make(1, 1)
    sampler.step(3)
    resumed = make(1, 1)
    assert resumed.load_state_dict(sampler.state_dict()) == []
    assert (resumed.epoch, resumed.consumed, list(resumed)) == (3, 0, [0])


def test_set_epoch_goes_forward_only() -> None:
    sampler = make(20, 4)
    sampler.step(2)
    sampler.set_epoch(0)
    assert sampler.consumed == 8
    sampler.set_epoch(3)
    assert (sampler.epoch, sampler.consumed) == (3, 0)
    with pytest.raises(ArgumentError, match="epoch 2 is complete"):
        sampler.set_epoch(2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((20, 0, True, 6, 0, 4), "is not a multiple of 4 ranks"),
        ((20, 0, True, 4, 4, 4), "rank is 4"),
        ((20, 0, True, 4, -1, 4), "rank is -1"),
        ((20, 0, True, 4, 0, 0), "world_size is 0"),
        ((20, 0, True, 0, 0, 1), "global_batch_size is 0"),
        ((20, 0, True, 4.0, 0, 1), "global_batch_size is 4.0"),
        ((0, 0, True, 4, 0, 1), "dataset_len is 0"),
        ((2**62 + 1, 0, True, 4, 0, 1), "dataset_len is"),
        ((20, -1, True, 4, 0, 1), "seed is -1"),
        ((20, True, True, 4, 0, 1), "seed is True"),
        ((3, 0, True, 4, 0, 1), "a dataset of 3 samples is smaller than one batch of 4"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ElasticSampler(*arguments)


def test_numpy_integers_are_taken_and_the_state_is_plain() -> None:
    numbers: list[Any] = [np.int64(20), np.int32(3), True, np.int64(4), np.int64(0), np.int64(1)]
    sampler = ElasticSampler(*numbers)
    sampler.step()
    assert json.loads(json.dumps(sampler.state_dict())) == sampler.state_dict()


# -- states


def state_at(**changes: Any) -> dict[str, Any]:
    sampler = make(20, 4)
    sampler.step(7)
    state = sampler.state_dict() | changes
    return {name: value for name, value in state.items() if value is not ...}


@pytest.mark.parametrize(
    "state",
    [
        {},
        [],
        None,
        {"epoch": 1},
        {"yielded": 3},  # that of torchdata's distributed sampler
        state_at(extra=1),
        *(state_at(**{name: ...}) for name in state_at()),
        state_at(kind="reshard.ElasticSampler/2"),
        state_at(kind=1),
        *(
            state_at(**{name: value})
            for name in ("epoch", "consumed", "total", "seed", "dataset_len", "epoch_len", "first_epoch")
            for value in (-1, 1.0, "1", None, True, float("nan"), [1])
        ),
        *(state_at(**{name: 2**63}) for name in ("epoch", "consumed", "total", "dataset_len", "epoch_len")),
        state_at(consumed=20),
        state_at(dataset_len=0),
        state_at(epoch_len=21),
        state_at(first_epoch=2),
        state_at(shuffle=1),
        state_at(shuffle=None),
    ],
    ids=repr,
)
def test_foreign_states_are_refused_and_change_nothing(state: Any) -> None:
    sampler = make(20, 4)
    sampler.step(2)
    before = sampler.state_dict()
    with pytest.raises(ArgumentError):
        sampler.load_state_dict(state)
    assert sampler.state_dict() == before


def test_seed_is_that_of_the_state_and_shuffle_must_agree() -> None:
    sampler = make(20, 4, seed=99)
    assert sampler.load_state_dict(state_at()) == [
        "seed 99 of the sampler is not used: the order of the saved seed 7 continues"
    ]
    assert sampler.seed == 7
    assert list(sampler) == order_of(20, 1)[8:]
    with pytest.raises(MismatchError, match="shuffle"):
        make(20, 4, shuffle=False).load_state_dict(state_at())


# -- other data. The state: epoch 1 of 20 samples, 8 consumed, 28 in all


@pytest.mark.parametrize("n", [20, 12, 40])
def test_ignore_data_skip_reads_the_data_from_its_beginning(n: int) -> None:
    sampler = make(n, 4)
    told = sampler.load_state_dict(state_at(), ignore_data_skip=True, data_skip_steps=2)
    assert told == ["ignore_data_skip: the data is read from the start"]
    assert (sampler.epoch, sampler.consumed, sampler.total) == (1, 0, 28)
    assert list(sampler) == order_of(n, 1)


@pytest.mark.parametrize(
    ("n", "steps", "epoch", "consumed"), [(12, 0, 1, 0), (12, 2, 1, 8), (40, 7, 1, 28), (12, 7, 3, 4), (20, 6, 1, 4)]
)
def test_data_skip_steps_counts_from_the_beginning_of_the_data(n: int, steps: int, epoch: int, consumed: int) -> None:
    sampler = make(n, 4)
    told = sampler.load_state_dict(state_at(), data_skip_steps=steps)
    assert told == [f"data_skip_steps: {steps} steps of data are skipped"]
    # Data of the same length is the same data, which was begun in epoch 0.
    assert (sampler.epoch, sampler.consumed, sampler.total) == (epoch, consumed, 28)


def test_scenarios_of_the_documents_one_after_the_other() -> None:
    """New data from its start; interrupted after 2 steps, which are skipped; then twice the batch, half the steps."""
    first = make(48, 4)
    first.load_state_dict(state_at(), ignore_data_skip=True)
    first.step(2)
    plain, told, doubled = make(48, 4), make(48, 4), make(48, 8)
    assert plain.load_state_dict(first.state_dict()) == []
    told.load_state_dict(first.state_dict(), data_skip_steps=2)
    doubled.load_state_dict(first.state_dict(), data_skip_steps=1)
    assert list(plain) == list(told) == list(doubled) == order_of(48, 1)[8:]
    first.step(24)  # into the third epoch of this data
    told.load_state_dict(first.state_dict(), data_skip_steps=26)
    assert told.state_dict() == first.state_dict()


def test_new_data_of_the_same_length_is_counted_from_its_own_beginning() -> None:
    first, told = make(20, 4), make(20, 4)
    first.load_state_dict(state_at(), ignore_data_skip=True)  # in epoch 1
    first.step(7)
    told.load_state_dict(first.state_dict(), data_skip_steps=7)
    assert (told.epoch, told.consumed) == (2, 8)
    assert told.state_dict() == first.state_dict()


@pytest.mark.parametrize("n", [8, 40])
def test_data_replaced_between_epochs_is_read_from_its_beginning(n: int) -> None:
    sampler = make(n, 4)
    told = sampler.load_state_dict(state_at(consumed=0, total=20))
    assert told == [f"the dataset has {n} samples, the saved one had 20: it is read from the start"]
    assert (sampler.epoch, sampler.total) == (1, 20)
    assert list(sampler) == order_of(n, 1)


@pytest.mark.parametrize(("n", "grown"), [(19, False), (19, True), (21, False)])
def test_other_data_in_mid_epoch_must_be_told(n: int, grown: bool) -> None:  # noqa: FBT001
    sampler = make(n, 4)
    before = sampler.state_dict()
    with pytest.raises(MismatchError, match=f"has {n} samples, the saved one had 20, 8 of which") as caught:
        sampler.load_state_dict(state_at(), grown=grown)
    assert "ignore_data_skip" in str(caught.value)
    assert sampler.state_dict() == before


def test_grown_data_ends_its_epoch_in_the_old_order() -> None:
    sampler = make(30, 4)
    told = sampler.load_state_dict(state_at(), grown=True)
    assert told == ["the dataset has 30 samples, the saved one had 20: epoch 1 ends after the 20 samples of its start"]
    assert list(sampler) == order_of(20, 1)[8:]
    again = make(30, 4, 1, 2)  # interrupted once more: nothing needs to be said
    assert again.load_state_dict(sampler.state_dict()) == []
    assert list(again.batches()) == [order_of(20, 1)[at + 2 : at + 4] for at in (8, 12, 16)]
    again.step(3)
    assert (again.epoch, again.consumed) == (2, 0)
    assert list(itertools.islice(again, 14)) == [order_of(30, 2)[at + i] for at in range(0, 28, 4) for i in (2, 3)]


# -- loaders


class Ids(Dataset[int]):
    """A dataset whose samples are their own indices."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # later Pythons on fork
@pytest.mark.parametrize("as_batches", [False, True])
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_loader_with_workers_that_fetch_ahead(workers: int, persistent: bool, as_batches: bool) -> None:  # noqa: FBT001
    """Three jobs of 1, 2 and 1 ranks; each ends in mid-epoch with batches under way."""
    n, batch = 50, 8
    made: list[list[int]] = []
    state = None
    for world_size, n_steps in [(1, 8), (2, 5), (1, 6)]:
        samplers = [make(n, batch, rank, world_size) for rank in range(world_size)]
        loaders: list[Iterator[torch.Tensor]] = []
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
            options: dict[str, Any] = {"num_workers": workers, "generator": torch.Generator()}
            if workers:
                options |= {"prefetch_factor": 3, "persistent_workers": persistent}
            if as_batches:
                options |= {"batch_sampler": sampler.batches(2)}
            else:
                options |= {"sampler": sampler, "batch_size": 2}
            loaders.append(forever(DataLoader[Any](Ids(n), **options)))
        for _ in range(n_steps):
            micro_steps = batch // world_size // 2
            made.append([int(i) for loader in loaders for _ in range(micro_steps) for i in next(loader)])
            for sampler in samplers:
                sampler.step()
        state = samplers[0].state_dict()
        assert state["total"] == len(made) * batch
    assert made == list(itertools.islice(uninterrupted(n, batch), len(made)))


def forever(loader: DataLoader[Any]) -> Iterator[torch.Tensor]:
    while True:
        yield from loader


def test_the_generator_of_the_loader_spares_the_random_state() -> None:
    sampler = make(20, 4)
    before = torch.get_rng_state()
    list(DataLoader(Ids(20), batch_size=4, sampler=sampler, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow(disk=False)
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("batch", "per_step", "found"),
    [
        (8, 1, "read 64 samples of this rank, and 8 steps of 4 samples were completed: samples are read again"),
        (2, 1, "the loop reads fewer than 4 samples of this rank for a step"),
        (4, 1, None),
        (2, 2, None),
    ],
)
def test_a_wrong_batch_size_of_the_loader_is_reported(
    caplog: pytest.LogCaptureFixture, batch: int, per_step: int, found: str | None, workers: int
) -> None:
    sampler = make(64, 4)
    loader = DataLoader(Ids(64), batch_size=batch, sampler=sampler, num_workers=workers)
    for _ in range(3):
        for number, _ in enumerate(loader, 1):
            if number % per_step == 0:
                sampler.step()
    assert len(caplog.messages) == (found is not None)
    assert found is None or found in caplog.messages[0]


def test_loops_that_complete_no_steps_or_are_left_early_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    sampler = make(64, 4)
    for _ in range(2):
        assert len(list(sampler)) == 64
    for _ in range(3):
        for _ in itertools.islice(DataLoader(Ids(64), batch_size=4, sampler=sampler), 10):
            sampler.step()
    assert not caplog.messages


# -- StatefulDataLoader: its habits first, then itself where it is installed


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("n_read", [0, 1, 3, 4, 7, 8, 12, 18])
def test_state_of_a_loop_is_that_of_the_sampler_once_all_is_done(n_read: int, size: int | None) -> None:
    """As torchdata does it: both states are taken when a batch is sent; the sampler's is older; both are loaded."""
    sampler, done = make(40, 8, 1, 2), make(40, 8, 1, 2)
    ahead: Any = iter(sampler) if size is None else iter(sampler.batches(size))
    n_read = n_read if size is None else n_read // size
    for _ in range(n_read):
        next(ahead)
    state, older = json.loads(json.dumps(ahead.state_dict())), sampler.state_dict()
    rest = list(ahead)
    steps = n_read * (size or 1) // 4
    done.step(steps)

    resumed = make(40, 8, 1, 2)
    resumed.load_state_dict(older)
    again: Any = iter(resumed) if size is None else iter(resumed.batches(size))
    again.load_state_dict(state)
    assert resumed.state_dict() == done.state_dict()
    assert again.state_dict() == state
    assert list(again) == rest


def test_state_of_a_loop_fits_other_ranks_between_steps_only() -> None:
    ahead = iter(make(40, 8, 0, 2))
    for _ in range(8):
        next(ahead)
    other = make(40, 8)
    again: Any = iter(other)
    again.load_state_dict(ahead.state_dict())  # type: ignore[attr-defined]
    assert list(again) == order_of(40, 0)[16:]
    next(ahead)
    with pytest.raises(MismatchError, match="after 1 of 4 samples"):
        again.load_state_dict(ahead.state_dict())  # type: ignore[attr-defined]
    for foreign in ({}, {"sampler": {}, "within": 0}, {"sampler": {}, "within": 0, "local_batch_size": 4}):
        with pytest.raises(ArgumentError):
            again.load_state_dict(foreign)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning", "ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("both", [False, True], ids=["sampler alone", "loader too"])
@pytest.mark.parametrize("as_batches", [False, True])
@pytest.mark.parametrize("workers", [0, *slow([2])])
def test_stateful_data_loader(workers: int, as_batches: bool, both: bool) -> None:  # noqa: FBT001
    from torchdata.stateful_dataloader import StatefulDataLoader

    made: list[list[int]] = []
    states: list[Any] = []
    for n_steps in (3, 5, 4, 6):
        sampler = make(50, 8)
        options: dict[str, Any] = {"batch_sampler": sampler.batches(4)} if as_batches else {"sampler": sampler}
        options |= {} if as_batches else {"batch_size": 4}
        loader = StatefulDataLoader(Ids(50), num_workers=workers, generator=torch.Generator(), **options)
        if states:
            sampler.load_state_dict(states[0])
            if both:
                loader.load_state_dict(states[1])
        batches = forever(loader)
        for _ in range(n_steps):
            made.append([int(i) for _ in range(2) for i in next(batches)])
            sampler.step()
        states = [sampler.state_dict(), loader.state_dict()]
        assert states[0]["total"] == 8 * len(made)
    assert made == list(itertools.islice(uninterrupted(50, 8), len(made)))


def _pace(sampler: ElasticSampler, batch: int, accumulated: int, *, workers: int, n_steps: int, lead: int) -> None:
    """A loop over a loader, which completes a step after some batches; `lead` batches are read before the first."""
    data: Any = range(480)
    loader = DataLoader(data, batch, sampler=sampler, num_workers=workers)
    step = 0
    while step < n_steps:
        batches = iter(loader)
        held = [next(batches) for _ in range(lead)]
        for number, _ in enumerate(itertools.chain(batches, held), start=1):
            if number % accumulated == 0:
                step += 1
                sampler.step()
                if step == n_steps:
                    break


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("batch", "accumulated", "lead", "word"),
    [
        (8, 1, 0, None),
        (4, 2, 0, None),
        (2, 4, 0, None),
        (8, 1, 3, None),
        (8, 2, 0, "more"),
        (4, 3, 0, "more"),
        (4, 1, 0, "fewer"),
        (4, 1, 2, "fewer"),
        (2, 3, 0, "fewer"),
    ],
)
def test_a_loop_that_reads_other_batches_than_steps_have_is_told_within_some_steps(  # noqa: PLR0917
    workers: int,
    batch: int,
    accumulated: int,
    lead: int,
    word: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sampler = ElasticSampler(480, 0, True, 8, 0, 1)
    _pace(sampler, batch, accumulated, workers=workers, n_steps=20, lead=lead)
    found = [line for line in caplog.messages if "samples of this rank for a step" in line]
    assert [line.split()[3] for line in found] == ([] if word is None else [word])


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_right_loop_over_epochs_is_not_warned(drop_last: bool, caplog: pytest.LogCaptureFixture) -> None:  # noqa: FBT001
    sampler, data = ElasticSampler(101, 0, True, 8, 0, 1, drop_last=drop_last), list(range(101))
    for _ in range(3):
        for _ in DataLoader(data, 4, sampler=sampler, num_workers=2):  # type: ignore[arg-type]
            pass
        sampler.step(sampler.steps_per_epoch)
    assert not caplog.messages
    assert pickle.loads(pickle.dumps(sampler)).state_dict() == sampler.state_dict()
