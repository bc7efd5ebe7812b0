"""The shuffled order: it is a permutation, it is the one that its definition says, and it looks random."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.errors import ArgumentError
from reshard.torch.permutation import MAX_LEN, Permutation

TABLE_LEN = 65536


def mixed(value: int, key: int) -> int:
    """SplitMix64's finaliser as its authors print it, of a value times the golden gamma, plus a key."""
    z = (value * 0x9E3779B97F4A7C15 + key) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def place(position: int, n: int, seed: int, epoch: int) -> int:
    """The definition for orders that are not a table, in Python's integers."""
    keys = [int(key) for key in np.random.SeedSequence(seed, spawn_key=(epoch,)).generate_state(8, np.uint64)]
    a = math.isqrt(n - 1) + 1
    b = math.ceil(n / a) if n < 2**50 else -(-n // a)
    while True:
        left, right = divmod(position, b)
        for number, key in enumerate(keys):
            if number % 2 == 0:
                left = (left + ((mixed(right, key) >> 32) * a >> 32)) % a
            else:
                right = (right + ((mixed(left, key) >> 32) * b >> 32)) % b
        position = left * b + right
        if position < n:
            return position


@pytest.mark.parametrize(
    "n", [*range(1, 20), 255, 256, 257, 1000, TABLE_LEN - 1, TABLE_LEN, TABLE_LEN + 1, 256**2 + 256, 257**2, 10**6 + 3]
)
def test_is_a_permutation(n: int) -> None:
    found = Permutation(n, seed=5, epoch=1).at(np.arange(n))
    assert np.array_equal(np.sort(found), np.arange(n))


@given(st.integers(TABLE_LEN + 1, 300_000), st.integers(0, 2**128), st.integers(0, 2**40))
@settings(max_examples=15)
def test_is_a_permutation_for_any_seed_and_epoch(n: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(Permutation(n, seed, epoch).at(np.arange(n))), np.arange(n))


@pytest.mark.parametrize("n", [TABLE_LEN + 1, 70_000, 10**6, 10**10, 2**40 - 1, MAX_LEN])
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (1, 0), (2**100, 7)])
def test_is_what_its_definition_says(n: int, seed: int, epoch: int) -> None:
    positions = np.array([0, 1, 2, 12345, n // 2, n - 2, n - 1])
    found = Permutation(n, seed, epoch).at(positions)
    assert found.tolist() == [place(int(position), n, seed, epoch) for position in positions]


@pytest.mark.parametrize("n", [1, 2, 10, 1000])
def test_short_orders_are_sorted_by_a_hash(n: int) -> None:
    keys = [int(key) for key in np.random.SeedSequence(3, spawn_key=(4,)).generate_state(2, np.uint64)]
    expected = sorted(range(n), key=lambda i: mixed(mixed(i, keys[0]), keys[1]))
    assert Permutation(n, 3, 4).at(np.arange(n)).tolist() == expected


def test_shape_and_order_of_the_positions_do_not_matter() -> None:
    order = Permutation(10**9, 0, 0)
    positions = np.random.default_rng(0).integers(0, 10**9, 100_000)  # more than a block
    assert np.array_equal(order.at(positions.reshape(100, 1000)), order.at(positions).reshape(100, 1000))
    assert np.array_equal(order.at(positions[::-1]), order.at(positions)[::-1])
    assert order.at(np.array([], np.int64)).size == 0


def spread(counts: np.ndarray) -> float:
    """How far counts are from equal ones, in standard deviations of chi squared."""
    n, expected = counts.size, counts.sum() / counts.size
    return float((((counts - expected) ** 2 / expected).sum() - (n - 1)) / math.sqrt(2 * (n - 1)))


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_every_order_of_a_few_is_equally_likely(n: int) -> None:
    numbers = {order: number for number, order in enumerate(itertools.permutations(range(n)))}
    found = [numbers[tuple(Permutation(n, seed, 0).at(np.arange(n)).tolist())] for seed in range(40 * len(numbers))]
    assert abs(spread(np.bincount(found, minlength=len(numbers)))) < 4


@pytest.mark.parametrize("n", [1000, TABLE_LEN + 1, 100_003, 10**6])
def test_an_order_looks_random(n: int) -> None:
    """Each bound is about five standard deviations wide."""
    positions = np.arange(n)
    orders = [Permutation(n, seed, epoch).at(positions) for seed, epoch in [(0, 0), (0, 1), (1, 0), (2, 0)]]
    for one, other in [(positions, orders[0]), *itertools.combinations(orders, 2)]:
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(n)
        assert (one == other).sum() <= 9  # of two independent ones: one in the mean
    for order in orders:
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / math.sqrt(n)
        assert (np.abs(np.diff(order)) == 1).sum() <= 14  # neighbours that stay neighbours: two in the mean
        # Any stretch has samples of everywhere, and every residue.
        for stretch in (order[: n // 10], order[n // 2 : n // 2 + n // 10], order[-(n // 10) :]):
            assert abs(spread(np.bincount(stretch * 50 // n, minlength=50))) < 5
            assert abs(spread(np.bincount(stretch % 7, minlength=7))) < 5


def test_first_of_the_order_is_anything() -> None:
    n = TABLE_LEN + 1
    first = np.array([int(Permutation(n, seed, 0).at(np.array([0]))[0]) for seed in range(2000)])
    assert abs(spread(np.bincount(first * 50 // n, minlength=50))) < 4


@pytest.mark.parametrize(("n", "seed", "epoch"), [(0, 0, 0), (-1, 0, 0), (MAX_LEN + 1, 0, 0), (1, -1, 0), (1, 0, -1)])
def test_numbers_out_of_range_are_refused(n: int, seed: int, epoch: int) -> None:
    with pytest.raises(ArgumentError):
        Permutation(n, seed, epoch)
