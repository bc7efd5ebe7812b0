"""`ResumingTrainer`: the parts of `transformers.Trainer` that resume and save, by a `Checkpointer`.

Trainer creates its state and computes the position in the data first, and prepares model and optimizer after that. To
restore all of it at once, model and optimizer are prepared earlier here, in `set_initial_training_values`.

`callback` has the interface for the user. `position` converts the position in the data, if the batch size changes.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import numbers
import os
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import HubStrategy, has_length

import reshard
from reshard.accelerate.loader import follow, is_prepared
from reshard.commit.roots import iteration_folder_name
from reshard.errors import ArgumentError, MismatchError, UnsupportedError
from reshard.formats.state import PerRank, digest_of
from reshard.formats.trainer_run import names
from reshard.formats.trainer_run.reader import scheduler_state
from reshard.options import InitFrom, Resuming, Retention
from reshard.ranks.collective import Collective
from reshard.ranks.group import log_of_all, resolve, session
from reshard.storage.location import locate
from reshard.torch import Checkpointer, rng
from reshard.torch.loading import read_for
from reshard.torch.passes import LoaderProxy, Passes
from reshard.torch.restore import apply
from reshard.torch.state import describe
from reshard.transformers.position import DataPosition
from reshard.transformers.taken import is_of_deepspeed, taken_from
from reshard.values.words import counted, listed, show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import EllipsisType

    from reshard.resume import ResumeDecision
    from reshard.storage.location import Location

_BEST = "trainer_best"  # metric of an iteration: minus its step if it was the best so far, else 0
_TIMEOUT_S = 1800.0
# Methods of Trainer that are overridden. Before transformers 5 some of them do not exist.
_OVERRIDDEN = (
    "set_initial_training_values",
    "_init_training_state",
    "_prepare_for_training",
    "_run_epoch",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_maybe_log_save_evaluate",
    "_save_checkpoint",
    "_load_best_model",
)
_LOADING = ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state")
_SKIP = "skip_first_batches"  # function in the module of Trainer
# Fields of TrainerState that are restored. The others follow from the arguments of this run.
_RESTORED = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
)


@dataclass(frozen=True)
class Plan:
    """Where and when a trainer saves: the arguments of `ReshardCallback`.

    Attributes:
        root, save_every, keep, retention, options: of the `Checkpointer`.
        resuming: of its method `resume`.
        start: called on the main process with the trainer, when the training starts.
        finish: called on the main process with the final iteration, when the training is complete.
    """

    root: str
    save_every: int | str | None
    keep: int | EllipsisType | None
    retention: Retention | None
    options: dict[str, Any]
    resuming: Resuming
    start: Callable[[Trainer], None]
    finish: Callable[[int], object]

    def checkpointer(self, args: transformers.TrainingArguments, max_steps: int) -> Checkpointer:
        """The checkpointer of a training with these arguments and this last step, which is always saved."""
        retention = self.retention
        if retention is None:
            keep = args.save_total_limit if self.keep is ... else self.keep
            if keep is not None:
                retention = Retention(keep=keep)
            elif self.keep is ...:
                retention = Retention()
        if args.metric_for_best_model is not None and retention is not None:
            if retention.best is not None and args.load_best_model_at_end:
                raise ArgumentError(
                    "`retention` has `best`, and `load_best_model_at_end` is set: the callback itself keeps the best",
                    hint="leave `best` out; `metric_for_best_model` is the metric",
                )
            if retention.best is None:
                retention = dataclasses.replace(retention, best=(_BEST, 1))
        kept: dict[str, Any] = {"keep": None} if retention is None else {"retention": retention}
        every = max(max_steps, 1) if self.save_every is None else self.save_every
        return Checkpointer(self.root, save_every=every, **kept, **self.options)


def resuming(trainer: Trainer, plan: Plan) -> None:
    """Let a trainer resume and save as a plan says: its class becomes a `ResumingTrainer` over its own class.

    Raises:
        UnsupportedError: an option of the training that is not supported, or another version of transformers.
    """
    missing = [name for name in _OVERRIDDEN if not hasattr(Trainer, name)]
    missing += [] if hasattr(sys.modules[Trainer.__module__], _SKIP) else [_SKIP]
    if missing:
        raise UnsupportedError(
            f"Trainer of transformers {transformers.__version__} has no {listed(map(show, missing))}",
            hint="use transformers 5.23 or another version that has it",
        )
    check_arguments(trainer)
    own = type(trainer)
    loads = [name for name in _LOADING if getattr(own, name) is not getattr(Trainer, name)]
    if loads:
        message = "%s overrides %s: state of its own in folders `checkpoint-<N>` is neither saved nor restored"
        log_of_all(None, message, show(own.__name__), listed(map(show, loads)))
    trainer.__class__ = type(
        own.__name__, (ResumingTrainer, own), {"__module__": own.__module__, "__doc__": own.__doc__}
    )
    trainer._reshard_plan = plan  # type: ignore[attr-defined]  # noqa: SLF001


def check_arguments(trainer: Trainer) -> None:
    """Check that the callback can do what the arguments of the training say.

    Raises:
        UnsupportedError: it cannot.
    """
    args = trainer.args
    reasons = {
        "save_only_model": (args.save_only_model, "a checkpoint without the optimizer cannot be resumed from"),
        "auto_find_batch_size": (args.auto_find_batch_size, "it changes the batch size within a run"),
        "enable_jit_checkpoint": (args.enable_jit_checkpoint, "the callback handles SIGTERM itself"),
        "push_to_hub": (
            args.push_to_hub and args.hub_strategy != HubStrategy.END,
            'only `hub_strategy="end"` is possible, since no folders `checkpoint-*` are written',
        ),
        "deepspeed": (trainer.is_deepspeed_enabled, "DeepSpeed holds the state of the optimizer itself"),
    }
    for name, (is_set, reason) in reasons.items():
        if is_set:
            raise UnsupportedError(f"`TrainingArguments` has `{name}`: {reason}")


def _has_samples(loader: Any) -> bool:
    """Whether samples are chosen by their index."""
    is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
    return isinstance(loader, DataLoader) and not is_stream and loader.batch_sampler is not None


class PlainLoader(LoaderProxy):
    """A loader that accelerate has not prepared, in passes that can be begun again."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.passes = Passes(inner)

    def __iter__(self) -> Iterator[Any]:
        return self.passes.batches()

    def state_of_pass(self, n_batches: int | None) -> dict[str, Any]:
        """The state after so many batches; None: between two passes."""
        return self.passes.state(n_batches)

    def load_pass(self, state: Mapping[str, Any], n_batches: int, *, is_same: bool) -> None:
        """Let the next pass begin at a saved position.

        Args:
            state: a value of `state_of_pass`.
            n_batches: number of batches that are left out.
            is_same: whether they are batches as those of the saved position.
        """
        self.passes.load(state, n_read=None if is_same else n_batches)

    def skip(self, n_batches: int) -> None:
        """Leave out the first batches of the next pass."""
        self.passes.skip(n_batches)

    def batch_size(self) -> int | None:
        """Number of samples of a batch; None: the batches have no size."""
        size = getattr(self.inner, "batch_size", None)
        return size if isinstance(size, int) else None

    def check_order(self, n_processes: int) -> None:
        """Check that the order is the same on another number of processes.

        Raises:
            MismatchError: always: each process reads its own loader.
        """
        now = resolve(None).world_size
        if now != n_processes:
            raise MismatchError(
                f"each of {n_processes} processes read its own {type(self.inner).__name__}, and there are {now} now",
                hint="use the same number of processes within an epoch, or give `Trainer` the dataset",
            )


