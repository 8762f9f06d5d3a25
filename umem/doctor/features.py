"""Features that users reach for, and whether each works on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from umem.core.install import install_command
from umem.doctor.facts import Environment, dotted, version_numbers
from umem.hardware.capabilities import Capabilities

__all__ = ["Feature", "Verdict", "features"]


class Verdict(StrEnum):
    """Whether a feature works here."""

    YES = "yes"
    PARTLY = "partly"
    NO = "no"


@dataclass(frozen=True)
class Feature:
    """A feature, whether it works on this machine, and why."""

    name: str
    verdict: Verdict
    why: str
    remedy: str = ""


# Features of torch under the swap, the same on every machine where the swap works.

_WORKS = {
    "statistics: memory_allocated, memory_stats, memory_summary, peaks": (
        "umem answers in torch's vocabulary, and by tensor class"
    ),
    "Tensor.record_stream": "a block waits for the streams that used it before it is reused",
    "out-of-memory recovery: find_executable_batch_size": (
        "the error is a RuntimeError that reads as torch's own does"
    ),
    "CUDA graphs and private pools: torch.cuda.graph": (
        "capture and replay keep their blocks in a separate pool"
    ),
    "torch.compile, default mode": "it asks the allocator for nothing unusual",
    "memory that a program keeps: __cuda_array_interface__, DLPack, untyped_storage()": (
        "the memory stays where it is from then on, and step() waits for its update"
    ),
    "DDP, FSDP2 and NCCL, one process per GPU": (
        "NCCL takes umem's buffers, managed ones at the speed of device memory"
    ),
}
"""Name -> why it works."""

_FAILS = {
    'torch.compile(mode="reduce-overhead")': (
        "cudagraph trees call checkPoolLiveAllocations, which torch offers for its own allocator "
        "only",
        'use mode="default" or "max-autotune-no-cudagraphs", or capture with torch.cuda.graph',
    ),
    "torch.backends.cudnn.benchmark = True": (
        "the search asks for the allocator's largest cached block (cacheInfo), which torch does "
        "not pass on: it stays False, with one warning",
        "none needed: convolutions use what cuDNN takes without a search",
    ),
    "CUDA IPC: CUDA tensors through torch.multiprocessing": (
        "the handle comes from shareIpcHandle, which torch offers for its own allocator only",
        "share CPU tensors, or exchange through NCCL",
    ),
    "torch.cuda.MemPool": (
        "its constructor calls createOrIncrefPool, which torch offers for its own allocator only; "
        "the pools of torch.cuda.graph work",
        "choose the memory kind by tensor class: with umem.tensor_class(...)",
    ),
    "memory history: torch.cuda.memory._record_memory_history": (
        "torch records it inside its own allocator only",
        "torch.cuda.memory_snapshot() and umem.tensors() show live blocks",
    ),
    "expandable segments: PYTORCH_CUDA_ALLOC_CONF": (
        "torch's allocator settings have no effect under the swap",
        "none needed: umem's plain device memory is in expandable segments of its own",
    ),
}
"""Name -> why it does not work, and what to use instead."""

_OUT_OF_MEMORY = "except torch.OutOfMemoryError"
_ADDRESSES = "addresses kept from step to step: data_ptr(), tables of pointers"
_HINTS = "umem.cuda: prefetch, advise"
_DISCARD = "discard"
_SYSTEM = "system memory (ATS or HMM): kind system"
_NUMBA = "numba arrays in the same memory: share: [numba]"
_CUPY = "CuPy arrays in the same memory: share: [cupy]"
_EVENTS = "migrations and faults in umem.profile()"
_COPIES = "copies in umem.profile(), through CUPTI"


def features(environment: Environment, failures: Sequence[str]) -> tuple[Feature, ...]:
    """Say of each feature whether it works; `failures` keep the swap from working."""
    return (
        _swap(failures),
        *(_under_swap(name, why, failures) for name, why in _WORKS.items()),
        _out_of_memory(environment, failures),
        *(Feature(name, Verdict.NO, *said) for name, said in _FAILS.items()),
        _sharing(environment, failures, "numba-cuda", _NUMBA, install_command("numba")),
        _sharing(environment, failures, "cupy", _CUPY, environment.install_cupy),
        _addresses(failures),
        *_device_features(environment.devices or ()),
        _events(environment),
        _copies(environment),
    )


def _swap(failures: Sequence[str]) -> Feature:
    name = "one-line swap: umem.enable()"
    if failures:
        why = f"see above: {', '.join(failures)}"
        return Feature(name, Verdict.NO, why, "mend what is marked FAIL")
    why = "torch, RMM, native library, driver and GPU fit together"
    return Feature(name, Verdict.YES, why)


def _under_swap(name: str, why: str, failures: Sequence[str]) -> Feature:
    if failures:
        return Feature(name, Verdict.NO, f"needs the one-line swap; {why}")
    return Feature(name, Verdict.YES, why)


def _out_of_memory(environment: Environment, failures: Sequence[str]) -> Feature:
    if environment.guard is None or environment.guard.problem:
        why = "the guard raises it, and there is none: the error is a RuntimeError"
        remedy = 'except RuntimeError, and look for "CUDA out of memory." in its text'
        return Feature(_OUT_OF_MEMORY, Verdict.NO, why, remedy)
    return _under_swap(_OUT_OF_MEMORY, "the guard raises torch's own error", failures)


def _addresses(failures: Sequence[str]) -> Feature:
    why = "state, gradients and weights may get other memory: docs/addresses.md"
    if failures:
        return _under_swap(_ADDRESSES, why, failures)
    remedy = "umem.hold(tensors) before the addresses are asked for"
    return Feature(_ADDRESSES, Verdict.PARTLY, why, remedy)


def _sharing(
    environment: Environment, failures: Sequence[str], package: str, name: str, install: str
) -> Feature:
    if environment.packages[package] is None:
        return Feature(name, Verdict.NO, f"{package} is not installed", install)
    if environment.packages["rmm"] is None:
        why = "it goes through RMM's Python package, which is not installed"
        return Feature(name, Verdict.NO, why, environment.install_umem)
    why = "its allocator is served from umem's, with the same limits"
    return _under_swap(name, why, failures)


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
    if not all(device.discard for device in devices):
        why = "it came with CUDA 13, and needs concurrent managed access on every GPU"
        return Feature(_DISCARD, Verdict.NO, why, "update the driver to 580 or newer")
    if devices[0].bindings_version[0] < 13:
        why = "the driver has it; umem.cuda reaches it through cuda-python 13 only"
        remedy = f"with a CUDA 13 torch: {install_command('cuda13')}"
        return Feature(_DISCARD, Verdict.PARTLY, why, remedy)
    return Feature(_DISCARD, Verdict.YES, "driver and cuda-python have it")


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
    if environment.packages["numba"] is None:
        return Feature(_EVENTS, Verdict.NO, "numba is not installed", environment.install_umem)
    # Imports numba, without which the doctor must run.
    from umem.telemetry import knows_release

    release = environment.devices[0].driver_release
    if release is not None and knows_release(release):
        return Feature(_EVENTS, Verdict.YES, "the driver's own event queue has all of them")
    why = f"the event queue of driver {release or 'of unknown release'} is not known to umem"
    return Feature(_EVENTS, Verdict.PARTLY, f"{why}; CUPTI is asked, which may lose records")


def _copies(environment: Environment) -> Feature:
    version = environment.packages["cupti-python"]
    if version is None:
        why = "cupti-python is not installed"
        return Feature(_COPIES, Verdict.NO, why, install_command("telemetry"))
    if not environment.devices:
        return Feature(_COPIES, Verdict.NO, "no usable GPU")
    serves = environment.devices[0].driver_version
    if version_numbers(version) > serves:
        why = f"cupti-python {version} is newer than the driver, which serves {dotted(serves)}"
        remedy = f"pip install 'cupti-python=={dotted(serves)}.*'"
        return Feature(_COPIES, Verdict.PARTLY, why, remedy)
    return Feature(_COPIES, Verdict.YES, f"cupti-python {version}")
