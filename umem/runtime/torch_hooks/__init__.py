"""Hooks on modules and on what autograd saves."""
