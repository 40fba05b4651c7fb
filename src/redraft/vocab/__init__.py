"""The draft vocabulary: mapping, building by frequency, audit."""
