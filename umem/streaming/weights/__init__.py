"""Weights that the device has no room for: staged block by block ahead of their use."""
