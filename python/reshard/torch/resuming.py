"""Restores a run from a loaded checkpoint: tensors, objects, the data position, random streams.

Each function restores one of these on one rank, and returns messages about differences, which are added to the resume
decision. The checkpointer decides the order, and raises errors on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from reshard.errors import MismatchError, UnsupportedError
from reshard.opening.what_is_there import optimizer_files
from reshard.resume import EpochStep
from reshard.resume.parts import object_name
from reshard.storage.location import locate
from reshard.torch import rng
from reshard.torch.dicts import DictState
from reshard.torch.loaders import FollowedLoader, state_for
from reshard.torch.loading import MOST_NAMES
from reshard.torch.restore import apply, load_into, named
from reshard.torch.sampler import ElasticSampler
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from reshard.config import Config
    from reshard.options import InitFrom, Settings, Strict
    from reshard.resume import ResumeDecision
    from reshard.torch.loading import Read
    from reshard.torch.run import Run
    from reshard.torch.state import Described


@dataclass(frozen=True)
class RestoreOptions:
    """Arguments of `Checkpointer.resume` with the same names, and which part is restored, as in `restore.apply`."""

    strict: Strict
    cast: bool
    init: Callable[[str, torch.Tensor], torch.Tensor | None] | None
    device: torch.device | str | None
    grown: bool
    settings: Settings
    data: Literal["saved", "new"] = "saved"
    only: Literal["model", "tensors"] | None = None


def check_has_optimizer(found: Read, saved: Mapping[str, Any], options: RestoreOptions) -> list[str]:
    """Check that the checkpoint holds optimizer state, for a run that has an optimizer.

    Args:
        found: the loaded checkpoint.
        saved: its extra state.
        options: arguments of `Checkpointer.resume`.

    Returns:
        Messages about differences.

    Raises:
        MismatchError: it does not, and `strict` refuses missing state.
    """
    record = saved.get("trainer", {}).get("optimizer")
    if record is not None or found.has_optimizer:
        is_adam = record is not None and any("betas" in group["options"] for group in record["groups"])
        if is_adam and not found.has_optimizer and not found.holds_streams and not record["state"]:
            return ["the checkpoint holds the options of the optimizer, and no state of it: it starts with new state"]
        return []
    if options.strict.missing == "error":
        argument = "fresh_optimizer=True" if options.only == "tensors" else "strict=False"
        raise MismatchError(
            f"the checkpoint holds no optimizer state{_unread(found)}, and the run has an optimizer",
            path=found.path,
            hint=f"`{argument}` starts the optimizer with new state",
        )
    return [f"the checkpoint holds no optimizer state{_unread(found)}: the optimizer starts with new state"]


def check_taken(whole: Mapping[str, Any]) -> None:
    """Refuse a start with the state of an optimizer that a start does not load.

    Args:
        whole: the optimizers with a `state_dict` of their own, by name.

    Raises:
        UnsupportedError: there is one.
    """
    for name in sorted(whole):
        raise UnsupportedError(
            f"`fresh_optimizer=False`: `{name}` is a {type(whole[name]).__name__} with a `state_dict` of its own, and "
            "a start loads the state of no such optimizer",
            key=name,
            hint="leave `fresh_optimizer` out, or go on with the run itself with `resume_training`",
        )


def _unread(found: Read) -> str:
    """Which files beside the weights probably hold the state of the optimizer."""
    names = optimizer_files(locate(found.path)) if found.path else []
    beside = "which lies" if len(names) == 1 else "which lie"
    return (
        f" that is read (the state in {listed(map(show, names))}, {beside} beside the weights, is not)" if names else ""
    )


def check_state_beside(run: Run, found: Read, saved: Mapping[str, Any], options: RestoreOptions) -> list[str]:
    """Check that the checkpoint holds the state of the run beside the tensors, where it was not saved by such a run.

    A checkpoint that `convert` or another program wrote can have tensors and counters and nothing else.

    Args:
        run: the run.
        found: the loaded checkpoint.
        saved: its extra state.
        options: arguments of `Checkpointer.resume`.

    Returns:
        Messages about what it lacks.

    Raises:
        MismatchError: it lacks some, and `strict` refuses missing state.
    """
    lacking: list[str] = []
    if "trainer" not in saved:
        lacking += [show(object_name(name)) for name in run.objects]
        if run.optimizer is not None and found.has_optimizer:
            lacking.append("the options of the optimizer, such as the learning rate")
    sampler = run.sampler if options.data == "saved" else None
    is_saved = "sampler" in saved or any("sampler" in one for one in found.others)
    if sampler is not None and not is_saved and not isinstance(sampler, ElasticSampler):
        lacking.append("the data position of `sampler`")
    if "run" not in saved and found.holds_streams:
        lacking.append("the random streams")
    if not lacking:
        return []
    message = f"the checkpoint lacks state of the run beside the tensors: {listed(lacking)}"
    if options.strict.missing == "error":
        raise MismatchError(
            message,
            hint="resume from the checkpoint that the run saved; `strict=False` goes on without this state: it keeps "
            "its initial values; to start a new run from the weights, use `init_from`",
        )
    return [f"{message}: it keeps its initial values"]


def initial_state(extra: Mapping[str, Any], init: InitFrom) -> dict[str, Any]:
    """The state beside the tensors that a run takes from what it starts from: that of the optimizer.

    Args:
        extra: the extra state of the checkpoint.
        init: what is taken.

    Raises:
        UnsupportedError: the optimizer has state besides tensors, and a name map renames its parameters.
    """
    trainer = extra.get("trainer")
    if not isinstance(trainer, dict):
        return {}
    record = trainer.get("optimizer")
    if init.names is not None:
        if isinstance(record, dict) and (record.get("state") or record.get("shared")):
            raise UnsupportedError(
                "the optimizer has state besides tensors, which a name map does not rename",
                hint="start with a new optimizer, as `InitFrom` does by default",
            )
        return {}
    return {"trainer": {name: trainer[name] for name in ("aliases", "optimizer") if name in trainer}}


def with_modules(saved: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Extra state for a start from other weights, with the state of modules besides tensors: it belongs to the weights.

    Args:
        saved: what else is restored.
        extra: the extra state of the checkpoint.

    Example:
        >>> with_modules({}, {"trainer": {"modules": {"norm": 3}, "objects": {}}})
        {'trainer': {'modules': {'norm': 3}}}
    """
    modules = (extra.get("trainer") or {}).get("modules")
    return {**saved, "trainer": {**saved.get("trainer", {}), "modules": modules}} if modules else dict(saved)


