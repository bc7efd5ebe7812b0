"""Lightning's checkpoint without tensors of the model and the optimizers, as values that `extra` holds."""

from __future__ import annotations

import functools
import logging
from typing import Any

from reshard.errors import ArgumentError, UnsupportedError
from reshard.formats import state as state_format
from reshard.torch.optimizers import plain

_log = logging.getLogger("reshard")

_HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")


def without_tensors(trainer: Any) -> tuple[dict[str, Any], list[str]]:
    """What Lightning saves besides the model and the optimizers, and the keys that `on_save_checkpoint` removed.

    All hooks run. The live model is passed to them, and no copies are gathered.

    Raises:
        UnsupportedError: a hook has changed the tensors of the model that are saved.
    """
    strategy, module = trainer.strategy, trainer.lightning_module
    given = module.state_dict()
    before = dict(given)
    strategy.lightning_module_state_dict = lambda: given
    strategy.optimizer_state = lambda _optimizer: {}
    try:
        checkpoint = dict(trainer._checkpoint_connector.dump_checkpoint(weights_only=False))  # noqa: SLF001
    finally:
        del strategy.lightning_module_state_dict, strategy.optimizer_state
    after = checkpoint.pop("state_dict")
    checkpoint["optimizer_states"] = []
    for key, value in after.items():
        if value is not before.get(key):
            raise UnsupportedError(
                f"a hook `on_save_checkpoint` has replaced or added `{key}` in the `state_dict`, and the live model is "
                "saved",
                key=key,
                hint="hooks may remove keys; add other tensors to the checkpoint under another name",
            )
    checkpoint["loops"] = plain(checkpoint["loops"])
    checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)  # kept for each rank
    return checkpoint, [key for key in before if key not in after]


def as_extra(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint as values that `extra` holds. Hyperparameters of other types are left out, with a warning.

    Example:
        >>> as_extra({"epoch": 3, "hyper_parameters": {"lr": 0.1, "loss": print}})
        {'epoch': 3, 'hyper_parameters': {'lr': 0.1}}
    """
    return {
        key: _hyperparameters(value) if key in _HYPERPARAMETERS else _plain(value) for key, value in checkpoint.items()
    }


def _hyperparameters(values: Any) -> dict[str, Any]:
    kept = {}
    for name, value in dict(values).items():
        one = _plain(value)
        try:
            state_format.dump(one)
        except ArgumentError:
            _warn(f"hyperparameter {name!r} is not saved: its type is {type(value).__name__}")
        else:
            kept[name] = one
    return kept


@functools.cache
def _warn(message: str) -> None:
    """Log a warning once, not at every save."""
    _log.warning(message)


def _plain(value: Any) -> Any:
    """As `plain`, with every mapping as a dict and without functions in it."""
    if isinstance(value, dict) and type(value).__name__ not in {"OrderedDict", "Counter"}:
        return {key: _plain(item) for key, item in value.items() if not callable(item)}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return plain(value, drop_functions=True)
