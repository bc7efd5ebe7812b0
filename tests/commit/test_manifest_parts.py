"""A rank reads the parts of a manifest and of the checksums that it uses, and what it reads is what was committed."""

from __future__ import annotations

import gc
import os
import random
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.helpers import sealed
from tests.helpers.threads import in_threads

import reshard
from reshard import _core, opening
from reshard.checkpoint import Checkpoint
from reshard.commit import manifest as manifests
from reshard.commit.manifest import CHUNK_BYTES, Manifest, PlainEntry, ShardEntry
from reshard.errors import ArgumentError, DamagedFileError, KeyNotFoundError, MismatchError, StorageError
from reshard.formats.checkpoint2 import reader, root
from reshard.formats.chosen import Chosen
from reshard.ranks import messages
from reshard.storage.location import locate
from reshard.torch import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Iterator

N_RANKS = 300


def random_manifest(seed: int, n_shards: int, n_files: int) -> Manifest:
    """A manifest with names of every allowed kind, in the order of a save."""
    rng = random.Random(seed)
    odd = ['a"b', 'x":{', "é", "a b", "files", "shards", "名", "~"]
    names = rng.sample([f"{rng.choice(odd)}-{i}" for i in range(n_shards + n_files)], n_shards + n_files)
    shards, first = {}, 0
    for name in sorted(names[:n_shards]):
        n_bytes = rng.randrange(8, 3 * CHUNK_BYTES)
        shards[name] = ShardEntry(
            n_bytes, 8, rng.getrandbits(32), first, f"{rng.getrandbits(128):032x}", rng.randrange(9)
        )
        first += shards[name].n_chunks
    files = {name: PlainEntry(rng.randrange(99), f"{rng.getrandbits(128):032x}") for name in names[n_shards:]}
    files["checksums.bin"] = PlainEntry(4 * first, f"{rng.getrandbits(128):032x}")
    return Manifest(
        iteration=rng.randrange(1000),
        generation=rng.randrange(9),
        attempt=f"{rng.getrandbits(128):032x}",
        world_size=n_shards,
        previous_tracker=rng.choice([None, 4]),
        passed_over=tuple(range(rng.randrange(4))),
        writer='reshard "shards":{',
        saved_at="2026-01-31T12:00:00Z",
        ckpt_status=rng.choice([None, 1]),
        shards=shards,
        files=dict(sorted(files.items())),
        metrics=rng.choice([{}, {"loss": 0.5, 'files":{': 1}]),
    )


def bytes_read() -> int:
    return int(re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())[0])


@pytest.mark.parametrize(("seed", "n_shards", "n_files"), [(1, 700, 2), (2, 0, 400), (3, 300, 300), (4, 255, 1)])
def test_entries_that_are_read_alone_are_those_of_the_manifest(
    seed: int, n_shards: int, n_files: int, tmp_path: Path
) -> None:
    expected = random_manifest(seed, n_shards, n_files)
    manifests.write(locate(tmp_path), expected, durable=False)
    assert manifests.read(locate(tmp_path)) == expected
    sent = manifests.outline(expected)
    assert sent is not None
    part = manifests.read_part(locate(tmp_path), messages.decode(manifests.Outline, messages.encode(sent)))
    for name in ("iteration", "generation", "attempt", "world_size", "previous_tracker", "passed_over", "writer"):
        assert getattr(part, name) == getattr(expected, name)
    assert (part.saved_at, part.ckpt_status, part.metrics) == (
        expected.saved_at, expected.ckpt_status, expected.metrics,
    )  # fmt: skip
    assert part.digest == expected.digest
    rng = random.Random(seed)
    names = [*expected.shards, *expected.files]
    for name in rng.sample(names, len(names)):
        assert part.shards.get(name) == expected.shards.get(name)
        assert part.files.get(name) == expected.files.get(name)
    assert not {"", "zzzz", "a", "~~"} & {*part.shards, *part.files}
    assert "" not in part.shards
    assert "zzzz" not in part.files
    again = manifests.read_part(locate(tmp_path), sent)
    assert (dict(again.shards), dict(again.files)) == (expected.shards, expected.files)
    assert (len(part.shards), part.sizes, part.n_bytes) == (len(expected.shards), expected.sizes, expected.n_bytes)


