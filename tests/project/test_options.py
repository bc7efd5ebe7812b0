"""Groups of options: as objects, as mappings and from YAML; what is refused, and where an earlier keyword is now."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.helpers.threads import in_threads

import reshard
from reshard import (
    Checkpoint1Options,
    Commit,
    Environment,
    Exports,
    Files,
    Interrupts,
    Mirror,
    Ranks,
    Reading,
    Retention,
    Select,
    Verify,
)
from reshard.config import Config
from reshard.errors import ArgumentError, ConfigError, ReshardError
from reshard.options import InitFrom, Options, Settings, Strict, format_of, retention_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GROUPS: list[type[Options]] = Options.__subclasses__()
W = {"w": np.arange(4.0)}
NOT_DURABLE = Commit(durable=False)


def hint_of(error: ReshardError) -> str:
    assert error.hint is not None
    return error.hint


# -- each option has one home


def test_every_option_has_one_home() -> None:
    known = {
        Retention,
        Verify,
        Commit,
        Files,
        Checkpoint1Options,
        Interrupts,
        Exports,
        Mirror,
        Ranks,
        Environment,
        Select,
        Reading,
        InitFrom,
        Strict,
        Settings,
    }
    assert known == set(GROUPS)
    names = [field.name for group in GROUPS for field in dataclasses.fields(group)]
    # The same choice in two functions, and in two roots.
    assert sorted(name for name in set(names) if names.count(name) > 1) == ["entry", "keep"]
    for function in (reshard.save, reshard.load, reshard.convert, reshard.prune):
        parameters = inspect.signature(function).parameters
        taken = {f.name for one in GROUPS if one.keyword in parameters for f in dataclasses.fields(one)}
        assert taken & parameters.keys() <= {"keep", "max_shard_size"}, function  # the short forms


def test_every_option_is_documented_where_it_is() -> None:
    for group in GROUPS:
        documented = set(re.findall(r"^        ([a-z_]+): ", inspect.getdoc(group) or "", re.MULTILINE))
        documented |= set(re.findall(r"^    ([a-z_]+): ", inspect.getdoc(group) or "", re.MULTILINE))
        assert {field.name for field in dataclasses.fields(group)} <= documented, group


def test_groups_are_frozen_composable_and_printable() -> None:
    retention = Retention(keep=7, best=("loss", 2))
    assert dataclasses.replace(retention, keep=5) == Retention(best=("loss", 2))
    assert repr(retention) == "Retention(keep=7, best=('loss', 2))"
    assert [repr(group()) for group in GROUPS] == [f"{group.__name__}()" for group in GROUPS]
    with pytest.raises(dataclasses.FrozenInstanceError):
        retention.keep = 3  # type: ignore[misc]
    with pytest.raises(ArgumentError, match="`keep` is a number of iterations from 1 on"):
        dataclasses.replace(retention, keep=0)


# -- objects and mappings


@pytest.mark.parametrize("commit", [NOT_DURABLE, {"durable": False}], ids=["object", "mapping"])
def test_a_mapping_means_what_the_object_means(tmp_path: Path, commit: Any) -> None:
    assert not reshard.save(tmp_path / "run", 1, W, commit=commit).durable
    retention = {"keep": 1, "keep_every": 2, "best": ["loss", 1]}  # as YAML and JSON have it
    assert Retention.of(retention) == Retention(keep=1, keep_every=2, best=("loss", 1))
    for iteration in (2, 3, 4, 5):
        reshard.save(tmp_path / "run", iteration, W, retention=retention, metrics={"loss": -iteration}, commit=commit)
    assert {path.name[-1] for path in (tmp_path / "run").glob("iteration_*")} == {"2", "4", "5"}
    assert reshard.load(tmp_path / "run", verify={"on_load": "full"}, reading={"copy": False}).iteration == 5
    reshard.convert(tmp_path / "run", tmp_path / "hf", files={"max_shard_size": 8}, select={"rename": {"": "x."}})
    assert reshard.open(tmp_path / "hf").keys() == ["x.w"]
    assert reshard.prune(tmp_path / "run", retention={"keep": 1}).iterations == (2, 4)


def test_one_object_serves_saving_and_loading(tmp_path: Path) -> None:
    verify = Verify(on_load="structure", after_save=True)
    reshard.save(tmp_path, 1, W, verify=verify)
    shard = next(tmp_path.glob("iteration_*/*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert reshard.load(tmp_path, verify=verify).iteration == 1
    with pytest.raises(ReshardError):
        reshard.load(tmp_path, verify=dataclasses.replace(verify, on_load="touched"))


def test_the_format_may_carry_its_options(tmp_path: Path) -> None:
    given: list[Any] = [Checkpoint1Options(sink_size=5), {"name": "checkpoint1", "sink_size": 5}]
    for number, format in enumerate(given):  # noqa: A001
        assert reshard.save(tmp_path / str(number), 10, W, format=format).suffix == "2_5"
    assert format_of("checkpoint1") == format_of({"name": "checkpoint1"}) == ("checkpoint1", Checkpoint1Options())
    with pytest.raises(ArgumentError, match="without `name`"):
        format_of({"sink_size": 5})
    with pytest.raises(ArgumentError, match="`checkpoint2` has no options, found `sink_size`"):
        format_of({"name": "checkpoint2", "sink_size": 5})


# -- what is refused


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_an_unknown_field_is_refused_with_the_nearest_name(group: type[Options]) -> None:
    for field in dataclasses.fields(group):
        with pytest.raises(ArgumentError, match=f"`{group.__name__}` has no field `{field.name}x`") as caught:
            group.of({f"{field.name}x": 1})
        assert f"did you mean `{field.name}`?" in hint_of(caught.value)
    with pytest.raises(ArgumentError, match="has no field `1`") as caught:
        group.of({1: 2})  # type: ignore[dict-item]
    assert "its fields are" in hint_of(caught.value)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_a_wrong_type_is_refused_by_the_constructor(group: type[Options]) -> None:
    for field in dataclasses.fields(group):
        if field.name in {"model_files", "config"}:  # a path of any name; any value of JSON
            continue
        for value in (object(), 1.5, b"x"):
            if field.name in ("grace_s", "wait_s") and value == 1.5:
                continue
            with pytest.raises(ArgumentError, match=field.name):
                group(**{field.name: value})
    for value in (
        5,
        [1],
        *(["durable"] if group not in (InitFrom, Mirror) else []),
        object(),
    ):  # a path is short for them
        with pytest.raises(ArgumentError, match=f"`{group.keyword}`"):
            group.of(value)  # type: ignore[arg-type]


def test_both_forms_are_refused(tmp_path: Path) -> None:
    both: dict[str, Any] = {"keep": 5, "retention": Retention(keep_every=10)}
    for function in (lambda: reshard.save(tmp_path / "run", 1, W, **both), lambda: reshard.prune(tmp_path, **both)):
        with pytest.raises(ArgumentError, match="`keep` and `retention` are both given"):
            function()
    assert not (tmp_path / "run").exists()
    with pytest.raises(ArgumentError, match="needs `keep` or `retention`"):
        reshard.prune(tmp_path)
    assert retention_of(None, None) is None


def test_options_of_another_function_are_refused(tmp_path: Path) -> None:
    reshard.save_file(W, tmp_path / "m.safetensors")
    for field, value in (("max_shard_size", 100), ("model_files", tmp_path), ("modes", "mindspore-transformers")):
        with pytest.raises(ArgumentError, match=f"`{field}` of `Files` is an option of `convert`"):
            reshard.save(tmp_path / "run", 1, W, files={field: value})
    for field in ("rollback", "takeover"):
        with pytest.raises(ArgumentError, match="options of a save"):
            reshard.convert(tmp_path / "m.safetensors", tmp_path / "out", commit={field: True})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.safetensors"]


def test_options_that_one_rank_gives_wrongly_are_an_error_on_all_ranks(tmp_path: Path) -> None:
    def work(group: Any) -> str:
        wrong = {"keep_evry": 1} if group.rank == 1 else {"keep_every": 1}
        with pytest.raises(ArgumentError) as caught:
            reshard.save(tmp_path, 1, W, layout=WHOLE, group=group, timeout=20, retention=wrong)
        return caught.value.message

    found = in_threads(2, work)
    assert all("has no field `keep_evry`" in message for message in found), found


WHOLE = {"mesh": {"dp": 2}, "rules": [{"match": "*"}]}


# -- keywords of earlier releases

CALLS: list[tuple[Callable[..., object], tuple[object, ...], str, object, str]] = [
    (reshard.save, ("r", 1, W), "keep_every", 1000, "retention=Retention(keep_every=1000)"),
    (reshard.save, ("r", 1, W), "keep_best", ("loss", 3), "retention=Retention(best=('loss', 3))"),
    (reshard.save, ("r", 1, W), "verify_after_save", True, "verify=Verify(after_save=True)"),
    (reshard.save, ("r", 1, W), "prefix", "p", "files=Files(prefix='p')"),
    (reshard.save, ("r", 1, W), "sink_size", 2, "format=Checkpoint1Options(sink_size=2)"),
    (reshard.load, ("r",), "copy", False, "reading=Reading(copy=False)"),
    (reshard.convert, ("a", "b"), "durable", False, "commit=Commit(durable=False)"),
    (reshard.convert, ("a", "b"), "drop", "adam_", "select=Select(drop='adam_')"),
    (reshard.prune, ("r", 3), "keep_every", 10, "retention=Retention(keep_every=10)"),
]


@pytest.mark.parametrize(("function", "args", "name", "value", "place"), CALLS, ids=lambda one: str(one)[:20])
def test_a_moved_keyword_is_told_where_it_is_now(
    function: Callable[..., object], args: tuple[object, ...], name: str, value: object, place: str
) -> None:
    with pytest.raises(ArgumentError, match=f"`{name}` is a field of `") as caught:
        function(*args, **{name: value})
    assert hint_of(caught.value) == f"write `{place}`"


def test_a_keyword_that_there_never_was_is_an_error_of_python() -> None:
    with pytest.raises(TypeError, match="nonsense"):
        reshard.save("r", 1, W, nonsense=1)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="grace_s"):
        reshard.convert("a", "b", grace_s=1)  # type: ignore[call-arg]


# -- configurations

YAML = """
output_dir: out
reshard:
  retention: {keep_every: 1000, best: [loss, 3]}
  verify: {after_save: true, on_load: full}
  commit: {private: true}
  interrupts: {grace_s: 110}
