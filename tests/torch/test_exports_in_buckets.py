"""Exports of a run whose root is in a bucket: folders of whole weights beside it, whole or not there."""

from __future__ import annotations

import itertools
import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.helpers.ranks import Job
from tests.servers.killed import is_killed
from tests.servers.proxy import Fault, Proxy, before_server
from tests.servers.s3 import BUCKET
from torch import nn

import reshard
from reshard.commit import leases, protocol
from reshard.errors import ReshardError, UnsupportedError
from reshard.storage.location import locate
from reshard.torch import Checkpointer
from reshard.verbs.integrate import integrate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers.s3 import S3Server

    from reshard.ranks.group import TorchGroup
    from reshard.storage.location import Location
    from reshard.verbs.save import SaveReport

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(leases, "GRACE_SECONDS", 0.0)
    yield
    protocol.release()


@pytest.fixture
def root(s3: S3Server) -> Location:
    return locate(f"s3://{BUCKET}/exports-{os.getpid()}-{next(_numbers)}/run")


def run(root: Location, steps: range, **options: Any) -> Any:
    """Steps of a run that saves at each; the last report."""
    model = options.pop("model", None) or nn.Linear(2, 1)
    with Checkpointer(str(root), **{"signals": (), "save_every": 1, "keep": 2, **options}) as made:
        made.resume(model=model)
        for step in steps:
            made.step(step, loss=1.0)
        return made.wait()


def names(folder: Location) -> list[str]:
    """What is in a folder. One whose objects were removed may stay in a list of the server for a while."""
    return [name for name in folder.names() if not name.startswith(".") and (folder / name).exists()]


@pytest.mark.slow(disk=False)
def test_every_nth_save_is_a_model_of_transformers_beside_the_root(root: Location, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=6)
    model = transformers.GPT2LMHeadModel(config)
    report = run(root, range(1, 5), model=model, hf_every=2, keep=1, exports={"integrated": True})
    assert [one for one in report.warnings if "the state of the run" not in one] == []
    published = root.with_name("run_hf")
    assert names(published) == ["iteration_00000004"], "as many as of saves"
    assert names(root.with_name("run_integrated")) == ["iteration_00000004"]
    newest = published / "iteration_00000004"
    assert newest.names() == ["config.json", "generation_config.json", "model.safetensors"]
    # Every byte is that of an export on a disk; it loads there, and the folder in the bucket is converted by its names.
    for name in newest.names():
        (locate(tmp_path) / name).replace(b"".join((newest / name).pieces()))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for key, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    reshard.convert(str(newest), tmp_path / "local")
    assert (tmp_path / "local/config.json").read_bytes() == (tmp_path / "config.json").read_bytes()
    assert reshard.diff(str(newest), tmp_path / "local").equal


def test_what_a_bucket_does_not_have_is_refused_before_the_first_step(root: Location) -> None:
    with pytest.raises(UnsupportedError, match="is in a bucket, where there are no links"):
        Checkpointer(str(root), exports={"links": True})
    with pytest.raises(UnsupportedError, match="is a whole bucket"):
        Checkpointer(f"s3://{BUCKET}", hf_every=1)


def export(root: Location, report: SaveReport, keep: int | None = None) -> list[str]:
    return integrate(root, report, suffix="hf", part="model", keep=keep)


def saved(tmp_path: Path) -> list[SaveReport]:
    """Saves on a disk, whose exports go into a bucket."""
    return [
        reshard.save(tmp_path / "run", number, {"a": torch.full((4, 4), float(number)), "b": torch.ones(3)})
        for number in (1, 2, 3)
    ]


def value_of(folder: Location) -> float | None:
    """What an export holds; None: there is none that opens."""
    try:
        with reshard.open(folder) as opened:
            assert sorted(opened.keys()) == ["a", "b"]
            return float(opened.read("a")[0, 0])
    except ReshardError:
        return None


