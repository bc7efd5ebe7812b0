"""The structure of the Python package: no import cycles, formats known in one place, files touched in one place."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import get_args

import pytest

import reshard
from reshard.formats import registry
from reshard.options import Target

PACKAGE = Path(reshard.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


parsed = functools.cache(ast.parse)


def imports_of(text: str, own: str, modules: set[str]) -> set[str]:
    """The modules that a file imports anywhere: for type checkers and within functions, too."""
    found = set()
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in modules else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    # The package itself names its parts for type checkers and imports them when they are used.
    return (found & modules) - {own, "reshard"}


def cycle_of(graph: dict[str, set[str]]) -> list[str]:
    """Some modules that import each other in a circle; empty: there are none."""
    left = dict(graph)
    while True:
        free = [name for name, used in left.items() if not used & left.keys()]
        if not free:
            break
        for name in free:
            del left[name]
    if not left:
        return []
    path = [min(left)]
    while True:
        path.append(min(left[path[-1]] & left.keys()))
        if path[-1] in path[:-1]:
            return path[path.index(path[-1]) :]


@pytest.mark.slow(disk=False)
def test_no_file_imports_itself_by_way_of_others() -> None:
    graph = {name: imports_of(path.read_text(), name, set(MODULES)) for name, path in MODULES.items()}
    assert cycle_of(graph) == []


@pytest.mark.parametrize(
    ("texts", "cycle"),
    [
        (["from reshard.b import x", "from reshard import c", "x = 1"], []),
        (["from reshard.b import x", "from reshard import c", "def f(): import reshard.a"], ["a", "b", "c", "a"]),
        (["x = 1", "if TYPE_CHECKING:\n    from reshard.c import X", "from reshard.b import y"], ["b", "c", "b"]),
    ],
)
def test_a_cycle_is_found(texts: list[str], cycle: list[str]) -> None:
    names = [f"reshard.{name}" for name in "abc"]
    graph = {name: imports_of(text, name, set(names)) for name, text in zip(names, texts, strict=True)}
    assert cycle_of(graph) == [f"reshard.{name}" for name in cycle]


def compared(text: str, names: set[str]) -> list[int]:
    """The lines that compare something with the name of a format."""

    def is_name(node: ast.expr) -> bool:
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return any(map(is_name, node.elts))
        return isinstance(node, ast.Constant) and node.value in names

    return [
        node.lineno
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.Compare) and any(map(is_name, [node.left, *node.comparators]))
    ]


@pytest.mark.slow(disk=False)
def test_no_code_outside_formats_compares_the_name_of_a_format() -> None:
    names = {one.traits.name for one in registry.FORMATS} - {
        "safetensors",
        "torch",
    }  # words with other meanings
    # Words of a configuration and of a naming, which are no formats.
    others = {"reshard.config.words", "reshard.names.presets"}
    found = {
        name: lines
        for name, path in MODULES.items()
        if not name.startswith("reshard.formats.")
        and name not in others
        and (lines := compared(path.read_text(), names))
    }
    assert not found


def test_a_comparison_is_found() -> None:
    text = 'x = 1\nif a.format == "b":\n    pass\ny = f in ("c", "b")\nz = "b"'
    assert compared(text, {"b"}) == [2, 4]


FORMATS = "|".join(sorted(path.parent.name for path in (PACKAGE / "formats").glob("*/__init__.py")))
_OF_ONE_FORMAT = re.compile(rf"reshard\.formats\.({FORMATS})(\.\w+)*")
# Integrations that are the front of one format by nature, and why.
_FRONTS = {
    # What torch plans becomes Checkpoint 2.0: its planner calls the phases of that save one by one.
    "reshard.torch.dcp.writer": {"checkpoint2"},
    # A run goes on from a checkpoint that Trainer itself has written.
    "reshard.transformers.taken": {"trainer_run"},
    "reshard.transformers.training": {"trainer_run"},
}


def single_formats(text: str) -> set[str]:
    """The formats that a file imports one by one, or names as a module to be imported when it is used."""
    named = {
        one.value for one in ast.walk(parsed(text)) if isinstance(one, ast.Constant) and isinstance(one.value, str)
    }
    matches = map(_OF_ONE_FORMAT.fullmatch, imports_of(text, "", set(MODULES)) | named)
    return {match[1] for match in matches if match is not None}


@pytest.mark.slow(disk=False)
def test_no_module_outside_formats_imports_one_format() -> None:
    found = {
        name: formats
        for name, path in MODULES.items()
        if not name.startswith("reshard.formats.") and (formats := single_formats(path.read_text()))
    }
    assert found == _FRONTS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from reshard.formats import registry, state\nfrom reshard.formats.base import Format", set()),
        ('"""See reshard.formats.dcp.reader."""', set()),
        ("from reshard.formats import gguf", {"gguf"}),
        ("from reshard.formats.checkpoint1 import names", {"checkpoint1"}),
        ("import reshard.formats.dcp.reader", {"dcp"}),
        ("if TYPE_CHECKING:\n    from reshard.formats.nemo.names import X", {"nemo"}),
        ("def f():\n    from reshard.formats.vllm.reader import open", {"vllm"}),
        ('exports(__name__, {"reshard.formats.checkpoint2.reader": ["open"]})', {"checkpoint2"}),
        ('importlib.import_module("reshard.formats.tiled")', {"tiled"}),
    ],
)
def test_an_import_of_one_format_is_found(text: str, expected: set[str]) -> None:
    assert single_formats(text) == expected


def test_what_convert_and_save_accept_are_the_formats_that_are_written() -> None:
    assert {one.name for one in registry.writers()} == set(get_args(Target))
    for name in ("checkpoint2", "checkpoint1"):
        assert registry.save_format(name).traits.name == name


_FILE_MODULES = {"fcntl", "filecmp", "glob", "shutil", "stat", "tempfile"}
# What these modules and `os` have that touches no file: the text of paths, the process, the environment.
_NO_FILES = {
    *("os.PathLike", "os.fspath", "os.fsencode", "os.fsdecode", "os.path.commonprefix", "shutil.get_terminal_size"),
    *("os.environ", "os.cpu_count", "os.getpid", "os.getppid", "os.kill", "os.register_at_fork", "os.urandom"),
}
# Methods that of all types in this package `pathlib.Path` alone has, and those that other types have too, such as a
# `Location` or text: their receiver is looked at.
_PATH_METHODS = {
    *("expanduser", "glob", "hardlink_to", "is_dir", "is_mount", "is_symlink", "iterdir", "lchmod", "lstat", "mkdir"),
    *("chmod", "read_bytes", "read_text", "readlink", "rglob", "rmdir", "samefile", "symlink_to"),
    *("touch", "unlink", "walk", "write_bytes", "write_text"),
}
_SHARED_METHODS = {"absolute", "exists", "is_file", "open", "rename", "replace", "resolve", "stat"}
# Modules that touch files which belong to no checkpoint, and how.
_OTHER_FILES = {
    # The logs of the examples: they show a user's own program.
    "reshard.examples.train_gpt": {"Path.open()"},
    "reshard.examples.train_lightning": {"Path.open()"},
    # A message on stderr, and the end of the process.
    "reshard.__main__": {"os.write", "os._exit"},
}


@functools.cache
def file_accesses(text: str) -> list[str]:
    """What a module does with files by itself: modules that it imports, functions and methods that it names."""
    tree = parsed(text)
    paths = _paths(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, alias.asname or alias.name) for alias in node.names]
            found += [f"import {name} as" for name, known_as in names if _is_file_module(name) and name != known_as]
            found += [f"import {name}" for name, _ in names if name in _FILE_MODULES - {"shutil"}]
        elif isinstance(node, ast.ImportFrom):
            names_from = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [f"from {name}" for name in names_from if _is_file_function(name)]
        elif isinstance(node, ast.Attribute) and _is_file_function(ast.unparse(node)):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            found += ["open()"] if not _defines(tree, "open") else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, is_path = node.func.attr, _is_path(node.func.value, paths)
            if name in _PATH_METHODS or (name in _SHARED_METHODS and is_path):
                found.append(f"Path.{name}()" if is_path else f".{name}()")
    return found


def _is_file_module(name: str) -> bool:
    return name in {"os", "os.path", "io", "pathlib", *_FILE_MODULES}


def _is_file_function(name: str) -> bool:
    module, _, rest = name.replace("os.path.", "os.").partition(".")
    is_function = module in {"os", *_FILE_MODULES} and rest.isidentifier() and rest != "path"
    return name == "io.open" or (is_function and name not in _NO_FILES)


def _defines(tree: ast.AST, name: str) -> bool:
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.iter_child_nodes(tree))


def _paths(tree: ast.AST) -> set[str]:
    """Names and attributes that hold a `pathlib.Path` somewhere in a module, as annotations and assignments say."""
    paths: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign | ast.FunctionDef):
            annotation = node.returns if isinstance(node, ast.FunctionDef) else node.annotation
            target = node.target if isinstance(node, ast.AnnAssign) else node
            if annotation is not None and "Path" in re.findall(r"\w+", ast.unparse(annotation)):
                paths |= _names_of(target)
    for node in ast.walk(tree):  # in the order of the text
        if isinstance(node, ast.Assign) and _is_path(node.value, paths):
            paths |= {name for target in node.targets for name in _names_of(target)}
    return paths


def _names_of(node: ast.AST) -> set[str]:
    """The name of a variable, an attribute, an argument or a function."""
    return {str(getattr(node, field)) for field in ("id", "attr", "arg", "name") if hasattr(node, field)}


def _is_path(node: ast.expr, paths: set[str]) -> bool:
    """Whether an expression is known to be a `pathlib.Path`."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _is_path(node.left, paths)
    if isinstance(node, ast.Call):
        name = node.func
        if isinstance(name, ast.Attribute) and name.attr.startswith("with_"):
            return _is_path(name.value, paths)
        return isinstance(name, ast.Name) and name.id in {"Path", *paths}
    if isinstance(node, ast.Attribute):
        return node.attr in {"local", *paths} or (node.attr == "parent" and _is_path(node.value, paths))
    return isinstance(node, ast.Name) and node.id in paths


