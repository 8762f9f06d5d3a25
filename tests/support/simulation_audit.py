"""Checks that what the engine counts agrees with the states of the blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from umem.core.schedule import ResidencyMode
from umem.pages.simulate import engine


def find_errors(sim: Any) -> list[str]:
    """Disagreements between two steps, by name; an empty list for none.

    A block is in one state; what is used is the sum of the blocks that hold device memory, by class
    too, and at most the capacity; what is in flight is what the link carries; and the driver may
    evict what is resident, unless it is kept or the host's own.
    """
    machine, blocks, tensors = sim.machine[0], sim.blocks, sim.tensors
    state, owner = blocks["state"], blocks["tensor"]
    resident = np.isin(state, (engine.DEVICE, engine.BOTH))
    holds = resident | np.isin(state, (engine.ARRIVING, engine.LEAVING))
    by_class = np.bincount(
        tensors["class_number"][owner[holds]],
        weights=blocks["bytes"][holds],
        minlength=len(machine["class_bytes"]),
    )
    evictable = resident & ~np.isin(
        tensors["residency"][owner], (ResidencyMode.KEEP, ResidencyMode.SYSTEM)
    )
    count, resident_blocks = len(tensors), tensors["resident_blocks"]
    arriving, leaving = sim.directions["block"]
    checks = {
        "used bytes": blocks["bytes"][holds].sum() == machine["used_bytes"],
        "bytes by class": (by_class == machine["class_bytes"]).all(),
        "capacity": machine["used_bytes"] <= machine["capacity_bytes"],
        "arriving": set(np.flatnonzero(state == engine.ARRIVING)) <= {arriving},
        "leaving": set(np.flatnonzero(state == engine.LEAVING)) <= {leaving},
        "resident": (np.bincount(owner[resident], minlength=count) == resident_blocks).all(),
        "copies": (
            np.bincount(owner[state == engine.BOTH], minlength=count) == tensors["clean_blocks"]
        ).all(),
        "marks of the list": (blocks["listed"] == evictable).all(),
        "links of the list": set(_listed(sim)) == set(np.flatnonzero(evictable)),
    }
    return [name for name, holds_true in checks.items() if not holds_true]


def _listed(sim: Any) -> list[int]:
    """Blocks of the driver's list, oldest first; at most one more than there are blocks."""
    found: list[int] = []
    block = int(sim.machine[0]["oldest"])
    while block >= 0 and len(found) <= len(sim.blocks):
        found.append(block)
        block = int(sim.blocks[block]["newer"])
    return found
