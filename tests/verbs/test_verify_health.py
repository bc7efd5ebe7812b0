"""What `verify(health=True)` finds: each kind of wrong value, by its tensor, number and first index, in all formats."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch
from tests.helpers.threads import in_threads

import reshard
from reshard import _core
from reshard.errors import ArgumentError, CheckpointNotFoundError
from reshard.verbs import slices

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.verbs.health import HealthFinding

FLOATS: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
}


def _any_values(rng: np.random.Generator, kind: str) -> np.ndarray:
    """Any bits, or finite values with a few others."""
    n = int(rng.integers(0, 9) if rng.random() < 0.5 else rng.integers(1, 200_000))
    dtype = np.dtype(FLOATS[kind])
    values = np.frombuffer(rng.bytes(n * dtype.itemsize), dtype).copy()
    if rng.random() < 0.7:
        values[:] = np.abs(rng.standard_normal(n)).astype(dtype)
        for at in rng.integers(0, max(n, 1), 3 if n else 0):
            values[at] = rng.choice([np.nan, -1.0, -0.0, 2.0])
    return values


@pytest.mark.parametrize("seed", range(20))
def test_values_are_counted_as_numpy_counts_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    at, arrays, file, expected = 0, [], bytearray(), []
    for number in range(int(rng.integers(1, 12))):
        kind, is_square = str(rng.choice(list(FLOATS))), bool(rng.random() < 0.5)
        values = _any_values(rng, kind)
        gap = int(rng.integers(0, 5))
        file += b"\xff" * gap + values.tobytes()
        arrays.append((kind, at + gap, values.nbytes, is_square))
        at += gap + values.nbytes
        with np.errstate(invalid="ignore"):
            wide = values.astype(np.float64)
        nan, infinite = np.isnan(wide), np.isinf(wide)
        negative = (wide < 0) if is_square else np.zeros(len(wide), bool)
        firsts = [int(found.argmax()) if found.any() else None for found in (nan | infinite, negative)]
        one = (number, int(nan.sum()), int(infinite.sum()), firsts[0], int(negative.sum()), firsts[1])
        if any(one[1:3]) or one[4]:
            expected.append(one)
    counts = _core.ValueCounts(arrays)
    cuts = sorted({0, len(file), *(int(cut) for cut in rng.integers(0, len(file) + 1, 6))})
    pieces = list(itertools.pairwise(cuts))
    rng.shuffle(pieces)
    for start, end in pieces:
        counts.look(int(start), bytes(file[start:end]))
    assert counts.found() == expected


def test_arrays_that_overlap_are_refused() -> None:
    for arrays in ([("F32", 0, 8, False), ("F32", 4, 8, False)], [("F32", 8, 4, False), ("F32", 0, 4, False)]):
        with pytest.raises(ArgumentError, match="overlap, or are not in the order"):
            _core.ValueCounts(arrays)


@pytest.mark.parametrize("seed", range(10))
def test_arrays_are_compared_as_numpy_compares_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kind = str(rng.choice(list(FLOATS)))
    a = _any_values(rng, kind)
    b = a.copy()
    bits_a, bits_b = (one.view(f"u{a.itemsize}") for one in (a, b))
    for at in rng.integers(0, max(len(a), 1), int(rng.integers(0, 4)) if len(a) else 0):
        bits_b[at] ^= 1
    with np.errstate(invalid="ignore"):
        both = np.isnan(a.astype(np.float64)) & np.isnan(b.astype(np.float64))
    differs = (bits_a != bits_b) & ~both
    first = int(differs.argmax()) if differs.any() else None
    assert _core.differing(kind, a.view(np.uint8), b.view(np.uint8)) == (int(differs.sum()), first)


# -- a root


def _model(seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    model: dict[str, np.ndarray] = {}
    optimizer: dict[str, np.ndarray] = {}
    for name, shape in (("fc.weight", (6, 4)), ("fc.bias", (4,))):
        wide = rng.standard_normal(shape).astype(np.float32)
        model[name] = wide.astype(ml_dtypes.bfloat16)
        optimizer |= {f"fp32_param.{name}": wide, f"exp_avg.{name}": wide - 1, f"exp_avg_sq.{name}": wide**2}
    model["frozen"] = np.ones(3, np.float32)
    return model, optimizer


def _save(root: Path, number: int, change: Any = None, **options: Any) -> None:
    model, optimizer = _model(number)
    if change is not None:
        change(model, optimizer)
    reshard.save(root, number, model, optimizer, **options)


def _findings(path: Path, **options: Any) -> list[HealthFinding]:
    found = reshard.verify(path, health=True, **options).checkpoints[0].health
    assert found is not None
    return list(found)


def test_a_healthy_root_has_no_findings(tmp_path: Path) -> None:
    for number in (1, 2):
        _save(tmp_path, number)
    report = reshard.verify(tmp_path, health=True)
    assert (report.ok, report.healthy) == (True, True)
    assert [one.health for one in report.checkpoints] == [(), ()]
    assert reshard.verify(tmp_path).checkpoints[0].health is None


def test_what_agrees_is_read_once(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    sizes = {file.stat().st_size for file in (tmp_path / "iteration_00000001").iterdir()}
    totals = []
    for health in (False, True):
        seen: list[tuple[int, int]] = []
        reshard.verify(tmp_path, health=health, progress=lambda done, total, seen=seen: seen.append((done, total)))  # type: ignore[misc]
        assert seen[-1][0] == seen[-1][1]
        assert seen[0][0] in sizes
        totals.append(seen[-1][1])
    assert totals[0] == totals[1]


def _nan(model: Any, optimizer: Any) -> None:
    model["fc.weight"][2, 1:3] = np.nan
    optimizer["fp32_param.fc.weight"][2, 1:3] = np.nan


def _negative(_: Any, optimizer: Any) -> None:
    optimizer["exp_avg_sq.fc.weight"][3, 2] = -1e-9
    optimizer["exp_avg_sq.fc.weight"][5, 0] = -1.0


def _both(model: Any, optimizer: Any) -> None:
    _nan(model, optimizer)
    _negative(model, optimizer)


def _unrounded(model: Any, _: Any) -> None:
    model["fc.bias"].view(np.uint16)[2] += 1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_nan, [("fc.weight", "not finite", 2, (2, 1)), ("fp32_param.fc.weight", "not finite", 2, (2, 1))]),
        (_negative, [("exp_avg_sq.fc.weight", "negative", 2, (3, 2))]),
        (_unrounded, [("fc.bias", "rounding", 1, (2,))]),
    ],
)
def test_each_kind_is_found_with_its_tensor_number_and_index(tmp_path: Path, change: Any, expected: Any) -> None:
    _save(tmp_path, 1)
    _save(tmp_path, 2, change)
    report = reshard.verify(tmp_path, health=True)
    assert (report.ok, report.healthy) == (True, False)
    assert sorted((one.key, one.kind, one.count, one.first) for one in report.checkpoints[0].health or ()) == expected
    assert report.checkpoints[1].health == ()


def test_the_index_is_that_of_the_whole_tensor(tmp_path: Path) -> None:
    whole = np.arange(48.0).reshape(4, 12)
    whole[3, 7] = np.inf
    whole[1, 10] = np.nan
    layout = {"mesh": {"tp": 3}, "rules": [{"match": "*", "cut": [None, "tp"]}]}

    def work(group: Any) -> Any:
        own = {"w": whole[:, group.rank * 4 : group.rank * 4 + 4].copy()}
        return reshard.save(tmp_path, 1, own, layout=layout, shapes={"w": (4, 12)}, group=group, timeout=20)

    in_threads(3, work)
    (found,) = _findings(tmp_path)
    assert (found.key, found.count, found.first) == ("w", 2, (1, 10))
    assert str(found) == "`w` holds 1 NaN and 1 infinite value; the first is at [1, 10]"


def test_copies_that_differ_are_found(tmp_path: Path) -> None:
    def work(group: Any) -> Any:
        own = {"w": np.arange(10.0), "same": np.zeros(3)}
        own["w"][4] += group.rank
        options: dict[str, Any] = {"files": {"dedup": False}, "verify": {"check_replicas": False}}
        layout = {"mesh": {"dp": 2}, "rules": [{"match": "*", "cut": []}]}
        return reshard.save(tmp_path, 1, own, layout=layout, group=group, timeout=20, **options)

    for one in in_threads(2, work):
        if isinstance(one, Exception):
            raise one
    (found,) = _findings(tmp_path)
    assert (found.key, found.kind, found.count, found.first) == ("w", "replicas", 1, (4,))
    assert ".safetensors` and `" in found.detail


def test_a_value_in_two_copies_counts_once(tmp_path: Path) -> None:
    def work(group: Any) -> Any:
        own = {"w": np.array([1.0, np.nan])}
        layout = {"mesh": {"dp": 2}, "rules": [{"match": "*", "cut": []}]}
        return reshard.save(tmp_path, 1, own, layout=layout, group=group, timeout=20, files={"dedup": False})

    in_threads(2, work)
    assert [(one.kind, one.count) for one in _findings(tmp_path)] == [("not finite", 1)]


_CUTS: tuple[list[str | None], ...] = ([], ["dp"], [None, "dp"], ["tp"], [None, "tp"], ["dp", "tp"], [("dp", "tp")])  # type: ignore[list-item]


def _own(whole: np.ndarray, cut: list[Any], coordinates: dict[str, int]) -> np.ndarray:
    for dim, axes in enumerate(cut):
        for axis in axes if isinstance(axes, tuple) else (axes,):
            if axis is not None:
                whole = np.split(whole, 2, axis=dim)[coordinates[axis]]
    return whole.copy()


@pytest.mark.parametrize("narrow", ["BF16", "F16"])
@pytest.mark.parametrize("seed", range(10))
def test_shards_that_must_agree_are_compared_whatever_their_cuts(tmp_path: Path, seed: int, narrow: str) -> None:
    """Four ranks; each tensor is cut in its own way, and all ranks write theirs. One value of one rank differs."""
    rng = np.random.default_rng(seed)
    cuts = {name: _CUTS[rng.integers(len(_CUTS))] for name in ("fp32_param.w", "w", "count")}
    shape = tuple(int(n) for n in 4 * rng.integers(1, 40, 2))
    wide = rng.standard_normal(shape).astype(np.float32)
    wholes = {
        "w": wide.astype(FLOATS[narrow]),
        "fp32_param.w": wide,
        "count": rng.integers(0, 9, shape).astype(np.int16),
    }
    bad_rank, bad_name = int(rng.integers(4)), str(rng.choice([*cuts, "none"]))

    def work(group: Any) -> Any:
        coordinates = {"dp": group.rank // 2, "tp": group.rank % 2}
        own = {name: _own(whole, cuts[name], coordinates) for name, whole in wholes.items()}
        if group.rank == bad_rank and bad_name in own:
            bits = own[bad_name].reshape(-1).view(f"u{own[bad_name].itemsize}")
            bits[int(rng.integers(bits.size))] ^= 1 << (8 * bits.itemsize - 1)
        rules = [
            {"match": name, "cut": [list(a) if isinstance(a, tuple) else a for a in cut]} for name, cut in cuts.items()
        ]
        return reshard.save(
            tmp_path,
            1,
            {"w": own["w"], "count": own["count"]},
            {"fp32_param.w": own["fp32_param.w"]},
            layout={"mesh": {"dp": 2, "tp": 2}, "rules": rules, "optimizer": {"follow": False}},
            shapes=dict.fromkeys(cuts, shape),
            group=group,
            timeout=20,
            files={"dedup": False},
            verify={"check_replicas": False},
        )

    for one in in_threads(4, work):
        if isinstance(one, Exception):
            raise one
    seen = []
    report = reshard.verify(tmp_path, health=True, progress=lambda done, total: seen.append((done, total)))
    n_files_bytes = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    found = {(one.key, one.kind, one.count) for one in report.checkpoints[0].health or ()}
    if bad_name == "none":
        assert not found
        of_pair = cuts["w"], cuts["fp32_param.w"]
        if of_pair[0] == of_pair[1] or all(len(cut) < 2 for cut in of_pair):  # else columns are compared with rows
            assert seen[-1] == (n_files_bytes, n_files_bytes), "each byte is read once"
        return
    n_copies = 4 // 2 ** sum(len(axes) if isinstance(axes, tuple) else axes is not None for axes in cuts[bad_name])
    if n_copies > 1:
        assert (bad_name, "replicas", 1) in found
    elif bad_name != "count":
        assert found == {("w", "rounding", 1)}
    else:
        assert not found


def test_weights_as_wide_as_those_of_the_optimizer_are_not_compared_with_them(tmp_path: Path) -> None:
    def widen(model: Any, optimizer: Any) -> None:
        model["fc.bias"] = optimizer["fp32_param.fc.bias"] + 1

    _save(tmp_path, 1, widen)
    assert _findings(tmp_path) == []


def test_infinities_on_purpose_are_no_finding(tmp_path: Path) -> None:
    def change(model: Any, _: Any) -> None:
        model["frozen"][1] = -np.inf

    _save(tmp_path, 1, change)
    assert len(_findings(tmp_path)) == 1
    assert _findings(tmp_path, may_be_infinite=["froz*"]) == []


def test_tensors_that_did_not_change_are_listed_and_no_alarm(tmp_path: Path) -> None:
    def stuck(model: Any, _: Any) -> None:
        model["fc.bias"] = np.full(4, 2.0, ml_dtypes.bfloat16)

    for number in (1, 2, 3):
        _save(tmp_path, number, stuck)
    report = reshard.verify(tmp_path, since=1)
    found = [one for one in report.checkpoints[0].health or () if one.kind == "unchanged"]
    assert [(one.key, one.count, one.first, one.is_trained) for one in found] == [
        ("fc.bias", 4, None, True),
        ("frozen", 3, None, False),
    ]
    assert not any(one.kind == "unchanged" for one in report.checkpoints[1].health or ())
    assert not any(one.is_alarm for one in found)
    folder = tmp_path / "iteration_00000002"
    assert [one.key for one in _findings(folder, since=1) if one.kind == "unchanged"] == ["fc.bias", "frozen"]


def test_a_change_after_the_first_elements_is_seen(tmp_path: Path) -> None:
    values = np.zeros(100_000)
    reshard.save(tmp_path, 1, {"w": values, "v": values})
    values = values.copy()
    values[-1] = 1
    reshard.save(tmp_path, 2, {"w": values, "v": np.zeros(100_000)})
    assert [one.key for one in _findings(tmp_path, since=1)] == ["v"]


def test_since_is_an_older_iteration_of_the_root(tmp_path: Path) -> None:
    _save(tmp_path / "run", 5)
    for number in (5, 6):
        with pytest.raises(ArgumentError, match="not older than iteration 5"):
            reshard.verify(tmp_path / "run", since=number)
    with pytest.raises(CheckpointNotFoundError, match="no such iteration"):
        reshard.verify(tmp_path / "run", since=4)
    reshard.save_file({"w": np.zeros(2)}, tmp_path / "w.safetensors")
    with pytest.raises(ArgumentError, match="an iteration of a checkpoint root"):
        reshard.verify(tmp_path / "w.safetensors", since=4)


def test_a_damaged_checkpoint_has_faults_and_no_findings(tmp_path: Path) -> None:
    _save(tmp_path, 1, _nan)
    (file,) = tmp_path.glob("iteration_*/*model*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    report = reshard.verify(tmp_path, health=True)
    assert (report.ok, report.checkpoints[0].health) == (False, None)


def test_large_tensors_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "_BUFFER_BYTES", 1 << 10)
    _save(tmp_path / "run", 1, _unrounded)
    _save(tmp_path / "run", 2, _unrounded)
    values = np.zeros((40, 30), np.float32)
    values[35, 7] = np.nan
    reshard.save_file({"w": values, "c": np.zeros(300, np.complex64)}, tmp_path / "w.safetensors")
    (found,) = _findings(tmp_path / "w.safetensors")
    assert (found.count, found.first) == (1, (35, 7))
    assert {one.kind for one in _findings(tmp_path / "run", since=1)} == {"rounding", "unchanged"}


# -- other formats


def _torch_state(*, is_bad: bool) -> dict[str, Any]:
    weight = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    square = weight**2
    if is_bad:
        weight[1, 2] = math.inf
        square[2, 0] = -1.0
    return {"model": {"w": weight.T}, "optimizer": {"state": {"w": {"exp_avg_sq": square}}}}


def _write(kind: str, path: Path, *, is_bad: bool) -> Path:
    if kind == "torch":
        torch.save(_torch_state(is_bad=is_bad), path.with_suffix(".pt"))
        return path.with_suffix(".pt")
    if kind == "dcp":
        import torch.distributed.checkpoint as dcp

        dcp.state_dict_saver.save(_torch_state(is_bad=is_bad), checkpoint_id=path)
        return path
    _save(path.with_name("run"), 1, _both if is_bad else None)
    reshard.convert(path.with_name("run"), path, to=kind)  # type: ignore[arg-type]
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["torch", "dcp", "huggingface", "checkpoint1", "deepspeed-universal"])
def test_other_formats_are_looked_at(tmp_path: Path, kind: str) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    assert _findings(_write(kind, tmp_path / "a" / "x", is_bad=False)) == []
    found = {
        (one.key, one.kind, one.count, one.first) for one in _findings(_write(kind, tmp_path / "b" / "x", is_bad=True))
    }
    if kind in ("torch", "dcp"):
        assert found == {
            ("model.w", "not finite", 1, (2, 1)),
            ("optimizer.state.w.exp_avg_sq", "negative", 1, (2, 0)),
        }
    elif kind == "deepspeed-universal":
        assert found == {("fc.weight.fp32", "not finite", 2, (2, 1)), ("fc.weight.exp_avg_sq", "negative", 2, (3, 2))}
    else:
        assert ("fc.weight", "not finite", 2, (2, 1)) in found
        assert any(one[1:] == ("negative", 2, (3, 2)) for one in found) == (kind != "huggingface")


# -- the command


def _run(*words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "reshard", "verify", *words], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout


@pytest.mark.slow
def test_the_command_prints_findings_and_has_its_own_exit_code(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    assert _run(str(tmp_path), "--health")[0] == 0
    assert "healthy: no wrong values" in _run(str(tmp_path), "--health")[1]
    _save(tmp_path, 2, _nan)
    code, text = _run(str(tmp_path), "--health", "--since", "1")
    assert code == 4
    assert "  `fc.weight` holds 2 NaN; the first is at [2, 1]" in text
    assert "perhaps frozen: frozen" in text
    code, text = _run(str(tmp_path), "--health", "--json")
    assert code == 4
    found = json.loads(text)
    assert (found["ok"], found["healthy"]) == (True, False)
    assert found["checkpoints"][0]["health"][0]["first"] == [2, 1]
