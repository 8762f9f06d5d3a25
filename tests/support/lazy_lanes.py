"""Lanes on the CPU whose work runs late, or at random moments: a missing wait shows in the values.

A program under test is its own stream: its operators run when they are called, but for the fill of
new memory. Queued work waits until something waits for it, unless chance lets it run before.
Buffers begin as NaN.
"""

from __future__ import annotations

import ctypes
import random
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any

import torch
from lost_memory import lose_memory
from torch import nn
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from umem.core.classes import TensorClass
from umem.runtime.guard import can_guard
from umem.runtime.unguarded import PastGuards, Unguarded
from umem.streaming.stage import Copy, DeviceRoom, Lane, Lanes, StateMemory, is_whole, untraced

_Gradients = tuple[Sequence[nn.Parameter], Sequence[torch.Tensor | None]]
"""All parameters, and the gradient of each."""


@dataclass(eq=False)
class _Task:
    lane: Lane | None
    """None for the program's own stream."""
    work: Callable[[], None]
    after: Sequence[_Task]
    gradients: _Gradients
    """When the work was queued: on a GPU it is launched then."""
    uses: Sequence[torch.Tensor] = ()
    """What the lanes hold until the work has run."""
    is_done: bool = False


def _nothing() -> None:
    pass


_WORK, _GRADIENTS = attrgetter("work"), attrgetter("gradients")
_grad: Any = nn.Parameter.grad
_gradient_of: Callable[[nn.Parameter], torch.Tensor | None] = _grad.__get__

_OVER = _Task(Lane.UPDATE, _nothing, (), ([], []), is_done=True)
"""A moment of the program's own work."""


