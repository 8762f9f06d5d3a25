"""Weights of bitsandbytes and torchao on a GPU that has no room for them: no bit differs."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.gpu.conftest import Job

pytestmark = pytest.mark.gpu

VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "UMEM_MANAGED_LIMIT": "512MiB"}

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
def pairs(start: Callable[..., Job]) -> Callable[[str], tuple[Any, Any]]:
    """What the program of a mode saw, stock and under a budget. All processes run at once."""
    jobs = {
        mode: (
            start("quantised.py", mode, **VARIABLES),
            start(
                "quantised.py",
                mode,
                UMEM_POLICY="lora" if mode in TRAININGS else "inference",
                UMEM_DEVICE_BUDGET=budget,
                **VARIABLES,
            ),
        )
        for mode, budget in BUDGETS.items()
        if find_spec(library_of(mode))
    }

    def facts_of(mode: str) -> tuple[Any, Any]:
        if mode not in jobs:
            pytest.skip(f"{library_of(mode)} is not installed")
        stock, streamed = jobs[mode]
        return stock.facts(), streamed.facts()

    return facts_of


def library_of(mode: str) -> str:
    return MODULES.get(mode, "bitsandbytes")


@pytest.mark.parametrize("mode", BUDGETS)
def test_all_bits_equal_the_stock_run(mode: str, pairs: Callable[[str], tuple[Any, Any]]) -> None:
    stock, facts = pairs(mode)
    print(facts)
    assert facts["seen"] == stock["seen"]


# Layers of LLM.int8 have each weight by two tensors: it is used where it is.
@pytest.mark.parametrize("mode", [it for it in BUDGETS if it != "llm_int8"])
def test_quantised_weights_are_streamed(mode: str, pairs: Callable[[str], tuple[Any, Any]]) -> None:
    weights = pairs(mode)[1]["weights"]
    assert weights["streamed_bytes"] > 0
    assert weights["fetched"] > 20
    assert weights["in_place"] == 0
