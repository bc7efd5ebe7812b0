"""Builds the zip archives of `torch.save` around arrays that the core writes.

Members are stored as they are. As `torch.save` does, local headers leave size and checksum out: these follow the data
and stand in the directory, so a file is written in one pass. Data begins at a multiple of 64 bytes of its archive.

Source of the format: APPNOTE.TXT of PKWARE, sections 4.3 to 4.5; `caffe2/serialize/inline_container.cc` of torch 2.15.
"""

from __future__ import annotations

import functools
import hashlib
import struct
import zlib
from typing import TYPE_CHECKING, NamedTuple

from reshard.commit import writer_mark
from reshard.formats.torch_file.encode import Encoder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard import _core
    from reshard.storage.location import Location

_ALIGN_BYTES = 64
_FLAGS = 0x0808  # UTF-8 names; size and checksum follow the data
_WIDE = 0xFFFF_FFFF  # 32-bit fields with this value stand in the zip64 extra field
_TAIL_BYTES = 512
_MARK_MEMBER = f"/.{writer_mark.KEY}"


class _Member(NamedTuple):
    name: bytes
    start: int
    n_bytes: int
    array: int | None
    crc: int


class Composer:
    r"""The bytes of a file around its arrays: the container that `Plan.write` takes.

    Example:
        >>> composer = Composer()
        >>> composer.literal(b"head")
        >>> composer.array(100)
        0
        >>> composer.sum_of(0)
        >>> composer.n_bytes, composer.container()
        (108, (b'head\x00\x00\x00\x00', [4], [(104, 0)]))
    """

    def __init__(self) -> None:
        self._literals = bytearray()
        self._starts: list[int] = []
        self._sums: list[tuple[int, int]] = []
        self._array_bytes = 0

    @property
    def n_bytes(self) -> int:
        """Size of the file so far."""
        return len(self._literals) + self._array_bytes

    def literal(self, data: bytes) -> None:
        """Append bytes."""
        self._literals += data

    def array(self, n_bytes: int) -> int:
        """Append the next array of the plan, and return its number."""
        self._starts.append(self.n_bytes)
        self._array_bytes += n_bytes
        return len(self._starts) - 1

    def sum_of(self, array: int) -> None:
        """Append the CRC-32 of an array."""
        self._sums.append((self.n_bytes, array))
        self._literals += bytes(4)

    def append(self, other: Composer) -> None:
        """Append the bytes and arrays of another file, whose arrays are the next ones of the plan."""
        n_bytes, n_arrays = self.n_bytes, len(self._starts)
        self._literals += other._literals
        self._starts += [n_bytes + start for start in other._starts]
        self._sums += [(n_bytes + at, n_arrays + array) for at, array in other._sums]
        self._array_bytes += other._array_bytes

    def container(self) -> _core.Container:
        """The container."""
        return bytes(self._literals), self._starts, self._sums


class _Archive:
    """One archive in a file, from the position where the composer is."""

    def __init__(self, composer: Composer, base: str) -> None:
        self._composer = composer
        self._base = base if base.isascii() else "archive"  # as torch does
        self._first = composer.n_bytes
        self._members: list[_Member] = []

    def data(self, name: str, data: bytes) -> None:
        """A member with these bytes."""
        crc = zlib.crc32(data)
        self._begin(name, len(data), None, crc)
        self._composer.literal(data)
        self._describe(self._members[-1])

    def array(self, name: str, n_bytes: int) -> None:
        """A member that is the next array of the plan."""
        self._begin(name, n_bytes, -1, 0)
        member = self._members[-1]._replace(array=self._composer.array(n_bytes))
        self._members[-1] = member
        self._describe(member)

    def _begin(self, name: str, n_bytes: int, array: int | None, crc: int) -> None:
        encoded = f"{self._base}/{name}".encode()
        start = self._composer.n_bytes - self._first
        extra = struct.pack("<HHQQ", 1, 16, n_bytes, n_bytes) if n_bytes >= _WIDE else b""
        n_padding = -(start + 30 + len(encoded) + len(extra) + 4) % _ALIGN_BYTES
        extra += b"FB" + struct.pack("<H", n_padding) + b"Z" * n_padding
        head = struct.pack("<IHHHHHIIIHH", 0x04034B50, 0, _FLAGS, 0, 0, 0, 0, 0, 0, len(encoded), len(extra))
        self._composer.literal(head + encoded + extra)
        self._members.append(_Member(encoded, start, n_bytes, array, crc))

    def _describe(self, member: _Member) -> None:
        self._composer.literal(b"PK\x07\x08")
        self._sum(member)
        self._composer.literal(struct.pack("<QQ" if member.n_bytes >= _WIDE else "<II", *2 * [member.n_bytes]))

    def _sum(self, member: _Member) -> None:
        if member.array is None:
            self._composer.literal(struct.pack("<I", member.crc))
        else:
            self._composer.sum_of(member.array)

    def finish(self) -> None:
        """The members that every file has, and the directory."""
        composer = self._composer
        directory = composer.n_bytes - self._first
        for member in self._members:
            wide = [number for number in (member.n_bytes, member.n_bytes, member.start) if number >= _WIDE]
            extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
            size = min(member.n_bytes, _WIDE)
            composer.literal(struct.pack("<IHHHHHH", 0x02014B50, 0, 0, _FLAGS, 0, 0, 0))
            self._sum(member)
            composer.literal(
                struct.pack(
                    "<IIHHHHHII", size, size, len(member.name), len(extra), 0, 0, 0, 0, min(member.start, _WIDE)
                )
                + member.name
                + extra
            )
        end = composer.n_bytes - self._first
        n, n_bytes = len(self._members), end - directory
        composer.literal(struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 0x031E, 45, 0, 0, n, n, n_bytes, directory))
        composer.literal(struct.pack("<IIQI", 0x07064B50, 0, end, 1))
        narrow = min(n, 0xFFFF), min(n, 0xFFFF), min(n_bytes, _WIDE), min(directory, _WIDE)
        composer.literal(struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, *narrow, 0))