@pytest.mark.slow(disk=False)
def test_only_the_storage_package_touches_files() -> None:
    found = {
        name: accesses
        for name, path in MODULES.items()
        if not name.startswith("reshard.storage.")
        and (accesses := set(file_accesses(path.read_text())) - _OTHER_FILES.get(name, set()))
    }
    assert not found
    for name, known in _OTHER_FILES.items():
        assert known <= set(file_accesses(MODULES[name].read_text())), f"{name}: an exception that nothing needs"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((f"import {name}", [f"import {name}"]) for name in sorted(_FILE_MODULES - {"shutil"})),
        ("import os as system", ["import os as"]),
        ("from shutil import rmtree", ["from shutil.rmtree"]),
        ("from os.path import exists", ["from os.path.exists"]),
        ("shutil.rmtree(folder)", ["shutil.rmtree"]),
        ("os.listdir(folder)", ["os.listdir"]),
        ("os.path.lexists(folder)", ["os.path.lexists"]),
        ("f = os.stat", ["os.stat"]),
        ("io.open(name)", ["io.open"]),
        ("with open(name) as f: pass", ["open()"]),
        *((f"x.{name}()", [f".{name}()"]) for name in sorted(_PATH_METHODS)),
        *((f"def f(p: Path): p.{name}()", [f"Path.{name}()"]) for name in sorted(_SHARED_METHODS)),
        ("def f(p: Path | None): (p / 'a').parent.exists()", ["Path.exists()"]),
        ("p = Path(x).with_name('a')\np.stat()", ["Path.stat()"]),
        ("class A:\n  root: Path\n  def f(self): self.root.resolve()", ["Path.resolve()"]),
        ("def g() -> Path: ...\ng().rename(x)", ["Path.rename()"]),
        ("location.local.exists()", ["Path.exists()"]),
        # What touches no file.
        ("import os, shutil, re, pathlib\nfrom pathlib import Path", []),
        ("os.fspath(x), os.environ['A'], os.getpid(), os.path.commonprefix(x), shutil.get_terminal_size()", []),
        ("def f(p: Path): return (p / 'a').parent.name, p.suffix", []),
        ("def f(x: Location): x.exists(), x.stat(), x.open(), x.absolute(), x.replace(b'a')", []),
        ("text.replace('a', 'b'), replace(one, path=x), dataclasses.replace(one, name=1)", []),
        ("opening.open(path), layout.resolve(shapes), self.rename(a, b), filesystem.rename(path, other)", []),
        ("def open(path): ...\nopen(path)", []),
    ],
)
def test_an_access_to_files_is_found(text: str, expected: list[str]) -> None:
    assert file_accesses(text) == expected


