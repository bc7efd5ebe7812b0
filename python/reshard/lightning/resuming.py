"""Resuming: the newest undamaged iteration, and the parts of it that Lightning restores one after the other.

Lightning loads a checkpoint before or after it sets up the strategy, and restores model, callbacks, loops and
optimizers in turn. All tensors are read at once, so that a damaged one is noticed while another iteration can still be
chosen. The tensors of the optimizers are kept until the optimizers exist.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from reshard.config import Config
from reshard.errors import MismatchError
from reshard.lightning.data import position_of, set_begun_again
from reshard.lightning.progress import end_epoch
from reshard.ranks.collective import Collective
from reshard.ranks.group import log_of_all, resolve, session
from reshard.resume.parts import object_name
from reshard.torch.left_out import common_candidates, compare, digests, local_parts
from reshard.torch.loading import read_for
from reshard.torch.metrics import set_metrics
from reshard.torch.modules import frozen_names
from reshard.torch.optimizers import split_optimizers
from reshard.torch.published import under_names
from reshard.torch.resuming import (
    RestoreOptions,
    check_has_optimizer,
    check_taken,
    initial_state,
    restore_tensors,
    with_modules,
)
from reshard.torch.settings import Started
from reshard.torch.state import describe
from reshard.torch.tensors import from_tensor
from reshard.values.argument_types import VerifyMode
from reshard.values.events import Observers
from reshard.values.words import listed, show
from reshard.verbs.load import LoadRequest, load_with, resumed
from reshard.verbs.start import initial, with_init

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from reshard.checkpoint import Checkpoint
    from reshard.formats.left_out import LeftOutTensor
    from reshard.options import InitFrom, Resuming
    from reshard.resume import ResumeDecision
    from reshard.torch.loading import Read
    from reshard.torch.state import Described
    from reshard.values.events import OnEvent


@dataclass(frozen=True)
class How:
    """How a run resumes.

    Attributes:
        given: the arguments of the callback.
        verify: as `Verify.on_load`.
        timeout: seconds that ranks wait for each other.
        on_event: called with the events of the resume.
        leaves_out: whether the saves of the run leave out frozen parameters.
    """

    given: Resuming
    verify: VerifyMode
    timeout: float
    on_event: OnEvent | None
    leaves_out: bool = False

    def restoring(self, *, cast: bool = False, only: Literal["tensors"] | None = None) -> RestoreOptions:
        """The options of `restore_tensors`."""
        given = self.given
        return RestoreOptions(given.strict, cast, None, None, False, given.settings, given.data, only)

    def together(self, work: Callable[[], list[str]]) -> None:
        """Run a function on all ranks, and log the messages that it returns."""
        members = resolve(None)
        messages = Collective(session(members, "resume"), self.timeout).each(work)
        for line in messages[members.rank]:
            log_of_all(members.rank, "resume: %s", line)


@dataclass(frozen=True, eq=False)
class TrainerRun:
    """The objects that a Trainer trains, for `torch.left_out`."""

    trainer: Any

    @property
    def model(self) -> Any:
        """The model, as the strategy wraps it."""
        return self.trainer.strategy.model

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers; none before the strategy is set up."""
        return list(self.trainer.optimizers)


def schedulers_of(trainer: Any) -> dict[str, Any]:
    """The schedulers of a trainer by name."""
    found = [config.scheduler for config in trainer.lr_scheduler_configs]
    return {"scheduler" if len(found) == 1 else f"scheduler.{number}": one for number, one in enumerate(found)}


def optimizers_of(trainer: Any) -> tuple[Any, dict[str, Any]]:
    """The optimizers of a trainer whose state is saved by parameter, and the others by name."""
    return split_optimizers(list(trainer.optimizers))


def started_of(trainer: Any) -> Started:
    """The settings of a trainer before the first step."""
    started = Started.of(optimizers_of(trainer)[0] or (), schedulers_of(trainer))
    started.frozen = frozen_names(trainer.strategy.model)
    return started


