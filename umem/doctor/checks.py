"""The commands that mend what is missing, for the CUDA that the machine is on."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from umem.core.errors import PolicyError
from umem.core.units import format_bytes, parse_bytes
from umem.doctor.facts import Environment, Host, Native, Torch, dotted, version_numbers
from umem.doctor.report import Check, Feature, Report, Section, Status, Verdict, failed_checks
from umem.hardware.capabilities import Capabilities
from umem.policy import load_policy, resolve
from umem.telemetry import knows_release
from umem.torch_compat import NEWEST, OLDEST, Need

__all__ = [
    "diagnose",
    "features",
    "gpu_checks",
    "install_cupy",
    "install_torch",
    "install_umem",
    "library_checks",
    "limit_checks",
    "rebuild_umem",
    "setting_checks",
    "system_checks",
    "torch_checks",
    "umem_checks",
]

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


# What users reach for, and whether it works here.

_TORCH_FEATURES = (
    Feature(
        "statistics: memory_allocated, memory_stats, memory_summary, peaks",
        Verdict.YES,
        "umem answers in torch's vocabulary, and by tensor class",
    ),
    Feature(
        "Tensor.record_stream",
        Verdict.YES,
        "a block waits for the streams that used it before it is reused",
    ),
    Feature(
        "out-of-memory recovery: find_executable_batch_size",
        Verdict.YES,
        "the error is a RuntimeError that reads as torch's own does",
    ),
    Feature(
        "except torch.OutOfMemoryError",
        Verdict.NO,
        "that type can be raised inside libtorch only",
        'except RuntimeError, and look for "CUDA out of memory." in its text',
    ),
    Feature(
        "CUDA graphs and private pools: torch.cuda.graph",
        Verdict.YES,
        "capture and replay keep their blocks in a pool of their own",
    ),
    Feature(
        "torch.compile, default mode",
        Verdict.YES,
        "it asks the allocator for nothing unusual",
    ),
    Feature(
        'torch.compile(mode="reduce-overhead")',
        Verdict.NO,
        "cudagraph trees ask for checkPoolLiveAllocations, which torch gives to its own "
        "allocator only",
        'use mode="default" or "max-autotune-no-cudagraphs", or capture with torch.cuda.graph',
    ),
    Feature(
        "torch.backends.cudnn.benchmark = True",
        Verdict.NO,
        "the search asks for the allocator's largest cached block (cacheInfo), which torch "
        "does not pass on",
        "leave it False, torch's default",
    ),
    Feature(
        "CUDA IPC: CUDA tensors through torch.multiprocessing",
        Verdict.NO,
        "managed memory has no IPC handle",
        "share CPU tensors, or exchange through NCCL",
    ),
    Feature(
        "DDP, FSDP2 and NCCL, one process per GPU",
        Verdict.YES,
        "NCCL takes managed buffers at the speed of device memory",
    ),
    Feature(
        "torch.cuda.MemPool",
        Verdict.NO,
        "its constructor asks for createOrIncrefPool, which torch gives to its own allocator only; "
        "the pools of torch.cuda.graph are there",
        "choose the memory kind by tensor class: with umem.tensor_class(...)",
    ),
    Feature(
        "memory history: torch.cuda.memory._record_memory_history",
        Verdict.NO,
        "torch records it inside its own allocator only",
        "torch.cuda.memory_snapshot() and umem.tensors() show live blocks",
    ),
    Feature(
        "expandable segments: PYTORCH_CUDA_ALLOC_CONF",
        Verdict.NO,
        "torch's allocator settings have no effect under the swap",
        "none needed under a device budget: what is past it goes to the host",
    ),
)
"""torch's own features under the swap: the same on every machine where it works."""

_HINTS = "umem.cuda: prefetch, advise"
_DISCARD = "discard and batch prefetch"
_SYSTEM = "system memory (ATS or HMM): kind system"
_NUMBA = "numba arrays in the same memory: share: [numba]"
_CUPY = "CuPy arrays in the same memory: share: [cupy]"
_EVENTS = "migrations and faults in umem.profile()"
_COPIES = "copies in umem.profile(), through CUPTI"


def features(environment: Environment, failures: tuple[Check, ...]) -> tuple[Feature, ...]:
    """Say of each feature whether it works.

    Parameters
    ----------
    environment : Environment
        The facts.
    failures : tuple of Check
        The checks that keep the swap from working.
    """
    under_swap = (*_TORCH_FEATURES, _numba(environment), _cupy(environment))
    return (
        _swap(failures),
        *(_without_swap(feature) if failures else feature for feature in under_swap),
        *_device_features(environment.devices or ()),
        _events(environment),
        _copies(environment),
    )


