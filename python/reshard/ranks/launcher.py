"""What the program that started a process says of it: which rank it has, and how many there are.

torchrun, Slurm, Open MPI, and the launchers with the process management interface of MPICH (Hydra, Intel MPI) tell
each process both numbers in variables of its environment. torchrun is often started by one of the others, once on each
host, and sets its variables for what it starts itself; so where its variables are set, they count.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from reshard.errors import ArgumentError
from reshard.values.words import listed


class Launched(NamedTuple):
    """The place of this process among those that a launcher started.

    Attributes:
        rank: its number, from 0.
        size: how many there are.
        names: the variables that say so.
    """

    rank: int
    size: int
    names: tuple[str, str]


_TORCHRUN = ("RANK", "WORLD_SIZE")
VARIABLES = (
    _TORCHRUN,
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
"""The variables of each launcher: that of the rank, and that of the number of processes."""


def launched() -> Launched | None:
    """The rank of this process, and how many there are; None: no launcher says so.

    Raises:
        ArgumentError: two launchers, neither of which is torchrun, say different things; or one says what is no rank.

    Example:
        >>> import os
        >>> os.environ.update({"RANK": "1", "WORLD_SIZE": "4"})
        >>> launched()
        Launched(rank=1, size=4, names=('RANK', 'WORLD_SIZE'))
        >>> del os.environ["RANK"], os.environ["WORLD_SIZE"]
    """
    own = _said(_TORCHRUN)
    if own is not None:
        return own
    found = [one for one in map(_said, VARIABLES) if one is not None]
    if len({(one.rank, one.size) for one in found}) > 1:
        said = " and ".join(f"rank {one.rank} of {one.size} ({', '.join(one.names)})" for one in found)
        raise ArgumentError(
            f"the environment says that this process is {said}",
            hint="set RANK and WORLD_SIZE, which count before the others",
        )
    return found[0] if found else None


def known_variables() -> str:
    """The variables that are looked at, as words of a message."""
    return listed([f"{rank} and {size}" for rank, size in VARIABLES])


def _said(names: tuple[str, str]) -> Launched | None:
    texts = [os.environ.get(name, "") for name in names]
    if not all(texts):
        return None
    rank, size = map(_number, texts)
    if rank is None or size is None or rank >= size:
        said = " and ".join(f"{name} is {text!r}" for name, text in zip(names, texts, strict=True))
        raise ArgumentError(
            f"{said}: these are no rank and no number of ranks",
            hint=f"the first is a number from 0 to {names[1]} less 1; unset both if no launcher has set them",
        )
    return Launched(rank, size, names)


def _number(text: str) -> int | None:
    return int(text[:18]) if text.isascii() and text.isdigit() else None
