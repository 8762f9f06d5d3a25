"""One policy at work in a process of its own: ``limits.py MODE POLICY``; facts as JSON."""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import torch
from torch import nn

import umem
from umem.cuda import accessed_by, is_read_mostly, preferred_location
from umem.runtime.state import runtime

MIB = 1 << 20


def empty(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device="cuda")


def advice(tensor: torch.Tensor) -> dict[str, Any]:
    """What the driver was told about a tensor's pages."""
    return {
        "preferred": str(preferred_location(tensor)),
        "accessed_by": [str(place) for place in accessed_by(tensor)],
        "read_mostly": is_read_mostly(tensor),
    }


def spill() -> dict[str, Any]:
    """600 MiB of tensors under a budget of 256 MiB."""
    tensors = [torch.empty(5 * MIB, device="cuda") for _ in range(30)]
    stats = runtime().allocator.kind_stats(0)["managed"]
    facts = {
        "advice": [advice(tensor) for tensor in tensors],
        "spilled_bytes": stats["spilled_bytes"],
        "summary": umem.memory_summary(),
    }
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    facts["values"] = [sorted({t.min().item(), t.max().item()}) for t in tensors]
    # A product of two spilled matrices, against the CPU's.
    torch.manual_seed(0)
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    on_host = [tensors[20][: 1024 * 1024], tensors[21][: 1024 * 1024]]
    for there, here in zip(on_host, (left, right), strict=True):
        there.copy_(here.flatten())
    product = on_host[0].view(1024, 1024) @ on_host[1].view(1024, 1024)
    facts["product_error"] = (product.cpu() - left @ right).abs().max().item()
    # Room on the host is used again, not taken anew.
    del tensors, tensor, on_host, there
    again = [torch.empty(5 * MIB, device="cuda") for _ in range(30)]
    facts["spilled_bytes_again"] = runtime().allocator.kind_stats(0)["managed"]["spilled_bytes"]
    facts["again"] = len(again)
    return facts


def device_spill() -> dict[str, Any]:
    """600 MiB of plain device tensors under a budget of 256 MiB, and as much again later."""
    allocator, kinds = runtime().allocator, []
    for _ in range(2):
        tensors = [torch.empty(5 * MIB, device="cuda") for _ in range(30)]
        for number, tensor in enumerate(tensors):
            tensor.fill_(number)
        values = [sorted({t.min().item(), t.max().item()}) for t in tensors]
        by_address = {block.address: block.memory_kind for block in umem.tensors()}
        kinds.append([by_address[tensor.data_ptr()] for tensor in tensors])
        del tensors, tensor
    return {
        "kinds": kinds,
        "values": values,
        "budget_peak_bytes": allocator.stats(0)["budget_bytes"]["peak"],
        "spilled_bytes": allocator.kind_stats(0)["pinned"]["spilled_bytes"],
    }


def cap() -> dict[str, Any]:
    """A request beyond the cap on managed memory."""
    kept = empty(32 * MIB)
    try:
        empty(128 * MIB)
    except torch.OutOfMemoryError as error:
        text = str(error)
    else:
        text = ""
    fits = empty(16 * MIB)
    return {
        "text": text,
        "managed_bytes": runtime().allocator.managed_bytes(),
        "fits": [kept.numel(), fits.numel()],
    }


def rmm_managed() -> dict[str, Any]:
    """A small model trained in managed memory without advice."""
    torch.manual_seed(0)
    first = nn.Linear(256, 1024)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(1024, 16)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, target = torch.randn(64, 256, device="cuda"), torch.randn(64, 16, device="cuda")
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (model(inputs) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    kinds = sorted({block.memory_kind for block in umem.tensors()})
    return {"losses": losses, "kinds": kinds, "weight": advice(first.weight)}


def kinds() -> dict[str, Any]:
    """Each class in the kind of memory that the policy gives it."""
    facts: dict[str, Any] = {}
    for tensor_class in umem.TensorClass:
        for size_bytes in (4096, 4 * MIB):
            with umem.tensor_class(tensor_class):
                tensor = torch.full((size_bytes // 4,), 2.0, device="cuda")
            [kind] = [b.memory_kind for b in umem.tensors() if b.address == tensor.data_ptr()]
            total = (tensor * 3).sum().item()
            facts[f"{tensor_class} {size_bytes}"] = [kind, total == 6 * (size_bytes // 4)]
            del tensor
    facts["reserved"] = {
        kind: stats["reserved_bytes"] for kind, stats in runtime().allocator.kind_stats(0).items()
    }
    return facts


def advised() -> dict[str, Any]:
    """Advice of frozen weights and of host-placed optimizer state, on a model that trains."""
    torch.manual_seed(0)
    frozen = nn.Linear(1024, 1024, bias=False).cuda().requires_grad_(False)  # 4 MiB
    trained = nn.Linear(1024, 1024, bias=False).cuda()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    model = nn.Sequential(frozen, trained)
    loaded = advice(frozen.weight)
    model(torch.randn(8, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    facts: dict[str, Any] = {
        "frozen, before its first forward": loaded,
        "frozen": advice(frozen.weight),
        "trained": advice(trained.weight),
        "state": advice(optimizer.state[trained.weight]["exp_avg"]),
    }
    # The frozen weights' block passes to an activation.
    address = frozen.weight.data_ptr()
    del model, frozen
    gc.collect()
    taken: list[torch.Tensor] = []
    while len(taken) < 20 and not (taken and taken[-1].data_ptr() == address):
        taken.append(empty(4 * MIB))
    facts["same block"] = taken[-1].data_ptr() == address
    facts["reused"] = advice(taken[-1])
    facts["failed_hints"] = runtime().allocator.stats(0)["num_failed_hints"]
    return facts


MODES = {
    "spill": spill,
    "device_spill": device_spill,
    "cap": cap,
    "rmm_managed": rmm_managed,
    "kinds": kinds,
    "advised": advised,
}

if __name__ == "__main__":
    mode, policy = sys.argv[1:]
    umem.enable(policy)
    print(json.dumps(MODES[mode]()))
