"""Random histories of runs with real loaders: cut and resumed, they read what the uninterrupted run reads.

The environment variable `RESHARD_LOADER_HISTORIES` sets the number of histories.
"""

from __future__ import annotations

import itertools
import os
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.helpers.ranks import Job
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from reshard import PerRank
from reshard.errors import ArgumentError, MismatchError
from reshard.torch import Checkpointer, ElasticSampler
from reshard.torch.loaders import followed
from reshard.torch.orders import Rest, Split, set_value
from reshard.torch.passes import Passes, has_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

N_HISTORIES = int(os.environ.get("RESHARD_LOADER_HISTORIES", "4"))
pytestmark = pytest.mark.filterwarnings("ignore")


def data_of(n: int) -> Any:
    return range(n)


def draw() -> float:
    return float(np.random.random())  # noqa: NPY002


class Drawn(Sampler[int]):
    """Draws from a source while it is read."""

    def __init__(self, n: int, source: Any) -> None:
        self.n, self.source, self.n_loops = n, source, 0

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        self.n_loops += 1
        for _ in range(self.n):
            yield (int(self.source() * self.n) + self.n_loops) % self.n


class FromAttribute(Drawn):
    """Draws from a generator in an attribute."""

    def __init__(self, n: int) -> None:
        self.generator = np.random.default_rng(5)
        super().__init__(n, self.generator.random)


KINDS: dict[str, Callable[[int], Any]] = {
    "shuffle": lambda _n: {"shuffle": True},
    "shuffle with generator": lambda _n: {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
    "random": lambda n: {"sampler": RandomSampler(range(n))},
    "random, long": lambda n: {"sampler": RandomSampler(range(n), num_samples=2 * n + 1)},
    "random with generator": lambda n: {"sampler": RandomSampler(range(n), generator=torch.Generator().manual_seed(3))},
    "replacement": lambda n: {"sampler": RandomSampler(range(n), replacement=True, num_samples=n + 40)},
    "weighted": lambda n: {"sampler": WeightedRandomSampler([1.0 + i for i in range(n)], n)},
    "subset": lambda n: {"sampler": SubsetRandomSampler(range(n))},
    "default generator": lambda n: {"sampler": SubsetRandomSampler(range(n), generator=torch.default_generator)},
    "python": lambda n: {"sampler": Drawn(n, random.random)},
    "numpy": lambda n: {"sampler": Drawn(n, draw)},
    "torch": lambda n: {"sampler": Drawn(n, lambda: torch.rand(1).item())},
    "attribute": lambda n: {"sampler": FromAttribute(n)},
    "sequential": lambda _n: {},
    "distributed": lambda n: {"sampler": DistributedSampler(data_of(n), 1, 0, seed=4)},
}


def history(number: int, root: Path) -> None:
    choice = random.Random(number)
    kind, n, size = choice.choice(sorted(KINDS)), choice.randint(5, 40), choice.randint(1, 7)
    workers = choice.choice([0, 0, 1, 2])
    options: dict[str, Any] = {"num_workers": workers}
    if workers:
        options |= {"prefetch_factor": choice.choice([1, 3]), "persistent_workers": choice.random() < 0.4}
    drop_last, as_batches, sets_epoch = (choice.random() < 0.5 for _ in range(3))
    n_epochs = choice.randint(2, 4)

    def loader() -> Any:
        made = KINDS[kind](n)
        if as_batches and "sampler" in made:
            return StatefulDataLoader(range(n), batch_sampler=BatchSampler(made["sampler"], size, drop_last), **options)
        return StatefulDataLoader(range(n), size, drop_last=drop_last, **made, **options)

    def run(folder: Path, saved: int | None, end: int | None) -> list[Any]:
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)
        data: Any = loader()
        seen: list[Any] = []
        with Checkpointer(folder, signals=(), async_save=False, commit={"durable": False}) as made:
            decision = made.resume(model=torch.nn.Linear(1, 1), sampler=data)
            step = decision.initial_step
            for epoch in range(decision.initial_epoch, n_epochs):
                if sets_epoch and isinstance(data.sampler, DistributedSampler):
                    data.sampler.set_epoch(epoch)
                for batch in data:
                    seen.append([epoch, batch.tolist(), random.random(), draw(), torch.rand(1).item()])
                    step += 1
                    made.step(step, save=step == saved)
                    if step == end:
                        return seen
                if step == saved:
                    made.save(step)  # at the end of a loop
        return seen

    whole = run(root / "whole", None, None)
    if not whole:
        return
    cuts = sorted({choice.randint(1, len(whole)) for _ in range(choice.randint(1, 2))})
    done = 0
    for cut in cuts:
        part = run(root / "cut", cut, cut)
        assert part == whole[done:cut], (number, kind, cut)
        done = cut
    assert run(root / "cut", None, None) == whole[done:], (number, kind, cuts)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(N_HISTORIES))
