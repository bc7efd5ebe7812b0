"""Checkpoints of nanotron: a file of safetensors for each parameter and rank."""
