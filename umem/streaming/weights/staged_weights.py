"""The weights of one block that are at home in host memory, and their copies in a device buffer."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any

import torch

from umem.core.classes import TensorClass
from umem.core.interrupts import exhaust
from umem.runtime.aliases import has_alias, tensors_on
from umem.runtime.guard import Guard, has_guard
from umem.runtime.held_memory import lend_memory
from umem.runtime.model_parts import lies_in_memory
from umem.runtime.torch_hooks.memory_access import (
    Owner,
    original_data,
    original_storage,
    owner_of,
)
from umem.runtime.torch_hooks.saved_tensors import lend
from umem.runtime.unguarded import Unguarded, addresses_of
from umem.streaming.plan.weight_plan import staged_bytes
from umem.streaming.stage.homes import StateMemory
from umem.streaming.stage.lanes import Copy, Lane, Lanes, Moment
from umem.streaming.stage.ring import Bundle, BundleEvent, BundleState, Slot
from umem.streaming.weights.expert_cache import CachedExperts, make_cached_table
from umem.streaming.weights.experts import Experts
from umem.torch_compat import (
    InferenceMode,
    storage_address,
    storage_key,
    storage_use_count,
    version_counter,
)

__all__ = ["LentSlot", "StagedWeights", "is_movable_weight"]


def is_movable_weight(tensor: torch.Tensor) -> bool:
    """Whether a weight's memory may be another one for a time: it is dense, and all its own.

    Also of subclasses of parameters, such as quantised ones: only their memory changes.
    """
    with Unguarded():
        return (
            lies_in_memory(tensor)
            and not tensor.is_inference()
            and tensor.storage_offset() == 0
            and 0 < tensor.nbytes == tensor.untyped_storage().nbytes()
            and not has_alias((tensor,))
        )


class LentSlot(Slot):
    """A slot whose memory the program may have views of, which outlive the use of a block."""

    def __init__(self, memory: torch.Tensor, made: Moment) -> None:
        super().__init__(memory, made)
        self._storage = memory.untyped_storage()
        self._end_loan = lend(self._storage, partial(_find, weakref.ref(self)))
        self._end_lending = lend_memory(self._storage, self)
        self._places: dict[object, torch.Tensor] = {}
        """Views by layout: most blocks have weights alike, and to make a view takes some time."""
        self._places_of: dict[int, list[torch.Tensor]] = {}
        """The same views, by number of parts."""

    def _place(self, like: torch.Tensor, offset: int) -> torch.Tensor:
        """The memory at an offset, in the layout of a tensor: always the same view."""
        layout = offset, like.dtype, like.size(), like.stride()
        place = self._places.get(layout)
        if place is None:
            place = self._places[layout] = self.view(like, offset)
        return place

    def places_of(self, parts: _Parts) -> list[torch.Tensor]:
        """The places of weights that are as they were seen last."""
        places = self._places_of.get(parts.number)
        if places is None:
            places = list(map(self._place, parts.tensors, parts.offsets))
            self._places_of[parts.number] = places
        return places

    def find_views(self) -> list[torch.Tensor]:
        """What the program has kept of views of the memory, while no weight is on it."""
        own = {id(it) for it in (self.memory, *self._typed.values(), *self._places.values())}
        return [it for it in tensors_on(self._storage) if id(it) not in own]

    def leave_to_users(self) -> None:
        """End the loan."""
        self._end_loan()
        self._end_lending()

    def weights(self) -> StagedWeights:
        """The weights that are on the memory, which someone has a view of."""
        assert isinstance(self.holder, StagedWeights)
        return self.holder

    def give_home(self, tensor: torch.Tensor) -> None:
        """Give a tensor on the memory that of its home."""
        if self.holder is not None:
            self.weights().give_home(tensor)

    def note_alias(self, alias: torch.Tensor) -> None:
        """Note a tensor on the memory that counts its changes by itself."""
        if self.holder is not None:
            self.weights().note_alias(alias)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the memory."""
        return storage_address(tensor) == storage_key(self._storage)

    def has_users(self, bound: int = 0) -> bool:
        """Whether a view of it is alive beside `bound` weights, so that its contents must stay."""
        # `memory`, and the storage's own object, have it too.
        own = 2 + len(self._typed) + len(self._places) + bound
        return storage_use_count(storage_key(self._storage)) > own


def _find(reference: weakref.ref[LentSlot], view: torch.Tensor) -> Callable[[], torch.Tensor]:
    slot = reference()
    assert slot is not None
    return slot.weights().find(view)


