"""Wrong types and values at every parameter of the public functions: each is an error of the package's own tree."""

from __future__ import annotations

import errno
import inspect
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

import reshard
from reshard.commit import filesystem
from reshard.errors import ArgumentError, ReshardError, StorageError
from reshard.names import NameMap
from reshard.options import Options
from reshard.storage.location import locate
from reshard.values.argument_types import Seconds
from reshard.values.arguments import checked, checks_of, parse_size
from reshard.write import background

if TYPE_CHECKING:
    from pathlib import Path

LAYOUT = {"mesh": {"tp": 1}, "rules": [{"match": "*"}]}
YAML = "mesh: {tp: 2}\nrules: []\n" * 100


class Odd:
    pass


WRONG: list[object] = [
    *(None, 5, -1, 1.5, float("nan"), float("inf"), True, 1 << 70, b"x", b"\xff", [], [1], ["a"], (1, 2), set()),
    *({}, {1: 2}, {"a": "b"}, {"\ud800": 1}, object(), Odd, lambda *_: None, np.zeros(2)),
    *("", "x", "\ud800", "a\0b", "x" * 5000, YAML),
]

Case = tuple[Callable[..., object], Mapping[str, object]]


def public_functions() -> dict[str, Case]:
    """Each function and arguments with which it works, or fails by an error of the tree."""
    reshard.save_file({"w": np.arange(8.0)}, "m.safetensors")
    reshard.save("root", 1, {"w": np.arange(8.0)}, commit={"durable": False})
    checkpoint = reshard.open("m.safetensors")
    opened = reshard.safe_open("m.safetensors", "np")
    layout = reshard.ModelLayout.from_mapping(LAYOUT)
    tensors = {"tensors": {"w": (2,)}}
    cases: dict[str, Case] = {
        "open": (reshard.open, {"path": "m.safetensors"}),
        "load": (reshard.load, {"root": "root"}),
        "save": (
            reshard.save,
            {"root": "saved", "iteration": 1, "model": {"w": np.zeros(2)}, "commit": {"durable": False}},
        ),
        "convert": (reshard.convert, {"src": "m.safetensors", "dst": "o.safetensors", "overwrite": True}),
        "convert_files": (reshard.convert_files, {"src": "nothing.ckpt"}),
        "diff": (reshard.diff, {"a": "m.safetensors", "b": "m.safetensors"}),
        "verify": (reshard.verify, {"path": "root"}),
        "prune": (reshard.prune, {"root": "root", "keep": 5}),
        "pin": (reshard.pin, {"root": "root", "iteration": 1}),
        "unpin": (reshard.unpin, {"root": "root", "iteration": 1}),
        "load_file": (reshard.load_file, {"filename": "m.safetensors"}),
        "save_file": (reshard.save_file, {"tensors": {"w": np.zeros(2)}, "filename": "x.safetensors"}),
        "safe_open": (reshard.safe_open, {"filename": "m.safetensors", "framework": "np"}),
        "SafeOpen.get_tensor": (opened.get_tensor, {"name": "w"}),
        "SafeOpen.get_slice": (opened.get_slice, {"name": "w"}),
        "ModelLayout.from_yaml": (reshard.ModelLayout.from_yaml, {"path": "l.yaml"}),
        "ModelLayout.from_mapping": (reshard.ModelLayout.from_mapping, {"mapping": LAYOUT}),
        "ModelLayout.from_tp_plan": (reshard.ModelLayout.from_tp_plan, {"plan": {"a": "rowwise"}, "tp": 1}),
        "ModelLayout.preset": (reshard.ModelLayout.preset, {"name_or_config": "llama"}),
        "ModelLayout.like": (reshard.ModelLayout.like, {"checkpoint": checkpoint}),
        "ModelLayout.from_strategy": (reshard.ModelLayout.from_strategy, {"path": "nothing"}),
        "ModelLayout.bind": (layout.bind, tensors),
        "ModelLayout.to_strategy": (layout.to_strategy, tensors),
        "NameMap.from_mapping": (NameMap.from_mapping, {"mapping": {"rules": []}}),
        "NameMap.from_yaml": (NameMap.from_yaml, {"path": "n.yaml"}),
        "NameMap.preset": (NameMap.preset, {"name": "qwen3-mindspore"}),
        "Checkpoint.load": (checkpoint.load, {}),
        "Checkpoint.read": (checkpoint.read, {"key": "w"}),
        "Checkpoint.shape": (checkpoint.shape, {"key": "w"}),
        "Checkpoint.getitem": (checkpoint.__getitem__, {"key": "w"}),
        "Checkpoint.keys": (checkpoint.keys, {}),
        "Checkpoint.bind": (checkpoint.bind, {"layout": LAYOUT}),
        "Checkpoint.renamed": (checkpoint.renamed, {"names": {"rules": []}}),
        "Checkpoint.stored": (checkpoint.stored, {"rank": 0}),
        "Checkpoint.scrub": (checkpoint.scrub, {}),
    }
    return cases


