"""Known transfers, and their records, for a process of its own."""

from __future__ import annotations

import torch
from managed_memory import move_known

import umem

COPIED_BYTES = 8 << 20


def known_moves() -> tuple[str, int, int, int]:
    """Source of the records, and bytes to the device by a hint, by faults, and by a copy."""
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
