"""The EAGLE-3 drafter: model, checkpoints, remap of the head."""
