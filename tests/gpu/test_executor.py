"""Trainings on a GPU under `umem.enable`, with a budget of 60 % of the stock run's peak."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from gpu_jobs import DETERMINISTIC, Job, Start, under

from umem.policy import Refusable

SHARE = 0.6
STEPS = 24
PLANNERS = ("planned", "lookahead", "fault")

ODD_TOKENS = "4100"
"""Activations of this many tokens do not fill whole pages."""


@pytest.fixture(scope="module")
def stock(start: Start) -> Any:
    return start("managing.py", "plain", str(STEPS), **DETERMINISTIC).facts()


@pytest.fixture(scope="module")
def odd(start: Start, budget_bytes: int) -> tuple[Job, Job]:
    """A stock run of tensors of odd sizes, and one whose activations move as pages."""
    managed = {**DETERMINISTIC, **under("managed", budget_bytes), "UMEM_PLANNER": "lookahead"}
    return (
        start("managing.py", "plain", str(STEPS), ODD_TOKENS, **DETERMINISTIC),
        start("managing.py", "sampled", str(STEPS), ODD_TOKENS, **managed),
    )


@pytest.fixture(scope="module")
def budget_bytes(stock: Any) -> int:
    return int(SHARE * stock["peak_bytes"])


@pytest.fixture(scope="module")
def managed(start: Start, budget_bytes: int) -> dict[str, Job]:
    """All jobs at once, with one that fits its budget, and one without a planner."""
    tight = {**DETERMINISTIC, **under("managed", budget_bytes)}
    roomy = {**DETERMINISTIC, **under("managed", 4 * budget_bytes)}
    jobs = {
        planner: start("managing.py", "sampled", str(STEPS), UMEM_PLANNER=planner, **tight)
        for planner in PLANNERS
    }
    jobs["roomy"] = start("managing.py", "plain", str(STEPS), **roomy)
    jobs["none"] = start("managing.py", "plain", str(STEPS), UMEM_PLANNER="none", **tight)
    return jobs


@pytest.mark.parametrize("job", PLANNERS)
def test_values_equal_those_of_a_stock_run(job: str, managed: dict[str, Job], stock: Any) -> None:
    facts = managed[job].facts()
    print({key: value for key, value in facts.items() if key != "losses"})
    assert facts["losses"] == stock["losses"]
    assert facts["checksum"] == stock["checksum"]
    assert facts["state"] == "running"
    assert facts["planner"] == job
    assert facts["steps"] > STEPS / 2
    assert facts["diverged_steps"] == 0
    assert facts["failures"] == []
    assert facts["moved_bytes"] + facts["copied_bytes"] > 0


@pytest.mark.parametrize("words", [*get_args(Refusable), ",".join(get_args(Refusable))])
def test_values_are_stocks_without_what_a_driver_may_refuse(
    words: str, start: Start, budget_bytes: int, stock: Any
) -> None:
    """Each call is warned of once, and the training goes on without it."""
    settings = {**DETERMINISTIC, **under("managed", budget_bytes), "UMEM_WITHOUT": words}
    job = start("managing.py", "sampled", str(STEPS), **settings)
    facts, said = job.facts(), job.finish().stderr
    assert facts["losses"] == stock["losses"]
    assert facts["checksum"] == stock["checksum"]
    assert set(facts["failures"]) <= {"switched off by UMEM_WITHOUT"}
    if "second_context" in words:
        assert said.count("hint: second_context failed") == 1
    for call in ("prefetch", "evict", "discard", "advise"):
        assert said.count(f"hint: {call} failed") <= 1


@pytest.mark.parametrize("job", PLANNERS)
def test_resident_bytes_stay_within_the_budget(
    job: str, managed: dict[str, Job], budget_bytes: int
) -> None:
    facts = managed[job].facts()
    assert facts["budget_bytes"] == budget_bytes
    assert facts["samples"] > 100
    assert facts["peak_resident_bytes"] <= 1.05 * budget_bytes


def test_tensors_of_odd_sizes_move_as_others_do(odd: tuple[Job, Job], budget_bytes: int) -> None:
    stock, facts = (job.facts() for job in odd)
    assert facts["losses"] == stock["losses"]
    assert facts["checksum"] == stock["checksum"]
    assert (facts["state"], facts["diverged_steps"]) == ("running", 0)
    assert facts["failures"] == []
    assert facts["moved_activation_bytes"] > 0
    assert facts["peak_resident_bytes"] <= 1.05 * budget_bytes


def test_activations_come_back_in_time(managed: dict[str, Job]) -> None:
    facts = managed["planned"].facts()
    assert facts["late_fetches"] == 0


def test_a_training_that_fits_moves_nothing(managed: dict[str, Job], stock: Any) -> None:
    facts = managed["roomy"].facts()
    assert facts["losses"] == stock["losses"]
    assert (facts["state"], facts["moved_bytes"]) == ("resident", 0)


def test_planner_none_manages_nothing(managed: dict[str, Job], stock: Any) -> None:
    facts = managed["none"].facts()
    assert facts["losses"] == stock["losses"]
    assert "state" not in facts
