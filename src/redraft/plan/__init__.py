"""What a run will need, told before it costs an hour; without torch, so that it answers at once."""
