"""`umem.pause` and `umem.resume`: give a GPU's memory to another engine, and take it again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from umem.core.errors import PauseError
from umem.hardware.host_share import host_share
from umem.runtime.giving_back import let_go
from umem.runtime.inspection import device_number
from umem.runtime.state import runtime

if TYPE_CHECKING:
    from umem.runtime import _native

__all__ = ["PausedMemory", "pause", "paused", "resume"]

_HINTS_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class PausedMemory:
    """What :func:`pause` did with the memory of a GPU."""

    returned_bytes: int
    """Device memory that the driver has again, for any process."""
    kept_bytes: int
    """Device memory that stays: of captured CUDA graphs and other private pools, all plain device
    memory where the driver maps none by handles, and page tables of page-locked memory."""
    evicted_bytes: int
    """Managed memory whose pages were moved to the host; not what the budget has left there from
    the start. NVML goes on counting the emptied pages: the driver keeps them, as the first to take
    when memory is needed."""
    host_bytes: int
    """Host memory that the copy of the live tensors takes."""


def pause(device: int | None = None) -> PausedMemory:
    """Give the memory of a GPU back, and keep what is in it on the host.

    Waits for all work of the GPU, updates of a deferred step included. Cached memory and umem's own
    buffers, on the GPU and on the host, are released. Live tensors are copied to host memory,
    page-locked where it can be had, and their device memory goes back to the driver; tensors whose
    home is on the host stay there, without a copy. Tensors keep their addresses. CUDA's context
    stays, and so does what other libraries allocate themselves.

    Until :func:`resume`, allocations on the GPU raise ``RuntimeError``; tensors may be freed.

    Warnings
    --------
    No thread may use the GPU's tensors meanwhile, not even print one: an access to memory that was
    given back is an illegal address, after which the process can use the GPU no more.

    Parameters
    ----------
    device
        Number of the GPU; by default the current one.

    Returns
    -------
    PausedMemory
        The bytes that were given back, that stay, and that the host holds.

    Raises
    ------
    EnableError
        If umem is not enabled.
    PauseError
        If the GPU is paused already, a CUDA graph is being captured, work on the GPU has failed, or
        the host lacks the memory. Then live tensors stay where they are.

    Examples
    --------
    >>> umem.pause()  # doctest: +SKIP
    >>> engine.generate(prompts)  # another engine has the card  # doctest: +SKIP
    >>> umem.resume()  # doctest: +SKIP
    """
    state, number = runtime(), device_number(device)
    _finish_hints()
    if not state.allocator.is_paused(number):
        let_go(torch.device("cuda", number))
    try:
        return PausedMemory(*state.allocator.pause(number, _most_host_bytes(state.allocator)))
    except RuntimeError as error:
        raise PauseError(str(error)) from error


def resume(device: int | None = None) -> None:
    """Take the memory of a paused GPU again, with the same contents at the same addresses.

    Parameters
    ----------
    device
        Number of the GPU; by default the current one.

    Raises
    ------
    EnableError
        If umem is not enabled.
    PauseError
        If the GPU is not paused, or lacks free memory now. Then it stays paused and nothing is
        lost: free memory on it, and call again.
    """
    state, number = runtime(), device_number(device)
    try:
        state.allocator.resume(number)
    except RuntimeError as error:
        raise PauseError(str(error)) from error


@contextmanager
def paused(device: int | None = None) -> Iterator[PausedMemory]:
    """Pause a GPU for a ``with`` block: :func:`pause`, then :func:`resume`.

    Examples
    --------
    >>> with umem.paused():  # doctest: +SKIP
    ...     engine.generate(prompts)
    """
    number = device_number(device)
    report = pause(number)
    try:
        yield report
    finally:
        resume(number)


def _most_host_bytes(allocator: _native.Allocator) -> int:
    """Host memory that a pause may take.

    What other ranks have taken for theirs is available no more: a share of the rest would count it
    twice, and refuse the last ones. The cap on page-locked memory comes from the share that this
    process had when umem was enabled.
    """
    share = host_share()
    if share is None:
        return sys.maxsize
    own_bytes = min(share.available_bytes, allocator.pinned_room_bytes())
    return max(share.share_bytes, own_bytes)


def _finish_hints() -> None:
    """Wait until native threads move no managed memory to a GPU any more."""
    from umem.managing import managers  # it imports both engines: not with this module

    for manager in managers():
        if not manager.engine.finish(timeout_s=_HINTS_TIMEOUT_S):
            raise PauseError(
                f"hints are still under way after {_HINTS_TIMEOUT_S:.0f} s: call umem.pause() "
                "between two steps, with no other thread in the training"
            )
