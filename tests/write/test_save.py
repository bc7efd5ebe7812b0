"""`reshard.save` in one process, and in worlds of threads under random layouts: what was given is what is found."""

from __future__ import annotations

import array
import enum
import json
import logging
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tests.helpers import original_reader
from tests.helpers.arrays import as_bytes
from tests.helpers.oracle import local_arrays, mesh_ranks
from tests.helpers.original_reader import KNOWN
from tests.helpers.strategies import KINDS, Array, Checkpoint, cases, checkpoints, kinds, layouts
from tests.helpers.threads import in_threads
from tests.helpers.told import is_without_gaps, states_of, told_shapes

import reshard
from reshard import _core
from reshard.commit import manifest, protocol
from reshard.commit.session import PassedOver, session_of
from reshard.errors import (
    ArgumentError,
    ClaimedError,
    CoverageError,
    DamagedFileError,
    LayoutError,
    MismatchError,
    ReshardError,
    StorageError,
    UnsupportedError,
)
from reshard.formats.checkpoint2 import iteration as iterations
from reshard.formats.checkpoint2.metadata import write_metadata
from reshard.formats.checkpoint2.rank_facts import LastMade, plan_iteration
from reshard.formats.checkpoint2.save import Checkpoint2Prepared
from reshard.formats.replicas import RankLocal
from reshard.storage.location import locate
from reshard.torch import Checkpointer
from reshard.write import shard_files
from reshard.write.arrays import local_arrays as own_arrays
from reshard.write.collective_save import log_once

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.commit.attempts import Attempt

pytestmark = pytest.mark.disk

ZEROS = np.zeros(2)
WHOLE2 = {"mesh": {"tp": 2}, "rules": [{"match": "*"}]}
TP2 = {"mesh": {"tp": 2}, "rules": [{"match": "*.w", "cut": ["tp"]}, {"match": "*"}]}


@pytest.fixture(autouse=True)
def _no_claim_outlives_a_test() -> Iterator[None]:
    yield
    protocol.release()


def names_in(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


# -- what is given


class _Dlpack:
    def __init__(self, inner: Array) -> None:
        self.inner = inner

    def __dlpack__(self, **options: Any) -> Any:
        return self.inner.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.inner.__dlpack_device__()


SQUARE = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (SQUARE, SQUARE),
        (SQUARE.T, SQUARE.T),
        (SQUARE[::2, ::3], SQUARE[::2, ::3]),
        (SQUARE[::-1], SQUARE[::-1]),
        (np.broadcast_to(np.float32(3), (2, 2)), np.full((2, 2), 3, np.float32)),
        (SQUARE.astype(">f4"), SQUARE),
        (np.float64(2.5), np.array(2.5)),
        (np.array(7), np.array(7)),
        (np.zeros((0, 3), np.int8), np.zeros((0, 3), np.int8)),
        (SQUARE.astype(ml_dtypes.bfloat16).T, SQUARE.astype(ml_dtypes.bfloat16).T),
        (SQUARE.astype(ml_dtypes.float8_e4m3fn), SQUARE.astype(ml_dtypes.float8_e4m3fn)),
        (SQUARE > 3, SQUARE > 3),
        (SQUARE + 1j, (SQUARE + 1j).astype(np.complex64)),
        (torch.arange(12.0).reshape(3, 4).T, SQUARE.T),
        (torch.arange(12, dtype=torch.bfloat16, requires_grad=False), np.arange(12).astype(ml_dtypes.bfloat16)),
        (torch.nn.Parameter(torch.ones(2)), np.ones(2, np.float32)),
        (torch.full((2,), 1j, dtype=torch.complex64).conj(), np.full(2, complex(0, -1), np.complex64)),
        (torch.tensor(5), np.array(5)),
        (_Dlpack(SQUARE), SQUARE),
        (array.array("i", [1, 2, 3]), np.array([1, 2, 3], np.int32)),
        (b"abc", np.frombuffer(b"abc", np.uint8)),
        (SQUARE.data, SQUARE),
    ],
    ids=lambda value: type(value).__name__,
)
def test_arrays_of_all_kinds(value: object, expected: Array, tmp_path: Path) -> None:
    reshard.save(tmp_path, 1, {"w": value}, commit={"durable": False})
    with reshard.open(tmp_path) as opened:
        assert as_bytes({"w": opened.read("w")}) == as_bytes({"w": np.asarray(expected)})


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"w": 7}, "found int"),
        ({"w": "text"}, "found str"),
        ({"w": None}, "found NoneType"),
        ({"w": np.array(["a"])}, "safetensors files cannot hold arrays"),
        ({"w": np.zeros(2, np.complex128)}, "safetensors files cannot hold arrays"),
        ({"w": torch.zeros(2, dtype=torch.complex128)}, "no place in a safetensors file"),
        ({"w": torch.zeros(2, 2).to_sparse()}, "to_dense"),
        ({"w": torch.zeros(2, device="meta")}, "no content"),
        ({"": SQUARE}, "cannot name a tensor"),
        ({"__metadata__": SQUARE}, "cannot name a tensor"),
        ({"a\nb": SQUARE}, "control character"),
        ({7: SQUARE}, "must be text"),
        ({"w": reshard.Shard(SQUARE, (3, 4))}, "without an offset"),
        ({"w": reshard.Shard(SQUARE, (3, 4), (0, 1))}, "leaves the tensor"),
        ([SQUARE], "a mapping"),
    ],
)
def test_what_is_no_array_is_refused(model: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises((ArgumentError, MismatchError, UnsupportedError), match=words):
        reshard.save(tmp_path / "root", 1, model)
    assert not (tmp_path / "root").exists()


def test_a_name_in_model_and_optimizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="one of the optimizer"):
        reshard.save(tmp_path, 1, {"w": SQUARE}, {"w": SQUARE})


class Twice(Mapping[str, Any]):
    """A mapping that is no dict, and has a name twice."""

    def __iter__(self) -> Iterator[str]:
        return iter(["v", "w", "w"])

    def __len__(self) -> int:
        return 3

    def __getitem__(self, name: str) -> Any:
        return SQUARE


