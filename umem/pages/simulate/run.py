"""From trace, schedule, machine and policy to a report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from umem.core.arguments import check_argument
from umem.core.classes import TensorClass
from umem.core.errors import PlanError
from umem.core.report import CAUSES, Direction, MigrationReport, Timeline, Traffic
from umem.core.schedule import HintOp, ResidencyMode, Schedule
from umem.core.units import format_bytes
from umem.hardware import Hardware
from umem.pages.simulate import engine as _engine
from umem.pages.simulate import state as _state
from umem.pages.simulate.lower_bound import lower_bound_s
from umem.policy import ResolvedPolicy, check_resolved
from umem.trace import PhaseKind, Trace, find_gaps, first_and_last_use, ranges, require_durations

__all__ = ["Run", "build", "report", "run", "simulate"]

Addresses = Literal["reused", "own"]
"""``reused``: memory of the dead serves the newborn at once, as with an allocator that reuses what
is resident. ``own``: every tensor has its own address and is never freed, so that dead contents are
moved like live ones."""

_LARGEST_SETTLING = 5
"""Steps run at most until two in a row take the same time."""

_SETTLED = 1e-3
"""Steps whose times differ by less than this share are the same."""


_MAX_BLOCKS = 2**26
"""128 TiB of tensors in one step, the dead ones too; the books then take about 4 GiB."""


@dataclass(frozen=True, eq=False)
class Run:
    """A step in steady state, with all that the engine counted."""

    step_s: float
    sim: Any
    """:class:`umem.pages.simulate.state.Sim` after the step."""
    used_before_bytes: int
    """Device memory in use when the step began."""
    steps: int
    """Steps run, the measured one included."""
    before_s: float
    """Time of the step before; infinite where it was the only one."""

    @property
    def settled(self) -> bool:
        """Whether two steps in a row took the same time."""
        return abs(self.step_s - self.before_s) <= _SETTLED * self.step_s

    @property
    def slower_s(self) -> float:
        """Time of the step; of the slower of the last two where they differ."""
        return self.step_s if self.settled else max(self.step_s, self.before_s)


def simulate(
    trace: Trace,
    schedule: Schedule,
    hardware: Hardware,
    policy: ResolvedPolicy,
    *,
    addresses: Addresses = "reused",
    timeline: bool = False,
) -> MigrationReport:
    """Predict what migration costs a step in steady state.

    Parameters
    ----------
    trace
        With durations (:func:`umem.hardware.with_durations`).
    schedule
        From :func:`umem.pages.plan.plan`, for this trace.
    hardware
        The machine.
    policy
        Its device budget bounds what is resident; the machine's memory does where there is none.
    addresses
        ``reused``, as under an allocator; or ``own``, the assumption of some published baselines
        that no tensor is ever freed.
    timeline
        Whether the report has one.

    Returns
    -------
    MigrationReport

    Raises
    ------
    PlanError
        If a phase's working set does not fit the budget, or the schedule is for another trace.
    PolicyError
        For a policy that was not resolved for a device.
    TraceError
        If the trace has no durations.
    """
    check_argument("trace", trace, Trace, "give one from umem.load_trace() or umem.record()")
    check_argument("schedule", schedule, Schedule, "give one from umem.plan()")
    check_argument("hardware", hardware, Hardware, "give one from umem.load_hardware()")
    check_argument("timeline", timeline, bool, "give True or False")
    check_resolved(policy)
    if addresses not in get_args(Addresses):
        raise PlanError(f"addresses: {addresses!r}: give one of {', '.join(get_args(Addresses))}")
    outcome = run(trace, schedule, hardware, policy, addresses=addresses)
    return report(outcome, trace, schedule, hardware, policy, timeline=timeline)


def run(
    trace: Trace,
    schedule: Schedule,
    hardware: Hardware,
    policy: ResolvedPolicy,
    *,
    addresses: Addresses = "reused",
) -> Run:
    """Repeat the step until it takes the same time twice; see :func:`simulate`."""
    if len(schedule.residency) != trace.tensor_count:
        raise PlanError(
            f"the schedule is for {len(schedule.residency)} tensors and the trace {trace.name!r} "
            f"has {trace.tensor_count}: plan this trace"
        )
    sim = build(trace, schedule, hardware, policy, addresses)
    machine = sim.machine[0]
    last_s, step_s = np.inf, 0.0  # the first step starts from an invented placement
    steps = 0
    while steps < _LARGEST_SETTLING and not abs(step_s - last_s) <= _SETTLED * step_s:
        _forget_counts(sim)
        began_s, used_before = float(machine["now_s"]), int(machine["used_bytes"])
        if not _engine.run_step(sim):
            _reject_phase(trace, int(machine["failed_phase"]), int(machine["capacity_bytes"]))
        last_s, step_s = step_s, float(machine["now_s"]) - began_s
        steps += 1
    return Run(step_s, sim, used_before, steps, last_s)


def build(
    trace: Trace,
    schedule: Schedule,
    hardware: Hardware,
    policy: ResolvedPolicy,
    addresses: Addresses = "reused",
) -> Any:
    """The :class:`umem.pages.simulate.state.Sim` with all tensors in their first place."""
    durations = require_durations(trace)
    tensors, phases, hints = trace.tensor_count, trace.phase_count, schedule.hint_count
    classes = len(TensorClass)
    machine = np.zeros(1, _state.MACHINE)
    for name, _ in _state.HARDWARE:
        machine[name] = getattr(hardware, name)
    budget = policy.device_budget_bytes
    machine["capacity_bytes"] = hardware.device_bytes if budget is None else budget
    machine["overlapped"] = hardware.fault_eviction == "overlapped"
    machine["by_access"] = hardware.eviction_order == "access"
    machine["own_addresses"] = addresses == "own"
    machine["waits"] = schedule.waits
    for name in ("oldest", "newest", "failed_phase"):
        machine[name] = -1
    directions = np.zeros(2, _state.DIRECTION)
    directions["block"] = -1

    counts = -(-trace.tensor_bytes // hardware.block_bytes)
    bounds = ranges(counts)
    if bounds[-1] > _MAX_BLOCKS:
        raise PlanError(
            f"trace {trace.name!r}: its tensors are {bounds[-1]:,} blocks of "
            f"{format_bytes(hardware.block_bytes)} in all, and at most {_MAX_BLOCKS:,} can be "
            "followed: make batch or sequence smaller"
        )
    blocks = np.zeros(bounds[-1], _state.BLOCK)
    blocks["tensor"] = np.repeat(np.arange(tensors), counts)
    blocks["bytes"] = hardware.block_bytes
    blocks["bytes"][bounds[1:] - 1] = trace.tensor_bytes - (counts - 1) * hardware.block_bytes
    columns = np.zeros(tensors, _state.TENSOR)
    columns["first"], columns["end"] = bounds[:-1], bounds[1:]
    columns["class_number"], columns["residency"] = trace.tensor_class, schedule.residency

    mortal = np.flatnonzero(~trace.persistent)
    death_tensor = mortal[np.argsort(trace.last_phase[mortal], kind="stable")].astype(np.int32)
    deaths = np.bincount(trace.last_phase[mortal], minlength=phases)
    sim = _state.Sim(
        machine=machine,
        directions=directions,
        blocks=blocks,
        tensors=columns,
        duration_s=durations,
        access_start=trace.access_start,
        access_tensor=trace.access_tensor,
        access_mode=trace.access_mode,
        birth_bytes=_birth_bytes(trace, schedule, addresses),
        death_start=ranges(deaths),
        death_tensor=death_tensor,
        hint_start=ranges(np.bincount(schedule.hint_phase, minlength=phases)),
        hint_op=schedule.hint_op,
        hint_tensor=schedule.hint_tensor,
        queue=np.zeros((2, _LARGEST_SETTLING * hints + 1, 2), np.int64),
        counter_queue=np.zeros(len(blocks), np.int32),
        batch=np.zeros(hardware.faults_per_batch + 1, np.int32),
        traffic_bytes=np.zeros((2, len(CAUSES), classes), np.int64),
        traffic_s=np.zeros((2, len(CAUSES), classes)),
        traffic_count=np.zeros((2, len(CAUSES), classes), np.int64),
        stall_s=np.zeros(len(_engine.STALLS)),
        resident_bytes=np.zeros((phases, classes), np.int64),
        phase_start_s=np.zeros(phases),
        phase_end_s=np.zeros(phases),
    )
    if not _engine.place_initially(sim, trace.persistent):
        kept_bytes = int(trace.tensor_bytes[schedule.residency == ResidencyMode.KEEP].sum())
        raise PlanError(
            f"trace {trace.name!r}: {format_bytes(kept_bytes)} are kept on the device, more than "
            f"the budget of {format_bytes(int(machine['capacity_bytes'][0]))}: let more classes "
            "migrate, or raise the budget"
        )
    return sim


def _birth_bytes(trace: Trace, schedule: Schedule, addresses: Addresses) -> npt.NDArray[np.int64]:
    """Device memory that each phase is the first to use, int64[P]."""
    births = np.zeros(trace.phase_count, np.int64)
    if addresses == "own":
        return births
    first, _ = first_and_last_use(trace)
    on_device = ~np.isin(schedule.residency, (ResidencyMode.MAP, ResidencyMode.SYSTEM))
    born = np.flatnonzero(~trace.persistent & on_device & (first < trace.phase_count))
    np.add.at(births, first[born], trace.tensor_bytes[born])
    # What was dropped by a hint is made anew by its next use.
    gaps = find_gaps(trace)
    discarded = np.unique(schedule.hint_tensor[schedule.hint_op == HintOp.DISCARD])
    anew = np.flatnonzero(gaps.is_dead & on_device[gaps.tensor] & np.isin(gaps.tensor, discarded))
    np.add.at(
        births, gaps.next_use[anew] % trace.phase_count, trace.tensor_bytes[gaps.tensor[anew]]
    )
    return births


def _forget_counts(sim: Any) -> None:
    for counts in (sim.traffic_bytes, sim.traffic_s, sim.traffic_count, sim.stall_s):
        counts[:] = 0
    for name in _state.COUNTERS:
        sim.machine[name] = 0


def _reject_phase(trace: Trace, phase: int, capacity_bytes: int) -> None:
    used = trace.access_tensor[trace.access_start[phase] : trace.access_start[phase + 1]]
    need_bytes = int(trace.tensor_bytes[used].sum())
    raise PlanError(
        f"trace {trace.name!r}: phases[{phase}] ({trace.phase_names[phase]}) uses "
        f"{format_bytes(need_bytes)} at once, and the device budget is "
        f"{format_bytes(capacity_bytes)}, less what the policy keeps there: raise the budget, or "
        "make batch or sequence smaller"
    )


def report(
    outcome: Run,
    trace: Trace,
    schedule: Schedule,
    hardware: Hardware,
    policy: ResolvedPolicy,
    *,
    timeline: bool = False,
) -> MigrationReport:
    """Put what the engine counted into words; see :func:`simulate`."""
    sim = outcome.sim
    machine = sim.machine[0]
    memory_ops = trace.phase_kind != PhaseKind.KERNEL
    return MigrationReport(
        workload=trace.name,
        hardware=hardware.name,
        policy=policy.name,
        planner=schedule.planner,
        step_s=outcome.slower_s,
        faster_s=None if outcome.settled else min(outcome.step_s, outcome.before_s),
        ideal_s=float(sim.duration_s.sum()),
        lower_bound_s=lower_bound_s(trace, hardware, int(machine["capacity_bytes"])),
        traffic=_traffic(sim),
        memory_ops_s=float(sim.duration_s[memory_ops].sum()),
        memory_ops_bytes=int(trace.memory_bytes[memory_ops].sum()),
        memory_ops_count=int(memory_ops.sum()),
        fault_pages=int(machine["fault_pages"]),
        fault_batches=int(machine["fault_batches"]),
        hint_count=schedule.hint_count,
        hints_late=int(machine["hints_late"]),
        hints_wasted=int(machine["hints_wasted"]),
        stall_s=dict(zip(_engine.STALLS, map(float, sim.stall_s), strict=True)),
        timeline=_timeline(sim) if timeline else None,
    )


def _traffic(sim: Any) -> tuple[Traffic, ...]:
    directions: tuple[Direction, ...] = ("to_device", "to_host")
    return tuple(
        Traffic(
            direction,
            cause,
            tensor_class,
            int(sim.traffic_bytes[i, j, tensor_class.number]),
            float(sim.traffic_s[i, j, tensor_class.number]),
            int(sim.traffic_count[i, j, tensor_class.number]),
        )
        for i, direction in enumerate(directions)
        for j, cause in enumerate(CAUSES)
        for tensor_class in TensorClass
        if sim.traffic_bytes[i, j, tensor_class.number]
    )


def _timeline(sim: Any) -> Timeline:
    start_s = sim.phase_start_s - sim.phase_start_s[0]
    end_s = sim.phase_end_s - sim.phase_start_s[0]
    return Timeline(
        phase_start_s=start_s,
        phase_end_s=end_s,
        resident_bytes=sim.resident_bytes.copy(),
        budget_bytes=int(sim.machine["capacity_bytes"][0]),
    )
