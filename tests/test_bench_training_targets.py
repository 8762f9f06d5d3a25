"""Targets of the variants that train with steps in the backward pass, umem's and torch's own."""

from __future__ import annotations

from typing import Any

import pytest
from training_runs import GIB, MANAGER, PROFILE, made_up_run, outcome
from umem_bench.train.results import Method, Outcome, Variant
from umem_bench.train.targets import targets

FAULTS = "page faults at most 1 % of demand paging's"
SPEED_UP = "at least 3 times as fast as demand paging"
OF_STOCK = "at least 85 % of stock's speed"
SHARE = "unified memory's share of time no more than under demand paging"
STALL = "exposed stall at most a third of demand paging's"
AHEAD = "ahead of every alternative that fits the same memory"
OFFLOADS = "faster than every alternative"
PREDICTED = "measured step within 15 % of the predicted"
LORA_SHARE = "unified memory's share of time at most 0.2 %"


def under_a_plan(
    variant: Variant, step_s: float, percent: float, fault_batches: int, **more: Any
) -> Outcome:
    profile = PROFILE.model_copy(update={"fault_batches": fault_batches, "predicted_bytes": None})
    asked: dict[str, Any] = {"percent": percent, "plan_running": True, "profile": profile}
    return outcome(variant, step_s, **(asked | more))


def held(*outcomes: Outcome, method: Method = "sft") -> dict[tuple[str, str], bool | None]:
    run = made_up_run(outcome("stock", method=method), *outcomes)
    found = [(it.what, it.subject) for it in targets(run)]
    assert len(set(found)) == len(found)
    return {(it.what, it.subject): it.held for it in targets(run)}


def test_both_planned_variants_are_held_to_the_same_under_their_names() -> None:
    found = held(
        under_a_plan("umem-planned", 0.11, 60.0, 12),
        under_a_plan("umem-backward-step", 0.118, 60.0, 13),
        under_a_plan("umem-fault", 0.34, 60.0, 1200),
    )

    asked = (FAULTS, SPEED_UP, OF_STOCK, SHARE, STALL)
    assert found == {
        **{(what, "long, sft, 60 %"): True for what in asked},
        # 100 / 118 of stock's speed, and 0.34 / 0.118 of demand paging's.
        **{(what, "long, sft, umem-backward-step, 60 %"): what in (SHARE, STALL) for what in asked},
    }


def test_one_of_them_alone_has_its_own_targets() -> None:
    found = held(
        under_a_plan("umem-backward-step", 0.11, 60.0, 0),
        under_a_plan("umem-fault", 0.34, 60.0, 1200),
    )

    assert len(found) == 5
    assert {subject for _, subject in found} == {"long, sft, umem-backward-step, 60 %"}


def test_what_gave_up_is_not_known() -> None:
    found = held(
        under_a_plan("umem-planned", 0.2, 30.0, 0),
        under_a_plan("umem-backward-step", 0.2, 30.0, 0, state="off", reason="why", steps_s=()),
        outcome("save-on-cpu", 0.21, 3 * GIB),
    )

    assert found == {
        (AHEAD, "long, sft, 30 %"): True,
        (AHEAD, "long, sft, umem-backward-step, 30 %"): None,
    }


def test_torchs_own_steps_in_the_backward_pass_are_an_alternative_where_they_fit() -> None:
    ours = under_a_plan("umem-planned", 0.2, 30.0, 0)

    def ahead(peak_bytes: int) -> bool | None:
        found = held(ours, outcome("backward-step", 0.19, peak_bytes))
        return found[AHEAD, "long, sft, 30 %"]

    assert ahead(3 * GIB) is False
    assert ahead(3 * GIB + (64 << 10)) is True


def test_state_off_the_device_is_not_compared_with_state_that_is_on_it() -> None:
    ours = outcome(
        "umem-optimizer-host", 0.2, optimizer_state_bytes=2 * GIB, mapped_bytes_per_s=20 * GIB
    )

    found = held(ours, outcome("backward-step", 0.1), outcome("torchao-offload", 0.3))

    subject = "long, sft, optimizer's state off the device"
    assert found["faster than every alternative", subject] is True


def test_lora_moves_next_to_nothing_with_either() -> None:
    few = PROFILE.model_copy(update={"um_time_share": 0.001, "predicted_bytes": None})

    found = held(
        under_a_plan("umem-planned", 0.11, 60.0, 0, method="lora", profile=few),
        under_a_plan("umem-backward-step", 0.11, 60.0, 0, method="lora"),
        method="lora",
    )

    assert found == {
        (LORA_SHARE, "long, lora, 60 %"): True,
        (LORA_SHARE, "long, lora, umem-backward-step, 60 %"): False,
    }


# --- what a run does not tell does not hold ---


def found_of(what: str, *outcomes: Outcome) -> tuple[bool | None, str]:
    run = made_up_run(outcome("stock"), *outcomes)
    (it,) = (it for it in targets(run) if it.what == what)
    return it.held, it.detail


def left_out(variant: Variant, **more: Any) -> Outcome:
    return outcome(variant, state="left out", reason="no time", steps_s=(), **more)


