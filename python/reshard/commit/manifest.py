"""`manifest.json`, the commit record of a checkpoint, and `checksums.bin` beside it: files of this package.

A folder that holds a valid manifest is complete: the manifest is written last, after everything that it lists is
durable. A manifest verifies itself. Its text is canonical and ends in a digest of all preceding bytes, so a truncated,
zeroed or altered file is invalid. Every other file is verified by its entry in the manifest. This provides integrity,
not authenticity: a process that can write to the folder can also write a matching manifest.

    {"version":1,
    "iteration":400, "epoch":3, "attempt":"<32 hex digits>", ...      one field a line
    "shards":{"model-0000000-0000008.safetensors":{"n_bytes":..., "header_bytes":..., "header_sum":..., ...}, ...},
    "files":{"metadata.json":{"n_bytes":..., "digest":"<32 hex digits>"}, "checksums.bin":{...}, ...},
    "digest":"<blake2b, 128 bits, of every byte before this line>"}

`epoch` in the file is the generation of the claim. `checksums.bin` holds the crc32c of each 256 KiB of each shard file,
from its first byte on, 4 bytes each and little-endian, all shard files end to end in the order of the manifest.

Both can be read in parts. The entry of a shard file holds the position and the digest of its checksums. An `Outline`,
which one rank makes and sends, holds the positions and the digests of pieces of the manifest.

This module does not decide which checkpoint is read or which process may write one. `.tracked` and `.pinned` are empty
markers that appear after publication, which is why no manifest lists them.
"""

from __future__ import annotations

import bisect
import collections.abc
import hashlib
import json
import re
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from reshard import _core
from reshard.commit import filesystem, leases, metrics
from reshard.commit.filesystem import MANIFEST_FILE
from reshard.commit.roots import parse_iteration_folder
from reshard.documents.strict_json import parse_json
from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    DamagedFileError,
    MismatchError,
    UnsupportedError,
)
from reshard.storage.location import locate
from reshard.storage.names import component_fault
from reshard.storage.store import LockHeldError
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from reshard.storage.location import Location
    from reshard.storage.store import Lock, Stat

CHECKSUMS_FILE = "checksums.bin"
TRACKED_FILE = ".tracked"
CHUNK_BYTES = 256 << 10

_VERSION = 1
_VERSION_WITH_METRICS = 2  # a release that reads only version 1 reports a later version, not damage
_MAX_BYTES = 256 << 20
MAX_FILES = 1_000_000
"""Most files of a checkpoint."""
_MAX_VALUES = 8 * MAX_FILES  # an entry has at most 7
_MIN_OUTLINED = 256  # entries, 48 KB; a smaller manifest is read as a whole
_PIECE_BYTES = 16 << 10
_EARLY_CHECKSUMS_BYTES = 1 << 20  # those of 64 GiB: their damage is found when the checkpoint is opened
_MAX_CHECKSUMS_BYTES = 4 << 30  # for 256 TiB; a sparse file can have any size
# Fields whose key in the file differs.
_STORED_NAMES = {"generation": "epoch", "header_checksum": "header_sum", "checksums_digest": "sums_digest"}
_MAX_WRITER = 256
_LOCK_SECONDS = 5.0  # a process that removes a folder holds the lock for one rename
_DIGEST = re.compile("[0-9a-f]{32}")
_SAVED_AT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,9})?(?:Z|\+00:00)")
_TAIL = re.compile(rb',\n"digest":"([0-9a-f]{32})"\}\n\Z')
_TAIL_BYTES = len(b',\n"digest":"') + 32 + len(b'"}\n')
_STAGING = re.compile(r"([0-9]{1,18})\.[0-9]+\.[0-9a-f]+")


