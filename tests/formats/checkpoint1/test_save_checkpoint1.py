"""`reshard.save(format="checkpoint1")`: the original's names, scalars, modes and order of things, read by its rules."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import original_reader1 as original
from tests.helpers.arrays import as_bytes
from tests.helpers.oracle import local_arrays
from tests.helpers.original_reader import read_shard_file
from tests.helpers.original_worlds import draw_world
from tests.helpers.strategies import cases
from tests.helpers.threads import in_threads

import reshard
from reshard.commit import protocol
from reshard.commit.session import forget_all
from reshard.errors import ArgumentError, MismatchError, ReshardError, UnsupportedError
from reshard.formats.checkpoint1 import save_plan as rank_plan
from reshard.formats.checkpoint1.names import FileName, parse_file_name
from reshard.formats.checkpoint1.save_plan import FolderView, Naming
from reshard.ranks.messages import decode, encode
from reshard.write import background

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.formats.checkpoint1.names import FileKind

SAMPLES = Path(__file__).parents[2] / "data" / "mindspore" / "ckpt1"
TP4 = {"mesh": {"tp": 4}, "rules": [{"match": "*", "cut": ["tp"]}]}
TP2 = {"mesh": {"tp": 2}, "rules": [{"match": "*.w", "cut": ["tp"]}, {"match": "*"}]}
EQUAL = {"mesh": {"dp": 2}, "rules": [{"match": "*"}]}
W = np.arange(12.0, dtype=np.float32).reshape(4, 3)


@pytest.fixture(autouse=True)
def _a_run_of_its_own() -> Iterator[None]:
    yield
    new_run()


def new_run() -> None:
    """As a process that was started again."""
    protocol.release()
    forget_all()


def save(root: Path, iteration: int, model: Any, optimizer: Any = None, **options: Any) -> Any:
    given: dict[str, Any] = {"commit": {"durable": False}, "timeout": 20, "format": "checkpoint1"} | options
    return reshard.save(root, iteration, model, optimizer, **given)


def tree(output: Path) -> set[str]:
    """What the original would see: every file that is not ours alone."""
    names = (str(path.relative_to(output)) for path in output.rglob("*") if path.is_file())
    return {name for name in names if not re.search(r"/\.|saves\.jsonl|\.extra\.|^strategy/", name)}


def together(n_ranks: int, work: Any) -> list[Any]:
    results = in_threads(n_ranks, work)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


# -- a run of the original, made again


def sample_arrays(path: Path) -> dict[str, np.ndarray]:
    return {name: array for name, array in read_shard_file(path).items() if name not in original_scalars()}


def original_scalars() -> tuple[str, ...]:
    return ("epoch_num", "step_num", "global_step", "loss_scale", "global_batch_size")


def test_a_run_of_the_original_made_again(tmp_path: Path) -> None:
    """Four ranks, sinks of two steps, saves at 10 to 40 of which three stay, the weights alone besides; then a second
    run. Names, retention, meta.json, tensors, scalars and `__metadata__` are those of the original's own trees.
    """
    output = tmp_path / "output"

    def run(sample: Path, steps: list[int], suffix: str) -> None:
        def work(group: Any) -> None:
            for iteration in steps:
                name = f"llama2_7b_rank_{group.rank}{suffix}-{iteration // 2}_2.safetensors"
                path = sample / "checkpoint" / f"rank_{group.rank}" / name
                if not path.exists():  # the first, which did not stay
                    path = path.with_name(path.name.replace("-5_", "-10_"))
                arrays = sample_arrays(path)
                states = {key: arrays.pop(key) for key in list(arrays) if key.startswith("adam")}
                save(
                    output / "checkpoint",
                    iteration,
                    arrays,
                    states,
                    layout=TP4,
                    group=group,
                    files={"dedup": False, "prefix": "llama2_7b"},
                    keep=3,
                    format={"name": "checkpoint1", "sink_size": 2, "save_network_params": True},
                    common={"global_batch_size": 8, "loss_scale": 65536.0},
                )

        together(4, work)
        new_run()

    for sample, steps, suffix in (("output", [10, 20, 30, 40], ""), ("output_second_run", [50], "_1")):
        run(SAMPLES / sample, steps, suffix)
        assert tree(output) == tree(SAMPLES / sample)
        for name in tree(output):
            mine, theirs = output / name, SAMPLES / sample / name
            if name.endswith(".json"):
                assert mine.read_bytes() == theirs.read_bytes()
            else:
                assert as_bytes(read_shard_file(mine)) == as_bytes(read_shard_file(theirs)), name
                assert original.header(mine) == original.header(theirs)
        files = original.resume(output / "checkpoint")
        assert [path.name for path in files.values()] == [
            f"llama2_7b_rank_{rank}{suffix}-{steps[-1] // 2}_2.safetensors" for rank in range(4)
        ]


@pytest.mark.parametrize(
    ("mask", "private", "modes"),
    [
        (0o022, False, ("0o755", "0o644", "0o444")),
        (0o027, False, ("0o750", "0o640", "0o440")),
        (0o022, True, ("0o700", "0o600", "0o400")),
    ],
)
def test_who_may_read_a_save_is_told_by_the_umask(
    tmp_path: Path,
    mask: int,
    private: bool,  # noqa: FBT001
    modes: tuple[str, str, str],
) -> None:
    folder_mode, file_mode, weights_mode = modes
    before = os.umask(mask)
    try:
        reshard.save(
            tmp_path / "root",
            4,
            {"w": np.ones((2, 2))},
            format={"name": "checkpoint1", "sink_size": 2},
            commit={"private": private},
            extra={"seed": 3},
            layout={"mesh": {"tp": 1}, "rules": [{"match": "*"}]},
        )
    finally:
        os.umask(before)
    marks = (".lock", ".writers")  # they tell nothing of the model
    for path in (tmp_path / "root", *(tmp_path / "root").rglob("*")):
        if path.name not in marks and path.parent.name not in marks:
            is_weights = path.suffix == ".safetensors"
            expected = folder_mode if path.is_dir() else weights_mode if is_weights else file_mode
            assert oct(path.stat().st_mode & 0o777) == expected, path


def test_the_oracle_answers_as_the_original_did() -> None:
    known = json.loads((SAMPLES / "resume_decisions.json").read_text())
    answers = {one["scenario"]: one["result_per_rank"] for one in known["scenarios"]}
    for scenario, output in (("intact tree", "output"), ("second-run tree, intact", "output_second_run")):
        files = original.resume(SAMPLES / output / "checkpoint")
        assert {f"rank_{rank}": path.name for rank, path in files.items()} == answers[scenario]


# -- any layout that a strategy can say


@pytest.mark.slow
def test_every_rank_gets_back_what_it_held() -> None:
    seen: Counter[str] = Counter()

    @cases(25)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        mapping, tensors, states = draw_world(data.draw)
        dedup, network = data.draw(st.booleans()), data.draw(st.booleans())
        prefix = data.draw(st.sampled_from([None, "run", "a-b"]))
        n_ranks = int(np.prod(list(mapping["mesh"].values())))
        held = [local_arrays(mapping, tensors, rank, sorted(states)) for rank in range(n_ranks)]
        with tempfile.TemporaryDirectory() as name:
            root = Path(name) / "checkpoint"

            def work(group: Any) -> Any:
                own = held[group.rank]
                return save(
                    root,
                    7,
                    {k: a for k, a in own.items() if k not in states},
                    {k: own[k] for k in own if k in states},
                    layout=mapping,
                    files={"dedup": dedup, "prefix": prefix},
                    group=group,
                    format={"name": "checkpoint1", "save_network_params": network},
                    extra={"own": reshard.per_rank(group.rank), "loop": [1, 2]},
                )

            reports = together(n_ranks, work)
            assert all(report.suffix == "1_7" for report in reports)
            files = original.resume(root)
            loaded = original.read(files, same_slices(held, mapping["mesh"]["pp"]))
            for rank, (own, found) in enumerate(zip(held, loaded, strict=True)):
                assert found.pop("epoch_num") == 1
                assert found.pop("step_num") == 7
                assert as_bytes(found) == as_bytes(own)
                assert original.header(files[rank])["remove_redundancy"] == str(dedup and n_ranks > 1)
                if network:
                    weights = {key: a for key, a in read_shard_file(files[rank]).items() if key in own}
                    weights = {key: array for key, array in weights.items() if key not in states}
                    file = FileName(prefix or "CKP", rank, None, "network", 1, 7, "safetensors")
                    alone = read_shard_file(root.with_name("checkpoint_network") / f"rank_{rank}" / file.name)
                    assert as_bytes(alone) == as_bytes(weights)
            with reshard.open(root) as opened:
                whole = opened.load()
                assert as_bytes({key: whole[key] for key in tensors}) == as_bytes(tensors)
                assert opened.extra(n_ranks - 1) == {"own": n_ranks - 1, "loop": [1, 2]}
            new_run()
        seen.update(["dedup" if dedup else "all", "zero" if "optimizer" in mapping else "no zero"])
        seen.update([f"{axis} > 1" for axis, size in mapping["mesh"].items() if size > 1])

    check()
    assert set(seen) == {"dedup", "all", "zero", "no zero", "pp > 1", "dp > 1", "tp > 1"}


def same_slices(held: list[dict[str, np.ndarray]], n_stages: int) -> dict[str, list[list[int]]]:
    """For each tensor the ranks of a stage that hold the same; the content is random, so that equal means same."""
    per_stage = len(held) // n_stages
    groups: dict[str, dict[tuple[int, bytes], list[int]]] = {}
    for rank, own in enumerate(held):
        for key, array in own.items():
            groups.setdefault(key, {}).setdefault((rank // per_stage, array.tobytes()), []).append(rank)
    return {key: list(of_key.values()) for key, of_key in groups.items()}


def test_what_is_kept_once_is_dealt_as_the_original_deals() -> None:
    """The groups of the original's de-duplicated sample, and who kept what of them there."""
    holders: dict[str, list[tuple[int, ...]]] = {
        "embed.weight": [(0, 2), (1, 3)],
        "head.weight": [(4, 6), (5, 7)],
        "l0.norm.weight": [(0, 1, 2, 3)],
        "l0.proj.weight": [(0, 2), (1, 3)],
        "l0.qkv.weight": [(0,), (1,), (2,), (3,)],
    }
    assignment = rank_plan.assign(holders, [0] * 4 + [1] * 4)
    kept = {
        name: [r for group in groups for r in group if name not in assignment.left_out(r)]
        for name, groups in holders.items()
    }
    assert kept == {
        "embed.weight": [0, 1],
        "head.weight": [4, 5],
        "l0.norm.weight": [0],
        "l0.proj.weight": [2, 3],
        "l0.qkv.weight": [0, 1, 2, 3],
    }
    across = rank_plan.assign({"shared": [(0, 1, 2, 3)]}, [0, 0, 1, 1])
    assert [rank for rank in range(4) if "shared" not in across.left_out(rank)] == [0, 2], "a copy in every stage"


