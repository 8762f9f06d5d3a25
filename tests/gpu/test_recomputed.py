"""Blocks that run forward again in the backward pass, on a GPU: all bits are stock's."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_jobs import SIDE_BY_SIDE, Start, under

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

MODES = ("dropout", "accumulated", "float32")


@pytest.mark.parametrize("mode", MODES)
def test_all_bits_equal_the_stock_run(mode: str, start: Start) -> None:
    stock: dict[str, Any] = start("recomputing.py", mode, **SIDE_BY_SIDE).facts()
    budget_bytes = int(0.6 * stock["peak_bytes"])
    job = start("recomputing.py", mode, **SIDE_BY_SIDE, **under("sft", budget_bytes))
    found: dict[str, Any] = job.facts()
    print(mode, stock["step_ms"], found["step_ms"], found["tuning"])
    for name in ("losses", "weights", "random"):
        assert found[name] == stock[name], name
    (tuning,) = found["tuning"]
    assert tuning["recomputed"] > 0
