"""`reshard.diff`: finds and measures differences; expected values come from numpy."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import reshard
from reshard import _core
from reshard.cli import main
from reshard.errors import ArgumentError, CheckpointNotFoundError
from reshard.values.indexing import regions

verbs_diff = sys.modules[reshard.diff.__module__]  # the name `reshard.verbs.diff` is the function
CKPT2 = Path(__file__).parents[1] / "data" / "mindspore" / "ckpt2" / "checkpoint"
TP2 = {"mesh": {"tp": 2}, "rules": [{"match": "w*", "cut": ["tp"]}, {"match": "*"}]}
NAN, INF = math.nan, math.inf


def report_of(tmp_path: Path, a: Any, b: Any, **options: Any) -> reshard.DiffReport:
    """The report of two files with these arrays."""
    for name, arrays in (("a", a), ("b", b)):
        reshard.save_file(arrays, tmp_path / f"{name}.safetensors")
    return reshard.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", **options)


# -- values


@pytest.mark.parametrize(
    ("a", "b", "expected"),  # (elements that differ, NaN on one side, largest absolute difference), or None: equal
    [
        (np.arange(5.0), np.arange(5.0), None),
        (np.array([1.0, NAN, INF]), np.array([1.0, NAN, INF]), None),
        (np.zeros((0, 3)), np.zeros((0, 3)), None),
        (np.array(1.5), np.array(-1.0), (1, 0, 2.5)),
        (np.array([1.0, NAN, 3.0]), np.array([NAN, NAN, 2.0]), (2, 1, 1.0)),
        (np.array([0.0]), np.array([-0.0]), (1, 0, 0.0)),
        (np.array([INF, 1.0]), np.array([-INF, 1.0]), (1, 0, INF)),
        (np.array([1e308]), np.array([-1e308]), (1, 0, INF)),
        (np.array([5, 7, 9], np.uint8), np.array([6, 7, 4], np.uint8), (2, 0, 5.0)),
        (np.array([-(2**63), 0], np.int64), np.array([2**63 - 1, 0], np.int64), (1, 0, 2.0**64)),
        (np.array([2**64 - 1], np.uint64), np.array([0], np.uint64), (1, 0, 2.0**64)),
        (np.array([True, False]), np.array([True, True]), (1, 0, 1.0)),
        (np.array([3 + 4j, 1], np.complex64), np.array([0, 1], np.complex64), (1, 0, 5.0)),
        (np.array([complex(NAN, 0)], np.complex64), np.array([0], np.complex64), (1, 1, 0.0)),
        (np.array([1, 2], ml_dtypes.bfloat16), np.array([1, 2.5], ml_dtypes.bfloat16), (1, 0, 0.5)),
        (np.array([1, 2], ml_dtypes.float8_e4m3fn), np.array([1, NAN], ml_dtypes.float8_e4m3fn), (1, 1, 0.0)),
    ],
)
def test_values(a: np.ndarray, b: np.ndarray, expected: Any, tmp_path: Path) -> None:
    report = report_of(tmp_path, {"w": a, "same": np.ones(3)}, {"w": b, "same": np.ones(3)})
    if expected is None:
        assert (report.equal, report.n_equal) == (True, 2)
        return
    (found,) = report.differences
    assert (found.key, found.kind, found.shape_a, found.n_elements) == ("w", "values", a.shape, a.size)
    assert (found.n_different, found.n_nan, found.max_abs) == expected
    assert report.n_equal == 1
    assert not report.equal


def test_the_change_of_integers_is_exact(tmp_path: Path) -> None:
    (found,) = report_of(tmp_path, {"w": np.array([2**62 + 1])}, {"w": np.array([2**62])}).differences
    assert (found.norm_change, found.change) == (1.0, 2.0**-62)


def test_other_bits_of_a_nan_are_a_difference_without_a_size(tmp_path: Path) -> None:
    a, b = (np.array([bits], np.uint32).view(np.float32) for bits in (0x7FC00000, 0x7FC00001))
    (found,) = report_of(tmp_path, {"w": a}, {"w": b}).differences
    assert (found.n_different, found.n_nan, found.max_abs) == (1, 0, 0.0)


@pytest.mark.parametrize(("dtype", "bits"), [("F4", 4), ("F6_E2M3", 6)])
def test_packed_elements_are_counted(dtype: str, bits: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    packed = [rng.integers(0, 256, 4000 * bits // 8, np.uint8) for _ in range(2)]
    for name, array in zip("ab", packed, strict=True):
        _core.write_arrays(str(tmp_path / f"{name}.safetensors"), [("w", dtype, (10, 400), array)])
    numbers = [int.from_bytes(array.tobytes(), "little") for array in packed]
    mask = (1 << bits) - 1
    expected = sum((numbers[0] >> i * bits & mask) != (numbers[1] >> i * bits & mask) for i in range(4000))
    for memory in ("256MiB", 64):
        report = reshard.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", memory=memory)
        assert [(one.n_different, one.max_abs) for one in report.differences] == [(expected, None)]


@pytest.mark.parametrize("packed", ["a", "b"])
def test_packed_elements_are_not_compared_with_those_of_another_dtype(packed: str, tmp_path: Path) -> None:
    for name in "ab":
        dtype, array = ("F4", np.zeros(400, np.uint8)) if name == packed else ("F8_E4M3", np.zeros((2, 400), np.uint8))
        _core.write_arrays(str(tmp_path / f"{name}.safetensors"), [("w", dtype, (2, 400), array)])
    (found,) = reshard.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors").differences
    assert (found.kind, found.n_different, found.max_abs) == ("dtype", None, None)


# -- what is there


def test_dtypes_differ_and_values_are_compared_all_the_same(tmp_path: Path) -> None:
    a = np.array([1.0, 0.1, NAN, 2.0], np.float32)
    b = np.array([1.0, 0.1, NAN, NAN], ml_dtypes.bfloat16)
    (found,) = report_of(tmp_path, {"w": a}, {"w": b}).differences
    assert (found.kind, found.dtype_a, found.dtype_b) == ("dtype", "F32", "BF16")
    assert (found.n_different, found.n_nan) == (2, 1)
    assert found.max_abs == float(np.float64(b[1]) - np.float64(a[1]))
    equal = report_of(tmp_path, {"w": np.arange(3, dtype=np.int32)}, {"w": np.arange(3, dtype=np.int64)})
    assert [(one.kind, one.n_different, one.max_abs) for one in equal.differences] == [("dtype", 0, 0.0)]


def test_shapes_and_missing_tensors(tmp_path: Path) -> None:
    a = {"w": np.ones((2, 3)), "x": np.ones(1, np.int8), "z": np.ones(4)}
    b = {"w": np.ones((3, 2)), "y": np.ones(2), "z": np.ones(4)}
    report = report_of(tmp_path, a, b)
    assert report.n_equal == 1
    assert {one.key: one.kind for one in report.differences} == {"w": "shape", "x": "only in a", "y": "only in b"}
    found = {one.key: one for one in report.differences}
    assert (found["w"].shape_a, found["w"].shape_b, found["w"].n_different) == ((2, 3), (3, 2), None)
    assert (found["x"].dtype_a, found["x"].dtype_b, found["x"].n_elements) == ("I8", None, 1)
    assert (found["y"].dtype_a, found["y"].shape_b) == (None, (2,))


def test_formats_and_layouts_do_not_matter(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {
        "w0": rng.random((8, 6)),
        "w1": rng.random((4, 2)).astype(np.float16),
        "b": rng.random(5),
    }
    save_file(arrays, tmp_path / "m.safetensors")
    reshard.convert(tmp_path / "m.safetensors", tmp_path / "tp2", layout=TP2)
    reshard.convert(tmp_path / "tp2", tmp_path / "hf", files={"max_shard_size": 100})
    sides = [tmp_path / "m.safetensors", tmp_path / "tp2", tmp_path / "hf"]
    assert all(reshard.diff(a, b).equal for a in sides for b in sides)
    arrays["w0"][7, 5] += 0.25
    save_file(arrays, tmp_path / "m.safetensors")
    for side in sides[1:]:
        assert [(one.key, one.n_different, one.max_abs) for one in reshard.diff(sides[0], side).differences] == [
            ("w0", 1, 0.25)
        ]


def test_two_iterations_of_the_original(tmp_path: Path) -> None:
    """Against the ground truth that was stored beside the samples."""
    truth = [CKPT2.parent / f"expected_{i:08d}.safetensors" for i in (5, 10)]
    folders = [CKPT2 / f"iteration_{i:08d}" for i in (5, 10)]
    found, expected = reshard.diff(*folders), reshard.diff(*truth)
    measured = [
        {one.key: (one.n_different, one.max_abs) for one in report.differences if one.key != "global_step"}
        for report in (found, expected)
    ]
    assert measured[0] == measured[1] != {}
    assert [one.key for one in reshard.diff(folders[0], truth[0]).differences] == ["global_step"]


def test_part(tmp_path: Path) -> None:
    reshard.convert(CKPT2, tmp_path / "hf")
    assert reshard.diff(CKPT2, tmp_path / "hf", part="model").equal
    report = reshard.diff(CKPT2, tmp_path / "hf")
    assert {one.kind for one in report.differences} == {"only in a"}
    with pytest.raises(ArgumentError, match="part"):
        reshard.diff(CKPT2, CKPT2, part="other")  # type: ignore[arg-type]
    with pytest.raises(CheckpointNotFoundError):
        reshard.diff(CKPT2, tmp_path / "nothing")


# -- memory


@settings(max_examples=200)
@given(
    shape=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    max_elements=st.integers(1, 100),
    bits=st.sampled_from([4, 6, 8, 32]),
)
def test_regions_make_up_the_tensor(shape: tuple[int, ...], max_elements: int, bits: int) -> None:
    if math.prod(shape) * bits % 8:
        return
    seen = np.zeros(shape, int)
    for offset, extent in regions(shape, max_elements, bits):
        seen[tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))] += 1
        assert math.prod(extent) * bits % 8 == 0
        assert math.prod(extent) <= max_elements or bits < 8
    assert (seen == 1).all()


@pytest.mark.parametrize("memory", [1, 100, 5000, "1MiB"])
def test_a_small_budget_finds_the_same(memory: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    a: dict[str, np.ndarray] = {
        "w": rng.random((7, 5, 3)),
        "v": rng.random(1000).astype(np.float32),
        "u": np.array(1.0),
    }
    b = {key: array.copy() for key, array in a.items()}
    b["w"][::2, 1] += 1
    b["v"][[0, 999]] = [NAN, 5]
    told: list[tuple[int, int]] = []
    report = report_of(tmp_path, a, b, memory=memory, progress=lambda done, total: told.append((done, total)))
    found = {one.key: (one.n_different, one.n_nan, one.max_abs) for one in report.differences}
    assert found == {
        "w": (12, 0, float(np.abs(a["w"] - b["w"]).max())),
        "v": (2, 1, float(5 - np.float64(a["v"][999]))),
    }
    assert told[-1] == (report.n_bytes, report.n_bytes) == (2 * sum(array.nbytes for array in a.values()),) * 2
    assert told == sorted(told)


# -- the command


def test_the_command(tmp_path: Path) -> None:
    save_file({"w": np.zeros(4), "same": np.ones(2)}, tmp_path / "a.safetensors")
    save_file({"w": np.array([0, INF, 0, 0]), "same": np.ones(2), "x\u202e": np.ones(1)}, tmp_path / "b.safetensors")
    a, b = str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")
    equal = CliRunner().invoke(main, ["diff", a, a])
    assert (equal.exit_code, "2 tensors are equal, 0 differ" in equal.stdout) == (0, True)
    different = CliRunner().invoke(main, ["diff", a, b])
    assert different.exit_code == 1
    assert "1 of 4" in different.stdout
    assert "x\\u202e" in different.stdout
    told = json.loads(CliRunner().invoke(main, ["diff", a, b, "--json"]).stdout, parse_constant=pytest.fail)
    assert (told["equal"], told["n_equal"], told["differences"][0]["max_abs"]) == (False, 1, "inf")
    assert told["differences"][1]["kind"] == "only in b"
    nothing = CliRunner().invoke(main, ["diff", a, str(tmp_path / "nothing")])
    assert (nothing.exit_code, "there is nothing" in nothing.stderr) == (2, True)  # not as "different"


# -- norms, relative change, tolerance


FLOATS = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)
SPECIAL = (0.0, -0.0, 1.0, -3.0, NAN, INF, -INF, 1e-6, 100.0)


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@pytest.mark.parametrize("seed", range(40))
def test_norms_and_tolerance_are_those_of_numpy(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    dtype_a, dtype_b = (FLOATS[i] for i in rng.integers(0, len(FLOATS), 2))
    n = int(rng.integers(1, 300 if seed % 5 else 30_000))  # blocks of many are compared by the core
    values = rng.normal(size=n) if seed % 4 else rng.choice(SPECIAL, n)
    a = values.astype(dtype_a)
    b = np.where(rng.random(n) < 0.5, values, values * (1 + 0.01 * rng.normal(size=n))).astype(dtype_b)
    atol, rtol = rng.choice([0, 1e-3, 0.1], 2)
    report = report_of(
        tmp_path, {"w": a}, {"w": b}, atol=atol, rtol=rtol, memory=int(rng.integers(1, 4000)) if n < 300 else "1MiB"
    )
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        distance = np.abs(x - y)
        allowed = atol + rtol * np.maximum(np.abs(x), np.abs(y))
    finite_x, finite_y = np.isfinite(x), np.isfinite(y)
    is_close = (x == y) | (np.isnan(x) & np.isnan(y)) | (finite_x & finite_y & (distance <= allowed))
    assert report.close == bool(is_close.all())
    if report.equal:
        assert x.tobytes() == y.tobytes()
        return
    (found,) = report.differences
    assert found.n_outside == np.count_nonzero(~is_close)
    norms = [float(np.linalg.norm(one)) for one in (x[finite_x], y[finite_y], distance[finite_x & finite_y])]
    assert [found.norm_a, found.norm_b, found.norm_change] == pytest.approx(norms, rel=1e-12)
    if found.n_nan or found.max_abs == INF:
        assert found.change == INF
    elif norms[0]:
        assert found.change == pytest.approx(norms[2] / norms[0], rel=1e-12)


@pytest.mark.parametrize("dtypes", [(one, other) for one in FLOATS[:4] for other in FLOATS[:4]])
def test_values_that_are_not_finite_among_many(dtypes: Any, tmp_path: Path) -> None:
    """The first and the last values are in blocks of their own."""
    a, b = (np.ones(9000).astype(dtype) for dtype in dtypes)
    a[:3], b[:3] = (NAN, INF, -INF), (NAN, INF, INF)
    a[4500], b[4500] = 1, 3
    a[-2:], b[-2:] = (0.0, NAN), (-0.0, 1)
    (found,) = report_of(tmp_path, {"w": a}, {"w": b}, atol=1).differences
    is_same = dtypes[0] == dtypes[1]
    assert (found.n_different, found.n_nan, found.n_outside) == (4 if is_same else 3, 1, 3)
    assert (found.max_abs, found.norm_change) == (INF, 2.0)
    assert found.norm_a == pytest.approx(math.sqrt(9000 - 5))
    assert found.norm_b == pytest.approx(math.sqrt(9000 - 5 + 9))


def test_a_rounded_export_is_within_the_tolerance_of_its_dtype(tmp_path: Path) -> None:
    w = np.random.default_rng(0).normal(size=20_000).astype(np.float32)
    for dtype, rtol, atol in ((ml_dtypes.bfloat16, 2**-8, 0.0), (np.float16, 2**-11, 2**-25)):
        rounded = w.astype(dtype)
        assert report_of(tmp_path, {"w": w}, {"w": rounded}, rtol=rtol, atol=atol).close
        rounded[7] *= 1.02
        report = report_of(tmp_path, {"w": w}, {"w": rounded}, rtol=rtol, atol=atol)
        assert (report.close, report.differences[0].n_outside) == (False, 1)


def test_what_no_tolerance_accepts(tmp_path: Path) -> None:
    pairs = {
        "missing": (np.ones(2), None),
        "shape": (np.ones(2), np.ones(3)),
        "nan": (np.array([NAN]), np.array([1.0])),
        "inf": (np.array([INF]), np.array([1e300])),
        "signs": (np.array([INF]), np.array([-INF])),
    }
    for name, (a, b) in pairs.items():
        other = {"same": np.ones(1)} | ({} if b is None else {"w": b})
        report = report_of(tmp_path, {"same": np.ones(1), "w": a}, other, atol=1e308, rtol=1e308)
        assert not report.close, name
    whole = report_of(tmp_path, {"w": np.array([2**63], np.uint64)}, {"w": np.array([2**63 - 1])}, atol=1)
    assert (whole.close, whole.differences[0].max_abs) == (True, 1.0)
    assert not report_of(tmp_path, {"w": np.array([2**63], np.uint64)}, {"w": np.array([2**63 - 2])}, atol=1).close
    for bad in ({"atol": -1}, {"rtol": NAN}, {"rtol": "1"}, {"atol": INF}, {"atol": True}, {"sort": "size"}):
        with pytest.raises(ArgumentError, match=next(iter(bad))):
            report_of(tmp_path, {"w": np.ones(1)}, {"w": np.ones(1)}, **bad)


def test_sorted_by_relative_change(tmp_path: Path) -> None:
    a = {"small": np.ones(4), "large": np.full(4, 100.0), "gone": np.ones(1), "zero": np.zeros(2), "same": np.ones(2)}
    b = {"small": np.full(4, 1.5), "large": np.full(4, 101.0), "zero": np.ones(2), "same": np.ones(2)}
    report = report_of(tmp_path, a, b, sort="change")
    assert [(one.key, one.change) for one in report.differences] == [
        ("gone", None),
        ("zero", INF),
        ("small", 0.5),
        ("large", pytest.approx(0.01)),
    ]
    assert [one.key for one in report_of(tmp_path, a, b).differences] == [key for key in sorted(a) if key != "same"]


def test_the_command_with_a_tolerance(tmp_path: Path) -> None:
    w = np.linspace(-1, 1, 100, dtype=np.float32)
    save_file({"w": w, "v": w}, tmp_path / "a.safetensors")
    save_file({"w": w.astype(ml_dtypes.bfloat16), "v": w}, tmp_path / "b.safetensors")
    a, b = str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")
    within = CliRunner().invoke(main, ["diff", a, b, "--rtol", "0.00390625"])
    assert (within.exit_code, within.stdout.splitlines()[2:]) == (
        0,
        ["1 tensors are equal, 1 within the tolerance, 0 differ, 1.37 KiB compared"],
    )
    outside = CliRunner().invoke(main, ["diff", a, b, "--atol", "1e-9", "--sort", "change"])
    assert outside.exit_code == 1
    assert "outside" in outside.stdout
    told = json.loads(CliRunner().invoke(main, ["diff", a, b, "--rtol", "0.1", "--json"]).stdout)
    assert (told["equal"], told["close"], told["differences"][0]["n_outside"]) == (False, True, 0)
    assert CliRunner().invoke(main, ["diff", a, b, "--rtol", "-1"]).exit_code == 2


@pytest.mark.slow(disk=False)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_small_tensors_that_are_compared_at_once_give_what_each_gives_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtypes = [np.float32, np.float64, ml_dtypes.bfloat16, np.complex64, np.int64, np.uint64, np.uint8, np.bool_]
    special = [0.0, -0.0, 1.0, 1.0 + 1e-3, 300.0, NAN, INF, -INF]

    def arrays() -> dict[str, Any]:
        found = {}
        for i in range(60):
            dtype = dtypes[i // 4 % len(dtypes)]
            shape = [(), (1,), (3, 5), (40,), (0, 2)][i % 5]
            is_real = np.dtype(dtype).kind not in "iub"
            values = rng.choice(special if is_real else special[:5], size=shape, p=None)
            found[f"w{i}"] = np.abs(values).astype(dtype) if not is_real else np.asarray(values).astype(dtype)
        return found

    a, b = arrays(), arrays()
    b |= {key: a[key] for key in list(a)[::7]}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        together = report_of(Path(folder), a, b, rtol=0.01, atol=1e-4)
        patch.setattr(verbs_diff, "_SMALL_BYTES", -1)
        alone = report_of(Path(folder), a, b, rtol=0.01, atol=1e-4)
    assert len(together.differences) > 20
    assert together.n_equal == alone.n_equal
    for one, other in zip(together.differences, alone.differences, strict=True):
        x, y = dataclasses.asdict(one), dataclasses.asdict(other)
        for name in ("norm_a", "norm_b", "norm_change", "change"):  # sums in another order
            assert x.pop(name) == pytest.approx(y.pop(name), rel=1e-12)
        assert x == y


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1))
def test_batches_that_are_equal_are_passed_over_and_no_others(seed: int) -> None:
    """Both sides with other neighbours and dtypes, so that the bytes between the tensors differ."""
    random = np.random.default_rng(seed)
    kinds = [np.dtype(name) for name in ("u1", "f2", "f4", "c8")]

    def new() -> np.ndarray:
        return random.integers(0, 3, random.integers(0, 20)).astype(kinds[random.integers(len(kinds))])

    a = {f"t{i:02}": new() for i in range(random.integers(1, 40))}
    b = {key: array.copy() for key, array in a.items() if random.random() > 0.1} | {"other": new()}
    changed = [key for key, array in b.items() if key in a and array.size and random.random() < 0.1]
    for key in changed:
        b[key][random.integers(b[key].size)] += 1
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(verbs_diff, "_MANY", int(random.integers(1, 10)))
        for name, arrays in (("a", a), ("b", dict(reversed(b.items())))):
            reshard.save_file(arrays, f"{folder}/{name}.safetensors")
        with (
            reshard.open(f"{folder}/a.safetensors") as left,
            reshard.open(f"{folder}/b.safetensors") as right,
        ):
            found = verbs_diff.diff_opened(left, right, max_bytes=int(random.integers(1, 4000)))
    expected = {*changed, *(a.keys() ^ b.keys())}
    assert {one.key for one in found.differences} == expected
    assert found.n_equal == len(a.keys() - expected)
    assert all(one.n_different == 1 for one in found.differences if one.kind == "values")
