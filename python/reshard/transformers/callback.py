"""The callback for `transformers.Trainer`, and the export of what it saves.

    trainer = Trainer(..., callbacks=[ReshardCallback("run", save_every=500, keep=5)])
    trainer.train()

A callback of Trainer cannot set the step and the position in the data at which the training starts. So it gives its
trainer the class `ResumingTrainer` (module `training`) over its own class. The class `Trainer` itself is unchanged.
"""

from __future__ import annotations

import copy
import sys
from typing import TYPE_CHECKING, Any, Literal

from transformers import Trainer, TrainerCallback

import reshard
from reshard.commit.roots import iteration_folder_name
from reshard.conversion.library_model import model_of
from reshard.conversion.library_names import published_names
from reshard.errors import ArgumentError
from reshard.options import Files, Resuming, Retention
from reshard.storage.changes import make_folders
from reshard.storage.location import locate
from reshard.torch.adapters import adapters_of, read_names, write_adapters, write_names
from reshard.torch.merging import merge_of, write_merged
from reshard.torch.published import check_loads
from reshard.transformers.training import Plan, resuming
from reshard.verbs.convert import convert

if TYPE_CHECKING:
    import os
    from types import EllipsisType

    from transformers import TrainerControl, TrainerState, TrainingArguments

    from reshard.options import InitFromLike, RetentionLike, SettingsLike, StrictLike
    from reshard.verbs.convert import ConvertReport

MODEL_FILES = "model_files"  # folder in the checkpoint root with the configuration and the tokenizer


