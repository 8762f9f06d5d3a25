"""Blocks that run forward again in the backward pass, on a GPU: all bits are stock's."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_jobs import SIDE_BY_SIDE, Start, under

pytestmark = pytest.mark.slow

MODES = ("dropout", "accumulated", "float32", "recurrent")
SHARE = 0.6
ROOM = 3.0
"""Of the peak with checkpoints: without them all fits."""


def compare(mode: str, share: float, start: Start, **variables: str) -> dict[str, Any]:
    """Compare a run within a share of stock's peak with stock; returns what its tuner did."""
    stock: dict[str, Any] = start("recomputing.py", mode, **SIDE_BY_SIDE).facts()
    budget_bytes = int(share * stock["peak_bytes"])
    job = start("recomputing.py", mode, **SIDE_BY_SIDE, **under("sft", budget_bytes), **variables)
    found: dict[str, Any] = job.facts()
    print(mode, stock["step_ms"], found["step_ms"], found["tuning"])
    for name in ("losses", "weights", "random"):
        assert found[name] == stock[name], name
    (tuning,) = found["tuning"]
    return dict(tuning)


@pytest.mark.parametrize("mode", MODES)
def test_all_bits_equal_the_stock_run(mode: str, start: Start) -> None:
    # Beside other work, copies may hide behind slow passes.
    assert compare(mode, SHARE, start, SLOW_LINK="1")["recomputed"] > 0


def test_results_of_cheap_modules_are_made_again(start: Start) -> None:
    """Copies take so long that a plan without loses time."""
    found = compare("modules", SHARE, start, SLOW_LINK="1")
    assert found["remakes"] or found["recomputed"]


def test_checkpoints_are_left_out_where_there_is_room(start: Start) -> None:
    assert compare("checkpoints", ROOM, start)["left_out"] > 0
