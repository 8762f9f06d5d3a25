"""What a profile asks of the run: its blocks, the names of its tensors, its device and policy."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from umem.errors import EnableError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from umem.classes import TensorClass
    from umem.hints import HintStatistics
    from umem.inspection import LiveTensor

__all__ = [
    "current_residency",
    "current_statistics",
    "device_name",
    "ideal_step_s",
    "live_blocks",
    "name_numbers",
    "policy_name",
]


def live_blocks() -> Sequence[LiveTensor] | None:
    """What :func:`umem.tensors` says, or None where umem is not enabled."""
    from umem.inspection import tensors

    with suppress(EnableError):
        return tensors()
    return None


def policy_name() -> str:
    from umem.allocator import is_enabled, runtime

    return runtime().policy.name if is_enabled() else "none"


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_initialized() else "no GPU"


def name_numbers(
    model: nn.Module | None, optimizers: Sequence[Optimizer], names: dict[str, int]
) -> dict[int, int]:
    """Number of the name of the tensor that begins at an address.

    Parameters
    ----------
    model
        Whose parameters, gradients and state have names.
    optimizers
        Those that hold the state.
    names
        Numbers of names; new ones are added.
    """
    from umem.tensor_memory import storage_addresses

    numbers: dict[int, int] = {}
    for name, tensor in () if model is None else _named_tensors(model, optimizers):
        for address in storage_addresses(tensor):
            numbers.setdefault(address, names.setdefault(name, len(names)))
    return numbers


def _named_tensors(
    model: nn.Module, optimizers: Sequence[Optimizer]
) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    for name, parameter in model.named_parameters():
        yield name, parameter
        if parameter.grad is not None:
            yield f"{name}.grad", parameter.grad
        for optimizer in optimizers:
            state = optimizer.state.get(parameter)
            for key, value in state.items() if isinstance(state, Mapping) else ():
                if isinstance(value, torch.Tensor):
                    yield f"{name}.{key}", value


def current_statistics() -> HintStatistics | None:
    """Counts of the hint engine that the executor drives, or None where none is at work."""
    found: HintStatistics | None = _from_executor("current_statistics")
    return found


def current_residency() -> Mapping[TensorClass, int] | None:
    """Bytes on the device by class, by the executor's books, or None where it keeps none."""
    found: Mapping[TensorClass, int] | None = _from_executor("residency")
    return found


def ideal_step_s() -> float | None:
    """Time of a step with everything resident, of the step that the executor runs, or None."""
    found: float | None = _from_executor("ideal_step_s")
    return found


def _from_executor(name: str) -> Any:
    # It is at work only if somebody has imported it: a profile must not.
    function = getattr(sys.modules.get("umem.executor"), name, None)
    with suppress(EnableError):
        return None if function is None else function()
    return None
