"""A job of real ranks saves, is killed at a random moment, and the next one resumes; forty times in one root.

The oracle is this process: it knows the content of every save by a formula, hears of each one that begins and that is
acknowledged through a pipe, and after each kill compares what is on the disk with that, by other code than what is
tested. What it insists on:

    I1  what was acknowledged is found, bit for bit, unless as many newer ones as are kept are there
    I2  what is found is some save that was submitted, never a mixture
    I3  nothing that was complete is lost
    I4  who resumes never crashes, hangs or starts from nothing
    I5  the next save works and leaves no debris
    I6  by the rules of the original's reader, too, something whole is found, from the first success on

The ranks are forked from this process, which has imported everything; each round is another job, with a world, a
layout and saves of its own. `RESHARD_CASES_FACTOR` multiplies the rounds, with other decisions on every run.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import json
import math
import os
import random
import select
import shutil
import signal
import time
import traceback
import warnings
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pytest
import torch.distributed as dist
from safetensors.numpy import save_file
from tests.helpers import original_reader, small_saves
from tests.helpers.oracle import local_arrays
from torch._C import _distributed_c10d as c10d

import reshard
from reshard.commit import protocol
from reshard.ranks.group import resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.disk

N_ROUNDS = 25
KEEP = 2
PATIENCE_S = 60
TIMEOUT_S = 20  # of each meeting: nobody is waited for in vain, all are killed

SHAPES: dict[str, tuple[tuple[int, ...], Any]] = {
    "layers.0.w": ((48, 1500), np.float32),  # more than one chunk of sums
    "layers.1.w": ((48, 60), np.float16),
    "norm.b": ((12,), np.float32),
    "adam_m.layers.0.w": ((48, 1500), np.float32),
    "adam_m.layers.1.w": ((48, 60), np.float32),
    "adam_m.norm.b": ((12,), np.float32),
    "global_step": ((), np.int32),
    "version": ((), np.int32),
}
STATES = tuple(list(SHAPES)[3:])
ROWS = [{"match": "*.w", "cut": ["tp"]}, {"match": "*"}]
COLUMNS = [{"match": "*.w", "cut": [None, "tp"]}, {"match": "*"}]
STAGES = [{"match": "layers.{i}.*", "axis": "pp"}, {"match": "norm.b", "axis": "pp", "at": -1}]
ZERO = {"add": {0: ["dp"]}}
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    4: [
        {"mesh": {"tp": 4}, "rules": ROWS},
        {"mesh": {"dp": 4}, "rules": [{"match": "*"}], "optimizer": ZERO},
        {"mesh": {"dp": 2, "tp": 2}, "rules": COLUMNS, "optimizer": ZERO},
        {"mesh": {"pp": 2, "tp": 2}, "rules": ROWS, "place": STAGES},
    ],
    3: [{"mesh": {"tp": 3}, "rules": COLUMNS}, {"mesh": {"dp": 3}, "rules": [{"match": "*"}]}],
    2: [
        {"mesh": {"tp": 2}, "rules": COLUMNS},
        {"mesh": {"dp": 2}, "rules": [{"match": "*"}], "optimizer": ZERO},
        {"mesh": {"pp": 2}, "rules": [{"match": "*"}], "place": STAGES},
    ],
}


@functools.lru_cache(maxsize=16)
def content(iteration: int, version: int) -> dict[str, np.ndarray]:
    """All tensors of a save, whole. The version is its number among all saves that were submitted."""
    tensors = {}
    for number, (key, (shape, dtype)) in enumerate(SHAPES.items()):
        unsigned = np.dtype(f"u{np.dtype(dtype).itemsize}")
        first = iteration * 1_000_003 + version * 7919 + number * 104_729
        bits = np.arange(first, first + math.prod(shape), dtype=np.uint64) * np.uint64(2_654_435_761)
        tensors[key] = bits.astype(unsigned).view(dtype).reshape(shape)
    tensors["global_step"] = np.array(iteration, np.int32)
    tensors["version"] = np.array(version, np.int32)
    return tensors


def what_is(tensors: dict[str, np.ndarray]) -> tuple[int, int]:
    """Iteration and version of a save, all of which must be there as it was submitted."""
    assert set(tensors) == set(SHAPES), f"found {sorted(tensors)}"
    iteration, version = int(tensors["global_step"]), int(tensors["version"])
    for key, expected in content(iteration, version).items():
        assert tensors[key].dtype == expected.dtype
        assert tensors[key].shape == expected.shape
        assert tensors[key].tobytes() == expected.tobytes(), f"`{key}` is not that of save {version} of {iteration}"
    return iteration, version


# -- a job


@dataclasses.dataclass(frozen=True)
class Step:
    """One save of a job."""

    distance: int  # from the iteration before; 0 saves it again
    blocking: bool
    waits: bool
    durable: bool
    dedup: bool


@dataclasses.dataclass(frozen=True)
class Life:
    """What a job is to do, and when it is killed."""

    number: int
    world_size: int
    layout: dict[str, Any]
    steps: tuple[Step, ...]
    n_saves: int | None  # acknowledged before the kill; None: it is killed while it starts
    moment: float  # of the time that the next save will take
    order: tuple[int, ...]  # in which the ranks are killed
    gap_s: float


@dataclasses.dataclass(frozen=True)
class Job:
    """What all ranks of a job know."""

    root: Path
    life: Life
    first_version: int
    how: Ours
    port: int


@dataclasses.dataclass(frozen=True)
class Save:
    """One save as it is submitted."""

    iteration: int
    version: int
    step: Step


def draw(rng: random.Random, number: int) -> Life:
    world_size = rng.choice((4, 4, 4, 2, 3))
    steps = [
        Step(
            distance=rng.choice((0, 1, 1, 1, 2, 5)),
            blocking=rng.random() < 0.6,
            waits=rng.random() < 0.5,
            durable=rng.random() < 0.5,
            dedup=rng.random() < 0.8,
        )
        for _ in range(40)
    ]
    return Life(
        number=number,
        world_size=world_size,
        layout=rng.choice(LAYOUTS[world_size]),
        steps=tuple(steps),
        n_saves=None if number % 12 == 7 else rng.choice((0, 0, 0, 1, 1, 2)),
        moment=rng.random(),
        order=tuple(rng.sample(range(world_size), world_size)),
        gap_s=rng.choice((0, 0, 0.001, 0.005)),
    )


class Ours:
    """How a rank loads and saves: by what is tested."""

    is_tidy = True
    writes_manifests = True

    def load(self, job: Job, group: Any) -> tuple[int, int]:
        layout = job.life.layout
        got = reshard.load(job.root, layout, group=group, timeout=TIMEOUT_S)
        if got.decision.fresh:
            return 0, 0
        assert got.common is not None
        iteration, version = int(got.iteration or 0), int(got.common.epoch_num or 0)
        expected = local_arrays(layout, content(iteration, version), group.rank, STATES)
        assert set(got.state) == set(expected)
        for key, array in expected.items():
            assert got.state[key].tobytes() == array.tobytes(), f"`{key}` of save {version} of {iteration}"
        if version % 2:
            assert got.extra["seen"][:2] == (iteration, version)
            if group.rank < got.extra["seen"][2]:
                assert got.extra["own"].tolist() == [version, group.rank]
        return iteration, version

    def save(self, job: Job, one: Save, group: Any) -> reshard.PendingSave[reshard.SaveReport] | None:
        layout, version = job.life.layout, one.version
        whole = content(one.iteration, version)
        own = {key: array.copy() for key, array in local_arrays(layout, whole, group.rank, STATES).items()}
        extra: dict[str, object] = {}
        if version % 2:
            extra["seen"] = (one.iteration, version, group.world_size)
            extra["own"] = reshard.per_rank(np.array([version, group.rank]))
        model = {key: array for key, array in own.items() if key not in STATES}
        state = {key: array for key, array in own.items() if key in STATES}
        pending = reshard.save(
            job.root,
            one.iteration,
            model,
            state,
            common={"epoch_num": version},
            extra=extra,
            layout=layout,
            keep=KEEP,
            files={"dedup": one.step.dedup},
            group=group,
            blocking=one.step.blocking,
            commit={"durable": one.step.durable},
            timeout=TIMEOUT_S,
        )  # type: ignore[call-overload]
        for array in own.values():  # training goes on
            array[...] = 0
        return None if one.step.blocking else pending


def train(job: Job, group: Any, tell: Callable[..., None]) -> None:
    """Resume, and save until the end or a kill; each save is told of when it begins and when it is acknowledged."""
    iteration, version = job.how.load(job, group)
    tell("loaded", iteration, version)
    before: tuple[Save, Any] | None = None
    for number, step in enumerate(job.life.steps):
        iteration += step.distance if iteration else 1
        one = Save(iteration, job.first_version + number, step)
        tell("begins", one.iteration, one.version)
        pending = job.how.save(job, one, group)
        if before is not None:  # its error would have been raised now
            tell("is saved", before[0].iteration, before[0].version)
            before = None
        if pending is not None and not step.waits:
            before = one, pending
            continue
        if pending is not None:
            pending.result(TIMEOUT_S)
        # Nobody else writes now: all ranks have told that they have written.
        left = small_saves.debris(job.root) if group.rank == 0 and job.how.is_tidy else []
        assert not left, f"debris of a save: {left}"
        tell("is saved", one.iteration, one.version)
    if before is not None:
        before[1].result(TIMEOUT_S)
        tell("is saved", before[0].iteration, before[0].version)


# -- processes


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """That of a store for all jobs, in a process of its own."""
    reader, writer = os.pipe()

    def serve() -> NoReturn:
        store = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writer, str(store.port).encode())
        while True:
            signal.pause()

    pid = fork(serve)
    yield int(os.read(reader, 100))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reader)
    os.close(writer)


@pytest.fixture(autouse=True)
def _everything_is_imported(tmp_path: Path) -> Iterator[None]:
    """And used once: what is imported on first use would be imported by every rank of every round."""
    reshard.save(tmp_path / "first", 1, {"w": np.zeros(2)}, extra={"a": np.zeros(2)})
    reshard.load(tmp_path / "first")
    protocol.release()
    shutil.rmtree(tmp_path / "first")
    gc.collect()
    gc.freeze()  # nothing of this is to be touched, and with it copied, by the collector of a child
    yield
    gc.unfreeze()


def fork(act: Callable[[], object]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: torch's own, idle
        pid = os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nobody outlives the test run
        act()
    finally:
        os._exit(0)


@dataclasses.dataclass(frozen=True)
class Said:
    at: float  # monotonic, seconds
    rank: int
    what: str
    iteration: int
    version: int


class Running:
    """The ranks of one job, and what they have said so far."""

    def __init__(self, job: Job) -> None:
        self.said: list[Said] = []
        self._rest = b""
        self._reader, writer = os.pipe()
        self._pids = [fork(functools.partial(self._be, job, rank, writer)) for rank in range(job.life.world_size)]
        os.close(writer)

    def listen(self, until: Callable[[Said], bool] | None = None, *, seconds: float = PATIENCE_S) -> bool:
        """Hear what they say, until a word, the end of all of them or the end of the time; whether the word fell."""
        deadline = time.monotonic() + seconds
        while True:
            left_s = deadline - time.monotonic()
            ready, _, _ = select.select([self._reader], [], [], max(left_s, 0))
            if not ready:
                assert seconds < PATIENCE_S, f"they hang; what they said: {self.said[-10:]}"
                return False
            text = os.read(self._reader, 1 << 16)
            if not text:
                return False
            *lines, self._rest = (self._rest + text).split(b"\n")
            fell = False
            for line in lines:
                rank, what, iteration, version = json.loads(line)
                one = Said(time.monotonic(), rank, what, iteration, version)
                self.said.append(one)
                fell = fell or (until is not None and until(one))
            if fell:
                return True

    def kill(self, order: tuple[int, ...], gap_s: float) -> None:
        for rank in order:
            os.kill(self._pids[rank], signal.SIGKILL)
            time.sleep(gap_s)
        self.end()

    def end(self) -> None:
        """All ranks are gone, and all is heard that they said."""
        for pid in self._pids:
            os.waitpid(pid, 0)
        while self.listen(lambda _: True):
            pass
        os.close(self._reader)

    @staticmethod
    def _be(job: Job, rank: int, out: int) -> None:
        def tell(what: str, iteration: int, version: int) -> None:
            os.write(out, json.dumps([rank, what, iteration, version]).encode() + b"\n")  # at once: it is short

        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the store's complaints
        try:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # gloo fails on a rank that is not ready when another one ends
            world_size = job.life.world_size
            store = c10d.TCPStore("127.0.0.1", job.port, world_size, is_master=False, wait_for_workers=False)
            own = c10d.PrefixStore(f"{job.root} {job.first_version} {job.life.number}", store)
            dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size)
            tell("starts", 0, 0)
            train(job, resolve(), tell)
        except BaseException:  # noqa: BLE001
            tell(f"failed: {traceback.format_exc()[-3000:]}", 0, 0)


# -- the oracle


class Oracle:
    """What was submitted and acknowledged, and whether what is found agrees with it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.iterations: dict[int, int] = {}  # of all saves that were submitted, by version
        self.acknowledged: dict[int, int] = {}  # the highest version of each iteration
        self.n_inside = 0
        self.save_s = 0.05  # how long a save takes

    @property
    def last(self) -> int:
        return max(self.acknowledged.values(), default=0)

    @property
    def newest(self) -> int:
        return max(self.iterations, default=0)

    def hear(self, said: list[Said]) -> None:
        """Take up what the ranks of a job said, in which all that they loaded must have been right."""
        failures = [one.what for one in said if one.what.startswith("failed")]
        assert not failures, failures[0]
        loaded = {(one.iteration, one.version) for one in said if one.what == "loaded"}
        assert len(loaded) <= 1, f"ranks resumed from different saves: {loaded}"
        for iteration, version in loaded:
            if version or self.last:
                assert self.iterations[version] == iteration
                assert version >= self.last, "an acknowledged save was not found"
        begun: dict[int, float] = {}
        for one in said:
            if one.what == "begins":
                self.iterations[one.version] = one.iteration
                begun.setdefault(one.version, one.at)
            elif one.what == "is saved":
                assert self.iterations[one.version] == one.iteration
                self.acknowledged[one.iteration] = max(self.acknowledged.get(one.iteration, 0), one.version)
                if one.version in begun and one.rank == 0:
                    self.save_s += (one.at - begun[one.version] - self.save_s) / 8

    def look(self, *, by_manifests: bool = True) -> None:
        """Compare what is on the disk."""
        tracker = small_saves.tracker(self.root) if self.root.exists() else None
        assert tracker is not None or not self.last, "nothing is found by the original"
        seen = 0
        if tracker is not None:
            iteration, seen = what_is(original_reader.read_tree(self.root))
            assert self.iterations[seen] == iteration == tracker
            assert seen >= self.last, "an acknowledged save was not found by the original"
        self.n_inside += seen < self.newest or self._is_debris()
        if not by_manifests:
            return
        whole = self._whole()
        for iteration, version in self.acknowledged.items():
            is_replaced_rightly = sum(other > iteration for other in whole) >= KEEP
            assert whole.get(iteration, 0) >= version or is_replaced_rightly, f"save {version} of {iteration} is lost"

    def _is_debris(self) -> bool:
        return any(any((self.root / name).glob("*")) for name in (".staging", ".trash"))

    def _whole(self) -> dict[int, int]:
        """The version of each iteration that proves whole by its manifest, each exactly as it was submitted."""
        whole = {}
        for number, folder in small_saves.folders(self.root).items() if self.root.exists() else ():
            if is_proven(folder):
                iteration, version = what_is(original_reader.read_tree(folder))
                assert iteration == number == self.iterations[version]
                whole[iteration] = version
        return whole


