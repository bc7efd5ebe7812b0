"""Which field of nested state differs between ranks: the first one is named, with its values."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

from reshard.formats.differing import MISSING, difference


def told(*states: Any, name: str = "") -> str:
    """What ranks with these states are told, which is the same on all of them."""
    sent: list[list[dict[str, list[str]]]] = [[] for _ in states]
    barrier = threading.Barrier(len(states), timeout=20)
    answers = [""] * len(states)

    def of_rank(rank: int) -> None:
        def gather(fields: dict[str, list[str]]) -> list[tuple[dict[str, list[str]], list[int]]]:
            sent[rank].append(fields)
            barrier.wait()
            number = len(sent[rank]) - 1
            return [(of_one[number], [n]) for n, of_one in enumerate(sent)]

        answers[rank] = difference(states[rank], gather, name)

    threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(len(states))]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(set(answers)) == 1, answers
    assert len({len(one) for one in sent}) == 1  # all have made the same calls
    return answers[0]


@pytest.mark.parametrize(
    ("states", "words"),
    [
        (({"a": 1, "b": {"c": [1, 2]}}, {"a": 1, "b": {"c": [1, 3]}}), "`b.c[1]` is 2 on rank 0, 3 on rank 1"),
        (({"a": 1}, {"b": 1}), "`a` is 1 on rank 0, missing on rank 1"),
        ((1, 1, 2), "it is 1 on ranks 0, 1, 2 on rank 2"),
        ((MISSING, 1, 2), "it is 1 on rank 1, 2 on rank 2"),
        ((np.zeros((2, 3)), np.zeros((3, 2))), "it is float64 of shape (2, 3) on rank 0, float64 of shape (3, 2) on"),
        ((torch.zeros(2), np.zeros(2)), "it is float32 of shape (2,) on rank 0, float64 of shape (2,) on rank 1"),
        ((torch.tensor(1.0), torch.tensor(2.0)), "it is 1.0 on rank 0, 2.0 on rank 1"),
        ((torch.zeros(2), MISSING, torch.ones(2)), "`[0]` is 0.0 on rank 0, 1.0 on rank 2"),
        (([0] * 70, [0] * 69 + [5]), "`[69]` is 0 on rank 0, 5 on rank 1"),
        (([0] * 70, [0] * 71), "it is a list of length 70 on rank 0, a list of length 71 on rank 1"),
        (([0] * 70, [0] * 69 + [[5]]), "`[69]` is 0 on rank 0, [5] on rank 1"),
        (("x" * 100, "x" * 80 + "y" * 20), f"`[80:]` is '{'x' * 20}' on rank 0, '{'y' * 20}' on rank 1"),
        (({"a": b"x" * 99}, {"a": b"x" * 98 + b"y"}), "`a[98:]` is b'x' on rank 0, b'y' on rank 1"),
        (([float("nan")], [1.0]), "`[0]` is nan on rank 0, 1.0 on rank 1"),
        ((np.array([[0.0, 1.0]]), np.array([[-0.0, 1.0]])), "`[0, 0]` is 0.0 on rank 0, -0.0 on rank 1"),
        ((torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)), "`[0]` is 0.0 on rank 0, 1.0 on"),
        (({1: 2, 3: 4}, {3: 4, 1: 2}), "the order of its entries"),
    ],
)
def test_the_first_field_and_its_values(states: tuple[Any, ...], words: str) -> None:
    assert words in told(*states)


def test_two_kinds_of_nan_have_two_digests() -> None:
    bits = np.array([0x7FF8000000000000, 0x7FF8000000000001], np.uint64).view(np.float64)
    text = told(bits[:1], bits[1:], name="w")
    assert text.startswith("`w[0]` is nan, digest ")
    assert text.endswith(" on rank 1")


def test_random_elements_are_found() -> None:
    chosen = random.Random(0)
    for _ in range(25):
        shape = tuple(chosen.randint(1, 40) for _ in range(chosen.randint(1, 3)))
        arrays = [torch.zeros(shape, dtype=torch.int32) for _ in range(chosen.randint(2, 4))]
        index = tuple(chosen.randrange(n) for n in shape)
        rank = chosen.randrange(1, len(arrays))
        arrays[rank][index] = 7
        others = ", ".join(str(n) for n in range(len(arrays)) if n != rank)
        words = f"`w[{', '.join(map(str, index))}]` is 0 on rank{'s' * (len(arrays) > 2)} {others}, 7 on rank {rank}"
        assert told(*arrays, name="w") == words
