"""Single files, `.safetensors` or `.ckpt`, and Hugging Face folders: whole tensors."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from reshard import _core
from reshard.formats import checkpoint2, huggingface
from reshard.formats import manifest as manifests
from reshard.formats.aliases import add_aliases
from reshard.formats.base import CheckpointData, Format, Match, Traits
from reshard.formats.rank_file import add_rank_file, kind_of
from reshard.opening.folder import opened_proof, unfinished
from reshard.small_files import show
from reshard.words import listed

if TYPE_CHECKING:
    from pathlib import Path

from reshard.formats.base import OpenOptions

__all__ = ["CKPT", "HUGGINGFACE", "SINGLE_FILE"]

_log = logging.getLogger("reshard")


class SingleFile(Format):
    """A `.safetensors` file."""

    traits = Traits("safetensors")

    def detect(self, path: Path) -> Match:
        """Any file that is no `.ckpt`: the reader says what is wrong with it."""
        return Match.NO if path.is_dir() else Match.FALLBACK

    def open(self, path: Path, options: OpenOptions) -> CheckpointData:
        """The tensors of the file."""
        return _open_file(path, options.method)


class Ckpt(Format):
    """A `.ckpt` file of MindSpore."""

    traits = Traits("ckpt", counters_as_tensors=True)

    def detect(self, path: Path) -> Match:
        """By the content of the file."""
        return Match.YES if not path.is_dir() and kind_of(path, follow_links=True) == "ckpt" else Match.NO

    def open(self, path: Path, options: OpenOptions) -> CheckpointData:
        """The tensors of the file; values that are text are listed in `strings`."""
        return _open_ckpt(path, options.method)


class HuggingFace(Format):
    """A Hugging Face folder."""

    traits = Traits("huggingface", is_pretrained=True)

    def detect(self, path: Path) -> Match:
        """By the index, or the file of a model in one file."""
        return Match.YES if path.is_dir() and huggingface.detect(path) else Match.NO

    def open(self, path: Path, options: OpenOptions) -> CheckpointData:
        """The tensors that the index names, or those of the one file."""
        return _open_huggingface(path, options.method)


SINGLE_FILE = SingleFile()
CKPT = Ckpt()
HUGGINGFACE = HuggingFace()


def _open_file(path: Path, method: _core.ReadMethod) -> CheckpointData:
    index = _core.Index()
    file = index.add_file(str(path), method=method)
    with opened_proof(path.parent) as proof:
        manifest = proof.manifest
        if manifest is not None and path.name not in manifest.shards:
            _log.warning("%s is not in the manifest beside it: nothing that is read of it can be verified", path)
            manifest = None
        elif manifest is not None:
            manifests.set_sums(index, path.parent, manifest)
        elif proof.is_damaged and checkpoint2.WRITER_KEY in (index.file_metadata(file) or {}):
            raise unfinished(path, path.name, proof)
        index.add_whole_file(file)
        aliases = add_aliases(index)
        lock = proof.keep_lock() if manifest is not None else None
        return CheckpointData(
            traits=SingleFile.traits,
            path=path,
            index=index,
            method=method,
            manifest=manifest,
            lock=lock,
            aliases=aliases,
            follow_links=True,
        )


def _open_ckpt(path: Path, method: _core.ReadMethod) -> CheckpointData:
    index = _core.Index()
    opened = add_rank_file(index, path, follow_links=True, method=method)
    for key in opened.tensors:
        index.add_whole(key, opened.file)
    if opened.strings:
        names = listed(map(show, opened.strings))
        _log.warning("%s: %d values are text and no tensors, and are left out: %s", path, len(opened.strings), names)
    return CheckpointData(
        traits=Ckpt.traits,
        path=path,
        index=index,
        method=method,
        strings=opened.strings,
        follow_links=True,
        ckpt_files=frozenset({opened.file}),
    )


def _open_huggingface(folder: Path, method: _core.ReadMethod) -> CheckpointData:
    index = _core.Index()
    weight_map = huggingface.read_weight_map(folder)
    if weight_map is None:
        file = index.add_file(str(folder / huggingface.SINGLE_FILE), method=method)
        index.add_whole_file(file)
    else:
        # Files of a hub cache are symbolic links into its store: here links are followed.
        names = dict.fromkeys(weight_map.values())
        files = {name: index.add_file(str(folder / name), method=method) for name in names}
        for key, name in weight_map.items():
            index.add_whole(key, files[name])
    aliases = add_aliases(index)
    return CheckpointData(
        traits=HuggingFace.traits, path=folder, index=index, method=method, aliases=aliases, follow_links=True
    )
