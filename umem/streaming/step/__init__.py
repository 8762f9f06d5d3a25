"""The optimizer's step under a plan: unit by unit, with state that comes and goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from umem.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from umem.streaming.step.known_optimizers import (
        PER_PARAMETER_OPTIMIZERS,
        is_elementwise,
        refusal,
        replaces_state,
    )
    from umem.streaming.step.step import StreamedStep
    from umem.streaming.step.temporary_slots import TemporaryPlan, TemporarySlots
    from umem.streaming.step.unit_names import UnitNames

__all__ = [
    "PER_PARAMETER_OPTIMIZERS",
    "StreamedStep",
    "TemporaryPlan",
    "TemporarySlots",
    "UnitNames",
    "is_elementwise",
    "refusal",
    "replaces_state",
]

__getattr__ = lazy_names(
    __name__,
    {
        "known_optimizers": "PER_PARAMETER_OPTIMIZERS is_elementwise refusal replaces_state",
        "step": "StreamedStep",
        "temporary_slots": "TemporaryPlan TemporarySlots",
        "unit_names": "UnitNames",
    },
)
