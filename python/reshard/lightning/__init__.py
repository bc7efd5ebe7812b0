"""Checkpoints of Lightning's Trainer: `ReshardCheckpoint`, a `ModelCheckpoint` that saves in this package's format.

    from reshard.lightning import ReshardCheckpoint

    trainer = Trainer(callbacks=[ReshardCheckpoint("run", every_n_train_steps=100)])
    trainer.fit(model, ckpt_path="last")

`ReshardCheckpoint` is a class of the package that the program has imported: `lightning` or `pytorch_lightning`. A
program that imports both chooses with `callback_of`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any, Literal

from reshard.errors import UnsupportedError
from reshard.lightning.callback import Saving

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import ModelCheckpoint

    class ReshardCheckpoint(Saving, ModelCheckpoint):  # type: ignore[misc]
        """See `reshard.lightning.callback.Saving`."""


__all__ = ["ReshardCheckpoint", "callback_of"]

_LIBRARIES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


@functools.cache
def callback_of(package: Literal["lightning", "pytorch_lightning"]) -> type[Saving]:
    """The class `ReshardCheckpoint` for one of the two packages.

    Args:
        package: the package whose Trainer the program uses.

    Raises:
        UnsupportedError: the package is not installed, or has another name.

    Example:
        >>> import lightning.pytorch
        >>> issubclass(callback_of("lightning"), lightning.pytorch.callbacks.ModelCheckpoint)
        True
    """
    if package not in _LIBRARIES or importlib.util.find_spec(package) is None:
        raise UnsupportedError(
            f"{package!r} is not an installed package of Lightning",
            hint="`pip install lightning` or `pip install pytorch-lightning`",
        )
    library = importlib.import_module(_LIBRARIES[package])
    bases = (Saving, library.callbacks.ModelCheckpoint)
    return type("ReshardCheckpoint", bases, {"__doc__": Saving.__doc__, "__module__": __name__, "library": library})


def __getattr__(name: str) -> Any:
    if name != "ReshardCheckpoint":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    imported = [package for package, module in _LIBRARIES.items() if module in sys.modules]
    installed = [package for package in _LIBRARIES if importlib.util.find_spec(package) is not None]
    return callback_of((imported or installed or ["lightning"])[0])
