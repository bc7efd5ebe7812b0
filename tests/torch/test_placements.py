"""Placements of live tensors as layouts; torch itself is the oracle: what each rank's local tensor holds."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._dynamo  # what DTensor imports when it is first used: here once, instead of in every rank
from tests.helpers.cases import slow
from tests.helpers.mesh_files import as_rank
from tests.helpers.ranks import Job
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from reshard.errors import MismatchError, UnsupportedError
from reshard.layout import ModelLayout
from reshard.ranks.distinct import gather_distinct
from reshard.ranks.group import SingleProcess, TorchGroup
from reshard.torch import common_layout
from reshard.torch.placements import DigitLayout, Row, digits_of, local_part, part_of, row_of

if TYPE_CHECKING:
    from collections.abc import Mapping

LONG = 30.0


def layout_of(*known: Any) -> tuple[dict[str, Any] | None, str | None]:
    """The layout that was found, as a mapping, or the reason why there is none."""
    layout, reason = common_layout.layout_of(*known)
    return None if layout is None else layout.to_mapping(), reason


def told(group: TorchGroup, tensors: Mapping[str, torch.Tensor], mesh: DeviceMesh | None = None) -> Any:
    """What the ranks find out together: `(layout or None, reason or None)`, and what this rank holds."""
    row = row_of(tensors.values(), group.world_size, mesh)
    try:
        placed = {key: p for key, tensor in tensors.items() if (p := local_part(tensor, row, key)) is not None}
    except UnsupportedError as error:
        gather_distinct(group, error, (), LONG)
        raise
    partitions = {key: p.layout for key, p in placed.items()}
    rows, held = gather_distinct(group, [row, partitions], [Row, dict[str, DigitLayout]], LONG)
    return placed, layout_of(rows, held)


def shown(value: Any) -> dict[str, Any]:
    placed, (layout, reason) = value
    return {
        "layout": layout,
        "reason": reason,
        "arrays": {key: [p.local.tolist(), list(p.offset), p.layout.shape] for key, p in placed.items()},
    }


def check(said: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Compare what every rank holds with what the layout says it holds, element numbers and all."""
    layout, reason = said[0]["layout"], said[0]["reason"]
    assert all((one["layout"], one["reason"]) == (layout, reason) for one in said)
    shapes: dict[str, tuple[int, ...]] = {}
    for one in said:
        shapes |= {key: tuple(shape) for key, (_, _, shape) in one["arrays"].items()}
    if layout is None:
        return None
    bound = ModelLayout.from_mapping(layout).bind(shapes)
    for rank, one in enumerate(said):
        assert sorted(bound.local_names(rank)) == sorted(one["arrays"])
        for key, (numbers, offset, shape) in one["arrays"].items():
            local = torch.tensor(numbers).reshape(bound.layouts[key].local_shape(rank))
            wanted = torch.full_like(local, -1)
            whole = torch.arange(int(torch.tensor(shape).prod())).reshape(shape)
            for first, extents, at, strides in bound.layouts[key].tiles(rank):
                box = tuple(slice(f, f + n) for f, n in zip(first, extents, strict=True))
                torch.as_strided(wanted, extents, strides, at).copy_(whole[box])
                assert list(first) == offset
            assert torch.equal(local, wanted), (key, rank)
    assert isinstance(layout, dict)
    return layout


def arange(*shape: int) -> torch.Tensor:
    return torch.arange(int(torch.tensor(shape).prod())).reshape(shape)


# Meshes of each world: shape, names, the ranks in it (None: in order).
MESHES: dict[int, list[tuple[tuple[int, ...], tuple[str, ...] | None, list[int] | None]]] = {
    2: [((2,), ("tp",), None), ((2, 1), ("dp", "tp"), None), ((2,), None, [1, 0])],
    4: [((4,), None, None), ((2, 2), ("dp", "tp"), None), ((2, 2), ("dp", "tp"), [0, 2, 1, 3])],
    6: [((3, 2), ("dp", "tp"), None), ((2, 3), ("a", "b"), [5, 3, 1, 4, 2, 0])],
    8: [((2, 2, 2), ("dp", "cp", "tp"), None), ((4, 2), ("dp", "tp"), None), ((2, 4), None, None)],
}


