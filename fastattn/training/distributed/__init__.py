"""Training on several ranks: their mesh, their parts of a batch, and their communication."""
