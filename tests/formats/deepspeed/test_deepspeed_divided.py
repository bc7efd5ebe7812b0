"""Saves of DeepSpeed with a file for each expert or for each layer of a pipeline, as its engine wrote them."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers import deepspeed_files
from torch import nn

import reshard
from reshard.errors import CheckpointNotFoundError, DamagedFileError, ReshardError, UnsupportedError
from reshard.torch import as_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = Path(__file__).parents[2] / "data" / "torch"
EXPERTS, PIPELINE = DATA / "ds_experts", DATA / "ds_pipeline"
EXPERT = "layer_0_expert_1_mp_rank_00_model_states.pt"


@pytest.mark.parametrize("tree", [EXPERTS, PIPELINE], ids=lambda tree: tree.name)
def test_the_weights_are_those_of_the_module(tree: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = load_file(tree / "truth.safetensors")
    for path in (tree, tree / "t"):  # the root, by `latest`
        with caplog.at_level(logging.WARNING), reshard.open(path) as checkpoint:
            assert (checkpoint.format, set(checkpoint.keys("model"))) == ("deepspeed", set(expected))
            for key, tensor in expected.items():
                assert torch.equal(as_tensor(checkpoint.read(key)), tensor), key
    assert not caplog.text
    reshard.convert(tree, tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_slices_and_layouts() -> None:
    key = "moe.deepspeed_moe.experts.deepspeed_experts.2.0.weight"
    whole = load_file(EXPERTS / "truth.safetensors")[key]
    layout = {"mesh": {"tp": 2}, "rules": [{"match": "*experts.*.0.weight", "cut": ["tp"]}, {"match": "*"}]}
    with reshard.open(EXPERTS) as checkpoint:
        assert torch.equal(as_tensor(checkpoint.read(key, (slice(1, 3), slice(2)))), whole[1:3, :2])
        assert torch.equal(as_tensor(checkpoint.load(layout, rank=1)[key]), whole[3:])


def changed(tmp_path: Path, tree: Path) -> Path:
    shutil.copytree(tree / "t", tmp_path / "t")
    return tmp_path / "t"


def refused(folder: Path, message: str, kind: type[ReshardError] = DamagedFileError) -> None:
    with pytest.raises(kind, match=message) as caught:
        reshard.open(folder)
    assert str(caught.value.path).startswith(str(folder))


@pytest.mark.parametrize("expert", [0, 1, 2])
def test_a_missing_expert(tmp_path: Path, expert: int) -> None:
    folder = changed(tmp_path, EXPERTS)
    (folder / f"layer_0_expert_{expert}_mp_rank_00_model_states.pt").unlink()
    refused(folder, f"expected the file of expert {expert}, `layer_0_expert_{expert}_mp_rank_00_model_states.pt`")


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_a_missing_layer(tmp_path: Path, layer: int) -> None:
    folder = changed(tmp_path, PIPELINE)
    (folder / f"layer_{layer:02}-model_states.pt").unlink()
    file = rf"`layer_0{layer}-model_states\.pt`"
    refused(
        folder, f"its stages have `{layer}.weight`, `{layer}.bias`, and no file of a layer holds them: expected {file}"
    )


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    folder = changed(tmp_path, EXPERTS)
    content = (folder / EXPERT).read_bytes()
    shutil.copy(folder / "layer_0_expert_0_mp_rank_00_model_states.pt", folder / EXPERT)
    refused(folder, r"experts\.0\.0\.weight` is no tensor of expert 1")
    (folder / EXPERT).write_bytes(content[:100])
    refused(folder, "model_states")
    (folder / EXPERT).write_bytes(content)
    (folder / "layer_0_expert_3_mp_rank_00_model_states.pt").write_bytes(content)
    refused(folder, r"is no tensor of expert 3")
    (folder / "layer_0_expert_3_mp_rank_00_model_states.pt").unlink()
    (folder / "layer_1_expert_1_mp_rank_00_model_states.pt").write_bytes(content)
    refused(folder, r"experts\.1\.0\.weight` is in `layer_0_expert_1")
    (folder / "layer_1_expert_1_mp_rank_00_model_states.pt").unlink()
    (folder / "mp_rank_00_model_states.pt").unlink()
    refused(folder, "the save was not finished", CheckpointNotFoundError)


def in_one_group(parameters: list[nn.Parameter]) -> list[Any]:
    return [{"params": parameters}]


def without_decay_first(parameters: list[nn.Parameter]) -> list[Any]:
    """The groups of timm."""
    vectors, matrices = ([p for p in parameters if (p.ndim < 2) == is_vector] for is_vector in (True, False))
    return [{"params": vectors, "weight_decay": 0.0}, {"params": matrices}]


def stages(
    folder: Path,
    parts: list[list[nn.Module]],
    layers: dict[int, nn.Module],
    shared: tuple[nn.Module, ...] = (),
    groups: Callable[[list[nn.Parameter]], list[Any]] = in_one_group,
) -> Path:
    """A save of a pipeline without ZeRO: the optimizers of its stages number the parameters.

    Args:
        folder: its root.
        parts: the modules of each stage.
        layers: the modules that have files, by layer.
        shared: modules whose weights all stages that have them hold alike; not the biases.
        groups: the groups of parameters.
    """
    (folder / "t").mkdir(parents=True)
    (folder / "latest").write_text("t")
    for number, modules in enumerate(parts):
        optimizer = torch.optim.AdamW(groups([p for module in modules for p in module.parameters()]))
        for module in modules:
            for name, parameter in module.named_parameters():
                is_alike = name == "weight" and module in shared
                alike = torch.Generator().manual_seed(shared.index(module)) if is_alike else None
                parameter.grad = torch.randn(parameter.shape, generator=alike)
        optimizer.step()
        content = {"module": None, "optimizer": optimizer.state_dict(), "param_shapes": None, "global_steps": 2}
        torch.save(
            {**content, "dp_world_size": 1, "mp_world_size": len(parts)},
            folder / "t" / f"mp_rank_{number:02}_model_states.pt",
        )
    for layer, module in layers.items():
        torch.save(module.state_dict(), folder / "t" / f"layer_{layer:02}-model_states.pt")
    return folder


def of_alike_layers(folder: Path, *, is_shared: bool) -> Path:
    """Three stages whose layers have the same shapes; the first and the last may share an embedding."""
    layers: dict[int, nn.Module] = {n: nn.Linear(6, 6) for n in range(1, 7)}
    first = nn.Linear(6, 6)
    parts: list[list[nn.Module]] = [[first, layers[1], layers[2]], [layers[3], layers[4]], [layers[5], layers[6]]]
    if is_shared:
        parts[2].insert(0, first)
    return stages(folder, parts, {0: first, **layers}, (first,) if is_shared else ())


@pytest.mark.parametrize("is_shared", [False, True])
def test_without_zero_the_shapes_of_the_state_tell_a_missing_layer(tmp_path: Path, *, is_shared: bool) -> None:
    root = of_alike_layers(tmp_path / "run", is_shared=is_shared)
    with reshard.open(root) as checkpoint:
        assert len(checkpoint) == 14
    for layer in range(7):
        file = root / "t" / f"layer_{layer:02}-model_states.pt"
        content = file.read_bytes()
        file.unlink()
        refused(root / "t", r"have state of the shapes \(6, 6\), \(6,\), and no file of a layer holds such parameters")
        file.write_bytes(content)


def without(file: Path) -> None:
    content = file.read_bytes()
    file.unlink()
    refused(file.parent, "have state of the shapes .* and no file of a layer holds such parameters")
    file.write_bytes(content)


def test_shared_modules_are_found_wherever_stages_list_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words, places = nn.Embedding(20, 6), nn.Embedding(9, 6)
    layers: dict[int, nn.Module] = {n: nn.Linear(6, 6) for n in range(1, 5)}
    one, two, three, four = layers.values()
    cases = (
        ([[words, one, two], [words, three, four]], {0: words, **layers}, without_decay_first),
        ([[words, one, two], [three, four, words]], {0: words, **layers}, in_one_group),
        ([[words, places, one, two], [places, three], [words, four]], {0: words, 5: places, **layers}, in_one_group),
    )
    for number, (parts, files, groups) in enumerate(cases):
        root = stages(tmp_path / str(number), parts, files, (words, places), groups)
        with reshard.open(root) as checkpoint:
            assert len(checkpoint) == 2 * len(layers) + len(files) - len(layers)
        for layer in files:
            without(root / "t" / f"layer_{layer:02}-model_states.pt")
    assert "may be of modules that stages share" not in caplog.text


def test_what_stages_may_share_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    head = nn.Linear(5, 7)
    layers: dict[int, nn.Module] = {n: nn.Linear(6, 6) for n in (1, 2)}
    parts = [[head, layers[1]], [head, layers[2]]]
    root = stages(tmp_path / "run", parts, {0: head, **layers}, (head,), without_decay_first)
    with reshard.open(root) as checkpoint:
        assert len(checkpoint) == 6
    assert (
        "state of the shapes (7,), and no file of a layer holds such parameters: they may be of modules" in caplog.text
    )
    for layer in (0, 1, 2):
        without(root / "t" / f"layer_{layer:02}-model_states.pt")


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_file_of_a_stage_is_missing(tmp_path: Path, stage: int) -> None:
    folder = of_alike_layers(tmp_path / "run", is_shared=False) / "t"
    (folder / f"mp_rank_{stage:02}_model_states.pt").unlink()
    refused(folder, f"is one of 3 files, and `mp_rank_{stage:02}_model_states.pt` is missing")


def test_a_number_of_stages_that_no_run_has(tmp_path: Path) -> None:
    folder = of_alike_layers(tmp_path / "run", is_shared=False) / "t"
    file = folder / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(file, weights_only=False), "mp_world_size": 10**15}, file)
    refused(folder, "is one of 1000000000000000 files, and `mp_rank_03_model_states.pt` is missing")


def test_a_parameter_without_elements(tmp_path: Path) -> None:
    layers: dict[int, nn.Module] = {0: nn.Embedding(0, 5), 1: nn.Linear(6, 6)}
    root = stages(tmp_path / "run", [[layers[0]], [layers[1]]], layers)
    with reshard.open(root) as checkpoint:
        assert checkpoint.read("0.weight").shape == (0, 5)


def test_a_shared_module_whose_file_is_missing(tmp_path: Path) -> None:
    folder = changed(tmp_path, PIPELINE)
    for stage in (0, 1):
        file = folder / f"mp_rank_{stage:02}_model_states.pt"
        state = torch.load(file, weights_only=False)
        state["param_shapes"] = [{f"tied_modules.emb.{name}": shape for name, shape in (("w", (9, 2)), ("b", (9,)))}]
        torch.save(state, file)
    refused(
        folder, r"its stages have `tied_modules\.emb\.w`, `tied_modules\.emb\.b`, and no file of a layer holds them"
    )
    torch.save({"w": torch.ones(9, 2), "b": torch.ones(9)}, folder / "layer_07-model_states.pt")
    with reshard.open(folder) as checkpoint:
        assert checkpoint["7.w"].shape == (9, 2)


def test_stages_of_different_steps(tmp_path: Path) -> None:
    folder = changed(tmp_path, PIPELINE)
    state = torch.load(folder / "mp_rank_01_model_states.pt", weights_only=False)
    torch.save({**state, "global_steps": 7}, folder / "mp_rank_01_model_states.pt")
    refused(folder, "mp_rank_01_model_states.pt`: it is of another step than `mp_rank_00_model_states.pt`")


@pytest.mark.parametrize(
    ("tree", "name"),
    [
        (EXPERTS, "layer_0_expert_0_mp_rank_01_model_states.pt"),
        (EXPERTS, "mp_rank_01_model_states.pt"),
        (EXPERTS, "layer_00-model_00-model_states.pt"),
        (EXPERTS, "zero_pp_rank_0_mp_rank_00_model_states.pt"),
        (PIPELINE, "layer_00-model_01-model_states.pt"),
    ],
)
def test_tensor_parallel_ranks_and_stage_3(tmp_path: Path, tree: Path, name: str) -> None:
    folder = changed(tmp_path, tree)
    shutil.copy(folder / "mp_rank_00_model_states.pt", folder / name)
    refused(folder, "how the tensors are divided is not stored", UnsupportedError)


# -- the state of the optimizer

EXPERTS_OF_RANKS, STAGES = DATA / "ds_experts_ep2", DATA / "ds_pipeline_dp2"
"""Of four ranks: experts that two ranks divide; two stages of two ranks. The truth is what the live optimizer held."""


@pytest.mark.parametrize("tree", [EXPERTS_OF_RANKS, STAGES], ids=lambda tree: tree.name)
def test_the_state_is_what_deepspeed_holds(tree: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = load_file(tree / "truth.safetensors")
    with caplog.at_level(logging.WARNING), reshard.open(tree / "checkpoint") as checkpoint:
        assert set(checkpoint) == set(expected)
        assert set(checkpoint.keys("optimizer")) == {
            key for key in expected if key.endswith((".fp32", "avg", "avg_sq"))
        }
        for key, tensor in expected.items():
            assert torch.equal(as_tensor(checkpoint.read(key)), tensor), key
        key = next(key for key in checkpoint.keys("optimizer") if key.endswith("weight.exp_avg"))
        assert torch.equal(as_tensor(checkpoint.read(key, (slice(1, 3), 1))), expected[key][1:3, 1])
        assert checkpoint.extra()["optimizer"]["param_groups"][0]["lr"] == 0.1
        weights = list(checkpoint.keys("model"))
    assert "left out" not in caplog.text
    reshard.convert(
        tree / "checkpoint", tmp_path / "hf", dtype="float32"
    )  # from the fp32 weights, not the rounded ones
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(found[key], expected[f"{key}.fp32"]) for key in weights)
    reshard.convert(tree / "checkpoint", tmp_path / "universal", to="deepspeed-universal")
    with reshard.open(tmp_path / "universal") as checkpoint:
        assert torch.equal(as_tensor(checkpoint.read(key)), expected[key])


def of_rank(folder: Path, rank: int, stage: int = 0) -> Path:
    return folder / f"bf16_zero_pp_rank_{rank}_mp_rank_{stage:02}_optim_states.pt"


def changed_state(tmp_path: Path, tree: Path) -> Path:
    shutil.copytree(tree / "checkpoint" / "t", tmp_path / "t", dirs_exist_ok=True)
    return tmp_path / "t"


@pytest.mark.parametrize("tree", [EXPERTS_OF_RANKS, STAGES], ids=lambda tree: tree.name)
def test_files_of_the_optimizer_are_missing_or_mixed(tmp_path: Path, tree: Path) -> None:
    folder = changed_state(tmp_path, tree)
    content = of_rank(folder, 1).read_bytes()
    of_rank(folder, 1).unlink()
    refused(folder, "and `bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt` is missing")
    of_rank(folder, 1).write_bytes(content[:200])
    refused(folder, "optim_states")
    shutil.copy(of_rank(folder, 0), of_rank(folder, 1))  # the weights of another rank
    with pytest.raises(DamagedFileError):
        reshard.open(folder)
    of_rank(folder, 1).write_bytes(content)
    shutil.copy(of_rank(folder, 1), of_rank(folder, 9))
    refused(folder, "has one of rank 9 beside it")
    of_rank(folder, 9).unlink()
    shutil.copy(of_rank(folder, 1), of_rank(folder, 0, 7))
    refused(folder, "files of the optimizer of stage 7")
    of_rank(folder, 0, 7).unlink()
    with reshard.open(folder) as checkpoint:
        assert checkpoint.keys("optimizer")


@pytest.fixture
def classes_of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes that the files name, so that a test can write the files anew."""
    deepspeed_files.stand_in(monkeypatch)


