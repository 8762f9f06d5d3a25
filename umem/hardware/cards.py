"""Hardware profiles that come with umem: one row for each card, and rules for what no row has.

A row has what the vendor publishes: peaks, bandwidth of memory, the link. A rate of a profile is a
published peak times the share of its own peak that a measured card sustains. ``_MEASURED`` has what
was measured or published of a card itself, which goes before the rules.

A figure is its value, as in a profile's file, and where it comes from. A text that begins with
"assumed: " marks an assumption, one with "measured" or "derived" a measurement; every other one
names a publication.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

__all__ = ["CARDS", "card_profile"]

_Figures = Mapping[str, tuple[Any, str]]


class Card(NamedTuple):
    """What is published of a card. Peaks are of dense matrices, with sums in float32."""

    description: str
    device_name: str
    """Regular expression of CUDA's name of it."""
    memory: str
    """Device memory in total, as CUDA reports it."""
    peaks: tuple[float, float, float, float, float]
    """TFLOP/s in fp32, tf32, fp16, bf16 and fp8; 0 for a type that its tensor cores lack."""
    bandwidth: float
    """Of device memory, TB/s."""
    link: str
    """A key of ``_LINKS``."""
    shares: str
    """A key of ``_SHARES``."""
    sheet: str
    """Address of the data sheet."""


_NVIDIA = "https://www.nvidia.com/en-us/"
_DATA_CENTER = _NVIDIA + "data-center/"
_WHITE_PAPERS = "https://images.nvidia.com/aem-dam/Solutions/geforce/"

_A100 = (19.5, 156, 312, 312, 0)
_HOPPER = (67, 495, 989, 989, 1979)
_GRACE_BLACKWELL = (80, 1250, 2500, 2500, 5000)