def restore_tensors(described: Described, found: Read, saved: Mapping[str, Any], options: RestoreOptions) -> list[str]:
    """Restore parameters, buffers, optimizers, schedulers and other objects with state.

    Args:
        described: the trainer on this rank.
        found: the loaded checkpoint.
        saved: its extra state.
        options: arguments of `Checkpointer.resume`.

    Returns:
        Messages about differences.

    Raises:
        MismatchError: the checkpoint does not fit the trainer.
    """
    report = apply(
        described,
        found.arrays,
        saved.get("trainer"),
        rank_local=saved.get("rank_local"),
        strict=options.strict,
        cast=options.cast,
        shapes=found.shapes,
        unexpected=found.unexpected,
        only=options.only,
        kept=found.kept,
        new_state=found.new_state,
        init=options.init,
        device=options.device,
        object_name=object_name,
        settings=options.settings,
    )
    messages = list(found.notes)
    if report.missing:
        messages.append(f"the checkpoint lacks {named(report.missing, MOST_NAMES)}")
    if report.unexpected:
        messages.append(f"the run does not have {listed(map(show, report.unexpected), MOST_NAMES)}")
    if report.shared:
        messages.append(
            f"{named(report.shared, MOST_NAMES)} differed between the {found.world_size} ranks that saved: "
            "all ranks get the values of the first one"
        )
    return [*messages, *report.changed]


