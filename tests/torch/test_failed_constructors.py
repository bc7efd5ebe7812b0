"""A constructor that fails leaves nothing behind: threads, signal handlers, open files, files, environment.

Every argument of every class gets values that it may refuse, alone and beside arguments that take something.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torch.optim import optimizer

import reshard
from reshard.torch import Checkpointer, ElasticSampler
from reshard.torch.dcp import Reader, Writer

if TYPE_CHECKING:
    from collections.abc import Callable

WRONG: tuple[Any, ...] = (object(), -1, "no such value", [object()], {"none": 1}, (1, 2, -3))


def held(folder: Path) -> Counter[tuple[str, object]]:
    """What the process holds. It may become less meanwhile: a server of an earlier test ends its idle connections."""
    return Counter(
        [("thread", one.name) for one in threading.enumerate()]
        + [("handler", (number, signal.getsignal(number))) for number in (1, 2, 10, 12, 15)]
        + [("open file", name) for name in _open_files()]
        + [("entry", str(path)) for path in folder.rglob("*")]
        + [("hook", None)] * len(optimizer._global_optimizer_post_hooks)
    )


def left_since(before: Counter[tuple[str, object]], folder: Path) -> list[tuple[str, object]]:
    left = held(folder) - before
    if left:
        gc.collect()  # what an error holds in a cycle
        left = held(folder) - before
    return list(left)


def _open_files() -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder that is listed
            found.append(str(entry.readlink()))
    return found


def makers(root: Path) -> dict[str, tuple[Callable[..., object], dict[str, Any]]]:
    """Each class with arguments of which some take something."""
    from reshard.lightning import ReshardCheckpoint
    from reshard.transformers import ReshardCallback

    return {
        "Checkpointer": (
            Checkpointer,
            {"root": root / "run", "save_every": 2, "signals": (10, 12), "async_save": True, "on_event": print},
        ),
        "ReshardCallback": (ReshardCallback, {"root": root / "run"}),
        "ReshardCheckpoint": (ReshardCheckpoint, {"dirpath": root / "run"}),
        "Writer": (Writer, {"path": root / "run" / "iteration_00000001"}),
        "Reader": (Reader, {"path": root / "run"}),
        "ElasticSampler": (
            ElasticSampler,
            {"size": 8, "seed": 0, "shuffle": True, "global_batch_size": 4, "rank": 0, "world_size": 2},
        ),
        "EventLog": (reshard.EventLog, {"root": root / "run"}),
    }


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize(
    "name", ["Checkpointer", "ReshardCallback", "ReshardCheckpoint", "Writer", "Reader", "ElasticSampler", "EventLog"]
)
def test_a_constructor_that_fails_leaves_nothing(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where relative paths would be made
    make, given = makers(tmp_path)[name]
    names = [
        one.name
        for one in inspect.signature(make).parameters.values()
        if one.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    ]
    given = {key: value for key, value in given.items() if key in names}
    assert len(given) > 0
    n_failed = 0
    before = held(tmp_path)
    for argument in names:
        for wrong in WRONG:
            made: Any = None
            try:
                made = make(**{**given, argument: wrong})
            except Exception:  # noqa: BLE001  which error is told is tested elsewhere
                n_failed += 1
            if hasattr(made, "close"):
                made.close()
            del made
            assert not left_since(before, tmp_path), (argument, wrong)
    assert n_failed >= len(given)


def test_calls_for_jax_that_fail_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`reshard.jax` has no class that takes something; its functions start threads, one for each device."""
    jax = pytest.importorskip("jax")
    import reshard.jax

    monkeypatch.chdir(tmp_path)
    tree = {"w": jax.numpy.arange(6.0), "b": [jax.numpy.ones(2)]}
    reshard.jax.save(tmp_path / "saved", 1, tree)
    calls: list[tuple[Callable[..., object], dict[str, Any]]] = [
        (reshard.jax.save, {"root": tmp_path / "new", "step": 1, "tree": tree, "extra": {}, "keep": 2}),
        (reshard.jax.load, {"root": tmp_path / "saved", "like": tree, "partial": False, "verify": "all", "threads": 1}),
    ]
    n_failed = 0
    before = held(tmp_path)
    for call, given in calls:
        for argument in given:
            for wrong in (*WRONG, {"w": "text"}, tmp_path / "none" / "there"):
                try:
                    call(**{**given, argument: wrong})
                except Exception:  # noqa: BLE001  which error is told is tested elsewhere
                    n_failed += 1
                    assert not left_since(before, tmp_path), (call.__name__, argument, wrong)
                else:
                    before = held(tmp_path)
    assert n_failed > 40
