"""Diagnosis of this machine and Python environment: what umem needs, what is missing, the remedy.

:func:`collect` reads the facts; :func:`diagnose` judges them. Neither needs a GPU, torch, RMM,
numba or the native library: if one is missing, the report says so.
"""

from __future__ import annotations

from umem.doctor.checks import Check, Report, Section, Status, diagnose
from umem.doctor.facts import PACKAGES, Environment, GuardLibrary, Host, Native, Torch, collect
from umem.doctor.features import Feature, Verdict

__all__ = [
    "PACKAGES",
    "Check",
    "Environment",
    "Feature",
    "GuardLibrary",
    "Host",
    "Native",
    "Report",
    "Section",
    "Status",
    "Torch",
    "Verdict",
    "collect",
    "diagnose",
]
