"""Checkpoints of Megatron-Core: real trees of 0.12, 0.16 and 0.19 with their ground truth, and folders made by torch.

The trees that this file makes are arranged here by the rules of Megatron-LM, from whole tensors, without code of
reshard.
"""

from __future__ import annotations

import argparse
import json
import logging
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

import reshard
from reshard import _core
from reshard.cli import main
from reshard.errors import (
    CheckpointNotFoundError,
    CoverageError,
    DamagedFileError,
    LayoutError,
    MismatchError,
    ReshardError,
    UnsupportedError,
)
from reshard.formats.megatron import common_state
from reshard.torch import as_tensor

DATA = Path(__file__).parents[2] / "data" / "torch"
SAMPLES = {
    "mcore_tp2pp2": 10,
    "mcore_dp2_buckets": 3,
    "mcore_v016_tp2": 120,
    "mcore_v012_flattened": 4,
    "mcore_mp_rank": 5,
}


def marked(value: object) -> object:
    """A value in the notation of `expected.json`; the name of an enum's member is not in the files."""
    if isinstance(value, _core.Opaque):
        is_dtype = value.name.startswith("torch.") and value.arguments is None
        return {"__dtype__": value.name} if is_dtype else {"__enum__": value.name}
    if isinstance(value, dict):
        return {key: marked(one) for key, one in value.items()}
    return value


@pytest.mark.parametrize("name", SAMPLES)
def test_a_real_tree_has_the_tensors_and_the_state_that_were_saved(name: str) -> None:
    with (
        reshard.open(DATA / name / "expected.safetensors") as truth,
        reshard.open(DATA / name / "checkpoint") as checkpoint,
    ):
        assert (checkpoint.format, checkpoint.iteration) == ("megatron", SAMPLES[name])
        assert sorted(checkpoint) == sorted(truth)
        for key in truth:
            found, right = checkpoint.read(key), truth.read(key)
            assert (found.dtype, found.shape) == (right.dtype, right.shape), key
            assert found.tobytes() == right.tobytes(), key
        assert not any("optimizer" in key or "exp_avg" in key for key in checkpoint.keys("model"))
        extra = checkpoint.extra()
    wanted = json.loads((DATA / name / "expected.json").read_text())
    wanted["args"]["attention_backend"] = {"__enum__": "megatron.core.transformer.enums.AttnBackend"}
    for key in ("args", "checkpoint_version", "iteration", "opt_param_scheduler"):
        assert marked(extra[key]) == wanted[key]


def test_the_state_of_ranks_has_the_names_of_the_file() -> None:
    with reshard.open(DATA / "mcore_tp2pp2/checkpoint") as checkpoint:
        assert {f"rng_state/shard_{p}.{t}_2.2" for p in range(2) for t in range(2)} <= checkpoint.extra().keys()
    with reshard.open(DATA / "mcore_mp_rank/checkpoint") as checkpoint:
        assert checkpoint.extra(3)["rng_state"][0]["torch_rng_state"].dtype == np.uint8
        stored = checkpoint.stored(3)
        assert stored["model.output_layer.weight"].shape == (32, 8)
        assert stored["0.(torch.bfloat16, torch.float32).exp_avg"].shape == (1160,)


