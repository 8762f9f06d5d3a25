"""A program moves weights and state off the device, and back: nothing is held meanwhile."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pairs import pairs
from streamed_programs import BACK, EAGERNESS, TEMPORARY, UNITS, Program, begin, compare

from umem.core.classes import TensorClass
from umem.runtime._native import Allocator, ClassSetting, Config
from umem.runtime.giving_back import let_go
from umem.streaming.stage import CudaStateMemory

WAYS: dict[str, dict[str, Any]] = {
    "state": {},
    "state that is partly resident": {"resident": frozenset(["stem", "layers.1", "head"])},
    "temporary slots": {"temporary": TEMPORARY, "clips": False},
    "weights": {"streams_weights": True},
    "gradients": {"copied_gradients": UNITS, "returning": BACK},
    "the host's updates": {"hosts": UNITS, "copied_gradients": UNITS},
    "updates in the backward pass": {"in_backward": True, "clips": False, "plain": 3},
    "activations": {"recomputes": True},
}


class Move:
    """Moves to memory that is not the device's, and back.

    Parameters
    ----------
    replaces
        Whether state gets other tensors, instead of other memory.
    moves
        "model" and "state", in the order in which they leave.
    device
        As of :func:`let_go`.
    """

    def __init__(
        self,
        *,
        replaces: bool,
        moves: tuple[str, ...] = ("model", "state"),
        device: torch.device | None = None,
    ) -> None:
        self._replaces, self._moves, self._device = replaces, moves, device
        self.held: list[int] = []
        """Bytes of buffers, and of replaced state, that were alive while all was away."""

    def __call__(self, program: Program) -> None:
        if program.in_backward:
            program.optimizer.zero_grad()  # gradients are freed, and may not be moved
        gone: list[Callable[[], torch.Tensor | None]] = []
        if not program.is_stock:
            gone = [weakref.ref(it) for it in program.memory.buffers]
            program.memory.buffers.clear()
        for what in self._moves:
            self._move(program, what, gone, is_back=False)
        if not program.is_stock:
            let_go(self._device)
            if program.weights is not None:
                program.weights.let_go(self._device)  # of no model that umem has found
            self.held.append(sum(it.nbytes for find in gone if (it := find()) is not None))
            assert program.training.status().slots_bytes == 0
        for what in self._moves:
            self._move(program, what, [], is_back=True)

    def _move(self, program: Program, what: str, gone: list[Any], *, is_back: bool) -> None:
        move = partial(_moved, program, is_back=is_back)
        if what == "model":
            program.model._apply(move)
            return
        for values in program.optimizer.state.values():
            for name, value in values.items():
                if value.numel() > 1 and self._replaces:
                    gone.append(weakref.ref(value))
                    values[name] = move(value)
                elif value.numel() > 1:
                    value.data = move(value.data)
                del value


def _moved(program: Program, tensor: torch.Tensor, *, is_back: bool) -> torch.Tensor:
    """A copy; the other place of a CPU is what the program's memory says."""
    new = tensor.clone()
    if not program.is_stock:
        program.memory.moved.pop(new.data_ptr(), None)
        if not is_back:
            program.memory.moved[new.data_ptr()] = new.detach()
    return new


@pytest.mark.slow
@pytest.mark.parametrize(("way", "replaces", "eagerness"), pairs([*WAYS], [False, True], EAGERNESS))
def test_nothing_is_held_and_all_bits_are_equal(way: str, replaces: bool, eagerness: float) -> None:
    move = Move(replaces=replaces)
    run = compare(move, eagerness, **WAYS[way])
    assert move.held == [0, 0, 0]
    assert run.training.counts.streamed > 3
    assert run.training.status().slots_bytes > 0 or way == "the host's updates"


@pytest.mark.slow
@pytest.mark.parametrize("moves", [("model",), ("state",), ("state", "model")])
def test_slots_go_whichever_part_is_moved(moves: tuple[str, ...]) -> None:
    move = Move(replaces=True, moves=moves)
    compare(move, 0.5, temporary=TEMPORARY)
    assert move.held == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_held_while_a_gpu_is_paused(way: str) -> None:
    move = Move(replaces=False, moves=(), device=torch.device("cpu"))
    run = compare(move, 0.5, **WAYS[way])
    assert move.held == [0, 0, 0]
    assert run.training.counts.streamed > 3


def test_what_has_not_moved_stays_in_its_slots() -> None:
    run = begin(2)
    slots = run.training.step.units.ring.slots
    let_go()
    let_go(torch.device("meta"))
    assert run.training.step.units.ring.slots is slots
    assert slots


def test_state_that_comes_back_to_the_host_counts_as_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The budget has put it there, as of the class of whatever ran then."""
    settings = [ClassSetting(kind="pinned") for _ in TensorClass]
    allocator = Allocator.on_host(Config(settings), 0, 1)
    with allocator.class_override(TensorClass.ACTIVATIONS.number):
        address = allocator.malloc(4096)
    tensor = torch.frombuffer((ctypes.c_char * 4096).from_address(address), dtype=torch.float32)
    memory = CudaStateMemory(torch.device("cpu"), allocator, 1, 1)
    monkeypatch.setattr(memory, "is_home", lambda _: True)
    memory.place(tensor, on_device=False)
    assert tensor.data_ptr() == address
    ((_, _, _, number, _, kind),) = allocator.live_blocks()
    assert (number, kind) == (TensorClass.OPTIMIZER_STATE.number, "pinned")


def test_between_an_update_in_the_backward_pass_and_its_step_nothing_goes() -> None:
    run = begin(3, in_backward=True, clips=False)
    run.optimizer.zero_grad()
    run.backward()
    assert any(it.ahead for it in run.training.step.units)
    let_go(torch.device("cpu"))
    run.optimizer.step()
    assert run.training.counts.ahead > 0
    assert not run.training.is_closed
