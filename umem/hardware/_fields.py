"""The fields of a profile: what kind of value each holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, get_args

from umem.hardware._model import EvictionOrder, FaultEviction, Hardware
from umem.hardware._quantities import (
    BLOCK,
    CAPACITY,
    COUNT,
    FLAG,
    FLOPS,
    RATE,
    SHARE,
    SIZE,
    SLOWDOWN,
    TIME,
    Quantity,
    word,
)
from umem.trace import Precision

__all__ = ["FIELDS", "PRECISIONS", "figures", "quantity_of"]

PRECISIONS = tuple(precision.name.lower() for precision in Precision)
"""Keys of ``flops_per_s``; the number of a precision is its place."""

_KINDS: dict[str, Quantity] = {
    "device_bytes": CAPACITY,
    "host_bytes": CAPACITY,
    "block_bytes": BLOCK,
    "page_bytes": BLOCK,
    "flops_per_s": FLOPS,
    "memory_bytes_per_s": RATE,
    "launch_s": TIME,
    "to_device_bytes_per_s": RATE,
    "to_host_bytes_per_s": RATE,
    "link_bytes_per_s": RATE,
    "call_s": TIME,
    "call_bytes": SIZE,
    "copy_to_device_bytes_per_s": RATE,
    "copy_to_host_bytes_per_s": RATE,
    "copy_slowdown_s_per_byte": SLOWDOWN,
    "page_slowdown_s_per_byte": SLOWDOWN,
    "mapped_read_bytes_per_s": RATE,
    "mapped_write_bytes_per_s": RATE,
    "mapped_bytes_per_s": RATE,
    "fault_batch_s": TIME,
    "faults_per_batch": COUNT,
    "fault_service_s": TIME,
    "speculation_threshold": SHARE,
    "fault_eviction": word(*get_args(FaultEviction)),
    "eviction_order": word(*get_args(EvictionOrder)),
    "ats": FLAG,
    "access_counter_threshold": COUNT,
}

FIELDS: Mapping[str, Quantity] = MappingProxyType(
    {
        field.name: _KINDS[field.name]
        for field in fields(Hardware)
        if field.name not in ("name", "description", "sources")
    }
)
"""By name, in the order of :class:`umem.hardware.Hardware`; ``flops_per_s`` holds one for each
precision."""


def quantity_of(name: str) -> Quantity:
    """Kind of a field, or of one precision such as ``flops_per_s.bf16``."""
    return FIELDS[name.partition(".")[0]]


def figures(hardware: Hardware) -> dict[str, Any]:
    """Values of a machine by field, with one entry for each precision."""
    values: dict[str, Any] = {}
    for name in FIELDS:
        value = getattr(hardware, name)
        if isinstance(value, Mapping):
            values |= {f"{name}.{key}": value[key] for key in PRECISIONS if key in value}
        else:
            values[name] = value
    return values
