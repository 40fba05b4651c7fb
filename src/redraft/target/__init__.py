"""The served model: where it comes from, how it is loaded."""
