"""redraft: carry an EAGLE-3 draft model to a new target, and prove whether it pays."""
