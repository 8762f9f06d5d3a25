"""Everything about the optimizer's step under a plan."""