class Other(str):
    """Text that is equal to nothing else."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


@pytest.mark.parametrize("model", [Twice(), {Other("w"): SQUARE, "w": SQUARE}], ids=["mapping", "dict"])
def test_a_mapping_with_a_name_twice_is_refused(tmp_path: Path, model: Any) -> None:
    with pytest.raises(ArgumentError, match="`w` names two tensors of the model"):
        reshard.save(tmp_path / "root", 1, model)
    assert not (tmp_path / "root").exists()


class Made(Mapping[str, Any]):
    """A mapping that makes each value when it is asked for it, as one of tensors on a device."""

    def __init__(self) -> None:
        self.n_alive = self.most_alive = 0

    def __iter__(self) -> Iterator[str]:
        return map(str, range(9))

    def __len__(self) -> int:
        return 9

    def __getitem__(self, name: str) -> Any:
        made = np.zeros(2, ">f4")  # it is copied, as a tensor of a device is
        self.n_alive += 1
        self.most_alive = max(self.most_alive, self.n_alive)
        weakref.finalize(made, self._free)
        return made

    def _free(self) -> None:
        self.n_alive -= 1


def test_values_of_a_mapping_are_taken_one_by_one() -> None:
    made = Made()
    assert len(own_arrays(made, None)) == 9
    assert made.most_alive <= 2  # the last one and the next one


@given(
    st.lists(st.text(max_size=4) | st.text("ab'\"\\~ \x7f", max_size=4) | st.integers() | st.just("\ud800")),
    st.integers(0, 5),
)
def test_plain_names(names: list[Any], max_bytes: int) -> None:
    expected = all(
        type(name) is str and 0 < len(name) <= max_bytes and all(" " <= c <= "~" and c not in "'\"\\" for c in name)
        for name in names
    )
    assert _core.are_plain(names, max_bytes) == _core.are_plain(tuple(names), max_bytes) == expected


def test_a_plain_name_has_the_class_str() -> None:
    class Name(str):
        __slots__ = ()

    assert _core.are_plain(["w"], 1)
    assert not _core.are_plain([Name("w")], 1)


@pytest.mark.parametrize("shape", [(3, -1), "ab", 7, (1.5,)])
def test_a_shard_has_a_shape(shape: Any) -> None:
    with pytest.raises(ArgumentError):
        reshard.Shard(SQUARE, shape)


# -- what is written


def test_a_tree_that_the_original_reads(tmp_path: Path) -> None:
    model = {"a.w": SQUARE, "b.w": SQUARE.astype(ml_dtypes.bfloat16)}
    optimizer = {"exp_avg.a.w": SQUARE + 1, "global_step": np.array(7, np.int32)}
    report = reshard.save(tmp_path, 400, model, optimizer, files={"prefix": "my-run"}, common={"epoch_num": 2})
    folder = tmp_path / "iteration_00000400"
    assert report.path == str(folder)
    assert report.iteration == 400
    assert report.n_files == 2
    assert names_in(tmp_path) - {".writers", ".lock", ".staging", ".trash"} == {
        "latest_checkpointed_iteration.txt",
        "iteration_00000400",
        "saves.jsonl",
    }
    assert names_in(folder) == {
        "my-run-model-0000000-0000001.safetensors",
        "my-run-opt-0000000-0000001.safetensors",
        "metadata.json",
        "common.json",
        "checksums.bin",
        "manifest.json",
        ".tracked",
    }
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_bytes() == b"400"
    assert as_bytes(original_reader.read_tree(tmp_path)) == as_bytes(model | optimizer)
    original_reader.audit(folder, dedup=True)
    common = original_reader.read_common(tmp_path)
    assert (common.epoch_num, common.step_num, common.global_step) == (2, 400, 400)
    written = manifest.read(locate(folder))
    assert written.digest == report.digest
    manifest.check_sizes(locate(folder), written)
    assert written.n_bytes == report.n_bytes == sum(entry.stat().st_size for entry in folder.iterdir()) - _size(folder)
    assert not list((tmp_path / ".staging").iterdir())


def _size(folder: Path) -> int:
    return (folder / "manifest.json").stat().st_size


def test_sums_are_those_of_the_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    reshard.save(tmp_path, 1, {"w": rng.random((300, 1000))}, verify={"after_save": True})
    folder = tmp_path / "iteration_00000001"
    name = "model-0000000-0000001.safetensors"
    data = (folder / name).read_bytes()
    chunks = [data[start : start + (256 << 10)] for start in range(0, len(data), 256 << 10)]
    checksums = b"".join(_core.crc32c(chunk).to_bytes(4, "little") for chunk in chunks)
    assert (
        manifest.read_checksums(locate(folder), manifest.read(locate(folder)))[name]
        == checksums
        == (folder / "checksums.bin").read_bytes()
    )


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077, 0o002])
def test_who_may_read_a_save_is_told_by_the_umask(tmp_path: Path, mask: int) -> None:
    old = os.umask(mask)
    try:
        reshard.save(tmp_path / "new" / "root", 1, {"w": SQUARE}, extra={"a": SQUARE}, metrics={"loss": 1})
    finally:
        os.umask(old)
    for entry in (tmp_path / "new").rglob("*"):
        expected = (0o777 if entry.is_dir() else 0o666) & ~mask
        assert oct(stat.S_IMODE(entry.stat().st_mode)) == oct(expected), entry


def test_a_private_save_is_for_its_owner_alone(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(mode=0o755)
    (tmp_path / "there").chmod(0o755)
    for name in ("there", "made"):
        root = tmp_path / name
        reshard.save(root, 1, {"w": SQUARE}, extra={"a": SQUARE}, metrics={"loss": 1}, commit={"private": True})
        assert oct(stat.S_IMODE(root.stat().st_mode)) == ("0o755" if name == "there" else "0o700")
        folder = root / "iteration_00000001"
        assert {oct(stat.S_IMODE(path.stat().st_mode)) for path in (folder, root / ".staging")} == {"0o700"}
        files = {path for path in folder.iterdir() if path.name != ".tracked"} | {root / "saves.jsonl"}
        assert len(files) > 5
        assert {oct(stat.S_IMODE(path.stat().st_mode)) for path in files} == {"0o600"}


def test_files_name_their_writer(tmp_path: Path) -> None:
    reshard.save(tmp_path / "root", 1, {"w": SQUARE})
    folder = tmp_path / "root" / "iteration_00000001"
    (shards,) = folder.glob("*.safetensors")
    header = json.loads(shards.read_bytes()[8:].split(b"}}")[0] + b"}}")
    assert header["__metadata__"] == {"format": "ms", "reshard": _core.__version__}
    assert load_file(shards)["w"].tobytes() == SQUARE.tobytes()


@pytest.mark.parametrize(
    ("common", "expected"),
    [
        (None, {"step_num": 5, "global_step": 5}),
        ({}, {"step_num": 5, "global_step": 5}),
        ({"global_step": 9, "loss_scale": 2}, {"step_num": 5, "global_step": 9, "loss_scale": 2.0}),
        ({"step_num": None}, {"global_step": 5}),
        (reshard.CommonInfo(global_step=4), {"global_step": 4}),
    ],
)
def test_common(common: Any, expected: dict[str, object], tmp_path: Path) -> None:
    reshard.save(tmp_path, 5, {"w": SQUARE}, common=common, commit={"durable": False})
    content = json.loads((tmp_path / "iteration_00000005" / "common.json").read_text())
    assert {key: value for key, value in content.items() if value is not None} == expected
    assert list(content) == ["epoch_num", "step_num", "global_step", "loss_scale", "global_batch_size"]


def test_what_is_no_field_of_common_belongs_into_extra(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="learning_rate") as error:
        reshard.save(tmp_path, 5, {"w": SQUARE}, common={"learning_rate": 0.1})
    assert error.value.hint is not None
    assert "extra=" in error.value.hint


def test_an_iteration_is_replaced_and_lower_ones_are_refused(tmp_path: Path) -> None:
    first = reshard.save(tmp_path, 5, {"w": SQUARE})
    second = reshard.save(tmp_path, 5, {"w": SQUARE + 1})
    assert first.digest != second.digest
    with reshard.open(tmp_path) as opened:
        assert opened.read("w").tobytes() == (SQUARE + 1).tobytes()
    with pytest.raises(ReshardError, match="below 5"):
        reshard.save(tmp_path, 4, {"w": SQUARE})
    reshard.save(tmp_path, 4, {"w": SQUARE}, commit={"rollback": True})
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"


@pytest.mark.parametrize("integer", [np.int64, np.uint32, np.array, torch.tensor])
def test_an_iteration_is_any_integer(tmp_path: Path, integer: Any) -> None:
    root = tmp_path / "root"
    for step in (5, 6):
        assert reshard.save(root, integer(step), {"w": SQUARE}).iteration == step
    assert reshard.rollback(root, integer(5)).iteration == 5
    reshard.convert(root, tmp_path / "c", to="checkpoint2", iteration=integer(7))
    assert reshard.open(tmp_path / "c").iteration == 7
    m = torch.nn.Linear(2, 2)
    with Checkpointer(tmp_path / "run", save_every=2) as checkpointer:
        checkpointer.resume(model=m)
        for step in (1, 2):
            checkpointer.step(integer(step))
    assert reshard.open(tmp_path / "run").iteration == 2


def test_the_first_save_after_an_older_iteration_was_taken_goes_back(tmp_path: Path) -> None:
    for iteration in (5, 6, 7):
        reshard.save(tmp_path, iteration, {"w": SQUARE}, commit={"durable": False})
    session_of(locate(tmp_path)).resumed = PassedOver(5, (6, 7))
    reshard.save(tmp_path, 6, {"w": SQUARE + 1}, commit={"durable": False})
    assert manifest.read(locate(tmp_path / "iteration_00000006")).passed_over == (6, 7)
    reshard.save(tmp_path, 7, {"w": SQUARE + 2}, commit={"durable": False})
    assert manifest.read(locate(tmp_path / "iteration_00000007")).passed_over == ()
    with pytest.raises(ReshardError, match="below 7"):
        reshard.save(tmp_path, 6, {"w": SQUARE})


def test_old_iterations_go_and_the_log_stays(tmp_path: Path) -> None:
    from reshard.commit import save_log

    for iteration in (10, 20, 30, 40, 50):
        reshard.save(
            tmp_path,
            iteration,
            {"w": SQUARE},
            retention={"keep": 1, "keep_every": 20},
            metrics={"loss": 1 / iteration},
            commit={"durable": False},
        )
    assert {name for name in names_in(tmp_path) if name.startswith("iteration")} == {
        "iteration_00000020",
        "iteration_00000040",
        "iteration_00000050",
    }
    records = save_log.read(locate(tmp_path))
    assert [record.iteration for record in records] == [10, 20, 30, 40, 50]
    assert records[1].metrics == {"loss": 0.05}
    assert records[1].attempt == manifest.read(locate(tmp_path / "iteration_00000020")).attempt
    assert records[1].n_bytes == manifest.read(locate(tmp_path / "iteration_00000020")).n_bytes


@pytest.mark.parametrize("blocking", [True, False])
def test_arrays_in_extra_come_back(tmp_path: Path, *, blocking: bool) -> None:
    """They are proven by sums of their own, like shards."""

    def work(group: Any) -> Any:
        extra = {
            "rng": reshard.per_rank(np.arange(3) + group.rank),
            "seen": {"z": np.float16(2), "t": torch.ones(2, dtype=torch.bfloat16), "big": SQUARE.repeat(9000)},
        }
        return reshard.save(
            tmp_path, 1, {"w": SQUARE}, extra=extra, group=group, timeout=20, verify={"after_save": True},
            layout={"mesh": {"dp": 2}, "rules": [{"match": "*"}]},
        )  # fmt: skip

    if blocking:
        reports = in_threads(2, work)
        assert [report.n_files for report in reports] == [1, 1], reports
    else:
        pending = reshard.save(
            tmp_path, 1, {"w": SQUARE}, blocking=False,
            extra={"rng": np.arange(3), "seen": {"z": np.float16(2), "t": torch.ones(2, dtype=torch.bfloat16),
                                                 "big": SQUARE.repeat(9000)}},
        )  # fmt: skip
        pending.result(20)
    for rank in (0, 1) if blocking else (0,):
        with reshard.open(tmp_path) as opened:
            extra = opened.extra(rank)
            opened.scrub()
        assert extra["rng"].tolist() == [rank, rank + 1, rank + 2]
        assert extra["seen"]["big"].tobytes() == SQUARE.repeat(9000).tobytes()
        assert extra["seen"]["t"].dtype == torch.bfloat16
    assert reshard.load(tmp_path, rank=None).extra["seen"]["z"] == 2
    path = tmp_path / "iteration_00000001" / "extra-0000000.arrays"
    assert path.name in manifest.read(locate(path.parent)).shards
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    with pytest.raises(DamagedFileError, match=path.name), reshard.open(tmp_path) as opened:
        opened.extra(0)


@pytest.mark.parametrize(
    "options", [{"keep": 0}, {"retention": {"keep": 1, "keep_every": -1}}, {"retention": {"keep": 1, "best": "loss"}}]
)
def test_retention_that_cannot_be_is_refused_before_anything_is_written(options: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError):
        reshard.save(tmp_path / "root", 1, {"w": SQUARE}, **options)
    assert not (tmp_path / "root").exists()


def test_a_save_that_is_overtaken_says_so(tmp_path: Path) -> None:
    other = "import reshard, sys; reshard.save(sys.argv[1], 2, {}, commit={'durable': False, 'takeover': True})"

    def overtaken(done: int, total: int) -> None:
        if done == total and not (tmp_path / "iteration_00000002").exists():
            subprocess.run([sys.executable, "-c", other, tmp_path], check=True)

    with pytest.raises(ClaimedError, match="was taken over by"):
        reshard.save(tmp_path, 1, {"w": np.zeros(4)}, progress=overtaken)
    assert reshard.open(tmp_path).iteration == 2


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    reshard.save(
        tmp_path,
        1,
        {"w": SQUARE},
        {"m.w": SQUARE},
        commit={"durable": False},
        progress=lambda done, all_: seen.append((done, all_)),
    )
    assert seen[-1] == (96, 96)
    assert sorted(seen) == seen


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"format": "zip"}, ArgumentError),
        ({"files": {"prefix": "a/b"}}, ArgumentError),
        ({"iteration": -1}, ArgumentError),
        ({"iteration": True}, ArgumentError),
        ({"rank": 3}, ArgumentError),
        ({"shapes": {"w": (3, 4)}}, ArgumentError),
        ({"shapes": {"w": (3, "4")}, "layout": TP2}, ArgumentError),
        ({"layout": TP2}, LayoutError),
        ({"common": [1]}, ArgumentError),
        ({"extra": [1]}, ArgumentError),
        ({"metrics": {"loss": "low"}}, ArgumentError),
    ],
)
def test_calls_that_cannot_be_meant(options: dict[str, Any], error: type[ReshardError], tmp_path: Path) -> None:
    given: dict[str, Any] = {"iteration": 1, "model": {"w": SQUARE}} | options
    with pytest.raises(error):
        reshard.save(tmp_path / "root", **given)
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    "given",
    [
        {"model": {"w": object()}},
        {"model": {"w": np.array(["x"])}},
        {"model": {"\ud800": SQUARE}},
        {"metrics": {"loss": "low"}},
    ],
)
def test_errors_do_not_show_those_they_are_made_of(given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ReshardError) as caught:
        reshard.save(tmp_path / "root", 1, **{"model": {}, **given})
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_what_metadata_cannot_say_is_refused_on_demand(tmp_path: Path) -> None:
    model = {"w": SQUARE.astype(ml_dtypes.float8_e5m2)}
    with pytest.raises(UnsupportedError, match="F8_E5M2"):
        reshard.save(tmp_path / "root", 1, model, files={"strict_format": True})
    report = reshard.save(tmp_path / "root", 1, model)
    assert "MindSpore has no shard files of F8_E5M2" in report.warnings[0]
    with reshard.open(tmp_path / "root") as opened:
        assert as_bytes({"w": opened.read("w")}) == as_bytes(model)


@pytest.mark.parametrize(("program", "level"), [({}, logging.DEBUG), ({"mindspore": sys}, logging.WARNING)])
def test_what_metadata_cannot_say_is_a_warning_for_mindspore_alone(
    program: dict[str, Any],
    level: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delitem(sys.modules, "mindspore", raising=False)
    for name, module in program.items():
        monkeypatch.setitem(sys.modules, name, module)
    log_once.cache_clear()
    caplog.set_level(logging.DEBUG, "reshard")
    for iteration in (1, 2):
        reshard.save(tmp_path / "root", iteration, {"w": SQUARE.astype(ml_dtypes.float8_e5m2)})
    assert [one.levelno for one in caplog.records if "metadata.json cannot express" in one.message] == [level]


# -- when the system fails


def test_saves_by_different_threads_use_the_same_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_files, "_idle", [])
    state = {"w": np.arange(20 << 20, dtype=np.uint8)}
    for iteration in (1, 2):
        ready = {"blocking": False, "ready": lambda: None}  # a thread of its own for each
        reshard.save(tmp_path, iteration, state, **ready).result(60)  # type: ignore[call-overload]
        with reshard.open(tmp_path) as checkpoint:
            assert (checkpoint.load()["w"] == state["w"]).all()
    assert len(shard_files._idle) == 1


def test_a_write_that_is_not_what_comes_back_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = _core.write_arrays

    def damaging(path: str, *args: Any, **options: Any) -> _core.Written:
        written = real(path, *args, **options)
        with Path(path).open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xff")
        return written

    monkeypatch.setattr("reshard.write.shard_files._core.write_arrays", damaging)
    reshard.save(tmp_path, 1, {"w": SQUARE})
    with pytest.raises(DamagedFileError, match="read back"):
        reshard.save(tmp_path, 2, {"w": SQUARE}, verify={"after_save": True})
    assert names_in(tmp_path / ".staging") == set()
    assert not (tmp_path / "iteration_00000002").exists()
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """8 MiB of tmpfs."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting needs root")
    try:
        yield folder
    finally:
        protocol.release()
        subprocess.run(["umount", folder], check=True)