def strangers(function: Callable[..., Any], good: Mapping[str, object]) -> list[str]:
    """What a function raises that is no error of the tree, each parameter given every wrong value."""
    found = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        for value in WRONG:
            try:
                made = function(**{**good, parameter.name: value})
                if isinstance(made, reshard.PendingSave):
                    made.result(60)
                elif hasattr(made, "step"):  # a Checkpointer, which may handle signals
                    made.close()
            except ReshardError:
                continue
            except Exception as error:  # noqa: BLE001  that there is none is the test
                found.append(f"{parameter.name}={value!r:.40}: {type(error).__name__}: {error!s:.80}")
    return found


@pytest.mark.slow(disk=False)
@pytest.mark.filterwarnings("ignore")
def test_wrong_arguments_of_public_functions_are_errors_of_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = {name: strangers(function, good) for name, (function, good) in public_functions().items()}
    assert {name: errors for name, errors in found.items() if errors} == {}


@pytest.mark.filterwarnings("ignore")
def test_wrong_arguments_of_a_checkpointer_are_errors_of_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from reshard.torch import Checkpointer

    monkeypatch.chdir(tmp_path)
    assert strangers(Checkpointer, {"root": "root", "signals": ()}) == []


# Types of which a function makes options or objects of its own, which checks the value.
PARSED = {
    *(
        "Any",
        "object",
        "CommitLike",
        "EnvironmentLike",
        "ExportsLike",
        "FilesLike",
        "RanksLike",
        "FormatLike",
        "InitFromLike",
        "MirrorLike",
        "RetentionLike",
        "SettingsLike",
        "StrictLike",
    ),
    *("VerifyLike", "CommonInfo | Mapping[str, object]", "Interrupts | Mapping[str, object]", "DeviceMesh"),
    *("Reading | Mapping[str, object]", "Select | Mapping[str, object]", "float", "int | str", "int | EllipsisType"),
    *("nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]", "torch.device | str"),
}


def test_every_argument_and_option_is_checked_by_its_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    functions = [getattr(one, "__func__", one) for one, _ in public_functions().values()]
    of_torch = pytest.importorskip("reshard.torch").Checkpointer
    checked_ones: list[Any] = [inspect.unwrap(one) for one in [*functions, of_torch.__init__, of_torch.resume]
                               if hasattr(one, "__wrapped__")]  # fmt: skip
    assert len(checked_ones) > 25
    for of in [*checked_ones, *Options.__subclasses__()]:
        checks = checks_of(of)
        for name, annotation in of.__annotations__.items():
            is_own = name == "return" or annotation.startswith("ClassVar")
            assert is_own or name in checks or annotation.removesuffix(" | None") in PARSED, (of, name, annotation)


def test_a_name_of_a_parameter_says_nothing_about_its_values() -> None:
    @checked
    def reshape(shape: tuple[int, int], keep: Literal["all", "none"] = "all", missing: int | None = None) -> str:
        return f"{shape} {keep} {missing}"

    assert reshape((2, 3), "none", 5) == "(2, 3) none 5"
    with pytest.raises(ArgumentError, match='`keep` is \'some\', expected "all" or "none"'):
        reshape((2, 3), keep="some")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="`shape` is None, expected two whole numbers"):
        reshape(None)  # type: ignore[arg-type]


