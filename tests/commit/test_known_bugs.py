"""Bugs that cost others their checkpoints, re-created one by one: each test makes the situation and comes through it.

A test that is named after a bug first shows that a faithful imitation of it, a few lines, fails the very check that
ours then passes. The bugs:

| of                            | bug                                                                | here            |
|-------------------------------|--------------------------------------------------------------------|-----------------|
| the original, tracker         | rewritten in place, empty after a crash; its reader then raises    | `mindformers_1` |
| the original, saving again    | the complete folder is removed first                               | `mindformers_2` |
| the original, retention       | runs before an asynchronous save has ended; fails if the oldest    |                 |
|                               | is gone; forgets what was saved before the restart                 | `mindformers_3` |
| the original, metadata.json   | written before the others have written                             | `mindformers_4` |
| the original, completeness    | a file that exists is complete                                     | `mindformers_5` |
| the original, names           | `file_name` leads anywhere; all `*.safetensors` are loaded         | `mindformers_6` |
| the original, headers         | any length, overlaps and holes are accepted                        | `mindformers_7` |
| the original, documents       | 7 digits and `.safetensor`, the code has 8 and `.safetensors`      | `mindformers_8` |
| safetensors                   | size and name durable before the data: zeros after a loss of power | `safetensors_*` |
| safetensors                   | of two tensors of one name the last one wins                       | `safetensors_*` |
| verl #7952, rllm #897         | the tracker is never written: silent start from nothing            | `verl_7952`     |
| Orbax #394                    | the cleaner deletes the valid copies                               | `orbax_394`     |
| torch DCP                     | `.metadata` is deleted before the new one is renamed               | `dcp`           |
| transformers #47176, #46097,  |                                                                    |                 |
| diffusers #14175              | `weight_map` leads out of the folder                               | `weight_map`    |
| transformers #28364           | every rank renames the folder; one sees it late                    | `transformers`  |
| daxfs #28                     | a rename that first removes its target                             | `daxfs_28`      |
| mlx #3363                     | offsets are not compared with the shape                            | `mlx_3363`      |
| safetensors-cpp               | the product of a shape overflows                                   | `safetensors_*` |
| nvidia-resiliency-ext #359    | fsync before flush                                                 | `nvidia_*`      |
| Megatron-Bridge #3267         | the tracker takes the step that training has reached meanwhile     | `megatron_*`    |
| dlrover #990                  | the tracker names an empty folder while the save goes on           | `dlrover_990`   |
| RocksDB #10573                | the folder is not synced after the pointer was renamed             | `rocksdb_10573` |
| fsyncgate                     | a second fsync after a failed one says that all is well            | `fsyncgate`     |

All of them apply. Of two only a part does: what a file system itself does wrong (daxfs #28) can be survived but not
prevented; and of the race on a network file system (transformers #28364) one machine can show the rule, that one rank
alone renames and the others wait, and not the network.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import struct
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.helpers import original_reader, retained
from tests.helpers.gate import Gate
from tests.helpers.small_saves import fork, kill_self, killed_at, killed_at_step, sync_by_python, tracker
from tests.helpers.threads import in_threads

import reshard
from reshard import _core
from reshard.commit import protocol
from reshard.commit.roots import write_tracker
from reshard.commit.session import session_of
from reshard.errors import DamagedFileError, StorageError
from reshard.formats.checkpoint2 import iteration as plans
from reshard.storage.location import locate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reshard.storage.location import Location

TRACKER = "latest_checkpointed_iteration.txt"
SHARD = "model-0000000-0000001.safetensors"
SECRET = {"w": np.full((4, 3), 9, np.float32)}


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Iterations 100, 200 and 300, and a file outside that is nobody's business."""
    root = tmp_path / "root"
    for iteration in (100, 200, 300):
        save(root, iteration)
    save_file(SECRET, tmp_path / "secret.safetensors")
    yield root
    protocol.release()
    session_of(locate(root)).resumed = None


