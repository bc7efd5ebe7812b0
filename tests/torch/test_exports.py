"""What is made of each save: folders of whole weights, links, and a call after publication."""

from __future__ import annotations

import json
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.helpers.ranks import Job
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import reshard
from reshard.errors import ArgumentError, ConfigError, StorageError
from reshard.storage.changes import replace_link
from reshard.torch import Checkpointer

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.ranks.group import TorchGroup


def run(root: Path, steps: range, losses: dict[int, float] | None = None, **options: Any) -> Any:
    """Steps of a run that saves at each; the last report."""
    model = nn.Linear(2, 1)
    options = {"signals": (), "save_every": 1, **({} if "retention" in options else {"keep": 3}), **options}
    with Checkpointer(root, **options) as made:
        made.resume(model=model)
        for step in steps:
            made.step(step, loss=(losses or {}).get(step, 1.0))
        return made.wait()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_a_function_is_called_after_each_publication_and_may_fail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []

    def hook(report: Any) -> None:
        with reshard.open(report.path) as checkpoint:
            assert checkpoint.keys("model") == ["bias", "weight"] or len(checkpoint.keys("model")) == 2
        assert (tmp_path / "run/latest_checkpointed_iteration.txt").read_text().strip() == str(report.iteration)
        seen.append((report.iteration, threading.current_thread() is threading.main_thread()))
        if report.iteration == 2:
            raise RuntimeError("no network")

    report = run(tmp_path / "run", range(1, 3), exports={"after_publish": hook})
    assert seen == [(1, False), (2, False)]
    assert any("`after_publish` failed: RuntimeError: `no network`" in line for line in report.warnings)
    assert "in hook" in caplog.text, "the traceback of the function is logged"
    assert reshard.load(tmp_path / "run").iteration == 2
    run(tmp_path / "run", range(3, 4), exports={"after_publish": hook}, async_save=False)
    assert seen[2:] == [(3, True)]


def test_a_configuration_asks_for_weights_and_links(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files/tokenizer.json").write_text("{}")
    own: dict[str, Any] = {"hf_every": 2, "links": True, "model_files": str(tmp_path / "files")}
    config = {"output_dir": str(tmp_path), "save_checkpoint_steps": 1, "reshard": own}
    with Checkpointer.from_config(config, signals=()) as made:
        made.resume(model=nn.Linear(2, 1))
        for step in range(1, 4):
            made.step(step, loss=1.0)
    assert os.readlink(tmp_path / "checkpoint/last") == "iteration_00000003"  # noqa: PTH115  the text
    assert names(tmp_path / "checkpoint_hf") == ["iteration_00000002"]
    assert (tmp_path / "checkpoint_hf/iteration_00000002/tokenizer.json").exists()
    with pytest.raises(ConfigError, match=r"reshard.hf_every: .*at least 1"):
        Checkpointer.from_config({**config, "reshard": {"hf_every": 0}})
    with pytest.raises(ConfigError, match=r"reshard.model_files: belongs to `hf_every`"):
        Checkpointer.from_config({**config, "reshard": {"model_files": "files"}})


@pytest.mark.slow
def test_links_follow_the_newest_and_the_best_and_confuse_nobody(tmp_path: Path) -> None:
    root = tmp_path / "run"
    retention = {"keep": 2, "best": ("loss", 1)}
    run(root, range(1, 6), {1: 5.0, 2: 1.0, 3: 4.0, 4: 3.0, 5: 2.0}, retention=retention, exports={"links": True})
    assert os.readlink(root / "last") == "iteration_00000005"  # noqa: PTH115  the text
    assert os.readlink(root / "best") == "iteration_00000002"  # noqa: PTH115
    assert [name for name in names(root) if name.startswith("iteration_")] == [
        "iteration_00000002",
        "iteration_00000004",
        "iteration_00000005",
    ]
    assert reshard.open(root).iteration == 5
    assert reshard.open(root / "best").keys() == reshard.open(root).keys()
    run(root, range(6, 7), {6: 0.5}, retention=retention, exports={"links": True})
    assert [os.readlink(root / name) for name in ("last", "best")] == ["iteration_00000006"] * 2  # noqa: PTH115
    # A link to the outside is replaced, not followed.
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    (root / "last").unlink()
    (root / "last").symlink_to(outside)
    run(root, range(7, 8), exports={"links": True})
    assert os.readlink(root / "last") == "iteration_00000007"  # noqa: PTH115
    assert (outside / "file").read_text() == "kept"
    (root / "last").unlink()
    (root / "last").mkdir()
    assert any(
        "the link `last` is not made" in line for line in run(root, range(8, 9), exports={"links": True}).warnings
    )
    with pytest.raises(ArgumentError, match="`links` names iteration folders"):
        Checkpointer(tmp_path / "x", exports={"links": True}, format="checkpoint1")
    with pytest.raises(StorageError):
        replace_link(outside / "file", "x")


def test_every_nth_save_is_written_as_a_model_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=6)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(tmp_path / "run", save_every=2, hf_every=2, signals=(), keep=2) as made:
        compiled: Any = torch.compile(model)
        made.resume(model=compiled, optimizer=optimizer)
        for step in range(1, 13):
            with torch.no_grad():
                model.transformer.wte.weight += 1
            made.step(step)
    assert names(tmp_path / "run_hf") == ["iteration_00000008", "iteration_00000012"]  # as many as of saves
    folder = tmp_path / "run_hf/iteration_00000012"
    assert {"config.json", "generation_config.json", "model.safetensors"} <= set(names(folder))
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    again = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for key, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    assert not [key for key in reshard.open(folder).keys() if "exp_avg" in key]  # noqa: SIM118