@pytest.mark.parametrize("missing", [{}, {"state": "failed", "timed_out": True}])
def test_alternatives_that_were_not_measured_might_be_ahead(missing: dict[str, Any]) -> None:
    ours = under_a_plan("umem-planned", 0.2, 30.0, 0)
    unfit, slower = outcome("save-on-cpu", 0.1, 9 * GIB), outcome("backward-step", 0.3, 2 * GIB)
    absent = outcome("deepspeed-offload", state="not installed", steps_s=(), peak_bytes=None)
    other = absent.model_copy(update={"state": "not comparable"})
    unknown = left_out("torchao-offload").model_copy(update=missing)

    assert found_of(AHEAD, ours, unfit, slower, absent) == (
        True,
        "5,000 tokens/s; the best of 1: backward-step 3,333; do not fit: save-on-cpu; "
        "not installed: deepspeed-offload",
    )
    assert found_of(AHEAD, ours, slower, other) == (
        True,
        "5,000 tokens/s; the best of 1: backward-step 3,333; not comparable: deepspeed-offload",
    )
    held_, words = found_of(AHEAD, ours, unfit, slower, unknown)
    assert held_ is None
    assert "not measured: torchao-offload" in words
    # Whoever is behind one that was measured is not ahead of all of them.
    faster = outcome("backward-step", 0.1, 2 * GIB)
    assert found_of(AHEAD, ours, faster, unknown)[0] is False
    assert found_of(AHEAD, ours, unfit, unknown)[0] is None
    assert found_of(AHEAD, ours, unfit, absent)[0] is True
    assert found_of(AHEAD, ours, unknown)[0] is None
    # Nobody counts what this one has on the device: it fits nothing.
    assert found_of(AHEAD, ours, unfit, left_out("rmm-pool"))[0] is True


def test_state_on_the_host_is_compared_with_everyone_or_not_at_all() -> None:
    ours = outcome(
        "umem-optimizer-host", 0.2, optimizer_state_bytes=2 * GIB, mapped_bytes_per_s=20 * GIB
    )
    slower, unknown = outcome("torchao-offload", 0.3), left_out("deepspeed-offload")

    assert found_of(OFFLOADS, ours, slower)[0] is True
    assert found_of(OFFLOADS, ours, slower, unknown)[0] is None


def test_nothing_against_nothing_is_not_known() -> None:
    nothing = PROFILE.model_copy(update={"fault_batches": 0, "um_time_share": 0.0})
    own = under_a_plan("umem-planned", 0.11, 60.0, 0, profile=nothing)
    paged = under_a_plan("umem-fault", 0.4, 60.0, 0, profile=nothing)
    some = under_a_plan("umem-planned", 0.11, 60.0, 1)

    assert held(own, paged)[FAULTS, "long, sft, 60 %"] is None
    assert held(own, paged)[SHARE, "long, sft, 60 %"] is None
    assert held(some, paged)[FAULTS, "long, sft, 60 %"] is False
    # Demand paging that is no slower than stock leaves nothing to be a third of.
    fast = under_a_plan("umem-fault", 0.1, 60.0, 1200)
    assert held(own, fast)[STALL, "long, sft, 60 %"] is None


@pytest.mark.parametrize("percent", [60.0, 30.0])
def test_a_plan_over_its_own_budget_holds_nothing(percent: float) -> None:
    over = under_a_plan("umem-planned", 0.101, percent, 1, resident_bytes=9 * GIB)
    unknown = over.model_copy(update={"resident_bytes": None})
    paged = under_a_plan("umem-fault", 0.4, percent, 1200)

    assert set(held(over, paged).values()) == {False}
    assert set(held(unknown, paged).values()) == {None}


def test_a_plan_that_was_given_up_in_the_timed_steps_is_not_known() -> None:
    off = MANAGER.model_copy(
        update={"state": "off", "reason": "RuntimeError", "predicted_step_s": None}
    )
    ours = under_a_plan("umem-planned", 0.11, 60.0, 1, manager=off)
    paged = under_a_plan("umem-fault", 0.4, 60.0, 1200)

    assert set(held(ours, paged).values()) == {None}


def test_at_the_whole_working_set_nothing_is_held_against_demand_paging() -> None:
    found = held(
        under_a_plan("umem-planned", 0.11, 100.0, 0), under_a_plan("umem-fault", 0.4, 100.0, 1200)
    )

    assert found == {}


def test_predictions_hold_of_six_runs_and_of_all_that_were_asked_for() -> None:
    asked: list[tuple[Variant, float]] = [
        (variant, percent)
        for variant in ("umem-planned", "umem-backward-step", "umem-fault")
        for percent in (60.0, 30.0)
    ]
    runs = [outcome(it, 0.2, percent=percent, manager=MANAGER) for it, percent in asked]
    refused = outcome("umem-lookahead", percent=30.0, state="off", reason="why", steps_s=())
    without = runs[0].model_copy(update={"plan_running": False})

    assert found_of(PREDICTED, *runs)[0] is True
    assert found_of(PREDICTED, *runs, refused)[0] is True
    idle = MANAGER.model_copy(update={"state": "resident", "predicted_step_s": None})
    unmoved = outcome("umem-planned", 0.1, percent=100.0, manager=idle)
    assert found_of(PREDICTED, *runs, unmoved) == found_of(PREDICTED, *runs)
    few, words = found_of(PREDICTED, *runs[1:])
    assert few is None
    assert words.endswith("; 6 runs at least are asked for")
    assert found_of(PREDICTED, *runs, left_out("umem-lookahead", percent=60.0))[0] is None
    assert found_of(PREDICTED, without, *runs[1:])[0] is None
    assert found_of(PREDICTED, left_out("umem-lookahead", percent=60.0)) == (
        None,
        "nothing under a plan was measured",
    )
