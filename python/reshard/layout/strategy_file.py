"""Read and write one strategy file of MindSpore Transformers: protobuf (`ckpt_strategy_rank_<r>.ckpt`) or JSON.

A strategy file contains the partition of each parameter over the devices of one pipeline stage. A merged file contains
several stages. The dataclasses here mirror the records of the file. Each record is validated when it is read.
`strategy` computes the slice of each rank from the records. `strategy_folder` selects the files of one strategy.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from reshard import _core
from reshard.documents.fields import At, found, is_list, read_integer, read_items
from reshard.documents.strict_json import parse_json
from reshard.errors import CheckpointNotFoundError, DamagedFileError, UnsupportedError
from reshard.storage.location import locate
from reshard.values.words import show

T = TypeVar("T")

_MAX_PROTOBUF_BYTES = 32 << 20
_MAX_JSON_BYTES = 64 << 20
_MAX_JSON_VALUES = 1 << 21  # of names and numbers, which take up to 190 bytes of memory each
_MAX_DEVICES = 1 << 20
_MAX_NAME = 4096
_PREFIX_BYTES = 4096
_FIELDS = ("current_stage", "parallel_strategy_item", "parallel_layout_item")
_SAFETENSORS = b"\0\0\0\0{"  # bytes 4 to 8: a length below 4 GiB, and the start of a header
_FIRST_FIELD = re.compile(rb'(?:\xef\xbb\xbf)?\s*\{\s*"(?:%s)"' % "|".join(_FIELDS).encode())


@dataclass(frozen=True)
class LayoutItem:
    """The partition of one parameter: one `parallel_layout_item`, with the field names of the file.

    Attributes:
        dev_matrix: sizes of the device axes of the stage, outermost first, in devices.
        tensor_map: lists of device axes, counted from the innermost (0). -1 is no axis. One list has one entry for each
            dim. Several lists are one list for each dim, most significant axis first.
        param_split_shape: the number of rows of each part of an unevenly partitioned table (C++ writer), the global
            shape in elements (Python writer), or empty.
        indices_offset: the first row index of each part. Empty if `param_split_shape` is not a list of rows.
        field: a value above 0 marks a table that is partitioned by field groups.
        opt_weight_shard_step: the distance, in ranks, between ranks that partition the same slice further.
        opt_weight_shard_size: the number of parts into which the ranks with the same slice partition it further along
            dim 0. 0: no further partition. -1: one part for each of these ranks.
    """

    dev_matrix: tuple[int, ...]
    tensor_map: tuple[tuple[int, ...], ...]
    param_split_shape: tuple[int, ...] = ()
    indices_offset: tuple[int, ...] = ()
    field: int = 0
    opt_weight_shard_step: int = 0
    opt_weight_shard_size: int = 0

    def n_parts(self) -> int:
        """The number of different parts of the tensor on the devices of its stage.

        Example:
            >>> LayoutItem((2, 4), ((0, -1),)).n_parts(), LayoutItem((2, 4), ((0, -1),), (), (), 0, 4, -1).n_parts()
            (4, 8)
        """
        used = {v for axes in self.tensor_map for v in axes if v >= 0}
        n_slices = math.prod(self.dev_matrix[len(self.dev_matrix) - 1 - v] for v in used)
        n_holders = math.prod(self.dev_matrix) // n_slices
        share = n_holders if self.opt_weight_shard_size == -1 else self.opt_weight_shard_size
        return n_slices * max(1, share)


@dataclass(frozen=True)
class OperatorItem:
    """An operator of the model: one `parallel_strategy_item`. Only its stage is used.

    Attributes:
        node_name: the name of the operator.
        stage: its pipeline stage.
        parallel_strategy: the number of parts of each dim, for each input.
    """

    node_name: str
    stage: int
    parallel_strategy: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class StrategyFile:
    """The content of a strategy file.

    Attributes:
        current_stage: a counter of the writer. It is not a stage number.
        operators: the operators.
        layouts: the records of the parameters, by name. In a merged file, each name has the stage as a prefix:
            `0-embed.weight`.
    """

    current_stage: int
    operators: tuple[OperatorItem, ...]
    layouts: Mapping[str, LayoutItem]


def is_strategy(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a strategy file, detected by its first bytes.

    The extension is not sufficient: weight files also have the extension `.ckpt`. The rest of the file is not checked.
    `read_strategy_file` reports damage there.

    Raises:
        CheckpointNotFoundError: the file does not exist.
        StorageError: the operating system reported a read error.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as name:
        ...     strategy, weights = pathlib.Path(name, "s.ckpt"), pathlib.Path(name, "weights.ckpt")
        ...     layouts = {"w": LayoutItem((2,), ((0,),))}
        ...     write_strategy_file(strategy, StrategyFile(1, (OperatorItem("w", 0),), layouts))
        ...     _ = weights.write_bytes(bytes.fromhex("0a0d0a017712080801120349"))
        ...     is_strategy(strategy), is_strategy(weights)
        (True, False)
    """
    return _kind(_prefix(os.fspath(path))) is not None


