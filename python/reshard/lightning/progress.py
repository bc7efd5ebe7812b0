"""The progress of Lightning's loops: where a save stands in an epoch, and how the counters are saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    After = Literal["batch", "validation", "epoch"]


def is_end_of_epoch(trainer: Any) -> bool:
    """Whether the newest batch is the last one of its epoch."""
    loop = trainer.fit_loop.epoch_loop
    return bool(loop._num_ready_batches_reached())  # noqa: SLF001


def at_end_of_epoch(loops: dict[str, Any], *, is_end: bool) -> None:
    """Set the saved counters of epochs to where the run resumes: at the next epoch, or within this one.

    A save at the end of an epoch is made in the hook `on_train_epoch_end`, in which Lightning has counted the epoch as
    processed, and not as completed.

    Args:
        loops: the state of the loops, which is changed.
        is_end: whether the epoch is over; it is not if `max_steps` has ended it early.

    Example:
        >>> counters = {"ready": 3, "started": 3, "processed": 3, "completed": 2}
        >>> loops = {"fit_loop": {"epoch_progress": {"total": counters, "current": dict(counters)}}}
        >>> at_end_of_epoch(loops, is_end=True)
        >>> counters["completed"]
        3
    """
    for counters in loops["fit_loop"]["epoch_progress"].values():
        if is_end:
            counters["completed"] = counters["processed"]
        else:
            counters["processed"] = counters["completed"]


def end_epoch(loops: dict[str, Any]) -> None:
    """Count an epoch that a save was made in as complete.

    Args:
        loops: the state of the loops, which is changed.

    Example:
        >>> counters = {"ready": 3, "started": 3, "processed": 2, "completed": 2}
        >>> loops = {"fit_loop": {"epoch_progress": {"total": counters, "current": dict(counters)}}}
        >>> end_epoch(loops)
        >>> counters["completed"]
        3
    """
    for counters in loops["fit_loop"]["epoch_progress"].values():
        counters["started"] = counters["processed"] = counters["completed"] = counters["ready"]


def plateau_steps(trainer: Any, after: After) -> list[list[Any]]:
    """The steps that `ReduceLROnPlateau` schedulers make after a save: `[number, metric]` of each.

    Args:
        trainer: the Trainer.
        after: what the save follows. After a validation within an epoch a resumed run makes these steps.
    """
    if after == "validation" or not trainer.lightning_module.automatic_optimization:
        return []
    by_epochs = after == "epoch"
    interval, n_made = (
        ("epoch", trainer.current_epoch) if by_epochs else ("step", trainer.fit_loop.epoch_loop.batch_idx)
    )
    return [
        [number, float(trainer.callback_metrics[config.monitor])]
        for number, config in enumerate(trainer.lr_scheduler_configs)
        if config.reduce_on_plateau
        and config.interval == interval
        and (n_made + 1) % config.frequency == 0
        and config.monitor in trainer.callback_metrics
    ]


def set_not_restarting(fit_loop: Any) -> None:
    """Let the loops begin a new epoch as later epochs begin, where Lightning would repeat the end of the last one.

    Lightning would also take the batches of the new epoch from an iterator that began before the hooks of the epoch.
    """
    base = next(kind for kind in type(fit_loop).__mro__ if kind.__name__ in {"_Loop", "Loop"})
    base.__dict__["restarting"].fset(fit_loop, False)
    fit_loop._resuming_from_checkpoint = False  # noqa: SLF001


def reloaded(fit_loop: Any) -> int:
    """The epoch in which the loaders of the training data were made (`reload_dataloaders_every_n_epochs`)."""
    return int(fit_loop._last_train_dl_reload_epoch)  # noqa: SLF001


def set_reloaded(fit_loop: Any, saved: Mapping[str, Any]) -> None:
    """Let the loaders be made again in the epoch in which the saved run makes them again.

    Args:
        fit_loop: the loop.
        saved: the state of the callback. Earlier builds do not have the epoch.
    """
    if "reloaded" in saved:
        fit_loop._last_train_dl_reload_epoch = saved["reloaded"]  # noqa: SLF001


def go_on_in_epoch(fit_loop: Any) -> None:
    """Let schedulers step at the end of an epoch that goes on: Lightning leaves those that need metrics out there."""
    fit_loop._restarting = False  # noqa: SLF001  not that of the loops in it, which find their batch by it


def logged_in_epoch(trainer: Any) -> dict[str, list[float]]:
    """What was logged for the whole epoch up to now: of each result its value and, of a mean, its number of samples."""
    results = trainer.fit_loop.epoch_loop._results  # noqa: SLF001
    return {
        key: [float(one.value), *([int(one.cumulated_batch_size)] if one.meta.is_mean_reduction else [])]
        for key, one in results.items()
        if one.is_tensor and one.meta.on_epoch and not one.has_reset
    }


def add_logged(trainer: Any, saved: dict[str, list[float]]) -> None:
    """Add what was logged before a save within this epoch.

    Args:
        trainer: the Trainer, after a batch.
        saved: a value of `logged_in_epoch`. Results that are logged again by now are added, and removed here.
    """
    results = trainer.fit_loop.epoch_loop._results  # noqa: SLF001
    for key in [key for key in saved if key in results and not results[key].has_reset]:
        one, (value, *n_samples) = results[key], saved.pop(key)
        before = one.value.new_tensor(value)
        if one.meta.is_max_reduction or one.meta.is_min_reduction:
            one.value = one.meta.reduce_fx(one.value, before)
        else:
            one.value = one.value + before
        if n_samples:
            one.cumulated_batch_size = one.cumulated_batch_size + int(n_samples[0])
