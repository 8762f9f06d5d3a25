"""Measures steps of a training, makes plans for them, and watches what becomes of these."""
