"""Destinations of a conversion: the files that are written, and the folder that they are published in.

A `Job` is the source and the destination. Its files are planned first; then the core streams them one by one.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from reshard.commit.filling import filled_folder, is_staging
from reshard.commit.publication import SHARED_PREFIX, made_folder, published_folder
from reshard.conversion.bucket_shares import BucketShares, SentParts, ShareRecord, WrittenObject, cut_files
from reshard.conversion.buckets import BucketFolder, filled_bucket, home_of, is_claimed, left_in
from reshard.conversion.shares import (
    WrittenPart,
    cut,
    folder_of,
    made_once,
    missing,
    place,
    read_record,
    remove_shares,
    warn_of_others,
    write_record,
)
from reshard.errors import CheckpointNotFoundError, DamagedFileError, DestinationExistsError, ReshardError, StorageError
from reshard.storage.changes import make_folders, set_mode, temporary_folder, try_lock
from reshard.storage.location import locate
from reshard.storage.names import example_of
from reshard.values.words import show
from reshard.write.contents import DtypeAndPart, FileContent, JointProgress
from reshard.write.shard_files import WrittenFile

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    import numpy as np

    from reshard import _core
    from reshard.commit.attempts import ValueRecord
    from reshard.conversion.known_files import KnownFiles
    from reshard.conversion.shares import Part, SentPart, Share, Shared
    from reshard.conversion.source import Source
    from reshard.layout import BoundLayout
    from reshard.storage.location import Location

    Produce = Callable[[Location], Mapping[str, ValueRecord]]

_SMALL_BYTES = 1 << 20  # of files that may be written several at a time
_FILES_AT_ONCE = 1024  # after which progress is reported

_log = logging.getLogger("reshard")
_T = TypeVar("_T")


@dataclass(frozen=True)
class File:
    """One file: its name, with a subfolder or without, the request for its arrays, and its other bytes.

    `container` is None for a safetensors file.
    """

    name: str
    request: _core.Request
    container: _core.Container | None = None


@dataclass(frozen=True)
class Options:
    """Options of every file."""

    metadata: dict[str, str]
    dtype: str | None
    buffers: _core.Buffers
    threads: int | None
    durable: bool
    file_mode: int
    folder_mode: int
    keep_modes: bool  # whether a new file gets the permission bits of the file that it replaces
    progress: _core.Progress | None
    is_dequantised: bool = False  # whether quantised weights of the source are ordinary tensors now
    quantised_as: Mapping[str, Any] | None = None  # `quantization_config` of weights that are quantised now


@dataclass(frozen=True)
class NewNames:
    """How a conversion changes names.

    Attributes:
        of: the new name of a tensor or a module; None: it is left out.
        parameters: the new names of tensors of the model that change, by the old ones.
    """

    of: Callable[[str], str | None]
    parameters: Mapping[str, str]


@dataclass(frozen=True)
class Job:
    """A conversion: the source's tensors that are written, and where.

    Attributes:
        source: the opened source.
        keys: its tensors that are written.
        target: the destination.
        options: options of every file.
        overwrite: whether files of an earlier conversion are replaced.
        known_files: files of all formats that conversions write.
        counters: counters of the source that are not tensors there, as tensors, for formats that store them so.
        shared: this share of the work; None: all of it.
        left_out: names of tensors that were left out; a layout may have rules for them.
        is_renamed: whether tensors have other names than in the source, or are fused or split.
        names: how names change, if the state beside the tensors can be renamed alike.
    """

    source: Source
    keys: list[str]
    target: Location
    options: Options
    overwrite: bool
    known_files: KnownFiles
    counters: Mapping[str, np.ndarray] = field(default_factory=dict)
    shared: Shared | None = None
    left_out: Collection[str] = ()
    is_renamed: bool = False
    names: NewNames | None = None

    def whole_request(self, keys: Sequence[str]) -> _core.Request:
        """The request for some of the source's tensors, whole and in this order."""
        return self.source.data.index.whole_request(keys)

    def sizes(self, request: _core.Request) -> list[int]:
        """The bytes of each array of a request. Errors as of `arrays`."""
        self.source.data.check(self.keys)
        return self.source.data.index.request_sizes(request, dtype=self.options.dtype)

    def arrays(self, request: _core.Request) -> list[_core.PlannedArray]:
        """The arrays of a request for some of the tensors that are written.

        Raises:
            MismatchError: ranks hold different bytes of a tensor that the strategy of rank folders does not list.
            UnsupportedError: a tensor cannot be cast, or is not an integer number of bytes.
        """
        self.source.data.check(self.keys)
        return self.source.data.index.request_arrays(request, dtype=self.options.dtype)

    def plan(self, request: _core.Request) -> _core.Plan:
        """The copies of a request for some of the tensors that are written."""
        return self.source.plan(request, dtype=self.options.dtype, keys=self.keys)


