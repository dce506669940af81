"""The torch backend: torch's fused kernel where it serves, else formulas."""
