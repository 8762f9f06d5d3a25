"""The parts of a model: its layers, its parameters and optimizer state by name, and their memory.

A tensor subclass that wraps other tensors, such as the DTensor of a sharded model or a quantised
weight, has no memory of its own: the tensors inside it do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from umem.core.classes import TensorClass
from umem.core.errors import EnableError
from umem.runtime.unguarded import Unguarded, addresses_of
from umem.torch_compat import is_traceable_wrapper_subclass, is_zero_tensor

__all__ = [
    "buffer_at",
    "buffers_of",
    "find_chains",
    "gpu_of",
    "innermost",
    "lies_in_memory",
    "main_chain",
    "members",
    "memory_bytes",
    "named_parts",
    "named_tensors",
    "optimizer_parameters",
    "optimizer_state",
    "parameter_names",
    "parts_of",
    "plain_step",
    "plain_tensors",
    "storage_addresses",
    "tensors_in",
    "unwrapped",
    "weight_classes",
]

_MAX_DEPTH = 8
"""Levels of nested containers that are searched: a container may contain itself."""

_NO_TENSORS = frozenset({type(None), bool, int, float, str})
"""Types of most other arguments of modules."""

_PLAIN = (torch.Tensor, nn.Parameter)


def members(module: nn.Module) -> list[nn.Module]:
    """A module's children that have parameters, each once."""
    return [child for child in module.children() if any(True for _ in child.parameters())]


def find_chains(model: nn.Module) -> list[nn.Module]:
    """Every :class:`~torch.nn.ModuleList` and :class:`~torch.nn.Sequential` of two members or more.

    Outermost first; the model itself may be one.
    """
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(members(module)) > 1
    ]


def main_chain(model: nn.Module) -> nn.Module | None:
    """The chain with the largest product of length and bytes: the layers of a transformer.

    The number of parameters decides between chains of no bytes: ZeRO-3 takes the memory of
    parameters that are not in use.
    """

    def weight(chain: nn.Module) -> tuple[int, int]:
        length, sizes = len(members(chain)), list(map(memory_bytes, chain.parameters()))
        return length * sum(sizes), length * len(sizes)

    return max(find_chains(model), key=weight, default=None)


def gpu_of(model: nn.Module) -> torch.device:
    """The GPU that a model's parameters are on. Raises EnableError if that is not one."""
    devices = {it.device for it in model.parameters() if it.device.type == "cuda"}
    if len(devices) > 1:
        raise EnableError(
            f"the model is divided among {len(devices)} GPUs of this process (as by n_devices, "
            "device_map or a pipeline), and umem plans a model of one. Load it onto one GPU, which "
            "streams what has no room there, or start a process for each GPU"
        )
    if not devices:
        raise EnableError(
            "the model has no parameters on a GPU: move it to one GPU before "
            "umem.manage(model, optimizer)"
        )
    (device,) = devices
    return device


def optimizer_parameters(*optimizers: Optimizer) -> Iterator[torch.Tensor]:
    """The parameters that optimizers update, in their order."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def parameter_names(
    named: Iterable[tuple[str, torch.Tensor]], unnamed: Iterable[torch.Tensor] = ()
) -> dict[torch.Tensor, str]:
    """Name each parameter once, by the first of its names in `named`.

    Traces, running programs and profiles find a tensor by these names. `unnamed` are parameters
    that may be in no module, such as :func:`optimizer_parameters`; one that `named` lacks is
    ``parameter N``.
    """
    names: dict[torch.Tensor, str] = {}
    for name, parameter in named:
        names.setdefault(parameter, name)
    for parameter in unnamed:
        names.setdefault(parameter, f"parameter {len(names)}")
    return names


def weight_classes(parameters: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, TensorClass]]:
    """Tell trained weights from frozen ones, which have ``requires_grad=False``.

    Frozen ones come first, so that whoever tags storages in this order tags one that a trained and
    a frozen parameter share as trained.
    """
    return [
        (it, TensorClass.WEIGHTS if it.requires_grad else TensorClass.FROZEN_WEIGHTS)
        for it in sorted(parameters, key=lambda parameter: parameter.requires_grad)
    ]


def innermost(optimizer: Any) -> Any:
    """The optimizer inside of wrappers such as Accelerate's: it has the state and the hooks."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def plain_step(kind: Any) -> Callable[[Optimizer], Any]:
    """The step of an optimizer's class, without torch's hooks, which run once for all of it."""
    step: Any = kind.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    plain: Callable[[Optimizer], Any] = step
    return plain


