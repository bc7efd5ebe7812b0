"""What `convert` writes for torch: read by torch itself, by zipfile, and by this package, bit for bit."""

from __future__ import annotations

import json
import os
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.ranks import Job
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys, load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import reshard
from reshard import _core
from reshard.errors import ArgumentError, DestinationExistsError, UnsupportedError
from reshard.formats.torch_file.archive import Composer, state_dict
from reshard.formats.torch_file.encode import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
LAYOUT = {
    "mesh": {"dp": 2, "tp": 2},
    "rules": [{"match": "scalar"}, {"match": "*", "cut": ["tp"], "uneven": "ceil"}],
}
NAMES = ["w", "model.layers.0.w", "a b", "quote\"'", "ü漢😀", "x" * 900, "a/b\\c"]


def tensor(shape: tuple[int, ...], dtype: str, seed: int = 0) -> torch.Tensor:
    """A tensor of any bits."""
    torch_dtype = getattr(torch, TORCH_DTYPES[dtype][0])
    n_bytes = int(np.prod(shape)) * torch_dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 256, n_bytes, np.uint8)
    if dtype == "BOOL":
        data &= 1
    return torch.from_numpy(data).view(torch_dtype).reshape(shape) if n_bytes else torch.empty(shape, dtype=torch_dtype)


def raw(value: torch.Tensor) -> bytes:
    """The bytes of a tensor."""
    return bytes(value.contiguous().reshape(-1).view(torch.uint8).numpy()) if value.numel() else b""


def check_same(found: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> None:
    assert set(found) == set(right)
    for name, value in right.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert raw(found[name]) == raw(value), name


def check_opens(path: Path, right: Mapping[str, torch.Tensor]) -> None:
    with reshard.open(path) as checkpoint:
        assert set(checkpoint) == set(right)
        for name, value in right.items():
            assert checkpoint.shape(name) == tuple(value.shape)
            assert checkpoint.read(name).tobytes() == raw(value)
    assert reshard.verify(path).ok


def all_dtypes() -> dict[str, torch.Tensor]:
    tensors = {
        f"{name}.{dtype}": tensor((3, 5), dtype, i)
        for i, (name, dtype) in enumerate(zip(NAMES * 3, TORCH_DTYPES, strict=False))
    }
    return tensors | {
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 4),
        "five": tensor((1, 2, 3, 4, 5), "BF16"),
        "large": tensor((700, 3001), "F32"),  # over several pieces of the writer
    }


@pytest.fixture(name="source")
def _source(tmp_path: Path) -> Path:
    torch.save(all_dtypes(), tmp_path / "source.pt")
    return tmp_path / "source.pt"


@pytest.mark.parametrize("name", ["é.pt", os.fsdecode(b"\xff.pt"), "a b%.pt"])
def test_any_name_of_a_file_is_possible(source: Path, tmp_path: Path, name: str) -> None:
    reshard.convert(source, tmp_path / name)
    check_same(torch.load(tmp_path / name, weights_only=True), all_dtypes())


def test_torch_loads_one_file(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "out" / "m.bin"
    assert reshard.convert(source, path).to == "torch"
    for mmap in (False, True):
        check_same(torch.load(path, weights_only=True, mmap=mmap), all_dtypes())
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None  # every checksum is right
        with zipfile.ZipFile(source) as real:
            assert {name.split("/", 1)[1] for name in archive.namelist()} == {
                *(name.split("/", 1)[1] for name in real.namelist()),
                ".reshard",
            }
    check_opens(path, all_dtypes())
    with pytest.raises(DestinationExistsError):
        reshard.convert(source, path)
    reshard.convert(source, path, overwrite=True)
    torch.save({}, path)
    with pytest.raises(DestinationExistsError, match="not written by an earlier conversion"):
        reshard.convert(source, path, overwrite=True)
    with pytest.raises(ArgumentError, match="is one file"):
        reshard.convert(source, tmp_path / "x.pt", files={"max_shard_size": "1MB"})


def test_a_folder_of_bin_files_loads_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "hf")
    for size, name in ((None, "one"), ("10000", "several")):
        report = reshard.convert(tmp_path / "hf", tmp_path / name, to="torch", files={"max_shard_size": size})
        folder = Path(report.path)
        assert (report.n_files > 1) == (size is not None) == (folder / "pytorch_model.bin.index.json").exists()
        assert (folder / "config.json").read_text() == (tmp_path / "hf" / "config.json").read_text()
        loaded = transformers.LlamaForCausalLM.from_pretrained(folder, use_safetensors=False)
        check_same(loaded.state_dict(), model.state_dict())
        check_opens(
            folder,
            {key: value for key, value in model.state_dict().items() if key in set(reshard.open(tmp_path / "hf"))},
        )
    report = reshard.convert(tmp_path / "hf", tmp_path / "several", to="torch", overwrite=True)
    assert sorted(path.name for path in (tmp_path / "several").glob("pytorch*")) == ["pytorch_model.bin"]


