"""Benchmarks of umem: allocators, trainings and planners, each beside its alternatives."""
