"""When the activations of layers that run one after another leave and come back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from umem.core.errors import OffloadError
from umem.offload.store import (
    MIN_BYTES,
    ActivationStatistics,
    ActivationStore,
    in_backward_or_compiler,
)
from umem.runtime.model_parts import main_chain, members
from umem.runtime.torch_hooks.modules import Undo, hook_calls
from umem.torch_compat import tree_leaves

__all__ = ["Layers", "OffloadedBlocks", "offload", "offload_blocks"]

_Output = TypeVar("_Output")


@dataclass(eq=False)
class _Layer:
    """One layer in one forward pass: its groups, each with the store that has it."""

    is_counted: bool
    """Whether it is one of a pass's: gradients are wanted."""
    groups: list[tuple[ActivationStore, object]] = field(default_factory=list)

    def send(self) -> None:
        for store, key in self.groups:
            store.send(key)

    def release(self) -> None:
        for store, key in self.groups:
            store.release(key)

    def fetch(self) -> None:
        for store, key in reversed(self.groups):
            store.fetch(key)


class _Pass:
    """One forward pass, and the backward passes through its graph."""

    def __init__(self) -> None:
        self.layers: list[_Layer] = []
        self.is_in_backward = False
        self._anchor: weakref.ref[_Reached] | None = None

    def is_over(self) -> bool:
        """Whether a layer that is called now belongs to another pass."""
        is_gone = self._anchor is not None and self._anchor() is None
        return self.is_in_backward or is_gone

    def hook(self, output: object) -> None:
        """Be told when a backward pass reaches what the last layer returned."""
        reached = _Reached(self, len(self.layers) - 1)
        nodes = {id(node): node for tensor in _tensors(output) if (node := tensor.grad_fn)}
        for node in nodes.values():
            node.register_prehook(reached)
        if nodes:
            self._anchor = weakref.ref(reached)


class _Reached:
    """Called when a backward pass comes to a layer. Held by the graph."""

    def __init__(self, forward: _Pass, index: int) -> None:
        self._pass = forward
        self._index = index

    def __call__(self, _gradients: object) -> None:
        self._pass.is_in_backward = True
        layers = self._pass.layers
        # Only a graph that is retained has anything left there.
        for behind in layers[self._index + 1 : self._index + 2]:
            behind.release()
        for layer in reversed(layers[max(self._index - 1, 0) : self._index + 1]):
            layer.fetch()


class Layers:
    """The layers of a model as they are called.

    Forward, a layer's end starts the copies of what it saved, and lets go of the device's memory of
    the layer before. Backward, when the gradients of a layer's results are there, what the layer
    before it saved starts to come back.

    Parameters
    ----------
    num_layers
        How many to offload, counted from the first of a pass.
    pass_layers
        How many a forward pass has; None where it tells otherwise when it is over.
    """

    def __init__(self, num_layers: int, pass_layers: int | None = None) -> None:
        self._num_layers = num_layers
        self._pass_layers = pass_layers
        self._pass = _Pass()
        self._current: _Layer | None = None
        self._is_inside = False
        self._opened: ActivationStore | None = None

    def begin_pass(self) -> None:
        """The next layer is the first of a forward pass."""
        if not in_backward_or_compiler():
            self._close()  # hooks on modules miss an interrupt
            self._pass = _Pass()
            self._current = None

    def enter(self, store: ActivationStore) -> None:
        """A layer, or a part of one, is called; its tensors are the store's.

        Raises
        ------
        OffloadError
            If one is running already.
        """
        if in_backward_or_compiler():
            return
        if self._is_inside:
            raise OffloadError(
                "the offload context is entered within itself: put it around one layer at a time"
            )
        self._is_inside = True
        if self._current is None:
            self._current = _Layer(is_counted=torch.is_grad_enabled())
            if self._current.is_counted and self._is_pass_over():
                self._pass = _Pass()
        if self._current.is_counted and len(self._pass.layers) < self._num_layers:
            key = object()
            self._current.groups.append((store, key))
            store.open_group(key)
            self._opened = store

    def leave(self, *, failed: bool) -> None:
        """It has returned, or an exception goes through it."""
        if in_backward_or_compiler():
            return
        self._close()
        if failed:
            self.begin_pass()

    def end(self, output: _Output) -> _Output:
        """A layer has ended; returns the output that it is given.

        Raises
        ------
        OffloadError
            If no layer ran, or one is still running.
        """
        if in_backward_or_compiler():
            return output
        layer = self._current
        if layer is None or self._is_inside:
            raise OffloadError(
                "sync marks the end of a layer that has run inside the offload context: call it "
                "once for each layer, after `with context: y = layer(x)`"
            )
        self._current = None
        if layer.is_counted:
            layers = self._pass.layers
            layers.append(layer)
            layer.send()
            for before in layers[-2:-1]:
                before.release()
            if any(near.groups for near in layers[-2:]):
                self._pass.hook(output)
        return output

    def _close(self) -> None:
        self._is_inside = False
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close_group()

    def _is_pass_over(self) -> bool:
        return len(self._pass.layers) == self._pass_layers or self._pass.is_over()


