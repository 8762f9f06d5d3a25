"""Stand-ins for torch's CUDA side and an allocator over host memory, for a process of their own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from cards import H200

import umem.swap
from umem.runtime.native_library import native
from umem.torch_compat import PRIVATE_NAMES

_ENTRY_POINTS = (
    *("malloc", "free", "record_stream", "empty_cache", "memory_fraction", "base_allocation"),
    *("begin_pool", "end_pool", "release_pool"),
)


def stand_in(*, is_guarded: bool = True) -> tuple[list[Any], dict[str, int]]:
    """Let ``umem.enable`` swap the allocator of a torch without CUDA, for the rest of the process.

    Returns
    -------
    list, dict
        The changes to the process in their order, and the functions that torch's allocator got.
    """
    order: list[Any] = []
    functions: dict[str, int] = {}

    class Pluggable:
        def __init__(self, path: str, malloc: str, free: str) -> None:
            order.append(f"{malloc} and {free} of {path}")

        def allocator(self) -> Any:
            setters = [it.owner()[1] for key, it in PRIVATE_NAMES.items() if key.startswith("set_")]
            return SimpleNamespace(
                **{
                    name: lambda address, name=name: functions.update({name: address})
                    for name in setters
                }
            )

    def install(config: Any) -> Any:
        order.append("install")
        return native().Allocator.on_host(config)

    guard = SimpleNamespace(__file__="guard.so", set_allocator=lambda *its: order.append(its))
    library = SimpleNamespace(
        HAS_CUDA=True,
        __file__="umem.so",
        installed=lambda: None,
        install=install,
        torch_entry_points=lambda: {name: number for number, name in enumerate(_ENTRY_POINTS)},
    )
    cuda: Any = torch.cuda.memory
    torch.version.cuda = "13.0"
    setattr(torch._C, "_CUDAPluggableAllocator", type("Setters", (), {}))  # noqa: B010
    for entry in PRIVATE_NAMES.values():
        owner, attribute = entry.owner()
        if not hasattr(owner, attribute):
            setattr(owner, attribute, None)
    cuda.CUDAPluggableAllocator = Pluggable
    cuda.change_current_allocator = lambda allocator: order.append("swap")
    swap: Any = umem.swap
    swap.detect_all = lambda: (replace(H200, free_bytes=101 << 30),)
    swap.native = lambda: library
    swap.native_guard = lambda: guard if is_guarded else None
    return order, functions
