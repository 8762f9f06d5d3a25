"""When the activations of layers that run one after another leave and come back."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from umem.activations._hooks import in_backward_or_compiler
from umem.activations._store import ActivationStore
from umem.errors import OffloadError

__all__ = ["Layers"]

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
