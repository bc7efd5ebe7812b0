"""Checks before the first step that the saves of a run can succeed.

A run that cannot save should end when it resumes and not hours later. Nothing here changes the live state, and only
`claim` changes the checkpoint root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from reshard import dtypes
from reshard.commit import attempts, protocol, roots
from reshard.commit.session import session_of
from reshard.errors import ArgumentError, ClaimedError, UnsupportedError
from reshard.formats.state import dump
from reshard.resume.parts import object_name
from reshard.torch.modules import unloaded
from reshard.torch.optimizers import plain
from reshard.torch.staging import on_device
from reshard.values.words import listed, show
from reshard.verbs.save import SaveRequest, save_with

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reshard.torch.modules import Named
    from reshard.torch.saving import Saver
    from reshard.torch.state import Described


def check_has_content(described: Described, root: str) -> None:
    """Check that no tensor is on device `meta` when a run starts without a checkpoint.

    Raises:
        ArgumentError: there are tensors on device `meta`.
    """
    empty = [key for key, tensor in described.model.items() if tensor.is_meta]
    if empty:
        raise ArgumentError(
            f"there is no checkpoint in {root}, and tensors of the model are on device `meta`, without values: "
            f"{listed(map(show, empty))}",
            key=empty[0],
            hint='to start without a checkpoint, call `model.to_empty(device="cuda")` before `resume`, initialise '
            "every module (`reset_parameters()` of torch modules), and create the optimizer after that",
        )


def check_entries(named: Named) -> None:
    """Check that the model loads the entries that its modules add to `state_dict()`, by loading those that it has now.

    Entries of a frozen parameter, such as its scales, do not change: a run that makes the model from the same weights
    has them. Only models with such entries are asked, and get no other entries unless they fail without.

    Raises:
        UnsupportedError: it does not load one, so that a checkpoint could not be resumed.

    Example:
        >>> from reshard.torch.modules import named
        >>> check_entries(named(torch.nn.Linear(2, 2)))
    """
    for name, module in named.extra_state.items():
        if type(module).set_extra_state is torch.nn.Module.set_extra_state:
            raise UnsupportedError(
                f"{show(name or 'the model')}, a {type(module).__name__}, has `get_extra_state`, and not "
                "`set_extra_state`, so a checkpoint could not be resumed",
                key=name,
                hint="give the class both methods, or none",
            )
    frozen = tuple(f"{key}." for key, one in named.tensors.items() if _is_frozen(named, key, one))
    for own in named.own:
        names = [name for name, key in own.key_of.items() if not key.startswith(frozen)]
        if not names:
            continue
        given = {name: {**named.tensors, **named.own_values}[key] for name, key in own.key_of.items()}
        left, error = unloaded(own.root, given)
        if error is not None:
            left, error = unloaded(own.root, own.root.state_dict())
        wrong = names if error is not None else [name for name in names if name in left]
        if wrong:
            why = "does not load" if error is None else f"cannot load ({error})"
            keys = listed([show(own.key_of[name]) for name in wrong])
            raise UnsupportedError(
                f"{keys}: `state_dict()` of {type(own.root).__name__} has "
                f"what its `load_state_dict()` {why}, so a checkpoint could not be resumed",
                key=own.key_of[wrong[0]],
                hint="load it in `_load_from_state_dict` of the module or in a hook of "
                "`register_load_state_dict_pre_hook`, or leave it out of `state_dict()`",
            )


def _is_frozen(named: Named, key: str, tensor: torch.Tensor) -> bool:
    return key not in named.buffers and not tensor.requires_grad


def check_state(saver: Saver, described: Described) -> dict[str, Any]:
    """The state that would be saved besides tensors, if all of it can be saved.

    Raises:
        UnsupportedError: the model has an entry that it does not load.
        ArgumentError: an object has state that cannot be saved; the message has the caller's name of the object.
    """
    run = saver.run
    check_entries(described.live.named)
    for name, value in described.extra.get("objects", {}).items():
        _check_one(value, object_name(name))
    for name, one in run.per_rank.items():
        _check_one(plain(one.state_dict()), object_name(name))
    if run.sampler is not None:
        _check_one(plain(run.sampler.state_dict()), "sampler")
    extra = saver.beside_tensors(described, run.last, interrupted=False)
    if run.record is not None:
        _check_one(run.record, "environment")
    run.record = None  # recorded again at the first save: the device may not be in use yet
    return extra


def _check_one(state: object, name: str) -> None:
    try:
        dump(state, "state")
    except ArgumentError as error:
        raise ArgumentError(f"`{name}` has state that cannot be saved: {error.message}", hint=error.hint) from None


def dry_run(
    saver: Saver,
    described: Described,
    extra: Mapping[str, Any],
    step: int,
    *,
    blocking: bool = True,
    ready: Callable[[], object] | None = None,
) -> None:
    """Do what a save does before it writes, all ranks collectively, without the contents of tensors.

    Args:
        saver: the saver of the run.
        described: the state of the trainer.
        extra: the state besides tensors.
        step: the iteration that would be saved.
        blocking: False: memory for the copies of a save in the background is allocated by a thread. The same on all
            ranks.
        ready: of a rank whose copies are made elsewhere: it needs no such memory.

    Raises:
        ReshardError: as `reshard.save`.
    """
    if saver.has_rank_folders and described.reason is not None:
        raise UnsupportedError(
            f"Checkpoint 1.0 cannot describe how the tensors are partitioned: {described.reason}",
            hint='save with `format="checkpoint2"`',
        )
    if saver.checkpoint1 is not None and saver.checkpoint1.only_save_strategy and saver.group.world_size == 1:
        raise ArgumentError("`only_save_strategy` writes how tensors are cut over ranks, and there is one rank")
    saving = described.saving({name: _placeholder(tensor) for name, tensor in described.to_save().items()})
    request = SaveRequest(
        saver.root,
        step,
        **saving,
        common=saver.common(step),
        extra=extra,
        timeout=saver.timeout,
        dry_run=True,
        blocking=blocking,
        ready=ready,
    )
    save_with(request, saver.options_of(described, saving, rollback=False), saver.group, saver.observers)


def reserve(saver: Saver, step: int) -> None:
    """Check what a save in the background would write, and let a thread allocate the memory for its copies.

    Once the first step has made the state of the optimizer, its size is known. Without this the first save would wait
    for the system, which clears new memory, and on some virtual machines fetches it from the host. All ranks call this
    and check together; a rank whose tensors are copied into pinned memory reserves nothing.

    Args:
        saver: the saver of the run.
        step: the iteration that would be saved.

    Raises:
        ReshardError: as `reshard.save`.
    """
    described = saver.described()
    extra = saver.beside_tensors(described, step, interrupted=False)
    is_pinned = on_device(described.to_save())
    dry_run(saver, described, extra, step, blocking=False, ready=_nothing if is_pinned else None)


def _nothing() -> None:
    """What `ready` does where nothing is copied."""


def _placeholder(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same dtype and shape with the memory of one element; a tensor that cannot be saved, itself."""
    try:
        dtypes.parse_dtype(tensor.dtype)
    except UnsupportedError:
        return tensor
    if tensor.layout != torch.strided or hasattr(tensor, "to_local"):
        return tensor
    return torch.empty((1,) * tensor.dim(), dtype=tensor.dtype, device="cpu").expand(tensor.shape)


def claim(saver: Saver, owner: object, *, step: int, is_below: bool, takeover: bool) -> None:
    """Create the checkpoint root and claim it, as the first save would.

    Args:
        saver: of the run, on rank 0.
        owner: who saves; no other object of this process may save into the root.
        step: the first iteration that will be saved, as far as that is known.
        is_below: whether the run is meant to be below what the root holds.
        takeover: overtake another process that has claimed the root and is alive.

    Raises:
        ArgumentError: the root holds newer iterations, of another run.
        ClaimedError: another process writes into the root, or another object of this one.
        StorageError, DestinationExistsError: the root cannot be written.
    """
    root = saver.root
    error = protocol.obstacle(root)
    if error is not None and not (takeover and isinstance(error, ClaimedError)):
        raise error
    folder_mode = 0o700 if saver.options.commit.private else 0o777
    protocol.claim_root(root, takeover=takeover, durable=saver.options.commit.durable, folder_mode=folder_mode)
    session = session_of(root)
    session.own(owner)
    if not saver.has_rank_folders and not is_below and session.resumed is None:
        attempts.check_above_tracker(root, step, roots.resolve_candidates(root).tracker)
