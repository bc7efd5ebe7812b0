"""What the command line says of errors, where, and with which exit code."""

from __future__ import annotations

import errno
import inspect
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from tests.cli.samples import model
from tests.helpers.command_line import PROGRAM, outcome, run, start

import reshard
from reshard.cli.output import shown

__all__ = ["model"]

SAMPLES = Path(__file__).parents[1] / "data" / "mindspore"
CKPT2 = SAMPLES / "ckpt2" / "checkpoint"

# -- convert


@pytest.mark.slow(disk=False)
def test_convert_says_what_it_wrote(tmp_path: Path, model: Path) -> None:
    code, out, err = outcome("convert", model, tmp_path / "hf")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == f"wrote {tmp_path / 'hf'}"
    assert re.fullmatch(r"huggingface, 31 tensors, 1 file, \d\.\d\d KiB in \d+\.\d s, .* MB/s", out.splitlines()[1])
    assert safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors")["model.norm"].tolist() == [1, 1, 1, 1]


def test_convert_hands_every_option_on(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = inspect.signature(reshard.convert).parameters.items()
    defaults = {name: one.default for name, one in parameters if one.default is not one.empty}
    # For programs: a process of a launcher takes its share. The size is handed on in `files`.
    del defaults["group"], defaults["timeout"], defaults["max_shard_size"]
    seen: dict[str, Any] = {}

    class Stop(reshard.ReshardError):
        pass

    def stand_in(src: str, dst: str, **options: Any) -> None:
        seen.update(options, src=src, dst=dst)
        raise Stop("enough")

    monkeypatch.setattr(reshard, "convert", stand_in)
    args = "a b --to checkpoint2 --part all --layout l.yaml --iteration 7 --prefix p --dtype bf16 --max-shard-size 1MB"
    more = "--dtype-all --strategy s --suffix 20_2 --drop a. --drop b. --rename =m. --rename c.= --names n --config c "
    more += "--model-files m --private --format dcp --pad a.=8 --trim b.=rows --trim c=.=3 "
    more += "--no-dedup --memory 8MiB --threads 3 --no-sync --overwrite --strict-format --share 1/3 "
    more += "--modes mindspore-transformers"
    assert run("convert", *args.split(), *more.split()).exit_code == 1
    assert seen.pop("on") is None  # excludes `share`: tests/ray
    assert seen == {
        "src": "a",
        "dst": "b",
        "to": "checkpoint2",
        "format": "dcp",
        "part": "all",
        "strategy": "s",
        "select": reshard.Select(
            drop=("a.", "b."),
            rename={"": "m.", "c.": ""},
            pad={"a.": 8},
            trim={"b.": "rows", "c=.": 3},
            suffix="20_2",
        ),
        "names": "n",
        "config": "c",
        "layout": "l.yaml",
        "iteration": 7,
        "files": reshard.Files(
            prefix="p",
            dedup=False,
            strict_format=True,
            max_shard_size="1MB",
            model_files="m",
            modes="mindspore-transformers",
        ),
        "commit": reshard.Commit(durable=False, private=True),
        "dtype": "bf16",
        "dtype_all": True,
        "memory": "8MiB",
        "threads": 3,
        "overwrite": True,
        "share": (1, 3),
        "progress": seen["progress"],
    }
    seen.clear()
    run("convert", "a", "b")
    assert callable(seen.pop("progress"))
    del defaults["progress"]
    defaults |= {"select": reshard.Select(), "files": reshard.Files(), "commit": reshard.Commit()}
    assert {name: value for name, value in seen.items() if name not in ("src", "dst")} == defaults


@pytest.mark.slow
def test_convert_warns_on_stderr_and_in_json_once(tmp_path: Path, model: Path) -> None:
    (tmp_path / "odd.yaml").write_text(
        'mesh: {tp: 2}\nrules: [{match: "*.weight", cut: [tp], sizes: {0: [5, 3]}}, {match: "*"}]'
    )
    code, out, err = outcome("convert", model, tmp_path / "a", "--layout", tmp_path / "odd.yaml")
    assert code == 0
    assert "warning" not in out
    assert err.count("warning: metadata.json cannot express the layout of 30 tensors") == 1
    assert f"hint: `reshard inspect {tmp_path / 'a'}` marks them" in err
    code, out, err = outcome("convert", model, tmp_path / "b", "--layout", tmp_path / "odd.yaml", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert len(report["warnings"]) == 1
    assert len(report["not_expressible"]) == 30
    code, out, err = outcome("convert", model, tmp_path / "c", "--layout", tmp_path / "odd.yaml", "--strict-format")
    assert (code, out, (tmp_path / "c").exists()) == (1, "", False)
    assert "leave out --strict-format" in err


# -- errors and exit codes


def refusals(folder: Path) -> dict[str, tuple[list[object], str]]:
    """By name: arguments, and the class of the error."""
    (folder / "short.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{")
    (folder / "bad.yaml").write_text("mesh: {tp: 2}\nrules: 7\n")
    (folder / "full").mkdir()
    (folder / "full" / "note").write_text("")
    model = folder / "m.safetensors"
    return {
        "nothing there": (["inspect", folder / "nope"], "EmptyRootError"),
        "damaged": (["inspect", folder / "short.safetensors"], "DamagedFileError"),
        "no key": (["inspect", model, "nothing"], "KeyNotFoundError"),
        "bad layout": (["convert", model, folder / "x", "--layout", folder / "bad.yaml"], "LayoutError"),
        "no layout": (["convert", model, folder / "x", "--layout", folder / "nope.yaml"], "CheckpointNotFoundError"),
        "occupied": (["convert", model, folder / "full"], "DestinationExistsError"),
        "into itself": (["convert", folder / "full", folder / "full" / "x"], "ArgumentError"),
        "dtype": (["convert", model, folder / "x", "--dtype", "int3"], "UnsupportedError"),
        "demo into something": (["demo", "--keep", folder / "full"], "DestinationExistsError"),
    }


def test_refusals_are_messages(tmp_path: Path, model: Path) -> None:
    assert model.exists()
    for name, (args, error) in refusals(tmp_path).items():
        result = run(*args)
        assert (result.exit_code, result.stdout) == (1, ""), name
        assert result.stderr.startswith("error: "), name
        assert "Traceback" not in result.output, name
        result = run(*args, "--json")
        assert (result.exit_code, result.stderr) == (1, ""), name
        facts = json.loads(result.stdout)
        assert list(facts) == ["error", "message", "path", "key", "hint"]
        assert facts["error"] == error, name
    assert not (tmp_path / "x").exists()
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["note"]


@pytest.mark.slow
def test_exit_codes_of_processes(tmp_path: Path, model: Path) -> None:
    assert model.exists()
    for args, code in (
        (["--version"], 0),
        (["inspect", CKPT2], 0),
        (["inspect", tmp_path / "nope"], 1),
        (["inspect"], 2),
        (["convert", "a", "b", "--to", "pickle"], 2),
        (["frobnicate"], 2),
    ):
        found, _, err = outcome(*args)
        assert (found, "Traceback" in err) == (code, False), args


def test_an_error_of_the_system_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/some/where")

    monkeypatch.setattr(reshard, "convert", full)
    result = run("convert", "a", "b")
    assert (result.exit_code, result.stderr) == (1, "error: /some/where: No space left on device\n")
    facts = json.loads(run("convert", "a", "b", "--json").stdout)
    assert (facts["error"], facts["path"]) == ("OSError", "/some/where")


def test_arguments_are_named_as_options(tmp_path: Path, model: Path) -> None:
    result = run("convert", model, tmp_path / "x", "--prefix", "p")
    assert "error: --prefix belongs to" in result.stderr
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("")
    assert "give --overwrite" in run("convert", model, tmp_path / "full").stderr


def test_options_without_effect_are_refused(model: Path) -> None:
    result = run("verify", model, "--may-be-infinite", "fc*")
    assert (result.exit_code, "--may-be-infinite belongs to --health" in result.stderr) == (1, True)
    result = run("inspect", model, "fc*", "--layout")
    assert (result.exit_code, "it excludes PATTERN" in result.stderr) == (2, True)


def test_an_empty_path_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for iteration in (1, 2, 3):
        reshard.save(tmp_path, iteration, {"w": np.zeros(2)}, commit={"durable": False})
    monkeypatch.chdir(tmp_path)
    for words in (("inspect", ""), ("prune", "", "--keep", 1), ("diff", ".", ""), ("explain", "")):
        result = run(*words)
        assert (result.exit_code, "is empty" in result.stderr) == (2, True), words
    assert len(list(tmp_path.glob("iteration_*"))) == 3


@pytest.mark.slow(disk=False)
def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    with start("inspect", CKPT2) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # before anything was printed
        assert process.stderr.read() == ""
    assert process.returncode == 141  # as if SIGPIPE had ended it


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize(
    "words",
    [["--help"], ["plan", "--help"], ["inspect", CKPT2], ["inspect", CKPT2, "--json"], ["diff", "a", "b", "--json"]],
)
def test_output_that_cannot_be_written(words: list[object]) -> None:
    with Path("/dev/full").open("wb") as full:
        code, _, err = outcome(*words, stdout=full)
    assert code == 74
    assert err.startswith("error: cannot write to stdout: No space left on device\nhint: only the output is lost")
    assert len(err.splitlines()) == 2


@pytest.mark.slow(disk=False)
def test_messages_that_cannot_be_written_change_no_exit_code(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        assert outcome("inspect", tmp_path, stderr=full)[:2] == (1, "")
        assert outcome("inspect", stderr=full)[:2] == (2, "")
        assert outcome("inspect", tmp_path, stdout=full, stderr=full)[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_change_neither_files_nor_the_exit_code(tmp_path: Path, closed: str) -> None:
    for words in ("inspect", CKPT2), ("convert", CKPT2, tmp_path / "hf"), ("verify", tmp_path / "hf"):
        command = shlex.join([*PROGRAM, *map(str, words)])
        found = subprocess.run(["sh", "-c", f"{command} {closed}"], check=False, capture_output=True, text=True)
        assert (found.returncode, "Traceback" in found.stderr) == (0, False)


@pytest.mark.slow(disk=False)
def test_interrupt_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "big.safetensors"
    header = json.dumps({"w": {"dtype": "U8", "shape": [4 << 30], "data_offsets": [0, 4 << 30]}}).encode()
    source.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(source, 8 + len(header) + (4 << 30))  # seconds of work for one thread, without the time to write it
    code = """
import sys, time, reshard
from reshard.cli import main
convert = reshard.convert

def convert_half(*args, progress, **options):
    def half(done, total):
        progress(done, total)
        if done > total // 2:  # the interrupt is late
            time.sleep(600)

    return convert(*args, progress=half, **options)

reshard.convert = convert_half
main(sys.argv[1:])
"""
    words = ["convert", source, tmp_path / "hf", "--memory", "16MiB", "--threads", 1]
    command = [sys.executable, "-c", code, *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob(".hf.*")) and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["big.safetensors"]


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("module", ["click", "reshard.cli.inspect", "numpy", "reshard.cli.contents"])
@pytest.mark.parametrize("becomes", ["KeyboardInterrupt", "ImportError"])
@pytest.mark.parametrize("times", [1, 2])
def test_interrupts_of_imports(module: str, becomes: str, times: int) -> None:
    program = f"""
import os, signal, sys, time
from reshard.__main__ import main

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            try:
                for _ in range({times}):
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(0.05)
            except KeyboardInterrupt:
                print({times} - 1 or "not expected")
                raise {becomes}

sys.meta_path.insert(0, Interrupting())
sys.argv[1:] = ["inspect", {str(CKPT2)!r}]
main()
"""
    found = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    is_late = module in ("numpy", "reshard.cli.contents")  # the others come before the command
    is_raised = times == 2 and is_late
    assert (found.returncode in (130, -signal.SIGINT), found.stderr.strip()) == (True, "interrupted")
    # A short time after the import, in which the command may have printed something, the interrupt takes effect.
    assert found.stdout == "1\n" * is_raised or (times == 1 and is_late and found.stdout.startswith("root: "))
    assert is_raised or found.returncode == 130


@pytest.mark.slow(disk=False)
def test_an_interrupt_that_waits_for_an_import_is_not_lost_when_the_command_ends_first() -> None:
    code = f"""
import os, signal, sys
from reshard.cli import main, program

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "reshard.cli.contents":
            os.kill(os.getpid(), signal.SIGINT)

program._SECONDS_TO_WAIT = 60  # longer than the command takes
sys.meta_path.insert(0, Interrupting())
main(["inspect", {str(CKPT2)!r}])
"""
    found = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=50)
    assert (found.returncode, found.stderr) == (130, "interrupted\n")
    assert found.stdout == outcome("inspect", CKPT2)[1]


@pytest.mark.slow(disk=False)
def test_an_interrupt_in_a_finalizer_is_not_lost() -> None:
    code = f"""
import os, signal, sys
from reshard.cli import contents, main

class Interrupting:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        len([])  # the handler runs in this function, whose errors Python drops

gather = contents.gather_contents
def gathered(*args, **kwargs):
    Interrupting()
    return gather(*args, **kwargs)

contents.gather_contents = gathered
main(["inspect", {str(CKPT2)!r}])
"""
    found = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=50)
    assert (found.returncode, found.stderr) == (130, "interrupted\n")


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize(
    ("when", "code", "said"),
    [
        ("threading._register_atexit(kill)", 130, "interrupted\n"),  # the first thing that Python does at its end
        ("atexit.register(kill)", 0, ""),
        ("sys.modules['kill'] = type('Killing', (), {'__del__': lambda _, kill=kill: kill()})()", 0, ""),  # the last
    ],
)
def test_an_interrupt_while_python_ends(when: str, code: int, said: str) -> None:
    program = f"""
import atexit, functools, os, signal, sys, threading
from reshard.__main__ import main
kill = functools.partial(os.kill, os.getpid(), signal.SIGINT)
{when}
sys.argv[1:] = ["inspect", {str(CKPT2)!r}]
main()
"""
    found = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stderr) == (code, said)
    assert found.stdout == outcome("inspect", CKPT2)[1]


@pytest.mark.parametrize(
    "words", [["plan", "x"], ["prune", "x", "--keep", "0"], ["inspect", "x", "--no-such"], ["no-such"], ["explain"]]
)
def test_wrong_usage_with_json_is_json(words: list[str]) -> None:
    plain, found = run(*words), run(*words, "--json")
    facts = json.loads(found.stdout)
    assert (found.exit_code, found.stderr, facts["error"]) == (2, "", "UsageError")
    assert f"Error: {facts['message']}" in plain.stderr
    assert facts["hint"] == f"see {' '.join(['main', words[0]] if words[0] != 'no-such' else ['main'])} --help"


# -- hostile names


HOSTILE = {
    "bidi\u202eback": "bidi\\u202eback",
    "zero\u200bwidth": "zero\\u200bwidth",
    "[red]markup[/red]": "[red]markup[/red]",
    ":smile:": ":smile:",
}


def test_names_cannot_drive_a_terminal(tmp_path: Path) -> None:
    for number, (name, expected) in enumerate(HOSTILE.items()):
        path = tmp_path / f"{number}.safetensors"
        safetensors.numpy.save_file({name: np.zeros(1, np.uint8), "other": np.zeros(1, np.uint8)}, path)
        result = run("inspect", path)
        if result.exit_code == 1:  # refused, as control characters are
            assert shown(name) in result.output or expected in result.output, name
        else:
            assert expected in result.stdout, name
            assert expected in run("inspect", path, "re:.{6,}|[^o].*").stdout, name
        assert all(c.isprintable() or c == "\n" for c in result.output), name
        assert result.output.isascii() or number > 1


def test_paths_and_control_characters_are_escaped(tmp_path: Path) -> None:
    evil = "x\x1b[2J\x9b31m\ry"
    result = run("inspect", tmp_path / evil)
    assert result.exit_code == 1
    assert "\\x1b[2J\\x9b31m\\ry" in result.stderr
    assert all(c.isprintable() or c == "\n" for c in result.output)
    assert json.loads(run("inspect", tmp_path / evil, "--json").stdout)["path"].endswith(evil)
    assert run("inspect", tmp_path / evil, "--json").stdout.isascii()
    folder = tmp_path / evil
    folder.mkdir()
    safetensors.numpy.save_file({"w": np.zeros(3, np.uint8)}, folder / "model.safetensors")
    assert "huggingface: " in (page := run("inspect", folder).stdout)
    assert all(c.isprintable() or c == "\n" for c in page)
