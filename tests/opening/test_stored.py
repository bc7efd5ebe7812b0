"""`Checkpoint.stored`: the local arrays in the files of a rank, for every format with files of single ranks.

Files are read here without `reshard`, and the ranks of the files come from metadata.json.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.helpers import original_reader
from tests.helpers.arrays import Arrays, assert_same

import reshard
from reshard import _core
from reshard.errors import ArgumentError, DamagedFileError, KeyNotFoundError, ReshardError
from reshard.formats.own_files import own_files, storage_ranks
from reshard.storage.location import locate

SAMPLES = Path(__file__).parents[1] / "data" / "mindspore"
FOLDERS = [
    SAMPLES / tree / "checkpoint" / f"iteration_{iteration:08d}"
    for tree, iteration in (("ckpt2", 5), ("ckpt2", 10), ("ckpt2_dedup", 5), ("ckpt2_dedup", 10), ("ckpt2_named", 7))
]
TP2 = {"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"]}]}


def content(*files: Path) -> Arrays:
    return {key: array for file in files for key, array in original_reader.read_shard_file(file).items()}


def written_by(folder: Path) -> dict[int, list[Path]]:
    """Each rank's files, as metadata.json has it."""
    found: dict[int, set[Path]] = {}
    for holders in json.loads((folder / "metadata.json").read_text())["storage_data"].values():
        for holder in holders:
            found.setdefault(holder["storage_rank"], set()).add(folder / holder["file_name"])
    return {rank: sorted(files) for rank, files in found.items()}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parts[-3]}-{folder.name}")
def test_a_rank_gets_what_its_files_hold(folder: Path) -> None:
    files = written_by(folder)
    with reshard.open(folder) as opened:
        assert opened.ranks() == sorted(files)
        for rank, own in files.items():
            assert_same(opened.stored(rank), content(*own))
            told = {key: shape for key, (_, shape) in opened.stored_info(rank).items()}
            assert told == {key: array.shape for key, array in content(*own).items()}


def test_the_number_of_a_file_is_not_taken_for_a_rank(tmp_path: Path) -> None:
    """Rank 1 had nothing to write: the second file is rank 2's."""
    folder = tmp_path / "iteration_00000001"
    folder.mkdir()
    files = ("a-model-0000000-0000002.safetensors", "a-model-0000001-0000002.safetensors")
    save_file({"w": np.zeros((2, 2), np.float32)}, folder / files[0])
    save_file({"w": np.ones((2, 2), np.float32)}, folder / files[1])
    write_metadata(folder, files, ranks=(0, 2))
    with reshard.open(folder) as opened:
        assert opened.ranks() == [0, 2]
        assert (opened.stored(2)["w"] == 1).all()
        with pytest.raises(ArgumentError, match="rank 1 did not save"):
            opened.stored(1)


def write_metadata(folder: Path, files: tuple[str, str], ranks: tuple[int, int], **holder: Any) -> None:
    """A tensor `w` in two parts, the first whole ranks 0 and 1 hold, and who wrote each."""
    layout = {"device_matrix": [2, 2], "tensor_map": [1, -1], "interleaved_parallel": False, "alias_name": ["a", "b"]}
    tensor = {
        "properties": {"dtype": "Float32", "replica_id": 0, "allow_shape_mismatch": False, "allow_to_save": True},
        "global_shape": [4, 2],
        "axis_fragmentations": [2, 1],
        "layout": {**layout, "rank_list": [0, 1, 2, 3]},
        "chunk": [{"global_offset": [n], "local_shape": [2, 2]} for n in (0, 1)],
    }
    storage = {
        f"('w', ({n},))": [
            {"file_name": files[n], "storage_rank": ranks[n], "rank_group": [2 * n, 2 * n + 1], **holder}
        ]
        for n in (0, 1)
    }
    text = json.dumps({"state_dict_metadata": {"w": tensor}, "storage_data": storage})
    (folder / "metadata.json").write_text(text)


def test_one_device_without_metadata() -> None:
    folder = SAMPLES / "ckpt2_single" / "checkpoint" / "iteration_00000003"
    with reshard.open(folder) as opened:
        assert opened.ranks() == [0]
        assert_same(opened.stored(0), content(*folder.glob("*.safetensors")))


