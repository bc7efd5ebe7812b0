"""Resuming: the newest undamaged iteration, and the parts of it that Lightning restores one after the other.

Lightning loads a checkpoint before or after it sets up the strategy, and restores model, callbacks, loops and
optimizers in turn. All tensors are read at once, so that a damaged one is noticed while another iteration can still be
chosen. The tensors of the optimizers are kept until the optimizers exist.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from reshard.collective import Collective
from reshard.errors import MismatchError
from reshard.events import Observers
from reshard.group import resolve, session
from reshard.lightning.data import position_of
from reshard.torch.loading import read_for
from reshard.torch.restore import apply
from reshard.torch.state import describe
from reshard.torch.tensors import from_tensor
from reshard.verbs.load import Wanted, load_with, resumed
from reshard.words import show

if TYPE_CHECKING:
    import numpy as np

    from reshard.checkpoint import Checkpoint
    from reshard.events import OnEvent
    from reshard.options import VerifyMode
    from reshard.resume import ResumeDecision
    from reshard.torch.loading import Read

_log = logging.getLogger("reshard")


@dataclass(eq=False)
class Resumed:
    """A loaded iteration.

    Attributes:
        decision: which iteration was chosen, and why.
        checkpoint: Lightning's checkpoint, with the loaded model.
        saved: the extra state of the iteration.
        arrays: this rank's arrays of the optimizers.
        live: the tensors of the model, if the checkpoint has others in their places, such as averaged ones.
    """

    decision: ResumeDecision
    checkpoint: dict[str, Any]
    saved: dict[str, Any]
    arrays: dict[str, np.ndarray]
    live: dict[str, Any]

    @property
    def is_end_of_epoch(self) -> bool:
        """Whether it was saved at the end of an epoch."""
        return bool(self.saved["lightning"]["is_end_of_epoch"])

    def restore_optimizers(self, trainer: Any, *, timeout: float) -> None:
        """Restore the optimizers, and what follows the restored schedulers and loops.

        Args:
            trainer: the Trainer.
            timeout: seconds that ranks wait for each other.

        Raises:
            MismatchError: the optimizers differ from the saved ones; or a callback that saved other weights in the
                places of those of the model is missing, so that these were not restored.
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
        described = describe(trainer.strategy.model, trainer.optimizers, compare=False, timeout=timeout)
        strict = trainer.lightning_module.strict_loading
        live = {key: from_tensor(tensor.detach().cpu())[0] for key, tensor in described.model.items()}

        def restore() -> None:
            apply(
                described,
                {**self.arrays, **live},
                self.saved.get("trainer"),
                rank_local=self.saved.get("rank_local"),
                strict=strict,
            )

        Collective(session(resolve(None), "resume"), timeout).each(restore)
        self.arrays = {}
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
            position.resume(loader, state)


def resume(
    trainer: Any, path: Any, *, version: str, verify: VerifyMode, timeout: float, on_event: OnEvent | None = None
) -> Resumed:
    """Load the newest undamaged iteration on all ranks, and restore the model.

    Args:
        trainer: the Trainer; its strategy is set up or not.
        path: a checkpoint root, or one of its iteration folders.
        version: the version of Lightning.
        verify: as `Verify.on_load`.
        timeout: seconds that ranks wait for each other.
        on_event: called with the events of the resume.

    Raises:
        MismatchError: the model differs; the iteration was not saved by this callback; or it was saved within an epoch
            by another number of ranks.
        ReshardError: as `reshard.load`.
    """
    members, started = resolve(None), time.monotonic()
    observers = Observers.of(on_event, members.rank)
    is_fit = trainer.state.fn.value == "fit"
    module, model = trainer.lightning_module, trainer.strategy.model
    is_set_up = bool(trainer.strategy.restore_checkpoint_after_setup)
    described = describe(model, compare=False, timeout=timeout)
    keys: set[str] = set()

    def read(checkpoint: Checkpoint, _decision: ResumeDecision) -> Read:
        keys.clear()
        keys.update(checkpoint.keys("model"))
        return read_for(
            described,
            checkpoint,
            members.rank,
            part="all" if is_fit else "model",
            verify="touched" if verify == "full" else verify,
        )

    wanted = Wanted(root=path)
    decision, found = load_with(read, wanted, scrub=verify == "full", timeout=timeout, observers=observers)
    assert found is not None  # without `allow_fresh`
    for reason in decision.reasons:
        (_log.warning if members.rank == 0 else _log.info)("resume: %s", reason)
    saved = found.extra

    def restore() -> None:
        if is_fit:
            _check(saved, str(decision.path), found.world_size, members.world_size)
        model_arrays = {key: array for key, array in found.arrays.items() if key in keys}
        apply(
            described,
            model_arrays,
            saved.get("trainer"),
            rank_local=saved.get("rank_local"),
            strict=module.strict_loading,
            # Before the setup parameters do not have the dtype of the precision plugin.
            cast=not is_set_up,
        )

    Collective(session(members, "resume"), timeout).each(restore)
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
    _log.info("resumed from %s", decision.path)
    resumed(observers, decision, started)
    arrays = {key: one for key, one in found.arrays.items() if key not in keys}
    return Resumed(decision, checkpoint, saved, arrays, live if is_fit and weights["replaced"] else {})


def _check(saved: dict[str, Any], path: str, saved_by: int | None, world_size: int) -> None:
    """Check that the state of a Trainer was saved, and can be used on this number of ranks."""
    if "lightning" not in saved:
        raise MismatchError(
            f"{path} has no state of a Trainer of Lightning",
            path=path,
            hint="load its weights with `reshard.torch.Checkpointer` or `reshard.load` before `trainer.fit`",
        )
    if saved_by != world_size and not saved["lightning"]["is_end_of_epoch"]:
        raise MismatchError(
            f"{path} was saved within an epoch by {saved_by} ranks, and this run has {world_size}: the position in the "
            "data belongs to the saved number of ranks",
            path=path,
            hint="resume on the same number of ranks, or from an iteration that was saved at the end of an epoch",
        )
