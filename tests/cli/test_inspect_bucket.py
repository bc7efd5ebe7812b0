"""What `reshard inspect` says of a bucket: unfinished uploads, and rules that endanger a run."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner
from tests.servers import doubles
from tests.servers.proxy import Fault, before_server
from tests.servers.s3 import BUCKET, SECRET

import reshard
from reshard._core import LifecycleRule, RuleAction
from reshard.cli import bucket, main
from reshard.cli.bucket import danger_of, ends_uploads
from reshard.cli.output import size
from reshard.commit import protocol
from reshard.storage import remote

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers.s3 import S3Server

pytestmark = pytest.mark.skipif(not remote.is_available(), reason="the core was compiled without the feature `remote`")

_numbers = itertools.count()
NO_RULE = "no rule of the bucket removes unfinished uploads"


@pytest.fixture
def run(s3: S3Server, tmp_path: Path) -> str:
    """A run in the bucket, which no other test uses."""
    reshard.save(tmp_path / "run", 1, {"w": np.arange(2.0)})
    return s3.upload(tmp_path / "run", f"inspected-{os.getpid()}-{next(_numbers)}/run")


def bucket_of(url: str) -> dict[str, Any]:
    """What is told of the bucket as JSON, and no word of a secret."""
    result = CliRunner().invoke(main, ["inspect", url, "--json"])
    assert result.exit_code == 0, result.output
    assert SECRET not in result.output
    assert "Signature" not in result.output
    found: dict[str, Any] = json.loads(result.stdout)["bucket"]
    return found


def begin(s3: S3Server, path: str, *parts: bytes) -> str:
    """Begin an upload of an object, and send parts of it."""
    status, answer = s3.request("POST", f"/{path}?uploads=")
    found = re.search(rb"<UploadId>(.*?)</UploadId>", answer)
    assert status == 200, answer
    assert found is not None
    upload_id = found[1].decode()
    for number, part in enumerate(parts, 1):
        assert s3.request("PUT", f"/{path}?partNumber={number}&uploadId={upload_id}", part)[0] == 200
    return upload_id


def test_unfinished_uploads_are_named_with_what_ends_them(s3: S3Server, run: str) -> None:
    path = run.removeprefix("s3://")
    first = begin(s3, f"{path}/log/a%20b%26c.bin", b"x" * (5 << 20), b"y" * 11)
    begin(s3, f"{path}-2/other.bin")
    found = bucket_of(run)
    (upload,) = found["uploads"]
    assert upload["key"] == path.removeprefix(f"{BUCKET}/") + "/log/a b&c.bin"
    assert upload["n_bytes"] == (5 << 20) + 11
    assert 0 <= upload["age_s"] + 2 < 3600
    words = shlex.split(upload["end_with"])
    assert words[:3] == ["aws", "s3api", "abort-multipart-upload"]
    assert words[3:5] == ["--endpoint-url", s3.endpoint]
    assert words[5:] == ["--bucket", BUCKET, "--key", upload["key"], "--upload-id", first]
    text = CliRunner().invoke(main, ["inspect", run]).stdout
    assert f"  {upload['key']}  begun" in text
    assert f", {size((5 << 20) + 11)}\n" in text
    assert f"    {upload['end_with']}\n" in text
    assert s3.request("DELETE", f"/{path}/log/a%20b%26c.bin?uploadId={first}")[0] == 204
    assert bucket_of(run)["uploads"] == []


def rule(content: str, prefix: str = "") -> str:
    return f"<Rule><ID>r</ID><Status>Enabled</Status><Filter><Prefix>{prefix}</Prefix></Filter>{content}</Rule>"


def test_rules_that_endanger_a_run_are_told(s3: S3Server, run: str) -> None:
    key = run.removeprefix(f"s3://{BUCKET}/")
    assert any(note.startswith(NO_RULE) for note in bucket_of(run)["notes"])
    rules = [
        rule("<Expiration><Days>30</Days></Expiration>", f"{key}/"),
        rule("<Expiration><Days>3</Days></Expiration>", f"{key}-2/"),
        rule(
            "<AbortIncompleteMultipartUpload><DaysAfterInitiation>3</DaysAfterInitiation></AbortIncompleteMultipartUpload>"
        ),
    ]
    body = f"<LifecycleConfiguration>{''.join(rules)}</LifecycleConfiguration>"
    assert s3.request("PUT", f"/{BUCKET}?lifecycle=", body.encode())[0] == 200
    try:
        found = bucket_of(run)
        result = CliRunner().invoke(main, ["inspect", run])
    finally:
        assert s3.request("DELETE", f"/{BUCKET}?lifecycle=")[0] == 204
    assert found["notes"] == []
    (danger,) = found["dangers"]
    assert danger.startswith(
        f"the rule `r` of the bucket removes objects whose names begin with `{key}/` after 30 days"
    )
    assert "warning: the rule `r`" in result.stderr


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((403, "AccessDenied"), "the credentials do not permit it (403 AccessDenied); it needs s3:"),
        ((501, "NotImplemented"), "the service does not offer it (501 NotImplemented)"),
        ((503, "SlowDown"), "the service answered 503 SlowDown"),
    ],
)
def test_what_the_service_does_not_tell_is_a_note(
    s3: S3Server, run: str, monkeypatch: pytest.MonkeyPatch, answer: tuple[int, str], expected: str
) -> None:
    with before_server(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        asks = [
            Fault(lambda _, path: "uploads=" in path, *answer, times=9),
            Fault(lambda _, path: "lifecycle=" in path, *answer, times=9),
        ]
        proxy.faults += asks
        found = bucket_of(run)
    assert [note.partition(":")[0] for note in found["notes"]] == [
        "unfinished uploads are not known",
        "lifecycle rules are not known",
    ]
    assert all(expected in note for note in found["notes"])
    assert [9 - fault.times for fault in asks] == [1, 1]  # asked once


def test_a_lost_answer_is_a_note_without_a_time(s3: S3Server, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with before_server(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        proxy.faults.append(Fault(lambda _, path: "uploads=" in path, is_lost=True, times=9))
        note = bucket_of(run)["notes"][0]
    assert note.startswith("unfinished uploads are not known: ")
    assert "the connection failed" in note
    assert "tried for" not in note


UPLOAD = "<Upload><Key>{key}</Key><UploadId>i</UploadId><Initiated>{begun}</Initiated></Upload>"


@pytest.mark.parametrize(
    ("uploads", "lifecycle", "reason"),
    [
        ("<a>" * 100_000, "<a>" * 100_000, "is not the XML"),
        (b"<a>" + b"x" * (9 << 20), b"<LifecycleConfiguration>" + b"<Rule/>" * (2 << 20), "larger than 8 MiB"),
        ("<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>", "\xff\xfe", "is not the XML"),
        ("<Other/>", "<Other/>", "the answer "),
        ("", "not XML", "is not the XML"),
    ],
)
def test_hostile_answers_are_bounded(
    run_in_google: tuple[str, doubles.Double], uploads: str | bytes, lifecycle: str | bytes, reason: str
) -> None:
    url, double = run_in_google
    double.answers = {
        name: one if isinstance(one, bytes) else one.encode("latin-1")
        for name, one in (("uploads", uploads), ("lifecycle", lifecycle))
    }
    found = bucket_of(url)
    assert found["uploads"] == found["dangers"] == []
    assert len(found["notes"]) == 2
    assert all(reason in note for note in found["notes"])


@pytest.mark.slow(disk=False)
def test_a_list_that_never_ends_and_wrong_times_are_told(run_in_google: tuple[str, doubles.Double]) -> None:
    url, double = run_in_google
    hostile = "\x1b[2J'; rm -rf ~"
    again = "<IsTruncated>true</IsTruncated><NextKeyMarker>a</NextKeyMarker><NextUploadIdMarker>i</NextUploadIdMarker>"
    items = "".join(
        UPLOAD.format(key=f"run/{n}{hostile if n == 3 else ''}".replace("\x1b", "%1B"), begun=begun)
        for n, begun in enumerate(["", "never", "9999-99-99T00:00:00Z", "0001-01-01T00:00:00+23:59", "2999-01-01"])
    )
    encoding = "<EncodingType>url</EncodingType>"
    text = f"<ListMultipartUploadsResult>{encoding}{items}{again}</ListMultipartUploadsResult>"
    double.answers = {"uploads": text.encode()}
    double.log.clear()
    result = CliRunner().invoke(main, ["inspect", url])
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    assert sum("uploads=" in path for _, path, _ in double.log) == 2
    found = bucket_of(url)
    assert len(found["uploads"]) == 10
    assert found["notes"][0] == (
        "not all unfinished uploads are known: the service says that there are more, and not where they begin"
    )


@pytest.fixture
def run_in_google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run in a double of Google Cloud Storage."""
    reshard.save(tmp_path / "run", 1, {"w": np.arange(2.0)})
    for name in [name for name in os.environ if name.startswith("GOOGLE_")]:
        monkeypatch.delenv(name)
    with doubles.running("google") as double:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", double.endpoint)
        double.upload(tmp_path / "run", "run")
        yield "gs://weights/run", double