def _swap(failures: tuple[Check, ...]) -> Feature:
    name = "one-line swap: umem.enable()"
    if failures:
        why = f"see above: {', '.join(check.name for check in failures)}"
        return Feature(name, Verdict.NO, why, "mend what is marked FAIL")
    why = "torch, RMM, native library, driver and GPU fit together"
    return Feature(name, Verdict.YES, why)


def _without_swap(feature: Feature) -> Feature:
    if feature.verdict is Verdict.NO:
        return feature
    return Feature(feature.name, Verdict.NO, f"needs the one-line swap; {feature.why}")


def _numba(environment: Environment) -> Feature:
    if environment.packages["numba-cuda"] is None:
        why = "numba-cuda is not installed"
        return Feature(_NUMBA, Verdict.NO, why, "pip install 'umem[numba]'")
    return _sharing(environment, _NUMBA)


def _cupy(environment: Environment) -> Feature:
    if environment.packages["cupy"] is None:
        return Feature(_CUPY, Verdict.NO, "CuPy is not installed", install_cupy(environment))
    return _sharing(environment, _CUPY)


def _sharing(environment: Environment, name: str) -> Feature:
    if environment.packages["rmm"] is None:
        why = "it goes through RMM's Python package, which is not installed"
        return Feature(name, Verdict.NO, why, install_umem(environment))
    return Feature(name, Verdict.YES, "its allocator is served from umem's, with the same limits")


def _device_features(devices: tuple[Capabilities, ...]) -> tuple[Feature, ...]:
    if not devices:
        names = (_HINTS, _DISCARD, _SYSTEM)
        return tuple(Feature(name, Verdict.NO, "no usable GPU") for name in names)
    return _hints(devices), _discard(devices), _system(devices)


def _hints(devices: tuple[Capabilities, ...]) -> Feature:
    if all(device.concurrent_managed_access for device in devices):
        return Feature(_HINTS, Verdict.YES, "every GPU has concurrent managed access")
    return Feature(_HINTS, Verdict.NO, "a GPU has no concurrent managed access")


def _discard(devices: tuple[Capabilities, ...]) -> Feature:
    if not all(device.discard and device.prefetch_batch for device in devices):
        why = "they came with CUDA 13, and need concurrent managed access on every GPU"
        return Feature(_DISCARD, Verdict.NO, why, "update the driver to 580 or newer")
    if devices[0].bindings_version[0] < 13:
        why = "the driver has them; umem.cuda reaches them through cuda-python 13 only"
        remedy = "pip install 'umem[cuda13]' with a CUDA 13 torch"
        return Feature(_DISCARD, Verdict.PARTLY, why, remedy)
    return Feature(_DISCARD, Verdict.YES, "driver and cuda-python have them")


def _system(devices: tuple[Capabilities, ...]) -> Feature:
    if all(device.ats for device in devices):
        return Feature(_SYSTEM, Verdict.YES, "the GPU walks the CPU's page tables (ATS)")
    if all(device.pageable_memory_access for device in devices):
        why = "heterogeneous memory management migrates pages by faults: correct, but slow"
        return Feature(_SYSTEM, Verdict.PARTLY, why, "prefer kind managed")
    why = "a GPU does not reach memory from malloc"
    return Feature(_SYSTEM, Verdict.NO, why, "use kind managed or pinned")


def _events(environment: Environment) -> Feature:
    if not environment.devices:
        return Feature(_EVENTS, Verdict.NO, "no usable GPU")
    release = environment.devices[0].driver_release
    if release is not None and knows_release(release):
        return Feature(_EVENTS, Verdict.YES, "the driver's own event queue has all of them")
    why = f"the event queue of driver {release or 'of unknown release'} is not known to umem"
    return Feature(_EVENTS, Verdict.PARTLY, f"{why}; CUPTI is asked, which may lose records")


def _copies(environment: Environment) -> Feature:
    version = environment.packages["cupti-python"]
    if version is None:
        why = "cupti-python is not installed"
        return Feature(_COPIES, Verdict.NO, why, "pip install 'umem[telemetry]'")
    if not environment.devices:
        return Feature(_COPIES, Verdict.NO, "no usable GPU")
    serves = environment.devices[0].driver_version
    if version_numbers(version) > serves:
        why = f"cupti-python {version} is newer than the driver, which serves {dotted(serves)}"
        remedy = f"pip install 'cupti-python=={dotted(serves)}.*'"
        return Feature(_COPIES, Verdict.PARTLY, why, remedy)
    return Feature(_COPIES, Verdict.YES, f"cupti-python {version}")


