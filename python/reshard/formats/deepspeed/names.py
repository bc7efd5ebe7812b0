"""A checkpoint of DeepSpeed: the names of its files and folders.

    <root>/latest                                            the tag of the newest save, written last
    <root>/<tag>/                                            a save; the default tag is global_step<N>
        mp_rank_<MM>_model_states.pt                         stages 0 to 2
        zero_pp_rank_<D>_mp_rank_<MM>_model_states.pt        stage 3: one file for each data-parallel rank
        [bf16_]zero_pp_rank_<D>_mp_rank_<MM>_optim_states.pt stages 1 to 3: one file for each data-parallel rank
        layer_<L>_expert_<E>_mp_rank_<MM>_model_states.pt    one file for each expert; older names have no layer
        expp_rank_<X>_mp_rank_<MM>_optim_states.pt           the optimizer of experts, without ZeRO
        layer_<LL>-model_<MM>-model_states.pt                one file for each layer of a pipeline

    <root>/latest_universal, <root>/<tag>_universal/         written by `ds_to_universal`
        zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt   one tensor each
        zero/optimizer_state.pt                              the options of the optimizer
        *_model_states.pt                                    copies

Source: `runtime/engine.py` and `checkpoint/ds_to_universal.py` of DeepSpeed 0.19.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import DamagedFileError, ReshardError, UnsupportedError
from reshard.values.traits import Traits
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reshard.storage.location import Location

TRAITS = Traits("deepspeed")


LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
MAX_TAG_BYTES = 4096
ZERO_FOLDER = "zero"
OPTIMIZER_FILE = "optimizer_state.pt"

_NUMBER = r"[0-9]{1,9}"
_MODEL = re.compile(rf"(?:zero_pp_rank_({_NUMBER})_)?mp_rank_({_NUMBER})_model_states\.pt")
_OPTIMIZER = re.compile(rf"(?:bf16_|fp16_)?zero_pp_rank_({_NUMBER})_mp_rank_({_NUMBER})_optim_states\.pt")
_EXPERT = re.compile(r"(?:layer_[0-9]+_)?expert_[0-9]+_.*|expp_rank_[0-9]+_.*")
_PIPELINE = re.compile(r"layer_[0-9]+-.*")
_STATE = re.compile(r".*_(?:model|optim)_states\.pt|layer_[0-9]+-.*\.pt")
_EXPERT_FILE = re.compile(rf"(?:layer_({_NUMBER})_)?expert_({_NUMBER})_mp_rank_({_NUMBER})_model_states\.pt")
_LAYER_FILE = re.compile(rf"layer_({_NUMBER})-(?:model_({_NUMBER})-)?model_states\.pt")
_STEP = re.compile(r"global_step([0-9]{1,18})")


class RankFiles(NamedTuple):
    """The names of the files of one model-parallel rank, by data-parallel rank.

    Attributes:
        model: files with the module. Stages 0 to 2 have one, under rank 0.
        optimizer: files with the state of the optimizer.
        is_partitioned: whether the files of the module are those of stage 3.
    """

    model: dict[int, str]
    optimizer: dict[int, str]
    is_partitioned: bool


class DividedFiles(NamedTuple):
    """The names of the files of a save whose weights are in a file for each expert or for each layer.

    Attributes:
        model: files with the rest of the module and the state of the run, by model-parallel rank or stage.
        experts: by layer and expert; the layer is 0 where the names have none.
        layers: of a pipeline, by layer.
        others: files that are not read.
    """

    model: dict[int, str]
    experts: dict[tuple[int, int], str]
    layers: dict[int, str]
    others: tuple[str, ...]


def divided_files(folder: str, names: Iterable[str]) -> DividedFiles | None:
    """The files of a save of experts or of a pipeline; None: it is none.

    Args:
        folder: the folder, for messages.
        names: the names in it.

    Raises:
        UnsupportedError: they are also of several tensor-parallel ranks, of stage 3, or of both kinds.

    Example:
        >>> found = divided_files("run", ["mp_rank_00_model_states.pt", "layer_00-model_00-model_states.pt"])
        >>> found.model, found.layers
        ({0: 'mp_rank_00_model_states.pt'}, {0: 'layer_00-model_00-model_states.pt'})
    """
    model: dict[int, str] = {}
    experts: dict[tuple[int, int], str] = {}
    layers: dict[int, str] = {}
    others: list[str] = []
    wrong = None
    for name in sorted(names):
        if match := _EXPERT_FILE.fullmatch(name):
            experts[int(match[1] or 0), int(match[2])] = name
            wrong = name if int(match[3]) else wrong
        elif match := _LAYER_FILE.fullmatch(name):
            layers[int(match[1])] = name
            wrong = name if int(match[2] or 0) else wrong
        elif (match := _MODEL.fullmatch(name)) and match[1] is None:
            model[int(match[2])] = name
        elif is_state_file(name):
            others.append(name)
            wrong = name if _MODEL.fullmatch(name) else wrong  # of stage 3
    if not experts and not layers:
        return None
    if wrong is None and experts and (layers or len(model) > 1):
        wrong = next(iter(layers.values()), model[max(model)])
    if wrong is not None:
        raise UnsupportedError(
            f"{show(folder)} has {show(wrong)} beside files of {'experts' if experts else 'pipeline stages'}: how the "
            "tensors are divided is not stored",
            path=folder,
            hint="convert it with `ds_to_universal` of DeepSpeed, and open the universal folder",
        )
    return DividedFiles(model, experts, layers, tuple(others))


def optimizer_files(names: Iterable[str]) -> dict[int, dict[int, str]] | None:
    """The files of the optimizer of ZeRO by stage and data-parallel rank; None: there are also others.

    Example:
        >>> optimizer_files(["zero_pp_rank_1_mp_rank_00_optim_states.pt"])
        {0: {1: 'zero_pp_rank_1_mp_rank_00_optim_states.pt'}}
        >>> optimizer_files(["expp_rank_0_mp_rank_00_optim_states.pt"]) is None
        True
    """
    found: dict[int, dict[int, str]] = {}
    for name in names:
        if (match := _OPTIMIZER.fullmatch(name)) is None:
            if name.endswith("_optim_states.pt"):
                return None
            continue
        of_stage = found.setdefault(int(match[2]), {})
        if of_stage.setdefault(int(match[1]), name) != name:
            return None  # of two saves
    return found


def step_of(tag: str) -> int | None:
    """The step in a default tag, or None for another one.

    Example:
        >>> step_of("global_step40"), step_of("best"), step_of("global_step40_universal")
        (40, None, None)
    """
    match = _STEP.fullmatch(tag)
    return None if match is None else int(match[1])


def is_state_file(name: str) -> bool:
    """Whether a file has a name that DeepSpeed gives to files of a save.

    Example:
        >>> is_state_file("mp_rank_00_model_states.pt"), is_state_file("model.pt")
        (True, False)
    """
    return _STATE.fullmatch(name) is not None


def rank_files(folder: str, names: Iterable[str]) -> RankFiles:
    """The files of a save among the names in its folder.

    Args:
        folder: the folder, for messages.
        names: the names in it.

    Raises:
        UnsupportedError: they are files of experts, of pipeline stages or of several model-parallel ranks.
        DamagedFileError: two files belong to one rank, or files of stage 3 and of other stages are mixed.

    Example:
        >>> files = rank_files("run", ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"])
        >>> files.model, files.optimizer
        ({0: 'mp_rank_00_model_states.pt'}, {0: 'zero_pp_rank_0_mp_rank_00_optim_states.pt'})
    """
    model: dict[int, str] = {}
    optimizer: dict[int, str] = {}
    whole: list[str] = []
    by_rank: dict[int, str] = {}
    for name in sorted(names):
        for pattern, what in ((_EXPERT, "experts"), (_PIPELINE, "pipeline stages")):
            if pattern.fullmatch(name):
                raise UnsupportedError(
                    f"{show(folder)} has {show(name)}: files of {what} are not supported",
                    path=folder,
                    hint="convert it with `ds_to_universal` of DeepSpeed, and open the universal folder",
                )
        for pattern, found in ((_MODEL, model), (_OPTIMIZER, optimizer)):
            if (match := pattern.fullmatch(name)) is None:
                continue
            by_rank.setdefault(int(match[2]), name)
            if match[1] is None:
                whole.append(name)
            rank = int(match[1] or 0)
            if len(by_rank) == 1 and found.setdefault(rank, name) != name:
                raise DamagedFileError(
                    f"{show(folder)}: {show(found[rank])} and {show(name)} are both of rank {rank}",
                    path=folder,
                    hint="one of them was left by an earlier save: remove it",
                )
    if len(by_rank) > 1:
        raise UnsupportedError(
            f"{show(folder)} has files of {len(by_rank)} model-parallel ranks: {listed(map(show, by_rank.values()))}; "
            "how they divide the tensors is not stored",
            path=folder,
            hint="convert it with `ds_to_universal` of DeepSpeed, and open the universal folder",
        )
    return RankFiles(model, optimizer, is_partitioned=bool(model) and not whole)


def tag_of(root: Location, name: str, present: Sequence[str]) -> str | None:
    """The tag that `latest` names, or None if there is none that could be the name of a folder.

    Args:
        root: the folder.
        name: name of the file, `latest` or `latest_universal`.
        present: the names in the folder.
    """
    if name not in present or not (root / name).is_file():
        return None
    try:
        text = (root / name).read_small(MAX_TAG_BYTES).decode().strip()
    except (ReshardError, UnicodeDecodeError):
        return None
    return None if not text or "/" in text or "\0" in text or text in (".", "..") else text


def is_universal(folder: Location) -> bool:
    """Whether a folder is a universal one."""
    return (folder / ZERO_FOLDER / OPTIMIZER_FILE).is_file()
