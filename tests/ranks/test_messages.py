"""Messages between ranks: each comes back as it was sent, and a field of another type is refused by its name."""

import dataclasses
import enum
import json
import re
import typing
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.strategies import cases

from reshard.conversion.shares import SentPart
from reshard.documents.common_info import CommonInfo
from reshard.errors import GroupError
from reshard.formats.checkpoint1 import rank_saves
from reshard.formats.checkpoint1 import save as checkpoint1
from reshard.formats.checkpoint1.agreement import FileFacts
from reshard.formats.checkpoint1.candidates import RankFolder
from reshard.formats.checkpoint2 import save as checkpoint2
from reshard.formats.chosen import Chosen
from reshard.formats.rank_saves import FoundSaves
from reshard.ranks import distinct, group
from reshard.ranks.collective import Collective
from reshard.ranks.messages import decode, encode
from reshard.torch import state
from reshard.torch.placements import DigitLayout, Row
from reshard.verbs import convert, load
from reshard.write.arrays import Fact, FactKind, Facts
from reshard.write.phases import Messages, Published
from reshard.write.rank_facts import RankFacts, plan_key
from reshard.write.replicas import Replicas
from reshard.write.shard_files import WrittenFile

MESSAGES: list[Any] = [
    *(getattr(save._MESSAGES, one.name) for save in (checkpoint1, checkpoint2) for one in dataclasses.fields(Messages)),
    *(Chosen, CommonInfo, FileFacts, DigitLayout, Published, RankFacts, RankFolder, Replicas, Row, WrittenFile),
    *(convert._Sent, convert._ShareOfRank, convert.ConvertReport, SentPart),
    *(FoundSaves, rank_saves._Report, load._Choice, load._Outcome),
    *(distinct._Entry, *state._PARTS),
    group.ErrorRecord,
]

