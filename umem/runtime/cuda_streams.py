"""CUDA streams of umem's own, outside of torch's pool."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

from umem.core.interrupts import exhaust
from umem.cuda import bindings
from umem.runtime.state import is_enabled, runtime

__all__ = ["CurrentStream", "own_stream", "run_on"]

_T = TypeVar("_T")


class CurrentStream:
    """The current stream of a device in the calling thread."""

    def __init__(self, device: torch.device) -> None:
        from umem.torch_compat import current_raw_stream  # not in a torch without CUDA

        self.handle = functools.partial(current_raw_stream, device.index or 0)
        """Returns its handle alone."""
        self._device = device
        self._known: dict[int, torch.cuda.Stream] = {}
        """torch's objects of streams, by handle: torch makes a new one for each question."""

    def __call__(self) -> torch.cuda.Stream:
        """The object of it that torch has."""
        handle = self.handle()
        known = self._known.get(handle)
        if known is None:
            known = self._known[handle] = torch.cuda.current_stream(self._device)
        return known


@functools.cache
def own_stream(device: torch.device, purpose: str, *, priority: int = 0) -> torch.cuda.Stream:
    """A stream of a device for one purpose, which lives as long as the process.

    torch makes a pool of 32 streams for each priority with the first one that a program asks for.
    On one H100 (driver 580.159, torch 2.11, 2026-11-23) they took 70 MiB of the card, which a
    training without streams of its own has for itself.

    What its work uses of other streams' memory has to be freed when the work is over, or behind the
    wait of a stream of the program: the allocator counts on that.
    """
    create = functools.partial(bindings.create_stream, priority)
    handle = run_on(torch.cuda.current_stream(device), create)
    stream = torch.cuda.ExternalStream(handle, device)
    if is_enabled():
        runtime().allocator.add_own_stream(stream.device_index, stream.cuda_stream)
    return stream


def run_on(stream: torch.cuda.Stream, work: Callable[[], _T]) -> _T:
    """Call a function with a stream, and its device, as the current ones; return its result.

    ``torch.cuda.stream`` is written in Python: an interrupt in its begin or end would leave the
    program on this stream, where its work is in no order with what it has launched before.
    """
    from umem.torch_compat import set_stream  # not in a torch without CUDA

    before = [torch.cuda.current_stream()]
    if before[0].device_index != stream.device_index:
        before.insert(0, torch.cuda.current_stream(stream.device_index))
    go_back = map(set_stream, *zip(*map(_numbers, before), strict=True))
    try:
        set_stream(*_numbers(stream))
        return work()
    finally:
        exhaust(go_back)


def _numbers(stream: torch.cuda.Stream) -> tuple[int, int, int]:
    """What torch knows a stream by."""
    return stream.stream_id, stream.device_index, stream.device_type
