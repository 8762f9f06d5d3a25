"""Every foreign call of umem's Python side: CUDA's runtime and driver, and NVML.

Prefetch and advice calls take a location since cuda-python 13.0; 12.9 has that form under a ``_v2``
name; drivers older than CUDA 12.2 take a device number, with -1 for the host. The rest of umem sees
one form. cuda.core's ManagedBuffer does not replace these calls: cuda-python before 13.4
does not install it, and it has neither host NUMA nodes on CUDA 12 nor the last prefetch location.

Operations go through the runtime, which makes the primary context current in any thread that
calls. Questions about the machine go through the driver and NVML, which create no context:
umem asks them before torch starts CUDA.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

from umem.core.errors import CudaError, NativeLibraryError, UnsupportedError
from umem.core.install import install_command
from umem.cuda.targets import Location, Range

__all__ = [
    "accessed_by",
    "advise",
    "allocate_managed",
    "bindings_version",
    "compile_kernels",
    "create_stream",
    "device_attribute",
    "device_count",
    "device_name",
    "device_pci_address",
    "device_total_bytes",
    "discard",
    "driver_release",
    "driver_version",
    "free",
    "is_capturing",
    "is_read_mostly",
    "launch",
    "memory_type",
    "nvml_memory_bytes",
    "nvml_nvlink_c2c",
    "nvml_pcie_link",
    "nvml_process_bytes",
    "prefetch",
    "range_location",
    "relaxed_capture",
]

_CUDA_12_2 = 12020
"""First driver with locations (``cuMemPrefetchAsync_v2``), in CUDA's own version coding."""

_CUDA_13 = 13000
"""First driver with discard."""

_MOST_PROCESSES = 256
_UNKNOWN_BYTES = 1 << 60
"""NVML's word for a process's memory that it does not know is a larger number."""

_HOST_DEVICE_NUMBER = -1  # cudaCpuDeviceId
_INVALID_DEVICE_NUMBER = -2  # cudaInvalidDeviceId

_LOCATION_TYPES = {
    "device": "cudaMemLocationTypeDevice",
    "host": "cudaMemLocationTypeHost",
    "host_numa": "cudaMemLocationTypeHostNuma",
}

# CUmemLocationType and CUmem_range_attribute of cuda.h.
_DEVICE_TYPE, _HOST_TYPE, _HOST_NUMA_TYPE = 1, 2, 3
_READ_MOSTLY, _ACCESSED_BY = 1, 3
_RANGE_LOCATIONS = {"preferred": (2, 5, 6), "last_prefetch": (4, 7, 8)}
"""The attribute before CUDA 12.2, and since then those of the location's type and number."""


@cache
def _modules() -> tuple[Any, Any]:
    """Import cuda-python's (runtime, driver); `NativeLibraryError` when it is not installed."""
    try:
        from cuda.bindings import driver, runtime
    except ImportError as error:
        raise NativeLibraryError(
            f"umem.cuda needs cuda-python, which cannot be imported ({error}); install it "
            f"with: {install_command('cuda13')}; for a CUDA 12 torch: {install_command('cuda12')}"
        ) from error
    return runtime, driver


def _runtime() -> Any:
    return _modules()[0]


def _driver() -> Any:
    return _modules()[1]


@cache
def _libcuda() -> ctypes.CDLL:
    """Load the driver's library, for the one call that cuda-python offers only in part."""
    library = ctypes.CDLL("libcuda.so.1")
    library.cuMemRangeGetAttribute.restype = ctypes.c_int
    library.cuMemRangeGetAttribute.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_ulonglong,
        ctypes.c_size_t,
    ]
    return library


