"""Writes a universal folder of DeepSpeed: each parameter's fp32 weights and optimizer state in files of their own.

    latest_universal                                     the tag, written last
    <tag>_universal/mp_rank_00_model_states.pt           counters and client state, for ZeRO stages 0 to 2
    <tag>_universal/zero_pp_rank_0_mp_rank_00_model_states.pt    the same, for stage 3
    <tag>_universal/zero/optimizer_state.pt              options of the parameter groups
    <tag>_universal/zero/<parameter>/<slot>.pt           a dict with one tensor; of `step` a bare tensor

Source: `runtime/engine.py`, `runtime/base_optimizer.py`, `runtime/zero/stage3.py` of DeepSpeed 0.19.8, which load it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from reshard.conversion.destinations import File, check_folder_free, is_our_file, publish_folder
from reshard.conversion.writer import Settings, Writer
from reshard.errors import ArgumentError, UnsupportedError
from reshard.formats import counter_tensors
from reshard.formats.deepspeed import names
from reshard.formats.deepspeed.zero import WEIGHT
from reshard.formats.outputs import load_all
from reshard.formats.torch_file import archive
from reshard.formats.torch_file.encode import MAX_DEPTH, Encoder, NotPlainError, torch_dtype
from reshard.storage.names import component_fault
from reshard.values.counters import is_counter
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.conversion.destinations import Job, Written
    from reshard.storage.location import Location

_SUFFIX = "_universal"
_STEP = "step"
_DCP_STATE = "optimizer.state."
_SLOTS = {"adam_m": "exp_avg", "adam_v": "exp_avg_sq", "moment1": "exp_avg", "moment2": "exp_avg_sq"}
_SLOTS |= {"fp32_param": WEIGHT, "param": WEIGHT}
_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_VERSION = "0.19.8"
# DeepSpeed pairs its groups with those of the file and loads nothing of a group without partner: pairs for all.
_N_GROUPS = 1024
_MAX_VALUES = 100_000
# Values of a source that belong to the run that wrote it, or that are written in another place.
_NOT_CLIENT_STATE = frozenset(
    {
        *("optimizer", "optimizer_step", "zero_stage", "tied", "ds_config", "data_sampler", "random_ltd", "module"),
        *("checkpoint_parallel_dimensions", "universal_checkpoint_info", "ds_autoep_layers", "autoep_layers"),
    }
)


class UniversalWriter(Writer):
    """A universal folder of DeepSpeed."""

    name = "deepspeed-universal"
    commits = (names.LATEST_UNIVERSAL,)
    is_whole = True
    options = frozenset({"iteration"})

    def writes_extra(self, job: Job) -> bool:  # noqa: ARG002
        """The client state; values that cannot be encoded are in its warnings."""
        return True

    def write(self, job: Job, settings: Settings) -> Written:
        """Write the files of the parameters, then the small ones, and the tag last.

        Raises:
            ArgumentError: an option has no meaning here.
            UnsupportedError: DeepSpeed could not load it, or would load other values.
        """
        if settings.dedup is not None or settings.max_bytes is not None:
            raise ArgumentError(
                f'`to="{self.name}"` has a file for each tensor: `dedup` and `max_shard_size` mean nothing'
            )
        if job.options.dtype not in (None, "F32"):
            raise ArgumentError(f'`to="{self.name}"` holds fp32: leave `dtype` out, or give "float32"')
        iteration = settings.iteration if settings.iteration is not None else job.source.iteration
        sub = f"global_step{iteration or 0}{_SUFFIX}"
        check_folder_free(job, lambda entry: entry.name in (sub, names.LATEST_UNIVERSAL) and not _is_ours(job, entry))
        content = _content(job, iteration)
        job = replace(job, options=replace(job.options, dtype="F32"))
        zero = f"{sub}/{names.ZERO_FOLDER}"
        files = []
        for name, slots in content.tensors.items():
            for slot, key in slots.items():
                request = job.whole_request([key])
                ((_, dtype, shape, n_bytes),) = job.arrays(request)
                torch_dtype(key, dtype)
                container = archive.state_dict(slot, [("param", dtype, shape, n_bytes)])
                files.append(File(f"{zero}/{name}/{slot}.pt", request, container))
        small = {f"{zero}/{names.OPTIMIZER_FILE}": _optimizer_file(content)}
        if content.step is not None:
            step = archive.scalar_file(content.step)
            small |= {f"{zero}/{name}/{_STEP}.pt": step for name in content.trained}
        model = archive.state_dict("model_states", [], _model_states(job, content, iteration))[0]
        small |= {f"{sub}/{name}": model for name in _MODEL_FILES}
        small[names.LATEST_UNIVERSAL] = sub.encode()
        written = publish_folder(
            job,
            files,
            small,
            path=job.target / sub,
            subfolders=[sub, zero, *(f"{zero}/{name}" for name in content.tensors)],
            is_ours=functools.partial(_is_ours, job),
            warnings=content.warnings,
        )
        return written if written.pending else replace(written, n_files=written.n_files + len(small))


@dataclass
class _Content:
    """What is written.

    Attributes:
        tensors: for each parameter the keys of its tensors by slot.
        trained: names of the parameters with optimizer state; without any, all weights.
        step: the step of the optimizer, if there is state.
        groups: options of the parameter groups, as far as they are known.
        client: values beside the tensors.
        warnings: what is left out.
    """

    tensors: dict[str, dict[str, str]]
    trained: list[str]
    step: float | None
    groups: list[dict[str, Any]] = field(default_factory=list)
    client: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def _content(job: Job, iteration: int | None) -> _Content:
    """Group the tensors by parameter, and check that DeepSpeed loads what is written."""
    source = job.source
    # A single file has no parts: there the names tell.
    of_optimizer = {*source.keys("optimizer"), *(key for key in job.keys if _is_state(key, source.shape(key)))}
    tensors: dict[str, dict[str, str]] = {}
    for key in job.keys:
        if key not in of_optimizer:
            # Of stage 3, the fp32 weights are the weights.
            master = key.removesuffix(f".{WEIGHT}")
            is_master = master != key and source.format == "deepspeed"
            tensors[master if is_master else key] = {WEIGHT: key}
    steps: list[str] = []
    others: list[str] = []
    with_state: set[str] = set()
    for key in job.keys:
        if key not in of_optimizer:
            continue
        found = _parameter_and_slot(key, tensors)
        if found is None:
            others.append(key)
        elif found[1] == _STEP:
            steps.append(key)
        else:
            name, slot = found
            slot = _SLOTS.get(slot, slot)
            if source.shape(key) != source.shape(tensors[name][WEIGHT]):
                raise UnsupportedError(
                    f"{show(key)} has the shape {source.shape(key)}, its parameter {show(name)} "
                    f"{source.shape(tensors[name][WEIGHT])}: DeepSpeed loads state of the parameter's shape only",
                    key=key,
                    hint='leave it out with `select=`, or write the weights only with `part="model"`',
                )
            if slot in tensors[name] and slot != WEIGHT:
                raise UnsupportedError(f"{show(tensors[name][slot])} and {show(key)} are both {slot}", key=key)
            tensors[name][slot] = key
            if slot != WEIGHT:
                with_state.add(name)
    state = [key for key in others if key not in counter_tensors.NAMES]
    if state and not with_state:
        raise UnsupportedError(
            f"no tensor of the optimizer belongs to a weight that is written, such as {show(state[0])}",
            key=state[0],
            hint='rename the weights or the state with `select=`, or write the weights only with `part="model"`',
        )
    for name, slots in tensors.items():
        for key in slots.values():
            if job.options.dtype is None and source[key].dtype == "F64":
                raise UnsupportedError(
                    f"{show(key)} is F64; universal folders hold fp32",
                    key=key,
                    hint='give `dtype="float32"` to round it',
                )
        if (fault := component_fault(name)) is not None:
            raise UnsupportedError(f"{show(name)} cannot be the name of a folder: {fault}", key=name, hint="rename it")
    content = _Content(tensors, [name for name in tensors if not with_state or name in with_state], None)
    if with_state:
        content.step = _step(job, steps, iteration)
    if others:
        content.warnings.append(f"{listed(map(show, others), 3)} are not written: they belong to no parameter")
    _add_values(content, source.extra())
    return content


def _is_state(key: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is optimizer state or a counter, by its name; a counter has one element."""
    return counter_tensors.is_state(key) and (not counter_tensors.is_counter(key) or is_counter(key, shape))


