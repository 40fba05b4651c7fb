"""An arm of a bench: what is served in it."""

PLAIN = "plain"
"""The target alone."""