def optimizer_state(
    optimizer: Optimizer, names: Mapping[torch.Tensor, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an optimizer's state by parameter and key: ``layers.0.weight.exp_avg``.

    `names` are those of :func:`parameter_names`; state of anything else begins with ``optimizer``.
    """
    for parameter, state in optimizer.state.items():
        yield from named_tensors(state, names.get(parameter, "optimizer"))


def named_tensors(
    value: object, name: str = "", *, depth: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in nested mappings, sequences and dataclasses, by their path: ``batch.labels``.

    Each path begins with `name`; `depth` counts the containers around `value` that are searched
    already.
    """
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    parts: Any
    if depth == _MAX_DEPTH:
        return
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = vars(value).items()
    else:
        return
    for key, part in parts:
        path = f"{name}.{key}" if name else str(key)
        yield from named_tensors(part, path, depth=depth + 1)


def buffers_of(model: nn.Module, *, recurse: bool = True) -> list[torch.Tensor]:
    """The buffers of a model, whatever `buffers` is there: a list, in Megatron-core's DDP.

    Those of the module alone with `recurse` false.
    """
    if recurse:
        return list(nn.Module.buffers(model))
    return [it for it in vars(model)["_buffers"].values() if it is not None]


def parts_of(module: nn.Module) -> list[nn.Module]:
    """A module and all that are in it, each once: as ``modules()`` tells in four times the time."""
    found, seen = [module], {module}
    for part in found:
        for child in vars(part)["_modules"].values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


def buffer_at(module: nn.Module, name: str) -> torch.Tensor:
    """The buffer of a name, as ``get_buffer()`` finds it in many times the time."""
    *path, own = name.split(".")
    for step in path:
        module = vars(module)["_modules"][step]
    buffer: torch.Tensor = vars(module)["_buffers"][own]
    return buffer


def tensors_in(value: object) -> list[torch.Tensor]:
    """The same tensors without their paths, which takes less time."""
    found: list[torch.Tensor] = []
    _add_tensors((value,), found, 0)
    return found


def _add_tensors(values: Iterable[object], found: list[torch.Tensor], depth: int) -> None:
    value: Any
    for value in values:
        kind = type(value)
        if kind is torch.Tensor or isinstance(value, torch.Tensor):
            found.append(value)
        elif kind in _NO_TENSORS or depth == _MAX_DEPTH:
            continue
        elif isinstance(value, tuple | list):
            _add_tensors(value, found, depth + 1)
        elif isinstance(value, dict | Mapping):  # a dictionary is recognised sooner
            _add_tensors(value.values(), found, depth + 1)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            _add_tensors(vars(value).values(), found, depth + 1)


def lies_in_memory(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor's storage, its sizes and strides are all that its values need.

    Not so for a sparse, nested or quantised tensor, for one without data, as zeros of forward mode
    are, and for one whose values are the conjugates or the negatives of its bytes.
    """
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.is_meta
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not is_zero_tensor(tensor)
    )


def memory_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; 0 for a sparse one, whose elements are in tensors inside."""
    return tensor.nbytes if tensor.layout is torch.strided else 0


def unwrapped(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The innermost tensors inside a tensor subclass; the tensor itself if it wraps none."""
    wrapper: Any = tensor
    if type(tensor) in _PLAIN or not is_traceable_wrapper_subclass(wrapper):
        yield tensor
        return
    for name in wrapper.__tensor_flatten__()[0]:
        part = getattr(wrapper, name)
        if isinstance(part, torch.Tensor):  # a wrapper may also name its mesh of devices
            yield from unwrapped(part)


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The innermost tensors that have a storage; sparse ones have none."""
    return (part for part in unwrapped(tensor) if part.layout is torch.strided)


def named_parts(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The plain tensors inside a tensor of this name, numbered if there are several."""
    parts = list(plain_tensors(tensor))
    if len(parts) == 1:
        return [(name, parts[0])]
    return [(f"{name}[{number}]", part) for number, part in enumerate(parts)]


def storage_addresses(tensor: torch.Tensor) -> list[int]:
    """Where the storages of a tensor begin; storages without memory are left out."""
    with Unguarded():
        parts = list(plain_tensors(tensor))
        offsets = [int(it.storage_offset()) * it.itemsize for it in parts]
    begins = zip(addresses_of(parts), offsets, strict=True)
    return [address - offset for address, offset in begins if address != offset]
