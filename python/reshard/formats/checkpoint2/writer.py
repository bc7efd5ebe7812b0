"""Writes a Checkpoint 2.0 iteration. Tensors that metadata.json cannot express are described in tiles.json."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from reshard import _core
from reshard.commit import filesystem, log, log_claims, log_records, manifest, protocol, roots
from reshard.commit.claims import LOCK_FILE, WRITERS_FOLDER
from reshard.commit.publication import made_folder
from reshard.commit.trash import STAGING_FOLDER, TRASH_FOLDER
from reshard.conversion.destinations import (
    Written,
    as_files,
    dtypes_and_parts,
    file_sizes,
    produced,
    set_original_modes,
)
from reshard.conversion.root_shares import write_share, written_by_shares
from reshard.conversion.writer import Settings, Writer
from reshard.documents.common_info import CommonInfo
from reshard.errors import DestinationExistsError, ReshardError, hints_without
from reshard.formats import counter_tensors, health, run_names, state, state_files
from reshard.formats.checkpoint2 import names as checkpoint2
from reshard.formats.checkpoint2.iteration import Descriptions, check_copies, plan_layout
from reshard.formats.checkpoint2.traits import CHECKPOINT2
from reshard.formats.run_names import TRAINER
from reshard.storage.changes import remove_file, remove_folder, set_mode
from reshard.storage.names import example_of
from reshard.write.arrays import local_arrays
from reshard.write.shard_files import WrittenFile

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    import numpy as np

    from reshard.commit.attempts import Attempt, FileRecord
    from reshard.conversion.destinations import Job, NewNames, Produce
    from reshard.conversion.source import Source
    from reshard.formats.checkpoint2.iteration import IterationPlan
    from reshard.layout import BoundLayout
    from reshard.storage.location import Location
    from reshard.write.contents import DtypeAndPart, FileContent

# Entries of a root that are not checkpoints, but files of the save protocol.
_BOOKKEEPING = {STAGING_FOLDER, TRASH_FOLDER, WRITERS_FOLDER, LOCK_FILE}
# Of a root in a bucket, in which a conversion has failed.
_OF_LOG = {log_records.LOG_FOLDER, log.CLOCK_FILE, log.PROBE_FOLDER, log_claims.WRITERS_FOLDER}

_log = logging.getLogger("reshard")


class Checkpoint2Writer(Writer):
    """An iteration of a Checkpoint 2.0 root."""

    name = "checkpoint2"
    has_headers = True
    keeps_others = True
    metadata: ClassVar[Mapping[str, str]] = {"format": "ms"}
    options = frozenset({"iteration", "prefix", "modes"})
    in_root = True

    def write(self, job: Job, settings: Settings) -> Written:
        """Write the iteration. By default each shard is written once."""
        job.source.common = common = _common(job)
        numbers = (settings.iteration, job.source.iteration, common.step_num, common.global_step, 0)
        return _write(job, settings, next(number for number in numbers if number is not None))

    def writes_extra(self, job: Job) -> bool:
        """The state of another iteration. It does not depend on the layout.

        It names tensors as the source does. If prefixes of their names change, those in the state of a torch run are
        changed alike; other state is left out, as it is by a name map. Rank-local state holds values of tensors by
        name, and is left out if they are cast or renamed.
        """
        data = job.source.data
        if data.traits != CHECKPOINT2 or data.manifest is None or not state_files.ranks(data.manifest):
            return False
        if job.is_renamed and (job.names is None or TRAINER not in state_files.read(data.path, data.manifest, 0)):
            return False
        if job.options.dtype is None and not job.is_renamed:
            return True
        return not state_files.has_rank_local(data.path, data.manifest)

    def planned(
        self, tensors: Mapping[str, DtypeAndPart], layout: BoundLayout
    ) -> tuple[Sequence[FileContent], Sequence[str]]:
        """The shard files, each shard once."""
        plan = plan_layout(tensors, layout)
        return plan.files, plan.warnings

    def apart(self, source: Source) -> Collection[str]:
        """Counters of other formats, which go into common.json. `global_step` stays a tensor, as in MindSpore."""
        return (
            () if source.data.traits.has_metadata else [name for name in counter_tensors.NAMES if name != "global_step"]
        )


def _common(job: Job) -> CommonInfo:
    """The counters of the source, also those that it stores as tensors.

    Raises:
        UnsupportedError: such a tensor has a value that a counter cannot have.
    """
    common, arrays = job.source.common, dict(job.counters)
    if common is None and "global_step" in job.keys and math.prod(job.source.shape("global_step")) == 1:
        arrays["global_step"] = job.source.read("global_step")
    counter_tensors.check_values(arrays)
    stored = counter_tensors.common_of(arrays, str(job.source.path))
    if common is None:
        return stored
    missing = [name for name in counter_tensors.NAMES if getattr(common, name) is None]
    return replace(common, **{name: getattr(stored, name) for name in missing})


def _write(job: Job, settings: Settings, iteration: int) -> Written:
    """Write one iteration into the root `job.target`, and update the tracker.

    Raises:
        DestinationExistsError, LayoutError, UnsupportedError, StorageError: as `convert`.
    """
    bound, dedup = settings.layout, settings.dedup is not False
    checkpoint2.check_prefix(settings.prefix)
    folder_name = roots.iteration_folder_name(iteration)
    shared = job.shared
    begun = None if shared is None else shared.begun
    if begun is None:
        _check_root_free(job, folder_name)
    plan = plan_layout(
        dtypes_and_parts(job),
        bound,
        prefix=settings.prefix,
        dedup=dedup,
        strict=settings.strict_format,
    )
    if not dedup:
        check_copies(plan)
    files = as_files(bound, plan.files)
    for warning in plan.warnings[len(bound.warnings) :]:  # warnings of the layout are already logged
        _log.warning("%s", warning)
    sizes, is_new = file_sizes(job, files), job.target.found() is None
    if shared is not None and begun is not None:
        return write_share(job, shared, begun, files, sizes)
    if shared is not None and shared.spread is not None and not job.target.is_local:
        by_shares = functools.partial(written_by_shares, shared, shared.spread, files, sizes)
        return _publish(job, settings, plan, by_shares, iteration=iteration, planned_bytes=sum(sizes), is_new=is_new)
    with produced(job, job.target / folder_name, files, sizes) as fill:
        if isinstance(fill, Written):
            return fill
        return _publish(job, settings, plan, fill, iteration=iteration, planned_bytes=sum(sizes), is_new=is_new)


def _publish(
    job: Job,
    settings: Settings,
    plan: IterationPlan,
    fill: Produce,
    *,
    iteration: int,
    planned_bytes: int,
    is_new: bool,
) -> Written:
    folder_name = roots.iteration_folder_name(iteration)
    warnings = list(plan.warnings)
    options, existed = job.options, (job.target / folder_name).exists()
    with (
        hints_without("takeover"),
        made_folder(job.target, mode=options.folder_mode, durable=options.durable),
        _claimed(job.target, is_new=is_new),
    ):
        attempt = protocol.begin(
            job.target,
            iteration,
            planned_bytes=0 if job.shared else planned_bytes,  # the files of shares exist already
            durable=options.durable,
            overwrite=job.overwrite,
            rollback=True,
            folder_mode=options.folder_mode,
        )
        descriptions = Descriptions(plan, attempt.staging, mode=options.file_mode)
        try:
            descriptions.start()
            written = fill(attempt.staging)
            described = descriptions.result()
            common = job.source.common or CommonInfo()
            not_finite = health.joined(found for file in written.values() for found in file.not_finite)
            status = health.status_of(common.ckpt_status, not_finite)
            own_files = [checkpoint2.COMMON_FILE, *health.write(attempt.staging, not_finite, options.file_mode)]
            common.write(attempt.staging / checkpoint2.COMMON_FILE, options.file_mode, durable=False)
            rank_of = {file.name: file.rank for file in plan.files}
            records: dict[str, tuple[FileRecord, int]] = {name: (one, rank_of[name]) for name, one in written.items()}
            of_state = _write_state(job, attempt.staging, records) if settings.with_extra else []
            sealed = protocol.seal(
                attempt,
                records,
                world_size=len(settings.layout.ranks),
                unsynced=[*described, *of_state, *own_files],
                known=described,
                ckpt_status=status,
                file_mode=options.file_mode,
            )
            if settings.original_modes:
                set_original_modes(attempt.staging)
            if attempt.previous_tracker is not None and attempt.previous_tracker > iteration:
                # This is not a rollback: a newer iteration that the tracker names stays valid.
                attempt = replace(attempt, previous_tracker=None)
            warnings += protocol.publish(attempt, sealed)
        except BaseException:
            try:
                descriptions.stop()
            finally:
                protocol.abandon(attempt)
                if not existed and job.target.objects is None:  # a log publishes once, and may have done so
                    _remove_published(attempt)
            raise
        if settings.original_modes:
            if is_new:
                set_mode(job.target, 0o750)
            set_mode(job.target / roots.TRACKER_FILE, 0o640)
    n_bytes = sum(one.n_bytes for one in written.values())
    return Written(
        job.target / folder_name,
        len(plan.files),
        n_bytes,
        not_expressible=dict(plan.not_expressible),
        warnings=warnings,
    )


def _write_state(job: Job, staging: Location, records: dict[str, tuple[FileRecord, int]]) -> list[str]:
    """Write the state beside the tensors as the source stores it, with the rank-local state of all its ranks.

    Args:
        job: the conversion.
        staging: the folder of the iteration.
        records: gets the files of arrays.

    Returns:
        The names of all files. They are not synced.
    """
    names: list[str] = []
    data, mode = job.source.data, job.options.file_mode
    for rank, content in state_files.stored(data.path, data.manifest):
        text, arrays = content
        if rank == 0 and job.names is not None:
            text, arrays = _with_new_names(data.path / state.file_name(rank), text, arrays, job.names)
        names.append(state.file_name(rank))
        (staging / names[-1]).replace(text, mode, durable=False)
        if arrays:
            names.append(state.arrays_file_name(rank))
            tensors = local_arrays(arrays, None).tensors()
            written = _core.write_arrays(str(staging / names[-1]), tensors, durable=False, mode=mode)
            records[names[-1]] = WrittenFile.of(written), rank
    return names


def _with_new_names(
    path: Location, text: bytes, arrays: dict[str, np.ndarray], names: NewNames
) -> tuple[bytes, dict[str, np.ndarray]]:
    """The state of rank 0 with the new names of tensors. The state of other ranks has none."""
    value = state_files.load_by_name(path, text, arrays)
    if TRAINER in value:
        value[TRAINER] = run_names.renamed(value[TRAINER], names.of, names.parameters)
    changed, new_arrays = state.dump(value)
    return changed.encode(), new_arrays


@contextlib.contextmanager
def _claimed(root: Location, *, is_new: bool) -> Iterator[None]:
    """Release the claim of a conversion at its end. After a failure, clean up a root that it has created."""
    try:
        yield
    except BaseException:
        protocol.release(root)
        if is_new:
            with contextlib.suppress(ReshardError):
                _remove_bookkeeping(root)
        raise
    protocol.release(root)


def _remove_bookkeeping(root: Location) -> None:
    writers = root / WRITERS_FOLDER
    if len(writers.names()) <= 1:  # no other writer
        remove_folder(writers)
        remove_file(root / LOCK_FILE)


def _remove_published(attempt: Attempt) -> None:
    """Remove an iteration that was published, if updating the tracker failed."""
    with contextlib.suppress(ReshardError):
        if manifest.read(attempt.folder).attempt == attempt.id:
            filesystem.remove_folder(attempt.folder, durable=False)


def _check_root_free(job: Job, folder_name: str) -> None:
    target = job.target
    found = target.found()
    if found is None:
        return
    if found != "folder":
        raise DestinationExistsError(f"{target} is a file; a checkpoint root is a folder", path=str(target))
    entries = [name for name in target.names() if name not in _BOOKKEEPING]
    if target.objects is not None and not roots.list_iterations(target):  # an earlier conversion has failed
        entries = [name for name in entries if name not in _OF_LOG and log_records.iteration_of(name) is None]
    if entries and not job.overwrite:
        raise DestinationExistsError(
            f"{target} is not empty: it holds {example_of(entries)}",
            path=str(target),
            hint=f"choose another root, or pass `overwrite=True` to replace only {folder_name} in this one",
        )