@pytest.mark.parametrize("world_size", [2, *slow(size for size in MESHES if size != 2)])
def test_random_placements_lie_as_torch_lays_them(world_size: int) -> None:
    def work(group: TorchGroup) -> list[Any]:
        everything = []
        for shape, names, ranks in MESHES[world_size]:
            order = torch.arange(world_size) if ranks is None else torch.tensor(ranks)
            mesh = DeviceMesh("cpu", order.reshape(shape), mesh_dim_names=names)
            rng = random.Random(world_size)  # the same on all ranks
            tensors: dict[str, torch.Tensor] = {}
            for n in range(40):
                extents = tuple(rng.choice([1, 2, 3, 4, 5, 7, 8, 9, 12]) for _ in range(rng.randint(1, 3)))
                placements = [
                    rng.choice([Replicate(), Shard(rng.randrange(len(extents))), Shard(0)]) for _ in range(mesh.ndim)
                ]
                tensors[f"t{n}"] = distribute_tensor(arange(*extents), mesh, placements, src_data_rank=None)
            tensors["plain"] = arange(3)
            everything.append(shown(told(group, tensors)))
        return everything

    with Job(world_size, work) as job:
        values = job.values()
    for n, (shape, names, ranks) in enumerate(MESHES[world_size]):
        layout = check([value[n] for value in values])
        assert layout is not None
        sizes = [size for size in shape if size > 1]
        assert sorted(layout["mesh"].values()) == sorted(sizes)
        if names is not None:
            assert set(layout["mesh"]) == {name for name, size in zip(names, shape, strict=True) if size > 1}
        assert ("ranks" in layout) == (ranks in ([1, 0], [5, 3, 1, 4, 2, 0]))


@pytest.mark.slow(disk=False)
def test_right_to_left_cuts_and_flattened_dims() -> None:
    """`_StridedShard` in every order of three dims, even sizes; a flattened dim cuts once, uneven sizes included."""

    def work(group: TorchGroup) -> Any:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        tensors = {}
        for order in itertools.permutations(range(3)):
            # What torch's own conversion of a shard order into placements gives.
            placements: list[Any] = [Shard(0)] * 3
            for n, dim in enumerate(order):
                factor = 2 ** sum(1 for before in order[:n] if before > dim)
                placements[dim] = Shard(0) if factor == 1 else _StridedShard(0, split_factor=factor)
            name = "".join("abc"[dim] for dim in order)
            tensors[name] = distribute_tensor(arange(16, 2), mesh, placements, src_data_rank=None)
        flat = mesh["a", "b"]._flatten("ab")
        across = mesh["a", "c"]._flatten("ac")
        for n in (1, 4, 5, 6, 7):
            tensors[f"flat{n}"] = distribute_tensor(arange(n, 3), flat, [Shard(0)], src_data_rank=None)
            tensors[f"across{n}"] = distribute_tensor(arange(3, n), across, [Shard(1)], src_data_rank=None)
        return shown(told(group, tensors))

    with Job(8, work) as job:
        layout = check(job.values())
    assert layout is not None
    assert layout["mesh"] == {"a": 2, "b": 2, "c": 2}
    cuts = {rule["match"]: rule.get("cut") for rule in layout["rules"] if isinstance(rule["match"], str)}
    for order in itertools.permutations("abc"):
        assert cuts["".join(order)] == [list(order)]


