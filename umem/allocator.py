"""`umem.enable`: the swap of torch's CUDA allocator for umem's, once per process."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from umem._library import native
from umem.automatic import manage_automatically
from umem.capabilities import Capabilities, detect_all
from umem.classification import Classifier, gradient_hook
from umem.errors import CudaError, EnableError, NativeLibraryError, UnsupportedError
from umem.host import host_memory_bytes
from umem.parity import install_parity
from umem.policy import Policy, ResolvedPolicy, load_policy, resolve
from umem.sharing import import_libraries, share_with

if TYPE_CHECKING:
    from umem import _native

__all__ = ["Runtime", "enable", "fell_back", "is_enabled", "native_config", "runtime"]

MANAGED_SHARE_OF_CARD = 0.9
"""Managed bytes that a process may hold, as a share of its cards' memory, where the policy sets
neither a cap nor a budget: a card that the driver has to oversubscribe far can hang."""

MANAGED_SHARE_OF_HOST = 0.5
"""Where there is a budget, what is over it lives on the host: a share of what is available there
comes on top of the budget. The rest is for the data loaders and everybody else."""


@dataclass(frozen=True)
class Runtime:
    """What `enable` has put in place."""

    policy: Policy
    resolved: ResolvedPolicy
    capabilities: tuple[Capabilities, ...]
    allocator: _native.Allocator
    classifier: Classifier


_runtime: Runtime | None = None
_fallback_reason: str | None = None


def enable(policy: str | os.PathLike[str] | Policy = "sft", *, fallback: bool = False) -> bool:
    """Swap torch's CUDA allocator for umem's, for the rest of the process.

    Call it before anything of torch uses the GPU: the first lines of a script are the place.

    Parameters
    ----------
    policy
        A preset's name (``umem policy list``), the path of a YAML file, or a
        :class:`umem.Policy`.
    fallback
        Where umem cannot take over, warn and leave torch's own allocator in place instead of
        raising. A policy that cannot be used raises all the same.

    Returns
    -------
    bool
        True when umem's allocator is in place, False after a fallback.

    Raises
    ------
    PolicyError
        If the policy, or an environment variable that changes it, is wrong.
    EnableError
        If it is too late (CUDA has started), or umem is enabled already.
    UnsupportedError
        If there is no usable GPU, or it cannot do what the policy asks.
    NativeLibraryError
        If the native library, RMM or CUDA's runtime is missing.
    CudaError
        If the driver does not start.

    Examples
    --------
    >>> import umem
    >>> umem.enable("sft")  # doctest: +SKIP
    True
    """
    global _runtime, _fallback_reason
    loaded = load_policy(policy)
    if _runtime is not None:
        raise EnableError(
            f"umem is enabled already, with policy {_runtime.policy.name!r}: a process swaps its "
            "allocator once. Remove this call, or leave out `umem run` around the script."
        )
    try:
        _runtime = _enable(loaded)
    except (EnableError, UnsupportedError, NativeLibraryError, CudaError) as error:
        if not fallback:
            raise
        _fallback_reason = str(error)
        warnings.warn(
            f"umem is not in use, torch's own allocator stays: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def is_enabled() -> bool:
    """Whether umem's allocator serves torch in this process."""
    return _runtime is not None


def runtime() -> Runtime:
    """What `enable` put in place.

    Raises
    ------
    EnableError
        If umem is not enabled; after a fallback the message says why.
    """
    if _runtime is None:
        reason = f": {_fallback_reason}" if _fallback_reason else ": call umem.enable() first"
        raise EnableError(f"umem is not enabled in this process{reason}")
    return _runtime


def fell_back() -> bool:
    """Whether `enable(..., fallback=True)` left torch's own allocator in place."""
    return _runtime is None and _fallback_reason is not None


def native_config(resolved: ResolvedPolicy) -> _native.Config:
    """The native allocator's configuration for a policy.

    Parameters
    ----------
    resolved
        From :func:`umem.policy.resolve`.
    """
    library = native()
    return library.Config(
        classes=[
            library.ClassSetting(
                kind=rule.kind,
                placement=rule.placement,
                accessed_by_device=rule.accessed_by_device,
                read_mostly=rule.read_mostly,
                min_bytes=rule.min_bytes,
            )
            for rule in resolved.rules
        ],
        managed_limit_bytes=resolved.managed_limit_bytes or 0,
        device_budget_bytes=resolved.device_budget_bytes or 0,
        system_headroom_bytes=resolved.system_headroom_bytes,
        caching=resolved.caching,
    )


