"""Whether a model fits a machine, in what way, and how fast."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from umem.core.errors import PlanError
from umem.core.units import format_bytes
from umem.fit.estimate import (
    LEAST_MOVED_BYTES,
    Workload,
    class_bytes,
    stock_bytes,
    training_step,
)
from umem.fit.shapes import Layer, Matrix, ModelShape
from umem.hardware import Hardware
from umem.hardware.host_memory import PINNED_SHARE
from umem.policy import ResolvedPolicy
from umem.predict.stream_prediction import (
    PredictedStep,
    StreamPrediction,
    UnitChoice,
    unit_choices,
)
from umem.streaming.plan.host_updates import with_host_updates
from umem.streaming.plan.loss_memory import LOSS_REMEDY, is_large_loss, logits_text
from umem.streaming.plan.recomputation import plan_with_recomputation, with_recomputed
from umem.streaming.plan.state_plan import (
    NoShorterStepError,
    StreamProblem,
    home_bytes,
    least_slack_bytes,
    plan_stream,
)
from umem.streaming.plan.step_memory import MemoryByMoment
from umem.streaming.plan.step_timing import (
    StreamUnit,
    largest_slot_bytes,
)
from umem.streaming.plan.training_plan import (
    WEIGHT_SLOTS,
    TrainingPlan,
    plan_training,
    with_weights,
)
from umem.streaming.plan.weight_plan import WeightPlan, WeightUnit, plan_weights

__all__ = ["Fit", "Way", "fit_inference", "fit_training"]

CONTEXT_BYTES = 782 << 20
"""What a process takes of the device beside the budget: CUDA's context, 524 MiB, and the kernels of
torch. 0.75 GiB of the H100s and H200s of ``benchmarks/results`` (``outside_bytes`` of *floor*)."""

PROCESS_BYTES = 1380 << 20
"""What a process takes of the host without any home: Python, torch and CUDA. 1.2 to 1.4 GiB there
(``host_process_bytes`` of *floor* and *stock*), and 0.07 GiB more under umem."""

_HOMES_SHARE = 1.1
"""Host memory of homes as a multiple of what the plan has there: 1.07 to 1.13 of the trainings
there, whose allocator keeps blocks and whose peaks leave state a little less room."""

_FIRST_SHARE, _FIRST_SHARE_OF_TRAINING = 1 / 8, 1 / 2
"""Part of the budget that is left free until a plan is made, where weights and it do not fit:
:mod:`umem.streaming.weights.model_weights`."""

_TOKEN_LAUNCHES = 4.5
"""The processor's time for a kernel of transformers' loop that generates, in bare launches: 22 us
where such a launch takes 4.9. 32 ms a token of Llama-2-7B, 33 of 13B, 46 of Code Llama 34B and 97
of Qwen3-30B-A3B, in ``benchmarks/results`` (``h100-generate.jsonl``,
``h100-generate-experts.jsonl``)."""

_LEAST_WAITS = 0.1
"""Of a step or a token: waits for launches that are shorter are not named."""

_MOST_BATCH = 4096

_MOST_TRIED = 4
"""Batches to plan in the search for the largest one."""


@dataclass(frozen=True)
class Place:
    """Where the bytes of a class are."""

    device_bytes: int
    host_bytes: int

    @property
    def size_bytes(self) -> int:
        """All of them."""
        return self.device_bytes + self.host_bytes


@dataclass(frozen=True)
class Way:
    """One way to run a workload on a machine."""

    name: str
    """``umem``, ``stock`` or ``offload``."""
    time_s: float | None
    """Of a training step, or of a token; None if it does not fit."""
    tokens_per_s: float | None
    device_bytes: int | None
    """At the fullest moment, :data:`CONTEXT_BYTES` included; None if no plan was found."""
    host_bytes: int | None
    """Of a process, :data:`PROCESS_BYTES` included."""
    why_not: str = ""
    """The reason, if it does not fit."""


@dataclass(frozen=True)
class Fit:
    """The answer for one machine."""

    hardware: str
    rates: str
    """What its times rest on, as of :class:`umem.hardware.Hardware`; "unknown" for none."""
    budget_bytes: int
    """Device memory that may be used."""
    host_limit_bytes: int
    """Host memory that may be used."""
    classes: Mapping[str, Place]
    """By class; under umem, or all on the device if umem has no plan."""
    choices: tuple[UnitChoice, ...]
    """What happens to each unit's activations, in forward order; empty where there is no plan."""
    ways: tuple[Way, ...]
    largest_batch: int
    """With umem; 0 if none fits."""
    largest_stock_batch: int
    launch_s: float
    """The processor's time to launch the kernels of a step or a token, the least that any takes."""
    waits_s: float
    """Of a step or a token, in which the device waits for launches."""
    host_updates: int = 0
    """Units that the host updates."""
    slices_loss: bool = False
    """Whether umem computes the loss in slices of rows, as it would take too much otherwise."""
    one_pool: bool = False
    """Whether host and device share one memory, within which nothing is moved."""

    @property
    def umem(self) -> Way:
        """The way with umem."""
        return self.ways[0]

    @property
    def waits_for_processor(self) -> bool:
        """Whether the device waits for launches for a tenth of the time or more."""
        times_s = [it.time_s for it in self.ways[:2] if it.time_s is not None]
        return bool(times_s) and self.waits_s > _LEAST_WAITS * min(times_s)


