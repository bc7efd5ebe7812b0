"""Checkpoints that DeepSpeed writes here, on two CPU ranks, against its own `zero_to_fp32`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.peers.launch import run_ranks
from tests.peers.required import required

import reshard

TRAIN = Path(__file__).with_name("deepspeed_train.py")
# stage, options of ZeRO, bf16, groups
JOBS = {
    "stage 1": (1, {}, True, 2),
    "stage 2, other order": (2, {"round_robin_gradients": True}, True, 2),
    "stage 2, elastic": (2, {"elastic_checkpoint": True}, False, 1),
    "stage 3": (3, {}, True, 2),
    "stage 3, sub-groups": (3, {"sub_group_size": 60}, False, 1),
}


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    required("deepspeed")
    folder = tmp_path_factory.mktemp("deepspeed")
    run_ranks("deepspeed_train.py", folder, JOBS, 2)
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("job", JOBS)
def test_tensors_are_those_of_zero_to_fp32(job: str, trees: Path) -> None:
    stage = JOBS[job][0]
    converter = required("deepspeed.utils.zero_to_fp32")
    theirs = converter.get_fp32_state_dict_from_zero_checkpoint(str(trees / job))
    right = {name: tensor.detach().float().numpy() for name, tensor in theirs.items()}
    with reshard.open(trees / job) as found:
        names = {key.removesuffix(".fp32") for key in found.keys("model") if key != "seen"}
        # It leaves out frozen parameters of stage 1; of stage 3, tied names are in `extra`.
        missing = {"head.weight"} if stage == 3 else set()
        assert names == (set(right) | {"frozen.weight"}) - missing
        assert found.extra()["tied"] == {"head.weight": "embed.weight"}
        for name, tensor in right.items():
            key = f"{name}.fp32" if f"{name}.fp32" in found else name
            if key not in found or name == "head.weight":
                continue
            one = found.read(key)
            assert one.shape == tensor.shape, name
            assert (one.astype(np.float32) == tensor).all(), name
        for key in found:
            if f"{key}.fp32" in found:  # the weights of the module are the rounded weights of the optimizer
                one = found.read(key)
                assert one.tobytes() == found.read(f"{key}.fp32").astype(one.dtype).tobytes(), key
        assert found["embed.weight.exp_avg"].shape == (31, 10)
        assert found.iteration == found.extra()["optimizer_step"] == 3
    reshard.convert(trees / job, trees / f"{job} weights", to="huggingface")
    with reshard.open(trees / f"{job} weights") as weights:
        assert set(weights) == set(right) | {"frozen.weight"}
        if stage == 3:
            assert all((weights.read(name).astype(np.float32) == right[name]).all() for name in right)
