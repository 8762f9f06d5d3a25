"""Plain device memory of mapped handles: ``expandable.py MODE POLICY``; facts as JSON.

The policy ``stock`` is torch's own allocator.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from typing import Any

import torch
from card import used_bytes
from torch import nn

import umem
from umem.runtime.state import runtime

MIB = 1 << 20
MOST_LIVE_BYTES = 1280 * MIB


def counted_bytes() -> int:
    return int(runtime().allocator.stats(0)["budget_bytes"]["current"])


def is_intact(tensor: torch.Tensor, number: int) -> bool:
    return bool((tensor == number).all().item())


def changing() -> dict[str, Any]:
    """Tensors of changing sizes on two streams, which live and die in any order."""
    allocator = runtime().allocator
    side = torch.cuda.Stream()
    for stream in (torch.cuda.current_stream(), side):  # kernels are loaded before the first look
        with torch.cuda.stream(stream):
            assert is_intact(torch.full((1024,), 7, dtype=torch.int32, device="cuda"), 7)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    used, counted = used_bytes(), counted_bytes()
    differences: list[int] = []

    def compare() -> None:
        differences.append((used_bytes() - used) - (counted_bytes() - counted))

    # A graph's memory has segments of its own, from which nothing is taken.
    source = torch.arange(MIB, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = source * 2
    compare()

    chooser = random.Random(0)
    live: list[tuple[torch.Tensor, int]] = []
    broken = 0
    for number in range(600):
        size_bytes = (2 << chooser.randrange(8)) * MIB + chooser.randrange(2 * MIB) // 4 * 4
        while live and sum(t.nbytes for t, _ in live) + size_bytes > MOST_LIVE_BYTES:
            tensor, expected = live.pop(chooser.randrange(len(live)))
            broken += not is_intact(tensor, expected)
            del tensor
        with torch.cuda.stream(side if number % 3 == 0 else torch.cuda.current_stream()):
            fresh = torch.full((size_bytes // 4,), number, dtype=torch.int32, device="cuda")
        torch.cuda.current_stream().wait_stream(side)
        live.append((fresh, number))
        del fresh
        if number % 25 == 0:
            compare()
    peak = allocator.stats(0)["budget_bytes"]["peak"]
    broken += sum(not is_intact(tensor, expected) for tensor, expected in live)
    graph.replay()
    torch.cuda.synchronize()
    broken += not torch.equal(doubled, source * 2)
    unmapped = allocator.stats(0)["num_device_free"]
    expandable = [s for s in allocator.segments(0) if s["is_expandable"]]
    live.clear()
    torch.cuda.empty_cache()
    compare()
    return {
        "expandable": len(expandable),
        "differences": differences,
        "budget_peak_bytes": peak,
        "unmapped": unmapped,
        "broken": broken,
        "spilled_bytes": allocator.kind_stats(0)["pinned"]["spilled_bytes"],
        "left_bytes": counted_bytes() - counted,
    }


def train() -> dict[str, Any]:
    """A training with a batch of another size in each of its first steps, then of one size."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    width = 2048
    layers = [m for _ in range(6) for m in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    chooser = random.Random(0)
    losses, calls = [], []
    for step in range(40):
        batch = 64 * chooser.randrange(1, 200) if step < 30 else 8192
        inputs = torch.randn(batch, width, device="cuda")
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        del inputs, loss
        stats = torch.cuda.memory_stats()
        calls.append([stats["num_device_alloc"], stats["num_device_free"]])
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return {"losses": losses, "digest": digest.hexdigest(), "calls": calls}


def borrowing() -> dict[str, Any]:
    """A side stream and the program's stream share nearly the whole budget in turns."""
    allocator = runtime().allocator
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    factor = torch.full((4096, 4096), 1.0 / 4096, device="cuda")  # a mean, so that products stay
    results = torch.zeros(2, 40, device="cuda")

    def use(stream: torch.cuda.Stream, number: int) -> None:
        """Fill 1 GiB, have slow work read it, and free it before that work is over."""
        with torch.cuda.stream(stream):
            tensor = torch.full((16, 4096, 4096), float(number), device="cuda")
            mean = tensor[0]
            for index in range(16):
                mean = (mean + tensor[index]) @ factor / 2
            results[int(stream is side), number].copy_(mean[0, 0])

    for number in range(4):
        use(main, number)
        use(side, number)
    torch.cuda.synchronize()
    before = allocator.stats(0)
    for number in range(4, 40):
        use(main, number)
        use(side, number)
    torch.cuda.synchronize()
    after = allocator.stats(0)
    expected = torch.arange(40, device="cuda").expand(2, 40)
    return {
        "wrong": int((results != expected).sum().item()),
        "calls": sum(after[it] - before[it] for it in ("num_device_alloc", "num_device_free")),
        "budget_peak_bytes": after["budget_bytes"]["peak"],
        "spilled_bytes": allocator.kind_stats(0)["pinned"]["spilled_bytes"],
    }


MODES = {"borrowing": borrowing, "changing": changing, "train": train}

if __name__ == "__main__":
    mode, policy = sys.argv[1:]
    if policy != "stock":
        umem.enable(policy)
    print(json.dumps(MODES[mode]()))
