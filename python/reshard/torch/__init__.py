"""The torch part of reshard. It imports torch; `import reshard` alone does not."""

from reshard.torch.checkpointer import Checkpointer
from reshard.torch.files import load_file, save_file
from reshard.torch.health import LossHealth
from reshard.torch.sampler import ElasticSampler
from reshard.torch.tensors import as_tensor, from_tensor

__all__ = ["Checkpointer", "ElasticSampler", "LossHealth", "as_tensor", "from_tensor", "load_file", "save_file"]
