"""Publication in a bucket, which has no renames: every file is written under its name, and what makes it whole is last.

    claim     create an object that must be new, with the names of all files: of several conversions one writes. With
              `overwrite`, one that was left is taken over by another new object, named after it: one can create that
    clear     with `overwrite`, remove the files of an earlier conversion; what identifies a checkpoint goes first
    write     everything else, then the tensors; the first of several parts is the last one
    check     list the folder: every file is there with the ETag that its write was told
    commit    write what identifies a checkpoint, such as an index; then remove the claim

Until the commit no reader takes the folder for a whole checkpoint. A failure removes everything that was written. A
process that is killed leaves files and the claim: a later conversion names them, and replaces them with `overwrite`.

Of a conversion by several processes, the one that has the claim begins an upload in parts for each file of which
several write ranges. Then it creates a second object beside the claim, which names them and lets the others begin. A
claim is never written again: a process that was suspended meanwhile cannot bring back one that is gone. The uploads are
ended when what was written is removed. The conversion that takes over a claim ends the uploads that it names, and those
of its files that are not named yet.

The claim of a conversion into one file is in a folder beside it, `home_of`, as other files may lie there, too.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.commit.filling import is_staging, staging_name
from reshard.errors import (
    CheckpointNotFoundError,
    DamagedFileError,
    DestinationExistsError,
    ReshardError,
    StorageError,
    UnsupportedError,
)
from reshard.storage.changes import temporary_folder
from reshard.storage.location import locate
from reshard.storage.remote import RemoteStore
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from reshard.storage.location import Location

_log = logging.getLogger("reshard")

_CLAIM = staging_name("convert")
_LATER = re.compile(re.escape(staging_name("convert-#")).replace(r"\#", "[0-9a-f]{16}(-prepared)?"))
_MAX_CLAIM_BYTES = 64 << 20
_MAX_NEW_BYTES = 4 << 30  # of a file that is sent by one request, which refuses to replace another one
_PREPARED_SECONDS = 60.0  # for another share, which removes and writes small files
_LOOK_SECONDS = 0.1
_UPLOADS_AT_ONCE = 16
_END_SECONDS = 60.0  # to end uploads
_export_of: ContextVar[str | None] = ContextVar("_export_of", default=None)


class Upload(NamedTuple):
    """An upload in parts of a file that several processes write.

    Attributes:
        id: that of the service; empty in Azure, which has none.
        before: the ETag of the file that had the name when it was begun, if there was one.
    """

    id: str
    before: str | None


class _Claim(NamedTuple):
    """A claim: the name of its object, its content with that of the object beside it, and a digest of it."""

    name: str
    content: dict[str, Any]
    digest: str

    @property
    def next_name(self) -> str:
        """The name of the claim that takes it over."""
        return staging_name(f"convert-{self.digest}")

    @property
    def prepared_name(self) -> str:
        """The name of the object beside it that lets other shares begin."""
        return staging_name(f"convert-{self.digest}-prepared")


class BucketFolder:
    """A folder of a bucket that a conversion fills, or one file in it.

    Attributes:
        target: the folder.
        beside: a local folder for the files without tensors, which `write_beside` and `commit` send.
        uploads: the uploads in parts by the name of the file, of a conversion by several processes.
        lost: which claim names uploads that the service does not have any more: it is not joined.

    Args:
        target: the folder.
        beside: the local folder.
        commits: names of files that identify a checkpoint.
        file: the name of the file if it alone is the destination.
    """

    def __init__(self, target: Location, beside: Location, commits: Sequence[str], file: str | None = None) -> None:
        self.target = target
        self.beside = beside
        self.uploads: dict[str, Upload] = {}
        self.lost = ""
        self._file = file
        self._home = target if file is None else home_of(target / file)
        self._store = bucket_of(target)
        self._commits = commits
        self._claims: list[_Claim] = []  # the last one is that of this conversion, and the others were taken over
        self._first: Hashable = None  # the identity of the object of the first one
        self._names: list[str] = []
        self._written: dict[str, str] = {}
        self._left: frozenset[str] = frozenset()
        self._left_claims: list[str] = []
        self._before: dict[str, str] = {}

    def is_commit(self, name: str) -> bool:
        """Whether a file identifies a checkpoint."""
        return _is_commit(self._commits, name)

    def claim(self, names: Iterable[str], *, overwrite: bool, digest: str | None = None, joins: bool = False) -> bool:
        """Create the claim, or join that of another share.

        Args:
            names: the files that will be written: what is left of them if this process is killed can be replaced.
            overwrite: take the place of another one.
            digest: of a conversion by several processes.
            joins: take part in that of another process with the same digest.

        Returns:
            Whether this process prepares the folder, and then calls `prepared`; no: another share has prepared it.

        Raises:
            DestinationExistsError: another conversion has one; or, without `overwrite`, has ended meanwhile.
        """
        names = sorted({*names, *self.names_beside()})
        content = {"host": socket.gethostname(), "pid": os.getpid(), "token": os.urandom(8).hex(), "names": names}
        if digest is not None:
            content["shared"] = digest
        if (root := _export_of.get()) is not None:
            content["export_of"] = root
        claim = json.dumps(content).encode()
        is_lost = False
        name, before = _CLAIM, list[_Claim]()
        while not _created(self._home / name, claim):
            is_lost = name != _CLAIM
            if joins and digest is not None:
                before, is_prepared = self._prepared_claims(digest)
                if is_prepared:
                    self._take_part(before)
                    return False
            else:
                before = _claims_in(self._home)
            if before and (is_lost or not overwrite):
                raise _claimed(self._place, before[-1], is_running=is_lost)
            name = before[-1].next_name if before else _CLAIM
        self._claims = [*before, _claim_of(name, claim)]
        self._left = frozenset(file for one in before for file in _names_of(one.content))
        try:
            self._before = self._there(is_empty=not overwrite)
        except BaseException as error:
            if not before:
                try:
                    with self.cleaning_up():
                        self._remove_claims()
                except ReshardError as failed:
                    self._say_left(error, failed)
            raise
        own = self._claims[-1]
        known = {own.next_name, own.prepared_name}
        # Of conversions whose first claim is gone.
        self._left_claims = [name for name in self._before if _LATER.fullmatch(name) and name not in known]
        self._names = names
        return True

    @property
    def _place(self) -> Location:
        """The destination."""
        return self.target if self._file is None else self.target / self._file

    def e_tags(self) -> dict[str, str]:
        """Those of all files that are there. Raises StorageError."""
        if self._file is None:
            there = self._store.below(self.target.path)
            return {name: plain_e_tag(str(one.identity)) for name, one in there}
        try:
            return {self._file: plain_e_tag(str((self.target / self._file).stat().identity))}
        except CheckpointNotFoundError:
            return {}

    def _there(self, *, is_empty: bool) -> dict[str, str]:
        there = self.e_tags()
        appeared = min((name for name in there if not is_staging(name.partition("/")[0])), default=None)
        if appeared is not None and is_empty:
            raise DestinationExistsError(
                f"{show(str(self.target))} is not empty: another conversion has written {show(appeared)} meanwhile"
                if self._file is None
                else f"{show(str(self._place))} exists: another conversion has written it meanwhile",
                path=str(self._place),
                hint="choose another destination, or give `overwrite=True` to replace its files",
            )
        return there

    def prepared(self) -> None:
        """Let the other shares begin. Raises DestinationExistsError, StorageError."""
        place = self._home / self._claims[-1].prepared_name
        place.create(json.dumps({"written": self._written, "uploads": self.uploads}).encode())
        try:
            self.check_claim()
        except DestinationExistsError:
            place.remove_file()
            raise

    def begin_uploads(self, names: Collection[str]) -> None:
        """Begin an upload in parts for each of some files, before `prepared`. Raises StorageError."""
        begun: dict[str, str] = {}
        try:
            begin_uploads(self.target, names, begun)
        finally:
            self.uploads |= {name: Upload(upload, self._before.get(name)) for name, upload in begun.items()}

    def upload_of(self, name: str) -> str:
        """The ID of the upload of a file. Raises DamagedFileError: the claim names none."""
        if name not in self.uploads:
            raise DamagedFileError(
                f"{show(str(self._claim))} names no upload of {show(name)}",
                path=str(self._claim),
                hint="convert again with `overwrite=True`",
            )
        return self.uploads[name].id

    def complete_upload(self, name: str, n_bytes: int, parts: Sequence[str]) -> None:
        """Make a file of the parts that were sent into its upload. Arguments and errors as of `RemoteStore`."""
        upload, path = self.uploads[name], str(self.target / name)
        self._written[name] = self._store.complete_upload(path, upload.id, n_bytes, parts, before=upload.before)

    def end_uploads(self) -> None:
        """End the uploads. Never raises."""
        end_uploads(self.target, {(name, one.id) for name, one in self.uploads.items()})
        self.uploads.clear()

    def join(self, digest: str, seconds: float | None = None) -> bool:
        """Take part in the conversion of a claim, once its folder is prepared.

        Args:
            digest: of the conversion.
            seconds: how long another share is waited for that prepares it; None: a minute.

        Returns:
            Whether this process takes part; no: the claim is that of another conversion, or it is not prepared.

        Raises:
            StorageError: the service failed.
        """
        claims, is_prepared = self._prepared_claims(digest, seconds)
        if is_prepared:
            self._take_part(claims)
        return is_prepared

    def _prepared_claims(self, digest: str, seconds: float | None = None) -> tuple[list[_Claim], bool]:
        """The claims, and whether the last one is that of a conversion, and its folder is prepared. As `join`."""
        wait_s = _PREPARED_SECONDS if seconds is None else seconds
        waited_for, deadline = "", 0.0
        while True:
            claims = _claims_in(self._home)
            last = claims[-1] if claims else _Claim("", {}, "")
            if last.content.get("shared") != digest or last.digest == self.lost:
                return claims, False
            if "written" in last.content:
                return claims, True
            if last.name != waited_for:
                waited_for, deadline = last.name, time.monotonic() + wait_s
            if time.monotonic() > deadline:
                return claims, False
            time.sleep(_LOOK_SECONDS)

    def _take_part(self, claims: list[_Claim]) -> None:
        """Make claims those of this conversion."""
        found = claims[-1].content
        written = found["written"]
        self._claims = claims
        self._names = _names_of(found)
        self.uploads = _uploads_of(found)
        tags = written.items() if isinstance(written, dict) else ()
        self._written |= {name: e_tag for name, e_tag in tags if _is_text(e_tag)}

    @property
    def _claim(self) -> Location:
        """The claim of this conversion."""
        return self._home / self._claims[-1].name

    @property
    def claim_name(self) -> str:
        """What identifies the claim of this conversion."""
        return self._claims[-1].digest if self._claims else ""

    def check_claim(self) -> None:
        """Refuse to go on after another conversion has taken the folder over. Raises as `commit`."""
        if not self._is_ours():
            raise DestinationExistsError(
                f"{show(str(self._place))}: another conversion has taken it over with `overwrite`",
                path=str(self._home / _CLAIM),
            )

    def has_ended(self) -> bool:
        """Whether the claim of this conversion is gone, as after another share has published it.

        The claim of another one may be there, such as that of a share that is called again and finds all published.
        """
        first = _read_claim(self._home, _CLAIM)
        return first is None or (bool(self._claims) and first.digest != self._claims[0].digest)

    def _is_ours(self) -> bool:
        """Whether the first claim is the one that it was, and none has taken over the last one."""
        if not self._claims:
            return False
        try:
            # A claim has the names of all files, and is looked at before each of them: it is read once.
            found = (self._home / _CLAIM).stat().identity
        except CheckpointNotFoundError:
            return False
        if found != self._first:
            first = _read_claim(self._home, _CLAIM)
            if first is None or first.digest != self._claims[0].digest:
                return False
            self._first = found
        return _read_claim(self._home, self._claims[-1].next_name) is None

    def _remove_claims(self) -> None:
        # Without the first claim, the others count for nothing, nor does what is beside them.
        beside = [one.prepared_name for one in self._claims if "shared" in one.content]
        for name in (*(one.name for one in self._claims), *beside, *self._left_claims):
            (self._home / name).remove_file()

    def clear(self, is_ours: Callable[[Location], bool]) -> None:
        """Remove the files of an earlier conversion, those that identify a checkpoint first. Raises StorageError.

        The records of its shares (see `bucket_shares`) are removed, too, and its uploads are ended. If one file is the
        destination, it stays until the new one is complete.
        """
        of_claims = ((one.name, one.next_name, one.prepared_name) for one in self._claims)
        claims = {_CLAIM, *(name for names in of_claims for name in names)}
        there = [name for name, _ in self._store.below(self._home.path) if name not in claims]
        if self._file is None:
            ours = {name for name in self.target.names() if is_staging(name) or is_ours(self.target / name)}
            there = [name for name in there if name in self._left or name.partition("/")[0] in ours]
        self.check_claim()
        self._end_left_uploads()
        _remove(self._home, there, self.is_commit)
        self.check_claim()  # before anything is written: this can have taken long
        self._before = {name: e_tag for name, e_tag in self._before.items() if name not in set(there)}

    def _end_left_uploads(self) -> None:
        """End the uploads of the claims that were taken over."""
        before = self._claims[:-1]
        if not before:
            return
        found = {(name, upload.id) for one in before for name, upload in _uploads_of(one.content).items()}
        with contextlib.suppress(ReshardError):
            listed = self._store.uploads_in(str(self.target), self._file)
            found |= {(name, upload) for name, upload in listed if name in self._left}
        self.check_claim()  # the list can take long, and what is removed then can be that of another conversion
        end_uploads(self.target, found)
        self.check_claim()

    def _remove(self, names: Sequence[str]) -> None:
        _remove(self.target, names, self.is_commit)

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Files with tensors in the order in which they are written: the first of several parts is the last one."""
        return sorted(names, key=lambda name: (not self.is_commit(name), _by_number(name)), reverse=True)

    def wrote(self, e_tags: Mapping[str, str | None]) -> None:
        """Note what the writes of files with tensors were told."""
        self._written |= {name: e_tag or "" for name, e_tag in e_tags.items()}

    def write_beside(self) -> None:
        """Send the local files that do not identify a checkpoint. Raises StorageError."""
        self._send(name for name in self.names_beside() if not self.is_commit(name))

    def commit(self, before_end: Callable[[Mapping[str, str]], None] = lambda _: None) -> None:
        """Check what was written, send the files that identify a checkpoint, and remove the claim.

        Args:
            before_end: called with the ETags of all files before the claim is removed.

        Raises:
            DestinationExistsError: another conversion has taken the folder over.
            StorageError: the service failed, or a file is not there as it was written.
        """
        self.check_claim()
        there = self.e_tags()
        for name, e_tag in self._written.items():
            found = there.get(name)
            if found != plain_e_tag(e_tag):
                what = "is not there" if found is None else "was replaced"
                raise StorageError(
                    f"{show(str(self.target / name))} {what} after it was written", path=str(self.target / name)
                )
        self.check_claim()
        self._send((name for name in self.names_beside() if self.is_commit(name)), is_new=True)
        before_end(self._written)
        self.check_claim()
        self._remove_claims()

    def names_beside(self) -> list[str]:
        """The local files, those that identify a checkpoint last."""
        # An index is the last of several that identify a checkpoint.
        order = {name: number for number, name in enumerate(self._commits)}
        return sorted(_files(self.beside), key=lambda name: (order.get(name.rpartition("/")[2], -1), name))

    def _send(self, names: Iterable[str], *, is_new: bool = False) -> None:
        """Send local files.

        Args:
            names: the files.
            is_new: whether one replaces only what was there before this conversion, and is left by `clear`. So a
                process that was suspended after it looked at its claim replaces no file of the one that took over.
        """
        for name in list(names):
            local, place = self.beside / name, self.target / name
            if not is_new or name in self._before:
                self._written[name] = self._store.upload(local.local, str(place))
                continue
            content = local.read_small(_MAX_NEW_BYTES)
            if not _created(place, content):
                self.check_claim()
                if place.stat().n_bytes != len(content) or place.read_small(len(content)) != content:
                    self._names = [one for one in self._names if one != name]  # which `undo` removes
                    raise DestinationExistsError(
                        f"{show(str(place))} was made by another program meanwhile",
                        path=str(place),
                        hint="remove it, or choose another destination",
                    )  # the same content: this conversion is published by two processes
            self._written[name] = str(place.stat().identity)

    def undo(self, error: BaseException | None = None, then: Callable[[], object] = lambda: None) -> None:
        """Remove everything that was written, unless another conversion has taken over, and end uploads. Never raises.

        Args:
            error: that of the conversion, which says what is left if the service does not answer.
            then: called if the claim was that of this conversion and is gone.
        """
        if not self._claims:
            return
        try:
            with self.cleaning_up():
                self.end_uploads()
                if not self._is_ours():
                    return
                there = self.e_tags()
                self._remove([name for name in self._names if name in there and there[name] != self._before.get(name)])
                self._remove_claims()
                then()
        except ReshardError as failed:
            self._say_left(error, failed)

    def cleaning_up(self) -> AbstractContextManager[None]:
        """See `ObjectStore.cleaning_up`."""
        return self._store.cleaning_up(str(self._claim))

    def _say_left(self, error: BaseException | None, failed: ReshardError) -> None:
        """Say in an error that what was written could not be removed."""
        what = (
            f"what was written to {show(str(self._place))} may be left, with its claim "
            f"{show(str(self._claim))} and unfinished uploads, as it could not be removed "
            f"({failed.message})"
        )
        hint = "`overwrite=True` replaces what is left"
        if isinstance(error, ReshardError):
            error.message = f"{error.message}; {what}"
            error.hint = hint if error.hint is None else f"{error.hint}; {hint}"
        else:
            _log.warning("%s: a conversion with %s", what, hint)


