"""Outputs that a program keeps move to host memory: no value changes, whatever the program does.

Copies run late, and the memory that an output leaves is overwritten, so that a read of memory that
was left too early, or filled too late, shows in the values.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lazy_lanes import LazyLanes
from torch import nn

import umem
from umem.capture.live import find_blocks
from umem.runtime.torch_hooks.modules import hook_calls
from umem.streaming.weights import KeptOutputs

WIDTH, ROWS, LAYERS = 16, 8, 6


class Point(nn.Module):
    """Hands on what it gets, as a hook point does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.point = Point()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.point(x + self.down(torch.tanh(self.up(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class HostMemory:
    """Stands in for page-locked memory beside a GPU. Memory that is left is overwritten."""

    def __init__(self) -> None:
        self.reserved: dict[int, torch.Tensor] = {}
        self.refuses = False

    def reserve(self, size_bytes: int) -> int | None:
        if self.refuses:
            return None
        memory = torch.full((size_bytes,), 0xFF, dtype=torch.uint8)
        self.reserved[memory.data_ptr()] = memory
        return memory.data_ptr()

    def give_back(self, address: int) -> None:
        self.reserved.pop(address).fill_(0xFF)

    def move(self, storage: torch.UntypedStorage, address: int) -> None:
        size_bytes = storage.nbytes()
        ctypes.memset(storage.data_ptr(), 0xFF, size_bytes)
        storage.resize_(0)
        storage.resize_(size_bytes)
        ctypes.memmove(storage.data_ptr(), address, size_bytes)
        self.give_back(address)


class Room:
    """A device of which a call lacks as much as the test says."""

    budget_bytes = 1 << 30

    def __init__(self) -> None:
        self.spilled = 0
        self.trims = 0

    def find_homes(self) -> None:
        pass

    def take_peak_bytes(self) -> int:
        return 0

    def spilled_bytes(self) -> int:
        return self.spilled

    def trim(self) -> None:
        self.trims += 1
        self.spilled = 0


class Setting:
    """A model of which the program keeps each layer's outputs."""

    def __init__(self, missing_bytes: int = 1 << 20) -> None:
        self.model = Net()
        self.lanes = LazyLanes(self.model)
        self.memory, self.room = HostMemory(), Room()
        self.missing_bytes = missing_bytes
        self.outputs = KeptOutputs(
            self.model,
            find_blocks(self.model, None),
            torch.device("cpu"),
            self.lanes,
            self.memory,
            self.room,
            min_bytes=1,
        )
        hook_calls(
            self.model,
            lambda *_: self.outputs.begin_call(),
            lambda _, failed: self.outputs.end_call(failed=failed),
        )
        self.cache: list[torch.Tensor] = []
        for layer in self.model.layers:
            for module in layer.modules():
                module.register_forward_hook(self.keep)

    def keep(self, _module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        self.cache.append(output.detach())
        self.room.spilled += self.missing_bytes  # what is cached serves later calls
        self.missing_bytes = 0

    def call(self, seed: int) -> list[torch.Tensor]:
        """Logits and all that is kept."""
        self.cache = []
        with torch.no_grad():
            logits = self.model(batch(seed))
        return [logits, *self.cache]

    def learn(self) -> None:
        """Two calls: one that lacks room, and one in which the outputs are learned."""
        for seed in (1, 2):
            assert bits(self.call(seed)) == bits(plain(seed))


def batch(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def plain(seed: int) -> list[torch.Tensor]:
    """What a program gets without umem."""
    setting = Setting()
    setting.outputs.close()
    return setting.call(seed)


def bits(tensors: list[torch.Tensor]) -> list[bytes]:
    return [it.numpy().tobytes() for it in tensors]


@pytest.fixture
def setting() -> Iterator[Setting]:
    made = Setting()
    made.learn()
    yield made
    made.outputs.close()
    assert made.memory.reserved == {}


def test_memory_goes_back_on_the_stream_that_owns_it(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is another one than the current where the program has changed its stream since."""
    marked: list[Any] = []
    waiting: list[Any] = []
    mark, wait = setting.lanes.mark, setting.lanes.wait_on_stream_of

    def note_mark() -> Any:
        marked.append(mark())
        return marked[-1]

    def note_wait(of: Any, moment: Any) -> None:
        waiting.append(of)
        wait(of, moment)

    monkeypatch.setattr(setting.lanes, "mark", note_mark)
    monkeypatch.setattr(setting.lanes, "wait_on_stream_of", note_wait)
    setting.call(3)
    assert setting.outputs.moved > 0
    assert waiting == marked


def test_kept_outputs_move_with_their_values(setting: Setting) -> None:
    for seed in range(3, 6):
        assert bits(setting.call(seed)) == bits(plain(seed))
    # Of each layer, the outputs of two linear modules and the sum: the point hands on the latter.
    assert setting.outputs.moved == 3 * 3 * LAYERS
    assert setting.lanes.waits > 0


def test_as_much_moves_as_has_no_room() -> None:
    kept_bytes = LAYERS * ROWS * 4 * (2 * WIDTH + WIDTH + WIDTH)
    setting = Setting(missing_bytes=kept_bytes // 2)
    setting.learn()
    assert bits(setting.call(3)) == bits(plain(3))
    few = setting.outputs.moved
    assert 0 < few < 3 * LAYERS
    setting.missing_bytes = kept_bytes // 4  # the next call still lacks some
    assert bits(setting.call(4)) == bits(plain(4))
    assert bits(setting.call(5)) == bits(plain(5))
    assert setting.outputs.moved > 3 * few


def test_nothing_moves_where_the_device_has_room() -> None:
    setting = Setting(missing_bytes=0)
    setting.learn()
    setting.call(3)
    assert setting.outputs.moved == 0
    assert setting.room.trims == 0


def test_an_output_that_is_changed_on_its_way_stays(setting: Setting) -> None:
    def change(_module: nn.Module, _args: Any, _output: Any) -> None:
        setting.cache[0].mul_(2)

    handle = setting.model.layers[1].register_forward_hook(change)
    expected = plain(3)
    expected[1].mul_(2)
    before = setting.outputs.moved
    assert bits(setting.call(3)) == bits(expected)
    assert setting.outputs.moved == before + 3 * LAYERS - 1
    handle.remove()


def test_an_output_that_is_held_on_its_way_stays(setting: Setting) -> None:
    def export(_module: nn.Module, _args: Any, _output: Any) -> None:
        addresses.append(setting.cache[0].data_ptr())
        umem.hold(setting.cache[0])

    addresses: list[int] = []
    handle = setting.model.layers[1].register_forward_hook(export)
    before = setting.outputs.moved
    assert bits(setting.call(3)) == bits(plain(3))
    assert setting.outputs.moved == before + 3 * LAYERS - 1
    assert addresses == [setting.cache[0].data_ptr()]
    handle.remove()


def test_outputs_that_are_dropped_give_their_room_back(setting: Setting) -> None:
    with torch.no_grad():
        handle = setting.model.layers[2].register_forward_hook(lambda *_: setting.cache.clear())
        setting.cache = []
        logits = setting.model(batch(3))
    handle.remove()
    assert bits([logits]) == bits(plain(3)[:1])
    assert setting.outputs.moved == 3 * (LAYERS - 2)  # those of the first layer were there already


def test_calls_with_gradients_and_of_inference_mode_are_left_alone(setting: Setting) -> None:
    setting.model(batch(3)).sum().backward()
    with torch.inference_mode():
        setting.model(batch(3))
    assert setting.outputs.moved == 0


def test_outputs_of_inference_mode_get_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    setting = Setting()
    for seed in range(1, 6):
        setting.cache = []
        setting.missing_bytes = 1 << 20
        with torch.inference_mode():
            logits = setting.model(batch(seed))
        assert bits([logits, *setting.cache]) == bits(plain(seed))
    assert setting.outputs.moved == 0
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "torch.no_grad()" in record.getMessage()


def test_an_error_in_the_model_leaves_everything_in_place(setting: Setting) -> None:
    def stop(*_: Any) -> None:
        raise KeyError("stop")

    handle = setting.model.layers[4].register_forward_hook(stop)
    with pytest.raises(KeyError):
        setting.call(3)
    handle.remove()
    kept = list(setting.cache)
    assert bits(kept) == bits(plain(3)[1 : 1 + len(kept)])
    assert bits(setting.call(4)) == bits(plain(4))


def test_a_host_without_memory_leaves_them_on_the_device(setting: Setting) -> None:
    setting.memory.refuses = True
    assert bits(setting.call(3)) == bits(plain(3))
    assert setting.outputs.moved == 0


def test_a_stream_that_waits_ends_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listeners: list[Callable[[int], None]] = []

    def on_wait(function: Callable[[int], None]) -> Callable[[], None]:
        listeners.append(function)
        return listeners.clear

    setting = Setting()
    monkeypatch.setattr(setting.lanes, "on_wait", on_wait)
    setting.learn()
    listeners[0](setting.lanes.stream_key())
    assert bits(setting.call(3)) == bits(plain(3))
    moved = setting.outputs.moved
    assert moved > 0
    with caplog.at_level(logging.INFO, "umem"):
        listeners[0](7)
    assert "another stream may read them" in caplog.text
    assert bits(setting.call(4)) == bits(plain(4))
    assert setting.outputs.moved == moved
    assert listeners == []