# -- names


@pytest.mark.parametrize(
    ("iteration", "options", "expected"),
    [
        (10, {"sink_size": 2}, (5, 2)),
        (40, {"sink_size": 2}, (20, 2)),
        (41, {"sink_size": 2}, (21, 1)),
        (7, {"sink_size": 1}, (7, 1)),
        (20, {"steps_per_epoch": 20}, (1, 20)),
        (21, {"steps_per_epoch": 20}, (2, 1)),
        (40, {"steps_per_epoch": 20, "sink_size": 4}, (10, 4)),
        (45, {"epoch": 3}, (3, 45)),
        (45, {}, (1, 45)),
        (0, {"sink_size": 2}, (0, 2)),
    ],
)
def test_epoch_and_step_of_names(iteration: int, options: dict[str, int], expected: tuple[int, int]) -> None:
    assert rank_plan.position(iteration, **options) == expected


def test_counters_are_written_as_the_original_does(tmp_path: Path) -> None:
    common = {"epoch_num": 3, "loss_scale": 2.5, "global_batch_size": 16, "global_step": 44}
    save(tmp_path, 45, {"w": W}, {"global_step": np.array([9], np.int32)}, common=common)
    found = read_shard_file(tmp_path / "rank_0" / "CKP_rank_0-3_45.safetensors")
    scalars = {name: (str(found[name].dtype), found[name].shape, found[name].item()) for name in original_scalars()}
    assert scalars == {
        "epoch_num": ("int64", (), 3),
        "step_num": ("int64", (), 45),
        "global_step": ("int32", (1,), 9),  # what the caller gave as a tensor is that
        "loss_scale": ("float32", (), 2.5),
        "global_batch_size": ("int64", (), 16),
    }
    save(tmp_path, 46, {"w": W}, common={"global_step": 1 << 40}, format={"name": "checkpoint1", "sink_size": 2})
    found = read_shard_file(tmp_path / "rank_0" / "CKP_rank_0-23_2.safetensors")
    assert found["global_step"].item() == 1 << 40
    assert found["epoch_num"].item() == 23, "in sink mode epochs are sinks"


