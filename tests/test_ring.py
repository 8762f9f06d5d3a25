"""Slots, and the life of what comes to them: each state, each wait, and whose slot is taken."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lazy_lanes import HostStateMemory, LazyLanes
from streamed_programs import begin
from torch import nn

import umem
from umem.core.classes import TensorClass
from umem.streaming.stage import (
    TRANSITIONS,
    Bundle,
    BundleEvent,
    BundleState,
    Copy,
    Lane,
    Lanes,
    Ring,
    Slot,
    rehome,
)

HOME, COMING, HERE, LEAVING = BundleState


class Numbers(Bundle):
    """Some bytes with their home in a tensor."""

    lane = Lane.COPY_IN

    def __init__(self, value: int = 0) -> None:
        super().__init__()
        self.home = torch.full((64,), value, dtype=torch.uint8)
        self.size_bytes = self.home.nbytes

    def _copies(self, lanes: Lanes, lane: Lane, *, is_in: bool) -> Callable[[], None]:
        assert self.slot is not None
        to, source = self.slot.memory.data_ptr(), self.home.data_ptr()
        to, source = (to, source) if is_in else (source, to)
        copies = [Copy(to, source, self.size_bytes)]
        return partial(lanes.copy, lane, copies, TensorClass.OTHER)

    def copy_in(self, lanes: Lanes) -> Callable[[], None]:
        return self._copies(lanes, Lane.COPY_IN, is_in=True)

    def copy_out(self, lanes: Lanes) -> Callable[[], None]:
        return self._copies(lanes, Lane.COPY_OUT, is_in=False)


class StreamsOfMoments(LazyLanes):
    """Notes for whose streams moments are waited for."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.waiting: list[Any] = []

    def wait_on_stream_of(self, marked: Any, moment: Any) -> None:
        self.waiting.append(marked)
        super().wait_on_stream_of(marked, moment)


class Made:
    """A ring with bundles, on lanes that run as late as the waits allow."""

    def __init__(self, bundles: int, slots: int, most_buffers: int | None = None) -> None:
        self.lanes = StreamsOfMoments(nn.Linear(1, 1))
        self.memory = HostStateMemory(lanes=self.lanes, most_buffers=most_buffers)
        self.ring = Ring(self.memory, self.lanes)
        self.bundles = [Numbers(number) for number in range(bundles)]
        self.ring.set_capacity(slots)
        self.ring.add(self.all)

    def all(self) -> list[Numbers]:
        return self.bundles

    def fetch(self, *numbers: int) -> None:
        for number in numbers:
            self.ring.fetch(self.bundles[number], [self.lanes.mark()])

    def add_one(self, number: int) -> None:
        """A use that changes a bundle in its slot."""
        bundle = self.bundles[number]
        slot = bundle.slot
        assert slot is not None
        self.ring.use(bundle, bundle.copy_out(self.lanes))
        memory = slot.memory

        def work() -> None:
            memory.add_(1)

        slot.used = [self.lanes.run(Lane.UPDATE, work, [bundle.arrived])]

    def states(self) -> list[BundleState]:
        return [it.where for it in self.bundles]

    def values(self) -> list[int]:
        return [int(it.home[0]) for it in self.bundles]


def test_a_bundle_comes_is_used_leaves_and_is_at_home_again() -> None:
    made = Made(bundles=3, slots=2)
    made.ring.take_turns()
    assert made.states() == [HOME] * 3
    made.fetch(0, 1)
    assert made.states() == [COMING, COMING, HOME]
    made.add_one(0)
    made.add_one(1)
    assert made.states() == [HERE, HERE, HOME]
    made.fetch(2)  # it needs the slot of the first one
    assert made.states() == [LEAVING, HERE, COMING]
    made.add_one(2)
    made.ring.write_back()
    assert made.states() == [LEAVING] * 3
    assert made.values() == [0, 1, 2]  # nothing has waited yet
    made.ring.take_back()
    assert (made.states(), made.values()) == ([HOME] * 3, [1, 2, 3])
    assert made.lanes.open_tasks == 0


def test_a_copy_that_is_not_used_is_dropped_behind_its_end() -> None:
    made = Made(bundles=2, slots=1)
    made.ring.take_turns()
    made.fetch(0)
    made.ring.recall(made.bundles[0])
    assert (made.states(), made.lanes.open_tasks) == ([HOME, HOME], 0)
    made.fetch(0, 1)
    assert made.states() == [HOME, COMING]  # the second one has the slot


@pytest.mark.parametrize("event", BundleEvent)
@pytest.mark.parametrize("state", BundleState)
def test_no_event_comes_in_another_state_than_those_of_the_table(
    state: BundleState, event: BundleEvent
) -> None:
    bundle = Numbers()
    bundle.where = state
    if (state, event) in TRANSITIONS:
        bundle.becomes(event)
        assert bundle.where is not state
    else:
        with pytest.raises(KeyError):
            bundle.becomes(event)


def test_every_state_leads_home() -> None:
    reached = {HOME}
    for _ in BundleState:
        reached |= {state for (state, _), after in TRANSITIONS.items() if after in reached}
    assert reached == set(BundleState)