def _tensors(value: object) -> list[torch.Tensor]:
    leaves: list[Any] = tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


# A schedule that needs no plan: the first layers leave as the next one runs.


def offload(
    num_layers: int,
    model_layers: int | None = None,
    *,
    min_bytes: int = MIN_BYTES,
    host_limit_bytes: int | None = None,
    device: torch.device | str | None = None,
    enabled: bool = True,
) -> tuple[AbstractContextManager[None], Callable[[_Output], _Output]]:
    """Let the activations of a model's first layers wait for the backward pass in host memory.

    While a layer runs forward, what the layer before it saved is copied to pinned host memory; the
    backward pass has each layer's activations copied back while the layer after it runs. Results
    are the same to the last bit. `umem.enable` is not needed.

    Parameters
    ----------
    num_layers
        How many layers to offload, counted from the first one called in a forward pass. The last
        layer of the model never leaves: its backward pass comes next.
    model_layers
        How many layers a forward pass has. Without it a new pass begins when the backward pass of
        the one before has begun, or its graph is gone; give it where several forward passes come
        before the first backward pass.
    min_bytes
        Storages of fewer bytes stay on the device.
    host_limit_bytes
        Most bytes of host memory to hold; by default only the host's own memory limits it.
    device
        Where the activations are; by default the current GPU when the first layer is called, or the
        CPU where there is none, whose tensors are copied all the same.
    enabled
        False gives a context and a function that do nothing.

    Returns
    -------
    context : context manager
        To be entered around each layer's call, again and again.
    sync : callable
        Marks the end of a layer: called with what the layer returned, which it returns.

    Raises
    ------
    OffloadError
        If `num_layers` is below 1 or above `model_layers`. When the first layer is called: for
        bytes below 0, and a device that is neither a GPU nor the CPU. Later: if the context is
        entered within itself, or `sync` is called for a layer that did not run in it.

    Examples
    --------
    >>> layers = [torch.nn.Linear(512, 512) for _ in range(3)]
    >>> context, sync = offload(num_layers=2, model_layers=3)
    >>> y = torch.ones(512, 512)
    >>> for layer in layers:
    ...     with context:
    ...         y = layer(y)
    ...     y = sync(y)
    >>> y.sum().backward()
    """
    if model_layers is not None and not 1 <= num_layers <= model_layers:
        raise OffloadError(
            f"num_layers is {num_layers}: give 1 to model_layers, which is {model_layers}"
        )
    if num_layers < 1:
        raise OffloadError(f"num_layers is {num_layers}: give 1 or more")
    if not enabled:
        return nullcontext(), _same

    def make_store() -> ActivationStore:
        return ActivationStore(
            _default_device() if device is None else device,
            min_bytes=min_bytes,
            host_limit_bytes=host_limit_bytes,
        )

    # The last layer's activations are needed again at once.
    leaving = num_layers if model_layers is None else min(num_layers, model_layers - 1)
    layers = Layers(leaving, model_layers)
    return _Context(layers, make_store), layers.end


class _Context:
    """Entered around the call of a layer."""

    def __init__(self, layers: Layers, make_store: Callable[[], ActivationStore]) -> None:
        self._layers = layers
        self._make_store = make_store
        self._store: ActivationStore | None = None

    def __enter__(self) -> None:
        if self._store is None:
            self._store = self._make_store()
        self._layers.enter(self._store)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._layers.leave(failed=kind is not None)


def _same(output: _Output) -> _Output:
    return output


def _default_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


# The same schedule for a model whose forward cannot be edited.


class OffloadedBlocks:
    """Hooks that offload the layers of a model, until `remove` is called."""

    def __init__(self, undo: list[Undo], stores: dict[torch.device, ActivationStore]) -> None:
        self._undo = undo
        self._stores = stores

    @property
    def statistics(self) -> dict[torch.device, ActivationStatistics]:
        """What was done so far, by device."""
        return {device: store.statistics for device, store in self._stores.items()}

    def remove(self) -> None:
        """Take the hooks away and give host memory back.

        Graphs that are alive go on working, and give theirs back when they go.
        """
        for undo in self._undo:
            undo()
        self._undo.clear()
        for store in self._stores.values():
            store.close()