def test_no_room_leaves_the_old_checkpoint_and_no_debris(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"w": np.ones(3 << 20, np.uint8), "v": np.ones(1 << 20, np.uint8)}
    big = {"w": np.ones(3 << 20, np.uint8), "v": np.ones(3 << 20, np.uint8)}
    report = reshard.save(small_disk, 1, model)
    assert not report.durable
    before = {path: path.stat().st_ino for path in small_disk.rglob("*") if path.is_file()}
    with pytest.raises(StorageError, match="bytes free"):  # seen before a byte is written
        reshard.save(small_disk, 2, big)
    monkeypatch.setattr("reshard.formats.checkpoint2.save._plans", LastMade())
    monkeypatch.setattr("reshard.formats.checkpoint2.save.planned_bytes", lambda plan, facts: 0)
    with pytest.raises(StorageError) as error:  # and met while writing
        reshard.save(small_disk, 2, big)
    assert error.value.errno == 28
    assert {path: path.stat().st_ino for path in small_disk.rglob("*") if path.is_file()} == before
    assert names_in(small_disk / ".staging") == set()
    with reshard.open(small_disk) as opened:
        assert opened.iteration == 1
        assert opened.read("w").tobytes() == model["w"].tobytes()
    reshard.save(small_disk, 2, {"w": np.ones(2, np.uint8)})