def content(iteration: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(iteration)
    return {"w": rng.random((4, 3), np.float32), "b": rng.random(5), "step": np.array(iteration)}


def save(root: Path, iteration: int, **options: Any) -> Any:
    return reshard.save(root, iteration, content(iteration), **{"commit": {"durable": False}, **options})


def folder(root: Path, iteration: int) -> Path:
    return root / f"iteration_{iteration:08d}"


def whole(iteration: int, arrays: dict[str, np.ndarray]) -> bool:
    return {k: a.tobytes() for k, a in arrays.items()} == {k: a.tobytes() for k, a in content(iteration).items()}


def check(root: Path, iteration: int) -> None:
    """A run resumes from this iteration, whole, and the next save works."""
    got = reshard.load(root)
    assert got.iteration == iteration
    assert whole(iteration, got.state)
    save(root, iteration + 5)
    assert reshard.load(root).iteration == iteration + 5
    assert whole(iteration + 5, original_reader.read_tree(root))


# -- the original, 1.1 to 1.8


def test_mindformers_1_a_crash_empties_the_tracker(root: Path) -> None:
    def in_place() -> None:
        with (root / TRACKER).open("w") as file:
            os.write(file.fileno(), b"")  # a change that the crash comes before
            file.write("400")
            kill_self()

    assert fork(in_place).result() is None
    with pytest.raises(ValueError, match="Invalid iteration"):
        original_reader.read_tree(root)
    check(root, 300)  # whoever left it so
    number = 0
    while killed_at(number, partial(write_tracker, locate(root), 300)):
        assert tracker(root) in {300, 305}
        write_tracker(locate(root), 305)
        number += 1
    assert number >= 3


@pytest.mark.slow
def test_mindformers_2_saving_again_removes_the_old_one_first(root: Path) -> None:
    protocol.release()
    backup = root.with_name("backup")
    shutil.copytree(root, backup)
    shutil.rmtree(folder(root, 300))  # and then it crashed
    with pytest.raises(FileNotFoundError):
        original_reader.read_tree(root)
    check(root, 200)
    protocol.release()
    n_steps = 0
    while True:
        shutil.rmtree(root)
        shutil.copytree(backup, root)
        was_killed = killed_at_step(n_steps, lambda: save(root, 300, common={"epoch_num": 7}))
        assert whole(300, original_reader.read_tree(root))
        assert reshard.load(root).iteration == 300
        if not was_killed:
            break
        n_steps += 1
    assert n_steps > 8
    assert original_reader.read_common(root).epoch_num == 7


class ListInMemory:
    """Retention as the original has it: a list of what this process has saved, cut right after each call of save."""

    def __init__(self, keep: int) -> None:
        self.saved: list[Path] = []
        self.keep = keep

    def after_save(self, path: Path) -> None:
        self.saved.append(path)
        if len(self.saved) > self.keep:
            shutil.rmtree(self.saved.pop(0))


def complete(root: Path) -> set[int]:
    """The iterations whose tensors are all there."""
    found = set()
    for one in (100, 200, 300, 400, 500):
        try:
            found |= {one} if whole(one, original_reader.read_tree(folder(root, one))) else set()
        except FileNotFoundError:
            continue
    return found


def test_mindformers_3_retention_does_not_wait_for_the_save(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = root.with_name("theirs")
    shutil.copytree(folder(root, 300), folder(theirs, 300))
    memory = ListInMemory(1)
    memory.after_save(folder(theirs, 300))
    folder(theirs, 400).mkdir()  # its files are being written in the background
    memory.after_save(folder(theirs, 400))
    assert complete(theirs) == set()
    gate = Gate(monkeypatch)
    pending = save(root, 400, blocking=False, keep=1)
    assert gate.reached.wait(30)
    assert complete(root) == {100, 200, 300}
    gate.open()
    pending.result(30)
    assert complete(root) == {400}


def test_mindformers_3_retention_fails_if_the_oldest_is_gone(root: Path) -> None:
    memory = ListInMemory(1)
    memory.after_save(folder(root, 100))
    shutil.rmtree(folder(root, 100))
    with pytest.raises(FileNotFoundError):
        memory.after_save(folder(root, 200))
    assert save(root, 400, keep=2).warnings == ()
    assert complete(root) == {300, 400}


def test_mindformers_3_retention_forgets_what_was_saved_before_the_restart(root: Path) -> None:
    protocol.release()
    memory = ListInMemory(1)  # of the new process
    save(root, 400)
    memory.after_save(folder(root, 400))
    assert complete(root) == {100, 200, 300, 400}
    save(root, 500, keep=1)
    assert complete(root) == {500}


def test_mindformers_4_metadata_comes_before_the_shards(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(folder(root, 300), folder(root, 400))
    for path in folder(root, 400).iterdir():
        if path.name != "metadata.json":
            path.unlink()  # rank 0 was faster than all others
    check(root, 300)
    seen: list[set[str]] = []
    real = plans.write_descriptions

    def spy(plan: Any, staging: Location, **options: Any) -> Any:
        seen.append(set(staging.names()))
        return real(plan, staging, **options)

    monkeypatch.setattr("reshard.formats.checkpoint2.iteration.write_descriptions", spy)
    layout = {"mesh": {"tp": 4}, "rules": [{"match": "*", "cut": ["tp"]}]}
    work = partial(_save_a_row, root, 500, layout)
    assert not [one for one in in_threads(4, work) if isinstance(one, Exception)]
    assert seen == [{f"model-{rank:07d}-0000004.safetensors" for rank in range(4)}]


def _save_a_row(root: Path, iteration: int, layout: Any, group: Any) -> Any:
    rows = content(iteration)["w"][group.rank : group.rank + 1]
    return reshard.save(root, iteration, {"w": rows}, layout=layout, group=group, commit={"durable": False}, timeout=20)


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.999])
def test_mindformers_5_a_file_that_exists_is_complete(share: float, root: Path) -> None:
    path = folder(root, 300) / SHARD
    os.truncate(path, int(share * path.stat().st_size))
    metadata = json.loads((path.parent / "metadata.json").read_text())
    names = {entry["file_name"] for entries in metadata["storage_data"].values() for entry in entries}
    assert all((path.parent / name).exists() for name in names)  # complete, to the original
    with pytest.raises(DamagedFileError):
        reshard.open(path.parent)
    check(root, 200)


def without_manifest(path: Path) -> Path:
    """As if the original had written it: no manifest, and no mark of ours in its files."""
    for name in ("manifest.json", "checksums.bin", ".tracked"):
        (path / name).unlink(missing_ok=True)
    save_file(load_file(path / SHARD), path / SHARD, {"format": "ms"})
    return path


@pytest.mark.parametrize("name", ["../../secret.safetensors", "{}/secret.safetensors"], ids=["above", "absolute"])
@pytest.mark.parametrize("is_sealed", [False, True])
def test_mindformers_6_a_file_name_leads_outside(name: str, root: Path, *, is_sealed: bool) -> None:
    name = name.format(root.parent)
    path = without_manifest(folder(root, 300)) if not is_sealed else folder(root, 300)
    metadata = path / "metadata.json"
    metadata.write_text(metadata.read_text().replace(SHARD, name))
    assert original_reader.read_tree(root, keys={"w"})["w"][0, 0] == 9, "the imitation loads what lies outside"
    with pytest.raises(DamagedFileError):
        reshard.open(path)
    got = reshard.load(root)
    assert whole(200, got.state)


def test_mindformers_6_every_shard_file_of_the_folder_is_loaded(root: Path) -> None:
    for number, name in enumerate(("half-written.tmp.safetensors", "model-0000009-0000010.safetensors")):
        save_file({f"stray{number}": np.ones(2)}, folder(root, 300) / name)
    (folder(root, 300) / "metadata.json").rename(root / "aside")
    assert {"stray0", "stray1"} < set(original_reader._read_whole_files(folder(root, 300)))
    (root / "aside").rename(folder(root, 300) / "metadata.json")
    assert set(reshard.open(root)) == set(content(300))
    check(root, 300)


def shard_of(header: Any, data: bytes, n_header: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if n_header is None else n_header) + text + data


def entry(shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    "data",
    [
        shard_of({"w": entry([1], 0, 4)}, bytes(4), 1 << 63),
        shard_of({"w": entry([1], 0, 4)}, bytes(4), 1 << 40),
        shard_of({"w": entry([2], 0, 8), "v": entry([2], 4, 12)}, bytes(12)),
        shard_of({"w": entry([1], 0, 4), "v": entry([1], 8, 12)}, bytes(12)),
        shard_of({"w": entry([1], 0, 4)}, bytes(12)),
    ],
    ids=["a length of 2**63", "a length of 2**40", "an overlap", "a hole", "a tail"],
)
def test_mindformers_7_any_header_is_taken(data: bytes, tmp_path: Path) -> None:
    def naive(data: bytes) -> dict[str, bytes]:
        (n_header,) = struct.unpack("<Q", data[:8])
        header, rest = data[8 : 8 + n_header], data[8 + n_header :]
        offsets = {name: one["data_offsets"] for name, one in json.JSONDecoder().raw_decode(header.decode())[0].items()}
        return {name: rest[start:stop] for name, (start, stop) in offsets.items()}

    try:
        assert naive(data), "no complaint"
    except ValueError:  # it has read all of the file as its header: as much as the length says, if it is there
        assert struct.unpack("<Q", data[:8])[0] > len(data)
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(DamagedFileError):
        reshard.open(tmp_path / "x.safetensors")


def test_mindformers_8_the_documents_show_other_names_than_the_code(root: Path) -> None:
    assert sorted(path.name for path in folder(root, 300).glob("*.s*")) == [SHARD]
    as_documented = root.with_name("documented")
    path = as_documented / "iteration_0000300"
    shutil.copytree(without_manifest(folder(root, 300)), path)
    (path / SHARD).rename((path / SHARD).with_suffix(".safetensor"))
    metadata = path / "metadata.json"
    metadata.write_text(metadata.read_text().replace(".safetensors", ".safetensor"))
    (as_documented / TRACKER).write_text("300")
    with pytest.raises(FileNotFoundError):  # a tracker never leads the original to what its documents describe
        original_reader.read_tree(as_documented)
    got = reshard.load(as_documented)
    assert got.iteration == 300
    assert whole(300, got.state)


# -- files


@pytest.mark.parametrize("share", [0, 0.5, 0.95])
def test_safetensors_zeros_after_a_crash_are_detected(share: float, root: Path) -> None:
    """Its length was set first and its header was written back; what was not yet are zeros, after a loss of power."""
    path = folder(root, 300) / SHARD
    data = path.read_bytes()
    header_bytes = 8 + int.from_bytes(data[:8], "little")
    n_kept = header_bytes + int(share * (len(data) - header_bytes))
    path.write_bytes(data[:n_kept] + bytes(len(data) - n_kept))
    loaded = load_file(path)
    assert set(loaded) == set(content(300)), "no complaint"
    assert not whole(300, loaded), "and other arrays"
    with pytest.raises(DamagedFileError, match=SHARD), reshard.open(path.parent) as opened:
        opened.load()
    check(root, 200)


def test_safetensors_of_two_tensors_of_one_name_the_last_one_wins(tmp_path: Path) -> None:
    first, second = (f'"w":{json.dumps(entry([1], start, start + 4))}' for start in (0, 4))
    path = tmp_path / "x.safetensors"
    path.write_bytes(shard_of(f"{{{first},{second}}}".encode(), struct.pack("<ff", 1, 2)))
    try:
        assert load_file(path)["w"] == 2
    except Exception as error:  # noqa: BLE001  a release of it that refuses the hole
        assert "header" in str(error).lower()  # noqa: PT017
    with pytest.raises(DamagedFileError):
        reshard.open(path)


def test_mlx_3363_offsets_are_compared_with_the_shape(tmp_path: Path) -> None:
    header = {"w": entry([4, 4], 0, 16), "v": entry([4], 16, 32)}
    data = np.arange(8, dtype=np.float32).tobytes() + bytes(32)
    naive = np.frombuffer(data, np.float32, math.prod(header["w"]["shape"]), 0)
    assert naive[4] == 4, "an element of `v`"
    path = tmp_path / "x.safetensors"
    path.write_bytes(shard_of(header, data[:32]))
    with pytest.raises(DamagedFileError):
        reshard.open(path)


@pytest.mark.parametrize("shape", [[1 << 32, 1 << 32], [1 << 63, 2], [3, 1 << 62, 4], [(1 << 64) - 1, 2]])
def test_safetensors_cpp_the_product_of_a_shape_does_not_overflow(shape: list[int], tmp_path: Path) -> None:
    n_bytes = (math.prod(shape) * 4) & 0xFFFFFFFFFFFFFFFF
    if n_bytes > 64:
        shape, n_bytes = [1 << 33, 1 << 31, *shape], 0
    assert (math.prod(shape) * 4) % (1 << 64) == n_bytes, "in 64 bits it fits"
    path = tmp_path / "x.safetensors"
    path.write_bytes(shard_of({"w": entry(shape, 0, n_bytes)}, bytes(n_bytes)))
    with pytest.raises(DamagedFileError):
        reshard.open(path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "{}/secret.safetensors", "x/../../secret.safetensors"])
