"""The members of a tar archive: where each lies. Nothing is unpacked.

What two readers could understand differently is refused: a wrong checksum of a header, a member that occurs twice, a
size that two headers give differently, and the end of the file in a member. Members that are no files or folders are
refused when they are asked for.

Source of the format: POSIX.1-2008, `pax`, sections "ustar Interchange Format" and "pax Header Block".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from reshard.errors import DamagedFileError, UnsupportedError
from reshard.values.words import show

if TYPE_CHECKING:
    from reshard.storage.location import Location

_BLOCK = 512
_MOST_MEMBERS = 100_000
_MOST_RECORDS = 1 << 20  # bytes of names and other values before a member
_MOST_NAME = 4096
_FILES = (b"0", b"\0", b"7")
_FOLDER = b"5"
GZIP = b"\x1f\x8b"


class Member(NamedTuple):
    """A file in an archive.

    Attributes:
        start: its first byte in the archive.
        n_bytes: how many it has.
        is_file: whether it is one; else a link or a device.
    """

    start: int
    n_bytes: int
    is_file: bool


def is_archive(head: bytes) -> bool:
    """Whether these first 512 bytes are those of a tar archive.

    Example:
        >>> is_archive(bytes(257) + b"ustar" + bytes(250))
        True
    """
    return head[257:262] == b"ustar"


def members(path: Location) -> dict[str, Member]:
    """The members of an archive by name, without a leading `./`; folders are left out.

    Raises:
        DamagedFileError: it violates the format.
        UnsupportedError: it is packed by gzip.
        StorageError: it cannot be read.
    """
    size = path.stat(follow_links=True).n_bytes
    with path.open(follow_links=True) as file:
        try:
            return _members(file, size)
        except _Fault as fault:
            raise DamagedFileError(f"{show(str(path))} is no valid tar archive: {fault}", path=str(path)) from None
        except _Packed:
            raise UnsupportedError(
                f"{show(str(path))} is packed by gzip, so that its members cannot be read in place",
                path=str(path),
                hint=f"unpack it into a folder, `tar -xzf {path.name} -C DIR`, and open the folder",
            ) from None


class _Fault(Exception):  # noqa: N818  not raised to callers
    pass


class _Packed(Exception):  # noqa: N818
    pass


def _members(file: BinaryIO, size: int) -> dict[str, Member]:
    found: dict[str, Member] = {}
    records: dict[str, str] = {}
    long_name: str | None = None
    at = n_headers = 0
    while True:
        file.seek(at)
        header = file.read(_BLOCK)
        if at == 0 and header.startswith(GZIP):
            raise _Packed
        if len(header) < _BLOCK:
            raise _Fault(f"it ends at byte {size} without the block of zeros that is its end")
        if not any(header):
            if records or long_name is not None:
                raise _Fault("it ends behind the description of a member")
            return found
        n_headers += 1
        if n_headers > _MOST_MEMBERS:
            raise _Fault(f"it has more than {_MOST_MEMBERS} members")
        _check_sum(header, at)
        kind, n_bytes = header[156:157], _number(header[124:136], at)
        start = at + _BLOCK
        if kind in (b"x", b"g", b"L", b"K"):
            if n_bytes > _MOST_RECORDS or start + n_bytes > size:
                raise _Fault(f"the description at byte {at} has {n_bytes} bytes")
            content = file.read(n_bytes)
            if kind == b"L":
                if long_name is not None:
                    raise _Fault(f"two names are given for the member behind byte {at}")
                long_name = _text(content.rstrip(b"\0"), at)
            elif kind != b"K":  # the target of a link
                described = _records(content, at)
                if kind == b"g" and {"size", "path"} & described.keys():
                    raise _Fault(f"the values at byte {at} give all members one size or one name")
                if kind == b"x":
                    if records:
                        raise _Fault(f"two descriptions are given for the member behind byte {at}")
                    records = described
        else:
            name, n_bytes = _described(header, records, long_name, n_bytes, at)
            if kind not in (*_FILES, _FOLDER):
                n_bytes = 0 if kind in (b"1", b"2", b"3", b"4", b"6") else n_bytes
            if start + n_bytes > size:
                raise _Fault(
                    f"the member {show(name)} has {n_bytes} bytes from byte {start} on, and the file has {size}"
                )
            is_folder = kind == _FOLDER or (kind in _FILES and name.endswith("/"))
            if not is_folder:
                if name in found:
                    raise _Fault(f"the member {show(name)} occurs twice")
                found[name] = Member(start, n_bytes, kind in _FILES)
            records, long_name = {}, None
        at = start + -(-n_bytes // _BLOCK) * _BLOCK


def _described(header: bytes, records: dict[str, str], long_name: str | None, n_bytes: int, at: int) -> tuple[str, int]:
    """The name and the size of a member, from its header and what is described before it."""
    name = _text(header[:100].partition(b"\0")[0], at)
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    if prefix:
        name = f"{_text(prefix, at)}/{name}"
    if long_name is not None and "path" in records:
        raise _Fault(f"two names are given for the member at byte {at}")
    name = records.get("path", name) if long_name is None else long_name
    if "size" in records:
        text = records["size"]
        if not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise _Fault(f"the size of the member at byte {at} is {show(text)}")
        if n_bytes not in (0, int(text)):
            raise _Fault(f"the member at byte {at} has the sizes {n_bytes} and {text}")
        n_bytes = int(text)
    if any(key.startswith("GNU.sparse") for key in records):
        raise _Fault(f"the member at byte {at} is sparse")
    if not name or len(name) > _MOST_NAME or "\0" in name:
        raise _Fault(f"the member at byte {at} has no valid name")
    while name.startswith("./"):
        name = name[2:]
    return name or ".", n_bytes


def _check_sum(header: bytes, at: int) -> None:
    """Refuse a header with another checksum: the sum of its bytes, with spaces in place of the checksum."""
    if _number(header[148:156], at) != sum(header) - sum(header[148:156]) + 8 * 0x20:
        raise _Fault(f"the header at byte {at} has another checksum")


def _number(field: bytes, at: int) -> int:
    """A number in octal digits, or in the binary form of GNU for large ones."""
    if field[0] == 0x80:
        number = int.from_bytes(field[1:], "big")
        if number >= 1 << 62:
            raise _Fault(f"the header at byte {at} has the number {number}")
        return number
    text = field.strip(b" \0")
    if any(digit not in b"01234567" for digit in text):
        raise _Fault(f"the header at byte {at} has a number that is not octal")
    return int(text, 8) if text else 0


def _records(content: bytes, at: int) -> dict[str, str]:
    """Records of a description, each a line `<length> <key>=<value>`."""
    found: dict[str, str] = {}
    rest = content
    while rest:
        digits, space, _ = rest[:20].partition(b" ")
        length = int(digits) if space and digits.isdigit() else 0
        record = rest[len(digits) + 1 : length]
        key, equals, value = record[:-1].partition(b"=")
        if length > len(rest) or not record.endswith(b"\n") or not equals or not key:
            raise _Fault(f"the description at byte {at} is invalid")
        name = _text(key, at)
        if name in found:
            raise _Fault(f"the description at byte {at} has {show(name)} twice")
        found[name] = _text(value, at)
        rest = rest[length:]
    return found


def _text(data: bytes, at: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise _Fault(f"a name at byte {at} is not UTF-8") from None
