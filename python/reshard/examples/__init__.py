"""Programs to run and to read: `python -m reshard.examples.train_gpt`."""