@dataclass
class Written:
    """What was written; `pending`: shares that must be written before anything is published.

    `sent` is what a share of an iteration in a bucket has written of each file.
    """

    path: Location
    n_files: int
    n_bytes: int
    pending: list[int] = field(default_factory=list)
    not_expressible: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    sent: dict[str, SentPart] = field(default_factory=dict)


def file_sizes(job: Job, files: list[File]) -> list[int]:
    """Bytes of the arrays of each file."""
    # A plan keeps files open: it is created when it is executed.
    return job.source.data.index.request_bytes([file.request for file in files], dtype=job.options.dtype)


def write_files(
    job: Job,
    folder: Location,
    files: list[File],
    sizes: list[int],
    before_each: Callable[[], None] = lambda: None,
) -> dict[str, _core.Written]:
    """Write the files; returns the record of each, by name.

    Args:
        job: the conversion.
        folder: the folder to write into. Several files are complete only when this returns: it is published afterwards.
        files: the files.
        sizes: bytes of the arrays of each file.
        before_each: called before each file that is not small.

    Raises:
        MismatchError: among others, another program changed the source while it was read.
    """
    options = job.options
    progress = JointProgress(options.progress, sum(sizes))
    if folder.is_local:
        for name in {file.name.rpartition("/")[0] for file in files} - {""}:
            make_folders(folder / name, options.folder_mode, inside=folder)
    written = {}
    for first in range(0, len(files), _FILES_AT_ONCE):
        some, of_some = files[first : first + _FILES_AT_ONCE], sizes[first : first + _FILES_AT_ONCE]
        reports = [progress.of_file(n_bytes) for n_bytes in of_some]
        if reports[0] is not None:
            reports[0](0, of_some[0])
        small = _write_small(job, folder, some, of_some)
        for file, n_bytes, report in zip(some, of_some, reports, strict=True):
            record = small.get(file.name)
            if record is None:
                before_each()
                record = _streamed(job.plan(file.request).write, job, folder, file, report)
            elif report is not None:
                report(n_bytes, n_bytes)
            written[file.name] = record
    job.source.check_unchanged()
    return written


def _write_small(job: Job, folder: Location, files: list[File], sizes: list[int]) -> dict[str, _core.Written | None]:
    """Write the small ones of some files, several at a time; returns their records by name."""
    small = [
        (file.name, file.request)
        for file, n_bytes in zip(files, sizes, strict=True)
        if n_bytes <= _SMALL_BYTES and file.container is None
    ]
    if len(small) <= 1 or not folder.is_local:
        return {}
    options = job.options
    job.source.data.check(job.keys)
    records = job.source.data.index.write_small(
        str(folder),
        small,
        dtype=options.dtype,
        metadata=options.metadata,
        threads=options.threads,
        durable=options.durable,
        mode=options.file_mode,
    )
    return {name: record for (name, _), record in zip(small, records, strict=True)}