@pytest.mark.parametrize("name", ["mcore_tp2pp2", "mcore_v012_flattened", "mcore_mp_rank"])
def test_commands(name: str, tmp_path: Path) -> None:
    def run(*args: str) -> str:
        result = CliRunner().invoke(main, args, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    source, target = str(DATA / name / "checkpoint"), str(tmp_path / "hf")
    shown = run("inspect", source)
    assert "megatron, iteration" in shown
    if name == "mcore_mp_rank":
        assert "mesh       tp 2, pp 2 (4 ranks, by the names of files and folders)" in shown
        assert json.loads(run("inspect", source, "--json"))["mesh"] == {"tp": 2, "pp": 2}
    assert "complete" in run("verify", source)
    run("convert", source, target, "--to", "huggingface")
    run("diff", source, target, "--part", "model")
    with reshard.open(target) as weights, reshard.open(source) as checkpoint:
        assert sorted(weights) == sorted(checkpoint.keys("model"))


@pytest.mark.parametrize("command", ["explain", "verify"])
def test_the_reasons_of_a_root_are_on_the_line_of_the_root(command: str, tmp_path: Path) -> None:
    shutil.copytree(DATA / "mcore_v016_tp2/checkpoint", tmp_path / "root")
    for folder in (tmp_path / "root").glob("iter_*"):
        (folder / "common.pt").unlink()
    result = CliRunner().invoke(main, [command, str(tmp_path / "root")])
    assert result.exit_code == 1
    assert "no complete checkpoint in" in result.output
    assert ": iter_0000120: " in result.output
    assert "\\n" not in result.output


def test_layers_are_taken_apart_by_a_name_map() -> None:
    names = {
        "sizes": {"i": 2},
        "rules": [
            {
                "from": "decoder.layers.mlp.linear_fc1.weight",
                "to": ["h.{i}.gate", "h.{i}.up"],
                "join": 1,
                "stack": {"i": 0},
            }
        ],
    }
    with reshard.open(DATA / "mcore_tp2pp2/checkpoint") as stacked, stacked.renamed(names) as apart:
        whole = stacked.read("decoder.layers.mlp.linear_fc1.weight")
        assert (apart.read("h.1.up") == whole[1, 10:]).all()


def read_all(folder: Path) -> None:
    with reshard.open(folder) as checkpoint:
        for key in checkpoint:
            checkpoint.read(key)


# -- roots, and saves that are not complete


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Iterations 10 and 20, of which 20 is of another release."""
    shutil.copytree(DATA / "mcore_tp2pp2/checkpoint", tmp_path / "run")
    shutil.copytree(DATA / "mcore_v016_tp2/checkpoint/iter_0000120", tmp_path / "run/iter_0000120")
    return tmp_path / "run"


def test_of_a_root_the_newest_complete_iteration_is_opened(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with reshard.open(root) as checkpoint:
        assert checkpoint.iteration == 120
    assert "the tracker names iteration 10" in caplog.text
    (root / "iter_0000120/metadata.json").unlink()
    caplog.clear()
    with reshard.open(root) as checkpoint:
        assert checkpoint.iteration == 10
        assert [name for name, _ in checkpoint.skipped] == ["iter_0000120"]
    assert "tracker" not in caplog.text
    (root / "iter_0000010/__3_0.distcp").unlink()
    (root / "iter_0000010/.metadata").unlink()
    with pytest.raises(DamagedFileError, match=r"(?s)no complete checkpoint.*was not finished.*no `.metadata`"):
        reshard.open(root)


def test_a_release_is_opened_if_there_is_no_iteration(root: Path) -> None:
    shutil.rmtree(root / "iter_0000120")
    (root / "iter_0000010").rename(root / "release")
    (root / "latest_checkpointed_iteration.txt").write_text("release")
    with reshard.open(root) as checkpoint:
        assert (checkpoint.path.name, checkpoint.iteration) == ("release", 10)


def test_a_save_by_torch_alone_in_a_folder_of_an_iteration_is_opened(tmp_path: Path) -> None:
    # As Megatron-FSDP saves: no `metadata.json`, no `common.pt`.
    shutil.copytree(DATA / "dcp_plain/checkpoint", tmp_path / "run/iter_0000003")
    for path in (tmp_path / "run", tmp_path / "run/iter_0000003"):
        with reshard.open(path) as found, reshard.open(DATA / "dcp_plain/checkpoint") as wanted:
            assert (found.iteration, list(found)) == (3, list(wanted))


def config(folder: Path, **fields: object) -> None:
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", **fields}))


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda folder: (folder / "metadata.json").unlink(), CheckpointNotFoundError, "was not finished"),
        (lambda folder: (folder / ".metadata").unlink(), DamagedFileError, "no `.metadata`"),
        (lambda folder: (folder / "common.pt").unlink(), DamagedFileError, "no common state"),
        (
            lambda folder: (folder / "__1_1.distcp").unlink(),
            CheckpointNotFoundError,
            "lists missing files: `__1_1.distcp`",
        ),
        (lambda folder: folder.rename(folder.with_name("iter_0000130")), DamagedFileError, "iteration 120, the folder"),
        (lambda folder: config(folder, sharded_backend="zarr"), UnsupportedError, "zarr"),
        (lambda folder: config(folder, sharded_backend_version=2), UnsupportedError, "version `2`"),
        (lambda folder: torch.save([1], folder / "common.pt"), DamagedFileError, "expected a dict"),
        (lambda folder: torch.save({5: 6}, folder / "common.pt"), DamagedFileError, "a key of type int"),
        (lambda folder: torch.save({"iteration": -1}, folder / "common.pt"), DamagedFileError, "`iteration` is -1"),
    ],
    ids=["config", "metadata", "common", "data", "iteration", "zarr", "version", "list", "key", "negative"],
)
def test_a_torn_folder_is_refused(tmp_path: Path, damage: Any, error: type[ReshardError], message: str) -> None:
    shutil.copytree(DATA / "mcore_v016_tp2/checkpoint/iter_0000120", tmp_path / "iter_0000120")
    damage(tmp_path / "iter_0000120")
    [folder] = tmp_path.iterdir()
    with pytest.raises(error, match=message):
        read_all(folder)


# -- flattened state


def flattened(folder: Path, whole: np.ndarray, grid: tuple[int, ...], cuts: list[int]) -> None:
    """Save one tensor as Megatron-Core 0.12 does: blocks of a grid, flattened, in ranges that end at `cuts`."""
    folder.mkdir()
    block = tuple(extent // parts for extent, parts in zip(whole.shape, grid, strict=True))
    n, chunks, places, data = int(np.prod(block)), [], {}, bytearray()
    for at in np.ndindex(*grid):
        part = whole[tuple(slice(i * size, (i + 1) * size) for i, size in zip(at, block, strict=True))].reshape(-1)
        for start, end in zip([0, *cuts], [*cuts, n], strict=True):
            offset, sizes = torch.Size([*at, start]), torch.Size([*(1 for _ in at), end - start])
            chunks.append(dcp.ChunkStorageMetadata(offset, sizes))
            torch.save(torch.from_numpy(part[start:end].reshape(sizes).copy()), folder / "item")
            item = (folder / "item").read_bytes()
            info = filesystem._StorageInfo("__0_0.distcp", len(data), len(item))
            places[dcp.MetadataIndex("s", offset)] = info
            data += item
    (folder / "item").unlink()
    properties = dcp.TensorProperties(dtype=torch.float32)
    metadata: Any = dcp.Metadata(
        {"s": dcp.TensorStorageMetadata(properties, torch.Size([*grid, n]), chunks)}, storage_data=places
    )
    metadata.mcore_data = {"s": {"nd_reformulated_orig_global_shape": whole.shape}}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / "__0_0.distcp").write_bytes(data)
    torch.save({"iteration": 1}, folder / "common.pt")
    config(folder)


@pytest.mark.parametrize("seed", range(12))
def test_flattened_state_has_the_shape_of_its_parameter(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    grid = tuple(int(n) for n in random.integers(1, 3, random.integers(1, 4)))
    block = tuple(int(n) for n in random.integers(1, 5, len(grid)))
    whole = random.random([a * b for a, b in zip(grid, block, strict=True)], np.float32)
    n = int(np.prod(block))
    cuts = sorted({int(cut) for cut in random.integers(1, n + 1, 3) if cut < n})
    flattened(tmp_path / "iter_0000001", whole, grid, cuts)
    with reshard.open(tmp_path) as checkpoint:
        assert (checkpoint.read("s") == whole).all()
        assert (checkpoint.read("s", (..., slice(1, None))) == whole[..., 1:]).all()


def test_flattened_state_with_a_hole_or_another_shape_is_refused(tmp_path: Path) -> None:
    whole = np.zeros((4, 6), np.float32)
    flattened(tmp_path / "iter_0000001", whole, (2, 1), [5])
    file = tmp_path / "iter_0000001/.metadata"
    content: Any = pickle.loads(file.read_bytes())
    content.mcore_data["s"]["nd_reformulated_orig_global_shape"] = (4, 5)
    file.write_bytes(pickle.dumps(content))
    with pytest.raises(DamagedFileError, match="stored as"):
        reshard.open(tmp_path / "iter_0000001")
    content.mcore_data["s"]["nd_reformulated_orig_global_shape"] = (4, 6)
    content.state_dict_metadata["s"].chunks.pop(1)
    file.write_bytes(pickle.dumps(content))
    with pytest.raises(CoverageError):
        reshard.open(tmp_path / "iter_0000001")


# -- folders of ranks


def weights(n_layers: int, *, gated: bool, vocab: int, experts: int = 0, tied: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a small model, in the order of its modules."""
    hidden, ffn = 6, 10
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (vocab, hidden),
        "embedding.position_embeddings.weight": (5, hidden),
    }
    for i in range(n_layers):
        layer = f"decoder.layers.{i}."
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        shapes[layer + "self_attention.linear_proj.weight"] = (hidden, 4)
        shapes[layer + "self_attention.linear_proj.bias"] = (hidden,)
        shapes[layer + "self_attention.linear_qkv.weight"] = (12, hidden)
        if experts:
            shapes[layer + "mlp.router.weight"] = (experts, hidden)
        mlps = [f"mlp.experts.local_experts.{e}." for e in range(experts)] or ["mlp."]
        for mlp in mlps:
            shapes[layer + mlp + "linear_fc1.weight"] = (ffn * (1 + gated), hidden)
            shapes[layer + mlp + "linear_fc1.bias"] = (ffn * (1 + gated),)
            shapes[layer + mlp + "linear_fc2.weight"] = (hidden, ffn)
    shapes["decoder.final_layernorm.weight"] = (hidden,)
    if not tied:
        shapes["output_layer.weight"] = (vocab, hidden)
    generator = torch.Generator().manual_seed(n_layers)
    return {key: torch.randn(shape, generator=generator).bfloat16() for key, shape in shapes.items()}


