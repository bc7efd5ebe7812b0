"""A folder `checkpoint-<N>` of `transformers.Trainer` as a run: weights, optimizer, scheduler and step."""