@pytest.mark.usefixtures("classes_of_deepspeed")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.update(partition_count=[2]), "expected `partition_count` of 2 groups"),
        (lambda state: state.update(partition_count=[4, 0]), "expected `partition_count` of 2 groups"),
        (lambda state: state.update(partition_count=[4, 4]), "is partitioned over 4 ranks by `partition_count`, and"),
        (lambda state: state.update(partition_count="4"), "expected `partition_count`"),
        (lambda state: state["base_optimizer_state"]["param_groups"][1].update(name="experts"), "is called `experts`"),
        (
            lambda state: state["base_optimizer_state"]["param_groups"][1].update(name="ep_size_3"),
            "is called `ep_size_3`",
        ),
        (lambda state: state["base_optimizer_state"]["param_groups"][1].update(moe=False), "is not recorded as one of"),
        (lambda state: state["single_partition_of_fp32_groups"].pop(), "it has fp32 weights of the groups"),
        (lambda state: state["single_partition_of_fp32_groups"][0].data.add_(1), "are not those of the module"),
    ],
)
def test_descriptions_that_do_not_fit(tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    folder = changed_state(tmp_path, EXPERTS_OF_RANKS)
    for rank in range(4):
        deepspeed_files.edited_state(of_rank(folder, rank), change)
    refused(folder, message)


@pytest.mark.usefixtures("classes_of_deepspeed")
def test_experts_in_another_order_of_ranks_are_found(tmp_path: Path) -> None:
    """The fp32 weights are compared with those of the module: a rank with those of other experts is refused."""
    folder = changed_state(tmp_path, EXPERTS_OF_RANKS)
    for rank in range(4):
        state = torch.load(of_rank(folder, rank), weights_only=False)
        state["ds_config"] = {**state["ds_config"], "use_data_before_expert_parallelism": True}
        torch.save(state, of_rank(folder, rank))
    refused(folder, "are not those of the module|do not match|records that")


def test_state_without_names_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = changed_state(tmp_path, EXPERTS_OF_RANKS)
    of_rank(folder, 0).rename(folder / "expp_rank_0_mp_rank_00_optim_states.pt")
    with caplog.at_level(logging.WARNING), reshard.open(folder) as checkpoint:
        assert checkpoint.keys("optimizer") == []
    assert "the state of the optimizer of experts is left out: its files do not name the parameters" in caplog.text