@dataclass(frozen=True)
class ShardEntry:
    """The recorded properties of a safetensors file; the checksums of its chunks are in `checksums.bin`.

    Attributes:
        n_bytes: its size.
        header_bytes: bytes before the data: the length field and the header.
        header_checksum: crc32c of these bytes; `header_sum` in the file.
        first_chunk: number of chunks of all entries before it.
        checksums_digest: `digest_of` its checksums; `sums_digest` in the file.
        rank: the rank that wrote it.

    Raises:
        ArgumentError: a value is of another type or out of range.
    """

    n_bytes: int
    header_bytes: int
    header_checksum: int
    first_chunk: int
    checksums_digest: str
    rank: int

    def __post_init__(self) -> None:
        counts = dict(vars(self))
        del counts["checksums_digest"]
        _check_counts(counts)
        if not 8 <= self.header_bytes <= self.n_bytes:
            raise ArgumentError(f"`header_bytes` is {self.header_bytes} in a file of {self.n_bytes} bytes")
        if self.header_checksum >= 1 << 32:
            raise ArgumentError(f"`header_sum` is {self.header_checksum}, a checksum has 32 bits")
        _check_digest("sums_digest", self.checksums_digest)

    @property
    def n_chunks(self) -> int:
        """Number of chunks of the file; the last may be shorter."""
        return -(-self.n_bytes // CHUNK_BYTES)


@dataclass(frozen=True)
class PlainEntry:
    """The recorded properties of any other file.

    Attributes:
        n_bytes: its size.
        digest: `digest_of` its content.

    Raises:
        ArgumentError: a value is of another type or out of range.
    """

    n_bytes: int
    digest: str

    def __post_init__(self) -> None:
        _check_counts({"n_bytes": self.n_bytes})
        _check_digest("digest", self.digest)


@dataclass(frozen=True)
class Manifest:
    """The content of the file.

    Attributes:
        iteration: the iteration that the folder holds.
        generation: generation of the claim under which it was written; `epoch` in the file.
        attempt: 32 hex digits, unique to this attempt to save.
        world_size: number of ranks that the checkpoint was written for.
        previous_tracker: the iteration that the tracker named when the save began, or None.
        passed_over: iterations that the run skipped when it resumed below them; they are not candidates from then on.
        writer: name and version of the program that wrote it.
        saved_at: ISO 8601, UTC.
        ckpt_status: 0: the health monitor found no problem, 1: it found one; None: there is no monitor.
        shards: by file name, in the order of `checksums.bin`.
        files: every other file by name, `checksums.bin` among them; not the manifest itself.
        metrics: numbers by name that the caller gave with the save. A file without them is of version 1, with them of
            version 2.
        digest: digest of the record without this field, 32 hex digits; computed if omitted.

    Raises:
        ArgumentError: a value is of another type or out of range, a name is not a plain file name or is duplicate, or
            the chunks of the shards are not consecutive.

    Example:
        >>> manifest = Manifest(
        ...     iteration=400, generation=1, attempt="0" * 32, world_size=1, previous_tracker=None, passed_over=(),
        ...     writer="reshard 1.0", saved_at="2026-01-31T12:00:00Z", ckpt_status=None,
        ...     shards={}, files={"checksums.bin": PlainEntry(0, digest_of(b""))},
        ... )
        >>> manifest.digest
        'b7e14195906f0a7b0609ae10181f89e0'
    """

    iteration: int
    generation: int
    attempt: str
    world_size: int
    previous_tracker: int | None
    passed_over: tuple[int, ...]
    writer: str
    saved_at: str
    ckpt_status: int | None
    shards: Mapping[str, ShardEntry]
    files: Mapping[str, PlainEntry]
    metrics: Mapping[str, int | float] = field(default_factory=dict)
    digest: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "passed_over", tuple(self.passed_over))
        object.__setattr__(self, "metrics", metrics.checked(self.metrics))
        counts = {"iteration": self.iteration, "generation": self.generation, "world_size": self.world_size}
        if self.previous_tracker is not None:
            counts["previous_tracker"] = self.previous_tracker
        if self.ckpt_status is not None:
            counts["ckpt_status"] = self.ckpt_status
        _check_counts(counts)
        for one in self.passed_over:
            _check_counts({"passed_over": one})
        _check_digest("attempt", self.attempt)
        if not isinstance(self.writer, str) or not self.writer.isprintable() or len(self.writer) > _MAX_WRITER:
            raise ArgumentError(f"`writer` is not printable text of at most {_MAX_WRITER} characters")
        if not isinstance(self.saved_at, str) or not _SAVED_AT.fullmatch(self.saved_at):
            raise ArgumentError("`saved_at` is not a time of the form 2026-01-31T12:00:00Z")
        if isinstance(self.shards, _Entries):
            return  # each piece is verified when it is read
        object.__setattr__(self, "shards", dict(self.shards))
        object.__setattr__(self, "files", dict(self.files))
        _check_names(self.shards, self.files)
        _check_chunks(self.shards, self.files)
        digest = digest_of(_body(self))
        if self.digest not in ("", digest):
            raise ArgumentError(f"`digest` is not that of the record, {digest}")
        object.__setattr__(self, "digest", digest)

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """Name and size of all files that it lists, shard files first."""
        entries: dict[str, ShardEntry | PlainEntry] = {**self.shards, **self.files}
        return [(name, entry.n_bytes) for name, entry in entries.items()]

    @property
    def n_bytes(self) -> int:
        """Bytes of all files that it lists."""
        return sum([n_bytes for _, n_bytes in self.sizes])


