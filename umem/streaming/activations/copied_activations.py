"""Copies what chosen blocks save for the backward pass to the host, and back ahead of its use.

Forward, the end of a block starts the copy of what it saved. Before a later block, which the plan
names because the memory is needed there, the device's memory is let go: from there on the program's
stream waits until the copy is over. Backward, when the pass reaches a block, what the blocks ahead
of it saved starts to come back.

Where a block saves more than all others, what leaves together is a stretch of the pass instead.
It begins with the first call of a block, or where a measured pass was cut by bytes, and its
backward pass begins where the first tensor of it is used.

The copies have streams of their own instead of the optimizer step's lanes. A lane works in order:
behind a step, the copies of all state stand in it already, and an activation would leave only after
the last of them.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from umem.capture.live import NO_BLOCK, Block
from umem.offloading import ActivationStatistics, ActivationStore
from umem.offloading.store import Stored
from umem.runtime.model_parts import buffer_at, buffers_of, tensors_in
from umem.runtime.program_waits import program_waits
from umem.runtime.torch_hooks.backward import nodes_of
from umem.runtime.torch_hooks.clock import Hearing, Listener, Order
from umem.runtime.torch_hooks.memory_access import watch_data
from umem.runtime.torch_hooks.modules import HookErrors
from umem.runtime.torch_hooks.passes import Pass
from umem.runtime.torch_hooks.saved_tensors import is_any_lent
from umem.streaming.activations import program_checkpoints
from umem.streaming.activations.call_states import versions_of
from umem.streaming.activations.held_by_program import HeldByProgram, HeldBytes
from umem.streaming.activations.program_checkpoints import ProgramCheckpoint
from umem.streaming.activations.reachable import ReachableBeside
from umem.streaming.activations.recomputed import RecomputedCall, SecondRun, is_second_run
from umem.streaming.activations.remade_results import RemadeResults
from umem.streaming.activations.repeatable import (
    CallProof,
    WatchedCall,
    call_signature,
    drops_between_cells,
    is_plain,
    watch,
)
from umem.streaming.plan.stretches import Cuts, Save, block_of, find_cuts
from umem.torch_compat import compiled_call, version_counter

__all__ = ["CopiedActivations", "is_compiled"]

_NOTHING: Mapping[str, str | None] = MappingProxyType({})

_NO_CUTS: Mapping[int, str] = MappingProxyType({})

_MUCH_LONGER = 1.5
"""A pass that saves so many times as many tensors as the one by which it is cut is cut anew."""

_Part = tuple[object, range | None]
"""A group of the store, and ordinals in it; None for all."""

_Place = tuple[int, int]
"""Of a storage: the number of a unit's part, and its number in that."""


@dataclass(eq=False)
class _Stretch:
    """What leaves together: what is saved in a call of a block, or between two cuts."""

    name: str
    is_copied: bool
    left_before: str | None
    """The block before which the memory is let go; None for the end of the forward pass."""
    parts: list[_Part] = field(default_factory=list)
    """What was saved in the call, and by the model itself since the call before: such as the inputs
    that a checkpoint saves."""
    saved_bytes: int = 0
    """Bytes of it that no later call has saved too."""


@dataclass(eq=False)
class _Call(_Stretch):
    """A call of a block, which is a stretch of its own unless the pass is cut."""

    makes_graph: bool = True
    """Not where gradients are off, as in a reentrant checkpoint."""
    is_open: bool = False
    """Whether a group of the store is to be closed at its end."""
    has_group: bool = False
    """Whether the last part is what was saved in the call."""
    leaves_out: bool = False
    """Whether the program's checkpoints in it do nothing."""
    watched: WatchedCall | None = None
    """Proves that the call may run twice."""
    recomputed: RecomputedCall | None = None
    """Runs it again in the backward pass."""

    def abandon(self) -> None:
        """Let hooks on what is saved go, behind an exception or an interrupt."""
        if self.watched is not None:
            self.watched.abandon()
        if self.recomputed is not None:
            self.recomputed.end()
        self.watched = self.recomputed = None