@pytest.mark.parametrize("layout", [None, LAYOUT])
@pytest.mark.parametrize("max_shard_size", [None, "1MB"])
def test_dcp_loads_a_folder(source: Path, tmp_path: Path, layout: object, max_shard_size: str | None) -> None:
    right, path = all_dtypes(), tmp_path / "dcp"
    report = reshard.convert(source, path, to="dcp", layout=layout, files={"max_shard_size": max_shard_size})  # type: ignore[arg-type]
    assert report.n_files == (4 if layout else 1) + (max_shard_size is not None) * (2 if layout else 1)
    found = {name: torch.zeros_like(value) for name, value in right.items()}
    load(found, checkpoint_id=path, no_dist=True)
    check_same(found, right)
    dcp_to_torch_save(path, tmp_path / "back.pt")
    check_same(torch.load(tmp_path / "back.pt"), right)
    check_opens(path, right)
    for file in path.glob("*.distcp"):
        for place, info in FileSystemReader(path).read_metadata().storage_data.items():
            if info.relative_path == file.name:
                file_bytes = file.read_bytes()[info.offset : info.offset + info.length]
                (tmp_path / "item").write_bytes(file_bytes)
                with zipfile.ZipFile(tmp_path / "item") as item:
                    assert item.testzip() is None, place
    reshard.convert(source, path, to="dcp", overwrite=True)
    assert sorted(file.name for file in path.iterdir()) == [".metadata", "__0_0.distcp"]


def test_metadata_is_that_of_torch(tmp_path: Path) -> None:
    """What torch writes for the same tensors, without the places in the file and the names of the save."""
    right = {"a.b": torch.ones(2, 3), "s": torch.tensor(1.0), "e": torch.zeros(0, 2), "u": tensor((4,), "U16")}
    torch.save(right, tmp_path / "m.pt")
    reshard.convert(tmp_path / "m.pt", tmp_path / "ours", to="dcp")
    with warnings.catch_warnings(action="ignore"):
        save(right, checkpoint_id=tmp_path / "theirs", no_dist=True)
    ours, theirs = (FileSystemReader(tmp_path / name).read_metadata() for name in ("ours", "theirs"))
    for one in theirs.state_dict_metadata.values():
        assert isinstance(one, TensorStorageMetadata)
        one.properties.strides = None  # older releases have no such field, and refuse it
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert ours.version == theirs.version
    assert set(ours.storage_data) == set(theirs.storage_data)
    assert [index.index for index in ours.storage_data] == [index.index for index in theirs.storage_data]
    assert vars(ours).keys() == vars(theirs).keys()
    assert vars(next(iter(ours.storage_data.values()))).keys() == vars(next(iter(theirs.storage_data.values()))).keys()


