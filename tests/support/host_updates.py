"""Kinds of steps to prove, and a device that is computed in numpy."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import Optimizer

from umem.streaming.host_share import (
    Ahead,
    Decay,
    DeviceOptimizer,
    Elements,
    First,
    Form,
    HostSpan,
    Hyperparameters,
    Powers,
    Second,
    StepKind,
    Weight,
    constants,
    kind_of,
)

CASES: Mapping[str, tuple[Any, dict[str, Any]]] = {
    "fused AdamW": (torch.optim.AdamW, {"fused": True, "weight_decay": 0.1}),
    "fused AdamW, betas 0.9, 0.95": (
        torch.optim.AdamW,
        {"fused": True, "weight_decay": 0.1, "betas": (0.9, 0.95)},
    ),
    "fused AdamW that maximizes": (torch.optim.AdamW, {"fused": True, "maximize": True}),
    "fused Adam": (torch.optim.Adam, {"fused": True}),
    "fused Adam with decay": (torch.optim.Adam, {"fused": True, "weight_decay": 0.1}),
    "foreach AdamW": (torch.optim.AdamW, {"foreach": True, "weight_decay": 0.1}),
    "foreach AdamW, betas 0.3, 0.95": (
        torch.optim.AdamW,
        {"foreach": True, "weight_decay": 0.1, "betas": (0.3, 0.95)},
    ),
    "foreach Adam with decay": (torch.optim.Adam, {"foreach": True, "weight_decay": 0.1}),
    "fused SGD": (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    "fused SGD with all": (
        torch.optim.SGD,
        {"fused": True, "momentum": 0.9, "weight_decay": 0.1, "dampening": 0.2},
    ),
    "fused SGD, Nesterov": (
        torch.optim.SGD,
        {"fused": True, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    ),
    "foreach SGD with all": (
        torch.optim.SGD,
        {"foreach": True, "momentum": 0.9, "weight_decay": 0.1, "dampening": 0.2},
    ),
    "foreach SGD, Nesterov": (
        torch.optim.SGD,
        {"foreach": True, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    ),
}
"""Optimizers and their arguments, by name."""


def case_of(
    name: str, dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[Optimizer, Hyperparameters, StepKind | None]:
    """Make the optimizer of a case, its hyperparameters, and its kind of step."""
    kind, arguments = CASES[name]
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=dtype))
    optimizer: Any = kind([parameter], lr=1e-2, **arguments)
    given = Hyperparameters(optimizer.param_groups[0], 1, **settings)
    return optimizer, given, kind_of(optimizer, given, dtype)


def all_cases() -> Iterator[tuple[str, tuple[Optimizer, Hyperparameters, StepKind | None]]]:
    """All cases, and some of them in other circumstances."""
    for name in CASES:
        yield name, case_of(name)
    for name in ("fused AdamW", "fused Adam with decay", "fused SGD with all"):
        yield f"{name}, bfloat16", case_of(name, torch.bfloat16)
        yield f"{name}, scaled", case_of(name, grad_scale=1024.0)
    yield "the first step of SGD", case_of("fused SGD, Nesterov", has_average=False)


NOT_A_NUMBER = np.uint32(0x7FFFFFFF)


def fma(a: Any, b: Any, c: Any) -> Any:
    """Fused multiply-add of float32, in float64: rounded to odd, and then to float32."""
    product = np.multiply(a, b, dtype=np.float64)  # exact: 48 bits
    c = np.asarray(c, np.float64)
    total = product + c
    virtual = total - product
    rest = (product - (total - virtual)) + (c - virtual)
    bits = total.view(np.int64)
    # Towards the rest of what was rounded, if the last bit is even: one up or down in magnitude.
    away = np.where((rest > 0) == (total > 0), 1, -1)
    inexact = np.isfinite(total) & np.isfinite(rest) & (rest != 0) & (bits & 1 == 0)
    return np.where(inexact, bits + away, bits).view(np.float64).astype(np.float32)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))
    return (np.where(np.isnan(values), NOT_A_NUMBER, rounded) >> 16).astype(np.uint16)


def from_bfloat16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.uint32) << 16).view(np.float32)


def numbered(values: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(values), NOT_A_NUMBER, values.view(np.uint32)).view(np.float32)


def chosen(by: Any, of: Mapping[Any, Callable[[], Any]]) -> Any:
    return of[by]()


def update(form: Form, c: Mapping[str, Any], elements: Elements, *, is_bfloat16: bool) -> Elements:
    """The formulas of a form, in numpy. Constants are as of the native library's."""
    x, g, m, v = map(from_bfloat16, elements) if is_bfloat16 else elements.copy()
    given = {"b1": 0, "o1": 0, "b2": 0, "o2": 0, "rate": 0, "root": 1, "eps": 0, "decay": 0, **c}
    b1, o1, b2, o2, rate, root, eps, decay = (np.float32(it) for it in list(given.values())[:8])
    kept = elements.gradient
    with np.errstate(all="ignore"):
        for factor in c.get("factors", ()):
            g = g * np.float32(factor)
            g = from_bfloat16(to_bfloat16(g)) if is_bfloat16 else numbered(g)
        if c.get("scale") is not None:
            g = numbered(g / np.float32(c["scale"]))
            kept = to_bfloat16(g) if is_bfloat16 else g
        if c.get("negates"):
            g = -g
        match form.decay:
            case Decay.WEIGHT_FUSED:
                x = fma(-decay, x, x)
            case Decay.WEIGHT:
                x = x - decay * x
            case Decay.SCALED:
                x = x * decay
            case Decay.GRADIENT_FUSED:
                g = fma(decay, x, g)
            case Decay.GRADIENT:
                g = g + decay * x
        m = chosen(
            form.first,
            {
                First.NESTED: lambda: fma(b1, m, fma(-b1, g, g)),
                First.LEFT: lambda: fma(b1, m, o1 * g),
                First.RIGHT: lambda: fma(o1, g, b1 * m),
                First.SEPARATE: lambda: b1 * m + o1 * g,
                First.LERP_FUSED: lambda: fma(o1, g - m, m),
                First.LERP: lambda: m + o1 * (g - m),
                First.BACK_FUSED: lambda: fma(-(g - m), b1, g),
                First.BACK: lambda: g - (g - m) * b1,
                First.COPIED: lambda: g,
            },
        )
        v = chosen(
            form.second,
            {
                Second.NONE: lambda: v,
                Second.NESTED: lambda: fma(b2, v, fma(-b2, g * g, g * g)),
                Second.LEFT: lambda: fma(b2, v, (o2 * g) * g),
                Second.RIGHT: lambda: fma(o2 * g, g, b2 * v),
                Second.SEPARATE: lambda: b2 * v + (o2 * g) * g,
                Second.SQUARE_FUSED: lambda: fma(o2, g * g, b2 * v),
                Second.SQUARE: lambda: b2 * v + o2 * (g * g),
            },
        )
        a = chosen(
            form.ahead,
            {
                Ahead.NONE: lambda: m,
                Ahead.FUSED: lambda: fma(b1, m, g),
                Ahead.SEPARATE: lambda: g + b1 * m,
            },
        )
        below = np.sqrt(v) / root + eps
        x = chosen(
            form.weight,
            {
                Weight.QUOTIENT: lambda: x - (rate * a) / below,
                Weight.ADDCDIV_FUSED: lambda: fma(rate, a / below, x),
                Weight.ADDCDIV: lambda: x + rate * (a / below),
                Weight.ADDCMUL_FUSED: lambda: fma(rate, a, x),
                Weight.ADDCMUL: lambda: x + rate * a,
            },
        )
    x = numbered(x)
    if form.first is not First.COPIED or form.decay is not Decay.NONE:
        m = numbered(m)
    v = numbered(v)
    if is_bfloat16:
        x, m, v = map(to_bfloat16, (x, m, v))
    return Elements(x, kept, m, elements.second if form.second is Second.NONE else v)


