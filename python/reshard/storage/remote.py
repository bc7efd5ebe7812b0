"""Objects in S3, Google Cloud Storage and Azure Blob Storage, and files behind HTTP, which are only read, as a store.

A path is a URL, as `s3://bucket/run/common.json`. There are no folders: one exists while the name of an object begins
with its path and `/`. Requests, credentials and retries are those of the core, which is compiled with the feature
`remote` in wheels.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import time
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from reshard import _core
from reshard._core import PutNew
from reshard.errors import ArgumentError, CheckpointNotFoundError, DamagedFileError, StorageError, UnsupportedError
from reshard.storage.objects import ObjectStore, T
from reshard.storage.store import Abilities, Entry, HeldFile, Lock, Stat, check_file, failing, ignore, join
from reshard.values.argument_types import Seconds, Size
from reshard.values.arguments import check_fields, parse_size
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence

    from reshard.storage.store import Kind

_PIECE_BYTES = 4 << 20
_MAX_KEPT_BYTES = 1 << 20
_BUFFER_BYTES = 1 << 20
_SECOND_NS = 1_000_000_000
_LIST_SECONDS = 20.0  # to list unfinished uploads
_ANSWER_SECONDS = 5.0  # for the first answer after a failure; a request is tried for a minute
_CLEAN_UP_SECONDS = 60.0  # for all requests of a clean-up together
_CREATE_PAUSES = (0.1, 1.0, 5.0)  # seconds, before an object that was not created is sent again


def is_available() -> bool:
    """Whether the core was compiled with the feature `remote`."""
    return hasattr(_core, "RemoteObject")


@dataclass(frozen=True, kw_only=True)
class BucketOptions:
    """How a bucket is reached, see `reshard.locate`; they hold for the whole process. Credentials are none of them.

    Credentials, and what is not set here, are found as the SDK of the cloud finds them: in variables of the
    environment, in files of its command line, from the identity of the instance or of the workload.

    Attributes:
        endpoint: the URL of the service, such as that of a server with the interface of S3. Default: AWS_ENDPOINT_URL,
            or the service of the cloud.
        region: the region of the bucket. Default: AWS_REGION.
        anonymous: send requests without a signature, as public buckets accept them. Default False.
        allow_http: send requests without TLS if the endpoint begins with `http://`. Default: AWS_ALLOW_HTTP, or False.
        retry_s: how long a request is tried again that fails for a passing reason, in seconds. Default 60.
        cache: a folder of this host in which what is read is kept, for all processes of the host. Default: none. It is
            safe to remove at any time.
        cache_size: the most bytes in it, or text such as "50GB"; what was not read for the longest time is removed.
            Default "50GB".

    Raises:
        ArgumentError: a value has the wrong type, or `endpoint` holds credentials.

    Example:
        >>> BucketOptions(endpoint="https://s3.example.org", anonymous=True).region is None
        True
    """

    endpoint: str | None = None
    region: str | None = None
    anonymous: bool = False
    allow_http: bool = False
    retry_s: Seconds | None = None
    cache: str | os.PathLike[str] | None = None
    cache_size: Size = "50GB"

    def __post_init__(self) -> None:
        check_fields(self)
        parse_size(self.cache_size)
        if self.endpoint is not None and "@" in self.endpoint:  # options are shown and sent to other hosts
            raise ArgumentError(
                "`endpoint` holds a name or a password before `@`, which a URL of a service does not have",
                hint="give credentials as the SDK of the cloud takes them, such as AWS_ACCESS_KEY_ID",
            )


class RemoteStore(ObjectStore):
    """A bucket, or one file behind HTTP. Stores of one root are equal.

    Args:
        root: the URL of the bucket, or the URL of the file without its signature.
    """

    is_opened_by_core = True
    takes_saves = False

    def __init__(self, root: str) -> None:
        self.root = root
        self.is_read_only = root.startswith("http")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteStore) and self.root == other.root

    def __hash__(self) -> int:
        return hash(self.root)

    def __repr__(self) -> str:
        return f"RemoteStore({self.root!r})"

    def __reduce__(self) -> tuple[Callable[..., RemoteStore], tuple[str, BucketOptions | None]]:
        """To pickle it: with the options of the bucket, which hold no credentials.

        Raises:
            UnsupportedError: it is a URL with a signature, which is in no pickle.
        """
        if self.root in _signed:
            raise _is_signed(self.root)
        return _sent_store, (self.root, options_to_send().get(self.root))

    def __deepcopy__(self, _memo: object) -> RemoteStore:
        return self

    # -- reading

    def stat(self, path: str, *, follow_links: bool = False) -> Stat:
        """See `Store.stat`; `identity` is the ETag."""
        found = self._status(path)
        if found is None:
            raise CheckpointNotFoundError(f"there is no file or folder {show(path)}", path=path)
        if found.n_bytes is None:
            return Stat("folder", 0, path, 0, 0, 0)
        return _stat_of_object(found)

    def _status(self, path: str) -> _core.ObjectStatus | None:
        if self.lacks(path):
            return None
        remembered = _remembered.get()
        if remembered is None:
            return _look(path)
        if path not in remembered.statuses:
            folder, _, name = path.rpartition("/")
            above = remembered.statuses.get(folder)
            # A bucket itself can hold any number of other things, and an object has nothing below its name.
            if above is not None and above.n_bytes is not None:
                remembered.statuses[path] = None
            else:
                listed = None if self.root in (path, folder) else remembered.folder(folder)
                remembered.statuses[path] = _look(path) if listed is None else listed.get(name)
        return remembered.statuses[path]

    def entries(self, path: str) -> list[Entry]:
        """See `Store.entries`."""
        return [Entry(name, kind) for name, kind, _ in self.sizes(path)]

    def sizes(self, path: str) -> list[tuple[str, Kind, int]]:
        """See `Store.sizes`: of one list."""
        remembered = _remembered.get()
        found = None if remembered is None else remembered.folder(path)
        if found is None:
            with failing("listing", path):
                found = dict(_core.object_names(path)[0])
        elif not found and path != self.root:
            raise CheckpointNotFoundError(f"there is no folder {show(path)}", path=path)
        return [(name, "folder" if one.n_bytes is None else "file", one.n_bytes or 0) for name, one in found.items()]

    @contextlib.contextmanager
    def remembering(self, *, contents: bool = False) -> Iterator[None]:
        """See `Store.remembering`: one list of a folder answers what is asked of the names in it."""
        if _remembered.get() is not None:
            yield
            return
        token = _remembered.set(_Remembered(keeps_contents=contents))
        try:
            yield
        finally:
            _remembered.reset(token)

    def read_small(self, path: str, max_bytes: int, *, follow_links: bool = False) -> bytes:
        """See `Store.read_small`: by one request."""
        content = self._kept(path)
        if content is not None and len(content) <= max_bytes:
            return content
        with self._regular(path):
            return self.read_object(path, max_bytes)

    def read_object(self, path: str, max_bytes: int) -> bytes:
        """See `ObjectStore.read_object`."""
        with failing("reading", path):
            content = _core.read_small_object(path, max_bytes)
        if content is None:
            raise DamagedFileError(f"{show(path)} has more than {max_bytes} bytes, the most that are read", path=path)
        return content

    def _kept(self, path: str) -> bytes | None:
        """The content of a small object, once for a block that remembers contents; None: it is to be read."""
        remembered = _remembered.get()
        if remembered is None or not remembered.keeps_contents:
            return None
        if path not in remembered.contents:
            found = self._status(path)
            if found is None or found.n_bytes is None or found.n_bytes > _MAX_KEPT_BYTES:
                return None
            with failing("reading", path):
                content = _core.read_small_object(path, _MAX_KEPT_BYTES)
            if content is None:
                return None
            remembered.contents[path] = content
        return remembered.contents[path]

    def read_head(self, path: str, n_bytes: int, *, follow_links: bool = False) -> bytes:
        """See `Store.read_head`."""
        with self._regular(path), failing("reading", path):
            return self._object(path).read(0, n_bytes)

    def read_tail(self, path: str, n_bytes: int, *, follow_links: bool = False) -> bytes:
        """See `Store.read_tail`."""
        with self._regular(path), failing("reading", path):
            opened = self._object(path)
            n_read = min(n_bytes, opened.n_bytes)
            return opened.read(opened.n_bytes - n_read, n_read)

    def pieces(
        self, path: str, n_bytes: int | None = None, ranges: Sequence[tuple[int, int]] | None = None
    ) -> Iterator[bytes]:
        """See `Store.pieces`."""
        opened: _core.RemoteObject | _Kept
        try:
            kept = self._kept(path)
            if kept is not None:
                opened = _Kept(kept)
            else:
                with self._regular(path), failing("opening", path):
                    opened = self._object(path)
        except CheckpointNotFoundError as error:
            raise DamagedFileError(error.message, path=path) from error
        check_file(path, True, opened.n_bytes, n_bytes)
        for begin, end in [(0, opened.n_bytes)] if ranges is None else ranges:
            for at in range(begin, end, _PIECE_BYTES):
                wanted = min(end - at, _PIECE_BYTES)
                with failing("reading", path):
                    piece = opened.read(at, wanted)
                if len(piece) < wanted:
                    raise DamagedFileError(f"{show(path)} has {opened.n_bytes} bytes, expected {end}", path=path)
                yield piece

    def open(self, path: str, *, follow_links: bool = False) -> BinaryIO:
        """See `Store.open`."""
        with self._regular(path), failing("opening", path):
            return io.BufferedReader(_Opened(self._object(path)), _BUFFER_BYTES)  # type: ignore[type-var]

    def _object(self, path: str) -> _core.RemoteObject:
        """An object, opened once for what a block that remembers reads of it, one after the other."""
        remembered = _remembered.get()
        if remembered is None:
            return _core.RemoteObject(path)
        if remembered.opened is None or remembered.opened[0] != path:
            remembered.opened = path, _core.RemoteObject(path)
        return remembered.opened[1]

    def lacks(self, path: str) -> bool:
        """Whether a path is below a file behind HTTP: nothing is there."""
        return self.root.startswith("http") and path != self.root

    def _regular(self, path: str) -> _Regular:
        return _Regular(self, path)

    def parent(self, path: str) -> str:
        """See `Store.parent`: that of a bucket, and of a file behind HTTP, is itself."""
        return path if path == self.root else path.rpartition("/")[0]

    def url(self, path: str) -> str:
        """See `Store.url`."""
        return path

    # -- changing

    def _check_writable(self, path: str) -> None:
        if self.is_read_only:
            raise UnsupportedError(
                f"{show(path)} is behind HTTP, which is only read", path=path, hint="write into a folder or a bucket"
            )

    def put_new(self, path: str, data: bytes) -> tuple[_core.PutNew, Exception | None]:
        """See `ObjectStore.put_new`. A request whose answer is lost is not sent again."""
        self._check_writable(path)
        with _changing("creating", path):
            return _core.put_new_object(path, data)

    def below(self, path: str, *, after: str = "", max_keys: int | None = None) -> list[tuple[str, Stat]]:
        """See `ObjectStore.below`."""
        with failing("listing", path):
            found = _core.objects_below(path, after=after, max_keys=max_keys)
        return [(name, _stat_of_object(one)) for name, one in found]

    def remembered(self, path: str, make: Callable[[], T]) -> T:
        """See `ObjectStore.remembered`."""
        remembered = _remembered.get()
        if remembered is None:
            return make()
        if path not in remembered.made:
            remembered.made[path] = make()
        return cast("T", remembered.made[path])

    def remove_files(self, paths: Sequence[str]) -> None:
        """See `ObjectStore.remove_files`."""
        if paths:
            self._check_writable(paths[0])
            with _changing("removing", paths[0]):
                _core.remove_objects(list(paths))

    def create(
        self,
        path: str,
        data: bytes = b"",
        mode: int = 0o666,
        *,
        durable: bool,
        announce: Callable[[str], None] = ignore,
    ) -> None:
        """See `Store.create`. After a lost answer the object is read: content that no other has is this one's."""
        is_sent_again = False
        for pause_s in (*_CREATE_PAUSES, None):
            outcome, reason = self.put_new(path, data)
            if outcome is PutNew.CREATED or (outcome is PutNew.EXISTS and not is_sent_again):
                break
            is_sent_again = True  # an earlier request may be carried out late
            try:
                found = self.read_small(path, len(data))
            except DamagedFileError:  # larger: that of another writer
                found = None
            except CheckpointNotFoundError:
                if pause_s is None:
                    raise reason or StorageError(f"creating {show(path)}", path=path) from None
                time.sleep(pause_s)
                continue
            outcome = PutNew.CREATED if found == data else PutNew.EXISTS
            break
        if outcome is PutNew.EXISTS:
            raise FileExistsError(errno.EEXIST, "it exists", path)

    @contextlib.contextmanager
    def writing(self, path: str, mode: int = 0o666, *, durable: bool) -> Iterator[BinaryIO]:
        """See `Store.writing`: one request writes the object when the block ends."""
        self._check_writable(path)
        file = io.BytesIO()
        yield file
        with _changing("writing", path):
            _core.put_object(path, file.getvalue())

    def upload(
        self,
        file: Path,
        path: str,
        *,
        checksums: tuple[int, bytes] | None = None,
        progress: _core.Progress | None = None,
    ) -> str:
        """Write an object with the content of a local file; a large one in parts, four at once.

        Args:
            file: the local file.
            path: the object, which is replaced.
            checksums: the size that the file must have, and the checksums of its chunks, compared with what is sent.
            progress: called as `progress(done_bytes, total_bytes)`; an error of it ends the upload.

        Returns:
            Its ETag.

        Raises:
            DamagedFileError: the file differs from its checksums.
            StorageError: the file cannot be read, or the service failed.
        """
        self._check_writable(path)
        with _changing("writing", path):
            return _core.upload_file(str(file), path, checksums=checksums, progress=progress) or ""

    def begin_upload(self, path: str) -> str:
        """Begin an upload in parts of an object, into which several processes send: its ID. Raises StorageError."""
        self._check_writable(path)
        with failing("writing", path):
            return _core.begin_upload(path)

    def complete_upload(
        self, path: str, upload: str, n_bytes: int, parts: Sequence[str], *, before: str | None = None
    ) -> str:
        """Make an object of the parts of an upload.

        Args:
            path: the object.
            upload: the ID of the upload.
            n_bytes: bytes of the object.
            parts: what the service has said of each part, in their order.
            before: the ETag of the object that had the name when the upload was begun; None: there was none.

        Returns:
            Its ETag.

        Raises:
            StorageError: the service failed; with the error number ESTALE, it does not have the upload or a part.
        """
        with _changing("writing", path):
            return _core.complete_upload(path, upload, n_bytes, list(parts), before=before) or ""

    def end_upload(self, path: str, upload: str) -> None:
        """End an upload that is not to be completed; no error if there is none. Raises StorageError."""
        with failing("ending an upload of", path):
            _core.end_upload(path, upload)

    def end_uploads(self, path: str, is_ended: Callable[[str], bool]) -> None:
        """See `ObjectStore.end_uploads`."""
        for name, upload in self.uploads_in(path):
            if is_ended(name):
                self.end_upload(f"{path}/{name}", upload)

    def uploads_in(self, folder: str, file: str | None = None) -> list[tuple[str, str]]:
        """The uploads in parts that were not completed: the name of the object in the folder, and the ID of the upload.

        Args:
            folder: the folder.
            file: only those of this file in it; None: all below the folder.

        Raises:
            StorageError: the service failed.
        """
        place = folder if file is None else f"{folder}/{file}"
        listed, _ = self.unfinished_uploads([place], is_file=file is not None, wait_s=_LIST_SECONDS)
        start = "".join(f"{part}/" for part in folder.removeprefix(self.root).split("/") if part)
        return [(one.key.removeprefix(start), one.upload_id) for one in listed]

    def unfinished_uploads(
        self, paths: Sequence[str], *, is_file: bool, wait_s: float
    ) -> tuple[list[_core.UnfinishedUpload], str | None]:
        """The uploads below folders, or of one file, that were not completed, and why these are not all.

        Args:
            paths: the folders, or the file.
            is_file: whether it is one.
            wait_s: seconds after which no answer counts.
        """
        with failing("listing unfinished uploads of", paths[0]):
            return _core.unfinished_uploads(paths, is_file=is_file, wait_s=wait_s)

    def lifecycle_rules(self, path: str, *, wait_s: float) -> tuple[list[_core.LifecycleRule], str | None]:
        """The rules of the bucket about objects and uploads, and why they are not known; see `unfinished_uploads`."""
        with failing("reading the lifecycle rules of", path):
            return _core.lifecycle_rules(path, wait_s=wait_s)

    @contextlib.contextmanager
    def ending_within(self, seconds: float) -> Iterator[None]:
        """Let requests of the block in this thread end together: for statuses, lists, small objects and removals.

        Args:
            seconds: after which a request that has no answer fails, and each later one.
        """
        _core.limit_requests(seconds)
        try:
            yield
        finally:
            _core.limit_requests(None)

    @contextlib.contextmanager
    def cleaning_up(self, path: str) -> Iterator[None]:
        """See `ObjectStore.cleaning_up`: for what `ending_within` says."""
        self.ask(path, wait_s=_ANSWER_SECONDS)
        with self.ending_within(_CLEAN_UP_SECONDS):
            yield

    def ask(self, path: str, *, wait_s: float) -> None:
        """Ask the service what has a name, to learn whether it answers.

        Args:
            path: the name.
            wait_s: seconds after which no answer counts.

        Raises:
            StorageError: it does not answer in time, or refuses to.
        """
        with failing("looking at", path):
            _core.object_status(path, wait_s=wait_s)

    @property
    def endpoint(self) -> str | None:
        """The URL of the service if options or the environment name one."""
        given = _options.get(self.root)
        if given is not None and given.endpoint is not None:
            return given.endpoint
        variables = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") if self.root.startswith("s3:") else ()
        return next((found for name in variables if (found := os.environ.get(name))), None)

    def append_line(self, path: str, line: bytes, mode: int = 0o666, *, durable: bool) -> None:
        """See `Store.append_line`: the object is replaced."""
        try:
            with self.open(path) as file:
                before = file.read()
        except CheckpointNotFoundError:
            before = b""
        ended = b"\n" if before and not before.endswith(b"\n") else b""
        self.replace(path, before + ended + line, durable=durable)

    def make_folder(self, path: str, mode: int = 0o777) -> None:
        """Has no effect: a folder exists while something is in it."""
        self._check_writable(path)

    def sync_folder(self, path: str) -> None:
        """Has no effect: every change is durable when its call returns."""

    def sync_together(self, files: Sequence[str], folders: Sequence[str]) -> None:
        """Has no effect: every change is durable when its call returns."""

    def replace_after(
        self, path: str, data: bytes, mode: int = 0o666, *, files: Sequence[str], folders: Sequence[str]
    ) -> None:
        """See `Store.replace_after`."""
        self.replace(path, data, mode, durable=True)

    def set_mode(self, path: str, mode: int) -> None:
        """Has no effect: objects have no permission bits."""

    def remove_file(self, path: str) -> None:
        """See `Store.remove_file`."""
        self.remove_files([path])

    def remove_folder(
        self,
        path: str,
        *,
        first: str,
        last: str,
        keep: Collection[str] = (),
        durable: bool,
        announce: Callable[[str], None],
    ) -> None:
        """See `Store.remove_folder`."""
        self._check_writable(path)
        announce(f"remove {first} of {path}")
        self.remove_files([join(path, first)])
        announce(f"remove {path}")
        inside = [name for name, _ in self.below(path) if name.partition("/")[0] not in {*keep, first}]
        self.remove_files([join(path, name) for name in inside if name != last])
        self.remove_files([join(path, name) for name in inside if name == last])

    def remove_empty_folder(self, path: str) -> None:
        """See `Store.remove_empty_folder`: one without objects does not exist."""
        if self.below(path, max_keys=1):
            raise StorageError(f"removing {show(path)}: it is not empty", path=path, errno=errno.ENOTEMPTY)

    # -- other processes

    def lock(self, path: str, *, shared: bool, seconds: float, make: bool = False) -> Lock:
        """See `Store.lock`: a bucket has no locks. Every range that is read is one of the version that was opened."""
        if not make and self.kind(path) is None:
            raise CheckpointNotFoundError(f"there is no file {show(path)}", path=path)
        return _NoLock()

    def hold(self, path: str) -> HeldFile:
        """Raises UnsupportedError: an object is not held open."""
        raise UnsupportedError(f"{show(path)} is in a bucket, where a claim is not a file that is held", path=path)

    def touched_ns(self, path: str) -> int | None:
        """See `Store.touched_ns`."""
        found = self._status(path)
        return None if found is None else found.modified * _SECOND_NS

    # -- properties of the store

    def abilities(self, path: str) -> Abilities:
        """See `Store.abilities`: none."""
        return Abilities(renames_folders=False, exchanges=False)

    def folder_identity(self, path: str) -> Hashable:
        """See `Store.folder_identity`."""
        return path

    def free_bytes(self, path: str) -> int | None:
        """See `Store.free_bytes`: no limit is known."""
        return None

    def is_writable(self, path: str) -> bool:
        """See `Store.is_writable`: no service tells it without a write."""
        return False

    def same_filesystem(self, one: str, other: str) -> bool:
        """See `Store.same_filesystem`: nothing is renamed."""
        return False

    def is_shared(self, path: str, shared_paths: str | None) -> bool:
        """See `Store.is_shared`: always."""
        return True

    def volatile(self, path: str) -> str | None:
        """See `Store.volatile`: nothing is lost."""
        return None