class _Pass:
    """A forward pass, and the backward passes through its graph, which holds it."""

    def __init__(self, store: ActivationStore, fetch_ahead: int) -> None:
        self.calls: list[_Stretch] = []
        """Those that are over."""
        self.leaving: list[_Stretch] = []
        """Calls whose activations are being copied to the host."""
        self.stretch: _Stretch | None = None
        """The present one of a pass that is cut."""
        self.before_use: Callable[[], None] | None = None
        """Called before what the stretch saves is used."""
        self.entered: set[str] = set()
        """Blocks that were called."""
        self.counts: Counter[str] = Counter()
        """Tensors that were saved, by the block in whose calls."""
        self.model_key: object = None
        """The group of what the model saves between its blocks."""
        self.is_open = False
        """Whether it is to be closed with the next block."""
        self.taken = 0
        """How many tensors of this group belong to calls already."""
        self.at: int | None = None
        """The stretch in which the backward pass is."""
        self.groups: dict[object, tuple[str, int]] = {}
        """By group, the block in whose call it is and what its calls had saved before."""
        self.is_watched = True
        """Whether the backward pass tells when it reaches the last call."""
        self._store = store
        self._fetch_ahead = fetch_ahead

    def begin_stretch(self, stretch: _Stretch, before_use: Callable[[], None]) -> None:
        """Begin a stretch of a pass that is cut."""
        self.stretch, self.before_use = stretch, before_use

    def end_stretch(self) -> _Stretch | None:
        """End it; nothing of the pass refers to the pass any more."""
        stretch, self.stretch, self.before_use = self.stretch, None, None
        return stretch

    def take_between(self) -> list[_Part]:
        """What the model has saved since the last call of this method."""
        taken, self.taken = self.taken, self._store.saved_count(self.model_key)
        return [(self.model_key, range(taken, self.taken))] if self.taken > taken else []

    def send(self, call: _Stretch, stays: Collection[_Place]) -> None:
        """Start the copies to the host, but of what stays."""
        for number, (key, ordinals) in enumerate(call.parts):
            its = {place for part, place in stays if part == number}
            self._store.send(key, ordinals, its)
        self.leaving.append(call)

    def release(self, call: _Stretch) -> int:
        """Let go of the device's memory. Returns its bytes."""
        return sum(self._store.release(key, ordinals) for key, ordinals in call.parts)

    def watch(self, tensors: Iterable[torch.Tensor], errors: HookErrors) -> None:
        """Fetch what comes next when the backward pass reaches what has made these tensors."""
        last = len(self.calls) - 1
        nodes = nodes_of(tensors)
        self.is_watched = bool(nodes)
        first = max(0, last - self._fetch_ahead)
        if not any(call.is_copied for call in self.calls[first:]):
            return
        # The nodes hold this object, and it goes with the graph.
        reached = errors(partial(self._reached, last))
        for node in nodes:
            node.register_prehook(reached)

    def fetch(self, last: int) -> None:
        """Fetch a stretch, and those that come next."""
        for call in reversed(self.calls[max(0, last - self._fetch_ahead) : last + 1]):
            if call.is_copied:
                for key, ordinals in reversed(call.parts):
                    self._store.fetch(key, ordinals)

    def _reached(self, last: int, _gradients: object) -> None:
        # Only a retained graph has saved tensors of later blocks left. What a reentrant checkpoint
        # saves behind its block counts for the next one.
        for call in self.calls[last + 2 : last + 3]:
            if call.is_copied:
                self.release(call)
        self.fetch(last)


class _Running(threading.local):
    """The calls that run in a thread."""

    forward: _Pass | None = None
    call: _Call | None = None


