"""Published shares of unified-memory activity."""

from __future__ import annotations

from collections.abc import Mapping

from umem.core.report import MigrationReport

__all__ = ["PUBLISHED_BY", "PUBLISHED_UM_SHARES", "published_share"]

PUBLISHED_UM_SHARES: Mapping[str, float] = {"llama-2-7b-lora": 0.011, "llama-2-7b-sft": 0.098}
"""Of a workload's memory operations; whether of count, time or bytes was not published."""

PUBLISHED_BY = "NVIDIA, Llama-2-7B on one GH200 under RMM managed memory"


def published_share(report: MigrationReport) -> float | None:
    """What was published for a report's workload on its hardware, if anything was."""
    on_gh200 = report.hardware.startswith("gh200-")
    return PUBLISHED_UM_SHARES.get(report.workload) if on_gh200 else None