@contextlib.contextmanager
def produced(job: Job, published: Location, files: list[File], sizes: list[int]) -> Iterator[Written | Produce]:
    """Yield a function that fills the published folder, or the report if nothing is published.

    Without shares, the function writes the files. With shares, this share is first written into the folder of the
    shares, unless it has a record. If it was the last share, the function links the files of all shares.

    Args:
        job: the conversion.
        published: the path in the report.
        files: all files of the conversion.
        sizes: bytes of the arrays of each file.
    """
    if job.shared is None:
        yield lambda folder: write_files(job, folder, files, sizes)
        return
    share, gathered, spread = job.shared.share, job.shared.folder, job.shared.spread
    containers = {file.name: file.container for file in files}

    def fill(folder: Location) -> Mapping[str, ValueRecord]:
        if spread is not None:  # now that the destination is claimed
            spread(sum(sizes), None)
        return place(gathered, folder, containers, share.count, durable=job.options.durable)

    if not job.shared.is_sent:
        warn_of_others(job.target, gathered)
    if spread is not None:
        with made_folder(gathered, mode=job.options.folder_mode, durable=False), try_lock(gathered) as is_ours:
            if not is_ours:
                raise DestinationExistsError(
                    f"another process does this conversion, in {show(str(gathered))}",
                    path=str(gathered),
                    hint="wait for it, or end it",
                )
            try:
                yield fill
            finally:
                remove_shares(gathered)
        return
    if not job.shared.is_sent:
        make_folders(gathered, job.options.folder_mode)
    elif not gathered.is_folder():
        raise CheckpointNotFoundError(
            f"{show(str(gathered))} is not there, which the process that started the conversion has made: the source "
            "was changed meanwhile, or this host sees another one, or another destination",
            path=str(gathered),
        )
    own = read_record(gathered, share)
    if own is None:
        if _is_filled(published) and not job.overwrite:
            with contextlib.suppress(ReshardError):  # it was made anew if others have published since this share began
                gathered.store.remove_empty_folder(gathered.path)
            raise DestinationExistsError(
                f"{show(str(published))} was made while share {share.index} of {share.count} began",
                path=str(published),
                hint="if other shares of this conversion have made it, it is complete",
            )
        own = _write_share(job, gathered, files, sizes, share)
        write_record(gathered, share, own, mode=job.options.file_mode, durable=job.options.durable)
    report = Written(published, len(own), sum(part.n_bytes for part in own.values()))
    if job.shared.is_sent:
        yield report
        return
    # Another process that publishes is waited for: then the folder is gone, or it has failed, and this one publishes.
    with try_lock(gathered, waits=True) as is_there:
        report.pending = missing(gathered, share.count) if is_there else []
        if report.pending or not is_there:
            yield report
            return
        yield fill
        remove_shares(gathered)


def _is_filled(target: Location) -> bool:
    if target.is_folder():
        return not all(map(is_staging, target.names()))
    return target.exists()


def _write_share(
    job: Job, folder: Location, files: list[File], sizes: list[int], share: Share
) -> dict[str, WrittenPart]:
    """Write the files and the parts of files that belong to a share."""
    parts = cut(sizes, share.count)
    names = {files[part.file].name for of_share in parts for part in of_share if not part.is_whole}
    modes = {"mode": job.options.file_mode, "folder_mode": job.options.folder_mode}
    has_ranges = not all(part.is_whole for part in parts[share.index])
    token = made_once(folder, names, **modes) if has_ranges else ""
    written, ranges = write_parts(job, folder, files, sizes, parts[share.index], in_ranges=folder_of(folder, token))
    records = {name: WrittenPart(0, one.n_bytes, WrittenFile.of(one)) for name, one in written.items()}
    for name, part in ranges.items():
        records[name] = WrittenPart(part.start, part.end, WrittenFile.of(part), tuple(part.sums), token)
    return records


def write_parts(
    job: Job,
    folder: Location,
    files: Sequence[File],
    sizes: Sequence[int],
    parts: Sequence[Part],
    *,
    before_each: Callable[[], None] = lambda: None,
    in_ranges: Location | None = None,
    upload_of: Callable[[str], str | None] = lambda _: None,
) -> tuple[dict[str, _core.Written], dict[str, _core.WrittenRange]]:
    """Write the files of a share, and its parts of files; returns the record of each, by name.

    Args:
        job: the conversion.
        folder: the folder to write into.
        files: all files of the conversion.
        sizes: bytes of the arrays of each file.
        parts: those of the share.
        before_each: called before each part, and before each file that is not small.
        in_ranges: the folder of the files of which there are parts; None: the same.
        upload_of: the ID of the upload of a file of which there are parts, in a bucket.
    """
    whole = [part.file for part in parts if part.is_whole]
    progress = JointProgress(job.options.progress, sum(part.end - part.start for part in parts))
    of_whole = replace(job, options=replace(job.options, progress=progress.of_file(sum(sizes[i] for i in whole))))
    written = write_files(of_whole, folder, [files[i] for i in whole], [sizes[i] for i in whole], before_each)
    ranges: dict[str, _core.WrittenRange] = {}
    for part in parts:
        if part.is_whole:
            continue
        before_each()
        file, report = files[part.file], progress.of_file(part.end - part.start)
        plan, upload = job.plan(file.request), upload_of(file.name)
        write = functools.partial(plan.write_part, start=part.start, end=part.end, upload=upload)
        ranges[file.name] = _streamed(write, job, in_ranges or folder, file, report)
    if ranges:  # else it was checked after the files
        job.source.check_unchanged()
    return written, ranges


