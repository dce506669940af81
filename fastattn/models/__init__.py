"""Reference models built on the attention modules."""
