"""Published shares of unified-memory activity."""

from __future__ import annotations

from dataclasses import dataclass

from umem.core.report import MigrationReport

__all__ = ["PUBLISHED_UM_SHARES", "published_share"]


@dataclass(frozen=True)
class PublishedShare:
    """A published share of unified-memory activity in a workload's memory operations."""

    workload: str
    hardware: str
    """What the names of its profiles begin with."""
    share: float
    """From 0 to 1. Whether of count, time or bytes was not published."""
    source: str


_NVIDIA = "NVIDIA, Llama-2-7B on one GH200 under RMM managed memory"

PUBLISHED_UM_SHARES = (
    PublishedShare("llama-2-7b-lora", "gh200-", 0.011, _NVIDIA),
    PublishedShare("llama-2-7b-sft", "gh200-", 0.098, _NVIDIA),
)


def published_share(report: MigrationReport) -> PublishedShare | None:
    """What was published for a report's workload on its hardware, if anything was."""
    for published in PUBLISHED_UM_SHARES:
        if published.workload == report.workload and report.hardware.startswith(published.hardware):
            return published
    return None
