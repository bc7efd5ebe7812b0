"""`reshard.save` in one process: what is given is what is found."""

from __future__ import annotations

import array
import json
import logging
import os
import stat
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping
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
from tests.helpers.threads import in_threads
from tests.write.saves import SQUARE, TP2, no_claim_outlives_a_test

import reshard
from reshard import _core
from reshard.commit import manifest, protocol
from reshard.commit.session import PassedOver, session_of
from reshard.errors import (
    ArgumentError,
    ClaimedError,
    DamagedFileError,
    LayoutError,
    MismatchError,
    ReshardError,
    StorageError,
    UnsupportedError,
)
from reshard.storage.location import locate
from reshard.torch import Checkpointer
from reshard.write import shard_files
from reshard.write.arrays import local_arrays as own_arrays
from reshard.write.collective_save import log_once
from reshard.write.rank_facts import LastMade

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.helpers.strategies import Array

__all__ = ["no_claim_outlives_a_test"]  # a fixture


pytestmark = pytest.mark.disk


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


@pytest.mark.slow(disk=False)
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
