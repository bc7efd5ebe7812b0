"""`reshard.torch.load_file` and `save_file` beside `safetensors.torch`: each reads what the other writes."""

from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING, Any

import pytest
import safetensors
import safetensors.torch as stock
import torch

from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    DamagedFileError,
    StorageError,
    UnsupportedError,
)
from reshard.torch import load_file, save_file
from reshard.torch.files import ALIASES

if TYPE_CHECKING:
    from pathlib import Path

stock_open: Any = safetensors.safe_open  # its methods have no types
DTYPES = sorted((dtype for dtype in stock._SIZE if dtype is not None), key=str)


def sample(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bit pattern."""
    size = torch.empty(0, dtype=dtype).element_size()
    n = size
    for extent in shape:
        n *= extent
    raw = torch.randint(0, 256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))
    return (raw % 2 if dtype == torch.bool else raw).view(dtype).reshape(shape)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.numel() == 0:
        return True
    pair = [tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(pair[0], pair[1])


def check(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Written by either, read by either: the same bits. Stock is given contiguous copies."""
    ours, theirs = path / "ours.safetensors", path / "theirs.safetensors"
    save_file(tensors, ours)
    stock.save_file({key: tensor.resolve_conj().resolve_neg().contiguous() for key, tensor in tensors.items()}, theirs)
    for file in (ours, theirs):
        for load in (load_file, stock.load_file):
            loaded = load(file)
            assert set(loaded) == set(tensors)
            assert all(same(loaded[key], tensor) for key, tensor in tensors.items())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (4, 6)])
def test_all_dtypes_of_stock(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if dtype == torch.float4_e2m1fn_x2:
        shape = (*shape, 2)  # a packed tensor has a dim
    check(tmp_path, {"x": sample(dtype, *shape), "y": sample(dtype, 2, 3)})


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64], ids=str
)
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.T,
        lambda t: t[::2, 1::3],
        lambda t: t[1],
        lambda t: t[:, 0],
        lambda t: t[:1].expand(5, 6),
        lambda t: t.reshape(2, 2, 6).permute(2, 0, 1),
        lambda t: t[:0, ::2],
    ],
    ids=["T", "steps", "row", "column", "expand", "permute", "empty"],
)
def test_strided_tensors_are_written_as_if_contiguous(tmp_path: Path, dtype: torch.dtype, view: Any) -> None:
    check(tmp_path, {"x": view(sample(dtype, 4, 6))})


def test_gradients_parameters_conjugates_and_channels_last(tmp_path: Path) -> None:
    check(
        tmp_path,
        {
            "parameter": torch.nn.Parameter(torch.ones(3)),
            "with gradient": torch.ones(3, requires_grad=True) * 2,
            "conjugated": torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64).conj(),
            "negative": torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64).conj().imag,
            "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        },
    )


def test_bytes_are_those_of_stock(tmp_path: Path) -> None:
    tensors = {"b": sample(torch.float32, 3, 4), "a": sample(torch.bfloat16, 5), "c": sample(torch.int8, 7)}
    for metadata in (None, {}, {"format": "pt"}):
        save_file(tensors, tmp_path / "ours", metadata)
        stock.save_file(tensors, tmp_path / "theirs", metadata)
        contents = []
        for name in ("ours", "theirs"):
            with stock_open(tmp_path / name, "pt") as f:
                contents.append((f.offset_keys(), f.metadata() or None))
        assert contents[0] == contents[1]


def test_many_and_large_tensors(tmp_path: Path) -> None:
    check(tmp_path, {f"t.{i}": sample(torch.bfloat16, 64 + i, 33) for i in range(200)})
    check(tmp_path, {"large": sample(torch.float32, 3_000_000)})


# -- tied


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.head = torch.nn.Linear(4, 5)
        self.head.weight = self.embed.weight
        self.also = torch.nn.Linear(4, 5)
        self.also.weight = self.embed.weight


def test_tied_tensors_are_stored_once_as_by_stock_save_model(tmp_path: Path) -> None:
    model, ours, theirs = Tied(), tmp_path / "ours", tmp_path / "theirs"
    state = model.state_dict()
    with pytest.raises(RuntimeError, match="share memory"):
        stock.save_file(state, theirs)
    stock.save_model(model, str(theirs))
    save_file(state, ours, {"format": "pt"})
    assert sorted(stock.load_file(ours)) == sorted(stock.load_file(theirs)) == ["also.bias", "also.weight", "head.bias"]
    with stock_open(ours, "pt") as f:
        assert f.metadata() == {
            "format": "pt",
            ALIASES: '{"embed.weight": "also.weight", "head.weight": "also.weight"}',
        }

    loaded = load_file(ours)
    assert set(loaded) == set(state)
    assert all(torch.equal(loaded[key], state[key]) for key in state)
    assert loaded["embed.weight"].data_ptr() == loaded["also.weight"].data_ptr() == loaded["head.weight"].data_ptr()
    Tied().load_state_dict(loaded)
    missing, unexpected = stock.load_model(Tied(), ours)
    assert not missing
    assert not unexpected
    assert sorted(load_file(theirs)) == sorted(stock.load_file(theirs))


