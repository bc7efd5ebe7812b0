"""`safe_open` and `load_file`, compared with the `safetensors` package: the same results, or both refuse."""

from __future__ import annotations

import json
import struct
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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

from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    DamagedFileError,
    KeyNotFoundError,
    ReshardError,
    UnsupportedError,
)
from reshard.interop import SafeOpen, load_file, safe_open
from reshard.values.indexing import TensorIndexError

if TYPE_CHECKING:
    from collections.abc import Callable

TENSORS: dict[str, Any] = {
    "cube": np.arange(120, dtype=np.float32).reshape(4, 6, 5),
    "line": np.arange(10, dtype=np.int64),
    "scalar": np.array(3.5),
    "empty": np.zeros((0, 3), np.float16),
    "bool": np.array([True, False, True]),
    "half": np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16),
}
# For numpy, `safetensors` has no name for the 8-bit floats.
TORCH_TENSORS = {
    name: torch.arange(6).reshape(2, 3).to(dtype)
    for name, dtype in (
        ("e4m3", torch.float8_e4m3fn),
        ("e5m2", torch.float8_e5m2),
        ("e4m3fnuz", torch.float8_e4m3fnuz),
        ("e5m2fnuz", torch.float8_e5m2fnuz),
        ("bf16", torch.bfloat16),
        ("u16", torch.uint16),
        ("c64", torch.complex64),
    )
}
FRAMEWORKS = ["np", "pt"]
stock_open: Any = safetensors.safe_open  # its methods have no types


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stock") / "stock.safetensors"
    safetensors.numpy.save_file(TENSORS, path, metadata={"format": "np", "a": "b"})
    return path


@pytest.fixture(scope="module")
def torch_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stock") / "stock.safetensors"
    safetensors.torch.save_file(TORCH_TENSORS, path)
    return path


class Seen(NamedTuple):
    """All that one can see of a result."""

    kind: type
    dtype: str
    shape: tuple[int, ...]
    raw: bytes


def seen(value: Any) -> Seen:
    if isinstance(value, torch.Tensor):
        plain = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
        raw_bytes = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    else:
        raw_bytes = bytes(value.tobytes())
    return Seen(type(value), str(value.dtype), tuple(value.shape), raw_bytes)


class _Brackets:
    def __getitem__(self, index: Any) -> Any:
        return index


def brackets(text: str) -> Any:
    """The index that stands between brackets in Python."""
    return eval(f"at[{text}]", {"at": _Brackets(), "np": np, "torch": torch})


INDICES = """
    0 | -1 | 3 | 4 | -4 | -5 | : | ... | () | 2:2 | 0:0 | 1:3 | ::2 | 1::3 | ::9 | :4 | 3: | -1, -1, -1
    ..., 1 | 1, ... | 0, ..., 0 | ..., 0:2 | 0, 0, 0, ... | 0, ..., 0, 0 | 1, 2, 3 | 0, :, 0 | 1, ::3 | ..., ::2
    1:3, 2:4, ::2 | 1:3, 2:4, 1:5:3 | np.int64(1) | np.int64(1):np.int64(3) | torch.tensor(1) | np.array(1) | [] | True
    False | ::np.int64(2) | 0:4:3, 5 | 1:2
    0, 0, 0, 0 | :, :, :, : | 0, ..., 0, 0, 0 | ::-1 | ::0 | 0:4:-1 | ..., ... | None | None, 0 | 0, None, 1
    0:100 | 100: | 100:200 | [0, 1] | 0, [0, 1] | [0, 1], [0, 1] | [0, -1] | [0, 9] | (0, 1), | np.array([0, 1])
    torch.tensor([0, 1]) | [True, False, True, False] | np.array([True, False, True, False]) | 1.5 | 1.0:2.0
    "a" | 2**70 | range(2) | [2] | [1, 1] | :, [0, 2] | 0, :, [0, 2]
    torch.tensor(1.5) | torch.tensor([1]) | torch.tensor(True)
    4:5 | (), | ..., []
    [], 0 | -2**70
"""


