"""A program written for a GPU, run on a machine without one.

A trace has one device. torch without CUDA refuses to move a tensor to a GPU even where no memory
is behind it, and its autograd has no thread for one. So whatever the program puts on a GPU is put
on the CPU: what an operator reads and writes does not depend on it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["one_device"]

_CPU = torch.device("cpu")


class _OnCpu(TorchFunctionMode):
    """Replaces the device in calls of torch's functions."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0].to(_CPU)
        if func is torch.Tensor.pin_memory:
            return args[0]
        kwargs = {key: _on_cpu(key, value) for key, value in (kwargs or {}).items()}
        if func is torch.Tensor.to:
            args = tuple(_on_cpu("device", value) for value in args)
        return func(*args, **kwargs)


def _on_cpu(key: str, value: Any) -> Any:
    if key == "pin_memory":
        return False
    if key == "device" and _is_gpu(value):
        return _CPU
    return value


def _is_gpu(value: object) -> bool:
    if isinstance(value, str | torch.device):
        return str(value).partition(":")[0] == "cuda"
    # A bare number is a GPU's, except True and False, which are other arguments' values.
    return isinstance(value, int) and not isinstance(value, bool)


@contextmanager
def one_device() -> Iterator[None]:
    """Put on the CPU what a program puts on a GPU, and autocast there what it autocasts."""
    start: Callable[..., None] = torch.autocast.__init__

    @functools.wraps(start)
    def on_cpu(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type == "cuda":
            dtype = dtype or torch.get_autocast_dtype("cuda")
        start(self, "cpu", dtype, enabled, cache_enabled)

    with patch.object(torch.autocast, "__init__", on_cpu), _OnCpu():
        yield
