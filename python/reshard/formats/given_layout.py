"""The layout that a user gives for files of ranks which do not record how their tensors are divided."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.errors import UnsupportedError
from reshard.layout.model import ModelLayout, as_layout
from reshard.layout.strategy import Strategy

if TYPE_CHECKING:
    from reshard.formats.base import OpenOptions


def given_layout(options: OpenOptions, hint: str) -> ModelLayout | None:
    """The layout, which is given as `strategy`, or None.

    Args:
        options: with which a checkpoint is opened.
        hint: what to give, for an error.

    Raises:
        LayoutError, CheckpointNotFoundError: the layout is invalid, or its file is missing.
        UnsupportedError: it is a strategy of MindSpore.

    Example:
        >>> from reshard.formats.base import OpenOptions
        >>> given_layout(OpenOptions(), "") is None
        True
    """
    if options.strategy is None:
        return None
    if isinstance(options.strategy, Strategy):
        raise UnsupportedError("`strategy` is a strategy of MindSpore; a layout is needed here", hint=hint)
    return as_layout(options.strategy)
