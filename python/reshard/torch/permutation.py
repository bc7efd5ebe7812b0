"""A shuffled order of [0, n) that is computed where it is asked for: no list of 10^10 numbers is ever made.

The idea: a Feistel network is a permutation whatever its round function is. The domain is cut into a x b points, a and
b near the root of n; a point is a pair (left, right), and each round adds to one half a pseudo-random function of the
other, modulo a or b. As a x b may exceed n by less than a, points beyond n are sent through again until they fall
below it ("cycle walking"), which keeps it a permutation. Both are the methods of Black and Rogaway, "Ciphers with
Arbitrary Finite Domains" (CT-RSA 2002); the round function is the 64-bit finaliser of SplitMix64 (Steele, Lea and
Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014), keyed by numpy's `SeedSequence`.

Halves of a few points mix too slowly: short orders are a table instead, the indices sorted by a hash of each.

It shuffles well; it hides nothing. The order is part of what checkpoints mean: it may never change for a given seed.
"""

from __future__ import annotations

import math

import numpy as np

from reshard.errors import ArgumentError

__all__ = ["MAX_LEN", "Permutation"]

MAX_LEN = 1 << 62
"""The longest order: halves stay below 2^32, and their products with 32 bits below 2^64."""

_TABLE_LEN = 1 << 16  # up to here a table: half a megabyte
_N_ROUNDS = 8  # four make a good permutation of a large domain (Luby and Rackoff); the same again for a plain hash
_BLOCK = 1 << 15  # points that go through the rounds together, so that they stay in the cache
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_HALF = np.uint64(32)


class Permutation:
    """The order of one epoch.

    Args:
        n: how many there are, 1 to 2^62.
        seed: 0 or more, of any size.
        epoch: 0 or more; each has an order of its own.

    Raises:
        ArgumentError: a number is out of range.

    Example:
        >>> order = Permutation(10, seed=0, epoch=0)
        >>> sorted(order.at(np.arange(10)).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
        >>> Permutation(10**10, seed=0, epoch=3).at(np.array([7, 10**10 - 1])).shape
        (2,)
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        if not 1 <= n <= MAX_LEN:
            raise ArgumentError(f"an order of {n} elements: expected 1 to {MAX_LEN}")
        if seed < 0 or epoch < 0:
            raise ArgumentError(f"seed {seed}, epoch {epoch}: expected at least 0 of each")
        self.n = n
        keys = np.random.SeedSequence(seed, spawn_key=(epoch,)).generate_state(_N_ROUNDS, np.uint64)
        self._keys: list[np.uint64] = list(keys)
        root = math.isqrt(n - 1) + 1
        self._sizes = (np.uint64(root), np.uint64(-(-n // root)))
        self._table: np.ndarray | None = None
        if n <= _TABLE_LEN:
            # The hash is one-to-one, so that no two indices ever tie.
            hashes = _mixed(_mixed(np.arange(n, dtype=np.uint64), keys[0]), keys[1])
            self._table = np.argsort(hashes).astype(np.int64)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """What stands at these positions.

        Args:
            positions: integers of [0, n), in any order.

        Returns:
            As many numbers of [0, n), int64. Different positions have different ones.
        """
        if self._table is not None:
            found: np.ndarray = self._table[positions]
            return found
        result = np.empty(positions.size, np.uint64)
        flat = positions.reshape(-1).astype(np.uint64)
        for start in range(0, flat.size, _BLOCK):
            result[start : start + _BLOCK] = self._walk(flat[start : start + _BLOCK])
        return result.astype(np.int64).reshape(positions.shape)

    def _walk(self, points: np.ndarray) -> np.ndarray:
        points = self._rounds(points)
        outside = np.flatnonzero(points >= self.n)
        while outside.size:
            points[outside] = self._rounds(points[outside])
            outside = outside[points[outside] >= self.n]
        return points

    def _rounds(self, points: np.ndarray) -> np.ndarray:
        _, width = self._sizes
        halves = list(np.divmod(points, width))
        for number, key in enumerate(self._keys):
            changed = number % 2
            size = self._sizes[changed]
            half = halves[changed]
            half += ((_mixed(halves[1 - changed], key) >> _HALF) * size) >> _HALF
            # The sum is below twice the size. Where it was below the size, the difference wraps and is the larger.
            np.minimum(half, half - size, out=half)
        result: np.ndarray = halves[0] * width + halves[1]
        return result


def _mixed(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """A 64-bit hash of each value."""
    mixed = values * np.uint64(0x9E3779B97F4A7C15)  # neighbours differ in few bits: spread them
    mixed += key
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        mixed ^= mixed >> shift
        mixed *= multiplier
    mixed ^= mixed >> _SHIFTS[-1]
    return mixed
