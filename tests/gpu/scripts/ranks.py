"""A training with a process for each GPU, for torchrun: ``ranks.py WRAPPER STEPS``.

The last line is JSON: what each rank found out.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from begin import print_of_all_ranks
from managing import HIDDEN, MOST_SEARCH_S, Net, manager_facts
from torch import distributed, nn

import umem
from umem.managing import managers
from umem.runtime.inspection import memory_by_class
from umem.runtime.model_parts import plain_tensors

TOKENS = 4096


def wrapped(wrapper: str, device: torch.device) -> nn.Module:
    torch.manual_seed(1)
    model = Net().to(device)
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(model, device_ids=[device.index])
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def train(wrapper: str, steps: int) -> dict[str, Any]:
    rank = distributed.get_rank()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    model = wrapped(wrapper, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    by_class = {}
    for step in range(steps):
        torch.manual_seed(100 + step + 1000 * rank)
        loss = model(torch.randn(TOKENS, HIDDEN, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        if step == 1 and umem.is_enabled():
            by_class = {str(kind): it.requested_bytes for kind, it in memory_by_class(rank).items()}
        optimizer.zero_grad()
        losses.append(loss.item())
        for manager in managers():  # on a slow host the training would end before there is a plan
            manager.wait_for_search(MOST_SEARCH_S)
    found: dict[str, Any] = {
        "losses": losses,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "trained_bytes": sum(
            part.nbytes for it in model.parameters() for part in plain_tensors(it)
        ),
        "by_class": by_class,
        "swapped": torch.cuda.get_allocator_backend() == "pluggable",
    }
    for manager in managers():
        found |= manager_facts(manager)
    return found


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    distributed.init_process_group("cpu:gloo,cuda:nccl")
    wrapper, step_count = sys.argv[1:]
    print_of_all_ranks(train(wrapper, int(step_count)))
