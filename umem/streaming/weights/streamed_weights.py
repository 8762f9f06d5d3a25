"""Streams weights through a few device buffers, ahead of the forward and the backward pass.

A block's weights are staged when its call begins, or before: each call also fetches what is
expected next. Which blocks follow a block is learned from the order in which they came before. At
first that is the order of the model, round to the first block again, or through the backward pass
in reverse.

A weight keeps its object and its home; only its memory is another one while its block works. The
other way would be to keep the address and change the memory behind it. That takes most of
a copy's time again, and any access meanwhile would end the process (docs/streamed-weights.md).
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial

import torch
from torch import nn

from umem.core.classes import TensorClass
from umem.offloading import ActivationStore
from umem.runtime.guard import Guard
from umem.runtime.model_parts import tensors_in
from umem.runtime.torch_hooks.backward import nodes_of
from umem.runtime.torch_hooks.clock import Hearing, Listener, Order
from umem.runtime.torch_hooks.function_attributes import let_go_of_lent
from umem.runtime.torch_hooks.modules import HookErrors, Undo
from umem.runtime.torch_hooks.passes import Pass
from umem.runtime.torch_hooks.work_starts import after_backward
from umem.streaming.stage.homes import StateMemory
from umem.streaming.stage.lanes import Lanes, Moment
from umem.streaming.stage.ring import Ring, Slot
from umem.streaming.weights.expert_cache import ExpertUse
from umem.streaming.weights.experts import Experts
from umem.streaming.weights.staged_weights import LentSlot, StagedWeights

__all__ = ["StreamedBlock", "StreamedWeights", "WeightCounts", "forget_copies"]

_every: weakref.WeakSet[StreamedWeights] = weakref.WeakSet()


def forget_copies() -> None:
    """Have weights copied anew before each next use: the program may change them past torch."""
    for weights in list(_every):
        weights.forget_copies()


@dataclass
class WeightCounts:
    """What became of the uses of streamed weights so far."""

    fetched: int = 0
    """Copies to the device, of one block each."""
    late: int = 0
    """Those of them that a pass had to wait for from their start on."""
    reused: int = 0
    """Uses of a copy that an earlier use had left in its buffer."""
    most_buffers: int = 0
    """Staging buffers at a time."""
    in_place: int = 0
    """Calls of blocks whose weights were used in host memory for want of a buffer."""
    experts_in_place: int = 0
    """Calls of blocks with few tokens, whose tables of experts stayed in host memory: only chosen
    experts cross the link, if they are not in the cache."""


@dataclass(frozen=True)
class StreamedBlock:
    """A block, and those of its weights that are staged for each use."""

    name: str
    module: nn.Module
    tensors: Sequence[torch.Tensor]
    """With homes in host memory."""
    experts: Experts = field(default_factory=Experts)
    """Those of the block, streamed or not."""
    cached_share: float = 0.0
    """Of the experts of each table among `tensors`, those that the device has room for."""


class _Kind(IntEnum):
    """What a use of a block's weights is for."""

    INFERENCE = 0
    """A forward pass without gradients."""
    FORWARD = 1
    BACKWARD = 2
    FEW_TOKENS = 3
    """A forward pass without gradients of so few tokens that tables of experts are used at home."""

    @property
    def has_experts(self) -> bool:
        """Whether tables of experts are staged."""
        return self is not _Kind.FEW_TOKENS


_Event = tuple[_Kind, StagedWeights]
"""A pass of a block."""


@dataclass(eq=False)
class _Call:
    """A call of a block."""

    open_groups: int
    """Of the store, around the call."""
    used: StagedWeights | None = None
    """None for a call on homes, and for one within a backward pass."""
    inputs: Sequence[object] = ()
    """The nodes of the graph that have made its arguments, if the block has quantised weights."""
    makes_graph: bool = False


