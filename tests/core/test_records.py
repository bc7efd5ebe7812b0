"""Records of the core cross the binding as types, and its stub stands alone."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import numpy as np

import reshard
from reshard import _core

STUB = ast.parse((Path(_core.__file__).parent / "_core.pyi").read_text())

WITHOUT_NAMES = {
    "decode_strategy",  # lists of records
    "folder_sizes",  # one for each entry of a folder, read by one function
    "number_groups",  # columns
    "read_torch_shards",  # lists of records
    "remote_counts",  # totals, read by one function
    "write_part",
}
"""Functions whose results are columns, or are read in one place."""


def test_the_stub_imports_only_what_is_below_the_core() -> None:
    imports = [node for node in ast.walk(STUB) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports}
    assert names == {"collections.abc", "typing", "numpy"}


def test_a_result_of_three_values_has_names() -> None:
    found = set()
    for function in ast.walk(STUB):
        if not isinstance(function, ast.FunctionDef) or function.returns is None:
            continue
        for node in ast.walk(function.returns):
            if (
                isinstance(node, ast.Subscript)
                and ast.unparse(node.value) == "tuple"
                and isinstance(node.slice, ast.Tuple)
            ):
                items = [ast.unparse(item) for item in node.slice.elts]
                if len(items) > 2 and "..." not in items:
                    found.add(function.name)
    assert found == WITHOUT_NAMES


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
