"""Runs of a training under a plan for managed memory."""
