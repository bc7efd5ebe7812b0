"""Saves of a few hundred bytes, processes that are killed in them, and readers that share no code with what is tested.

What a save holds follows from its iteration and a version, so that whatever is found can be compared with what was
submitted, bit for bit, whoever submitted it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.helpers import memory_store
from tests.helpers.crc32c import crc32c
from tests.helpers.memory_store import MemoryStore

from reshard import _core
from reshard.commit import claims, filesystem, protocol
from reshard.commit.session import sessions
from reshard.errors import StorageError
from reshard.storage.location import Location, locate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

N_RANKS = 2
State = tuple[int, int]  # iteration, version
Root = Path | Location


# -- what is saved


@dataclasses.dataclass(frozen=True)
class FileRecord:
    n_bytes: int
    header_bytes: int
    header_checksum: int
    checksums: bytes


def shard_name(rank: int) -> str:
    return f"model-{rank:07d}-{N_RANKS:07d}.safetensors"


def shard_content(iteration: int, version: int, rank: int) -> tuple[bytes, int]:
    """A safetensors file, and the bytes before its data."""
    data = hashlib.blake2b(f"{iteration} {version} {rank}".encode()).digest()
    header = json.dumps(
        {"__metadata__": {"reshard": "1"}, "w": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}
    ).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data, 8 + len(header)


def common_content(iteration: int, version: int) -> bytes:
    return json.dumps({"step_num": iteration, "epoch_num": version}).encode()


def write_files(folder: Root, iteration: int, version: int) -> dict[str, tuple[FileRecord, int]]:
    told = {}
    place = locate(folder)
    for rank in range(N_RANKS):
        content, header_bytes = shard_content(iteration, version, rank)
        _write(place / shard_name(rank), content)
        checksums = crc32c(content).to_bytes(4, "little")
        told[shard_name(rank)] = (
            FileRecord(len(content), header_bytes, crc32c(content[:header_bytes]), checksums),
            rank,
        )
    _write(place / "common.json", common_content(iteration, version))
    return told


def _write(place: Location, content: bytes) -> None:
    if not place.is_local:
        place.replace(content)
        return
    path = place.local
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
        try:
            os.write(handle, content)
            os.fsync(handle)
        finally:
            os.close(handle)
        temporary.replace(path)
    except OSError as error:
        raise StorageError("writing", path=str(path), errno=error.errno) from error


def save(root: Root, iteration: int, version: int = 0, *, passed_over: tuple[int, ...] = (), **how: Any) -> list[str]:
    attempt = protocol.begin(locate(root), iteration, planned_bytes=1000, **how)
    try:
        told = write_files(attempt.staging, iteration, version)
        manifest = protocol.seal(attempt, told, world_size=N_RANKS, passed_over=passed_over)
        return protocol.publish(attempt, manifest)
    except BaseException:
        protocol.abandon(attempt)
        raise


# -- what is found, by readers that know local files alone

_exported: weakref.WeakKeyDictionary[MemoryStore, tuple[dict[str, Any], str]] = weakref.WeakKeyDictionary()


def readable(root: Root) -> Path:
    """A local folder with the content of a location."""
    place = locate(root)
    if place.is_local:
        return place.local
    assert isinstance(place.store, MemoryStore)
    objects, folder = _exported.get(place.store, (None, None))
    if folder is None or objects != place.store.objects:
        if folder is None:
            memory = Path("/dev/shm")
            folder = tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None)
            weakref.finalize(place.store, shutil.rmtree, folder, ignore_errors=True)
        shutil.rmtree(folder)
        place.store.export(Path(folder))
        _exported[place.store] = (dict(place.store.objects), folder)
    return Path(folder) / place.path


def held(folder: Root) -> State | None:
    """What a folder holds, if it is whole by its manifest; a whole one must be what somebody submitted."""
    folder = readable(folder)
    try:
        data = (folder / "manifest.json").read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    body, _, tail = data.rpartition(b',\n"digest":"')
    if tail != hashlib.blake2b(body, digest_size=16).hexdigest().encode() + b'"}\n':
        return None
    manifest = json.loads(data)
    for name, entry in (manifest["shards"] | manifest["files"]).items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != entry["n_bytes"]:
            return None
    for name, entry in manifest["files"].items():
        if hashlib.blake2b((folder / name).read_bytes(), digest_size=16).hexdigest() != entry["digest"]:
            return None
    checksums = (folder / "checksums.bin").read_bytes()
    version = json.loads((folder / "common.json").read_bytes())["epoch_num"]
    state = (manifest["iteration"], version)
    for rank in range(N_RANKS):
        content, _ = shard_content(*state, rank)
        assert (folder / shard_name(rank)).read_bytes() == content, "a mixture, or not what was submitted"
        first = manifest["shards"][shard_name(rank)]["first_chunk"]
        assert checksums[4 * first : 4 * first + 4] == crc32c(content).to_bytes(4, "little")
    assert (folder / "common.json").read_bytes() == common_content(*state)
    return state


def tracker(root: Root) -> int | None:
    root = readable(root)
    with contextlib.suppress(FileNotFoundError):
        text = (root / "latest_checkpointed_iteration.txt").read_text()
        assert text.isdecimal(), f"a torn tracker: {text!r}"
        return int(text)
    return None


def folders(root: Root) -> dict[int, Path]:
    root = readable(root)
    return {
        int(entry.name[10:]): entry
        for entry in root.iterdir()
        if re.fullmatch("iteration_[0-9]+", entry.name) and entry.is_dir()
    }


def found(root: Root) -> State | None:
    """What a restart takes: the reading rules, in the plainest words."""
    root = readable(root)
    named, there = tracker(root), folders(root)
    for staged in (root / ".staging").glob("[0-9]*.*.*"):
        number, _, attempt = staged.name.split(".")
        if int(number) not in there and (old := root / ".trash" / f"{number}.{attempt}").is_dir():
            there[int(number)] = old  # a crash between the two renames of a replacement
    if named not in there:
        named = None
    manifests = {n: json.loads((folder / "manifest.json").read_bytes()) for n, folder in there.items() if held(folder)}
    newer = [
        n
        for n, manifest in manifests.items()
        if (named is None or n > named)
        and not (there[n] / ".tracked").exists()
        and manifest["previous_tracker"] == named
        and not any(n in other["passed_over"] for other in manifests.values())
    ]
    order = [*sorted(newer, reverse=True), *([named] if named is not None else []), *sorted(there, reverse=True)]
    for n in order:
        state = held(there[n])
        if state is not None:
            return state
    return None


def found_by_the_original(root: Root) -> State | None:
    """Tracker, folder, files: nothing else is looked at."""
    root = readable(root)
    named = tracker(root)
    if named is None:
        return None
    folder = root / f"iteration_{named:08d}"
    for rank in range(N_RANKS):
        assert (folder / shard_name(rank)).is_file(), "the original would fail here"
    state = held(folder)
    assert state is not None, "the original would load what is not whole"
    return state


def all_held(root: Root) -> set[State]:
    return {state for folder in folders(root).values() if (state := held(folder))}


def debris(root: Root) -> list[str]:
    """Whatever a finished save should not leave."""
    root = readable(root)
    left = [str(path.relative_to(root)) for name in (".staging", ".trash") for path in (root / name).glob("*")]
    left += [str(path.relative_to(root)) for path in root.rglob("*.tmp")]
    left += [str(path.relative_to(root)) for path in root.rglob(".unfinished")]
    writers = list((root / ".writers").iterdir())
    return left + [str(path) for path in writers[1:]]


# -- processes that end in the middle

_CHANGES = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "write", "pwrite", "truncate", "utime")


def sync_by_python(files: Sequence[str], folders: Sequence[str]) -> None:
    """In place of `_core.sync_together`, by `os.fsync`, which a test has replaced."""
    for path in (*files, *folders):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from error
        finally:
            os.close(handle)


@contextlib.contextmanager
def stopped_at(number: int, act: Callable[[], None], *, lasting: bool = False) -> Iterator[list[str]]:
    """Call `act` before the change with this number, from 0; `lasting`: before all later ones too.

    Gives the names of all changes. Nothing is synced: only a loss of power, which this is not, asks for that.
    """
    seen: list[str] = []
    real: dict[str, Any] = {name: getattr(os, name) for name in (*_CHANGES, "open")}
    real_rename, real_sync, real_change = _core.rename, _core.sync_together, memory_store._before_change

    def count(name: str, *args: Any) -> None:
        seen.append(f"{name} {' '.join(map(str, args))}")
        if len(seen) == number + 1 or (lasting and len(seen) > number):
            act()

    def wrap(name: str) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            if name != "open" or args[1] & os.O_CREAT:
                count(name, *args[:2])
            return None if name == "fsync" else real[name](*args, **more)

        return call

    def rename(*args: Any, **more: Any) -> None:
        count("rename", *args)
        real_rename(*args, **more)

    try:
        for name in real:
            setattr(os, name, wrap(name))
        _core.rename = rename
        _core.sync_together = sync_by_python
        memory_store._before_change = count
        yield seen
    finally:
        for name, function in real.items():
            setattr(os, name, function)
        _core.rename = real_rename
        _core.sync_together = real_sync
        memory_store._before_change = real_change


class KilledError(BaseException):
    """No handler of ours catches this, and after it nothing changes any more."""


def killed_at(number: int, act: Callable[[], Any]) -> bool:
    """Run `act` as a process that is killed before one of its changes; whether it came that far.

    Not a process of its own, which would cost more than all else here: after the point no change reaches the file
    system, whatever still runs, and what the process held is forgotten. Signals that are real are sent at the named
    steps, by `killed_at_step`.
    """

    def die() -> None:
        raise KilledError

    try:
        with stopped_at(number, die, lasting=True):
            act()
    except KilledError:
        return True
    finally:
        for one in sessions():
            claims._drop(one)
    return False


@contextlib.contextmanager
def stopped_at_step(number: int, act: Callable[[], None]) -> Iterator[list[str]]:
    """The same at the named steps of the protocol."""
    seen: list[str] = []

    def step(name: str) -> None:
        seen.append(name)
        if len(seen) == number + 1:
            act()

    real, filesystem._step = filesystem._step, step
    try:
        yield seen
    finally:
        filesystem._step = real


@dataclasses.dataclass
class Child:
    """A forked process; what it tells comes back as JSON."""

    pid: int
    handle: int

    def result(self, seconds: float = 20) -> Any:
        """What the child returned; None if it was killed."""
        data = b""
        while True:
            ready, _, _ = select.select([self.handle], [], [], seconds)
            assert ready, "the child hangs"
            piece = os.read(self.handle, 1 << 16)
            if not piece:
                break
            data += piece
        os.close(self.handle)
        _, status = os.waitpid(self.pid, 0)
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL
            return None
        value = json.loads(data)
        assert "failed" not in value, value.get("failed")
        return value["result"]


def fork(act: Callable[[], Any]) -> Child:
    """Run `act` in a forked process, which ends without tidying up."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # later Pythons warn of forks beside threads
        pid = os.fork()
    if pid:
        os.close(writing)
        return Child(pid, reading)
    try:
        os.close(reading)
        try:
            answer = {"result": act()}
        except BaseException:  # noqa: BLE001
            answer = {"failed": traceback.format_exc()}
        os.write(writing, json.dumps(answer).encode())
    finally:
        sys.stdout.flush()
        os._exit(0)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_at_step(number: int, act: Callable[[], Any]) -> bool:
    """Run `act` in a process that is killed before one of its named steps; whether it came that far."""

    def run() -> bool:
        with stopped_at_step(number, kill_self):
            act()
        return True

    return fork(run).result() is None


def in_child(act: Callable[[], Any]) -> Any:
    return fork(act).result()


def fail_with(number: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(number, os.strerror(number))

    return fail
