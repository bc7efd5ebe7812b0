"""`reshard merge` and `split`: rank folders to whole weights and back, compared with the results of MindSpore's tools.

The samples `unified*` and `split_*` were written by MindSpore. `expected_full` and `expected_dst_slices` come from an
independent formula, and so does `oracle`, with which other layouts are compared.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401  numpy knows bfloat16 by it
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tests.helpers.oracle import local_arrays

import reshard
from reshard.cli import main
from reshard.commit import filesystem
from reshard.commit import publication as commit
from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    DestinationExistsError,
    MismatchError,
    ReshardError,
    UnsupportedError,
)
from reshard.formats.checkpoint1 import names as checkpoint1
from reshard.layout import read_strategy
from reshard.storage.location import locate

if TYPE_CHECKING:
    from reshard.storage.location import Location

SAMPLES = Path(__file__).parents[2] / "data" / "mindspore"
STRATEGY = SAMPLES / "strategy"
RANKS = STRATEGY / "src_rank_slices"
FULL = load_file(STRATEGY / "expected_full.safetensors")
COUNTERS = load_file(STRATEGY / "unified" / "hyper_param.safetensors")

Arrays = dict[str, np.ndarray]


def bits(arrays: Arrays) -> dict[str, tuple[Any, ...]]:
    return {key: (array.dtype.str, array.shape, array.tobytes()) for key, array in arrays.items()}


def whole(folder: Path) -> Arrays:
    """The parts of full weights together, by the safetensors package; a tensor lies where the map says."""
    weight_map = json.loads((folder / "param_name_map.json").read_text())["weight_map"]
    files = {path.name: load_file(path) for path in folder.glob("part*.safetensors")}
    found = {key: name for name, arrays in files.items() for key in arrays}
    assert found == weight_map
    return {key: files[name][key] for key, name in weight_map.items()}


def of_ranks(folder: Path) -> dict[int, Arrays]:
    files = {
        rank: checkpoint1.choose_by_suffix(locate(folder))[rank] for rank in checkpoint1.rank_folders(locate(folder))
    }
    return {rank: load_file(path) for rank, path in files.items()}


def merge(*args: object) -> None:
    done = CliRunner().invoke(main, ["merge", *map(str, args), "--no-sync"])
    assert done.exit_code == 0, done.output


# -- merging


@pytest.mark.parametrize("ranks", ["src_rank_slices", "src_rank_slices_dedup"])
@pytest.mark.parametrize(
    "strategy",
    ["src_strategy", "src_strategy_json", "merged/src_merged_strategy.ckpt", "merged/src_merged_strategy.json"],
)
def test_merged_as_by_the_original(tmp_path: Path, ranks: str, strategy: str) -> None:
    merge(STRATEGY / ranks, tmp_path / "full", "--strategy", STRATEGY / strategy)
    original = STRATEGY / ("unified" if ranks == "src_rank_slices" else "unified_from_dedup")
    assert bits(whole(tmp_path / "full")) == bits(whole(original)) == bits(FULL)
    assert bits(load_file(tmp_path / "full" / "hyper_param.safetensors")) == bits(COUNTERS)
    ours, theirs = (
        json.loads((folder / "param_name_map.json").read_text()) for folder in (tmp_path / "full", original)
    )
    assert ours["weight_map"] == theirs["weight_map"]
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    assert sorted(path.name for path in (tmp_path / "full").iterdir()) == sorted(
        path.name for path in original.iterdir()
    )
    with (
        safe_open(tmp_path / "full" / "part0.safetensors", "np") as a,
        safe_open(original / "part0.safetensors", "np") as b,
    ):
        assert a.metadata().items() >= b.metadata().items()


def test_merged_in_parts(tmp_path: Path) -> None:
    merge(RANKS, tmp_path / "full", "--strategy", STRATEGY / "src_strategy", "--max-shard-size", 1600)
    assert bits(whole(tmp_path / "full")) == bits(whole(STRATEGY / "unified_parts"))

    def sizes(folder: Path) -> list[list[int]]:
        files = [load_file(folder / f"part{i}.safetensors") for i in range(3)]
        return [sorted(array.nbytes for array in arrays.values()) for arrays in files]

    # Which of several tensors of one size goes where follows from the order in which the files are listed.
    assert sizes(tmp_path / "full") == sizes(STRATEGY / "unified_parts")


@pytest.mark.parametrize(
    ("options", "name"),
    [(["--drop", "adam_m."], "unified_filtered"), (["--drop", "adam_", "--rename", "=model."], "unified_renamed")],
)
def test_what_is_dropped_is_nowhere(tmp_path: Path, options: list[str], name: str) -> None:
    merge(RANKS, tmp_path / "full", "--strategy", STRATEGY / "src_strategy", *options)
    assert bits(whole(tmp_path / "full")) == bits(whole(STRATEGY / name))
    # The original's file of counters has the first rank's parts of them.
    assert len(load_file(STRATEGY / name / "hyper_param.safetensors")) > len(COUNTERS)
    assert bits(load_file(tmp_path / "full" / "hyper_param.safetensors")) == bits(COUNTERS)
    assert not [path for path in (tmp_path / "full").iterdir() if b"adam_m" in path.read_bytes()]


def test_files_of_the_python_writer(tmp_path: Path) -> None:
    tree = SAMPLES / "strategy_py"
    for strategy in ("src_strategy", "merged/merged_ckpt_strategy.ckpt"):
        out = tmp_path / Path(strategy).name
        merge(tree / "src_rank_slices", out, "--strategy", tree / strategy)
        assert bits(whole(out)) == bits(whole(tree / "unified")) == bits(load_file(tree / "expected_full.safetensors"))


def test_merged_to_hugging_face_weights_alone(tmp_path: Path) -> None:
    strategy = STRATEGY / "src_strategy"
    merge(RANKS, tmp_path / "hf", "--strategy", strategy, "--to", "huggingface", "--part", "model")
    expected = {key: array for key, array in FULL.items() if not key.startswith("adam_m.")}
    assert bits(load_file(tmp_path / "hf" / "model.safetensors")) == bits(expected)


def test_one_save_of_several(tmp_path: Path) -> None:
    """The newest is read, or that whose name ends so."""
    ranks = tmp_path / "ranks"
    for rank, arrays in of_ranks(RANKS).items():
        (ranks / f"rank_{rank}").mkdir(parents=True)
        for n, save in enumerate(("10_2", "20_2")):
            shifted = {key: array + array.dtype.type(n) if array.shape else array for key, array in arrays.items()}
            save_file(shifted, ranks / f"rank_{rank}" / f"demo_rank_{rank}-{save}.safetensors")
    strategy = STRATEGY / "src_strategy"
    cases: list[tuple[str | None, int]] = [("10_2", 0), ("20_2", 1), (None, 1)]
    for suffix, n in cases:
        out = tmp_path / f"full-{suffix}"
        reshard.convert(
            ranks, out, to="mindspore", strategy=strategy, select={"suffix": suffix}, commit={"durable": False}
        )
        expected = {key: array + array.dtype.type(n) for key, array in FULL.items()}
        assert bits(whole(out)) == bits(expected)
    with pytest.raises(CheckpointNotFoundError, match="15_2"):
        reshard.convert(ranks, tmp_path / "full", to="mindspore", strategy=strategy, select={"suffix": "15_2"})
    with pytest.raises(ArgumentError, match="is not a suffix"):
        reshard.convert(ranks, tmp_path / "full", to="mindspore", strategy=strategy, select={"suffix": "../20_2"})


def test_a_strategy_beside_the_ranks_is_found(tmp_path: Path) -> None:
    shutil.copytree(RANKS, tmp_path / "checkpoint")
    shutil.copytree(STRATEGY / "src_strategy", tmp_path / "strategy")
    merge(tmp_path / "checkpoint", tmp_path / "full")
    assert bits(whole(tmp_path / "full")) == bits(FULL)


def _without_rank(folder: Path) -> dict[str, Any]:
    shutil.rmtree(folder / "ranks" / "rank_5")
    return {}


def _without_file(folder: Path) -> dict[str, Any]:
    next((folder / "ranks" / "rank_5").iterdir()).unlink()
    return {}


def _torn_file(folder: Path) -> dict[str, Any]:
    path = next((folder / "ranks" / "rank_5").iterdir())
    path.write_bytes(path.read_bytes()[:-1])
    return {}


def _without_stage_0(folder: Path) -> dict[str, Any]:
    for rank in range(4):
        (folder / "strategy" / f"ckpt_strategy_rank_{rank}.ckpt").unlink()
    return {}


def _without_stage_1(folder: Path) -> dict[str, Any]:
    for rank in range(4, 8):
        (folder / "strategy" / f"ckpt_strategy_rank_{rank}.ckpt").unlink()
    return {}


def _stage_0_alone(folder: Path) -> dict[str, Any]:
    return {"strategy": folder / "strategy" / "ckpt_strategy_rank_0.ckpt"}


def _stage_1_alone(folder: Path) -> dict[str, Any]:
    return {"strategy": folder / "strategy" / "ckpt_strategy_rank_4.ckpt"}


def _another_strategy(_: Path) -> dict[str, Any]:
    return {"strategy": STRATEGY / "dst_strategy"}


def _no_strategy(_: Path) -> dict[str, Any]:
    return {"strategy": None}


def _weights_for_strategy(folder: Path) -> dict[str, Any]:
    return {"strategy": next((folder / "ranks" / "rank_0").iterdir())}


INCOMPLETE: list[tuple[Any, str]] = [
    (_without_rank, "rank 5"),
    (_without_file, "rank 5 has no file"),
    (_torn_file, "demo_rank_5-20_2"),
    (_without_stage_0, "stage 0"),
    (_without_stage_1, "stage"),
    (_stage_0_alone, "stage"),
    (_stage_1_alone, "stage 0"),
    (_another_strategy, "strategy"),
    (_no_strategy, "strategy"),
    (_weights_for_strategy, "strategy"),
]


@pytest.mark.parametrize(("damage", "text"), INCOMPLETE, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_not_all_there_is_refused(tmp_path: Path, damage: Any, text: str) -> None:
    """Where the original merges what is left of it, without a word."""
    shutil.copytree(RANKS, tmp_path / "src" / "ranks")
    shutil.copytree(STRATEGY / "src_strategy", tmp_path / "src" / "strategy")
    options: dict[str, Any] = {"strategy": tmp_path / "src" / "strategy", **damage(tmp_path / "src")}
    if options["strategy"] is None:
        shutil.rmtree(tmp_path / "src" / "strategy")  # where it would be found
    with pytest.raises(ReshardError, match=text):
        reshard.convert(tmp_path / "src" / "ranks", tmp_path / "full", to="mindspore", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


# -- splitting


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (STRATEGY / "unified", {}),
        (STRATEGY / "unified_parts", {}),
        (STRATEGY / "unified_from_dedup", {}),
        (RANKS, {"strategy": STRATEGY / "src_strategy"}),
        (STRATEGY / "src_rank_slices_dedup", {"strategy": STRATEGY / "merged" / "src_merged_strategy.ckpt"}),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else "",
)
@pytest.mark.parametrize("layout", ["dst_strategy", "merged/dst_merged_strategy.ckpt"])
def test_split_as_by_the_original(tmp_path: Path, source: Path, options: dict[str, Any], layout: str) -> None:
    reshard.convert(
        source, tmp_path / "out", to="checkpoint1", layout=STRATEGY / layout, commit={"durable": False}, **options
    )
    found = {rank: load_file(tmp_path / "out" / f"rank_{rank}" / "net.safetensors") for rank in range(8)}
    for rank, arrays in found.items():
        of_original = load_file(STRATEGY / "split_unified_parts" / f"rank_{rank}" / "net.safetensors")
        expected = load_file(STRATEGY / "expected_dst_slices" / f"rank_{rank}" / "net.safetensors")
        assert bits(arrays) == bits(of_original) == bits(expected | COUNTERS)
    with reshard.open(tmp_path / "out") as checkpoint:  # its strategy is in it
        assert bits(checkpoint.load(keys=list(FULL))) == bits(FULL)
        assert bits(checkpoint.stored(3)) == bits(found[3])
        assert checkpoint.common is not None
        assert checkpoint.common.global_step == 40
    with safe_open(tmp_path / "out" / "rank_0" / "net.safetensors", "np") as file:
        assert file.metadata().items() >= {"format": "ms", "remove_redundancy": "False"}.items()


def test_the_strategy_that_is_written_is_the_one_that_was_given(tmp_path: Path) -> None:
    given = read_strategy(STRATEGY / "dst_strategy")
    reshard.convert(STRATEGY / "unified", tmp_path / "out", to="checkpoint1", layout=STRATEGY / "dst_strategy")
    written = read_strategy(tmp_path / "out" / "strategy")
    assert (written.n_stages, written.devices_per_stage) == (given.n_stages, given.devices_per_stage)
    for key, array in FULL.items():
        assert written.stages_of(key) == given.stages_of(key)
        for rank in range(8):
            a, b = (one.cut_of(key, rank, array.ndim, array.shape) for one in (written, given))
            assert (a is None) == (b is None)
            n = rank % given.devices_per_stage
            assert a is None or b is None or (a.parts(), a.part_of(n)) == (b.parts(), b.part_of(n))


def test_there_and_back(tmp_path: Path) -> None:
    reshard.convert(RANKS, tmp_path / "a", to="checkpoint1", strategy=STRATEGY / "src_strategy",
                    layout=STRATEGY / "dst_strategy", commit={"durable": False})  # fmt: skip
    reshard.convert(
        tmp_path / "a", tmp_path / "b", to="checkpoint1", layout=STRATEGY / "src_strategy", commit={"durable": False}
    )
    reshard.convert(tmp_path / "b", tmp_path / "c", to="mindspore", commit={"durable": False})
    assert {rank: bits(arrays) for rank, arrays in of_ranks(tmp_path / "b").items()} == {
        rank: bits(arrays) for rank, arrays in of_ranks(RANKS).items()
    }
    assert bits(whole(tmp_path / "c")) == bits(FULL)


def test_each_shard_once(tmp_path: Path) -> None:
    """As the original leaves out what another rank of the stage keeps; and whole again, as it is without."""
    strategy = STRATEGY / "src_strategy"
    reshard.convert(
        STRATEGY / "unified",
        tmp_path / "a",
        to="checkpoint1",
        layout=strategy,
        files={"dedup": True},
        commit={"durable": False},
    )
    original = of_ranks(STRATEGY / "src_rank_slices_dedup")
    assert {rank: bits(arrays) for rank, arrays in of_ranks(tmp_path / "a").items()} == {
        rank: bits(arrays) for rank, arrays in original.items()
    }
    with safe_open(tmp_path / "a" / "rank_3" / "net.safetensors", "np") as file:
        assert file.metadata()["remove_redundancy"] == "True"
    reshard.convert(tmp_path / "a", tmp_path / "b", to="checkpoint1", layout=strategy, commit={"durable": False})
    assert {rank: bits(arrays) for rank, arrays in of_ranks(tmp_path / "b").items()} == {
        rank: bits(arrays) for rank, arrays in of_ranks(RANKS).items()
    }


REST = {"match": "*"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {"mesh": {"tp": 1}, "rules": [REST]},
    "replicas": {"mesh": {"dp": 2}, "rules": [REST]},
    "tensor parallel": {"mesh": {"tp": 4}, "rules": [{"match": "*qkv.weight", "cut": ["tp"]}, REST]},
    "both dims": {"mesh": {"dp": 2, "tp": 2}, "rules": [{"match": "embed.weight", "cut": ["tp", "dp"]}, REST]},
    "pipeline": {
        "mesh": {"pp": 2, "tp": 2},
        "rules": [{"match": "*proj.weight", "cut": [None, "tp"]}, REST],
        "place": [{"match": "l{i}.*", "axis": "pp"}, {"match": "head.*", "axis": "pp", "at": -1}],
    },
    "ZeRO": {
        "mesh": {"dp": 2, "tp": 2},
        "rules": [{"match": "*qkv.weight", "cut": ["tp"]}, REST],
        "optimizer": {"add": {0: ["dp"]}},
    },
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_split_by_a_layout(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    report = reshard.convert(
        SAMPLES / "full_ms", tmp_path / "out", to="checkpoint1", layout=layout, commit={"durable": False}
    )
    optimizer = [key for key in FULL if key.startswith("adam_m.")]
    n_ranks = int(np.prod(list(layout["mesh"].values())))
    assert report.n_files == n_ranks
    for rank in range(n_ranks):
        found = load_file(tmp_path / "out" / f"rank_{rank}" / "net.safetensors")
        assert bits(found) == bits(local_arrays(layout, FULL, rank, optimizer) | COUNTERS)
    with reshard.open(tmp_path / "out") as checkpoint:
        assert bits(checkpoint.load(keys=list(FULL))) == bits(FULL)


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ({"match": "embed.weight", "flat": ["tp"]}, "flattened"),
        ({"match": "embed.weight", "flat": {"axes": ["tp"], "join": "both"}}, "in one array"),
        ({"match": "embed.weight", "cut": [None, "tp"], "sizes": {1: [1, 5]}}, "parts of different sizes"),
        ({"match": "embed.weight", "cut": ["tp"], "blocks": {0: [12, 4]}}, "blocks"),
        ({"match": "embed.weight", "cut": ["tp"], "stored": [1, 0]}, "another dim order"),
    ],
    ids=["flat", "joined", "sizes", "blocks", "stored"],
)
def test_what_a_strategy_cannot_say_is_refused(tmp_path: Path, rule: dict[str, Any], reason: str) -> None:
    layout = {"mesh": {"tp": 2}, "rules": [rule, REST]}
    with pytest.raises(UnsupportedError, match=reason) as raised:
        reshard.convert(SAMPLES / "full_ms", tmp_path / "out", to="checkpoint1", layout=layout)
    assert raised.value.key == "embed.weight"
    assert not list(tmp_path.iterdir())
    # Left out, it is in nobody's way.
    reshard.convert(
        SAMPLES / "full_ms",
        tmp_path / "out",
        to="checkpoint1",
        layout=layout,
        select={"drop": "embed."},
        commit={"durable": False},
    )


@pytest.mark.parametrize("rule", [{"flat": ["tp"]}, {"cut": ["tp"], "stored": [1, 0]}], ids=["flat", "stored"])
def test_even_one_rank_stores_no_other_array_than_the_tensor(tmp_path: Path, rule: dict[str, Any]) -> None:
    layout = {"mesh": {"tp": 1}, "rules": [{"match": "embed.weight", **rule}, REST]}
    with pytest.raises(UnsupportedError, match=r"embed\.weight"):
        reshard.convert(SAMPLES / "full_ms", tmp_path / "out", to="checkpoint1", layout=layout)


def test_from_checkpoint_2_0_and_back(tmp_path: Path) -> None:
    source = SAMPLES / "ckpt2" / "checkpoint"
    expected = load_file(SAMPLES / "ckpt2" / "expected_00000010.safetensors")
    layout = {"mesh": {"tp": 2}, "rules": [{"match": "*linear_fc1.weight", "cut": ["tp"]}, REST]}
    reshard.convert(
        source, tmp_path / "out", to="checkpoint1", layout=layout, files={"prefix": "demo"}, commit={"durable": False}
    )
    names = sorted(str(path.relative_to(tmp_path / "out")) for path in tmp_path.rglob("rank_*/*"))
    assert names == [
        "rank_0/demo_rank_0-1_10.safetensors",
        "rank_0/meta.json",
        "rank_1/demo_rank_1-1_10.safetensors",
        "rank_1/meta.json",
    ]
    reshard.convert(tmp_path / "out", tmp_path / "back", to="checkpoint2", commit={"durable": False})
    with reshard.open(source) as a, reshard.open(tmp_path / "back") as b:
        assert b.iteration == 10
        assert b.common is not None
        assert a.common is not None
        assert (b.common.step_num, b.common.loss_scale) == (a.common.step_num, a.common.loss_scale)
        assert bits(b.load(keys=[key for key in expected if key != "global_step"])) == bits(
            {key: array for key, array in expected.items() if key != "global_step"}
        )


# -- names of rank files, and what is replaced


def test_names_as_a_training_run_gives_them(tmp_path: Path) -> None:
    layout = LAYOUTS["replicas"]
    options: dict[str, Any] = {"to": "checkpoint1", "layout": layout, "commit": {"durable": False}}
    reshard.convert(STRATEGY / "unified", tmp_path / "a", files={"prefix": "my-llama"}, iteration=7, **options)
    meta = json.loads((tmp_path / "a" / "rank_1" / "meta.json").read_text())
    assert meta == {"last_epoch": 1, "last_step": 7, "last_ckpt_file": "my-llama_rank_1-1_7.safetensors"}
    assert (tmp_path / "a" / "rank_1" / "my-llama_rank_1-1_7.safetensors").is_file()
    # Epoch and step of a save of a run are kept.
    reshard.convert(RANKS, tmp_path / "b", files={"prefix": "x"}, strategy=STRATEGY / "src_strategy", **options)
    assert (tmp_path / "b" / "rank_0" / "x_rank_0-20_2.safetensors").is_file()
    with reshard.open(tmp_path / "b") as checkpoint:
        assert bits(checkpoint.load(keys=list(FULL))) == bits(FULL)
    decision = reshard.load(tmp_path / "b", layout, rank=1).decision
    assert (decision.fresh, decision.global_step) == (False, 40)


@pytest.mark.parametrize(
    "options",
    [
        {"iteration": 7},
        {"files": {"prefix": "a/b"}},
        {"files": {"prefix": "my_rank_3"}},
        {"files": {"prefix": ""}},
        {"files": {"prefix": ".x"}},
        {"files": {"prefix": "a\nb"}},
    ],
    ids=repr,
)
def test_names_that_would_not_come_back(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        reshard.convert(STRATEGY / "unified", tmp_path / "out", to="checkpoint1", **options)
    assert not list(tmp_path.iterdir())


def test_overwrite_replaces_the_same_files_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options: dict[str, Any] = {"to": "checkpoint1", "commit": {"durable": False}}
    reshard.convert(STRATEGY / "unified", out, layout=LAYOUTS["tensor parallel"], **options)
    (out / "notes").mkdir()
    (out / "notes" / "a.txt").write_text("kept")
    with pytest.raises(DestinationExistsError):
        reshard.convert(STRATEGY / "unified", out, layout=LAYOUTS["replicas"], **options)
    reshard.convert(STRATEGY / "unified", out, layout=LAYOUTS["replicas"], overwrite=True, **options)
    assert sorted(path.name for path in out.iterdir()) == ["notes", "rank_0", "rank_1", "strategy"]
    assert (out / "notes" / "a.txt").read_text() == "kept"
    with reshard.open(out) as checkpoint:
        assert bits(checkpoint.load(keys=list(FULL))) == bits(FULL)
    # Another save, a file of somebody else, or the original's own are not replaced.
    for rank, name in ((0, "net-1_1.safetensors"), (1, "model.bin")):
        shutil.copy(out / f"rank_{rank}" / "net.safetensors", out / f"rank_{rank}" / name)
        with pytest.raises(DestinationExistsError, match=f"rank_{rank}"):
            reshard.convert(STRATEGY / "unified", out, layout=LAYOUTS["replicas"], overwrite=True, **options)
        (out / f"rank_{rank}" / name).unlink()
    shutil.rmtree(out / "strategy")
    shutil.copytree(STRATEGY / "src_strategy", out / "strategy")
    with pytest.raises(DestinationExistsError, match="strategy"):
        reshard.convert(STRATEGY / "unified", out, layout=LAYOUTS["replicas"], overwrite=True, **options)
    shutil.copytree(RANKS, tmp_path / "theirs")
    with pytest.raises(DestinationExistsError, match="rank_"):
        reshard.convert(STRATEGY / "unified", tmp_path / "theirs", overwrite=True, files={"prefix": "demo"}, **options)


def test_every_folder_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    publish = commit._rename

    def noted(path: Location) -> None:
        synced.append(path.name)
        sync(path)

    def published(*args: Any, **options: Any) -> None:
        synced.append("named")
        publish(*args, **options)

    sync = filesystem.sync
    monkeypatch.setattr(filesystem, "sync", noted)
    monkeypatch.setattr(commit, "_rename", published)
    reshard.convert(STRATEGY / "unified", tmp_path / "out", to="checkpoint1", layout=LAYOUTS["replicas"])
    assert set(synced[: synced.index("named")]) >= {"rank_0", "rank_1", "strategy"}


def test_permissions_of_the_original(tmp_path: Path) -> None:
    layout = LAYOUTS["replicas"]
    options: dict[str, Any] = {
        "to": "checkpoint1",
        "layout": layout,
        "files": {"prefix": "x", "modes": "mindspore-transformers"},
    }
    reshard.convert(STRATEGY / "unified", tmp_path / "out", **options)
    modes = {
        str(path.relative_to(tmp_path / "out")): oct(path.stat().st_mode & 0o777) for path in tmp_path.rglob("rank_0*")
    } | {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out" / "rank_0").iterdir()}
    assert modes == {"rank_0": "0o750", "x_rank_0-1_40.safetensors": "0o400", "meta.json": "0o640"}


def test_a_cast_changes_no_counter(tmp_path: Path) -> None:
    options: dict[str, Any] = {"to": "checkpoint1", "commit": {"durable": False}}
    with pytest.raises(ArgumentError, match=r"loss_scale.*from 65536\.0 to inf"):
        reshard.convert(STRATEGY / "unified", tmp_path / "out", dtype="float16", **options)
    reshard.convert(STRATEGY / "unified", tmp_path / "a", dtype="float16", select={"drop": "loss_scale"}, **options)
    reshard.convert(STRATEGY / "unified", tmp_path / "b", dtype="bfloat16", **options)
    with reshard.open(tmp_path / "b") as checkpoint:
        assert checkpoint["l0.qkv.weight"].dtype == "BF16"
        assert checkpoint.common is not None
        assert checkpoint.common.loss_scale == 65536
    with reshard.open(tmp_path / "a") as checkpoint:
        assert "loss_scale" not in checkpoint


def test_a_tensor_that_the_strategy_does_not_name_is_whole_everywhere_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file(FULL | {"more.weight": np.arange(6, dtype=np.float32)}, tmp_path / "src.safetensors")
    layout = STRATEGY / "dst_strategy"
    with caplog.at_level(logging.WARNING, "reshard"):
        report = reshard.convert(tmp_path / "src.safetensors", tmp_path / "out", to="checkpoint1", layout=layout)
    assert "more.weight" in " ".join(report.warnings)
    for rank in range(8):
        assert load_file(tmp_path / "out" / f"rank_{rank}" / "net.safetensors")["more.weight"].tolist() == list(
            range(6)
        )
    with reshard.open(tmp_path / "out") as checkpoint:
        assert checkpoint.read("more.weight").tolist() == list(range(6))


# -- the commands


def run(*args: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, [*map(str, args)])
    return done.exit_code, done.output


def test_split_by_command(tmp_path: Path) -> None:
    code, out = run("split", STRATEGY / "unified", tmp_path / "a", "--strategy", STRATEGY / "dst_strategy")
    assert (code, out.splitlines()[0]) == (0, f"wrote {tmp_path / 'a'}")
    assert out.splitlines()[1].startswith("checkpoint1, 15 tensors, 8 files,")
    code, _ = run("split", STRATEGY / "unified", tmp_path / "b", "--layout", STRATEGY / "dst_strategy", "--no-sync")
    assert code == 0
    source = ["--source-strategy", STRATEGY / "src_strategy"]
    code, _ = run("split", RANKS, tmp_path / "c", "--strategy", STRATEGY / "dst_strategy", *source, "--no-sync")
    assert code == 0
    assert {rank: bits(arrays) for rank, arrays in of_ranks(tmp_path / "a").items()} == {
        rank: bits(arrays) for rank, arrays in of_ranks(tmp_path / "c").items()
    }


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["split", "SRC", "DST"], 2, "use either --strategy or --layout"),
        (["split", "SRC", "DST", "--strategy", "a", "--layout", "b"], 2, "use either --strategy or --layout"),
        (["merge", "SRC", "DST", "--rename", "model"], 2, "is not OLD=NEW"),
        (["merge", "SRC", "DST", "--rename", "a=b", "--rename", "a=c"], 2, "renamed to two names"),
        (["merge", "SRC", "DST", "--share", "1"], 2, "is not I/N"),
        (["merge", "SRC", "DST", "--suffix", "20_2"], 1, "no folders `rank_"),
        (["merge", "SRC", "DST", "--to", "huggingface", "--modes", "mindspore-transformers"], 1, "modes"),
        (["merge", "SRC/nothing", "DST"], 1, "there is nothing"),
    ],
)
def test_refused_on_the_command_line(tmp_path: Path, args: list[str], code: int, text: str) -> None:
    given = [arg.replace("SRC", str(STRATEGY / "unified")).replace("DST", str(tmp_path / "out")) for arg in args]
    found, out = run(*given)
    assert found == code
    assert text in out
    assert not (tmp_path / "out").exists()


def test_merge_in_shares(tmp_path: Path) -> None:
    args = [RANKS, tmp_path / "full", "--strategy", STRATEGY / "src_strategy", "--max-shard-size", 1600, "--no-sync"]
    for index in (1, 0):
        code, out = run("merge", *args, "--share", f"{index}/2")
        assert code == 0, out
        assert (tmp_path / "full").exists() == (index == 0)
    assert bits(whole(tmp_path / "full")) == bits(FULL)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_shares_of_another_strategy_do_not_meet(tmp_path: Path) -> None:
    shutil.copytree(RANKS, tmp_path / "ranks")
    shutil.copytree(STRATEGY / "src_strategy", tmp_path / "s")
    options: dict[str, Any] = {"to": "mindspore", "files": {"max_shard_size": 1600}, "commit": {"durable": False}}
    first = reshard.convert(tmp_path / "ranks", tmp_path / "out", strategy=tmp_path / "s", share=(0, 2), **options)
    merged = STRATEGY / "merged" / "src_merged_strategy.ckpt"
    second = reshard.convert(tmp_path / "ranks", tmp_path / "out", strategy=merged, share=(1, 2), **options)
    assert (first.pending, second.pending) == ((1,), (0,))


def test_rank_folders_of_another_strategy_are_not_mixed_up() -> None:
    with pytest.raises((MismatchError, CheckpointNotFoundError)):
        reshard.open(RANKS, strategy=STRATEGY / "dst_strategy")
