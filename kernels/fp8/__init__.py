"""Heads quantised to 8 bits, and values in the order of the products in 8 bits."""
