"""The search for tile sizes: candidates, compiled, modelled and timed."""
