"""Lightning's checkpoint without tensors of the model and the optimizers, as values that `extra` holds."""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from reshard.errors import ArgumentError, UnsupportedError
from reshard.formats import state as state_format
from reshard.ranks.group import log_of_all
from reshard.torch.optimizers import plain

_log = logging.getLogger("reshard")

_HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
_CODE = (FunctionType, BuiltinFunctionType, MethodType, functools.partial, type)  # what has no state


@dataclass(frozen=True, eq=False)
class Weights:
    """Which tensors hooks have put into the `state_dict` of a checkpoint.

    Attributes:
        removed: keys that they removed; these tensors of the model are not saved.
        replaced: tensors in the places of those of the model, by key, such as averaged ones.
        moved: entries of the checkpoint that hold the tensors of the model then: of each the key of each name in it.
    """

    removed: list[str]
    replaced: dict[str, Any]
    moved: dict[str, dict[str, str]]


def without_tensors(trainer: Any) -> tuple[dict[str, Any], Weights]:
    """What Lightning saves besides model, optimizers and schedulers, and what hooks made of the model's `state_dict`.

    All hooks run. The live model is passed to them, and no copies are gathered.

    Raises:
        UnsupportedError: a hook has changed the tensors of the model that are saved, and keeps them nowhere.
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
    weights = _weights(before, checkpoint)
    checkpoint["optimizer_states"] = checkpoint["lr_schedulers"] = []
    checkpoint["loops"] = plain(checkpoint["loops"])
    checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)  # kept for each rank
    return checkpoint, weights


def check_hooks(trainer: Any) -> None:
    """Call the hooks `on_save_checkpoint` as a save does, to refuse early what a save would refuse.

    Raises:
        UnsupportedError: as `without_tensors`; or a callback has state that cannot be saved.
    """
    module = trainer.lightning_module
    given = module.state_dict()
    before, checkpoint = dict(given), {"state_dict": given}
    try:
        for callback in trainer.callbacks:
            callback.on_save_checkpoint(trainer, module, checkpoint)
        module.on_save_checkpoint(checkpoint)
        states = {f"the state of the callback {one.state_key}": one.state_dict() for one in trainer.callbacks}
    except Exception as error:  # noqa: BLE001  a hook may need what a run has only later
        _log.debug("a hook `on_save_checkpoint` does not work before the first step: %r", error)
        return
    for name, value in states.items():
        try:
            state_format.dump(_plain(value), name)
        except ArgumentError as error:
            raise UnsupportedError(error.message, hint=error.hint) from None
    for value in _weights(before, checkpoint).replaced.values():
        plain(value)


def _weights(before: Mapping[str, Any], checkpoint: dict[str, Any]) -> Weights:
    """What hooks have made of the `state_dict` of a checkpoint; it is taken out, as are the tensors of the model."""
    after = checkpoint.pop("state_dict")
    removed = [key for key in before if key not in after]
    replaced = {key: value for key, value in after.items() if value is not before.get(key)}
    if not replaced:
        return Weights(removed, {}, {})
    key_of = {id(value): key for key, value in before.items()}
    moved = {
        name: {inner: key_of[id(one)] for inner, one in value.items()}
        for name, value in checkpoint.items()
        if isinstance(value, Mapping) and value and all(id(one) in key_of for one in value.values())
    }
    lost = before.keys() - {key for of_name in moved.values() for key in of_name.values()}
    changed = next((key for key in replaced if key in lost or key not in before), None)
    if changed is not None:
        raise UnsupportedError(
            f"a hook `on_save_checkpoint` has replaced or added `{changed}` in the `state_dict`, and the live model is "
            "saved",
            key=changed,
            hint="hooks may remove keys, or move the whole `state_dict` to another name, as `WeightAveraging` does; "
            "add other tensors to the checkpoint under another name",
        )
    for name in moved:
        del checkpoint[name]
    return Weights([], replaced, moved)


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
    log_of_all(None, message)


def _plain(value: Any) -> Any:
    """As `plain`, with every mapping as a dict and without functions in it. Other objects are refused by a save."""
    if isinstance(value, dict) and type(value).__name__ != "Counter":
        kept = ((key, _plain(item)) for key, item in value.items() if not isinstance(item, _CODE))
        return OrderedDict(kept) if type(value) is OrderedDict else dict(kept)
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return plain(value)