@dataclass(frozen=True)
class Head:
    """What a manifest says of the order of iterations. The attributes are those of `Manifest`."""

    iteration: int
    generation: int
    previous_tracker: int | None
    passed_over: tuple[int, ...]
    attempt: str
    digest: str


@dataclass(frozen=True)
class Outline:
    """Where the entries of a large manifest are in its file: with it, a rank reads and verifies only those it uses.

    The rank that has read and verified the complete manifest makes the outline and sends it to the others. It is not
    stored, so that it cannot differ from the manifest. A piece consists of complete lines, 16 KiB in all.

    Attributes:
        digest: that of the manifest.
        n_bytes: size of the file.
        frame: digest of the bytes outside of the pieces: the head, what separates `shards` from `files`, and the end.
        shards: `(first byte, end, first name, digest)` of the pieces with the entries of shard files, by name.
        files: the same of the other files.
    """

    digest: str
    n_bytes: int
    frame: str
    shards: tuple[tuple[int, int, str, str], ...]
    files: tuple[tuple[int, int, str, str], ...]


def digest_of(data: bytes) -> str:
    """blake2b of 128 bits, as 32 hex digits.

    Example:
        >>> digest_of(b"")
        'cae66941d9efbd404e4d88758ea67670'
    """
    return new_digest(data).hexdigest()


def new_digest(data: bytes = b"") -> hashlib.blake2b:
    """The digest of `digest_of` of these bytes, for content that comes in pieces."""
    return hashlib.blake2b(data, digest_size=16)


# -- the file


def read(folder: Location) -> Manifest:
    """Read and verify the manifest of a folder; the files that it lists are not verified.

    Raises:
        CheckpointNotFoundError: there is none.
        DamagedFileError: it is truncated, altered, for another iteration than that of the folder's name, lists a name
            that is not a plain file name, is not a regular file or is larger than 256 MiB.
        UnsupportedError: it is of a later version.
        StorageError: the system failed to read it.
    """
    place = folder / MANIFEST_FILE
    path = place.path
    data, found = _read_text(place)
    manifest = _parse(place, data)
    if manifest.digest != found:
        # Each content has exactly one text, so that a file in another spelling is refused.
        raise DamagedFileError(f"{show(path)} is not spelt as a manifest is written", path=path)
    _check_iteration(place, manifest)
    return manifest


