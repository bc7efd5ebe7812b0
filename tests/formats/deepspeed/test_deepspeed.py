"""Checkpoints of DeepSpeed: trees that DeepSpeed wrote, and smaller ones in which files contradict each other.

The expected tensors of the real trees were taken from the live engine. The others are written here in the structure of
DeepSpeed, from arrays that are divided by numpy.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import reshard
from reshard import _core
from reshard.errors import DamagedFileError, ReshardError
from reshard.torch import load_file

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = Path(__file__).parents[2] / "data" / "torch"
TREES = ["ds_zero1_bf16", "ds_zero2_fp32", "ds_zero3_bf16", "ds_zero1_optim_bf16"]
FOLDERS = [
    (tree, folder)
    for tree in TREES
    for folder in ("", "global_step2", "global_step2_universal")
    if (DATA / tree / "checkpoint" / folder).is_dir()
]

Files = dict[str, dict[str, Any]]
Arrays = dict[str, np.ndarray]

MODEL = {1: "mp_rank_00_model_states.pt", 3: "zero_pp_rank_0_mp_rank_00_model_states.pt"}


def optimizer_file(rank: int) -> str:
    return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def make(rng: np.random.Generator, shapes: dict[str, tuple[int, ...]]) -> Arrays:
    return {
        f"{name}.{slot}": rng.standard_normal(shape, np.float32)
        for name, shape in shapes.items()
        for slot in ("fp32", "exp_avg", "exp_avg_sq")
    }


def files_of(
    arrays: Arrays, groups: list[list[str]], stage: int, world: int, *, paddings: int = 0, sub_group: int = 10**9
) -> Files:
    """The files that DeepSpeed writes for parameters in these groups."""
    shape_of = {name: arrays[f"{name}.fp32"].shape for group in groups for name in group}
    common = {
        "buffer_names": ["scale"],
        "optimizer": None,
        "param_shapes": [{name: torch.Size(shape_of[name]) for name in group} for group in groups],
        "frozen_param_shapes": {"frozen": torch.Size((3, 5))} if stage == 3 else None,
        "shared_params": {"tied": groups[0][0]},
        "lr_scheduler": {"last_epoch": 4},
        "global_steps": 4,
        "skipped_steps": 0,
        "dp_world_size": world,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
        "note": "client",
    }
    frozen = torch.arange(15, dtype=torch.bfloat16)
    weights = {name: torch.from_numpy(arrays[f"{name}.fp32"].copy()).bfloat16() for name in shape_of}
    weights["tied"] = weights[groups[0][0]]
    files: Files = {}
    for rank in range(world if stage == 3 else 1):
        module = {name: torch.empty(0, dtype=torch.bfloat16) if stage == 3 else one for name, one in weights.items()}
        module |= {"scale": torch.ones(2), "frozen": torch.empty(0) if stage == 3 else frozen.reshape(3, 5)}
        part = -(-15 // world)
        fragment = torch.cat([frozen, torch.zeros(part * world - 15)])[rank * part : (rank + 1) * part]
        name = MODEL[stage].replace("rank_0_", f"rank_{rank}_")
        fragments = {"frozen": fragment.bfloat16().clone()} if stage == 3 else None
        files[name] = {**copy.deepcopy(common), "module": module, "frozen_param_fragments": fragments}
    for rank in range(world):
        flat: dict[str, list[np.ndarray]] = {}
        for slot in ("fp32", "exp_avg", "exp_avg_sq"):
            flat[slot] = []
            if stage == 3:
                parts = []
                for name in shape_of:
                    whole = arrays[f"{name}.{slot}"].reshape(-1)
                    n = -(-whole.size // world)
                    parts.append(np.pad(whole, (0, n * world - whole.size))[rank * n : (rank + 1) * n])
                line = np.concatenate(parts)
                flat[slot] = [line[i : i + sub_group] for i in range(0, max(line.size, 1), sub_group)]
                continue
            for group in groups:
                line = np.concatenate([np.pad(arrays[f"{name}.{slot}"].reshape(-1), (0, paddings)) for name in group])
                n = -(-line.size // (2 * world)) * 2
                own = np.pad(line, (0, n * world - line.size))[rank * n : (rank + 1) * n]
                flat[slot].append(own[: max(0, line.size - rank * n)] if slot == "fp32" else own)
        state = {
            i: {slot: torch.from_numpy(flat[slot][i].copy()) for slot in ("exp_avg", "exp_avg_sq")}
            | {"step": torch.tensor(4.0)}
            for i in range(len(flat["fp32"]))
        }
        weights_of_rank = [torch.from_numpy(one.copy()) for one in flat["fp32"]]
        inner = {"state": state, "param_groups": [{"lr": 0.1, "params": [i]} for i in range(len(groups))]}
        zero: dict[str, Any] = {"zero_stage": stage, "partition_count": world if stage == 3 else [world] * len(groups)}
        if stage == 3:
            zero |= {"fp32_flat_groups": weights_of_rank, "optimizer_state_dict": inner}
        else:
            zero |= {"single_partition_of_fp32_groups": weights_of_rank, "base_optimizer_state": inner}
            zero["param_alignment_paddings"] = [[paddings] * len(group) for group in groups]
        files[optimizer_file(rank)] = {"optimizer_state_dict": zero, "ds_config": {}, "ds_version": "0.19.8"}
    return files


def write(folder: Path, files: Files) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        torch.save(content, folder / name)
    return folder


def example(stage: int, world: int = 2) -> tuple[Arrays, Files]:
    arrays = make(np.random.default_rng(stage), {"a": (7, 3), "b": (5,), "c": (2, 3, 4)})
    return arrays, files_of(arrays, [["a", "c"], ["b"]], stage, world)


@pytest.mark.parametrize(("tree", "folder"), FOLDERS)
def test_a_checkpoint_has_the_tensors_and_values_of_the_live_engine(tree: str, folder: str) -> None:
    expected = DATA / tree / "expected" / "global_step2"
    with (
        reshard.open(expected / "expected.safetensors") as truth,
        reshard.open(DATA / tree / "checkpoint" / folder) as found,
    ):
        names = set(truth)
        if tree == "ds_zero3_bf16":  # stage 3 stores no weights of the module, except frozen parameters and buffers
            slots = (".fp32", ".exp_avg", ".exp_avg_sq")
            names = {name for name in names if name.endswith(slots)} | {"frozen.weight", "scale", "count"}
        injected = {f"{name}.fp32" for name in ("scale", "count", "frozen.weight", "head.weight")}
        assert names <= set(found) <= names | (injected if folder.endswith("universal") else set())
        for name in names:
            one, right = found.read(name), truth.read(name)
            assert (one.dtype, one.shape, one.tobytes()) == (right.dtype, right.shape, right.tobytes()), name
        assert found.iteration == 2
        values = json.loads((expected / "expected.json").read_text())
        extra = found.extra()
        for key in ("consumed_samples", "global_steps", "skipped_steps", "tied", "ds_version", "optimizer_step"):
            assert extra[key] == values[key], key
        assert values["lr_scheduler"].items() <= extra["lr_scheduler"].items()
        if tree != "ds_zero1_optim_bf16":  # BF16_Optimizer records no stage
            assert extra["zero_stage"] == values["zero_stage"]
        assert [group["weight_decay"] for group in extra["optimizer"]["param_groups"]] == [0.1, 0.0]


@pytest.mark.parametrize("seed", range(12))
def test_ranges_of_flat_tensors_are_read_and_sharded_as_numpy_does(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    stage, world = (1, 3)[seed % 2], int(rng.integers(1, 6))
    shapes = {f"p{i}": tuple(map(int, rng.integers(1, 9, rng.integers(0, 5)))) for i in range(6)}
    shapes["cut"] = (8, 6)
    arrays = make(rng, shapes)
    groups = [list(shapes)[:3], list(shapes)[3:]]
    sub_group, paddings = int(rng.integers(20, 200)), int(rng.integers(0, 4))
    files = files_of(arrays, groups, stage, world, paddings=paddings, sub_group=sub_group)
    layout = {"mesh": {"tp": 2}, "rules": [{"match": "cut*", "cut": [None, "tp"]}, {"match": "*"}]}
    with reshard.open(write(tmp_path / "save", files)) as found:
        for key, right in arrays.items():
            assert (found.read(key) == right).all(), key
            index = tuple(slice(*sorted(map(int, rng.integers(0, n + 1, 2)))) for n in right.shape)
            assert (found.read(key, index) == right[index]).all(), (key, index)
        for rank in range(2):
            loaded = found.load(layout, rank=rank)
            assert all((loaded[key] == right).all() for key, right in arrays.items() if not key.startswith("cut"))
            assert (loaded["cut.exp_avg"] == arrays["cut.exp_avg"][:, 3 * rank : 3 * rank + 3]).all()
        assert (found.read("frozen").astype(np.float32) == np.arange(15).reshape(3, 5)).all()


@pytest.mark.parametrize("method", ["map", "read"])
@pytest.mark.parametrize("stage", [1, 3])
def test_the_model_of_a_checkpoint_is_converted_under_the_names_of_the_module(
    stage: int, method: Any, tmp_path: Path
) -> None:
    arrays, files = example(stage)
    folder = write(tmp_path / "global_step4", files)
    reshard.convert(folder, tmp_path / "weights", to="huggingface")
    reshard.convert(folder, tmp_path / "all", to="checkpoint2")
    renamed = {"rename": {"": "model."}, "drop": ["b"]}
    reshard.convert(folder, tmp_path / "renamed", to="huggingface", select=renamed)
    with reshard.open(tmp_path / "weights", method=method) as weights, reshard.open(folder, method=method) as source:
        assert set(weights) == {"a", "b", "c", "tied", "scale", "frozen"}
        for name in ("a", "b", "c", "tied"):
            right = arrays[f"{'a' if name == 'tied' else name}.fp32"]
            found = weights.read(name)
            assert (found == right.astype(found.dtype)).all()
            assert found.dtype == np.float32 or stage == 1
        assert source.keys("optimizer") == [
            key for key in source if key.endswith(("exp_avg", "exp_avg_sq")) or (stage == 1 and key.endswith("fp32"))
        ]
    with reshard.open(tmp_path / "all") as whole:
        assert all((whole.read(key) == right).all() for key, right in arrays.items())
        assert whole.iteration == 4
    with reshard.open(tmp_path / "renamed") as weights:
        assert set(weights) == {"model.a", "model.c", "model.tied", "model.scale", "model.frozen"}
    assert reshard.diff(folder, tmp_path / "all").equal
    assert reshard.verify(folder).ok


@pytest.mark.parametrize("stage", [1, 3])
def test_a_conversion_to_fp32_has_the_weights_of_the_optimizer(stage: int, tmp_path: Path) -> None:
    arrays, files = example(stage)
    folder = write(tmp_path / "global_step4", files)
    reshard.convert(folder, tmp_path / "weights", to="huggingface", dtype="float32")
    with reshard.open(tmp_path / "weights") as weights, reshard.open(folder) as source:
        assert set(weights) == {"a", "b", "c", "tied", "scale", "frozen"}
        for name, master in {"a": "a", "b": "b", "c": "c", "tied": "a"}.items():
            assert weights.read(name).tobytes() == arrays[f"{master}.fp32"].tobytes()
        assert (weights.read("scale") == source.read("scale").astype(np.float32)).all()


@pytest.mark.parametrize("tree", ["ds_zero1_bf16", "ds_zero2_fp32", "ds_zero3_bf16"])
def test_a_conversion_to_fp32_is_that_of_deepspeed(tree: str, tmp_path: Path) -> None:
    script = pytest.importorskip("deepspeed.utils.zero_to_fp32")
    right = script.get_fp32_state_dict_from_zero_checkpoint(str(DATA / tree / "checkpoint"))
    reshard.convert(DATA / tree / "checkpoint", tmp_path / "w.safetensors", part="model", dtype="float32")
    found = load_file(tmp_path / "w.safetensors")
    assert right.keys() <= found.keys()
    assert [name for name in right if not torch.equal(found[name], right[name].float())] == []


def _other_step(files: Files) -> None:
    for state in files[optimizer_file(1)]["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        state["step"] = torch.tensor(6.0)


def _zero(files: Files, rank: int = 1) -> dict[str, Any]:
    state: dict[str, Any] = files[optimizer_file(rank)]["optimizer_state_dict"]
    return state


def _moved(files: Files) -> None:
    first, second = (_zero(files, rank)["single_partition_of_fp32_groups"] for rank in range(2))
    first[0], second[0] = first[0][:-6].clone(), torch.cat([first[0][-6:], second[0]])


def _shorter(tensors: Any, key: Any) -> None:
    tensors[key] = tensors[key][:-6].clone()


MODEL_1 = MODEL[3].replace("rank_0_", "rank_1_")
DAMAGES: dict[str, tuple[int, Callable[[Files], object], str]] = {
    "an optimizer file of another step": (1, _other_step, r"rank_1.*at step \[6.0\].*at step \[4.0\]"),
    "a model file of another step": (
        3,
        lambda f: f[MODEL_1].update(global_steps=6),
        "`global_steps` differs.*: `4` and `6`",
    ),
    "another version": (1, lambda f: f[optimizer_file(1)].update(ds_version="0.9"), "`ds_version` differs"),
    "a version of the model": (1, lambda f: f[MODEL[1]].update(ds_version="0.9"), "rank_0.*`ds_version` differs"),
    "other shapes": (3, lambda f: f[MODEL_1]["param_shapes"][0].update(a=torch.Size((3, 7))), "`param_shapes` differs"),
    "a missing rank": (1, lambda f: f.pop(optimizer_file(1)), "over 2 ranks, and `bf16_zero_pp_rank_1.*is missing"),
    "a missing rank of the model": (
        3,
        lambda f: f.pop(MODEL_1),
        "zero_pp_rank_1_mp_rank_00_model_states.pt` is missing",
    ),
    "a missing optimizer": (3, lambda f: [f.pop(optimizer_file(r)) for r in (0, 1)], "no files `\\*_optim_states.pt`"),
    "no model": (1, lambda f: f.pop(MODEL[1]), "no file `\\*_model_states.pt`"),
    "a rank too many": (1, lambda f: f.update({optimizer_file(2): f[optimizer_file(1)]}), "one of rank 2"),
    "a rank twice": (1, lambda f: f.update({optimizer_file(1)[5:]: f[optimizer_file(1)]}), "both of rank 1"),
    "another partition": (1, lambda f: _zero(f).update(partition_count=[3, 3]), "`partition_count` differs"),
    "another world": (1, lambda f: f[MODEL[1]].update(dp_world_size=4), "over 2 ranks, but .* was saved by 4"),
    "another stage": (
        1,
        lambda f: [_zero(f, r).update(zero_stage=3) for r in (0, 1)],
        "fp32 weights of the groups|stage",
    ),
    "a short group": (
        1,
        lambda f: _shorter(_zero(f, 0)["single_partition_of_fp32_groups"], 0),
        "do not match|elements on all",
    ),
    "another boundary": (1, _moved, "elements of fp32 and .* do not match"),
    "a short sub-group": (3, lambda f: _shorter(_zero(f)["fp32_flat_groups"], 0), "elements of `fp32`; the part"),
    "short state": (1, lambda f: _shorter(_zero(f)["base_optimizer_state"]["state"][0], "exp_avg"), "exp_avg"),
    "no state on a rank": (
        3,
        lambda f: _zero(f)["optimizer_state_dict"]["state"][0].pop("exp_avg"),
        "has other tensors",
    ),
    "another dtype": (
        1,
        lambda f: _zero(f)["single_partition_of_fp32_groups"].__setitem__(1, torch.zeros(1).half()),
        "F16",
    ),
    "another shape": (1, lambda f: f[MODEL[1]]["module"].update(a=torch.zeros(3, 7)), r"has the shape \(3, 7\)"),
    "a short fragment": (3, lambda f: _shorter(f[MODEL_1]["frozen_param_fragments"], "frozen"), "with 8 elements"),
    "other options": (1, lambda f: _zero(f)["base_optimizer_state"]["param_groups"][0].update(lr=3), "`param_groups`"),
    "a huge partition": (
        3,
        lambda f: [_zero(f, r).update(partition_count=10**18) for r in (0, 1)],
        "rank_2.*is missing",
    ),
    "no shape": (1, lambda f: f[MODEL[1]].update(param_shapes=[{"a": "x", "c": "y"}, {"b": "z"}]), "the shape of a"),
    "model-parallel ranks": (1, lambda f: f.update({"mp_rank_01_model_states.pt": f[MODEL[1]]}), "2 model-parallel"),
    "one model-parallel rank": (1, lambda f: f[MODEL[1]].update(mp_world_size=2), "one of 2 model-parallel ranks"),
    "another place": (
        1,
        lambda f: _zero(f).update(param_slice_mappings=[{"c": Namespace(numel=9, start=1)}, {}]),
        r"`c` lies at .*'start': 1.* give \{'start': 0",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_that_do_not_belong_together_are_refused(damage: str, tmp_path: Path) -> None:
    stage, change, message = DAMAGES[damage]
    _, files = example(stage)
    change(files)
    with pytest.raises(ReshardError, match=message):
        reshard.open(write(tmp_path / "global_step4", files))


@pytest.mark.parametrize(
    "change",
    [
        lambda f, long: [_zero(f, r).update(partition_count=long) for r in (0, 1)],
        lambda f, long: [_zero(f, r).update(param_alignment_paddings=[[long]]) for r in (0, 1)],
        lambda f, long: f[MODEL[1]].update(param_shapes=[long]),
        lambda f, long: f[MODEL[1]].update(param_shapes=[{"a": long}]),
        lambda f, long: f[MODEL[1]].update(ds_version=long),
    ],
    ids=["partition_count", "paddings", "names", "shape", "version"],
)
def test_a_long_value_is_shortened_in_the_message(change: Callable[[Files, str], object], tmp_path: Path) -> None:
    _, files = example(1)
    change(files, "x" * 10_000)
    with pytest.raises(ReshardError, match=r"x\.\.\.") as caught:
        reshard.open(write(tmp_path / "global_step4", files))
    assert len(str(caught.value)) < 2000


def test_a_model_of_another_step_is_refused_where_its_weights_differ(tmp_path: Path) -> None:
    _, files = example(1)
    files[MODEL[1]]["global_steps"] = 6
    with reshard.open(write(tmp_path / "same", files)) as found:  # an optimizer that was started anew
        assert found.iteration == 6
    files[MODEL[1]]["module"]["a"] = files[MODEL[1]]["module"]["a"] + 1
    with pytest.raises(ReshardError, match=r"step 4, the module in .* at step 6, and the weights of `a` differ"):
        reshard.open(write(tmp_path / "other", files))
    _, files = example(3)
    for name in (MODEL[3], MODEL_1):
        files[name]["global_steps"] = 2
    with pytest.raises(ReshardError, match="different saves"):
        reshard.open(write(tmp_path / "earlier", files))


def test_of_a_root_the_save_that_latest_names_is_opened(tmp_path: Path) -> None:
    root = tmp_path / "run"
    _, files = example(1)
    write(root / "my best tag", files)
    write(root / "global_step4", files)
    write(root / "global_step9", {name: one for name, one in files.items() if "rank_1" not in name})
    (root / "latest").write_text("my best tag")
    with reshard.open(root) as found:
        assert (found.path.name, found.skipped) == ("my best tag", ())
    (root / "latest").write_text("gone")
    with reshard.open(root) as found:
        assert found.path.name == "global_step4"
        assert [tag for tag, _ in found.skipped] == ["gone", "global_step9"]
        assert "`latest` names it" in found.skipped[0][1]
        assert "is missing" in found.skipped[1][1]
    (root / "latest").unlink()
    with reshard.open(root) as found:
        assert [tag for tag, _ in found.skipped] == ["global_step9"]
    for name in ("global_step4", "my best tag"):
        shutil.rmtree(root / name)
    with pytest.raises(DamagedFileError, match="no complete checkpoint"):
        reshard.open(root)
    (root / "latest").write_text("global_step7")
    shutil.rmtree(root / "global_step9")
    with pytest.raises(DamagedFileError, match="no such folder"):
        reshard.open(root)


def test_a_universal_folder_without_a_file_is_refused(tmp_path: Path) -> None:
    for tree, file, message in (
        ("ds_zero3_bf16", "zero/gate/fp32.pt", "is missing"),
        ("ds_zero3_bf16", "zero_pp_rank_1_mp_rank_00_model_states.pt", "is missing"),
        ("ds_zero1_bf16", "mp_rank_00_model_states.pt", "was not finished"),
    ):
        folder = tmp_path / tree / file.replace("/", "_")
        shutil.copytree(DATA / tree / "checkpoint" / "global_step2_universal", folder)
        (folder / file).unlink()
        with pytest.raises(ReshardError, match=message):
            reshard.open(folder)
    folder = tmp_path / "other"
    shutil.copytree(DATA / "ds_zero3_bf16" / "checkpoint" / "global_step2_universal", folder)
    shutil.copy(folder / "zero/up.bias/fp32.pt", folder / "zero/gate/fp32.pt")
    with pytest.raises(ReshardError, match=r"has the shape \(19,\), recorded is \(3,\)"):
        reshard.open(folder)


def test_the_file_of_each_rank_is_compared_or_read(tmp_path: Path) -> None:
    arrays, files = example(3, 21)

    def model(rank: int) -> str:
        return MODEL[3].replace("rank_0_", f"rank_{rank}_")

    for rank in (0, 3, 7, 19):  # as a client state with random numbers
        files[model(rank)]["note"] = f"of rank {rank}"
    files[model(5)]["frozen_param_fragments"]["frozen"] += 1
    folder = write(tmp_path / "save", files)
    contents = _core.read_torch_contents([str(folder / model(rank)) for rank in range(21)])
    assert len({id(content) for content in contents}) == 5, "equal files are decoded once"
    with reshard.open(folder) as found:
        notes = {rank: found.extra(rank=rank)["note"] for rank in range(21)}
        assert {rank: note for rank, note in notes.items() if note != "client"} == {
            rank: f"of rank {rank}" for rank in (0, 3, 7, 19)
        }
        assert all((found.read(key) == right).all() for key, right in arrays.items())
        frozen = np.arange(15) + (np.arange(15) == 5)
        assert (found.read("frozen").astype(np.float32) == frozen.reshape(3, 5)).all()
    changes: list[tuple[Callable[[dict[str, Any]], object], str]] = [
        (lambda f: f.update(global_steps=5), "`global_steps` differs.*: `4` and `5`"),
        (lambda f: f["param_shapes"][0].update(a=torch.Size((3, 7))), "`param_shapes` differs"),
        (lambda f: _shorter(f["frozen_param_fragments"], "frozen"), "with 1 element,.* found .*0,"),
        (lambda f: f["frozen_param_fragments"].clear(), "with 1 element,.* found None"),
        (lambda f: f["shared_params"].update(tied="b"), "`tied` is tied to another"),
    ]
    for number, (change, message) in enumerate(changes):
        for rank in (1, 2, 20):
            damaged = copy.deepcopy(files)
            change(damaged[model(rank)])
            with pytest.raises(ReshardError, match=f"zero_pp_rank_{rank}_mp_rank_00_model_states.*{message}"):
                reshard.open(write(tmp_path / f"damaged{number}_{rank}", damaged))
    for rank in (1, 20):
        damaged = copy.deepcopy(files)
        zero = _zero(damaged, rank)
        zero["fp32_flat_groups"] = [
            one for line in zero["fp32_flat_groups"] for one in (line[:1].clone(), line[1:].clone())
        ]
        for name in ("exp_avg", "exp_avg_sq"):
            state = zero["optimizer_state_dict"]["state"]
            state.setdefault(1, {})[name] = state[0][name]
        with pytest.raises(ReshardError, match=f"rank_{rank}_mp_rank_00_optim.*group 1 has other tensors"):
            reshard.open(write(tmp_path / f"groups{rank}", damaged))
        for key, value in (("fp32_flat_groups", torch.zeros(3).half()), ("fp32_flat_groups", torch.zeros(9))):
            damaged = copy.deepcopy(files)
            _zero(damaged, rank)[key][0] = value
            with pytest.raises(ReshardError, match=f"rank_{rank}_mp_rank_00_optim.*(F16, others are F32|9 elements)"):
                reshard.open(write(tmp_path / f"{key}{rank}{value.dtype}", damaged))


def test_sub_groups_that_ranks_divide_differently_are_refused(tmp_path: Path) -> None:
    arrays = make(np.random.default_rng(0), {"w": (64,), "v": (10,)})
    files, others = (files_of(arrays, [["w", "v"]], 3, 2, sub_group=n) for n in (20, 21))
    files[optimizer_file(1)] = others[optimizer_file(1)]
    with pytest.raises(ReshardError, match=r"rank_1.*\[21, 16\] elements of `fp32`, those of .*rank_0.* \[20, 17\]"):
        reshard.open(write(tmp_path / "save", files))


def test_a_parameter_is_few_boxes_of_each_rank(tmp_path: Path) -> None:
    arrays = make(np.random.default_rng(0), {"w": (64, 8, 9, 5)})
    files = files_of(arrays, [["w"]], 3, 7)
    with reshard.open(write(tmp_path / "save", files)) as found:
        assert len(found["w.fp32"].shards) <= 7 * 7
        assert sum(math.prod(shard.shape) for shard in found["w.fp32"].shards) == arrays["w.fp32"].size
