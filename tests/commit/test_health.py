"""Saves whose values are not finite: they are recorded, the last healthy one stays, and every reader says so."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reshard
from reshard import _core
from reshard.commit import manifest as manifests
from reshard.commit import save_log
from reshard.errors import ArgumentError, CheckpointNotFoundError
from reshard.formats import health
from reshard.options import Retention, Verify
from reshard.storage.location import locate

if TYPE_CHECKING:
    from pathlib import Path

FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "C64": np.complex64}


def _save(root: Path, number: int, *, bad: str | None = None, value: float = np.nan, **options: Any) -> Any:
    arrays = {name: np.arange(6.0).reshape(2, 3) for name in ("a", "b", "c")}
    if bad is not None:
        arrays[bad][1, 1] = value
    return reshard.save(root, number, arrays, **options)


def _status(root: Path, number: int) -> int | None:
    return manifests.read(locate(root / f"iteration_{number:08d}")).ckpt_status


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("is_copied", [False, True])
def test_the_writer_finds_what_numpy_finds(tmp_path: Path, seed: int, *, is_copied: bool) -> None:
    rng = np.random.default_rng(seed)
    tensors, expected = [], {}
    for i in range(int(rng.integers(1, 30))):
        kind = rng.choice([*FLOATS, "I32", "U8"])
        n = int(rng.integers(0, 9)) if i % 3 else int(rng.integers(1, 400_000))
        dtype = FLOATS.get(kind, np.int32 if kind == "I32" else np.uint8)
        values = np.frombuffer(rng.bytes(n * np.dtype(dtype).itemsize), dtype).copy()  # any bits
        if kind in FLOATS and rng.random() < 0.7:
            values[~np.isfinite(values)] = 1
            if n and rng.random() < 0.5:
                values[rng.integers(n)] = rng.choice([np.nan, np.inf, -np.inf])
        if kind in FLOATS and not np.isfinite(values).all():
            expected[f"t{i}"] = "nan" if np.isnan(values.view(values.real.dtype)).any() else "inf"
        tensors.append((f"t{i}", str(kind), values.shape, values))
    path = str(tmp_path / "file.safetensors")
    if is_copied:
        written = _core.SnapshotPool().take(tensors).write(path, durable=False)
    else:
        written = _core.write_arrays(path, tensors, durable=False)
    assert dict(written.not_finite) == expected


def test_a_save_records_the_tensor_and_its_status(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    report = _save(tmp_path, 2, bad="b")
    assert any("`b` holds NaN" in line for line in report.warnings)
    assert [_status(tmp_path, n) for n in (1, 2)] == [0, 1]
    folder = tmp_path / "iteration_00000002"
    assert health.read(locate(folder), manifests.read(locate(folder))) == {"b": "nan"}
    assert not (tmp_path / "iteration_00000001" / health.NOT_FINITE_FILE).exists()
    assert json.loads((folder / "common.json").read_text())["ckpt_status"] == 1
    assert "ckpt_status" not in json.loads((tmp_path / "iteration_00000001" / "common.json").read_text())
    assert [one.ckpt_status for one in save_log.read(locate(tmp_path))] == [0, 1]
    assert reshard.verify(tmp_path).ok
    assert str(health.unhealthy(locate(tmp_path))) == (
        "iteration 2 is unhealthy: `b` holds NaN; the last healthy one is iteration 1"
    )


def test_a_status_of_the_caller_stays(tmp_path: Path) -> None:
    _save(tmp_path, 1, common={"ckpt_status": 1})
    assert _status(tmp_path, 1) == 1
    found = health.unhealthy(locate(tmp_path))
    assert found is not None
    assert "loss or its own function" in str(found)


def test_a_mask_may_be_infinite_and_not_nan(tmp_path: Path) -> None:
    verify = Verify(may_be_infinite=["b"])
    _save(tmp_path, 1, bad="b", value=-np.inf, verify=verify)
    _save(tmp_path, 2, bad="b", verify=verify)
    _save(tmp_path, 3, bad="a", value=np.inf, verify=verify)
    assert [_status(tmp_path, n) for n in (1, 2, 3)] == [0, 1, 1]


def test_a_background_save_and_a_conversion_record_it(tmp_path: Path) -> None:
    _save(tmp_path / "run", 1, bad="c", blocking=False).result()
    assert _status(tmp_path / "run", 1) == 1
    reshard.convert(tmp_path / "run", tmp_path / "other", to="checkpoint2")
    (folder,) = (tmp_path / "other").glob("iteration_*")
    manifest = manifests.read(locate(folder))
    assert (manifest.ckpt_status, health.read(locate(folder), manifest)) == (1, {"c": "nan"})


# Every combination of the rules, a NaN from a random step in a random tensor on, and pins and rollbacks in between.
RULES = [
    Retention(keep=keep, keep_every=every, best=best)
    for keep in (1, 2, 3)
    for every in (None, 3, 4)
    for best in (None, ("loss", 1), ("-loss", 2))
]


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_no_rule_removes_the_last_healthy_iteration(tmp_path: Path, rule: Retention) -> None:
    rng, has_pins = random.Random(str(rule)), RULES.index(rule) % 2 == 1
    first, n = rng.randint(2, 5), 9
    for number in range(1, n + 1):
        if has_pins and number in (2, first + 1, first + 3):  # healthy and unhealthy ones, of which one is unpinned
            reshard.pin(locate(tmp_path), number - 1)
            if number == first + 3:
                reshard.unpin(locate(tmp_path), first)
        bad = rng.choice("abc") if number >= first else None
        metrics = {"loss": rng.random()}
        _save(
            tmp_path,
            number,
            bad=bad,
            value=rng.choice([np.nan, np.inf]),
            metrics=metrics,
            retention=rule,
        )
    reshard.prune(tmp_path, retention=rule)
    there = [int(path.name[10:]) for path in sorted(tmp_path.glob("iteration_*"))]
    assert first - 1 in there, there
    assert n in there
    assert health.last_healthy(locate(tmp_path)) == first - 1
    found = health.unhealthy(locate(tmp_path))
    assert found is not None
    assert (found.since, found.last_healthy) == (min(one for one in there if one >= first), first - 1)
    changes = reshard.rollback(tmp_path, healthy=True)
    assert changes.iteration == first - 1
    assert reshard.open(tmp_path).iteration == first - 1


def test_a_rollback_to_a_healthy_one_needs_one(tmp_path: Path) -> None:
    _save(tmp_path, 1, bad="a")
    with pytest.raises(CheckpointNotFoundError, match="was saved as healthy"):
        reshard.rollback(tmp_path, healthy=True)
    for given in ({}, {"iteration": 1, "healthy": True}):
        with pytest.raises(ArgumentError, match="exactly one"):
            reshard.rollback(tmp_path, **given)  # type: ignore[arg-type]


def _run(*words: str) -> str:
    return subprocess.run([sys.executable, "-m", "reshard", *words], capture_output=True, text=True, check=True).stdout


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("command", [["explain"], ["watch", "--once"], ["inspect"]])
def test_commands_say_since_when_and_which_tensor(tmp_path: Path, command: list[str]) -> None:
    for number in range(1, 5):
        _save(tmp_path, number, bad="b" if number > 2 else None)
    text = " ".join(_run(command[0], str(tmp_path), *command[1:]).split())
    assert "iteration 4 is unhealthy, as all since iteration 3: `b` holds NaN" in text
    assert "last healthy one is iteration 2" in text
