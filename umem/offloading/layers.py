"""Offloading the activations of a model's first layers: which layers, and when they move."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import NoneType
from typing import TypeVar

import torch
from torch import nn

from umem.core.arguments import check_argument
from umem.core.errors import OffloadError
from umem.offloading.store import (
    MIN_BYTES,
    ActivationStatistics,
    ActivationStore,
    warn_once,
)
from umem.runtime.model_parts import buffers_of, main_chain, members
from umem.runtime.torch_hooks.backward import nodes_of
from umem.runtime.torch_hooks.clock import Hearing, Listener, Order
from umem.runtime.torch_hooks.passes import Pass, is_forward_pass
from umem.torch_compat import tree_leaves

__all__ = ["OffloadContext", "OffloadedBlocks", "offload", "offload_blocks"]

_LOG = logging.getLogger("umem")

_Output = TypeVar("_Output")


@dataclass(eq=False)
class _Layer:
    """One layer in one forward pass: its groups of saved tensors, each with its store."""

    wants_gradients: bool
    groups: list[tuple[ActivationStore, object]] = field(default_factory=list)


class _ForwardPass:
    """One forward pass, and the backward passes through its graph."""

    def __init__(self) -> None:
        self.layers: list[_Layer] = []
        self._is_in_backward = False
        self._hook: weakref.ref[Callable[[object], None]] | None = None

    def is_over(self) -> bool:
        """Whether its backward pass has begun, or its graph is gone."""
        return self._is_in_backward or (self._hook is not None and self._hook() is None)

    def _reach(self, index: int) -> None:
        # Only a retained graph has saved tensors of later layers left.
        for later in self.layers[index + 1 : index + 2]:
            for store, key in later.groups:
                store.release(key)
        for layer in reversed(self.layers[max(index - 1, 0) : index + 1]):
            for store, key in reversed(layer.groups):
                store.fetch(key)

    def fetch_before(self, output: object) -> None:
        """Let a backward pass that reaches the last layer's output fetch what it needs next."""
        index = len(self.layers) - 1

        def reached(_gradients: object) -> None:
            self._is_in_backward = True
            try:
                self._reach(index)
            except Exception as error:  # autograd fetches by itself what it needs
                warn_once("activations are not fetched ahead", f"{type(error).__name__}: {error}")

        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        nodes = nodes_of(tensors)
        for node in nodes:
            node.register_prehook(reached)
        if nodes:  # the nodes hold the hook: it goes with the graph
            self._hook = weakref.ref(reached)


class _LayerSequence:
    """The layers of a model as they are called.

    Forward, the end of a layer starts the copies of what it saved, and releases the device memory
    of the layer before. Backward, once the gradients of a layer's output exist, what the layer
    before it saved starts to come back.

    Parameters
    ----------
    num_layers
        How many to offload, counted from the first of a pass.
    pass_layers
        How many layers a forward pass has; None to see from its graph when it is over.
    """

    def __init__(self, num_layers: int, pass_layers: int | None = None) -> None:
        self._num_layers = num_layers
        self._pass_layers = pass_layers
        self._pass = _ForwardPass()
        self._current: _Layer | None = None
        self._is_inside = False
        self._opened: ActivationStore | None = None

    def begin_pass(self) -> None:
        """Start a forward pass with the next layer."""
        if is_forward_pass():
            self._close()  # hooks of modules are not called after an interrupt
            self._pass = _ForwardPass()
            self._current = None

    def enter(self, store: ActivationStore) -> None:
        """Begin a layer, or a part of one, whose tensors belong to a store.

        Raises
        ------
        OffloadError
            If one is running already. The next pass may begin then.
        """
        if not is_forward_pass():
            return
        if self._is_inside:
            self.leave(failed=True)
            raise OffloadError(
                "the offload context is entered within itself, or an interrupt has ended a layer "
                "in it: put it around one layer at a time, and begin the forward pass again"
            )
        self._is_inside = True
        if self._current is None:
            self._current = _Layer(torch.is_grad_enabled())
            is_full = len(self._pass.layers) == self._pass_layers
            if self._current.wants_gradients and (is_full or self._pass.is_over()):
                self._pass = _ForwardPass()
        if self._current.wants_gradients and len(self._pass.layers) < self._num_layers:
            key = object()
            self._current.groups.append((store, key))
            self._opened = store
            store.open_group(key)

    def leave(self, *, failed: bool) -> None:
        """End the layer's call, which has returned or failed with an exception."""
        if not is_forward_pass():
            return
        self._close()
        if failed:
            self.begin_pass()

    def end(self, output: _Output) -> _Output:
        """End a layer; returns its output.

        Raises
        ------
        OffloadError
            If no layer ran, or one is still running.
        """
        if not is_forward_pass():
            return output
        layer = self._current
        if layer is None or self._is_inside:
            raise OffloadError(
                "sync marks the end of a layer that has run inside the offload context: call it "
                "once for each layer, after `with context: y = layer(x)`"
            )
        self._current = None
        if layer.wants_gradients:
            layers = self._pass.layers
            layers.append(layer)
            for store, key in layer.groups:
                store.send(key)
            for before in layers[-2:-1]:
                for store, key in before.groups:
                    store.release(key)
            if any(near.groups for near in layers[-2:]):
                self._pass.fetch_before(output)
        return output

    def _close(self) -> None:
        self._is_inside = False
        if self._opened is not None:
            self._opened.close_groups()
        self._opened = None


