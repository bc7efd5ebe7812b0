"""What ranks give must be equal: every option and argument that is not marked, by name, with both values."""

from __future__ import annotations

from dataclasses import fields
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.helpers.threads import in_threads

import reshard
from reshard.errors import ArgumentError
from reshard.options import Checkpoint1Options, Options, SaveOptions, agreed
from reshard.torch import Checkpointer
from reshard.torch.checkpointer import _OF_EACH_RANK

if TYPE_CHECKING:
    from pathlib import Path


def test_every_field_of_the_options_of_a_save_is_compared_or_marked() -> None:
    options = SaveOptions(format="checkpoint1", of_format=Checkpoint1Options())
    names = [one.name for one in fields(SaveOptions) if not one.metadata]
    groups = [one for name in names if isinstance(one := getattr(options, name), Options)]
    of_groups = [one.name for group in groups for one in fields(group) if not one.metadata]
    assert len(of_groups) == len(set(of_groups)) > 15
    plain = {name for name in names if not isinstance(getattr(options, name), Options)}
    assert agreed(options).keys() == {*of_groups, *plain, "save_trainable_params"}
    marked = {one.name for group in (SaveOptions, *map(type, groups)) for one in fields(group) if one.metadata}
    assert marked == {"retention", "threads", "save_trainable_params"}


@pytest.mark.parametrize(
    "option",
    [
        {"commit": {"private": True}},
        {"commit": {"rollback": True}},
        {"commit": {"durable": False}},
        {"verify": {"after_save": True}},
        {"verify": {"check_replicas": False}},
        {"verify": {"may_differ": ["b"]}},
        {"files": {"prefix": "run"}},
        {"files": {"strict_format": True}},
    ],
)
def test_an_option_that_differs_is_refused_in_a_save(option: dict[str, Any], tmp_path: Path) -> None:
    ((name, value),) = next(iter(option.values())).items()
    found = in_threads(
        2,
        lambda group: reshard.save(
            tmp_path / "run",
            1,
            {"b": np.zeros(2)},
            group=group,
            layout={"mesh": {"dp": 2}, "rules": [{"match": "*"}]},
            timeout=60,
            **(option if group.rank else {}),
        ),
    )
    for one in found:
        assert isinstance(one, ArgumentError)
        assert f"`{name}` is " in str(one)
        assert f"{value!r} on rank 1" in str(one)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("made", "resumed", "name"),
    [
        ({"save_every": 5}, {}, "save_every"),
        ({"save_every": 4, "commit": {"private": True}}, {}, "commit"),
        ({"save_every": 4, "exports": {"links": True}}, {}, "exports"),
        ({"save_every": 4}, {"strict": False}, "strict"),
        ({"save_every": 4}, {"allow_fresh": True}, "allow_fresh"),
    ],
)
def test_arguments_of_a_run_that_differ_are_refused_before_the_first_step(
    made: dict[str, Any], resumed: dict[str, Any], name: str, tmp_path: Path
) -> None:
    def work(group: Any) -> Any:
        other = group.rank == 1
        given = made if other else {"save_every": 4}
        with Checkpointer(tmp_path / "run", group=group, signals=(), timeout=60, **given) as checkpointer:
            model = torch.nn.Linear(1, 1)
            torch.nn.init.zeros_(model.weight)
            torch.nn.init.zeros_(model.bias)
            return checkpointer.resume(model=model, **(resumed if other else {}))

    for one in in_threads(2, work):
        assert isinstance(one, ArgumentError), one
        assert f"`{name}` is " in str(one)


def test_the_arguments_that_may_differ_are_arguments() -> None:
    known = {*signature(Checkpointer).parameters, *signature(Checkpointer.resume).parameters, "__class__"}
    assert known >= _OF_EACH_RANK


def test_a_warning_that_is_the_same_on_all_ranks_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(group: Any) -> list[str]:
        model = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        with Checkpointer(tmp_path / "run", group=group, signals=(), timeout=30, async_save=False) as checkpointer:
            decision = checkpointer.resume(model=model, data="new")
            if not decision.initial_step:
                checkpointer.save(4, blocking=True)
        return list(decision.warnings)

    assert in_threads(2, work) == [[], []]
    caplog.clear()
    found = in_threads(2, work)
    assert found[0] == found[1] != []
    assert [line for line in caplog.messages if line.startswith("resume: ")] == [f"resume: {one}" for one in found[0]]
