"""Slots on the device, and the bundles of tensors that come to them, are used there, and leave.

A bundle is what one copy carries: a piece of optimizer state, with what its update has at home of
weights and gradients, or the weights of a block. Its life:

1. HOME: the tensors are in host memory, and anybody may use them. :meth:`Ring.fetch` queues their
   copies into a slot.
2. COMING: the slot has copies, or will have them at the moment `arrived`. The homes still count, so
   that the copies may be dropped at any time. Whoever is about to change a home waits until it was
   read (:meth:`Ring.recall`).
3. HERE: the copies are in use, and only the slot has what the use writes. For a piece of state
   :meth:`Ring.use` notes the work that copies it home. Weights of a block write home themselves
   when the use ends, and keep their copies: they are COMING again.
4. LEAVING: :meth:`Ring.write_back` has queued the copies home, before anything else needs the slot
   or the homes. After the moment `returned` the bundle is at HOME.

Pieces of state have slots in turn, as each step uses them in the same order: their views are made
once. Blocks take the slot of whoever is wanted last, by the order that their passes have come in.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from operator import itemgetter
from types import MappingProxyType

import torch

from umem.streaming.plan.step_timing import FIRST_SLOTS
from umem.streaming.stage.homes import StateMemory
from umem.streaming.stage.lanes import Lane, Lanes, Moment
from umem.torch_compat import InferenceMode

__all__ = ["TRANSITIONS", "Bundle", "BundleEvent", "BundleState", "Ring", "Slot"]


class BundleState(StrEnum):
    """Where a bundle is."""

    HOME = "home"
    COMING = "coming"
    """And at home, with the same contents."""
    HERE = "here"
    LEAVING = "leaving"


class BundleEvent(StrEnum):
    """What changes the state of a bundle."""

    FETCHED = "fetched"
    """Its copy into a slot is queued."""
    DROPPED = "dropped"
    """The copy is not used: something else needs the slot, or may change the home."""
    USED = "used"
    """Its use in the slot begins."""
    KEPT = "kept"
    """Its use has ended, with the same contents at home."""
    WRITTEN_BACK = "written back"
    """Its copy home is queued."""
    RETURNED = "returned"
    """The program's stream has waited for that."""


TRANSITIONS: Mapping[tuple[BundleState, BundleEvent], BundleState] = MappingProxyType({
    (BundleState.HOME, BundleEvent.FETCHED): BundleState.COMING,
    (BundleState.LEAVING, BundleEvent.FETCHED): BundleState.COMING,
    (BundleState.COMING, BundleEvent.DROPPED): BundleState.HOME,
    (BundleState.COMING, BundleEvent.USED): BundleState.HERE,
    (BundleState.HERE, BundleEvent.KEPT): BundleState.COMING,
    (BundleState.HERE, BundleEvent.WRITTEN_BACK): BundleState.LEAVING,
    (BundleState.LEAVING, BundleEvent.RETURNED): BundleState.HOME,
})  # fmt: skip
"""The state after each event. No other event comes in a state."""


