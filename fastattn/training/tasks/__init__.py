"""What a run learns: batches, losses and figures of each task."""
