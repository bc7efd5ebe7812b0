"""Checkpoints of DeepSpeed: ZeRO stages 1 to 3, BF16_Optimizer, and universal folders."""
