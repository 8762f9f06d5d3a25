"""Training under a budget, beside its alternatives."""
