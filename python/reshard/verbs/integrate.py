"""After a save, the same tensors written whole: `integrated_save` of MindSpore, `hf_every` of a `Checkpointer`.

    <root>_integrated/iteration_<8 digits>/model.safetensors      a Hugging Face folder, with the optimizer's tensors
    <root>_hf/iteration_<8 digits>/model.safetensors              one of the weights alone, with the model's files

All ranks write it collectively, each its share of the files, from the files of the save. The save has succeeded
whatever happens here, so an error here is a warning. Retention keeps the same number of folders as of saves.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.commit import roots
from reshard.errors import ReshardError
from reshard.ranks.group import log_of_all, resolve
from reshard.storage.changes import remove_folder
from reshard.storage.location import Location, locate
from reshard.values.argument_types import Part
from reshard.values.words import show
from reshard.verbs.convert import convert

if TYPE_CHECKING:
    import os

    from reshard.names import NameMap
    from reshard.options import Commit
    from reshard.verbs.save import SaveReport

_FOLDER = re.compile("iteration_([0-9]{8,18})")


def integrated_root(root: str | os.PathLike[str], suffix: str = "integrated") -> Path:
    """The folder of the whole tensors of a root's saves.

    Example:
        >>> str(integrated_root("output/checkpoint")), str(integrated_root("output/checkpoint", "hf"))
        ('output/checkpoint_integrated', 'output/checkpoint_hf')
    """
    path = Path(root)
    return path.with_name(f"{path.name}_{suffix}")


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
    target = locate(integrated_root(root, suffix)) / roots.iteration_folder_name(report.iteration)
    rank = 0 if group is None else resolve(group).rank
    try:
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
        log_of_all(rank, "iteration %d is saved, but not written as whole tensors: %s", report.iteration, error)
        return [f"it is not written as whole tensors: {error.message}"]
    for warning in converted.warnings:
        log_of_all(rank, "iteration %d as whole tensors: %s", report.iteration, warning)
    return [*converted.warnings, *remove_outdated(target, keep)]


def remove_outdated(target: Location, keep: int | None) -> list[str]:
    """Remove the older folders. All ranks try, and a folder that another rank has removed is no error."""
    if keep is None:
        return []
    matches = [match for name in target.parent.names() if (match := _FOLDER.fullmatch(name)) is not None]
    older = sorted((match for match in matches if match[0] != target.name), key=lambda match: int(match[1]))
    warnings = []
    for match in older[: max(0, len(older) + 1 - keep)]:
        folder = target.with_name(match[0])
        remove_folder(folder)
        if folder.exists():
            warnings.append(f"{show(str(folder))} is not removed")
    return warnings
