"""Saves into Google Cloud Storage and Azure Blob Storage, on doubles of both: what a root does, faults and races."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.helpers.small_saves import fork
from tests.helpers.threads import in_threads
from tests.servers.proxy import Fault

import reshard
from reshard.commit import leases, log, log_records, protocol, roots
from reshard.commit.session import forget_all
from reshard.errors import ClaimedError
from reshard.storage import remote
from reshard.storage.location import Location, locate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers.proxy import Proxy

pytestmark = [
    pytest.mark.skipif(not remote.is_available(), reason="the core was compiled without the feature `remote`"),
    pytest.mark.parametrize("bucket", ["gs", "az"], indirect=True),
]


@pytest.fixture(autouse=True)
def _no_grace(bucket: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Claims are released while the service, that of `bucket`, still runs."""
    monkeypatch.setattr(leases, "GRACE_SECONDS", 0.0)
    yield
    protocol.release()


def arrays(iteration: int) -> dict[str, np.ndarray]:
    return {"w": np.arange(iteration, iteration + 100_000, dtype=np.float32).reshape(100, 1000), "b": np.ones(7)}


def save(root: Location, iteration: int, **how: Any) -> None:
    report = reshard.save(root, iteration, arrays(iteration), **how)
    assert report is not None
    assert report.warnings == ()


def check(root: Location, iteration: int) -> None:
    with reshard.open(root) as opened:
        assert opened.iteration == iteration
        found = opened.load(verify="full")
    expected = arrays(iteration)
    assert {key: one.tobytes() for key, one in found.items()} == {key: one.tobytes() for key, one in expected.items()}


def iterations(root: Location) -> list[int]:
    return [number for number, _ in roots.list_iterations(root)]


def test_a_run_saves_keeps_pins_goes_back_and_prunes(bucket: tuple[Location, Proxy]) -> None:
    root, _ = bucket
    for iteration in (100, 200, 300, 400):
        save(root, iteration, keep=2, metrics={"loss": 1.0 / iteration})
        check(root, iteration)
    assert iterations(root) == [300, 400]
    left = {name.partition("/")[0] for name, _ in root.store.below(str(root))}  # type: ignore[attr-defined]
    assert {roots.parse_iteration_folder(name) for name in left if name.startswith("iteration")} == {300, 400}
    assert reshard.load(root, iteration=300).iteration == 300
    assert reshard.verify(root).ok
    reshard.pin(root, 300)
    save(root, 500, keep=1)
    assert iterations(root) == [300, 500]
    assert reshard.rollback(root, 300).newer == (500,)
    check(root, 300)
    save(root, 301)
    check(root, 301)
    reshard.unpin(root, 300)
    assert reshard.prune(root, keep=1).iterations == (300,)
    save(root, 301)
    check(root, 301)


def test_a_large_save_in_parts(bucket: tuple[Location, Proxy]) -> None:
    root, proxy = bucket
    w = np.random.default_rng(0).integers(0, 256, 40 << 20, np.uint8)
    reshard.save(root, 1, {"w": w})
    assert (
        sum(method == "PUT" and ("partNumber" in path or "comp=block&" in path) for method, path, *_ in proxy.log) > 1
    )
    np.testing.assert_array_equal(reshard.load(root).state["w"], w)


def test_ranks_save_and_others_resume(bucket: tuple[Location, Proxy]) -> None:
    root, _ = bucket
    layout = {"mesh": {"tp": 2}, "rules": [{"match": "w", "cut": ["tp", None]}, {"match": "*"}]}
    whole = arrays(7)

    def save_rank(group: Any) -> Any:
        part = slice(group.rank * 50, group.rank * 50 + 50)
        return reshard.save(root, 7, {**whole, "w": whole["w"][part]}, layout=layout, group=group)

    assert [report.iteration for report in in_threads(2, save_rank)] == [7, 7]
    check(root, 7)


@pytest.mark.slow(disk=False)
def test_a_checkpointer_saves_in_the_background_and_resumes(bucket: tuple[Location, Proxy]) -> None:
    torch = pytest.importorskip("torch")
    from reshard.torch import Checkpointer

    def train(root: str, until: int) -> tuple[int, float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        with Checkpointer(root, save_every=2, keep=2, signals=()) as checkpointer:
            first = checkpointer.resume(model=model, optimizer=optimizer).initial_step
            for step in range(first + 1, until + 1):
                loss = model(torch.ones(3, 8)).pow(2).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                checkpointer.step(step)
        forget_all()
        return first, loss.item()

    root = str(bucket[0])
    assert train(root, 6)[0] == 0
    first, loss = train(root, 12)
    assert first == 6
    assert iterations(bucket[0]) == [10, 12]
    assert train(f"{root}-whole", 12) == (0, loss)


def test_a_process_of_this_host_that_is_alive_keeps_its_claim(bucket: tuple[Location, Proxy]) -> None:
    root, _ = bucket
    save(root, 1)

    def other() -> str:
        try:
            save(root, 2)
        except ClaimedError as error:
            return error.message
        return "saved"

    assert "which is alive" in fork(other).result(60)
    protocol.release()
    assert fork(other).result(60) == "saved"
    check(root, 2)


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("kind", ["lost answer", "lost request"])
def test_an_answer_is_lost_at_every_change_of_a_save(bucket: tuple[Location, Proxy], kind: str) -> None:
    root, proxy = bucket
    save(root, 100)
    iteration = 100
    for number in itertools.count():
        seen = itertools.count()
        iteration += 1

        def matches(method: str, path: str, seen: Any = seen, number: int = number) -> bool:
            return method in ("PUT", "POST", "DELETE") and next(seen) == number

        proxy.faults = [Fault(matches, is_lost=True) if kind == "lost answer" else Fault(matches, 503, "SlowDown")]
        save(root, iteration, keep=2)
        check(root, iteration)
        assert len(iterations(root)) == 2
        if proxy.faults[0].times:
            break
    proxy.faults = []
    assert number > 8
    head = log.head_of(root)
    assert head is not None
    kinds = [record.kind for n in range(1, head.n + 1) if (record := log.read(root, n))]
    assert kinds.count("commit") == iteration - 99, "each save once"


def test_of_several_writers_that_race_one_wins(bucket: tuple[Location, Proxy]) -> None:
    root, _ = bucket
    save(root, 1)
    before = log.head_of(root)
    assert before is not None
    for number in range(10):
        made = [log_records.claimed(log.next_record(log.head_of(root), "claim"), {"name": name}) for name in range(4)]
        won = in_threads(4, lambda group, made=made: log.create(locate(str(root)), made[group.rank]))  # type: ignore[misc]
        assert sum(won) == 1, number
    head = log.head_of(root)
    assert head is not None
    assert head.n == before.n + 10
