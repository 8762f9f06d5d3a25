"""What a follower of steps tells."""

from __future__ import annotations

import functools
import weakref
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from umem.capture.live.blocks import Block, computed_tensors
from umem.capture.live.clock import Window
from umem.capture.live.memory_tracker import Look, StepLook, StepMemory
from umem.runtime.torch_hooks.modules import Guard, Undo, hook_calls
from umem.trace import OPTIMIZER

__all__ = [
    "AFTER_BACKWARD",
    "BACKWARD_LOSS",
    "FORWARD_LOSS",
    "FollowedPhase",
    "Follower",
    "JoinedPhases",
    "StepListener",
    "follow_backward",
    "join_phases",
]


class StepListener(Protocol):
    """Told of the steps of a training while they run.

    A phase is told of in the thread that runs it: the one that calls the model, or autograd's. Only
    one of them runs at a time. What a listener raises ends the following through the guard, never
    the training.
    """

    def step_begins(self) -> StepMemory | Window | None:
        """The model is called for the first time in a step.

        Returns
        -------
        StepMemory, Window or None
            What is to follow the step's memory, which is slow; or the only part of the step that
            is to be told of. None in a step that is told of as a whole.
        """

    def phase_begins(self, label: str) -> None:
        """A phase begins, and the one before it ends. The GPU may be far behind."""

    def block_begins(self, block: Block, is_recomputed: bool) -> None:
        """The forward pass of the model or of a block begins, in the phase that was told of last.

        Parameters
        ----------
        block
            The model first, then, inside its pass, its blocks.
        is_recomputed
            Whether a checkpoint calls it, within the backward pass.
        """

    def block_ends(self, block: Block) -> None:
        """It ends, by an exception too; told of before the phase that follows.

        Where an interrupt has ended it (``KeyboardInterrupt``), told of when the next step begins.
        """

    def step_ends(self, is_broken: bool) -> None:
        """The optimizer has stepped.

        Parameters
        ----------
        is_broken
            Whether an exception or an interrupt came into its way: its phases are not those of a
            whole step.
        """


# When backward passes begin and end, which no hook of torch tells.


@dataclass(frozen=True, eq=False)
class _Listener:
    begins: Callable[[object], None]
    ends: Callable[[bool], None]


_listeners: list[_Listener] = []
_original: Callable[..., Any] | None = None
_wrapper: Callable[..., Any] | None = None
"""What was put in place of it last. One before that, which somebody else's function around it may
still call, only passes on."""


def follow_backward(
    begins: Callable[[object], None], ends: Callable[[bool], None]
) -> Callable[[], None]:
    """Call functions at both ends of every backward pass of the process.

    ``torch.autograd.backward``, which ``Tensor.backward`` calls, is replaced for as long as
    somebody listens.

    Parameters
    ----------
    begins
        Called with the tensors that the pass begins from, in the thread that asked for it. Must not
        raise.
    ends
        Called with whether an exception has ended it. Must not raise.

    Returns
    -------
    callable
        Ends it.
    """
    global _original, _wrapper
    if _wrapper is None or torch.autograd.backward is not _wrapper:
        _original = torch.autograd.backward
        torch.autograd.backward = _wrapper = _telling(_original)
    listener = _Listener(begins, ends)
    _listeners.append(listener)

    def leave() -> None:
        global _original, _wrapper
        _listeners.remove(listener)
        if _listeners:
            return
        # Where somebody else has put a function around this one, both stay.
        if torch.autograd.backward is _wrapper:
            assert _original is not None
            torch.autograd.backward = _original
            _original = _wrapper = None

    return leave


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        told = list(_listeners) if backward is _wrapper else []
        for listener in told:
            listener.begins(args[0] if args else kwargs.get("tensors"))
        failed = True
        try:
            result = original(*args, **kwargs)
            failed = False
        finally:
            for listener in told:
                listener.ends(failed)
        return result

    return backward


# Which of the phases that were followed are one phase of the trace.


@dataclass(frozen=True)
class FollowedPhase:
    """A phase as a :class:`StepListener` is told of it, and where the trace has it.

    Parameters
    ----------
    label
        What the listener is told.
    phase
        Index in the trace's phases; of the optimizer's first one for "optimizer".
    """

    label: str
    phase: int