def _archive(composer: Composer, base: str, data: bytes, arrays: Sequence[int | bytes], *, mark: bool = False) -> None:
    """Append an archive.

    Args:
        composer: the file.
        base: name of the top folder in the archive.
        data: the encoded object.
        arrays: for each storage its number of bytes, if it is the next array of the plan, or its bytes.
        mark: whether a member records which package wrote it.
    """
    archive = _Archive(composer, base)
    archive.data("data.pkl", data)
    archive.data(".format_version", b"1")
    archive.data(".storage_alignment", str(_ALIGN_BYTES).encode())
    archive.data("byteorder", b"little")
    for number, storage in enumerate(arrays):
        if isinstance(storage, bytes):
            archive.data(f"data/{number}", storage)
        else:
            archive.array(f"data/{number}", storage)
    archive.data("version", b"3\n")
    digest = int.from_bytes(hashlib.blake2b(data, digest_size=16).digest())
    archive.data(".data/serialization_id", f"{digest % 10**40:040d}".encode())
    if mark:
        archive.data(_MARK_MEMBER[1:], writer_mark.MARK[writer_mark.KEY].encode())
    archive.finish()


def state_dict(
    base: str, arrays: Sequence[tuple[str, str, Sequence[int], int]], others: Mapping[str, object] | None = None
) -> _core.Container:
    """The container of a file of `torch.save` that holds a dict.

    Args:
        base: name of the top folder in the archive: the name of the file without its suffix.
        arrays: name, dtype, shape and bytes of each tensor, as `Plan.arrays` lists them.
        others: values that are no tensors, by name.

    Raises:
        NotPlainError: one of `others` has no encoding.
    """
    encoder = Encoder(2)
    encoder.opcodes(b"}(")
    for number, (name, dtype, shape, n_bytes) in enumerate(arrays):
        encoder.text(name)
        encoder.tensor(str(number), dtype, shape, n_bytes)
    for name, value in (others or {}).items():
        encoder.text(name)
        encoder.value(value)
    encoder.opcodes(b"u")
    composer = Composer()
    _archive(composer, base, encoder.finished(), [array[3] for array in arrays], mark=True)
    return composer.container()


@functools.lru_cache(maxsize=4096)
def tensor_archive(dtype: str, shape: tuple[int, ...], n_bytes: int) -> Composer:
    """An archive with one tensor.

    Args:
        dtype: the dtype.
        shape: the shape, in elements.
        n_bytes: bytes of the tensor.
    """
    encoder = Encoder(2)
    encoder.tensor("0", dtype, shape, n_bytes)
    composer = Composer()
    _archive(composer, "archive", encoder.finished(), [n_bytes])
    return composer


def object_archive(value: object) -> Composer:
    """An archive with a plain value.

    Raises:
        NotPlainError: the value has no encoding.
    """
    encoder = Encoder(2)
    encoder.value(value)
    composer = Composer()
    _archive(composer, "archive", encoder.finished(), [])
    return composer


def scalar_file(value: float) -> bytes:
    """A file of `torch.save` that holds a tensor of one float32 value."""
    encoder = Encoder(2)
    encoder.tensor("0", "F32", (), 4)
    composer = Composer()
    _archive(composer, "archive", encoder.finished(), [struct.pack("<f", value)])
    return composer.container()[0]


def optimizer_file(values: Mapping[str, object], step: float | None, options: Mapping[str, object]) -> bytes:
    """A file of `torch.save` with a dict, and in it the state dict of an optimizer with one group.

    Args:
        values: plain values by name.
        step: the step in the state of the first parameter, a tensor; None: there is no state.
        options: the options of the group.

    Raises:
        NotPlainError: a value has no encoding.
    """
    encoder = Encoder(2)
    encoder.opcodes(b"}(")
    for name, value in values.items():
        encoder.text(name)
        encoder.value(value)
    encoder.text("optimizer_state_dict")
    encoder.opcodes(b"}(")
    encoder.text("state")
    encoder.opcodes(b"}")
    if step is not None:
        encoder.opcodes(b"(")
        encoder.integer(0)
        encoder.opcodes(b"}(")
        encoder.text("step")
        encoder.tensor("0", "F32", (), 4)
        encoder.opcodes(b"uu")
    encoder.text("param_groups")
    encoder.value([{**options, "params": []}])
    encoder.opcodes(b"uu")
    composer = Composer()
    storages = [] if step is None else [struct.pack("<f", step)]
    _archive(composer, "archive", encoder.finished(), storages, mark=True)
    return composer.container()[0]


def is_ours(path: Location) -> bool:
    """Whether this package wrote a file of `torch.save`, by the last member of its directory."""
    return _MARK_MEMBER.encode() in path.read_tail(_TAIL_BYTES)