def _parameter_and_slot(key: str, weights: Mapping[str, object]) -> tuple[str, str] | None:
    """The weight to which a tensor of an optimizer belongs, and its slot: `<slot>.<weight>` or `<weight>.<slot>`.

    Example:
        >>> [_parameter_and_slot(key, {"a.w": 0}) for key in ("exp_avg.a.w", "a.w.fp32", "optimizer.state.a.w.step")]
        [('a.w', 'exp_avg'), ('a.w', 'fp32'), ('a.w', 'step')]
        >>> _parameter_and_slot("exp_avg.b", {"a.w": 0})
    """
    key = key.removeprefix(_DCP_STATE)
    slot, _, name = key.partition(".")
    if name in weights:
        return name, slot
    name, _, slot = key.rpartition(".")
    return (name, slot) if name in weights else None


def _step(job: Job, keys: list[str], iteration: int | None) -> float:
    """The step of the optimizer. DeepSpeed has one for all parameters."""
    if keys:
        values = {key: array.item() for key, array in load_all(job.plan(job.whole_request(keys))).items()}
        if len(set(values.values())) > 1:
            low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
            raise UnsupportedError(
                f"{show(low)} is {values[low]}, {show(high)} is {values[high]}: DeepSpeed has one step for all",
                key=low,
                hint='write the weights only with `part="model"`',
            )
        return float(values[keys[0]])
    step = job.source.extra().get("optimizer_step", iteration)
    if not isinstance(step, int | float):
        raise UnsupportedError(
            "the source has optimizer state, but the step of the optimizer is not stored",
            hint='give it with `iteration=`, or write the weights only with `part="model"`',
        )
    return float(step)