@dataclass(frozen=True)
class JoinedPhases:
    """The phases of a step, some of them joined."""

    numbers: NDArray[np.int64]
    """New number of each phase that was followed, from 0 without holes."""
    labels: tuple[str, ...]
    """Of the joined phases."""

    @property
    def begins(self) -> tuple[int | None, ...]:
        """Of each phase that was followed, the number of the joined phase that begins with it."""
        is_first = np.diff(self.numbers, prepend=-1) > 0
        numbers = zip(self.numbers.tolist(), is_first.tolist(), strict=True)
        return tuple(number if begins else None for number, begins in numbers)


def join_phases(look: StepLook, gaps: Collection[str]) -> JoinedPhases:
    """Join phases that use nothing of their own to their neighbours.

    Parameters
    ----------
    look
        What the phases use; the last one is the optimizer's, and stays.
    gaps
        Labels of what the model does between blocks. Where that uses nothing, it is part of the
        phase before. Where a block's backward pass, or what lies before it, has only begun when a
        checkpoint computes the block again, it is part of that.
    """
    labels, last = look.labels, len(look.labels) - 1
    before = np.array(
        [
            0 < phase < last and label in gaps and not look.accesses[phase]
            for phase, label in enumerate(labels)
        ]
    )
    after = np.array(
        [
            following.startswith("recompute ")
            and (label in gaps or label == "backward " + following.removeprefix("recompute "))
            for label, following in zip(labels, [*labels[1:], ""], strict=True)
        ]
    )
    stays = ~before & ~after
    # What joins the next phase has that one's number already.
    numbers: NDArray[np.int64] = np.cumsum(stays) - 1 + after
    return JoinedPhases(numbers, tuple(labels[phase] for phase in np.flatnonzero(stays)))


# Cuts a running training step into phases.

FORWARD_LOSS = "forward loss"
"""From the model's return to the backward pass."""

BACKWARD_LOSS = "backward loss"
"""From the start of the backward pass to the first block."""

AFTER_BACKWARD = "after backward"
"""From the end of the backward pass to the next forward pass, or the optimizer."""

_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""-1 outside of a backward pass."""
_next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr


@dataclass(slots=True)
class _Step:
    """One step in flight."""

    number: int
    look: Look | None
    """None where nobody looks at its memory."""
    skipped: frozenset[str]
    """Names of the blocks that are let pass."""
    label: str = ""
    hooked: dict[tuple[int, int], str] = field(default_factory=dict)
    """Phases that begin when the backward pass reaches an autograd node, by its thread and
    number."""
    left_at: int = -1
    """Number of the next autograd node when a block was left last: if it is the next one still,
    there is nothing of the model's own between that block and the one that is called."""
    skipped_nodes: list[int] = field(default_factory=list)
    """Numbers of the next autograd node at both ends of each skipped block's forward pass."""
    is_broken: bool = False


_Call = tuple[Block, str, int]
"""A hooked module that runs, the phase after it, and the number of the next autograd node when it
began. Not a named tuple: one is made in every call, and that takes several times as long."""