class OffloadContext:
    """The context manager that `offload` returns, for the call of each layer."""

    def __init__(
        self, layers: _LayerSequence | None, make_store: Callable[[], ActivationStore]
    ) -> None:
        self._layers = layers
        self._make_store = make_store
        self._store: ActivationStore | None = None

    @property
    def statistics(self) -> ActivationStatistics:
        """Copies so far, and host memory held now."""
        return ActivationStatistics() if self._store is None else self._store.statistics

    def __enter__(self) -> None:
        if self._layers is not None:
            if self._store is None:
                self._store = self._make_store()
            self._layers.enter(self._store)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._layers is not None:
            self._layers.leave(failed=kind is not None)


def offload(
    num_layers: int,
    model_layers: int | None = None,
    *,
    min_bytes: int = MIN_BYTES,
    host_limit_bytes: int | None = None,
    device: torch.device | str | None = None,
    enabled: bool = True,
) -> tuple[OffloadContext, Callable[[_Output], _Output]]:
    """Keep the activations of a model's first layers in host memory until the backward pass.

    While a layer runs forward, what the layer before it saved is copied to pinned host memory.
    While a layer runs backward, the activations of the layer before it are copied back. Results
    are the same to the last bit. `umem.enable` is not needed.

    Parameters
    ----------
    num_layers
        How many layers to offload, counted from the first one called in a forward pass. The last
        layer of the model never leaves: its backward pass comes next.
    model_layers
        How many layers a forward pass has. Without it a new pass begins after the backward pass of
        the one before has begun, or its graph is gone; give it where several forward passes come
        before the first backward pass.
    min_bytes
        Storages of fewer bytes stay on the device.
    host_limit_bytes
        Most bytes of host memory to hold; by default only the host's own memory limits it.
    device
        The device of the activations. By default the GPU that is current when the first layer is
        called. Without a GPU it is the CPU, whose tensors are copied all the same.
    enabled
        False returns a context and a function that do nothing.

    Returns
    -------
    context : OffloadContext
        Enter it around the call of each layer. Its `statistics` count the copies.
    sync : callable
        Call it with the output of each layer, at the layer's end. It returns the output.

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
    check_argument("num_layers", num_layers, int, "give a whole number, such as 2")
    check_argument("model_layers", model_layers, (int, NoneType), "give a whole number, or None")
    check_argument("min_bytes", min_bytes, int, "give a whole number of bytes")
    check_argument(
        "host_limit_bytes", host_limit_bytes, (int, NoneType), "give a whole number, or None"
    )
    check_argument("enabled", enabled, bool, "give True or False")
    if model_layers is not None and not 1 <= num_layers <= model_layers:
        raise OffloadError(
            f"num_layers is {num_layers}: give 1 to model_layers, which is {model_layers}"
        )
    if num_layers < 1:
        raise OffloadError(f"num_layers is {num_layers}: give 1 or more")

    def make_store() -> ActivationStore:
        own = device
        if own is None:
            own = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
        return ActivationStore(own, min_bytes=min_bytes, host_limit_bytes=host_limit_bytes)

    if not enabled:
        return OffloadContext(None, make_store), lambda output: output
    # The backward pass needs the last layer's activations at once.
    leaving = num_layers if model_layers is None else min(num_layers, model_layers - 1)
    layers = _LayerSequence(leaving, model_layers)
    return OffloadContext(layers, make_store), layers.end


class OffloadedBlocks(Listener):
    """A model whose layers are offloaded in its passes, until `remove` is called."""

    def __init__(
        self,
        model: nn.Module,
        chain: list[nn.Module],
        num_layers: int,
        min_bytes: int,
        host_limit_bytes: int | None,
    ) -> None:
        self._model = model
        self._layers = _LayerSequence(num_layers)
        self._min_bytes = min_bytes
        self._host_limit_bytes = host_limit_bytes
        self._stores: dict[torch.device, ActivationStore] = {}
        self._chain = {str(number): layer for number, layer in enumerate(chain)}
        self._hearing: Hearing | None = None
        if chain:
            self._hearing = Hearing(self, Order.ACTIVATIONS, self._fail, model, self._chain)

    @property
    def statistics(self) -> dict[torch.device, ActivationStatistics]:
        """Copies so far, and host memory held now, by device."""
        return {device: store.statistics for device, store in self._stores.items()}

    def remove(self) -> None:
        """Offload nothing more and give host memory back.

        Graphs that are alive keep working, and give their memory back when they go.
        """
        if self._hearing is not None:
            self._hearing.close()
            self._hearing = None
        for store in self._stores.values():
            store.close()

    def _fail(self, error: Exception) -> None:
        """An error must not end the forward pass, which goes on with activations on the device."""
        if self._hearing is None:
            return
        _LOG.warning(
            "umem: activations of %s are not offloaded any more: %s: %s",
            type(self._model).__name__,
            type(error).__name__,
            str(error),
            exc_info=_LOG.isEnabledFor(logging.DEBUG),
        )
        self._layers.begin_pass()
        self.remove()

    def pass_begins(self, *_: object) -> None:
        """Begin a forward pass, and find the buffers that stay."""
        self._layers.begin_pass()
        for store in self._stores.values():
            store.keep(buffers_of(self._model))

    def block_begins(self, name: str, *_: object) -> None:
        """Begin a layer."""
        layer = self._chain[name]
        device = next(layer.parameters()).device
        store = self._stores.get(device)
        if store is None:
            store = self._stores[device] = ActivationStore(
                device, min_bytes=self._min_bytes, host_limit_bytes=self._host_limit_bytes
            )
            # Parameters are many, and seldom change from pass to pass.
            store.keep(self._model.parameters(), permanent=True)
            store.keep(buffers_of(self._model))
        self._layers.enter(store)

    def block_ends(self, _name: str, _now: Pass, output: object, *, failed: bool) -> None:
        """End a layer: what it has saved leaves."""
        self._layers.leave(failed=failed)
        if not failed:
            self._layers.end(output)


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
        Modules of the model that run one after another. By default the members with parameters of
        the :class:`~torch.nn.ModuleList` or :class:`~torch.nn.Sequential` with the largest product
        of length and bytes of parameters; `umem.record` divides a model at the same modules. The
        activations of each are on the device of its parameters.
    min_bytes
        Storages of fewer bytes stay on the device.
    host_limit_bytes
        Most bytes of host memory to hold for each device; by default only the host's own memory
        limits it.
    enabled
        False installs no hooks.

    Returns
    -------
    OffloadedBlocks
        Its `remove` removes the hooks.

    Raises
    ------
    OffloadError
        If the model has no such layers, a layer is not a module of the model or has no parameters,
        `num_layers` is below 1 or above their number, or for bytes below 0. Nothing is raised
        later: activations of other devices stay where they are, with a warning.

    Examples
    --------
    >>> from torch import nn
    >>> model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])
    >>> handle = offload_blocks(model, num_layers=2)
    >>> model(torch.ones(512, 512)).sum().backward()
    >>> handle.remove()
    """
    if layers is None:
        found = main_chain(model)
        if found is None:
            raise OffloadError(
                f"{type(model).__name__} has no ModuleList or Sequential of two layers with "
                "parameters or more: name its layers with layers=[...]"
            )
        layers = members(found)
    chain = list(layers)
    if not 1 <= num_layers <= len(chain):
        raise OffloadError(
            f"num_layers is {num_layers}: give 1 to {len(chain)}, the number of layers of this "
            f"{type(model).__name__}"
        )
    for name, value in (("min_bytes", min_bytes), ("host_limit_bytes", host_limit_bytes)):
        if value is not None and value < 0:
            raise OffloadError(f"{name} is {value}: give bytes, 0 or more")
    inside = set(model.modules())
    for layer in chain:
        if layer not in inside or next(layer.parameters(), None) is None:
            raise OffloadError(
                f"a {type(layer).__name__} cannot be offloaded as a layer of this "
                f"{type(model).__name__}: give modules of it that have parameters"
            )
    # The backward pass needs the last layer's activations at once.
    leaving = min(num_layers, len(chain) - 1)
    hooked = chain if enabled else []
    return OffloadedBlocks(model, hooked, leaving, min_bytes, host_limit_bytes)
