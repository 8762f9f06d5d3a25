"""Trainings on a GPU whose optimizer state is streamed, against stock ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from umem.core.units import parse_bytes

if TYPE_CHECKING:
    from tests.gpu.conftest import Job

pytestmark = pytest.mark.gpu

STEPS = 12
STREAMED_MODES = (
    "plain",
    "averaged",
    "averaged_beside",
    "averaged_behind_an_event",
    "read_behind_a_host_wait",
    "norm_logged",
    "saved_and_loaded",
    "in_a_thread",
    "captured",
    "gradients_copied",
    "gradients_clipped",
    "buffers_filled_late",
    "in_backward",
)

STATE_BYTES = 2 * 4 * (8 * 2 * 4 * 1024**2 + 1024**2)
"""Of the moments of all weight matrices."""


# All processes run at once: together they stay below the limit for managed memory of one machine.
VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "UMEM_MANAGED_LIMIT": "512MiB"}
TIGHT = "1400MiB"
"""A budget that not all of the state fits."""


MORE_BYTES = 64 << 20
"""That the card may have in use beyond the budget and what stock's process has beside tensors."""


VALUES = ("losses", "seen", "averages", "weights", "state")


def values(facts: Any) -> dict[str, Any]:
    """What a program has computed."""
    return {name: facts[name] for name in VALUES}


@pytest.fixture(scope="module")
def pairs(start: Callable[..., Job]) -> Callable[[str], tuple[Any, Any]]:
    """What the program of a mode saw, stock and streamed."""
    jobs = {
        mode: (
            start("streaming.py", mode, str(STEPS), **VARIABLES),
            start(
                "streaming.py",
                mode,
                str(STEPS),
                UMEM_POLICY="sft",
                UMEM_DEVICE_BUDGET=TIGHT,
                **VARIABLES,
            ),
        )
        for mode in STREAMED_MODES
    }

    def facts_of(mode: str) -> tuple[Any, Any]:
        stock, streamed = jobs[mode]
        return stock.facts(), streamed.facts()

    return facts_of


@pytest.mark.parametrize("mode", STREAMED_MODES)
def test_all_bits_equal_the_stock_run(mode: str, pairs: Callable[[str], tuple[Any, Any]]) -> None:
    stock, facts = pairs(mode)
    streaming = facts["streaming"]
    print(streaming)
    assert values(facts) == values(stock)
    assert streaming["streamed"] >= STEPS - 1
    assert streaming["in_line"] == 0


def test_a_plain_loop_waits_for_blocks_only(pairs: Callable[[str], tuple[Any, Any]]) -> None:
    # In the last steps: those that are measured wait for all updates.
    streaming = pairs("plain")[1]["streaming"]
    assert streaming["waited"] == 0


def test_units_are_updated_in_the_backward_pass(pairs: Callable[[str], tuple[Any, Any]]) -> None:
    # The first three steps make the state, and are watched.
    assert pairs("in_backward")[1]["streaming"]["ahead"] >= STEPS - 4


def test_gradients_are_on_the_host(pairs: Callable[[str], tuple[Any, Any]]) -> None:
    # Those of all weight matrices, but perhaps of the units that the backward pass came to last.
    assert pairs("gradients_copied")[1]["streaming"]["gradients_on_host"] >= 2 * (8 - 2)


def test_clipping_does_not_read_gradients_on_the_host(
    pairs: Callable[[str], tuple[Any, Any]],
) -> None:
    assert pairs("gradients_clipped")[1]["streaming"]["clipping_put_off"] >= 2 * (8 - 2)


def test_the_budget_holds_and_nothing_is_managed(pairs: Callable[[str], tuple[Any, Any]]) -> None:
    streaming = pairs("plain")[1]["streaming"]
    assert streaming["budget_peak_bytes"] <= parse_bytes(TIGHT)
    # Neither managed memory nor the second CUDA context of a hint engine.
    assert (streaming["managed_bytes"], streaming["hint_engines"]) == (0, 0)


def test_a_tight_budget_streams_and_a_wide_one_does_not(start: Callable[..., Job]) -> None:
    jobs = {
        budget: start(
            "streaming.py",
            "plain",
            str(STEPS),
            UMEM_POLICY="sft",
            UMEM_DEVICE_BUDGET=budget,
            **VARIABLES,
        )
        for budget in (TIGHT, "8GiB")
    }
    tight, wide = (jobs[budget].facts() for budget in jobs)
    assert tight["losses"] == wide["losses"]
    assert tight["weights"] == wide["weights"]
    assert tight["streaming"]["slots_bytes"] > 0
    assert wide["streaming"]["slots_bytes"] == 0  # all of it fits
    assert wide["streaming"]["streamed"] == 0  # and was made on the device
    assert tight["streaming"]["pinned_bytes"] >= STATE_BYTES / 2


def test_activations_beyond_the_budget_are_copied(start: Callable[..., Job]) -> None:
    """16,384 rows save 5 GiB. One process at a time, as NVML shows the whole card."""
    rows, budget = {"ROWS": "16384"}, "4GiB"
    stock = start("streaming.py", "plain", str(STEPS), **rows, **VARIABLES).facts()
    job = start(
        "streaming.py",
        "plain",
        str(STEPS),
        UMEM_POLICY="sft",
        UMEM_DEVICE_BUDGET=budget,
        **rows,
        **VARIABLES,
    )
    facts = job.facts()
    streaming = facts["streaming"]
    print(streaming)
    assert values(facts) == values(stock)
    assert streaming["state"] == "planned"
    assert streaming["copied_blocks"] > 0
    assert streaming["bytes_out"] > 0
    assert streaming["late_fetches"] == 0
    assert streaming["card_peak_bytes"] <= parse_bytes(budget) + stock["beside_bytes"] + MORE_BYTES


@pytest.mark.parametrize("percent", [100, 60])
@pytest.mark.parametrize("policy", ["sft", "lora"])
def test_the_card_holds_the_budget_from_the_first_step_on(
    policy: str, percent: int, start: Callable[..., Job]
) -> None:
    """With changing batches, evaluations and checkpoints; one process at a time."""
    settings = {"ROWS": "12288", **({"ADAPTED": "1"} if policy == "lora" else {}), **VARIABLES}
    stock = start("streaming.py", "varied", str(STEPS), **settings).facts()
    budget_bytes = percent * stock["peak_bytes"] // 100
    settings |= {"UMEM_POLICY": policy, "UMEM_DEVICE_BUDGET": f"{budget_bytes} B"}
    facts = start("streaming.py", "varied", str(STEPS), **settings).facts()
    print(budget_bytes, facts["streaming"])
    assert values(facts) == values(stock)
    limit_bytes = budget_bytes + stock["beside_bytes"] + MORE_BYTES
    assert facts["streaming"]["card_peak_bytes"] <= limit_bytes