def match_objects(  # noqa: PLR0917
    run: Run, found: Read, saved: Mapping[str, Any], rank: int, world_size: int, options: RestoreOptions
) -> tuple[dict[str, Any], list[str]]:
    """Compare the rank-local objects (`reshard.per_rank`) and loaders. Changes nothing.

    Except loaders and objects with a function of the user, they require the same number of ranks.

    Args:
        run: the run.
        found: the loaded checkpoint.
        saved: its extra state.
        rank: this rank.
        world_size: number of ranks of the run.
        options: arguments of `Checkpointer.resume`.

    Returns:
        The state of each object that is restored, by name, and messages about differences.

    Raises:
        MismatchError: an object cannot be restored, and `strict` is set.
    """
    states: dict[str, Any] = {}
    messages: list[str] = []
    notes: list[str] = []
    kept = saved.get("per rank", {})
    others = [one.get("per rank", {}) for one in found.others] if saved else []
    known = others[0] if others else kept
    unexpected = [f"the run does not have {show(object_name(str(name)))}" for name in known if name not in run.per_rank]
    is_same = found.world_size == world_size
    for name, one in run.per_rank.items():
        is_loader, of_others = isinstance(one, FollowedLoader), [each[name] for each in others if name in each]
        if (is_same and is_loader and name in kept) or (
            of_others and len(of_others) == found.world_size and (is_loader or name in run.reshapes)
        ):
            states[name], told = state_for(
                one,
                show(object_name(name)),
                kept.get(name),
                [] if is_same else of_others,
                rank,
                world_size,
                run.reshapes.get(name),
            )
            notes += told
        elif name in kept and is_same:
            states[name] = kept[name]
            if isinstance(one, DictState):
                fitted = one.fitted(kept[name], object_name(name), options.strict, cast=options.cast)
                states[name] = fitted.value
                messages += [f"the checkpoint lacks {show(key)}" for key in fitted.missing]
                notes += fitted.notes
        elif saved:
            why = "the checkpoint does not have it"
            if not is_same:
                why = f"{found.world_size} ranks saved it, {world_size} ranks load it"
            messages.append(f"{show(object_name(name))} is rank-local: {why}")
    refused = messages if options.strict.missing == "error" else []
    refused = refused + (unexpected if options.strict.unexpected == "error" else [])
    if refused:
        raise MismatchError("; ".join(refused), hint="`strict=False` continues without them")
    return states, [*messages, *unexpected, *notes]


def restore_objects(run: Run, states: Mapping[str, Any]) -> None:
    """Restore the rank-local objects to the states from `match_objects`.

    Raises:
        MismatchError: an object raised an exception.
    """
    for name, state in states.items():
        load_into(object_name(name), run.per_rank[name].load_state_dict, state)


