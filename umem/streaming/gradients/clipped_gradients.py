"""Clips gradients that are on the host without reading them there.

``torch.nn.utils.clip_grad_norm_`` reads all gradients for their norms, and multiplies them. For
gradients in host memory that is three times their bytes over the link, while nothing else can run.

Neither has to be. A gradient's norm is taken by the same function of torch while the gradient is
still on the device, and kept. The multiplication waits for the update, which has a copy of the
gradient on the device anyway: there the same function multiplies that. The gradient itself is
multiplied where it is if anything else uses it. So all values are those of stock torch.

torch's functions for lists treat each tensor by itself, but choose their kernels for the whole
list: one with tensors of several types, or with gaps between elements, goes the usual way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from umem.core.interrupts import call_all
from umem.runtime.guard import Guard, are_plain, guard_of, settle
from umem.runtime.known_tensors import KnownTensors
from umem.runtime.unguarded import Unguarded
from umem.streaming.stage.lanes import Lanes, Moment
from umem.torch_compat import (
    InferenceMode,
    foreach_multiply,
    foreach_norm,
    version_counter,
)

__all__ = ["ClippedGradients", "GradientNorm", "multiply"]

_NORM: Any = foreach_norm
_MULTIPLY: Any = foreach_multiply
_NORM_NAME, _MULTIPLY_NAME = "aten::_foreach_norm", "aten::_foreach_mul_"


class GradientNorm(NamedTuple):
    """A norm of one gradient."""

    value: torch.Tensor
    order: float
    stream: int
    """The key of the stream that owns the value's memory: the program frees it behind its own."""


@dataclass(eq=False, slots=True)
class _Held:
    """A gradient in host memory."""

    moment: Moment
    """Behind the work that made the norm and the factors."""
    version: int
    """Of the gradient, when it was there."""
    norm: GradientNorm | None
    arrival: Moment
    """Behind the work that put it there."""
    stream: int
    """The key of the stream that has waited for that."""
    factors: list[Any] = field(default_factory=list)
    """Numbers, or tensors of one element, by which it is still to be multiplied, in this order."""
    wait: Callable[[], None] | None = None
    """Waits for the update that reads the gradient."""