def _add_values(content: _Content, values: Mapping[str, Any]) -> None:
    """Add the options of the groups and the client state, as far as they have an encoding."""
    optimizer = values.get("optimizer")
    groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    found = {name: value for name, value in values.items() if name not in _NOT_CLIENT_STATE}
    if isinstance(groups, list) and all(isinstance(group, dict) for group in groups):
        found["optimizer.param_groups"] = groups
    taken: set[str] = set()
    for name, value in found.items():
        try:
            Encoder(2).value(value)
            _add_paths(taken, name, value)
        except NotPlainError as error:
            content.warnings.append(f"{show(name)} is not written: {error}")
            continue
        content.client[name] = value
    content.groups = content.client.pop("optimizer.param_groups", [])


def _add_paths(taken: set[str], name: str, value: Any) -> None:
    """Add the paths by which a reader of the file names the values in a value; it refuses two values of one path."""
    own: set[str] = set()
    open_: list[tuple[str, Any, int]] = [(name, value, 0)]
    while open_:
        path, one, depth = open_.pop()
        items = [*one.items()] if type(one) is dict else [*enumerate(one)] if type(one) in (list, tuple) else []
        if depth > MAX_DEPTH or len(own) + len(open_) > _MAX_VALUES:
            raise NotPlainError(
                f"it has more than {_MAX_VALUES} values, or is nested more than {MAX_DEPTH} levels deep"
            )
        if any(type(key) not in (str, int) for key, _ in items):
            raise NotPlainError("a dict with a key that is neither text nor a number")
        open_ += [(f"{path}.{key}", inner, depth + 1) for key, inner in items]
        if not items and (path in own or path in taken):
            raise NotPlainError(f"two values have the path {show(path)}")
        if not items:
            own.add(path)
    taken |= own


def _optimizer_file(content: _Content) -> bytes:
    """The options of the groups: by number for stages 0 to 2, and for stage 3, which gives all groups the same ones."""
    groups = [{**group, "params": [number]} for number, group in enumerate(content.groups)]
    groups += [{"params": [number]} for number in range(len(groups), _N_GROUPS)]
    first = content.groups[0] if content.groups else {}
    common = {
        name: value
        for name, value in first.items()
        if name != "params" and all(name in group and group[name] == value for group in content.groups)
    }
    return archive.optimizer_file({"ds_version": _VERSION, "param_groups": groups}, content.step, common)


def _model_states(job: Job, content: _Content, iteration: int | None) -> dict[str, Any]:
    shapes = {name: tuple(job.source.shape(slots[WEIGHT])) for name, slots in content.tensors.items()}
    trained = set(content.trained)
    return {
        "lr_scheduler": None,
        "global_steps": iteration or 0,
        "skipped_steps": 0,
        **content.client,
        "module": {},
        "buffer_names": [],
        "param_shapes": [{name: shapes[name] for name in content.trained}],
        "frozen_param_shapes": {name: shape for name, shape in shapes.items() if name not in trained},
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": _VERSION,
    }


def _is_ours(job: Job, entry: Location) -> bool:
    """Whether an entry of the destination was written by an earlier conversion."""
    if entry.kind() == "folder":
        file = entry / _MODEL_FILES[0]
        return entry.name.endswith(_SUFFIX) and file.is_file() and archive.is_ours(file)
    if entry.name == names.LATEST_UNIVERSAL:
        folders = [entry.parent / name for name in entry.parent.names() if name.startswith("global_step")]
        return all(_is_ours(job, folder) for folder in folders if folder.name.endswith(_SUFFIX))
    return is_our_file(job, entry)
