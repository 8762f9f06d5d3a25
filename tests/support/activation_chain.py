"""A small graph whose activations are offloaded, and copies made as late as they may be."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from umem.offloading import ActivationStore, HostBuffer, Mover

KIB = 1 << 10
SIDE = 64
TENSOR_BYTES = SIDE * SIDE * 4

Event = list[Any]


class LazyMover(Mover):
    """Copies at the last moment allowed: when a stream, or the host, waits for the copy.

    Until then what is to arrive is NaN, and what is to leave must still be there.
    """

    def __init__(self) -> None:
        self.waits = 0

    def copy_out(
        self, pairs: Sequence[tuple[torch.UntypedStorage, HostBuffer]], stream: Any
    ) -> Sequence[Any]:
        events: list[Event] = []
        for storage, buffer in pairs:
            copy = (weakref.ref(storage), storage._cdata, buffer.memory, buffer.event)
            # They are over in this order.
            buffer.event = [copy, (events[-1],)] if events else [copy]
            events.append(buffer.event)
        return events

    def copy_in(
        self, buffers: Sequence[tuple[HostBuffer, int]], stream: Any
    ) -> list[tuple[torch.UntypedStorage, Any]]:
        moved: list[tuple[torch.UntypedStorage, Any]] = []
        for buffer, size_bytes in buffers:
            block = torch.full((size_bytes,), 0xFF, dtype=torch.uint8)
            event: Event = [(block, buffer.memory[:size_bytes], buffer.event)]
            buffer.event = event
            moved.append((block.untyped_storage(), event))
        return moved

    def wait(self, stream: Any, event: Event) -> None:
        self.waits += 1
        self.finish(event)

    def finish(self, event: Event) -> None:
        while event:
            *what, before = event.pop()
            if before:
                self.finish(before)
            if not what:
                continue
            if isinstance(what[0], torch.Tensor):
                what[0].copy_(what[1])
            else:
                storage = what[0]()
                assert storage is not None, "dropped before it was copied"
                source = torch.empty(0, dtype=torch.uint8).set_(storage)
                what[2][: source.numel()].copy_(source)


def make_input() -> torch.Tensor:
    return torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0), requires_grad=True)


def chain(x: torch.Tensor) -> torch.Tensor:
    """Saves four tensors, each for one node but the second for two; returns none of them."""
    y = (x * 2).exp()
    return (y.sin() * y).tanh() + 1


@contextmanager
def group(store: ActivationStore, key: object, chosen: set[int] | None = None) -> Iterator[bool]:
    """A group of the store, which has what the block saves; whether it could be opened."""
    is_open = store.open_group(key, chosen)
    try:
        yield is_open
    finally:
        store.close_group()


def saved(
    store: ActivationStore, key: object, x: torch.Tensor, chosen: set[int] | None = None
) -> torch.Tensor:
    with group(store, key, chosen):
        return chain(x)


def released(store: ActivationStore, key: object, x: torch.Tensor) -> torch.Tensor:
    """The same, with all that was saved on the host."""
    y = saved(store, key, x)
    store.send(key)
    store.release(key)
    return y


def gradient(y: torch.Tensor, x: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.autograd.grad(y.sum(), x, **options)[0]
