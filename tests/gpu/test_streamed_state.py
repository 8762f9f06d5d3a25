"""Trainings on a GPU whose optimizer state is streamed, against stock ones."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from gpu_jobs import SIDE_BY_SIDE, Pairs, Start, facts_of, start_pair, under

from umem.core.units import parse_bytes

STEPS = 16
"""A plan of slowed steps may be replaced at the tenth or so."""
STREAMED_MODES = (
    *("plain", "averaged", "averaged_beside", "averaged_behind_an_event"),
    *("read_behind_a_host_wait", "norm_logged", "saved_and_loaded", "in_a_thread", "captured"),
    *("graphed", "graphed_block", "gradients_copied", "gradients_clipped", "accumulated"),
    *("buffers_filled_late", "in_backward", "averaged_by_a_graph", "evaluated_by_a_graph"),
    *("captured_with_a_fork", "copied_behind_any_event", "graphed_late", "scaled"),
    *("rate_changed", "storages_kept"),
)
POISONED_MODES = (
    *("averaged_beside", "captured", "gradients_clipped", "accumulated", "scaled"),
    "rate_changed",
)
"""Run once more with memory that is overwritten when it is freed and when it is new."""
HOST_MODES = (
    *("plain", "averaged_beside", "averaged_behind_an_event", "read_behind_a_host_wait"),
    *("copied_behind_any_event", "norm_logged", "saved_and_loaded", "in_a_thread"),
    *("accumulated", "scaled", "storages_kept"),
)
"""Run once more with some units updated by the host."""
ADDRESS_MODES = (
    "weights_in_arrays",
    "state_in_arrays",
    "gradients_in_arrays",
    "addresses_held",
    "joined",
)
"""By CuPy arrays."""

STATE_BYTES = 2 * 4 * (8 * 2 * 4 * 1024**2 + 1024**2)
"""Of the moments of all weight matrices."""


TIGHT = "1400MiB"
"""A budget that not all of the state fits."""
FEWER_ACTIVATIONS: dict[str, dict[str, str]] = {
    "graphed": {"ROWS": "512"},
    "graphed_late": {"ROWS": "512"},
}
"""Modes with a graph that holds all activations, of smaller batches then."""
TIGHT_FOR_FEWER = "1100MiB"
"""The same for them."""


MORE_BYTES = 64 << 20
"""That the card may have in use beyond the budget and what stock's process has beside tensors."""


VALUES = ("losses", "seen", "averages", "weights", "state")


def values(facts: Any) -> dict[str, Any]:
    """What a program has computed."""
    return {name: facts[name] for name in VALUES}


def common(mode: str) -> dict[str, str]:
    """Variables of both runs of a mode."""
    return SIDE_BY_SIDE | FEWER_ACTIVATIONS.get(mode, {})


def tight(mode: str) -> dict[str, str]:
    """A budget that not all of the state fits."""
    return under("sft", TIGHT_FOR_FEWER if mode in FEWER_ACTIVATIONS else TIGHT)


def start_pairs(start: Start, request: pytest.FixtureRequest, modes: Iterable[str]) -> Pairs:
    """Of the modes that the selected tests are about, at once; of others when they are asked."""
    asked = {
        it.callspec.params.get("mode")
        for it in request.session.items
        if isinstance(it, pytest.Function)
        and it.module is request.module
        and "mode" in it.fixturenames
    }
    return facts_of(
        lambda mode: start_pair(
            start, "streaming.py", mode, str(STEPS), umem=tight(mode), **common(mode)
        ),
        [it for it in modes if it in asked],
    )


@pytest.fixture(scope="module")
def pairs(start: Start, request: pytest.FixtureRequest) -> Pairs:
    return start_pairs(start, request, STREAMED_MODES)


@pytest.fixture(scope="module")
def address_pairs(start: Start, request: pytest.FixtureRequest) -> Pairs:
    """Beside none of the others: the host's memory is for so many processes."""
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")
    return start_pairs(start, request, ADDRESS_MODES)


@pytest.mark.parametrize("mode", STREAMED_MODES)
def test_all_bits_equal_the_stock_run(mode: str, pairs: Pairs) -> None:
    stock, facts = pairs(mode)
    streaming = facts["streaming"]
    print(streaming)
    assert values(facts) == values(stock)
    assert streaming["streamed"] >= STEPS - 1
    assert streaming["in_line"] == 0


@pytest.mark.parametrize("mode", POISONED_MODES)
def test_nothing_reads_freed_or_new_memory(mode: str, pairs: Pairs, start: Start) -> None:
    settings = common(mode) | tight(mode)
    facts = start("streaming.py", mode, str(STEPS), UMEM_POISON="1", **settings).facts()
    assert values(facts) == values(pairs(mode)[0])
    assert facts["streaming"]["streamed"] >= STEPS - 1


@pytest.mark.parametrize("is_poisoned", [False, True])
@pytest.mark.parametrize("mode", HOST_MODES)
def test_the_host_updates_some_units(
    mode: str, is_poisoned: bool, pairs: Pairs, start: Start, tmp_path: Path
) -> None:
    policy = tmp_path / "hosts.yaml"
    # Of weights at home, updates are the device's.
    keep = "{kind: device, mechanism: keep}"
    policy.write_text(
        "name: hosts\nextends: sft\nhost_update: auto\n"
        f"classes: {{weights: {keep}, frozen_weights: {keep}}}\n"
    )
    settings = common(mode) | tight(mode) | {"UMEM_POLICY": str(policy)}
    settings |= {"UMEM_POISON": "1"} if is_poisoned else {}
    facts = start("streaming.py", mode, str(STEPS), HOST_UPDATES="1", **settings).facts()
    print(facts["streaming"])
    assert values(facts) == values(pairs(mode)[0])
    assert facts["streaming"]["streamed"] >= STEPS - 1
    assert facts["streaming"]["host_updates"] > 0


