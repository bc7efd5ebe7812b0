"""Universal folders that `convert` writes, loaded by the engine of DeepSpeed on two CPU ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.peers.launch import run_ranks
from tests.peers.required import required

import reshard

if TYPE_CHECKING:
    from pathlib import Path

SHAPES = {"embed.weight": (31, 10), "conv.weight": (5, 3, 3, 3), "conv.bias": (5,), "up.weight": (17, 10)}
SHAPES |= {"up.bias": (17,), "down.weight": (10, 7), "down.bias": (10,), "gate": (1,)}
STATE = ("exp_avg", "exp_avg_sq")
# source, stage, bf16, groups, only weights
JOBS = {
    "own to 1": ("own", 1, False, 2, False),
    "own to 2, bf16": ("own", 2, True, 1, False),
    "dcp to 3": ("dcp", 3, False, 1, False),
    "1 to 3": ("own to 1 universal", 3, True, 2, False),
    "weights to 1": ("weights", 1, False, 2, False),
    "weights to 3": ("weights", 3, False, 1, True),
}


def random_state(*, is_dcp: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights and optimizer state, in the names of this package or those of torch."""
    rng = np.random.default_rng(5)
    model = {name: rng.random(shape, np.float32) for name, shape in SHAPES.items()}
    model |= {"frozen.weight": rng.random((7, 17), np.float32), "count": np.array(7)}
    state: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        for slot in STATE:
            state[f"optimizer.state.{name}.{slot}" if is_dcp else f"{slot}.{name}"] = rng.random(shape, np.float32)
        state[f"optimizer.state.{name}.step" if is_dcp else f"step.{name}"] = np.float32(40)
    return model, state


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    required("deepspeed")
    folder = tmp_path_factory.mktemp("universal")
    reshard.save(folder / "source", 40, *random_state(), extra={"note": {"seen": [1, 2]}})
    model, state = random_state(is_dcp=True)
    reshard.save_file(model | state, folder / "source.safetensors")
    reshard.convert(folder / "source", folder / "own", to="deepspeed-universal")
    reshard.convert(folder / "source.safetensors", folder / "source dcp", to="dcp")
    reshard.convert(folder / "source dcp", folder / "dcp", to="deepspeed-universal", iteration=40)
    reshard.convert(folder / "source", folder / "weights", to="deepspeed-universal", part="model")
    keys = ("source", "stage", "bf16", "n_groups", "module_only")
    jobs = {name: dict(zip(keys, job, strict=True)) for name, job in JOBS.items()}
    later = jobs.pop("1 to 3")
    run_ranks("deepspeed_universal.py", folder, jobs, 2)
    reshard.convert(folder / "own to 1", folder / "own to 1 universal", to="deepspeed-universal")
    run_ranks("deepspeed_universal.py", folder, {"1 to 3": later}, 2)
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("job", JOBS)
def test_the_engine_loads_what_was_converted(job: str, trees: Path) -> None:
    torch = required("torch")
    source, _, _, n_groups, _ = JOBS[job]
    model, state = random_state()
    loaded = torch.load(trees / f"{job}.pt", weights_only=False)
    with reshard.open(trees / job) as saved:
        for name in SHAPES:
            assert loaded["weights"][name].numpy().tobytes() == model[name].tobytes(), name
            assert saved.read(f"{name}.fp32").tobytes() == model[name].tobytes(), name
            for slot in STATE if source != "weights" else ():
                assert saved.read(f"{name}.{slot}").tobytes() == state[f"{slot}.{name}"].tobytes(), (name, slot)
        if source != "weights":
            assert saved.extra()["optimizer_step"] == loaded["steps"] == 40
        if source == "own":
            assert saved.extra()["loaded"] == {"seen": [1, 2]}
    # The options of the groups are those of the run: a source that has none does not change them.
    assert loaded["rates"] == [(0.5, 0.01), (0.5, 0.0)][:n_groups]
