"""Runs a block's call again in the backward pass, in place of what autograd saves of it.

As torch's checkpoint does that is not reentrant. It takes the processor less time, for a call that
is proved repeatable needs no record of what it saves but the order.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from umem.runtime.model_parts import lies_in_memory, tensors_in
from umem.runtime.torch_hooks.saved_tensors import is_lent, pop_if_innermost
from umem.streaming.activations.arguments import Arguments
from umem.streaming.activations.buffer_values import BufferValues
from umem.streaming.activations.call_states import CallState
from umem.streaming.activations.random_states import RandomStates
from umem.torch_compat import InferenceMode, push_saved_tensor_hooks, storage_address

__all__ = ["RecomputedCall", "SecondRun", "is_second_run"]


class _Place:
    """Stands for a tensor that autograd saves, and has it from the second run to its use."""

    __slots__ = ("__weakref__", "shape", "tensor")

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape
        self.tensor: torch.Tensor | None = None


_NOTHING: Mapping[tuple[object, ...], torch.Tensor] = MappingProxyType({})


class _Thread(threading.local):
    runs_again = False


_thread = _Thread()


def is_second_run() -> bool:
    """Whether a block's call runs again in this thread."""
    return _thread.runs_again


class _AllIsSaved(Exception):  # noqa: N818
    """Ends a second run: the rest of it saves nothing. Modules call their hooks behind it."""


class SecondRun:
    """The run of a block's call in the backward pass, which exists as long as it may come.

    umem's own hooks run in it, too: the block's weights come as for any checkpoint.

    Parameters
    ----------
    module
        The block.
    args, kwargs
        Its arguments.
    buffers
        Those that a call or the program changes: the second one begins with the values of the
        first, and changes none. A change of others is autograd's error.
    on_late
        Called where what was made ahead of an update of weights is used behind it.
    """

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        buffers: Sequence[torch.Tensor],
        on_late: Callable[[], None],
    ) -> None:
        self._module, self._state = module, CallState(module, but=buffers)
        self._random = RandomStates(tensors_in((args, kwargs)))
        self._given = Arguments(args, kwargs)
        self._before = BufferValues(buffers)
        # Autograd saves them: a change is an error from now on, and they may leave. The node frees
        # what it has saved with its result, although Python may have it for longer.
        tensors = self._given.take_tensors()
        self._saved: Any = _save(tensors)
        kinds = {"cpu", *(it.device.type for it in tensors)}
        self._autocast = {kind: _autocast_of(kind) for kind in kinds}
        # Those of a tensor that no node holds any more are gone.
        self._places: list[weakref.ref[_Place]] = []
        self._is_early = self._has_begun = False
        self._lock = threading.RLock()
        """A backward pass has a thread for each device."""
        self._on_late = on_late

    def pack(self, tensor: torch.Tensor) -> _Place:
        """Save nothing of the first run but the order."""
        place = _Place(tensor.shape)
        self._places.append(weakref.ref(place))
        return place

    def unpack(self, place: _Place) -> torch.Tensor:
        """The tensor, from the second run."""
        while (tensor := place.tensor) is None:  # of a retained graph, at each use
            self._has_begun = True
            with self._lock:
                if place.tensor is None:
                    self._run()
        if not self._is_early:
            place.tensor = None
            return tensor
        self._on_late()
        return tensor.detach()

    def is_to_read(self, parameter: torch.Tensor) -> bool:
        """Whether it is still to come, and to read a parameter."""
        is_over = self._is_early or self._has_begun
        return not is_over and any(it is parameter for it in self._state.parameters)

    def make_now(self) -> None:
        """Run now, ahead of a change of weights."""
        with self._lock:
            if not self._is_early:
                # A graph has a parameter itself, also once the program has given it other memory.
                self._run({_layout(it): it for it in self._state.parameters if lies_in_memory(it)})
                self._is_early = True

    def _run(self, itself: Mapping[tuple[object, ...], torch.Tensor] = _NOTHING) -> None:
        """Run, and have places those tensors `itself` whose layout one has that is saved."""
        places, reached = self._places, 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal reached
            if reached == len(places):  # the program has caught what ends the run
                raise _AllIsSaved
            place = places[reached]()
            reached += 1
            tensor = tensor.detach() if tensor.requires_grad else tensor
            if place is not None:
                if itself and lies_in_memory(tensor) and not is_lent(tensor):
                    tensor = itself.get(_layout(tensor), tensor)
                if place.shape != tensor.shape:
                    raise self._differs(f"{[*tensor.shape]} in place of {[*place.shape]}")
                place.tensor = tensor
            if reached == len(places):
                raise _AllIsSaved
            return tensor

        with (
            InferenceMode(False),  # the backward pass may be in one
            torch.enable_grad(),
            ExitStack() as autocast,
            self._state.put_back(),
            self._before.in_place_of_buffers(self._module),
            self._random.put_back(),
        ):
            for kind, noted in self._autocast.items():
                if noted != _autocast_of(kind):
                    autocast.enter_context(torch.autocast(kind, *noted))
            args, kwargs = self._given.with_tensors(self._saved.grad_fn.saved_tensors)
            hooks = pack, _as_it_is
            is_within = _thread.runs_again
            try:  # an interrupt may come between any two calls
                _thread.runs_again = True
                push_saved_tensor_hooks(*hooks)
                self._module(*args, **kwargs)
            except _AllIsSaved:
                pass
            finally:
                pop_if_innermost(hooks)
                _thread.runs_again = is_within
            if reached < len(places):
                raise self._differs(f"fewer tensors, {reached} of {len(places)}")

    def _differs(self, how: str) -> RuntimeError:
        return RuntimeError(
            f"the second run of a {type(self._module).__name__}'s call has saved {how}. With "
            "`recompute: never` in umem's policy nothing runs twice"
        )


class RecomputedCall:
    """A call of a block that runs again when its backward pass comes.

    From `begin` to `end`, autograd saves nothing of the call but the tensors in its arguments, and
    the run to come.
    """

    def __init__(self, second: SecondRun) -> None:
        self._hooks = second.pack, second.unpack

    def begin(self) -> None:
        """The call begins. Apart, for an interrupt to find what is to be ended."""
        push_saved_tensor_hooks(*self._hooks)

    def end(self) -> None:
        """The call is over, or an exception has ended it."""
        pop_if_innermost(self._hooks)


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


def _autocast_of(kind: str) -> tuple[torch.dtype, bool, bool]:
    """What ``torch.autocast`` gets to have it as now."""
    is_enabled = torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind), is_enabled, torch.is_autocast_cache_enabled()


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    place = storage_address(tensor), tensor.storage_offset()
    return *place, tensor.size(), tensor.stride(), tensor.dtype