def _in_one_pool(found: Fit) -> Fit:
    """The answer where nothing is moved: umem's way is stock's, and no optimizer is elsewhere."""
    stock = found.ways[1]
    classes = {name: Place(place.size_bytes, 0) for name, place in found.classes.items()}
    return replace(
        found,
        classes=classes,
        ways=(replace(stock, name="umem"), stock),
        largest_batch=found.largest_stock_batch,
        one_pool=True,
    )


class _Room(NamedTuple):
    """Memory that a workload may take."""

    device_bytes: int
    host_bytes: int

    def why_not(self, device_bytes: int, host_bytes: int) -> str:
        """Why so much does not fit; empty if it does."""
        needed = (device_bytes, host_bytes)
        for where, size_bytes, there in zip(("device", "host"), needed, self, strict=True):
            if size_bytes > there:
                size, room = format_bytes(size_bytes), format_bytes(max(0, there))
                return f"needs {size} of {where} memory; {room} available"
        return ""

    def way(
        self, name: str, tokens: int, time_s: float, device_bytes: int, homes_bytes: int
    ) -> Way:
        """A way that makes so many tokens in a time, if it fits."""
        why_not = self.why_not(device_bytes, homes_bytes)
        sizes = device_bytes + CONTEXT_BYTES, homes_bytes + PROCESS_BYTES
        if why_not:
            return Way(name, None, None, *sizes, why_not)
        return Way(name, time_s, tokens / time_s, *sizes)


def _room(device_bytes: int, host_bytes: int, processes: int) -> _Room:
    """Room for tensors on the device, and for homes of one of so many processes on the host.

    A process locks :data:`umem.hardware.host_memory.PINNED_SHARE` of what is left at most.
    """
    left_bytes = host_bytes / processes - PROCESS_BYTES
    return _Room(device_bytes, max(0, int(PINNED_SHARE * left_bytes)))


def _homes_bytes(
    planned_bytes: int, weight_bytes: int, movable_bytes: int, budget_bytes: int, first: float
) -> int:
    """Host memory of homes at its fullest moment, of what the plan has there.

    Until there is a plan, `first` of the budget is left free, if all weights do not fit beside it.
    """
    free_bytes = budget_bytes - least_slack_bytes(budget_bytes) - int(first * budget_bytes)
    early_bytes = min(movable_bytes, max(0, weight_bytes - max(0, free_bytes)))
    return int(_HOMES_SHARE * max(planned_bytes, early_bytes))


# Training.