@contextlib.contextmanager
def filled_bucket(target: Location, *, commits: Sequence[str], file: str | None = None) -> Iterator[BucketFolder]:
    """A folder of a bucket to fill; it is committed when the block ends, and what was written is removed if it fails.

    Args:
        target: the folder; what lies there has been checked.
        commits: names of entries that identify a checkpoint.
        file: the name of the file if it alone is the destination.

    Raises:
        DestinationExistsError: another conversion writes there.
        StorageError: the service failed.
    """
    with temporary_folder("reshard-convert-") as beside:
        folder = BucketFolder(target, locate(beside), commits, file)
        try:
            yield folder
            folder.commit()
        except BaseException as error:
            folder.undo(error)
            raise


def _created(place: Location, claim: bytes) -> bool:
    try:
        place.create(claim)
    except FileExistsError:
        return False
    return True


def _claimed(target: Location, claim: _Claim, *, is_running: bool) -> DestinationExistsError:
    host, pid = claim.content.get("host"), claim.content.get("pid")
    by = "" if host is None else f" (host {show(str(host))}, process {show(str(pid))})"
    what = "has taken it over at the same time" if is_running else "writes there, or was killed"
    return DestinationExistsError(
        f"{show(str(target))}: another conversion {what}{by}",
        path=str(target),
        hint="wait for it; if it was killed, too, convert again"
        if is_running
        else "if it does not run any more, give `overwrite=True`, which replaces its files",
    )


