"""Every damage to a checkpoint with a manifest is found, before or while it is read, and the older one is used.

The trees are written by `sealed`. Damage is found if there is an error or the result is unchanged; a wrong array is a
bug.
"""

from __future__ import annotations

import datetime as dt
import fcntl
import gc
import json
import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.helpers import sealed
from tests.helpers.sealed import FILES, TP2
from tests.helpers.unprivileged import closed, nobody, reachable

import reshard
from reshard import _core
from reshard.commit import manifest as manifests
from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    DamagedFileError,
    EmptyRootError,
    MismatchError,
    ReshardError,
    StorageError,
    UnsupportedError,
)
from reshard.ranks.messages import decode, encode
from reshard.storage.location import locate
from reshard.values.events import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reshard.formats.base import CheckpointData
    from reshard.storage.location import Location

__all__ = ["reachable"]  # a fixture

TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Iterations 5 and 10, both whole; the tracker names 10."""
    root = tmp_path / "root"
    sealed.make(root, 5)
    sealed.make(root, 10, previous_tracker=5)
    return root


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """The same with the smallest trees."""
    root = tmp_path / "tiny"
    sealed.make_tiny(root, 5)
    sealed.make_tiny(root, 10, previous_tracker=5)
    return root


def assert_is(checkpoint: reshard.Checkpoint, iteration: int, arrays: dict[str, np.ndarray]) -> None:
    assert checkpoint.iteration == iteration
    assert checkpoint.verified
    assert checkpoint.common is not None
    assert checkpoint.common.global_step == iteration
    for found in (checkpoint.load(), checkpoint.load(copy=False), {key: checkpoint.read(key) for key in checkpoint}):
        assert set(found) == set(arrays)
        assert all(found[key].tobytes() == array.tobytes() for key, array in arrays.items())


def tiny_arrays(iteration: int) -> dict[str, np.ndarray]:
    arrays = sealed.arrays_of(iteration, (2, 3))
    return {"w": arrays["w"], "b": arrays["b"]}


# -- whole


@pytest.mark.parametrize("method", ["map", "read"])
def test_a_verified_checkpoint_is_read(root: Path, method: Any) -> None:
    with reshard.open(root, method=method) as opened:
        assert_is(opened, 10, sealed.arrays_of(10))
        assert (opened.skipped, opened.manifest) == ((), manifests.read(locate(root / "iteration_00000010")))
        own = opened.load(TP2, rank=1)
        assert own["w"].tobytes() == sealed.arrays_of(10)["w"][2:].tobytes()
    with reshard.open(root / "iteration_00000005") as opened:
        assert_is(opened, 5, sealed.arrays_of(5))


def test_equal_files_are_shared_out_and_each_is_compared_once(root: Path) -> None:
    """Files of equal size: each rank compares its own, and all ranks together compare all."""
    folder = root / "iteration_00000010"
    for name in FILES.values():
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        found = []
        for rank in range(4):
            with reshard.open(folder) as opened:
                try:
                    opened.scrub(share=(rank, 4))
                except DamagedFileError as error:
                    found.append(str(error))
        assert [name in text for text in found] == [True]
        (folder / name).write_bytes(data)


def test_a_tensor_in_no_description_is_read(tiny: Path) -> None:
    with reshard.open(tiny) as opened:
        assert_is(opened, 10, tiny_arrays(10))


def test_what_the_original_wrote_is_unverified() -> None:
    with reshard.open(Path(__file__).parents[1] / "data" / "mindspore" / "ckpt2" / "checkpoint") as opened:
        assert (opened.verified, opened.manifest) == (False, None)
        assert opened.load(verify="full")  # nothing to compare with, and nothing to refuse


def test_verify_is_one_of_three(root: Path) -> None:
    with reshard.open(root) as opened, pytest.raises(ArgumentError, match="touched"):
        opened.load(verify="sometimes")  # type: ignore[arg-type]


# -- bits


def flipped(path: Path) -> Iterator[int]:
    """Flip every bit of a file, one at a time."""
    data = path.read_bytes()
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        yield bit
    path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["manifest.json", "metadata.json", "common.json", "checksums.bin"])
def test_every_bit_of_the_small_files(name: str, tiny: Path) -> None:
    """Each is found when the folder is opened; every so often the older iteration is taken and read as well."""
    folder = tiny / "iteration_00000010"
    for bit in flipped(folder / name):
        with pytest.raises(DamagedFileError):
            reshard.open(folder)
        if bit % 127 == 0:
            with reshard.open(tiny) as opened:
                assert_is(opened, 5, tiny_arrays(5))
                assert [skipped for skipped, _ in opened.skipped] == ["iteration_00000010"]


@pytest.mark.slow
def test_every_bit_of_a_header(tiny: Path) -> None:
    folder = tiny / "iteration_00000010"
    header_bytes = manifests.read(locate(folder)).shards[sealed.TINY].header_bytes
    for bit in flipped(folder / sealed.TINY):
        if bit == 8 * header_bytes:
            break
        with pytest.raises(DamagedFileError):
            reshard.open(folder)
        if bit % 61 == 0:
            with reshard.open(tiny) as opened:
                assert_is(opened, 5, tiny_arrays(5))


def test_every_bit_of_the_tracker(tiny: Path) -> None:
    """It says 10: any other text is of no use, but for one that names iteration 5 or 10, and those are whole."""
    taken = set()
    for _ in flipped(tiny / TRACKER):
        with reshard.open(tiny) as opened:
            assert opened.iteration in (5, 10)
            assert_is(opened, opened.iteration, tiny_arrays(opened.iteration))
            taken.add(opened.iteration)
    assert 10 in taken


@pytest.mark.slow
@pytest.mark.parametrize("method", ["map", "read"])
def test_random_bits_of_the_payload(method: Any, tmp_path: Path) -> None:
    """10,000 each way, in files of several chunks: found by whatever reads the chunk."""
    shape = (400, 500)
    folder = sealed.make(tmp_path, 1, shape)
    truth = sealed.arrays_of(1, shape)
    rng = np.random.default_rng(7)
    manifest = manifests.read(locate(folder))
    with reshard.open(folder, method=method) as opened:
        for n in range(10_000):
            name = list(FILES.values())[rng.integers(4)]
            entry = manifest.shards[name]
            at, bit = int(rng.integers(entry.header_bytes, entry.n_bytes)), int(rng.integers(8))
            file = os.open(folder / name, os.O_RDWR)
            (byte,) = os.pread(file, 1, at)
            os.pwrite(file, bytes([byte ^ 1 << bit]), at)
            key = "adam_m.w" if name.startswith("opt") else "w"
            # Two chunks of a rank's half: the row that has the byte, and one of the other chunk.
            row = min((at - entry.header_bytes) // 2000, 199) + (200 if "-0000001-" in name else 0)
            with pytest.raises(DamagedFileError) as caught:
                opened.read(key, row) if n % 10 else opened.load(keys=[key], copy=n % 20 == 0)
            assert name in str(caught.value)
            os.pwrite(file, bytes([byte]), at)
            os.close(file)
        assert all(opened.read(key).tobytes() == array.tobytes() for key, array in truth.items())


def test_only_what_is_touched_is_compared(tmp_path: Path) -> None:
    """One bit is wrong in the second chunk of rank 0's model file."""
    shape = (400, 500)
    folder, truth = sealed.make(tmp_path, 1, shape), sealed.arrays_of(1, shape)
    path = folder / FILES["model", 0]
    change(path, sealed.CHUNK + 100)
    with reshard.open(tmp_path) as opened:
        assert opened.read("w", slice(0, 100)).tobytes() == truth["w"][:100].tobytes()
        assert opened.load(TP2, rank=1)["w"].tobytes() == truth["w"][200:].tobytes()
        for verify in ("touched", "full"):
            with pytest.raises(DamagedFileError) as caught:
                opened.load(keys=["w"], verify=verify)
            assert caught.value.path == str(path)
            assert str(sealed.CHUNK) in str(caught.value)  # where the bytes begin
            assert "w" in str(caught.value)
        with pytest.raises(DamagedFileError):  # in a file that is not wanted
            opened.read("adam_m.w", verify="full")
        assert opened.load(keys=["w"], verify="structure")["w"].tobytes() != truth["w"].tobytes()
        out = np.zeros(shape, np.float32)
        with pytest.raises(DamagedFileError, match="undefined"):
            opened.read("w", out=out)


