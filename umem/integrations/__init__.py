"""What other libraries call of umem."""