class NumpyDevice:
    """A device whose kernels have one form."""

    def __init__(self, form: Form) -> None:
        self._form = form

    def step(self, elements: Elements, settings: Hyperparameters, kind: StepKind) -> Elements:
        numbers = constants(kind, settings, Powers(self.powers))
        return update(self._form, numbers, elements, is_bfloat16=kind.is_bfloat16)

    def powers(self, base: float, first: int, count: int) -> np.ndarray:
        exponents = np.arange(first, first + count, dtype=np.float32)
        return np.power(np.float32(base), exponents)


class _LateFuture(Future[None]):
    """Runs when somebody waits for it, with all that was queued before, or when chance will."""

    def __init__(self, host: StockHost, work: Callable[[], None]) -> None:
        super().__init__()
        self.host, self.work = host, work

    def done(self) -> bool:
        if not super().done() and self.host.random.random() < 0.5:
            self.host.run(self)
        return super().done()

    def result(self, timeout: float | None = None) -> None:
        self.host.run(self)
        return super().result(timeout)


class StockHost:
    """A host whose updates are stock's by definition: torch's own kernels of the CPU make them.

    So only what is around the update can show in the bits. It runs as late as the waits allow, in
    a thread of its own.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.random = random.Random(0)
        self.refuses: Callable[[], bool] = lambda: False
        """Asked before each unit's update."""
        self.fails: Callable[[], bool] = lambda: False
        """Asked in each parameter's update."""
        self.updates = 0
        """Of parameters."""
        self._optimizer = optimizer
        self._device = DeviceOptimizer(optimizer, "cpu")
        self._queue: deque[_LateFuture] = deque()
        self._thread = ThreadPoolExecutor(1)

    def covers(self, settings: Hyperparameters, dtype: torch.dtype) -> bool:
        return not self.refuses() and kind_of(self._optimizer, settings, dtype) is not None

    def update(
        self, spans: Sequence[HostSpan], settings: Callable[[], Hyperparameters], dtype: torch.dtype
    ) -> Future[None]:
        self._queue.append(_LateFuture(self, lambda: self._update(spans, settings(), dtype)))
        return self._queue[-1]

    def close(self) -> None:
        self._thread.shutdown()

    def run(self, last: _LateFuture) -> None:
        while not Future.done(last):
            future = self._queue.popleft()
            error = self._thread.submit(future.work).exception()
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    def _update(
        self, spans: Sequence[HostSpan], settings: Hyperparameters, dtype: torch.dtype
    ) -> None:
        if self.fails():
            raise RuntimeError("the host has failed")
        kind = kind_of(self._optimizer, settings, dtype)
        assert kind is not None
        of_c = ctypes.c_uint16 if kind.is_bfloat16 else ctypes.c_float
        for span in spans if not settings.found_inf else ():
            addresses = span[:4] if span.second else span[:3]
            arrays = [_array_at(it, of_c, span.elements) for it in addresses]
            before = Elements(*arrays, *[np.zeros_like(arrays[0])] * (4 - len(arrays)))
            after = self._device.step(before, settings, kind)
            written = ["weight", "first", *["second"] * bool(span.second)]
            for name in written + ["gradient"] * kind.unscales:
                getattr(before, name)[:] = getattr(after, name)
            self.updates += 1


def _array_at(address: int, of_c: Any, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((of_c * count).from_address(address))