class ReshardCallback(TrainerCallback):
    """Saves the run of a `transformers.Trainer` and resumes it, in place of Trainer's own checkpoints.

    `trainer.train()` continues from the newest undamaged checkpoint in `root`, if there is one: model, optimizer,
    scheduler, gradient scaler, random state, counters, logs, callbacks with state and the position in the data. On the
    same ranks the run is bitwise equal to an uninterrupted one. With another number of ranks or another batch size the
    data continues at the same sample.

    Saves: every `save_every` steps, when `TrainingArguments` say so (`save_strategy`, `save_steps`), and after the last
    step. No folders `checkpoint-*` are written. A save is made after the logs and the evaluation of its step.
    On SIGTERM and SIGUSR1 the run saves and exits, see `reshard.torch.Checkpointer`.

    Best model: with `metric_for_best_model` its iteration is kept by the retention. With `load_best_model_at_end` each
    new best is saved, and the model has the weights of the best one when `train` returns.

    Pass it as `Trainer(callbacks=[...])`. With `trainer.add_callback`, call `attach` too.

    Args:
        root: the checkpoint root.
        save_every: steps from one save to the next, or a time such as "30min"; None: only as `TrainingArguments` say.
        keep: number of newest iterations that are kept. Default: `save_total_limit`, or 5. None: all.
        hf: a folder that gets the weights, the configuration and the tokenizer for `from_pretrained` at the end of the
            training: the best model with `load_best_model_at_end`, else the last one. None: no folder.
        merge: of a model of peft, `hf` (and `hf_every`) gets the merged weights, as
            `merge_and_unload().save_pretrained()` writes them, instead of the adapters.
        strict: what happens where the checkpoint and the run differ, as in `Checkpointer.resume`.
        init_from: what the model starts from if the root holds no checkpoint yet, as in `Checkpointer.resume`.
        settings: whose constants of schedulers and options of the optimizer are used, as in `Checkpointer.resume`.
        data: "new": go on with another dataset, as in a second stage. Steps go on, epochs count from 0 again, and
            `num_train_epochs` are those of the new dataset. Leave it out when this stage restarts.
        options: further arguments of `reshard.torch.Checkpointer`, such as `leave_out_frozen=True`.

    Raises:
        ArgumentError: an option has a value that is not accepted, or contradicts another one.

    Example:
        >>> callback = ReshardCallback("run", save_every=500, keep=3, init_from="pretrained", strict=False)
        >>> callback.root
        'run'
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        save_every: int | str | None = None,
        keep: int | EllipsisType | None = ...,
        hf: str | os.PathLike[str] | None = None,
        merge: bool = False,
        strict: StrictLike = True,
        init_from: InitFromLike | None = None,
        settings: SettingsLike | None = None,
        data: Literal["saved", "new"] = "saved",
        **options: Any,
    ) -> None:
        retention: RetentionLike | None = options.pop("retention", None)
        if keep is not ... and retention is not None:
            raise ArgumentError("`keep` and `retention` are given", hint="`Retention(keep=...)` is the same as `keep`")
        if merge and hf is None and options.get("hf_every") is None:
            raise ArgumentError("`merge` belongs to `hf` or `hf_every`, and neither is given")
        if merge and options.get("hf_every") is not None:
            options["merge"] = True
        if options.get("leave_out_frozen") and merge:
            raise ArgumentError(
                "`merge` writes whole weights, and `leave_out_frozen` leaves some out of the saves",
                hint="leave one of the two out; `hf` without `merge` writes the adapters",
            )
        self._merge = merge
        self.plan = Plan(
            root=str(root),
            save_every=save_every,
            keep=keep,
            retention=None if retention is None else Retention.of(retention),
            options=options,
            resuming=Resuming.of(strict=strict, init_from=init_from, settings=settings, data=data),
            start=lambda trainer: self._start(trainer, has_hf=hf is not None),
            finish=lambda iteration: None if hf is None else self._export(hf, iteration),
        )
        self._trainer: Trainer | None = None

    def _start(self, trainer: Trainer, *, has_hf: bool) -> None:
        is_partial = has_hf and bool(self.plan.options.get("leave_out_frozen"))
        if is_partial and not adapters_of(trainer.accelerator.unwrap_model(trainer.model)):
            raise ArgumentError(
                "`hf` writes all weights of the model, and `leave_out_frozen` leaves some out of the saves",
                hint="leave one of the two out; of a model of peft the adapters are written",
            )
        write_model_files(self.root, trainer, merge=self._merge)

    def _export(self, hf: str | os.PathLike[str], iteration: int) -> None:
        model = None if self._trainer is None or not self._merge else self._trainer.model
        export(self.root, hf, iteration=iteration, merge=model)

    @property
    def root(self) -> str:
        """The checkpoint root."""
        return self.plan.root

    def attach(self, trainer: Trainer) -> None:
        """Let a trainer save and resume by this callback. `Trainer(callbacks=[...])` calls it.

        Raises:
            ArgumentError: the trainer has another such callback, or this one has another trainer.
            UnsupportedError: an option of the training that the callback does not support.
        """
        if self._trainer is trainer:
            return
        others = [one for one in trainer.callback_handler.callbacks if isinstance(one, ReshardCallback)]
        if self._trainer is not None or any(one is not self for one in others):
            raise ArgumentError("a trainer has one `ReshardCallback`, which belongs to no other trainer")
        resuming(trainer, self.plan)
        self._trainer = trainer

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Attach this callback to the trainer that is being created."""
        del args, state, control, kwargs
        self.attach(_calling_trainer(self))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check that the trainer resumes by this callback.

        Raises:
            ArgumentError: the callback was added later, without `attach`.
        """
        del args, state, control, kwargs
        if self._trainer is None:
            raise ArgumentError(
                "the callback is not attached: it can neither resume nor save",
                hint="pass it as `Trainer(callbacks=[...])`, or call `callback.attach(trainer)`",
            )


def _calling_trainer(callback: ReshardCallback) -> Trainer:
    """The trainer whose constructor is running: callbacks do not get it as an argument."""
    frame = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer) and any(one is callback for one in owner.callback_handler.callbacks):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    raise ArgumentError(
        "the trainer of the callback is not known", hint="call `callback.attach(trainer)` after `trainer.add_callback`"
    )


def write_model_files(root: str, trainer: Trainer, *, merge: bool = False) -> None:
    """Write the configuration and the tokenizer into the folder `model_files` of a checkpoint root.

    Args:
        root: the checkpoint root.
        trainer: the trainer, on the main process.
        merge: of a model of peft, the configuration is that of the merged model.

    Raises:
        UnsupportedError: `merge` is given, and the adapters cannot be merged.
    """
    folder = str(locate(root) / MODEL_FILES)
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    if merge:
        model = merge_of(model).model
    if getattr(model, "config", None) is not None:
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        model.generation_config.save_pretrained(folder)
    processing: Any = trainer.processing_class
    if processing is not None:
        processing.save_pretrained(folder)
    adapters = adapters_of(model)
    if adapters:
        make_folders(locate(folder))
        write_names(locate(folder), adapters)


def export(
    root: str | os.PathLike[str], out: str | os.PathLike[str], *, iteration: int | None = None, merge: object = None
) -> ConvertReport | None:
    """Write a checkpoint of a `ReshardCallback` as a folder that `from_pretrained` loads.

    Of a model of peft, the folder has its adapters, for `PeftModel.from_pretrained`.

    Args:
        root: the checkpoint root.
        out: the folder; what an earlier export wrote into it is replaced.
        iteration: which iteration; None: the newest.
        merge: the model of peft, whose active adapters of the checkpoint are merged into the weights; None: they are
            written.

    Returns:
        What was written; None for adapters and merged weights.

    Raises:
        ReshardError: as `reshard.convert`.
    """
    place = locate(root)
    source = place if iteration is None else place / iteration_folder_name(iteration)
    if merge is not None:
        write_merged(str(source), out, merge_of(merge), model_files=str(place / MODEL_FILES))
        return None
    adapters = read_names(place / MODEL_FILES)
    if adapters:
        write_adapters(str(source), out, adapters)
        return None
    files = Files(model_files=str(place / MODEL_FILES))
    names = published_names(model_of(str(place / MODEL_FILES)))
    names = None if names is None else names.reversed()
    with reshard.open(str(source)) as checkpoint:
        check_loads(checkpoint, str(place / MODEL_FILES), names)
    return convert(str(source), out, to="huggingface", part="model", names=names, files=files, overwrite=True)
