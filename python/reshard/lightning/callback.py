"""The callback: when a Trainer of Lightning saves, and how it resumes.

A save is a `reshard.save` of the live tensors, with the rest of Lightning's checkpoint (loops, callbacks, schedulers,
precision plugin, datamodule, hyperparameters) as its extra state. To resume, the callback replaces the strategy's
method `load_checkpoint` for paths that are its own, so that `ckpt_path="last"` chooses the newest undamaged iteration
on all ranks together.

Lightning is not imported here: `reshard.lightning` combines this class with `ModelCheckpoint` of either package.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from reshard.commit import roots
from reshard.errors import ArgumentError, ReshardError, UnsupportedError
from reshard.formats.left_out import NAME as LEFT_OUT
from reshard.formats.state import per_rank
from reshard.lightning.data import begun_again, position_of, watch
from reshard.lightning.progress import (
    add_logged,
    at_end_of_epoch,
    go_on_in_epoch,
    is_end_of_epoch,
    logged_in_epoch,
    plateau_steps,
    reloaded,
    set_not_restarting,
    set_reloaded,
)
from reshard.lightning.resuming import How, Resumed, TrainerRun, described_run, resume, start_from, started_of
from reshard.lightning.trainer_state import as_extra, check_hooks, without_tensors
from reshard.opening import newer_than
from reshard.options import Resuming, Retention, Strict, Verify
from reshard.ranks.group import log_error_of_all, log_of_all, resolve
from reshard.storage.location import locate, locate_root
from reshard.torch import rng
from reshard.torch.left_out import frozen_at_start
from reshard.torch.metrics import metric_states
from reshard.torch.optimizers import plain
from reshard.values.argument_types import Seconds
from reshard.values.arguments import check
from reshard.values.events import OnEvent
from reshard.values.words import show
from reshard.verbs.save import save

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from datetime import timedelta

    from reshard.formats.left_out import LeftOut
    from reshard.lightning.progress import After
    from reshard.options import InitFromLike, SettingsLike, StrictLike, VerifyLike
    from reshard.ranks.group import Group
    from reshard.torch.left_out import Frozen
    from reshard.torch.settings import Started
    from reshard.verbs.save import PendingSave, SaveReport

_PATIENCE_S = 60  # for a save in the background after an exception: other ranks may have ended


class Saving:
    """A `ModelCheckpoint` of Lightning that saves Checkpoint 2.0 iterations, with checksums, and resumes bit-equal.

    The arguments of `ModelCheckpoint` have the same meaning here. Iterations are numbered by `trainer.global_step`.
    `trainer.fit(model, ckpt_path="last")` resumes from the newest undamaged iteration of `dirpath`, or starts without a
    checkpoint if there is none; `trainer.test(model, ckpt_path="best")` loads the weights of the best one. Other paths
    are loaded by Lightning.

    A resumed run equals the uninterrupted one to the last bit on the same number of ranks: model, optimizers,
    schedulers, loops, callbacks, gradient scaler, random states and the position in the data are restored. On another
    number of ranks it resumes from an iteration that was saved at the end of an epoch.

    A save that is due at the last batch of an epoch is made at the end of the epoch, one that is due before a
    validation after it.

    Args:
        dirpath: the checkpoint root, which can be in a bucket; None: the folder that `ModelCheckpoint` uses.
        monitor: the logged metric that decides which iterations are the best.
        mode: "min" or "max".
        save_top_k: number of best iterations that are kept; -1: all iterations; 0: none.
        save_last: save also when the iteration is not among the best.
        every_n_train_steps: steps from one save to the next.
        train_time_interval: time from one save to the next. With manual optimization a save follows a batch in which an
            optimizer has made a step.
        every_n_epochs: epochs from one save to the next.
        save_on_train_epoch_end: whether saves by epoch are made at the end of training epochs, else after validations.
        keep: number of newest iterations that are kept besides the best. With 2, a damaged one has a predecessor.
        async_save: write in the background; training waits only until the tensors are copied.
        verify: what is compared when loading and saving, as in `reshard.torch.Checkpointer`.
        timeout: seconds that ranks wait for each other, the time to write or to read included.
        on_event: a function, or a list of functions, called with each `Event` of the run, such as `EventLog(dirpath)`;
            see docs/watching.md.
        leave_out_frozen: do not save parameters with `requires_grad=False`, as in `reshard.torch.Checkpointer`: the
            program, or `init_from`, must give the same values at each start. A resume compares their digests before
            the first step.
        strict: what happens where the checkpoint and the run differ, as in `reshard.torch.Checkpointer.resume`. None:
            `strict_loading` of the model.
        init_from: what the model starts from if no checkpoint is resumed from, as in `Checkpointer.resume`.
        settings: whose constants of schedulers and options of optimizers are used, as in `Checkpointer.resume`.
        data: "new": go on with other data, as in a second stage. The next epoch begins, and the state of a datamodule
            is not restored. Leave it out when this stage restarts.

    Raises:
        ArgumentError: an option has a value that is not accepted. Lightning raises its own errors for its arguments.

    Example:
        >>> from reshard.lightning import ReshardCheckpoint
        >>> saving = ReshardCheckpoint("run", monitor="val_loss", save_top_k=2, every_n_train_steps=100)
        >>> saving.monitor, saving.save_top_k
        ('val_loss', 2)
    """

    library: Any

    # Of ModelCheckpoint.
    monitor: str | None
    mode: str
    save_top_k: int
    save_last: bool | None
    dirpath: Any
    best_k_models: dict[str, Any]
    best_model_path: str
    best_model_score: Any
    kth_best_model_path: str
    kth_value: Any
    current_score: Any
    last_model_path: str
    _last_global_step_saved: int
    _every_n_train_steps: int
    _every_n_epochs: int
    _train_time_interval: timedelta | None
    _should_skip_saving_checkpoint: Callable[[Any], bool]
    _should_save_on_train_epoch_end: Callable[[Any], bool]

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        *,
        monitor: str | None = None,
        mode: str = "min",
        save_top_k: int = 1,
        save_last: bool | None = None,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        keep: int = 2,
        async_save: bool = False,
        verify: VerifyLike = "touched",
        timeout: Seconds = 1800.0,
        on_event: OnEvent | None = None,
        leave_out_frozen: bool = False,
        strict: StrictLike | None = None,
        init_from: InitFromLike | None = None,
        settings: SettingsLike | None = None,
        data: Literal["saved", "new"] = "saved",
    ) -> None:
        self._resuming = Resuming.of(strict=strict is None or strict, init_from=init_from, settings=settings, data=data)
        self._is_strict_given = strict is not None
        check(Saving.__init__, timeout=timeout, leave_out_frozen=leave_out_frozen, on_event=on_event)
        self._leaves_out = leave_out_frozen
        self._frozen: Frozen | None = None
        self._on_event = on_event
        best = (f"-{monitor}" if mode == "max" else monitor, save_top_k) if monitor and save_top_k > 0 else None
        self._retention = Retention(keep=keep, best=best)
        self._verify = Verify.of(verify)
        self._async, self._timeout = async_save, timeout
        self._pending: PendingSave[SaveReport] | None = None
        self._is_due = self._saves_now = False
        self._time = time.monotonic()
        self._last_step = 0
        self._resumed: Resumed | None = None
        self._started: Started | None = None
        self._epoch_random: dict[str, Any] | None = None
        self._step_random: dict[str, Any] | None = None
        self._has_begun = False
        self._restore_strategy: list[Callable[[], None]] = []
        root = None if dirpath is None else locate_root(dirpath)
        is_remote = root is not None and not root.is_local
        super().__init__(  # type: ignore[call-arg]
            dirpath=None if is_remote else dirpath,  # Lightning needs other packages for a bucket
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            save_last=save_last,
            every_n_train_steps=every_n_train_steps,
            train_time_interval=train_time_interval,
            every_n_epochs=every_n_epochs,
            save_on_train_epoch_end=save_on_train_epoch_end,
        )
        if is_remote:
            self.dirpath = str(root)

    # ------------------------------------------------------------------------------------------------ Lightning's hooks

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Make the strategy load iterations of this package, and the loaders of training data count their batches.

        Args:
            trainer: the Trainer.
            pl_module: the model.
            stage: "fit", "validate", "test" or "predict".

        Raises:
            ArgumentError: the Trainer is of the other package, or has two of these callbacks.
            UnsupportedError: the strategy is `FSDPStrategy`.
        """
        if not isinstance(trainer, self.library.Trainer):
            raise ArgumentError(
                f"this ReshardCheckpoint belongs to {self.library.__name__}, and the Trainer to "
                f"{type(trainer).__module__}",
                hint='`reshard.lightning.callback_of("lightning" or "pytorch_lightning")` chooses the package',
            )
        if any(isinstance(one, Saving) and one is not self for one in trainer.callbacks):
            raise ArgumentError(
                "the Trainer has two `ReshardCheckpoint`, and a run resumes from one root",
                hint="give one of them all conditions, such as `every_n_train_steps` with `monitor` and `save_top_k`",
            )
        if self.dirpath is None or locate(self.dirpath).is_local:
            super().setup(trainer, pl_module, stage)  # type: ignore[misc]
        refused = getattr(self.library.strategies, "FSDPStrategy", None)
        if refused is not None and isinstance(trainer.strategy, refused):
            raise UnsupportedError(
                "`FSDPStrategy` (FSDP1) is not supported",
                hint="`ModelParallelStrategy` with `fully_shard` (FSDP2) is",
            )
        strategy, connector = trainer.strategy, trainer._checkpoint_connector  # noqa: SLF001  Lightning has no hooks here
        load, process, start = strategy.load_checkpoint, strategy.process_dataloader, strategy.on_train_start
        validated, end, loop = strategy.on_validation_end, connector.resume_end, trainer.fit_loop
        logger = trainer._logger_connector  # noqa: SLF001
        end_of_batch = logger.on_batch_end

        def load_checkpoint(path: Any, **options: Any) -> dict[str, Any]:
            if isinstance(path, _Remote):
                path = connector._ckpt_path = path.url  # noqa: SLF001
            if not _is_ours(path):
                return dict(load(path, **options))
            self._resumed = resume(trainer, path, self._how(trainer), version=self.library.__version__)
            return self._resumed.checkpoint

        def before_batch() -> None:
            """Restore the random states of a save within an epoch before the first batch that is trained."""
            if not trainer.training:  # the loader is also that of a test
                return
            if self._resumed is not None:
                self._resumed.set_begun_again(loop._combined_loader)  # noqa: SLF001
            if self._has_begun:
                self._restore(self._step_random)
                self._step_random = None

        def process_dataloader(loader: Any) -> Any:
            loader = process(loader)
            if trainer.training:
                loader = watch(loader, before_batch, lambda: self._epoch_random is None)
                if self._resumed is not None and self._resuming.data == "saved":
                    self._resumed.set_position(loader)
            return loader

        def resume_end() -> None:
            if self._resumed is not None:
                self._resumed.compare_left_out(trainer)
            if trainer.state.fn.value == "fit":
                self._begin(trainer, is_loaded=bool(connector._loaded_checkpoint))  # noqa: SLF001
            end()

        def on_train_start() -> None:
            """Go on where the save was made: hooks of the next epoch follow, in which programs may draw."""
            start()
            self._has_begun = True
            if self._resumed is not None:
                set_reloaded(loop, self._resumed.saved["lightning"])
                self._resumed.restore_metrics(trainer)
                if not self._resumed.is_end_of_epoch:
                    go_on_in_epoch(loop)
            self._restore(self._epoch_random)
            self._epoch_random = None

        # Both follow the hooks of the model, which may draw random numbers and change its tensors.
        def on_batch_end() -> None:
            if self._resumed is not None and trainer.training:
                add_logged(trainer, self._resumed.logged)
            if self._saves_now:
                self._saves_now = False
                self._save_due(trainer, "batch")
            end_of_batch()

        def on_validation_end() -> None:
            validated()
            is_within = not trainer.sanity_checking and trainer.state.fn.value == "fit"
            if is_within and not is_end_of_epoch(trainer):
                self._save_due(trainer, "validation")

        strategy.load_checkpoint, strategy.process_dataloader = load_checkpoint, process_dataloader
        strategy.on_train_start, strategy.on_validation_end = on_train_start, on_validation_end
        connector.resume_end, logger.on_batch_end = resume_end, on_batch_end

        def restore() -> None:
            del strategy.load_checkpoint, strategy.process_dataloader
            del strategy.on_train_start, strategy.on_validation_end
            del connector.resume_end, logger.on_batch_end

        self._restore_strategy.append(restore)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wait for the save in the background, and give the strategy its methods back.

        Args:
            trainer: the Trainer.
            pl_module: the model.
            stage: "fit", "validate", "test" or "predict".
        """
        while self._restore_strategy:
            self._restore_strategy.pop()()
        self._resumed, self._frozen, self._has_begun = None, None, False
        self._epoch_random = self._step_random = None
        self._wait()
        super().teardown(trainer, pl_module, stage)  # type: ignore[misc]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse a root that is at a later step, and hooks whose checkpoints cannot be saved."""
        super().on_train_start(trainer, pl_module)  # type: ignore[misc]
        check_hooks(trainer)
        self._is_due, self._saves_now, self._time = False, False, time.monotonic()
        self._last_step = trainer.global_step
        if self._resumed is not None:
            self._last_global_step_saved = trainer.global_step
        if self._resumed is None and trainer.is_global_zero and not trainer.fast_dev_run:
            root = locate_root(self.dirpath)
            later = newer_than(root, trainer.global_step) if root.is_folder() else ()
            if later:
                raise ArgumentError(
                    f"{show(str(self.dirpath))} is at iteration {max(later)}, and this run at step "
                    f"{trainer.global_step}",
                    hint='resume with `ckpt_path="last"`, or give another `dirpath`',
                )

    def on_train_batch_end(self, trainer: Any, _pl_module: Any, *_: Any) -> None:
        """Let a save by steps or time follow, unless the end of the epoch or a validation follows."""
        every, interval = self._every_n_train_steps, self._train_time_interval
        if every and trainer.global_step % every == 0:
            self._is_due = True
        # With manual optimization only the model knows whether gradients are accumulated: not after a step.
        is_whole = trainer.lightning_module.automatic_optimization or trainer.global_step != self._last_step
        self._last_step = trainer.global_step
        if interval is not None:
            is_time = trainer.strategy.broadcast(time.monotonic() - self._time >= interval.total_seconds())
            self._is_due |= is_time and is_whole
        self._is_due &= trainer.global_step != self._last_global_step_saved  # with accumulated gradients
        if self._is_due and not is_end_of_epoch(trainer):
            fit_loop = trainer.fit_loop
            follows = fit_loop.epoch_loop._should_check_val_fx(fit_loop._data_fetcher)  # noqa: SLF001
            self._saves_now = not trainer.strategy.broadcast(follows)  # it may depend on the clock

    def on_validation_end(self, trainer: Any, _pl_module: Any) -> None:
        """Note that a save is due."""
        if trainer.sanity_checking or trainer.state.fn.value != "fit":
            return
        if not self._should_save_on_train_epoch_end(trainer) and self._is_due_by_epochs(trainer):
            self._is_due = True

    def on_train_epoch_end(self, trainer: Any, _pl_module: Any) -> None:
        """Save if a save is due."""
        if self._should_save_on_train_epoch_end(trainer) and self._is_due_by_epochs(trainer):
            self._is_due = True
        self._save_due(trainer, "epoch")

    def on_train_end(self, _trainer: Any, _pl_module: Any) -> None:
        """Wait for the save in the background."""
        self._wait()

    def on_exception(self, trainer: Any, *_: Any) -> None:
        """Wait for the save in the background. Nothing is saved: other ranks may not know of the exception."""
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.result(_PATIENCE_S)
        except (ReshardError, TimeoutError) as error:
            log_error_of_all(trainer.global_rank, error, "the save in the background: %s", error)

    # ---------------------------------------------------------------------------------------------------------- saving

    def _is_due_by_epochs(self, trainer: Any) -> bool:
        return self._every_n_epochs >= 1 and (trainer.current_epoch + 1) % self._every_n_epochs == 0

    def _save_due(self, trainer: Any, after: After) -> None:
        """Save if a save is due and possible at this step, and the iteration is among the best or kept as the last."""
        if not self._is_due or trainer.fit_loop.epoch_loop._should_accumulate():  # noqa: SLF001  gradients are not saved
            return
        self._is_due = False
        if self._should_skip_saving_checkpoint(trainer) or (self.save_top_k == 0 and not self.save_last):
            return
        metrics = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if getattr(value, "numel", int)() == 1
        }
        path = str(locate(self.dirpath) / roots.iteration_folder_name(trainer.global_step))
        is_best = self.save_top_k != 0 and self._rank(trainer, path)
        if not is_best and not self.save_last:
            return
        self.last_model_path = path
        self._save(trainer, metrics, after)
        self._last_global_step_saved, self._time = trainer.global_step, time.monotonic()

    def _rank(self, trainer: Any, path: str) -> bool:
        """Whether an iteration is among the best; if so, it takes its place there."""
        if self.monitor is None:
            self.best_model_path = path
            return True
        score = trainer.callback_metrics.get(self.monitor)
        if score is None:
            message = "iteration %d has no metric %r: it is not among the best"
            log_of_all(trainer.global_rank, message, trainer.global_step, self.monitor)
            return False
        score = trainer.strategy.broadcast(score.detach().cpu().clone())
        worst = float("inf" if self.mode == "min" else "-inf")
        score = score.new_tensor(worst) if score.isnan() else score
        scores = {**self.best_k_models, path: score}
        order = sorted(scores, key=lambda one: float(scores[one]), reverse=self.mode == "max")
        kept = order if self.save_top_k == -1 else order[: self.save_top_k]
        if path not in kept:
            return False
        self.current_score = score
        self.best_k_models = {one: scores[one] for one in scores if one in kept}
        self.best_model_path, self.kth_best_model_path = kept[0], kept[-1]
        self.best_model_score, self.kth_value = scores[kept[0]], scores[kept[-1]]
        return True

    def _save(self, trainer: Any, metrics: dict[str, float], after: After) -> None:
        members = resolve(None)
        step, is_end = trainer.global_step, is_end_of_epoch(trainer)
        left_out = self._left_out(trainer, members)
        described = described_run(
            trainer,
            self._started,
            timeout=self._timeout,
            compare=True,
            leave_out=() if left_out is None else left_out.tensors,
        )
        checkpoint, weights = without_tensors(trainer)
        at_end_of_epoch(checkpoint["loops"], is_end=is_end)
        checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)  # a second position of each loader
        extra: dict[str, Any] = {
            "rng": per_rank(rng.capture(rank=members.rank, world_size=members.world_size)),
            "lightning per rank": per_rank(_positions(trainer, is_end=is_end)),
        }
        if members.rank == 0:
            extra["trainer"] = described.extra
            extra["run"] = {"step": step, "root_seed": 0, "loss": None, "metrics": metrics, "interrupted": False}
            extra["lightning"] = {
                "checkpoint": as_extra(checkpoint),
                "metrics": as_extra(dict(trainer.callback_metrics)),
                "is_end_of_epoch": is_end,
                "reloaded": reloaded(trainer.fit_loop),
                "plateau": plateau_steps(trainer, after) if is_end or after != "epoch" else [],
            }
            if weights.replaced:
                replaced = {key: plain(value).clone() for key, value in weights.replaced.items()}
                extra["lightning"]["weights"] = {"replaced": replaced, "moved": weights.moved}
            if left_out is not None:
                extra[LEFT_OUT] = left_out.to_value()
        saving = described.saving()
        for key in weights.removed:
            saving["model"].pop(key, None)
        save_any: Any = save  # the type of the result depends on `blocking`
        saved = save_any(
            self.dirpath,
            step,
            **saving,
            common={"step_num": step, "global_step": step, "epoch_num": trainer.current_epoch + is_end},
            extra=extra,
            metrics=metrics,
            retention=None if self.save_top_k == -1 else self._retention,
            verify=self._verify,
            timeout=self._timeout,
            blocking=not self._async,
            on_event=self._on_event,
        )
        self._pending = saved if self._async else None

    def _left_out(self, trainer: Any, members: Group) -> LeftOut | None:
        """The parameters that a save leaves out, without those that are trained by now or have changed."""
        frozen = self._frozen
        if frozen is None or not frozen.tensors:
            return None
        for note in frozen.update(TrainerRun(trainer), members, self._timeout):
            log_of_all(members.rank, "%s", note)
        return frozen.record()

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    # -------------------------------------------------------------------------------------------------------- resuming

    def _find_last_checkpoints(self, trainer: Any) -> set[str] | set[_Remote]:
        """The checkpoint root, if it has iterations: the iteration is chosen on all ranks together (see `setup`)."""
        root = self._ModelCheckpoint__resolve_ckpt_dir(trainer)  # type: ignore[attr-defined]
        place = locate(root)
        if not (place.is_folder() and newer_than(place, -1)):
            return set()
        if place.is_local:
            return {str(root)}
        if others := [type(one).__name__ for one in trainer.checkpoint_callbacks if one is not self]:
            raise ArgumentError(
                f'`ckpt_path="last"` is the newest of the checkpoints of {show(str(place))} and of `{others[0]}`, and '
                "Lightning compares the times of files only",
                path=str(place),
                hint=f"say which one: `ckpt_path={str(place)!r}` goes on from the bucket",
            )
        return {_Remote(str(place))}

    def _how(self, trainer: Any) -> How:
        given = self._resuming
        if not self._is_strict_given:
            given = replace(given, strict=Strict.of(bool(trainer.lightning_module.strict_loading)))
        return How(given, self._verify.on_load, self._timeout, self._on_event, self._leaves_out)

    def _begin(self, trainer: Any, *, is_loaded: bool) -> None:
        """Restore what Lightning does not, after it has restored its part; or start from other weights."""
        resumed, init = self._resumed, self._resuming.init_from
        self._started = started_of(trainer)
        if resumed is None:
            if init is not None and is_loaded:
                raise ArgumentError(
                    f"`init_from` is {show(str(init.path))}, and `ckpt_path` has another checkpoint",
                    hint='`ckpt_path="last"` goes on from the newest checkpoint of the run, if there is one',
                )
            base = None if init is None else start_from(trainer, str(self.dirpath), init, self._how(trainer))
            self._leave_out(trainer, is_loaded=is_loaded, base=base)
            return
        resumed.restore_optimizers(trainer, self._started)
        self._leave_out(trainer, is_loaded=True, base=None)
        random = resumed.random_state()
        if resumed.is_end_of_epoch:
            set_not_restarting(trainer.fit_loop)
            self._epoch_random = random
        else:
            self._step_random = random

    def _leave_out(self, trainer: Any, *, is_loaded: bool, base: str | None) -> None:
        """Choose the frozen parameters that saves leave out, all ranks collectively.

        Args:
            trainer: the Trainer; everything is restored.
            is_loaded: whether a checkpoint was loaded.
            base: what `init_from` names, if that was loaded.
        """
        if not self._leaves_out:
            return
        resumed = self._resumed
        self._frozen, messages = frozen_at_start(
            TrainerRun(trainer),
            described_run(trainer, self._started, compare=False, timeout=self._timeout),
            resolve(None),
            self._timeout,
            before={} if resumed is None else resumed.before,
            compared={} if resumed is None else resumed.compared,
            is_loaded=is_loaded or base is not None,
            source=base if resumed is None else resumed.base,
            of_init=base is not None,
        )
        self._how(trainer).together(lambda: messages)

    @staticmethod
    def _restore(random: dict[str, Any] | None) -> None:
        if random is not None:
            rng.restore(**random)


