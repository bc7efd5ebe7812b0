"""The binary table of `metadata.json`: it says what the file says, and nothing else is ever read from it."""

from __future__ import annotations

import ast
import json
import logging
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tests.formats.checkpoint2.records import models

import reshard
from reshard import _core
from reshard.commit import manifest as manifests
from reshard.commit import writer_mark
from reshard.errors import DamagedFileError, MismatchError, ReshardError
from reshard.formats.checkpoint2 import metadata, reader
from reshard.formats.checkpoint2.metadata import write_metadata
from reshard.formats.checkpoint2.shards import Records, assign, shards_of
from reshard.storage.location import locate

SAMPLES = Path(__file__).parents[2] / "data" / "mindspore"

if TYPE_CHECKING:
    from reshard._core import Mesh
    from reshard.formats.checkpoint2.shards import TensorRecord

TABLE = "metadata.bin"
LAYOUT = {"mesh": {"dp": 2, "tp": 2}, "rules": [{"match": "a*", "cut": ["tp", "dp"]}, {"match": "*", "cut": ["tp"]}]}
ARRAYS = {f"{name}{i}": np.arange(64.0, dtype=np.float32).reshape(8, 8) + i for i in range(3) for name in "ab"}


def contents(index: _core.Index) -> object:
    files = [Path(index.file_path(number)).name for number in range(index.n_files)]
    tensors = [
        (
            key,
            index.shape(key),
            index.shards(key),
            index.stored(key),
            index.metadata_layouts().get(key),
            index.metadata_dtype(key),
            index.holders(key),
        )
        for key in index.keys()  # noqa: SIM118  not a mapping
    ]
    return files, tensors


def text_of(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<I", len(data)) + data


def numbers_of(values: Any, form: str = "Q") -> bytes:
    return struct.pack(f"<I{len(values)}{form}", len(values), *values)


def count_of(parts: Any) -> bytes:
    parts = list(parts)
    return struct.pack("<I", len(parts)) + b"".join(parts)


def table_of(data: bytes, digest: str) -> bytes:
    """The oracle: the table of a metadata.json, from the parsed text."""
    content = json.loads(data)
    holders: dict[str, dict[int, list[str]]] = {}
    for name, entries in content["storage_data"].items():
        key, (offset,) = ast.literal_eval(name)
        holders.setdefault(key, {})[offset] = [entry["file_name"] for entry in entries]
    names = dict.fromkeys(
        name for of_key in holders.values() for of_cell in of_key.values() for name in of_cell
    )  # in the order of their first mention
    number_of = {name: number for number, name in enumerate(names)}
    layouts: dict[bytes, int] = {}
    distinct: dict[bytes, int] = {}
    tensors = []
    for key, tensor in content["state_dict_metadata"].items():
        layout, number = tensor["layout"], 0
        if layout is not None:
            axes = [one if isinstance(one, list) else [one] if one >= 0 else [] for one in layout["tensor_map"]]
            encoded = (
                numbers_of(layout["device_matrix"])
                + count_of(map(numbers_of, axes))
                + count_of(map(text_of, layout["alias_name"]))
                + numbers_of(layout["rank_list"])
            )
            number = layouts.setdefault(encoded, len(layouts)) + 1
        files = [sorted(number_of[name] for name in holders[key][cell]) for cell in sorted(holders[key])]
        starts = [sum(map(len, files[:cell])) for cell in range(len(files) + 1)]
        held = numbers_of(starts, "I") + numbers_of([one for of_cell in files for one in of_cell], "I")
        tensors.append(
            text_of(key)
            + text_of(tensor["properties"]["dtype"])
            + numbers_of(tensor["global_shape"])
            + numbers_of(tensor["axis_fragmentations"])
            + struct.pack("<II", number, distinct.setdefault(held, len(distinct)))
        )
    return b"RSMETA01" + text_of(digest) + b"".join(map(count_of, (map(text_of, names), layouts, distinct, tensors)))


def both(data: bytes) -> tuple[_core.Index, _core.Index]:
    table = table_of(data, "d")
    return _core.Index.from_metadata("metadata.json", data=data), _core.Index.from_metadata_table(TABLE, table, "d")


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("**/metadata.json")), ids=lambda path: path.parts[-3])
def test_the_table_of_a_file_of_the_original_has_its_content(path: Path) -> None:
    from_text, from_table = both(path.read_bytes())
    assert contents(from_table) == contents(from_text)


