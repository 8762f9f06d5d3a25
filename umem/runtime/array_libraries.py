"""One memory for numba and CuPy: their arrays come from umem's allocator and count in it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from umem.core.errors import UnsupportedError

if TYPE_CHECKING:
    from umem.runtime._native import Allocator

__all__ = ["import_libraries", "share_with"]


def import_libraries(libraries: Iterable[str]) -> None:
    """Import what `share_with` will need, which starts CUDA in none of them.

    Raises
    ------
    UnsupportedError
        If a library is not installed.
    """
    for name in libraries:
        _rmm("rmm")
        _IMPORTERS[name]()


def share_with(libraries: Iterable[str], allocator: Allocator) -> None:
    """Point libraries at umem's memory, by way of RMM's current device resource.

    Parameters
    ----------
    libraries
        ``numba``, ``cupy`` or both. None: RMM's own resource stays as it is.
    allocator
        The process's allocator.

    Raises
    ------
    UnsupportedError
        If a library is not installed.
    """
    names = tuple(libraries)
    if names:
        _set_rmm_resource(allocator)
    for name in names:
        _SHARERS[name]()


def _set_rmm_resource(allocator: Allocator) -> None:
    rmm = _rmm("rmm")
    for device in range(allocator.device_count()):
        allocate, deallocate = _callbacks(allocator, device)
        rmm.mr.set_per_device_resource(device, rmm.mr.CallbackMemoryResource(allocate, deallocate))


def _callbacks(
    allocator: Allocator, device: int
) -> tuple[Callable[[int, Any], int], Callable[[int, int, Any], None]]:
    def allocate(size: int, stream: Any) -> int:
        return allocator.malloc(size, device, _stream_address(stream))

    def deallocate(address: int, _size: int, stream: Any) -> None:
        # RMM may give a buffer back on another stream than it was taken on.
        if address:
            allocator.record_stream(address, _stream_address(stream), device)
            allocator.free(address, device)

    return allocate, deallocate


def _stream_address(stream: Any) -> int:
    return int(stream.__cuda_stream__()[1])


def _share_with_numba() -> None:
    _numba_cuda().set_memory_manager(_rmm("rmm.allocators.numba").RMMNumbaManager)


def _share_with_cupy() -> None:
    _cupy().cuda.set_allocator(_rmm("rmm.allocators.cupy").rmm_cupy_allocator)


def _numba_cuda() -> Any:
    return _import("numba.cuda", "numba-cuda")


def _cupy() -> Any:
    return _import("cupy", f"cupy-cuda{_cuda_major()}x")


def _rmm(module: str) -> Any:
    return _import(module, f"rmm-cu{_cuda_major()}")


def _cuda_major() -> str:
    return (torch.version.cuda or "13").split(".")[0]


_IMPORTERS = {"numba": _numba_cuda, "cupy": _cupy}
_SHARERS = {"numba": _share_with_numba, "cupy": _share_with_cupy}


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedError(
            f"the policy's share needs {module}, which does not import ({error}): "
            f"`pip install {package}`, or take it out of share"
        ) from error