# -- ranks


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([], ["b.w", "a.w", "m.b.w", "m.a.w"]),
        (["m.a.w"], ["b.w", "a.w", "m.a.w"]),
        (["m.b.w", "m.a.w"], ["b.w", "a.w", "m.b.w", "m.a.w"]),
    ],
)
def test_joined_state_is_of_all_parameters_or_of_those_that_are_told(
    told: list[str], expected: list[str], tmp_path: Path
) -> None:
    """With padding the arrays alone would not tell: those of one parameter and of two are of one length."""
    layout = {"mesh": {"dp": 1}, "rules": [{"match": "*", "flat": {"axes": ["dp"], "join": "all", "align": 4}}]}
    model = {"all": np.arange(8, dtype=np.float32)}
    state = {"m.all": np.arange(8 if len(expected) == 4 else 4, dtype=np.float32) + 10}
    shapes = dict.fromkeys(["b.w", "a.w", *told], (4,))
    reshard.save(tmp_path, 1, model, state, layout=layout, shapes=shapes, commit={"durable": False})
    with reshard.open(tmp_path) as opened:
        assert sorted(opened.keys("all")) == sorted(expected)
        assert opened.read("a.w").tolist() == [0, 1, 2, 3]
        assert opened.read("b.w").tolist() == [4, 5, 6, 7]
        assert opened.read("m.a.w").tolist() == [10, 11, 12, 13]