CARDS: Mapping[str, Card] = {
    "a100-40-pcie": Card("NVIDIA A100 40 GB, PCIe 4 x16", r"NVIDIA A100-PCIE-40GB",
        "39.39 GiB", _A100, 1.555, "PCIe 4 x16", "hbm", _DATA_CENTER + "a100/"),
    "a100-40-sxm": Card("NVIDIA A100 40 GB SXM, PCIe 4 x16", r"NVIDIA A100-SXM4-40GB",
        "39.39 GiB", _A100, 1.555, "PCIe 4 x16", "hbm", _DATA_CENTER + "a100/"),
    "a100-80-pcie": Card("NVIDIA A100 80 GB, PCIe 4 x16", r"NVIDIA A100 80GB PCIe",
        "79.15 GiB", _A100, 1.935, "PCIe 4 x16", "hbm", _DATA_CENTER + "a100/"),
    "a100-80-sxm": Card("NVIDIA A100 80 GB SXM, PCIe 4 x16", r"NVIDIA A100-SXM4-80GB",
        "79.15 GiB", _A100, 2.039, "PCIe 4 x16", "hbm", _DATA_CENTER + "a100/"),
    "b200": Card("NVIDIA B200, PCIe 5 x16", r"NVIDIA B200",
        "178.36 GiB", (75, 1100, 2250, 2250, 4500), 7.7, "PCIe 5 x16", "hbm",
        _DATA_CENTER + "hgx/"),
    "gb10": Card("NVIDIA GB10 (DGX Spark), one pool of 128 GB LPDDR5X", r"NVIDIA GB10",
        "119.63 GiB", (31, 62.5, 125, 125, 250), 0.273, "one pool", "lpddr",
        _NVIDIA + "products/workstations/dgx-spark/"),
    "gb200": Card("NVIDIA GB200, one of the two GPUs of a Grace, NVLink-C2C", r"NVIDIA GB200",
        "184.31 GiB", _GRACE_BLACKWELL, 8, "half of NVLink-C2C", "hbm",
        _DATA_CENTER + "gb200-nvl72/"),
    "gb300": Card("NVIDIA GB300, one of the two GPUs of a Grace, NVLink-C2C", r"NVIDIA GB300",
        "276.5 GiB", _GRACE_BLACKWELL, 8, "half of NVLink-C2C", "hbm",
        _DATA_CENTER + "gb300-nvl72/"),
    "gh200-144": Card("NVIDIA GH200, 144 GB HBM3e, 480 GB LPDDR5X, NVLink-C2C",
        r"NVIDIA GH200 144G.*", "144 GB", _HOPPER, 4.9, "NVLink-C2C", "hbm",
        _DATA_CENTER + "grace-hopper-superchip/"),
    "gh200-96": Card("NVIDIA GH200, 96 GB HBM3, 480 GB LPDDR5X, NVLink-C2C",
        r"NVIDIA GH200 480GB", "94.5 GiB", _HOPPER, 4, "NVLink-C2C", "hbm",
        _DATA_CENTER + "grace-hopper-superchip/"),
    "gh200-quad": Card("NVIDIA GH200, one of four in a node, 96 GB HBM3, 128 GB LPDDR5X each",
        r"NVIDIA GH200 120GB", "94.5 GiB", _HOPPER, 4, "NVLink-C2C", "hbm",
        _DATA_CENTER + "grace-hopper-superchip/"),
    "h100-nvl": Card("NVIDIA H100 NVL 94 GB, PCIe 5 x16", r"NVIDIA H100 NVL",
        "93.1 GiB", (60, 417.5, 835.5, 835.5, 1670.5), 3.9, "PCIe 5 x16", "hbm",
        _DATA_CENTER + "h100/"),
    "h100-pcie": Card("NVIDIA H100 PCIe 80 GB HBM2e, PCIe 5 x16", r"NVIDIA H100 PCIe",
        "79.1 GiB", (51, 378, 756, 756, 1513), 2, "PCIe 5 x16", "hbm", _DATA_CENTER + "h100/"),
    "h100-sxm": Card("NVIDIA H100 SXM 80 GB HBM3, PCIe 5 x16",
        r"NVIDIA H100 80GB HBM3", "79.2 GiB", _HOPPER, 3.35, "PCIe 5 x16", "hbm",
        _DATA_CENTER + "h100/"),
    "h200": Card("NVIDIA H200, PCIe 5 x16", r"NVIDIA H200",
        "150109880320", _HOPPER, 4.8, "PCIe 5 x16", "hbm", _DATA_CENTER + "h200/"),
    "jetson-thor": Card("NVIDIA Jetson AGX Thor, one pool of 128 GB LPDDR5X", r"NVIDIA Thor",
        "128 GB", (8.06, 129, 258.5, 258.5, 517), 0.273, "one pool", "lpddr",
        "https://developer.nvidia.com/blog/"
        "introducing-nvidia-jetson-thor-the-ultimate-platform-for-physical-ai/"),
    "l4": Card("NVIDIA L4, PCIe 4 x16", r"NVIDIA L4",
        "22.03 GiB", (30.3, 60, 121, 121, 242.5), 0.3, "PCIe 4 x16", "gddr",
        _DATA_CENTER + "l4/"),
    "l40s": Card("NVIDIA L40S, PCIe 4 x16", r"NVIDIA L40S",
        "44.4 GiB", (91.6, 183, 362, 362, 733), 0.864, "PCIe 4 x16", "gddr",
        _DATA_CENTER + "l40s/"),
    "rtx-3090": Card("NVIDIA GeForce RTX 3090, PCIe 4 x16", r"NVIDIA GeForce RTX 3090",
        "23.69 GiB", (35.6, 35.6, 71, 71, 0), 0.936, "PCIe 4 x16", "geforce",
        "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"),
    "rtx-4090": Card("NVIDIA GeForce RTX 4090, PCIe 4 x16", r"NVIDIA GeForce RTX 4090",
        "23.64 GiB", (82.6, 82.6, 165.2, 165.2, 330.3), 1.008, "PCIe 4 x16", "geforce",
        _WHITE_PAPERS + "ada/nvidia-ada-gpu-architecture.pdf"),
    "rtx-5090": Card("NVIDIA GeForce RTX 5090, PCIe 5 x16", r"NVIDIA GeForce RTX 5090",
        "31.36 GiB", (104.8, 104.8, 209.5, 209.5, 419), 1.792, "PCIe 5 x16", "geforce",
        _WHITE_PAPERS + "blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"),
    "rtx-a6000": Card("NVIDIA RTX A6000, PCIe 4 x16", r"NVIDIA RTX A6000",
        "47.53 GiB", (38.7, 77.4, 154.8, 154.8, 0), 0.768, "PCIe 4 x16", "gddr",
        _NVIDIA + "design-visualization/rtx-a6000/"),
    "rtx-pro-6000": Card("NVIDIA RTX PRO 6000 Blackwell at 600 W, PCIe 5 x16",
        r"NVIDIA RTX PRO 6000 Blackwell (Workstation|Server) Edition",
        "94.97 GiB", (126, 251.9, 503.8, 503.8, 1007.6), 1.792, "PCIe 5 x16", "gddr",
        _NVIDIA + "products/workstations/professional-desktop-gpus/rtx-pro-6000/"),
    "t4": Card("NVIDIA T4, PCIe 3 x16", r"(NVIDIA )?Tesla T4",
        "14.74 GiB", (8.1, 0, 65, 0, 0), 0.32, "PCIe 3 x16", "gddr", _DATA_CENTER + "tesla-t4/"),
}  # fmt: skip
"""By name, sorted."""