def test_counters_are_those_of_rank_0(tmp_path: Path) -> None:
    def work(group: Any) -> None:
        save(tmp_path, 4, {"w": W}, common={"global_step": group.rank + 5}, layout=EQUAL, group=group)

    together(2, work)
    assert reshard.open(tmp_path).common == reshard.CommonInfo(1, 4, 5)


def test_a_new_run_takes_the_next_number(tmp_path: Path) -> None:
    def names() -> list[str]:
        return sorted(path.name for path in (tmp_path / "rank_0").glob("*.safetensors"))

    save(tmp_path, 10, {"w": W}, files={"prefix": "a"})
    save(tmp_path, 20, {"w": W}, files={"prefix": "a"})
    new_run()
    save(tmp_path, 15, {"w": W}, files={"prefix": "a"})
    save(tmp_path, 20, {"w": W}, files={"prefix": "a"})
    assert names() == [f"a_rank_0{end}.safetensors" for end in ("-1_10", "-1_20", "_1-1_15", "_1-1_20")]
    assert original.resume(tmp_path)[0].name == "a_rank_0_1-1_20.safetensors"
    # A name is never used twice: saving the same once more is another run, too.
    assert save(tmp_path, 20, {"w": W + 1}, files={"prefix": "a"}).suffix == "2-1_20"
    assert (read_shard_file(original.resume(tmp_path)[0])["w"] == W + 1).all()
    assert save(tmp_path, 30, {"w": W}, files={"prefix": "a"}).suffix == "2-1_30"
    assert save(tmp_path, 30, {"w": W}, files={"prefix": "b"}).suffix == "1_30"