def test_values_beside_the_tensors_are_entries_of_dcp(tmp_path: Path) -> None:
    extra = {
        "scheduler": {"last_epoch": 3, "lrs": [0.1, 1e-300], "nested": {"deep": {"k": "ü"}}},
        "groups": [{"lr": 0.1, "betas": (0.9, 0.95)}, {"lr": 0.2, "none": None}],
        "text": "x",
        "flag": True,
        "big": -(1 << 70),
        "raw": b"\x00\xff",
        "set": {1, 2},
        "array": np.ones(3),
    }
    common = reshard.CommonInfo(step_num=7, global_step=9)
    reshard.save(tmp_path / "root", 7, {"w": np.ones((4, 2), np.float32)}, common=common, extra=extra)
    report = reshard.convert(tmp_path / "root", tmp_path / "dcp", to="dcp")
    assert any("array" in warning for warning in report.warnings)
    del extra["array"]
    wanted = {**extra, "common": {"step_num": 7, "global_step": 9}, "iteration": 7}
    found = json.loads(
        json.dumps(wanted, default=str),
        object_hook=lambda d: dict.fromkeys(d) if not any(isinstance(v, dict | list) for v in d.values()) else d,
    )
    found["groups"] = [{"lr": 0, "betas": 0}, {"lr": 0, "none": 0}]
    found["scheduler"]["lrs"] = 0
    state = {"w": torch.zeros(4, 2), **found}
    with warnings.catch_warnings(action="ignore"):
        load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
        whole = _load_state_dict_from_keys(checkpoint_id=tmp_path / "dcp")
    for loaded in (state, whole):
        weight = loaded.pop("w")
        assert (weight == 1).all()
        assert loaded == wanted
    weights = reshard.convert(tmp_path / "root", tmp_path / "weights", to="dcp", part="model")
    assert not weights.warnings
    assert reshard.open(tmp_path / "weights").extra() == {}


def test_a_value_named_as_a_counter_does_not_replace_it(tmp_path: Path) -> None:
    extra = {"iteration": 70, "common": {"global_step": 5}, "common.step_num": 99, "other": 1}
    reshard.save(tmp_path / "root", 7, {"w": np.ones(2, np.float32)}, extra=extra)
    report = reshard.convert(tmp_path / "root", tmp_path / "step-7", to="dcp")
    assert sorted(warning.partition(" ")[0] for warning in report.warnings) == [
        "`common.global_step`",
        "`common.step_num`",
        "`iteration`",
    ]
    wanted = {"iteration": 7, "common.step_num": 7, "common.global_step": 7, "other": 1}
    assert reshard.open(tmp_path / "step-7").extra() == wanted
    again = reshard.convert(tmp_path / "step-7", tmp_path / "again", to="dcp")
    assert not again.warnings
    assert reshard.open(tmp_path / "again").extra() == wanted


@pytest.mark.parametrize("select", [{"rename": {"w": "v"}}, {"rename": {"w": "w"}}])
def test_values_that_name_other_tensors_are_not_written(tmp_path: Path, select: dict[str, Any]) -> None:
    extra = {"frozen": {"w": True}, "note": "x"}
    reshard.save(tmp_path / "root", 7, {"w": np.ones(2, np.float32)}, extra=extra)
    is_renamed = select["rename"]["w"] != "w"
    report = reshard.convert(tmp_path / "root", tmp_path / "step-7", to="dcp", select=select)
    found = [warning for warning in report.warnings if "is not written: frozen, note" in warning]
    assert len(found) == is_renamed
    counters = {"iteration": 7, "common.step_num": 7, "common.global_step": 7}
    values = {} if is_renamed else {"frozen.w": True, "note": "x"}
    assert reshard.open(tmp_path / "step-7").extra() == counters | values


def test_parts_come_back_from_dcp(tmp_path: Path) -> None:
    model = {"w": np.arange(8.0).reshape(4, 2), "ema.w": np.ones((4, 2))}
    state = {"exp_avg.w": np.full((4, 2), 2.0), "adam_m.w": np.full((4, 2), 3.0), "optimizer.state.w.v": np.ones(2)}
    reshard.save(tmp_path / "run", 10, model, state, extra={"optimizer": {"lr": 0.1}})
    layout = {"mesh": {"tp": 2}, "rules": [{"match": "w", "cut": ["tp"]}, {"match": "*"}]}
    reshard.convert(tmp_path / "run", tmp_path / "dcp", to="dcp", layout=layout)
    found = {name: torch.zeros(array.shape, dtype=torch.float64) for name, array in {**model, **state}.items()}
    load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)  # under the names of the source
    for name, array in {**model, **state}.items():
        assert found[name].numpy().tobytes() == array.tobytes()
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "dcp.pt")
    assert set(torch.load(tmp_path / "dcp.pt")) == {*model, *state, "optimizer", "iteration", "common"}
    reshard.convert(tmp_path / "dcp", tmp_path / "again", to="dcp")
    reshard.convert(tmp_path / "dcp", tmp_path / "back", to="checkpoint2", layout=layout)
    for path in ("dcp", "again", "back"):
        with reshard.open(tmp_path / path) as opened:
            assert opened.keys("model") == [*model], path
            assert opened.keys("optimizer") == [*state], path
            assert path == "back" or "optimizer.lr" in opened.extra()
    assert reshard.diff(tmp_path / "run", tmp_path / "back").equal
    # Tensors that have other names than in the folder, and a conversion of the model alone.
    reshard.convert(tmp_path / "dcp", tmp_path / "new", to="checkpoint2", select={"rename": {"w": "v"}})
    with reshard.open(tmp_path / "new") as opened:
        assert opened.keys("optimizer") == ["exp_avg.v", "adam_m.v", "optimizer.state.w.v"]
    reshard.convert(tmp_path / "dcp", tmp_path / "hf")
    assert reshard.open(tmp_path / "hf").keys() == [*model]


