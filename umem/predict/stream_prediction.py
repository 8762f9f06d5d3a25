"""Predicts a training with streamed optimizer state from the trace of one step.

The trace gives each block's durations, weights, state, saved activations and memory. The plan is
made by the planner that a running training uses.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from umem.core.classes import TensorClass
from umem.core.errors import PlanError, TraceError
from umem.core.units import format_bytes
from umem.hardware import Hardware, with_durations
from umem.policy import ResolvedPolicy
from umem.streaming.plan.host_updates import plan_with_host_updates
from umem.streaming.plan.recomputation import plan_with_recomputation
from umem.streaming.plan.state_plan import StreamPlan, least_slack_bytes
from umem.streaming.plan.step_timing import (
    UNITS_WITH_GRADIENTS,
    StreamUnit,
    divide_state,
    largest_slot_bytes,
)
from umem.streaming.plan.stretches import Save, block_of, find_cuts
from umem.streaming.plan.training_plan import TrainingPlan, plan_training
from umem.streaming.plan.weight_plan import WeightUnit
from umem.trace import (
    OPTIMIZER,
    Trace,
    first_and_last_use,
    live_bytes,
    phase_of_access,
    require_durations,
)

__all__ = [
    "PredictedStep",
    "StreamPrediction",
    "UnitChoice",
    "equal_parts",
    "predict_stream",
    "stream_row",
    "streamed_step",
    "unit_choices",
]

_PASS = {"forward": 0, "backward": 1, "recompute": 1, OPTIMIZER: 2}
"""Kind of a phase, by the first word of its name."""

_FORWARD, _BACKWARD, _STEP, _BETWEEN = 0, 1, 2, 3

_LAYER = re.compile(r"(?:.*?\.)?\d+(?=\.|$)")
"""A layer's name within that of a module or tensor: up to the first number."""

_TABLE = re.compile(r"(?:.*_)?(?:embeddings?|embed_tokens|embed_positions|embed_in|wte|wpe)")
"""Last part of the name of a module that looks rows up in a table, for traces whose phases name no
operators."""

_WEIGHTS = (TensorClass.WEIGHTS, TensorClass.FROZEN_WEIGHTS)

_Numbers = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class PredictedStep:
    """What a plan is made of."""

    units: tuple[StreamUnit, ...]
    """Their peaks leave out `weights`."""
    weights: Mapping[str, WeightUnit] | None
    """Weights that can leave the device, by name of their unit in forward order; None under a
    policy that streams no weights."""
    weight_bytes: int
    """All weights, also those that always stay: small ones, and those that several units use."""
    other_s: float
    """Computation behind the last backward pass, such as gradient clipping."""
    step_peak_bytes: int
    """Device memory of everything but streamed state and `weights` when the step begins."""
    batches: int
    model_flops: float
    """Floating-point operations of the model, without those of recomputation."""
    freed_bytes: Mapping[str, int] = field(default_factory=dict)
    """By name of each layer that may run forward again in the backward pass, what need not be kept
    of it then. That it does the same again is assumed: a training proves it."""
    checkpointed_bytes: Mapping[str, int] = field(default_factory=dict)
    """What each unit keeps more where the program's checkpoint of it is left out, by name."""
    launch_s: float = 0.0
    """The processor's time to launch a step's kernels; 0 in traces."""
    waits_s: float = 0.0
    """Of the passes, in which the device waits for launches."""

    @property
    def passes_s(self) -> float:
        """The forward and backward passes alone, without an optimizer."""
        return self.batches * sum(unit.forward_s + unit.backward_s for unit in self.units)


