"""Keeps a model's weights within the device budget: what has no room is streamed.

A model may be larger than the budget: then some of its weights were born in page-locked memory. At
its first call, and whenever calls turn out to need another amount of memory, weights move so that
there is room for everything else, and as many of them as possible are on the device.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from umem.adapters import weight_parts
from umem.capture.live import Block, find_blocks
from umem.core.classes import TensorClass
from umem.core.units import format_bytes
from umem.offloading import ActivationStore
from umem.runtime.captured_reads import CapturedReads
from umem.runtime.managed_runs import new_run
from umem.runtime.model_parts import buffers_of, weight_classes
from umem.runtime.torch_hooks.clock import Hearing, Listener, Order
from umem.runtime.torch_hooks.graphed import graphed_tensors
from umem.runtime.torch_hooks.modules import hook_running_forward
from umem.runtime.torch_hooks.passes import Pass, is_forward_pass
from umem.runtime.torch_hooks.work_starts import CAPTURES, before_work
from umem.runtime.unguarded import Unguarded
from umem.streaming.plan.state_plan import least_slack_bytes
from umem.streaming.plan.training_plan import WEIGHT_SLOTS
from umem.streaming.plan.weight_plan import WeightPlan, WeightUnit, plan_weights
from umem.streaming.stage.device_room import DeviceRoom
from umem.streaming.stage.homes import StateMemory, rehome
from umem.streaming.stage.lanes import Lanes
from umem.streaming.stage.shared_budget import BudgetPart, SharedBudget
from umem.streaming.weights.expert_cache import ExpertUse
from umem.streaming.weights.experts import Experts, find_experts
from umem.streaming.weights.staged_weights import is_movable_weight
from umem.streaming.weights.streamed_weights import (
    StreamedBlock,
    StreamedWeights,
    WeightCounts,
)

__all__ = ["ModelWeights", "WeightStatus"]

_LOG = logging.getLogger("umem")

_FIRST_SHARE, _FIRST_SHARE_OF_TRAINING = 1 / 8, 1 / 2
"""Before the first call, this part of the budget is left for what the call makes. Activations that
find no room are slower by far than weights that are streamed without need."""

_LEAST_FIRST_BYTES = 256 << 20

_MARGIN_SHARE, _LEAST_MARGIN_BYTES = 16, 64 << 20
"""What is left beyond the most that calls have needed: caches of keys and values grow."""

_PATIENCE_CALLS = 32
"""Calls that need much less before weights come back; twice as many each time."""

_DECODE_CALLS_PER_PREFILL_ON, _DECODE_CALLS_PER_PREFILL_OFF = 16, 4
"""Calls of few tokens for each other one with which experts are cached, and are not any more."""


@dataclass(frozen=True)
class WeightStatus:
    """Where a model's weights are, and counts over all calls so far."""

    budget_bytes: int
    plans: int
    """How often weights were placed; 0 for a model whose weights fit the device."""
    resident_bytes: int
    """Weights on the device."""
    streamed_bytes: int
    """Weights that are staged for each use."""
    in_place_bytes: int
    """Tables at home of which calls read some rows, over the link."""
    buffer_bytes: int
    """The staging buffers."""
    cache_bytes: int
    """Experts of streamed tables that are kept on the device."""
    cached_experts: ExpertUse
    """How often an expert that a call of few tokens chose was among them, with the present plan."""
    other_bytes: int
    """Memory that the plan leaves for everything else."""
    counts: WeightCounts


@dataclass(frozen=True, eq=False)
class _Unit:
    block: Block
    tensors: list[torch.Tensor]
    planned: WeightUnit
    experts: Experts


