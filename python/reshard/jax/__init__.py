"""JAX: arrays with shardings in and out of checkpoints. See docs/guides/jax.md.

report = reshard.jax.save("run", step, state)
loaded = reshard.jax.load("run", like=state)
"""

from reshard.jax.loading import Loaded, load
from reshard.jax.saving import save

__all__ = ["Loaded", "load", "save"]