@dataclass(frozen=True)
class StreamPrediction:
    """A training with streamed state, and what it takes."""

    workload: str
    hardware: str
    policy: str
    budget_bytes: int
    in_backward: bool
    step: PredictedStep
    training: TrainingPlan

    @property
    def plan(self) -> StreamPlan:
        """Where state, activations and gradients are, beside the weights."""
        return self.training.stream

    @property
    def weight_homes_bytes(self) -> int:
        """Weights in host memory."""
        weights = self.training.weights
        return 0 if weights is None else weights.streamed_bytes + weights.in_place_bytes

    @property
    def in_place_s(self) -> float:
        """Time that computations take longer because they use host memory in place."""
        timing = self.plan.predicted
        known_s = timing.compute_s + timing.slowed_s + timing.exposed_s
        # The difference of two sums of floats may be off zero by a little.
        return max(round(timing.step_s - known_s, 9), 0.0)

    @property
    def floor_share(self) -> float:
        """Time of the passes alone, as a share of the step."""
        step_s = self.plan.predicted.step_s
        return self.step.passes_s / step_s if step_s else 1.0

    @property
    def model_flops_per_s(self) -> float:
        """Floating-point operations of the model per second of the step; 0 if none were counted."""
        step_s = self.plan.predicted.step_s
        return self.step.model_flops / step_s if step_s else 0.0

    @property
    def host_bytes(self) -> int:
        """Page-locked host memory: homes of streamed state and weights, and what is copied out."""
        units, plan = self.step.units, self.plan
        state = (it.state_bytes for n, it in enumerate(units) if n not in plan.resident)
        copied = sum(units[number].saved_bytes for number in plan.copied)
        gradients = sum(units[number].gradient_bytes for number in plan.copied_gradients)
        # As many bytes of weights, of what the host updates.
        gradients += sum(units[number].gradient_bytes for number in plan.hosts)
        return sum(state) + self.weight_homes_bytes + copied + gradients


def predict_stream(
    trace: Trace, hardware: Hardware, policy: ResolvedPolicy, *, in_backward: bool = False
) -> StreamPrediction:
    """Plan a training of a trace under a policy that streams state, and predict its step.

    Parameters
    ----------
    trace
        Its own durations hold where it has them; otherwise they come from the hardware's roofline.
    hardware
        The machine.
    policy
        Resolved for the machine.
    in_backward
        Whether units are updated in the backward pass.

    Raises
    ------
    HardwareError
        If the machine lacks a number that the trace needs.
    TraceError
        If the trace names no forward pass.
    PlanError
        If the policy streams no state, or the device budget or the host's memory is too small; and
        for several batches `in_backward`.
    """
    if not policy.streams_state:
        raise PlanError(
            f"policy {policy.name} streams no optimizer state on {hardware.name}: give one whose "
            "optimizer_state has mechanism: stream"
        )
    budget_bytes = policy.device_budget_bytes or hardware.device_bytes
    timed = with_durations(trace, hardware)
    step = streamed_step(timed, policy, largest_slot_bytes(budget_bytes), in_backward=in_backward)
    if in_backward and step.batches > 1:
        raise PlanError(
            f"step_in_backward: {trace.name} adds up the gradients of {step.batches} batches, and "
            "a unit's update would come behind the first. Leave out one of the two"
        )
    plan = partial(
        plan_with_host_updates if policy.updates_on_host else plan_training,
        weights=step.weights,
        budget_bytes=budget_bytes - least_slack_bytes(budget_bytes),
        hardware=hardware,
        other_s=step.other_s,
        step_peak_bytes=step.step_peak_bytes,
        in_backward=in_backward,
        batches=step.batches,
        holds_gradients=True,
        weight_share=policy.rules[TensorClass.WEIGHTS.number].fraction,
        state_share=policy.rules[TensorClass.OPTIMIZER_STATE.number].fraction,
    )
    freed_bytes = step.freed_bytes if policy.recomputes else {}
    checkpointed_bytes = step.checkpointed_bytes if policy.recomputes else {}
    training = plan_with_recomputation(step.units, freed_bytes, hardware, plan, checkpointed_bytes)
    made = StreamPrediction(
        trace.name, hardware.name, policy.name, budget_bytes, in_backward, step, training
    )
    if made.host_bytes > hardware.host_bytes:
        raise PlanError(
            f"{trace.name} needs {format_bytes(made.host_bytes)} of page-locked memory, and the "
            f"host of {hardware.name} has {format_bytes(hardware.host_bytes)}"
        )
    return made