def test_a_save_of_ours_with_a_rank_that_wrote_nothing(tmp_path: Path) -> None:
    reshard.save_file({"w": np.arange(8.0)}, tmp_path / "w.safetensors")
    layout = {"mesh": {"dp": 3}, "rules": [{"match": "*"}]}
    reshard.convert(tmp_path / "w.safetensors", tmp_path / "root", layout=layout, iteration=4)
    with reshard.open(tmp_path / "root") as opened:
        assert opened.verified
        assert opened.ranks() == [0, 1, 2]
        stored = [opened.stored(rank) for rank in opened.ranks()]
    assert [list(one) for one in stored] == [["w"], [], []]
    assert_same(stored[0], {"w": np.arange(8.0)})


def test_arrays_come_as_they_lie_in_the_file(tmp_path: Path) -> None:
    """Flat and joined arrays under the name of the join, others in their storage order."""
    a, b = np.arange(12, dtype=np.float32).reshape(3, 4), np.arange(5, dtype=np.float32)
    c = np.arange(6, dtype=np.int32).reshape(2, 3)
    reshard.save_file({"a": a, "b": b, "c": c}, tmp_path / "w.safetensors")
    layout = {
        "mesh": {"dp": 2},
        "rules": [
            {"match": ["a", "b"], "flat": {"axes": ["dp"], "join": "joined"}},
            {"match": "c", "stored": [1, 0]},
        ],
    }
    reshard.convert(tmp_path / "w.safetensors", tmp_path / "files", layout=layout, to="safetensors")
    with reshard.open(tmp_path / "files") as opened:
        assert opened.ranks() == [0, 1]
        for rank in (0, 1):
            assert_same(opened.stored(rank), content(tmp_path / "files" / f"rank_{rank}.safetensors"))
        joined = np.concatenate([opened.stored(rank)["joined"] for rank in (0, 1)])
        assert joined[:17].tolist() == [*a.ravel(), *b]
        assert opened.stored(0)["c"].tolist() == c.T.tolist()
        assert list(opened.stored(1, keys=["c"])) == list(opened.stored(1, keys="c")) == ["c"]


def converted(tmp_path: Path) -> Path:
    reshard.save_file({"w": np.arange(1 << 16, dtype=np.float32)}, tmp_path / "w.safetensors")
    reshard.convert(tmp_path / "w.safetensors", tmp_path / "root", layout=TP2, iteration=4)
    return tmp_path / "root" / "iteration_00000004"


def test_damage_is_found_while_a_rank_reads(tmp_path: Path) -> None:
    folder = converted(tmp_path)
    file = folder / "model-0000001-0000002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.chmod(0o640)
    file.write_bytes(data)
    with reshard.open(folder) as opened:
        assert opened.stored(0)["w"].size == 1 << 15
        with pytest.raises(DamagedFileError, match="model-0000001"):
            opened.stored(1)
        assert opened.stored(1, verify="structure")["w"].size == 1 << 15


def test_a_file_that_was_replaced_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "iteration_00000007"
    shutil.copytree(FOLDERS[-1], folder)
    with reshard.open(folder) as opened:
        file = written_by(folder)[1][0]
        file.unlink()
        save_file({"other": np.zeros(3)}, file)
        with pytest.raises(DamagedFileError, match="is not the file that was opened before"):
            opened.stored(1)


def test_what_cannot_be_asked(tmp_path: Path) -> None:
    reshard.save_file({"w": np.zeros(3)}, tmp_path / "w.safetensors")
    for whole in (tmp_path / "w.safetensors", SAMPLES / "full_hf"):
        with reshard.open(whole) as opened:
            assert opened.ranks() == []
            with pytest.raises(ArgumentError, match="holds whole tensors"):
                opened.stored(0)
    with reshard.open(FOLDERS[-1]) as opened:
        with pytest.raises(ArgumentError, match=r"rank 4 did not save.*\nhint: it was saved by ranks 0, 1, 2, 3$"):
            opened.stored(4)
        with pytest.raises(KeyNotFoundError, match=r"rank 1 .* holds no `nothing`"):
            opened.stored(1, keys=["nothing"])
        with pytest.raises(ArgumentError, match='"touched" or "structure"'):
            opened.stored(1, verify="full")
        opened.close()
        with pytest.raises(ReshardError, match="closed"):
            opened.stored(1)


def test_a_file_of_two_ranks(tmp_path: Path) -> None:
    with pytest.raises(DamagedFileError, match="`f` was written by rank 3 and by rank 4"):
        storage_ranks(
            b'{"storage_data": {"a": [{"file_name": "f", "storage_rank": 3}], '
            b'"b": [{"file_name": "f", "storage_rank": 4}]}}',
            "metadata.json",
        )
    for holder in ({"file_name": "f", "storage_rank": True}, {"file_name": 1, "storage_rank": 1}, {"file_name": "f"}):
        text = json.dumps({"storage_data": {"a": [holder]}})
        with pytest.raises(DamagedFileError, match="`file_name` or `storage_rank` is invalid"):
            storage_ranks(text.encode(), "metadata.json")
    with pytest.raises(ArgumentError, match=r"nothing records which rank wrote `x.safetensors`"):
        own_files(locate(tmp_path), ["rank_0.safetensors", "x.safetensors"], None)


