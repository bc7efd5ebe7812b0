"""The leaves of a pytree by name, and what they are: arrays, random keys, plain values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from reshard.errors import ArgumentError, UnsupportedError
from reshard.values.words import show


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by name: the parts of the path with dots between them.

    Raises:
        ArgumentError: two leaves have the same name, or the tree is a single leaf.

    Example:
        >>> named_leaves({"layers": [{"w": 1.0}, {"w": 2.0}], "step": 3})
        {'layers.0.w': 1.0, 'layers.1.w': 2.0, 'step': 3}
    """
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = ".".join(_part(entry) for entry in path)
        if not name:
            raise ArgumentError("the tree is a single leaf without a name", hint='save `{"name": leaf}`')
        if name in named:
            raise ArgumentError(
                f"two leaves of the tree are named {show(name)}", key=name, hint="a key of a dict has a dot in it"
            )
        named[name] = leaf
    return named


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of random keys, as `jax.random.key` makes them.

    Example:
        >>> is_key(jax.random.key(0)), is_key(jnp.zeros(2, jnp.uint32))
        (True, False)
    """
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def is_plain(leaf: Any) -> bool:
    """Whether a leaf is a value of Python that is saved beside the arrays.

    Example:
        >>> is_plain(3), is_plain(jnp.float32(3))
        (True, False)
    """
    return type(leaf) in (bool, int, float, complex, str, bytes)


def check_single_process() -> None:
    """Check that one process controls all devices.

    Raises:
        UnsupportedError: JAX runs in several processes.
    """
    if jax.process_count() > 1:
        raise UnsupportedError(
            f"JAX runs in {jax.process_count()} processes: `reshard.jax` supports one process with all its devices",
            hint="gather the arrays in one process, or use one process with all devices",
        )


def _part(entry: Any) -> str:
    for name in ("key", "idx", "name"):
        if hasattr(entry, name):
            return str(getattr(entry, name))
    return str(entry)