def test_transformers_47176_46097_diffusers_14175_a_weight_map_leads_outside(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    (folder / "x").mkdir(parents=True)
    save_file(SECRET, tmp_path / "secret.safetensors")
    name = name.format(tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    assert load_file(folder / name)["w"][0, 0] == 9, "the imitation joins the names"
    with pytest.raises(DamagedFileError):
        reshard.open(folder)


# -- which one is taken, which ones are removed


def test_verl_7952_rllm_897_without_a_tracker_nothing_starts_from_nothing(root: Path) -> None:
    save(root, 400, blocking=False).result(30)
    assert tracker(root) == 400, "after a save in the background, too"
    (root / TRACKER).unlink()
    found = tracker(root)  # the imitation looks nowhere else
    assert (found or 0) == 0
    assert not reshard.load(root).decision.fresh
    check(root, 400)
    (root / TRACKER).unlink()
    for path in root.glob("iteration_*/manifest.json"):
        path.write_text("torn")
    with pytest.raises(DamagedFileError):
        reshard.load(root)


def damage(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def test_orbax_394_the_cleaner_never_deletes_the_only_valid_copy(root: Path) -> None:
    damage(folder(root, 300) / "manifest.json")
    damage(folder(root, 200) / SHARD)
    theirs = root.with_name("theirs")
    shutil.copytree(root, theirs)
    for path in sorted(theirs.glob("iteration_*"))[:-1]:  # the newest one is kept, whatever it is
        shutil.rmtree(path)
    with pytest.raises(DamagedFileError):
        reshard.load(theirs)
    for _ in range(2):
        assert retained.apply(locate(root), reshard.Retention(keep=1)).iterations == ()
        got = reshard.load(root)
        assert got.iteration == 100
        assert whole(100, got.state)
    save(root, 150, keep=1)
    got = reshard.load(root)
    assert got.iteration == 150
    assert whole(150, got.state)
    assert not folder(root, 100).exists(), "now it may go"


def test_orbax_394_the_cleaner_leaves_what_is_being_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    pending = save(root, 400, blocking=False)
    assert gate.reached.wait(30)
    (staged,) = (root / ".staging").iterdir()
    protocol.recover(locate(root))  # all that looks like debris goes
    retained.apply(locate(root), reshard.Retention(keep=1))
    assert (staged / SHARD).exists()
    gate.open()
    pending.result(30)
    check(root, 400)


def killed_while_replacing(replace: Callable[[Path, str], None], path: Path) -> list[str | None]:
    """What a file holds after a kill at each change that `replace` makes."""
    held = []
    number = 0
    while True:
        path.write_text("old")
        was_killed = killed_at(number, lambda: replace(path, "new"))
        held.append(path.read_text() if path.exists() else None)
        path.unlink(missing_ok=True)
        if not was_killed:
            return held
        number += 1


def test_dcp_nothing_is_deleted_before_the_new_one_is_there(tmp_path: Path) -> None:
    def theirs(path: Path, text: str) -> None:
        temporary = path.with_name("tmp")
        temporary.write_text(text)
        os.unlink(path)  # noqa: PTH108
        os.rename(temporary, path)  # noqa: PTH104

    assert None in killed_while_replacing(theirs, tmp_path / "theirs")
    ours = killed_while_replacing(lambda path, text: locate(path).replace(text), tmp_path / "ours")
    assert set(ours) == {"old", "new"}
    assert ours[-1] == "new"


def test_daxfs_28_a_rename_that_removes_its_target_first(root: Path) -> None:
    """The file system itself crashed in between: no tracker, and the new one still under its temporary name."""
    (root / TRACKER).rename(root / f".{TRACKER}.0123456789abcdef.tmp")
    with pytest.raises(FileNotFoundError):
        original_reader.read_tree(root)
    protocol.release()
    check(root, 300)
    assert not list(root.glob(".*.tmp"))


def test_transformers_28364_one_rank_alone_renames(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = root / "tmp-checkpoint"
    staging.mkdir()
    were_there = [staging.exists() for _ in range(2)]  # both ranks look, and then both rename
    staging.rename(root / "checkpoint")
    with pytest.raises(FileNotFoundError):
        staging.rename(root / "checkpoint")
    assert all(were_there)
    (root / "checkpoint").rmdir()

    threads: dict[int, int] = {}
    renamed: list[int] = []
    real, real_open = _core.rename, os.open
    n_hidden = [3]

    def rename(*args: Any, **options: Any) -> None:
        renamed.append(threads[threading.get_ident()])
        real(*args, **options)

    def late(path: Any, flags: int, *args: Any, **options: Any) -> int:
        # To rank 1 the folder that rank 0 made is not there yet, as over a network.
        is_staging = Path(os.fspath(path)).parent.name == ".staging"
        if is_staging and threads.get(threading.get_ident()) == 1 and n_hidden[0]:
            n_hidden[0] -= 1
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return real_open(path, flags, *args, **options)

    monkeypatch.setattr(_core, "rename", rename)
    monkeypatch.setattr(os, "open", late)

    def work(group: Any) -> Any:
        threads[threading.get_ident()] = group.rank
        layout = {"mesh": {"tp": 4}, "rules": [{"match": "*", "cut": ["tp"]}]}
        return _save_a_row(root, 400, layout, group)

    results = in_threads(4, work)
    assert not [one for one in results if isinstance(one, Exception)], results
    assert renamed
    assert set(renamed) == {0}
    assert n_hidden == [0]
    with reshard.open(root) as opened:
        assert opened.read("w").tobytes() == content(400)["w"].tobytes()


# -- when things are told


def test_megatron_bridge_3267_training_goes_on_while_the_save_does(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"now": 400}

    def finalize() -> int:
        return step["now"]

    step["now"] = 407
    assert finalize() != 400, "the imitation asks when it ends"
    gate = Gate(monkeypatch)
    arrays, common, extra = content(400), {"global_step": 400}, {"loop": {"step": 400, "seen": [400]}}
    pending = reshard.save(root, 400, arrays, common=common, extra=extra, metrics={"step": 400}, blocking=False)
    assert gate.reached.wait(30)
    for array in arrays.values():
        array[...] = 407
    common["global_step"] = 407
    extra["loop"]["step"] = 407
    extra["loop"]["seen"].append(407)  # type: ignore[attr-defined]
    gate.open()
    pending.result(30)
    got = reshard.load(root)
    assert tracker(root) == got.iteration == 400
    assert whole(400, got.state)
    assert got.common is not None
    assert got.common.global_step == 400
    assert got.extra == {"loop": {"step": 400, "seen": [400]}}


def test_dlrover_990_the_tracker_never_names_an_empty_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = root.with_name("theirs")
    shutil.copytree(root, theirs)
    folder(theirs, 400).mkdir()
    (theirs / TRACKER).write_text("400")  # and then the data is written in the background
    with pytest.raises(FileNotFoundError):
        original_reader.read_tree(theirs)
    check(theirs, 300)
    protocol.release(locate(theirs))
    gate = Gate(monkeypatch)
    pending = save(root, 400, blocking=False)
    assert gate.reached.wait(30)
    assert not folder(root, 400).exists()
    assert whole(300, original_reader.read_tree(root))
    gate.open()
    pending.result(30)
    assert whole(400, original_reader.read_tree(root))


# -- syncs


class Synced:
    """Every sync and rename that Python makes, in order, with the size that the file had at that moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str, int]] = []
        real_sync, real_replace = os.fsync, os.replace

        def fsync(handle: int) -> None:
            path = Path(f"/proc/self/fd/{handle}").readlink()
            size = 0 if path.is_dir() else os.fstat(handle).st_size
            self.events.append(("sync", path.name.removeprefix(".").split(".tmp")[0], size))
            real_sync(handle)

        def replace(source: Any, target: Any) -> None:
            self.events.append(("name", Path(target).name, Path(source).stat().st_size))
            real_replace(source, target)

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "replace", replace)
        monkeypatch.setattr(_core, "sync_together", sync_by_python)

    def unsynced(self) -> list[str]:
        """Files that got their names with other bytes than were synced. Those of a save are named by its manifest."""
        left = []
        seals = [number for number, one in enumerate(self.events) if one[:2] == ("name", "manifest.json")]
        for number, (kind, name, size) in enumerate(self.events):
            end = min((one for one in seals if one >= number), default=number)
            before = [one for one in self.events[:end] if one[0] == "sync" and one[1].startswith(name)]
            if kind == "name" and (not before or before[-1][2] != size):
                left.append(name)
        return left

    def folders_after(self, name: str) -> list[str]:
        """What was synced after a file got its name."""
        last = max(number for number, one in enumerate(self.events) if one[:2] == ("name", name))
        return [one[1] for one in self.events[last:] if one[0] == "sync"]


def test_nvidia_resiliency_ext_359_what_is_synced_has_been_flushed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = Synced(monkeypatch)
    with (root / "theirs.tmp").open("wb") as file:
        file.write(b"content")
        os.fsync(file.fileno())
    os.replace(root / "theirs.tmp", root / "theirs")  # noqa: PTH105
    assert synced.unsynced() == ["theirs"]
    synced.events.clear()
    save(root, 400, commit={"durable": True}, extra={"a": 1})
    named = {name for kind, name, _ in synced.events if kind == "name"}
    assert named >= {TRACKER, "manifest.json", "checksums.bin", "common.json", "metadata.json", "extra-0000000.json"}
    assert synced.unsynced() == []


def test_rocksdb_10573_the_folder_is_synced_after_the_pointer_was_renamed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = Synced(monkeypatch)
    theirs = root.parent / "CURRENT"
    theirs.with_suffix(".tmp").write_text("7")
    os.replace(theirs.with_suffix(".tmp"), theirs)  # noqa: PTH105
    assert root.parent.name not in synced.folders_after("CURRENT")
    synced.events.clear()
    save(root, 400, commit={"durable": True})
    assert root.name in synced.folders_after(TRACKER)
    assert "manifest.json" in {name for kind, name, _ in synced.events if kind == "name"}
    assert "iteration_00000400" in synced.folders_after("manifest.json")


def test_fsyncgate_a_failed_sync_is_never_made_good_by_a_second_one(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync
    failed: set[int] = set()
    count = [0]
    again: list[int] = []

    def fsync(handle: int) -> None:
        inode = os.fstat(handle).st_ino
        count[0] -= 1
        if count[0] == 0:
            failed.add(inode)
            raise OSError(errno.EIO, "Input/output error")
        if inode in failed:
            again.append(inode)  # the pages count as clean: this says nothing
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(_core, "sync_together", sync_by_python)
    with (root / "theirs").open("wb") as file:
        count[0] = 1
        for _ in range(2):
            try:
                os.fsync(file.fileno())
            except OSError:
                continue
            break
    assert again, "the imitation tries again, and believes it"
    iteration, n_failed = 310, 0
    while True:
        failed.clear()
        again.clear()
        iteration += 10
        count[0] = n_failed + 1
        if not _fails(lambda: save(root, iteration, commit={"durable": True})):  # noqa: B023
            break
        assert not again, f"synced again after sync {n_failed}"
        count[0] = 0
        got = reshard.load(root)
        assert whole(got.iteration or 0, got.state)
        assert not list((root / ".staging").iterdir())
        n_failed += 1
    assert n_failed > 8
    assert whole(iteration, original_reader.read_tree(root))


def _fails(act: Callable[[], object]) -> bool:
    try:
        act()
    except StorageError as error:
        assert error.errno == errno.EIO  # noqa: PT017
        return True
    return False
