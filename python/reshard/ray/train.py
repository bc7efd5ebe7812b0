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
nothing is copied. Ray alone removes iterations, as its `CheckpointConfig` says; in a bucket it must keep all of them.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Any, Self

from reshard.commit import manifest
from reshard.commit.roots import iteration_folder_name
from reshard.errors import ArgumentError, UnsupportedError
from reshard.options import Commit
from reshard.storage.location import locate
from reshard.torch import Checkpointer as InTorch
from reshard.values.words import show
from reshard.verbs.save import PendingSave

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.config import ConfigLike
    from reshard.resume import ResumeDecision
    from reshard.verbs.save import SaveReport

__all__ = ["Checkpointer"]

_FOLDER = "checkpoints"
_SCHEMES = {"local": "", "s3": "s3://"}
"""By the name that pyarrow has for a file system, how the paths in it begin here."""


class Checkpointer(InTorch):
    """A `reshard.torch.Checkpointer` for the training function of Ray Train. Each save is reported to Ray.

    Its root is the folder `checkpoints` in that of the run, in the `storage_path` of `RunConfig`: a folder that all
    hosts share, or one of an S3 bucket. A worker that dies, with all others, is started again by Ray as `FailureConfig`
    says, and `resume` goes on from the newest undamaged iteration, on as many workers or on others.

    `step` and `save` call `ray.train.report` on all ranks, with the metrics and the loss of the step, and with the
    iteration as a `ray.train.Checkpoint`, which `reshard.open`, `reshard.load` and `init_from` take by its `path`. A
    save in the background is reported when it is published. If it fails, it ends the attempt, as an upload of Ray
    does. `resume` reports an iteration that was published when the workers died, before Ray knew of it.

    Args:
        options: those of `reshard.torch.Checkpointer`, without `root`, `keep` and `retention`: Ray removes iterations,
            as `CheckpointConfig(num_to_keep=..., checkpoint_score_attribute=...)` says. In a bucket it has to keep all:
            Ray would remove objects of iterations that the log of the root still lists.

    Raises:
        ArgumentError: as `reshard.torch.Checkpointer`; one of the options that are left out is given; this is not a
            training function of Ray Train; `num_to_keep` is given, and the storage is a bucket.
        UnsupportedError: an older Ray; the storage is neither a folder nor a bucket of S3; in a bucket, a Ray that does
            not tell whether `num_to_keep` is given.

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
        scheme = _SCHEMES.get(self._file_system.type_name)
        if scheme is None:
            raise UnsupportedError(
                f"the storage of the run is a file system of the kind {show(self._file_system.type_name)}",
                hint='`storage_path` is a folder that all hosts share, or "s3://BUCKET/FOLDER"',
            )
        if scheme:
            _check_keeps_all(scheme + self._folder)
        # Ray calls the training function in a thread, in which signals cannot be handled.
        super().__init__(scheme + self._folder, **{"signals": (), "keep": None} | options)

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
            ReshardError: as there.
        """
        decision = super().resume(**objects)
        path = None if decision.path is None else locate(decision.path)
        if path is None or path.parent != self._root:  # another root: that of `init_from`, or the copy in a bucket
            return decision

        def unknown() -> dict[str, Any] | None:
            """On rank 0, the metrics of an iteration that Ray does not know."""
            if self._group.rank:
                return None
            mode = self._train.CheckpointConsistencyMode.COMMITTED
            known = self._train.get_all_reported_checkpoints(consistency_mode=mode)
            self._reported = {posixpath.basename(one.checkpoint.path) for one in known}
            return None if path.name in self._reported else dict(manifest.read(path).metrics)

        metrics = self._together(unknown)[0]
        if metrics is not None:
            self._report(metrics, self._checkpoint(path.name))
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
            ReshardError: as there.
        """
        saved = self._step(step, loss, metrics, save=save)
        if saved is not None:
            self._report_saved(saved, step)

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
        saved = super().save(step, blocking=blocking)
        self._report_saved(saved, self._running().run.saved)
        return saved

    def _report_saved(self, saved: SaveReport | PendingSave[SaveReport], step: int) -> None:
        run, name = self._running().run, iteration_folder_name(step)
        metrics = run.metrics if run.loss is None else {**run.metrics, "loss": run.loss}
        if self._group.rank or name in self._reported:  # saved again, because it was damaged: Ray has it
            self._report(metrics)
        elif not isinstance(saved, PendingSave):
            self._report(metrics, self._checkpoint(locate(saved.path).name))
        else:
            pending = saved

            def published(_: object, __: str) -> Any:
                return self._checkpoint(locate(pending.result().path).name)

            mode = self._train.CheckpointUploadMode.ASYNC
            self._report(metrics, self._checkpoint(name), mode, checkpoint_upload_fn=published)

    def _report(self, metrics: Mapping[str, Any], checkpoint: Any = None, mode: Any = None, **how: Any) -> None:
        """Call `ray.train.report`, which all ranks do, without a copy and without the removal of what is reported."""
        self._train.report(
            dict(metrics),
            checkpoint=checkpoint,
            checkpoint_upload_mode=mode or self._train.CheckpointUploadMode.NO_UPLOAD,
            delete_local_checkpoint_after_upload=False,
            **how,
        )

    def _checkpoint(self, name: str) -> Any:
        return self._train.Checkpoint(posixpath.join(self._folder, name), self._file_system)


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


def _check_keeps_all(root: str) -> None:
    """Refuse a run in a bucket of which Ray removes checkpoints: the log of the root would list what is gone."""
    try:
        from ray.train.v2._internal.execution.context import get_train_context  # noqa: PLC0415  nothing public tells it

        kept = get_train_context().train_run_context.run_config.checkpoint_config.num_to_keep
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"this Ray Train does not tell whether it removes checkpoints in {show(root)}: {error}",
            hint="use Ray 2.60, or a `storage_path` that is a folder",
        ) from None
    if kept is not None:
        raise ArgumentError(
            f"`num_to_keep` is {kept}, and the storage of the run is a bucket: Ray would remove objects of iterations "
            f"that the log of {show(root)} still lists",
            hint="leave `num_to_keep` out; when the run has ended, `reshard prune` removes iterations. Or use a "
            "`storage_path` that is a folder",
        )