def described_run(
    trainer: Any, started: Started | None, *, timeout: float, compare: bool, leave_out: Collection[str] = ()
) -> Described:
    """The model, the optimizers and the schedulers of a trainer, as of `describe`.

    Args:
        trainer: the Trainer; its strategy is set up.
        started: the settings of the run before its first step.
        timeout: seconds that ranks wait for each other.
        compare: raise if state that ranks share differs.
        leave_out: keys of tensors of the model that are not described.
    """
    optimizers, whole = optimizers_of(trainer)
    return describe(
        trainer.strategy.model,
        optimizers,
        objects=schedulers_of(trainer) | whole,
        lifts=False,
        started=started,
        object_name=object_name,
        timeout=timeout,
        compare=compare,
        leave_out=leave_out,
    )


@dataclass(eq=False)
class Resumed:
    """A loaded iteration.

    Attributes:
        decision: which iteration was chosen, and why.
        checkpoint: Lightning's checkpoint, with the loaded model.
        saved: the extra state of the iteration.
        how: how the run resumes.
        found: what was read, with this rank's arrays of the optimizers.
        live: the tensors of the model, if the checkpoint has others in their places, such as averaged ones.
        before: records of the frozen parameters before the iteration was loaded, if saves leave them out.
        compared: records of those that the iteration leaves out.
        base: where these come from; None: the program.
    """

    decision: ResumeDecision
    checkpoint: dict[str, Any]
    saved: dict[str, Any]
    how: How
    found: Read
    live: dict[str, Any]
    before: dict[str, LeftOutTensor] = field(default_factory=dict)
    compared: dict[str, LeftOutTensor] = field(default_factory=dict)
    base: str | None = None

    def compare_left_out(self, trainer: Any) -> None:
        """Compare parameters that the iteration leaves out with those of the run, all ranks collectively.

        Args:
            trainer: the Trainer; its strategy is set up, so that the parameters have their dtypes.

        Raises:
            MismatchError: the run has other values.
        """
        if self.found.left_out is None:
            return
        self.compared, self.base = compare(
            self.found.left_out,
            described_run(trainer, None, compare=False, timeout=self.how.timeout),
            TrainerRun(trainer),
            start=self.how.given.init_from,
            group=resolve(None),
            timeout=self.how.timeout,
            path=self.found.path,
            cast=False,
            known={},
        )

    @property
    def is_end_of_epoch(self) -> bool:
        """Whether it was saved at the end of an epoch, or the next one begins with other data."""
        return bool(self.saved["lightning"]["is_end_of_epoch"]) or self.how.given.data == "new"

    def restore_optimizers(self, trainer: Any, started: Started) -> None:
        """Restore the optimizers and schedulers, and what follows the restored schedulers and loops.

        Args:
            trainer: the Trainer.
            started: the settings of the run before its first step.

        Raises:
            MismatchError: the optimizers or schedulers differ from the saved ones; or a callback that saved other
                weights in the places of those of the model is missing, so that these were not restored.
        """
        now = trainer.lightning_module.state_dict()
        for key, tensor in self.live.items():
            if not torch.equal(now[key].detach().cpu(), tensor.cpu()):
                raise MismatchError(
                    f"{show(key)} was saved beside other weights that a callback put in its place, such as averaged "
                    "ones, and no callback of this run has restored it",
                    key=key,
                    hint="give the Trainer the callbacks of the run that saved, such as `WeightAveraging`",
                )
        self.live = {}
        described = described_run(trainer, started, compare=False, timeout=self.how.timeout)
        live = {key: from_tensor(tensor.detach().cpu())[0] for key, tensor in described.model.items()}

        found = replace(self.found, arrays={**self.found.arrays, **live}, unexpected=(), notes=())
        self.how.together(lambda: restore_tensors(described, found, self.saved, self.how.restoring()))
        self.found = replace(self.found, arrays={})
        known = self.saved["lightning"]
        for number, metric in known["plateau"]:
            trainer.lightning_module.lr_scheduler_step(trainer.lr_scheduler_configs[number].scheduler, metric)
        trainer._logger_connector._callback_metrics.update(known["metrics"])  # noqa: SLF001  monitors go on from these

    def random_state(self) -> dict[str, Any]:
        """The arguments of `reshard.torch.rng.restore`."""
        members = resolve(None)
        return {
            "state": self.saved["rng"],
            "iteration": self.decision.iteration or 0,
            "rank": members.rank,
            "world_size": members.world_size,
        }

    def set_position(self, loader: Any) -> None:
        """Set the next data loader to its saved position, in the order of the loaders."""
        loaders = self.saved.get("lightning per rank", {}).get("loaders")
        state, position = loaders.pop(0) if loaders else None, position_of(loader)
        if state is not None and position is not None:
            position.resume(state)

    def restore_metrics(self, trainer: Any) -> None:
        """Restore the metrics of the model, which are at what they had counted on this rank.

        Args:
            trainer: the Trainer.

        Raises:
            MismatchError: the model has other metrics.
        """
        states = self.saved.get("lightning per rank", {}).pop("metrics", None)
        if not states or self.how.given.data == "new":
            return
        members = resolve(None)
        if self.found.world_size == members.world_size:
            set_metrics(trainer.lightning_module, states)
            return
        message = "resume: the states of %s belong to %s ranks, and there are %d: they start anew"
        log_of_all(members.rank, message, listed(map(show, states)), self.found.world_size, members.world_size)

    @property
    def logged(self) -> dict[str, list[float]]:
        """What was logged in the epoch before the save, and was not added yet."""
        logged: dict[str, list[float]] = self.saved.get("lightning per rank", {}).get("logged", {})
        return logged if self.how.given.data == "saved" else {}

    def set_begun_again(self, combined: Any) -> None:
        """Set, once, which of the loaders had begun again when the position was saved.

        Args:
            combined: the `CombinedLoader` of the epoch.
        """
        saved = self.saved.get("lightning per rank", {}).pop("begun again", None)
        if saved and self.how.given.data == "saved":
            set_begun_again(combined, saved)