# Checks of the hardware: driver, GPUs, memory and limits.

_SMALL_SHM_BYTES = 1 << 30
"""Below this DataLoader workers run out of it; containers start with 64 MiB."""

_HOST_SHARE = 0.8
"""Share of the available host memory that managed memory may be advised to take."""


# ---- GPUs ----------------------------------------------------------------------------------


def gpu_checks(environment: Environment) -> tuple[Check, ...]:
    """Check the driver, and what each GPU can do for managed memory."""
    devices = environment.devices
    if not devices:
        return (_no_gpu(environment),)
    checks = [_driver(environment, devices[0])]
    for device in devices:
        checks += [
            _device(device),
            _managed_memory(device),
            _pageable_memory(device),
            _link(device),
        ]
    return (*checks, _numa_nodes(devices[0]))


def _no_gpu(environment: Environment) -> Check:
    why = environment.devices_error or "the driver sees no GPU"
    remedy = "nvidia-smi shows whether driver and GPU are there"
    hidden = environment.variables.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        why += f" (CUDA_VISIBLE_DEVICES={hidden!r})"
        remedy += "; unset CUDA_VISIBLE_DEVICES"
    if environment.packages["cuda-python"] is None:
        remedy = install_umem(environment)
    return Check("GPU", Status.FAIL, "none usable", why, remedy)


def _driver(environment: Environment, device: Capabilities) -> Check:
    release = device.driver_release or "unknown release"
    value = f"{release}, serves CUDA up to {dotted(device.driver_version)}"
    native = environment.native
    if (
        native
        and native.has_cuda
        and device.driver_version[0] < version_numbers(native.cuda_version)[0]
    ):
        return Check(
            "driver",
            Status.FAIL,
            value,
            f"umem's native library is built for CUDA {native.cuda_version}",
            "update the driver to 580 or newer, or pip install 'umem[cuda12]' with a CUDA 12 torch",
        )
    return Check("driver", Status.OK, value)


def _device(device: Capabilities) -> Check:
    free = "" if device.free_bytes is None else f", {format_bytes(device.free_bytes)} free"
    kind = ""
    if device.is_grace_hopper:
        kind = ", Grace Hopper"
    elif device.is_coherent:
        kind = ", coherent with its CPU"
    return Check(
        f"GPU {device.device_index}",
        Status.OK,
        f"{device.device_name}, compute capability {dotted(device.compute_capability)}, "
        f"{format_bytes(device.total_bytes)}{free}, {device.copy_engines} copy engines{kind}",
    )


def _managed_memory(device: Capabilities) -> Check:
    name = f"GPU {device.device_index} managed memory"
    if not device.concurrent_managed_access:
        return Check(
            name,
            Status.FAIL,
            "no concurrent managed access",
            "the presets need it: without it pages cannot migrate while the GPU runs (WSL, some "
            "virtual GPUs, old GPUs)",
            "run on bare-metal Linux or a passed-through GPU of compute capability 6.0 or newer; "
            "here, umem.enable() still works with a policy whose classes are all kind: device",
        )
    if not (device.prefetch_batch and device.discard):
        return Check(
            name,
            Status.WARN,
            "concurrent access",
            "no batch prefetch and no discard: contents that are dead are moved all the same",
            "update the driver to 580 or newer (CUDA 13)",
        )
    return Check(name, Status.OK, "concurrent access, batch prefetch, discard")


def _pageable_memory(device: Capabilities) -> Check:
    if device.ats:
        value = "reached through the CPU's page tables (ATS)"
    elif device.pageable_memory_access:
        value = "reached by migration (HMM)"
    else:
        value = "not reached"
    host = "reaches" if device.direct_managed_access_from_host else "does not reach"
    return Check(
        f"GPU {device.device_index} pageable memory",
        Status.INFO,
        value,
        f"the CPU {host} pages on the device in place",
    )


def _link(device: Capabilities) -> Check:
    if device.nvlink_c2c:
        value = "NVLink-C2C"
    elif device.pcie_link is None:
        value = "unknown: NVML does not say"
    else:
        value = "PCIe {} x{}".format(*device.pcie_link)
    if device.host_numa_node is not None:
        value += f", nearest CPUs on node {device.host_numa_node}"
    return Check(f"GPU {device.device_index} link", Status.INFO, value)


def _numa_nodes(device: Capabilities) -> Check:
    nodes = ", ".join(
        f"{node.number}: {format_bytes(node.total_bytes)}{'' if node.has_cpus else ' without CPUs'}"
        for node in device.numa_nodes
    )
    return Check("NUMA nodes", Status.INFO, nodes or "none")