# The last two are cut differently by FSDP2 over TP and by the placements that it tells: 9 rows over 2 x 4.
@pytest.mark.slow
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (3, 2), (2, 3), (4, 2)])
def test_fsdp_over_tensor_parallel(dp: int, tp: int) -> None:
    def work(group: TorchGroup) -> Any:
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        sizes = [1, 2, 3, 5, 6, 7, 8, 9, 11, 16]
        model = nn.Sequential()
        for n in sizes:
            model.add_module(f"c{n}", nn.Linear(3, n))
            model.add_module(f"r{n}", nn.Linear(n, 3))
        for parameter in model.parameters():
            parameter.data = arange(*parameter.shape).float()
        plan: dict[str, ParallelStyle] = {f"c{n}": ColwiseParallel() for n in sizes} | {
            f"r{n}": RowwiseParallel() for n in sizes
        }
        parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
        for module in model:
            fully_shard(module, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        return shown(told(group, dict(model.named_parameters())))

    with Job(dp * tp, work) as job:
        layout = check(job.values())
    assert layout is not None
    assert layout["mesh"] == {"dp": dp, "tp": tp}
    rules = {tuple(map(str, rule.get("cut", ()))): rule for rule in layout["rules"]}
    assert rules[("['tp', 'dp']",)]["uneven"] == "ceil"  # columns: TP is outermost though its mesh dim comes later
    assert ("dp", "tp") in rules  # rows


@pytest.mark.slow(disk=False)
def test_placements_that_are_no_cut_by_axes_are_refused() -> None:
    def work(group: TorchGroup) -> list[str]:
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        pending = DTensor.from_local(torch.ones(2), mesh, [Partial(), Replicate()], run_check=False)
        odd = distribute_tensor(arange(24), mesh, [_StridedShard(0, split_factor=3), Replicate()], src_data_rank=None)
        # As `_StridedShard` means it and as FSDP2 over TP cuts it are two things here.
        strided = [_StridedShard(0, split_factor=2), Shard(0)]
        nine = distribute_tensor(arange(9), mesh, strided, src_data_rank=None)
        texts = []
        for tensor in (pending, odd, nine):
            try:
                told(group, {"w": tensor})
            except UnsupportedError as error:
                texts.append(str(error))
            else:
                texts.append("")
        return texts

    with Job(8, work) as job:
        pending, odd, nine = job.values()[0]
    assert "is a sum whose parts lie on several ranks" in pending
    assert "`tensor.redistribute(placements=...)` carries out the sum" in pending
    assert "is cut into strides that are no cut by mesh dims" in odd
    assert "rank 6: `w`: this rank holds an array of shape (1,), and of a tensor of shape (9,)" in nine
    assert "rank 7: `w`: this rank holds an array of shape (0,)" in nine


@pytest.mark.slow
def test_slices_of_a_mesh_and_hybrid_sharding() -> None:
    """Tensors on slices are whole along the other dims, whose names are known from the root."""

    def work(group: TorchGroup) -> Any:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
        model = nn.Sequential(OrderedDict(a=nn.Linear(4, 6), b=nn.Linear(6, 5)))
        for parameter in model.parameters():
            parameter.data = arange(*parameter.shape).float()
        fully_shard(model, mesh=mesh["replicate", "shard"])
        tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
        tensors["tp"] = distribute_tensor(arange(3, 6), mesh["tp"], [Shard(1)], src_data_rank=None)
        return shown(told(group, tensors))

    with Job(8, work) as job:
        layout = check(job.values())
    assert layout == {
        "mesh": {"replicate": 2, "shard": 2, "tp": 2},
        "rules": [
            {"match": ["a.weight", "a.bias", "b.weight", "b.bias"], "cut": ["shard"], "uneven": "ceil"},
            {"match": "tp", "cut": [None, "tp"]},
            {"match": "*"},
        ],
    }


@pytest.mark.slow(disk=False)
def test_stages_of_a_pipeline() -> None:
    """Each rank has its own keys: on a mesh dim, on meshes of their own, and without any mesh."""

    def work(group: TorchGroup) -> list[Any]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "tp"))
        stage = group.rank // 2
        own = [DeviceMesh("cpu", [2 * n, 2 * n + 1], mesh_dim_names=("tp",)) for n in range(2)][stage]
        keys = [["embed.w", "layers.0.w", "layers.1.w"], ["layers.2.w", "layers.3.w", "head.w"]][stage]
        everything = [
            shown(told(group, {k: distribute_tensor(arange(5, 2), on, [Shard(0)], src_data_rank=None) for k in keys}))
            for on in (mesh["tp"], own)
        ]
        plain = {key: arange(5, 2) for key in keys}
        everything += [shown(told(group, plain)), shown(told(group, plain | {"shared": arange(2)}, mesh))]
        return everything

    with Job(4, work) as job:
        values = job.values()
    places = [
        {"match": ["embed.w", "layers.0.*", "layers.1.*"], "axis": "pp", "at": 0},
        {"match": ["layers.2.*", "layers.3.*", "head.w"], "axis": "pp", "at": -1},
    ]
    cut = {"match": ["embed.w", "layers.*.w", "head.w"], "cut": ["tp"], "uneven": "ceil"}
    meshes = [{"stage": 2, "tp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"stage": 2, "tp": 2}]
    for n, mesh in enumerate(meshes):
        layout = check([value[n] for value in values])
        assert layout is not None
        assert layout["mesh"] == mesh
        assert layout["rules"] == ([cut] if n < 2 else []) + [{"match": "*"}]
        assert [{**place, "axis": "pp"} for place in layout["place"]] == places


@pytest.mark.slow(disk=False)
def test_where_there_is_no_layout_the_reason_is_told() -> None:
    def work(group: TorchGroup) -> list[Any]:
        everything = []
        # Three ranks hold a key alone; so do ranks 0 and 3, as tied embeddings of the first and last stage.
        for alone in ({0, 1, 2}, {0, 3}):
            held = {"all": arange(3)} | ({"some": arange(4)} if group.rank in alone else {})
            everything.append(shown(told(group, held)))
        # A mesh over all ranks, and one that goes through them in no order of it.
        meshes = [DeviceMesh("cpu", [0, 3], mesh_dim_names=("tp",)), DeviceMesh("cpu", [1, 2], mesh_dim_names=("tp",))]
        mesh = meshes[group.rank in {1, 2}]
        everything.append(shown(told(group, {"w": distribute_tensor(arange(6), mesh, [Shard(0)])})))
        return everything

    with Job(4, work) as job:
        values = job.values()
    for n, reason in enumerate(
        [
            "some tensors are held only by ranks 0, 1, 2, which are not part of a mesh",
            "some tensors are held only by ranks 0, 3, which are not part of a mesh",
            "`w`: the ranks of its mesh [1, 2] do not lie regularly among all 4",
        ]
    ):
        assert check([value[n] for value in values]) is None
        assert reason in values[0][n]["reason"]
    # 3 x 2 and 2 x 3 over the same ranks.
    row = Row(6, spans=frozenset({(6, 2, "a"), (2, 1, "b"), (6, 3, "c"), (3, 1, "d")}))
    layout, told_reason = layout_of([(row, list(range(6)))], [({"w": DigitLayout((6,))}, list(range(6)))])
    assert (layout, told_reason) == (None, "its meshes cannot be combined: 3 ranks are not a multiple of 2")


def test_one_name_for_two_tensors_is_refused() -> None:
    row = Row(4)
    known = [({"w": DigitLayout((4,))}, [0, 1]), ({"w": DigitLayout((5,))}, [2, 3])]
    with pytest.raises(MismatchError, match=r"`w` is of shape \(4,\) on rank 0 and of shape \(5,\) on rank 2\nhint"):
        layout_of([(row, [0, 1, 2, 3])], known)
    known = [({"w": DigitLayout((4,))}, [0, 1]), ({"w": DigitLayout((4,), ((((2, 1),),),))}, [2, 3])]
    with pytest.raises(
        MismatchError, match=r"`w` is of shape \(4,\) on rank 0 and .*, dim 0 split by 2 on rank 2\nhint"
    ):
        layout_of([(row, [0, 1, 2, 3])], known)


def test_a_replicated_tensor_is_not_divided() -> None:
    with as_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        for tensor in (torch.zeros(3, 4), torch.zeros(())):
            replicated = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
            part = local_part(replicated, row_of([replicated], 2), "w")
            assert part is not None
            assert part.layout == DigitLayout(tuple(tensor.shape))


def test_state_that_is_not_cut_like_its_parameter_has_rules_of_its_own() -> None:
    row = Row(4, spans=frozenset({(4, 1, "dp")}))
    line = ((4, 1),)
    model = {f"layers.{n}.w": DigitLayout((8, 2)) for n in range(3)}
    cut = {f"m.{key}": DigitLayout((8, 2), ((line,),)) for key in model}
    layout, reason = layout_of([(row, [0, 1, 2, 3])], [(model, [0, 1, 2, 3])], [(cut, [0, 1, 2, 3])])
    assert layout == {
        "mesh": {"dp": 4},
        "rules": [{"match": "m.layers.*.w", "cut": ["dp"]}, {"match": "*"}],
        "optimizer": {"follow": False},
    }
    assert reason is None
    # Each state whole on its owner.
    owned = [({f"m.layers.{n}.w": DigitLayout((8, 2))}, [n]) for n in range(3)]
    layout, reason = layout_of([(row, [0, 1, 2, 3])], [(model, [0, 1, 2, 3])], owned)
    assert layout is not None
    assert layout["place"] == [{"match": f"m.layers.{n}.*", "axis": "dp", "at": n} for n in range(3)]
    assert layout["optimizer"] == {"follow": False}
    # State of another shape is whole, and follows all the same.
    small = {f"m.{key}": DigitLayout((8, 2)) for key in model} | {f"row.{key}": DigitLayout((8, 1)) for key in model}
    layout, reason = layout_of([(row, [0, 1, 2, 3])], [(model, [0, 1, 2, 3])], [(small, [0, 1, 2, 3])])
    assert layout == {"mesh": {"dp": 4}, "rules": [{"match": "*"}]}


def test_other_names_of_a_tensor_are_cut_like_it() -> None:
    row = Row(2, spans=frozenset({(2, 1, "tp")}))
    model = {"embed.w": DigitLayout((4, 2), ((((2, 1),),),))}
    layout, _ = layout_of([(row, [0, 1])], [(model, [0, 1])], (), {"head.w": "embed.w"})
    assert layout is not None
    assert layout["rules"] == [{"match": ["embed.w", "head.w"], "cut": ["tp"]}, {"match": "*"}]


@pytest.mark.parametrize(
    ("positions", "digits"),
    [
        ([3], ()),
        ([0, 1, 2], ((3, 1),)),
        ([1, 3], ((4, 2),)),
        ([0, 1, 4, 5], ((8, 4), (2, 1))),
        ([0, 4, 1, 5], ((2, 1), (8, 4))),  # flattened in another order
        ([1, 2], None),  # 1 is no start
        ([1, 0], None),
        ([0, 1, 3], None),
        ([0, 1, 2, 4], None),
        ([0, 0], None),
    ],
)
def test_digits(positions: list[int], digits: Any) -> None:
    assert digits_of(positions) == digits


def test_parts_are_those_of_torch_chunk() -> None:
    for extent, first, second in itertools.product(range(10), range(1, 5), range(1, 5)):
        for a, b in itertools.product(range(first), range(second)):
            chunks: list[list[int]] = [list(range(extent))]
            for n_parts, which in ((first, a), (second, b)):
                got = [c.tolist() for c in torch.chunk(torch.tensor(chunks[-1], dtype=torch.int64), n_parts)]
                chunks.append((got + [[]] * n_parts)[which])
            (offset,), (size,) = part_of((extent,), [[(first, a), (second, b)]])
            assert list(range(extent))[offset : offset + size] == chunks[-1]


def test_one_process_knows_everything() -> None:
    assert gather_distinct(SingleProcess(), [1, "a"], [int, str], LONG) == [[(1, [0])], [("a", [0])]]
    with pytest.raises(MismatchError):
        gather_distinct(SingleProcess(), MismatchError("no"), (), LONG)


def test_only_one_rank_of_each_kind_sends_what_it_knows() -> None:
    sent: list[Any] = []

    class Watched(SingleProcess):
        """Three ranks played by one process: this is rank 1, which knows what rank 0 knows; rank 2 knows more."""

        rank, world_size = 1, 3

        def gather(self, value: Any, *, root: int = 0, timeout: float) -> list[Any] | None:
            sent.append(value)
            return None

        def broadcast(self, value: Any, *, root: int = 0, timeout: float) -> Any:
            if not answers:
                some, more = (
                    {"part": 1, "digest": digests[n], "value": text} for n, text in enumerate(["some", "more"])
                )
                return {"value": [more, some]}
            return answers.pop(0)

        def session(self, label: str) -> Watched:
            return self

    from reshard.ranks.distinct import _digest

    digests = [_digest("some"), _digest("more")]
    same = _digest("same")
    answers = [{"value": {"all": [[same, digests[0]], [same, digests[0]], [same, digests[1]]]}}]
    known = gather_distinct(Watched(), ["same", "some"], [str, str], LONG)
    assert known == [[("same", [0, 1, 2])], [("some", [0, 1]), ("more", [2])]]
    assert sent == [{"value": [same, digests[0]]}, {"value": []}]