def home_of(file: Location) -> Location:
    """The folder of the claims and records of a conversion into one file of a bucket.

    Example:
        >>> home_of(locate("model.safetensors"))
        Location('.reshard.share-file-0c72eb262e7eab23.staging')
    """
    digest = hashlib.blake2b(file.name.encode(), digest_size=8).hexdigest()
    return file.parent / staging_name(f"share-file-{digest}")


def _uploads_of(claim: Mapping[str, Any]) -> dict[str, Upload]:
    uploads = claim.get("uploads")
    found = uploads.items() if isinstance(uploads, dict) else ()
    return {
        name: Upload(one[0], one[1] if isinstance(one[1], str) else None)
        for name, one in found
        if _is_text(name) and isinstance(one, list) and len(one) == len(Upload._fields) and _is_text(one[0])
    }


def _is_text(value: object) -> bool:
    """Whether a value of JSON can be sent: a text, and no half of a pair of surrogates in it."""
    return isinstance(value, str) and not any("\ud800" <= one <= "\udfff" for one in value)


def begin_uploads(target: Location, names: Collection[str], begun: dict[str, str]) -> None:
    """Begin an upload in parts for each of some files.

    Args:
        target: the folder.
        names: the files.
        begun: gets the ID of each upload, also if a later one fails.

    Raises:
        StorageError: the service failed.
    """

    def begin(name: str) -> None:
        begun[name] = bucket_of(target).begin_upload(str(target / name))

    with ThreadPoolExecutor(_UPLOADS_AT_ONCE) as threads:
        for one in [threads.submit(begin, name) for name in names]:
            one.result()


