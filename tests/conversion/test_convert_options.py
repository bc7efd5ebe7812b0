"""`reshard.convert`: what each option does."""

from __future__ import annotations

import json
import os
import resource
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tests.conversion.models import (
    BF16,
    BOTH,
    EXPRESSIBLE,
    INEXPRESSIBLE,
    MODEL,
    REST,
    TP,
    Layout,
    assert_opens_as,
    huggingface,
    no_umask,
    single,
)
from tests.helpers.arrays import assert_same
from tests.helpers.cases import slow
from tests.helpers.threads import in_threads

import reshard
from reshard.commit import manifest
from reshard.errors import ArgumentError, LayoutError, ReshardError, UnsupportedError
from reshard.formats import state, state_files
from reshard.storage.location import locate

__all__ = ["huggingface", "no_umask", "single"]

SAMPLES = Path(__file__).parents[1] / "data" / "mindspore"


@pytest.mark.parametrize("layout", [None, EXPRESSIBLE["zero"], INEXPRESSIBLE["joined"][0]])
def test_a_cast(single: Path, tmp_path: Path, layout: Layout | None) -> None:
    reshard.convert(single, tmp_path / "out", dtype="bfloat16", part="all", layout=layout, commit={"durable": False})
    with reshard.open(tmp_path / "out") as opened:
        found = opened.load()
    assert set(found) == set(BOTH)
    for key, array in BOTH.items():
        if array.dtype.kind == "i":
            assert_same({key: found[key]}, {key: array})
            continue
        assert found[key].dtype == BF16
        with np.errstate(all="ignore"):
            expected = array.astype(BF16)
        # The payload of a NaN that is cast is nobody's promise.
        assert np.array_equal(found[key].astype(np.float32), expected.astype(np.float32), equal_nan=True), key
        if array.dtype == BF16:
            assert_same({key: found[key]}, {key: array})


@pytest.mark.parametrize("memory", ["8MiB", 8 << 20, "1GiB"])
@pytest.mark.parametrize("threads", [1, 3])
def test_memory_and_threads_make_no_difference(single: Path, tmp_path: Path, memory: Any, threads: int) -> None:
    reshard.convert(single, tmp_path / "out", memory=memory, threads=threads, commit={"durable": False})
    assert_opens_as(tmp_path / "out", MODEL)


