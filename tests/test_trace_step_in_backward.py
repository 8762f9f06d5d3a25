"""Traces with the optimizer's step moved into the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from umem.capture.offline import model_trace
from umem.core.classes import TensorClass
from umem.core.errors import TraceError
from umem.trace import (
    Trace,
    check_trace,
    is_optimizer_phase,
    phase_of_access,
    with_step_in_backward,
)

MIB = 1 << 20

MakeTrace = Callable[..., Trace]


@pytest.fixture
def recorded(make_trace: MakeTrace) -> Trace:
    """Two blocks, one loose parameter, and a temporary tensor of the whole optimizer's step."""
    names = ("a", "b", "loose")
    trace = make_trace(
        {
            **dict.fromkeys(names, (MIB, TensorClass.WEIGHTS)),
            **{f"{name}.m": (MIB, TensorClass.OPTIMIZER_STATE) for name in names},
            **{f"{name}.grad": (MIB, TensorClass.GRADIENTS, False) for name in names},
            "saved": (MIB, TensorClass.ACTIVATIONS, False),
            "temporary": (100 * MIB, TensorClass.ACTIVATIONS, False),
        },
        [
            (1e-3, ["a", "b"], ["saved"]),
            (2e-3, ["b", "saved"], ["b.grad", "loose.grad"]),
            (3e-3, ["a"], ["a.grad"]),
            (4e-3, ["a.grad"], ["a", "a.m", "temporary"]),
            (5e-3, ["b.grad"], ["b", "b.m"]),
            (6e-3, ["loose.grad"], ["loose", "loose.m"]),
        ],
    )
    last_phase = trace.last_phase.copy()
    last_phase[trace.tensor_names.index("temporary")] = 5
    phases = ("forward", "backward b", "backward a", "optimizer a", "optimizer b", "optimizer")
    return replace(
        trace,
        phase_names=phases,
        memory_bytes=np.array([0, 0, 0, 6, 2, 2], np.int64),
        last_phase=last_phase,
    )


def lives(trace: Trace, name: str) -> tuple[int, int]:
    number = trace.tensor_names.index(name)
    return int(trace.first_phase[number]), int(trace.last_phase[number])


def test_parts_move_behind_the_phase_that_completes_their_gradients(recorded: Trace) -> None:
    order = ["optimizer", "optimizer b", "optimizer a"]
    moved, phases = with_step_in_backward(recorded, order)
    check_trace(moved, "moved")
    assert moved.phase_names == (
        "forward",
        "backward b",
        "optimizer",
        "optimizer b",
        "backward a",
        "optimizer a",
    )
    assert phases.tolist() == [0, 1, 5, 4, 2, 3]
    assert moved.duration_s is not None
    assert moved.duration_s.tolist() == [1e-3, 2e-3, 6e-3, 5e-3, 3e-3, 4e-3]
    assert lives(moved, "loose.grad") == (1, 2)
    assert lives(moved, "b.grad") == (1, 3)
    assert lives(moved, "a.grad") == (4, 5)
    assert lives(moved, "saved") == (0, 1)
    assert lives(moved, "a") == lives(moved, "a.m") == (0, 5)
    # One part's share of what the whole step held for a moment.
    assert lives(moved, "temporary") == (2, 5)
    assert moved.tensor_bytes[moved.tensor_names.index("temporary")] == 60 * MIB


def test_parts_keep_their_order_where_none_is_given(recorded: Trace) -> None:
    moved, _ = with_step_in_backward(recorded)
    check_trace(moved, "moved")
    assert moved.phase_names[1:4] == ("backward b", "optimizer b", "optimizer")


def test_parts_that_are_not_named_stay(recorded: Trace) -> None:
    moved, _ = with_step_in_backward(recorded, ["optimizer b"])
    check_trace(moved, "moved")
    assert moved.phase_names == (
        "forward",
        "backward b",
        "optimizer b",
        "backward a",
        "optimizer a",
        "optimizer",
    )
    assert lives(moved, "b.grad") == (1, 2)
    assert lives(moved, "a.grad") == (3, 5)
    assert lives(moved, "loose.grad") == (1, 5)

    same, phases = with_step_in_backward(recorded, [])
    assert same is recorded
    assert phases.tolist() == [0, 1, 2, 3, 4, 5]


def test_parts_with_persistent_gradients_stay(recorded: Trace) -> None:
    persistent = recorded.persistent.copy()
    number = recorded.tensor_names.index("a.grad")
    persistent[number] = True
    first, last = recorded.first_phase.copy(), recorded.last_phase.copy()
    first[number], last[number] = 0, recorded.phase_count - 1
    kept = replace(recorded, persistent=persistent, first_phase=first, last_phase=last)
    moved, _ = with_step_in_backward(kept)
    check_trace(moved, "moved")
    assert moved.phase_names[-2:] == ("backward a", "optimizer a")
    assert lives(moved, "a.grad") == (0, 5)


@pytest.mark.slow
def test_parameters_of_a_model_are_updated_one_by_one() -> None:
    trace = model_trace("llama-tiny", "sft", batch=1, seq=64)
    moved, phases = with_step_in_backward(trace)
    check_trace(moved, "moved")
    assert sorted(phases.tolist()) == list(range(trace.phase_count))
    assert sum(map(is_optimizer_phase, moved.phase_names)) > 10
    # The last gradient is the embedding's: its update ends the step.
    assert "embed_tokens" in moved.phase_names[-1]
    gradients = moved.tensor_class == TensorClass.GRADIENTS.number

    def most_at_once(of: Trace) -> int:
        change = np.zeros(of.phase_count + 1, np.int64)
        np.add.at(change, of.first_phase[gradients], of.tensor_bytes[gradients])
        np.add.at(change, of.last_phase[gradients] + 1, -of.tensor_bytes[gradients])
        return int(change.cumsum().max())

    assert most_at_once(moved) < most_at_once(trace) / 2
    # Nobody but the optimizer uses a weight that was updated.
    weights = moved.tensor_class == TensorClass.WEIGHTS.number
    phase = phase_of_access(moved)
    is_step = np.array([is_optimizer_phase(name) for name in moved.phase_names])[phase]
    for weight in np.flatnonzero(weights & moved.persistent):
        of_weight = moved.access_tensor == weight
        if (of_weight & is_step).any():
            assert phase[of_weight & ~is_step].max(initial=-1) < phase[of_weight & is_step].min()
    # Everything is used as often as before, and while it lives.
    assert np.array_equal(np.bincount(moved.access_tensor), np.bincount(trace.access_tensor))
    assert (moved.first_phase[moved.access_tensor] <= phase).all()
    assert (moved.last_phase[moved.access_tensor] >= phase).all()


def test_a_trace_without_an_optimizer_is_refused(make_trace: MakeTrace) -> None:
    trace = make_trace({"a": (MIB, TensorClass.WEIGHTS)}, [(1e-3, ["a"], [])])
    with pytest.raises(TraceError, match="no phases of an optimizer"):
        with_step_in_backward(trace)