def stream_row(prediction: StreamPrediction) -> dict[str, Any]:
    """Put a prediction into plain values, for JSON: seconds, bytes, shares from 0 to 1."""
    plan, step, training = prediction.plan, prediction.step, prediction.training
    timing, weights = plan.predicted, training.weights
    return {
        "workload": prediction.workload,
        "planner": "stream",
        "hardware": prediction.hardware,
        "policy": prediction.policy,
        "step_in_backward": prediction.in_backward,
        "step_s": timing.step_s,
        "ideal_s": timing.compute_s,
        "floor_s": step.passes_s,
        "floor_share": prediction.floor_share,
        "model_flops": step.model_flops,
        "model_flops_per_s": prediction.model_flops_per_s,
        "exposed_s": timing.exposed_s,
        "slowed_s": timing.slowed_s,
        "in_place_s": prediction.in_place_s,
        "to_device_bytes": {str(name): size for name, size in timing.to_device_bytes.items()},
        "to_host_bytes": {str(name): size for name, size in timing.to_host_bytes.items()},
        "device_bytes": training.device_bytes,
        "device_budget_bytes": prediction.budget_bytes,
        "host_bytes": prediction.host_bytes,
        "blocks": len(step.units),
        "resident": sorted(plan.resident),
        "slots": plan.slots,
        "slot_bytes": plan.slot_bytes,
        "temporary_slots": len(plan.temporary),
        "copied": sorted(plan.copied),
        "fetch_ahead": plan.fetch_ahead,
        "recomputed": sorted(training.recomputed),
        "left_out": sorted(training.left_out),
        "hosts": sorted(plan.hosts),
        "copied_gradients": sorted(plan.copied_gradients),
        "returning_gradients": sorted(plan.returning_gradients),
        "weights_resident_bytes": step.weight_bytes - prediction.weight_homes_bytes,
        "weights_streamed_bytes": 0 if weights is None else weights.streamed_bytes,
        "weights_in_place_bytes": 0 if weights is None else weights.in_place_bytes,
        "weight_slots": 0 if weights is None else weights.slots,
        "weight_slot_bytes": 0 if weights is None else weights.slot_bytes,
        "weight_slots_extra": training.most_extra,
    }


Choice = Literal["kept", "copied", "computed twice", "kept, checkpoint left out"]


@dataclass(frozen=True)
class UnitChoice:
    """What a plan does with the activations that a unit saves."""

    unit: str
    choice: Choice
    saved_bytes: int
    copy_s: float
    """Of copies out and back at the link's speed, alone."""
    compute_s: float
    """Of the forward pass once more."""


def unit_choices(prediction: StreamPrediction, hardware: Hardware) -> tuple[UnitChoice, ...]:
    """What the plan does with each unit's activations, in forward order."""
    training, found = prediction.training, []
    copy_s = 1 / hardware.copy_to_host_bytes_per_s + 1 / hardware.copy_to_device_bytes_per_s
    for number, unit in enumerate(prediction.step.units):
        choice: Choice = "kept"
        size_bytes = unit.saved_bytes
        if unit.name in training.recomputed:
            choice = "computed twice"
        elif number in training.stream.copied:
            choice = "copied"
        elif unit.name in training.left_out:
            choice = "kept, checkpoint left out"
            size_bytes += prediction.step.checkpointed_bytes[unit.name]
        found.append(UnitChoice(unit.name, choice, size_bytes, copy_s * size_bytes, unit.forward_s))
    return tuple(found)


# From a trace to units.


