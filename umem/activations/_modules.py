"""The same schedule for a model whose forward cannot be edited."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn

from umem.activations._layers import Layers
from umem.activations._statistics import ActivationStatistics
from umem.activations._store import MIN_BYTES, ActivationStore
from umem.errors import OffloadError
from umem.layer_chains import main_chain, members
from umem.module_hooks import Undo, hook_calls

__all__ = ["OffloadedBlocks", "offload_blocks"]


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