def fit_training(
    workload: Workload,
    hardware: Hardware,
    policy: ResolvedPolicy,
    *,
    host_bytes: int | None = None,
) -> Fit:
    """Answer for a training.

    Parameters
    ----------
    workload
        What is trained, and how.
    hardware
        The machine.
    policy
        Resolved for it: ``sft`` or ``lora``. Its budget counts, and what it lets umem compute in
        another way.
    host_bytes
        Host memory that may be used; by default the machine's.

    Raises
    ------
    HardwareError, UmemError
        As :func:`umem.fit.training_step`.
    """
    # The host updates no parts of tensors that GPUs divide.
    policy = replace(policy, updates_on_host=policy.updates_on_host and workload.gpus == 1)
    budget_bytes = policy.device_budget_bytes or hardware.device_bytes
    limit_bytes = hardware.host_bytes if host_bytes is None else host_bytes
    room_bytes = budget_bytes - least_slack_bytes(budget_bytes)
    room = _room(room_bytes, limit_bytes, workload.gpus)
    piece_bytes = largest_slot_bytes(budget_bytes)

    def made_step(batch: int, *, slices_loss: bool = policy.slices_losses) -> PredictedStep:
        made = replace(workload, batch=batch, slices_loss=slices_loss)
        return training_step(made, hardware, piece_bytes)

    def has_room(batch: int) -> bool:
        return not _why_too_large(made_step(batch), room, policy.recomputes)

    def homes_bytes(step: PredictedStep, planned_bytes: int) -> int:
        movable_bytes = sum(sum(unit.part_bytes) for unit in (step.weights or {}).values())
        share = _FIRST_SHARE_OF_TRAINING
        return _homes_bytes(planned_bytes, step.weight_bytes, movable_bytes, budget_bytes, share)

    def prediction(step: PredictedStep, plan: TrainingPlan) -> StreamPrediction:
        name = workload.shape.name
        return StreamPrediction(name, hardware.name, policy.name, budget_bytes, False, step, plan)

    def has_plan(step: PredictedStep, weights_bytes: int) -> bool:
        """Whether there is a plan with so much room for weights, and room for its homes."""

        def fits(planned_bytes: int) -> bool:
            return not room.why_not(0, homes_bytes(step, planned_bytes))

        placed = _placed(step, hardware, room_bytes, weights_bytes)
        try:
            least_bytes, most_bytes = home_bytes(placed.problem)
            if fits(most_bytes + placed.homes_bytes):
                return True
            # In between, it takes the plan itself.
            return fits(least_bytes + placed.homes_bytes) and fits(
                prediction(step, _planned(placed)).host_bytes
            )
        except PlanError:
            return False

    def is_planned(batch: int) -> bool:
        tries = _tries(made_step(batch), policy.recomputes)
        return any(has_plan(it, size) for it in tries for size in (it.weight_bytes, 0))

    step = made_step(workload.batch, slices_loss=False)
    all_bytes = class_bytes(workload, hardware)
    classes = {name: Place(size, 0) for name, size in all_bytes.items()}
    choices: tuple[UnitChoice, ...] = ()
    logits = workload.tokens * workload.shape.vocabulary
    slices_loss = policy.slices_losses and is_large_loss(logits, budget_bytes)
    tried = made_step(workload.batch) if slices_loss else step
    planned = _find_plan(tried, hardware, room, policy)
    if isinstance(planned, str) and policy.slices_losses and not slices_loss:
        slices_loss, tried = True, made_step(workload.batch)
        planned = _find_plan(tried, hardware, room, policy)
    if isinstance(planned, str):
        umem = Way("umem", None, None, None, None, planned)
    else:
        made = prediction(tried, planned)
        sizes = class_bytes(replace(workload, slices_loss=slices_loss), hardware)
        classes = _places({name: Place(size, 0) for name, size in sizes.items()}, made)
        umem = _Room(budget_bytes, room.host_bytes).way(
            "umem",
            workload.step_tokens,
            made.plan.predicted.step_s,
            made.training.device_bytes,
            homes_bytes(tried, made.host_bytes),
        )
        choices = unit_choices(made, hardware)
    sliced = made_step(workload.batch, slices_loss=True)
    if umem.why_not and _is_due_to_loss(tried, sliced, room, policy.recomputes):
        text = logits_text(workload.tokens, workload.shape.vocabulary)
        umem = replace(umem, why_not=f"{umem.why_not}; {text}. {LOSS_REMEDY}")
    most = _largest_batch(has_room)
    if umem.time_s is not None:
        most = max(most, workload.batch)

    def is_stock(batch: int) -> bool:
        return stock_bytes(replace(workload, batch=batch), hardware) <= room_bytes

    needed_bytes, tokens = stock_bytes(workload, hardware), workload.step_tokens
    stock_s = step.passes_s + sum(unit.update_s for unit in step.units)
    # CPU offload: state is on the host, however small. All of it comes, and all gradients leave,
    # once in each step, of which nothing is hidden; the optimizer takes the time that it takes on
    # the device.
    state_bytes, gradient_bytes = all_bytes["optimizer_state"], all_bytes["gradients"]
    offload_s = (
        stock_s
        + state_bytes / hardware.copy_to_device_bytes_per_s
        + gradient_bytes / hardware.copy_to_host_bytes_per_s
    )
    away_bytes = state_bytes + gradient_bytes
    found = Fit(
        hardware=hardware.name,
        rates=hardware.rates,
        budget_bytes=budget_bytes,
        host_limit_bytes=limit_bytes,
        classes=classes,
        choices=choices,
        ways=(
            umem,
            room.way("stock", tokens, stock_s, needed_bytes, 0),
            room.way("offload", tokens, offload_s, needed_bytes - state_bytes, away_bytes),
        ),
        largest_batch=_planned_batch(
            most, is_planned, workload.batch if umem.time_s is not None else 0
        ),
        largest_stock_batch=_largest_batch(is_stock),
        launch_s=step.launch_s,
        waits_s=step.waits_s,
        host_updates=0 if isinstance(planned, str) else len(planned.stream.hosts),
        slices_loss=slices_loss and umem.time_s is not None,
    )
    return _in_one_pool(found) if hardware.one_pool else found