def is_proven(folder: Path) -> bool:
    """Whether there is a manifest, and its own digest and all sizes are right."""
    import hashlib

    with contextlib.suppress(FileNotFoundError):
        data = (folder / "manifest.json").read_bytes()
        body, _, tail = data.rpartition(b',\n"digest":"')
        if tail != hashlib.blake2b(body, digest_size=16).hexdigest().encode() + b'"}\n':
            return False
        manifest = json.loads(data)
        entries = manifest["shards"] | manifest["files"]
        return all((folder / name).stat().st_size == entry["n_bytes"] for name, entry in entries.items())
    return False


def live(oracle: Oracle, life: Life, port: int, how: Ours) -> None:
    """One round: a job lives, is killed, and the disk is looked at."""
    job = Running(Job(oracle.root, life, oracle.newest + 1, how, port))
    n_saved = 0

    def is_time(one: Said) -> bool:
        nonlocal n_saved
        n_saved += one.rank == 0 and one.what == "is saved"
        if life.n_saves is None:
            return one.what == "starts"
        return one.what.startswith("failed") or (
            n_saved >= life.n_saves and (one.what == "loaded" if life.n_saves == 0 else one.what == "is saved")
        )

    job.listen(is_time)
    job.listen(seconds=life.moment * oracle.save_s)
    job.kill(life.order, life.gap_s)
    oracle.hear(job.said)
    oracle.look(by_manifests=how.writes_manifests)


