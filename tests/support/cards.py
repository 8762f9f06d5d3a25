"""Capabilities of known GPUs, as their drivers report them."""

from __future__ import annotations

from dataclasses import replace

from umem.hardware.capabilities import Capabilities, NumaNode

GIB = 1 << 30

H200 = Capabilities(
    device_index=0,
    device_name="NVIDIA H200",
    compute_capability=(9, 0),
    total_bytes=150109880320,
    free_bytes=None,
    concurrent_managed_access=True,
    pageable_memory_access=False,
    pageable_uses_host_page_tables=False,
    direct_managed_access_from_host=False,
    discard=True,
    driver_version=(13, 0),
    driver_release="580.159",
    bindings_version=(13, 0),
    copy_engines=3,
    pcie_link=(5, 16),
    nvlink_c2c=False,
    cpu_architecture="x86_64",
    host_numa_node=0,
    device_numa_node=None,
    numa_nodes=(NumaNode(0, 512 * GIB, True),),
)
GB10 = replace(
    H200,
    device_name="NVIDIA GB10",
    compute_capability=(12, 1),
    total_bytes=int(119.63 * GIB),
    free_bytes=100 * GIB,
    pageable_memory_access=True,
    pageable_uses_host_page_tables=True,
    direct_managed_access_from_host=True,
    copy_engines=2,
    pcie_link=None,
    nvlink_c2c=None,
    cpu_architecture="aarch64",
    numa_nodes=(NumaNode(0, int(119.63 * GIB), True),),
    integrated=True,
)
"""Made up: nobody has run umem on one."""
GH200 = replace(
    H200,
    device_name="NVIDIA GH200 480GB",
    total_bytes=int(94.5 * GIB),
    pageable_memory_access=True,
    pageable_uses_host_page_tables=True,
    direct_managed_access_from_host=True,
    nvlink_c2c=True,
    cpu_architecture="aarch64",
    device_numa_node=1,
    numa_nodes=(NumaNode(0, 480 * GIB, True), NumaNode(1, 95 * GIB, False)),
)
