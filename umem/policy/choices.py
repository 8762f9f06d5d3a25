"""What `kind: auto` means on a machine, with reasons from the machine's figures.

Only memory that the card shows as free when it is free is chosen: the pages of managed memory leave
the device too, but the driver keeps the memory behind them, so that a device budget would not be
what the card shows. A policy that wants pages says ``kind: managed``.
"""

from __future__ import annotations

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


def choose_rule(tensor_class: TensorClass, rule: ClassRule, hardware: Hardware) -> Choice:
    """Choose kind and mechanism of a class on a machine: what adds least to a training step.

    The rule's ``min_bytes`` and ``fraction`` stay.
    """
    kind: MemoryKind = "device"
    mechanism: Mechanism
    device, mapped = _rate(hardware.memory_bytes_per_s), _rate(hardware.mapped_bytes_per_s)
    # Seconds that a byte adds to a step, copied in and out, or fetched and evicted as pages, beside
    # the computation, which that slows.
    streamed = 2 * hardware.copy_slowdown_s_per_byte
    migrated = _per_gib(
        2 * (hardware.page_slowdown_s_per_byte + hardware.call_s / hardware.call_bytes)
    )
    match tensor_class:
        case TensorClass.WEIGHTS | TensorClass.FROZEN_WEIGHTS:
            mechanism = "stream"
            reason = (
                f"Kernels use device memory at {device}; what the budget has no room for is copied "
                "from page-locked memory ahead of each use, at "
                f"{_rate(hardware.copy_to_device_bytes_per_s)}."
            )
        case TensorClass.GRADIENTS:
            mechanism = "copy"
            reason = (
                "What the budget has no room for is copied to page-locked memory in the backward "
                f"pass, and is used there at {mapped}."
            )
        case TensorClass.OPTIMIZER_STATE:
            kind = "pinned"
            # Read and written over the link by the update itself, which waits for both.
            in_place = 2 / hardware.mapped_bytes_per_s
            if streamed <= in_place:
                mechanism = "stream"
                reason = (
                    f"A streamed GiB adds {_per_gib(streamed)} to a step; updated in place on the "
                    f"host it would add {_per_gib(in_place)}, as migrating pages {migrated}."
                )
            else:
                mechanism = "map"
                reason = (
                    f"A GiB that is updated in place on the host adds {_per_gib(in_place)} to a "
                    f"step; streamed it would add {_per_gib(streamed)}, as migrating pages "
                    f"{migrated}."
                )
        case TensorClass.ACTIVATIONS:
            mechanism = "copy"
            reason = (
                "A GiB that is copied to page-locked memory and back adds "
                f"{_per_gib(streamed)} to the computation beside it; as pages it would add "
                f"{migrated}."
            )
        case TensorClass.OTHER:
            mechanism = "keep"
            reason = f"Kernels use device memory at {device}, host memory in place at {mapped}."
    chosen = ClassRule(
        kind=kind, mechanism=mechanism, min_bytes=rule.min_bytes, fraction=rule.fraction
    )
    return Choice(chosen, reason)


def _rate(bytes_per_s: float) -> str:
    tera = bytes_per_s >= 1e12
    return f"{bytes_per_s / (1e12 if tera else 1e9):.3g} {'TB' if tera else 'GB'}/s"


def _per_gib(s_per_byte: float) -> str:
    return f"{s_per_byte * 2**30 * 1e3:.3g} ms"