def test_what_stays(tmp_path: Path) -> None:
    for iteration in (10, 20, 30):
        save(tmp_path, iteration, {"w": W}, keep=5)
    new_run()
    for iteration in (5, 6, 7, 8):
        save(
            tmp_path,
            iteration,
            {"w": W, "v": W},
            keep=2,
            extra={"a": np.ones(1)},
            format={"name": "checkpoint1", "save_network_params": True, "save_trainable_params": ["v"]},
        )
    left = {path.name for path in (tmp_path / "rank_0").glob("CKP*")}
    of_first = {f"CKP_rank_0-1_{n}.safetensors" for n in (10, 20, 30)}
    endings = ("safetensors", "extra.json", "extra.arrays")
    assert left == of_first | {f"CKP_rank_0_1-1_{n}.{ending}" for n in (7, 8) for ending in endings}
    for kind, tag in (("network", "network"), ("trainable", "trainable_params")):
        folder = tmp_path.with_name(f"{tmp_path.name}_{kind}") / "rank_0"
        assert sorted(path.name for path in folder.iterdir()) == [
            f"CKP_rank_0_1-{tag}-1_{n}.safetensors" for n in (7, 8)
        ]
        assert set(read_shard_file(folder / f"CKP_rank_0_1-{tag}-1_8.safetensors")) == (
            {"v", "w"} if kind == "network" else {"v"}
        )
        shutil.rmtree(folder.parent)


def test_outdated_never_names_the_save_itself() -> None:
    files = [Naming("a", None, epoch, 2).file(0) for epoch in (5, 10, 15, 20)]
    others = [Naming("a", 1, 1, 2).file(0), Naming("b", None, 1, 2).file(0), Naming("a", None, 1, 2).file(0, "network")]
    for keep, expected in ((1, [5, 10, 15, 20]), (3, [5, 10]), (4, [5]), (5, []), (None, [])):
        found = rank_plan.outdated([*files, *others], Naming("a", None, 7, 2), keep)
        assert found == [(epoch, 2) for epoch in expected]
    assert rank_plan.outdated(files, Naming("a", None, 20, 2), 4) == []


