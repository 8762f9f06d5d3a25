"""Page-locked memory of a training's first steps. The last line is JSON: for each step the bytes of
new page-locked segments, what was locked ahead meanwhile, and the number of plans so far."""

from __future__ import annotations

import json
from typing import Any

import torch
from begin import begin
from torch import nn

from umem.runtime.state import runtime
from umem.streaming.training import streamed_trainings

WIDTH, LAYERS, STEPS = 4096, 48, 8
"""3 GiB of weights; with gradients and state, 12."""


def main() -> None:
    begin()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    steps: list[dict[str, int]] = []
    known: set[int] = set()
    known_bytes = 0
    for _ in range(STEPS):
        model(torch.randn(64, WIDTH, device="cuda")).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        every = [it for it in runtime().allocator.segments(0) if it["memory_kind"] == "pinned"]
        ahead_bytes = runtime().allocator.stats(0)["locked_ahead_bytes"]
        tuning: list[Any] = [it.status().tuning for it in streamed_trainings()]
        new_bytes = sum(it["total_size"] for it in every if it["address"] not in known)
        plans = sum(it.plans for it in tuning)
        steps.append({"new": new_bytes, "ahead": ahead_bytes - known_bytes, "plans": plans})
        known, known_bytes = {it["address"] for it in every}, ahead_bytes
    print(json.dumps(steps))


if __name__ == "__main__":
    main()
