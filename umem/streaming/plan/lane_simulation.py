"""Simulates lanes of work that run side by side: computation, and copies that share a link.

A lane is a queue, such as a CUDA stream: its tasks run one after the other, and each may wait for
tasks of other lanes. The tasks of a training step come again in every step. Rates are constant
from one event to the next, so that times are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from umem.core.errors import PlanError
from umem.hardware import Hardware

__all__ = ["LaneKind", "LaneReport", "LaneTasks", "Task", "simulate_lanes"]

_MOST_STEPS = 128
"""Steps to simulate until they repeat, which most do after the first. Copies that take little
longer than the computation fall behind by that little in each step, until no slot is left."""

_HOST_SHARE_BESIDE_COPIES = 0.7
"""Of its rate, what the host has for updates while copies run both ways: 12 to 16 cores updated 4.4
billion parameters a second alone, and 3.1 beside copies (one H200, 2026-11-29, read by hand)."""

_TIME_DIGITS = 10
"""Decimal digits to which the seconds that are left of a task count as the same."""


class LaneKind(Enum):
    """What a lane's tasks need."""

    COMPUTE = "compute"
    """The device's processors, which one lane has at a time."""
    TO_DEVICE = "to_device"
    """The link to the device, which lanes of this kind share equally."""
    TO_HOST = "to_host"
    """The link to the host."""
    HOST = "host"
    """The host's cores."""


class Task(NamedTuple):
    """A task of a step."""

    lane: int
    number: int
    """Its place in the lane, from 0."""


class LaneTasks:
    """The tasks of one step, by lane.

    Parameters
    ----------
    *kinds
        Of each lane. Of the lanes that compute, the first that has work goes on, and interrupts
        those behind it.
    """

    def __init__(self, *kinds: LaneKind) -> None:
        self.kinds = kinds
        self.work: list[list[float]] = [[] for _ in kinds]
        """Of each task: seconds of computation, bytes to copy, or bytes that the host moves."""
        self.waits: list[list[list[tuple[int, int, int]]]] = [[] for _ in kinds]
        """What each task waits for: a lane, how many of its tasks, and how many steps earlier."""

    def add(self, lane: int, work: float, *others: Task) -> Task:
        """Put a task at the end of a lane, which waits for others; `work` is seconds or bytes."""
        its = self.work[lane]
        its.append(float(work))
        self.waits[lane].append([(it[0], it[1] + 1, 0) for it in others] if others else [])
        return Task(lane, len(its) - 1)

    def wait(self, task: Task, other: Task, steps_before: int = 0) -> None:
        """Let a task begin only when another one of the same step, or of an earlier one, is done.

        Tasks of steps before the first are done.
        """
        self.waits[task.lane][task.number].append((other.lane, other.number + 1, steps_before))


@dataclass(frozen=True)
class LaneReport:
    """A step, once every step takes the same time."""

    step_s: float
    idle_s: float
    """Time in which nothing is computed."""
    slowed_s: float
    """Time that copies add to the computation beside them."""
    end_s: tuple[tuple[float, ...], ...]
    """End of each task by lane, from the end of its step on: that of the last lane's last task."""


class _Totals(NamedTuple):
    """Sums over all steps so far, at the end of a step."""

    now_s: float
    idle_s: float
    slowed_s: float


class _Speeds(NamedTuple):
    """What runs while the same lanes can go on."""

    rates: tuple[tuple[int, float], ...]
    """Lanes that run, and the work that each does per second."""
    computing: float
    """Seconds of computation done per second."""