def resume(trainer: Any, path: Any, how: How, *, version: str) -> Resumed:
    """Load the newest undamaged iteration on all ranks, and restore the model.

    Args:
        trainer: the Trainer; its strategy is set up or not.
        path: a checkpoint root, or one of its iteration folders.
        how: how the run resumes.
        version: the version of Lightning.

    Raises:
        MismatchError: the model differs; the iteration was not saved by this callback; or it was saved within an epoch
            by another number of ranks.
        ReshardError: as `reshard.load`.
    """
    members, started = resolve(None), time.monotonic()
    observers, timeout = Observers.of(how.on_event, members.rank), how.timeout
    is_fit = trainer.state.fn.value == "fit"
    module, model = trainer.lightning_module, trainer.strategy.model
    is_set_up = bool(trainer.strategy.restore_checkpoint_after_setup)
    described = describe(model, compare=False, timeout=timeout)
    before: dict[str, LeftOutTensor] = {}
    if how.leaves_out and is_fit:
        known = common_candidates(TrainerRun(trainer), described, members, timeout)
        before = digests(local_parts(described, known), members, timeout)
    keys: set[str] = set()

    def read(checkpoint: Checkpoint, _decision: ResumeDecision) -> Read:
        keys.clear()
        keys.update(checkpoint.keys("model"))
        return read_for(
            described,
            checkpoint,
            members.rank,
            part="all" if is_fit else "model",
            strict=how.given.strict,
            verify="touched" if how.verify == "full" else how.verify,
            leaves_out=True,
        )

    wanted = LoadRequest(root=path)
    decision, found = load_with(read, wanted, scrub=how.verify == "full", timeout=timeout, observers=observers)
    assert found is not None  # without `allow_fresh`
    for reason in decision.reasons:
        log_of_all(members.rank, "resume: %s", reason)
    saved = found.extra

    def restore() -> list[str]:
        if is_fit:
            _check(saved, str(decision.path), found.world_size, members.world_size, is_new=is_new)
        of_model = replace(found, arrays={key: array for key, array in found.arrays.items() if key in keys})
        trainer_state = saved.get("trainer") or {}
        rest = {name: value for name, value in trainer_state.items() if name in ("aliases", "modules", "optimizer")}
        # Before the setup parameters do not have the dtype of the precision plugin.
        return restore_tensors(described, of_model, {**saved, "trainer": rest}, how.restoring(cast=not is_set_up))

    is_new = how.given.data == "new"
    how.together(restore)
    checkpoint = dict(saved.get("lightning", {}).get("checkpoint", {}))
    live: dict[str, Any] = module.state_dict()
    weights = saved.get("lightning", {}).get("weights") or {"replaced": {}, "moved": {}}
    checkpoint["state_dict"] = {**live, **weights["replaced"]}
    if is_fit:  # Lightning overwrites the live ones
        live = {key: tensor.detach().clone() for key, tensor in live.items() if weights["replaced"]}
        checkpoint |= {
            name: {inner: live[key] for inner, key in of_name.items()} for name, of_name in weights["moved"].items()
        }
    checkpoint.setdefault("pytorch-lightning_version", version)
    if is_fit and is_new:
        end_epoch(checkpoint["loops"])
        checkpoint.pop(type(trainer.datamodule).__qualname__, None)
        how.together(lambda: ['the data position is not restored, as `data="new"` says: the next epoch begins'])
    log_of_all(None, "resumed from %s", decision.path, level=logging.INFO)
    resumed(observers, decision, started)
    rest = replace(found, arrays={key: one for key, one in found.arrays.items() if key not in keys})
    live = live if is_fit and weights["replaced"] else {}
    return Resumed(decision, checkpoint, saved, how, rest, live, before)