def offload_blocks(
    model: nn.Module,
    num_layers: int,
    *,
    layers: Iterable[nn.Module] | None = None,
    min_bytes: int = MIN_BYTES,
    host_limit_bytes: int | None = None,
    enabled: bool = True,
) -> OffloadedBlocks:
    """Offload the activations of a model's first layers, as `umem.offload` does, by hooks on them.

    Parameters
    ----------
    model
        The model. Each call of it is a forward pass.
    num_layers
        How many layers to offload, counted from the first one called. The last layer of the model
        never leaves: its backward pass comes next.
    layers
        Modules of the model that run one after another; by default those with parameters of its
        :class:`~torch.nn.ModuleList` or :class:`~torch.nn.Sequential` with the largest product of
        length and bytes of parameters, which `umem.record` cuts a model at too. Each one's
        activations are on the device of its parameters.
    min_bytes
        Storages of fewer bytes stay on the device.
    host_limit_bytes
        Most bytes of host memory to hold for each device; by default only the host's own memory
        limits it.
    enabled
        False hooks nothing.

    Returns
    -------
    OffloadedBlocks
        Its `remove` ends it.

    Raises
    ------
    OffloadError
        If the model has no such layers, a layer is not a module of the model or has no parameters,
        or `num_layers` is below 1 or above their number. When the first layer is called: for bytes
        below 0, and parameters on a device that is neither a GPU nor the CPU.

    Examples
    --------
    >>> from torch import nn
    >>> model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])
    >>> handle = offload_blocks(model, num_layers=2)
    >>> model(torch.ones(512, 512)).sum().backward()
    >>> handle.remove()
    """
    chain = _main_layers(model) if layers is None else list(layers)
    if not 1 <= num_layers <= len(chain):
        raise OffloadError(
            f"num_layers is {num_layers}: give 1 to {len(chain)}, the number of layers of this "
            f"{type(model).__name__}"
        )
    inside = set(model.modules())
    for layer in chain:
        if layer not in inside or next(layer.parameters(), None) is None:
            raise OffloadError(
                f"a {type(layer).__name__} cannot be offloaded as a layer of this "
                f"{type(model).__name__}: give modules of it that have parameters"
            )
    # The last layer's activations are needed again at once.
    schedule = _Schedule(
        model, Layers(min(num_layers, len(chain) - 1)), min_bytes, host_limit_bytes
    )
    return OffloadedBlocks(schedule.hook(chain) if enabled else [], schedule.stores)


class _Schedule:
    """What the hooks of one model call."""

    def __init__(
        self, model: nn.Module, layers: Layers, min_bytes: int, host_limit_bytes: int | None
    ) -> None:
        self.stores: dict[torch.device, ActivationStore] = {}
        self._model = model
        self._layers = layers
        self._min_bytes = min_bytes
        self._host_limit_bytes = host_limit_bytes

    def hook(self, chain: list[nn.Module]) -> list[Undo]:
        """Be told of the calls of the model and its layers; returns what ends it."""
        undo = hook_calls(self._model, self._begin)
        for layer in chain:
            undo += hook_calls(layer, partial(self._enter, layer), self._leave)
        return undo

    def _begin(self, *_: object) -> None:
        self._layers.begin_pass()
        for store in self.stores.values():
            store.keep(self._model.buffers())

    def _enter(self, layer: nn.Module, *_: object) -> None:
        device = next(layer.parameters()).device
        store = self.stores.get(device)
        if store is None:
            store = self.stores[device] = ActivationStore(
                device, min_bytes=self._min_bytes, host_limit_bytes=self._host_limit_bytes
            )
            # Parameters are many, and seldom others in the next pass.
            store.keep(self._model.parameters(), for_good=True)
            store.keep(self._model.buffers())
        self._layers.enter(store)

    def _leave(self, output: object, *, failed: bool) -> None:
        self._layers.leave(failed=failed)
        if not failed:
            self._layers.end(output)


def _main_layers(model: nn.Module) -> list[nn.Module]:
    chain = main_chain(model)
    if chain is None:
        raise OffloadError(
            f"{type(model).__name__} has no ModuleList or Sequential of two layers with parameters "
            "or more: name its layers with layers=[...]"
        )
    return members(chain)
