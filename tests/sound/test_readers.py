"""Whatever reads a tensor, and whenever, sees stock's bits: on the CPU's late lanes."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
from drawn_readers import BLOCKS, MOMENTS, OPTIMIZERS, TENSORS, THREADS, Reading, train_with_readers
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from late_runs import LateRun
from readers import READERS
from small_trainings import HOST_SIZE, Run

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("READER_EXAMPLES", "60"))
"""Of the property: the test suite's take some 10 s."""

STEPS = 3

READINGS = st.builds(
    Reading,
    reader=st.sampled_from(sorted(READERS)),
    moment=st.sampled_from(MOMENTS),
    tensor=st.sampled_from(TENSORS),
    thread=st.sampled_from(THREADS),
    place=st.integers(0, BLOCKS - 1),
    block=st.integers(0, BLOCKS - 1),
).filter(lambda reading: reading.is_possible and not reading.asks_versions)


def records(run: Run, optimizer: str, readings: Sequence[Reading]) -> dict[str, str]:
    train_with_readers(run, optimizer, lambda _: readings, STEPS)
    try:
        return run.results()
    finally:
        run.close()


def check(readings: Sequence[Reading], optimizer: str = "adamw-fused", **late: object) -> None:
    """Compare a run on late lanes with a stock one."""
    run = LateRun(**late)  # type: ignore[arg-type]
    found = records(run, optimizer, readings)
    expected = records(Run(HOST_SIZE, "cpu"), optimizer, readings)
    assert run.active, "nothing was deferred or away: equal means nothing"
    differing = [name for name in expected if found.get(name) != expected[name]]
    assert differing == []
    assert found == expected


@pytest.mark.parametrize(("number", "name"), list(enumerate(READERS)), ids=str)
def test_a_use_after_the_step_sees_the_update(number: int, name: str) -> None:
    """Of three tensors, of blocks in their order: each use waits for its own block's update."""
    tensors = TENSORS[::2] if number % 4 < 2 else TENSORS[1::2]
    readings = [
        Reading(name, "after step", each, block=block) for block, each in enumerate(tensors)
    ]
    check([each for each in readings if each.is_possible], streams_weights=number % 2 == 1)


@settings(
    deadline=None,
    max_examples=EXAMPLES,
    derandomize="READER_EXAMPLES" not in os.environ,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(
    readings=st.lists(READINGS, min_size=1, max_size=4),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    eagerness=st.floats(0, 0.95),
    seed=st.integers(0, 1000),
    streams_weights=st.booleans(),
    slots=st.integers(1, 3),
)
def test_any_readers_at_any_moments(
    readings: list[Reading],
    optimizer: str,
    eagerness: float,
    seed: int,
    streams_weights: bool,
    slots: int,
) -> None:
    check(
        readings,
        optimizer,
        eagerness=eagerness,
        seed=seed,
        streams_weights=streams_weights,
        slots=slots,
    )


@pytest.mark.parametrize("tensor", ["first state", "weight"])
def test_transforms_between_blocks_whose_weights_are_streamed(tensor: str) -> None:
    """torch refuses them where there are hooks on saved tensors."""
    readings = [
        Reading(reader=it, moment="between blocks", tensor=tensor, place=1, block=1)
        for it in ("gradient_by_func", "captured_by_a_gradient")
        if tensor == "weight" or it == "captured_by_a_gradient"
    ]
    check(readings, eagerness=0.0, seed=915, streams_weights=True, slots=2)