def remote_store(url: str, options: BucketOptions | None = None) -> tuple[RemoteStore, str]:
    """The store of a URL, and its path there.

    Args:
        url: of an object, a folder or a bucket. What is secret in a URL of HTTP is kept apart, and in no path.
        options: of its bucket.

    Raises:
        ArgumentError: it is no URL of this kind, or the bucket has other options in this process.
        UnsupportedError: the core was compiled without the feature `remote`.
    """
    if not is_available():
        raise UnsupportedError(
            f"{show(url.partition('?')[0])} is a URL, and this build of reshard reads local files only",
            hint="install a wheel, or build with the feature `remote`: `pip install .` in the repository does",
        )
    path = _core.shown_url(url)
    scheme, _, rest = path.partition("://")
    root = path if scheme in ("http", "https") else f"{scheme}://{rest.partition('/')[0]}"
    if scheme in ("http", "https") and path != url:
        _signed[root] = url
    if options is not None:
        _core.set_bucket_options(
            root,
            endpoint=options.endpoint,
            region=options.region,
            anonymous=options.anonymous,
            allow_http=options.allow_http,
            retry_s=options.retry_s,
            cache=None if options.cache is None else _cache(options.cache, options.cache_size),
        )
        _options[root] = options
    return RemoteStore(root), path