def simulate_lanes(tasks: LaneTasks, hardware: Hardware) -> LaneReport:
    """Simulate steps until one begins as an earlier one did.

    A direction of the link carries `copy_to_device_bytes_per_s` or `copy_to_host_bytes_per_s`
    alone, and both together at most `copy_link_bytes_per_s`. Computation is slowed by
    `copy_slowdown_s_per_byte` for each byte that is copied meanwhile.

    Parameters
    ----------
    tasks
        Those of one step. The last lane computes, has at least one task, and its last one ends the
        step.
    hardware
        Bandwidths of explicit copies, and the slowdown beside them.

    Raises
    ------
    PlanError
        If tasks wait for each other.
    """
    work, waits = tasks.work, tasks.waits
    lanes = [lane for lane, its in enumerate(work) if its]
    size = [len(its) for its in work]
    speeds: dict[int, _Speeds] = {}
    clock = len(work) - 1
    steps = 0
    now_s = idle_s = slowed_s = 0.0
    done, place, step = [0] * len(work), [0] * len(work), [0] * len(work)
    left = [some[0] if some else 0.0 for some in work]
    ends: list[list[float]] = [[] for _ in work]
    runnable = 0  # a bit for each lane that can go on
    checks = lanes  # lanes that may begin a task
    blocked: list[list[int]] = [[] for _ in work]
    """By lane, those that wait for it to do more."""
    history: list[_Totals] = []
    begun: dict[tuple[float, ...], int] = {}
    while True:
        for lane in checks:
            # A lane runs in order, so a task is done when so many of its lane are.
            for other, count, before in waits[lane][place[lane]]:
                if done[other] < (step[lane] - before) * size[other] + count:
                    blocked[other].append(lane)
                    break
            else:
                runnable |= 1 << lane

        speed = speeds.get(runnable)
        if speed is None:
            speed = speeds[runnable] = _speeds(tasks.kinds, runnable, hardware)
        rates, computing = speed
        if not rates:
            raise PlanError(f"tasks wait for each other: {done} are done, by lane")
        times = [left[lane] / rate for lane, rate in rates]
        seconds = min(times)
        now_s += seconds
        if computing:
            slowed_s += seconds * (1.0 - computing)
        else:
            idle_s += seconds
        step_ends = False
        checks = []
        for (lane, rate), time_s in zip(rates, times):  # noqa: B905  # of the same length
            if time_s > seconds:
                left[lane] -= rate * seconds
                continue
            ends[lane].append(now_s)
            done[lane] += 1
            at = place[lane] + 1
            if at == size[lane]:
                at = 0
                step[lane] += 1
                step_ends |= lane == clock
            place[lane] = at
            left[lane] = work[lane][at]
            runnable ^= 1 << lane
            checks.append(lane)
            if blocked[lane]:
                checks += blocked[lane]
                blocked[lane] = []
        if not step_ends:
            continue
        steps += 1
        history.append(_Totals(now_s, idle_s, slowed_s))
        state = (
            *(done[lane] - steps * size[lane] for lane in lanes),
            *(
                round(left[lane], _TIME_DIGITS if tasks.kinds[lane] is LaneKind.COMPUTE else 0)
                for lane in lanes
            ),
        )
        earlier = begun.setdefault(state, steps)
        if earlier < steps or steps == _MOST_STEPS:
            return _report(history, min(earlier, steps - 1), ends, size)


def _speeds(kinds: tuple[LaneKind, ...], runnable: int, hardware: Hardware) -> _Speeds:
    can_run = [lane for lane in range(len(kinds)) if runnable >> lane & 1]
    compute, inward, outward, host = (
        [lane for lane in can_run if kinds[lane] is kind]
        for kind in (LaneKind.COMPUTE, LaneKind.TO_DEVICE, LaneKind.TO_HOST, LaneKind.HOST)
    )
    in_rate = hardware.copy_to_device_bytes_per_s if inward else 0.0
    out_rate = hardware.copy_to_host_bytes_per_s if outward else 0.0
    if in_rate and out_rate and in_rate + out_rate > hardware.copy_link_bytes_per_s:
        share = hardware.copy_link_bytes_per_s / (in_rate + out_rate)
        in_rate *= share
        out_rate *= share
    rates = [(lane, in_rate / len(inward)) for lane in inward]
    rates += [(lane, out_rate / len(outward)) for lane in outward]
    host_share = _HOST_SHARE_BESIDE_COPIES if inward and outward else 1.0
    rates += [(lane, host_share * hardware.host_update_bytes_per_s) for lane in host]
    computing = 0.0
    if compute:
        computing = 1.0 / (1.0 + hardware.copy_slowdown_s_per_byte * (in_rate + out_rate))
        rates.append((compute[0], computing))
    return _Speeds(tuple(rates), computing)


def _report(
    history: list[_Totals], earlier: int, ends: list[list[float]], size: list[int]
) -> LaneReport:
    first, last, steps = history[earlier - 1], history[-1], len(history)
    step_s, idle_s, slowed_s = (
        (after - before) / (steps - earlier) for before, after in zip(first, last, strict=True)
    )

    end_s = []
    for all_ends, count in zip(ends, size, strict=True):
        total = len(all_ends)
        # The last time that each task was done, in a step that takes as long as the last one.
        latest = [total - 1 - (total - 1 - number) % count for number in range(min(count, total))]
        end_s.append(
            tuple(
                all_ends[index] - last.now_s + (steps - 1 - index // count) * step_s
                for index in latest
            )
        )
    return LaneReport(step_s, idle_s, slowed_s, tuple(end_s))
