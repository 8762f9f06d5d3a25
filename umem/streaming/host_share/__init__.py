"""The host's share of a step: exact updates where state is at home, by the host's cores.

:mod:`host_update` is the face. Which operations an update rounds is in :mod:`forms`, and
:mod:`proof` finds out which of them this torch's kernels have, on this device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from umem.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from umem.streaming.host_share.forms import (
        Ahead,
        Decay,
        First,
        Form,
        Hyperparameters,
        Powers,
        Second,
        StepKind,
        Weight,
        constants,
        forms_of,
        kind_of,
    )
    from umem.streaming.host_share.host_update import HostSpan, HostUpdate, near_cpus
    from umem.streaming.host_share.proof import (
        BFLOAT16_ROUNDS,
        ROUNDS,
        DeviceOptimizer,
        Elements,
        prove,
        random_elements,
        telling,
    )

__all__ = [
    "BFLOAT16_ROUNDS",
    "ROUNDS",
    "Ahead",
    "Decay",
    "DeviceOptimizer",
    "Elements",
    "First",
    "Form",
    "HostSpan",
    "HostUpdate",
    "Hyperparameters",
    "Powers",
    "Second",
    "StepKind",
    "Weight",
    "constants",
    "forms_of",
    "kind_of",
    "near_cpus",
    "prove",
    "random_elements",
    "telling",
]

__getattr__ = lazy_names(
    __name__,
    {
        "forms": "Ahead Decay First Form Hyperparameters Powers Second StepKind Weight "
        "constants forms_of kind_of",
        "host_update": "HostSpan HostUpdate near_cpus",
        "proof": "BFLOAT16_ROUNDS ROUNDS DeviceOptimizer Elements prove random_elements telling",
    },
)
