"""Conversions into a bucket that are killed at a request, and requests whose answers are lost."""

from __future__ import annotations

import itertools
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.servers.killed import is_killed, nth_change
from tests.servers.proxy import Fault, Proxy, before_server
from tests.servers.s3 import BUCKET

import reshard
from reshard.errors import DestinationExistsError, ReshardError
from reshard.storage import remote
from reshard.storage.location import Location, locate
from reshard.storage.remote import RemoteStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers.s3 import S3Server

pytestmark = pytest.mark.skipif(not remote.is_available(), reason="the core was compiled without the feature `remote`")

_numbers = itertools.count()
LAYOUT = {"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp", None]}]}
CONVERSIONS: dict[str, dict[str, Any]] = {
    "one file": {"to": "safetensors"},
    "one of a folder": {},
    "several": {"max_shard_size": 30_000},
    "ranks": {"to": "safetensors", "layout": LAYOUT},
    "dcp": {"to": "dcp", "layout": LAYOUT},
    "megatron": {"to": "megatron"},
    "deepspeed": {"to": "deepspeed-universal", "part": "all"},
}


@pytest.fixture
def proxy(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy between the package and the server."""
    with before_server(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


def model(folder: Path, n_rows: int = 64) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    tensors = {f"layers.{i}.weight": rng.standard_normal((n_rows, 64)).astype(np.float32) for i in range(3)}
    folder.mkdir()
    reshard.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "made"}')
    return tensors


def objects_of(place: Location) -> dict[str, bytes]:
    assert isinstance(place.store, RemoteStore)
    found = {name: b"".join((place / name).pieces()) for name, _ in place.store.below(place.path)}
    return found if found or place.kind() is None else {"": b"".join(place.pieces())}


def arrays_of(place: Location) -> dict[str, bytes] | None:
    """The tensors of a checkpoint; None: there is none that is whole."""
    try:
        with reshard.open(place) as opened:
            return {key: array.tobytes() for key, array in opened.load().items()}
    except ReshardError:
        return None


def refusal_of(source: Path, target: Location, options: dict[str, Any]) -> DestinationExistsError | None:
    try:
        reshard.convert(source, str(target), **options)
    except DestinationExistsError as error:
        return error
    return None


def target_of(conversion: str) -> Location:
    name = f"killed-{os.getpid()}-{next(_numbers)}"
    return locate(f"s3://{BUCKET}/{name}{'.safetensors' if conversion == 'one file' else ''}")


def convert_in_child(
    proxy: Proxy,
    source: Path,
    target: Location,
    options: dict[str, Any],
    kill_at: tuple[int, str],
) -> bool:
    """Convert in a child that is killed at a change; returns whether it ended before that one."""
    number, when = kill_at
    convert = partial(reshard.convert, source, str(target), **options)
    return not is_killed(proxy, convert, nth_change(number), when=when)


_SOME = [pytest.param(one, marks=() if one == "several" else pytest.mark.slow) for one in CONVERSIONS]


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("conversion", _SOME)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_conversion_that_is_killed_leaves_the_whole_or_nothing_that_opens(
    proxy: Proxy, tmp_path: Path, conversion: str, when: str
) -> None:
    options = CONVERSIONS[conversion]
    model(tmp_path / "model")
    suffix = ".safetensors" if conversion == "one file" else ""
    reshard.convert(tmp_path / "model", tmp_path / f"out{suffix}", **options)
    out = tmp_path / f"out{suffix}"
    tensors = arrays_of(locate(out))
    assert tensors is not None
    expected = (
        {"": out.read_bytes()}
        if suffix
        else {str(one.relative_to(out)): one.read_bytes() for one in out.rglob("*") if one.is_file()}
    )
    n_whole = n_killed = 0
    for at in itertools.count():
        target = target_of(conversion)
        if convert_in_child(proxy, tmp_path / "model", target, options, (at, when)):
            break
        n_killed += 1
        found = arrays_of(target)
        if found is not None:
            assert found == tensors
            n_whole += 1
        # What is left is named, and replaced if that is asked for.
        refused = refusal_of(tmp_path / "model", target, options)
        if refused is not None:
            assert str(target) in refused.message
            assert "overwrite=True" in (refused.hint or "")
            reshard.convert(tmp_path / "model", str(target), overwrite=True, **options)
        assert objects_of(target) == expected
    assert n_killed >= (1 if conversion == "one file" else 4)
    assert n_whole <= 3
    assert arrays_of(target) == tensors


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_upload_in_parts_that_is_killed_leaves_no_file(proxy: Proxy, tmp_path: Path, when: str) -> None:
    tensors = {key: one.tobytes() for key, one in model(tmp_path / "model", 40_000).items()}
    target = locate(f"s3://{BUCKET}/killed-{os.getpid()}-{next(_numbers)}/w.safetensors")
    for at in itertools.count():
        is_done = convert_in_child(proxy, tmp_path / "model", target, {}, (at, when))
        found = arrays_of(target)
        if is_done or found is not None:
            break
        assert target.kind() is None
        assert target.parent.kind() is None
    assert found == tensors
    assert at >= 3


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("conversion", _SOME)
def test_lost_answers_change_nothing(proxy: Proxy, tmp_path: Path, conversion: str) -> None:
    options = CONVERSIONS[conversion]
    model(tmp_path / "model")
    reference = target_of(conversion)
    reshard.convert(tmp_path / "model", str(reference), **options)
    expected = objects_of(reference)
    n_changes = sum(method not in ("GET", "HEAD") for method, *_ in proxy.log)
    for at in range(n_changes):
        target, changes = target_of(conversion), itertools.count()

        def is_lost(method: str, _: str, changes: Iterator[int] = changes, at: int = at) -> bool:
            return method not in ("GET", "HEAD") and next(changes) == at

        proxy.faults = [Fault(is_lost, is_lost=True)]
        reshard.convert(tmp_path / "model", str(target), **options)
        assert proxy.faults[0].times == 0
        assert objects_of(target) == expected
    assert n_changes >= (1 if conversion == "one file" else 4)


@pytest.mark.slow(disk=False)
def test_every_answer_of_an_upload_in_parts_can_be_lost(proxy: Proxy, tmp_path: Path) -> None:
    tensors = {key: one.tobytes() for key, one in model(tmp_path / "model", 40_000).items()}
    for at in range(5):
        target, changes = target_of("one file"), itertools.count()

        def is_lost(method: str, _: str, changes: Iterator[int] = changes, at: int = at) -> bool:
            return method not in ("GET", "HEAD") and next(changes) == at

        proxy.faults = [Fault(is_lost, is_lost=True)]
        reshard.convert(tmp_path / "model", str(target))
        assert arrays_of(target) == tensors
    assert proxy.faults[0].times == 1  # one creation, two parts and the completion


@pytest.mark.slow(disk=False)
def test_the_upload_of_a_conversion_that_was_killed_is_ended_by_the_one_that_takes_over(
    proxy: Proxy, tmp_path: Path
) -> None:
    tensors = {key: one.tobytes() for key, one in model(tmp_path / "model", 40_000).items()}

    def uploads_in(place: Location) -> list[tuple[str, str]]:
        assert isinstance(place.store, RemoteStore)
        return place.store.uploads_in(str(place))

    for at in itertools.count():
        target = target_of("one of a folder")
        assert not convert_in_child(proxy, tmp_path / "model", target, {}, (at, "after"))
        if uploads_in(target):
            break
    reshard.convert(tmp_path / "model", str(target), overwrite=True)
    assert uploads_in(target) == []
    assert arrays_of(target) == tensors
