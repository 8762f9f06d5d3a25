"""From facts to findings."""

from __future__ import annotations

from umem.doctor._facts import Environment
from umem.doctor._features import features
from umem.doctor._machine import gpu_checks, limit_checks
from umem.doctor._report import Report, Section, failed_checks
from umem.doctor._settings import setting_checks
from umem.doctor._software import library_checks, system_checks, torch_checks, umem_checks

__all__ = ["diagnose"]


def diagnose(environment: Environment) -> Report:
    """Judge the facts.

    Parameters
    ----------
    environment : Environment
        From :func:`umem.doctor.collect`.
    """
    sections = (
        Section("System", system_checks(environment)),
        Section("umem", umem_checks(environment)),
        Section("PyTorch", torch_checks(environment)),
        Section("Libraries", library_checks(environment)),
        Section("GPUs", gpu_checks(environment)),
        Section("Memory and limits", limit_checks(environment)),
        Section("Settings", setting_checks(environment)),
    )
    return Report(
        sections=sections,
        features=features(environment, failed_checks(sections)),
        devices=environment.devices or (),
    )
