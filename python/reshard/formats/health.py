"""The health of an iteration: whether its save was healthy, and which of its tensors hold values that are not finite.

A save looks at all floating-point values while it computes checksums. The result is `ckpt_status` in the manifest: 1 if
the monitor of the run found a problem or a tensor holds NaN or an infinity, else 0. If there are such tensors, a file
of the iteration, which its manifest lists, names them:

    not_finite.json    {"version": 1, "tensors": {"layer.weight": "nan", "mask": "inf"}}

A manifest of an earlier release has a status only if the run had a monitor, and this file does not exist. An earlier
release reads the status, and ignores the file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard._core import NotFinite
from reshard.commit import manifest as manifests
from reshard.commit import roots
from reshard.documents.strict_json import parse_json
from reshard.errors import ReshardError
from reshard.values.words import counted, show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from reshard.commit.manifest import Manifest
    from reshard.storage.location import Location

NOT_FINITE_FILE = "not_finite.json"

_MAX_BYTES = 8 << 20
_MAX_NAMED = 1000  # tensors; those of a diverged model are as many as it has
_KINDS = {"nan": "NaN", "inf": "an infinity"}


@dataclass(frozen=True)
class Unhealthy:
    """An iteration that was saved as unhealthy.

    Attributes:
        iteration: its number.
        tensors: the tensors with values that are not finite: "nan", or "inf" if none is NaN; at most 1,000. Empty: the
            monitor of the run found the problem.
        since: the first of the unhealthy iterations up to this one, without a healthy one in between.
        last_healthy: the newest healthy iteration below; None: there is none.
    """

    iteration: int
    tensors: Mapping[str, str]
    since: int
    last_healthy: int | None

    def __str__(self) -> str:
        since = "" if self.since == self.iteration else f", as all since iteration {self.since}"
        healthy = "no older one is known to be healthy"
        if self.last_healthy is not None:
            healthy = f"the last healthy one is iteration {self.last_healthy}"
        return f"iteration {self.iteration} is unhealthy{since}: {reason_of(self.tensors)}; {healthy}"


def status_of(ckpt_status: int | None, not_finite: Mapping[str, str]) -> int:
    """The status of a save whose values were looked at.

    Args:
        ckpt_status: what the monitor of the run found; None: it has none.
        not_finite: the tensors that are not finite.

    Example:
        >>> status_of(None, {}), status_of(0, {"w": "nan"}), status_of(1, {})
        (0, 1, 1)
    """
    return 1 if not_finite else ckpt_status or 0


def joined(
    found: Iterable[tuple[str, NotFinite]], may_be_infinite: Callable[[str], bool] | None = None
) -> dict[str, NotFinite]:
    """The worst value of each tensor, of the values of its shards. At most 1,000 tensors, by name.

    Args:
        found: names of shards, each with its worst value.
        may_be_infinite: whether an infinity in a tensor of this name is no fault; None: it is one in every tensor.

    Example:
        >>> joined([("w", NotFinite.NAN), ("b", NotFinite.INFINITE), ("w", NotFinite.INFINITE)])
        {'b': <NotFinite.INFINITE: 'inf'>, 'w': <NotFinite.NAN: 'nan'>}
    """
    worst: dict[str, NotFinite] = {}
    for name, kind in found:
        if kind is NotFinite.NAN or may_be_infinite is None or not may_be_infinite(name):
            worst[name] = max(kind, worst.get(name, kind))
    return dict(sorted(worst.items())[:_MAX_NAMED])


def write(folder: Location, not_finite: Mapping[str, str], mode: int) -> list[str]:
    """Write `not_finite.json` into an iteration folder, if there are such tensors. It is not synced.

    Args:
        folder: the staging folder of the iteration.
        not_finite: the tensors that are not finite.
        mode: permission bits of the file, less the umask.

    Returns:
        The name of the file, if it was written.

    Raises:
        StorageError: the system failed.
    """
    if not not_finite:
        return []
    text = json.dumps({"version": 1, "tensors": dict(not_finite)}, ensure_ascii=False, indent=1) + "\n"
    (folder / NOT_FINITE_FILE).replace(text, mode, durable=False)
    return [NOT_FINITE_FILE]


def reason_of(tensors: Mapping[str, str]) -> str:
    """Why a save is unhealthy.

    Example:
        >>> reason_of({"layer.weight": "nan", "mask": "inf"})
        '`layer.weight` holds NaN, and 1 more tensor is not finite'
    """
    if not tensors:
        return "the health of the run, by its loss or its own function"
    first = min(tensors, key=lambda name: (tensors[name] != "nan", name))
    more = len(tensors) - 1
    is_not = "is" if more == 1 else "are"
    return f"{show(first)} holds {_KINDS[tensors[first]]}" + (
        f", and {counted(more, 'more tensor')} {is_not} not finite" if more else ""
    )


def read(folder: Location, manifest: Manifest) -> dict[str, str]:
    """The tensors of an iteration that are not finite, as its manifest lists them. Empty where nothing is recorded.

    A file that is damaged or cannot be read counts as none: `verify` reports it.
    """
    if NOT_FINITE_FILE not in manifest.files:
        return {}
    try:
        data = manifests.read_plain(folder, manifest, NOT_FINITE_FILE, _MAX_BYTES)
        content: Any = parse_json(data, str(folder / NOT_FINITE_FILE))
        return {name: kind for name, kind in content["tensors"].items() if kind in _KINDS}
    except (ReshardError, KeyError, TypeError, AttributeError):
        return {}


def unhealthy(root: Location, iteration: int | None = None) -> Unhealthy | None:
    """What is known of an unhealthy iteration; None if it is not known to be unhealthy.

    Args:
        root: the checkpoint root.
        iteration: which; None: the one that the tracker names.

    Example:
        >>> from reshard.storage.location import locate
        >>> import numpy as np, reshard
        >>> for number, value in ((1, 0.5), (2, np.nan), (3, np.inf)):
        ...     _ = reshard.save("diverged", number, {"w": np.array([value])})
        >>> print(unhealthy(locate("diverged")))
        iteration 3 is unhealthy, as all since iteration 2: `w` holds an infinity; the last healthy one is iteration 1
    """
    listed = roots.resolve_candidates(root)
    iteration = listed.tracker if iteration is None else iteration
    folders = [one for one in sorted(listed.folders, reverse=True) if iteration is not None and one[0] <= iteration]
    if not folders or folders[0][0] != iteration:
        return None
    since, last_healthy, tensors = iteration, None, dict[str, str]()
    for number, name in folders:
        manifest = _manifest(root / name)
        status = None if manifest is None else manifest.ckpt_status
        if number == iteration:
            if manifest is None or status != 1:
                return None
            tensors = read(root / name, manifest)
        if status == 0:
            last_healthy = number
            break
        if status == 1:
            since = number
    return Unhealthy(iteration, tensors, since, last_healthy)


def is_unhealthy(folder: Location) -> bool:
    """Whether the manifest of an iteration folder says that it was saved as unhealthy."""
    manifest = _manifest(folder)
    return manifest is not None and manifest.ckpt_status == 1


def last_healthy(root: Location) -> int | None:
    """The newest complete iteration that was saved as healthy; None: there is none.

    Example:
        >>> from reshard.storage.location import locate
        >>> import numpy as np, reshard
        >>> for number, value in ((1, 0.5), (2, np.nan)):
        ...     _ = reshard.save("went_wrong", number, {"w": np.array([value])})
        >>> last_healthy(locate("went_wrong"))
        1
    """
    for number, name in sorted(roots.list_iterations(root), reverse=True):
        manifest = _manifest(root / name)
        if manifest is not None and manifest.ckpt_status == 0:
            return number
    return None


def _manifest(folder: Location) -> Manifest | None:
    try:
        return manifests.read(folder)
    except ReshardError:
        return None  # it is not complete
