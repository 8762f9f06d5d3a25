"""A training whose optimizer state is streamed, from its first step to its end.

A :class:`StreamedTraining` begins with a model and an optimizer. It hears of the model's passes,
and its hooks on the optimizer come before and after each step. It ends when it is closed, when
model or optimizer is gone, or with an error of umem's: then the program goes on as without it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.compiler import disable
from torch.optim.optimizer import Optimizer

from umem.adapters import find_gathering
from umem.adapters.interface import GatheredParameters
from umem.capture.live import find_blocks
from umem.core.errors import PlanError, TraceError
from umem.core.weakly import weakly
from umem.runtime.captured_reads import CapturedReads
from umem.runtime.giving_back import before_giving_back
from umem.runtime.held_memory import before_hold, note_export
from umem.runtime.managed_runs import new_run
from umem.runtime.model_parts import optimizer_parameters, tensors_in
from umem.runtime.torch_hooks.clock import Hearing, Listener, Order
from umem.runtime.torch_hooks.compilation import before_compiled_code
from umem.runtime.torch_hooks.graphed import graphed_tensors
from umem.runtime.torch_hooks.hidden import hide
from umem.runtime.torch_hooks.modules import HookErrors
from umem.runtime.torch_hooks.passes import Pass
from umem.runtime.torch_hooks.work_starts import CAPTURES, before_work
from umem.streaming.activations.copied_activations import is_compiled
from umem.streaming.gradients.clipped_gradients import ClippedGradients
from umem.streaming.gradients.copied_gradients import CopiedGradients
from umem.streaming.host_share.host_update import HostUpdate
from umem.streaming.stage.homes import StateMemory
from umem.streaming.stage.lanes import Lanes
from umem.streaming.stage.ring import Ring
from umem.streaming.step.in_backward import BackwardUpdates
from umem.streaming.step.known_optimizers import refusal
from umem.streaming.step.step import StepCounts, StreamedStep
from umem.streaming.step.temporary_slots import TemporarySlots
from umem.streaming.step.unit_names import UnitNames
from umem.streaming.step.units import StreamedUnits
from umem.streaming.step.whole_steps import WholeSteps, named_arguments
from umem.streaming.tune.optimizers import TunedOptimizer
from umem.streaming.tune.states import TuningStatus
from umem.streaming.tune.tuner import StreamTuner
from umem.streaming.weights.managed_models import managed_weights
from umem.streaming.weights.model_weights import ModelWeights
from umem.streaming.weights.streamed_weights import forget_copies
from umem.torch_compat import (
    InferenceMode,
    is_distributed,
    runs_compiled,
)

__all__ = ["StreamedStatus", "StreamedTraining", "graphing_begins", "join", "streamed_trainings"]

_LOG = logging.getLogger("umem")

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Those that torch calls the step's own function with."""

_trainings: weakref.WeakSet[StreamedTraining] = weakref.WeakSet()


@functools.cache
def _watch_compiler() -> None:
    """Have all updates waited for before code is compiled, and before it runs if it reads them."""

    def settle() -> bool:
        found = [training.compilation_begins() for training in streamed_trainings()]
        return any(found)

    before_compiled_code(settle)


def streamed_trainings() -> list[StreamedTraining]:
    """All trainings of the process whose state is streamed."""
    return [training for training in _trainings if not training.is_closed]


def join() -> None:
    """Let the current stream wait until weights, gradients and state have their values.

    That is in their own memory, at their own addresses, until the next forward pass or step.
    Programs need not call it: whatever uses a parameter, a gradient or optimizer state through
    torch waits by itself. Call it before code that uses such memory past torch, as an extension
    does that takes tensors outside of a module's forward pass. A program that keeps addresses from
    step to step calls :func:`umem.hold` instead.
    """
    for training in streamed_trainings():
        training.join()
    forget_copies()


def graphing_begins(_modules: Sequence[nn.Module]) -> None:
    """Make parameters and buffers stay where they are, which a graph reads there without a hook.

    Updates are waited for, now and at the end of each later step: blocks within a graph are not
    called any more, and nothing else waits for their updates. Weights are streamed no more; those
    in host memory are read there.
    """
    join()
    for training in streamed_trainings():
        training.let_graphs_read()
    for weights in managed_weights():
        weights.let_graphs_read()