callbacks:
  - type: CheckpointMonitor
    save_checkpoint_steps: 500
    keep_checkpoint_max: 3
    prefix: llama
    remove_redundancy: True
"""


def config_of(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "train.yaml"
    path.write_text(text)
    return Config.from_yaml(path)


def test_options_from_yaml(tmp_path: Path) -> None:
    assert config_of(tmp_path, YAML).options() == {
        "retention": Retention(keep=3, keep_every=1000, best=("loss", 3)),
        "verify": Verify(on_load="full", after_save=True),
        "commit": Commit(private=True),
        "files": Files(prefix="llama", dedup=True),
        "interrupts": Interrupts(grace_s=110),
    }
    legacy = Config.from_mapping(
        {"use_legacy_format": True, "save_network_params": True, "runner_config": {"sink_size": 4}}
    )
    assert legacy.options()["format"] == Checkpoint1Options(sink_size=4, save_network_params=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "reshard:\n  retentoin: {keep: 3}\n",
            r"train.yaml, line 2: reshard: no such option.*`retentoin`(.|\n)*`retention`\?",
        ),
        (
            "reshard:\n  retention: {kep: 3}\n",
            r"line 2: reshard.retention: .*no field `kep`(.|\n)*did you mean `keep`\?",
        ),
        ("reshard:\n  commit: {durable: 5}\n", r"line 2: reshard.commit: `durable` is of type int"),
        ("reshard:\n  commit: false\n", r"line 2: reshard.commit: `commit` is of type bool"),
        ("reshard: 5\n", r"line 1: reshard: expected a mapping"),
        ("keep_checkpoint_max: 3\nreshard:\n  retention: {keep: 4}\n", r"line 3: reshard.retention.keep: contradicts"),
        ("prefix: a\nreshard:\n  files: {prefix: b}\n", r"line 3: reshard.files.prefix: contradicts `prefix`"),
    ],
    ids=lambda one: one[:30],
)
def test_what_is_wrong_in_yaml_is_told_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path, text)


def test_a_checkpointer_takes_the_options_of_its_configuration(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from reshard.torch import Checkpointer

    def made(**options: Any) -> Any:
        return Checkpointer.from_config(config_of(tmp_path, YAML), root=tmp_path / "out", signals=(), **options)

    plain = made()._options
    assert plain.retention == Retention(keep=3, keep_every=1000, best=("loss", 3))
    assert (plain.verify.after_save, plain.commit.private, plain.files.prefix) == (True, True, "llama")
    assert made()._interrupts == Interrupts(grace_s=110)
    # A mapping changes fields, an object and the short form replace the group.
    assert made(files={"prefix": "x"})._options.files == Files(prefix="x", dedup=True)
    assert made(files=Files(prefix="x"))._options.files == Files(prefix="x")
    assert made(retention={"keep": 9})._options.retention == Retention(keep=9, keep_every=1000, best=("loss", 3))
    assert made(keep=9)._options.retention == Retention(keep=9)
    assert made(keep=None)._options.retention is None
    assert made(format="checkpoint1", retention=Retention(keep=2))._options.format == "checkpoint1"


def test_the_short_form_of_a_checkpointer(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from reshard.torch import Checkpointer

    def retention(**options: Any) -> Retention | None:
        return Checkpointer(tmp_path, signals=(), **options)._options.retention

    assert retention() == retention(keep=5) == retention(retention={}) == Retention(keep=5)
    assert retention(keep=None) is None
    assert retention(retention=Retention(keep=2)) == Retention(keep=2)
    with pytest.raises(ArgumentError, match="`keep` and `retention` are both given"):
        retention(keep=5, retention=Retention())
    assert Checkpointer(tmp_path, signals=(), verify="full")._options.verify == Verify(on_load="full")
    with pytest.raises(ArgumentError, match="`grace_s` is a field of `Interrupts`"):
        retention(grace_s=3)
