"""Checkpoint shard I/O, resharding and resume for large-model training."""