def test_a_scaler_has_skipped_steps(pairs: Pairs) -> None:
    losses = [float.fromhex(it) for it in pairs("scaled")[1]["losses"]]
    assert [math.isinf(it) for it in losses] == [number % 3 == 2 for number in range(STEPS)]


@pytest.mark.parametrize("mode", ADDRESS_MODES)
def test_what_is_used_at_addresses_past_torch_has_stocks_bits(
    mode: str, address_pairs: Pairs
) -> None:
    stock, facts = address_pairs(mode)
    print(facts["streaming"])
    assert values(facts) == values(stock)
    assert facts["streaming"]["streamed"] >= STEPS - 1
    assert len(set(stock["seen"])) > STEPS


def test_a_plain_loop_waits_for_blocks_only(pairs: Pairs) -> None:
    # In the last steps: those that are measured wait for all updates.
    streaming = pairs("plain")[1]["streaming"]
    assert streaming["waited"] == 0


def test_units_are_updated_in_the_backward_pass(pairs: Pairs) -> None:
    # The first three steps make the state, and are watched.
    assert pairs("in_backward")[1]["streaming"]["ahead"] >= STEPS - 4


def test_gradients_are_on_the_host(pairs: Pairs) -> None:
    # Those of all weight matrices, but perhaps of the units that the backward pass came to last.
    assert pairs("gradients_copied")[1]["streaming"]["gradients_on_host"] >= 2 * (8 - 2)


def test_clipping_does_not_read_gradients_on_the_host(pairs: Pairs) -> None:
    assert pairs("gradients_clipped")[1]["streaming"]["clipping_put_off"] >= 2 * (8 - 2)


def test_the_budget_holds_and_nothing_is_managed(pairs: Pairs) -> None:
    streaming = pairs("plain")[1]["streaming"]
    assert streaming["budget_peak_bytes"] <= parse_bytes(TIGHT)
    # Neither managed memory nor the second CUDA context of a hint engine.
    assert (streaming["managed_bytes"], streaming["hint_engines"]) == (0, 0)


def test_a_tight_budget_streams_and_a_wide_one_does_not(start: Start) -> None:
    jobs = [
        start("streaming.py", "plain", str(STEPS), **under("sft", budget), **SIDE_BY_SIDE)
        for budget in (TIGHT, "8GiB")
    ]
    tight, wide = (job.facts() for job in jobs)
    assert tight["losses"] == wide["losses"]
    assert tight["weights"] == wide["weights"]
    assert tight["streaming"]["slots_bytes"] > 0
    assert wide["streaming"]["slots_bytes"] == 0  # all of it fits
    assert wide["streaming"]["streamed"] == 0  # and was made on the device
    assert tight["streaming"]["pinned_bytes"] >= STATE_BYTES / 2


def test_activations_beyond_the_budget_are_copied(start: Start) -> None:
    """16,384 rows save 5 GiB. One process at a time, as NVML shows the whole card."""
    settings, budget = {"ROWS": "16384", **SIDE_BY_SIDE}, "4GiB"
    stock = start("streaming.py", "plain", str(STEPS), **settings).facts()
    settings |= under("sft", budget)
    facts = start("streaming.py", "plain", str(STEPS), **settings).facts()
    streaming = facts["streaming"]
    print(streaming)
    assert values(facts) == values(stock)
    assert streaming["state"] == "planned"
    assert streaming["copied_blocks"] > 0
    assert streaming["bytes_out"] > 0
    assert streaming["late_fetches"] == 0
    assert streaming["card_peak_bytes"] <= parse_bytes(budget) + stock["beside_bytes"] + MORE_BYTES


@pytest.mark.parametrize("budget", ["2GiB", "1600MiB", "1200MiB"])
def test_what_has_no_room_is_used_in_host_memory(budget: str, start: Start) -> None:
    """Each of eight blocks saves 640 MiB, and two of them are there at a time by a usual plan."""
    settings = {"ROWS": "16384", **SIDE_BY_SIDE}
    stock = start("streaming.py", "plain", "30", **settings).facts()
    settings |= under("sft", budget)
    facts = start("streaming.py", "plain", "30", **settings).facts()
    streaming = facts["streaming"]
    print(budget, streaming)
    assert values(facts) == values(stock)
    assert (streaming["state"] == "no plan fits") == (streaming["overflow_bytes"] > 0)
    assert streaming["predicted_s"] is not None
    assert streaming["plans"] <= 4
    assert streaming["card_peak_bytes"] <= parse_bytes(budget) + stock["beside_bytes"] + MORE_BYTES


@pytest.mark.parametrize("percent", [100, 60])
@pytest.mark.parametrize("policy", ["sft", "lora"])
def test_the_card_holds_the_budget_from_the_first_step_on(
    policy: str, percent: int, start: Start
) -> None:
    """With changing batches, evaluations and checkpoints; one process at a time."""
    settings = {"ROWS": "12288", **({"ADAPTED": "1"} if policy == "lora" else {}), **SIDE_BY_SIDE}
    stock = start("streaming.py", "varied", str(STEPS), **settings).facts()
    budget_bytes = percent * stock["peak_bytes"] // 100
    settings |= under(policy, f"{budget_bytes} B")
    facts = start("streaming.py", "varied", str(STEPS), **settings).facts()
    print(budget_bytes, facts["streaming"])
    assert values(facts) == values(stock)
    limit_bytes = budget_bytes + stock["beside_bytes"] + MORE_BYTES
    assert facts["streaming"]["card_peak_bytes"] <= limit_bytes
