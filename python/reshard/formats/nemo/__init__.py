"""Checkpoints and archives of NeMo."""
