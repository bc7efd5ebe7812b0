"""A training configuration with MindSpore configuration keys, read into one frozen value.

The whole YAML file of a training is accepted: only the keys below are read, and other sections are ignored. A key may
be given in several places, old and new, with equal values. The tables in `words` list all keys. A key that is not in
them but looks like one of them is an error, since a misspelt `resume_training` would otherwise start a training from
nothing.

The section `reshard` is this package's own: groups of options of `reshard.options`, and the arguments `hf_every`,
`model_files` and `links` of a `Checkpointer`, for which there is no key of MindSpore Transformers.

    reshard:
      hf_every: 10
      links: true
      retention: {keep_every: 1000, best: [loss, 3]}
      verify: {after_save: true}
      init_from: {path: pretrained, exclude: ["lm_head.*"]}

This module does not use the values, and reads no file but the configuration.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal, Self, TypeAlias

from reshard.config.read import read_values
from reshard.documents.fields import At
from reshard.documents.strict_yaml import read_yaml
from reshard.errors import ConfigError
from reshard.options import Checkpoint1Options, Files, InitFrom, Options, Retention

__all__ = ["Config", "ConfigLike", "as_config", "split_iteration"]

ConfigLike: TypeAlias = "Config | str | os.PathLike[str] | Mapping[str, Any]"

_ITERATION_FOLDER = re.compile(r"iteration_0*([0-9]{1,18})")


@dataclass(frozen=True)
class Config:
    """How a training saves and resumes. The MindSpore configuration keys are in brackets, the older before the newer.

    Attributes:
        load_path: the checkpoint root, iteration folder, Hugging Face folder or file to load; "" loads nothing
            (`load_checkpoint`, `checkpoint.load_path`).
        resume: whether the training goes on where the checkpoint was saved, optimizer and counters included; False
            takes the weights alone (`resume_training`, the opposite of `checkpoint.no_load_optim`).
        resume_file: the file of each rank's folder that `resume_training` names, with any rank in the name and with or
            without its extension; None: the newest that is complete on all ranks.
        load_format: the extension of the files of a Checkpoint 1.0 tree that are considered, "safetensors" or "ckpt";
            None: both (`load_ckpt_format`).
        by_timestamp: whether the newest save of a Checkpoint 1.0 tree is found by the times of its files, and not by
            its meta.json files (`resume_by_last_timestamp_ckpt`).
        auto_trans: whether the checkpoint is resharded for the run, and no rank takes its own file of a Checkpoint 1.0
            tree as it is (`auto_trans_ckpt`).
        strategy: the strategy file, or the folder of them, that says how a Checkpoint 1.0 tree is sharded; None: the
            folder `strategy` beside it (`src_strategy_path_or_dir`).
        model_path: a Hugging Face folder: its config says how the model is sharded where it is loaded from such a
            folder, and its weights are loaded if nothing else is loaded or resumed (`pretrained_model_dir`).
        use_parallel: whether the sizes that follow hold; else each is 1 (`use_parallel`).
        data_parallel, model_parallel, pipeline_stage, expert_parallel, context_parallel: ranks of each kind; the
            experts are divided over ranks of data_parallel (`parallel_config`).
        load_async: whether loading begins in the background (`load_ckpt_async`).
        save_path: the checkpoint root that is saved to (`CheckpointMonitor.directory`, `save_checkpoint_path`,
            `checkpoint.save_path`, or `checkpoint` under `output_dir`); None if nothing says so.
        save_every: steps from one save to the next; None: no saves (`save_checkpoint_steps`,
            `checkpoint.save_interleaved_steps`).
        keep: checkpoints that are kept (`keep_checkpoint_max`, `checkpoint.save_max`).
        prefix: what the names of shard files begin with.
        async_save: whether saves are written in the background.
        dedup: whether replicas are saved once (`remove_redundancy`, `checkpoint.save_remove_redundancy`).
        save_optimizer: whether the optimizer is saved too (the opposite of `checkpoint.no_save_optim`).
        healthy_only: whether only checkpoints that the health monitor found healthy are resumed from
            (`monitor_config.health_checkpoint.embedding_local_norm_threshold`, `use_checkpoint_health_monitor`).
        ignore_data_skip: whether the data is read from its beginning (`trainer.ignore_data_skip`).
        data_skip_steps: steps of data to skip instead of those already made; None: as many as were made, as 0 does
            (`trainer.data_skip_steps`).
        total_steps: steps of the learning-rate curve; None, as -1 does: those of the dataset
            (`lr_schedule.total_steps`, `training.steps`).
        epochs: epochs of the training (`runner_config.epochs`).
        batch_size: samples a step of one rank (`runner_config.batch_size`, `training.local_batch_size`).
        sink_mode: whether the loop runs in sinks of several steps (`runner_config.sink_mode`).
        sink_size: steps of a sink; None, as -1 does: a whole epoch (`runner_config.sink_size`).
        global_batch_size: samples a step over all ranks (`training.global_batch_size`).
        rampup: start, increment and samples of a growing batch (`training.rampup_batch_size`).
        legacy_format: whether Checkpoint 1.0 is saved (`use_legacy_format`).
        integrated_save: whether each save is written a second time, as whole tensors.
        hf_every: each n-th save is written a second time, as a Hugging Face folder; None: none (`reshard.hf_every`).
        merge: whether that folder has merged weights instead of the adapters of peft (`reshard.merge`).
        model_files: a folder with the other files of such a folder, such as the tokenizer (`reshard.model_files`).
        links: whether the links `last` and `best` name iterations in the root (`reshard.links`).
        save_network_params: of Checkpoint 1.0: whether the weights are saved a second time, by themselves.
        save_trainable_params: of Checkpoint 1.0: whether the weights that are trained are, too.
        only_save_strategy: whether nothing but the strategy files is written, that is how tensors are sharded.
        without_effect: keys of the configuration that have no effect here, such as "`integrated_save`".
        groups: the groups of options in the section `reshard`. `keep`, `prefix` and `dedup` in them are also the fields
            of these names.

    Example:
        >>> config = Config.from_mapping({
        ...     "load_checkpoint": "output/checkpoint/iteration_0000400",
        ...     "resume_training": True,
        ...     "callbacks": [{"type": "CheckpointMonitor", "save_checkpoint_steps": 500, "keep_checkpoint_max": 3}],
        ... })
        >>> config.resume, config.save_every, config.keep, split_iteration(config.load_path)
        (True, 500, 3, ('output/checkpoint', 400))
    """

    load_path: str = ""
    resume: bool = False
    resume_file: str | None = None
    load_format: Literal["safetensors", "ckpt"] | None = None
    by_timestamp: bool = False
    auto_trans: bool = False
    strategy: str | None = None
    model_path: str | None = None
    use_parallel: bool = False
    data_parallel: int = 1
    model_parallel: int = 1
    pipeline_stage: int = 1
    expert_parallel: int = 1
    context_parallel: int = 1
    load_async: bool = False
    save_path: str | None = None
    save_every: int | None = None
    keep: int = 5
    prefix: str | None = None
    async_save: bool = False
    dedup: bool = False
    save_optimizer: bool = True
    healthy_only: bool = False
    ignore_data_skip: bool = False
    data_skip_steps: int | None = None
    total_steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    sink_mode: bool = True
    sink_size: int | None = None
    global_batch_size: int | None = None
    rampup: tuple[int, int, int] | None = None
    legacy_format: bool = False
    integrated_save: bool = False
    hf_every: int | None = None
    merge: bool = False
    model_files: str | None = None
    links: bool = False
    save_network_params: bool = False
    save_trainable_params: bool = False
    only_save_strategy: bool = False
    without_effect: tuple[str, ...] = ()
    groups: tuple[Options, ...] = ()

    def options(self) -> dict[str, Options]:
        """The groups of options that the configuration gives a `Checkpointer`, by the names of its parameters.

        Example:
            >>> config = Config.from_mapping({
            ...     "keep_checkpoint_max": 3, "prefix": "qwen", "reshard": {"retention": {"keep_every": 1000}},
            ... })
            >>> config.options()["retention"], config.options()["files"]
            (Retention(keep=3, keep_every=1000), Files(prefix='qwen', dedup=False))
        """
        given = {one.keyword: one for one in self.groups if not isinstance(one, InitFrom)}
        given["retention"] = given.get("retention", Retention()).updated({"keep": self.keep})
        given["files"] = given.get("files", Files()).updated({"prefix": self.prefix, "dedup": self.dedup})
        if self.legacy_format or self.only_save_strategy:  # strategy files are those of Checkpoint 1.0
            given["format"] = Checkpoint1Options(
                sink_size=self.sink_size if self.sink_mode else None,
                save_network_params=self.save_network_params,
                save_trainable_params=self.save_trainable_params,
                only_save_strategy=self.only_save_strategy,
            )
        return given

    @property
    def init_from(self) -> InitFrom | None:
        """What the run starts from when it has no checkpoint of its own, of the section `reshard`.

        Example:
            >>> config = Config.from_mapping({"reshard": {"init_from": {"path": "pretrained", "names": "names.yaml"}}})
            >>> config.init_from, config.load_path, config.resume
            (InitFrom(path='pretrained', names='names.yaml'), 'pretrained', False)
        """
        return next((one for one in self.groups if isinstance(one, InitFrom)), None)

    @property
    def mesh(self) -> dict[str, int]:
        """The ranks of the run, as `ModelLayout.preset` takes them.

        Ranks that share a sequence hold the same weights, as those of data parallel do.

        Example:
            >>> Config(use_parallel=True, data_parallel=4, model_parallel=2, expert_parallel=2).mesh
            {'tp': 2, 'pp': 1, 'ep': 2, 'dp': 2}
        """
        if not self.use_parallel:
            return {"tp": 1, "pp": 1, "ep": 1, "dp": 1}
        dp = self.data_parallel // self.expert_parallel * self.context_parallel
        return {"tp": self.model_parallel, "pp": self.pipeline_stage, "ep": self.expert_parallel, "dp": dp}

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> Self:
        r"""Read a YAML file, that of a whole training or only the part about checkpoints.

        Args:
            path: the file, UTF-8, at most 16 MiB.

        Raises:
            CheckpointNotFoundError: there is no such file.
            ConfigError: it is not YAML, or a key is misspelt or misplaced, has a value of the wrong type, or
                contradicts another one; the message names file, line and key, and what is accepted.
            StorageError: the system failed to read it.

        Example:
            >>> import tempfile, pathlib
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = pathlib.Path(folder) / "train.yaml"
            ...     _ = path.write_text("load_checkpoint: output/checkpoint\nresume_training: True\nseed: 0\n")
            ...     Config.from_yaml(path).resume
            True
        """
        value, lines = read_yaml(path, what="configuration", error_class=ConfigError)
        return cls(**read_values(value, At(os.fspath(path), lines, (), "configuration", ConfigError)))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Read the same as a mapping.

        Raises:
            ConfigError: as for a file, without lines.

        Example:
            >>> Config.from_mapping({"output_dirs": "o"})
            Traceback (most recent call last):
            reshard.errors.ConfigError: configuration: output_dirs: no such word; `output_dir` takes text
            hint: did you mean `output_dir`?
        """
        return cls(**read_values(mapping, At(None, {}, (), "configuration", ConfigError)))