# -- lengths, and files that are others


def change(path: Path, at: int) -> None:
    """Flip a bit."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


@pytest.mark.slow
def test_every_length_of_every_file(tiny: Path) -> None:
    folder = tiny / "iteration_00000010"
    for path in sorted(folder.glob("[!.]*")):
        data = path.read_bytes()
        for length in (*range(len(data)), len(data) + 1, len(data) + 4096):
            path.write_bytes((data + bytes(4096))[:length])
            with pytest.raises(DamagedFileError):
                reshard.open(folder)
            if length % 31 == 0:
                with reshard.open(tiny) as opened:
                    assert_is(opened, 5, tiny_arrays(5))
        path.write_bytes(data)
    with reshard.open(tiny) as opened:
        assert_is(opened, 10, tiny_arrays(10))


def test_every_length_of_the_tracker(tiny: Path) -> None:
    for text in ("", "1", "10", "10\n", "10\n\n", "100"):
        (tiny / TRACKER).write_text(text)
        with reshard.open(tiny) as opened:
            assert opened.iteration == 10  # as the tracker says, or as the highest
    (tiny / TRACKER).write_text("5")
    with reshard.open(tiny) as opened:
        assert opened.iteration == 5  # 10 was tracked once: somebody went back


def swap(a: Path, b: Path) -> None:
    one, other = a.read_bytes(), b.read_bytes()
    a.write_bytes(other)
    b.write_bytes(one)


def instead(path: Path, make: Callable[[Path], None]) -> None:
    path.unlink()
    make(path)


OTHERS: dict[str, Callable[[Path], object]] = {
    "a shard file removed": lambda folder: (folder / FILES["model", 1]).unlink(),
    "an optimizer file removed": lambda folder: (folder / FILES["opt", 0]).unlink(),
    "metadata removed": lambda folder: (folder / "metadata.json").unlink(),
    "common removed": lambda folder: (folder / "common.json").unlink(),
    "sums removed": lambda folder: (folder / "checksums.bin").unlink(),
    "the manifest removed": lambda folder: (folder / "manifest.json").unlink(),
    "renamed": lambda folder: (folder / FILES["model", 1]).rename(folder / "model-0000002-0000003.safetensors"),
    "another case": lambda folder: (folder / FILES["model", 1]).rename(folder / FILES["model", 1].upper()),
    "swapped between ranks": lambda folder: swap(folder / FILES["model", 0], folder / FILES["model", 1]),
    "swapped between parts": lambda folder: swap(folder / FILES["opt", 0], folder / FILES["opt", 1]),
    "swapped between iterations": lambda folder: shutil.copy(
        folder.parent / "iteration_00000005" / FILES["model", 1], folder / FILES["model", 1]
    ),
    "metadata of another iteration": lambda folder: (folder / "metadata.json").write_bytes(
        (folder / "metadata.json").read_bytes().replace(b"Float32", b"float32")
    ),
    "the manifest of another iteration": lambda folder: shutil.copy(
        folder.parent / "iteration_00000005" / "manifest.json", folder / "manifest.json"
    ),
    "zeros": lambda folder: (folder / FILES["model", 0]).write_bytes(
        bytes((folder / FILES["model", 0]).stat().st_size)
    ),
    "a tail of zeros": lambda folder: (folder / FILES["model", 0]).write_bytes(
        (folder / FILES["model", 0]).read_bytes()[:-8] + bytes(8)
    ),
    "a link in place of a file": lambda folder: instead(
        folder / FILES["model", 1], lambda path: path.symlink_to(folder / FILES["model", 0])
    ),
    "a pipe in place of a file": lambda folder: instead(folder / "common.json", os.mkfifo),
    "a pipe in place of the manifest": lambda folder: instead(folder / "manifest.json", os.mkfifo),
    "a folder in place of a file": lambda folder: instead(folder / FILES["opt", 1], os.mkdir),
}


ONLY_PAYLOAD = {"a tail of zeros", "swapped between ranks", "swapped between parts", "swapped between iterations"}


@pytest.mark.parametrize("what", OTHERS)
def test_other_files_in_place_of_the_right_ones(what: str, root: Path) -> None:
    """Found when the folder is opened or at the latest when it is read; the root's older iteration is whole."""
    folder = root / "iteration_00000010"
    OTHERS[what](folder)
    with pytest.raises((DamagedFileError, CheckpointNotFoundError)), reshard.open(folder) as opened:
        opened.load()
    try:
        with reshard.open(root) as opened:
            assert opened.load()
            assert opened.iteration == 5
            assert opened.skipped[0][0] == folder.name
    except DamagedFileError:
        assert what in ONLY_PAYLOAD  # `open` does not roll back from what is found while bytes are read