def test_each_slot_has_the_state_of_its_own_parameters(tmp_path: Path) -> None:
    """What is told of one slot is no parameter of another one, though the rule's pattern matches it too."""
    layout = {"mesh": {"dp": 1}, "rules": [{"match": "*", "flat": {"axes": ["dp"], "join": "all"}}]}
    state = {"m.all": np.ones(2, np.float32), "v.all": np.full(6, 2, np.float32)}
    shapes = {"a": (4,), "b": (2,), "m.b": (2,)}
    reshard.save(
        tmp_path, 1, {"all": np.zeros(6, np.float32)}, state, layout=layout, shapes=shapes, commit={"durable": False}
    )
    with reshard.open(tmp_path) as opened:
        assert {key: opened.read(key).tolist() for key in opened.keys("optimizer")} == {
            "m.b": [1, 1],
            "v.a": [2] * 4,
            "v.b": [2] * 2,
        }


@pytest.mark.slow
def test_what_ranks_save_under_any_layout_is_the_checkpoint() -> None:
    seen: Counter[str] = Counter()

    @cases(80)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        checkpoint: Checkpoint = data.draw(checkpoints())
        mapping = data.draw(layouts(checkpoint, max_ranks=8).filter(is_without_gaps))
        dedup = data.draw(st.booleans())
        as_shards = data.draw(st.booleans())
        seen.update(kinds(mapping))
        told = told_shapes(mapping, checkpoint)
        states = states_of(mapping, checkpoint)
        world_size = len(mesh_ranks(mapping))
        with tempfile.TemporaryDirectory() as name:
            root = Path(name)

            def work(group: Any) -> Any:
                own = local_arrays(mapping, checkpoint.tensors, group.rank, checkpoint.optimizer_keys)
                shapes = dict(told)
                model: dict[str, object] = {}
                optimizer: dict[str, object] = {}
                for key, value in own.items():
                    part = optimizer if key in states else model
                    part[key] = value
                    if as_shards and key in told:
                        part[key] = reshard.Shard(value, shapes.pop(key))
                return reshard.save(
                    root, 3, model, optimizer, layout=mapping, shapes=shapes, files={"dedup": dedup}, group=group,
                    commit={"durable": False}, timeout=20, verify={"check_replicas": True},
                )  # fmt: skip

            reports = in_threads(world_size, work)
            for report in reports:
                if isinstance(report, Exception):
                    raise report
            protocol.release()
            assert len({report.digest for report in reports}) == 1
            with reshard.open(root) as opened:
                assert as_bytes(opened.load()) == as_bytes(checkpoint.tensors)
                assert set(opened.keys("optimizer")) == states & checkpoint.tensors.keys()
                expressible = {k: a for k, a in checkpoint.tensors.items() if k not in opened.tiled_keys()}
            if {str(a.dtype) for a in checkpoint.tensors.values()} <= KNOWN:
                assert as_bytes(original_reader.read_tree(root)) == as_bytes(expressible)
            original_reader.audit(Path(reports[0].path), dedup=dedup)

    check()
    # That every kind can be converted and inverted is seen elsewhere; here worlds are small.
    assert len(KINDS - set(seen)) <= 5


