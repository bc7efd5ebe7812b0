"""A `checkpoint-<N>` of Trainer from which a run with a `ReshardCallback` goes on.

Trainer itself restores it: model, optimizer, scheduler, random states, counters and the position in the data. This
module decides whether it is used, and refuses one from which not all of it comes over. Trainer would go on without it.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from reshard.commit import roots
from reshard.documents.strict_json import read_json
from reshard.errors import ArgumentError, UnsupportedError
from reshard.formats.trainer_run import names
from reshard.ranks.collective import Collective
from reshard.ranks.group import log_of_all, resolve, session
from reshard.storage.location import locate
from reshard.values.words import listed, show

if TYPE_CHECKING:
    from reshard.options import Resuming
    from reshard.storage.location import Location

_TIMEOUT_S = 1800.0
_MAX_STATE_BYTES = 64 << 20


def taken_from(path: str | os.PathLike[str], trainer: Any, root: str, resuming: Resuming) -> str | None:
    """The checkpoint of Trainer from which a run goes on; None: it goes on from its root.

    Args:
        path: `resume_from_checkpoint` of Trainer.
        trainer: the trainer.
        root: the checkpoint root of the callback.
        resuming: the arguments of the callback.

    Raises:
        ArgumentError: the path is neither the root nor such a checkpoint, or the callback starts from something else.
        UnsupportedError: something of it cannot come over.
        StorageError, DamagedFileError: it cannot be read.
    """
    folder, own = locate(path), locate(root)
    if folder.resolved() == own.resolved():
        return None
    members = resolve(None)

    def is_used() -> bool:
        if roots.holds_saves(own):
            return False
        _check(folder, trainer, root, resuming)
        return True

    if Collective(session(members, "checkpoint of Trainer"), _TIMEOUT_S).first(is_used, bool):
        return os.fspath(path)
    log_of_all(
        members.rank,
        "resume: %s has checkpoints of this run, which goes on from there and not from %s",
        root,
        os.fspath(path),
        level=logging.INFO,
    )
    return None


def is_of_deepspeed(path: str | os.PathLike[str] | None) -> bool:
    """Whether DeepSpeed saved the weights and the optimizer of a checkpoint of Trainer, and has to load them.

    Args:
        path: the checkpoint; None: there is none.
    """
    return path is not None and names.holds_deepspeed(locate(path).names())


def _check(folder: Location, trainer: Any, root: str, resuming: Resuming) -> None:
    there = set(folder.names()) if folder.is_folder() else set[str]()
    if names.STATE_FILE not in there:
        raise ArgumentError(
            f"`resume_from_checkpoint` is {show(str(folder))}, and the callback resumes from {show(root)}",
            hint="leave it out, or remove the callback; a `checkpoint-<N>` of Trainer with its state can be named, too",
        )
    other = "init_from" if resuming.init_from is not None else 'data="new"' if resuming.data == "new" else None
    if other is not None:
        raise ArgumentError(
            f"the callback has `{other}`, and `resume_from_checkpoint` is {show(str(folder))}: the run starts from one "
            "of them",
            hint="leave one of them out",
        )
    reason = _missing(there, trainer) or _differs(folder, trainer)
    if reason is not None:
        raise UnsupportedError(
            f"{show(str(folder))} does not come over: {reason}",
            path=str(folder),
            hint="`init_from` of the callback starts a run at step 0 from its weights",
        )


def _missing(there: set[str], trainer: Any) -> str | None:
    """What Trainer would leave out without an error."""
    is_sharded = trainer.is_fsdp_enabled and any(name.startswith("optimizer") for name in there)
    is_deepspeed = names.holds_deepspeed(there)
    if names.OPTIMIZER_FILE not in there and not is_sharded and not is_deepspeed:
        return f"it has no {names.OPTIMIZER_FILE} with the state of the optimizer"
    if names.SCHEDULER_FILE not in there and is_deepspeed:
        return f"it has no {names.SCHEDULER_FILE}: its scheduler is one of DeepSpeed"
    if names.SCHEDULER_FILE not in there:
        return f"it has no {names.SCHEDULER_FILE} with the state of the scheduler"
    n_ranks = trainer.args.world_size
    wanted = ["rng_state.pth"] if n_ranks == 1 else [f"rng_state_{rank}.pth" for rank in range(n_ranks)]
    found = sorted(name for name in there if name.startswith("rng_state"))
    if sorted(wanted) != found:
        are = listed(map(show, found), 3) if found else "none"
        return f"its random states are {are}, and those of {n_ranks} ranks are {listed(map(show, wanted), 3)}"
    return None


def _differs(folder: Location, trainer: Any) -> str | None:
    """What of the training is another one than that of the checkpoint."""
    state = read_json(folder / names.STATE_FILE, _MAX_STATE_BYTES, follow_links=True)
    state = state if isinstance(state, dict) else {}
    step, size = state.get("global_step"), state.get("train_batch_size")
    if type(step) is not int:
        return f"its {names.STATE_FILE} has no number of steps"
    now = trainer._train_batch_size  # noqa: SLF001  what Trainer saves
    if size is not None and size != now:
        return f"it was saved with batches of {size} samples on each rank, and they have {now}: it counts steps"
    if trainer.args.load_best_model_at_end and state.get("best_global_step") is not None:
        return "`load_best_model_at_end` is set, and the best model so far is no save of the callback"
    return None
