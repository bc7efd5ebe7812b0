"""The progress of Lightning's loops: where a save stands in an epoch, and how the counters are saved."""

from __future__ import annotations

from typing import Any


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


def plateau_steps(trainer: Any) -> list[list[Any]]:
    """The steps that `ReduceLROnPlateau` schedulers make after `on_train_epoch_end`: `[number, metric]` of each."""
    return [
        [number, float(trainer.callback_metrics[config.monitor])]
        for number, config in enumerate(trainer.lr_scheduler_configs)
        if config.reduce_on_plateau
        and config.interval == "epoch"
        and (trainer.current_epoch + 1) % config.frequency == 0
        and config.monitor in trainer.callback_metrics
    ]


def set_not_restarting(fit_loop: Any) -> None:
    """Let the loops begin a new epoch, where Lightning would repeat the end of the last one."""
    base = next(kind for kind in type(fit_loop).__mro__ if kind.__name__ in {"_Loop", "Loop"})
    base.__dict__["restarting"].fset(fit_loop, False)