_TORCHS_OWN = (torch.Tensor, torch.nn.Parameter)

_LOOKS_IN_VAIN = 2
"""For views of a block's weights, among all objects of Python, until it is left alone."""

_MOST_KEPT_VIEWS = 8
"""Views of a weight that are kept beyond its block's use, and moved, until it stays at home."""

_dtype: Callable[[torch.Tensor], torch.dtype] = attrgetter("dtype")
_numbers = count()


@dataclass(eq=False, slots=True)
class _Part:
    """A weight, or a tensor inside of one."""

    tensor: torch.Tensor
    offset: int
    """Place in a buffer, bytes."""
    address: int
    """Of the home that was seen last."""
    size_bytes: int
    """Its place's."""
    is_expert: bool


class _Parts:
    """Weights that are copied together, as columns: loops of C look at all of them in each use.

    They are made where torch leaves classes of tensors alone.
    """

    def __init__(self, every: list[_Part]) -> None:
        self.number = next(_numbers)
        """No others have it."""
        self.every = every
        self.tensors = [it.tensor for it in every]
        self.offsets = [it.offset for it in every]
        self.versions: list[int] = []
        """When they were fetched."""
        self._addresses = [it.address for it in every]
        self._layouts = self._find_layouts()
        self._copies: dict[int, list[Copy]] = {}
        """By address of a buffer."""

    def _find_layouts(self) -> tuple[list[Any], ...]:
        tensors = self.tensors
        sizes, strides = map(torch.Tensor.size, tensors), map(torch.Tensor.stride, tensors)
        return list(sizes), list(strides), list(map(_dtype, tensors))

    def are_at_home(self) -> bool:
        """Whether they have the homes that were seen last."""
        return addresses_of(self.tensors) == self._addresses

    def are_as_seen(self) -> bool:
        """Whether they have the layouts, too."""
        return self.are_at_home() and self._find_layouts() == self._layouts

    def copies_to(self, slot: Slot) -> list[Copy]:
        """The copies into a slot of weights that are as they were seen last.

        Homes next to each other are copied together where their places are, too.
        """
        first = slot.memory.data_ptr()
        copies = self._copies.get(first)
        if copies is None:
            copies = []
            for part in self.every:
                to, source, size_bytes = first + part.offset, part.address, part.tensor.nbytes
                last = copies[-1] if copies else Copy(0, 0, 0)
                if (last.to + last.size_bytes, last.source + last.size_bytes) == (to, source):
                    copies[-1] = Copy(last.to, last.source, last.size_bytes + size_bytes)
                else:
                    copies.append(Copy(to, source, size_bytes))
            self._copies[first] = copies  # not before: an interrupt would leave some out
        return copies


