"""Conversions into a bucket: byte for byte as into a folder, and whole or not there."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
import pytest
from tests.helpers.memory import peak_mib
from tests.servers.proxy import Fault, Proxy
from tests.servers.s3 import BUCKET

import reshard
from reshard.commit import protocol, roots
from reshard.errors import ArgumentError, DestinationExistsError, ReshardError, StorageError, UnsupportedError
from reshard.storage import remote
from reshard.storage.location import Location, locate
from reshard.storage.remote import RemoteStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.servers.s3 import S3Server

pytestmark = pytest.mark.skipif(not remote.is_available(), reason="the core was compiled without the feature `remote`")


def model(folder: Path, *, n_rows: int = 64) -> dict[str, np.ndarray]:
    """A Hugging Face folder with a configuration and a tokenizer."""
    rng = np.random.default_rng(5)
    tensors = {
        "model.embed_tokens.weight": rng.standard_normal((n_rows, 32)).astype(np.float32),
        **{f"model.layers.{i}.mlp.weight": rng.standard_normal((n_rows, 64)).astype(np.float32) for i in range(3)},
        "lm_head.weight": rng.standard_normal((n_rows, 32)).astype(np.float32),
    }
    folder.mkdir()
    reshard.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "made", "torch_dtype": "float32"}')
    (folder / "tokenizer.json").write_text(json.dumps({"words": list(range(1000))}))
    return tensors


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def objects_of(folder: Location) -> dict[str, bytes]:
    assert isinstance(folder.store, RemoteStore)
    return {name: b"".join((folder / name).pieces()) for name, _ in folder.store.below(folder.path)}


LAYOUT = {"mesh": {"tp": 2}, "rules": [{"match": "*weight", "cut": ["tp", None]}]}
CONVERSIONS: dict[str, dict[str, Any]] = {
    "one": {},
    "several": {"max_shard_size": 20_000},
    "ranks": {"to": "safetensors", "layout": LAYOUT},
    "rank-folders": {"to": "checkpoint1", "layout": LAYOUT},
    "torch": {"to": "torch", "max_shard_size": 20_000},
    "mindspore": {"to": "mindspore", "max_shard_size": 20_000},
    "dcp": {"to": "dcp", "layout": LAYOUT},
    "megatron": {"to": "megatron"},
    "deepspeed": {"to": "deepspeed-universal", "part": "all", "iteration": 5},
}


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_a_folder_in_a_bucket_is_byte_for_byte_that_of_a_disk(
    bucket: tuple[Location, Proxy], tmp_path: Path, conversion: str
) -> None:
    folder, _ = bucket
    model(tmp_path / "model")
    options = CONVERSIONS[conversion]
    on_disk = reshard.convert(tmp_path / "model", tmp_path / "out", **options)
    found = reshard.convert(tmp_path / "model", str(folder), **options)
    assert objects_of(folder) == files_of(tmp_path / "out")
    assert (found.n_files, found.n_bytes, found.n_tensors) == (on_disk.n_files, on_disk.n_bytes, on_disk.n_tensors)
    assert reshard.diff(str(folder), tmp_path / "out").equal
    # A second one is refused as on a disk, and replaces the first with `overwrite`.
    with pytest.raises(DestinationExistsError, match="is not empty") as caught:
        reshard.convert(tmp_path / "model", str(folder), **options)
    assert "overwrite=True" in (caught.value.hint or "")
    (folder / "notes.txt").replace("mine")
    changed = options | ({"iteration": 6} if "iteration" in options else {"dtype": "bfloat16"})
    reshard.convert(tmp_path / "model", str(folder), overwrite=True, **changed)
    reshard.convert(tmp_path / "model", tmp_path / "out", overwrite=True, **changed)
    assert objects_of(folder) == files_of(tmp_path / "out") | {"notes.txt": b"mine"}


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "deep/er/w.bin"])
def test_a_file_in_a_bucket_is_byte_for_byte_that_of_a_disk(
    bucket: tuple[Location, Proxy], tmp_path: Path, name: str
) -> None:
    folder, _ = bucket
    model(tmp_path / "model")
    reshard.convert(tmp_path / "model", tmp_path / "out" / name)
    reshard.convert(tmp_path / "model", f"{folder}/{name}")
    assert objects_of(folder) == files_of(tmp_path / "out")
    with pytest.raises(DestinationExistsError, match="exists"):
        reshard.convert(tmp_path / "model", f"{folder}/{name}")
    reshard.convert(tmp_path / "model", f"{folder}/{name}", overwrite=True)
    assert objects_of(folder) == files_of(tmp_path / "out")


def test_a_bucket_is_converted_into_another_folder_of_it(bucket: tuple[Location, Proxy], tmp_path: Path) -> None:
    folder, _ = bucket
    tensors = model(tmp_path / "model")
    reshard.convert(tmp_path / "model", str(folder / "first"))
    reshard.convert(str(folder / "first"), str(folder / "second"), max_shard_size=20_000)
    reshard.convert(tmp_path / "model", tmp_path / "out", max_shard_size=20_000)
    assert objects_of(folder / "second") == files_of(tmp_path / "out")
    reshard.convert(str(folder / "second"), tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(tmp_path / "model") | {
        "model.safetensors": files_of(tmp_path / "back")["model.safetensors"]
    }
    with reshard.open(tmp_path / "back") as opened:
        assert {key: one.tobytes() for key, one in opened.load().items()} == {
            key: one.tobytes() for key, one in tensors.items()
        }
    with pytest.raises(ArgumentError, match="inside source"):
        reshard.convert(str(folder / "first"), str(folder / "first/inside"))


def test_a_run_is_converted_into_a_bucket(bucket: tuple[Location, Proxy], tmp_path: Path) -> None:
    folder, _ = bucket
    reshard.save(tmp_path / "run", 7, {"w": np.arange(50_000, dtype=np.float32), "b": np.ones(3)}, extra={"step": 3})
    reshard.convert(tmp_path / "run", str(folder), to="dcp")
    with reshard.open(str(folder)) as opened:
        np.testing.assert_array_equal(opened.load()["w"], np.arange(50_000, dtype=np.float32))


@pytest.mark.slow(disk=False)
def test_a_root_in_a_bucket_is_begun_by_a_conversion(bucket: tuple[Location, Proxy], tmp_path: Path) -> None:
    folder, _ = bucket
    tensors = model(tmp_path / "model")
    report = reshard.convert(tmp_path / "model", str(folder), layout=LAYOUT, iteration=3)
    assert str(report.path) == f"{folder}/iteration_00000003"
    reshard.convert(tmp_path / "model", tmp_path / "run", layout=LAYOUT, iteration=3)
    assert reshard.diff(str(folder), tmp_path / "run").equal
    assert reshard.verify(str(folder)).ok
    with pytest.raises(DestinationExistsError, match="is not empty"):
        reshard.convert(tmp_path / "model", str(folder), layout=LAYOUT, iteration=3)
    reshard.convert(tmp_path / "model", str(folder), layout=LAYOUT, iteration=3, dtype="bfloat16", overwrite=True)
    with reshard.open(str(folder)) as opened:
        assert opened.iteration == 3
        assert str(opened.load()["lm_head.weight"].dtype) == "bfloat16"
    # A run goes on there: the conversion has released its claim. An older iteration does not become the newest.
    reshard.save(str(folder), 4, tensors)
    reshard.convert(tmp_path / "model", str(folder), to="checkpoint2", iteration=2, overwrite=True)
    with reshard.open(str(folder)) as opened:
        assert opened.iteration == 4
    assert reshard.open(f"{folder}/iteration_00000002").iteration == 2
    protocol.release()


@pytest.mark.slow(disk=False)
def test_a_run_with_its_state_is_converted_into_a_root_in_a_bucket(
    bucket: tuple[Location, Proxy], tmp_path: Path
) -> None:
    folder, _ = bucket
    extra = {"seed": 5, "moments": np.arange(10_000, dtype=np.float64)}
    reshard.save(tmp_path / "run", 7, {"w": np.arange(50_000, dtype=np.float32).reshape(100, 500)}, extra=extra)
    layout = {"mesh": {"tp": 2}, "rules": [{"match": "w", "cut": ["tp", None]}]}
    reshard.convert(tmp_path / "run", str(folder), layout=layout)
    loaded = reshard.load(str(folder))
    assert loaded.iteration == 7
    np.testing.assert_array_equal(loaded.state["w"].ravel(), np.arange(50_000, dtype=np.float32))
    assert loaded.extra["seed"] == 5
    np.testing.assert_array_equal(loaded.extra["moments"], extra["moments"])
    assert reshard.verify(str(folder)).ok
    protocol.release()


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize(("bucket", "kind"), [("gs", "refused"), ("s3", "lost answer")], indirect=["bucket"])
def test_a_root_is_whole_or_not_there_whatever_request_of_a_conversion_fails(
    bucket: tuple[Location, Proxy], tmp_path: Path, kind: str
) -> None:
    folder, proxy = bucket
    model(tmp_path / "model")
    for number in itertools.count():
        root, seen = folder / str(number), itertools.count()

        def fails(method: str, path: str, seen: Any = seen, number: int = number) -> bool:
            is_write = method in ("PUT", "POST") and "delete" not in path and "batch" not in path
            return is_write and "probe/" not in unquote(path) and next(seen) == number

        fault = Fault(fails, 403, "AccessDenied") if kind == "refused" else Fault(fails, is_lost=True)
        proxy.faults = [fault]
        try:
            reshard.convert(tmp_path / "model", str(root), layout=LAYOUT, iteration=3)
        except StorageError:
            assert kind == "refused"
            proxy.faults = []
            assert not root.exists() or roots.list_iterations(root) == []
            assert not [name for name, _ in root.store.below(root.path) if name.startswith("iteration")]  # type: ignore[attr-defined]
            reshard.convert(tmp_path / "model", str(root), layout=LAYOUT, iteration=3)
        with reshard.open(str(root)) as opened:
            assert opened.iteration == 3
            opened.load(verify="full")
        if fault.times:
            break
    assert number > 5


def test_what_a_bucket_does_not_have_is_refused(bucket: tuple[Location, Proxy], tmp_path: Path) -> None:
    folder, proxy = bucket
    model(tmp_path / "model")
    proxy.log.clear()
    refused: list[dict[str, Any]] = [
        {"layout": LAYOUT, "share": (0, 2)},
        {"commit": {"private": True}},
        {"to": "mindspore", "files": {"modes": "mindspore-transformers"}},
    ]
    for options in refused:
        with pytest.raises(UnsupportedError, match="is in a bucket"):
            reshard.convert(tmp_path / "model", str(folder), **options)
    assert not [method for method, *_ in proxy.log if method not in ("GET", "HEAD")]


def test_files_that_no_conversion_wrote_are_not_replaced(bucket: tuple[Location, Proxy], tmp_path: Path) -> None:
    import safetensors.numpy

    folder, _ = bucket
    model(tmp_path / "model")
    (folder / "model-00001-of-00002.safetensors").replace(safetensors.numpy.save({"other": np.ones(3)}))
    with pytest.raises(DestinationExistsError, match="was not written by an earlier conversion"):
        reshard.convert(tmp_path / "model", str(folder), overwrite=True)
    assert folder.names() == ["model-00001-of-00002.safetensors"]


@pytest.mark.parametrize("number", [6, *(pytest.param(one, marks=pytest.mark.slow) for one in (0, 2, 4, 8, 10, 12))])
def test_a_conversion_that_fails_leaves_nothing(
    bucket: tuple[Location, Proxy], tmp_path: Path, number: int, request: pytest.FixtureRequest
) -> None:
    folder, proxy = bucket
    model(tmp_path / "model", n_rows=90_000)  # of 23 MB and 12 MB each
    changes = itertools.count()

    def fails(method: str, path: str) -> bool:
        """Whether this is the change that fails."""
        return method in ("PUT", "POST") and "delete" not in path and "batch" not in path and next(changes) == number

    proxy.faults = [Fault(fails, 403, "AccessDenied")]
    try:
        reshard.convert(tmp_path / "model", str(folder), max_shard_size="25MB")
    except StorageError as error:
        assert "do not permit it (403" in error.message  # noqa: PT017  the last numbers are never reached
    else:
        assert number > 10
        return
    assert objects_of(folder) == {}
    if folder.path.startswith("s3"):
        status, answer = request.getfixturevalue("s3").request("GET", f"/{BUCKET}?uploads=")
        assert status == 200
        assert folder.name not in answer.decode()


def refused_then_silent(is_silent: Callable[[], bool] = lambda: True) -> list[Fault]:
    """One write is refused, and no request behind it gets an answer while a function returns true."""
    has_failed: list[str] = []

    def fails(method: str, path: str) -> bool:
        if is_write := method == "PUT" and "00001" in path:
            has_failed.append(path)
        return is_write

    return [
        Fault(lambda *_: bool(has_failed) and is_silent(), 503, "SlowDown", times=10**6),
        Fault(fails, 403, "AccessDenied"),
    ]


@pytest.mark.slow(disk=False)
def test_what_is_left_is_said_if_the_service_does_not_answer_any_more(
    bucket: tuple[Location, Proxy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, proxy = bucket
    model(tmp_path / "model")
    monkeypatch.setattr(remote, "_ANSWER_SECONDS", 0.2)
    proxy.faults = refused_then_silent()
    with pytest.raises(StorageError) as caught:
        reshard.convert(tmp_path / "model", str(folder), max_shard_size=20_000)
    left = f"what was written to `{folder}` may be left, with its claim `{folder}/.reshard.convert.staging` and "
    assert "do not permit it (403" in caught.value.message
    assert left in caught.value.message
    assert caught.value.message.endswith(f"{folder}/.reshard.convert.staging: no answer within 0.2 s)")
    assert str(caught.value.hint).endswith("; `overwrite=True` replaces what is left")
    proxy.faults = []
    reshard.convert(tmp_path / "model", str(folder), max_shard_size=20_000, overwrite=True)
    with reshard.open(str(folder)) as opened:
        assert len(opened.load()) > 0


@pytest.mark.slow(disk=False)
def test_a_clean_up_has_one_limit_of_time(
    bucket: tuple[Location, Proxy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder, proxy), n_looks = bucket, itertools.count()
    model(tmp_path / "model")
    monkeypatch.setattr(remote, "_CLEAN_UP_SECONDS", 0.5)
    proxy.faults = refused_then_silent(lambda: next(n_looks) > 1)  # after first answers
    begun = time.monotonic()
    with pytest.raises(StorageError, match=r"403 AccessDenied.* may be left, .*the service does not answer"):
        reshard.convert(tmp_path / "model", str(folder), max_shard_size=20_000)
    assert time.monotonic() - begun < 50, "one request alone is tried for a minute"
    proxy.faults = []
    reshard.convert(tmp_path / "model", str(folder), max_shard_size=20_000, overwrite=True)
    with reshard.open(str(folder)) as opened:
        assert len(opened.load()) > 0


def test_a_conversion_that_is_interrupted_leaves_nothing(bucket: tuple[Location, Proxy], tmp_path: Path) -> None:
    folder, proxy = bucket
    model(tmp_path / "model")

    def interrupt(method: str, path: str) -> None:
        if method == "PUT" and "00001" in path:
            os.kill(os.getpid(), 2)

    proxy.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        reshard.convert(tmp_path / "model", str(folder), max_shard_size=20_000)
    proxy.before = None
    assert objects_of(folder) == {}


@pytest.mark.slow(disk=False)
def test_one_of_two_conversions_writes(bucket: tuple[Location, Proxy], tmp_path: Path) -> None:
    folder, proxy = bucket
    model(tmp_path / "model")
    reached, go_on = threading.Event(), threading.Event()

    def pause(method: str, path: str) -> None:
        if method == "PUT" and "00002" in path and not reached.is_set():
            reached.set()
            assert go_on.wait(60)

    proxy.before = pause
    outcome: list[BaseException] = []

    def first() -> None:
        try:
            reshard.convert(tmp_path / "model", str(folder), max_shard_size=20_000)
        except ReshardError as error:
            outcome.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    assert reached.wait(60)
    with pytest.raises(DestinationExistsError):
        reshard.convert(tmp_path / "model", str(folder), max_shard_size=20_000)
    # The second one takes over, and the first one sees it.
    reshard.convert(tmp_path / "model", str(folder), dtype="bfloat16", max_shard_size=20_000, overwrite=True)
    go_on.set()
    thread.join()
    assert [type(error) for error in outcome] == [DestinationExistsError]
    reshard.convert(tmp_path / "model", tmp_path / "out", dtype="bfloat16", max_shard_size=20_000)
    found = objects_of(folder)
    late = {name for name, data in found.items() if data != files_of(tmp_path / "out").get(name)}
    # The one that it wrote meanwhile: who takes over has to know that no other conversion runs.
    assert late <= {"model-00002-of-00004.safetensors"}


@pytest.mark.slow(disk=False)
def test_the_command_line_converts_into_a_bucket(s3: S3Server, tmp_path: Path) -> None:
    model(tmp_path / "model")
    url = f"s3://{BUCKET}/command-{os.getpid()}"
    command = [sys.executable, "-m", "reshard", "convert", str(tmp_path / "model"), url, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"] == url
    assert objects_of(locate(url)) == files_of(tmp_path / "model") | {
        "model.safetensors": (objects_of(locate(url)))["model.safetensors"]
    }
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode != 0
    assert "is not empty" in done.stdout + done.stderr


@pytest.mark.slow(disk=False)
def test_memory_is_bounded_and_too_little_is_an_error(s3: S3Server, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/bounded-{os.getpid()}/w.safetensors"
    reshard.save_file({"w": np.zeros(400_000_000, np.uint8)}, tmp_path / "w.safetensors")
    code = "import sys, reshard\nreshard.convert(*sys.argv[1:], memory='128MiB', progress=look)"
    assert 16 < peak_mib(code, tmp_path / "w.safetensors", url) < 128 + 64  # with the interpreter
    with pytest.raises(ArgumentError, match="expected at least 37748736"):
        reshard.convert(tmp_path / "w.safetensors", f"{url}.safetensors", memory="32MiB")
    assert locate(f"{url}.safetensors").kind() is None


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_a_conversion_that_ended_while_another_one_was_planned_is_not_replaced(
    bucket: tuple[Location, Proxy], tmp_path: Path
) -> None:
    folder, proxy = bucket
    model(tmp_path / "model")
    found: dict[str, bytes] = {}

    def complete(method: str, path: str) -> None:
        if method in ("PUT", "POST") and "convert.staging" in unquote(path):
            proxy.before = None
            reshard.convert(tmp_path / "model", str(folder), dtype="bfloat16")
            found.update(objects_of(folder))

    proxy.before = complete
    with pytest.raises(DestinationExistsError, match="another conversion has written"):
        reshard.convert(tmp_path / "model", str(folder))
    assert found
    assert objects_of(folder) == found


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_a_conversion_that_is_taken_over_while_it_commits_leaves_the_claim(
    bucket: tuple[Location, Proxy], tmp_path: Path
) -> None:
    folder, proxy = bucket
    model(tmp_path / "model")
    claim = folder / ".reshard.convert.staging"

    def take_over(method: str, path: str) -> None:
        if method == "PUT" and unquote(path).endswith("index.json"):
            proxy.after = None
            claim.replace(b"{}")

    proxy.after = take_over
    with pytest.raises(DestinationExistsError, match="has taken it over"):
        reshard.convert(tmp_path / "model", str(folder), max_shard_size=20_000)
    assert claim.read_small(10) == b"{}"


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_an_index_that_another_program_makes_meanwhile_is_not_replaced(
    bucket: tuple[Location, Proxy], tmp_path: Path
) -> None:
    folder, proxy = bucket
    model(tmp_path / "model")
    index = folder / "model.safetensors.index.json"

    def make(method: str, path: str) -> None:
        if method == "PUT" and unquote(path).endswith(".safetensors"):
            proxy.before = None
            index.replace(b"of another program")

    proxy.before = make
    with pytest.raises(DestinationExistsError, match=r"index\.json` was made by another program meanwhile"):
        reshard.convert(tmp_path / "model", str(folder), max_shard_size=20_000)
    assert objects_of(folder) == {index.name: b"of another program"}


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_claims_that_a_killed_removal_has_left_are_removed_without_a_warning(
    bucket: tuple[Location, Proxy], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = bucket
    model(tmp_path / "model")
    names = [f".reshard.convert-{'7' * 16}.staging", f".reshard.convert-{'7' * 16}-prepared.staging"]
    for name in names:
        (folder / name).replace(b"{}")
    reshard.convert(tmp_path / "model", str(folder))
    assert caplog.messages == []
    assert not [name for name in objects_of(folder) if name.startswith(".")]
    # Those of a claim that is there are named.
    for name in (*names, ".reshard.convert.staging"):
        (folder / "other" / name).replace(b"{}")
    with pytest.raises(DestinationExistsError, match="another conversion writes there, or was killed"):
        reshard.convert(tmp_path / "model", str(folder / "other"))
    assert any("is left by a conversion that did not end" in one for one in caplog.messages)
