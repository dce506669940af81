"""The search for tiles, shapes and backends: candidates, compiled, checked and timed."""
