"""What this machine and this Python environment offer umem, what is missing, and the remedy.

:func:`collect` reads the facts and judges nothing; :func:`diagnose` judges them and reads
nothing but a policy file that the environment names. Neither needs a GPU, torch, RMM or the
native library: their absence is a finding.
"""

from umem.doctor._collect import collect
from umem.doctor._diagnose import diagnose
from umem.doctor._facts import PACKAGES, Environment, Host, Native, Torch
from umem.doctor._report import Check, Feature, Report, Section, Status, Verdict

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
