"""The facts that a diagnosis goes by."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path

from umem._version import __version__
from umem.core.errors import NativeLibraryError, UmemError
from umem.hardware.capabilities import Capabilities, detect_all, host_memory_bytes
from umem.runtime.native_library import native
from umem.torch_compat import PrivateName, missing

__all__ = [
    "PACKAGES",
    "Environment",
    "Host",
    "Native",
    "Torch",
    "collect",
    "dotted",
    "version_numbers",
]

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "rmm": ("rmm-cu13", "rmm-cu12", "rmm"),
    "librmm": ("librmm-cu13", "librmm-cu12", "librmm"),
    "cuda-python": ("cuda-python", "cuda-bindings"),
    "cupti-python": ("cupti-python",),
    "numba": ("numba",),
    "numba-cuda": ("numba-cuda",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "transformers": ("transformers",),
    "peft": ("peft",),
    "accelerate": ("accelerate",),
}
"""Name in the report -> names of the distributions that provide it."""


@dataclass(frozen=True)
class Host:
    """The machine apart from its GPUs; None where the system does not say.

    Parameters
    ----------
    system, distribution : str
        Kernel with release, and distribution.
    cpu_architecture, cpu_model : str
        As ``uname -m`` and ``/proc/cpuinfo`` have them.
    cpu_count : int
        CPUs that this process may use.
    total_bytes, available_bytes : int or None
        Host memory, the smaller of the machine's and the control group's.
    memlock_bytes : int or None
        Limit on locked memory; None for unlimited.
    shm_bytes : int or None
        Size of ``/dev/shm``.
    nvcc : str or None
        Path of a CUDA toolkit's compiler.
    """

    system: str
    distribution: str
    cpu_architecture: str
    cpu_model: str
    cpu_count: int
    total_bytes: int | None
    available_bytes: int | None
    memlock_bytes: int | None
    shm_bytes: int | None
    nvcc: str | None


@dataclass(frozen=True)
class Torch:
    """The installed torch.

    Parameters
    ----------
    version, path : str
        Its version and folder.
    cuda : str or None
        CUDA of its build ("13.0"), None for a build without.
    missing : tuple of PrivateName
        The private names that umem uses and this torch lacks.
    cuda_started : bool
        CUDA has started in this process.
    """

    version: str
    path: str
    cuda: str | None
    missing: tuple[PrivateName, ...]
    cuda_started: bool


@dataclass(frozen=True)
class Native:
    """The native library.

    Parameters
    ----------
    path : str
        Its file.
    has_cuda : bool
        Built against CUDA and RMM; the host core only otherwise.
    cuda_version, rmm_version : str
        Versions at build time, "" without.
    """

    path: str
    has_cuda: bool
    cuda_version: str
    rmm_version: str


@dataclass(frozen=True)
class Environment:
    """Everything that :func:`umem.doctor.diagnose` goes by.

    Parameters
    ----------
    host : Host
        The machine.
    python_version, python_path : str
        The interpreter.
    umem_version, umem_path : str
        The package.
    packages : mapping of str to str or None
        Versions of the installed distributions by the names of `PACKAGES`.
    torch, native, devices
        What was found; None where it could not be loaded, and then `torch_error`,
        `native_error`, `devices_error` say why.
    variables : mapping of str to str
        Environment variables that matter to umem, as set.
    """

    host: Host
    python_version: str
    python_path: str
    umem_version: str
    umem_path: str
    packages: Mapping[str, str | None]
    torch: Torch | None
    torch_error: str
    native: Native | None
    native_error: str
    devices: tuple[Capabilities, ...] | None
    devices_error: str
    variables: Mapping[str, str]


# Reading the facts of this machine and process.

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
        missing=tuple(missing()),
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


# Versions as pairs of numbers, (major, minor).


def version_numbers(version: str) -> tuple[int, int]:
    """Return (major, minor) of a version, (0, 0) for what is none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def dotted(version: tuple[int, int]) -> str:
    """Write (major, minor) as versions are written."""
    return "{}.{}".format(*version)
