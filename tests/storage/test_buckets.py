"""Checkpoints in a bucket, read from a real S3 server."""

from __future__ import annotations

import collections
import itertools
import json
import logging
import multiprocessing
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from click.testing import CliRunner
from tests.helpers.sample_checkpoints import DATA, SAMPLES, checkpoints_of
from tests.peers.required import required
from tests.servers.proxy import Fault, Proxy, before_server
from tests.servers.s3 import BUCKET, SECRET

import reshard
from reshard.cli import main
from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    DamagedFileError,
    EmptyRootError,
    ReshardError,
    StorageError,
    UnsupportedError,
)
from reshard.storage.location import locate
from reshard.values.fetched import fetched_here

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers.s3 import S3Server

_numbers = itertools.count()


@pytest.fixture
def prefix() -> str:
    """A folder in the bucket that no other test uses."""
    return f"test-{os.getpid()}-{next(_numbers)}"


def content(path: object) -> tuple[str, dict[str, tuple[str, bytes]]]:
    """The format of a checkpoint, and dtype and bytes of its tensors; of ranks, of the arrays of each."""
    with reshard.open(path) as opened:  # type: ignore[arg-type]
        try:
            arrays = opened.load()
        except ReshardError as error:
            return opened.format, {type(error).__name__: (error.message.rpartition("/")[2], b"")}
        return opened.format, {key: (str(array.dtype), array.tobytes()) for key, array in arrays.items()}


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("sample", SAMPLES)
def test_every_format_is_read_from_a_bucket_as_from_a_folder(s3: S3Server, prefix: str, sample: str) -> None:
    url = s3.upload(DATA / sample, prefix)
    paths = checkpoints_of(sample)
    assert paths, "no checkpoint was found"
    for path in paths:
        assert content(f"{url}/{path.relative_to(DATA / sample)}".removesuffix("/.")) == content(path)


