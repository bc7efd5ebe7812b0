"""`reshard.jax.load`: a pytree of arrays with the wanted shardings, of which each device reads its slices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from reshard import _core, dtypes
from reshard.errors import ArgumentError, MismatchError
from reshard.formats.outputs import as_array
from reshard.jax.saving import VALUES
from reshard.jax.tree import check_single_process, is_key, is_plain, named_leaves
from reshard.options import Verify
from reshard.values.words import listed, show
from reshard.verbs.load import LoadRequest, load_with

if TYPE_CHECKING:
    import os

    from reshard.checkpoint import Checkpoint
    from reshard.options import VerifyLike
    from reshard.resume import ResumeDecision


@dataclass(frozen=True)
class Loaded:
    """A loaded pytree.

    Attributes:
        tree: the pytree; None if there is no checkpoint yet.
        iteration: the iteration that was loaded; 0 if there is none yet.
        extra: the state that was saved beside the tree, by name.
        decision: which iteration was chosen, and which were skipped.
    """

    tree: Any
    iteration: int
    extra: dict[str, Any]
    decision: ResumeDecision


def load(
    root: str | os.PathLike[str],
    like: Any,
    *,
    partial: bool = False,
    verify: VerifyLike = "touched",
    threads: int | None = None,
) -> Loaded:
    """Load the newest undamaged iteration as a pytree. Each device reads the slices that it holds.

    Args:
        root: a checkpoint root, or one of its iteration folders.
        like: the wanted pytree. A leaf is an array of JAX or a `jax.ShapeDtypeStruct`, whose sharding is used (without
            one: the default device, not committed), an array of numpy, or a value of Python.
        partial: whether the checkpoint may have tensors that the tree does not have.
        verify: what is compared with its checksums, as in `reshard.load`.
        threads: threads of the copy.

    Returns:
        The loaded pytree. An empty or missing root is a fresh start: the tree is None, and the iteration 0.

    Raises:
        MismatchError: a leaf is missing in the checkpoint, or has another shape, dtype or kind of random key; or the
            checkpoint has tensors that the tree does not have.
        UnsupportedError: JAX runs in several processes.
        ReshardError: as `reshard.load`.

    Example:
        >>> import jax.numpy as jnp
        >>> from reshard.jax import save
        >>> _ = save("loaded", 10, {"w": jnp.arange(4.0), "seed": 7})
        >>> load("loaded", {"w": jax.ShapeDtypeStruct((4,), jnp.float32), "seed": 0}).tree
        {'seed': 7, 'w': Array([0., 1., 2., 3.], dtype=float32)}
    """
    check_single_process()
    leaves, mode = named_leaves(like), Verify.of(verify).on_load

    def read(checkpoint: Checkpoint, _decision: ResumeDecision) -> tuple[dict[str, Any], dict[str, Any]]:
        state = checkpoint.extra()
        saved = state.pop(VALUES, {"values": {}, "keys": {}})
        return _read(checkpoint, leaves, saved, partial=partial, verify=mode, threads=threads), state

    decision, found = load_with(read, LoadRequest(root=root), scrub=mode == "full", threads=threads)
    if found is None:
        return Loaded(None, 0, {}, decision)
    tree = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(like), [found[0][name] for name in leaves])
    return Loaded(tree, decision.iteration or 0, found[1], decision)


@dataclass(frozen=True)
class _Target:
    """A wanted array: of numpy, or of JAX. Without a sharding it is on the default device, and not committed to it."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    is_numpy: bool = False

    @classmethod
    def of(cls, name: str, leaf: Any) -> _Target:
        if isinstance(leaf, np.ndarray | np.generic):
            return cls(leaf.shape, leaf.dtype, None, is_numpy=True)
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise ArgumentError(f"{show(name)} is of type {type(leaf).__name__}, expected an array", key=name)
        shape, dtype = leaf.shape, leaf.dtype
        sharding: Any = leaf.sharding if getattr(leaf, "committed", True) else None
        if is_key(leaf):
            of_data: Any = jax.ShapeDtypeStruct
            data = jax.eval_shape(jax.random.key_data, of_data(shape, dtype))
            shape, dtype = data.shape, data.dtype
            if isinstance(sharding, NamedSharding):
                spec: Any = PartitionSpec
                rest = (None,) * (len(shape) - len(sharding.spec))
                sharding = NamedSharding(sharding.mesh, spec(*sharding.spec, *rest))
        made = jax.dtypes.canonicalize_dtype(dtype)
        if made != dtype:
            raise MismatchError(
                f"{show(name)} is wanted as {dtype}, and this process would make it {made}",
                key=name,
                hint='`jax.config.update("jax_enable_x64", True)`',
            )
        return cls(shape, dtype, sharding)

    def regions(self) -> dict[tuple[tuple[int, int], ...], list[Any]]:
        """The devices that hold each region: `(start, stop)` of each dim, in elements."""
        if self.sharding is None:
            return {tuple((0, size) for size in self.shape): [None]}
        found: dict[tuple[tuple[int, int], ...], list[Any]] = {}
        for device, index in self.sharding.addressable_devices_indices_map(self.shape).items():
            region = tuple(one.indices(size)[:2] for one, size in zip(index, self.shape, strict=True))
            found.setdefault(region, []).append(device)
        return found


