"""Models on a GPU whose weights exceed the budget, against stock runs: no bit differs."""

from __future__ import annotations

import importlib.util

import pytest
from gpu_jobs import SIDE_BY_SIDE, Pairs, Start, facts_of, start_pair, under

from umem.core.units import parse_bytes

WEIGHT_BYTES = 24 * 4 * 8 * 1024**2
"""Of all matrices of the layers."""

MORE_BYTES = 64 << 20
"""That the card may have in use beyond the budget and what stock's process has beside tensors."""

BUDGETS = {
    "inference": "640MiB",
    "changed": "640MiB",
    "kept": "3GiB",
    "trained": "1GiB",
    "managed_at_once": "1GiB",
    "adapters": "640MiB",
    "adapters_without_checkpoints": "900MiB",
    "compiled": "640MiB",
    "captured": "640MiB",
    "loaded": "640MiB",
    "experts": "768MiB",
}
if importlib.util.find_spec("cupy") is not None:
    BUDGETS["changed_in_arrays"] = "640MiB"
POLICIES = {
    "trained": "sft",
    "managed_at_once": "sft",
    "adapters": "lora",
    "adapters_without_checkpoints": "lora",
}


def within_budget(mode: str) -> dict[str, str]:
    return under(POLICIES.get(mode, "inference"), BUDGETS[mode])


def test_the_card_holds_the_budget(start: Start) -> None:
    # The first test, alone on the card: NVML shows what all processes take.
    stock = start("weights.py", "inference", **SIDE_BY_SIDE).facts()
    for mode in ("inference", "adapters"):
        facts = start("weights.py", mode, **within_budget(mode), **SIDE_BY_SIDE).facts()
        most = parse_bytes(BUDGETS[mode]) + stock["beside_bytes"] + MORE_BYTES
        assert facts["card_bytes"] <= most


@pytest.fixture(scope="module")
def pairs(start: Start) -> Pairs:
    """All processes run at once."""
    return facts_of(
        lambda mode: start_pair(
            start, "weights.py", mode, umem=within_budget(mode), **SIDE_BY_SIDE
        ),
        BUDGETS,
    )


@pytest.mark.parametrize("mode", BUDGETS)
def test_all_bits_equal_the_stock_run(mode: str, pairs: Pairs) -> None:
    stock, facts = pairs(mode)
    print(facts["weights"])
    assert facts["seen"] == stock["seen"]
    assert facts["weights"]["streamed_bytes"] > 0
    assert facts["weights"]["fetched"] > 20
    assert facts["weights"]["in_place"] == 0


@pytest.mark.parametrize("mode", ["trained", "managed_at_once"])
def test_the_plan_of_a_training_decides_on_its_weights(mode: str, pairs: Pairs) -> None:
    assert pairs(mode)[1]["weights"]["is_driven"]


@pytest.mark.parametrize("mode", ["inference", "adapters", "trained", "managed_at_once"])
def test_weights_come_ahead_of_their_use(mode: str, pairs: Pairs) -> None:
    weights = pairs(mode)[1]["weights"]
    # At the begin of a plan, of a step that has changed weights, and of the passes between.
    assert weights["late"] <= weights["fetched"] // 4


def test_experts_that_are_used_often_stay_on_the_device(
    pairs: Pairs,
) -> None:
    hits, misses = pairs("experts")[1]["weights"]["cached_experts"]
    assert hits > 0
    assert misses > 0


def test_homes_are_all_of_the_host_that_is_taken(
    pairs: Pairs,
) -> None:
    """Weights that a loader brings have one place, on the device or in page-locked memory."""
    facts = pairs("loaded")[1]
    # A new segment is as large as all that is in use, at most; a second copy would be more.
    assert facts["page_locked_bytes"] <= 2 * facts["weights"]["streamed_bytes"]
