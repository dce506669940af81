"""The search for tiles, shapes and backends: compile, check and time candidates."""
