"""Facts about this machine and Python environment, for the doctor to judge."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path

from umem._version import __version__
from umem.core.errors import NativeLibraryError, UmemError
from umem.core.install import install_command
from umem.hardware.capabilities import Capabilities, detect_all
from umem.hardware.host_memory import HostMemory, host_memory
from umem.hardware.host_share import RANK_COUNTS
from umem.runtime.live_socket import live_processes
from umem.runtime.native_library import native
from umem.torch_compat import PrivateName, missing

__all__ = [
    "PACKAGES",
    "Environment",
    "GuardLibrary",
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
"""Package -> names of the distributions that provide it."""


@dataclass(frozen=True)
class Host:
    """The machine apart from its GPUs."""

    system: str
    """Kernel with release."""
    distribution: str
    cpu_architecture: str
    """As ``uname -m`` prints it."""
    cpu_model: str
    """As ``/proc/cpuinfo`` has it."""
    cpu_count: int
    """CPUs that this process may use."""
    memory: HostMemory | None
    """Of the machine or its control groups, whichever is less; None if unknown."""
    chooses_nodes: bool
    """Whether the kernel lets this process choose the NUMA node of its memory."""
    shm_bytes: int | None
    """Size of ``/dev/shm``; None where there is none."""
    processes: int
    """Processes of this user that are under umem."""


@dataclass(frozen=True)
class Torch:
    """The installed torch."""

    version: str
    path: str
    cuda: str | None
    """CUDA version of the build, such as "13.0"; None for a build without CUDA."""
    missing: tuple[PrivateName, ...]
    """Private names that umem uses and this torch lacks."""
    cuda_started: bool
    """Whether CUDA has started in this process."""


@dataclass(frozen=True)
class Native:
    """The native library."""

    path: str
    has_cuda: bool
    """Whether it is built with CUDA and RMM, and not the host core only."""
    cuda_version: str
    """At build time; "" without CUDA."""
    rmm_version: str


@dataclass(frozen=True)
class GuardLibrary:
    """The guard, the native part that is built for one minor version of torch."""

    path: str
    """"" where there is none that works."""
    problem: str
    """Why there is none; "" where there is one."""
    remedy: str
    """The command that builds it."""


@dataclass(frozen=True)
class Environment:
    """The facts that :func:`umem.doctor.diagnose` judges.

    `torch`, `native` and `devices` are None where they could not be loaded; `torch_error`,
    `native_error` and `devices_error` then say why. `guard` is None without torch. `packages`
    has the version of each package in `PACKAGES`, and `variables` the environment variables that
    matter to umem.
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
    guard: GuardLibrary | None
    devices: tuple[Capabilities, ...] | None
    devices_error: str
    variables: Mapping[str, str]

    @property
    def cuda_major(self) -> int:
        """CUDA's major version to install for: torch's, else the driver's, else 13."""
        if self.torch and self.torch.cuda:
            major = version_numbers(self.torch.cuda)[0]
        else:
            major = self.devices[0].driver_version[0] if self.devices else 13
        return min(max(major, 12), 13)

    @property
    def install_umem(self) -> str:
        """The command that installs umem and what it needs at run time."""
        return install_command(f"cuda{self.cuda_major}")

    @property
    def rebuild_umem(self) -> str:
        """The command that builds the native library again, for the CUDA of this torch."""
        return install_command(f"cuda{self.cuda_major}", builds=True)

    @property
    def install_cupy(self) -> str:
        """The command that installs CuPy."""
        return f"pip install cupy-cuda{self.cuda_major}x"

    def install_torch(self, versions: str) -> str:
        """The command that installs a CUDA build of torch; `versions` as pip writes them."""
        index = {12: "cu126", 13: "cu130"}[self.cuda_major]
        return f"pip install 'torch{versions}' --index-url https://download.pytorch.org/whl/{index}"


_OTHER_VARIABLES = (
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MANAGED_FORCE_DEVICE_ALLOC",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    *RANK_COUNTS,
)


def collect() -> Environment:
    """Read the facts of this machine and process, without starting CUDA."""
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
        guard=_guard() if torch else None,
        devices=devices,
        devices_error=devices_error,
        variables={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("UMEM_") or name in _OTHER_VARIABLES
        },
    )


def _installed_version(distributions: tuple[str, ...]) -> str | None:
    for distribution in distributions:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    # Libraries without a Python package, as conda has RMM's: NAME-VERSION-BUILD.json.
    for distribution in distributions:
        for noted in Path(sys.prefix, "conda-meta").glob(f"{distribution}-*.json"):
            name, version, _ = noted.stem.rsplit("-", 2)
            if name == distribution:
                return version
    return None


def _torch() -> tuple[Torch | None, str]:
    try:
        torch = import_module("torch")
    # OSError: one of torch's shared libraries cannot be loaded.
    except (ImportError, OSError) as error:
        return None, str(error)
    return Torch(
        version=str(torch.__version__),
        path=str(Path(torch.__file__ or "").parent),
        cuda=torch.version.cuda,
        missing=tuple(missing()),
        cuda_started=torch.cuda.is_initialized(),
    ), ""


def _native() -> tuple[Native | None, str]:
    try:
        library = native()
    except NativeLibraryError as error:
        return None, str(error)
    path, versions = str(library.__file__), (library.CUDA_VERSION, library.RMM_VERSION)
    return Native(path, library.HAS_CUDA, *versions), ""


def _guard() -> GuardLibrary:
    # It imports torch, without which the doctor must run.
    from umem.runtime.native_guard import guard_problem, guard_remedy, native_guard

    guard = native_guard()
    path = "" if guard is None else str(guard.__file__)
    return GuardLibrary(path, guard_problem(), guard_remedy())


def _devices() -> tuple[tuple[Capabilities, ...] | None, str]:
    try:
        return detect_all(), ""
    except UmemError as error:
        return None, str(error)


def _host() -> Host:
    shm = Path("/dev/shm")
    on_linux = hasattr(os, "sched_getaffinity")
    return Host(
        system=f"{platform.system()} {platform.release()}",
        distribution=_distribution(),
        cpu_architecture=platform.machine(),
        cpu_model=_cpu_model(),
        # Only Linux has sched_getaffinity.
        cpu_count=len(os.sched_getaffinity(0)) if on_linux else os.cpu_count() or 1,
        memory=host_memory(),
        chooses_nodes=_chooses_nodes(),
        shm_bytes=shutil.disk_usage(shm).total if shm.is_dir() else None,
        processes=len(live_processes()),
    )


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return "unknown distribution"


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    # Arm kernels do not name the model.
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1) if match else "unknown model"


_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
"""Number of the system call ``get_mempolicy``, by architecture."""


def _chooses_nodes() -> bool:
    """Whether ``get_mempolicy`` is allowed: sandboxes forbid it together with ``mbind``."""
    number = _GET_MEMPOLICY.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return False
    return ctypes.CDLL(None).syscall(number, None, None, 0, None, 0) == 0


def version_numbers(version: str) -> tuple[int, int]:
    """Return (major, minor) of a version; (0, 0) for text that is no version."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def dotted(version: tuple[int, int]) -> str:
    """Write (major, minor) as text, such as "13.0"."""
    return "{}.{}".format(*version)
