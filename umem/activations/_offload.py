"""A schedule that needs no plan: the first layers leave as the next one runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TypeVar

import torch

from umem.activations._layers import Layers
from umem.activations._store import MIN_BYTES, ActivationStore
from umem.errors import OffloadError

__all__ = ["offload"]

_Output = TypeVar("_Output")


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
