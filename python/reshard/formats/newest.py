"""Open the newest checkpoint of a root that is complete.

A damaged candidate is skipped and its reason is kept; an error that is no damage, such as a lack of permission, is
raised, because another candidate would fail too.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.commit.scrub import is_damage, reason_of
from reshard.errors import DamagedFileError, ReshardError
from reshard.values.words import show

if TYPE_CHECKING:
    from reshard.commit.candidates import Order
    from reshard.formats.base import CheckpointData, Root

_log = logging.getLogger(__name__)

MAX_LOOKS = 5  # at a root that changes while it is listed


def open_newest(root: Root) -> CheckpointData:
    """Open the first candidate of a root that is complete, and log why those before it are skipped.

    If none is, the root is listed again until nothing changes: a save may have ended meanwhile, and retention may have
    removed iterations.

    Returns:
        The data, whose `skipped` says which candidates were skipped, and why.

    Raises:
        DamagedFileError: no candidate is complete; the message names each candidate and its fault.
        UnsupportedError: a later release wrote the candidate.
        ReshardError: an error that is no damage, or one of the options.

    Example:
        >>> import numpy as np, reshard
        >>> from reshard.opening import root_of
        >>> _ = reshard.save("a_run", 400, {"w": np.zeros(4)})
        >>> open_newest(root_of("a_run")).iteration
        400
    """
    before: Order | None = None
    faults: dict[str, str] = {}
    for number in range(MAX_LOOKS):
        root = root.again() if number else root
        with root:
            if root.order == before:
                break
            before, faults = root.order, {}
            root.check()
            if (opened := _open_first(root, faults)) is not None:
                return opened
    lines = [*root.order.warnings, *(f"{name}: {reason}" for name, reason in faults.items())]
    lines += [f"{one.name}: {one.reason}" for one in root.order.refused]
    reasons = "".join(f"\n  {line}" for line in (*lines, *root.ignored()))
    raise DamagedFileError(f"there is no complete checkpoint in {show(str(root.path))}:{reasons}", path=str(root.path))


def _open_first(root: Root, faults: dict[str, str]) -> CheckpointData | None:
    """The first candidate that is complete; `faults` takes the reasons against those before it."""
    for one in root.order.candidates:
        try:
            if one.fault is not None:
                raise DamagedFileError(one.fault)
            data = root.open(one)
        except ReshardError as error:
            if isinstance(error, root.of_options) or not is_damage(error):
                raise
            faults[one.name] = reason_of(error)
            continue
        for warning in root.order.warnings:
            _log.warning("%s: %s", root.path, warning)
        for skipped, reason in faults.items():
            _log.warning("%s is skipped: %s", root.path / skipped, reason)
        return replace(data, skipped=tuple(faults.items()))
    return None
