"""Checkpoints in Google Cloud Storage, in Azure Blob Storage and behind HTTP, read from doubles of these services."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.servers import doubles

import reshard
from reshard.errors import ArgumentError, CheckpointNotFoundError, DamagedFileError, StorageError, UnsupportedError
from reshard.storage import remote
from reshard.storage.location import locate
from reshard.storage.remote import use_cache

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers.doubles import Double

pytestmark = pytest.mark.skipif(not remote.is_available(), reason="the core was compiled without the feature `remote`")

CLOUDS = ("gs", "az")


@pytest.fixture
def cloud(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Double]]:
    """The URL of a bucket, and the double in which it is."""
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    with doubles.running("google" if request.param == "gs" else "azure") as double:
        if request.param == "gs":
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", double.endpoint)
        else:
            monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
            monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", double.endpoint)
        yield f"{request.param}://weights", double


@pytest.fixture
def files() -> Iterator[Double]:
    """A server of files."""
    with doubles.running("files") as double:
        yield double


@pytest.mark.parametrize("cloud", CLOUDS, indirect=True)
def test_a_run_in_a_cloud_is_read(cloud: tuple[str, Double], tmp_path: Path) -> None:
    bucket, double = cloud
    w = np.arange(300_000, dtype=np.float32).reshape(600, 500)
    for iteration in (1, 2):
        reshard.save(tmp_path / "run", iteration, {"w": w * iteration, "b": w[0]})
    double.upload(tmp_path / "run", "some/run")
    url = f"{bucket}/some/run"
    with reshard.open(url) as opened:
        assert opened.iteration == 2
        np.testing.assert_array_equal(opened.read("w", (slice(3, 9),)), 2 * w[3:9])
    assert reshard.diff(url, tmp_path / "run").equal
    assert reshard.verify(url).ok
    folder = locate(url)
    # A folder exists while something is in it.
    names = {one.relative_to(tmp_path / "run").parts[0] for one in (tmp_path / "run").rglob("*") if one.is_file()}
    assert folder.names() == sorted(names)
    assert len(names) > 5
    assert (folder / "iteration_00000001").names() == sorted(
        one.name for one in (tmp_path / "run/iteration_00000001").iterdir()
    )
    assert (folder.kind(), (folder / "none").kind(), locate(bucket).kind()) == ("folder", None, "folder")


@pytest.mark.parametrize("cloud", CLOUDS, indirect=True)
def test_a_replaced_object_and_a_missing_bucket_are_errors_in_a_cloud(
    cloud: tuple[str, Double], tmp_path: Path
) -> None:
    bucket, double = cloud
    for value in (1, 2):
        reshard.save_file({"w": np.full(200_000, value, np.uint8)}, tmp_path / f"{value}.safetensors")
    double.objects["m.safetensors"] = (tmp_path / "1.safetensors").read_bytes()
    with reshard.open(f"{bucket}/m.safetensors") as opened:
        double.objects["m.safetensors"] = (tmp_path / "2.safetensors").read_bytes()
        with pytest.raises(DamagedFileError, match="was replaced while it was read"):
            opened.load()
    with pytest.raises(StorageError, match="there is no bucket `other`"):
        reshard.open(f"{bucket.partition('://')[0]}://other/run")


def test_one_file_behind_http_is_read_by_ranges(files: Double, tmp_path: Path) -> None:
    w = np.arange(2_000_000, dtype=np.float32).reshape(2000, 1000)
    reshard.save_file({"w": w, "b": w[0]}, tmp_path / "m.safetensors")
    files.objects["models/m.safetensors"] = (tmp_path / "m.safetensors").read_bytes()
    url = f"{files.endpoint}/models/m.safetensors"
    with reshard.safe_open(url, "np") as f:
        files.log.clear()
        np.testing.assert_array_equal(f.get_slice("w")[1999], w[1999])
        assert [wanted is not None for _, _, wanted in files.log] == [True]
    np.testing.assert_array_equal(reshard.load_file(url)["w"], w)
    reshard.convert(url, tmp_path / "copy.safetensors")
    np.testing.assert_array_equal(reshard.load_file(tmp_path / "copy.safetensors")["w"], w)
    with pytest.raises(CheckpointNotFoundError, match="there is nothing at"):
        reshard.open(f"{files.endpoint}/models/none.safetensors")
    with pytest.raises(UnsupportedError, match="does not list"):
        locate(f"{files.endpoint}/models").names()


def test_the_signature_of_a_url_is_sent_and_not_shown(files: Double, tmp_path: Path) -> None:
    reshard.save_file({"w": np.arange(5)}, tmp_path / "m.safetensors")
    files.objects["m.safetensors"] = (tmp_path / "m.safetensors").read_bytes()
    place = locate(f"{files.endpoint}/m.safetensors?X-Amz-Signature={'a' * 300}")
    assert str(place) == f"{files.endpoint}/m.safetensors"
    with reshard.open(f"{files.endpoint}/m.safetensors?X-Amz-Signature={'b' * 300}") as opened:
        assert opened.read("w").tolist() == [0, 1, 2, 3, 4]
        assert "bbb" not in f"{opened!r} {opened.path!r} {opened.files()}"
    assert all(path.endswith("?X-Amz-Signature=" + "b" * 300) for _, path, _ in files.log)
    files.objects.clear()
    with pytest.raises(CheckpointNotFoundError) as caught:
        reshard.open(f"{files.endpoint}/m.safetensors?X-Amz-Signature={'c' * 300}")
    assert "ccc" not in repr(vars(caught.value))


def test_a_server_must_send_ranges_and_identify_a_file(files: Double, tmp_path: Path) -> None:
    for value in (1, 2):
        reshard.save_file({"w": np.full(200_000, value, np.uint8)}, tmp_path / f"{value}.safetensors")
    files.objects["m.safetensors"] = (tmp_path / "1.safetensors").read_bytes()
    files.sends_ranges = False
    with pytest.raises(UnsupportedError, match="does not send ranges"):
        reshard.open(f"{files.endpoint}/m.safetensors")
    files.sends_ranges, files.sends_etag = True, False
    # The time of the last change identifies it, and its size.
    with reshard.open(f"{files.endpoint}/m.safetensors") as opened:
        assert opened.read("w")[0] == 1
        files.objects["m.safetensors"] = (tmp_path / "2.safetensors").read_bytes() + b" "
        with pytest.raises(DamagedFileError, match="was replaced"):
            opened.load()


def test_a_weak_etag_is_no_condition_and_tells_that_a_file_was_replaced(files: Double, tmp_path: Path) -> None:
    for value in (1, 2):
        reshard.save_file({"w": np.full(200_000, value, np.uint8)}, tmp_path / f"{value}.safetensors")
    files.objects["m.safetensors"] = (tmp_path / "1.safetensors").read_bytes()
    files.weakens = True
    with reshard.open(f"{files.endpoint}/m.safetensors") as opened:
        assert opened.load()["w"][199_999] == 1
        files.objects["m.safetensors"] = (tmp_path / "2.safetensors").read_bytes()
        with pytest.raises(DamagedFileError, match="was replaced"):
            opened.load()


def test_a_url_that_is_signed_for_get_is_read_into_a_cache(files: Double, tmp_path: Path) -> None:
    reshard.save_file({"w": np.arange(5)}, tmp_path / "m.safetensors")
    files.objects["m.safetensors"] = (tmp_path / "m.safetensors").read_bytes()
    files.objects["empty"] = b""
    use_cache(tmp_path / "cache")
    try:
        assert reshard.load_file(f"{files.endpoint}/m.safetensors?X-Amz-Signature=a")["w"].tolist() == [0, 1, 2, 3, 4]
        assert locate(f"{files.endpoint}/empty?X-Amz-Signature=a").stat().n_bytes == 0
    finally:
        use_cache(None)
    assert {method for method, *_ in files.log} == {"GET"}


def test_two_urls_that_messages_show_alike_name_one_file(files: Double) -> None:
    url = f"{files.endpoint}/download"
    for query in ("?X-Amz-Date=1&X-Amz-Signature=a", "?X-Amz-Date=2&X-Amz-Signature=b", "?sv=1&SIG=c", ""):
        assert str(locate(url + query)) == url
    for query in ("?id=2", "?X-Amz-Signature=a&versionId=3"):
        with pytest.raises(ArgumentError, match="names another object") as caught:
            locate(url + query)
        assert query not in str(caught.value)
    assert str(locate(f"{files.endpoint}/other?id=1")) == str(locate(f"{files.endpoint}/other?id=1&sig=b"))
    with pytest.raises(ArgumentError, match="names another object"):
        locate(f"{files.endpoint}/other?id=2")


@pytest.mark.parametrize("cloud", CLOUDS, indirect=True)
def test_a_service_that_sends_no_ranges_and_a_name_that_is_none_are_named(cloud: tuple[str, Double]) -> None:
    bucket, double = cloud
    double.objects |= {"run/m.safetensors": b"12345", "odd//name": b""}
    with pytest.raises(StorageError, match=r"lists the name `odd//(name)?`") as caught:
        locate(f"{bucket}/odd").names()
    assert "another name" in str(caught.value.hint)
    double.sends_ranges = False
    with pytest.raises(UnsupportedError, match="does not send ranges"):
        reshard.open(f"{bucket}/run/m.safetensors")