def test_other_folders_of_dcp_are_written_again(tmp_path: Path) -> None:
    data = Path(__file__).parents[2] / "data" / "torch"
    for name in ("dcp_2d/checkpoint", "dcp_plain/checkpoint", "dcp_hsdp/checkpoint"):
        target = tmp_path / name.replace("/", "-")
        reshard.convert(data / name, target, to="dcp")
        with reshard.open(data / name) as source, reshard.open(target) as written:
            assert set(source) == set(written)
            assert all(source.read(key).tobytes() == written.read(key).tobytes() for key in source)
            known, found = source.extra(), written.extra()
            assert set(found) <= set(known)
            plain = {key for key, value in known.items() if isinstance(value, int | float | str | list | bytes)}
            assert {key for key in plain if key in found and found[key] == known[key]} >= {
                key for key in plain if not isinstance(known[key], list) and known[key] == known[key]
            }


def _load_sharded(folder: Path) -> None:
    right = all_dtypes()
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Shard(0), Replicate()):
        state: dict[str, torch.Tensor] = {
            name: distribute_tensor(torch.zeros_like(value), mesh, [placement if value.dim() else Replicate()])
            for name, value in right.items()
            if value.dtype.is_floating_point and value.dtype.itemsize > 1
        }
        load(state, checkpoint_id=folder)
        for name, value in state.items():
            assert isinstance(value, DTensor)
            assert raw(value.full_tensor()) == raw(right[name]), name


@pytest.mark.slow
def test_ranks_load_their_shards(source: Path, tmp_path: Path) -> None:
    reshard.convert(source, tmp_path / "dcp", to="dcp", layout=LAYOUT)

    def work(group: object) -> None:
        _load_sharded(tmp_path / "dcp")

    with Job(2, work) as job:
        assert [outcome and outcome.get("error") for outcome in job.outcomes()] == [None, None]
    assert not dist.is_initialized()