def end_uploads(target: Location, uploads: Collection[tuple[str, str]]) -> None:
    """End uploads, by the name of the file and the ID. Never raises: rules of the bucket end what is left."""
    store, end = bucket_of(target), time.monotonic() + _END_SECONDS

    def end_one(one: tuple[str, str]) -> None:
        with contextlib.suppress(ReshardError), store.ending_within(max(0.0, end - time.monotonic())):
            store.end_upload(str(target / one[0]), one[1])

    with ThreadPoolExecutor(_UPLOADS_AT_ONCE) as threads:
        list(threads.map(end_one, uploads))


def _claims_in(target: Location) -> list[_Claim]:
    """The first claim of a folder of a bucket, and those that have taken over the one before. Raises StorageError."""
    found: dict[str, _Claim] = {}
    name = _CLAIM
    while name not in found and (claim := _read_claim(target, name)) is not None:
        prepared = _read_claim(target, claim.prepared_name) if "shared" in claim.content else None
        found[name] = claim if prepared is None else claim._replace(content=claim.content | prepared.content)
        name = claim.next_name
    return list(found.values())


def _read_claim(target: Location, name: str) -> _Claim | None:
    try:
        return _claim_of(name, bucket_of(target).read_object(str(target / name), _MAX_CLAIM_BYTES))
    except CheckpointNotFoundError:
        return None


