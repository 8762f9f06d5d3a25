"""Tracks the phases of a running training step, and reports them to a listener."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any

from umem.capture.live.blocks import NO_BLOCK, Block
from umem.capture.live.memory_tracker import MemoryTracker
from umem.runtime.model_parts import tensors_in
from umem.runtime.torch_hooks.backward import hook_backward
from umem.runtime.torch_hooks.clock import Hearing, Listener, Order
from umem.runtime.torch_hooks.modules import HookErrors
from umem.runtime.torch_hooks.passes import Pass
from umem.torch_compat import (
    hook_gradient,
    next_sequence_number,
    sequence_number,
)
from umem.trace import OPTIMIZER

__all__ = ["PhaseTracker", "StepListener"]

FORWARD_LOSS = "forward loss"
"""From the model's return to the backward pass."""

BACKWARD_LOSS = "backward loss"
"""From the start of the backward pass to the first block."""

AFTER_BACKWARD = "after backward"
"""From the end of the backward pass to the next forward pass, or the optimizer."""


class StepListener:
    """Receives the steps of a training and their phases while they run. By default nothing is done.

    Phases are reported in the thread that runs them: the one that calls the model, or one of
    autograd's. Only one of these runs at a time. An exception of the listener goes to the guard,
    never to the training.
    """

    def step_begins(self) -> MemoryTracker | None:
        """The model is called for the first time in a step.

        May return a tracker for the step's memory, which is slow.
        """
        return None

    def phase_begins(self, label: str) -> None:
        """A phase begins, and the one before it ends. The GPU may be far behind."""

    def block_begins(self, block: Block, is_recomputed: bool) -> None:
        """The forward pass of the model or of a block begins, in the phase reported last.

        The model comes first, then, inside its pass, its blocks. `is_recomputed` where a checkpoint
        calls it, within the backward pass.
        """

    def block_ends(self, block: Block) -> None:
        """The forward pass ends, perhaps by an exception; reported before the phase that follows.

        Where an interrupt has ended it (``KeyboardInterrupt``), reported when the next step begins.
        """

    def step_ends(self, is_broken: bool) -> None:
        """The optimizer has stepped.

        `is_broken` where an exception or an interrupt has cut the step short, so that phases are
        missing.
        """


@dataclass(slots=True)
class _Step:
    """The step in progress."""

    number: int
    memory: MemoryTracker | None
    label: str = ""
    hooked: dict[tuple[int, int], str] = field(default_factory=dict)
    """Label of the phase that begins when the backward pass reaches an autograd node, by the node's
    thread and number."""
    left_at: int = -1
    """Number of the next autograd node when a block returned last. If a block is called with the
    same number, the model has done nothing of its own in between."""
    is_broken: bool = False


_Call = tuple[Block, str, int]
"""A tracked call that runs: its block, the label of the phase after it, and the number of the next
autograd node when it began. Not a named tuple, which takes several times as long to make."""


