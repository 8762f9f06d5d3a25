"""FSDP2 on one GPU and on two, with streamed state and deferred steps, against stock.

On a GPU parameters are gathered on streams of FSDP2's own, which tests on the CPU do not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from tests.gpu.conftest import Job

pytestmark = pytest.mark.gpu

STEPS, SHARE = 22, 0.6
"""A share of stock's memory that not all of the state has room in."""

VALUES = ("losses", "seen", "weights", "state")


@pytest.mark.parametrize(
    "ranks",
    [
        1,
        pytest.param(
            2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
        ),
    ],
)
def test_deferred_steps_have_stocks_bits(ranks: int, start: Callable[..., Job]) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "UMEM_MANAGED_LIMIT": "512MiB"}
    stock: Any = start("sharding.py", str(STEPS), launcher=launcher, **variables).facts()
    budget_bytes = int(SHARE * max(it["peak_bytes"] for it in stock))
    variables |= {"UMEM_POLICY": "sft", "UMEM_DEVICE_BUDGET": str(budget_bytes)}
    found: Any = start("sharding.py", str(STEPS), launcher=launcher, **variables).facts()
    assert len(found) == len(stock) == ranks
    for alone, run in zip(stock, found, strict=True):
        print(budget_bytes, run["deferred"], run["streaming"])
        assert {it: run[it] for it in VALUES} == {it: alone[it] for it in VALUES}
        (streaming,) = run["streaming"]
        assert streaming["streamed"] >= STEPS - 1
        assert streaming["in_line"] == 0
        assert run["deferred"] >= STEPS // 2, "all but those that are measured for plans"
        assert streaming["early"] > 0, "the program has used weights meanwhile"