def test_one_entry_reads_a_piece(tmp_path: Path) -> None:
    manifest = random_manifest(5, 4000, 4)
    manifests.write(locate(tmp_path), manifest, durable=False)
    sent = manifests.outline(manifest)
    assert sent is not None
    before = bytes_read()
    part = manifests.read_part(locate(tmp_path), sent)
    name = sorted(manifest.shards)[1234]
    assert part.shards[name] == manifest.shards[name]
    assert bytes_read() - before < 24 << 10
    assert (tmp_path / "manifest.json").stat().st_size > 500_000


def test_a_small_manifest_or_one_in_another_order_is_read_as_a_whole() -> None:
    assert manifests.outline(random_manifest(6, 100, 100)) is None
    manifest = random_manifest(7, 300, 2)
    assert manifests.outline(manifest) is not None
    turned = {**vars(manifest), "files": dict(reversed(list(manifest.files.items()))), "digest": ""}
    assert manifests.outline(Manifest(**turned)) is None


def test_an_altered_manifest_gives_the_committed_entries_or_an_error(tmp_path: Path) -> None:
    manifest = random_manifest(8, 260, 30)
    manifests.write(locate(tmp_path), manifest, durable=False)
    sent = manifests.outline(manifest)
    assert sent is not None
    path = tmp_path / "manifest.json"
    text = path.read_bytes()
    names = [*manifest.shards, *manifest.files]
    n_refused, rng = 0, random.Random(9)
    places = [*rng.sample(range(len(text)), 40), *range(0, 300, 7), *range(len(text) - 60, len(text), 7)]
    for place in places:
        path.write_bytes(text[:place] + bytes([text[place] ^ 1 << rng.randrange(8)]) + text[place + 1 :])
        try:
            part = manifests.read_part(locate(tmp_path), sent)
        except MismatchError:
            n_refused += 1
            continue
        wrong = 0
        for name in names:
            try:
                found = part.shards.get(name), part.files.get(name)
            except DamagedFileError:
                wrong += 1
            else:
                assert found == (manifest.shards.get(name), manifest.files.get(name))
        assert 0 < wrong < len(names)
    assert 40 < n_refused < len(places)
    for other in (text[:-1], text + b"\n", b"", text[:200]):
        path.write_bytes(other)
        with pytest.raises(MismatchError):
            manifests.read_part(locate(tmp_path), sent)
    path.unlink()
    manifests.write(locate(tmp_path), random_manifest(10, 260, 30), durable=False)
    with pytest.raises(MismatchError):
        manifests.read_part(locate(tmp_path), sent)


@pytest.mark.parametrize("n_shards", [0, 1, 300])
def test_the_head_is_that_of_the_manifest(n_shards: int, tmp_path: Path) -> None:
    manifest = random_manifest(11, n_shards, 3)
    manifests.write(locate(tmp_path), manifest, durable=False)
    head = manifests.read_head(locate(tmp_path))
    assert (head.iteration, head.generation, head.previous_tracker, head.passed_over) == (
        manifest.iteration, manifest.generation, manifest.previous_tracker, manifest.passed_over,
    )  # fmt: skip
    path = tmp_path / "manifest.json"
    text = path.read_bytes()
    for place in random.Random(12).sample(range(len(text)), 50):
        path.write_bytes(text[:place] + bytes([text[place] ^ 4]) + text[place + 1 :])
        with pytest.raises(DamagedFileError):
            manifests.read_head(locate(tmp_path))


