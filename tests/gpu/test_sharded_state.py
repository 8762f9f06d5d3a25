"""FSDP2 on one GPU and on two, with streamed state and deferred steps, against stock.

On a GPU parameters are gathered on streams of FSDP2's own, which tests on the CPU do not have.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_jobs import SIDE_BY_SIDE, Start, under

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
def test_deferred_steps_have_stocks_bits(ranks: int, start: Start) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    stock: Any = start("sharding.py", str(STEPS), launcher=launcher, **SIDE_BY_SIDE).facts()
    budget_bytes = int(SHARE * max(it["peak_bytes"] for it in stock))
    variables = {**SIDE_BY_SIDE, **under("sft", budget_bytes)}
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
