"""Weights and optimizer state that are streamed together: no bit changes.

A step is queued and updates weights at home; the next forward pass stages them behind that.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from streamed_programs import Branches, NetWithFlat, Program, Tied, compare
from streamed_uses import USES
from torch import nn

EVERY = frozenset(["", "stem", *(f"layers.{number}" for number in range(4)), "norm", "head"])


@pytest.mark.parametrize("eagerness", [0.0, 0.8])
@pytest.mark.parametrize("use", USES)
def test_no_use_sees_another_value(use: Callable[[Program], None], eagerness: float) -> None:
    program = compare(use, eagerness, streams_weights=True)
    assert program.weights is not None
    assert program.weights.streamed.counts.fetched


@pytest.mark.parametrize("make_model", [NetWithFlat, Tied, Branches])
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("copied", [EVERY, frozenset[str]()])
def test_no_bit_changes(
    make_model: Callable[[], nn.Module], batches: int, copied: frozenset[str]
) -> None:
    compare(
        make_model=make_model,
        batches=batches,
        copied_gradients=copied,
        streams_weights=True,
        eagerness=0.5,
    )


def test_updates_stay_deferred_and_weights_are_fetched_ahead() -> None:
    # On a GPU, too, updates are launched when they are queued.
    program = compare(steps=8, eagerness=1.0, streams_weights=True)
    assert program.training is not None
    assert program.weights is not None
    counts, weights = program.training.counts, program.weights.streamed.counts
    # At the end the program looks at all weights itself.
    assert (counts.waited, counts.early, counts.in_line) == (0, 8, 0)
    # In each step the first block comes late: its update is what the step began with.
    assert weights.late <= 8 + 2


def test_updates_in_the_backward_pass_use_weights_in_place() -> None:
    program = compare(steps=6, clips=False, in_backward=True, streams_weights=True)
    assert program.weights is not None
    assert program.weights.status().streamed_bytes == 0
