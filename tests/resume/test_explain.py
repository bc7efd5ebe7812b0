"""What a restart would use, as the command tells it, and beside what the original answers for the same trees."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from tests.helpers import sealed
from tests.helpers.sealed import FILES

import reshard
from reshard.cli import main
from reshard.config import Config
from reshard.errors import CheckpointNotFoundError, ReshardError, StorageError
from reshard.formats.checkpoint2.reader import open_folder
from reshard.opening.gather import gather
from reshard.resume import RunFacts, decide

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.storage.location import Location

SAMPLES = Path(__file__).parents[1] / "data" / "mindspore"
PROGRAM = [sys.executable, "-c", "import sys; sys.argv[0] = 'reshard'; from reshard.cli import main; main()"]
TRACKER = "latest_checkpointed_iteration.txt"
NEWEST = "root/iteration_00000010"


def explain(*args: object, cwd: Path | None = None) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command, in this process."""
    with contextlib.chdir(cwd or Path.cwd()):
        done = CliRunner().invoke(main, ["explain", *map(str, args)], prog_name="reshard")
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.slow
def test_the_command_as_a_process_exits_with_what_it_decided(work: Path) -> None:
    for folder in ("root", "empty", "absent"):
        words = [*PROGRAM, "explain", folder]
        done = subprocess.run(words, capture_output=True, text=True, cwd=work, timeout=120, check=False)
        assert (done.returncode, done.stdout, done.stderr) == explain(folder, cwd=work)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with a root of two iterations of 8 ranks, a Hugging Face folder, and an empty one."""
    shutil.copytree(SAMPLES / "ckpt2" / "checkpoint", tmp_path / "root")
    shutil.copytree(SAMPLES / "full_hf", tmp_path / "hf")
    (tmp_path / "empty").mkdir()
    return tmp_path


# -- beside the original: every input of which its answer is known


def track(text: str) -> Callable[[Path], object]:
    return lambda work: (work / "root" / TRACKER).write_text(text)


def narrow(work: Path) -> None:
    """The newest iteration under a name of seven digits."""
    (work / NEWEST).rename(work / "root" / "iteration_0000010")


def without_storage_data(work: Path) -> None:
    path = work / NEWEST / "metadata.json"
    content = json.loads(path.read_text())
    del content["storage_data"]
    path.write_text(json.dumps(content))


def single_hf(work: Path) -> None:
    for path in (work / "hf").iterdir():
        if path.name != "model-00001-of-00002.safetensors":
            path.unlink()
    (work / "hf" / "model-00001-of-00002.safetensors").rename(work / "hf" / "model.safetensors")


def removed(name: str) -> Callable[[Path], object]:
    return lambda work: (work / name).unlink()


MODEL_0 = f"{NEWEST}/demo-model-0000000-0000008.safetensors"
OLDER = "root/iteration_00000005"
ERROR = "error"

# By the name of the case: how to make the input, our answer when resuming, and why it is another one; None: the same.
CASES: dict[str, tuple[Callable[[Path], object], str, str | None]] = {
    "root with tracker": (bool, NEWEST, None),
    "iteration folder given directly": (bool, OLDER, None),
    "tracker names the older iteration": (track("5"), OLDER, None),
    "tracker with spaces and newline": (track(" 10 \n"), NEWEST, None),
    "tracker is empty": (track(""), NEWEST, "a crash while the tracker was written must not end the training"),
    "tracker is not a number": (track("ten"), NEWEST, "the folders say themselves which is the newest"),
    "tracker names an absent iteration": (track("777"), NEWEST, "the folders say themselves which is the newest"),
    "no tracker, iteration folders present": (
        removed(f"root/{TRACKER}"),
        NEWEST,
        "the folders say themselves which is the newest",
    ),
    "iteration folder renamed to seven digits": (narrow, "root/iteration_0000010", "a number counts, not its digits"),
    "seven-digit iteration folder given directly": (narrow, "root/iteration_0000010", None),
    "one weight file of the latest iteration removed": (removed(MODEL_0), OLDER, "the last complete one is older"),
    "one weight file of the latest iteration truncated to zero bytes": (
        lambda work: (work / MODEL_0).write_bytes(b""),
        OLDER,
        "that a file exists does not mean that it is whole",
    ),
    "common.json of the latest iteration removed": (
        removed(f"{NEWEST}/common.json"),
        OLDER,
        "there the answer fails later: without counters nothing can be resumed",
    ),
    "metadata.json of the latest iteration removed": (
        removed(f"{NEWEST}/metadata.json"),
        OLDER,
        "shards of eight ranks would be taken for whole tensors",
    ),
    "metadata.json of the latest iteration is broken JSON": (
        lambda work: (work / NEWEST / "metadata.json").write_text("{"),
        OLDER,
        "the last complete one is older",
    ),
    "metadata.json without storage_data": (without_storage_data, OLDER, "the last complete one is older"),
    "empty folder": (bool, "fresh", "the unattended first start, which there is the trainer's business"),
    "folder does not exist": (bool, "fresh", "the unattended first start, which there is the eager trainer's business"),
    "a file instead of a folder": (bool, ERROR, None),
    "folder with model.safetensors.index.json and both files": (bool, "hf", None),
    "folder with model.safetensors.index.json, one file absent": (
        removed("hf/model-00002-of-00002.safetensors"),
        ERROR,
        None,
    ),
    "folder with model.safetensors only": (single_hf, "hf", None),
}
TABLE: list[dict[str, Any]] = json.loads((SAMPLES / "ckpt2" / "path_resolution_of_real_code.json").read_text())


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["case"])
def test_answers_beside_the_originals(row: dict[str, Any], work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change, ours, why = CASES[row["case"]]
    change(work)
    monkeypatch.chdir(work)
    config = Config(row["argument"], resume=row["argument"] != "hf")  # of a Hugging Face folder the weights alone
    try:
        decision = decide(config, gather(config))
        answer = "fresh" if decision.fresh else decision.path
    except ReshardError:
        answer = ERROR
    assert answer == ours
    theirs = row["get_checkpoint_path"]
    theirs = ERROR if "Error: " in theirs else theirs
    assert (why is None) == (answer == theirs), why


def test_every_known_answer_is_compared() -> None:
    assert [row["case"] for row in TABLE] == list(CASES)
    assert len(TABLE) == 22


# -- gathering


def test_the_weights_alone_of_what_has_no_counters(work: Path) -> None:
    (work / NEWEST / "common.json").unlink()
    config = Config(str(work / "root"))
    assert decide(config, gather(config)).path == str(work / NEWEST)


@pytest.mark.parametrize("name", ["iteration_5", "iteration_0000005", "iteration_00000005", "iteration_0000000000005"])
def test_an_iteration_is_found_by_its_number(name: str, work: Path) -> None:
    config = Config(str(work / "root" / name), resume=True)
    assert decide(config, gather(config)).path == str(work / OLDER)


def test_what_an_interrupted_first_save_leaves_is_empty(work: Path) -> None:
    (work / "empty" / ".staging").mkdir()
    config = Config(str(work / "empty"), resume=True)
    assert decide(config, gather(config)).fresh


def test_a_folder_of_other_things_is_no_fresh_start(work: Path) -> None:
    (work / "empty" / "notes.txt").write_text("x")
    config = Config(str(work / "empty"), resume=True)
    with pytest.raises(ReshardError, match="holds no checkpoint"):
        decide(config, gather(config))


def test_a_link_that_leads_nowhere_is_no_fresh_start(work: Path) -> None:
    (work / "link").symlink_to(work / "not mounted")
    config = Config(str(work / "link"), resume=True)
    with pytest.raises(ReshardError, match="holds no checkpoint") as caught:
        decide(config, gather(config))
    assert f"it is a symbolic link to `{work}/not mounted`, which does not exist" in str(caught.value)
    with pytest.raises(CheckpointNotFoundError, match=r"there is nothing at `.*link`: it is a symbolic link to"):
        reshard.open(work / "link")


def test_older_candidates_are_not_opened_once_one_is_taken(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def watched(path: Location, *rest: Any, **more: Any) -> Any:
        opened.append(path.name)
        return open_folder(path, *rest, **more)

    monkeypatch.setattr("reshard.formats.checkpoint2.root.open_folder", watched)
    config = Config(str(work / "root"), resume=True)
    facts = gather(config)
    assert opened == ["iteration_00000010"]
    assert [one.iteration for one in facts.candidates] == [10, 5]
    assert facts.candidates[0].world_size == 8


def test_what_proved_damaged_while_it_was_loaded_is_passed_over(work: Path) -> None:
    config = Config(str(work / "root"), resume=True)
    facts = gather(config, faults={str(work / NEWEST): "chunk 3 of model-0 is not what was saved"})
    decision = decide(config, facts)
    assert decision.iteration == 5
    assert decision.verdicts[0].reason == "chunk 3 of model-0 is not what was saved"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_no_damage(work: Path) -> None:
    (work / NEWEST / "metadata.json").chmod(0)
    with pytest.raises(StorageError):
        gather(Config(str(work / "root"), resume=True))


# -- the command


def test_an_invalid_tracker_is_not_an_absent_one(work: Path) -> None:
    tracker = work / "root" / "latest_checkpointed_iteration.txt"
    for content, expected in (("ten", "there is no valid tracker"), (None, "there is no tracker")):
        tracker.write_text(content) if content else tracker.unlink()
        _, out, _ = explain("root", cwd=work)
        assert f"the highest number that is left; {expected}" in out


def test_the_trail_and_the_counters(work: Path) -> None:
    (work / MODEL_0).unlink()
    code, out, err = explain("root", "--global-batch-size", 16, "--dataset-steps", 4, "--world-size", 2, cwd=work)
    assert code == 0
    first, second = (line.split(maxsplit=2) for line in out.splitlines()[2:4])
    assert first[:2] == ["iteration_00000010", "skipped"]
    assert "demo-model-0000000-0000008.safetensors" in first[2]
    assert second == ["iteration_00000005", "selected", "next below the tracker's 10"]
    told = dict(re.findall(r"^  (\S.*?)  +(.*)$", out, re.MULTILINE))
    assert "the training would resume from root/iteration_00000005" in out
    assert "global_batch_size 32 -> 16: 5 steps x 2 = 10" in out
    assert "saved by 8 ranks, loaded by 2" in out
    assert told["steps"] == "10 done"
    assert told["of the data"] == "next is epoch 3, step 3"
    assert told["data"] == "the samples of 10 steps are skipped"
    assert told["samples"] == "160 seen"
    assert told["repeated"] == "what was trained between iterations 5 and 10"
    assert told["next"].endswith("run: reshard verify root/iteration_00000010")
    assert "is skipped" not in out  # the table says it
    assert err == ""


def test_as_json(work: Path) -> None:
    code, out, err = explain("root", "--global-batch-size", 64, "--json", cwd=work)
    told = json.loads(out)
    assert (code, err, told["outcome"]) == (0, "", "resume")
    assert (told["iteration"], told["initial_step"], told["is_verified"]) == (10, 5, False)
    assert told["scaling"] == {"factor": "1/2", "exact": "5", "steps": 5, "lost_samples": 0}
    assert [verdict["taken"] for verdict in told["verdicts"]] == [True, False]


def test_a_fresh_start_has_an_exit_code_of_its_own(work: Path) -> None:
    assert explain("empty", cwd=work)[0] == 3
    code, out, _ = explain("absent", "--json", cwd=work)
    assert (code, json.loads(out)["outcome"]) == (3, "fresh")


def test_a_refusal_lists_every_candidate(work: Path) -> None:
    for folder in (NEWEST, OLDER):
        (work / folder / "metadata.json").write_text("{")
    code, out, err = explain("root", cwd=work)
    assert code == 1
    assert [line.split()[:2] for line in out.splitlines()[2:]] == [
        ["iteration_00000010", "skipped"],
        ["iteration_00000005", "skipped"],
    ]
    assert "error: no checkpoint in root can be resumed from\nhint: " in err
    code, out, err = explain("root", "--json", cwd=work)
    told = json.loads(out)
    assert (code, err, told["outcome"], told["error"]) == (1, "", "refused", "DamagedFileError")
    assert len(told["verdicts"]) == 2


def test_by_a_configuration(work: Path) -> None:
    (work / "train.yaml").write_text(
        "load_checkpoint: ./root/iteration_0000005\nresume_training: True\nlr_schedule: {total_steps: 100}\n"
        "trainer: {data_skip_steps: 2}\nrunner_config: {epochs: 2, sink_size: 2}\n"
    )
    code, out, _ = explain("--config", "train.yaml", "--dataset-steps", 10, cwd=work)
    assert code == 0
    assert "iteration_00000005  selected  asked for" in out
    assert "steps        5 done of 100" in out
    assert "the next sink ends with epoch 1, step 7" in out
    assert "data_skip_steps: 2 steps of data are skipped" in out
    code, out, _ = explain("root", "--config", "train.yaml", cwd=work)  # ROOT goes before the file's
    assert "iteration_00000010  selected" in out
    (work / "train.yaml").write_text("load_checkpoint: root\n")
    code, out, _ = explain("--config", "train.yaml", "--json", cwd=work)
    assert (code, json.loads(out)["outcome"], json.loads(out)["restored"]) == (0, "weights", ["weights"])


def test_a_wrong_word_is_told_with_its_line(work: Path) -> None:
    (work / "train.yaml").write_text("seed: 0\nresume_trainning: True\n")
    code, out, err = explain("root", "--config", "train.yaml", cwd=work)
    assert (code, out) == (1, "")
    assert "error: train.yaml, line 2: resume_trainning: no such word" in err
    assert "hint: did you mean `resume_training`?" in err


@pytest.mark.parametrize("args", [(), ("root", "--world-size", "0"), ("root", "--global-batch-size", "x")])
def test_usage(args: tuple[str, ...], work: Path) -> None:
    assert explain(*args, cwd=work)[0] == 2


def test_compatible_counters(work: Path) -> None:
    common = {"epoch_num": 5, "step_num": 45, "global_step": 45, "global_batch_size": 448}
    (work / NEWEST / "common.json").write_text(json.dumps(common))
    exact = json.loads(explain("root", "--global-batch-size", 160, "--json", cwd=work)[1])
    old = json.loads(explain("root", "--global-batch-size", 160, "--compatible", "--json", cwd=work)[1])
    assert (exact["initial_step"], old["initial_step"]) == (126, 125)
    assert "the correct result is 126" in " ".join(old["warnings"])


def test_the_run_is_part_of_the_facts(work: Path) -> None:
    run = RunFacts(global_batch_size=64)
    assert gather(Config(str(work / "root")), run).run is run


# -- roots with manifests: the trail of what became of each save


def trail(root: Path) -> tuple[dict[str, Any], list[tuple[int, bool, str]]]:
    """The decision as JSON, and of each candidate its number, whether it is taken, and why."""
    told = json.loads(explain(root, "--json")[1])
    return told, [(one["iteration"], one["taken"], one["reason"]) for one in told["verdicts"]]


def test_a_save_that_a_crash_kept_from_the_tracker_is_taken(tmp_path: Path) -> None:
    sealed.make(tmp_path, 100)
    sealed.make(tmp_path, 200, previous_tracker=100, tracked=False)
    told, verdicts = trail(tmp_path)
    assert told["has_sums"]
    assert told["warnings"] == []
    assert [one[:2] for one in verdicts] == [(200, True), (100, False)]
    assert "which a crash kept from moving" in verdicts[0][2]


def test_who_moves_the_tracker_back_is_obeyed(tmp_path: Path) -> None:
    sealed.make(tmp_path, 100)
    sealed.make(tmp_path, 200, previous_tracker=100)
    (tmp_path / TRACKER).write_text("100")
    _, verdicts = trail(tmp_path)
    assert [one[:2] for one in verdicts] == [(100, True), (200, False)]
    assert "was moved back to" in verdicts[1][2]


def test_what_a_run_passed_over_is_no_candidate_again(tmp_path: Path) -> None:
    sealed.make(tmp_path, 100)
    sealed.make(tmp_path, 200, previous_tracker=100)
    sealed.make(tmp_path, 150, previous_tracker=200, generation=2, passed_over=(200,), tracked=False)
    _, verdicts = trail(tmp_path)
    assert [one[:2] for one in verdicts] == [(150, True), (100, False), (200, False)]
    assert verdicts[2][2] == "skipped by the run that saved iteration 150"


def test_a_torn_file_is_found_by_its_size(tmp_path: Path) -> None:
    sealed.make(tmp_path, 100)
    torn = sealed.make(tmp_path, 200, previous_tracker=100) / FILES["model", 1]
    os.truncate(torn, torn.stat().st_size - 1)
    _, verdicts = trail(tmp_path)
    assert [one[:2] for one in verdicts] == [(200, False), (100, True)]
    assert torn.name in verdicts[0][2]


def test_a_save_without_its_manifest_did_not_end(tmp_path: Path) -> None:
    sealed.make(tmp_path, 100)
    (sealed.make(tmp_path, 200, previous_tracker=100) / "manifest.json").unlink()
    _, verdicts = trail(tmp_path)
    assert [one[:2] for one in verdicts] == [(200, False), (100, True)]


def test_checkpoints_of_the_run_itself_are_named_beside_what_a_configuration_loads(work: Path) -> None:
    config = work / "train.yaml"
    config.write_text(f"load_checkpoint: {work / 'hf'}\noutput_dir: {work / 'output'}\n")
    assert "Checkpointer" not in explain("--config", config)[1]
    shutil.copytree(work / "root", work / "output" / "checkpoint")
    code, page, _ = explain("--config", config)
    assert code == 0
    assert f"reshard explain {work / 'output' / 'checkpoint'}" in page
    assert json.loads(explain("--config", config, "--json")[1])["own_root"] == str(work / "output" / "checkpoint")


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        (
            "torch/dcp_plain/checkpoint",
            "it has no value `step`, `global_step` or `iteration`, so its counters are missing",
        ),
        ("torch/ds_zero2_fp32/checkpoint", "the counters of a run are not read from its format"),
        ("torch/pt_files/dtypes.pt", "it has no optimizer state with a number of steps, so its counters are missing"),
        ("mindspore/full_hf", "it holds only weights, no counters and no optimizer state"),
    ],
)
def test_what_has_no_counters(folder: str, reason: str) -> None:
    _, out, err = explain(SAMPLES.parent / folder)
    assert reason in out
    assert "hint: to start a run from its weights, use another root and `init_from`" in err


def test_a_run_with_plain_sgd_lacks_nothing(tmp_path: Path) -> None:
    """SGD without momentum has options and no tensors of its own."""
    torch = pytest.importorskip("torch")
    from reshard.torch import Checkpointer

    model = torch.nn.Linear(2, 2)
    for optimizer in (torch.optim.SGD(model.parameters(), lr=0.5), None):
        root = tmp_path / f"of {type(optimizer).__name__}"
        for n_steps in (1, 1):
            with Checkpointer(root, save_every=1, commit={"durable": False}) as checkpointer:
                start = checkpointer.resume(model=model, optimizer=optimizer)
                for step in range(start.initial_step, n_steps):
                    checkpointer.step(step + 1)
        code, out, _ = explain(root, cwd=tmp_path)
        told = dict(re.findall(r"^  (\S.*?)  +(.*)$", out, re.MULTILINE))
        assert code == 0
        assert told["data"] == "no position was saved: from the start, unless the program skips the samples of 1 step"
        parts = [] if optimizer is None else ["optimizer"]
        assert start.restored == ("weights", *parts, "counters", "random streams")
        assert told["restored"] == ", ".join(start.restored)
        assert ("the checkpoint holds no optimizer state" in out) == (optimizer is None)
