"""Activations of blocks that are copied to the host between their forward and backward pass."""