@pytest.mark.parametrize("text", [text.strip() for text in INDICES.replace("\n", "|").split("|") if text.strip()])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_slices_are_those_of_safetensors(file: Path, framework: Any, text: str) -> None:
    for name in ("cube", "line", "scalar"):
        stock = stock_open(file, framework).get_slice(name)
        ours = safe_open(file, framework).get_slice(name)
        try:
            expected = seen(stock[brackets(text)])
        except Exception:  # noqa: BLE001 - any refusal of theirs
            with pytest.raises(TensorIndexError):
                ours[brackets(text)]
        else:
            assert seen(ours[brackets(text)]) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cube", "-2:"),
        ("cube", ":-1"),
        ("cube", "-4:-1, ..., -2:"),
        ("cube", "3:1"),
        ("cube", "4:"),
        ("cube", "4:4"),
        ("empty", ":"),
        ("empty", "..."),
        ("empty", "0:0, 1:"),
    ],
)
def test_numpy_slices_on_which_safetensors_fails_are_those_of_numpy(file: Path, name: str, text: str) -> None:
    with pytest.raises((OverflowError, SystemError, safetensors.SafetensorError)):
        stock_open(file, "np").get_slice(name)[brackets(text)]
    expected = TENSORS[name][brackets(text)]
    assert seen(safe_open(file, "np").get_slice(name)[brackets(text)]) == seen(expected)


@st.composite
def _indices(draw: st.DrawFn) -> tuple[str, Any]:
    name = draw(st.sampled_from(["cube", "line", "scalar", "empty"]))
    shape = TENSORS[name].shape
    bound = st.none() | st.integers(-7, 7)
    wild = st.lists(st.builds(slice, bound, bound, st.none() | st.integers(-1, 3)) | st.integers(-7, 6), max_size=4)
    return name, draw(hnp.basic_indices(shape, allow_ellipsis=True, allow_newaxis=True) | wild.map(tuple))


@pytest.mark.slow(disk=False)
@settings(max_examples=400)
@given(_indices(), st.sampled_from(FRAMEWORKS))
def test_any_basic_index(file: Path, case: tuple[str, Any], framework: Any) -> None:
    name, index = case
    whole = TENSORS[name] if framework == "np" else torch.from_numpy(TENSORS[name])
    try:
        ours = seen(safe_open(file, framework).get_slice(name)[index])
    except TensorIndexError:
        with pytest.raises(Exception):  # noqa: B017, PT011 - any refusal of theirs
            stock_open(file, framework).get_slice(name)[index]
    else:
        assert ours == seen(np.asarray(whole[index]) if framework == "np" else whole[index])


@pytest.mark.parametrize("framework", ["np", "numpy", "pt", "torch", "pytorch"])
def test_whole_tensors_and_all_methods(file: Path, framework: Any) -> None:
    with stock_open(file, framework) as stock, safe_open(file, framework) as ours:
        assert isinstance(ours, SafeOpen)
        assert ours.keys() == stock.keys()
        assert ours.offset_keys() == stock.offset_keys()
        assert ours.metadata() == stock.metadata()
        expected = stock.get_tensors()
        got = ours.get_tensors()
        assert list(got) == list(expected)
        for key in stock.keys():  # noqa: SIM118 - it has no other iteration
            assert seen(got[key]) == seen(expected[key]) == seen(ours.get_tensor(key))
            assert ours.get_slice(key).get_shape() == stock.get_slice(key).get_shape()
            assert ours.get_slice(key).get_dtype() == stock.get_slice(key).get_dtype()
        for their_object, our_object in ((stock, ours), (stock.get_slice("cube"), ours.get_slice("cube"))):
            assert {name for name in dir(their_object) if not name.startswith("_")} <= set(dir(our_object))


def test_all_torch_dtypes(torch_file: Path) -> None:
    expected = safetensors.torch.load_file(torch_file)
    got = load_file(torch_file, "pt")
    assert {key: seen(value) for key, value in got.items()} == {key: seen(value) for key, value in expected.items()}
    with safe_open(torch_file, "pt") as ours, stock_open(torch_file, "pt") as stock:
        for key in expected:
            assert seen(ours.get_slice(key)[1:, ::2]) == seen(stock.get_slice(key)[1:, ::2])


def test_8_bit_floats_are_numpy_arrays_too(torch_file: Path) -> None:
    got = load_file(torch_file)
    assert got["e4m3"].dtype == ml_dtypes.float8_e4m3fn
    for key, tensor in TORCH_TENSORS.items():
        assert got[key].tobytes() == seen(tensor).raw


