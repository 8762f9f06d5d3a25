"""Gradients that move to the host, are clipped there, or are freed in the backward pass."""