def cut(key: str, whole: torch.Tensor, t: int, n: int, *, gated: bool) -> torch.Tensor:
    """What a tensor-parallel rank holds of a tensor."""
    if "linear_fc1" in key and gated:
        return torch.cat([half.chunk(n)[t] for half in whole.chunk(2)])
    if any(word in key for word in ("linear_qkv", "linear_fc1", "word_embeddings", "output_layer")):
        return whole.chunk(n)[t]
    if key.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return whole.chunk(n, 1)[t]
    return whole


def save_ranks(
    folder: Path, whole: dict[str, torch.Tensor], *, tp: int = 1, pp: int = 1, vp: int = 1, ep: int = 1, **options: Any
) -> None:
    """Save a model as Megatron-LM does, its tensors as views of one storage. Tied if it has no output layer."""
    gated, n_layers = options.pop("gated", False), 1 + max(int(key.split(".")[2]) for key in whole if "layers" in key)
    per_chunk = n_layers // (pp * vp)
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep}
    args = {**sizes, "num_layers": n_layers, "untie_embeddings_and_output_weights": "output_layer.weight" in whole}
    for t, p, e in np.ndindex(tp, pp, ep):
        chunks: list[dict[str, torch.Tensor]] = [{} for _ in range(vp)]
        for key, tensor in whole.items():
            name, v, stage = key, 0, 0
            if ".layers." in key:
                head, number, tail = key.split(".", 3)[:2], int(key.split(".")[2]), key.split(".", 3)[3]
                v, stage = int(number) // (per_chunk * pp), int(number) // per_chunk % pp
                name = ".".join([*head, str(int(number) % per_chunk), tail])
            elif not key.startswith("embedding"):
                v, stage = vp - 1, pp - 1
            if "local_experts" in name:
                parts = name.split(".")
                n_local = 4 // ep
                if int(parts[6]) // n_local != e:
                    continue
                parts[6] = str(int(parts[6]) % n_local)
                name = ".".join(parts)
            if stage == p:
                chunks[v][name] = cut(key, tensor, t, tp, gated=gated)
        if "output_layer.weight" not in whole and p == pp - 1 > 0:
            chunks[-1]["output_layer.weight"] = cut(
                "output_layer", whole["embedding.word_embeddings.weight"], t, tp, gated=gated
            )
        storage = torch.cat([tensor.flatten() for chunk in chunks for tensor in chunk.values()])
        start = 0
        for chunk in chunks:
            for name, tensor in chunk.items():
                chunk[name] = storage[start : start + tensor.numel()].view(tensor.shape)
                start += tensor.numel()
        state = {"args": argparse.Namespace(**args, **options), "iteration": 7, "checkpoint_version": 3.0}
        models = {"model": chunks[0]} if vp == 1 else {f"model{v}": chunk for v, chunk in enumerate(chunks)}
        numbers = [t] + ([p] if pp > 1 else []) + ([e] if ep > 1 else [])
        path = folder / "_".join(["mp_rank", f"{numbers[0]:02d}", *(f"{number:03d}" for number in numbers[1:])])
        path.mkdir(parents=True)
        torch.save({**state, **models}, path / "model_optim_rng.pt")