def test_planted_files_are_ignored_and_told_of(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = root / "iteration_00000010"
    save_file({"w": np.zeros((4, 2), np.float32), "x": np.ones(2)}, folder / "model-0000000-0000009.safetensors")
    save_file({"y": np.ones(2)}, folder / "a.safetensors")
    (folder / "tiles.json").write_text('{"version": 1, "layout": null, "tensors": {}}')
    with caplog.at_level(logging.WARNING), reshard.open(root) as opened:
        assert_is(opened, 10, sealed.arrays_of(10))
    assert any("`a.safetensors` and 1 more" in message for message in caplog.messages)


@pytest.mark.parametrize("name", ["extra-0000000.json", "extra-0000001.arrays"])
def test_files_that_opening_does_not_read_are_looked_at(name: str, root: Path) -> None:
    """State of a trainer: whoever asks for it would find out too late."""
    folder = root / "iteration_00000010"
    (folder / "extra-0000000.json").write_text('{"version":1,"state":{}}')
    save_file({"a": np.ones(3)}, folder / "extra-0000001.arrays")
    sealed.seal(folder, 10)
    with reshard.open(root) as opened:
        assert opened.iteration == 10
    data = (folder / name).read_bytes()
    for content in (data[:-1], None):
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)
        with reshard.open(root) as opened:
            assert opened.iteration == 5
        with pytest.raises(DamagedFileError, match=name):
            reshard.open(folder)


