"""The commands that mend what is missing, for the CUDA that the machine is on."""

from __future__ import annotations

from umem.doctor._facts import Environment
from umem.doctor._versions import version_numbers

__all__ = ["install_cupy", "install_torch", "install_umem", "rebuild_umem"]

_CUDA_MAJORS = (12, 13)

_TORCH_INDEX = {12: "cu126", 13: "cu130"}
"""Folders of PyTorch's package index."""


def install_umem(environment: Environment) -> str:
    """Return the command that installs umem and what it needs at run time."""
    return f"pip install 'umem[cuda{_cuda_major(environment)}]'"


def rebuild_umem(environment: Environment) -> str:
    """Return the command that replaces a native library, and the one for a source folder."""
    major = _cuda_major(environment)
    return (
        f"{install_umem(environment)} --force-reinstall --no-cache-dir (from a source folder: "
        f"UMEM_CUDA={major} pip install '.[cuda{major}]')"
    )


def install_torch(environment: Environment, versions: str) -> str:
    """Return the command that installs a CUDA build of torch, of `versions` as pip has them."""
    index = _TORCH_INDEX[_cuda_major(environment)]
    return f"pip install 'torch{versions}' --index-url https://download.pytorch.org/whl/{index}"


def install_cupy(environment: Environment) -> str:
    """Return the command that installs CuPy."""
    return f"pip install cupy-cuda{_cuda_major(environment)}x"


def _cuda_major(environment: Environment) -> int:
    """CUDA's major version to install for: torch's, else the driver's, else 13."""
    oldest, newest = _CUDA_MAJORS
    if environment.torch and environment.torch.cuda:
        major = version_numbers(environment.torch.cuda)[0]
    elif environment.devices:
        major = environment.devices[0].driver_version[0]
    else:
        major = newest
    return min(max(major, oldest), newest)
