"""`.ckpt` files: the result equals that of MindSpore's converter, damaged files are refused, memory is limited."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps
from safetensors.numpy import save_file
from tests.helpers.ckpt_files import dump, field, text, value, varint

import reshard
from reshard import _core
from reshard.cli import main
from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    DamagedFileError,
    DestinationExistsError,
    KeyNotFoundError,
    ReshardError,
    UnsupportedError,
)
from reshard.formats.rank_file import add_rank_file, kind_of, placed

if TYPE_CHECKING:
    from collections.abc import Mapping

DATA = Path(__file__).parents[2] / "data" / "mindspore" / "ckpt"
W = np.arange(12, dtype=np.float32).reshape(4, 3)


def load(path: Path, **options: object) -> dict[str, np.ndarray]:
    with reshard.open(path) as opened:
        return opened.load(**options)  # type: ignore[arg-type]


def check_equal(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        assert (found[key].dtype, found[key].shape) == (array.dtype, array.shape), key
        assert found[key].tobytes() == array.tobytes(), key


def listed(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def file_of(folder: Path, content: bytes, name: str = "x.ckpt") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


# -- what the original wrote


@pytest.mark.parametrize("name", ["dtypes", "split_bytes", "split_rows"])
def test_reads_what_the_original_converts(name: str) -> None:
    expected = load(DATA / f"{name}.safetensors")
    with reshard.open(DATA / f"{name}.ckpt") as opened:
        assert (opened.format, opened.verified, opened.strings) == ("ckpt", False, ())
        check_equal(opened.load(), expected)
        for key, array in expected.items():
            if array.ndim:
                window = (slice(1, None),) + (slice(0, 2),) * (array.ndim - 1)
                np.testing.assert_array_equal(opened.read(key, window), array[window])


def test_a_split_tensor_is_cut_by_a_layout() -> None:
    layout = {"mesh": {"tp": 2}, "rules": [{"match": "t.big_bf16", "cut": [None, "tp"]}, {"match": "*"}]}
    big = load(DATA / "split_rows.safetensors")["t.big_bf16"]
    with reshard.open(DATA / "split_rows.ckpt") as opened:
        for rank in range(2):
            own = opened.load(layout, rank=rank)["t.big_bf16"]
            assert own.tobytes() == big[:, 32 * rank : 32 * (rank + 1)].tobytes()


def test_text_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), reshard.open(DATA / "with_string.ckpt") as opened:
        assert opened.strings == ("note",)
        assert opened.keys() == ["t.float32", "t.float16", "epoch_num"]
        with pytest.raises(KeyNotFoundError):
            opened.read("note")
    assert "`note`" in caplog.text
    shown = json.loads(CliRunner().invoke(main, ["inspect", "--json", str(DATA / "with_string.ckpt")]).output)
    assert shown["strings"] == ["note"]
    assert "note" in CliRunner().invoke(main, ["inspect", str(DATA / "with_string.ckpt")]).output


def test_the_crc_is_compared_once_and_by_verify(tmp_path: Path) -> None:
    data = bytearray((DATA / "dtypes_crc.ckpt").read_bytes())
    check_equal(load(file_of(tmp_path, bytes(data))), load(DATA / "dtypes.safetensors"))
    report = reshard.verify(tmp_path / "x.ckpt")
    assert (report.ok, report.checkpoints[0].verified, report.n_bytes) == (True, True, len(data))
    assert not reshard.verify(DATA / "dtypes.ckpt").checkpoints[0].verified
    data[data.index(b"Float32\x1a") + 12] ^= 1  # one bit of a number
    path = file_of(tmp_path, bytes(data))
    with reshard.open(path) as opened:
        for options in ({}, {"copy": False}, {"verify": "full"}):
            with pytest.raises(DamagedFileError, match="CRC"):
                opened.load(**options)
        with pytest.raises(DamagedFileError, match="CRC"):
            opened.read("flag")
        with pytest.raises(DamagedFileError, match="CRC"):
            opened.scrub()
        assert len(opened.load(verify="structure")) == 16
    with pytest.raises(DamagedFileError, match="CRC"):
        reshard.convert(path, tmp_path / "out.safetensors")
    assert listed(tmp_path) == ["x.ckpt"]
    damaged = reshard.verify(path)
    assert not damaged.ok
    assert "CRC" in damaged.checkpoints[0].faults[0].message
    assert CliRunner().invoke(main, ["verify", str(path)]).exit_code == 1


def test_a_scalar_of_an_older_writer(tmp_path: Path) -> None:
    path = file_of(tmp_path, value("n", "Int64", [0], (7).to_bytes(8, "little")) + value("e", "Int64", [0], b""))
    check_equal(load(path), {"n": np.array(7), "e": np.zeros(0, np.int64)})


# -- files made here


@pytest.mark.slow(disk=False)
@settings(max_examples=60)
@given(
    arrays=st.dictionaries(
        st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=12),
        st.sampled_from(["float32", "int64", "uint8", "bool", "float16"]).flatmap(
            lambda dtype: nps.arrays(dtype, nps.array_shapes(min_dims=0, max_dims=3, max_side=5))
        ),
        min_size=1,
        max_size=5,
    ),
    record_bytes=st.sampled_from([None, 8, 16, 64]),
    crc=st.booleans(),
)
def test_what_is_written_is_read_and_converted(
    tmp_path_factory: pytest.TempPathFactory, arrays: dict[str, np.ndarray], record_bytes: int | None, *, crc: bool
) -> None:
    folder = tmp_path_factory.mktemp("any")
    path = file_of(folder, dump(arrays, record_bytes=record_bytes, crc=crc))
    check_equal(load(path), arrays)
    report = reshard.convert_files(path)
    assert [file.path for file in report.files] == [str(folder / "x.safetensors")]
    check_equal(load(folder / "x.safetensors"), arrays)


HOSTILE = {
    "empty": (b"", DamagedFileError, "is empty"),
    "zeros": (bytes(4096), DamagedFileError, "begins with 0x00"),
    "noise": (bytes(range(255, 0, -1)), DamagedFileError, "begins with 0xff"),
    "strategy": (b"\x08\x01\x1a\x02\x0a\x00", DamagedFileError, "strategy file"),
    "truncated": (dump({"w": W})[:-1], DamagedFileError, "truncated"),
    "extended": (dump({"w": W}) + b"\0", DamagedFileError, "appended"),
    "a length of 2**62": (b"\x0a" + b"\xff" * 8 + b"\x3f" + dump({"w": W}), DamagedFileError, "truncated"),
    "Int4": (value("w", "Int4", [2], b"\0"), UnsupportedError, "`w`: its type is `Int4`"),
    "hash table": (field(1, field(1, b"t") + field(3, b"")), UnsupportedError, "`t`: it is a hash table"),
    "a bomb of extents": (value("w", "Int8", [1 << 62] * 3, b"x"), DamagedFileError, "overflows"),
    "the same tensor twice": (dump({"w": W, "v": W}) + dump({"w": W}), DamagedFileError, "`w` occurs twice"),
    "a terminal's commands": (value("\x1b[2Jw", "Int8", [1], b"x"), DamagedFileError, "control character"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused(case: str, tmp_path: Path) -> None:
    content, kind, message = HOSTILE[case]
    path = file_of(tmp_path, content)
    for act in (
        lambda: reshard.open(path),
        lambda: add_rank_file(_core.Index(), path),
        lambda: reshard.convert_files(path, tmp_path / "out"),
    ):
        with pytest.raises(kind) as caught:
            act()
        assert message in str(caught.value)
        assert caught.value.path == str(path)
        assert "\x1b" not in str(caught.value)
    assert listed(tmp_path) == ["x.ckpt"]
    told = json.loads(CliRunner().invoke(main, ["inspect", "--json", str(path)]).output)
    assert told["error"] == kind.__name__
    assert not reshard.verify(path).ok


@pytest.mark.parametrize("kind", ["folder", "pipe", "dangling link", "nothing"])
def test_what_is_no_file_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "dangling link":
        path.symlink_to("elsewhere")
    with pytest.raises(ReshardError):
        add_rank_file(_core.Index(), path)
    with pytest.raises(ReshardError):
        reshard.open(path)


def test_a_file_larger_than_memory_is_opened_and_sliced(tmp_path: Path) -> None:
    n_rows, row = 1 << 20, 1 << 18  # 256 GiB, of holes
    path = tmp_path / "big.ckpt"
    inner = b"\x08" + varint(n_rows) + b"\x08" + varint(row) + field(2, b"UInt8") + b"\x1a" + varint(n_rows * row)
    tensor = b"\x12" + varint(len(inner) + n_rows * row) + inner
    head = field(1, b"big") + tensor
    with path.open("wb") as file:
        start = file.write(b"\x0a" + varint(len(head) + n_rows * row) + head)
        try:
            file.seek(start + 5 * row + 7)
            file.write(b"\x2a")
            file.truncate(start + n_rows * row)
        except OSError:
            pytest.skip("no files of this size here")
    code = (
        "import sys, reshard\n"
        "import numpy as np\n"
        "def peak():  # of this program; `getrusage` also counts the process that has started it\n"
        "    return next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "before = peak()\n"
        "opened = reshard.open(sys.argv[1])\n"
        "assert opened.read('big', (slice(5, 7), slice(7, 9))).tolist() == [[42, 0], [0, 0]]\n"
        "print(peak() - before)\n"
    )
    run = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True)
    assert int(run.stdout) < 64 << 10  # KiB


# -- which format a file has


def test_the_format_is_told_by_content(tmp_path: Path) -> None:
    reshard.save_file({"w": W}, tmp_path / "weights.ckpt")
    assert kind_of(tmp_path / "weights.ckpt") == "safetensors"
    check_equal(load(tmp_path / "weights.ckpt"), {"w": W})
    path = file_of(tmp_path, dump({"w": W}), "weights.safetensors")
    assert kind_of(path) == "ckpt"
    check_equal(load(path), {"w": W})
    # Of what is neither the suffix decides whose errors are told.
    assert kind_of(file_of(tmp_path, b"", "empty.ckpt")) == "ckpt"
    assert kind_of(file_of(tmp_path, b"", "empty.safetensors")) == "safetensors"
    # A header of 10 bytes, or of 10 + 256 n, begins like a value.
    json_text = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.ljust(256 + 10)
    path = file_of(tmp_path, len(json_text).to_bytes(8, "little") + json_text + b"\5", "ten.safetensors")
    assert kind_of(path) == "safetensors"
    check_equal(load(path), {"w": np.array([5], np.uint8)})


def test_arrays_of_several_ranks_are_one_tensor(tmp_path: Path) -> None:
    whole = np.arange(48, dtype=np.int32).reshape(4, 12)
    reshard.save_file({"w": whole[:2]}, tmp_path / "0.safetensors")
    file_of(tmp_path, dump({"w": whole[2:]}, record_bytes=20) + text("s", "x"), "1.ckpt")
    index = _core.Index()
    files = [add_rank_file(index, tmp_path / name) for name in ("0.safetensors", "1.ckpt")]
    assert [(file.kind, file.strings, len(file.tensors["w"].parts)) for file in files] == [
        ("safetensors", (), 1),
        ("ckpt", ("s",), 5),
    ]
    index.add_tiles("w", "I32", whole.shape, placed(files[0], "w", (0, 0)) + placed(files[1], "w", (2, 0)))
    index.check_coverage()
    assert index.check() == []
    request = _core.Request()
    request.add_region("w", "w", (1, 3), (3, 7))
    buffer, start = index.plan(request).load()[0]
    found = np.frombuffer(memoryview(buffer), np.int32, 21, start).reshape(3, 7)
    np.testing.assert_array_equal(found, whole[1:, 3:10])
    with pytest.raises(KeyNotFoundError, match="does not hold"):
        placed(files[0], "v", (0, 0))
    with pytest.raises(DamagedFileError, match=r"has shape \(2, 12\)"):
        placed(files[0], "w", (0,))


@pytest.mark.parametrize("content", [b"", bytes(100), b"\x10\0\0\0\0\0\0\0{}", b"{}", b"\x02\0\0\0\0\0\0\0{}\0"])
def test_damaged_safetensors_of_a_rank_are_told(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(DamagedFileError):
        add_rank_file(_core.Index(), file_of(tmp_path, content, "x.safetensors"))


# -- what is stored where


@pytest.mark.parametrize("name", ["split_rows.ckpt", "dtypes.safetensors", "../ckpt2/checkpoint", "../full_hf"])
def test_stored_is_what_add_tiles_takes(name: str) -> None:
    with reshard.open(DATA / name) as opened:
        index, again = opened._index, _core.Index()
        for file in range(index.n_files):
            add = again.add_ckpt_file if name.endswith(".ckpt") else again.add_file
            add(index.file_path(file))
        for key in opened.keys():  # noqa: SIM118  a list in the order of the checkpoint
            dtype, shape = index.info(key)
            stored = index.stored(key)
            assert sorted({file for file, *_ in stored}) == index.holders(key)
            again.add_tiles(key, dtype, shape, stored)
        again.check_coverage()
        unlisted = index.check()
        assert again.check() == unlisted
        request = _core.Request()
        for key in opened.keys():  # noqa: SIM118
            shape = again.shape(key)
            request.add_region(key, key, (0,) * len(shape), shape)
        plan = again.plan(request)
        expected = opened.load()
        for (key, _, _, n_bytes), (buffer, start) in zip(plan.arrays, plan.load(), strict=True):
            assert memoryview(buffer)[start : start + n_bytes].tobytes() == expected[key].tobytes()


# -- conversion


def test_convert_to_one_safetensors_file(tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    result = CliRunner().invoke(main, ["convert", str(DATA / "with_string.ckpt"), str(out)])
    assert result.exit_code == 0, result.output
    assert "`note`" in result.stderr
    expected = load(DATA / "dtypes.safetensors")
    found = load(out)
    assert list(found) == ["t.float32", "t.float16", "epoch_num"]
    assert found["t.float32"].tobytes() == expected["t.float32"].tobytes()
    reshard.convert(DATA / "split_bytes.ckpt", tmp_path / "hf", files={"max_shard_size": "4KiB"})
    check_equal(load(tmp_path / "hf"), load(DATA / "split_bytes.safetensors"))


def test_a_tree_is_mirrored_under_other_names_as_the_original_does(tmp_path: Path) -> None:
    names = tmp_path / "names.json"
    names.write_text('{"w": "renamed.w"}')
    result = CliRunner().invoke(
        main, ["convert-files", str(DATA / "tree"), str(tmp_path / "out"), "--name-map", str(names), "--json"]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert [(Path(file["path"]).parent.name, file["n_tensors"]) for file in report["files"]] == [
        ("rank_0", 1),
        ("rank_1", 1),
    ]
    theirs = sorted((DATA / "tree_safetensors").rglob("*.safetensors"))
    for path in theirs:
        mirrored = tmp_path / "out" / path.relative_to(DATA / "tree_safetensors")
        check_equal(load(mirrored), load(path))
    assert len(list((tmp_path / "out").rglob("*"))) == 4


def tree(folder: Path) -> Path:
    for rank in (0, 2, 10):
        (folder / f"rank_{rank}").mkdir(parents=True)
        for step in (1, 2):
            file_of(
                folder / f"rank_{rank}", dump({"w": W + rank, "step": np.array(step)}), f"m_rank_{rank}-1_{step}.ckpt"
            )
    (folder / "other").mkdir()
    file_of(folder / "other", b"never read", "x.ckpt")
    file_of(folder, dump({"top": W}), "top.ckpt")
    file_of(folder, b"", "meta.json")
    return folder


def names_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.safetensors"))


def test_a_source_is_not_its_own_destination(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    reshard.save_file({"w": np.zeros(4)}, path, metadata={"format": "pt"})
    before = path.read_bytes()
    (tmp_path / "link").symlink_to(tmp_path)
    for target in (None, tmp_path, path, tmp_path / "link"):
        with pytest.raises(ArgumentError, match=r"model.safetensors` is a safetensors file already"):
            reshard.convert_files(path, target, overwrite=True)
    assert path.read_bytes() == before


def test_files_of_a_tree_are_chosen(tmp_path: Path) -> None:
    source = tree(tmp_path / "src")
    report = reshard.convert_files(source, tmp_path / "all", name_map={"absent": "x"})
    assert [Path(file.path).name for file in report.files][:3] == [
        "top.safetensors",
        "m_rank_0-1_1.safetensors",
        "m_rank_0-1_2.safetensors",
    ]
    assert len(report.files) == 7
    assert report.n_bytes == sum((tmp_path / "all" / name).stat().st_size for name in names_of(tmp_path / "all"))
    assert report.warnings == ("the name map has names that are in no file: `absent`",)
    reshard.convert_files(source, tmp_path / "some", name_regex=r"_1\.ckpt$")
    assert names_of(tmp_path / "some") == [f"rank_{r}/m_rank_{r}-1_1.safetensors" for r in (0, 10, 2)]
    check_equal(load(tmp_path / "some" / names_of(tmp_path / "some")[1]), {"w": W + 10, "step": np.array(1)})
    with pytest.raises(CheckpointNotFoundError, match="whose name matches"):
        reshard.convert_files(source, tmp_path / "none", name_regex="zzz")
    with pytest.raises(ArgumentError, match=r"not a regular expression: .* unclosed group"):
        reshard.convert_files(source, tmp_path / "none", name_regex="(")
    with pytest.raises(CheckpointNotFoundError, match=r"hold no \.ckpt file"):
        reshard.convert_files(tmp_path / "all", tmp_path / "none")
    with pytest.raises(CheckpointNotFoundError):
        reshard.convert_files(tmp_path / "nothing", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_nothing_is_written_where_one_source_is_damaged_or_one_file_is_there(tmp_path: Path) -> None:
    source = tree(tmp_path / "src")
    reshard.convert_files(source)
    assert len(names_of(source)) == 7
    with pytest.raises(DestinationExistsError, match="and 6 more"):
        reshard.convert_files(source)
    before = (source / "top.safetensors").stat().st_ino
    reshard.convert_files(source, overwrite=True)
    assert (source / "top.safetensors").stat().st_ino != before
    last = source / "rank_10" / "m_rank_10-1_2.ckpt"
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(DamagedFileError) as caught:
        reshard.convert_files(source, tmp_path / "out")
    assert caught.value.path == str(last)
    assert not (tmp_path / "out").exists()


def test_a_converted_run_can_be_resumed_from(tmp_path: Path) -> None:
    source = DATA.parent / "ckpt1_pb" / "output" / "checkpoint"
    reshard.convert_files(source, tmp_path / "out", name_regex="-(10|20)_2")
    for rank in range(4):
        folder = tmp_path / "out" / f"rank_{rank}"
        names = [f"old_rank_{rank}-{n}_2.safetensors" for n in (10, 20)]
        assert listed(folder) == ["meta.json", *names]
        old, new = (json.loads((one / "meta.json").read_text()) for one in (source / folder.name, folder))
        assert new == {**old, "last_ckpt_file": f"old_rank_{rank}-20_2.safetensors"}
    with reshard.open(source) as before, reshard.open(tmp_path / "out") as after:
        assert before.iteration == after.iteration == 40
        for rank in range(4):
            check_equal(after.stored(rank), before.stored(rank))
    # Where meta.json names a file that was not converted, none is written.
    reshard.convert_files(source, tmp_path / "older", name_regex="-10_2")
    assert listed(tmp_path / "older" / "rank_0") == ["old_rank_0-10_2.safetensors"]


def test_rank_folders_of_ckpt_files_are_one_checkpoint(tmp_path: Path) -> None:
    data = DATA.parent / "strategy"
    for path in sorted((data / "src_rank_slices").rglob("*.safetensors")):
        (tmp_path / "root" / path.parent.name).mkdir(parents=True)
        content = dump(load(path), record_bytes=24)
        content += text("note", "of this rank")
        content += b"crc_num" + zlib.crc32(content).to_bytes(10, "big")
        file_of(tmp_path / "root" / path.parent.name, content, f"{path.stem}.ckpt")
    expected = load(data / "expected_full.safetensors")
    with reshard.open(tmp_path / "root", strategy=data / "src_strategy") as opened:
        found = opened.load()
        check_equal({key: found[key] for key in expected}, expected)
        assert opened.strings == ("note",)
    assert reshard.verify(tmp_path / "root").checkpoints[0].verified
    path = next((tmp_path / "root" / "rank_3").iterdir())
    damaged = bytearray(path.read_bytes())
    damaged[-18 - len(text("note", "of this rank"))] ^= 1  # in the content of the last tensor
    path.write_bytes(damaged)
    report = reshard.verify(tmp_path / "root")
    assert [fault.file for one in report.checkpoints for fault in one.faults] == ["rank_3/" + path.name]
    with reshard.open(tmp_path / "root", strategy=data / "src_strategy") as opened:
        with pytest.raises(DamagedFileError, match=r"rank_3.*CRC"):
            opened.stored(3)
        with pytest.raises(DamagedFileError, match=r"rank_3.*CRC"):
            reshard.convert(tmp_path / "root", tmp_path / "hf", strategy=data / "src_strategy")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("name_map", "message"),
    [
        ({"w": "step"}, "would both be named `step`"),
        ({"w": ""}, "is empty"),
        ({"w": 1}, "must be text"),
        ({1: "w"}, "must be text"),
        ({"w": "a\ud800"}, "cannot be encoded as UTF-8"),
        (["w"], "of type list"),
    ],
)
def test_name_maps_that_cannot_be_meant(name_map: object, message: str, tmp_path: Path) -> None:
    path = file_of(tmp_path, dump({"w": W, "step": np.array(1)}))
    with pytest.raises(ArgumentError, match=message):
        reshard.convert_files(path, tmp_path / "out", name_map=name_map)  # type: ignore[arg-type]
    assert listed(tmp_path) == ["x.ckpt"]


def test_names_are_swapped(tmp_path: Path) -> None:
    path = file_of(tmp_path, dump({"a": W, "b": W[0]}, record_bytes=20))
    (tmp_path / "names.yaml").write_text("a: b\nb: a\n")
    report = reshard.convert_files(path, tmp_path / "new" / "y.safetensors", name_map=tmp_path / "names.yaml")
    check_equal(load(Path(report.files[0].path)), {"b": W, "a": W[0]})


def test_int4_in_safetensors_is_refused_as_in_ckpt(tmp_path: Path) -> None:
    """MindSpore packs two elements in each byte of an I8 array, and records that in the metadata."""
    folder = tmp_path / "ranks" / "rank_0"
    folder.mkdir(parents=True)
    file = folder / "net.safetensors"
    save_file({"w": np.zeros((4, 2), np.int8)}, file, {"format": "ms", "w": "Int4"})
    for path in (file, tmp_path / "ranks"):
        with pytest.raises(UnsupportedError, match=r"net.safetensors.*`w` is Int4") as caught:
            reshard.open(path)
        assert caught.value.key == "w"
    save_file({"w": np.zeros((4, 2), np.int8)}, file, {"format": "ms", "v": "Int4"})
    reshard.open(file).close()


def test_many_marks_of_int4_without_tensors_take_no_time(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    n = 5000
    save_file({f"w{i}": np.zeros(1, np.uint8) for i in range(n)}, path, metadata={f"k{i}": "Int4" for i in range(n)})
    begun = time.process_time()
    with reshard.open(path) as checkpoint:
        assert len(checkpoint) == n
    assert time.process_time() - begun < 5  # less than 0.2; 20 if each mark is compared with each tensor
