"""Reading the facts of this machine and process."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from importlib import import_module, metadata
from pathlib import Path

from umem._library import native
from umem._version import __version__
from umem.capabilities import Capabilities, detect_all
from umem.doctor._facts import PACKAGES, Environment, Host, Native, Torch
from umem.errors import NativeLibraryError, UmemError
from umem.host import host_memory_bytes

__all__ = ["collect"]

_CUDA_VARIABLES = (
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MANAGED_FORCE_DEVICE_ALLOC",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
)


def collect() -> Environment:
    """Read the facts of this machine and process; CUDA is not started.

    Returns
    -------
    Environment
        What could not be read is None, beside the reason.
    """
    torch, torch_error = _torch()
    library, native_error = _native()
    devices, devices_error = _devices()
    return Environment(
        host=_host(),
        python_version=platform.python_version(),
        python_path=sys.executable,
        umem_version=__version__,
        umem_path=str(Path(__file__).parents[1]),
        packages={name: _installed_version(names) for name, names in PACKAGES.items()},
        torch=torch,
        torch_error=torch_error,
        native=library,
        native_error=native_error,
        devices=devices,
        devices_error=devices_error,
        variables={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("UMEM_") or name in _CUDA_VARIABLES
        },
    )


def _installed_version(distributions: tuple[str, ...]) -> str | None:
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _torch() -> tuple[Torch | None, str]:
    try:
        torch = import_module("torch")
    # OSError: a shared library of torch's that cannot be loaded.
    except (ImportError, OSError) as error:
        return None, str(error)
    found = Torch(
        version=str(torch.__version__),
        path=str(Path(torch.__file__ or "").parent),
        cuda=torch.version.cuda,
        can_swap=hasattr(torch.cuda.memory, "CUDAPluggableAllocator")
        and hasattr(torch._C, "_cuda_changeCurrentAllocator"),
        cuda_started=torch.cuda.is_initialized(),
    )
    return found, ""


def _native() -> tuple[Native | None, str]:
    try:
        library = native()
    except NativeLibraryError as error:
        return None, str(error)
    found = Native(
        path=str(library.__file__),
        has_cuda=library.HAS_CUDA,
        cuda_version=library.CUDA_VERSION,
        rmm_version=library.RMM_VERSION,
    )
    return found, ""


def _devices() -> tuple[tuple[Capabilities, ...] | None, str]:
    try:
        return detect_all(), ""
    except UmemError as error:
        return None, str(error)


def _host() -> Host:
    total_bytes, available_bytes = host_memory_bytes() or (None, None)
    shm = Path("/dev/shm")
    return Host(
        system=f"{platform.system()} {platform.release()}",
        distribution=_distribution(),
        cpu_architecture=platform.machine(),
        cpu_model=_cpu_model(),
        cpu_count=_cpu_count(),
        total_bytes=total_bytes,
        available_bytes=available_bytes,
        memlock_bytes=_memlock_bytes(),
        shm_bytes=shutil.disk_usage(shm).total if shm.is_dir() else None,
        nvcc=shutil.which("nvcc"),
    )


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return "unknown distribution"


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    # Arm kernels name no model.
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1) if match else "unknown model"


def _cpu_count() -> int:
    # Only Linux says which CPUs a process may use.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memlock_bytes() -> int | None:
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return None
    limit_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit_bytes == resource.RLIM_INFINITY else limit_bytes
