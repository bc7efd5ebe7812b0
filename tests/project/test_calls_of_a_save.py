"""What a save and a round of a resume ask the disk and each other: how often, and how many calls that takes."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import reshard
from reshard.config import Config
from reshard.opening.gather import gather

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

PACKAGE = Path(reshard.__file__).parent


class Calls:
    """The calls of functions of this package: where, which, and with what first argument."""

    def __init__(self) -> None:
        self.functions: Counter[tuple[str, str]] = Counter()
        self.arguments: Counter[tuple[str, str]] = Counter()

    def see(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(PACKAGE)):
            return
        self.functions[str(Path(code.co_filename).relative_to(PACKAGE)), code.co_qualname] += 1
        name = f"{Path(code.co_filename).stem}.{code.co_qualname}"
        if name in {"location.locate", "manifest.read", "local.LocalStore.entries"}:
            given = next(one for one in code.co_varnames if one != "self")
            self.arguments[name, str(frame.f_locals[given])] += 1

    @property
    def files(self) -> set[str]:
        return {name for name, _ in self.functions}


def calls_of(work: Callable[[], object]) -> Calls:
    calls = Calls()
    gc.collect()
    gc.disable()  # what ends objects of other tests is not called in between
    sys.setprofile(calls.see)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def state(value: int) -> dict[str, np.ndarray]:
    return {f"w{i}": np.full((64, 64), value, np.float32) for i in range(4)}


def saved(root: Path, n: int) -> None:
    for iteration in range(1, n + 1):
        reshard.save(root, iteration, state(iteration), keep=5)


def test_a_save_lists_the_root_once_and_parses_each_manifest_once(tmp_path: Path) -> None:
    root = tmp_path / "run"
    saved(root, 3)
    calls = calls_of(lambda: reshard.save(root, 4, state(4), keep=5))
    assert calls.arguments["local.LocalStore.entries", str(root)] == 1
    assert calls.arguments["location.locate", str(root)] == 1
    read = {name: n for (function, name), n in calls.arguments.items() if function == "manifest.read"}
    assert read == {str(root / f"iteration_{i:08d}"): 1 for i in (1, 2, 3)}


def test_what_a_save_calls_does_not_grow(tmp_path: Path) -> None:
    """Measured: 1,480 calls in 51 files; what they are for is in docs/architecture.md."""
    saved(tmp_path / "run", 3)
    calls = calls_of(lambda: reshard.save(tmp_path / "run", 4, state(4), keep=5))
    assert sum(calls.functions.values()) <= 1_500
    assert len(calls.files) <= 51


def test_what_a_resume_calls_does_not_grow(tmp_path: Path) -> None:
    """Measured: 1,967 calls in 51 files, where the newest of four iterations is damaged."""
    root = tmp_path / "run"
    saved(root, 4)
    shard = next((root / "iteration_00000004").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert reshard.load(root).iteration == 3  # imports modules
    calls = calls_of(lambda: reshard.load(root))
    assert sum(calls.functions.values()) <= 2_000
    assert len(calls.files) <= 51


def test_nothing_is_removed_by_what_the_root_held_when_the_save_began(tmp_path: Path) -> None:
    """Another process removes an iteration while a save writes: what would be the last healthy one stays."""
    root = tmp_path / "run"
    for iteration in (1, 2):
        reshard.save(root, iteration, state(iteration), keep=2)

    def remove_another(_: int, __: int) -> None:
        if (root / "iteration_00000002").exists():
            (root / "iteration_00000002").rename(tmp_path / "elsewhere")

    reshard.save(root, 3, state(3), keep=2, progress=remove_another)
    assert sorted(one.name for one in root.glob("iteration_*")) == ["iteration_00000001", "iteration_00000003"]


def test_a_round_of_a_resume_lists_the_root_once(tmp_path: Path) -> None:
    root = tmp_path / "run"
    saved(root, 3)
    calls = calls_of(lambda: gather(Config(load_path=str(root), resume=True)))
    assert calls.arguments["local.LocalStore.entries", str(root)] == 1
    read = {name: n for (function, name), n in calls.arguments.items() if function == "manifest.read"}
    assert read == {str(root / "iteration_00000003"): 1}
