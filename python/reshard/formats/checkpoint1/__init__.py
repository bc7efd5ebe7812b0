"""Checkpoint 1.0: one folder for each rank. The strategy files of the run describe the shards."""