@pytest.mark.parametrize("format", ["checkpoint2", "checkpoint1"])
def test_the_last_healthy_save_stays_beside_exports(tmp_path: Path, format: Any) -> None:  # noqa: A002
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "config.json").write_text('{"model_type": "mine"}')
    root, model = tmp_path / "run", nn.Linear(2, 2)
    options: dict[str, Any] = {"hf_every": 1, "model_files": tmp_path / "files", "format": format}
    with Checkpointer(root, save_every=1, signals=(), keep=1, **options) as made:
        made.resume(model=model)
        for step in range(1, 7):
            if step == 3:
                with torch.no_grad():
                    model.weight[0, 1] = torch.nan
            made.step(step, loss=1.0)
    folder = root if format == "checkpoint2" else root / "rank_0"
    there = [name for name in names(folder) if name.startswith("iteration") or name.endswith(".safetensors")]
    ends = ("2", "6") if format == "checkpoint2" else ("-1_2.safetensors", "-1_6.safetensors")
    assert len(there) == 2
    assert all(map(str.endswith, there, ends)), there


def test_given_files_are_copied_and_a_failure_is_a_warning(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    (files / "config.json").write_text('{"model_type": "mine"}')
    (files / "tokenizer.json").write_text("{}")
    run(tmp_path / "run", range(1, 3), hf_every=1, model_files=files)
    folder = tmp_path / "run_hf/iteration_00000002"
    assert {"config.json", "tokenizer.json"} <= set(names(folder))
    report = run(tmp_path / "other", range(1, 2), hf_every=1, model_files=tmp_path / "absent")
    assert any("is not written as whole tensors" in line for line in report.warnings)
    with pytest.raises(ArgumentError, match="`model_files` belongs to `hf_every`"):
        Checkpointer(tmp_path / "x", model_files=files)
    with pytest.raises(ArgumentError, match="hf_every"):
        Checkpointer(tmp_path / "x", hf_every=0)


def test_the_config_beside_an_export_has_the_dtype_of_the_weights(tmp_path: Path, caplog: Any) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=8, dtype="float32")
    model = transformers.GPT2LMHeadModel(config).to(torch.bfloat16)
    with Checkpointer(tmp_path / "run", save_every=1, signals=(), hf_every=1) as made:
        made.resume(model=model)
        made.step(1)
    folder = tmp_path / "run_hf/iteration_00000001"
    assert transformers.AutoConfig.from_pretrained(folder).dtype == torch.bfloat16
    assert model.config.dtype == torch.float32, "the model of the run is as it was"
    assert not any("config.json" in text for text in caplog.messages)
    config.save_pretrained(tmp_path / "files")
    with Checkpointer(tmp_path / "other", save_every=1, signals=(), hf_every=1, model_files=tmp_path / "files") as made:
        made.resume(model=model)
        made.step(1)
    assert any("config.json has `dtype` `float32`, and the weights are BF16" in text for text in caplog.messages)


class Configured(nn.Module):
    """A model with a configuration, as those of transformers have."""

    class Config:
        """What describes it."""

        def to_json_string(self) -> str:
            return '{"model_type": "mine"}'

    def __init__(self) -> None:
        super().__init__()
        self.config = self.Config()
        self.layer = nn.Linear(3, 3)


@pytest.mark.slow
def test_ranks_export_together(tmp_path: Path) -> None:
    def work(group: TorchGroup) -> list[int]:
        torch.manual_seed(1)
        model: Any = fully_shard(Configured(), mesh=init_device_mesh("cpu", (2,)))
        called: list[int] = []
        options: dict[str, Any] = {
            "hf_every": 1,
            "exports": {"links": True, "after_publish": lambda one: called.append(one.iteration)},
        }
        with Checkpointer(tmp_path / "run", save_every=1, signals=(), timeout=30, **options) as made:
            made.resume(model=model)
            for step in (1, 2):
                made.step(step)
        assert bool(called) == (group.rank == 0)
        return called

    with Job(2, work) as job:
        assert job.values() == [[1, 2], []]
    torch.manual_seed(1)
    with reshard.open(tmp_path / "run_hf/iteration_00000002") as checkpoint:
        assert torch.equal(torch.from_numpy(checkpoint.read("layer.weight")), Configured().layer.weight)
    config = json.loads((tmp_path / "run_hf/iteration_00000002/config.json").read_text())
    assert config == {"architectures": ["Configured"], "model_type": "mine"}
    assert os.readlink(tmp_path / "run/last") == "iteration_00000002"  # noqa: PTH115