class PhaseTracker(Listener):
    """Reports to a listener when the steps of a training begin and end, and the phases in them.

    A step begins with the first call of the model for which gradients are wanted, and ends with the
    optimizer's step. From :meth:`start` to :meth:`stop`, which any hook may call, there are hooks;
    a call in progress at the start is not tracked. The owner passes on the optimizer's hooks, as
    torch does not let these be set or removed while they are called.
    """

    def __init__(
        self, root: Block, blocks: Iterable[Block], errors: HookErrors, listener: StepListener
    ) -> None:
        self._root = root
        self._blocks = tuple(blocks)
        self._named = {it.name: it for it in self._blocks}
        self._errors = errors
        self._listener = listener
        self._hooks: ExitStack | None = None
        self._step: _Step | None = None
        self._step_count = 0
        # The calls of hooked modules that run; None for those that are not tracked.
        self._running: list[_Call | None] = []
        self._is_optimizer = False
        self._passes = 0

    def start(self) -> None:
        """Set the hooks, if they are not set; where one cannot be set, remove the others."""
        if self._hooks is not None:
            return
        with ExitStack() as hooks:
            blocks = {it.name: it.module for it in self._blocks}
            hearing = Hearing(self, Order.METER, self._fail, self._root.module, blocks)
            hooks.callback(hearing.close)
            begins = self._unowned(PhaseTracker._backward_begins)
            ends = self._unowned(PhaseTracker._backward_ends)
            undo_backward = weakref.finalize(self, hook_backward(begins, ends))
            undo_backward.atexit = False
            hooks.callback(undo_backward)
            self._hooks = hooks.pop_all()

    def stop(self) -> None:
        """Remove the hooks and give up the step in progress, whose end is not reported."""
        hooks, self._hooks = self._hooks, None
        step, self._step = self._step, None
        self._running.clear()
        with hooks or ExitStack():
            if step is not None and step.memory is not None:
                step.memory.close()

    def _unowned(self, method: Callable[[PhaseTracker, Any], None]) -> Callable[[Any], None]:
        """A method as a hook that holds no reference to this object, and so none to the model."""
        reference = weakref.ref(self)

        def call(value: Any) -> None:
            tracker = reference()
            if tracker is not None:
                try:
                    method(tracker, value)
                except Exception as error:
                    tracker._fail(error)

        return call

    def _fail(self, error: Exception) -> None:
        """Stop tracking memory, whose hooks depend on reports in pairs, and report the error."""
        step = self._step
        if step is not None and step.memory is not None:
            step.memory.close()
            step.memory, step.is_broken = None, True
        self._errors.on_error(error)

    def pass_begins(self, now: Pass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin the model's phase."""
        self._enter(self._root, now, args, kwargs)

    def block_begins(
        self, name: str, now: Pass, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Begin a block's phase."""
        self._enter(self._named[name], now, args, kwargs)

    def block_ends(self, name: str, now: Pass, output: Any, *, failed: bool) -> None:
        """End a block's phase."""
        self._leave(self._named[name], now, output, failed=failed)

    def pass_ends(self, now: Pass, output: Any, *, failed: bool) -> None:
        """End the model's phase."""
        self._leave(self._root, now, output, failed=failed)

    def _enter(
        self, block: Block, now: Pass, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        in_backward = now.is_second
        step = self._step
        if block is self._root and self._running:
            self._end_interrupted()
        if block is self._root and not in_backward:
            self._passes = 0  # an interrupt may have kept the end of one from being told
        if self._running:
            is_tracked = self._running[-1] is not None
        else:
            is_tracked = self._begins_tracking(block, now)
        if not is_tracked:
            self._running.append(None)
            return
        if step is None:
            step = self._step = self._begin_step()
        is_outermost = not self._running and not in_backward
        memory, next_node = step.memory, next_sequence_number()
        if memory is not None:
            memory.before_call(args, kwargs, is_outermost=is_outermost)
        if not is_outermost and not in_backward and next_node != step.left_at:
            # The backward pass leaves the block here for what the model did before it.
            self._hook_nodes(step, (*args, *kwargs.values()), None, self._root.backward)
        if in_backward:
            label, following = block.recompute, block.backward
        else:
            label, following = block.forward, FORWARD_LOSS if is_outermost else step.label
        self._begin_phase(step, label)
        if memory is not None:
            memory.begin_call(
                self._memory_name(block),
                args,
                kwargs,
                is_outermost=is_outermost,
                recomputed_for=following if in_backward else "",
            )
        self._running.append((block, following, next_node))
        self._listener.block_begins(block, in_backward)

    def _begins_tracking(self, block: Block, now: Pass) -> bool:
        """Whether to track a call that is no part of another."""
        if self._step is None and (now.is_second or block is not self._root):
            return False  # such as inside a call of the model that began before the start
        return now.is_second or now.has_gradients  # otherwise an evaluation

    def _begin_step(self) -> _Step:
        memory = self._listener.step_begins()
        if memory is not None:
            memory.start(self._blocks, is_running=lambda: bool(self._running))
        self._step_count += 1
        return _Step(self._step_count, memory)

    def _end_interrupted(self) -> None:
        """End the calls that an interrupt has left behind."""
        for call in reversed(self._running):
            if call is not None:
                self._listener.block_ends(call[0])
        self._running.clear()
        if self._step is not None:
            self._step.is_broken = True

    def _leave(self, block: Block, now: Pass, output: Any, *, failed: bool) -> None:
        step = self._step
        call = self._running.pop() if self._running else None
        if call is None:
            return
        _, following, first_node = call
        self._listener.block_ends(block)
        if step is None or step is not self._step:
            return
        # In the backward pass, an exception is how a checkpoint ends when it has all it needs.
        if failed and not now.is_second:
            step.is_broken = True
        if block is not self._root:
            self._hook_nodes(step, output, first_node, block.backward)
            step.left_at = next_sequence_number()
        if step.memory is not None:
            step.memory.end_call(
                self._memory_name(block),
                output,
                is_recomputed=now.is_second,
                is_abandoned=failed and not self._running,
            )
        self._begin_phase(step, following)

    def _memory_name(self, block: Block) -> str:
        return NO_BLOCK if block is self._root else block.name

    def _hook_nodes(self, step: _Step, value: object, first_node: int | None, label: str) -> None:
        """Begin a phase when the backward pass reaches the nodes that have made these tensors.

        Only nodes from `first_node` on, if that is given: earlier ones belong to the block before.
        """
        for tensor in tensors_in(value):
            node = tensor.grad_fn
            if node is None:
                continue
            number = sequence_number(node)
            if first_node is not None and number < first_node:
                continue
            key = (get_ident(), number)  # each thread numbers its nodes
            # A node has a gradient for each of its results, which only the memory tracker needs.
            if key in step.hooked and (step.memory is None or step.hooked[key] != label):
                continue
            step.hooked[key] = label
            # The graph, which holds this, may outlive the model.
            reached = partial(PhaseTracker._node_reached, number=step.number, label=label)
            hook_gradient(tensor, node, self._unowned(reached))

    def _node_reached(self, gradient: Any, *, number: int, label: str) -> None:
        """The backward pass has reached a node with which a phase begins.

        The gradient is None where the node gets gradients for its other results only.
        """
        step = self._step
        if step is None or step.number != number:
            return
        memory = step.memory
        if step.label != label:
            if memory is not None:
                memory.see_made(gradient, "gradient")
            self._begin_phase(step, label)
        if memory is not None:
            memory.see_used(gradient)

    def _backward_begins(self, roots: object) -> None:
        """A backward pass begins; inside of another one, a checkpoint's."""
        self._passes += 1
        step = self._step
        if step is None or self._passes > 1:
            return
        if step.memory is not None:
            step.memory.end_forward(roots)
        self._begin_phase(step, BACKWARD_LOSS)
        if step.memory is not None:
            step.memory.see_used(roots)

    def _backward_ends(self, failed: bool) -> None:
        self._passes = max(self._passes - 1, 0)
        step = self._step
        if step is None or self._passes:
            return
        step.is_broken |= failed
        self._begin_phase(step, OPTIMIZER if self._is_optimizer else AFTER_BACKWARD)

    def optimizer_begins(self) -> None:
        """The optimizer's step begins; a closure in it may run the model."""
        step = self._step
        if step is not None:
            step.is_broken |= self._is_optimizer  # an exception has ended the one before
            if step.memory is not None:
                step.memory.begin_optimizer()
            self._begin_phase(step, OPTIMIZER)
        self._is_optimizer = True

    def optimizer_ends(self) -> None:
        """The optimizer's step ends, and with it the training step in progress, if any."""
        self._is_optimizer = False
        step, self._step = self._step, None
        if step is None:
            return
        try:
            self._listener.step_ends(step.is_broken or step.label != OPTIMIZER)
        finally:
            if step.memory is not None:
                step.memory.close()

    def begin_phase_anew(self) -> None:
        """End the present phase, and begin another one of the same label."""
        if self._step is not None:
            self._begin_phase(self._step, self._step.label)

    def _begin_phase(self, step: _Step, label: str) -> None:
        step.label = label
        self._listener.phase_begins(label)
        if step.memory is not None:
            step.memory.begin_phase(label)
