"""Copies gradients of chosen units to page-locked host memory as the backward pass makes them.

A gradient is complete when autograd has added it. Then its copy to the host starts, beside the rest
of the backward pass. A few units later the program's stream waits for the copy, and the gradient's
tensor, the same object, has the host's memory from then on: the device's is free. Clipping is put
off (``clipped_gradients.py``).

For a later batch a gradient comes back in the same way, some units before autograd adds to it, and
leaves again, if a plan has room for that; otherwise the batch is added to it in place, over the
link. What the host updates may leave in the last batch only. Some stay behind the last batch or
come back, where activations have made room, for clipping and the update. What has no room is used
on the host.

From a copy's start until its end a guard sees each use of the gradient by Python, and the copy is
waited for first. An addition by autograd itself changes the tensor's version: then the copy is of
no use, and the gradient stays where it is.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from umem.core.classes import TensorClass
from umem.runtime.guard import Guard, are_plain
from umem.runtime.held_memory import note_export
from umem.runtime.known_tensors import hook_accumulation
from umem.runtime.unguarded import Unguarded
from umem.streaming.gradients.clipped_gradients import ClippedGradients, GradientNorm
from umem.streaming.plan.step_timing import GRADIENTS_AHEAD, UNITS_WITH_GRADIENTS
from umem.streaming.stage.homes import StateMemory
from umem.streaming.stage.lanes import Copy, Lane, Lanes, Moment
from umem.torch_compat import InferenceMode, version_counter

__all__ = ["CopiedGradients"]

_Parameters = Mapping[str, Sequence[torch.Tensor]]


@dataclass(frozen=True)
class _Gradient:
    tensor: torch.Tensor
    version: int
    """When the copy started."""
    copy: torch.Tensor
    """Its memory when the copy has ended."""
    norm: GradientNorm | None = None
    """Of one that leaves, where the program will ask for it."""


@dataclass(eq=False)
class _Move:
    """The gradients of a unit on their way to the host, or back."""

    gradients: list[_Gradient]
    is_out: bool
    """To the host."""
    asked: Moment
    """When the copies started, on the stream that owns the gradients' memory."""
    stream: int
    """The key of that stream."""
    guard: Guard = field(init=False)
    moment: Moment = None
    """When the copies end; None if an interrupt has kept them from being known."""
    units_behind: int = 0
    """Units whose gradients have begun to arrive since."""


@dataclass
class _Arriving:
    """The gradients of the unit that the backward pass is in."""

    name: str
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    """By ``id``: autograd may add to one several times."""


