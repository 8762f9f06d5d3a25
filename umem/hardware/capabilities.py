"""What a machine's GPUs can do for unified memory, known before CUDA starts in the process."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from umem.core.errors import UnsupportedError
from umem.cuda import bindings as _bindings

__all__ = [
    "Capabilities",
    "Driver",
    "NumaNode",
    "detect",
    "detect_all",
    "numa_nodes",
]

_HOPPER = (9, 0)
_CUDA_12_2 = (12, 2)
"""First driver with NUMA attributes; older ones refuse the question."""

_CUDA_13 = (13, 0)
"""First driver with batch prefetch and discard."""


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node of the host that has memory.

    Parameters
    ----------
    number : int
        The kernel's number of the node.
    total_bytes : int
        Its memory.
    has_cpus : bool
        False for a node that is memory alone, as the GPU's own memory on a Grace Hopper.
    """

    number: int
    total_bytes: int
    has_cpus: bool


@dataclass(frozen=True)
class Capabilities:
    """One CUDA device, its driver and its host, as far as unified memory is concerned.

    Parameters
    ----------
    device_index : int
        The device's ordinal in this process.
    device_name : str
        Its marketing name.
    compute_capability : tuple of int
        (major, minor).
    total_bytes : int
        Device memory.
    free_bytes : int or None
        Device memory that no process holds; None where NVML cannot say, or on a MIG slice,
        for which NVML gives the whole card's.
    concurrent_managed_access : bool
        CPU and GPU may touch managed memory at the same time; umem needs it.
    pageable_memory_access : bool
        The GPU reaches memory from ``malloc``.
    pageable_uses_host_page_tables : bool
        It does so through the CPU's own page tables (ATS).
    direct_managed_access_from_host : bool
        The CPU reaches managed memory on the device without moving it.
    prefetch_batch, discard : bool
        The driver has the batch prefetch and discard calls.
    driver_version : tuple of int
        Newest CUDA that the driver serves, (major, minor).
    driver_release : str or None
        The driver's release ("580.159"), None without NVML.
    bindings_version : tuple of int
        CUDA of the installed cuda-python, (major, minor).
    copy_engines : int
        Asynchronous copy engines.
    pcie_link : tuple of int or None
        (generation, lanes), None where NVML cannot say.
    nvlink_c2c : bool or None
        NVLink-C2C joins GPU and CPU; None where NVML cannot say.
    cpu_architecture : str
        ``x86_64``, ``aarch64``, ...
    host_numa_node : int or None
        The CPU's NUMA node nearest to the device, None where the driver cannot say.
    device_numa_node : int or None
        The NUMA node that is the device's own memory, None where it is not one.
    numa_nodes : tuple of NumaNode
        All nodes of the host with memory.
    """

    device_index: int
    device_name: str
    compute_capability: tuple[int, int]
    total_bytes: int
    free_bytes: int | None
    concurrent_managed_access: bool
    pageable_memory_access: bool
    pageable_uses_host_page_tables: bool
    direct_managed_access_from_host: bool
    prefetch_batch: bool
    discard: bool
    driver_version: tuple[int, int]
    driver_release: str | None
    bindings_version: tuple[int, int]
    copy_engines: int
    pcie_link: tuple[int, int] | None
    nvlink_c2c: bool | None
    cpu_architecture: str
    host_numa_node: int | None
    device_numa_node: int | None
    numa_nodes: tuple[NumaNode, ...]

    @property
    def ats(self) -> bool:
        """Address translation services: the GPU walks the CPU's page tables."""
        return self.pageable_uses_host_page_tables

    @property
    def is_coherent(self) -> bool:
        """GPU and CPU share one coherent memory, as on Grace Hopper and Grace Blackwell."""
        return self.ats or self.nvlink_c2c is True

    @property
    def is_grace_hopper(self) -> bool:
        """A Grace Hopper superchip: Arm CPU, Hopper GPU and the coherent link between them.

        The name counts too, because ATS can be switched off by the kernel's settings.
        """
        return (
            self.cpu_architecture == "aarch64"
            and self.compute_capability == _HOPPER
            and (self.is_coherent or "GH200" in self.device_name)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and what follows from them, ready for JSON."""
        return asdict(self) | {
            "ats": self.ats,
            "is_coherent": self.is_coherent,
            "is_grace_hopper": self.is_grace_hopper,
        }


class Driver:
    """What :func:`detect` asks: the machine's own driver, NVML and kernel.

    Nothing here creates a CUDA context or starts torch's CUDA. A subclass that answers every
    question from a table stands for another machine.
    """

    def driver_version(self) -> int:
        """Return the newest CUDA served, as 1000 * major + 10 * minor."""
        return _bindings.driver_version()

    def driver_release(self) -> str | None:
        """Return the driver's release, None without NVML."""
        return _bindings.driver_release()

    def bindings_version(self) -> int:
        """Return the CUDA of cuda-python, as 1000 * major + 10 * minor."""
        return _bindings.bindings_version()

    def device_count(self) -> int:
        """Return how many devices the process sees."""
        return _bindings.device_count()

    def device_name(self, device: int) -> str:
        """Return the marketing name."""
        return _bindings.device_name(device)

    def device_total_bytes(self, device: int) -> int:
        """Return the device's memory in bytes."""
        return _bindings.device_total_bytes(device)

    def device_attribute(self, device: int, name: str) -> int:
        """Return one attribute by its name in ``CUdevice_attribute``, less the prefix."""
        return _bindings.device_attribute(device, name)

    def card_memory_bytes(self, device: int) -> tuple[int, int] | None:
        """Return (total, free) of the whole card, None where NVML cannot say."""
        return _bindings.nvml_memory_bytes(_bindings.device_pci_address(device))

    def pcie_link(self, device: int) -> tuple[int, int] | None:
        """Return (generation, lanes), None where NVML cannot say."""
        return _bindings.nvml_pcie_link(_bindings.device_pci_address(device))

    def nvlink_c2c(self, device: int) -> bool | None:
        """Tell whether NVLink-C2C is on, None where NVML cannot say."""
        return _bindings.nvml_nvlink_c2c(_bindings.device_pci_address(device))

    def cpu_architecture(self) -> str:
        """Return the CPU's architecture as ``uname -m`` has it."""
        return platform.machine()

    def numa_nodes(self) -> tuple[NumaNode, ...]:
        """Return the host's nodes with memory."""
        return numa_nodes()


_THIS_MACHINE = Driver()


def detect(device: int = 0, *, driver: Driver = _THIS_MACHINE) -> Capabilities:
    """Read what one device can do, without starting CUDA in this process.

    The driver is initialised, but no context is made and torch's CUDA stays untouched, so the
    allocator can still be swapped afterwards.

    Parameters
    ----------
    device : int
        Ordinal among the devices that this process sees.
    driver : Driver
        Where to read; the machine's own by default.

    Raises
    ------
    umem.core.errors.NativeLibraryError
        Without cuda-python.
    umem.core.errors.UnsupportedError
        Without a driver, a GPU, or one of this ordinal.
    umem.core.errors.CudaError
        When CUDA refuses a question.

    Examples
    --------
    >>> detect(0).is_grace_hopper  # doctest: +SKIP
    False
    """
    count = driver.device_count()
    if not 0 <= device < count:
        raise UnsupportedError(
            f"no device {device}: this process sees {count}; check CUDA_VISIBLE_DEVICES"
        )
    driver_version = _version(driver.driver_version())
    total_bytes = driver.device_total_bytes(device)
    knows_numa = driver_version >= _CUDA_12_2

    def flag(name: str) -> bool:
        return driver.device_attribute(device, name) != 0

    def node(name: str) -> int | None:
        number = driver.device_attribute(device, name)
        return number if number >= 0 else None

    concurrent = flag("CONCURRENT_MANAGED_ACCESS")
    return Capabilities(
        device_index=device,
        device_name=driver.device_name(device),
        compute_capability=(
            driver.device_attribute(device, "COMPUTE_CAPABILITY_MAJOR"),
            driver.device_attribute(device, "COMPUTE_CAPABILITY_MINOR"),
        ),
        total_bytes=total_bytes,
        free_bytes=_free_bytes(driver.card_memory_bytes(device), total_bytes),
        concurrent_managed_access=concurrent,
        pageable_memory_access=flag("PAGEABLE_MEMORY_ACCESS"),
        pageable_uses_host_page_tables=flag("PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES"),
        direct_managed_access_from_host=flag("DIRECT_MANAGED_MEM_ACCESS_FROM_HOST"),
        prefetch_batch=concurrent and driver_version >= _CUDA_13,
        discard=concurrent and driver_version >= _CUDA_13,
        driver_version=driver_version,
        driver_release=driver.driver_release(),
        bindings_version=_version(driver.bindings_version()),
        copy_engines=driver.device_attribute(device, "ASYNC_ENGINE_COUNT"),
        pcie_link=driver.pcie_link(device),
        nvlink_c2c=driver.nvlink_c2c(device),
        cpu_architecture=driver.cpu_architecture(),
        host_numa_node=node("HOST_NUMA_ID") if knows_numa else None,
        device_numa_node=node("NUMA_ID") if knows_numa and flag("NUMA_CONFIG") else None,
        numa_nodes=driver.numa_nodes(),
    )


def detect_all(*, driver: Driver = _THIS_MACHINE) -> tuple[Capabilities, ...]:
    """Read every device that this process sees, as :func:`detect` does.

    Parameters
    ----------
    driver : Driver
        Where to read; the machine's own by default.

    Raises
    ------
    NativeLibraryError, UnsupportedError, CudaError
        As :func:`detect`.
    """
    return tuple(detect(device, driver=driver) for device in range(driver.device_count()))


def numa_nodes(root: Path = Path("/sys/devices/system/node")) -> tuple[NumaNode, ...]:
    """Read the host's NUMA nodes that have memory, in the order of their numbers.

    Parameters
    ----------
    root : Path
        The kernel's directory of nodes.

    Returns
    -------
    tuple of NumaNode
        Empty on a kernel without NUMA.
    """
    nodes = []
    for directory in root.glob("node[0-9]*"):
        number = int(directory.name.removeprefix("node"))
        # Lines read "Node 0 MemTotal:       24623428 kB".
        meminfo = (directory / "meminfo").read_text().splitlines()
        total_kib = next(int(line.split()[3]) for line in meminfo if "MemTotal:" in line)
        has_cpus = bool((directory / "cpulist").read_text().strip())
        if total_kib:
            nodes.append(NumaNode(number, total_kib * 1024, has_cpus))
    return tuple(sorted(nodes, key=lambda node: node.number))


def _version(number: int) -> tuple[int, int]:
    """Split CUDA's version coding, 1000 * major + 10 * minor."""
    return number // 1000, number % 1000 // 10


def _free_bytes(card: tuple[int, int] | None, device_total_bytes: int) -> int | None:
    if card is None:
        return None
    card_total_bytes, free_bytes = card
    # NVML counts a little that CUDA holds back; half as much again is a MIG slice's whole card.
    if card_total_bytes > 1.5 * device_total_bytes:
        return None
    return min(free_bytes, device_total_bytes)
