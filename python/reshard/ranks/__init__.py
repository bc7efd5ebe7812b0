"""The ranks of a job: how they send messages to each other, and steps that all of them take together."""
