"""Serving: engines, acceptance, load."""
