"""The file format of name maps: dataclasses that mirror the file, checks that need no tensors, and printing.

A name map describes how the tensors of one naming become those of another. It has two sides, `from` and `to`, and can
be reversed. As YAML, or as the same mapping::

    sizes:                        # numbers that rules use: an integer, or a field of the model's config.json
      heads: num_attention_heads
      kv_heads: [num_key_value_heads, num_attention_heads]         # the first one that the config has
      head_dim: [head_dim, hidden_size / num_attention_heads]      # products and quotients, from left to right
      e: num_local_experts                                         # the name of an index: its number of values
      vocab: vocab_size
    other: keep                   # keys that no rule matches: `keep` (the default) or `refuse`
    rules:                        # the first rule that matches a key is used; `{i}` matches any integer
      - {from: lm_head.weight, to: output_layer.weight}
      - {from: "h.{i}.proj.weight", to: "layers.{i}.proj.weight", transpose: [1, 0]}   # as numpy.transpose
      - from: ["h.{i}.q.weight", "h.{i}.k.weight", "h.{i}.v.weight"]   # a list: the parts of one fused tensor
        to: "layers.{i}.qkv.weight"                                    # the fused tensor, called the whole
        join: 0                   # the dim of the whole along which the parts are concatenated
        turns: [heads / kv_heads * head_dim, head_dim, head_dim]   # interleaved: elements of each part per round
      - from: ["h.{i}.experts.{e}.gate", "h.{i}.experts.{e}.up"]   # an index only on this side: one part per value
        to: "layers.{i}.experts.w1"
        transpose: [1, 0]         # applied first, to each part
        join: 1                   # without `turns`: not interleaved, and all parts have the same size
        lay: {e: 0}               # concatenate the parts of each `e` along dim 0 (`stack: {e: 0}`: along a new dim 0)
      - {from: "h.{i}.q", to: "blk.{i}.q", swap: [2, head_dim / 2]}   # rows 0, n / 2, 1, ... of each n
      - {from: "h.60.embed.weight", tied: embed.weight}   # a copy that only this side has: dropped, and created again
      - {from: e.weight, to: embed.weight, trim: 0, from_size: vocab}   # `from` has `vocab` rows, `to` may be padded
      - {from: h.weight, to: head.weight, pad: 0, from_size: vocab, to_size: 128}   # `to` has zeros after `vocab` rows

Dims are those of the whole. Along the same dim `lay` is the outer concatenation and `join` the inner one. The parts may
be on either side. Optimizer state, with key `<slot>.<key>`, follows its key. This module knows no keys of a checkpoint;
`resolve` applies the rules to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self, cast

from reshard.documents.fields import At, and_words, found, is_list, read_fields, read_integer, read_items, read_name
from reshard.documents.strict_yaml import Lines, flow
from reshard.errors import NamesError
from reshard.names.sizes import Expression
from reshard.names.templates import Template
from reshard.values.words import show

_MAX_DIMS = 16
_MAX_PARTS = 4096
_MAX_RULES = 10_000
_MAX_NAMES = 50_000

_INDICES = "one rule can match all layers and experts: layers.{i}.experts.{e}.w"

_SIZES = ("from_size", "to_size", "from_multiple", "to_multiple")
_OPTIONAL = ("transpose", "join", "turns", "swap", "lay", "stack", "trim", "pad", "pad_side", *_SIZES)

Side = Literal["from", "to"]


@dataclass(frozen=True)
class NameRule:
    """A rule: parts on one side form a whole on the other. A plain renaming has one part, equal to the whole.

    Attributes:
        parts: the names of the parts, all with the same indices.
        whole: the name of the whole, with a subset of these indices.
        parts_side: the side of the parts.
        is_list: whether the parts are a list in the file.
        transpose: permutation of the dims of each part, as for `numpy.transpose`; empty: none.
        join: the dim of the whole along which the parts are concatenated; None: there is one part.
        interleave: if the parts are interleaved, the elements of each part in one round (the key `turns`); empty: they
            are not interleaved, and all have the same size.
        swap: `(a, b)`: the elements of each group of `a * b` along dim 0, seen as a matrix of `a` rows, are transposed
            in the whole; empty: they are not.
        lay: by index, the dim of the whole along which the parts of its values are concatenated.
        stack: by index, the new dim of the whole along which the parts of its values are stacked.
        trim: the dim along which one side may be padded; None: neither is.
        pad_side: the side whose tensors are lengthened with zeros to their size (the key `pad`); None: none is.
        from_size, to_size: the number of elements along `trim` on a side; None: as many as the other side has.
        from_multiple, to_multiple: where there is no such size, it is rounded up to a multiple of this.
    """

    parts: tuple[Template, ...]
    whole: Template
    parts_side: Side = "from"
    is_list: bool = False
    transpose: tuple[int, ...] = ()
    join: int | None = None
    interleave: tuple[Expression, ...] = ()
    swap: tuple[Expression, ...] = ()
    lay: Mapping[str, int] = field(default_factory=dict)
    stack: Mapping[str, int] = field(default_factory=dict)
    trim: int | None = None
    pad_side: Side | None = None
    from_size: Expression | None = None
    to_size: Expression | None = None
    from_multiple: Expression | None = None
    to_multiple: Expression | None = None

    def reversed(self) -> NameRule:
        """The same rule with its sides exchanged."""
        if self.trim is not None:
            # Such a rule has one name on each side, and the part is always on side `from`.
            other: dict[Side | None, Side | None] = {"from": "to", "to": "from", None: None}
            return replace(
                self,
                parts=(self.whole,),
                whole=self.parts[0],
                pad_side=other[self.pad_side],
                from_size=self.to_size,
                to_size=self.from_size,
                from_multiple=self.to_multiple,
                to_multiple=self.from_multiple,
            )
        if not self.is_list and not self.lay and not self.stack:
            # With one name on each side, the part is always on side `from`.
            order = tuple(sorted(range(len(self.transpose)), key=self.transpose.__getitem__))
            return replace(self, parts=(self.whole,), whole=self.parts[0], transpose=order, swap=self.swap[::-1])
        return replace(self, parts_side="to" if self.parts_side == "from" else "from")

    def templates(self, side: Side) -> tuple[Template, ...]:
        """The names on a side."""
        return self.parts if side == self.parts_side else (self.whole,)

    @property
    def indices(self) -> tuple[str, ...]:
        """The indices that only the parts have: those of `lay` and `stack`."""
        return (*self.lay, *self.stack)


@dataclass(frozen=True)
class Tie:
    """A tensor that is a copy of another tensor on the same side.

    It is dropped when tensors of that side are converted, and created when tensors are converted to that side.

    Attributes:
        name: name of the copy.
        tied: name of the tensor that it copies.
        side: the side of both.
    """

    name: Template
    tied: Template
    side: Side

    def reversed(self) -> Tie:
        """The same tie on the other side."""
        return replace(self, side="to" if self.side == "from" else "from")


@dataclass(frozen=True)
class Size:
    """A size: the first of these expressions whose names are all in a config."""

    choices: tuple[Expression, ...]


@dataclass(frozen=True)
class NamesFile:
    """A complete name map. Create one with `from_mapping`, which checks it.

    Attributes:
        rules: the rules; the first one that matches a key is used.
        sizes: the sizes by name.
        other: whether keys that no rule matches are kept or refused.
    """

    rules: tuple[NameRule | Tie, ...]
    sizes: Mapping[str, Size] = field(default_factory=dict)
    other: Literal["keep", "refuse"] = "keep"

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object], *, source: str | None = None) -> Self:
        """Parse and check a name map.

        Args:
            mapping: the content of the YAML file.
            source: path of the file, for messages.

        Raises:
            NamesError: the map is inconsistent, or a field is unknown or has an invalid value; the message names the
                field.

        Example:
            >>> NamesFile.from_mapping({"rules": [{"from": "a.{i}", "to": "b.{i}"}]}).rules[0].whole.text
            'b.{i}'
        """
        return cls.from_lines(mapping, source=source, lines={})

    @classmethod
    def from_lines(cls, mapping: object, *, source: str | None, lines: Lines) -> Self:
        """`from_mapping` for a mapping read from a file, with the line of each value, for messages.

        Args:
            mapping: the content of the file.
            source: path of the file.
            lines: the line of each value.
        """
        at = At(source, lines, what="name map", error_class=NamesError)
        fields = read_fields(at, mapping, required=("rules",), optional=("sizes", "other"))
        sizes = _sizes(at / "sizes", fields["sizes"]) if "sizes" in fields else {}
        _check_count(at / "rules", fields["rules"])
        rules = tuple(read_items(at / "rules", fields["rules"], lambda a, v: _rule(a, v, sizes)))
        other = fields.get("other", "keep")
        if other not in ("keep", "refuse"):
            raise (at / "other").error(f"expected `keep` or `refuse`, found {found(other)}")
        return cls(rules, sizes, other)

    def reversed(self) -> Self:
        """The name map in the other direction.

        Example:
            >>> print(NamesFile.from_mapping({"rules": [{"from": "a", "to": "b"}]}).reversed())
            rules:
              - {from: b, to: a}
            <BLANKLINE>
        """
        return replace(self, rules=tuple(rule.reversed() for rule in self.rules))

    def to_mapping(self) -> dict[str, object]:
        """The name map as a mapping in canonical form. `from_mapping` of it returns an equal name map."""
        mapping: dict[str, object] = {}
        if self.sizes:
            mapping["sizes"] = {name: _size_value(size) for name, size in self.sizes.items()}
        if self.other != "keep":
            mapping["other"] = self.other
        mapping["rules"] = [_rule_mapping(rule) for rule in self.rules]
        return mapping

    def to_yaml(self) -> str:
        """The name map as YAML text, one line per rule."""
        lines = []
        if self.sizes:
            lines += ["sizes:", *(f"  {flow(name)}: {flow(_size_value(size))}" for name, size in self.sizes.items())]
        if self.other != "keep":
            lines.append(f"other: {self.other}")
        lines.append("rules:" if self.rules else "rules: []")
        lines += [f"  - {flow(_rule_mapping(rule))}" for rule in self.rules]
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        return self.to_yaml()


# ---------------------------------------------------------------------------------------------------- from a mapping


def _check_count(at: At, rules: object) -> None:
    """Check the number of rules and names first, because each name is compiled to a pattern."""
    if not is_list(rules):
        return
    rules = cast("Sequence[object]", rules)
    if len(rules) > _MAX_RULES:
        raise at.error(f"expected at most {_MAX_RULES} rules, found {len(rules)}", hint=_INDICES)
    sides = (side for rule in rules if isinstance(rule, Mapping) for side in (rule.get("from"), rule.get("to")))
    n_names = sum(len(cast("Sequence[object]", side)) if is_list(side) else 1 for side in sides)
    if n_names > _MAX_NAMES:
        raise at.error(f"expected at most {_MAX_NAMES} names in all rules, found {n_names}", hint=_INDICES)


def _sizes(at: At, value: object) -> dict[str, Size]:
    if not isinstance(value, Mapping):
        raise at.error(f"expected names and sizes, as in {{heads: 32}}, found {found(value)}")
    sizes = {}
    for name, item in value.items():
        if not isinstance(name, str) or not name.isidentifier() or _expression(at, name).names != (name,):
            raise at.error(f"expected the name of a size, found {found(name)}")
        where = at / name
        choices = [(where, item)] if not is_list(item) else list(read_items(where, item, lambda a, v: (a, v)))
        if not choices:
            raise where.error("expected at least one")
        sizes[name] = Size(tuple(_expression(a, v) for a, v in choices))
    return sizes


def _expression(at: At, value: object) -> Expression:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise at.error(f"expected a size, found {found(value)}")
    try:
        return Expression.parse(value)
    except ValueError as error:
        raise at.error(str(error)) from None


def _rule(at: At, value: object, sizes: Mapping[str, Size]) -> NameRule | Tie:
    if isinstance(value, Mapping) and "tied" in value:
        return _tie(at, value)
    fields = read_fields(at, value, required=("from", "to"), optional=_OPTIONAL)
    names = {side: _templates(at / side, fields[side]) for side in ("from", "to")}
    lists = [side for side in ("from", "to") if is_list(fields[side])]
    if len(lists) == 2:
        raise at.error("`from` and `to` are both lists: one of them must be a single name", hint="write two name maps")
    for side, templates in names.items():
        other = next((t for t in templates if set(t.variables) != set(templates[0].variables)), None)
        if other is not None:
            raise (at / side).error(f"{show(other.text)} and {show(templates[0].text)} have different indices")
    more = [side for side in ("from", "to") if _only(names, side)]
    parts_side: Side = "to" if lists == ["to"] or (not lists and more == ["to"]) else "from"
    other_side: Side = "from" if parts_side == "to" else "to"
    if other_side in more:
        index = _only(names, other_side)[0]
        raise (at / other_side).error(
            f"the index `{{{index}}}` is missing on the side of the parts, so its value is not known"
        )
    rule = NameRule(
        parts=names[parts_side],
        whole=names[other_side][0],
        parts_side=parts_side,
        is_list=bool(lists),
        transpose=_transpose(at / "transpose", fields["transpose"]) if "transpose" in fields else (),
        join=read_integer(at / "join", fields["join"], 0) if "join" in fields else None,
        interleave=_turns(at / "turns", fields["turns"], sizes) if "turns" in fields else (),
        swap=_swap(at / "swap", fields["swap"], sizes) if "swap" in fields else (),
        lay=_by_index(at / "lay", fields.get("lay", {})),
        stack=_by_index(at / "stack", fields.get("stack", {})),
        trim=next((read_integer(at / word, fields[word], 0) for word in ("trim", "pad") if word in fields), None),
        pad_side=_pad_side(at, fields),
        **{word: _size(at / word, fields[word], sizes) for word in _SIZES if word in fields},
    )
    _check_rule(at, rule, _only(names, parts_side))
    return rule


def _pad_side(at: At, fields: Mapping[str, object]) -> Side | None:
    """The side that `pad` lengthens: `to`, unless `pad_side` says `from`."""
    if "trim" in fields and "pad" in fields:
        raise at.error(
            "`trim` and `pad` are both given", hint="`pad` also leaves out the padding in the other direction"
        )
    if "pad" not in fields:
        if "pad_side" in fields:
            raise at.error("`pad_side` is given without `pad`")
        return None
    side = fields.get("pad_side", "to")
    if side not in ("from", "to"):
        raise (at / "pad_side").error(f"expected `from` or `to`, found {found(side)}")
    return side


def _only(names: Mapping[str, tuple[Template, ...]], side: Side) -> list[str]:
    """The indices that are only on this side."""
    other = names["to" if side == "from" else "from"][0].variables
    return [name for name in names[side][0].variables if name not in other]


def _check_rule(at: At, rule: NameRule, only: Sequence[str]) -> None:
    twice = next((index for index in rule.lay if index in rule.stack), None)
    if twice is not None:
        raise at.error(f"`lay` and `stack` both name {show(twice)}")
    for index in rule.indices:
        if index not in only:
            raise at.error(f"{show(index)} is not an index that only the parts have")
    missing = next((index for index in only if index not in rule.indices), None)
    if missing is not None:
        raise at.error(
            f"only the parts have the index `{{{missing}}}`, and neither `lay` nor `stack` has it",
            hint=f"add `lay: {{{missing}: 0}}` (concatenate along dim 0) or `stack: {{{missing}: 0}}` (a new dim 0)",
        )
    if len(rule.parts) > 1 and rule.join is None:
        raise at.error("`join` is missing: the dim along which the parts are concatenated", hint="join: 0")
    if len(rule.parts) == 1 and rule.join is not None:
        raise at.error("`join` needs several parts")
    if rule.interleave and len(rule.interleave) != len(rule.parts):
        raise (at / "turns").error(f"{len(rule.interleave)} turns for {len(rule.parts)} parts")
    for word, dims in (("lay", rule.lay), ("stack", rule.stack)):
        if len(set(dims.values())) != len(dims):
            raise (at / word).error("two indices have the same dim")
    for dim in (*rule.lay.values(), *([] if rule.join is None else [rule.join])):
        if dim in rule.stack.values():
            raise at.error(f"dim {dim} is used by `stack`, so `join` and `lay` cannot use it")
    word = "trim" if rule.pad_side is None else "pad"
    has_size = any(getattr(rule, one) is not None for one in _SIZES)
    if has_size != (rule.trim is not None):
        raise at.error(f"`{word}`, a dim, and `from_size` or `to_size`, how long it is, are given together")
    if rule.pad_side is None and (rule.from_multiple is not None or rule.to_multiple is not None):
        raise at.error("`from_multiple` and `to_multiple` need `pad`")
    if rule.pad_side is not None and all(
        getattr(rule, f"{rule.pad_side}_{one}") is None for one in ("size", "multiple")
    ):
        raise at.error(f"`pad` needs `{rule.pad_side}_size` or `{rule.pad_side}_multiple`: how long the padded side is")
    for used, one in ((rule.trim is not None, word), (bool(rule.swap), "swap")):
        if used and (rule.is_list or rule.transpose or only):
            raise at.error(
                f"`{one}` needs one tensor on each side, with the same dims",
                hint=f"{one} with one name map, then fuse with another",
            )
    if rule.swap and rule.trim is not None:
        raise at.error(f"`swap` and `{word}` are both given", hint=f"{word} with one name map, then swap with another")


def _tie(at: At, value: Mapping[object, object]) -> Tie:
    fields = read_fields(at, value, required=("tied",), optional=("from", "to"))
    sides = [side for side in ("from", "to") if side in fields]
    if len(sides) != 1:
        raise at.error("expected `tied` with either `from` or `to`: the copy is on one side")
    side: Side = "from" if sides[0] == "from" else "to"
    name, tied = _template(at / side, fields[side]), _template(at / "tied", fields["tied"])
    if set(name.variables) != set(tied.variables):
        raise at.error(f"{show(name.text)} and {show(tied.text)} have different indices")
    if name.text == tied.text:
        raise at.error(f"{show(name.text)} is tied to itself")
    return Tie(name, tied, side)


def _templates(at: At, value: object) -> tuple[Template, ...]:
    if not is_list(value):
        return (_template(at, value),)
    templates = tuple(read_items(at, value, _template))
    if not 1 <= len(templates) <= _MAX_PARTS:
        raise at.error(f"expected 1 to {_MAX_PARTS} names, found {len(templates)}")
    if len({template.text for template in templates}) != len(templates):
        raise at.error("a name is repeated")
    return templates


def _template(at: At, value: object) -> Template:
    if not isinstance(value, str):
        raise at.error(f"expected a name, found {found(value)}")
    try:
        return Template.compile(value)
    except ValueError as error:
        raise at.error(str(error)) from None


def _transpose(at: At, value: object) -> tuple[int, ...]:
    order = tuple(read_items(at, value, lambda a, v: read_integer(a, v, 0)))
    if not 1 <= len(order) <= _MAX_DIMS or sorted(order) != list(range(len(order))):
        raise at.error(f"expected each dim once, as in [1, 0], found {found(value)}")
    return order


def _turns(at: At, value: object, sizes: Mapping[str, Size]) -> tuple[Expression, ...]:
    return tuple(read_items(at, value, lambda a, v: _size(a, v, sizes)))


def _swap(at: At, value: object, sizes: Mapping[str, Size]) -> tuple[Expression, ...]:
    sides = _turns(at, value, sizes)
    if len(sides) != 2:
        raise at.error(f"expected two sizes, as in [2, head_dim / 2], found {found(value)}")
    return sides


def _size(at: At, value: object, sizes: Mapping[str, Size]) -> Expression:
    size = _expression(at, value)
    unknown = next((name for name in size.names if name not in sizes), None)
    if unknown is not None:
        known = f"`sizes` has {and_words(list(sizes))}" if sizes else "the map has no `sizes`"
        raise at.error(f"{show(unknown)} is not a size of the map; {known}")
    return size


def _by_index(at: At, value: object) -> dict[str, int]:
    if not isinstance(value, Mapping):
        raise at.error(f"expected indices and dims, as in {{e: 0}}, found {found(value)}")
    dims = {read_name(at, name): read_integer(at / str(name), dim, 0) for name, dim in value.items()}
    if any(dim >= _MAX_DIMS for dim in dims.values()):
        raise at.error(f"expected dims below {_MAX_DIMS}")
    return dims


# ------------------------------------------------------------------------------------------------------- to a mapping


def _size_value(size: Size) -> object:
    values = [_expression_value(choice) for choice in size.choices]
    return values[0] if len(values) == 1 else values


def _expression_value(expression: Expression) -> int | str:
    return int(expression.text) if expression.text.isdigit() else expression.text


def _rule_mapping(rule: NameRule | Tie) -> dict[str, object]:
    if isinstance(rule, Tie):
        return {rule.side: rule.name.text, "tied": rule.tied.text}
    parts = [part.text for part in rule.parts]
    sides: dict[str, object] = {rule.parts_side: parts if rule.is_list else parts[0]}
    mapping: dict[str, object] = {side: sides.get(side, rule.whole.text) for side in ("from", "to")}
    if rule.transpose:
        mapping["transpose"] = list(rule.transpose)
    if rule.join is not None:
        mapping["join"] = rule.join
    if rule.interleave:
        mapping["turns"] = [_expression_value(turn) for turn in rule.interleave]
    if rule.swap:
        mapping["swap"] = [_expression_value(side) for side in rule.swap]
    for word, dims in (("lay", rule.lay), ("stack", rule.stack)):
        if dims:
            mapping[word] = dict(dims)
    if rule.trim is not None:
        mapping["trim" if rule.pad_side is None else "pad"] = rule.trim
    if rule.pad_side == "from":
        mapping["pad_side"] = "from"
    for word in _SIZES:
        if (size := getattr(rule, word)) is not None:
            mapping[word] = _expression_value(size)
    return mapping