def streamed_step(
    trace: Trace, policy: ResolvedPolicy, piece_bytes: int, *, in_backward: bool = False
) -> PredictedStep:
    """Cut a step with durations into units: the layers of the model, and the modules around them.

    A layer is what a module's name says up to its first number, such as ``model.layers.3``. Other
    phases count for the unit before them. State is staged in pieces of `piece_bytes` at most.

    Weights that an optimizer updates within the backward pass stay on the device, as a pass might
    read them from a buffer meanwhile.

    Raises TraceError if no phase's name says that it is of a forward pass.
    """
    kind = _kinds(trace)
    if not (kind == _FORWARD).any():
        raise TraceError(
            f"trace {trace.name!r} has no phases of a forward pass, whose names begin with "
            "'forward': units cannot be told apart"
        )
    names = _UnitNames(trace)
    block, blocks = _units_of_phases(trace, kind, names)
    starts, ends = _batches(kind)
    unit, order, is_cut = _with_stretches(trace, policy, block, kind, starts, ends, list(blocks))
    block = np.array([order[name] for name in blocks], np.int64)[block]
    duration_s = require_durations(trace)
    count, batches = len(order), len(starts)

    tensor_unit = np.array([order.get(names.of(it), -1) for it in trace.tensor_names], np.int64)
    streamed = _of_class(trace, policy, TensorClass.OPTIMIZER_STATE) & trace.persistent
    streamed &= tensor_unit >= 0
    is_gradient = (trace.tensor_class == TensorClass.GRADIENTS.number) & (tensor_unit >= 0)
    of_units = _parameter_sizes(trace, np.flatnonzero(streamed).tolist(), tensor_unit, count)
    pieces = [_piece_sizes(sizes, piece_bytes) for sizes in of_units]
    state_bytes = np.array([sum(sizes) for sizes in pieces], np.int64)
    gradient_bytes = _sums(tensor_unit[is_gradient], trace.tensor_bytes[is_gradient], count)
    saved_bytes, freed_bytes = _saved_bytes(trace, policy, unit, kind, starts, ends, count)
    is_recomputed = np.array([name.startswith("recompute") for name in trace.phase_names])
    checkpointed = _checkpointed_bytes(trace, policy, unit, is_recomputed, starts, ends, count)

    in_pass = [kind == each for each in (_FORWARD, _BACKWARD)]
    forward_s, backward_s = (
        np.bincount(unit[where], duration_s[where], count) / batches for where in in_pass
    )
    update_s, unowned_s = _updates(trace, kind == _STEP, tensor_unit, duration_s, count)
    can_leave = _leaving_weights(trace, policy, tensor_unit, block, kind, in_backward)
    weights = _weight_units(trace, can_leave, tensor_unit, kind, order)
    live = live_bytes(trace, np.where(streamed | can_leave, 0, trace.tensor_bytes))
    held, freed = _gradient_lifetimes(np.where(state_bytes > 0, gradient_bytes, 0), in_backward)
    is_first = (kind == _FORWARD) & (np.arange(len(kind)) < ends[0])
    live[is_first] += held[unit[is_first]]
    forward_peak, backward_peak = (_most(unit[it], live[it], count) for it in in_pass)
    is_step = (kind == _STEP) | ((kind == _BETWEEN) & (np.arange(len(kind)) >= ends[-1]))
    step_peak_bytes = int(live[is_step].max(initial=0))
    return PredictedStep(
        units=tuple(
            StreamUnit(
                name=name,
                state_bytes=int(state_bytes[number]),
                update_s=float(update_s[number]),
                forward_s=float(forward_s[number]),
                backward_s=float(backward_s[number]),
                saved_bytes=int(saved_bytes[number]),
                forward_peak_bytes=int(forward_peak[number]),
                backward_peak_bytes=int(backward_peak[number] - freed[number]),
                piece_bytes=pieces[number],
                gradient_bytes=int(gradient_bytes[number]) if policy.copies_gradients else 0,
            )
            for name, number in order.items()
        ),
        weights=weights if policy.streams_weights else None,
        weight_bytes=int(trace.tensor_bytes[_is_weight(trace)].sum()),
        other_s=float(duration_s[kind == _BETWEEN].sum()) + unowned_s,
        step_peak_bytes=step_peak_bytes,
        batches=batches,
        model_flops=float(trace.flops[~is_recomputed].sum()),
        freed_bytes={
            name: int(freed_bytes[number])
            for name, number in order.items()
            if _LAYER.match(name) and number not in unit[is_recomputed] and name not in is_cut
        },
        checkpointed_bytes={name: int(checkpointed[number]) for name, number in order.items()},
    )


