"""Random state: back bit for bit in the same place, derived by a stated rule in any other, refused if foreign."""

# ruff: noqa: NPY002 - numpy's legacy stream is the global one, which is what is tested
from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from reshard.errors import ArgumentError, UnsupportedError
from reshard.formats import state as formats_state
from reshard.torch import rng

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _leave_the_streams_alone() -> Iterator[None]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def draw() -> list[float]:
    """A few of each stream, normal ones too: those come in pairs, and the second is part of the state."""
    torch_ones = torch.cat([torch.rand(3), torch.randn(3)]).tolist()
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), *torch_ones]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


def through_files(value: Any) -> Any:
    """What a load gives for what a save was given; arrays may be read-only."""
    text, arrays = formats_state.dump(value)
    for array in arrays.values():
        array.flags.writeable = False
    return formats_state.load(text, arrays)


PLACE: dict[str, Any] = {"rank": 2, "world_size": 4, "coordinate": {"dp": 1, "tp": 0}}


@pytest.mark.parametrize("n_drawn", [0, 1, 2, 700])
def test_same_place_goes_on_bit_for_bit(n_drawn: int) -> None:
    seed_all(5)
    for _ in range(n_drawn):
        draw()
    state = rng.capture(**PLACE)
    expected = [draw() for _ in range(3)]
    seed_all(6)
    for _ in range(2):  # a state can be put back more than once
        report = rng.restore(through_files(state), iteration=10, **PLACE)
        assert report == rng.RngReport(("python", "numpy", "torch"))
        assert [draw() for _ in range(3)] == expected


def test_captured_state_is_a_copy_and_draws_nothing() -> None:
    seed_all(5)
    expected = draw()
    seed_all(5)
    state = rng.capture()
    assert draw() == expected
    draw()
    rng.restore(state, iteration=0)
    assert draw() == expected


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"world_size": 3}, "saved by rank 2 of 4, this is rank 2 of 3"),
        ({"world_size": 8}, "saved by rank 2 of 4, this is rank 2 of 8"),
        ({"rank": 0}, "saved by rank 2 of 4, this is rank 0 of 4"),
        ({"coordinate": {"dp": 2}}, "saved at {'dp': 1, 'tp': 0}, this is {'dp': 2}"),
        ({"coordinate": None}, "saved at {'dp': 1, 'tp': 0}, this is {'rank': 2}"),
    ],
)
def test_another_place_has_streams_of_its_own(changed: dict[str, Any], reason: str) -> None:
    seed_all(5)
    state = rng.capture(root_seed=1234, **PLACE)
    saved = draw()
    report = rng.restore(state, iteration=10, **(PLACE | changed))
    assert report == rng.RngReport((), ("python", "numpy", "torch"), reason)
    assert not set(draw()) & set(saved)


def test_derived_streams_are_those_of_the_rule() -> None:
    """The rule as the module states it, by the generators' own seeding."""
    state = rng.capture(root_seed=1234, rank=0, world_size=4)
    rng.restore(state, iteration=500, rank=3, world_size=8, coordinate={"dp": 1, "tp": 1})
    keys = [np.random.SeedSequence(1234, spawn_key=(500, stream, 1, 1)) for stream in range(3)]
    words = keys[0].generate_state(8)
    own_python = random.Random(sum(int(word) << (32 * i) for i, word in enumerate(words)))
    assert [random.random() for _ in range(4)] == [own_python.random() for _ in range(4)]
    own_numpy = np.random.RandomState(np.random.MT19937(keys[1]))
    assert np.array_equal(np.random.randn(5), own_numpy.randn(5))
    low, high = keys[2].generate_state(2)
    own_torch = torch.Generator().manual_seed(int(low) + (int(high) << 32))
    assert torch.equal(torch.randn(100), torch.randn(100, generator=own_torch))


def test_no_two_ranks_or_iterations_share_a_stream_unless_asked() -> None:
    firsts: set[float] = set()
    places = [(iteration, dp, tp) for iteration in (0, 1, 2) for dp in range(4) for tp in range(2)]
    for iteration, dp, tp in places:
        rng.derive(1234, iteration, {"dp": dp, "tp": tp})
        firsts |= {random.random(), float(np.random.rand()), torch.rand(1, dtype=torch.float64).item()}
    assert len(firsts) == 3 * len(places)
    rng.derive(1234, 0, {"dp": 1})
    one = draw()
    rng.derive(1234, 0, {"dp": 1})
    assert draw() == one


def test_root_seed_is_what_torch_was_seeded_with() -> None:
    torch.default_generator.manual_seed(77)
    assert rng.capture()["root_seed"] == 77
    torch.default_generator.manual_seed(2**64 - 5)
    assert rng.capture()["root_seed"] == 2**63 - 5
    assert rng.capture(root_seed=3)["root_seed"] == 3


# -- CUDA: generators stand in for those of devices


