"""Storage for `torch.distributed.checkpoint` (DCP): its planner and its calls, the files and checks of this package.

    dcp.save(state, storage_writer=Writer("run/iteration_00000100"))
    dcp.load(state, storage_reader=Reader("run/iteration_00000100"))

A path whose name is that of an iteration, `iteration_<N>`, is that iteration of the checkpoint root above it. Any other
path is a checkpoint root of its own with one iteration, whose number is that at the end of the name, or 0.
"""

from reshard.torch.dcp.reader import Reader
from reshard.torch.dcp.writer import Writer

__all__ = ["Reader", "Writer"]