# -- what is refused


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"files": {"prefix": "my_rank"}}, ArgumentError, "MindSpore Transformers refuses one with `rank`"),
        ({"files": {"prefix": "a/b"}}, ArgumentError, "cannot begin the name of a file"),
        ({"files": {"prefix": ""}}, ArgumentError, "cannot begin"),
        ({"files": {"prefix": ".a"}}, ArgumentError, "cannot begin"),
        ({"files": {"prefix": "a" * 200}}, ArgumentError, "cannot begin"),
        ({"format": {"name": "checkpoint1", "sink_size": 0}}, ArgumentError, "`sink_size` is 0"),
        ({"format": {"name": "checkpoint1", "steps_per_epoch": True}}, ArgumentError, "`steps_per_epoch` is True"),
        ({"keep": 0}, ArgumentError, "from 1 on, not 0"),
        ({"retention": {"keep": 2, "keep_every": 10}}, ArgumentError, "for Checkpoint 2.0"),
        (
            {"format": {"name": "checkpoint1", "save_trainable_params": ["nope"]}},
            ArgumentError,
            "`nope`, which is not in `model`",
        ),
        ({"format": {"name": "checkpoint1", "only_save_strategy": True}}, ArgumentError, "give `layout=`"),
        ({"format": {"name": "checkpoint2", "sink_size": 2}}, ArgumentError, "has no options, found `sink_size`"),
        ({"format": {"name": "checkpoint2", "only_save_strategy": True}}, ArgumentError, "found `only_save_strategy`"),
        ({"format": "checkpoint2", "sink_size": 2}, ArgumentError, "`sink_size` is a field of `Checkpoint1Options`"),
        ({"format": {"name": "checkpoint1", "save_trainable_params": True}}, ArgumentError, "needs the names of"),
        ({"format": "ckpt"}, ArgumentError, '"checkpoint2" and "checkpoint1" are accepted'),
        ({"common": {"odd": 1}}, ArgumentError, "`common` has `odd`"),
    ],
)
def test_refused(options: dict[str, Any], error: type[Exception], words: str, tmp_path: Path) -> None:
    save(tmp_path / "checkpoint", 1, {"w": W})
    before = tree(tmp_path)
    with pytest.raises(error, match=re.escape(words)):
        save(tmp_path / "checkpoint", 2, {"w": W}, **options)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("layout", "arrays", "words"),
    [
        (None, {"w": reshard.Shard(W[:2], (4, 3), (0, 0))}, "give `layout=`"),
        ({"mesh": {"tp": 2}, "rules": [{"match": "*", "flat": ["tp"]}]}, {"w": W.reshape(-1)[:6]}, "`w`"),
        ({"mesh": {"a": 2, "b": 1}, "rules": [{"match": "*", "flat": ["b"]}]}, {"w": W.reshape(-1)}, "`w`"),
        ({"mesh": {"tp": 2}, "rules": [{"match": "*", "cut": ["tp"], "blocks": {0: 2}}]}, {"w": W[:2]}, "`w`"),
    ],
    ids=["boxes", "flat", "flat over one rank", "blocks"],
)
def test_what_a_strategy_cannot_say(layout: Any, arrays: Any, words: str, tmp_path: Path) -> None:
    def work(group: Any) -> Any:
        own = arrays
        if layout is None:
            own = {"w": reshard.Shard(W[2 * group.rank : 2 * group.rank + 2], (4, 3), (2 * group.rank, 0))}
        shapes = {"w": (4, 3)} if layout is not None and "flat" in str(layout) else None
        return save(tmp_path / "checkpoint", 1, own, layout=layout, group=group, shapes=shapes)

    for result in in_threads(2, work):
        assert isinstance(result, UnsupportedError)
        assert words in str(result)
    assert not tree(tmp_path)


def test_two_uneven_dims_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    layout = {"mesh": {"a": 2, "b": 2}, "rules": [{"match": "*", "cut": ["a", "b"], "uneven": "ceil"}]}
    for result in save_tp2(tmp_path / "checkpoint", 1, {"w": np.arange(35.0).reshape(5, 7)}, layout):
        assert isinstance(result, UnsupportedError)
        assert "dim 1 is cut into parts of different sizes" in str(result)
    assert not tree(tmp_path)


def test_joined_state_is_refused_by_its_name(tmp_path: Path) -> None:
    rule = {"match": "w", "flat": {"axes": ["dp"], "join": "joined"}}
    layout = {"mesh": {"pp": 2, "dp": 2}, "rules": [rule]}
    part = W.reshape(-1)[:6]

    def work(group: Any) -> Any:
        shapes = {"w": (4, 3), "exp_avg.w": (4, 3)}
        return save(
            tmp_path / "checkpoint", 1, {"joined": part}, {"exp_avg.joined": part}, layout=layout, group=group,
            shapes=shapes,
        )  # fmt: skip

    for result in in_threads(4, work):
        assert isinstance(result, UnsupportedError)
        assert "it is joined with others into one array" in str(result)
    assert not tree(tmp_path)


