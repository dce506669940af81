"""A run of all measurements: its jobs, their processes, its time."""
