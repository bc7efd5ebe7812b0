"""Ray Train: a `Checkpointer` in the storage of the run, whose saves are the checkpoints that Ray knows.

    from reshard.ray.train import Checkpointer

    def train(config):
        with Checkpointer(save_every=100) as checkpointer:
            start = checkpointer.resume(model=model, optimizer=optimizer, sampler=sampler).initial_step
            for step in range(start + 1, n_steps + 1):
                ...
                checkpointer.step(step, loss=loss)

    TorchTrainer(train, scaling_config=..., run_config=RunConfig(storage_path="/shared/runs", name="run")).fit()

All ranks write one iteration into `<storage_path>/<name>/checkpoints`, and the checkpoint that Ray gets refers to it:
nothing is copied. Ray alone removes iterations, as its `CheckpointConfig` says.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Any, Self

from reshard.commit import manifest
from reshard.commit.roots import iteration_folder_name
from reshard.errors import ArgumentError, GroupError, UnsupportedError
from reshard.formats.registry import save_format
from reshard.options import Commit
from reshard.storage.location import locate
from reshard.torch import Checkpointer as InTorch
from reshard.values.words import show
from reshard.verbs.save import PendingSave

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.config import ConfigLike
    from reshard.errors import ReshardError
    from reshard.resume import ResumeDecision
    from reshard.storage.location import Location
    from reshard.torch.saving import Saver
    from reshard.verbs.save import SaveReport

__all__ = ["Checkpointer"]

_FOLDER = "checkpoints"


class Checkpointer(InTorch):
    """A `reshard.torch.Checkpointer` for the training function of Ray Train. Each save is reported to Ray.

    Its root is the folder `checkpoints` in that of the run, in the `storage_path` of `RunConfig`: a folder that all
    hosts share. A worker that dies, with all others, is started again by Ray as `FailureConfig` says, and `resume` goes
    on from the newest undamaged iteration, on as many workers or on others.

    `step` and `save` call `ray.train.report` on all ranks, with the metrics and the loss of the step, and with the
    iteration as a `ray.train.Checkpoint`, which `reshard.open`, `reshard.load` and `init_from` take by its `path`. A
    save in the background is reported when it is published. If it fails, it ends the attempt, as an upload of Ray
    does. `resume` reports an iteration that was published when the workers died, before Ray knew of it. An iteration
    that is saved again is reported once: the other time Ray gets the metrics alone, and the call waits for the save.

    Ray takes reports in their order: a program that calls `ray.train.report` itself waits there until a save in the
    background is published. Ray removes only iterations in the root: what `exports` and `hf_every` write beside it, and
    the copies of `mirror`, stay until someone removes them. It removes iterations that `reshard pin` has marked, too.

    Args:
        options: those of `reshard.torch.Checkpointer`, without `root`, `keep` and `retention`: Ray removes iterations,
            as `CheckpointConfig(num_to_keep=..., checkpoint_score_attribute=...)` says.

    Raises:
        ArgumentError: as `reshard.torch.Checkpointer`; one of the options that are left out is given; a `format` with
            rank folders; this is not a training function of Ray Train.
        UnsupportedError: an older Ray; the storage is no folder, as a bucket.

    Example:
        >>> Checkpointer(keep=3)
        Traceback (most recent call last):
        reshard.errors.ArgumentError: `keep` is given, and Ray removes the checkpoints of a run
        hint: `RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=...))` says which stay
    """

    def __init__(self, **options: Any) -> None:
        for name in ("keep", "retention"):
            if options.get(name) is not None:
                raise ArgumentError(
                    f"`{name}` is given, and Ray removes the checkpoints of a run",
                    hint="`RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=...))` says which stay",
                )
        if "root" in options:
            raise ArgumentError(
                "`root` is given, and the saves of a run lie in its storage",
                hint="`RunConfig(storage_path=..., name=...)` says where; leave `root` out",
            )
        if Commit.of(options.get("commit")).rollback:
            raise ArgumentError(
                "`rollback` removes iterations, and Ray removes the checkpoints of a run",
                hint="start a run with another `RunConfig(name=...)`, with `init_from`",
            )
        self._train, storage = _train_and_storage()
        self._file_system = storage.storage_filesystem
        self._folder = posixpath.join(storage.experiment_fs_path, _FOLDER)
        self._reported: set[str] = set()
        if self._file_system.type_name != "local":
            raise UnsupportedError(
                f"the storage of the run is a file system of the kind {show(self._file_system.type_name)}, in which "
                "Ray removes objects while others read them",
                hint='give a folder that all hosts share as `storage_path`, and `mirror="s3://BUCKET/FOLDER"` copies '
                'the saves into a bucket; or save with `reshard.torch.Checkpointer("s3://BUCKET/FOLDER", keep=...)`, '
                "without reports of checkpoints to Ray",
            )
        # Ray calls the training function in a thread, in which signals cannot be handled.
        super().__init__(self._folder, **{"signals": (), "keep": None} | options)
        if save_format(self._options.format).traits.rank_folders:
            raise ArgumentError(
                f"`format` is {show(self._options.format)}, of which an iteration is no folder that Ray can have",
                hint='leave `format` out: it is "checkpoint2"',
            )

    @classmethod
    def from_config(cls, config: ConfigLike, **options: Any) -> Self:  # noqa: ARG003
        """Refused: a configuration says where a run saves and how many checkpoints stay, and both is up to Ray.

        Args:
            config: the configuration.
            options: further arguments.

        Raises:
            UnsupportedError: always.

        Example:
            >>> Checkpointer.from_config("run.yaml")
            Traceback (most recent call last):
            reshard.errors.UnsupportedError: a configuration says where a run saves, and Ray Train decides that
            hint: give the other options, such as `save_every`, to `Checkpointer`, and `init_from` to `resume`
        """
        raise UnsupportedError(
            "a configuration says where a run saves, and Ray Train decides that",
            hint="give the other options, such as `save_every`, to `Checkpointer`, and `init_from` to `resume`",
        )

    def resume(self, **objects: Any) -> ResumeDecision:
        """As `resume` of `reshard.torch.Checkpointer`; an iteration that Ray does not know is reported.

        Args:
            objects: the arguments.

        Returns:
            The resume decision.

        Raises:
            ArgumentError: `allow_fresh` is given, no checkpoint of the run is complete, and Ray knows some of them.
            ReshardError: as there.
        """
        known = self._together(lambda: [] if self._group.rank else sorted(self._known()))[0]
        self._reported = set(known)
        decision = super().resume(**objects)
        goes_on = self._saves_where_it_loads(decision)
        if known and not goes_on:
            self.close()
            raise ArgumentError(
                f"the training would start anew, and Ray knows {len(known)} checkpoints of this run, such as "
                f"{show(known[-1])}",
                path=str(self._root),
                hint="leave `allow_fresh` out and look at them with `reshard verify`, "
                "or start a run with another `RunConfig(name=...)`",
            )
        path = None if decision.path is None else locate(decision.path)
        if not goes_on or path is None or self._is_copy(decision) or path.name in self._reported:
            return decision
        metrics = self._together(lambda: None if self._group.rank else dict(manifest.read(path).metrics))[0]
        self._report(metrics, self._checkpoint(path))
        self._reported.add(path.name)
        return decision

    def step(
        self, step: int, *, loss: object = None, metrics: Mapping[str, Any] | None = None, save: bool = False
    ) -> None:
        """As `step` of `reshard.torch.Checkpointer`; a save is reported to Ray.

        Args:
            step: its number.
            loss: of this step: a number or a tensor of one element.
            metrics: other numbers by name.
            save: save also if no save is due.

        Raises:
            GroupError: the ranks did not meet to save at a time: the attempt ends.
            ReshardError: as there.
        """
        was_due, saved = self._step(step, loss, metrics, save=save)
        if was_due:
            self._report_saved(saved)

    def save(self, step: int | None = None, *, blocking: bool | None = None) -> SaveReport | PendingSave[SaveReport]:
        """As `save` of `reshard.torch.Checkpointer`; the save is reported to Ray.

        Args:
            step: the iteration; None: the step of the last call of `step`.
            blocking: whether to wait until it is published; None: as `async_save`.

        Returns:
            The report, or the save in progress.

        Raises:
            ReshardError: as there.
        """
        self._running()
        try:
            saved = super().save(step, blocking=blocking)
        except GroupError:  # which other ranks need not have met: they wait in the report
            self._report_saved(None)
            raise
        self._report_saved(saved)
        return saved

    def _not_met(self, saver: Saver, error: ReshardError) -> None:  # noqa: ARG002
        """Raise the error: who of the others reports cannot be known, and in a report all ranks wait for each other."""
        raise error

    def _report_saved(self, saved: SaveReport | PendingSave[SaveReport] | None) -> None:
        """Report a save on all ranks, which wait for each other in it.

        Args:
            saved: the save; None: it has failed on this rank, and need not have on others.
        """
        run = self._running().run
        metrics = run.metrics if run.loss is None else {**run.metrics, "loss": run.loss}
        if self._group.rank or saved is None:
            self._report(metrics)
            return
        name = iteration_folder_name(saved.iteration)
        if name in self._reported:
            # Saved again. Ray counts one folder twice if it is reported twice, and then removes it for the second.
            if isinstance(saved, PendingSave):
                saved.result()  # Ray waits only for what it does not know
            if name in self._known():
                self._report(metrics)
                return
        self._reported.add(name)
        if not isinstance(saved, PendingSave):
            self._report(metrics, self._checkpoint(locate(saved.path)))
            return
        pending = saved

        def published(_: object, __: str) -> Any:
            return self._checkpoint(locate(pending.result().path))

        mode = self._train.CheckpointUploadMode.ASYNC
        self._report(metrics, self._checkpoint(self._root / name), mode, checkpoint_upload_fn=published)

    def _known(self) -> set[str]:
        """The iterations of this root that Ray knows, once it has got all reports."""
        mode = self._train.CheckpointConsistencyMode.COMMITTED
        paths = [one.checkpoint.path for one in self._train.get_all_reported_checkpoints(consistency_mode=mode)]
        return {posixpath.basename(path) for path in paths if posixpath.dirname(path) == self._folder}

    def _report(self, metrics: Mapping[str, Any], checkpoint: Any = None, mode: Any = None, **how: Any) -> None:
        """Call `ray.train.report`, which all ranks do, without a copy and without the removal of what is reported."""
        self._train.report(
            dict(metrics),
            checkpoint=checkpoint,
            checkpoint_upload_mode=mode or self._train.CheckpointUploadMode.NO_UPLOAD,
            delete_local_checkpoint_after_upload=False,
            **how,
        )

    def _checkpoint(self, folder: Location) -> Any:
        """What Ray gets of an iteration."""
        if folder.parent != self._root:
            raise UnsupportedError(
                f"{show(str(folder))} is no iteration of {show(str(self._root))}, and Ray knows only these",
                path=str(folder),
            )
        return self._train.Checkpoint(posixpath.join(self._folder, folder.name), self._file_system)


def _train_and_storage() -> tuple[Any, Any]:
    """The module `ray.train`, and the storage of the run in whose training function this is."""
    try:
        from ray import train  # noqa: PLC0415  of an extra
    except ImportError as error:
        raise UnsupportedError(
            f"Ray Train cannot be imported: {error}", hint="pip install 'reshard[ray]' 'ray[train]'"
        ) from None
    if not hasattr(train, "CheckpointUploadMode") or not hasattr(train, "get_all_reported_checkpoints"):
        raise UnsupportedError(
            "this Ray Train copies each checkpoint, and has no other way",
            hint="use Ray 2.60 or newer, without RAY_TRAIN_V2_ENABLED=0",
        )
    try:
        return train, train.get_context().get_storage()
    except RuntimeError as error:
        raise ArgumentError(
            f"this is not the training function of a run of Ray Train: {error}",
            hint="make it in the function that a `TorchTrainer` gets; elsewhere use `reshard.torch.Checkpointer`",
        ) from None