class CopiedGradients:
    """Hooks on parameters that copy their gradients.

    Parameters
    ----------
    parameters
        Returns the optimizer's parameters by unit, in forward order.
    lanes
        Where the copies run.
    memory
        The device's memory, and homes.
    clipped
        Holds gradients that are on the host.
    on_error
        Called with an exception of a hook, which does not reach the training.
    """

    def __init__(
        self,
        parameters: Callable[[], _Parameters],
        lanes: Lanes,
        memory: StateMemory,
        clipped: ClippedGradients,
        on_error: Callable[[Exception], None],
    ) -> None:
        self._parameters = parameters
        self._lanes = lanes
        self._memory = memory
        self._clipped = clipped
        self._on_error = on_error
        self._copied: frozenset[str] = frozenset()
        self._returning: dict[str, list[str]] = {}
        """Units that come back, by the unit at whose gradients their copies begin."""
        self._ahead: dict[str | None, list[str]] = {}
        """The same for a later batch; None for the end of the forward pass."""
        self._final: frozenset[str] = frozenset()
        self._batches = 1
        self._begun: Counter[str] = Counter()
        """How often each unit's gradients have begun to arrive since the last step."""
        self._lock = threading.RLock()
        self._arriving = _Arriving("")
        self._moves: deque[_Move] = deque()
        self._handles: list[RemovableHandle] = []

    @property
    def copied(self) -> frozenset[str]:
        """Units whose gradients are copied."""
        return self._copied

    @property
    def clipped(self) -> ClippedGradients:
        """Holds those that are on the host."""
        return self._clipped

    @property
    def returning(self) -> frozenset[str]:
        """Those whose gradients come back before the step."""
        return frozenset(name for some in self._returning.values() for name in some)

    def sizes(self) -> dict[str, int]:
        """Bytes of the gradients that can be copied, by unit in forward order."""
        return {
            name: sum(it.nbytes for it in some if it.requires_grad and self._memory.is_movable(it))
            for name, some in self._parameters().items()
        }

    def set_plan(
        self,
        copied: Collection[str],
        returning: Mapping[str, str] | None = None,
        batches: int = 1,
        final: Collection[str] = (),
        *,
        adds_at_home: bool = False,
    ) -> None:
        """Choose the units whose gradients are copied, from the next backward pass on.

        Parameters
        ----------
        copied
            Units whose gradients leave.
        returning
            For those that come back before the step, the unit in whose backward pass the copy back
            begins. With several batches one that is named for itself stays.
        batches
            Backward passes in a step, in the last of which they come back.
        final
            Units that leave in the last one only.
        adds_at_home
            Whether autograd adds to gradients where they are: none comes back for that.
        """
        with self._lock:
            self.settle()
            self._remove_hooks()
            self._copied, self._batches = frozenset(copied), batches
            self._final = frozenset(final)
            self._returning, self._ahead = {}, {}
            for name, trigger in (returning or {}).items():
                self._returning.setdefault(trigger, []).append(name)
            self._use_clipped()  # parameters may have no hooks any more
            every = self._parameters()
            names = [name for name, some in every.items() if any(map(_has_gradient, some))]
            for place, name in reversed(list(enumerate(names))):
                at = place + GRADIENTS_AHEAD
                if name in self._copied and not adds_at_home:
                    begin = names[at] if at < len(names) else None
                    self._ahead.setdefault(begin, []).append(name)
            told = self._copied | self._returning.keys() | self._ahead.keys()
            for place, name in enumerate(names):
                # The units that the backward pass comes to behind a copied one tell the time.
                near = names[place : place + UNITS_WITH_GRADIENTS + 1]
                if not told.isdisjoint(near):
                    self._add_hooks(name, [it for it in every[name] if _has_gradient(it)])

    def _add_hooks(self, name: str, parameters: Sequence[torch.Tensor]) -> None:
        # Hooks of tensors must hold no strong reference to what holds the tensors: the garbage
        # collector does not see them.
        arrive = functools.partial(_arrive, weakref.ref(self), name)
        for it in parameters:
            self._handles.append(hook_accumulation(it, arrive))

    def settle(self) -> None:
        """Let the current stream wait for copies under way: their gradients have moved now."""
        with self._lock:
            self._send()
            self._end_until(None)

    def _end_until(self, last: weakref.ref[_Move] | None) -> None:
        """End the copies under way up to these, or all: something is about to use a gradient."""
        with self._lock:
            while self._moves:
                move = self._moves.popleft()
                self._end(move)
                if last is not None and move is last():
                    return

    def join(self) -> None:
        """Settle, and let each gradient have its value where it is."""
        with self._lock:
            self.settle()
            self._use_clipped()

    def _use_clipped(self) -> None:
        for gradient in (it.grad for some in self._parameters().values() for it in some):
            if gradient is not None and self._clipped.is_held(gradient):
                self._clipped.use(gradient)

    def step_begins(self) -> None:
        """Settle, and count batches anew."""
        with self._lock:
            self.settle()
            self._begun.clear()

    def forward_ends(self) -> None:
        """Begin to fetch the gradients that the backward pass adds to first."""
        with self._lock:
            try:
                for name in self._ahead.get(None, ()):
                    self._fetch(name)
            except Exception as error:
                self._on_error(error)

    def close(self) -> None:
        """Remove the hooks; gradients stay where they are."""
        self.set_plan(())

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def arrive(self, name: str, parameter: torch.Tensor) -> None:
        """Note that autograd has added to a gradient."""
        with self._lock:
            try:
                if name != self._arriving.name:
                    self._send()
                    self._arriving = _Arriving(name)
                    self._unit_begins(name)
                gradient = parameter.grad
                if name in self._copied and gradient is not None:
                    if self._lanes.is_capturing():
                        note_export(gradient)  # replays write to this address
                    self._arriving.gradients[id(gradient)] = gradient
            except Exception as error:
                self._on_error(error)

    def _can_move(self, gradient: torch.Tensor) -> bool:
        return (
            are_plain((gradient,))
            and not gradient.requires_grad
            and not self._lanes.is_capturing()
            and not torch.compiler.is_compiling()
            and self._memory.is_movable(gradient)  # it has no alias
        )

    def _unit_begins(self, name: str) -> None:
        """End what has had the time of some units to move, and begin to fetch what comes back."""
        for move in self._moves:
            move.units_behind += 1
        while self._moves and self._moves[0].units_behind >= UNITS_WITH_GRADIENTS:
            self._end(self._moves.popleft())
        self._begun[name] += 1
        for ahead in self._ahead.get(name, ()):
            self._fetch(ahead)
        if self._begun[name] == self._batches:
            for returning in self._returning.get(name, ()):
                self._fetch(returning)

    def _send(self) -> None:
        """Start the copies of what has arrived."""
        arrived = self._arriving
        if not arrived.name and not arrived.gradients:
            return  # nothing has arrived since the last call
        self._arriving = _Arriving("")
        begun = self._begun[arrived.name]
        is_last = begun == self._batches
        if arrived.name in self._final and begun < self._batches:
            return
        if is_last and begun > 1 and arrived.name in self._returning.get(arrived.name, ()):
            return
        leaving: list[torch.Tensor] = []
        for it in filter(self._can_move, arrived.gradients.values()):
            if not self._memory.is_home(it):
                leaving.append(it)
            elif begun >= self._batches:  # autograd has added to it there
                self._clipped.keep_here(it)
        homes = []
        for it in leaving:
            home = self._memory.new_home(it, TensorClass.GRADIENTS)
            if home is None:
                self.set_plan(())  # the host has no more, and to ask again takes time
                return
            homes.append(home)
        # Later batches change them.
        norms = self._clipped.norms(leaving) if is_last else [None] * len(leaving)
        self._move(
            Lane.COPY_OUT,
            [
                _Gradient(it, version_counter(it), home, norm)
                for it, home, norm in zip(leaving, homes, norms, strict=True)
            ],
        )

    def _fetch(self, name: str) -> None:
        """Start the copies of a unit's gradients back to the device, as far as it has room."""
        found = []
        for gradient in (it.grad for it in self._parameters().get(name, ())):
            if gradient is None:
                continue
            if self._clipped.is_held(gradient):
                self._clipped.use(gradient)
            if not self._can_move(gradient):
                continue
            if self._memory.is_home(gradient):
                copy = self._memory.new_on_device(gradient, TensorClass.GRADIENTS)
                if copy is None:
                    break
                found.append(_Gradient(gradient, version_counter(gradient), copy))
        self._move(Lane.GRADIENTS_IN, found)

    def _move(self, lane: Lane, gradients: list[_Gradient]) -> None:
        if not gradients:
            return
        asked = self._lanes.mark()
        parts = [Copy(it.copy.data_ptr(), it.tensor.data_ptr(), it.copy.nbytes) for it in gradients]

        def copy() -> None:
            self._lanes.copy(lane, parts, TensorClass.GRADIENTS)

        move = _Move(gradients, lane is Lane.COPY_OUT, asked, self._lanes.stream_key())
        # No cycle: what a move keeps would have an alias until the garbage is collected.
        move.guard = Guard(functools.partial(self._end_until, weakref.ref(move)))
        self._moves.append(move)  # first: it keeps what is copied to, also behind an interrupt
        move.guard.hold(it.tensor for it in gradients)
        move.moment = self._lanes.run(lane, copy, [asked])

    def _end(self, move: _Move) -> None:
        """Let the stream wait for a unit's copies, and its gradients have the copies' memory."""
        is_known = move.moment is not None
        lane = Lane.COPY_OUT if move.is_out else Lane.GRADIENTS_IN
        moment = move.moment if is_known else self._lanes.run(lane, _nothing)
        self._lanes.wait(moment)
        self._lanes.wait_on_stream_of(move.asked, moment)
        move.guard.release()
        if not is_known:
            return
        with Unguarded(), InferenceMode(torch.is_inference_mode_enabled()):
            torch.set_grad_enabled(False)
            for it in move.gradients:
                tensor: Any = it.tensor
                if version_counter(tensor) == it.version:
                    tensor.data = it.copy
                    if move.is_out and are_plain((tensor,)):
                        moments = move.asked, move.moment
                        self._clipped.keep(tensor, it.norm, *moments, move.stream)


def _nothing() -> None:
    pass


def _has_gradient(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad and parameter.is_leaf


def _arrive(reference: weakref.ref[CopiedGradients], name: str, parameter: torch.Tensor) -> None:
    gradients = reference()
    if gradients is not None:
        gradients.arrive(name, parameter)
