"""`CommonInfo`: the counters of a training run, as `common.json` of MindSpore Transformers has them.

Files of all releases of MindSpore Transformers are read. Release 1.9.0 can read the files that are written. `resume`
interprets the counters.
"""

from __future__ import annotations

import contextlib
import json
import math
import operator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from reshard.documents.strict_json import parse_json
from reshard.errors import ArgumentError, DamagedFileError
from reshard.values.words import show

if TYPE_CHECKING:
    from reshard.storage.location import Location

MAX_COMMON_BYTES = 1 << 20
_LEFT_OUT_WHILE_NONE = ("consumed_samples", "ckpt_status")


@dataclass(frozen=True)
class CommonInfo:
    """The counters, with the field names of the file. None: null, or not in the file.

    Attributes:
        epoch_num: the epoch of the training loop.
        step_num: the iteration; in eager mode the number of steps of the whole run.
        global_step: number of optimizer steps.
        loss_scale: scaling factor of the loss.
        global_batch_size: samples per step, over all devices.
        consumed_samples: number of samples that were trained on.
        ckpt_status: 0: the health monitor found no problem, 1: it found one.
        unknown: other names in the file, for a report. They are never written.

    Raises:
        ArgumentError: a value is not an integer from 0 to 2**63 - 1, or `loss_scale` not a finite number.

    Example:
        >>> print(CommonInfo(epoch_num=1, global_step=5).to_json())
        {
            "epoch_num": 1,
            "step_num": null,
            "global_step": 5,
            "loss_scale": null,
            "global_batch_size": null
        }
    """

    epoch_num: int | None = None
    step_num: int | None = None
    global_step: int | None = None
    loss_scale: float | None = None
    global_batch_size: int | None = None
    consumed_samples: int | None = None
    ckpt_status: int | None = None
    unknown: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for key in _KEYS:
            value = getattr(self, key)
            if value is not None:
                parse = _finite if key == "loss_scale" else _count
                object.__setattr__(self, key, parse(key, value))

    @classmethod
    def read(cls, path: Location) -> CommonInfo:
        """Read the file. Other names than these are stored in `unknown`.

        Raises:
            CheckpointNotFoundError: there is no such file.
            DamagedFileError: it is not a JSON object, is larger than 1 MiB, or a value has another type.
            StorageError: the system failed to read it.
        """
        return cls.parse(path.read_small(MAX_COMMON_BYTES), str(path))

    @classmethod
    def parse(cls, data: bytes, name: str) -> CommonInfo:
        """Parse the content of the file; `name` is its name in messages.

        Raises:
            DamagedFileError: it is not a JSON object, or a value has another type.
        """
        content = parse_json(data, name)
        if not isinstance(content, dict):
            raise DamagedFileError(f"{show(name)} holds {_kind(content)}, expected an object of counters", path=name)
        try:
            return cls(
                **{key: content.get(key) for key in _KEYS}, unknown=tuple(key for key in content if key not in _KEYS)
            )
        except ArgumentError as error:
            raise DamagedFileError(f"{show(name)}: {error.message}", path=name) from None

    def to_json(self) -> str:
        """The text of the file, formatted as MindSpore Transformers does.

        MindSpore Transformers passes every name to a constructor, which fails for unknown names. Therefore
        `consumed_samples`, which release 1.9.0 does not know, and `ckpt_status` are left out while they are None.
        """
        values = {key: getattr(self, key) for key in _KEYS}
        for key in _LEFT_OUT_WHILE_NONE:
            if values[key] is None:
                del values[key]
        return json.dumps(values, indent=4)

    def write(self, path: Location, mode: int = 0o666, *, durable: bool = True) -> None:
        """Write the file atomically.

        Args:
            path: path of the file.
            mode: permission bits of the file, before the umask.
            durable: sync it before this returns.

        Raises:
            StorageError: the system failed; an existing file is unchanged.
        """
        path.replace(self.to_json(), mode, durable=durable)


_KEYS = tuple(one.name for one in fields(CommonInfo) if one.name != "unknown")


def _count(key: str, value: object) -> int:
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            number = operator.index(value)  # type: ignore[arg-type]
            if 0 <= number < 1 << 63:
                return number
    raise ArgumentError(f"`{key}` is {_kind(value)}, expected an integer from 0 to 2**63 - 1 or null")


def _finite(key: str, value: object) -> float:
    if not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    raise ArgumentError(f"`{key}` is {_kind(value)}, expected a finite number or null")


def _kind(value: object) -> str:
    """A description of a value that does not include untrusted text."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), f"a {type(value).__name__}")
