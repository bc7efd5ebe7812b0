"""A checkpoint that was opened by a relative path, after the program has changed its working folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.sample_checkpoints import SAMPLES, checkpoints_of

import reshard
from reshard.errors import ReshardError

DATA = Path(__file__).parents[1] / "data"


def told_by(opened: reshard.Checkpoint) -> dict[str, Any]:
    """What a checkpoint says when it is asked, without paths."""

    def of(what: Any) -> Any:
        try:
            found = what()
        except ReshardError as error:
            return type(error).__name__
        return {key: (str(one.dtype), one.tobytes()) for key, one in found.items()} if what == opened.load else found

    return {
        "arrays": of(opened.load),
        "extra": repr(of(opened.extra)),
        "common": opened.common or of(opened.data.read_common),
        "files": of(opened.files),
        "ranks": of(lambda: {rank: list(opened.stored(rank)) for rank in opened.ranks()}),
        "quantised": repr(of(opened.quantised)),
        "scrub": of(opened.scrub),
        "unchanged": of(opened.check_unchanged),
        "world_size": of(opened.data.world_size),
        "rank_files": of(opened.data.rank_files),
    }


@pytest.mark.parametrize("sample", SAMPLES)
def test_what_is_read_later_is_found(sample: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in checkpoints_of(sample):
        monkeypatch.chdir(DATA)
        with reshard.open(path.relative_to(DATA)) as opened:
            expected = told_by(opened)
        with reshard.open(path.relative_to(DATA)) as opened:
            monkeypatch.chdir(tmp_path)
            assert told_by(opened) == expected


def test_a_saved_run_with_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    extra = {"seen": [1, 2], "array": np.arange(3)}
    for iteration in (1, 2):
        reshard.save("run", iteration, {"w": np.full(4, iteration)}, extra=extra, commit={"durable": False})
    with reshard.open("run") as opened:
        monkeypatch.chdir(tmp_path / "sub")
        assert opened.extra()["seen"] == [1, 2]
        assert opened.load()["w"].tolist() == [2, 2, 2, 2]
        opened.scrub()
        opened.check_unchanged()


def test_a_changed_file_is_still_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    reshard.save_file({"w": np.zeros(4)}, "w.safetensors")
    with reshard.open("w.safetensors") as opened:
        opened.load()
        monkeypatch.chdir(tmp_path / "sub")
        opened.check_unchanged()
        reshard.save_file({"w": np.ones(4)}, "../w.safetensors")
        with pytest.raises(ReshardError, match="changed"):
            opened.check_unchanged()