def check(folder: Path, whole: dict[str, torch.Tensor]) -> None:
    with reshard.open(folder) as checkpoint:
        assert sorted(checkpoint) == sorted(whole)
        for key, tensor in whole.items():
            assert torch.equal(as_tensor(checkpoint.read(key)), tensor), key


@pytest.mark.parametrize(
    "ranks",
    [
        {"tp": 2},
        {"tp": 2, "pp": 2, "gated": True},
        {"tp": 2, "pp": 2, "vp": 2, "gated": True},
        {"pp": 2, "ep": 2, "gated": True},
        {"ep": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [True, False])
def test_ranks_are_merged(tmp_path: Path, ranks: dict[str, Any], *, tied: bool) -> None:
    experts = 4 if "ep" in ranks else 0
    whole = weights(4, gated=ranks.get("gated", False), vocab=22, experts=experts, tied=tied)
    save_ranks(tmp_path / "iter_0000007", whole, **ranks)
    check(tmp_path, whole)


def rewritten(path: Path, change: Any) -> None:
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


FILE = "model_optim_rng.pt"


def layer_norm(state: dict[str, Any]) -> None:
    state["model"]["decoder.layers.0.input_layernorm.weight"][0] = 9


def output_layer(state: dict[str, Any]) -> None:
    state["model"]["output_layer.weight"][0] = 9


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda folder: shutil.rmtree(folder / "mp_rank_01_001"), CheckpointNotFoundError, "tensor rank 1, stage 1"),
        (lambda folder: (folder / "mp_rank_01_000" / FILE).unlink(), CheckpointNotFoundError, "has no `model_optim"),
        (
            lambda folder: rewritten(folder / "mp_rank_01_000" / FILE, lambda state: state.update(iteration=6)),
            DamagedFileError,
            "iteration 6",
        ),
        (
            lambda folder: rewritten(
                folder / "mp_rank_01_000" / FILE,
                lambda state: state["model"].pop("decoder.layers.0.self_attention.linear_qkv.weight"),
            ),
            CoverageError,
            "linear_qkv",
        ),
        (
            lambda folder: rewritten(
                folder / "mp_rank_00_000" / FILE, lambda state: setattr(state["args"], "num_layers", 6)
            ),
            DamagedFileError,
            "hold 2 layers, the run had 6",
        ),
        (
            lambda folder: rewritten(
                folder / "mp_rank_00_000" / FILE, lambda state: setattr(state["args"], "padded_vocab_size", 44)
            ),
            MismatchError,
            r"has shape \(22, 6\)",
        ),
        (lambda folder: rewritten(folder / "mp_rank_01_000" / FILE, layer_norm), MismatchError, "rank 1 differ"),
        (lambda folder: rewritten(folder / "mp_rank_00_001" / FILE, output_layer), MismatchError, "word_embeddings"),
        (lambda folder: (folder / "mp_rank_00_000/distrib_optim.pt").touch(), CheckpointNotFoundError, "other ranks"),
    ],
    ids=["folder", "file", "iteration", "weight", "layers", "vocabulary", "replica", "tied", "optimizer"],
)
def test_ranks_that_do_not_belong_together_are_refused(
    tmp_path: Path, damage: Any, error: type[ReshardError], message: str
) -> None:
    folder = tmp_path / "iter_0000007"
    save_ranks(folder, weights(2, gated=False, vocab=22, tied=True), tp=2, pp=2)
    damage(folder)
    with pytest.raises(error, match=message):
        read_all(folder)