def write_raw(path: Path, dtype: str, shape: list[int], data: bytes) -> Path:
    header = json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}}).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def test_packed_floats(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "f4.safetensors", "F4", [3, 4], bytes(range(6)))
    expected = safetensors.torch.load_file(path)["x"]
    assert seen(load_file(path, "pt")["x"]) == seen(expected)
    array = load_file(path)["x"]
    assert array.dtype == np.uint8
    assert array.tolist() == [[0, 1], [2, 3], [4, 5]]
    with safe_open(path, "np") as f:
        part = f.get_slice("x")
        assert (part.get_shape(), part.get_dtype()) == ([3, 4], "F4")
        assert part[...].tolist() == part[:].tolist() == array.tolist()
        assert part[1:].tolist() == [[2, 3], [4, 5]]
        assert part[::2].tolist() == [[0, 1], [4, 5]]
        assert part[1].tolist() == [2, 3]
        for index in ((0, 0), (slice(None), slice(0, 2)), (..., slice(None, None, 2)), (0, slice(0, 3))):
            with pytest.raises(UnsupportedError, match="only full rows"):
                part[index]
    with safe_open(path, "pt") as f:
        assert f.get_slice("x")[1:].shape == (2, 2)


def test_rows_that_share_bytes(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "f4.safetensors", "F4", [2, 3], bytes(range(3)))
    with safe_open(path, "np") as f:
        assert f.get_tensor("x").tolist() == [0, 1, 2]
        with pytest.raises(UnsupportedError, match="only full rows"):
            f.get_slice("x")[0]


def test_results_are_writable_and_by_themselves(file: Path) -> None:
    before = file.read_bytes()
    with safe_open(file, "np") as f, safe_open(file, "pt") as g:
        f.get_tensor("cube")[:] = -1
        part = f.get_slice("cube")[::2, ..., ::3]
        assert part.flags.c_contiguous
        part[:] = -1
        g.get_tensor("cube").fill_(-1)
        g.get_tensors()["cube"].fill_(-1)
        assert f.get_tensor("cube").tobytes() == TENSORS["cube"].tobytes()
    assert file.read_bytes() == before


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_closed_is_closed(file: Path, framework: Any) -> None:
    with safe_open(file, framework) as f:
        part = f.get_slice("line")
    uses: list[Callable[[], object]] = [f.keys, f.offset_keys, f.metadata, f.get_tensors]
    uses += [partial(f.get_tensor, "line"), partial(f.get_slice, "line")]
    for use in uses:
        with pytest.raises(ArgumentError, match="is closed"):
            use()
    assert part[2:4].tolist() == [2, 3]
    f.close()
    other = safe_open(file, framework)
    other.close()
    with pytest.raises(ArgumentError, match="is closed"):
        other.keys()


def test_tensors_outlive_the_file(file: Path) -> None:
    with safe_open(file, "pt") as f:
        cube, part = f.get_tensor("cube"), f.get_slice("cube")[1]
    assert torch.equal(cube[1], part)


@pytest.mark.parametrize("backend", [None, "mmap", "pread"])
def test_backends(file: Path, backend: Any) -> None:
    assert load_file(file, backend=backend)["cube"].tobytes() == TENSORS["cube"].tobytes()


def test_paths_of_all_kinds(file: Path, tmp_path: Path) -> None:
    odd = tmp_path / "weights.bin"
    odd.write_bytes(file.read_bytes())
    bare = tmp_path / "weights"
    bare.write_bytes(file.read_bytes())
    for path in (str(file), file, odd, str(bare)):
        assert safe_open(path, "np").keys() == sorted(TENSORS)
    assert safe_open(filename=file, framework="np", device="cpu").keys() == sorted(TENSORS)


def test_a_folder_of_files(tmp_path: Path) -> None:
    safetensors.numpy.save_file(
        {"b": np.arange(3), "a": np.arange(4.0)}, tmp_path / "m-1.safetensors", {"x": "1", "y": "2"}
    )
    safetensors.numpy.save_file({"c": np.arange(5)}, tmp_path / "m-2.safetensors", {"x": "1", "y": "3"})
    weights = {"a": "m-1.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"}
    index = {"metadata": {"total_size": 96}, "weight_map": weights}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with safe_open(tmp_path, "np") as f:
        assert f.keys() == ["a", "b", "c"]
        assert f.offset_keys() == [*stock_open(tmp_path / "m-1.safetensors", "np").offset_keys(), "c"]
        assert f.metadata() == {"x": "1"}
        assert f.get_slice("c")[1:3].tolist() == [1, 2]
        assert list(f.get_tensors()) == f.offset_keys()