def test_boxes_without_a_layout() -> None:
    @cases(40)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
        tensor = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
        world_size = data.draw(st.integers(1, 4))
        cut = sorted(data.draw(st.lists(st.integers(0, rows), min_size=world_size - 1, max_size=world_size - 1)))
        ends = [*cut, rows]
        dedup = data.draw(st.booleans())
        with tempfile.TemporaryDirectory() as name:

            def work(group: Any) -> Any:
                first = ([0, *cut])[group.rank]
                box = tensor[first : ends[group.rank]]
                model = {
                    "cut": reshard.Shard(box, tensor.shape, (first, 0)),
                    "whole": reshard.Shard(tensor, tensor.shape, (0, 0)),
                    "step": np.int64(9),
                }
                if group.rank == world_size - 1:
                    model["mine"] = reshard.Shard(tensor, tensor.shape, (0, 0))
                return reshard.save(
                    name, 1, model, files={"dedup": dedup}, group=group, commit={"durable": False}, timeout=20
                )

            reports = in_threads(world_size, work)
            assert not [report for report in reports if isinstance(report, Exception)], reports
            protocol.release()
            with reshard.open(name) as opened:
                expected = {"cut": tensor, "whole": tensor, "step": np.array(9), "mine": tensor}
                assert as_bytes(opened.load()) == as_bytes(dict(sorted(expected.items()))) or as_bytes(
                    opened.load()
                ) == {key: as_bytes(expected)[key] for key in opened}
                assert set(opened.keys()) == set(expected)
                assert set(opened.tiled_keys()) == ({"cut", "mine"} if world_size > 1 else set())
            read = original_reader.read_tree(Path(name))
            assert all(read[key].tobytes() == expected[key].tobytes() for key in ("whole", "step"))

    check()


def shards(*boxes: tuple[int, int], n: int = 4) -> list[dict[str, object]]:
    return [{"w": reshard.Shard(np.zeros(end - first), (n,), (first,))} for first, end in boxes]