def read_strategy_file(path: str | os.PathLike[str], *, follow_links: bool = True) -> StrategyFile:
    """Read one strategy file. The format, protobuf or JSON, is detected from the content and not from the file name.

    Args:
        path: the file.
        follow_links: whether the last path component can be a symbolic link.

    Raises:
        CheckpointNotFoundError: the file does not exist.
        DamagedFileError: the file is not a strategy file, or its records contradict each other. The message names the
            detected file type or the record.
        StorageError: the operating system reported a read error.
    """
    return parse_strategy(read_content(path, follow_links=follow_links), os.fspath(path))


def read_content(path: str | os.PathLike[str], *, follow_links: bool = True) -> bytes:
    """Read the bytes of a strategy file after a check of its first bytes.

    Raises:
        CheckpointNotFoundError, DamagedFileError, StorageError: as `read_strategy_file`.
    """
    path = os.fspath(path)
    prefix = _prefix(path)
    _check_kind(prefix, path)
    max_bytes = _MAX_JSON_BYTES if _kind(prefix) == "json" else _MAX_PROTOBUF_BYTES
    return locate(path).read_small(max_bytes, follow_links=follow_links)


def parse_strategy(data: bytes, path: str) -> StrategyFile:
    """Parse the bytes of a strategy file. `path` is the file name in error messages.

    Raises:
        DamagedFileError: as `read_strategy_file`.
    """
    _check_kind(data[:_PREFIX_BYTES], path)
    return _from_json(data, path) if _kind(data[:_PREFIX_BYTES]) == "json" else _from_protobuf(data, path)


def write_strategy_file(
    path: str | os.PathLike[str], content: StrategyFile, mode: int = 0o666, *, durable: bool = True
) -> None:
    """Write a strategy file atomically.

    Args:
        path: the file. The format is JSON if the name ends in `.json`, else protobuf. An existing file is replaced.
        content: the content of the file.
        mode: permission bits of the file.
        durable: sync the file before the function returns.

    Raises:
        UnsupportedError: JSON cannot express a record.
        StorageError: the operating system reported an error. `path` is unchanged.
    """
    locate(path).replace(_encoded(path, content), mode, durable=durable)


def written_as(path: str | os.PathLike[str], content: StrategyFile) -> StrategyFile:
    """The content that `read_strategy_file` would return after `write_strategy_file` wrote `content` to `path`.

    Raises:
        UnsupportedError: as `write_strategy_file`.
        DamagedFileError: as `read_strategy_file`.
    """
    data = _encoded(path, content)
    return parse_strategy(data.encode() if isinstance(data, str) else data, os.fspath(path))


def _encoded(path: str | os.PathLike[str], content: StrategyFile) -> str | bytes:
    return _to_json(content) if Path(path).suffix == ".json" else _to_protobuf(content)


def why_not_json(item: LayoutItem) -> str | None:
    """The reason why the JSON format cannot express a parameter; None if it can."""
    return "it gives a dim more than one device axis" if len(item.tensor_map) > 1 else None


def _prefix(path: str) -> bytes:
    """The first bytes of a file. Empty if the path is not a regular file."""
    try:
        return locate(path).read_head(_PREFIX_BYTES, follow_links=True)
    except CheckpointNotFoundError:
        raise CheckpointNotFoundError(f"there is no strategy file {show(path)}", path=path) from None
    except DamagedFileError:  # not a regular file
        return b""


def _kind(prefix: bytes) -> str | None:
    if _FIRST_FIELD.match(prefix):
        return "json"
    # A safetensors file begins with the length of its header. Its low byte can have any value, including 0x08.
    if prefix[:1] != b"\x08" or prefix[4:9] == _SAFETENSORS:
        return None
    end = next((n for n, byte in enumerate(prefix[1:11], 2) if byte < 0x80), 0)
    # All writers write `current_stage` first, then operators or parameters.
    return "protobuf" if end and prefix[end : end + 1] in (b"\x12", b"\x1a", b"") else None