# ---- memory and limits ---------------------------------------------------------------------


def limit_checks(environment: Environment) -> tuple[Check, ...]:
    """Check the host's memory against the cards', and ``/dev/shm``."""
    host = environment.host
    locked = "unlimited" if host.memlock_bytes is None else format_bytes(host.memlock_bytes)
    return (
        _host_memory(environment),
        Check(
            "locked memory (ulimit -l)",
            Status.INFO,
            locked,
            "CUDA's pinned memory is not bound by it; RDMA libraries are",
        ),
        _shared_memory(host),
    )


def _host_memory(environment: Environment) -> Check:
    host = environment.host
    name = "host memory"
    if host.total_bytes is None or host.available_bytes is None:
        return Check(name, Status.WARN, "unknown", "/proc/meminfo cannot be read")
    value = f"{format_bytes(host.total_bytes)}, {format_bytes(host.available_bytes)} available"
    # On a coherent machine the GPU's own memory is part of the host's, so it says nothing.
    cards = [device.total_bytes for device in environment.devices or () if not device.is_coherent]
    largest_bytes = max(cards, default=0)
    if host.available_bytes >= largest_bytes:
        return Check(name, Status.OK, value)
    limit_bytes = _managed_limit_bytes(environment.variables)
    if limit_bytes is not None and limit_bytes <= host.available_bytes:
        return Check(name, Status.OK, f"{value}; UMEM_MANAGED_LIMIT keeps within it")
    advised_gib = max(1, int(host.available_bytes * _HOST_SHARE) >> 30)
    return Check(
        name,
        Status.WARN,
        value,
        f"less than a card's {format_bytes(largest_bytes)}: pages evicted from a full card "
        "would find no room, and the machine can hang",
        f"export UMEM_MANAGED_LIMIT={advised_gib}GiB",
    )


def _managed_limit_bytes(variables: Mapping[str, str]) -> int | None:
    """Return UMEM_MANAGED_LIMIT; None when unset, or unusable, which its own check reports."""
    if "UMEM_MANAGED_LIMIT" not in variables:
        return None
    try:
        return parse_bytes(variables["UMEM_MANAGED_LIMIT"])
    except ValueError:
        return None


def _shared_memory(host: Host) -> Check:
    name, why = "/dev/shm", "DataLoader workers hand batches over it"
    if host.shm_bytes is None:
        return Check(name, Status.WARN, "missing", why)
    value = format_bytes(host.shm_bytes)
    if host.shm_bytes < _SMALL_SHM_BYTES:
        remedy = "docker run --shm-size=8g (or --ipc=host)"
        return Check(name, Status.WARN, value, why, remedy)
    return Check(name, Status.OK, value)


# Checks of environment variables: umem's own, and those of CUDA and torch that bear on it.

_UMEM_VARIABLES = (
    "UMEM_POLICY",
    "UMEM_MANAGED_LIMIT",
    "UMEM_DEVICE_BUDGET",
    "UMEM_PLANNER",
    "UMEM_NVTX",
    "UMEM_COMMIT",
)

_BUILD_VARIABLES = ("UMEM_CUDA",)
"""Read when umem is built."""

_ANY_DEVICE_BYTES = 1 << 40
"""Percentages are of a card; where there is none, any will do to tell whether they are usable."""

_WITHOUT_EFFECT = "torch's own allocator reads it; under the swap it has no effect"

_HARMFUL_VARIABLES = {
    "PYTORCH_ALLOC_CONF": _WITHOUT_EFFECT,
    "PYTORCH_CUDA_ALLOC_CONF": _WITHOUT_EFFECT,
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "torch's own allocator reads it; umem caches all the same",
    "CUDA_LAUNCH_BLOCKING": (
        "kernels run one by one, so that no migration hides behind computation"
    ),
    "CUDA_MANAGED_FORCE_DEVICE_ALLOC": (
        "managed memory is kept on the device, so that none can be evicted"
    ),
}
"""Name -> what is wrong with setting it."""


def setting_checks(environment: Environment) -> tuple[Check, ...]:
    """Check the environment variables that are set."""
    checks = tuple(
        _umem_variable(name, value, environment)
        if name.startswith("UMEM_")
        else _other_variable(name, value)
        for name, value in environment.variables.items()
        if name not in _BUILD_VARIABLES
    )
    return checks or (Check("environment variables", Status.INFO, "none set"),)


