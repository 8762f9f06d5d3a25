"""An error of umem itself, in a hook: the program has the bits of stock torch, and one warning."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from lazy_lanes import LazyLanes
from streamed_programs import Program, bits
from torch import nn

from umem.streaming import StreamedTraining
from umem.streaming.gradients import CopiedGradients
from umem.streaming.stage import Ring
from umem.streaming.step import TemporarySlots, call, pieces, step, units, whole_steps
from umem.streaming.step.unit import Piece
from umem.streaming.weights import ModelWeights, StreamedWeights


class InternalError(Exception):
    """As in umem's own code."""


PARTS: list[tuple[Any, str]] = [
    (step.StreamedStep, "wait"),
    (step.StreamedStep, "find_state"),
    (step.StreamedStep, "settle"),
    (step.StreamedStep, "have_loaded"),
    (step.StreamedStep, "can_split"),
    (step.StreamedStep, "join"),
    (step, "StepCall"),
    (step, "has_alias"),
    (units.StreamedUnits, "fetch_ahead"),
    (units.StreamedUnits, "lay_out"),
    (Piece, "copy_in"),
    (Ring, "write_back"),
    (Ring, "use"),
    (pieces.PieceUpdates, "launch"),
    (pieces.PieceUpdates, "of"),
    (pieces.PieceUpdates, "stage_operands"),
    (call.StepCall, "update"),
    (call.StepCall, "shadow"),
    (CopiedGradients, "step_begins"),
    (CopiedGradients, "settle"),
    (TemporarySlots, "step_begins"),
    (StreamedTraining, "_count_step"),
    (whole_steps.WholeSteps, "obstacle"),
    (ModelWeights, "begin_call"),
    (StreamedWeights, "step_begins"),
]


def break_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int) -> list[int]:
    """Have the call of a function with this number raise; returns the number of calls."""
    calls, function = [0], getattr(owner, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] - 1 == at:
            raise InternalError(name)
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, broken)
    return calls


def run(lanes: Callable[[nn.Module], LazyLanes] | None, begins: Callable[[], object]) -> Any:
    program = Program(lanes, copied_gradients=frozenset(("head",)), streams_weights=True)
    program.step()
    program.stream()
    program.step()
    begins()
    program.step()
    state = copy.deepcopy((program.model.state_dict(), program.optimizer.state_dict()))
    program.step()
    program.model.load_state_dict(state[0])
    program.optimizer.load_state_dict(state[1])
    for _ in range(2):
        program.step()
    with torch.no_grad():
        program.seen.append(program.model(program.batch()))
    return program, bits([program.seen, program.model.state_dict(), program.optimizer.state_dict()])


@cache
def stock() -> Any:
    return run(None, lambda: None)[1]


@pytest.mark.parametrize("at", [0, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("owner", "name"), PARTS, ids=lambda it: getattr(it, "__name__", it))
def test_the_training_goes_on_as_without_umem(
    owner: Any,
    name: str,
    at: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected, calls = stock(), list[list[int]]()
    program, found = run(
        lambda model: LazyLanes(model, 1.0),  # work runs when it is queued, as on a GPU
        lambda: calls.append(break_once(monkeypatch, owner, name, at)),
    )
    assert found == expected
    has_failed = calls[0][0] > at
    assert has_failed or at > 0
    assert len(caplog.records) == has_failed
    if has_failed:
        assert f"InternalError: {name}" in caplog.text
        assert program.training.is_closed or owner in (ModelWeights, StreamedWeights, Ring)
