"""The part for accelerate: `prepared`, what an `Accelerator` has prepared as arguments of `Checkpointer.resume`."""

from reshard.accelerate.objects import prepared

__all__ = ["prepared"]
