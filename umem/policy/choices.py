"""What `kind: auto` means on a machine: one table, with reasons from the machine's figures.

The alternatives of a class differ in what a GiB of it adds to a training step. Only memory that the
card shows as free when it is free is among them: the pages of managed memory leave the device too,
but the driver keeps the memory behind them, so that a device budget would not be what the card
shows. A policy that wants pages says ``kind: managed``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from umem.core.classes import TensorClass
from umem.policy.models import ClassRule, Mechanism, MemoryKind

if TYPE_CHECKING:
    from umem.hardware import Hardware

__all__ = ["Choice", "choose_rule"]


class Choice(NamedTuple):
    """What a rule of kind auto is on a machine."""

    rule: ClassRule
    reason: str
    """One sentence, with the machine's figures."""


@dataclass(frozen=True)
class _Alternative:
    kind: MemoryKind
    mechanism: Mechanism
    added_s_per_byte: Callable[[Hardware], float]
    """Seconds that a byte of the class, once off the device, adds to a step."""
    reason: Callable[[Hardware], str]


def choose_rule(tensor_class: TensorClass, rule: ClassRule, hardware: Hardware) -> Choice:
    """Choose kind and mechanism of a class on a machine: the alternative that adds least to a step.

    Parameters
    ----------
    tensor_class
        The class.
    rule
        Its rule, of kind auto. Its ``min_bytes`` and ``fraction`` stay.
    hardware
        The machine's figures.
    """
    best = min(_ALTERNATIVES[tensor_class], key=lambda it: it.added_s_per_byte(hardware))
    chosen = ClassRule(
        kind=best.kind,
        mechanism=best.mechanism,
        min_bytes=rule.min_bytes,
        fraction=rule.fraction,
    )
    return Choice(chosen, best.reason(hardware))


# What a byte adds to a step, in seconds.


def _streamed(hardware: Hardware) -> float:
    """Copied in and out by copy engines, beside the computation, which they slow."""
    return 2 * hardware.copy_slowdown_s_per_byte


def _in_place(hardware: Hardware) -> float:
    """Read and written over the link by the update itself, which waits for both."""
    return 2 / hardware.mapped_bytes_per_s


def _migrated(hardware: Hardware) -> float:
    """Fetched and evicted as pages, beside the computation, which they slow."""
    return 2 * (hardware.page_slowdown_s_per_byte + hardware.call_s / hardware.call_bytes)


def _nothing(_hardware: Hardware) -> float:
    return 0.0


# Reasons.


def _stays(hardware: Hardware) -> str:
    return (
        f"Kernels use device memory at {_rate(hardware.memory_bytes_per_s)}, host memory in place "
        f"at {_rate(hardware.mapped_bytes_per_s)}."
    )


def _weights_stay(hardware: Hardware) -> str:
    return (
        f"Kernels use device memory at {_rate(hardware.memory_bytes_per_s)}; what the budget has "
        "no room for is copied from page-locked memory ahead of each use, at "
        f"{_rate(hardware.copy_to_device_bytes_per_s)}."
    )


def _is_copied(hardware: Hardware) -> str:
    return (
        "A GiB that is copied to page-locked memory and back adds "
        f"{_per_gib(_streamed(hardware))} to the computation beside it; as pages it would add "
        f"{_per_gib(_migrated(hardware))}."
    )


def _may_be_copied(hardware: Hardware) -> str:
    return (
        "What the budget has no room for is copied to page-locked memory in the backward pass, and "
        f"is used there at {_rate(hardware.mapped_bytes_per_s)}."
    )


def _is_streamed(hardware: Hardware) -> str:
    return (
        f"A streamed GiB adds {_per_gib(_streamed(hardware))} to a step; updated in place on the "
        f"host it would add {_per_gib(_in_place(hardware))}, as migrating pages "
        f"{_per_gib(_migrated(hardware))}."
    )


def _is_in_place(hardware: Hardware) -> str:
    return (
        f"A GiB that is updated in place on the host adds {_per_gib(_in_place(hardware))} to a "
        f"step; streamed it would add {_per_gib(_streamed(hardware))}, as migrating pages "
        f"{_per_gib(_migrated(hardware))}."
    )


def _rate(bytes_per_s: float) -> str:
    tera = bytes_per_s >= 1e12
    return f"{bytes_per_s / (1e12 if tera else 1e9):.3g} {'TB' if tera else 'GB'}/s"


def _per_gib(s_per_byte: float) -> str:
    return f"{s_per_byte * 2**30 * 1e3:.3g} ms"


_DEVICE = _Alternative("device", "keep", _nothing, _stays)
_WEIGHTS = _Alternative("device", "stream", _nothing, _weights_stay)

_ALTERNATIVES: Mapping[TensorClass, tuple[_Alternative, ...]] = {
    TensorClass.WEIGHTS: (_WEIGHTS,),
    TensorClass.FROZEN_WEIGHTS: (_WEIGHTS,),
    TensorClass.GRADIENTS: (_Alternative("device", "copy", _nothing, _may_be_copied),),
    TensorClass.OPTIMIZER_STATE: (
        _Alternative("pinned", "stream", _streamed, _is_streamed),
        _Alternative("pinned", "map", _in_place, _is_in_place),
    ),
    TensorClass.ACTIVATIONS: (_Alternative("device", "copy", _streamed, _is_copied),),
    TensorClass.OTHER: (_DEVICE,),
}
"""By class; of equal alternatives the first is taken."""