def test_a_file_that_only_the_description_names(root: Path) -> None:
    """Its manifest is sealed without it, as one who plants a description would have it."""
    folder = root / "iteration_00000010"
    shutil.move(folder / FILES["opt", 1], root / "kept")
    sealed.seal(folder, 10)
    shutil.move(root / "kept", folder / FILES["opt", 1])
    with pytest.raises(DamagedFileError, match="does not list"):
        reshard.open(folder)


# -- saves that did not end


def test_our_files_without_a_manifest_are_no_checkpoint(root: Path) -> None:
    (root / "iteration_00000010" / "manifest.json").unlink()
    with pytest.raises(DamagedFileError, match=r"no manifest.*This package wrote .model-0000000-0000002"):
        reshard.open(root / "iteration_00000010")
    with reshard.open(root) as opened:
        assert opened.iteration == 5


def test_files_of_others_without_a_valid_manifest_are_checked_as_they_are(root: Path) -> None:
    folder = root / "iteration_00000010"
    for name in FILES.values():
        save_file(load_file(folder / name), folder / name, {"format": "ms"})
    for text in (None, "", "{}"):
        (folder / "manifest.json").unlink(missing_ok=True)
        if text is not None:
            (folder / "manifest.json").write_text(text)
        with reshard.open(folder) as opened:
            assert not opened.verified
            assert opened.load()["w"].tobytes() == sealed.arrays_of(10)["w"].tobytes()


def test_a_later_version_is_not_fallen_back_from(root: Path) -> None:
    """The newest was written by a later release: a run of this one must not start again from an older iteration."""
    path = root / "iteration_00000010" / "manifest.json"
    body = path.read_bytes().replace(b'"version":1', b'"version":3').rsplit(b',\n"digest"', 1)[0]
    path.write_bytes(body + f',\n"digest":"{manifests.digest_of(body)}"}}\n'.encode())
    with pytest.raises(UnsupportedError, match="version 3"):
        reshard.open(root)


# -- roots