@pytest.mark.slow
def test_killed_at_random(tmp_path: Path, port: int) -> None:
    factor = os.environ.get("RESHARD_CASES_FACTOR")
    seed = 0 if factor is None else random.SystemRandom().getrandbits(32)
    n_rounds = int(N_ROUNDS * float(factor or 1))
    oracle = Oracle(tmp_path / "root")
    for number in range(3 * n_rounds):
        # Where other work delays this process, fewer kills come when they are meant to: there are more then.
        if number >= n_rounds and oracle.n_inside >= 0.4 * n_rounds and len(oracle.acknowledged) >= n_rounds / 3:
            break
        rng = random.Random(f"{seed} {number}")
        life = draw(rng, number)
        try:
            live(oracle, life, port, Ours())
        except Exception as error:
            error.add_note(f"seed {seed}, round {number}: {life}")
            raise
    assert oracle.n_inside >= 0.4 * n_rounds, f"only {oracle.n_inside} of {number} kills fell into a save"
    assert len(oracle.acknowledged) >= n_rounds / 3
    # One that lives on: I5 once more, and nothing of all that is left.
    life = dataclasses.replace(draw(random.Random(seed), number + 1), steps=(Step(1, True, True, True, True),) * 2)
    job = Running(Job(oracle.root, life, oracle.newest + 1, Ours(), port))
    job.end()
    oracle.hear(job.said)
    oracle.look()
    assert sum(one.what == "is saved" for one in job.said) == 2 * life.world_size
    assert not small_saves.debris(oracle.root)
    assert len(small_saves.folders(oracle.root)) == KEEP


