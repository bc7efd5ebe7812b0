"""Records and words of the core cross the binding as types, and its stub stands alone."""

from __future__ import annotations

import ast
import json
import os
import pickle
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

import reshard
from reshard import _core
from reshard.errors import GroupError
from reshard.layout import partition
from reshard.ranks import messages
from reshard.values import argument_types
from reshard.write.shard_files import WrittenFile

STUB = ast.parse((Path(_core.__file__).parent / "_core.pyi").read_text())

WORDS_OF_USERS = {"ReadMethod": argument_types.ReadMethod, "uneven": partition.Uneven}
"""Where the stub has words that users write: in calls, and in layout files."""


def test_the_stub_imports_only_what_is_below_the_core() -> None:
    imports = [node for node in ast.walk(STUB) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports}
    assert names == {"collections.abc", "enum", "typing", "numpy"}


def subscripts(node: ast.AST, name: str) -> list[ast.Subscript]:
    """Each `name[...]` in a piece of the stub."""
    found = (one for one in ast.walk(node) if isinstance(one, ast.Subscript))
    return [one for one in found if ast.unparse(one.value) == name]


def bare_results(stub: ast.AST) -> set[str]:
    """The functions and fields of records that give a tuple of three or more values without names."""
    found = set()
    for node in ast.walk(stub):
        if isinstance(node, ast.FunctionDef) and node.returns is not None:
            name, given = node.name, node.returns
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) != "TypeAlias":
            name, given = ast.unparse(node.target), node.annotation
        else:
            continue
        for one in subscripts(given, "tuple"):
            items = [ast.unparse(item) for item in one.slice.elts] if isinstance(one.slice, ast.Tuple) else []
            if len(items) > 2 and "..." not in items:
                found.add(name)
    return found


def words(stub: ast.AST) -> dict[str, tuple[str, ...]]:
    """The words of each `Literal` in the stub, by the name that it gives a type to."""
    found = {}
    for node in ast.walk(stub):
        if isinstance(node, ast.FunctionDef):
            name, inside = node.name, [node.args, *([node.returns] if node.returns else [])]
        elif isinstance(node, ast.AnnAssign):
            name, inside = ast.unparse(node.target), [one for one in (node.annotation, node.value) if one is not None]
        else:
            continue
        for one in (literal for piece in inside for literal in subscripts(piece, "Literal")):
            found[name] = ast.literal_eval(one.slice)
    return found


def test_a_result_of_three_values_has_names() -> None:
    assert bare_results(
        ast.parse("def f() -> list[tuple[int, str, int]]: ...\nclass A:\n  x: tuple[int, int, int]")
    ) == {
        "f",
        "x",
    }
    assert bare_results(STUB) == set()


def test_only_words_of_users_cross_as_text() -> None:
    assert words(ast.parse("def f(x: Literal['a', 'b']): ...\ndef g() -> list[Literal['c', 'd']]: ...")) == {
        "f": ("a", "b"),
        "g": ("c", "d"),
    }
    assert words(STUB) == {name: get_args(of) for name, of in WORDS_OF_USERS.items()}


def test_each_member_of_an_enum_is_that_of_the_stub() -> None:
    enums = [
        node
        for node in STUB.body
        if isinstance(node, ast.ClassDef) and any("enum." in ast.unparse(base) for base in node.bases)
    ]
    assert [node.name for node in enums] == ["NotFinite", "TensorKind", "PutNew", "RuleAction"]
    for node in enums:
        declared = {
            ast.unparse(one.targets[0]): ast.literal_eval(one.value) for one in node.body if isinstance(one, ast.Assign)
        }
        made = getattr(_core, node.name)
        assert {one.name: one.value for one in made} == declared
        assert [f"enum.{base.__name__}" for base in made.__bases__] == [ast.unparse(base) for base in node.bases]
        assert [pickle.loads(pickle.dumps(one)) for one in made] == list(made)


def test_what_is_not_finite_is_a_member_whether_a_file_is_written_at_once_or_in_parts(tmp_path: Path) -> None:
    values = np.ones(8, np.float32)
    values[3] = np.inf
    reshard.save_file({"a": np.full(2, np.nan, np.float32), "b": values, "c": np.ones(2)}, tmp_path / "in.safetensors")
    index = _core.Index()
    index.add_whole_file(index.add_file(str(tmp_path / "in.safetensors")))
    plan = index.plan(index.whole_request(["a", "b", "c"]))
    whole = plan.write(str(tmp_path / "whole"))
    (tmp_path / "part").touch()
    part = plan.write_part(str(tmp_path / "part"), 0, plan.n_bytes)
    assert isinstance(part, _core.WrittenRange)
    assert (part.start, part.end) == (0, part.n_bytes)
    assert part[2:6] == (whole.n_bytes, whole.header_bytes, whole.header_checksum, whole.checksums)
    for found in (whole.not_finite, part.not_finite):
        assert sorted(found) == [("a", _core.NotFinite.NAN), ("b", _core.NotFinite.INFINITE)]
        assert all(type(worst) is _core.NotFinite for _, worst in found)
    decoded = messages.decode(WrittenFile, json.loads(json.dumps(messages.encode(WrittenFile.of(part)))))
    assert decoded == WrittenFile.of(part)
    assert [type(worst) for _, worst in decoded.not_finite] == [_core.NotFinite] * 2
    with pytest.raises(GroupError, match="is 'big', expected 'nan' or 'inf'"):
        messages.decode(_core.NotFinite, "big")


def test_arrays_of_a_plan_are_records_that_unpack(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    reshard.save_file({"w": np.ones((2, 3), np.float32)}, path)
    index = _core.Index()
    index.add_whole_file(index.add_file(str(path)))
    request = index.whole_request(["w"])
    plan = index.plan(request, dtype="BF16")
    assert plan.arrays == index.request_arrays(request, dtype="BF16") == [("w", "BF16", (2, 3), 12)]
    [array] = plan.arrays
    assert isinstance(array, _core.PlannedArray)
    assert (array.name, array.dtype, array.shape, array.n_bytes) == ("w", "BF16", (2, 3), 12)
    [stack] = plan.load().stacks
    assert isinstance(stack, _core.ArrayStack)
    assert (stack.start, stack.dtype, stack.shape, list(stack.numbers)) == (0, "BF16", (2, 3), [0])


def test_a_changed_file_is_told_with_both_states(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    reshard.save_file({"w": np.ones(2)}, path)
    index = _core.Index()
    index.add_whole_file(index.add_file(str(path)))
    assert index.changed_file() is None
    before = path.stat()
    reshard.save_file({"w": np.ones(200)}, path)
    changed = index.changed_file()
    assert isinstance(changed, _core.ChangedFile)
    assert os.fspath(changed.path) == str(path)
    assert changed.opened == _core.FileState(before.st_size, before.st_mtime_ns, before.st_ino)
    assert changed.now is not None
    assert changed.now.n_bytes == path.stat().st_size