def _find_plan(
    step: PredictedStep, hardware: Hardware, room: _Room, policy: ResolvedPolicy
) -> TrainingPlan | str:
    """A plan, or why there is none."""
    try:
        why_not = _why_too_large(step, room, policy.recomputes)
        return why_not or _plan(step, hardware, room.device_bytes, policy)
    except PlanError as error:
        return str(error)


def _is_due_to_loss(
    step: PredictedStep, sliced: PredictedStep, room: _Room, recomputes: bool
) -> bool:
    """Whether a step has no room because of its loss, of which `sliced` has the least."""
    if _is_fullest_at_loss(sliced):
        return True
    return _is_fullest_at_loss(step) and not _why_too_large(sliced, room, recomputes)


def _is_fullest_at_loss(step: PredictedStep) -> bool:
    """Whether the unit with the loss needs more than any other."""
    *others, last = (max(it.forward_peak_bytes, it.backward_peak_bytes) for it in step.units)
    return last > max(others)


def _plan(
    step: PredictedStep, hardware: Hardware, room_bytes: int, policy: ResolvedPolicy
) -> TrainingPlan:
    """Plan with all weights on the device or, if they have no room, as a training does.

    A training also tries whether it gains where weights leave although they have room. That takes
    seconds. In the trainings of docs/fit.md it gains 4 % at most.
    """
    found: dict[tuple[StreamUnit, ...], TrainingPlan] = {}
    """What is a trial first is often the plan."""
    options: dict[str, Any] = {
        "budget_bytes": room_bytes,
        "hardware": hardware,
        "step_peak_bytes": step.step_peak_bytes,
        "holds_gradients": True,
        "batches": step.batches,
    }

    def planned(units: tuple[StreamUnit, ...], longest_s: float) -> TrainingPlan:
        try:
            made = replace(step, units=units)
            return _planned(_placed(made, hardware, room_bytes, step.weight_bytes), longest_s)
        except NoShorterStepError:
            raise
        except PlanError:
            return plan_training(
                units,
                step.weights,
                **options,
                # Where layers run twice, a step may be a little shorter yet.
                is_trial=units != step.units,
            )

    def plan(
        units: Sequence[StreamUnit], *, is_trial: bool = False, longest_s: float = math.inf
    ) -> TrainingPlan:
        key = tuple(units)
        if key not in found:
            found[key] = planned(key, longest_s)
        if is_trial or not policy.updates_on_host:
            return found[key]
        return with_host_updates(found[key], key, step.weights, **options)

    freed_bytes = step.freed_bytes if policy.recomputes else {}
    more_bytes = step.checkpointed_bytes if policy.recomputes else {}
    return plan_with_recomputation(step.units, freed_bytes, hardware, plan, more_bytes)


