"""Read a strategy from a merged file, the file of one stage or a folder of such files; merge a folder into one file.

A folder usually contains one file for each rank. The files of one stage have the same content. In a merged file, each
parameter name has the stage as a prefix: `0-embed.weight`. A parameter name can also contain dashes and begin with a
number, so the names alone do not identify a merged file. `_merged_names` contains the rules. MindSpore Transformers
reads the first file of each stage and ignores the others. Here, files of one stage with different content are an error.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    DamagedFileError,
    DestinationExistsError,
    UnsupportedError,
)
from reshard.layout.strategy import Strategy
from reshard.layout.strategy_file import (
    OperatorItem,
    StrategyFile,
    parse_strategy,
    read_content,
    read_strategy_file,
    write_strategy_file,
    written_as,
)
from reshard.storage.location import Location, locate, locate_output
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.layout.strategy_file import LayoutItem

_MERGED_NAME = re.compile(r"(0|[1-9][0-9]{0,8})-(.+)", re.DOTALL)
_OF_RANK = re.compile(r"rank_[0-9]+\.(ckpt|json)$")


@dataclass(frozen=True)
class Stage:
    """The records of one pipeline stage.

    Attributes:
        path: the file with these records. If several files have them, the first one.
        operators: the operators of the stage.
        layouts: the records of its parameters, by name.
    """

    path: str
    operators: tuple[OperatorItem, ...]
    layouts: Mapping[str, LayoutItem]


def read_strategy(path: str | os.PathLike[str]) -> Strategy:
    """Read the strategy of all stages.

    Args:
        path: a merged file, the file of a job with one stage, or a folder with the files of all stages.

    Raises:
        CheckpointNotFoundError: the file does not exist, the folder contains no strategy files, or the files of a stage
            are missing. The message names the stage.
        DamagedFileError: a file is not a strategy file, contradicts itself, or contradicts another file of its stage.
        LayoutError: the stages have different numbers of devices.
        StorageError: the operating system reported a read error.

    Example:
        >>> from reshard.layout.strategy_file import LayoutItem
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for stage in (0, 1):
        ...         items = {f"layers.{stage}.w": LayoutItem((2,), ((0, -1),))}
        ...         write_strategy_file(f"{folder}/ckpt_strategy_rank_{2 * stage}.ckpt", stage_file(stage, items))
        ...     strategy = read_strategy(folder)
        >>> strategy.world_size, strategy.keys(), strategy.stages_of("layers.1.w")
        (4, ('layers.0.w', 'layers.1.w'), (1,))
    """
    stages = read_stages(path)
    return Strategy({number: stage.layouts for number, stage in stages.items()}, source=os.fspath(path))


def read_stages(path: str | os.PathLike[str]) -> dict[int, Stage]:
    """The records of each stage in a file or a folder, in ascending order of stages. Stages can be missing.

    Raises:
        CheckpointNotFoundError, DamagedFileError, StorageError: as `read_strategy`.
    """
    if not locate(path).is_folder():
        found = _stages_of(read_strategy_file(path), os.fspath(path))
    else:
        found = {}
        seen: set[bytes] = set()
        for file in _files(locate(path)):
            data = read_content(file, follow_links=False)
            digest = hashlib.blake2b(data, digest_size=16).digest()
            if digest in seen:
                continue  # all ranks of a stage write the same content
            seen.add(digest)
            for number, stage in _stages_of(parse_strategy(data, str(file)), str(file)).items():
                _check_same(number, found.setdefault(number, stage), stage)
    return dict(sorted(found.items()))


def merge_strategies(
    src: str | os.PathLike[str], dst: str | os.PathLike[str], *, overwrite: bool = False, durable: bool = True
) -> Strategy:
    """Merge the strategy files of all stages into one file.

    Args:
        src: the folder with the files. One file is also accepted: its content is written to `dst`.
        dst: the merged file. The format is JSON if the name ends in `.json`, else protobuf.
        overwrite: replace `dst` if it is a strategy file.
        durable: sync the file before the function returns.

    Returns:
        The strategy.

    Raises:
        DestinationExistsError: `dst` exists, and `overwrite` is False or `dst` is not a strategy file.
        ArgumentError: `dst` is a folder.
        UnsupportedError: JSON cannot express a tensor, or the file would be read back as another strategy.
        CheckpointNotFoundError, DamagedFileError, LayoutError, StorageError: as `read_strategy`.

    Example:
        >>> from reshard.layout.strategy_file import LayoutItem
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     src, dst = f"{folder}/ckpt_strategy_rank_0.ckpt", f"{folder}/merged.ckpt"
        ...     write_strategy_file(src, stage_file(0, {"w": LayoutItem((2,), ((0,),))}))
        ...     merge_strategies(folder, dst).world_size, list(read_strategy_file(dst).layouts)
        (2, ['0-w'])
    """
    target = locate_output(dst)
    if target.is_folder():
        raise ArgumentError(f"{show(str(target))} is a folder, the destination is one file", path=str(target))
    stages = read_stages(src)
    strategy = Strategy({number: stage.layouts for number, stage in stages.items()}, source=os.fspath(src))
    if target.exists():
        if not overwrite:
            raise DestinationExistsError(
                f"{show(str(target))} exists", path=str(target), hint="remove it, or give `overwrite=True`"
            )
        try:
            read_strategy_file(target, follow_links=False)
        except DamagedFileError as error:
            raise DestinationExistsError(
                f"only a strategy file is replaced: {error.message}", path=str(target), hint="choose another name"
            ) from None
    content = merged_file(stages)
    check_reads_back(target, content, strategy.stages)
    write_strategy_file(target, content, durable=durable)
    return strategy


def merged_file(stages: Mapping[int, Stage]) -> StrategyFile:
    """The content of one merged file for all stages."""
    return StrategyFile(
        1,
        tuple(operator for stage in stages.values() for operator in stage.operators),
        {f"{number}-{name}": item for number, stage in stages.items() for name, item in stage.layouts.items()},
    )


def stage_file(stage: int, layouts: Mapping[str, LayoutItem]) -> StrategyFile:
    """The content of the file of one stage.

    It has one operator for each parameter, because only operators contain the stage number.
    """
    names = list(layouts) or [f"stage-{stage}"]
    return StrategyFile(1, tuple(OperatorItem(name, stage) for name in names), layouts)


def _files(folder: Location) -> list[Location]:
    names = folder.names()
    by_kind = {
        suffix: sorted(name for name in names if name.endswith(suffix) and not name.startswith("."))
        for suffix in (".ckpt", ".json")
    }
    if all(by_kind.values()):
        raise DamagedFileError(
            f"{show(str(folder))} holds {show(by_kind['.ckpt'][0])} and {show(by_kind['.json'][0])}: which of the two "
            "kinds is the strategy is not known",
            path=str(folder),
            hint="keep one kind, or name the file that is meant",
        )
    files = [folder / name for of_kind in by_kind.values() for name in of_kind]
    if not files:
        raise CheckpointNotFoundError(
            f"{show(str(folder))} holds no strategy files (`ckpt_strategy_rank_<r>.ckpt`, or .json)", path=str(folder)
        )
    return files


def _stages_of(content: StrategyFile, path: str) -> dict[int, Stage]:
    """Group the records of a file by stage. The stage prefix is removed from the names of a merged file."""
    used = {operator.stage for operator in content.operators}
    names = _merged_names(content, used, path)
    if names:
        operators: dict[int, list[OperatorItem]] = {
            n: [] for n in sorted({stage for stage, _ in names.values()} | used)
        }
        layouts: dict[int, dict[str, LayoutItem]] = {number: {} for number in operators}
        for operator in content.operators:
            operators[operator.stage].append(operator)
        for name, (number, key) in names.items():
            layouts[number][key] = content.layouts[name]
        return {number: Stage(path, tuple(operators[number]), layouts[number]) for number in operators}
    if len(used) != 1:
        stages = ", ".join(map(str, sorted(used)[:8]))
        raise DamagedFileError(
            f"{show(path)} is neither of one stage nor merged: its operators are of "
            + (f"the stages {stages}, and not every parameter is named `<stage>-<name>`" if used else "no stage"),
            path=path,
        )
    return {used.pop(): Stage(path, content.operators, content.layouts)}


def _merged_names(content: StrategyFile, used: set[int], path: str) -> dict[str, tuple[int, str]]:
    """The stage and the key of each name in a merged file; empty for the file of one stage.

    All names in the file of one stage can have the form `<stage>-<key>` of a merged file. These rules apply in order:

    - The file has operators of several stages, or no operators: it is merged.
    - All operators belong to one stage other than 0: it is not merged, because the earlier stages are missing.
    - The operators are named after the parameters: it is merged if their names are the names without the prefix.
    - Otherwise it is merged unless the file name ends in `rank_<r>.ckpt` or `rank_<r>.json`.

    `Strategy.check_unlisted` detects a wrong result when the strategy is applied to tensors.
    """
    matches = {name: _MERGED_NAME.fullmatch(name) for name in content.layouts}
    names = {name: (int(match[1]), match[2]) for name, match in matches.items() if match is not None}
    if len(names) < len(matches) or (used and not {stage for stage, _ in names.values()} <= used):
        return {}
    if len(used) == 1:
        nodes = {operator.node_name for operator in content.operators}
        is_by_name, is_by_key = nodes <= names.keys(), nodes <= {key for _, key in names.values()}
        is_merged = is_by_key if is_by_name != is_by_key else _OF_RANK.search(path) is None
        if used != {0} or not is_merged:
            return {}
    return names


def check_reads_back(
    path: str | os.PathLike[str], content: StrategyFile, stages: Mapping[int, Mapping[str, LayoutItem]]
) -> None:
    """Check that a strategy file, once written, is read back with the same content.

    Args:
        path: the destination of the file. Its name determines the format.
        content: the content to write.
        stages: the expected records of each stage, by parameter name.

    Raises:
        UnsupportedError: the file would be read back with other stages or tensors, or JSON cannot express a tensor.
    """
    try:
        read = _stages_of(written_as(path, content), os.fspath(path))
        found = {number: dict(stage.layouts) for number, stage in read.items()}
        reason = "it would be read as of other stages or tensors"
    except DamagedFileError as error:
        found, reason = {}, error.message
    if found != {number: dict(layouts) for number, layouts in stages.items()}:
        raise UnsupportedError(
            f"a strategy has no words for these names of tensors: {reason}",
            path=os.fspath(path),
            hint="rename the tensors, or choose another name for the file if you gave it one",
        )


def _check_same(number: int, first: Stage, other: Stage) -> None:
    """Check that two files of one stage have the same partition of each parameter."""
    if first.layouts == other.layouts:
        return
    for key in (*first.layouts, *other.layouts):
        if first.layouts.get(key) != other.layouts.get(key):
            missing = [stage.path for stage in (first, other) if key not in stage.layouts]
            found = f"{show(missing[0])} does not list it" if missing else "they cut it otherwise"
            raise DamagedFileError(
                f"{show(first.path)} and {show(other.path)} are both of stage {number}, and disagree on {show(key)}: "
                f"{found}",
                path=other.path,
                key=key,
                hint="the files are of different runs: remove those that are not meant, or name one merged file",
            )