@pytest.mark.parametrize(
    ("models", "options", "error", "words"),
    [
        (shards((0, 2), (3, 4)), {}, CoverageError, "the boxes that the ranks hold: the stored shards of `w` leave"),
        (shards((0, 2), (3, 4)), {}, CoverageError, "hint: each element is in one box, or in equal boxes: check"),
        (shards((0, 3), (2, 4)), {}, CoverageError, "the boxes that the ranks hold: `w`: stored regions"),
        ([{"w": np.zeros(2)}] * 2, {}, ArgumentError, "plain array"),
        ([{"b": ZEROS}, {"b": np.zeros(2, np.float32)}], {"layout": TP2}, MismatchError, "F64 on rank 0 and F32"),
        ([{"b": np.zeros((2, 3))}, {"b": np.zeros((2, 4))}], {"layout": TP2}, LayoutError, "on rank 0 and 4 on rank 1"),
        ([{"a.w": ZEROS, "b": ZEROS}, {"a.w": ZEROS}], {"layout": TP2}, MismatchError, "rank 1 gave no `b`"),
        ([{"a.w": np.zeros(2)}] * 2, {"layout": TP2, "shapes": {"q": (2,)}}, ArgumentError, "q"),
        ([{"a.w": np.zeros(2)}] * 2, {"layout": TP2, "shapes": {"a.w": (5,)}}, LayoutError, "a.w"),
        ([{"a.w": np.zeros(2)}] * 3, {"layout": TP2}, LayoutError, "one of 2 ranks"),
        ([{"b": ZEROS}, {"b": ZEROS + 1}], {"layout": WHOLE2}, MismatchError, "crc32c 42709aea on rank 0; crc32c"),
        ([{"a.w": reshard.Shard(np.zeros(2), (4,), (0,))}] * 2, {"layout": TP2}, ArgumentError, "says where it lies"),
    ],
)  # fmt: skip
def test_ranks_that_disagree(
    models: list[dict[str, object]], options: dict[str, Any], error: type[ReshardError], words: str, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    found = in_threads(
        len(models), lambda group: reshard.save(root, 1, models[group.rank], group=group, timeout=20, **options)
    )
    for one in found:
        assert isinstance(one, error), one
        assert words in str(one)
    assert not root.exists()


def test_options_that_differ_between_ranks(tmp_path: Path) -> None:
    root = tmp_path / "root"
    found = in_threads(
        2,
        lambda group: reshard.save(
            root, 1, {"b": np.zeros(2)}, group=group, layout=TP2, files={"dedup": group.rank == 0}, timeout=9
        ),
    )
    assert all("`dedup` is True on rank 0 and False on rank 1" in str(one) for one in found)


def save_copies(root: Path, group: Any, **options: Any) -> Any:
    """A tensor of which each rank has a copy of its own; `same` is equal."""
    arrays = {"b": np.full(2, 1.0 + group.rank), "same": np.zeros(3)}
    saved = reshard.save(root, 1, arrays, group=group, layout=WHOLE2, timeout=9, **options)
    return saved if options.get("blocking", True) else saved.result(30)


@pytest.mark.parametrize(
    "options", [{"blocking": False}, {"files": {"dedup": False}}, {"format": "checkpoint1"}], ids=str
)
def test_replicas_that_differ_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    found = in_threads(2, lambda group: save_copies(tmp_path / "root", group, **options))
    for one in found:
        assert isinstance(one, MismatchError), one
        assert "`b`: the copies on the ranks that hold it differ: crc32c " in str(one)
        assert " on rank 0; crc32c " in str(one)
        assert one.key == "b"
    assert not list((tmp_path / "root").rglob("*.safetensors"))
    (tmp_path / "other").mkdir()
    for report in in_threads(
        2, lambda group: save_copies(tmp_path / "other", group, verify={"check_replicas": False}, **options)
    ):
        assert isinstance(report, reshard.SaveReport), report


def test_one_pattern_is_not_taken_for_a_list_of_its_characters(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"`may_differ` is 'bias', expected a list of patterns, such as"):
        reshard.save(tmp_path, 1, {"bias": np.zeros(2)}, layout=WHOLE2, verify={"may_differ": "bias"})


@pytest.mark.parametrize("options", [{}, {"blocking": False}, {"format": "checkpoint1"}], ids=str)
def test_copies_that_may_differ_are_kept_for_each_rank(tmp_path: Path, options: dict[str, Any]) -> None:
    found = in_threads(2, lambda group: save_copies(tmp_path, group, verify={"may_differ": ["b*", "same"]}, **options))
    assert all(isinstance(report, reshard.SaveReport) for report in found), found
    with reshard.open(tmp_path) as opened:
        assert opened.read("b").tolist() in ([1, 1], [2, 2])
        for rank in range(2):
            kept = opened.extra(rank)["rank_local"]
            assert {name: array.tolist() for name, array in kept["differing"].items()} == {"b": [1.0 + rank] * 2}
            assert (kept["rank"], kept["world_size"]) == (rank, 2)


def test_equal_copies_leave_no_trace(tmp_path: Path) -> None:
    def work(group: Any) -> Any:
        return reshard.save(
            tmp_path,
            1,
            {"b": np.ones(2)},
            group=group,
            layout=WHOLE2,
            timeout=9,
            verify={"may_differ": ["*"]},
            extra={"n": 3},
        )

    assert all(isinstance(report, reshard.SaveReport) for report in in_threads(2, work))
    assert reshard.open(tmp_path).extra(1) == {"n": 3}


def test_arrays_that_are_being_filled_are_summed_when_they_are_ready(tmp_path: Path) -> None:
    def work(group: Any) -> Any:
        array = np.zeros(4)

        def ready() -> None:
            array[:] = group.rank if group.rank < 2 else 7

        pending = reshard.save(
            tmp_path, 1, {"b": array}, group=group, layout=WHOLE2, timeout=9, ready=ready, blocking=False,
            rank_local=RankLocal({"codes": array}),
        )  # fmt: skip
        return pending.result(30)

    for one in in_threads(2, work):
        assert isinstance(one, MismatchError), one
    protocol.release()
    root = tmp_path / "one"
    array = np.zeros(4)
    options: dict[str, Any] = {"ready": lambda: array.fill(5), "blocking": False}
    reshard.save(root, 1, {"b": array}, rank_local=RankLocal({"codes": array}), **options).result(30)
    assert reshard.open(root).extra()["rank_local"]["state"]["codes"].tolist() == [5] * 4


@pytest.mark.parametrize(
    ("extras", "words"),
    [
        ([{"n": {"a": 1}}, {"n": {"a": 2}}], "`n` in `extra` differs between ranks: `n.a` is 1 on rank 0, 2 on rank 1"),
        ([{"n": np.zeros(3)}, {"n": np.arange(3.0)}], "between ranks: `n[1]` is 0.0 on rank 0, 1.0 on rank 1"),
        ([{}, {"n": 1}], "`extra` has `n` on rank 1 and not on rank 0"),
        ([{"rank_local": 1}, {}], "`rank_local`, a name that is taken"),
        ([{"n": 1}, {}], None),
        ([{"n": {"a": 1, "b": float("nan")}}, {"n": {"b": float("nan"), "a": 1}}], None),
        ([{"n": reshard.per_rank(1)}, {"n": reshard.per_rank(2)}], None),
    ],
)
def test_extra_that_differs_between_ranks(tmp_path: Path, extras: list[dict[str, Any]], words: str | None) -> None:
    found = in_threads(
        2,
        lambda group: reshard.save(
            tmp_path, 1, {"b": np.ones(2)}, group=group, layout=WHOLE2, timeout=9, extra=extras[group.rank]
        ),
    )
    for one in found:
        if words is None:
            assert isinstance(one, reshard.SaveReport), one
        else:
            assert isinstance(one, MismatchError | ArgumentError), one
            assert words in str(one)


def test_ranks_that_write_nothing(tmp_path: Path) -> None:
    reports = in_threads(
        4,
        lambda group: reshard.save(
            tmp_path, 1, {"global_step": np.int32(8)}, group=group, timeout=9,
            layout={"mesh": {"dp": 4}, "rules": [{"match": "*"}]},
        ),
    )  # fmt: skip
    assert [report.n_files for report in reports] == [1] * 4
    assert original_reader.read_tree(tmp_path)["global_step"] == 8


def test_a_plan_serves_until_something_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from reshard.formats.checkpoint2 import save as module

    made: list[int] = []
    real = plan_iteration

    def counted(*args: Any, **options: Any) -> Any:
        made.append(1)
        return real(*args, **options)

    monkeypatch.setattr(module, "plan_iteration", counted)
    monkeypatch.setattr(module, "_plans", LastMade())
    narrow = np.zeros(3, np.int8)
    cases: list[tuple[int, dict[str, Array], dict[str, Any]]] = [
        (1, {"w": ZEROS}, {}),
        (0, {"w": ZEROS + 1}, {"common": {"epoch_num": 2}}),
        (1, {"w": ZEROS, "v": ZEROS}, {}),
        (1, {"w": np.zeros(3), "v": ZEROS}, {}),
        (1, {"w": narrow, "v": ZEROS}, {}),
        (1, {"w": narrow, "v": ZEROS}, {"files": {"prefix": "x"}}),
        (0, {"w": narrow + 1, "v": ZEROS}, {"files": {"prefix": "x"}}),
    ]
    for iteration, (n_made, model, options) in enumerate(cases):
        made.clear()
        reshard.save(tmp_path, iteration, model, commit={"durable": False}, **options)
        assert len(made) == n_made
        with reshard.open(tmp_path) as opened:
            assert as_bytes(opened.load()) == as_bytes(model)


def test_hosts_that_share_nothing_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    monkeypatch.setattr("reshard.verbs.save._host", lambda: threading.current_thread().name)
    model = {"w": np.zeros(2)}
    layout = {"mesh": {"dp": 2}, "rules": [{"match": "*"}]}

    def work(group: Any) -> Any:
        return reshard.save(tmp_path, 1, model, group=group, layout=layout, timeout=9)

    monkeypatch.delenv("SHARED_PATHS", raising=False)
    for error in in_threads(2, work):
        assert isinstance(error, ArgumentError)
        assert error.hint is not None
        assert "SHARED_PATHS" in error.hint
    monkeypatch.setenv("SHARED_PATHS", f"/elsewhere,{tmp_path}")
    assert [report.iteration for report in in_threads(2, work)] == [1, 1]


def test_a_name_of_a_subclass_of_text_is_saved_as_its_text(tmp_path: Path) -> None:
    class Name(str, enum.Enum):  # noqa: UP042  not StrEnum, whose text is its value
        W = "enumerated"

    given = [np.str_("w"), np.str_("w\u00e9"), np.str_("it's"), Name.W]
    for iteration in (1, 2):  # the second save uses the plan of the first
        reshard.save(tmp_path / "root", iteration, {name: np.full(3, i) for i, name in enumerate(given)})
    with reshard.open(tmp_path / "root") as checkpoint:
        assert sorted(checkpoint.keys()) == ["enumerated", "it's", "w", "w\u00e9"]
        for i, name in enumerate(["w", "w\u00e9", "it's", "enumerated"]):
            assert checkpoint.read(name).tolist() == [i] * 3


def join_descriptions() -> None:
    for thread in threading.enumerate():
        if thread.name == "reshard descriptions":
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.parametrize("many", [1, 1 << 30])
def test_descriptions_beside_the_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: int) -> None:
    monkeypatch.setattr(iterations, "_MANY_LINES", many)
    threads: list[str] = []

    def slow(*args: Any, **options: Any) -> object:
        threads.append(threading.current_thread().name)
        time.sleep(0.2)  # the shards are written, or have failed, by then
        return write_metadata(*args, **options)

    monkeypatch.setattr(iterations, "write_metadata", slow)
    arrays = {f"w{i}": np.arange(i + 1) for i in range(5)}
    reshard.save(tmp_path / "root", 1, arrays)
    with reshard.open(tmp_path / "root") as checkpoint:
        loaded = checkpoint.load()
    assert all(np.array_equal(loaded[name], array) for name, array in arrays.items())
    assert (threads == ["reshard descriptions"]) == (many == 1)

    def fail(*_: object, **__: object) -> object:
        raise StorageError("the disk is full")

    with monkeypatch.context() as patch:  # what the thread writes does not outlive the attempt
        patch.setattr(Checkpoint2Prepared, "write", fail)
        with pytest.raises(StorageError, match="the disk is full"):
            reshard.save(tmp_path / "root", 2, arrays)
        join_descriptions()
        assert not list((tmp_path / "root" / ".staging").iterdir())
    monkeypatch.setattr(iterations, "write_metadata", fail)
    with pytest.raises(StorageError, match="the disk is full"):
        reshard.save(tmp_path / "root", 2, arrays)
    assert not list((tmp_path / "root" / ".staging").iterdir())


