"""The objects of an `Accelerator` as arguments of `reshard.torch.Checkpointer.resume`.

checkpointer = Checkpointer("run", save_every=500)
start = checkpointer.resume(**prepared(accelerator, loader))
for epoch in range(loader.iteration, n_epochs):
    for batch in loader:
        ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate.utils import DistributedType

from reshard.accelerate.loader import follow
from reshard.errors import ArgumentError, UnsupportedError
from reshard.formats.state import PerRank
from reshard.torch.optimizers import unwrapped
from reshard.values.wrappers import bare

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accelerate import Accelerator


def prepared(accelerator: Accelerator, loader: Any = None) -> dict[str, Any]:
    """What an accelerator has prepared, as arguments of `Checkpointer.resume`: call `resume(**prepared(accelerator))`.

    These are the models, optimizers, schedulers, the gradient scaler, the position of the training data, and the
    objects of `accelerator.register_for_checkpointing`, of which the state of rank 0 is saved. Call it after
    `accelerator.prepare`. `extra` of the result may get further objects.

    If tensors of two models have the same name, such as those of a generator and a discriminator, names begin with
    `model_0.`, `model_1.`, in the order in which the models were prepared.

    After `resume`, the next loop over the loader continues with the batch after the last completed step, and
    `loader.iteration` is its epoch. Call `Checkpointer.step` in the loop, when `accelerator.sync_gradients` is set.

    Args:
        accelerator: the accelerator.
        loader: the prepared loader of the training data. None: the only loader that was prepared, if there is one.

    Returns:
        The arguments `model`, `optimizer`, `scheduler`, `sampler` and `extra`.

    Raises:
        ArgumentError: no model was prepared; several loaders were, and `loader` is None; `loader` was not prepared.
        UnsupportedError: DeepSpeed.

    Example:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> model = torch.nn.Linear(2, 1)
        >>> loader = torch.utils.data.DataLoader(torch.arange(8), batch_size=2, shuffle=True)
        >>> model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters()), loader)
        >>> sorted(prepared(accelerator, loader))
        ['extra', 'model', 'optimizer', 'sampler', 'scheduler']
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise UnsupportedError("DeepSpeed holds the state of the optimizer itself", hint="use FSDP2")
    models, schedulers = accelerator._models, accelerator._schedulers  # noqa: SLF001  as `accelerator.save_state` does
    if not models:
        raise ArgumentError("the accelerator has prepared no model", hint="call `accelerator.prepare` first")
    loaders = accelerator._dataloaders  # noqa: SLF001
    if loader is None and len(loaders) > 1:
        raise ArgumentError(f"the accelerator has prepared {len(loaders)} loaders", hint="pass the one of the training")
    if loader is not None and not any(one is loader for one in loaders):
        raise ArgumentError("`loader` was not prepared", hint="pass the loader that `accelerator.prepare` returned")
    followed = loader if loader is not None else next(iter(loaders), None)
    extra: dict[str, Any] = {f"scheduler {n}": one for n, one in enumerate(schedulers[1:], 1)}
    extra |= {f"registered {n}": one for n, one in enumerate(accelerator._custom_objects)}  # noqa: SLF001
    if accelerator.scaler is not None:
        extra["scaler"] = accelerator.scaler
    return {
        "model": models[0] if len(models) == 1 else _by_names(models),
        "optimizer": [unwrapped(one) for one in accelerator._optimizers] or None,  # noqa: SLF001
        "scheduler": schedulers[0] if schedulers else None,
        "sampler": None if followed is None else PerRank(follow(followed), reshape=_first),
        "extra": extra,
    }


def _by_names(models: Sequence[Any]) -> list[Any] | dict[str, Any]:
    """Several models: a mapping, as they are numbered, if tensors of two have the same name."""
    names = [bare(name) for one in models for name in one.state_dict()]
    return list(models) if len({*names}) == len(names) else {f"model_{n}": one for n, one in enumerate(models)}


def _first(states: list[Any], _rank: int, _world_size: int) -> Any:
    """The position of rank 0, which other numbers of ranks convert."""
    return states[0]
