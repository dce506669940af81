"""Checkpoints as files: their folder, the manifest, and the shards that several ranks write."""
