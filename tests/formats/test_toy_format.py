"""A new format is one module and one entry in the registry: everything that reads a checkpoint then works with it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, get_args

import numpy as np
import pytest
from click.testing import CliRunner

import reshard
from reshard import _core
from reshard.cli import main
from reshard.formats import registry
from reshard.formats.base import CheckpointData, Format, Match
from reshard.options import Target
from reshard.values.traits import Traits

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.formats.base import OpenOptions
    from reshard.storage.location import Location

ARRAYS = {"a.w": np.arange(24, dtype=np.float32).reshape(6, 4), "b.w": np.arange(5, dtype=np.int32)}


class Toy(Format):
    """A folder with `toy.json`, which has the file and the stored name of each tensor."""

    traits = Traits("toy")

    def detect(self, path: Location) -> Match:
        return Match.YES if (path / "toy.json").is_file() else Match.NO

    def open(self, path: Location, options: OpenOptions) -> CheckpointData:
        index = _core.Index()
        described = json.loads((path / "toy.json").read_small(1 << 20))
        for key, (file, name) in described.items():
            number = index.add_file(str(path / file), method=options.method)
            (tensor,) = [one for one in index.file_tensors(number) if one.name == name]
            shape = tensor.shape
            strides = [int(np.prod(shape[dim + 1 :])) for dim in range(len(shape))]
            tile = _core.Tile((0,) * len(shape), shape, 0, tuple(strides))
            index.add_tiles(key, tensor.dtype, shape, [_core.StoredArray(number, name, shape, [tile])])
        return CheckpointData(traits=self.traits, path=path, index=index, method=options.method)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(registry, "FORMATS", (Toy(), *registry.FORMATS))
    folder = tmp_path / "toy"
    folder.mkdir()
    description = {}
    for number, (key, array) in enumerate(ARRAYS.items()):
        reshard.save_file({"stored": array}, folder / f"{number}.bytes")
        description[key] = [f"{number}.bytes", "stored"]
    (folder / "toy.json").write_text(json.dumps(description))
    return folder


def command(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(one) for one in args])
    return result.exit_code, result.output


def test_it_opens_reads_and_loads_under_a_layout(toy: Path) -> None:
    with reshard.open(toy) as checkpoint:
        assert (checkpoint.format, checkpoint.keys(), checkpoint.ranks()) == ("toy", list(ARRAYS), [])
        assert (checkpoint.read("a.w", (slice(1, 3), 2)) == ARRAYS["a.w"][1:3, 2]).all()
        layout = {"mesh": {"tp": 2}, "rules": [{"match": "a.*", "cut": [None, "tp"]}, {"match": "*"}]}
        for rank in range(2):
            loaded = checkpoint.load(layout, rank=rank)
            assert (loaded["a.w"] == ARRAYS["a.w"][:, 2 * rank : 2 * rank + 2]).all()
            assert (loaded["b.w"] == ARRAYS["b.w"]).all()
        with checkpoint.renamed({"rules": [{"from": f"{n}.w", "to": f"layers.{n}"} for n in "ab"]}) as renamed:
            assert (renamed.read("layers.b") == ARRAYS["b.w"]).all()
    started = reshard.load(config={"load_checkpoint": str(toy)})
    assert all((started.state[key] == array).all() for key, array in ARRAYS.items())


@pytest.mark.parametrize("to", get_args(Target))
def test_it_is_converted_to_every_format(to: Target, toy: Path, tmp_path: Path) -> None:
    reshard.convert(toy, tmp_path / "out", to=to)
    with reshard.open(tmp_path / "out") as written:
        stored = ".fp32" if to == "deepspeed-universal" else ""  # it holds the weights of the optimizer
        assert all((written.read(f"{key}{stored}") == array).all() for key, array in ARRAYS.items())


def test_the_commands_know_it(toy: Path, tmp_path: Path) -> None:
    code, page = command("inspect", toy)
    assert (code, "a.w" in page, "toy" in page) == (0, True, True)
    assert command("inspect", toy, "--json")[0] == 0
    reshard.convert(toy, tmp_path / "same")
    assert command("diff", toy, tmp_path / "same")[0] == 0
    changed = {**ARRAYS, "b.w": ARRAYS["b.w"] + 1}
    reshard.save_file(changed, tmp_path / "other.safetensors")
    assert command("diff", toy, tmp_path / "other.safetensors")[0] == 1
    assert command("verify", toy)[0] == 0
    data = (toy / "0.bytes").read_bytes()
    (toy / "0.bytes").write_bytes(data[:-1])
    assert command("verify", toy)[0] == 1
