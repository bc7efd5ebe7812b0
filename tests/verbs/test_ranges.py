"""Work that is cut inside files and tensors: any number of shares finds what one process does, to the last bit."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16, float8_e4m3fn, float8_e5m2

import reshard
from reshard import _core
from reshard.commit.scrub import Fault, joined_faults
from reshard.conversion import shares
from reshard.ranks.messages import decode, encode
from reshard.verbs import slices
from reshard.verbs import stats as stats_verb
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
DTYPES = st.sampled_from(
    [
        np.float32,
        np.float64,
        np.float16,
        bfloat16,
        float8_e4m3fn,
        float8_e5m2,
        np.int8,
        np.uint64,
        np.complex64,
        np.bool_,
    ]
)
TENSORS = st.lists(st.tuples(SHAPES, DTYPES, st.sampled_from(["", "", "nan", "inf", "large"])), min_size=1, max_size=8)
SETTINGS = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "_MIN_PIECE_BYTES", 1 << 12)
    for module in (slices, shares):
        monkeypatch.setattr(module, "MIN_CUT_BYTES", 1 << 12)


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
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("dtype", "bits"), [("F4", 4), ("F6_E2M3", 6)])
@pytest.mark.parametrize("n", [2, 5])
def test_packed_elements_are_compared_by_shares(tmp_path: Path, dtype: str, bits: int, n: int) -> None:
    generator = np.random.default_rng(n)
    arrays = [generator.integers(0, 256, 40_000 * bits // 8, np.uint8) for _ in range(2)]
    for name, array in zip("ab", arrays, strict=True):
        _core.write_arrays(
            str(tmp_path / name), [("w", dtype, (100, 400), array), ("none", dtype, (0, 400), array[:0])]
        )
    place = Sent(n)
    for memory in ("256MiB", "10KiB"):
        alone = reshard.diff(tmp_path / "a", tmp_path / "b", memory=memory)
        assert as_text(reshard.diff(tmp_path / "a", tmp_path / "b", memory=memory, on=place)) == as_text(alone)
        assert alone.differences[0].n_different
    assert len(place.n_bytes) == 2 * n
    assert min(place.n_bytes) > 0
    assert as_text(stats(tmp_path / "a", on=Sent(n))) == as_text(stats(tmp_path / "a"))


def test_only_the_pieces_of_tensors_that_are_cut_are_counted() -> None:
    counted: Counter[str] = Counter()

    def pieces(key: str) -> Any:
        for _ in range(100):
            counted[key] += 1
            yield MIB

    spans = slices.shared_out({f"w{i}": 100 * MIB for i in range(1000)}, 7, pieces)
    assert set(counted.values()) == {100}
    assert len(counted) <= 6
    assert len(spans) == 7
    found = [(span.key, number) for share in spans for span in share for number in range(span.first, span.end or 100)]
    assert found == [(f"w{i}", number) for i in range(1000) for number in range(100)]


def test_slices_are_made_as_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reshard.save_file({f"w{i}": np.ones(3, np.float32) for i in range(50)}, tmp_path / "a.safetensors")
    made: list[slices.Slice] = []

    def make(*values: Any) -> slices.Slice:
        made.append(slices.Slice(*values))
        return made[-1]

    seen: list[int] = []
    monkeypatch.setattr(slices, "_MAX_ARRAYS", 4)
    monkeypatch.setattr(stats_verb, "Slice", make)
    report = stats(tmp_path / "a.safetensors", progress=lambda done, total: seen.append(len(made) - done * 50 // total))
    assert len(report.tensors) == 50
    assert len(made) == 50
    assert max(seen) <= 4


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
    calls: dict[str, Callable[[Any], Any]] = {
        "verify": lambda on: reshard.verify(one, on=on),
        "diff": lambda on: reshard.diff(one, other, on=on),
        "stats": lambda on: stats(one, on=on),
    }
    calls[work](Sent(1))
    alone, four = Sent(1), Sent(4)
    reports = [as_text(calls[work](place)) for place in (None, alone, four)]  # with several blocks in each piece
    assert reports[0] == reports[1] == reports[2]
    assert len(four.n_bytes) == 4
    assert sum(four.n_bytes) == sum(alone.n_bytes)
    assert max(four.n_bytes) < 1.05 * sum(four.n_bytes) / 4


def test_a_range_that_cannot_be_read_does_not_hide_damage_of_others() -> None:
    damaged = [Fault("a", f"bytes {i} to {i + 1} were altered: `w`", i, i + 1, ("w",)) for i in (1, 5)]
    unread = [Fault("a", f"permission denied {i}", is_damage=False) for i in range(2)]
    assert joined_faults([damaged[0], unread[0], damaged[1], unread[1]]) == [*damaged, unread[0]]
    short = Fault("a", "it has 5 bytes, expected 9")
    assert joined_faults([damaged[0], unread[0], short]) == [short]


def test_a_tensor_without_elements_between_damaged_ranges_is_in_none(tmp_path: Path) -> None:
    chunk, header = 256 << 10, 4096
    arrays = {
        "v": np.ones(4 * chunk - header, np.uint8),
        "v0": np.ones(0, np.uint8),
        "w": np.ones(4 * chunk, np.uint8),
    }
    reshard.save(tmp_path / "run", 1, arrays)
    (file,) = (tmp_path / "run").glob("*/*.safetensors")
    content = file.read_bytes()
    assert int.from_bytes(content[:8], "little") + 8 == header
    file.write_bytes(content[:header] + bytes(len(content) - header))
    two = Sent(2)
    report = reshard.verify(tmp_path / "run", on=two)
    assert two.n_bytes == [4 * chunk] * 2
    assert as_text(report) == as_text(reshard.verify(tmp_path / "run"))
    assert [fault.tensors for fault in report.checkpoints[0].faults] == [("v", "w")]
