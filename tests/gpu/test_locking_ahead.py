"""Host memory of a streamed training is page-locked beside its passes."""

from __future__ import annotations

import pytest
from gpu_jobs import SIDE_BY_SIDE, Start, under


@pytest.mark.gpu
def test_homes_find_memory_that_was_locked_ahead(start: Start) -> None:
    """But for a part: activations, which nothing tells before the pass, take room of state."""
    tight, wide = (
        start("locking_ahead.py", **SIDE_BY_SIDE, **under("sft", budget))
        for budget in ("9GiB", "40GiB")
    )
    steps = tight.facts()
    print(steps)
    assert steps[0][1] >= 0.75 * steps[0][0] > 1 << 30
    plan = next(number for number, (_, _, plans) in enumerate(steps) if plans)
    new, ahead, _ = map(sum, zip(*steps[plan : plan + 2], strict=True))  # it begins with the plan
    assert ahead >= 0.75 * new
    assert not any(new or ahead for new, ahead, _ in wide.facts())
