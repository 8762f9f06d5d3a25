"""Offloading the activations of a model's first layers: which layers, and when they move."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import NoneType
from typing import TypeVar

import torch

from umem.core.arguments import check_argument
from umem.core.errors import OffloadError
from umem.offloading.store import (
    MIN_BYTES,
    ActivationStatistics,
    ActivationStore,
    warn_once,
)
from umem.runtime.torch_hooks.backward import nodes_of
from umem.runtime.torch_hooks.passes import is_forward_pass
from umem.torch_compat import tree_leaves

__all__ = ["OffloadContext", "offload"]

_Output = TypeVar("_Output")


@dataclass(eq=False)
class _Layer:
    """One layer in one forward pass: its groups of saved tensors."""

    wants_gradients: bool
    groups: list[object] = field(default_factory=list)


class _ForwardPass:
    """One forward pass, and the backward passes through its graph."""

    def __init__(self, store: ActivationStore) -> None:
        self.layers: list[_Layer] = []
        self._store = store
        self._is_in_backward = False
        self._hook: weakref.ref[Callable[[object], None]] | None = None

    def is_over(self) -> bool:
        """Whether its backward pass has begun, or its graph is gone."""
        return self._is_in_backward or (self._hook is not None and self._hook() is None)

    def _reach(self, index: int) -> None:
        # Only a retained graph has saved tensors of later layers left.
        for later in self.layers[index + 1 : index + 2]:
            for key in later.groups:
                self._store.release(key)
        for layer in reversed(self.layers[max(index - 1, 0) : index + 1]):
            for key in reversed(layer.groups):
                self._store.fetch(key)

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


class OffloadContext:
    """The context manager that `offload` returns, for the call of each layer.

    Forward, the end of a layer starts its copies, and releases the memory of the layer before.
    Backward, once a layer's output has gradients, what the layer before it saved comes back.
    """

    def __init__(
        self, make_store: Callable[[], ActivationStore], num_layers: int, pass_layers: int | None
    ) -> None:
        self._make_store = make_store
        self._num_layers = num_layers
        self._pass_layers = pass_layers
        self._store: ActivationStore | None = None
        self._pass: _ForwardPass | None = None
        """None before a layer that begins a pass."""
        self._current: _Layer | None = None
        self._is_inside = False

    @property
    def statistics(self) -> ActivationStatistics:
        """Copies so far, and host memory held now."""
        return ActivationStatistics() if self._store is None else self._store.statistics

    def __enter__(self) -> None:
        if not self._num_layers or not is_forward_pass():
            return
        if self._is_inside:
            self._leave(failed=True)
            raise OffloadError(
                "the offload context is entered within itself, or an interrupt has ended a layer "
                "in it: put it around one layer at a time, and begin the forward pass again"
            )
        store = self._store = self._store or self._make_store()
        self._is_inside = True
        if self._current is None:
            self._current = _Layer(torch.is_grad_enabled())
            known = self._pass
            is_full = known is not None and len(known.layers) == self._pass_layers
            if self._current.wants_gradients and (known is None or is_full or known.is_over()):
                self._pass = _ForwardPass(store)
        layer, count = self._current, 0 if self._pass is None else len(self._pass.layers)
        if layer.wants_gradients and count < self._num_layers:
            layer.groups.append(key := object())
            store.open_group(key)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._num_layers and is_forward_pass():
            self._leave(failed=kind is not None)

    def _leave(self, *, failed: bool) -> None:
        """End the layer's call, which has returned or failed with an exception."""
        self._is_inside = False
        if self._store is not None:
            self._store.close_groups()
        if failed:
            self._pass = self._current = None

    def sync(self, output: _Output) -> _Output:
        """End a layer; returns its output. ``OffloadError`` if none ran, or one still does."""
        if not self._num_layers or not is_forward_pass():
            return output
        layer, now, store = self._current, self._pass, self._store
        if layer is None or store is None or self._is_inside:
            raise OffloadError(
                "sync marks the end of a layer that has run inside the offload context: call it "
                "once for each layer, after `with context: y = layer(x)`"
            )
        self._current = None
        if layer.wants_gradients and now is not None:
            now.layers.append(layer)
            for key in layer.groups:
                store.send(key)
            for before in now.layers[-2:-1]:
                for key in before.groups:
                    store.release(key)
            if any(near.groups for near in now.layers[-2:]):
                now.fetch_before(output)
        return output


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

    # The backward pass needs the last layer's activations at once.
    leaving = num_layers if model_layers is None else min(num_layers, model_layers - 1)
    context = OffloadContext(make_store, leaving if enabled else 0, model_layers)
    return context, context.sync