def _claim_of(name: str, content: bytes) -> _Claim:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    found = found if isinstance(found, dict) else {}
    token = found.get("token")
    key = token.encode(errors="replace") if isinstance(token, str) else content
    return _Claim(name, found, hashlib.blake2b(key, digest_size=8).hexdigest())


def _names_of(claim: Mapping[str, Any]) -> list[str]:
    names = claim.get("names")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def claim_in(target: Location) -> dict[str, Any]:
    """What a conversion that runs or was killed says of itself in a folder of a bucket; empty if there is none."""
    try:
        claims = _claims_in(target)
    except ReshardError:
        return {}
    return claims[-1].content if claims else {}


def left_in(target: Location, digest: str | None = None) -> frozenset[str]:
    """Names of the files that conversions which were killed may have left in a folder of a bucket.

    Args:
        target: the folder.
        digest: only of the conversion by several processes that has it.
    """
    try:
        claims = _claims_in(target)
    except ReshardError:
        return frozenset()
    if digest is not None:
        claims = [one for one in claims[-1:] if one.content.get("shared") == digest]
    return frozenset(name for one in claims for name in _names_of(one.content))


@contextlib.contextmanager
def exporting(root: Location) -> Iterator[None]:
    """Claims that are made in the block say that they are those of exports of a run.

    Args:
        root: the root of the run.
    """
    token = _export_of.set(str(root))
    try:
        yield
    finally:
        _export_of.reset(token)