def test_the_counters_that_a_save_adds_need_no_rule(tmp_path: Path) -> None:
    layout = {"mesh": {"tp": 2}, "rules": [{"match": "w", "cut": ["tp"]}]}
    common = {"global_step": 3, "loss_scale": 2.0, "global_batch_size": 8}
    for result in save_tp2(tmp_path / "checkpoint", 1, {"w": W}, layout, common=common):
        assert not isinstance(result, BaseException), result
    every_rule_cuts = {"mesh": {"tp": 4}, "rules": [{"match": "*", "cut": ["tp"]}]}
    for wanted in (layout, every_rule_cuts):
        loaded = reshard.load(tmp_path / "checkpoint", wanted, rank=1)
        assert as_bytes({"w": loaded.state["w"]}) == as_bytes(local_arrays(wanted, {"w": W}, 1))
        assert {name: loaded.state[name].item() for name in original_scalars()} == {
            "epoch_num": 1, "step_num": 1, "global_step": 3, "loss_scale": 2.0, "global_batch_size": 8,
        }  # fmt: skip


def save_tp2(
    root: Path, iteration: int, tensors: dict[str, np.ndarray], layout: Any = TP2, **options: Any
) -> list[Any]:
    n_ranks = int(np.prod(list(layout["mesh"].values())))

    def work(group: Any) -> Any:
        return save(root, iteration, local_arrays(layout, tensors, group.rank), layout=layout, group=group, **options)

    return in_threads(n_ranks, work)


TENSORS = {"a.w": W, "b.w": W + 20, "n": np.arange(3.0)}


@pytest.mark.parametrize(
    ("layout", "error", "words"),
    [
        ({"mesh": {"tp": 1}, "rules": [{"match": "*"}]}, ArgumentError, "checkpoints of more than the 1 ranks"),
        ({"mesh": {"dp": 2, "tp": 2}, "rules": TP2["rules"]}, ArgumentError, "checkpoints of fewer than the 4 ranks"),
        ({"mesh": {"tp": 2}, "rules": [{"match": "a.w", "cut": ["tp"]}, {"match": "*"}]}, MismatchError, "`b.w`"),
    ],
)
def test_a_root_is_of_one_world_and_one_strategy(
    layout: Any, error: type[ReshardError], words: str, tmp_path: Path
) -> None:
    root = tmp_path / "checkpoint"
    assert not [one for one in save_tp2(root, 1, TENSORS) if isinstance(one, Exception)]
    new_run()
    before = tree(tmp_path)
    for result in save_tp2(root, 2, TENSORS, layout):
        assert isinstance(result, error)
        assert words in str(result)
    assert tree(tmp_path) == before
    new_run()
    more = {**TENSORS, "c.w": W}  # what was not there before may come
    assert [one.suffix for one in save_tp2(root, 3, more)] == ["1-1_3"] * 2
    with reshard.open(root) as opened:
        assert as_bytes({key: opened.read(key) for key in more}) == as_bytes(more)


@pytest.mark.parametrize("layout", [{"mesh": {"tp": 2}, "rules": [{"match": "*"}]}, None], ids=["layout", "no layout"])
def test_what_no_strategy_lists_stays_with_every_rank(layout: Any, tmp_path: Path) -> None:
    """The original does not look for it elsewhere."""
    tensors = {"n": np.arange(3.0), "adam.beta": np.array(0.5)}

    def work(group: Any) -> Any:
        whole = (
            tensors if layout is not None else {k: reshard.Shard(a, a.shape, (0,) * a.ndim) for k, a in tensors.items()}
        )
        return save(tmp_path / "checkpoint", 1, whole, layout=layout, group=group)

    together(2, work)
    kept = [set(read_shard_file(path)) & tensors.keys() for path in original.resume(tmp_path / "checkpoint").values()]
    assert kept == ([{"n", "adam.beta"}, {"adam.beta"}] if layout is not None else [set(tensors)] * 2)
    with reshard.open(tmp_path / "checkpoint") as opened:
        assert as_bytes({key: opened.read(key) for key in tensors if layout is not None or not tensors[key].shape})