class FailedError(Exception):
    pass


def fail_at_once(*_: object, **__: object) -> object:
    raise FailedError


def failing_save(root: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint2Prepared, "write", fail_at_once)
        reshard.save(root, 2, {"w": SQUARE})


def failing_conversion(root: Path) -> None:
    reshard.convert(root, root.with_name("target"), to="checkpoint2", progress=fail_at_once)


@pytest.mark.parametrize("act", [failing_save, failing_conversion])
@pytest.mark.parametrize("moment", ["start", "stop", "twice"])
def test_an_interrupt_does_not_leave_the_thread_of_the_descriptions_alone(
    moment: str, act: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends before the staging folder is removed, unless the user insists."""
    root = tmp_path / "root"
    reshard.save(root, 1, {"w": SQUARE})
    is_writing, states = threading.Event(), []
    start, end, abandon = threading.Thread.start, iterations.Descriptions._end, protocol.abandon
    begin = iterations.Descriptions.start
    waits = threading.Semaphore(0)

    def slow(*args: Any, **options: Any) -> object:
        is_writing.set()
        for _ in range({"start": 0, "stop": 1, "twice": 2}[moment]):
            waits.acquire(timeout=10)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        try:
            return write_metadata(*args, **options)
        finally:
            is_writing.clear()

    def watched_begin(descriptions: iterations.Descriptions) -> None:
        begin(descriptions)
        assert is_writing.wait(10)  # else the save fails before the thread begins, which then writes nothing

    def watched_end(descriptions: iterations.Descriptions) -> None:
        waits.release()
        end(descriptions)

    def interrupted_start(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "reshard descriptions":
            is_writing.wait(10)
            raise KeyboardInterrupt

    def watched_abandon(attempt: Attempt) -> None:
        states.append(is_writing.is_set())
        abandon(attempt)

    monkeypatch.setattr(iterations, "_MANY_LINES", 1)
    monkeypatch.setattr(iterations, "write_metadata", slow)
    monkeypatch.setattr(iterations.Descriptions, "start", watched_begin)
    monkeypatch.setattr(iterations.Descriptions, "_end", watched_end)
    monkeypatch.setattr(protocol, "abandon", watched_abandon)
    if moment == "start":
        monkeypatch.setattr(threading.Thread, "start", interrupted_start)
    with pytest.raises(KeyboardInterrupt):
        act(root)
    join_descriptions()
    assert states == [moment == "twice"]
    assert not list((root / ".staging").iterdir())
    assert not (tmp_path / "target").exists()
    with reshard.open(root) as checkpoint:
        assert checkpoint.iteration == 1


def test_descriptions_without_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread starts while the interpreter ends."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "reshard descriptions":
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    monkeypatch.setattr(iterations, "_MANY_LINES", 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        reshard.save(tmp_path, 1, {"w": SQUARE})
    with reshard.open(tmp_path) as checkpoint:
        assert np.array_equal(checkpoint.read("w"), SQUARE)
