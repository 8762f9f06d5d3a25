"""A training that the program moves to the host and back, twice: ``moving.py state|weights WAY``.

WAY is "memory", where tensors of state get other memory, or "tensors", where they are replaced.
With ``UMEM_POLICY`` umem is enabled; without it, the same program runs stock. The last line is
JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from begin import IS_MANAGED, begin, crcs, state_of
from card import base_bytes, used_bytes
from pausing import PAUSES, STEPS, train_state, train_weights
from torch import nn

import umem
from umem.runtime.state import runtime
from umem.streaming import streamed_trainings
from umem.streaming.weights import weights_of


def move(model: nn.Module, optimizer: torch.optim.Optimizer, way: str, device: str) -> None:
    model.to(device)
    for values in optimizer.state.values():
        for name, value in values.items():
            if way == "memory":
                value.data = value.data.to(device)
            else:
                values[name] = value.to(device)


def held() -> dict[str, int]:
    """What is on the card, and page-locked on the host for it."""
    found = {"card": used_bytes(), "allocated": torch.cuda.memory_allocated()}
    if IS_MANAGED:
        kinds = runtime().allocator.kind_stats(0)
        found |= {kind: kinds[kind]["reserved_bytes"] for kind in ("device", "pinned")}
    return found


def main(mode: str, way: str) -> None:
    begin()
    base = base_bytes()
    model, optimizer, step = {"state": train_state, "weights": train_weights}[mode]()
    losses, moves = [], []
    for number in range(STEPS):
        if number in PAUSES:
            before = held()
            move(model, optimizer, way, "cpu")
            torch.cuda.empty_cache()
            moves.append({"before": before, "during": held()})
            move(model, optimizer, way, "cuda")
        losses.append(step(number))
    facts: dict[str, Any] = {
        "losses": [float(loss).hex() for loss in losses],
        "weights": crcs(model.parameters()),
        "state": crcs(state_of(optimizer)),
        "base": base,
        "moves": moves,
    }
    if IS_MANAGED:
        facts["slots_bytes"] = sum(it.step.units.slots_bytes for it in streamed_trainings())
        its = weights_of(model)
        facts["streamed_weights"] = 0 if its is None else its.status().streamed_bytes
        print(umem.memory_summary())
    print(json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