def _memory_is_held() -> None:
    for training in streamed_trainings():
        training.memory_is_held()


def _let_go(device: torch.device | None) -> None:
    for training in streamed_trainings():
        training.let_go(device)


@dataclass(frozen=True)
class StreamedStatus:
    """Current state of a training whose optimizer state is streamed, and counts.

    Parameters
    ----------
    state_bytes
        State that can be streamed, as of the last step.
    slots_bytes
        The buffers on the device.
    counts
        What became of the steps so far.
    step_in_backward
        Whether parameters are updated in the backward pass. False while it was asked for, and the
        first steps are watched.
    is_settled
        Whether later steps run as the next one does: none is measured for a plan, or watched for
        `step_in_backward`.
    measured_s
        Mean time from one step to the next under the present plan, on the host's clock; None at
        first.
    tuning
        What was measured and planned; None for a training without a tuner.
    """

    state_bytes: int
    slots_bytes: int
    counts: StepCounts
    step_in_backward: bool
    is_settled: bool
    measured_s: float | None
    tuning: TuningStatus | None


class StreamedTraining(Listener):
    """What streams the state of an optimizer, with hooks on it and on its model.

    Parameters
    ----------
    model
        The module that the training loop calls.
    optimizer
        Its optimizer: one that is known to update each parameter by itself.
    lanes
        Where the work runs.
    memory
        Homes and buffers of the state.
    tuner
        Decides what stays on the device. None to stream all state.
    streams_state
        False to leave state and steps as they are, and copy activations only.
    copies_gradients
        Whether the tuner may have gradients copied to the host.
    step_in_backward
        Update parameters in the backward pass, as soon as their gradients are complete.
    weights
        Streams weights of the model.
    ring
        The slots of another optimizer of the model, to be shared with it.

    Raises
    ------
    PlanError
        For another optimizer, and for `step_in_backward` where ``torch.distributed`` is
        initialised.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        lanes: Lanes,
        memory: StateMemory,
        tuner: StreamTuner | None = None,
        *,
        streams_state: bool = True,
        copies_gradients: bool = False,
        step_in_backward: bool = False,
        weights: ModelWeights | None = None,
        ring: Ring | None = None,
    ) -> None:
        if streams_state:
            _check(optimizer)
        _watch_compiler()
        self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)
        self._lanes, self._weights, self._streams_state = lanes, weights, streams_state
        self.tuner = tuner
        """Decides what stays on the device, for all optimizers of the model."""
        self._blocks = blocks = find_blocks(model)
        self._names = names = UnitNames(blocks)
        units = StreamedUnits(names.of, lanes, memory, names.part_bytes, ring)
        clipped = ClippedGradients(lanes)
        self.step = StreamedStep(units, lanes, clipped, self, may_defer=not is_compiled(model))
        """The step that is streamed."""
        self.gradients = CopiedGradients(
            units.parameters, lanes, memory, clipped, self._gradients_failed
        )
        """The copies of gradients."""
        self.temporary = TemporarySlots(
            model, blocks, units.ring, self._may_make_slots, self._temporary_failed
        )
        """The slots that exist from a backward pass to the next forward pass."""
        gradients = self.gradients if copies_gradients else None
        self._tuned = TunedOptimizer(self.step, gradients, self.temporary)
        self._backward: BackwardUpdates | None = None
        self._whole_steps = WholeSteps(lanes)
        self._is_in_line = True
        """Whether the optimizer runs the present step itself."""
        self._is_step_compiled = False
        """Whether compiled code calls it, or what a graph break has left of that."""
        self._is_distributed = False
        """Whether a step was made with ``torch.distributed``."""
        self._held: tuple[int, bool] | None = None
        """Number of the layout, and whether the model holds all parameters in it."""
        self._gathering: tuple[int, Callable[[], GatheredParameters]] | None = None
        """Number of the layout, and what finds what parameters are gathered from in it."""
        self._idle: _Idle | None = None
        """While all is on the device, and a step has nothing to do but to look whether it is."""
        self._hears_blocks = False
        """Not while no update can be under way in a forward pass."""
        self._has_let_go = False
        """Whether nothing is placed and held, since :meth:`let_go`."""
        self._captured = CapturedReads(lanes.is_capturing)
        """Gradients and state that a CUDA graph reads."""
        self._managed_run = new_run(model, "step", weakly(self._late_uses))
        self._undo: list[Callable[[], None]] = [self.temporary.close]
        self._undo_on_optimizer: list[Callable[[], None]] = []
        """Not for a hook of the optimizer's own, which iterates over its hooks."""
        self._begin(model, optimizer)
        if step_in_backward:
            self.move_into_backward()
        _trainings.add(self)
        before_hold(_memory_is_held)
        before_giving_back(_let_go)

    # ------------------------------------------------------------------ the beginning

    def _begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Find what there is, and set the hooks."""
        hook = HookErrors(self._fail)
        if self._weights is not None:
            updates, update_of = self._weights.streamed.updates, self.step.update_of
            updates.append(update_of)
            self._undo.append(lambda: updates.remove(update_of))
        self.let_graphs_read()
        if self._streams_state and optimizer.state:
            self.step.find_state(optimizer)
        tuner, tuned = self.tuner, self._tuned
        if tuner is not None:
            tuner.attach(tuned)
            self._undo.append(lambda: tuner.detach(tuned))
        self._hearing = Hearing(self, Order.STATE, self._fail, model)
        self._hear_blocks()
        self._undo += [
            self._hearing.close,
            hide(model.register_load_state_dict_pre_hook(hook(self._model_loads))),
        ]
        loads = hook(lambda *_: self.step.join())
        loaded = hook(lambda *_: self.step.have_loaded("optimizer"))
        self._undo_on_optimizer += [
            # After all of the program's, which may change gradients.
            hide(optimizer.register_step_pre_hook(self._step_begins()), "last"),
            hide(optimizer.register_step_post_hook(disable(hook(self._after_step)))),
            hide(optimizer.register_load_state_dict_pre_hook(loads)),
            hide(optimizer.register_load_state_dict_post_hook(loaded)),
        ]
        # The model may be trained again, by another optimizer.
        for owner in (model, optimizer):
            weakref.finalize(owner, weakly(self._owner_is_gone)).atexit = False
        if self._streams_state:
            self._undo.append(before_work(self.work_begins))
        self._undo += [
            before_work(self.capture_begins, CAPTURES, is_last=True),
            self._captured.release,
        ]

    def move_into_backward(self) -> None:
        """Update parameters in the backward pass, once two complete steps show that it is exact.

        Raises
        ------
        PlanError
            For an optimizer whose state cannot be streamed, and where ``torch.distributed`` is
            initialised. Later, ``step()`` raises one if the training uses gradients between
            backward pass and step.
        """
        model, optimizer = self._model(), self._optimizer()
        if self._backward is not None or model is None or optimizer is None:
            return
        _check(optimizer)
        self._idle = None
        if self._weights is not None:
            # Updates would change what a backward pass still reads from a buffer.
            self._weights.exclude(optimizer_parameters(optimizer))
        self._backward = backward = BackwardUpdates(self.step, optimizer, self._lanes)
        if self.tuner is not None:
            self.tuner.expect_backward(self._tuned)
        hook = HookErrors(self._fail)
        loads, loaded = hook(backward.model_loads), hook(lambda *_: backward.optimizer_loads())
        self._undo.append(hide(model.register_load_state_dict_pre_hook(loads)))
        self._undo_on_optimizer.append(hide(optimizer.register_load_state_dict_post_hook(loaded)))

    # ------------------------------------------------------------------ the model's passes

    def _hear_blocks(self) -> None:
        """Have each block send state home and wait for its update, if they do not yet."""
        if self._hears_blocks:
            return
        self._hears_blocks = True
        found = {}
        for block in self._blocks:
            with contextlib.suppress(TraceError):  # the program has replaced it
                found[block.name] = block.module
        self._hearing.set_blocks(found)

    def _leave_blocks(self) -> None:
        self._hears_blocks = False
        self._hearing.set_blocks({})

    def pass_begins(self, now: Pass, _args: object, _kwargs: object) -> None:
        """Wait for updates of what is outside of blocks."""
        self._captured.end()
        if self._idle is not None:
            return
        if self._has_let_go:
            self._take_up(is_step=False)
        self.gradients.settle()
        if now.is_training:
            if self.tuner is not None:
                self.tuner.forward_begins()
            if self._backward is not None:
                self._backward.forward_begins()
        for outside in self._names.outside:
            self.step.wait(outside, now)

    def block_begins(self, name: str, now: Pass, _args: object, _kwargs: object) -> None:
        """Wait for a block's update."""
        self.step.enter(name, now)

    def pass_ends(self, now: Pass, _output: object, *, failed: bool) -> None:
        """Fetch state for the step ahead of it."""
        if failed or self._idle is not None or not now.is_training:
            return
        optimizer = self._optimizer()
        if self._backward is not None and optimizer is not None:
            self._backward.forward_ends(optimizer)
        if self._is_distributed:
            # DDP may give gradients to parameters that this process has not called.
            self.step.join()
        self.gradients.forward_ends()
        self.step.units.fetch_ahead()

    # ------------------------------------------------------------------ before the optimizer's step

    def _step_begins(self) -> Callable[..., Any]:
        """A hook that no compiler looks into, and that knows whether compiled code calls it."""
        before_step = disable(self._before_step)

        def begins(*args: Any) -> Any:
            self._is_step_compiled = runs_compiled()
            return before_step(*args)

        return disable(begins, recursive=False)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> _Arguments | None:
        if self.is_closed:
            return None
        self._captured.end()
        if self._idle is not None:
            if self._idle.holds(optimizer) and self.tuner is not None and self.tuner.is_idle:
                return None
            self._idle = None
        named = named_arguments(args, kwargs)
        may_call = named.keys() == {"closure"} and self._streams_state and self._backward is None
        if not may_call or self._is_step_compiled:
            return self._begin_step(optimizer, named)
        closure = named.pop("closure")
        # Known optimizers call it once, before they use a gradient.
        with InferenceMode(torch.is_inference_mode_enabled()):
            torch.set_grad_enabled(True)
            loss = closure()
        done = self._begin_step(optimizer, named)
        return (optimizer,) if done is None else done[0], {"closure": lambda: loss}

    def _begin_step(self, optimizer: Optimizer, arguments: dict[str, Any]) -> _Arguments | None:
        """Stream the step; returns other arguments for the program's own, or None for the same."""
        self.step.is_begun = False
        try:
            empty = None if self.is_closed else self._stream_step(optimizer, arguments)
        except Exception as error:
            if self.step.is_begun:  # the optimizer's own error, as without umem
                raise
            self._fail(error)
            return None  # the optimizer runs the step itself
        # torch runs the step's own function on what a hook returns: here on no parameters.
        return None if empty is None else ((empty,), arguments)

    def _stream_step(self, optimizer: Optimizer, arguments: Mapping[str, Any]) -> Optimizer | None:
        """Queue the step; returns an optimizer without parameters, or None if nothing is queued."""
        self.step.check_known()
        if self._has_let_go:
            self._take_up(is_step=True)
        self.gradients.step_begins()
        self.temporary.step_begins()
        if self._weights is not None:
            self._weights.step_begins()
        if self.tuner is not None:
            self.tuner.step_begins(id(next(optimizer_parameters(optimizer), None)))
        if not self._streams_state:
            return None
        can_split = self._backward is not None or self.step.can_split(optimizer)
        if can_split:
            self._hear_blocks()
        obstacle = self._whole_steps.obstacle(
            optimizer, arguments, is_compiled=self._is_step_compiled, can_split=can_split
        )
        self._is_in_line = bool(obstacle)
        if self._backward is not None:
            self._backward.step_begins(optimizer, obstacle)
        if obstacle:
            self._leave_whole_step(optimizer, obstacle)
            return None
        if not can_split:
            self.step.leave_to_optimizer(optimizer)
            if self.step.may_defer:  # a compiled model would be compiled again
                self._leave_blocks()
            return None
        self._is_distributed |= is_distributed()
        # Libraries hand parameters that no module holds to functions of their own.
        defers_outside = not self._is_distributed or self._model_holds(optimizer)
        # Updates would take a part of the time of the forward pass that is measured.
        is_measuring = self.tuner is not None and self.tuner.is_measuring
        launches = None if self.tuner is None else self.tuner.launches
        if launches is not None:
            launches.begin()
        empty = self.step.step(
            optimizer, is_deferred=not is_measuring, defers_outside=defers_outside
        )
        if launches is not None:
            launches.end(sum(len(unit.pieces) for unit in self.step.units.queued))
        if self.step.obstacle:
            self._whole_steps.note(self.step.obstacle)
        return empty

    def _leave_whole_step(self, optimizer: Optimizer, obstacle: str) -> None:
        """Leave a step to the optimizer, which uses all state where it is."""
        if self._lanes.is_capturing():
            note_export(optimizer)  # replays use these addresses
        self.step.join()
        self.step.counts.in_line += 1
        if self.step.units.queued:
            self._whole_steps.note(obstacle)

    def _model_holds(self, optimizer: Optimizer) -> bool:
        """Whether the model's modules hold all parameters of the optimizer."""
        units, model = self.step.units, self._model()
        layout = units.layouts
        if self._held is None or self._held[0] != layout or not units.has_members_of(optimizer):
            held = set() if model is None else set(map(id, model.parameters()))
            self._held = layout, held.issuperset(map(id, optimizer_parameters(optimizer)))
        return self._held[1]

    # ------------------------------------------------------------------ what the step tells

    def gradient_was_used(self) -> None:
        """Tell a step in the backward pass."""
        if self._backward is not None:
            self._backward.gradient_was_used()

    def state_was_loaded(self) -> None:
        """Have the first steps watched anew for a step in the backward pass."""
        if self._backward is not None:
            self._backward.observe_anew()

    def unit_has_settled(self, name: str, is_early: bool) -> None:
        """Tell the weights: copies that were fetched ahead of an early use are old."""
        if self._weights is not None:
            self._weights.streamed.settled(name, is_early)

    def step_has_failed(self, error: Exception) -> None:
        """Go on without umem."""
        self._fail(error)

    def host_updater(self) -> HostUpdate | None:
        """Make what updates on the host, and prove that it has the device's bits.

        None where it has not for all parameters: a plan counts on all of them.
        """
        optimizer = self._optimizer()
        every = [] if optimizer is None else list(optimizer_parameters(optimizer))
        if optimizer is None or not every:
            return None
        return HostUpdate.for_optimizer(optimizer, every[0].device)

    def gathered_parameters(self) -> GatheredParameters:
        """What a library gathers the model's parameters from."""
        layout, model = self.step.units.layouts, self._model()
        if self._gathering is None or self._gathering[0] != layout:
            find = GatheredParameters if model is None else find_gathering(model)
            self._gathering = layout, find
        return self._gathering[1]()

    # ------------------------------------------------------------------ after the optimizer's step

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if self.is_closed:
            return
        tuner = self.tuner
        if self._idle is not None and tuner is not None:
            self.step.counts.resident += self._streams_state
            self._count_step()
            if not tuner.still_idle():
                self._idle = None
            return
        if not self._is_in_line:
            self.step.find_state(optimizer)
        if tuner is not None:
            tuner.step_ends(self._tuned)
        if self._backward is not None and self._backward.step_ends() and tuner is not None:
            tuner.move_into_backward(self._tuned)
        self._count_step()
        if self._may_be_idle():
            self._idle = _Idle.of(optimizer)

    def _count_step(self) -> None:
        plan = None if self.tuner is None or self.tuner.is_measuring else self.tuner.plan
        predicted_s = None if plan is None else plan.predicted.step_s
        self._managed_run.ends(predicted_s, is_planned=plan is not None)

    def _may_be_idle(self) -> bool:
        """Whether no later step has anything to do until something changes."""
        return (
            self.tuner is not None
            and self.tuner.is_idle
            and self._backward is None
            and not self.step.units.queued
            and (self._weights is None or not self._weights.away_bytes)
        )

    def _may_make_slots(self) -> bool:
        """Whether there may be temporary slots now: a measured step has none."""
        return self.tuner is None or not self.tuner.is_measuring

    # ------------------------------------------------------------------ what else may come

    def _model_loads(
        self, model: nn.Module, state: Mapping[str, Any], prefix: str, *_: object
    ) -> None:
        """Before the state of the model is loaded."""
        named = ((p, state.get(f"{prefix}{name}")) for name, p in model.named_parameters())
        if all(value is not None and value.shape == p.shape for p, value in named):
            self.step.have_loaded("model")

    def join(self) -> None:
        """Let the current stream wait until all have their values in their own memory."""
        self.step.join()
        self.step.units.write_back_and_wait()
        self.gradients.join()

    def let_go(self, device: torch.device | None) -> None:
        """Hold no memory until the next pass or step, if this is a training of a GPU.

        None where the program has moved state or parameters of it elsewhere.
        """
        optimizer = self._optimizer()
        if optimizer is None or self._has_let_go or self._lanes.is_capturing():
            return
        try:
            if device is None:
                is_meant = self.step.units.have_moved(optimizer.state)
            else:
                is_meant = device in {it.device for it in optimizer_parameters(optimizer)}
            if not is_meant:
                return
            if self.tuner is not None:
                self.tuner.let_go()
            if self._idle is None:
                self.gradients.join()
                self._has_let_go = self.step.let_go()
        except Exception as error:
            self._fail(error)

    def _take_up(self, *, is_step: bool) -> None:
        """Place all again, by the plan, when it is here: at a step it has to be."""
        optimizer, weights = self._optimizer(), self._weights
        if optimizer is None or self._lanes.is_capturing():
            return
        if not is_step and not self.step.units.are_here(optimizer):
            return
        self._has_let_go = False
        if weights is not None:
            weights.take_up()  # what leaves the device makes room for state
        if self._streams_state:
            self.step.lay_out(optimizer)
        if weights is not None:
            weights.take_up()  # and state that leaves, for weights
        if self.tuner is not None:
            self.tuner.take_up()

    def memory_is_held(self) -> None:
        """Join, and look at the next step which state may still move: some is held from now on.

        Raises
        ------
        PlanError
            Between an update in the backward pass and ``step()``.
        """
        for unit in self.step.units:
            unit.check_not_ahead()
        self.join()
        self.step.units.lay_out_anew()

    def work_begins(self) -> None:
        """Let the current stream wait for all updates: what comes may use any parameter."""
        if self.step.is_under_way:
            self.step.join(is_early=True)

    def capture_begins(self) -> None:
        """A CUDA graph will read gradients and state by the addresses that they have now."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        try:
            self.gradients.join()
            its = (it.grad for it in optimizer_parameters(optimizer) if it.grad is not None)
            # State at home has a guard of its own.
            self._captured.begin([*its, *tensors_in(list(optimizer.state.values()))])
        except Exception as error:
            self._fail(error)

    def let_graphs_read(self) -> None:
        """Defer no step from now on, and stream no weight, if a CUDA graph reads the model's."""
        model = self._model()
        if model is None or not graphed_tensors(model):
            return
        self.step.may_defer = False
        if self._weights is not None:
            self._weights.let_graphs_read()

    def compilation_begins(self) -> bool:
        """Let the stream wait for all updates; returns whether there were any.

        Compiled code checks the keys of tensors, and reads some past torch's operators.

        Raises
        ------
        PlanError
            Between an update in the backward pass and ``step()``.
        """
        try:
            if self._backward is not None:
                self._backward.compilation_begins()
            was_under_way = self.step.is_under_way
            if was_under_way:
                self.step.join()
            if self._weights is not None:
                was_under_way |= self._weights.streamed.drop_waiting()
        except Exception as error:
            self._fail(error)
            return True
        return was_under_way

    # ------------------------------------------------------------------ what is asked

    @property
    def model(self) -> nn.Module | None:
        """The model; None once it was collected."""
        return self._model()

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; None once it was collected."""
        return self._optimizer()

    @property
    def counts(self) -> StepCounts:
        """What became of the steps so far."""
        return self.step.counts

    def _late_uses(self) -> int:
        """Uses of parameters before their block's update, and of activations before their copy."""
        return self.counts.early + (0 if self.tuner is None else self.tuner.late_fetches)

    def status(self) -> StreamedStatus:
        """Current state, and counts over the training so far."""
        is_watched = self._backward is not None and self._backward.is_observing
        return StreamedStatus(
            state_bytes=sum(map(sum, self.step.units.sizes().values())),
            slots_bytes=self.step.units.slots_bytes,
            counts=replace(self.counts),
            step_in_backward=self._backward is not None and not is_watched,
            is_settled=not is_watched and (self.tuner is None or self.tuner.is_settled),
            measured_s=self._managed_run.measured_s,
            tuning=None if self.tuner is None else self.tuner.status(),
        )

    # ------------------------------------------------------------------ the end

    @property
    def is_closed(self) -> bool:
        """Whether the training goes on without umem."""
        return not self._undo

    def close(self) -> None:
        """Wait for all updates, and leave later steps to the optimizer alone.

        Raises
        ------
        PlanError
            If the backward pass has updated parameters, and ``step()`` was not called since.
        """
        self._leave(is_checked=True)
        _call_all(self._undo_on_optimizer)

    def abandon(self) -> None:
        """Close when model or optimizer is gone, whatever has become of the last step."""
        self._leave()
        _call_all(self._undo_on_optimizer)

    def _owner_is_gone(self) -> None:
        if not self.is_closed:
            self.abandon()

    def _leave(self, *, is_checked: bool = False) -> None:
        if self._backward is not None:
            self._backward.close(is_checked=is_checked)
        self._idle = None  # which has the optimizer's state
        self.gradients.close()
        self.step.forget()
        _call_all(self._undo)

    def _fail(self, error: Exception) -> None:
        """An error must not end the training, which goes on as without umem.

        What raises here all the same: what `step_in_backward` does not allow, and an error without
        whose end the program would see other values, as an update that cannot be waited for.
        """
        backward = self._backward
        if backward is not None and (isinstance(error, PlanError) or backward.is_ahead):
            raise error
        if self.is_closed:  # by an earlier one
            return
        _warn(
            "optimizer state is not streamed any more, and used where it is, which may be slow",
            error,
        )
        self._leave()

    def _gradients_failed(self, error: Exception) -> None:
        """Go on with gradients where they are."""
        _warn("gradients are not copied any more", error)
        self.gradients.set_plan(())

    def _temporary_failed(self, error: Exception) -> None:
        """Go on with the other slots."""
        _warn("state has no temporary slots any more", error)
        self.temporary.close()


def _warn(what: str, error: Exception) -> None:
    """Say what the training goes on without, because of an error."""
    _LOG.warning(
        "umem: %s: %s: %s",
        what,
        type(error).__name__,
        str(error),
        exc_info=_LOG.isEnabledFor(logging.DEBUG),
    )


def _call_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()
    functions.clear()


class _Idle(NamedTuple):
    """What an optimizer had when its steps began to have nothing to do."""

    state: Mapping[Any, Any]
    states: int
    parameters: int

    @classmethod
    def of(cls, optimizer: Optimizer) -> _Idle:
        parameters = sum(len(group["params"]) for group in optimizer.param_groups)
        return cls(optimizer.state, len(optimizer.state), parameters)

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has no other parameters or state; a new parameter gets state."""
        now = self.of(optimizer)
        return now.state is self.state and now[1:] == self[1:]


def _check(optimizer: Optimizer) -> None:
    reason = refusal(optimizer)
    if reason:
        raise PlanError(f"optimizer state cannot be streamed: {reason}")
