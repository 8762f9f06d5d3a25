"""Trainings on a GPU that give the card back and go on, against stock ones that do not."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_jobs import SIDE_BY_SIDE, Start, under

MIB = 1 << 20
VALUES = ("losses", "weights", "state", "doubled")
CASES = {"state": ("state", "1400MiB"), "weights": ("weights", "1GiB"), "all": ("state", "8GiB")}
"""The training, and a budget under which that part of it is streamed; `all` is resident. A plan for
`state` may stream weights, too."""

KERNEL_BYTES = 128 * MIB
"""Kernels that are loaded after the first ones, and the driver's tables of mapped memory."""


@pytest.fixture(scope="module")
def pairs(start: Start) -> dict[str, tuple[Any, Any]]:
    """Facts of the stock training and of the paused one. The latter are alone on the card: NVML
    counts all, and for a moment they take all of it."""
    jobs = {name: start("pausing.py", name, **SIDE_BY_SIDE) for name in ("state", "weights")}
    stock = {name: job.facts() for name, job in jobs.items()}

    def paused(training: str, budget: str) -> Any:
        return start("pausing.py", training, **under("sft", budget), **SIDE_BY_SIDE).facts()

    return {case: (stock[its[0]], paused(*its)) for case, its in CASES.items()}


@pytest.mark.parametrize("case", CASES)
def test_all_bits_equal_a_run_without_pause(case: str, pairs: dict[str, tuple[Any, Any]]) -> None:
    stock, facts = pairs[case]
    assert {name: facts[name] for name in VALUES} == {name: stock[name] for name in VALUES}
    assert (facts["slots_bytes"] > 0) == (case != "all")
    assert case == "state" or (facts["streamed_weights"] > 0) == (case == "weights")


@pytest.mark.parametrize("case", CASES)
def test_the_card_is_given_back(case: str, pairs: dict[str, tuple[Any, Any]]) -> None:
    facts = pairs[case][1]
    assert len(facts["pauses"]) == 2
    for pause in facts["pauses"]:
        print(pause)
        # Page tables of the copy on the host are new on the card meanwhile, and counted as kept.
        gone = pause["before"] - pause["during"]
        assert pause["returned"] - pause["kept"] <= gone <= pause["returned"] + KERNEL_BYTES
        assert pause["returned"] > 256 * MIB
        assert pause["during"] <= facts["base"] + pause["kept"] + KERNEL_BYTES
        assert 0 < pause["host"] <= pause["returned"]


@pytest.mark.parametrize("case", CASES)
def test_a_full_card_is_refused_and_nothing_is_lost(
    case: str, pairs: dict[str, tuple[Any, Any]]
) -> None:
    for pause in pairs[case][1]["pauses"]:
        assert "stays paused" in pause["resume_error"]
        assert "umem.resume()" in pause["allocation_error"]
