"""An iteration of a root in a bucket that several processes write. One of them begins and publishes it.

The files of an attempt have their names from the start, and count for nothing before it is published: see
`commit.log_protocol`. The process that has the claim of the root begins the attempt, and an upload in parts for each
file of which several shares write ranges, and tells the others. Each of them writes its files, sends its parts, and
returns what the manifest has to say of them. Nothing else is left in the root, so a process that does not hear from
the one that began cannot take part.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

from reshard.commit import log_claims
from reshard.conversion.bucket_shares import MIN_UPLOAD_BYTES
from reshard.conversion.buckets import begin_uploads, bucket_of, end_uploads
from reshard.conversion.destinations import Written, write_parts
from reshard.conversion.shares import Begun, SentPart, WrittenPart, cut, joined
from reshard.errors import CheckpointNotFoundError, DamagedFileError, ReshardError
from reshard.values.words import show
from reshard.write.shard_files import WrittenFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.conversion.destinations import File, Job
    from reshard.conversion.shares import Part, Shared, Spread
    from reshard.storage.location import Location


def write_share(job: Job, shared: Shared, begun: Begun, files: Sequence[File], sizes: Sequence[int]) -> Written:
    """Write the share of this process.

    Args:
        job: the conversion.
        shared: the share.
        begun: what the process says that has begun the iteration.
        files: all files of the conversion.
        sizes: bytes of the arrays of each file.

    Raises:
        CheckpointNotFoundError: this process plans another conversion, since it sees another source.
        ClaimedError: the iteration is not to be published any more.
    """
    folder = job.target / begun.folder
    if shared.folder.name != begun.digest:
        raise CheckpointNotFoundError(
            f"this process plans another conversion to {show(str(job.target))} than the process that started it: the "
            "source was changed meanwhile, or this host sees another one",
            path=str(job.source.path),
            hint="all hosts must see the source under the same path, and have the same version of reshard",
        )
    check = functools.partial(log_claims.check_attempt, folder)
    check()
    parts = _cut(sizes, shared.share.count)[shared.share.index]
    upload_of = begun.uploads.__getitem__  # one without an upload is an error
    written, ranges = write_parts(job, folder, files, sizes, parts, before_each=check, upload_of=upload_of)
    sent = {name: SentPart(0, one.n_bytes, WrittenFile.of(one)) for name, one in written.items()}
    for name, part in ranges.items():
        sent[name] = SentPart(part.start, part.end, WrittenFile.of(part), part.first_sent, tuple(part.sent))
    return Written(job.target, len(sent), sum(one.end - one.start for one in sent.values()), sent=sent)


def written_by_shares(
    shared: Shared, spread: Spread, files: Sequence[File], sizes: Sequence[int], folder: Location
) -> dict[str, WrittenFile]:
    """Let other processes write all shares of an iteration: the record of each file.

    Args:
        shared: the shares.
        spread: lets the processes write them.
        files: all files of the conversion.
        sizes: bytes of the arrays of each file.
        folder: the folder of the attempt.

    Raises:
        DamagedFileError: what the shares have written is not what this process has planned.
        StorageError: among others, with the error number ESTALE: the service does not have an upload or a part.
    """
    shares = _cut(sizes, shared.share.count)
    names = sorted({files[part.file].name for some in shares for part in some if not part.is_whole})
    with _uploads(folder, names) as uploads:
        begun = Begun(shared.folder.name, folder.name, uploads)
        found: dict[str, list[SentPart]] = {}
        for sent in spread(sum(sizes), begun):
            for name, one in sent.items():
                found.setdefault(name, []).append(one)
        records = {
            name: joined([WrittenPart(one.start, one.end, one.file) for one in some]) for name, some in found.items()
        }
        odd = records.keys() ^ {file.name for file in files} | {name for name, one in records.items() if one is None}
        if odd:
            raise DamagedFileError(
                f"the shares in {show(str(folder))} and this conversion disagree on {show(min(odd))}",
                path=str(folder),
                hint="all hosts must have the same version of reshard, and see the same source: convert again",
            )
        for name, upload in uploads.items():
            log_claims.check_attempt(folder)
            parts = [
                text for one in sorted(found[name], key=lambda one: (one.first, len(one.sent))) for text in one.sent
            ]
            bucket_of(folder).complete_upload(str(folder / name), upload, found[name][0].file.n_bytes, parts)
    return {name: one for name, one in records.items() if one is not None}


def _cut(sizes: Sequence[int], n_shares: int) -> list[list[Part]]:
    return cut(sizes, n_shares, MIN_UPLOAD_BYTES)


@contextlib.contextmanager
def _uploads(folder: Location, names: Sequence[str]) -> Iterator[dict[str, str]]:
    """Begin an upload in parts for each of some files. They are ended if the block fails."""
    uploads: dict[str, str] = {}
    try:
        begin_uploads(folder, names, uploads)
        yield uploads
    except BaseException:
        store = bucket_of(folder)
        with contextlib.suppress(ReshardError), store.cleaning_up(str(folder)):  # else the next claim ends them
            end_uploads(folder, uploads.items())
        raise
