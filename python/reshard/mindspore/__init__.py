"""MindSpore: Parameters in and out of checkpoints, and a callback of `Model.train`. See docs/guides/mindspore.md.

report = reshard.mindspore.save("run", step, network, optimizer)
loaded = reshard.mindspore.load("run", network, optimizer)
callback = reshard.mindspore.ReshardCallback("run", save_every=100, keep=3)
"""

from reshard.mindspore.callback import ReshardCallback, Start
from reshard.mindspore.loading import Loaded, load
from reshard.mindspore.saving import save

__all__ = ["Loaded", "ReshardCallback", "Start", "load", "save"]