class ManifestCache:
    """Manifests of a root, by folder: each is parsed once, as long as its file stays the same."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Stat, Manifest]] = {}

    def read(self, folder: Location) -> Manifest:
        """As the function `read`."""
        found = (folder / MANIFEST_FILE).stat()
        known = self._known.get(folder.path)
        if known is None or known[0] != found:
            known = self._known[folder.path] = (found, read(folder))
        return known[1]

    def add(self, folder: Location, manifest: Manifest) -> None:
        """Add the manifest that this process has written into a folder. Raises StorageError."""
        self._known[folder.path] = ((folder / MANIFEST_FILE).stat(), manifest)


def read_head(folder: Location) -> Head:
    """What the manifest of a folder says of the order of iterations. Its text is verified, its entries are not parsed.

    Raises as `read`, but for an entry that is invalid.
    """
    place = folder / MANIFEST_FILE
    data, digest = _read_text(place)
    bounds = _bounds(data)
    if bounds is None:
        manifest = read(folder)
    else:
        manifest = _parse(place, _frame(data, bounds), {"shards": _NOTHING, "files": _NOTHING, "digest": ""})
        _check_iteration(place, manifest)
    return Head(
        manifest.iteration,
        manifest.generation,
        manifest.previous_tracker,
        manifest.passed_over,
        manifest.attempt,
        digest,
    )


def outline(manifest: Manifest) -> Outline | None:
    """The outline of a manifest; None if it has fewer than 256 entries, or lists them in another order than by name."""
    sections = (manifest.shards, manifest.files)
    if sum(map(len, sections)) < _MIN_OUTLINED or any(list(names) != sorted(names) for names in sections):
        return None
    text = _text(manifest)
    bounds = _bounds(text)
    assert bounds is not None  # it is the text of a manifest
    return Outline(
        manifest.digest,
        len(text),
        digest_of(_frame(text, bounds)),
        _pieces(text, *bounds[0]),
        _pieces(text, *bounds[1]),
    )


def read_part(folder: Location, known: Outline) -> Manifest:
    """A manifest whose entries are read, piece by piece, when they are first used.

    Args:
        folder: the folder of the manifest.
        known: its outline, of a process that has read and verified it.

    Returns:
        The manifest. An entry raises DamagedFileError if its piece differs from the outline.

    Raises:
        MismatchError: the folder has another manifest.
        StorageError: the system failed to read it.
    """
    place = folder / MANIFEST_FILE
    path = str(place)

    def read_range(begin: int, end: int) -> bytes:
        with folder.opened() as opened:
            return b"".join(opened.pieces(MANIFEST_FILE, known.n_bytes, [(begin, end)]))

    def read_piece(begin: int, end: int, digest: str) -> bytes:
        data = read_range(begin, end)
        if digest_of(data) != digest:
            raise DamagedFileError(
                f"{show(path)} was altered: bytes {begin} to {end} differ from what another rank has verified",
                path=path,
                hint="if the iteration was saved again meanwhile, open it again",
            )
        return data

    shards, files = known.shards, known.files
    try:
        head, tail = read_range(0, shards[0][0] if shards else files[0][0]), read_range(files[-1][1], known.n_bytes)
    except DamagedFileError as error:
        raise MismatchError(f"{error.message}; the rank that selected it has read another", path=path) from None
    frame = head + (_FILES if shards else b"") + tail
    if digest_of(frame) != known.frame:
        raise MismatchError(f"{show(path)} is not the manifest of the rank that selected it", path=path)
    return _parse(
        place,
        frame,
        {
            "shards": _Entries(shards, read_piece, path, ShardEntry),
            "files": _Entries(files, read_piece, path, PlainEntry),
            "digest": known.digest,
        },
    )


def _check_iteration(place: Location, manifest: Manifest) -> None:
    path = place.path
    number = _iteration_of(place.parent.name)
    if number not in (None, manifest.iteration):
        raise DamagedFileError(
            f"{show(path)} is the manifest of iteration {manifest.iteration}, its folder that of {number}",
            path=path,
            hint=f"if the folder was renamed, give it back the number {manifest.iteration}",
        )


def read_digest(folder: Location) -> str:
    """The digest of the manifest of a folder, which is compared with its text and not parsed. Raises as `read`."""
    return _read_text(folder / MANIFEST_FILE)[1]


def _read_text(place: Location) -> tuple[bytes, str]:
    """The content of a manifest and its digest, which the content has. Raises as `read`."""
    path = place.path
    data = place.read_small(_MAX_BYTES)
    tail = _TAIL.search(data, max(0, len(data) - _TAIL_BYTES))
    if tail is None:
        raise DamagedFileError(f"{show(path)} does not end in a digest: it is torn or was altered", path=path)
    found = digest_of(data[: tail.start()])
    if found.encode() != tail[1]:
        raise DamagedFileError(
            f"{show(path)} was altered: its content has the digest {found}, expected {tail[1].decode()}", path=path
        )
    return data, found


def write(
    folder: Location,
    manifest: Manifest,
    mode: int = 0o666,
    *,
    durable: bool = True,
    unsynced: Sequence[str] = (),
) -> None:
    """Write the manifest atomically, after everything that it lists is durable.

    Args:
        folder: the folder.
        manifest: its manifest.
        mode: permission bits of the file, less the umask.
        durable: sync the file, and the names in the folder, before the manifest gets its name, which becomes durable
            with the folder.
        unsynced: files in the folder that are not durable yet; with `durable` they are synced at the same time.

    Raises:
        StorageError: the system failed; an earlier manifest is unchanged.
    """
    data = _text(manifest)
    if durable:
        files = [folder / name for name in unsynced]
        filesystem.replace_after(folder / MANIFEST_FILE, data, mode, files=files, folders=[folder])
    else:
        filesystem.replace_file(folder / MANIFEST_FILE, data, mode, durable=False)


def _text(manifest: Manifest) -> bytes:
    """The canonical text."""
    return _body(manifest) + f',\n"digest":"{manifest.digest}"}}\n'.encode()


def _body(manifest: Manifest) -> bytes:
    """The canonical text, up to the digest."""
    lines = [f'"version":{_VERSION_WITH_METRICS if manifest.metrics else _VERSION}']
    for stored, field_name in _NAMES[Manifest].items():
        value = getattr(manifest, field_name)
        if stored == "metrics":
            if value:
                lines.append(f'"metrics":{_dump(metrics.to_json(value))}')
        elif stored in ("shards", "files"):
            entries = [
                f"{_dump(name)}:{_ENTRY_TEXTS[type(entry)] % tuple(vars(entry).values())}"
                for name, entry in value.items()
            ]
            inner = ",\n".join(entries)
            lines.append(f'"{stored}":{{\n{inner}}}')
        elif stored != "digest":
            lines.append(f'"{stored}":{_dump(value)}')
    return ("{" + ",\n".join(lines)).encode()


# Created once: `json.dumps` with options creates an encoder for each call, and there is a call for every file.
_dump = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def _parse(place: Location, data: bytes, given: Mapping[str, Any] | None = None) -> Manifest:
    """The manifest of a text; `given`: fields of the manifest in place of those in the text."""
    path = place.path
    content = parse_json(data, path, max_values=_MAX_VALUES)
    try:
        return _manifest_of(content, given or {})
    except ArgumentError as error:
        raise DamagedFileError(f"{show(path)}: {error.message}", path=path) from None
    except UnsupportedError as error:
        raise UnsupportedError(f"{show(path)} {error.message}", path=path, hint="use a later release") from None


def _manifest_of(content: object, given: Mapping[str, Any]) -> Manifest:
    version = content.get("version") if isinstance(content, dict) else None
    if type(version) is not int:  # bool is a subclass of int
        raise ArgumentError("`version` is missing or not an integer")
    if version not in (_VERSION, _VERSION_WITH_METRICS):
        raise UnsupportedError(
            f"is of version {version}; this release reads versions {_VERSION} and {_VERSION_WITH_METRICS}"
        )
    names = [name for name in _NAMES[Manifest] if version == _VERSION_WITH_METRICS or name != "metrics"]
    values = _fields(content, "the file", ("version", *names))
    del values["version"]
    values["generation"] = values.pop("epoch")
    if "metrics" in values:
        if not isinstance(values["metrics"], dict):
            raise ArgumentError("`metrics` is not an object")
        values["metrics"] = metrics.from_json(values["metrics"])
    if not isinstance(values["passed_over"], list):
        raise ArgumentError("`passed_over` is not a list")
    for name, kind in (("shards", ShardEntry), ("files", PlainEntry)):
        if not isinstance(values[name], dict):
            raise ArgumentError(f"`{name}` is not an object")
        values[name] = {key: _entry(key, value, kind) for key, value in values[name].items()}
    values["digest"] = ""  # the caller compares it with the bytes
    return Manifest(**(values | dict(given)))


def _entry_text(kind: type[ShardEntry | PlainEntry]) -> str:
    """The JSON of an entry, with places for its values: integers, and digests, which need no escapes."""
    places = ('"%s"' if one.type == "str" else "%d" for one in fields(kind))
    return "{" + ",".join(f'"{stored}":{place}' for stored, place in zip(_NAMES[kind], places, strict=True)) + "}"


# Found once: a manifest can have 100,000 entries.
_NAMES: dict[type, dict[str, str]] = {
    kind: {_STORED_NAMES.get(one.name, one.name): one.name for one in fields(kind)}
    for kind in (Manifest, ShardEntry, PlainEntry)
}
"""The fields of each class, by their names in the file."""
_ENTRY_TEXTS = {kind: _entry_text(kind) for kind in (ShardEntry, PlainEntry)}


def _entry(name: str, value: object, kind: type[_Entry]) -> _Entry:
    names = tuple(_NAMES[kind])  # in the order of the fields
    try:
        found = _fields(value, "it", names)
        return kind(*map(found.__getitem__, names))
    except ArgumentError as error:
        raise ArgumentError(f"{show(name)}: {error.message}") from None


def _fields(value: object, what: str, names: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ArgumentError(f"{what} is not an object")
    if set(value) != set(names):
        odd = min(set(value) ^ set(names))
        raise ArgumentError(f"{what} {'lacks' if odd in names else 'has an unknown field'} {show(odd)}")
    return dict(value)


def _check_counts(values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise ArgumentError(f"`{_STORED_NAMES.get(name, name)}` is not an integer from 0 to 2**63 - 1")


def _check_digest(name: str, value: object) -> None:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ArgumentError(f"`{name}` is not 32 hex digits")


def _check_names(shards: Mapping[str, ShardEntry], files: Mapping[str, PlainEntry]) -> None:
    if len(shards) + len(files) > MAX_FILES:
        raise ArgumentError(f"it lists {len(shards) + len(files)} files; at most {MAX_FILES} are allowed")
    for name in (*shards, *files):
        fault = component_fault(name)
        if fault is None and (name.startswith(".") or name == MANIFEST_FILE):
            fault = "it is hidden or the manifest itself"
        if fault is not None:
            raise ArgumentError(f"the file name {show(name)} is refused: {fault}")
        if name in shards and name in files:
            raise ArgumentError(f"{show(name)} is listed twice")


def _check_chunks(shards: Mapping[str, ShardEntry], files: Mapping[str, PlainEntry]) -> None:
    n_chunks = 0
    for name, entry in shards.items():
        if entry.first_chunk != n_chunks:
            raise ArgumentError(f"{show(name)}: `first_chunk` is {entry.first_chunk}, expected {n_chunks}")
        n_chunks += entry.n_chunks
    if CHECKSUMS_FILE not in files or files[CHECKSUMS_FILE].n_bytes != 4 * n_chunks:
        raise ArgumentError(f"`files` lists no {CHECKSUMS_FILE} of {4 * n_chunks} bytes, 4 for each chunk")


def _iteration_of(folder: str) -> int | None:
    """The iteration in the name of a published or a staging folder."""
    staging = _STAGING.fullmatch(folder)
    return int(staging[1]) if staging else parse_iteration_folder(folder)


# -- parts of the text
#
# Each entry is a line. No string of JSON holds a newline, so these lines occur once, where the entries begin:

_SHARDS = b',\n"shards":{\n'
_FILES = b'},\n"files":{\n'
_END = b"}},\n"  # of the last entry, and of `files`

_Bounds = tuple[tuple[int, int], tuple[int, int]]


def _bounds(text: bytes) -> _Bounds | None:
    """Where the entries of `shards` and those of `files` begin and end; None: it is not the text of a manifest."""
    shards = text.find(_SHARDS)
    files = text.find(_FILES, shards)
    end = text.find(_END, files)
    if min(shards, files, end) < 0:
        return None
    return (shards + len(_SHARDS), files), (files + len(_FILES), end + 1)


def _frame(text: bytes, bounds: _Bounds) -> bytes:
    """The text without the entries: that of a manifest that lists nothing."""
    shards, files = bounds
    return text[: shards[0]] + _FILES + text[files[1] :]


def _pieces(text: bytes, begin: int, end: int) -> tuple[tuple[int, int, str, str], ...]:
    """The pieces of an `Outline` between two bytes of a text."""
    pieces = []
    while begin < end:
        newline = text.find(b"\n", begin + _PIECE_BYTES, end)
        until = end if newline < 0 else newline + 1
        line = text[begin : text.find(b"\n", begin, until)].decode()
        name, _ = json.JSONDecoder().raw_decode(line)
        pieces.append((begin, until, name, digest_of(text[begin:until])))
        begin = until
    return tuple(pieces)


_Entry = TypeVar("_Entry", bound=ShardEntry | PlainEntry)


class _Entries(collections.abc.Mapping[str, _Entry]):
    """Entries of a manifest that are read when they are used. Iterating over them reads all."""

    def __init__(
        self,
        pieces: Sequence[tuple[int, int, str, str]],
        read: Callable[[int, int, str], bytes],
        path: str,
        kind: type[_Entry],
    ) -> None:
        self._bounds = [(begin, end, digest) for begin, end, _, digest in pieces]
        self._firsts = [first for _, _, first, _ in pieces]
        self._read = read
        self._path = path
        self._kind = kind
        self._known: dict[int, dict[str, _Entry]] = {}

    def __getitem__(self, name: str) -> _Entry:
        number = bisect.bisect_right(self._firsts, name) - 1
        if number < 0:
            raise KeyError(name)
        return self._piece(number)[name]

    def __iter__(self) -> Iterator[str]:
        for number in range(len(self._bounds)):
            yield from self._piece(number)

    def __len__(self) -> int:
        return sum(len(self._piece(number)) for number in range(len(self._bounds)))

    def _piece(self, number: int) -> dict[str, _Entry]:
        if number not in self._known:
            text = b"{" + self._read(*self._bounds[number]).removesuffix(b",\n") + b"}"
            content: Any = parse_json(text, self._path)
            self._known[number] = {name: _entry(name, value, self._kind) for name, value in content.items()}
        return self._known[number]


_NOTHING: _Entries[Any] = _Entries((), lambda *_: b"", "", ShardEntry)


# -- what it lists


def check_sizes(folder: Location, manifest: Manifest) -> None:
    """Check that every file exists, is a regular file, and has its recorded size. Opens no file.

    Raises:
        DamagedFileError: a check failed; the message names the first such file.
        CheckpointNotFoundError: there is no such folder.
        StorageError: the system failed.
    """
    with folder.opened() as opened:
        for name, n_bytes in manifest.sizes:
            opened.check(name, n_bytes)


def check_headers(folder: Location, manifest: Manifest, names: Collection[str] | None = None) -> None:
    """Check sizes and headers of shard files: this verifies their structure, not their data.

    Args:
        folder: the folder of the files.
        manifest: its manifest.
        names: which shard files; None: all.

    Raises:
        DamagedFileError: a file differs; the message names the first such file.
        CheckpointNotFoundError: there is no such folder.
        StorageError: the system failed.
    """
    with folder.opened() as opened:
        for name, entry in manifest.shards.items():
            if names is None or name in names:
                total = 0
                for piece in opened.pieces(name, entry.n_bytes, [(0, entry.header_bytes)]):
                    total = _core.crc32c(piece, total)
                if total != entry.header_checksum:
                    raise DamagedFileError(
                        f"the header of {show(opened.path(name))} was altered: its checksum is {total:08x}, expected "
                        f"{entry.header_checksum:08x}",
                        path=opened.path(name),
                    )


def read_checksums(folder: Location, manifest: Manifest, names: Collection[str] | None = None) -> dict[str, bytes]:
    """The checksums of shard files: crc32c of each chunk, 4 bytes each, little-endian; verified by the manifest.

    Args:
        folder: where the files lie.
        manifest: its manifest.
        names: which shard files, each in the manifest; None: all. Only their checksums are read.

    Raises:
        DamagedFileError: `checksums.bin` is missing, or its size or digest differs from the manifest.
        UnsupportedError: the checksums are more than 4 GiB.
        ArgumentError: a name is not a shard file of the manifest.
        StorageError: the system failed.
    """
    unknown = [name for name in names or () if name not in manifest.shards]
    if unknown:
        raise ArgumentError(f"the manifest lists no shard file {show(min(unknown))}")
    wanted = dict(manifest.shards) if names is None else {name: manifest.shards[name] for name in set(names)}
    if sum(4 * entry.n_chunks for entry in wanted.values()) > _MAX_CHECKSUMS_BYTES:
        raise UnsupportedError(f"the checksums of {len(wanted)} shard files are more than {_MAX_CHECKSUMS_BYTES} bytes")
    checksums: dict[str, bytes] = {}
    if not wanted:
        return checksums
    with folder.opened() as opened:
        path, n_bytes = opened.path(CHECKSUMS_FILE), manifest.files[CHECKSUMS_FILE].n_bytes
        in_order = sorted(wanted.items(), key=lambda one: one[1].first_chunk)
        ranges = [(4 * entry.first_chunk, 4 * (entry.first_chunk + entry.n_chunks)) for _, entry in in_order]
        pieces = opened.pieces(CHECKSUMS_FILE, n_bytes, ranges)
        for name, entry in in_order:
            parts: list[bytes] = []
            while sum(map(len, parts)) < 4 * entry.n_chunks:
                parts.append(next(pieces))  # they begin and end where the ranges do
            checksums[name] = b"".join(parts)
            if digest_of(checksums[name]) != entry.checksums_digest:
                raise DamagedFileError(f"{show(path)} was altered: the checksums of {show(name)} differ", path=path)
    return checksums


def set_checksums(index: _core.Index, folder: Location, manifest: Manifest) -> None:
    """Add the sizes and checksums of its files to an index. All files must be in one folder.

    The checksums of the chunks of a file are read when a plan first verifies it: a checkpoint of 1,024 files of 10 GB
    has 156 MB of them. Then an error of `read_checksums` is raised. Those of a checkpoint of up to 64 GiB are read now.

    Args:
        index: the index.
        folder: the folder of its files.
        manifest: the manifest of the folder.

    Raises:
        DamagedFileError: the manifest does not list a file; or as `read_checksums`.
        UnsupportedError, StorageError: as `read_checksums`.
    """

    def entry_of(name: str) -> ShardEntry:
        try:
            return manifest.shards[name]
        except KeyError:
            raise DamagedFileError(
                f"{show(str(folder))} is described as holding {show(name)}, which its manifest does not list",
                path=str(folder / name),
            ) from None

    def read(paths: list[str], with_chunks: bool) -> list[tuple[int, int, int, bytes | None]]:  # noqa: FBT001
        entries = [(name, entry_of(name)) for name in (locate(path).name for path in paths)]
        checksums = read_checksums(folder, manifest, dict(entries)) if with_chunks else {}
        return [
            (entry.n_bytes, entry.header_bytes, entry.header_checksum, checksums.get(name)) for name, entry in entries
        ]

    if not isinstance(manifest.shards, _Entries):
        entries = {name: entry_of(name) for name in index.file_names}
        is_early = sum(4 * entry.n_chunks for entry in entries.values()) <= _EARLY_CHECKSUMS_BYTES
        checksums = read_checksums(folder, manifest, entries) if is_early else {}
        for file, name in enumerate(index.file_names):
            entry = entries[name]
            index.set_checksums(file, entry.n_bytes, entry.header_bytes, entry.header_checksum, checksums.get(name))
    index.set_checksums_reader(read)


def read_plain(folder: Location, manifest: Manifest, name: str, max_bytes: int) -> bytes:
    """The content of a file that is not a shard file, verified by the manifest.

    Args:
        folder: the folder of the file.
        manifest: its manifest.
        name: name of the file.
        max_bytes: a larger file is refused before it is read.

    Raises:
        CheckpointNotFoundError: the manifest lists no such file.
        DamagedFileError: the file is missing, not regular, too large, or differs from the manifest.
        StorageError: the system failed.
    """
    entry = manifest.files.get(name)
    with folder.opened() as opened:
        path = opened.path(name)
        if entry is None:
            raise CheckpointNotFoundError(f"the manifest of {show(str(folder))} lists no file {show(name)}", path=path)
        if entry.n_bytes > max_bytes:
            raise DamagedFileError(
                f"{show(path)} has {entry.n_bytes} bytes; such a file has at most {max_bytes}", path=path
            )
        data = b"".join(opened.pieces(name, entry.n_bytes))
    if digest_of(data) != entry.digest:
        raise DamagedFileError(
            f"{show(path)} was altered: its digest is {digest_of(data)}, expected {entry.digest}", path=path
        )
    return data


def plain_entry(folder: Location, name: str) -> PlainEntry:
    """Compute the entry of an existing file, for a new manifest or for a comparison. Reads it in pieces.

    Raises:
        DamagedFileError: it is missing or not regular.
        StorageError: the system failed.
    """
    found, n_bytes = hashlib.blake2b(digest_size=16), 0
    with folder.opened() as opened:
        for piece in opened.pieces(name):
            found.update(piece)
            n_bytes += len(piece)
    return PlainEntry(n_bytes, found.hexdigest())


def read_lock(folder: Location) -> Lock:
    """Keep retention from removing a folder that is being read: a shared lock on its manifest, or a lease in a log.

    The lock is advisory: in a store without locks this function returns without one. If the folder is removed anyway,
    files that are open stay readable.

    Returns:
        The lock; `close` ends it.

    Raises:
        CheckpointNotFoundError: there is no manifest, or the folder is being removed.
        DamagedFileError: the manifest is a link or not a regular file.
        StorageError: the system failed.
    """
    lease = leases.take(folder)
    if lease is not None:
        return lease
    place = folder / MANIFEST_FILE
    try:
        lock = place.lock(shared=True, seconds=_LOCK_SECONDS)
    except LockHeldError:
        raise _removed(str(place)) from None
    try:
        # It may have been renamed between open and lock.
        is_current = lock.is_current()
    except BaseException:
        lock.close()
        raise
    if not is_current:
        lock.close()
        raise _removed(str(place))
    return lock


def _removed(path: str) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(f"{show(path)} was removed while it was opened", path=path, hint="open again")
