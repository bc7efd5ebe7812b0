"""Checkpoint 2.0: iteration folders with metadata.json, and the tracker that names the newest."""