class _UnitNames:
    """Names of units, from those of modules and tensors."""

    def __init__(self, trace: Trace) -> None:
        found = np.flatnonzero(_is_weight(trace)).tolist()
        modules = {trace.tensor_names[number].rpartition(".")[0] for number in found}
        self._outside = sorted(
            (name for name in modules if name and not _LAYER.match(name)), key=len, reverse=True
        )

    def of(self, name: str) -> str:
        """The unit of a module or of one of its tensors; empty if it is of none."""
        layer = _LAYER.match(name)
        if layer:
            return layer.group()
        for module in self._outside:
            if name == module or name.startswith(f"{module}."):
                return module
        return ""


def _kinds(trace: Trace) -> _Numbers:
    """Pass of each phase: forward, backward, step, or between them."""
    words = (name.split(" ", 1)[0].rstrip(":") for name in trace.phase_names)
    return np.array([_PASS.get(word, _BETWEEN) for word in words], np.int64)


def _units_of_phases(
    trace: Trace, kind: _Numbers, names: _UnitNames
) -> tuple[_Numbers, dict[str, int]]:
    """Number of the unit of each phase, and numbers by name, in the order of the forward pass."""
    found = []
    for name in trace.phase_names:
        scope = name.partition(" ")[2].partition(":")[0]
        found.append(names.of(scope))
    order: dict[str, int] = {}
    for name, each in zip(found, kind.tolist(), strict=True):
        if name and each == _FORWARD:
            order.setdefault(name, len(order))
    if not order:
        order[""] = 0
    unit = np.zeros(trace.phase_count, np.int64)
    last = {_FORWARD: 0, _BACKWARD: len(order) - 1}
    for phase, (name, each) in enumerate(zip(found, kind.tolist(), strict=True)):
        if each == _FORWARD:
            last[_BACKWARD] = len(order) - 1
        if each in last:
            unit[phase] = last[each] = order.get(name, last[each])
        if each == _BACKWARD:
            last[_FORWARD] = 0
    return unit, order


def _with_stretches(
    trace: Trace,
    policy: ResolvedPolicy,
    unit: _Numbers,
    kind: _Numbers,
    starts: Sequence[int],
    ends: Sequence[int],
    names: Sequence[str],
) -> tuple[_Numbers, dict[str, int], frozenset[str]]:
    """Units of phases where one saves most: the pass is cut, as in a running training.

    Also the units that are cut, and the stretches that begin in them. A backward pass is in the
    stretch whose activations it has used last.
    """
    saved_in = np.full(trace.tensor_count, -1, np.int64)
    for start, end in zip(starts, ends, strict=True):
        saved, last_forward = _saved(trace, policy, kind, start, end)
        saved_in[saved] = last_forward
    saved = np.flatnonzero(saved_in >= 0)
    size_bytes = _sums(saved_in[saved], trace.tensor_bytes[saved], trace.phase_count)
    is_forward = kind == _FORWARD

    def places(start: int, end: int) -> list[tuple[int, str, int]]:
        """Forward phases of a batch, with their blocks and their numbers in these."""
        phases = start + np.flatnonzero(is_forward[start:end])
        counts: Counter[str] = Counter()
        found = []
        for phase in phases.tolist():
            name = names[unit[phase]]
            found.append((phase, name, counts[name]))
            counts[name] += 1
        return found

    cuts = find_cuts(
        (
            Save(name, name, number, int(size_bytes[phase]))
            for phase, name, number in places(0, ends[0])
        ),
        outside=names[0],
        last=names[-1],
    )
    if not cuts:
        return unit, {name: number for number, name in enumerate(names)}, frozenset()
    order: dict[str, int] = {}
    found = np.zeros(trace.phase_count, np.int64)
    for start, end in zip(starts, ends, strict=True):
        current, entered = names[0], set[str]()
        for phase, name, number in places(start, end):
            current = current if name in entered else name
            entered.add(name)
            current = cuts.get(name, {}).get(number, current)
            found[phase] = order.setdefault(current, len(order))
    user, used = phase_of_access(trace), trace.access_tensor
    is_saved = (kind[user] == _BACKWARD) & (saved_in[used] >= 0)
    reached = np.full(trace.phase_count, len(order), np.int64)
    np.minimum.at(reached, user[is_saved], found[saved_in[used[is_saved]]])
    last = len(order) - 1
    for number in np.flatnonzero(kind == _BACKWARD).tolist():
        is_first = number > 0 and kind[number - 1] == _FORWARD
        last = len(order) - 1 if is_first else last
        last = found[number] = reached[number] if reached[number] < len(order) else last
    return found, order, frozenset(name for name in order if block_of(name) in cuts)