def test_a_history_reads_what_the_uninterrupted_run_reads(number: int, tmp_path: Path) -> None:
    history(number, tmp_path)


def ranks_of(n: int, world_size: int, size: int, options: dict[str, Any], *, epoch: int, drop_batch: bool) -> list[Any]:
    kind = StatefulDistributedSampler if options.get("stateful") else DistributedSampler
    found = []
    for rank in range(world_size):
        sampler: Any = kind(
            data_of(n),
            world_size,
            rank,
            shuffle=options["shuffle"],
            seed=options["seed"],
            drop_last=options["drop_last"],
        )
        loader = StatefulDataLoader(range(n), size, sampler=sampler, drop_last=drop_batch)
        found.append((loader, followed(loader, "sampler")))
        sampler.set_epoch(epoch)
    return found


def other_ranks(number: int) -> None:
    """One epoch on several numbers of ranks: each sample once, and as many batches on each rank."""
    choice = random.Random(number)
    n, epoch, drop_batch = choice.randint(30, 90), choice.randint(0, 2), choice.random() < 0.3
    options = {
        "shuffle": choice.random() < 0.7,
        "seed": choice.randint(0, 5),
        "drop_last": choice.random() < 0.3,
        "stateful": choice.random() < 0.3,
    }
    worlds = [choice.randint(1, 5) for _ in range(choice.randint(2, 4))]
    states: list[Any] = []
    seen: list[int] = []
    allowed = 0  # samples that may be missing
    repeated = 0  # samples that may be read twice
    is_over, last = False, 0
    for place, world_size in enumerate(worlds):
        size = choice.randint(1, 5)
        if (
            place > 1 and worlds[place - 1] == world_size
        ):  # the rest of an epoch that was divided is one for its batches
            size = last
        last = size
        made = ranks_of(n, world_size, size, options, epoch=epoch if not states else 0, drop_batch=drop_batch)
        for rank, (_, one) in enumerate(made):
            if states:
                is_same = len(states) == world_size
                state, _ = one.fitted(
                    states[rank] if is_same else None, [states[rank]] if is_same else states, is_same=is_same
                )
                one.load_state_dict(state)
        loops = [iter(loader) for loader, _ in made]
        n_steps = 10**9 if place == len(worlds) - 1 else choice.randint(1, 3)
        for _ in range(n_steps):
            batches = [next(loop, None) for loop in loops]
            assert len({batch is None for batch in batches}) == 1, "a rank has a batch less"
            if batches[0] is None:
                is_over = True
                break
            seen += [index for batch in batches for index in batch.tolist()]  # type: ignore[union-attr]
        states = [one.state_dict() for _, one in made]
        repeated += world_size - 1
        allowed += (world_size - 1 if options["drop_last"] else 0) + (world_size * size if drop_batch else 0)
        if is_over:
            break
    assert len(set(seen)) >= n - allowed, (number, worlds, len(set(seen)), n)
    assert len(seen) - len(set(seen)) <= repeated, (number, worlds)
    if not drop_batch and not options["drop_last"]:
        assert set(seen) == set(range(n)), number