def restore_sampler(  # noqa: PLR0917
    run: Run,
    found: Read,
    saved: Mapping[str, Any],
    decision: ResumeDecision,
    config: Config,
    options: RestoreOptions,
    rank: int,
    world_size: int,
) -> list[str]:
    """Set the sampler to the data position of the checkpoint.

    Args:
        run: the run.
        found: the loaded checkpoint.
        saved: the extra state of the checkpoint.
        decision: the resume decision.
        config: the training configuration.
        options: arguments of `Checkpointer.resume`.
        rank: this rank.
        world_size: number of ranks of the run.

    Returns:
        Messages about differences.

    Raises:
        MismatchError: the checkpoint has the state of a sampler and the run has none, the dataset is another one, or
            the state does not fit this number of ranks.
    """
    if options.data == "new":
        if not decision.initial_step:
            return []
        return ['the data position is not restored, as `data="new"` says: the data starts from the beginning']
    sampler = run.sampler
    states = [one["sampler"] for one in found.others if "sampler" in one] if saved else []
    is_saved = bool(states) or "sampler" in saved
    if sampler is None:
        if not is_saved:
            if not decision.initial_step:
                return []
            done = f"the samples of {decision.initial_step} step{'' if decision.initial_step == 1 else 's'}"
            return [f"no sampler was given: the data starts from the beginning, unless the program skips {done}"]
        if options.strict.unexpected == "error":
            raise MismatchError(
                "the checkpoint has the state of a sampler, and the run has no sampler",
                hint="`strict=False` continues without it",
            )
        return ["the run has no sampler for the saved state: the data starts from the beginning"]
    if not is_saved:
        if isinstance(sampler, ElasticSampler) and decision.data_skip_steps:
            sampler.step(decision.data_skip_steps)
            return [f"the checkpoint has no sampler: {decision.data_skip_steps} steps of data are skipped"]
        return ["the checkpoint has no sampler: the data starts from the beginning"] if decision.initial_step else []
    if not isinstance(sampler, ElasticSampler):
        own = states[0] if states else saved["sampler"]
        state, notes = state_for(sampler, "`sampler`", own, states, rank, world_size, run.reshapes.get("sampler"))
        load_into("sampler", sampler.load_state_dict, state)
        return notes
    return sampler.load_state_dict(
        states[0] if states else saved["sampler"],
        ignore_data_skip=config.ignore_data_skip,
        data_skip_steps=config.data_skip_steps,
        grown=options.grown,
    )


def with_data_position(
    decision: ResumeDecision, sampler: object, data: Literal["saved", "new"] = "saved"
) -> ResumeDecision:
    """The decision with the data position of the sampler, which counts samples, so the batch size may change.

    Args:
        decision: the decision.
        sampler: the sampler of the run, or None.
        data: as in `Checkpointer.resume`.
    """
    if sampler is None or data == "new":
        decision = replace(decision, restored=tuple(one for one in decision.restored if one != "data position"))
    elif isinstance(sampler, FollowedLoader) and not decision.fresh and sampler.n_passes is not None:
        return replace(decision, initial_epoch=sampler.n_passes)
    if not isinstance(sampler, ElasticSampler):
        return decision
    return replace(
        decision,
        initial_epoch=sampler.epoch,
        next_step=EpochStep(sampler.epoch + 1, sampler.consumed // sampler.global_batch_size + 1),
        consumed_samples=sampler.total,
        global_batch_size=sampler.global_batch_size,
    )


def check_restored(check: Callable[[Mapping[str, Any]], bool | None], run: Mapping[str, Any]) -> None:
    """Call the user's `check` with the saved metrics.

    Raises:
        MismatchError: `check` returned False.
    """
    if check({**run["metrics"], "step": run["step"], "loss": run["loss"]}) is False:
        raise MismatchError(
            f"`check` returned False: the restored run does not behave as it did when it was saved at step "
            f"{run['step']}",
            hint="check that code and data are the same",
        )


def restore_random(
    saved: Mapping[str, Any],
    iteration: int,
    *,
    rank: int,
    world_size: int,
    coordinate: Mapping[str, int] | None,
    root_seed: int,
) -> list[str]:
    """Restore the random streams; with other ranks derive new ones, see `rng`.

    Args:
        saved: the extra state of the checkpoint.
        iteration: the iteration of the checkpoint.
        rank: this rank.
        world_size: number of ranks.
        coordinate: position of this rank by mesh axis; None: its rank.
        root_seed: the seed of the run.

    Returns:
        Messages about differences.
    """
    if "rng" in saved:
        report = rng.restore(
            {**saved["rng"], "root_seed": root_seed},
            iteration=iteration,
            rank=rank,
            world_size=world_size,
            coordinate=coordinate,
        )
    else:
        position = {"rank": rank} if coordinate is None else coordinate
        report = rng.derive(root_seed, iteration, position, reason="fewer ranks saved")
    if not report.derived:
        return []
    return [f"random streams {', '.join(report.derived)} start from new seeds: {report.reason}"]
