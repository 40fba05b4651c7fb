"""Engines: what serves a target, with or without a drafter."""