def test_other_batches_of_a_rest_that_was_divided_are_refused() -> None:
    options = {"shuffle": False, "seed": 5, "drop_last": False}
    states: list[Any] = []
    for world_size, size in ((2, 4), (5, 5), (5, 2)):
        made = ranks_of(89, world_size, size, options, epoch=1, drop_batch=False)
        for rank, (_, one) in enumerate(made) if states else ():
            is_same = len(states) == world_size
            if size == 2:
                with pytest.raises(MismatchError, match="divided over 5 ranks for batches of 5 samples"):
                    one.fitted(states[rank], [states[rank]], is_same=True)
                continue
            one.load_state_dict(one.fitted(None, states, is_same=is_same)[0])
        for loader, _ in made if size != 2 else ():
            next(iter(loader))
        states = [one.state_dict() for _, one in made]


@pytest.mark.parametrize(("name", "changed"), [("n_samples", {"n": 50}), ("seed", {"seed": 6}), ("shuffle", {})])
def test_another_order_on_other_ranks_is_told_by_what_differs(name: str, changed: dict[str, int]) -> None:
    options: dict[str, Any] = {"shuffle": False, "seed": 5, "drop_last": False}
    made = ranks_of(40, 2, 4, options, epoch=0, drop_batch=False)
    for loader, _ in made:
        next(iter(loader))
    states = [one.state_dict() for _, one in made]
    options |= {"shuffle": name == "shuffle", "seed": changed.get("seed", 5)}
    [(_, other)] = ranks_of(changed.get("n", 40), 1, 4, options, epoch=0, drop_batch=False)
    with pytest.raises(MismatchError, match=f"`{name}` of the `DistributedSampler` was"):
        other.fitted(None, states, is_same=False)


def test_after_an_epoch_other_ranks_begin_the_next_one() -> None:
    options = {"shuffle": True, "seed": 5, "drop_last": False}
    made = ranks_of(12, 2, 3, options, epoch=0, drop_batch=False)
    assert [len(list(loader)) for loader, _ in made] == [2, 2]
    states = [one.state_dict() for _, one in made]
    seen = []
    for loader, one in ranks_of(12, 3, 2, options, epoch=1, drop_batch=False):
        state, messages = one.fitted(None, states, is_same=False)
        one.load_state_dict(state)
        assert (messages, one.n_passes) == ([], 1)
        seen += [index for batch in loader for index in batch.tolist()]
    assert sorted(seen) == list(range(12))


@pytest.mark.parametrize(("n_read", "epoch"), [([3], 0), ([5], 1), ([5, 2], 1), ([5, 5], 2)])
def test_a_run_goes_on_in_the_epoch_of_its_loader(n_read: list[int], epoch: int, tmp_path: Path) -> None:
    def run(n_read: list[int]) -> int:
        data: Any = StatefulDataLoader(range(20), 4)
        with Checkpointer(tmp_path, signals=(), async_save=False, commit={"durable": False}) as made:
            decision = made.resume(model=torch.nn.Linear(1, 1), sampler=data)
            for n, total in zip(n_read, itertools.accumulate(n_read), strict=True):
                assert len(list(itertools.islice(data, n if n < 5 else None))) == n
                made.step(total)
            if n_read:
                made.save(sum(n_read))
        return decision.initial_epoch

    assert run(n_read) == 0
    assert run([]) == epoch


@pytest.mark.parametrize("number", range(max(N_HISTORIES, 12)))
def test_an_epoch_on_several_numbers_of_ranks_has_each_sample_once(number: int) -> None:
    other_ranks(number)


# ------------------------------------------------------------------------------------------------------------ refused


class Secret(Sampler[int]):
    """Its order follows from nothing that is saved."""

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(os.urandom(8)).sample(range(20), 20))


class Stream(IterableDataset[int]):
    """A stream without state."""

    def __init__(self, start: int = 0, *, draws: bool = False) -> None:
        self.start, self.draws = start, draws

    def __iter__(self) -> Iterator[int]:
        for i in range(self.start, self.start + 20):
            yield i + 1000 * int(10 * torch.rand(1).item()) if self.draws else i


class Kept(Stream):
    """A stream with state."""

    def __iter__(self) -> Any:
        return Reader(self.start)