_TOTAL = "total capacity in PyTorch's out-of-memory messages on such cards"

_PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8")

_H200_SHARES = dict(zip(_PRECISIONS, (0.76, 0.69, 0.64, 0.67, 0.61), strict=True))


class _Share(NamedTuple):
    """What cards of a kind sustain of their peaks, and why."""

    products: Mapping[str, float]
    products_why: str
    memory: float
    memory_why: str
    unvectorised: float
    """Of the sustained bandwidth."""
    unvectorised_why: str


_ON_GDDR = (
    1.0,
    "as memory_bytes_per_s: on an H100 instructions bound such kernels, at 1.89 TB/s, which is "
    "more than this memory has",
)
_OF_H200 = "the share that an H200 sustains, whose power bounds its clock"
_OF_H200_MEMORY = "the share that an H200 reaches"

_SHARES = {
    "hbm": _Share(
        _H200_SHARES,
        _OF_H200,
        0.91,
        _OF_H200_MEMORY,
        0.62,
        "times 0.62, the share of memory_bytes_per_s that an H100 reaches",
    ),
    "gddr": _Share(_H200_SHARES, _OF_H200, 0.91, _OF_H200_MEMORY, *_ON_GDDR),
    "geforce": _Share(
        {**dict.fromkeys(_PRECISIONS, 0.95), "fp32": 0.72},
        "a GeForce is not bound by its power there: torch.matmul in bf16 reaches 1.07 of an RTX "
        "5090's (main-horse.github.io/posts/5090-mm-perf) and 0.99 of an RTX 5060 Ti's, fp32 0.72 "
        "(github.com/QuantumDrizzy/BLACKWALL)",
        0.91,
        _OF_H200_MEMORY,
        *_ON_GDDR,
    ),
    "lpddr": _Share(
        _H200_SHARES,
        _OF_H200,
        0.85,
        "the share that a GH200 reaches in STREAM (arXiv 2407.07850)",
        *_ON_GDDR,
    ),
}

_ON_H200 = "measured on one H200, driver 580.159, CUDA 13.0, 2026-11-21"
_NEXT_DAY = "measured on one H200, driver 580.159, CUDA 13.0, 2026-11-22"
_ON_H100 = "measured on one H100 80 GB, driver 580.159.04, 2026-11-23"
_KERNELS = "benchmarks/results/h100-kernel-rates.txt"

