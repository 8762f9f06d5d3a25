"""The optimizer's step under a plan: unit by unit, with state that comes and goes."""
