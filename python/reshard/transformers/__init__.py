"""The part for transformers: `ReshardCallback` for its Trainer. It imports transformers; `import reshard` does not."""

from reshard.transformers.callback import ReshardCallback, export

__all__ = ["ReshardCallback", "export"]
