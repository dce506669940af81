"""Reports of runs: JSON, tables and charts."""