class LazyLanes(Lanes):
    """Lanes whose work is late.

    Parameters
    ----------
    model
        Has all parameters that the work may update. Only a weak reference is kept.
    eagerness
        Probability that the next work of some lane runs when there is an occasion.
    seed
        For the choice of that work.
    also
        Parameters of other models that the work may update.
    """

    def __init__(
        self, model: nn.Module, eagerness: float = 0.0, seed: int = 0, also: Iterable[Any] = ()
    ) -> None:
        self._model = weakref.ref(model)
        self._known: dict[int, Any] = {}
        self.may_update(also)
        self._parameters()
        self._lock = threading.RLock()
        """Held while work is queued and run: a GPU's lanes serve several threads."""
        self._eagerness = eagerness
        self._random = random.Random(seed)
        self._last: Callable[[], _Task | None] = lambda: None
        self._queues: dict[Lane | None, deque[_Task]] = {it: deque() for it in (*Lane, None)}
        self.captures = False
        """Whether the program's stream is captured into a graph."""
        self.waits = 0
        """Number of waits that found work to do."""
        self._waits_since = 0
        """Those since an update was queued last."""
        self.copied: Counter[tuple[Lane, TensorClass]] = Counter()
        """Bytes."""

    @property
    def open_tasks(self) -> int:
        """Work that has not run yet."""
        return sum(map(len, self._queues.values()))

    def progress(self) -> None:
        """An occasion for work to run before anything waits for it."""
        with self._lock:
            self._progress()

    def _progress(self) -> None:
        while self._random.random() < self._eagerness:
            ready = [
                queue
                for queue in self._queues.values()
                if queue and all(it.is_done for it in queue[0].after)
            ]
            if not ready:
                return
            self._run(self._random.choice(ready).popleft())

    def may_update(self, parameters: Iterable[Any]) -> None:
        """Note further parameters that the work may update."""
        self._known |= {id(it): it for it in parameters}

    def _parameters(self) -> list[nn.Parameter]:
        """All that the model has or had: an optimizer may keep one that was replaced."""
        model = self._model()
        if model is not None:
            _add_parameters(model, self._known)
        return list(self._known.values())

    def is_capturing(self) -> bool:
        """As the program says."""
        return self.captures

    def mark(self) -> _Task:
        """Behind the program's fills; its other work runs when it is called."""
        self.progress()
        fills = self._queues[None]
        return fills[-1] if fills else _OVER

    def fill(self, memory: torch.Tensor) -> None:
        """Have the program's stream fill bytes, as torch does when it is deterministic."""
        reference = weakref.ref(memory)

        def work() -> None:
            memory = reference()
            if memory is not None:
                memory.fill_(0xFF)

        self._queue(None, work, ())

    def run(
        self,
        lane: Lane,
        work: Callable[[], None],
        after: Sequence[_Task] = (),
        uses: Sequence[torch.Tensor] = (),
    ) -> _Task:
        """Queue the work."""
        assert None not in after, "a GPU's lanes wait for moments alone"
        return self._queue(lane, work, after, uses)

    def _queue(
        self,
        lane: Lane | None,
        work: Callable[[], None],
        after: Sequence[_Task],
        uses: Sequence[torch.Tensor] = (),
    ) -> _Task:
        with self._lock:
            task = _Task(lane, work, list(after), self._gradients(), uses)
            self._last = weakref.ref(task)
            self._queues[lane].append(task)
            if lane is Lane.UPDATE:
                self._waits_since = 0
            self._progress()
            return task

    def _gradients(self) -> _Gradients:
        """Those of all parameters: as the last open task has them, if they are the same."""
        parameters = self._parameters()
        gradients = [*map(_gradient_of, parameters)]
        last = self._last()
        if last is not None:
            known, of = last.gradients
            if _are_the_same(known, parameters) and _are_the_same(of, gradients):
                return last.gradients
        return parameters, gradients

    def _lose_memory(self) -> None:
        """Before work runs late: on a GPU, nothing is kept for it once it is launched."""
        every = [it for queue in self._queues.values() for it in queue]
        lose_memory(chain(map(_WORK, every), map(_GRADIENTS, every)))

    def copy(self, lane: Lane, copies: Sequence[Copy], tensor_class: TensorClass) -> None:
        """Copy now: the caller is late."""
        self.copied[lane, tensor_class] += sum(it.size_bytes for it in copies)
        for to, source, size_bytes in copies:
            ctypes.memmove(to, source, size_bytes)

    def wait(self, moment: _Task | None) -> None:
        """Run everything that the moment needs."""
        with self._lock:
            self._progress()
            if moment is not None and not moment.is_done:
                self.waits += 1
                self._waits_since += 1
                if self._waits_since in (1, 10):  # to look each time takes most of a test
                    self._lose_memory()
                self._complete(moment)

    def wait_on_stream_of(self, marked: _Task, moment: _Task | None) -> None:
        """All threads are one stream here."""
        self.wait(moment)

    def count_behind(self, marked: _Task, moment: _Task | None) -> None:
        """All threads are one stream here."""

    def leave_out(self, stream: object) -> None:
        """All threads are one stream here."""

    def finish(self, moment: _Task | None) -> None:
        """As a wait of the stream."""
        self.wait(moment)

    def _complete(self, task: _Task) -> None:
        queue = self._queues[task.lane]
        while not task.is_done:
            first = queue[0]
            for needed in first.after:
                if not needed.is_done:
                    self._complete(needed)
            if not first.is_done:
                queue.popleft()
                self._run(first)

    def _run(self, task: _Task) -> None:
        # A GPU knows of no modes.
        modes = _disable_current_modes() if _count_modes() else nullcontext()
        with modes, self._as_queued(task), untraced():
            task.work()
        task.is_done = True
        # As an event of a GPU, it keeps nothing alive.
        task.work, task.after, task.gradients, task.uses = _nothing, (), ([], []), ()

    @contextmanager
    def _as_queued(self, task: _Task) -> Iterator[None]:
        """Parameters with the gradient that they had when the work was queued."""
        parameters, queued = task.gradients
        # What has waited may be within a transform of torch.func.
        with PastGuards(), torch._C._DisableFuncTorch():
            seen: Sequence[torch.Tensor | None] = [*map(_gradient_of, parameters)]
            if not _are_the_same(seen, queued):  # most are
                every = zip(parameters, seen, queued, strict=True)
                # The program may have converted some meanwhile, whose work is over then.
                able = [each for each in every if each[1] is each[2] or _can_have(*each)]
                for parameter, now, of in able:
                    if now is not of:
                        parameter.grad = of
                parameters, seen = [it for it, _, _ in able], [it for _, it, _ in able]
            was_compiling = torch.compiler._is_compiling_flag
            torch.compiler._is_compiling_flag = False  # a compiler may be what has waited
            try:
                yield
            finally:
                torch.compiler._is_compiling_flag = was_compiling
                if not _are_the_same([*map(_gradient_of, parameters)], seen):
                    for parameter, of in zip(parameters, seen, strict=True):
                        if _gradient_of(parameter) is not of:
                            parameter.grad = of


def _count_modes() -> int:
    """To ask takes a tenth of the time in which they are switched off."""
    return torch._C._len_torch_dispatch_stack() + _len_torch_dispatch_stack_pre_dispatch()


def _are_the_same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether two lists have the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


def _can_have(parameter: nn.Parameter, *gradients: torch.Tensor | None) -> bool:
    """Whether a parameter can have these gradients.

    Work on a DTensor has taken this rank's part of it, and of its gradient, already.
    """
    return can_guard(parameter) and all(
        it is None or it.dtype == parameter.dtype for it in gradients
    )


def _add_parameters(model: nn.Module, known: dict[int, Any]) -> None:
    """Add all by ``id``: `nn.Module.parameters` takes several times as long."""
    modules = [model]
    for module in modules:
        for it in module._parameters.values():
            if it is not None:
                known[id(it)] = it
        modules += [it for it in module._modules.values() if it is not None]


def _overwrite(memory: bytearray) -> None:
    memory[:] = b"\xff" * len(memory)