def remove_export(target: Location, root: Location, commits: Collection[str]) -> None:
    """Remove an export in a bucket, what identifies a checkpoint first. If this is interrupted, a later call goes on.

    Args:
        target: its folder.
        root: the root of the run, see `exporting`.
        commits: names of entries that identify a checkpoint.

    Raises:
        DestinationExistsError: a conversion that is no export of the run has claimed the folder.
        StorageError: the service failed.
    """
    try:
        (target / _CLAIM).create(json.dumps({"export_of": str(root), "names": []}).encode())
    except FileExistsError:
        if claim_in(target).get("export_of") != str(root):
            raise DestinationExistsError(
                f"{show(str(target))}: a conversion writes there, or was killed", path=str(target / _CLAIM)
            ) from None
    uploads = (_uploads_of(one.content).items() for one in _claims_in(target))
    end_uploads(target, {(name, upload.id) for some in uploads for name, upload in some})
    names = [name for name, _ in bucket_of(target).below(target.path) if name != _CLAIM]
    _remove(target, names, functools.partial(_is_commit, commits))
    (target / _CLAIM).remove_file()


def folders_in(target: Location, pattern: re.Pattern[str]) -> dict[str, list[str]]:
    """The folders in a folder, and the names of the files below each; of a bucket by one list.

    Args:
        target: the folder.
        pattern: of the names of the folders.

    Raises:
        StorageError: the folder cannot be listed.
    """
    if target.is_local:
        folders = [entry.name for entry in target.entries() if pattern.fullmatch(entry.name) and entry.kind == "folder"]
        return {name: _files(target / name) for name in folders}
    found: dict[str, list[str]] = {}
    for path, _ in bucket_of(target).below(target.path):
        folder, _, name = path.partition("/")
        if name and pattern.fullmatch(folder):
            found.setdefault(folder, []).append(name)
    return found