# The driver is NVIDIA/open-gpu-kernel-modules 595.45.04, folder kernel-open/nvidia-uvm.
_EVERYWHERE: _Figures = {
    "block_bytes": (
        "2 MiB",
        "the driver: UVM_VA_BLOCK_BITS 21, UVM_CHUNK_SIZE_MAX 2 MiB (595.45.04)",
    ),
    "page_bytes": (
        "64 KiB",
        "the driver: UVM_BIG_PAGE_SIZE 64 KiB; uvm_perf_prefetch.c grows each fault to a whole one "
        "(595.45.04)",
    ),
    "host_bytes": (
        "256 GB",
        "assumed: an eighth of a host with 2 TB and eight cards; no migration figure depends on it",
    ),
    "launch_s": ("4.9 us", "assumed: as measured on one H200"),
    "call_s": (
        "27 us",
        "assumed: 4 threads with chunks of 32 MiB were measured at 49 GB/s on one H200, one long "
        "call at 51: 33554432 B / 49 GB/s - 33554432 B / 51 GB/s = 27 us that the other threads do "
        "not hide. Taken to be the same for a chunk of call_bytes, and on every card",
    ),
    "call_bytes": (
        "128 MiB",
        f"{_ON_H200}: the chunk with which both directions at once did not slow computation; with "
        "32 MiB one run in four fell to 4 and 10 GB/s",
    ),
    "host_update_bytes_per_s": (
        "123 GB/s",
        "assumed: as measured on the host of one H100, 16 cores of a Xeon with DDR5: 4.4 G "
        "parameters/s, 28 bytes each",
    ),
    "fault_batch_s": (
        "45 us",
        "the G10 artifact (MICRO 2023), system_latency_us 45 with kernel times of an A100 40 GB; "
        "the driver's way through a batch is the same on every card",
    ),
    "faults_per_batch": (
        256,
        "the driver: UVM_PERF_FAULT_BATCH_COUNT_DEFAULT 256 in uvm_gpu_replayable_faults.c "
        "(595.45.04)",
    ),
    "fault_service_s": (
        "13.33 us",
        f"derived. {_ON_H200}: GPU faults on host pages bring in 5 to 12 GB/s; the geometric "
        "middle is 7.75 GB/s. A batch is 256 // 17 = 15 blocks, 255 faults, 31457280 B. "
        "It takes 31457280 B / 7.75 GB/s = 4061 us. The link needs 31457280 B / 51 GB/s = 617 us "
        "of it and the batch 45 us, which leaves (4061 - 617 - 45) us / 255 = 13.33 us for each "
        "fault. The driver's work is taken to be the same on every card",
    ),
    "speculation_threshold": (
        "51%",
        "the driver: UVM_PREFETCH_THRESHOLD_DEFAULT 51 in uvm_perf_prefetch.c (595.45.04)",
    ),
    "fault_eviction": (
        "serial",
        "the driver: evict_root_chunk in uvm_pmm_gpu.c moves a block out before its memory is "
        "given to the fault (595.45.04)",
    ),
    "eviction_order": (
        "migration",
        "the driver: uvm_pmm_gpu.c evicts the head of a list to whose tail a block goes when it is "
        "allocated or made resident; a mere access does not move it (595.45.04)",
    ),
    "access_counter_threshold": (
        1,
        "assumed: no effect without ATS. The driver's threshold is 256 accesses to 2 MiB "
        "(UVM_PERF_ACCESS_COUNTER_THRESHOLD_DEFAULT in uvm_gpu_access_counters.c, 595.45.04, which "
        "migrates by default where there is ATS). A phase that reads such a block in lines of "
        "128 B makes 16384, so its first use is enough",
    ),
    "ats": (False, "assumed: an x86 host: no address translation services"),
    "one_pool": (False, "device memory of the card's own, by its data sheet"),
}
"""The driver's figures, and the host's, unless a card has others."""


_OVER_H200S_LINK = {
    "to_device_bytes_per_s": (51, "prefetch of 1 GiB in one call"),
    "link_bytes_per_s": (
        67.5,
        "eviction and prefetch of 2 GiB each at once ran at 21 to 24 and 44 to 46 GB/s; the "
        "middles, 22.5 and 45, together",
    ),
    "mapped_read_bytes_per_s": (51, "host pages read in place"),
    "mapped_write_bytes_per_s": (52.5, "a copy kernel's writes to mapped host memory"),
    "mapped_bytes_per_s": (84, "host pages read and written in place, both together"),
}
"""GB/s behind PCIe 5 x16, as measured on one H200."""


