"""Checks a layout against the tensors of a checkpoint: every fault, what each rule matches, and the bytes of each rank.

Only descriptions are read, never tensor data. `Checkpoint.bind` stops at the first fault; here a tensor with a fault is
left out and the others are checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard import dtypes
from reshard.errors import LayoutError, MismatchError, UnsupportedError
from reshard.layout import as_layout
from reshard.layout.patterns import Matcher
from reshard.layout.resolve import state_of
from reshard.values.counters import is_counter
from reshard.values.words import show
from reshard.verbs.forecast import rank_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.checkpoint import Checkpoint, LayoutLike
    from reshard.layout import ModelLayout, Partition

_MAX_HINTS = 8  # about rules that match no key: each takes time
_MAX_FAULTS = 50  # then the rest is not checked: each fault binds the layout again


@dataclass(frozen=True)
class Fault:
    """Why a layout does not fit.

    Attributes:
        key: the tensor; None: the fault is about the whole layout.
        message: what is wrong.
        hint: what to do; None: nothing is known.
    """

    key: str | None
    message: str
    hint: str | None


@dataclass(frozen=True)
class RuleUse:
    """What a rule of a layout matches.

    Attributes:
        match: its patterns.
        partition: how it divides tensors.
        keys: tensors that it applies to, without state of the optimizer that follows its parameter.
        n_bytes: their bytes, each once.
        optional: whether it may match no key.
    """

    match: tuple[str, ...]
    partition: Partition
    keys: tuple[str, ...]
    n_bytes: int
    optional: bool


@dataclass(frozen=True)
class LayoutCheck:
    """The result of `check_layout`.

    Attributes:
        mesh: sizes of the axes of the layout.
        n_tensors: number of tensors of the checkpoint.
        n_bytes: their bytes, each once.
        rules: what each rule matches; none for a strategy, which lists tensors.
        faults: why `convert` and `save` would refuse the layout; none: it fits.
        stopped: whether there may be more faults.
        rank_bytes: by rank, the bytes of its arrays; empty if there are faults.
        warnings: what has no effect and is no fault.
    """

    mesh: Mapping[str, int]
    n_tensors: int
    n_bytes: int
    rules: tuple[RuleUse, ...]
    faults: tuple[Fault, ...]
    stopped: bool
    rank_bytes: Mapping[int, int]
    warnings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the layout fits."""
        return not self.faults


def check_layout(checkpoint: Checkpoint, layout: LayoutLike) -> LayoutCheck:
    """Check whether a layout fits the tensors of a checkpoint, as `convert` and `save` require it.

    Args:
        checkpoint: the tensors.
        layout: the layout.

    Raises:
        LayoutError: the layout file is not valid.

    Example:
        >>> import numpy as np, reshard
        >>> reshard.save_file({"w": np.zeros((8, 2)), "b": np.zeros(7)}, "check.safetensors")
        >>> layout = {"mesh": {"tp": 4}, "rules": [{"match": "*", "cut": ["tp"]}]}
        >>> with reshard.open("check.safetensors") as checkpoint:
        ...     found = check_layout(checkpoint, layout)
        >>> found.ok, found.faults[0].key
        (False, 'b')
    """
    known = as_layout(layout)
    tensors = {key: checkpoint.data.index.info(key) for key in checkpoint}
    optimizer_keys = set(checkpoint.keys("optimizer"))
    shapes = {key: tuple(shape) for key, (_, shape) in tensors.items()}
    uses = _Uses(known, tensors, optimizer_keys)
    faults: list[Fault] = []
    bound = None
    while shapes and bound is None and len(faults) < _MAX_FAULTS:
        try:
            bound = known.bind(shapes, optimizer_keys=optimizer_keys)
        except (LayoutError, MismatchError, UnsupportedError) as error:
            faults.append(Fault(error.key, error.message, error.hint))
            if error.key not in shapes:
                break
            left_out = [error.key]
            if error.key in uses.unmatched:  # all of them at once: each would take another round
                faults += [
                    Fault(key, f"no rule matches {show(key)}", None) for key in uses.unmatched if key != error.key
                ]
                left_out = uses.unmatched
            for key in left_out:
                for one in (key, *uses.states.get(key, ())):  # state that follows it has no other fault
                    shapes.pop(one, None)
    dropped = tensors.keys() - shapes.keys()
    warnings: list[str] = []
    if bound is not None:
        unused = [one for one in bound.unused if not one.matches(dropped)]
        faults += [Fault(None, one.text, one.hint if n < _MAX_HINTS else None) for n, one in enumerate(unused)]
        texts = {one.text for one in bound.unused}
        warnings = [text for text in bound.warnings if text not in texts]
    of_keys = {key: (dtype, checkpoint.data.part(key)) for key, (dtype, _) in tensors.items()}
    return LayoutCheck(
        mesh=dict(known.mesh) if bound is None else dict(bound.mesh.axes),
        n_tensors=len(tensors),
        n_bytes=sum(dtypes.n_bytes(*info) for info in tensors.values()),
        rules=uses.rules,
        faults=tuple(faults),
        stopped=bool(shapes) and bound is None,
        rank_bytes={} if bound is None or faults else dict(sorted(rank_bytes(bound, of_keys).items())),
        warnings=tuple(warnings),
    )


class _Uses:
    """Which rule each tensor has.

    Attributes:
        rules: what each rule matches.
        unmatched: tensors that no rule matches.
        states: by parameter, its state of the optimizer.
    """

    def __init__(
        self, layout: ModelLayout, tensors: Mapping[str, tuple[str, tuple[int, ...]]], optimizer_keys: set[str]
    ) -> None:
        self.rules: tuple[RuleUse, ...] = ()
        self.unmatched: list[str] = []
        self.states: dict[str, list[str]] = {}
        if layout.strategy is not None:
            return
        state = optimizer_keys if layout.optimizer.follow else set[str]()
        follows = state_of((key for key in tensors if key in state), tensors.keys() - state)
        for key, parameter in follows.items():
            self.states.setdefault(parameter, []).append(key)
        matcher = Matcher([rule.match for rule in layout.rules])
        keys: list[list[str]] = [[] for _ in layout.rules]
        for key, (_, shape) in tensors.items():
            if key in follows or is_counter(key, shape):
                continue
            found = matcher.find(key)
            (self.unmatched if found is None else keys[found[0]]).append(key)
        n_bytes = {key: dtypes.n_bytes(*info) for key, info in tensors.items()}
        self.rules = tuple(
            RuleUse(rule.match, rule.partition, tuple(own), sum(n_bytes[key] for key in own), rule.optional)
            for rule, own in zip(layout.rules, keys, strict=True)
        )