def is_claimed(names: Collection[str]) -> bool:
    """Whether a conversion runs, or was killed, in a folder of a bucket with these files."""
    return _CLAIM in names


def _remove(target: Location, names: Sequence[str], is_commit: Callable[[str], bool]) -> None:
    for is_first in (True, False):  # the removals of one call have no order
        bucket_of(target).remove_files([str(target / name) for name in names if is_commit(name) == is_first])


def _is_commit(commits: Collection[str], name: str) -> bool:
    """Whether a file identifies a checkpoint: by its name, or by that of its folder in the destination."""
    return name.rpartition("/")[2] in commits or name.partition("/")[0] in commits


def bucket_of(place: Location) -> RemoteStore:
    """The bucket of a location. Raises UnsupportedError: it is in another kind of store."""
    if not isinstance(place.store, RemoteStore):
        raise UnsupportedError(f"{show(str(place))} is in a store that conversions do not write", path=str(place))
    return place.store


def plain_e_tag(e_tag: str) -> str:
    """An ETag as a list and an answer have it in common.

    Example:
        >>> plain_e_tag('W/"5f"')
        '5f'
    """
    return e_tag.removeprefix("W/").strip('"')


def _by_number(name: str) -> list[object]:
    return [int(part) if n % 2 else part for n, part in enumerate(re.split(r"([0-9]+)", name))]


def _files(folder: Location, start: str = "") -> list[str]:
    found = []
    for entry in folder.entries():
        name = f"{start}{entry.name}"
        found += _files(folder / entry.name, f"{name}/") if entry.kind == "folder" else [name]
    return found
