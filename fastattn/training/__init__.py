"""Training the models: tokenizers, data, tasks, the loop, checkpoints, and what was learned."""
