"""Hidden states of the target: extraction and the shard store."""