Saving.__init__.__qualname__ = "ReshardCheckpoint.__init__"  # Python's error for an unknown argument has this name


def _positions(trainer: Any, *, is_end: bool) -> dict[str, Any]:
    """The position in each loader of training data, and what this rank has logged and counted."""
    n_ahead = len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))  # noqa: SLF001
    combined = trainer.fit_loop._combined_loader  # noqa: SLF001
    positions = [position_of(loader) for loader in combined.flattened]
    # Lightning itself resets the metrics that are logged at the end of an epoch.
    logged = {id(one.value) for one in trainer.fit_loop.epoch_loop._results.values() if not one.is_tensor}  # noqa: SLF001
    return {
        "loaders": [None if one is None else one.state(n_ahead, is_end=is_end) for one in positions],
        "begun again": [] if is_end else begun_again(combined),
        "logged": {} if is_end else logged_in_epoch(trainer),
        "metrics": metric_states(trainer.lightning_module, logged if is_end else ()),
    }


class _Remote:
    """A root in a bucket, as Lightning takes it for `ckpt_path`: as a path that exists. Messages show the URL."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __fspath__(self) -> str:
        return "/"

    __str__ = __fspath__

    def __format__(self, _: str) -> str:
        return self.url

    def __repr__(self) -> str:
        return repr(self.url)


def _is_ours(path: Any) -> bool:
    """Whether a path is a checkpoint root or an iteration folder."""
    try:
        location = roots.published(locate(path))
    except (ArgumentError, UnsupportedError):
        return False
    if not location.is_folder():
        return False
    return roots.parse_iteration_folder(location.name) is not None or roots.is_root(location)
