"""ShardedTensors, as FSDP1 saves them without a device mesh: whole tensors of the regions that ranks hold."""

from __future__ import annotations

import copyreg
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.helpers.command_line import run
from tests.helpers.fsdp1_files import optimizer_of_one, save_fsdp1
from tests.helpers.mesh_files import distributed, save_ranks
from tests.helpers.sharded_tensors import Called, changed, save_sharded, sharded
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.tensor import Shard as MeshShard

import reshard
import reshard.torch
from reshard.errors import (
    CheckpointNotFoundError,
    CoverageError,
    DamagedFileError,
    MismatchError,
    ReshardError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HALVES = [(((0, 0), (3, 2)), 0), (((3, 0), (2, 2)), 1)]
WHOLE = torch.arange(10.0).reshape(5, 2)


def assert_all(path: Any, expected: dict[str, torch.Tensor], part: Any = "model") -> None:
    with reshard.open(path) as checkpoint:
        assert set(checkpoint.keys(part)) == set(expected)
        for key, tensor in expected.items():
            found = reshard.torch.as_tensor(checkpoint.read(key))
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor), key


def expected_optimizer() -> dict[str, torch.Tensor]:
    return {f"optimizer.state.{name}": one for name, one in optimizer_of_one().items()}


@pytest.mark.slow(disk=False)
def test_a_run_of_fsdp1(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nested modules, two dtypes, a tied weight, a buffer, and tensors of which some ranks hold nothing."""
    save_fsdp1(tmp_path / "saved", 4, kinds=("SHARDED", "LOCAL"))
    actor = (tmp_path / "saved" / "SHARDED").rename(tmp_path / "global_step_7")
    model, optimizer = torch.load(tmp_path / "saved" / "full.pt"), expected_optimizer()
    assert_all(actor, dict(model))
    assert_all(actor, optimizer, "optimizer")
    assert not caplog.records
    with reshard.open(actor) as checkpoint:
        assert (checkpoint.format, checkpoint.iteration, checkpoint.ranks()) == ("fsdp-ranks", 7, [0, 1, 2, 3])
        assert checkpoint.data.slot_of("optimizer.state.block.0.weight.exp_avg") == ("exp_avg", "block.0.weight")
        assert checkpoint.extra(1)["optimizer.param_groups"][0]["lr"] == 0.1
        layout = {"mesh": {"tp": 2}, "rules": [{"match": "embed.weight", "cut": [None, "tp"]}, {"match": "*"}]}
        assert (checkpoint.load(layout, rank=1)["embed.weight"] == model["embed.weight"][:, 3:].numpy()).all()
    for to in ("huggingface", "checkpoint2"):
        result = run("convert", actor, tmp_path / to, "--to", to)
        assert result.exit_code == 0, result.output
    with reshard.open(tmp_path / "huggingface") as checkpoint:
        assert all(torch.equal(reshard.torch.as_tensor(checkpoint.read(key)), one) for key, one in model.items())
    with reshard.open(tmp_path / "checkpoint2") as checkpoint:
        assert torch.equal(
            reshard.torch.as_tensor(checkpoint.read("optimizer.state.embed.weight.exp_avg")),
            optimizer["optimizer.state.embed.weight.exp_avg"],
        )
    assert "fsdp-ranks, iteration 7" in run("inspect", actor).output
    assert run("verify", actor).exit_code == 0
    damaged = actor / "model_world_size_4_rank_2.pt"
    content = bytearray(damaged.read_bytes())
    content[content.index(model["embed.weight"][6:].numpy().tobytes()[:40])] ^= 1
    damaged.write_bytes(content)
    assert run("verify", actor).exit_code == 1
    with pytest.raises(UnsupportedError, match=r"_flat_param` holds the parameters of a module of FSDP1") as caught:
        reshard.open(tmp_path / "saved" / "LOCAL")
    assert "FULL_STATE_DICT" in str(caught.value.hint)


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize(("n_ranks", "options"), [(4, {"strategy": "HYBRID_SHARD"}), (2, {"mesh": True})])
def test_other_ways_of_fsdp1(n_ranks: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Copies of the model on pairs of ranks; a device mesh, with which torch saves DTensors."""
    save_fsdp1(tmp_path, n_ranks, **options)
    assert_all(tmp_path / "SHARDED", torch.load(tmp_path / "full.pt"))
    assert_all(tmp_path / "SHARDED", expected_optimizer(), "optimizer")


def test_a_run_goes_on_from_it(tmp_path: Path) -> None:
    """The optimizer is found by the names of the parameters."""
    live = torch.nn.Linear(2, 5, bias=False)
    moments = {"exp_avg": WHOLE + 1, "exp_avg_sq": WHOLE + 2}

    def optimizer_of(rank: int) -> dict[str, Any]:
        of_weight = {slot: sharded(one, HALVES, rank) for slot, one in moments.items()}
        state = {"weight": {"step": torch.tensor(3.0), **of_weight}}
        groups = [{**torch.optim.AdamW(live.parameters()).param_groups[0], "lr": 0.25, "params": ["weight"]}]
        return {"state": state, "param_groups": groups}

    save_sharded(tmp_path / "global_step_3", 2, lambda rank: {"weight": sharded(WHOLE, HALVES, rank)})
    save_sharded(tmp_path / "global_step_3", 2, optimizer_of, "optim")
    optimizer = torch.optim.AdamW(live.parameters())
    config = {"load_checkpoint": str(tmp_path / "global_step_3"), "resume_training": True}
    with reshard.torch.Checkpointer.from_config(config, root=tmp_path / "run", signals=()) as checkpointer:
        assert checkpointer.resume(model=live, optimizer=optimizer).initial_step == 3
    assert torch.equal(live.weight, WHOLE)
    state = optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == 0.25
    assert all(torch.equal(state["state"][0][slot], one) for slot, one in moments.items())


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_each_protocol_of_pickle(protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The class of the state of the process group is named in two ways."""
    plain = torch.save

    def save(state: object, path: Path) -> None:
        plain(state, path, pickle_protocol=protocol)

    monkeypatch.setattr(torch, "save", save)
    save_sharded(tmp_path, 2, lambda rank: {str(n): sharded(WHOLE + n, HALVES, rank) for n in range(2)})
    assert_all(tmp_path, {"0": WHOLE, "1": WHOLE + 1})


class Older(Called):
    """The form of torch before 1.13, of which a ShardedTensor is no tensor."""

    __class__ = property(lambda _: ShardedTensor)  # pickle compares it

    def __init__(self, tensor: Any) -> None:
        state = tensor.__reduce_ex__(2)[1][3]
        super().__init__(copyreg.__newobj__, (ShardedTensor,), state)  # type: ignore[attr-defined]


def test_the_form_of_older_versions(tmp_path: Path) -> None:
    save_sharded(tmp_path, 2, lambda rank: {"w": Older(sharded(WHOLE, HALVES, rank))})
    assert_all(tmp_path, {"w": WHOLE})


def test_several_regions_of_a_rank_and_none(tmp_path: Path) -> None:
    """Boxes of any place, also of a tensor of three dims; the ranks 1 and 2 hold nothing of some."""
    boxes = [(((0, 0), (5, 1)), 0), (((0, 1), (2, 1)), 0), (((2, 1), (3, 1)), 3)]
    cube = torch.arange(24).reshape(2, 3, 4)
    corners = [(((a, 0, b), (1, 3, 2)), a) for a in range(2) for b in (0, 2)]

    def make(rank: int) -> dict[str, Any]:
        return {
            "w": sharded(WHOLE, boxes, rank),
            "cube": sharded(cube, corners, rank),
            "whole": sharded(WHOLE, [(((0, 0), (5, 2)), 0)], rank),
            "plain": torch.ones(2),
        }

    save_sharded(tmp_path / "a", 4, make)
    expected = {"w": WHOLE, "cube": cube, "whole": WHOLE, "plain": torch.ones(2)}
    assert_all(tmp_path / "a", expected)
    assert_all([tmp_path / "a" / f"model_world_size_4_rank_{rank}.pt" for rank in range(4)], expected)
    with pytest.raises(UnsupportedError, match="is a ShardedTensor: each rank saved its shard"):
        reshard.open(tmp_path / "a" / "model_world_size_4_rank_0.pt")


def test_one_rank_holds_all(tmp_path: Path) -> None:
    save_sharded(tmp_path, 1, lambda rank: {"w": sharded(WHOLE, [(((0, 0), (5, 2)), 0)], rank)})
    assert_all(tmp_path, {"w": WHOLE})
    assert_all(tmp_path / "model_world_size_1_rank_0.pt", {"w": WHOLE})


def test_ranks_that_do_not_belong_together(tmp_path: Path) -> None:
    def refused(
        words: str, error: type[ReshardError], make: Callable[[int], dict[str, Any]], n_ranks: int = 2
    ) -> ReshardError:
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        save_sharded(tmp_path / "a", n_ranks, make)
        with pytest.raises(error, match=words) as caught:
            reshard.open(tmp_path / "a")
        assert caught.value.key == "w"
        assert "model_world_size_" in str(caught.value.path)
        return caught.value

    def whole_of(rank: int, whole: torch.Tensor, rows: int) -> dict[str, Any]:
        regions = [(((0, 0), (rows, 2)), 0), (((rows, 0), (whole.shape[0] - rows, 2)), 1)]
        return {"w": sharded(whole, regions, rank)}

    refused(
        r"rank_1\.pt`: `w` has a region of shape \(1, 2\) at \(0, 0\) as number 0, and a region of shape \(2, 2\) at "
        r"\(0, 0\) in .*rank_0\.pt",
        DamagedFileError,
        lambda rank: whole_of(rank, WHOLE, 2 - rank),
    )
    refused(
        r"a ShardedTensor of F32 and shape \(6, 2\), and a ShardedTensor of F32 and shape \(5, 2\)",
        DamagedFileError,
        lambda rank: whole_of(rank, torch.ones(5 + rank, 2), 2),
    )
    refused(
        "a ShardedTensor of F64 and shape",
        DamagedFileError,
        lambda rank: whole_of(rank, WHOLE.double() if rank else WHOLE, 2),
    )
    refused(
        "a tensor of F32 and shape",
        DamagedFileError,
        lambda rank: {"w": WHOLE} if rank else whole_of(rank, WHOLE, 2),
    )
    gap = refused(
        r"has 10 elements, and the files of the ranks 0, 1 hold 6 of them; the region of shape \(2, 2\) at \(3, 0\) is "
        "in none of the files",
        CoverageError,
        lambda rank: {"w": changed(sharded(WHOLE, HALVES, rank), **({"held": []} if rank else {}))},
    )
    assert gap.hint == "copy the files of all ranks into one folder"
    refused(
        r"hold 8 of them\n",
        CoverageError,
        lambda rank: {"w": changed(sharded(WHOLE, HALVES, rank), **listed(rank, [((0, 0), (3, 2)), ((4, 0), (1, 2))]))},
    )
    for shape in ((2, 2), (3, 2)):  # as many elements as the tensor has, and more

        def overlapping(rank: int, shape: tuple[int, ...] = shape) -> dict[str, Any]:
            return {"w": changed(sharded(WHOLE, HALVES, rank), **listed(rank, [((0, 0), (3, 2)), ((2, 0), shape)]))}

        refused(
            r"rank_0\.pt` and the files of other ranks: `w`: .* overlap in offset \(2, 0\) shape \(1, 2\)",
            CoverageError,
            overlapping,
        )


def listed(rank: int, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> dict[str, Any]:
    """A list of two regions, of which each rank holds one, whatever torch would say to it."""
    shards = [ShardMetadata(list(at), list(shape), f"rank:{n}/cpu") for n, (at, shape) in enumerate(boxes)]
    metadata = ShardedTensorMetadata(shards, WHOLE.shape, TensorProperties(dtype=torch.float32))
    at, shape = boxes[rank]
    part = WHOLE[at[0] : at[0] + shape[0]].clone()
    return {"metadata": metadata, "held": [Shard(part, shards[rank])]}


def test_files_under_wrong_names(tmp_path: Path) -> None:
    names = [f"model_world_size_2_rank_{rank}.pt" for rank in range(2)]
    save_sharded(tmp_path, 2, lambda rank: {"w": sharded(WHOLE, HALVES, rank)})
    (tmp_path / names[1]).rename(tmp_path / "kept")
    with pytest.raises(CheckpointNotFoundError, match=f"holds 1 of 2 files of the ranks; missing: `{names[1]}`"):
        reshard.open(tmp_path)
    shutil.copy(tmp_path / names[0], tmp_path / names[1])
    words = r"rank_1\.pt`: `w` was saved by rank 0 of 2, and the name of the file says rank 1 of 2"
    with pytest.raises(DamagedFileError, match=words):
        reshard.open(tmp_path)
    (tmp_path / "kept").rename(tmp_path / names[1])
    assert_all(tmp_path, {"w": WHOLE})
    with pytest.raises(CoverageError, match="hold 6 of them"):
        reshard.open([tmp_path / names[0], tmp_path / names[0]])


def test_lists_of_files_have_the_ranks_that_wrote_them(tmp_path: Path) -> None:
    """Their places in the list say nothing."""
    save_sharded(tmp_path / "a", 2, lambda rank: {"w": sharded(WHOLE, HALVES, rank), "b": WHOLE + rank})
    files = sorted((tmp_path / "a").iterdir(), reverse=True)
    with reshard.open(files) as checkpoint:
        assert torch.equal(reshard.torch.as_tensor(checkpoint.read("w")), WHOLE)
        with pytest.raises(MismatchError, match=r"the bytes on rank 0 differ from those on rank 1"):
            checkpoint.read("b")
    save_sharded(tmp_path / "b", 4, lambda rank: {"w": sharded(WHOLE, HALVES, rank)})
    mixed = [tmp_path / "a" / files[1].name, tmp_path / "b" / "model_world_size_4_rank_1.pt"]
    with pytest.raises(DamagedFileError, match=r"saved by a rank of 4, and `w` in .* by one of 2"):
        reshard.open(mixed)
    group = ShardedTensor.ProcessGroupState(1, 1, 2, 2)
    save_sharded(
        tmp_path / "c",
        2,
        lambda rank: {"w": sharded(WHOLE, HALVES, rank), "v": changed(sharded(WHOLE, HALVES, rank), group=group)},
    )
    with pytest.raises(DamagedFileError, match="`v` was saved by rank 1 of 2, and `w` by rank 0 of 2"):
        reshard.open(tmp_path / "c" / "model_world_size_2_rank_0.pt")


def test_copies_of_ranks_are_compared(tmp_path: Path) -> None:
    def make(rank: int) -> dict[str, Any]:
        values = WHOLE + 1 if rank == 3 else WHOLE
        return {"w": sharded(values, [(box, of + rank // 2 * 2) for box, of in HALVES], rank)}

    save_sharded(tmp_path, 4, make)
    with (
        reshard.open(tmp_path) as checkpoint,
        pytest.raises(MismatchError, match="the bytes on rank 3 differ from those on rank 1"),
    ):
        checkpoint.read("w")


def test_flat_parameters_are_refused(tmp_path: Path) -> None:
    """Each rank has a part of them, and no file says where a parameter begins."""
    rows = [(((0,), (6,)), 0), (((6,), (4,)), 1)]
    kinds: dict[str, Callable[[int], dict[str, Any]]] = {
        "sharded": lambda rank: {"a._flat_param": sharded(WHOLE.flatten(), rows, rank)},
        "plain": lambda rank: {"_flat_param": torch.ones(3) + rank},
        "older": lambda rank: {"module.flat_param": torch.ones(3) + rank},
    }
    for name, make in kinds.items():
        save_sharded(tmp_path / name, 2, make)
        file = tmp_path / name / "model_world_size_2_rank_0.pt"
        for path in (tmp_path / name, file, [file]):
            with pytest.raises(
                UnsupportedError, match=r"flat_param` holds the parameters of a module of FSDP1"
            ) as caught:
                reshard.open(path)
            assert "StateDictType.SHARDED_STATE_DICT" in str(caught.value.hint)
        result = run("convert", file, tmp_path / "out")
        assert result.exit_code == 1
        assert not (tmp_path / "out").exists()


def test_tensors_that_are_only_called_flat(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In a file whose name says nothing of ranks, a name alone is no reason to refuse it."""
    ordinary = {"flat_param.weight": WHOLE, "head._flat_param": WHOLE, "w": WHOLE}
    state = {"optimizer": {"state": {"_flat_param": {"exp_avg": WHOLE.flatten()}}}}
    torch.save(ordinary, tmp_path / "a.pt")
    torch.save(state, tmp_path / "b.pt")
    assert_all(tmp_path / "b.pt", {"optimizer.state._flat_param.exp_avg": WHOLE.flatten()}, "optimizer")
    assert not caplog.records
    assert_all(tmp_path / "a.pt", ordinary)
    assert "`flat_param.weight` is read as an ordinary tensor" in caplog.text
    with reshard.open([tmp_path / "a.pt", tmp_path / "b.pt"]) as checkpoint:
        assert set(checkpoint) == {*ordinary, "optimizer.state._flat_param.exp_avg"}
    reshard.convert(tmp_path / "a.pt", tmp_path / "ours.pt", to="torch")
    assert_all(tmp_path / "ours.pt", ordinary)


def test_regions_of_one_file_that_overlap(tmp_path: Path) -> None:
    """They are no part of a model that other files complete."""
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((0, 0), (3, 2)), ((2, 0), (3, 2))]

    def overlapping(rank: int) -> dict[str, Any]:
        parts = [listed(n, boxes) for n in range(2)]
        held = [one for part in parts for one in part["held"]]
        return {"w": changed(sharded(WHOLE, HALVES, rank), metadata=parts[0]["metadata"], held=held)}

    save_sharded(tmp_path, 2, overlapping)
    with pytest.raises(CoverageError, match=r"rank_0\.pt`: `w`: .* overlap in offset \(2, 0\)"):
        reshard.open(tmp_path / "model_world_size_2_rank_0.pt")


def test_flat_state_of_an_optimizer_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [(((0,), (6,)), 0), (((6,), (4,)), 1)]
    save_sharded(tmp_path, 2, lambda rank: {"w": sharded(WHOLE, HALVES, rank)})
    flat_state = {"a._flat_param": rows}
    save_sharded(
        tmp_path,
        2,
        lambda rank: {
            "state": {key: {"exp_avg": sharded(WHOLE.flatten(), of, rank)} for key, of in flat_state.items()},
            "param_groups": [],
        },
        "optim",
    )
    with reshard.open(tmp_path) as checkpoint:
        assert list(checkpoint.keys()) == ["w"]
    assert "state of the optimizer is not read" in caplog.text
    caplog.clear()
    save_sharded(tmp_path / "one", 1, lambda _: {"w": WHOLE})
    state = {"state": {"_flat_param": {"exp_avg": WHOLE.flatten()}, "w": {"exp_avg": WHOLE}}}
    save_sharded(tmp_path / "one", 1, lambda _: state, "optim")
    with reshard.open(tmp_path / "one") as checkpoint:
        assert list(checkpoint.keys()) == ["w", "optimizer.state.w.exp_avg"]
    assert "state of the optimizer is not read" in caplog.text
    with reshard.open(tmp_path / "one" / "optim_world_size_1_rank_0.pt") as checkpoint:  # as the warning says
        assert list(checkpoint) == ["state._flat_param.exp_avg", "state.w.exp_avg"]


def test_shards_of_a_mesh_beside_sharded_tensors(tmp_path: Path) -> None:
    save_sharded(tmp_path / "a", 2, lambda rank: {"w": sharded(WHOLE, HALVES, rank)})
    save_ranks(tmp_path / "b", (2,), lambda mesh: {"w": distributed(WHOLE, mesh, [MeshShard(0)])})
    shutil.copy(tmp_path / "b" / "model_world_size_2_rank_1.pt", tmp_path / "a")
    with pytest.raises(DamagedFileError, match=r"a DTensor of F32 and shape \(5, 2\), and a ShardedTensor"):
        reshard.open(tmp_path / "a")


def test_whole_weights_beside_the_shards(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They can be of another save: in the same folder both are named, in that of the model a warning says so."""
    save_sharded(tmp_path, 2, lambda rank: {"w": sharded(WHOLE, HALVES, rank)})
    (tmp_path / "huggingface").mkdir()
    reshard.save_file({"w": WHOLE.numpy()}, tmp_path / "huggingface" / "model.safetensors")
    assert_all(tmp_path, {"w": WHOLE})
    assert "the weights in" in caplog.text
    for name, format_ in (("pytorch_model.bin", "torch"), ("consolidated.safetensors", "weight-files")):
        reshard.convert(tmp_path / "huggingface", tmp_path / name, files={"check_names": False})
        with pytest.raises(UnsupportedError, match=f"of FSDP ranks, and weights of the format {format_}") as caught:
            reshard.open(tmp_path)
        for one in ("fsdp-ranks", format_):
            assert f"`format={one!r}`" in str(caught.value.hint)
            with reshard.open(tmp_path, format=one) as checkpoint:
                assert checkpoint.format == one
        (tmp_path / name).unlink()
    for name, format_ in (("adapter_model.safetensors", "weight-files"), ("pytorch_lora_weights.bin", "weight-files"),
        ("model.gguf", "gguf")):  # fmt: skip
        (tmp_path / name).write_bytes((tmp_path / "huggingface" / "model.safetensors").read_bytes())
        caplog.clear()
        assert_all(tmp_path, {"w": WHOLE})
        assert f"the other weights are not: `format='{format_}'` opens them" in caplog.text
        (tmp_path / name).unlink()
    caplog.clear()
    torch.save({"w": WHOLE}, tmp_path / "pytorch_model_fsdp.bin")  # of accelerate, which no format reads alone
    assert_all(tmp_path, {"w": WHOLE})
    assert "the shards of the ranks are read, and not `pytorch_model_fsdp.bin`" in caplog.text


# -- hostile files


def shard(at: Any = (0, 0), shape: Any = (3, 2), tensor: Any = None) -> Any:
    made = Shard.__new__(Shard)
    made.tensor = WHOLE[:3].clone() if tensor is None else tensor
    made.metadata = metadata_of(at, shape)
    return made


def metadata_of(at: Any, shape: Any) -> Any:
    made = ShardMetadata([0], [0], "rank:0/cpu")
    made.shard_offsets, made.shard_sizes = at, shape
    return made


def with_metadata(**changes: Any) -> dict[str, Any]:
    shards = [metadata_of([0, 0], [3, 2]), metadata_of([3, 0], [2, 2])]
    made = ShardedTensorMetadata(shards, WHOLE.shape, TensorProperties(dtype=torch.float32))
    for name, value in changes.items():
        if value is None:
            delattr(made, name)
        else:
            setattr(made, name, value)
    return {"metadata": made}


def with_group(**changes: Any) -> dict[str, Any]:
    made = ShardedTensor.ProcessGroupState(0, 0, 2, 2)
    for name, value in changes.items():
        if value is None:
            delattr(made, name)
        else:
            setattr(made, name, value)
    return {"group": made}


def itself() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


class NotShard:
    """A class that torch does not have, with the attributes of a shard."""

    def __init__(self) -> None:
        self.tensor, self.metadata = WHOLE[:3].clone(), metadata_of([0, 0], [3, 2])


def with_attribute(name: str, value: Any) -> Any:
    made = shard([0, 0], [3, 2])
    setattr(made, name, value)
    return [made]


HOSTILE: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "no state": (lambda: {"state": None}, "without its shards"),
    "an empty state": (lambda: {"state": ()}, "without its shards"),
    "two parts": (lambda: {"state": ([], 1)}, "without its shards"),
    "a number as state": (lambda: {"state": 7}, "without its shards"),
    "a dict as state": (lambda: {"state": {"_local_shards": []}}, "without its shards"),
    "no list of shards": (lambda: {"held": 3}, "shards that are no list"),
    "a number as shard": (lambda: {"held": [3]}, "else than a `Shard`"),
    "a tensor as shard": (lambda: {"held": [WHOLE[:3]]}, "else than a `Shard`"),
    "another class as shard": (lambda: {"held": [NotShard()]}, "else than a `Shard`"),
    "shards in themselves": (lambda: {"held": itself()}, "else than a `Shard`"),
    "a shard of text": (lambda: {"held": with_attribute("tensor", "x")}, "no dense tensor"),
    "a shard of None": (lambda: {"held": with_attribute("tensor", None)}, "no dense tensor"),
    "a sparse shard": (lambda: {"held": with_attribute("tensor", WHOLE[:3].to_sparse())}, "no dense tensor"),
    "a shard of another dtype": (lambda: {"held": with_attribute("tensor", WHOLE[:3].double())}, "is F64 of shape"),
    "a shard of another shape": (lambda: {"held": with_attribute("tensor", WHOLE)}, r"F32 of shape \[5, 2\], and F32"),
    "a shard without place": (lambda: {"held": with_attribute("metadata", None)}, "else than a `ShardMetadata`"),
    "a shard twice": (
        lambda: {"held": [shard([0, 0], [3, 2])] * 2},
        "its metadata does not list it, or lists it fewer times",
    ),
    "a shard that is not listed": (
        lambda: {"held": [shard([1, 0], [3, 2])]},
        "its metadata does not list it, or lists it fewer times",
    ),
    "a negative offset": (lambda: {"held": [shard([-1, 0], [3, 2])]}, "offset of -1"),
    "an offset beyond": (lambda: {"held": [shard([3, 0], [3, 2])]}, r"of a tensor of shape \[5, 2\]"),
    "an offset of 2^63": (lambda: {"held": [shard([2**63, 0], [3, 2])]}, "no integer"),
    "an end beyond 64 bits": (lambda: {"held": [shard([2**63 - 1, 0], [2**63 - 1, 2])]}, "of a tensor of shape"),
    "too few offsets": (lambda: {"held": [shard([0], [3, 2])]}, "of a tensor of shape"),
    "too many sizes": (lambda: {"held": [shard([0, 0], [3, 2, 1])]}, "of a tensor of shape"),
    "offsets as text": (lambda: {"held": [shard("00", [3, 2])]}, "no tuple"),
    "sizes as floats": (lambda: {"held": [shard([0, 0], [3.0, 2.0])]}, "no integer"),
    "a thousand offsets": (lambda: {"held": [shard([0] * 1000, [3, 2])]}, "of 1000 dims"),
    "no metadata": (lambda: {"metadata": None}, "else than a `ShardedTensorMetadata`"),
    "metadata of a shard": (lambda: {"metadata": metadata_of([0, 0], [3, 2])}, "else than a `ShardedTensorMetadata`"),
    "no size": (lambda: with_metadata(size=None), "without `size`"),
    "a size of 40 dims": (lambda: with_metadata(size=torch.Size([1] * 40)), "of 40 dims"),
    "another size": (lambda: with_metadata(size=torch.Size([6, 2])), r"shape \[6, 2\] in its metadata"),
    "a size of one dim": (lambda: with_metadata(size=torch.Size([10])), r"shape \[10\] in its metadata"),
    "no properties": (lambda: with_metadata(tensor_properties=None), "without `tensor_properties`"),
    "properties of another class": (lambda: with_metadata(tensor_properties=3), "else than a `TensorProperties`"),
    "another dtype": (
        lambda: with_metadata(tensor_properties=TensorProperties(dtype=torch.int32)),
        "of F32 and shape .*, and of I32",
    ),
    "a quantised dtype": (
        lambda: with_metadata(tensor_properties=TensorProperties(dtype=torch.qint8)),
        "dtype `torch.qint8`",
    ),
    "a dtype as text": (
        lambda: with_metadata(tensor_properties=TensorProperties(dtype="F32")),  # type: ignore[arg-type]
        "no name of torch",
    ),
    "no list of regions": (lambda: with_metadata(shards_metadata=None), "without `shards_metadata`"),
    "a number as regions": (lambda: with_metadata(shards_metadata=3), "shards that are no list"),
    "numbers as regions": (lambda: with_metadata(shards_metadata=[3]), "else than a `ShardMetadata`"),
    "regions in themselves": (lambda: with_metadata(shards_metadata=itself()), "else than a `ShardMetadata`"),
    "no regions": (lambda: with_metadata(shards_metadata=[]), "its metadata does not list it, or lists it fewer times"),
    "a region beyond": (lambda: with_metadata(shards_metadata=[metadata_of([0, 0], [9, 2])]), "of a tensor of shape"),
    "no group": (lambda: {"group": None}, "else than a `ShardedTensor.ProcessGroupState`"),
    "another class as group": (lambda: {"group": metadata_of([0], [1])}, "ProcessGroupState"),
    "no rank": (lambda: with_group(global_rank=None), "without `global_rank`"),
    "a rank of text": (lambda: with_group(global_rank="0"), "no integer"),
    "a negative rank": (lambda: with_group(global_rank=-1), "of -1"),
    "a rank beyond": (lambda: with_group(global_rank=2), "of rank 2 of 2 ranks"),
    "no ranks": (lambda: with_group(global_world_size=0), "of rank 0 of 0 ranks"),
    "made of nothing": (lambda: {"made": ()}, "without its dtype and its size"),
    "made of a number": (lambda: {"made": 3}, "without its dtype and its size"),
    "made of text": (lambda: {"made": ("a", "b", "c", "d")}, "no name of torch"),
    "another type": (lambda: {"kind": NotShard}, "which is not supported"),
    "another function": (lambda: {"function": NotShard, "kind": NotShard}, ""),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(name: str, tmp_path: Path) -> None:
    """Each is refused with what is wrong, in a folder and alone."""
    make, words = HOSTILE[name]
    save_sharded(
        tmp_path, 2, lambda rank: {"w": changed(sharded(WHOLE, HALVES, rank), **({} if rank else make())), "v": WHOLE}
    )
    for path in (tmp_path, tmp_path / "model_world_size_2_rank_0.pt"):
        if name == "another function":  # of no tensor: a value beside them
            continue
        with pytest.raises((DamagedFileError, UnsupportedError), match=words) as caught:
            reshard.open(path)
        assert re.search(r"rank_0\.pt.*`w`", str(caught.value)), str(caught.value)


def test_regions_that_are_shared_too_often(tmp_path: Path) -> None:
    """A list of regions is small in a file, and as many numbers as there are tensors with it."""
    shards = [metadata_of([0, 0], [3, 2])] * 5_000
    metadata = ShardedTensorMetadata(shards, WHOLE.shape, TensorProperties(dtype=torch.float32))
    save_sharded(
        tmp_path,
        1,
        lambda rank: {
            str(n): changed(sharded(WHOLE, [(((0, 0), (5, 2)), 0)], rank), metadata=metadata, held=[])
            for n in range(200)
        },
    )
    with pytest.raises(UnsupportedError, match="unfold into more than"):
        reshard.open(tmp_path)
