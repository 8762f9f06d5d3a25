"""What decides what a module's call does, beside its arguments and the values of its tensors.

Programs change that between passes: the mode of training, a temperature, a context for a batch, the
kernels of attention, the parameters themselves (as `torch.func.functional_call` does).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from umem.runtime.torch_hooks.saved_tensors import check_version
from umem.torch_compat import version_counter

__all__ = ["CallState", "versions_of"]

_HELD = ("_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_hooks")
"""Attributes whose entries change, and not they. umem's own hooks are no entries."""
_ABSENT = object()


class CallState:
    """The attributes of a module and of all in it, and torch's settings, as they are now.

    Parameters
    ----------
    module
        The module.
    but
        Buffers that may change. For others, and for parameters, that is autograd's error.
    """

    def __init__(self, module: nn.Module, but: Collection[torch.Tensor] = ()) -> None:
        self._module = module
        self._versions = versions_of(module, but)
        self._settings = _settings()
        own = [vars(it) for it in module.modules()]
        self._attributes = [(it, dict(it)) for it in own]
        self._entries = [(held := it[name], _entries(held)) for it in own for name in _HELD]
        self._flags = [(it, it.requires_grad) for it in module.parameters()]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Have all as it was noted, and in the end as it is now."""
        for tensor, version in self._versions:
            check_version(tensor, version)
        now = CallState(self._module)
        try:
            self._set()
            yield
        finally:
            now._set()

    def _set(self) -> None:
        if self._settings != _settings():
            _set_settings(*self._settings)
        for own, noted in self._attributes:
            for name in own.keys() - noted.keys():
                del own[name]
            for name, value in noted.items():
                if own.get(name, _ABSENT) is not value:
                    own[name] = value
        for held, entries in self._entries:
            if [*map(_identity, _entries(held))] != [*map(_identity, entries)]:
                (OrderedDict if isinstance(held, OrderedDict) else dict).clear(held)
                held.update(entries)
        for parameter, was in self._flags:
            if parameter.requires_grad != was:
                parameter.requires_grad_(was)


def versions_of(module: nn.Module, but: Collection[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    """Parameters and buffers of a module, but some, and how often each was changed in place."""
    kept = frozenset(map(id, but))
    every = (*module.parameters(), *module.buffers())
    return [
        (it, version_counter(it)) for it in every if id(it) not in kept and not it.is_inference()
    ]


def _entries(held: Any) -> list[tuple[Any, Any]]:
    return [*(OrderedDict if isinstance(held, OrderedDict) else dict).items(held)]


def _identity(entry: tuple[Any, Any]) -> tuple[Any, int]:
    return entry[0], id(entry[1])


def _settings() -> tuple[Any, ...]:
    """Of torch, by which it chooses types and kernels."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return (
        torch.get_default_dtype(),
        torch.get_deterministic_debug_mode(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
    )


def _set_settings(
    dtype: torch.dtype,
    determinism: int,
    flash: bool,
    efficient: bool,
    math: bool,
    cudnn: bool,
    flags: tuple[bool, bool, bool],
) -> None:
    torch.set_default_dtype(dtype)
    torch.set_deterministic_debug_mode(determinism)
    torch.backends.cuda.enable_flash_sdp(flash)
    torch.backends.cuda.enable_mem_efficient_sdp(efficient)
    torch.backends.cuda.enable_math_sdp(math)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    enabled, benchmark, deterministic = flags
    torch.backends.cudnn.set_flags(
        _enabled=enabled, _benchmark=benchmark, _deterministic=deterministic
    )