@pytest.mark.slow(disk=False)
@pytest.mark.parametrize("kind", ["killed", "lost answer", "refused"])
def test_an_export_is_whole_or_not_there_whatever_request_fails(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    reports = saved(tmp_path)
    with before_server(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        for number in itertools.count():
            target = locate(f"s3://{BUCKET}/exports-{os.getpid()}-{next(_numbers)}/run")
            folders = [target.with_name("run_hf") / f"iteration_{one:08d}" for one in (1, 2)]
            reshard.convert(reports[0].path, folders[0], to="huggingface", max_shard_size=64)
            warnings, is_over = _export_with_fault(proxy, target, reports[1], number, kind)
            assert value_of(folders[1]) in ({2.0} if kind == "lost answer" else {2.0, None})
            assert value_of(folders[0]) in (1.0, None)
            is_listed = (folders[0] / "model.safetensors.index.json").exists()
            assert not is_listed or value_of(folders[0]) == 1.0, "the index is removed first"
            assert any(value_of(one) for one in folders), "an older export is removed after a newer one is whole"
            assert bool(warnings) == (kind == "refused" and not is_over), warnings
            # The next one replaces what is left, and removes the older one.
            assert export(target, reports[1], 1) == []
            assert names(target.with_name("run_hf")) == ["iteration_00000002"]
            assert [one for one in folders[1].names() if one.startswith(".")] == []
            assert value_of(folders[1]) == 2.0
            if is_over:
                break
        assert number >= 4


def _export_with_fault(
    proxy: Proxy, target: Location, report: SaveReport, number: int, kind: str
) -> tuple[list[str], bool]:
    """Export while the n-th change fails. Returns its warnings, and whether it had fewer changes."""
    changes = itertools.count()

    def is_it(method: str, _: str) -> bool:
        return method not in ("GET", "HEAD") and next(changes) == number

    if kind != "killed":
        fault = Fault(is_it, is_lost=True) if kind == "lost answer" else Fault(is_it, 403, "AccessDenied")
        proxy.faults = [fault]
        warnings = export(target, report, 1)
        proxy.faults = []
        return warnings, fault.times == 1
    return [], not is_killed(proxy, lambda: export(target, report, 1), is_it)


@pytest.mark.parametrize("whose", ["the run's", "the user's"])
def test_an_export_that_was_killed_counts_for_nothing_and_is_removed_later(
    root: Location, tmp_path: Path, whose: str
) -> None:
    reports = saved(tmp_path)
    exports = root.with_name("run_hf")
    assert export(root, reports[0], 2) == []
    claim = {"names": ["model-00002-of-00002.safetensors"]} | ({"export_of": str(root)} if whose == "the run's" else {})
    (exports / "iteration_00000002/.reshard.convert.staging").replace(json.dumps(claim))
    (exports / "iteration_00000002/model-00002-of-00002.safetensors").replace("half")
    (exports / "notes.txt").replace("mine")
    assert export(root, reports[2], 2) == []
    left = [] if whose == "the run's" else ["iteration_00000002"]
    assert names(exports) == ["iteration_00000001", *left, "iteration_00000003", "notes.txt"]


@pytest.mark.parametrize("where", ["bucket", "disk"])
def test_only_what_exports_have_made_is_removed(root: Location, tmp_path: Path, where: str) -> None:
    reports, place = saved(tmp_path), root if where == "bucket" else locate(tmp_path / "other")
    exports = place.with_name(f"{place.name}_hf")
    for name, there in (("iteration_00000000", b"not of a conversion"), ("iteration_00000001", None)):
        if there is None:
            reshard.convert(reports[0].path, str(exports / name), to="huggingface")
            if where == "disk":
                (tmp_path / "other_hf" / name / "2_Dense").mkdir()
            (exports / name / "2_Dense/model.safetensors").replace(b"of a layer behind the model, copied as it is")
            continue
        if where == "disk":
            (tmp_path / "other_hf" / name).mkdir(parents=True)
        (exports / name / "model.safetensors").replace(there)
    assert export(place, reports[1], 1) == []
    assert names(exports) == ["iteration_00000000", "iteration_00000002"]
    # Saves there: a folder of a root without a tracker, which was copied.
    for path in (tmp_path / "run/iteration_00000001").iterdir():
        if where == "disk":
            (tmp_path / "other_hf/iteration_00000001").mkdir(exist_ok=True)
        (exports / "iteration_00000001" / path.name).replace(path.read_bytes())
    [warning] = export(place, reports[2], 1)
    assert "holds a save, iteration_00000001" in warning
    assert names(exports) == [f"iteration_0000000{number}" for number in range(4)]
    (exports / "latest_checkpointed_iteration.txt").replace("1")
    [warning] = export(place, reports[2], 1)
    assert "is the root of a run" in warning


@pytest.mark.slow(disk=False)
def test_ranks_export_into_a_bucket(root: Location, tmp_path: Path) -> None:
    def work(group: TorchGroup) -> Any:
        with Checkpointer(str(root), save_every=1, keep=1, hf_every=1, signals=(), timeout=60, group=group) as made:
            made.resume(model=nn.Linear(2, 1))
            made.step(1)
            made.step(2)
            report: Any = made.wait()
            return report.warnings

    with Job(2, work) as job:
        assert [list(one) for one in job.values()] == [[], []]
    assert names(root.with_name("run_hf")) == ["iteration_00000002"]
    with reshard.open(root.with_name("run_hf") / "iteration_00000002") as opened:
        assert sorted(opened.keys()) == ["bias", "weight"]
