"""Checks of the hardware: driver, GPUs, memory and limits."""

from __future__ import annotations

from collections.abc import Mapping

from umem.capabilities import Capabilities
from umem.doctor._facts import Environment, Host
from umem.doctor._remedies import install_umem
from umem.doctor._report import Check, Status
from umem.doctor._versions import dotted, version_numbers
from umem.units import format_bytes, parse_bytes

__all__ = ["gpu_checks", "limit_checks"]

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
