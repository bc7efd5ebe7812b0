"""One save of a run: what a checkpoint holds, how it is written, and what happens when a save fails.

`Saver` makes arrays of the live state (`state`), copies those that must not change while a save in the background
writes them (`staging`), adds what resuming needs besides tensors, and calls `reshard.save`. It does not decide when to
save.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from reshard.errors import (
    ArgumentError,
    CoverageError,
    LayoutError,
    MismatchError,
    ReshardError,
    UnsupportedError,
)
from reshard.formats import state
from reshard.formats.left_out import NAME as LEFT_OUT
from reshard.formats.registry import save_format
from reshard.formats.state import per_rank
from reshard.options import Checkpoint1Options
from reshard.ranks.collective import Collective
from reshard.ranks.group import log_error_of_all, session
from reshard.resume.parts import object_name
from reshard.torch import rng
from reshard.torch.exports import SaveExports, export
from reshard.torch.optimizers import plain
from reshard.torch.run import NOT_SAVED
from reshard.torch.sampler import ElasticSampler
from reshard.torch.staging import Staging, on_device
from reshard.torch.state import describe
from reshard.verbs.save import PendingSave, SaveRequest, save_with

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed.device_mesh import DeviceMesh

    from reshard.options import SaveOptions
    from reshard.ranks.group import Group
    from reshard.storage.location import Location
    from reshard.torch.left_out import Frozen
    from reshard.torch.run import Run
    from reshard.torch.staging import Staged
    from reshard.torch.state import Described
    from reshard.values.events import Observers
    from reshard.verbs.mirror import Copier
    from reshard.verbs.save import SaveReport

_log = logging.getLogger("reshard")

_COPY_GRACE_S = 30.0  # of ranks that wait for rank 0, beyond what it waits for its copies
# Errors in the call or in the tensors would occur at the next save too.
_HOPELESS = (ArgumentError, CoverageError, LayoutError, MismatchError, UnsupportedError)


@dataclass(eq=False)
class Saver:
    """Saves one run.

    Attributes:
        run: what is saved.
        root, group, options: as in `reshard.save`.
        mesh, coordinate, root_seed, timeout: as in `Checkpointer`.
        is_async: whether saves that are due are written in the background.
        overlap: whether parameters and optimizer state are copied while the training continues.
        with_optimizer: whether the state of the optimizer is saved.
        exports: what is made of each save.
        observers: called with the events of each save.
        record: creates the record of the environment; called once, on rank 0.
        max_failures: as in `Interrupts`.
        is_reserved: whether memory for the copies of tensors was reserved.
        frozen: the parameters that are left out; None: all are saved.
        copier: on rank 0, copies saves into the bucket of `mirror`; None on other ranks, or without it.
        has_mirror: whether rank 0 has one.
    """

    run: Run
    root: Location
    group: Group
    options: SaveOptions
    mesh: DeviceMesh | None
    coordinate: Mapping[str, int] | None
    root_seed: int
    timeout: float
    is_async: bool
    overlap: bool
    with_optimizer: bool
    exports: SaveExports
    observers: Observers
    record: Callable[[], dict[str, Any]]
    max_failures: int = 3
    is_reserved: bool = False
    frozen: Frozen | None = None
    copier: Copier | None = None
    has_mirror: bool = False
    _staging: Staging = field(default_factory=Staging)
    _hooks: list[Any] = field(default_factory=list)
    _last: PendingSave[SaveReport] | None = None  # that has succeeded

    def begin(self) -> None:
        """Begin the run: hold the steps of its optimizers, if copies overlap with the training."""
        for one in self.run.optimizers() if self.overlap else ():
            self._hooks.append(one.register_step_pre_hook(lambda *_: self._staging.hold()))

    def save(
        self, step: int, *, blocking: bool, timeout: float | None = None, interrupted: bool = False
    ) -> SaveReport | PendingSave[SaveReport]:
        """Save, all ranks collectively.

        Args:
            step: the iteration.
            blocking: whether to wait until it is published.
            timeout: seconds that ranks wait for each other; None: the attribute `timeout`.
            interrupted: whether the step after it had begun.

        Raises:
            ReshardError: as `reshard.save`.
        """
        run = self.run
        if self.frozen is not None and self.frozen.tensors:
            notes = self.frozen.update(run, self.group, self.timeout if timeout is None else timeout)
            for note in notes if self.group.rank == 0 else ():
                _log.warning("%s", note)
        described = self.described()
        extra = self.beside_tensors(described, step, interrupted=interrupted)
        staged = self._staged(described, blocking=blocking)
        saving = described.saving(None if staged is None else staged.tensors)
        request = SaveRequest(
            self.root,
            step,
            **saving,
            common=self.common(step),
            extra=extra,
            blocking=blocking,
            metrics=run.metrics if run.loss is None else {**run.metrics, "loss": run.loss},
            timeout=self.timeout if timeout is None else timeout,
            ready=None if staged is None else staged.ready,
            after=self._after,
        )
        options = self.options_of(described, saving, rollback=step < run.above)
        if timeout is not None:  # time is short: no iteration is removed now, so this one need not be read back
            options = replace(options, retention=None)
        saved = save_with(request, options, self.group, self.observers)
        assert saved is not None  # it is no dry run
        run.saved, run.saved_at = step, time.monotonic()
        run.above = 0
        run.pending = saved if isinstance(saved, PendingSave) else None
        return saved

    def described(self) -> Described:
        """What a save holds."""
        return describe(
            self.run.model,
            self.run.optimizer if self.with_optimizer else None,
            objects={name: one for name, one in self.run.objects.items() if self._is_saved(name)},
            mesh=self.mesh,
            group=self.group,
            timeout=self.timeout,
            lifts=not self.has_rank_folders,
            object_name=object_name,
            started=self.run.started,
            leave_out=() if self.frozen is None else self.frozen.tensors,
        )

    def save_due(self, step: int) -> SaveReport | PendingSave[SaveReport] | None:
        """Save a step that is due. A temporary failure is logged and does not end the training.

        Returns:
            As `save`; None: it failed.

        Raises:
            ReshardError: the state cannot be saved, or `max_failures` consecutive saves have failed.
        """
        pending = self.run.pending
        try:
            self.wait(self.timeout)
        except (ReshardError, TimeoutError) as error:
            self.failed(error, "the save in the background failed")
        else:
            if pending not in {None, self._last}:  # it is the first call after this one has succeeded
                self._last, self.run.n_failures = pending, 0
        try:
            saved = self.save(step, blocking=not self.is_async)
        except ReshardError as error:
            self.failed(error, f"iteration {step} is not saved")
            return None
        if not self.is_async:
            self.run.n_failures = 0
        return saved

    def failed(self, error: BaseException, what: str) -> None:
        """Count a failed save. Raises its error if later saves would fail too, or too many have failed in a row."""
        self.run.n_failures += 1
        n, most = self.run.n_failures, self.max_failures
        if isinstance(error, _HOPELESS) or n >= most:
            raise error
        log_error_of_all(
            self.group.rank,
            error,
            "%s: %s (failure %d of %d in a row; the training goes on, and failure %d ends it)",
            what,
            error,
            n,
            most,
            most,
        )

    def wait(self, timeout: float | None = None) -> SaveReport | None:
        """Wait for the save in the background, if there is one; as `Checkpointer.wait`."""
        pending = self.run.pending
        if pending is None:
            return None
        try:
            return pending.result(timeout)
        except BaseException as error:
            is_late = isinstance(error, TimeoutError) and not isinstance(error, ReshardError)
            if pending.done() and not is_late:
                self.run.pending = None  # its error is raised once
                self.run.saved = NOT_SAVED
            raise

    def wait_after_error(self, seconds: float) -> None:
        """Wait for the save in the background while it makes progress, then abandon it.

        Other ranks may have ended because of the error of this rank, and the save would wait for them until its
        timeout. It is abandoned when this rank has written nothing for as long as it wrote before, and for `seconds`.

        Raises:
            ReshardError: the save failed.
            TimeoutError: the save was abandoned.
        """
        pending = self.run.pending
        if pending is None:
            return
        progress, moved_at = pending.progress, time.monotonic()
        while True:
            try:
                self.wait(min(0.1, seconds))
            except TimeoutError as error:
                now = time.monotonic()
                if pending.progress != progress:
                    progress, moved_at = pending.progress, now
                elif now - moved_at >= max(seconds, moved_at - self.run.saved_at) or isinstance(error, ReshardError):
                    pending.let_go()
                    raise
            else:
                return

    def finish_copies(self, seconds: float) -> None:
        """Wait for the copies of `mirror` before the process ends, all ranks for rank 0. Raises nothing."""
        if not self.has_mirror:
            return
        copier = self.copier
        try:
            ranks = Collective(session(self.group, "copies"), seconds + _COPY_GRACE_S)
            ranks.each(lambda: None if copier is None else list(copier.close(seconds)))
        except ReshardError as error:
            _log.warning("waiting for copies: %s", error.message)

    def close(self) -> None:
        """Remove the hooks from the optimizers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _after(self, report: SaveReport) -> list[str]:
        """Export a save that has succeeded, and let it be copied. Returns warnings."""
        if self.copier is not None:
            self.copier.saved(report.iteration)
        if self.checkpoint1 is not None and self.checkpoint1.only_save_strategy:
            return []
        return export(
            self.exports,
            report,
            self.run.model,
            root=self.root,
            group=self.group,
            options=self.options,
            timeout=self.timeout,
        )

    def _is_saved(self, name: str) -> bool:
        return self.with_optimizer or name not in self.run.whole_optimizers

    @property
    def has_rank_folders(self) -> bool:
        """Whether each rank saves into its own folder."""
        return save_format(self.options.format).traits.rank_folders

    @property
    def checkpoint1(self) -> Checkpoint1Options | None:
        """The options of Checkpoint 1.0; None: another format is saved."""
        own = self.options.of_format
        return own if isinstance(own, Checkpoint1Options) else None

    def options_of(self, described: Described, saving: Mapping[str, Any], *, rollback: bool) -> SaveOptions:
        """The options of one save: those of Checkpoint 1.0 also follow from the run.

        Args:
            described: the live state.
            saving: the arguments of `reshard.save` that hold tensors.
            rollback: as in `Commit`.
        """
        commit = replace(self.options.commit, rollback=rollback, takeover=False)
        options, sampler = self.checkpoint1, self.run.sampler
        if options is None:
            return replace(self.options, commit=commit)
        if isinstance(sampler, ElasticSampler):
            options = replace(options, steps_per_epoch=sampler.steps_per_epoch)
        if options.save_trainable_params is True:
            live = described.live.named.tensors
            trained = [key for key in saving["model"] if live[key].requires_grad]
            options = replace(options, save_trainable_params=trained)
        return replace(self.options, commit=commit, of_format=options)

    def beside_tensors(self, described: Described, step: int, *, interrupted: bool) -> dict[str, Any]:
        """The state that is saved besides the tensors.

        Args:
            described: the live state.
            step: the iteration.
            interrupted: whether the step after it had begun.
        """
        run, members = self.run, self.group
        extra: dict[str, Any] = {
            "rng": per_rank(
                rng.capture(
                    rank=members.rank,
                    world_size=members.world_size,
                    coordinate=self.coordinate,
                    root_seed=self.root_seed,
                )
            ),
        }
        if run.sampler is not None:
            state_of = plain(run.sampler.state_dict())
            extra["sampler"] = state_of if isinstance(run.sampler, ElasticSampler) else per_rank(state_of)
        if run.per_rank:
            extra["per rank"] = per_rank({name: plain(one.state_dict()) for name, one in run.per_rank.items()})
        by_rank = self.has_rank_folders  # in rank folders, every rank saves the shared state
        if members.rank == 0 or by_rank:
            loss, metrics = run.loss, run.metrics
            if by_rank and members.world_size > 1:
                text, _ = state.dump([loss, metrics])
                loss, metrics = state.load(Collective(session(members, "run"), self.timeout).share(text, str)[0], {})
            extra["trainer"] = described.extra
            extra["run"] = {
                "step": step,
                "root_seed": self.root_seed,
                "loss": loss,
                "metrics": metrics,
                "interrupted": interrupted,
            }
        if members.rank == 0:
            run.record = run.record or self.record()
            extra["environment"] = run.record
            record = None if self.frozen is None else self.frozen.record()
            if record is not None:
                extra[LEFT_OUT] = record.to_value()
        return extra

    def common(self, step: int) -> dict[str, Any]:
        """The counters that are saved."""
        run = self.run
        common: dict[str, Any] = {"step_num": step, "global_step": step}
        if isinstance(run.sampler, ElasticSampler):
            # The epoch of the completed step, from 1.
            if self.checkpoint1 is None or self.checkpoint1.sink_size is None:  # else the counted epochs are data sinks
                common["epoch_num"] = run.sampler.epoch + (run.sampler.consumed > 0)
            common["global_batch_size"] = run.sampler.global_batch_size
        if run.healthy is not None:
            common["ckpt_status"] = 0 if run.healthy else 1
        return common

    def _staged(self, described: Described, *, blocking: bool) -> Staged | None:
        """Copies in progress; None if `reshard.save` makes them, which copies tensors of the host at once."""
        tensors = described.to_save()
        overlaps = self.overlap and not blocking
        if not overlaps and not on_device(tensors):
            return None
        trained = {name for live in described.live.optimizers for name in live.names.values()}
        try:
            return self._staging.stage(
                tensors,
                # Objects may change at any time.
                trained | described.live.states.keys() if overlaps else (),
                reuse=self.run.pending is None or self.run.pending.done(),
            )
        except (RuntimeError, MemoryError) as error:
            # The other ranks are waiting in the save, which sends them the error of this one.
            _log.warning("tensors are copied one by one before the training goes on: %s", error)
            return None