@pytest.mark.parametrize(
    "options",
    [
        {"memory": "lots"},
        {"memory": 1},
        {"memory": "1KiB"},
        {"memory": 0},
        {"memory": -1},
        {"memory": "0MiB"},
        {"memory": True},
        {"memory": 1.5},
        {"memory": None},
        {"files": {"max_shard_size": "lots"}},
        {"files": {"max_shard_size": 0}},
        {"to": "gguf"},
        {"part": "weights"},
        {"threads": 0},
        {"threads": 10**6},
        {"iteration": 3},
        {"files": {"prefix": "x"}},
        {"files": {"modes": "mindspore-transformers"}},
        {"files": {"modes": "0777"}, "to": "checkpoint2"},
        {"iteration": -1, "to": "checkpoint2"},
        {"iteration": True, "to": "checkpoint2"},
        {"iteration": "3", "to": "checkpoint2"},
        {"iteration": 10**18, "to": "checkpoint2"},
        {"files": {"prefix": ""}, "to": "checkpoint2"},
        {"files": {"prefix": "a/b"}, "to": "checkpoint2"},
        {"files": {"prefix": ".."}, "to": "checkpoint2"},
        {"files": {"prefix": ".hidden"}, "to": "checkpoint2"},
        {"files": {"prefix": "a\nb"}, "to": "checkpoint2"},
        {"files": {"prefix": "x" * 200}, "to": "checkpoint2"},
        {"layout": EXPRESSIBLE["tp2"], "to": "huggingface"},
    ],
    ids=repr,
)
def test_options_that_cannot_be_meant(single: Path, tmp_path: Path, options: Any) -> None:
    with pytest.raises(ArgumentError):
        reshard.convert(single, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dtype": "int8"}, UnsupportedError),
        ({"dtype": "nonsense"}, ReshardError),
        ({"layout": "no such.yaml"}, ReshardError),
        ({"layout": {"mesh": {"tp": 7}, "rules": [*TP, REST]}}, LayoutError),
        ({"layout": {"mesh": {"tp": 2}, "rules": TP}}, LayoutError),
        ({"layout": {"mesh": {"tp": 2}, "rules": [*TP, REST], "place": [{"match": "*", "axis": "x"}]}}, LayoutError),
    ],
)
def test_what_does_not_fit_the_source(single: Path, tmp_path: Path, options: Any, error: type[ReshardError]) -> None:
    with pytest.raises(error):
        reshard.convert(single, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_one_file_for_several_ranks(single: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="one file"):
        reshard.convert(single, tmp_path / "o.safetensors", to="safetensors", layout=EXPRESSIBLE["tp2"])


def test_a_part_of_which_there_is_nothing(huggingface: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="nothing to write"):
        reshard.convert(huggingface, tmp_path / "out", part="optimizer")


@pytest.mark.parametrize("to", ["huggingface", "checkpoint2", "safetensors"])
def test_progress_goes_once_from_nothing_to_the_total(single: Path, tmp_path: Path, to: Any) -> None:
    calls: list[tuple[int, int]] = []
    layout = None if to == "huggingface" else EXPRESSIBLE["pp2 tp2"]
    reshard.convert(
        single,
        tmp_path / "out",
        to=to,
        layout=layout,
        files={"max_shard_size": 1000},
        part="all",
        commit={"durable": False},
        progress=lambda done, total: calls.append((done, total)),
    )
    (total,) = {total for _, total in calls}
    done = [done for done, _ in calls]
    assert (done[0], done[-1]) == (0, total)
    assert done == sorted(done)
    n_bytes = sum(array.nbytes for array in BOTH.values())
    assert total == n_bytes if to == "huggingface" else total >= n_bytes


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_permissions(single: Path, tmp_path: Path, mask: int) -> None:
    os.umask(mask)
    reshard.convert(single, tmp_path / "c2", to="checkpoint2", layout=INEXPRESSIBLE["flat"][0])
    reshard.convert(single, tmp_path / "hf", files={"max_shard_size": 1000})
    reshard.convert(single, tmp_path / "st", to="safetensors", layout=EXPRESSIBLE["tp2"])
    reshard.convert(single, tmp_path / "one.safetensors", to="safetensors")
    for name in ("c2", "hf", "st"):
        for path in (tmp_path / name, *(tmp_path / name).rglob("*")):
            expected = (0o777 if path.is_dir() else 0o666) & ~mask
            assert oct(stat.S_IMODE(path.stat().st_mode)) == oct(expected), path
    assert stat.S_IMODE((tmp_path / "one.safetensors").stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_permissions_of_the_original(tmp_path: Path, mask: int) -> None:
    os.umask(mask)
    said = json.loads((SAMPLES / "ckpt2" / "modes_as_written.json").read_text())
    reshard.convert(
        SAMPLES / "ckpt2" / "checkpoint", tmp_path / "root", to="checkpoint2", files={"modes": "mindspore-transformers"}
    )
    modes = {Path(name).name: mode for name, mode in said.items()}
    ours = {"manifest.json", "checksums.bin"}
    for path in (tmp_path / "root").rglob("[!.]*"):
        if ".writers" in path.parts:
            continue
        if path.suffix == ".safetensors":
            expected = 0o400
        elif path.is_dir():
            expected = 0o750
        else:
            expected = 0o640
            assert path.name in modes.keys() | ours
        assert oct(stat.S_IMODE(path.stat().st_mode)) == oct(expected), path
    assert stat.S_IMODE((tmp_path / "root").stat().st_mode) == 0o750


def test_files_name_their_writer(single: Path, tmp_path: Path) -> None:
    reshard.convert(single, tmp_path / "c2", to="checkpoint2")
    reshard.convert(single, tmp_path / "hf")
    for path, name in ((tmp_path / "c2", "ms"), (tmp_path / "hf", "pt")):
        for file in path.rglob("*.safetensors"):
            with safe_open(file, "numpy") as opened:
                assert opened.metadata() == {"format": name, "reshard": reshard.__version__}


def test_data_begins_on_a_boundary_of_64_bytes(single: Path, tmp_path: Path) -> None:
    reshard.convert(single, tmp_path / "root", layout=EXPRESSIBLE["pp2 dp2 tp2"], commit={"durable": False})
    for path in (tmp_path / "root").rglob("*.safetensors"):
        n_header = int.from_bytes(path.read_bytes()[:8], "little")
        assert (8 + n_header) % 64 == 0


def test_many_small_rank_files_are_written_without_a_thread_for_each(tmp_path: Path) -> None:
    n = 2048
    save_file({"w": np.arange(2 * n, dtype=np.int32)}, tmp_path / "m.safetensors")
    layout = {"mesh": {"tp": n}, "rules": [{"match": "*", "cut": ["tp"]}]}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    reshard.convert(
        tmp_path / "m.safetensors", tmp_path / "ranks", to="safetensors", layout=layout, commit={"durable": False}
    )
    # Each hand-over to another thread is at least one: with a thread for each file there were four.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before < n
    for rank in (0, 1, n - 1):
        written = load_file(tmp_path / "ranks" / f"rank_{rank}.safetensors")
        assert written["w"].tolist() == [2 * rank, 2 * rank + 1]


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("form", ["ranks", *slow(["file", "files", "replicas", "empty", "mixed"])])
def test_many_tensors_are_written_as_few_are(form: str, tmp_path: Path) -> None:
    """More than one thread plans at a time, and in an order that is not that of the files."""
    n = 20_000
    data = np.random.default_rng(0).integers(0, 255, (n, 4), np.uint8)
    order = np.random.default_rng(1).permutation(n)
    arrays = {f"t{i}": data[i] if i % 3 else data[i].astype(np.float16) for i in map(int, order)}
    if form in ("empty", "mixed"):
        arrays["t7"] = np.zeros((0, 3), np.float32)
    source, first = tmp_path / "source.safetensors", tmp_path / "first"
    save_file(arrays, source)
    layout: dict[str, Any] = {"mesh": {"tp": 2}, "rules": [{"match": "t1*", "cut": ["tp"]}, {"match": "*", "cut": []}]}
    files: dict[str, Any] = {"dedup": form != "replicas"}
    match form:
        case "file" | "empty":
            first = source
        case "files":
            reshard.convert(source, first, to="huggingface", files={"max_shard_size": 40_000})
        case _:
            if form == "ranks":
                layout["rules"] = [{"match": "*", "cut": []}]
            reshard.convert(source, first, layout=layout, to="checkpoint2", files=files)
    cases: tuple[dict[str, Any], ...] = ({}, {"dtype": "F32"}, {"select": {"rename": {"t": "u"}}})
    for number, options in enumerate(cases):
        target = tmp_path / f"target{number}.safetensors"
        reshard.convert(first, target, commit={"durable": False}, **options)
        cast, prefix = "dtype" in options, "u" if "select" in options else "t"
        expected = {
            prefix + key[1:]: array.astype(np.float32) if cast and array.dtype == np.float16 else array
            for key, array in arrays.items()
        }
        assert_same(load_file(target), expected)


def test_state_that_is_not_written_is_a_warning(tmp_path: Path) -> None:
    state = {"w": np.ones((2, 2), np.float32)}
    reshard.save(tmp_path / "with", 7, state, extra={"scheduler": {"last_epoch": 3}})
    reshard.save(tmp_path / "without", 7, state)
    (warning,) = reshard.convert(tmp_path / "with", tmp_path / "new", to="checkpoint1").warnings
    assert "is not written: scheduler. A strict resume from it is refused; resume from the source" in warning
    assert not reshard.convert(tmp_path / "without", tmp_path / "other", to="checkpoint1").warnings


def test_state_goes_into_another_iteration(tmp_path: Path) -> None:
    """Text and arrays, of each rank, whatever the layout; the weights alone have none."""

    def save(group: Any) -> None:
        extra = {
            "scheduler": {"last_epoch": 3, "lrs": np.linspace(0, 1, 5)},
            "random": reshard.per_rank(np.arange(4) + group.rank),
        }
        layout = {"mesh": {"tp": 2}, "rules": [{"match": "w", "cut": ["tp"]}]}
        reshard.save(
            tmp_path / "source", 7, {"w": np.full((1, 2), group.rank)}, extra=extra, layout=layout, group=group
        )

    in_threads(2, save)
    cuts = {"mesh": {"tp": 2, "dp": 2}, "rules": [{"match": "w", "cut": [None, "tp"]}]}
    for number, options in enumerate([{}, {"layout": cuts}, {"select": {"rename": {"w": "w"}}}, {"dtype": "F32"}]):
        target = tmp_path / f"target{number}"
        report = reshard.convert(tmp_path / "source", target, to="checkpoint2", **options)  # type: ignore[arg-type]
        assert not report.warnings
        with reshard.open(target) as checkpoint:
            checkpoint.scrub()
            shared = checkpoint.extra(2)  # a rank that the source did not have
            assert set(shared) == {"scheduler"}
            for rank in range(2):
                found = checkpoint.extra(rank)
                assert found["random"].tolist() == (np.arange(4) + rank).tolist()
                assert found["scheduler"]["last_epoch"] == 3
                assert np.array_equal(found["scheduler"]["lrs"], np.linspace(0, 1, 5))
    weights = reshard.convert(tmp_path / "source", tmp_path / "weights", to="checkpoint2", part="model")
    assert not weights.warnings
    with reshard.open(tmp_path / "weights") as checkpoint:
        assert not checkpoint.extra()


def test_a_file_of_an_iteration_has_no_state_beside_its_tensors(tmp_path: Path) -> None:
    folder = Path(reshard.save(tmp_path / "source", 7, {"w": np.ones(2)}, extra={"note": 1}).path)
    reshard.convert(folder / "model-0000000-0000001.safetensors", tmp_path / "target", to="checkpoint2", iteration=7)
    with reshard.open(tmp_path / "target") as checkpoint:
        assert not checkpoint.extra()


FUSED = {"rules": [{"from": ["w", "v"], "to": "wv", "join": 0}, {"from": "b", "to": "b"}]}


@pytest.mark.parametrize(
    ("options", "is_lost"),
    [
        ({"layout": {"mesh": {"dp": 2}, "rules": [{"match": "*"}]}}, False),
        ({"select": {"drop": "v"}}, False),
        ({"select": {"rename": {"b": "new.b"}}}, True),
        ({"select": {"rename": {"w": "v", "v": "w"}}}, True),
        ({"names": FUSED}, True),
        ({"dtype": "BF16"}, True),
    ],
    ids=["layout", "drop", "rename", "swap", "fuse", "cast"],
)
def test_state_of_tensors_goes_into_another_iteration_if_they_stay_the_same(
    options: Any, tmp_path: Path, *, is_lost: bool
) -> None:
    def save(group: Any) -> None:
        tensors = {"w": np.zeros(4, np.float32), "v": np.ones(4, np.float32), "b": np.full(2, group.rank, np.float32)}
        reshard.save(
            tmp_path / "source",
            7,
            tensors,
            extra={"note": 1},
            layout={"mesh": {"dp": 2}, "rules": [{"match": "*"}]},
            group=group,
            verify={"may_differ": ["b"]},
        )

    assert in_threads(2, save) == [None, None]
    report = reshard.convert(tmp_path / "source", tmp_path / "target", to="checkpoint2", **options)
    with reshard.open(tmp_path / "target") as checkpoint:
        found = [checkpoint.extra(rank) for rank in range(2)]
    if is_lost:
        assert report.warnings[0].startswith(
            "the state of the run beside the tensors is not written: note, rank_local."
        )
        assert found == [{}, {}]
    else:
        assert not report.warnings
        assert [one["rank_local"]["differing"]["b"].tolist() for one in found] == [[0, 0], [1, 1]]


@pytest.mark.parametrize(
    ("rename", "expected"),
    [
        (
            {"": "pre."},
            ["pre.layers.1.w", "pre.w", "adam.v.pre.layers.1.w", "adam_m.pre.b.w", "mine.pre.w", "pre.count"],
        ),
        ({"layers.": "h."}, ["h.1.w", "w", "adam.v.h.1.w", "adam_m.b.w", "mine.w", "count"]),
        ({"adam.v.layers.": "v."}, ["layers.1.w", "w", "v.1.w", "adam_m.b.w", "mine.w", "count"]),
        ({"b.": "c."}, ["layers.1.w", "w", "adam.v.layers.1.w", "adam_m.c.w", "mine.w", "count"]),
    ],
)
def test_state_of_any_slot_is_renamed_like_its_parameter(
    rename: dict[str, str], expected: list[str], tmp_path: Path
) -> None:
    model, state = ["layers.1.w", "w"], ["adam.v.layers.1.w", "adam_m.b.w", "mine.w", "count"]
    given = [{key: np.full(2, n) for n, key in enumerate(keys, first)} for first, keys in ((0, model), (2, state))]
    reshard.save(tmp_path / "source", 7, *given)
    reshard.convert(tmp_path / "source", tmp_path / "target", to="checkpoint2", select={"rename": rename})
    with reshard.open(tmp_path / "target") as opened:
        assert (set(opened.keys("model")), set(opened.keys("optimizer"))) == (set(expected[:2]), set(expected[2:]))
        assert [opened.read(key)[0] for key in expected] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("to", ["huggingface", "torch", "mindspore", "safetensors", "checkpoint1"])
def test_state_that_is_not_written_is_reported_by_every_format(to: Any, tmp_path: Path) -> None:
    reshard.save(tmp_path / "source", 7, {"w": np.ones(2)}, extra={"note": 1})
    (warning,) = reshard.convert(tmp_path / "source", tmp_path / "target", to=to, part="all").warnings
    assert "the state of the run beside the tensors is not written: note." in warning
    assert not reshard.convert(tmp_path / "source", tmp_path / "weights", to=to, part="model").warnings


def test_a_name_that_no_state_file_has_is_no_rank(tmp_path: Path) -> None:
    """A manifest of another program: the file counts as any other one."""
    folder = Path(reshard.save(tmp_path / "source", 7, {"w": np.ones(2)}, extra={"note": 1}).path)
    known = manifest.read(locate(folder))
    files = {name.replace("extra-", "extra-0"): entry for name, entry in known.files.items()}
    (folder / "extra-0000000.json").rename(folder / "extra-00000000.json")
    manifest.write(locate(folder), replace(known, files=files, digest=""))
    with reshard.open(folder) as checkpoint:
        assert checkpoint.manifest is not None
        assert state_files.ranks(checkpoint.manifest) == []
    assert not reshard.convert(folder, tmp_path / "target", to="checkpoint2").warnings
    with reshard.open(tmp_path / "target") as checkpoint:
        assert not checkpoint.extra()


@pytest.mark.parametrize("rank", [0, 7, 9_999_999, 10_000_000, 10**18 - 1])
def test_the_rank_in_the_name_of_a_state_file(rank: int) -> None:
    def ranks(name: str) -> list[int]:
        return state_files.ranks(SimpleNamespace(files={name: None}))  # type: ignore[arg-type]

    assert ranks(state.file_name(rank)) == [rank]
    assert ranks(state.file_name(rank).replace("-", "-0")) == []


@pytest.mark.parametrize("name", ["w.ckpt", "w.npz", "w.safetensor"])
def test_the_name_of_another_file_does_not_become_a_folder(name: str, tmp_path: Path) -> None:
    source, target = tmp_path / "w.safetensors", tmp_path / name
    reshard.save_file({"w": np.zeros(2)}, source)
    with pytest.raises(ArgumentError, match=rf"{name}` is the name of a file of a format that is not written"):
        reshard.convert(source, target)
    assert not target.exists()
    reshard.convert(source, target, to="huggingface")
    assert target.is_dir()


def test_a_source_and_a_destination_inside_each_other_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "run"
    reshard.save(root, 1, {"w": np.zeros(2)}, commit={"durable": False})
    inside = root / "iteration_00000001"
    for source, target, message in (
        (root, root, "are the same"),
        (root, root / "hf", f"destination {root / 'hf'} is inside source {root}"),
        (inside, root, f"source {inside} is inside destination {root}"),
    ):
        with pytest.raises(ArgumentError) as caught:
            reshard.convert(source, target)
        assert message in caught.value.message


def test_only_these_tensors_are_written(tmp_path: Path) -> None:
    model = {"a.w": np.full(2, 1.0), "a.b": np.full(2, 2.0), "b.w": np.full(2, 3.0)}
    optimizer = {f"exp_avg.{name}": array + 10 for name, array in model.items()}
    optimizer["extra.ema.a.w"] = np.full(2, 7.0)
    reshard.save(tmp_path / "run", 5, model, optimizer=optimizer)
    for only, rename, right in (
        ("extra.ema.", {"extra.ema.": ""}, {"a.w": 7.0}),
        (["a.b", "b."], None, {"a.b": 2, "b.w": 3, "exp_avg.a.b": 12, "exp_avg.b.w": 13}),
        ("b.w", {"b.": "c."}, {"c.w": 3.0, "exp_avg.c.w": 13.0}),
    ):
        target = tmp_path / "out.safetensors"
        reshard.convert(tmp_path / "run", target, select={"only": only, "rename": rename}, overwrite=True)
        with reshard.open(target) as found:
            assert {key: found.read(key)[0] for key in found} == right
    reshard.convert(tmp_path / "run", tmp_path / "model", select={"only": "b."}, part="model")
    assert sorted(reshard.open(tmp_path / "model")) == ["b.w"]
    with pytest.raises(ArgumentError, match="`only` has `c`, and no tensor name begins with this text"):
        reshard.convert(tmp_path / "run", tmp_path / "none", select={"only": ["a.", "c"]})
    reshard.convert(tmp_path / "run", tmp_path / "again", to="checkpoint2", select={"only": "a."})
    assert reshard.open(tmp_path / "again").iteration == 5
