"""What all commands have in common: quiet, progress, colours, sizes, completion."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import pytest
from rich.console import Console
from tests.helpers.command_line import PROGRAM, all_commands, on_terminal, outcome, run

import reshard
from reshard.checkpoint import Checkpoint
from reshard.cli import output

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Iterations 100 and 200."""
    root = tmp_path / "runs" / "checkpoint"
    for iteration in (100, 200):
        reshard.save(root, iteration, {"w": np.full((4, 6), iteration, np.float32)}, commit={"durable": False})
    return root


def commands(root: Path, tmp_path: Path) -> dict[str, list[object]]:
    """A call of each command that prints a result."""
    full = tmp_path / "full.safetensors"
    reshard.convert(root, full)
    return {
        "inspect": [root],
        "verify": [root],
        "convert": [root, tmp_path / "hf"],
        "merge": [root, tmp_path / "merged"],
        "diff": [root, full],
        "explain": [root],
        "rollback": [root, 200],
        "prune": [root, "--keep", 5],
        "pin": [root, 100],
        "unpin": [root, 100],
    }


def test_quiet_prints_no_result_and_no_progress(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_LINE_SECONDS", 0.0)
    for name, arguments in commands(root, tmp_path).items():
        for written in ([name, *arguments, "--quiet"], [name, "-q", *arguments], ["--quiet", name, *arguments]):
            shutil.rmtree(tmp_path / "hf", ignore_errors=True)
            shutil.rmtree(tmp_path / "merged", ignore_errors=True)
            result = run(*written)
            assert (result.exit_code, result.output) == (0, ""), written
        shutil.rmtree(tmp_path / "hf", ignore_errors=True)
        shutil.rmtree(tmp_path / "merged", ignore_errors=True)
        assert run(name, *arguments).stdout


def test_quiet_is_an_option_of_every_command() -> None:
    for name, command in all_commands():
        if not isinstance(command, click.Group):
            assert "--quiet" in [one for param in command.params for one in param.opts], name


def test_quiet_prints_errors_warnings_json_and_files(root: Path, tmp_path: Path) -> None:
    code, out, err = outcome("--quiet", "inspect", tmp_path / "absent")
    assert (code, out, err.startswith("error: there is nothing at")) == (1, "", True)
    assert json.loads(run("inspect", root, "--json", "-q").stdout)["iteration"] == 200
    assert run("inspect", root, "--layout", "-q").stdout.startswith("mesh:")
    (root / "latest_checkpointed_iteration.txt").write_text("x")
    result = run("convert", root, tmp_path / "hf", "-q")
    assert (result.stdout, "warning: " in result.stderr) == ("", True)
    assert run("inspect", root).stdout  # a call without it is not quiet


@pytest.mark.slow
def test_progress_in_a_pipe_is_lines(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    reshard.save_file({f"w{i}": rng.random(1 << 20) for i in range(16)}, tmp_path / "m.safetensors")
    monkeypatch.setattr(output, "_LINE_SECONDS", 0.0)
    how = ("--memory", "16M", "--threads", 1)
    result = run("convert", tmp_path / "m.safetensors", tmp_path / "a", *how)
    lines = result.stderr.splitlines()
    assert lines
    for line in lines:
        assert re.fullmatch(
            r"[0-9]+%, [0-9.]+ [MKG]i?B of 128 MiB(, [0-9.]+ [MG]B/s, [0-9]+ s left)?|0%, 0 B of .*", line
        )
    assert result.stdout.startswith("wrote ")
    assert run("convert", tmp_path / "m.safetensors", tmp_path / "b", *how, "--json").stderr == ""
    assert run("convert", tmp_path / "m.safetensors", tmp_path / "c", *how, "--quiet").output == ""
    monkeypatch.setattr(output, "_LINE_SECONDS", 1000.0)
    assert run("convert", tmp_path / "m.safetensors", tmp_path / "d", *how).stderr == ""


@pytest.mark.parametrize("command", ["convert", "plan"])
def test_planning_without_progress_says_so(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reshard.save_file({"w": np.ones(4)}, tmp_path / "m.safetensors")
    (tmp_path / "tp.yaml").write_text("mesh: {tp: 2}\nrules: [{match: w, cut: [tp]}]\n")
    bind, echo, said = Checkpoint.bind, output.echo, threading.Event()
    monkeypatch.setattr(output.ProgressLines, "wait_s", 0.01)

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert said.wait(60)
        return bind(*args, **kwargs)

    def spy(text: str = "", *, err: bool = False) -> None:
        echo(text, err=err)
        if err:
            said.set()

    monkeypatch.setattr(Checkpoint, "bind", slow)
    monkeypatch.setattr(output, "echo", spy)
    more = [tmp_path / "out"] if command == "convert" else ["--no-measure"]
    result = run(command, tmp_path / "m.safetensors", *more, "--layout", tmp_path / "tp.yaml")
    assert result.stderr
    assert {re.sub("[0-9]+", "N", line) for line in result.stderr.splitlines()} == {"preparing, N s"}


def test_a_bar_says_that_it_waits_until_something_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(output, "console", lambda **_: Console(file=terminal, force_terminal=True, width=80))

    def is_drawn(text: str) -> bool:
        deadline = time.monotonic() + 60  # a thread draws
        while text not in terminal.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        return text in terminal.getvalue()

    bar = output.ProgressBar()
    assert bar.waiting(2.0)
    assert is_drawn("preparing, 2 s")
    assert bar.waiting(4.1)
    assert is_drawn("preparing, 5 s")
    bar(5 << 20, 10 << 20)
    assert not bar.waiting(6.0)
    assert is_drawn("5.00 MiB of 10.0 MiB")
    bar.pause()
    assert "preparing, 6 s" not in terminal.getvalue()
    bar = output.ProgressBar()
    assert bar.waiting(7.0)
    assert is_drawn("preparing, 7 s")
    bar.pause()  # a job that ends without any progress
    assert terminal.getvalue().endswith("\x1b[2K")  # the line is erased


def test_progress_that_nobody_reads_does_not_end_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_LINE_SECONDS", 0.0)

    def fail(*_: object, **__: Any) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(output, "echo", fail)
    lines = output.ProgressLines()
    lines(0, 10)
    lines(5, 10)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.1, "1 s"), (59.5, "1 min 0 s"), (125, "2 min 5 s"), (7260, "2 h 1 min")]
)
def test_durations(seconds: float, expected: str) -> None:
    assert output.duration(seconds) == expected


