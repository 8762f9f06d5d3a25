"""Hardware: the costs of a machine's memory system, each figure with its source.

A :class:`Hardware` comes from a profile (:func:`load_hardware`) or from the machine at hand
(:func:`detect_hardware`). It is all that planner and simulator know of a machine, so a policy
can be tried for a machine that is not at hand.
"""

from __future__ import annotations

from umem.hardware.load import detect_hardware, load_hardware
from umem.hardware.model import Hardware, Source, explain_hardware, figures, with_durations
from umem.hardware.profile import hardware_names

__all__ = [
    "Hardware",
    "Source",
    "detect_hardware",
    "explain_hardware",
    "figures",
    "hardware_names",
    "load_hardware",
    "with_durations",
]