def _pcie(generation: int, to_device: float, to_host: float) -> _Figures:
    """Figures of PCIe x16, by the GB/s of explicit copies; those of pages are in proportion."""
    factor = 2.0 ** (5 - generation)
    raw = 63.0 / factor
    copied = (
        "copies as an H100 (copy engines, page-locked memory in huge pages)"
        if generation == 5
        else "copies as a kernel that copies over an H200's link"
    )
    figures = {
        f"copy_{name}_bytes_per_s": (
            f"{rate:g} GB/s",
            f"PCI Express {generation} x16: {raw:g} GB/s each way, of which {copied} reaches "
            f"{rate / raw:.2f}",
        )
        for name, rate in (("to_device", to_device), ("to_host", to_host))
    }
    figures["copy_link_bytes_per_s"] = (
        f"{100 / factor:g} GB/s",
        f"PCI Express {generation} x16: {2 * raw:g} GB/s both ways, of which an H100 reaches 0.79",
    )
    scaled = "" if generation == 5 else f", {factor:g} times the bandwidth of this link"
    for name, (rate, how) in _OVER_H200S_LINK.items():
        source = f"{_ON_H200}, PCIe 5 x16{scaled}: {how}"
        figures[name] = (f"{rate / factor:g} GB/s", source)
    return {
        **figures,
        "to_host_bytes_per_s": (
            f"{min(24.0, 51 / factor):g} GB/s",
            f"{_ON_H200}: 24 GB/s by prefetch to the host in any chunk of 8 MiB or more from 1 to "
            "8 threads; the time to populate host pages bounds it, and not a link that has more",
        ),
        "page_slowdown_s_per_byte": (
            f"{5 * factor:g} ms/GiB",
            f"{_NEXT_DAY}: a training step that moved 5.2 GB as pages took 21 ms longer than "
            "predicted without it, 4.3 ms per GiB; rounded up, and in proportion to the time that "
            "pages take (benchmarks/results/h200-step-beside.txt)",
        ),
        "mapped_slowdown_s_per_byte": (
            f"{2 * factor:g} ms/GiB",
            f"{_NEXT_DAY}: optimizer state that is used in place beside the backward pass, 1.8 and "
            "2.4 ms per GiB, in proportion to the time that it takes "
            "(benchmarks/results/h200-step-beside.txt)",
        ),
    }


def _same(rate: str, both: str, source: str, both_source: str, slowdown: str) -> _Figures:
    """Figures of a link whose pages, copies and kernels are taken to be as fast."""
    to_device, to_host = rate.split(" / ")
    names = ("to_device", "copy_to_device", "mapped_read")
    figures = dict.fromkeys((f"{it}_bytes_per_s" for it in names), (to_device, source))
    names = ("to_host", "copy_to_host", "mapped_write")
    figures |= dict.fromkeys((f"{it}_bytes_per_s" for it in names), (to_host, source))
    names = ("link", "copy_link", "mapped")
    figures |= dict.fromkeys((f"{it}_bytes_per_s" for it in names), (both, both_source))
    names = ("page_slowdown", "copy_slowdown", "mapped_slowdown")
    return figures | dict(
        zip(
            (f"{it}_s_per_byte" for it in names),
            ((it, f"assumed: {_BESIDE}") for it in slowdown.split(" / ")),
            strict=True,
        )
    )


_BESIDE = (
    "a quarter of the copy's own time, as of a kernel that copies over an H200's link: 5 ms of the "
    "20.5 ms that 1 GiB takes at 52.5 GB/s; 0.4 times that for bytes in place"
)
_FIRST_LOOK = "a first look into Grace Hopper (arXiv 2407.07850)"
_LPDDR5X = (
    "assumed: each direction has lanes of its own, but either way the bytes cross LPDDR5X, whose "
    "STREAM is 486 GB/s (arXiv 2407.07850), less than both directions together"
)
_COHERENT: _Figures = {
    "host_bytes": ("480 GB", "NVIDIA's data sheet of the GH200: up to 480 GB LPDDR5X"),
    "ats": (True, f"{_FIRST_LOOK}: CPU and GPU share the system's page table"),
}

