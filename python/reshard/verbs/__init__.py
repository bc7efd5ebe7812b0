"""What is done with checkpoints as a whole, over reading and writing."""
