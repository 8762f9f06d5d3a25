"""Ctrl-C leaves nothing of umem's to the program: no mode, stream, device, class or hook.

Each by real signals at thousands of moments, as Python looks for them at places of its own choice.
"""

from __future__ import annotations

import ctypes
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any
from weakref import WeakSet

import pytest
import torch
from faults import Signal
from lazy_lanes import LazyLanes
from torch import nn

from umem import torch_compat
from umem.capture.live import SavedTensorHooks
from umem.core.classes import TensorClass
from umem.runtime import cuda_streams
from umem.runtime._native import Allocator, ClassSetting, Config
from umem.runtime.guard import Guard, guard_of
from umem.runtime.torch_hooks import saved_tensors
from umem.streaming.gradients import ClippedGradients
from umem.torch_compat import InferenceMode

INTERRUPTS = 1000


def interrupt(make_act: Callable[[], Callable[[], object]], check: Callable[[], None]) -> None:
    """Interrupt an act at random, or not, and check what it leaves; some thousand times."""
    chance, met = random.Random(0), 0
    lengths: list[int] = []
    while met < INTERRUPTS:
        act = make_act()
        # The first ones only show how long it takes.
        longest = 2 * int(statistics.median(lengths)) if len(lengths) > 20 else 1 << 20
        fault = Signal(chance.randint(1, max(longest, 2)))
        try:
            with fault:
                act()
        except KeyboardInterrupt:
            met += 1
        else:
            lengths = [*lengths[-100:], fault.moments]
        check()


def _has_gradients() -> None:
    assert torch.is_grad_enabled()


# ------------------------------------------------------------------ grad mode


@pytest.mark.slow
def test_grad_mode_is_the_programs() -> None:
    def act() -> None:
        with InferenceMode(torch.is_inference_mode_enabled()):
            torch.set_grad_enabled(False)

    interrupt(lambda: act, _has_gradients)


@pytest.mark.parametrize("is_inference", [False, True])
def test_inference_mode_stays_in_the_block(is_inference: bool) -> None:
    with torch.inference_mode(is_inference), torch.no_grad():
        with InferenceMode(torch.is_inference_mode_enabled()):
            torch.set_grad_enabled(True)
            assert torch.is_inference_mode_enabled() is is_inference
            assert torch.is_grad_enabled()
        assert torch.is_inference_mode_enabled() is is_inference
        assert not torch.is_grad_enabled()


@pytest.mark.slow
def test_clipping() -> None:
    lanes = LazyLanes(nn.Linear(1, 1), 1.0)
    clipped = ClippedGradients(lanes)
    gradients = [torch.ones(4), torch.ones(4)]

    def act() -> None:
        clipped.run("aten::_foreach_norm", [gradients, 2.0, None])
        clipped.norms(gradients)

    interrupt(lambda: act, _has_gradients)


@pytest.mark.slow
def test_a_gradient_is_multiplied_once_by_each_factor() -> None:
    """However often an interrupt cuts that short, and it begins anew."""
    lanes = LazyLanes(nn.Linear(1, 1), 1.0)
    clipped = ClippedGradients(lanes)
    gradient = torch.ones(4)

    def act() -> Callable[[], None]:
        gradient.fill_(1.0)
        clipped.keep(gradient, None, lanes.mark(), lanes.mark(), lanes.stream_key())
        for factor in (2.0, 3.0):
            clipped.run("aten::_foreach_mul_", [[gradient], factor])
        return partial(clipped.use, gradient)

    def check() -> None:
        clipped.use(gradient)
        assert gradient.tolist() == [6.0] * 4
        _has_gradients()

    interrupt(act, check)


# ------------------------------------------------------------------ guards of tensors