_options: dict[str, BucketOptions] = {}  # that were given in this process, by bucket
_signed: dict[str, str] = {}  # URLs of HTTP with a signature that were given, by the URL without it


def _is_signed(shown: str) -> UnsupportedError:
    return UnsupportedError(
        f"{show(shown)} was given with a signature or a password, which is not sent to other processes",
        path=shown,
        hint="do this in one process, or copy the file to where the others may read it by themselves",
    )


def check_sent(content: bytes) -> None:
    """Refuse to send what holds a URL with a signature. Raises UnsupportedError.

    Args:
        content: the pickle.
    """
    for shown, url in _signed.items():
        if url.encode() in content:
            raise _is_signed(shown)


def _sent_store(root: str, options: BucketOptions | None) -> RemoteStore:
    """The store of a pickle; its options become those of this process. Raises as `remote_store`."""
    if options is None or options_to_send().get(root) == options:
        return RemoteStore(root)
    return remote_store(root, options)[0]


def options_to_send() -> dict[str, BucketOptions]:
    """The options of buckets in this process, as another host needs them: without the folder of a cache."""
    return {root: replace(options, cache=None) for root, options in _options.items()}


def take_options(sent: Mapping[str, BucketOptions]) -> None:
    """Let buckets have the options that another process has sent.

    Raises:
        ArgumentError: a bucket has others in this process.
    """
    for root, options in sent.items():
        remote_store(root, options)


