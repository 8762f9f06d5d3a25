"""Shares umem's memory with numba and CuPy: their arrays come from umem's allocator."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch

from umem.core.errors import UnsupportedError

if TYPE_CHECKING:
    from umem.runtime._native import Allocator

__all__ = ["import_libraries", "share_with"]

_MODULES = {
    # The array library with its package, and RMM's allocator for it.
    "numba": ("numba.cuda", "numba-cuda", "rmm.allocators.numba"),
    "cupy": ("cupy", "cupy-cuda{}x", "rmm.allocators.cupy"),
}


def import_libraries(libraries: Collection[str]) -> None:
    """Import what `share_with` needs; ``UnsupportedError`` if it is missing. Starts no CUDA."""
    cuda_major = (torch.version.cuda or "13").split(".")[0]
    for name in libraries:
        module, package, allocator_module = _MODULES[name]
        _import("rmm", f"rmm-cu{cuda_major}")
        _import(module, package.format(cuda_major))
        _import(allocator_module, f"rmm-cu{cuda_major}")


def share_with(libraries: Collection[str], allocator: Allocator) -> None:
    """Let ``numba``, ``cupy`` or both allocate from umem, through RMM's current device resource.

    `import_libraries` has imported them. If there are none, RMM keeps its own resource.
    """
    if libraries:
        resources = importlib.import_module("rmm").mr
        for device in range(allocator.device_count()):
            resource = resources.CallbackMemoryResource(*_callbacks(allocator, device))
            resources.set_per_device_resource(device, resource)
    for name in libraries:
        module, _, allocator_module = _MODULES[name]
        library = importlib.import_module(module)
        rmm_allocator = importlib.import_module(allocator_module)
        if name == "numba":
            library.set_memory_manager(rmm_allocator.RMMNumbaManager)
        else:
            library.cuda.set_allocator(rmm_allocator.rmm_cupy_allocator)


def _callbacks(
    allocator: Allocator, device: int
) -> tuple[Callable[[int, Any], int], Callable[[int, int, Any], None]]:
    def allocate(size: int, stream: Any) -> int:
        return allocator.malloc(size, device, _stream_address(stream))

    def deallocate(address: int, _size: int, stream: Any) -> None:
        # RMM may free a buffer on another stream than it was allocated on.
        if address:
            allocator.record_stream(address, _stream_address(stream), device)
            allocator.free(address, device)

    return allocate, deallocate


def _stream_address(stream: Any) -> int:
    return int(stream.__cuda_stream__()[1])


def _import(module: str, package: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedError(
            f"the policy's share needs {module}, which does not import ({error}): "
            f"`pip install {package}`, or remove it from share"
        ) from error