def _streamed(write: Callable[..., _T], job: Job, folder: Location, file: File, progress: _core.Progress | None) -> _T:
    """Write a file, or a part of one, with the options of every file.

    Args:
        write: writes it, such as `_core.Plan.write`.
        job: the conversion.
        folder: the folder of the file.
        file: the file.
        progress: called as `progress(done_bytes, total_bytes)`.
    """
    options = job.options
    return write(
        str(folder / file.name),
        metadata=options.metadata,
        container=file.container,
        buffers=options.buffers,
        threads=options.threads,
        durable=options.durable,
        mode=options.file_mode,
        progress=progress,
    )


def n_bytes_of(written: Mapping[str, ValueRecord]) -> int:
    """Bytes of the files."""
    return sum(one.n_bytes for one in written.values())


def dtypes_and_parts(job: Job) -> dict[str, DtypeAndPart]:
    """Of the tensors that are written, after a cast. Checks casts and keys of all of them."""
    arrays = job.arrays(job.whole_request(job.keys))
    optimizer = set(job.source.keys("optimizer"))
    return {key: (dtype, "optimizer" if key in optimizer else "model") for key, dtype, _, _ in arrays}


def as_files(bound: BoundLayout, files: Sequence[FileContent]) -> list[File]:
    """Planned files with the requests for their arrays."""
    requests = bound.requests_of([(file.rank, file.arrays) for file in files])
    return [File(file.name, request) for file, request in zip(files, requests, strict=True)]


# -- the destination


def set_original_modes(folder: Location) -> None:
    """Set the permissions of a folder and its files to those that MindSpore Transformers sets."""
    for name in folder.names():
        set_mode(folder / name, 0o400 if name.endswith(".safetensors") else 0o640)
    set_mode(folder, 0o750)


@contextlib.contextmanager
def destination_folder(
    job: Job, subfolders: Collection[str] = (), is_ours: Callable[[Location], bool] | None = None
) -> Iterator[Location]:
    """Yield a folder whose entries are moved to the destination if the block ends without an exception.

    An existing destination is filled and keeps its mode and owner; files of an earlier conversion are removed.

    Args:
        job: the conversion.
        subfolders: folders in it that are written too.
        is_ours: returns whether an entry of an existing destination is replaced.
    """
    options, target = job.options, job.target
    if target.is_folder():
        with filled_folder(
            target,
            replaces=(is_ours or functools.partial(is_our_file, job)) if job.overwrite else None,
            commits=job.known_files.commits,
            durable=options.durable,
            mode=options.folder_mode,
            keep_modes=options.keep_modes,
            subfolders=subfolders,
        ) as folder:
            yield folder
        return
    with (
        made_folder(target.parent, mode=options.folder_mode, durable=options.durable),
        published_folder(
            target,
            durable=options.durable,
            mode=options.folder_mode,
            subfolders=subfolders,
            inside=None if job.shared is None else job.shared.folder,
        ) as folder,
    ):
        yield folder


