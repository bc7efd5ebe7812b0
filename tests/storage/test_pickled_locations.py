"""Locations of buckets that are pickled: with the options of the bucket, and never with what is secret."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING

import pytest
from tests.servers import doubles
from tests.servers.s3 import BUCKET, SECRET

from reshard.errors import ArgumentError, UnsupportedError
from reshard.storage import remote
from reshard.storage.location import locate
from reshard.storage.remote import BucketOptions, check_sent

if TYPE_CHECKING:
    from tests.servers.s3 import S3Server

pytestmark = pytest.mark.skipif(not remote.is_available(), reason="the core was compiled without the feature `remote`")

LOAD = "import pickle, sys; print(pickle.load(sys.stdin.buffer).read_small(10).decode())"


def loaded_elsewhere(pickled: bytes, environment: dict[str, str]) -> str:
    """What a process that has only the environment reads at a location."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD], input=pickled, capture_output=True, check=True, env=os.environ | environment
    )
    return done.stdout.decode().strip()


def test_another_process_reaches_the_bucket_by_the_options_of_the_location(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put(name := f"note-{uuid.uuid4().hex}", b"7")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    monkeypatch.setattr(remote, "_options", {})  # of this process
    place = locate(f"s3://{BUCKET}/{name}")
    assert b"endpoint" not in pickle.dumps(place)
    options = BucketOptions(endpoint=s3.endpoint, allow_http=True, cache="/no/such/cache")
    monkeypatch.setitem(remote._options, f"s3://{BUCKET}", options)
    pickled = pickle.dumps(place)
    assert SECRET.encode() not in pickled
    assert b"/no/such/cache" not in pickled
    assert loaded_elsewhere(pickled, {}) == "7"
    assert pickle.loads(pickled) == place == copy.deepcopy(place)
    assert remote._options[f"s3://{BUCKET}"] == options, "the cache of this process stays"


def _load(pickled: bytes, other: BucketOptions, name: str) -> None:
    locate(name, other)
    with pytest.raises(ArgumentError, match="already has the options"):
        pickle.loads(pickled)


def test_a_process_with_other_options_refuses_the_location(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"s3://other-{uuid.uuid4().hex}/run"
    monkeypatch.setitem(remote._options, name.rpartition("/")[0], BucketOptions(endpoint="https://one.example.org"))
    pickled = pickle.dumps(locate(name))
    other = BucketOptions(endpoint="https://two.example.org")
    child = multiprocessing.get_context("spawn").Process(target=_load, args=(pickled, other, name))
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_a_signature_is_in_no_pickle() -> None:
    with doubles.running("files") as double:
        double.objects["model.safetensors"] = b"7"
        plain = locate(f"{double.endpoint}/model.safetensors")
        assert loaded_elsewhere(pickle.dumps(plain), {}) == "7"
        text = f"{double.endpoint}/signed.safetensors?X-Amz-Signature=0f1e2d"
        signed = locate(text)
        for send in (lambda: pickle.dumps(signed), lambda: check_sent(pickle.dumps({"src": text, "n": 3}))):
            with pytest.raises(UnsupportedError, match=r"signed.safetensors` was given with a signature") as refused:
                send()
            assert (
                "0f1e2d" not in f"{refused.value} {refused.value.hint} {refused.value.path} {signed!r} {signed.store!r}"
            )
        assert copy.deepcopy(signed) == signed
        check_sent(pickle.dumps(str(plain)))