class Slot:
    """Memory on the device, which bundles have by turns.

    Parameters
    ----------
    memory
        The bytes.
    made
        The moment when the memory was there, on the stream that owns it.
    """

    def __init__(self, memory: torch.Tensor, made: Moment) -> None:
        self.memory = memory
        self.made = made
        self.used: list[Moment] = [made]
        """The moments after the last copies and uses. What comes next waits for them."""
        self.holder: Bundle | None = None
        """The bundle that was fetched last."""
        self.beside: Slot | None = None
        """Further memory, for weights and gradients that come with state; None without any."""
        self._typed: dict[torch.dtype, torch.Tensor] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes, with those beside it."""
        return self.memory.nbytes + (0 if self.beside is None else self.beside.size_bytes)

    def elements(self, dtype: torch.dtype, offset: int) -> tuple[torch.Tensor, int]:
        """All of the memory as elements of a type, and the number of the one at a byte."""
        typed = self._typed.get(dtype)
        if typed is None:
            whole = self.memory[: self.memory.nbytes // dtype.itemsize * dtype.itemsize]
            with InferenceMode(False):  # later uses may be outside of the program's
                typed = self._typed[dtype] = whole.view(dtype)
        return typed, offset // dtype.itemsize

    def view(self, like: torch.Tensor, offset: int) -> torch.Tensor:
        """The memory from a byte on, in the layout of a tensor."""
        typed, first = self.elements(like.dtype, offset)
        return typed.as_strided(like.size(), like.stride(), typed.storage_offset() + first)

    def has_users(self) -> bool:
        """Whether the program has a view of it, so that its contents must stay."""
        return False

    def leave_to_users(self) -> None:
        """Leave the memory to whoever has a view of it."""

    def let_go(self, lanes: Lanes) -> None:
        """Leave the memory to whoever asks next, behind copies and uses."""
        self.leave_to_users()
        for moment in self.used:
            lanes.wait(moment)
            lanes.wait_on_stream_of(self.made, moment)
        if self.beside is not None:
            self.beside.let_go(lanes)


class Bundle(ABC):
    """Tensors that come to the device, are used there, and leave together."""

    lane: Lane
    """The lane of its copies in."""
    size_bytes: int
    """The least size of its slot."""

    def __init__(self) -> None:
        self.where = BundleState.HOME
        self.slot: Slot | None = None
        """Where the bundle comes to; None without a slot."""
        self.turn: Slot | None = None
        """The usual slot; another one than `slot` while that is a temporary one."""
        self.before: Bundle | None = None
        """The bundle that has the slot next in a backward pass."""
        self.arrived: Moment = None
        """The moment after the copy into the slot."""
        self.returned: Moment = None
        """The moment after the last copy home, or the last use at home; None before any."""

    @property
    def is_away(self) -> bool:
        """Whether a copy is in a slot, or on the way."""
        return self.where is not BundleState.HOME

    @property
    def is_in_use(self) -> bool:
        """Whether the slot's contents may change now."""
        return self.where is BundleState.HERE

    @property
    def may_come(self) -> bool:
        """Whether it has a slot and is to come, and stays as it is until its use."""
        return self.slot is not None and self.where is not BundleState.COMING

    @abstractmethod
    def copy_in(self, lanes: Lanes) -> Callable[[], None]:
        """Get ready to come into the slot. Returns the work of its lane that copies."""

    def becomes(self, event: BundleEvent) -> None:
        """Change the state."""
        self.where = TRANSITIONS[self.where, event]

    def bind(self, slot: Slot | None) -> None:
        """Have a slot, or None."""
        self.slot = slot

    def drop(self) -> None:
        """Do not use the copy, which reads the homes still. Nothing in use is dropped."""
        if self.where is BundleState.COMING:
            self.becomes(BundleEvent.DROPPED)


