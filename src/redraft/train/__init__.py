"""Training of the drafter."""
