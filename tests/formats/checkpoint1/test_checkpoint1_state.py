"""State beside the weight files of Checkpoint 1.0: altered, missing or of another save, it is refused."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.helpers.original_reader1 import header
from tests.helpers.threads import in_threads

import reshard
from reshard.commit import protocol
from reshard.commit.session import forget_all
from reshard.errors import DamagedFileError, ReshardError
from reshard.formats.checkpoint1 import state
from reshard.formats.checkpoint1.state import SAVE_KEY

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WHOLE = {"mesh": {"dp": 2}, "rules": [{"match": "*"}]}
ENDINGS = ("safetensors", "extra.json", "extra.arrays")


@pytest.fixture(autouse=True)
def _a_run_of_its_own() -> Iterator[None]:
    yield
    protocol.release()
    forget_all()


def save(root: Path, iteration: int, **options: Any) -> Any:
    given: dict[str, Any] = {"extra": {"lr": float(iteration), "seen": np.arange(3) + iteration}} | options
    w = {"w": np.arange(4.0) + iteration}
    return reshard.save(root, iteration, w, format="checkpoint1", commit={"durable": False}, timeout=20, **given)


def file(root: Path, iteration: int, ending: str, rank: int = 0) -> Path:
    return root / f"rank_{rank}" / f"CKP_rank_{rank}-1_{iteration}.{ending}"


def check_older_is_loaded(root: Path, reason: str) -> None:
    """A load and `explain` skip the newest save; `verify` reports it as damaged."""
    loaded = reshard.load(root, verify="full")
    assert (loaded.iteration, loaded.state["w"][0], loaded.extra["lr"], loaded.extra["seen"][0]) == (10, 10, 10, 10)
    first, second = reshard.verify(root).checkpoints
    assert (first.state, second.state) == ("damaged", "structure")
    assert reason in str(first.faults[0])


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_of_another_save_counts_as_missing(ending: str, tmp_path: Path) -> None:
    for iteration in (10, 20):
        save(tmp_path, iteration)
    file(tmp_path, 20, ending).unlink()
    shutil.copy(file(tmp_path, 10, ending), file(tmp_path, 20, ending))
    check_older_is_loaded(tmp_path, "of another save")


@pytest.mark.parametrize("ending", ENDINGS[1:])
def test_state_that_is_missing_is_noticed(ending: str, tmp_path: Path) -> None:
    for iteration in (10, 20):
        save(tmp_path, iteration)
    file(tmp_path, 20, ending).unlink()
    check_older_is_loaded(tmp_path, f"CKP_rank_0-1_20.{ending}` is missing")


def test_files_of_the_same_step_of_two_saves_are_told_apart(tmp_path: Path) -> None:
    def work(group: Any, root: Path) -> Any:
        return save(root, 10, layout=WHOLE, group=group)

    for root in (tmp_path / "a", tmp_path / "b"):
        assert not [one for one in in_threads(2, lambda group: work(group, root)) if isinstance(one, Exception)]  # noqa: B023
    for ending in ENDINGS:
        file(tmp_path / "a", 10, ending, 1).unlink()
        shutil.copy(file(tmp_path / "b", 10, ending, 1), file(tmp_path / "a", 10, ending, 1))
    message = "the file of rank 0 are of different saves"
    with pytest.raises(DamagedFileError, match=message):
        reshard.open(tmp_path / "a")
    with pytest.raises(DamagedFileError, match=message):
        reshard.load(tmp_path / "a")


@pytest.mark.parametrize("ending", ENDINGS[1:])
def test_every_bit_of_the_state_is_verified(ending: str, tmp_path: Path) -> None:
    save(tmp_path, 10, extra={"lr": 0.1, "seen": np.arange(3)})
    path = file(tmp_path, 10, ending)
    whole = path.read_bytes()
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        try:
            found = reshard.open(tmp_path).extra()
        except ReshardError:
            pass
        else:  # padding of the header of the arrays
            assert ending == "extra.arrays"
            assert (found["lr"], found["seen"].tolist()) == (0.1, [0, 1, 2])
        path.write_bytes(whole)
    path.write_bytes(whole[:-1])
    with pytest.raises(DamagedFileError):
        reshard.open(tmp_path).extra()


def test_state_of_an_earlier_build_is_read(tmp_path: Path) -> None:
    save(tmp_path, 10, extra=None)
    text, arrays = state.dump({"lr": 0.1, "seen": np.arange(3)}, {"own": 4})
    file(tmp_path, 10, "extra.json").write_text(text)
    reshard.save_file(arrays, file(tmp_path, 10, "extra.arrays"))
    found = reshard.load(tmp_path).extra
    assert (found["lr"], found["seen"].tolist(), found["own"]) == (0.1, [0, 1, 2], 4)


def test_state_beside_a_weight_file_without_an_id_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a", 10)
    save(tmp_path / "b", 10, extra=None)
    shutil.copy(file(tmp_path / "a", 10, "extra.json"), file(tmp_path / "b", 10, "extra.json"))
    with pytest.raises(DamagedFileError, match="has no id of a save"):
        reshard.open(tmp_path / "b")


def test_without_state_nothing_is_added(tmp_path: Path) -> None:
    save(tmp_path, 10, extra=None)
    assert header(file(tmp_path, 10, "safetensors")) == {"format": "ms", "remove_redundancy": "False"}
    assert not file(tmp_path, 10, "extra.json").exists()


def test_if_one_rank_has_state_every_rank_writes_a_state_file(tmp_path: Path) -> None:
    def work(group: Any) -> Any:
        extra = {"own": reshard.per_rank(7)} if group.rank else None
        return save(tmp_path, 10, extra=extra, layout=WHOLE, group=group)

    assert not [one for one in in_threads(2, work) if isinstance(one, Exception)]
    ids = [header(file(tmp_path, 10, "safetensors", rank))[SAVE_KEY] for rank in range(2)]
    texts = [json.loads(file(tmp_path, 10, "extra.json", rank).read_text()) for rank in range(2)]
    assert ids[0] == ids[1] == texts[0]["save"] == texts[1]["save"]
    with reshard.open(tmp_path) as opened:
        assert [opened.extra(0), opened.extra(1)] == [{}, {"own": 7}]


def test_a_rank_without_a_file_has_the_shared_state(tmp_path: Path) -> None:
    def work(group: Any) -> Any:
        extra = {"lr": 0.5, "own": reshard.per_rank(group.rank)}
        return save(tmp_path, 10, extra=extra, layout=WHOLE, group=group)

    assert not [one for one in in_threads(2, work) if isinstance(one, Exception)]
    with reshard.open(tmp_path) as opened:
        assert [opened.extra(rank) for rank in (0, 1, 2)] == [{"lr": 0.5, "own": 0}, {"lr": 0.5, "own": 1}, {"lr": 0.5}]
