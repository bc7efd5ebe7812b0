"""The state that a checkpoint of Megatron-Core records beside its tensors.

It is a dict: `args`, `iteration`, `checkpoint_version`, `opt_param_scheduler`, `optimizer` and more. The arguments of
the run are an `argparse.Namespace` in the file, and a dict here. Other objects stay `_core.Opaque`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from reshard import _core
from reshard.documents.common_info import CommonInfo
from reshard.errors import ArgumentError, DamagedFileError
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.storage.location import Location

_NAMESPACE = "argparse.Namespace"


def plain(value: object, file: Location) -> dict[str, Any]:
    """The common state, with the arguments of the run as a dict.

    Args:
        value: what the file holds.
        file: the file, for messages.

    Raises:
        DamagedFileError: it is no dict with names.
    """
    strange = [key for key in value if not isinstance(key, str)] if isinstance(value, dict) else []
    if not isinstance(value, dict) or strange:
        with_key = f" with a key of type {type(strange[0]).__name__}" if strange else ""
        raise DamagedFileError(
            f"{show(str(file))} holds a {type(value).__name__}{with_key}, expected a dict with the state of a "
            "Megatron-Core run, whose keys are text",
            path=str(file),
        )
    args = value.get("args")
    if isinstance(args, _core.Opaque) and args.name == _NAMESPACE and isinstance(args.state, dict):
        return {**value, "args": args.state}
    return value


def argument(state: Mapping[str, Any], name: str) -> Any:
    """An argument of the run; None if it is not recorded.

    Example:
        >>> argument({"args": {"num_layers": 2}}, "num_layers"), argument({"args": None}, "num_layers")
        (2, None)
    """
    args = state.get("args")
    return args.get(name) if isinstance(args, dict) else None


def iteration_in(state: Mapping[str, Any], file: Location, expected: int | None) -> int | None:
    """The iteration that the state records; if it records none, the one in the name of the folder.

    Args:
        state: the common state.
        file: the file that holds it, for messages.
        expected: the iteration in the name of the folder, or None.

    Raises:
        DamagedFileError: the file belongs to another iteration than the folder.
    """
    found = state.get("iteration")
    if found is None:
        return expected
    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
        what = str(found) if isinstance(found, int) else f"of type {type(found).__name__}"
        raise DamagedFileError(
            f"{show(str(file))}: `iteration` is {what}, expected an integer from 0 on", path=str(file)
        )
    if expected is not None and found != expected:
        raise DamagedFileError(
            f"{show(str(file))} is of iteration {found}, the folder is of iteration {expected}",
            path=str(file),
            hint="the folder holds files of two saves: use another iteration",
        )
    return found


def counters_of(state: Mapping[str, Any], iteration: int | None) -> CommonInfo | None:
    """The counters of the run; None if none is recorded.

    Example:
        >>> counters_of({"args": {"consumed_train_samples": 80, "global_batch_size": 8}}, 10).consumed_samples
        80
    """
    samples, batch = argument(state, "consumed_train_samples"), argument(state, "global_batch_size")
    if iteration is None and samples is None:
        return None
    known: dict[str, Any] = {}
    for name, value in (("consumed_samples", samples), ("global_batch_size", batch)):
        with contextlib.suppress(ArgumentError):  # an argument of another program under this name
            CommonInfo(**{name: value})
            known[name] = value
    return CommonInfo(step_num=iteration, global_step=iteration, **known)
