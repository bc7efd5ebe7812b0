"""The module in a save: shapes of its parameters, and the tensors that its files hold completely or in fragments."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard import _core
from reshard.errors import UnsupportedError
from reshard.formats.deepspeed.states import as_shape, damaged
from reshard.values.indexing import row_major
from reshard.values.words import counted, listed, show

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reshard.formats.deepspeed.states import StateFile

_log = logging.getLogger("reshard")

_MODULE = "module."
_FRAGMENTS = "frozen_param_fragments."
_PLACEHOLDER = (0,)


class Tensors:
    """An index that is being filled, with the numbers of its files."""

    def __init__(self, method: _core.ReadMethod) -> None:
        self.index = _core.Index()
        self._method = method
        self._numbers: dict[str, int] = {}

    def number(self, file: object) -> int:
        """The number of a file in the index."""
        path = str(file)
        if path not in self._numbers:
            self._numbers[path] = self.index.add_torch_file(path, follow_links=False, method=self._method)
        return self._numbers[path]

    def add_whole(self, key: str, file: object, path: str, tensor: tuple[str, tuple[int, ...]]) -> None:
        """Add a tensor that a file stores completely.

        Args:
            key: its name in the checkpoint.
            file: the file.
            path: its path in the file.
            tensor: its dtype and shape.
        """
        dtype, shape = tensor
        tile = _core.Tile((0,) * len(shape), shape, 0, row_major(shape))
        self.index.add_tiles(key, dtype, shape, [_core.StoredArray(self.number(file), path, shape, [tile])])


@dataclass(frozen=True)
class Module:
    """The parameters and buffers of the module.

    Attributes:
        groups: shapes of the trained parameters of each group, in the order of the flat tensors.
        frozen: shapes of the parameters that are not trained, as far as they are recorded.
        tied: for each further name of a parameter, the name under which it is trained.
        whole: names of the tensors that the files hold completely or in fragments, in the order of the module.
    """

    groups: Sequence[Mapping[str, tuple[int, ...]]]
    frozen: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str]
    whole: Sequence[str]

    @classmethod
    def add(cls, files: Sequence[StateFile], tensors: Tensors, *, is_partitioned: bool) -> Module:
        """Read the description of the module, and add its tensors.

        Args:
            files: the files with the module; the first has its description.
            tensors: to which they are added.
            is_partitioned: whether parameters are partitioned, so that the module holds placeholders.

        Raises:
            DamagedFileError: a shape differs from the recorded one, or a fragment has another size.
            UnsupportedError: the module is in other files.
        """
        first = files[0]
        content = first.content
        if not isinstance(content.get("module"), dict):
            raise UnsupportedError(
                f"{show(str(first.file))} does not hold the module, as those of pipeline stages", path=str(first.file)
            )
        recorded = content.get("param_shapes") or []
        groups = [
            {name: as_shape(shape, first.file) for name, shape in _items(group, first)}
            for group in (recorded if isinstance(recorded, list) else [recorded])
        ]
        frozen = {
            name: as_shape(shape, first.file) for name, shape in _items(content.get("frozen_param_shapes") or {}, first)
        }
        shapes = {name: shape for group in groups for name, shape in group.items()} | frozen
        tied: dict[str, str] = {}
        for file in files:  # in stage 3 only the first rank records them
            for alias, name in _items(file.content.get("shared_params") or {}, file):
                if not isinstance(name, str) or tied.setdefault(alias, name) != name:
                    raise damaged(
                        file.file, f"{show(alias)} is tied to another parameter than in other files", key=alias
                    )
        whole = []
        unknown = []
        held = {path.removeprefix(_MODULE): path for path in first.tensors if path.startswith(_MODULE)}
        for name, path in held.items():
            dtype, shape = first.tensors[path]
            if is_partitioned and shape == _PLACEHOLDER != shapes.get(name) and name not in _buffers(first):
                if name not in shapes and name not in tied:
                    unknown.append(name)
                continue
            if name in shapes and shapes[name] != shape:
                raise damaged(first.file, f"{show(name)} has the shape {shape}, recorded is {shapes[name]}", key=name)
            tensors.add_whole(name, first.file, path, (dtype, shape))
            whole.append(name)
        if unknown:
            _log.warning(
                "%s: %s are left out: the files hold only placeholders of them", first.file.parent, listed(unknown)
            )
        if is_partitioned:
            known = set(whole)
            divided = {name: shape for name, shape in frozen.items() if name not in known}
            if divided:
                _add_fragments(files, divided, tensors)
            whole += divided
        return cls(groups, frozen, tied, whole)


def _add_fragments(files: Sequence[StateFile], shapes: Mapping[str, tuple[int, ...]], tensors: Tensors) -> None:
    """Add tensors of which each rank holds an equal part. Errors as `Module.add`."""
    numbers = [tensors.number(file.file) for file in files]
    different: dict[int, StateFile] = {}  # equal files of ranks share their tensors, and the first one is checked
    for file in files:
        different.setdefault(id(file.tensors), file)
    for name, shape in shapes.items():
        path = f"{_FRAGMENTS}{name}"
        part = -(-math.prod(shape) // len(files))
        dtype = files[0].tensors.get(path, ("",))[0]
        for file in different.values():
            if file.tensors.get(path) != (dtype, (part,)):
                raise damaged(
                    file.file,
                    f"expected {show(path)} with {counted(part, 'element')}, the part of one of "
                    f"{counted(len(files), 'rank')}; found {file.tensors.get(path)}",
                    key=path,
                )
        tensors.index.add_flat(name, dtype, shape, _core.FlatLines.divided(numbers, [(path, part)]), 0)


def _items(value: object, file: StateFile) -> Iterator[tuple[str, object]]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise damaged(file.file, f"expected a dict with names of parameters, found {show(repr(value))}")
    yield from value.items()


def _buffers(file: StateFile) -> Sequence[object]:
    names = file.content.get("buffer_names")
    return names if isinstance(names, list) else []
