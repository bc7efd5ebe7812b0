"""After a save, the same once more as whole tensors: what the original calls `integrated_save`.

    <root>_integrated/iteration_<8 digits>/model.safetensors      a Hugging Face folder for each save

All ranks write it together, each its share of the files, from the files of the save. That has succeeded whatever
happens here, so what fails is a warning. Retention follows that of the saves by number.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.errors import ReshardError
from reshard.formats.checkpoint2 import names as checkpoint2
from reshard.storage.changes import remove_folder
from reshard.storage.location import Location, locate
from reshard.verbs.convert import convert
from reshard.words import show

if TYPE_CHECKING:
    import os

    from reshard.write.save import SaveReport

__all__ = ["integrate", "integrated_root"]

_FOLDER = re.compile("iteration_([0-9]{8,18})")
_log = logging.getLogger("reshard")


def integrated_root(root: str | os.PathLike[str]) -> Path:
    """Where the whole tensors of a root's saves lie.

    Example:
        >>> str(integrated_root("output/checkpoint"))
        'output/checkpoint_integrated'
    """
    path = Path(root)
    return path.with_name(f"{path.name}_integrated")


def integrate(
    root: str | os.PathLike[str],
    report: SaveReport,
    *,
    group: object = None,
    keep: int | None = None,
    durable: bool = True,
    private: bool = False,
    threads: int | None = None,
    timeout: float = 3600.0,
) -> list[str]:
    """Write the tensors of a save whole, all ranks together. What `after` of `reshard.save` can call.

    Args:
        root: the checkpoint root.
        report: of the save.
        group: as in `reshard.save`.
        keep: keep the newest so many folders of whole tensors; None: all.
        durable: sync what is written.
        private: as in `reshard.save`.
        threads: threads of the copy.
        timeout: seconds that ranks wait for each other.

    Returns:
        Warnings. Nothing is raised: the save itself is done.

    Example:
        >>> import functools, numpy as np, reshard
        >>> after = functools.partial(integrate, "run")
        >>> _ = reshard.save("run", 7, {"w": np.arange(4.0)}, after=after)
        >>> reshard.open("run_integrated/iteration_00000007").read("w")
        array([0., 1., 2., 3.])
    """
    target = locate(integrated_root(root)) / checkpoint2.iteration_folder_name(report.iteration)
    try:
        convert(
            report.path,
            target,
            to="huggingface",
            part="all",
            suffix=report.suffix,
            group=group,
            overwrite=True,
            durable=durable,
            private=private,
            threads=threads,
            timeout=timeout,
        )
    except ReshardError as error:
        _log.warning("iteration %d is saved, and not written whole: %s", report.iteration, error)
        return [f"it is not written whole: {error.message}"]
    return _remove_outdated(target, keep)


def _remove_outdated(target: Location, keep: int | None) -> list[str]:
    """Remove the older folders, whichever rank comes first; what another has removed is gone, and that is fine."""
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
