"""Optimizer state at home in host memory, and its copies in buffers on the device."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch

from umem.core.classes import TensorClass
from umem.runtime.aliases import has_alias, have_one_memory
from umem.runtime.guard import can_guard, has_guard
from umem.runtime.model_parts import lies_in_memory
from umem.runtime.unfilled_memory import unfilled_like
from umem.runtime.unguarded import Unguarded
from umem.streaming.stage.homes import StateMemory
from umem.streaming.stage.lanes import Copy, Lane, Lanes
from umem.streaming.stage.ring import Slot
from umem.streaming.stage.sharded_tensors import OptimizerState, ShardedState
from umem.streaming.stage.state_views import StateViews

__all__ = [
    "Binding",
    "KnownValues",
    "OptimizerState",
    "StagedState",
    "find_spans",
]

_ALIGNMENT = 512
"""Of a run of homes in a buffer, as of the allocator's blocks: kernels see the same alignment."""


_SPAN_ELEMENTS = 1024
"""Spans of a parameter begin at multiples of so many elements, and so as aligned as it is."""

_VECTOR_ELEMENTS = 4
"""torch's fused Adam handles a tensor by vectors of so many, or else by single elements. The two
round differently."""


def find_spans(
    parameter: torch.Tensor,
    values: Mapping[str, Any],
    staged: Iterable[torch.Tensor],
    count: int,
) -> list[tuple[int, int]]:
    """Divide a parameter, each of whose elements is updated by itself.

    Parameters
    ----------
    parameter, values
        The parameter and its state.
    staged
        The state that is streamed.
    count
        Number of spans, at most.

    Returns
    -------
    list of tuple
        First element, and the one behind the last, as the parameter lies in memory. Empty for a
        parameter that is to be staged as a whole.
    """
    elements = parameter.numel()
    keys = {id(value) for value in staged}
    can_divide = (
        bool(keys)
        and lies_in_memory(parameter)
        and parameter.is_contiguous()
        and all(
            isinstance(value, int)
            or (
                isinstance(value, torch.Tensor)
                and (
                    value.shape == parameter.shape and value.is_contiguous()
                    if id(value) in keys
                    else value.numel() == 1
                )
            )
            for value in values.values()
        )
    )
    if not can_divide or count < 2 or elements % _VECTOR_ELEMENTS:
        return []
    length = math.ceil(elements / count / _SPAN_ELEMENTS) * _SPAN_ELEMENTS
    return [(begin, min(begin + length, elements)) for begin in range(0, elements, length)]


class KnownValues:
    """The state of some parameters, to compare with what an optimizer has later.

    Parameters
    ----------
    state
        The state now.
    """

    def __init__(self, state: OptimizerState) -> None:
        by_names: dict[tuple[str, ...], list[torch.Tensor]] = {}
        for parameter, values in state.items():
            by_names.setdefault(tuple(values), []).append(parameter)
        self._known = [
            (names, some, list(_values_of(names, [state[it] for it in some])))
            for names, some in by_names.items()
        ]
        """Names of values, the parameters that have these, and the values."""

    def are_in(self, state: OptimizerState) -> bool:
        """Whether these very values are the parameters' whole state.

        Loops of C: each value is looked at before each step.
        """
        for names, some, known in self._known:
            found: list[Any] = list(map(state.get, some))
            try:
                if {len(names)} != set(map(len, found)):
                    return False
                if not all(map(is_, _values_of(names, found), known)):
                    return False
            except (KeyError, TypeError):  # other names, or no state
                return False
        return True


class Binding:
    """What an optimizer works on: the state in a slot, or at home.

    Work that is queued keeps its own, whatever the state is bound to since.
    """

    def __init__(self, slot: Slot | None = None) -> None:
        self.slot = slot
        self.views: dict[torch.Tensor, dict[str, Any]] = {}
        """State by parameter and name, with views of the slot for homes."""
        self.made: dict[torch.Tensor, dict[str, Any]] = {}
        """The same, as it was before any update."""
        self.copies_in: list[Copy] = []
        """From the homes into the slot."""
        self.copies_out: list[Copy] = []
        """From the slot to the homes."""