def use_cache(folder: str | os.PathLike[str] | None, size: str | int = "50GB") -> None:
    """Keep what this process reads of buckets in a folder of this host, as `BucketOptions.cache` does for one bucket.

    Args:
        folder: the folder; None: nothing is kept.
        size: the most bytes in it.

    Raises:
        ArgumentError: the size is none.
        StorageError: the folder cannot be made.
    """
    if is_available():
        with failing("making", str(folder)):
            _core.set_cache(None if folder is None else _cache(folder, size))


def _cache(folder: str | os.PathLike[str], size: str | int) -> tuple[str, int]:
    return str(Path(folder).absolute()), parse_size(size)


class _Kept:
    """The content of an object, read as an object is."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.n_bytes = len(content)

    def read(self, start: int, n_bytes: int) -> bytes:
        return self._content[start : start + n_bytes]


class _Remembered:
    """What is known of names: of a folder with many entries only what was looked at."""

    def __init__(self, *, keeps_contents: bool) -> None:
        self.keeps_contents = keeps_contents
        self.contents: dict[str, bytes] = {}
        self.statuses: dict[str, _core.ObjectStatus | None] = {}
        self._folders: dict[str, dict[str, _core.ObjectStatus] | None] = {}
        self.made: dict[str, object] = {}
        self.opened: tuple[str, _core.RemoteObject] | None = None  # the last one: each keeps its first bytes

    def forget(self) -> None:
        """Forget everything: names have changed."""
        self.contents.clear()
        self.statuses.clear()
        self._folders.clear()
        self.made.clear()
        self.opened = None

    def folder(self, path: str) -> dict[str, _core.ObjectStatus] | None:
        """The entries of a folder; empty if there is none; None: they are more than one page."""
        if path not in self._folders:
            try:
                with failing("listing", path):
                    entries, is_complete = _core.object_names(path, 1)
                self._folders[path] = dict(entries) if is_complete else None
            except CheckpointNotFoundError:
                self._folders[path] = {}
            except StorageError as error:
                if error.errno != errno.EACCES:  # lists can be permitted below a folder only
                    raise
                self._folders[path] = None
        return self._folders[path]


_remembered: ContextVar[_Remembered | None] = ContextVar("_remembered", default=None)


@contextlib.contextmanager
def _changing(doing: str, path: str) -> Iterator[None]:
    """As `failing`, for a change: what is remembered of names is forgotten."""
    try:
        with failing(doing, path):
            yield
    finally:
        if (remembered := _remembered.get()) is not None:
            remembered.forget()


def _stat_of_object(found: _core.ObjectStatus) -> Stat:
    modified_ns = found.modified * _SECOND_NS
    return Stat("file", found.n_bytes or 0, found.e_tag, modified_ns, modified_ns, 0)


def _look(path: str) -> _core.ObjectStatus | None:
    with failing("looking at", path):
        return _core.object_status(path)


class _Regular:
    """Says of a folder that it is no file, where a service only says that there is no object."""

    def __init__(self, store: RemoteStore, path: str) -> None:
        self._store = store
        self._path = path

    def __enter__(self) -> None:
        if self._store.lacks(self._path) or (_remembered.get() is not None and self._store.kind(self._path) is None):
            raise CheckpointNotFoundError(f"there is no file {show(self._path)}", path=self._path)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, CheckpointNotFoundError) and self._store.kind(self._path) == "folder":
            raise DamagedFileError(f"{show(self._path)} is not a regular file", path=self._path) from None


class _NoLock(Lock):
    """The lock of a store without locks."""

    errno = errno.ENOLCK

    def is_current(self) -> bool:
        """Whether the file is the one that was locked: ranges are read by its ETag."""
        return True

    def duplicate(self) -> Lock:
        """See `Lock.duplicate`."""
        return self

    def close(self) -> None:
        """See `Lock.close`."""


class _Opened(io.RawIOBase):
    """An object as a file."""

    def __init__(self, opened: _core.RemoteObject) -> None:
        self._opened = opened
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._opened.n_bytes}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        data = self._opened.read(self._at, len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