CASES: list[tuple[dict[str, object], str]] = [
    ({"timeout": None}, "`timeout` is None, expected a number of seconds"),
    ({"timeout": "5"}, "`timeout` is '5', expected a number of seconds"),
    ({"shapes": [1]}, "`shapes` is of type list, expected a mapping"),
    ({"metrics": [1]}, "`metrics` is of type list, expected a mapping"),
    ({"progress": 5}, "`progress` is of type int, expected a function"),
    ({"threads": 1.5}, "`threads` is 1.5, expected a whole number"),
    ({"threads": 1 << 64}, "`threads` has more than 63 bits, expected a whole number"),
    ({"commit": {"durable": "no"}}, "`durable` is 'no', expected True or False"),
]


@pytest.mark.parametrize(("options", "message"), CASES)
def test_the_message_names_the_argument(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        reshard.save(tmp_path / "root", 1, {"w": np.zeros(2)}, **options)
    assert message in caught.value.message
    assert not (tmp_path / "root").exists()


def test_a_key_that_has_no_utf8_form_is_refused(tmp_path: Path) -> None:
    reshard.save_file({"w": np.zeros(2)}, tmp_path / "m.safetensors")
    with (
        reshard.open(tmp_path / "m.safetensors") as checkpoint,
        pytest.raises(ArgumentError, match="cannot be encoded as UTF-8"),
    ):
        checkpoint.read("\ud800")


def test_the_text_of_a_layout_is_no_path(tmp_path: Path) -> None:
    reshard.save_file({"w": np.zeros(2)}, tmp_path / "m.safetensors")
    with reshard.open(tmp_path / "m.safetensors") as checkpoint, pytest.raises(StorageError) as caught:
        checkpoint.load(YAML, rank=0)
    assert caught.value.errno == errno.ENAMETOOLONG
    assert caught.value.hint is not None
    assert "yaml.safe_load" in caught.value.hint


def test_metadata_of_a_file_is_text_by_text(tmp_path: Path) -> None:
    for metadata in ([1, 2], "abc", {"a": 1}):
        with pytest.raises(ArgumentError):
            reshard.save_file({"w": np.zeros(2)}, tmp_path / "m.safetensors", metadata=metadata)  # type: ignore[arg-type]


def test_a_function_keeps_the_message_of_a_missing_argument() -> None:
    @checked
    def wait(timeout: Seconds) -> float:
        return timeout

    with pytest.raises(TypeError, match="missing 1 required positional argument: 'timeout'"):
        wait()  # type: ignore[call-arg]
    assert wait(2) == 2


def test_saving_within_a_save_in_the_background_is_refused(tmp_path: Path) -> None:
    def after(_: object) -> list[str]:
        reshard.save(tmp_path / "other", 2, {"w": np.zeros(2)})
        return []

    pending = reshard.save(tmp_path / "root", 1, {"w": np.zeros(2)}, blocking=False, after=after)
    with pytest.raises(ArgumentError, match="this call is from its own"):
        pending.result(60)
    assert reshard.open(tmp_path / "root").iteration == 1
    assert not (tmp_path / "other").exists()


@pytest.mark.disk  # memory is volatile, and a save says so
def test_what_after_returns_is_checked(tmp_path: Path) -> None:
    report = reshard.save(tmp_path, 1, {"w": np.zeros(2)}, after=lambda _: None)  # type: ignore[arg-type,return-value]
    assert report.warnings == ()
    with pytest.raises(ArgumentError, match="iteration 2 is saved, but `after` returned a int"):
        reshard.save(tmp_path, 2, {"w": np.zeros(2)}, after=lambda _: 5)  # type: ignore[arg-type,return-value]


def test_a_close_that_fails_is_a_storage_error_of_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system tells at the close that it could not keep what was written."""
    real = os.close

    def failing(handle: int) -> None:
        is_file = os.path.isfile(f"/proc/self/fd/{handle}")  # noqa: PTH113  of a link
        real(handle)
        if is_file:
            raise OSError(errno.EIO, "Input/output error")

    reshard.save(tmp_path / "root", 1, {"w": np.zeros(2)})
    monkeypatch.setattr(os, "close", failing)
    with pytest.raises(StorageError, match="writing"):
        filesystem.make_file(locate(tmp_path / "claim"), b"x", durable=False)
    assert not (tmp_path / "claim").exists()
    with reshard.open(tmp_path / "root") as checkpoint:
        assert checkpoint.read("w").shape == (2,)
    background.finish_previous(1)


def test_a_size_is_an_integer_of_any_package() -> None:
    assert parse_size(np.int64(5)) == 5  # type: ignore[arg-type]
