"""The four ways in which the original's documents load weights, each one call: `reshard.load(config=...)`.

Whole weights or rank folders; as they are, or cut for the run that starts.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.helpers.threads import in_threads

import reshard
from reshard.config import Config
from reshard.errors import ConfigError, ReshardError

if TYPE_CHECKING:
    from collections.abc import Mapping

SAMPLES = Path(__file__).parents[1] / "data" / "mindspore"
STRATEGY = SAMPLES / "strategy"
PARALLEL = {"data_parallel": 1, "model_parallel": 2, "pipeline_stage": 2}


def equal(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> bool:
    return found.keys() == expected.keys() and all(
        found[key].tobytes() == expected[key].tobytes() and found[key].shape == expected[key].shape for key in expected
    )


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    """A llama of two layers, as Hugging Face has it."""
    folder = tmp_path / "qwen2_7b"
    folder.mkdir()
    config = {
        "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "hidden_size": 8, "intermediate_size": 12, "vocab_size": 10, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (10, 8), "model.norm.weight": (8,), "lm_head.weight": (10, 8)}
    for layer in range(2):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.self_attn.{one}_proj.weight": (8 if one in "qo" else 4, 8) for one in "qkvo"}
        shapes |= {f"{name}.mlp.{one}_proj.weight": (12, 8) for one in ("gate", "up")}
        shapes |= {f"{name}.mlp.down_proj.weight": (8, 12), f"{name}.input_layernorm.weight": (8,)}
        shapes |= {f"{name}.post_attention_layernorm.weight": (8,)}
    rng = np.random.default_rng(0)
    weights = {key: rng.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}
    reshard.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def words(**said: Any) -> dict[str, Any]:
    return {"load_ckpt_format": "safetensors", **said}


def test_1_whole_weights_on_one_device(hf: Path) -> None:
    config = words(load_checkpoint=str(hf), auto_trans_ckpt=False, use_parallel=False, parallel_config=PARALLEL)
    got = reshard.load(config={**config, "pretrained_model_dir": str(hf)})
    assert equal(got.state, load_file(hf / "model.safetensors"))
    assert got.decision.restored == ("weights",)


def test_2_whole_weights_over_several_devices(hf: Path) -> None:
    config = words(load_checkpoint=str(hf), auto_trans_ckpt=True, use_parallel=True, parallel_config=PARALLEL)
    config["pretrained_model_dir"] = str(hf)
    expected = reshard.ModelLayout.preset(hf, tp=2, pp=2)
    with reshard.open(hf) as checkpoint:
        for rank in range(4):
            got = reshard.load(config=config, rank=rank).state
            assert equal(got, checkpoint.load(expected, rank))
    assert got["model.layers.1.mlp.down_proj.weight"].shape == (8, 6)
    assert "model.layers.0.mlp.down_proj.weight" not in got
    with pytest.raises(ConfigError, match="4 ranks, and this is one of 1"):
        reshard.load(config=config)
    given = reshard.load(config=config, layout=reshard.ModelLayout.replicated()).state  # who says a layout knows better
    assert equal(given, load_file(hf / "model.safetensors"))


def test_2_whole_weights_of_the_original_by_the_strategy_of_the_run() -> None:
    config = words(load_checkpoint=str(SAMPLES / "full_ms"), auto_trans_ckpt=True)
    for rank in (0, 5):
        got = reshard.load(config=config, layout=STRATEGY / "dst_strategy", rank=rank).state
        expected = load_file(STRATEGY / "expected_dst_slices" / f"rank_{rank}" / "net.safetensors")
        assert equal({key: got[key] for key in expected}, expected)


def test_3_rank_folders_as_they_are() -> None:
    config = words(load_checkpoint=str(STRATEGY / "src_rank_slices"), auto_trans_ckpt=False)
    got = reshard.load(config=config, rank=3).state
    (own,) = (STRATEGY / "src_rank_slices" / "rank_3").glob("*.safetensors")
    weights = ("embed.weight", "l0.norm.weight", "l0.proj.weight", "l0.qkv.weight")
    assert equal(got, {key: load_file(own)[key] for key in weights})


@pytest.mark.parametrize("is_carried", [False, True])
def test_4_rank_folders_cut_otherwise(*, is_carried: bool, tmp_path: Path) -> None:
    source, strategy = STRATEGY / "src_rank_slices", STRATEGY / "src_strategy"
    if is_carried:  # a host that does not see the disk of the strategies has been given a copy
        strategy = Path(shutil.copytree(strategy, tmp_path / "carried"))
    config = words(load_checkpoint=str(source), auto_trans_ckpt=True, src_strategy_path_or_dir=str(strategy))
    config["resume_training"] = True  # with the state of the optimizer
    for rank in (0, 7):
        got = reshard.load(config=config, layout=STRATEGY / "dst_strategy", rank=rank).state
        expected = load_file(STRATEGY / "expected_dst_slices" / f"rank_{rank}" / "net.safetensors")
        assert equal({key: got[key] for key in expected}, expected)


def test_a_rank_that_cannot_read_the_configuration_tells_the_others(hf: Path, tmp_path: Path) -> None:
    config = tmp_path / "train.yaml"
    config.write_text(json.dumps({"load_checkpoint": str(hf), "pretrained_model_dir": str(hf), "use_parallel": True}))

    def work(group: Any) -> Any:
        return reshard.load(config=config if group.rank == 0 else tmp_path / "elsewhere.yaml", group=group, timeout=20)

    for outcome in in_threads(2, work):
        assert isinstance(outcome, ReshardError)
        assert "elsewhere.yaml" in str(outcome)


def test_the_folder_of_the_model_is_loaded_where_nothing_else_is(hf: Path) -> None:
    got = reshard.load(config={"pretrained_model_dir": str(hf)})
    assert equal(got.state, load_file(hf / "model.safetensors"))
    assert reshard.load(config={"pretrained_model_dir": str(hf), "resume_training": True}).decision.fresh
    (hf / "model.safetensors").unlink()  # a config alone: a model that is trained from the beginning
    assert reshard.load(config={"pretrained_model_dir": str(hf)}).decision.fresh


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ({"data_parallel": 2, "expert_parallel": 3}, "3 does not divide data_parallel, 2"),
        ({"model_parallel": 0}, "model_parallel: expected an integer of at least 1"),
        ({"model_paralel": 2}, "did you mean `model_parallel`"),
    ],
)
def test_meshes_that_cannot_be(said: dict[str, int], complaint: str) -> None:
    with pytest.raises(ReshardError, match=complaint):
        Config.from_mapping({"parallel_config": said})


def test_the_mesh_of_a_run() -> None:
    said = {"data_parallel": 8, "expert_parallel": 4, "context_parallel": 2, "model_parallel": 2, "pipeline_stage": 3}
    assert Config.from_mapping({"parallel_config": said, "use_parallel": True}).mesh == {
        "tp": 2, "pp": 3, "ep": 4, "dp": 4
    }  # fmt: skip
    assert set(Config.from_mapping({"parallel_config": said}).mesh.values()) == {1}
