"""Writing a Checkpoint 2.0 iteration: what metadata.json can express goes there, the rest into tiles.json."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from typing import TYPE_CHECKING

from reshard.errors import DestinationExistsError
from reshard.formats import checkpoint2
from reshard.formats.checkpoint2_common import CommonInfo
from reshard.formats.files import write_file_atomically
from reshard.layout import as_layout
from reshard.verbs.destinations import Written, as_file, bind, whole_tensors, write_files
from reshard.write.commit import made_folder, published_folder
from reshard.write.iteration import plan_layout, write_descriptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from reshard.checkpoint import LayoutLike
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
    plan = plan_layout(
        whole_tensors(job),
        bound,
        prefix=prefix,
        dedup=dedup,
        strict=strict_format,
        mapping=None if layout is None else as_layout(layout).to_mapping(),
    )
    files = [as_file(bound, file) for file in plan.files]
    for warning in plan.warnings[len(bound.warnings) :]:  # those of the layout are in the log already
        _log.warning("%s", warning)
    warnings = list(plan.warnings)
    options = job.options
    target, staging = job.target / folder_name, job.target / ".staging"
    was_there = os.path.lexists(target)
    with made_folder(job.target, mode=options.folder_mode, durable=options.durable), _made_staging(staging, options):
        with published_folder(
            target, staging, replace=job.overwrite, durable=options.durable, mode=options.folder_mode
        ) as folder:
            n_bytes = write_files(job, folder, files)
            write_descriptions(plan, folder, mode=options.file_mode, durable=options.durable)
            common = (job.source.common or CommonInfo()).to_json()
            write_file_atomically(folder / checkpoint2.COMMON_FILE, common, options.file_mode, durable=options.durable)
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
    return Written(job.target / folder_name, len(files), n_bytes, dict(plan.not_expressible), warnings)


@contextlib.contextmanager
def _made_staging(staging: Path, options: Options) -> Iterator[None]:
    with made_folder(staging, mode=options.folder_mode, durable=False):
        try:
            yield
        finally:
            # It stays where another conversion writes into it, or where one was killed.
            with contextlib.suppress(OSError):
                staging.rmdir()


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
