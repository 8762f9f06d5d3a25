"""Checks of what is installed: the system, umem, PyTorch, libraries."""

from __future__ import annotations

from umem.doctor._facts import Environment, Native, Torch
from umem.doctor._remedies import install_cupy, install_torch, install_umem, rebuild_umem
from umem.doctor._report import Check, Status
from umem.doctor._versions import dotted, version_numbers

__all__ = ["library_checks", "system_checks", "torch_checks", "umem_checks"]

_PYTHON_OLDEST, _PYTHON_NEWEST = (3, 11), (3, 13)
_TORCH_OLDEST, _TORCH_NEWEST, _TORCH_BELOW = (2, 8), (2, 15), (2, 16)


# ---- the system ----------------------------------------------------------------------------


def system_checks(environment: Environment) -> tuple[Check, ...]:
    """Check operating system and Python; CPU and CUDA toolkit for the record."""
    host = environment.host
    return (
        _operating_system(environment),
        Check(
            "CPU",
            Status.INFO,
            f"{host.cpu_architecture}, {host.cpu_count} usable, {host.cpu_model}",
        ),
        _python(environment),
        Check(
            "CUDA toolkit",
            Status.INFO,
            host.nvcc or "none found",
            "not needed: headers and runtime come from wheels",
        ),
    )


def _operating_system(environment: Environment) -> Check:
    name = "operating system"
    host = environment.host
    if host.system.startswith("Linux"):
        return Check(name, Status.OK, f"{host.distribution}, {host.system}")
    why = "migratable managed memory exists on Linux only"
    return Check(name, Status.FAIL, host.system, why, "run under Linux")


def _python(environment: Environment) -> Check:
    value = f"{environment.python_version} at {environment.python_path}"
    if _PYTHON_OLDEST <= version_numbers(environment.python_version) <= _PYTHON_NEWEST:
        return Check("Python", Status.OK, value)
    newest = dotted(_PYTHON_NEWEST)
    why = f"tested with {dotted(_PYTHON_OLDEST)} to {newest}"
    return Check("Python", Status.WARN, value, why, f"python{newest} -m venv .venv")


# ---- umem ----------------------------------------------------------------------------------


def umem_checks(environment: Environment) -> tuple[Check, ...]:
    """Check the native library, and that it fits the RMM and the torch beside it."""
    package = Check("umem", Status.OK, f"{environment.umem_version} at {environment.umem_path}")
    name = "native library"
    native = environment.native
    if native is None:
        why, remedy = environment.native_error, rebuild_umem(environment)
        return package, Check(name, Status.FAIL, "cannot be loaded", why, remedy)
    if not native.has_cuda:
        value = f"host core only, {native.path}"
        why = "built without CUDA and RMM, so it cannot serve a GPU"
        return package, Check(name, Status.FAIL, value, why, rebuild_umem(environment))
    value = f"for CUDA {native.cuda_version} and RMM {native.rmm_version}, {native.path}"
    return (
        package,
        Check(name, Status.OK, value),
        _rmm_match(environment, native),
        _cuda_match(environment, native),
    )


def _rmm_match(environment: Environment, native: Native) -> Check:
    name = "RMM versions match"
    built = version_numbers(native.rmm_version)
    installed = environment.packages["librmm"]
    value = f"built with {native.rmm_version}, librmm {installed or 'not'} installed"
    if installed is not None and version_numbers(installed) == built:
        return Check(name, Status.OK, value)
    why = "RMM's C++ interface changes between minor releases, so they must be the same"
    major = version_numbers(native.cuda_version)[0]
    remedy = f"pip install 'rmm-cu{major}=={built[0]}.{built[1]:02d}.*'"
    return Check(name, Status.FAIL, value, why, remedy)


