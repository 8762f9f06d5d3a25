"""Predictions for machines that are not here, and the search for the best way to train on them."""