class _Placed(NamedTuple):
    """Units with weights at home, and the problem that is left."""

    problem: StreamProblem
    weights: WeightPlan

    @property
    def homes_bytes(self) -> int:
        """Weights at home."""
        return self.weights.streamed_bytes + self.weights.in_place_bytes


def _placed(
    step: PredictedStep, hardware: Hardware, room_bytes: int, weights_bytes: int
) -> _Placed:
    """Place weights within so much room."""
    weights = step.weights or {}
    placed = plan_weights(list(weights.values()), weights_bytes, WEIGHT_SLOTS)
    problem = StreamProblem(
        with_weights(step.units, weights, placed),
        budget_bytes=room_bytes - placed.device_bytes,
        hardware=hardware,
        step_peak_bytes=step.step_peak_bytes,
        holds_gradients=True,
        weight_slots=placed.slots,
        batches=step.batches,
    )
    return _Placed(problem, placed)


def _planned(placed: _Placed, longest_s: float = math.inf) -> TrainingPlan:
    """Plan all but weights; PlanError if it has too little room, or cannot be shorter than that."""
    problem, weights = placed
    stream = plan_stream(problem, longest_s)
    device_bytes = weights.device_bytes + stream.peak_bytes
    return TrainingPlan(tuple(problem.units), stream, weights, {}, device_bytes)


def _places(classes: Mapping[str, Place], made: StreamPrediction) -> dict[str, Place]:
    """Where the bytes of each class are in a plan."""
    units, plan = made.step.units, made.plan
    out = {
        "weights": made.weight_homes_bytes,
        "gradients": sum(units[number].gradient_bytes for number in plan.copied_gradients),
        "optimizer_state": sum(
            unit.state_bytes for number, unit in enumerate(units) if number not in plan.resident
        ),
        "activations": sum(units[number].saved_bytes for number in plan.copied),
        "logits": 0,
    }
    gone = {"activations": sum(made.step.freed_bytes[name] for name in made.training.recomputed)}
    return {
        name: Place(place.size_bytes - out[name] - gone.get(name, 0), out[name])
        for name, place in classes.items()
    }


# The largest batch.


def _why_too_large(step: PredictedStep, room: _Room, recomputes: bool) -> str:
    """Why no plan can fit, by what has to be on the device and on the host; empty if one may."""
    why_not = ""
    for each in _tries(step, recomputes):
        why_not = _why_units_too_large(each, room)
        if not why_not:
            break
    return why_not


def _tries(step: PredictedStep, recomputes: bool) -> Iterator[PredictedStep]:
    """A step as it is, and with all units running twice that can."""
    yield step
    if recomputes and step.freed_bytes:
        units = with_recomputed(step.units, step.freed_bytes, step.freed_bytes)
        yield replace(step, units=units)


def _why_units_too_large(step: PredictedStep, room: _Room) -> str:
    """The same of a step in which no more units run twice.

    All that can leave is on the host. Activations are back a unit early.
    """
    units = step.units
    weights = tuple((step.weights or {}).values())
    slots = 2 * max((max(unit.pieces) for unit in units), default=0)
    memory = MemoryByMoment(
        units,
        step.step_peak_bytes,
        step.step_peak_bytes,
        len(units),
        step.batches,
        holds_gradients=True,
        adds_at_home=True,
    )
    moved_bytes = memory.most_bytes(len(memory.can_leave), 1)
    least_bytes = moved_bytes + _staged_weights(weights) + slots
    if why_not := room.why_not(least_bytes, 0):
        return why_not
    # When the backward pass begins, all of it is on the one or the other.
    movable_bytes = sum(unit.state_bytes + unit.saved_bytes for unit in units)
    movable_bytes += sum(sum(unit.part_bytes) for unit in weights)
    turn_bytes = units[-1].forward_peak_bytes - sum(unit.saved_bytes for unit in units)
    if step.batches > 1:  # the gradients of the batches before are there, too
        gradient_bytes = sum(unit.gradient_bytes for unit in units)
        movable_bytes += gradient_bytes
        turn_bytes -= gradient_bytes
    else:
        turn_bytes -= units[-1].gradient_bytes
    host_bytes = movable_bytes - (room.device_bytes - turn_bytes)
    return room.why_not(0, host_bytes)


