"""`umem bench`."""
