"""Work that is cut inside files and tensors: any number of shares finds what one process does, to the last bit."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16

import reshard
from reshard.ranks.messages import decode, encode
from reshard.verbs import slices
from reshard.verbs.stats import stats

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reshard.ranks.places import Work

MIB = 1 << 20


@dataclass
class Sent:
    """A place that does the shares in this process, the last one first, of messages as ranks send them."""

    n: int
    cpus: int = 1
    n_bytes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def n_shares(self, n_bytes: int) -> int:
        return self.n

    def run(self, work: Work[Any], n_shares: int, done: Callable[[Any], object]) -> list[Any]:
        message = decode(type(work.message), json.loads(json.dumps(encode(work.message))))
        results = []
        for share in reversed(range(n_shares)):
            begun = time.process_time()
            n_bytes, result = work.do(message, share)
            self.seconds.append(time.process_time() - begun)
            self.n_bytes.append(n_bytes)
            results.append(decode(work.result, json.loads(json.dumps(encode(result)))))
        return results[::-1]


def as_text(report: Any) -> str:
    """A report, with every bit of its numbers."""
    return json.dumps({name: one for name, one in encode(report).items() if name != "seconds"})


def values(seed: int, shape: tuple[int, ...], dtype: Any, odd: str) -> np.ndarray:
    generator = np.random.default_rng(seed)
    if np.dtype(dtype).kind in "iub":
        return generator.integers(0, 100, shape).astype(dtype)
    array = generator.standard_normal(shape).astype(dtype)
    if odd and array.size:
        array.reshape(-1)[generator.integers(array.size)] = {"nan": np.nan, "inf": np.inf, "large": 1e300}[odd]
    return array


SHAPES = st.lists(st.integers(0, 40), min_size=0, max_size=3).map(tuple) | st.tuples(st.integers(1000, 20000))
DTYPES = st.sampled_from([np.float32, np.float64, np.float16, bfloat16, np.int8, np.uint64, np.complex64, np.bool_])
TENSORS = st.lists(st.tuples(SHAPES, DTYPES, st.sampled_from(["", "", "nan", "inf", "large"])), min_size=1, max_size=8)
SETTINGS = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "_MIN_PIECE_BYTES", 1 << 12)


@pytest.mark.slow(disk=False)
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::numpy.exceptions.ComplexWarning")
@pytest.mark.usefixtures("small_pieces")
@given(tensors=TENSORS, n=st.integers(1, 9), seed=st.integers(0, 1000))
@SETTINGS
def test_statistics_of_shares_are_those_of_one_process(tmp_path: Path, tensors: Any, n: int, seed: int) -> None:
    arrays = {f"w{i}": values(seed + i, *one) for i, one in enumerate(tensors)}
    reshard.save_file(arrays, tmp_path / "a.safetensors")
    assert as_text(stats(tmp_path / "a.safetensors", on=Sent(n))) == as_text(stats(tmp_path / "a.safetensors"))


@pytest.mark.slow(disk=False)
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::numpy.exceptions.ComplexWarning")
@pytest.mark.usefixtures("small_pieces")
@given(
    tensors=TENSORS,
    other=DTYPES | st.none(),
    n=st.integers(1, 9),
    seed=st.integers(0, 1000),
    memory=st.sampled_from(["256MiB", "10KiB"]),
    n_changed=st.integers(0, 30),
)
@SETTINGS
def test_differences_of_shares_are_those_of_one_process(
    tmp_path: Path, *, tensors: Any, other: Any, n: int, seed: int, memory: str, n_changed: int
) -> None:
    # The first one has many pieces, also small ones, and differs.
    tensors = [((20_001,), np.float32, ""), *tensors]
    a = {f"w{i}": values(seed + i, *one) for i, one in enumerate(tensors)}
    b = {key: array.copy() for key, array in a.items()}
    generator, b["w0"][5] = np.random.default_rng(seed), 1
    for _ in range(n_changed):
        array = b[f"w{generator.integers(len(b))}"].reshape(-1)
        if array.size:
            array[generator.integers(array.size)] = 1
    if other is not None:
        b["w1"] = b["w1"].astype(other)
    for name, arrays in (("a", a), ("b", b)):
        reshard.save_file(arrays, tmp_path / f"{name}.safetensors")
    call: dict[str, Any] = {
        "a": tmp_path / "a.safetensors",
        "b": tmp_path / "b.safetensors",
        "memory": memory,
        "atol": 0.1,
    }
    assert as_text(reshard.diff(**call, on=Sent(n))) == as_text(reshard.diff(**call))


@pytest.mark.slow(disk=False)
@given(
    n=st.integers(1, 9),
    damaged=st.lists(st.tuples(st.integers(0, 5 * MIB), st.sampled_from([1, MIB])), max_size=6),
    n_bytes=st.integers(1, 5 * MIB),
    is_short=st.booleans(),
)
@SETTINGS
def test_damage_that_shares_find_is_what_one_process_finds(
    tmp_path_factory: pytest.TempPathFactory, *, n: int, damaged: list[tuple[int, int]], n_bytes: int, is_short: bool
) -> None:
    run = tmp_path_factory.mktemp("run")
    arrays = {"v": np.ones(n_bytes // 3, np.uint8), "w": np.ones(n_bytes, np.uint8)}
    reshard.save(run, 1, arrays)
    (file,) = run.glob("*/*.safetensors")
    with file.open("r+b") as opened:
        size = file.stat().st_size
        for at, length in damaged:
            opened.seek(at % size)
            opened.write(b"\x7f" * min(length, size - at % size))
        if is_short:
            opened.truncate(size // 2)
    place = Sent(n)
    assert as_text(reshard.verify(run, on=place)) == as_text(reshard.verify(run))
    assert is_short or sum(place.n_bytes) == size


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("work", ["verify", "diff", "stats"])
def test_one_tensor_in_one_file_is_cut_into_equal_shares(tmp_path: Path, work: str) -> None:
    tensor = np.random.default_rng(0).standard_normal((1024, 24 * MIB // 1024)).astype(np.float32)  # 96 MiB
    for number in (1, 2):
        reshard.save(tmp_path / "run", number, {"w": tensor * number})
    one, other = sorted((tmp_path / "run").glob("iteration_*"))
    calls: dict[str, Callable[[Any], object]] = {
        "verify": lambda on: reshard.verify(one, on=on),
        "diff": lambda on: reshard.diff(one, other, on=on),
        "stats": lambda on: stats(one, on=on),
    }
    calls[work](Sent(1))
    alone, four = Sent(1), Sent(4)
    calls[work](alone)
    calls[work](four)
    assert len(four.n_bytes) == 4
    assert sum(four.n_bytes) == sum(alone.n_bytes)
    assert max(four.n_bytes) < 1.05 * sum(four.n_bytes) / 4
