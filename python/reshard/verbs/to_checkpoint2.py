"""Writing a Checkpoint 2.0 iteration: what metadata.json can express goes there, the rest into tiles.json."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from typing import TYPE_CHECKING, Literal

from reshard.errors import DestinationExistsError, UnsupportedError
from reshard.formats import checkpoint2
from reshard.formats.checkpoint2_common import CommonInfo
from reshard.formats.checkpoint2_metadata import expressible, write_metadata
from reshard.formats.checkpoint2_shards import Shard, TensorRecord, World, assign, shards_of
from reshard.formats.files import show, write_file_atomically
from reshard.verbs.destinations import Cutting, Written, bind, write_files
from reshard.write.commit import made_folder, published_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from reshard.checkpoint import LayoutLike
    from reshard.layout import BoundLayout
    from reshard.verbs.destinations import Job, Options

__all__ = ["to_checkpoint2"]

_log = logging.getLogger("reshard")


def to_checkpoint2(
    job: Job,
    layout: LayoutLike | None,
    iteration: int,
    prefix: str | None,
    *,
    dedup: bool,
    strict_format: bool,
    original_modes: bool,
) -> Written:
    """Write one iteration into the root `job.target`, and let the tracker name it.

    Raises:
        DestinationExistsError, LayoutError, UnsupportedError, StorageError: as told at `convert`.
    """
    checkpoint2.check_prefix(prefix)
    folder_name = checkpoint2.iteration_folder_name(iteration)
    _check_root_free(job, folder_name)
    bound = bind(job.source, layout)
    cutting = Cutting(job, bound)
    world = World(tuple(bound.mesh.axes), tuple(bound.ranks))
    records = _records(job, bound, cutting.dtypes)
    joined = {key for join in bound.joins for key in join.keys}
    reasons = {record.key: "it is joined with others into one array" for record in records if record.key in joined}
    for record in records:
        reason = None if record.key in joined else expressible(record, world)
        if reason is not None:
            reasons[record.key] = reason
    warnings = list(bound.warnings)
    if reasons:
        warnings.append(_inexpressible(reasons, strict=strict_format))
    shards = shards_of([record for record in records if record.key not in joined], world)
    shards += _joined_shards(job, bound)
    plan = assign(shards, world, dedup=dedup)
    files = [cutting.file(file.name(prefix), file.rank, file.keys, described=reasons) for file in plan.files]
    options = job.options
    target, staging = job.target / folder_name, job.target / ".staging"
    was_there = os.path.lexists(target)
    with made_folder(job.target, mode=options.folder_mode, durable=options.durable), _made_staging(staging, options):
        with published_folder(
            target, staging, replace=job.overwrite, durable=options.durable, mode=options.folder_mode
        ) as folder:
            n_bytes = write_files(job, folder, files)
            described = [record for record in records if record.key not in reasons]
            metadata_path = folder / checkpoint2.METADATA_FILE
            write_metadata(
                metadata_path, described, world, plan, prefix=prefix, mode=options.file_mode, durable=options.durable
            )
            common = (job.source.common or CommonInfo()).to_json()
            write_file_atomically(folder / checkpoint2.COMMON_FILE, common, options.file_mode, durable=options.durable)
            cutting.write_tiles(folder, layout)
            if original_modes:
                _set_original_modes(folder)
        try:
            warnings += _move_tracker(job.target, iteration, options)
            if original_modes:
                job.target.chmod(0o750)
                (job.target / checkpoint2.TRACKER_FILE).chmod(0o640)
        except BaseException:
            if not was_there:  # an iteration that was replaced cannot be brought back
                shutil.rmtree(target, ignore_errors=True)
            raise
    return Written(job.target / folder_name, len(files), n_bytes, reasons, warnings)


@contextlib.contextmanager
def _made_staging(staging: Path, options: Options) -> Iterator[None]:
    with made_folder(staging, mode=options.folder_mode, durable=False):
        try:
            yield
        finally:
            # It stays where another conversion writes into it, or where one was killed.
            with contextlib.suppress(OSError):
                staging.rmdir()


def _records(job: Job, bound: BoundLayout, dtype_of: Mapping[str, str]) -> list[TensorRecord]:
    records = []
    optimizer = set(job.source.keys("optimizer"))
    for key in job.keys:
        spec = bound.specs[key]
        records.append(
            TensorRecord(
                key=key,
                dtype=dtype_of[key],
                shape=spec.shape,
                part="optimizer" if key in optimizer else "model",
                cut=spec.cut,
                uneven=spec.uneven,
                sizes=spec.sizes,
                blocks=spec.blocks,
                flat=spec.flat,
                stored=spec.stored,
                place=spec.place,
            )
        )
    return records


def _joined_shards(job: Job, bound: BoundLayout) -> list[Shard]:
    """The distinct parts of joined arrays, and who holds each: found by what they consist of."""
    optimizer = set(job.source.keys("optimizer"))
    keys = set(job.keys)
    holders: dict[tuple[str, int, tuple[object, ...]], list[int]] = {}
    for rank in sorted(bound.ranks) if bound.joins else ():
        names = set(bound.local_names(rank, job.keys))
        for join in bound.joins:
            if join.name in names and keys.issuperset(join.keys):
                last = bound.request_of(rank, [join.name]).last()
                assert last is not None
                (n_elements,), parts = last
                holders.setdefault((join.name, n_elements, tuple(parts)), []).append(rank)
    members = {join.name: join.keys for join in bound.joins}
    shards, numbers = [], dict.fromkeys(members, 0)
    for (name, n_elements, _), ranks in holders.items():
        part: Literal["model", "optimizer"] = "optimizer" if members[name][0] in optimizer else "model"
        shards.append(Shard(name, part, numbers[name], tuple(ranks), n_elements * 8))
        numbers[name] += 1
    return shards


def _inexpressible(reasons: Mapping[str, str], *, strict: bool) -> str:
    """The one warning of a conversion for tensors that the original will not see, or the error."""
    key, reason = next(iter(reasons.items()))
    some = ", ".join(show(key) for key in list(reasons)[:5]) + (", ..." if len(reasons) > 5 else "")
    text = (
        f"metadata.json cannot express the layout of {len(reasons)} tensors ({some}): {show(key)}: {reason}. "
        "They are described in tiles.json, which MindSpore Transformers ignores: there they keep their initial values"
    )
    if strict:
        raise UnsupportedError(text, key=key, hint="choose another layout for them, or leave out `strict_format`")
    _log.warning("%s", text)
    return text


def _set_original_modes(folder: Path) -> None:
    for entry in folder.iterdir():
        entry.chmod(0o400 if entry.suffix == ".safetensors" else 0o640)
    folder.chmod(0o750)


def _move_tracker(root: Path, iteration: int, options: Options) -> list[str]:
    current, _ = checkpoint2.read_tracker(root)
    if current is not None and current > iteration and (root / checkpoint2.iteration_folder_name(current)).is_dir():
        return [f"the tracker still names iteration {current}, which is newer than {iteration}"]
    checkpoint2.write_tracker(root, iteration, options.file_mode, durable=options.durable)
    return []


def _check_root_free(job: Job, folder_name: str) -> None:
    target = job.target
    if not target.exists():
        return
    if not target.is_dir():
        raise DestinationExistsError(f"{target} is a file; a checkpoint root is a folder", path=str(target))
    entries = [entry.name for entry in target.iterdir() if entry.name != ".staging"]
    if entries and not job.overwrite:
        raise DestinationExistsError(
            f"{target} holds {len(entries)} entries, such as {entries[0]}",
            path=str(target),
            hint=f"choose another root, or give `overwrite` to replace {folder_name} in this one and nothing else",
        )
