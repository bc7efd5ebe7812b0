"""What a later save of the same plan does not make again; the files are those of a first save, byte for byte."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from reshard.commit.manifest import PlainEntry, digest_of
from reshard.formats.checkpoint2 import iteration, metadata
from reshard.formats.checkpoint2.iteration import IterationPlan, Kept, plan_layout, write_descriptions
from reshard.formats.tiled import names as tiles
from reshard.layout import ModelLayout
from reshard.storage.location import locate

if TYPE_CHECKING:
    from pathlib import Path

    from reshard.write.contents import DtypeAndPart

pytestmark = pytest.mark.disk


@pytest.fixture
def plan() -> IterationPlan:
    """Tensors that metadata.json describes, and others that are only in tiles.json."""
    rules = [{"match": "even.*", "cut": ["tp"]}, {"match": "odd.*", "cut": ["tp"], "uneven": "ceil"}]
    layout = ModelLayout.from_mapping({"mesh": {"dp": 2, "tp": 4}, "rules": rules})
    shapes = {f"{name}.{i}": (n, 3) for i in range(40) for name, n in (("even", 8), ("odd", 7))}
    tensors: dict[str, DtypeAndPart] = dict.fromkeys(shapes, ("F32", "model"))
    return plan_layout(tensors, layout.bind(shapes))


def written(plan: IterationPlan, folder: Path, kept: Kept | None) -> dict[str, bytes]:
    """The files, which are compared with what is said of them."""
    folder.mkdir()
    entries = write_descriptions(plan, locate(folder), mode=0o666, kept=kept)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert entries.keys() == files.keys()
    for name, entry in entries.items():
        assert entry in (None, PlainEntry(len(files[name]), digest_of(files[name])))
    return files


def test_a_later_save_writes_the_same_files_without_a_digest_or_an_encoding(
    plan: IterationPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "MIN_TABLE_BYTES", 0)
    fresh = written(plan, tmp_path / "fresh", None)
    assert fresh.keys() == {"metadata.json", "metadata.bin", "tiles.json"}
    kept = Kept()
    assert written(plan, tmp_path / "first", kept) == fresh

    class NoDigest:
        def update(self, _: bytes) -> None:
            pytest.fail("a digest was made again")

    def no_pieces(_: object) -> Any:
        pytest.fail("tiles.json was encoded again")

    with monkeypatch.context() as patch:
        patch.setattr(metadata, "new_digest", NoDigest)
        patch.setattr(tiles, "pieces", no_pieces)
        patch.setattr(iteration, "_UNPACKED_BYTES", 100)
        assert written(plan, tmp_path / "second", kept) == fresh


@pytest.mark.parametrize("at", [0, 40, -1, None])
def test_what_is_kept_is_compared_before_it_counts(plan: IterationPlan, tmp_path: Path, at: int | None) -> None:
    """Damage of memory: the files are made again."""
    kept = Kept()
    fresh = written(plan, tmp_path / "first", kept)
    assert kept.metadata is not None
    assert kept.tiles is not None
    entry = kept.metadata.entry
    kept.metadata = kept.metadata._replace(
        entry=PlainEntry(entry.n_bytes, "0" * 32), checksum=kept.metadata.checksum ^ 1
    )
    entry, packed = kept.tiles
    damaged = bytearray(packed)
    if at is None:
        del damaged[-1]
    else:
        damaged[at] ^= 1
    kept.tiles = entry, bytes(damaged)
    assert written(plan, tmp_path / "second", kept) == fresh
    assert written(plan, tmp_path / "third", kept) == fresh
    assert kept.tiles == (entry, packed)


def test_long_texts_are_not_kept(plan: IterationPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iteration, "_MAX_KEPT_BYTES", 100)
    monkeypatch.setattr(metadata, "MIN_TABLE_BYTES", 0)
    kept = Kept()
    assert written(plan, tmp_path / "first", kept) == written(plan, tmp_path / "second", kept)
    assert kept == Kept()
