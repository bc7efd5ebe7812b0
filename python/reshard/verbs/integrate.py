"""After a save, the same tensors written whole: `integrated_save` of MindSpore, `hf_every` of a `Checkpointer`.

    <root>_integrated/iteration_<8 digits>/model.safetensors      a Hugging Face folder, with the optimizer's tensors
    <root>_hf/iteration_<8 digits>/model.safetensors              one of the weights alone, with the model's files

All ranks write it collectively, each its share of the files, from the files of the save. The save has succeeded
whatever happens here, so an error here is a warning. Retention keeps the same number of folders as of saves.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.commit import filesystem, roots
from reshard.conversion.buckets import claim_in, exporting, folders_in, is_claimed, remove_export
from reshard.errors import CheckpointNotFoundError, DestinationExistsError, ReshardError, UnsupportedError
from reshard.formats.registry import known_files
from reshard.ranks.collective import Collective
from reshard.ranks.group import log_of_all, resolve, session
from reshard.storage.changes import remove_folder
from reshard.storage.location import Location, locate
from reshard.values.argument_types import Part
from reshard.values.words import show
from reshard.verbs.convert import convert

if TYPE_CHECKING:
    import os
    from collections.abc import Collection

    from reshard.names import NameMap
    from reshard.options import Commit
    from reshard.ranks.group import Group
    from reshard.verbs.save import SaveReport

_FOLDER = re.compile("iteration_([0-9]{8,18})")


def integrated_root(root: str | os.PathLike[str], suffix: str = "integrated") -> Location:
    """The folder of the whole tensors of a root's saves.

    Args:
        root: the checkpoint root, also in a bucket.
        suffix: the end of its name.

    Raises:
        UnsupportedError: the root is a whole bucket, beside which there are no folders.

    Example:
        >>> str(integrated_root("output/checkpoint")), str(integrated_root("output/checkpoint", "hf"))
        ('output/checkpoint_integrated', 'output/checkpoint_hf')
    """
    place = locate(root)
    if place.objects is not None and place.parent == place:
        raise UnsupportedError(
            f"{show(str(place))} is a whole bucket: `{place.name}_{suffix}` would be beside it",
            path=str(place),
            hint="give a folder of the bucket as the root",
        )
    return place.with_name(f"{place.name}_{suffix}")


def integrate(
    root: str | os.PathLike[str],
    report: SaveReport,
    *,
    suffix: str = "integrated",
    part: Part = "all",
    model_files: str | os.PathLike[str] | None = None,
    names: NameMap | None = None,
    group: object = None,
    keep: int | None = None,
    commit: Commit | None = None,
    threads: int | None = None,
    timeout: float = 3600.0,
) -> list[str]:
    """Write the tensors of a save as whole tensors, all ranks collectively. `after` of `reshard.save` can call this.

    Args:
        root: the checkpoint root.
        report: the report of the save.
        suffix: the folder is `<root>_<suffix>`.
        part: which tensors are written.
        model_files: a folder whose files are copied beside the weights, as `Files.model_files`.
        names: the map from the names of the save to those that are written.
        group: as in `reshard.save`.
        keep: keep the newest so many folders of whole tensors; None: all.
        commit: how they are published; `durable` and `private` are used.
        threads: threads of the copy.
        timeout: seconds that ranks wait for each other.

    Returns:
        Warnings. Errors are not raised, since the save itself has succeeded.

    Example:
        >>> import functools, numpy as np, reshard
        >>> after = functools.partial(integrate, "run")
        >>> _ = reshard.save("run", 7, {"w": np.arange(4.0)}, after=after)
        >>> reshard.open("run_integrated/iteration_00000007").read("w")
        array([0., 1., 2., 3.])
    """
    members = resolve(group)
    try:
        target = integrated_root(root, suffix) / roots.iteration_folder_name(report.iteration)
        Collective(session(members, "export"), timeout).first(lambda: check_no_root(target.parent), str)
        with exporting(locate(root)):
            converted = convert(
                report.path,
                target,
                to="huggingface",
                part=part,
                names=names,
                files=None if model_files is None else {"model_files": model_files},
                select={"suffix": report.suffix},
                group=group,
                overwrite=True,
                commit=None if commit is None else replace(commit, rollback=False, takeover=False),
                threads=threads,
                timeout=timeout,
            )
    except ReshardError as error:
        log_of_all(members.rank, "iteration %d is saved, but not written as whole tensors: %s", report.iteration, error)
        return [f"it is not written as whole tensors: {error.message}"]
    for warning in converted.warnings:
        log_of_all(members.rank, "iteration %d as whole tensors: %s", report.iteration, warning)
    return [*converted.warnings, *remove_outdated(root, target, keep, members)]


def check_no_root(exports: Location) -> str:
    """Refuse a folder of exports that is the root of a run. Returns "".

    Raises:
        DestinationExistsError: it has a tracker, or is a log of saves.
        StorageError: that cannot be seen.
    """
    if (exports / roots.TRACKER_FILE).exists() or roots.known_facts(exports) is not None:
        raise DestinationExistsError(
            f"{show(str(exports))} is the root of a run, in which no exports are written",
            path=str(exports),
            hint="choose another name for one of the two roots",
        )
    return ""


def remove_outdated(root: str | os.PathLike[str], target: Location, keep: int | None, group: Group) -> list[str]:
    """Remove the older exports. A folder that another rank has removed is no error.

    Of a file system all ranks try; of a bucket rank 0 does, and also removes what exports that were killed have left.
    A folder counts if it has no manifest and all its weight files are of conversions; nothing else is removed.

    Args:
        root: the root of the run.
        target: the newest folder.
        keep: how many are kept; None: all.
        group: the ranks.

    Returns:
        Warnings.
    """
    if keep is None or (group.rank and not target.is_local):
        return []
    warnings = []
    place = locate(root)
    try:
        found = folders_in(target.parent, _FOLDER)
        older = sorted(found.keys() - {target.name}, key=lambda name: int(name.rpartition("_")[2]))
        if saves := [name for name in older if filesystem.MANIFEST_FILE in found[name]]:
            return [f"{show(str(target.parent))} holds a save, {saves[0]}: older folders of whole tensors stay there"]
        claimed = [name for name in older if is_claimed(found[name])]
        left = [name for name in claimed if claim_in(target.with_name(name)).get("export_of") == str(place)]
        whole = [name for name in older if name not in claimed and _is_converted(target.with_name(name), found[name])]
        for name in left + whole[: max(0, len(whole) + 1 - keep)]:
            folder = target.with_name(name)
            if folder.is_local:
                remove_folder(folder)
            else:
                remove_export(folder, place, known_files().commits)
            if folder.exists():
                warnings.append(f"{show(str(folder))} is not removed")
    except CheckpointNotFoundError:  # another rank removes them
        pass
    except ReshardError as error:
        warnings.append(f"older folders of whole tensors are not removed: {error.message}")
    return warnings


def _is_converted(folder: Location, names: Collection[str]) -> bool:
    """Whether all weight files of a folder, and at least one, have the mark of their writer.

    Folders in it count only if it holds no weight file itself: those of layers behind a model are copied as they are.
    """
    known = known_files()
    weights = [(folder / name, mark) for name in names if (mark := known.mark_of(folder / name)) is not None]
    weights = [one for one in weights if one[0].parent == folder] or weights
    return bool(weights) and all(mark(file) for file, mark in weights)