def test_copies_are_compared_under_other_names_too(tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000007"
    save_ranks(folder, weights(2, gated=False, vocab=22), tp=2)
    rewritten(folder / "mp_rank_01" / FILE, layer_norm)
    names = {"rules": [{"from": "decoder.layers.0.input_layernorm.weight", "to": "norm"}]}
    with reshard.open(folder, names=names) as checkpoint, pytest.raises(MismatchError, match="input_layernorm"):
        checkpoint.read("norm")
    with reshard.open(folder) as checkpoint:
        assert checkpoint.read("decoder.layers.1.input_layernorm.weight").shape == (6,)
        assert checkpoint.stored(1)["model.decoder.layers.0.input_layernorm.weight"].shape == (6,)


def test_a_layout_says_how_other_tensors_are_divided(tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000007"
    whole = weights(2, gated=False, vocab=22)
    save_ranks(folder, whole, tp=2)
    adapter = torch.arange(12.0).view(2, 6)
    for t in range(2):
        rewritten(
            folder / f"mp_rank_0{t}" / FILE, lambda state, t=t: state["model"].update(a=adapter[:, 3 * t : 3 * t + 3])
        )
    with reshard.open(folder) as checkpoint, pytest.raises(MismatchError, match="strategy="):
        checkpoint.read("a")
    layout = tmp_path / "layout.yaml"
    layout.write_text("mesh: {tp: 2}\nrules: [{match: a, cut: [null, tp]}]\n")
    with reshard.open(folder, strategy=layout) as checkpoint:
        assert (checkpoint.read("a") == adapter.numpy()).all()
        assert checkpoint.shape("decoder.layers.0.mlp.linear_fc1.weight") == (10, 6)
    # A block that is not cut, which both ranks would hold: the shape of the whole is the local one for each rank.
    layout.write_text("mesh: {tp: 2}\nrules: [{match: a, cut: [null, tp], blocks: {1: [{size: 2, cut: null}, 4]}}]\n")
    with pytest.raises(LayoutError, match="`a`"):
        reshard.open(folder, strategy=layout)
    layout.write_text("mesh: {tp: 4}\nrules: []\n")
    with pytest.raises(LayoutError, match="2 tensor-parallel ranks"):
        reshard.open(tmp_path, strategy=layout)
    with pytest.raises(CheckpointNotFoundError, match="no layout file"):
        reshard.open(tmp_path, strategy=tmp_path / "absent.yaml")


def test_buffers_of_another_length_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(DATA / "mcore_mp_rank/checkpoint", tmp_path / "run")
    file = tmp_path / "run/iter_0000005/mp_rank_01_001/distrib_optim.pt"
    state = torch.load(file, weights_only=False)
    buffer = state[0][torch.bfloat16, torch.float32]
    buffer["exp_avg"] = torch.cat([buffer["exp_avg"], torch.zeros(64)])
    torch.save(state, file)
    caplog.set_level(logging.WARNING)
    with reshard.open(tmp_path / "run") as checkpoint:
        assert checkpoint.keys("optimizer") == []
        assert checkpoint.stored(3)["0.(torch.bfloat16, torch.float32).exp_avg"].shape == (1224,)
    assert "1224 elements, the parameters of the rank need 1160" in caplog.text


def test_an_invalid_argument_leaves_the_other_counters() -> None:
    found = common_state.counters_of({"args": {"consumed_train_samples": 80, "global_batch_size": -1}}, 10)
    assert found is not None
    assert (found.step_num, found.consumed_samples, found.global_batch_size) == (10, 80, None)
    found = common_state.counters_of({"args": {"consumed_train_samples": "many", "global_batch_size": 8}}, 10)
    assert found is not None
    assert (found.step_num, found.consumed_samples, found.global_batch_size) == (10, None, 8)