def test_packed_dtypes_are_refused(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    for to in ("torch", "dcp"):
        with pytest.raises(UnsupportedError, match="F4"):
            reshard.convert(tmp_path / "m.safetensors", tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()


@settings(max_examples=10)
@given(
    shapes=st.dictionaries(
        st.text("ab.é😀\"' ", min_size=1, max_size=8), st.lists(st.integers(0, 5), max_size=5), min_size=1, max_size=5
    ),
    dtype=st.sampled_from(sorted(TORCH_DTYPES)),
    tp=st.integers(1, 4),
)
def test_any_tensors_come_back(
    tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, list[int]], dtype: str, tp: int
) -> None:
    folder = tmp_path_factory.mktemp("any")
    right = {name: tensor(tuple(shape), dtype, i) for i, (name, shape) in enumerate(shapes.items())}
    torch.save(right, folder / "m.pt")
    layout = {"mesh": {"tp": tp}, "rules": [{"match": "*", "cut": ["tp"], "uneven": "ceil"}]}
    if any(value.dim() == 0 for value in right.values()):
        layout = None  # type: ignore[assignment]
    reshard.convert(folder / "m.pt", folder / "out.bin")
    reshard.convert(folder / "m.pt", folder / "dcp", to="dcp", layout=layout)
    check_same(torch.load(folder / "out.bin"), right)
    found = {name: torch.zeros_like(value) for name, value in right.items()}
    load(found, checkpoint_id=folder / "dcp", no_dist=True)
    check_same(found, right)
    for name in ("out.bin", "dcp"):
        check_opens(folder / name, right)


# -- the container of the core


def test_a_container_that_does_not_fit_is_refused(source: Path, tmp_path: Path) -> None:
    with reshard.open(source) as checkpoint:
        plan = checkpoint.plan(_request({"scalar": (), "five": (1, 2, 3, 4, 5)}))
        n_bytes = 4 + 240
        good = (bytes(20), [4, 12], [(8, 0)])
        assert plan.write(str(tmp_path / "good"), container=good).n_bytes == n_bytes + 20
        bad = {
            "few starts": (bytes(20), [4], []),
            "overlap": (bytes(20), [4, 7], []),
            "order": (bytes(20), [12, 4], []),
            "beyond": (bytes(20), [4, 25], []),
            "sum before": (bytes(20), [4, 12], [(0, 0)]),
            "sum inside": (bytes(20), [4, 12], [(6, 0)]),
            "sum into the next": (bytes(20), [4, 12], [(9, 0)]),
            "sum beyond": (bytes(20), [4, 12], [(n_bytes + 18, 0)]),
            "no such array": (bytes(20), [4, 12], [(8, 2)]),
            "far": (bytes(20), [4, 12], [(2**64 - 1, 0)]),
        }
        for what, container in bad.items():
            with pytest.raises(ArgumentError):
                plan.write(str(tmp_path / "bad"), container=container)
            assert not (tmp_path / "bad").exists(), what


def test_sums_across_pieces_of_the_writer(tmp_path: Path) -> None:
    """Arrays and their sums lie at every position around the end of a piece of 4 MiB."""
    piece = 4 << 20
    for n in (piece - 6, piece - 4, piece - 3, piece - 1, piece, piece + 1):
        arrays = {"a": np.random.default_rng(n).integers(0, 256, n, np.uint8), "b": np.arange(piece, dtype=np.int16)}
        reshard.save_file(arrays, tmp_path / "m.safetensors")
        composer = Composer()
        for array in arrays.values():
            number = composer.array(array.nbytes)
            composer.sum_of(number)
        with reshard.open(tmp_path / "m.safetensors") as checkpoint:
            plan = checkpoint.plan(_request({"a": (n,), "b": (piece,)}))
            buffers = _core.Buffers(64 << 20)
            written = plan.write(str(tmp_path / "out"), container=composer.container(), buffers=buffers, durable=False)
        content = b"".join(
            array.tobytes() + zlib.crc32(array.tobytes()).to_bytes(4, "little") for array in arrays.values()
        )
        assert (tmp_path / "out").read_bytes() == content
        chunks = [_core.crc32c(content[at : at + (256 << 10)]) for at in range(0, len(content), 256 << 10)]
        assert written.checksums == b"".join(chunk.to_bytes(4, "little") for chunk in chunks)


def test_archives_above_4_gib_have_wide_fields() -> None:
    """The directory of an archive whose arrays are never made: sizes and positions beyond 32 bits, in zip64 fields."""
    n_bytes = (1 << 32) + 8
    literals, starts, sums = state_dict("m", [("a", "U8", (n_bytes,), n_bytes), ("b", "U8", (8,), 8)])
    assert [start % 64 for start in starts] == [0, 0]
    assert len(sums) == 4
    directory = literals.index(b"PK\x01\x02")
    entries = literals[directory:]
    wide_size = entries[entries.index(b"m/data/0") + 8 :]
    assert wide_size[:20] == b"\x01\x00\x10\x00" + 2 * n_bytes.to_bytes(8, "little")
    wide_start = entries[entries.index(b"m/data/1") + 8 :]
    assert wide_start[:4] == b"\x01\x00\x08\x00"
    assert (1 << 32) < int.from_bytes(wide_start[4:12], "little") < starts[1]


def _request(shapes: Mapping[str, tuple[int, ...]]) -> _core.Request:
    request = _core.Request()
    for name, shape in shapes.items():
        request.add_region(name, name, (0,) * len(shape), shape)
    return request
