"""The MindSpore configuration keys that are read: their places, the values they accept and the fields that they set."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.documents.fields import At, found, is_list, read_integer
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Callable

_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")


@dataclass(frozen=True)
class Kind:
    """The kind of value that a key accepts.

    Attributes:
        accepts: a description for messages.
        parse: converts the value of the file; None as a result: the key has no effect.
    """

    accepts: str
    parse: Callable[[At, object], object]


def _flag(at: At, value: object) -> bool:
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):  # numpy's too
        return bool(value)
    raise at.error(f"expected true or false, found {found(value)}")


def _text(at: At, value: object) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str) and "\0" not in value:
        return value
    raise at.error(f"expected text, found {found(value)}")


def _path(at: At, value: object) -> str | None:
    """A path; the empty one means none."""
    return _text(at, value) or None


def _number(at: At, value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number or (isinstance(value, str) and _NUMBER.fullmatch(value)):
        return float(value)  # type: ignore[arg-type]
    raise at.error(f"expected a number, found {found(value)}")


def _on(at: At, value: object) -> bool | None:
    """A flag that may be on in one place and off, as by default, in another."""
    return _flag(at, value) or None


def _steps(at: At, value: object) -> int | None:
    """A number of steps; 0 means none."""
    return read_integer(at, value, 0) or None


def _count(at: At, value: object) -> int:
    return read_integer(at, value, 1)


def _workers(at: At, value: object) -> int | None:
    """A number of workers; 1 is the default and has no effect."""
    number = read_integer(at, value, 1)
    return None if number == 1 else number


def _count_or_all(at: At, value: object) -> int | None:
    """A count; -1 means all."""
    number = read_integer(at, value, -1)
    if number == 0:
        raise at.error("expected -1 or an integer of at least 1, found `0`")
    return None if number == -1 else number


def _resume(at: At, value: object) -> bool | str:
    """True, false, or the name of a file of Checkpoint 1.0."""
    if isinstance(value, str):
        if value.lower() in ("true", "false", "yes", "no", "on", "off", ""):
            raise at.error(f"expected true, false or the name of a file, found the text {show(value)}")
        return _text(at, value)
    return _flag(at, value)


def _background(at: At, value: object) -> bool:
    """MindSpore Transformers accepts `thread` and `process` too. Here one native writer does it."""
    return True if value in ("thread", "process") else _flag(at, value)


def _format(at: At, value: object) -> str:
    if value == "ckpt":
        raise at.error(
            "`ckpt` files are not written",
            hint="write `checkpoint_format: safetensors`; MindSpore Transformers reads these files as well",
        )
    if value != "safetensors":
        raise at.error(f"expected `safetensors`, found {found(value)}")
    return "safetensors"


def _load_format(at: At, value: object) -> str:
    if value in ("ckpt", "safetensors"):
        return str(value)
    raise at.error(f"expected `safetensors` or `ckpt`, found {found(value)}")


def _rampup(at: At, value: object) -> tuple[int, ...]:
    if not is_list(value) or len(value) != 3:  # type: ignore[arg-type]
        raise at.error(f"expected three integers: start, increment and samples, found {found(value)}")
    return tuple(read_integer(at / n, item, 0) for n, item in enumerate(value))  # type: ignore[var-annotated, arg-type]


_FLAG = Kind("true or false", _flag)
_ON = Kind("true or false", _on)
_TEXT = Kind("text", _text)
_PATH = Kind("text", _path)
NUMBER = Kind("a number", _number)
_STEPS = Kind("an integer, or 0 for none", _steps)
_COUNT = Kind("an integer of at least 1", _count)
_WORKERS = Kind("an integer of at least 1", _workers)
_COUNT_OR_ALL = Kind("an integer of at least 1, or -1 for all", _count_or_all)
_RESUME = Kind("true, false, or the name of a file", _resume)
_BACKGROUND = Kind("true, false, `thread` or `process`", _background)
_FORMAT = Kind("`safetensors`", _format)
_LOAD_FORMAT = Kind("`safetensors` or `ckpt`", _load_format)
_RAMPUP = Kind("a list of three integers", _rampup)
_ANY = Kind("anything", lambda _, value: value)


# -- the vocabulary


@dataclass(frozen=True)
class Word:
    """A MindSpore configuration key.

    Attributes:
        field: the field of `Config` that it sets, after a `!` to the opposite of a flag; None: none.
        kind: the values that it accepts.
        inert: whether it has no effect here; a configuration that sets it gets a warning.
    """

    field: str | None
    kind: Kind
    inert: bool = False


SAVING = {
    "prefix": Word("prefix", _TEXT),
    "save_checkpoint_steps": Word("save_every", _STEPS),
    "keep_checkpoint_max": Word("keep", _COUNT),
    "async_save": Word("async_save", _BACKGROUND),
    "integrated_save": Word("integrated_save", _FLAG),
    "save_network_params": Word("save_network_params", _FLAG),
    "save_trainable_params": Word("save_trainable_params", _FLAG),
    "save_optimizer": Word("save_optimizer", _FLAG),
    "checkpoint_format": Word(None, _FORMAT),
    "use_legacy_format": Word("legacy_format", _FLAG),
    "only_save_strategy": Word("only_save_strategy", _FLAG),
    "use_checkpoint_health_monitor": Word("healthy_only", _ON),
    "save_checkpoint_seconds": Word(None, _STEPS, inert=True),
    "keep_checkpoint_per_n_minutes": Word(None, _STEPS, inert=True),
    "exception_save": Word(None, _FLAG, inert=True),
    "save_checkpoint_path": Word("save_path", _TEXT),
}
TOP = {
    **SAVING,  # for a configuration without callbacks
    "load_checkpoint": Word("load_path", _TEXT),
    "resume_training": Word("resume", _RESUME),
    "load_ckpt_async": Word("load_async", _FLAG),
    "load_ckpt_format": Word("load_format", _LOAD_FORMAT),
    "auto_trans_ckpt": Word("auto_trans", _FLAG),
    "src_strategy_path_or_dir": Word("strategy", _PATH),
    "resume_by_last_timestamp_ckpt": Word("by_timestamp", _FLAG),
    "pretrained_model_dir": Word("model_path", _PATH),
    "use_parallel": Word("use_parallel", _FLAG),
    "remove_redundancy": Word(None, _FLAG),  # about loading, where the files record it: see `read`
    "output_dir": Word(None, _TEXT),  # see `read`
    "balanced_load": Word(None, _FLAG, inert=True),
    "reshard_worker_num": Word(None, _WORKERS, inert=True),
}
MONITOR = {
    **SAVING,
    "directory": Word("save_path", _TEXT),
    "remove_redundancy": Word("dedup", _FLAG),
    "embedding_local_norm_threshold": Word(None, NUMBER),
    "enc_key": Word(None, _ANY, inert=True),
    **dict.fromkeys(
        ("type", "config", "saved_network", "append_info", "enc_mode", "embedding_size", "health_ckpts_record_dir",
         "global_batch_size"), Word(None, _ANY),
    ),
}  # fmt: skip
SECTION = {
    "load_path": Word("load_path", _TEXT),
    "no_load_optim": Word("!resume", _FLAG),
    "load_balanced": Word(None, _FLAG, inert=True),
    "load_worker_number": Word(None, _WORKERS, inert=True),
    "reshard_worker_num": Word(None, _WORKERS, inert=True),
    "base_load_path": Word(None, _TEXT, inert=True),
    "enable_save": Word(None, _FLAG),  # see `read`
    "save_path": Word("save_path", _TEXT),
    "save_max": Word("keep", _COUNT),
    "save_interleaved_steps": Word("save_every", _STEPS),
    "no_save_optim": Word("!save_optimizer", _FLAG),
    "async_save": Word("async_save", _BACKGROUND),
    "prefix": Word("prefix", _TEXT),
    "remove_redundancy": Word("dedup", _FLAG),
    "save_remove_redundancy": Word("dedup", _FLAG),
    "save_global_layout_cache": Word(None, _ANY),
}
TRAINER = {
    "ignore_data_skip": Word("ignore_data_skip", _FLAG),
    "data_skip_steps": Word("data_skip_steps", _STEPS),
}
LR_SCHEDULE = {"total_steps": Word("total_steps", _COUNT_OR_ALL)}
RUNNER = {
    "epochs": Word("epochs", _COUNT),
    "batch_size": Word("batch_size", _COUNT),
    "sink_mode": Word("sink_mode", _FLAG),
    "sink_size": Word("sink_size", _COUNT_OR_ALL),
}
TRAINING = {
    "steps": Word("total_steps", _COUNT),
    "local_batch_size": Word("batch_size", _COUNT),
    "global_batch_size": Word("global_batch_size", _COUNT),
    "rampup_batch_size": Word("rampup", _RAMPUP),
}
PARALLEL = {
    name: Word(name, _COUNT)
    for name in ("data_parallel", "model_parallel", "pipeline_stage", "expert_parallel", "context_parallel")
}
SECTIONS = {
    "trainer": TRAINER,
    "lr_schedule": LR_SCHEDULE,
    "runner_config": RUNNER,
    "training": TRAINING,
    "parallel_config": PARALLEL,
}
OWN = {
    "hf_every": Word("hf_every", _COUNT),
    "merge": Word("merge", _FLAG),
    "model_files": Word("model_files", _PATH),
    "links": Word("links", _FLAG),
}
"""In the section `reshard`, beside the groups of options: arguments of a `Checkpointer`."""

OTHERS = ("checkpoint", "callbacks", "monitor_config", "reshard")  # read by functions of their own
FOREIGN = {"lr_scheduler", "train_dataset", "eval_dataset"}
"""Keys of MindSpore Transformers that are not read here, although they look like keys that are."""
ELSEWHERE = {
    **dict.fromkeys(TRAINER, "trainer"),
    **dict.fromkeys(("load_path", "no_load_optim", "save_max", "save_interleaved_steps"), "checkpoint"),
    **dict.fromkeys(("no_save_optim", "save_remove_redundancy"), "checkpoint"),
    "total_steps": "lr_schedule",
}
MONITORS = ("CheckpointMonitor", "CheckpointMointor")  # the second is what older releases call it