REFERENCES = re.compile(r"Args:|[Ss]ee `|[Aa]s in `|[Aa]s `|Arguments")


def undocumented(text: str) -> list[str]:
    """Public functions with three arguments or more whose docstring does not describe them.

    A method that overrides one of a base class is described there.
    """
    found = []

    def visit(node: ast.Module | ast.ClassDef) -> None:
        for one in node.body:
            if isinstance(one, ast.ClassDef) and not one.name.startswith("_"):
                visit(one)
            if not isinstance(one, ast.FunctionDef) or one.name.startswith("_"):
                continue
            arguments = [*one.args.posonlyargs, *one.args.args, *one.args.kwonlyargs]
            n = sum(argument.arg not in {"self", "cls"} for argument in arguments)
            decorators = " ".join(map(ast.unparse, one.decorator_list))
            is_other = "overload" in decorators or "click" in decorators or "command" in decorators
            overrides = isinstance(node, ast.ClassDef) and any(
                ast.unparse(base).split("[")[0] not in {"Protocol", "ABC", "abc.ABC", "Generic"} for base in node.bases
            )
            if n >= 3 and not is_other and not overrides and not REFERENCES.search(ast.get_docstring(one) or ""):
                found.append(one.name)

    visit(parsed(text))
    return found


@pytest.mark.slow(disk=False)
def test_public_functions_describe_their_arguments() -> None:
    found = {name: names for name, path in MODULES.items() if (names := undocumented(path.read_text()))}
    assert not found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('def f(a, b, c): """What it does."""', ["f"]),
        ('def f(a, b, c):\n  """What it does.\n\n  Args:\n    a: one.\n  """', []),
        ('def f(a, b, c): """As `g`."""', []),
        ('def f(a, b): """Two."""', []),
        ("def _f(a, b, c): ...", []),
        ("class A:\n  def f(self, a, *, b, c): ...", ["f"]),
        ("class A(B):\n  def f(self, a, b, c): ...", []),
        ("class A(Protocol):\n  def f(self, a, b, c): ...", ["f"]),
    ],
)
def test_a_function_without_a_description_is_found(text: str, expected: list[str]) -> None:
    assert undocumented(text) == expected


