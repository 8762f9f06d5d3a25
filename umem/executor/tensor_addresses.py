"""Where the tensors of a trace are in the running program."""

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
        Gradients, which are born anew in each step: what tells the present address, 0 for none.
    """

    fixed: Mapping[int, int]
    gradients: Mapping[int, Callable[[], int]]


def find_addresses(trace: Trace, model: nn.Module, optimizer: Optimizer) -> TensorAddresses:
    """Find a trace's tensors by their names; those not found are left where they are."""
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
    """The trace with the bytes that umem's allocator hands out for each tensor, and hints move.

    Temporaries are counted in the same blocks. What is small stays small: a block that shares pages
    can be just as long as the smallest that does not, and is not to move.
    """
    size = trace.tensor_bytes
    most = np.where(size < LARGE_BYTES, LARGE_BYTES - 1, np.iinfo(np.int64).max)
    return replace(trace, tensor_bytes=np.minimum(block_bytes(size), most))


def whole_blocks(size_bytes: int) -> int:
    """Bytes of the block that holds a tensor: whole pages of 64 KiB, for one that may move."""
    return int(block_bytes(size_bytes))


def storage_address(tensor: torch.Tensor) -> int:
    """Where the storage behind a tensor begins; 0 where there is none, or several are."""
    addresses = storage_addresses(tensor)
    return addresses[0] if len(addresses) == 1 else 0


def _gradient_of(parameter: torch.Tensor) -> Callable[[], int]:
    reference = weakref.ref(parameter)

    def address() -> int:
        known = reference()
        gradient = None if known is None else known.grad
        return 0 if gradient is None else storage_address(gradient)

    return address
