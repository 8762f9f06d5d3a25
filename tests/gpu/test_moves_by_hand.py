"""Trainings on a GPU whose program moves them to the host and back, against stock ones."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from gpu_jobs import SIDE_BY_SIDE, Start, start_pair, under

MIB = 1 << 20
VALUES = ("losses", "weights", "state")
BUDGETS = {"state": "1400MiB", "weights": "1GiB"}
"""Those under which that part of the training is streamed."""

WAYS = ("memory", "tensors")

ROOM_BYTES = 64 * MIB
"""Workspaces of cuBLAS, which stock keeps too, and segments of small tensors."""

KERNEL_BYTES = 128 * MIB
"""Kernels that are loaded after the first ones, and the driver's tables of mapped memory."""

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_and_generate.py"


@pytest.fixture(scope="module")
def pairs(start: Start) -> dict[tuple[str, str], tuple[Any, Any]]:
    """Facts of the stock training and of the one under umem."""
    jobs = {
        case: start_pair(
            start, "moving.py", *case, umem=under("sft", BUDGETS[case[0]]), **SIDE_BY_SIDE
        )
        for case in product(BUDGETS, WAYS)
    }
    return {case: (stock.facts(), its.facts()) for case, (stock, its) in jobs.items()}


@pytest.mark.parametrize("case", [*product(BUDGETS, WAYS)])
def test_all_bits_are_stocks(
    case: tuple[str, str], pairs: dict[tuple[str, str], tuple[Any, Any]]
) -> None:
    stock, facts = pairs[case]
    assert {name: facts[name] for name in VALUES} == {name: stock[name] for name in VALUES}
    assert facts["slots_bytes"] > 0  # as before the moves
    assert case[0] == "state" or facts["streamed_weights"] > 0


@pytest.mark.parametrize("case", [*product(BUDGETS, WAYS)])
def test_the_card_and_the_host_are_given_back(
    case: tuple[str, str], pairs: dict[tuple[str, str], tuple[Any, Any]]
) -> None:
    stock, facts = pairs[case]
    assert len(facts["moves"]) == 2
    for of_stock, move in zip(stock["moves"], facts["moves"], strict=True):
        print(of_stock, move)
        during = move["during"]
        assert move["before"]["device"] > 256 * MIB
        assert during["allocated"] <= of_stock["during"]["allocated"] + ROOM_BYTES
        assert during["device"] <= of_stock["during"]["allocated"] + ROOM_BYTES
        assert during["card"] <= of_stock["during"]["card"] - stock["base"] + (
            facts["base"] + KERNEL_BYTES
        )
        # What the program has moved is all that is left: no home beside it.
        assert during["pinned"] <= ROOM_BYTES


@pytest.mark.slow
def test_the_loop_of_the_docs_has_the_same_bits_each_way(start: Start) -> None:
    jobs = {
        way: start(
            *(str(EXAMPLE), "--way", way, "--layers", "6", "--steps", "4"),
            UMEM_DEVICE_BUDGET="1GiB",
            **SIDE_BY_SIDE,
        )
        for way in ("stock", "pause", "move")
    }
    outputs = {way: job.finish().stdout for way, job in jobs.items()}
    print(outputs)
    digests = {way: re.findall(r"^weights (\w+)$", out, re.M) for way, out in outputs.items()}
    assert digests["pause"] == digests["move"] == digests["stock"] != []
    # Stock's kernels keep a workspace, too.
    held = {way: max(map(int, re.findall(r"(\d+) MiB held", out))) for way, out in outputs.items()}
    for way in ("pause", "move"):
        assert held[way] <= held["stock"] + ROOM_BYTES // MIB