@cache
def _nvml() -> ctypes.CDLL | None:
    """Load and start NVML; None where it is not installed, as in some containers and under WSL."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def _call(name: str, *arguments: Any, subject: str = "") -> Any:
    """Call a function of the runtime or the driver.

    Its result, or a `CudaError` that names the call, the subject and the cause.
    """
    library = _runtime() if name.startswith("cuda") else _driver()
    error, *values = getattr(library, name)(*arguments)
    _check(name, error, subject)
    return values[0] if values else None


def _check(call: str, error: Any, subject: str = "") -> None:
    if int(error) == 0:
        return
    if call.startswith("cuda"):
        library, prefix, code = _runtime(), "cuda", _runtime().cudaError_t(error)
    else:
        library, prefix, code = _driver(), "cu", _driver().CUresult(error)
    name = getattr(library, f"{prefix}GetErrorName")(code)[1].decode()
    description = getattr(library, f"{prefix}GetErrorString")(code)[1].decode()
    of = f" for {subject}" if subject else ""
    raise CudaError(f"{call} failed{of}: {name} ({int(error)}): {description}")


@cache
def driver_version() -> int:
    """Return the newest CUDA that the driver serves, as 1000 * major + 10 * minor.

    ``UnsupportedError`` without an NVIDIA driver.
    """
    try:
        return int(_call("cuDriverGetVersion"))
    except CudaError:
        raise
    except RuntimeError as error:
        # cuda-python raises it where libcuda.so.1 cannot be loaded.
        raise UnsupportedError(
            f"no NVIDIA driver on this machine ({error}); install NVIDIA's driver, or start the "
            "container with --gpus all"
        ) from error


@cache
def bindings_version() -> int:
    """Return the CUDA that cuda-python was built for, as 1000 * major + 10 * minor."""
    return int(_call("cudaRuntimeGetVersion"))


def _start_driver() -> None:
    """Initialise the driver, which creates no context."""
    driver_version()
    error = int(_driver().cuInit(0)[0])
    if error == int(_driver().CUresult.CUDA_ERROR_NO_DEVICE):
        raise UnsupportedError("the driver sees no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES")
    _check("cuInit", error)


def device_count() -> int:
    """Count the devices this process sees (CUDA_VISIBLE_DEVICES applies)."""
    _start_driver()
    return int(_call("cuDeviceGetCount"))


def _device(number: int) -> Any:
    _start_driver()
    return _call("cuDeviceGet", number, subject=f"device {number}")


def device_name(number: int) -> str:
    """Return the device's marketing name."""
    return _text(_call("cuDeviceGetName", 256, _device(number), subject=f"device {number}"))


def device_total_bytes(number: int) -> int:
    """Return the device's memory in bytes."""
    return int(_call("cuDeviceTotalMem", _device(number), subject=f"device {number}"))


def device_attribute(number: int, name: str) -> int:
    """Return one device attribute by its name in ``CUdevice_attribute``, less the prefix."""
    attribute = getattr(_driver().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    subject = f"{name} of device {number}"
    return int(_call("cuDeviceGetAttribute", attribute, _device(number), subject=subject))


def device_pci_address(number: int) -> str:
    """Return the device's address on PCI, which CUDA and NVML agree on."""
    return _text(_call("cuDeviceGetPCIBusId", 32, _device(number), subject=f"device {number}"))


def _text(raw: Any) -> str:
    return bytes(raw).split(b"\0", 1)[0].decode()


class _NvmlMemory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _NvmlProcess(ctypes.Structure):
    _fields_ = [
        ("number", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


def _nvml_handle(library: ctypes.CDLL, pci_address: str) -> ctypes.c_void_p | None:
    handle = ctypes.c_void_p()
    found = library.nvmlDeviceGetHandleByPciBusId_v2(pci_address.encode(), ctypes.byref(handle))
    return handle if found == 0 else None


def _nvml_number(pci_address: str, name: str) -> int | None:
    """Return one unsigned number of a device; None where NVML or the device lacks it."""
    library = _nvml()
    handle = None if library is None else _nvml_handle(library, pci_address)
    function = getattr(library, name, None)
    if handle is None or function is None:
        return None
    value = ctypes.c_uint()
    return int(value.value) if function(handle, ctypes.byref(value)) == 0 else None


def driver_release() -> str | None:
    """Return the driver's release ("580.159"), None without NVML."""
    library = _nvml()
    if library is None:
        return None
    text = ctypes.create_string_buffer(96)
    failed = library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text)))
    return None if failed else text.value.decode()


def nvml_memory_bytes(pci_address: str) -> tuple[int, int] | None:
    """Return (total, free) bytes of the whole card, None where NVML cannot say."""
    library = _nvml()
    handle = None if library is None else _nvml_handle(library, pci_address)
    if library is None or handle is None:
        return None
    memory = _NvmlMemory()
    if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
        return None
    return int(memory.total), int(memory.free)


def nvml_process_bytes(pci_address: str) -> dict[int, int]:
    """Return each process's bytes on the card, CUDA's own among them, by NVML's number of it.

    Empty where NVML cannot say. In a container without the host's processes, the numbers are the
    host's.
    """
    library = _nvml()
    handle = None if library is None else _nvml_handle(library, pci_address)
    read = getattr(library, "nvmlDeviceGetComputeRunningProcesses_v3", None)
    if handle is None or read is None:
        return {}
    count, found = ctypes.c_uint(_MOST_PROCESSES), (_NvmlProcess * _MOST_PROCESSES)()
    if read(handle, ctypes.byref(count), found) != 0:
        return {}
    return {
        each.number: each.used_bytes
        for each in found[: count.value]
        if each.used_bytes < _UNKNOWN_BYTES
    }