def test_nothing_is_copied_into_memory_before_it_was_filled() -> None:
    """Where algorithms are deterministic, torch fills new memory on the program's stream."""
    made = Made(bundles=4, slots=2)
    made.ring.set_capacity(2, temporary=1)
    made.ring.take_turns()
    made.fetch(0, 1)
    made.ring.make_temporary(1)
    assert made.states() == [COMING] * 3 + [HOME]
    beside = made.ring.room_beside(made.ring.slots[0], 64, 1.0)
    further = made.ring.add_slot()
    assert beside is not None
    assert further is not None
    for slot in (beside, further):
        copies = [Copy(slot.memory.data_ptr(), made.bundles[3].home.data_ptr(), 64)]
        work = partial(made.lanes.copy, Lane.COPY_IN, copies, TensorClass.OTHER)
        made.lanes.wait(made.lanes.run(Lane.COPY_IN, work, slot.used))
        assert slot.memory.unique().tolist() == [3]
    for number in range(3):
        slot_of = made.bundles[number].slot
        assert slot_of is not None
        assert slot_of.memory.unique().tolist() == [number]


def test_memory_is_given_back_on_the_stream_that_owns_it() -> None:
    """It is another one than the current where the program has changed its stream since."""
    made = Made(bundles=3, slots=2)
    made.ring.set_capacity(2, temporary=1)
    made.ring.take_turns()
    made.fetch(0, 1)
    made.ring.make_temporary(1)
    first, second = made.ring.slots
    beside = made.ring.room_beside(first, 64, 1.0)
    assert beside is not None

    def gives_back(slot: Slot, free: Callable[[], object]) -> bool:
        made.lanes.waiting.clear()
        free()
        return any(it is slot.made for it in made.lanes.waiting)

    assert not gives_back(beside, lambda: made.ring.room_beside(first, 32, 1.0))
    assert gives_back(beside, lambda: made.ring.room_beside(first, 128, 1.0))
    assert gives_back(made.ring.temporary[0], made.ring.free_temporary)
    assert gives_back(second, partial(made.ring.shrink, 1, made.bundles[:1]))
    assert gives_back(first, made.ring.take_back)


def test_a_temporary_slot_takes_the_place_of_the_usual_one_for_a_time() -> None:
    made = Made(bundles=4, slots=2)
    made.ring.set_capacity(2, temporary=1)
    made.ring.take_turns()
    first, second = made.ring.slots
    assert [it.slot for it in made.bundles] == [first, second, first, first]
    made.ring.make_temporary(1)
    (further,) = made.ring.temporary
    assert [it.slot for it in made.bundles] == [first, second, further, first]
    made.add_one(2)
    made.ring.free_temporary()
    assert (made.values(), made.ring.temporary) == ([0, 1, 3, 3], [])
    assert [it.slot for it in made.bundles] == [first, second, first, first]


@pytest.mark.parametrize("most_buffers", [0, 1])
def test_bundles_share_the_slots_that_there_is_room_for(most_buffers: int) -> None:
    made = Made(bundles=3, slots=2, most_buffers=most_buffers)
    made.ring.take_turns()
    assert len(made.ring.slots) == most_buffers
    assert all((it.slot is None) == (most_buffers == 0) for it in made.bundles)
    assert made.ring.is_current == (most_buffers > 0)  # else the next step asks again


def test_an_empty_slot_is_taken_first_then_the_one_that_is_wanted_last() -> None:
    made = Made(bundles=4, slots=3)
    ring, bundles = made.ring, made.bundles
    ring.fill(64)
    for bundle in bundles[:3]:
        slot = ring.take(bundles)
        assert slot is not None
        assert slot.holder is None
        bundle.bind(slot)
        ring.fetch(bundle, [made.lanes.mark()])
    for wanted in itertools.permutations(bundles[:3]):
        assert ring.take(wanted) is None
        assert ring.take(wanted, takes_wanted=True) is wanted[-1].slot
        assert ring.take(wanted[:2]) is wanted[-1].slot
    made.add_one(1)  # nothing takes the slot of what is in use
    assert ring.take(bundles[:2], takes_wanted=True) is bundles[2].slot
    assert ring.take([bundles[0], bundles[2], bundles[1]], takes_wanted=True) is bundles[2].slot


def test_a_ring_shrinks_as_far_as_its_slots_are_idle() -> None:
    made = Made(bundles=2, slots=2)
    made.ring.take_turns()
    made.fetch(0, 1)
    made.add_one(0)
    made.ring.shrink(0, made.bundles)
    assert [it.holder for it in made.ring.slots] == [made.bundles[0]]
    assert made.states() == [HERE, HOME]


def test_pieces_of_state_go_through_all_states_in_a_step() -> None:
    run = begin(2)
    staged = run.training.step.units.staged()

    def states() -> list[BundleState]:
        return [it.where for it in staged]

    run.backward()
    assert states() == [COMING] * 2 + [LEAVING] * (len(staged) - 2)
    run.optimizer.step()
    assert states() == [LEAVING] * (len(staged) - 2) + [HERE] * 2
    run.model.stem.register_forward_pre_hook(lambda *_: seen.append(states()))
    seen: list[list[BundleState]] = []
    run.model(run.batch())
    assert seen == [[LEAVING] * len(staged)]
    umem.join()
    assert states() == [HOME] * len(staged)


def test_a_tensor_stays_where_it_is_if_its_new_memory_is_refused() -> None:
    memory, tensor = HostStateMemory(most_buffers=1), torch.arange(64.0)
    expected, before = tensor.clone(), tensor.data_ptr()
    assert rehome(tensor, memory, TensorClass.WEIGHTS, on_device=False)  # it is at home
    assert tensor.data_ptr() == before
    assert rehome(tensor, memory, TensorClass.WEIGHTS, on_device=True)
    moved = tensor.data_ptr()
    assert moved != before
    memory.refuses = lambda: True
    assert not rehome(tensor, memory, TensorClass.WEIGHTS, on_device=True)
    assert tensor.data_ptr() == moved
    assert torch.equal(tensor, expected)
