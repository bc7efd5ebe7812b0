"""A source without checksums that another program changes while it is read: refused, or one of the two saves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save, save_file

import reshard
from reshard.checkpoint import Checkpoint
from reshard.errors import MismatchError, ReshardError
from reshard.options import Commit
from reshard.torch import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KEYS = ("a", "b")
N = 300_000  # more than a mebibyte: small files are written in another way


def write(folder: Path, value: float) -> None:
    """Two files and their index, each written in place."""
    folder.mkdir(exist_ok=True)
    names = {key: f"model-0000{i}-of-00002.safetensors" for i, key in enumerate(KEYS, start=1)}
    for key, name in names.items():
        (folder / name).write_bytes(save({key: np.full(N, value, np.float32)}))
    text = str({"metadata": {}, "weight_map": names}).replace("'", '"')
    (folder / "model.safetensors.index.json").write_text(text)
    for path in folder.iterdir():  # two writes are never within one step of the clock of the file system
        os.utime(path, (1_700_000_000 + value, 1_700_000_000 + value))


def replace(folder: Path, value: float) -> None:
    """The same by renames."""
    write(folder.with_name("new"), value)
    for path in folder.with_name("new").iterdir():
        path.rename(folder / path.name)


def remove(folder: Path, _: float) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


CHANGES: dict[str, Callable[[Path, float], None]] = {"in place": write, "by a rename": replace, "removed": remove}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(N))
        self.b = torch.nn.Parameter(torch.zeros(N))


def convert(folder: Path) -> None:
    reshard.convert(folder, folder.with_name("out.safetensors"))


def convert_to_folder(folder: Path) -> None:
    reshard.convert(folder, folder.with_name("out"), to="huggingface", dtype="bfloat16")


def convert_to_root(folder: Path) -> None:
    layout = {"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}]}
    reshard.convert(folder, folder.with_name("out"), layout=layout)


def convert_shares(folder: Path) -> None:
    for share in range(2):
        reshard.convert(folder, folder.with_name("out"), to="torch", share=(share, 2))


def diff(folder: Path) -> None:
    save_file({key: np.zeros(N, np.float32) for key in KEYS}, folder.with_name("other.safetensors"))
    reshard.diff(folder.with_name("other.safetensors"), folder)


def load(folder: Path) -> None:
    reshard.load(config={"load_checkpoint": str(folder)})


def init_from(folder: Path) -> None:
    Checkpointer(folder.with_name("run"), signals=()).resume(model=Model(), init_from=folder)


def init_from_renamed(folder: Path) -> None:
    names = {"rules": [{"from": "a", "to": "b"}, {"from": "b", "to": "a"}]}
    Checkpointer(folder.with_name("run"), signals=()).resume(model=Model(), init_from={"path": folder, "names": names})


def load_all(folder: Path) -> None:
    reshard.load_file(folder)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "verb",
    [convert, convert_to_folder, convert_to_root, convert_shares, diff, load, init_from, init_from_renamed, load_all],
)
def test_a_change_between_two_reads_is_refused(
    verb: Callable[[Path], None], change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    write(folder, 1)
    plan, done = Checkpoint.plan, list[str]()

    def plan_and_change(self: Checkpoint, *args: Any, **kwargs: Any) -> Any:
        planned = plan(self, *args, **kwargs)
        if not done and self.path == folder:
            done.append(change)
            CHANGES[change](folder, 2)
        return planned

    monkeypatch.setattr(Checkpoint, "plan", plan_and_change)
    with pytest.raises(
        MismatchError, match=r"model-0000[12]-of-00002.safetensors` changed while it was read"
    ) as caught:
        verb(folder)
    now = "it is gone" if change == "removed" else r"it has .* modified 20\d\d-.* UTC, inode \d+"
    caught.match(rf"it had \d+ bytes, modified 20\d\d-.* UTC, inode \d+; now {now}")
    assert "wait until the program that writes it is done, or copy the folder first" in str(caught.value)
    assert done, "the boundary was not reached"
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".out.share-")}
    assert left <= {"model", "new", "other.safetensors", "run"}
    if change != "removed":
        verb(folder)


def test_an_opened_checkpoint_that_is_modified_in_place_is_refused_and_a_replaced_one_is_read_as_it_was(
    tmp_path: Path,
) -> None:
    write(tmp_path / "model", 1)
    with reshard.open(tmp_path / "model") as opened:
        replace(tmp_path / "model", 2)
        assert {key: float(array[0]) for key, array in opened.load().items()} == dict.fromkeys(KEYS, 1.0)
    with reshard.open(tmp_path / "model") as opened:
        write(tmp_path / "model", 3)
        with pytest.raises(MismatchError, match="changed while it was read"):
            opened.load()


@pytest.mark.slow(disk=False)
def test_two_files_of_an_unfinished_save_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing changes while they are read: the program has written one, and writes the other."""
    folder = tmp_path / "model"
    write(folder, 1)
    first, second = sorted(folder.glob("*.safetensors"))
    now, waits = time.time_ns(), list[float]()
    clock = SimpleNamespace(time_ns=lambda: now, sleep=waits.append)
    monkeypatch.setattr("reshard.formats.weight_map.time", clock)

    def written(path: Path, seconds_ago: int) -> None:
        at = now - seconds_ago * 1_000_000_000
        os.utime(path, ns=(at, at))

    written(second, 30)
    written(folder / "model.safetensors.index.json", 20)
    written(first, 10)
    convert(folder)  # a copy can have such times
    assert waits == []
    written(first, 0)
    unfinished = folder / ".tmpAb12Z9"
    unfinished.write_bytes(b"00")
    with pytest.raises(
        MismatchError, match=r"model` changed while it was read: another program is writing `.tmpAb12Z9`"
    ):
        convert_to_folder(folder)
    written(unfinished, 100)
    waits.clear()
    convert_to_folder(folder)  # left by a program that was killed
    assert waits == [1.0]
    clock.sleep = lambda _: second.write_bytes(save({"b": np.full(N, 2, np.float32)}))  # what is done meanwhile
    with reshard.open(folder) as opened:
        opened.load()
        with pytest.raises(MismatchError, match=rf"`{second}` changed while it was read"):
            opened.check_unchanged()