def start_from(trainer: Any, root: str, init: InitFrom, how: How) -> str:
    """Load other weights into a run that has no checkpoint, before its first step.

    Args:
        trainer: the Trainer; its strategy is set up.
        root: the checkpoint root of the run.
        init: what is loaded.
        how: how the run resumes.

    Returns:
        What was loaded.

    Raises:
        ReshardError: as `Checkpointer.resume` with `init_from`.
    """
    members, started = resolve(None), time.monotonic()
    observers = Observers.of(how.on_event, members.rank)
    if not init.fresh_optimizer:
        check_taken(optimizers_of(trainer)[1])
    described = described_run(trainer, None, compare=False, timeout=how.timeout)

    def read(checkpoint: Checkpoint, _decision: ResumeDecision) -> Read:
        taken = under_names(init, checkpoint, trainer.strategy.model)
        told: list[str] = []
        with initial(checkpoint, taken, told) as opened:
            found = read_for(
                described,
                opened,
                members.rank,
                with_optimizer=not init.fresh_optimizer,
                strict=how.given.strict,
                init=taken,
                verify="touched" if how.verify == "full" else how.verify,
            )
        return replace(found, notes=(*told, *found.notes))

    wanted = LoadRequest(config=with_init(Config(load_path=root, resume=True), init, root))
    decision, found = load_with(read, wanted, scrub=how.verify == "full", timeout=how.timeout, observers=observers)
    assert found is not None  # without `allow_fresh`

    def restore() -> list[str]:
        of_optimizer = {} if init.fresh_optimizer else initial_state(found.extra, init)
        saved, options = with_modules(of_optimizer, found.extra), how.restoring(only="tensors")
        lacking = [] if init.fresh_optimizer else check_has_optimizer(found, saved, options)
        return [*lacking, *restore_tensors(described, found, saved, options)]

    how.together(restore)
    for reason in (*decision.reasons, *([found.restored] if found.restored else [])):
        log_of_all(members.rank, "resume: %s", reason)
    resumed(observers, decision, started)
    return str(decision.init_from)


def _check(saved: dict[str, Any], path: str, saved_by: int | None, world_size: int, *, is_new: bool = False) -> None:
    """Check that the state of a Trainer was saved, and can be used on this number of ranks."""
    if "lightning" not in saved:
        raise MismatchError(
            f"{path} has no state of a Trainer of Lightning",
            path=path,
            hint="load its weights with `reshard.torch.Checkpointer` or `reshard.load` before `trainer.fit`",
        )
    if saved_by != world_size and not saved["lightning"]["is_end_of_epoch"] and not is_new:
        raise MismatchError(
            f"{path} was saved within an epoch by {saved_by} ranks, and this run has {world_size}: the position in the "
            "data belongs to the saved number of ranks",
            path=path,
            hint="resume on the same number of ranks, or from an iteration that was saved at the end of an epoch; or "
            'begin the next epoch with `ReshardCheckpoint(data="new")`',
        )
