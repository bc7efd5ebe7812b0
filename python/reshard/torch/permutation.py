"""A pseudo-random permutation of [0, n) that is computed on demand, without a list of n numbers.

Method: a Feistel network is a permutation for any round function. The domain is a grid of a x b points, with a and b
near the square root of n. A point is a pair (left, right), and each round adds to one half a pseudo-random function of
the other, modulo a or b. a x b may exceed n by less than a; points outside [0, n) are permuted again until they are
inside ("cycle walking"), which keeps it a permutation. Both methods are those of Black and Rogaway, "Ciphers with
Arbitrary Finite Domains" (CT-RSA 2002). The round function is the 64-bit finaliser of SplitMix64 (Steele, Lea and
Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014), keyed by numpy's `SeedSequence`.

For small n the halves have too few points to mix well. Then a table is used: the indices sorted by their hashes.

The permutation is not cryptographic. Checkpoints depend on it: it must never change for a given seed.
"""

from __future__ import annotations

import math

import numpy as np

from reshard.errors import ArgumentError

MAX_LEN = 1 << 62
"""The largest n: halves stay below 2^32, and their products with 32-bit numbers below 2^64."""

_TABLE_LEN = 1 << 16  # the largest n for which a table is used: half a megabyte
_N_ROUNDS = 8  # four suffice with an ideal round function (Luby and Rackoff); twice as many for a simple hash
_BLOCK = 1 << 15  # points that are permuted at a time, so that they stay in the cache
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_HALF = np.uint64(32)


class Permutation:
    """The permutation of one epoch.

    Args:
        n: number of elements, 1 to 2^62.
        seed: the seed, 0 or more.
        epoch: the epoch, 0 or more. Each epoch has a different permutation.

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
            raise ArgumentError(f"a permutation of {n} elements: expected 1 to {MAX_LEN}")
        if seed < 0 or epoch < 0:
            raise ArgumentError(f"seed {seed}, epoch {epoch}: expected at least 0 of each")
        self.n = n
        keys = np.random.SeedSequence(seed, spawn_key=(epoch,)).generate_state(_N_ROUNDS, np.uint64)
        self._keys: list[np.uint64] = list(keys)
        root = math.isqrt(n - 1) + 1
        self._sizes = (np.uint64(root), np.uint64(-(-n // root)))
        self._table: np.ndarray | None = None
        if n <= _TABLE_LEN:
            # The hash is one-to-one, so no two indices have the same hash.
            hashes = _mixed(_mixed(np.arange(n, dtype=np.uint64), keys[0]), keys[1])
            self._table = np.argsort(hashes).astype(np.int64)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """The elements at these positions.

        Args:
            positions: integers in [0, n), in any order and shape.

        Returns:
            The elements, int64 in [0, n), in the same shape. Different positions have different elements.
        """
        if self._table is not None:
            found: np.ndarray = self._table[positions]
            return found
        result = np.empty(positions.size, np.uint64)
        flat = positions.reshape(-1).astype(np.uint64)
        for start in range(0, flat.size, _BLOCK):
            result[start : start + _BLOCK] = self._permuted(flat[start : start + _BLOCK])
        return result.astype(np.int64).reshape(positions.shape)

    def _permuted(self, points: np.ndarray) -> np.ndarray:
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
            # The sum is below twice the size. If it is below the size, `half - size` wraps around and is the larger.
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
