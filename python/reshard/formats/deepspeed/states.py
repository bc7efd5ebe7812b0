"""The content of the files of a save, without the tensors' elements, and the checks that the files belong together.

DeepSpeed compares the number of files with `partition_count` and nothing else. Here a file of another step, of another
run or of another partition is refused with its name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from reshard import _core
from reshard.errors import DamagedFileError, UnsupportedError
from reshard.formats.outputs import load_all
from reshard.values.words import counted, listed, show

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.formats.deepspeed.names import RankFiles
    from reshard.storage.location import Location

PARTITIONED_STAGE = 3

_TENSOR_PARTS = ("rebuild", "Storage")
_SAME_IN_MODEL = (
    "global_steps",
    "global_samples",
    "skipped_steps",
    "dp_world_size",
    "mp_world_size",
    "ds_version",
    "param_shapes",
    "frozen_param_shapes",
)


_SHARED = ("param_shapes", "frozen_param_shapes")
_MODULE = "module"  # its tensors are found by their paths


@dataclass(frozen=True)
class StateFile:
    """A file of one rank.

    Attributes:
        file: the file.
        rank: the data-parallel rank.
        content: its object; in place of each tensor an `_core.Opaque`.
        tensors: dtype and shape of each tensor, by path.
    """

    file: Location
    rank: int
    content: Mapping[str, Any]
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]

    def number(self, key: str) -> int | None:
        """An integer of the file, or None if it has none."""
        value = self.content.get(key)
        return value if isinstance(value, int) else None


def damaged(file: Location, message: str, hint: str | None = None, key: str | None = None) -> DamagedFileError:
    """The error for a file that contradicts itself or other files.

    Args:
        file: the file, or its folder.
        message: what is wrong with it.
        hint: what to do.
        key: the tensor.
    """
    return DamagedFileError(f"{show(str(file))}: {message}", path=str(file), hint=hint, key=key)


def read_files(folder: Location, names: Mapping[int, str]) -> list[StateFile]:
    """The files of the ranks, in the order of the ranks.

    Args:
        folder: their folder.
        names: the name of each rank's file.

    Raises:
        DamagedFileError: a file is damaged, or is not one of DeepSpeed.
        StorageError: the system failed to read one.
    """
    ranks = {rank: folder / names[rank] for rank in sorted(names)}
    contents = _core.read_torch_contents([str(file) for file in ranks.values()], follow_links=False)
    files: list[StateFile] = []
    known: dict[int, StateFile] = {}
    for (rank, file), content in zip(ranks.items(), contents, strict=True):
        equal = known.get(id(content))
        if equal is None:
            made = _state_file(file, rank, content)
            files.append(_sharing(files[0], made) if files else made)
            known[id(content)] = files[-1]
        else:
            files.append(replace(equal, file=file, rank=rank))
    return files


def _sharing(first: StateFile, other: StateFile) -> StateFile:
    """A file of another rank; what equals the first one is kept in memory only once."""
    content = {key: value for key, value in other.content.items() if key not in _SHARED and key != _MODULE}
    for key in _SHARED:
        if key in other.content:
            known, found = first.content.get(key), other.content[key]
            content[key] = known if plain(known) == plain(found) else found
    tensors = first.tensors if first.tensors == other.tensors else other.tensors
    return StateFile(other.file, other.rank, content, tensors)


def read_file(file: Location, rank: int, *, is_dict: bool = True) -> StateFile:
    """The file of a rank; without `is_dict` it may hold one tensor alone. Errors as `read_files`."""
    [read] = _core.read_torch_contents([str(file)], follow_links=False)
    return _state_file(file, rank, read, is_dict=is_dict)


def _state_file(
    file: Location, rank: int, read: tuple[list[_core.TorchTensor], object], *, is_dict: bool = True
) -> StateFile:
    tensors, content = read
    if not isinstance(content, dict):
        if is_dict:
            raise damaged(file, "it holds no dict")
        content = {}
    return StateFile(file, rank, content, {path: (dtype, shape) for path, dtype, shape in tensors})


def read_scalars(file: Location, paths: Iterable[str]) -> dict[str, int | float]:
    """The values of tensors of one element, by path.

    Raises:
        DamagedFileError, StorageError: while reading.
    """
    index = _core.Index()
    number = index.add_torch_file(str(file), follow_links=False)
    names = list(paths)
    for name in names:
        index.add_whole(name, number)
    arrays = load_all(index.plan(index.whole_request(names)))
    index.close()
    return {path: array.reshape(-1)[0].item() for path, array in arrays.items()}


def as_shape(value: object, file: Location) -> tuple[int, ...]:
    """A `torch.Size`, or a tuple or list of numbers."""
    if isinstance(value, _core.Opaque) and value.name == "torch.Size":
        value = value.arguments[0] if value.arguments else ()
    if not isinstance(value, tuple | list) or not all(type(n) is int and n >= 0 for n in value):
        raise damaged(file, f"expected the shape of a parameter, found {show(repr(value))}")
    return tuple(value)


def plain(value: object) -> object:
    """A value in which opaque objects are replaced by their names and contents, so that values can be compared."""
    if isinstance(value, _core.Opaque):
        if value.state is None and value.name == "torch.Size":  # as many as parameters
            return (value.name, value.arguments)
        return (value.name, plain(value.arguments), plain(value.state))
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def without_tensors(value: object) -> object:
    """A value without the tensors in it, which are read by their paths; in a list, None takes the place of one."""
    if isinstance(value, dict):
        return {key: without_tensors(one) for key, one in value.items() if not _is_tensor(one)}
    if isinstance(value, list):
        return [without_tensors(one) for one in value]
    return None if _is_tensor(value) else value


def _is_tensor(value: object) -> bool:
    return isinstance(value, _core.Opaque) and any(part in value.name for part in _TENSOR_PARTS)


def check_agreement(files: RankFiles, model: Sequence[StateFile], optimizer: Sequence[StateFile]) -> None:
    """Check that the files are of one save, and that none is missing.

    Args:
        files: their names.
        model: the files with the module, by rank.
        optimizer: the files with the state of the optimizer, by rank; empty without ZeRO, and in universal folders.

    Raises:
        DamagedFileError: a file is missing, or is of another step or run.
        UnsupportedError: they belong to a model-parallel run of which other files are missing.
    """
    first = model[0]
    for other in model[1:]:
        _same(first, other, {key: first.content.get(key) for key in _SAME_IN_MODEL}, other.content)
    n_model_parallel = first.number("mp_world_size") or 1
    if n_model_parallel > 1:
        raise UnsupportedError(
            f"{show(str(first.file))} is of one of {n_model_parallel} model-parallel ranks; how they divide the "
            "tensors is not stored",
            path=str(first.file),
            hint="convert it with `ds_to_universal` of DeepSpeed, and open the universal folder",
        )
    for key in ("ds_autoep_layers", "autoep_layers"):
        if first.content.get(key):
            raise UnsupportedError(
                f"{show(str(first.file))} has {show(key)}: experts are not supported", path=str(first.file)
            )
    recorded = first.number("dp_world_size")
    if files.is_partitioned and recorded is not None:
        check_ranks(first, {one.rank for one in model}, recorded)
    if not optimizer:
        return
    head = optimizer[0]
    n_ranks = _n_ranks(head)
    check_ranks(head, {one.rank for one in optimizer}, n_ranks)
    if files.is_partitioned:
        check_ranks(first, {one.rank for one in model}, n_ranks)
    if recorded is not None and recorded != n_ranks:
        raise damaged(
            head.file,
            f"its state is partitioned over {counted(n_ranks, 'rank')}, but {show(first.file.name)} was saved "
            f"by {recorded}",
            "they are of different saves: use another checkpoint",
        )
    check_partitions(first, optimizer)
    if (stage_of(head) == PARTITIONED_STAGE) != files.is_partitioned:
        raise damaged(head.file, f"it is of another ZeRO stage than {show(first.file.name)}")


def check_partitions(model: StateFile, optimizer: Sequence[StateFile]) -> None:
    """Check that the files of the optimizer of all ranks are of one save.

    Args:
        model: the file with the module.
        optimizer: the files with the state of the optimizer, by rank.

    Raises:
        DamagedFileError: one is of another step or run.
    """
    head = optimizer[0]
    state = zero_state(head)
    keys = ("zero_stage", "partition_count", "param_alignment_paddings")
    expected = {key: state.get(key) for key in keys}
    groups = plain(param_groups(state))
    for other in optimizer:
        _same(model, other, {"ds_version": model.content.get("ds_version")}, other.content)
        found = zero_state(other)
        _same(head, other, expected, found)
        _same(head, other, {"param_groups": groups}, {"param_groups": param_groups(found)})


def _same(first: StateFile, other: StateFile, expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    for key, value in expected.items():
        other_value = found.get(key)
        if value is not other_value and plain(value) != plain(other_value):
            values = f": {show(repr(value))} and {show(repr(other_value))}" if isinstance(value, int | str) else ""
            raise damaged(
                other.file,
                f"{show(key)} differs from that in {show(first.file.name)}{values}",
                "one of the files is of another save: use another checkpoint",
            )


def zero_state(file: StateFile) -> Mapping[str, Any]:
    """The state of a ZeRO optimizer in its file."""
    state = file.content.get("optimizer_state_dict")
    if not isinstance(state, dict):
        raise damaged(file.file, "it has no `optimizer_state_dict` of ZeRO")
    return state


def stage_of(file: StateFile) -> int | None:
    """The stage of ZeRO that a file of an optimizer records; BF16_Optimizer records none."""
    stage = zero_state(file).get("zero_stage")
    if isinstance(stage, _core.Opaque):  # an enumeration
        stage = next(iter(stage.arguments or ()), None)
    return stage if isinstance(stage, int) else None


def _n_ranks(file: StateFile) -> int:
    count = zero_state(file).get("partition_count")
    counts: list[Any] = count if isinstance(count, list) else [count]
    if not counts or not all(type(n) is int and n > 0 for n in counts):
        raise damaged(file.file, f"expected the number of ranks in `partition_count`, found {show(repr(count))}")
    if len(set(counts)) > 1:
        raise UnsupportedError(
            f"{show(str(file.file))}: its groups are partitioned over different numbers of ranks, {listed(counts)}, as "
            "those of experts are; this is not supported",
            path=str(file.file),
        )
    n_ranks: int = counts[0]
    return n_ranks


def check_ranks(example: StateFile, found: set[int], n_ranks: int) -> None:
    """Refuse files of which those of some ranks are missing, or of more ranks.

    Args:
        example: one of the files.
        found: the ranks of all.
        n_ranks: how many there should be.

    Raises:
        DamagedFileError: they are not those of all ranks.
    """
    folder, name = example.file.parent, example.file.name
    missing = next(rank for rank in range(len(found) + 1) if rank not in found)
    if missing < n_ranks:
        wanted = name.replace(f"zero_pp_rank_{example.rank}_", f"zero_pp_rank_{missing}_")
        raise damaged(
            folder,
            f"the state is partitioned over {counted(n_ranks, 'rank')}, and {show(wanted)} is missing",
            f"{len(found)} of {n_ranks} files are there: the save was not finished, or not all files were copied",
        )
    if len(found) > n_ranks:
        raise damaged(
            folder,
            f"the state is partitioned over {counted(n_ranks, 'rank')}, and {show(name)} has one of rank "
            f"{max(found)} beside it",
            "it was left by an earlier save with more ranks: remove such files",
        )


def param_groups(state: Mapping[str, Any]) -> object:
    """The options of the groups in the state of a ZeRO optimizer, or None."""
    for key in ("base_optimizer_state", "optimizer_state_dict"):
        inner = state.get(key)
        if isinstance(inner, dict) and "param_groups" in inner:
            return inner["param_groups"]
    return state.get("param_groups")
