"""`save_file`: the `safetensors` package opens what we wrote, and finds the same in it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import reshard
import reshard.torch
from reshard import dtypes
from reshard.errors import ArgumentError, ReshardError, UnsupportedError
from reshard.interop import load_file, safe_open, save_file

if TYPE_CHECKING:
    from pathlib import Path

stock_open: Any = safetensors.safe_open  # its methods have no types
pytestmark = pytest.mark.disk

NUMPY_DTYPES = [dtypes.numpy_dtype(name) for name in dtypes.NAMES if not dtypes.is_packed(name)]


def raw(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        plain = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
        raw_bytes = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    else:
        raw_bytes = bytes(value.tobytes())
    return raw_bytes


def sample(dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Any bit pattern: NaN payloads and negative zeros are data too."""
    data = np.random.default_rng(3).integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
    return (data % 2 if dtype == np.bool_ else data).view(dtype).reshape(shape)


def check(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write them; stock and we find the same bits."""
    save_file(arrays, path)
    stock = safetensors.torch.load_file(path)
    ours = load_file(path)
    assert sorted(stock) == sorted(ours) == sorted(arrays)
    for key, array in arrays.items():
        assert tuple(stock[key].shape) == ours[key].shape == array.shape
        assert stock[key].dtype == getattr(torch, array.dtype.name)
        assert ours[key].dtype == array.dtype
        assert raw(stock[key]) == raw(ours[key]) == array.tobytes()


@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (4, 6)])
def test_all_dtypes_and_shapes(tmp_path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    check(tmp_path / "x.safetensors", {"x": sample(dtype, shape), "y": sample(dtype, (3,))})


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float8_e4m3fn", "float32", "complex64", "int64"])
@pytest.mark.parametrize(
    "view",
    [
        lambda a: a.T,
        lambda a: a.transpose(1, 2, 0),
        lambda a: a[::2, :, 1:4:2],
        lambda a: a[::-1, :, ::-1],
        lambda a: np.broadcast_to(a[:1], (3, *a.shape[1:])),
        lambda a: a[1, 2:3, 1],
        lambda a: a[:0, ::2],
        np.asfortranarray,
    ],
    ids=["T", "transpose", "steps", "backward", "broadcast", "row", "empty", "fortran"],
)
def test_strided_arrays(tmp_path: Path, dtype: str, view: Any) -> None:
    check(tmp_path / "x.safetensors", {"x": view(sample(np.dtype(dtype), (4, 5, 6)))})


@settings(max_examples=50)
@given(st.data())
def test_any_view_of_any_array(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(NUMPY_DTYPES))
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=6))
    array = sample(dtype, shape)
    array = array.transpose(data.draw(st.permutations(range(array.ndim))))
    index = data.draw(hnp.basic_indices(array.shape, allow_ellipsis=False))
    array = array[(*index, ...) if isinstance(index, tuple) else (index, ...)]
    check(tmp_path_factory.mktemp("view") / "x.safetensors", {"x": array, "first": sample(np.dtype("i2"), (3,))})


def test_order_is_that_of_safetensors(tmp_path: Path) -> None:
    names = ["b10", "b2", "a", "z", "ü", "A"]
    arrays = {f"{name}.{dtype}": np.ones(3, dtype) for name in names for dtype in ("f4", "i1", "f8", "f2")}
    save_file(arrays, tmp_path / "ours.safetensors")
    safetensors.numpy.save_file(arrays, tmp_path / "stock.safetensors")
    orders = [stock_open(tmp_path / f"{name}.safetensors", "np").offset_keys() for name in ("ours", "stock")]
    assert orders[0] == orders[1]


def test_metadata(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for metadata in ({"format": "pt", "ü": "ü\n"}, None):
        save_file({"x": np.zeros(3)}, path, metadata)
        assert stock_open(path, "np").metadata() == safe_open(path, "np").metadata() == metadata


def test_no_tensors_at_all(tmp_path: Path) -> None:
    check(tmp_path / "x.safetensors", {})


@pytest.mark.parametrize("key", ["a/b", "é", " ", "x" * 1024])
def test_odd_keys(tmp_path: Path, key: str) -> None:
    check(tmp_path / "x.safetensors", {key: np.arange(3)})


@pytest.mark.parametrize("key", ["", "a\tb", "x" * 1025])
def test_keys_that_no_reader_of_ours_accepts_are_not_written(tmp_path: Path, key: str) -> None:
    with pytest.raises(ArgumentError):
        save_file({key: np.arange(3)}, tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


def test_foreign_byte_order_is_turned(tmp_path: Path) -> None:
    array = np.arange(6, dtype=">f4").reshape(2, 3)
    save_file({"x": array, "y": array.T}, tmp_path / "x.safetensors")
    stock = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    assert stock["x"].tolist() == array.tolist()
    assert stock["y"].tolist() == array.T.tolist()


def test_torch_tensors(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    tensors: dict[str, Any] = {
        "whole": whole,
        "transposed": whole.T,
        "part": whole[1:3, ::2],
        "alias": whole,
        "expanded": torch.ones(3).expand(2, 3),
        "parameter": torch.nn.Parameter(whole.to(torch.bfloat16)),
        "conjugated": torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3, dtype=torch.float8_e5m2),
        "packed": torch.arange(8, dtype=torch.uint8).reshape(2, 4).view(torch.float4_e2m1fn_x2),
        "numpy": np.arange(3),
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path)
    stock = safetensors.torch.load_file(path)
    ours = load_file(path, "pt")
    for key, tensor in tensors.items():
        expected = torch.from_numpy(tensor) if isinstance(tensor, np.ndarray) else tensor.detach().resolve_conj()
        for got in (stock[key], ours[key]):
            assert (got.dtype, got.shape, raw(got)) == (expected.dtype, expected.shape, raw(expected))
    assert safe_open(path, "np").get_slice("packed").get_shape() == [2, 8]


@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=str)
def test_what_safetensors_wrote(tmp_path: Path, dtype: np.dtype[Any]) -> None:
    path = tmp_path / "x.safetensors"
    arrays = {"x": sample(dtype, (4, 6)), "scalar": sample(dtype, ()), "empty": sample(dtype, (0, 2))}
    safetensors.numpy.save_file(arrays, path, {"a": "b"})
    got = load_file(path)
    assert sorted(got) == sorted(arrays)
    for key, array in arrays.items():
        assert (got[key].dtype, got[key].shape, got[key].tobytes()) == (dtype, array.shape, array.tobytes())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros(2, object), "object"),
        (np.zeros(2, "S3"), r"\|S3"),
        (np.zeros(2, np.complex128), "complex128"),
        (np.zeros(2, "M8[s]"), "datetime64"),
        (np.zeros(2, ml_dtypes.int4), "int4"),
        (np.zeros(2, ml_dtypes.float8_e4m3), "float8_e4m3"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "meta"),
        (3.0, "found float"),
        ([1, 2], "found list"),
        (None, "found NoneType"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_that_are_refused(tmp_path: Path, value: Any, message: str) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(Exception):  # noqa: B017, PT011 - any refusal of theirs
        (safetensors.torch if isinstance(value, torch.Tensor) else safetensors.numpy).save_file({"k": value}, path)
    with pytest.raises((UnsupportedError, ArgumentError), match=f"saving `k`: .*{message}") as caught:
        save_file({"k": value}, path)
    assert caught.value.key == "k"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ([("x", np.zeros(2))], None, "expected a mapping"),
        ({1: np.zeros(2)}, None, "key of a tensor must be text, found int"),
        ({"\ud800": np.zeros(2)}, None, "cannot be encoded as UTF-8"),
        ({"__metadata__": np.zeros(2)}, None, "__metadata__"),
        ({"x": np.zeros(2)}, {"a": 1}, "a value of `metadata` must be text, found int"),
        ({"x": np.zeros(2)}, {1: "a"}, "a key of `metadata` must be text, found int"),
        ({"x": np.zeros(2)}, {"a": None}, "found NoneType"),
    ],
)
def test_keys_and_metadata_that_are_refused(tmp_path: Path, tensors: Any, metadata: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        save_file(tensors, tmp_path / "x.safetensors", metadata)
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path / "no folder" / "x.safetensors", tmp_path):
        with pytest.raises(ReshardError) as caught:
            save_file({"x": np.zeros(2)}, path)
        assert isinstance(caught.value, OSError)
    assert list(tmp_path.iterdir()) == []


def test_a_device_or_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    for save, value in ((save_file, np.zeros(2)), (reshard.torch.save_file, torch.zeros(2))):
        with pytest.raises(reshard.errors.StorageError, match=r"pipe` is a pipe, a socket or a device"):
            save({"x": value}, path)  # type: ignore[dict-item]
        assert path.is_fifo()


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"x": np.arange(1000)}, path)
    with safe_open(path, "np") as f:
        before = f.get_tensor("x")
        save_file({"x": np.arange(3)}, path)
        # Who has the old file open keeps it.
        np.testing.assert_array_equal(f.get_tensor("x"), before)
    assert load_file(path)["x"].tolist() == [0, 1, 2]
    assert list(tmp_path.iterdir()) == [path]


def test_files_of_other_writers_stay(tmp_path: Path) -> None:
    # A process in another container, on the same file system, has the same process id and counts in the same way.
    others = [tmp_path / f".x.safetensors.{os.getpid()}-{n}.tmp" for n in range(2000)]
    for other in others:
        other.touch()
    save_file({"x": np.arange(3)}, tmp_path / "x.safetensors")
    assert all(other.exists() for other in others)


@pytest.mark.parametrize("letter", ["x", "é", "界"])
def test_names_as_long_as_the_file_system_permits(tmp_path: Path, letter: str) -> None:
    path = tmp_path / (letter * ((255 - len(".safetensors")) // len(letter.encode())) + ".safetensors")
    save_file({"x": np.arange(3)}, path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_tensors_can_be_resized_afterwards(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"x": torch.ones(4, 6, dtype=dtype), "column": torch.ones(4, 6, dtype=dtype)[:, 1:3]}
    save_file(tensors, tmp_path / "x.safetensors")
    reshard.save(tmp_path / "root", 1, tensors, extra={"tensor": (extra := torch.ones(3))})
    for tensor in (*tensors.values(), extra):
        tensor.untyped_storage().resize_(0)


def test_the_mode_is_that_of_any_new_file(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    save_file({"x": np.arange(3)}, tmp_path / "x.safetensors")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_what_is_saved_is_not_changed(tmp_path: Path) -> None:
    array = np.arange(6.0)
    array.flags.writeable = False
    save_file({"x": array[::2]}, tmp_path / "x.safetensors")
    assert array.tolist() == [0, 1, 2, 3, 4, 5]


def test_numpy_alone_does_not_import_torch(tmp_path: Path) -> None:
    code = (
        "import sys, numpy as np; from reshard.interop import load_file, save_file; p = sys.argv[1] + '/x.safetensors';"
        "save_file({'x': np.arange(3)}, p); load_file(p); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0


@pytest.mark.gpu
def test_tensors_of_a_gpu(tmp_path: Path) -> None:
    tensor = torch.arange(24.0, device="cuda").reshape(4, 6).T
    save_file({"x": tensor}, tmp_path / "x.safetensors")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "x.safetensors")["x"], tensor.cpu())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused(tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(UnsupportedError, match="nested"):
        save_file({"x": nested}, tmp_path / "x.safetensors")


def test_a_masked_array_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="mask"):
        save_file({"x": np.ma.masked_array([1.0, 2.0], [False, True])}, tmp_path / "x.safetensors")