@pytest.mark.slow
def test_no_color_is_without_bold(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    escape = re.compile("\x1b\\[[0-9;]*m")
    assert escape.search(on_terminal("inspect", tmp_path / "absent")[2])
    assert escape.search(on_terminal("inspect", root, both=True)[2])
    monkeypatch.setenv("NO_COLOR", "1")
    assert "error: there is nothing" in on_terminal("inspect", tmp_path / "absent")[2]
    for arguments in (["inspect", tmp_path / "absent"], ["inspect", root], ["explain", root], ["demo", "--size", "8M"]):
        assert not escape.search(on_terminal(*arguments, both=True)[2]), arguments


def test_sizes_with_one_letter(root: Path, tmp_path: Path) -> None:
    for text in ("5G", "512M", "1.5GiB", "64m", "500MB"):
        result = run("convert", root, tmp_path / text, "--memory", text, "--max-shard-size", text)
        assert result.exit_code == 0, result.output
    assert run("diff", root, tmp_path / "5G", "--memory", "64M").exit_code == 0
    result = run("convert", root, tmp_path / "x", "--memory", "5X")
    assert (result.exit_code, 'hint: write it as "4GiB" or "4G"' in result.stderr) == (2, True)
    assert run("demo", "--size", "2M").exit_code == 0


def complete(words: str, word: str) -> list[str]:
    """What click offers a shell for the last word, as `type,value` lines."""
    n_words = len(words.split()) + 1
    environment = {
        **os.environ,
        "_RESHARD_COMPLETE": "bash_complete",
        "COMP_WORDS": f"reshard {words} {word}",
        "COMP_CWORD": str(n_words),
    }
    program = [sys.executable, "-c", PROGRAM[2].replace("main()", "main(prog_name='reshard')")]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.slow
def test_completion_of_commands_options_and_file_names() -> None:
    assert complete("", "ver") == ["plain,verify"]
    assert "plain,--keep" in complete("prune", "--ke")
    assert complete("inspect", "/tm") == ["file,/tm"]
    assert complete("convert src", "d") == ["file,d"]
    assert complete("convert --layout", "l") == ["file,l"]
    assert complete("explain --config", "t") == ["file,t"]
    assert "plain,merge" in complete("strategy", "")


def test_every_path_is_completed_as_one() -> None:
    metavars = ("PATH", "FILE", "DIR", "FILE|PRESET")
    for name, command in all_commands():
        for param in command.params:
            is_argument = isinstance(param, click.Argument) and param.name not in ("pattern", "iteration")
            is_option = isinstance(param, click.Option) and param.metavar in metavars
            assert (param.type is output.PATH) == (is_argument or is_option), (name, param.name)


def test_completion_in_bash(tmp_path: Path) -> None:
    """The line of the README, in a real shell."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    program = tmp_path / "bin" / "reshard"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n" + PROGRAM[2].replace("; ", "\n"))
    program.chmod(0o755)
    script = 'eval "$(_RESHARD_COMPLETE=bash_source reshard)"; complete -p reshard'
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    done = subprocess.run([bash, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert "_reshard_completion reshard" in done.stdout


def test_the_pages_of_a_healthy_torch_run_name_no_problem(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from reshard.torch import Checkpointer, ElasticSampler

    root = tmp_path / "run"
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    sampler = ElasticSampler(1000, seed=0, shuffle=True, global_batch_size=12, rank=0, world_size=1)
    with Checkpointer(root, save_every=2, signals=()) as checkpointer:
        checkpointer.resume(model=model, optimizer=optimizer, sampler=sampler)
        for step in (1, 2):
            loss = model(torch.rand(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step(step, loss=loss)
    for command in ("inspect", "explain"):
        page = run(command, root).output
        assert not re.search("unknown|not one|warning|error|epochs done|never|damaged|unverified", page), page
    assert "steps are counted in the batch size of the checkpoint, 12 samples" in run("explain", root).stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("convert a b --max-shard-size 16mb", "Invalid value for '--max-shard-size': `16mb` is not a size"),
        ("convert a b --memory 0", "Invalid value for '--memory': a size is from 1 to"),
        ("demo --size x", "Invalid value for '--size': `x` is not a size"),
        ("watch run --interval 1s", "'1s' is not a valid number."),
        ("pin run iteration_00000075", "'iteration_00000075' is not a valid integer."),
        ("prune run --keep 1 --keep-best loss 1 --keep-best acc 1", "Invalid value for --keep-best: is given twice"),
    ],
)
def test_a_wrong_value_is_a_usage_error_that_names_the_option(words: str, message: str) -> None:
    result = run(*words.split())
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr


def test_a_folder_without_the_iteration_gets_a_hint(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for iteration in (50, 75):
        reshard.save(root, iteration, {"w": np.zeros(2)}, commit={"durable": False})
    inside = f"hint: this is one iteration; give the folder that holds it: `{root}`"
    for command in ("pin", "unpin", "rollback"):
        assert "hint: it holds 75, 50" in run(command, root, 12).stderr
        assert inside in run(command, root / "iteration_00000075", 75).stderr
    assert inside in run("prune", root / "iteration_00000075", "--keep", 1).stderr
