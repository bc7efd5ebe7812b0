"""Checkpoints of Megatron-Core: `torch_dist`, and the older folders of model-parallel ranks."""