def _batches(kind: _Numbers) -> tuple[list[int], list[int]]:
    """First phase of each batch, and of what follows its backward pass."""
    passes = np.flatnonzero((kind == _FORWARD) | (kind == _BACKWARD))
    begins = [0] + [
        int(after)
        for before, after in pairwise(passes.tolist())
        if kind[before] == _BACKWARD and kind[after] == _FORWARD
    ]
    return begins, [*begins[1:], int(passes[-1]) + 1]


def _is_weight(trace: Trace) -> _Flags:
    """Weights, frozen or not, as bool[T]."""
    numbers = [tensor_class.number for tensor_class in _WEIGHTS]
    return np.isin(trace.tensor_class, numbers) & trace.persistent


def _leaving_weights(
    trace: Trace,
    policy: ResolvedPolicy,
    tensor_unit: _Numbers,
    unit: _Numbers,
    kind: _Numbers,
    in_backward: bool,
) -> _Flags:
    """Weights that a plan may give a home in host memory, bool[T]."""
    found = np.zeros(trace.tensor_count, np.bool_)
    for tensor_class in _WEIGHTS:
        is_streamed = policy.rules[tensor_class.number].mechanism == "stream"
        if is_streamed and not (in_backward and tensor_class is TensorClass.WEIGHTS):
            found |= _of_class(trace, policy, tensor_class)
    found &= trace.persistent & (tensor_unit >= 0)
    # A weight that another unit uses too would have to be there for both.
    phase, tensor = phase_of_access(trace), trace.access_tensor
    is_elsewhere = np.isin(kind[phase], [_FORWARD, _BACKWARD]) & (
        unit[phase] != tensor_unit[tensor]
    )
    found[tensor[is_elsewhere]] = False
    return found


def _weight_units(
    trace: Trace,
    leaving: _Flags,
    tensor_unit: _Numbers,
    kind: _Numbers,
    order: Mapping[str, int],
) -> dict[str, WeightUnit]:
    """Weights that may leave, by name of their unit in forward order."""
    is_table = _tables(trace, kind)
    is_trained = trace.tensor_class == TensorClass.WEIGHTS.number
    found = {}
    for name, number in order.items():
        tensors = np.flatnonzero(leaving & (tensor_unit == number))
        if len(tensors):
            found[name] = WeightUnit(
                part_bytes=tuple(trace.tensor_bytes[tensors].tolist()),
                gathered=frozenset(np.flatnonzero(is_table[tensors]).tolist()),
                trained=frozenset(np.flatnonzero(is_trained[tensors]).tolist()),
            )
    return found


