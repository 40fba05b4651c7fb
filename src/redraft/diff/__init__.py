"""What moved between two revisions, and whether it matters."""
