"""Page-locked memory of a training's steps. The last line is JSON: for each step the bytes of new
page-locked segments, those that were locked ahead meanwhile, and the number of plans so far."""

from __future__ import annotations

import json

import torch
from begin import begin
from torch import nn

from umem.runtime.state import runtime
from umem.streaming import streamed_trainings

WIDTH, LAYERS, STEPS = 4096, 48, 8
"""3 GiB of weights; with gradients and state, 12."""

begin()
model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
steps: list[tuple[int, int, int]] = []
known: set[int] = set()
for _ in range(STEPS):
    model(torch.randn(64, WIDTH, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    memory = runtime().allocator
    pinned = [it for it in memory.segments(0) if it["memory_kind"] == "pinned"]
    new = sum(it["total_size"] for it in pinned if it["address"] not in known)
    known = {it["address"] for it in pinned}
    ahead = memory.stats(0)["locked_ahead_bytes"] - sum(it[1] for it in steps)
    tuning = [it.status().tuning for it in streamed_trainings()]
    steps.append((new, ahead, sum(it.plans for it in tuning if it is not None)))
print(json.dumps(steps))