def _tables(trace: Trace, kind: _Numbers) -> _Flags:
    """Tensors of which the forward pass only looks up rows, bool[T].

    The operator tells, in traces whose phases name one, and otherwise the module's name.
    """
    operators = [name.partition(": ")[2] for name in trace.phase_names]
    has_operator = np.array([bool(it) for it in operators])
    looks_up = np.array(["embedding" in it for it in operators])
    phase = phase_of_access(trace)
    in_forward = kind[phase] == _FORWARD
    phase, tensor = phase[in_forward], trace.access_tensor[in_forward]
    is_table = np.array(
        [
            _TABLE.fullmatch(name.rpartition(".")[0].rpartition(".")[2]) is not None
            for name in trace.tensor_names
        ]
    )
    is_table[tensor[looks_up[phase]]] = True
    is_table[tensor[has_operator[phase] & ~looks_up[phase]]] = False
    return is_table


def _of_class(trace: Trace, policy: ResolvedPolicy, tensor_class: TensorClass) -> _Flags:
    """Tensors of a class that its rule moves, as bool[T]."""
    rule = policy.rules[tensor_class.number]
    return (trace.tensor_class == tensor_class.number) & (trace.tensor_bytes >= rule.min_bytes)


def _parameter_sizes(
    trace: Trace, state: Sequence[int], tensor_unit: _Numbers, count: int
) -> list[list[int]]:
    """Bytes of each parameter's state, by unit: tensors are named after parameters."""
    sizes: list[dict[str, int]] = [{} for _ in range(count)]
    for number in state:
        parameter = trace.tensor_names[number].rpartition(".")[0]
        of_unit = sizes[tensor_unit[number]]
        of_unit[parameter] = of_unit.get(parameter, 0) + int(trace.tensor_bytes[number])
    return [list(of_unit.values()) for of_unit in sizes]


def _piece_sizes(sizes: Sequence[int], piece_bytes: int) -> tuple[int, ...]:
    """State that is staged at a time: of runs of parameters, and of equal spans of larger ones."""
    found: list[int] = []
    for run in divide_state(sizes, piece_bytes):
        found += equal_parts(sum(sizes[run.start : run.stop]), piece_bytes)
    return tuple(found)


