"""Random models with quantised weights in runs: starts, retention and exports keep all parts of a weight together."""

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from tests.helpers.quantised_samples import CONFIGS, Array, weight

import reshard
from reshard.errors import MismatchError

torch = pytest.importorskip("torch")
# The modules of bitsandbytes make the names of 4 bits themselves: no buffer can have them.
KINDS = [kind for kind in CONFIGS if kind != "bnb-4bit"]


def model_arrays(seed: int) -> dict[str, Array]:
    """The tensors of a random model."""
    draw, rng = Random(seed), np.random.default_rng(seed)
    arrays: dict[str, Array] = {"norm.weight": np.ones(8, np.float32)}
    for i in range(draw.randint(1, 3)):
        arrays |= weight(draw.choice(KINDS), f"m{i}.{draw.choice('qk')}", rng, 128, draw.choice((128, 256)))
    return arrays


def module_of(stored: dict[str, Any]) -> Any:
    """A module with these buffers."""
    model = torch.nn.Module()
    for key, tensor in stored.items():
        *path, last = key.split(".")
        owner = model
        for name in path:
            if name not in dict(owner.named_children()):
                owner.add_module(name, torch.nn.Module())
            owner = owner.get_submodule(name)
        owner.register_buffer(last, tensor.clone())
    return model


def tensors_of(path: Path) -> dict[str, Any]:
    """The stored tensors of a checkpoint for torch."""
    from reshard.torch import as_tensor

    with reshard.open(path) as checkpoint:
        return {key: as_tensor(checkpoint.read(key)) for key in checkpoint}


def raw(tensor: Any) -> bytes:
    found: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return found


def check_whole(path: Path, arrays: dict[str, Array], weights: set[str]) -> None:
    """All parts of all weights are in a checkpoint, with their bytes."""
    with reshard.open(path) as checkpoint:
        assert set(checkpoint.quantised()) == weights, path
        for one in checkpoint.quantised().values():
            for key in one.parts.values():
                assert checkpoint.read(key).tobytes() == arrays[key].tobytes(), (path, key)


@pytest.mark.parametrize("seed", range(30))
def test_a_start_takes_all_parts_or_none(seed: int, tmp_path: Path) -> None:
    from reshard.torch import Checkpointer

    arrays, draw = model_arrays(seed), Random(seed)
    reshard.save_file(arrays, tmp_path / "m.safetensors")
    with reshard.open(tmp_path / "m.safetensors") as checkpoint:
        weights = checkpoint.quantised()
    left_out = {key for key in arrays if draw.random() < 0.2}
    for one in weights.values():
        if draw.random() < 0.5:
            left_out -= set(one.parts.values())  # else hardly any model is whole
    stored = {key: tensor for key, tensor in tensors_of(tmp_path / "m.safetensors").items() if key not in left_out}
    model = module_of({key: torch.zeros_like(tensor) for key, tensor in stored.items()})
    parts = [set(one.parts.values()) for one in weights.values()]
    is_apart = any(keys & left_out and keys - left_out for keys in parts)
    start: Any = {"path": tmp_path / "m.safetensors"}
    with Checkpointer(tmp_path / "run", signals=()) as checkpointer:
        if is_apart:
            with pytest.raises(MismatchError, match="without"):
                checkpointer.resume(model=model, init_from=start, strict={"unexpected": "skip"})
            assert all(not raw(tensor).strip(b"\0") for tensor in model.state_dict().values())
            return
        checkpointer.resume(model=model, init_from=start, strict={"unexpected": "skip"})
    assert {key: raw(tensor) for key, tensor in model.state_dict().items()} == {
        key: raw(tensor) for key, tensor in stored.items()
    }


@pytest.mark.parametrize("seed", range(8))
def test_saves_that_stay_and_exports_are_whole(seed: int, tmp_path: Path) -> None:
    from reshard.torch import Checkpointer

    arrays, draw = model_arrays(seed), Random(seed)
    reshard.save_file(arrays, tmp_path / "m.safetensors")
    with reshard.open(tmp_path / "m.safetensors") as checkpoint:
        weights = set(checkpoint.quantised())
    model = module_of(tensors_of(tmp_path / "m.safetensors"))
    root, keep = tmp_path / "run", draw.randint(1, 3)
    exports: Any = {"integrated": True, "links": True}
    retention: Any = {"keep": keep, "keep_every": draw.choice((None, 2)), "best": draw.choice((None, ("loss", 1)))}
    options: Any = {"retention": retention, "exports": exports, "hf_every": draw.choice((1, 2))}
    with Checkpointer(root, save_every=1, signals=(), **options) as checkpointer:
        checkpointer.resume(model=model)
        for step in range(1, 6):
            checkpointer.step(step, loss=abs(step - 1))
    saves = sorted(path for path in root.glob("iteration_*") if path.is_dir())
    assert keep <= len(saves) <= keep + 3
    published = sorted(path for path in (tmp_path / "run_hf").glob("iteration_*") if path.is_dir())
    assert published
    integrated = sorted(path for path in (tmp_path / "run_integrated").glob("iteration_*") if path.is_dir())
    assert integrated
    for path in (*saves, *integrated, *published, root / "last"):
        check_whole(path, arrays, weights)
    # Parts of a weight can lie in different files.
    size = draw.choice((None, 20_000, 60_000))
    reshard.convert(root, tmp_path / "model", to="huggingface", files={"max_shard_size": size} if size else None)
    check_whole(tmp_path / "model", arrays, weights)