def _umem_variable(name: str, value: str, environment: Environment) -> Check:
    if name not in _UMEM_VARIABLES:
        near = difflib.get_close_matches(name, _UMEM_VARIABLES, n=1)
        remedy = f"use {near[0]}" if near else f"umem reads {', '.join(_UMEM_VARIABLES)}"
        return Check(name, Status.WARN, value, "umem reads no such variable", remedy)
    devices = environment.devices
    device_bytes = devices[0].total_bytes if devices else _ANY_DEVICE_BYTES
    try:
        if name == "UMEM_POLICY":
            load_policy(value)
        elif name == "UMEM_NVTX":
            if value not in ("0", "1"):
                return Check(name, Status.WARN, value, "ranges are off", "set it to 1, or unset it")
        else:
            resolve(load_policy("sft"), device_bytes, {name: value})
    except PolicyError as error:
        return Check(name, Status.FAIL, value, str(error), f"correct it, or unset {name}")
    return Check(name, Status.OK, value)


def _other_variable(name: str, value: str) -> Check:
    if name in _HARMFUL_VARIABLES and value not in ("", "0"):
        return Check(name, Status.WARN, value, _HARMFUL_VARIABLES[name], f"unset {name}")
    return Check(name, Status.INFO, value)


# Checks of what is installed: the system, umem, PyTorch, libraries.

_PYTHON_OLDEST, _PYTHON_NEWEST = (3, 11), (3, 13)


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
    below = dotted((NEWEST[0], NEWEST[1] + 1))
    install = install_torch(environment, f">={dotted(OLDEST)},<{below}")
    if torch is None:
        return (Check("torch", Status.FAIL, "cannot be loaded", environment.torch_error, install),)
    reinstall = f"{install} --force-reinstall"
    version = _torch_version(torch, install)
    if torch.cuda is None:
        why = "this build of torch cannot use an NVIDIA GPU"
        return version, Check("torch's CUDA", Status.FAIL, "none", why, reinstall)
    return version, Check("torch's CUDA", Status.OK, torch.cuda), _swap_check(torch, reinstall)


def _torch_version(torch: Torch, install: str) -> Check:
    value = f"{torch.version} at {torch.path}"
    version = version_numbers(torch.version)
    oldest, newest = dotted(OLDEST), dotted(NEWEST)
    if version < OLDEST:
        why = f"umem needs torch {oldest} or newer"
        return Check("torch", Status.FAIL, value, why, install)
    if version > NEWEST:
        why = f"newer than the tested range, {oldest} to {newest}"
        return Check("torch", Status.WARN, value, why, install)
    return Check("torch", Status.OK, value)


def _swap_check(torch: Torch, reinstall: str) -> Check:
    name = "allocator can be swapped"
    if torch.cuda_started:
        return Check(
            name,
            Status.FAIL,
            "no: CUDA has started in this process",
            "torch takes another allocator only before its first CUDA call",
            "call umem.enable() before anything that touches CUDA, or use umem run",
        )
    needed = [entry for entry in torch.missing if entry.need is Need.ENABLE]
    if needed:
        why = "; ".join(f"this torch lacks {entry.name}: {entry.without}" for entry in needed)
        return Check(name, Status.FAIL, "no", why, reinstall)
    if torch.missing:
        names = ", ".join(f"{entry.name} ({entry.need})" for entry in torch.missing)
        return Check(name, Status.WARN, "yes", f"some calls will fail without {names}", reinstall)
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
        needed("numba", "the planner and the simulator are compiled by it"),
        optional("numba-cuda", "numba sharing", "pip install 'umem[numba]'"),
        optional("cupy", "CuPy sharing", install_cupy(environment)),
        optional(
            "transformers", "the fine-tuning example, --model", "pip install 'umem[examples]'"
        ),
        optional("peft", "LoRA in both", "pip install 'umem[examples]'"),
        optional("accelerate", "find_executable_batch_size", "pip install 'umem[examples]'"),
    )


# From facts to findings.


def diagnose(environment: Environment) -> Report:
    """Judge the facts.

    Parameters
    ----------
    environment : Environment
        From :func:`umem.doctor.collect`.
    """
    sections = (
        Section("System", system_checks(environment)),
        Section("umem", umem_checks(environment)),
        Section("PyTorch", torch_checks(environment)),
        Section("Libraries", library_checks(environment)),
        Section("GPUs", gpu_checks(environment)),
        Section("Memory and limits", limit_checks(environment)),
        Section("Settings", setting_checks(environment)),
    )
    return Report(
        sections=sections,
        features=features(environment, failed_checks(sections)),
        devices=environment.devices or (),
    )
