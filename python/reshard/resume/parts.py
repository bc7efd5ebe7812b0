"""Which parts of a saved run are restored, and its settings, from the state beside the tensors. Reads nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reshard.resume.restore import NO_OPTIMIZER

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from reshard.resume.facts import ResumeDecision


def object_name(name: str) -> str:
    """The name of an object in messages: as it is passed to `Checkpointer.resume`.

    Example:
        >>> object_name("scheduler"), object_name("optimizer.1"), object_name("ema")
        ('scheduler', 'optimizer.1', "extra['ema']")
    """
    return name if name.partition(".")[0] in {"optimizer", "scheduler"} else f"extra[{name!r}]"


def with_parts(
    decision: ResumeDecision,
    extra: Mapping[str, Any],
    *,
    names: Collection[str] | None = None,
    has_position: bool | None = None,
    has_optimizer: bool | None = None,
) -> ResumeDecision:
    """The decision with every part that is restored, if a `Checkpointer` saved the checkpoint.

    Args:
        decision: the decision.
        extra: the state beside the tensors.
        names: names of the objects that the run restores; None: all of the checkpoint.
        has_position: whether a sampler restores the data position; None: if the checkpoint has the state of one.
        has_optimizer: whether the run has an optimizer; None: not known.

    Example:
        >>> from reshard.resume import ResumeDecision
        >>> extra = {"trainer": {"objects": {"scheduler": {}, "ema": {}}}, "rng": {}, "sampler": {}}
        >>> with_parts(ResumeDecision(restored=("weights", "counters")), extra).restored
        ('weights', 'counters', 'scheduler', "extra['ema']", 'random streams', 'data position')
    """
    trainer = extra.get("trainer")
    if "counters" not in decision.restored or not isinstance(trainer, dict):
        return decision
    parts = [one for one in decision.restored if one != "data position"]
    warnings = decision.warnings
    if has_optimizer is False:
        parts = [one for one in parts if one != "optimizer"]
    elif "optimizer" in trainer:  # of plain SGD these are options alone, no tensors
        parts = list(dict.fromkeys((parts[0], "optimizer", *parts[1:])))
        warnings = tuple(one for one in warnings if one != NO_OPTIMIZER)
    saved = [*trainer.get("objects", {}), *extra.get("per rank", {})]
    saved.sort(key=lambda name: object_name(str(name)) != name)  # schedulers first
    parts += [object_name(str(name)) for name in saved if names is None or name in names]
    parts += ["random streams"] if "rng" in extra else []
    is_saved = "sampler" in extra or "lightning" in extra  # the loops of Lightning have their own
    parts += ["data position"] if (is_saved if has_position is None else has_position) else []
    return replace(decision, restored=tuple(dict.fromkeys(parts)), warnings=warnings)


def settings_of(extra: Mapping[str, Any]) -> tuple[str, ...]:
    """The saved options of parameter groups and constants of schedulers, one line for each.

    Example:
        >>> group = {"class": "SGD", "index": 0, "options": {"lr": 0.1, "nesterov": False}, "params": ["w"]}
        >>> settings_of({"trainer": {"optimizer": {"groups": [group]}, "started": {"scheduler": {"T_max": 20}}}})
        ('SGD, group 0: lr=0.1', 'scheduler: T_max=20')
    """
    trainer = extra.get("trainer")
    if not isinstance(trainer, dict):
        return ()
    lines = [
        (f"{one.get('class')}, group {one.get('index')}", one.get("started") or one.get("options", {}))
        for one in trainer.get("optimizer", {}).get("groups", [])
    ]
    lines += [
        (object_name(str(name)), {key: one for key, one in values.items() if key != "last_epoch"})
        for name, values in trainer.get("started", {}).items()
    ]
    return tuple(f"{name}: {text}" for name, values in lines if (text := _shown(values)))


def _shown(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name}={value!r:.60}"
        for name, value in values.items()
        if not isinstance(value, bool)
        and isinstance(value, int | float | str | list | tuple)
        and value not in ([], ())
        and not (isinstance(value, list | tuple) and any(isinstance(one, dict) for one in value))
        and not str(name).startswith("_")
    )
