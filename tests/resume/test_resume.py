"""Resume: the order of candidates, the decision, the counters."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.config import Config
from reshard.documents.common_info import CommonInfo
from reshard.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    DamagedFileError,
    ReshardError,
    UnsupportedError,
)
from reshard.resume import (
    BatchSchedule,
    CandidateFacts,
    Complete,
    Damaged,
    EpochStep,
    Folder,
    Refused,
    ResumeDecision,
    ResumeFacts,
    RunFacts,
    Scaling,
    decide,
    evaluate,
    order,
)
from reshard.resume.counters import saved_steps, scale_steps

DATA = Path(__file__).parents[1] / "data" / "mindspore"


def f(iteration: int, **what: Any) -> Folder:
    return Folder(iteration, f"iteration_{iteration:08d}", **what)


def saved(iteration: int, previous: int | None, generation: int = 1, *, tracked: bool = True, over: Any = ()) -> Folder:
    return f(iteration, is_tracked=tracked, generation=generation, previous_tracker=previous, passed_over=tuple(over))


S100, S200, S300 = saved(100, None), saved(200, 100), saved(300, 200)
UNTRACKED = saved(300, 200, tracked=False)

ORDERS: list[tuple[str, list[Folder], int | None, dict[str, Any], list[int]]] = [
    # what, folders, tracker, options, candidates
    ("nothing there", [], None, {}, []),
    ("the tracker's first, then downwards", [S100, S200, S300], 300, {}, [300, 200, 100]),
    ("left before the tracker moved: taken", [S100, S200, UNTRACKED], 200, {}, [300, 200, 100]),
    ("left before the very first tracker", [saved(100, None, tracked=False)], None, {}, [100]),
    ("tracked once, so rolled back on purpose", [S100, S200, S300], 200, {}, [200, 100]),
    ("untracked, but of another line", [S100, S200, saved(300, 100, tracked=False)], 200, {}, [200, 100]),
    ("untracked, saved when there was no tracker", [S100, S200, saved(300, None, tracked=False)], 200, {}, [200, 100]),
    ("above the tracker without a manifest", [f(5), f(10)], 5, {}, [5]),
    ("the original's, tracker lost", [f(5), f(10)], None, {}, [10, 5]),
    ("a tracker that names nothing", [f(5), f(10)], 777, {}, [10, 5]),
    ("a tracker that cannot be read", [f(5), f(10)], None, {"tracker_fault": "it is empty"}, [10, 5]),
    ("two untracked ones: the later run's first",
        [S200, saved(400, 200, 3, tracked=False), saved(500, 200, 2, tracked=False)], 200, {}, [400, 500, 200]),
    # 300 and 200 were found damaged, 100 was taken, and 150 is the first save after that
    ("passed over, tracker moved", [S100, saved(150, 300, 2, over=[300, 200]), S200, S300], 150, {}, [150, 100]),
    ("passed over, crash before the tracker moved",
        [S100, saved(150, 300, 2, tracked=False, over=[300, 200]), S200, S300], 300, {}, [150, 100]),
    ("passed over, tracker lost", [S100, saved(150, 300, 2, over=[300, 200]), S200, S300], None, {}, [150, 100]),
    ("passed over, then saved again by the new run",
        [S100, saved(150, 300, 2, over=[300, 200]), saved(200, 150, 2), S300], 200, {}, [200, 150, 100]),
    ("passed over, saved again by the new run, which went on",
        [S100, saved(150, 300, 2, over=[300, 200]), saved(200, 150, 2), saved(250, 200, 2), S300], 250, {},
        [250, 200, 150, 100]),
    ("passed over, then asked for by hand", [S100, saved(150, 300, 2, over=[300, 200]), S200, S300], 300, {},
        [300, 150, 100]),
    ("passed over by an older run: no word on a newer one",
        [saved(100, None, 1, over=[200]), saved(200, 100, 2)], 200, {}, [200, 100]),
    ("tracker only", [S100, S200, UNTRACKED], 200, {"policy": "tracker_only"}, [200]),
    ("tracker only, without one", [S100, S200], None, {"policy": "tracker_only"}, []),
    ("highest", [S100, S200, S300], 200, {"policy": "highest"}, [300, 200, 100]),
    ("highest, but not what was passed over",
        [S100, saved(150, 300, 2, over=[300]), S300], 150, {"policy": "highest"}, [150, 100]),
    ("exact", [S100, S200, S300], 300, {"exact": 200}, [200]),
    ("exact, even if passed over", [S100, saved(150, 300, 2, over=[300]), S300], 150, {"exact": 300}, [300]),
    ("exact, not there", [S100], 100, {"exact": 200}, []),
]  # fmt: skip


@pytest.mark.parametrize(("folders", "tracker", "options", "expected"), [case[1:] for case in ORDERS],
                         ids=[case[0] for case in ORDERS])  # fmt: skip
def test_the_order_of_candidates(
    folders: list[Folder], tracker: int | None, options: dict[str, Any], expected: list[int]
) -> None:
    for unordered in (folders, folders[::-1]):  # what is on disk has no order
        found = order(tuple(unordered), tracker, **options)
        assert [one.iteration for one in found.candidates] == expected
        refused = {one.iteration for one in found.refused}
        assert refused == {folder.iteration for folder in folders} - set(expected)
        assert all(one.reason for one in (*found.candidates, *found.refused))


@pytest.mark.parametrize(
    ("tracker", "options", "told"),
    [
        (777, {}, "it names iteration 777, which has no folder"),
        (None, {"tracker_fault": "it is empty"}, "invalid: it is empty"),
        (100, {"exact": 7}, "no folder of iteration 7"),
        (100, {}, None),
        (None, {}, None),
    ],
)
def test_what_is_wrong_with_a_root_is_told(tracker: int | None, options: dict[str, Any], told: str | None) -> None:
    warnings = order((S100,), tracker, **options).warnings
    assert (told is None) == (not warnings)
    assert told is None or told in warnings[0]


def test_options_that_cannot_be_meant() -> None:
    with pytest.raises(ArgumentError, match="policy is 'latest'"):
        order((), None, policy="latest")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="exclude each other"):
        order((), None, policy="highest", exact=5)


# -- the arithmetic

TABLE = json.loads((DATA / "resume_math" / "resume_context_table.json").read_text())
SCHEDULES = json.loads((DATA / "resume_math" / "dynamic_batch_table.json").read_text())


def common_of(row: dict[str, Any]) -> CommonInfo:
    return CommonInfo(
        step_num=row["saved_step_num"],
        global_step=row["saved_step_num"],
        epoch_num=row["saved_epoch_num"],
        global_batch_size=row["saved_global_batch_size"],
    )


def resume(
    common: CommonInfo | None, config: Config | None = None, run: RunFacts | None = None, **what: Any
) -> ResumeDecision:
    """The decision over one whole, verified checkpoint of iteration 400."""
    config = replace(config or Config(), load_path="ckpt", resume=True)
    candidate = CandidateFacts("ckpt/iteration_00000400", 400, is_verified=True, common=common, has_optimizer=True)
    return decide(config, ResumeFacts("ckpt", "root", (candidate,), run or RunFacts()), **what)


@pytest.mark.parametrize("row", TABLE, ids=range(len(TABLE)))
def test_every_row_of_the_originals_table(row: dict[str, Any]) -> None:
    run = RunFacts(global_batch_size=row["new_global_batch_size"], steps_per_epoch=row["new_dataset_size_steps"])
    config = Config(sink_mode=row["sink_mode"])
    common = common_of(row)
    old = resume(common, replace(config, legacy_format=True), run, compatible=True)  # what the table was computed by
    assert (old.initial_step, old.initial_epoch) == (row["initial_step"], row["initial_epoch"])
    assert old.global_step == row["initial_step"]  # saved with as many steps: scaled alike
    new = resume(common, config, run, compatible=True)
    assert new.initial_step == row["v2_expression_python_float"]
    exact = resume(common, config, run)
    assert exact.initial_step == row["exact_integer_step"]
    samples = row["saved_step_num"] * row["saved_global_batch_size"]
    assert exact.consumed_samples == samples
    # Exact means: not one step more than the samples make, and less than a step lost.
    assert 0 <= samples - exact.initial_step * row["new_global_batch_size"] < row["new_global_batch_size"]
    assert exact.data_skip_steps == exact.initial_step
    for decision, generation in ((old, "1.0"), (new, "2.0")):
        is_wrong = decision.initial_step != exact.initial_step
        assert any("the correct result is" in warning for warning in decision.warnings) == is_wrong, generation


@pytest.mark.parametrize(
    ("saved", "batches", "double", "float32", "exact"),
    [
        (45, (448, 160), 125, 126, 126),
        (180, (448, 160), 503, 504, 504),
        (16777217, (8, 8), 16777217, 16777216, 16777217),
        (33554435, (24, 8), 100663305, 100663312, 100663305),
    ],
)
def test_where_the_original_is_wrong(
    saved: int, batches: tuple[int, int], double: int, float32: int, exact: int
) -> None:
    assert scale_steps(saved, *batches, "double").steps == double
    assert scale_steps(saved, *batches, "float32").steps == float32
    assert scale_steps(saved, *batches).steps == exact == saved * batches[0] // batches[1]


@pytest.mark.parametrize("schedule", SCHEDULES["schedules"], ids=lambda one: str(one["rampup_batch_size"]))
@pytest.mark.parametrize("compatible", [False, True])
def test_every_schedule_of_the_originals_table(schedule: dict[str, Any], *, compatible: bool) -> None:
    numbers = [*schedule["rampup_batch_size"], schedule["global_batch_size"], schedule["base_units"]]
    batch = BatchSchedule(*numbers)
    for consumed, size in schedule["gbs_at_consumed"].items():
        assert batch.size_at(int(consumed), compatible=compatible) == size
    for steps, consumed in schedule["consumed_at_step"].items():
        assert batch.consumed_at(int(steps), compatible=compatible) == consumed


@pytest.mark.parametrize("numbers", SCHEDULES["rejected"])
def test_schedules_that_the_original_rejects(numbers: list[Any]) -> None:
    with pytest.raises(ValueError, match="a batch from"):
        BatchSchedule(*numbers[:5])


@pytest.mark.parametrize("numbers", [(8, 8, 100, 28, 4), (8, 2, 100, 12, 4), (0, 8, 9, 8, 1), (1, 1, 9, 2**62, 1)])
def test_schedules_that_have_no_levels(numbers: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError):
        BatchSchedule(*numbers)


def test_a_schedule_ends_exactly_where_it_says() -> None:
    schedule = BatchSchedule(8, 8, 9, 64)  # seven levels of 9/7 samples
    assert schedule.size_at(9) == 64
    assert schedule.size_at(9, compatible=True) == 56  # 9 / (9 / 7) is 6.999... in double
    assert BatchSchedule(8, 8, 100, 8).size_at(5) == 8  # it never grows
    assert BatchSchedule(8, 8, 100, 8).consumed_at(5) == 40


@given(start=st.integers(1, 9), levels=st.integers(0, 12), ramp=st.integers(0, 300), steps=st.integers(0, 120))
def test_a_schedule_counts_as_going_step_by_step(start: int, levels: int, ramp: int, steps: int) -> None:
    schedule = BatchSchedule(start, 3, ramp, start + 3 * levels)
    consumed = 0
    for _ in range(steps):
        consumed += schedule.size_at(consumed)
    assert schedule.consumed_at(steps) == consumed


@pytest.mark.parametrize("numbers", [(-1, 8, 8), (1, 0, 8), (1, 8, 0)])
def test_numbers_that_cannot_be_scaled(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ArgumentError):
        scale_steps(*numbers)


# -- which steps a checkpoint has made


@pytest.mark.parametrize(
    ("step_num", "global_step", "consumed", "iteration", "steps"),
    [
        (400, 400, None, 400, 400),
        (10000, 400, 25600, 400, 400),  # eager: step_num is the length of the run
        (10000, 400, None, 400, 400),  # eager, before consumed_samples was written
        (10000, 400, None, None, 400),  # the folder's number does not help
        (10000, 10000, 640000, 10000, 10000),  # eager, at the end
        (400, 398, None, 400, 400),  # graph mode: two steps overflowed and were skipped by the optimizer
        (400, 398, None, None, 398),
        (400, 398, 25472, 400, 398),
        (400, 500, None, 400, 400),
        (None, 400, None, 400, 400),
        (400, None, None, 400, 400),
        (None, None, None, 400, 400),
    ],
)
def test_steps_of_graph_and_eager_files(
    step_num: int | None, global_step: int | None, consumed: int | None, iteration: int | None, steps: int
) -> None:
    common = CommonInfo(step_num=step_num, global_step=global_step, consumed_samples=consumed)
    found = saved_steps(common, iteration)
    assert found is not None
    assert found[0] == steps
    assert saved_steps(CommonInfo(), None) is None


# -- scenarios

SAVED = CommonInfo(epoch_num=4, step_num=400, global_step=400, loss_scale=1024.0, global_batch_size=64)


def test_an_interrupted_run_goes_on_where_it_was() -> None:
    decision = resume(SAVED, Config(sink_size=2, total_steps=1000), RunFacts(64, 8, 100))
    assert (decision.iteration, decision.path) == (400, "ckpt/iteration_00000400")
    assert not decision.fresh
    assert decision.is_verified
    assert (decision.initial_step, decision.global_step, decision.initial_epoch) == (400, 400, 4)
    assert (decision.consumed_samples, decision.data_skip_steps) == (25600, 400)
    assert (decision.loss_scale, decision.scaling, decision.total_steps) == (1024.0, None, 1000)
    assert decision.next_step == EpochStep(5, 1)
    assert decision.next_sink == EpochStep(5, 2)
    assert decision.restored == ("weights", "optimizer", "counters", "loss scale", "data position")
    assert decision.warnings == ()


def test_the_documents_first_step_after_a_resume() -> None:
    # "If the initial number of steps is 42, the training is resumed successfully": saved at 40, sink size 2
    common = CommonInfo(step_num=40, global_step=40, epoch_num=20, global_batch_size=8)
    decision = resume(common, Config(sink_size=2), RunFacts(8, steps_per_epoch=1000))
    assert decision.next_sink == EpochStep(1, 42)


def test_another_world_size_keeps_the_steps() -> None:
    candidate = CandidateFacts("ckpt/iteration_400", 400, is_verified=True, common=SAVED, world_size=8)
    facts = ResumeFacts("ckpt", "root", (candidate,), RunFacts(64, world_size=16))
    decision = decide(Config("ckpt", resume=True), facts)
    assert decision.is_resharded
    assert (decision.initial_step, decision.scaling) == (400, None)
    assert "saved by 8 ranks, loaded by 16" in decision.reasons[-1]
    assert decide(Config("ckpt", resume=True), replace(facts, run=RunFacts(64, 8))).is_resharded is False


def test_another_batch_size_is_scaled_and_says_what_it_rounds() -> None:
    decision = resume(replace(SAVED, step_num=119, global_step=119, global_batch_size=160), run=RunFacts(448))
    assert decision.scaling == Scaling(Fraction(5, 14), Fraction(85, 2), 42, 224)
    assert decision.reasons == (
        "global_batch_size 160 -> 448: 119 steps x 5/14 = 85/2",
        "rounded down to 42 steps: 224 samples are seen again",
    )
    assert (decision.global_step, decision.consumed_samples, decision.global_batch_size) == (42, 119 * 160, 448)


def test_new_data_under_fixed_total_steps() -> None:
    # Ten parts of data, one epoch each, 100000 steps in all; the second part has other samples.
    common = CommonInfo(epoch_num=1, step_num=10000, global_step=10000, global_batch_size=64)
    config = Config(total_steps=100000, epochs=15, sink_mode=False)
    run = RunFacts(64, 8, steps_per_epoch=9000, dataset_changed=True)
    decision = resume(common, config, run)
    assert (decision.initial_step, decision.total_steps, decision.next_step) == (10000, 100000, EpochStep(2, 1001))
    assert "first 10000 steps of the new dataset are skipped" in decision.warnings[0]
    fresh_data = resume(common, replace(config, ignore_data_skip=True), run)
    assert (fresh_data.initial_step, fresh_data.data_skip_steps, fresh_data.warnings) == (10000, 0, ())
    assert "data position" not in fresh_data.restored
    part = resume(common, replace(config, data_skip_steps=2), run)
    assert (part.initial_step, part.data_skip_steps, part.warnings) == (10000, 2, ())


@pytest.mark.parametrize(
    ("config", "run", "told"),
    [
        (Config(total_steps=400), RunFacts(64), "the learning-rate schedule of total_steps 400 has ended at step 400"),
        (Config(total_steps=1000), RunFacts(128), "total_steps 1000 is not scaled"),
        (Config(epochs=4), RunFacts(64, steps_per_epoch=100), "is past 4 epochs of 100 steps"),
        (Config(ignore_data_skip=True), RunFacts(64, dataset_changed=True), "total_steps is not set"),
        (
            Config(without_effect=("`integrated_save`",)),
            RunFacts(64),
            "configuration keys without effect: `integrated_save`",
        ),
    ],
)
def test_what_to_look_at_is_told(config: Config, run: RunFacts, told: str) -> None:
    assert any(told in warning for warning in resume(SAVED, config, run).warnings)


def test_an_unknown_batch_size_scales_nothing_and_reads_as_no_fault() -> None:
    without = replace(SAVED, global_batch_size=None)
    decision = resume(without, run=RunFacts(64))
    assert decision.initial_step == 400
    assert decision.reasons == ("the checkpoint records no global batch size: steps are not scaled",)
    decision = resume(SAVED)
    assert (decision.initial_step, decision.global_batch_size) == (400, 64)
    assert decision.reasons == ("steps are counted in the batch size of the checkpoint, 64 samples",)
    assert resume(without).reasons == ()


def test_a_growing_batch_goes_on_by_samples() -> None:
    config = Config(rampup=(8, 8, 400), global_batch_size=32)
    eager = CommonInfo(step_num=200, global_step=21, global_batch_size=16, consumed_samples=200)
    decision = resume(eager, config, RunFacts(base_units=4))
    assert (decision.initial_step, decision.consumed_samples, decision.global_batch_size) == (21, 200, 16)
    assert (decision.skip_micro_steps, decision.scaling) == (50, None)
    without = resume(replace(eager, consumed_samples=None), config, RunFacts(base_units=4))
    assert without.consumed_samples == 200  # from the table: 21 steps
    with pytest.raises(ArgumentError, match="needs `global_batch_size`"):
        resume(eager, Config(rampup=(8, 8, 400)))
    with pytest.raises(ArgumentError, match="not multiples of the 5 samples"):
        resume(eager, config, RunFacts(base_units=5))


def test_the_eager_loop_skips_by_samples() -> None:
    eager = CommonInfo(step_num=1000, global_step=100, global_batch_size=64, consumed_samples=6400)
    decision = resume(eager, Config(sink_mode=False), RunFacts(128, base_units=16))
    assert (decision.initial_step, decision.skip_micro_steps) == (50, 400)
    assert decision.reasons[0] == "global_step 100 is used; step_num 1000 is the length of the whole run"
    assert resume(eager, Config(ignore_data_skip=True), RunFacts(128, base_units=16)).skip_micro_steps == 0


# -- choosing


def candidate(iteration: int, **what: Any) -> CandidateFacts:
    return CandidateFacts(**{
        "path": f"ckpt/iteration_{iteration:08d}", "iteration": iteration, "common": replace(SAVED, ckpt_status=0),
        "has_optimizer": True, "is_verified": True, **what,
    })  # fmt: skip


def chosen(
    *candidates: CandidateFacts, config: Config | None = None, run: RunFacts | None = None, **what: Any
) -> ResumeDecision:
    return decide(
        config or Config("ckpt", resume=True), ResumeFacts("ckpt", "root", candidates, run or RunFacts(64)), **what
    )


def test_the_words_of_a_fault_do_not_decide() -> None:
    """A damaged checkpoint whose fault reads like that of one without permission is damaged."""
    for reason in ("could not be read: torn", "not reached: an earlier one could not be read"):
        with pytest.raises(DamagedFileError, match="put back damaged files from a copy"):
            chosen(candidate(2, state=Damaged(reason)), candidate(1, state=Damaged("torn")))
        assert chosen(candidate(2, state=Damaged(reason)), candidate(1)).path == "ckpt/iteration_00000001"


CHOICES: list[tuple[str, dict[str, Any], str]] = [
    ("damaged", {"state": Damaged("a file is missing")}, "a file is missing"),
    ("never a candidate", {"state": Refused("left behind on purpose")}, "left behind on purpose"),
    ("without counters", {"common": None, "counters": "common.json"}, "no common.json, so its counters are missing"),
    ("of another format", {"common": None}, "the counters of a run are not read from its format"),
    ("unhealthy", {"common": replace(SAVED, ckpt_status=1)}, "it was saved as unhealthy"),
    ("health unknown", {"common": SAVED}, "health was not recorded"),
    ("without optimizer", {"has_optimizer": False}, "no optimizer state"),
]


@pytest.mark.parametrize(("what", "reason"), [case[1:] for case in CHOICES], ids=[case[0] for case in CHOICES])
def test_a_candidate_that_will_not_do_is_passed_over_with_the_reason(what: dict[str, Any], reason: str) -> None:
    config = Config("ckpt", resume=True, healthy_only=True)
    decision = chosen(
        candidate(500, **what), candidate(400), candidate(300), config=config, run=RunFacts(64, has_optimizer=True)
    )
    assert decision.iteration == 400
    assert [verdict.taken for verdict in decision.verdicts] == [False, True, False]
    assert reason in decision.verdicts[0].reason
    assert decision.verdicts[2].reason == "not needed: a better one is selected"
    if not isinstance(what.get("state"), Refused):
        assert any(reason in warning for warning in decision.warnings)
    with pytest.raises(ReshardError, match=reason) as caught:
        chosen(candidate(500, **what), config=config, run=RunFacts(64, has_optimizer=True))
    assert "iteration_00000500" in str(caught.value)


def test_health_does_not_matter_unless_asked_for() -> None:
    assert chosen(candidate(500, common=replace(SAVED, ckpt_status=1)), candidate(400)).iteration == 500


def test_weights_alone_need_no_counters() -> None:
    decision = chosen(candidate(500, common=None), config=Config("ckpt"))
    assert (decision.iteration, decision.initial_step, decision.restored) == (500, 0, ("weights",))
    assert not decision.fresh


def test_what_has_no_sums_is_marked() -> None:
    decision = chosen(candidate(500, is_verified=False))
    assert not decision.is_verified
    assert "has no checksums" in decision.warnings[0]


def test_a_run_without_an_optimizer_needs_none() -> None:
    told = chosen(candidate(500, has_optimizer=False))
    assert "optimizer" not in told.restored
    assert "no optimizer state" in told.warnings[0]
    assert chosen(candidate(500, has_optimizer=False), run=RunFacts(64, has_optimizer=False)).warnings == ()


# -- starting from nothing, and never by mistake


@pytest.mark.parametrize("kind", ["absent", "empty"])
def test_an_unattended_first_start(kind: Any) -> None:
    decision = decide(Config("ckpt", resume=True), ResumeFacts("ckpt", kind, run=RunFacts(64, steps_per_epoch=10)))
    assert decision.fresh
    assert (decision.initial_step, decision.data_skip_steps, decision.path) == (0, 0, None)
    assert decision.next_step == EpochStep(1, 1)
    with pytest.raises(CheckpointNotFoundError):  # weights were asked for
        decide(Config("ckpt"), ResumeFacts("ckpt", kind))
    with pytest.raises(CheckpointNotFoundError):  # a certain iteration was asked for
        decide(Config("ckpt/iteration_5", resume=True), ResumeFacts("ckpt/iteration_5", kind))


def test_nothing_to_load_is_a_fresh_start() -> None:
    decision = decide(Config(resume=True), ResumeFacts("", "absent"))
    assert decision.fresh
    assert decision.reasons == ("load_checkpoint is empty: nothing is loaded",)


def test_never_from_nothing_because_of_damage() -> None:
    torn = candidate(500, state=Damaged("model-0 is torn")), candidate(400, state=Damaged("metadata.json is not JSON"))
    with pytest.raises(DamagedFileError) as caught:
        chosen(*torn)
    assert caught.value.message == (
        "no checkpoint in ckpt can be resumed from:\n"
        "  iteration_00000500: model-0 is torn\n"
        "  iteration_00000400: metadata.json is not JSON"
    )
    assert caught.value.path == "ckpt"
    decision = chosen(*torn, allow_fresh=True)
    assert decision.fresh
    assert "starts from nothing" in decision.warnings[-1]
    assert len(decision.verdicts) == 2


ERRORS: list[tuple[Config, ResumeFacts, type[ReshardError], str]] = [
    (Config("x", resume=True), ResumeFacts("x", "other"), CheckpointNotFoundError, "exists and holds no checkpoint"),
    (Config("x", resume=True), ResumeFacts("x", "pretrained", (CandidateFacts("x"),)),
        UnsupportedError, "only weights"),
    (Config("x", resume=True, resume_file="a.ckpt"), ResumeFacts("x", "root"), UnsupportedError, "Checkpoint 1.0"),
    (Config("x", resume=True, resume_file="a.ckpt"), ResumeFacts("x", "empty"),
        CheckpointNotFoundError, "no checkpoint"),
    (Config("x", resume=True, resume_file="a.ckpt"), ResumeFacts("x", "absent"),
        CheckpointNotFoundError, "does not exist"),
    (Config("x/iteration_7", resume=True),
        ResumeFacts("x", "root", (candidate(5, state=Refused("iteration 7 was asked for")),)),
        CheckpointNotFoundError, "iteration 7 was asked for"),
    (Config("x", resume=True), ResumeFacts("x", "root", (candidate(5),), RunFacts(0)),
        ArgumentError, "expected at least 1"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "facts", "error", "message"), ERRORS)
def test_what_cannot_be_decided(config: Config, facts: ResumeFacts, error: type[ReshardError], message: str) -> None:
    with pytest.raises(error, match=message):
        decide(config, facts)


def test_weights_of_a_hugging_face_folder() -> None:
    decision = decide(Config("hf"), ResumeFacts("hf", "pretrained", (CandidateFacts("hf"),)))
    assert (decision.path, decision.iteration, decision.restored) == ("hf", None, ("weights",))


@given(faults=st.lists(st.sampled_from([None, "torn"]), max_size=6), seed=st.integers(0, 3))
def test_the_first_whole_one_is_taken_and_every_one_has_a_verdict(faults: list[str | None], seed: int) -> None:
    candidates = tuple(
        candidate(100 * n + seed, state=Damaged(fault) if fault else Complete()) for n, fault in enumerate(faults, 1)
    )
    config, facts = Config("ckpt", resume=True), ResumeFacts("ckpt", "root", candidates)
    verdicts = evaluate(config, facts)
    assert [verdict.path for verdict in verdicts] == [one.path for one in candidates]
    whole = [one.iteration for one in candidates if one.state == Complete()]
    assert [verdict.iteration for verdict in verdicts if verdict.taken] == whole[:1]
    if whole:
        assert decide(config, facts) == decide(config, facts)
        assert decide(config, facts).iteration == whole[0]
