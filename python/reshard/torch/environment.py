"""The software and hardware environment of a run: `record` it when saving, `compare` it when resuming.

The record does not identify the machine: another host of the same kind makes no difference. Each difference has one of
three severities, listed in a table below: "breaks exactness" (the resumed run cannot be bit-equal to the uninterrupted
one, or trains on other data), "may change numbers", or "informational". An entry that is known on one side only is
informational. The caller decides what to do about a difference.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from reshard import _core
from reshard.errors import ArgumentError, MismatchError
from reshard.storage.location import locate
from reshard.torch.checks import shown

Severity: TypeAlias = Literal["breaks exactness", "may change numbers", "informational"]

_SEVERITIES: dict[str, Severity] = {
    "world_size": "breaks exactness",  # the order of sums over ranks changes, and random streams are derived anew
    "mesh": "breaks exactness",
    "dataset": "breaks exactness",
    "device": "breaks exactness",
    "default_dtype": "breaks exactness",
    "matmul_precision": "breaks exactness",
    "config": "may change numbers",  # a changed learning rate does, a changed path does not
    "code_revision": "may change numbers",
    "code_dirty": "may change numbers",
    "torch": "may change numbers",
    "numpy": "may change numbers",
    "cuda": "may change numbers",
    "cudnn": "may change numbers",
    "nccl": "may change numbers",
    "machine": "may change numbers",
    "cpu_capability": "may change numbers",  # which vector instructions torch uses
    "n_threads": "may change numbers",  # sums on the CPU are split by threads
    "deterministic": "may change numbers",
    "cudnn_benchmark": "may change numbers",
    "n_devices": "informational",
    "python": "informational",
    "reshard": "informational",
    "system": "informational",
}
_ORDER: tuple[Severity, ...] = ("breaks exactness", "may change numbers", "informational")
_EFFECTS = {"breaks exactness": "results are not bitwise equal", "may change numbers": "results may differ"}
_GIT_SECONDS = 5


@dataclass(frozen=True)
class Difference:
    """An entry of the environment that has changed.

    Attributes:
        severity: the effect on the run.
        name: name of the entry.
        saved: its saved value; None: not recorded.
        now: its current value; None: not known.
    """

    severity: Severity
    name: str
    saved: Any
    now: Any

    def __str__(self) -> str:
        return (
            f"{_EFFECTS.get(self.severity, self.severity)}: {self.name} was {shown(self.saved)}, is {shown(self.now)}"
        )


def record(
    *,
    world_size: int | None = None,
    mesh: Mapping[str, int] | None = None,
    config: Mapping[str, Any] | Sequence[Any] | str | bytes | None = None,
    dataset: str | None = None,
    code: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """The environment of this process, for `extra` of a save: text, numbers, booleans and None by name.

    Call it on one rank only: it starts git processes.

    Args:
        world_size: number of ranks.
        mesh: axis sizes of the device mesh, outermost first.
        config: the configuration as text or as JSON-serializable value. Its digest is recorded.
        dataset: text that identifies the dataset.
        code: folder with the code; by default the working directory. If it is in a git repository, the record holds
            the revision and whether tracked files differ from it. If git is missing or slow, both are None.

    Raises:
        ArgumentError: the configuration is not JSON-serializable.

    Example:
        >>> environment = record(world_size=4, config={"lr": 3e-4}, dataset="text-v2")
        >>> environment["torch"] == torch.__version__, environment["world_size"], environment["device"]
        (True, 4, 'cpu')
    """
    uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    revision, is_dirty = _code_revision(Path.cwd() if code is None else Path(code))
    nccl = torch.cuda.nccl.version() if uses_cuda and torch.distributed.is_nccl_available() else None  # type: ignore[no-untyped-call]
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "reshard": _core.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if uses_cuda else None,  # type: ignore[no-untyped-call]
        "nccl": None if nccl is None else ".".join(map(str, nccl)),
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "n_threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if uses_cuda else "cpu",
        "n_devices": torch.cuda.device_count() if uses_cuda else None,
        "default_dtype": str(torch.get_default_dtype()),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "world_size": world_size,
        "mesh": None if mesh is None else ", ".join(f"{axis}={size}" for axis, size in mesh.items()),
        "config": _config_digest(config),
        "dataset": dataset,
        "code_revision": revision,
        "code_dirty": is_dirty,
    }


def compare(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """The differences between two records, the most severe first.

    Args:
        saved: the record from a checkpoint. Entries that this version does not know are informational.
        now: the current record.

    Raises:
        ArgumentError: `saved` is not a record.

    Example:
        >>> for difference in compare({"torch": "2.6.0", "world_size": 4}, {"torch": "2.7.1", "world_size": 2}):
        ...     print(difference)
        results are not bitwise equal: world_size was 4, is 2
        results may differ: torch was '2.6.0', is '2.7.1'
    """
    if not isinstance(saved, Mapping) or not all(isinstance(name, str) for name in saved):
        raise ArgumentError(f"not a record of an environment: {shown(saved)}")
    differences = []
    for name in {**now, **saved}:
        was, is_now = saved.get(name), now.get(name)
        if type(was) is not type(is_now) or was != is_now:
            is_known = was is not None and is_now is not None
            severity = _SEVERITIES.get(name, "informational") if is_known else "informational"
            differences.append(Difference(severity, name, was, is_now))
    return sorted(differences, key=lambda difference: (_ORDER.index(difference.severity), difference.name))


def check(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Compare two records and raise if a difference is more than informational (`Environment.must_match`).

    Raises:
        ArgumentError: `saved` is not a record.
        MismatchError: there are such differences; the message lists all of them.

    Example:
        >>> check({"torch": "2.6.0", "python": "3.11.7"}, {"torch": "2.6.0", "python": "3.12.1"})
        [Difference(severity='informational', name='python', saved='3.11.7', now='3.12.1')]
    """
    differences = compare(saved, now)
    severe = [str(difference) for difference in differences if difference.severity != "informational"]
    if severe:
        raise MismatchError(
            "the environment differs from that of the checkpoint:\n" + "\n".join(severe),
            hint="restore it, or resume without `must_match` in `environment`",
        )
    return differences


def _config_digest(config: object) -> str | None:
    if config is None:
        return None
    if isinstance(config, str):
        data = config.encode("utf-8", "surrogatepass")
    elif isinstance(config, bytes):
        data = config
    else:
        try:
            data = json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(f"the configuration is not JSON-serializable: {error}", hint="pass its text") from error
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _code_revision(folder: Path) -> tuple[str | None, bool | None]:
    """The commit of the folder, and whether tracked files differ from it; None: not known."""
    resolved = locate(folder).resolved()
    # Look for `.git` first: without it no process is needed.
    is_under_git = any((parent / ".git").exists() for parent in (resolved, *resolved.parents))
    revision = _git(resolved.local, "rev-parse", "--verify", "HEAD") if is_under_git else None
    if not revision:
        return None, None
    changes = _git(resolved.local, "status", "--porcelain", "--untracked-files=no")
    return revision, None if changes is None else changes != ""


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of git, or None if it fails or is slow. git takes no lock and starts no program of the repository."""
    try:
        done = subprocess.run(  # noqa: S603 - fixed words
            ["git", "-c", "core.fsmonitor=false", *arguments],  # noqa: S607 - the git that the user has
            cwd=folder,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").strip()