class Devices:
    def __init__(self, n: int) -> None:
        self.generators = [torch.Generator().manual_seed(100 + i) for i in range(n)]

    def __call__(self, *, start: bool = False) -> list[torch.Generator]:
        return self.generators

    def draw(self) -> list[float]:
        return [torch.rand(1, generator=generator).item() for generator in self.generators]


def test_streams_of_devices_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(2)
    monkeypatch.setattr(rng, "_cuda_generators", devices)
    state = rng.capture()
    expected = devices.draw()
    report = rng.restore(through_files(state), iteration=1)
    assert report.restored == ("python", "numpy", "torch", "cuda:0", "cuda:1")
    assert devices.draw() == expected


@pytest.mark.parametrize("n_now", [0, 1, 3])
def test_another_number_of_devices_derives_theirs_alone(n_now: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Devices(2)
    monkeypatch.setattr(rng, "_cuda_generators", before)
    seed_all(5)
    state = rng.capture(root_seed=9)
    expected, theirs = draw(), before.draw()
    now = Devices(n_now)
    monkeypatch.setattr(rng, "_cuda_generators", now)
    report = rng.restore(state, iteration=1)
    names = tuple(f"cuda:{i}" for i in range(n_now))
    reason = f"saved with 2 CUDA devices, there are {n_now}"
    assert report == rng.RngReport(("python", "numpy", "torch"), names, reason)
    assert draw() == expected
    found = now.draw()
    assert len(set(found)) == n_now
    assert not set(found) & set(theirs)


@pytest.mark.gpu
def test_real_devices() -> None:
    torch.rand(1, device="cuda")
    state = rng.capture()
    expected = torch.rand(5, device="cuda")
    assert "cuda:0" in rng.restore(through_files(state), iteration=1).restored
    assert torch.equal(torch.rand(5, device="cuda"), expected)
    assert "cuda:0" in rng.restore(state, iteration=1, rank=1, world_size=2).derived
    assert not torch.equal(torch.rand(5, device="cuda"), expected)


# -- foreign states


def changed(path: str, value: Any) -> Any:
    state = rng.capture(root_seed=1)
    *parents, last = path.split(".")
    inner = state
    for parent in parents:
        inner = inner[parent]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return state


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *((name, ...) for name in ("kind", "place", "root_seed", "python", "numpy", "torch", "cuda")),
        *(("python." + name, ...) for name in ("version", "words", "gauss")),
        *(("numpy." + name, ...) for name in ("words", "position", "gauss")),
        *((name, None) for name in ("place", "root_seed", "python", "numpy", "torch", "cuda", "place.coordinate")),
        ("extra", 1),
        ("kind", "reshard.torch.rng/2"),
        ("root_seed", -1),
        ("root_seed", 2**63),
        ("place.rank", 1),
        ("place.world_size", 0),
        ("place.coordinate", {"dp": -1}),
        ("python.version", 2),
        ("python.words", np.zeros(624, np.uint32)),
        ("python.words", np.full(625, 2**32 - 1, np.uint32)),  # the last is a position, out of range
        ("python.words", np.zeros(625, np.int64)),
        ("python.gauss", "1"),
        ("numpy.words", np.zeros(625, np.uint32)),
        ("numpy.position", 625),
        ("numpy.position", -1),
        ("numpy.gauss", 1),
        ("torch", np.zeros(10, np.uint8)),
        ("torch", np.zeros(5056, np.uint8)),
        ("torch", np.zeros(5056, np.int8)),
        ("torch", torch.get_rng_state()),
    ],
)
def test_foreign_states_are_refused_and_change_nothing(path: str, value: Any) -> None:
    seed_all(5)
    expected = draw()
    state = changed(path, value)
    seed_all(5)
    with pytest.raises(ArgumentError):
        rng.restore(state, iteration=1)
    assert draw() == expected


@pytest.mark.parametrize("state", [None, [], {}, "state", 3])
def test_what_is_no_state_at_all(state: Any) -> None:
    with pytest.raises(ArgumentError, match="not a captured random state"):
        rng.restore(state, iteration=1)


def test_numbers_out_of_range_are_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"rank": 1},
        {"rank": -1},
        {"world_size": 0},
        {"coordinate": {"dp": -1}},
        {"root_seed": -1},
    ]
    for arguments in wrong:
        with pytest.raises(ArgumentError):
            rng.capture(**arguments)
    for numbers in ((-1, 0, 0), (0, -1, 0), (0, 0, -1)):
        with pytest.raises(ArgumentError):
            rng.derive(numbers[0], numbers[1], {"dp": numbers[2]})


def test_another_kind_of_numpy_stream_is_refused() -> None:
    state = rng.capture()
    numpy_random: Any = np.random  # whose types lack these two
    twister = numpy_random.get_bit_generator()
    try:
        numpy_random.set_bit_generator(np.random.PCG64(1))
        for call in (rng.capture, lambda: rng.restore(state, iteration=1), lambda: rng.derive(0, 0, {})):
            with pytest.raises(UnsupportedError, match="PCG64"):
                call()
    finally:
        numpy_random.set_bit_generator(twister)