class Ring:
    """Slots of one size, and all that moves into them and out.

    Parameters
    ----------
    memory
        The device's memory.
    lanes
        Where copies run.
    make_slot
        Makes a slot of memory that was there at a moment.
    """

    def __init__(
        self,
        memory: StateMemory,
        lanes: Lanes,
        make_slot: Callable[[torch.Tensor, Moment], Slot] = Slot,
    ) -> None:
        self.lock = threading.RLock()
        """Held by all users while they change bundles or slots."""
        self.capacity = FIRST_SLOTS
        """Number of slots that are wanted."""
        self.slots: list[Slot] = []
        self.temporary: list[Slot] = []
        """Further ones, each for one bundle of a step."""
        self.here: dict[Bundle, Callable[[], None]] = {}
        """Bundles that only their slots have, in the order of their uses, and what copies each
        home."""
        self.is_current = False
        """Whether the slots are for the users' bundles as they are now, and as many as wanted."""
        self._memory, self._lanes, self._make_slot = memory, lanes, make_slot
        self._slot_bytes = 0
        self._temporary = 0
        """Number of bundles that may have temporary slots."""
        self._makes_temporary = self._has_room_beside = True
        """Whether the device had room so far. To ask for what there is not costs page-locked
        memory."""
        self._users: list[weakref.WeakMethod[Callable[[], Sequence[Bundle]]]] = []

    # ------------------------------------------------------------------ slots

    @property
    def slots_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.memory.nbytes for slot in (*self.slots, *self.temporary))

    @property
    def device_bytes(self) -> int:
        """Bytes of all slots, and of what is beside them."""
        return sum(slot.size_bytes for slot in (*self.slots, *self.temporary))

    def set_capacity(self, count: int, temporary: int = 0) -> None:
        """Set the number of slots, which :meth:`fill` makes.

        Behind the bundles that have them first, so many may have `temporary` ones.
        """
        self.capacity, self._temporary = count, temporary
        self._makes_temporary = self._has_room_beside = True
        self.is_current = False

    def fill(self, slot_bytes: int, most: int | None = None) -> None:
        """Make the slots, `most` at most, as many as there is room for."""
        self._slot_bytes = slot_bytes
        self.slots = self._new(slot_bytes, self.capacity if most is None else most)

    def _new(self, size_bytes: int, count: int = 1) -> list[Slot]:
        """New slots, as far as the device has room."""
        with InferenceMode(False):
            found = [self._memory.buffer(size_bytes) for _ in range(count)]
        every = [memory for memory in found if memory is not None]
        # After the memory is taken: this stream may fill it, and has waited for earlier owners.
        made = self._lanes.mark() if every else None
        return [self._make_slot(memory, made) for memory in every]

    def add_slot(self) -> Slot | None:
        """Make one more slot; None where the device has no room."""
        self.slots += (added := self._new(self._slot_bytes))
        return added[0] if added else None

    def shrink(self, count: int, wanted: Collection[Bundle]) -> None:
        """Give all but so many slots back, as far as they are idle: first what is not wanted."""
        while len(self.slots) > count:
            slot = self.take(wanted, takes_wanted=True)
            if slot is None:
                return
            if slot.holder is not None:
                slot.holder.drop()
            self.slots.remove(slot)
            slot.let_go(self._lanes)

    def take(self, wanted: Collection[Bundle], *, takes_wanted: bool = False) -> Slot | None:
        """Find an idle slot: an empty one, or the one whose bundle is wanted last.

        Parameters
        ----------
        wanted
            Bundles in the order in which they are wanted.
        takes_wanted
            Whether the slot of one of these may be taken.
        """
        ranks = {bundle: rank for rank, bundle in enumerate(wanted)}
        idle: list[tuple[int, Slot]] = []
        for slot in self.slots:
            if slot.holder is None:
                if not slot.has_users():
                    return slot
                idle.append((len(ranks) + 1, slot))
            elif not slot.holder.is_in_use:
                idle.append((ranks.get(slot.holder, len(ranks)), slot))
        idle.sort(key=itemgetter(0), reverse=True)
        for rank, slot in idle:
            if rank < len(ranks) and not takes_wanted:
                return None
            if not slot.has_users():
                return slot
            for new in self._new(self._slot_bytes):  # a view keeps the contents, and the memory
                if slot.holder is not None:
                    slot.holder.drop()
                slot.leave_to_users()
                self.slots[self.slots.index(slot)] = new
                return new
        return None

    # ------------------------------------------------------------------ users, by turns

    def add(self, bundles: Callable[[], Sequence[Bundle]]) -> None:
        """Let a user have slots: a method that returns its bundles, in the order of a step."""
        self._users.append(weakref.WeakMethod(bundles))

    def leave(self, bundles: Callable[[], Sequence[Bundle]], *, is_over: bool = False) -> None:
        """Forget a user's bundles; safe at any time. With `is_over` the user never comes back.

        The next step makes the slots anew.
        """
        self.is_current = False
        if self.users == [bundles]:
            self.slots, self.temporary = [], []
        if is_over:
            self._users = [user for user in self._users if user() not in (None, bundles)]

    @property
    def users(self) -> list[Callable[[], Sequence[Bundle]]]:
        """The users, in the order of their first steps."""
        return [user for reference in self._users if (user := reference()) is not None]

    def place_of(self, bundles: Callable[[], Sequence[Bundle]]) -> int:
        """Place of a user's first bundle among all of them."""
        before = self.users
        return sum(len(user()) for user in before[: before.index(bundles)])

    def take_turns(self) -> None:
        """Make slots for all bundles of the users, and give them out in turn."""
        self.take_back()
        every = [user() for user in self.users]
        sizes = [bundle.size_bytes for bundles in every for bundle in bundles]
        wanted = min(self.capacity, len(sizes))
        self.fill(max(sizes, default=0), wanted)
        first, count = 0, len(self.slots)
        for bundles in every if count else ():
            for number, bundle in enumerate(bundles):
                bundle.before = bundles[number - count] if number >= count else None
                if number >= count + self._temporary:
                    number -= self._temporary
                bundle.turn = self.slots[(first + number) % count]
                bundle.bind(bundle.turn)
            first += len(bundles)
        # Where the device has no room for one, the next step asks again.
        self.is_current = bool(self.slots) or not wanted

    def lend(self, bundles: Sequence[Bundle]) -> None:
        """Let bundles of no user have slots for one use, as far as they are large enough."""
        for number, bundle in enumerate(bundles):
            self.send_home(bundle)
            slot = self.slots[number % len(self.slots)] if self.slots else None
            fits = slot is not None and slot.memory.nbytes >= bundle.size_bytes
            bundle.bind(slot if fits else None)

    def take_back(self) -> None:
        """Let the stream wait until all bundles are at home, and free all slots."""
        self.is_current = False  # first: an interrupt leaves them to be made anew
        self.write_back()
        every = [bundle for user in self.users for bundle in user()]
        for slot in (*self.slots, *self.temporary):
            slot.let_go(self._lanes)
        for bundle in every:
            self.send_home(bundle)
            bundle.turn = None
            bundle.bind(None)
        self.slots, self.temporary = [], []

    def make_temporary(self, count: int) -> None:
        """Make the first temporary slots, so many in all, and fetch the bundles they are for."""
        with self.lock:
            if not (self.slots and self._makes_temporary):
                return
            for bundle in self._with_temporary(count):
                if bundle.slot is not bundle.turn or not bundle.may_come:
                    continue
                self.write_back(bundle.slot)
                made = self._new(bundle.size_bytes)
                if not made:
                    self._makes_temporary = False
                    return
                self.temporary += made
                bundle.bind(made[0])
                self.fetch(bundle, ())

    def free_temporary(self, count: int | None = None) -> None:
        """Free the first temporary slots, so many in all, when they are left; None for all.

        The program's stream waits for that.
        """
        with self.lock:
            for bundle in self._with_temporary(count):
                slot = bundle.slot
                if slot is None or slot is bundle.turn:
                    continue
                self.write_back(slot)
                slot.let_go(self._lanes)
                bundle.drop()
                bundle.bind(bundle.turn)
                self.temporary.remove(slot)

    def _with_temporary(self, count: int | None) -> list[Bundle]:
        """The first of the bundles that may have temporary slots, in the order of a step."""
        if not self._temporary:
            return []
        first = len(self.slots)
        last = self._temporary if count is None else min(count, self._temporary)
        return [bundle for user in self.users for bundle in user()][first : first + last]

    def room_beside(self, slot: Slot, size_bytes: int, share: float) -> Slot | None:
        """What is beside a slot, of so many bytes or more; None where the device has no room.

        Parameters
        ----------
        slot
            The slot.
        size_bytes
            What is needed now.
        share
            How much more the slot may be asked for, 1 or more.
        """
        beside = slot.beside
        if beside is not None and beside.memory.nbytes >= size_bytes:
            return beside
        if not self._has_room_beside:
            return None
        if beside is not None:
            beside.let_go(self._lanes)
        slot.beside = beside = None  # the old memory goes before more is asked for
        slot.beside = next(iter(self._new(int(share * size_bytes))), None)
        self._has_room_beside = slot.beside is not None
        return slot.beside

    # ------------------------------------------------------------------ the life of a bundle

    def fetch(self, bundle: Bundle, after: Iterable[Moment]) -> None:
        """Copy a bundle into its slot: HOME or LEAVING → COMING.

        Parameters
        ----------
        bundle
            A bundle with a slot, where nothing is in use.
        after
            The moments after what the program has done with the homes.
        """
        slot = bundle.slot
        assert slot is not None
        self.write_back(slot)
        if slot.holder is not None and slot.holder.slot is slot:
            slot.holder.drop()
        slot.holder = bundle
        work = bundle.copy_in(self._lanes)
        moments = [*after, *slot.used]
        if bundle.returned is not None:
            moments.append(bundle.returned)
        bundle.arrived = self._lanes.run(bundle.lane, work, moments)
        slot.used = [bundle.arrived]
        bundle.becomes(BundleEvent.FETCHED)

    def recall(self, bundle: Bundle) -> None:
        """Drop a copy behind which the program may use the homes: COMING → HOME."""
        if bundle.where is BundleState.COMING:
            self._lanes.wait(bundle.arrived)  # the copy reads the homes
            if bundle.slot is not None:
                self._lanes.wait_on_stream_of(bundle.slot.made, bundle.arrived)
            bundle.drop()

    def use(self, bundle: Bundle, home: Callable[[], None]) -> None:
        """Begin a use that leaves the contents in the slot: COMING → HERE.

        `home` is the work that copies them home. The caller sets the slot's last use.
        """
        self.here[bundle] = home
        bundle.becomes(BundleEvent.USED)

    def write_back(self, slot: Slot | None = None) -> None:
        """Copy home what only a slot has, before anything needs either; None for all: → LEAVING.

        State leaves all slots at the first block of the next forward pass, and not in the step. A
        program that waits for the device between the two, as DeepSpeed does behind each step and
        when its engine is called, does not wait for these copies.
        """
        if not self.here:
            return
        with self.lock:
            for bundle in [some for some in self.here if slot is None or some.slot is slot]:
                owner = bundle.slot
                if owner is not None and bundle.where is BundleState.HERE:
                    moment = self._lanes.run(Lane.COPY_OUT, self.here[bundle], owner.used)
                    owner.used, bundle.returned = [moment], moment
                    bundle.becomes(BundleEvent.WRITTEN_BACK)
                del self.here[bundle]  # not before: what an interrupt cuts short is done again

    def send_home(self, bundle: Bundle) -> None:
        """Let the current stream wait until the program may use the homes: → HOME."""
        if bundle.where is BundleState.HERE:
            self.write_back(bundle.slot)
        self.recall(bundle)
        if bundle.returned is not None:
            self._lanes.wait(bundle.returned)
        if bundle.where is BundleState.LEAVING:
            bundle.becomes(BundleEvent.RETURNED)
