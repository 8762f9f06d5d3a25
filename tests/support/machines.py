"""A machine that nobody has, for results that nobody has measured."""

from __future__ import annotations

from umem_bench.results import Machine

__all__ = ["MADE_UP_MACHINE"]

MADE_UP_MACHINE = Machine(
    gpu="Made-up GPU",
    driver="1.2",
    cuda="13.0",
    torch="2.13.0",
    rmm="26.10.0",
    umem="0.1.0",
    python="3.11.7",
    system="Linux",
    cpu="Made-up CPU",
    cpu_count=4,
)
