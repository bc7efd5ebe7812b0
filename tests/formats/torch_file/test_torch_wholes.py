"""The tensors of a file of `torch.save` in an index, beside the plain way: each one by name."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard import _core
from reshard.errors import ReshardError

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = Path(__file__).parents[2] / "data" / "torch"
FILES = sorted(path for path in DATA.rglob("*.pt") if path.is_file())
KEYS = st.sampled_from(["a", "b.c", "optimizer", "state", "", 1, (0, "x"), "None"])
TENSORS = st.sampled_from([torch.arange(12.0).reshape(3, 4), torch.ones(2, 3).T, torch.tensor(7), torch.zeros(0, 2)])
VALUES = st.recursive(
    TENSORS | st.integers(0, 3) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def plain(path: Path, number: int) -> list[_core.RankTensor]:
    return _core.read_torch_ranks([(str(path), number, 0)]).tensors()


def tables(path: Path) -> tuple[Any, Any]:
    """The keys, dtypes, shapes and places of the whole tensors, and the shards: at once, and one by one."""
    index, expected = _core.Index(), _core.Index()
    shards, _ = _core.add_torch_wholes(index, index.add_torch_file(str(path)))
    number = expected.add_torch_file(str(path))
    found = plain(path, number)
    for one in found:
        if one.kind is _core.TensorKind.TENSOR:
            expected.add_whole(one.key, number)
    others = [one for one in found if one.kind is not _core.TensorKind.TENSOR]
    first, second = (
        ([(key, *of.info(key), of.stored(key)) for key in of.keys()], repr(rest))  # noqa: SIM118  not a mapping
        for of, rest in ((index, shards.tensors()), (expected, others))
    )
    return first, second


def message_of(read: Callable[[], object]) -> str:
    try:
        read()
    except ReshardError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(DATA)))
def test_files_of_programs(path: Path) -> None:
    index = _core.Index()
    messages = [
        message_of(lambda: plain(path, 0)),
        message_of(lambda: _core.add_torch_wholes(index, index.add_torch_file(str(path)))),
    ]
    assert messages[0] == messages[1]
    if messages == ["", ""]:
        at_once, one_by_one = tables(path)
        assert at_once == one_by_one


@settings(deadline=None, max_examples=60)
@given(value=VALUES)
def test_any_values(value: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "values.pt"
        torch.save(value, path)
        try:
            at_once, one_by_one = tables(path)
        except ReshardError as error:
            assert "two values have the path" in str(error) or "tensor ``" in str(error)  # noqa: PT017
            return
    assert at_once == one_by_one
