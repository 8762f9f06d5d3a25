"""What can go wrong around a managed training does not change it: on a real card."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_jobs import DETERMINISTIC, Job, Start, under

STEPS, MANY = 20, 200


@pytest.fixture(scope="module")
def stock(start: Start) -> Any:
    return start("managing.py", "plain", str(MANY), **DETERMINISTIC).facts()


@pytest.fixture(scope="module")
def jobs(start: Start, stock: Any) -> dict[str, Job]:
    """All at once."""
    tight = {**DETERMINISTIC, **under("managed", int(0.6 * stock["peak_bytes"]))}
    found = {"disturbed": start("managing.py", "disturbed", str(MANY), **tight)}
    for mode in ("broken", "profiled", "freed", "forked", "ended"):
        found[mode] = start("managing.py", mode, str(STEPS), **tight)
    too_small = {**DETERMINISTIC, **under("managed", "48MiB")}
    found["too small"] = start("managing.py", "patient", str(STEPS), **too_small)
    return found


def test_no_hint_changes_a_value_in_200_steps(jobs: dict[str, Job], stock: Any) -> None:
    facts = jobs["disturbed"].facts()
    assert facts["losses"] == stock["losses"]
    assert facts["checksum"] == stock["checksum"]
    assert facts["state"] == "running"
    assert facts["failures"] == []


@pytest.mark.parametrize(
    ("mode", "diverged_steps"), [("broken", 2), ("profiled", 0), ("freed", 0), ("forked", 0)]
)
def test_training_goes_on(mode: str, diverged_steps: int, jobs: dict[str, Job], stock: Any) -> None:
    facts = jobs[mode].facts()
    assert facts["losses"] == stock["losses"][:STEPS]
    assert facts["state"] == "running"
    assert facts["diverged_steps"] == diverged_steps
    assert facts["failures"] == []


def test_a_model_that_goes_takes_its_manager_along(jobs: dict[str, Job]) -> None:
    facts = jobs["freed"].facts()
    assert facts["alive"] == 0


def test_a_budget_below_a_phase_ends_with_one_plain_warning(
    jobs: dict[str, Job], stock: Any
) -> None:
    facts = jobs["too small"].facts()
    assert facts["losses"] == stock["losses"][:STEPS]
    assert facts["state"] == "off"
    assert "the device budget is 48 MiB" in facts["reason"]
    assert "raise the budget" in facts["reason"]
    said = jobs["too small"].finish().stderr.splitlines()
    assert [facts["reason"] in line for line in said if "no plan for" in line] == [True]


def test_a_process_may_end_with_hints_in_flight(jobs: dict[str, Job]) -> None:
    facts = jobs["ended"].facts()
    done = jobs["ended"].finish()
    assert facts["open_requests"] > 0
    # On a machine that plans for the first time, one line says so.
    assert [it for it in done.stderr.splitlines() if "compiling the planner" not in it] == []