def untyped(text: str) -> list[int]:
    """The lines with a slot of a class that others fill with anything."""
    nodes = (node for node in ast.walk(parsed(text)) if isinstance(node, ast.AnnAssign))
    return [node.lineno for node in nodes if ast.unparse(node.annotation).endswith("ClassVar[Any]")]


def test_no_class_has_a_slot_for_anything() -> None:
    found = {name: lines for name, path in MODULES.items() if (lines := untyped(path.read_text()))}
    assert not found


def test_a_slot_for_anything_is_found() -> None:
    text = "class A:\n  a: ClassVar[Any]\n  b: ClassVar[int] = 1\n  c: typing.ClassVar[Any] = None\n  d: Any"
    assert untyped(text) == [2, 4]


def asserted(text: str) -> list[int]:
    """The lines that assert that something is not None: a type can say so instead."""
    tests = ((node.lineno, node.test) for node in ast.walk(parsed(text)) if isinstance(node, ast.Assert))
    return [
        line
        for line, test in tests
        if any(isinstance(node, ast.Compare) and ast.unparse(node).endswith(" is not None") for node in ast.walk(test))
    ]


def test_formats_and_the_writer_do_not_assert_that_something_is_there() -> None:
    inside = {name: path for name, path in MODULES.items() if name.startswith(("reshard.formats", "reshard.write"))}
    assert len(inside) > 100
    assert not {name: lines for name, path in inside.items() if (lines := asserted(path.read_text()))}


def test_such_an_assertion_is_found() -> None:
    assert asserted("assert a is not None\nassert a\nassert b and c.d is not None\nassert a is None") == [1, 3]
