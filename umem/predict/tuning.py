"""Searches policies, budgets and ways to run a training, and keeps those that none outdoes.

Each figure is a prediction: of :func:`umem.predict.stream_prediction.predict_stream` where the
optimizer's state is streamed, and of :func:`umem.predict.prediction.predict` elsewhere. So
``umem simulate`` gives the same figures for the same policy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from umem.core.errors import PlanError
from umem.core.report import MigrationReport
from umem.hardware import Hardware
from umem.policy import load_policy, resolve
from umem.predict.prediction import predict
from umem.predict.stream_prediction import predict_stream
from umem.trace import Trace, live_bytes

__all__ = ["PLAIN", "Candidate", "Point", "TunedWorkload", "candidates", "front", "tune"]

Step = Literal["deferred", "backward", "plain", "pages"]
"""Where the optimizer's step is: ``deferred``, streamed into the next forward pass; ``backward``,
streamed beside the backward pass; ``plain``, all on the device as without umem; ``pages``, at the
end of the step with state that migrates as pages."""

PLAIN = "plain"
"""Name for the policy that leaves everything on the device."""

_PLAIN_KEYS: Mapping[str, Any] = {
    "planner": "none",
    "defaults": {"kind": "device", "mechanism": "keep"},
}

_SLOW: tuple[Step, ...] = ("deferred", "pages")
"""Steps whose predictions take seconds for a large model; these come last, so that a search that is
stopped has seen most."""


@dataclass(frozen=True)
class TunedWorkload:
    """A training to tune, in one of several forms."""

    options: Mapping[str, int | bool]
    """What tells it from the others: ``batch``, ``accumulate``, ``checkpoint``; empty for one."""
    trace: Callable[[Callable[[str], None]], Trace]
    """Makes the trace of a step, given a function for messages; called when first needed."""


@dataclass(frozen=True)
class Candidate:
    """One way to run a training."""

    workload: TunedWorkload
    policy: Mapping[str, Any]
    """Keys of a policy file."""
    step: Step

    def policy_text(self) -> str:
        """The policy as YAML, of which JSON is a part."""
        lines = (f"{key}: {json.dumps(value)}\n" for key, value in self.policy.items())
        return "".join(lines)


@dataclass(frozen=True)
class Point:
    """A candidate with its predicted figures."""

    candidate: Candidate
    step_s: float
    tokens_per_s: float | None
    """None if the trace does not say how many tokens a step has."""
    device_bytes: int
    """On the device at the fullest moment."""
    host_bytes: int
    """Used on the host for what is not on the device."""

    @property
    def speed(self) -> float:
        """What is to be high: tokens per second, or steps where those are unknown."""
        return 1.0 / self.step_s if self.tokens_per_s is None else self.tokens_per_s

    @property
    def costs(self) -> tuple[float, int, int]:
        """What is to be low."""
        return -self.speed, self.device_bytes, self.host_bytes


def candidates(
    workloads: Sequence[TunedWorkload],
    hardware: Hardware,
    policies: Sequence[str],
    budgets_bytes: Sequence[int],
) -> tuple[Candidate, ...]:
    """What there is to try, the quickest predictions first.

    Parameters
    ----------
    workloads
        The forms of the training.
    hardware
        The machine.
    policies
        Presets and files to build on, and :data:`PLAIN`. One that streams state is tried with the
        step deferred and in the backward pass.
    budgets_bytes
        Device budgets.

    Raises
    ------
    PolicyError
        If there is no such policy, or it is no valid one.
    """
    found = []
    for name in policies:
        keys = dict(_PLAIN_KEYS) if name == PLAIN else {"extends": name}
        steps: tuple[Step, ...] = ("plain",)
        if name != PLAIN:
            streams = resolve(load_policy(keys), hardware).streams_state
            steps = ("backward", "deferred") if streams else ("pages",)
        for step in steps:
            for budget_bytes in budgets_bytes:
                policy = {**keys, "device_budget": budget_bytes}
                # The gradients of several batches are not complete before the last one.
                found += [
                    Candidate(workload, policy, step)
                    for workload in workloads
                    if step != "backward" or workload.options.get("accumulate", 1) == 1
                ]
    # One form after the other: recording one takes longer than what is quick to predict.
    place = {id(workload): number for number, workload in enumerate(workloads)}
    return tuple(
        sorted(
            found,
            key=lambda it: (
                it.step in _SLOW and 1 + _SLOW.index(it.step),
                place[id(it.workload)],
            ),
        )
    )


def tune(
    tried: Iterable[Candidate], hardware: Hardware, progress: Callable[[str], None]
) -> Iterator[Point | PlanError]:
    """Predict candidates one after the other.

    Yields a point for each, or the reason why it does not fit. A caller stops by not asking for
    more.

    Raises
    ------
    HardwareError, TraceError, PolicyError
        As :func:`umem.predict.prediction.predict`.
    """
    traces: dict[int, Trace] = {}
    for number, candidate in enumerate(tried, 1):
        key = id(candidate.workload)
        if key not in traces:
            traces[key] = candidate.workload.trace(progress)
        progress(f"Predicting candidate {number}: {traces[key].name}, step {candidate.step}")
        try:
            yield _predicted(candidate, traces[key], hardware)
        except PlanError as error:
            yield error


def front(points: Iterable[Point], tolerance: float = 0.0) -> tuple[Point, ...]:
    """The points that no other one equals or outdoes in all figures, the fastest first.

    Of equal points the first stays.

    Parameters
    ----------
    points
        Predicted ways to run a training.
    tolerance
        Share of the speed that is no difference: a point is left out, too, if one that stays uses
        no more of either memory and is slower by no more than this.
    """
    found: list[Point] = []
    # One that uses no more memory comes first.
    for point in sorted(points, key=lambda it: (it.device_bytes, it.host_bytes, -it.speed)):
        least = point.speed * (1.0 - tolerance)
        if not any(it.host_bytes <= point.host_bytes and it.speed >= least for it in found):
            found.append(point)
    return tuple(sorted(found, key=lambda it: it.costs))


def _predicted(candidate: Candidate, trace: Trace, hardware: Hardware) -> Point:
    policy = resolve(load_policy(candidate.policy), hardware, {})
    if policy.streams_state:
        made = predict_stream(trace, hardware, policy, in_backward=candidate.step == "backward")
        step_s = made.plan.predicted.step_s
        device_bytes, host_bytes = made.training.device_bytes, made.host_bytes
    else:
        (report,) = predict(trace, hardware, policy, ("planned",), timeline=True)
        step_s = report.step_s
        device_bytes, host_bytes = _most_bytes(trace, report)
    tokens = _tokens(trace)
    return Point(
        candidate, step_s, None if tokens is None else tokens / step_s, device_bytes, host_bytes
    )


def _tokens(trace: Trace) -> int | None:
    """Tokens in a step, by the arguments of a known model."""
    sizes = [trace.metadata.get(key) for key in ("batch", "seq", "accumulate")]
    numbers = [it for it in sizes if isinstance(it, int)]
    return math.prod(numbers) if len(numbers) == len(sizes) else None


def _most_bytes(trace: Trace, report: MigrationReport) -> tuple[int, int]:
    """Most bytes on the device in any phase, and most bytes elsewhere."""
    assert report.timeline is not None
    resident = report.timeline.resident_bytes.sum(axis=1)
    elsewhere = np.maximum(live_bytes(trace, trace.tensor_bytes) - resident, 0)
    return int(resident.max()), int(elsewhere.max())
