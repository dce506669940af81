"""Training: tokenizers, data, tasks, the training loop, checkpoints and attention maps."""