_LINKS: Mapping[str, _Figures] = {
    "PCIe 3 x16": _pcie(3, 12.85, 13.1),
    "PCIe 4 x16": _pcie(4, 25.7, 26.2),
    "PCIe 5 x16": _pcie(5, 55, 55),
    "NVLink-C2C": {
        **_COHERENT,
        **_same(
            "375 GB/s / 297 GB/s",
            "486 GB/s",
            f"{_FIRST_LOOK}: explicit copies over NVLink-C2C; 450 GB/s each way by NVIDIA's data "
            "sheet. Pages that are prefetched, and kernels, are taken to be as fast",
            _LPDDR5X,
            "0.7 ms/GiB / 0.7 ms/GiB / 0.28 ms/GiB",
        ),
    },
    "half of NVLink-C2C": {
        **_COHERENT,
        "host_bytes": ("240 GB", "assumed: half of a Grace's 480 GB, which serves two GPUs"),
        **_same(
            "187 GB/s / 148 GB/s",
            "243 GB/s",
            "assumed: half of what a GH200 reaches: one Grace serves two GPUs",
            "assumed: half of what a Grace's LPDDR5X has: it serves two GPUs",
            "1.4 ms/GiB / 1.4 ms/GiB / 0.56 ms/GiB",
        ),
    },
    "one pool": {
        "host_bytes": (0, "CPU and GPU share one memory, all of which is device_bytes"),
        "one_pool": (True, "CPU and GPU share one memory, by the data sheet"),
        "ats": (True, "assumed: the GPU reads the CPU's page tables, as on Grace Hopper"),
        **_same(
            "116 GB/s / 116 GB/s",
            "116 GB/s",
            "half of the bandwidth of the memory: a copy reads and writes the same one. No plan "
            "makes such copies",
            "as one direction: it is the same memory",
            "2.3 ms/GiB / 2.3 ms/GiB / 0.9 ms/GiB",
        ),
    },
}


def _measured_product(share: int, of: str, how: str = "measured as bf16") -> str:
    return f"{how}; {share} % of the data sheet's {of} TFLOP/s"


_H200_PRODUCTS: _Figures = {
    "flops_per_s.bf16": (
        "660 TFLOP/s",
        f"{_ON_H200}: product of 8192 x 8192 matrices of random numbers through torch 2.11, "
        "repeated for 2 s; 67 % of the data sheet's 989 TFLOP/s, because the card's power bounds "
        "its clock",
    ),
    "flops_per_s.fp16": ("633 TFLOP/s", _measured_product(64, "989")),
    "flops_per_s.tf32": ("343 TFLOP/s", _measured_product(69, "495")),
    "flops_per_s.fp32": ("51 TFLOP/s", _measured_product(76, "67")),
    "flops_per_s.fp8": (
        "1200 TFLOP/s",
        _measured_product(61, "1979", "measured as bf16, with torch._scaled_mm and one scale"),
    ),
}
_ATTENTION: _Figures = {
    "attention_flops_per_s": (
        "541 TFLOP/s",
        "measured on one H100 80 GB, driver 580.159.04, 2026-11-27: what torch 2.11 chooses, "
        "cuDNN, with heads of 128; the median of three shapes. Flash attention reaches 284, and "
        f"heads of 64 393 ({_KERNELS})",
    ),
    "attention_backward_flops_per_s": (
        "443 TFLOP/s",
        "measured on one H100 as the forward pass; flash attention reaches 257, and heads of 64 "
        f"308 ({_KERNELS})",
    ),
}
_SAME_CHIP: _Figures = {
    name: (value, f"NVIDIA's data sheet: the H200's chip and peak, of which an H200: {text}")
    for name, (value, text) in _H200_PRODUCTS.items()
}
_CHIP_OF_GH200: _Figures = {
    **_SAME_CHIP,
    **{
        name: (value, f"NVIDIA's data sheet: the H100's chip and peak, of which an H100: {text}")
        for name, (value, text) in _ATTENTION.items()
    },
}
_COPIES = "copy engine, page-locked memory in huge pages, chunks of 32 to 256 MiB"
_COPIED_BOTH_WAYS: _Figures = {
    "copy_link_bytes_per_s": (
        "100 GB/s",
        f"{_ON_H100}, PCIe 5 x16: both copy engines at once, 50 GB/s each way, {_COPIES}",
    ),
}
_STAGED = "benchmarks/results/h200-staged-copies.txt"
_GH200: _Figures = {
    **_CHIP_OF_GH200,
    "memory_bytes_per_s": (
        "3.4 TB/s",
        f"{_FIRST_LOOK}: STREAM on the GPU; 4 TB/s by NVIDIA's data sheet",
    ),
    "unvectorised_bytes_per_s": (
        "2 TB/s",
        "assumed: as measured on one H200: instructions bound such kernels, and the GPU chip is "
        "the same",
    ),
}

