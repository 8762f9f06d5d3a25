"""Hardware: what a machine's memory system costs, each figure with its source.

A :class:`Hardware` comes from a profile (:func:`load_hardware`) or from the machine at hand
(:func:`detect_hardware`). Planner and simulator work with it alone, so a policy can be tried for a
machine that nobody here owns.
"""

from __future__ import annotations

from umem.hardware.load import detect_hardware, load_hardware
from umem.hardware.model import (
    EvictionOrder,
    FaultEviction,
    Hardware,
    HardwareRow,
    Source,
    explain_hardware,
    figures,
)
from umem.hardware.profile import hardware_dir, hardware_names
from umem.hardware.roofline import with_durations

__all__ = [
    "EvictionOrder",
    "FaultEviction",
    "Hardware",
    "HardwareRow",
    "Source",
    "detect_hardware",
    "explain_hardware",
    "figures",
    "hardware_dir",
    "hardware_names",
    "load_hardware",
    "with_durations",
]
