"""Steps in which only what is new is sent: what ranks send, and that every rank has the same decision as without."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.strategies import cases
from tests.helpers.threads import ThreadGroup, in_threads

import reshard
from reshard.errors import GroupError, MismatchError
from reshard.ranks import recurring
from reshard.ranks.collective import Collective
from reshard.ranks.messages import Known, decode, encode
from reshard.ranks.messages import recurring as is_recurring
from reshard.write.contents import FileContent, FileTable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reshard.ranks.group import Group


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    recurring._memories.clear()


@dataclass(frozen=True)
class Held:
    """What a rank holds."""

    names: tuple[str, ...] = field(metadata=is_recurring())
    loss: float = 0.0


@dataclass(frozen=True)
class Decided:
    """What rank 0 makes of it."""

    files: tuple[FileContent, ...] = field(metadata=is_recurring(FileTable))
    loss: float = 0.0


class Counting:
    """A group that counts the characters of its rank."""

    def __init__(self, group: Group) -> None:
        self.rank, self.world_size = group.rank, group.world_size
        self._group = group
        self.sent: list[str] = []

    def barrier(self, *, timeout: float) -> None:
        self._group.barrier(timeout=timeout)

    def gather(self, value: Any, *, root: int = 0, timeout: float) -> list[Any] | None:
        self.sent.append(json.dumps(value))
        return self._group.gather(value, root=root, timeout=timeout)

    def broadcast(self, value: Any, *, root: int = 0, timeout: float) -> Any:
        if self.rank == root:
            self.sent.append(json.dumps(value))
        return self._group.broadcast(value, root=root, timeout=timeout)


def decide(held: list[Held]) -> Decided:
    files = tuple(FileContent(f"file-{rank}", rank, one.names) for rank, one in enumerate(held))
    return Decided(files, sum(one.loss for one in held))


def step(group: Group, held: Held) -> tuple[Decided, list[str]]:
    counting = Counting(group)
    choose = decide if group.rank == 0 else None
    return recurring.combine(Collective(counting, 20), held, choose, Held, Decided), counting.sent


NAMES = st.lists(st.text("ab", max_size=2), max_size=3).map(tuple)


@cases(30)
@given(st.lists(st.lists(st.tuples(NAMES, st.integers(0, 5)), min_size=3, max_size=3), min_size=1, max_size=6))
def test_every_rank_gets_what_rank_0_decides_in_every_step(steps: list[list[tuple[tuple[str, ...], int]]]) -> None:
    recurring._memories.clear()
    held = [[Held(names, loss) for names, loss in of_ranks] for of_ranks in steps]
    found = in_threads(3, lambda group: [step(group, of_ranks[group.rank])[0] for of_ranks in held])
    assert found == [[decide(of_ranks) for of_ranks in held]] * 3


def test_a_step_like_the_one_before_sends_digests() -> None:
    held = [Held(tuple(f"{rank}.{i}" for i in range(1000)), loss=rank) for rank in range(3)]
    held[2] = replace(held[1], loss=2)

    def work(group: Group) -> list[list[str]]:
        return [step(group, replace(held[group.rank], loss=float(n)))[1] for n in range(3)]

    first, *_ = zip(*in_threads(3, work), strict=True)
    assert [len(of_rank) for of_rank in first] == [4, 2, 2]  # rank 0 asks once
    assert held[1].names[0] in first[1][1]
    assert "1.0" not in first[0][0] + first[2][1]  # rank 2 has the same as rank 1, which sends it
    for later in _:
        assert [len(of_rank) for of_rank in later] == [2, 1, 1]
        assert all(len(text) < 400 for of_rank in later for text in of_rank)


def test_what_changes_is_sent_by_the_rank_where_it_changes() -> None:
    names = tuple(f"name-{i}" for i in range(1000))

    def work(group: Group) -> list[tuple[Decided, list[str]]]:
        step(group, Held(names))
        return [step(group, Held(names[:-1] if group.rank == 1 else names))]

    of_ranks = [found[0] for found in in_threads(3, work)]
    assert all(found.files[1].arrays == names[:-1] for found, _ in of_ranks)
    assert [sum(map(len, sent)) > 5000 for _, sent in of_ranks] == [True, True, False]


@pytest.mark.parametrize(("new", "sends"), [(0, [True, True]), (1, [True, False])])
def test_a_rank_that_was_started_again_is_told_everything_and_so_is_a_new_rank_0(new: int, sends: list[bool]) -> None:
    names = tuple(f"name-{i}" for i in range(1000))
    held = [Held((f"{rank}", *names)) for rank in range(2)]
    in_threads(2, lambda group: step(group, held[group.rank]))
    del recurring._memories[new]
    found = in_threads(2, lambda group: step(group, held[group.rank]))
    assert [decided for decided, _ in found] == [decide(held)] * 2
    assert [max(map(len, sent)) > 5000 for _, sent in found] == sends


def test_four_steps_are_remembered() -> None:
    def work(group: Group) -> list[int]:
        ranks = (group.rank,) if group.rank == 1 else ()
        return [len(step(group, Held((str(n), *map(str, ranks))))[1]) for n in (0, 1, 2, 3, 0, 4, 5, 6, 7, 0)]

    of_rank_1 = in_threads(2, work)[1]
    assert of_rank_1 == [2, 2, 2, 2, 1, 2, 2, 2, 2, 2]  # two where rank 0 asks
    assert {len(memory.decided) for memory in recurring._memories.values()} == {4}


@pytest.mark.parametrize(
    ("most", "remembered"), [(100_000, [(2, 2), (0, 2)]), (5_000, [(1, 1), (0, 2)]), (100, [(0, 0)] * 2)]
)
def test_what_is_remembered_is_bounded(
    monkeypatch: pytest.MonkeyPatch, most: int, remembered: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(recurring, "_MAX_BYTES", most)
    names = tuple(f"name-{i}" for i in range(100))  # a rank sends 1.1 kB of them, and rank 0 answers 1.6

    def work(group: Group) -> list[Decided]:
        return [step(group, Held((str(n), *names)))[0] for n in (0, 1, 0)]

    assert in_threads(2, work) == [[decide([Held((str(n), *names))] * 2) for n in (0, 1, 0)]] * 2
    found = [recurring._memories[rank] for rank in range(2)]
    assert [(len(one.received), len(one.decided)) for one in found] == remembered


def test_what_ranks_of_another_number_sent_is_forgotten() -> None:
    for n_ranks in (4, 2, 2, 2, 2):
        in_threads(n_ranks, lambda group: step(group, Held((f"{group.world_size} {group.rank}",))))
    assert len(recurring._memories[0].received) == len(recurring._memories[0].decided) + 1 == 2


def test_an_error_of_a_rank_and_of_rank_0_are_raised_on_all_and_leave_no_rank_waiting() -> None:
    def work(group: Group, fails: int) -> object:
        outcome = ValueError("of a rank") if group.rank == fails else Held(("w",) * (group.rank + 1))

        def refuse(_: list[Held]) -> Decided:
            raise MismatchError("of rank 0")

        return recurring.combine(Collective(group, 20), outcome, refuse, Held, Decided)

    for fails, words in ((1, "of a rank"), (9, "of rank 0")):
        errors = in_threads(3, lambda group, fails=fails: work(group, fails))  # type: ignore[misc]
        assert all(words in str(error) for error in errors), errors


class Forging(ThreadGroup):
    """Rank 1 sends another field than that of the digest."""

    def gather(self, value: Any, *, root: int = 0, timeout: float) -> list[Any] | None:
        text = json.dumps(value)
        return super().gather(json.loads(text.replace('["1"]', '["2"]')), root=root, timeout=timeout)


def test_a_field_of_another_digest_is_refused() -> None:
    def work(group: Group) -> object:
        assert isinstance(group, ThreadGroup)
        forging = Forging(group.rank, group.world_size, group._slots, group._barrier)
        return recurring.combine(Collective(forging, 20), Held((str(group.rank),)), decide, Held, Decided)

    for error in in_threads(2, work):
        assert isinstance(error, GroupError)
        assert "came with another content" in str(error)


def test_a_digest_that_is_not_known_and_numbers_of_no_name_are_refused() -> None:
    parts: dict[str, Callable[[], Any]] = {}
    message = encode(decide([Held(("w",))]), parts)
    (digest, make), *_ = parts.items()
    assert message["files"] == digest
    for known in (None, Known(), Known(sent={"other": make()})):
        with pytest.raises(GroupError, match=r"`files` is .*, expected the digest"):
            decode(Decided, message, known)
    assert decode(Decided, message, Known(sent={digest: make()})) == decide([Held(("w",))])
    for names, number, of_list in (([], 0, 0), (["w"], -1, 0), (["w"], 0, -1)):
        with pytest.raises(GroupError, match="expected numbers below"):
            decode(Decided, {"files": {"names": names, "lists": [[number]], "files": [["a", 0, of_list]]}, "loss": 0.0})


def test_fields_of_two_messages_of_one_name_have_two_digests() -> None:
    def made() -> type[Any]:
        @dataclass(frozen=True)
        class Held:
            names: tuple[str, ...] = field(metadata=is_recurring())

        return Held

    inner: dict[str, Callable[[], Any]] = {}
    outer: dict[str, Callable[[], Any]] = {}
    encode(made()(("w",)), inner)
    encode(Held(("w",)), outer)
    assert len(inner) == len(outer) == 1
    assert not inner.keys() & outer.keys()


def test_later_saves_of_many_ranks_send_little(tmp_path: Path) -> None:
    arrays = {f"model.layers.{i}.weight": np.full((1, 2), i, np.float32) for i in range(300)}
    layout = {"mesh": {"tp": 4}, "rules": [{"match": "*", "cut": ["tp"]}]}

    def work(group: Group) -> list[int]:
        found = []
        for iteration in (1, 2, 3):
            counting = Counting(group)
            reshard.save(tmp_path, iteration, arrays, layout=layout, group=counting, commit={"durable": False})
            found.append(sum(map(len, counting.sent)))
        return found

    first, *others = in_threads(4, work)
    assert first[0] > 9000
    assert max(*first[1:], *(size for of_rank in others for size in of_rank)) < 3000
    with reshard.open(tmp_path) as checkpoint:
        assert checkpoint.iteration == 3
        assert (checkpoint.read("model.layers.7.weight") == 7).all()