_MEASURED: Mapping[str, _Figures] = {
    "a100-40-pcie": {"fault_batch_s": ("45 us", "the G10 artifact (MICRO 2023): an A100 40 GB")},
    "gb10": {
        f"flops_per_s.{name}": (
            f"{peak:g} TFLOP/s",
            "assumed: NVIDIA publishes 1 PFLOP/s in fp4 with sparsity and 31 TFLOP/s in fp32 (Hot "
            "Chips 2025), from which the other peaks follow as on an RTX PRO 6000. CUTLASS reaches "
            "356 of the 500 in fp4 and 188 of the 250 in fp8 "
            "(forums.developer.nvidia.com/t/359960): 0.72",
        )
        for name, peak in zip(_PRECISIONS, (22.3, 45, 90, 90, 180), strict=True)
    },
    "gh200-96": _GH200,
    "gh200-144": {
        **_GH200,
        "device_bytes": (
            "144 GB",
            "NVIDIA's data sheet of the GH200: 144 GB HBM3e. CUDA's own total could not be checked",
        ),
        "memory_bytes_per_s": (
            "4.17 TB/s",
            "NVIDIA's data sheet of the GH200: 4.9 TB/s, times 0.85: the share of its 4 TB/s that "
            "the 96 GB version reaches in STREAM (arXiv 2407.07850)",
        ),
    },
    "gh200-quad": {
        **_GH200,
        "host_bytes": ("128 GB", "the quad nodes of Alps (arXiv 2408.11556): 128 GB for each GPU"),
        **dict.fromkeys(
            ("to_device_bytes_per_s", "copy_to_device_bytes_per_s", "mapped_read_bytes_per_s"),
            ("416 GB/s", "the quad nodes of Alps (arXiv 2408.11556): 411 to 421 GB/s, the middle"),
        ),
        **dict.fromkeys(
            ("to_host_bytes_per_s", "copy_to_host_bytes_per_s", "mapped_write_bytes_per_s"),
            ("170 GB/s", "the quad nodes of Alps (arXiv 2408.11556)"),
        ),
    },
    "h100-sxm": {
        **_SAME_CHIP,
        **_ATTENTION,
        **_COPIED_BOTH_WAYS,
        **dict.fromkeys(
            ("copy_to_device_bytes_per_s", "copy_to_host_bytes_per_s"),
            ("55 GB/s", f"{_ON_H100}: {_COPIES}"),
        ),
        "device_bytes": ("79.2 GiB", f"{_ON_H100}: total reported by CUDA"),
        "unvectorised_bytes_per_s": (
            "1.89 TB/s",
            "measured on one H100 80 GB, driver 580.159.04, 2026-11-27: median of nine kernels, "
            f"each with three shapes, 1.45 to 2.43 TB/s ({_KERNELS})",
        ),
        "copy_slowdown_s_per_byte": (
            "1 ms/GB",
            f"{_ON_H100}: matrix products beside both copies at 100 GB/s take 10 % longer; "
            "elementwise work 4 %",
        ),
    },
    "h200": {
        **_H200_PRODUCTS,
        **_ATTENTION,
        **_COPIED_BOTH_WAYS,
        "device_bytes": (150109880320, f"{_ON_H200}: total reported by CUDA"),
        "memory_bytes_per_s": (
            "4.36 TB/s",
            f"{_ON_H200}: sum of two fp32 vectors of 2 GiB into a third, reads and writes "
            "together; 91 % of the data sheet's 4.8 TB/s",
        ),
        "unvectorised_bytes_per_s": (
            "2 TB/s",
            "measured on one H200, driver 580.159.04, torch 2.11, 2026-11-27: casts of 16.8 "
            "million numbers to float32 in a step of LoRA, 50 us each. Such kernels are bound by "
            "their instructions: an H100, with slower memory, reaches 1.89 TB/s",
        ),
        "launch_s": ("4.9 us", f"{_ON_H200}: 30,000 tiny kernels in 147 ms"),
        "copy_to_device_bytes_per_s": (
            "54.0 GB/s",
            f"{_NEXT_DAY}: from pinned host memory by way of plain device memory ({_STAGED})",
        ),
        "copy_to_host_bytes_per_s": (
            "54.4 GB/s",
            f"{_NEXT_DAY}: to pinned host memory by way of plain device memory ({_STAGED})",
        ),
        "copy_slowdown_s_per_byte": (
            "1.5 ms/GiB",
            f"{_NEXT_DAY}: matrix products beside such copies slow by 0.6 to 2.9 ms per GiB; the "
            f"median ({_STAGED})",
        ),
        "ats": (
            False,
            f"{_ON_H200}: CUDA's attribute PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES is 0",
        ),
    },
}
"""What is known of a card itself."""