def test_files_that_are_written_together_are_those_written_alone(tmp_path: Path) -> None:
    arrays = {f"a{i}": np.arange(i + 1, dtype=np.float32) for i in range(3000)} | {"big": np.zeros(600_000, np.float32)}
    reshard.save_file(arrays, tmp_path / "all.safetensors")
    with reshard.open(tmp_path / "all.safetensors") as checkpoint:
        index = checkpoint.data.index
        requests = [index.whole_request([f"b{i}", "c"], [f"a{i}", f"a{i + 1}"]) for i in range(0, 2999, 37)]
        requests.insert(1, index.whole_request(["big"]))
        names = [f"{i}.safetensors" for i in range(len(requests))]
        for folder in ("together", "alone"):
            (tmp_path / folder).mkdir()
        pairs = list(zip(names, requests, strict=True))
        together = index.write_small(str(tmp_path / "together"), pairs, dtype="F16", metadata={"x": "y"}, durable=False)
        assert [one is None for one in together] == [i == 1 for i in range(len(names))]
        for (name, request), record in zip(pairs, together, strict=True):
            plan = index.plan(request, dtype="F16")
            assert index.request_bytes([request], dtype="F16") == [plan.n_bytes]
            alone = plan.write(str(tmp_path / "alone" / name), metadata={"x": "y"}, durable=False)
            if record is not None:
                assert (tmp_path / "together" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
                assert (record.n_bytes, record.checksums) == (alone.n_bytes, alone.checksums)
        with pytest.raises(KeyNotFoundError, match="nothing"):
            index.whole_request(["nothing"])
        assert not (tmp_path / "together" / "1.safetensors").exists()
    assert len(list((tmp_path / "together").iterdir())) == len(names) - 1


@pytest.mark.parametrize("dtype", [None, "F64"])
@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1), slice(0, None, 2), slice(30, 90)])
def test_a_file_of_stored_arrays_is_that_of_the_same_arrays_in_memory(
    order: slice, dtype: Literal["F64"] | None, tmp_path: Path
) -> None:
    # Runs of arrays that follow each other in their file are copied as one; from memory each is copied alone.
    random = np.random.default_rng(1)
    kinds: list[tuple[Any, tuple[int, ...]]] = [(np.float32, (3, 5)), (np.int16, ()), (np.float32, (0, 2))]
    arrays = {f"w{i}": random.integers(0, 99, kinds[i % 3][1]).astype(kinds[i % 3][0]) for i in range(120)}
    arrays["w60"] = random.random((700, 500), np.float32)
    reshard.save(tmp_path / "root", 1, arrays, commit={"durable": False})
    keys = list(arrays)[order]
    with reshard.open(tmp_path / "root") as checkpoint:
        index = checkpoint.data.index
        plan = index.plan(index.whole_request(keys), dtype=dtype)
        found = plan.write(str(tmp_path / "found"), metadata={"a": "b"}, durable=False)
    entries = [
        (key, dtype, arrays[key].shape, arrays[key].astype(np.float64))
        if dtype and arrays[key].dtype == np.float32
        else (key, "I16" if arrays[key].dtype == np.int16 else "F32", arrays[key].shape, arrays[key])
        for key in keys
    ]
    expected = _core.write_arrays(str(tmp_path / "expected"), entries, metadata={"a": "b"}, durable=False)
    assert (tmp_path / "found").read_bytes() == (tmp_path / "expected").read_bytes()
    assert (found.header_checksum, found.checksums) == (expected.header_checksum, expected.checksums)


def test_damage_in_a_run_of_arrays_names_an_array_of_the_damaged_chunk(tmp_path: Path) -> None:
    arrays = {f"w{i:03}": np.full(1000, i, np.float64) for i in range(200)}
    reshard.save(tmp_path / "root", 1, arrays, commit={"durable": False})
    (shard,) = (tmp_path / "root").glob("iteration_*/model-*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DamagedFileError, match="differ from what was written") as caught:
        reshard.convert(tmp_path / "root", tmp_path / "hf", to="huggingface")
    start = len(data) // (256 << 10) * (256 << 10)  # of the last chunk
    assert caught.value.key == f"w{(start - (len(data) - 200 * 8000)) // 8000:03}"
