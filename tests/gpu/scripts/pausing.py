"""A training that gives the card back twice and goes on: ``pausing.py state|weights``.

With ``UMEM_POLICY`` umem is enabled, and pauses; without it, the same training runs on. Nothing
else may use the card meanwhile. The last line is JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import weights
from begin import IS_MANAGED, begin, crc, crcs, state_of
from card import base_bytes, used_bytes
from cuda.bindings import runtime as cudart
from streaming import Training
from torch import nn

import umem
from umem.streaming import streamed_trainings
from umem.streaming.weights import weights_of

MIB = 1 << 20
STEPS = 12
PAUSES = (3, 9)
"""Steps before each pause: the first is amid the steps that are measured for a plan."""

LEFT_BYTES = 128 * MIB
"""Free memory that another allocation leaves on the card."""


def train_state() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[int], torch.Tensor]]:
    training = Training(clips=True)

    def step(_: int) -> torch.Tensor:
        training.step()
        return training.losses[-1]

    return training.model, training.optimizer, step


def train_weights() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[int], torch.Tensor]]:
    model = weights.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(number: int) -> torch.Tensor:
        loss = model(weights.batch(number)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


def resume_beside_another() -> str:
    """Resume while the card is full, and again when it is not. The first call's error."""
    free, _ = torch.cuda.mem_get_info()
    error, memory = cudart.cudaMalloc(free - LEFT_BYTES)
    assert error == cudart.cudaError_t.cudaSuccess, error
    try:
        umem.resume()
    except umem.PauseError as refused:
        refusal = str(refused)
    else:
        refusal = ""
    (error,) = cudart.cudaFree(memory)
    assert error == cudart.cudaError_t.cudaSuccess, error
    if refusal:
        umem.resume()
    return refusal


def pause(facts: list[dict[str, Any]]) -> None:
    spare = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    before = used_bytes()
    report = umem.pause()
    during = used_bytes()
    del spare  # its memory does not come back
    of_allocation = ""
    try:
        torch.empty(1, device="cuda")
    except RuntimeError as error:
        of_allocation = str(error)
    facts.append(
        {
            "before": before,
            "during": during,
            "returned": report.returned_bytes,
            "kept": report.kept_bytes,
            "host": report.host_bytes,
            "allocation_error": of_allocation,
            "resume_error": resume_beside_another(),
        }
    )


def main(mode: str) -> None:
    begin()
    base = base_bytes()
    model, optimizer, step = {"state": train_state, "weights": train_weights}[mode]()
    source = torch.arange(MIB, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = source * 2
    losses, pauses = [], list[dict[str, Any]]()
    for number in range(STEPS):
        if IS_MANAGED and number in PAUSES:
            pause(pauses)
        losses.append(step(number))
    graph.replay()
    facts: dict[str, Any] = {
        "losses": [float(loss).hex() for loss in losses],
        "weights": crcs(model.parameters()),
        "state": crcs(state_of(optimizer)),
        "doubled": crc(doubled),
    }
    if IS_MANAGED:
        facts |= {
            "base": base,
            "pauses": pauses,
            "slots_bytes": sum(it.step.units.slots_bytes for it in streamed_trainings()),
        }
        its = weights_of(model)
        facts["streamed_weights"] = 0 if its is None else its.status().streamed_bytes
        print(umem.memory_summary())
        umem.pause()  # a process may end while it is paused
    print(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1])