class HostStateMemory(StateMemory):
    """State in host memory from `min_bytes` on, and what was placed on the "device" elsewhere.

    The "device" has room for `most_buffers`, or for any number, and gradients of `parameters`.
    Requests for memory that `refuses` holds for find none. With `lanes`, buffers are filled late.
    With `has_weights` the parameters are on the "device".
    """

    def __init__(
        self,
        min_bytes: int = 64,
        staged_bytes: int = 1 << 30,
        most_buffers: int | None = None,
        parameters: Iterable[nn.Parameter] = (),
        lanes: Lanes | None = None,
        has_weights: bool = False,
    ) -> None:
        self._parameters = list(parameters)
        self._has_weights = has_weights
        self._lanes = lanes
        self.staged_bytes = staged_bytes
        self._most_buffers = most_buffers
        self._min_bytes = min_bytes
        self._on_device: dict[int, int] = {}
        """Bytes by address, as long as the memory is in use."""
        self._homes: dict[int, bytearray] = {}
        """Memory by address, kept so that nothing else gets an address."""
        self.buffers: list[torch.Tensor] = []
        self.moved: dict[int, torch.Tensor] = {}
        """What the program has moved off the "device", by address, kept so."""
        self.refuses: Callable[[], bool] = lambda: False

    def may_stage(self, tensor: torch.Tensor) -> bool:
        """Large tensors that fill their memory."""
        return is_whole(tensor) and tensor.nbytes >= self._min_bytes

    def is_of_device(self, tensor: torch.Tensor) -> bool:
        """All that the program has not moved."""
        return tensor.data_ptr() not in self.moved

    def is_home(self, tensor: torch.Tensor) -> bool:
        """What was not placed on the device, but for gradients until they are sent home."""
        if self.was_sent_home(tensor):
            return True
        weights = self._parameters if self._has_weights else ()
        placed = chain(map(_gradient_of, self._parameters), weights)
        is_placed = any(map(is_, placed, repeat(tensor)))
        return not is_placed and tensor.data_ptr() not in self._on_device

    def place(self, tensor: torch.Tensor, *, on_device: bool) -> None:
        """Move to other memory."""
        if on_device == self.is_home(tensor) and not self.refuses():
            self._on_device.pop(tensor.data_ptr(), None)
            tensor.data = tensor.clone()
            if on_device:
                address = tensor.data_ptr()
                self._on_device[address] = tensor.nbytes
                # Freed, it may be anybody's: also where the program has replaced the tensor.
                free = self._on_device.pop
                weakref.finalize(tensor.untyped_storage(), free, address, None).atexit = False

    @property
    def device_bytes(self) -> int:
        """Bytes of state on the device."""
        return sum(self._on_device.values())

    def new_home(self, tensor: torch.Tensor, tensor_class: TensorClass) -> torch.Tensor | None:
        """Memory that is NaN as any floating point number, before its use and behind it."""
        if self.refuses():
            return None
        memory = bytearray(b"\xff" * tensor.nbytes)
        lent = memoryview(memory)  # goes with the storage
        stride = torch.empty_like(tensor, device="meta").stride()
        home = torch.frombuffer(lent, dtype=tensor.dtype).as_strided(tensor.shape, stride)
        weakref.finalize(lent, _overwrite, memory).atexit = False
        self._homes[home.data_ptr()] = memory
        return home

    def new_on_device(self, tensor: torch.Tensor, tensor_class: TensorClass) -> torch.Tensor | None:
        """Memory that is NaN, where the device has room for buffers."""
        if self._has_no_room():
            return None
        with Unguarded():
            new = torch.empty_like(tensor)
        ctypes.memset(new.data_ptr(), 0xFF, new.nbytes)
        return new

    def _has_no_room(self) -> bool:
        is_full = self._most_buffers is not None and len(self.buffers) >= self._most_buffers
        return self.refuses() or is_full

    def was_sent_home(self, tensor: torch.Tensor) -> bool:
        """Whether it has memory of :meth:`new_home`."""
        return tensor.data_ptr() in self._homes

    def block_bytes(self, size_bytes: int) -> int:
        """No more than asked for: the bytes behind belong to the C library."""
        return size_bytes

    def buffer(self, size_bytes: int) -> torch.Tensor | None:
        """Bytes that are NaN as any floating point number."""
        if self._has_no_room():
            return None
        self.buffers.append(torch.full((size_bytes,), 0xFF, dtype=torch.uint8))
        if isinstance(self._lanes, LazyLanes):
            self._lanes.fill(self.buffers[-1])
        return self.buffers[-1]


class NoRoom(DeviceRoom):
    """A device with a budget of nothing, on which nothing is."""

    budget_bytes = 0

    def take_peak_bytes(self) -> int:
        return 0

    def find_homes(self) -> None:
        pass

    def spilled_bytes(self) -> int:
        return 0

    def trim(self) -> None:
        pass


class CountedMemory(HostStateMemory):
    """Counts what is on the device."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.bytes = self.peak_bytes = 0

    def _add(self, size_bytes: int) -> None:
        self.bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def place(self, tensor: torch.Tensor, *, on_device: bool) -> None:
        if on_device == self.is_home(tensor):
            self._add(tensor.nbytes if on_device else -tensor.nbytes)
        super().place(tensor, on_device=on_device)

    def buffer(self, size_bytes: int) -> torch.Tensor | None:
        memory = super().buffer(size_bytes)
        self.buffers.clear()
        self._add(size_bytes)
        weakref.finalize(memory, self._add, -size_bytes)
        return memory