class CopiedActivations(Listener):
    """What copies the activations of a model's blocks.

    Blocks with compiled modules keep what they save.

    Parameters
    ----------
    model
        The module that the training loop calls. Only a weak reference is kept.
    blocks
        Its blocks.
    store
        Makes the copies.
    on_error
        Called with an exception of a hook, which does not reach the training.
    may_recompute
        Whether blocks may be called again in the backward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Iterable[Block],
        store: ActivationStore,
        on_error: Callable[[Exception], None],
        *,
        may_recompute: bool = False,
    ) -> None:
        self.proofs: dict[str, CallProof] = {}
        """Of the blocks whose calls may run twice."""
        self.is_unusual = False
        """Whether this step is unlike later ones: some calls run twice, or cuts were found."""
        self.has_cut = False
        """Whether cuts were found in this step: later ones have other units."""
        self.stretch: str | None = None
        """The unit in which a pass that is cut is, forward or backward."""
        self.on_stretch: Callable[[], None] = _do_nothing
        """Called where a stretch begins that does not begin with a block."""
        self._cut_saves = 0
        """Tensors that were saved in the pass by which it is cut."""
        self._cuts: Cuts | None = None
        """None until a pass was measured; empty where blocks do as units."""
        self.saved_bytes: dict[str, int] = {}
        """Bytes that could leave, by block: the most before a backward pass while measuring."""
        self._shared: Mapping[str, Mapping[_Place, str]] = {}
        """By unit, what a later one saves, too: its bytes count for the last, which is named."""
        self._called_again: frozenset[str] = frozenset()
        """Units that are called several times in a pass."""
        self._staying: Mapping[str, Collection[_Place]] = {}
        """By unit, what is not copied with it: the later one stays."""
        self.held_bytes: HeldBytes = {}
        """Of these, what the program holds, in the last pass that was measured."""
        self._held: HeldByProgram | None = None
        """Of the present or the latest pass; None where nothing is measured."""
        self._unread: Counter[str] = Counter()
        """Those of all forward passes since the last backward pass."""
        self._model = weakref.ref(model)
        self._blocks = {it.name: it for it in blocks if not is_compiled(it.module)}
        self._store = store
        self._errors = HookErrors(on_error)
        self._copied: Mapping[str, str | None] = {}
        self._planned: frozenset[str] = frozenset()
        self._following: frozenset[str] = frozenset()
        """Units that stay, but for what later ones have saved, too, with which it leaves."""
        self.recomputed: frozenset[str] = frozenset()
        """Blocks whose calls run again in the backward pass."""
        self._left_out: frozenset[str] = frozenset()
        self._unconfirmed: dict[str, list[nn.Parameter]] = {}
        """Weights of proved calls in a measured step whose backward pass is to come."""
        self._names = weakref.WeakKeyDictionary({b.module: n for n, b in self._blocks.items()})
        self._unproved = set(self._blocks) if may_recompute else set()
        self._has_dropping_cells = any(map(drops_between_cells, model.modules()))
        """Their dropout begins anew behind each backward pass through the program's checkpoints."""
        self._fetch_ahead = 1
        self._is_measuring = False
        self._orders: set[tuple[str, ...]] = set()
        """Blocks in the order of their calls, of each kind of pass that was measured; an empty one
        where that does not tell what is saved ahead of which: of a reentrant checkpoint, behind its
        block."""
        self._hears_all = True
        """Whether hooks are on all blocks, and what is saved between two of them is always seen."""
        self._seen_behind: frozenset[str] = frozenset()
        """Blocks behind which it is seen otherwise; with `NO_BLOCK` where the pass begins, too."""
        self._with_buffers: list[weakref.ref[nn.Module]] = []
        """The modules that had large ones when the plan was set: to look at all takes long."""
        self._hearing: Hearing | None = None
        self._may_recompute = may_recompute
        self._second_runs: weakref.WeakSet[SecondRun] = weakref.WeakSet()
        """Those that backward passes may ask for."""
        self.remade: RemadeResults | None = None
        """Makes results again; None where nothing may run twice."""
        if may_recompute and not is_compiled(model):
            self.remade = RemadeResults(model, store, on_error)
        self._running = _Running()
        self._released_bytes = self._returned_bytes = 0
        if may_recompute:
            program_checkpoints.listen(self)

    @property
    def names(self) -> frozenset[str]:
        """Blocks whose activations can be copied."""
        return frozenset(self._blocks)

    @property
    def is_cut(self) -> bool:
        """Whether passes are cut by what they save, so that other units than blocks leave."""
        return bool(self._cuts)

    @property
    def statistics(self) -> ActivationStatistics:
        """Copies so far."""
        return self._store.statistics

    def set_plan(
        self,
        copied: Mapping[str, str | None],
        fetch_ahead: int,
        *,
        is_measuring: bool,
        recomputed: Mapping[str, str | None] = _NOTHING,
        left_out: Collection[str] = (),
    ) -> None:
        """Choose the blocks whose activations are copied, from the next forward pass on.

        Parameters
        ----------
        copied
            By name of a block, the block before whose forward pass its activations have left; None
            for the end of the forward pass.
        fetch_ahead
            Number of blocks before its backward pass at which a block's activations are fetched.
        is_measuring
            Whether to look at what other blocks save.
        recomputed
            Blocks, with proofs, whose calls run again in the backward pass. A call that is not like
            the proved one is copied: it leaves as in `copied`.
        left_out
            Blocks, with proofs, of which the program's checkpoints are left out.
        """
        self.recomputed, self._left_out = frozenset(recomputed), frozenset(left_out)
        leaving = {**recomputed, **copied}
        self._following = frozenset(
            name
            for name, later in self._shared.items()
            if not copied.keys().isdisjoint(later.values())
        ).difference(copied)
        self._staying = {
            name: {place for place, other in later.items() if other not in copied}
            for name, later in self._shared.items()
            if name not in self._called_again
        }
        units = {it for cuts in (self._cuts or {}).values() for it in cuts.values()}
        units |= self.names | ({NO_BLOCK} if units else set())
        self._copied = {name: before for name, before in leaving.items() if name in units}
        self._planned = frozenset(copied)
        self._fetch_ahead = fetch_ahead
        self._is_measuring = is_measuring
        if is_measuring:
            self.saved_bytes, self._unread, self._orders = {}, Counter(), set()
        self._stop_hearing()
        model = self._model()
        listens = self._copied or self._left_out or is_measuring or self._remakes
        watch_data(self, bool(self._may_recompute and listens))
        if listens and model is not None:
            self._store.keep(model.parameters(), permanent=True)
            self._with_buffers = [
                weakref.ref(it)
                for it in model.modules()
                if any(map(self._store.is_large, buffers_of(it, recurse=False)))
            ]
            heard = self._choose_heard()
            blocks = {name: it.module for name, it in self._blocks.items() if name in heard}
            self._hearing = Hearing(self, Order.ACTIVATIONS, self._errors.on_error, model, blocks)

    def _choose_heard(self) -> Collection[str]:
        """The blocks of which to hear: hooks on others would take the processor's time for nothing.

        Beside those with a part in the plan, that is the one before each, behind which the model
        saves what leaves with it, those from which its memory is fetched, and the last one: where
        the backward pass begins, it is reached.
        """
        is_unknown = not self._orders or () in self._orders
        self._hears_all = self._is_measuring or self._remakes or is_unknown or bool(self._cuts)
        if self._hears_all:
            return self.names
        leaving = self._copied.keys() | self._following
        ahead, behind = set[str](), set[str]()
        for order in self._orders:
            behind.add(order[-1])
            for place, name in enumerate(order):
                if name in leaving:
                    ahead.add(order[place - 1] if place else NO_BLOCK)
                    behind.update(order[place + 1 : place + 1 + self._fetch_ahead])
        self._seen_behind = frozenset(ahead)
        return {
            *(*leaving, *self._left_out, *ahead, *behind),
            *filter(None, self._copied.values()),
        }

    @property
    def _remakes(self) -> bool:
        return self.remade is not None and self.remade.is_on

    def data_is_taken(self, tensor: torch.Tensor) -> None:
        """A weight may be about to change without a count, as stock's backward pass would use it.

        What is to be computed again from it is computed now. Where that comes in a measured step,
        its blocks do not run again under a plan.
        """
        is_in_pass = self._running.forward is not None or is_second_run()
        if is_in_pass or not isinstance(tensor, nn.Parameter):
            return
        for name, parameters in list(self._unconfirmed.items()):
            if any(it is tensor for it in parameters):
                self.proofs.pop(name, None)
        # An error, as of memory, reaches the program: the backward pass would have other bits.
        for run in list(self._second_runs):
            if run.is_to_read(tensor):
                run.make_now()
        if self.remade is not None:
            self.remade.make_now_by(tensor)

    def begin_step(self) -> None:
        """Count what is away from now on; nothing is between steps."""
        self._released_bytes, self._returned_bytes = 0, self._store.statistics.bytes_in
        self.is_unusual = self.has_cut = False

    def away_bytes(self) -> int:
        """Bytes of activations that are on the host only."""
        back_bytes = self._store.statistics.bytes_in - self._returned_bytes
        held_bytes = 0 if self._held is None else self._held.released_bytes()
        return max(0, self._released_bytes - held_bytes - back_bytes)

    def let_go(self) -> None:
        """Give host memory back until the next copy."""
        self._store.trim()

    def close(self) -> None:
        """Copy nothing more and give host memory back; graphs that are alive keep working."""
        self._stop_hearing()
        watch_data(self, False)
        if self.remade is not None:
            self.remade.end()
        self._store.close()

    def _stop_hearing(self) -> None:
        self._unconfirmed.clear()
        if self._hearing is not None:
            self._hearing.close()
            self._hearing = None
        self.stretch = None
        self._forget_pass()

    def _forget_pass(self) -> None:
        """End what an interrupt has left, too: it ends a call without the hooks behind it."""
        running = self._running
        if running.call is not None:
            running.call.abandon()
        self._store.close_groups()
        running.forward = running.call = None

    def update_begins(self) -> bool:
        """An update is about to change weights of which a graph may still want results.

        What was to be computed again from the old weights is computed now. A program that goes
        backward through such graphs has nothing computed again from then on. Returns whether that
        is new.
        """
        if not self._may_recompute:
            return False
        for run in list(self._second_runs):
            run.make_now()
        if self.remade is not None:
            self.remade.make_now()
        self._store.updates += 1
        if not self._store.is_used_late:
            return False
        self._may_recompute = False
        self._unproved.clear()
        self.proofs.clear()
        if self.remade is not None:
            self.remade.end_for_good()
        return True

    def _second_run_is_late(self) -> None:
        self._store.is_used_late = True

    # ------------------------------------------------------------------ passes

    def pass_begins(self, now: Pass, args: object, kwargs: object) -> None:
        """Begin a forward pass."""
        if not now.is_forward:
            return
        running = self._running
        self._forget_pass()
        if not now.has_gradients:
            return
        owners = filter(None, (it() for it in self._with_buffers))
        buffers = (buffer for it in owners for buffer in buffers_of(it, recurse=False))
        self._store.keep([*buffers, *tensors_in((args, kwargs))])
        running.forward = forward = _Pass(self._store, self._fetch_ahead)
        self._held = HeldByProgram(self._store) if self._is_measuring else None
        if self._hears_all or NO_BLOCK in self._seen_behind:
            self._see_between(forward)
        if self._cuts:
            self._begin_stretch(forward, NO_BLOCK, NO_BLOCK in self._copied)

    def _see_no_more(self, forward: _Pass) -> None:
        """See what the model saves no more, where not all blocks are heard."""
        if forward.is_open:
            forward.is_open = False
            self._store.close_group()

    def _see_between(self, forward: _Pass) -> None:
        """See what the model saves, to its next block or, where all are heard, to the end."""
        key = object()
        forward.model_key, forward.taken, forward.is_open = key, 0, not self._hears_all
        self._open_group(forward, NO_BLOCK, key, moves=self._may_move(NO_BLOCK, NO_BLOCK))

    def _open_group(self, forward: _Pass, name: str, key: object, *, moves: bool = True) -> bool:
        """Open a group for what a block's call saves, or the model outside of blocks."""
        forward.groups[key] = name, forward.counts[name]
        cuts = None if self._cuts is None else self._cuts.get(name, _NO_CUTS)
        if not self._cuts or cuts is None:
            return self._store.open_group(key, moves=moves)

        def before_save() -> Callable[[], None] | None:
            count = forward.counts[name]
            forward.counts[name] += 1
            if count in cuts:
                self._cut(forward, name, count, key)
            return forward.before_use

        return self._store.open_group(key, before_save=before_save)

    # ------------------------------------------------------------------ a pass that is cut

    def _cut(self, forward: _Pass, block: str, count: int, key: object) -> None:
        """Begin a stretch with the next tensor of an open group."""
        try:
            assert self._cuts is not None
            name = self._cuts[block][count]
            self._begin_stretch(forward, name, name in self._copied)
            new = object()
            self._store.split_group(key, new, moves=self._may_move(block, name))
            forward.groups[new] = block, count
            if block == NO_BLOCK:
                forward.model_key, forward.taken = new, 0
            elif forward.stretch is not None:
                forward.stretch.parts.append((new, None))
            self.on_stretch()
        except Exception as error:  # not into the forward pass
            self._errors.on_error(error)

    def _may_move(self, block: str, stretch: str) -> bool:
        """Whether what a block's call, or the model, saves in a stretch may leave."""
        # What the model saves between blocks goes with the next one.
        is_between = block == NO_BLOCK and bool(self._blocks or not self._cuts)
        moves = self._is_measuring or stretch in self._copied or stretch in self._following
        return is_between or moves

    def _begin_stretch(self, forward: _Pass, name: str, is_copied: bool) -> None:
        self._end_stretch(forward)
        self._release(forward, name)
        stretch = _Stretch(name, is_copied, self._copied.get(name))
        before_use = partial(self._reach, forward, len(forward.calls), name)
        forward.begin_stretch(stretch, before_use)
        self.stretch = name

    def _end_stretch(self, forward: _Pass) -> None:
        """Start the copy of what the stretch has saved."""
        stretch = forward.end_stretch()
        if stretch is None:
            return
        stretch.parts += forward.take_between()
        self._unit_ends(forward, stretch)

    def _reach(self, forward: _Pass, number: int, name: str) -> None:
        """The backward pass uses what a stretch has saved."""
        if forward.at == number:
            return
        forward.at = number
        try:
            forward.fetch(number)
            self.stretch = name
            self.on_stretch()
        except Exception as error:  # not into the backward pass
            self._errors.on_error(error)

    # ------------------------------------------------------------------ blocks

    def block_begins(
        self, name: str, now: Pass, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Let go of what has to leave before the block, and see what it saves."""
        running = self._running
        forward = running.forward
        if forward is None or running.call is not None or not now.is_forward:
            return
        if not (forward.is_watched or self._cuts):
            # A reentrant checkpoint makes the graph behind its block.
            forward.watch(tensors_in((args, kwargs)), self._errors)
        is_recomputed = name in self.recomputed and self._may_run_again(name, args, kwargs)
        is_copied = name in (self._planned if is_recomputed else self._copied)
        running.call = call = _Call(name, is_copied, self._copied.get(name))
        call.makes_graph = now.has_gradients
        if not self._cuts:
            self._release(forward, name)
            call.parts = forward.take_between()
        elif name not in forward.entered:
            forward.entered.add(name)
            self._begin_stretch(forward, name, is_copied)
        call.leaves_out = name in self._left_out and self._may_run_again(name, args, kwargs)
        module = self._blocks[name].module
        if self._is_measuring and name in self._unproved:
            call.watched = self._watch(name, module, args, kwargs)
        leaves = call.is_copied or (forward.stretch is not None and forward.stretch.is_copied)
        moves = leaves or self._is_measuring or name in self._following
        if call.watched is not None:
            self.is_unusual = True
        elif moves or self._hears_all:
            key, call.is_open = object(), True
            if forward.stretch is not None:
                forward.stretch.parts.append((key, None))
            # None where other hooks are innermost, as in a checkpoint.
            call.has_group = self._open_group(forward, name, key, moves=moves)
            if call.has_group:
                call.parts.append((key, None))
        elif is_recomputed or not is_any_lent():  # which autograd must not save as they are
            self._see_no_more(forward)
        if is_recomputed:
            proof = self.proofs[name]
            buffers = [buffer_at(module, it) for it in proof.buffers]
            second = SecondRun(module, args, kwargs, buffers, self._second_run_is_late)
            self._second_runs.add(second)
            call.recomputed = RecomputedCall(second)
            call.recomputed.begin()

    def block_ends(self, _name: str, now: Pass, output: object, *, failed: bool) -> None:
        """Start the copy of what the block has saved."""
        running = self._running
        forward, call = running.forward, running.call
        if forward is None or call is None or not now.is_forward:
            return
        running.call = None
        if call.recomputed is not None and not failed:
            call.recomputed.end()
            call.recomputed = None  # what runs it again is in the graph
        if failed:
            call.abandon()
        if call.is_open:
            self._store.close_group()
        if self._cuts is None and call.has_group:
            forward.counts[call.name] += self._store.saved_count(call.parts[-1][0])
        if not self._cuts:
            forward.take_between()  # a block without a group of its own has saved it
        if failed:
            return
        self._see_no_more(forward)
        if not self._hears_all and call.name in self._seen_behind:
            self._see_between(forward)
        if call.watched is not None and (proof := call.watched.end(output)) is not None:
            if self._has_dropping_cells:
                proof = replace(proof, checkpointed_bytes=0)
            self.proofs[call.name] = proof
        call.watched = None
        if self._is_measuring and call.name in self.proofs:
            self._confirm(call.name, nodes_of(tensors_in(output)))
        if self._cuts:
            return
        self._unit_ends(forward, call)
        # Without gradients, as in a reentrant checkpoint, the output is of no graph, even if a part
        # of the block has made one.
        forward.watch(tensors_in(output) if now.has_gradients else (), self._errors)

    def pass_ends(self, now: Pass, output: object, *, failed: bool) -> None:
        """Let go of what is still on the device."""
        running = self._running
        forward = running.forward
        if forward is None or not now.is_forward:
            return
        self._forget_pass()
        if failed:
            return
        self._end_stretch(forward)
        self._release(forward, None)
        forward.watch(tensors_in(output), self._errors)
        if self.remade is not None and self.remade.has_tried:  # and kept what it makes again later
            self.is_unusual, self.remade.has_tried = True, False
        elif self._is_measuring:
            self.held_bytes = {} if self._held is None else self._held.pass_ends()
            self._measure(forward)
            if not self._finds_cuts(forward):
                self._end_measuring(forward, output)

    def leaves_out(self, checkpoint: ProgramCheckpoint) -> bool:
        """Whether a checkpoint that begins is in a block of `left_out`, or the call of one."""
        running = self._running
        if running.forward is None or not self._left_out:
            return False
        if running.call is not None:
            return running.call.leaves_out
        try:
            name = None if checkpoint.module is None else self._names.get(checkpoint.module)
            return name in self._left_out and self._may_run_again(name, *checkpoint.arguments)
        except Exception as error:  # no hook is around this: it would reach the program
            self._errors.on_error(error)
            return False

    def _watch(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> WatchedCall | None:
        around = program_checkpoints.innermost()
        if around is None and self._store.may_open_group():
            self._unproved.discard(name)
            return watch(module, args, kwargs)
        if around is not None and around.module is module:
            self._unproved.discard(name)
            return watch(module, args, kwargs, around)
        return None

    def _confirm(self, name: str, nodes: Iterable[Any]) -> None:
        """Withdraw a proof if the program itself changes what the call reads before its backward.

        Attributes of modules may change: a second call has those of the first.
        """
        module = self._blocks[name].module
        changing = [buffer_at(module, it) for it in self.proofs[name].buffers]
        with program_waits:  # steps under a plan do not look
            unchanged = versions_of(module, but=changing)
            beside = ReachableBeside(module)
            self._unconfirmed[name] = list(module.parameters())

        def confirm(_gradients: object) -> None:
            self._unconfirmed.pop(name, None)
            with program_waits:
                are_changed = any(version_counter(it) != version for it, version in unchanged)
                if are_changed or not beside.is_unchanged():
                    self.proofs.pop(name, None)

        for node in nodes:
            node.register_prehook(self._errors(confirm))

    def _may_run_again(self, name: str, *arguments: object) -> bool:
        """Whether a call is like the one that was proved."""
        if not self._may_recompute:
            return False
        signature = call_signature(self._blocks[name].module, arguments)
        return (
            self._store.may_open_group()
            and signature == self.proofs[name].signature
            and is_plain(arguments)
        )

    def _release(self, forward: _Pass, before: str | None) -> None:
        """Let go of what has to leave before a block or stretch; of the rest, if that is None.

        Where one begins, note what the program holds still of those before.
        """
        for call in list(forward.leaving):
            if before is None or call.left_before == before:
                forward.leaving.remove(call)
                self._released_bytes += forward.release(call)
        if self._held is not None and before is not None:
            self._held.unit_begins(before)

    def _unit_ends(self, forward: _Pass, call: _Stretch) -> None:
        """Note what a block's call or a stretch has saved, and start the copy of it."""
        if self._held is not None:
            self._held.unit_ends(call.name, call.parts)
        if call.is_copied:
            forward.send(call, self._staying.get(call.name, ()))
        elif call.name in self._following:
            for part in call.parts:
                self._store.leave_to_others(*part)
        forward.calls.append(call)

    def _measure(self, forward: _Pass) -> None:
        """Count what each call has saved that no later one has saved, too.

        In a pass that is cut, but for what the program keeps in its hands.
        """
        last: dict[Stored, str] = {}
        shared: defaultdict[str, dict[_Place, str]] = defaultdict(dict)
        for call in reversed(forward.calls):
            for number, part in enumerate(call.parts):
                for place, stored in enumerate(self._store.stored(*part)):
                    if (owner := last.get(stored)) is not None:
                        shared[call.name][number, place] = owner
                        continue
                    last[stored] = call.name
                    if not (self._cuts and stored.is_kept()):
                        call.saved_bytes += stored.size_bytes
        self._shared = shared
        makes_graphs = all(not isinstance(it, _Call) or it.makes_graph for it in forward.calls)
        self._orders.add(tuple(call.name for call in forward.calls) if makes_graphs else ())
        calls = Counter(call.name for call in forward.calls)
        self._called_again = frozenset(name for name, count in calls.items() if count > 1)

    def _finds_cuts(self, forward: _Pass) -> bool:
        """Look for the stretches of later passes, by what this one has saved.

        Once, and anew where a pass has become much longer.
        """
        if self.is_unusual or not (self._cuts is None or self._has_outgrown_cuts(forward)):
            return False
        if self._cuts is None:
            forward.counts[NO_BLOCK] = self._store.saved_count(forward.model_key)
        saves, seen = list[Save](), set[object]()
        last = forward.calls[-1].name if forward.calls else NO_BLOCK
        rest = _Stretch(last, False, None, forward.take_between())
        for stretch in (*forward.calls, rest):
            for key, ordinals in stretch.parts:
                block, before = forward.groups[key]
                sizes = self._store.saved_sizes(key, ordinals, seen)
                saves += [
                    Save(block_of(stretch.name), block, before + ordinal, size_bytes)
                    for ordinal, size_bytes in sizes.items()
                ]
        if saves:
            was_cut = bool(self._cuts)
            self._cuts = find_cuts(saves, last=block_of(last))
            self._cut_saves = forward.counts.total()
            self.is_unusual = self.has_cut = was_cut or bool(self._cuts)
            for block in self._cuts:  # a part of its call cannot run twice
                self.proofs.pop(block, None)
        return self.has_cut

    def _has_outgrown_cuts(self, forward: _Pass) -> bool:
        return bool(self._cuts) and forward.counts.total() > _MUCH_LONGER * self._cut_saves

    def _end_measuring(self, forward: _Pass, output: object) -> None:
        for call in forward.calls:
            self._unread[call.name] += call.saved_bytes
        for name, size_bytes in self._unread.items():
            self.saved_bytes[name] = max(size_bytes, self.saved_bytes.get(name, 0))
        unread = self._unread
        for node in nodes_of(tensors_in(output)):
            node.register_prehook(lambda _gradients: unread.clear())


def _do_nothing() -> None:
    """Nobody measures."""


def is_compiled(module: nn.Module) -> bool:
    """Whether a module, or one in it, is compiled or scripted."""
    return any(
        isinstance(part, torch.jit.ScriptModule)
        or compiled_call(part) is not None
        or type(part).__name__ == "OptimizedModule"
        for part in module.modules()
    )
