"""Names of ``torch.cuda`` that mean the CPU, for systems that know of no other device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

_FACTORIES = ("empty", "full", "ones", "tensor", "zeros")

_CPU = torch.device("cpu")


def cuda_means_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors "on the GPU" be made on the CPU, which has the GPU's random numbers too.

    What Megatron-core 0.16 calls for a `GPTModel` of local layers.
    """
    for name in _FACTORIES:
        monkeypatch.setattr(torch, name, _without_cuda(getattr(torch, name)))
    for owner in (torch.Tensor, torch.nn.Module):
        monkeypatch.setattr(owner, "cuda", lambda self, *_, **__: self)
    monkeypatch.setattr(torch.Tensor, "type", _type_of(torch.Tensor.type))
    cuda: Any = torch.cuda
    monkeypatch.setattr(cuda, "current_device", lambda: _CPU)
    monkeypatch.setattr(cuda, "default_generators", {_CPU: torch.default_generator})
    monkeypatch.setattr(cuda, "manual_seed", torch.manual_seed)
    for name in ("set_device", "synchronize", "empty_cache"):
        monkeypatch.setattr(cuda, name, lambda *_: None)
    for module in (cuda, cuda.random):
        monkeypatch.setattr(module, "get_rng_state", lambda *_, **__: torch.get_rng_state())
    monkeypatch.setattr(cuda, "_lazy_call", lambda call, **_: call())
    monkeypatch.setattr(cuda, "_lazy_init", lambda: None)


def _without_cuda(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, device: Any = None, **options: Any) -> Any:
        return make(*args, device=None if device == "cuda" else device, **options)

    return made


def _type_of(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.type``, whose name says that the tensor is on a GPU."""

    @functools.wraps(type_of)
    def named(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        found = type_of(self, *args, **options)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    return named