class StagedState:
    """The state of the parameters of one unit.

    Parameters
    ----------
    state
        The state of the unit's parameters. Tensors for which ``memory.is_home`` holds are staged,
        the others are used where they are.
    memory
        The device's memory for state.
    span
        For one parameter, and homes of its shape, all contiguous: the elements to stage, from the
        first to before the second. None for all.
    whole
        All state of the unit, of which this is a part; None for all of it.
    views
        Finds views of it; None for a part.
    on_parts
        As of :class:`~umem.streaming.stage.sharded_tensors.ShardedState`.
    """

    def __init__(
        self,
        state: OptimizerState,
        memory: StateMemory,
        span: tuple[int, int] | None = None,
        whole: StagedState | None = None,
        *,
        views: StateViews | None = None,
        on_parts: bool = False,
    ) -> None:
        self._whole = whole
        self.homes: list[torch.Tensor] = []
        """State tensors that are staged, by address."""
        self.others: list[torch.Tensor] = []
        """State tensors that are used where they are."""
        self.binding = Binding()
        """The present one."""
        self.span = span
        self._known = {parameter: dict(values) for parameter, values in state.items()}
        self._values: KnownValues | None = None
        """None to look."""
        self._runs: list[Copy] = []
        """Homes next to each other, which one call copies, each to its place in a slot."""
        self._offsets: dict[int, int] = {}
        self._copies: dict[str, torch.Tensor] = {}
        """For copies of what is not staged, in updates of a span. Not made by an update: memory
        that a lane's stream has of its own cannot be taken by others before all that is queued
        there has run, and the program would wait for that."""
        self.size_bytes = 0
        with Unguarded():
            self.sharded = ShardedState.of(state, on_parts=on_parts)
            """What `homes` and `others` have this rank's parts of; None if that is nothing."""
            self._find(memory)
            self._lay_out(memory)
            if span is not None:
                ((_, values),) = self._known.items()
                self._copies = {
                    name: unfilled_like(value)
                    for name, value in values.items()
                    if isinstance(value, torch.Tensor) and id(value) not in self._offsets
                }
        self._views: list[weakref.ref[torch.Tensor]] = []
        """The program may let go of them."""
        self.is_shared: bool = (whole is None or whole.is_shared) and self._have_alias()
        """Whether something may use the tensors that a guard would not see: an alias, or a tensor
        of another class. Later aliases come by a use, which the guard sees."""
        if self.is_shared and views is not None:
            self._find_views(views)

    def choose_wrapping(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """This rank's parts of gradients, if the update of parameters gets parts; else nothing."""
        if self.sharded is None:
            return []
        was_wrapped = self.sharded.is_wrapped
        parts = self.sharded.choose_wrapping(parameters, gradients)
        if self.sharded.is_wrapped != was_wrapped:
            slot = self.binding.slot
            self.unbind()
            self.bind(slot)
        return parts

    def _find(self, memory: StateMemory) -> None:
        for parameter, values in self._known.items():
            for value in values.values():
                if not isinstance(value, torch.Tensor):
                    continue
                part = value if self.sharded is None else self.sharded.part_of(value)
                is_home = memory.may_stage(part) and memory.is_home(part)
                # A copy back would undo the update of the parameter.
                is_home = is_home and not have_one_memory(part, parameter)
                found = self.homes if is_home else self.others
                found.append(part)
        self.homes.sort(key=torch.Tensor.data_ptr)

    def _lay_out(self, memory: StateMemory) -> None:
        end = 0  # of the block of the home before
        for home in self.homes:
            address, size_bytes = home.data_ptr(), home.nbytes
            if self.span is not None:
                address += self.span[0] * home.itemsize
                size_bytes = (self.span[1] - self.span[0]) * home.itemsize
            if self.span is None and self._runs and address == end:
                run = self._runs.pop()
                run = Copy(run.to, run.source, address + size_bytes - run.source)
            else:
                offset = -(-self.size_bytes // _ALIGNMENT) * _ALIGNMENT
                run = Copy(offset, address, size_bytes)
            self._runs.append(run)
            self._offsets[id(home)] = run.to + address - run.source
            self.size_bytes = run.to + run.size_bytes
            end = address + memory.block_bytes(size_bytes)

    @property
    def known(self) -> OptimizerState:
        """The values that it was made for, as far as no update has replaced them."""
        return self._known

    @property
    def divided(self) -> torch.Tensor | None:
        """The parameter that it has a span of; None if it has all of its parameters."""
        return None if self.span is None else next(iter(self._known))

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether this is the state of a parameter."""
        return parameter in self._known

    @property
    def guarded(self) -> list[torch.Tensor]:
        """The tensors whose uses are seen, from the layout to the next one."""
        if not has_guard():
            return []
        if self.is_shared:
            return self.homes
        sharded = () if self.sharded is None else self.sharded.tensors
        return [*self.homes, *self.others, *sharded]

    @property
    def views(self) -> list[torch.Tensor]:
        """Others on the memory of homes, if all are known, which are to be guarded, too."""
        return [it for view in self._views if (it := view()) is not None]

    def _have_alias(self) -> bool:
        every = (*self.homes, *self.others)
        return not has_guard() or not self._can_guard_all() or has_alias(every)

    def _can_guard_all(self) -> bool:
        every = (*self.homes, *self.others)
        return all(map(can_guard, every)) and (self.sharded is None or self.sharded.can_guard())

    def _find_views(self, views: StateViews) -> None:
        found = None
        if has_guard() and self._can_guard_all() and not has_alias(self.others):
            found = views.of(self.homes)
        self._views, self.is_shared = [weakref.ref(it) for it in found or ()], found is None

    def is_current(self, state: OptimizerState) -> bool:
        """Whether an optimizer still has these very values as the state of these parameters.

        Not if the values were shared and are so no more.
        """
        if self._values is None:
            self._values = KnownValues(self._known)
        return self._values.are_in(state) and (not self.is_shared or self._have_alias())

    def unbind(self) -> None:
        """Let go of the slot and of all views, by which homes would have aliases."""
        self.binding = Binding()

    def bind(self, slot: Slot | None) -> None:
        """Use a slot from now on; None to use homes where they are."""
        if slot is self.binding.slot and self.binding.views:
            return
        self.binding = Binding()  # behind an interrupt it is made anew
        binding = Binding(slot)
        with Unguarded():
            made = {id(home): self._view(home, slot) for home in self.homes}
            if not self.is_shared:  # objects that nothing guards
                made |= {id(value): value.detach() for value in self.others}
            binding.views = {
                parameter: {name: self._in_place_of(value, made) for name, value in values.items()}
                for parameter, values in self._known.items()
            }
        binding.made = {parameter: dict(values) for parameter, values in binding.views.items()}
        if slot is not None:
            first = slot.memory.data_ptr()
            runs = self._runs
            binding.copies_in = [Copy(first + to, home, size) for to, home, size in runs]
            binding.copies_out = [Copy(home, first + to, size) for to, home, size in runs]
        self.binding = binding

    def _in_place_of(self, value: Any, made: Mapping[int, torch.Tensor]) -> Any:
        """The view of a value, or of its part; `made` has those of plain tensors by ``id``."""
        if self.sharded is None:
            return made.get(id(value), value)
        return self.sharded.stand_in(value, made)

    def _view(self, home: torch.Tensor, slot: Slot | None) -> torch.Tensor:
        if slot is None:
            whole = home.detach()
            return whole if self.span is None else whole.view(-1)[slice(*self.span)]
        offset = self._offsets[id(home)]
        if self.span is not None:
            typed, first = slot.elements(home.dtype, offset)
            return typed[first : first + self.span[1] - self.span[0]]
        return slot.view(home, offset)

    def copy_in(self, lanes: Lanes, binding: Binding) -> None:
        """Copy the homes into a slot, from within work of a lane."""
        lanes.copy(Lane.COPY_IN, binding.copies_in, TensorClass.OPTIMIZER_STATE)

    def copy_out(self, lanes: Lanes, binding: Binding) -> None:
        """Copy a slot back to the homes, from within work of a lane."""
        lanes.copy(Lane.COPY_OUT, binding.copies_out, TensorClass.OPTIMIZER_STATE)

    def values_of_span(
        self, binding: Binding, parameter: torch.Tensor, state: Any, *, is_last: bool
    ) -> dict[str, Any]:
        """State of a parameter for the update of its span.

        An update that comes before another one of the same step has copies of what is not staged,
        such as a step count. A count that is a number is the optimizer's present one.

        Parameters
        ----------
        binding
            What the update works on.
        parameter
            The parameter.
        state
            The optimizer's own state.
        is_last
            Whether no other span of it comes behind in this step.
        """
        views = binding.views[parameter]
        for name, value in self._known[parameter].items():
            if not isinstance(value, torch.Tensor):
                views[name] = state[parameter][name]
        if is_last:
            return views
        copies = {name: copy.copy_(views[name]) for name, copy in self._copies.items()}
        return {**views, **copies}

    def keep_numbers(self, binding: Binding, parameter: torch.Tensor, state: Any) -> None:
        """Behind the last span's update, give the optimizer's own state the numbers in it."""
        whole = self._whole or self  # no reference to itself, by which it would outlive its use
        for name, value in binding.views[parameter].items():
            if not isinstance(value, torch.Tensor):
                state[parameter][name] = whole._known[parameter][name] = value
                whole._values = None

    def keep(self, binding: Binding, parameters: Iterable[torch.Tensor], state: Any) -> None:
        """After an update, give the optimizer's own state what the update has replaced.

        A step count may be a number, which is replaced. A tensor that was put in the place of
        another one is copied there.

        Parameters
        ----------
        binding
            What the update has worked on.
        parameters
            Those that were updated.
        state
            The optimizer's own state.
        """
        for parameter in parameters:
            known, made = self._known[parameter], binding.made[parameter]
            views = binding.views[parameter]
            for name, value in views.items():
                before = made.get(name)
                if value is before:
                    continue
                if isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor):
                    before.copy_(value)
                    views[name] = before
                else:
                    known[name] = made[name] = state[parameter][name] = value
                    self._values = None


def _values_of(names: tuple[str, ...], state: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """Values of these names in each dictionary; KeyError if one lacks a name."""
    values: Any = itemgetter(*names, names[0])  # of one name alone it would get no tuple
    return chain.from_iterable(map(values, state))