def nvml_pcie_link(pci_address: str) -> tuple[int, int] | None:
    """Return (generation, lanes) that card and slot can do, None where NVML cannot say."""
    generation = _nvml_number(pci_address, "nvmlDeviceGetMaxPcieLinkGeneration")
    lanes = _nvml_number(pci_address, "nvmlDeviceGetMaxPcieLinkWidth")
    return None if generation is None or lanes is None else (generation, lanes)


def nvml_nvlink_c2c(pci_address: str) -> bool | None:
    """Tell whether NVLink-C2C joins the card to its CPU, None where NVML cannot say."""
    enabled = _nvml_number(pci_address, "nvmlDeviceGetC2cModeInfoV")
    return None if enabled is None else enabled != 0


def memory_type(address: int) -> str:
    """Return CUDA's type of the memory at `address`: ``cudaMemoryTypeManaged``, and so on."""
    _start_driver()
    attributes = _call("cudaPointerGetAttributes", address, subject=f"{address:#x}")
    return str(_runtime().cudaMemoryType(attributes.type).name)


def allocate_managed(size_bytes: int) -> int:
    """Allocate managed memory outside of every allocator; return its address."""
    every_stream = _runtime().cudaMemAttachGlobal
    subject = f"{size_bytes} bytes"
    return int(_call("cudaMallocManaged", size_bytes, every_stream, subject=subject))


def free(address: int) -> None:
    """Free memory from `allocate_managed`."""
    _call("cudaFree", address, subject=f"{address:#x}")


def prefetch(range_: Range, location: Location, stream: int) -> None:
    """Queue the migration of a range."""
    name, where = _form("cudaMemPrefetchAsync", location)
    flags = () if isinstance(where, int) else (0,)
    place = range_.address, range_.size_bytes, where
    _call(name, *place, *flags, stream, subject=f"{range_} to {location}")


def create_stream(priority: int) -> int:
    """Create a stream of the current device, which does not wait for the default one.

    Returns its handle. A lower number is a higher priority.
    """
    flags = _runtime().cudaStreamNonBlocking
    stream = _call("cudaStreamCreateWithPriority", flags, priority, subject=f"priority {priority}")
    return int(stream)


def is_capturing(stream: int) -> bool:
    """Whether a stream, by its handle, is captured into a graph.

    True also for the default stream while a capture forbids that stream to anything.
    """
    error, status = _runtime().cudaStreamIsCapturing(stream)
    if int(error) == 0:
        return int(status) != 0  # cudaStreamCaptureStatusNone
    if error != _runtime().cudaError_t.cudaErrorStreamCaptureImplicit:
        _check("cudaStreamIsCapturing", error, subject=f"stream {stream:#x}")
    return True


def compile_kernels(source: str, name: str, device: int, kernels: Sequence[str]) -> list[Any]:
    """Compile CUDA C++ for the current device, and load it for the life of the process.

    The kernels of `source` are ``extern "C"``; `name` is the program's in errors. Returns for each
    kernel what :func:`launch` takes. ``NativeLibraryError`` without NVRTC, ``CudaError`` where it
    does not compile or load.
    """
    try:
        from cuda.bindings import nvrtc

        _, program = nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], [])
    except (ImportError, RuntimeError) as error:  # RuntimeError: there is no such library
        raise NativeLibraryError(
            f"NVRTC, which compiles {name}, cannot be loaded: {error}; torch's wheels for CUDA "
            "bring it, in nvidia-cuda-nvrtc"
        ) from error
    capability = "".join(
        str(device_attribute(device, f"COMPUTE_CAPABILITY_{it}")) for it in ("MAJOR", "MINOR")
    )
    found = nvrtc.nvrtcCompileProgram(program, 1, [f"-arch=sm_{capability}".encode()])[0]
    if int(found) != 0:
        log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
        nvrtc.nvrtcGetProgramLog(program, log)
        raise CudaError(f"NVRTC refused {name}: {found.name}: {bytes(log).decode().strip()}")
    image = bytearray(nvrtc.nvrtcGetCUBINSize(program)[1])
    nvrtc.nvrtcGetCUBIN(program, image)
    nvrtc.nvrtcDestroyProgram(program)
    _call("cudaSetDevice", device)  # makes its context current in this thread
    module = _call("cuModuleLoadData", bytes(image), subject=name)
    return [_call("cuModuleGetFunction", module, it.encode(), subject=it) for it in kernels]


