"""Parts of the optimizer's step that overlap with the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from managed_training import TIGHT, both, program_of
from torch import nn

from umem.core.classes import TensorClass
from umem.executor import ManagerState
from umem.executor.optimizer.overlapped_step import (
    CHUNK_ELEMENTS,
    OverlappedOptimizerStep,
    can_run_beside,
    split_into_launches,
)
from umem.planning.running_step import (
    with_gradient_lifetimes,
    with_open_blocks,
    with_overlapped_parts,
)
from umem.trace import Access, Trace, check_trace

MIB = 1 << 20
CHUNKS = 16

fused = partial(torch.optim.AdamW, lr=1e-3, fused=True)

MakeTrace = Callable[..., Trace]


def parameters() -> list[torch.Tensor]:
    """More elements than one launch updates, few, none, and some of another type."""
    torch.manual_seed(0)
    numbers = torch.randn(CHUNKS + 3, CHUNK_ELEMENTS), torch.randn(5), torch.empty(0, 3)
    return [nn.Parameter(it) for it in (*numbers, torch.randn(70_000).bfloat16())]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("extra", [{}, {"amsgrad": True, "maximize": True, "weight_decay": 0.1}])
def test_overlapped_parts_equal_the_optimizers_step(kind: Any, extra: Any) -> None:
    results = []
    for overlaps in (False, True):
        mine = parameters()
        groups = [{"params": mine[:2], "lr": 1e-2}, {"params": mine[2:], "betas": (0.8, 0.99)}]
        optimizer = kind(groups, fused=True, **extra)
        beside = OverlappedOptimizerStep(optimizer, torch.device("cpu"), CHUNKS)
        beside.names = frozenset({"a"})
        for step in range(4):
            torch.manual_seed(step)
            for parameter in mine:
                parameter.grad = torch.randn_like(parameter)
            if overlaps and step:  # the first step makes the state
                assert beside.run("a", [mine[:2], mine[2:]])
            else:
                optimizer.step()
        states = [optimizer.state[parameter] for parameter in mine]
        results.append([*mine, *chain.from_iterable(state.values() for state in states)])
    assert len(results[0]) == len(results[1]) >= 4 * len(parameters())
    assert all(map(torch.equal, *results))


def test_a_launch_has_a_limited_number_of_chunks_of_one_type() -> None:
    rows = [
        (parameter.detach().view(-1), torch.tensor(float(number)))
        for number, parameter in enumerate(parameters())
    ]
    pieces = list(split_into_launches(rows, CHUNKS))
    for piece in pieces:
        chunks = sum(-(-len(numbers) // CHUNK_ELEMENTS) for numbers, _ in piece)
        assert 0 < chunks <= CHUNKS
        assert len({numbers.dtype for numbers, _ in piece}) == 1
    for number, (whole, step) in enumerate(rows):
        found = [part for piece in pieces for part, its in piece if its is step]
        assert torch.equal(torch.cat([*found, whole[:0]]), whole), number
        begins = [part.storage_offset() for part in found]
        assert all(begin % CHUNK_ELEMENTS == 0 for begin in begins)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda optimizer, _: optimizer.state.clear(),
        lambda optimizer, _: optimizer.param_groups[0].update(lr=torch.tensor(1e-3)),
        lambda optimizer, _: optimizer.param_groups[0].update(fused=False),
        lambda _, weight: setattr(weight, "grad", None),
        lambda _, weight: setattr(weight, "grad", weight.grad.to_sparse()),
        lambda optimizer, weight: optimizer.state[weight].update(exp_avg=torch.zeros(4, 8).t()),
        lambda optimizer, weight: optimizer.state[weight].update(exp_avg=torch.zeros(4)),
    ],
    ids=["state", "tensor", "unfused", "gradient", "sparse", "strides", "shape"],
)
def test_parameters_that_cannot_be_split_are_left_to_the_step(spoil: Callable[..., object]) -> None:
    weight = nn.Parameter(torch.ones(8, 4))
    optimizer = fused([weight])
    weight.grad = torch.ones(8, 4)
    optimizer.step()
    beside = OverlappedOptimizerStep(optimizer, torch.device("cpu"), CHUNKS)
    beside.names = frozenset({"a"})
    assert not beside.run("b", [[weight]])
    spoil(optimizer, weight)
    before = weight.detach().clone()
    assert not beside.run("a", [[weight]])
    assert torch.equal(weight, before)


@pytest.mark.parametrize(
    ("kind", "settings", "may"),
    [
        (torch.optim.AdamW, {"fused": True}, True),
        (torch.optim.Adam, {"fused": True}, True),
        (torch.optim.AdamW, {}, False),
        (torch.optim.AdamW, {"foreach": True}, False),
        (torch.optim.AdamW, {"fused": True, "lr": torch.tensor(1e-3)}, False),
        (torch.optim.SGD, {"fused": True}, False),
    ],
)
def test_only_fused_adam_overlaps(kind: Any, settings: Any, may: bool) -> None:
    assert can_run_beside(kind([nn.Parameter(torch.ones(4))], **settings)) == may


@pytest.fixture
def moved(make_trace: MakeTrace) -> Trace:
    """A step whose optimizer parts are in the backward pass; no phase follows the last part."""
    names = ("a", "b")
    trace = make_trace(
        {
            **dict.fromkeys(names, (MIB, TensorClass.WEIGHTS)),
            **{f"{name}.m": (4 * MIB, TensorClass.OPTIMIZER_STATE) for name in names},
            **{f"{name}.grad": (MIB, TensorClass.GRADIENTS, False) for name in names},
        },
        [
            (1e-3, ["a", "b"], []),
            (2e-3, ["b"], ["b.grad"]),
            (3e-3, ["b", "b.m", "b.grad"], ["b", "b.m"]),
            (1e-3, ["a"], []),
            (5e-3, ["a"], ["a.grad"]),
            (4e-3, ["a", "a.m", "a.grad"], ["a", "a.m"]),
        ],
    )
    phases = ("forward", "backward b", "optimizer b", "backward x", "backward a", "optimizer a")
    return replace(trace, phase_names=phases)


def used(trace: Trace, phase: int) -> dict[str, Access]:
    span = slice(*trace.access_start[phase : phase + 2])
    return {
        trace.tensor_names[tensor]: Access(mode)
        for tensor, mode in zip(trace.access_tensor[span], trace.access_mode[span], strict=True)
    }


def test_a_part_counts_with_the_longest_phase_after_it(moved: Trace) -> None:
    in_place = moved.tensor_class == TensorClass.OPTIMIZER_STATE.number
    trace, names = with_overlapped_parts(moved, in_place)
    check_trace(trace, "beside")
    assert names == {"b": 4}
    assert trace.phase_names == moved.phase_names
    both_ways = Access.READ | Access.WRITE
    assert "b.m" not in used(trace, 2)
    assert set(used(trace, 2)) == {"b", "b.grad"}
    assert used(trace, 4) == {
        "a": Access.READ, "a.grad": Access.WRITE, "b": both_ways, "b.grad": Access.READ,
        "b.m": both_ways,
    }  # fmt: skip
    assert used(trace, 5) == used(moved, 5)
    assert trace.last_phase[trace.tensor_names.index("b.grad")] == 4
    assert trace.duration_s is not None
    expected = [1e-3, 2e-3, 0, 1e-3, 5e-3, 4e-3]
    assert trace.duration_s == pytest.approx(expected)


def test_a_step_without_state_in_place_is_unchanged(moved: Trace) -> None:
    trace, names = with_overlapped_parts(moved, np.zeros(moved.tensor_count, np.bool_))
    assert trace is moved
    assert not names


def test_a_block_keeps_its_tensors_until_its_part_ends(make_trace: MakeTrace) -> None:
    trace = make_trace(
        {
            **{f"{name}.m": (MIB, TensorClass.OPTIMIZER_STATE) for name in ("a", "b")},
            **{f"saved {name}": (MIB, TensorClass.ACTIVATIONS, False) for name in ("a", "b")},
            **{f"frozen {name}": (MIB, TensorClass.FROZEN_WEIGHTS) for name in ("a", "b")},
        },
        [
            (1e-3, ["frozen a", "frozen b"], ["saved a", "saved b"]),
            (1e-3, ["frozen b", "saved b"], []),
            (1e-3, ["b.m"], ["b.m"]),
            (1e-3, ["frozen a", "saved a"], []),
            (1e-3, ["a.m"], ["a.m"]),
        ],
    )
    phases = ("forward", "backward b", "optimizer b", "backward a", "optimizer a")
    trace = replace(trace, phase_names=phases)
    opened = with_open_blocks(trace)
    check_trace(opened, "open")
    names = trace.tensor_names
    assert opened.last_phase[names.index("saved b")] == 2
    assert opened.last_phase[names.index("saved a")] == 3  # no phase follows its part
    assert used(opened, 2) == {"b.m": Access.READ | Access.WRITE, "frozen b": Access.READ}
    assert used(opened, 4) == used(trace, 4)
    kept = with_gradient_lifetimes(opened)
    in_place = kept.tensor_class == TensorClass.OPTIMIZER_STATE.number
    moved, parts = with_overlapped_parts(kept, in_place)
    assert parts == {"b": 3}
    assert set(used(moved, 2)) == {"gradients kept from 2 to 2", "frozen b"}
    assert set(used(moved, 3)) == {"saved a", "frozen a", "b.m"}


def test_a_block_keeps_its_tensors_until_its_last_part_ends(make_trace: MakeTrace) -> None:
    trace = make_trace(
        {
            "a": (MIB, TensorClass.WEIGHTS), "b": (MIB, TensorClass.WEIGHTS),
            "frozen": (MIB, TensorClass.FROZEN_WEIGHTS),
            "saved": (MIB, TensorClass.ACTIVATIONS, False),
        },
        [
            (1e-3, [], ["saved"]), (1e-3, ["a", "b", "frozen", "saved"], []),
            (1e-3, ["a"], ["a"]), (1e-3, ["b"], ["b"]), (1e-3, ["a"], []),
        ],
    )  # fmt: skip
    phases = ("forward", "backward", "optimizer a", "optimizer b", "backward input")
    opened = with_open_blocks(replace(trace, phase_names=phases))
    check_trace(opened, "open")
    both_ways = Access.READ | Access.WRITE
    assert used(opened, 2) == {"a": both_ways, "b": Access.READ, "frozen": Access.READ}
    assert used(opened, 3) == {"b": both_ways, "a": Access.READ, "frozen": Access.READ}
    assert opened.last_phase[trace.tensor_names.index("saved")] == 3
    assert used(opened, 4) == {"a": Access.READ}


ON_HOST = {
    "name": "on-host",
    "extends": "sft",
    "device_budget": None,
    "classes": {"optimizer_state": {"placement": "host", "mechanism": "map"}},
}
ALL = frozenset({"head", *(f"layers.{number}" for number in range(4))})


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("budget_bytes", [TIGHT, 100 * TIGHT])
def test_state_that_the_policy_places_on_the_host_is_updated_in_overlap(budget_bytes: int) -> None:
    _, manager = both(
        lambda it: it.steps(12), budget_bytes=budget_bytes, step_in_backward=True,
        make_optimizer=fused, policy=ON_HOST,
    )  # fmt: skip
    status = manager.status()
    assert (status.state, status.diverged_steps) == (ManagerState.RUNNING, 0)
    assert status.step_in_backward
    assert set(program_of(manager).candidate.overlapped) == ALL


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_state_that_the_planner_maps_is_updated_in_overlap() -> None:
    _, manager = both(lambda it: it.steps(12), step_in_backward=True, make_optimizer=fused)
    program = program_of(manager)
    assert set(program.candidate.overlapped) == ALL
    mapped = program.candidate.trace.tensor_class[program.candidate.mapped]
    assert set(mapped) == {TensorClass.OPTIMIZER_STATE.number}
    # The phase after the one that a part overlaps with waits for the part.
    joined = {name: phase for phase, work in enumerate(program.work) for name in work.joins}
    last = program.candidate.trace.phase_count - 1
    assert joined == {name: n + 1 for name, n in program.candidate.overlapped.items() if n < last}
    assert joined


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("make_optimizer", [partial(torch.optim.AdamW, lr=1e-3), fused])
def test_without_step_in_backward_nothing_overlaps(make_optimizer: Any) -> None:
    _, manager = both(lambda it: it.steps(12), make_optimizer=make_optimizer)
    assert not program_of(manager).candidate.overlapped