# -- of a checkpoint


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a file a rank."""
    folder = tmp_path_factory.mktemp("tree")
    values = np.arange(N_RANKS * 4, dtype=np.float32).reshape(N_RANKS, 4)
    reshard.save_file({"w": values, "v": values + 1}, folder / "model.safetensors")
    reshard.convert(folder / "model.safetensors", folder / "root", layout=divided(N_RANKS), commit={"durable": False})
    return folder / "root"


def divided(n_ranks: int) -> dict[str, Any]:
    return {"mesh": {"tp": n_ranks}, "rules": [{"match": "*", "cut": ["tp"]}]}


def sent_by_rank_0(tree: Path) -> Chosen:
    with reshard.open(tree) as checkpoint:
        known = opening.chosen(checkpoint)
    assert known is not None
    assert known.outline is not None
    decoded: Chosen = messages.decode(Chosen, messages.encode(known))
    assert decoded == known
    return decoded


def test_a_rank_loads_what_another_rank_has_chosen_from_parts_of_the_manifest(tree: Path) -> None:
    known = sent_by_rank_0(tree)
    before = bytes_read()
    with Checkpoint(opening.open_chosen(known)) as checkpoint:
        found = checkpoint.load(divided(100), 3)
    n_read = bytes_read() - before
    with reshard.open(tree) as checkpoint:
        expected = checkpoint.load(divided(100), 3)
        assert all(np.array_equal(found[name], expected[name]) for name in ("v", "w"))
        assert checkpoint.data.rank_files() == opening.open_chosen(known).rank_files()
    folder = tree / "iteration_00000000"
    described = "metadata.bin" if (folder / "metadata.bin").exists() else "metadata.json"
    others = (folder / described).stat().st_size
    assert (folder / "manifest.json").stat().st_size > 50_000
    assert n_read - others < 36 << 10  # 2 of 4 pieces


def test_ranks_that_load_together_read_one_manifest(tree: Path, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = manifests._read_text

    def count(place: Any) -> Any:
        read.append(place.name)
        return real(place)

    monkeypatch.setattr(manifests, "_read_text", count)
    layout = divided(3)
    loaded = in_threads(3, lambda group: reshard.load(tree, layout, group=group, timeout=60))
    for rank, one in enumerate(loaded):
        expected = np.arange(N_RANKS * 4, dtype=np.float32).reshape(3, -1, 4)[rank]
        assert np.array_equal(one.state["w"], expected)
        assert np.array_equal(one.state["v"], expected + 1)
    assert len(read) == 1
    alter(copied / "iteration_00000000" / "checksums.bin", 4 * 295)  # of rank 2
    for error in in_threads(3, lambda group: reshard.load(copied, layout, group=group, timeout=60)):
        assert "the checksums of" in str(error)


@pytest.fixture
def copied(tree: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    folder = tmp_path / "root"
    shutil.copytree(tree, folder, copy_function=os.link)
    return folder


def alter(path: Path, place: int) -> None:
    """Change a byte of a file of which another folder has a link."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.unlink()
    path.write_bytes(data)