class ClippedGradients(Guard):
    """Gradients in host memory, between the backward pass and the end of their lives.

    Parameters
    ----------
    lanes
        The streams.
    """

    functions = (_NORM_NAME, _MULTIPLY_NAME)

    def __init__(self, lanes: Lanes) -> None:
        super().__init__(_nothing)
        self._lanes = lanes
        self._held: KnownTensors[_Held] = KnownTensors()
        """What is known of each held gradient lives as long as the tensor."""
        self._lock = threading.RLock()
        self._order: float | None = None
        """Of the norm that the program has asked for last."""

    # ------------------------------------------------------------------ which are held

    def norms(self, gradients: Sequence[torch.Tensor]) -> list[GradientNorm | None]:
        """The norms that the program will ask for, of gradients that are still on the device.

        None for each in the first steps, and in a program that does not clip.
        """
        found: list[GradientNorm | None] = [None] * len(gradients)
        order = self._order
        if order is None:
            return found
        stream = self._lanes.stream_key()
        numbers: dict[torch.dtype, list[int]] = {}
        for number, gradient in enumerate(gradients):
            numbers.setdefault(gradient.dtype, []).append(number)
        with InferenceMode(torch.is_inference_mode_enabled()), Unguarded():
            torch.set_grad_enabled(False)
            for some in numbers.values():
                alike = [gradients[it] for it in some]
                if _is_uniform(alike):
                    for number, norm in zip(some, _NORM(alike, order), strict=True):
                        found[number] = GradientNorm(norm, order, stream)
        return found

    def keep(
        self,
        gradient: torch.Tensor,
        norm: GradientNorm | None,
        moment: Moment,
        arrival: Moment,
        stream: int,
    ) -> None:
        """Guard a gradient that is in host memory from now on.

        Parameters
        ----------
        gradient
            A tensor that nothing guards.
        norm
            As :meth:`norms` returned it.
        moment
            Behind the work that made the norm.
        arrival
            Behind the work that put the gradient there.
        stream
            The key of the stream on which it was made, which waits for that.
        """
        version = version_counter(gradient)
        self._held[gradient] = _Held(moment, version, norm, arrival, stream)
        self.watch([gradient])

    def keep_here(self, gradient: torch.Tensor) -> None:
        """Guard a gradient that is in host memory already, behind what this stream has done."""
        now = self._lanes.mark()
        self.keep(gradient, None, now, now, self._lanes.stream_key())

    def is_held(self, gradient: torch.Tensor) -> bool:
        """Whether a gradient is guarded here."""
        return guard_of(gradient) is self

    def factors(self, gradient: torch.Tensor) -> tuple[Any, ...]:
        """By what a gradient is still to be multiplied, one after the other."""
        held = self._known(gradient)
        return () if held is None else tuple(held.factors)

    def _known(self, gradient: torch.Tensor) -> _Held | None:
        return self._held.get(gradient)

    def _end(self, gradient: torch.Tensor) -> None:
        """Multiply a gradient where it is, if it is to be, and guard it no more."""
        with self._lock:
            held = self._known(gradient)
            if held is None:  # another thread was faster
                return
            if not self._are_ready((gradient,)):
                # This stream may be behind the backward pass by an event from before the copy, and
                # so may others, of whose uses no guard tells from now on.
                self._lanes.finish(held.arrival)
            if held.factors:
                self._lanes.wait(held.moment)
                with (
                    InferenceMode(torch.is_inference_mode_enabled()),
                    Unguarded(),
                ):
                    torch.set_grad_enabled(False)
                    while held.factors:  # once by each, also if Ctrl-C ends this and it begins anew
                        call_all(
                            partial(_MULTIPLY, [gradient], held.factors[0]),
                            partial(held.factors.pop, 0),
                        )
                self._lanes.wait_on_stream_of(held.moment, self._lanes.mark())
            self.give_back([gradient])
            del self._held[gradient]

    # ------------------------------------------------------------------ an update reads them

    def update_begins(
        self, gradients: Iterable[torch.Tensor], wait: Callable[[], None] | None
    ) -> None:
        """Note that an update reads gradients: `wait` waits for it; None when it has ended."""
        for gradient in gradients:
            held = self._known(gradient)
            if held is not None:
                held.wait = wait

    # ------------------------------------------------------------------ what the guard sees

    def use(self, tensor: torch.Tensor) -> None:
        """Have the gradient's value where it is, before a use of it."""
        held = self._known(tensor)
        if held is not None and held.wait is not None:
            held.wait()
        self._end(tensor)

    def run(self, function: str, args: list[Any]) -> Any:
        """Take the norms of gradients, or multiply them, as ``clip_grad_norm_`` asks for it."""
        tensors, by, *others = args
        is_known = (
            not any(it is not None for it in others)
            and isinstance(by, int | float | torch.Tensor)
            and not self._lanes.is_capturing()
            and not torch.compiler.is_compiling()
            and _is_uniform(tensors)
            and self._are_ready(tensors)
        )
        with InferenceMode(torch.is_inference_mode_enabled()):
            torch.set_grad_enabled(False)
            if is_known and function == _NORM_NAME and isinstance(by, int | float):
                return self._norms_of(tensors, float(by))
            if is_known and function == _MULTIPLY_NAME and _is_number(by):
                return self._multiply(tensors, by)
        return NotImplemented

    def _are_ready(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether this stream has waited for what put those that are held where they are."""
        here = self._lanes.stream_key()
        return all((held := self._known(it)) is None or held.stream == here for it in tensors)

    def _norms_of(self, tensors: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
        self._order = order
        known: dict[int, torch.Tensor] = {}
        rest: list[torch.Tensor] = []
        for number, tensor in enumerate(tensors):
            held = self._known(tensor)
            norm = self._take_norm(tensor, held, order)
            if norm is not None:
                known[number] = norm
                continue
            if held is not None and (held.factors or held.wait is not None):
                self.use(tensor)
            rest.append(tensor)
        others = iter(self._read(rest, order))
        return [known[it] if it in known else next(others) for it in range(len(tensors))]

    def _read(self, tensors: list[torch.Tensor], order: float) -> list[torch.Tensor]:
        """Take norms where the tensors are."""
        if not tensors:
            return []
        if not all(self.is_held(it) or are_plain((it,)) for it in tensors):
            settle(tensors)  # some have another guard
        return list(_NORM(tensors, order))

    def _take_norm(
        self, gradient: torch.Tensor, held: _Held | None, order: float
    ) -> torch.Tensor | None:
        """A norm that is known and right, once: the program may write to it."""
        if held is None or held.norm is None or held.factors:
            return None
        norm, stream = held.norm, self._lanes.stream_key()
        known = norm.order, norm.stream, held.version
        is_right = known == (order, stream, version_counter(gradient))
        if not is_right:
            return None
        self._lanes.wait(held.moment)
        value, held.norm = held.norm.value, None
        return value

    def _multiply(self, tensors: Sequence[torch.Tensor], factor: Any) -> None:
        own = factor
        if isinstance(factor, torch.Tensor):
            settle([factor])
            own = factor.clone()
        moment = self._lanes.mark()
        rest = []
        with self._lock:
            for tensor in tensors:
                held = self._known(tensor)
                if held is None or held.wait is not None:
                    rest.append(tensor)
                    continue
                held.factors.append(own)
                held.moment, held.norm = moment, None
                torch.autograd.graph.increment_version(tensor)
        settle(rest)
        if rest:
            _MULTIPLY(rest, factor)


def _nothing() -> None:
    pass


def multiply(tensors: list[torch.Tensor], factors: Iterable[Any]) -> None:
    """Multiply tensors of one type in place, as :meth:`ClippedGradients.factors` has it."""
    for factor in factors:
        _MULTIPLY(tensors, factor)


def _is_number(factor: Any) -> bool:
    return not isinstance(factor, torch.Tensor) or (factor.ndim == 0 and not factor.requires_grad)


def _is_uniform(tensors: Sequence[Any]) -> bool:
    """Whether torch takes the same kernels for a list as for any part of it, and makes no graph."""
    with Unguarded():
        first = tensors[0]
        return all(
            isinstance(it, torch.Tensor)
            and it.layout is torch.strided
            and it.is_contiguous()
            and it.is_floating_point()
            and not it.requires_grad
            and (it.dtype, it.device) == (first.dtype, first.device)
            for it in tensors
        )
