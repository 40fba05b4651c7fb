"""Hidden states: made, kept, packed."""