@settings(max_examples=40)
@given(model=models(), dedup=st.booleans())
def test_the_table_of_any_file_has_its_content(
    *, model: tuple[Mesh, list[TensorRecord]], dedup: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    mesh, records = model
    records = [record for record in records if metadata.inexpressible(record, mesh) is None]
    path = tmp_path_factory.mktemp("one") / "metadata.json"
    plan = assign(shards_of(records, mesh), mesh.ranks, dedup=dedup)
    with mock.patch.object(metadata, "MIN_TABLE_BYTES", 0):
        entry, table, _ = write_metadata(locate(path), Records.of(records), mesh, plan, durable=False)
    data = path.read_bytes()
    assert entry == manifests.PlainEntry(len(data), manifests.digest_of(data))
    from_text, from_table = both(data)
    assert contents(from_table) == contents(from_text)
    assert table == table_of(data, manifests.digest_of(data))
    assert write_metadata(locate(path), Records.of(records), mesh, plan, durable=False).table is None


def sample() -> bytes:
    return (SAMPLES / "ckpt2_named/checkpoint/iteration_00000007/metadata.json").read_bytes()


def test_tensors_of_one_layout_share_its_record() -> None:
    for index in both(sample()):
        layouts = index.metadata_layouts().values()
        assert len(layouts) > len(set(map(id, layouts))) == len(set(map(repr, layouts)))


def test_a_truncated_or_extended_table_is_refused() -> None:
    table = table_of(sample(), "d")
    for damaged in [table[:n] for n in range(len(table))] + [table + b"\0"]:
        with pytest.raises(DamagedFileError):
            _core.Index.from_metadata_table(TABLE, damaged, "d")


def test_tensors_that_share_a_long_list_of_holders_are_bounded() -> None:
    """A table of 5 MB that stands for 2 * 10^8 shards."""

    n_cells, n_tensors = 1 << 19, 400
    table = b"RSMETA01" + text_of("d") + struct.pack("<I", 1) + text_of("a.safetensors")
    lists = [struct.pack("<I", 1), struct.pack("<Q", n_cells), struct.pack("<II", 1, 1), struct.pack("<Q", 0)]
    ranks = struct.pack("<I", n_cells) + np.arange(n_cells, dtype="<u8").tobytes()
    table += struct.pack("<I", 1) + b"".join(lists) + struct.pack("<I", 1) + text_of("tp") + ranks
    starts = struct.pack("<I", n_cells + 1) + np.arange(n_cells + 1, dtype="<u4").tobytes()
    table += struct.pack("<I", 1) + starts + struct.pack("<I", n_cells) + bytes(4 * n_cells)
    numbers = struct.pack("<IQIQ", 1, n_cells, 1, n_cells)
    tensors = [text_of(f"w{i}") + text_of("Float32") + numbers + struct.pack("<II", 1, 0) for i in range(n_tensors)]
    table += struct.pack("<I", n_tensors) + b"".join(tensors)
    with pytest.raises(DamagedFileError, match="more than 134217728 holders"):
        _core.Index.from_metadata_table(TABLE, table, "d")


@settings(max_examples=300)
@given(at=st.integers(0, 1 << 20), value=st.sampled_from([0, 1, 2, 0x7F, 0x80, 0xFF]), width=st.sampled_from([1, 4]))
def test_an_altered_table_is_refused_or_read_without_a_crash(at: int, value: int, width: int) -> None:
    table = bytearray(table_of(sample(), "d"))
    at %= len(table) - width
    table[at : at + width] = bytes([value]) * width
    try:
        index = _core.Index.from_metadata_table(TABLE, bytes(table), "d")
    except ReshardError:
        return
    index.check_coverage()
    contents(index)


def test_the_table_of_another_file_is_refused() -> None:
    with pytest.raises(DamagedFileError, match=r"expected [0-9a-f]+"):
        _core.Index.from_metadata_table(TABLE, table_of(sample(), "d"), "e")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An iteration with a table, whose metadata.json is small."""
    monkeypatch.setattr(metadata, "MIN_TABLE_BYTES", 0)
    monkeypatch.setattr(reader, "_MAX_PARSED", 1)
    reshard.save_file(ARRAYS, tmp_path / "m.safetensors")
    reshard.convert(tmp_path / "m.safetensors", tmp_path / "run", layout=LAYOUT, iteration=1)
    return tmp_path / "run" / "iteration_00000001"


def assert_loads(folder: Path) -> None:
    with reshard.open(folder) as checkpoint:
        found = checkpoint.load()
        assert checkpoint.keys() == list(found)
    assert found.keys() == ARRAYS.keys()
    for key, array in found.items():
        np.testing.assert_array_equal(array, ARRAYS[key])


def test_a_checkpoint_is_read_by_its_table_alone(folder: Path) -> None:
    assert TABLE in manifests.read(locate(folder)).files
    (folder / "metadata.json").write_bytes(b"?" * (folder / "metadata.json").stat().st_size)
    assert_loads(folder)
    assert "metadata.json" in str(reshard.verify(folder))


def test_an_altered_table_is_replaced_by_the_file_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = bytearray((folder / TABLE).read_bytes())
    data[-1] ^= 1
    (folder / TABLE).write_bytes(data)
    with caplog.at_level(logging.WARNING, logger="reshard"):
        assert_loads(folder)
    assert "metadata.bin` was altered" in caplog.text
    assert "metadata.json is read instead" in caplog.text


def test_a_table_that_the_manifest_lists_for_another_file_is_refused(folder: Path) -> None:
    """Stale: the digest in the manifest is that of the table, but the table was made from another metadata.json."""
    text = (folder / "metadata.json").read_bytes()
    (folder / TABLE).write_bytes(table_of(text + b"\n", manifests.digest_of(text + b"\n")))
    manifest = manifests.read(locate(folder))
    files = {**manifest.files, TABLE: manifests.plain_entry(locate(folder), TABLE)}
    manifests.write(locate(folder), replace(manifest, files=files, digest=""))
    with pytest.raises(DamagedFileError, match=r"expected [0-9a-f]+"):
        reshard.open(folder)


def test_a_table_without_entry_in_the_manifest_is_ignored(folder: Path) -> None:
    manifest = manifests.read(locate(folder))
    files = {name: entry for name, entry in manifest.files.items() if name != TABLE}
    manifests.write(locate(folder), replace(manifest, files=files, digest=""))
    (folder / TABLE).write_bytes(b"?")
    assert_loads(folder)


def test_a_header_that_no_load_needs_is_compared_when_the_folder_is_opened(folder: Path) -> None:
    name = max(manifests.read(locate(folder)).shards)
    data = bytearray((folder / name).read_bytes())
    data[20] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(DamagedFileError, match=f"{name}: the header differs"):
        reshard.open(folder)


def test_files_that_hold_more_than_is_described_are_parsed(folder: Path) -> None:
    def opened() -> _core.Index:
        index = _core.Index.from_metadata(str(folder / "metadata.json"))
        for number in range(index.n_files):
            data = Path(index.file_path(number)).read_bytes()
            n = 8 + int.from_bytes(data[:8], "little")
            checksums = _core.crc32c(data).to_bytes(4, "little")
            index.set_checksums(number, len(data), n, _core.crc32c(data[:n]), checksums)
        return index

    index = opened()
    assert index.check_headers() == index.check() == []
    path = Path(index.file_path(1))
    save_file({**load_file(path), "more": np.zeros(2, np.uint8)}, path)
    assert opened().check_headers() == [(1, "more")]


@pytest.fixture
def original(folder: Path) -> Path:
    return as_of_others(folder)


def as_of_others(folder: Path) -> Path:
    """The iteration as others would have written it: without a manifest, a table and a mark."""
    for name in ("manifest.json", "checksums.bin", TABLE, ".tracked"):
        (folder / name).unlink(missing_ok=True)
    for path in folder.glob("*.safetensors"):
        save_file(load_file(path), path)
        path.write_bytes(path.read_bytes().replace(writer_mark.SPELT, b'"another"'))
    return folder


def is_checked(folder: Path, n_parsed: int, monkeypatch: pytest.MonkeyPatch) -> object:
    """The tensors of a folder when that many headers are parsed at once, or the fault."""
    monkeypatch.setattr(reader, "_MAX_PARSED", n_parsed)
    try:
        with reshard.open(folder) as checkpoint:
            return {key: array.tobytes() for key, array in checkpoint.load().items()}
    except ReshardError as error:
        return type(error), error.message


@pytest.mark.parametrize("case", ["as it is", "extra", "equal extra", "shorter", "longer", "dtype", "missing", "empty"])
def test_files_are_checked_alike_whether_all_headers_are_parsed_or_few(
    case: str, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = sorted(original.glob("*.safetensors"))
    data = paths[-1].read_bytes()
    if case == "extra":
        save_file({**load_file(paths[-1]), "global_step": np.array([7], np.int32)}, paths[-1])
    elif case == "equal extra":
        for path in paths:
            save_file({**load_file(path), "global_step": np.array([7], np.int32)}, path)
    elif case == "shorter":
        paths[-1].write_bytes(data[:-1])
    elif case == "longer":
        paths[-1].write_bytes(data + b"?")
    elif case == "dtype":
        arrays = load_file(paths[-1])
        save_file({key: array.view(np.uint8) for key, array in arrays.items()}, paths[-1])
    elif case == "missing":
        paths[-1].unlink()
    elif case == "empty":
        paths[-1].write_bytes(b"")
    found = is_checked(original, 1, monkeypatch)
    assert found == is_checked(original, 10**6, monkeypatch)
    assert isinstance(found, dict) == (case in ("as it is", "extra", "equal extra"))
    assert case != "as it is" or {key: array.tobytes() for key, array in ARRAYS.items()} == found


def test_headers_of_full_files_are_parsed_when_they_are_used(original: Path) -> None:
    path = max(original.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[8:9] = b"?"
    path.write_bytes(data)
    with reshard.open(original) as checkpoint:
        assert len(checkpoint.keys()) == len(ARRAYS)
        with pytest.raises(DamagedFileError, match=path.name):
            checkpoint.load()
    assert path.name in str(reshard.verify(original))


def test_a_full_file_that_is_replaced_before_it_is_used_is_noticed(original: Path) -> None:
    path = max(original.glob("*.safetensors"))
    with reshard.open(original) as checkpoint:
        other = path.with_suffix(".other")
        other.write_bytes(path.read_bytes())
        other.replace(path)
        with pytest.raises(MismatchError, match=f"{path.name}. changed while it was read"):
            checkpoint.load()


def test_what_removes_or_returns_to_an_iteration_has_compared_all_its_files(original: Path) -> None:
    """A folder of many files is opened without parsing all headers: that is not enough to remove another one."""
    root = original.parent
    newer = root / "iteration_00000002"
    shutil.copytree(original, newer)
    path = max(newer.glob("*.safetensors"))
    save_file({key: array.view(np.int32) for key, array in load_file(path).items()}, path)
    assert reshard.prune(root, keep=1, dry_run=True).iterations == ()
    with pytest.raises(MismatchError, match=path.name):
        reshard.rollback(root, 2, verify=False, dry_run=True)
    (found,) = reshard.verify(newer).checkpoints
    assert [fault.file for fault in found.faults] == [path.name]
    assert reshard.rollback(root, 1, verify=False, dry_run=True).iteration == 1


def test_a_comparison_of_the_model_opens_no_file_of_the_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_MAX_PARSED", 1)
    moments = {f"adam_m.{key}": array for key, array in ARRAYS.items()}
    folders = []
    for name in ("left", "right"):
        reshard.save(tmp_path / name, 1, ARRAYS, moments, commit={"durable": False})
        folders.append(as_of_others(tmp_path / name / "iteration_00000001"))
    (path,) = folders[1].glob("*opt*.safetensors")
    data = bytearray(path.read_bytes())
    data[8:9] = b"?"
    path.write_bytes(data)
    assert reshard.diff(*folders, part="model").n_equal == len(ARRAYS)
    with pytest.raises(DamagedFileError, match=path.name):
        reshard.diff(*folders)


@pytest.mark.parametrize("marked", [0, -1])
def test_one_marked_file_of_many_makes_an_unfinished_save(marked: int, original: Path) -> None:
    path = sorted(original.glob("*.safetensors"))[marked]
    save_file(load_file(path), path, metadata=writer_mark.MARK)
    with pytest.raises(DamagedFileError, match=f"This package wrote .{path.name}"):
        reshard.open(original)


@pytest.mark.parametrize("text", [b'"reshard"', b'"k"'])
@pytest.mark.parametrize("at", [0, (256 << 10) - 9, (256 << 10) - 1, 256 << 10, 300_000, None])
def test_a_text_is_found_wherever_it_lies_in_a_header(text: bytes, at: int | None, tmp_path: Path) -> None:
    header = bytearray(b" " * (600 << 10))
    if at is not None:
        header[at : at + len(text)] = text
    index = _core.Index()
    for name, data in (
        ("in", len(header).to_bytes(8, "little") + header + b"data"),
        ("data", (4).to_bytes(8, "little") + b"    " + header),
        ("short", b"\0"),
        ("endless", bytes([255]) * 8 + text),
    ):
        (tmp_path / name).write_bytes(data)
        index.add_file(str(tmp_path / name))
    index.add_file(str(tmp_path / "missing"))
    assert index.headers_with(text) == ([] if at is None else [0])


def test_a_tensor_that_a_table_lists_twice_is_refused() -> None:
    name, holders = text_of("w"), numbers_of([0, 1], "I") + numbers_of([0], "I")
    tensor = name + text_of("Float32") + numbers_of([4]) + numbers_of([1]) + struct.pack("<II", 0, 0)
    parts: tuple[list[bytes], ...] = ([text_of("a.safetensors")], [], [holders], [tensor])
    assert _core.Index.from_metadata_table(TABLE, table_with(*parts), "d").keys() == ["w"]
    with pytest.raises(DamagedFileError, match="`w` is stored twice"):
        _core.Index.from_metadata_table(TABLE, table_with(*parts[:3], [tensor, tensor]), "d")


def table_with(*lists: list[bytes]) -> bytes:
    parts = (struct.pack("<I", len(parts)) + b"".join(parts) for parts in lists)
    return b"RSMETA01" + text_of("d") + b"".join(parts)


@pytest.mark.slow(disk=False)
def test_headers_that_are_read_beside_a_large_table_are_verified(tmp_path: Path) -> None:
    arrays = {f"model.layers.{i}.a_long_name_of_a_weight": np.full(2, i, np.int16) for i in range(15_000)}
    layout = {"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}]}
    source = tmp_path / "a.safetensors"
    save_file(arrays, source)
    root = tmp_path / "root"
    folder = Path(reshard.convert(source, root, layout=layout, to="checkpoint2", commit={"durable": False}).path)
    assert (folder / TABLE).stat().st_size > 1 << 20
    with reshard.open(folder) as checkpoint:
        assert all(np.array_equal(checkpoint.read(key), arrays[key]) for key in list(arrays)[::1000])
    one, _ = sorted(folder.glob("*.safetensors"))
    content = one.read_bytes()
    at = content.index(b"a_long_name")
    for damaged, message in (
        (content[:at] + b"b" + content[at + 1 :], "the header differs"),
        (content[:8] + b"[" + content[9:], "the header differs"),
        (content[:-1], "bytes"),
        (b"", "bytes"),
    ):
        one.write_bytes(damaged)
        with pytest.raises(DamagedFileError, match=message):
            reshard.open(folder)
    one.write_bytes(content)
    reshard.open(folder).close()