def test_google_tells_uploads_and_rules(run_in_google: tuple[str, doubles.Double]) -> None:
    url, double = run_in_google
    double.uploads["run/a b", "x&y"] = {"1": b"12345", "2": b"6"}
    double.uploads["run2/a", "z"] = {"1": b"1"}
    double.uploads["run_hf/iteration_00000001/a", "h"] = {"1": b"123"}
    action = "<Rule><Action><Delete/></Action><Condition><Age>9</Age></Condition></Rule>"
    double.answers = {"lifecycle": f"<LifecycleConfiguration>{action}</LifecycleConfiguration>".encode()}
    found = bucket_of(url)
    upload, of_export = found["uploads"]
    assert (upload["key"], upload["upload_id"], upload["n_bytes"]) == ("run/a b", "x&y", 6)
    assert (of_export["key"], of_export["n_bytes"]) == ("run_hf/iteration_00000001/a", 3)
    assert "https://storage.googleapis.com/weights/run/a%20b?uploadId=x%26y" in upload["end_with"]
    (danger,) = found["dangers"]
    assert danger.startswith("a rule of the bucket removes objects of the whole bucket after 9 days:")
    assert [note[: len(NO_RULE)] for note in found["notes"]] == [NO_RULE]


def test_of_a_file_its_own_uploads_are_told(run_in_google: tuple[str, doubles.Double]) -> None:
    url, double = run_in_google
    (name,) = [name for name in double.objects if name.endswith(".safetensors")]
    double.uploads[name, "own"] = double.uploads[f"{name}2", "of a neighbour"] = {"1": b"1"}
    found = bucket_of(url.removesuffix("run") + name)
    assert [one["upload_id"] for one in found["uploads"]] == ["own"]


