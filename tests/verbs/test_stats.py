"""Statistics of tensors, compared with those of numpy."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy
from tests.helpers.command_line import run

import reshard
from reshard.errors import DamagedFileError, KeyNotFoundError
from reshard.quantised.kinds import KINDS
from reshard.verbs import slices
from reshard.verbs.stats import TensorStats, stats

if TYPE_CHECKING:
    from pathlib import Path

RNG = np.random.default_rng(1)
DTYPES: list[Any] = [
    *(np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    *(np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint64, np.bool_, np.complex64),
]


def expected(key: str, dtype: str, array: np.ndarray) -> TensorStats:
    """By numpy, all at once."""
    parts = array.view(np.float32) if array.dtype == np.complex64 else array
    with np.errstate(invalid="ignore"):
        wide = parts.astype(np.longdouble if parts.dtype.kind in "iuf" else np.float64)
    finite = wide[np.isfinite(wide)]
    n_nan = int(np.isnan(wide).sum())
    counts = parts.size, n_nan, wide.size - finite.size - n_nan, int((wide == 0).sum())
    if not finite.size:
        return TensorStats(key, dtype, array.shape, *counts)
    kind = int if parts.dtype.kind in "iub" else float
    mean = finite.mean()
    std, rms = np.sqrt(((finite - mean) ** 2).mean()), np.sqrt((finite**2).mean())
    bounds = kind(finite.min()), kind(finite.max())
    return TensorStats(key, dtype, array.shape, *counts, *bounds, float(mean), float(std), float(rms))


def assert_same(found: TensorStats, wanted: TensorStats) -> None:
    rounded: dict[str, Any] = {"mean": None, "std": None, "rms": None}
    assert dataclasses.replace(found, **rounded) == dataclasses.replace(wanted, **rounded)
    scale = wanted.rms or 0.0
    assert (found.rms is None) == (wanted.rms is None)
    for name in rounded if wanted.rms is not None else ():
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-13, abs=1e-13 * scale), name


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda one: np.dtype(one).name)
def test_they_are_those_of_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    monkeypatch.setattr(slices, "_BUFFER_BYTES", 1 << 16)  # a tensor has several regions, and several blocks
    bits = RNG.integers(0, 256, 150_000 * np.dtype(dtype).itemsize, np.uint8)
    if dtype is np.bool_:
        bits &= 1
    whole = bits.view(dtype).reshape(300, 500).copy()
    arrays = {"all": whole, "none": np.zeros((0, 3), dtype)}
    if np.dtype(dtype).kind in "fV":
        arrays["far"] = (RNG.standard_normal(70_001) / 8 + 16).astype(dtype)  # the deviation is small beside the mean
    reshard.save_file(arrays, tmp_path / "a.safetensors")
    found = {one.key: one for one in stats(tmp_path / "a.safetensors").tensors}
    with reshard.open(tmp_path / "a.safetensors") as opened:
        assert list(found) == opened.keys()
        for key, array in arrays.items():
            assert_same(found[key], expected(key, opened[key].dtype, array))


@settings(deadline=None, max_examples=60)
@given(array=of_numpy.arrays(np.float32, st.integers(0, 20), elements=st.floats(width=32)), cut=st.integers(1, 7))
def test_blocks_of_any_size_have_the_same_sums(
    array: np.ndarray, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("blocks") / "a.safetensors"
    reshard.save_file({"w": array}, path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("reshard.verbs.stats._BLOCK_ELEMENTS", cut)
        (found,) = stats(path).tensors
    wanted = expected("w", "F32", array)
    assert_same(found, wanted)


def test_the_largest_doubles_have_a_mean(tmp_path: Path) -> None:
    largest = np.finfo(np.float64).max
    reshard.save_file({"w": np.full(4, largest)}, tmp_path / "a.safetensors")
    (found,) = stats(tmp_path / "a.safetensors").tensors
    assert (found.min, found.mean, found.std, found.rms) == (largest, largest, 0.0, largest)


@pytest.mark.parametrize("cut", [1, 2, 8])
def test_the_largest_doubles_of_both_signs_have_all_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    monkeypatch.setattr("reshard.verbs.stats._BLOCK_ELEMENTS", cut)
    largest = np.finfo(np.float64).max
    array = np.array([1.0, 3.0, largest, -largest, 0.0, largest, -largest, -largest])
    reshard.save_file({"w": array}, tmp_path / "a.safetensors")
    (found,) = stats(tmp_path / "a.safetensors").tensors
    assert_same(found, expected("w", "F64", array))
    shown = run("inspect", tmp_path / "a.safetensors", "--stats", "--json").stdout
    constants: list[str] = []
    json.loads(shown, parse_constant=constants.append)
    assert constants == []


def test_each_element_counts_once_in_any_layout(tmp_path: Path) -> None:
    arrays: dict[str, np.ndarray] = {"w": RNG.standard_normal((8, 6)).astype(np.float32), "b": np.arange(5)}
    reshard.save_file(arrays, tmp_path / "a.safetensors")
    layout = {"mesh": {"tp": 2, "dp": 2}, "rules": [{"match": "w", "cut": [None, "tp"]}, {"match": "*"}]}
    reshard.convert(tmp_path / "a.safetensors", tmp_path / "run", layout=layout, iteration=3)
    whole, cut = stats(tmp_path / "a.safetensors"), stats(tmp_path / "run")
    assert sorted(map(str, cut.tensors)) == sorted(map(str, whole.tensors))
    assert (cut.iteration, cut.n_bytes) == (3, whole.n_bytes)


def test_a_quantised_weight_is_one_tensor_of_its_values(tmp_path: Path) -> None:
    codes = RNG.standard_normal((256, 128)).astype(ml_dtypes.float8_e4m3fn)
    scales = np.array([[0.5], [4.0]], np.float32)
    arrays = {"a.weight": codes, "a.weight_scale_inv": scales, "b": np.arange(3.0)}
    reshard.save_file(arrays, tmp_path / "a.safetensors")
    values = codes.astype(np.float32) * np.repeat(scales, 128, axis=0)
    found = {one.key: one for one in stats(tmp_path / "a.safetensors").tensors}
    assert set(found) == {"a.weight", "b"}
    wanted = replace(expected("a.weight", "F32", values), quantised="fp8-block")
    assert_same(found["a.weight"], wanted)
    assert stats(tmp_path / "a.safetensors").n_bytes == codes.nbytes + scales.nbytes + 24
    assert KINDS["fp8-block"].title in run("inspect", tmp_path / "a.safetensors", "--stats").stdout


def test_damage_is_found_where_it_is_read(tmp_path: Path) -> None:
    reshard.save(tmp_path / "run", 1, {"w": np.arange(6.0), "b": np.ones(3)})
    (file,) = (tmp_path / "run").glob("*/model*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.chmod(0o600)
    file.write_bytes(content)
    with pytest.raises(DamagedFileError, match=str(file)):
        stats(file.parent)


def test_a_pattern_selects_and_no_match_is_an_error(tmp_path: Path) -> None:
    reshard.save_file({"a.w": np.ones(2), "b.w": np.ones(2), "c": np.ones(2)}, tmp_path / "a.safetensors")
    assert [one.key for one in stats(tmp_path / "a.safetensors", "*.w").tensors] == ["a.w", "b.w"]
    with pytest.raises(KeyNotFoundError, match="no key matches x") as caught:
        stats(tmp_path / "a.safetensors", "x")
    assert caught.value.hint == "a pattern matches whole keys: try '*x*'"


def test_the_command_prints_a_line_for_each_tensor(tmp_path: Path) -> None:
    values = np.array([[0, -2.5, np.nan], [np.inf, 1e9, 0]], np.float32)
    reshard.save_file({"w": values, "i": np.array([-3, 2**62]), "e": np.zeros(0)}, tmp_path / "a.safetensors")
    text = run("inspect", tmp_path / "a.safetensors", "--stats").stdout
    lines = {line.split()[0]: line.split() for line in text.splitlines()[3:]}
    assert lines["w"] == ["w", "F32", "2", "x", "3", "-2.5", "1e+09", "2.5e+08", "4.33013e+08", "33.33%", "1", "1"]
    assert lines["i"][3:5] == ["-3", str(2**62)]
    assert lines["e"] == ["e", "F64", "0"]
    found = json.loads(run("inspect", tmp_path / "a.safetensors", "w", "--stats", "--json").stdout)
    assert list(found["tensors"]) == ["w"]
    assert found["tensors"]["w"]["n_nan"] == found["tensors"]["w"]["n_infinite"] == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--stats", "--html", "x.html"], "--stats prints statistics alone"),
        (["--stats", "--layout"], "--stats prints statistics alone"),
        (["--on", "ray"], "--on and --threads are for --stats"),
        (["--threads", "2"], "--on and --threads are for --stats"),
        (["", "--stats"], "PATTERN"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path: Path, words: list[str], told: str) -> None:
    reshard.save_file({"w": np.ones(2)}, tmp_path / "a.safetensors")
    done = run("inspect", tmp_path / "a.safetensors", *words)
    assert done.exit_code == 2
    assert told in done.stderr
