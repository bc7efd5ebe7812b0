"""What holds for every test process."""

from __future__ import annotations

import gc
import math
import os
import shutil
import signal
import sys
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from tests.helpers import huge_pages

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from tests.servers.proxy import Proxy
    from tests.servers.s3 import S3Server

    from reshard.storage.location import Location

# A job that a shell starts in the background ignores Ctrl-C, and so would the processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is imported: tests fork ranks off this process, which wait for ever for the threads of a pool that only
# their parent has, once it has one.
os.environ["OMP_NUM_THREADS"] = "1"

# Fast tests write to memory: they sync thousands of files, which takes minutes on a busy disk. The /dev/shm of 64 MiB
# that containers have by default is too small.
_MEMORY = Path("/dev/shm")
if _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= 8 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))


# The same cases on each run, unless RESHARD_CASES_FACTOR asks for others. How long one takes says nothing on a
# machine that does other work, too.
hypothesis.settings.register_profile(
    "repeatable",
    derandomize="RESHARD_CASES_FACTOR" not in os.environ,
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("repeatable")

# Without SIGCHLD, which torch handles from the first DataLoader with workers on.
_SIGNALS = tuple(sorted(signal.valid_signals() - {signal.SIGCHLD}))

# Variables that libraries set while they are used: the seed of Lightning, a mark of its accelerators.
_OF_LIBRARIES = {"PL_GLOBAL_SEED", "PL_SEED_WORKERS", "PYTORCH_NVML_BASED_CUDA_CHECK"}


class _Process:
    """State of the process that a test must leave as it found it."""

    def __init__(self) -> None:
        self.handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        self.environment = dict(os.environ)
        self.n_modules = len(sys.modules)
        try:
            self.folder: str | None = str(Path.cwd())
        except FileNotFoundError:
            self.folder = None
        self.umask = os.umask(0o077)
        os.umask(self.umask)

    def restore(self, now: _Process) -> list[str]:
        """Undo what has changed, and say what it was."""
        changed: list[str] = []
        for number, before in self.handlers.items():
            if now.handlers[number] != before:
                changed.append(f"the handler of signal {number} is {now.handlers[number]}")
                signal.signal(number, signal.SIG_DFL if before is None else before)
        names = sorted(
            name
            # Libraries set variables when they are imported.
            for name in (self.environment if now.n_modules > self.n_modules else self.environment | now.environment)
            if self.environment.get(name) != now.environment.get(name) and name != "PYTEST_CURRENT_TEST"
        )
        for name in names:
            if name in self.environment:
                os.environ[name] = self.environment[name]
            else:
                del os.environ[name]
        names = [name for name in names if name not in _OF_LIBRARIES]
        if names:
            changed.append(f"the environment has other values of {', '.join(names)}")
        if now.folder != self.folder and self.folder is not None:
            changed.append(f"the working folder is {now.folder}")
            os.chdir(self.folder)
        if now.umask != self.umask:
            changed.append(f"the umask is {now.umask:o}")
            os.umask(self.umask)
        return changed


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Make collections of garbage and forks cheap before many tests: this process has a GiB and more of what stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        if len(session.items) > 2000:
            huge_pages.use()


_BEFORE = pytest.StashKey[_Process]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Keep the state of the process for the check after the test."""
    item.stash[_BEFORE] = _Process()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # the end of all fixtures is in it
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that leaves signal handlers, environment, working folder or umask changed."""
    result = yield
    before, now = item.stash[_BEFORE], _Process()
    if now.handlers != before.handlers:
        gc.collect()  # objects that were dropped in a cycle give their handlers back
        now = _Process()
    changed = before.restore(now)
    if changed:
        pytest.fail("the test leaves the process changed: " + "; ".join(changed), pytrace=False)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need a GPU where torch finds none."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU: tests/gpu/run.sh")


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The folder of a test: in memory, but on the disk for tests marked `disk`, or `slow` without `disk=False`."""
    slow = request.node.get_closest_marker("slow")
    on_disk = slow is not None and slow.kwargs.get("disk", True)
    if not on_disk and request.node.get_closest_marker("disk") is None:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def _quick_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """No save takes so long that it has events `writing`, for tests that compare all events."""
    from reshard.values import events

    monkeypatch.setattr(events, "_PROGRESS_SECONDS", math.inf)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """An S3 server, one for each process of the tests."""
    from tests.servers import s3

    with s3.running() as server:
        yield server


@pytest.fixture
def _brief_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """One writer probes a new root: SeaweedFS lets several that create one object wait, for seconds.

    `tests/commit/test_log_in_buckets.py` probes with all.
    """
    from reshard.commit import log

    monkeypatch.setattr(log, "_PROBE_ROUNDS", 1)
    monkeypatch.setattr(log, "_PROBE_WRITERS", 1)


@pytest.fixture
def s3(s3_server: S3Server, _brief_probe: None, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """An S3 server that the variables of the environment name."""
    from reshard.storage import remote

    if not remote.is_available():
        pytest.skip("the core was compiled without the feature `remote`")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture(params=["s3", "gs", "az"])
def bucket(
    request: pytest.FixtureRequest, _brief_probe: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Location, Proxy]]:
    """A folder of a bucket of each service, and the proxy before it."""
    from tests.servers import doubles
    from tests.servers.proxy import before_server
    from tests.servers.s3 import BUCKET

    from reshard.storage import remote
    from reshard.storage.location import locate

    if not remote.is_available():
        pytest.skip("the core was compiled without the feature `remote`")
    name = f"test-{uuid.uuid4().hex}"
    if request.param == "s3":
        server = request.getfixturevalue("s3")
        with before_server(server.port) as proxy:
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
            yield locate(f"s3://{BUCKET}/{name}"), proxy
        return
    for variable in [one for one in os.environ if one.startswith(("GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(variable)
    with (
        doubles.running("google" if request.param == "gs" else "azure") as double,
        before_server(double.port) as proxy,
    ):
        if request.param == "gs":
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.endpoint)
        else:
            monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
            monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", proxy.endpoint)
        yield locate(f"{request.param}://weights/{name}"), proxy
