"""`reshard.jax.save`: the arrays of a pytree, every shard once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from reshard.errors import ArgumentError, UnsupportedError
from reshard.jax.devices import in_threads, on_devices
from reshard.jax.tree import check_single_process, is_key, is_plain, named_leaves
from reshard.values.words import show
from reshard.verbs.save import save as save_iteration

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from reshard.ranks.group import Group
    from reshard.verbs.save import SaveReport

VALUES = "jax"
"""The name in `extra` of the plain values and the kinds of random keys."""

_OPTIONS = {"common", "files", "commit", "keep", "metrics", "on_event", "retention", "timeout", "verify"}


def save(
    root: str | os.PathLike[str], step: int, tree: Any, *, extra: Mapping[str, object] | None = None, **options: Any
) -> SaveReport:
    """Save a pytree of arrays as an iteration of a checkpoint root.

    A leaf is named by its path: `params.layers.0.w`. The devices of a mesh save as ranks: every shard is written once,
    replicas are compared, and the layout is recorded with the axes of the mesh, so that all frameworks and
    `reshard.load` can load the checkpoint under any layout. Arrays of several meshes are recorded by regions.

    Args:
        root: the checkpoint root; made if it is missing.
        step: the iteration.
        tree: arrays of JAX or numpy, random keys (`jax.random.key`), numbers and text.
        extra: other state by name, as in `reshard.save`.
        options: `common`, `files`, `commit`, `keep`, `metrics`, `on_event`, `retention`, `timeout` and `verify` of
            `reshard.save`.

    Raises:
        ArgumentError: two leaves have the same name; a leaf is not an array or a value; an unknown option.
        UnsupportedError: JAX runs in several processes; a dtype cannot be saved (int4).
        ReshardError: as `reshard.save`.

    Example:
        >>> import jax.numpy as jnp
        >>> report = save("saved", 10, {"params": {"w": jnp.ones((4, 2), jnp.bfloat16)}, "seed": 7})
        >>> import reshard
        >>> reshard.open("saved").keys()
        ['params.w']
    """
    check_single_process()
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        raise ArgumentError(
            f"`save` has no option {show(unknown[0])}", hint=f"options are {', '.join(sorted(_OPTIONS))}"
        )
    if extra is not None and VALUES in extra:
        raise ArgumentError(f"`extra` has an entry {VALUES!r}, which this function writes")
    arrays: dict[str, Any] = {}
    values: dict[str, Any] = {}
    keys: dict[str, dict[str, str]] = {}
    for name, leaf in named_leaves(tree).items():
        if is_key(leaf):
            keys[name] = {"impl": str(jax.random.key_impl(leaf)), "dtype": str(leaf.dtype)}
            arrays[name] = jax.random.key_data(leaf)
        elif is_plain(leaf):
            values[name] = leaf
        elif isinstance(leaf, jax.Array | np.ndarray | np.generic):
            arrays[name] = leaf
        else:
            raise ArgumentError(f"{show(name)} is of type {type(leaf).__name__}, expected an array", key=name)
        if name in arrays and arrays[name].dtype.name in {"int4", "uint4", "int2", "uint2"}:
            raise UnsupportedError(f"{show(name)} is {arrays[name].dtype.name}, which cannot be saved", key=name)
    held = on_devices(arrays)
    state = {**(extra or {}), VALUES: {"values": values, "keys": keys}}

    def save_rank(group: Group) -> SaveReport:
        saved: SaveReport = save_any(
            root,
            step,
            held.arrays[group.rank],
            extra=state if group.rank == 0 else None,
            layout=held.layout,
            group=group,
            **options,
        )
        return saved

    save_any: Any = save_iteration  # its overloads do not take `**options`
    if len(held.arrays) == 1:
        report: SaveReport = save_any(root, step, held.arrays[0], extra=state, **options)
        return report
    return in_threads(len(held.arrays), save_rank)[0]
