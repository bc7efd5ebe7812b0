"""The command line on terminals, its help and its demo; as processes wherever that could matter."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import safetensors.numpy
from rich.cells import cell_len
from rich.console import Console
from tests.helpers import sealed
from tests.helpers.command_line import PROGRAM, all_commands, on_terminal, outcome, run

import reshard
from reshard.cli import main
from reshard.cli.inspect import _folded
from reshard.cli.output import fitted, plain_table, rate, size
from reshard.cli.picture import _short_names
from reshard.layout import merge_strategies, write_strategy
from reshard.verbs import demo as demo_module

SAMPLES = Path(__file__).parents[1] / "data" / "mindspore"

# -- terminals


@pytest.mark.slow
def test_progress_is_for_terminals(tmp_path: Path) -> None:
    source = tmp_path / "m.safetensors"
    safetensors.numpy.save_file({f"w{i}": np.zeros((1024, 1024), np.float32) for i in range(64)}, source)
    code, out, seen = on_terminal("convert", source, tmp_path / "a", "--memory", "16MiB", "--threads", 1)
    assert code == 0
    assert "of 256 MiB" in seen
    assert "left" in seen
    assert re.search(r"[MG]B/s", seen)
    assert out.startswith("wrote ")  # not drawn into the progress
    assert "\x1b" not in out
    code, out, seen = on_terminal("convert", source, tmp_path / "b", "--json")
    assert (code, "of 256 MiB" in seen) == (0, True)
    json.loads(out)
    assert outcome("convert", source, tmp_path / "c")[2] == ""


@pytest.mark.slow
def test_progress_gives_way_to_lines() -> None:
    code, _, seen = on_terminal("demo", "--size", 100, both=True)
    assert code == 0
    assert "of 93." in seen
    for step in ("shard TP2 x PP2", "reshard TP4", "merge"):
        assert f"\x1b[2K{step} " in seen  # its line was erased before


@pytest.mark.slow(disk=False)
def test_a_pipe_gets_one_line_a_tensor(tmp_path: Path) -> None:
    key = "k" * 500 + ".weight"
    safetensors.numpy.save_file({key: np.zeros(1, np.uint8), "v": np.zeros(1, np.uint8)}, tmp_path / "m.safetensors")
    code, out, _ = outcome("inspect", tmp_path / "m.safetensors", env={**os.environ, "COLUMNS": "40"})
    assert code == 0
    assert re.search(rf"^{re.escape(key)} +U8 +1 +1 B$", out, re.MULTILINE)


@pytest.mark.parametrize("width", [1000, 80, 40, 20, 10])
def test_a_narrow_terminal_crops_nothing(width: int) -> None:
    terminal = io.StringIO()
    columns = ("saved at", "iteration", "size", "why")
    rows = [
        ("2026-11-25T23:50:28+00:00", "1200400", "2.29 MiB", "the tracker names it " * 3),
        ("2026-11-25T23:50:28+00:00", "999999999999", "1023 KiB", "[x] \u5c42 " + "q" * 70),
        ("", "7", "", ""),
    ]
    out = Console(file=terminal, force_terminal=True, color_system=None, width=width, markup=False)
    table = plain_table(*columns, right=("iteration",), folds=("why",))
    for row in rows:
        table.add_row(*row)
    out.print(fitted(table, out))
    lines = terminal.getvalue().splitlines()
    words = [word for row in rows for cell in row for word in cell.split()]
    assert all(cell_len(line.rstrip()) <= width for line in lines)
    found = "".join(terminal.getvalue().split())
    if fitted(table, out) is table:
        assert all(word in found or len(word) == 70 for word in words)
        assert found.count("q") == 70
    else:
        cells = [(f"{name}: ", cell) for row in rows for name, cell in zip(columns, row, strict=True)]
        expected = "".join(name + cell for name, cell in cells if cell or name == "saved at: ")
        assert found == "".join(expected.split())
    assert (fitted(table, out) is table) == (width >= 80)


@pytest.mark.slow
def test_metrics_of_saves_on_a_narrow_terminal(tmp_path: Path) -> None:
    metrics = {"train/loss": 12.345678, "eval/perplexity": 123.456789, "iteration": 1523.25, "lr": 3e-4}
    reshard.save(tmp_path / "run", 1200400, {"w": np.zeros(300000)}, metrics=metrics)
    _, _, seen = on_terminal("inspect", tmp_path / "run", both=True, columns=80)
    rows = [line.split() for line in re.sub("\x1b\\[[0-9;]*m", "", seen).splitlines()]
    first = next(n for n, row in enumerate(rows) if row[:2] == ["saved", "at"])
    assert rows[first + 1][1:4] == ["1200400", "2.29", "MiB"]
    assert rows[first + 3] == ["iteration", "train/loss", "eval/perplexity", "iteration", "lr"]
    assert rows[first + 4] == ["1200400", "12.3457", "123.457", "1523.25", "0.0003"]
    _, _, seen = on_terminal("inspect", tmp_path / "run", both=True, columns=40)
    assert "    iteration: 1200400" in re.sub("\x1b\\[[0-9;]*m", "", seen)
    assert "and 2 more metrics: iteration, lr; --json lists them" in seen


@pytest.mark.parametrize(
    ("key", "width", "expected"),
    [
        ("a.b", 10, "a.b"),
        ("layers.0.weight", 10, "layers.0.\n  weight"),
        ("abcdefgh", 4, "abcd\n  ef\n  gh"),
    ],
)
def test_long_keys_are_folded_at_dots(key: str, width: int, expected: str) -> None:
    assert _folded(key, width) == expected


# -- demo


@pytest.mark.slow(disk=False)
def test_demo_from_start_to_end(tmp_path: Path) -> None:
    code, out, err = outcome("demo", "--size", 2, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "all 39 tensors equal, byte for byte, after each step"
    for step in ("make", "shard TP2 x PP2", "reshard TP4", "merge"):
        assert re.search(rf"^{re.escape(step)} .* [KM]iB .* s\b", out, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


def test_demo_keeps_what_it_is_asked_to_keep(tmp_path: Path) -> None:
    result = run("demo", "--size", 1, "--keep", tmp_path / "try", "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["equal"], report["n_tensors"]) == (0, True, 39)
    # 4 x 7 cut keys in stages of 2 layers, cut in two; 2 more cut ones; 9 norms once each.
    assert [step["n_compared"] for step in report["steps"]] == [0, 30 * 2 + 9, 30 * 4 + 9, 39]
    names = sorted(path.name for path in (tmp_path / "try").iterdir())
    assert names == ["hf", "merged", "tp2_pp2", "tp2_pp2.yaml", "tp4", "tp4.yaml"]
    original: dict[str, np.ndarray] = {}
    for path in (tmp_path / "try" / "hf").glob("*.safetensors"):
        original |= safetensors.numpy.load_file(path)
    merged = safetensors.numpy.load_file(tmp_path / "try" / "merged" / "model.safetensors")
    assert {key: array.tobytes() for key, array in merged.items()} == {k: a.tobytes() for k, a in original.items()}


def test_demo_fails_when_a_byte_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaging(src: Path, dst: Path, **options: Any) -> Any:
        report = reshard.convert(src, dst, **options)
        if dst.name == "tp4":
            path = sorted(Path(report.path).glob("*.safetensors"))[2]
            path.chmod(0o600)
            with path.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last[0] ^ 1]))
            # As if that had been written: what was damaged afterwards is found before it is compared.
            sealed.seal(path.parent, int(path.parent.name.removeprefix("iteration_")))
        return report

    monkeypatch.setattr(demo_module, "convert", damaging)
    result = run("demo", "--size", 1)
    assert result.exit_code == 1
    assert re.search(r"^reshard TP4 .* 1 tensor DIFFER$", result.stdout, re.MULTILINE)
    assert re.search(r"^1 of 39 tensors differ, such as \S+$", result.stdout, re.MULTILINE)
    assert json.loads(run("demo", "--size", 1, "--json").stdout)["equal"] is False


@pytest.mark.slow(disk=False)
def test_demo_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['reshard', 'demo', '--size', '1']; "
        + PROGRAM[2].split("; ", 2)[2]
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# -- help


def is_example(line: str) -> bool:
    return line.startswith("reshard ") and "s3://" not in line and "--on ray" not in line


def examples() -> list[str]:
    """The lines of all help texts that show a command, without the comment behind it; not those that need others.

    Commands with a bucket or a cluster are run by tests/storage and tests/ray.
    """
    commands = [main, *(command for _, command in all_commands())]
    lines = [line.strip() for command in commands for line in (command.help or "").splitlines()]
    return list(dict.fromkeys(re.split(r" {2,}# ", line)[0] for line in lines if is_example(line)))


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `reshard demo` leaves, made once; tests copy what they change."""
    folder = tmp_path_factory.mktemp("demo") / "demo"
    assert run("demo", "--size", 1, "--keep", folder).exit_code == 0
    return folder


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("example", examples())
def test_the_examples_of_the_help_run(
    example: str, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    shutil.copytree(demo / "tp2_pp2", folder / "output" / "checkpoint")
    shutil.copy(demo / "tp4.yaml", folder)
    shutil.copy(SAMPLES / "train.yaml", folder)
    shutil.copy(SAMPLES / "ckpt" / "dtypes.ckpt", folder / "weights.ckpt")
    shutil.copytree(SAMPLES / "ckpt" / "tree", folder / "old_run")
    (folder / "names.yaml").write_text("w: model.w\n")
    if re.search("(convert|split|diff .*|layout check .*) hf/|diff hf/", example):
        shutil.copytree(demo / "hf", folder / "hf")
    for name, sample in (("ranks/", "src_rank_slices"), ("strategy/", "src_strategy")):
        if re.search(f"(merge|--strategy) {name}", example):
            shutil.copytree(SAMPLES / "strategy" / sample, folder / name)
    if "output/strategy" in example:
        shutil.copytree(SAMPLES / "strategy" / "src_strategy", folder / "output" / "strategy")
    if re.search("(show|--layout) merged_strategy.ckpt", example):
        with reshard.open(demo / "hf") as opened:
            shapes = {key: opened[key].shape for key in opened.keys()}  # noqa: SIM118
        write_strategy(demo / "tp4.yaml", shapes, tmp_path / "written")
        merge_strategies(tmp_path / "written", folder / "merged_strategy.ckpt")
    if "runs/" in example:
        example = example.replace("runs/*/", "runs/1/ runs/2/")  # as a shell does
        for name in ("1", "2"):
            shutil.copytree(demo / "tp2_pp2", folder / "runs" / name)
    if "split full/" in example:
        shutil.copytree(SAMPLES / "full_ms", folder / "full")
    if re.search("rollback|pin |_00000400", example):
        shutil.rmtree(folder / "output" / "checkpoint")
        reshard.convert(demo / "hf", folder / "output" / "checkpoint", to="checkpoint2", iteration=400)
    if "--model-files" in example:
        (folder / "base").mkdir()
        (folder / "base" / "config.json").write_text("{}")
    if re.search("--names|names show|layout preset hf/", example):
        hf = shutil.copytree(demo / "hf", folder / "hf", dirs_exist_ok=True)
        width = reshard.open(hf)["model.norm.weight"].shape[0]
        config = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": width}
        (hf / "config.json").write_text(json.dumps(config))
        if ":reverse" in example:
            reshard.convert(hf, folder / "mcore", names="mindspore")
    if "--loads-in" in example:
        transformers = pytest.importorskip("transformers")
        bert = transformers.BertConfig(hidden_size=4, num_hidden_layers=1, num_attention_heads=1, vocab_size=4)
        transformers.BertModel(bert).save_pretrained(folder / "pretrained")
    if example.startswith("reshard watch"):  # it ends by Ctrl-C
        clock = types.SimpleNamespace(sleep=lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        monkeypatch.setattr(sys.modules["reshard.cli.watch"], "time", clock)
    if example == "reshard demo":
        example += " --size 1"
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = example.partition(" > ")[0]
    name, *arguments = shlex.split(command)
    assert name == "reshard"
    assert not set("|&;<>$`") & set("".join(arguments))  # nothing that only a shell understands
    done = run(*arguments)
    told = re.sub(r"^preparing, \d+ s\n", "", done.stderr, flags=re.MULTILINE)  # of a slow machine
    assert (done.exit_code, told) == (0, ""), done.exception
    assert done.stdout or "watch" in example  # this run has no events


def test_every_command_has_help_with_examples() -> None:
    assert sorted(main.commands) == [
        "convert",
        "convert-files",
        "demo",
        "diff",
        "explain",
        "inspect",
        "layout",
        "merge",
        "names",
        "pin",
        "plan",
        "prune",
        "rollback",
        "split",
        "strategy",
        "unpin",
        "verify",
        "watch",
    ]
    for name in ("", *dict(all_commands())):
        text = run(*name.split(), "--help").stdout
        assert "Examples:" in text
        assert len(examples()) >= 10
    for _, command in all_commands():
        if isinstance(command, click.Group):
            continue
        options = [param for param in command.params if isinstance(param, click.Option)]
        assert all(option.help for option in options)
        assert "--json" in [option.opts[0] for option in options]


def test_version() -> None:
    assert run("--version").stdout == f"reshard {reshard.__version__}\n"


# -- words and numbers


@pytest.mark.parametrize(
    ("n_bytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 * 1024, "10.0 KiB"),
        (1_048_575, "1.00 MiB"),
        (999 << 20, "999 MiB"),
        (3 << 40, "3.00 TiB"),
        (1 << 63, "8.00 EiB"),
    ],
)
def test_sizes(n_bytes: int, expected: str) -> None:
    assert size(n_bytes) == expected


def test_rates() -> None:
    assert [rate(10**9, 1), rate(10**9, 2), rate(5, 0)] == ["1.00 GB/s", "500 MB/s", "-"]


@pytest.mark.parametrize(
    ("names", "pattern", "short"),
    [
        (
            ["a-model-0000009-0000012.s", "a-model-0000010-0000012.s"],
            "a-model-#-0000012.s, # as listed below",
            ["9", "10"],
        ),
        (["rank_0.s", "rank_10.s"], "rank_#.s, # as listed below", ["0", "10"]),
        (["only.s"], "only.s", ["only.s"]),
        (["a.s", "b.s"], "2", ["a.s", "b.s"]),
        (["1.s", "1.s.s"], "2", ["1.s", "1.s.s"]),
    ],
)
def test_names_of_files_are_shortened_to_their_number(names: list[str], pattern: str, short: list[str]) -> None:
    found, shorten = _short_names(names)
    assert (found, [shorten(name) for name in names]) == (pattern, short)
