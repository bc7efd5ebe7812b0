"""Open the newest checkpoint of a root that is complete.

Every format that keeps several checkpoints in one folder lists its candidates, best first. This module tries them in
that order. A damaged candidate is skipped and its reason is kept; an error that is no damage, such as a lack of
permission, is raised, because another candidate would fail too.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.commit.scrub import is_damage
from reshard.errors import DamagedFileError, LayoutError, ReshardError
from reshard.storage.location import locate
from reshard.values.words import one_line, show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from reshard.formats.base import CheckpointData
    from reshard.storage.location import Location

_log = logging.getLogger(__name__)


def open_newest(
    root: Location,
    candidates: Mapping[str, Callable[[], CheckpointData]],
    faults: dict[str, str],
    warnings: Iterable[str] = (),
    raised: tuple[type[ReshardError], ...] = (LayoutError,),
) -> CheckpointData | None:
    """Open the first candidate that is complete, and log why those before it are skipped.

    Args:
        root: the root, for messages.
        candidates: by name, best first, a function that opens the candidate.
        faults: takes the reason for each candidate that is skipped, by name.
        warnings: logged if a candidate is opened.
        raised: errors of what the caller gave, such as a strategy. They are no fault of the candidate.

    Returns:
        The data, whose `skipped` holds `faults`; None if no candidate is complete.

    Raises:
        ReshardError: an error that is no damage, or one of `raised`.
    """
    for name, open_candidate in candidates.items():
        try:
            data = open_candidate()
        except ReshardError as error:
            if isinstance(error, raised) or not is_damage(error):
                raise
            faults[name] = reason_of(error)
            continue
        for warning in warnings:
            _log.warning("%s: %s", root, warning)
        for skipped, reason in faults.items():
            _log.warning("%s is skipped: %s", root / skipped, reason)
        return replace(data, skipped=tuple(faults.items()))
    return None


def newest_of(root: Location, candidates: Mapping[str, Callable[[], CheckpointData]]) -> CheckpointData:
    """`open_newest` for a root whose list of candidates does not change while it is read.

    Raises:
        DamagedFileError: no candidate is complete; the message names each and its fault.
        ReshardError: as in `open_newest`.
    """
    faults: dict[str, str] = {}
    data = open_newest(root, candidates, faults)
    if data is None:
        raise nothing_complete(root, (f"{name}: {reason}" for name, reason in faults.items()))
    return data


def nothing_complete(root: Location, lines: Iterable[str]) -> DamagedFileError:
    """The error of a root without a complete checkpoint; each line says why a candidate is not."""
    reasons = "".join(f"\n  {line}" for line in lines)
    return DamagedFileError(f"there is no complete checkpoint in {show(str(root))}:{reasons}", path=str(root))


def reason_of(error: ReshardError) -> str:
    """Why a checkpoint is skipped. If the error concerns one file, the reason includes its name."""
    name = "" if error.path is None else locate(error.path).name
    message = one_line(error.message)
    return message if name in message else f"{name}: {message}"