def test_a_damaged_piece_concerns_the_ranks_that_read_it(copied: Path) -> None:
    known = sent_by_rank_0(copied)
    path = copied / "iteration_00000000" / "manifest.json"
    alter(path, path.read_bytes().index(b'"model-0000295'))
    with Checkpoint(opening.open_chosen(known)) as checkpoint:
        assert checkpoint.load(divided(10), 3)["w"].shape == (30, 4)
        with pytest.raises(DamagedFileError, match="another rank has verified") as caught:
            checkpoint.load(divided(10), 9)
        assert caught.value.path == str(path)
        with pytest.raises(DamagedFileError):  # nor without sums, because the size and the header cannot be verified
            checkpoint.load(divided(10), 9, verify="structure")


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small checkpoints are opened as large ones."""
    monkeypatch.setattr(manifests, "_EARLY_CHECKSUMS_BYTES", 0)


@pytest.mark.usefixtures("late")
def test_damaged_checksums_concern_the_file_they_belong_to(copied: Path) -> None:
    path = copied / "iteration_00000000" / "checksums.bin"
    alter(path, 4 * 295)
    for data in (opening.open_chosen(sent_by_rank_0(copied)), reshard.open(copied).data):
        with Checkpoint(data) as checkpoint:
            assert checkpoint.load(divided(10), 3)["w"].shape == (30, 4)
            with pytest.raises(DamagedFileError, match=r"the checksums of .*0000295.* differ"):
                checkpoint.load(divided(10), 9)
            assert checkpoint.load(divided(10), 9, verify="structure")["w"][0, 0] == 270 * 4


@pytest.mark.parametrize("with_torch", [False, True])
@pytest.mark.usefixtures("late")
def test_a_load_goes_back_if_checksums_are_damaged(tmp_path: Path, *, with_torch: bool) -> None:
    for iteration in (1, 2):
        report = reshard.save(tmp_path / "run", iteration, {"weight": np.full((1, 2), iteration, np.float32)})
    alter(Path(report.path) / "checksums.bin", 1)
    if with_torch:
        model = torch.nn.Linear(2, 1, bias=False)
        found, state = Checkpointer(tmp_path / "run", signals=()).resume(model=model, strict=False), model.state_dict()
        assert found.iteration == 1
    else:
        loaded = reshard.load(tmp_path / "run", None)
        assert loaded.iteration == 1
        state = loaded.state
    assert state["weight"].tolist() == [[1, 1]]


@pytest.mark.usefixtures("late")
def test_checksums_are_read_when_they_are_used(tmp_path: Path) -> None:
    report = reshard.save(tmp_path / "run", 1, {"w": np.zeros(CHUNK_BYTES // 8), "v": np.ones(3)})
    with reshard.open(tmp_path / "run") as checkpoint:
        (Path(report.path) / "checksums.bin").unlink()
        assert checkpoint.load(verify="structure")["v"].sum() == 3
        with pytest.raises(DamagedFileError, match=r"checksums\.bin"):
            checkpoint.load()


# -- opening a root


def test_a_root_reads_each_manifest_once_and_parses_the_entries_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (5, 10, 15):
        sealed.make_tiny(tmp_path, iteration, previous_tracker=iteration - 5 or None)
    texts: list[str] = []
    real = manifests._read_text

    def count(place: Any) -> Any:
        texts.append(place.parent.name)
        return real(place)

    monkeypatch.setattr(manifests, "_read_text", count)
    for _ in range(2):
        with reshard.open(tmp_path) as checkpoint:
            assert checkpoint.iteration == 15
        assert sorted(texts) == ["iteration_00000005", "iteration_00000010", "iteration_00000015"]
        texts.clear()
    assert opening.newer_than(locate(tmp_path), 15) == ()
    assert texts == []
    assert opening.newer_than(locate(tmp_path), 10) == (15,)


def test_the_lock_of_an_iteration_that_is_not_opened_is_released(tmp_path: Path) -> None:
    sealed.make_tiny(tmp_path, 5)
    sealed.make_tiny(tmp_path, 10, previous_tracker=5)
    gc.collect()  # files of objects of other tests are not closed in between
    n_handles = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(2):
        order = opening.iterations(tmp_path)
        assert order is not None
        assert [one.iteration for one in order.candidates] == [10, 5]
        assert len(list(Path("/proc/self/fd").iterdir())) == n_handles
    damaged = tmp_path / "iteration_00000010" / "manifest.json"
    damaged.write_bytes(damaged.read_bytes()[:-3])
    with reshard.open(tmp_path) as checkpoint:
        assert checkpoint.iteration == 5
    assert len(list(Path("/proc/self/fd").iterdir())) == n_handles


def test_an_iteration_that_is_saved_again_between_the_look_and_the_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest that was read belongs to the folder before: it is read again."""
    reshard.save(tmp_path / "run", 5, {"w": np.zeros(4)})
    real = reader.open_folder

    def late(*args: Any, **more: Any) -> Any:
        monkeypatch.setattr(root, "open_folder", real)
        reshard.save(tmp_path / "run", 5, {"w": np.ones(5), "v": np.ones(5)})
        return real(*args, **more)

    monkeypatch.setattr(root, "open_folder", late)
    with reshard.open(tmp_path / "run") as checkpoint:
        assert checkpoint.load()["w"].tolist() == [1.0] * 5
        assert checkpoint.skipped == ()


