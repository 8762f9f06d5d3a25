"""What decides what a module's call does, beside its arguments and the values of its tensors.

Programs change that between passes: the mode of training, a temperature, a context for a batch, the
kernels of attention, the parameters themselves (as `torch.func.functional_call` does).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from operator import is_
from typing import Any

import torch
from torch import nn

from umem.runtime.model_parts import parts_of
from umem.runtime.torch_hooks.saved_tensors import check_version
from umem.torch_compat import version_counter

__all__ = ["CallState", "Settings", "versions_of"]

_HELD = ("_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_hooks")
"""Attributes whose entries change, and not they. umem's own hooks are no entries."""


class CallState:
    """The attributes of a module and of all in it, and torch's settings, as they are now.

    Noted for each call of a block, and compared twice: all dictionaries at once, in C.

    Parameters
    ----------
    module
        The module.
    but
        Buffers that may change. For others, and for parameters, that is autograd's error.
    """

    def __init__(self, module: nn.Module, but: Collection[torch.Tensor] = ()) -> None:
        self._module = module
        self._settings = Settings()
        own = [vars(it) for it in parts_of(module)]
        self._versions = _versions(own, but)
        held = [it[name] for it in own for name in _HELD]
        self._attributes = len(own)
        self._ordered = [it for it in held if isinstance(it, OrderedDict)]
        self._plain = [*own, *(it for it in held if not isinstance(it, OrderedDict))]
        self._names, self._values = self._entries("keys"), self._entries("values")
        self._counts = self._entry_counts()
        parameters = (p for it in own for p in it["_parameters"].values() if p is not None)
        self._flags = [(it, it.requires_grad) for it in parameters]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters as they were noted."""
        return [it for it, _ in self._flags]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Have all as it was noted, and in the end as it is now."""
        for tensor, version in self._versions:
            check_version(tensor, version)
        now = self if self._is_now() else CallState(self._module)
        try:
            if now is not self:
                self._set()
            yield
        finally:
            if not now._is_now():
                now._set()

    # umem's own hooks are in subclasses of dictionaries, whose own methods do not tell of them.

    def _entries(self, of: str) -> list[Any]:
        parts = (map(getattr(dict, of), self._plain), map(getattr(OrderedDict, of), self._ordered))
        return [*chain.from_iterable(chain(*parts))]

    def _entry_counts(self) -> list[int]:
        return [*map(dict.__len__, self._plain), *map(OrderedDict.__len__, self._ordered)]

    def _is_now(self) -> bool:
        return (
            self._settings == Settings()
            and self._counts == self._entry_counts()
            # To compare tensors would compare their elements.
            and all(map(is_, self._values, self._entries("values")))
            and self._names == self._entries("keys")
            and all(it.requires_grad == was for it, was in self._flags)
        )

    def _set(self) -> None:
        if self._settings != Settings():
            self._settings.set()
        entries = zip(self._names, self._values, strict=True)
        for place, held in enumerate([*self._plain, *self._ordered]):
            noted = dict(islice(entries, self._counts[place]))
            if place < self._attributes:
                for name in held.keys() - noted.keys():
                    del held[name]
                held.update(noted)
            else:
                (OrderedDict if isinstance(held, OrderedDict) else dict).clear(held)
                held.update(noted)
        for parameter, was in self._flags:
            if parameter.requires_grad != was:
                parameter.requires_grad_(was)


def versions_of(module: nn.Module, but: Collection[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    """Parameters and buffers of a module, but some, and how often each was changed in place."""
    return _versions([vars(it) for it in parts_of(module)], but)


def _versions(
    own: Iterable[dict[str, Any]], but: Collection[torch.Tensor]
) -> list[tuple[torch.Tensor, int]]:
    kept = frozenset(map(id, but))
    every = (it for of in own for name in ("_parameters", "_buffers") for it in of[name].values())
    return [
        (it, version_counter(it))
        for it in every
        if it is not None and id(it) not in kept and not it.is_inference()
    ]


class Settings:
    """torch's own settings now, by which it chooses types and kernels."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
        self._values = (
            torch.get_default_dtype(),
            torch.get_deterministic_debug_mode(),
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
            (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Have these, and in the end those of now."""
        now = Settings()
        if now == self:
            yield
            return
        try:
            self.set()
            yield
        finally:
            now.set()

    def set(self) -> None:
        """Have these from now on."""
        dtype, determinism, flash, efficient, math, cudnn, flags = self._values
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
