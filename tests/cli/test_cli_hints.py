"""Hints of the command line: what was meant, what lies around, and options instead of arguments of functions."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import itertools
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import click
import numpy as np
import pytest
from tests.helpers import small_saves
from tests.helpers.command_line import all_commands, outcome, run

import reshard
from reshard import layout
from reshard.cli import output
from reshard.commit import claims, protocol
from reshard.errors import ClaimedError, DamagedFileError, adapt_hint, hints_without
from reshard.layout import BoundLayout
from reshard.opening.near import near
from reshard.options import Options
from reshard.storage.location import locate
from reshard.torch import Checkpointer
from reshard.verbs.demo import demo


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Iterations 100 and 200, in a folder of a folder."""
    root = tmp_path / "runs" / "checkpoint"
    for iteration in (100, 200):
        reshard.save(root, iteration, {"w": np.full((4, 6), iteration, np.float32)}, commit={"durable": False})
    protocol.release(locate(root))
    return root


# -- what was meant


COMMANDS = [["inspect"], ["verify"], ["explain"], ["prune", "--keep", "3"], ["pin", "100"], ["rollback", "100"]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_parent_or_a_typo_of_a_root_gets_a_hint(command: list[str], root: Path, tmp_path: Path) -> None:
    for given in (root.parent, root.parent.parent, root.with_name("chekpoint"), tmp_path / "rnus" / "checkpoint"):
        name, *more = command
        result = run(name, given, *more)
        assert result.exit_code != 0, given
        assert f"hint: did you mean `{root}`?" in result.stderr, given
    assert not (root.parent / ".lock").exists()


def test_a_hint_names_the_iterations_that_are_there(root: Path) -> None:
    result = run("inspect", root / "iteration_00000101")
    assert f"`{root / 'iteration_00000100'}`" in result.stderr
    assert json.loads(run("inspect", root.parent, "--json").stdout)["hint"] == f"did you mean `{root}`?"


def test_other_wrong_paths_get_a_hint(root: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "toy"}')
    for command in ("inspect", "verify"):  # not "damaged"
        result = run(command, tmp_path / "config.json")
        assert (
            f"error: `{tmp_path / 'config.json'}` holds no checkpoint: its content has no known format" in result.stderr
        )
        assert (result.exit_code, result.stdout) == (1, "")
    assert run("explain", tmp_path / "config.json").stderr.startswith(f"error: {tmp_path / 'config.json'} exists and ")
    assert "name its folder as the source" in run("convert", root, tmp_path / "hf", "--iteration", 100).stderr
    reshard.save_file({"w": np.zeros(2)}, tmp_path / "w.safetensors")
    taken = run("convert", tmp_path / "w.safetensors", root).stderr
    assert f"error: {root} is not empty: it holds iteration_00000100\n" in taken  # not a hidden file


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943\nsize 1503300328\n"
    for name in ("model.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_text(pointer)
        result = run("inspect", tmp_path / name)
        assert f"error: `{tmp_path / name}` is a pointer of Git LFS" in result.stderr, result.stderr
        assert "hint: run `git lfs pull`" in result.stderr
    assert f"`{tmp_path / 'model.safetensors'}` is a pointer" in run("inspect", tmp_path).stderr


def test_a_repository_of_the_hub_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in ("inspect Qwen/Qwen3", "convert Qwen/Qwen3 out", "explain run --init-from Qwen/Qwen3"):
        assert "`hf download Qwen/Qwen3 --local-dir FOLDER`" in run(*words.split()).stderr, words
    (tmp_path / "Qwen").mkdir()
    assert "hf download" not in run("inspect", "Qwen/Qwen3").stderr


def test_a_glob_gets_no_hidden_name_as_hint(root: Path) -> None:
    assert "hint" not in run("inspect", root / "iter*").stderr


def test_either_side_of_a_comparison_gets_a_hint(root: Path, tmp_path: Path) -> None:
    reshard.convert(root, tmp_path / "hf")
    assert f"did you mean `{tmp_path / 'hf'}`?" in run("diff", root, tmp_path / "hff").stderr
    assert f"did you mean `{root}`?" in run("diff", root.parent, tmp_path / "hf").stderr


def test_what_is_near_is_bounded_and_never_an_error(root: Path, tmp_path: Path) -> None:
    assert near(root) == []
    assert near(tmp_path / "nothing" / "like" / "it") == []
    assert near(tmp_path / ("x" * 300)) == []
    (tmp_path / "file").write_text("")
    assert near(tmp_path / "file") == []
    assert near(tmp_path / "file" / "below") == []
    deep = tmp_path / "deep"
    shutil.copytree(root, deep / "1" / "2" / "3" / "4")
    assert near(deep) == []  # three levels are searched
    assert near(deep / "1") == [str(deep / "1" / "2" / "3" / "4")]
    loop = tmp_path / "loop"
    loop.mkdir()
    (loop / "again").symlink_to(loop)
    assert near(loop) == []


# -- what lies around


def test_inspect_mentions_what_is_no_part_of_the_checkpoint(root: Path) -> None:
    assert "other files and folders" not in run("inspect", root).stdout
    shutil.copytree(root / "iteration_00000100", root / "iteration_00000100.bak")
    shutil.copytree(root / "iteration_00000100", root / "iteration_100")
    (root / "iteration_00000300").symlink_to("iteration_00000100")
    (root / "notes\x1b.txt").write_text("abc")
    (root / "iteration_00000200" / "model.tmp").write_text("abcd")
    staged = root / ".staging" / f"300.1.{'a' * 32}"
    staged.mkdir(parents=True)
    (staged / "part").write_bytes(bytes(2048))
    (root / ".trash" / f"50.{'b' * 32}").mkdir(parents=True)
    found = {
        one["name"]: (one["what"], one["n_bytes"])
        for one in json.loads(run("inspect", root, "--json").stdout)["leftovers"]
    }
    assert {name: what for name, (what, _) in found.items()} == {
        f".staging/300.1.{'a' * 32}": "a save of iteration 300 that was interrupted: "
        "the next save publishes it if it is complete, and removes it otherwise",
        f".trash/50.{'b' * 32}": "a removed iteration, which the next save deletes",
        "iteration_00000100.bak": "folder, not part of a checkpoint",
        "iteration_100": "iteration 100 is read from iteration_00000100: nothing reads or removes this folder; "
        "remove one of the two",
        "iteration_00000300": "it is a symbolic link, which is not followed: move the folder itself here",
        "notes\x1b.txt": "file, not part of a checkpoint",
        "iteration_00000200/model.tmp": "file, not in the manifest",
    }
    assert found[f".staging/300.1.{'a' * 32}"][1] == 2048
    page = run("inspect", root).stdout
    assert "other files and folders, which are not read:" in page
    assert "  iteration_00000100.bak " in page
    assert "notes\\x1b.txt" in page
    assert "iteration_00000200  complete (selected, tracker)" in page


def test_two_folders_of_one_iteration(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(root / "iteration_00000100", root / "iteration_100")
    (root / "iteration_00000300").symlink_to(root / "iteration_100")
    assert "`iteration_00000300` is skipped: it is a symbolic link" in run("explain", root).stdout
    warning = "`iteration_100` is skipped: iteration 100 is read from iteration_00000100"
    assert warning in run("explain", root).stdout
    assert any(warning in line for line in json.loads(run("explain", root, "--json").stdout)["warnings"])
    reshard.open(root).close()
    assert warning in caplog.text
    assert (root / "iteration_100").is_dir()


def test_folders_that_are_named_almost_like_an_iteration(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("iteration_00000100 (copy)", "Iteration-300", ".iteration_00000100.old", "iterations", "x"):
        shutil.copytree(root / "iteration_00000100", root / name)
    shutil.move(root / "iteration_00000100", root / "iteration_00000100.bak")
    (root / "iteration_300 of today").write_text("no folder")
    names = {"Iteration-300": 300, "iteration_00000100 (copy)": 100, "iteration_00000100.bak": 100}
    of_iteration = "is ignored: the folder of an iteration is named `iteration_00000"
    reasons = [f"`{name}` {of_iteration}{number}`; rename it to use it" for name, number in names.items()]
    assert json.loads(run("explain", root, "--json").stdout)["warnings"][:3] == reasons
    assert list(reshard.verify(root).warnings) == reasons
    assert json.loads(run("verify", root, "--json").stdout)["warnings"] == reasons
    stdout = run("explain", root).stdout
    assert all(reason in stdout for reason in reasons)
    assert run("verify", root).stderr == "".join(f"warning: {reason}\n" for reason in reasons)
    caplog.clear()
    assert reshard.load(root).iteration == 200
    assert all(reason in caplog.text for reason in reasons)
    (root / "iteration_00000100.bak").rename(root / "iteration_00000100")
    for name in ("iteration_00000200 backup", "iteration_00000201 backup"):
        (root / name).mkdir()
    _, copy, _, rest = reshard.verify(root).warnings
    assert copy == f"`iteration_00000100 (copy)` {of_iteration}100`, and iteration 100 is read from iteration_00000100"
    assert rest == "1 more folder with such a name is ignored"
    for name in ("iteration_00000100", "iteration_00000200"):
        shutil.rmtree(root / name)
    with pytest.raises(DamagedFileError, match="`Iteration-300` is ignored"):
        reshard.open(root)


@pytest.mark.slow(disk=False)
def test_inspect_tells_a_save_in_progress_from_one_that_was_interrupted(root: Path) -> None:
    attempt = protocol.begin(locate(root), 300)
    try:
        for result in (run("inspect", root).stdout, outcome("inspect", root)[1]):
            assert "a save of iteration 300 in progress (0 B)" in result
    finally:
        protocol.abandon(attempt)
        os.makedirs(attempt.staging)  # noqa: PTH103  as if it had been killed
        protocol.release(locate(root))
    assert "a save of iteration 300 that was interrupted" in run("inspect", root).stdout


def test_many_leftovers_are_counted(root: Path) -> None:
    for number in range(30):
        (root / f"note{number:02d}").write_text("")
    page = run("inspect", root).stdout
    assert "and 20 more; --all lists them" in page
    assert "note29" in run("inspect", root, "--all").stdout


# -- options instead of arguments


PACKAGE = Path(reshard.__file__).parent
ARGUMENT = re.compile(r"`([a-z_]+)=([^`]*)`")
FIELD = re.compile(r"`([a-z0-9_]+)=([A-Z]\w*)\(([a-z_]+)=[^`]*`")


def texts(node: ast.expr) -> list[str]:
    """What an expression may be, as far as it is text; what is put in stands as `{}`."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
        return ["".join(map(str, parts))]
    if isinstance(node, ast.IfExp):
        return texts(node.body) + texts(node.orelse)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return ["".join(both) for both in itertools.product(texts(node.left) or ["{}"], texts(node.right) or ["{}"])]
    return []


@functools.cache
def hints() -> list[tuple[str, str]]:
    """Every hint in the package, with its place: keywords, and variables, of the name."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "hint" in text else ():
            value = None
            if (isinstance(node, ast.keyword) and node.arg == "hint") or (
                isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "hint" for t in node.targets)
            ):
                value = node.value
            if value is not None:
                found += [(f"{path.relative_to(PACKAGE)}:{value.lineno}", text) for text in texts(value)]
    return found


def arguments() -> set[str]:
    """The arguments of all public functions, and of the public methods of public classes."""
    public = [getattr(reshard, name) for name in reshard.__all__]
    public += [layout.write_strategy, layout.merge_strategies, demo, BoundLayout, Checkpointer]
    names = set(inspect.signature(Checkpointer).parameters)
    for one in public:
        members = [one]
        if inspect.isclass(one):
            members = [member for name, member in inspect.getmembers(one, callable) if not name.startswith("_")]
        for member in members:
            with contextlib.suppress(ValueError, TypeError):
                names |= inspect.signature(member).parameters.keys()
    return names


@pytest.mark.slow  # it imports the trainers' libraries
def test_hints_name_arguments_that_there_are() -> None:
    known = arguments()
    found = hints()
    assert len(found) > 100
    named = [(place, match[1]) for place, text in found for match in ARGUMENT.finditer(text)]
    assert len(named) > 20
    for place, name in named:
        package = place.partition("/")[0]
        if package != "mindspore" or importlib.util.find_spec("mindspore") is not None:
            assert name in known | arguments_of(package), (place, name)


def modules_of(package: str) -> list[str]:
    """The modules whose functions a hint of this package may name."""
    more = {"torch": ["torch.dcp"], "torch_group.py": ["torch"], "lightning": ["torch"], "transformers": ["torch"]}
    found = [package.removesuffix(".py"), *more.get(package, ["torch"])]
    return [f"reshard.{one}" for one in found if importlib.util.find_spec(f"reshard.{one}") is not None]


@functools.cache
def arguments_of(package: str) -> frozenset[str]:
    """The arguments of the public functions and classes of a trainer's package."""
    if package not in ("torch", "torch_group.py", "accelerate", "jax", "lightning", "mindspore", "transformers"):
        return frozenset()
    names: set[str] = set()
    for name in modules_of(package):
        try:
            module = importlib.import_module(name)
        except ImportError:  # the framework is not installed
            continue
        for public in module.__all__:
            try:
                one = getattr(module, public)
            except ImportError:  # the framework is not installed
                continue
            members = [one]
            if inspect.isclass(one):
                members += [member for name, member in inspect.getmembers(one, callable) if not name.startswith("_")]
            for member in members:
                with contextlib.suppress(ValueError, TypeError):
                    names |= inspect.signature(member).parameters.keys()
    return frozenset(names) | {
        "num_workers",
        "ckpt_path",
        "use_seedable_sampler",
        "persistent_workers",
    }  # of other libraries


def parsed(code: str) -> ast.expr:
    """The call in a hint as an expression: `{}` and `{...}` stand for any value, `{}=` for any name."""
    code = re.sub(r"\{\}(?==)", "any_name", code)
    return ast.parse(re.sub(r"\{(\.\.\.)?\}", "...", code), mode="eval").body


CALL = re.compile(r"`([A-Za-z_][\w.]*\([^`]*\))`")


def named(function: str, package: str) -> object:
    """What the function of a hint is: of its package, of this one, or of the trainer's library; None: of the user."""
    root, _, rest = function.partition(".")
    if root in ("callback", "resume"):
        cls = {"transformers": "ReshardCallback", "mindspore": "ReshardCallback"}.get(package, "Checkpointer")
        root, rest = (cls, rest or root) if root == "callback" else ("Checkpointer", "resume")
    places = [f"reshard.{package.removesuffix('.py')}", "reshard.torch", "reshard", "reshard.options"]
    libraries = {"transformers": ["transformers"], "accelerate": ["accelerate", "accelerate.utils"]}.get(package, [])
    for place in [*places, *libraries, "torch.utils.data", root]:
        with contextlib.suppress(ImportError, AttributeError):
            module = importlib.import_module(place)
            path = rest.split(".") if place == root else [root, *rest.split(".")]
            return functools.reduce(getattr, filter(None, path), module)
    return None


@pytest.mark.slow  # it imports the trainers' libraries
def test_calls_in_hints_have_the_arguments_that_they_name() -> None:
    """Calls are parsed, and their functions asked for their signatures."""
    found = set()
    for place, text in hints():
        for match in CALL.finditer(text):
            call = parsed(match[1])
            for one in ast.walk(call):
                if not isinstance(one, ast.Call):
                    continue
                name, package = ast.unparse(one.func), place.partition("/")[0]
                function = named(name, package)
                if function is None:  # a function, a method or an object of the user
                    assert not name[0].isupper() or package in ("mindspore", "ray"), (place, match[0])
                    continue
                found.add(name)
                try:
                    parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
                except ValueError:  # of a class that is written in C
                    continue
                for keyword in one.keywords:
                    assert keyword.arg in {*parameters, "any_name"}, (place, match[0])
    assert {"ReshardCallback", "ReshardCheckpoint", "TrainingArguments", "Checkpointer.resume"} <= found, found
    assert len(found) > 10


@pytest.mark.slow(disk=False)
def test_hints_name_fields_of_options_that_there_are() -> None:
    groups = {one.__name__: one for one in Options.__subclasses__()}
    named = [(place, *match.groups()) for place, text in hints() for match in FIELD.finditer(text)]
    assert len(named) > 8
    for place, keyword, group, field in named:
        assert groups[group].keyword == keyword, place
        assert field in {one.name for one in dataclasses.fields(groups[group])}, (place, field)
    moved = {field.name for one in groups.values() for field in dataclasses.fields(one)} - arguments()
    assert {"takeover", "dedup", "drop"} <= moved
    for place, text in hints():
        assert not moved & {match[1] for match in ARGUMENT.finditer(text)}, (place, text)


@pytest.mark.slow(disk=False)
def test_hints_leave_options_to_the_command_line() -> None:
    for place, text in hints():
        assert "--" not in text or place.startswith("cli/"), (place, text)


@pytest.mark.slow(disk=False)
def test_hints_write_arguments_as_such() -> None:
    """In backticks alone stand keys of layout files and configurations; these names are none of them."""
    only_arguments = {
        "takeover", "rollback", "overwrite", "strict_format", "drop", "prefix", "name_map", "strategy", "keys", "group",
        "extra", "shapes", "dtype", "share", "timeout", "threads", "memory", "durable", "dedup",
    }  # fmt: skip
    for place, text in hints():
        if not place.startswith("torch/"):
            assert not only_arguments & set(re.findall("`([a-z_]+)`", text)), (place, text)


@pytest.mark.slow
def test_hints_on_the_command_line_name_options_that_the_command_has() -> None:
    for name, command in all_commands():
        if isinstance(command, click.Group):
            continue
        options = {one for param in command.params for one in (*param.opts, *param.secondary_opts)}
        with click.Context(command):
            for place, text in hints():
                told = adapt_hint(text, output._option) or ""
                assert not ARGUMENT.search(told), (name, place, told)
                assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", told)) <= options, (name, place, told)


def raised(command: str, error: reshard.ReshardError, monkeypatch: pytest.MonkeyPatch) -> str:
    """What `reshard COMMAND a b` prints of an error."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(reshard, "diff" if command == "diff" else "convert", fail)
    more = ["--layout", "c"] if command == "split" else []
    result = run(command, "a", "b", *more)
    facts = json.loads(run(command, "a", "b", *more, "--json").stdout)
    assert facts["hint"] is None or f"hint: {facts['hint']}\n" in result.stderr
    return result.stderr


@pytest.mark.parametrize(
    ("command", "hint", "expected"),
    [
        ("convert", "give `overwrite=True` to replace it", "give --overwrite to replace it"),
        ("convert", 'leave out `layout=`, or `to="checkpoint2"`', "leave out --layout, or --to checkpoint2"),
        ("convert", "write it again: `share=(1, 4)`", "write it again: --share 1/4"),
        ("convert", '`select=Select(drop=["a b"])` leaves it out', "--drop 'a b' leaves it out"),
        ("convert", "`files=Files(dedup=False)` makes files complete", "--no-dedup makes files complete"),
        ("convert", "end that job; `commit=Commit(takeover=True)` overtakes it", "end that job"),
        ("convert", "choose fewer; `keys=` selects some; `part=` a part", "choose fewer; --part a part"),
        ("convert", "write `sizes`, or `to`", "write `sizes`, or `to`"),
        ("convert", "`commit=Commit(rollback=True)`", None),
        ("convert", "`select=Select(drop=...)` leaves it out", "--drop leaves it out"),
        ("split", "give `strategy=`, the strategy files", "give --source-strategy, the strategy files"),
        ("diff", "give `strategy=`, the strategy files", "give --strategy-a or --strategy-b, the strategy files"),
    ],
)  # fmt: skip
def test_hints_are_in_the_words_of_the_command(
    command: str, hint: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = raised(command, reshard.errors.LayoutError("no", hint=hint), monkeypatch)
    assert printed == "error: no\n" + ("" if expected is None else f"hint: {expected}\n")


def test_a_key_of_a_layout_file_is_no_option(tmp_path: Path) -> None:
    reshard.save_file({f"layers.{i}.w": np.ones(4) for i in range(3)}, tmp_path / "m.safetensors")
    (tmp_path / "layout.yaml").write_text(
        'mesh: {pp: 2}\nrules: [{match: "*"}]\nplace: [{match: "layers.{i}.*", axis: pp}]\n'
    )
    result = run("convert", tmp_path / "m.safetensors", tmp_path / "out", "--layout", tmp_path / "layout.yaml")
    assert "hint: write `sizes`, how many indices each coordinate holds, or `to`\n" in result.stderr


def test_a_claimed_destination_names_no_argument_that_convert_lacks(root: Path, tmp_path: Path) -> None:
    reshard.convert(root, tmp_path / "m.safetensors")

    reader, writer = os.pipe()

    def hold() -> None:
        claims.hold(locate(root))
        os.write(writer, b".")
        time.sleep(600)

    child = small_saves.fork(hold)
    os.close(writer)
    try:
        assert os.read(reader, 1) == b"."
        os.close(reader)
        with pytest.raises(ClaimedError) as caught:
            reshard.convert(tmp_path / "m.safetensors", root, to="checkpoint2", iteration=300, overwrite=True)
        assert caught.value.hint == "end that job or give this one another root"
        with pytest.raises(ClaimedError, match=r"`commit=Commit\(takeover=True\)` takes the root"):
            reshard.save(root, 300, {"w": np.ones(2)}, commit={"durable": False})
        for command in (
            ["convert", tmp_path / "m.safetensors", root, "--to", "checkpoint2", "--overwrite"],
            ["rollback", root, 100],
        ):
            assert "takeover" not in run(*command).output
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.result()


def test_an_error_without_hints_passes_unchanged() -> None:
    with pytest.raises(ClaimedError) as caught, hints_without("takeover"):
        raise ClaimedError("no", hint="`commit=Commit(takeover=True)`")
    assert caught.value.hint is None
    assert adapt_hint(None, lambda name, value: name + value) is None