@cache
def _staged_weights(units: tuple[WeightUnit, ...]) -> int:
    """Device memory of weights if all that can leave are on the host."""
    return plan_weights(units, 0, WEIGHT_SLOTS).device_bytes


def _largest_batch(has_room: Callable[[int], bool]) -> int:
    """The largest batch up to :data:`_MOST_BATCH` that has room; 0 if none has."""
    if not has_room(1):
        return 0
    low, high = 1, 2
    while high <= _MOST_BATCH and has_room(high):
        low, high = high, 2 * high
    high = min(high, _MOST_BATCH + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if has_room(middle) else (low, middle)
    return low


def _planned_batch(most: int, is_planned: Callable[[int], bool], known: int) -> int:
    """A batch up to the largest that may have a plan, in a few steps; at least the known one."""
    batch = most
    for _ in range(_MOST_TRIED):
        if batch <= known:
            break
        if is_planned(batch):
            return batch
        batch = batch * 3 // 4
    return known


# Inference.


def fit_inference(
    workload: Workload,
    hardware: Hardware,
    policy: ResolvedPolicy,
    *,
    host_bytes: int | None = None,
) -> Fit:
    """Answer for generating text, with weights in bfloat16 or quantised.

    A token takes the longest of three times: that of reading resident weights and the cache from
    device memory, that of copying streamed weights over the link, and the processor's for the
    kernels of transformers' loop.

    Parameters
    ----------
    workload
        The model, sequences at a time, and tokens of each in the cache.
    hardware
        The machine.
    policy
        Resolved for it: ``inference``. Only its budget counts.
    host_bytes
        Host memory that may be used; by default the machine's.
    """
    shape, batch, seq = workload.shape, workload.batch, workload.seq
    budget_bytes = policy.device_budget_bytes or hardware.device_bytes
    limit_bytes = hardware.host_bytes if host_bytes is None else host_bytes
    room_bytes = budget_bytes - least_slack_bytes(budget_bytes)
    room = _room(room_bytes, limit_bytes, 1)
    units = _inference_units(workload.weight_bytes, shape)
    small = shape.last_norm + sum(layer.small for layer in shape.layers)
    tables = 2 * shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
    matrices = [it for layer in shape.layers for it in layer.matrices]
    all_bytes = tables + 2 * small + sum(map(workload.weight_bytes, matrices))
    movable_bytes = sum(sum(unit.part_bytes) for unit in units)
    fixed_bytes = all_bytes - movable_bytes

    def homes(planned_bytes: int) -> int:
        return _homes_bytes(planned_bytes, all_bytes, movable_bytes, budget_bytes, _FIRST_SHARE)

    def other(batch: int) -> tuple[int, int, int]:
        """Bytes of the cache, of the largest activations, and of the logits."""
        cached = (layer.seen(seq) * (layer.keys + layer.values) for layer in shape.layers)
        cache = 2 * batch * sum(cached)
        widest = max((_widest(layer, shape.experts_per_token) for layer in shape.layers), default=0)
        return cache, batch * seq * (10 * shape.hidden + widest), 6 * batch * shape.vocabulary

    def has_room(batch: int) -> bool:
        beside = fixed_bytes + sum(other(batch))
        least = _staged_weights(units)
        return not room.why_not(beside + least, homes(movable_bytes - max(0, room_bytes - beside)))

    def is_stock(batch: int) -> bool:
        return all_bytes + sum(other(batch)) <= room_bytes

    cache, activations, logits = other(batch)
    beside = fixed_bytes + cache + activations + logits
    chosen = _chosen_share(shape, batch)
    placed = plan_weights(
        units,
        max(0, room_bytes - beside),
        WEIGHT_SLOTS,
        experts_first=True,
        caches_experts=chosen < 1.0,
    )
    home_bytes = placed.streamed_bytes + placed.in_place_bytes
    share = _read_share(shape, batch)
    resident = share * (all_bytes - home_bytes) + cache
    kernels_s = _TOKEN_LAUNCHES * hardware.launch_s * _token_kernels(shape)
    time_s = max(
        kernels_s,
        resident / hardware.memory_bytes_per_s,
        _crossing(units, placed, chosen) / hardware.copy_to_device_bytes_per_s,
    )
    reading_s = (share * all_bytes + cache) / hardware.memory_bytes_per_s
    stock_s = max(kernels_s, reading_s)
    umem_bytes, everything_bytes = beside + placed.device_bytes, beside + movable_bytes
    found = Fit(
        hardware=hardware.name,
        rates=hardware.rates,
        budget_bytes=budget_bytes,
        host_limit_bytes=limit_bytes,
        classes={
            "weights": Place(all_bytes - home_bytes, home_bytes),
            "cache": Place(cache, 0),
            "activations": Place(activations, 0),
            "logits": Place(logits, 0),
        },
        choices=(),
        ways=(
            room.way("umem", batch, time_s, umem_bytes, homes(home_bytes)),
            room.way("stock", batch, stock_s, everything_bytes, 0),
        ),
        largest_batch=_largest_batch(has_room),
        largest_stock_batch=_largest_batch(is_stock),
        launch_s=kernels_s,
        waits_s=max(0.0, kernels_s - reading_s) if time_s == kernels_s else 0.0,
    )
    return _in_one_pool(found) if hardware.one_pool else found


def _token_kernels(shape: ModelShape) -> int:
    """Kernels of a token in transformers' loop, in eager mode.

    A norm has 8. Attention has 10 to turn queries and keys, 2 for the cache, 2 of its own; either
    half of a layer adds its result; an activation has 2. Experts have about 30: choosing, sorting,
    weighing and putting back. Beside the layers: the table, positions, the mask and the choice.
    """
    beside_layers = 40
    return beside_layers + sum(
        8 * layer.norms
        + 16 * layer.head_norms
        + len(layer.matrices)
        + 18
        + 30 * bool(layer.experts)
        for layer in shape.layers
    )


@cache
def _inference_units(
    weight_bytes: Callable[[Matrix], int], shape: ModelShape
) -> tuple[WeightUnit, ...]:
    """Weights that can leave the device, in the order of the forward pass."""
    table = WeightUnit((2 * shape.vocabulary * shape.hidden,))
    layers = [_layer_weights(weight_bytes, layer) for layer in shape.layers]
    if shape.tied:
        return tuple(layers)
    return (replace(table, gathered=frozenset([0])), *layers, table)


def _layer_weights(weight_bytes: Callable[[Matrix], int], layer: Layer) -> WeightUnit:
    large = [it for it in layer.matrices if weight_bytes(it) >= LEAST_MOVED_BYTES]
    return WeightUnit(
        tuple(map(weight_bytes, large)),
        experts=frozenset(number for number, it in enumerate(large) if it.count > 1),
    )


def _chosen_share(shape: ModelShape, batch: int) -> float:
    """Share of a layer's experts that a token of each sequence chooses, at most."""
    counts = {it.count for layer in shape.layers for it in layer.experts if it.count > 1}
    return min((min(1.0, batch * shape.experts_per_token / it) for it in counts), default=1.0)


def _crossing(units: Sequence[WeightUnit], placed: WeightPlan, chosen: float) -> float:
    """Bytes over the link for a token of each sequence, of experts those of the chosen share.

    Those of them that the cache has, if all experts are as likely, come from the device.
    """
    missing = chosen * (1.0 - placed.cached_share)
    return sum(
        unit.part_bytes[part] * (missing if part in unit.experts else 1.0)
        for unit, parts in zip(units, placed.streamed, strict=True)
        for part in parts
    )


def _widest(layer: Layer, experts_per_token: int) -> int:
    """Bytes for each token of the widest activations of a layer, all at a time."""
    inner = layer.inner
    inner += 2 * experts_per_token * layer.experts[2].inputs if layer.experts else 0
    return 6 * inner


def _read_share(shape: ModelShape, batch: int) -> float:
    """Share of the weights that a token of each sequence reads: tables by row, experts by use."""
    read = 0.0 if shape.tied else -float(shape.vocabulary * shape.hidden)
    read += shape.parameters
    for layer in shape.layers:
        for matrix in layer.experts[1:]:
            used = min(1.0, batch * shape.experts_per_token / matrix.count)
            read -= (1.0 - used) * matrix.parameters
    return read / shape.parameters
