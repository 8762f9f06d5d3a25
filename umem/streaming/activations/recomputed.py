"""Runs a block's call again in the backward pass, in place of what autograd saves of it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from umem.runtime.model_parts import tensors_in
from umem.runtime.torch_hooks.saved_tensors import is_lent
from umem.streaming.activations.arguments import Arguments
from umem.streaming.activations.buffer_values import BufferValues
from umem.streaming.activations.call_states import CallState
from umem.streaming.activations.random_states import RandomStates
from umem.torch_compat import InferenceMode, begin_checkpoint, storage_address

__all__ = ["RecomputedCall", "SecondRun", "is_second_run"]


class SecondRun:
    """The run of a block's call in the backward pass, which exists as long as it may come.

    Parameters
    ----------
    module, args, kwargs, buffers
        As of :class:`RecomputedCall`.
    """

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        buffers: Collection[torch.Tensor],
    ) -> None:
        self._module, self._state = module, CallState(module, but=buffers)
        self._random = RandomStates(tensors_in((args, kwargs)))
        self._given = Arguments(args, kwargs)
        self._before = BufferValues.of(buffers)
        # Autograd saves them: a change is an error from now on, and they may leave. The node frees
        # what it has saved with its result, although Python may have it for longer.
        tensors = self._given.take_tensors()
        self._saved: Any = _save(tensors)
        kind = next((it.device.type for it in tensors), "cpu")
        self._autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self._saves: list[torch.Tensor] | None = None
        self._has_begun = False
        self.on_late: Callable[[], None] | None = None
        """Called where it comes behind an update of weights."""

    def __call__(self, *_: object) -> None:
        """Have autograd save what the first run has saved."""
        if self._saves is None:
            self._has_begun = True
            self._run()
            return
        if self.on_late is not None:
            self.on_late()
        _save([it.detach() for it in self._saves])

    def is_to_read(self, parameter: torch.Tensor) -> bool:
        """Whether it is still to come, and to read a parameter."""
        is_to_come = self._saves is None and not self._has_begun
        return is_to_come and any(it is parameter for it in self._state.parameters)

    def make_now(self) -> None:
        """Run now, ahead of a change of weights: the run to come gets what this one saves."""
        if self._saves is not None:
            return
        saves: list[torch.Tensor] = []
        # A graph has a parameter itself, also once the program has given it other memory.
        known = {_layout(it): it for it in self._state.parameters}

        def note(tensor: torch.Tensor) -> None:
            parameter = None if is_lent(tensor) else known.get(_layout(tensor))
            saves.append(tensor.detach() if parameter is None else parameter)

        with (
            torch.enable_grad(),
            torch.autocast(*self._autocast),
            torch.autograd.graph.saved_tensors_hooks(note, _refuse),
        ):
            self._run()
        self._saves = saves

    def _run(self) -> None:
        with (
            _noted_as_running(),
            InferenceMode(False),  # the backward pass may be in one
            self._state.put_back(),
            BufferValues.of(self._before.buffers).put_back_at_end(),
            self._random.put_back(),
        ):
            args, kwargs = self._given.with_tensors(self._saved.grad_fn.saved_tensors)
            self._before.put_back()
            self._module(*args, **kwargs)


class _Running(threading.local):
    count = 0


_running = _Running()


@contextmanager
def _noted_as_running() -> Iterator[None]:
    _running.count += 1
    try:
        yield
    finally:
        _running.count -= 1


def is_second_run() -> bool:
    """Whether a block's call runs again in this thread."""
    return _running.count > 0


class RecomputedCall:
    """A call of a block that torch's checkpoint runs again when its backward pass comes.

    Between both ends, autograd saves nothing of the call but the tensors in its arguments. umem's
    own hooks run the second time, too: the block's weights come as for any checkpoint.

    Parameters
    ----------
    module
        The block.
    args, kwargs
        Its arguments.
    buffers
        Those that a call or the program changes: the second one begins with the values of the
        first, and changes none. A change of others is autograd's error.
    """

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        buffers: Collection[torch.Tensor] = (),
    ) -> None:
        given = tensors_in((args, kwargs))
        second = SecondRun(module, args, kwargs, buffers)
        self.second = weakref.ref(second)
        """The run to come, for as long as autograd may ask for it."""
        self._ends = begin_checkpoint(second, [it.new_empty(0) for it in given[:1]])

    def end(self) -> None:
        """The call returns."""
        next(self._ends, None)

    def abandon(self) -> None:
        """An exception has ended the call."""
        self._ends.close()


class _Saved(torch.autograd.Function):
    """Saves tensors, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise AssertionError("nothing is computed from it")


def _save(tensors: Iterable[torch.Tensor]) -> Any:
    """Have autograd save tensors; returns a result of the node that has them."""
    with torch.enable_grad():
        anchor = torch.empty(0, requires_grad=True)
        return _Saved.apply(anchor, *tensors)  # type: ignore[no-untyped-call]


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    place = storage_address(tensor), tensor.storage_offset()
    return *place, tensor.size(), tensor.stride(), tensor.dtype


def _refuse(_: object) -> torch.Tensor:
    raise AssertionError("no graph of this run is used")
