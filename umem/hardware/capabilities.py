"""A machine's GPUs and host as CUDA, NVML and the kernel report them, before CUDA starts."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from umem.core.errors import UnsupportedError
from umem.cuda import bindings
from umem.hardware.host_memory import host_memory, numa_memory

__all__ = ["Capabilities", "NumaNode", "detect", "detect_all", "numa_nodes"]

_HOPPER = (9, 0)
_CUDA_12_2 = (12, 2)
"""First driver with NUMA attributes; older ones refuse the query."""

_CUDA_13 = (13, 0)
"""First driver with discard."""


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node of the host that has memory."""

    number: int
    """The kernel's number of the node."""
    total_bytes: int
    has_cpus: bool
    """False for a node of memory alone, such as the GPU's own memory on a Grace Hopper."""


@dataclass(frozen=True)
class Capabilities:
    """One CUDA device, its driver and its host: the facts that unified memory depends on."""

    device_index: int
    """The device's ordinal in this process."""
    device_name: str
    compute_capability: tuple[int, int]
    """(major, minor)."""
    total_bytes: int
    free_bytes: int | None
    """Device memory that no process holds. None where NVML does not report it, and on a MIG slice,
    for which NVML reports the whole card's. Of one pool, what the kernel calls available, within
    the limits of control groups: neither CUDA nor NVML counts what it can reclaim
    (https://docs.nvidia.com/dgx/dgx-spark, known issues)."""
    concurrent_managed_access: bool
    """CPU and GPU may access managed memory at the same time; umem needs this."""
    pageable_memory_access: bool
    """The GPU can access memory from ``malloc``."""
    pageable_uses_host_page_tables: bool
    """It does so through the CPU's own page tables (ATS)."""
    direct_managed_access_from_host: bool
    """The CPU accesses managed memory on the device without migrating it."""
    discard: bool
    """The driver has the discard call."""
    driver_version: tuple[int, int]
    """Newest CUDA version that the driver supports, (major, minor)."""
    driver_release: str | None
    """The driver's release, such as ``580.159``; None without NVML."""
    bindings_version: tuple[int, int]
    """CUDA version of the installed cuda-python, (major, minor)."""
    copy_engines: int
    pcie_link: tuple[int, int] | None
    """(generation, lanes); None where NVML does not report it."""
    nvlink_c2c: bool | None
    """NVLink-C2C joins GPU and CPU; None where NVML does not report it."""
    cpu_architecture: str
    """``x86_64``, ``aarch64``, ..."""
    host_numa_node: int | None
    """The CPU's NUMA node nearest to the device; None where the driver does not report it."""
    device_numa_node: int | None
    """The NUMA node that is the device's own memory; None where it is not one."""
    numa_nodes: tuple[NumaNode, ...]
    """All nodes of the host with memory."""
    integrated: bool = False
    """CPU and GPU share one physical memory, as on DGX Spark and Jetson: there is one pool."""

    @property
    def ats(self) -> bool:
        """Address translation services: the GPU uses the CPU's page tables."""
        return self.pageable_uses_host_page_tables

    @property
    def is_coherent(self) -> bool:
        """GPU and CPU share one coherent memory, as on Grace Hopper and Grace Blackwell."""
        return self.ats or self.nvlink_c2c is True

    @property
    def is_grace_hopper(self) -> bool:
        """A Grace Hopper superchip: Arm CPU, Hopper GPU and the coherent link between them.

        The name counts too, because the kernel's settings can switch ATS off.
        """
        return (
            self.cpu_architecture == "aarch64"
            and self.compute_capability == _HOPPER
            and (self.is_coherent or "GH200" in self.device_name)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and properties, ready for JSON."""
        return asdict(self) | {
            "ats": self.ats,
            "is_coherent": self.is_coherent,
            "is_grace_hopper": self.is_grace_hopper,
        }


def detect(device: int = 0, *, driver: Any = bindings) -> Capabilities:
    """Read one device's capabilities without starting CUDA in this process.

    The driver is initialised, but no context is made and torch's CUDA stays untouched, so the
    allocator can still be swapped afterwards. `device` is an ordinal among the devices that this
    process sees; `driver` may be an object with the functions of :mod:`umem.cuda.bindings` for
    another machine.

    Raises ``NativeLibraryError`` without cuda-python, ``UnsupportedError`` without a driver, a GPU,
    or one of this ordinal, and ``CudaError`` when CUDA refuses a query.
    """
    count = driver.device_count()
    if not 0 <= device < count:
        raise UnsupportedError(
            f"no device {device}: this process sees {count}; check CUDA_VISIBLE_DEVICES"
        )

    def attribute(name: str) -> int:
        return driver.device_attribute(device, name)

    version = _version(driver.driver_version())
    total_bytes = driver.device_total_bytes(device)
    pci_address = driver.device_pci_address(device)
    integrated = attribute("INTEGRATED") != 0
    concurrent = attribute("CONCURRENT_MANAGED_ACCESS") != 0
    discards = concurrent and version >= _CUDA_13
    host_node = device_node = -1
    if version >= _CUDA_12_2:
        host_node = attribute("HOST_NUMA_ID")
        device_node = attribute("NUMA_ID") if attribute("NUMA_CONFIG") else -1
    return Capabilities(
        device_index=device,
        device_name=driver.device_name(device),
        compute_capability=(
            attribute("COMPUTE_CAPABILITY_MAJOR"),
            attribute("COMPUTE_CAPABILITY_MINOR"),
        ),
        total_bytes=total_bytes,
        free_bytes=_pool_free_bytes(total_bytes)
        if integrated
        else _free_bytes(driver.nvml_memory_bytes(pci_address), total_bytes),
        concurrent_managed_access=concurrent,
        pageable_memory_access=attribute("PAGEABLE_MEMORY_ACCESS") != 0,
        pageable_uses_host_page_tables=attribute("PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES")
        != 0,
        direct_managed_access_from_host=attribute("DIRECT_MANAGED_MEM_ACCESS_FROM_HOST") != 0,
        discard=discards,
        driver_version=version,
        driver_release=driver.driver_release(),
        bindings_version=_version(driver.bindings_version()),
        copy_engines=attribute("ASYNC_ENGINE_COUNT"),
        pcie_link=driver.nvml_pcie_link(pci_address),
        nvlink_c2c=driver.nvml_nvlink_c2c(pci_address),
        cpu_architecture=platform.machine(),
        host_numa_node=host_node if host_node >= 0 else None,
        device_numa_node=device_node if device_node >= 0 else None,
        numa_nodes=numa_nodes(),
        integrated=integrated,
    )


def detect_all(*, driver: Any = bindings) -> tuple[Capabilities, ...]:
    """Read the capabilities of every device that this process sees, as :func:`detect` does."""
    return tuple(detect(device, driver=driver) for device in range(driver.device_count()))


def _version(number: int) -> tuple[int, int]:
    """CUDA's version number, 1000 * major + 10 * minor, in two parts."""
    return number // 1000, number % 1000 // 10


def _pool_free_bytes(total_bytes: int) -> int | None:
    host = host_memory()
    return None if host is None else min(host.available_bytes, total_bytes)


def _free_bytes(card: tuple[int, int] | None, device_total_bytes: int) -> int | None:
    if card is None:
        return None
    card_total_bytes, free_bytes = card
    # NVML's total is a little larger than CUDA's. Half as large again: the device is a MIG slice.
    if card_total_bytes > 1.5 * device_total_bytes:
        return None
    return min(free_bytes, device_total_bytes)


def numa_nodes(root: Path = Path("/sys/devices/system/node")) -> tuple[NumaNode, ...]:
    """The host's NUMA nodes that have memory, by number; none on a kernel without NUMA."""
    nodes = (
        NumaNode(number, kib["MemTotal:"] * 1024, has_cpus)
        for number, has_cpus, kib in numa_memory(root)
        if kib.get("MemTotal:")
    )
    return tuple(sorted(nodes, key=lambda node: node.number))
