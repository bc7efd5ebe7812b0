"""A small network that JAX trains on all devices, which can be killed and started again.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m reshard.examples.train_jax --out run --tp 2

Started again, also with another `--tp`, it resumes from the newest undamaged iteration.
"""

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import reshard.jax


def loss_of(weights: Any, batch: jax.Array) -> jax.Array:
    """The mean square error of a network with one hidden layer."""
    found = jax.nn.relu(batch @ weights["up"]) @ weights["down"]
    return jnp.mean((found - jnp.sum(batch, 1, keepdims=True)) ** 2)


@partial(jax.jit, donate_argnums=0)
def train_step(state: Any) -> tuple[Any, jax.Array]:
    """A step of gradient descent on a random batch."""
    key, drawn = jax.random.split(state["key"])
    loss, grads = jax.value_and_grad(loss_of)(state["weights"], jax.random.normal(drawn, (32, 16)))
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    weights = jax.tree.map(lambda w, m: w - 0.01 * m, state["weights"], momentum)
    return {"weights": weights, "momentum": momentum, "key": key}, loss


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tp", type=int, default=1)
    args = parser.parse_args()
    mesh = Mesh(np.reshape(jax.devices(), (-1, args.tp)), ("dp", "tp"))
    spec: Any = {"up": P(None, "tp"), "down": P("tp", None)}  # type: ignore[no-untyped-call]
    shard = {name: NamedSharding(mesh, of_name) for name, of_name in spec.items()}
    weights = {"up": jax.random.normal(jax.random.key(0), (16, 64)) / 4, "down": jnp.zeros((64, 1))}
    weights = jax.device_put(weights, shard)
    state: Any = {"weights": weights, "momentum": jax.tree.map(jnp.zeros_like, weights), "key": jax.random.key(1)}
    loaded = reshard.jax.load(args.out, like=state)
    state = loaded.tree or state
    for step in range(loaded.iteration + 1, args.steps + 1):
        state, loss = train_step(state)
        print(step, float(loss).hex(), flush=True)
        if step % 5 == 0:
            reshard.jax.save(args.out, step, state, keep=3, metrics={"loss": float(loss)})


if __name__ == "__main__":
    main()
