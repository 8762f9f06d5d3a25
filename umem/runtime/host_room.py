"""This process's part of host memory, among the processes that umem sees.

A launcher tells how many ranks a host has (:mod:`umem.hardware.host_share`). Where none does, the
processes of this user that are under umem divide what is left, anew whenever one begins or ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from umem.hardware.host_memory import PINNED_SHARE
from umem.hardware.host_share import HostShare, host_share

if TYPE_CHECKING:
    from umem.runtime._native import Allocator

__all__ = ["divide_host", "share_bytes"]

_processes = 1
"""Seen last."""


def divide_host(allocator: Allocator, pinned_share: float, processes: int) -> None:
    """Move the cap on page-locked memory to this process's part of what the host has left.

    `pinned_share` is what such memory may take of the process's share, and `processes` how many are
    under umem, this one included. The first process alone keeps the cap that it began with.
    """
    global _processes
    is_alone = _processes == processes == 1
    _processes = processes
    share = _share()
    if is_alone or share is None or share.source:
        return
    allocator.set_pinned_room(int(pinned_share / PINNED_SHARE * share.left_bytes))


def share_bytes() -> int | None:
    """What this process may take of the host, as it is now; None if unknown."""
    share = _share()
    return None if share is None else share.share_bytes


def _share() -> HostShare | None:
    return host_share(processes=_processes)
