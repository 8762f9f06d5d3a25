"""Targets of the variants that train with steps in the backward pass, umem's and torch's own."""

from __future__ import annotations

from typing import Any

from training_runs import GIB, PROFILE, made_up_run, outcome

from umem.bench.train.results import Method, Outcome, Variant
from umem.bench.train.targets import targets

FAULTS = "page faults at most 1 % of demand paging's"
SPEED_UP = "at least 3 times as fast as demand paging"
OF_STOCK = "at least 85 % of stock's speed"
SHARE = "unified memory's share of time no more than under demand paging"
STALL = "exposed stall at most a third of demand paging's"
AHEAD = "ahead of every alternative that fits the same memory"
LORA_SHARE = "unified memory's share of time at most 0.2 %"


def under_a_plan(
    variant: Variant, step_s: float, percent: float, fault_pages: int, **more: Any
) -> Outcome:
    profile = PROFILE.model_copy(update={"fault_pages": fault_pages, "predicted_bytes": None})
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
    assert ahead(3 * GIB + 1) is True


def test_state_off_the_device_is_not_compared_with_state_that_is_on_it() -> None:
    ours = outcome(
        "umem-optimizer-host", 0.2, optimizer_state_bytes=2 * GIB, mapped_bytes_per_s=20 * GIB
    )

    found = held(ours, outcome("backward-step", 0.1), outcome("bnb-paged-adamw", 0.3))

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