TEXT = st.text('aZ0.é"\0\n', max_size=3)
COUNTS = st.integers(0, 2**63 - 1)
JSON = st.recursive(st.none() | st.booleans() | COUNTS | TEXT, lambda one: st.lists(one, max_size=2))


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type hint: written here once more, so that hints that `decode` misreads are seen."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object:
        return JSON
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        fields = {one.name: values_of(hints[one.name]) for one in dataclasses.fields(hint) if one.init}
        return st.builds(hint, **fields)
    if origin is Literal:
        return st.sampled_from(arguments)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        return st.builds(hint, *map(values_of, typing.get_type_hints(hint).values()))
    if origin is tuple and arguments[-1] is ...:
        return st.lists(values_of(arguments[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, arguments))
    if origin in (list, frozenset):
        return st.lists(values_of(arguments[0]), max_size=2).map(origin)
    if origin is dict:
        return st.dictionaries(*map(values_of, arguments), max_size=2)
    if arguments:
        return st.one_of(*map(values_of, arguments))
    simple: dict[Any, st.SearchStrategy[Any]] = {
        type(None): st.none(),
        bool: st.booleans(),
        int: COUNTS,
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: TEXT,
        bytes: st.binary(max_size=5),
    }
    return simple[hint]


def sent(value: object) -> Any:
    return json.loads(json.dumps(encode(value)))


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("of", MESSAGES, ids=str)
def test_a_message_comes_back_as_it_was_sent(of: Any) -> None:
    @cases(40)
    @given(values_of(of))
    def check(value: Any) -> None:
        got = decode(of, sent(value))
        assert got == value
        assert sent(got) == sent(value)  # with what `==` does not compare

    check()


class NotJson:
    """What no field is."""


FACTS: Any = {
    "host": "a",
    "options": {"durable": True},
    "arrays": {
        "names": ["w", "v"],
        "kinds": [["model", "F32", [2, 3], None, False], ["optimizer", "F32", [2], [4], True]],
        "kind_of": [0, 1],
    },
    "shapes": {"rows": [["w", [2, 3]]]},
    "state": {"run": "0f"},
    "copies": ["x"],
}


PATHS = [
    "host",
    "options",
    "arrays",
    "arrays.names",
    "arrays.names[0]",
    "arrays.kind_of[1]",
    "arrays.kinds[0]",
    "arrays.kinds[0].part",
    "arrays.kinds[0].dtype",
    "arrays.kinds[0].shape",
    "arrays.kinds[1].shape[0]",
    "arrays.kinds[0].offset",
    "arrays.kinds[1].offset[0]",
    "arrays.kinds[0].may_differ",
    "shapes",
    "shapes.rows",
    "shapes.rows[0]",
    "shapes.rows[0][1][1]",
    "state",
    "state['run']",
    "copies",
    "copies[0]",
]


@pytest.mark.parametrize("path", PATHS)
def test_a_field_of_another_type_is_refused_by_its_name(path: str) -> None:
    assert sent(decode(RankFacts, FACTS)) == FACTS
    message = json.loads(json.dumps(FACTS))
    number_of = {name: number for number, name in enumerate(FactKind._fields)} if path.startswith("arrays") else {}
    steps = re.findall(r"\w+", path)
    *above, last = [int(step) if step.isdigit() else number_of.get(step, step) for step in steps]
    place = message
    for step in above:
        place = place[step]
    place[last] = 1.5
    with pytest.raises(GroupError) as caught:
        decode(RankFacts, message)
    assert f"message of another rank: `{path}` is 1.5, expected" in str(caught.value)


@pytest.mark.parametrize(
    ("of", "value", "words"),
    [
        (int, True, "expected int"),
        (bool, 1, "expected bool"),
        (float, "1", "expected float"),
        (str, None, "expected str"),
        (None, 0, "expected None"),
        (bytes, "?", "expected base64"),
        (tuple[int, str], [1], "a list of 2"),
        (list[int], {"0": 1}, "expected a list"),
        (dict[str, int], [["a", 1]], "expected a mapping"),
        (dict[int, int], {"x": 1}, "` key`|an integer"),
        (int | str, 1.5, r"int \| str"),
        (tuple[int, ...] | None, [1, "x"], r"`\[1\]` is 'x', expected int"),
        (Literal["model", "optimizer"], "other", "'model' or 'optimizer'"),
        (DigitLayout, {"shape": [], "cuts": []}, "'reason' is missing"),
        (DigitLayout, {"shape": [], "cuts": [], "reason": "", "more": 1}, "'more' is missing or unknown"),
        (DigitLayout, [[], [], ""], "expected DigitLayout"),
        (Fact, ["w", "model", "F32", [2]], "expected the 6 fields of Fact"),
        (Fact, {"name": "w"}, "expected the 6 fields of Fact"),
    ],
)
def test_a_value_of_another_type_is_refused(of: Any, value: Any, words: str) -> None:
    with pytest.raises(GroupError, match=words):
        decode(of, value)


def test_what_is_no_message_is_refused_before_it_is_sent() -> None:
    with pytest.raises(TypeError, match="cannot hold a NotJson"):
        encode({"a": [NotJson()]})
    with pytest.raises(TypeError, match="cannot hold a"):
        decode(list[NotJson], [1])


class TwoRanks:
    """Rank 0 of two; rank 1 answers with what it is made with."""

    rank, world_size = 0, 2

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def barrier(self, *, timeout: float) -> None: ...

    def gather(self, value: Any, *, root: int = 0, timeout: float) -> list[Any]:
        return [json.loads(json.dumps(value)), self.answer]

    def broadcast(self, value: Any, *, root: int = 0, timeout: float) -> Any:
        return json.loads(json.dumps(value))


def test_a_collective_checks_the_messages_of_other_ranks() -> None:
    assert Collective(TwoRanks({"value": "YWI="}), 1).share(b"x", bytes) == [b"x", b"ab"]
    assert Collective(TwoRanks({"value": 3}), 1).combine(4, sum, int, int) == 7
    with pytest.raises(GroupError, match="is '3', expected int"):
        Collective(TwoRanks({"value": "3"}), 1).share(4, int)
    with pytest.raises(GroupError, match="is '3', expected int"):
        Collective(TwoRanks({"value": "3"}), 1).combine(4, sum, int, int)


class _Ranks(group.SingleProcess):
    world_size = 4


def test_equal_messages_are_decoded_once_and_others_each() -> None:
    values = [{"n": 1}, {"n": 1}, {"n": 2}, {"n": 1}]
    found = Collective(_Ranks(), 1.0).decoded(dict[str, int], values)
    assert found == values
    assert found[0] is found[1]
    with pytest.raises(GroupError, match="is 'x', expected int"):
        Collective(_Ranks(), 1.0).decoded(dict[str, int], [*values[:3], {"n": "x"}])


def test_the_key_of_a_plan_counts_equal_ranks() -> None:
    a, b = (RankFacts("host", {}, Facts.of([Fact("w", "model", "F32", (n,))])) for n in (1, 2))
    lists = [[a], [a, a], [a, b], [b, a], [a, a, b], [a, b, b], [a, b, a]]
    keys = [json.dumps(plan_key(ranks)) for ranks in lists]
    assert len(set(keys)) == len(keys)
