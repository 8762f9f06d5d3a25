"""Known transfers in a process of its own, and what is recorded of them there."""

from __future__ import annotations

import torch
from umem_bench.train.scratch import move_known

import umem

__all__ = ["COPIED_BYTES", "known_moves"]

COPIED_BYTES = 8 << 20


def known_moves() -> tuple[str, int, int, int]:
    """Who recorded, and the bytes that came to the device by a hint, by faults, and as a copy."""
    host = torch.ones(COPIED_BYTES, dtype=torch.uint8).pin_memory()
    torch.zeros(1, device="cuda")
    with umem.profile(steps=1) as profile:
        move_known()
        host.cuda()
        profile.step()
    report = profile.report()
    hinted_bytes = report.moved_bytes("to_device", "hint")
    faulted_bytes = report.moved_bytes("to_device") - hinted_bytes
    return report.source, hinted_bytes, faulted_bytes, report.memory_ops_bytes
