"""Small programs on the CPU's late lanes: no value differs from stock's, whatever reads it."""

from __future__ import annotations

import functools

import pytest
from late_runs import LateRun, RepeatedRun
from pairs import pairs
from small_trainings import HOST_SIZE, Program, Run
from sound_programs import PROGRAMS

pytestmark = pytest.mark.slow

ON_HOST = [each for each in PROGRAMS.values() if each.runs_on_host and not each.page]
"""Without those that may differ, for a reason that a page of docs/ names."""


@functools.cache
def stock(program: Program) -> dict[str, str]:
    """What a stock run records."""
    return trained(program, Run(HOST_SIZE, "cpu"))


def trained(program: Program, run: Run) -> dict[str, str]:
    program.train(run)
    try:
        return run.results()
    finally:
        run.close()


@pytest.mark.parametrize(
    ("program", "away", "eagerness"),
    pairs(ON_HOST, ["state", "weights", "all"], [0.0, 0.7]),
    ids=lambda each: getattr(each, "name", None),
)
def test_every_step_is_stocks(program: Program, away: str, eagerness: float) -> None:
    run = LateRun(eagerness, streams_weights=away != "state", copies=away == "all")
    assert trained(program, run) == stock(program)
    assert run.active, "nothing was deferred or away: equal means nothing"


@pytest.mark.parametrize("streams_weights", [False, True])
@pytest.mark.parametrize("program", ON_HOST, ids=lambda each: each.name)
def test_what_is_computed_twice_is_stocks(program: Program, streams_weights: bool) -> None:
    run = RepeatedRun(streams_weights=streams_weights)
    assert trained(program, run) == stock(program)
    # Two losses go backward by turns with their updates from the first step on.
    assert bool(run.again) == (program.name != "two_losses")