@pytest.mark.slow
def test_a_guard_sees_all_uses_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever an interrupt cuts its hold or its release short, another call completes it."""
    monkeypatch.setattr("umem.runtime.guard._guards", WeakSet())  # no test before this one has any
    uses: list[None] = []
    guard = Guard(lambda: uses.append(None))
    tensors = [torch.ones(2), torch.ones(2)]
    ways: list[Callable[[torch.Tensor], object]] = [
        torch.neg,
        torch.Tensor.detach,
        lambda it: it.data_ptr(),
        lambda it: it.untyped_storage(),
        lambda it: it.data,
    ]

    def act() -> None:
        guard.hold(tensors)
        guard.release()

    act()
    before = dict(vars(torch.Tensor))

    def check() -> None:
        assert guard.is_on or not any(guard_of(it) is guard for it in tensors)
        guard.hold(tensors)
        assert all(guard_of(it) is guard for it in tensors)
        uses.clear()
        for way in ways:
            way(tensors[1])
        assert len(uses) == len(ways)
        guard.release()
        assert not guard.is_on
        assert not any(guard_of(it) is guard for it in tensors)
        assert vars(torch.Tensor) == before

    check()
    interrupt(lambda: act, check)


# ------------------------------------------------------------------ streams and devices


@dataclass(frozen=True)
class Stream:
    """A stream of a card that is not there."""

    stream_id: int
    device_index: int = 0
    device_type: int = 1


class Cards:
    """Two cards, of which the first is the current one."""

    def __init__(self, notes: IO[bytes]) -> None:
        self._notes = notes
        # A function of C, as torch's.
        self.set_stream = partial(ctypes.CDLL(None).dprintf, notes.fileno(), b"%d %d %d\n")
        self.reset()

    def reset(self) -> None:
        self._notes.seek(0)
        self._notes.truncate()
        self.set_stream(9, 1, 1)
        self.set_stream(7, 0, 1)

    def current(self, device: int | None = None) -> Stream:
        """The current stream of a device, by default of the current one."""
        self._notes.seek(0)
        sets = [Stream(*map(int, line.split())) for line in self._notes.readlines()]
        wanted = sets[-1].device_index if device is None else device
        return next(it for it in reversed(sets) if it.device_index == wanted)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [Stream(3), Stream(4, device_index=1)], ids=["own", "other"])
def test_the_stream_and_the_device_are_the_programs(
    stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on: Any = cuda_streams.run_on
    cards = Cards((tmp_path / "notes").open("a+b", buffering=0))
    monkeypatch.setitem(vars(torch_compat), "set_stream", cards.set_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", cards.current)
    seen = []

    def work() -> str:
        seen.append(cards.current())
        return "result"

    act = partial(run_on, stream, work)
    assert act() == "result"
    assert seen == [stream]

    def check() -> None:
        assert cards.current() == Stream(7)
        assert cards.current(1) == Stream(9, 1)
        cards.reset()

    check()
    interrupt(lambda: act, check)


# ------------------------------------------------------------------ classes of tensors


@pytest.mark.slow
def test_the_class_of_tensors_is_the_programs() -> None:
    allocator = Allocator.on_host(Config([ClassSetting()] * len(TensorClass)))
    entered = allocator.class_override(TensorClass.OPTIMIZER_STATE.number)

    def act() -> None:
        with entered:
            pass

    def check() -> None:
        with pytest.raises(ValueError, match="begun no such block"):
            entered.__exit__()

    interrupt(lambda: act, check)


# ------------------------------------------------------------------ hooks on saved tensors


@pytest.mark.slow
def test_hooks_on_saved_tensors_are_known_or_gone() -> None:
    hooks = SavedTensorHooks(lambda _: None, lambda _: None)

    def act() -> None:
        hooks.push()
        hooks.pop()

    def check() -> None:
        if saved_tensors.innermost() is not None:
            assert hooks.pop()
        assert saved_tensors.innermost() is None
        hooks.push()  # as it would not where it knew of one more
        assert saved_tensors.innermost() is not None
        hooks.pop()

    interrupt(lambda: act, check)
