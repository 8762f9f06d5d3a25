"""A machine as rows of a table."""

from __future__ import annotations

from typing import NamedTuple

from umem.hardware._fields import figures, quantity_of
from umem.hardware._model import Hardware, Source

__all__ = ["HardwareRow", "explain_hardware"]


class HardwareRow(NamedTuple):
    """One figure of a machine."""

    field: str
    """Such as ``call_s``, or ``flops_per_s.bf16`` for one precision."""
    value: str
    """With its unit, such as ``45 us``."""
    source: Source | None
    """None where a machine made in Python states none."""


def explain_hardware(hardware: Hardware) -> list[HardwareRow]:
    """Every figure of a machine with its source, in the order of the fields."""
    return [
        HardwareRow(name, quantity_of(name).format(value), hardware.sources.get(name))
        for name, value in figures(hardware).items()
    ]
