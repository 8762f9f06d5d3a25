"""What a diagnosis finds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from umem.hardware.capabilities import Capabilities

__all__ = ["Check", "Feature", "Report", "Section", "Status", "Verdict", "failed_checks"]


class Status(StrEnum):
    """How a check came out; `FAIL` means that the swap cannot work until it is mended."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    INFO = "info"


@dataclass(frozen=True)
class Check:
    """One finding: what was looked at, what was found, why it matters, what to do."""

    name: str
    status: Status
    value: str
    why: str = ""
    remedy: str = ""


class Verdict(StrEnum):
    """Whether a feature works here."""

    YES = "yes"
    PARTLY = "partly"
    NO = "no"


@dataclass(frozen=True)
class Feature:
    """Something that users reach for, whether it works on this machine, and why."""

    name: str
    verdict: Verdict
    why: str
    remedy: str = ""


@dataclass(frozen=True)
class Section:
    """Checks that belong together."""

    title: str
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class Report:
    """All findings."""

    sections: tuple[Section, ...]
    features: tuple[Feature, ...]
    devices: tuple[Capabilities, ...]

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that keep the swap from working."""
        return failed_checks(self.sections)

    @property
    def swap_works(self) -> bool:
        """Whether ``umem.enable`` would take over the allocator here."""
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        """Return the report ready for JSON."""
        return {
            "swap_works": self.swap_works,
            "sections": [asdict(section) for section in self.sections],
            "features": [asdict(feature) for feature in self.features],
            "devices": [device.to_dict() for device in self.devices],
        }


def failed_checks(sections: Iterable[Section]) -> tuple[Check, ...]:
    """Return the checks of all sections that came out as `Status.FAIL`."""
    checks = (check for section in sections for check in section.checks)
    return tuple(check for check in checks if check.status is Status.FAIL)
