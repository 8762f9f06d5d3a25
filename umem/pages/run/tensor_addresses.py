"""Addresses of a trace's tensors in the running program."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
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

__all__ = ["TensorAddresses", "find_addresses", "in_blocks", "training_signature", "whole_blocks"]


@dataclass(frozen=True, eq=False)
class TensorAddresses:
    """Addresses of the tensors that hints can name, by number in the trace."""

    fixed: Mapping[int, int]
    """Of weights and optimizer state."""
    gradients: Mapping[int, Callable[[], int]]
    """Gradients are allocated anew in each step: what returns the present address, 0 for none."""
    owners: Sequence[tuple[weakref.ref[torch.Tensor], int]]
    """Of the fixed ones that are large enough to move: the tensor, and where its data begins."""

    def are_current(self) -> bool:
        """Whether the tensors are still where they were found."""
        found = ((owner(), address) for owner, address in self.owners)
        return all(tensor is not None and tensor.data_ptr() == at for tensor, at in found)


def find_addresses(trace: Trace, model: nn.Module, optimizer: Optimizer) -> TensorAddresses:
    """Find a trace's tensors by name. Tensors that are not found are never moved."""
    names = parameter_names(model.named_parameters(), optimizer_parameters(optimizer))
    parameters = {name: parameter for parameter, name in names.items()}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in (*parameters.items(), *optimizer_state(optimizer, names)):
        tensors.update(named_parts(name, tensor))
    fixed: dict[int, int] = {}
    gradients: dict[int, Callable[[], int]] = {}
    owners: list[tuple[weakref.ref[torch.Tensor], int]] = []
    for number, name in enumerate(trace.tensor_names):
        if name in tensors:
            tensor = tensors[name]
            fixed[number] = storage_address(tensor)
            if fixed[number] and trace.tensor_bytes[number] >= LARGE_BYTES:
                owners.append((weakref.ref(tensor), tensor.data_ptr()))
        elif name.endswith(".grad") and name.removesuffix(".grad") in parameters:
            gradients[number] = _gradient_of(parameters[name.removesuffix(".grad")])
    return TensorAddresses(fixed, gradients, owners)


def training_signature(optimizer: Optimizer) -> tuple[object, ...]:
    """Which parameters an optimizer trains, and as what type: plans hold as long as it is equal."""
    return tuple(
        (id(parameter), parameter.requires_grad, parameter.dtype)
        for parameter in optimizer_parameters(optimizer)
    )


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