@pytest.fixture
def proxy(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy between the package and the server."""
    with before_server(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


def save_run(folder: Path, iterations: tuple[int, ...] = (10, 20)) -> dict[str, np.ndarray]:
    """Save a run with some iterations, and return the tensors of the last one."""
    rng = np.random.default_rng(7)
    for iteration in iterations:
        tensors = {
            "embedding": rng.standard_normal((512, 700)).astype(np.float32),
            **{f"layers.{i}.weight": rng.standard_normal((96, 128)).astype(np.float32) for i in range(4)},
            **{f"layers.{i}.bias": rng.standard_normal(96).astype(np.float32) for i in range(4)},
        }
        reshard.save(folder, iteration, tensors)
    return tensors


LAYOUT = {
    "mesh": {"tp": 4},
    "rules": [{"match": "*.weight", "cut": [None, "tp"]}, {"match": "embedding", "cut": ["tp", None]}, {"match": "*"}],
}


def test_a_root_is_opened_at_its_newest_iteration_and_each_rank_gets_its_part(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    save_run(tmp_path / "run")
    url = s3.upload(tmp_path / "run", prefix)
    with reshard.open(url) as remote, reshard.open(tmp_path / "run") as local:
        assert (remote.iteration, remote.format) == (20, local.format)
        assert str(remote.path) == f"{url}/iteration_00000020"
        for rank in range(4):
            found, expected = remote.load(LAYOUT, rank=rank), local.load(LAYOUT, rank=rank)
            assert {k: v.tobytes() for k, v in found.items()} == {k: v.tobytes() for k, v in expected.items()}
        np.testing.assert_array_equal(
            remote.read("embedding", (slice(100, 300, 7), slice(3, 50))), local.read("embedding")[100:300:7, 3:50]
        )
    assert reshard.load(url, layout=LAYOUT, rank=1).iteration == 20
    assert reshard.open(f"{url}/iteration_00000010").iteration == 10


def test_an_unfinished_or_damaged_iteration_of_a_bucket_is_skipped(s3: S3Server, prefix: str, tmp_path: Path) -> None:
    save_run(tmp_path / "run")
    url = s3.upload(tmp_path / "run", prefix)
    s3.delete(f"{prefix}/iteration_00000020/manifest.json")
    with reshard.open(url) as opened:
        assert opened.iteration == 10
    s3.upload(tmp_path / "run", prefix)
    [shard] = [one for one in (tmp_path / "run/iteration_00000020").glob("*.safetensors") if one.stat().st_size > 1e6]
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    s3.put(f"{prefix}/iteration_00000020/{shard.name}", bytes(data))
    with reshard.open(f"{url}/iteration_00000020") as opened, pytest.raises(DamagedFileError, match="differ"):
        opened.load()
    report = reshard.verify(f"{url}/iteration_00000020")
    assert not report.ok
    assert shard.name in str(report)


def test_verify_diff_convert_and_init_from_read_a_bucket(s3: S3Server, prefix: str, tmp_path: Path) -> None:
    tensors = save_run(tmp_path / "run")
    url = s3.upload(tmp_path / "run", prefix)
    report = reshard.verify(url)
    assert report.ok
    assert all("no run saves into this root" in str(one.not_recorded) for one in report.checkpoints)
    assert reshard.diff(url, tmp_path / "run").equal
    assert not reshard.diff(f"{url}/iteration_00000010", url).equal
    reshard.convert(url, tmp_path / "w.safetensors")
    copied = reshard.load_file(tmp_path / "w.safetensors")
    assert {key: copied[key].tobytes() for key in tensors} == {key: one.tobytes() for key, one in tensors.items()}
    reshard.convert(url, tmp_path / "hf", to="huggingface", layout=None)
    hugging = s3.upload(tmp_path / "hf", f"{prefix}-hf")
    assert reshard.diff(hugging, tmp_path / "w.safetensors").equal


def test_one_file_is_opened_in_place_of_safetensors(s3: S3Server, prefix: str, tmp_path: Path) -> None:
    w = np.arange(300_000, dtype=np.float32).reshape(300, 1000)
    reshard.save_file({"w": w, "b": w[0]}, tmp_path / "m.safetensors", {"format": "np"})
    s3.put(f"{prefix}/m.safetensors", (tmp_path / "m.safetensors").read_bytes())
    url = f"s3://{BUCKET}/{prefix}/m.safetensors"
    with reshard.safe_open(url, "np") as f:
        assert (sorted(f.keys()), f.metadata()) == (["b", "w"], {"format": "np"})
        np.testing.assert_array_equal(f.get_slice("w")[10:20, ::3], w[10:20, ::3])
    with reshard.safe_open(url, "pt") as f:
        assert f.get_tensor("b").tolist() == w[0].tolist()
    np.testing.assert_array_equal(reshard.load_file(url)["w"], w)
    with pytest.raises(ArgumentError, match="cannot be mapped"):
        reshard.safe_open(url, "np", backend="mmap")


def test_a_file_is_opened_by_few_requests(proxy: Proxy, s3: S3Server, prefix: str, tmp_path: Path) -> None:
    reshard.save_file({"w": np.arange(1000)}, tmp_path / "m.safetensors")
    data = (tmp_path / "m.safetensors").read_bytes()
    for name, methods in (
        (f"{prefix}/m.safetensors", ["GET"] * 3),
        ("m.safetensors", ["HEAD", "GET", "HEAD"] + ["GET"] * 2),
    ):
        s3.put(name, data)
        proxy.log.clear()
        with reshard.open(f"s3://{BUCKET}/{name}") as opened:
            assert opened.keys() == ["w"]
        assert [method for method, *_ in proxy.log] == methods


@pytest.mark.slow(disk=False)
def test_little_more_than_the_chunks_of_a_plan_is_fetched(
    proxy: Proxy, s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(3)
    tensors = {f"w{i}": rng.integers(0, 256, (3000, 2500), np.uint8) for i in range(6)}
    tensors |= {f"b{i:03}": rng.integers(0, 256, 900, np.uint8) for i in range(200)}
    reshard.save(tmp_path / "run", 1, tensors)
    url = s3.upload(tmp_path / "run", prefix)
    total = sum(one.stat().st_size for one in (tmp_path / "run").rglob("*.safetensors"))

    def load(keys: list[str], layout: dict[str, object] | None = None, rank: int | None = None) -> tuple[int, int]:
        """Bytes and ranges of a load of some tensors."""
        with reshard.open(url) as opened:
            before = len(proxy.log)
            found = opened.load(layout, rank=rank, keys=keys)
            ranges = proxy.ranges(before)
        assert found.keys() == set(keys)
        return sum(ranges.values()), len(ranges)

    everything, n_requests = load(list(tensors))
    assert total <= everything <= 1.05 * total
    assert n_requests <= 28  # of 2 MiB: all requests at once have a part
    chunk = 256 << 10
    one, n_requests = load(["w3"])
    assert 7_500_000 <= one <= 1.05 * (7_500_000 + 2 * chunk)
    assert n_requests <= 5
    small, n_requests = load([f"b{i:03}" for i in range(200)])
    assert small <= 1.05 * (200 * 900 + 2 * chunk)
    assert n_requests == 1
    rows: dict[str, object] = {
        "mesh": {"tp": 4},
        "rules": [{"match": "w*", "cut": ["tp", None]}, {"match": "*"}],
    }
    part, n_requests = load(["w1"], rows, 2)
    assert part <= 1.05 * (7_500_000 // 4 + 2 * chunk)
    assert n_requests <= 3


def test_an_object_that_is_replaced_while_it_is_read_is_an_error(s3: S3Server, prefix: str, tmp_path: Path) -> None:
    for value in (1, 2):
        reshard.save_file({"w": np.full(3_000_000, value, np.uint8)}, tmp_path / f"{value}.safetensors")
    s3.put(f"{prefix}/m.safetensors", (tmp_path / "1.safetensors").read_bytes())
    url = f"s3://{BUCKET}/{prefix}/m.safetensors"
    with reshard.open(url) as opened:
        assert opened.read("w")[5] == 1
        s3.put(f"{prefix}/m.safetensors", (tmp_path / "2.safetensors").read_bytes())
        with pytest.raises(DamagedFileError, match="was replaced while it was read") as caught:
            opened.load()
        assert caught.value.hint is not None
    with reshard.open(url) as opened:
        assert set(opened.read("w").tolist()) == {2}
        s3.delete(f"{prefix}/m.safetensors")
        with pytest.raises(ReshardError, match=r"there is no object|was replaced"):
            opened.load()


def test_an_answer_that_breaks_off_is_resumed(proxy: Proxy, s3: S3Server, prefix: str, tmp_path: Path) -> None:
    w = np.random.default_rng(1).integers(0, 256, 3_000_000, np.uint8)
    reshard.save_file({"w": w}, tmp_path / "m.safetensors")
    s3.put(f"{prefix}/m.safetensors", (tmp_path / "m.safetensors").read_bytes())
    with reshard.open(f"s3://{BUCKET}/{prefix}/m.safetensors") as opened:
        proxy.faults.append(Fault(lambda method, _: method == "GET", keep_bytes=100_000))
        np.testing.assert_array_equal(opened.read("w"), w)
        assert proxy.faults[0].times == 0


@pytest.mark.slow(disk=False)
def test_a_busy_service_is_asked_again(proxy: Proxy, s3: S3Server, prefix: str, tmp_path: Path) -> None:
    save_run(tmp_path / "run", (1,))
    url = s3.upload(tmp_path / "run", prefix)
    proxy.faults = [Fault(lambda *_: True, status, "SlowDown") for status in (503, 429, 500)]
    before, n_before = fetched_here(), len(proxy.log)
    assert reshard.load(url).iteration == 1
    assert [fault.times for fault in proxy.faults] == [0, 0, 0]
    fetched = fetched_here() - before
    assert (fetched.n_failed, fetched.n_requests) == (3, 3 + len(proxy.log) - n_before)


@pytest.mark.parametrize(
    ("answer", "what", "hint"),
    [
        ((403, "AccessDenied", {}), "do not permit it (403", "s3:GetObject"),
        ((403, "InvalidAccessKeyId", {}), "(403", "s3:GetObject|AWS_PROFILE"),
        ((401, "Unauthorized", {}), "requires credentials (401", "AWS_ACCESS_KEY_ID"),
        (
            (301, "PermanentRedirect", {"x-amz-bucket-region": "eu-west-1"}),
            "is in the region `eu-west-1` (301",
            "AWS_REGION=eu-west-1",
        ),
        ((400, "ExpiredToken", {}), "as it does if credentials have expired", "AWS_SESSION_TOKEN"),  # HEAD has no code
        ((503, "SlowDown", {}), "asks for fewer requests (503", "later"),
        ((429, "SlowDown", {}), "asks for fewer requests (429", "later"),
        ((500, "InternalError", {}), "the service failed (500", "later"),
    ],
)
def test_each_status_is_one_error_with_bucket_key_and_what_to_do(
    proxy: Proxy, prefix: str, answer: tuple[int, str, dict[str, str]], what: str, hint: str
) -> None:
    # Options hold for a bucket in the whole process, so each case has its own.
    bucket = f"bucket-{prefix}"
    options = reshard.BucketOptions(retry_s=0.3)
    proxy.faults.append(Fault(lambda *_: True, *answer, times=1000))
    with pytest.raises(StorageError) as caught:
        reshard.open(reshard.locate(f"s3://{bucket}/run", options))
    assert f"s3://{bucket}/run" in caught.value.message
    assert what in caught.value.message
    assert any(one in str(caught.value.hint) for one in hint.split("|"))
    assert caught.value.path == f"s3://{bucket}/run"
    assert SECRET not in repr(vars(caught.value))


def test_what_does_not_exist_is_named(s3: S3Server, prefix: str) -> None:
    with pytest.raises(StorageError, match="there is no bucket `no-such-bucket`"):
        reshard.open("s3://no-such-bucket/run")
    with pytest.raises(EmptyRootError, match=f"there is nothing at `s3://{BUCKET}/{prefix}`"):
        reshard.open(f"s3://{BUCKET}/{prefix}")
    with pytest.raises(CheckpointNotFoundError, match=r"there is nothing at .*m\.safetensors"):
        reshard.open(f"s3://{BUCKET}/{prefix}/m.safetensors")
    with pytest.raises(ArgumentError, match="does not name a bucket"):
        reshard.open("s3://id:secret@bucket/run")


def test_wrong_credentials_are_told_from_missing_permissions(
    s3: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    with pytest.raises(StorageError) as caught:
        locate(f"s3://{BUCKET}/{prefix}").names()
    assert "does not accept the credentials (403 SignatureDoesNotMatch)" in caught.value.message
    assert "another-secret" not in repr(vars(caught.value))


def test_an_endpoint_that_cannot_be_reached_is_named(
    s3: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    options = reshard.BucketOptions(retry_s=0.3)
    with pytest.raises(StorageError, match="cannot be reached") as caught:
        reshard.open(reshard.locate(f"s3://closed-{prefix}/run", options))
    assert "AWS_ENDPOINT_URL" in str(caught.value.hint)
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(StorageError, match="without TLS") as caught:
        reshard.open(reshard.locate(f"s3://plain-{prefix}/run", options))
    assert "AWS_ALLOW_HTTP" in str(caught.value.hint)


def test_a_bucket_has_one_set_of_options(s3: S3Server, prefix: str) -> None:
    url = f"s3://options-{prefix}/run"
    for _ in range(2):
        reshard.locate(url, reshard.BucketOptions(endpoint=s3.endpoint, allow_http=True))
    with pytest.raises(ArgumentError, match="already has the options") as caught:
        reshard.locate(url, reshard.BucketOptions(region="eu-west-1"))
    assert s3.endpoint in caught.value.message
    with pytest.raises(ArgumentError, match="is no URL"):
        reshard.locate("run", reshard.BucketOptions(region="eu-west-1"))
    with pytest.raises(ArgumentError, match=r"`retry_s` is -1\.0"):
        reshard.BucketOptions(retry_s=-1.0)
    with pytest.raises(ArgumentError, match="before `@`") as caught:
        reshard.BucketOptions(endpoint="https://name:hidden@s3.example.org")
    assert "hidden" not in str(caught.value)


def test_credentials_and_endpoint_come_from_a_profile(
    s3: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put(f"{prefix}/note", b"seven")
    given = {name: os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL")}
    for name in (*given, "AWS_REGION"):
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text(
        f"[default]\naws_access_key_id = other\naws_secret_access_key = other\n"
        f"[work]\naws_access_key_id = {given['AWS_ACCESS_KEY_ID']}\n"
        f"aws_secret_access_key = {given['AWS_SECRET_ACCESS_KEY']}\n"
    )
    (tmp_path / "config").write_text(
        f"[profile work]\nregion = us-east-1 # ours\nendpoint_url = {given['AWS_ENDPOINT_URL']}\n"
        "s3 =\n  max_concurrent_requests = 20\n[profile login]\nsso_session = corporate\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    note = locate(f"s3://{BUCKET}/{prefix}/note")
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert note.read_small(100) == b"seven"
    monkeypatch.setenv("AWS_PROFILE", "none")
    with pytest.raises(ArgumentError, match="there is no such profile"):
        note.read_small(100)
    monkeypatch.setenv("AWS_PROFILE", "login")
    with pytest.raises(UnsupportedError, match="`sso_session`") as caught:
        note.read_small(100)
    assert "export-credentials --profile login" in str(caught.value.hint)


def test_a_root_that_is_not_there_is_not_changed(s3: S3Server, prefix: str) -> None:
    url = f"s3://{BUCKET}/{prefix}"
    for act in (lambda: reshard.prune(url, 1), lambda: reshard.pin(url, 1), lambda: reshard.rollback(url, 1)):
        with pytest.raises(CheckpointNotFoundError):
            act()
    assert locate(url).kind() is None


def test_a_location_in_a_bucket_is_one_of_a_store(s3: S3Server, prefix: str) -> None:
    s3.put(f"{prefix}/a/b.txt", b"0123456789")
    s3.put(f"{prefix}/a.txt", b"")
    folder = locate(f"s3://{BUCKET}/{prefix}/")
    assert folder.names() == ["a", "a.txt"]
    assert folder.sizes() == [("a", "folder", 0), ("a.txt", "file", 0)]
    assert (folder.kind(), (folder / "a").kind(), (folder / "a.txt").kind()) == ("folder", "folder", "file")
    assert (folder / "x").kind() is None
    file = folder / "a/b.txt"
    assert (file.read_head(3), file.read_tail(4), file.read_small(10)) == (b"012", b"6789", b"0123456789")
    assert ((folder / "a.txt").read_small(5), (folder / "a.txt").read_head(5)) == (b"", b"")
    assert [*file.pieces(10, [(2, 5), (8, 10)])] == [b"234", b"89"]
    with file.open() as opened:
        opened.seek(-3, os.SEEK_END)
        assert opened.read() == b"789"
    for act in (lambda: file.read_small(9), lambda: folder.read_head(5), lambda: [*file.pieces(11)]):
        with pytest.raises(DamagedFileError):
            act()
    with pytest.raises(CheckpointNotFoundError):
        (folder / "x").read_small(5)
    assert [str(one) for one in file.parents][-1] == f"s3://{BUCKET}"
    assert (locate(f"s3://{BUCKET}").parent, file.name, file.suffix) == (locate(f"s3://{BUCKET}"), "b.txt", ".txt")
    assert os.fspath(file) == f"s3://{BUCKET}/{prefix}/a/b.txt"
    before = file.stat()
    s3.put(f"{prefix}/a/b.txt", b"0123456780")
    assert before.identity != file.stat().identity


def _load_in_child(url: str, queue: multiprocessing.Queue[bytes]) -> None:
    with reshard.open(url) as opened:
        queue.put(opened.read("w").tobytes())


def test_a_forked_process_has_connections_of_its_own(s3: S3Server, prefix: str, tmp_path: Path) -> None:
    w = np.arange(1000)
    reshard.save_file({"w": w}, tmp_path / "m.safetensors")
    s3.put(f"{prefix}/m.safetensors", (tmp_path / "m.safetensors").read_bytes())
    url = f"s3://{BUCKET}/{prefix}/m.safetensors"
    context = multiprocessing.get_context("fork")
    with reshard.open(url) as opened:
        assert opened.read("w").tobytes() == w.tobytes()
        queue: multiprocessing.Queue[bytes] = context.Queue()
        children = [context.Process(target=_load_in_child, args=(url, queue)) for _ in range(3)]
        for child in children:
            child.start()
        assert [queue.get(timeout=30) for _ in children] == [w.tobytes()] * 3
        for child in children:
            child.join(30)
            assert child.exitcode == 0
        assert opened.read("w").tobytes() == w.tobytes()


@pytest.mark.slow
def test_the_command_line_reads_a_bucket_and_tells_what_was_fetched(s3: S3Server, prefix: str, tmp_path: Path) -> None:
    save_run(tmp_path / "run")
    url = s3.upload(tmp_path / "run", prefix)

    def run(*arguments: str) -> dict[str, object]:
        command = [sys.executable, "-m", "reshard", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
        assert done.returncode == 0, done.stderr
        assert SECRET not in done.stdout + done.stderr
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    assert run("inspect", url, "--json")["iteration"] == 20
    found = run("convert", url, str(tmp_path / "w.safetensors"), "--json")
    remote = found["remote"]
    assert isinstance(remote, dict)
    n_bytes = sum(one.nbytes for one in reshard.load_file(tmp_path / "w.safetensors").values())
    assert remote["wanted_bytes"] == n_bytes
    assert n_bytes <= remote["fetched_bytes"] <= 1.2 * n_bytes + (1 << 20)
    assert remote["n_requests"] > 0
    assert run("verify", url, "--json")["ok"] is True


def test_a_command_tells_only_what_it_fetched_itself(s3: S3Server, prefix: str, tmp_path: Path) -> None:
    save_run(tmp_path / "run", (1,))
    url = s3.upload(tmp_path / "run", prefix)
    with reshard.open(url) as opened:
        assert opened.load()
    local = CliRunner().invoke(main, ["inspect", str(tmp_path / "run"), "--json"])
    assert "remote" not in json.loads(local.stdout)
    first, second = (
        json.loads(CliRunner().invoke(main, ["inspect", url, "--json"]).stdout)["remote"] for _ in range(2)
    )
    assert first == second


def test_layouts_and_configurations_are_read_from_a_bucket(s3: S3Server, prefix: str, tmp_path: Path) -> None:
    save_run(tmp_path / "run", (1,))
    url = s3.upload(tmp_path / "run", prefix)
    s3.put(f"{prefix}/tp4.json", json.dumps(LAYOUT).encode())
    with reshard.open(url) as opened:
        assert opened.load(f"{url}/tp4.json", rank=3)["layers.0.weight"].shape == (96, 32)


def test_a_run_starts_from_weights_in_a_bucket(s3: S3Server, prefix: str, tmp_path: Path) -> None:
    import torch

    from reshard.torch import Checkpointer

    weights = {"weight": np.arange(12, dtype=np.float32).reshape(3, 4), "bias": np.ones(3, np.float32)}
    reshard.save_file(weights, tmp_path / "model.safetensors")
    s3.put(f"{prefix}/model.safetensors", (tmp_path / "model.safetensors").read_bytes())
    url = f"s3://{BUCKET}/{prefix}"
    model = torch.nn.Linear(4, 3)
    with Checkpointer(tmp_path / "run", signals=()) as run:
        decision = run.resume(model=model, init_from=url)
    assert decision.init_from == url
    assert model.weight.tolist() == weights["weight"].tolist()


def test_a_checkpoint_is_opened_by_few_requests(proxy: Proxy, s3: S3Server, prefix: str, tmp_path: Path) -> None:
    w = save_run(tmp_path / "run", (1, 2, 3))
    reshard.convert(tmp_path / "run", tmp_path / "hf", to="huggingface")
    run, hf = s3.upload(tmp_path / "run", f"{prefix}/run"), s3.upload(tmp_path / "hf", f"{prefix}/hf")
    for url, most in ((run, 16), (hf, 5), (f"{hf}/model.safetensors", 6)):
        proxy.log.clear()
        with reshard.open(url) as opened:
            assert set(opened.keys()) == set(w)
        assert len(proxy.log) <= most, proxy.log


def test_lists_need_not_be_permitted_above_a_checkpoint(
    proxy: Proxy, s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    w = save_run(tmp_path / "run", (1,))
    url = s3.upload(tmp_path / "run", f"{prefix}/run")

    def is_above(_: str, path: str) -> bool:
        return "list-type" in path and not path.partition("prefix=")[2].startswith(f"{prefix}%2Frun%2F")

    proxy.faults.append(Fault(is_above, 403, "AccessDenied", times=1000))
    with reshard.open(url) as opened:
        assert set(opened.keys()) == set(w)


def test_a_load_logs_what_it_fetched(
    s3: S3Server, prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = save_run(tmp_path / "run", (1,))
    url = s3.upload(tmp_path / "run", prefix)
    with caplog.at_level(logging.INFO, "reshard"):
        reshard.load(url)
        reshard.load(tmp_path / "run")
    [message] = [one for one in caplog.messages if "were fetched" in one]
    found = re.fullmatch(r"(\S+): (\d+) bytes were fetched by (\d+) requests, for arrays of (\d+) bytes", message)
    assert found is not None, message
    n_bytes = sum(one.nbytes for one in tensors.values())
    assert (found[1], int(found[4])) == (f"{url}/iteration_00000001", n_bytes)
    assert n_bytes <= int(found[2]) <= 1.2 * n_bytes + (1 << 20)


@pytest.mark.slow(disk=False)
def test_iterations_are_verified_by_few_requests(proxy: Proxy, s3: S3Server, prefix: str, tmp_path: Path) -> None:
    for iteration in (1, 2, 3):
        reshard.save(tmp_path / "run", iteration, {"w": np.arange(100.0), "b": np.ones(3)})
    url = s3.upload(tmp_path / "run", prefix)
    proxy.log.clear()
    report = reshard.verify(url)
    assert [one.verified for one in report.checkpoints] == [True] * 3
    assert len(proxy.log) <= 80
    reads = collections.Counter(path for method, path, *_ in proxy.log if method == "GET" and "?" not in path)
    small = {path: n for path, n in reads.items() if path.endswith(("common.json", "checksums.bin"))}
    assert set(small.values()) == {1}
    # Each of them was compared all the same.
    for name in ("common.json", "metadata.json", "checksums.bin"):
        key = f"{prefix}/iteration_00000002/{name}"
        original = (tmp_path / "run/iteration_00000002" / name).read_bytes()
        s3.put(key, original[:-3] + bytes([original[-3] ^ 1]) + original[-2:])
        report = reshard.verify(url)
        assert [one.verified for one in report.checkpoints] == [True, False, True]
        assert name in str(report)
        s3.put(key, original)


def test_a_gguf_file_in_a_bucket_is_that_of_a_disk(s3: S3Server, prefix: str, tmp_path: Path) -> None:
    gguf = required("gguf")
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    values = rng.standard_normal((300, 1024)).astype(np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blocks", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("plain", values)
    for write in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{write}_to_file")()
    writer.close()
    s3.put(f"{prefix}/m.gguf", (tmp_path / "m.gguf").read_bytes())
    url = f"s3://{BUCKET}/{prefix}/m.gguf"
    assert content(url) == content(tmp_path / "m.gguf")
    with reshard.open(url) as remote, reshard.open(tmp_path / "m.gguf") as local:
        assert remote.quantised().keys() == {"blocks"}
        with remote.dequantised() as one, local.dequantised() as other:
            rows = (slice(20, 31), slice(64, 200))
            np.testing.assert_array_equal(one.read("blocks", rows), other.read("blocks", rows))
    reshard.convert(url, f"s3://{BUCKET}/{prefix}/w.safetensors", dtype="float32", files={"check_names": False})
    reshard.convert(tmp_path / "m.gguf", tmp_path / "w.safetensors", dtype="float32", files={"check_names": False})
    found = b"".join(locate(f"s3://{BUCKET}/{prefix}/w.safetensors").pieces())
    assert found == (tmp_path / "w.safetensors").read_bytes()