class Follower:
    """Tells a listener when the steps of a training begin and end, and the phases in them.

    A step begins with the first call of the model for which gradients are wanted, and ends with the
    optimizer's step. Between :meth:`start` and :meth:`stop`, which any hook may call, there are
    hooks on the model, its blocks and backward passes; a call of the model that is under way at the
    start is not followed. The owner passes the optimizer's hooks on, as torch does not let them
    come or go while they are called.

    Parameters
    ----------
    root, blocks
        The model, and the modules in it whose passes are phases.
    guard
        Makes hooks.
    listener
        Told of everything.
    """

    def __init__(
        self, root: Block, blocks: Iterable[Block], guard: Guard, listener: StepListener
    ) -> None:
        self._root = root
        self._blocks = tuple(blocks)
        self._guard = guard
        self._listener = listener
        self._reference = weakref.ref(self)
        self._hooks: list[Undo] = []
        self._step: _Step | None = None
        self._step_count = 0
        # The hooked modules that run; None for what is not followed.
        self._open: list[_Call | None] = []
        self._is_optimizer = False
        self._passes = 0
        self._backward_failed = False

    def start(self) -> None:
        """Follow from now on. Modules that are no blocks cost nothing by it."""
        for block in (self._root, *self._blocks):
            self._hooks += hook_calls(
                block.module,
                partial(self._enter, block),
                partial(self._leave, block),
                self._guard.on_error,
            )
        leave = follow_backward(
            self._unowned(Follower._backward_begins), self._unowned(Follower._backward_ends)
        )
        end = weakref.finalize(self, leave)
        end.atexit = False
        self._hooks.append(end)

    @property
    def backward_failed(self) -> bool:
        """Whether an exception has ended the last backward pass of the step in flight."""
        return self._backward_failed

    def _unowned(self, tell: Callable[[Follower, Any], None]) -> Callable[[Any], None]:
        """A method for the process's list of listeners, which must not keep the model alive."""
        this = self._reference

        def call(value: Any) -> None:
            follower = this()
            if follower is None:
                return
            try:
                tell(follower, value)
            except Exception as error:
                follower._guard.on_error(error)

        return call

    def stop(self) -> None:
        """Take the hooks away and give up the step in flight, which the listener is not told of."""
        for undo in self._hooks:
            undo()
        self._hooks.clear()
        step, self._step = self._step, None
        if step is not None and step.look is not None:
            step.look.close()
        self._open.clear()

    # ------------------------------------------------------------------ modules

    def _enter(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is called."""
        if not self._hooks:
            return  # torch calls hooks that were taken away since the call began
        step = self._step
        if step is not None and block.name in step.skipped:
            if _graph_task() == -1:
                step.skipped_nodes.append(_next_node())
            return
        if block is self._root and self._open:
            self._clear_open()
        in_backward = _graph_task() != -1
        if self._open:
            is_wanted = self._open[-1] is not None
        else:
            is_wanted = self._begins_following(block, in_backward)
        if not is_wanted:
            self._open.append(None)
            return
        if step is None:
            step = self._step = self._begin()
        is_outermost = not self._open and not in_backward
        if in_backward:
            label, following = block.recompute, block.backward
        else:
            label, following = block.forward, FORWARD_LOSS if is_outermost else step.label
        if step.look is not None:
            step.look.call_begins(args, kwargs, is_outermost=is_outermost)
        next_node = _next_node()
        if not is_outermost and not in_backward and next_node != step.left_at:
            # Tells when the backward pass leaves the block for what lies before it.
            self._hook(step, (*args, *kwargs.values()), None, self._root.backward)
        self._begin_phase(step, label)
        is_root = block is self._root
        if step.look is not None:
            name = None if is_root else block.name
            recomputed_for = following if in_backward else ""
            step.look.call_runs(
                name, args, kwargs, is_outermost=is_outermost, recomputed_for=recomputed_for
            )
        self._open.append((block, following, next_node))
        self._listener.block_begins(block, in_backward)

    def _begins_following(self, block: Block, in_backward: bool) -> bool:
        """Whether to follow a call that is no part of another."""
        if self._step is None and (in_backward or block is not self._root):
            return False  # such as a call of the model that began before the following
        return in_backward or torch.is_grad_enabled()  # otherwise an evaluation

    def _begin(self) -> _Step:
        wanted = self._listener.step_begins()
        look = None
        if isinstance(wanted, StepMemory):
            look = Look(wanted, self._blocks, self._guard, is_running=lambda: bool(self._open))
        skipped = wanted.skipped if isinstance(wanted, Window) else frozenset[str]()
        skipped -= {self._root.name}
        self._step_count += 1
        self._backward_failed = False
        return _Step(self._step_count, look, skipped)

    def _clear_open(self) -> None:
        """An interrupt has left calls behind."""
        for call in reversed(self._open):
            if call is not None:
                self._listener.block_ends(call[0])
        self._open.clear()
        if self._step is not None:
            self._step.is_broken = True

    def _leave(self, block: Block, output: Any, *, failed: bool) -> None:
        """A module returns, or an exception goes through it."""
        step = self._step
        if step is not None and block.name in step.skipped:
            if _graph_task() == -1:
                step.is_broken |= failed
                step.left_at = _next_node()
                step.skipped_nodes.append(step.left_at)
            return
        call = self._open.pop() if self._open else None
        if call is None:
            return
        _, following, first_node = call
        is_root = block is self._root
        self._listener.block_ends(block)
        if step is None or step is not self._step:
            return
        # A checkpoint ends the computation in this way when it has all it needs.
        if failed and _graph_task() == -1:
            step.is_broken = True
        if not is_root:
            self._hook(step, output, first_node, block.backward)
            step.left_at = _next_node()
        if step.look is not None:
            step.look.call_ends(
                None if is_root else block.name,
                output,
                is_recomputed=_graph_task() != -1,
                is_abandoned=failed and not self._open,
            )
        self._begin_phase(step, following)

    # ------------------------------------------------------------------ the backward pass

    def _hook(self, step: _Step, value: object, first_node: int | None, label: str) -> None:
        """Begin a phase when the backward pass reaches what has made these tensors.

        Only nodes made since `first_node`: an earlier one belongs to the block before. Where that
        is None, all but those that a skipped block has made.
        """
        for tensor, node in computed_tensors(value):
            number = node._sequence_nr()
            if first_node is not None:
                is_others = number < first_node
            else:
                is_others = bisect_right(step.skipped_nodes, number) % 2 == 1
            if is_others:
                continue
            key = (get_ident(), number)  # nodes are numbered thread by thread
            # A node has a gradient for each of its results; only a look wants to see them all.
            if key in step.hooked and (step.look is None or step.hooked[key] != label):
                continue
            step.hooked[key] = label
            # The graph, which holds this, may live on.
            reached = partial(_reached, self._reference, step.number, label)
            _hook_gradient(tensor, node, reached)

    def _backward_begins(self, roots: object) -> None:
        """A backward pass begins; within another one, it is a checkpoint's."""
        self._passes += 1
        step = self._step
        if step is None or self._passes > 1:
            return
        if step.look is not None:
            step.look.forward_ends(roots)
        self._begin_phase(step, BACKWARD_LOSS)
        if step.look is not None:
            step.look.take(roots)

    def _backward_ends(self, failed: bool) -> None:
        """It is over."""
        self._passes = max(self._passes - 1, 0)
        step = self._step
        if step is None or self._passes:
            return
        self._backward_failed = failed
        step.is_broken |= failed
        self._begin_phase(step, OPTIMIZER if self._is_optimizer else AFTER_BACKWARD)

    # ------------------------------------------------------------------ the optimizer

    def optimizer_begins(self) -> None:
        """The optimizer's step begins; a closure in it may run the model."""
        step = self._step
        if step is not None:
            step.is_broken |= self._is_optimizer  # an exception has ended the one before
            if step.look is not None:
                step.look.memory.begin_optimizer()
            self._begin_phase(step, OPTIMIZER)
        self._is_optimizer = True

    def optimizer_ends(self) -> None:
        """It is done, and with it the step, if there was one."""
        self._is_optimizer = False
        step, self._step = self._step, None
        if step is None:
            return
        try:
            self._listener.step_ends(step.is_broken or step.label != OPTIMIZER)
        finally:
            if step.look is not None:
                step.look.close()

    def _begin_phase(self, step: _Step, label: str) -> None:
        step.label = label
        self._listener.phase_begins(label)
        if step.look is not None:
            step.look.memory.begin_phase(label)


def _hook_gradient(tensor: torch.Tensor, node: Any, hook: Callable[[Any], None]) -> None:
    """Call a function with the gradient of a tensor, before the node that made it runs.

    As ``Tensor.register_hook`` does, which takes several times as long: it makes an ordered
    dictionary, and a handle to take the hook away. The tensor keeps the hooks that it has.
    """
    others = tensor._backward_hooks
    tensor._backward_hooks = {0: hook}
    node._register_hook_dict(tensor)  # the node holds the dictionary from now on
    tensor._backward_hooks = others


def _reached(reference: weakref.ref[Follower], number: int, label: str, gradient: Any) -> None:
    """The backward pass of a step has come to a node that a phase begins with.

    The gradient is None where the node goes on with those of its other results only.
    """
    follower = reference()
    step = None if follower is None else follower._step
    if follower is None or step is None or step.number != number:
        return
    is_new = step.label != label
    if not is_new and step.look is None:
        return
    try:
        if is_new:
            if step.look is not None:
                step.look.hand_on(gradient, "gradient")
            follower._begin_phase(step, label)
        if step.look is not None:
            step.look.take(gradient)
    except Exception as error:
        follower._guard.on_error(error)