class StagedWeights(Bundle):
    """Weights of a block that come and are used together.

    The tensors keep their objects and their homes. During its uses they have the
    slot's memory; at all other times, and for whoever comes at an unexpected moment, they have
    that of their homes, with the same contents.

    Parameters
    ----------
    name
        The block's.
    tensors
        The weights, for each of which :func:`is_movable_weight` holds, with homes in host memory.
    lanes
        Where copies run.
    memory
        Tells homes.
    lock
        Held by all callers, and by the guard of the weights.
    tensor_class
        What their copies count as.
    experts
        Weights of which calls with few tokens read some only.
    """

    lane = Lane.WEIGHTS_IN

    def __init__(
        self,
        name: str,
        tensors: Iterable[torch.Tensor],
        lanes: Lanes,
        memory: StateMemory,
        lock: threading.RLock,
        tensor_class: TensorClass,
        experts: Experts | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.users: set[object] = set()
        """Calls and backward passes under way, all with the copy or all without one."""
        self.was_used = False
        """Whether the present copy has had a use."""
        self.with_experts = True
        """Whether the next copy is with tables of experts."""
        self.is_whole = False
        """Whether the present copy is of all weights, tables of experts included."""
        self.is_saved = False
        """Whether a backward pass with a graph of its own uses them, which keeps views of them."""
        self._lanes = lanes
        self._memory = memory
        self._lock = lock
        self._tensor_class = tensor_class
        self._experts = experts or Experts()
        self._held: list[_Part] = []
        """Weights that the program holds at their homes, where they are used."""
        self._homes: dict[int, torch.Tensor] = {}
        """The homes of those that may, by place in the buffer."""
        self._aliases: dict[int, list[torch.Tensor]] = {}
        """What ``.data`` has returned of those, by the same places."""
        self._looks = _LOOKS_IN_VAIN
        """Those for views that remain, each of which may find none."""
        self._kept: Counter[int] = Counter()
        """By place in the buffer, views of a weight that the program has kept beyond a use."""
        self._stream = 0
        """The stream that has waited for the copy."""
        self.size_bytes = 0
        parts: list[_Part] = []
        with Unguarded():
            for tensor in tensors:
                part = _Part(
                    tensor,
                    self.size_bytes,
                    tensor.data_ptr(),
                    tensor.nbytes,
                    id(tensor) in self._experts.ids,
                )
                parts.append(part)
                self.size_bytes += staged_bytes([part.size_bytes])
            self._set_parts(parts)
        # A guarded class equals torch's own.
        self.has_subclasses = any(type(it) not in _TORCHS_OWN for it in self.tensors)
        """Whether weights are of another class than torch's own, such as quantised ones."""
        self._copied = _Parts([])
        """Those that the present copy is of."""
        self.guard = Guard(self._settle)
        """Sees what the program does to the weights while their copy waits for its use."""
        self.cache: CachedExperts | None = None
        """Experts that stay on the device from one use to the next."""

    @property
    def is_in_use(self) -> bool:
        """Whether calls and backward passes are under way."""
        return bool(self.users)

    def _slot(self) -> LentSlot:
        assert isinstance(self.slot, LentSlot)
        return self.slot

    def make_cache(self, share: float) -> None:
        """Keep a share of the experts of each table on the device."""
        tables = []
        for table in (it for it in self.tensors if id(it) in self._experts.tables):
            cached = make_cached_table(table, int(share * len(table)), self._memory.buffer)
            if cached is not None:
                tables.append((table, cached))
        if tables:
            self.cache = CachedExperts(tables, self._lanes, self._settle)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The weights."""
        return self._parts.tensors

    def _set_parts(self, every: list[_Part]) -> None:
        self._parts = _Parts(every)
        self._without_experts = self._parts
        if any(it.is_expert for it in every):
            self._without_experts = _Parts([it for it in every if not it.is_expert])

    # ------------------------------------------------------------------ copies

    def needs_copy(self, *, with_experts: bool) -> bool:
        """Whether there is anything to copy for a use, with tables of experts or without."""
        return bool(self._to_copy(with_experts=with_experts).every)

    def _to_copy(self, *, with_experts: bool) -> _Parts:
        return self._parts if with_experts else self._without_experts

    def copy_in(self, lanes: Lanes) -> Callable[[], None]:
        """Copy the homes.

        From now on a guard sees uses of the weights by the program, and drops the copy: it may be
        about to change them. During an update the optimizer's own guard does.
        """
        self._look_at_homes()
        self._copied = copied = self._to_copy(with_experts=self.with_experts)
        self.is_whole = copied is self._parts
        self.hold()  # first: behind an interrupt no copy is without its guard
        assert self.slot is not None
        with Unguarded():
            copied.versions = list(map(version_counter, copied.tensors))
            copies = copied.copies_to(self.slot)
        return partial(lanes.copy, Lane.WEIGHTS_IN, copies, self._tensor_class)

    def _look_at_homes(self) -> None:
        """Leave alone what the program has given memory that is no home, or that is larger."""
        with Unguarded():
            if self._parts.are_as_seen():
                return
            staying = []
            addresses = addresses_of(self._parts.tensors)
            for part, address in zip(self._parts.every, addresses, strict=True):
                size_bytes = part.tensor.nbytes
                is_known = (address, size_bytes) == (part.address, part.size_bytes)
                part.address = address
                if is_known or (
                    size_bytes <= part.size_bytes
                    and is_movable_weight(part.tensor)
                    and self._memory.is_home(part.tensor)
                ):
                    staying.append(part)
            self._set_parts(staying)

    def leave_held(self) -> bool:
        """Leave what the program holds at its home, or has by another tensor, as long as it does.

        Returns whether that are others than before. Not while a copy is in use.
        """
        if not self._held and not self._kept and not has_alias(self.tensors):
            return False
        every = sorted([*self._parts.every, *self._held], key=attrgetter("offset"))
        held = [
            it
            for it in every
            if self._kept[it.offset] > _MOST_KEPT_VIEWS or has_alias((it.tensor,))
        ]
        if held == self._held:
            return False
        with Unguarded():
            self._set_parts([it for it in every if it not in held])
        self._held = held
        return True

    def give_home(self, tensor: torch.Tensor) -> None:
        """Give a weight, or another tensor on its copy, the home amid a use: it stays there."""
        with self._lock, Unguarded(), InferenceMode(False):
            if self.where is not BundleState.HERE or not self._copied.every:
                return
            number = self._number_of(tensor)
            weight, offset = self._copied.tensors[number], self._copied.offsets[number]
            home = self._homes.get(offset)
            if home is not None:
                self._return(number, home)
                del self._homes[offset]
                self._copied.versions[number] = -1  # it may change there unseen, in this use
            if tensor is not weight:
                self._move(tensor, offset, weight if home is None else home)

    def note_alias(self, alias: torch.Tensor) -> None:
        """Note what ``.data`` has returned: changes by it do not count as those of the weight."""
        if self._homes:
            offset = self._copied.offsets[self._number_of(alias)]
            self._aliases.setdefault(offset, []).append(alias)

    def _number_of(self, tensor: torch.Tensor) -> int:
        """The number, among what was copied, of the weight whose copy a tensor is on."""
        begin = int(tensor.storage_offset()) * tensor.itemsize
        return bisect_right(self._copied.offsets, begin) - 1

    def _return(self, number: int, home: torch.Tensor) -> None:
        """Give a weight its home back, with what the program has written to the copy.

        Not if the program has given the weight other memory.
        """
        copied = self._copied
        tensor, offset = copied.tensors[number], copied.offsets[number]
        if addresses_of([tensor]) != [self._slot().memory.data_ptr() + offset]:
            return
        home = _place_in(home, 0, tensor.dtype, tensor.size(), tensor.stride())
        version, aliases = version_counter(tensor), self._aliases.get(offset, ())
        if version != copied.versions[number] or any(map(version_counter, aliases)):
            home.copy_(original_data.__get__(tensor))
            copied.versions[number] = version
        original_data.__set__(tensor, home)
        for alias in aliases:
            self._move(alias, offset, home)
        self._aliases.pop(offset, None)

    def _move(self, view: torch.Tensor, offset: int, home: torch.Tensor) -> None:
        """Give a tensor on the copy of a weight the same place in the weight's home."""
        if self._slot().has(view):
            first = int(view.storage_offset()) * view.itemsize - offset
            place = _place_in(home, first, view.dtype, view.size(), view.stride())
            original_data.__set__(view, place)

    def _settle(self) -> None:
        """The program uses a weight whose copy is under way or waits for its use."""
        with self._lock:
            self.drop()

    def hold(self) -> None:
        """Guard the weights from a copy's start to its use."""
        self.guard.hold(self._copied.tensors, ())

    def drop(self) -> None:
        """Forget the copy: its slot is free. Not while it is in use."""
        self.guard.release()
        if self.users or self.slot is None:
            return
        self._unbind()  # an interrupt may have cut short the begin of a use
        super().drop()  # ahead of the slot, which may be another's from then on
        if self.slot.holder is self:  # not if an interrupt has cut short the way into it
            self.slot.holder = None
        self.slot = None
        self.was_used = self.is_whole = False

    def has_copy(self, *, with_experts: bool) -> bool:
        """Whether a copy for a use is there or under way. A whole one serves all uses."""
        return self.is_away and (self.is_whole or not with_experts)

    def has_current_copy(self, *, with_experts: bool) -> bool:
        """Whether the slot's contents, once arrived, are those of the homes."""
        copied = self._copied
        if not self.has_copy(with_experts=with_experts) or self._have_alias(copied):
            return False
        if self.guard.was_used:
            return False
        with Unguarded():
            are_known = list(map(version_counter, copied.tensors)) == copied.versions
            return are_known and copied.are_as_seen()

    def has_alias(self, *, with_experts: bool) -> bool:
        """Whether another tensor has the memory of a home, by which it may change unseen."""
        return self._have_alias(self._to_copy(with_experts=with_experts))

    def _have_alias(self, parts: _Parts) -> bool:
        homes = self._homes
        if not has_guard():  # what the program changes is not seen
            return True
        if not homes:
            return has_alias(parts.tensors)
        return has_alias([it.tensor for it in parts.every if it.offset not in homes])

    # ------------------------------------------------------------------ uses

    def begin_use(self, user: object) -> None:
        """Give the weights the slot's memory, and let the current stream wait for the copy.

        Without a copy they keep their homes until no use is under way. An error leaves no use.
        """
        if self.is_away:
            self._lanes.wait(self.arrived)
            if not self.users:
                self._bind()
        if self.cache is not None and not self.is_whole:
            self.cache.serve()
        self.users.add(user)

    def end_use(self, user: object) -> Moment:
        """Give the weights their homes back behind the last use, which the slot waits for.

        Returns the moment after the use; None where no slot has them. What an interrupt cuts short,
        another call completes.
        """
        ended: Moment = None
        if self.slot is not None:
            if len(self.users) == 1:
                self._unbind()
                if self.cache is not None and self.is_whole:
                    self.cache.serve()  # sees changes from now on, too
            ended = self._lanes.mark()
            self.slot.used.append(ended)
        self.users.discard(user)
        return ended

    def _bind(self) -> None:
        self.guard.release()
        if self.cache is not None and self.is_whole:
            self.cache.release()
        self.was_used = True
        if self.where is BundleState.COMING:  # else an interrupt has cut short the begin of a use
            self.becomes(BundleEvent.USED)
        self._stream = self._lanes.stream_key()
        copied = self._copied
        with Unguarded(), InferenceMode(False):
            places = self._slot().places_of(copied)
            homes = map(original_data.__get__, copied.tensors)
            self._homes = dict(zip(copied.offsets, homes, strict=True))
            exhaust(map(original_data.__set__, copied.tensors, places))

    def _unbind(self) -> None:
        """Give the weights their homes back, with what the block itself has written to them."""
        if self.where is not BundleState.HERE:
            return
        copied, homes = self._copied, self._homes
        tensors = copied.tensors
        bound = list(map(self._slot().memory.data_ptr().__add__, copied.offsets))
        with Unguarded(), InferenceMode(False):
            if (
                not self._aliases
                and list(map(version_counter, tensors)) == copied.versions
                and addresses_of(tensors) == bound
            ):
                exhaust(map(original_data.__set__, tensors, homes.values()))
            else:
                for number, offset in enumerate(copied.offsets):
                    home = homes.get(offset)
                    if home is not None:  # else the program holds the weight at its home
                        self._return(number, home)
            self._homes, self._aliases = {}, {}
            if self._looks and not self.is_saved and self._slot().has_users():
                self._move_views(homes)
        self.becomes(BundleEvent.KEPT)

    def _move_views(self, homes: Mapping[int, torch.Tensor]) -> None:
        """Give views that the program keeps beyond the use the memory of the homes.

        They have the weight's values for good then, and it stays at home as long as they exist.
        Those that C++ alone keeps are not found.
        """
        views = self._slot().find_views()
        for view in views:
            number = self._number_of(view)
            offset = self._copied.offsets[number]
            self._move(view, offset, homes.get(offset, self._copied.tensors[number]))
            self._kept[offset] += 1
        self._looks -= not views

    def have_views(self) -> bool:
        """Whether anything but the weights themselves has memory of the slot."""
        return self.slot is not None and self._slot().has_users(len(self._homes))

    def find(self, view: torch.Tensor) -> Callable[[], torch.Tensor]:
        """How to find the contents of a view of the slot again, wherever they are then."""
        begin = int(view.storage_offset()) * view.itemsize
        parts = self._parts
        part = parts.every[bisect_right(parts.offsets, begin) - 1]
        if view is part.tensor:
            return partial(self._now, part)
        owner, offset = owner_of(part.tensor), begin - part.offset
        return partial(self._again, owner, part, offset, view.dtype, view.size(), view.stride())

    def _now(self, part: _Part) -> torch.Tensor:
        """A weight as it is, where this stream may use it."""
        home = self._homes.get(part.offset)
        # Another stream has not waited for the copy; the home has the same contents.
        if home is not None and self._lanes.stream_key() != self._stream:
            return home
        with Unguarded():
            return original_data.__get__(part.tensor)

    def _again(
        self,
        owner: Owner,
        part: _Part,
        offset: int,
        dtype: torch.dtype,
        size: torch.Size | Sequence[int],
        stride: Sequence[int],
    ) -> torch.Tensor:
        """A view of a weight's memory, also once the program has given the weight another one."""
        tensor = owner.tensor if owner.tensor is not part.tensor else self._now(part)
        with Unguarded():
            return _place_in(tensor, offset, dtype, size, stride)


def _place_in(
    tensor: torch.Tensor,
    offset: int,
    dtype: torch.dtype,
    size: torch.Size | Sequence[int],
    stride: Sequence[int],
) -> torch.Tensor:
    """A view of a tensor's memory, from an offset in bytes on."""
    first = (tensor.storage_offset() * tensor.itemsize + offset) // dtype.itemsize
    view = torch.empty(0, dtype=dtype, device=tensor.device)
    return view.set_(original_storage(tensor), first, size, stride)
