"""Where a model's weights are under a budget: at its first call, and when calls need more or less.

The "device" is the CPU: its memory counts what was placed there. Values stay equal throughout.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from lazy_lanes import HostStateMemory, LazyLanes, NoRoom
from streamed_programs import WIDTH, Net
from torch import nn

from umem.offloading import ActivationStore
from umem.streaming.stage import Lane
from umem.streaming.weights import ModelWeights

MIB = 1 << 20
LAYER_BYTES = 4 * WIDTH * WIDTH
SLACK_BYTES = 256 * MIB
"""Of a budget, which plans leave free."""


@dataclass
class Room(NoRoom):
    """A device whose budget, and whose peaks beside weights and buffers, a test sets."""

    budget_bytes: int
    peaks: list[int] = field(default_factory=list)
    """Next peaks; without any, the last one again."""
    last: int = 0
    placed: Any = lambda: 0
    spilled: int = 0

    def take_peak_bytes(self) -> int:
        if self.peaks:
            self.last = self.peaks.pop(0)
        return self.last + int(self.placed())

    def spilled_bytes(self) -> int:
        return self.spilled

    def trim(self) -> None:
        self.spilled = 0


class DeviceMemory(HostStateMemory):
    """All weights begin on the device, but for some that were born at home."""

    def __init__(self, model: nn.Module, born_at_home: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.at_home = {id(it) for name, it in model.named_parameters() if name in born_at_home}
        self._addresses = {it.data_ptr() for it in model.parameters() if id(it) not in self.at_home}

    def is_home(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() not in self._addresses

    def new_home(self, tensor: torch.Tensor, tensor_class: Any) -> torch.Tensor | None:
        home = super().new_home(tensor, tensor_class)
        if home is not None:
            self._addresses.discard(home.data_ptr())  # another weight may have had it
        return home

    def new_on_device(self, tensor: torch.Tensor, tensor_class: Any) -> torch.Tensor | None:
        new = super().new_on_device(tensor, tensor_class)
        if new is not None:
            self._addresses.add(new.data_ptr())
        return new

    def put_on_device(self, tensor: torch.Tensor) -> None:
        """Count the memory of a tensor of the program's as the device's."""
        self._addresses.add(tensor.data_ptr())


class CountedMemory(DeviceMemory):
    """Counts the homes of weights at a time, and what the device had at most."""

    def __init__(self, model: nn.Module, born_at_home: tuple[str, ...]) -> None:
        super().__init__(model, born_at_home)
        self._model = model
        self.home_bytes: list[int] = []
        self.device_bytes_seen: list[int] = []
        self.moves = ""

    def _count(self, *, more_at_home: int, more_on_device: int) -> None:
        self.moves += "i" if more_on_device else "o"
        home_bytes = sum(it.nbytes for it in self._model.parameters() if self.is_home(it))
        self.home_bytes.append(home_bytes + more_at_home)
        self.device_bytes_seen.append(on_device(self._model, self) + more_on_device)

    def new_home(self, tensor: torch.Tensor, tensor_class: Any) -> torch.Tensor | None:
        self._count(more_at_home=tensor.nbytes, more_on_device=0)
        return super().new_home(tensor, tensor_class)

    def new_on_device(self, tensor: torch.Tensor, tensor_class: Any) -> torch.Tensor | None:
        self._count(more_at_home=0, more_on_device=tensor.nbytes)
        return super().new_on_device(tensor, tensor_class)


class FailingLanes(LazyLanes):
    """Lanes that fail once, at a copy of weights."""

    def __init__(self, model: nn.Module, copies: int) -> None:
        super().__init__(model, 0.5)
        self.copies = copies

    def run(self, lane: Lane, *arguments: Any) -> Any:
        if lane is Lane.WEIGHTS_IN:
            self.copies -= 1
            if not self.copies:
                raise RuntimeError("the driver is gone")
        return super().run(lane, *arguments)


def make(
    model: nn.Module,
    budget_bytes: int,
    born_at_home: tuple[str, ...] = (),
    lanes: LazyLanes | None = None,
    share: float = 1.0,
) -> tuple[ModelWeights, Room, DeviceMemory]:
    room = Room(SLACK_BYTES + budget_bytes)
    memory = DeviceMemory(model, born_at_home)
    made = ModelWeights(
        model,
        lanes or LazyLanes(model, 0.5),
        memory,
        room,
        ActivationStore("cpu"),
        min_bytes=LAYER_BYTES // 2,
        share=share,
    )
    weight_bytes = sum(it.nbytes for it in model.parameters())
    room.placed = lambda: weight_bytes + made.streamed.buffer_bytes
    return made, room, memory


def on_device(model: nn.Module, memory: DeviceMemory) -> int:
    return sum(it.nbytes for it in model.parameters() if not memory.is_home(it))


def call(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        y: torch.Tensor = model(torch.arange(2.0 * WIDTH).view(2, WIDTH) / WIDTH)
    return y


WEIGHT_BYTES = sum(it.nbytes for it in Net(8).parameters())
SMALL_BYTES = WEIGHT_BYTES - 9 * LAYER_BYTES
"""Of what is smaller than a layer, and stays on the device."""


def test_a_model_that_fits_is_left_alone() -> None:
    model = Net(8)
    made, _, memory = make(model, WEIGHT_BYTES + 300 * MIB)
    for _ in range(3):
        call(model)
    assert made.status().plans == 0
    assert on_device(model, memory) == WEIGHT_BYTES
    assert made.streamed.counts.fetched == 0


@pytest.mark.parametrize("room_layers", [4, 6])
def test_what_has_no_room_is_streamed(room_layers: int) -> None:
    model = Net(8)
    expected = call(model)
    # The first plan leaves 256 MiB for what calls make.
    room_bytes = SMALL_BYTES + room_layers * LAYER_BYTES
    made, _, memory = make(model, 256 * MIB + room_bytes)
    for _ in range(5):
        assert torch.equal(call(model), expected)
    status = made.status()
    assert status.plans == 1
    assert on_device(model, memory) + status.buffer_bytes == room_bytes
    assert status.counts.late == 1
    # As many layers as fit beside two buffers of one layer are resident.
    assert status.streamed_bytes == (9 - (room_layers - 2)) * LAYER_BYTES
    assert len(memory.buffers) == 2


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_share_of_the_weights_stays_where_all_have_room(share: float) -> None:
    model = Net(8)
    expected = call(model)
    made, _, memory = make(model, WEIGHT_BYTES + 300 * MIB, share=share)
    for _ in range(3):
        assert torch.equal(call(model), expected)
    status = made.status()
    # What is smaller than a layer stays, whatever the share.
    layers = int(max(0, share * WEIGHT_BYTES - SMALL_BYTES) // LAYER_BYTES)
    assert on_device(model, memory) == status.resident_bytes == SMALL_BYTES + layers * LAYER_BYTES
    assert (status.plans, len(memory.buffers)) == (1, 2)


def test_what_was_born_on_the_host_comes_to_the_device_where_it_has_room() -> None:
    model = Net(8)
    expected = call(model)
    born = ("layers.1.weight", "layers.1.bias", "norm.weight")
    made, _, memory = make(model, WEIGHT_BYTES + 300 * MIB, born)
    assert torch.equal(call(model), expected)
    assert on_device(model, memory) == WEIGHT_BYTES
    assert made.status().plans == 1


def test_calls_that_need_more_have_weights_leave() -> None:
    model = Net(8)
    expected = call(model)
    made, room, memory = make(model, 400 * MIB)
    assert torch.equal(call(model), expected)
    assert made.status().plans == 0
    room.last = 400 * MIB - 2 * LAYER_BYTES
    assert torch.equal(call(model), expected)
    status = made.status()
    assert status.plans == 1
    assert status.other_bytes > room.last
    assert on_device(model, memory) < WEIGHT_BYTES


def test_calls_of_the_forward_itself_are_seen() -> None:
    """After a call of the model, too."""

    class Called(Net):
        """Its forward is wrapped, that of other nets is not."""

    model = Called(8)
    expected = call(model)
    made, room, memory = make(model, 400 * MIB)
    call(model)
    room.last = 400 * MIB - 2 * LAYER_BYTES
    for _ in range(2):
        with torch.no_grad():
            y = model.forward(torch.arange(2.0 * WIDTH).view(2, WIDTH) / WIDTH)
        assert torch.equal(y, expected)
    assert made.status().plans == 1
    assert on_device(model, memory) < WEIGHT_BYTES
    room.last = 500 * MIB
    assert torch.equal(call(model), expected)
    assert made.status().other_bytes > room.last


def test_calls_that_find_holes_alone_have_weights_leave() -> None:
    """By its size, what they make has room; where it had none, it was made on the host."""
    model = Net(8)
    expected = call(model)
    made, room, _ = make(model, 256 * MIB + SMALL_BYTES + 6 * LAYER_BYTES)
    call(model)
    first = made.status()
    room.spilled = LAYER_BYTES
    assert torch.equal(call(model), expected)
    second = made.status()
    assert second.plans == 2
    assert second.resident_bytes < first.resident_bytes
    assert second.other_bytes >= first.other_bytes + LAYER_BYTES
    call(model)
    assert made.status().plans == 2


def test_weights_come_back_when_calls_need_less_for_long() -> None:
    model = Net(8)
    expected = call(model)
    made, room, memory = make(model, 400 * MIB)
    call(model)
    room.last = 500 * MIB
    call(model)
    assert on_device(model, memory) < WEIGHT_BYTES
    room.last = 10 * MIB
    for _ in range(40):
        assert torch.equal(call(model), expected)
    assert on_device(model, memory) == WEIGHT_BYTES
    assert made.status().streamed_bytes == 0
    assert made.status().buffer_bytes == 0


def test_weights_that_were_moved_away_are_placed_as_before_when_they_are_back() -> None:
    model: Any = Net(8)
    model.register_buffer("mask", torch.ones(WIDTH, WIDTH))
    expected = call(model)
    made, _, memory = make(model, 256 * MIB + SMALL_BYTES + 6 * LAYER_BYTES)
    call(model)
    before, had = made.status(), on_device(model, memory)
    assert had < WEIGHT_BYTES
    assert before.buffer_bytes
    buffers = [weakref.ref(it) for it in (*memory.buffers, model.mask)]
    memory.buffers.clear()

    def move(tensor: torch.Tensor, *, is_back: bool) -> torch.Tensor:
        new = tensor.clone()
        if is_back:  # to the device, all of it
            memory.moved.pop(new.data_ptr(), None)
            memory.put_on_device(new)
        else:
            memory.moved[new.data_ptr()] = new.detach()
        return new

    model._apply(partial(move, is_back=False))
    made.let_go(None)
    assert [it() for it in buffers] == [None] * len(buffers)
    assert torch.equal(call(model), expected)  # away, it is not placed
    assert made.status().buffer_bytes == 0
    model._apply(partial(move, is_back=True))
    assert on_device(model, memory) == WEIGHT_BYTES
    assert torch.equal(call(model), expected)
    assert on_device(model, memory) == had
    after = made.status()
    assert (after.plans, after.buffer_bytes) == (before.plans, before.buffer_bytes)
    assert after.streamed_bytes == before.streamed_bytes


def test_what_stays_elsewhere_is_left_there_and_the_others_are_streamed() -> None:
    model = Net(8)
    expected = call(model)
    made, _, memory = make(model, 256 * MIB + SMALL_BYTES + 6 * LAYER_BYTES)
    call(model)
    buffers = len(memory.buffers)
    moved: Any = model.layers[7].weight
    moved.data = moved.data.clone()
    memory.moved[moved.data_ptr()] = moved.detach()
    for _ in range(3):
        made.let_go(None)
        assert torch.equal(call(model), expected)
        assert made.status().buffer_bytes
    assert moved.data_ptr() in memory.moved
    assert len(memory.buffers) == buffers + 2  # once: nothing has moved since


class WithTable(Net):
    """Begins with an embedding."""

    def __init__(self) -> None:
        super().__init__(4)
        self.table = nn.Embedding(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.table(x.long().remainder(64)).mean(1))


def test_a_table_is_read_at_home_before_anything_is_streamed() -> None:
    model = WithTable()
    expected = call(model)
    weight_bytes = sum(it.nbytes for it in model.parameters())
    made, _, memory = make(model, weight_bytes + 256 * MIB - LAYER_BYTES)
    assert torch.equal(call(model), expected)
    assert memory.is_home(model.table.weight)
    assert (made.status().in_place_bytes, made.status().streamed_bytes) == (64 * WIDTH * 4, 0)


def test_weights_that_an_optimizer_updates_past_the_guard_are_not_streamed() -> None:
    model = Net(8)
    made, _, _ = make(model, 256 * MIB + 4 * LAYER_BYTES)
    expected = call(model)
    assert made.status().streamed_bytes
    made.exclude(model.parameters())
    assert torch.equal(call(model), expected)
    assert made.status().streamed_bytes == 0


def test_two_blocks_weight_is_never_streamed() -> None:
    model = Net(8)
    shared: Any = model.layers[0].weight
    model.layers[7].weight = shared
    expected = call(model)
    made, _, memory = make(model, 256 * MIB)
    assert torch.equal(call(model), expected)
    assert not memory.is_home(shared)
    assert made.status().streamed_bytes


def test_a_training_under_a_budget_changes_no_bit() -> None:
    def train(budget_bytes: int | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Net(8)
        if budget_bytes is not None:
            made, room, _ = make(model, budget_bytes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        seen = []
        for step in range(6):
            if budget_bytes is not None:
                room.last = 150 * step * MIB
            loss = model(torch.randn(4, WIDTH)).square().mean()
            loss.backward()
            if budget_bytes is not None:
                made.streamed.step_begins()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
        if budget_bytes is not None:
            assert made.status().plans
            assert made.streamed.counts.fetched
        return [*seen, *(it.detach().clone() for it in model.parameters())]

    stock, streamed = train(None), train(300 * MIB)
    assert all(map(torch.equal, stock, streamed))


def test_a_model_that_gets_other_weights_is_told() -> None:
    model = Net(8)
    made, _, _ = make(model, 256 * MIB + 4 * LAYER_BYTES)
    call(model)
    assert made.is_current
    model.layers[3] = nn.Linear(WIDTH, WIDTH)
    assert not made.is_current


def test_weights_of_another_device_are_left_alone() -> None:
    model = Net(8)
    expected = call(model)
    model.unused = nn.Linear(64, 64, device="meta")
    made, _, _ = make(model, 256 * MIB + 4 * LAYER_BYTES)
    assert torch.equal(call(model), expected)
    assert model.unused.weight.device.type == "meta"
    assert made.status().streamed_bytes


@pytest.mark.parametrize("copies", [1, 2, 5, 12, 17])
def test_an_error_of_a_copy_leaves_all_weights_at_home(
    copies: int, caplog: pytest.LogCaptureFixture
) -> None:
    def run(model: nn.Module) -> list[torch.Tensor]:
        seen = []
        for step in range(4):
            y = model(torch.ones(2, WIDTH) * step)
            y.square().mean().backward()
            seen += [y.detach(), call(model)]
        return [*seen, *(it.grad for it in model.parameters() if it.grad is not None)]

    torch.manual_seed(0)
    stock = run(Net(8))
    torch.manual_seed(0)
    model = Net(8)
    lanes = FailingLanes(model, copies)
    made, _, memory = make(model, 256 * MIB + 4 * LAYER_BYTES, lanes=lanes)
    assert all(map(torch.equal, run(model), stock))
    assert "the driver is gone" in caplog.text
    buffers = [(it.data_ptr(), it.data_ptr() + it.nbytes) for it in memory.buffers]
    for it in model.parameters():
        assert type(it) is nn.Parameter
        assert not any(begin <= it.data_ptr() < end for begin, end in buffers)
    assert not made.streamed.is_in_use


def test_weights_are_exchanged_by_turns() -> None:
    """A model that was loaded in order: its first layers are on the device, its last at home."""
    model = Net(layers=32)
    names = [name for name, it in model.named_parameters() if it.nbytes >= LAYER_BYTES]
    born = tuple(names[len(names) // 2 :])
    before = [it.detach().clone() for it in model.parameters()]
    weights, _, _ = make(model, 256 * MIB + 20 * LAYER_BYTES, born)
    counted = CountedMemory(model, born)
    weights._memory = weights.streamed._memory = counted
    begun_bytes = on_device(model, counted)
    homes_bytes = sum(it.nbytes for it in model.parameters()) - begun_bytes
    call(model)
    assert weights.status().streamed_bytes > 0
    assert all(map(torch.equal, before, model.parameters()))
    # One more at a time on either side, beyond what leaves for good.
    left_bytes = begun_bytes - on_device(model, counted)
    assert max(counted.home_bytes) <= homes_bytes + max(0, left_bytes) + 2 * LAYER_BYTES
    assert max(counted.device_bytes_seen) <= begun_bytes + LAYER_BYTES
    assert "oio" in counted.moves
    weights.close()  # what counts holds the model, and a finalizer of `weights` holds what counts


class RawGraph:
    """The class in C++ under ``torch.cuda.CUDAGraph``."""

    def capture_begin(self) -> None:
        pass


@pytest.mark.parametrize("is_captured", [True, False])
def test_what_a_capture_reads_stays(monkeypatch: pytest.MonkeyPatch, is_captured: bool) -> None:
    """A graph's replays read weights at the addresses of its capture."""
    monkeypatch.setattr(torch._C, "_CUDAGraph", RawGraph)
    model = Net(8)
    expected = call(model)
    lanes = LazyLanes(model, 0.5)
    made, room, _ = make(model, WEIGHT_BYTES + 300 * MIB, lanes=lanes)
    call(model)
    layers: Any = model.layers
    read, other = layers[3].weight, layers[4].weight
    address, other_address = read.data_ptr(), other.data_ptr()
    torch._C._CUDAGraph().capture_begin()
    lanes.captures = is_captured
    torch.lerp(read, read, 0.5)
    lanes.captures = False
    torch.lerp(other, other, 0.5)  # behind the capture
    room.last = WEIGHT_BYTES + 300 * MIB  # all have to leave
    for _ in range(3):
        assert torch.equal(call(model), expected)
    assert made.status().plans == 1
    assert (read.data_ptr() == address) == is_captured
    assert other.data_ptr() != other_address