def equal_parts(size_bytes: int, most_bytes: int) -> list[int]:
    """As few parts of bytes, as equal as can be, as are each of at most so many."""
    count = max(1, math.ceil(size_bytes / most_bytes))
    ends = [number * size_bytes // count for number in range(count + 1)]
    return [end - begin for begin, end in pairwise(ends)]


def _saved_bytes(
    trace: Trace,
    policy: ResolvedPolicy,
    unit: _Numbers,
    kind: _Numbers,
    starts: Sequence[int],
    ends: Sequence[int],
    count: int,
) -> tuple[_Numbers, _Numbers]:
    """Activations that leave behind each unit's forward pass, int64[N]; the most of any batch.

    They count for the last unit that uses them before the backward pass, as one that a unit makes
    for the next, such as the input that a checkpoint keeps, is in use until then. And those of them
    that the same unit makes, int64[N]: it need not keep them where it runs forward again.
    """
    most, own = np.zeros((2, count), np.int64)
    for start, end in zip(starts, ends, strict=True):
        saved, last_forward = _saved(trace, policy, kind, start, end)
        user = unit[last_forward]
        most = np.maximum(most, _sums(user, trace.tensor_bytes[saved], count))
        is_own = unit[trace.first_phase[saved]] == user
        own = np.maximum(own, _sums(user[is_own], trace.tensor_bytes[saved[is_own]], count))
    return most, own


def _saved(
    trace: Trace, policy: ResolvedPolicy, kind: _Numbers, start: int, end: int
) -> tuple[_Numbers, _Numbers]:
    """Activations of a batch that may leave, and the last phase to use each before they do."""
    if policy.rules[TensorClass.ACTIVATIONS.number].mechanism != "copy":
        nothing = np.zeros(0, np.int64)
        return nothing, nothing
    moves = _of_class(trace, policy, TensorClass.ACTIVATIONS) & ~trace.persistent
    _, last_use = first_and_last_use(trace)
    phase = phase_of_access(trace)
    turn = start + int(np.argmax(kind[start:end] == _BACKWARD))
    is_saved = moves & (trace.first_phase >= start) & (trace.first_phase < turn)
    is_saved &= last_use >= turn
    is_forward = (phase < turn) & (kind[phase] == _FORWARD)
    last_forward = np.full(trace.tensor_count, -1, np.int64)
    np.maximum.at(last_forward, trace.access_tensor[is_forward], phase[is_forward])
    saved = np.flatnonzero(is_saved & (last_forward >= start))
    return saved, last_forward[saved]


def _checkpointed_bytes(
    trace: Trace,
    policy: ResolvedPolicy,
    unit: _Numbers,
    is_recomputed: _Flags,
    starts: Sequence[int],
    ends: Sequence[int],
    count: int,
) -> _Numbers:
    """Activations that a checkpoint of each unit makes again for its backward pass, int64[N].

    The most of any batch.
    """
    most = np.zeros(count, np.int64)
    first = trace.first_phase
    _, last_use = first_and_last_use(trace)
    is_again = _of_class(trace, policy, TensorClass.ACTIVATIONS) & ~trace.persistent
    is_again &= is_recomputed[first] & ~is_recomputed[last_use] & (unit[first] == unit[last_use])
    for start, end in zip(starts, ends, strict=True):
        again = np.flatnonzero(is_again & (first >= start) & (first < end))
        most = np.maximum(most, _sums(unit[first[again]], trace.tensor_bytes[again], count))
    return most


def _updates(
    trace: Trace,
    is_step: _Flags,
    tensor_unit: _Numbers,
    duration_s: npt.NDArray[np.float64],
    count: int,
) -> tuple[npt.NDArray[np.float64], float]:
    """Seconds of the optimizer's phases by unit, float64[N], and of those of no unit.

    A phase that updates several units counts for each by the bytes that it uses of it.
    """
    phase = phase_of_access(trace)
    taken = is_step[phase] & (tensor_unit[trace.access_tensor] >= 0)
    phase, tensor = phase[taken], trace.access_tensor[taken]
    size = trace.tensor_bytes[tensor].astype(np.float64)
    phase_bytes = np.bincount(phase, size, trace.phase_count)
    update_s = np.zeros(count)
    np.add.at(update_s, tensor_unit[tensor], duration_s[phase] * size / phase_bytes[phase])
    unowned = is_step & (phase_bytes == 0)
    return update_s, float(duration_s[unowned].sum())


def _gradient_lifetimes(gradients: _Numbers, in_backward: bool) -> tuple[_Numbers, _Numbers]:
    """Bytes of gradients, int64[N], that a trace lacks in each unit's pass, or has there too long.

    Those are of the step before, in the first forward pass, and of this step, in the backward pass.
    A trace frees gradients behind the optimizer's step. Deferred updates keep those of each unit
    until its next forward pass begins. In the backward pass they are freed behind the updates, of
    which a few may be under way.
    """
    later = np.cumsum(gradients[::-1])[::-1]  # of each unit and those behind it
    if not in_backward:
        return later, np.zeros_like(later)
    few = UNITS_WITH_GRADIENTS + 1
    freed = np.append(later[few:], np.zeros(min(few, len(later)), np.int64))
    waiting = np.where(np.arange(len(gradients)) < few, gradients, 0)
    return np.cumsum(waiting[::-1])[::-1], freed


def _sums(units: _Numbers, sizes: _Numbers, count: int) -> _Numbers:
    found = np.zeros(count, np.int64)
    np.add.at(found, units, sizes)
    return found


def _most(units: _Numbers, sizes: _Numbers, count: int) -> _Numbers:
    found = np.zeros(count, np.int64)
    np.maximum.at(found, units, sizes)
    return found
