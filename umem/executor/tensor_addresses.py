"""Addresses of a trace's tensors in the running program."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from umem.core.block_sizes import LARGE_BYTES, block_bytes
from umem.runtime.model_parts import (
    named_parts,
    optimizer_parameters,
    optimizer_state,
    parameter_names,
    storage_addresses,
)
from umem.trace import Trace

__all__ = ["TensorAddresses", "find_addresses", "in_blocks", "storage_address", "whole_blocks"]


@dataclass(frozen=True, eq=False)
class TensorAddresses:
    """Addresses of the tensors that hints can name, by number in the trace.

    Parameters
    ----------
    fixed
        Weights and optimizer state: address.
    gradients
        Gradients, which are allocated anew in each step: function that returns the present
        address, 0 for none.
    """

    fixed: Mapping[int, int]
    gradients: Mapping[int, Callable[[], int]]


def find_addresses(trace: Trace, model: nn.Module, optimizer: Optimizer) -> TensorAddresses:
    """Find a trace's tensors by name. Tensors that are not found are never moved."""
    names = parameter_names(model.named_parameters(), optimizer_parameters(optimizer))
    parameters = {name: parameter for parameter, name in names.items()}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in (*parameters.items(), *optimizer_state(optimizer, names)):
        tensors.update(named_parts(name, tensor))
    fixed: dict[int, int] = {}
    gradients: dict[int, Callable[[], int]] = {}
    for number, name in enumerate(trace.tensor_names):
        if name in tensors:
            fixed[number] = storage_address(tensors[name])
        elif name.endswith(".grad") and name.removesuffix(".grad") in parameters:
            gradients[number] = _gradient_of(parameters[name.removesuffix(".grad")])
    return TensorAddresses(fixed, gradients)


def in_blocks(trace: Trace) -> Trace:
    """The trace with sizes rounded up to the allocator's blocks, which is what hints move.

    Temporaries are rounded in the same way. A small tensor stays below the size from which blocks
    own their pages, because a block that shares pages with others must not move.
    """
    size = trace.tensor_bytes
    most = np.where(size < LARGE_BYTES, LARGE_BYTES - 1, np.iinfo(np.int64).max)
    return replace(trace, tensor_bytes=np.minimum(block_bytes(size), most))


def whole_blocks(size_bytes: int) -> int:
    """Bytes of the block that holds a tensor: a multiple of 64 KiB for a movable one."""
    return int(block_bytes(size_bytes))


def storage_address(tensor: torch.Tensor) -> int:
    """Address of the storage behind a tensor; 0 if it has none or several."""
    addresses = storage_addresses(tensor)
    return addresses[0] if len(addresses) == 1 else 0


def _gradient_of(parameter: torch.Tensor) -> Callable[[], int]:
    reference = weakref.ref(parameter)

    def address() -> int:
        known = reference()
        gradient = None if known is None else known.grad
        return 0 if gradient is None else storage_address(gradient)

    return address