def _check_kind(prefix: bytes, path: str) -> None:
    if _kind(prefix) is not None:
        return
    found = "it holds something else"
    if not prefix:
        found = "it is empty, or a folder"
    elif not any(prefix):
        found = "it begins with zeros"
    elif prefix[4:9] == _SAFETENSORS:
        found = "it is a safetensors file"
    elif prefix[:1] == b"\x0a":
        found = "it looks like a file of weights"
    raise DamagedFileError(
        f"{show(path)} is no strategy file: {found}",
        path=path,
        hint="strategies are in `strategy/ckpt_strategy_rank_<r>.ckpt`, beside the checkpoints of a run",
    )


# ----------------------------------------------------------------------------------------------------------- protobuf


def _from_protobuf(data: bytes, path: str) -> StrategyFile:
    try:
        current_stage, operators, items = _core.decode_strategy(data)
    except DamagedFileError as error:
        raise DamagedFileError(
            f"{show(path)}: {error.message}",
            path=path,
            hint="is the file truncated, or the rest of an older one in it?",
        ) from None
    at = At(path, {}, (), "strategy", DamagedFileError)
    layouts: dict[str, LayoutItem] = {}
    for n, item in enumerate(items):
        where, name = at / "parallel_layout_item" / n, item.param_name
        _check_name(where, name)
        if name in layouts:
            raise where.error(
                f"{show(name)} stands here twice",
                hint="the rest of an older file may follow: merge the strategies again",
            )
        layouts[name] = _checked(
            where / name,
            LayoutItem(
                dev_matrix=_one(where / name / "dev_matrix", item.dev_matrix),
                tensor_map=tuple(map(tuple, item.tensor_map)),
                param_split_shape=_one(where / name / "param_split_shape", item.param_split_shape, optional=True),
                indices_offset=_one(where / name / "indices_offset", item.indices_offset, optional=True),
                field=item.field,
                opt_weight_shard_step=item.opt_weight_shard_step,
                opt_weight_shard_size=item.opt_weight_shard_size,
            ),
        )
    operator_items = []
    for n, (name, stage, dims) in enumerate(operators):
        _check_name(at / "parallel_strategy_item" / n, name)
        operator_items.append(OperatorItem(name, stage, tuple(map(tuple, dims))))
    return StrategyFile(current_stage, tuple(operator_items), layouts)


def _one(at: At, messages: list[list[int]], *, optional: bool = False) -> tuple[int, ...]:
    """The numbers of a field that the format declares as repeated. A valid file has it at most once."""
    if len(messages) > 1 or not (messages or optional):
        raise at.error(f"expected one list, found {len(messages)}")
    return tuple(messages[0]) if messages else ()


def _to_protobuf(content: StrategyFile) -> bytes:
    return _core.encode_strategy(
        content.current_stage,
        [
            _core.StrategyItem(item.node_name, item.stage, [list(dims) for dims in item.parallel_strategy])
            for item in content.operators
        ],
        [
            _core.StrategyLayoutItem(
                name,
                [list(item.dev_matrix)],
                [list(axes) for axes in item.tensor_map],
                [list(item.param_split_shape)],
                [list(item.indices_offset)],
                item.field,
                item.opt_weight_shard_step,
                item.opt_weight_shard_size,
            )
            for name, item in content.layouts.items()
        ],
    )


# --------------------------------------------------------------------------------------------------------------- JSON


def _from_json(data: bytes, path: str) -> StrategyFile:
    at = At(path, {}, (), "strategy", DamagedFileError)
    fields = _object(at, parse_json(data, path, max_values=_MAX_JSON_VALUES))
    operators = []
    for name, value in _object(at / _FIELDS[1], _member(at, fields, _FIELDS[1])).items():
        where = at / _FIELDS[1] / name
        _check_name(where, name)
        item = _object(where, value)
        dims = read_items(where / "parallel_strategy", item.get("parallel_strategy", []), _integers(0))
        operators.append(OperatorItem(name, _integer(where, item, "stage", 0), tuple(dims)))
    layouts = {}
    for name, value in _object(at / _FIELDS[2], _member(at, fields, _FIELDS[2])).items():
        where = at / _FIELDS[2] / name
        _check_name(where, name)
        item = _object(where, value)
        tensor_map = _integers(-1)(where / "tensor_map", _member(where, item, "tensor_map"))
        layouts[name] = _checked(
            where,
            LayoutItem(
                dev_matrix=_integers(1)(where / "dev_matrix", _member(where, item, "dev_matrix")),
                tensor_map=(tensor_map,),
                param_split_shape=_integers(0)(where / "param_split_shape", item.get("param_split_shape", [])),
                indices_offset=_integers(0)(where / "indices_offset", item.get("indices_offset", [])),
                field=_integer(where, item, "field", 0),
                opt_weight_shard_step=_integer(where, item, "opt_weight_shard_step", 0),
                opt_weight_shard_size=_integer(where, item, "opt_weight_shard_size", -1),
            ),
        )
    return StrategyFile(_integer(at, fields, _FIELDS[0], 0), tuple(operators), layouts)


