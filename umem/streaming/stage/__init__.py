"""What all classes of tensors use to move: lanes, homes, staged state and the budget they share."""