def test_what_merely_overlaps_is_stored_in_full(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "base": base,
        "rows": base[1:3],
        "first rows": base[:2],
        "square": base[:, :4],
        "turned square": base[:, :4].T,
        "flat": base.reshape(-1),
        "bits": base.view(torch.int32),
        "apart": base[3:],
    }
    save_file(tensors, tmp_path / "x")
    loaded = stock.load_file(tmp_path / "x")
    assert set(loaded) == set(tensors)
    assert all(same(loaded[key], tensor) for key, tensor in tensors.items())
    with stock_open(tmp_path / "x", "pt") as f:
        assert f.metadata() is None


def test_empty_tensors_and_conjugates_are_not_tied(tmp_path: Path) -> None:
    one = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64)
    tensors = {"a": torch.empty(0), "b": torch.empty(0), "one": one, "other": one.conj()}
    save_file(tensors, tmp_path / "x")
    assert set(stock.load_file(tmp_path / "x")) == set(tensors)
    assert torch.equal(load_file(tmp_path / "x")["other"], one.conj().resolve_conj())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '{"y": "absent"}',
        '{"x": "x"}',
        '{"z": "x", "z": "x"}',
        '{"z": 1}',
        '{"z": null}',
        '{"z": ["x"]}',
        '{"z": "y"}',
        '{"z": "x", "w": "z"}',
        "[" * 2000,
    ],
)
def test_damaged_aliases_are_refused(tmp_path: Path, text: str) -> None:
    stock.save_file({"x": torch.ones(2), "v": torch.ones(1)}, tmp_path / "x", {ALIASES: text})
    with pytest.raises(DamagedFileError):
        load_file(tmp_path / "x")


def test_metadata_of_others_makes_no_names(tmp_path: Path) -> None:
    stock.save_file({"pt": torch.ones(2)}, tmp_path / "x", {"format": "pt"})
    assert list(load_file(tmp_path / "x")) == ["pt"]


# -- what is refused, and what is left behind


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(2, dtype=torch.complex128), "complex128"),
        (torch.ones(2, 2).to_sparse(), "sparse"),
        (torch.ones(2, device="meta"), "meta"),
    ],
    ids=["complex128", "sparse", "meta"],
)
def test_tensors_without_a_place_in_the_format(tmp_path: Path, tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(UnsupportedError, match=f"saving `w`.*{message}"):
        save_file({"w": tensor, "b": torch.ones(1)}, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        ([("w", torch.ones(1))], None),
        ({1: torch.ones(1)}, None),
        ({"\ud800": torch.ones(1)}, None),
        ({"__metadata__": torch.ones(1)}, None),
        ({"w": [1.0]}, None),
        ({"w": None}, None),
        ({"w": torch.ones(1)}, {"a": 1}),
        ({"w": torch.ones(1)}, {1: "a"}),
        ({"w": torch.ones(1)}, {ALIASES: "{}"}),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, tensors: Any, metadata: Any) -> None:
    with pytest.raises(ArgumentError):
        save_file(tensors, tmp_path / "x", metadata)
    assert list(tmp_path.iterdir()) == []


def test_arguments_of_load(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "x")
    assert load_file(str(tmp_path / "x"), "cpu", backend="pread").keys() == {"w"}
    assert load_file(tmp_path / "x", torch.device("cpu"), backend="mmap").keys() == {"w"}
    assert load_file(tmp_path / "x", "meta")["w"].device.type == "meta"
    for arguments in ({"device": "nonsense"}, {"backend": "nonsense"}):
        with pytest.raises(ArgumentError, match="nonsense"):
            load_file(tmp_path / "x", **arguments)  # type: ignore[arg-type]
    with pytest.raises(CheckpointNotFoundError):
        load_file(tmp_path / "absent")
    (tmp_path / "short").write_bytes((tmp_path / "x").read_bytes()[:-1])
    with pytest.raises(DamagedFileError):
        load_file(tmp_path / "short")


def test_loaded_tensors_are_apart_from_the_file(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "x")
    load_file(tmp_path / "x")["w"].fill_(2)
    assert torch.equal(load_file(tmp_path / "x")["w"], torch.ones(4))


def test_file_is_replaced_whole_with_the_mode_of_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    before = os.umask(0o027)
    try:
        save_file({"w": torch.ones(4)}, path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(CheckpointNotFoundError):
        save_file({"w": torch.ones(4)}, tmp_path / "absent" / "x")
    with pytest.raises(StorageError):
        save_file({"w": torch.ones(4)}, path / "x")


def test_folders_are_read_too(tmp_path: Path) -> None:
    tied = torch.ones(2)
    save_file({"a": tied, "c": tied}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert sorted(load_file(tmp_path)) == ["a", "b", "c"]


@pytest.mark.gpu
def test_tensors_on_a_device(tmp_path: Path) -> None:
    w = torch.rand(3, 4, device="cuda")
    save_file({"w": w.T, "tied": w, "too": w}, tmp_path / "x")
    loaded = load_file(tmp_path / "x", 0)
    assert torch.equal(loaded["w"], w.T)
    assert loaded["tied"].data_ptr() == loaded["too"].data_ptr()
