"""Blocks that run forward again in the backward pass, on a GPU: all bits are stock's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.gpu.conftest import Job

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

MODES = ("dropout", "accumulated", "float32")
VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "UMEM_MANAGED_LIMIT": "512MiB"}


@pytest.mark.parametrize("mode", MODES)
def test_all_bits_equal_the_stock_run(mode: str, start: Callable[..., Job]) -> None:
    stock: dict[str, Any] = start("recomputing.py", mode, **VARIABLES).facts()
    budget = str(int(0.6 * stock["peak_bytes"]))
    found: dict[str, Any] = start(
        "recomputing.py", mode, UMEM_DEVICE_BUDGET=budget, **VARIABLES
    ).facts()
    print(mode, stock["step_ms"], found["step_ms"], found["tuning"])
    for name in ("losses", "weights", "random"):
        assert found[name] == stock[name], name
    (tuning,) = found["tuning"]
    assert tuning["recomputed"] > 0
