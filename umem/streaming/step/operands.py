"""Weights and gradients in host memory that an update works on, and their copies on the device.

An update reads gradients, and reads and writes weights. Over the link its kernels take longer than
copies would, and hold up the copies beside them. So what is at home comes to the device
beside the state, and weights go back with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from umem.core.classes import TensorClass
from umem.runtime.unguarded import Unguarded
from umem.streaming.gradients.clipped_gradients import multiply
from umem.streaming.plan.weight_plan import staged_bytes
from umem.streaming.stage.lanes import Copy, Lane, Lanes
from umem.streaming.stage.staged_state import StateMemory

__all__ = ["StagedOperands"]


@dataclass
class _Operand:
    """A tensor at home, or a span of it."""

    tensor: torch.Tensor
    """Kept until its copies have run."""
    address: int
    size_bytes: int
    offset: int
    """Place in the buffer."""
    factors: tuple[Any, ...] = ()
    """By what the copy is multiplied, one after the other."""


class StagedOperands:
    """Weights and gradients of one update that are at home.

    What has an alias, or was saved by a graph, which would not notice the change, is not among
    them: it is used where it is.

    Parameters
    ----------
    parameters
        Those that are updated. Nothing but the update changes them and their gradients from the
        step on.
    span
        The elements of the only one that are updated, from the first to before the second; None
        for all.
    memory
        Tells homes.
    factors
        Returns by what a gradient is still to be multiplied, one after the other.
    are_alone
        Whether parameters and gradients are known to have no alias.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        span: tuple[int, int] | None,
        memory: StateMemory,
        factors: Callable[[torch.Tensor], tuple[Any, ...]],
        *,
        are_alone: bool,
    ) -> None:
        self.size_bytes = 0
        """Of a buffer for them."""
        self._span, self._memory = span, memory
        self._may_stage = memory.may_stage if are_alone else memory.is_movable
        self._weights: dict[int, _Operand] = {}
        """By ``id`` of the parameter, as the next."""
        self._gradients: dict[int, _Operand] = {}
        self._buffer: torch.Tensor | None = None
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        """The buffer as elements of a type."""
        with Unguarded():
            for parameter in parameters:
                self._find(self._weights, parameter, parameter)
                gradient = parameter.grad
                assert gradient is not None
                self._find(self._gradients, parameter, gradient, factors(gradient))

    def _find(
        self,
        found: dict[int, _Operand],
        parameter: torch.Tensor,
        tensor: torch.Tensor,
        factors: tuple[Any, ...] = (),
    ) -> None:
        if not self._may_stage(tensor) or not self._memory.is_home(tensor):
            return
        begin, end = self._span or (0, tensor.numel())
        if self._span is not None and not tensor.is_contiguous():
            return
        size_bytes = (end - begin) * tensor.itemsize
        address = tensor.data_ptr() + begin * tensor.itemsize
        found[id(parameter)] = _Operand(tensor, address, size_bytes, self.size_bytes, factors)
        self.size_bytes += staged_bytes([size_bytes])

    @property
    def has_weights(self) -> bool:
        """Whether weights go back to their homes behind the update."""
        return bool(self._weights)

    def has_gradient_of(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter's gradient is staged."""
        return id(parameter) in self._gradients

    def bind(self, buffer: torch.Tensor) -> None:
        """Use a buffer of `size_bytes` or more."""
        self._buffer, self._typed = buffer[: self.size_bytes], {}

    def copy_in(self, lanes: Lanes) -> None:
        """Copy the homes into the buffer, from within work of a lane."""
        for some, tensor_class in (
            (self._weights, TensorClass.WEIGHTS),
            (self._gradients, TensorClass.GRADIENTS),
        ):
            copies = [
                Copy(self._address() + it.offset, it.address, it.size_bytes) for it in some.values()
            ]
            if copies:
                lanes.copy(Lane.COPY_IN, copies, tensor_class)

    def multiply(self) -> None:
        """Multiply the gradients' copies as is due, before any other use of them."""
        alike: dict[Any, list[_Operand]] = {}
        for it in self._gradients.values():
            if it.factors:
                alike.setdefault((it.tensor.dtype, *map(id, it.factors)), []).append(it)
        for some in alike.values():
            multiply([self._place(it) for it in some], some[0].factors)

    def copy_out(self, lanes: Lanes) -> None:
        """Copy the weights back to their homes, from within work of a lane."""
        copies = [
            Copy(it.address, self._address() + it.offset, it.size_bytes)
            for it in self._weights.values()
        ]
        if copies:
            lanes.copy(Lane.COPY_OUT, copies, TensorClass.WEIGHTS)

    def stand_in(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """What an optimizer updates in the place of a parameter, with the gradient to use.

        Only for the time of an update, as it may share the parameter's memory. With a span, both
        are of its elements alone.
        """
        made = self._copy_of(self._weights.get(id(parameter)), parameter.detach())
        made.grad = self._copy_of(self._gradients.get(id(parameter)), gradient)
        return made

    def _copy_of(self, operand: _Operand | None, tensor: torch.Tensor) -> torch.Tensor:
        if operand is None:
            return tensor if self._span is None else tensor.reshape(-1)[slice(*self._span)]
        if self._span is not None:
            return self._place(operand)
        typed, first = self._elements(operand)
        return typed.as_strided(tensor.size(), tensor.stride(), typed.storage_offset() + first)

    def _place(self, operand: _Operand) -> torch.Tensor:
        """An operand's part of the buffer."""
        typed, first = self._elements(operand)
        return typed[first : first + operand.size_bytes // typed.itemsize]

    def _elements(self, operand: _Operand) -> tuple[torch.Tensor, int]:
        """The buffer as elements of the operand's type, and the first one of its part."""
        assert self._buffer is not None
        dtype = operand.tensor.dtype
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = self._buffer.view(dtype)
        return typed, operand.offset // typed.itemsize

    def _address(self) -> int:
        assert self._buffer is not None
        return self._buffer.data_ptr()