# -- the harness notices what it is for


class AcknowledgesEarly(Ours):
    """Says that it has saved when it has begun to."""

    is_tidy = False

    def save(self, job: Job, one: Save, group: Any) -> None:
        super().save(job, dataclasses.replace(one, step=dataclasses.replace(one.step, blocking=False)), group)


class AsTheOriginal(Ours):
    """What the original does, in the order in which it does it: an existing folder goes first, shards under their final
    names, the tracker rewritten in place, and a reader to whom what is there is complete.
    """

    is_tidy = False
    writes_manifests = False

    def load(self, job: Job, group: Any) -> tuple[int, int]:
        if not (job.root / original_reader.TRACKER).exists():
            return 0, 0
        return what_is(original_reader.read_tree(job.root))

    def save(self, job: Job, one: Save, group: Any) -> None:
        folder = job.root / f"iteration_{one.iteration:08d}"
        if group.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        group.barrier(timeout=TIMEOUT_S)
        keys = list(SHAPES)[group.rank :: group.world_size]
        path = folder / f"model-{group.rank:07d}-{group.world_size:07d}.safetensors"
        save_file({key: content(one.iteration, one.version)[key] for key in keys}, path)
        group.barrier(timeout=TIMEOUT_S)
        if group.rank == 0:
            (job.root / original_reader.TRACKER).write_text(str(one.iteration))
        group.barrier(timeout=TIMEOUT_S)


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        (AcknowledgesEarly(), AssertionError, "is found by the original|was not found|is lost"),
        (AsTheOriginal(), (AssertionError, FileNotFoundError), r"found \[|iteration_|is not that of"),
    ],
    ids=["acknowledged early", "as the original"],
)
def test_the_harness_notices_what_it_is_for(how: Ours, error: Any, message: str, tmp_path: Path, port: int) -> None:
    oracle = Oracle(tmp_path / "root")

    def live_often() -> None:
        for number in range(60):
            life = draw(random.Random(number), number)
            steps = tuple(dataclasses.replace(step, distance=number % 2, waits=False) for step in life.steps)
            live(oracle, dataclasses.replace(life, steps=steps, moment=life.moment / 2), port, how)

    with pytest.raises(error, match=message):
        live_often()
    assert oracle.acknowledged