def publish_folder(
    job: Job,
    files: list[File],
    small: Mapping[str, bytes | str] | None = None,
    *,
    path: Location | None = None,
    subfolders: Collection[str] = (),
    is_ours: Callable[[Location], bool] | None = None,
    warnings: Collection[str] = (),
    finish: Produce = lambda _: {},
) -> Written:
    """Write all files of a conversion and publish the folder, unless other shares are still to be written.

    Args:
        job: the conversion.
        files: the files with tensors.
        small: further files and what they contain, by their paths in the folder or in one of `subfolders`.
        path: the path in the report. Default: the folder.
        subfolders: as for `destination_folder`.
        is_ours: as for `destination_folder`.
        warnings: of the report.
        finish: called with the folder before it is published. It returns the files that the report counts.
    """
    if not job.target.is_local:

        def start(bucket: BucketFolder) -> Mapping[str, ValueRecord]:
            for name in subfolders:
                make_folders(bucket.beside / name)
            for name, data in (small or {}).items():
                (bucket.beside / name).replace(data, durable=False)
            return finish(bucket.beside)

        is_replaced = is_ours or functools.partial(is_our_file, job)
        if job.shared is not None:
            report = _publish_shares(job, job.shared, files, start, is_replaced)
            return replace(report, path=path or job.target, warnings=list(warnings))
        with filled_bucket(job.target, commits=job.known_files.commits) as bucket:
            beside = start(bucket)
            bucket.claim([file.name for file in files], overwrite=job.overwrite)
            if job.overwrite:
                bucket.clear(is_replaced)
            written = _fill_bucket(job, bucket, files) | dict(beside)
        return Written(path or job.target, len(written), n_bytes_of(written), warnings=list(warnings))
    with produced(job, job.target, files, file_sizes(job, files)) as fill:
        if isinstance(fill, Written):
            return fill
        with destination_folder(job, subfolders, is_ours) as folder:
            written = dict(fill(folder))
            for name, data in (small or {}).items():
                (folder / name).replace(data, job.options.file_mode, durable=job.options.durable)
            written |= finish(folder)
    return Written(path or job.target, len(written), n_bytes_of(written), warnings=list(warnings))


def write_object(job: Job, file: File) -> Written:
    """Write the one file of a conversion into a bucket, where it appears as a whole.

    Args:
        job: the conversion.
        file: the file that is the destination.
    """
    if job.shared is not None:
        report = _publish_shares(job, job.shared, [file], lambda _: {}, lambda _: False, file=file.name)
        return replace(report, path=job.target)
    folder, sizes = job.target.parent, file_sizes(job, [file])
    if not left_in(home_of(job.target)):
        written = write_files(job, folder, [file], sizes)
    else:  # of shares of another conversion
        with filled_bucket(folder, commits=(), file=file.name) as bucket:
            bucket.claim([file.name], overwrite=job.overwrite)
            bucket.clear(lambda _: False)
            written = write_files(job, folder, [file], sizes, bucket.check_claim)
            bucket.wrote({name: one.e_tag for name, one in written.items()})
    return Written(job.target, 1, n_bytes_of(written))


def _fill_bucket(job: Job, bucket: BucketFolder, files: list[File]) -> dict[str, ValueRecord]:
    """Write all files of a conversion but those that identify a checkpoint."""
    bucket.write_beside()
    by_name = {file.name: file for file in files}
    ordered = [by_name[name] for name in bucket.in_order(by_name)]
    written = write_files(job, bucket.target, ordered, file_sizes(job, ordered), bucket.check_claim)
    bucket.wrote({name: one.e_tag for name, one in written.items()})
    return dict(written)