class Reader:
    def __init__(self, start: int) -> None:
        self.at, self.end = start, start + 20

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        if self.at == self.end:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def state_dict(self) -> Any:
        return {"at": self.at, "end": self.end}

    def load_state_dict(self, state: Any) -> None:
        self.at, self.end = state["at"], state["end"]


def run_some(root: Path, data: Any, n: int, sampler: Any = None, save: bool = True) -> list[Any]:  # noqa: FBT001, FBT002
    seen = []
    with Checkpointer(root, signals=(), commit={"durable": False}) as made:
        step = made.resume(model=torch.nn.Linear(1, 1), sampler=sampler or data).initial_step
        for _, batch in zip(range(n), data, strict=False):
            seen.append(batch.tolist())
            step += 1
            made.step(step)
        if save:
            made.save(step)
    return seen


class Counted:
    """A dataset with state: how often it was read."""

    def __init__(self) -> None:
        self.n_reads = 0

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        self.n_reads += 1
        return index + 100 * self.n_reads

    def state_dict(self) -> Any:
        return {"n_reads": self.n_reads}

    def load_state_dict(self, state: Any) -> None:
        self.n_reads = state["n_reads"]


def test_the_state_of_a_dataset_comes_back(tmp_path: Path) -> None:
    def data() -> Any:
        return StatefulDataLoader(Counted(), 4, sampler=RandomSampler(range(20), generator=torch.Generator()))

    seen = run_some(tmp_path, data(), 2) + run_some(tmp_path, data(), 3)
    read = [number for batch in seen for number in batch]
    assert [number // 100 for number in read] == list(range(1, 21))
    assert sorted(number % 100 for number in read) == list(range(20))


def test_a_generator_that_is_made_at_the_first_use_is_made_with_its_state() -> None:
    class Lazy:
        generator: Any = None

    made, saved = Lazy(), torch.Generator().manual_seed(3)
    set_value(made, "generator", saved.get_state().numpy())
    assert torch.equal(torch.rand(3, generator=made.generator), torch.rand(3, generator=saved))


def test_persistent_workers_run_after_the_first_loop_began() -> None:
    assert not has_workers(DataLoader(data_of(4), num_workers=1, persistent_workers=True))
    assert not has_workers(DataLoader(data_of(4)))


def test_batches_that_a_pass_leaves_out_are_not_read() -> None:
    data: Any = Counted()
    passes = Passes(DataLoader(data, 4))
    passes.skip(3)
    assert len(list(passes.batches())) == 2
    assert data.n_reads == 8


def test_a_generator_that_each_pass_seeds_is_found_again() -> None:
    def made() -> Passes:
        own = torch.Generator()
        return Passes(DataLoader(data_of(20), 4, sampler=RandomSampler(data_of(20), generator=own)), seeded=own)

    first, again = made(), made()
    loop = first.batches()
    seen = [next(loop).tolist() for _ in range(2)]
    state = first.state(len(seen))
    rest = [batch.tolist() for batch in loop]
    again.load(state)
    assert [batch.tolist() for batch in again.batches()] == rest


class Unsized(Sampler[int]):
    """A sampler that does not know its length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


def test_a_sampler_without_a_length_goes_on(tmp_path: Path) -> None:
    parts = [run_some(tmp_path, StatefulDataLoader(range(20), 4, sampler=Unsized()), n) for n in (2, 9)]
    assert [[batch[0] for batch in part] for part in parts] == [[0, 4], [8, 12, 16]]


def test_an_order_that_cannot_be_found_again_is_refused(tmp_path: Path) -> None:
    def secret() -> Any:
        return StatefulDataLoader(range(20), 4, sampler=Secret())

    run_some(tmp_path, secret(), 2)
    with pytest.raises(MismatchError, match=r"are other ones when `Secret` begins again"):
        run_some(tmp_path, secret(), 2)


@pytest.mark.parametrize("seed", [3, 4])
def test_other_options_within_an_epoch_are_refused_and_named(tmp_path: Path, seed: int) -> None:
    def data(seed: int) -> Any:
        return StatefulDataLoader(range(20), 4, sampler=DistributedSampler(data_of(20), 1, 0, seed=seed))

    run_some(tmp_path, data(3), 2)
    if seed == 3:
        assert len(run_some(tmp_path, data(3), 9)) == 3
        return
    with pytest.raises(MismatchError, match=r"`DistributedSampler.seed` was 3 and is 4"):
        run_some(tmp_path, data(4), 2)


def test_another_epoch_than_the_saved_one_is_refused(tmp_path: Path) -> None:
    def data() -> Any:
        return StatefulDataLoader(range(20), 4, sampler=DistributedSampler(data_of(20), 1, 0))

    loader = data()
    loader.sampler.set_epoch(1)
    run_some(tmp_path, loader, 2)
    loader = data()
    loader.sampler.set_epoch(1)
    with Checkpointer(tmp_path, signals=()) as made:
        made.resume(model=torch.nn.Linear(1, 1), sampler=loader)
        loader.sampler.set_epoch(0)
        with pytest.raises(MismatchError, match=r"`DistributedSampler.epoch` was changed to 0 after `resume`"):
            next(iter(loader))


def test_batches_and_workers_may_change(tmp_path: Path) -> None:
    def data(size: int, workers: int) -> Any:
        torch.manual_seed(2)
        return StatefulDataLoader(range(20), size, shuffle=True, num_workers=workers)

    whole = flat(run_some(tmp_path / "whole", data(4, 0), 9))
    first = run_some(tmp_path / "cut", data(4, 0), 2)
    rest = run_some(tmp_path / "cut", data(3, 2), 9)
    assert flat(first + rest) == whole


@pytest.mark.slow(disk=False)
def test_streams(tmp_path: Path) -> None:
    for kind in (Stream, Kept):
        root = tmp_path / kind.__name__
        first = run_some(root, StatefulDataLoader(kind(), 4), 2)
        assert flat(first + run_some(root, StatefulDataLoader(kind(), 4), 9)) == list(range(20))
    run_some(tmp_path / "draws", StatefulDataLoader(Stream(draws=True), 4), 2)
    with pytest.raises(MismatchError, match="draw from the random streams of the program"):
        run_some(tmp_path / "draws", StatefulDataLoader(Stream(draws=True), 4), 2)
    run_some(tmp_path / "workers", StatefulDataLoader(Kept(), 4), 2)
    with pytest.raises(MismatchError, match="had 0 workers, and has 1"):
        run_some(tmp_path / "workers", StatefulDataLoader(Kept(), 4, num_workers=1), 2)


@pytest.mark.slow(disk=False)
def test_a_loader_in_use_is_refused_at_the_start_of_a_run(tmp_path: Path) -> None:
    for workers in (0, 1):
        loader = StatefulDataLoader(range(20), 4, num_workers=workers)
        early = iter(loader)
        with pytest.raises(ArgumentError, match="before `resume`"):
            Checkpointer(tmp_path, signals=()).resume(model=torch.nn.Linear(1, 1), sampler=loader)
        del early
    sampler = ElasticSampler(20, 0, True, 4, 0, 1)
    run_some(tmp_path, DataLoader(range(20), 4, sampler=sampler), 2, sampler)  # type: ignore[arg-type]
    sampler = ElasticSampler(20, 0, True, 4, 0, 1)
    early = iter(DataLoader(range(20), 4, sampler=sampler, num_workers=1))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="before `resume`"):
        Checkpointer(tmp_path, signals=()).resume(model=torch.nn.Linear(1, 1), sampler=sampler)
    del early


# -------------------------------------------------------------------------------------------------------------- ranks


def by_ranks(root: Path, n_ranks: int, make: Callable[[int, int], Any], n: int = 9, reshape: Any = None) -> list[Any]:
    """What each rank reads in `n` steps, or why it is refused."""

    def work(group: Any) -> Any:
        torch.manual_seed(group.rank)
        data = make(group.rank, n_ranks)
        seen: list[Any] = []
        try:
            with Checkpointer(root, signals=(), group=group, commit={"durable": False}) as made:
                sampler = data if reshape is None else PerRank(data, reshape=reshape)
                model = torch.nn.Linear(1, 1)
                torch.nn.init.zeros_(model.weight)
                torch.nn.init.zeros_(model.bias)
                step = made.resume(model=model, sampler=sampler).initial_step
                for _, batch in zip(range(n), data, strict=False):
                    seen += batch.tolist()
                    step += 1
                    made.step(step)
                made.save(step)
        except MismatchError as error:
            return str(error)
        return seen

    with Job(n_ranks, work) as job:
        return job.values()


def distributed(rank: int, n_ranks: int) -> Any:
    return StatefulDataLoader(range(96), 4, sampler=DistributedSampler(data_of(96), n_ranks, rank, seed=3))


def test_parts_of_the_rest_of_an_epoch_have_as_many_batches() -> None:
    sizes, both = (None, 1, 2, 3), (False, True)
    for n, world_size, size, of_loader, of_sampler in itertools.product(range(1, 11), range(1, 4), sizes, both, both):
        made: list[Any] = [
            DistributedSampler(data_of(n), world_size, rank, shuffle=False, drop_last=of_sampler)
            for rank in range(world_size)
        ]
        for start in range(n):
            rest = Rest(start, size, of_loader)
            parts = [rest.items(one) for one in made]
            assert [rest.n_items(one) for one in made] == [len(part) for part in parts]
            whole = {len(part) // (size or 1) for part in parts}
            assert len(whole if of_loader else {-(-len(part) // (size or 1)) for part in parts}) == 1
            seen = [item for part in parts for item in part]
            split = Split.of(made[0])
            assert split is not None
            assert len(seen) == rest.n_divided(split)
            if not of_loader and not of_sampler:
                assert set(range(start, n)) <= set(seen)
                assert len(seen) - (n - start) < world_size


@pytest.mark.slow
def test_the_rest_of_an_epoch_on_other_ranks(tmp_path: Path) -> None:
    for n_ranks in (1, 2, 3):
        root = tmp_path / str(n_ranks)
        seen = flat(by_ranks(root, 2, distributed, 5) + by_ranks(root, n_ranks, distributed, 99))
        assert sorted(seen) == list(range(96))


@pytest.mark.slow
def test_positions_of_each_rank_are_kept_and_reshaped_by_the_user(tmp_path: Path) -> None:
    def stream(rank: int, _n_ranks: int) -> Any:
        return StatefulDataLoader(Kept(100 * rank), 4)

    def shuffled(_rank: int, _n_ranks: int) -> Any:
        return StatefulDataLoader(range(24), 4, shuffle=True)

    for name, make, why in (("a", stream, "is a stream"), ("b", shuffled, "does not say how the samples are divided")):
        first = by_ranks(tmp_path / name, 2, make, 2)
        (refused,) = by_ranks(tmp_path / name, 1, make)
        assert why in refused
        rest = by_ranks(tmp_path / name, 2, make)
        for one, two in zip(first, rest, strict=True):
            assert len(one + two) == len(set(one + two)) >= 20

    by_ranks(tmp_path / "c", 2, stream, 2)
    (last,) = by_ranks(tmp_path / "c", 1, stream, reshape=lambda states, rank, _world_size: states[rank + 1])
    assert last == list(range(108, 120))


@pytest.mark.slow
def test_parts_of_datasets_are_kept_for_each_rank(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    node = pytest.importorskip("datasets.distributed")

    def part(rank: int, n_ranks: int) -> Any:
        data = datasets.Dataset.from_dict({"x": list(range(40))}).to_iterable_dataset(num_shards=4)
        return StatefulDataLoader(node.split_dataset_by_node(data, rank, n_ranks), 4, collate_fn=values)

    seen = flat(by_ranks(tmp_path, 2, part, 3))
    (refused,) = by_ranks(tmp_path, 1, part)
    assert "is a stream" in refused
    seen += flat(by_ranks(tmp_path, 2, part))
    assert sorted(seen) == list(range(40))


def values(rows: list[Any]) -> torch.Tensor:
    return torch.tensor([row["x"] for row in rows])


def flat(lists: list[list[Any]]) -> list[Any]:
    return [one for inner in lists for one in inner]
