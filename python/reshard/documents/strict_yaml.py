"""A strict reader for small YAML files from untrusted sources. Returns plain Python values, and the line of each.

It accepts what a configuration needs: mappings whose keys are text or integers, lists, text, integers, `true`, `false`
and `null`. Duplicate keys, tags, merge keys, several documents and deep nesting are errors. Each alias counts with all
its values, so that a few lines cannot expand to millions of values.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import yaml

from reshard.errors import CheckpointNotFoundError, LayoutError, ReshardError
from reshard.storage.inputs import read_input
from reshard.values.words import show

if TYPE_CHECKING:
    from collections.abc import Iterator

Step: TypeAlias = str | int
Lines: TypeAlias = dict[tuple[Step, ...], int]
"""The line, from 1, of the value at each path of mapping keys and list indices."""

_MAX_BYTES = 16 << 20
_MAX_VALUES = 1_000_000
_MAX_DEPTH = 16
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,18})")
# A character as the two escapes of JSON, which YAML does not know. The backslashes before it are pairs.
_SURROGATES = re.compile(r"(?<!\\)((?:\\\\)*)((?:\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2})")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's scanner where PyYAML has it: ten times as fast
_START = (yaml.ScalarEvent, yaml.SequenceStartEvent, yaml.MappingStartEvent)
_END = (yaml.SequenceEndEvent, yaml.MappingEndEvent)


def read_yaml(
    path: str | os.PathLike[str], *, what: str = "layout", error_class: type[ReshardError] = LayoutError
) -> tuple[object, Lines]:
    """Read a YAML file with one document.

    Args:
        path: the file, UTF-8, at most 16 MiB.
        what: the kind of file, for messages.
        error_class: the class of errors about the content.

    Returns:
        The value, and the line of each value in it.

    Raises:
        CheckpointNotFoundError: the file does not exist.
        StorageError: the operating system failed to read it.
        error_class: the file is not YAML, or uses a feature that is not accepted; the message names file, line and key.
    """
    try:
        data = read_input(path, _MAX_BYTES + 1)
    except CheckpointNotFoundError:
        raise CheckpointNotFoundError(
            f"there is no {what} file {show(os.fspath(path))}", path=os.fspath(path)
        ) from None
    return _Reader(os.fspath(path), error_class).read(data)


def quote(text: str) -> str:
    r"""The text as a double-quoted YAML scalar on one line.

    Example:
        >>> print(quote('*.w"'))
        "*.w\""
    """
    return '"' + "".join(_quoted_char(c) for c in text) + '"'


def _quoted_char(c: str) -> str:
    if c in '"\\':
        return "\\" + c
    if c.isprintable():
        return c
    n = ord(c)
    return f"\\x{n:02x}" if n < 0x100 else f"\\u{n:04x}" if n < 0x10000 else f"\\U{n:08x}"


_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Words that YAML 1.1 or 1.2 does not read as text.
_RESERVED = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})


def flow(value: object) -> str:
    """A value on one line of YAML.

    Example:
        >>> flow({"cut": [None, "tp"], "match": "*.w"})
        '{cut: [null, tp], match: "*.w"}'
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{flow(k)}: {flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    text = str(value)
    return text if _PLAIN.fullmatch(text) and text.lower() not in _RESERVED else quote(text)


class _Reader:
    """Builds the values of one file from the events of the parser, which are produced on demand."""

    def __init__(self, source: str, error_class: type[ReshardError]) -> None:
        self.source = source
        self.error_class = error_class
        self.lines: Lines = {}
        self.n_values = 0
        self.anchors: dict[str, tuple[object, int]] = {}  # value and how many values it holds

    def read(self, data: bytes) -> tuple[object, Lines]:
        if len(data) > _MAX_BYTES:
            raise self.error_class(f"{self.source}: larger than {_MAX_BYTES >> 20} MiB", path=self.source)
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            self._refuse(line, (), "is not UTF-8")
        text = _SURROGATES.sub(lambda match: match[1] + json.loads(f'"{match[2]}"'), text)
        try:
            events = yaml.parse(text, Loader=_LOADER)
            next(events)  # start of the stream
            if isinstance(next(events), yaml.StreamEndEvent):
                self._refuse(1, (), "is empty")
            value = self._value(next(events), events, (), 0)
            next(events)  # end of the document
            if not isinstance(after := next(events), yaml.StreamEndEvent):
                self._refuse(_line(after), (), "holds more than one document")
        except yaml.YAMLError as error:
            self._refuse_yaml(error)
        return value, self.lines

    def _value(self, event: yaml.Event, events: Iterator[yaml.Event], path: tuple[Step, ...], depth: int) -> object:
        """The value that starts with `event`; reads the rest of it from `events`."""
        line = _line(event)
        self.lines[path] = line
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                self._refuse(line, path, f"alias {show(f'*{event.anchor}')} has no anchor before it")
            value, n_values = self.anchors[event.anchor]
            self._count(n_values, line, path)
            return value
        assert isinstance(event, _START)
        if event.tag is not None:
            self._refuse(line, path, f"tags are not accepted, found {show(event.tag)}")
        if depth > _MAX_DEPTH:
            self._refuse(line, path, f"is nested more than {_MAX_DEPTH} deep")
        before = self.n_values
        self._count(1, line, path)
        value = self._node(event, events, path, depth)
        if event.anchor is not None:
            self.anchors[event.anchor] = (value, self.n_values - before)
        return value

    def _node(self, event: yaml.Event, events: Iterator[yaml.Event], path: tuple[Step, ...], depth: int) -> object:
        if isinstance(event, yaml.ScalarEvent):
            return _scalar(event)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[object] = []
            while not isinstance(item := next(events), _END):
                items.append(self._value(item, events, (*path, len(items)), depth + 1))
            return items
        mapping: dict[Step, object] = {}
        while not isinstance(key_event := next(events), _END):
            key = self._key(key_event, path)
            if key in mapping:
                self._refuse(_line(key_event), path, f"key {show(str(key))} is repeated")
            mapping[key] = self._value(next(events), events, (*path, key), depth + 1)
        return mapping

    def _key(self, event: yaml.Event, path: tuple[Step, ...]) -> Step:
        line = _line(event)
        if not isinstance(event, yaml.ScalarEvent):
            self._refuse(line, path, "a key must be text or an integer")
        if event.tag is not None:
            self._refuse(line, path, f"tags are not accepted, found {show(event.tag)}")
        if event.anchor is not None:
            self._refuse(line, path, "a key cannot have an anchor")
        if event.implicit[0] and event.value == "<<":
            self._refuse(line, path, "merge keys (`<<`) are not accepted")
        self._count(1, line, path)
        key = _scalar(event)
        if not isinstance(key, str | int) or isinstance(key, bool):
            self._refuse(line, path, f"a key must be text or an integer, found {show(event.value)}")
        return key

    def _count(self, n: int, line: int, path: tuple[Step, ...]) -> None:
        self.n_values += n
        if self.n_values > _MAX_VALUES:
            self._refuse(line, path, f"more than {_MAX_VALUES} values, including those of aliases")

    def _refuse_yaml(self, error: yaml.YAMLError) -> NoReturn:
        mark = getattr(error, "problem_mark", None)
        where = self.source if mark is None else f"{self.source}, line {mark.line + 1}"
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        if "nesting depth" in problem:  # the limit of newer versions of libyaml, which reads ahead
            self._refuse(0 if mark is None else mark.line + 1, (), f"is nested more than {_MAX_DEPTH} deep")
        context = getattr(error, "context", None)
        hint = 'quote a pattern that starts with `*`: "*.weight"' if context and "alias" in context else None
        about = f" {context}" if context else ""
        raise self.error_class(f"{where}: not YAML{about}: {problem}", path=self.source, hint=hint) from None

    def _refuse(self, line: int, path: tuple[Step, ...], message: str) -> NoReturn:
        where = f"{self.source}, line {line}"
        raise self.error_class(f"{where}: {at_path(path)}{message}", path=self.source)


def at_path(path: tuple[Step, ...]) -> str:
    """A path as text, with a colon; empty for the whole file.

    Example:
        >>> at_path(("rules", 3, "cut"))
        'rules[3].cut: '
    """
    if not path:
        return ""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{show(step)[1:-1]}" for step in path)
    return f"{text.removeprefix('.')}: "


def _scalar(event: yaml.ScalarEvent) -> object:
    """The value of a scalar. Unlike in YAML 1.1, `no`, `010` and `1:30` are text."""
    text: str = event.value
    if not event.implicit[0]:
        return text
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"
    return int(text) if _INTEGER.fullmatch(text) else text


def _line(event: yaml.Event) -> int:
    mark = event.start_mark
    return mark.line + 1 if mark is not None else 0