def test_a_checkpoint_root(tmp_path: Path) -> None:
    folder = tmp_path / "iteration_00000003"
    folder.mkdir()
    for part, arrays in (("model", {"w": np.arange(6.0).reshape(2, 3)}), ("opt", {"m.w": np.arange(3)})):
        safetensors.numpy.save_file(arrays, folder / f"{part}-0000000-0000001.safetensors", {"format": "ms"})
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    for path in (tmp_path, folder):
        with safe_open(path, "pt") as f:
            assert f.keys() == ["m.w", "w"]
            assert f.metadata() == {"format": "ms"}
            assert f.get_slice("w")[1, :2].tolist() == [3, 4]
            assert f.get_tensors()["m.w"].tolist() == [0, 1, 2]


def test_a_file_without_metadata(torch_file: Path) -> None:
    assert stock_open(torch_file, "np").metadata() is None
    assert safe_open(torch_file, "np").metadata() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"framework": "tf"}, "unknown framework 'tf'"),
        ({"framework": "NP"}, "unknown framework"),
        ({"framework": "np", "backend": "x"}, "unknown backend"),
        ({"framework": "np", "device": "cuda:0"}, "numpy arrays cannot be on device"),
        ({"framework": "pt", "device": "zzz"}, "unknown device 'zzz'"),
    ],
)
def test_options_that_are_refused(file: Path, options: dict[str, Any], message: str) -> None:
    if options["framework"] != "tf":  # which is not ours to offer
        with pytest.raises(safetensors.SafetensorError):
            stock_open(file, **options)
    with pytest.raises(ArgumentError, match=message):
        safe_open(file, **options)


def test_an_unknown_tensor(file: Path) -> None:
    with safe_open(file, "np") as f:
        uses: list[Callable[[str], object]] = [f.get_tensor, f.get_slice]
        for use in uses:
            with pytest.raises(KeyNotFoundError, match="nope"):
                use("nope")


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError) as caught:
        safe_open(tmp_path / "nope.safetensors", "np")
    assert isinstance(caught.value, FileNotFoundError)
    (tmp_path / "text.safetensors").write_text("certainly no header")
    with pytest.raises(DamagedFileError):
        safe_open(tmp_path / "text.safetensors", "np").keys()
    (tmp_path / "text.bin").write_text("certainly no header")
    with pytest.raises(ReshardError):
        safe_open(tmp_path / "text.bin", "np").keys()


def test_a_tensor_can_be_walked_through(file: Path) -> None:
    # Python walks a sequence without a length by its integers, until an IndexError.
    walked = list(safe_open(file, "pt").get_slice("cube"))  # type: ignore[call-overload]
    assert [seen(row) for row in walked] == [seen(row) for row in torch.from_numpy(TENSORS["cube"])]


@pytest.mark.gpu
def test_tensors_on_a_gpu(file: Path) -> None:
    for device in (0, "cuda", "cuda:0"):
        with safe_open(file, "pt", device=device) as f:
            tensors = [f.get_tensor("cube"), f.get_tensors()["cube"], f.get_slice("cube")[:]]
        for tensor in tensors:
            assert tensor.device.type == "cuda"
            assert seen(tensor.cpu()) == seen(torch.from_numpy(TENSORS["cube"]))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks for the file in /proc")
@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_close_lets_go_of_the_file(file: Path, tmp_path: Path, backend: Any) -> None:
    path = tmp_path / "alone.safetensors"
    path.write_bytes(file.read_bytes())

    def is_held() -> bool:
        open_files = [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        return str(path) in open_files or str(path) in Path("/proc/self/maps").read_text()

    with safe_open(path, "np", backend=backend) as f:
        cube = f.get_tensor("cube")
        assert is_held()
    assert not is_held()
    assert cube.tobytes() == TENSORS["cube"].tobytes()
