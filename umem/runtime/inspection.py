"""What is in the allocator's hands: live blocks, and the memory of each class."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from umem.core.classes import TensorClass
from umem.core.units import format_bytes
from umem.runtime.state import fell_back, runtime

__all__ = [
    "ClassMemory",
    "LiveTensor",
    "memory_by_class",
    "memory_summary",
    "tensor_class",
    "tensors",
]

_CLASSES = tuple(TensorClass)


@dataclass(frozen=True)
class LiveTensor:
    """A block in a tensor's hands. Tensors that are views of one storage are one block."""

    address: int
    bytes: int
    """As asked for."""
    block_bytes: int
    """As handed out: rounded to 512 bytes, or 64 KiB from 2 MiB on."""
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
    """Bytes as asked for, before rounding."""
    allocations: int
    """Blocks handed out since the start or `torch.cuda.reset_accumulated_memory_stats`."""


def tensors(device: int | None = None) -> list[LiveTensor]:
    """Live blocks by address.

    Parameters
    ----------
    device
        One GPU's blocks only.

    Raises
    ------
    EnableError
        If umem is not enabled.
    """
    return [
        LiveTensor(address, requested, block, _CLASSES[number], where, kind)
        for address, requested, block, number, where, kind in runtime().allocator.live_blocks()
        if device is None or where == device
    ]


def memory_by_class(device: int | None = None) -> dict[TensorClass, ClassMemory]:
    """Memory of each tensor class on a GPU, the current one when none is named.

    Raises
    ------
    EnableError
        If umem is not enabled.
    """
    stats = runtime().allocator.class_stats(_device(device))
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
    """Table of a GPU's memory by tensor class, for people.

    Raises
    ------
    EnableError
        If umem is not enabled.

    Examples
    --------
    >>> print(umem.memory_summary())  # doctest: +SKIP
    """
    state, number = runtime(), _device(device)
    stats, kinds = state.allocator.stats(number), state.allocator.kind_stats(number)
    rows = [("class", "tensors", "now", "peak", "allocations")]
    rows += [
        (
            str(name),
            f"{memory.tensors:,}",
            format_bytes(memory.allocated_bytes),
            format_bytes(memory.peak_allocated_bytes),
            f"{memory.allocations:,}",
        )
        for name, memory in memory_by_class(number).items()
    ]
    total = stats["allocated_bytes"]["all"]
    rows.append(
        (
            "all",
            f"{stats['allocation']['all']['current']:,}",
            format_bytes(total["current"]),
            format_bytes(total["peak"]),
            f"{stats['allocation']['all']['allocated']:,}",
        )
    )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    rule = "-" * len(lines[0])
    reserved = stats["reserved_bytes"]["all"]
    held = ", ".join(
        f"{format_bytes(kind['reserved_bytes'])} {name}"
        + (
            f" ({format_bytes(kind['spilled_bytes'])} of it over the budget, on the host)"
            if kind["spilled_bytes"]
            else ""
        )
        for name, kind in kinds.items()
        if kind["reserved_bytes"]
    )
    return "\n".join(
        [
            f"GPU {number}, policy {state.policy.name}",
            rule,
            lines[0],
            rule,
            *lines[1:-1],
            rule,
            lines[-1],
            rule,
            f"reserved {format_bytes(reserved['current'])}, peak {format_bytes(reserved['peak'])}"
            + (f": {held}" if held else ""),
        ]
    )


@contextmanager
def tensor_class(name: str | TensorClass) -> Iterator[None]:
    """Give every tensor born in a ``with`` block a class, whatever the phase.

    Threads without an override of their own, such as autograd's or a loader's, follow it too.
    After a fallback to torch's allocator it does nothing.

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
    chosen = _class_named(name)
    if fell_back():
        yield
        return
    with runtime().classifier.override(chosen):
        yield


def _class_named(name: str | TensorClass) -> TensorClass:
    try:
        return TensorClass(name)
    except ValueError:
        raise ValueError(
            f"no tensor class {name!r}: it is one of {', '.join(map(str, _CLASSES))}"
        ) from None


def _device(device: int | None) -> int:
    return torch.cuda.current_device() if device is None else device
