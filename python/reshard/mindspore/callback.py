"""`ReshardCallback`: when `Model.train` saves, and how it resumes.

The data pipeline of MindSpore begins at any step (`Dataset.set_init_step`) and then yields what it would have yielded
without the interruption, provided that its seed is fixed. So the position in the data is the number of steps.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mindspore
from mindspore.train import Callback

from reshard.errors import ArgumentError, MismatchError
from reshard.formats import state
from reshard.mindspore.loading import load
from reshard.mindspore.parameters import check_alone, named, named_parts
from reshard.mindspore.saving import check_options, save
from reshard.opening import newer_than
from reshard.storage.location import locate
from reshard.values.arguments import check_path
from reshard.values.words import show

if TYPE_CHECKING:
    import os

    from reshard.resume import ResumeDecision

_log = logging.getLogger("reshard")

_NAME = "mindspore"
_UNSEEDED = 5489  # of the data pipeline: then it draws a new seed for every shuffle
_SCALER = ("loss_scale", "cur_iter", "last_overflow_iter", "bad_step")  # of a DynamicLossScaleManager
_OF_LOAD = {"group", "layout", "timeout", "verify"}


@dataclass(frozen=True)
class Start:
    """Where a run starts.

    Attributes:
        initial_epoch: for `Model.train(initial_epoch=...)`.
        initial_step: steps that were made.
        decision: which iteration was chosen, and which were skipped.
    """

    initial_epoch: int
    initial_step: int
    decision: ResumeDecision


class ReshardCallback(Callback):  # type: ignore[misc]
    """Saves iterations during `Model.train` and `Model.fit`, and resumes from the newest undamaged one.

    Iterations are numbered by steps. Saved are the parameters of the network, those of the optimizer and of the loss
    scaling, the state of the loss scale manager and of MindSpore's default generator, and the counters. A save that is
    due at the last step of an epoch is made at the end of the epoch, after an evaluation.

    Args:
        root: the checkpoint root.
        save_every: steps from one save to the next. The last step of a run is saved, too.
        keep: number of newest iterations that are kept.
        options: `files`, `commit`, `format`, `group`, `layout`, `on_event`, `retention`, `timeout` and `verify`
            of `reshard.save`.

    Raises:
        ArgumentError: an option is not known or has a value that is not accepted.

    Example:
        >>> callback = ReshardCallback("run", save_every=100, keep=3)
        >>> # start = callback.resume(model, dataset)
        >>> # model.train(10, dataset, callbacks=[callback], initial_epoch=start.initial_epoch)
    """

    def __init__(self, root: str | os.PathLike[str], *, save_every: int, keep: int | None = 5, **options: Any) -> None:
        check_path("root", root)
        check_options(options)
        for name in ("common", "metrics", "shapes"):
            if name in options:
                raise ArgumentError(f"`ReshardCallback` has no option `{name}`")
        if type(save_every) is not int or save_every < 1:
            raise ArgumentError(f"`save_every` is a number of steps from 1 on, not {save_every!r}")
        super().__init__()
        self._root, self._save_every = root, save_every
        self._options = options if "retention" in options else {"keep": keep, **options}
        self._start: Start | None = None
        self._saved = 0  # the step of the last save

    def resume(self, model: Any, dataset: Any) -> Start:
        """Restore the newest undamaged iteration, and set the dataset to its step. Call it before `Model.train`.

        Args:
            model: the `mindspore.train.Model`.
            dataset: the dataset that is given to `Model.train`.

        Returns:
            Where to start; for an empty or missing root, at epoch 0 and step 0.

        Raises:
            ArgumentError: the dataset is shuffled without a seed.
            MismatchError: the checkpoint was saved with another seed, or another number of steps per epoch; or
                as `load`.
            UnsupportedError: MindSpore runs in several processes without `group`.
            ReshardError: as `reshard.load`.
        """
        if dataset.is_shuffled() and mindspore.dataset.config.get_seed() == _UNSEEDED:
            raise ArgumentError(
                "the dataset is shuffled without a seed: its order cannot be repeated",
                hint="call `mindspore.set_seed(...)` before the dataset is made",
            )
        options = {name: value for name, value in self._options.items() if name in _OF_LOAD}
        loaded = load(self._root, *named_parts(model.train_network, None), **options)
        if not loaded.iteration:
            self._start = Start(0, 0, loaded.decision)
            return self._start
        path, saved = str(loaded.decision.path), loaded.extra.get(_NAME)
        if saved is None:
            raise MismatchError(
                f"{path} has no state of `ReshardCallback`",
                path=path,
                hint="load its parameters with `reshard.mindspore.load`, and train with another root",
            )
        now = _data_facts(dataset)
        for name, value in now.items():
            if saved["data"][name] != value:
                raise MismatchError(
                    f"{path} was saved with {name} {saved['data'][name]}, and this run has {value}",
                    path=path,
                    hint="the position in the data depends on it; to start the data anew, load the parameters with "
                    "`reshard.mindspore.load`, and train with another root",
                )
        step = loaded.iteration
        mindspore.set_rng_state(mindspore.Tensor(saved["generator"]))
        for name, value in saved["scaler"].items():
            setattr(model._loss_scale_manager, name, value)  # noqa: SLF001  it has no accessor
        dataset.set_init_step(step)
        self._start = Start(step // now["steps per epoch"], step, loaded.decision)
        self._saved = step
        for reason in loaded.decision.reasons:
            _log.warning("resume: %s", reason)
        return self._start

    # ---------------------------------------------------------------------------------------------- MindSpore's hooks

    def on_train_begin(self, run_context: Any) -> None:
        """Set the counter of steps, and refuse a root that is at a later step."""
        params, start = run_context.original_args(), self._start
        check_alone(self._options.get("group"))
        if start is not None:
            params.cur_step_num = start.initial_step
        elif (place := locate(self._root)).is_folder() and newer_than(place, 0):
            raise ArgumentError(
                f"{show(str(self._root))} has checkpoints, and this run starts at step 0",
                hint="call `callback.resume(model, dataset)` before `model.train`, or give another root",
            )

    def on_train_epoch_begin(self, run_context: Any) -> None:
        """Check that the first epoch is the one of the checkpoint."""
        params, start = run_context.original_args(), self._start
        self._start = None
        if start is not None and params.cur_epoch_num != start.initial_epoch + 1:
            raise ArgumentError(
                f"training starts with epoch {params.cur_epoch_num - 1}, and the checkpoint is in epoch "
                f"{start.initial_epoch}",
                hint="`model.train(..., initial_epoch=start.initial_epoch)`",
            )

    def on_train_step_end(self, run_context: Any) -> None:
        """Save if a save is due, unless the epoch ends."""
        params = run_context.original_args()
        if params.cur_step_num % params.batch_num:
            self._save_due(params)

    def on_train_epoch_end(self, run_context: Any) -> None:
        """Save if a save is due."""
        self._save_due(run_context.original_args())

    def on_train_end(self, run_context: Any) -> None:
        """Save the last step."""
        params = run_context.original_args()
        if params.cur_step_num > self._saved:
            self._save(params)

    def _save_due(self, params: Any) -> None:
        # In sink mode several steps are made at once.
        if params.cur_step_num // self._save_every > self._saved // self._save_every:
            self._save(params)

    def _save(self, params: Any) -> None:
        step, optimizer, manager = params.cur_step_num, params.optimizer, params.loss_scale_mananger
        model = named(params.network)
        rest = {name: one for name, one in named(params.train_network).items() if name not in model}
        global_step = None if optimizer is None else getattr(optimizer, "global_step", None)
        own = {
            "data": _data_facts(params.train_dataset),
            "generator": mindspore.get_rng_state().asnumpy(),
            "scaler": {name: getattr(manager, name) for name in _SCALER if hasattr(manager, name)},
        }
        common = {
            "epoch_num": params.cur_epoch_num,
            "step_num": step,
            "global_step": step if global_step is None else int(global_step.asnumpy().item()),
            "loss_scale": None if manager is None else float(manager.get_loss_scale()),
            "global_batch_size": params.train_dataset.get_batch_size() * params.device_number,
        }
        save(self._root, step, model, rest, common=common, extra={_NAME: state.per_rank(own)}, **self._options)
        self._saved = step


def _data_facts(dataset: Any) -> dict[str, int]:
    """What the meaning of a position in the data depends on."""
    return {"dataset seed": mindspore.dataset.config.get_seed(), "steps per epoch": dataset.get_dataset_size()}
