"""What a machine's memory system costs: the numbers that planner and simulator work with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["EvictionOrder", "FaultEviction", "Hardware", "Source"]

EvictionOrder = Literal["access", "migration"]
"""What the driver calls least recently used: by the device's last access, or by the last time that
the driver moved or mapped the block."""

FaultEviction = Literal["serial", "overlapped"]
"""Whether a fault waits for the eviction that makes room for it, or both directions overlap."""


@dataclass(frozen=True)
class Source:
    """Where a number comes from."""

    text: str
    assumption: bool
    """True where nothing measured or published stands behind the number."""


@dataclass(frozen=True)
class Hardware:
    """A device, its host and the link between them.

    Sizes are bytes, times seconds, bandwidths bytes per second.

    Parameters
    ----------
    name, description : str
    device_bytes : int
        Device memory that tensors can have.
    host_bytes : int
        Host memory that tensors can have.
    block_bytes : int
        Unit in which the driver evicts and that the simulator follows: 2 MiB.
    page_bytes : int
        What one fault brings in: 64 KiB on x86.
    flops_per_s : mapping of str to float
        Sustained matrix throughput by precision: ``fp32 tf32 fp16 bf16 fp8``.
    memory_bytes_per_s : float
        Sustained bandwidth of device memory, reads and writes together.
    launch_s : float
        Shortest duration of a phase.
    to_device_bytes_per_s, to_host_bytes_per_s : float
        Prefetch of pages in large calls, each direction alone.
    link_bytes_per_s : float
        Both directions together.
    call_s : float
        Fixed cost of one prefetch call, during which its direction moves nothing.
    call_bytes : int
        Size that long ranges are split into, one call each.
    copy_to_device_bytes_per_s, copy_to_host_bytes_per_s : float
        Explicit copies between device and host blocks, each direction alone.
    copy_slowdown_s_per_byte : float
        What a byte that is copied costs the computation beside it.
    page_slowdown_s_per_byte : float
        What a byte of pages that move costs the computation beside them.
    mapped_read_bytes_per_s, mapped_write_bytes_per_s : float
        Host memory used in place by kernels, each direction alone.
    mapped_bytes_per_s : float
        The same, reads and writes together.
    fault_batch_s : float
        Latency of one batch of faults, from the first fault to the start of its transfers.
    faults_per_batch : int
    fault_service_s : float
        The driver's work per faulting page, besides the transfer.
    speculation_threshold : float
        Share of a block's pages past which the driver brings the rest in unasked; 1 for never.
    fault_eviction : {"serial", "overlapped"}
    eviction_order : {"access", "migration"}
    ats : bool
        The device reaches the host's own memory through the host's page tables, so that memory of
        kind ``system`` is used in place and moved by access counters.
    access_counter_threshold : int
        Uses of a block in place, in phases, after which the driver moves it to the device; where
        `ats`.
    sources : mapping of str to Source
        By field; ``flops_per_s.bf16`` for one precision.
    """

    name: str
    description: str
    device_bytes: int
    host_bytes: int
    block_bytes: int
    page_bytes: int
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    launch_s: float
    to_device_bytes_per_s: float
    to_host_bytes_per_s: float
    link_bytes_per_s: float
    call_s: float
    call_bytes: int
    copy_to_device_bytes_per_s: float
    copy_to_host_bytes_per_s: float
    copy_slowdown_s_per_byte: float
    page_slowdown_s_per_byte: float
    mapped_read_bytes_per_s: float
    mapped_write_bytes_per_s: float
    mapped_bytes_per_s: float
    fault_batch_s: float
    faults_per_batch: int
    fault_service_s: float
    speculation_threshold: float
    fault_eviction: FaultEviction
    eviction_order: EvictionOrder
    ats: bool
    access_counter_threshold: int
    sources: Mapping[str, Source]
