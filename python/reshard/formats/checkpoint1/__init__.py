"""Checkpoint 1.0: one folder for each rank, put together by the strategy files of the run."""