def _publish_shares(
    job: Job,
    shared: Shared,
    files: list[File],
    start: Callable[[BucketFolder], Mapping[str, ValueRecord]],
    is_replaced: Callable[[Location], bool],
    *,
    file: str | None = None,
) -> Written:
    """Write a share of a conversion into a bucket, and publish if all shares are there.

    Args:
        job: the conversion.
        shared: the share.
        files: all files with tensors.
        start: called with the folder, writes the files without tensors beside it; returns those that are counted.
        is_replaced: whether an entry of the destination is replaced.
        file: the name of the file if it alone is the destination.
    """
    with temporary_folder("reshard-convert-") as local:
        target = job.target if file is None else job.target.parent
        bucket = BucketFolder(target, locate(local), job.known_files.commits, file)
        shares = BucketShares(bucket, shared.folder, shared.share)
        bucket.lost = shares.lost()
        beside = dict(start(bucket))
        names = bucket.in_order(file.name for file in files)
        all_names = {*names, *bucket.names_beside()}
        by_name = {file.name: file for file in files}
        ordered = [by_name[name] for name in names]
        sizes = file_sizes(job, ordered)
        parts = cut_files(sizes, shared.share.count)
        if shared.is_sent:
            if not bucket.join(shared.folder.name, 0.0):
                raise CheckpointNotFoundError(
                    f"{show(str(job.target))} is not prepared by the process that started the conversion: the "
                    "source was changed meanwhile, or this host sees another one, or another destination",
                    path=str(job.target),
                )
        elif shared.spread is None and bucket.has_ended() and shares.is_published(all_names):  # it is called again
            return Written(job.target, 0, 0)
        elif bucket.claim(names, overwrite=job.overwrite, digest=shared.folder.name, joins=shared.spread is None):
            try:
                bucket.check_claim()
                if shared.spread is None and shares.is_published(all_names):  # by others, before this claim was made
                    bucket.undo()
                    return Written(job.target, 0, 0)
                shares.remove()
                if job.overwrite:
                    bucket.clear(is_replaced)
                bucket.write_beside()
                bucket.begin_uploads({ordered[part.file].name for some in parts for part in some if not part.is_whole})
                bucket.prepared()
            except DestinationExistsError as error:
                # Another one has taken over, perhaps a share of the same conversion.
                bucket.end_uploads()
                if shared.spread is not None or not bucket.join(shared.folder.name):
                    bucket.undo(error)
                    raise
            except BaseException as error:
                bucket.undo(error)
                raise
        if shared.spread is not None:
            try:
                shared.spread(sum(sizes), None)
                return _commit_shares(job, bucket, shares, ordered, beside)
            except BaseException as error:
                bucket.undo(error, shares.remove)
                raise
        report = Written(job.target, 0, 0)
        try:
            own = shares.own()
            if own is None:
                with shares.noting_lost_uploads():
                    own = _write_bucket_share(job, bucket, ordered, sizes, parts[shared.share.index])
                shares.record(own)
            report = Written(job.target, own.n_files, own.n_bytes, shares.missing())
            if report.pending and not shared.is_sent:  # or another process has published, and removed the records
                bucket.check_claim()
            if report.pending or shared.is_sent:
                return report
            if (publisher := shares.publisher()) != shared.share.index:
                return replace(report, pending=[publisher])
            if bucket.has_ended() and shares.is_published(all_names):
                shares.remove(is_published=True)
                return report
            try:
                return _commit_shares(job, bucket, shares, ordered, beside)
            except BaseException:
                shares.withdraw()
                raise
        except (DamagedFileError, DestinationExistsError, StorageError) as error:
            # DamagedFileError: the records were removed while they were read.
            is_gone = not isinstance(error, StorageError) or error.errno == errno.ESTALE
            if is_gone and not shared.is_sent and shares.is_published_by_others(all_names):
                shares.remove(is_published=True)
                return replace(report, pending=[])  # by another share, or by the same one in another process
            raise


def _commit_shares(
    job: Job,
    bucket: BucketFolder,
    shares: BucketShares,
    ordered: list[File],
    beside: Mapping[str, ValueRecord],
) -> Written:
    """Complete the uploads, write the last file if no share has sent it, and publish what all shares have written."""
    last = [file for file in ordered[-1:] if file.name not in bucket.uploads]
    found, parts = shares.all({file.name for file in ordered} - {file.name for file in last})
    bucket.wrote({name: one.e_tag for name, one in found.items()})
    with shares.noting_lost_uploads():
        for one in (file for file in ordered if file.name in parts):
            bucket.check_claim()
            sent = _all_sent(job, bucket, one, parts[one.name])
            bucket.complete_upload(one.name, parts[one.name][0].n_file_bytes, sent)
    written = write_files(job, bucket.target, last, file_sizes(job, last), bucket.check_claim)
    bucket.wrote({name: one.e_tag for name, one in written.items()})
    is_alone = job.shared is None or job.shared.spread is not None
    bucket.commit((lambda _: None) if is_alone else shares.record_all)
    shares.remove(is_published=not is_alone)
    n_bytes = sum(one.n_bytes for one in found.values()) + sum(one[0].n_file_bytes for one in parts.values())
    n_files = len(found) + len(parts) + len(written) + len(beside)
    return Written(job.target, n_files, n_bytes + n_bytes_of(written) + n_bytes_of(beside))


