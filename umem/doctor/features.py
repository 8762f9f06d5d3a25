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


_OUT_OF_MEMORY = "except torch.OutOfMemoryError"
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
        _out_of_memory(environment, failures),
        _sharing(environment, failures, "numba-cuda", _NUMBA, install_command("numba")),
        _sharing(environment, failures, "cupy", _CUPY, environment.install_cupy),
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
