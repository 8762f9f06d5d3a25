"""What users reach for, and whether it works here."""

from __future__ import annotations

from umem.capabilities import Capabilities
from umem.doctor._facts import Environment
from umem.doctor._remedies import install_cupy, install_umem
from umem.doctor._report import Check, Feature, Verdict
from umem.doctor._versions import dotted, version_numbers
from umem.telemetry import knows_release

__all__ = ["features"]

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
