"""From a mapping to the fields of `Config`. Misspelt and misplaced keys and contradictions are errors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from reshard.config.words import (
    ELSEWHERE,
    FOREIGN,
    MONITOR,
    MONITORS,
    NUMBER,
    OTHERS,
    OWN,
    SECTION,
    SECTIONS,
    TOP,
    Word,
)
from reshard.documents.fields import At, and_words, found, is_list
from reshard.documents.strict_yaml import at_path
from reshard.errors import ArgumentError
from reshard.options import Commit, Files, InitFrom, Interrupts, Mirror, Options, Retention, Verify
from reshard.values.words import nearest, show

_NEAR = 0.84  # similarity to a known key from which a key counts as misspelt
_DEFAULT_STEPS_OF_SECTION = 1000  # the default of MindSpore Transformers in its section `checkpoint`
_GROUPS: dict[str, type[Options]] = {
    one.keyword: one for one in (Retention, Verify, Commit, Files, Interrupts, Mirror, InitFrom)
}
_SHARED = ("keep", "prefix", "dedup")  # fields of options that MindSpore configuration keys set as well


class _Values:
    """The value of each field, and the key that set it; two keys that set different values are an error."""

    def __init__(self) -> None:
        self.said: dict[str, tuple[object, At]] = {}
        self.without_effect: dict[str, None] = {}

    def take(self, at: At, name: str, word: Word, value: object) -> object:
        """Parse the value of a key, and keep it for its field."""
        if value is None:
            return None  # configurations of MindSpore Transformers write null for a key without a value
        parsed = word.kind.parse(at, value)
        if word.inert and parsed not in (None, False):
            self.without_effect[f"`{name}`"] = None
        if word.field is not None and parsed is not None:
            opposite = word.field.startswith("!")
            self.set(word.field.removeprefix("!"), not parsed if opposite else parsed, at)
        return parsed

    def set(self, field: str, value: object, at: At) -> None:
        """Keep a value; refuse it if another key has set a different one."""
        before = self.said.setdefault(field, (value, at))
        if before[0] != value:
            line = f", line {at.lines[before[1].path]}" if before[1].path in at.lines else ""
            other = at_path(before[1].path).removesuffix(": ")
            raise at.error(f"contradicts `{other}`{line}", hint="say it in one place")


def read_values(value: object, at: At) -> dict[str, Any]:
    """The fields of `Config` from a whole configuration."""
    if not isinstance(value, Mapping):
        raise at.error(f"expected a mapping with words such as `load_checkpoint`, found {found(value)}")
    values = _Values()
    top = _read_words(at, value, TOP, values, sections=True)
    for name, words in SECTIONS.items():
        if value.get(name) is not None:
            _read_words(at / name, _mapping(at / name, value[name]), words, values)
    section = None
    if value.get("checkpoint") is not None:
        section = _read_words(
            at / "checkpoint", _mapping(at / "checkpoint", value["checkpoint"]), SECTION, values, closed=True
        )
    if value.get("callbacks") is not None:
        _read_callbacks(at / "callbacks", value["callbacks"], values)
    groups: tuple[Options, ...] = ()
    if value.get("reshard") is not None:
        groups = _read_options(at / "reshard", _mapping(at / "reshard", value["reshard"]), values)
    if isinstance(value.get("monitor_config"), Mapping):
        _read_health(at / "monitor_config", value["monitor_config"], values)
    return {**_settle(values, top, section), "groups": groups}


def _settle(values: _Values, top: dict[str, object], section: dict[str, object] | None) -> dict[str, Any]:
    """What the keys mean together: defaults that depend on the place of a key."""
    said = {field: value for field, (value, _) in values.said.items()}
    if isinstance(said.get("resume"), str):
        said["resume"], said["resume_file"] = True, said["resume"]
    if section is not None:
        if said.get("legacy_format"):
            raise values.said["legacy_format"][1].error("contradicts the section `checkpoint`, which is Checkpoint 2.0")
        # With the section a run resumes by default; with the older keys it does not.
        if section.get("load_path"):
            said.setdefault("resume", True)
        if section.get("save_path"):
            said.setdefault("save_every", _DEFAULT_STEPS_OF_SECTION)
        if section.get("enable_save") is False:
            said["save_every"] = None
    if said.get("model_files") is not None and said.get("hf_every") is None:
        raise values.said["model_files"][1].error("belongs to `hf_every`, which is not given")
    if said.get("merge") and said.get("hf_every") is None:
        raise values.said["merge"][1].error("belongs to `hf_every`, which is not given")
    if not said.get("legacy_format"):
        # Other formats tell weights from the rest by their files.
        for field in ("save_network_params", "save_trainable_params"):
            if said.get(field):
                values.without_effect[f"`{field}`"] = None
    data, expert = (cast("int", said.get(field, 1)) for field in ("data_parallel", "expert_parallel"))
    if data % expert:
        raise values.said["expert_parallel"][1].error(
            f"{expert} does not divide data_parallel, {data}: the experts are divided over ranks that share their data"
        )
    # On the top level this key of MindSpore Transformers is about loading, where the files record it. In a
    # configuration without callbacks it can only be about saving.
    if top.get("remove_redundancy") is not None:
        said.setdefault("dedup", top["remove_redundancy"])
    if top.get("output_dir") is not None:
        said.setdefault("save_path", str(Path(str(top["output_dir"])) / "checkpoint"))
    return {**said, "without_effect": tuple(values.without_effect)}


def _read_words(
    at: At,
    mapping: Mapping[Any, object],
    words: Mapping[str, Word],
    values: _Values,
    *,
    closed: bool = False,
    sections: bool = False,
) -> dict[str, object]:
    """Read the keys of one place. If it is `closed` other keys are refused, else only those that look misspelt."""
    parsed: dict[str, object] = {}
    names = [*words, *SECTIONS, *OTHERS] if sections else list(words)
    for name, value in mapping.items():
        if name in words:
            parsed[name] = values.take(at / name, name, words[name], value)
        elif isinstance(name, str) and name not in names and not (sections and name in FOREIGN):
            if sections and name in ELSEWHERE:
                raise (at / name).error(f"belongs under `{ELSEWHERE[name]}`")
            _refuse_misspelt(at / name, name, names, words, closed=closed)
        elif closed and name not in names:
            raise at.error(f"expected words as keys, found {found(name)}")
    return parsed


def _refuse_misspelt(at: At, name: str, names: list[str], words: Mapping[str, Word], *, closed: bool) -> None:
    near = nearest(name, names, n=1, cutoff=0.6 if closed else _NEAR)
    if near:
        takes = words[near[0]].kind.accepts if near[0] in words else "a section"
        raise at.error(f"no such word; `{near[0]}` takes {takes}", hint=f"did you mean `{near[0]}`?")
    if closed:
        raise at.error(f"no such word; accepted are {and_words([f'`{one}`' for one in names])}")


def _mapping(at: At, value: object) -> Mapping[Any, object]:
    if not isinstance(value, Mapping):
        raise at.error(f"expected a mapping, found {found(value)}")
    return value


def _read_callbacks(at: At, value: object, values: _Values) -> None:
    if not is_list(value):
        raise at.error(f"expected a list of callbacks, each with its `type`, found {found(value)}")
    for n, item in enumerate(cast("list[object]", value)):
        here = at / n
        callback = _mapping(here, item)
        kind = callback.get("type")
        if kind in MONITORS:
            _read_words(here, callback, MONITOR, values, closed=True)
        elif isinstance(kind, str) and nearest(kind, MONITORS, n=1, cutoff=_NEAR):
            raise (here / "type").error(
                f"no such callback: {show(kind)}; `CheckpointMonitor` is the one that saves checkpoints",
                hint="did you mean `CheckpointMonitor`?",
            )


def _read_options(at: At, value: Mapping[Any, object], values: _Values) -> tuple[Options, ...]:
    """Read the section `reshard`: single options, and groups of them, each a mapping of the fields of its class."""
    groups = []
    for name, given in value.items():
        if name in OWN:
            values.take(at / name, name, OWN[name], given)
            continue
        if name not in _GROUPS:
            names = [*_GROUPS, *OWN]
            near = nearest(str(name), names, n=1)
            known = and_words([f"`{one}`" for one in names])
            raise at.error(
                f"no such option or group of options: {show(str(name))}; accepted are {known}",
                hint=f"did you mean `{near[0]}`?" if near else None,
            )
        try:
            made: Options = _GROUPS[name].of(cast("Any", given))
        except ArgumentError as error:
            raise (at / name).error(error.message, hint=error.hint) from None
        if isinstance(made, InitFrom):  # it is what the first start loads, as `load_checkpoint` without resuming is
            values.set("load_path", os.fspath(made.path), at / name)
            values.set("resume", value=False, at=at / name)
        for field in _SHARED:
            if isinstance(given, Mapping) and given.get(field) is not None:
                values.set(field, given[field], at / name / field)
        groups.append(made)
    return tuple(groups)


def _read_health(at: At, value: Mapping[Any, object], values: _Values) -> None:
    """A threshold asks for health checks; the number itself is for the monitor of MindSpore Transformers."""
    if value.get("health_checkpoint") is None:
        return
    here = at / "health_checkpoint"
    threshold = _mapping(here, value["health_checkpoint"]).get("embedding_local_norm_threshold")
    if threshold is not None:
        where = here / "embedding_local_norm_threshold"
        NUMBER.parse(where, threshold)
        values.set("healthy_only", value=True, at=where)
