"""Packages whose names are imported when they are used: importing all modules behind them takes long."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def exports(package: str, names_of: Mapping[str, Sequence[str]]) -> tuple[list[str], Callable[[str], object]]:
    """The `__all__` and the `__getattr__` of a package.

    Args:
        package: its name.
        names_of: the names that it exports, by the module that defines them.

    Example:
        >>> names, get = exports("reshard.lazy", {"reshard.values.words": ["listed", "show"]})
        >>> names, get("show")("a")
        (['listed', 'show'], '`a`')
    """
    module_of = {name: module for module, names in names_of.items() for name in names}

    def get(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(module_of[name]), name)
        setattr(sys.modules[package], name, value)  # found without this function from now on
        return value

    return sorted(module_of), get
