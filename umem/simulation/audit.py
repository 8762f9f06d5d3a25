"""The engine's books, checked: what it counts is what the states of the blocks say."""

from __future__ import annotations

from typing import Any

import numpy as np

from umem.core.schedule import ResidencyMode
from umem.simulation import engine as _engine

__all__ = ["find_errors"]


def find_errors(sim: Any) -> list[str]:
    """What is wrong with the books between two steps; empty where nothing is.

    A block is in one state; what is used is the sum of the blocks that hold device memory, by class
    too, and at most the capacity; what is in flight is what the link carries; and the driver may
    evict what is settled, unless it is kept or the host's own.
    """
    machine, blocks, tensors = sim.machine[0], sim.blocks, sim.tensors
    state, owner = blocks["state"], blocks["tensor"]
    settled = np.isin(state, (_engine.DEVICE, _engine.BOTH))
    holds = settled | np.isin(state, (_engine.ARRIVING, _engine.LEAVING))
    by_class = np.bincount(
        tensors["number"][owner[holds]],
        weights=blocks["bytes"][holds],
        minlength=len(machine["class_bytes"]),
    )
    evictable = settled & ~np.isin(
        tensors["residency"][owner], (ResidencyMode.KEEP, ResidencyMode.SYSTEM)
    )
    count = len(tensors)
    checks = {
        "used bytes": blocks["bytes"][holds].sum() == machine["used_bytes"],
        "bytes by class": (by_class == machine["class_bytes"]).all(),
        "capacity": machine["used_bytes"] <= machine["capacity_bytes"],
        "arriving": set(np.flatnonzero(state == _engine.ARRIVING)) <= {machine["in_block"]},
        "leaving": set(np.flatnonzero(state == _engine.LEAVING)) <= {machine["out_block"]},
        "settled": (np.bincount(owner[settled], minlength=count) == tensors["settled"]).all(),
        "copies": (
            np.bincount(owner[state == _engine.BOTH], minlength=count) == tensors["copies"]
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
