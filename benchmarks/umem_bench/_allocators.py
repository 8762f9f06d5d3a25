"""The allocators compared: each is put in place, in a process of its own, before CUDA starts."""

from __future__ import annotations

from umem.core.errors import UnsupportedError
from umem_bench.results import AllocatorName

__all__ = ["peaks", "reset_peaks", "select"]

_POOL_GRANULE_BYTES = 2 << 20


def select(allocator: AllocatorName, policy: str, managed_limit_bytes: int) -> None:
    """Make `allocator` torch's, for the rest of the process.

    Parameters
    ----------
    allocator
        ``torch`` leaves torch's own cache in place.
    policy
        For ``umem``: a preset's name or a policy file.
    managed_limit_bytes
        The most managed memory that RMM's allocators may hold. umem reads its own limit from
        UMEM_MANAGED_LIMIT.

    Raises
    ------
    UnsupportedError
        Where torch, or RMM's part for torch, does not work here.
    """
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError(
            "torch sees no usable GPU: `umem bench core` needs none, `umem doctor` says what is "
            "missing"
        )
    if allocator == "umem":
        import umem

        umem.enable(policy)
    elif allocator != "torch":
        _select_rmm(pooled=allocator == "rmm-pool", limit_bytes=managed_limit_bytes)


def reset_peaks(allocator: AllocatorName) -> None:
    """Start the peaks afresh, where the allocator counts them."""
    import torch

    if allocator in ("torch", "umem"):
        torch.cuda.reset_peak_memory_stats()


def peaks(allocator: AllocatorName) -> tuple[int | None, int | None]:
    """Peak reserved and allocated bytes since `reset_peaks`, None where nobody counts.

    RMM's pool never shrinks: its size now is its peak.
    """
    import torch

    if allocator in ("torch", "umem"):
        return torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
    if allocator == "rmm-pool":
        import rmm

        pool = rmm.mr.get_current_device_resource()
        if not isinstance(pool, rmm.mr.PoolMemoryResource):
            raise RuntimeError(f"RMM's current resource is {pool}, no longer the benchmark's pool")
        return pool.pool_size(), None
    return None, None


def _select_rmm(*, pooled: bool, limit_bytes: int) -> None:
    """RMM's own recipe for torch over managed memory, with a limit."""
    try:
        import rmm
        from rmm.allocators.torch import rmm_torch_allocator
    except ImportError as error:
        raise UnsupportedError(
            f"RMM is not installed ({error}): pip install 'umem[cuda13]' (or cuda12), or leave "
            "rmm-pool and rmm-managed out of --allocators"
        ) from error
    import torch

    if rmm_torch_allocator is None:
        raise UnsupportedError("RMM finds no GPU that torch can use: see `umem doctor`")
    if pooled:
        limit_bytes -= limit_bytes % _POOL_GRANULE_BYTES
        initial_bytes = limit_bytes // 2
        rmm.reinitialize(
            pool_allocator=True,
            managed_memory=True,
            initial_pool_size=initial_bytes - initial_bytes % _POOL_GRANULE_BYTES,
            maximum_pool_size=limit_bytes,
        )
    else:
        managed = rmm.mr.ManagedMemoryResource()
        rmm.mr.set_current_device_resource(
            rmm.mr.LimitingResourceAdaptor(managed, allocation_limit=limit_bytes)
        )
    torch.cuda.memory.change_current_allocator(rmm_torch_allocator)
