"""Configurations in the words of MindSpore Transformers: what they mean here, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reshard.config import Config, as_config, split_iteration
from reshard.errors import CheckpointNotFoundError, ConfigError

DATA = Path(__file__).parents[1] / "data" / "mindspore"
MONITOR = {"type": "CheckpointMonitor"}


def monitor(**words: Any) -> dict[str, Any]:
    return {"callbacks": [{"type": "MFLossMonitor"}, {**MONITOR, **words}]}


def told(config: Config) -> dict[str, Any]:
    """What is not as in a configuration that says nothing."""
    default = Config()
    values = {one.name: getattr(config, one.name) for one in dataclasses.fields(Config)}
    return {name: value for name, value in values.items() if value != getattr(default, name)}


# Every configuration that the documents of the system show; a line of dots, which is no YAML, is left out.
DOCUMENTED: list[tuple[str, dict[str, Any]]] = [
    (
        "load_checkpoint: /path/to/checkpoint\nresume_training: True",
        {"load_path": "/path/to/checkpoint", "resume": True},
    ),
    (
        "load_checkpoint: /path/to/checkpoint/iteration_{x}\nresume_training: True",
        {"load_path": "/path/to/checkpoint/iteration_{x}", "resume": True},
    ),
    (
        "load_checkpoint: /path/to/checkpoint/iteration_0000001\nresume_training: True",
        {"load_path": "/path/to/checkpoint/iteration_0000001", "resume": True},
    ),
    ("lr_schedule:\n  total_steps: 100000", {"total_steps": 100000}),
    ("runner_config:\n  epochs: 15", {"epochs": 15}),
    (
        (
            'callbacks:\n  - type: CheckpointMonitor\n    prefix: "llama2_7b"\n    save_checkpoint_steps: 500\n'
            "    keep_checkpoint_max: 3"
        ),
        {"prefix": "llama2_7b", "save_every": 500, "keep": 3},
    ),
    (
        "parallel_config:\n  data_parallel: 1\n  model_parallel: 2\n  pipeline_stage: 2\n  micro_batch_num: 2",
        {"model_parallel": 2, "pipeline_stage": 2},
    ),
    (
        (
            'callbacks:\n  - type: CheckpointMonitor\n    prefix: "llama2_7b"\n    save_checkpoint_steps: 10\n'
            "    keep_checkpoint_max: 3\n    integrated_save: False\n    async_save: False"
        ),
        {"prefix": "llama2_7b", "save_every": 10, "keep": 3},
    ),
    (
        "load_checkpoint: './output/checkpoint'\nresume_training: True\ntrainer:\n   ignore_data_skip: True",
        {"load_path": "./output/checkpoint", "resume": True, "ignore_data_skip": True},
    ),
    (
        (
            "load_checkpoint: './output/checkpoint'\nresume_training: True\ntrainer:\n  ignore_data_skip: False\n"
            "  data_skip_steps: 2"
        ),
        {"load_path": "./output/checkpoint", "resume": True, "data_skip_steps": 2},
    ),
    (
        (
            '# callbacks\ncallbacks:\n  - type: CheckpointMonitor\n    prefix: "deepseekv3"\n'
            "    save_checkpoint_steps: 1000\n"
            "    keep_checkpoint_max: 5\n    save_network_params: False\n"
            "    integrated_save: False\n    async_save: False\n"
            '    checkpoint_format: "safetensors"'
        ),
        {"prefix": "deepseekv3", "save_every": 1000},
    ),
    (
        (
            "load_checkpoint: '/qwen2_7b/unified_safetenosrs'\nload_ckpt_format: 'safetensors'\n"
            "auto_trans_ckpt: False\n"
            "use_parallel: False\nparallel_config:\n  data_parallel: 1\n  model_parallel: 1\n  pipeline_stage: 1"
        ),
        {"load_path": "/qwen2_7b/unified_safetenosrs", "load_format": "safetensors"},
    ),
    (
        (
            "load_checkpoint: '/output/distributed_safetenosrs'\nsrc_strategy_path_or_dir: '/output/src_strategy'\n"
            "load_ckpt_format: 'safetensors'\nauto_trans_ckpt: True"
        ),
        {
            "load_path": "/output/distributed_safetenosrs",
            "load_format": "safetensors",
            "auto_trans": True,
            "strategy": "/output/src_strategy",
        },
    ),
    (
        (
            "output_dir: './output'\nload_checkpoint: '/qwen2_7b/unified_safetenosrs'\n"
            "load_ckpt_format: 'safetensors'\n"
            "auto_trans_ckpt: True\ntrain_dataset: &train_dataset\n  data_loader:\n    type: MindDataset\n"
            '    dataset_dir: "/worker/dataset/wiki103/"\n    shuffle: True\nparallel_config:\n  vocab_emb_dp: True\n'
            "  gradient_aggregation_group: 4\n  micro_batch_interleave_num: 1"
        ),
        {
            "load_path": "/qwen2_7b/unified_safetenosrs",
            "load_format": "safetensors",
            "auto_trans": True,
            "save_path": "output/checkpoint",
        },
    ),
    (
        "only_save_strategy: True\ntrain_dataset: &train_dataset\n  data_loader:\n    type: MindDataset",
        {"only_save_strategy": True},
    ),
    (
        "callbacks:\n  - type: CheckpointMonitor\n    checkpoint_format: safetensors\n    remove_redundancy: True",
        {"dedup": True},
    ),
    ("load_ckpt_format: 'safetensors'\nremove_redundancy: True", {"dedup": True, "load_format": "safetensors"}),
    (
        (
            "use_legacy: False\nload_checkpoint : ''\npretrained_model_dir: \"/path/qwen3\"\nmodel:\n  model_config:\n"
            '    compute_dtype: "bfloat16"\n    params_dtype: "bfloat16"\ngeneration:\n  max_length: 30'
        ),
        {"model_path": "/path/qwen3"},
    ),
    (
        (
            "load_checkpoint: 'output/checkpoint/'\nload_ckpt_format: 'ckpt'\ncallbacks:\n  - type: CheckpointMonitor\n"
            "    checkpoint_format: 'safetensors'"
        ),
        {"load_path": "output/checkpoint/", "load_format": "ckpt"},
    ),
    (
        (
            "load_checkpoint: '/output/checkpoint'\nload_ckpt_format: 'safetensors'\n"
            "resume_training: True\ncallbacks:\n"
            "  - type: CheckpointMonitor\n    checkpoint_format: safetensors"
        ),
        {"load_path": "/output/checkpoint", "load_format": "safetensors", "resume": True},
    ),
    (
        "load_checkpoint: /path/to/output/checkpoint\nresume_training: True\nload_ckpt_async: True",
        {"load_path": "/path/to/output/checkpoint", "resume": True, "load_async": True},
    ),
]


@pytest.mark.parametrize(("text", "expected"), DOCUMENTED)
def test_documented_configurations(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(text)
    assert told(Config.from_yaml(tmp_path / "train.yaml")) == expected


def test_a_trainers_whole_file() -> None:
    assert told(as_config(DATA / "train.yaml")) == {
        "load_path": "./output/checkpoint",
        "resume": True,
        "save_path": "output/checkpoint",
        "save_every": 1000,
        "keep": 3,
        "prefix": "llama2_7b",
        "total_steps": 100000,
        "epochs": 15,
        "batch_size": 6,
        "sink_size": 2,
        "load_format": "safetensors",
        "auto_trans": True,
        "model_path": "/path/to/model",
        "use_parallel": True,
        "data_parallel": 2,
        "model_parallel": 2,
        "pipeline_stage": 2,
    }


MEANINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"load_checkpoint": None, "trainer": None, "callbacks": None, "checkpoint": None, "lr_schedule": None}, {}),
    ({"resume_training": "llama_rank_0-10_2.ckpt"}, {"resume": True, "resume_file": "llama_rank_0-10_2.ckpt"}),
    ({"resume_training": np.True_}, {"resume": True}),
    ({"load_checkpoint": Path("a/b")}, {"load_path": "a/b"}),
    # on the top level the words of the callback are as good: a configuration of ours may have no callbacks
    (
        {
            "save_checkpoint_steps": np.int64(500),
            "keep_checkpoint_max": 3,
            "prefix": "p",
            "async_save": True,
            "remove_redundancy": True,
        },
        {"save_every": 500, "keep": 3, "prefix": "p", "async_save": True, "dedup": True},
    ),
    ({"save_checkpoint_steps": 500, **monitor(save_checkpoint_steps=500)}, {"save_every": 500}),
    # on the top level of a trainer's file this word is about loading, and the callback's counts
    ({"remove_redundancy": True, **monitor(remove_redundancy=False)}, {}),
    (monitor(save_checkpoint_steps=0), {}),
    (monitor(async_save="thread"), {"async_save": True}),
    (
        monitor(directory="d", enc_mode="AES-GCM", embedding_local_norm_threshold=1.0, embedding_size=4096),
        {"save_path": "d"},
    ),
    ({"callbacks": [{"type": "CheckpointMointor", "keep_checkpoint_max": 2}]}, {"keep": 2}),
    # the section of 2.0
    ({"checkpoint": {"load_path": "c"}}, {"load_path": "c", "resume": True}),
    ({"checkpoint": {"load_path": "c", "no_load_optim": True}}, {"load_path": "c"}),
    ({"load_checkpoint": "c", "checkpoint": {"no_load_optim": False}}, {"load_path": "c", "resume": True}),
    ({"load_checkpoint": "c", "checkpoint": {"load_path": "c"}, "resume_training": False}, {"load_path": "c"}),
    (
        {
            "checkpoint": {
                "save_path": "s",
                "save_max": 2,
                "save_remove_redundancy": True,
                "no_save_optim": True,
                "prefix": "p",
            }
        },
        {"save_path": "s", "save_every": 1000, "keep": 2, "dedup": True, "save_optimizer": False, "prefix": "p"},
    ),
    ({"checkpoint": {"save_path": "s", "save_interleaved_steps": 7}}, {"save_path": "s", "save_every": 7}),
    ({"checkpoint": {"save_path": "s", "enable_save": False}}, {"save_path": "s"}),
    (
        {"output_dir": "o", "checkpoint": {"save_path": "s", "save_interleaved_steps": 7}},
        {"save_path": "s", "save_every": 7},
    ),
    # -1 and 0 say nothing
    ({"lr_schedule": {"total_steps": -1}, "runner_config": {"sink_size": -1}, "trainer": {"data_skip_steps": 0}}, {}),
    ({"lr_schedule": {"total_steps": -1}, "training": {"steps": 10}}, {"total_steps": 10}),
    (
        {"training": {"rampup_batch_size": [8, 8, 400], "global_batch_size": 32, "local_batch_size": 2}},
        {"rampup": (8, 8, 400), "global_batch_size": 32, "batch_size": 2},
    ),
    ({"monitor_config": {"health_checkpoint": {"embedding_local_norm_threshold": 270.0}}}, {"healthy_only": True}),
    (
        {
            "use_checkpoint_health_monitor": False,
            "monitor_config": {"health_checkpoint": {"embedding_local_norm_threshold": "1.e2"}},
        },
        {"healthy_only": True},
    ),
    ({"use_checkpoint_health_monitor": True, **monitor(embedding_local_norm_threshold=1)}, {"healthy_only": True}),
    # which files of a Checkpoint 1.0 tree are looked at
    (
        {"resume_by_last_timestamp_ckpt": True, "load_ckpt_format": "ckpt"},
        {"by_timestamp": True, "load_format": "ckpt"},
    ),
    (
        {"use_legacy_format": True, "only_save_strategy": False, **monitor(save_network_params=True)},
        {"legacy_format": True, "save_network_params": True},
    ),
    (monitor(integrated_save=True), {"integrated_save": True}),
    # kept, and said to do nothing here
    (
        monitor(save_network_params=True, save_trainable_params=False),
        {"save_network_params": True, "without_effect": ("`save_network_params`",)},
    ),
    (monitor(save_checkpoint_seconds=30, enc_key="k"), {"without_effect": ("`save_checkpoint_seconds`", "`enc_key`")}),
    ({"reshard_worker_num": 4, "balanced_load": False}, {"without_effect": ("`reshard_worker_num`",)}),
    ({"reshard_worker_num": 1, "checkpoint": {"load_worker_number": 1}}, {}),
    # not ours, however near
    ({"lr_scheduler": {"type": "x"}, "runner_wrapper": {}, "trainer_config": 1}, {}),
    ({"training_args": {"global_batch_size": 8}, "model": {"checkpoint": 1, "resume_trainin": 2}}, {}),
]


@pytest.mark.parametrize(("mapping", "expected"), MEANINGS)
def test_what_words_mean(mapping: dict[str, Any], expected: dict[str, Any]) -> None:
    assert told(as_config(mapping)) == expected


REFUSED: list[tuple[str, int, str, str | None]] = [
    # text, line, message, hint
    (
        "seed: 0\nresume_trainning: True",
        2,
        "resume_trainning: no such word; `resume_training` takes true, false",
        "`resume_training`",
    ),
    ("load_checkpiont: x", 1, "`load_checkpoint` takes text", "`load_checkpoint`"),
    ("calbacks: []", 1, "`callbacks` takes a section", "`callbacks`"),
    ("trainer:\n  type: T\n  ignore_data_skp: True", 3, "trainer.ignore_data_skp: no such word", "`ignore_data_skip`"),
    (
        "lr_schedule:\n  total_step: 5",
        2,
        "lr_schedule.total_step: no such word; `total_steps` takes an integer",
        "`total_steps`",
    ),
    (
        "callbacks:\n  - type: CheckpointMonitor\n    keep_checkpoints: 5",
        3,
        "callbacks[0].keep_checkpoints",
        "`keep_checkpoint_max`",
    ),
    ("callbacks:\n  - type: CheckpointMonitor\n    zzz: 5", 3, "no such word; accepted are `prefix`, ", None),
    ("callbacks:\n  - type: CheckpointMonitr", 2, "no such callback: `CheckpointMonitr`", "`CheckpointMonitor`"),
    ("checkpoint:\n  save_maximum: 5", 2, "checkpoint.save_maximum: no such word", "`save_max`"),
    ("ignore_data_skip: True", 1, "ignore_data_skip: belongs under `trainer`", None),
    ("save_max: 3", 1, "save_max: belongs under `checkpoint`", None),
    # of another type
    ("resume_training: 'True'", 1, "expected true, false or the name of a file, found the text `True`", None),
    ("resume_training: yes", 1, "found the text `yes`", None),
    ("resume_training: 1", 1, "resume_training: expected true or false, found `1`", None),
    ("load_checkpoint: 5", 1, "load_checkpoint: expected text, found `5`", None),
    ("load_checkpoint: [a]", 1, "expected text, found a list", None),
    (
        "a: 1\nrunner_config:\n  epochs: 1.5",
        3,
        "runner_config.epochs: expected an integer of at least 1, found `1.5`",
        None,
    ),
    ("runner_config: 5", 1, "runner_config: expected a mapping, found `5`", None),
    ("callbacks: {type: CheckpointMonitor}", 1, "callbacks: expected a list of callbacks", None),
    ("callbacks: [5]", 1, "callbacks[0]: expected a mapping", None),
    (
        "callbacks:\n  - type: CheckpointMonitor\n    keep_checkpoint_max: 0",
        3,
        "expected an integer of at least 1",
        None,
    ),
    (
        "callbacks:\n  - type: CheckpointMonitor\n    save_checkpoint_steps: -5",
        3,
        "expected an integer of at least 0",
        None,
    ),
    (
        "callbacks:\n  - type: CheckpointMonitor\n    checkpoint_format: ckpt",
        3,
        "`ckpt` files are not written",
        "safetensors",
    ),
    (
        "callbacks:\n  - type: CheckpointMonitor\n    checkpoint_format: pt",
        3,
        "expected `safetensors`, found `pt`",
        None,
    ),
    ("lr_schedule:\n  total_steps: 0", 2, "expected -1 or an integer of at least 1", None),
    ("training:\n  rampup_batch_size: [1, 2]", 2, "expected three integers", None),
    (
        "training:\n  rampup_batch_size:\n    - 1\n    - x\n    - 3",
        4,
        "training.rampup_batch_size[1]: expected an integer",
        None,
    ),
    ("monitor_config:\n  health_checkpoint:\n    embedding_local_norm_threshold: high", 3, "expected a number", None),
    # two places that disagree
    (
        "load_checkpoint: a\ncheckpoint:\n  load_path: b",
        3,
        "checkpoint.load_path: contradicts `load_checkpoint`, line 1",
        "one place",
    ),
    (
        "resume_training: True\ncheckpoint:\n  no_load_optim: True",
        3,
        "contradicts `resume_training`, line 1",
        "one place",
    ),
    (
        "checkpoint:\n  save_max: 3\ncallbacks:\n  - type: CheckpointMonitor\n    keep_checkpoint_max: 5",
        5,
        "callbacks[0].keep_checkpoint_max: contradicts `checkpoint.save_max`, line 2",
        "one place",
    ),
    (
        "lr_schedule:\n  total_steps: 5\ntraining:\n  steps: 6",
        4,
        "contradicts `lr_schedule.total_steps`, line 2",
        "one place",
    ),
    ("use_legacy_format: True\ncheckpoint:\n  save_max: 3", 1, "contradicts the section `checkpoint`", None),
    # no such YAML
    ("load_checkpoint: a\nload_checkpoint: b", 2, "is repeated", None),
    ("load_checkpoint: !!python/object:os.system x", 1, "tags are not accepted", None),
    ("- a", 1, "expected a mapping with words such as `load_checkpoint`", None),
    ("", 1, "is empty", None),
]


@pytest.mark.parametrize(("text", "line", "message", "hint"), REFUSED, ids=[case[0][:40] for case in REFUSED])
def test_what_is_refused_and_how(text: str, line: int, message: str, hint: str | None, tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Config.from_yaml(path)
    error = caught.value
    assert error.message.startswith(f"{path}, line {line}: "), error.message
    assert message in error.message
    assert (hint is None) == (error.hint is None)
    assert hint is None or hint in str(error.hint)
    assert error.path == str(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="there is no configuration file"):
        Config.from_yaml(tmp_path / "absent.yaml")


def test_the_words_of_a_mapping_have_no_lines() -> None:
    with pytest.raises(ConfigError, match=r"^configuration: callbacks\[1\]\.prefix: expected text, found `5`$"):
        as_config(monitor(prefix=5))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/a/checkpoint", ("/a/checkpoint", None)),
        ("/a/iteration_5", ("/a", 5)),
        ("/a/iteration_0000005", ("/a", 5)),
        ("a/iteration_00000005/", ("a", 5)),
        ("iteration_123456789", (".", 123456789)),
        ("a/iteration_{x}", ("a/iteration_{x}", None)),
        ("a/iteration_", ("a/iteration_", None)),
        ("a/iteration_5.old", ("a/iteration_5.old", None)),
        ("a/iteration_" + "9" * 30, ("a/iteration_" + "9" * 30, None)),
        ("", ("", None)),
    ],
)
def test_an_iteration_folder_is_split_off(path: str, expected: tuple[str, int | None]) -> None:
    assert split_iteration(path) == expected
