"""The facts that a diagnosis goes by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from umem.capabilities import Capabilities

__all__ = ["PACKAGES", "Environment", "Host", "Native", "Torch"]

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "rmm": ("rmm-cu13", "rmm-cu12", "rmm"),
    "librmm": ("librmm-cu13", "librmm-cu12", "librmm"),
    "cuda-python": ("cuda-python", "cuda-bindings"),
    "cupti-python": ("cupti-python",),
    "nvtx": ("nvtx",),
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
    can_swap : bool
        It has the calls that change the allocator.
    cuda_started : bool
        CUDA has started in this process.
    """

    version: str
    path: str
    cuda: str | None
    can_swap: bool
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
