"""`umem bench training`: umem's planners beside other ways to train with less device memory.

Every variant and budget has a process of its own, one after the other. `runner` conducts and
`worker` is such a process; `step` makes the variants, `task` and `managed` measure them, `results`
holds what came out. `report` and `picture` show it, `targets` checks it.
"""