class ModelWeights(Listener):
    """What places a model's weights before its calls.

    Parameters
    ----------
    model
        The module that the program calls. Only a weak reference is kept.
    lanes
        Where copies run.
    memory
        Homes, buffers, and weights on the device.
    room
        The device's memory against its budget.
    store
        Sees what autograd saves.
    min_bytes
        Smaller weights stay on the device.
    share
        The most of all weights that may be on the device, as a share of their bytes.
    shared
        The device's budget, where trainings and other models divide it with this one.
    """

    def __init__(
        self,
        model: nn.Module,
        lanes: Lanes,
        memory: StateMemory,
        room: DeviceRoom,
        store: ActivationStore,
        *,
        min_bytes: int,
        share: float = 1.0,
        shared: SharedBudget | None = None,
    ) -> None:
        self.share = share
        """The most of all weights that may be on the device, as a share of their bytes."""
        self._model = weakref.ref(model)
        self._lanes = lanes
        self._memory = memory
        self._room = room
        self.streamed = StreamedWeights(lanes, memory, store, self._fail)
        self._classes = {
            id(part): tensor_class
            for it, tensor_class in weight_classes(model.parameters())
            for part in weight_parts(it)
        }
        self._device, self._min_bytes = store.device, min_bytes
        self._units, self._fixed = _find_units(model, min_bytes, self._device)
        """What can be streamed; and what belongs on the device, such as small weights."""
        self._weight_bytes = self._count_bytes()
        """All that can be moved, wherever it is."""
        self._plan: WeightPlan | None = None
        self._extra: Mapping[str, tuple[int, int]] = {}
        self._plans = 0
        self._other_bytes = 0
        """What the plan leaves for everything but weights."""
        self._calm_calls = 0
        self._calm_bytes = 0
        """The most that these calls have needed."""
        self._patience = _PATIENCE_CALLS
        self._caches_experts = False
        """Whether calls are of few tokens, most of them, so that a cache of experts serves them."""
        self._is_measured = False
        self.is_driven = False
        """Whether the tuner of a training decides, instead of what calls need."""
        self.spilled_bytes = 0
        """Host memory because of the budget when weights were placed last: what was born there."""
        self._shared = shared or SharedBudget()
        self._needed_bytes = 0
        """The most live tensors of its calls that nobody has placed."""
        self._least_bytes: int | None = None
        """None until it is asked for, as every call of several models does."""
        self._managed_run = new_run(model, "call", functools.partial(_late, weakref.ref(self)))
        self._has_let_go = False
        """Whether nothing is staged, since :meth:`let_go`."""
        self._lacks_room = False
        """Whether weights that belong on the device by plan have found no room there."""
        self._elsewhere: frozenset[int] = frozenset()
        """Weights, by ``id``, that were off the device when the others were placed."""
        self._is_called = False
        """Between begin and end of the model's call."""
        first = {it.name: it.module for it in find_blocks(model)[:1]}
        self._first = [weakref.ref(it) for it in first.values()]
        """The block by which a pass is known to begin where the model is not called."""
        self._hearing = Hearing(self, Order.WEIGHTS, self._fail, model, first)
        self._captured = CapturedReads(lanes.is_capturing)
        self._hear_captures_no_more = before_work(self.capture_begins, CAPTURES, is_last=True)
        self._shared.join(self)

    def status(self) -> WeightStatus:
        """Current state, and counts so far."""
        plan = self._plan
        return WeightStatus(
            budget_bytes=self._room.budget_bytes,
            plans=self._plans,
            resident_bytes=self._weight_bytes - self.away_bytes,
            streamed_bytes=self.streamed.streamed_bytes,
            in_place_bytes=0 if plan is None else plan.in_place_bytes,
            buffer_bytes=self.streamed.buffer_bytes,
            cache_bytes=self.streamed.cache_bytes,
            cached_experts=self.streamed.expert_use(),
            other_bytes=self._other_bytes,
            counts=self.streamed.counts,
        )

    @property
    def away_bytes(self) -> int:
        """Weights that are in host memory, by plan."""
        in_place_bytes = 0 if self._plan is None else self._plan.in_place_bytes
        return self.streamed.streamed_bytes + in_place_bytes

    @property
    def is_current(self) -> bool:
        """Whether the model still has the weights that it had."""
        model = self._model()
        if model is None:
            return False
        now = {id(it) for it in _movable(model, self._device) if it.nbytes >= self._min_bytes}
        with Unguarded():
            known = {id(it) for it in self._every() if it.nbytes >= self._min_bytes}
        return now == known

    def exclude(self, parameters: Iterable[torch.Tensor]) -> None:
        """Stream these weights no more: something else updates them past the guard.

        Those at home are used there in place.
        """
        excluded = {id(part) for it in parameters for part in weight_parts(it)}
        self._units = [
            made for unit in self._units if (made := _without(unit, excluded)) is not None
        ]
        self._weight_bytes = self._count_bytes()
        self._least_bytes = None
        self.streamed.close()
        self._plan = None
        self._is_measured = False

    def let_graphs_read(self) -> None:
        """Leave weights and buffers where they are that a CUDA graph reads there."""
        model = self._model()
        graphed = [] if model is None else graphed_tensors(model)
        parts = {id(part) for it in graphed for part in weight_parts(it)}
        if any(id(it) in parts for it in self._every()):
            self._fixed = [it for it in self._fixed if id(it) not in parts]
            self.exclude(graphed)

    def close(self) -> None:
        """Move nothing more; weights stay where they are."""
        self._hearing.close()
        self._hear_captures_no_more()
        self._captured.release()
        self.streamed.close()
        self._shared.leave(self)

    def _count_bytes(self) -> int:
        with Unguarded():
            return sum(it.nbytes for it in self._every())

    def _every(self) -> Iterable[torch.Tensor]:
        yield from self._fixed
        for unit in self._units:
            yield from unit.tensors

    def _fail(self, error: Exception) -> None:
        """An error must not end the program, which goes on with weights where they are."""
        _LOG.warning(
            "umem: weights are not streamed any more: %s: %s",
            type(error).__name__,
            str(error),
            exc_info=_LOG.isEnabledFor(logging.DEBUG),
        )
        self.close()

    # ------------------------------------------------------------------ calls

    def step_begins(self) -> None:
        """An optimizer's step is about to change weights."""
        try:
            self.streamed.step_begins()
        except Exception as error:
            self._fail(error)

    def capture_begins(self) -> None:
        """A CUDA graph will read weights by the addresses that they have in its capture.

        Updates that were under way are over: nothing guards weights on the device any more.
        """
        self.streamed.forget_copies()
        self._captured.begin(self._every())

    def pass_begins(self, _now: Pass, _args: object, _kwargs: object) -> None:
        """Place weights."""
        self._is_called = True
        self.begin_call()

    def pass_ends(self, _now: Pass, _output: object, *, failed: bool) -> None:
        """The call has ended."""
        self._is_called = False

    def block_begins(self, _name: str, now: Pass, args: Any, kwargs: Any) -> None:
        """The first block is called: by a call of the model or, past its hooks, by its `forward`.

        The hooks go around that function then, and the block is heard no more.
        """
        if self._is_called or now.is_second:
            return
        first = self._first[0]()
        model = None if first is None else hook_running_forward(first)
        if model is not None and model is self._model():
            self._hearing.set_blocks({})
            self._hearing.hook_anew()
            self.pass_begins(now, (), {})

    def begin_call(self) -> None:
        """Look at what calls need before the next one, and place weights anew if they have to."""
        if not is_forward_pass() or self._lanes.is_capturing():
            return
        self._captured.end()
        if self._has_let_go:
            self.take_up()
        self.streamed.begin_call()
        if self._has_let_go or self.is_driven or not self.may_place or not self._units:
            return
        needed_bytes = self._measure()
        if self._calls_are_others_now() and needed_bytes is None:
            needed_bytes = self._other_bytes
        if needed_bytes is not None:
            self._place(needed_bytes)
        if self._plan is not None:
            self._managed_run.ends(None, is_planned=needed_bytes is None)

    def _calls_are_others_now(self) -> bool:
        """Note whether calls are of few tokens now; returns whether that is new.

        A cache of experts serves them better than whole tables on the device. Others copy what is
        in the cache, too.
        """
        few, many = self.streamed.few_and_many
        before = self._caches_experts
        if few + many >= _PATIENCE_CALLS and any(it.experts.tables for it in self._units):
            on, off = _DECODE_CALLS_PER_PREFILL_ON, _DECODE_CALLS_PER_PREFILL_OFF
            self._caches_experts = few >= (off if before else on) * many
        return self._caches_experts != before

    def _measure(self) -> int | None:
        """Memory to leave for everything but weights; None to leave the plan as it is."""
        part = self._part()
        if part.most_bytes is not None:
            self._room.find_homes()
        placed_bytes = self._shared.placed_bytes - part.others_bytes
        peak_bytes = self._room.take_peak_bytes() - placed_bytes
        own_bytes = peak_bytes - part.others_bytes
        if self._is_measured and own_bytes > self._needed_bytes:
            # Not anew in each call: the others plan anew for it.
            self._needed_bytes = own_bytes + own_bytes // _MARGIN_SHARE
        if not self._is_measured:
            self._is_measured = True
            now_bytes = self._room.take_peak_bytes() - placed_bytes
            share = _FIRST_SHARE_OF_TRAINING if torch.is_grad_enabled() else _FIRST_SHARE
            first_bytes = int(share * self._room.budget_bytes)
            needed_bytes = now_bytes + max(first_bytes, _LEAST_FIRST_BYTES)
            has_homes = any(self._memory.is_home(it) for it in self._every())
            return needed_bytes if has_homes or self._is_over(needed_bytes) else None
        if self._plan is None:
            return _with_margin(peak_bytes) if self._is_over(peak_bytes) else None
        if (spilled_bytes := self._room.spilled_bytes() - self.spilled_bytes) > 0:
            # Holes between what is live may leave no room where the sizes alone would.
            self.spilled_bytes += spilled_bytes
            if self._plan.resident_bytes:
                self._calm_calls = 0
                return _with_margin(max(peak_bytes, self._other_bytes + spilled_bytes))
        has_too_much = part.most_bytes is not None and self.device_bytes > part.most_bytes
        if peak_bytes > self._other_bytes or has_too_much:
            self._calm_calls = 0
            return _with_margin(peak_bytes)
        self._calm_calls += 1
        self._calm_bytes = max(peak_bytes, self._calm_bytes if self._calm_calls > 1 else 0)
        needed_bytes = _with_margin(self._calm_bytes)
        spare_bytes = self._other_bytes - needed_bytes
        if self._calm_calls < self._patience or spare_bytes < needed_bytes // 4:
            return None
        self._calm_calls = 0
        self._patience *= 2
        return needed_bytes

    def _is_over(self, other_bytes: int) -> bool:
        """Whether weights and everything else do not fit, or not all weights may stay."""
        may_stay = self._weight_bytes - self.fixed_bytes <= self._most_resident_bytes()
        return not may_stay or other_bytes + self._weight_bytes > self._budget_bytes

    def _most_resident_bytes(self) -> int:
        """Of what can be streamed."""
        most_bytes, part = int(self.share * self._weight_bytes), self._part()
        if part.most_bytes is not None:
            # Beside its buffers, if not all of it may stay.
            buffers_bytes = self.least_bytes if part.most_bytes < self.most_bytes else 0
            most_bytes = min(most_bytes, max(self.fixed_bytes, part.most_bytes - buffers_bytes))
        return max(0, most_bytes - self.fixed_bytes)

    def _part(self) -> BudgetPart:
        """Of the budget; all of it while a training decides."""
        if self.is_driven:
            return BudgetPart(None, 0)
        return self._shared.part_of(self, self._budget_bytes)

    @property
    def _budget_bytes(self) -> int:
        budget_bytes = self._room.budget_bytes
        return budget_bytes - least_slack_bytes(budget_bytes)

    # ------------------------------------------------------------------ placing

    @property
    def may_place(self) -> bool:
        """Whether weights can be moved now: nothing works on them, and no graph replays on them."""
        return not self.streamed.was_captured and not self.streamed.is_in_use

    @property
    def units(self) -> dict[str, WeightUnit]:
        """What can be streamed, by block in forward order."""
        return {it.block.name: it.planned for it in self._units}

    @property
    def fixed_bytes(self) -> int:
        """Weights and buffers that belong on the device."""
        with Unguarded():
            return sum(it.nbytes for it in self._fixed)

    @property
    def placed_bytes(self) -> int:
        """Memory of weights, at home or on the device, of the staging buffers and of caches."""
        return self._weight_bytes + self.streamed.buffer_bytes + self.streamed.cache_bytes

    @property
    def device_bytes(self) -> int:
        """The part of it that is on the device."""
        beside_bytes = self.streamed.buffer_bytes + self.streamed.cache_bytes
        return self._weight_bytes - self.away_bytes + beside_bytes

    @property
    def least_bytes(self) -> int:
        """What cannot leave the device, and the fewest buffers for the rest."""
        if self._least_bytes is None:
            least = plan_weights(list(self.units.values()), 0, WEIGHT_SLOTS)
            self._least_bytes = self.fixed_bytes + least.device_bytes
        return self._least_bytes

    @property
    def most_bytes(self) -> int:
        """All weights."""
        return self._weight_bytes

    @property
    def need_bytes(self) -> int:
        """The most live tensors of its calls that nobody has placed."""
        return self._needed_bytes

    def _place(self, other_bytes: int) -> None:
        """Move weights so that so much is left for everything else."""
        room_bytes = self._budget_bytes - other_bytes - self.fixed_bytes
        plan = plan_weights(
            list(self.units.values()),
            room_bytes,
            WEIGHT_SLOTS,
            # A training uses all of them in each pass.
            experts_first=not torch.is_grad_enabled(),
            caches_experts=self._caches_experts,
            most_resident_bytes=self._most_resident_bytes(),
        )
        self.apply(plan, other_bytes)

    def apply(
        self,
        plan: WeightPlan,
        other_bytes: int,
        extra: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """Move weights as a plan for `units` says, if it is another one; where `may_place` holds.

        Parameters
        ----------
        plan
            The plan.
        other_bytes
            What it leaves for everything else.
        extra
            Further buffers in the forward and in the backward pass of each block.
        """
        self._other_bytes = other_bytes
        extra = extra or {}
        if (plan, extra) == (self._plan, self._extra):
            return
        self._extra = extra
        self._plan = plan
        self._plans += 1
        if not self._has_let_go:
            self._carry_out(plan)
        _LOG.info(
            "umem: weights, plan %d: %s on the device, %s streamed through %d buffers of %s, %s "
            "of experts cached, %s read in place; %s of %s left for all else",
            self._plans,
            format_bytes(plan.resident_bytes + self.fixed_bytes),
            format_bytes(plan.streamed_bytes),
            plan.slots,
            format_bytes(plan.slot_bytes),
            format_bytes(self.streamed.cache_bytes),
            format_bytes(plan.in_place_bytes),
            format_bytes(other_bytes),
            format_bytes(self._room.budget_bytes),
        )

    def _carry_out(self, plan: WeightPlan) -> None:
        self.streamed.close()
        leaving: list[torch.Tensor] = []
        coming, blocks = list(filter(self._memory.is_of_device, self._fixed)), []
        classes: dict[str, TensorClass] = {}
        for unit, staged, in_place in zip(self._units, plan.streamed, plan.in_place, strict=True):
            for number, tensor in enumerate(unit.tensors):
                if id(tensor) in self._elsewhere:
                    continue
                is_home = number in staged or number in in_place
                (leaving if is_home else coming).append(tensor)
        coming = self._exchange(leaving, coming)
        for unit, staged in zip(self._units, plan.streamed, strict=True):
            tensors = [unit.tensors[number] for number in sorted(staged)]
            # The host may have no room for some.
            tensors = [
                it for it in tensors if id(it) not in self._elsewhere and self._memory.is_home(it)
            ]
            if tensors:
                name, module = unit.block.name, unit.block.module
                blocks.append(StreamedBlock(name, module, tensors, unit.experts, plan.cached_share))
                classes[unit.block.name] = self._class_of(tensors[0])
        self._room.trim()
        self.streamed.set_blocks(blocks, plan.slots, classes, self._extra)
        self._lacks_room = not all(self._move(it, to_home=False) for it in coming)
        self._room.trim()
        self._room.take_peak_bytes()
        self.spilled_bytes = self._room.spilled_bytes()

    # ------------------------------------------------------------------ what the program moves

    def let_go(self, device: torch.device | None) -> None:
        """Stage nothing until the next call, if these are weights of a GPU.

        None where the program has moved some of them elsewhere.
        """
        model = self._model()
        is_meant = device == self._device or (
            device is None and not self._find_elsewhere() <= self._elsewhere
        )
        may_close = self.may_place and not (self._has_let_go or self._lanes.is_capturing())
        if is_meant and may_close and model is not None:
            self.streamed.close()
            parts = _weights_of(model)
            # Modules that move get other buffers: these are looked for anew.
            self._fixed = [it for it in self._fixed if id(it) in parts]
            self._has_let_go = True

    def take_up(self) -> None:
        """Place weights by plan that were let go of and are here, or that have lacked room."""
        model = self._model()
        if self._has_let_go:
            elsewhere = self._find_elsewhere()
            if model is None or len(elsewhere) == sum(len(it.tensors) for it in self._units):
                return
            self._has_let_go, self._elsewhere = False, elsewhere
            parts = _weights_of(model)
            self._fixed += [it for it in _movable(model, self._device) if id(it) not in parts]
        elif not (self._lacks_room and self.may_place):
            return
        if self._plan is not None:
            self._carry_out(self._plan)

    def _find_elsewhere(self) -> frozenset[int]:
        is_of_device = self._memory.is_of_device
        every = (it for unit in self._units for it in unit.tensors)
        return frozenset(id(it) for it in every if not is_of_device(it))

    def _exchange(
        self, leaving: Sequence[torch.Tensor], coming: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Move weights to homes, and as many bytes at most to the device; returns what is left.

        By turns, so that the home that one leaves serves the next: page-locking memory takes longer
        than copying it.
        """
        with Unguarded():
            out = [it for it in leaving if not self._memory.is_home(it)]
            into = [it for it in coming if self._memory.is_home(it)]
            out_bytes, into_bytes = (sum(it.nbytes for it in some) for some in (out, into))
            # Room for the buffers is made on the way.
            share = min(1.0, into_bytes / max(1, out_bytes))
            balance = 0.0
            for tensor in out:
                if not self._move(tensor, to_home=True):
                    break  # the host has no more, and to ask again takes time
                balance += share * tensor.nbytes
                while into and into[0].nbytes <= balance and self._move(into[0], to_home=False):
                    balance -= into.pop(0).nbytes
        return into

    def _class_of(self, tensor: torch.Tensor) -> TensorClass:
        return self._classes.get(id(tensor), TensorClass.OTHER)

    def _move(self, tensor: torch.Tensor, *, to_home: bool) -> bool:
        """Give a weight other memory, if it has none of that kind; False if there is none."""
        return not is_movable_weight(tensor) or rehome(
            tensor, self._memory, self._class_of(tensor), on_device=not to_home
        )


def _weights_of(model: nn.Module) -> frozenset[int]:
    return frozenset(id(part) for it in model.parameters() for part in weight_parts(it))


def _with_margin(needed_bytes: int) -> int:
    return needed_bytes + max(needed_bytes // _MARGIN_SHARE, _LEAST_MARGIN_BYTES)


def _find_units(
    model: nn.Module, min_bytes: int, device: torch.device
) -> tuple[list[_Unit], list[torch.Tensor]]:
    """The weights that can be streamed, by block; and all others whose memory can be moved."""
    movable = _movable(model, device)
    can_move = set(map(id, movable))
    blocks = find_blocks(model)
    users: Counter[int] = Counter()
    for block in blocks:
        users.update({id(it) for it in block.module.parameters()})
    units, known = [], set()
    for block in blocks:
        tensors: list[torch.Tensor] = []
        gathered = set()
        experts = find_experts(block.module)
        for owner in block.module.modules():
            for parameter in owner.parameters(recurse=False):
                if users[id(parameter)] != 1:
                    continue
                for part in weight_parts(parameter):
                    if id(part) in known or part.nbytes < min_bytes or id(part) not in can_move:
                        continue
                    known.add(id(part))
                    if isinstance(owner, nn.Embedding):
                        gathered.add(len(tensors))
                    tensors.append(part)
        if tensors:
            with Unguarded():
                sizes = tuple(it.nbytes for it in tensors)
            trained = frozenset(n for n, it in enumerate(tensors) if it.requires_grad)
            tables = frozenset(n for n, it in enumerate(tensors) if id(it) in experts.ids)
            planned = WeightUnit(sizes, frozenset(gathered), trained, tables)
            units.append(_Unit(block, tensors, planned, experts))
    return units, [it for it in movable if id(it) not in known]


def _movable(model: nn.Module, device: torch.device) -> list[torch.Tensor]:
    """Weights and buffers on a device whose memory can be moved, each once."""
    graphed = set(map(id, graphed_tensors(model)))  # a graph has their addresses
    every = {
        id(part): part
        for it in (*model.parameters(), *buffers_of(model))
        if id(it) not in graphed
        for part in weight_parts(it)
        if part.device == device
    }
    return [it for it in every.values() if is_movable_weight(it)]


def _without(unit: _Unit, excluded: Container[int]) -> _Unit | None:
    left = [number for number, it in enumerate(unit.tensors) if id(it) not in excluded]
    if not left:
        return None
    sizes = tuple(unit.planned.part_bytes[number] for number in left)
    gathered, trained, experts = (
        frozenset(n for n, number in enumerate(left) if number in some)
        for some in (unit.planned.gathered, unit.planned.trained, unit.planned.experts)
    )
    planned = WeightUnit(sizes, gathered, trained, experts)
    return _Unit(unit.block, [unit.tensors[number] for number in left], planned, unit.experts)


def _late(reference: weakref.ref[ModelWeights]) -> int | None:
    """Copies that a pass had to wait for from their start on; None if the model is gone."""
    weights = reference()
    return None if weights is None else weights.streamed.counts.late
