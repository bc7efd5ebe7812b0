"""Checkpoints of NeMo.

Its package needs a GPU: archives are made as `SaveRestoreConnector._make_nemo_file_from_folder` makes them,
`tarfile.open(..., "w:").add(folder, arcname=".")`, and the folder of weights is a real one of Megatron-Core.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.helpers.command_line import run

import reshard
from reshard.errors import CheckpointNotFoundError, DamagedFileError, ReshardError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

MCORE = Path(__file__).parents[2] / "data" / "torch" / "mcore_tp2pp2" / "checkpoint"
STATE = {"encoder.weight": torch.arange(12.0).reshape(4, 3), "decoder.bias": torch.arange(5).bfloat16()}


def folder_of(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "model_config.yaml").write_text("target: nemo.collections.asr.models.EncDecCTCModel\n")
    torch.save(STATE, path / "model_weights.ckpt")
    return path


def packed(folder: Path, file: Path, mode: Any = "w:") -> Path:
    with tarfile.open(file, mode) as tar:
        tar.add(folder, arcname=".")
    return file


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return packed(folder_of(tmp_path / "folder"), tmp_path / "m.nemo")


def check(path: Path) -> None:
    with reshard.open(path) as checkpoint:
        assert checkpoint.format == "nemo"
        assert set(checkpoint) == set(STATE)
        assert (checkpoint.read("encoder.weight") == STATE["encoder.weight"].numpy()).all()
        assert (checkpoint.read("encoder.weight", (slice(1, 3), 1)) == STATE["encoder.weight"][1:3, 1].numpy()).all()
        assert checkpoint.read("decoder.bias").astype(np.float32).tolist() == [0, 1, 2, 3, 4]


def test_an_archive_is_read_in_place(archive: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    check(archive)
    assert run("inspect", archive).output.startswith("nemo: ")
    assert run("verify", archive).exit_code == 0
    assert sorted(tmp_path.rglob("*")) == before
    assert run("convert", archive, tmp_path / "hf").exit_code == 0
    with reshard.open(tmp_path / "hf") as converted:
        assert set(converted) == set(STATE)
    check(tmp_path / "folder")


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_forms_of_tar(tmp_path: Path, form: int) -> None:
    folder = folder_of(tmp_path / "folder")
    if form != tarfile.USTAR_FORMAT:
        (folder / ("long" * 50)).write_text("an artifact")
        (folder / "äöü").write_text("an artifact")
    with tarfile.open(tmp_path / "m.nemo", "w:", format=form) as tar:
        tar.add(folder, arcname=".")
        tar.addfile(tarfile.TarInfo("z"))
        link = tarfile.TarInfo("a-link")
        link.type, link.linkname, link.size = tarfile.SYMTYPE, "/etc/passwd", 0
        tar.addfile(link)
    check(tmp_path / "m.nemo")


def test_a_damaged_storage_is_found(archive: Path) -> None:
    data = bytearray(archive.read_bytes())
    at = data.index(STATE["encoder.weight"].numpy().tobytes())
    data[at + 5] ^= 1
    archive.write_bytes(data)
    with reshard.open(archive) as checkpoint, pytest.raises(DamagedFileError):
        checkpoint.read("encoder.weight")


def test_the_weights_of_nemo_2(tmp_path: Path) -> None:
    step = next(path for path in MCORE.iterdir() if (path / ".metadata").is_file())
    saved = tmp_path / "model--val_loss=1.0-step=9-last"
    shutil.copytree(step, saved / "weights")
    (saved / "context").mkdir()
    shutil.copytree(step, tmp_path / "unpacked" / "model_weights")
    for path in (saved, tmp_path / "unpacked"):
        with reshard.open(step) as expected, reshard.open(path) as checkpoint:
            assert checkpoint.format == "nemo"
            assert list(checkpoint) == list(expected)
            assert all(checkpoint.read(key).tobytes() == expected.read(key).tobytes() for key in expected)
        assert run("inspect", path).exit_code == 0
        assert run("convert", path, tmp_path / "out", "--part", "model", "--force").exit_code in (0, 2)
    (saved / "weights" / ".metadata").unlink()
    for path in (saved / "weights").glob("*.distcp"):
        path.unlink()
    with pytest.raises(ReshardError):
        reshard.open(saved)


def test_members_that_are_not_read_inside_an_archive(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "ranks")
    (folder / "mp_rank_00").mkdir()
    (folder / "model_weights.ckpt").rename(folder / "mp_rank_00" / "model_weights.ckpt")
    with pytest.raises(UnsupportedError, match=r"`mp_rank_00/model_weights.ckpt`") as caught:
        reshard.open(packed(folder, tmp_path / "ranks.nemo"))
    assert "tar -xf ranks.nemo" in str(caught.value.hint)
    (folder / "mp_rank_00").rename(folder / "model_weights")
    with pytest.raises(UnsupportedError, match=r"`model_weights/model_weights.ckpt`"):
        reshard.open(packed(folder, tmp_path / "folder.nemo"))
    with pytest.raises(UnsupportedError, match="packed by gzip") as caught:
        reshard.open(packed(folder, tmp_path / "packed.nemo", "w:gz"))
    assert "tar -xzf packed.nemo" in str(caught.value.hint)
    shutil.rmtree(folder / "model_weights")
    with pytest.raises(
        CheckpointNotFoundError, match=r"holds no member `model_weights.ckpt`; it holds `model_config.yaml`"
    ):
        reshard.open(packed(folder, tmp_path / "none.nemo"))


# -- archives that someone made by hand


def header(
    name: bytes = b"model_weights.ckpt", size: bytes = b"%011o\0", kind: bytes = b"0", **fields: bytes
) -> bytearray:
    data = bytearray(512)
    data[:100] = name.ljust(100, b"\0")
    data[124:136] = (size % 0 if b"%" in size else size).ljust(12, b"\0")
    data[156:157] = kind
    data[257:265] = fields.get("magic", b"ustar\x0000")
    data[345:500] = fields.get("prefix", b"").ljust(155, b"\0")
    data[148:156] = b" " * 8
    data[148:156] = fields.get("total", b"%06o\0 " % sum(data))
    return data


def member(content: bytes, kind: bytes = b"0", name: bytes = b"model_weights.ckpt", **fields: bytes) -> bytes:
    return bytes(header(name, b"%011o\0" % len(content), kind, **fields)) + content + bytes(-len(content) % 512)


def torch_file() -> bytes:
    stream = io.BytesIO()
    torch.save(STATE, stream)
    return stream.getvalue()


def record(key: str, value: str) -> bytes:
    rest = f" {key}={value}\n".encode()
    length = len(rest) + len(str(len(rest) + len(str(len(rest)))))
    return str(length).encode() + rest


END = bytes(1024)
GOOD = member(torch_file())
HUGE = b"\x80" + b"\xff" * 11
HOSTILE: dict[str, tuple[bytes, str]] = {
    "checksum": (bytes(header(total=b"0000000\0")) + END, "another checksum"),
    "checksum that is no number": (bytes(header(total=b"zzzzzz\0 ")) + END, "not octal"),
    "size that is no number": (bytes(header(size=b"-0000000001")) + END, "not octal"),
    "size with digits of another base": (bytes(header(size=b"0x000000010")) + END, "not octal"),
    "size beyond the file": (bytes(header(size=b"77777777777")) + END, "and the file has"),
    "size of 2**88": (bytes(header(size=HUGE)) + END, "has the number"),
    "size of 2**61": (bytes(header(size=b"\x80" + bytes(3) + b"\x20" + bytes(7))) + END, "and the file has"),
    "negative size": (bytes(header(size=b"\xff" * 12)) + END, "not octal"),
    "no end": (GOOD, "without the block of zeros"),
    "half a block at the end": (GOOD + bytes(100), "without the block of zeros"),
    "half a header": (bytes(header())[:300], "without the block of zeros"),
    "member that ends early": (GOOD[:-600] + b"", "and the file has"),
    "twice": (GOOD + GOOD + END, "occurs twice"),
    "twice with a dot": (GOOD + member(b"x", name=b"./model_weights.ckpt") + END, "occurs twice"),
    "no name": (member(b"x", name=b"") + END, "no valid name"),
    "name that is not UTF-8": (member(b"x", name=b"\xff\xfe") + END, "not UTF-8"),
    "prefix that is not UTF-8": (member(b"x", prefix=b"\xff") + END, "not UTF-8"),
    "description without an end": (member(b"12 path=a\n", b"x") + GOOD + END, "is invalid"),
    "description with a length of 0": (member(b"0 path=a\n", b"x") + GOOD + END, "is invalid"),
    "description with a length beyond it": (member(b"99 path=a\n", b"x") + GOOD + END, "is invalid"),
    "description with a negative length": (member(b"-9 path=a\n", b"x") + GOOD + END, "is invalid"),
    "description without a value": (member(b"7 path\n", b"x") + GOOD + END, "is invalid"),
    "description without a key": (member(b"5 =a\n", b"x") + GOOD + END, "is invalid"),
    "description without a space": (member(b"9path=ab\n", b"x") + GOOD + END, "is invalid"),
    "description that is not UTF-8": (member(b"10 path=\xff\n", b"x") + GOOD + END, "not UTF-8|is invalid"),
    "value twice": (member(record("a", "1") + record("a", "2"), b"x") + GOOD + END, "has `a` twice"),
    "described size that differs": (member(record("size", "7"), b"x") + GOOD + END, "has the sizes"),
    "described size that is no number": (member(record("size", "-7"), b"x") + GOOD + END, "the size of the member"),
    "described size with other digits": (member(record("size", "٣"), b"x") + GOOD + END, "the size of the member"),
    "described size beyond the file": (
        member(record("size", "9" * 18), b"x") + bytes(header()) + END,
        "and the file has",
    ),
    "described size that is too long": (member(record("size", "9" * 40), b"x") + bytes(header()) + END, "the size of"),
    "one size for all": (member(record("size", "7"), b"g") + GOOD + END, "one size or one name"),
    "one name for all": (member(record("path", "a"), b"g") + GOOD + END, "one size or one name"),
    "two descriptions": (member(record("a", "1"), b"x") * 2 + GOOD + END, "two descriptions"),
    "two names": (member(record("path", "a"), b"x") + member(b"b", b"L") + GOOD + END, "two names"),
    "two long names": (member(b"b", b"L") * 2 + GOOD + END, "two names"),
    "long name that is too long": (member(b"b" * 5000, b"L") + GOOD + END, "no valid name"),
    "name with a zero": (member(record("path", "a\0b"), b"x") + GOOD + END, "no valid name"),
    "description of a huge size": (bytes(header(size=b"77777777777", kind=b"x")) + END, "the description at byte"),
    "description of 2 MiB": (member(bytes(2 << 20), b"x") + GOOD + END, "the description at byte"),
    "description at the end": (member(record("path", "a"), b"x") + END, "ends behind the description"),
    "long name at the end": (member(b"a", b"L") + END, "ends behind the description"),
    "sparse": (member(record("GNU.sparse.major", "1"), b"x") + GOOD + END, "is sparse"),
    "weights that are a link": (member(b"", b"2") + END, "is no file"),
    "weights that are a hard link": (member(b"", b"1") + END, "is no file"),
    "weights that are a device": (member(b"", b"3") + END, "is no file"),
    "weights of a sparse kind": (member(b"", b"S") + END, "is no file"),
    "weights that are a folder": (member(b"", b"5") + END, "holds no member"),
    "weights with a slash": (member(b"", name=b"model_weights.ckpt/") + END, "holds no member"),
    "path outside": (member(torch_file(), name=b"../model_weights.ckpt") + END, "weights in several members"),
    "absolute path": (member(torch_file(), name=b"/model_weights.ckpt") + END, "weights in several members"),
    "empty weights": (member(b"") + END, "in the member `model_weights.ckpt`"),
    "weights that are text": (member(b"text" * 99) + END, "in the member `model_weights.ckpt`"),
    "weights that run code": (member(b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.") + END, "in the member"),
    "weights that begin later": (member(b"\0" * 512 + torch_file()) + END, "in the member"),
    "only headers": (bytes(header(name=b"a")) * 3 + END, "occurs twice"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_archives(tmp_path: Path, name: str) -> None:
    data, words = HOSTILE[name]
    path = tmp_path / "m.nemo"
    path.write_bytes(data)
    with pytest.raises(ReshardError, match=words) as caught:
        reshard.open(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 800
    assert sorted(tmp_path.iterdir()) == [path]


def test_the_good_archive_by_hand(tmp_path: Path) -> None:
    prefixed = member(b"", name=b"b", prefix=b"a" * 155)
    described = member(record("mtime", "1.5") + record("size", str(len(torch_file()))), b"x")
    (tmp_path / "m.nemo").write_bytes(prefixed + described + GOOD + END)
    check(tmp_path / "m.nemo")


def mutated(data: bytes, generator: np.random.Generator) -> bytes:
    changed = bytearray(data)
    for _ in range(int(generator.integers(1, 4))):
        changed[int(generator.integers(len(changed)))] = int(generator.integers(256))
    return bytes(changed[: int(generator.integers(len(changed)))]) if generator.random() < 0.1 else bytes(changed)


def test_random_bytes(archive: Path) -> None:
    """Each is an error of the package, or tensors of these shapes. `RESHARD_FUZZ` sets the number."""
    make: Callable[[bytes, np.random.Generator], bytes] = mutated
    data, generator = archive.read_bytes(), np.random.default_rng(0)
    for _ in range(int(os.environ.get("RESHARD_FUZZ", "200"))):
        archive.write_bytes(make(data, generator))
        with contextlib.suppress(ReshardError), reshard.open(archive) as checkpoint:
            assert all(checkpoint.read(key).size <= 12 for key in checkpoint)