def test_only_the_strategy(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    reports = save_tp2(root, 1, TENSORS, format={"name": "checkpoint1", "only_save_strategy": True})
    assert {(one.path, one.n_files, one.suffix) for one in reports} == {(str(tmp_path / "strategy"), 2, None)}
    assert [path.name for path in sorted((tmp_path / "strategy").iterdir())] == [
        f"ckpt_strategy_rank_{rank}.ckpt" for rank in range(2)
    ]
    assert not [path for path in root.iterdir() if path.name.startswith("rank_")]
    bound = reshard.ModelLayout.from_strategy(tmp_path / "strategy").bind({k: a.shape for k, a in TENSORS.items()})
    assert [bound.layouts["a.w"].local_shape(1), bound.layouts["n"].local_shape(1)] == [(2, 3), (3,)]
    # Nothing is cut by it yet: another one takes its place.
    rows = {"mesh": {"tp": 2}, "rules": [{"match": "*.w", "cut": ["tp"]}, {"match": "*"}]}
    columns = {"mesh": {"tp": 1, "cp": 3}, "rules": [{"match": "*.w", "cut": [None, "cp"]}, {"match": "*"}]}
    for layout in (columns, rows):
        assert {
            one.n_files
            for one in save_tp2(root, 1, TENSORS, layout, format={"name": "checkpoint1", "only_save_strategy": True})
        } == {3 if layout is columns else 2}
    assert not list(tmp_path.glob(".*"))


def test_another_root_beside_has_its_own_strategy(tmp_path: Path) -> None:
    columns = {"mesh": {"tp": 3}, "rules": [{"match": "*.w", "cut": [None, "tp"]}, {"match": "*"}]}
    save_tp2(tmp_path / "checkpoint", 1, TENSORS)
    new_run()
    save_tp2(tmp_path / "other", 1, TENSORS, columns)
    for name, folder in (("checkpoint", "strategy"), ("other", "other/strategy")):
        assert (tmp_path / folder / "ckpt_strategy_rank_0.ckpt").exists()
        with reshard.open(tmp_path / name) as opened:
            assert as_bytes({key: opened.read(key) for key in TENSORS}) == as_bytes(TENSORS)


# -- in the background


def test_in_the_background(tmp_path: Path) -> None:
    w = W.copy()
    pending = save(
        tmp_path,
        10,
        {"w": w},
        blocking=False,
        keep=1,
        extra={"a": [1]},
        format={"name": "checkpoint1", "save_network_params": True},
    )
    w += 100
    assert pending.result(30).suffix == "1_10"
    second = save(tmp_path, 20, {"w": w}, blocking=False, keep=1)
    w += 100
    assert second.result(30).n_files == 1
    (file,) = (tmp_path / "rank_0").glob("*.safetensors")
    assert file.name == "CKP_rank_0-1_20.safetensors"
    assert (read_shard_file(file)["w"] == W + 100).all()
    background.finish_previous(30)


# -- health


def test_health_is_noted(tmp_path: Path) -> None:
    for iteration, status in ((1, 0), (2, 1), (3, None)):
        save(tmp_path / "checkpoint", iteration, {"w": W}, common={"ckpt_status": status})
    assert json.loads((tmp_path / "health_ckpts.json").read_text()) == [
        {"is_health": 0, "ckpt_name": "CKP_rank_0-1_1.safetensors"},
        {"is_health": 1, "ckpt_name": "CKP_rank_0-1_2.safetensors"},
    ]
    (tmp_path / "health_ckpts.json").write_text("{")
    report = save(tmp_path / "checkpoint", 4, {"w": W}, common={"ckpt_status": 0})
    assert "earlier saves is lost" in report.warnings[-1]


def test_values_that_are_not_finite_make_a_save_unhealthy_and_the_last_healthy_one_stays(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    for iteration in (1, 2, 3, 4):
        bad = W.astype(np.float32)
        bad.flat[1] = np.nan if iteration == 3 else -np.inf
        is_bad = iteration > 2
        report = save(root, iteration, {"w": bad if is_bad else W}, keep=1)
        assert any("recorded as unhealthy: `w` holds" in text for text in report.warnings) == is_bad
        there = {path.name for path in (root / "rank_0").glob("*.safetensors")}
        last = min(iteration, 2)
        assert there == {f"CKP_rank_0-1_{one}.safetensors" for one in (last, iteration)}
    statuses = json.loads((tmp_path / "health_ckpts.json").read_text())
    assert [(one["ckpt_name"], one["is_health"]) for one in statuses] == [
        ("CKP_rank_0-1_3.safetensors", 1),
        ("CKP_rank_0-1_4.safetensors", 1),
    ]
    save(root, 5, {"w": W}, keep=1)
    assert [path.name for path in (root / "rank_0").glob("*.safetensors")] == ["CKP_rank_0-1_5.safetensors"]
    save(root, 6, {"w": bad}, verify={"may_be_infinite": ["w"]})
    assert len(json.loads((tmp_path / "health_ckpts.json").read_text())) == 2


# -- hosts


def test_hosts_with_roots_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts of two ranks each that share no folder: each has its own, and its own strategy."""
    layout = {"mesh": {"dp": 2, "tp": 2}, "rules": TP2["rules"]}
    roots = [tmp_path / f"host{n}" / "checkpoint" for n in range(2)]

    def work(group: Any, **options: Any) -> Any:
        # What differs among hosts is what lies under a path; here it is the path, which ranks do not compare then.
        return save(
            roots[group.rank // 2], 1, local_arrays(layout, TENSORS, group.rank), layout=layout, group=group, **options
        )

    hosts = {0: "one", 1: "one", 2: "two", 3: "two"}
    real = reshard.verbs.save.facts_of  # type: ignore[attr-defined]

    def facts_of(*args: Any, **options: Any) -> Any:
        rank = int(options["host"])
        options["host"] = hosts[rank]
        options["options"] = {**options["options"], "root": ""}
        return real(*args, **options)

    import threading

    of_thread = threading.local()
    monkeypatch.setattr("reshard.verbs.save._host", lambda: str(of_thread.rank))
    monkeypatch.setattr("reshard.verbs.save.facts_of", facts_of)

    def on_host(options: dict[str, Any]) -> Any:
        def of_rank(group: Any) -> Any:
            of_thread.rank = group.rank
            return work(group, **options)

        return of_rank

    for result in in_threads(4, on_host({})):
        assert isinstance(result, ArgumentError)
        assert "`files=Files(dedup=False)`" in str(result)
    together(4, on_host({"files": {"dedup": False}}))
    for host, root in enumerate(roots):
        assert sorted(path.name for path in root.iterdir() if path.name[0] == "r") == [
            f"rank_{rank}" for rank in (2 * host, 2 * host + 1)
        ]
        assert len(list((root.parent / "strategy").iterdir())) == 4


def test_every_rank_reports_that_the_health_of_earlier_saves_is_lost(tmp_path: Path) -> None:
    (tmp_path / "health_ckpts.json").write_text("{")
    reports = save_tp2(tmp_path / "checkpoint", 1, TENSORS, common={"ckpt_status": 0})
    assert [any("health of earlier saves is lost" in text for text in one.warnings) for one in reports] == [True, True]


# -- views


def test_runs_of_ranks_that_have_diverged() -> None:
    views = [FolderView(runs=(0, 1)), FolderView(runs=(0,)), FolderView(runs=(0, 1, 4))]
    assert rank_plan.run_number(views, None) == 5
    assert rank_plan.run_number([FolderView(runs=(0,), taken=(0,)), FolderView()], 0) == 1
    for view in views:
        assert decode(FolderView, json.loads(json.dumps(encode(view)))) == view


def test_files_of_a_save_are_parsed_back() -> None:
    for run in (None, 1, 12):
        kinds: tuple[FileKind, ...] = ("full", "network", "trainable")
        for kind in kinds:
            file = Naming("my-net_2", run, 3, 4).file(7, kind)
            assert parse_file_name(file.name) == file


def test_a_tensor_under_the_name_of_a_counter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"`global_step` has the shape \(4, 3\)"):
        save(tmp_path / "run", 1, {"global_step": W, "w": W})
    assert not list((tmp_path / "run").glob("rank_*"))


@pytest.mark.parametrize("value", [-5, 2.5])
def test_a_counter_that_could_not_be_read_again_is_refused(value: float, tmp_path: Path) -> None:
    message = f"`global_step` is {value}, expected an integer"
    with pytest.raises(UnsupportedError, match=message):
        save(tmp_path, 1, {"w": W}, {"global_step": np.array([value])})
    later = np.array([7.0])
    pending = save(tmp_path, 1, {"w": W}, {"global_step": later}, blocking=False, ready=lambda: later.fill(value))
    with pytest.raises(UnsupportedError, match=message):
        pending.result()
    assert not list(tmp_path.glob("rank_0/*"))
    save(tmp_path, 1, {"w": W}, {"global_step": np.array([7.0])})
    assert reshard.open(tmp_path).common == reshard.CommonInfo(1, 1, 7)


@pytest.mark.parametrize(
    ("to", "counter", "message"),
    [
        ("checkpoint1", W, r"`global_step` has the shape \(4, 3\)"),
        ("checkpoint1", np.array(-5), "`global_step` is -5, expected an integer"),
        ("mindspore", np.array([2.5], np.float32), "`global_step` is 2.5, expected an integer"),
    ],
)
def test_a_conversion_refuses_a_tensor_under_the_name_of_a_counter(
    to: Any, counter: np.ndarray, message: str, tmp_path: Path
) -> None:
    reshard.save_file({"global_step": counter, "w": W}, tmp_path / "x.safetensors")
    with pytest.raises(UnsupportedError, match=message):
        reshard.convert(tmp_path / "x.safetensors", tmp_path / "out", to=to)
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]