def _read(
    checkpoint: Checkpoint,
    leaves: dict[str, Any],
    saved: dict[str, Any],
    *,
    partial: bool,
    verify: Any,
    threads: int | None,
) -> dict[str, Any]:
    targets = {name: _Target.of(name, leaf) for name, leaf in leaves.items() if not is_plain(leaf)}
    _check(checkpoint, leaves, targets, saved, partial=partial)
    request, regions = _core.Request(), []
    for name, target in targets.items():
        for number, (region, devices) in enumerate(target.regions().items()):
            offset, shape = tuple(start for start, _ in region), tuple(stop - start for start, stop in region)
            request.add_region(f"{name}@{number}", name, offset, shape)
            regions.append((name, devices))
    plan = checkpoint.plan(request, verify=verify, keys=list(targets))
    shards: dict[str, list[Any]] = {name: [] for name in targets}
    for (name, devices), (_, dtype, shape, _), place in zip(
        regions, plan.arrays, plan.load(threads=threads), strict=True
    ):
        array = as_array(*place, dtype, shape)
        shards[name] += [array if device is None else jax.device_put(array, device) for device in devices]
    result: dict[str, Any] = {}
    for name, leaf in leaves.items():
        if is_plain(leaf):
            result[name] = saved["values"][name]
            continue
        target = targets[name]
        if target.is_numpy:
            result[name] = shards[name][0]
        elif target.sharding is None:
            result[name] = jnp.asarray(shards[name][0])
        else:
            result[name] = jax.make_array_from_single_device_arrays(target.shape, target.sharding, shards[name])
        if is_key(leaf):
            result[name] = jax.random.wrap_key_data(result[name], impl=saved["keys"][name]["impl"])
    return result


def _check(
    checkpoint: Checkpoint, leaves: dict[str, Any], targets: dict[str, _Target], saved: dict[str, Any], *, partial: bool
) -> None:
    path, stored = str(checkpoint.path), set(checkpoint.keys())
    missing = [name for name in leaves if name not in (stored if name in targets else saved["values"])]
    if missing:
        raise MismatchError(
            f"{path} lacks {listed(map(show, missing))}", key=missing[0], hint="a leaf is named by its path in the tree"
        )
    extra = sorted((stored | saved["values"].keys()) - leaves.keys())
    if extra and not partial:
        raise MismatchError(
            f"the tree does not have {listed(map(show, extra))} of {path}",
            key=extra[0],
            hint="`partial=True` loads only what the tree has",
        )
    for name, target in targets.items():
        kind = saved["keys"].get(name, {}).get("dtype")
        own = str(leaves[name].dtype) if is_key(leaves[name]) else None
        if kind != own:
            raise MismatchError(f"{show(name)} holds {_kind(kind)} in {path}, and {_kind(own)} in the tree", key=name)
        dtype, shape = checkpoint.data.index.info(name)
        wanted = dtypes.name_of(np.dtype(target.dtype))
        if tuple(shape) != tuple(target.shape) or dtype != wanted:
            raise MismatchError(
                f"{show(name)} is {dtype} with shape {tuple(shape)} in {path}, and {wanted} with shape "
                f"{tuple(target.shape)} in the tree",
                key=name,
                hint="give the saved dtype and cast afterwards" if dtype != wanted else None,
            )


def _kind(dtype: str | None) -> str:
    return "no random keys" if dtype is None else f"random keys of dtype {dtype}"
