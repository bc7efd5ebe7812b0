"""The random state of a process: capture it, restore it bit for bit, or derive a new one if the ranks changed.

Streams: Python's `random`, the global stream of numpy, torch on the CPU, and torch on every CUDA device of the process
if it uses CUDA. If rank, world size and coordinate are the same as when it was saved, the streams are restored bit for
bit. Otherwise all streams are seeded from

    numpy.random.SeedSequence(root_seed, spawn_key=(iteration, stream, *coordinate))

with the root seed of the run, the iteration that is resumed from (without it every resume would draw the same numbers),
the number of the stream (0 `random`, 1 numpy, 2 torch on the CPU, 3 + i torch on CUDA device i) and the coordinate of
the rank. So ranks with different coordinates have different streams. The functions report what they did. Generators
that a program creates itself are not included.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from reshard.errors import ArgumentError, UnsupportedError
from reshard.torch.checks import MAX_SEED, count, shown

_KIND = "reshard.torch.rng/1"
_PYTHON, _NUMPY, _TORCH, _CUDA = range(4)  # the numbers of the streams
_WORDS = 624  # state size of the Mersenne Twister, which both Python and numpy use


@dataclass(frozen=True)
class RngReport:
    """Which random streams of a rank were restored, and which derived.

    Attributes:
        restored: streams that were restored bit for bit: "python", "numpy", "torch", "cuda:0", ...
        derived: streams that were seeded again.
        reason: why not all are restored; empty if they are.
    """

    restored: tuple[str, ...]
    derived: tuple[str, ...] = ()
    reason: str = ""


def capture(
    *, rank: int = 0, world_size: int = 1, coordinate: Mapping[str, int] | None = None, root_seed: int | None = None
) -> dict[str, Any]:
    """The random state of this process; each rank saves its own.

    Args:
        rank: rank of this process.
        world_size: number of ranks.
        coordinate: position of the rank by mesh axis; by default its rank. To derive the same streams on several ranks
            (tensor-parallel ranks, whose dropout must agree), leave out the axis in which they differ.
        root_seed: the seed of the run, the same on all ranks, 0 to 2^63 - 1; by default the seed of torch, without its
            highest bit.

    Returns:
        The state as numbers, text and arrays, for `extra` of a save.

    Raises:
        ArgumentError: a number is out of range.
        UnsupportedError: numpy's global stream was replaced by one of another kind.

    Example:
        >>> state = capture()
        >>> drawn = random.random(), np.random.rand(), torch.rand(1).item()
        >>> restore(state, iteration=100)
        RngReport(restored=('python', 'numpy', 'torch'), derived=(), reason='')
        >>> (random.random(), np.random.rand(), torch.rand(1).item()) == drawn
        True
    """
    return {
        "kind": _KIND,
        "place": _place(rank, world_size, coordinate),
        "root_seed": count(
            "root_seed", torch.initial_seed() % (MAX_SEED + 1) if root_seed is None else root_seed, 0, MAX_SEED
        ),
        **HostStreams.now().to_value(),
        "cuda": [_as_array(generator) for generator in _cuda_generators()],
    }


def restore(
    state: Mapping[str, Any],
    *,
    iteration: int,
    rank: int = 0,
    world_size: int = 1,
    coordinate: Mapping[str, int] | None = None,
) -> RngReport:
    """Restore a captured state if rank, world size and coordinate are the same; else derive new streams (`derive`).

    Args:
        state: the state that this rank captured, if the number of ranks is the same; else that of rank 0.
        iteration: the iteration of the checkpoint.
        rank: rank of this process.
        world_size: number of ranks.
        coordinate: as in `capture`.

    Returns:
        Which streams were restored and derived. If only the number of CUDA devices differs, only their streams are
        derived, because they cannot be assigned to devices.

    Raises:
        ArgumentError: `state` is not a captured state, or a number is out of range. Nothing is changed.
        UnsupportedError: numpy's global stream was replaced by one of another kind. Nothing is changed.

    Example:
        >>> restore(capture(rank=0, world_size=4), iteration=100, rank=0, world_size=2)
        RngReport(restored=(), derived=('python', 'numpy', 'torch'), reason='saved by rank 0 of 4, this is rank 0 of 2')
    """
    here = _place(rank, world_size, coordinate)
    iteration = count("iteration", iteration)
    saved = _CapturedState.parse(state)
    _numpy_stream()
    if saved.place != here:
        return derive(saved.root_seed, iteration, here["coordinate"], reason=_difference(saved.place, here))
    # torch initialises all CUDA devices of a process at once.
    generators = _cuda_generators(start=bool(saved.cuda))
    is_same = len(generators) == len(saved.cuda)
    states = [_as_tensor(one, generator) for one, generator in zip(saved.cuda, generators, strict=is_same)]
    random.setstate(saved.python)
    np.random.set_state(saved.numpy)  # noqa: NPY002 - the legacy stream is the global one
    torch.set_rng_state(saved.torch)
    restored = ["python", "numpy", "torch"]
    names = [f"cuda:{number}" for number in range(len(generators))]
    if is_same:
        for generator, one in zip(generators, states, strict=True):
            generator.set_state(one)
        return RngReport((*restored, *names))
    _seed_cuda(generators, saved.root_seed, iteration, here["coordinate"])
    reason = f"saved with {len(saved.cuda)} CUDA devices, there are {len(generators)}"
    return RngReport(tuple(restored), tuple(names), reason)


def derive(root_seed: int, iteration: int, coordinate: Mapping[str, int], *, reason: str = "") -> RngReport:
    """Seed every stream as described at the top of this module.

    Args:
        root_seed: the seed of the run, 0 to 2^63 - 1.
        iteration: the iteration of the checkpoint; 0 for a run that starts without one.
        coordinate: as in `capture`. Only the numbers and their order matter, not the names of the axes.
        reason: the reason, for the report.

    Raises:
        ArgumentError: a number is out of range.
        UnsupportedError: as in `restore`.

    Example:
        >>> report = derive(1234, 0, {"dp": 1})
        >>> one = torch.rand(1)
        >>> report = derive(1234, 0, {"dp": 0})
        >>> torch.equal(torch.rand(1), one)
        False
    """
    root_seed, iteration = count("root_seed", root_seed, 0, MAX_SEED), count("iteration", iteration)
    place = {axis: count(f"coordinate `{axis}`", number) for axis, number in coordinate.items()}
    _numpy_stream()
    random.seed(int.from_bytes(_sequence(root_seed, iteration, _PYTHON, place).generate_state(8).tobytes(), "little"))
    words = np.random.MT19937(_sequence(root_seed, iteration, _NUMPY, place)).state
    np.random.set_state(dict(words))  # noqa: NPY002 - the legacy stream is the global one
    torch.default_generator.manual_seed(_one_seed(_sequence(root_seed, iteration, _TORCH, place)))
    generators = _cuda_generators()
    _seed_cuda(generators, root_seed, iteration, place)
    names = [f"cuda:{number}" for number in range(len(generators))]
    return RngReport((), ("python", "numpy", "torch", *names), reason)


@dataclass(frozen=True)
class HostStreams:
    """The states of the global streams of the host: Python's `random`, numpy, torch on the CPU."""

    python: tuple[Any, ...]
    numpy: Any
    torch: torch.Tensor

    @classmethod
    def now(cls) -> HostStreams:
        """The current states.

        Raises:
            UnsupportedError: numpy's global stream was replaced by one of another kind.

        Example:
            >>> before = HostStreams.now()
            >>> one = random.random()
            >>> before.set()
            >>> random.random() == one
            True
        """
        return cls(random.getstate(), _numpy_stream(), torch.get_rng_state())

    def set(self) -> None:
        """Set the global streams to these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002 - the legacy stream is the global one
        torch.set_rng_state(self.torch)

    def to_value(self) -> dict[str, Any]:
        """The states as numbers and arrays."""
        version, words, gauss = self.python
        return {
            "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
            "numpy": {
                "words": self.numpy["state"]["key"],
                "position": int(self.numpy["state"]["pos"]),
                "gauss": float(self.numpy["gauss"]) if self.numpy["has_gauss"] else None,
            },
            "torch": self.torch.numpy(),
        }

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> HostStreams:
        """The states of `to_value`.

        Raises:
            ArgumentError: it is not such a value.
        """
        parts = _entries("streams", value, "python", "numpy", "torch")
        return cls(
            _python_state(_entries("python", parts["python"], "version", "words", "gauss")),
            _numpy_state(_entries("numpy", parts["numpy"], "words", "position", "gauss")),
            _as_tensor(parts["torch"], torch.default_generator),
        )


def _numpy_stream() -> dict[str, Any]:
    """The state of the global stream of numpy, which must be an MT19937."""
    state = np.random.get_state(legacy=False)  # noqa: NPY002 - the legacy stream is the global one
    assert isinstance(state, dict)
    if state["bit_generator"] != "MT19937":
        raise UnsupportedError(
            f"numpy's global stream is of kind {state['bit_generator']}, expected MT19937",
            hint="save the generator that replaced it in your own state",
        )
    return state


def _sequence(root_seed: int, iteration: int, stream: int, coordinate: Mapping[str, int]) -> np.random.SeedSequence:
    return np.random.SeedSequence(root_seed, spawn_key=(iteration, stream, *coordinate.values()))


def _one_seed(sequence: np.random.SeedSequence) -> int:
    return int(sequence.generate_state(1, np.uint64)[0])


def _seed_cuda(
    generators: list[torch.Generator], root_seed: int, iteration: int, coordinate: Mapping[str, int]
) -> None:
    for number, generator in enumerate(generators):
        generator.manual_seed(_one_seed(_sequence(root_seed, iteration, _CUDA + number, coordinate)))


def _cuda_generators(*, start: bool = False) -> list[torch.Generator]:
    """The generators of all CUDA devices; none if the process does not use CUDA. `start` initialises CUDA first."""
    if start and torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return list(torch.cuda.default_generators) if is_used else []


def _as_array(generator: torch.Generator) -> np.ndarray:
    array: np.ndarray = generator.get_state().numpy()  # already a copy
    return array


def _as_tensor(state: object, generator: torch.Generator) -> torch.Tensor:
    """The state of a torch generator, checked by setting it on a new generator."""
    if not isinstance(state, np.ndarray) or state.dtype != np.uint8 or state.ndim != 1:
        raise _invalid_state(f"the stream of device {generator.device} is not an array of bytes")
    tensor = torch.from_numpy(state.copy())
    try:
        torch.Generator(generator.device).set_state(tensor)
    except RuntimeError as error:
        raise _invalid_state(f"the stream of device {generator.device}: {error}") from error
    return tensor


def _place(rank: int, world_size: int, coordinate: Mapping[str, int] | None) -> dict[str, Any]:
    world_size, rank = count("world_size", world_size, 1), count("rank", rank)
    if rank >= world_size:
        raise ArgumentError(f"rank {rank} is out of range for a world size of {world_size}")
    if coordinate is None:
        coordinate = {"rank": rank}
    numbers = {str(axis): count(f"coordinate `{axis}`", number) for axis, number in coordinate.items()}
    return {"rank": rank, "world_size": world_size, "coordinate": numbers}


def _difference(saved: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    before, now = (f"rank {place['rank']} of {place['world_size']}" for place in (saved, here))
    if before != now:
        return f"saved by {before}, this is {now}"
    return f"saved at {shown(saved['coordinate'])}, this is {shown(here['coordinate'])}"


@dataclass(frozen=True)
class _CapturedState:
    """A captured state, checked: every stream except those of CUDA can be set to it."""

    place: dict[str, Any]
    root_seed: int
    python: tuple[Any, ...]
    numpy: dict[str, Any]
    torch: torch.Tensor
    cuda: list[object]

    @classmethod
    def parse(cls, state: Mapping[str, Any]) -> _CapturedState:
        parts = _entries("it", state, "kind", "place", "root_seed", "python", "numpy", "torch", "cuda")
        if parts["kind"] != _KIND:
            raise _invalid_state(f'kind is {shown(parts["kind"])}, expected "{_KIND}"')
        place = _entries("place", parts["place"], "rank", "world_size", "coordinate")
        if not isinstance(place["coordinate"], Mapping):
            raise _invalid_state(f"coordinate is {shown(place['coordinate'])}, expected a mapping")
        if not isinstance(parts["cuda"], list | tuple):
            raise _invalid_state(f"cuda is {shown(parts['cuda'])}, expected a list")
        return cls(
            _place(**place),
            count("root_seed", parts["root_seed"], 0, MAX_SEED),
            _python_state(_entries("python", parts["python"], "version", "words", "gauss")),
            _numpy_state(_entries("numpy", parts["numpy"], "words", "position", "gauss")),
            _as_tensor(parts["torch"], torch.default_generator),
            list(parts["cuda"]),
        )


def _python_state(part: Mapping[str, Any]) -> tuple[Any, ...]:
    words, gauss = _checked_words("python", part["words"], _WORDS + 1), _checked_gauss("python", part["gauss"])
    if part["version"] != random.getstate()[0]:  # `setstate` would also accept and convert an older version
        raise _invalid_state(f"the stream of python has version {shown(part['version'])}")
    state = (part["version"], tuple(words.tolist()), gauss)
    try:
        random.Random().setstate(state)  # noqa: S311 - only to check the state
    except (TypeError, ValueError) as error:
        raise _invalid_state(f"the stream of python: {error}") from error
    return state


def _numpy_state(part: Mapping[str, Any]) -> dict[str, Any]:
    # Check the position: numpy accepts any, and would read outside of the words.
    position, gauss = count("position", part["position"], 0, _WORDS), _checked_gauss("numpy", part["gauss"])
    return {
        "bit_generator": "MT19937",
        "state": {"key": _checked_words("numpy", part["words"], _WORDS), "pos": position},
        "has_gauss": int(gauss is not None),
        "gauss": gauss or 0.0,
    }


def _entries(name: str, value: object, *names: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or set(value) != set(names):
        raise _invalid_state(f"{name} is {shown(value)}, expected the entries {', '.join(names)}")
    return value


def _checked_words(name: str, value: object, n: int) -> np.ndarray:
    if not isinstance(value, np.ndarray) or value.dtype != np.uint32 or value.shape != (n,):
        raise _invalid_state(f"the stream of {name} is not an array of {n} words of 32 bits")
    return value.copy()


def _checked_gauss(name: str, value: object) -> float | None:
    if value is not None and not isinstance(value, float):
        raise _invalid_state(f"gauss of {name} is {shown(value)}, expected a float or None")
    return value


def _invalid_state(what: str) -> ArgumentError:
    return ArgumentError(f"not a captured random state: {what}")
