"""Reads a single `.safetensors` file; its tensors are verified if there is a manifest beside it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard import _core
from reshard.commit.filesystem import MANIFEST_FILE
from reshard.errors import CheckpointNotFoundError, DamagedFileError
from reshard.formats.aliases import add_aliases
from reshard.formats.base import CheckpointData, Format, Match
from reshard.formats.rank_file import check_no_int4
from reshard.values.counters import AS_TENSORS
from reshard.values.traits import Traits
from reshard.values.words import show

if TYPE_CHECKING:
    from reshard.formats.base import OpenOptions
    from reshard.storage.location import Location

_LENGTH_BYTES = 8  # of the field before the header
_log = logging.getLogger("reshard")


class SingleFile(Format):
    """A `.safetensors` file."""

    traits = Traits("safetensors", counters=AS_TENSORS)

    def detect(self, path: Location) -> Match:
        """Any file that no other format accepts. The reader reports what is wrong with it."""
        return Match.NO if path.is_folder() else Match.FALLBACK

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        """The tensors of the file."""
        try:
            return _open_file(path, options.method)
        except DamagedFileError:
            if path.suffix == ".safetensors" or _may_have_header(path):
                raise
            raise CheckpointNotFoundError(
                f"{show(str(path))} holds no checkpoint",
                path=str(path),
                hint="name a .safetensors, .ckpt or torch file, or a checkpoint folder",
            ) from None


SINGLE_FILE = SingleFile()


def _may_have_header(path: Location) -> bool:
    """Whether the length field of the header is less than the size of the file."""
    head = path.read_head(_LENGTH_BYTES, follow_links=True)
    n_bytes = path.stat(follow_links=True).n_bytes
    return len(head) == _LENGTH_BYTES and int.from_bytes(head, "little") <= n_bytes - _LENGTH_BYTES


def _open_file(path: Location, method: _core.ReadMethod) -> CheckpointData:
    index = _core.Index()
    file = index.add_file(str(path), method=method)
    if (path.parent / MANIFEST_FILE).exists():
        return _open_recorded(path, method, index, file)
    return _added(path, method, index, file)


def _added(path: Location, method: _core.ReadMethod, index: _core.Index, file: int) -> CheckpointData:
    check_no_int4(index, file)
    index.add_whole_file(file)
    return CheckpointData(traits=SingleFile.traits, path=path, index=index, method=method, aliases=add_aliases(index))


def _open_recorded(path: Location, method: _core.ReadMethod, index: _core.Index, file: int) -> CheckpointData:
    """A file that the manifest beside it may list."""
    from reshard.commit import manifest as manifests  # noqa: PLC0415  slow to import, as the next
    from reshard.commit import writer_mark  # noqa: PLC0415
    from reshard.formats.checkpoint2.reader import locked_manifest, unfinished  # noqa: PLC0415

    with locked_manifest(path.parent) as locked:
        manifest = locked.manifest
        if manifest is not None and path.name not in manifest.shards:
            _log.warning("%s is not listed in the manifest beside it, and cannot be verified", path)
            manifest = None
        elif manifest is not None:
            manifests.set_checksums(index, path.parent, manifest)
        elif locked.is_damaged and writer_mark.is_marked(index, file):
            raise unfinished(path, path.name, locked)
        data = _added(path, method, index, file)
        return data if manifest is None else replace(data, manifest=manifest, lock=locked.keep_lock())
