"""Checkpoints of nanotron: whole tensors from the slices that shards record. The sample is of nanotron's own writer."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tests.helpers.command_line import run

import reshard
from reshard.errors import (
    CheckpointNotFoundError,
    CoverageError,
    DamagedFileError,
    ReshardError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

DATA = Path(__file__).parents[2] / "data" / "torch" / "nanotron_tp2"
EMBEDDING = "model.token_position_embeddings.pp_block.token_embedding.weight"
QKV = "model.decoder.0.pp_block.attn.qkv_proj.weight"


def truth() -> Mapping[str, np.ndarray[Any, Any]]:
    return reshard.load_file(DATA / "truth.safetensors")


def shard(folder: Path, rank: int, key: str = EMBEDDING) -> Path:
    """The file of a rank."""
    *modules, name = key.split(".")
    return folder.joinpath("model", *modules, f"model_{name}_pp-rank-0-of-1_tp-rank-{rank}-of-2.safetensors")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "checkpoint", tmp_path / "20"))


def test_whole_tensors_and_slices(tmp_path: Path) -> None:
    with reshard.open(DATA / "checkpoint") as checkpoint:
        assert (checkpoint.format, checkpoint.iteration) == ("nanotron", 20)
        assert set(checkpoint.keys()) == set(truth())
        for key, array in truth().items():
            assert checkpoint.read(key).tobytes() == array.tobytes(), key
            assert checkpoint.read(key, slice(1, 4)).tobytes() == array[1:4].tobytes(), key
        layout = {"mesh": {"tp": 4}, "rules": [{"match": "*.o_proj.weight", "cut": [None, "tp"]}, {"match": "*"}]}
        key = "model.decoder.0.pp_block.attn.o_proj.weight"
        assert (checkpoint.load(layout, rank=3)[key] == truth()[key][:, 6:]).all()
    shown = run("inspect", DATA / "checkpoint").output
    assert "nanotron, iteration 20" in shown
    assert "pp 1, tp 2 (2 ranks, by the names of files and folders)" in shown
    assert run("convert", DATA / "checkpoint", tmp_path / "hf").exit_code == 0
    with reshard.open(tmp_path / "hf") as converted:
        assert all(converted.read(key).tobytes() == array.tobytes() for key, array in truth().items())


def test_the_folder_of_steps_names_the_checkpoint(tree: Path) -> None:
    (tree.parent / "latest.txt").write_text("20")
    with pytest.raises(CheckpointNotFoundError) as caught:
        reshard.open(tree.parent)
    assert caught.value.hint == f"did you mean `{tree}`?"


def test_the_optimizer_is_left_out_with_a_warning(tree: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tree / "optimizer").mkdir()
    with reshard.open(tree) as checkpoint:
        assert checkpoint.keys("optimizer") == []
    assert "the optimizer of nanotron is not" in caplog.text


def test_names_of_later_versions(tree: Path) -> None:
    """`get_path` of the commit that the docstring of `names` cites joins the beginning and the end twice."""
    for path in tree.rglob("*.safetensors"):
        path.rename(path.with_name("model_" + path.name.replace("weight", "weight.safetensors", 1)))
    with reshard.open(tree) as checkpoint:
        assert all(checkpoint.read(key).tobytes() == array.tobytes() for key, array in truth().items())


def test_experts_are_divided_too(tree: Path) -> None:
    folder = tree / "model" / "moe" / "experts"
    folder.mkdir(parents=True)
    whole = np.arange(16, dtype=np.float32).reshape(8, 2)
    for expert in range(2):
        for tp in range(2):
            at = 4 * expert + 2 * tp
            save_file(
                {"data": whole[at : at + 2], "_no_weight_decay": np.array(True)},
                folder / f"model_w_pp-rank-0-of-1_tp-rank-{tp}-of-2_exp-rank-{expert}-of-2.safetensors",
                metadata=described(
                    "(np.int64(8), np.int64(2))", f"None,None,None|None,None,None#{at},{at + 2},None|0,2,1"
                ),
            )
    with reshard.open(tree) as checkpoint:
        assert (checkpoint.read("moe.experts.w") == whole).all()
    next(folder.glob("*_exp-rank-1-*")).unlink()
    with pytest.raises(CheckpointNotFoundError, match="holds 3 of 4 shards") as caught:
        reshard.open(tree)
    assert "_exp-rank-1-of-2" in str(caught.value)


def described(shape: str, slices: str, version: str = "1.2") -> dict[str, str]:
    return {"version": version, "unsharded_shape": shape, "local_global_slices_pairs": slices}


def change(path: Path, **metadata: str | None) -> None:
    """Write a shard again with another description."""
    with safe_open(path, "np") as file:
        old = file.metadata() or {}
    kept = {name: value for name, value in (old | metadata).items() if value is not None}
    save_file(load_file(path), path, metadata=kept)


WHOLE = "None,None,None"
FIRST = f"{WHOLE}|{WHOLE}#0,4,None|{WHOLE}"
BAD_SLICES = [
    "",
    "#",
    ";",
    f"{FIRST};",
    f"{FIRST};{FIRST}#",
    f"{WHOLE}#{WHOLE}",
    f"{WHOLE}|{WHOLE}",
    f"{WHOLE}|{WHOLE}#{WHOLE}|{WHOLE}",
    f"{WHOLE}|{WHOLE}#0,4,None",
    f"{WHOLE}|{WHOLE}#0,4|{WHOLE}",
    f"{WHOLE}|{WHOLE}#0,4,None,None|{WHOLE}",
    f"{WHOLE}|{WHOLE}#0,3,None|{WHOLE}",
    f"{WHOLE}|{WHOLE}#5,9,None|{WHOLE}",
    f"{WHOLE}|{WHOLE}#-8,-4,None|{WHOLE}",
    f"{WHOLE}|{WHOLE}#4,0,None|{WHOLE}",
    f"{WHOLE}|{WHOLE}#0,8,2|{WHOLE}",
    f"{WHOLE}|{WHOLE}#0,4,0|{WHOLE}",
    f"{WHOLE}|{WHOLE}#0,4,-1|{WHOLE}",
    f"{WHOLE}|{WHOLE}#0,4.0,None|{WHOLE}",
    f"{WHOLE}|{WHOLE}#0,1e1,None|{WHOLE}",
    f"{WHOLE}|{WHOLE}#0x0,4,None|{WHOLE}",
    f"{WHOLE}|{WHOLE}#0, 4,None|{WHOLE}",
    f"{WHOLE}|{WHOLE}#\u0660,4,None|{WHOLE}",
    f"{WHOLE}|{WHOLE}#0,{10**30},None|{WHOLE}",
    f"{WHOLE}|{WHOLE}#0,4,None|0,7,None",
    f"0,5,None|{WHOLE}#0,5,None|{WHOLE}",
    "slice(0, 4)|slice(0, 6)#slice(0, 4)|slice(0, 6)",
    "None,None,None|" * 100_000,
    ";".join([FIRST] * 70_000),
]
BAD_SHAPES = [
    "",
    "()",
    "8, 6",
    "(8, 6",
    "(8,, 6)",
    "(8, -6)",
    "(8, 6.0)",
    "(8, np.int64(6)",
    "(8, six)",
    "(8, 6)" * 999,
]
BAD_SHAPES += [f"({10**18}, 6)", f"({10**17}, 6)", "(1" + ", 1" * 20 + ")", "(8, 6, 1)", "(0, 6)", "(7, 6)"]


@pytest.mark.parametrize("slices", BAD_SLICES, ids=range(len(BAD_SLICES)))
def test_hostile_slices(tree: Path, slices: str) -> None:
    change(shard(tree, 0), local_global_slices_pairs=slices)
    with pytest.raises(DamagedFileError, match="`local_global_slices_pairs` in its metadata are no slices") as caught:
        reshard.open(tree)
    assert caught.value.key == EMBEDDING
    assert caught.value.path == str(shard(tree, 0))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("shape", BAD_SHAPES, ids=range(len(BAD_SHAPES)))
@pytest.mark.parametrize("both", [False, True])
def test_hostile_shapes(tree: Path, shape: str, *, both: bool) -> None:
    for rank in range(1 + both):
        change(shard(tree, rank), unsharded_shape=shape)
    with pytest.raises((DamagedFileError, CoverageError)) as caught:
        reshard.open(tree)
    assert caught.value.key == EMBEDDING


def test_shards_that_do_not_fit_together(tree: Path) -> None:
    change(shard(tree, 1), local_global_slices_pairs=FIRST)  # as rank 0: the last rows are of no rank
    with pytest.raises(CoverageError, match=r"(its files hold|uncovered)") as uncovered:
        reshard.open(tree)
    assert uncovered.value.key == EMBEDDING
    change(shard(tree, 1), local_global_slices_pairs=f"{WHOLE}|{WHOLE}#2,6,None|{WHOLE}")
    with pytest.raises(ReshardError) as overlapping:
        reshard.open(tree)
    assert overlapping.value.key == EMBEDDING
    shard(tree, 1).unlink()
    with pytest.raises(CheckpointNotFoundError, match="holds 1 of 2 shards") as missing:
        reshard.open(tree)
    assert "missing: tp-rank-1-of-2" in str(missing.value)


def test_hostile_descriptions_of_a_shard(tree: Path) -> None:
    path = shard(tree, 0)
    good = path.read_bytes()
    for version in (None, "", "one", "1", "1.2.3.4", "-1.2"):
        path.write_bytes(good)
        change(path, version=version)
        with pytest.raises(DamagedFileError, match="no `version`"):
            reshard.open(tree)
    change(path, version="99.0")
    with pytest.raises(UnsupportedError, match=r"version 99\.0"):
        reshard.open(tree)
    for missing in ("unsharded_shape", "local_global_slices_pairs"):
        path.write_bytes(good)
        change(path, **{missing: None})
        with pytest.raises(DamagedFileError, match=missing):
            reshard.open(tree)
    for tensors in ({}, {"weight": np.zeros(3)}, {"data": np.zeros(3), "other": np.zeros(3)}):
        save_file(tensors, path)
        with pytest.raises(DamagedFileError, match=r"it holds .*expected data"):
            reshard.open(tree)
    save_file({"data": np.zeros((4, 6))}, path, metadata=described("(8, 6)", FIRST))
    with pytest.raises(DamagedFileError, match=r"it is F(64|32) of shape"):
        reshard.open(tree)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("", DamagedFileError),
        ("[]", DamagedFileError),
        ("{}", DamagedFileError),
        ('{"version": 1.2}', DamagedFileError),
        ('{"version": "1.2", "version": "1.3"}', DamagedFileError),
        ('{"version": "9.9"}', UnsupportedError),
        ('{"version": "1.2", "tp": 4}', DamagedFileError),
        ('{"version": "1.2", "metas": ' + "[" * 1000, DamagedFileError),
    ],
)
def test_hostile_metadata(tree: Path, content: str, error: type[ReshardError]) -> None:
    (tree / "checkpoint_metadata.json").write_text(content)
    with pytest.raises(error) as caught:
        reshard.open(tree)
    assert caught.value.path is not None


def test_metadata_without_a_step(tree: Path) -> None:
    for step in (-1, "20", True, None, 1 << 70):
        (tree / "checkpoint_metadata.json").write_text(
            json.dumps({"version": "1.2", "metas": {"last_train_step": step}})
        )
        with contextlib.suppress(DamagedFileError), reshard.open(tree) as checkpoint:
            assert checkpoint.iteration is None


def test_hostile_trees(tree: Path) -> None:
    path = shard(tree, 0)

    def add(name: str, words: str, error: type[ReshardError] = DamagedFileError) -> None:
        other = path.with_name(name)
        shutil.copy(path, other)
        with pytest.raises(error, match=words):
            reshard.open(tree)
        other.unlink()

    add("model_weight.safetensors", "both hold")
    add("model_weight_pp-rank-1-of-2_tp-rank-0-of-2.safetensors", "of several saves")
    add("model_weight_pp-rank-0-of-1_tp-rank-0-of-4.safetensors", "of several saves")
    add("model_model_weight.safetensors_pp-rank-0-of-1_tp-rank-0-of-2.safetensors", "of several saves")
    add("model_w_pp-rank-0-of-1_tp-rank-2-of-2.safetensors", "not below the number")
    add("model_w_pp-rank-0-of-1_tp-rank-0-of-1000000.safetensors", "1 of 1000000 shards", CheckpointNotFoundError)
    other = path.with_name("model_w_pp-rank-0-of-3_tp-rank-0-of-1.safetensors")
    save_file({"data": np.zeros(3)}, other, metadata=described("(3,)", f"{WHOLE}#{WHOLE}"))
    with pytest.raises(DamagedFileError, match="of a save with"):
        reshard.open(tree)
    other.unlink()
    add("weight.safetensors", "not called as a parameter")
    (path.parent / "loop").symlink_to(tree)
    with pytest.raises(UnsupportedError, match="a link to a folder"):
        reshard.open(tree)
    (path.parent / "loop").unlink()
    deep = path.parent
    for _ in range(80):
        deep = deep / "a"
    deep.mkdir(parents=True)
    with pytest.raises(DamagedFileError, match="too many folders"):
        reshard.open(tree)
    shutil.rmtree(tree / "model")
    (tree / "model").mkdir()
    with pytest.raises(CheckpointNotFoundError, match="holds no weights"):
        reshard.open(tree)


def test_random_bytes_in_a_shard(tree: Path) -> None:
    """Each is an error of the package, or tensors of the right sizes."""
    path = shard(tree, 0, QKV)
    data = path.read_bytes()
    generator = np.random.default_rng(0)
    for _ in range(int(os.environ.get("RESHARD_FUZZ", "100"))):
        changed = bytearray(data)
        changed[int(generator.integers(len(data) - 96))] = int(generator.integers(256))
        path.write_bytes(changed)
        with contextlib.suppress(ReshardError), reshard.open(tree) as checkpoint:
            assert all(checkpoint.read(key).size < 1000 for key in checkpoint)