class StreamedWeights(Listener):
    """What stages the weights of blocks for their calls.

    Parameters
    ----------
    lanes
        Where copies run.
    memory
        Homes and buffers.
    store
        Sees what autograd saves, beside what else uses it.
    on_error
        Called with an exception of a hook, which does not reach the program.
    """

    def __init__(
        self,
        lanes: Lanes,
        memory: StateMemory,
        store: ActivationStore,
        on_error: Callable[[Exception], None],
    ) -> None:
        self.updates: list[Callable[[str], Moment]] = []
        """For each optimizer of the model, what returns the moment after its update of a block that
        is under way; None if there is none."""
        self.was_captured = False
        """Whether a call was captured into a CUDA graph, so that homes have to stay."""
        self._counts = WeightCounts()
        self._lanes = lanes
        self._memory = memory
        self._store = store
        self._errors = HookErrors(on_error)
        self._ring = Ring(memory, lanes, LentSlot)
        self._lock = self._ring.lock
        self._staged: list[StagedWeights] = []
        """In forward order."""
        self._named: dict[str, StagedWeights] = {}
        self._extra: dict[_Event, int] = {}
        """Further slots that may exist in a pass."""
        self._few_rows = 0
        """Calls of blocks with at most so many rows are of few tokens. It is the same for all
        blocks: what follows one without experts depends on it too."""
        self._passes: Counter[_Kind] = Counter()
        self._successors: dict[_Event, _Event] = {}
        self._expected: dict[tuple[_Event, int], list[_Event]] = {}
        """By a pass and a number of blocks, those with weights to copy that are expected behind it,
        by the present successors."""
        self._last: _Event | None = None
        self._in_backward: StagedWeights | None = None
        """The block that the backward pass is in."""
        self._running = threading.local()
        self._hearing: Hearing | None = None
        self._undo: list[Undo] = []
        _every.add(self)

    # ------------------------------------------------------------------ plans

    @property
    def counts(self) -> WeightCounts:
        """Counts so far."""
        return replace(self._counts)

    @property
    def streamed_bytes(self) -> int:
        """Weights that are staged for each use."""
        return sum(it.size_bytes for it in self._staged)

    @property
    def buffer_bytes(self) -> int:
        """The buffers on the device."""
        return self._ring.slots_bytes

    @property
    def cache_bytes(self) -> int:
        """The experts that are kept on the device."""
        return sum(it.cache.size_bytes for it in self._staged if it.cache is not None)

    def expert_use(self) -> ExpertUse:
        """How often chosen experts were in the present cache. The device is waited for."""
        return ExpertUse.total(it.cache.counts for it in self._staged if it.cache is not None)

    @property
    def few_and_many(self) -> tuple[int, int]:
        """Number of passes of few tokens and of others, since these blocks are streamed."""
        few = self._passes[_Kind.FEW_TOKENS]
        return few, self._passes.total() - few - self._passes[_Kind.BACKWARD]

    @property
    def is_in_use(self) -> bool:
        """Whether any block works on staged weights now."""
        return any(it.users for it in self._staged)

    def set_blocks(
        self,
        blocks: Sequence[StreamedBlock],
        slots: int,
        classes: Mapping[str, TensorClass] | None = None,
        extra: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """Stage the weights of these blocks, in forward order, in place of those before.

        Parameters
        ----------
        blocks
            The blocks.
        slots
            Number of buffers, each as large as the largest block's weights.
        classes
            What the copies of a block count as; by default weights.
        extra
            Further buffers that may exist in the forward and in the backward pass of a block.

        Not while a block works on staged weights.
        """
        with self._lock:
            self._clear()
            kinds = classes or {}
            self._staged = [
                StagedWeights(
                    it.name,
                    it.tensors,
                    self._lanes,
                    self._memory,
                    self._lock,
                    kinds.get(it.name, TensorClass.WEIGHTS),
                    it.experts,
                )
                for it in blocks
            ]
            self._named = {it.name: it for it in self._staged}
            self._few_rows = min(filter(None, (it.experts.few_rows for it in blocks)), default=0)
            self._extra = {
                (kind, it): count
                for it in self._staged
                for found in [(extra or {}).get(it.name)]
                if found is not None
                for kind, count in zip((_Kind.FORWARD, _Kind.BACKWARD), found, strict=True)
            }
            slot_bytes = max((it.size_bytes for it in self._staged), default=0)
            if not slot_bytes:
                return
            # Without room for all of them, fewer blocks are fetched ahead.
            self._ring.set_capacity(slots)
            self._ring.fill(slot_bytes)
            for staged, block in zip(self._staged, blocks, strict=True):
                staged.make_cache(block.cached_share)
            self._hearing = Hearing(
                self,
                Order.STAGED_WEIGHTS,
                self._errors.on_error,
                None,
                {it.name: it.module for it in blocks},
            )
            # What is global holds no strong reference: this object goes with the blocks.
            listener = after_backward(partial(_backward_ends, weakref.ref(self)))
            guards = [
                guard for it in self._staged for guard in (it.guard, it.cache) if guard is not None
            ]
            end = weakref.finalize(self, _end, listener, self._lanes, self._ring.slots, guards)
            end.atexit = False
            self._undo.append(end)

    def close(self) -> None:
        """Remove the hooks. Weights stay at home."""
        self.set_blocks((), 0)

    def step_begins(self) -> None:
        """An optimizer's step is about to change weights: forget copies of those that it may."""
        if not self._staged and self._in_backward is None:
            return
        with self._lock:
            self.end_backward()
            for staged in self._staged:
                if any(it.requires_grad for it in staged.tensors):
                    staged.drop()
                    if staged.cache is not None:
                        staged.cache.forget()

    def forget_copies(self) -> None:
        """Forget all copies that are not in use."""
        with self._lock:
            for staged in self._staged:
                staged.drop()
                if staged.cache is not None:
                    staged.cache.forget()

    def settled(self, name: str, is_early: bool) -> None:
        """A block's update has been waited for, and its guard is gone.

        Early, because the program uses its weights and may change them.
        """
        with self._lock:
            for it in self._staged:
                if it.name == name and not it.users and it.is_away:
                    if is_early:
                        it.drop()
                    else:
                        it.hold()

    def drop_waiting(self) -> bool:
        """Forget copies that wait for their use; returns whether there were any."""
        with self._lock:
            waiting = [it for it in self._staged if it.guard.is_on]
            for staged in waiting:
                staged.drop()
            return bool(waiting)

    def _clear(self) -> None:
        if self._hearing is not None:
            self._hearing.close()
            self._hearing = None
        for undo in self._undo:
            undo()
        self._undo.clear()
        self.end_backward()
        for staged in self._staged:
            for user in list(staged.users):  # behind an error, in the middle of a call
                staged.end_use(user)
            staged.drop()
            if staged.cache is not None:
                staged.cache.release()
        for slot in self._ring.slots:
            slot.let_go(self._lanes)
        self._ring.slots, self._staged, self._named = [], [], {}
        self._passes.clear()
        self._successors.clear()
        self._expected.clear()
        self._last = None

    # ------------------------------------------------------------------ passes

    @property
    def _calls(self) -> list[_Call]:
        """The calls of blocks that this thread is in."""
        calls: list[_Call] = vars(self._running).setdefault("calls", [])
        return calls

    def begin_call(self) -> None:
        """The model is called: an interrupt may have ended the call before without its hooks."""
        calls = self._calls
        while calls:
            self._end_call(calls[-1])
            calls.pop()
        if self._hearing is not None:
            self._hearing.hook_compiled()

    def block_begins(self, name: str, now: Pass, args: object, kwargs: object) -> None:
        """Stage the block's weights."""
        staged = self._named[name]
        call = _Call(self._store.open_groups)
        self._calls.append(call)
        if self._lanes.is_capturing():
            # The graph replays with what it was captured with: homes never change their address.
            self.was_captured = True
        elif now.is_transform:
            pass  # weights are wrapped there; they are used at home
        elif now.is_second:
            self._enter_backward(staged)
        else:
            if self._in_backward is not None:
                self.end_backward()
            call.makes_graph = now.has_gradients
            call.used = staged  # an interrupt may come at any time
            if call.makes_graph and staged.has_subclasses:
                call.inputs = nodes_of(tensors_in((args, kwargs)))
            is_used = self._use(self._kind_of_call(now, (args, kwargs)), staged, call)
            if is_used and call.makes_graph:
                # What autograd saves of the weights is found again by name.
                self._store.open_group(object(), ())

    def _kind_of_call(self, now: Pass, arguments: object) -> _Kind:
        if now.has_gradients:
            return _Kind.FORWARD
        if self._few_rows:
            rows = (it.shape[:-1].numel() for it in tensors_in(arguments) if it.is_floating_point())
            if 0 < next(rows, 0) <= self._few_rows:
                return _Kind.FEW_TOKENS
        return _Kind.INFERENCE

    def block_ends(self, name: str, _now: Pass, output: object, *, failed: bool) -> None:
        """End the use of its weights."""
        calls = self._calls
        if not calls:
            return
        call, staged = calls[-1], self._named[name]
        try:
            if call.makes_graph and not failed and staged.has_subclasses and staged.have_views():
                let_go_of_lent(nodes_of(tensors_in(output)), call.inputs)
        finally:
            self._end_call(call)
            calls.pop()

    def _end_call(self, call: _Call) -> None:
        # Its own group, if it came so far as to open one; and what an interrupt has left of others.
        self._store.close_groups(max(call.open_groups, self._store.open_groups - 1))
        if call.used is not None:
            self._end_use(call.used, call)

    def block_reached(self, name: str) -> None:
        """Stage the block's weights for its backward pass."""
        if not self._lanes.is_capturing():
            self._enter_backward(self._named[name])

    def _enter_backward(self, staged: StagedWeights) -> None:
        with self._lock:
            if self._in_backward is staged or not self._is_known(staged):
                return
            self.end_backward()
            self._in_backward = staged
            if not self._use(_Kind.BACKWARD, staged, self):
                self._in_backward = None

    def backward_ends(self) -> None:
        """A backward pass of the process has ended. Nothing is raised."""
        self._errors(self.end_backward)()

    def end_backward(self) -> None:
        """The backward pass has left the block that it was in."""
        with self._lock:
            if self._in_backward is not None:
                self._end_use(self._in_backward, self)
                self._in_backward = None

    # ------------------------------------------------------------------ staging

    def _use(self, kind: _Kind, staged: StagedWeights, user: object) -> bool:
        """Begin a use of a block's weights; returns False for want of a buffer."""
        with self._lock:
            event = kind, staged
            if staged is self._staged[0]:
                self._passes[kind] += 1
            self._follows(event)
            with_experts = kind.has_experts
            most = self._most_buffers(event)
            if not staged.users and staged.leave_held():
                self._expected.clear()
            if staged.users or staged.has_current_copy(with_experts=with_experts):
                self._counts.reused += staged.was_used
            else:
                staged.drop()
                if staged.needs_copy(with_experts=with_experts):
                    slot = self._ring.take(self._wanted(event, most), takes_wanted=True)
                    if slot is None:
                        self._counts.in_place += 1
                        return False
                    self._fetch(staged, slot, kind)
                    self._counts.late += 1
            staged.is_saved = kind is _Kind.BACKWARD and torch.is_grad_enabled()
            staged.begin_use(user)
            if not (with_experts or staged.is_whole):
                self._counts.experts_in_place += 1
            if staged.is_away:
                self._fetch_ahead(event, most)
            most_slots = max(self._counts.most_buffers, len(self._ring.slots))
            self._counts.most_buffers = most_slots
            return True

    def _follows(self, event: _Event) -> None:
        """Note that a pass follows the last one."""
        last, self._last = self._last, event
        # After a token the next token is expected, also if a prompt has come last time.
        is_prompt = event[0] is _Kind.INFERENCE
        if last is None or (is_prompt and last[0] is _Kind.FEW_TOKENS):
            return
        if self._successors.get(last) != event:
            self._expected.clear()  # first: an interrupt must not leave what is no more expected
            self._successors[last] = event

    def _end_use(self, staged: StagedWeights, user: object) -> None:
        with self._lock:
            if user not in staged.users:  # it had no buffer, or an error has ended it
                return
            ended = staged.end_use(user)
            if not staged.is_away:
                return  # none is free that was not before
            if self._last is not None and self._is_known(staged):
                # What comes now must have room in the next pass too.
                following = self._next(self._last)
                most = min(map(self._most_buffers, (self._last, following)))
                self._fetch_ahead(self._last, most, ended)
            if not staged.users and staged.is_away:
                staged.hold()

    def _fetch_ahead(self, event: _Event, most: int, asked: Moment = None) -> None:
        """Fetch what is expected next, as far as there are buffers.

        `asked` is the moment after the stream's last work, if there is one.
        """
        wanted = self._wanted(event, most)
        self._ring.shrink(most, wanted)
        for staged, kind in wanted.items():
            with_experts = kind.has_experts
            if staged.users or staged.has_copy(with_experts=with_experts):
                continue
            if not staged.has_alias(with_experts=with_experts):
                staged.drop()
                slot = self._ring.take(wanted) or self._further_slot(most)
                if slot is None:
                    return
                self._fetch(staged, slot, kind, asked)

    def _is_known(self, staged: StagedWeights) -> bool:
        return self._named.get(staged.name) is staged

    def _most_buffers(self, event: _Event) -> int:
        """Number of buffers that may exist in a block's pass."""
        return self._ring.capacity + self._extra.get(event, 0)

    def _further_slot(self, most: int) -> Slot | None:
        if len(self._ring.slots) >= most:
            return None
        slot = self._ring.add_slot()
        if slot is None:
            self._extra = {}  # the plan was wrong; to ask again costs page-locked memory
        return slot

    def _fetch(self, staged: StagedWeights, slot: Slot, kind: _Kind, asked: Moment = None) -> None:
        """Copy a block's weights behind what the program has done to their homes so far.

        That is `asked`, if this stream's last work is marked already; and updates under way.
        """
        updated = [update_of(staged.name) for update_of in self.updates]
        staged.with_experts = kind.has_experts
        staged.bind(slot)
        after = [self._lanes.mark() if asked is None else asked, *filter(None, updated)]
        self._ring.fetch(staged, after)
        if not staged.needs_copy(with_experts=kind.has_experts):
            self._expected.clear()  # the program has given all of it other memory
        self._counts.fetched += 1

    def _wanted(self, event: _Event, most: int) -> dict[StagedWeights, _Kind]:
        """Blocks in use, and those expected next, with their passes: as many as buffers may be."""
        kind = event[0]
        found = {
            holder: kind
            for slot in self._ring.slots
            if isinstance(holder := slot.holder, StagedWeights) and holder.users
        }
        expected = self._expected.get((event, most))
        if expected is None:
            expected = self._expected[event, most] = self._find_expected(event, most)
        for kind, staged in expected:
            if len(found) >= most:
                break
            found.setdefault(staged, kind)
        return found

    def _find_expected(self, event: _Event, most: int) -> list[_Event]:
        """The passes of so many blocks, the first ones behind a pass that have anything to copy."""
        found: dict[StagedWeights, _Event] = {}
        passed = set()
        while len(found) < most and event not in passed:
            passed.add(event)
            event = kind, staged = self._next(event)
            if staged not in found and staged.needs_copy(with_experts=kind.has_experts):
                found[staged] = event
        return list(found.values())

    def _next(self, event: _Event) -> _Event:
        """The pass that has followed a pass before; at first in the order of the model."""
        known = self._successors.get(event)
        if known is not None:
            return known
        kind, staged = event
        every, number = self._staged, self._staged.index(staged)
        if kind is _Kind.BACKWARD:
            return (kind, every[number - 1]) if number else (_Kind.FORWARD, every[0])
        if staged is not every[-1]:
            return kind, every[number + 1]
        return (_Kind.BACKWARD, staged) if kind is _Kind.FORWARD else (kind, every[0])


def _backward_ends(reference: weakref.ref[StreamedWeights]) -> None:
    weights = reference()
    if weights is not None:
        weights.backward_ends()


def _end(
    listener: Undo,
    lanes: Lanes,
    slots: Sequence[Slot],
    guards: Sequence[Guard],
) -> None:
    listener()
    for slot in slots:
        slot.let_go(lanes)  # copies that were fetched ahead may be under way
    # A guard and the tensors that it holds keep each other alive.
    for guard in guards:
        guard.release()
