"""How a stage runs, not what it makes."""