def _all_sent(job: Job, bucket: BucketFolder, file: File, parts: list[SentParts]) -> list[str]:
    """What the service has said of all parts of a file; those that no share could send are sent now."""
    sent = [part for one in parts for part in one.sent]
    left = [number for number, part in enumerate(sent) if not part]
    if not left or file.container is None:
        return sent
    try:
        new = job.plan(file.request).send_left(
            str(bucket.target / file.name),
            bucket.upload_of(file.name),
            left,
            container=file.container,
            sums=[part for one in parts for part in one.sums],
            buffers=job.options.buffers,
            threads=job.options.threads,
        )
        job.source.check_unchanged()
    except StorageError as error:
        if error.errno != errno.ESTALE or not str(error.path).startswith(str(bucket.target)):
            raise
        new = [""] * len(left)  # an earlier publication has completed the upload, or it is lost: the next step tells it
    found = iter(new)
    return [part or next(found) for part in sent]


def _write_bucket_share(
    job: Job, bucket: BucketFolder, files: list[File], sizes: list[int], parts: list[Part]
) -> ShareRecord:
    """Write the files of a share, and send its parts of files."""
    written, ranges = write_parts(
        job, bucket.target, files, sizes, parts, before_each=bucket.check_claim, upload_of=bucket.upload_of
    )
    sent = {
        name: SentParts(
            bucket.upload_of(name), one.n_bytes, one.end - one.start, one.first_sent, tuple(one.sent), tuple(one.sums)
        )
        for name, one in ranges.items()
    }
    return ShareRecord({name: WrittenObject(one.n_bytes, one.e_tag or "") for name, one in written.items()}, sent)


def is_our_file(job: Job, entry: Location) -> bool:
    """Whether a file was written by an earlier conversion, by the mark that its writer leaves in it."""
    mark = job.known_files.mark_of(entry)
    return mark is not None and entry.kind() == "file" and mark(entry)


def check_folder_free(job: Job, would_be_lost: Callable[[Location], bool] = lambda _: False) -> None:
    """Refuse a destination folder with files that must not be replaced, or that would be mixed with new files.

    Args:
        job: the conversion.
        would_be_lost: returns whether an entry is refused, besides weight files that no earlier conversion wrote.
    """
    target = job.target
    found = target.found()
    if found is None:
        return
    if found != "folder":
        raise DestinationExistsError(f"{target} is a file; the destination is to be a folder", path=str(target))
    own: set[str] = set()
    if not target.is_local and job.shared is not None:  # of shares of the same conversion
        own = {name.partition("/")[0] for name in left_in(target, job.shared.folder.name)}
    names = target.names()
    # In a bucket, what is beside a claim counts for nothing without it, and is removed.
    counts = target.is_local or is_claimed(names)
    is_known = bool(own) or (job.shared is not None and job.shared.is_sent) or not counts
    there = [target / name for name in names if name not in own]
    entries = [entry for entry in there if not _is_left_over(entry, is_known=is_known)]
    if not entries:
        return
    if not job.overwrite:
        raise DestinationExistsError(
            f"{target} is not empty: it holds {example_of(entry.name for entry in entries)}",
            path=str(target),
            hint="choose another destination, or give `overwrite=True` to replace the files of an earlier conversion",
        )
    left = frozenset() if target.is_local else {name.partition("/")[0] for name in left_in(target)}
    for entry in entries:
        if entry.name in left:  # of a conversion that was killed
            continue
        if would_be_lost(entry) or (job.known_files.mark_of(entry) is not None and not is_our_file(job, entry)):
            raise DestinationExistsError(
                f"{entry} was not written by an earlier conversion and would be mixed up with what is written now",
                path=str(entry),
                hint="move it away, or choose another destination",
            )


def _is_left_over(entry: Location, *, is_known: bool) -> bool:
    """Whether an entry is from a conversion that was killed or is still running. It is logged and not changed.

    Args:
        entry: the entry.
        is_known: it is of other shares of this conversion, or counts for nothing, and is not logged.
    """
    if not is_staging(entry.name):
        return False
    if SHARED_PREFIX not in entry.name and not is_known:
        _log.warning("%s is left by a conversion that did not end: remove it if none is running", entry)
    return True
