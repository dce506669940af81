"""Training a reference model on text."""