def launch(
    kernel: Any, grid: tuple[int, int], threads: int, stream: int, parameters: int, device: int
) -> None:
    """Launch a kernel on a stream of the current device, whose number is `device`.

    `parameters` is the address of an array of the parameters' addresses.
    """
    x, y = grid
    _call("cudaSetDevice", device)  # a thread may have used no CUDA yet, but for cached memory
    _check(
        "cuLaunchKernel",
        _driver().cuLaunchKernel(kernel, x, y, 1, threads, 1, 1, 0, stream, parameters, 0)[0],
    )


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Allow calls that a capture in this thread would forbid, such as waiting for an event."""
    modes = _runtime().cudaStreamCaptureMode
    before = _call("cudaThreadExchangeStreamCaptureMode", modes.cudaStreamCaptureModeRelaxed)
    try:
        yield
    finally:
        _call("cudaThreadExchangeStreamCaptureMode", before)


def advise(range_: Range, advice: str, location: Location) -> None:
    """Give advice by its name in ``cudaMemoryAdvise``, less the prefix ``cudaMemAdvise``."""
    name, where = _form("cudaMemAdvise", location)
    value = getattr(_runtime().cudaMemoryAdvise, f"cudaMemAdvise{advice}")
    subject = f"{advice}, {location}, {range_}"
    _call(name, range_.address, range_.size_bytes, value, where, subject=subject)


def discard(range_: Range, stream: int) -> None:
    """Queue the discarding of a range's contents."""
    name, instead = "cudaMemDiscardBatchAsync", "leave the discard out: it saves a migration"
    if driver_version() < _CUDA_13:
        raise UnsupportedError(f"{name} needs a driver for CUDA 13 (580 or newer); {instead}")
    if not hasattr(_runtime(), name):
        raise UnsupportedError(
            f"{name} needs cuda-python 13, and this one is for CUDA "
            f"{bindings_version() // 1000}; {instead}"
        )
    place = [range_.address], [range_.size_bytes], 1
    _call(name, *place, 0, stream, subject=str(range_))


def is_read_mostly(range_: Range) -> bool:
    """Tell whether every page of the range has read-mostly advice."""
    return _range_attribute(_READ_MOSTLY, range_, 1)[0] == 1


def accessed_by(range_: Range) -> tuple[Location, ...]:
    """Return the processors that all pages have accessed-by advice for."""
    # Every device and the host; unused places are filled with the invalid device's number.
    numbers = _range_attribute(_ACCESSED_BY, range_, device_count() + 1)
    return tuple(_numbered(number) for number in numbers if number != _INVALID_DEVICE_NUMBER)


def _form(name: str, location: Location) -> tuple[str, Any]:
    """Return the name of a call for this cuda-python, and a location or device number for it."""
    if bindings_version() >= _CUDA_13:
        return name, _location(location)
    if driver_version() >= _CUDA_12_2:
        return f"{name}_v2", _location(location)
    return name, _device_number(location)


def _location(location: Location) -> Any:
    runtime = _runtime()
    native = runtime.cudaMemLocation()
    native.type = getattr(runtime.cudaMemLocationType, _LOCATION_TYPES[location.kind])
    native.id = location.number
    return native


def _device_number(location: Location) -> int:
    if location.kind == "device":
        return location.number
    if location.kind == "host":
        return _HOST_DEVICE_NUMBER
    raise UnsupportedError(
        f"{location} needs a driver for CUDA 12.2 or newer; update it, or use Location.host()"
    )


def _numbered(number: int) -> Location:
    return Location.host() if number == _HOST_DEVICE_NUMBER else Location.device(number)


def _range_attribute(attribute: int, range_: Range, count: int) -> list[int]:
    # Not through cuda-python: up to 13.0 it refuses the attributes that come in two parts.
    values = (ctypes.c_int * count)()
    error = _libcuda().cuMemRangeGetAttribute(
        values, ctypes.sizeof(values), attribute, range_.address, range_.size_bytes
    )
    _check("cuMemRangeGetAttribute", error, subject=str(range_))
    return list(values)


def range_location(range_: Range, which: Literal["preferred", "last_prefetch"]) -> Location | None:
    """Return the preferred or last prefetch location of all pages; None where they differ."""
    device_attribute, type_attribute, number_attribute = _RANGE_LOCATIONS[which]
    if driver_version() < _CUDA_12_2:
        device = _range_attribute(device_attribute, range_, 1)[0]
        return None if device == _INVALID_DEVICE_NUMBER else _numbered(device)
    kind = _range_attribute(type_attribute, range_, 1)[0]
    if kind == _DEVICE_TYPE:
        return Location.device(_range_attribute(number_attribute, range_, 1)[0])
    if kind == _HOST_NUMA_TYPE:
        return Location.host_numa(_range_attribute(number_attribute, range_, 1)[0])
    return Location.host() if kind == _HOST_TYPE else None