def _digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{float(f'{value:.3g}'):g}"


def _by_rule(card: Card) -> dict[str, tuple[Any, str]]:
    """Rates of a card's own by its published peaks."""
    shares, peaks = _SHARES[card.shares], dict(zip(_PRECISIONS, card.peaks, strict=True))
    sheet = f"NVIDIA's data sheet ({card.sheet})"
    figures: dict[str, tuple[Any, str]] = {"device_bytes": (card.memory, _TOTAL)}
    rates: dict[str, float] = {}
    for name, peak in peaks.items():
        used = name
        if not peak:  # no such tensor cores
            used = {"fp8": "fp16"}.get(name, "fp32")
        rates[name] = peaks[used] * shares.products[used]
        source = f"{sheet}: {peaks[used]:g} TFLOP/s dense in {used}, times "
        source += f"{shares.products[used]}: {shares.products_why}"
        if used != name:
            source = f"assumed: such products are taken to run in {used}. {source}"
        figures[f"flops_per_s.{name}"] = (f"{_digits(rates[name])} TFLOP/s", source)
    memory = card.bandwidth * shares.memory
    figures["memory_bytes_per_s"] = (
        f"{_digits(memory)} TB/s",
        f"{sheet}: {card.bandwidth:g} TB/s, times {shares.memory}: {shares.memory_why}",
    )
    figures["unvectorised_bytes_per_s"] = (
        f"{_digits(memory * shares.unvectorised)} TB/s",
        f"assumed: {shares.unvectorised_why}",
    )
    fused = max(rates["fp16"], rates["bf16"])
    for name, share in (("attention", 0.82), ("attention_backward", 0.67)):
        figures[f"{name}_flops_per_s"] = (
            f"{_digits(fused * share)} TFLOP/s",
            f"{sheet}: as flops_per_s in 16 bits, times {share}: the share that an H100 reaches",
        )
    figures["copy_slowdown_s_per_byte"] = (
        f"{_digits(3.05 / memory)} ms/GB",
        "assumed: 1 ms/GB as on an H100, in proportion to the bandwidth of device memory",
    )
    return figures


@cache
def card_profile(name: str) -> Mapping[str, Any] | None:
    """The profile of this name, as the keys of a file; None for one that umem does not have."""
    card = CARDS.get(name)
    if card is None:
        return None
    figures = {**_EVERYWHERE, **_by_rule(card), **_LINKS[card.link]}
    if name != "h200":  # on which they were measured
        figures = {
            figure: (value, f"{_ASSUMED}as {text}" if text.startswith(_OF_H200_ITSELF) else text)
            for figure, (value, text) in figures.items()
        }
    return _as_file(name, card.description, {**figures, **_MEASURED.get(name, {})})


def _as_file(name: str, description: str, figures: _Figures) -> dict[str, Any]:
    data: dict[str, Any] = {"name": name, "description": description, "flops_per_s": {}}
    for figure, (value, text) in figures.items():
        outer, _, inner = figure.partition(".")
        below = data[outer] if inner else data
        is_assumed = text.startswith(_ASSUMED)
        kind = "assumption" if is_assumed else "source"
        below[inner or outer] = {"value": value, kind: text.removeprefix(_ASSUMED)}
    return data


_ASSUMED = "assumed: "
_OF_H200_ITSELF = ("measured", "derived")