def as_config(config: ConfigLike) -> Config:
    """A configuration from whatever `config=` takes: a `Config`, a YAML file or a mapping.

    Raises:
        CheckpointNotFoundError, ConfigError, StorageError: as `Config.from_yaml`.

    Example:
        >>> as_config({"load_checkpoint": "output/checkpoint"}).load_path
        'output/checkpoint'
    """
    if isinstance(config, Config):
        return config
    return Config.from_mapping(config) if isinstance(config, Mapping) else Config.from_yaml(config)


def split_iteration(path: str) -> tuple[str, int | None]:
    """The root and the iteration of a path that ends in `iteration_<digits>`, of any width; else the path and None.

    Example:
        >>> split_iteration("/data/checkpoint/iteration_0000001/"), split_iteration("/data/checkpoint")
        (('/data/checkpoint', 1), ('/data/checkpoint', None))
        >>> split_iteration("s3://bucket/run/iteration_00000400")
        ('s3://bucket/run', 400)
    """
    if "://" in path:  # `PurePath` joins the slashes of a URL
        folder, _, name = path.rstrip("/").rpartition("/")
        match = _ITERATION_FOLDER.fullmatch(name)
        return (folder, int(match[1])) if match else (path, None)
    pure = PurePath(path)
    match = _ITERATION_FOLDER.fullmatch(pure.name)
    return (str(pure.parent), int(match[1])) if match else (path, None)
