"""Carry the donor's head to another mapping, and measure the first step."""