def _cuda_match(environment: Environment, native: Native) -> Check:
    name = "CUDA versions match"
    torch_cuda = environment.torch.cuda if environment.torch else None
    value = f"native {native.cuda_version}, torch {torch_cuda or 'without CUDA'}"
    if torch_cuda is None:
        # A torch without CUDA fails in its own section.
        return Check(name, Status.INFO, value)
    if version_numbers(torch_cuda)[0] == version_numbers(native.cuda_version)[0]:
        return Check(name, Status.OK, value)
    why = "two major versions of CUDA's runtime do not share streams and memory"
    return Check(name, Status.FAIL, value, why, rebuild_umem(environment))


# ---- PyTorch -------------------------------------------------------------------------------


def torch_checks(environment: Environment) -> tuple[Check, ...]:
    """Check torch's version, its CUDA, and that its allocator can be swapped still."""
    torch = environment.torch
    install = install_torch(environment, f">={dotted(_TORCH_OLDEST)},<{dotted(_TORCH_BELOW)}")
    if torch is None:
        return (Check("torch", Status.FAIL, "cannot be loaded", environment.torch_error, install),)
    reinstall = f"{install} --force-reinstall"
    version = _torch_version(torch, install)
    if torch.cuda is None:
        why = "this build of torch cannot use an NVIDIA GPU"
        return version, Check("torch's CUDA", Status.FAIL, "none", why, reinstall)
    return version, Check("torch's CUDA", Status.OK, torch.cuda), _swap(torch, reinstall)


def _torch_version(torch: Torch, install: str) -> Check:
    value = f"{torch.version} at {torch.path}"
    version = version_numbers(torch.version)
    oldest, newest = dotted(_TORCH_OLDEST), dotted(_TORCH_NEWEST)
    if version < _TORCH_OLDEST:
        why = f"umem needs torch {oldest} or newer"
        return Check("torch", Status.FAIL, value, why, install)
    if version > _TORCH_NEWEST:
        why = f"newer than the tested range, {oldest} to {newest}"
        return Check("torch", Status.WARN, value, why, install)
    return Check("torch", Status.OK, value)


def _swap(torch: Torch, reinstall: str) -> Check:
    name = "allocator can be swapped"
    if torch.cuda_started:
        return Check(
            name,
            Status.FAIL,
            "no: CUDA has started in this process",
            "torch takes another allocator only before its first CUDA call",
            "call umem.enable() before anything that touches CUDA, or use umem run",
        )
    if not torch.can_swap:
        why = "this build lacks torch's pluggable allocator"
        return Check(name, Status.FAIL, "no", why, reinstall)
    return Check(name, Status.OK, "yes")


# ---- libraries -----------------------------------------------------------------------------


def library_checks(environment: Environment) -> tuple[Check, ...]:
    """Check the libraries that umem needs, and those that bring more."""
    packages = environment.packages
    install = install_umem(environment)

    def needed(name: str, why: str) -> Check:
        version = packages[name]
        if version is None:
            return Check(name, Status.FAIL, "not installed", why, install)
        return Check(name, Status.OK, version)

    def optional(name: str, purpose: str, command: str) -> Check:
        version = packages[name]
        if version is None:
            return Check(name, Status.INFO, "not installed", f"for {purpose}", command)
        return Check(name, Status.OK, version, f"for {purpose}")

    return (
        needed("librmm", "the native library allocates through it"),
        optional("rmm", "sharing memory with numba and CuPy", install),
        needed("cuda-python", "umem reads the machine through it"),
        optional("cupti-python", "telemetry", "pip install 'umem[telemetry]'"),
        optional("nvtx", "ranges in Nsight Systems", "pip install 'umem[telemetry]'"),
        needed("numba", "the planner and the simulator are compiled by it"),
        optional("numba-cuda", "numba sharing", "pip install 'umem[numba]'"),
        optional("cupy", "CuPy sharing", install_cupy(environment)),
        optional(
            "transformers", "the fine-tuning example, --model", "pip install 'umem[examples]'"
        ),
        optional("peft", "LoRA in both", "pip install 'umem[examples]'"),
        optional("accelerate", "find_executable_batch_size", "pip install 'umem[examples]'"),
    )