@contextmanager
def _skipping_itself() -> Iterator[None]:
    """Let Trainer use a loader that leaves out the batches that were trained itself."""
    module = sys.modules[Trainer.__module__]
    before = vars(module)[_SKIP]
    setattr(module, _SKIP, lambda loader, _n_batches: loader)
    try:
        yield
    finally:
        setattr(module, _SKIP, before)


class ResumingTrainer(Trainer):
    """The class of a trainer with a `ReshardCallback`, over its own class."""

    _reshard_plan: Plan
    _training: _Training | None = None

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train from the newest checkpoint in the root of the callback, if there is one.

        Args:
            resume_from_checkpoint: True, or the root of the callback: raise an error if there is no checkpoint. Or a
                `checkpoint-<N>` of Trainer, from which the training goes on as long as the root holds no checkpoint.
            trial: not supported.
            args: as `Trainer.train`.
            kwargs: as `Trainer.train`.

        Raises:
            ArgumentError: the path of something else is given, or there is no checkpoint to resume from.
            UnsupportedError: a trial of a hyperparameter search; or a `checkpoint-<N>` lacks something, or was saved
                with other arguments.
            ReshardError: as `Checkpointer.resume` and `Checkpointer.step`.
        """
        check_arguments(self)
        taken = None
        if isinstance(resume_from_checkpoint, str | os.PathLike):
            taken = taken_from(resume_from_checkpoint, self, self._reshard_plan.root, self._reshard_plan.resuming)
            resume_from_checkpoint = True if taken is None else None
        if trial is not None:
            raise UnsupportedError("a hyperparameter search: its trials would save into one checkpoint root")
        with ExitStack() as stack:
            training = _Training(self, self._reshard_plan, stack, must_resume=bool(resume_from_checkpoint), taken=taken)
            stack.callback(setattr, self, "_training", None)
            self._training = training
            output = super().train(taken, trial, *args, **kwargs)
            training.finish()
        return output

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Compute the sizes of the training, then prepare it and restore it."""
        values = super().set_initial_training_values(args, dataloader)
        training = self._training
        if training is None or training.model is not None:
            return values
        n_epochs, per_epoch, n_examples, n_samples, batch_size, steps_in_epoch, max_steps = values
        prepare: Any = super()._prepare_for_training
        training.model, loader = prepare(max_steps, dataloader, training.taken)
        training.loader = loader if is_prepared(loader) else PlainLoader(loader)
        training.resume(steps_in_epoch or 0, max_steps)
        if training.is_resumed and has_length(dataloader):
            n_epochs, max_steps = training.end(n_epochs, per_epoch, max_steps)
        training.plan_until(n_epochs, max_steps)
        return n_epochs, per_epoch, n_examples, n_samples, batch_size, steps_in_epoch, max_steps

    def _init_training_state(
        self, max_steps: Any, num_update_steps_per_epoch: Any, num_train_epochs: Any, resume: Any, trial: Any
    ) -> Any:
        start = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, resume, trial)
        training = self._training
        if training is not None and training.is_resumed:
            return training.restore_state(max_steps)
        return start if training is None or training.taken is None else training.take_over(start, max_steps)

    def _prepare_for_training(self, max_steps: Any, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        training = self._training
        if training is None or training.model is None:
            prepare: Any = super()._prepare_for_training
            return prepare(max_steps, train_dataloader, resume_from_checkpoint)
        return training.model, training.loader

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        training = self._training
        if training is not None:
            training.begin_epoch(kwargs["epoch"])
            if training.is_resumed:
                kwargs["resume_from_checkpoint"] = training.plan.root  # makes Trainer skip the data
        run: Any = super()._run_epoch
        if training is None:
            return run(*args, **kwargs)
        with _skipping_itself():
            return run(*args, **kwargs)

    def _load_rng_state(self, checkpoint: Any) -> None:
        if self._training is None or not self._training.is_resumed:
            super()._load_rng_state(checkpoint)  # of Trainer's own checkpoint, or of none
        else:
            self._training.restore_random()

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        if self._training is None or not is_of_deepspeed(self._training.taken):
            return super()._load_from_checkpoint(*args, **kwargs)
        return None  # `_Training.resume` loads weights and optimizer

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        if self._training is None or not is_of_deepspeed(self._training.taken):
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            scheduler: Any = self.lr_scheduler
            optimizer: Any = self.optimizer
            scheduler.load_state_dict(scheduler_state(locate(checkpoint)))
            rates = scheduler.get_last_lr()
            if len(rates) != len(optimizer.param_groups):
                file = str(locate(checkpoint) / names.SCHEDULER_FILE)
                raise MismatchError(
                    f"{show(file)} has the learning rates of {counted(len(rates), 'group')} of parameters, the "
                    f"optimizer of the run has {counted(len(optimizer.param_groups), 'group')}",
                    path=file,
                    hint="create the optimizer with the parameter groups of the run that saved",
                )
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate  # which the state of an optimizer of torch would bring

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self._training is not None:
            self._training.complete_step()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self._training is None:
            super()._save_checkpoint(model, trial)
        else:
            self._training.is_due = True

    def _load_best_model(self) -> None:
        if self._training is None:
            super()._load_best_model()
        else:
            self._training.load_best()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, and keep the numbers for the next save."""
        if self._training is not None:
            self._training.record(logs)
        super().log(logs, *args, **kwargs)


@dataclass(eq=False)
class _Training:
    """One call of `train`.

    Attributes:
        trainer, plan: as given.
        stack: closes the checkpointer at the end of the training, also after an error.
        must_resume: whether it is an error that there is no checkpoint.
        taken: the folder of a checkpoint of Trainer, from which it goes on; None: there is none.
        model, loader: the prepared model and the prepared loader; None: not prepared yet.
        is_resumed: whether a checkpoint was restored.
        is_due: whether the current step is saved when it is complete.
        n_epochs: number of epochs of the training.
    """

    trainer: Any
    plan: Plan
    stack: ExitStack
    must_resume: bool
    taken: str | None = None
    model: Any = None
    loader: Any = None
    is_resumed: bool = False
    is_due: bool = False
    n_epochs: int = 0
    _checkpointer: Any = None
    _data: DataPosition = field(default_factory=DataPosition)
    _batches_per_epoch: int = 0
    _saved: dict[str, Any] = field(default_factory=dict)
    _random: dict[str, Any] = field(default_factory=dict)
    _position: Any = None  # in the loader
    _loss: float | None = None
    _metrics: dict[str, float] = field(default_factory=dict)
    _complete: int = 0  # the last step that is complete, and the last one that was made
    _made: int = 0
    _epoch: int = 0

    # ------------------------------------------------------------------------------------------------------ resuming

    def resume(self, batches_per_epoch: int, max_steps: int) -> None:
        """Restore everything from the newest checkpoint, if there is one, and claim the root.

        Args:
            batches_per_epoch: number of batches of an epoch, of each rank.
            max_steps: the last step.

        Raises:
            ArgumentError: there is no checkpoint, and there must be one.
            ReshardError: as `Checkpointer.resume`.
        """
        trainer, plan = self.trainer, self.plan
        self._batches_per_epoch = batches_per_epoch
        self._position = follow(self.loader, gives_generator=False) if is_prepared(self.loader) else self.loader
        self._data = _data_of(trainer, self.loader, self._position)
        self._checkpointer = self.stack.enter_context(plan.checkpointer(trainer.args, max_steps))
        extra: dict[str, Any] = {"trainer": self}
        if getattr(trainer.accelerator, "scaler", None) is not None:
            extra["scaler"] = trainer.accelerator.scaler
        of_taken: dict[str, Any] = {}
        if self.taken is not None and is_of_deepspeed(self.taken):
            of_taken["init_from"] = InitFrom(self.taken, format=names.TRAITS.name, fresh_optimizer=False)
        decision: ResumeDecision = self._checkpointer.resume(
            model=self.model,
            optimizer=trainer.optimizer,
            scheduler=TrainerScheduler(trainer),
            sampler=PerRank(self._data, reshape=_first),
            extra=extra,
            **plan.resuming.arguments() | of_taken,
        )
        self.is_resumed = not decision.fresh and decision.init_from is None
        if self.is_resumed:
            members = resolve(None)
            self._random = rng.capture(rank=members.rank, world_size=members.world_size)
            self._complete = self._made = decision.initial_step
            args = trainer.args
            notes = self._data.resume(args.gradient_accumulation_steps, ignore_data_skip=args.ignore_data_skip)
            for line in notes:
                log_of_all(members.rank, "resume: %s", line)
            if not args.ignore_data_skip:
                self._load_position()
        elif self.must_resume:
            raise ArgumentError(
                f"`resume_from_checkpoint` is True, and there is no checkpoint in {show(plan.root)}",
                hint="leave it out: the training resumes if there is a checkpoint",
            )
        self._on_main("model files", lambda: plan.start(trainer))

    def _load_position(self) -> None:
        """Go to the saved position in the loader.

        Raises:
            MismatchError: it cannot be found again.
        """
        data, saved, members = self._data, self._data.saved, resolve(None)
        if saved is None or saved.loader is None:
            if data.batches:
                raise MismatchError(
                    "the checkpoint is within an epoch, and has no position in the loader: it is of an earlier version",
                    hint="`TrainingArguments(ignore_data_skip=True)` starts the epoch again",
                )
            return
        n_processes, rank = saved.loader["world"]
        is_same = (n_processes, rank) == (members.world_size, members.rank) and data.batch_size == saved.batch_size
        if data.batches and not is_same:
            self._position.check_order(n_processes)
        self._position.load_pass(saved.loader["pass"], data.batches, is_same=is_same or not data.batches)

    def end(self, n_epochs: int, steps_per_epoch: int, max_steps: int) -> tuple[int, int]:
        """The number of epochs and the last step, counted by the position in the data.

        Trainer computes both as if all steps had the current batch size.

        Args:
            n_epochs: number of epochs, of Trainer.
            steps_per_epoch: number of steps of an epoch.
            max_steps: the last step, of Trainer.
        """
        args = self.trainer.args
        done = self._data.epochs * steps_per_epoch + self._data.batches // args.gradient_accumulation_steps
        planned = self._data.planned(self._arguments())
        if args.max_steps > 0:
            if planned is not None:  # also if the loader has fewer batches than its length says
                return planned[0], max_steps
            left = max(max_steps - self._complete, 0)
            return max(n_epochs, math.ceil((done + left) / steps_per_epoch)), max_steps
        last = self._complete + max(max_steps - done, 0) if planned is None else planned[1]
        if last != max_steps and done != self._complete:
            why = "another dataset" if self.plan.resuming.data == "new" else "another batch size or dataset"
            log_of_all(None, "resume: with %s the last step is %d instead of %d", why, last, max_steps)
            self._reschedule(last)
            return n_epochs, last
        return n_epochs, max_steps

    def plan_until(self, n_epochs: int, last: int) -> None:
        """Keep where the run ends, for its saves.

        Args:
            n_epochs: number of epochs.
            last: the last step.
        """
        self.n_epochs = n_epochs
        self._data.plan = {"arguments": self._arguments(), "epochs": n_epochs, "last": last}

    def _arguments(self) -> dict[str, Any]:
        args = self.trainer.args
        names = ("max_steps", "num_train_epochs", "gradient_accumulation_steps")
        return {name: getattr(args, name) for name in names}

    def _reschedule(self, n_steps: int) -> None:
        """Create the scheduler again for another number of steps, in its state."""
        trainer = self.trainer
        if not trainer._created_lr_scheduler:  # noqa: SLF001  the caller's own scheduler is not changed
            return
        state = trainer.lr_scheduler.state_dict()
        rates = [group["lr"] for group in trainer.optimizer.param_groups]
        trainer.lr_scheduler = None
        trainer.create_scheduler(num_training_steps=n_steps)
        trainer.lr_scheduler.load_state_dict(state)
        for group, rate in zip(trainer.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        trainer.callback_handler.lr_scheduler = trainer.lr_scheduler

    def restore_state(self, max_steps: int) -> tuple[int, int]:
        """Restore the state of the trainer. Returns the epoch, and the number of its complete batches."""
        trainer = self.trainer
        saved = json.loads(self._saved["state"])
        for name in _RESTORED:
            setattr(trainer.state, name, saved[name])
        if saved["best_global_step"] is not None:
            trainer.state.best_model_checkpoint = str(self._folder(saved["best_global_step"]))
        states = self._saved.get("callbacks")
        self._restore_callbacks(saved["stateful_callbacks"] if states is None else states)
        if self._complete >= max_steps:
            return self.n_epochs, 0  # Trainer itself would make one more step
        return self._data.epochs, self._data.batches

    def take_over(self, start: tuple[int, int], max_steps: int) -> tuple[int, int]:
        """Go to the position of a checkpoint of Trainer, whose state Trainer itself has restored.

        Args:
            start: the epoch, and the number of its batches that are left out.
            max_steps: the last step.
        """
        self._complete = self._made = self.trainer.state.global_step
        self._data.epochs, self._data.batches = start
        if self._complete >= max_steps:
            return self.n_epochs, 0  # Trainer itself would make one more step
        if self._data.batches:
            self._position.skip(self._data.batches)
        return start

    def _restore_callbacks(self, states: Mapping[str, Any]) -> None:
        """Set the attributes of the callbacks with state, and say what differs."""
        found = self._stateful()
        for name in {**states, **found}:
            callbacks, known = found.get(name, []), states.get(name, [])
            if len(callbacks) != len(known):
                message = "resume: the checkpoint has the state of %s of the class `%s`, and the trainer has %d"
                log_of_all(None, message, counted(len(known), "callback"), name, len(callbacks))
            for one, state in zip(callbacks, known, strict=False):
                now = one.state().get("args", {})
                for argument, was in state.get("args", {}).items():
                    if argument in now and digest_of([now[argument]]) != digest_of([was]):
                        message = "resume: `%s` of `%s` was %r, and is %r in the program, which is used"
                        log_of_all(None, message, argument, name, was, now[argument])
                for attribute, value in state.get("attributes", {}).items():
                    setattr(one, attribute, value)

    def _stateful(self) -> dict[str, list[Any]]:
        """The callbacks with state, by the name of their class."""
        found: dict[str, list[Any]] = {}
        for one in self.trainer.callback_handler.callbacks:
            if isinstance(one, ExportableState):
                found.setdefault(type(one).__name__, []).append(one)
        return found

    def restore_random(self) -> None:
        """Restore the random state of the checkpoint: loading and skipping data may have used it."""
        saved, self._random = self._random, {}  # the first batches of the epoch may draw further numbers
        members = resolve(None)
        if saved:
            rng.restore(saved, iteration=self._complete, rank=members.rank, world_size=members.world_size)

    def begin_epoch(self, epoch: int) -> None:
        """Before the first batch of an epoch: in the first one after a resume, restore what preparations have changed.

        These are the random state, and the sum of losses that are not yet logged.
        """
        self._epoch = epoch
        if self._data.batches:
            self.restore_random()
        pending = self._saved.pop("pending", None)
        if pending is None:
            return
        trainer, losses, members = self.trainer, pending["losses"], resolve(None)
        mean = math.fsum(losses) / len(losses)
        own = losses[members.rank] if len(losses) == members.world_size else mean
        trainer._tr_loss = torch.tensor(own, device=trainer.args.device)  # noqa: SLF001
        trainer._globalstep_last_logged = pending["last_logged"]  # noqa: SLF001
        # `train_loss` is the mean over the steps of this call, without those of the sum.
        trainer._total_loss_scalar = -mean  # noqa: SLF001

    # -------------------------------------------------------------------------------------------------------- saving

    def state_dict(self) -> dict[str, Any]:
        """The state of the trainer. All ranks call it."""
        trainer = self.trainer
        trainer.store_flos()
        state = {name: getattr(trainer.state, name) for name in _RESTORED}
        loss = getattr(trainer, "_tr_loss", torch.tensor(0.0, device=trainer.args.device))
        return {
            "state": json.dumps(state, default=float),
            "callbacks": {name: [one.state() for one in ones] for name, ones in self._stateful().items()},
            "pending": {
                "losses": trainer.accelerator.gather(loss.detach().reshape(1)).tolist(),
                "last_logged": getattr(trainer, "_globalstep_last_logged", 0),
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep a saved state for `restore_state`, when the trainer has created its own."""
        self._saved = dict(state)

    def record(self, logs: Mapping[str, Any]) -> None:
        """Keep logged numbers for the save of the current step."""
        values = {name: float(value) for name, value in logs.items() if isinstance(value, numbers.Real)}
        self._loss = values.pop("loss", self._loss)
        self._metrics |= values

    def complete_step(self) -> None:
        """Complete a step, after its logs and its evaluation, and save if a save is due.

        Trainer calls it once more at the end of an epoch, after the logs and the evaluation of the epoch. The last
        step of an epoch is complete then.
        """
        trainer, state, control = self.trainer, self.trainer.state, self.trainer.control
        batches = round((state.epoch - self._epoch) * self._batches_per_epoch)
        is_epoch_end = state.global_step == self._made
        is_whole = batches >= self._batches_per_epoch
        self._made = state.global_step
        if not is_epoch_end and (is_whole or control.should_epoch_stop or control.should_training_stop):
            return
        if is_whole or (is_epoch_end and not control.should_training_stop):
            self._data.epochs, self._data.batches = self._epoch + 1, 0
        else:
            self._data.epochs, self._data.batches = self._epoch, batches
        is_best = trainer.args.metric_for_best_model is not None and state.best_global_step == self._made
        is_due = self.is_due or control.should_training_stop or (is_best and trainer.args.load_best_model_at_end)
        if is_best and is_due:
            state.best_model_checkpoint = str(self._folder(self._made))
        metrics = dict(self._metrics)
        if trainer.args.metric_for_best_model is not None:
            metrics[_BEST] = -float(self._made) if is_best else 0.0
        loss, self._loss, self._metrics, self.is_due = self._loss, None, {}, False
        if self._made > self._complete:
            self._complete = self._made
            self._checkpointer.step(self._made, loss=loss, metrics=metrics, save=is_due)

    def load_best(self) -> None:
        """Load the weights of the best step into the model.

        Raises:
            ReshardError: it is not saved, or cannot be read.
        """
        best = self.trainer.state.best_global_step
        log_of_all(None, "loading the best model, of step %d", best, level=logging.INFO)
        self._checkpointer.wait()
        described = describe(self.model, compare=False)
        members = resolve(None)

        def load() -> None:
            with reshard.open(str(self._folder(best))) as checkpoint:
                found = read_for(described, checkpoint, members.rank, part="model", leaves_out=True)
            apply(described, found.arrays, kept=found.kept)

        Collective(session(members, "best model"), _TIMEOUT_S).each(load)

    def finish(self) -> None:
        """Wait for the last save, and export the final model."""
        state = self.trainer.state
        self._checkpointer.wait()
        is_best = self.trainer.args.load_best_model_at_end and state.best_global_step is not None
        self._on_main("export", lambda: self.plan.finish(state.best_global_step if is_best else state.global_step))

    def _folder(self, iteration: int) -> Location:
        return locate(self.plan.root).absolute() / iteration_folder_name(iteration)

    def _on_main(self, label: str, work: Callable[[], object]) -> None:
        """Run a function on rank 0; its error is raised on all ranks."""
        members = resolve(None)
        Collective(session(members, label), _TIMEOUT_S).each(lambda: None if members.rank else work() and None)


def _data_of(trainer: Any, loader: Any, position: Any) -> DataPosition:
    """The facts of the data of a training, at its start."""
    args, members = trainer.args, resolve(None)
    size = position.batch_size()
    world = [members.world_size, members.rank]
    return DataPosition(
        batch_size=1 if size is None and _has_samples(loader) else size or args.train_batch_size * args.world_size,
        n_samples=len(trainer.train_dataset) if has_length(trainer.train_dataset) else None,
        seed=args.seed if args.data_seed is None else args.data_seed,
        sampling=str(getattr(args.train_sampling_strategy, "value", args.train_sampling_strategy)),
        position=lambda n_batches: {"world": world, "pass": position.state_of_pass(n_batches)},
    )


def _first(states: list[Any], _rank: int, _world_size: int) -> Any:
    """The position of rank 0, which other numbers of ranks convert."""
    return states[0]


class TrainerScheduler:
    """The scheduler of a trainer, which may be created again. `reshard.torch.schedulers` knows it by its name."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def scheduler(self) -> Any:
        """The current one."""
        return self._trainer.lr_scheduler

    def state_dict(self) -> dict[str, Any]:
        """Its state without functions."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return {name: value for name, value in state.items() if not callable(value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore its state."""
        self.scheduler.load_state_dict(state)
