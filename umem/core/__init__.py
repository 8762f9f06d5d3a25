"""Tensor classes, errors, units, schedule and report, which all rooms share."""
