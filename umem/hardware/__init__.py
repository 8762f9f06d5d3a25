"""Hardware: what a machine's memory system costs, each figure with its source.

A :class:`Hardware` comes from a profile (:func:`load_hardware`) or from the machine at hand
(:meth:`Hardware.detect`). Planner and simulator work with it alone, so a policy can be tried for a
machine that nobody here owns.
"""

from __future__ import annotations

from umem.hardware._explain import HardwareRow, explain_hardware
from umem.hardware._fields import figures
from umem.hardware._load import hardware_dir, hardware_names, load_hardware
from umem.hardware._model import EvictionOrder, FaultEviction, Hardware, Source
from umem.hardware._roofline import with_durations

__all__ = [
    "EvictionOrder",
    "FaultEviction",
    "Hardware",
    "HardwareRow",
    "Source",
    "explain_hardware",
    "figures",
    "hardware_dir",
    "hardware_names",
    "load_hardware",
    "with_durations",
]
