"""Trainings on two GPUs of a host: ``two_cards.py MODE ARGUMENT...``; facts as JSON.

``both STEPS``: a training on each GPU, in this process; with ``UMEM_POLICY`` under umem.
``rank STEPS NUMBER FOLDER HOST_BYTES``: one of two ranks, which see both GPUs. The host seems to
have so much memory, of which the rank takes for page-locked tensors what it may.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from begin import begin
from managing import Training, manager_facts
from torch import distributed

import umem
from umem.hardware import host_share
from umem.hardware.host_memory import HostMemory
from umem.managing import managers, residency
from umem.runtime import host_room
from umem.runtime.inspection import memory_by_class
from umem.runtime.state import runtime
from umem.streaming import streamed_trainings

MIB = 1 << 20
DEVICES = range(2)


def made_on(device: int) -> Training:
    with torch.cuda.device(device):
        return Training()


def both(steps: int) -> list[dict[str, Any]]:
    """By device: losses, and what the manager there says."""
    trainings = [made_on(device) for device in DEVICES]
    for _ in range(steps):
        for device, training in enumerate(trainings):
            with torch.cuda.device(device):
                training.step()
                training.losses[-1].item()
        for manager in managers():
            manager.wait_for_search(60)
    found = []
    for device, training in enumerate(trainings):
        facts: dict[str, Any] = {
            "losses": [loss.item() for loss in training.losses],
            "peak_bytes": torch.cuda.max_memory_allocated(device),
        }
        for manager in managers():
            if manager.device.index == device:
                here = memory_by_class(device)
                away = manager.away_bytes()
                facts |= manager_facts(manager)
                facts["resident"] = residency(device) == {
                    it: here[it].allocated_bytes - away.get(it, 0) for it in here
                }
        found.append(facts)
    return found


def rank(steps: int, number: int, folder: str, host_bytes: int) -> dict[str, Any]:
    """Losses, the device's memory, and how much of the host the rank has taken."""
    torch.cuda.set_device(number)
    training = Training()
    training.steps(steps)
    losses = [loss.item() for loss in training.losses]
    allocator = runtime().allocator
    taken: list[torch.Tensor] = []
    with umem.tensor_class("optimizer_state"):
        while sum(it.nbytes for it in taken) < host_bytes:
            try:
                taken.append(torch.empty(8 * MIB, dtype=torch.uint8, device="cuda"))
            except RuntimeError:
                break
    pinned_bytes = allocator.kind_stats(number)["pinned"]["reserved_bytes"]
    # Both hold what they have taken.
    store = distributed.FileStore(  # type: ignore[attr-defined]
        str(Path(folder) / "store"), len(DEVICES)
    )
    store.set(f"taken {number}", "")
    store.wait([f"taken {it}" for it in DEVICES])
    other = 1 - number
    return {
        "losses": losses,
        "streamed": len(streamed_trainings()),
        "budget_peak_bytes": allocator.stats(number)["budget_bytes"]["peak"],
        "others_bytes": allocator.stats(other)["reserved_bytes"]["all"]["peak"],
        "share_bytes": host_room.share_bytes(),
        "pinned_bytes": pinned_bytes,
    }


def main() -> Any:
    mode, steps, *others = sys.argv[1:]
    if mode == "rank":
        size_bytes = int(others[2])

        def read_host(_root: Path = Path("/")) -> HostMemory:
            return HostMemory(size_bytes, size_bytes, limit=None)

        setattr(host_share, "host_memory", read_host)  # noqa: B010
    begin()
    if mode == "both":
        return both(int(steps))
    return rank(int(steps), int(others[0]), others[1], int(others[2]))


if __name__ == "__main__":
    print(json.dumps(main()))