def test_a_rule_about_exports_is_told(run_in_google: tuple[str, doubles.Double]) -> None:
    url, double = run_in_google
    condition = "<Condition><Age>9</Age><MatchesPrefix>run_hf/</MatchesPrefix></Condition>"
    rule = f"<Rule><Action><Delete/></Action>{condition}</Rule>"
    double.answers = {"lifecycle": f"<LifecycleConfiguration>{rule}</LifecycleConfiguration>".encode()}
    (danger,) = bucket_of(url)["dangers"]
    assert danger.endswith("whose names begin with `run_hf/` after 9 days: exports of the run lose files")


def test_what_does_not_answer_in_time_is_a_note(s3: S3Server, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reshard.cli.bucket._WAIT_S", 0.2)
    is_told = threading.Event()

    def hold(_: str, path: str) -> None:
        if "uploads=" in path or "lifecycle=" in path:
            is_told.wait(60)

    with before_server(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        proxy.before = hold
        try:
            found = bucket_of(run)
        finally:
            is_told.set()
    assert [note.partition(": ")[2] for note in found["notes"]] == ["the service does not answer in time"] * 2


def test_an_iteration_of_a_log_is_asked_about_as_its_run(s3: S3Server) -> None:
    url = f"s3://{BUCKET}/inspected-{os.getpid()}-{next(_numbers)}/run"
    reshard.save(url, 1, {"w": np.arange(2.0)})
    protocol.release()
    path = url.removeprefix("s3://")
    ids = [begin(s3, f"{path}{name}") for name in ("/iteration_00000002.1.x/w", "_integrated/w")]
    body = (
        f"<LifecycleConfiguration>{rule('<Expiration><Days>3</Days></Expiration>', path.partition('/')[2] + '/log/')}"
    )
    assert s3.request("PUT", f"/{BUCKET}?lifecycle=", f"{body}</LifecycleConfiguration>".encode())[0] == 200
    try:
        found = [bucket_of(url), bucket_of(f"{url}/iteration_00000001")]
    finally:
        assert s3.request("DELETE", f"/{BUCKET}?lifecycle=")[0] == 204
        for name, one in zip(("/iteration_00000002.1.x/w", "_integrated/w"), ids, strict=True):
            assert s3.request("DELETE", f"/{path}{name}?uploadId={one}")[0] == 204
    for told in found:
        assert [upload["upload_id"] for upload in told["uploads"]] == ids
        assert len(told["dangers"]) == 1
        assert "the run loses its log" in told["dangers"][0]


def test_the_bucket_is_asked_by_way_of_the_proxy(s3: S3Server, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    upload_id = begin(s3, f"{run.removeprefix('s3://')}/part.bin")
    monkeypatch.setenv("AWS_PROXY_URL", s3.endpoint)  # which takes requests for any host
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://elsewhere.invalid")
    found = bucket_of(run)
    assert [one["upload_id"] for one in found["uploads"]] == [upload_id]
    assert [note[: len(NO_RULE)] for note in found["notes"]] == [NO_RULE]


def test_azure_tells_blobs_that_were_not_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reshard.save(tmp_path / "run", 1, {"w": np.arange(2.0)})
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with doubles.running("azure") as double:
        monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
        monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", double.endpoint)
        double.upload(tmp_path / "run", "run")
        double.uploads["run/part.bin", ""] = {"b1": b"123", "b2": b"45"}
        double.objects |= {f"run2/{number}": b"" for number in range(40)}  # more than 10 pages of a neighbour
        # A new version of a blob that exists is not told by the service.
        double.uploads[next(iter(double.objects)), ""] = {"b1": b"1"}
        double.log.clear()
        found = bucket_of("az://weights/run")
        asked = [path for _, path, _ in double.log if "include=uncommittedblobs" in path]
    assert all("maxresults=1000" in path for path in asked)
    (upload,) = found["uploads"]
    assert (upload["key"], upload["n_bytes"], upload["end_with"]) == ("run/part.bin", 5, None)
    assert ["belong to the account" in note for note in found["notes"]] == [True]


def test_a_folder_of_a_disk_has_no_bucket(tmp_path: Path) -> None:
    reshard.save(tmp_path / "run", 1, {"w": np.arange(2.0)})
    assert bucket_of(str(tmp_path / "run")) is None


@pytest.mark.parametrize("prefix", ["", "run", "run/", "ru", "run/iteration_", "run2/", "other/"])
def test_a_rule_meets_a_run_by_the_names_of_its_objects(prefix: str) -> None:
    expires = LifecycleRule("r", [prefix], RuleAction.EXPIRE, "", "after 3 days", is_narrower=False)
    ends = expires._replace(action=RuleAction.END_UPLOADS)
    is_met = prefix not in ("run2/", "other/")
    assert (danger_of(expires, "run") is not None) is is_met
    assert danger_of(ends, "run") is None
    assert ends_uploads(ends, "run") is (is_met and prefix != "run/iteration_")
    assert not ends_uploads(ends._replace(is_narrower=True), "run")
    moves = expires._replace(action=RuleAction.MOVE, storage_class="GLACIER")
    assert ("cannot be read" in (danger_of(moves, "run") or "")) is is_met


@pytest.mark.parametrize("name", ["run/iteration_00000005", "run/model.safetensors"])
@pytest.mark.parametrize("more", [[], ["--stats"], ["s3://bucket/other"]])
def test_a_bucket_that_does_not_answer_is_an_error_in_time(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, name: str, more: list[str]
) -> None:
    monkeypatch.setattr(bucket, "_ANSWER_S", 0.3)
    before, began = signal.getsignal(signal.SIGALRM), time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        result = CliRunner().invoke(main, ["inspect", f"s3://bucket/{name}", *more])
    assert result.exit_code == 1
    assert f"looking at s3://bucket/{name}: the service has not answered within 0.3 s" in result.output
    assert "the endpoint `http://127.0.0.1:" in result.output or more[:1] == [
        "s3://bucket/other"
    ]  # a list has no hints
    assert time.monotonic() - began < 20
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)) == (before, (0.0, 0.0))


def test_what_may_be_read_alone_is_inspected(s3: S3Server, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(method: str, path: str) -> bool:
        return method == "HEAD" and "?" not in path

    with before_server(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        proxy.faults = [Fault(refused, status=403, code="AccessDenied")]
        result = CliRunner().invoke(main, ["inspect", run])
        assert result.exit_code == 0, result.output
        assert proxy.faults[0].times == 0
