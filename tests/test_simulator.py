"""The simulator's costs, each in a case that can be worked out by hand, and its book-keeping."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_steps import BLOCK, workloads
from simulation_audit import find_errors

from umem.core.errors import PlanError, TraceError
from umem.core.report import MigrationReport
from umem.core.schedule import HintOp, ResidencyMode, Schedule
from umem.hardware import Hardware
from umem.pages.simulate import engine as _engine
from umem.pages.simulate import lower_bound_s, run, simulate, unavoidable_bytes
from umem.pages.simulate.run import build
from umem.policy import ResolvedPolicy, load_policy, resolve
from umem.trace import Trace

PAGES = 32  # of 64 KiB in a block
FAULTING = 17  # of them fault before the driver brings the rest

MakeTrace = Callable[..., Trace]
Hint = tuple[int, HintOp, str]


def policy_of(machine: Hardware, blocks: float | None = None) -> ResolvedPolicy:
    """All classes in managed memory, with a budget of so many blocks."""
    budget = None if blocks is None else f"{int(blocks * BLOCK)} B"
    return resolve(load_policy({"name": "test", "device_budget": budget}), machine, environ={})


def schedule_of(
    trace: Trace,
    hints: Sequence[Hint] = (),
    residencies: dict[str, ResidencyMode] | None = None,
    **options: Any,
) -> Schedule:
    """A schedule by names of tensors."""
    numbers = {name: number for number, name in enumerate(trace.tensor_names)}
    residency = np.full(trace.tensor_count, ResidencyMode.MIGRATE, np.uint8)
    for name, kind in (residencies or {}).items():
        residency[numbers[name]] = kind
    return Schedule(
        "by hand",
        residency,
        np.array([phase for phase, _, _ in hints], np.int32),
        np.array([op for _, op, _ in hints], np.uint8),
        np.array([numbers[name] for _, _, name in hints], np.int32),
        **options,
    )


@pytest.fixture
def swapping(make_trace: MakeTrace) -> Trace:
    """Two tensors of 10 blocks, used in turn for 100 ms each: room for one means a swap each."""
    return make_trace(
        {"a": (10 * BLOCK, "weights"), "b": (10 * BLOCK, "optimizer_state")},
        [(0.1, ["a"], ["a"]), (0.1, ["b"], ["b"])],
    )


def bytes_of(report: MigrationReport, direction: str, cause: str) -> int:
    return sum(
        entry.bytes
        for entry in report.traffic
        if (entry.direction, entry.cause) == (direction, cause)
    )


@pytest.mark.slow
def test_what_fits_costs_nothing(machine: Hardware, swapping: Trace) -> None:
    report = simulate(swapping, schedule_of(swapping), machine, policy_of(machine, 20))
    assert report.step_s == pytest.approx(0.2)
    assert report.traffic == ()
    assert report.regret == pytest.approx(1)
    assert report.um_time_share == report.um_ops_share == report.um_bytes_share == 0


def test_faults_cost_latency_service_eviction_transfer(machine: Hardware, swapping: Trace) -> None:
    report = simulate(swapping, schedule_of(swapping), machine, policy_of(machine, 10))
    # Ten blocks make 170 faults, below the 256 of a batch: one batch for each of the two swaps.
    swap_s = (
        machine.fault_batch_s
        + 10 * FAULTING * machine.fault_service_s
        + 10 * BLOCK / machine.to_host_bytes_per_s
        + 10 * BLOCK / machine.to_device_bytes_per_s
    )
    assert report.step_s == pytest.approx(0.2 + 2 * swap_s)
    assert report.stall_s["fault"] == pytest.approx(2 * swap_s)
    assert report.fault_pages == 2 * 10 * FAULTING
    assert report.fault_batches == 2
    assert bytes_of(report, "to_device", "fault") == 2 * 10 * FAULTING * 65536
    assert bytes_of(report, "to_device", "speculation") == 2 * 10 * (PAGES - FAULTING) * 65536
    assert bytes_of(report, "to_host", "eviction") == 2 * 10 * BLOCK
    assert report.um_bytes_share == 1


def test_overlapped_evictions_cost_what_the_slower_direction_does(
    machine: Hardware, swapping: Trace
) -> None:
    machine = dataclasses.replace(machine, fault_eviction="overlapped", link_bytes_per_s=1e15)
    report = simulate(swapping, schedule_of(swapping), machine, policy_of(machine, 10))
    swap_s = (
        machine.fault_batch_s
        + 10 * FAULTING * machine.fault_service_s
        + 10 * BLOCK / min(machine.to_host_bytes_per_s, machine.to_device_bytes_per_s)
    )
    assert report.step_s == pytest.approx(0.2 + 2 * swap_s)


def test_without_speculation_every_page_faults(machine: Hardware, swapping: Trace) -> None:
    machine = dataclasses.replace(machine, speculation_threshold=1.0)
    report = simulate(swapping, schedule_of(swapping), machine, policy_of(machine, 10))
    assert report.fault_pages == 2 * 10 * PAGES
    # 320 faults are more than a batch holds.
    assert report.fault_batches == 2 * 2
    assert bytes_of(report, "to_device", "speculation") == 0


def test_hints_in_time_hide_everything(machine: Hardware, make_trace: MakeTrace) -> None:
    trace = make_trace(
        {"a": (8 * BLOCK, "weights"), "b": (8 * BLOCK, "weights")},
        [(0.01, ["a"], ["a"]), (0.1, [], []), (0.01, ["b"], ["b"]), (0.1, [], [])],
    )
    hints = [
        (1, HintOp.EVICT, "a"),
        (1, HintOp.PREFETCH, "b"),
        (3, HintOp.EVICT, "b"),
        (3, HintOp.PREFETCH, "a"),
    ]
    report = simulate(trace, schedule_of(trace, hints), machine, policy_of(machine, 8))
    assert report.step_s == pytest.approx(0.22)
    assert bytes_of(report, "to_device", "hint") == 16 * BLOCK
    assert bytes_of(report, "to_host", "hint") == 16 * BLOCK
    assert (report.fault_pages, report.hints_late, report.hints_wasted) == (0, 0, 0)


@pytest.mark.parametrize("waits", [True, False])
def test_a_late_prefetch_is_waited_for_or_overtaken_by_faults(
    machine: Hardware, make_trace: MakeTrace, waits: bool
) -> None:
    transfer_s = 8 * BLOCK / machine.to_device_bytes_per_s
    trace = make_trace(
        {"a": (8 * BLOCK, "weights"), "b": (8 * BLOCK, "weights")},
        # The prefetch of b has a quarter of the time that it takes.
        [(0.1, ["a"], ["a"]), (transfer_s / 4, [], []), (0.1, ["b"], ["b"]), (0.1, [], [])],
    )
    hints = [(0, HintOp.EVICT, "b"), (1, HintOp.PREFETCH, "b")]
    report = simulate(trace, schedule_of(trace, hints, waits=waits), machine, policy_of(machine))
    if waits:
        assert report.stall_s["prefetch"] == pytest.approx(0.75 * transfer_s)
        assert report.hints_late == 1
        assert report.fault_pages == 0
    else:
        # Two blocks are there or under way; the other six fault, behind the one under way.
        assert report.fault_pages == pytest.approx(6 * FAULTING, abs=FAULTING)
    assert report.step_s == pytest.approx(
        0.3 + transfer_s / 4 + report.stall_s["prefetch"] + report.stall_s["fault"]
    )


def test_each_call_costs_its_overhead(machine: Hardware, make_trace: MakeTrace) -> None:
    machine = dataclasses.replace(machine, call_s=1e-3, call_bytes=4 * BLOCK)
    trace = make_trace(
        {"a": (8 * BLOCK, "weights")}, [(0.1, ["a"], ["a"]), (0.1, [], []), (0.0, [], [])]
    )
    hints = [(1, HintOp.EVICT, "a"), (2, HintOp.PREFETCH, "a")]
    report = simulate(trace, schedule_of(trace, hints), machine, policy_of(machine))
    transfer_s = 8 * BLOCK / machine.to_device_bytes_per_s
    assert report.stall_s["prefetch"] == pytest.approx(2 * 1e-3 + transfer_s)


def test_copies_cost_no_calls(machine: Hardware, make_trace: MakeTrace) -> None:
    trace = make_trace(
        {"a": (8 * BLOCK, "weights")}, [(0.1, ["a"], ["a"]), (0.1, [], []), (0.0, [], [])]
    )
    hints = [(1, HintOp.COPY_OUT, "a"), (2, HintOp.COPY_IN, "a")]
    steps = {
        simulate(
            trace,
            schedule_of(trace, hints),
            dataclasses.replace(machine, call_s=call_s, call_bytes=4 * BLOCK),
            policy_of(machine),
        ).step_s
        for call_s in (0.0, 1e-3)
    }
    (step_s,) = steps
    assert step_s > 0.2  # it waits for the copy


def test_both_directions_share_the_link(machine: Hardware, make_trace: MakeTrace) -> None:
    rate = machine.to_device_bytes_per_s
    machine = dataclasses.replace(machine, to_host_bytes_per_s=rate, link_bytes_per_s=rate)
    trace = make_trace(
        {"a": (8 * BLOCK, "weights"), "b": (8 * BLOCK, "weights")},
        [(0.1, ["a"], ["a"]), (0.0, ["b"], ["b"]), (0.1, [], []), (0.1, [], [])],
    )
    hints = [
        (1, HintOp.EVICT, "a"),
        (1, HintOp.PREFETCH, "b"),
        (2, HintOp.EVICT, "b"),
        (3, HintOp.PREFETCH, "a"),
    ]
    report = simulate(trace, schedule_of(trace, hints), machine, policy_of(machine))
    # While a leaves, b comes at half the rate.
    assert report.stall_s["prefetch"] == pytest.approx(2 * 8 * BLOCK / rate)


def test_mapped_memory_is_used_over_the_link(machine: Hardware, swapping: Trace) -> None:
    residencies = {"b": ResidencyMode.MAP}
    report = simulate(
        swapping, schedule_of(swapping, residencies=residencies), machine, policy_of(machine, 10)
    )
    # Both at once share mapped_bytes_per_s, here in proportion to what each has alone.
    share = machine.mapped_bytes_per_s / (
        machine.mapped_read_bytes_per_s + machine.mapped_write_bytes_per_s
    )
    slower = share * min(machine.mapped_read_bytes_per_s, machine.mapped_write_bytes_per_s)
    mapped_s = 10 * BLOCK / slower
    assert mapped_s < 0.1
    assert report.step_s == pytest.approx(0.2)
    assert bytes_of(report, "to_device", "mapped") == 10 * BLOCK
    assert bytes_of(report, "to_host", "mapped") == 10 * BLOCK
    # In place is no transfer of pages.
    assert report.um_bytes_share == 0

    quick = dataclasses.replace(swapping, duration_s=np.array([0.1, 0.0]))
    report = simulate(
        quick, schedule_of(quick, residencies=residencies), machine, policy_of(machine, 10)
    )
    assert report.stall_s["mapped"] == pytest.approx(mapped_s, rel=0.3)
    assert report.step_s == pytest.approx(0.1 + report.stall_s["mapped"])


def test_what_is_read_in_place_has_the_link_once_nothing_is_written(
    machine: Hardware, make_trace: MakeTrace
) -> None:
    trace = make_trace(
        {"a": (20 * BLOCK, "weights"), "b": (5 * BLOCK, "weights")}, [(0.0, ["a"], ["b"])]
    )
    schedule = schedule_of(trace, residencies=dict.fromkeys("ab", ResidencyMode.MAP))
    report = simulate(trace, schedule, machine, policy_of(machine))
    # 15 blocks a millisecond each way, then 20 one way.
    assert report.step_s == pytest.approx((5 / 15 + 15 / 20) * 1e-3)


def test_copies_of_what_is_read_leave_for_nothing(machine: Hardware, make_trace: MakeTrace) -> None:
    tensors = {"a": (10 * BLOCK, "frozen_weights"), "b": (10 * BLOCK, "frozen_weights")}
    residencies = {"a": ResidencyMode.DUPLICATE, "b": ResidencyMode.DUPLICATE}
    read = make_trace(tensors, [(0.1, ["a"], []), (0.1, ["b"], [])])
    report = simulate(
        read, schedule_of(read, residencies=residencies), machine, policy_of(machine, 10)
    )
    assert report.moved_bytes("to_device") == 20 * BLOCK
    assert report.moved_bytes("to_host") == 0

    written = make_trace(tensors, [(0.1, ["a"], []), (0.1, ["b"], ["b"])])
    report = simulate(
        written, schedule_of(written, residencies=residencies), machine, policy_of(machine, 10)
    )
    assert report.moved_bytes("to_host") == 10 * BLOCK


def test_dead_contents_are_dropped(machine: Hardware, make_trace: MakeTrace) -> None:
    trace = make_trace(
        {"a": (10 * BLOCK, "gradients"), "b": (10 * BLOCK, "weights")},
        [(0.1, [], ["a"]), (0.1, ["a"], []), (0.1, ["b"], ["b"])],
    )
    hints = [(0, HintOp.EVICT, "b"), (2, HintOp.DISCARD, "a"), (2, HintOp.PREFETCH, "b")]
    report = simulate(trace, schedule_of(trace, hints), machine, policy_of(machine, 10))
    assert report.moved_bytes("to_host") == 10 * BLOCK  # b alone
    assert report.moved_bytes("to_device") == 10 * BLOCK


def test_the_copy_kernel_has_its_own_rates_and_slows_compute(
    machine: Hardware, make_trace: MakeTrace
) -> None:
    machine = dataclasses.replace(
        machine,
        copy_to_host_bytes_per_s=2 * machine.to_host_bytes_per_s,
        copy_slowdown_s_per_byte=1e-3 / BLOCK,
    )
    trace = make_trace(
        {"a": (8 * BLOCK, "activations")}, [(0.1, ["a"], ["a"]), (0.1, [], []), (0.1, [], [])]
    )
    hints = [(1, HintOp.COPY_OUT, "a"), (2, HintOp.COPY_IN, "a")]
    report = simulate(trace, schedule_of(trace, hints), machine, policy_of(machine))
    assert report.stall_s["copy"] == pytest.approx(16e-3)
    assert report.step_s == pytest.approx(0.3 + 16e-3)
    seconds = {entry.direction: entry.seconds for entry in report.traffic}
    assert seconds["to_host"] == pytest.approx(8 * BLOCK / machine.copy_to_host_bytes_per_s)
    assert report.um_time_share == 0


def test_pages_slow_computation_beside_them(machine: Hardware, make_trace: MakeTrace) -> None:
    machine = dataclasses.replace(machine, page_slowdown_s_per_byte=1e-3 / BLOCK)
    trace = make_trace(
        {"a": (8 * BLOCK, "activations")}, [(0.1, ["a"], ["a"]), (0.1, [], []), (0.1, [], [])]
    )
    ahead = [(1, HintOp.EVICT, "a"), (2, HintOp.PREFETCH, "a")]
    report = simulate(trace, schedule_of(trace, ahead), machine, policy_of(machine))
    assert report.stall_s["pages"] == pytest.approx(16e-3)
    assert report.step_s == pytest.approx(0.3 + 16e-3)
    # While a phase waits for pages, no computation is slowed by them.
    late = [(0, HintOp.PREFETCH, "a"), (1, HintOp.EVICT, "a")]
    report = simulate(trace, schedule_of(trace, late), machine, policy_of(machine))
    assert report.stall_s["pages"] == pytest.approx(8e-3)
    waited_s = 8 * BLOCK / machine.to_device_bytes_per_s
    assert report.step_s == pytest.approx(0.3 + 8e-3 + waited_s)


def test_memory_in_place_slows_computation_beside_it(machine: Hardware, swapping: Trace) -> None:
    """A phase takes as long as its bytes need, or as its slowed kernel: whichever is longer."""

    def step_of(trace: Trace, slowdown_s: float) -> MigrationReport:
        slow = dataclasses.replace(machine, mapped_slowdown_s_per_byte=slowdown_s / BLOCK)
        schedule = schedule_of(trace, residencies={"b": ResidencyMode.MAP})
        return simulate(trace, schedule, slow, policy_of(slow, 10))

    report = step_of(swapping, 1e-3)
    assert report.stall_s["mapped"] == pytest.approx(20e-3)  # b is read and written
    assert report.step_s == pytest.approx(0.2 + 20e-3)
    quick = dataclasses.replace(swapping, duration_s=np.array([0.1, 0.0]))
    assert step_of(quick, 1e-6).step_s == step_of(quick, 0.0).step_s > 0.1


def test_a_copy_is_kept_on_the_host_for_what_is_not_written(
    machine: Hardware, make_trace: MakeTrace
) -> None:
    trace = make_trace(
        {"a": (8 * BLOCK, "weights")}, [(0.1, ["a"], []), (0.1, [], []), (0.1, [], [])]
    )
    hints = [(1, HintOp.COPY_OUT, "a"), (2, HintOp.COPY_IN, "a")]
    report = simulate(trace, schedule_of(trace, hints), machine, policy_of(machine))
    assert report.moved_bytes("to_device") == 8 * BLOCK
    assert report.moved_bytes("to_host") == 0


@pytest.mark.parametrize("copies", [False, True])
def test_what_was_written_back_leaves_for_nothing(
    machine: Hardware, make_trace: MakeTrace, copies: bool
) -> None:
    """Ten blocks, written at 0 and read at 2, are copied to the host in between."""
    phases = [(1e-3, ["a"], ["a"]), (1e-3, [], []), (1e-3, ["a"], []), *[(1e-3, [], [])] * 2]
    trace = make_trace({"a": (10 * BLOCK, "weights")}, phases)
    back, out, come = (
        (HintOp.COPY_BACK, HintOp.COPY_OUT, HintOp.COPY_IN)
        if copies
        else (HintOp.WRITE_BACK, HintOp.EVICT, HintOp.PREFETCH)
    )
    hints = [(1, back, "a"), (3, out, "a"), (4, come, "a")]
    held = {"a": ResidencyMode.DUPLICATE}
    report = simulate(trace, schedule_of(trace, hints, held), machine, policy_of(machine, 10))
    cause = "copy" if copies else "hint"
    assert bytes_of(report, "to_host", cause) == 10 * BLOCK
    assert bytes_of(report, "to_device", cause) == 10 * BLOCK
    assert report.moved_bytes() == 20 * BLOCK
    assert report.hints_wasted == 0
    assert report.step_s == pytest.approx(5e-3)


def test_a_write_ends_what_was_written_back(machine: Hardware, make_trace: MakeTrace) -> None:
    """The copy is made before the write, so that the tensor moves once more when it leaves."""
    phases = [(1e-3, [], []), (1e-3, ["a"], ["a"]), *[(1e-3, [], [])] * 2]
    trace = make_trace({"a": (10 * BLOCK, "weights")}, phases)
    hints = [(0, HintOp.WRITE_BACK, "a"), (2, HintOp.EVICT, "a"), (3, HintOp.PREFETCH, "a")]
    report = simulate(trace, schedule_of(trace, hints), machine, policy_of(machine, 10))
    assert bytes_of(report, "to_host", "hint") == 20 * BLOCK
    # One that has not begun is called off, and the block under way is of no use.
    phases[0] = (0.05e-3, [], [])
    quick = make_trace({"a": (10 * BLOCK, "weights")}, phases)
    report = simulate(quick, schedule_of(quick, hints), machine, policy_of(machine, 10))
    assert bytes_of(report, "to_host", "hint") == 11 * BLOCK


def test_copies_both_ways_share_their_own_link(machine: Hardware, make_trace: MakeTrace) -> None:
    """Ten blocks each way at once, at 20 and 20 a millisecond alone."""
    trace = make_trace(
        {"a": (10 * BLOCK, "weights"), "b": (10 * BLOCK, "weights")},
        [(1e-3, ["a"], ["a"]), (1e-3, ["b"], ["b"])],
    )
    hints = [(0, HintOp.COPY_OUT, "b"), (0, HintOp.COPY_IN, "a")]
    hints += [(1, HintOp.COPY_OUT, "a"), (1, HintOp.COPY_IN, "b")]
    step_s = []
    for share in (1.0, 0.5):
        slower = dataclasses.replace(
            machine,
            link_bytes_per_s=1e15,
            copy_link_bytes_per_s=share * 2 * machine.copy_to_host_bytes_per_s,
        )
        report = simulate(trace, schedule_of(trace, hints), slower, policy_of(slower, 15))
        step_s.append(report.step_s)
    assert step_s[1] > step_s[0]


@pytest.mark.parametrize(("order", "evicted"), [("access", "b"), ("migration", "a")])
def test_the_driver_evicts_in_its_order(
    machine: Hardware, make_trace: MakeTrace, order: Any, evicted: str
) -> None:
    # a moved before b and is used after b; then there is room for one of them only beside c.
    machine = dataclasses.replace(machine, eviction_order=order)
    trace = make_trace(
        {
            "a": (4 * BLOCK, "weights"),
            "b": (4 * BLOCK, "gradients"),
            "c": (4 * BLOCK, "activations", False),
        },
        [(0.1, ["a"], []), (0.1, ["b"], []), (0.1, ["a"], []), (0.1, [], ["c"])],
    )
    sim = build(trace, schedule_of(trace), machine, policy_of(machine, 8))
    assert _engine.run_step(sim)
    states = sim.blocks["state"][sim.blocks["tensor"] == trace.tensor_names.index(evicted)]
    assert set(states) == {_engine.HOST}


def test_own_addresses_move_the_dead_too(machine: Hardware, make_trace: MakeTrace) -> None:
    trace = make_trace(
        {
            "a": (8 * BLOCK, "activations", False),
            "b": (8 * BLOCK, "activations", False),
            "w": (2 * BLOCK, "weights"),
        },
        [(0.1, ["w"], ["a"]), (0.1, ["a"], []), (0.1, ["w"], ["b"]), (0.1, ["b"], [])],
    )
    schedule = schedule_of(trace)
    reused = simulate(trace, schedule, machine, policy_of(machine, 10))
    own = simulate(trace, schedule, machine, policy_of(machine, 10), addresses="own")
    assert reused.moved_bytes() == 0
    assert own.moved_bytes("to_host") == own.moved_bytes("to_device") == 16 * BLOCK


def test_counters_may_ask_for_a_block_each_phase(machine: Hardware, make_trace: MakeTrace) -> None:
    # b finds no room, so that each of its 40 accesses in a step asks for it anew.
    machine = dataclasses.replace(machine, ats=True, access_counter_threshold=1)
    trace = make_trace(
        {"a": (4 * BLOCK, "weights"), "b": (BLOCK, "weights")},
        [(0.1, ["a", "b"], []) for _ in range(40)],
    )
    schedule = schedule_of(trace, residencies=dict.fromkeys("ab", ResidencyMode.SYSTEM))
    report = simulate(trace, schedule, machine, policy_of(machine, 4))
    assert report.moved_bytes("to_device", "mapped") == 40 * BLOCK
    assert report.moved_bytes("to_device") == 40 * BLOCK


def test_system_memory_is_used_in_place_until_counters_move_it(
    machine: Hardware, make_trace: MakeTrace
) -> None:
    machine = dataclasses.replace(machine, ats=True, access_counter_threshold=2)
    trace = make_trace(
        {"a": (4 * BLOCK, "weights"), "b": (8 * BLOCK, "weights"), "c": (4 * BLOCK, "weights")},
        [(0.1, ["a"], []), (0.1, ["b"], []), (0.1, ["c"], [])],
    )
    residencies = dict.fromkeys("abc", ResidencyMode.SYSTEM)
    # a and b fill the device; c stays on the host, for counters evict nothing.
    full = simulate(
        trace, schedule_of(trace, residencies=residencies), machine, policy_of(machine, 12)
    )
    assert full.moved_bytes("to_device", "mapped") == 4 * BLOCK
    assert full.fault_pages == 0
    assert full.um_time_share == 0

    # The budget begins to bind where a and the first half of b are: with room, c follows.
    sim = run(
        trace, schedule_of(trace, residencies=residencies), machine, policy_of(machine, 12)
    ).sim
    sim.machine["capacity_bytes"] += 4 * BLOCK
    for _ in range(2):
        sim.traffic_bytes[:] = 0
        assert _engine.run_step(sim)
    assert sim.traffic_bytes[0, _engine.COUNTER].sum() == 4 * BLOCK
    sim.traffic_bytes[:] = 0
    assert _engine.run_step(sim)
    assert sim.traffic_bytes.sum() == 0


def test_small_tensors_take_their_own_bytes(machine: Hardware, make_trace: MakeTrace) -> None:
    trace = make_trace(
        {str(number): (4096, "weights") for number in range(100)},
        [(0.1, [str(number) for number in range(100)], [])],
    )
    report = simulate(trace, schedule_of(trace), machine, policy_of(machine, 100 * 4096 / BLOCK))
    assert report.traffic == ()


def test_a_phase_that_does_not_fit_is_named(machine: Hardware, swapping: Trace) -> None:
    with pytest.raises(PlanError, match=r"phases\[0\] \(phase 0\) uses 20 MiB .* budget is 18 MiB"):
        simulate(swapping, schedule_of(swapping), machine, policy_of(machine, 9))
    kept = schedule_of(swapping, residencies={"a": ResidencyMode.KEEP, "b": ResidencyMode.KEEP})
    with pytest.raises(PlanError, match="40 MiB are kept on the device, more than the budget"):
        simulate(swapping, kept, machine, policy_of(machine, 19))


def test_absurdly_large_traces_are_refused(machine: Hardware, make_trace: MakeTrace) -> None:
    trace = make_trace(
        {str(number): (2**40, "activations", False) for number in range(129)},
        [(0.1, [], [str(number)]) for number in range(129)],
    )
    with pytest.raises(PlanError, match=r"67,633,152 blocks of 2 MiB in all, and at most 67,108,"):
        simulate(trace, schedule_of(trace), machine, policy_of(machine))


def test_a_schedule_of_another_trace_is_refused(
    machine: Hardware, swapping: Trace, make_trace: MakeTrace
) -> None:
    other = make_trace({"a": (BLOCK, "weights")}, [(0.1, ["a"], [])])
    with pytest.raises(PlanError, match="the schedule is for 1 tensors"):
        simulate(swapping, schedule_of(other), machine, policy_of(machine))


def test_a_trace_without_durations_is_refused(machine: Hardware, swapping: Trace) -> None:
    untimed = dataclasses.replace(swapping, duration_s=None)
    with pytest.raises(TraceError, match=r"has no durations: apply umem\.hardware\.with_durations"):
        simulate(untimed, schedule_of(untimed), machine, policy_of(machine))


def test_the_timeline_adds_up(machine: Hardware, swapping: Trace) -> None:
    report = simulate(
        swapping, schedule_of(swapping), machine, policy_of(machine, 10), timeline=True
    )
    line = report.timeline
    assert line is not None
    assert line.budget_bytes == 10 * BLOCK
    assert line.resident_bytes.sum(axis=1).tolist() == [10 * BLOCK, 10 * BLOCK]
    assert line.phase_end_s[-1] == pytest.approx(report.step_s)


# ------------------------------------------------------------------------------ the lower bound


def test_the_bound_counts_what_has_to_cross_the_link(machine: Hardware, swapping: Trace) -> None:
    in_bytes, out_bytes = unavoidable_bytes(swapping, 10 * BLOCK)
    # Between two phases 20 blocks wait for their next use, and ten fit. The edges of the eight
    # steps that the bound looks at hide one interval of each tensor.
    assert in_bytes == pytest.approx(10 * BLOCK, rel=0.15)
    assert out_bytes == in_bytes
    assert unavoidable_bytes(swapping, 20 * BLOCK) == (0, 0)
    assert lower_bound_s(swapping, machine, 10 * BLOCK) == pytest.approx(0.2)
    quick = dataclasses.replace(swapping, duration_s=np.zeros(2))
    assert lower_bound_s(quick, machine, 10 * BLOCK) > 0


def test_what_is_read_only_need_not_go_back(make_trace: MakeTrace) -> None:
    trace = make_trace(
        {"a": (10 * BLOCK, "weights"), "b": (10 * BLOCK, "weights")},
        [(0.1, ["a"], []), (0.1, ["b"], [])],
    )
    in_bytes, out_bytes = unavoidable_bytes(trace, 10 * BLOCK)
    assert in_bytes > 0
    assert out_bytes == 0


# --------------------------------------------------------------------------------- conservation


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    workload=workloads(),
    budget=st.integers(1, 12 * BLOCK),
    hints=st.lists(st.tuples(st.integers(0, 11), st.sampled_from(HintOp), st.integers(0, 7))),
    residencies=st.lists(st.sampled_from(ResidencyMode), min_size=8, max_size=8),
    waits=st.booleans(),
    addresses=st.sampled_from(["reused", "own"]),
    ats=st.booleans(),
    variant=st.sampled_from(["serial", "overlapped"]),
)
def test_bytes_are_conserved_whatever_the_hints(
    random_trace: Callable[..., Trace],
    machine: Hardware,
    workload: Any,
    budget: int,
    hints: list[tuple[int, HintOp, int]],
    residencies: list[ResidencyMode],
    waits: bool,
    addresses: Any,
    ats: bool,
    variant: Any,
) -> None:
    trace = random_trace(*workload)
    machine = dataclasses.replace(machine, fault_eviction=variant, access_counter_threshold=2)
    valid = sorted(
        (phase, op, tensor)
        for phase, op, tensor in hints
        if phase < trace.phase_count and tensor < trace.tensor_count
    )
    schedule = schedule_of(
        trace,
        [(phase, op, trace.tensor_names[tensor]) for phase, op, tensor in valid],
        {
            name: residency if ats or residency != ResidencyMode.SYSTEM else ResidencyMode.MIGRATE
            for name, residency in zip(trace.tensor_names, residencies, strict=False)
        },
        waits=waits,
    )
    try:
        outcome = run(
            trace, schedule, machine, policy_of(machine, budget / BLOCK), addresses=addresses
        )
    except PlanError:
        return
    machine_state = outcome.sim.machine[0]
    change = int(machine_state["used_bytes"]) - outcome.used_before_bytes
    arriving = int(outcome.sim.directions[_engine.TO_DEVICE]["block"])
    in_flight = int(outcome.sim.blocks[arriving]["bytes"]) if arriving >= 0 else 0
    assert find_errors(outcome.sim) == []
    balance = int(
        machine_state["in_bytes"]
        + machine_state["born_bytes"]
        - machine_state["out_bytes"]
        - machine_state["freed_bytes"]
        - machine_state["dropped_bytes"]
    )
    # What is under way at either end of the step has its memory and is not counted as moved yet.
    assert abs(balance - change) <= in_flight + BLOCK
    assert outcome.step_s >= trace.duration_s.sum() - 1e-12  # type: ignore[union-attr]
