"""Parts of names that wrappers of modules add."""

WRAPPERS = frozenset(("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"))
"""Parts of names that wrappers add: those of DDP, `torch.compile`, FSDP, activation checkpointing and Fabric."""


def bare(name: str) -> str:
    """A name without the parts that wrappers add.

    Example:
        >>> bare("module.layers.0._checkpoint_wrapped_module.weight")
        'layers.0.weight'
    """
    parts = name.split(".")
    return name if WRAPPERS.isdisjoint(parts) else ".".join(part for part in parts if part not in WRAPPERS)