@pytest.mark.parametrize("make", ["nothing", "an empty folder", "what a first save left", "its events", "a new volume"])
def test_an_empty_root_is_an_error_of_its_own(make: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    if make != "nothing":
        root.mkdir()
    if make == "what a first save left":
        (root / ".staging").mkdir()
        (root / ".writers").mkdir()
        (root / ".lock").touch()
    if make == "its events":
        reshard.EventLog(root)(Event("begun", 10, dt.datetime.now(dt.UTC)))
        (root / "events.1.jsonl").touch()
        assert (root / "events.jsonl").exists()
    if make == "a new volume":
        (root / "lost+found").mkdir()
    with pytest.raises(EmptyRootError):
        reshard.open(root)


@pytest.mark.parametrize("name", ["iteration_00000007", "model.safetensors"])
def test_what_could_be_no_root_is_not_empty_but_missing(name: str, tmp_path: Path) -> None:
    for is_there in (False, True):
        if is_there:
            (tmp_path / name).mkdir()
        with pytest.raises(CheckpointNotFoundError) as caught:
            reshard.open(tmp_path / name)
        assert not isinstance(caught.value, EmptyRootError)


@pytest.mark.parametrize(
    "name",
    [
        "latest_checkpointed_iteration.txt",
        "saves.jsonl",
        "model.bin",
        "iteration_1/",
        "events.jsonl/",
        "lost+found/#12/",
    ],
)
def test_anything_else_is_never_a_fresh_start(name: str, tmp_path: Path) -> None:
    if name.endswith("/"):
        (tmp_path / name).mkdir(parents=True)
    else:
        (tmp_path / name).write_text("7")
    with pytest.raises(ReshardError) as caught:
        reshard.open(tmp_path)
    assert not isinstance(caught.value, EmptyRootError)


def test_a_folder_of_recovered_files_that_cannot_be_listed(reachable: Path) -> None:
    (reachable / "lost+found").mkdir()
    closed(reachable / "lost+found")
    with nobody(), pytest.raises(StorageError, match=r"lost\+found`: Permission denied") as caught:
        reshard.open(reachable)
    assert caught.value.hint == "if the volume is new, use a folder in it as the checkpoint root"


def test_an_error_names_every_candidate_and_its_fault(root: Path) -> None:
    (root / "iteration_00000010" / FILES["opt", 1]).unlink()
    change(root / "iteration_00000005" / "common.json", 3)
    sealed.make(root, 20, tracked=False, previous_tracker=5)
    with pytest.raises(DamagedFileError) as caught:
        reshard.open(root)
    lines = str(caught.value).splitlines()
    assert "opt-0000001" in next(line for line in lines if "iteration_00000010" in line)
    assert "common.json" in next(line for line in lines if "iteration_00000005" in line)
    assert "another line of saves" in next(line for line in lines if "iteration_00000020" in line)


def test_a_crash_between_publication_and_tracker_loses_nothing(root: Path) -> None:
    sealed.make(root, 15, tracked=False, previous_tracker=10)
    with reshard.open(root) as opened:
        assert_is(opened, 15, sealed.arrays_of(15))


def test_what_was_left_behind_on_purpose_stays_behind(root: Path) -> None:
    sealed.make(root, 7, previous_tracker=10, passed_over=(10,), generation=2)
    (root / "iteration_00000007" / FILES["opt", 1]).unlink()
    with reshard.open(root) as opened:
        assert opened.iteration == 5


def test_an_iteration_that_is_saved_again_while_it_is_opened(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its manifest was read before and the rest after the folders were exchanged: nothing is damaged."""
    from reshard.formats.checkpoint2 import reader as rooms

    folder, other = root / "iteration_00000010", root / "other"
    sealed.make(other, 10, previous_tracker=5, generation=2)
    flipped = other / "iteration_00000010"
    (flipped / "common.json").write_text('{"global_step": 10, "step_num": 11}')
    sealed.seal(flipped, 10, generation=2)
    real, n_calls = rooms._read_description, 0

    def late(*args: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 1:
            _core.rename(str(folder), str(flipped), exchange=True)
        return real(*args)

    monkeypatch.setattr(rooms, "_read_description", late)
    with reshard.open(root) as opened:
        assert (opened.iteration, opened.skipped) == (10, ())
        assert opened.common is not None
        assert opened.common.step_num == 11


def test_a_root_that_changes_while_it_is_looked_at(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention of one: 15 is published and everything older removed after 10 was listed and before it is opened."""
    from reshard.formats.checkpoint2 import reader as rooms
    from reshard.formats.checkpoint2 import root as module

    real = rooms.open_folder

    def late(folder: Location, *args: Any, **more: Any) -> CheckpointData:
        if not (root / "iteration_00000015").exists():
            sealed.make(root, 15, previous_tracker=10)
            shutil.rmtree(root / "iteration_00000010")
            shutil.rmtree(root / "iteration_00000005")
        return real(folder, *args, **more)

    monkeypatch.setattr(module, "open_folder", late)
    with reshard.open(root) as opened:
        assert_is(opened, 15, sealed.arrays_of(15))


# -- readers and what they hold


def is_locked(folder: Path) -> bool:
    """Whether retention, which asks for the whole lock, would find a reader."""
    file = os.open(folder / "manifest.json", os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def test_an_open_checkpoint_is_locked_against_removal(root: Path) -> None:
    folder = root / "iteration_00000010"
    with reshard.open(root) as opened:
        assert is_locked(folder)
        assert not is_locked(root / "iteration_00000005")
        with reshard.open(folder):
            pass
        assert is_locked(folder)
        opened.close()
        assert not is_locked(folder)
    forgotten = reshard.open(folder / FILES["model", 0])
    assert is_locked(folder)
    del forgotten
    gc.collect()
    assert not is_locked(folder)
    (folder / FILES["model", 1]).unlink()
    with pytest.raises(DamagedFileError):
        reshard.open(folder)
    assert not is_locked(folder)


def test_no_descriptor_is_left(root: Path) -> None:
    def n_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def work() -> None:
        with reshard.open(root) as opened:
            opened.load()
        change(root / "iteration_00000010" / "common.json", 3)
        with reshard.open(root) as opened:
            assert opened.iteration == 5
        change(root / "iteration_00000010" / "common.json", 3)

    work()
    gc.collect()  # files of objects of other tests are not closed in between
    before = n_open()
    for _ in range(20):
        work()
    assert n_open() == before


def test_other_ranks_open_the_very_same_and_only_what_they_use(root: Path) -> None:
    from reshard.opening import Chosen, chosen, open_chosen

    for sample in (root, Path(__file__).parents[1] / "data" / "mindspore" / "ckpt2" / "checkpoint"):
        with reshard.open(sample) as opened:
            known = chosen(opened)
            assert known is not None
            value = json.loads(json.dumps(encode(known)))
            with reshard.Checkpoint(open_chosen(decode(Chosen, value))) as same:
                assert (same.keys(), same.iteration, same.verified) == (
                    opened.keys(),
                    opened.iteration,
                    opened.verified,
                )
                expected = opened.load()
                assert all(array.tobytes() == expected[key].tobytes() for key, array in same.load().items())
                assert same.keys("optimizer") == opened.keys("optimizer")
    with reshard.open(root) as opened:
        known = chosen(opened)
        assert known is not None
    (root / "iteration_00000010" / FILES["model", 1]).unlink()
    with reshard.Checkpoint(open_chosen(known)) as same:
        assert same.load(TP2, rank=0, keys=["w"])["w"].tobytes() == sealed.arrays_of(10)["w"][:2].tobytes()
        with pytest.raises(CheckpointNotFoundError):
            same.load(TP2, rank=1, keys=["w"])
    sealed.seal(root / "iteration_00000010", 10, generation=2)
    with pytest.raises(MismatchError, match="digest"):
        open_chosen(known)


def test_a_file_of_a_folder_with_a_manifest(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = root / "iteration_00000010" / FILES["opt", 0]
    truth = sealed.arrays_of(10)["adam_m.w"][:2]
    with reshard.safe_open(path, "np") as f:
        assert f.get_tensor("adam_m.w").tobytes() == truth.tobytes()
    assert reshard.open(path).verified
    change(path, -1)
    with reshard.safe_open(path, "np") as f, pytest.raises(DamagedFileError, match="opt-0000000"):
        f.get_tensor("adam_m.w")
    with reshard.safe_open(path, "np") as f, pytest.raises(DamagedFileError, match="opt-0000000"):
        f.get_slice("adam_m.w")[1:]
    with pytest.raises(DamagedFileError):
        reshard.load_file(path)
    change(path, 20)  # the header
    with pytest.raises(DamagedFileError):
        reshard.safe_open(path, "np")
    change(path, 20)
    stranger = path.with_name("stranger.safetensors")
    save_file({"x": truth}, stranger)
    assert reshard.load_file(stranger)["x"].tobytes() == truth.tobytes()
    assert any("is not listed in the manifest" in message for message in caplog.messages)
    (path.parent / "manifest.json").write_text("torn")
    with pytest.raises(DamagedFileError, match="valid manifest"):
        reshard.load_file(path)
    assert reshard.load_file(stranger)
    (path.parent / "manifest.json").unlink()
    assert not reshard.open(path).verified