def test_a_folder_that_is_removed_as_a_whole_is_read_as_it_was(tmp_path: Path) -> None:
    """An older checkpoint of a Trainer is removed while it is read."""
    write(tmp_path / "model", 1)
    with reshard.open(tmp_path / "model") as opened:
        shutil.rmtree(tmp_path / "model")
        assert set(opened.load()) == set(KEYS)
        opened.check_unchanged()


def test_a_saved_iteration_that_is_removed_or_touched_is_read_as_it_was(tmp_path: Path) -> None:
    reshard.save(tmp_path / "run", 1, {"w": np.arange(N)}, commit=Commit())
    folder = tmp_path / "run/iteration_00000001"
    with reshard.open(tmp_path / "run") as opened:
        for path in folder.glob("*.safetensors"):
            os.utime(path)
            path.chmod(0o600)
        assert opened.load()["w"][5] == 5
        opened.check_unchanged()
        for path in folder.glob("*.safetensors"):
            path.unlink()
        assert opened.load()["w"][5] == 5
        opened.check_unchanged()


@pytest.mark.parametrize("name", ["w.safetensors", "w.bin", "w.ckpt"])
def test_files_of_every_format_are_compared(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / name
    make: Callable[[float], object] = {
        ".safetensors": lambda value: path.write_bytes(save({"w": np.full(N, value, np.float32)})),
        ".bin": lambda value: torch.save({"w": torch.full((N,), value)}, path),
        ".ckpt": lambda value: torch.save({"state_dict": {"w": torch.full((N,), value)}}, path),
    }[path.suffix]
    make(1.0)
    os.utime(path, (1_700_000_000, 1_700_000_000))
    monkeypatch.chdir(tmp_path)
    with reshard.open(name) as opened:
        opened.read("state_dict.w" if "state_dict.w" in opened else "w")
        opened.check_unchanged()
        make(2.0)
        with pytest.raises(MismatchError, match=f"`{name}` changed while it was read"):
            opened.check_unchanged()


_FEW_SECONDS = 3.0
_SECONDS = float(os.environ.get("RESHARD_SECONDS_OF_SAVES", _FEW_SECONDS))
_SAVES = """
import sys, pathlib, torch, transformers
folder, stop = map(pathlib.Path, sys.argv[1:])
config = transformers.LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
                                  num_key_value_heads=2, vocab_size=512)
model = transformers.LlamaForCausalLM(config)
value = 0
while not stop.exists():
    value += 1
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(value)
    model.save_pretrained(folder, max_shard_size=SIZE)
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", ["'200KB'", *(["'100MB'"] if _SECONDS > _FEW_SECONDS else [])])
def test_a_process_that_saves_all_the_time(size: str, tmp_path: Path) -> None:
    """Each conversion equals one save, or is refused."""
    pytest.importorskip("transformers")
    script, folder, stop = tmp_path / "saves.py", tmp_path / "model", tmp_path / "stop"
    script.write_text(_SAVES.replace("SIZE", size))
    n_equal, refused = 0, dict[str, int]()
    saver = subprocess.Popen([sys.executable, str(script), str(folder), str(stop)], stderr=subprocess.DEVNULL)
    try:
        while not list(folder.glob("model*.json")) and not (folder / "model.safetensors").exists():
            assert saver.poll() is None
            time.sleep(0.1)
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end:
            out = tmp_path / "out.safetensors"
            try:
                reshard.convert(folder, out, overwrite=True)
            except ReshardError as error:
                words = str(error).split(str(folder))[-1][:60]
                refused[words] = refused.get(words, 0) + 1
                continue
            values = {float(x) for array in load_file(out).values() for x in (array.min(), array.max())}
            assert len(values) == 1, f"a mixture of the saves {sorted(values)}"
            n_equal += 1
    finally:
        stop.touch()
        saver.wait()
    print(f"{n_equal} conversions equal one save, {sum(refused.values())} are refused: {refused}")
    reshard.convert(folder, tmp_path / "last.safetensors")
