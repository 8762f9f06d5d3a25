"""Weights of bitsandbytes and torchao on a GPU that has no room for them: no bit differs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
from gpu_jobs import SIDE_BY_SIDE, Pairs, Start, facts_of, start_pair, under

BUDGETS = {
    "nf4": "640MiB",
    "qlora": "640MiB",
    "qlora_without_checkpoints": "1GiB",
    "llm_int8": "640MiB",
    "ao_int8": "640MiB",
    "ao_int8_adapters": "640MiB",
    "ao_int4": "640MiB",
    "loaded": "320MiB",
}
"""Matrices take 768 MiB; loaded ones 96 MiB, of a model whose first call is left 256 MiB."""

MODULES = {"ao_int8": "torchao", "ao_int8_adapters": "torchao", "ao_int4": "torchao"}
"""Where it is not bitsandbytes."""

TRAININGS = ("qlora", "qlora_without_checkpoints", "ao_int8_adapters")


@pytest.fixture(scope="module")
def pairs(start: Start) -> Pairs:
    """All processes run at once."""
    policies = {mode: "lora" if mode in TRAININGS else "inference" for mode in BUDGETS}
    found = facts_of(
        lambda mode: start_pair(
            start, "quantised.py", mode, umem=under(policies[mode], BUDGETS[mode]), **SIDE_BY_SIDE
        ),
        [it for it in BUDGETS if find_spec(library_of(it))],
    )

    def facts(mode: str) -> tuple[Any, Any]:
        if not find_spec(library_of(mode)):
            pytest.skip(f"{library_of(mode)} is not installed")
        return found(mode)

    return facts


def library_of(mode: str) -> str:
    return MODULES.get(mode, "bitsandbytes")


@pytest.mark.parametrize("mode", BUDGETS)
def test_all_bits_equal_the_stock_run(mode: str, pairs: Pairs) -> None:
    stock, facts = pairs(mode)
    print(facts)
    assert facts["seen"] == stock["seen"]


# Layers of LLM.int8 have each weight by two tensors: it is used where it is.
@pytest.mark.parametrize("mode", [it for it in BUDGETS if it != "llm_int8"])
def test_quantised_weights_are_streamed(mode: str, pairs: Pairs) -> None:
    weights = pairs(mode)[1]["weights"]
    assert weights["streamed_bytes"] > 0
    assert weights["fetched"] > 20
    assert weights["in_place"] == 0
