"""The same calls in plain torch: its fused kernel where that serves, else formulas."""