def _object(at: At, value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise at.error(f"expected an object, found {found(value)}")
    return cast("Mapping[str, object]", value)


def _member(at: At, value: Mapping[str, object], name: str) -> object:
    if name not in value:
        raise at.error(f"`{name}` is missing")
    return value[name]


def _integer(at: At, value: Mapping[str, object], name: str, minimum: int) -> int:
    return read_integer(at / name, _member(at, value, name), minimum)


def _integers(minimum: int) -> Callable[[At, object], tuple[int, ...]]:
    def read(at: At, value: object) -> tuple[int, ...]:
        if not is_list(value):
            raise at.error(f"expected a list of integers, found {found(value)}")
        return tuple(read_integer(at / n, item, minimum) for n, item in enumerate(cast("Sequence[object]", value)))

    return read


def _to_json(content: StrategyFile) -> str:
    for name, item in content.layouts.items():
        if (reason := why_not_json(item)) is not None:
            raise UnsupportedError(
                f"the JSON variant of strategy files cannot express {show(name)}: {reason}",
                key=name,
                hint="write protobuf: a name that ends in .ckpt",
            )
    operators: dict[str, object] = {}
    for operator in content.operators:
        # A JSON object cannot contain two operators with one name. Readers use only the stage of an operator.
        name = operator.node_name if operator.node_name not in operators else f"{operator.stage}-{operator.node_name}"
        dims = [list(one) for one in operator.parallel_strategy]
        operators[name] = {"stage": operator.stage, "parallel_strategy": dims}
    layouts = {
        name: {
            "dev_matrix": list(item.dev_matrix),
            "tensor_map": list(item.tensor_map[0]) if item.tensor_map else [],
            "param_split_shape": list(item.param_split_shape),
            "indices_offset": list(item.indices_offset),
            "field": item.field,
            "opt_weight_shard_step": item.opt_weight_shard_step,
            "opt_weight_shard_size": item.opt_weight_shard_size,
        }
        for name, item in content.layouts.items()
    }
    return json.dumps(dict(zip(_FIELDS, (content.current_stage, operators, layouts), strict=True)), indent=1)


# ------------------------------------------------------------------------------------------------------------- checks


def _check_name(at: At, name: str) -> None:
    if not name or len(name) > _MAX_NAME:
        raise at.error(f"expected a name of 1 to {_MAX_NAME} characters, found {len(name)}")


def _checked(at: At, item: LayoutItem) -> LayoutItem:
    """Validate the fields of a record that do not depend on the shape of the tensor. Return the record."""
    matrix = item.dev_matrix
    if not matrix or min(matrix) < 1 or math.prod(matrix) > _MAX_DEVICES:
        raise (at / "dev_matrix").error(f"expected sizes of 1 to {_MAX_DEVICES} devices in all, found {_short(matrix)}")
    used: list[int] = []
    for axes in item.tensor_map:
        for v in axes:
            if not -1 <= v < len(matrix):
                raise (at / "tensor_map").error(
                    f"expected -1 to {len(matrix) - 1}, an axis of {_short(matrix)}, found {v}"
                )
            if v >= 0 and matrix[len(matrix) - 1 - v] > 1:
                used.append(v)
    if len(set(used)) != len(used):
        twice = next(v for n, v in enumerate(used) if v in used[:n])
        raise (at / "tensor_map").error(f"axis {twice} is used twice")
    for name in ("param_split_shape", "indices_offset"):
        if min(getattr(item, name), default=0) < 0:
            raise (at / name).error(f"expected no negative number, found {_short(getattr(item, name))}")
    for name, minimum in (("field", 0), ("opt_weight_shard_step", 0), ("opt_weight_shard_size", -1)):
        if getattr(item, name) < minimum:
            raise (at / name).error(f"expected at least {minimum}, found {getattr(item, name)}")
    return item


def _short(numbers: Sequence[int]) -> str:
    return f"[{', '.join(map(str, numbers[:16]))}{', ...' if len(numbers) > 16 else ''}]"
