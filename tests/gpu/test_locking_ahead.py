"""Host memory of a streamed training is page-locked beside its passes."""

from __future__ import annotations

import pytest
from gpu_jobs import SIDE_BY_SIDE, Start, under

pytestmark = pytest.mark.gpu


def test_homes_find_memory_that_was_locked_ahead(start: Start) -> None:
    steps = start("locking_ahead.py", **SIDE_BY_SIDE, **under("sft", "9GiB")).facts()
    print(steps)
    assert steps[0]["new"] > 1 << 30
    # Activations, which nothing tells before the pass, take room of some state.
    assert steps[0]["ahead"] >= 0.75 * steps[0]["new"]
    plan = next(number for number, it in enumerate(steps) if it["plans"])
    # The thread begins when the plan is made, at the end of a step.
    new, ahead = (sum(it[key] for it in steps[plan : plan + 2]) for key in ("new", "ahead"))
    assert ahead >= 0.75 * new


def test_what_fits_locks_nothing(start: Start) -> None:
    steps = start("locking_ahead.py", **SIDE_BY_SIDE, **under("sft", "40GiB")).facts()
    assert not any(it["new"] or it["ahead"] for it in steps)
