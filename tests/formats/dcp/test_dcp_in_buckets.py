"""`dcp.save` and `dcp.load` of a checkpoint in a bucket."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._dynamo  # what DTensor imports when it is first used: here once, instead of in every rank
import torch.distributed.checkpoint
from tests.helpers.ranks import Job
from tests.servers.proxy import Fault, Proxy, before_server
from tests.servers.s3 import BUCKET
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import reshard
from reshard.commit import protocol
from reshard.errors import UnsupportedError
from reshard.storage import remote
from reshard.storage.location import locate
from reshard.torch.dcp import Reader, Writer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers.s3 import S3Server

    from reshard.storage.location import Location

pytestmark = [
    pytest.mark.skipif(not remote.is_available(), reason="the core was compiled without the feature `remote`"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

dcp: Any = torch.distributed.checkpoint  # torch does not list its functions as exported
_numbers = itertools.count()


@pytest.fixture
def root(s3: S3Server) -> Iterator[Location]:
    yield locate(f"s3://{BUCKET}/dcp-{os.getpid()}-{next(_numbers)}/run")
    protocol.release()


def save(place: Location, value: float) -> None:
    dcp.save({"w": torch.full((4,), value), "step": int(value)}, storage_writer=Writer(str(place)), no_dist=True)


def check(place: Location, value: float) -> None:
    with reshard.open(place) as opened:
        assert opened.load(verify="full")["w"].tolist() == [value] * 4
        assert opened.extra()["step"] == value


@pytest.mark.slow(disk=False)
def test_ranks_save_into_a_bucket_and_load_from_it(root: Location) -> None:
    whole = torch.arange(24.0).reshape(6, 4)

    def work(_: Any) -> list[float]:
        mesh = init_device_mesh("cpu", (2,))
        writer = Writer(str(root / "iteration_00000003"))
        state: dict[str, Any] = {"model": {"w": distribute_tensor(whole, mesh, [Shard(0)])}, "step": 3}
        dcp.save(state, storage_writer=writer)
        dcp.save(state | {"step": 5}, storage_writer=writer, checkpoint_id=str(root / "iteration_00000005"))
        columns = distribute_tensor(torch.zeros(6, 4), mesh, [Shard(1)])
        loaded = {"model": {"w": columns}, "step": 0}
        dcp.load(loaded, storage_reader=Reader(str(root)))
        assert isinstance(columns, DTensor)
        return [float(loaded["step"]), *columns.to_local().flatten().tolist()]  # type: ignore[arg-type]

    with Job(2, work) as job:
        found = job.values()
    assert found == [[5.0, *whole[:, :2].flatten().tolist()], [5.0, *whole[:, 2:].flatten().tolist()]]
    with reshard.open(root) as opened:
        assert opened.iteration == 5
        assert opened.load()["model.w"].tolist() == whole.tolist()
    assert reshard.verify(root).ok


def test_a_path_without_a_number_of_a_save_is_replaced(root: Location) -> None:
    for value in (1.0, 2.0):
        save(root, value)
        check(root, value)
    assert Writer.validate_checkpoint_id(str(root))
    with pytest.raises(UnsupportedError, match="is a URL, and this is saved into folders only"):
        Writer("https://host/run")


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("kind", ["lost answer", "refused"])
def test_a_save_is_whole_or_not_there_whatever_request_fails(
    root: Location, s3: S3Server, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    save(root / "iteration_00000001", 1.0)
    with before_server(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        newest = 1
        for number in itertools.count():
            iteration = number + 2
            is_saved = _saves(proxy, root, iteration, number, kind)
            with reshard.open(root) as opened:
                found = opened.iteration
            assert found == iteration if is_saved else found in (iteration, newest)
            check(root, float(found or 0))
            newest = found or 0
            if proxy.faults[0].times:
                break
        assert number >= 5


def _saves(proxy: Proxy, root: Location, iteration: int, number: int, kind: str) -> bool:
    """Save while the n-th change fails; returns whether the save succeeded."""
    changes = itertools.count()

    def is_it(method: str, path: str) -> bool:
        return method not in ("GET", "HEAD") and "delete" not in path and next(changes) == number

    proxy.faults = [Fault(is_it, is_lost=True) if kind == "lost answer" else Fault(is_it, 403, "AccessDenied")]
    try:
        save(root / f"iteration_{iteration:08d}", float(iteration))
    except CheckpointException:
        assert kind == "refused"
        return False
    return True