def _enable(policy: Policy) -> Runtime:
    library = native()
    _check_torch(library)
    capabilities = detect_all()
    if not capabilities:
        raise UnsupportedError(
            "no GPU is visible to this process: umem needs one with managed memory. See "
            "`nvidia-smi` and CUDA_VISIBLE_DEVICES; `umem doctor` says more, and "
            "umem.enable(..., fallback=True) runs the script without umem."
        )
    resolved = resolve(policy, capabilities[0].total_bytes)
    _check_devices(resolved, capabilities)
    import_libraries(resolved.share)  # a missing one must be known before the swap
    config = native_config(_with_default_limit(resolved, capabilities))
    try:
        allocator = library.install(config)
    except RuntimeError as error:
        raise UnsupportedError(
            f"CUDA's runtime or RMM refuses this machine ({error}): see `umem doctor`."
        ) from error
    _swap(library)
    install_parity(allocator)
    classifier = Classifier(allocator, gradient_hook(allocator))
    classifier.install()
    share_with(resolved.share, allocator)
    if resolved.planner != "none":
        manage_automatically(classifier.roots)
    return Runtime(policy, resolved, capabilities, allocator, classifier)


def _check_torch(library: Any) -> None:
    if torch.version.cuda is None:
        raise UnsupportedError(
            f"torch {torch.__version__} is built without CUDA, so there is no allocator to swap: "
            "install a CUDA build of torch, or try `umem demo`, which needs no GPU."
        )
    if not library.HAS_CUDA:
        raise NativeLibraryError(
            "umem was built without CUDA and RMM: build it again from its sources with "
            "`UMEM_CUDA=13 pip install --force-reinstall --no-deps .` (or 12)."
        )
    if torch.cuda.is_initialized() or library.installed() is not None:
        raise EnableError(
            "too late: CUDA has started in this process, and torch's allocator with it. Move "
            "`import umem; umem.enable(...)` above the first line that uses the GPU, or start the "
            "script with `umem run`."
        )


def _check_devices(resolved: ResolvedPolicy, capabilities: tuple[Capabilities, ...]) -> None:
    kinds = {rule.kind for rule in resolved.rules}
    for device in capabilities:
        place = f"GPU {device.device_index} ({device.device_name})"
        if "managed" in kinds and not device.concurrent_managed_access:
            raise UnsupportedError(
                f"{place} has no concurrent managed access, without which the CPU may not touch "
                "managed memory while the GPU works (Windows, WSL 2, vGPU and some containers "
                "lack it): use a policy whose classes are all kind: device, or "
                "umem.enable(..., fallback=True)."
            )
        if "system" in kinds and not device.pageable_memory_access:
            raise UnsupportedError(
                f"{place} cannot reach memory from the system's allocator (no ATS, no HMM): use "
                "kind: managed in the policy."
            )


def _with_default_limit(
    resolved: ResolvedPolicy, capabilities: tuple[Capabilities, ...]
) -> ResolvedPolicy:
    # Cards that share the host's page tables (Grace Hopper) oversubscribe in hardware: no default.
    coherent = all(device.pageable_uses_host_page_tables for device in capabilities)
    if resolved.managed_limit_bytes is not None or coherent:
        return resolved
    limit: float
    if resolved.device_budget_bytes is None:
        limit = MANAGED_SHARE_OF_CARD * sum(device.total_bytes for device in capabilities)
    else:
        _, available_bytes = host_memory_bytes() or (0, 0)
        limit = resolved.device_budget_bytes * len(capabilities)
        limit += MANAGED_SHARE_OF_HOST * available_bytes
    return replace(resolved, managed_limit_bytes=int(limit))


def _swap(library: Any) -> None:
    """Hand torch the library's entry points.

    torch calls the first two by name. The others have setters only: without them `record_stream`
    would be a silent no-op and graphs would have no pools of their own.
    """
    pluggable = torch.cuda.memory.CUDAPluggableAllocator(
        library.__file__, "umem_malloc", "umem_free"
    )
    entry: dict[str, int] = library.torch_entry_points()
    hooks: Any = pluggable._allocator  # its stub lists none of the setters
    hooks.set_record_stream_fn(entry["record_stream"])
    hooks.set_reset_fn(entry["empty_cache"])
    hooks.set_memory_fraction_fn(entry["memory_fraction"])
    hooks.set_base_alloc_fn(entry["base_allocation"])
    hooks.set_begin_allocate_to_pool(entry["begin_pool"])
    hooks.set_end_allocate_to_pool_fn(entry["end_pool"])
    hooks.set_release_pool(entry["release_pool"])
    try:
        torch.cuda.memory.change_current_allocator(pluggable)
    except RuntimeError as error:
        raise EnableError(
            f"torch refuses the swap ({error}): something used the GPU before umem.enable(). Move "
            "`import umem; umem.enable(...)` to the top of the script."
        ) from error
