"""Live tensors and memory by class, read from the allocator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import NoneType

import torch

from umem.core.arguments import check_argument
from umem.core.classes import TensorClass
from umem.core.units import format_bytes
from umem.runtime.state import fallback_reason, fell_back, runtime

__all__ = [
    "ClassMemory",
    "LiveTensor",
    "device_number",
    "memory_by_class",
    "memory_summary",
    "tensor_class",
    "tensors",
]

_CLASSES = tuple(TensorClass)


@dataclass(frozen=True)
class LiveTensor:
    """An allocated block. Tensors that are views of one storage are one block."""

    address: int
    bytes: int
    """As requested."""
    block_bytes: int
    """As allocated: rounded to 512 bytes, or to 64 KiB from 2 MiB on."""
    tensor_class: TensorClass
    device: int
    memory_kind: str
    """``managed``, ``device``, ``system`` or ``pinned``."""


@dataclass(frozen=True)
class ClassMemory:
    """The memory of one tensor class on one device, in blocks and bytes of blocks."""

    tensors: int
    allocated_bytes: int
    peak_allocated_bytes: int
    requested_bytes: int
    """Bytes as requested, before rounding."""
    allocations: int
    """Blocks allocated since the start or `torch.cuda.reset_accumulated_memory_stats`."""


def tensors(device: int | None = None) -> list[LiveTensor]:
    """Live blocks, ordered by address.

    Parameters
    ----------
    device
        Only the blocks of this GPU.

    Raises
    ------
    EnableError
        If umem is not enabled.
    """
    check_argument("device", device, (int, NoneType), "give the number of a GPU, or None for all")
    return [
        LiveTensor(address, requested, block, _CLASSES[number], where, kind)
        for address, requested, block, number, where, kind in runtime().allocator.live_blocks()
        if device is None or where == device
    ]


def memory_by_class(device: int | None = None) -> dict[TensorClass, ClassMemory]:
    """Memory of each tensor class on a GPU, by default the current one.

    ``EnableError`` if umem is not enabled.
    """
    stats = runtime().allocator.class_stats(device_number(device))
    return {
        name: ClassMemory(
            tensors=of_class["allocation"]["current"],
            allocated_bytes=of_class["allocated_bytes"]["current"],
            peak_allocated_bytes=of_class["allocated_bytes"]["peak"],
            requested_bytes=of_class["requested_bytes"]["current"],
            allocations=of_class["allocation"]["allocated"],
        )
        for name, of_class in zip(_CLASSES, stats, strict=True)
    }


def memory_summary(device: int | None = None) -> str:
    """A GPU's memory by tensor class, as a table to print.

    After a fallback to torch's allocator, a sentence that says so. ``EnableError`` if umem is not
    enabled.
    """
    reason = fallback_reason()
    if reason is not None:
        return f"umem is not in use, torch's own allocator stays: {reason}"
    state, number = runtime(), device_number(device)
    stats, kinds = state.allocator.stats(number), state.allocator.kind_stats(number)
    allocated, blocks = stats["allocated_bytes"]["all"], stats["allocation"]["all"]
    total = (blocks["current"], allocated["current"], allocated["peak"], blocks["allocated"])
    by_class = {
        str(name): (it.tensors, it.allocated_bytes, it.peak_allocated_bytes, it.allocations)
        for name, it in memory_by_class(number).items()
    }
    rows = [("class", "tensors", "now", "peak", "allocations")] + [
        (name, f"{tensors:,}", format_bytes(now), format_bytes(peak), f"{allocations:,}")
        for name, (tensors, now, peak, allocations) in (by_class | {"all": total}).items()
    ]
    reserved = stats["reserved_bytes"]["all"]
    end = f"reserved {format_bytes(reserved['current'])}, peak {format_bytes(reserved['peak'])}"
    by_kind = []
    for name, kind in kinds.items():
        if kind["reserved_bytes"]:
            spilled = f" ({format_bytes(kind['spilled_bytes'])} of it over the budget, on the host)"
            text = f"{format_bytes(kind['reserved_bytes'])} {name}"
            by_kind.append(text + (spilled if kind["spilled_bytes"] else ""))
    if by_kind:
        end += f": {', '.join(by_kind)}"
    if state.allocator.is_paused(number):
        end += "\npaused: what was in expandable segments is on the host until umem.resume()"
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    heading, *lines, sums = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    rule = "-" * len(heading)
    title = f"GPU {number}, policy {state.policy.name}"
    return "\n".join([title, rule, heading, rule, *lines, rule, sums, rule, end])


@contextmanager
def tensor_class(name: str | TensorClass) -> Iterator[None]:
    """Give every tensor allocated in a ``with`` block a class, in any phase.

    It also holds for threads without an override, such as autograd's or a data loader's. After a
    fallback to torch's allocator it does nothing.

    Parameters
    ----------
    name
        A :class:`umem.TensorClass` or its name.

    Raises
    ------
    ValueError
        If there is no such class.
    EnableError
        If umem is not enabled.

    Examples
    --------
    >>> with umem.tensor_class("weights"):  # doctest: +SKIP
    ...     table = torch.load("table.pt", map_location="cuda")
    """
    try:
        chosen = TensorClass(name)
    except ValueError:
        known = ", ".join(map(str, _CLASSES))
        raise ValueError(f"no tensor class {name!r}: it is one of {known}") from None
    if fell_back():
        yield
        return
    with runtime().allocator.class_override(chosen.number):
        yield


def device_number(device: int | None) -> int:
    """The number of a GPU that a caller names; None for the current one."""
    check_argument("device", device, (int, NoneType), "give the number of a GPU, such as 0")
    return torch.cuda.current_device() if device is None else device