# -- the function that reads checksums


@pytest.fixture
def written(tmp_path: Path) -> Iterator[tuple[_core.Index, _core.Written]]:
    """An index of a file without checksums, and its record."""
    path = tmp_path / "f.safetensors"
    record = _core.write_arrays(str(path), [("w", "U8", (10,), np.arange(10, dtype=np.uint8))])
    index = _core.Index()
    index.add_file(str(path))
    yield index, record
    index.close()


def facts(record: _core.Written, checksums: bytes | None) -> tuple[int, int, int, bytes | None]:
    return record.n_bytes, record.header_bytes, record.header_checksum, checksums


def plan_of(index: _core.Index, *, verify: bool = True) -> _core.Plan:
    return index.plan(index.whole_request(["w"]), verify=verify)


def test_a_plan_asks_for_checksums_once(written: tuple[_core.Index, _core.Written]) -> None:
    index, record = written
    asked = []

    def read(paths: list[str], with_chunks: bool) -> list[Any]:  # noqa: FBT001
        asked.append(([Path(path).name for path in paths], with_chunks))
        return [facts(record, record.checksums if with_chunks else None)]

    index.set_checksums_reader(read)
    index.add_whole("w", 0)
    assert asked == [(["f.safetensors"], False)]
    plan_of(index, verify=False)
    assert len(asked) == 1
    for _ in range(2):
        [(buffer, start)] = plan_of(index).load()
        assert bytes(buffer)[start : start + 10] == bytes(range(10))
    assert asked[1:] == [(["f.safetensors"], True)]


def test_the_function_is_for_the_files_so_far(written: tuple[_core.Index, _core.Written], tmp_path: Path) -> None:
    index, record = written
    index.set_checksums_reader(lambda paths, _: [facts(record, record.checksums)] * len(paths))
    _core.write_arrays(str(tmp_path / "g"), [("v", "U8", (3,), np.arange(3, dtype=np.uint8))])
    for one in (index, index.files_again([0])):
        one.add_whole("w", 0)
        one.add_whole("v", one.add_file(str(tmp_path / "g")))
        plan = one.plan(one.whole_request(["v", "w"]))
        assert [bytes(buffer)[start : start + 3] for buffer, start in plan.load()] == [b"\0\1\2"] * 2


def test_wrong_checksums_from_the_function_are_refused(written: tuple[_core.Index, _core.Written]) -> None:
    index, record = written
    index.add_whole("w", 0)
    with pytest.raises(ArgumentError, match="already open"):
        index.set_checksums(0, *facts(record, None))
    for answer, kind in [
        ([], ArgumentError),
        ([facts(record, record.checksums)] * 2, ArgumentError),
        ([facts(record, record.checksums + b"1234")], ArgumentError),
        ([facts(record, b"123")], ArgumentError),
        ([facts(record, None)], DamagedFileError),
        ([(record.n_bytes + 1, *facts(record, record.checksums)[1:])], DamagedFileError),
        ([facts(record, b"\0\0\0\0")], DamagedFileError),
    ]:
        other = index.files_again([0])
        other.set_checksums(0, *facts(record, None))
        other.add_whole("w", 0)
        other.set_checksums_reader(lambda *_, answer=answer: answer)
        with pytest.raises(kind):
            plan_of(other).load()
    other = index.files_again([0])
    other.set_checksums(0, *facts(record, None))
    other.add_whole("w", 0)
    with pytest.raises(ArgumentError):  # and nothing that gives them
        plan_of(other)


@pytest.mark.parametrize(
    "error", [StorageError("no", path="p", errno=5), KeyNotFoundError("no"), KeyboardInterrupt(), ValueError("x")]
)
def test_an_error_of_the_function_is_raised_as_it_is(
    error: BaseException, written: tuple[_core.Index, _core.Written]
) -> None:
    index, _ = written

    def fail(*_: Any) -> Any:
        raise error

    index.set_checksums_reader(fail)
    with pytest.raises(type(error)) as caught:
        index.add_whole("w", 0)
    assert caught.value is error
