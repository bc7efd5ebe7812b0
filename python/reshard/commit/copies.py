"""Copies of iterations: from a root on a disk into one in a bucket, with the same files and the same manifest.

The copy is one more attempt of the log of the bucket: its files count for nothing until the record `commit` names them.
So a copy is whole or not there, and one process can publish it. It has the manifest of the save, byte for byte: the
digest in the log says of which save it is the copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.commit import filesystem, protocol
from reshard.commit import manifest as manifests
from reshard.commit.filesystem import MANIFEST_FILE
from reshard.errors import CheckpointNotFoundError, DamagedFileError, StorageError, UnsupportedError
from reshard.storage.remote import RemoteStore
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.commit.manifest import Manifest
    from reshard.storage.location import Location

_MAX_MANIFEST_BYTES = 256 << 20


def copy_iteration(
    folder: Location, root: Location, *, rollback: bool = False, advance: Callable[[int], object] | None = None
) -> Manifest:
    """Copy an iteration of this host into a root in a bucket, and publish it there.

    Every byte is compared with the manifest of the save before it is sent, and the bucket lists every file with its
    size before the copy is published.

    Args:
        folder: the iteration folder, on a file system of this host.
        root: the root in the bucket; this process claims it.
        rollback: whether the tracker of the bucket may move down to the iteration.
        advance: called with numbers of bytes that were sent; an error of it ends the copy, and is raised.

    Returns:
        The manifest of both.

    Raises:
        DamagedFileError: a file differs from the manifest.
        CheckpointNotFoundError: the iteration was removed meanwhile.
        ClaimedError: another process writes into the bucket.
        UnsupportedError: the root is not in a bucket.
        StorageError: a file cannot be read, or the service failed. The copy is not published, or the error says that
            this is not known.
    """
    store = root.store
    if not isinstance(store, RemoteStore):
        raise UnsupportedError(f"{show(str(root))} is not in a bucket", path=str(root))
    with manifests.read_lock(folder):
        manifest = manifests.read(folder)
        manifests.check_sizes(folder, manifest)
        attempt = protocol.begin(root, manifest.iteration, rollback=rollback)
        try:
            for name, entry in manifest.files.items():
                content = manifests.read_plain(folder, manifest, name, entry.n_bytes)
                filesystem.announce(f"copy {name}")
                store.replace(str(attempt.staging / name), content, durable=True)
                if advance is not None:
                    advance(entry.n_bytes)
            for name, shard in manifest.shards.items():
                checksums = manifests.read_checksums(folder, manifest, [name])[name]
                filesystem.announce(f"copy {name}")
                store.upload(
                    (folder / name).local,
                    str(attempt.staging / name),
                    checksums=(shard.n_bytes, checksums),
                    progress=None if advance is None else _Steps(advance),
                )
            _check_there(attempt.staging, manifest)
            text = (folder / MANIFEST_FILE).read_small(_MAX_MANIFEST_BYTES)
            filesystem.announce(f"copy {MANIFEST_FILE}")
            store.replace(str(attempt.staging / MANIFEST_FILE), text, durable=True)
            protocol.publish(attempt, manifest)  # which reads the digest of the manifest in the bucket
        except BaseException:
            protocol.abandon(attempt)
            raise
    return manifest


class _Steps:
    """Passes progress on as the bytes since the last call."""

    def __init__(self, advance: Callable[[int], object]) -> None:
        self._advance = advance
        self._done = 0

    def __call__(self, done_bytes: int, _: int) -> None:
        self._advance(done_bytes - self._done)
        self._done = done_bytes


def _check_there(folder: Location, manifest: Manifest) -> None:
    """Check that the bucket lists every file with its size. Raises StorageError."""
    there = {name: n_bytes for name, _, n_bytes in folder.sizes()}
    for name, n_bytes in manifest.sizes:
        if there.get(name) != n_bytes:
            raise StorageError(
                f"{show(str(folder / name))} was written with {n_bytes} bytes, and the bucket lists "
                f"{there.get(name, 'nothing')}",
                path=str(folder / name),
            )


def is_of_the_save(error: Exception, root: Location) -> bool:
    """Whether a copy failed for damage of the save itself, or because retention has removed it.

    Args:
        error: of `copy_iteration`.
        root: the root on this host.

    Example:
        >>> from reshard.storage.location import locate
        >>> is_of_the_save(DamagedFileError("altered", path="/run/iteration_00000001/a"), locate("/run"))
        True
    """
    is_damage = isinstance(error, DamagedFileError | CheckpointNotFoundError)
    return is_damage and str(getattr(error, "path", "")).startswith(f"{root}/")
