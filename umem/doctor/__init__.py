"""What this machine and this Python environment offer umem, what is missing, and the remedy.

:func:`collect` reads the facts and judges nothing; :func:`diagnose` judges them and reads
nothing but a policy file that the environment names. Neither needs a GPU, torch, RMM or the
native library: their absence is a finding.
"""

from __future__ import annotations

from umem.doctor.checks import diagnose
from umem.doctor.facts import PACKAGES, Environment, Host, Native, Torch, collect
from umem.doctor.report import Check, Feature, Report, Section, Status, Verdict

__all__ = [
    "PACKAGES",
    "Check",
    "Environment",
    "Feature",
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
