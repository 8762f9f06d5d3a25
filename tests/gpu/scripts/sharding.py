"""A training of FSDP2 whose state may be streamed, for torchrun: ``sharding.py STEPS``.

With ``UMEM_POLICY`` umem is enabled. The last line is JSON: by rank, what the program saw.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from begin import begin, crcs, print_of_all_ranks, state_of
from streaming import HIDDEN, LAYERS, Layer
from torch import distributed, nn

from umem.streaming import streamed_trainings

BATCHES, ROWS = 2, 512


def wrapped(device: torch.device) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(1)
    model: Any = nn.Sequential(*(Layer() for _ in range(LAYERS)), nn.Linear(HIDDEN, HIDDEN))
    model = model.to(device)
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model[:LAYERS]:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def _waited() -> int:
    """How many updates the program's stream has waited for within ``step()``."""
    return sum(it.counts.waited for it in streamed_trainings())


def train(steps: int) -> dict[str, Any]:
    rank, device = distributed.get_rank(), torch.device("cuda", torch.cuda.current_device())
    model = wrapped(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses, seen, deferred = [], [], 0
    for step in range(steps):
        waited = _waited()
        for batch in range(BATCHES):
            torch.manual_seed(100 + rank + 10 * (BATCHES * step + batch))
            loss = model(torch.randn(ROWS, HIDDEN, device=device)).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        deferred += _waited() == waited
        seen.append(norm.full_tensor())
        if step % 4 == 1:  # a use of weights while they are updated
            seen.append(model[LAYERS // 2].up.weight.full_tensor().sum())
    return {
        "losses": [float(it).hex() for it in losses],
        "seen": [float(it).hex() for it in seen],
        "weights": crcs(it.to_local() for it in model.parameters()),
        "state": crcs(
            it.to_local() if hasattr(it, "to_local") else it for it in state_of(optimizer)
        ),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "deferred": deferred,
        "streaming": [
            {
                "streamed": it.counts.streamed,
                "in_line": it.counts.in_line,
                "early": it.counts.early,
                "state_bytes": it.status().state_bytes,
                "slots_bytes": it.status().slots_bytes,
            }
            for it in streamed_trainings()
        ],
    }


if __name__ == "__main__":
    begin()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("cpu:gloo,cuda:nccl")
    print_of_all_ranks(train(int(sys.argv[1])))
